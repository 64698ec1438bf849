"""Every failure loadstone can report, in one tree.

LoadstoneError
├── LocationError (ValueError)            a location is misspelt, or lies outside the allowed roots
├── NotFoundError (FileNotFoundError)     nothing is stored there
├── AccessError (PermissionError)         the store refused the credentials, or the file system the path
├── FormatError (ValueError) ˢ            the bytes are not what they should be
│   ├── HeaderError                       not a valid safetensors header
│   ├── TruncatedError                    fewer bytes than the file itself promises
│   └── IndexFileError                    the shard index cannot be used
├── TensorNotFoundError (KeyError) ˢ      the checkpoint has no tensor of that name
├── SliceError (IndexError)               an index does not fit the tensor's shape
├── UnsupportedDtypeError (TypeError)     torch has no such dtype; ``Checkpoint.raw`` still gives the bytes
├── TransferError (ConnectionError)       the store could not be read, retries included
│   └── StalledError (TimeoutError)       no byte arrived for too long
├── ChangedError                          an object or file is no longer the version that was opened
├── IntegrityError                        a digest does not match
├── CacheError (OSError)                  the node cache cannot be used as asked
├── ClosedError (ValueError)              the checkpoint, pool or engine is closed
├── BindError (ValueError)                a module and a checkpoint do not fit each other
├── AdapterError (ValueError)             an adapter cannot be used
│   ├── AdapterFormatError                its files are wrong
│   ├── AdapterUnsupportedError           it asks for something loadstone does not apply
│   ├── AdapterBaseError                  it was made for another base
│   ├── AdapterNotFoundError (KeyError)   no adapter of that name
│   ├── AdapterLoadedError                another content is loaded under that name
│   └── AdapterBusyError                  it is still in use, or the budget is full of adapters in use
├── RequestError (ValueError)             a request to the service is not valid
│   ├── RequestTooLargeError              its body is over the limit
│   ├── ModelNotFoundError                it names a model that is not served
│   └── DeniedError                       it may not come from there
│       └── TokenError                    it needs an admin token, or has a wrong one
├── UnavailableError                      the service cannot do it now
│   ├── NotReadyError                     it is starting or stopping
│   └── QueueFullError                    too many requests are waiting
├── GenerationError                       the model failed while it answered a request
├── CommandError (OSError)                the command after ``loadstone run … --`` cannot be started
├── BenchError (RuntimeError)             a benchmark could not be carried out
├── SettingsError (ValueError)            a setting is wrong, or two of them contradict each other
└── MissingExtraError (ImportError)       an optional dependency is not installed

Those marked ˢ are a ``safetensors.SafetensorError`` as well, so that code which catches that still does.
Each message says what was found, what was expected, where, and what to do. What is suspect but can be read
all the same is a `LoadstoneWarning`, given through `warnings`.
"""

from safetensors import SafetensorError


class LoadstoneError(Exception):
    """Base of every error raised by loadstone; ``exit_status`` is what commands end with."""

    exit_status = 1

    def __str__(self) -> str:
        # KeyError would print the repr of the message, OSError its errno form; one plain line is wanted.
        return str(self.args[0]) if self.args else self.__class__.__name__


class LoadstoneWarning(UserWarning):
    """Something about a checkpoint or adapter is suspect; it was read all the same."""


class LocationError(LoadstoneError, ValueError):
    """A location is misspelt, of an unknown kind, or outside the allowed roots."""


class NotFoundError(LoadstoneError, FileNotFoundError):
    """Nothing is stored at a location."""


class AccessError(LoadstoneError, PermissionError):
    """A store refused the credentials, or the file system refused the path."""


class FormatError(LoadstoneError, ValueError, SafetensorError):
    """Bytes are not what they should be."""


class HeaderError(FormatError):
    """A file does not begin with a valid safetensors header."""


class TruncatedError(FormatError):
    """A file holds fewer bytes than it promises."""


class IndexFileError(FormatError):
    """A shard index cannot be used."""


class TensorNotFoundError(LoadstoneError, KeyError, SafetensorError):
    """A checkpoint has no tensor of that name."""


class SliceError(LoadstoneError, IndexError, ValueError):
    """An index does not fit a tensor's shape."""


class UnsupportedDtypeError(LoadstoneError, TypeError):
    """Torch has no such dtype; the bytes are available through ``Checkpoint.raw``."""


class TransferError(LoadstoneError, ConnectionError):
    """A store could not be read, retries included."""


class StalledError(TransferError, TimeoutError):
    """No byte arrived for longer than the no-progress limit."""


class ChangedError(LoadstoneError):
    """An object or a file is no longer the version that was opened."""


class IntegrityError(LoadstoneError):
    """A digest does not match the bytes."""


class CacheError(LoadstoneError, OSError):
    """The node cache cannot be used as asked."""


class ClosedError(LoadstoneError, ValueError):
    """A checkpoint, pool or engine is used after it was closed."""


class BindError(LoadstoneError, ValueError):
    """A module and a checkpoint do not fit each other."""


class AdapterError(LoadstoneError, ValueError):
    """An adapter cannot be used."""


class AdapterFormatError(AdapterError):
    """An adapter's files are wrong."""


class AdapterUnsupportedError(AdapterError):
    """An adapter asks for something loadstone does not apply."""


class AdapterBaseError(AdapterError):
    """An adapter was made for another base."""


class AdapterNotFoundError(AdapterError, KeyError):
    """No adapter of that name is known."""


class AdapterLoadedError(AdapterError):
    """Another content is loaded under that name, and replacing it was not asked for."""


class AdapterBusyError(AdapterError):
    """An adapter is still in use, or the budget is full of adapters in use."""


class RequestError(LoadstoneError, ValueError):
    """A request to the service is not valid; ``param`` names the field, where one is to blame."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLargeError(RequestError):
    """The body of a request is over the limit."""


class ModelNotFoundError(RequestError):
    """A request names a model that is not served."""


class DeniedError(RequestError):
    """A request may not come from where it comes from."""


class TokenError(DeniedError):
    """A request needs an admin token, or has a wrong one."""


class UnavailableError(LoadstoneError):
    """The service cannot do it now; the same request may succeed later."""


class NotReadyError(UnavailableError):
    """The service is starting or stopping."""


class QueueFullError(UnavailableError):
    """Too many requests are waiting."""


class GenerationError(LoadstoneError):
    """The model failed while it answered a request."""


class CommandError(LoadstoneError, OSError):
    """The command after ``loadstone run … --`` cannot be started; the status is what shells use."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class BenchError(LoadstoneError, RuntimeError):
    """A benchmark could not be carried out."""


class SettingsError(LoadstoneError, ValueError):
    """A setting is wrong, or two settings contradict each other."""


class MissingExtraError(LoadstoneError, ImportError):
    """An optional dependency is not installed."""
