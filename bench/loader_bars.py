"""What the loader must reach, computed from the medians of one report."""

from collections.abc import Iterator, Sequence

from loadstone.bench.schema import Bar, Report, ratio

_OURS = "cold: loadstone"
_DISK = ("disk: past the page cache", "disk: plain reads")
_ONTO_GPU = ("safetensors load_file", "Run:ai streamer", "fastsafetensors", "tensorizer")
_MEGABYTE = 1_000_000


def loader_bars(report: Report, model_bytes: int) -> list[Bar]:
    """Return every bar whose figures ``report`` has; ``model_bytes`` is the size of the model held."""
    return [bar for bar in _bars(report, model_bytes) if bar is not None]


def _bars(report: Report, model_bytes: int) -> Iterator[Bar | None]:
    yield _faster(report, "cold until resident: loadstone / the disk's own limit, in rate", _DISK, 0.9)
    kept = "the same: loadstone / the disk into memory for all of it, in rate"
    yield _faster(report, kept, ["disk: into memory for all of it"], 0.9)
    cached = "the same, from a node cache: loadstone / the disk's own limit, in rate"
    yield _faster(report, cached, _DISK, 0.8, ours="cold: loadstone, from the node cache")
    yield _faster(
        report, "the same: times as fast as load_file", ["cold: safetensors load_file, touched"], 2.0
    )
    yield _faster(report, "the same: times as fast as Run:ai streamer", ["cold: Run:ai streamer"], 4.0)
    warm, safe_open = "warm: loadstone", ["warm: safetensors safe_open"]
    yield _at_most(
        "warm until usable: loadstone / safe_open", ratio(report, "usable_seconds", warm, safe_open), 1.2
    )
    growth = report.median(warm, "anonymous_growth_bytes")
    yield _at_most("the same: anonymous memory growth, MB", growth and growth / _MEGABYTE, 20.0)
    names, their_names = "names: loadstone", ["names: safetensors safe_open"]
    listed = ratio(report, "usable_seconds", names, their_names)
    yield _at_most("very many tensors, opened and listed: loadstone / safe_open", listed, 3.0)
    model, theirs = "model: loadstone load_model", ["model: from_pretrained"]
    yield _at_most(
        "model, warm: load_model / from_pretrained", ratio(report, "callable_seconds", model, theirs), 0.25
    )
    beyond = _difference(report, "callable_seconds", model, "model: build on meta only")
    yield _at_most("the same: beyond building on meta, ms", None if beyond is None else 1000 * beyond, 60.0)
    unlike = _difference(report, "logits_sum", model, theirs[0])
    yield _at_most("the same: difference of the logits' sums", None if unlike is None else abs(unlike), 0.0)
    for way in ("layer: loadstone, by use", "layer: loadstone, by prefetch"):
        layer = report.median(way, "layer_bytes")
        for figure, text in (
            ("disk_read_bytes", "read from disk"),
            ("cached_after_bytes", "in the page cache"),
        ):
            found = report.median(way, figure)
            share = found / layer if layer and found is not None else None
            yield _at_most(f"{way}: {text} / the layer in blocks", share, 1.1)
    extra = _difference(
        report, "proportional_bytes", "held: loadstone load_model", "held: build on meta only"
    )
    share = None if extra is None else extra / model_bytes
    yield _at_most("processes that hold one model: their memory beyond interpreters / one copy", share, 1.1)
    yield from _gpu_bars(report)


def _gpu_bars(report: Report) -> Iterator[Bar | None]:
    for state in ("warm", "cold"):
        ours, text = f"GPU, {state}: loadstone", f"{state} until on the GPU"
        for peer in _ONTO_GPU:
            theirs = [f"GPU, {state}: {peer}"]
            share = ratio(report, "resident_seconds", ours, theirs)
            yield _at_most(f"{text}: loadstone / {peer}", share, 1.0)
            unlike = _difference(report, "bytes_sum", ours, theirs[0])
            yield _at_most("the same: difference of the sums of all bytes", unlike and abs(unlike), 0.0)
    model, theirs_model = "GPU model: loadstone load_model", ["GPU model: from_pretrained"]
    share = ratio(report, "first_answer_seconds", model, theirs_model)
    yield _at_most("model until its first answer on the GPU: load_model / from_pretrained", share, 1.0)
    unlike = _difference(report, "logits_sum", model, theirs_model[0])
    yield _at_most("the same: difference of the logits' sums", unlike and abs(unlike), 0.0)


def _faster(report: Report, text: str, theirs: Sequence[str], limit: float, ours: str = _OURS) -> Bar | None:
    """Compare rates over the same bytes: their best time over ours."""
    share = ratio(report, "resident_seconds", ours, theirs)
    return None if share is None else Bar(text, 1 / share, limit, at_most=False)


def _at_most(text: str, value: float | None, limit: float) -> Bar | None:
    return None if value is None else Bar(text, value, limit, at_most=True)


def _difference(report: Report, figure: str, way: str, less: str) -> float | None:
    one, other = report.median(way, figure), report.median(less, figure)
    return None if one is None or other is None else one - other
