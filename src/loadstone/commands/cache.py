"""``loadstone cache …`` and ``loadstone status``: what the node cache holds."""

import argparse
import re
import time
from pathlib import Path

from loadstone.commands.common import open_checkpoint, print_json, settings_of
from loadstone.display import counted, human_bytes, human_seconds, print_columns
from loadstone.errors import CacheError, NotFoundError
from loadstone.loader.locations import parse_location
from loadstone.loader.node.cache import CacheEntry, NodeCache, Removal
from loadstone.settings import Settings, parse_size

_ID = re.compile(r"[0-9a-f]{8,64}")


def list_entries(args: argparse.Namespace) -> int:
    """List the cached objects: sizes, completeness, last use, who uses them."""
    cache = _cache(settings_of(args))
    entries = cache.entries()
    if args.json:
        print_json({"folder": str(_folder(cache)), "entries": [_as_json(entry) for entry in entries]})
        return 0
    if entries:
        # The column that may be long comes last, so that the others stay in line when a terminal wraps it.
        print_columns(("id", "size", "here", "last use", "in use by", "object"), [_row(e) for e in entries])
    taken = sum(entry.allocated for entry in entries)
    print(f"{counted(len(entries), 'object')}, {human_bytes(taken)} in {_folder(cache)}")
    return 0


def _row(entry: CacheEntry) -> tuple[str, ...]:
    return (
        entry.key[:12],
        human_bytes(entry.size),
        _share(entry),
        f"{human_seconds(max(time.time() - entry.last_use, 0))} ago",
        ", ".join(map(str, entry.pids)) or "-",
        entry.location,
    )


def trim(args: argparse.Namespace) -> int:
    """Remove the least recently used objects until the cache takes at most the given size."""
    return _report(_writable(settings_of(args)).trim(parse_size(args.size)), args)


def remove(args: argparse.Namespace) -> int:
    """Remove the objects of one location, or one object by its id."""
    which = args.location if _ID.fullmatch(args.location) else parse_location(args.location).text
    removal = _writable(settings_of(args)).remove(which)
    if not removal.removed and not removal.in_use:
        raise NotFoundError(f"nothing of {which} is cached; `loadstone cache list` shows what is")
    return _report(removal, args)


def status(args: argparse.Namespace) -> int:
    """Show how much of a location is here; the exit status is 1 until all that was begun has arrived."""
    location = parse_location(args.location)
    if location.is_local:
        return _local_status(args)
    cache = _cache(settings_of(args))
    name = location.text.rstrip("/")
    entries = [e for e in cache.entries() if e.location == name or e.location.startswith(f"{name}/")]
    ready, total = sum(e.stored for e in entries), sum(e.size for e in entries)
    if args.json:
        print_json(
            {
                "location": name,
                "objects": len(entries),
                "bytes_ready": ready,
                "bytes_total": total,
                "complete": bool(entries) and ready == total,
            }
        )
    elif entries:
        share = int(100 * ready / total) if total else 100
        count = counted(len(entries), "object")
        print(f"{name}: {human_bytes(ready)} of {human_bytes(total)} ({share}%) in {count}")
    else:
        print(f"{name}: nothing of it is here yet")
    return 0 if entries and ready == total else 1


def _local_status(args: argparse.Namespace) -> int:
    with open_checkpoint(args) as checkpoint:
        name, nbytes = checkpoint.name, checkpoint.nbytes
        files = {checkpoint.info(tensor).file for tensor in checkpoint}
    if args.json:
        print_json(
            {
                "location": name,
                "objects": len(files),
                "bytes_ready": nbytes,
                "bytes_total": nbytes,
                "complete": True,
            }
        )
    else:
        print(f"{name}: {human_bytes(nbytes)}, on this machine already; it needs no cache")
    return 0


def _cache(settings: Settings) -> NodeCache:
    cache = NodeCache(settings, warn=False)
    if _folder(cache) is None:
        raise CacheError(
            cache.problem or "the node cache is switched off (LOADSTONE_CACHE_DIR=none); name a folder"
        )
    return cache


def _writable(settings: Settings) -> NodeCache:
    cache = _cache(settings)
    if cache.folder is None:
        raise CacheError(f"the node cache {_folder(cache)} is read-only here; do it where it can be written")
    return cache


def _folder(cache: NodeCache) -> Path | None:
    return cache.sealed.folder if cache.sealed is not None else cache.folder


def _share(entry: CacheEntry) -> str:
    return "all" if entry.stored == entry.size else f"{int(100 * entry.stored / entry.size)}%"


def _as_json(entry: CacheEntry) -> dict[str, object]:
    return {
        "id": entry.key,
        "location": entry.location,
        "size": entry.size,
        "stored": entry.stored,
        "allocated": entry.allocated,
        "sealed": entry.sealed,
        "last_use": entry.last_use,
        "pids": list(entry.pids),
    }


def _report(removal: Removal, args: argparse.Namespace) -> int:
    if args.json:
        print_json(
            {
                "removed": [_as_json(entry) for entry in removal.removed],
                "in_use": [_as_json(entry) for entry in removal.in_use],
            }
        )
        return 0
    freed = sum(entry.allocated for entry in removal.removed)
    print(f"removed {counted(len(removal.removed), 'object')}, {human_bytes(freed)}")
    for entry in removal.in_use:
        print(f"kept {entry.location}: in use by {', '.join(map(str, entry.pids)) or 'a process'}")
    return 0
