"""What this node holds already, on its way from the disk into memory.

Bytes of an earlier boot, or of a model that others have pushed out of memory, are on the node's disk and
nowhere else. A page fault would fetch them page by page; so a prefetch also reads ahead what is here.

Ownership: a `CachedFile` never changes; its threads are those of the `Residency` that uses it.
"""

import os
from collections.abc import Iterator, Sequence

from loadstone.errors import CacheError
from loadstone.loader.files.residency import Residency, Window
from loadstone.loader.node.blob import StoredBlob
from loadstone.loader.node.jobs import Fillable
from loadstone.loader.ranges import ByteRange


class CachedFile:
    """The data file of a blob; see `loadstone.loader.files.residency.MappedFile`."""

    def __init__(self, blob: Fillable, path: str) -> None:
        self._blob = blob
        self._path = path

    @property
    def name(self) -> str:
        """Its path."""
        return self._path

    def buffer(self) -> memoryview:
        """Return the blob's map."""
        return self._blob.stored.view

    def check(self) -> None:
        """Raise when the blob was closed; blocks that are marked never change."""
        self._blob.check_open()

    def read_into(self, offset: int, into: memoryview) -> None:
        """Have the file read; one that was evicted is left to the map, which still has it."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return
        try:
            os.preadv(fd, [into], offset)
        except OSError as error:
            raise CacheError(
                f"{self._path} of the node cache cannot be read: {error.strerror}; check the disk"
            ) from None
        finally:
            os.close(fd)


def bring_into_memory(wanted: Sequence[tuple[Fillable, ByteRange]]) -> Residency | None:
    """Start to read what of ``wanted`` is on this node's disk and not in memory; ``None`` for nothing."""
    windows = []
    for blob, span in wanted:
        paging = blob.stored.paging
        if paging is not None and blob.stored.place is not None and not paging.in_memory():
            file = CachedFile(blob, paging.path)
            windows += [Window(file, run) for run in _here(blob.stored, span)]
    return Residency(windows) if windows else None


def _here(stored: StoredBlob, span: ByteRange) -> Iterator[ByteRange]:
    at = span.start
    for run in stored.missing(span):
        if run.start > at:
            yield ByteRange(at, run.start)
        at = run.stop
    if at < span.stop:
        yield ByteRange(at, span.stop)
