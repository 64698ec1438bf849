"""Modules of several inputs and outputs, replaced for some rows of a batch: split by row, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loadstone.adapters.attach import Attacher
from loadstone.adapters.updates import EmbeddingLowRank, Replacement, Update
from loadstone.errors import AdapterUnsupportedError

WIDTH = 6


class Inner(nn.Module):
    """Computes with its weight and whatever else it is given, in a way that each test chooses."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self._compute = compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run."""
        return self._compute(self.weight, *args, **kwargs)


class Outer(nn.Module):
    """Holds one."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = Inner(compute)


class Version:
    """One adapter that replaces the module."""

    attached_bytes = 1

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.weight = torch.randn(WIDTH)
        self.updates: dict[str, tuple[Update, ...]] = {"inner": (Replacement({"weight": self.weight}),)}


def gated(weight: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    return weight * x * torch.sigmoid(gate)


def masked(weight: Tensor, x: Tensor, mask: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    return weight * (mask @ x) * scale, (weight * x).flatten(0, 1)


def pyramid(
    weight: Tensor, maps: list[Tensor], *, offset: Tensor | None = None
) -> dict[str, Tensor] | Tensor:
    total = torch.stack([each.mean(1) for each in maps]).sum(0) * weight
    return total if offset is None else total + offset


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def states(rows: int, tokens: int) -> Tensor:
    return torch.randn(rows, tokens, WIDTH)


CASES: dict[str, tuple[Callable[..., Any], Callable[[int, int], Inputs]]] = {
    "a gate": (gated, lambda n, t: ((states(n, t), states(n, t)), {})),
    "a gate for all": (gated, lambda n, t: ((states(n, t), states(1, t)), {})),
    "a mask of tokens": (masked, lambda n, t: ((states(n, t), torch.randn(t, t)), {"scale": 2.0})),
    "lists": (pyramid, lambda n, t: (([states(n, t), states(n, t + 1)],), {"offset": torch.randn(WIDTH)})),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", [1, 3, 4, 8])
def test_each_row_of_a_module_of_several_inputs_has_its_own_replacement(case: str, tokens: int) -> None:
    torch.manual_seed(tokens)
    compute, inputs = CASES[case]
    model = Outer(compute).requires_grad_(requires_grad=False)
    first, second = Version(1), Version(2)
    rows = [first, None, second, first]  # as many as there are tokens in one case, which must not confuse
    args, kwargs = inputs(len(rows), tokens)
    with Attacher(model, 1 << 20).apply(rows):
        got = model.inner(*args, **kwargs)
    for row, version in enumerate(rows):
        weight = model.inner.weight if version is None else version.weight
        wanted = compute(weight, *args, **kwargs)
        if isinstance(wanted, tuple):
            torch.testing.assert_close(got[0][row], wanted[0][row])
            torch.testing.assert_close(
                got[1].unflatten(0, (4, -1))[row], wanted[1].unflatten(0, (4, -1))[row]
            )
        else:
            torch.testing.assert_close(got[row], wanted[row])


class Cache:
    """Something that is written to."""


@pytest.mark.parametrize(
    ("compute", "args", "says"),
    [
        (
            lambda w, x, cache: w * x,
            (torch.ones(2, WIDTH), Cache()),
            "called with a Cache, which cannot be split",
        ),
        (lambda w, x: {"x": w * x}, (torch.ones(2, WIDTH),), "returns a dict, which cannot be put together"),
        (lambda w, x: (w * x).sum(), (torch.ones(2, WIDTH),), r"returns a tensor of shape \[\] for 1 rows"),
        (lambda w, x: w * x, (torch.ones(3, WIDTH),), "input of 3 rows in a mixed batch of 2"),
    ],
    ids=["a cache", "a dict", "a sum", "another count"],
)
def test_what_cannot_be_split_by_row_is_refused_and_runs_alone(
    compute: Callable[..., Any], args: tuple[Any, ...], says: str
) -> None:
    model = Outer(compute).requires_grad_(requires_grad=False)
    version = Version(1)
    attacher = Attacher(model, 1 << 20)
    with pytest.raises(AdapterUnsupportedError, match=says) as caught, attacher.apply([version, None]):
        model.inner(*args)
    assert "batches of their own" in str(caught.value)
    with attacher.apply([version, version]):
        assert model.inner(*args) is not None
    assert "forward" not in model.inner.__dict__


class Positions(nn.Module):
    """Looks up positions, which are the same for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(9, WIDTH)
        self.relative_attention_bias = nn.Embedding(9, WIDTH)


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("inner", torch.arange(2)),
        ("inner", torch.arange(2)[None]),
        ("relative_attention_bias", torch.arange(4).view(2, 2)),
    ],
)
@pytest.mark.parametrize("replaced", [True, False])
def test_positions_are_not_taken_for_rows_though_there_are_as_many(
    name: str, ids: Tensor, *, replaced: bool
) -> None:
    model = Positions().requires_grad_(requires_grad=False)
    version = Version(1)
    low_rank = EmbeddingLowRank(torch.ones(2, 9), torch.ones(WIDTH, 2), 1.0)
    version.updates = {name: (Replacement({"weight": torch.ones(9, WIDTH)}) if replaced else low_rank,)}
    attacher = Attacher(model, 1 << 20)
    with (
        pytest.raises(AdapterUnsupportedError, match=r"of (its|their) own"),
        attacher.apply([version, None]),
    ):
        model.get_submodule(name)(ids)
    with attacher.apply([version, version]):
        assert model.get_submodule(name)(ids).shape == (*ids.shape, WIDTH)
