"""One module's tensors, checked against each other, the config and the base, and made into an update.

Only shapes are looked at; every mistake names the module and both sizes. Pure over `Parts`, no I/O.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch

from loadstone.adapters.base import BaseIndex, Shape
from loadstone.adapters.config import AdapterConfig
from loadstone.adapters.keys import Key, Kind
from loadstone.adapters.patterns import Matcher
from loadstone.adapters.updates import EmbeddingLowRank, LowRank
from loadstone.errors import AdapterBaseError, AdapterFormatError, AdapterUnsupportedError

Tensors = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one module at one depth, with all that is needed to judge them.

    Attributes
    ----------
    module : str
        The module's name.
    keys : Mapping
        Its keys by kind.
    shapes : Mapping
        Every tensor's shape, by its key in the file.
    tensor : Callable
        Gives a tensor by its key.
    where : str
        The file's location, for messages.
    """

    module: str
    keys: Mapping[Kind, Key]
    shapes: Mapping[str, Shape]
    tensor: Tensors
    config: AdapterConfig
    matcher: Matcher
    base: BaseIndex | None
    where: str

    def has(self, kind: Kind) -> bool:
        """Say whether there is a tensor of ``kind``."""
        return kind in self.keys

    def shape(self, kind: Kind) -> Shape:
        """Return the shape of the tensor of ``kind``."""
        return self.shapes[self.keys[kind].text]

    def get(self, kind: Kind) -> torch.Tensor | None:
        """Return the tensor of ``kind``, or ``None``."""
        return self.tensor(self.keys[kind].text) if kind in self.keys else None

    def fail(self, text: str) -> NoReturn:
        """Refuse the file, because of this module."""
        raise AdapterFormatError(f"{self.where}: module {self.module!r} {text}")

    def pair(self, first: Kind, second: Kind) -> tuple[Shape, Shape]:
        """Return the shapes of A and B, both there, both matrices, of one rank."""
        for kind, other in ((first, second), (second, first)):
            if not self.has(kind):
                self.fail(f"has lora_{other} but no lora_{kind}; the file is incomplete, save it again")
        a, b = self.shape(first), self.shape(second)
        if len(a) != 2 or len(b) != 2:
            if len(a) > 2:
                raise AdapterUnsupportedError(
                    f"{self.where}: module {self.module!r} is a convolution (lora_{first} has shape"
                    f" {list(a)}); only linear and embedding layers are applied"
                )
            self.fail(f"has lora_{first} {list(a)} and lora_{second} {list(b)}, expected two matrices")
        if a[0] != b[1] or a[0] == 0:
            self.fail(f"has rank {a[0]} in lora_{first} {list(a)} and {b[1]} in lora_{second} {list(b)}")
        return a, b

    def scale(self, name: str, rank: int) -> float:
        """Return the scale of ``name``, after the config's rank was compared with the tensors'."""
        said = self.matcher.rank(name)
        if said != rank:
            self.fail(f"has rank {rank} in its tensors but {said} by r or rank_pattern; one of them is wrong")
        return self.config.scale(rank, self.matcher.alpha(name))

    def weight(self) -> Shape | None:
        """Return the base weight's shape, or ``None`` when no base was given."""
        if self.base is None:
            return None
        shape = self.base.shape(f"{self.module}.weight")
        if shape is None:
            raise AdapterBaseError(
                f"{self.where}: module {self.module!r} has no weight in the base {self.base.name}"
            )
        return shape

    def vector(self, kind: Kind, length: int, switch: str, *, wanted: bool) -> torch.Tensor | None:
        """Return a vector that exists exactly when the config's ``switch`` is on."""
        if self.has(kind) and not wanted:
            self.fail(
                f"has a {self.keys[kind].text.rpartition(self.module)[2].strip('.')} but {switch} is false;"
                " the config does not belong to this file"
            )
        if not wanted:
            return None
        if not self.has(kind):
            self.fail(f"has no {kind} although {switch} is true; the file is incomplete")
        if self.shape(kind) != (length,):
            self.fail(f"has a {kind} of shape {list(self.shape(kind))}, expected [{length}]")
        return self.get(kind)


def linear(parts: Parts) -> LowRank:
    """Make the update of a linear layer or a ``Conv1D``."""
    (rank, inside), (outside, _) = parts.pair("A", "B")
    config = parts.config
    return LowRank(
        a=parts.tensor(parts.keys["A"].text),
        b=parts.tensor(parts.keys["B"].text),
        scale=parts.scale(parts.module, rank),
        magnitude=parts.vector("magnitude", outside, "use_dora", wanted=config.dora),
        bias=parts.vector("B_bias", outside, "lora_bias", wanted=config.lora_bias),
        transposed=_is_transposed(parts, inside, outside),
    )


def embedding(parts: Parts) -> EmbeddingLowRank:
    """Make the update of an embedding."""
    (rank, vocabulary), (size, _) = parts.pair("embedding_A", "embedding_B")
    weight = parts.weight()
    if weight is not None and weight != (vocabulary, size):
        wrong_shape(parts, (vocabulary, size), weight)
    if parts.config.lora_bias:
        parts.fail("is an embedding, which lora_bias does not go with")
    return EmbeddingLowRank(
        a=parts.tensor(parts.keys["embedding_A"].text),
        b=parts.tensor(parts.keys["embedding_B"].text),
        scale=parts.scale(parts.module, rank),
        magnitude=parts.vector("magnitude", size, "use_dora", wanted=parts.config.dora),
    )


def _is_transposed(parts: Parts, inside: int, outside: int) -> bool:
    """Say whether the base stores the weight ``[in, out]``.

    Shapes decide. A square weight does not tell: then the base's model type does, as PEFT goes by the class
    of the module, and ``fan_in_fan_out`` only where the type is not known.
    """
    weight = parts.weight()
    if weight is None:
        return parts.config.fan_in_fan_out
    fits_plain, fits_transposed = weight == (outside, inside), weight == (inside, outside)
    if not fits_plain and not fits_transposed:
        wrong_shape(parts, (outside, inside), weight)
    if fits_plain != fits_transposed:
        return fits_transposed
    known = None if parts.base is None else parts.base.is_conv1d(parts.module)
    return parts.config.fan_in_fan_out if known is None else known


def wrong_shape(parts: Parts, adapter: Shape, base: Shape) -> NoReturn:
    """Refuse an adapter whose module has another shape than the base's."""
    assert parts.base is not None
    text = f"{parts.where}: module {parts.module!r} is for a weight of shape {list(adapter)}"
    raise AdapterBaseError(f"{text}, the base {parts.base.name} has {list(base)}{resized(adapter, base)}")


def resized(adapter: Shape, base: Shape) -> str:
    """Return the likely reason, when two shapes differ in their first dimension only, as vocabularies do."""
    if len(adapter) == len(base) == 2 and adapter[1] == base[1] and min(adapter[0], base[0]) > 0:
        return (
            f"; if this is a vocabulary, the tokenizer was resized from {base[0]} to {adapter[0]} tokens for"
            " the adapter: publish the base with resized embeddings and use that"
        )
    return "; the adapter was trained on another base"
