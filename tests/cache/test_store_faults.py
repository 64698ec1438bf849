"""The whole way from a misbehaving server to usable memory: right bytes of one version, or an error."""

import random
import threading
from pathlib import Path

import pytest
from tests.support.faulty_server import Fault, FaultyServer, tag_of
from tests.support.seaweed import Seaweed

from loadstone.errors import ChangedError, LoadstoneError
from loadstone.loader.locations import parse_location
from loadstone.loader.node.cache import NodeCache
from loadstone.loader.node.remote import RemoteBlob, open_remote
from loadstone.loader.ranges import BLOCK, ByteRange
from loadstone.loader.source import Span
from loadstone.settings import Settings

OLD = random.Random(1).randbytes(12 * BLOCK + 99)
NEW = random.Random(2).randbytes(12 * BLOCK + 99)
OTHER = random.Random(3).randbytes(3 * BLOCK)
SLOW = {Fault.TRICKLE, Fault.STALL, Fault.STALL_UNMARKED, Fault.FORBIDDEN, Fault.NOT_FOUND}


def settings_for(folder: Path | str) -> Settings:
    return Settings(
        cache_dir=str(folder), request_bytes=2 * BLOCK, stall_timeout=0.5, retry_seconds=3, max_connections=6
    )


def truth_of(blob: RemoteBlob) -> bytes:
    if blob.name.endswith("/n"):
        return OTHER
    return NEW if tag_of(NEW) in blob.version else OLD


def read_some(blobs: list[RemoteBlob], seed: int, wrong: list[str]) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        blob = rng.choice(blobs)
        start = rng.randrange(blob.size)
        span = ByteRange(start, min(blob.size, start + rng.randrange(1, 4 * BLOCK)))
        try:
            data = blob.read(span)
        except LoadstoneError:
            continue
        # Without a validator nothing says which version it is: it must be one of them, by and by the same.
        versions = [truth_of(blob)] if blob.version.endswith('"') else [OLD, NEW, OTHER]
        if data not in [version[span.start : span.stop] for version in versions]:
            wrong.append(f"{blob.name} {span}")


@pytest.mark.parametrize("seed", range(12))
def test_faults_mixed_at_random_leave_no_wrong_byte(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    faults = [fault for fault in Fault if fault not in SLOW]

    def plan(number: int) -> Fault:
        return rng.choice(faults) if rng.random() < 0.3 else Fault.NONE

    wrong: list[str] = []
    with FaultyServer({"/m": OLD, "/n": OTHER}, plan, retry_after=0) as server:
        if seed % 2:
            server.swap = (rng.randrange(3, 20), "/m", NEW)
        settings = settings_for("none" if seed % 3 == 0 else tmp_path / "cache")
        for _ in range(2):
            source = open_remote(parse_location(server.url), None, settings, NodeCache(settings))
            opened = [blob for blob in source.open(["m", "n"]).values() if isinstance(blob, RemoteBlob)]
            if opened:
                source.prefetch([Span(blob, ByteRange(0, blob.size)) for blob in opened])
                threads = [threading.Thread(target=read_some, args=(opened, seed + n, wrong)) for n in (1, 2)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            for blob in opened:
                ready = [ByteRange(at, min(at + BLOCK, blob.size)) for at in range(0, blob.size, BLOCK)]
                found = {
                    name
                    for name, truth in (("old", OLD), ("new", NEW), ("other", OTHER))
                    if all(
                        bytes(blob.buffer()[span.start : span.stop]) == truth[span.start : span.stop]
                        for span in ready
                        if blob.ready(span)
                    )
                }
                if not found:
                    wrong.append(f"{blob.name}: a mixture")
            source.close()
    assert not wrong


def test_an_object_replaced_in_a_real_store(seaweed: Seaweed, tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "cache")
    location = parse_location("s3://models/node-cache")
    seaweed.put("node-cache/a b+c", OLD)
    for version in (OLD, NEW):
        seaweed.put("node-cache/a b+c", version)
        source = open_remote(location, seaweed.options, settings, NodeCache(settings))
        blob = source.open(["a b+c"])["a b+c"]
        assert isinstance(blob, RemoteBlob)
        assert blob.read(ByteRange(5, 2 * BLOCK)) == version[5 : 2 * BLOCK]
        if version is OLD:
            seaweed.put("node-cache/a b+c", NEW)
            with pytest.raises(ChangedError, match="a b"):
                blob.read(ByteRange(0, blob.size))
            assert blob.read(ByteRange(5, 2 * BLOCK)) == OLD[5 : 2 * BLOCK]
        else:
            assert source.prefetch([Span(blob, ByteRange(0, blob.size))]).wait(20)
            assert bytes(blob.buffer()) == NEW
        source.close()
    secrets = [str(value).encode() for key, value in seaweed.options.items() if key != "endpoint_url"]
    written = [path.read_bytes() for path in (tmp_path / "cache").rglob("*.json")]
    assert written
    assert not [text for text in written for secret in secrets if secret in text]
