"""Objects without a strong validator: their bytes count only as far as one answer, or equal answers, go.

Ranges of such an object cannot be told apart from those of a later version, so all of it is taken from one
answer. When that answer breaks off, the next begins at 0 again, and every block that was usable already must
come out the same (by digest), or the object has changed.

Ownership: as for `StoredBlob`; one thread at a time has the only claim there is.
"""

import hashlib

from loadstone.errors import ChangedError, TransferError
from loadstone.loader.node.blob import StoredBlob
from loadstone.loader.node.claims import Claim
from loadstone.loader.ranges import BLOCK, ByteRange


class WholeBlob(StoredBlob):
    """A blob in this process's own memory that is fetched in one piece.

    Parameters
    ----------
    name, size : str, int
        As for `StoredBlob`.
    """

    def __init__(self, name: str, size: int) -> None:
        super().__init__(name, size)
        self.digests: dict[int, bytes] = {}

    def claim(self, span: ByteRange, *, private: bool = False) -> Claim | None:  # noqa: ARG002
        """Claim the whole object when some of ``span`` is missing and nobody is fetching it."""
        whole = ByteRange(0, self.size)
        if not self.missing(span) or not self.reserve_all():
            return None
        return _WholeClaim(self, whole)


class _WholeClaim:
    def __init__(self, blob: WholeBlob, span: ByteRange) -> None:
        self._blob = blob
        self._span = span
        self._at = 0
        self._part = bytearray()

    @property
    def range(self) -> ByteRange:
        return self._span

    def write(self, offset: int, data: memoryview) -> None:
        if offset == 0:
            self._at = 0
            self._part.clear()
        if offset != self._at or offset + len(data) > self._span.stop:
            raise TransferError(
                f"{self._blob.name}: {len(data)} bytes at {offset} were delivered where {self._at} to "
                f"{self._span.stop} were due; they are dropped, try again"
            )
        self._at += len(data)
        self._part += data
        start = self._at - len(self._part)
        count = len(self._part) if self._at == self._span.stop else len(self._part) // BLOCK * BLOCK
        with memoryview(self._part) as part:
            for begin in range(0, count, BLOCK):
                self._store((start + begin) // BLOCK, part[begin : min(begin + BLOCK, count)])
        del self._part[:count]

    def finish(self) -> None:
        if self._at != self._span.stop:
            raise TransferError(
                f"{self._blob.name}: {self._at} of {self._span.stop} bytes were delivered; try again"
            )

    def demanded(self, rest: ByteRange) -> bool:  # noqa: ARG002  no other process sees these blocks
        return False

    def close(self) -> None:
        self._blob.unreserve(self._span)

    def _store(self, number: int, data: memoryview) -> None:
        digest = hashlib.blake2b(data, digest_size=20).digest()
        if self._blob.digests.setdefault(number, digest) != digest:
            raise ChangedError(
                f"{self._blob.name} changed while it was read: bytes from {number * BLOCK} differ between "
                "two answers, and the store gives no strong ETag to tell versions apart; open it again"
            )
        self._blob.store_private(number, data)
