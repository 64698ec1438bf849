"""``loadstone bench …``: runs a benchmark, shows its table, writes its report."""

import argparse
import time
from pathlib import Path

from loadstone.bench.adapters import adapters as measure_adapters
from loadstone.bench.cold_start import cold_start as measure_cold_start
from loadstone.bench.loader import loader as measure_loader
from loadstone.bench.runner import show, write
from loadstone.bench.schema import Report
from loadstone.bench.transfer import transfer as measure_transfer
from loadstone.commands.common import print_json, settings_of, storage_options_of
from loadstone.settings import parse_size


def cold_start(args: argparse.Namespace) -> int:
    """Measure a model's cold start three ways."""
    report = measure_cold_start(
        args.location,
        prompt=args.prompt,
        runs=args.runs,
        bandwidth=parse_size(args.bandwidth) if args.bandwidth else 0,
        storage_options=storage_options_of(args),
        settings=settings_of(args),
    )
    return _finish(report, args)


def loader(args: argparse.Namespace) -> int:
    """Measure loading from a local disk, beside other loaders."""
    report = measure_loader(
        size=parse_size(args.size),
        runs=args.runs,
        work=Path(args.work or "."),
        keep=args.keep,
        only=args.only,
        settings=settings_of(args),
    )
    return _finish(report, args)


def transfer(args: argparse.Namespace) -> int:
    """Measure transfers from an object store, beside other clients."""
    report = measure_transfer(
        size=parse_size(args.size),
        runs=args.runs,
        work=Path(args.work or "."),
        peers=not args.no_peers,
        only=args.only,
        settings=settings_of(args),
    )
    return _finish(report, args)


def adapters(args: argparse.Namespace) -> int:
    """Measure adapters over one base, beside PEFT."""
    report = measure_adapters(
        size=parse_size(args.size),
        runs=args.runs,
        work=Path(args.work or "."),
        keep=args.keep,
        only=args.only,
        settings=settings_of(args),
    )
    return _finish(report, args)


def _finish(report: Report, args: argparse.Namespace) -> int:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(report.started))
    path = Path(args.out) if args.out else Path("bench/results") / f"{report.benchmark}-{stamp}.json"
    write(report, path)
    if args.json:
        print_json(report.to_json())
    else:
        show(report)
        print(f"written to {path}")
    return 0
