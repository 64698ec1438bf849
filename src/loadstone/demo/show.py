"""What the demo prints: progress, answers side by side, where the start-up time went, what adapters cost."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from loadstone.display import human_bytes, human_seconds

EVENTS = {
    "serve": "process started, loadstone's own code runs",
    "listening": "the port answers",
    "opened": "checkpoint opened: headers read, bytes begin to flow",
    "first_tensor": "first tensor here",
    "imported": "torch and transformers imported",
    "model_built": "model callable, its parameters wait for their own bytes",
    "first_token": "first token",
    "last_byte": "last byte here",
}
"""The service's start-up events, as people read them."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one adapter's load cost."""

    name: str
    seconds: float
    nbytes: int


def console() -> Console:
    """Return the console that results go to."""
    return Console(soft_wrap=not sys.stdout.isatty())


@contextmanager
def training_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show how far training has come: a bar for each model on a terminal, else one line each."""
    if not sys.stderr.isatty():
        yield _training_lines
        return
    columns = (
        TextColumn("training {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, step: int, steps: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=steps)
            bars.update(tasks[what], completed=step)

        yield report


def _training_lines(what: str, step: int, steps: int) -> None:
    if step == steps:
        print(f"trained {what}: {steps} steps", file=sys.stderr, flush=True)


@contextmanager
def arrival_bar() -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Show the base model's bytes as they arrive at the service; nothing where there is no terminal.

    The bar begins with the first news of the service, which has said by then where it listens.
    """
    if not sys.stderr.isatty():
        yield lambda _ready: None
        return
    columns = (
        TextColumn("base model"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bars.add_task("base model", total=None)

    def update(state: Mapping[str, Any]) -> None:
        arrived = state.get("bytes") or {}
        bars.update(task, completed=arrived.get("ready", 0), total=arrived.get("total"))
        bars.start()  # does nothing when it has begun

    try:
        yield update
    finally:
        bars.stop()


def answers(prompt: str, told: Mapping[str, str]) -> Table:
    """Return the answers of the base and each adapter, side by side."""
    question = prompt.splitlines()[0].removeprefix("Q: ")
    table = Table(title=f"“{question}”", title_justify="left")
    table.add_column("model")
    table.add_column("answer")
    for model, answer in told.items():
        table.add_row(model, answer)
    return table


def timeline(events: Mapping[str, float]) -> Table:
    """Return where the start-up time went, in seconds since the service's process began."""
    table = Table(title="start-up of the service", title_justify="left")
    table.add_column("after", justify="right")
    table.add_column("")
    table.add_row("0 ms", "process begins")
    for event, seconds in sorted(events.items(), key=lambda item: item[1]):
        table.add_row(human_seconds(seconds), EVENTS.get(event, event))
    return table


def costs(loaded: Sequence[Loaded], base_bytes: int) -> Table:
    """Return what each adapter cost beside the one base that they share."""
    table = Table(title="loaded while serving", title_justify="left")
    table.add_column("adapter")
    table.add_column("time", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("of the base", justify="right")
    for adapter in loaded:
        share = f"{100 * adapter.nbytes / base_bytes:.1f}%" if base_bytes else "-"
        table.add_row(adapter.name, human_seconds(adapter.seconds), human_bytes(adapter.nbytes), share)
    return table


def try_it(url: str, adapter: str, location: str) -> str:
    """Return the lines that a reader can paste into another terminal; print them unwrapped."""
    as_json = "-H 'Content-Type: application/json'"
    prompt = "Q: What is the capital of Japan?\\nA:"
    return f"""try it from another terminal (Ctrl-C here stops the service):

  curl {url}/v1/models
  curl {url}/v1/completions \\
    {as_json} \\
    -d '{{"model": "{adapter}", "max_tokens": 24, "temperature": 0,
         "prompt": "{prompt}"}}'
  curl {url}/v1/unload_lora_adapter \\
    {as_json} \\
    -d '{{"lora_name": "{adapter}"}}'
  curl {url}/v1/load_lora_adapter \\
    {as_json} \\
    -d '{{"lora_name": "{adapter}",
         "lora_path": "{location}"}}'
"""
