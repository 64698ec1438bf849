"""``loadstone inspect`` and ``loadstone verify``."""

import argparse
import sys
from collections import Counter
from dataclasses import asdict

from loadstone.commands.common import open_checkpoint, print_json
from loadstone.display import human_bytes, print_columns
from loadstone.loader.checkpoint import Checkpoint
from loadstone.loader.format.header import TensorInfo
from loadstone.loader.layout.manifest import MANIFEST

UNCHECKED = 3
"""Exit status of ``verify`` when a file could not be checked."""


def inspect(args: argparse.Namespace) -> int:
    """Show what a checkpoint holds, from its headers alone."""
    with open_checkpoint(args) as checkpoint:
        infos = [checkpoint.info(name) for name in checkpoint]
        shown = [checkpoint.info(name) for name in checkpoint.match(args.tensors)] if args.tensors else []
        if args.json:
            print_json(
                {**_summary(checkpoint, infos), "tensors": [_as_json(info) for info in shown or infos]}
            )
            return 0
        _print_summary(checkpoint, infos)
        if args.tensors:
            _print_tensors(shown)
    return 0


def _summary(checkpoint: Checkpoint, infos: list[TensorInfo]) -> dict[str, object]:
    files = Counter[str]()
    dtypes = Counter[str]()
    for info in infos:
        files[info.file] += info.nbytes
        dtypes[info.dtype] += info.nbytes
    return {
        "location": checkpoint.name,
        "tensor_count": len(infos),
        "bytes": sum(info.nbytes for info in infos),
        "files": dict(files),
        "dtypes": dict(dtypes),
        "tied": dict(checkpoint.tied),
        "fingerprint": checkpoint.fingerprint(),
        "metadata": dict(checkpoint.metadata),
    }


def _as_json(info: TensorInfo) -> dict[str, object]:
    return {
        "name": info.name,
        "dtype": info.dtype,
        "shape": list(info.shape),
        "bytes": info.nbytes,
        "file": info.file,
        "offset": info.offset,
    }


def _print_summary(checkpoint: Checkpoint, infos: list[TensorInfo]) -> None:
    summary = _summary(checkpoint, infos)
    print(checkpoint.name)
    print(f"  {len(infos)} tensors, {human_bytes(sum(info.nbytes for info in infos))}")
    dtypes, files = summary["dtypes"], summary["files"]
    assert isinstance(dtypes, dict)
    assert isinstance(files, dict)
    print("  dtypes: " + ", ".join(f"{name} {human_bytes(count)}" for name, count in dtypes.items()))
    for name, count in files.items():
        print(f"  file: {name} {human_bytes(count)}")
    for alias, name in checkpoint.tied.items():
        print(f"  tied: {alias} is {name}")
    print(f"  fingerprint: {summary['fingerprint']}")


def _print_tensors(infos: list[TensorInfo]) -> None:
    rows = []
    for info in infos:
        shape = " x ".join(map(str, info.shape)) or "scalar"
        rows.append((info.name, info.dtype, shape, human_bytes(info.nbytes), info.file))
    print_columns(("tensor", "dtype", "shape", "bytes", "file"), rows)


def verify(args: argparse.Namespace) -> int:
    """Check every byte against the digests known for it; fetch what is missing first.

    The exit status is 0 when every file was compared with a digest and matches, 3 when nothing wrong was
    found but a file could not be checked, and 1, like for any error, when one is damaged.
    """
    with open_checkpoint(args) as checkpoint:
        report = checkpoint.verify()
        name = checkpoint.name
    if args.json:
        files = [{**asdict(file), "verified": bool(file.published)} for file in report.files]
        print_json({"location": name, "files": files, "complete": not report.unknown})
    else:
        for file in report.files:
            verdict = f"matches {file.published}" if file.published else f"not checked: {file.reason}"
            print(f"{file.name}: {human_bytes(file.size)}, {verdict}")
    if not report.unknown:
        return 0
    if not args.json:
        what = "nothing could be checked, since no digest is known"
        if report.verified:
            checked = f"{len(report.verified)} of {len(report.files)} files"
            what = f"only {checked} could be checked, since no digest of the others is known"
        print(f"warning: {what}; publish {MANIFEST} beside the files", file=sys.stderr)
    return UNCHECKED
