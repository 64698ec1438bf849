"""Several real processes and one cache folder, over a real web server that counts what it sends."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cache_worker import audit
from tests.support.served_folder import Served

from loadstone.loader.ranges import BLOCK

KILLS = int(os.environ.get("LOADSTONE_TEST_KILLS", "25"))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    sizes = {f"adapter-{number}": 3 * BLOCK + number for number in range(8)}
    made = Served(tmp_path / "served", {"base": 60 * BLOCK + 1000, **sizes})
    yield made
    made.server.close()


def test_four_processes_move_each_byte_once(served: Served, tmp_path: Path) -> None:
    served.hook.pause = 0.002
    processes = [served.start("read", tmp_path / "cache", seed) for seed in range(4)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], outputs
    assert audit(tmp_path / "cache", served.folder) == []
    assert served.hook.sent == {path.name: path.stat().st_size for path in served.folder.iterdir()}


def test_readers_outlive_a_fetching_process_killed_at_any_moment(served: Served, tmp_path: Path) -> None:
    served.hook.pause = 0.001
    served.run("kill", tmp_path / "cache", KILLS, 1)


def test_a_stopped_holder_does_not_stop_others(served: Served, tmp_path: Path) -> None:
    served.hook.pause = 0.01
    served.run("stop", tmp_path / "cache")


def test_a_fork_while_bytes_arrive(served: Served, tmp_path: Path) -> None:
    served.hook.pause = 0.005
    served.run("fork", tmp_path / "cache")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_fills_up_at_any_moment(kind: str, served: Served, tmp_path: Path) -> None:
    served.hook.pause = 0.02
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(path.stat().st_size for path in served.folder.iterdir()) * 3 // 2
    served.run("full", disk / "cache", 8, 2, within=mounted(kind, disk, size))
    assert list(disk.iterdir()) == []


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("seed", range(2))
def test_a_disk_that_becomes_read_only_at_any_moment(seed: int, served: Served, tmp_path: Path) -> None:
    served.hook.pause = 0.2
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(path.stat().st_size for path in served.folder.iterdir()) * 3
    served.run("read-only", disk / "cache", seed, within=mounted("ext4", disk, size))


def mounted(kind: str, disk: Path, size: int) -> list[str]:
    """Return what runs a command with a file system of its own at ``disk``, gone with the command."""
    if kind == "tmpfs":
        mount = f"mount -t tmpfs -o size={size},mode=0700 none {disk}"
        return ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    image = disk.with_name("disk.img")
    with image.open("wb") as file:
        file.truncate(size + 8 * 1024 * 1024)  # the rest is for the journal and the tables
    make = ["mkfs.ext4", "-q", "-m", "0", str(image)]
    probe = f"mount -o loop {image} {disk} && chmod 700 {disk}"
    try:
        subprocess.run(make, check=True, capture_output=True)
        subprocess.run(["unshare", "-m", "sh", "-c", probe], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no ext4 image can be mounted here: {error}")
    return ["unshare", "-m", "sh", "-c", f'{probe} && exec "$@"', "sh"]
