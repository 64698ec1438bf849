"""What the engine works on: a request, and each of its answers.

Ownership: after it was submitted, a job's fields are written by the engine thread alone, but for ``over``,
which `Job.cancel` sets under the engine's lock.
"""

import logging
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadstone.errors import GenerationError, LoadstoneError
from loadstone.server.work import AnswerPlan, Piece

if TYPE_CHECKING:
    from loadstone.adapters.versions import LeasedVersion
    from loadstone.server.generate import Answer

Sink = Callable[[Piece | LoadstoneError], None]
"""Is given each piece of a job's answers, or one error instead of all that cannot come any more."""

_log = logging.getLogger("loadstone.server")


class Job:
    """One request: its answers share a sink and, from start to end, one version of their adapter.

    Attributes
    ----------
    id : str
        Names it, in answers and where it holds an adapter.
    prompt_tokens : int
        Tokens of all its prompts.
    version : str or None
        Identifies the content of the adapter that answers.
    over : bool
        It has ended, one way or another; the engine thread lets go of it.
    left : int
        Answers that are not finished.
    row : LeasedVersion or None
        The adapter that its rows use.
    leases : ExitStack
        Closed by the engine thread when it is over.
    """

    def __init__(self, answers: int, sink: Sink, stop: "Callable[[Job], None]") -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.prompt_tokens = 0
        self.version: str | None = None
        self.over = False
        self.left = answers
        self.row: LeasedVersion | None = None
        self.leases = ExitStack()
        self._sink = sink
        self._stop = stop

    def cancel(self) -> None:
        """Stop working on it, from any thread."""
        self._stop(self)

    def give(self, piece: Piece | LoadstoneError) -> None:
        """Hand a piece, or the error that ends it, to whoever asked. For the engine thread."""
        try:
            self._sink(piece)
        except Exception:  # noqa: BLE001  a receiver's fault must not end the engine's thread
            _log.exception("the receiver of an answer failed; its request is dropped")
            self.over = True


@dataclass(slots=True)
class Slot:
    """One answer of a job, once it is in the engine's hands."""

    job: Job
    plan: AnswerPlan
    answer: "Answer | None" = None
    done: bool = False


def failure(error: Exception) -> GenerationError:
    """Return what a request is told when its forward pass raised ``error``."""
    if isinstance(error, LoadstoneError):
        return GenerationError(f"the answer cannot be finished: {error}")
    _log.error("a forward pass failed", exc_info=error)
    text = " ".join(str(error).split())
    return GenerationError(f"the answer cannot be finished: {type(error).__name__}: {text:.300}")
