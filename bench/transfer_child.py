"""One transfer, in a fresh process: ``transfer_child WAY SPEC`` prints its figures as one JSON line.

``SPEC`` is a JSON object: ``address`` (the server's host and port), ``folder`` (the served checkpoint as it
lies on this machine: its name is the prefix in the bucket), ``scratch`` (a folder of this run's own), and
``started`` (``time.monotonic`` of the moment before this process was started). Endpoint, keys and the node
cache come by environment, for everyone alike. Imports come before the clock starts, unless it says otherwise.
"""

import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loadstone.bench import rawsockets
from loadstone.bench.loader_child import explained, need
from loadstone.bench.loader_inputs import LAYERS
from loadstone.bench.servers import BUCKET
from loadstone.bench.transfer_inputs import weights
from loadstone.errors import BenchError
from loadstone.loader.ranges import ByteRange, coalesce, split

Figures = dict[str, float]

LAYER = f"model.layers.{LAYERS * 3 // 4}.*"
"""What is asked for while everything is on its way: late in that order."""

_GIB = 1024**3
_MIB = 1024**2
_UNDER_WAY = 0.03  # share of a checkpoint after which its transfer is in full swing
_OBSTORE_THREADS = 8


@dataclass(frozen=True, slots=True)
class Spec:
    """What a run is told."""

    address: tuple[str, int]
    folder: Path
    scratch: Path
    started: float

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """Read the JSON of the command line."""
        values = json.loads(text)
        host, port = values["address"]
        return cls((host, port), Path(values["folder"]), Path(values["scratch"]), values["started"])

    @property
    def endpoint(self) -> str:
        """The server, as S3 clients take it."""
        return f"http://{self.address[0]}:{self.address[1]}"

    @property
    def location(self) -> str:
        """The checkpoint, as loadstone takes it."""
        return f"s3://{BUCKET}/{self.folder.name}"

    @property
    def files(self) -> list[Path]:
        """The checkpoint's weight files, as they lie on this machine."""
        return weights(self.folder)

    @property
    def keys(self) -> list[str]:
        """The weight files' keys in the bucket."""
        return [f"{self.folder.name}/{file.name}" for file in self.files]

    def parts(self) -> list[rawsockets.Part]:
        """Return the requests of a raw transfer of everything."""
        sizes = [file.stat().st_size for file in self.files]
        return rawsockets.parts_of([f"/{BUCKET}/{key}" for key in self.keys], sizes)


class Clock:
    """Measures time and this process's own processor time, all its threads included."""

    def __init__(self) -> None:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        """Return the time gone by."""
        return time.perf_counter() - self._began

    def figures(self, nbytes: int) -> Figures:
        """Return what it took to have ``nbytes``."""
        seconds, cpu = self.seconds(), time.process_time() - self._cpu_began
        return {
            "all_bytes_seconds": seconds,
            "rate_bytes_per_second": nbytes / seconds,
            "client_cpu_seconds": cpu,
            "cpu_seconds_per_gib": cpu * _GIB / nbytes,
            "arrived_bytes": nbytes,
        }


def _opener() -> Callable[[str], Any]:
    """Import what opening a checkpoint in S3 imports, and return what opens one."""
    need(*(f"loadstone.loader.{name}" for name in ("opening", "node.cache", "node.remote", "stores.s3")))
    (checkpoint,) = need("loadstone.loader.checkpoint")
    opener: Callable[[str], Any] = checkpoint.open_checkpoint
    return opener


# loadstone.


def tensors_loadstone(spec: Spec) -> Figures:
    """Open, prefetch everything, and have every tensor."""
    need("torch", "loadstone.loader.tensors.reading", "loadstone.loader.tensors.views")
    opener = _opener()
    clock = Clock()
    with opener(spec.location) as checkpoint:
        checkpoint.prefetch().wait()
        tensors = dict(checkpoint)
        figures = clock.figures(sum(tensor.nbytes for tensor in tensors.values()))
        _compare(checkpoint, spec)
    return figures


def bytes_loadstone(spec: Spec) -> Figures:
    """Open and prefetch everything; no torch."""
    opener = _opener()
    clock = Clock()
    with opener(spec.location) as checkpoint:
        checkpoint.prefetch().wait()
        figures = clock.figures(checkpoint.nbytes)
        _compare(checkpoint, spec)
    return figures


def process_loadstone(spec: Spec) -> Figures:
    """Open and prefetch everything, measured from the start of the process."""
    opener = _opener()
    with opener(spec.location) as checkpoint:
        checkpoint.prefetch().wait()
        return {"all_bytes_seconds": time.monotonic() - spec.started}


def open_loadstone(spec: Spec) -> Figures:
    """Open, and know every tensor."""
    opener = _opener()
    clock = Clock()
    with opener(spec.location) as checkpoint:
        return {"open_seconds": clock.seconds(), "tensors": len(checkpoint)}


def layer_loadstone(spec: Spec) -> Figures:
    """Prefetch everything; in full swing, wait for one layer far from what has come."""
    return _layer(spec, _in_full_swing)


def layer_alone_loadstone(spec: Spec) -> Figures:
    """Wait for one layer, with nothing else on its way."""
    return _layer(spec, lambda checkpoint: None)  # noqa: ARG005  nothing beforehand


def _in_full_swing(checkpoint: Any) -> Any:
    prefetch = checkpoint.prefetch()
    while prefetch.progress().ready < prefetch.progress().total * _UNDER_WAY:
        time.sleep(0.01)
    return prefetch


def _layer(spec: Spec, before: Callable[[Any], Any]) -> Figures:
    opener = _opener()
    with opener(spec.location) as checkpoint:
        names = checkpoint.match(LAYER)
        prefetch = before(checkpoint)
        clock = Clock()
        checkpoint.wait(names)
        figures = {
            "layer_seconds": clock.seconds(),
            "layer_bytes": sum(checkpoint.info(name).nbytes for name in names),
        }
        if prefetch is not None:
            if prefetch.done():
                raise BenchError("everything had come before the layer was asked for; use a larger --size")
            prefetch.cancel()
        return figures


def _compare(checkpoint: Any, spec: Spec) -> None:
    """Compare every byte with the file that was served; not part of the clock."""
    files = spec.files
    blobs = checkpoint.source.open([file.name for file in files])
    for file in files:
        view = blobs[file.name].buffer()
        with file.open("rb") as source:
            at = 0
            while piece := source.read(_MIB):
                if bytes(view[at : at + len(piece)]) != piece:
                    raise BenchError(
                        f"{file.name}: wrong bytes after {at}; report it with this run's versions"
                    )
                at += len(piece)
        if at != len(view):
            raise BenchError(f"{file.name} has {at} bytes, {len(view)} came")


# Others.


def runai(spec: Spec) -> Figures:
    """Stream with Run:ai's streamer; each tensor is kept as it is handed out."""
    streamer_module, _ = need("runai_model_streamer", "runai_model_streamer_s3")
    clock = Clock()
    with streamer_module.SafetensorsStreamer() as streamer:
        streamer.stream_files([f"s3://{BUCKET}/{key}" for key in spec.keys], device="cpu")
        tensors = dict(streamer.get_tensors())
        return clock.figures(sum(tensor.nbytes for tensor in tensors.values()))


def s3fs_get(spec: Spec) -> Figures:
    """Download with ``s3fs.get``, then ``load_file``."""
    s3fs, safetensors = need("s3fs", "safetensors.torch")
    places = [spec.scratch / file.name for file in spec.files]
    clock = Clock()
    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    fs.get([f"{BUCKET}/{key}" for key in spec.keys], [str(place) for place in places])
    return _loaded(clock, safetensors, places)


def obstore(spec: Spec, request_bytes: int) -> Figures:
    """Write ranges that obstore gets to files, several at a time, then ``load_file``."""
    obstore_module, store_module, safetensors = need("obstore", "obstore.store", "safetensors.torch")
    places = [spec.scratch / file.name for file in spec.files]
    clock = Clock()
    store = store_module.S3Store(
        BUCKET,
        endpoint=spec.endpoint,
        region="us-east-1",
        access_key_id="bench",
        secret_access_key="bench",  # noqa: S106  the server ignores it
        client_options={"allow_http": True},
    )
    with ExitStack() as stack:
        descriptors = [_create(stack, place) for place in places]

        def get(file: int, piece: ByteRange) -> None:
            data = obstore_module.get_range(store, spec.keys[file], start=piece.start, end=piece.stop)
            os.pwrite(descriptors[file], memoryview(data), piece.start)

        pieces = [
            (number, piece)
            for number, file in enumerate(spec.files)
            for piece in split(ByteRange(0, file.stat().st_size), request_bytes)
        ]
        with ThreadPoolExecutor(_OBSTORE_THREADS) as pool:
            list(pool.map(get, *zip(*pieces, strict=True)))
    return _loaded(clock, safetensors, places)


def _loaded(clock: Clock, safetensors: Any, places: Iterable[Path]) -> Figures:
    parts = [safetensors.load_file(place) for place in places]
    return clock.figures(sum(tensor.nbytes for tensors in parts for tensor in tensors.values()))


# Raw sockets: the controls.


def raw_dropped(spec: Spec) -> Figures:
    """Receive everything into reused buffers."""
    parts = spec.parts()
    clock = Clock()
    return clock.figures(rawsockets.receive(spec.address, parts))


def raw_to_files(spec: Spec) -> Figures:
    """Receive everything into reused buffers, and write them to files."""
    parts = spec.parts()
    clock = Clock()
    with ExitStack() as stack:
        descriptors = [_create(stack, spec.scratch / file.name) for file in spec.files]
        return clock.figures(rawsockets.receive(spec.address, parts, rawsockets.write_to(descriptors)))


def raw_to_memory(spec: Spec) -> Figures:
    """Receive everything into anonymous memory that nobody has touched."""
    return _raw_into([mmap.mmap(-1, file.stat().st_size) for file in spec.files], spec)


def raw_to_memfd(spec: Spec) -> Figures:
    """Receive everything into mapped shared memory that nobody has touched."""
    maps = []
    for file in spec.files:
        fd = os.memfd_create("raw")
        os.ftruncate(fd, file.stat().st_size)
        maps.append(mmap.mmap(fd, file.stat().st_size))
        os.close(fd)
    return _raw_into(maps, spec)


def raw_layer(spec: Spec) -> Figures:
    """Receive one layer's bytes."""
    opener = _opener()
    with opener(str(spec.folder)) as checkpoint:
        infos = [checkpoint.info(name) for name in checkpoint.match(LAYER)]
    files = {file.name: number for number, file in enumerate(spec.files)}
    parts = [
        rawsockets.Part(files[name], f"/{BUCKET}/{spec.folder.name}/{name}", piece)
        for name in sorted({info.file for info in infos})
        for span in coalesce(info.range for info in infos if info.file == name)
        for piece in split(span, max(_MIB, span.nbytes // rawsockets.CONNECTIONS))
    ]
    clock = Clock()
    nbytes = rawsockets.receive(spec.address, parts)
    return {"layer_seconds": clock.seconds(), "layer_bytes": nbytes}


def _raw_into(maps: Sequence[mmap.mmap], spec: Spec) -> Figures:
    views = [memoryview(one) for one in maps]
    parts = spec.parts()
    clock = Clock()
    nbytes = rawsockets.receive(
        spec.address, parts, room=lambda part: views[part.file][part.range.start : part.range.stop]
    )
    return clock.figures(nbytes)


def _create(stack: ExitStack, place: Path) -> int:
    fd = os.open(place, os.O_RDWR | os.O_CREAT, 0o600)
    stack.callback(os.close, fd)
    return fd


WAYS: dict[str, Callable[[Spec], Figures]] = {
    "obstore-4": partial(obstore, request_bytes=4 * _MIB),
    "obstore-8": partial(obstore, request_bytes=8 * _MIB),
    **{
        work.__name__: work
        for work in (
            *(tensors_loadstone, bytes_loadstone, process_loadstone, open_loadstone),
            *(layer_loadstone, layer_alone_loadstone, runai, s3fs_get),
            *(raw_dropped, raw_to_files, raw_to_memory, raw_to_memfd, raw_layer),
        )
    },
}


def main() -> int:
    """Carry out one way and print its figures."""
    with explained():
        print(json.dumps(WAYS[sys.argv[1]](Spec.parse(sys.argv[2]))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
