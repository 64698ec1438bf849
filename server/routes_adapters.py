"""Loading, replacing and unloading adapters, in vLLM's shapes.

A success is vLLM's line of plain text, or, for callers whose ``Accept`` header names ``application/json``,
what the load did and cost. Loading what is loaded already succeeds and does nothing; another content under a
name in use needs ``load_inplace``, as in vLLM. Running requests finish on the version they began with.
"""

from dataclasses import asdict
from functools import partial
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from loadstone.server.access import check_admin
from loadstone.server.engine import Engine
from loadstone.server.schema import LoadAdapterRequest, LoadAdapterResponse, UnloadAdapterRequest
from loadstone.settings import Settings

_SIDE_BY_SIDE = 8
"""Most loads at a time."""

_DRAINING = 64
"""Most unloads at a time: each may wait for running requests, while loads and other unloads go on."""


def adapter_routes(engine: Engine, settings: Settings, *, local_only: bool) -> APIRouter:
    """Return the routes that change what is served."""

    def admin(request: Request) -> None:
        client = request.client.host if request.client else None
        check_admin(request.headers, client, settings.admin_token, local_only=local_only)

    router = APIRouter(dependencies=[Depends(admin)])
    # Threads of their own: adapters that take long to fetch must not keep requests waiting for a thread.
    loads, unloads = CapacityLimiter(_SIDE_BY_SIDE), CapacityLimiter(_DRAINING)

    @router.post("/v1/load_lora_adapter", response_model=LoadAdapterResponse)
    async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> Response:
        """Load an adapter, or replace it with ``load_inplace``."""
        call = partial(engine.load_adapter, body.lora_name, body.lora_path, replace=body.load_inplace)
        load = await to_thread.run_sync(call, limiter=loads)
        message = f"Success: LoRA adapter '{load.name}' added successfully."
        if not _wants_json(request):
            return PlainTextResponse(message)
        report = LoadAdapterResponse(
            lora_name=load.name,
            version=load.version,
            changed=load.changed,
            bytes=load.nbytes,
            milliseconds=round(load.seconds * 1000, 3),
            warnings=list(load.warnings),
            message=message,
        )
        return JSONResponse(report.model_dump())

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
        """Unload an adapter: new requests no longer find it, running ones get time to finish."""
        await to_thread.run_sync(engine.unload_adapter, body.lora_name, limiter=unloads)
        message = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        if not _wants_json(request):
            return PlainTextResponse(message)
        return JSONResponse({"lora_name": body.lora_name, "message": message})

    @router.get("/v1/loadstone/adapters")
    async def adapters() -> list[dict[str, Any]]:
        """List every adapter that is known, with its state, size, uses and who holds it."""
        return [asdict(status) for status in engine.loaded().pool.list()]

    return router


def _wants_json(request: Request) -> bool:
    return "application/json" in request.headers.get("accept", "")
