"""``loadstone bench …``: runs a benchmark, shows its table, writes its report."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadstone.bench.adapters import adapters as measure_adapters
from loadstone.bench.cold_start import cold_start as measure_cold_start
from loadstone.bench.loader import loader as measure_loader
from loadstone.bench.plot import check_plot_path, plot
from loadstone.bench.runner import write
from loadstone.bench.schema import Report
from loadstone.bench.tables import show
from loadstone.bench.transfer import transfer as measure_transfer
from loadstone.commands.common import print_json, settings_of, storage_options_of
from loadstone.settings import parse_size


def cold_start(args: argparse.Namespace) -> int:
    """Measure a model's cold start three ways."""
    return _run(
        args,
        measure_cold_start,
        location=args.location,
        prompt=args.prompt,
        bandwidth=parse_size(args.bandwidth) if args.bandwidth else 0,
        storage_options=storage_options_of(args),
    )


def loader(args: argparse.Namespace) -> int:
    """Measure loading from a local disk, beside other loaders."""
    return _run(args, measure_loader, **_pieces(args), keep=args.keep)


def transfer(args: argparse.Namespace) -> int:
    """Measure transfers from an object store, beside other clients."""
    return _run(args, measure_transfer, **_pieces(args), peers=not args.no_peers)


def adapters(args: argparse.Namespace) -> int:
    """Measure adapters over one base, beside PEFT."""
    return _run(args, measure_adapters, **_pieces(args), keep=args.keep)


def _pieces(args: argparse.Namespace) -> dict[str, Any]:
    return {"size": parse_size(args.size), "work": Path(args.work or "."), "only": args.only}


def _run(args: argparse.Namespace, measure: Callable[..., Report], **options: Any) -> int:
    """Measure, show the results, and write them to files."""
    if args.plot:
        check_plot_path(Path(args.plot))
    report = measure(**options, runs=args.runs, settings=settings_of(args))
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(report.started))
    path = Path(args.out) if args.out else Path("bench/results") / f"{report.benchmark}-{stamp}.json"
    write(report, path)
    if args.plot:
        plot(report, Path(args.plot))
    if args.json:
        print_json(report.to_json())
    else:
        show(report)
        print(f"written to {path}{f' and {args.plot}' if args.plot else ''}")
    return 0
