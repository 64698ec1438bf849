"""When an S3 ETag is a digest, and of what.

The ETag of an object that was stored in one request is the MD5 of its bytes; that of one stored in N parts is
the MD5 of the parts' MD5s, and ends in ``-N``. Neither holds where the store encrypted with keys of a
management service or of the customer, nor in directory buckets.

Where the parts lie is asked for the first and the last, which is enough where all are of one size, as nearly
everything is stored. Parts in between may be of any sizes that add up to the same: those are asked for once a
digest does not match. Pure but for `stated` and what it returns, which ask the store.
"""

import re
from collections.abc import Callable
from http.client import HTTPMessage
from itertools import pairwise

from loadstone.errors import AccessError, FormatError, NotFoundError, TransferError
from loadstone.loader.ranges import ByteRange, split
from loadstone.loader.source import StatedDigest
from loadstone.loader.stores.answers import content_range
from loadstone.loader.stores.store import Version
from loadstone.loader.together import side_by_side

_DIGEST = re.compile(r'"([0-9a-f]{32})(?:-([1-9][0-9]{0,4}))?"', re.IGNORECASE | re.ASCII)
_KEYS = ("x-amz-server-side-encryption-customer-algorithm", "x-goog-encryption-algorithm")
_KMS = ("x-amz-server-side-encryption-aws-kms-key-id", "x-goog-encryption-kms-key-name")
_SILENT = "it was stored in parts, and the store does not say how large they are"
_MOST_PARTS = 10_000  # that an S3 object may have
_TOLD_BY_TWO = 3  # parts: the first and the last of so many tell of all
_ASKERS = 8

Ask = Callable[[str, dict[str, str]], HTTPMessage]
"""Returns the headers of the object's answer to a query and headers; the body is not read."""


def stated(version: Version, ask: Ask) -> StatedDigest:
    """Say what the ETag of ``version`` is a digest of.

    Parameters
    ----------
    version : Version
        Of an object of an S3 store.
    ask : Callable
        Sends one request about the object.
    """
    match = _DIGEST.fullmatch(version.tag)
    if match is None:
        return StatedDigest(reason=f"its ETag {version.tag[:80]} is no digest")
    count = int(match[2] or 0)
    if count > _MOST_PARTS:
        return StatedDigest(reason=f"its ETag tells of {count} parts, and S3 knows {_MOST_PARTS} at most")
    return _asked(lambda: _few(version, count, ask))


def _asked(what: Callable[[], StatedDigest]) -> StatedDigest:
    try:
        return what()
    except (AccessError, FormatError, NotFoundError, TransferError) as error:
        return StatedDigest(reason=f"whether its ETag is a digest could not be asked: {error}")


def encryption(headers: HTTPMessage) -> str:
    """Return why encryption keeps the ETag from being a digest; empty when it does not."""
    kind = (headers.get("x-amz-server-side-encryption") or "AES256").strip()
    if kind != "AES256" or any(name in headers for name in (*_KEYS, *_KMS)):
        return "it is encrypted with keys of its own, so its ETag is no digest"
    return ""


def _few(version: Version, count: int, ask: Ask) -> StatedDigest:
    """Say what the ETag is of, asking for two of the parts at most; ``count`` is 0 where there are none."""
    etag, whole = version.tag.strip('"').lower(), ByteRange(0, version.size)
    if count <= 1:
        reason = encryption(ask("", {"Range": "bytes=0-0"}))
        return StatedDigest(reason=reason) if reason else StatedDigest(etag, (whole,) * count)
    headers = ask("partNumber=1", {})
    reason = encryption(headers)
    if reason:
        return StatedDigest(reason=reason)
    found = content_range(headers)
    if found is None or found.part is None or found.part.start != 0 or found.total != version.size:
        return StatedDigest(reason=_SILENT)
    size = found.part.nbytes
    start = size * (count - 1)
    if not start < version.size <= start + size or _part(count, ask) != ByteRange(start, version.size):
        return StatedDigest(reason="it was stored in parts of different sizes")
    parts = tuple(split(whole, size))
    # Of three parts, the one in the middle is what the others leave.
    between = None if count <= _TOLD_BY_TWO else lambda: _asked(lambda: _all(etag, parts, ask))
    return StatedDigest(etag, parts, surer=between)


def _all(etag: str, presumed: tuple[ByteRange, ...], ask: Ask) -> StatedDigest:
    """Say what the ETag is of, asking for every part between the first and the last."""
    first, last = presumed[0], presumed[-1]
    numbers = range(2, len(presumed))
    between = side_by_side(lambda number: _part(number, ask), numbers, _ASKERS, "loadstone-parts")
    parts = [first, *(part for part in between if part is not None), last]
    if len(parts) != len(presumed) or any(left.stop != right.start for left, right in pairwise(parts)):
        return StatedDigest(reason=_SILENT)
    return StatedDigest(etag, tuple(parts))


def _part(number: int, ask: Ask) -> ByteRange | None:
    """Return what a part is, as far as the store says so."""
    found = content_range(ask(f"partNumber={number}", {}))
    return None if found is None else found.part
