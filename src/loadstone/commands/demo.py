"""``loadstone demo``."""

import argparse
from pathlib import Path

from loadstone.commands.common import settings_of
from loadstone.demo.play import play


def demo(args: argparse.Namespace) -> int:
    """Make a small model and three adapters, serve them, ask them the same question."""
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
