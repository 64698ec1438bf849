"""What the libraries behind fsspec raise, sorted into what may pass and what will not.

Every file system raises what its own library does, often wrapped several times; what is not clearly final may
pass.
"""

import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from loadstone.errors import AccessError, LoadstoneError, MissingExtraError, NotFoundError, TransferError
from loadstone.loader.locations import redact
from loadstone.loader.stores.backoff import TemporaryError, Work

_T = TypeVar("_T")
_UNREACHABLE = (errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH)
_DEPTH = 20


def persist(work: Work, step: Callable[[], _T]) -> _T:
    """Take ``step``, again and again while it fails in ways that may pass and ``work`` has patience."""
    while True:
        try:
            found = step()
        except TemporaryError as fault:
            work.failed(fault)
        else:
            work.answered()
            return found


@contextmanager
def translated(name: str) -> Iterator[None]:
    """Turn what a file system's own library raises into errors of ours."""
    try:
        yield
    except LoadstoneError:
        raise
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise NotFoundError(f"{name}: nothing is stored there; check the spelling") from None
    except PermissionError as error:
        raise AccessError(
            f"{name}: the store refused to give it ({redact(str(error))}); check the credentials"
        ) from None
    except ImportError as error:
        raise MissingExtraError(
            f"{name} needs a package that is not installed: {error}; install it"
        ) from None
    except NotImplementedError:
        raise AccessError(f"{name}: this kind of store cannot do what is needed to read it") from None
    except Exception as error:  # noqa: BLE001
        raise _meaning(name, error) from None


def _meaning(name: str, error: Exception) -> TransferError:
    text = " ".join(redact(str(error)).split())[:200]
    found = f"{name}: reading failed with {type(error).__name__} ({text})"
    unreachable = False
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror) and cause.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return TransferError(
                f"{name}: its store's host has no address ({cause.strerror}); check the location's spelling "
                "and the network's DNS"
            )
        code = cause.errno if isinstance(cause, OSError) else None
        unreachable |= isinstance(cause, socket.gaierror) or code in _UNREACHABLE
    return TemporaryError(found, unreachable=unreachable)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and what lies behind it."""
    cause: BaseException | None = error
    for _ in range(_DEPTH):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__
