"""One piece of loading, in a fresh process: ``loader_child WAY FOLDER`` prints its figures as one JSON line.

``FOLDER`` is what `loadstone.bench.loader_inputs` wrote. Imports come before the clock starts: they are the
same work for everyone. A peer that is not installed, or cannot do it, is status 77 and the reason.
"""

import contextlib
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from loadstone.bench import disk
from loadstone.bench.loader_inputs import LAYERS, Inputs
from loadstone.bench.own_memory import touch_free_memory
from loadstone.bench.process import disk_read_bytes, status_bytes
from loadstone.bench.runner import CannotRun

if TYPE_CHECKING:
    import torch

Figures = dict[str, float]

_LAYER = f"model.layers.{LAYERS // 4}.*"
_PAGE = 4096
_AGAIN = 10  # repetitions of what takes milliseconds, after the first


class Clock:
    """Measures the block under ``with``: time, bytes read from disk, growth of anonymous memory."""

    def __init__(self) -> None:
        gc.collect()
        self._anonymous = status_bytes("RssAnon")
        self._read = disk_read_bytes()
        self._began = time.perf_counter()

    def seconds(self) -> float:
        """Return the time gone by."""
        return time.perf_counter() - self._began

    def figures(self, name: str, seconds: float) -> Figures:
        """Return what is known now, ``seconds`` under ``name``."""
        return {
            f"{name}_seconds": seconds,
            "disk_read_bytes": disk_read_bytes() - self._read,
            "anonymous_growth_bytes": max(0, status_bytes("RssAnon") - self._anonymous),
        }


def touch(tensors: "Iterable[torch.Tensor]") -> None:
    """Read a byte of every page of ``tensors``."""
    for tensor in tensors:
        flat = tensor.flatten().view(_torch().uint8)
        flat[::_PAGE].sum()
        flat[-1:].sum()


def _torch() -> Any:
    import torch  # noqa: PLC0415  raw reads do without

    return torch


def need(*modules: str) -> list[Any]:
    """Import ``modules`` ahead of the clock."""
    try:
        return [importlib.import_module(module) for module in modules]
    except (ImportError, OSError) as error:
        raise CannotRun(f"cannot be imported: {' '.join(str(error).split())[:200]}") from None


def opener(*parts: str) -> Callable[..., Any]:
    """Import all of loadstone that loading a local checkpoint uses, and ``parts``; return what opens one."""
    local = ("tensors.reading", "files.residency", "files.local", "opening")
    need(*(f"loadstone.loader.{name}" for name in (*local, *parts)))
    checkpoint = need("loadstone.loader.checkpoint")[0]
    open_checkpoint: Callable[..., Any] = checkpoint.open_checkpoint
    return open_checkpoint


# Until every byte is resident, page cache cold.


def own_clock(inputs: Inputs) -> Clock:
    """Begin to measure, with free memory for all of it that is this machine's own."""
    touch_free_memory(sum(shard.stat().st_size for shard in inputs.shards) * 5 // 4)
    return Clock()


def resident_loadstone(inputs: Inputs) -> Figures:
    """Open, prefetch everything, wait, have every tensor; then prove it by touching all of it."""
    open_checkpoint = opener()
    return _prefetched(own_clock(inputs), lambda: open_checkpoint(inputs.sharded))


def resident_cached(inputs: Inputs) -> Figures:
    """Do the same, when a node cache holds it."""
    open_checkpoint = opener("node.cache", "node.remote", "stores.web")
    url = inputs.url_file.read_text()
    return _prefetched(own_clock(inputs), lambda: open_checkpoint(url, cache=inputs.cache))


def _prefetched(clock: Clock, begin: Callable[[], Any]) -> Figures:
    checkpoint = begin()
    checkpoint.prefetch().wait()
    tensors = dict(checkpoint)
    seconds = clock.seconds()
    figures = clock.figures("resident", seconds)
    touch(tensors.values())
    return figures | {"touched_seconds": clock.seconds()}


def resident_load_file(inputs: Inputs) -> Figures:
    """Read with ``safetensors.torch.load_file``, then touch every page of every tensor."""
    (safetensors,) = need("safetensors.torch")
    clock = own_clock(inputs)
    tensors = [safetensors.load_file(shard) for shard in inputs.shards]
    for part in tensors:
        touch(part.values())
    return clock.figures("resident", clock.seconds())


def resident_runai(inputs: Inputs) -> Figures:
    """Read with Run:ai's streamer; each tensor is kept as it is handed out."""
    (runai,) = need("runai_model_streamer")
    clock = own_clock(inputs)
    with runai.SafetensorsStreamer() as streamer:
        streamer.stream_files([str(shard) for shard in inputs.shards], device="cpu")
        tensors = dict(streamer.get_tensors())
        touch(tensors.values())
        return clock.figures("resident", clock.seconds())


def resident_fastsafetensors(inputs: Inputs) -> Figures:
    """Read with fastsafetensors, without GPUDirect Storage, to the CPU."""
    (fast,) = need("fastsafetensors")
    clock = own_clock(inputs)
    loader = fast.SafeTensorsFileLoader(None, "cpu", nogds=True)
    try:
        loader.add_filenames({0: [str(shard) for shard in inputs.shards]})
        buffers = loader.copy_files_to_device()
        tensors = [buffers.get_tensor(name) for name in loader.get_keys()]
    except (RuntimeError, ValueError, OSError, AttributeError, NotImplementedError) as error:
        raise CannotRun(f"does not load to the CPU: {' '.join(str(error).split())[:200]}") from None
    touch(tensors)
    return clock.figures("resident", clock.seconds())


def resident_tensorizer(inputs: Inputs) -> Figures:
    """Read with tensorizer, from its own format."""
    (tensorizer,) = need("tensorizer")
    clock = own_clock(inputs)
    with tensorizer.TensorDeserializer(str(inputs.tensorized), device="cpu") as tensors:
        touch(tensor.data for tensor in tensors.values())
        return clock.figures("resident", clock.seconds())


def disk_direct(inputs: Inputs) -> Figures:
    """Read the files past the page cache."""
    return _raw(disk.read_direct, inputs)


def disk_plain(inputs: Inputs) -> Figures:
    """Read the files through the page cache into memory that is used again."""
    return _raw(disk.read_plainly, inputs)


def disk_keep(inputs: Inputs) -> Figures:
    """Read the files past the page cache, each byte into memory of its own."""
    return _raw(disk.read_and_keep, inputs)


def _raw(read: Callable[[list[Path]], int], inputs: Inputs) -> Figures:
    shards = inputs.shards
    clock = own_clock(inputs)
    read(shards)
    return clock.figures("resident", clock.seconds())


# Until usable, page cache warm; and opening a file of very many tensors.


def usable_loadstone(inputs: Inputs) -> Figures:
    """Open and have every tensor."""
    open_checkpoint = opener()
    return _repeated(lambda: open_checkpoint(inputs.sharded), dict)


def usable_safe_open(inputs: Inputs) -> Figures:
    """Open each shard with ``safe_open`` and get every tensor."""
    (safetensors,) = need("safetensors", "safetensors.torch")[:1]

    def everything(files: list[Any]) -> dict[str, Any]:
        return {name: file.get_tensor(name) for file in files for name in file.keys()}  # noqa: SIM118  not a dict

    return _repeated(lambda: [safetensors.safe_open(shard, "pt") for shard in inputs.shards], everything)


def usable_load_file(inputs: Inputs) -> Figures:
    """Have every tensor by ``load_file``."""
    (safetensors,) = need("safetensors.torch")
    return _repeated(lambda: inputs.shards, lambda shards: [safetensors.load_file(shard) for shard in shards])


def many_loadstone(inputs: Inputs) -> Figures:
    """Open and list the names."""
    open_checkpoint = opener()
    return _repeated(lambda: open_checkpoint(inputs.many), lambda checkpoint: list(checkpoint.keys()))


def many_safe_open(inputs: Inputs) -> Figures:
    """Open with ``safe_open`` and list the names."""
    (safetensors,) = need("safetensors", "safetensors.torch")[:1]
    return _repeated(lambda: safetensors.safe_open(inputs.many, "pt"), lambda file: list(file.keys()))


def _repeated(begin: Callable[[], Any], finish: Callable[[Any], Any]) -> Figures:
    """Measure the first time in this process, with its memory, and the median of several more."""
    clock = Clock()
    opened = begin()
    here = clock.seconds()
    held = finish(opened)
    figures = clock.figures("usable", clock.seconds()) | {"open_seconds": here}
    del opened, held
    again = []
    for _ in range(_AGAIN):
        clock = Clock()
        held = finish(begin())
        again.append(clock.seconds())
        del held
    return figures | {"again_seconds": median(again)}


# One layer of many.


def layer_by_use(inputs: Inputs) -> Figures:
    """Get one layer's tensors and read them."""
    return _layer(inputs, lambda checkpoint: None)  # noqa: ARG005  nothing beforehand


def layer_by_prefetch(inputs: Inputs) -> Figures:
    """Prefetch one layer, wait, then read it."""
    return _layer(inputs, lambda checkpoint: checkpoint.prefetch(_LAYER).wait())


def _layer(inputs: Inputs, bring: Callable[[Any], object]) -> Figures:
    from loadstone.loader.ranges import coalesce, to_blocks  # noqa: PLC0415  loadstone's own, as the rest

    open_checkpoint = opener()
    clock = Clock()
    with open_checkpoint(inputs.sharded) as checkpoint:
        bring(checkpoint)
        names = checkpoint.match(_LAYER)
        touch(checkpoint.get(names).values())
        figures = clock.figures("usable", clock.seconds())
        spans: dict[str, list[Any]] = {}
        for info in map(checkpoint.info, names):
            spans.setdefault(info.file, []).append(info.range)
        sizes = {file: (inputs.sharded / file).stat().st_size for file in spans}
        blocks = [to_blocks(span, sizes[file]) for file, found in spans.items() for span in coalesce(found)]
        return figures | {"layer_bytes": sum(span.nbytes for span in blocks)}


def layer_safe_open(inputs: Inputs) -> Figures:
    """Get one layer's tensors with ``safe_open`` and read them."""
    (safetensors,) = need("safetensors", "safetensors.torch")[:1]
    prefix = _LAYER.rstrip("*")
    clock = Clock()
    files = [safetensors.safe_open(shard, "pt") for shard in inputs.shards]
    names = ((file, name) for file in files for name in file.keys())  # noqa: SIM118  not a dict
    touch([file.get_tensor(name) for file, name in names if name.startswith(prefix)])
    return clock.figures("usable", clock.seconds())


WAYS: dict[str, Callable[[Inputs], Figures]] = {
    work.__name__: work
    for work in (
        *(resident_loadstone, resident_cached, resident_load_file, resident_runai),
        *(resident_fastsafetensors, resident_tensorizer, disk_direct, disk_plain, disk_keep),
        *(usable_loadstone, usable_safe_open, usable_load_file, many_loadstone, many_safe_open),
        *(layer_by_use, layer_by_prefetch, layer_safe_open),
    )
}


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """End the process with status 77, the reason printed last, when a way cannot be carried out."""
    try:
        yield
    except CannotRun as reason:
        print(reason)
        sys.stdout.flush()
        raise SystemExit(77) from None


def main() -> int:
    """Carry out one way and print its figures."""
    with explained():
        print(json.dumps(WAYS[sys.argv[1]](Inputs(Path(sys.argv[2])))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
