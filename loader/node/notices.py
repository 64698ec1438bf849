"""Warnings that are written once per process, to the ``loadstone`` logger."""

import logging

_log = logging.getLogger("loadstone")
_written: set[str] = set()


def warn_once(message: str, about: str = "") -> None:
    """Write a warning, unless it, or one with the same ``about``, was written before in this process."""
    key = about or message
    if key not in _written:
        _written.add(key)
        _log.warning(message)
