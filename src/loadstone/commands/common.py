"""What several subcommands share."""

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from loadstone.settings import Settings

if TYPE_CHECKING:
    from loadstone.loader.checkpoint import Checkpoint


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the environment's settings, with what the command line says on top."""
    settings = Settings.from_env()
    if getattr(args, "cache", None):
        settings = dataclasses.replace(settings, cache_dir=args.cache)
    if getattr(args, "device", None) is not None:
        settings = dataclasses.replace(settings, device=args.device)
    return settings


def storage_options_of(args: argparse.Namespace) -> dict[str, object]:
    """Return the fsspec storage options that the command line asks for."""
    options: dict[str, object] = {}
    if getattr(args, "endpoint_url", None):
        options["endpoint_url"] = args.endpoint_url
    if getattr(args, "anonymous", False):
        options["anon"] = True
    return options


def open_checkpoint(args: argparse.Namespace) -> "Checkpoint":
    """Open the checkpoint that the command line names."""
    import loadstone  # the front door imports this package's parent

    return loadstone.open(
        args.location,
        variant=args.variant,
        storage_options=storage_options_of(args),
        settings=settings_of(args),
    )


def print_json(value: object) -> None:
    """Print ``value`` as indented JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))
