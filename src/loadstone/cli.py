"""The ``loadstone`` command: parses arguments, then hands over to one function of `loadstone.commands`.

Nothing heavy is imported before the subcommand is known, so that ``loadstone prefetch`` sends its first
request a few tenths of a second after the process starts.
"""

import argparse
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from loadstone.errors import LoadstoneError

DESCRIPTION = "Model weights sooner and for less memory, and LoRA adapters hot-loaded onto one shared base."
LOCATION = "a file, a folder, an HF-cache snapshot, http(s)://…, s3://bucket/prefix, or another fsspec URL"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 0, 1 for an error, 2 for wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    words, command = _split_command(words)
    parser = build_parser()
    args, unknown = parser.parse_known_args(words)
    args.command = command
    running = args.target == "loadstone.commands.run:run"
    if unknown:
        hint = "; write -- before the command" if running and not command else ""
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if running and not command:
        args.parser.error("no command given; write: loadstone run LOCATION -- CMD…")
    if command and not running:
        args.parser.error("only `loadstone run LOCATION -- CMD…` takes words after --")
    warnings.showwarning = _show_warning
    module, function = args.target.split(":")
    try:
        with _log_lines():
            status = int(getattr(importlib.import_module(module), function)(args))
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a failure of it is still reported like any other
    except LoadstoneError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _forget_output()
        return 141
    except OSError as error:  # such as a disk without room for the output
        print(f"error: {error}", file=sys.stderr)
        _forget_output()
        return 1
    return status


def _forget_output() -> None:
    """Let the interpreter's end not fail once more on output that nobody takes."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _split_command(words: list[str]) -> tuple[list[str], list[str]]:
    """Cut ``words`` at the first ``--``; what follows belongs to the command that `run` starts."""
    if "--" not in words:
        return words, []
    cut = words.index("--")
    return words[:cut], words[cut + 1 :]


def _show_warning(message: Warning | str, *_args: object, **_kwargs: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


class _LogLines(logging.Handler):
    """Writes what is logged as commands write it: ``warning: …`` on what is standard error at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if sys.stderr is not None:
                print(f"{record.levelname.lower()}: {self.format(record)}", file=sys.stderr)
        except Exception:  # noqa: BLE001  as every handler does
            self.handleError(record)


@contextmanager
def _log_lines() -> Iterator[None]:
    log, handler = logging.getLogger("loadstone"), _LogLines(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every subcommand."""
    from loadstone import __version__  # noqa: PLC0415  the package is importable before this module

    parser = argparse.ArgumentParser(prog="loadstone", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"loadstone {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_fetching(commands)
    _add_cache(commands)
    _add_service(commands)
    _add_measuring(commands)
    return parser


_Commands = argparse._SubParsersAction


def _command(
    commands: "_Commands[argparse.ArgumentParser]", name: str, target: str, text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(target=f"loadstone.commands.{target}", parser=parser)
    return parser


def _reading(parser: argparse.ArgumentParser, *, location: bool = True, variant: bool = True) -> None:
    """Add the options of every command that opens a checkpoint."""
    if location:
        parser.add_argument("location", metavar="LOCATION", help=LOCATION)
    if variant:
        parser.add_argument("--variant", help="read model.VARIANT.safetensors, such as fp16")
    parser.add_argument(
        "--cache", metavar="DIR", help="folder of the node cache, or `none` (LOADSTONE_CACHE_DIR)"
    )
    parser.add_argument(
        "--endpoint-url", metavar="URL", help="S3 endpoint, when it is not AWS (AWS_ENDPOINT_URL)"
    )
    parser.add_argument("--anonymous", action="store_true", help="do not sign requests")


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port; use 0 to 65535")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too few; use 1 or more")
    return number


_count.__name__ = "number"
_port.__name__ = "port"  # argparse says it when the text is no number


def _add_fetching(commands: "_Commands[argparse.ArgumentParser]") -> None:
    inspect = _command(
        commands, "inspect", "inspect:inspect", "Show what a checkpoint holds; moves only its headers."
    )
    _reading(inspect)
    inspect.add_argument(
        "--tensors", metavar="PATTERN", help="list the tensors that match, such as 'model.layers.0.*'"
    )
    _json(inspect)
    verify = _command(
        commands,
        "verify",
        "inspect:verify",
        "Check every byte against the digests that are known for it: in loadstone.json, an HF cache, S3's "
        "ETags. The exit status is 3 when a file could not be checked, 1 when one is damaged.",
    )
    _reading(verify)
    _json(verify)
    prefetch = _command(
        commands,
        "prefetch",
        "fetch:prefetch",
        "Bring a checkpoint to this machine's node cache. The exit status is 1 when others would find "
        "nothing of it there, 3 when they find a part.",
    )
    _reading(prefetch)
    prefetch.add_argument(
        "patterns", nargs="*", metavar="PATTERN", help="only tensors that match, such as 'lm_head.*'"
    )
    prefetch.add_argument(
        "--until",
        choices=("header", "first-layer", "all"),
        default="all",
        help="how much must be here (default: all)",
    )
    _json(prefetch)
    run = _command(
        commands, "run", "run:run", "Start CMD and fetch the checkpoint while it starts: run LOCATION -- CMD…"
    )
    _reading(run)
    run.usage = "loadstone run [options] LOCATION -- CMD…"
    status = _command(commands, "status", "cache:status", "Show how much of a checkpoint is on this machine.")
    _reading(status)
    _json(status)


def _add_cache(commands: "_Commands[argparse.ArgumentParser]") -> None:
    cache = commands.add_parser("cache", help="List, trim or remove what the node cache holds.")
    actions = cache.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = _command(actions, "list", "cache:list_entries", "List the cached objects.")
    trim = _command(actions, "trim", "cache:trim", "Remove the least recently used objects that nobody uses.")
    trim.add_argument("size", metavar="SIZE", help="how much may stay, such as 20GiB")
    remove = _command(
        actions, "remove", "cache:remove", "Remove what was fetched from a location, or one cached object."
    )
    remove.add_argument("location", metavar="LOCATION", help="a location, or the id that `cache list` shows")
    for parser in (listing, trim, remove):
        parser.add_argument("--cache", metavar="DIR", help="folder of the node cache (LOADSTONE_CACHE_DIR)")
        _json(parser)


def _add_service(commands: "_Commands[argparse.ArgumentParser]") -> None:
    serve = _command(
        commands, "serve", "serve:serve", "Serve a model over HTTP and hot-load adapters onto it."
    )
    _reading(serve, variant=False)
    serve.add_argument(
        "--adapters",
        metavar="ROOT",
        action="append",
        default=[],
        help="where adapters may come from; may be repeated",
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument(
        "--port", type=_port, default=8000, help="port to listen on, 0 for any (default: 8000)"
    )
    serve.add_argument("--name", help="the base model's name in the API (default: the location's last part)")
    serve.add_argument(
        "--device", help="where to compute: cpu, cuda, cuda:1 (LOADSTONE_DEVICE; default: cpu)"
    )
    adapters = commands.add_parser(
        "adapters", help="Load, unload or list a service's adapters; check one offline."
    )
    actions = adapters.add_subparsers(title="actions", metavar="ACTION", required=True)
    load = _command(actions, "load", "adapters:load", "Load an adapter into a running service.")
    load.add_argument("name", metavar="NAME", help="what requests will call it")
    load.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="where it is, inside one of the service's roots (default: NAME)",
    )
    load.add_argument(
        "--replace", action="store_true", help="put it in place of what is loaded as NAME (load_inplace)"
    )
    unload = _command(actions, "unload", "adapters:unload", "Unload an adapter from a running service.")
    unload.add_argument("name", metavar="NAME")
    listing = _command(
        actions, "list", "adapters:list_adapters", "List a running service's models and adapters."
    )
    for parser in (load, unload, listing):
        parser.add_argument(
            "--url", default="http://127.0.0.1:8000", help="the service (default: %(default)s)"
        )
        _json(parser)
    check = _command(actions, "check", "adapters:check", "Check that an adapter is sound and fits a base.")
    check.add_argument("adapter", metavar="ADAPTER", help="the adapter's folder, here or in a store")
    check.add_argument("--base", metavar="BASE", help=f"the base it is for: {LOCATION}")
    check.add_argument("--strict-base", action="store_true", help="refuse an adapter that names another base")
    _reading(check, location=False, variant=False)
    _json(check)


def _add_measuring(commands: "_Commands[argparse.ArgumentParser]") -> None:
    demo = _command(
        commands, "demo", "demo:demo", "Make a small model and three adapters, serve them, ask them."
    )
    demo.add_argument(
        "--store", metavar="URL", help="put them there, such as s3://bucket/prefix (default: a local server)"
    )
    demo.add_argument(
        "--endpoint-url", metavar="URL", help="S3 endpoint, when it is not AWS (AWS_ENDPOINT_URL)"
    )
    demo.add_argument(
        "--port", type=_port, default=8000, help="port of the service, 0 for any (default: %(default)s)"
    )
    demo.add_argument("--once", action="store_true", help="stop after the answers")
    demo.add_argument(
        "--work", metavar="DIR", help="where the model is kept (default: beside the node cache)"
    )
    bench = commands.add_parser("bench", help="Measure loadstone beside other ways of doing the same.")
    kinds = bench.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    cold = _command(kinds, "cold-start", "bench:cold_start", "From process start to first token, three ways.")
    _reading(cold, variant=False)
    cold.add_argument(
        "--prompt", default="Q: What is the capital of France?\nA:", help="what the model is asked"
    )
    cold.add_argument(
        "--bandwidth", metavar="SIZE", help="read the location through a link of so many bytes a second"
    )
    loader = _command(kinds, "loader", "bench:loader", "Loading from a local disk, beside the other loaders.")
    _pieces(loader, "2G", 3, "resident, usable, many, model, layer, memory, gpu, gpu-cold or gpu-model")
    transfer = _command(
        kinds, "transfer", "bench:transfer", "From an object store to this machine, beside the other clients."
    )
    works = "disk, memory, link, start, layer, open, anonymous or first-request"
    _pieces(transfer, "2G", 3, works)
    transfer.add_argument("--no-peers", action="store_true", help="leave out the clients of others")
    adapters = _command(kinds, "adapters", "bench:adapters", "Adapters over one shared base, beside PEFT.")
    _pieces(adapters, "1280M", 2, "load, look, held, crowd, cycle, decode or mix")
    for parser in (loader, adapters):
        parser.add_argument("--keep", action="store_true", help="leave the inputs there, to be used again")
    for parser in (cold, loader, transfer, adapters):
        parser.add_argument(
            "--runs", type=_count, default=3, help="runs of each way, interleaved (default: %(default)s)"
        )
        parser.add_argument(
            "--out", metavar="FILE", help="write the results as JSON here, not to bench/results"
        )
        parser.add_argument(
            "--plot", metavar="FILE", help="draw them too: a name that ends with .svg or .png"
        )
        _json(parser)
    adapters.set_defaults(runs=1)  # each does its work a hundred times and more


def _pieces(parser: argparse.ArgumentParser, size: str, times: int, works: str) -> None:
    """Add what the benchmarks of several pieces of work share."""
    parser.add_argument(
        "--size",
        default=size,
        help=f"bytes of the weights; bars are meant from {size} on (default: {size})",
    )
    parser.add_argument(
        "--work", metavar="DIR", help=f"folder for the files (default: here), {times} times --size free"
    )
    parser.add_argument("--only", metavar="WORK", action="append", help=f"{works}; may be repeated")
