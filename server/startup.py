"""From a location to a model that answers: open, let the bytes flow, and only then import and build.

The engine thread runs `Startup.load`. Bytes are on their way before torch is imported, so the time that
imports take is not added to the transfer's. A small thread of its own notes when the first tensor and the
last byte arrive. `close` may be called from any thread and makes a `load` that waits for bytes end.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from loadstone.adapters.roots import Roots
from loadstone.errors import ClosedError, LoadstoneError, MissingExtraError
from loadstone.loader.checkpoint import Checkpoint, open_checkpoint
from loadstone.loader.locations import parse_location
from loadstone.loader.source import Prefetch, Progress
from loadstone.server.device import refuse_absent
from loadstone.server.timeline import Timeline
from loadstone.settings import Settings

if TYPE_CHECKING:
    from loadstone.server.assemble import Loaded


class Startup:
    """Brings one model here.

    Parameters
    ----------
    location : str
        The base's folder.
    roots : sequence of str
        Where adapters may come from.
    name : str, optional
        What requests call the base; by default the folder's name.
    hold : bool
        Import nothing heavy until `release`: imports keep other Python threads waiting, and a service should
        answer on its port first. Bytes flow meanwhile.

    Attributes
    ----------
    where : str
        The location, for messages.
    stage : str
        What it is doing, in a few words.
    """

    def __init__(
        self,
        location: str,
        *,
        settings: Settings,
        roots: Sequence[str] = (),
        name: str | None = None,
        timeline: Timeline | None = None,
        hold: bool = False,
        cache: str | None = "auto",
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        self.where = parse_location(location).text
        self.name = name or served_name(self.where)
        self.timeline = timeline or Timeline()
        self.stage = "opening the checkpoint"
        self._location = location
        Roots(roots)  # a wrong one is told at once, not when the model is here
        refuse_absent(settings.device)
        self._roots = tuple(roots)
        self._settings = settings
        self._cache = cache
        self._storage_options = storage_options
        self._go = threading.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._checkpoint: Checkpoint | None = None
        self._prefetch: Prefetch | None = None
        if not hold:
            self._go.set()

    def release(self) -> None:
        """Let the imports begin."""
        self._go.set()

    def progress(self) -> Progress | None:
        """Return how many bytes are here; ``None`` before the headers are read."""
        prefetch = self._prefetch
        return None if prefetch is None else prefetch.progress()

    def load(self) -> "Loaded":
        """Return the model once it has computed a token, blocking for as long as that takes.

        Raises
        ------
        LoadstoneError
            It cannot be had.
        """
        checkpoint = self._open()
        self.timeline.mark("opened")
        self._prefetch = checkpoint.prefetch()
        watcher = threading.Thread(
            target=self._watch, args=(checkpoint, self._prefetch), name="loadstone-startup-watch", daemon=True
        )
        watcher.start()
        self._go.wait()
        self.stage = "importing torch and transformers"
        try:
            from loadstone.loader.tensors.device import parse_device  # noqa: PLC0415  imports torch

            parse_device(self._settings.device)  # what `refuse_absent` cannot tell, before more is imported
            from loadstone.server import assemble  # noqa: PLC0415  takes seconds
        except ImportError as error:
            raise MissingExtraError(
                f"the service needs {error.name}; install it with: pip install 'loadstone[serve]'"
            ) from error
        self.timeline.mark("imported")
        self._check_open()
        self.stage = "building the model"
        loaded = assemble.assemble(checkpoint, self._roots, self._settings, self._storage_options)
        self.timeline.mark("model_built")
        self.stage = "computing the first token"
        loaded.warm_up()
        self.timeline.mark("first_token")
        self.stage = "ready"
        return loaded

    def close(self) -> None:
        """Give up: a `load` in progress ends with an error; bytes stop flowing."""
        with self._lock:
            self._closed = True
            checkpoint = self._checkpoint
        self._go.set()
        if checkpoint is not None:
            checkpoint.close()

    def _open(self) -> Checkpoint:
        checkpoint = open_checkpoint(
            self._location, cache=self._cache, storage_options=self._storage_options, settings=self._settings
        )
        with self._lock:
            self._checkpoint = checkpoint
        try:
            self._check_open()
        except ClosedError:
            checkpoint.close()
            raise
        return checkpoint

    def _check_open(self) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.where}: the service was stopped while it started")

    def _watch(self, checkpoint: Checkpoint, prefetch: Prefetch) -> None:
        try:
            checkpoint.wait(checkpoint.save_order()[:1])
            self.timeline.mark("first_tensor")
            prefetch.wait()
            self.timeline.mark("last_byte")
        except LoadstoneError:
            # Whoever needs the missing bytes meets the same error, and tells it.
            return


def served_name(where: str) -> str:
    """Return what to call the model at ``where``: its folder's name; ``org/model`` in an HF cache."""
    path = PurePosixPath(where.rstrip("/"))
    for part in reversed(path.parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return path.name.removesuffix(".safetensors") or "model"
