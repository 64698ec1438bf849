"""Connections: none stays open for a request that does not come."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

_SECONDS = 30.0
"""Least time that the head of a request may take; the most is twice this."""


class Connection(H11Protocol):
    """One connection, ended when it only waits: for its first request, or for the rest of a request's head.

    uvicorn itself watches a connection only between an answer and the first byte of the next request, so
    a client that sends nothing, or half a head, would keep one for ever. For the event loop's thread alone.
    """

    _watch: asyncio.TimerHandle | None = None
    _before: RequestResponseCycle | None = None

    # What asyncio hands over for a stream is a `Transport`, as uvicorn's own signature says.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to watch."""
        super().connection_made(transport)
        self._watch = self.loop.call_later(_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching."""
        super().connection_lost(exc)
        if self._watch is not None:
            self._watch.cancel()

    def _look(self) -> None:
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self.cycle is self._before:
            self.transport.close()
            return
        self._before = self.cycle if waits else None
        self._watch = self.loop.call_later(_SECONDS, self._look)
