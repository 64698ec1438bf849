"""``loadstone demo``."""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from loadstone.commands.common import settings_of
from loadstone.demo.play import play


def demo(args: argparse.Namespace) -> int:
    """Make a small model and three adapters, serve them, ask them the same question."""
    signal.signal(signal.SIGTERM, _end)
    settings = settings_of(args)
    folder = settings.cache_path or Path.cwd()
    work = Path(args.work) if args.work else folder.parent / "loadstone-demo"
    play(
        work,
        store_url=args.store,
        endpoint_url=args.endpoint_url,
        port=args.port,
        once=args.once,
        settings=settings,
    )
    return 0


def _end(number: int, _frame: FrameType | None) -> None:
    """End as after an error, so that the service ends too, and with the signal's status."""
    sys.exit(128 + number)
