"""What adapters have in common that differ in their values only, worked out once and remembered.

Hundreds of adapters of one base tend to have the same names, shapes and config. A `Layout` is everything that
follows from a weights file's header, the config's text and the base: it was checked against the base, and
holds every update over placeholders, tensors without memory. `FileUpdates` puts the values of one file in
their place, module by module, when they are asked for: so an adapter that is only mapped costs a few
kilobytes, and reading another one of a known layout takes no look at its single tensors.

Concurrency: layouts are immutable. Those of a base are remembered for as long as its index lives, under one
lock; two threads may work out the same layout, and either serves.
"""

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from loadstone.adapters.base import BaseIndex
from loadstone.adapters.build import Built, Contents, build
from loadstone.adapters.config import AdapterConfig, canonical
from loadstone.adapters.experts import Experts
from loadstone.adapters.updates import Update, over
from loadstone.loader.checkpoint import Checkpoint
from loadstone.loader.format.header import TensorInfo
from loadstone.loader.tensors.views import is_aligned, torch_dtype, view

_MOST = 64
"""Most layouts remembered of one base: each is about as large as one adapter's objects."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Layout:
    """What a header, a config and a base say together.

    Attributes
    ----------
    infos : Mapping[str, TensorInfo]
        Every tensor of the file.
    metadata : Mapping[str, str]
        What the header says about itself.
    config : AdapterConfig
        The config.
    said : bytes
        The config's content, in one spelling.
    built : Built
        The updates, over placeholders.
    nbytes : int
        Bytes of all tensors of the updates.
    places : Mapping[int, TensorInfo]
        Which tensor each placeholder stands for, by the placeholder's ``id``.
    ids : Mapping[str, int]
        The ``id`` of each tensor's placeholder.
    unaligned : tuple of str
        Tensors that cannot be views of the file.
    """

    infos: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    config: AdapterConfig
    said: bytes
    built: Built
    nbytes: int
    places: Mapping[int, TensorInfo]
    ids: Mapping[str, int]
    unaligned: tuple[str, ...]
    _placeholders: Mapping[str, torch.Tensor] = field(repr=False)  # keeps their ids from being used again


def work_out(
    checkpoint: Checkpoint, config: AdapterConfig, base: BaseIndex | None, experts: Experts, where: str
) -> Layout:
    """Check a file's tensors against its config and the base; see `build` for what is raised."""
    infos = {key: checkpoint.info(key) for key in checkpoint}
    dtypes = {key: info.dtype for key, info in infos.items()}
    placeholders: dict[str, torch.Tensor] = {}

    def placeholder(key: str) -> torch.Tensor:
        if key not in placeholders:
            info = infos[key]
            placeholders[key] = torch.empty(info.shape, dtype=torch_dtype(info), device="meta")
        return placeholders[key]

    shapes = {key: info.shape for key, info in infos.items()}
    built = build(Contents(shapes, dtypes, placeholder), config, base, experts, where)
    used = (tensor for updates in built.updates.values() for update in updates for tensor in update.tensors)
    return Layout(
        infos=infos,
        metadata=checkpoint.metadata,
        config=config,
        said=canonical(config),
        built=built,
        nbytes=sum(tensor.nbytes for tensor in used),
        places={id(tensor): infos[key] for key, tensor in placeholders.items()},
        ids={key: id(tensor) for key, tensor in placeholders.items()},
        unaligned=tuple(key for key in placeholders if not is_aligned(infos[key])),
        _placeholders=placeholders,
    )


class FileUpdates(Mapping[str, tuple[Update, ...]]):
    """The updates of one file by module, made anew at each look: views of the file, and no work before it.

    Attributes
    ----------
    layout : Layout
        What they have in common with other files'.
    """

    __slots__ = ("_buffer", "_copies", "layout")

    def __init__(self, layout: Layout, checkpoint: Checkpoint, buffer: memoryview) -> None:
        self.layout = layout
        self._buffer = buffer
        self._copies = {layout.ids[key]: checkpoint.view(key) for key in layout.unaligned}

    def __getitem__(self, module: str) -> tuple[Update, ...]:
        return tuple(over(update, self._tensor) for update in self.layout.built.updates[module])

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.built.updates)

    def __len__(self) -> int:
        return len(self.layout.built.updates)

    def __contains__(self, module: object) -> bool:
        return module in self.layout.built.updates

    def same(self, first: str, second: str) -> bool:
        """Say whether the very same updates, of the same tensors, are made to two modules."""
        return self.layout.built.updates[first] == self.layout.built.updates[second]

    def _tensor(self, placeholder: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get(id(placeholder))
        return view(self.layout.places[id(placeholder)], self._buffer) if copy is None else copy


_lock = threading.Lock()
_known: "weakref.WeakKeyDictionary[BaseIndex, OrderedDict[bytes, Layout]]" = weakref.WeakKeyDictionary()


def recall(base: BaseIndex | None, facts: Sequence[bytes] | None, fresh: Callable[[], Layout]) -> Layout:
    """Return the layout that follows from ``facts`` for a base: a known one, or a ``fresh`` one.

    Without a base or facts nothing is remembered; nor is a layout with warnings, for they name its file.

    Parameters
    ----------
    base : BaseIndex or None
        What the layout is checked against.
    facts : sequence of bytes or None
        All that it follows from: header, size of the file, config, options.
    fresh : callable
        Works the layout out.
    """
    if base is None or facts is None:
        return fresh()
    key = hashlib.sha256(b"".join(len(fact).to_bytes(8, "little") + fact for fact in facts)).digest()
    with _lock:
        layouts = _known.setdefault(base, OrderedDict())
        known = layouts.get(key)
        if known is not None:
            layouts.move_to_end(key)
            return known
    found = fresh()
    if not found.built.warnings:
        with _lock:
            layouts[key] = found
            while len(layouts) > _MOST:
                layouts.popitem(last=False)
    return found
