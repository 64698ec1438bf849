"""Plays the demo from end to end; see `loadstone.demo`."""

import time
from collections.abc import Callable
from pathlib import Path

from loadstone.commands.adapters import call
from loadstone.demo import show
from loadstone.demo.corpus import CAPITALS, STYLES, Fact, prompt
from loadstone.demo.service import ask, check_port, running, wait_ready
from loadstone.demo.store import Store, open_store
from loadstone.errors import MissingExtraError
from loadstone.settings import Settings

QUESTIONS = (
    Fact("What is the capital of France?", "France", "capital", CAPITALS["France"]),
    Fact("What does a dog do?", "dog", "sound", "barks"),
)


def play(
    work: Path, *, store_url: str | None, endpoint_url: str | None, port: int, once: bool, settings: Settings
) -> None:
    """Make what is missing, serve it, load the adapters, ask everyone the same, show what it cost.

    Parameters
    ----------
    work : Path
        Where the trained model is kept between runs.
    store_url, endpoint_url : str, optional
        A real object store to put the model in, instead of a server on this machine.
    port : int
        The service's port; 0 takes a free one.
    once : bool
        Return after the answers instead of serving on.
    """
    check_port(port)
    out = show.console()
    model = work / "demo-model"
    if not model.is_dir():
        out.print(
            "Making a small Llama and three adapters (about a minute; they are kept for the next time) …"
        )
        _make(model)
    with open_store(model, store_url, endpoint_url) as store:
        out.print(f"Base and adapters are in {store.root}; starting `loadstone serve`, cache empty …")
        with running(store, port, settings) as (url, alive):
            with show.arrival_bar() as update:
                wait_ready(url, alive, update)
            loaded = [_load(url, store, style) for style in STYLES]
            for fact in QUESTIONS:
                told = {model: ask(url, model, prompt(fact)) for model in ("base", *STYLES)}
                out.print(show.answers(prompt(fact), told))
            state = call(f"{url}/ready")
            out.print(show.timeline(state["events"]))
            out.print(show.costs(loaded, state["bytes"]["total"]))
            if not once:
                style = next(iter(STYLES))
                # Not by the console: it would wrap and colour what is there to be pasted.
                print(show.try_it(url, style, f"{store.adapters}/{style}"), flush=True)
                _serve_on(alive)


def _make(model: Path) -> None:
    try:
        from loadstone.demo.train import make  # the only part that needs peft
    except ImportError as error:
        text = (
            f"the demo trains a model and needs {error.name}; install it with: pip install 'loadstone[demo]'"
        )
        raise MissingExtraError(text) from error
    with show.training_bar() as report:
        make(model, report)


def _load(url: str, store: Store, style: str) -> show.Loaded:
    began = time.monotonic()
    answer = call(
        f"{url}/v1/load_lora_adapter", {"lora_name": style, "lora_path": f"{store.adapters}/{style}"}
    )
    return show.Loaded(style, time.monotonic() - began, int(answer["bytes"]))


def _serve_on(alive: Callable[[], bool]) -> None:
    try:
        while alive():
            time.sleep(0.2)
    except KeyboardInterrupt:
        return
