"""A merged checkpoint: what changed, what did not, and what is never left behind."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.peft_adapters import llama, pair, save_base, write_adapter, write_checkpoint
from transformers import AutoModelForCausalLM

import loadstone
from loadstone.adapters.merge import merge_into
from loadstone.adapters.reader import read_adapter
from loadstone.errors import AdapterBaseError, AdapterUnsupportedError, LocationError

Q = "model.layers.0.self_attn.q_proj"
HEAD = "base_model.model.lm_head.weight"


def sharded_base(folder: Path) -> Path:
    """Write a base of two shards, with dtypes that are not touched and files beside the weights."""
    first = {f"{Q}.weight": torch.randn(8, 8).bfloat16(), "model.counts": torch.arange(5)}
    second = {"model.embed_tokens.weight": torch.randn(16, 8), "model.scalar": torch.tensor(2.5)}
    folder.mkdir()
    save_file(first, folder / "a.safetensors")
    save_file(second, folder / "b.safetensors")
    weight_map = {**dict.fromkeys(first, "a.safetensors"), **dict.fromkeys(second, "b.safetensors")}
    index = {"metadata": {"total_size": 684}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "notes.bin").write_bytes(b"not copied")
    return folder


def merge(adapter: Path, base: Path, out: Path) -> Path:
    with loadstone.open(base) as checkpoint, read_adapter(adapter, base=checkpoint) as read:
        return merge_into(read, checkpoint, out)


def test_shards_index_and_small_files(tmp_path: Path) -> None:
    base = sharded_base(tmp_path / "tiny")
    out = merge(write_adapter(tmp_path / "a", pair(Q)), base, tmp_path / "new" / "out")
    names = {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    }
    assert {path.name for path in out.iterdir()} == names
    index = json.loads((out / "model.safetensors.index.json").read_text())
    with loadstone.open(base) as before, loadstone.open(out) as after:
        assert set(before) == set(after) == set(index["weight_map"])
        assert index["metadata"]["total_size"] == before.nbytes
        assert after.metadata["format"] == "pt"
        for name in before:
            assert after[name].dtype == before[name].dtype
            assert torch.equal(after.raw(name), before.raw(name)) == (name != f"{Q}.weight")
    merged = load_file(out / "model-00001-of-00002.safetensors")
    a, b = pair(Q).values()
    expected = (before_weight(base).float() + (b @ a) * 3).bfloat16()
    assert torch.equal(merged[f"{Q}.weight"], expected)


def before_weight(base: Path) -> torch.Tensor:
    return load_file(base / "a.safetensors")[f"{Q}.weight"]


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    base = sharded_base(tmp_path / "tiny")
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(LocationError, match="exists already"):
        merge(write_adapter(tmp_path / "a", pair(Q)), base, out)
    assert list(out.iterdir()) == []


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = sharded_base(tmp_path / "tiny")
    with loadstone.open(base) as checkpoint:
        adapter = read_adapter(write_adapter(tmp_path / "a", pair(Q)), base=checkpoint)
        monkeypatch.setattr(type(checkpoint), "config", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            merge_into(adapter, checkpoint, tmp_path / "out" / "merged")
        adapter.close()
    assert list((tmp_path / "out").iterdir()) == []


def test_an_adapter_read_with_another_base_is_refused(tmp_path: Path) -> None:
    base = sharded_base(tmp_path / "tiny")
    folder = write_adapter(tmp_path / "a", pair(Q))
    other = write_checkpoint(tmp_path / "other", {f"{Q}.weight": torch.ones(8, 8)})
    with loadstone.open(base) as checkpoint:
        for read_with in (other, None):
            with (
                read_adapter(folder, base=read_with) as adapter,
                pytest.raises(AdapterBaseError, match="was read with"),
            ):
                merge_into(adapter, checkpoint, tmp_path / "out")


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "tiny", {f"{Q}.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)})
    with pytest.raises(AdapterUnsupportedError, match="F8_E4M3"):
        merge(write_adapter(tmp_path / "a", pair(Q)), base, tmp_path / "out")


@pytest.mark.parametrize("part", ["head", "embedding"])
def test_a_tie_is_cut_when_one_side_changes(part: str, tmp_path: Path) -> None:
    """The merged model answers as the base with the adapter attached does, for which PEFT is asked."""
    from peft import PeftModel

    model = llama(tied=True)
    save_base(model, tmp_path / "tiny")
    if part == "head":
        head = {HEAD: torch.randn(40, 16, generator=torch.Generator().manual_seed(5))}
        config = {"target_modules": ["layers.0.self_attn.q_proj"], "modules_to_save": ["lm_head"]}
        tensors = {**pair(Q, inside=16, outside=16), **head}
    else:
        module = "base_model.model.model.embed_tokens.lora_embedding"
        tensors = {f"{module}_A": torch.ones(2, 40), f"{module}_B": torch.ones(16, 2)}
        config = {"target_modules": ["embed_tokens"]}
    folder = write_adapter(tmp_path / "a", tensors, **config)
    out = merge(folder, tmp_path / "tiny", tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    with loadstone.open(tmp_path / "tiny") as before, loadstone.open(out) as after:
        assert set(after) - set(before) == {"lm_head.weight"}
    tokens = torch.tensor([[1, 5, 9]])
    merged = AutoModelForCausalLM.from_pretrained(out)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        attached = PeftModel.from_pretrained(model, str(folder))
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, attached(tokens).logits)


def test_a_tie_is_kept_when_both_sides_change_alike(tmp_path: Path) -> None:
    save_base(llama(tied=True), tmp_path / "tiny")
    rows = {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 16)}
    folder = write_adapter(tmp_path / "a", rows, target_modules=[], trainable_token_indices=[7])
    out = merge(folder, tmp_path / "tiny", tmp_path / "out")
    with loadstone.open(out) as after:
        assert "lm_head.weight" not in set(after)
        assert after["lm_head.weight"][7].sum() == 16
