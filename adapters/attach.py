"""Applies adapters over a shared base, for as long as one batch runs.

Outside `Attacher.apply` the model is untouched: no hook, no wrapper, no changed parameter. Inside, each
module that the batch's adapters change has its ``forward`` set on the instance, and one that they replace has
its parameters exchanged (`stand`); both are taken back whatever happens. The model must be run by the thread
that entered `apply`: a call by another thread at that time fails, because whether it is part of the batch
cannot be known, and either guess could be a wrong answer.

Concurrency: two locks are held from entering `apply` to leaving it, by the thread that runs the model. The
one of the model's `_Gate`, taken first, serialises apply and forward, for all attachers of a model together.
``_lock`` guards all state here (attached adapters, stacks, plans), which belongs to its holder. Other
threads only ask `is_attached`, `nbytes` and `runs_elsewhere`, check updates (what passed is noted in a table
that is only added to, one entry at a time), and hand over versions to drop through
`forget`, which does the work itself when nobody holds the lock and leaves it to the holder otherwise.
"""

import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from loadstone.adapters import fit, plan
from loadstone.adapters.compute import lasting
from loadstone.adapters.layout import FileUpdates, Layout
from loadstone.adapters.rows import Forward
from loadstone.adapters.stacks import STACK_FROM, Operations, Stack, Stacks
from loadstone.adapters.steps import Changes, Step
from loadstone.errors import AdapterError
from loadstone.loader.files import memory

_PLANS = 16
"""Most plans kept: of the memberships that batches had lately."""

_MOMENT = 0.2
"""Seconds after a batch in which the next one is expected."""


class Attachable(Protocol):
    """One adapter version, as far as attaching needs it."""

    @property
    def uid(self) -> int:
        """Never used for another version."""
        ...

    @property
    def updates(self) -> fit.Updates:
        """What it changes, already checked by `fit.check`."""
        ...

    @property
    def attached_bytes(self) -> int:
        """Bytes in use where the model computes while it is attached: what `Attacher.size` said."""
        ...


class Measurable(Protocol):
    """One adapter that was read, as far as `Attacher.size` needs it."""

    @property
    def updates(self) -> fit.Updates:
        """What it changes."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors as they are stored."""
        ...


@dataclass(frozen=True, slots=True)
class _Attached:
    changes: Changes
    low_rank: Operations
    nbytes: int


class Attacher:
    """The adapters attached to one model.

    Parameters
    ----------
    model : torch.nn.Module
        The base, shared; never written.
    limit : int
        Most bytes of attached adapters and stacks. Adapters of the batch at hand are attached even beyond it.
        0: a quarter of the memory that this process may use where the model computes.
    """

    def __init__(self, model: nn.Module, limit: int) -> None:
        self._modules = dict(model.named_modules())
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._limit = limit or _memory_of(self._device) // 4
        self._lock = threading.Lock()
        self._gate = _gate_of(model)
        self._attached: OrderedDict[int, _Attached] = OrderedDict()
        self._stacks = Stacks()
        self._plans: OrderedDict[tuple[int | None, ...], Mapping[str, _Patch]] = OrderedDict()
        self._gone: deque[int] = deque()
        self._checked: weakref.WeakKeyDictionary[Layout, int] = weakref.WeakKeyDictionary()

    @property
    def limit(self) -> int:
        """Most bytes of attached adapters and stacks."""
        return self._limit

    @property
    def nbytes(self) -> int:
        """Bytes in use by attached adapters and stacks."""
        return sum(each.nbytes for each in list(self._attached.values())) + self._stacks.nbytes

    def is_attached(self, uid: int) -> bool:
        """Say whether a version is attached now."""
        return uid in self._attached

    def runs_elsewhere(self) -> bool:
        """Say whether another thread is applying batches, now or a moment ago."""
        owner, ended = self._gate.last, self._gate.ended
        if owner is None or owner == threading.get_ident():
            return False
        return self._gate.owner == owner or time.monotonic() - ended < _MOMENT

    def check(self, updates: fit.Updates) -> int:
        """See `fit.check`; any thread. Updates of a layout that passed before pass again."""
        if not isinstance(updates, FileUpdates):
            return fit.check(self._modules, updates)
        known = self._checked.get(updates.layout)
        if known is None:
            known = self._checked[updates.layout] = fit.check(self._modules, updates)
        return known

    def size(self, adapter: Measurable) -> int:
        """Check an adapter, and return how many bytes it takes, attached, where the model computes.

        On the CPU it is computed with as it lies in its mapped file, which counts; elsewhere all is copied.
        """
        copies = self.check(adapter.updates)
        return copies + adapter.nbytes if self._device.type == "cpu" else copies

    @contextmanager
    def apply(self, rows: Sequence[Attachable | None]) -> Iterator[None]:
        """Let each row of the batches run inside have its own adapter, or none.

        Raises
        ------
        AdapterUnsupportedError
            These adapters cannot share a batch.
        AdapterError
            This thread is inside `apply` already.
        """
        if self._gate.owner == threading.get_ident():
            raise AdapterError("apply was called inside apply; leave the first batch before starting another")
        with self._gate.lock, self._lock, ExitStack() as held:
            patches: Mapping[str, _Patch] = {}
            try:
                self._drop_gone()
                patches = self._patches(rows)
                self._gate.enter()
                for patch in patches.values():
                    patch.set(held)
                yield
            finally:
                held.close()
                for patch in patches.values():
                    patch.unset()
                self._gate.leave()
                self._drop_gone()
        self._sweep()

    def forget(self, uid: int) -> None:
        """Drop everything kept for a version, at the latest when the batch at hand ends; any thread."""
        self._gone.append(uid)
        self._sweep()

    def _sweep(self) -> None:
        while self._gone and self._lock.acquire(blocking=False):
            try:
                self._drop_gone()
            finally:
                self._lock.release()

    def _drop_gone(self) -> None:
        while self._gone:
            self._detach(self._gone.popleft())

    def _patches(self, rows: Sequence[Attachable | None]) -> "Mapping[str, _Patch]":
        versions = {row.uid: row for row in rows if row is not None}
        if not versions:
            return {}
        uniform = len(versions) == 1 and None not in rows
        key = tuple(versions) if uniform else tuple(None if row is None else row.uid for row in rows)
        known = self._plans.get(key)
        for uid, version in versions.items():
            self._attach(uid, version, versions.keys())
        if known is None:
            steps = self._plan(key, uniform=uniform)
            known = {name: _Patch(self._modules[name], step, self._gate) for name, step in steps.items()}
            self._plans[key] = known
            while len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return known

    def _plan(self, key: tuple[int | None, ...], *, uniform: bool) -> plan.Plan:
        members = {uid: self._attached[uid] for uid in dict.fromkeys(key) if uid is not None}
        if uniform:
            return plan.uniform(next(iter(members.values())).changes)
        stack: Stack | None = None
        if len(members) >= STACK_FROM:
            with lasting():
                stack = self._stacks.serve(
                    {uid: each.low_rank for uid, each in members.items()},
                    lambda nbytes: self._make_room(nbytes, members.keys()),
                )
            if self._stacks.trim():
                self._plans.clear()  # a plan would keep the stack that it was made with, uncounted
        changes = {uid: each.changes for uid, each in members.items()}
        return plan.mixed(key, changes, stack, self._device, self._modules)

    def _attach(self, uid: int, version: Attachable, batch: Container[int]) -> None:
        if uid in self._attached:
            self._attached.move_to_end(uid)
            return
        self._make_room(version.attached_bytes, batch)
        with lasting():
            changes = fit.build(self._modules, version.updates)
        low_rank = {name: change.low_rank for name, change in changes.items() if change.low_rank is not None}
        self._attached[uid] = _Attached(changes, low_rank, version.attached_bytes)

    def _make_room(self, nbytes: int, batch: Container[int]) -> bool:
        """Drop what ``batch`` does not need until ``nbytes`` more fit, what is cheapest to redo first."""
        idle = [uid for uid in self._attached if uid not in batch]
        for uid in [uid for uid in idle if not self._stacks.hold(uid)]:
            if self.nbytes + nbytes > self._limit:
                self._detach(uid)
        while self.nbytes + nbytes > self._limit and self._stacks.drop_oldest():
            self._plans.clear()
        for uid in idle:
            if self.nbytes + nbytes > self._limit:
                self._detach(uid)
        return self.nbytes + nbytes <= self._limit

    def _detach(self, uid: int) -> None:
        self._attached.pop(uid, None)
        if self._stacks.hold(uid):
            self._stacks.forget(uid)
            self._plans.clear()
        for key in [key for key in self._plans if uid in key]:
            del self._plans[key]


def _memory_of(device: torch.device) -> int:
    """Return how many bytes this process may use where a model computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return memory.limit()


class _Gate:
    """Which thread runs one model under `apply` now, and which did last."""

    __slots__ = ("ended", "last", "lock", "owner")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None
        self.last: int | None = None
        self.ended = 0.0

    def enter(self) -> None:
        self.owner = self.last = threading.get_ident()

    def leave(self) -> None:
        self.ended = time.monotonic()
        self.owner = None


_gates: "weakref.WeakKeyDictionary[nn.Module, _Gate]" = weakref.WeakKeyDictionary()
_gates_lock = threading.Lock()


def _gate_of(model: nn.Module) -> _Gate:
    """Return the model's one gate: patches of two attachers must not be set and unset in turns."""
    with _gates_lock:
        return _gates.setdefault(model, _Gate())


class _Patch:
    """What stands as one module's ``forward`` while a batch is applied."""

    __slots__ = ("_forward", "_gate", "_module", "_own", "_step")

    def __init__(self, module: nn.Module, step: Step, gate: _Gate) -> None:
        self._module = module
        self._step = step
        self._gate = gate
        self._own: object = None
        self._forward: Forward = module.forward

    def set(self, held: ExitStack) -> None:
        state = self._module.__dict__
        self._own = state.get("forward")
        self._forward = self._module.forward
        state["forward"] = self
        during = self._step.during()
        if during is not None:
            held.enter_context(during)

    def unset(self) -> None:
        state = self._module.__dict__
        if state.get("forward") is self:
            if self._own is None:
                del state["forward"]
            else:
                state["forward"] = self._own

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self._gate.owner != threading.get_ident():
            raise AdapterError(
                "the model was called by another thread than the one that applies adapters to it; run every "
                "forward inside apply, in the thread that entered it"
            )
        return self._step(self._module, self._forward, args, kwargs)
