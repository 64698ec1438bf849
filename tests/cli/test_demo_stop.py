"""A demo that is told to end takes its service with it."""

import signal
import subprocess
import sys
import time

# Stands in for the playing: a process of its own that only the ``finally`` ends, as the service is.
PLAY = """
import argparse, subprocess, time
from loadstone.commands import demo

def play(*args, **kwargs):
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        print(child.pid, flush=True)
        time.sleep(60)
    finally:
        child.terminate()
        child.wait()

demo.play = play
demo.demo(argparse.Namespace(work="w", store=None, endpoint_url=None, port=0, once=False))
"""


def test_a_terminated_demo_leaves_no_service() -> None:
    with subprocess.Popen([sys.executable, "-c", PLAY], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    assert time.monotonic() - began < 30
    assert subprocess.run(["kill", "-0", str(child)], capture_output=True, check=False).returncode != 0
