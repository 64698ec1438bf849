"""What an HTTP answer says, and whether it may be believed. Pure: no I/O.

Servers ignore ranges, shift them, compress, replace objects and send login pages, all with a friendly
status. Every answer passes through here before a byte of it is used.
"""

import email.utils
import re
import sys
import time
from dataclasses import dataclass
from http.client import HTTPMessage

from loadstone.errors import ChangedError, FormatError, LoadstoneError, TransferError
from loadstone.loader.locations import redact
from loadstone.loader.ranges import ByteRange
from loadstone.loader.stores.backoff import MisanswerError
from loadstone.loader.stores.store import Version

_RANGE = re.compile(r"bytes\s+(?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)", re.IGNORECASE | re.ASCII)
_STRONG = re.compile(r'"[\x21\x23-\x7e\x80-\xff]*"')
_DIGITS = re.compile(r"[0-9]{1,19}")
_REFERENCE = re.compile(r"&(lt|gt|amp|quot|apos|#[xX][0-9a-fA-F]{1,8}|#[0-9]{1,8});")
_ENTITIES = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}
_MESSAGE_LIMIT = 200
_LONGEST_BELIEVED = 3600.0


@dataclass(frozen=True, slots=True)
class ContentRange:
    """A ``Content-Range``: which bytes (``None``: none of them) of how many (``None``: unknown)."""

    part: ByteRange | None
    total: int | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is not the object: its status and what the body said about it."""

    status: int
    code: str
    message: str
    region: str
    clock: float | None = None
    """When the store says it was, in seconds since 1970."""

    def __str__(self) -> str:
        detail = ": ".join(text for text in (self.code, self.message) if text)
        return f"{self.status} {detail}".rstrip()


def content_range(headers: HTTPMessage) -> ContentRange | None:
    """Read ``Content-Range``; ``None`` when it is absent or makes no sense."""
    match = _RANGE.fullmatch((headers.get("Content-Range") or "").strip())
    if match is None:
        return None
    total = None if match[3] == "*" else int(match[3])
    if match[1] is None:
        return ContentRange(None, total)
    start, stop = int(match[1]), int(match[2]) + 1
    if start >= stop or (total is not None and stop > total):
        return None
    return ContentRange(ByteRange(start, stop), total)


def content_length(headers: HTTPMessage) -> int | None:
    """Read ``Content-Length``; ``None`` when it is absent, contradictory or not a number."""
    if "chunked" in (headers.get("Transfer-Encoding") or "").lower():
        return None
    values = {value.strip() for value in headers.get_all("Content-Length") or ()}
    value = values.pop() if len(values) == 1 else ""
    return int(value) if _DIGITS.fullmatch(value) else None


def strong_tag(headers: HTTPMessage) -> str:
    """Return the strong ETag, quotes included; empty when there is none, or only a weak one."""
    tags = headers.get_all("ETag") or ()
    return tags[0].strip() if len(tags) == 1 and _STRONG.fullmatch(tags[0].strip()) else ""


def retry_after(headers: HTTPMessage) -> float | None:
    """Read ``Retry-After`` as seconds from now."""
    value = (headers.get("Retry-After") or "").strip()
    if _DIGITS.fullmatch(value):
        return float(value)
    until = _seconds(value)
    if until is None:
        return None
    now = server_clock(headers)
    if now is not None:
        return max(0.0, until - now)
    # Without the store's own clock there is this machine's, which may be years off: then it tells nothing.
    seconds = until - time.time()
    return max(0.0, seconds) if seconds <= _LONGEST_BELIEVED else None


def server_clock(headers: HTTPMessage) -> float | None:
    """Read ``Date``, the clock of who answered, as seconds since 1970."""
    return _seconds((headers.get("Date") or "").strip())


def _seconds(date: str) -> float | None:
    try:
        parsed = email.utils.parsedate_tz(date)
        return float(email.utils.mktime_tz(parsed)) if parsed else None
    except (ValueError, OverflowError):
        return None


def refusal(status: int, headers: HTTPMessage, body: bytes) -> Refusal:
    """Read an error answer: S3's XML where there is one."""
    text = body.decode("utf-8", "replace")
    message = " ".join(redact(_element(text, "Message")).split())[:_MESSAGE_LIMIT]
    region = headers.get("x-amz-bucket-region") or _element(text, "Region")
    region = region if _is_region(region) else ""
    return Refusal(status, _element(text, "Code")[:80], message, region, server_clock(headers))


def check_plain(name: str, status: int, headers: HTTPMessage) -> None:
    """Refuse an encoded body, and a 200 that claims to be a part."""
    encoding = (headers.get("Content-Encoding") or "identity").strip().lower()
    if encoding not in ("identity", "aws-chunked", ""):
        raise MisanswerError(
            FormatError(
                f"{name}: answered with Content-Encoding {encoding[:40]}, expected plain bytes; serve model "
                "files without compression"
            )
        )
    if status == 200 and "Content-Range" in headers:
        raise MisanswerError(
            FormatError(
                f"{name}: answered 200 with a Content-Range, which contradict each other; check the server"
            )
        )


def check_part(name: str, headers: HTTPMessage, asked: ByteRange, version: Version) -> ByteRange:
    """Check a 206 for ``asked`` of ``version``; returns the bytes it carries, which may be fewer.

    Raises
    ------
    ChangedError
        It belongs to another version.
    MisanswerError
        It cannot be right.
    """
    found = content_range(headers)
    if found is None or found.part is None:
        raise MisanswerError(
            FormatError(f"{name}: answered 206 without a usable Content-Range; check the server or proxy")
        )
    check_version(name, headers, version, found.total)
    part = found.part
    if part.start != asked.start or part.stop > asked.stop:
        raise MisanswerError(
            FormatError(
                f"{name}: asked for bytes {asked.start}-{asked.stop - 1}, answered with {part.start}-"
                f"{part.stop - 1}; check the server or proxy"
            )
        )
    check_length(name, headers, part.nbytes)
    return part


def check_version(name: str, headers: HTTPMessage, version: Version, total: int | None) -> None:
    """Check that an answer with ``total`` bytes in all belongs to ``version``."""
    tag = strong_tag(headers)
    if not tag:
        raise MisanswerError(
            TransferError(
                f"{name}: an answer lacks the strong ETag that earlier ones had, so the version is unknown; "
                "check the server or proxy"
            )
        )
    if tag != version.tag:
        raise changed(name, version, f"its ETag is now {tag[:80]}")
    if total is not None and total != version.size:
        raise changed(name, version, f"its size is now {total}")


def check_length(name: str, headers: HTTPMessage, expected: int) -> None:
    """Check the promised length of a body, where one is promised."""
    if "Content-Length" not in headers:
        return
    length = content_length(headers)
    if length != expected:
        raise MisanswerError(
            FormatError(
                f"{name}: Content-Length is {length} where {expected} bytes belong; check the server or proxy"
            )
        )


def changed(name: str, version: Version, found: str) -> LoadstoneError:
    """Return the error for an object that was replaced."""
    return ChangedError(
        f"{name} was replaced while it was being read: {found}, it was opened as {version.tag[:80]} with "
        f"{version.size} bytes; open it again"
    )


def check_not_page(name: str, headers: HTTPMessage, start: bytes) -> None:
    """Refuse a web page that came in an object's place: a login form, a proxy's error."""
    kind = (headers.get("Content-Type") or "").lower()
    if "html" in kind and start.lstrip()[:1] == b"<" and not name.endswith((".html", ".htm")):
        raise MisanswerError(
            FormatError(
                f"{name}: answered with a web page, not the file; check the URL and whether it needs a login"
            )
        )


def xml_text(text: str) -> str:
    """Return what character data of XML means."""
    # By hand: the standard library's way imports ten times what a first request needs.
    return _REFERENCE.sub(_character, text)


def _character(match: re.Match[str]) -> str:
    name = match[1]
    if not name.startswith("#"):
        return _ENTITIES[name]
    code = int(name[2:], 16) if name[1] in "xX" else int(name[1:])
    return chr(code) if code <= sys.maxunicode else "\ufffd"


def _element(text: str, name: str) -> str:
    # No pattern: a different one for each name would be compiled while a first answer is read.
    for begun in text.split(f"<{name}>")[1:]:
        value, _, rest = begun.partition("<")
        if rest.startswith(f"/{name}>"):
            return xml_text(value).strip()
    return ""


def _is_region(text: str) -> bool:
    return re.fullmatch(r"[a-z0-9-]{2,40}", text) is not None
