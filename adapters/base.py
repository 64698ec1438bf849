"""What an adapter is checked against: the names and shapes of a base checkpoint. No tensor bytes are read.

An adapter names modules as the model does. A checkpoint saved from the bare model lacks the model's own
prefix (``transformer.`` of GPT-2); `BaseIndex` knows both spellings. One whose tensors are converted while
they are loaded (experts stored one by one, which the model holds in one) is described by the model's own
parameters instead, once an adapter needs them: `converted_index_of`. An index is immutable after it is built,
so any thread may use it.
"""

import weakref
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from loadstone.errors import LoadstoneError
from loadstone.loader.checkpoint import Checkpoint
from loadstone.loader.modules.families import PLAIN

_CONV1D = {
    "clvp": ("c_fc", "c_proj"),
    "decision_transformer": ("c_attn", "q_attn", "c_proj", "c_fc"),
    "gpt2": ("c_attn", "q_attn", "c_proj", "c_fc"),
    "imagegpt": ("c_attn", "q_attn", "c_proj", "c_fc"),
    "openai-gpt": ("c_attn", "c_proj", "c_fc"),
}
"""Modules of transformers' model types that are ``Conv1D``, whose weights are ``[in, out]``."""

Shape = tuple[int, ...]


class BaseIndex:
    """Names and shapes of a base, by the model's names.

    Parameters
    ----------
    checkpoint
        The base; it must stay open for as long as tensors are read through it.
    model : mapping, optional
        The shapes of the model's parameters, where they are not those of the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, model: Mapping[str, Shape] | None = None) -> None:
        self.name = checkpoint.name
        self.config: Mapping[str, object] = checkpoint.config() or {}
        self.tied: Mapping[str, str] = dict(checkpoint.tied)
        self.fingerprint = checkpoint.fingerprint()
        self._shapes: dict[str, Shape] = {
            name: tuple(checkpoint.info(name).shape)
            for name in checkpoint.keys()  # noqa: SIM118  no values
        }
        self._own = frozenset(
            name for name, shape in self._shapes.items() if model is None or model.get(name) == shape
        )
        if model is not None:
            self._shapes = dict(model)
            self.tied = {alias: name for alias, name in self.tied.items() if name in model}
        self._tops = frozenset(name.partition(".")[0] for name in self._shapes)
        self._modules: dict[str, list[str]] = {}
        for name in dict.fromkeys((*self._shapes, *self.tied)):
            end = name.find(".")
            while end >= 0:
                self._modules.setdefault(name[:end], []).append(name)
                end = name.find(".", end + 1)

    def __iter__(self) -> Iterator[str]:
        """Yield the names that it goes by: the checkpoint's own, or the model's."""
        return iter(self._shapes)

    def stored(self, name: str) -> str | None:
        """Return the checkpoint's name of the model's parameter ``name``: itself, its twin, or ``None``."""
        known = self._known(name)
        return known if known in self._own else None

    def _known(self, name: str) -> str | None:
        if name in self.tied:
            return self.tied[name]
        if name in self._shapes:
            return name
        top, _, rest = name.partition(".")
        if top not in self._tops and rest in self._shapes:
            return rest
        return None

    def shape(self, name: str) -> Shape | None:
        """Return the shape of the model's parameter ``name``, or ``None`` when there is no such."""
        known = self._known(name)
        return None if known is None else self._shapes[known]

    def parameters(self, module: str) -> dict[str, Shape]:
        """Return the parameters below ``module``, by their names inside it."""
        at = self._stored_module(module)
        return {
            name[len(at) + 1 :]: self._shapes[self.tied.get(name, name)] for name in self._modules.get(at, ())
        }

    def has_module(self, module: str) -> bool:
        """Say whether anything is stored for ``module``."""
        return self._stored_module(module) in self._modules

    def _stored_module(self, module: str) -> str:
        top, _, rest = module.partition(".")
        return rest if rest and module not in self._modules and top not in self._tops else module

    def matrices(self, prefix: str = "") -> list[str]:
        """Return the modules that own a two-dimensional ``weight``, ``prefix`` put before their names."""
        return [
            prefix + name.removesuffix(".weight")
            for name, shape in self._shapes.items()
            if name.endswith(".weight") and len(shape) == 2
        ]

    def missing_prefix(self, module: str) -> str:
        """Return the prefix that the checkpoint lacks in front of ``module``'s name, or nothing."""
        if module in self._modules or not self.has_module(module):
            return ""
        return module.partition(".")[0] + "."

    def is_conv1d(self, module: str) -> bool | None:
        """Say whether ``module`` is a ``Conv1D``, or ``None`` when the base does not say what it is."""
        kind = self.config.get("model_type")
        if not isinstance(kind, str):
            return None
        return module.rpartition(".")[2] in _CONV1D.get(kind, ())

    @property
    def vocabulary(self) -> int | None:
        """How many tokens the base knows, as its config says."""
        text = self.config.get("text_config")
        inner = text if isinstance(text, dict) else {}
        size = self.config.get("vocab_size", inner.get("vocab_size"))
        return size if isinstance(size, int) else None


_indexes: dict[int, tuple[weakref.ref[Checkpoint], BaseIndex]] = {}
_converted: weakref.WeakKeyDictionary[BaseIndex, BaseIndex | None] = weakref.WeakKeyDictionary()


def index_of(checkpoint: Checkpoint) -> BaseIndex:
    """Return the index of ``checkpoint``, built once for as long as the checkpoint lives.

    Two threads may build it at the same time; either result serves.
    """
    known = _indexes.get(id(checkpoint))
    if known is not None and known[0]() is checkpoint:
        return known[1]
    index = BaseIndex(checkpoint)
    key = id(checkpoint)
    _indexes[key] = (weakref.ref(checkpoint, lambda _: _indexes.pop(key, None)), index)
    return index


def converted_index_of(checkpoint: Checkpoint) -> BaseIndex | None:
    """Return the index by the parameters of the model that `loadstone.load_model` makes of ``checkpoint``.

    ``None`` when they are those that it stores, or when transformers cannot tell. Worked out once.
    """
    plain = index_of(checkpoint)
    if plain not in _converted:
        _converted[plain] = _by_model(checkpoint, plain)
    return _converted[plain]


def _by_model(checkpoint: Checkpoint, plain: BaseIndex) -> BaseIndex | None:
    if plain.config.get("model_type", "") in ("", *PLAIN):
        return None
    try:
        from loadstone.loader.modules.skeleton import parameter_shapes  # noqa: PLC0415  imports transformers

        shapes = parameter_shapes(checkpoint)
    except (ImportError, LoadstoneError):
        return None
    return None if all(map(plain.stored, shapes)) else BaseIndex(checkpoint, shapes)


def same_name(adapter_says: str, base_is: str) -> bool:
    """Say whether two names may mean the same base.

    Only the last part counts, without regard to case: ``org/tiny``, ``/mnt/train/tiny`` and
    ``s3://models/tiny/`` agree, and so does the HF cache's ``models--org--tiny/snapshots/<revision>``.
    """
    return bool(_names(adapter_says) & _names(base_is))


def _names(text: str) -> set[str]:
    path = PurePosixPath(text.partition("?")[0].replace("\\", "/").lower())
    names = {path.name} if path.name else set()
    for part in path.parts:
        if part.startswith("models--"):
            names.add(part.rpartition("--")[2])
    return names
