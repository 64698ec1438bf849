"""nginx on a folder, as a fast S3: anonymous, path-style, with listings; it ignores signatures.

It has a configuration, a log and temporary folders of its own, and ends with its user. Its workers read from
the page cache, so that it costs the clients little of the processor.
"""

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path

from loadstone.bench.netns import Seat
from loadstone.bench.runner import CannotRun
from loadstone.errors import BenchError

BUCKET = "bench"

_START_SECONDS = 10.0
_CONFIG = """\
user root;
daemon off;
worker_processes 2;
pid {home}/pid;
error_log {home}/log warn;
events {{ worker_connections 512; }}
http {{
  access_log off;
  default_type application/octet-stream;
  sendfile on;
  tcp_nodelay on;
  keepalive_requests 1000000;
  open_file_cache max=1000;
  client_body_temp_path {home}/body;
  proxy_temp_path {home}/proxy;
  fastcgi_temp_path {home}/fastcgi;
  scgi_temp_path {home}/scgi;
  uwsgi_temp_path {home}/uwsgi;
  map $arg_prefix $listing {{
    default /listings/none;
    "~^(?<folder>[a-z0-9-]+)" /listings/$folder;
  }}
  server {{
    listen {port};
    location /{bucket}/ {{ alias {folder}/; }}
    location = /{bucket} {{ if ($args ~ list-type) {{ rewrite ^ $listing last; }} return 404; }}
    location = /{bucket}/ {{ if ($args ~ list-type) {{ rewrite ^ $listing last; }} return 404; }}
    location /listings/ {{ internal; default_type application/xml; root {home}; }}
  }}
}}
"""


@contextmanager
def nginx(folder: Path, seat: Seat) -> Iterator[int]:
    """Serve the folders directly inside ``folder`` as the bucket `BUCKET`; gives the port.

    Raises
    ------
    CannotRun
        There is no nginx on this machine.
    BenchError
        It does not start; the message carries its log.
    """
    if shutil.which("nginx") is None:
        raise CannotRun("nginx is not installed (Debian: apt-get install nginx-light)")
    with tempfile.TemporaryDirectory(prefix="loadstone-nginx-") as scratch:
        home, port = Path(scratch), free_port()
        _write_listings(folder, home / "listings")
        config = home / "nginx.conf"
        config.write_text(
            _CONFIG.format(home=home, port=port, bucket=BUCKET, folder=folder), encoding="utf-8"
        )
        with (home / "out").open("w+") as out:
            argv = [*seat.prefix, "nginx", "-p", str(home), "-c", str(config)]
            server = subprocess.Popen(argv, stdout=out, stderr=out)
            try:
                _await(server, home)
                yield port
            finally:
                server.send_signal(signal.SIGTERM)
                server.wait()


def _await(server: "subprocess.Popen[bytes]", home: Path) -> None:
    """Wait for the file with its number: it is written once nginx listens."""
    deadline = time.monotonic() + _START_SECONDS
    while not (home / "pid").exists():
        if server.poll() is not None or time.monotonic() > deadline:
            words = " ".join((home / "out").read_text().split())[-500:]
            raise BenchError(f"nginx did not start: {words}; check that {home} may be written")
        time.sleep(0.01)


def _write_listings(folder: Path, listings: Path) -> None:
    listings.mkdir()
    entries = {
        inner.name: [file for file in sorted(inner.iterdir()) if file.is_file()]
        for inner in folder.iterdir()
        if inner.is_dir()
    }
    for prefix, files in {**entries, "none": []}.items():
        contents = "".join(
            f"<Contents><Key>{escape(prefix)}/{escape(file.name)}</Key><Size>{file.stat().st_size}</Size>"
            f'<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"{file.stat().st_mtime_ns:x}"</ETag>'
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for file in files
        )
        (listings / prefix).write_text(
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}/</Prefix><KeyCount>{len(files)}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        )


def free_port() -> int:
    """Return a port that nobody listens on; in a namespace of one's own, nobody does on any."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
