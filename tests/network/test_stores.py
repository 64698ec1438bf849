"""One suite for every kind of store: the same names, bytes, versions and errors from each."""

import random
import threading

import pytest
from tests.network.conftest import Backend

from loadstone.errors import ChangedError, LocationError, NotFoundError
from loadstone.loader.ranges import ByteRange
from loadstone.loader.stores.store import CHUNK, OpenGate, Version

GATE = OpenGate()
SIZE = 3 * CHUNK + 12_345
DATA = random.Random(4).randbytes(SIZE)


def collect(backend: Backend, name: str, version: Version, span: ByteRange) -> bytes:
    """Fetch ``span``, checking that it arrives in order, each byte once, in pieces of bounded size."""
    out = bytearray()

    def sink(offset: int, data: memoryview) -> None:
        assert offset == span.start + len(out)
        assert 0 < len(data) <= CHUNK
        out.extend(data)

    backend.store.transport.fetch(backend.store.object(name), version, span, sink, GATE)
    return bytes(out)


def pin(backend: Backend, name: str) -> Version:
    version = backend.store.transport.probe(backend.store.object(name), 65536, None, GATE).version
    assert version is not None
    assert version.pinned
    return version


def test_probe_gives_version_and_first_bytes(backend: Backend) -> None:
    backend.put("model.safetensors", DATA)
    probe = backend.store.transport.probe(backend.store.object("model.safetensors"), 65536, None, GATE)
    assert probe.version is not None
    assert (probe.version.size, probe.version.pinned) == (SIZE, True)
    assert (probe.data, probe.whole, probe.not_modified) == (DATA[:65536], False, False)


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537])
def test_probe_knows_whether_it_has_all(backend: Backend, size: int) -> None:
    backend.put("small", DATA[:size])
    probe = backend.store.transport.probe(backend.store.object("small"), 65536, None, GATE)
    assert probe.version is not None
    assert (probe.version.size, probe.whole, probe.data) == (size, size <= 65536, DATA[: min(size, 65536)])


def test_probe_of_a_known_version_moves_nothing(backend: Backend) -> None:
    backend.put("a", DATA[:70_000])
    known = pin(backend, "a")
    probe = backend.store.transport.probe(backend.store.object("a"), 65536, known, GATE)
    assert (probe.not_modified, probe.version, probe.data) == (True, None, b"")


def test_probe_of_a_replaced_object_gives_the_new_version(backend: Backend) -> None:
    backend.put("a", DATA[:70_000])
    known = pin(backend, "a")
    backend.put("a", DATA[1:70_001])
    probe = backend.store.transport.probe(backend.store.object("a"), 65536, known, GATE)
    assert probe.version is not None
    assert probe.version != known
    assert probe.data == DATA[1:65537]


@pytest.mark.parametrize(
    "span",
    [
        ByteRange(0, 0),
        ByteRange(0, 1),
        ByteRange(SIZE - 1, SIZE),
        ByteRange(65536, 131072),
        ByteRange(CHUNK - 1, CHUNK + 1),
        ByteRange(17, 2 * CHUNK + 99),
        ByteRange(0, SIZE),
    ],
    ids=str,
)
def test_fetch_delivers_exactly_the_span(backend: Backend, span: ByteRange) -> None:
    backend.put("model.safetensors", DATA)
    version = pin(backend, "model.safetensors")
    assert collect(backend, "model.safetensors", version, span) == DATA[span.start : span.stop]


def test_fetch_of_a_replaced_object_is_refused(backend: Backend) -> None:
    backend.put("a", DATA[:200_000])
    version = pin(backend, "a")
    backend.put("a", DATA[1:200_001])
    with pytest.raises(ChangedError, match="was replaced"):
        collect(backend, "a", version, ByteRange(100_000, 200_000))


def test_fetch_of_a_deleted_object_says_so(backend: Backend) -> None:
    backend.put("a", DATA[:200_000])
    version = pin(backend, "a")
    backend.delete("a")
    with pytest.raises(NotFoundError):
        collect(backend, "a", version, ByteRange(100_000, 200_000))


def test_fetch_whole_is_one_version(backend: Backend) -> None:
    backend.put("a", DATA)
    out = bytearray(SIZE)

    def sink(offset: int, data: memoryview) -> None:
        out[offset : offset + len(data)] = data

    version = backend.store.transport.fetch_whole(backend.store.object("a"), SIZE, sink, GATE)
    assert version.size == SIZE
    assert out == DATA


def test_fetch_whole_of_another_size_is_refused(backend: Backend) -> None:
    backend.put("a", DATA[:1000])
    with pytest.raises(ChangedError, match="replaced"):
        backend.store.transport.fetch_whole(backend.store.object("a"), 999, lambda _, __: None, GATE)


def test_a_missing_object_is_not_found_at_once(backend: Backend) -> None:
    backend.put("other", b"x")
    with pytest.raises(NotFoundError, match="nope"):
        backend.store.transport.probe(backend.store.object("nope"), 65536, None, GATE)


@pytest.mark.parametrize(
    "name", ["a b.bin", "a+b", "100%.bin", "a#b", "a?b=c&d", "größe-模型.bin", "x'y(z)!~@:,;=$"]
)
def test_odd_names_mean_themselves(backend: Backend, name: str) -> None:
    backend.put(name, DATA[:100])
    assert collect(backend, name, pin(backend, name), ByteRange(10, 90)) == DATA[10:90]
    if backend.lists:
        assert name in (backend.store.names() or ())


@pytest.mark.parametrize("name", ["", "..", "../other", "a/../../b", "/etc/passwd", "a//b", "a\0b", "."])
def test_names_stay_in_the_folder(backend: Backend, name: str) -> None:
    with pytest.raises(LocationError):
        backend.store.object(name)


def test_names_lists_only_files_directly_inside(backend: Backend) -> None:
    backend.put("b.safetensors", b"b")
    backend.put("a.json", b"a")
    backend.put("deeper/c.safetensors", b"c")
    names = backend.store.names()
    assert (sorted(names) if names is not None else None) == (
        ["a.json", "b.safetensors"] if backend.lists else None
    )


def test_identity_tells_objects_apart_without_secrets(backend: Backend) -> None:
    one, two = backend.store.object("a"), backend.store.object("b")
    assert one.identity != two.identity
    assert one.identity == backend.store.object("a").identity
    shown = f"{one!r} {one.name} {one.identity} {backend.store.name}"
    assert "secret" not in shown
    assert "sesame" not in shown


def test_what_sink_and_gate_raise_passes_through(backend: Backend) -> None:
    backend.put("a", DATA)
    version = pin(backend, "a")

    class StopError(Exception):
        pass

    def sink(offset: int, data: memoryview) -> None:
        raise ValueError("the sink's own")

    class Closed(OpenGate):
        def admit(self, nbytes: int) -> None:
            raise StopError

    transport, target = backend.store.transport, backend.store.object("a")
    with pytest.raises(ValueError, match="the sink's own"):
        transport.fetch(target, version, ByteRange(0, SIZE), sink, GATE)
    with pytest.raises(StopError):
        transport.fetch(target, version, ByteRange(0, SIZE), lambda _, __: None, Closed())
    assert collect(backend, "a", version, ByteRange(5, 10)) == DATA[5:10]


def test_many_threads_share_a_store(backend: Backend) -> None:
    backend.put("a", DATA)
    version = pin(backend, "a")
    wrong: list[ByteRange] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(10):
            start = chance.randrange(SIZE - 1)
            span = ByteRange(start, min(SIZE, start + chance.randrange(1, 200_000)))
            if collect(backend, "a", version, span) != DATA[span.start : span.stop]:
                wrong.append(span)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
