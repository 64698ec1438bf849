"""``loadstone cache …`` and ``loadstone status``: what the node cache holds."""

import argparse
import time

from rich.console import Console
from rich.table import Table

from loadstone.commands.common import print_json, settings_of
from loadstone.display import human_bytes, human_seconds
from loadstone.errors import CacheError, NotFoundError
from loadstone.loader.cache import CacheEntry, NodeCache, Removal
from loadstone.loader.locations import parse_location
from loadstone.settings import Settings, parse_size


def list_entries(args: argparse.Namespace) -> int:
    """List the cached objects: sizes, completeness, last use, who uses them."""
    cache = _cache(settings_of(args))
    entries = cache.entries()
    if args.json:
        print_json({"folder": str(cache.folder), "entries": [_as_json(entry) for entry in entries]})
        return 0
    table = Table("id", "object", "size", "here", "last use", "in use by", box=None, pad_edge=False)
    for entry in entries:
        table.add_row(
            entry.key[:12],
            entry.location,
            human_bytes(entry.size),
            _share(entry),
            f"{human_seconds(max(time.time() - entry.last_use, 0))} ago",
            ", ".join(map(str, entry.pids)) or "-",
        )
    Console(soft_wrap=True).print(table)
    taken = sum(entry.allocated for entry in entries)
    print(f"{len(entries)} objects, {human_bytes(taken)} in {cache.folder}")
    return 0


def trim(args: argparse.Namespace) -> int:
    """Remove the least recently used objects until the cache takes at most the given size."""
    return _report(_cache(settings_of(args)).trim(parse_size(args.size)), args)


def remove(args: argparse.Namespace) -> int:
    """Remove the objects of one location, or one object by its id."""
    removal = _cache(settings_of(args)).remove(args.location)
    if not removal.removed and not removal.in_use:
        raise NotFoundError(f"nothing of {args.location} is cached; `loadstone cache list` shows what is")
    return _report(removal, args)


def status(args: argparse.Namespace) -> int:
    """Show how much of a location is here; the exit status is 1 until all that was begun has arrived."""
    cache = _cache(settings_of(args))
    name = parse_location(args.location).text.rstrip("/")
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
        print(f"{name}: {human_bytes(ready)} of {human_bytes(total)} ({share}%) in {len(entries)} objects")
    else:
        print(f"{name}: nothing of it is here yet")
    return 0 if entries and ready == total else 1


def _cache(settings: Settings) -> NodeCache:
    cache = NodeCache(settings)
    if cache.folder is None:
        raise CacheError(
            cache.problem or "the node cache is switched off (LOADSTONE_CACHE_DIR=none); name a folder"
        )
    return cache


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
    print(f"removed {len(removal.removed)} objects, {human_bytes(freed)}")
    for entry in removal.in_use:
        print(f"kept {entry.location}: in use by {', '.join(map(str, entry.pids)) or 'a process'}")
    return 0
