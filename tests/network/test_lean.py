"""A first request waits for no import that it does not need."""

import os
import subprocess
import sys

import pytest
from tests.support.faulty_server import FaultyServer

_HEAVY = ("aiobotocore", "aiohttp", "boto3", "fsspec", "numpy", "requests", "s3fs", "torch", "transformers")
_SCRIPT = """
import sys
from loadstone.loader.locations import parse_location
from loadstone.loader.stores.store import OpenGate, open_store
from loadstone.settings import Settings
store = open_store(parse_location(sys.argv[1]), None, Settings())
assert store.transport.probe(store.object("m"), 10, None, OpenGate()).data == b"x" * 10
print([name for name in sys.argv[2].split(",") if name in sys.modules])
"""


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_a_first_request_imports_little(kind: str) -> None:
    with FaultyServer({"/bucket/m": b"x" * 100}) as server:
        location = "s3://bucket" if kind == "s3" else f"{server.url}/bucket"
        environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": "A",
            "AWS_SECRET_ACCESS_KEY": "B",
            "AWS_ENDPOINT_URL": server.url,
        }
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                _SCRIPT,
                location,
                ",".join((*_HEAVY, "botocore")),
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
