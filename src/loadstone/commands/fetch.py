"""``loadstone prefetch``: brings a checkpoint to this machine before anything needs it.

This path imports neither torch nor rich before its first request is on the way.
"""

import argparse
import json
import sys
import time

from loadstone.commands.common import open_checkpoint
from loadstone.display import follow, human_bytes, human_seconds
from loadstone.loader.order import first_layer
from loadstone.loader.source import Progress

SETTLE_SECONDS = 60.0
"""How long to wait for the disk; what is not on it by then is checked or fetched again after a power cut."""


def prefetch(args: argparse.Namespace) -> int:
    """Fetch until the headers, the first layer, or everything that was asked for is here."""
    began = time.monotonic()
    with open_checkpoint(args) as checkpoint:
        infos = [checkpoint.info(name) for name in checkpoint.match(args.patterns or None)]
        if args.until == "header":
            infos = []
        elif args.until == "first-layer":
            infos = first_layer(infos)
        progress = Progress(0, 0, 0, 0.0)
        if infos:
            everything = not args.patterns and args.until == "all"
            handle = checkpoint.prefetch(None if everything else [info.name for info in infos])
            follow(handle, checkpoint.name, as_json=args.json)
            progress = handle.progress()
        seconds = time.monotonic() - began
        checkpoint.source.settle(SETTLE_SECONDS)
        passing = checkpoint.source.passing()
        if args.json:
            # The same counts as in the progress events: tensors, and the small files beside the weights.
            done = {
                "event": "done",
                "location": checkpoint.name,
                "bytes_total": progress.total,
                "bytes_ready": progress.ready,
                "bytes_moved": progress.moved,
                "seconds": round(seconds, 3),
                "kept": not passing,
            }
            print(json.dumps(done))
        else:
            what = f"{len(infos)} tensors, {human_bytes(sum(info.nbytes for info in infos))}"
            print(f"{checkpoint.name}: {what}, here after {human_seconds(seconds)}", file=sys.stderr)
        if passing:
            print(f"warning: {checkpoint.name} is not kept for other processes: {passing}", file=sys.stderr)
    return 0
