"""One piece of work with adapters, in a fresh process: ``adapters_child WORK SIDE FOLDER SIZE``.

``FOLDER`` is what `loadstone.bench.adapters_inputs` wrote for ``SIZE``. Prints its figures as one JSON line.
Imports and the base come before the clock starts: they are the same work for everyone. The first side to
give an answer leaves it in ``FOLDER``, and later ones tell by how much theirs differ.
"""

import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Self

import torch
from safetensors.torch import load_file, save_file

from loadstone.bench.adapters_inputs import Inputs, scale_of
from loadstone.bench.adapters_sides import SIDES, Loadstone, Side, Step, new_cache
from loadstone.bench.loader_child import explained
from loadstone.bench.process import mapped_bytes, proportional_bytes, status_bytes
from loadstone.bench.runner import CannotRun

Figures = dict[str, float]

_PROMPT = [[1, 2, 3, 4, 5, 6, 7, 8]]
_AGAIN = 10  # every which load is also used, and how often listings are repeated
_WARM = 3  # steps before any is counted


def load(side: Side, inputs: Inputs) -> Figures:
    """Load adapters that were looked at before, and see what the first use of some costs."""
    for number in range(inputs.scale.rows):
        side.load("known", inputs.adapter(number))
        side.unload("known")
    ids = torch.tensor([[1]])
    times, firsts, nexts = [], [], []
    for number in range(inputs.scale.loads):
        name = f"n{number}"
        times.append(_seconds(partial(side.load, name, inputs.adapter(number))))
        if number % _AGAIN == 0:
            with side.running([name]) as step:
                firsts.append(_seconds(partial(step, ids)))
                nexts.append(_seconds(partial(step, ids)))
        side.unload(name)
    side.load("answer", inputs.adapter(1))
    with side.running(["answer"]) as step:
        answer = _answer("load", side, step, torch.tensor(_PROMPT), inputs)
    return {
        "usable_seconds": median(times),
        "slowest_seconds": max(times),
        "first_step_seconds": median(firsts),
        "next_step_seconds": median(nexts),
        **answer,
    }


def look(side: Side, inputs: Inputs) -> Figures:
    """Load adapters that this process has never seen, over a base that it has."""
    side.load("warm", inputs.one_of_crowd(0))
    times = []
    for number in range(inputs.scale.rows):
        name = f"n{number}"
        times.append(_seconds(partial(side.load, name, inputs.adapter(number))))
        side.unload(name)
    return {"usable_seconds": median(times), "slowest_seconds": max(times)}


def held(side: Side, inputs: Inputs) -> Figures:
    """Attach some adapters, use each, and see how much memory they take together."""
    ids = torch.tensor(_PROMPT)

    def bring(number: int) -> None:
        side.load(f"n{number}", inputs.adapter(number))
        with side.running([f"n{number}"]) as step:
            step(ids)

    bring(0)
    memory = _Memory()
    for number in range(1, inputs.scale.held + 1):
        bring(number)
    held_bytes, anonymous = memory.growth()
    each = held_bytes / inputs.scale.held
    return {
        "file_bytes": inputs.adapter_bytes,
        "held_each_bytes": each,
        "anonymous_each_bytes": anonymous / inputs.scale.held,
        "times_the_file": each / inputs.adapter_bytes,
    }


def crowd(side: Side, inputs: Inputs) -> Figures:
    """Register very many adapters and map many, over a base whose every page is in memory."""
    ids = torch.tensor(_PROMPT)
    side.bare(ids)
    side.load("warm", inputs.adapter(0))
    side.unload("warm")
    if isinstance(side, Loadstone):
        side.touch_base()
    memory = _Memory()
    names = [f"n{number:04}" for number in range(inputs.scale.registered)]
    figures: Figures = {}
    began = time.perf_counter()
    if isinstance(side, Loadstone):
        for number, name in enumerate(names):
            side.pool.register(name, str(inputs.one_of_crowd(number)))
        for name in names[: inputs.scale.mapped]:
            side.pool.lease([name]).release()
        figures["brought_seconds"] = time.perf_counter() - began
        brought = inputs.scale.mapped
        states = [status.mapped_bytes > 0 for status in side.pool.list()]
        figures["registered"], figures["mapped"] = len(states), sum(states)
        figures["listing_seconds"] = median(_seconds(side.pool.list) for _ in range(_AGAIN))
        figures["base_resident_share"] = mapped_bytes(inputs.weights) / _in_pages(inputs.weights)
    else:  # fewer: each takes longer than the one before, and the two hundredth seconds
        brought = inputs.scale.rows
        for number, name in enumerate(names[:brought]):
            side.read(name, inputs.one_of_crowd(number))
        figures["brought_seconds"] = time.perf_counter() - began
        figures["mapped"] = brought
    _, anonymous = memory.growth()
    return {
        **figures,
        "files_bytes": sum(inputs.crowd_bytes(number) for number in range(brought)),
        "anonymous_growth_bytes": anonymous,
        "anonymous_each_bytes": anonymous / brought,
        "beyond_budget_bytes": anonymous - side.budgeted_bytes,
    }


def cycle(side: Side, inputs: Inputs) -> Figures:
    """Load, use and unload one adapter after another; see whether resident memory stays what it was."""
    ids = torch.tensor(_PROMPT)
    resident = []
    began = time.perf_counter()
    for number in range(inputs.scale.rows + inputs.scale.cycles):
        name = f"n{number}"
        side.load(name, inputs.adapter(number))
        with side.running([name]) as step:
            step(ids)
        side.unload(name)
        resident.append(status_bytes("VmRSS"))
    seconds = time.perf_counter() - began
    counted = resident[inputs.scale.rows :]  # every adapter was there once
    return {
        "cycle_seconds": seconds / len(resident),
        "resident_first_bytes": counted[0],
        "resident_last_bytes": counted[-1],
        "resident_most_bytes": max(counted),
        "resident_spread": (max(counted) - min(counted)) / counted[0],
    }


def decode(side: Side, inputs: Inputs) -> Figures:
    """Decode in this thread, in every other phase while another thread loads adapters all the time."""
    for number in range(inputs.scale.rows):
        side.load("known", inputs.adapter(number))
        side.unload("known")
    side.load("running", inputs.adapter(0))
    quiet: list[float] = []
    loading: list[float] = []
    loads = 0
    loading_seconds = 0.0
    phases = inputs.scale.phases
    if not isinstance(side, Loadstone):
        phases = max(2, phases // 5)  # a step takes seconds there
    with side.running(["running"]) as step:
        _decode(step, _WARM)
        for phase in range(phases):
            if phase % 2 == 0:
                quiet += _decode(step, inputs.scale.steps)
                continue
            began = time.perf_counter()
            with _Loader(side, inputs) as loader:
                loading += _decode(step, inputs.scale.steps)
            loads += loader.loads
            loading_seconds += time.perf_counter() - began
    return {
        "quiet_median_seconds": median(quiet),
        "quiet_p99_seconds": _p99(quiet),
        "loading_median_seconds": median(loading),
        "loading_p99_seconds": _p99(loading),
        "p99_ratio": _p99(loading) / _p99(quiet),
        "loads_each_second": loads / loading_seconds,
    }


def mix(side: Side, inputs: Inputs) -> Figures:
    """Run batches whose every row has another adapter, and the same without any, in turns."""
    rows = inputs.scale.rows
    ids = torch.arange(1, rows + 1).reshape(rows, 1)
    side.bare(ids)
    memory = _Memory()
    names = [f"n{number}" for number in range(rows)]
    for number, name in enumerate(names):
        side.load(name, inputs.adapter(number))
    with side.running(names) as step:
        first = _seconds(partial(step, ids))
        held_bytes, _ = memory.growth()
        for _ in range(_WARM):
            step(ids)
        pairs = [
            (_seconds(partial(side.bare, ids)), _seconds(partial(step, ids)))
            for _ in range(inputs.scale.batches)
        ]
        answer = _answer("mix", side, step, torch.tensor(_PROMPT * rows), inputs)
    return {
        "bare_step_seconds": median(bare for bare, _ in pairs),
        "mixed_step_seconds": median(mixed for _, mixed in pairs),
        "adapter_part_seconds": median(mixed - bare for bare, mixed in pairs),
        "first_step_seconds": first,
        "held_times_the_files": held_bytes / (rows * inputs.adapter_bytes),
        **answer,
    }


WORKS: dict[str, Callable[[Side, Inputs], Figures]] = {
    "load": load,
    "look": look,
    "held": held,
    "crowd": crowd,
    "cycle": cycle,
    "decode": decode,
    "mix": mix,
}
"""Every piece of work, by the name that the command line takes."""


class _Memory:
    """How much memory this process takes beyond what it took when this was made."""

    def __init__(self) -> None:
        self._held, self._anonymous = self._now()

    def growth(self) -> tuple[float, float]:
        """Return the growth of all memory, shared pages by their share, and of anonymous memory."""
        held_bytes, anonymous = self._now()
        return held_bytes - self._held, anonymous - self._anonymous

    @staticmethod
    def _now() -> tuple[int, int]:
        gc.collect()
        return proportional_bytes(), status_bytes("RssAnon")


class _Loader:
    """A thread that loads and unloads adapters for as long as the ``with`` block runs."""

    def __init__(self, side: Side, inputs: Inputs) -> None:
        self.loads = 0
        self._side = side
        self._inputs = inputs
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="loadstone-bench-loader")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise CannotRun(f"loading beside a running batch failed: {self._error}")

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._side.read("loaded", self._inputs.adapter(self.loads))
                self._side.unload("loaded")
                self.loads += 1
        except Exception as error:  # noqa: BLE001  whatever it is, the figures would be of something else
            self._error = error


def _decode(step: Step, count: int) -> list[float]:
    """Answer a prompt, one token at a time; return the time of each step after the prompt's."""
    cache = new_cache()
    token = step(torch.tensor(_PROMPT), cache).argmax(-1, keepdim=True)
    times = []
    for _ in range(count):
        began = time.perf_counter()
        token = step(token, cache).argmax(-1, keepdim=True)
        times.append(time.perf_counter() - began)
    return times


def _answer(work: str, side: Side, step: Step, ids: torch.Tensor, inputs: Inputs) -> Figures:
    """Return what the adapters change, and how far that is from the first side's answer, by largest logit."""
    logits, bare = step(ids).float(), side.bare(ids).float()
    figures = {"adapter_effect": _distance(logits, bare)}
    known = inputs.folder / f"answer-{work}.safetensors"
    if known.exists():
        figures["answer_difference"] = _distance(logits, load_file(known)["logits"])
    else:
        save_file({"logits": logits.clone()}, known)
    return figures


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _p99(times: list[float]) -> float:
    return quantiles(times, n=100, method="inclusive")[98]


def _in_pages(path: Path) -> int:
    return -(-path.stat().st_size // 4096) * 4096


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Have torch compute with so many threads; ``None`` leaves it to torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main() -> int:
    """Carry out one piece of work and print its figures."""
    work, side, folder, size = sys.argv[1:]
    inputs = Inputs(Path(folder), scale_of(int(size)))
    # Loads have a core of their own then, so what they take from a step is what they keep it waiting.
    with explained(), threads(1 if work == "decode" else None):
        print(json.dumps(WORKS[work](SIDES[side](inputs), inputs)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
