"""Puts a checkpoint's tensors into a module, without reading them.

`bind` decides for every parameter and persistent buffer which tensor of the checkpoint it is, checks shapes
and dtypes from the headers alone, and only then changes the module: a module is bound whole or not at all.
Bytes that are here become plain parameters at once; the others become pending ones.

Ownership: one thread binds a module; the bound module may then be used by any number of threads.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from loadstone.errors import BindError
from loadstone.loader.format.header import TensorInfo
from loadstone.loader.modules.arrived import arrived
from loadstone.loader.modules.pending import (
    Arrival,
    Pending,
    PendingBuffer,
    PendingParameter,
    pending,
    redirect,
    settle,
)
from loadstone.loader.tensors.device import to_device
from loadstone.loader.tensors.views import torch_dtype, torch_shape

if TYPE_CHECKING:
    from loadstone.loader.checkpoint import Checkpoint

Modules = Sequence[tuple[str, nn.Module]]
"""A module and all below it, by name; one that has several names comes several times."""
Rename = Mapping[str, str] | Callable[[str], str] | None
SHOWN = 5
"""How many names an error lists."""

# Modules that choose their arithmetic by looking for tensor subclasses among their parameters: with a pending
# one they would take another path than with a plain one, whose results differ in the last bits.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


@dataclass(frozen=True, slots=True)
class BindReport:
    """What `bind` did.

    Attributes
    ----------
    bound : mapping
        The module's names, in its own order, and the checkpoint's tensor that each one now is.
    tied : mapping
        Names that share the tensor of another name of the module, because the checkpoint stores it once.
    missing, unexpected : tuple of str
        The module's names that the checkpoint lacks, left as they were; the checkpoint's names that the
        module has no place for. Empty when ``strict``.
    cast : tuple of str
        Names whose tensor is a converted copy, because the module's dtype is another.
    """

    bound: Mapping[str, str]
    tied: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: tuple[str, ...]


@dataclass(slots=True)
class _Slot:
    """One place of a module that holds a tensor; several names lead to it when modules are shared."""

    module: nn.Module
    attribute: str
    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)
    source: str | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def device(self) -> torch.device:
        """Where its tensor belongs; the CPU for one that is only a shape so far."""
        return torch.device("cpu") if self.tensor.is_meta else self.tensor.device


def bind(
    module: nn.Module,
    checkpoint: "Checkpoint",
    *,
    prefix: str = "",
    rename: Rename = None,
    strict: bool = True,
    dtype: Literal["error", "cast"] = "error",
    wait: bool = False,
) -> BindReport:
    """Make the parameters and persistent buffers of ``module`` the tensors of ``checkpoint``.

    Nothing is read: each parameter waits for its own bytes at its first use. The module may have been built
    on the meta device. Parameters are bound with ``requires_grad=False``. Names that share one parameter
    share one tensor when the checkpoint stores it once; when it stores each, each gets its own. Two modules
    bound to one checkpoint share memory, so that writing in place into one changes the other.

    Parameters
    ----------
    module : nn.Module
        What to fill.
    checkpoint : Checkpoint
        Where from.
    prefix : str
        Stands before every name in the checkpoint (``"model."``); other tensors are left alone.
    rename : mapping or callable, optional
        From a name of the module to the checkpoint's name, without ``prefix``.
    strict : bool
        Refuse missing and unexpected names. Without it they are reported, and what is missing stays as it is.
    dtype : {"error", "cast"}
        What to do when the checkpoint's dtype is not the module's: refuse, or convert, which costs a copy.
    wait : bool
        Return only when every byte is here, leaving no pending parameter; needed before code that torch
        functions cannot see, such as CUDA graph capture, ``torch.export`` or an extension in C++.

    Raises
    ------
    BindError
        Names, shapes or dtypes do not fit, or a buffer that no checkpoint stores is on the meta device. The
        module is unchanged.
    """
    modules = list(module.named_modules(remove_duplicate=False))  # walking them takes long: once is enough
    slots = _slots(modules)
    known = _choose_sources(slots, checkpoint, prefix, rename)
    infos = {slot.source: checkpoint.info(slot.source) for slot in slots if slot.source is not None}
    tied = _tied(slots)
    missing = tuple(slot.name for slot in slots if slot.source is None and slot.name not in tied)
    unexpected = tuple(name for name in checkpoint if name.startswith(prefix) and name not in known)
    _check_fit(slots, infos, checkpoint.name, dtype)
    if strict:
        _check_names(module, missing, unexpected, checkpoint.name, prefix)
    restore = _unstored_buffers(module, modules)
    _fill(slots, infos, tied, checkpoint)
    restore()
    settle_before_fused_paths({id(child): child for _, child in modules}.values())
    report = BindReport(
        bound={name: slot.source for slot in slots if slot.source is not None for name in slot.names},
        tied=tied,
        missing=missing,
        unexpected=unexpected,
        cast=tuple(s.name for s in slots if s.source and torch_dtype(infos[s.source]) != s.tensor.dtype),
    )
    if wait:
        wait_for(module)
    return report


def wait_for(module: nn.Module, timeout: float | None = None) -> None:
    """Block until every byte of ``module`` is here and none of its parameters is pending.

    Raises
    ------
    LoadstoneError
        Bytes cannot be had, or ``timeout`` seconds went by (`StalledError`).
    """
    tensors = dict(pending_tensors(module))
    wanted: dict[int, tuple[Arrival, list[str]]] = {}
    for tensor in tensors.values():
        arrival = tensor.__dict__.get("_arrival")  # another thread may have used the tensor by now
        if arrival is not None:
            wanted.setdefault(id(arrival.checkpoint), (arrival, []))[1].extend(arrival.names)
    for arrival, names in wanted.values():
        arrival.checkpoint.wait(names, timeout)
    for tensor in tensors.values():
        settle(tensor)


def pending_tensors(module: nn.Module) -> Iterator[tuple[str, Pending]]:
    """Yield the parameters, then the buffers, of ``module`` that nobody has used yet, in its order."""
    for named in (module.named_parameters(), module.named_buffers()):
        for name, tensor in named:
            if isinstance(tensor, Pending):
                yield name, tensor


def settle_before_fused_paths(modules: Iterable[nn.Module]) -> None:
    """Let torch's fused attention modules wait for their parameters before they choose how to compute."""
    for child in modules:
        if isinstance(child, _FUSED) and any(True for _ in pending_tensors(child)):
            child.register_forward_pre_hook(_settle_first)


def _settle_first(module: nn.Module, _args: object) -> None:
    """Wait for everything below ``module`` and go, so that the module finds neither subclasses nor hooks."""
    wait_for(module)
    for child in module.modules():
        hooks = child._forward_pre_hooks
        for key in [key for key, hook in list(hooks.items()) if hook is _settle_first]:
            hooks.pop(key, None)  # another thread may have come first


def _slots(modules: Modules) -> list[_Slot]:
    """Return every place for a parameter or a persistent buffer, in the module's order."""
    slots: dict[tuple[int, str], _Slot] = {}
    for path, child in modules:
        tensors: dict[str, torch.Tensor | None] = child._parameters  # type: ignore[assignment]  # a dict is read only
        if child._buffers:
            passing = child._non_persistent_buffers_set
            tensors = {**tensors, **{k: b for k, b in child._buffers.items() if k not in passing}}
        for attribute, tensor in tensors.items():
            if tensor is not None:
                slot = slots.get((id(child), attribute))
                if slot is None:
                    slot = slots[id(child), attribute] = _Slot(child, attribute, tensor)
                slot.names.append(f"{path}.{attribute}" if path else attribute)
    return list(slots.values())


def _choose_sources(slots: list[_Slot], checkpoint: "Checkpoint", prefix: str, rename: Rename) -> set[str]:
    """Give each slot the tensor of its first name that is stored; return all names that have a place."""
    known = set()
    tied = checkpoint.tied
    for slot in slots:
        wanted = [prefix + _renamed(name, rename) for name in slot.names]
        stored = [tied.get(name, name) for name in wanted if name in checkpoint]
        slot.source = stored[0] if stored else None
        known.update(stored)
    return known


def _renamed(name: str, rename: Rename) -> str:
    if rename is None:
        return name
    return rename(name) if callable(rename) else rename.get(name, name)


def _tied(slots: list[_Slot]) -> dict[str, str]:
    """Return the names without a tensor of their own whose parameter is, in the module, another's too."""
    owners = {id(slot.tensor): slot.name for slot in reversed(slots) if slot.source is not None}
    return {s.name: owners[id(s.tensor)] for s in slots if s.source is None and id(s.tensor) in owners}


def _check_fit(slots: list[_Slot], infos: Mapping[str, TensorInfo], where: str, dtype: str) -> None:
    shapes, dtypes = [], []
    for slot in slots:
        if slot.source is None:
            continue
        info = infos[slot.source]
        if tuple(slot.tensor.shape) != torch_shape(info):
            shapes.append(f"{slot.name} is {list(slot.tensor.shape)}, stored {list(info.shape)}")
        elif torch_dtype(info) != slot.tensor.dtype:
            dtypes.append(f"{slot.name} is {slot.tensor.dtype}, stored {info.dtype}")
    if shapes:
        raise BindError(f"{where}: {len(shapes)} shapes differ from the module's: {some(shapes, '; ')}")
    if dtypes and dtype != "cast":
        raise BindError(
            f"{where}: {len(dtypes)} dtypes differ from the module's: {some(dtypes, '; ')}; "
            'build the module in the stored dtype, or pass dtype="cast" to convert, which copies'
        )


def _check_names(
    module: nn.Module, missing: tuple[str, ...], unexpected: tuple[str, ...], where: str, prefix: str
) -> None:
    problems = []
    if missing:
        problems.append(f"lacks {len(missing)} tensors of the module ({some(missing)})")
    if unexpected:
        problems.append(f"has {len(unexpected)} that the module has no place for ({some(unexpected)})")
    if problems:
        under = f" under the prefix {prefix!r}" if prefix else ""
        raise BindError(
            f"{where}{under} does not fit {type(module).__name__}: it {' and '.join(problems)}; "
            "check the module's configuration, pass prefix= or rename=, or strict=False"
        )


def some(names: tuple[str, ...] | list[str], separator: str = ", ") -> str:
    """Return the first few of ``names`` for a message."""
    more = f"{separator}and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return separator.join(names[:SHOWN]) + more


def _unstored_buffers(module: nn.Module, modules: Modules) -> Callable[[], None]:
    """Return what gives values to the buffers that no checkpoint stores and that are only shapes so far."""
    lost = unstored_meta_buffers(modules)
    if not lost:
        return lambda: None
    if "transformers" in sys.modules:  # otherwise the module cannot be one of its models
        from loadstone.loader.modules import architectures  # noqa: PLC0415  imports transformers

        if architectures.computes_buffers(module):
            return lambda: architectures.compute_buffers(module, modules)
    raise BindError(
        f"{len(lost)} buffers of {type(module).__name__} are on the meta device and stored nowhere "
        f"({some([*lost])}); build the module so that its buffers are real, and only its parameters on meta"
    )


def unstored_meta_buffers(modules: Modules) -> dict[str, nn.Module]:
    """Return the modules of the non-persistent buffers on the meta device, by the buffers' full names."""
    found: dict[tuple[int, str], tuple[str, nn.Module]] = {}
    for path, child in modules:
        for attribute in child._non_persistent_buffers_set:
            buffer = child._buffers.get(attribute)
            if buffer is not None and buffer.is_meta:
                name = f"{path}.{attribute}" if path else attribute
                found.setdefault((id(child), attribute), (name, child))
    return dict(found.values())


def _fill(
    slots: list[_Slot], infos: Mapping[str, TensorInfo], tied: Mapping[str, str], checkpoint: "Checkpoint"
) -> None:
    ready = checkpoint.get(arrived(checkpoint, infos))
    made: dict[tuple[str, torch.dtype, torch.device, bool], torch.Tensor] = {}
    by_name: dict[str, torch.Tensor] = {}
    for slot in slots:
        if slot.source is not None:
            key = (slot.source, slot.tensor.dtype, slot.device, isinstance(slot.tensor, nn.Parameter))
            if key not in made:
                made[key] = _arriving(slot, infos[slot.source], checkpoint, ready.get(slot.source))
            by_name[slot.name] = made[key]
    for slot in slots:
        owner = tied.get(slot.name, slot.name)
        if owner in by_name:
            setattr(slot.module, slot.attribute, by_name[owner])


def _arriving(
    slot: _Slot, info: TensorInfo, checkpoint: "Checkpoint", ready: torch.Tensor | None
) -> torch.Tensor:
    """Return the tensor for ``slot``: plain when its bytes are here, else pending."""
    name, dtype, device = info.name, slot.tensor.dtype, slot.device
    is_parameter = isinstance(slot.tensor, nn.Parameter)
    if ready is not None:
        ready = ready.to(device=device, dtype=dtype)
        return nn.Parameter(ready, requires_grad=False) if is_parameter else ready

    def make() -> torch.Tensor:
        return checkpoint[name].to(device=device, dtype=dtype)

    kind = PendingParameter if is_parameter else PendingBuffer
    return pending(kind, Arrival(checkpoint, (name,), make), torch_shape(info), dtype, device)


def move(module: nn.Module, device: str | torch.device) -> None:
    """Put the tensors of ``module`` on ``device``: plain ones now, pending ones when they are first used."""
    # With its number: pending tensors may be settled by a thread whose current device is another.
    target = torch.empty(0, device=device).device
    plain = []
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device == target:
            continue
        if isinstance(tensor, Pending):
            redirect(tensor, target)
        else:
            plain.append(tensor)
    contents = [("", tensor.data.contiguous()) for tensor in plain]
    for tensor, (_, moved) in zip(plain, to_device([contents], target), strict=True):
        tensor.data = moved
