"""The HTTP server itself: uvicorn, quiet, around the application of one engine."""

import asyncio
import logging
import math
import socket
from collections.abc import Callable

import uvicorn

from loadstone.server.access import is_loopback
from loadstone.server.app import create_app
from loadstone.server.connections import Connection
from loadstone.server.engine import Engine
from loadstone.settings import Settings

_GRACE = 5
"""Seconds for telling clients that their requests were ended, before connections are cut."""


class Server(uvicorn.Server):
    """Serves one engine on a socket that is already bound.

    Parameters
    ----------
    engine : Engine
        Answers the requests.
    settings : Settings
        Limits, and how long requests may finish when the server stops.
    bound : socket
        Where it listens.
    on_listening : callable
        Called in the event loop's thread once the port answers.
    """

    def __init__(
        self, engine: Engine, settings: Settings, bound: socket.socket, on_listening: Callable[[], None]
    ) -> None:
        app = create_app(engine, settings, local_only=is_loopback(bound.getsockname()[0]))
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                http=Connection,
                loop="asyncio",
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=math.ceil(settings.drain_seconds) + _GRACE,
            )
        )
        # What uvicorn says while it starts and stops is no news; its warnings and errors stay.
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._on_listening = on_listening
        self._engine = engine
        self._drain_seconds = settings.drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections; let running requests finish, those that take too long with an error."""
        last_call = asyncio.get_running_loop().call_later(self._drain_seconds, self._engine.stop)
        await super().shutdown(sockets)
        last_call.cancel()
