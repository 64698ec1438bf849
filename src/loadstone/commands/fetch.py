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
        nbytes = sum(info.nbytes for info in infos)
        if infos:
            everything = not args.patterns and args.until == "all"
            names = None if everything else [info.name for info in infos]
            follow(checkpoint.prefetch(names), checkpoint.name, as_json=args.json)
        seconds = time.monotonic() - began
        checkpoint.source.settle(SETTLE_SECONDS)
        if args.json:
            done = {
                "event": "done",
                "location": checkpoint.name,
                "bytes_ready": nbytes,
                "seconds": round(seconds, 3),
            }
            print(json.dumps(done))
        else:
            what = f"{len(infos)} tensors, {human_bytes(nbytes)}"
            print(f"{checkpoint.name}: {what}, here after {human_seconds(seconds)}", file=sys.stderr)
    return 0
