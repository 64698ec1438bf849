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
