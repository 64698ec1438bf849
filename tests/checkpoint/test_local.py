"""Local files: noticed when they change, few descriptors, forks, huge files, links."""

import json
import os
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.support.checkpoints import model_tensors, write_file, write_sharded

import loadstone
from loadstone.errors import (
    AccessError,
    ChangedError,
    ClosedError,
    FormatError,
    LoadstoneError,
    LoadstoneWarning,
    LocationError,
    NotFoundError,
)
from loadstone.loader.checkpoint import Checkpoint
from loadstone.loader.files.local import LocalBlob
from loadstone.loader.ranges import ByteRange

MIB = 1024 * 1024


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def _replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.rename(path)


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\xff\xff\xff\xff")


def _relink(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    other = path.with_suffix(".other")
    write_file(other, {"w": ("F32", (4, 4)), "v": ("F32", (4,))})
    path.symlink_to(other)


READS: dict[str, Callable[[Checkpoint], object]] = {
    "get": lambda ckpt: ckpt["w"],
    "copy": lambda ckpt: ckpt.copy("w"),
    "raw": lambda ckpt: ckpt.raw("w"),
    "slice": lambda ckpt: ckpt.slice("w")[0],
    "several": lambda ckpt: ckpt.get(["w", "v"]),
    "wait": lambda ckpt: ckpt.wait(),
    "prefetch": lambda ckpt: ckpt.prefetch().wait(),
    "stream": lambda ckpt: list(ckpt.stream()),
    "view": lambda ckpt: ckpt.view("w"),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("change", [_truncate, _grow, _replace, _overwrite, _relink])
def test_a_changed_file_is_an_error_that_names_it(
    tmp_path: Path, read: str, change: Callable[[Path], None]
) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, {"w": ("F32", (4, 4)), "v": ("F32", (4,))})
    with loadstone.open(path) as ckpt:
        READS[read](ckpt)
        change(path)
        with pytest.raises(
            ChangedError, match=r"model\.safetensors .* after it was opened; open the checkpoint"
        ):
            READS[read](ckpt)


def test_a_deleted_file_stays_usable(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, {"w": ("F32", (256, 256))})
    with loadstone.open(path) as ckpt:
        expected = ckpt["w"].clone()
        path.unlink()
        assert torch.equal(ckpt["w"], expected)
        with pytest.raises(NotFoundError):  # a copy is read from the file
            ckpt.copy("w")


def test_what_caches_do_to_files_in_use_is_no_change(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, {"w": ("U8", (8,))})
    with loadstone.open(path) as ckpt:
        before = path.stat().st_ctime_ns
        path.chmod(0o444)
        (tmp_path / "linked").hardlink_to(path)
        os.utime(path, ns=(0, path.stat().st_mtime_ns))  # as if just read
        assert path.stat().st_ctime_ns > before
        assert ckpt["w"].tolist() == ckpt.copy("w").tolist()
        assert ckpt.prefetch().wait(30)


def test_copies_survive_a_cut_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, {"w": ("U8", (3 * MIB,))})
    ckpt = loadstone.open(path, copy=True)
    tensor = ckpt["w"]
    expected = tensor.sum().item()
    os.truncate(path, 100)
    assert tensor.sum().item() == expected
    with pytest.raises(ChangedError):
        ckpt["w"]


def test_two_hundred_shards_with_sixty_four_descriptors(tmp_path: Path) -> None:
    tensors = {f"layers.{number}.weight": torch.full((4,), float(number)) for number in range(200)}
    write_sharded(tmp_path / "m", tensors, shards=200)
    program = (
        "import resource, loadstone\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        f"with loadstone.open({str(tmp_path / 'm')!r}) as ckpt:\n"
        "    for name, tensor in ckpt.items(): assert tensor[0] == int(name.split('.')[1])\n"
        "    ckpt.prefetch().wait()\n"
        "    copies = ckpt.get(list(ckpt), copy=True)\n"
        "    print(len(ckpt.files), len(copies))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("200 200", "")


def test_without_descriptors_views_are_read_and_all_else_says_what_to_do(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m", model_tensors())
    script = f"""
import os, resource
import loadstone, torch
from loadstone.errors import AccessError
ckpt = loadstone.open({str(folder)!r})
assert len(dict(ckpt.stream())) == len(ckpt)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 3,) * 2)
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
assert ckpt["lm_head.weight"].isfinite().all()
assert ckpt.prefetch().wait(30)
for use in (lambda: loadstone.open({str(folder)!r}), lambda: ckpt.copy("lm_head.weight"), ckpt.config):
    try:
        use()
    except AccessError as error:
        assert "ulimit -n" in str(error), error
    else:
        raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, stdin=subprocess.DEVNULL)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    write_sharded(tmp_path / "m", model_tensors(), shards=3)
    with loadstone.open(tmp_path / "m") as ckpt:
        tensors = ckpt.get(list(ckpt))
        links = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        assert len(tensors) == len(ckpt)
        assert not [link for link in links if link.startswith(str(tmp_path))]
        maps = [
            line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".safetensors")
        ]
        assert len(maps) == 3  # one map a file
        assert all(" rw-p " in line for line in maps)


def test_a_forked_child_reads_and_writes_its_own(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, {"w": ("I32", (4,)), "odd": ("U8", (1,)), "u": ("I32", (4,))})
    program = (
        "import os, loadstone\n"
        f"ckpt = loadstone.open({str(path)!r})\n"
        "before = ckpt['w'].tolist()\n"
        "handle = ckpt.prefetch()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    assert handle.done() and handle.wait(5)\n"
        "    handle.cancel()\n"
        "    assert ckpt['w'].tolist() == before and ckpt['u'].numel() == 4\n"
        "    ckpt['w'].zero_()\n"
        "    assert ckpt.prefetch().wait(5) and len(list(ckpt.stream())) == 3\n"
        "    ckpt.close()\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "assert ckpt['w'].tolist() == before and handle.wait(5)\n"
        "print('right')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("right", "")


def test_a_file_larger_than_memory(tmp_path: Path) -> None:
    size, path = 100 * 1024**3, tmp_path / "huge.safetensors"
    entries = {
        "hole": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        "far": {"dtype": "F32", "shape": [4], "data_offsets": [size, size + 16]},
    }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.seek(8 + len(text) + size)
        file.write(struct.pack("<4f", 1, 2, 3, 4))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with loadstone.open(path) as ckpt:
        assert ckpt["far"].tolist() == [1.0, 2.0, 3.0, 4.0]
        assert ckpt["hole"].shape == (size,)
        assert ckpt["hole"][size // 2].item() == 0
        assert ckpt.slice("hole")[-5:].tolist() == [0] * 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


def hub(folder: Path, tensors: dict[str, torch.Tensor], commit: str = "a" * 40) -> Path:
    """Lay out an HF cache's repository; return the snapshot."""
    written = write_sharded(folder / "written", tensors)
    repository = folder / "models--org--name"
    snapshot = repository / "snapshots" / commit
    for part in (snapshot, repository / "blobs", repository / "refs"):
        part.mkdir(parents=True)
    for number, file in enumerate(sorted(written.iterdir())):
        file.rename(repository / "blobs" / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def test_hub_snapshot_and_repository_folder(tmp_path: Path) -> None:
    tensors = model_tensors()
    snapshot = hub(tmp_path, tensors)
    repository = snapshot.parent.parent
    for location in (snapshot, repository):
        with loadstone.open(location) as ckpt:
            assert all(torch.equal(ckpt[name], tensor) for name, tensor in tensors.items())
    (repository / "refs" / "main").unlink()
    with loadstone.open(repository) as ckpt:  # the only snapshot there is
        assert set(ckpt) == set(tensors)
    (repository / "snapshots" / ("b" * 40)).mkdir()
    with pytest.raises(LocationError, match="name one of snapshots/: aaaa"):
        loadstone.open(repository)


def test_dangling_links_name_their_blobs(tmp_path: Path) -> None:
    snapshot = hub(tmp_path, model_tensors())
    shards = sorted(snapshot.glob("*.safetensors"))
    targets = [str(shard.readlink()) for shard in shards]
    for shard in shards:
        shard.resolve().unlink()
    with pytest.raises(NotFoundError) as caught:
        loadstone.open(snapshot)
    assert all(target in str(caught.value) for target in targets)
    (snapshot / "model.safetensors.index.json").resolve().unlink()
    with pytest.raises(LoadstoneError, match=r"index\.json links to .*blobs"):
        loadstone.open(snapshot)


def test_all_missing_shards_are_listed(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m", model_tensors(), shards=4)
    for number in (2, 4):
        (folder / f"model-0000{number}-of-00004.safetensors").unlink()
    with pytest.raises(LoadstoneError, match=r"model-00002-of-00004.*model-00004-of-00004") as caught:
        loadstone.open(folder)
    assert "\n" not in str(caught.value)


def test_wrong_paths(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").mkdir()
    for name, kind in {
        "missing.safetensors": NotFoundError,
        "missing/model": NotFoundError,
        "file/model.safetensors": LocationError,
        "pipe": FormatError,
        "loop": LocationError,
        "x" * 300: LocationError,
        "m": LoadstoneError,
        "m/model.safetensors": LoadstoneError,
    }.items():
        with pytest.raises(kind) as caught:
            loadstone.open(tmp_path / name)
        assert str(tmp_path) in str(caught.value)


def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, {"w": ("F32", (4,))})
    path.chmod(0)
    program = (
        "import os, loadstone\n"
        "read = loadstone.open\n"  # imported while this user may still read the code
        "os.getuid() or os.setuid(65534)\n"
        f"try: read({str(path)!r})\n"
        "except loadstone.LoadstoneError as error: print(type(error).__name__)\n"
    )
    tmp_path.chmod(0o755)
    folder = tmp_path
    while folder != folder.parent:  # the temporary folder may be closed to others
        if not folder.stat().st_mode & 0o001 and folder.owner() == tmp_path.owner():
            folder.chmod(folder.stat().st_mode | 0o011)
        folder = folder.parent
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == AccessError.__name__


def test_reading_checks_the_file_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    blob = LocalBlob(str(path))
    assert blob.read(ByteRange(2, 5)) == b"234"
    assert blob.ready(ByteRange(0, 10))
    assert not blob.ready(ByteRange(0, 11))
    assert blob.version == LocalBlob(str(path)).version
    os.truncate(path, 4)
    with pytest.raises(ChangedError, match="from 10 to 4 bytes"):
        blob.read(ByteRange(2, 5))


def test_a_link_to_itself_beside_the_weights_is_no_obstacle(tmp_path: Path) -> None:
    tensors = model_tensors()
    folder = write_sharded(tmp_path / "m", tensors)
    (folder / "loop").symlink_to("loop")
    with loadstone.open(folder) as ckpt:
        assert set(ckpt) == set(tensors)


def test_what_is_suspect_is_a_warning(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m", model_tensors())
    write_file(folder / "stale.safetensors", {"old": ("F32", (4,))})
    with pytest.warns(LoadstoneWarning, match=r"stale\.safetensors") as caught:
        loadstone.open(folder).close()
    assert [Path(one.filename).name for one in caught] == [Path(__file__).name]


def test_many_threads_read_one_checkpoint(tmp_path: Path) -> None:
    tensors = {f"layers.{n}.weight": torch.full((64, 512), float(n)) for n in range(24)}
    folder = write_sharded(tmp_path / "m", tensors, shards=6)
    barrier = threading.Barrier(8)
    wrong: list[str] = []

    def read(seed: int) -> None:
        barrier.wait(30)
        names = list(tensors)[seed:] + list(tensors)[:seed]
        handle = ckpt.prefetch(names[:4])
        for name in names:
            same = [torch.equal(ckpt[name], tensors[name]), torch.equal(ckpt.copy(name), tensors[name])]
            same.append(
                torch.equal(ckpt.slice(name)[seed : seed + 9, ::3], tensors[name][seed : seed + 9, ::3])
            )
            wrong.extend([name] * (3 - sum(same)))
        wrong.extend(name for name, tensor in ckpt.stream() if not torch.equal(tensor, tensors[name]))
        handle.cancel()

    with loadstone.open(folder) as ckpt, ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))
    assert wrong == []


def test_closing_while_others_read_gives_values_or_an_error(tmp_path: Path) -> None:
    tensors = {f"layers.{n}.weight": torch.full((256, 256), float(n)) for n in range(16)}
    folder = write_sharded(tmp_path / "m", tensors, shards=4)
    for _ in range(5):
        ckpt = loadstone.open(folder)
        barrier = threading.Barrier(5)

        def read(names: list[str], ckpt: Checkpoint = ckpt, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait(30)
            try:
                return all(torch.equal(ckpt[name], tensors[name]) for name in names * 20)
            except ClosedError:
                return True

        with ThreadPoolExecutor(4) as pool:
            results = [pool.submit(read, list(tensors)) for _ in range(4)]
            barrier.wait(30)
            ckpt.close()
            assert all(result.result(30) for result in results)
