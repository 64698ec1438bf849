"""Loadstone's adapters and PEFT's behind one set of methods, so that both are measured by the same code.

Both compute over a base that is mapped from the same file. PEFT comes in several spellings of the same work:
with its defaults, and with the options that make it fastest and smallest.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

import loadstone
from loadstone.adapters.pool import AdapterPool
from loadstone.bench.adapters_inputs import Inputs
from loadstone.bench.loader_child import need, touch

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

Step = Callable[..., torch.Tensor]
"""Runs the model on tokens, and perhaps a key-value cache, and returns the logits."""


class Side(Protocol):
    """A model with adapters."""

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter until the next batch can use it."""
        ...

    def read(self, name: str, folder: Path) -> None:
        """Do the part of `load` that may be done while another thread runs batches."""
        ...

    def unload(self, name: str) -> None:
        """Take it away."""
        ...

    def running(self, names: Sequence[str]) -> AbstractContextManager[Step]:
        """Return a context whose value is the step of a batch, one adapter for each row."""
        ...

    def bare(self, ids: torch.Tensor) -> torch.Tensor:
        """Run the base alone."""
        ...

    @property
    def budgeted_bytes(self) -> int:
        """Anonymous memory that the side itself counts as in use for adapters."""
        ...


class Loadstone:
    """The pool over a base that `loadstone.load_model` gave."""

    def __init__(self, inputs: Inputs) -> None:
        prepare()
        self._base = loadstone.open(inputs.llama)
        self._model = loadstone.load_model(self._base, wait=True)
        self.pool = AdapterPool(self._model, self._base, roots=[str(inputs.roots)])

    def touch_base(self) -> None:
        """Bring every page of the base into memory."""
        touch(self._base.values())

    def load(self, name: str, folder: Path) -> None:
        """Load it, and attach it."""
        self.pool.load(name, str(folder))
        with self.pool.lease([name]) as lease, self.pool.apply(lease.rows):
            pass

    def read(self, name: str, folder: Path) -> None:
        """Load it; a batch that uses it first attaches it."""
        self.pool.load(name, str(folder))

    def unload(self, name: str) -> None:
        """Unload it."""
        self.pool.unload(name)

    @contextmanager
    def running(self, names: Sequence[str]) -> Iterator[Step]:
        """Hold the adapters; each step applies them."""
        with self.pool.lease(names) as lease:

            def step(ids: torch.Tensor, cache: "DynamicCache | None" = None) -> torch.Tensor:
                with self.pool.apply(lease.rows):
                    return _logits(self._model, ids, cache)

            yield step

    def bare(self, ids: torch.Tensor) -> torch.Tensor:
        """Run the model outside `apply`: nothing of an adapter is on it then."""
        return _logits(self._model, ids)

    @property
    def budgeted_bytes(self) -> int:
        """What is attached and stacked."""
        return self.pool.attached_bytes


class Peft:
    """A `PeftModel`, with PEFT's defaults.

    Parameters
    ----------
    fastest : bool
        Use the options that make it fastest and smallest: tensors stay in the file's dtype, and nothing is
        initialised before it is loaded.
    """

    def __init__(self, inputs: Inputs, *, fastest: bool = False) -> None:
        prepare()
        (transformers,) = need("transformers")
        (peft,) = need("peft")
        self._options = {"autocast_adapter_dtype": False, "low_cpu_mem_usage": True} if fastest else {}
        automatic = transformers.AutoModelForCausalLM
        self._bare: PreTrainedModel = automatic.from_pretrained(inputs.llama)
        self._model = peft.PeftModel.from_pretrained(
            automatic.from_pretrained(inputs.llama), inputs.adapter(0), "first", **self._options
        ).eval()

    def load(self, name: str, folder: Path) -> None:
        """Load a further adapter; naming it to a batch is not counted."""
        self._model.load_adapter(str(folder), name, torch_device="cpu", **self._options)

    def read(self, name: str, folder: Path) -> None:
        """Do the same: PEFT has no other way."""
        self.load(name, folder)

    def unload(self, name: str) -> None:
        """Delete it; not while it is the active one, for then PEFT chooses another for the next batch."""
        self._model.set_adapter("first")
        self._model.delete_adapter(name)

    @contextmanager
    def running(self, names: Sequence[str]) -> Iterator[Step]:
        """Activate the one adapter, or name one for each row."""
        rows: dict[str, object] = {}
        if len(set(names)) == 1:
            self._model.set_adapter(names[0])
        else:
            rows["adapter_names"] = list(names)

        def step(ids: torch.Tensor, cache: "DynamicCache | None" = None) -> torch.Tensor:
            return _logits(self._model, ids, cache, **rows)

        yield step

    def bare(self, ids: torch.Tensor) -> torch.Tensor:
        """Run a model of the same file that PEFT has not touched."""
        return _logits(self._bare, ids)

    @property
    def budgeted_bytes(self) -> int:
        """Nothing: PEFT has no budget."""
        return 0


class Hotswap(Peft):
    """PEFT's ``hotswap_adapter``: one adapter's values put in the place of another's."""

    def load(self, name: str, folder: Path) -> None:  # noqa: ARG002  the one adapter keeps its name
        """Exchange the values."""
        (hotswap,) = need("peft.utils.hotswap")
        hotswap.hotswap_adapter(self._model, str(folder), "first", torch_device="cpu")

    def unload(self, name: str) -> None:
        """Do nothing: there is only one."""

    @contextmanager
    def running(self, names: Sequence[str]) -> Iterator[Step]:
        """Run the one adapter, whatever it is called."""
        with super().running(["first"] * len(names)) as step:
            yield step


def prepare() -> None:
    """Import what loading a base needs, and keep transformers from writing progress."""
    (logging,) = need("transformers.utils.logging")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def new_cache() -> "DynamicCache":
    """Return an empty key-value cache."""
    cache: DynamicCache = need("transformers")[0].DynamicCache()
    return cache


@functools.cache
def _cache_argument() -> str:
    """Return what this transformers calls a model's key-value cache."""
    (llama,) = need("transformers.models.llama")
    accepted = inspect.signature(llama.LlamaForCausalLM.forward).parameters
    return next(name for name in ("cache", "past_key_values") if name in accepted)


def _logits(
    model: "PreTrainedModel", ids: torch.Tensor, cache: "DynamicCache | None" = None, **rows: object
) -> torch.Tensor:
    if cache is not None:
        rows[_cache_argument()] = cache
    with torch.inference_mode():
        output = model(input_ids=ids, use_cache=cache is not None, **rows)
        last: torch.Tensor = output.logits[:, -1]
    return last


SIDES: dict[str, Callable[[Inputs], Side]] = {
    "loadstone": Loadstone,
    "peft": Peft,
    "peft_fastest": lambda inputs: Peft(inputs, fastest=True),
    "hotswap": Hotswap,
}
"""Every side, by the name that the child takes."""
