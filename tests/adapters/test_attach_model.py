"""The model that adapters are applied to: shared, never written, and untouched outside a batch."""

import copy
import hashlib
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapter_zoo import Zoo, applied, build_zoo, some_ids
from tests.support.peft_adapters import llama
from tests.support.plain_adapters import Base, answer, inputs, pool_over, run, write
from torch import Tensor, nn

from loadstone.adapters import fit
from loadstone.adapters.attach import Attacher
from loadstone.adapters.pool import AdapterPool
from loadstone.adapters.updates import EmbeddingLowRank, LowRank, Replacement, TokenRows, Update
from loadstone.errors import AdapterBaseError, AdapterError, AdapterUnsupportedError
from loadstone.loader.modules.load import load_model

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "down_proj"]},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "saved": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 1]}},
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return build_zoo(tmp_path_factory.mktemp("llama"), llama, CONFIGS)


def digest(model: nn.Module) -> str:
    """Hash every parameter's bytes, its address and which object it is."""
    state = hashlib.sha256()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        state.update(f"{name} {id(parameter)} {parameter.data_ptr()} {parameter._version}".encode())
        state.update(parameter.detach().numpy().tobytes())
    return state.hexdigest()


def traces(model: nn.Module) -> list[str]:
    """Name every module that has a hook or a forward of its own."""
    return [
        name
        for name, module in model.named_modules()
        if "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks
    ]


def test_the_base_is_never_written_and_the_model_is_as_before(zoo: Zoo) -> None:
    model = load_model(str(zoo.base), wait=True)
    ids = some_ids(5)
    with torch.no_grad():
        before = model(ids).logits
    bytes_before, traces_before = digest(model), traces(model)
    with zoo.pool(model) as pool:
        for names in (["plain"] * 5, ["saved"] * 5, ["plain", "dora", "saved", "tokens", None]):
            assert not torch.equal(applied(pool, model, list(names), ids), before)
    assert digest(model) == bytes_before
    assert traces(model) == traces_before
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


def test_adapters_attach_while_the_bases_bytes_are_pending(zoo: Zoo) -> None:
    ids = some_ids(4)
    for names in (["plain"] * 4, ["dora"] * 4, ["saved"] * 4, ["tokens"] * 4, list(CONFIGS)):
        model = load_model(str(zoo.base))
        reference = zoo.make()
        with zoo.pool(model) as pool, zoo.pool(reference) as other:
            assert torch.equal(applied(pool, model, names, ids), applied(other, reference, names, ids))


def test_nothing_is_left_after_an_exception_in_a_forward(tmp_path: Path) -> None:
    class Breaking(Base):
        broken = False

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if self.broken:
                raise RuntimeError("broken")
            return out

    model = Breaking()
    x = inputs(3)
    for seed, name in enumerate("abc"):
        write(tmp_path, name, seed)
    expected = [answer(model, tmp_path / name, x) for name in "abc"]
    base = answer(model, None, x)
    with pool_over(model, tmp_path) as pool:
        for rows in (["a"] * 3, ["a", "b", "c"], ["a", None, None]):
            model.broken = True
            with pytest.raises(RuntimeError, match="broken"):
                run(pool, model, list(rows), x)
            assert traces(model) == []
            model.broken = False
            assert torch.equal(model(x), base)
            torch.testing.assert_close(run(pool, model, ["b"] * 3, x), expected[1])
        assert pool.status("a").holders == ()


def test_a_forward_of_somebody_else_is_put_back(tmp_path: Path) -> None:
    model = Base()
    x = inputs()
    write(tmp_path, "a", 0)
    expected = answer(model, tmp_path / "a", x)
    calls: list[int] = []
    original = model.first.forward

    def counted(value: Tensor) -> Tensor:
        calls.append(1)
        return original(value)

    model.first.__dict__["forward"] = counted
    with pool_over(model, tmp_path) as pool:
        torch.testing.assert_close(run(pool, model, ["a"], x), expected)
    assert calls == [1]
    assert model.first.__dict__["forward"] is counted


def test_apply_inside_apply_is_refused_and_not_a_deadlock(tmp_path: Path) -> None:
    model = Base()
    write(tmp_path, "a", 0)
    with pool_over(model, tmp_path) as pool, pool.lease(["a"]) as lease, pool.apply(lease.rows):
        with pytest.raises(AdapterError, match="inside apply"), pool.apply(lease.rows):
            pass
        assert model(inputs()).shape == (1, 8)


def test_a_forward_by_another_thread_is_an_error_and_not_a_wrong_answer(tmp_path: Path) -> None:
    model = Base()
    write(tmp_path, "a", 0)
    caught: list[BaseException] = []

    def forward() -> None:
        try:
            model(inputs())
        except AdapterError as error:
            caught.append(error)

    with pool_over(model, tmp_path) as pool, pool.lease(["a"]) as lease, pool.apply(lease.rows):
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
    assert "another thread" in str(caught[0])


def test_batches_may_be_run_in_and_out_of_inference_mode(tmp_path: Path) -> None:
    model = Base()
    x = inputs(3)
    for seed, name in enumerate("abc"):
        write(tmp_path, name, seed)
    rows: list[str | None] = ["a", "b", "c"]
    with pool_over(model, tmp_path) as pool, pool.lease(rows) as lease:
        with torch.inference_mode(), pool.apply(lease.rows):
            first = model(x).clone()
        with pool.apply(lease.rows):
            again = model(x)  # in grad mode: what inference mode left behind must not be in the way
            again.sum().backward()
        assert torch.equal(first, again)


def test_inputs_given_by_keyword_and_of_any_rank(tmp_path: Path) -> None:
    model = Base()
    write(tmp_path, "a", 0)
    write(tmp_path, "b", 1)
    x = torch.randn(2, 3, 4, 8)
    expected = torch.stack([answer(model, tmp_path / "a", x[0]), answer(model, tmp_path / "b", x[1])])
    with pool_over(model, tmp_path) as pool, pool.lease(["a", "b"]) as lease, pool.apply(lease.rows):
        got = model.second(input=torch.tanh(model.first(input=x)))
    torch.testing.assert_close(got, expected)


def test_a_mixed_batch_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    model = Base()
    write(tmp_path, "a", 0)
    write(tmp_path, "b", 1)
    with pool_over(model, tmp_path) as pool:
        with pytest.raises(AdapterUnsupportedError, match="3 rows in a mixed batch of 2"):
            run(pool, model, ["a", "b"], inputs(3))
        assert traces(model) == []
        run(pool, model, ["a"], inputs(3))


def test_a_deep_copy_made_outside_a_batch_is_a_plain_base(tmp_path: Path) -> None:
    model = Base()
    write(tmp_path, "a", 0)
    with pool_over(model, tmp_path) as pool:
        run(pool, model, ["a"], inputs())
        copied = copy.deepcopy(model)
        assert torch.equal(copied(inputs()), answer(model, None, inputs()))


class Parts(nn.Module):
    """One module of each kind that matters to the checks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def low_rank(inside: int, outside: int) -> LowRank:
    return LowRank(torch.ones(2, inside), torch.ones(outside, 2), 1.0)


def all_of(module: nn.Module) -> Replacement:
    return Replacement({name: parameter.detach() for name, parameter in module.named_parameters()})


@pytest.mark.parametrize(
    ("updates", "error", "message"),
    [
        ({"absent": (low_rank(4, 6),)}, AdapterBaseError, "absent, which the model does not have"),
        ({"linear": (low_rank(6, 4),)}, AdapterBaseError, r"shape \[6, 4\] in the model.*\[4, 6\]"),
        ({"norm": (low_rank(4, 4),)}, AdapterUnsupportedError, "for a linear layer.*LayerNorm"),
        ({"attention.out_proj": (low_rank(4, 4),)}, AdapterUnsupportedError, "MultiheadAttention"),
        (
            {"embedding": (EmbeddingLowRank(torch.ones(2, 12), torch.ones(4, 2), 1.0),)},
            AdapterBaseError,
            r"\[10, 4\].*\[12, 4\]",
        ),
        (
            {"linear": (EmbeddingLowRank(torch.ones(2, 6), torch.ones(4, 2), 1.0),)},
            AdapterUnsupportedError,
            "embedding",
        ),
        ({"embedding": (TokenRows((3, 10), torch.ones(2, 4)),)}, AdapterBaseError, "token 10.*has 10"),
        ({"embedding": (TokenRows((3,), torch.ones(1, 5)),)}, AdapterBaseError, r"\[4\].*\[5\]"),
        ({"linear": (Replacement({"weight": torch.ones(6, 4)}),)}, AdapterBaseError, "bias"),
        ({"linear": (all_of(nn.Linear(4, 7)),)}, AdapterBaseError, r"\[6, 4\].*\[7, 4\]"),
        (
            {"head": (all_of(Parts().head),), "head.0": (low_rank(4, 4),)},
            AdapterUnsupportedError,
            "replaces head and also changes head.0",
        ),
        ({"linear": (low_rank(4, 6), low_rank(4, 6))}, AdapterUnsupportedError, "twice"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_attached(
    updates: dict[str, tuple[Update, ...]], error: type[AdapterError], message: str
) -> None:
    modules = dict(Parts().named_modules())
    with pytest.raises(error, match=message):
        fit.check(modules, updates)


class Version:
    def __init__(self, uid: int, updates: dict[str, tuple[Update, ...]]) -> None:
        self.uid = uid
        self.updates = updates
        self.attached_bytes = 1


def test_a_replaced_block_is_run_with_its_own_parameters_in_mixed_batches_too() -> None:
    model = Parts()
    other = Parts()
    x = torch.randn(3, 4)
    whole = Version(1, {"head": (all_of(other.head),)})
    attacher = Attacher(model, 1 << 20)
    with attacher.apply([whole] * 3):
        assert torch.equal(model.head(x), other.head(x))
    with attacher.apply([whole, None, whole]):
        got = model.head(x)
    torch.testing.assert_close(got, torch.stack([other.head(x)[0], model.head(x)[1], other.head(x)[2]]))


def test_a_replaced_block_and_a_change_inside_it_share_a_batch() -> None:
    model, other = Parts(), Parts()
    whole = Version(1, {"head": (all_of(other.head),)})
    inner = Version(2, {"head.0": (low_rank(4, 4),)})
    attacher = Attacher(model, 1 << 20)
    x = torch.randn(3, 4)
    with attacher.apply([inner] * 3):
        changed = model.head(x)
    with attacher.apply([whole, None, inner]):
        got = model.head(x)
        with pytest.raises(AdapterUnsupportedError, match=r"head\.0 was called from outside"):
            model.head[0](x)
    torch.testing.assert_close(got, torch.stack([other.head(x)[0], model.head(x)[1], changed[2]]))
    assert not torch.equal(changed, model.head(x))


def test_two_pools_over_one_model_take_turns(tmp_path: Path) -> None:
    model = Base()
    x = inputs(2)
    wanted = {name: answer(model, write(tmp_path, name, seed), x) for seed, name in enumerate("ab")}
    plain = model(x)

    def ask(pool: AdapterPool, name: str) -> None:
        for _ in range(200):
            torch.testing.assert_close(run(pool, model, [name] * 2, x), wanted[name])

    with pool_over(model, tmp_path) as first, pool_over(model, tmp_path) as second:
        with ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(ask, first, "a"), threads.submit(ask, second, "b")]
        for each in asked:
            each.result()
        with first.apply([None]), pytest.raises(AdapterError, match="inside apply"), second.apply([None]):
            pass
    assert traces(model) == []
    assert torch.equal(model(x), plain)
