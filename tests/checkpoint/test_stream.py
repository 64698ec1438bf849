"""Streams, patterns and orders, with bytes that arrive when the test lets them."""

import random
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tests.support.checkpoints import model_tensors, write_file, write_sharded

import loadstone
from loadstone.errors import LoadstoneError, SettingsError, StalledError, TensorNotFoundError, TransferError
from loadstone.loader.checkpoint import Checkpoint
from loadstone.loader.files.local import LocalSource
from loadstone.loader.format.header import TensorInfo
from loadstone.loader.opening import read_checkpoint
from loadstone.loader.ranges import ByteRange
from loadstone.loader.source import Blob, Prefetch, Progress, Span, StatedDigest
from loadstone.loader.tensors.selection import join_neighbours


class Arrivals:
    """What has arrived of every file, and what was waited for."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.spans: list[tuple[str, ByteRange]] = []
        self.demanded: list[ByteRange] = []
        self.failure: LoadstoneError | None = None

    def let(self, info: TensorInfo) -> None:
        with self.changed:
            self.spans.append((info.file, info.range))
            self.changed.notify_all()


class LateBlob:
    """A local file whose tensors arrive one by one."""

    def __init__(self, real: Blob, file: str, arrivals: Arrivals, header: int) -> None:
        self._real, self._file, self._arrivals, self._header = real, file, arrivals, header

    @property
    def name(self) -> str:
        return self._real.name

    @property
    def size(self) -> int:
        return self._real.size

    @property
    def version(self) -> str:
        return self._real.version

    def buffer(self) -> memoryview:
        return self._real.buffer()

    def ready(self, span: ByteRange) -> bool:
        inside = (
            s.start <= span.start and span.stop <= s.stop for f, s in self._arrivals.spans if f == self._file
        )
        return span.stop <= self._header or any(inside)

    def ensure(self, spans: Sequence[ByteRange], timeout: float | None = None) -> None:
        late = [span for span in spans if not self.ready(span)]
        with self._arrivals.changed:
            self._arrivals.demanded += late
            arrived = self._arrivals.changed.wait_for(
                lambda: self._arrivals.failure is not None or all(map(self.ready, late)), timeout
            )
        if self._arrivals.failure is not None:
            raise self._arrivals.failure
        if not arrived:
            raise StalledError(f"{self.name}: nothing arrived")

    def read(self, span: ByteRange) -> bytes:
        if span.start:  # the first block, with the header, comes with opening
            self.ensure([span])
        return self._real.read(span)

    def close(self) -> None:
        self._real.close()


class LatePrefetch:
    """Ends when all of its spans have arrived."""

    def __init__(self, spans: Sequence[Span], arrivals: Arrivals) -> None:
        self.spans, self._arrivals, self.cancelled = spans, arrivals, False

    def progress(self) -> Progress:
        return Progress(0, 0, 0, 0.0)

    def done(self) -> bool:
        return self._arrivals.failure is not None or all(s.blob.ready(s.range) for s in self.spans)

    def wait(self, timeout: float | None = None) -> bool:
        with self._arrivals.changed:
            self._arrivals.changed.wait_for(self.done, timeout)
        if self._arrivals.failure is not None:
            raise self._arrivals.failure
        return self.done()

    def cancel(self) -> None:
        self.cancelled = True


class LateSource:
    """A local folder whose tensors arrive one by one."""

    def __init__(self, folder: Path, arrivals: Arrivals) -> None:
        self._real, self._arrivals = LocalSource(str(folder)), arrivals
        self.prefetches: list[LatePrefetch] = []

    @property
    def name(self) -> str:
        return self._real.name

    def names(self) -> tuple[str, ...] | None:
        return self._real.names()

    def open(self, names: Sequence[str]) -> dict[str, Blob | LoadstoneError]:
        return {name: self._late(name, blob) for name, blob in self._real.open(names).items()}

    def _late(self, name: str, blob: Blob | LoadstoneError) -> Blob | LoadstoneError:
        if isinstance(blob, LoadstoneError):
            return blob
        first = blob.read(ByteRange(0, 8))
        header = 8 + int.from_bytes(first, "little") if name.endswith(".safetensors") else blob.size
        return LateBlob(blob, name, self._arrivals, header)

    def prefetch(self, spans: Sequence[Span], *, warm: bool = True) -> Prefetch:
        self.prefetches.append(LatePrefetch(spans, self._arrivals))
        return self.prefetches[-1]

    def stated_digest(self, blob: Blob) -> StatedDigest:
        return StatedDigest(reason="none is known")

    def settle(self, timeout: float | None = None) -> bool:
        return self._real.settle(timeout)

    def passing(self, names: Collection[str] | None = None) -> str:
        return self._real.passing(names)

    def close(self) -> None:
        self._real.close()


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return model_tensors(layers=3)


@pytest.fixture
def late(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[Checkpoint, Arrivals, LateSource]]:
    folder = write_sharded(tmp_path / "m", tensors, shards=2)
    arrivals = Arrivals()
    source = LateSource(folder, arrivals)
    with Checkpoint(read_checkpoint(source, str(folder), None, None)) as checkpoint:
        yield checkpoint, arrivals, source


Late = tuple[Checkpoint, Arrivals, LateSource]


def test_arrival_order_is_the_order_of_arrival(late: Late, tensors: dict[str, torch.Tensor]) -> None:
    ckpt, arrivals, source = late
    wanted = list(reversed(list(tensors)))
    stream = ckpt.stream()
    seen = []
    for name in wanted:
        timer = threading.Timer(0.02, arrivals.let, [ckpt.info(name)])
        timer.start()
        got, tensor = next(stream)
        timer.join()
        seen.append(got)
        assert torch.equal(tensor, tensors[got])
    assert seen == wanted
    assert next(stream, None) is None
    assert arrivals.demanded == []  # the prefetch brings them: nobody pushed in front
    assert source.prefetches[0].cancelled


def test_layer_order_waits_for_each(late: Late, tensors: dict[str, torch.Tensor]) -> None:
    ckpt, arrivals, _ = late
    order = ckpt.save_order()
    for name in reversed(order[1:]):
        arrivals.let(ckpt.info(name))
    stream = ckpt.stream(order="layer")
    timer = threading.Timer(0.05, arrivals.let, [ckpt.info(order[0])])
    timer.start()
    assert [name for name, _ in stream] == order
    assert ckpt.info(order[0]).range in arrivals.demanded


def test_a_failure_ends_the_stream(late: Late) -> None:
    ckpt, arrivals, _ = late
    stream = ckpt.stream()
    first = ckpt.save_order()[3]
    arrivals.let(ckpt.info(first))
    assert next(stream)[0] == first
    arrivals.failure = TransferError("the store is gone")
    with pytest.raises(TransferError, match="the store is gone"):
        next(stream)


def test_leaving_a_stream_early_cancels_the_prefetch(late: Late) -> None:
    ckpt, arrivals, source = late
    arrivals.let(ckpt.info(ckpt.save_order()[0]))
    for _name, _tensor in ckpt.stream():
        break
    assert source.prefetches[0].cancelled


def test_wait_times_out_and_several_files_are_asked_for_together(late: Late) -> None:
    ckpt, arrivals, source = late
    with pytest.raises(StalledError):
        ckpt.wait(timeout=0.05)
    assert {span.blob.name.rpartition("/")[2] for span in source.prefetches[0].spans} == set(ckpt.files)
    assert not ckpt.is_ready("lm_head.weight")
    for info in map(ckpt.info, ckpt):
        arrivals.let(info)
    ckpt.wait(timeout=5)
    assert ckpt.is_ready("lm_head.weight")
    assert ckpt.view("lm_head.weight").shape == (32, 8)


def test_a_slice_waits_for_its_rows_only(late: Late, tensors: dict[str, torch.Tensor]) -> None:
    ckpt, arrivals, _ = late
    info = ckpt.info("model.embed_tokens.weight")
    rows = ByteRange(info.offset + 3 * 32, info.offset + 5 * 32)
    arrivals.spans.append((info.file, rows))
    assert torch.equal(ckpt.slice(info.name)[3:5], tensors[info.name][3:5])
    assert torch.equal(ckpt.slice(info.name)[3, 2], tensors[info.name][3, 2])
    threading.Timer(0.02, arrivals.let, [info]).start()
    assert torch.equal(ckpt.slice(info.name)[5:7], tensors[info.name][5:7])
    assert arrivals.demanded == [ByteRange(rows.stop, rows.stop + 2 * 32)]


def test_views_come_at_once_and_fill_later(late: Late) -> None:
    ckpt, arrivals, _ = late
    assert ckpt.view("model.norm.weight").shape == (8,)
    assert arrivals.demanded == []


@pytest.fixture
def local(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Iterator[Checkpoint]:
    with loadstone.open(write_sharded(tmp_path / "m", tensors, shards=2)) as checkpoint:
        yield checkpoint


@pytest.mark.parametrize("order", ["arrival", "layer", "file"])
@pytest.mark.parametrize("copy", [False, True])
def test_every_order_gives_everything_once(
    local: Checkpoint, tensors: dict[str, torch.Tensor], order: str, copy: bool
) -> None:
    seen = dict(local.stream(order=order, copy=copy))  # type: ignore[arg-type]
    assert len(list(local.stream(order=order))) == len(seen) == len(tensors)  # type: ignore[arg-type]
    assert all(torch.equal(seen[name], tensors[name]) for name in tensors)
    assert (seen["lm_head.weight"].data_ptr() == local["lm_head.weight"].data_ptr()) != copy


def test_file_order_follows_offsets(local: Checkpoint) -> None:
    places = [(local.info(name).file, local.info(name).offset) for name, _ in local.stream(order="file")]
    assert places == sorted(places)
    assert local.file_order() == [name for name, _ in local.stream(order="file")]


def test_save_order_is_the_order_of_use(local: Checkpoint) -> None:
    order = local.save_order()
    assert sorted(order) == sorted(local)
    assert order[0] == "model.embed_tokens.weight"
    assert order[-1] == "lm_head.weight"
    layers = [int(name.split(".")[2]) for name in order if ".layers." in name]
    assert layers == sorted(layers)


def test_patterns(local: Checkpoint) -> None:
    assert local.match() == list(local)
    assert set(local.match("model.layers.1.*")) == {name for name in local if ".layers.1." in name}
    both = local.match(["*norm*", "lm_head.weight", "*layernorm*"])
    assert both == [name for name in local if "norm" in name or name == "lm_head.weight"]
    assert len(local.match("model.layers.[01].*")) == 4
    assert local.match([]) == []
    for wrong in ("model.layers.9.*", "LM_HEAD.weight", ["*", "nope"]):
        with pytest.raises(TensorNotFoundError, match="matches"):
            local.match(wrong)
        with pytest.raises(TensorNotFoundError):
            local.prefetch(wrong)


def test_neighbours_are_asked_for_together() -> None:
    infos = [
        TensorInfo("a", "U8", (10,), "x", 100, 10),
        TensorInfo("b", "U8", (10,), "x", 110, 10),
        TensorInfo("empty", "U8", (0,), "x", 120, 0),
        TensorInfo("c", "U8", (10,), "x", 1000, 10),
        TensorInfo("far", "U8", (10,), "x", 99_000, 10),
        TensorInfo("before", "U8", (10,), "x", 50, 10),
        TensorInfo("other", "U8", (10,), "y", 60, 10),
    ]
    assert join_neighbours(infos) == [
        ("x", ByteRange(50, 1010)),
        ("x", ByteRange(99_000, 99_010)),
        ("y", ByteRange(60, 70)),
    ]


def test_many_small_tensors_in_another_order_are_few_requests() -> None:
    infos = [TensorInfo(str(n), "U8", (64,), "x", 100 + 64 * n, 64) for n in range(20_000)]
    shuffled = random.Random(3).sample(infos, len(infos))
    assert join_neighbours(infos) == [("x", ByteRange(100, 100 + 64 * 20_000))]
    assert len(join_neighbours(shuffled)) < 10
    large = [TensorInfo(str(n), "U8", (1 << 20,), "x", n << 20, 1 << 20) for n in (5, 1, 3)]
    assert join_neighbours(large) == [("x", info.range) for info in large]  # the order given is kept


def test_streaming_many_small_tensors_takes_linear_time(tmp_path: Path) -> None:
    seconds = []
    for count in (4_000, 32_000):
        path = tmp_path / f"{count}.safetensors"
        write_file(path, {f"layers.{n}.w": ("U8", (1,)) for n in range(count)})
        with loadstone.open(path) as ckpt:
            assert len(list(ckpt.stream())) == count
            began = time.process_time()
            assert [name for name, _ in ckpt.stream()] == ckpt.save_order()
            seconds.append(time.process_time() - began)
    assert seconds[1] < 24 * seconds[0]  # eight times as many; in quadratic time, sixty-four times as long


def test_an_order_that_is_not_known_is_refused(tmp_path: Path) -> None:
    ckpt = loadstone.open(write_sharded(tmp_path / "m", model_tensors()))
    with pytest.raises(SettingsError, match="'random'"):
        list(ckpt.stream(order="random"))  # type: ignore[arg-type]  # a caller's mistake
    ckpt.close()
