"""How much memory this process may still use, as its cgroups see it.

Container limits are what ends a process, so they are read at every level above it, for cgroup v1 and v2.
Page cache that can be dropped at once (file pages that are neither dirty nor shared memory) is not counted
as used; tmpfs, memfd and dirty pages are. Everything is read below a root folder, so that tests can lay out
their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number of bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes.

    Attributes
    ----------
    limit : int
        The least of the machine's memory and every limit above this process.
    available : int
        What can still be used before the first of them is reached.
    """

    limit: int
    available: int


@dataclass(frozen=True, slots=True)
class _Names:
    """How one cgroup version spells its files and counters."""

    limits: tuple[str, ...]
    usage: str
    prefix: str


_V1 = _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
_V2 = _Names(("memory.max", "memory.high"), "memory.current", "")


def available(root: Path = _ROOT) -> int:
    """Return how many bytes this process can still use."""
    return read(root).available


def limit(root: Path = _ROOT) -> int:
    """Return how many bytes this process may use in all."""
    return read(root).limit


def read(root: Path = _ROOT) -> Memory:
    """Read the machine's memory and every cgroup above this process.

    Parameters
    ----------
    root : Path
        Where ``proc`` and the cgroup mounts are found.
    """
    machine = _counters(root / "proc/meminfo", unit=1024)
    total = machine.get("MemTotal:", 0)
    least = Memory(total, machine.get("MemAvailable:", total))
    for folder, names in _groups(root):
        for name in names.limits:
            bound = _number(folder / name)
            if bound is None or bound >= _UNLIMITED:
                continue
            left = bound - ((_number(folder / names.usage) or 0) - _droppable(folder, names))
            least = Memory(min(least.limit, bound), max(0, min(least.available, left)))
    return least


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield each memory cgroup folder from this process's own upwards."""
    paths = _own_paths(root)
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            names, path = _V2, paths.get("")
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            names, path = _V1, paths.get("memory")
        else:
            continue
        if path is None:
            continue
        top = root / fields[4].lstrip("/")
        inside = _below(path, fields[3])
        yield from ((top / part, names) for part in (inside, *inside.parents))


def _own_paths(root: Path) -> dict[str, str]:
    """Return this process's path in the v2 hierarchy (key ``""``) and in each v1 controller's."""
    paths: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _below(path: str, mount_root: str) -> PurePosixPath:
    """Return where ``path`` lies below a mount of ``mount_root``; the mount itself when it lies outside."""
    try:
        inside = PurePosixPath(path).relative_to(mount_root)
    except ValueError:
        return PurePosixPath()
    return PurePosixPath() if ".." in inside.parts else inside


def _droppable(folder: Path, names: _Names) -> int:
    stat = _counters(folder / "memory.stat")
    at = names.prefix
    held = stat.get(f"{at}dirty", stat.get("file_dirty", 0)) + stat.get(
        f"{at}writeback", stat.get("file_writeback", 0)
    )
    return max(0, stat.get(f"{at}active_file", 0) + stat.get(f"{at}inactive_file", 0) - held)


def _counters(path: Path, unit: int = 1) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1 and row[1].isdigit()}


def _number(path: Path) -> int | None:
    """Return the number in a file; ``None`` for ``max`` and for what cannot be read."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
