"""How the pages of a mapped file come when they are used: in blocks, or read ahead, never one by one.

Where the kernel reads blocks at page faults (see `blocks`), the part of the map that a large span covers is
advised to. Then nothing is read before it is touched, and then at the disk's own speed. The ends of a span,
which share their blocks with bytes that nobody asked for, are read ahead; so is everything on older kernels.

Each advised part is a map of its own to the kernel, and a process may have some ten thousands of them.
Whoever uses many spans of a file will use more: then the whole map is advised, which is one part again. And
whoever uses them one after the other, as they lie in the file, will go on so: then the kernel reads ahead.

Ownership: a `Paging` is shared by all threads. When its file was last found in memory is one pair that any
thread may replace, and counts that threads spoil for each other only delay an advice; so it needs no lock.
"""

import time
from collections.abc import Sequence

from loadstone.loader.files import blocks
from loadstone.loader.files.readahead import begin_reading, is_cached, on_network
from loadstone.loader.ranges import ByteRange, coalesce

PARTS = 32
"""Spans of one file that are advised one by one; after them, the whole map is."""
IN_ORDER = 16
"""Spans that must follow one another for a file to count as read from one end to the other."""

_PAGE = 4096
_HINT = 4 * _PAGE  # spans from this size on are worth a request of their own
_TRUSTED = 1.0  # seconds for which what was found in memory is taken to be there still


class Paging:
    """The reading of one mapped file, as spans of it are about to be used.

    Parameters
    ----------
    path : str
        Where it is.
    size : int
        Its length in bytes; 0: parts of it may be holes, so that only spans are looked at, never all of it.
    """

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self._size = size
        self._on_network = on_network(path)
        self._by_blocks = blocks.are_known() and not self._on_network
        self._parts = 0
        self._in_order = 0
        self._stop = 0  # where the last span ended
        self._whole = False
        self._found = (0.0, False)  # until when it holds, and whether all of the file was in memory

    def begin(self, buffer: memoryview, spans: Sequence[ByteRange]) -> None:
        """See to it that ``spans`` are read soon, or when they are touched; ``buffer`` is the file's map."""
        if self._whole or self.in_memory():
            return
        large = [span for span in coalesce(spans, _PAGE) if span.nbytes >= _HINT]
        if self._by_blocks:
            large = self._advise(buffer, large)
        if large:
            begin_reading(self.path, buffer, large, self._on_network)

    def in_memory(self) -> bool:
        """Say whether all of the file was in memory when looked at last; one look serves many tensors."""
        if not self._size:
            return False
        until, found = self._found
        if time.monotonic() >= until:
            found = is_cached(self.path, self._size)
            self._found = (time.monotonic() + _TRUSTED, found)
        return found

    def _advise(self, buffer: memoryview, spans: Sequence[ByteRange]) -> list[ByteRange]:
        """Have blocks of ``spans`` read when they are touched; return what of them is left."""
        left = []
        for span in spans:
            self._in_order = self._in_order + 1 if 0 <= span.start - self._stop < blocks.BLOCK else 0
            self._stop = span.stop
            self._parts += 1
            if self._size and (self._in_order >= IN_ORDER or self._parts > PARTS):
                self._whole = True
                blocks.read_when_touched(buffer, ByteRange(0, self._size), ahead=self._in_order >= IN_ORDER)
                return []
            inner = blocks.within(span)
            if inner.nbytes and self._parts <= PARTS and blocks.read_when_touched(buffer, inner):
                ends = ByteRange(span.start, inner.start), ByteRange(inner.stop, span.stop)
                left += [end for end in ends if end.nbytes >= _HINT]
            else:
                left.append(span)
        return left
