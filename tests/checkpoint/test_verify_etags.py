"""ETags of a real S3 server as digests, and what is said where they are none."""

import hashlib
import json
import re
from collections.abc import Callable
from email.message import Message
from http.client import HTTPMessage
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.checkpoints import model_tensors, write_sharded
from tests.support.faulty_server import FaultyServer, Seen
from tests.support.seaweed import BUCKET, Seaweed

import loadstone
from loadstone.cli import main
from loadstone.errors import IntegrityError, TransferError
from loadstone.fileserver import FileServer
from loadstone.loader.ranges import ByteRange, split
from loadstone.loader.stores.etags import stated
from loadstone.loader.stores.store import Version
from loadstone.settings import Settings

MD5 = "0123456789abcdef0123456789abcdef"
_SMALLEST_PART = 5 * 1024 * 1024


def opened(url: str, seaweed: Seaweed, cache: Path) -> loadstone.Checkpoint:
    return loadstone.open(url, storage_options=seaweed.options, settings=Settings(cache_dir=str(cache)))


def put_in_parts(seaweed: Seaweed, key: str, data: bytes, cuts: list[int]) -> None:
    client: Any = seaweed.client()
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    where = {"Bucket": BUCKET, "Key": key, "UploadId": upload}
    parts = []
    for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(data)], strict=True), 1):
        tag = client.upload_part(**where, PartNumber=number, Body=data[start:stop])["ETag"]
        parts.append({"PartNumber": number, "ETag": tag})
    client.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})


def large(folder: Path, mib: int = 12) -> bytes:
    """Return a file of ``mib`` MiB; of 12, it takes three parts."""
    save_file({"large": torch.arange(mib << 18, dtype=torch.int32)}, folder / "large.safetensors")
    return (folder / "large.safetensors").read_bytes()


def spoil_cached(cache: Path) -> None:
    """Change one bit of the largest cached object, as a bad disk does."""
    path = max(cache.glob("blobs/*/data"), key=lambda path: path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))


def test_the_etag_of_one_request_is_compared(seaweed: Seaweed, tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m", model_tensors(), shards=2)
    seaweed.upload(folder, "etags/single")
    with opened(f"s3://{BUCKET}/etags/single", seaweed, tmp_path / "cache") as checkpoint:
        report = checkpoint.verify()
        assert len(report.verified) == 2
        assert report.unknown == ()
        for file in report.files:
            assert file.etag == hashlib.md5((folder / file.name).read_bytes()).hexdigest()
    spoil_cached(tmp_path / "cache")
    told = r"has an MD5 ETag of \w+, but the store's ETag is \w+; fetch it again"
    with (
        opened(f"s3://{BUCKET}/etags/single", seaweed, tmp_path / "cache") as checkpoint,
        pytest.raises(IntegrityError, match=told),
    ):
        checkpoint.verify()


def test_the_etag_of_parts_of_one_size_is_compared(seaweed: Seaweed, tmp_path: Path) -> None:
    data = large(tmp_path)
    assert len(data) > 2 * _SMALLEST_PART
    cuts = list(range(_SMALLEST_PART, len(data), _SMALLEST_PART))
    put_in_parts(seaweed, "etags/parts/model.safetensors", data, cuts)
    with opened(f"s3://{BUCKET}/etags/parts", seaweed, tmp_path / "cache") as checkpoint:
        (file,) = checkpoint.verify().verified
        assert file.etag.endswith(f"-{len(cuts) + 1}")
    spoil_cached(tmp_path / "cache")
    with (
        opened(f"s3://{BUCKET}/etags/parts", seaweed, tmp_path / "cache") as checkpoint,
        pytest.raises(IntegrityError, match="MD5 ETag"),
    ):
        checkpoint.verify()


@pytest.mark.parametrize(
    "cuts",
    [
        [_SMALLEST_PART + 9, 2 * _SMALLEST_PART + 10],
        [_SMALLEST_PART],  # the last is longer than the first
    ],
)
def test_parts_of_different_sizes_are_not_checked(seaweed: Seaweed, tmp_path: Path, cuts: list[int]) -> None:
    data = large(tmp_path)
    put_in_parts(seaweed, "etags/odd/model.safetensors", data, cuts)
    with opened(f"s3://{BUCKET}/etags/odd", seaweed, tmp_path / "cache") as checkpoint:
        (file,) = checkpoint.verify().unknown
        assert file.reason == "it was stored in parts of different sizes"


def test_uneven_parts_whose_sum_is_that_of_even_ones_are_not_called_damaged(
    seaweed: Seaweed, tmp_path: Path
) -> None:
    data, odd = large(tmp_path, 22), 1 << 19
    sizes = [6 << 20, (6 << 20) - odd, (6 << 20) + odd]
    put_in_parts(seaweed, "etags/sum/model.safetensors", data, list(accumulate(sizes)))
    with opened(f"s3://{BUCKET}/etags/sum", seaweed, tmp_path / "cache") as checkpoint:
        (file,) = checkpoint.verify().verified
        assert file.etag.endswith("-4")
    spoil_cached(tmp_path / "cache")
    with (
        opened(f"s3://{BUCKET}/etags/sum", seaweed, tmp_path / "cache") as checkpoint,
        pytest.raises(IntegrityError, match="MD5 ETag"),
    ):
        checkpoint.verify()


def multipart_store(data: bytes, cuts: list[int], *, tells: Callable[[int], bool]) -> FaultyServer:
    """Return a server of one object in parts, which ``tells`` of those whose numbers it is asked about."""
    parts = [data[start:stop] for start, stop in pairwise([0, *cuts, len(data)])]
    digests = b"".join(hashlib.md5(part).digest() for part in parts)
    tag = f'"{hashlib.md5(digests).hexdigest()}-{len(parts)}"'

    def answer(request: Seen) -> tuple[int, dict[str, str], bytes]:
        path, _, query = request.path.partition("?")
        if query.startswith("list-type"):
            return 403, {}, b"<Error><Code>AccessDenied</Code></Error>"
        if not path.endswith("/model.safetensors"):
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        start, stop = 0, len(data)
        if query.startswith("partNumber="):
            number = int(query.removeprefix("partNumber="))
            if not tells(number):
                return 501, {}, b"<Error><Code>NotImplemented</Code></Error>"
            start, stop = [0, *cuts][number - 1], [*cuts, len(data)][number - 1]
        elif "Range" in request.headers:
            first, last = request.headers["Range"].removeprefix("bytes=").split("-")
            start, stop = int(first), min(int(last) + 1, len(data))
        span = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        return 206, {"ETag": tag, **span}, data[start:stop]

    server = FaultyServer({})
    server.intercept = answer
    return server


@pytest.mark.parametrize("tells", [True, False])
def test_before_a_file_is_called_damaged_every_part_is_asked_for(
    tells: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = large(tmp_path, 1)
    size = len(data) // 12 + 1  # of 12 parts, the last being shorter
    even = list(range(size, len(data), size))
    cuts = [at + (3 if at in even[4:6] else 0) for at in even]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with multipart_store(data, cuts, tells=lambda number: tells or number in (1, 12)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        status = main(["verify", "s3://bucket/m", "--cache", str(tmp_path / "cache")])
        asked = [seen.path.partition("partNumber=")[2] for seen in server.seen if "partNumber=" in seen.path]
    told = capsys.readouterr()
    assert "damaged" not in told.out + told.err
    assert status == (0 if tells else 3)
    if tells:
        assert sorted(map(int, asked)) == list(range(1, 13))
    else:
        assert "not checked: whether its ETag is a digest could not be asked" in told.out


def test_a_match_asks_for_two_parts_alone(tmp_path: Path) -> None:
    data = large(tmp_path, 1)
    with multipart_store(data, list(range(99_999, len(data), 99_999)), tells=lambda _: True) as server:
        options = {"anon": True, "endpoint_url": server.url}
        with loadstone.open("s3://bucket/m", storage_options=options, cache=None) as checkpoint:
            assert len(checkpoint.verify().verified) == 1
        assert sum("partNumber=" in seen.path for seen in server.seen) == 2


def test_the_command_does_not_succeed_where_nothing_could_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_sharded(tmp_path / "m", model_tensors(), shards=2)
    with FileServer(folder) as server:
        assert main(["verify", server.url, "--cache", str(tmp_path / "cache")]) == 3
        told = capsys.readouterr()
        assert told.out.count("not checked: the ETags of its store are not known to be digests") == 2
        assert told.err.startswith("warning: nothing could be checked")
        assert main(["verify", server.url, "--cache", str(tmp_path / "cache"), "--json"]) == 3
        assert json.loads(capsys.readouterr().out)["complete"] is False


def headers(**fields: str) -> HTTPMessage:
    made = HTTPMessage()
    for name, value in fields.items():
        Message.__setitem__(made, name.replace("_", "-"), value)
    return made


@pytest.mark.parametrize(
    ("tag", "answer", "reason"),
    [
        ('"abc"', {}, "is no digest"),
        (f'"{MD5[:-1]}x"', {}, "is no digest"),
        (f'"{MD5}-0"', {}, "is no digest"),
        (f'"{MD5}-10001"', {}, "tells of 10001 parts"),
        (f'"{MD5}"', {"x_amz_server_side_encryption": "aws:kms"}, "encrypted with keys of its own"),
        (f'"{MD5}"', {"x_amz_server_side_encryption": "aws:kms:dsse"}, "encrypted with keys of its own"),
        (f'"{MD5}"', {"x_amz_server_side_encryption_customer_algorithm": "AES256"}, "encrypted with keys"),
        (f'"{MD5}-3"', {}, "does not say how large"),
        (f'"{MD5}-3"', {"Content_Range": "bytes 0-4/11"}, "does not say how large"),
        (f'"{MD5}-2"', {"Content_Range": "bytes 0-4/10"}, "parts of different sizes"),
        (f'"{MD5}-3"', {"Content_Range": "bytes 0-8/10"}, "parts of different sizes"),
    ],
)
def test_an_etag_that_is_no_digest_is_not_taken_for_one(
    tag: str, answer: dict[str, str], reason: str
) -> None:
    found = stated(Version(tag, 10), lambda _query, _headers: headers(**answer))
    assert found.etag == ""
    assert re.search(reason, found.reason)


@pytest.mark.parametrize("encryption", [{}, {"x_amz_server_side_encryption": "AES256"}])
def test_the_stores_own_encryption_leaves_the_etag_a_digest(encryption: dict[str, str]) -> None:
    found = stated(Version(f'"{MD5.upper()}"', 10), lambda _query, _headers: headers(**encryption))
    assert (found.etag, found.parts) == (MD5, ())
    one_part = stated(Version(f'"{MD5}-1"', 10), lambda _query, _headers: headers(**encryption))
    assert (one_part.etag, one_part.parts) == (f"{MD5}-1", (ByteRange(0, 10),))


@pytest.mark.parametrize("middle", ["", "bytes 2-3/10", "bytes 1-1/10"])
def test_parts_that_leave_gaps_are_not_believed(middle: str) -> None:
    told = {"1": "bytes 0-1/10", "2": "bytes 2-3/10", "3": "bytes 4-5/10", "4": "bytes 6-7/10"}
    told |= {"5": "bytes 8-9/10"}

    def ask(query: str, _headers: dict[str, str]) -> HTTPMessage:
        return headers(Content_Range=told[query.removeprefix("partNumber=")])

    found = stated(Version(f'"{MD5}-5"', 10), ask)
    assert found.parts == tuple(split(ByteRange(0, 10), 2))
    assert found.surer is not None
    assert found.surer().parts == found.parts
    told["3"] = middle
    assert (found.surer().etag, found.surer().parts) == ("", ())
    assert "does not say how large" in found.surer().reason


def test_a_store_that_cannot_be_asked_leaves_it_unknown() -> None:
    def refuse(_query: str, _headers: dict[str, str]) -> HTTPMessage:
        raise TransferError("the store answered 501")

    found = stated(Version(f'"{MD5}-2"', 10), refuse)
    assert (found.etag, found.reason) == (
        "",
        "whether its ETag is a digest could not be asked: the store answered 501",
    )
