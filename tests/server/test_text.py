"""Tokens to text, a token at a time, against the tokenizer's own whole decode."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.served_models import make_tokenizer
from tokenizers import Tokenizer, decoders, models

from loadstone.server.text import Detokenizer, StopScanner, Text

_TOKENIZER = make_tokenizer().backend_tokenizer


@pytest.fixture
def text() -> Text:
    return Text(_TOKENIZER)


def _metaspace() -> Text:
    """Return one like SentencePiece's: a leading space is dropped, rare bytes are tokens of their own."""
    pieces = ["▁the", "▁north", "ern", "▁", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Text(tokenizer)


def _write(text: Text, prompt: list[int], answer: list[int]) -> list[str]:
    detokenizer = Detokenizer(text.decode, prompt)
    return [*(detokenizer.push(token) for token in answer), detokenizer.flush()]


@settings(deadline=None)
@given(st.text(max_size=40), st.text(max_size=40))
def test_valid_text_comes_whole_and_never_in_halves(prompt: str, answer: str) -> None:
    text = Text(_TOKENIZER)
    first, rest = text.encode(prompt), text.encode(answer)[1:]
    pieces = _write(text, list(first), list(rest))
    assert "".join(pieces) == answer
    assert "\ufffd" not in "".join(pieces[:-1]) or "\ufffd" in answer


def test_others_run_while_a_long_text_is_encoded(text: Text) -> None:
    with ThreadPoolExecutor(1) as threads:
        encoding = threads.submit(text.encode, "north ship " * 60_000)
        turns = 0
        while not encoding.done():
            time.sleep(0.001)
            turns += 1
    assert turns > 10
    assert encoding.result()[:20] == text.encode("north ship " * 10)[:20]


def test_random_bytes_give_what_the_whole_decode_gives(text: Text) -> None:
    draw = random.Random(7)
    for _ in range(200):
        prompt = list(text.encode("The lodestone"))
        answer = [draw.randrange(2, 320) for _ in range(30)]
        whole = text.decode(prompt + answer)[len(text.decode(prompt)) :]
        assert "".join(_write(text, prompt, answer)) == whole


def test_a_metaspace_tokenizer_keeps_the_space_that_begins_an_answer() -> None:
    text = _metaspace()
    assert text.decode([1]) == "north"
    assert _write(text, [0], [1, 2]) == [" north", "ern", ""]


def test_bytes_that_make_one_character_come_together() -> None:
    text = _metaspace()
    tokens = [5 + byte for byte in "磁".encode()]
    assert _write(text, [0], [*tokens, 4]) == ["", "", "磁", "s", ""]


def test_an_unfinished_character_is_told_at_the_end() -> None:
    text = _metaspace()
    tokens = [5 + byte for byte in "磁".encode()][:2]
    assert _write(text, [0], tokens)[:-1] == ["", ""]
    assert set(_write(text, [0], tokens)[-1]) == {"\ufffd"}


def test_a_prompt_that_ends_inside_a_character_does_not_confuse_the_answer() -> None:
    text = _metaspace()
    half = [5 + byte for byte in "磁".encode()][:2]
    assert "".join(_write(text, [0, *half], [1])) == "north"


def test_special_tokens_are_not_text(text: Text) -> None:
    a, b = text.encode("ab")[1:][0], text.encode("b")[1]
    assert "".join(_write(text, [0], [a, 0, b])) == text.decode([a]) + "b"


def test_names_of_tokens_are_never_alike() -> None:
    text = _metaspace()
    assert text.names([1, 4, 5 + 0xE7, 5 + 0xA3]) == ["north", "s", "<0xE7>", "<0xA3>"]
    assert len(set(Text(_TOKENIZER).names(range(320)))) == 320
    assert Text(_TOKENIZER).names([0]) == ["<s>"]


@settings(deadline=None)
@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_text_stops_before_the_first_stop_sequence(deltas: list[str], stops: list[str]) -> None:
    scanner, shown, stopped = StopScanner(stops), "", False
    for delta in deltas:
        new, stopped = scanner.push(delta)
        shown += new
        if stopped:
            break
    if not stopped:
        shown += scanner.flush()
    whole = "".join(deltas)
    # A stop sequence counts from the moment it is complete; those that complete together: the first to begin.
    ends = [at + len(stop) for stop in stops if (at := whole.find(stop)) >= 0]
    assert stopped == bool(ends)
    if not ends:
        assert shown == whole
    else:
        assert whole.startswith(shown)
        assert any(whole[len(shown) :].startswith(stop) for stop in stops)
        assert len(shown) <= min(ends)


def test_what_may_become_a_stop_sequence_is_held_back() -> None:
    scanner = StopScanner(["<end>"])
    assert scanner.push("abc<e") == ("abc", False)
    assert scanner.push("x") == ("<ex", False)
    assert scanner.push("<end") == ("", False)
    assert scanner.push("> more") == ("", True)
