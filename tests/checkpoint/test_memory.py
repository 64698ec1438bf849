"""Memory limits as cgroups of both versions state them, at every level."""

from pathlib import Path

import pytest

from loadstone.loader.files import memory

GIB = 1024**3
MEMINFO = (
    f"MemTotal: {32 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {30 * GIB // 1024} kB\nHugePages: 0\n"
)


class Machine:
    """Lays out ``/proc`` and cgroup folders below a root."""

    def __init__(self, root: Path, cgroup: str, mounts: str) -> None:
        self.root = root
        self.put("proc/meminfo", MEMINFO)
        self.put("proc/self/cgroup", cgroup)
        self.put("proc/self/mountinfo", mounts)

    def put(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))

    def v2(self, folder: str, maximum: object, current: int, stat: str = "", high: object = "max") -> None:
        at = f"sys/fs/cgroup/{folder}".rstrip("/")
        for name, value in (("max", maximum), ("high", high), ("current", current), ("stat", stat)):
            self.put(f"{at}/memory.{name}", f"{value}\n")

    def v1(self, folder: str, limit: int, usage: int, stat: str = "") -> None:
        at = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
        for name, value in (("limit_in_bytes", limit), ("usage_in_bytes", usage), ("stat", stat)):
            self.put(f"{at}/memory.{name}", f"{value}\n")


V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
V1_MOUNT = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "35 31 0:31 {root} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
    "36 31 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
)


def test_no_limits_give_the_machine(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/user\n", V2_MOUNT)
    machine.v2("user", "max", 5 * GIB)
    assert memory.read(tmp_path) == memory.Memory(32 * GIB, 30 * GIB)


def test_v2_every_parent_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/a/b/c\n", V2_MOUNT)
    machine.v2("a", 8 * GIB, 7 * GIB)
    machine.v2("a/b", 4 * GIB, 1 * GIB)
    machine.v2("a/b/c", "max", 1 * GIB)
    assert memory.read(tmp_path) == memory.Memory(4 * GIB, 1 * GIB)  # b bounds the whole, a what is left


def test_v2_high_counts_as_a_limit(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/a\n", V2_MOUNT)
    machine.v2("a", 8 * GIB, 1 * GIB, high=2 * GIB)
    assert memory.read(tmp_path) == memory.Memory(2 * GIB, 1 * GIB)


def test_clean_cache_is_free_and_dirty_or_shared_is_not(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/a\n", V2_MOUNT)
    stat = f"anon {GIB}\nfile {5 * GIB}\nshmem {GIB}\nactive_file {GIB}\ninactive_file {3 * GIB}\n"
    machine.v2("a", 8 * GIB, 6 * GIB, stat + f"file_dirty {GIB}\nfile_writeback 0\n")
    assert memory.available(tmp_path) == 5 * GIB


def test_used_up_is_zero_not_negative(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/a\n", V2_MOUNT)
    machine.v2("a", GIB, 2 * GIB)
    assert memory.available(tmp_path) == 0


@pytest.mark.parametrize("mounted", ["/", "/docker/abc"])
def test_v1_also_where_only_the_container_is_mounted(tmp_path: Path, mounted: str) -> None:
    machine = Machine(tmp_path, "4:cpu:/x\n3:memory:/docker/abc/job\n", V1_MOUNT.format(root=mounted))
    inside = "" if mounted != "/" else "docker/abc/"
    stat = f"cache 1\nactive_file 7\ntotal_active_file {GIB}\ntotal_inactive_file 0\ntotal_dirty 0\n"
    machine.v1(f"{inside}job", 1 << 63, 2 * GIB)
    machine.v1(inside, 4 * GIB, 3 * GIB, stat)
    assert memory.read(tmp_path) == memory.Memory(4 * GIB, 2 * GIB)


def test_v1_and_v2_side_by_side(tmp_path: Path) -> None:
    mounts = V1_MOUNT.format(root="/") + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    machine = Machine(tmp_path, "3:memory:/job\n0::/\n", mounts)
    machine.v1("job", 2 * GIB, 0)
    machine.put("sys/fs/cgroup/unified/cgroup.procs", "1")
    assert memory.limit(tmp_path) == 2 * GIB


def test_a_path_outside_the_mount_falls_back_to_the_mount(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/../../other\n", V2_MOUNT)
    machine.v2("", 3 * GIB, GIB)
    assert memory.read(tmp_path) == memory.Memory(3 * GIB, 2 * GIB)


def test_garbage_is_not_fatal(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "nonsense\n0::/a\n", "x - y\n" + V2_MOUNT)
    machine.v2("a", "many", 0)
    assert memory.limit(tmp_path) == 32 * GIB
    assert memory.read(tmp_path / "nothing") == memory.Memory(0, 0)


def test_this_machine() -> None:
    here = memory.read()
    assert 0 < here.available <= here.limit
