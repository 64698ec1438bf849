"""`load_model` gives the model that transformers' own loading gives, bit for bit."""

import json
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.modules.conftest import Saved
from tests.support.gated_source import open_gated
from tests.support.tiny_models import IDS, TINY, usual
from torch import nn
from transformers import conversion_mapping
from transformers.utils import logging

import loadstone
from loadstone.errors import BindError, FormatError, LoadstoneError, NotFoundError, SettingsError
from loadstone.fileserver import FileServer, Hook
from loadstone.loader.checkpoint import open_checkpoint
from loadstone.loader.modules import direct, families
from loadstone.loader.modules.bind import pending_tensors
from loadstone.loader.modules.load import checkpoint_of, load_model


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("late", [True, False])
def test_it_is_the_model_that_transformers_loads(saved: Saved, name: str, late: bool) -> None:
    tiny, folder = TINY[name], saved(name)
    want = usual(folder, tiny.model)
    checkpoint, gate = open_gated(folder)
    got = load_model(checkpoint if late else folder)
    gate.release()
    assert torch.equal(tiny.run(got), tiny.run(want))
    assert type(got) is type(want)
    assert not got.training
    assert not any(parameter.requires_grad for parameter in got.parameters())
    left, right = got.state_dict(keep_vars=True), want.state_dict(keep_vars=True)
    assert list(left) == list(right)
    assert all(torch.equal(left[key], right[key]) for key in left)
    assert [id(t) for t in left.values()].count(id(left[next(iter(left))])) == [
        id(t) for t in right.values()
    ].count(id(right[next(iter(right))]))
    assert {n: (b.shape, b.dtype) for n, b in got.named_buffers()} == {
        n: (b.shape, b.dtype) for n, b in want.named_buffers()
    }
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(got.named_buffers(), want.named_buffers(), strict=True)
    )
    assert got.config._attn_implementation == want.config._attn_implementation
    assert got.dtype == want.dtype


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "bert", "t5"])
def test_the_long_way_gives_the_same(saved: Saved, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "PLAIN", frozenset())
    tiny = TINY[name]
    checkpoint, gate = open_gated(saved(name))
    model = load_model(checkpoint)
    assert not gate.waited
    assert len(list(pending_tensors(model))) == len(list(model.parameters()))
    gate.release()
    assert torch.equal(tiny.run(model), tiny.run(usual(saved(name), tiny.model)))
    kinds = {type(tensor) for tensor in (*model.parameters(), *model.buffers())}
    assert kinds <= {nn.Parameter, torch.Tensor}


def test_a_ready_checkpoint_gives_plain_views_of_its_memory(saved: Saved) -> None:
    checkpoint = open_checkpoint(saved("llama"))
    model: Any = load_model(checkpoint)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    name = "model.layers.1.mlp.up_proj.weight"
    assert model.get_parameter(name).data_ptr() == checkpoint[name].data_ptr()


def test_one_file_and_many_shards_give_the_same(tmp_path: Path, saved: Saved) -> None:
    folder = TINY["llama"].save(tmp_path / "one")
    assert (folder / "model.safetensors").exists()
    assert len(list(saved("llama").glob("*.safetensors"))) > 1
    assert torch.equal(TINY["llama"].run(load_model(folder)), TINY["llama"].run(load_model(saved("llama"))))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


@pytest.fixture
def copied(tmp_path: Path, saved: Saved) -> Path:
    """Return a copy of the Llama's folder in one file, for changing it."""
    return TINY["llama"].save(tmp_path / "llama")


def edit_tensors(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    state = {name: value.clone() for name, value in load_file(path).items()}
    save_file(change(state), path, metadata={"format": "pt"})


@pytest.mark.parametrize("late", [True, False])
def test_names_with_or_without_the_base_prefix(tmp_path: Path, late: bool) -> None:
    folder = TINY["gpt2"].save(tmp_path / "gpt2")
    want = TINY["gpt2"].run(usual(folder, "GPT2LMHeadModel"))
    edit_tensors(folder, lambda state: {k.removeprefix("transformer."): v for k, v in state.items()})
    checkpoint, gate = open_gated(folder)
    model = load_model(checkpoint if late else folder)
    gate.release()
    assert torch.equal(TINY["gpt2"].run(model), want)
    base = load_model(folder, auto_class=transformers.GPT2Model)
    assert type(base).__name__ == "GPT2Model"


@pytest.mark.parametrize("late", [True, False])
def test_a_stored_head_that_the_config_calls_tied_keeps_its_own_values(copied: Path, late: bool) -> None:
    edit_config(copied, tie_word_embeddings=True)
    want = TINY["llama"].run(usual(copied, "LlamaForCausalLM"))
    checkpoint, gate = open_gated(copied)
    model: Any = load_model(checkpoint if late else copied)
    assert not gate.waited
    gate.release()
    assert torch.equal(TINY["llama"].run(model), want)
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_the_head_that_is_stored_serves_as_the_embedding_too(copied: Path) -> None:
    edit_tensors(copied, lambda state: {k: v for k, v in state.items() if "embed_tokens" not in k})
    edit_config(copied, tie_word_embeddings=True)
    want = TINY["llama"].run(usual(copied, "LlamaForCausalLM"))
    assert torch.equal(TINY["llama"].run(load_model(copied)), want)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("name", ["llama", "mixtral", "llama-bf16"])
def test_a_given_dtype_converts_a_copy(saved: Saved, name: str, late: bool) -> None:
    tiny = TINY[name]
    dtype = torch.float32 if name == "llama-bf16" else torch.bfloat16
    want = getattr(transformers, tiny.model).from_pretrained(saved(name), dtype=dtype).requires_grad_(False)
    checkpoint, gate = open_gated(saved(name))
    model = load_model(checkpoint if late else saved(name), dtype=dtype)
    assert model.dtype == dtype
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    gate.release()
    assert torch.equal(tiny.run(model), tiny.run(want))
    text = load_model(saved(name), dtype=str(dtype).removeprefix("torch."))
    assert text.dtype == dtype


def test_without_a_dtype_in_the_config_the_tensors_decide(tmp_path: Path) -> None:
    folder = TINY["llama-bf16"].save(tmp_path / "m")
    edit_config(folder, dtype=..., torch_dtype=...)
    model = load_model(folder)
    assert model.dtype == usual(folder, "LlamaForCausalLM").dtype == torch.bfloat16


def test_the_generation_configuration_is_honoured(copied: Path, saved: Saved) -> None:
    (copied / "generation_config.json").write_text(
        json.dumps({"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0})
    )
    model: Any = load_model(copied)
    want = usual(copied, "LlamaForCausalLM")
    assert model.generation_config.to_dict() == want.generation_config.to_dict()
    assert model.generate(IDS).shape == (2, 12)
    assert torch.equal(model.generate(IDS), want.generate(IDS))
    (copied / "generation_config.json").unlink()
    edit_config(copied, max_new_tokens=2)
    model = load_model(copied)
    want = usual(copied, "LlamaForCausalLM")
    assert model.generation_config.to_dict() == want.generation_config.to_dict()


def test_the_attention_implementation_can_be_chosen(saved: Saved) -> None:
    model = load_model(saved("llama"), attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    want = transformers.LlamaForCausalLM.from_pretrained(saved("llama"), attn_implementation="eager")
    assert torch.equal(TINY["llama"].run(model), TINY["llama"].run(want))


def test_the_class_can_be_chosen_and_a_config_without_one_is_enough(copied: Path, saved: Saved) -> None:
    bert = load_model(saved("bert"), auto_class=transformers.AutoModel)
    assert type(bert) is transformers.BertModel
    with pytest.raises(BindError, match=r"1 that the model has no place for \(lm_head\.weight\)"):
        load_model(copied, auto_class=transformers.AutoModel)
    with pytest.raises(BindError, match="AutoModelForSeq2SeqLM has no class for LlamaConfig"):
        load_model(copied, auto_class=transformers.AutoModelForSeq2SeqLM)
    base = load_model(copied, auto_class=transformers.AutoModel, strict=False)
    assert type(base) is transformers.LlamaModel
    edit_config(copied, architectures=None)
    assert type(load_model(copied)) is transformers.LlamaForCausalLM


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(LoadstoneError) as error:
        load_model(folder, **options)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    return f"{type(error.value).__name__}: {error.value}"


def test_tensors_that_do_not_fit_are_refused(copied: Path, saved: Saved) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(copied, lambda state: {k: v for k, v in state.items() if k != name})
    assert f"lacks 1 tensors ({name})" in refusal(copied)
    assert "lacks" in refusal(copied, strict=False)
    edit_tensors(copied, lambda state: {**state, name: torch.ones(95, 64), "extra": torch.ones(2)})
    text = refusal(copied)
    assert f"1 of other shapes ({name} is [96, 64], stored [95, 64])" in text
    assert "has 1 that the model has no place for (extra)" in text
    edit_tensors(copied, lambda state: {**state, name: torch.ones(96, 64)})
    assert type(load_model(copied, strict=False)) is transformers.LlamaForCausalLM
    assert "no place for (extra)" in refusal(copied)


def test_names_that_the_architecture_lets_go_are_let_go(tmp_path: Path) -> None:
    folder = TINY["bert"].save(tmp_path / "bert")
    edit_tensors(folder, lambda s: {**s, "embeddings.position_ids": torch.arange(32)[None]})
    want = TINY["bert"].run(usual(folder, "BertModel"))
    assert torch.equal(TINY["bert"].run(load_model(folder)), want)


@pytest.mark.parametrize("device", ["cuda:99", "nowhere"])
def test_a_device_that_is_not_there_is_refused(copied: Path, device: str) -> None:
    with pytest.raises(SettingsError, match=f"device '{device}' is not"):
        load_model(copied, device=device)


def test_configurations_that_cannot_be_used_are_refused(copied: Path) -> None:
    edit_config(copied, architectures=["NoSuchModel"])
    assert "has no NoSuchModel, which config.json names" in refusal(copied)
    edit_config(
        copied, model_type="nosuch", auto_map={"AutoConfig": "config.Evil", "AutoModel": "model.Evil"}
    )
    (copied / "config.py").write_text("raise SystemExit('code inside a checkpoint ran')")
    assert refusal(copied).startswith("BindError: ")
    TINY["llama"].save(copied)
    edit_config(copied, num_attention_heads=7)
    assert "not a multiple of the number of attention heads" in refusal(copied)
    edit_config(copied, num_attention_heads="many")
    assert refusal(copied).startswith("BindError: ")
    edit_config(copied, quantization_config={"quant_method": "fp8"})
    assert "is quantised" in refusal(copied)
    (copied / "config.json").write_text("[1]")
    with pytest.raises(FormatError, match=r"config\.json"):
        load_model(copied)
    (copied / "config.json").unlink()
    assert "has no config.json" in refusal(copied)
    with pytest.raises(NotFoundError):
        load_model(copied / "nowhere")


def test_it_asks_no_network(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert type(load_model(saved("llama"))) is transformers.LlamaForCausalLM


def test_it_prints_nothing_and_leaves_transformers_as_it_was(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    edit_tensors(copied, lambda state: {**state, "extra": torch.ones(2)})
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_info()  # type: ignore[no-untyped-call]
    logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        refusal(copied)
        load_model(copied, strict=False)
        assert logging.get_verbosity() == logging.INFO  # type: ignore[attr-defined]
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity(verbosity)
        if not bars:
            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    assert capfd.readouterr() == ("", "")


def test_waiting_leaves_nothing_pending(saved: Saved) -> None:
    checkpoint, gate = open_gated(saved("mixtral"))
    gate.release()
    model = load_model(checkpoint, wait=True)
    assert not list(pending_tensors(model))
    assert torch.equal(
        TINY["mixtral"].run(model), TINY["mixtral"].run(usual(saved("mixtral"), "MixtralForCausalLM"))
    )


def test_a_model_keeps_the_checkpoint_that_was_opened_for_it(saved: Saved) -> None:
    model = load_model(str(saved("llama")))
    checkpoint = checkpoint_of(model)
    assert checkpoint is not None
    assert checkpoint.name == str(saved("llama"))
    assert model.name_or_path == str(saved("llama"))
    given = open_checkpoint(saved("llama"))
    assert checkpoint_of(load_model(given)) is None


def test_families_taken_the_short_way_need_no_conversion() -> None:
    from transformers.models.auto import modeling_auto

    rules: Any = conversion_mapping.get_checkpoint_conversion_mapping
    tables = [value for name, value in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    for family in families.PLAIN:
        assert rules(family) is None
        classes = [table[family] for table in tables if family in table]
        assert classes, family
        for found in classes:
            for name in [found] if isinstance(found, str) else found:
                assert rules(name) is None


class HeldTails(Hook):
    """Sends headers at once, and the rest of each weight file only when told to."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.held = threading.Event()

    def sending(self, path: str, offset: int, nbytes: int) -> None:
        if path.endswith(".safetensors") and offset + nbytes > 64 * 1024:
            self.held.set()
            assert self.released.wait(60)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_model_from_a_server_is_there_before_its_bytes(saved: Saved, name: str, tmp_path: Path) -> None:
    hook, tiny, results = HeldTails(), TINY[name], []
    with FileServer(saved(name), hook=hook) as server:
        try:
            model = load_model(server.url, cache=tmp_path / "cache")
            assert list(pending_tensors(model))
            reader = threading.Thread(target=lambda: results.append(tiny.run(model)))
            reader.start()
            assert hook.held.wait(30)
            reader.join(0.1)
            assert reader.is_alive()
            assert not results
        finally:
            hook.released.set()
        reader.join(60)
        assert torch.equal(results[0], tiny.run(usual(saved(name), tiny.model)))
        assert not list(pending_tensors(model))
        checkpoint = checkpoint_of(model)
        assert checkpoint is not None
        checkpoint.close()


def test_the_public_name_is_the_same_function_and_imports_little() -> None:
    assert loadstone.load_model is load_model
    code = (
        "import sys, loadstone.loader.modules.load; "
        "sys.exit(1 if {'torch', 'transformers'} & set(sys.modules) else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_checkpoint_may_be_saved_again_by_transformers(tmp_path: Path, saved: Saved) -> None:
    for name in ("mixtral", "llama-tied"):
        checkpoint, gate = open_gated(saved(name))
        gate.release()
        load_model(checkpoint).save_pretrained(tmp_path / name)
        again = usual(tmp_path / name, TINY[name].model)
        assert torch.equal(TINY[name].run(again), TINY[name].run(usual(saved(name), TINY[name].model)))
        shutil.rmtree(tmp_path / name)
