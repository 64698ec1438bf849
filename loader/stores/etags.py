"""When an S3 ETag is a digest, and of what.

The ETag of an object that was stored in one request is the MD5 of its bytes; that of one stored in N parts is
the MD5 of the parts' MD5s, and ends in ``-N``. Neither holds where the store encrypted with keys of a
management service or of the customer, nor in directory buckets. Pure but for `stated`, which asks the store.
"""

import re
from collections.abc import Callable
from http.client import HTTPMessage

from loadstone.errors import AccessError, FormatError, NotFoundError, TransferError
from loadstone.loader.ranges import ByteRange
from loadstone.loader.source import StatedDigest
from loadstone.loader.stores.answers import content_range
from loadstone.loader.stores.store import Version

_DIGEST = re.compile(r'"([0-9a-f]{32})(?:-([1-9][0-9]{0,4}))?"', re.IGNORECASE | re.ASCII)
_KEYS = ("x-amz-server-side-encryption-customer-algorithm", "x-goog-encryption-algorithm")
_KMS = ("x-amz-server-side-encryption-aws-kms-key-id", "x-goog-encryption-kms-key-name")

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
    try:
        if match[2] is None:
            reason, part_size = encryption(ask("", {"Range": "bytes=0-0"})), 0
        else:
            reason, part_size = _parts(version, int(match[2]), ask)
    except (AccessError, FormatError, NotFoundError, TransferError) as error:
        return StatedDigest(reason=f"whether its ETag is a digest could not be asked: {error}")
    if reason:
        return StatedDigest(reason=reason)
    return StatedDigest(version.tag.strip('"').lower(), part_size)


def encryption(headers: HTTPMessage) -> str:
    """Return why encryption keeps the ETag from being a digest; empty when it does not."""
    kind = (headers.get("x-amz-server-side-encryption") or "AES256").strip()
    if kind != "AES256" or any(name in headers for name in (*_KEYS, *_KMS)):
        return "it is encrypted with keys of its own, so its ETag is no digest"
    return ""


def _parts(version: Version, count: int, ask: Ask) -> tuple[str, int]:
    """Return why parts cannot be told, else empty, and the size of all but the last."""
    if count == 1:
        return encryption(ask("", {"Range": "bytes=0-0"})), version.size
    headers = ask("partNumber=1", {})
    found = content_range(headers)
    if found is None or found.part is None or found.part.start != 0 or found.total != version.size:
        return "it was stored in parts, and the store does not say how large they are", 0
    size = found.part.nbytes
    last = content_range(ask(f"partNumber={count}", {}))
    start = size * (count - 1)
    if (
        not start < version.size <= start + size
        or last is None
        or last.part != ByteRange(start, version.size)
    ):
        return "it was stored in parts of different sizes", 0
    return encryption(headers), size
