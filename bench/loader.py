"""``loadstone bench loader``: loading from a local disk, piece by piece, beside the loaders people use.

Nine pieces of work, each in fresh processes, ways interleaved, the page cache's state proved before each run:

- *resident*: a checkpoint of four shards, cold, until every byte is in memory, as files and as a node cache
  that holds it; and the disk's own limit. Free memory is touched just before (`own_memory`);
- *usable*: the same, warm, until every tensor can be used, and what that takes of anonymous memory;
- *many*: opening a file of 100,000 tensors and listing their names;
- *model*: a transformers model until it can be called, warm; and building the module alone;
- *layer*: one layer of thirty-two, cold: bytes read from the disk, counted by the kernel;
- *memory*: four processes that hold the same model, the memory of all together;
- *gpu*, *gpu-cold*: the checkpoint onto a GPU, with the page cache warm and cold; and the bus alone;
- *gpu-model*: the transformers model onto a GPU, until its first answer.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loadstone.bench import disk
from loadstone.bench.hold import hold_together
from loadstone.bench.inputs import written
from loadstone.bench.loader_bars import loader_bars
from loadstone.bench.loader_cached import in_node_cache
from loadstone.bench.loader_inputs import Inputs
from loadstone.bench.runner import CannotRun, Way, chosen_works, run_process, run_ways
from loadstone.bench.schema import Report
from loadstone.settings import Settings

PROCESSES = 4

CACHED = "resident_cached"
"""The way that finds the checkpoint in a node cache."""

_CHILD = "loadstone.bench.loader_child"
_MODELS = "loadstone.bench.loader_models_child"
_CUDA = "loadstone.bench.loader_cuda_child"

Files = Callable[[Inputs], Sequence[Path]]


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work: its title, how the page cache is prepared, and its ways by name."""

    title: str
    module: str
    prepare: Callable[[Sequence[Path]], str]
    files: Files
    ways: Mapping[str, str]


def _shards(inputs: Inputs) -> Sequence[Path]:
    return inputs.shards


def _one_file(inputs: Inputs) -> Sequence[Path]:
    return [inputs.many]


def _model(inputs: Inputs) -> Sequence[Path]:
    return [inputs.llama / "model.safetensors"]


def _onto_gpu(state: str) -> dict[str, str]:
    return {
        f"GPU, {state}: loadstone": "loadstone",
        f"GPU, {state}: safetensors load_file": "load_file",
        f"GPU, {state}: Run:ai streamer": "runai",
        f"GPU, {state}: fastsafetensors": "fastsafetensors",
        f"GPU, {state}: tensorizer": "tensorizer",
    }


WORKS: dict[str, Work] = {
    "resident": Work(
        "four shards, cold, until every byte is resident",
        _CHILD,
        disk.make_cold,
        _shards,
        {
            "disk: past the page cache": "disk_direct",
            "disk: plain reads": "disk_plain",
            "disk: into memory for all of it": "disk_keep",
            "cold: loadstone": "resident_loadstone",
            "cold: loadstone, from the node cache": CACHED,
            "cold: safetensors load_file, touched": "resident_load_file",
            "cold: Run:ai streamer": "resident_runai",
            "cold: fastsafetensors": "resident_fastsafetensors",
            "cold: tensorizer": "resident_tensorizer",
        },
    ),
    "usable": Work(
        "four shards, warm, until every tensor is usable",
        _CHILD,
        disk.make_warm,
        _shards,
        {
            "warm: loadstone": "usable_loadstone",
            "warm: safetensors safe_open": "usable_safe_open",
            "warm: safetensors load_file": "usable_load_file",
        },
    ),
    "many": Work(
        "a file of very many tensors, warm, until its names are listed",
        _CHILD,
        disk.make_warm,
        _one_file,
        {"names: loadstone": "many_loadstone", "names: safetensors safe_open": "many_safe_open"},
    ),
    "model": Work(
        "a Llama of 24 layers, warm, until it can be called",
        _MODELS,
        disk.make_warm,
        _model,
        {
            "model: build on meta only": "load_meta",
            "model: loadstone load_model": "load_loadstone",
            "model: from_pretrained": "load_from_pretrained",
        },
    ),
    "layer": Work(
        "one layer of thirty-two, cold",
        _CHILD,
        disk.make_cold,
        _shards,
        {
            "layer: loadstone, by use": "layer_by_use",
            "layer: loadstone, by prefetch": "layer_by_prefetch",
            "layer: safetensors safe_open": "layer_safe_open",
        },
    ),
    "memory": Work(
        f"{PROCESSES} processes that hold the same Llama, together",
        _MODELS,
        disk.make_warm,
        _model,
        {
            "held: build on meta only": "hold_meta",
            "held: loadstone load_model": "hold_loadstone",
            "held: from_pretrained": "hold_from_pretrained",
        },
    ),
    "gpu": Work(
        "four shards, warm, until every byte is on the GPU",
        _CUDA,
        disk.make_warm,
        _shards,
        {"GPU: the bus alone": "bus", **_onto_gpu("warm")},
    ),
    "gpu-cold": Work(
        "four shards, cold, until every byte is on the GPU", _CUDA, disk.make_cold, _shards, _onto_gpu("cold")
    ),
    "gpu-model": Work(
        "a Llama of 24 layers, warm, until its first answer on the GPU",
        _CUDA,
        disk.make_warm,
        _model,
        {
            "GPU model: loadstone load_model": "model_loadstone",
            "GPU model: from_pretrained": "model_from_pretrained",
        },
    ),
}
"""Every piece of work, by the name that ``--only`` takes."""


def loader(
    *,
    size: int,
    runs: int = 3,
    work: Path = Path(),
    keep: bool = False,
    only: Sequence[str] | None = None,
    settings: Settings | None = None,
) -> Report:
    """Measure loading from a local disk.

    Parameters
    ----------
    size : int
        Bytes of the checkpoint, at least.
    runs : int
        Runs of each way.
    work : Path
        A folder on the disk to measure.
    keep : bool
        Leave the inputs there; a later run with the same size uses them again.
    only : sequence of str, optional
        Names out of `WORKS`; all of them by default.

    Returns
    -------
    Report
        Rows of all ways, and bars for what was measured.

    Raises
    ------
    BenchError
        A name in ``only`` is unknown, or loadstone itself could not do a piece of work.
    """
    chosen = chosen_works(only, WORKS)
    env = (settings or Settings.from_env()).environment()
    report = Report("loader", {"size": size, "runs": runs, "work": chosen, "processes": PROCESSES})
    with written("loader", size, work=work, keep=keep, env=env) as folder:
        inputs = Inputs(folder)
        for name in chosen:
            piece = WORKS[name]
            ways = [
                Way(way, partial(_measure, piece, target, inputs, env), piece.title)
                for way, target in piece.ways.items()
            ]
            with in_node_cache(inputs) if CACHED in piece.ways.values() else nullcontext():
                run_ways(report, ways, runs)
        model_bytes = sum(path.stat().st_size for path in _model(inputs))
    report.bars += loader_bars(report, model_bytes)
    return report


def _measure(
    work: Work, target: str, inputs: Inputs, env: Mapping[str, str]
) -> tuple[str, Mapping[str, float]]:
    files = work.files(inputs)
    if target.endswith("tensorizer"):
        files = [inputs.tensorized]
    elif target == CACHED:
        files = inputs.cached
    if not files[0].exists():
        raise CannotRun("is not installed")
    state = work.prepare(files)
    if work is WORKS["resident"]:
        state += ", free memory touched just before"
    argv = [sys.executable, "-m", work.module, target, str(inputs.folder)]
    if target.startswith("hold_"):
        return state, hold_together(argv, env, PROCESSES)
    figures = run_process(argv, env)
    if "resident_seconds" in figures:
        total = sum(path.stat().st_size for path in files)
        figures["rate_bytes_per_second"] = total / figures["resident_seconds"]
    if "layer_" in target:
        figures["cached_after_bytes"] = disk.resident_bytes(files)
    return state, figures
