"""A fork while another thread opens its first checkpoint: Python's locks of modules do not hang the child."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.support.checkpoints import model_tensors, write_sharded

from loadstone import imports
from loadstone.fileserver import FileServer
from loadstone.imports import Importing

_SCRIPT = """
import os, signal, sys, threading, time
import loadstone

found = threading.Event()

class Slow:
    def find_spec(self, name, *_):
        if name == sys.argv[2]:
            found.set()
            time.sleep(0.3)

def read():
    with loadstone.open(sys.argv[1], cache=None) as checkpoint:
        return checkpoint[next(iter(checkpoint))]

sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=read)
thread.start()
assert found.wait(20)
child = os.fork()
if child == 0:
    signal.alarm(20)
    read()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
thread.join()
"""


@pytest.mark.parametrize(
    "module",
    [
        "loadstone.loader.checkpoint",
        "loadstone.loader.node.locks",
        "loadstone.loader.node.remote",
        "loadstone.loader.stores.web",
        "loadstone.loader.tensors.reading",
    ],
)
def test_a_child_forked_while_a_module_is_imported_opens_and_reads(module: str, tmp_path: Path) -> None:
    with FileServer(write_sharded(tmp_path / "m", model_tensors(), shards=2)) as server:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, server.url, module],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_fork_waits_for_the_imports_of_other_threads_and_for_no_own() -> None:
    importing, held = Importing(), threading.Event()

    def fork() -> None:
        with importing, importing:
            importing._hold()
            held.set()
            importing._let_go()

    thread = threading.Thread(target=fork)
    with importing:
        thread.start()
        assert not held.wait(0.1)
        with importing:
            pass
        assert not held.wait(0.1)
    assert held.wait(20)
    thread.join()
    assert importing._depths == {}


def test_a_fork_waits_no_longer_than_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "_PATIENCE", 0.01)
    importing = Importing()
    guard = threading.RLock()
    importing.over_forks(guard)

    def fork() -> None:
        importing._hold()
        importing._let_go()

    with importing:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    assert guard.acquire(blocking=False)
