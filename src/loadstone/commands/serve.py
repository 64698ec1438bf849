"""``loadstone serve``."""

import argparse
import sys

from loadstone.commands.common import settings_of, storage_options_of


def _announce(url: str, _engine: object) -> None:
    print(f"loadstone answers at {url}; GET /ready tells how far it is", file=sys.stderr, flush=True)


def serve(args: argparse.Namespace) -> int:
    """Serve a model over HTTP until told to stop."""
    from loadstone.server.run import serve as run_service  # an optional extra

    return run_service(
        args.location,
        adapters=args.adapters,
        host=args.host,
        port=args.port,
        name=args.name,
        storage_options=storage_options_of(args),
        settings=settings_of(args),
        announce=_announce,
    )
