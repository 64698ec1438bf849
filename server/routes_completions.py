"""``POST /v1/completions``, whole or as a stream of server-sent events.

The engine's thread puts pieces into a `Feed`; the event loop takes them out. Whichever way a request ends,
also by a client that hangs up, its job is cancelled, so that nothing is computed for nobody.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from loadstone.errors import LoadstoneError
from loadstone.server.engine import Engine
from loadstone.server.job import Job
from loadstone.server.problems import describe
from loadstone.server.schema import Choice, CompletionRequest, CompletionResponse, Logprobs, Usage
from loadstone.server.work import Piece, TokenLogprob

_SIDE_BY_SIDE = 16
"""Requests that are checked, and whose adapters are fetched, at a time."""


def completion_routes(engine: Engine) -> APIRouter:
    """Return the route that answers prompts."""
    router = APIRouter()
    # Fetching an adapter on demand may take long: it must not keep requests to the base from a thread.
    for_base, for_adapters = CapacityLimiter(_SIDE_BY_SIDE), CapacityLimiter(_SIDE_BY_SIDE)

    @router.post("/v1/completions", response_model=CompletionResponse)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts with the base or one of its adapters."""
        feed = Feed()
        limiter = for_base if body.model == engine.name else for_adapters
        job = await to_thread.run_sync(engine.submit, body.to_completion(), feed.put, limiter=limiter)
        reply = Reply(body, job, feed)
        if body.stream:
            return EventStream(reply.events(), job)
        return await _unless_gone(reply, request)

    return router


class Feed:
    """Carries pieces from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Piece | LoadstoneError] = asyncio.Queue()

    def put(self, piece: Piece | LoadstoneError) -> None:
        """Hand over one piece, or the error that ends the request. Called by the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)
        except RuntimeError:
            # The event loop has ended with the service: nobody is left to read it.
            return

    async def get(self) -> Piece:
        """Return the next piece."""
        piece = await self._queue.get()
        if isinstance(piece, LoadstoneError):
            raise piece
        return piece


class Reply:
    """What the client of one request is told."""

    def __init__(self, body: CompletionRequest, job: Job, feed: Feed) -> None:
        self._body = body
        self._feed = feed
        self.job = job
        self._count = len(body.prompt) * body.n
        self._made = 0
        self._created = int(time.time())

    async def whole(self) -> CompletionResponse:
        """Return the answer when all of it is there."""
        texts = [""] * self._count
        finish: list[Piece | None] = [None] * self._count
        logprobs: list[list[TokenLogprob]] = [[] for _ in range(self._count)]
        async for piece in self._pieces():
            texts[piece.index] += piece.text
            logprobs[piece.index] += piece.logprobs
            finish[piece.index] = piece
        choices = [
            Choice(
                index=index,
                text=texts[index],
                logprobs=self._logprobs(logprobs[index]),
                finish_reason=last.finish if last else None,
            )
            for index, last in enumerate(finish)
        ]
        return self._response(choices, self._usage())

    async def events(self) -> AsyncIterator[str]:
        """Yield the answer as server-sent events, one for each piece of text."""
        try:
            async for piece in self._pieces():
                if piece.text or piece.finish or piece.logprobs:
                    choice = Choice(
                        index=piece.index,
                        text=piece.text,
                        logprobs=self._logprobs(piece.logprobs),
                        finish_reason=piece.finish,
                    )
                    yield _event(self._response([choice]).model_dump_json())
            if self._body.stream_options and self._body.stream_options.include_usage:
                yield _event(self._response([], self._usage()).model_dump_json())
        except LoadstoneError as error:
            yield _event(json.dumps(describe(error)))
        yield _event("[DONE]")

    async def _pieces(self) -> AsyncIterator[Piece]:
        left = self._count
        while left:
            piece = await self._feed.get()
            self._made += 1
            left -= piece.finish is not None
            yield piece

    def _response(self, choices: list[Choice], usage: Usage | None = None) -> CompletionResponse:
        return CompletionResponse(
            id=self.job.id,
            created=self._created,
            model=self._body.model,
            choices=choices,
            usage=usage,
            system_fingerprint=self.job.version,
        )

    def _usage(self) -> Usage:
        prompt = self.job.prompt_tokens
        return Usage(prompt_tokens=prompt, completion_tokens=self._made, total_tokens=prompt + self._made)

    def _logprobs(self, records: "list[TokenLogprob] | tuple[TokenLogprob, ...]") -> Logprobs | None:
        if self._body.logprobs is None:
            return None
        return Logprobs(
            tokens=[record.text for record in records],
            token_logprobs=[record.logprob for record in records],
            top_logprobs=[record.top for record in records],
            text_offset=[record.offset for record in records],
        )


class EventStream(StreamingResponse):
    """A stream whose job ends with it, however it ends: also before its first event was asked for."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], job: Job) -> None:
        super().__init__(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def _unless_gone(reply: Reply, request: Request) -> Response:
    """Return the whole answer, or stop working on it when the client hangs up."""
    answer = asyncio.create_task(reply.whole())
    gone = asyncio.create_task(_hang_up(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return JSONResponse(answer.result().model_dump())
        return Response(status_code=499)  # nginx's number for it: nobody reads this, but logs may
    finally:
        reply.job.cancel()
        answer.cancel()
        gone.cancel()


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(data: str) -> str:
    return f"data: {data}\n\n"
