"""`bind` makes a module's parameters the checkpoint's tensors, wholly or not at all."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.modules.conftest import Saved
from tests.support.gated_source import open_gated
from tests.support.tiny_models import TINY, usual
from torch import nn

from loadstone.errors import BindError, StalledError
from loadstone.loader.checkpoint import Checkpoint, open_checkpoint
from loadstone.loader.modules.bind import bind, pending_tensors, wait_for

X = torch.linspace(-1, 1, 2 * 5 * 16).view(2, 5, 16)


class Net(nn.Module):
    """Parameters and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 16)
        self.norm = nn.BatchNorm1d(16)
        self.linear = nn.Linear(16, 16)
        self.head = nn.Linear(16, 7, bias=False)
        self.register_buffer("scale", torch.full((16,), 2.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.linear(self.embed(ids))) * self.scale
        logits: torch.Tensor = self.head(hidden)
        return logits


class TiedNet(Net):
    """A head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


IDS = torch.tensor([0, 3, 6])


def random_state(make: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a module with random values, in evaluation mode, and its tensors in memory of their own."""
    torch.manual_seed(5)
    module = make()
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.1, 1.0)
    return module.eval(), {name: value.clone() for name, value in module.state_dict().items()}


def write(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors")
    return folder


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a module whose parameters are shapes only, and whose unstored buffers are real."""
    with torch.device("meta"):
        module = make()
    for child, real in zip(module.modules(), make().modules(), strict=True):
        for name in child._non_persistent_buffers_set:
            child._buffers[name] = real._buffers[name]
    return module.eval()


def run(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = module(*inputs)
    return result


@pytest.mark.parametrize("make", [Net, TiedNet])
@pytest.mark.parametrize("meta", [True, False])
def test_ready_bytes_make_plain_views(tmp_path: Path, make: Callable[[], nn.Module], meta: bool) -> None:
    full, state = random_state(make)
    checkpoint = open_checkpoint(write(tmp_path / "m", state))
    module = on_meta(make) if meta else make().eval()
    report = bind(module, checkpoint)
    assert torch.equal(run(module, IDS), run(full, IDS))
    assert {type(p) for p in module.parameters()} == {nn.Parameter}
    assert {type(b) for b in module.buffers()} == {torch.Tensor}
    assert not any(p.requires_grad for p in module.parameters())
    assert set(report.bound) == set(state)
    assert (report.missing, report.unexpected, report.cast) == ((), (), ())
    assert module.get_parameter("linear.weight").data_ptr() == checkpoint["linear.weight"].data_ptr()


def test_late_bytes_make_pending_parameters_and_buffers(tmp_path: Path) -> None:
    full, state = random_state(Net)
    checkpoint, gate = open_gated(write(tmp_path / "m", state))
    module = on_meta(Net)
    bind(module, checkpoint)
    assert len(list(pending_tensors(module))) == len(state)
    assert not gate.waited
    threading.Timer(0.05, gate.release).start()
    assert torch.equal(run(module, IDS), run(full, IDS))
    left = [name for name, _ in pending_tensors(module)]
    assert left == ["norm.num_batches_tracked"]  # evaluation does not read it


def test_names_tied_in_the_module_share_one_tensor_that_is_stored_once(tmp_path: Path) -> None:
    full, state = random_state(TiedNet)
    del state["head.weight"]
    checkpoint, gate = open_gated(write(tmp_path / "m", state))
    module: Any = on_meta(TiedNet)
    report = bind(module, checkpoint)
    assert module.head.weight is module.embed.weight
    assert report.tied == {"head.weight": "embed.weight"}
    gate.release()
    assert torch.equal(run(module, IDS), run(full, IDS))
    assert module.head.weight is module.embed.weight
    assert type(module.head.weight) is nn.Parameter


def test_names_tied_in_the_module_but_stored_apart_each_keep_their_own(tmp_path: Path) -> None:
    full, state = random_state(Net)
    module: Any = on_meta(TiedNet)
    bind(module, open_checkpoint(write(tmp_path / "m", state)))
    assert module.head.weight is not module.embed.weight
    assert torch.equal(run(module, IDS), run(full, IDS))


def test_one_module_under_two_names(tmp_path: Path) -> None:
    def make() -> nn.Module:
        layer = nn.Linear(16, 16)
        return nn.Sequential(layer, nn.ReLU(), layer)

    full, state = random_state(make)
    module = on_meta(make)
    report = bind(module, open_checkpoint(write(tmp_path / "m", state)))
    assert set(report.bound) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert torch.equal(run(module, X), run(full, X))
    del state["0.weight"], state["0.bias"]
    module = on_meta(make)
    bind(module, open_checkpoint(write(tmp_path / "n", state)))
    assert torch.equal(run(module, X), run(full, X))


def test_prefix_and_rename(tmp_path: Path) -> None:
    full, state = random_state(Net)
    stored = {f"net.{name.replace('linear.', 'dense.')}": value for name, value in state.items()}
    stored["other.weight"] = torch.ones(3)
    checkpoint = open_checkpoint(write(tmp_path / "m", stored))
    renames: list[Any] = [
        lambda name: name.replace("linear.", "dense."),
        {"linear.weight": "dense.weight", "linear.bias": "dense.bias"},
    ]
    for rename in renames:
        module = on_meta(Net)
        report = bind(module, checkpoint, prefix="net.", rename=rename)
        assert report.bound["linear.weight"] == "net.dense.weight"
        assert torch.equal(run(module, IDS), run(full, IDS))
    with pytest.raises(BindError, match=r"under the prefix 'nat\.'.* lacks 9 tensors .*and 4 more"):
        bind(on_meta(Net), checkpoint, prefix="nat.")


def unchanged(module: nn.Module, checkpoint: Checkpoint, message: str, **options: Any) -> None:
    before = {name: id(value) for name, value in module.state_dict(keep_vars=True).items()}
    with pytest.raises(BindError, match=message) as error:
        bind(module, checkpoint, **options)
    assert "\n" not in str(error.value)
    assert before == {name: id(value) for name, value in module.state_dict(keep_vars=True).items()}


def test_what_does_not_fit_is_refused_in_one_line_and_changes_nothing(tmp_path: Path) -> None:
    _, state = random_state(Net)
    module = Net()
    less = {name: value for name, value in state.items() if not name.startswith("linear")}
    unchanged(
        module,
        open_checkpoint(write(tmp_path / "less", less)),
        r"less does not fit Net: it lacks 2 tensors of the module \(linear\.weight, linear\.bias\)",
    )
    more = {**state, "extra": torch.ones(2)}
    unchanged(
        module,
        open_checkpoint(write(tmp_path / "more", more)),
        r"it has 1 that the module has no place for \(extra\)",
    )
    other = {**state, "linear.weight": torch.ones(16, 15)}
    unchanged(
        module,
        open_checkpoint(write(tmp_path / "other", other)),
        r"1 shapes differ from the module's: linear\.weight is \[16, 16\], stored \[16, 15\]",
        strict=False,
    )
    half = {**state, "linear.weight": state["linear.weight"].bfloat16()}
    unchanged(
        module,
        open_checkpoint(write(tmp_path / "half", half)),
        r'1 dtypes differ .*linear\.weight is torch\.float32, stored BF16.*dtype="cast"',
    )


def test_not_strict_reports_names_and_leaves_what_is_missing(tmp_path: Path) -> None:
    _, state = random_state(Net)
    del state["linear.weight"]
    state["extra"] = torch.ones(2)
    module = Net()
    before = module.linear.weight
    report = bind(module, open_checkpoint(write(tmp_path / "m", state)), strict=False)
    assert (report.missing, report.unexpected) == (("linear.weight",), ("extra",))
    assert module.linear.weight is before
    assert torch.equal(module.linear.bias, state["linear.bias"])


@pytest.mark.parametrize("late", [True, False])
def test_cast_converts_a_copy(tmp_path: Path, late: bool) -> None:
    full, state = random_state(Net)
    stored = {name: v.double() if v.is_floating_point() else v for name, v in state.items()}
    folder = write(tmp_path / "m", stored)
    checkpoint, gate = open_gated(folder)
    if not late:
        checkpoint = open_checkpoint(folder)
    module = on_meta(Net)
    report = bind(module, checkpoint, dtype="cast")
    assert set(report.cast) == {name for name, value in state.items() if value.is_floating_point()}
    assert module.get_parameter("linear.weight").dtype == torch.float32
    gate.release()
    assert torch.equal(run(module, IDS), run(full, IDS))


def test_buffers_that_nobody_stores_must_be_real(tmp_path: Path) -> None:
    _, state = random_state(Net)
    with torch.device("meta"):
        module = Net()
    unchanged(
        module,
        open_checkpoint(write(tmp_path / "m", state)),
        r"1 buffers of Net are on the meta device and stored nowhere \(scale\)",
    )


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)  # type: ignore[arg-type]  # it is one


class Attention(nn.Module):
    """Attention of a sequence on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


class Recurrent(nn.Module):
    """A module that keeps its parameters in a list of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 8, batch_first=True, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.lstm(x)[0]
        return result


def weight_normed() -> nn.Module:
    normed: nn.Module = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    return normed


MODULES = {
    "encoder layer": encoder_layer,
    "encoder": encoder,
    "attention": Attention,
    "lstm": Recurrent,
    "weight norm": weight_normed,
    "convolution": lambda: nn.Conv1d(5, 3, 4),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_modules_with_ways_of_their_own_wait_and_are_right(tmp_path: Path, name: str, mode: str) -> None:
    full, state = random_state(MODULES[name])
    full.requires_grad_(False)
    checkpoint, gate = open_gated(write(tmp_path / "m", state))
    module = on_meta(MODULES[name])
    bind(module, checkpoint)
    assert not gate.waited
    threading.Timer(0.05, gate.release).start()
    with torch.inference_mode() if mode == "inference" else torch.no_grad():
        want, first, second = full(X), module(X), module(X)
    assert torch.equal(first, want)  # the fused path too: chosen as if nothing had been pending
    assert torch.equal(second, want)
    assert gate.waited
    assert not list(pending_tensors(module))
    assert not any(child._forward_pre_hooks for child in module.modules())


def test_a_module_copied_before_its_first_call(tmp_path: Path) -> None:
    full, state = random_state(encoder_layer)
    checkpoint, gate = open_gated(write(tmp_path / "m", state))
    module = on_meta(encoder_layer)
    bind(module, checkpoint)
    gate.release()
    copied = copy.deepcopy(module)
    full.requires_grad_(False)
    assert torch.equal(run(copied, X), run(full, X))
    assert torch.equal(run(module, X), run(full, X))
    with torch.no_grad():
        copied.get_parameter("linear1.weight").zero_()
    assert torch.equal(run(module, X), run(full, X))
    assert not any(child._forward_pre_hooks for m in (module, copied) for child in m.modules())


def test_waiting_leaves_nothing_pending(tmp_path: Path) -> None:
    _, state = random_state(Net)
    folder = write(tmp_path / "m", state)
    checkpoint, gate = open_gated(folder)
    module = on_meta(Net)
    bind(module, checkpoint)
    with pytest.raises(StalledError):
        wait_for(module, timeout=0.02)
    assert len(list(pending_tensors(module))) == len(state)
    gate.release()
    wait_for(module, timeout=30)
    assert not list(pending_tensors(module))
    checkpoint, gate = open_gated(folder)
    module = on_meta(Net)
    threading.Timer(0.05, gate.release).start()
    checkpoint.bind(module, wait=True)
    assert gate.waited
    assert not list(pending_tensors(module))


def test_two_modules_bound_to_one_checkpoint_share_memory(tmp_path: Path) -> None:
    _, state = random_state(Net)
    checkpoint = open_checkpoint(write(tmp_path / "m", state))
    first, second = Net(), Net()
    bind(first, checkpoint)
    bind(second, checkpoint)
    assert first.linear.weight.data_ptr() == second.linear.weight.data_ptr()
    assert first.linear.weight is not second.linear.weight


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "t5", "bert"])
def test_a_transformers_model_built_on_meta_gets_its_computed_buffers(saved: Saved, name: str) -> None:
    import transformers

    tiny = TINY[name]
    config = transformers.AutoConfig.from_pretrained(saved(name))
    with torch.device("meta"):
        model = getattr(transformers, tiny.model)._from_config(config).eval()
    checkpoint, gate = open_gated(saved(name))
    bind(model, checkpoint)
    assert not gate.waited
    gate.release()
    assert torch.equal(tiny.run(model), tiny.run(usual(saved(name), tiny.model)))
