"""``loadstone run LOCATION -- CMD…``: the checkpoint is fetched while CMD starts.

Ownership: the main thread starts CMD, waits for it and passes signals on; one thread of its own opens the
checkpoint and starts the prefetch, whose workers belong to the loader. CMD is started at once, never after
the opening. Signals: those that the terminal sends reach CMD directly, since both are in one process group;
those that somebody sends to this process are passed on. As process 1 of a container it reaps orphans too.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

from loadstone.commands.common import open_checkpoint, settings_of
from loadstone.errors import CommandError, LoadstoneError
from loadstone.loader.node.arena import Arena
from loadstone.loader.node.cache import NodeCache

if TYPE_CHECKING:
    from loadstone.loader.checkpoint import Checkpoint

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGQUIT)
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)


def run(args: argparse.Namespace) -> int:
    """Start CMD and fetch for it; return CMD's exit status (128 + the signal's number when one ended it)."""
    settings = settings_of(args)
    cache = NodeCache(settings)
    arena = None if cache.folder else Arena()
    if arena is not None:
        # No folder can be filled: CMD inherits the memory that the bytes are kept in instead.
        args.cache = cache.handed_over(arena)
        settings = settings_of(args)
    fetching = _Fetching(args)
    fetching.start()
    try:
        child = _start(args.command, settings.environment(), [arena.fd] if arena else [])
        fetching.stop_on_failure(child)
        status = _wait(child)
    finally:
        fetching.close()
    if fetching.error is not None:
        print(f"error: {fetching.error}", file=sys.stderr)
        return 1
    return status if status >= 0 else 128 - status


def _start(
    command: list[str], environment: dict[str, str], descriptors: list[int]
) -> "subprocess.Popen[bytes]":
    signals = _Signals()
    signals.install()
    try:
        child = subprocess.Popen(command, env=environment, pass_fds=descriptors)
    except FileNotFoundError:
        raise CommandError(
            f"{command[0]!r} is not a command on this machine; check its spelling and PATH", 127
        ) from None
    except PermissionError:
        raise CommandError(f"{command[0]!r} cannot be executed; check its permissions", 126) from None
    except OSError as error:
        raise CommandError(
            f"{command[0]!r} cannot be executed: {error.strerror}; check the command", 126
        ) from None
    signals.forward_to(child)
    return child


class _Signals:
    """Passes this process's signals on to CMD, those that come before CMD exists too."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    def install(self) -> None:
        """Take the signals. By handlers, not SIG_IGN: an ignored signal would stay ignored in CMD."""
        for number in _FORWARDED:
            signal.signal(number, self._take)

    def forward_to(self, child: "subprocess.Popen[bytes]") -> None:
        """Send ``child`` what came so far, and all that comes."""
        self._child = child
        while self._early:
            _send(child, self._early.pop(0))

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number in _FROM_TERMINAL and _in_foreground():
            return  # the terminal sent it to the whole process group: CMD has it already
        if self._child is None:
            self._early.append(number)
        else:
            _send(self._child, number)


def _send(child: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal, and leave it to `_wait` to find out that CMD ended: an orphan may outlive it."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(child.pid, number)


def _in_foreground() -> bool:
    """Say whether the terminal's own signals come here, wherever standard input comes from."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _wait(child: "subprocess.Popen[bytes]") -> int:
    if os.getpid() != 1:
        return child.wait()
    while child.returncode is None:
        pid, status = os.waitpid(-1, 0)
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode


class _Fetching(threading.Thread):
    """Opens the checkpoint and prefetches all of it, beside CMD."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(name="loadstone-run", daemon=True)
        self.error: LoadstoneError | None = None
        self._args = args
        self._lock = threading.Lock()
        self._closed = False
        self._checkpoint: Checkpoint | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Open and prefetch. A location that cannot be opened ends CMD: it would only fail later."""
        try:
            checkpoint = open_checkpoint(self._args)
            with self._lock:
                self._checkpoint = checkpoint
                if self._closed:
                    checkpoint.close()
                    return
                passing = checkpoint.source.passing()
                if passing:
                    print(f"warning: CMD fetches alone: {passing}", file=sys.stderr)
                    return
                prefetch = checkpoint.prefetch()
        except LoadstoneError as error:
            self._fail(error)
            return
        except Exception:
            if self._closed:  # CMD has ended, and with the interpreter ending too, imports fail midway
                return
            raise
        try:
            prefetch.wait()
        except LoadstoneError as error:
            # CMD fetches for itself what is missing, and says so itself when it cannot.
            if not self._closed:
                print(f"warning: the prefetch stopped: {error}", file=sys.stderr)

    def stop_on_failure(self, child: "subprocess.Popen[bytes]") -> None:
        """Let a failure to open end ``child``."""
        with self._lock:
            self._child = child
            failed = self.error is not None
        if failed:
            _send(child, signal.SIGTERM)

    def _fail(self, error: LoadstoneError) -> None:
        with self._lock:
            if self._closed:
                return
            self.error = error
            child = self._child
        if child is not None:
            _send(child, signal.SIGTERM)

    def close(self) -> None:
        """End the prefetch; nothing of it runs when this returns."""
        with self._lock:
            self._closed = True
            checkpoint = self._checkpoint
        if checkpoint is not None:
            checkpoint.close()
