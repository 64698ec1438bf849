"""Loading onto a GPU, in a fresh process: ``loader_cuda_child WAY FOLDER`` prints figures as one JSON line.

``FOLDER`` is what `loadstone.bench.loader_inputs` wrote. Imports and the GPU's context come before the clock
starts: they are the same work for everyone. Every way ends when the GPU has all bytes, and gives their sum.
Without a GPU, a way is status 77 and the reason.
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadstone.bench.loader_child import Clock, Figures, explained, need, opener
from loadstone.bench.loader_inputs import Inputs
from loadstone.bench.loader_models_child import answered, prepare_models
from loadstone.bench.runner import CannotRun

if TYPE_CHECKING:
    import torch

_PIECE = 64 * 1024 * 1024


def _gpu() -> Any:
    """Return torch with the GPU's context made."""
    (torch,) = need("torch")
    if not torch.cuda.is_available():
        raise CannotRun("torch sees no CUDA device")
    torch.empty(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    return torch


def _measured(read: "Callable[[], Iterable[torch.Tensor]]") -> Figures:
    """Measure until the GPU has every byte of what ``read`` returns; then add them all up there."""
    torch = _gpu()
    clock = Clock()
    tensors = list(read())
    torch.cuda.synchronize()
    figures = clock.figures("resident", clock.seconds())
    sums = [tensor.reshape(-1).view(torch.uint8).sum(dtype=torch.int64) for tensor in tensors]
    return figures | {"bytes_sum": float(torch.stack(sums).sum())}


def bus(inputs: Inputs) -> Figures:
    """Copy as many bytes out of page-locked memory that is there already: what the bus can do."""
    torch = _gpu()
    here = torch.ones(_PIECE, dtype=torch.uint8).pin_memory()
    there = torch.empty(_PIECE, dtype=torch.uint8, device="cuda")
    total = sum(shard.stat().st_size for shard in inputs.shards)
    torch.cuda.synchronize()
    clock = Clock()
    for _ in range(-(-total // _PIECE)):
        there.copy_(here, non_blocking=True)
    torch.cuda.synchronize()
    return clock.figures("resident", clock.seconds())


def loadstone(inputs: Inputs) -> Figures:
    """Stream every tensor to the GPU."""
    open_checkpoint = opener()
    need("loadstone.loader.tensors.device")
    return _measured(lambda: dict(open_checkpoint(inputs.sharded).stream(device="cuda")).values())


def load_file(inputs: Inputs) -> Figures:
    """Read with ``safetensors.torch.load_file`` to the GPU."""
    (safetensors,) = need("safetensors.torch")

    def read() -> "Iterable[torch.Tensor]":
        for shard in inputs.shards:
            yield from safetensors.load_file(shard, device="cuda").values()

    return _measured(read)


def runai(inputs: Inputs) -> Figures:
    """Read with Run:ai's streamer; each tensor is kept as it is handed out."""
    (streamers,) = need("runai_model_streamer")
    files = [str(shard) for shard in inputs.shards]

    def read() -> "Iterable[torch.Tensor]":
        with streamers.SafetensorsStreamer() as streamer:
            streamer.stream_files(files, device="cuda")
            for _, tensor in streamer.get_tensors():
                yield tensor.cuda()

    return _measured(read)


def fastsafetensors(inputs: Inputs) -> Figures:
    """Read with fastsafetensors, without GPUDirect Storage."""
    (fast,) = need("fastsafetensors")
    _gpu()  # it looks for one itself, and says less clearly that there is none
    loader = fast.SafeTensorsFileLoader(None, "cuda:0", nogds=True)

    def read() -> "Iterable[torch.Tensor]":
        loader.add_filenames({0: [str(shard) for shard in inputs.shards]})
        buffers = loader.copy_files_to_device()
        return [buffers.get_tensor(name) for name in loader.get_keys()]

    return _measured(read)


def tensorizer(inputs: Inputs) -> Figures:
    """Read what tensorizer wrote, with tensorizer."""
    (tensorizers,) = need("tensorizer")

    def read() -> "Iterable[torch.Tensor]":
        with tensorizers.TensorDeserializer(str(inputs.tensorized), device="cuda") as tensors:
            return list(tensors.values())

    return _measured(read)


def model_loadstone(inputs: Inputs) -> Figures:
    """Load a model onto the GPU and have its first answer."""
    load_model = need("loadstone")[0].load_model
    return _model(lambda: load_model(inputs.llama, device="cuda"))


def model_from_pretrained(inputs: Inputs) -> Figures:
    """Do the same by transformers."""
    loader = need("transformers")[0].AutoModelForCausalLM
    return _model(lambda: loader.from_pretrained(inputs.llama, device_map="cuda"))


def _model(load: "Callable[[], torch.nn.Module]") -> Figures:
    prepare_models()
    torch = _gpu()
    # The first product of matrices makes the libraries' own contexts: the same work for everyone.
    torch.ones(64, 64, dtype=torch.bfloat16, device="cuda") @ torch.ones(
        64, 64, dtype=torch.bfloat16, device="cuda"
    )
    torch.cuda.synchronize()
    clock = Clock()
    model = load()
    return clock.figures("callable", clock.seconds()) | answered(model, clock)


WAYS: dict[str, Callable[[Inputs], Figures]] = {
    way.__name__: way
    for way in (
        *(bus, loadstone, load_file, runai, fastsafetensors, tensorizer),
        *(model_loadstone, model_from_pretrained),
    )
}


PEERS = frozenset({"runai", "fastsafetensors", "tensorizer"})


def main() -> int:
    """Carry out one way and print its figures."""
    way = sys.argv[1]
    with explained():
        try:
            figures = WAYS[way](Inputs(Path(sys.argv[2])))
        except Exception as error:
            if way not in PEERS or isinstance(error, CannotRun):
                raise
            raise CannotRun(f"failed: {' '.join(str(error).split())[:200]}") from error
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
