"""What transfers must reach, computed from the medians of one report."""

from collections.abc import Iterator, Sequence

from loadstone.bench import transfer_works as works
from loadstone.bench.schema import Bar, Report, ratio
from loadstone.display import human_seconds

_MEGABYTE = 1_000_000
_SECONDS, _CPU = "all_bytes_seconds", "cpu_seconds_per_gib"


def transfer_bars(report: Report) -> list[Bar]:
    """Return every bar whose figures ``report`` has."""
    return [bar for bar in _bars(report) if bar is not None]


def _bars(report: Report) -> Iterator[Bar | None]:
    def times(text: str, theirs: Sequence[str], limit: float) -> Bar | None:
        share = ratio(report, _SECONDS, works.OURS, theirs)
        return None if share is None else Bar(text, 1 / share, limit, at_most=False)

    def cpu(text: str, theirs: Sequence[str], limit: float) -> Bar | None:
        return _at_most(text, ratio(report, _CPU, works.OURS, theirs), limit)

    yield times("to disk: times as fast as Run:ai streamer S3 at its best", works.RUNAI, 4.0)
    yield times("the same: times as fast as s3fs.get and load_file", [works.S3FS], 3.0)
    yield times("the same: times as fast as obstore at its best range size", works.OBSTORE, 1.3)
    yield cpu("the same: client CPU / Run:ai's", works.RUNAI, 0.3)
    yield cpu("the same: client CPU / s3fs's", [works.S3FS], 0.6)
    share = ratio(report, _SECONDS, "memory: loadstone", works.RAW_MEMORY)
    if share is not None:
        text = "into memory: rate / raw sockets' into untouched memory, the faster of two kinds"
        yield Bar(text, 1 / share, 0.6, at_most=False)
    raw = ["link: raw sockets"]
    yield _at_most(
        "link: until all bytes / raw sockets", ratio(report, _SECONDS, "link: loadstone", raw), 1.03
    )
    yield _first_token(report)
    theirs = ["layer: raw sockets, alone"]
    demand = ratio(report, "layer_seconds", "layer: loadstone, the rest on its way", theirs)
    yield _at_most("link: a layer on demand / its own transfer by raw sockets, alone", demand, 1.5)
    trips = report.median(works.OPEN_FAR, "round_trips")
    yield _at_most("30 shards opened: round trips in all the time it takes, computing included", trips, 6.0)
    yield _at_most(
        "the same: round trips of the network, less the time at no distance", _network(report), 6.0
    )
    over = report.median("anonymous: loadstone prefetch", "over_interpreter_bytes")
    yield _at_most("to disk: anonymous memory over the interpreter, MB", over and over / _MEGABYTE, 100.0)
    first = report.median("first request: loadstone prefetch", "first_request_seconds")
    yield _at_most("loadstone prefetch: process start to first request, s", first, 0.35)


def _network(report: Report) -> float | None:
    """Return the round trips that opening waits for: what it takes longer at a distance than at none."""
    far, near = (report.median(way, "open_seconds") for way in (works.OPEN_FAR, works.OPEN_NEAR))
    return None if far is None or near is None else (far - near) / works.ROUND_TRIP


def _first_token(report: Report) -> Bar | None:
    first = report.median(works.START_RUN, "first_token_seconds")
    start = report.median(works.START_ALONE, "first_token_seconds")
    transfer = report.median(works.START_TRANSFER, _SECONDS)
    if first is None or start is None or transfer is None:
        return None
    parts = f"{human_seconds(start)} start alone, {human_seconds(transfer)} transfer alone"
    text = (
        f"link: first token / the longer of {parts} (one after the other: {human_seconds(start + transfer)})"
    )
    return Bar(text, first / max(start, transfer), 1.1, at_most=True)


def _at_most(text: str, value: float | None, limit: float) -> Bar | None:
    return None if value is None else Bar(text, value, limit, at_most=True)
