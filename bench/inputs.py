"""The folder of a benchmark's inputs: written by a process of its own, perhaps kept for later runs."""

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from loadstone.bench.runner import run_process
from loadstone.errors import BenchError

_MARK = ".loadstone-bench-"  # a kept folder without it was not written to its end


@contextmanager
def written(benchmark: str, size: int, *, work: Path, keep: bool, env: Mapping[str, str]) -> Iterator[Path]:
    """Give the folder that ``loadstone.bench.<benchmark>_inputs`` wrote, a former run's if that kept it.

    Raises
    ------
    BenchError
        ``work`` is no folder, or the inputs could not be written.
    """
    if not work.is_dir():
        raise BenchError(f"{work} is no folder; make it, or name another with --work")
    kept = (work / f"loadstone-bench-{benchmark}-{size}").resolve()
    if (kept / f"{_MARK}{benchmark}").exists():
        yield kept
        return
    folder = Path(tempfile.mkdtemp(prefix="loadstone-bench-", dir=work)).resolve()
    try:
        print(f"writing the inputs to {folder}", file=sys.stderr, flush=True)
        writer = f"loadstone.bench.{benchmark}_inputs"
        run_process([sys.executable, "-m", writer, str(folder), str(size)], env)
        if keep:
            (folder / f"{_MARK}{benchmark}").touch()
            folder = folder.rename(kept)
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
