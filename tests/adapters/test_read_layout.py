"""What was worked out for one adapter serves others of the same names and shapes, and nothing else."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.adapter_checks import PREFIX, TENSORS, Q
from tests.support.peft_adapters import gpt2, llama, make, mixtral, pair, write_adapter, write_checkpoint

import loadstone
from loadstone.adapters.attach import Attacher
from loadstone.adapters.layout import FileUpdates
from loadstone.adapters.reader import read_adapter
from loadstone.adapters.updates import LowRank
from loadstone.errors import AdapterBaseError, AdapterError, LoadstoneError, LoadstoneWarning

WEIGHTS = "adapter_model.safetensors"
A = f"{PREFIX}{Q}.lora_A.weight"


def _base(folder: Path, **tensors: torch.Tensor) -> loadstone.Checkpoint:
    return loadstone.open(write_checkpoint(folder / "tiny", {**TENSORS, **tensors}, vocab_size=16))


def _other_values(folder: Path, to: Path) -> Path:
    """Copy an adapter, with other values in every tensor of its own."""
    shutil.copytree(folder, to)
    tensors = {
        key: tensor if ".base_layer." in key else tensor.flip(0) * 2
        for key, tensor in load_file(folder / WEIGHTS).items()
    }
    save_file(tensors, to / WEIGHTS, {"format": "pt"})
    return to


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (llama, {"target_modules": "all-linear"}),
        (llama, {"target_modules": ["q_proj"], "use_dora": True}),
        (llama, {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}),
        (llama, {"target_modules": ["v_proj"], "trainable_token_indices": [1, 3]}),
        (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
        (mixtral, {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}),
    ],
)
def test_a_known_layout_gives_what_a_fresh_look_gives(
    model: Any, config: dict[str, Any], tmp_path: Path
) -> None:
    made = make(tmp_path, model, **config)
    other = _other_values(made.adapter, tmp_path / "other")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LoadstoneWarning)
        with loadstone.open(made.base) as base, read_adapter(made.adapter, base=base) as first:
            adapter = read_adapter(other, base=base)
            fresh = read_adapter(other, base=made.base)
            assert adapter.updates.layout is first.updates.layout
            assert fresh.updates.layout is not first.updates.layout
            assert adapter.digest == fresh.digest != first.digest
            assert (adapter.nbytes, adapter.warnings) == (fresh.nbytes, fresh.warnings)
            assert list(adapter.updates) == list(fresh.updates)
            for module in adapter.updates:
                for parameter in adapter.parameters(module):
                    assert torch.equal(adapter.delta(module, parameter), fresh.delta(module, parameter))
            adapter.close()
            fresh.close()


def test_values_are_judged_for_each_file(tmp_path: Path) -> None:
    tensors = pair(Q)
    bad = {**tensors, A: torch.full((2, 8), torch.nan)}
    with _base(tmp_path) as base:
        read_adapter(write_adapter(tmp_path / "good", tensors), base=base).close()
        with pytest.warns(LoadstoneWarning, match="not finite"):
            read_adapter(write_adapter(tmp_path / "bad", bad), base=base).close()
        with pytest.warns(LoadstoneWarning, match="no effect"):
            read_adapter(
                write_adapter(tmp_path / "zero", {**tensors, A: torch.zeros(2, 8)}), base=base
            ).close()


def test_warnings_name_their_own_file(tmp_path: Path) -> None:
    with _base(tmp_path) as base:
        for name in ("first", "second"):
            folder = write_adapter(tmp_path / name, pair(Q), target_modules=["q_proj", "v_proj"])
            with pytest.warns(LoadstoneWarning, match=f"/{name}/.*without tensors"):
                read_adapter(folder, base=base).close()
        for name in ("third", "fourth"):
            folder = write_adapter(tmp_path / name, pair(Q), base_model_name_or_path="elsewhere")
            with pytest.warns(LoadstoneWarning, match=f"/{name}: it says that its base is 'elsewhere'"):
                read_adapter(folder, base=base).close()


def test_a_known_layout_is_no_pass_for_another_config_base_or_size(tmp_path: Path) -> None:
    good = write_adapter(tmp_path / "good", pair(Q))
    with _base(tmp_path) as base, read_adapter(good, base=base) as first:
        other_config = write_adapter(tmp_path / "config", pair(Q), lora_alpha=8)
        with read_adapter(other_config, base=base) as adapter:
            assert adapter.updates.layout is not first.updates.layout
        longer = write_adapter(tmp_path / "longer", pair(Q))
        with (longer / WEIGHTS).open("ab") as file:
            file.write(b"\0")
        with pytest.raises(LoadstoneError):
            read_adapter(longer, base=base)
        wrong = write_adapter(tmp_path / "wrong", pair(Q), r=3)
        with pytest.raises(AdapterError):
            read_adapter(wrong, base=base)
    with _base(tmp_path / "b", **{f"{Q}.weight": torch.ones(8, 9)}) as base, pytest.raises(AdapterBaseError):
        read_adapter(good, base=base)


def test_a_config_that_is_wrong_is_told_before_weights_that_are_missing(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", pair(Q))
    (folder / WEIGHTS).unlink()
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="expected an object"):
        read_adapter(folder, base=None)


def test_data_at_an_odd_place_is_copied_once(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", pair(Q))
    data = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip() + b" "
    header += b" " * (1 - len(header) % 2)  # an odd length puts every tensor at an odd place
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    with _base(tmp_path) as base:
        for _ in range(2):
            with read_adapter(folder, base=base) as adapter:
                (once,), (again,) = adapter.updates[Q], adapter.updates[Q]
                assert isinstance(once, LowRank)
                assert isinstance(again, LowRank)
                assert torch.equal(once.a, pair(Q)[A])
                assert once.a.data_ptr() == again.a.data_ptr()


def test_a_model_checks_each_layout_once(tmp_path: Path) -> None:
    model = llama()
    made = make(tmp_path, llama, target_modules=["q_proj"])
    with loadstone.open(made.base) as base, read_adapter(made.adapter, base=base) as adapter:
        attacher = Attacher(model, 1 << 20)
        assert isinstance(adapter.updates, FileUpdates)
        assert attacher.check(adapter.updates) == attacher.check(adapter.updates) == 0
        with pytest.raises(AdapterError):
            Attacher(gpt2(), 1 << 20).check(adapter.updates)


def test_the_config_document_is_kept(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", pair(Q))
    with _base(tmp_path) as base, read_adapter(folder, base=base) as adapter:
        assert adapter.config.document == json.loads((folder / "adapter_config.json").read_text())
