"""Tensors on other devices."""

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file
from tests.support.checkpoints import BITS, model_tensors, write_file, write_sharded

import loadstone
from loadstone.errors import SettingsError
from loadstone.loader import safe_open
from loadstone.loader.tensors import crew, device_writer
from loadstone.loader.tensors.crew import Crew, Run
from loadstone.loader.tensors.device import _written, parse_device, to_device
from loadstone.loader.tensors.device_writer import DeviceWriter

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_the_cpu_gets_the_views_themselves(tmp_path: Path) -> None:
    tensors = model_tensors()
    with loadstone.open(write_sharded(tmp_path / "m", tensors)) as ckpt:
        for name, tensor in ckpt.stream(device=torch.device("cpu")):
            assert tensor.data_ptr() == ckpt[name].data_ptr()
            assert torch.equal(tensor, tensors[name])


def test_other_devices_get_copies(tmp_path: Path) -> None:
    tensors = model_tensors()
    with loadstone.open(write_sharded(tmp_path / "m", tensors)) as ckpt:
        moved = dict(ckpt.stream(device="meta"))
        assert all(moved[name].shape == tensor.shape for name, tensor in tensors.items())
        assert all(tensor.device.type == "meta" for tensor in moved.values())


def test_devices_that_are_not_there_are_refused_at_once(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m", model_tensors(), shards=1)
    with loadstone.open(folder) as ckpt:
        for wrong in (
            "nonsense",
            "cuda:x",
            -7,
            "hpu",
            "mps" if not torch.backends.mps.is_available() else "vulkan",
        ):
            with pytest.raises(SettingsError, match="device"):
                ckpt.stream(device=wrong)
        if not torch.cuda.is_available():
            with pytest.raises(SettingsError, match="sees no CUDA device"):
                ckpt.stream(device="cuda")
            with pytest.raises(SettingsError, match="sees no CUDA device"):
                safe_open(next(folder.glob("*.safetensors")), "pt", device=0)


def test_a_device_number_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [parse_device(known).index for known in ("cuda", "cuda:1", 0)] == [None, 1, 0]
    for wrong in ("cuda:2", 7, torch.device("cuda", 2)):
        with pytest.raises(SettingsError, match=r"device 'cuda:\d' is not there: .* sees 2"):
            parse_device(wrong)


class FakeCuda:
    """Streams and events that only take note of what was waited for: the arithmetic runs without a GPU."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def wait_stream(self, other: object) -> None:
        self.log.append("wait_stream")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def record(self, stream: object) -> None:
        self.log.append("record")

    def query(self) -> bool:
        return False


@pytest.fixture(params=[1, 2, 8])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(device_writer, "PIECE", 64)
    monkeypatch.setattr(device_writer, "_page_locked", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(device_writer, "_event", lambda: fake)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(request.param))
    monkeypatch.setattr(torch.cuda, "Stream", lambda place: fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: fake)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return fake


def test_pieces_go_through_the_buffers_in_turn(tmp_path: Path, fake: FakeCuda) -> None:
    writer = DeviceWriter(torch.device("cpu"))
    _check_every_dtype(tmp_path, writer)
    fake.log.clear()
    put(writer, torch.zeros(65, dtype=torch.uint8))
    writer.close()
    assert [entry for entry in fake.log if entry != "synchronize"] == [
        *["wait_stream", "record"] * 2,
        *["wait_stream"] * 2,
    ]


def test_neighbours_go_together_and_each_gets_its_own(fake: FakeCuda) -> None:
    whole = torch.arange(60, dtype=torch.uint8)
    parts = [whole[0:16], whole[16:31], whole[31:31], whole[32:60], whole[:3]]
    writer = DeviceWriter(torch.device("cpu"))
    begun = [writer.begin(part) for part in parts]
    assert writer._open is not None
    assert [run[2] for run in writer._open.runs] == [31, 28, 3]
    assert [turn for _, turn in begun] == [1] * 5
    writer.finish(1)
    assert fake.log == ["wait_stream", "record", "wait_stream"]
    assert all(torch.equal(copy, part) for (copy, _), part in zip(begun, parts, strict=True))
    writer.finish(1)
    assert len(fake.log) == 3
    writer.close()


def test_a_buffer_is_used_again_only_when_the_bus_is_done_with_it(fake: FakeCuda) -> None:
    writer = DeviceWriter(torch.device("cpu"))
    buffers = 2 + min(6, len(os.sched_getaffinity(0)))
    put(writer, torch.zeros(64 * buffers, dtype=torch.uint8))
    assert "synchronize" not in fake.log
    put(writer, torch.zeros(64, dtype=torch.uint8))
    assert fake.log.count("synchronize") == 1
    assert len(writer._idle) == writer._made == buffers
    writer.close()


def test_many_tensors_begun_ahead_come_in_order(fake: FakeCuda) -> None:
    tensors = [(str(number), torch.full((number % 700,), number % 251)) for number in range(1500)]
    got = list(_written([tensors[:700], [], tensors[700:701], [], [], tensors[701:]], torch.device("cpu")))
    assert [name for name, _ in got] == [name for name, _ in tensors]
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(got, tensors, strict=True))
    assert not _copying_threads()


def test_nothing_is_held_back_while_the_next_one_takes_a_while(fake: FakeCuda) -> None:
    asked: list[int] = []

    def arriving() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for number in range(5):
            asked.append(number)
            yield [(str(number), torch.full((100,), number))]
            yield []

    moving = _written(arriving(), torch.device("cpu"))
    for number in range(5):
        name, tensor = next(moving)
        assert (name, set(tensor.tolist()), asked[-1]) == (str(number), {number}, number)


def test_an_iteration_given_up_leaves_no_thread_and_no_copy_under_way(fake: FakeCuda) -> None:
    moving = _written([[(str(n), torch.ones(500)) for n in range(90)]], torch.device("cpu"))
    next(moving)
    fake.log.clear()
    moving.close()
    assert fake.log[-2:] == ["wait_stream", "synchronize"]
    assert not _copying_threads()


def test_a_source_that_fails_ends_the_iteration_and_the_threads(fake: FakeCuda) -> None:
    def failing() -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield [(str(n), torch.ones(500)) for n in range(9)]
        raise loadstone.LoadstoneError("gone")

    with pytest.raises(loadstone.LoadstoneError, match="gone"):
        list(_written(failing(), torch.device("cpu")))
    assert fake.log[-2:] == ["wait_stream", "synchronize"]
    assert not _copying_threads()


def test_without_threads_the_caller_copies(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    tensors = [(str(n), torch.full((100 * n,), n)) for n in range(20)]
    got = list(_written([tensors], torch.device("cpu")))
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(got, tensors, strict=True))


def test_a_crew_lets_go_of_what_it_copied() -> None:
    copier = Crew()
    source = torch.arange(10, dtype=torch.uint8)
    target, gone = torch.zeros_like(source), weakref.ref(source)
    with copier.copy([(target.data_ptr(), source.data_ptr(), 10)], source):
        assert target.tolist() == list(range(10))
    del source
    assert gone() is None
    copier.close()
    assert not _copying_threads()


def test_an_interrupted_end_leaves_the_memory_to_those_that_write_to_it(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C, while the end waits for threads: they go on, into memory that nobody else may get."""
    go, buffers = threading.Event(), dict[int, "weakref.ref[torch.Tensor]"]()
    copied: list[bool] = []

    def page_locked(size: int) -> torch.Tensor:
        memory = torch.empty(size, dtype=torch.uint8)
        buffers[memory.data_ptr()] = weakref.ref(memory)
        return memory

    def slowly(runs: Sequence[Run]) -> None:
        go.wait(20)
        copied.append(buffers[runs[0][0]]() is not None)

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(device_writer, "_page_locked", page_locked)
    monkeypatch.setattr(crew, "_copy", slowly)
    writer = DeviceWriter(torch.device("cpu"))
    writer.begin(torch.zeros(128, dtype=torch.uint8))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.close()
    assert fake.log[-2:] == ["wait_stream", "synchronize"]
    threads = _copying_threads()
    del writer
    go.set()
    for thread in threads:
        thread.join(20)
    assert copied == [True, True]
    assert [buffer() for buffer in buffers.values()] == [None, None]
    assert not _copying_threads()


def test_a_thread_whose_start_was_interrupted_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        start(self)
        raise KeyboardInterrupt

    copier = Crew()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copier.copy([], None)
    (thread,) = _copying_threads()
    copier.close()
    thread.join(20)
    assert not _copying_threads()


def put(writer: DeviceWriter, tensor: torch.Tensor) -> torch.Tensor:
    target, turn = writer.begin(tensor)
    writer.finish(turn)
    return target


def _copying_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loadstone-copy"]


def test_without_page_locked_memory_ordinary_memory_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def limited(*args: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", limited)
    assert device_writer._page_locked(10).device.type == "cpu"


@gpu
@needs_cuda
def test_cuda_bits_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_writer, "PIECE", 64)  # many turns of all buffers
    _check_every_dtype(tmp_path, DeviceWriter(parse_device("cuda")))


def _check_every_dtype(folder: Path, writer: DeviceWriter) -> None:
    for dtype in sorted(set(BITS) - {"F6_E2M3", "F6_E3M2"}):
        path = folder / f"{dtype}.safetensors"
        write_file(path, {"w": (dtype, (30, 8)), "empty": (dtype, (0, 2)), "v": (dtype, (2,))})
        with loadstone.open(path) as ckpt:
            for tensor in ckpt.values():
                moved = put(writer, tensor)
                assert moved.dtype == tensor.dtype
                assert moved.shape == tensor.shape
                if moved.numel():
                    host = moved.reshape(-1).view(torch.uint8).cpu()
                    assert torch.equal(host, tensor.reshape(-1).view(torch.uint8))
                    assert moved.data_ptr() != tensor.data_ptr()


@gpu
@needs_cuda
def test_cuda_tensors_are_safe_to_keep_and_to_use_at_once() -> None:
    size = 5 * device_writer.PIECE // 4 + 4
    sources = [(str(number), torch.full((size,), number, dtype=torch.int32)) for number in range(12)]
    kept = []
    for name, tensor in to_device([sources], torch.device("cuda", 0)):
        kept.append((name, tensor, (tensor * 2).sum(dtype=torch.int64)))  # queued before the copy is over
    for name, tensor, total in kept:
        assert (tensor == int(name)).all().item()
        assert total.item() == 2 * int(name) * size


@gpu
@needs_cuda
def test_cuda_tensors_belong_to_the_stream_that_was_current() -> None:
    size = 4 * device_writer.PIECE // 4
    sources = [(str(number), torch.full((size,), number, dtype=torch.int32)) for number in range(8)]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        sums = []
        for _, tensor in to_device([sources], torch.device("cuda")):
            sums.append(tensor.sum(dtype=torch.int64))
            del tensor  # its memory may be used again at once: by this stream, so after the sum
    stream.synchronize()
    assert [total.item() for total in sums] == [number * size for number in range(8)]


@gpu
@needs_cuda
def test_a_checkpoint_streams_to_cuda_as_safetensors_loads_it(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m", model_tensors())
    theirs: dict[str, torch.Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        theirs |= load_file(shard, device="cuda")
    for order in ("arrival", "layer", "file"):
        with loadstone.open(folder) as ckpt:
            ours = dict(ckpt.stream(order=order, device="cuda:0"))
        _check_equal(ours, theirs)


@gpu
@needs_cuda
def test_safe_open_on_cuda_gives_what_safetensors_gives(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m", model_tensors(), shards=1)
    path = next(folder.glob("*.safetensors"))
    with safe_open(path, "pt", device=0) as ours, safetensors.safe_open(path, "pt", device=0) as theirs:
        names = ours.keys()
        assert names == sorted(theirs.keys())
        _check_equal(ours.get_tensors(), {name: theirs.get_tensor(name) for name in names})
        _check_equal(
            {name: ours.get_tensor(name) for name in names},
            {name: theirs.get_tensor(name) for name in names},
        )
        matrices = [name for name in names if len(ours.get_slice(name).get_shape()) == 2]
        assert matrices
        _check_equal(
            {name: ours.get_slice(name)[1:, ::2] for name in matrices},
            {name: theirs.get_tensor(name)[1:, ::2] for name in matrices},
        )


def _check_equal(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.is_cuda
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name])


@gpu
@needs_cuda
def test_a_full_gpu_is_torchs_own_error_and_leaves_nothing(tmp_path: Path) -> None:
    before = torch.cuda.memory_allocated()
    huge = torch.empty(1, dtype=torch.uint8).expand(2**45)
    writer = DeviceWriter(parse_device("cuda"))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        put(writer, huge)
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(put(writer, torch.arange(9)).cpu(), torch.arange(9))


@gpu
@needs_cuda
def test_cuda_staging_is_bounded() -> None:
    writer = DeviceWriter(parse_device("cuda"))
    big = torch.randint(0, 255, (50 * device_writer.PIECE + 3,), dtype=torch.uint8)
    moved = put(writer, big)
    writer.close()
    assert torch.equal(moved.cpu(), big)
    assert 1 <= writer._made == len(writer._idle) <= writer._crew.size + 2 <= 8
    assert all(buffer.memory.is_pinned() for buffer in writer._idle)
