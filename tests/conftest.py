"""Fixtures that several areas share."""

from collections.abc import Iterator

import pytest

from tests.support import seaweed as seaweed_server


@pytest.fixture(scope="session")
def seaweed() -> Iterator[seaweed_server.Seaweed]:
    """A real S3 server, started at its first use."""
    with seaweed_server.running() as server:
        yield server
