"""The fetcher: the threads of a process that move bytes, and what they work on first.

A thread that is blocked on bytes (see `waiting`) comes first: its pieces are taken before any others, no
prefetch request begins while it waits, and those that run pause, unless they carry what it waits for. Then
come prefetches, in the order in which they began, each in its own order. What another process is filling is
left to it and looked at again; the locks on the blob's map decide, so no byte is moved twice.

A failure ends the job that met it, and nothing else: blocks that are missing are free, and the next to ask
for them tries afresh.

Ownership: ``_lock`` guards all jobs and pieces; it is never held while bytes move or files are read. Worker
threads are daemons that start when there is work and end when there has been none for a while. A forked
child starts without jobs or threads; prefetches begun by its parent count as ended there.
"""

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from loadstone.errors import ClosedError, LoadstoneError, StalledError, TransferError
from loadstone.loader.node.claims import Claim, NoRoomError, StorageError
from loadstone.loader.node.forks import renew_in_child
from loadstone.loader.node.gates import StoppedError, StreamGate, YieldedError
from loadstone.loader.node.handles import PrefetchHandle
from loadstone.loader.node.jobs import Batch, Demand, Fillable, Job, Piece
from loadstone.loader.node.pace import Bandwidth, Pace, ThreadTime
from loadstone.loader.order import Wanted, plan
from loadstone.loader.ranges import ByteRange
from loadstone.settings import Settings

_IDLE_SECONDS = 5.0
_LOOK_SECONDS = 0.02
_LOOK_SHARE = 30  # looking takes at most about one part in so many of a thread's time
_ASK_ABOUT = 16
_EVICTIONS = 3
_PATIENCE = 250  # looks at whether descriptors are free again


class Fetcher:
    """See the module's description.

    Parameters
    ----------
    settings : Settings
        Its limits.
    connections : int
        Most transfers at a time.
    """

    def __init__(self, settings: Settings, connections: int) -> None:
        self.settings = settings
        self.limit = connections
        # A few connections stay free for threads that are blocked.
        self._pace = Pace(connections - min(4, connections // 4))
        self._time = ThreadTime()
        self._bandwidth = Bandwidth(settings.bandwidth)
        self._start_afresh()
        renew_in_child(self)

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._ends = threading.Condition(self._lock)
        self._urgent: deque[Piece] = deque()
        self._demands: list[Demand] = []
        self._batches: list[Batch] = []
        self._running: list[Piece] = []
        self._streams = 0
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._looking = False
        self._look_pause = _LOOK_SECONDS
        self._closed = False
        self._foreign_at, self._foreign = 0.0, False

    def prefetch(self, wanted: Sequence[tuple[Fillable, ByteRange]]) -> PrefetchHandle:
        """Start to bring ``wanted``, in its order, in the background."""
        blobs = list({id(blob): blob for blob, _ in wanted}.values())
        numbers = {id(blob): number for number, blob in enumerate(blobs)}
        spans = [Wanted(numbers[id(blob)], blob.stored.size, span) for blob, span in wanted]
        batch = Batch()
        for want in plan(spans, self.settings.request_bytes):
            batch.todo.append(Piece(blobs[want.blob], want.range, batch))
        with self._lock:
            self._check_open()
            self._batches.append(batch)
            self._end_if_done(batch)
            try:
                self._staff()
            except TransferError as error:
                self._end_batch(batch, error)
                raise
        return PrefetchHandle(self, batch, wanted)

    def begin(self, demand: Demand) -> None:
        """Hold prefetches back for ``demand``."""
        with self._lock:
            self._check_open()
            self._demands.append(demand)

    def end(self, demand: Demand) -> None:
        """Forget ``demand``, and those of its pieces that nobody works on yet."""
        with self._lock:
            if demand in self._demands:  # a fork may have come between
                self._demands.remove(demand)
            self._urgent = deque(piece for piece in self._urgent if piece.job is not demand)
            if not self._demands:
                self._staff()

    def submit(self, pieces: Sequence[Piece]) -> None:
        """Bring ``pieces`` of demands before anything else, in their order."""
        with self._lock:
            self._check_open()
            for piece in pieces:
                piece.busy = True
                self._urgent.append(piece)
            self._staff()

    def error(self, demand: Demand) -> LoadstoneError | None:
        """Return what went wrong with ``demand``."""
        with self._lock:
            return demand.error

    def batch_ended(self, batch: Batch, timeout: float | None) -> bool:
        """Wait until ``batch`` has ended and nothing of it runs."""
        with self._lock:
            return self._ends.wait_for(lambda: batch.ended and batch.running == 0, timeout)

    def cancel(self, batch: Batch) -> None:
        """End ``batch``; nothing of it runs when this returns."""
        with self._lock:
            self._end_batch(batch, None)
            self._ends.wait_for(lambda: batch.running == 0)

    def quiet(self, concerns: Callable[[Fillable], bool]) -> None:
        """Wait until no transfer of the blobs that ``concerns`` picks is running."""
        with self._lock:
            self._ends.wait_for(lambda: not any(concerns(piece.blob) for piece in self._running))

    def close(self) -> None:
        """End everything; no thread runs when this returns."""
        with self._lock:
            self._closed = True
            for batch in list(self._batches):
                self._end_batch(batch, ClosedError("the checkpoint was closed while it was prefetched"))
            self._work.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def reset_in_child(self) -> None:
        """Start without the parent's jobs and threads."""
        begun = self._batches
        self._start_afresh()
        with self._lock:
            for batch in begun:
                batch.running = 0
                self._end_batch(
                    batch, ClosedError("this prefetch runs in the parent process; begin one here")
                )

    # What a running transfer asks (see `gates.Steering`).

    def stopped(self, piece: Piece) -> bool:
        """Say whether a transfer should end."""
        piece.blob.check_open()
        return self._closed or (isinstance(piece.job, Batch) and piece.job.ended)

    def hold_back(self, piece: Piece, claim: Claim, rest: ByteRange) -> bool:
        """Say whether a transfer should wait for the sake of a thread that is blocked."""
        if isinstance(piece.job, Demand):
            return False
        with self._lock:
            local = bool(self._demands)
            if any(demand.touches(piece.blob, rest) for demand in self._demands):
                return False
        if not (local or self._foreign_demand(piece.blob)) or claim.demanded(rest):
            return False
        with self._lock:
            self._pace.disturbed()
            if self._urgent and not self._idle and len(self._threads) >= self.limit:
                raise YieldedError("every connection is in use, and a thread is blocked on other bytes")
        return True

    def delay(self, nbytes: int) -> float:
        """Return 0 when ``nbytes`` may be received now, else the seconds after which to ask again."""
        return self._bandwidth.delay(nbytes)

    def arrived(self, piece: Piece, nbytes: int) -> None:
        """Count received bytes; called by the thread that received them."""
        spent = self._time.taken()
        with self._lock:
            piece.job.moved += nbytes
            if self._pace.moved(nbytes, self._streams, spent):
                self._staff()

    def slow_down(self) -> None:
        """Use fewer connections for a while."""
        with self._lock:
            self._pace.throttled()

    # Threads.

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the fetcher was closed; open the checkpoint again")

    def _staff(self) -> None:
        """Wake or start as many threads as there is work for."""
        room = 0 if self._demands else self._pace.target - self._streams
        wanted = len(self._urgent) + max(0, min(room, sum(len(batch.todo) for batch in self._batches)))
        if any(batch.later for batch in self._batches):
            wanted += 1
        self._work.notify(min(wanted, self._idle))
        for _ in range(min(wanted - self._idle, self.limit - len(self._threads))):
            self._numbered += 1
            thread = threading.Thread(
                target=self._serve, name=f"loadstone-fetch-{self._numbered}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                if self._threads:
                    return  # those that run do the work
                raise TransferError(
                    f"no thread can be started to fetch with ({error}); raise the limit on this user's or "
                    "container's processes"
                ) from None
            self._threads.add(thread)

    _numbered = 0

    def _serve(self) -> None:
        while (piece := self._take()) is not None:
            error: LoadstoneError | None = None
            done = False
            try:
                done = self._bring(piece)
            except StoppedError as stop:
                done = not isinstance(stop, YieldedError)
            except LoadstoneError as problem:
                error = problem.with_traceback(None)  # which would lead back here
            except Exception as problem:  # noqa: BLE001  a thread's failure must reach those who wait for it
                error = TransferError(
                    f"{piece.blob.stored.name}: fetching failed unexpectedly: {problem!r}; try again"
                )
                error.__cause__ = problem
            self._finish(piece, done, error)

    def _take(self) -> Piece | None:
        idle_since = time.monotonic()
        while True:
            with self._lock:
                piece = None if self._closed else self._pick()
                if piece is not None:
                    piece.busy = True
                    piece.job.running += 1
                    self._streams += isinstance(piece.job, Batch)
                    self._running.append(piece)
                    return piece
                # One thread at a time looks at what other processes are filling.
                look = not self._looking and any(batch.later for batch in self._batches)
                if self._closed or (not look and time.monotonic() - idle_since > _IDLE_SECONDS):
                    self._threads.discard(threading.current_thread())
                    self._ends.notify_all()
                    return None
                self._rest(look)
                batches = list(self._batches) if look else []
            for batch in batches:
                self._look(batch)

    def _rest(self, look: bool) -> None:
        self._idle += 1
        self._looking = self._looking or look
        self._work.wait(self._look_pause if look else _IDLE_SECONDS)
        self._idle -= 1
        if look:
            self._looking = False

    def _pick(self) -> Piece | None:
        if self._urgent:
            return self._urgent.popleft()
        if self._demands or self._streams >= self._pace.target:
            return None
        return next((batch.todo.popleft() for batch in self._batches if batch.todo), None)

    def _look(self, batch: Batch) -> None:
        """See which pieces that others were filling are complete, or free again."""
        with self._lock:
            pieces, batch.later = batch.later, deque()
            batch.running += 1  # it must not seem done meanwhile
        begun = time.monotonic()
        for stored in {piece.blob.stored for piece in pieces}:
            stored.look(ByteRange(0, stored.size))
        left = [piece for piece in pieces if piece.blob.stored.missing(piece.span, look=False)]
        held = sum(run.nbytes for piece in left for run in piece.blob.stored.missing(piece.span, look=False))
        # A few free pieces keep the threads busy until the next look; asking about all could take long.
        free = [piece for piece in left[:_ASK_ABOUT] if piece.blob.stored.claimable(piece.span)]
        later = [piece for piece in left if piece not in free]
        self._look_pause = max(_LOOK_SECONDS, _LOOK_SHARE * (time.monotonic() - begun))
        with self._lock:
            batch.running -= 1
            if batch.ended:
                self._ends.notify_all()
                return
            batch.todo.extendleft(reversed(free))
            batch.later.extend(later)
            now = time.monotonic()
            if held != batch.held or held == 0:
                batch.held, batch.moved_at = held, now
            limit = max(self.settings.stall_timeout, self.settings.retry_seconds)
            if now - batch.moved_at > limit and batch.later and not (batch.running or batch.todo):
                self._end_batch(batch, _held_up(batch, limit))
            self._end_if_done(batch)
            self._staff()

    def _claim(self, piece: Piece) -> Claim | None:
        """Claim blocks of ``piece``, with some patience when descriptors run out."""
        private = isinstance(piece.job, Demand) and piece.job.private
        for attempt in range(_PATIENCE):
            try:
                return piece.blob.stored.claim(piece.span, private=private)
            except OSError as error:
                if error.errno not in {errno.EMFILE, errno.ENFILE} or attempt == _PATIENCE - 1:
                    raise
                self.slow_down()
                time.sleep(_LOOK_SECONDS)
        return None

    def _bring(self, piece: Piece) -> bool:
        """Fetch what is missing of ``piece``; ``False`` when others are filling some of it."""
        blob = piece.blob
        stored = blob.stored
        evictions = 0
        while (claim := self._claim(piece)) is not None:
            try:
                gate = StreamGate(self, piece, claim)
                gate.admit(0)
                blob.fill(claim.range, gate.receive, gate)
                claim.finish()
            except StorageError as error:
                evictions += 1
                full = isinstance(error, NoRoomError) and evictions <= _EVICTIONS
                if not full or not blob.make_room(piece.span.nbytes):
                    stored.spill(error)
            finally:
                claim.close()
        return not stored.missing(piece.span)

    def _finish(self, piece: Piece, done: bool, error: LoadstoneError | None) -> None:
        job: Job = piece.job
        with self._lock:
            piece.busy = False
            job.running -= 1
            self._running.remove(piece)
            if isinstance(job, Demand):
                job.error = job.error or error
            elif isinstance(job, Batch):
                self._streams -= 1
                if error is not None:
                    self._end_batch(job, error)
                elif not done and not job.ended:
                    job.later.append(piece)
                self._end_if_done(job)
            self._ends.notify_all()
        piece.blob.stored.nudge()

    def _end_if_done(self, batch: Batch) -> None:
        if not (batch.todo or batch.later or batch.running):
            self._end_batch(batch, None)

    def _end_batch(self, batch: Batch, error: LoadstoneError | None) -> None:
        batch.todo.clear()
        batch.later.clear()
        if not batch.ended:
            batch.ended = True
            batch.error = error
            batch.ended_at = time.monotonic()
        if batch in self._batches:
            self._batches.remove(batch)
        self._ends.notify_all()

    def _foreign_demand(self, blob: Fillable) -> bool:
        now = time.monotonic()
        if now - self._foreign_at > _LOOK_SECONDS:
            self._foreign = blob.foreign_demand()
            self._foreign_at = now
        return self._foreign


def _held_up(batch: Batch, seconds: float) -> StalledError:
    piece = batch.later[0]
    return StalledError(
        f"{piece.blob.stored.name}: another process holds {piece.span.start} to {piece.span.stop} and moved "
        f"no byte for {seconds:g} s; end it, or wait for these bytes to fetch them here"
    )
