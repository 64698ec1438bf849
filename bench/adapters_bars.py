"""What adapters must reach, computed from the medians of one report."""

from collections.abc import Iterator

from loadstone.bench.schema import Bar, Report, ratio

_LOAD, _MIX, _CROWD = "load: loadstone", "mix: loadstone", "crowd: loadstone"
_PEFT_LOADS = ("load: PEFT load_adapter", "load: PEFT load_adapter, fastest options")
_PEFT_MIXES = ("mix: PEFT adapter_names", "mix: PEFT adapter_names, fastest options")
_HOTSWAP = "load: PEFT hotswap_adapter"
_MEGABYTE = 1_000_000
_ALIKE = 0.05
"""How far two answers in bf16 may be apart that were computed in another order."""


def adapters_bars(report: Report) -> list[Bar]:
    """Return every bar whose figures ``report`` has; PEFT's best way counts."""
    return [bar for bar in _bars(report) if bar is not None]


def _bars(report: Report) -> Iterator[Bar | None]:
    usable = ratio(report, "usable_seconds", _LOAD, _PEFT_LOADS)
    yield _at_most("a known adapter until usable: loadstone / PEFT load_adapter", usable, 0.15)
    swapped = ratio(report, "usable_seconds", _LOAD, [_HOTSWAP])
    yield _at_most("the same: loadstone / PEFT hotswap_adapter", swapped, 0.6)
    held = report.median("held: loadstone", "times_the_file")
    yield _at_most("memory of an attached adapter / its file", held, 1.1)
    share = report.median(_CROWD, "base_resident_share")
    yield _at_most("very many adapters: the base's pages in memory / its file", share, 1.0)
    growth = report.median(_CROWD, "beyond_budget_bytes")
    yield _at_most("the same: anonymous growth beyond the budget, MB", growth and growth / _MEGABYTE, 5.0)
    listing = report.median(_CROWD, "listing_seconds")
    yield _at_most("the same: listing all of them, ms", listing and 1000 * listing, 20.0)
    spread = report.median("cycle: loadstone", "resident_spread")
    yield _at_most("load, use, unload: spread of resident memory", spread, 0.02)
    slower = report.median("decode: loadstone", "p99_ratio")
    yield _at_most("decode steps while adapters load: p99 / the quiet p99", slower, 1.15)
    part = ratio(report, "adapter_part_seconds", _MIX, _PEFT_MIXES)
    yield (
        None
        if part is None
        else Bar(
            "a batch of as many adapters as rows: adapter part of PEFT / loadstone",
            1 / part,
            3.0,
            at_most=False,
        )
    )
    for way in (*_PEFT_LOADS, _HOTSWAP, *_PEFT_MIXES):
        apart = report.median(way, "answer_difference")
        yield _at_most(f"{way}: its answers differ from loadstone's, by largest logit", apart, _ALIKE)


def _at_most(text: str, value: float | None, limit: float) -> Bar | None:
    return None if value is None else Bar(text, value, limit, at_most=True)
