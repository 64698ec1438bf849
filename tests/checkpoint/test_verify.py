"""Digests: of the publisher's manifest, and of an HF cache's blob names."""

import hashlib
import json
from pathlib import Path

import pytest
from tests.support.checkpoints import model_tensors, write_sharded

import loadstone
from loadstone.errors import FormatError, IntegrityError, LoadstoneError, LocationError
from loadstone.loader.layout.manifest import FileRecord, Manifest, parse_manifest
from loadstone.settings import Settings


def published(folder: Path) -> Path:
    """Write a folder and its manifest."""
    write_sharded(folder, model_tensors(), shards=2)
    files = {
        file.name: FileRecord(file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest())
        for file in folder.iterdir()
    }
    (folder / "loadstone.json").write_text(Manifest(files).to_json())
    return folder


def flip(path: Path) -> None:
    """Change one bit of the last byte, in place, as bad memory or a bad disk does."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_good_files_pass(tmp_path: Path) -> None:
    folder = published(tmp_path / "m")
    with loadstone.open(folder, verify=True) as ckpt:
        report = ckpt.verify()
        names = {"config.json", "model.safetensors.index.json", *ckpt.files}
        assert {file.name for file in report.verified} == names
        assert report.unknown == ()
        assert report.nbytes == sum((folder / name).stat().st_size for name in names)
        assert all(file.published == "loadstone.json" and len(file.sha256) == 64 for file in report.files)
        assert ckpt.manifest is not None
    loadstone.open(folder, settings=Settings(verify=True)).close()


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "config.json"])
def test_a_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    folder = published(tmp_path / "m")
    if name == "config.json":
        (folder / name).write_text((folder / name).read_text().replace("llama", "llamb"))
    else:
        flip(folder / name)
    loadstone.open(folder).close()  # the digests are only looked at on request
    with pytest.raises(IntegrityError, match=rf"damaged: {name} has sha256 .* loadstone\.json says"):
        loadstone.open(folder, verify=True)
    with pytest.raises(IntegrityError):
        loadstone.open(folder, settings=Settings(verify=True))


def test_all_damaged_files_are_named(tmp_path: Path) -> None:
    folder = published(tmp_path / "m")
    for shard in folder.glob("*.safetensors"):
        flip(shard)
    with pytest.raises(IntegrityError, match=r"model-00001-of-00002.*model-00002-of-00002"):
        loadstone.open(folder, verify=True)


def test_sizes_are_compared_at_every_open(tmp_path: Path) -> None:
    folder = published(tmp_path / "m")
    document = json.loads((folder / "loadstone.json").read_text())
    document["files"]["model-00001-of-00002.safetensors"]["size"] += 1
    (folder / "loadstone.json").write_text(json.dumps(document))
    with pytest.raises(IntegrityError, match=r"model-00001-of-00002\.safetensors has \d+ bytes instead of"):
        loadstone.open(folder)


def test_a_listed_file_that_is_missing(tmp_path: Path) -> None:
    folder = published(tmp_path / "m")
    (folder / "config.json").unlink()
    with pytest.raises(LoadstoneError, match=r"config\.json"):
        loadstone.open(folder, verify=True)


def test_single_file_of_a_published_folder(tmp_path: Path) -> None:
    folder = published(tmp_path / "m")
    path = folder / "model-00001-of-00002.safetensors"
    with loadstone.open(path, verify=True) as ckpt:
        assert [file.name for file in ckpt.verify().verified] == [path.name]
    flip(path)
    with pytest.raises(IntegrityError, match="sha256"):
        loadstone.open(path, verify=True)


def test_hub_blob_names_are_digests(tmp_path: Path) -> None:
    written = write_sharded(tmp_path / "w", model_tensors(), shards=2)
    snapshot, blobs = tmp_path / "repo/snapshots/abc", tmp_path / "repo/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in written.iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if file.suffix != ".safetensors":  # small files are named by git's own digest
            digest = digest[:40]
        file.rename(blobs / digest)
        (snapshot / file.name).symlink_to(f"../../blobs/{digest}")
    with loadstone.open(snapshot, verify=True) as ckpt:
        report = ckpt.verify()
        assert {file.name for file in report.verified} == set(ckpt.files)
    flip((snapshot / "model-00002-of-00002.safetensors").resolve())
    loadstone.open(snapshot).close()
    with pytest.raises(IntegrityError, match="sha256"):
        loadstone.open(snapshot, verify=True)


def test_nothing_published_is_reported_as_unknown(tmp_path: Path) -> None:
    with loadstone.open(write_sharded(tmp_path / "m", model_tensors()), verify=True) as ckpt:
        report = ckpt.verify()
        assert report.verified == ()
        assert {file.name for file in report.unknown} == set(ckpt.files)


@pytest.mark.parametrize(
    "text",
    [
        "", "[", "[]", "{}", '{"files": []}', '{"files": {}}', '{"format": 0, "files": {}}',
        '{"format": true, "files": {}}', '{"format": "1", "files": {}}', '{"format": 2, "files": {}}',
        '{"format": 1, "files": {"a": 1}}', '{"format": 1, "files": {"a": {"size": 1}}}',
        '{"format": 1, "files": {"a": {"size": -1, "sha256": "' + "0" * 64 + '"}}}',
        '{"format": 1, "files": {"a": {"size": true, "sha256": "' + "0" * 64 + '"}}}',
        '{"format": 1, "files": {"a": {"size": 1, "sha256": "' + "0" * 63 + '"}}}',
        "[" * 100_000,
    ],
)  # fmt: skip
def test_wrong_manifests_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(FormatError, match=r"m/loadstone\.json") as caught:
        parse_manifest(text.encode(), "m/loadstone.json")
    assert "\n" not in str(caught.value)
    folder = write_sharded(tmp_path / "m", model_tensors())
    (folder / "loadstone.json").write_text(text)
    with pytest.raises(FormatError):
        loadstone.open(folder)


def test_manifest_round_trip() -> None:
    manifest = Manifest({"b": FileRecord(1, "0" * 64), "a": FileRecord(0, "f" * 64)})
    again = parse_manifest(manifest.to_json().encode(), "here")
    assert again == manifest
    assert list(json.loads(manifest.to_json())["files"]) == ["a", "b"]
    extra = {**json.loads(manifest.to_json()), "made_by": "a publisher"}
    assert parse_manifest(json.dumps(extra).encode(), "here") == manifest


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "", "a\0b", "\ud800", "a/../../outside"])
def test_a_manifest_reaches_nothing_outside_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("private")
    folder = write_sharded(tmp_path / "m", model_tensors())
    (folder / "loadstone.json").write_text(
        json.dumps({"format": 1, "files": {name: {"size": 7, "sha256": "0" * 64}}})
    )
    with pytest.raises(LocationError) as caught:
        loadstone.open(folder, verify=True)
    assert hashlib.sha256(b"private").hexdigest() not in str(caught.value)
