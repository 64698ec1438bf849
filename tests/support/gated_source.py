"""A checkpoint whose bytes arrive only when a test lets them: until then its memory really is zeros."""

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from loadstone.errors import LoadstoneError, StalledError
from loadstone.loader.checkpoint import Checkpoint
from loadstone.loader.files.local import LocalSource
from loadstone.loader.opening import read_checkpoint
from loadstone.loader.ranges import ByteRange
from loadstone.loader.source import Blob, Prefetch, Progress, Span, StatedDigest

FIRST = 64 * 1024


class Gate:
    """Says which bytes may arrive, and remembers who waited for them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.open = False
        self.failure: LoadstoneError | None = None
        self.waiting = 0
        self.waited: list[tuple[str, ByteRange]] = []

    def release(self) -> None:
        """Let everything arrive."""
        with self.changed:
            self.open = True
            self.changed.notify_all()

    def fail(self, failure: LoadstoneError | None) -> None:
        """Let every wait end with ``failure``; ``None`` lets them wait again."""
        with self.changed:
            self.failure = failure
            self.changed.notify_all()

    def until_someone_waits(self, threads: int = 1, timeout: float = 30.0) -> None:
        """Return when so many threads are blocked on bytes."""
        deadline = time.monotonic() + timeout
        while self.waiting < threads:
            assert time.monotonic() < deadline, "nobody waited for bytes"
            time.sleep(0.001)


class GatedBlob:
    """A file whose memory is zeros beyond its first block until a wait for it ends."""

    def __init__(self, real: Blob, gate: Gate) -> None:
        self._real = real
        self._gate = gate
        self._memory = bytearray(real.size)
        self._ready: set[ByteRange] = set()
        head = real.read(ByteRange(0, min(FIRST, real.size)))
        length = 8 + int.from_bytes(head[:8], "little")  # the header only: tensors must not arrive with it
        self._head = min(length, real.size) if real.name.endswith(".safetensors") else real.size
        self._copy(ByteRange(0, self._head))

    def _copy(self, span: ByteRange) -> None:
        self._memory[span.start : span.stop] = self._real.read(span)

    @property
    def name(self) -> str:
        return self._real.name

    @property
    def size(self) -> int:
        return self._real.size

    @property
    def version(self) -> str:
        return self._real.version

    def buffer(self) -> memoryview:
        return memoryview(self._memory)

    def ready(self, span: ByteRange) -> bool:
        return span.stop <= self._head or span in self._ready

    def ensure(self, spans: Sequence[ByteRange], timeout: float | None = None) -> None:
        late = [span for span in spans if not self.ready(span)]
        if not late:
            return
        gate = self._gate
        with gate.changed:
            gate.waited += [(self.name, span) for span in late]
            gate.waiting += 1
            try:
                arrived = gate.changed.wait_for(lambda: gate.open or gate.failure is not None, timeout)
            finally:
                gate.waiting -= 1
            if gate.failure is not None:
                raise gate.failure
            if not arrived:
                raise StalledError(f"{self.name}: no byte within {timeout} s")
            for span in late:
                self._copy(span)
                self._ready.add(span)

    def read(self, span: ByteRange) -> bytes:
        return self._real.read(span)  # headers and small files; tensors come through `buffer`

    def close(self) -> None:
        self._real.close()


class NoPrefetch:
    """A prefetch that never brings anything: only demand opens the gate's bytes."""

    def progress(self) -> Progress:
        return Progress(total=0, ready=0, moved=0, seconds=0.0)

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> bool:
        return True

    def cancel(self) -> None:
        return None


class GatedSource:
    """A local folder behind a gate."""

    def __init__(self, folder: Path, gate: Gate) -> None:
        self._real = LocalSource(str(folder))
        self._gate = gate
        self._blobs: dict[str, Blob | LoadstoneError] = {}

    @property
    def name(self) -> str:
        return self._real.name

    def names(self) -> tuple[str, ...] | None:
        return self._real.names()

    def open(self, names: Sequence[str]) -> dict[str, Blob | LoadstoneError]:
        for name, real in self._real.open([n for n in names if n not in self._blobs]).items():
            self._blobs[name] = real if isinstance(real, LoadstoneError) else GatedBlob(real, self._gate)
        return {name: self._blobs[name] for name in names}

    def prefetch(self, spans: Sequence[Span], *, warm: bool = True) -> Prefetch:
        return NoPrefetch()

    def stated_digest(self, blob: Blob) -> StatedDigest:
        return self._real.stated_digest(blob)

    def settle(self, timeout: float | None = None) -> bool:
        return True

    def passing(self, names: Collection[str] | None = None) -> str:
        return self._real.passing(names)

    def close(self) -> None:
        self._real.close()


def open_gated(folder: Path) -> tuple[Checkpoint, Gate]:
    """Open ``folder`` with every tensor's bytes held back."""
    gate = Gate()
    source = GatedSource(folder, gate)
    return Checkpoint(read_checkpoint(source, str(folder), None, None)), gate


def spans_of(checkpoint: Checkpoint, names: Iterable[str]) -> set[ByteRange]:
    """Return the byte ranges of tensors."""
    return {checkpoint.info(name).range for name in names}
