"""What the kernel says about this process: its memory, and the bytes it had read from disks."""

from pathlib import Path


def status_bytes(field: str) -> int:
    """Return one of ``/proc/self/status``'s sizes, such as ``RssAnon`` or ``VmHWM``."""
    return _field(Path("/proc/self/status"), field) * 1024


def proportional_bytes() -> int:
    """Return the memory this process holds, each shared page divided by the number of its holders (PSS)."""
    return _field(Path("/proc/self/smaps_rollup"), "Pss") * 1024


def disk_read_bytes() -> int:
    """Return the bytes that this process has made the kernel read from disks; page cache hits are none."""
    return _field(Path("/proc/self/io"), "read_bytes")


def _field(path: Path, field: str) -> int:
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return next(int(rest.split()[0]) for name, _, rest in lines if name == field)


def mapped_bytes(path: Path) -> int:
    """Return the memory that this process's maps of one file take, private copies of its pages included."""
    found, counts = 0, False
    # Line by line: the whole text would be megabytes, which would be measured too.
    with Path("/proc/self/smaps").open() as lines:
        for line in lines:
            field = line.partition(" ")[0]
            if not field.endswith(":"):
                counts = line.rstrip("\n").endswith(str(path))
            elif counts and field == "Rss:":
                found += int(line.split()[1]) * 1024
    return found
