"""The one place where loadstone's errors become HTTP answers.

The shape is the one of OpenAI and vLLM: ``{"error": {"message", "type", "param", "code"}}``. ``type`` is the
name of the error's class in `loadstone.errors`, ``code`` the HTTP status.
"""

from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse

from loadstone import errors

_STATUS: tuple[tuple[type[errors.LoadstoneError], int], ...] = (
    (errors.RequestTooLargeError, 413),
    (errors.ModelNotFoundError, 404),
    (errors.TokenError, 401),
    (errors.DeniedError, 403),
    (errors.RequestError, 400),
    (errors.NotReadyError, 503),
    (errors.QueueFullError, 429),
    (errors.ClosedError, 503),
    (errors.AdapterNotFoundError, 404),
    (errors.AdapterBusyError, 409),
    (errors.AdapterError, 400),
    (errors.NotFoundError, 404),
    (errors.ChangedError, 409),
    (errors.StalledError, 504),
    (errors.TransferError, 502),
    (errors.LocationError, 400),
    (errors.AccessError, 400),
    (errors.FormatError, 400),
    (errors.IntegrityError, 400),
    (errors.TensorNotFoundError, 400),
    (errors.UnsupportedDtypeError, 400),
)
"""The first row that fits counts; what no row fits is a failure of the service, 500."""


def status_of(error: errors.LoadstoneError) -> int:
    """Return the HTTP status for ``error``."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def body_of(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    """Return an error in the shape that clients read."""
    return {
        "error": {"message": _plain(message), "type": kind, "param": param and _plain(param), "code": status}
    }


def _plain(text: str) -> str:
    # What a client sent may be quoted in it, half surrogate pairs included, which UTF-8 cannot hold.
    return text.encode("utf-8", "backslashreplace").decode()


def describe(error: errors.LoadstoneError) -> dict[str, Any]:
    """Return the JSON for ``error``."""
    param = error.param if isinstance(error, errors.RequestError) else None
    return body_of(str(error), type(error).__name__, status_of(error), param)


def to_response(error: errors.LoadstoneError) -> JSONResponse:
    """Return the answer for ``error``."""
    status = status_of(error)
    headers = {}
    if status in {429, 503}:
        headers["Retry-After"] = "1"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(describe(error), status, headers)


def from_validation(problems: Sequence[Any]) -> errors.RequestError:
    """Turn what pydantic found wrong with a body into one line about its first problem."""
    first = problems[0]
    path = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be parsed")
        return errors.RequestError(f"the body is not valid JSON: {reason}; send one JSON object")
    if first["type"] == "string_unicode":
        return errors.RequestError(
            "the body holds half a surrogate pair, which is no text; send whole characters"
        )
    if not path:
        return errors.RequestError(
            "the body is not a JSON object; send one, with 'Content-Type: application/json'"
        )
    param = ".".join(path)
    if first["type"] == "extra_forbidden":
        return errors.RequestError(f"{param} is not a field that this service knows; leave it out", param)
    if first["type"] == "missing":
        return errors.RequestError(f"{param} is missing; send it", param)
    text = first["msg"].removeprefix("Value error, ")
    shown = first.get("input")
    found = f" (found {shown!r:.60})" if isinstance(shown, str | int | float | bool) else ""
    return errors.RequestError(f"{param}: {text[:1].lower()}{text[1:]}{found}", param)
