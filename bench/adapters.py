"""``loadstone bench adapters``: adapters over one shared base, piece by piece, beside PEFT.

Seven pieces of work, each way in fresh processes, ways interleaved. The files are in the page cache: hot
loading is about adapters that a node has already.

- *load*: an adapter that was looked at before, until the next batch can use it;
- *look*: the same for one that was never seen: its digest and a scan for values that are no numbers are due;
- *held*: what attached adapters take of memory;
- *crowd*: very many registered, many mapped, over one base;
- *cycle*: load, use and unload again and again: memory must stay what it was;
- *decode*: the time of a decode step while another thread loads adapters, beside phases in which none does;
- *mix*: one batch in which every row has another adapter.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from loadstone.bench import disk
from loadstone.bench.adapters_bars import adapters_bars
from loadstone.bench.adapters_inputs import Inputs, scale_of
from loadstone.bench.inputs import written
from loadstone.bench.runner import Way, chosen_works, run_process, run_ways
from loadstone.bench.schema import Report
from loadstone.settings import Settings

_CHILD = "loadstone.bench.adapters_child"


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work: its title, and its ways by name, each with the side that does it."""

    title: str
    ways: Mapping[str, str]


WORKS: dict[str, Work] = {
    "load": Work(
        "a known adapter, until the next batch can use it",
        {
            "load: loadstone": "loadstone",
            "load: PEFT load_adapter": "peft",
            "load: PEFT load_adapter, fastest options": "peft_fastest",
            "load: PEFT hotswap_adapter": "hotswap",
        },
    ),
    "look": Work("an adapter never seen before", {"first look: loadstone": "loadstone"}),
    "held": Work(
        "memory of attached adapters",
        {"held: loadstone": "loadstone", "held: PEFT": "peft", "held: PEFT, fastest options": "peft_fastest"},
    ),
    "crowd": Work(
        "very many adapters over one base",
        {"crowd: loadstone": "loadstone", "crowd: PEFT, fastest options": "peft_fastest"},
    ),
    "cycle": Work(
        "load, use, unload, again and again",
        {"cycle: loadstone": "loadstone", "cycle: PEFT, fastest options": "peft_fastest"},
    ),
    "decode": Work(
        "decode steps while adapters load, one torch thread",
        {"decode: loadstone": "loadstone", "decode: PEFT, fastest options": "peft_fastest"},
    ),
    "mix": Work(
        "a batch of as many adapters as rows",
        {
            "mix: loadstone": "loadstone",
            "mix: PEFT adapter_names": "peft",
            "mix: PEFT adapter_names, fastest options": "peft_fastest",
        },
    ),
}
"""Every piece of work, by the name that ``--only`` takes."""


def adapters(
    *,
    size: int,
    runs: int = 3,
    work: Path = Path(),
    keep: bool = False,
    only: Sequence[str] | None = None,
    settings: Settings | None = None,
) -> Report:
    """Measure adapters over one base, beside PEFT.

    Parameters
    ----------
    size : int
        Bytes of the base, at least.
    runs : int
        Runs of each way.
    work : Path
        A folder for the inputs.
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
    scale = scale_of(size)
    report = Report("adapters", {"size": size, "runs": runs, "work": chosen, **asdict(scale)})
    with written("adapters", size, work=work, keep=keep, env=env) as folder:
        inputs = Inputs(folder, scale)
        for name in chosen:
            piece = WORKS[name]
            ways = [
                Way(way, partial(_measure, name, side, inputs, size, env), piece.title)
                for way, side in piece.ways.items()
            ]
            run_ways(report, ways, runs)
    report.bars += adapters_bars(report)
    return report


def _measure(
    work: str, side: str, inputs: Inputs, size: int, env: Mapping[str, str]
) -> tuple[str, Mapping[str, float]]:
    state = disk.make_warm(inputs.files())
    return state, run_process([sys.executable, "-m", _CHILD, work, side, str(inputs.folder), str(size)], env)
