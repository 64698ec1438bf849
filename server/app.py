"""The HTTP application, built around an engine; running it is `loadstone.server.run`."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from loadstone.errors import LoadstoneError
from loadstone.server.bodylimit import BodyLimit
from loadstone.server.engine import Engine
from loadstone.server.problems import body_of, from_validation, to_response
from loadstone.server.routes_adapters import adapter_routes
from loadstone.server.routes_completions import completion_routes
from loadstone.server.routes_status import status_routes
from loadstone.settings import Settings


def create_app(engine: Engine, settings: Settings, *, local_only: bool = True) -> FastAPI:
    """Return the application.

    Parameters
    ----------
    engine : Engine
        Answers; starting and closing it is the caller's.
    settings : Settings
        Limits, and the admin token.
    local_only : bool
        The application will be bound to a loopback address; see `loadstone.server.access`.
    """
    # The pages for trying it out load scripts from elsewhere: only the description itself is served.
    app = FastAPI(title="loadstone", docs_url=None, redoc_url=None)
    app.include_router(status_routes(engine))
    app.include_router(completion_routes(engine))
    app.include_router(adapter_routes(engine, settings, local_only=local_only))
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    app.add_exception_handler(LoadstoneError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_fault)
    return app


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, LoadstoneError)
    return to_response(error)


async def _on_invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return to_response(from_validation(error.errors()))


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    """Answer in the same shape where no route fits, or a body cannot even be decoded."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is nothing at {request.url.path}; see /openapi.json for what there is",
        405: f"{request.url.path} does not take {request.method}",
        400: "the body is not valid JSON; send one JSON object",
    }.get(error.status_code, error.detail)
    kind = "NotFoundError" if error.status_code == 404 else "RequestError"
    body = body_of(message, kind, error.status_code)
    return JSONResponse(body, error.status_code, dict(error.headers or {}))


async def _on_fault(_: Request, error: Exception) -> JSONResponse:
    message = f"the service met an error it did not expect ({type(error).__name__}); its log says more"
    return JSONResponse(body_of(message, "LoadstoneError", 500), 500)
