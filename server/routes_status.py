"""What the service is, and how far it is: health, readiness, models, start-up timeline."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from loadstone.errors import ModelNotFoundError
from loadstone.server.engine import Engine
from loadstone.server.schema import ModelCard, ModelList


def status_routes(engine: Engine) -> APIRouter:
    """Return the routes that only look."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Say that the process runs and answers; whether the model can is told by /ready."""
        return {"status": "ok"}

    @router.get("/ready", responses={503: {"description": "Not yet; the same JSON says how far it is."}})
    async def ready() -> JSONResponse:
        """Answer 200 once a forward pass has computed a token, so all that takes is here; 503 before."""
        if engine.state == "ready":
            return JSONResponse(_describe(engine))
        return JSONResponse(_describe(engine), 503, {"Retry-After": "1"})

    @router.get("/v1/loadstone/timeline")
    async def timeline() -> dict[str, Any]:
        """Tell when the start-up reached what, in seconds since the process began."""
        return _timeline(engine)

    @router.get("/v1/models")
    async def models() -> ModelList:
        """List the base and the adapters that are loaded."""
        return ModelList(data=_cards(engine))

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """Describe one of them."""
        for card in _cards(engine):
            if card.id == model:
                return card
        raise ModelNotFoundError(
            f"the model {model!r:.200} is not served; GET /v1/models lists those that are"
        )

    return router


def _describe(engine: Engine) -> dict[str, Any]:
    report = {"state": engine.state, "stage": engine.startup.stage, "model": engine.name, **_timeline(engine)}
    if engine.error is not None:
        report["error"] = str(engine.error)
    return report


def _timeline(engine: Engine) -> dict[str, Any]:
    timeline, progress = engine.startup.timeline, engine.startup.progress()
    moved = None
    if progress is not None:
        moved = {"ready": progress.ready, "total": progress.total, "moved": progress.moved}
    return {
        "process_start": timeline.began,
        "seconds": round(timeline.elapsed(), 3),
        "events": {event: round(seconds, 3) for event, seconds in timeline.events().items()},
        "bytes": moved,
    }


def _cards(engine: Engine) -> list[ModelCard]:
    loaded = engine.loaded()
    base = ModelCard(
        id=engine.name,
        created=engine.created,
        root=engine.startup.where,
        max_model_len=loaded.facts.context,
    )
    adapters = [
        ModelCard(
            id=status.name,
            created=engine.created,
            root=status.source,
            parent=engine.name,
            max_model_len=loaded.facts.context,
        )
        for status in engine.adapters()
    ]
    return [base, *adapters]
