"""Low-rank matrices of many adapters side by side, so that a mixed batch costs one pair of products a module.

A `Stack` serves any batch whose adapters are all in it: when a request ends its rows simply stop being asked
for, and a newcomer is appended, so that only the newcomer's bytes are copied. Buckets keep one exact rank
each, so nothing is padded: a row's result is the plain product's, but for rounding where torch has another
kernel for a batch of tiny matrices (seen below a width of 64: one unit in the last place). Members are never
moved or overwritten, which keeps every arrangement made earlier valid.

Owned by whoever holds the pool's forward lock; nothing here takes a lock.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loadstone.adapters.compute import Linear

STACK_FROM = 3
"""Fewest distinct adapters of a batch that are worth a stack; below, each is computed by itself."""

MOST_STACKS = 4
"""Most stacks kept, for batches that take turns."""


@dataclass(frozen=True, slots=True)
class BucketKey:
    """What operations must have in common to be stacked."""

    rank: int
    dtype: torch.dtype
    has_bias: bool
    is_dora: bool

    @classmethod
    def of(cls, operation: Linear) -> "BucketKey":
        """Return the key of one operation."""
        return cls(operation.a.shape[0], operation.a.dtype, operation.bias is not None, operation.is_dora)


class Bucket:
    """The stacked matrices of one module's operations that share a key.

    Attributes
    ----------
    a, b : torch.Tensor
        ``[capacity, r, in]`` and ``[capacity, out, r]``.
    bias : torch.Tensor or None
        ``[capacity, 1, out]``.
    slots : dict
        Where each member stands.
    """

    __slots__ = ("a", "b", "bias", "slots")

    def __init__(self, operations: Mapping[int, Linear]) -> None:
        self.slots: dict[int, int] = {}
        first = next(iter(operations.values()))
        self.a = _empty(len(operations), first.a)
        self.b = _empty(len(operations), first.b)
        self.bias = None if first.bias is None else _empty(len(operations), first.bias[None])
        for member, operation in operations.items():
            self.add(member, operation)

    @property
    def nbytes(self) -> int:
        """Bytes of the stacked matrices, room to grow included."""
        return self.a.nbytes + self.b.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def add(self, member: int, operation: Linear) -> None:
        """Copy one more operation in."""
        slot = len(self.slots)
        if slot == len(self.a):
            self.a, self.b = _grown(self.a), _grown(self.b)
            self.bias = None if self.bias is None else _grown(self.bias)
        self.a[slot].copy_(operation.a)
        self.b[slot].copy_(operation.b)
        if self.bias is not None and operation.bias is not None:
            self.bias[slot].copy_(operation.bias)
        self.slots[member] = slot


Operations = Mapping[str, Linear]
"""One adapter's low-rank operations, by module."""


class Stack:
    """Some adapters' low-rank operations, stacked for each module they touch.

    Attributes
    ----------
    members : set of int
        Whose operations it holds.
    nbytes : int
        Bytes of its matrices.
    """

    def __init__(self, members: Mapping[int, Operations]) -> None:
        grouped: dict[str, dict[BucketKey, dict[int, Linear]]] = {}
        for member, operations in members.items():
            for module, operation in operations.items():
                buckets = grouped.setdefault(module, {})
                buckets.setdefault(BucketKey.of(operation), {})[member] = operation
        self.members = set(members)
        self.nbytes = 0
        self._buckets = {
            module: {key: Bucket(operations) for key, operations in buckets.items()}
            for module, buckets in grouped.items()
        }
        self._count()

    def add(self, member: int, operations: Operations) -> None:
        """Append one more adapter."""
        for module, operation in operations.items():
            buckets = self._buckets.setdefault(module, {})
            key = BucketKey.of(operation)
            if key in buckets:
                buckets[key].add(member, operation)
            else:
                buckets[key] = Bucket({member: operation})
        self.members.add(member)
        self._count()

    def growth(self, adapters: Iterable[Operations]) -> int:
        """Return how many bytes appending these adapters takes, room to grow included."""
        sizes: dict[tuple[str, BucketKey], tuple[int, int]] = {}
        for module, operation in (pair for each in adapters for pair in each.items()):
            key = BucketKey.of(operation)
            count, _ = sizes.get((module, key), (0, 0))
            sizes[module, key] = count + 1, operation.nbytes
        total = 0
        for (module, key), (count, nbytes) in sizes.items():
            bucket = self._buckets.get(module, {}).get(key)
            before = 0 if bucket is None else len(bucket.a)
            wanted = count if bucket is None else len(bucket.slots) + count
            capacity = before or 1
            while capacity < wanted:
                capacity *= 2
            total += (capacity - before) * nbytes
        return total

    def bucket(self, module: str, operation: Linear) -> Bucket:
        """Return the bucket that holds ``operation`` of ``module``."""
        return self._buckets[module][BucketKey.of(operation)]

    def _count(self) -> None:
        # Kept, not computed when asked: other threads ask, and must not walk what is being changed.
        self.nbytes = sum(bucket.nbytes for buckets in self._buckets.values() for bucket in buckets.values())


class Stacks:
    """The stacks in use, least recently used first."""

    def __init__(self) -> None:
        self._stacks: list[Stack] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all stacks; any thread may ask."""
        return sum(stack.nbytes for stack in tuple(self._stacks))

    def serve(self, members: Mapping[int, Operations], make_room: Callable[[int], bool]) -> Stack | None:
        """Return a stack that holds ``members``, made or extended if need be.

        ``make_room(nbytes)`` says whether that many more bytes may be used; when not, there is no stack.
        """
        stack = self._suitable(set(members))
        held = set() if stack is None else stack.members
        missing = {member: operations for member, operations in members.items() if member not in held}
        grows = stack is not None and (not missing or make_room(stack.growth(missing.values())))
        if stack is not None and grows and stack in self._stacks:  # making room may have dropped it
            for member, operations in missing.items():
                stack.add(member, operations)
            self._stacks.remove(stack)
        elif make_room(_size(members.values())):
            stack = Stack(members)
        else:
            return None
        self._stacks.append(stack)
        return stack

    def trim(self) -> bool:
        """Drop the least recently used stacks beyond `MOST_STACKS`; say whether there were any."""
        spare = self._stacks[:-MOST_STACKS]
        del self._stacks[:-MOST_STACKS]
        return bool(spare)

    def hold(self, member: int) -> bool:
        """Say whether any stack holds ``member``."""
        return any(member in stack.members for stack in self._stacks)

    def drop_oldest(self) -> bool:
        """Drop the least recently used stack; ``False`` when there is none."""
        if not self._stacks:
            return False
        del self._stacks[0]
        return True

    def forget(self, member: int) -> None:
        """Drop every stack that holds ``member``."""
        self._stacks = [stack for stack in self._stacks if member not in stack.members]

    def _suitable(self, members: set[int]) -> Stack | None:
        """Return the stack that lacks fewest of ``members`` and would hold at most as many others again."""
        best: Stack | None = None
        for stack in reversed(self._stacks):
            lacking = len(members - stack.members)
            fits = len(members | stack.members) <= 2 * len(members)
            if fits and (best is None or lacking < len(members - best.members)):
                best = stack
        return best


def _size(adapters: Iterable[Operations]) -> int:
    return sum(operation.nbytes for operations in adapters for operation in operations.values())


def _empty(count: int, like: Tensor) -> Tensor:
    return torch.empty((count, *like.shape), dtype=like.dtype, device=like.device)


def _grown(stacked: Tensor) -> Tensor:
    larger = _empty(2 * len(stacked), stacked[0])
    larger[: len(stacked)].copy_(stacked)
    return larger
