"""Tells what a file is that should have been a safetensors file, from its first bytes.

Nothing is decoded further than needed to name it, and nothing is ever unpickled.
"""

import json
import re

from loadstone.loader.format.naming import shorten

_LFS = b"version https://git-lfs.github.com/spec/"
# A safetensors header of 640 bytes begins like a pickle too, but, as a 64-bit number, goes on with zeros.
_PICKLE = re.compile(rb"\x80[\x02-\x05](?:\x95|..(?!\x00{4}))", re.DOTALL)
_XML_ERROR = re.compile(r"(?:<[^>]*>\s*)?<error(?:response)?[\s>]")
_LINK = re.compile(r"(?:\.\./)+blobs/[0-9a-f]{40,64}")
_MAGIC = (
    (b"GGUF", "a GGUF file (llama.cpp); open the original safetensors checkpoint instead"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras, TensorFlow); convert it to safetensors"),
    (b"\x93NUMPY", "a NumPy array file; convert it to safetensors"),
    (b"\x1f\x8b", "gzip-compressed; decompress it, weights are read from uncompressed files only"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed; decompress it, weights are read from uncompressed files only"),
)
_LONGEST_ANSWER = 120


def sniff(first: bytes) -> str | None:
    """Say what a file is that begins with ``first``.

    Parameters
    ----------
    first : bytes
        Its first bytes, a few hundred at least where there are as many.

    Returns
    -------
    str | None
        The end of the sentence "… is", with what to do; ``None`` when the bytes look like nothing known.
    """
    if first.startswith(_LFS):
        return _lfs_pointer(first)
    if first.startswith(b"PK\x03\x04"):
        return _zip(first)
    if _PICKLE.match(first):
        return (
            "a pickle (an old PyTorch file), which can run code when loaded and is never opened; "
            "convert it to safetensors"
        )
    for magic, what in _MAGIC:
        if first.startswith(magic):
            return what
    return _text(first)


def _lfs_pointer(first: bytes) -> str:
    size = re.search(rb"^size (\d{1,20})\r?$", first, re.MULTILINE)
    stands_for = f"for {int(size[1])} bytes" if size else "for the real file"
    return f"a Git LFS pointer, a text file that stands {stands_for}; fetch them with `git lfs pull`"


def _zip(first: bytes) -> str:
    if b"data.pkl" in first or b"/version" in first:
        return (
            "a PyTorch zip archive with a pickle inside (torch.save), which can run code when loaded and is "
            "never opened; convert it to safetensors"
        )
    return "a zip archive (PyTorch's torch.save writes such files, with a pickle inside); it is never opened"


def _text(first: bytes) -> str | None:
    if len(first) < 8 or b"\0" in first[:8]:
        return None  # too short to tell, or the length of a header
    text = first.decode("utf-8", "replace").strip("\ufeff \t\r\n")
    head = text[:200].lower()
    if head.startswith(("<!doctype html", "<html")) or (head.startswith("<") and "<html" in head):
        return (
            f"an HTML page{_tag(text, 'title')}, not weights; sign in or accept the licence, fetch it again"
        )
    if head.startswith("<?xml") or _XML_ERROR.match(head):
        return (
            f"an XML error answer of a store{_tag(text, 'Code')}{_tag(text, 'Message')}, not weights; "
            "fetch it again once the store gives access"
        )
    if head.startswith(("{", "[")):
        return f"JSON text{_json_error(text)}, perhaps a server's error answer, not weights; fetch it again"
    if _LINK.fullmatch(text):
        return "a link of a Hugging Face cache that was copied as text; copy the folder with its links"
    if text.isprintable() and "\ufffd" not in text and len(text) < _LONGEST_ANSWER:
        return f"the text {shorten(text)!r}, perhaps a server's error answer, not weights; fetch it again"
    return None


def _tag(text: str, tag: str) -> str:
    found = re.search(rf"<{tag}[^>]*>([^<]*)", text, re.IGNORECASE)
    return f" ({shorten(found[1].strip())})" if found and found[1].strip() else ""


def _json_error(text: str) -> str:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    for key in ("error", "message", "detail"):
        value = answer.get(key) if isinstance(answer, dict) else None
        if isinstance(value, dict):
            value = value.get("message")
        if isinstance(value, str) and value:
            return f" ({shorten(value)})"
    return ""
