"""One small model, its adapters, and one service over them, shared by the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.served_models import make_adapter, make_llama
from tests.support.service import Service, run_service

from loadstone.settings import Settings


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """Return an adapter root with adapters a1 to a3 of one shape."""
    folder = tmp_path_factory.mktemp("adapters")
    for number in (1, 2, 3):
        make_adapter(folder / f"a{number}", base, seed=number)
    return folder


@pytest.fixture(scope="session")
def settings() -> Settings:
    return Settings(cache_dir="none", max_running=4, max_waiting=12, drain_seconds=5)


@pytest.fixture(scope="session")
def shared_service(base: Path, root: Path, settings: Settings) -> Iterator[Service]:
    with run_service(base, [root], settings) as running:
        yield running


@pytest.fixture
def service(shared_service: Service) -> Iterator[Service]:
    """Return the shared service, idle and without adapters, before and after the test."""
    yield shared_service
    shared_service.until("idle")
    pool = shared_service.engine.loaded().pool
    for status in pool.list():
        pool.unload(status.name, timeout=5)
