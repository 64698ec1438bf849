"""Fetching from a store as its callers do, with what every fetch promises asserted."""

from loadstone.loader.locations import parse_location
from loadstone.loader.ranges import ByteRange
from loadstone.loader.stores.store import CHUNK, Gate, OpenGate, Store, Version, open_store
from loadstone.settings import Settings
from tests.support.faulty_server import FaultyServer


def store_of(server: FaultyServer, settings: Settings) -> Store:
    """Return the store whose folder is the server's root."""
    return open_store(parse_location(server.url), None, settings)


def fetch(
    store: Store, version: Version, span: ByteRange, gate: Gate | None = None, name: str = "m"
) -> bytes:
    """Return ``span`` of ``name``: in order, each byte once, in pieces of bounded size."""
    out = bytearray()

    def sink(offset: int, data: memoryview) -> None:
        assert offset == span.start + len(out)
        assert 0 < len(data) <= CHUNK
        out.extend(data)

    store.transport.fetch(store.object(name), version, span, sink, gate or OpenGate())
    return bytes(out)
