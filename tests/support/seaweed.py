"""A real S3 server for tests: SeaweedFS on loopback, credentials enforced, gone when its user is done.

Each server has a folder and ports of its own, so that test runs may go side by side. What a test stores
goes through botocore's own client, never through the code under test.
"""

import contextlib
import functools
import json
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.config
import botocore.session

ACCESS_KEY = "loadstone-admin"
SECRET_KEY = "admin-secret-0123456789"
READER_KEY = "loadstone-reader"
READER_SECRET = "reader-secret-0123456789"
BUCKET = "models"
PUBLIC_BUCKET = "public"
_START_LIMIT = 40.0
_PORTS = (
    "admin.port",
    "admin.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "master.port",
    "master.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "volume.port",
    "volume.port.grpc",
)


@dataclass(frozen=True)
class Seaweed:
    """A running server with two buckets: ``models`` needs credentials, ``public`` may be read by anybody."""

    endpoint: str

    @property
    def options(self) -> dict[str, object]:
        """``storage_options`` of a user who may do everything."""
        return {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": self.endpoint}

    @property
    def reader_options(self) -> dict[str, object]:
        """``storage_options`` of a user who may read objects but not list buckets."""
        return {"key": READER_KEY, "secret": READER_SECRET, "endpoint_url": self.endpoint}

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make a process use it."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def client(self) -> Any:
        """Return botocore's own client for it."""
        return _client(self.endpoint)

    def put(self, key: str, data: bytes, bucket: str = BUCKET) -> str:
        """Store ``data``; returns its ETag."""
        return str(self.client().put_object(Bucket=bucket, Key=key, Body=data)["ETag"])

    def upload(self, folder: Path, prefix: str, bucket: str = BUCKET) -> None:
        """Store every file directly inside ``folder`` below ``prefix``."""
        client = self.client()
        for path in sorted(folder.iterdir()):
            if path.is_file():
                with path.open("rb") as file:
                    client.put_object(Bucket=bucket, Key=f"{prefix}/{path.name}", Body=file)


@functools.cache
def _client(endpoint: str) -> Any:
    return botocore.session.Session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=endpoint,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=botocore.config.Config(s3={"addressing_style": "path"}, signature_version="s3v4"),
    )


@contextlib.contextmanager
def running() -> Iterator[Seaweed]:
    """Start a server, wait until it answers, stop it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="seaweed-"))
    try:
        process, port = _start(folder)
        try:
            server = Seaweed(f"http://127.0.0.1:{port}")
            client = server.client()
            for bucket in (BUCKET, PUBLIC_BUCKET):
                client.create_bucket(Bucket=bucket)
            yield server
        finally:
            process.kill()
            process.wait()
            for taken in (folder / "ports").read_text().split():
                for left in Path("/tmp").glob(f"seaweedfs-*-{taken}.sock"):  # it names them itself
                    left.unlink(missing_ok=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    for _ in range(3):
        # Another process may take a port between the look and the start; then the next try finds others.
        ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        (folder / "ports").write_text(" ".join(map(str, ports.values())))
        process = _launch(folder, ports)
        if _ready(process, ports["s3.port"]):
            return process, ports["s3.port"]
        process.kill()
        process.wait()
    raise RuntimeError("SeaweedFS did not start: " + (folder / "log").read_text(errors="replace")[-2000:])


def _launch(folder: Path, ports: dict[str, int]) -> subprocess.Popen[bytes]:
    data = folder / f"data-{ports['s3.port']}"
    data.mkdir()
    config = folder / "s3.json"
    config.write_text(json.dumps(_identities()))
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [
                str(Path(sysconfig.get_path("scripts")) / "weed"),
                f"-logdir={folder}",
                "mini",
                f"-dir={data}",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                f"-s3.config={config}",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                "-master.telemetry=false",
                "-admin.ui=false",
                "-webdav=false",
                *(f"-{name}={port}" for name, port in ports.items()),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )


def _identities() -> dict[str, object]:
    def user(name: str, key: str, secret: str, actions: list[str]) -> dict[str, object]:
        return {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}

    return {
        "identities": [
            user("admin", ACCESS_KEY, SECRET_KEY, ["Admin", "Read", "List", "Tagging", "Write"]),
            user("reader", READER_KEY, READER_SECRET, [f"Read:{BUCKET}"]),
            {"name": "anonymous", "actions": [f"Read:{PUBLIC_BUCKET}", f"List:{PUBLIC_BUCKET}"]},
        ]
    }


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def _ready(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _START_LIMIT
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2):
                return _writable(port)
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return False


def _writable(port: int) -> bool:
    """Wait until a bucket and an object can be made: volumes come up after the gateway does."""
    client = Seaweed(f"http://127.0.0.1:{port}").client()
    deadline = time.monotonic() + _START_LIMIT
    while time.monotonic() < deadline:
        try:
            client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="ready", Body=b"ready" * 100)
        except Exception:  # noqa: BLE001  whatever is not up yet
            time.sleep(0.2)
        else:
            return True
    return False
