"""fsspec file systems that fail, change or know little: the same promises as over HTTP."""

import errno
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from loadstone.errors import (
    AccessError,
    ChangedError,
    ClosedError,
    MissingExtraError,
    NotFoundError,
    TransferError,
)
from loadstone.loader.locations import parse_location
from loadstone.loader.ranges import ByteRange
from loadstone.loader.stores import backoff
from loadstone.loader.stores.backoff import TemporaryError
from loadstone.loader.stores.store import CHUNK, OpenGate, Store, Version, open_store
from loadstone.settings import Settings

GATE = OpenGate()
DATA = random.Random(5).randbytes(6 * CHUNK + 77)

pytestmark = pytest.mark.usefixtures("quick")


class FlakyFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A memory file system whose reads go wrong on demand."""

    protocol = "flaky"
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failures: ClassVar[list[BaseException]] = []
    listing_failures: ClassVar[list[BaseException]] = []
    forgetful = False
    swap_after: ClassVar[list[bytes]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("flaky://").strip("/")

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().info(path, **kwargs)
        return {key: found[key] for key in ("name", "size", "type")} if FlakyFileSystem.forgetful else found

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if FlakyFileSystem.listing_failures:
            raise FlakyFileSystem.listing_failures.pop()
        return super().ls(path, detail, **kwargs)

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if mode == "rb" and FlakyFileSystem.failures:
            raise FlakyFileSystem.failures.pop()
        found = super()._open(path, mode, *args, **kwargs)
        if mode == "rb" and FlakyFileSystem.swap_after:
            self.pipe_file(path, FlakyFileSystem.swap_after.pop())
        return found


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    FlakyFileSystem().pipe_file("/base/m", DATA)
    FlakyFileSystem.forgetful = False
    yield open_store(parse_location("flaky://base"), None, replace(settings, retry_seconds=0.5))
    for things in (FlakyFileSystem.failures, FlakyFileSystem.swap_after, FlakyFileSystem.store):
        things.clear()


def probe(store: Store) -> Version:
    version = store.transport.probe(store.object("m"), 1000, None, GATE).version
    assert version is not None
    return version


def fetch(store: Store, version: Version, span: ByteRange) -> bytes:
    out = bytearray()
    store.transport.fetch(store.object("m"), version, span, lambda _, data: out.extend(data), GATE)
    return bytes(out)


@pytest.mark.parametrize("error", [OSError("line cut"), TimeoutError("slow"), RuntimeError("library's own")])
def test_failures_that_may_pass_are_tried_again(error: Exception, store: Store) -> None:
    version = probe(store)
    FlakyFileSystem.failures[:] = [error] * 3
    assert fetch(store, version, ByteRange(5, 5 * CHUNK)) == DATA[5 : 5 * CHUNK]


def test_failures_that_stay_end(store: Store) -> None:
    version = probe(store)
    FlakyFileSystem.failures[:] = [OSError("line cut at sftp://u:swordfish@host/x")] * 1000
    with pytest.raises(TransferError, match=r"line cut.*gave up") as caught:
        fetch(store, version, ByteRange(0, 10))
    assert "swordfish" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError("no"), AccessError),
        (FileNotFoundError("gone"), NotFoundError),
        (ImportError("paramiko"), MissingExtraError),
        (NotImplementedError(), AccessError),
    ],
)
def test_failures_that_are_final_are_told_at_once(
    error: Exception, kind: type[Exception], store: Store
) -> None:
    version = probe(store)
    FlakyFileSystem.failures[:] = [error]
    with pytest.raises(kind):
        fetch(store, version, ByteRange(0, 10))


def wrapped(cause: Exception) -> Exception:
    """Return what a library makes of ``cause``."""
    error = RuntimeError("the client failed")
    error.__cause__ = ValueError("no luck")
    error.__cause__.__context__ = cause
    return error


def test_a_host_without_an_address_is_told_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    monkeypatch.setattr(FlakyFileSystem, "failures", [wrapped(unknown)])
    with pytest.raises(TransferError, match=r"host has no address \(Name or service.*DNS") as caught:
        store.transport.probe(store.object("m"), 10, None, GATE)
    assert not isinstance(caught.value, TemporaryError)
    assert FlakyFileSystem.failures == []


@pytest.mark.parametrize(
    "cause",
    [
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
    ],
)
def test_a_store_that_was_never_reached_is_given_up_sooner(
    cause: Exception, store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "_CONNECT_PATIENCE", 0.3)
    fresh = open_store(parse_location(store.name), None, replace(settings, retry_seconds=100.0))
    monkeypatch.setattr(FlakyFileSystem, "failures", [wrapped(cause)] * 5000)
    begun = time.monotonic()
    with pytest.raises(TransferError, match=r"client failed.*gave up after"):
        fresh.transport.probe(fresh.object("m"), 10, None, GATE)
    assert time.monotonic() - begun < 5
    fresh.close()


def test_a_change_in_the_middle_hands_on_nothing_of_the_window(store: Store) -> None:
    version = probe(store)
    FlakyFileSystem.swap_after[:] = [DATA[::-1]]
    with pytest.raises(ChangedError, match="replaced"):
        fetch(store, version, ByteRange(0, 3 * CHUNK))


def test_where_nothing_tells_versions_apart_objects_are_taken_whole(store: Store) -> None:
    FlakyFileSystem.forgetful = True
    version = probe(store)
    assert version == Version("", len(DATA))
    with pytest.raises(TransferError, match="read it whole"):
        fetch(store, version, ByteRange(0, 10))
    out = bytearray(len(DATA))

    def sink(offset: int, data: memoryview) -> None:
        out[offset : offset + len(data)] = data

    FlakyFileSystem.failures[:] = [OSError("line cut")]
    assert store.transport.fetch_whole(store.object("m"), len(DATA), sink, GATE) == version
    assert out == DATA


def test_a_listing_is_tried_again_and_refused_ones_are_none(store: Store) -> None:
    FlakyFileSystem.listing_failures[:] = [OSError("line cut")] * 3
    assert store.names() == ("m",)
    for error in (PermissionError("no"), NotImplementedError()):
        FlakyFileSystem.listing_failures[:] = [error]
        assert store.names() is None


def test_a_folder_is_no_object(store: Store) -> None:
    FlakyFileSystem().makedirs("/base/deep")
    with pytest.raises(NotFoundError):
        store.transport.probe(store.object("deep"), 10, None, GATE)


def test_a_missing_folder_is_not_found(settings: Settings) -> None:
    with pytest.raises(NotFoundError):
        open_store(parse_location("memory://nowhere-at-all"), None, settings).names()


def test_a_protocol_whose_package_is_missing_says_which(settings: Settings) -> None:
    fsspec.register_implementation(
        "absent", "no_such_package.Thing", errtxt="install no_such_package", clobber=True
    )
    with pytest.raises(MissingExtraError, match="no_such_package"):
        open_store(parse_location("absent://x"), None, settings).names()


def test_a_closed_store_reads_nothing(store: Store) -> None:
    version = probe(store)
    store.close()
    with pytest.raises(ClosedError, match="open the checkpoint again"):
        fetch(store, version, ByteRange(0, 10))


def test_each_thread_has_its_own_file_system(store: Store) -> None:
    from loadstone.loader.stores.fsreads import FileSystems

    systems = FileSystems(parse_location("flaky://base"), {})
    mine, theirs = systems.get(), []
    thread = threading.Thread(target=lambda: theirs.append(systems.get()))
    thread.start()
    thread.join()
    assert systems.get() is mine
    assert theirs[0] is not mine
