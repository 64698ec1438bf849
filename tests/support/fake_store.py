"""A store in memory whose every byte is counted, and which can be told to misbehave.

It keeps to the protocols of `loadstone.loader.stores.store`; only the network is missing.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from loadstone.errors import ChangedError, NotFoundError
from loadstone.loader.ranges import ByteRange
from loadstone.loader.source import StatedDigest
from loadstone.loader.stores.store import Connector, Gate, Probe, RemoteObject, Sink, Version


@dataclass(frozen=True)
class FakeObject:
    name: str
    identity: str


@dataclass
class Request:
    """One transfer that was asked for, and when its bytes went out."""

    name: str
    span: ByteRange
    begun: float
    sent: list[tuple[float, int]] = field(default_factory=list)


class FakeStore:
    """Objects by name; a tag of "" makes them unpinned."""

    def __init__(self, objects: dict[str, bytes], where: str = "fake://bucket") -> None:
        self.name = where
        self.objects = {name: (f'"{len(data)}-0"', data) for name, data in objects.items()}
        self.latency = 0.0
        self.rate = 0  # bytes per second over all transfers
        self.chunk = 256 * 1024
        self.requests: list[Request] = []
        self.probes: list[str] = []
        self.not_modified = 0
        self.active = self.most_active = 0
        self.before_chunk: Callable[[str, int], None] | None = None
        self.throttle: set[int] = set()  # numbers of requests that hear "slow down" first
        self.closed = False
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def transport(self) -> "FakeStore":
        return self

    @property
    def moved(self) -> int:
        return sum(count for request in self.requests for _, count in request.sent)

    def replace(self, name: str, data: bytes, tag: str | None = None) -> None:
        self.objects[name] = (f'"{time.monotonic_ns()}"' if tag is None else tag, data)

    def names(self) -> tuple[str, ...] | None:
        return tuple(self.objects)

    def object(self, name: str) -> FakeObject:
        return FakeObject(f"{self.name}/{name}", f"{self.name}|{name}")

    def connector(self) -> Connector | None:
        return None

    def close(self) -> None:
        self.closed = True

    def probe(self, obj: RemoteObject, count: int, known: Version | None, gate: Gate) -> Probe:
        tag, data = self._look(obj)
        time.sleep(self.latency)
        gate.admit(count)
        with self._lock:
            self.probes.append(obj.name)
        version = Version(tag, len(data))
        if known == version and tag:
            self.not_modified += 1
            return Probe(None, b"", not_modified=True, whole=False)
        request = Request(obj.name, ByteRange(0, min(count, len(data))), time.monotonic())
        request.sent.append((time.monotonic(), request.span.nbytes))
        with self._lock:
            self.requests.append(request)
        return Probe(version, data[:count], not_modified=False, whole=len(data) <= count)

    def fetch(self, obj: RemoteObject, version: Version, span: ByteRange, sink: Sink, gate: Gate) -> None:
        self._send(obj, span, sink, gate, version)

    def fetch_whole(self, obj: RemoteObject, size_hint: int, sink: Sink, gate: Gate) -> Version:
        tag, data = self._look(obj)
        if size_hint not in {-1, len(data)}:
            raise ChangedError(f"{obj.name} has {len(data)} bytes, not {size_hint}")
        self._send(obj, ByteRange(0, len(data)), sink, gate, None)
        return Version(tag, len(data))

    def stated_digest(self, obj: RemoteObject, version: Version, gate: Gate) -> StatedDigest:
        return StatedDigest(reason="a fake store knows no digests")

    def _look(self, obj: RemoteObject) -> tuple[str, bytes]:
        try:
            return self.objects[obj.name.rpartition("/")[2]]
        except KeyError:
            raise NotFoundError(f"{obj.name} does not exist; check the name") from None

    def _send(
        self, obj: RemoteObject, span: ByteRange, sink: Sink, gate: Gate, version: Version | None
    ) -> None:
        request = Request(obj.name, span, time.monotonic())
        with self._lock:
            self.requests.append(request)
            number = len(self.requests)
            self.active += 1
            self.most_active = max(self.most_active, self.active)
        try:
            if number in self.throttle:
                gate.throttled(None)
            time.sleep(self.latency)
            buffer = bytearray(self.chunk)
            at = span.start
            while at < span.stop:
                stop = min(at + self.chunk, span.stop)
                gate.admit(stop - at)
                self._take_turn(stop - at)
                if self.before_chunk is not None:
                    self.before_chunk(obj.name, at)
                tag, data = self._look(obj)
                if version is not None and version != Version(tag, len(data)):
                    raise ChangedError(f"{obj.name} is another version now; open it again")
                buffer[: stop - at] = data[at:stop]
                request.sent.append((time.monotonic(), stop - at))
                with memoryview(buffer) as view:
                    sink(at, view[: stop - at])
                at = stop
        finally:
            with self._lock:
                self.active -= 1

    def _take_turn(self, nbytes: int) -> None:
        if self.rate:
            with self._lock:
                begin = max(time.monotonic(), self._free_at)
                self._free_at = begin + nbytes / self.rate
            time.sleep(max(0.0, self._free_at - time.monotonic()))
