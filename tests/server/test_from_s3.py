"""Base and adapters in a real S3 server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.seaweed import Seaweed, running
from tests.support.served_models import reference
from tests.support.service import check_error, run_service

from loadstone.settings import Settings

PROMPT = "The lodestone turns"


@pytest.fixture(scope="module")
def s3(base: Path, root: Path) -> Iterator[Seaweed]:
    with running() as server:
        server.upload(base, "little")
        server.upload(root / "a1", "adapters/a1")
        server.upload(root / "a2", "elsewhere/a2")
        yield server


@pytest.mark.filterwarnings("ignore:.*it says that its base is:loadstone.errors.LoadstoneWarning")
def test_base_and_adapters_come_from_s3(s3: Seaweed, base: Path, root: Path, tmp_path: Path) -> None:
    settings = Settings(cache_dir=str(tmp_path / "cache"))
    with run_service(
        "s3://models/little", ["s3://models/adapters"], settings, storage_options=s3.options
    ) as service:
        progress = service.engine.startup.progress()
        assert progress is not None
        assert progress.ready == progress.total
        assert service.say("little", PROMPT) == reference(base, PROMPT)
        told = service.load("a1").json()
        assert "its base is" in told["warnings"][0]
        assert service.say("a1", PROMPT) == reference(base, PROMPT, root / "a1")
        check_error(service.load("a2", "s3://models/elsewhere/a2"), 400)
        check_error(service.load("a2"), 404)
        again = service.load("a1", "s3://models/adapters/a1").json()
        assert again["changed"] is False
