"""A served folder of random files, and the processes of `cache_worker` that read it."""

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from loadstone.fileserver import FileServer, Hook

ROOT = Path(__file__).parents[2]


class Counting(Hook):
    """Counts sent bytes by file, and slows them down."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.pause = 0.0
        self._lock = threading.Lock()

    def sending(self, path: str, offset: int, nbytes: int) -> None:
        with self._lock:
            self.sent[path.strip("/")] += nbytes
        time.sleep(self.pause)


class Served:
    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        self.folder = folder
        self.hook = Counting()
        folder.mkdir()
        for number, (name, size) in enumerate(sizes.items()):
            (folder / name).write_bytes(random.Random(number).randbytes(size))
        self.server = FileServer(folder, hook=self.hook)

    def start(
        self, mode: str, cache: Path, *numbers: int, within: Sequence[str] = ()
    ) -> "subprocess.Popen[str]":
        command = [*within, sys.executable, "-m", "tests.support.cache_worker", mode, self.server.url]
        return subprocess.Popen(
            [*command, str(self.folder), str(cache), *map(str, numbers)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, mode: str, cache: Path, *numbers: int, within: Sequence[str] = ()) -> str:
        process = self.start(mode, cache, *numbers, within=within)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        return output
