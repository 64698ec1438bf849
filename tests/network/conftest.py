"""Stores under test, each with a way to put objects into it that does not use the code under test."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.support.seaweed import BUCKET, Seaweed

from loadstone.fileserver import FileServer
from loadstone.loader.locations import parse_location
from loadstone.loader.stores import backoff, connections
from loadstone.loader.stores.store import Store, open_store
from loadstone.settings import Settings

_FOLDERS = itertools.count()


@dataclasses.dataclass(frozen=True)
class Backend:
    """A store and the means to change what is in its folder."""

    store: Store
    put: Callable[[str, bytes], object]
    delete: Callable[[str], object]
    lists: bool


class SigningFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system that can sign, as Google's and Azure's can: a memory one, also served by HTTP."""

    protocol = "signing"
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    served = ""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("signing://").strip("/")

    def sign(self, path: str, expiration: int = 100, **kwargs: object) -> str:
        return f"{self.served}{quote(path)}?signature=sesame&expires={expiration}"


@pytest.fixture
def settings() -> Settings:
    return Settings(retry_seconds=5.0, stall_timeout=1.0, connect_timeout=2.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses and looks at the clock a hundred times shorter; what is decided stays the same."""
    monkeypatch.setattr(backoff, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(backoff, "_SLICE", 0.01)
    monkeypatch.setattr(connections, "TICK", 0.05)


@pytest.fixture(params=["s3", "web", "memory", "signed"])
def backend(request: pytest.FixtureRequest, tmp_path: Path, settings: Settings) -> Iterator[Backend]:
    """Every kind of store, with an empty folder."""
    build = {"s3": _s3, "web": _web, "memory": _memory, "signed": _signed}[request.param]
    made = build(request, tmp_path, settings)
    try:
        yield made
    finally:
        made.store.close()


def _s3(request: pytest.FixtureRequest, _: Path, settings: Settings) -> Backend:
    server: Seaweed = request.getfixturevalue("seaweed")
    folder = f"folder-{os.getpid()}-{next(_FOLDERS)}"
    store = open_store(parse_location(f"s3://{BUCKET}/{folder}"), server.options, settings)
    client = server.client()

    def delete(name: str) -> None:
        client.delete_object(Bucket=BUCKET, Key=f"{folder}/{name}")

    return Backend(store, lambda name, data: server.put(f"{folder}/{name}", data), delete, lists=True)


def _web(request: pytest.FixtureRequest, folder: Path, settings: Settings) -> Backend:
    server = FileServer(folder)
    request.addfinalizer(server.close)
    store = open_store(parse_location(server.url), None, settings)
    return Backend(store, _writer(folder), lambda name: (folder / name).unlink(), lists=False)


def _memory(request: pytest.FixtureRequest, _: Path, settings: Settings) -> Backend:
    fs = fsspec.filesystem("memory")
    folder = f"/folder-{next(_FOLDERS)}"
    fs.mkdir(folder)
    store = open_store(parse_location(f"memory:/{folder}"), None, settings)
    request.addfinalizer(lambda: fs.rm(folder, recursive=True))
    return Backend(
        store,
        lambda name, data: fs.pipe_file(f"{folder}/{name}", data),
        lambda name: fs.rm_file(f"{folder}/{name}"),
        lists=True,
    )


def _signed(request: pytest.FixtureRequest, folder: Path, settings: Settings) -> Backend:
    fsspec.register_implementation("signing", SigningFileSystem, clobber=True)
    server = FileServer(folder)
    request.addfinalizer(server.close)
    SigningFileSystem.served = server.url
    fs = SigningFileSystem()
    write = _writer(folder)
    fs.makedirs("/base", exist_ok=True)
    (folder / "base").mkdir()

    def put(name: str, data: bytes) -> None:
        fs.pipe_file(f"/base/{name}", b"listed here, served there")
        write(f"base/{name}", data)

    def delete(name: str) -> None:
        fs.rm_file(f"/base/{name}")
        (folder / "base" / name).unlink()

    request.addfinalizer(SigningFileSystem.store.clear)
    store = open_store(parse_location("signing://base"), None, settings)
    return Backend(store, put, delete, lists=True)


def _writer(folder: Path) -> Callable[[str, bytes], object]:
    def put(name: str, data: bytes) -> None:
        # A new file in the old one's place, so that the inode says that it is another version.
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.fresh")
        fresh.write_bytes(data)
        fresh.replace(path)

    return put
