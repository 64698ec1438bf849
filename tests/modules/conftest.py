"""Tiny models saved once for all tests of modules, and silence from transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.tiny_models import TINY

Saved = Callable[[str], Path]


@pytest.fixture(scope="session", autouse=True)
def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return the folder of a tiny model, saved in several shards at its first use."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = TINY[name].save(tmp_path_factory.mktemp(name), max_shard_size="150KB")
        return folders[name]

    return folder
