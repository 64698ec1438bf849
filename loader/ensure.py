"""Waiting for byte ranges of several files, which come side by side.

Ownership: a function; what it is given belongs to its callers.
"""

import time
from collections.abc import Mapping, Sequence

from loadstone.loader.ranges import ByteRange, coalesce
from loadstone.loader.source import Blob, Source, Span


def ensure(
    source: Source,
    blobs: Mapping[str, Blob],
    spans: Mapping[str, Sequence[ByteRange]],
    timeout: float | None = None,
) -> None:
    """Block until ``spans`` can be used, ahead of any prefetch.

    Parameters
    ----------
    source : Source
        Where the blobs are from.
    blobs, spans : mapping
        By the names of files.
    timeout : float, optional
        Seconds, for all of them together.

    Raises
    ------
    LoadstoneError
        They cannot be had, or not in time.
    """
    if len(spans) > 1:
        whole = [(blobs[file], part) for file, parts in spans.items() for part in coalesce(parts)]
        late = [Span(blob, part) for blob, part in whole if not blob.ready(part)]
        if late:
            source.prefetch(late)
    deadline = None if timeout is None else time.monotonic() + timeout
    for file, parts in spans.items():
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        blobs[file].ensure(parts, left)
