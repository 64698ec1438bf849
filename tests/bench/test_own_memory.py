"""Free memory that benchmarks make ready."""

import pytest

from loadstone.bench import own_memory as module
from loadstone.bench.own_memory import BLOCK, own_memory, touch_free_memory
from loadstone.bench.process import status_bytes
from loadstone.loader.files import memory
from loadstone.loader.files.readahead import advise
from loadstone.loader.ranges import ByteRange

SIZE = 64 * BLOCK


def test_one_page_of_each_block_is_kept_while_it_is_used() -> None:
    before = status_bytes("RssAnon")
    with own_memory(SIZE) as words:
        held = status_bytes("RssAnon") - before
    assert words == "128 MiB of free memory touched, in pieces under 2 MiB"
    assert 64 * 4096 / 2 <= held <= SIZE / 8
    assert status_bytes("RssAnon") - before < held


def test_half_of_what_is_there_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 5 * BLOCK)
    with own_memory(SIZE) as words:
        assert words.startswith("4 MiB")
    monkeypatch.setattr(memory, "available", lambda: BLOCK)
    with own_memory(SIZE) as words:
        assert words == "free memory as it is"


def test_touched_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    most = [0]

    def counted(view: memoryview, span: ByteRange, advice: int) -> bool:
        done = advise(view, span, advice)
        most.append(status_bytes("RssAnon"))
        return done

    monkeypatch.setattr(module, "advise", counted)
    before = status_bytes("RssAnon")
    touch_free_memory(SIZE + 1)
    assert max(most) - before >= SIZE * 0.9
    assert status_bytes("RssAnon") - before < SIZE / 8
    monkeypatch.setattr(memory, "available", lambda: BLOCK)
    most.clear()
    touch_free_memory(SIZE)
    assert most == []
