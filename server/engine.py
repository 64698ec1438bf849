"""The engine: one thread that owns the model, and the requests that it answers.

Ownership. The engine thread alone runs the model and changes `_running`. Other threads put work into
`_waiting` and read the state; both are guarded by the condition `_wake`. A job's sink is called by the engine
thread, in order, and must return at once. Adapters are read in the thread that asks for them and attached
between steps, inside the pool. Nothing that is imported here imports torch: the service listens, and bytes
flow, before that.
"""

import logging
import queue
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from loadstone.errors import (
    AdapterError,
    AdapterLoadedError,
    AdapterNotFoundError,
    BindError,
    LoadstoneError,
    ModelNotFoundError,
    NotReadyError,
    QueueFullError,
    RequestError,
)
from loadstone.server.job import Job, Sink, Slot, failure
from loadstone.server.plan import plan_answers
from loadstone.server.work import Completion, Piece
from loadstone.settings import Settings

if TYPE_CHECKING:
    from loadstone.adapters.versions import AdapterStatus
    from loadstone.server.assemble import Loaded
    from loadstone.server.startup import Startup

State = Literal["starting", "ready", "failed", "stopping"]

_log = logging.getLogger("loadstone.server")


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """What a load did: ``changed`` is false when this very content was loaded already."""

    name: str
    version: str
    changed: bool
    nbytes: int
    seconds: float
    warnings: tuple[str, ...]


class Engine:
    """Answers requests with one base model and the adapters over it.

    Parameters
    ----------
    startup : Startup
        Brings the model here; used by the engine thread.
    settings : Settings
        Limits.
    """

    def __init__(self, startup: "Startup", settings: Settings) -> None:
        self.startup = startup
        self.settings = settings
        self.created = int(time.time())
        self._wake = threading.Condition()
        self._state: State = "starting"
        self._error: LoadstoneError | None = None
        self._loaded: Loaded | None = None
        self._waiting: deque[Slot] = deque()
        self._running: list[Slot] = []
        self._halt = False
        self._on_failure: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="loadstone-engine", daemon=True)

    @property
    def name(self) -> str:
        """The base's name, as requests give it."""
        return self.startup.name

    @property
    def state(self) -> State:
        """What it is doing."""
        return self._state

    @property
    def error(self) -> LoadstoneError | None:
        """What made the start-up fail."""
        return self._error

    def start(self) -> None:
        """Begin to bring the model here; returns at once."""
        self._thread.start()

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called if the start-up fails, at once if it has."""
        with self._wake:
            if self._state != "failed":
                self._on_failure.append(callback)
                return
        callback()

    def loaded(self) -> "Loaded":
        """Return the model and what belongs to it.

        Raises
        ------
        NotReadyError
            The service is starting or stopping.
        """
        if self._state != "ready" or self._loaded is None:
            raise NotReadyError(f"the service is {self._state}; see GET /ready, and try again")
        return self._loaded

    def submit(self, request: Completion, sink: Sink) -> Job:
        """Check ``request`` and queue its answers.

        May block while an adapter is fetched: not for an event loop's thread.

        Raises
        ------
        LoadstoneError
            The request cannot be taken: see `plan_answers`, `ModelNotFoundError`, `QueueFullError`,
            `NotReadyError`.
        """
        loaded = self.loaded()
        plans = plan_answers(request, loaded.text, loaded.facts, self.settings)
        job = Job(len(plans), sink, self._cancel)
        job.prompt_tokens = sum(len(plan.prompt) for plan in plans[:: request.n])
        self._lease(job, request.model, loaded)
        try:
            self._enqueue([Slot(job, plan) for plan in plans])
        except BaseException:
            job.leases.close()
            raise
        return job

    def complete(self, request: Completion) -> Iterator[Piece]:
        """Answer ``request``, piece by piece, in the caller's thread; leaving the loop cancels it."""
        pieces: queue.SimpleQueue[Piece | LoadstoneError] = queue.SimpleQueue()
        job = self.submit(request, pieces.put)
        left = len(request.prompts) * request.n
        try:
            while left:
                piece = pieces.get()
                if isinstance(piece, LoadstoneError):
                    raise piece
                left -= piece.finish is not None
                yield piece
        finally:
            job.cancel()

    @property
    def busy(self) -> int:
        """How many answers are running or waiting."""
        with self._wake:
            return len(self._running) + len(self._waiting)

    def adapters(self) -> "list[AdapterStatus]":
        """Return the adapters that requests can name; one that could not be read is not among them."""
        return [status for status in self.loaded().pool.list() if status.state in {"ready", "registered"}]

    def load_adapter(self, name: str, location: str | None = None, *, replace: bool = False) -> AdapterLoad:
        """Load an adapter in the caller's thread.

        Parameters
        ----------
        name : str
            What requests will call it.
        location : str, optional
            Where it lies, inside a root; by default the roots are searched for the name.
        replace : bool
            Take the place of another content under this name; running requests finish on that one.

        Raises
        ------
        LoadstoneError
            It cannot be used, and what was loaded stays as it was.
        """
        pool = self.loaded().pool
        if unicodedata.normalize("NFC", name) == unicodedata.normalize("NFC", self.name):
            raise RequestError(f"{name!r} is the base model's name; choose another", "lora_name")
        began = time.perf_counter()
        before = {status.name: status.digest for status in pool.list()}
        try:
            status = pool.load(name, location, replace=replace)
        except AdapterLoadedError as error:
            raise RequestError(f"{error} with load_inplace", "load_inplace") from error
        return AdapterLoad(
            name=status.name,
            version=status.digest,
            changed=before.get(status.name) != status.digest,
            nbytes=status.mapped_bytes,
            seconds=time.perf_counter() - began,
            warnings=status.warnings,
        )

    def unload_adapter(self, name: str) -> None:
        """Make an adapter unknown, and free it once running requests have finished with it.

        Raises
        ------
        AdapterNotFoundError
            No adapter has that name, or it could not be loaded; what is known of that failure is forgotten.
        AdapterBusyError
            They took longer than ``drain_seconds``.
        """
        pool = self.loaded().pool
        name = unicodedata.normalize("NFC", name)
        before = next((status for status in pool.list() if status.name == name), None)
        pool.unload(name, timeout=self.settings.drain_seconds)
        if before is not None and before.state == "failed":
            raise AdapterNotFoundError(f"no adapter {name!r} is loaded: {before.error}")

    def stop(self) -> None:
        """Take no more requests and end the running ones with an error, soon; returns at once."""
        with self._wake:
            if self._state != "failed":
                self._state = "stopping"
            self._halt = True
            self._wake.notify_all()

    def close(self) -> None:
        """Stop, and end the thread."""
        self.stop()
        self.startup.close()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            # An import or a library's call cannot be interrupted; the thread is a daemon and ends with us.
            self._thread.join(timeout=10)

    def _lease(self, job: Job, model: str, loaded: "Loaded") -> None:
        if model == self.name:
            return
        try:
            lease = job.leases.enter_context(loaded.pool.lease([model], label=job.id))
        except AdapterError as error:
            # Not found, or not even a name that an adapter could have; a broken adapter is told as such.
            if isinstance(error, AdapterNotFoundError) or type(error) is AdapterError:
                raise ModelNotFoundError(
                    f"the model {model!r:.200} is not served; GET /v1/models lists those that are", "model"
                ) from error
            raise
        job.row = lease.rows[0]
        job.version = job.row.digest if job.row else None

    def _cancel(self, job: Job) -> None:
        with self._wake:
            job.over = True
            self._wake.notify_all()

    def _enqueue(self, slots: list[Slot]) -> None:
        with self._wake:
            self.loaded()
            pending = len(self._waiting) + len(self._running)
            if pending + len(slots) > self.settings.max_running + self.settings.max_waiting:
                raise QueueFullError(f"{pending} answers are running or waiting; try again later")
            self._waiting.extend(slots)
            self._wake.notify_all()

    # The engine thread.

    def _run(self) -> None:
        try:
            loaded = self.startup.load()
        except Exception as error:  # noqa: BLE001  whatever a model library raises must end in one clear line
            self._fail(error)
            return
        with self._wake:
            self._loaded = loaded
            if self._state == "starting":
                self._state = "ready"
        while self._next_round():
            self._step(loaded)
        self._end_all()
        loaded.close()

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, LoadstoneError):
            _log.debug("the model could not be loaded", exc_info=error)
            text = " ".join(str(error).split())
            error = BindError(f"{self.startup.where} cannot be served: {type(error).__name__}: {text:.300}")
        with self._wake:
            if self._state == "stopping":
                return
            self._error = error
            self._state = "failed"
            callbacks, self._on_failure = self._on_failure, []
        for callback in callbacks:
            callback()

    def _next_round(self) -> bool:
        """Drop what is over and start what there is room for; wait while there is nothing to do."""
        while True:
            with self._wake:
                over = {slot.job for slot in (*self._running, *self._waiting) if slot.job.over}
                self._running = [slot for slot in self._running if not (slot.done or slot.job.over)]
                self._waiting = deque(slot for slot in self._waiting if not slot.job.over)
                while self._waiting and len(self._running) < self.settings.max_running:
                    self._running.append(self._waiting.popleft())
                self._wake.notify_all()
                if not over:
                    if self._halt or self._running:
                        return not self._halt
                    self._wake.wait()
            _let_go(over)

    def _step(self, loaded: "Loaded") -> None:
        """Give every running answer one more token."""
        for slot in self._running:
            self._advance(slot, loaded)

    def _advance(self, slot: Slot, loaded: "Loaded") -> None:
        job = slot.job
        if job.over:
            return
        try:
            if slot.answer is None:
                slot.answer = loaded.begin(slot.plan)
            with loaded.pool.apply([job.row]):
                piece = slot.answer.step(loaded.decoder)
        except Exception as error:  # noqa: BLE001  one request's failure must not end the others
            job.over = True
            job.give(failure(error))
            return
        if piece.finish is not None:
            slot.done = True
            job.left -= 1
            job.over = job.left == 0
        job.give(piece)

    def _end_all(self) -> None:
        with self._wake:
            jobs = {slot.job for slot in (*self._running, *self._waiting)}
            self._running, self._waiting = [], deque()
            self._wake.notify_all()
        for job in jobs:
            job.over = True
            job.give(NotReadyError("the service is stopping; send the request again, elsewhere or later"))
        _let_go(jobs)


def _let_go(jobs: set[Job]) -> None:
    # A function of its own: while the engine waits, no variable of its loop may keep a key-value cache alive.
    for job in jobs:
        job.leases.close()
