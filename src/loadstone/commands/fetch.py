"""``loadstone prefetch``: brings a checkpoint to this machine before anything needs it.

This path imports neither torch nor rich before its first request is on the way.
"""

import argparse
import json
import sys
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from loadstone.commands.common import open_checkpoint
from loadstone.display import counted, follow, human_bytes, human_seconds
from loadstone.errors import CacheError
from loadstone.loader.order import first_layer
from loadstone.loader.source import Progress

if TYPE_CHECKING:
    from loadstone.loader.checkpoint import Checkpoint

SETTLE_SECONDS = 60.0
"""How long to wait for the disk; what is not on it by then is checked or fetched again after a power cut."""


PART = 3
"""Exit status when other processes find a part of what was asked for, and not all."""


def prefetch(args: argparse.Namespace) -> int:
    """Fetch until the headers, the first layer, or everything that was asked for is here for others too."""
    began = time.monotonic()
    with open_checkpoint(args) as checkpoint:
        infos = [checkpoint.info(name) for name in checkpoint.match(args.patterns or None)]
        if args.until == "first-layer":
            infos = first_layer(infos)
        files = {info.file for info in infos}
        passing = _passing(checkpoint, files)
        if passing and len(passing) == len(files):
            reason = next(iter(passing.values()))
            raise CacheError(
                f"nothing of {checkpoint.name} is kept for other processes: {reason}; name another folder "
                "with --cache, or let each process fetch for itself"
            )
        # What nobody would find afterwards is not worth bringing.
        wanted = [info for info in infos if info.file not in passing and args.until != "header"]
        progress = Progress(0, 0, 0, 0.0)
        if wanted:
            everything = not args.patterns and args.until == "all" and not passing
            names = None if everything else [info.name for info in wanted]
            # Who uses it reads what is cached into memory, in a moment; until then others may need that more.
            handle = checkpoint.prefetch(names, warm=False)
            follow(handle, checkpoint.name, as_json=args.json)
            progress = handle.progress()
        seconds = time.monotonic() - began
        checkpoint.source.settle(SETTLE_SECONDS)
        passing = _passing(checkpoint, files)
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
            what = f"{len(wanted)} tensors, {human_bytes(sum(info.nbytes for info in wanted))}"
            print(f"{checkpoint.name}: {what}, here after {human_seconds(seconds)}", file=sys.stderr)
        if passing:
            file, reason = next(iter(passing.items()))
            count = f"{len(passing)} of {counted(len(files), 'file')}"
            print(f"warning: other processes will not find all of {count}: {file}: {reason}", file=sys.stderr)
    return PART if passing else 0


def _passing(checkpoint: "Checkpoint", files: Collection[str]) -> dict[str, str]:
    """Return the files that other processes would not find in full, and why."""
    return {file: reason for file in sorted(files) if (reason := checkpoint.source.passing([file]))}
