"""Bodies of requests: read whole, never more than the limit, and not for ever.

Written against ASGI itself, below FastAPI, so that no route can be reached with a body over the limit.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loadstone.errors import RequestError, RequestTooLargeError
from loadstone.server.problems import to_response

_SECONDS = 60.0
"""Most time that the body of one request may take to arrive."""


class BodyLimit:
    """ASGI middleware that hands a request on once its body is here.

    Parameters
    ----------
    app : ASGI application
        What gets the request.
    limit : int
        Most bytes of a body.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(_SECONDS):
                body = await self._read(scope, receive)
        except RequestError as error:
            await to_response(error)(scope, receive, send)
            return
        except TimeoutError:
            late = RequestError(f"the body did not arrive within {_SECONDS:g} s; send it at once")
            await to_response(late)(scope, receive, send)
            return
        if body is None:
            return
        pending = [body]

        async def replay() -> Message:
            if pending:
                return {"type": "http.request", "body": pending.pop(), "more_body": False}
            return await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body, or ``None`` when the client has gone."""
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > self._limit:
                raise self._too_large(int(value))
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._limit:
                raise self._too_large(len(body))
        return bytes(body)

    def _too_large(self, size: int) -> RequestTooLargeError:
        return RequestTooLargeError(
            f"the body has {size} bytes or more, at most {self._limit} are taken; send less at a time"
        )
