"""An adapter is compared with its config, with itself and with the base before anything can use it."""

import json
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.adapter_checks import PREFIX, TENSORS, Q, V, refuse, with_tensors
from tests.support.peft_adapters import pair, write_adapter, write_checkpoint

import loadstone
from loadstone.adapters import look, reader
from loadstone.adapters.check import check_adapter
from loadstone.adapters.reader import FINGERPRINT_KEY, read_adapter
from loadstone.adapters.stamp import record_base
from loadstone.adapters.updates import LowRank
from loadstone.errors import (
    AdapterBaseError,
    AdapterError,
    AdapterFormatError,
    AdapterUnsupportedError,
    ChangedError,
    LoadstoneError,
    LoadstoneWarning,
    LocationError,
    NotFoundError,
    SettingsError,
)
from loadstone.settings import Settings


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny", TENSORS, vocab_size=16)


# What is fine


def test_a_good_adapter_gives_its_update(tmp_path: Path, base: Path) -> None:
    folder = with_tensors(tmp_path, {})
    with read_adapter(folder, base=base) as adapter:
        (update,) = adapter.updates[Q]
        assert isinstance(update, LowRank)
        assert (update.scale, update.rank, update.transposed) == (3.0, 2, False)
        assert adapter.nbytes == 2 * 2 * 8 * 4
        assert len(adapter.digest) == 64
        assert adapter.warnings == ()


def test_tensors_outlive_the_adapter(tmp_path: Path, base: Path) -> None:
    tensors = pair(Q)
    with read_adapter(write_adapter(tmp_path / "a", tensors), base=base) as adapter:
        (update,) = adapter.updates[Q]
    shutil.rmtree(tmp_path / "a")
    assert torch.equal(update.tensors[0], tensors[f"{PREFIX}{Q}.lora_A.weight"])


def test_an_open_base_is_left_open(tmp_path: Path, base: Path) -> None:
    with loadstone.open(base) as checkpoint:
        read_adapter(with_tensors(tmp_path, {}), base=checkpoint).close()
        assert checkpoint["model.norm.weight"].sum() == 8


def test_without_a_base_the_file_is_checked_against_itself(tmp_path: Path) -> None:
    with read_adapter(with_tensors(tmp_path, {}), base=None) as adapter:
        assert adapter.delta(Q).shape == (8, 8)


@pytest.mark.parametrize("spelling", ["{}", "{}/adapter_model.safetensors", "file://{}", "{}/"])
def test_a_folder_may_be_spelt_in_several_ways(spelling: str, tmp_path: Path, base: Path) -> None:
    folder = with_tensors(tmp_path, {})
    with read_adapter(spelling.format(folder), base=base) as adapter:
        assert Q in adapter.updates


def test_an_hf_cache_snapshot_is_read_through_its_links(tmp_path: Path, base: Path) -> None:
    real = with_tensors(tmp_path, {})
    snapshot = tmp_path / "models--org--lora" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in real.iterdir():
        (snapshot / file.name).symlink_to(file)
    with read_adapter(snapshot, base=base) as adapter:
        assert Q in adapter.updates


def test_a_checkpoint_without_the_models_prefix_matches(tmp_path: Path) -> None:
    bare = {name.removeprefix("model."): t for name, t in TENSORS.items() if name.startswith("model.")}
    base = write_checkpoint(tmp_path / "tiny", bare)
    with read_adapter(with_tensors(tmp_path, {}), base=base) as adapter:
        assert adapter.delta(Q).shape == (8, 8)
        assert torch.equal(adapter.updated(Q)["weight"], 1 + adapter.delta(Q))


# Files


def test_a_pickle_is_never_read(tmp_path: Path, base: Path) -> None:
    marker = tmp_path / "executed"

    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(marker),)

    folder = with_tensors(tmp_path, {})
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Trap()))
    message = refuse(NotFoundError, "pickle", folder, base)
    assert "safe_serialization=True" in message
    (folder / "adapter_model.safetensors").write_bytes(b"broken")
    refuse(AdapterFormatError, "adapter_model.safetensors", folder, base)
    assert not marker.exists()


def test_missing_files_are_named_with_what_is_there(tmp_path: Path, base: Path) -> None:
    folder = with_tensors(tmp_path, {})
    (folder / "adapter_model.safetensors").rename(folder / "lora.safetensors")
    refuse(NotFoundError, r"adapter_model.safetensors.*lora.safetensors", folder, base)
    (folder / "adapter_config.json").unlink()
    refuse(NotFoundError, "adapter_config.json", folder, base)
    refuse(LocationError, "lora.safetensors", folder / "lora.safetensors", base)
    refuse(LoadstoneError, "nowhere", tmp_path / "nowhere", base)


def test_a_step_checkpoint_is_not_searched_for(tmp_path: Path, base: Path) -> None:
    write_adapter(tmp_path / "run" / "checkpoint-5", pair(Q))
    refuse(NotFoundError, "adapter_config.json", tmp_path / "run", base)


def test_an_empty_file_is_refused(tmp_path: Path, base: Path) -> None:
    refuse(AdapterFormatError, "no tensors", write_adapter(tmp_path / "a", {}), base)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_a_dtype_that_is_no_float_is_refused(dtype: torch.dtype, tmp_path: Path, base: Path) -> None:
    tensors = {key: tensor.to(dtype) for key, tensor in pair(Q).items()}
    refuse(AdapterUnsupportedError, "dtype", write_adapter(tmp_path / "a", tensors), base)


# The file against itself and its config


@pytest.mark.parametrize("letter", ["A", "B"])
def test_half_a_pair_is_refused(letter: str, tmp_path: Path, base: Path) -> None:
    tensors = pair(Q)
    del tensors[f"{PREFIX}{Q}.lora_{letter}.weight"]
    refuse(AdapterFormatError, f"no lora_{letter}", write_adapter(tmp_path / "a", tensors), base)


def test_ranks_must_agree(tmp_path: Path, base: Path) -> None:
    refuse(AdapterFormatError, "rank 2 in its tensors but 4", with_tensors(tmp_path, {}, r=4), base)
    mixed = {f"{PREFIX}{Q}.lora_B.weight": torch.ones(8, 3)}
    refuse(AdapterFormatError, "rank 2.*and 3", with_tensors(tmp_path, mixed), base)


def test_a_rank_of_zero_is_refused(tmp_path: Path, base: Path) -> None:
    empty = pair(Q, rank=0)
    refuse(AdapterFormatError, "r=0", write_adapter(tmp_path / "a", empty, r=0), base)
    refuse(AdapterFormatError, "rank 0", write_adapter(tmp_path / "a", empty, r=1), base)


@pytest.mark.parametrize(
    ("key", "switch", "shape"),
    [("lora_magnitude_vector", "use_dora", [8]), ("lora_B.bias", "lora_bias", [8])],
)
def test_vectors_go_with_their_switch(
    key: str, switch: str, shape: list[int], tmp_path: Path, base: Path
) -> None:
    vector = {f"{PREFIX}{Q}.{key}": torch.ones(shape)}
    refuse(AdapterFormatError, f"{key}.*{switch} is false", with_tensors(tmp_path, vector), base)
    shutil.rmtree(tmp_path / "adapter")
    refuse(AdapterFormatError, f"{switch} is true", with_tensors(tmp_path, {}, **{switch: True}), base)
    wrong = {f"{PREFIX}{Q}.{key}": torch.ones(7)}
    refuse(AdapterFormatError, r"\[7\].*\[8\]", with_tensors(tmp_path, wrong, **{switch: True}), base)


def test_a_module_that_is_not_targeted_is_refused(tmp_path: Path, base: Path) -> None:
    refuse(AdapterFormatError, "target_modules", with_tensors(tmp_path, pair(V, outside=4)), base)


def test_a_targeted_module_without_tensors_is_a_warning(tmp_path: Path, base: Path) -> None:
    folder = with_tensors(tmp_path, {}, target_modules=["q_proj", "v_proj"])
    with pytest.warns(LoadstoneWarning, match=f"1 modules.*{V}"):
        read_adapter(folder, base=base).close()


def test_a_module_wrapped_twice_is_refused(tmp_path: Path, base: Path) -> None:
    nested = {key.replace(Q, f"{Q}.base_layer"): tensor for key, tensor in pair(Q).items()}
    refuse(AdapterFormatError, "wrapped more than once", write_adapter(tmp_path / "a", nested), base)


def test_a_convolution_is_refused(tmp_path: Path, base: Path) -> None:
    tensors = {f"{PREFIX}{Q}.lora_A.weight": torch.ones(2, 8, 3, 3)}
    refuse(AdapterUnsupportedError, "convolution", with_tensors(tmp_path, tensors), base)


# Against the base


def test_an_adapter_for_another_model_shows_a_key_of_each(tmp_path: Path, base: Path) -> None:
    other = pair("model.language_model.layers.0.self_attn.q_proj")
    message = refuse(AdapterBaseError, "no key matches", write_adapter(tmp_path / "a", other), base)
    assert "language_model" in message
    assert any(name in message for name in TENSORS)


def test_a_module_that_the_base_lacks_is_named(tmp_path: Path, base: Path) -> None:
    more = pair("model.layers.9.self_attn.q_proj")
    refuse(AdapterBaseError, r"1 of 2 modules.*layers\.9", with_tensors(tmp_path, more), base)


def test_a_wrong_shape_says_both(tmp_path: Path, base: Path) -> None:
    wide = write_adapter(tmp_path / "a", pair(Q, inside=10, outside=10))
    refuse(AdapterBaseError, r"\[10, 10\].*\[8, 8\]", wide, base)


def test_a_resized_vocabulary_is_recognised(tmp_path: Path, base: Path) -> None:
    head = {f"{PREFIX}lm_head.weight": torch.ones(19, 8)}
    folder = with_tensors(tmp_path, head, modules_to_save=["lm_head"])
    refuse(AdapterBaseError, "resized from 16 to 19", folder, base)
    low_rank = write_adapter(tmp_path / "b", pair("lm_head", outside=19), target_modules=["lm_head"])
    refuse(AdapterBaseError, "resized from 16 to 19", low_rank, base)


def test_a_name_that_differs_is_a_warning_or_refused(tmp_path: Path, base: Path) -> None:
    folder = with_tensors(tmp_path, {}, base_model_name_or_path="org/another")
    with pytest.warns(LoadstoneWarning, match="org/another"):
        read_adapter(folder, base=base).close()
    refuse(AdapterBaseError, "strict_base", folder, base, strict_base=True)


@pytest.mark.parametrize("name", ["org/tiny", "/mnt/train7/TINY/", "tiny", "C:\\models\\tiny", None, ""])
def test_names_of_the_same_base_agree(name: str | None, tmp_path: Path, base: Path) -> None:
    folder = with_tensors(tmp_path, {}, base_model_name_or_path=name)
    read_adapter(folder, base=base, strict_base=True).close()


def test_an_hf_cache_folder_bears_the_name_of_its_repository(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "models--org--tiny" / "snapshots" / "0abc", TENSORS)
    folder = with_tensors(tmp_path, {}, base_model_name_or_path="org/tiny")
    read_adapter(folder, base=base, strict_base=True).close()


def test_a_recorded_fingerprint_outweighs_the_name(tmp_path: Path, base: Path) -> None:
    folder = with_tensors(tmp_path, {}, base_model_name_or_path="org/another")
    with loadstone.open(base) as checkpoint:
        right = checkpoint.fingerprint()
    save_file(pair(Q), folder / "adapter_model.safetensors", metadata={FINGERPRINT_KEY: right})
    read_adapter(folder, base=base, strict_base=True).close()
    save_file(pair(Q), folder / "adapter_model.safetensors", metadata={FINGERPRINT_KEY: "0" * 64})
    refuse(AdapterBaseError, "another structure", folder, base, strict_base=True)


# Values


def test_values_that_are_not_finite_warn_or_refuse(tmp_path: Path, base: Path) -> None:
    tensors = pair(Q)
    tensors[f"{PREFIX}{Q}.lora_B.weight"][3, 1] = float("nan")
    folder = write_adapter(tmp_path / "a", tensors)
    with pytest.warns(LoadstoneWarning, match="not finite"):
        read_adapter(folder, base=base).close()
    refuse(AdapterFormatError, "lora_B", folder, base, nonfinite="refuse")


def test_large_values_are_not_taken_for_infinite(tmp_path: Path, base: Path) -> None:
    tensors = {key: torch.full_like(tensor, 3e38) for key, tensor in pair(Q).items()}
    read_adapter(write_adapter(tmp_path / "a", tensors), base=base, nonfinite="refuse").close()


def test_an_adapter_without_effect_is_a_warning(tmp_path: Path, base: Path) -> None:
    folder = with_tensors(tmp_path, {f"{PREFIX}{Q}.lora_B.weight": torch.zeros(8, 2)})
    with pytest.warns(LoadstoneWarning, match="no effect"):
        read_adapter(folder, base=base).close()
    refuse(AdapterFormatError, "no effect", folder, base, no_effect="refuse")


@pytest.mark.parametrize(("value", "says"), [(0.0, "no effect"), (float("nan"), "not finite")])
def test_settings_say_what_happens_to_suspicious_values(
    value: float, says: str, tmp_path: Path, base: Path
) -> None:
    folder = with_tensors(tmp_path, {f"{PREFIX}{Q}.lora_B.weight": torch.full((8, 2), value)})
    strict = Settings.from_env({"LOADSTONE_ADAPTER_VALUES": "refuse"})
    refuse(AdapterFormatError, says, folder, base, settings=strict)
    assert says in check_adapter(folder, base, settings=strict).reason
    with pytest.warns(LoadstoneWarning, match=says):
        read_adapter(folder, base=base, settings=strict, nonfinite="warn", no_effect="warn").close()
    with pytest.raises(SettingsError, match="adapter_values is 'ignore'; use one of warn, refuse"):
        Settings.from_env({"LOADSTONE_ADAPTER_VALUES": "ignore"})


# Identity, report


def test_the_digest_is_the_contents(tmp_path: Path, base: Path) -> None:
    first = write_adapter(tmp_path / "a", pair(Q))
    again = write_adapter(tmp_path / "b", pair(Q))
    changed = write_adapter(tmp_path / "c", {k: t + 1 for k, t in pair(Q).items()})
    other = write_adapter(tmp_path / "d", pair(Q), lora_alpha=7)
    digests = []
    for folder in (first, again, changed, other):
        with read_adapter(folder, base=base) as adapter:
            digests.append(adapter.digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_file_that_changed_is_looked_at_again(tmp_path: Path, base: Path) -> None:
    folder = write_adapter(tmp_path / "a", pair(Q))
    file = folder / "adapter_model.safetensors"
    long_ago = 1_000_000_000

    def digest() -> str:
        os.utime(file, (long_ago, long_ago))
        with read_adapter(folder, base=base) as adapter:
            return adapter.digest

    before = digest()
    assert digest() == before
    write_adapter(folder, {k: t + 1 for k, t in pair(Q).items()})
    assert digest() != before


def test_a_link_that_moves_while_reading_lends_no_other_files_digest(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write_adapter(tmp_path / "v1", pair(Q))
    new = write_adapter(tmp_path / "v2", {k: t + 1 for k, t in pair(Q).items()})
    current = tmp_path / "current"
    current.symlink_to(old)

    def look_late(*args: Any) -> look.Look:
        current.unlink()
        current.symlink_to(new)
        return look.look_at(*args)

    monkeypatch.setattr(look, "_SETTLED", 0)
    with read_adapter(new, base=base) as adapter:
        of_new = adapter.digest
    with monkeypatch.context() as patch:
        patch.setattr(reader, "look_at", look_late)
        with pytest.raises(ChangedError):
            read_adapter(current, base=base)
    with read_adapter(current, base=base) as adapter:
        assert adapter.digest == of_new


def test_the_report_on_a_good_adapter(tmp_path: Path, base: Path) -> None:
    folder = with_tensors(tmp_path, {}, base_model_name_or_path="org/another")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = check_adapter(folder, base)
    assert report.ok
    assert json.loads(report.to_json())["kinds"] == {"lora": 1}
    assert report.ranks == (2,)
    assert "org/another" in report.lines()[-1]


def test_the_report_on_a_bad_adapter(tmp_path: Path, base: Path) -> None:
    report = check_adapter(with_tensors(tmp_path, {}, r=4), base)
    document = json.loads(report.to_json())
    assert (document["ok"], document["error"]) == (False, "AdapterFormatError")
    assert report.lines() == [f"refused: {report.reason}"]


def test_errors_are_of_the_adapters_tree() -> None:
    for kind in (AdapterFormatError, AdapterBaseError, AdapterUnsupportedError):
        assert issubclass(kind, AdapterError)


def test_the_base_can_be_recorded(tmp_path: Path, base: Path) -> None:
    folder = with_tensors(tmp_path, {}, base_model_name_or_path="org/tiny")
    with loadstone.open(base) as checkpoint:
        before = read_adapter(folder, base=checkpoint)
        record_base(folder, checkpoint)
        after = read_adapter(folder, base=checkpoint, strict_base=True)
        assert torch.equal(before.delta(Q), after.delta(Q))
        assert {path.name for path in folder.iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
    grown = write_checkpoint(tmp_path / "more" / "tiny", {**TENSORS, "model.extra.weight": torch.ones(2)})
    with pytest.warns(LoadstoneWarning, match="another structure"):
        read_adapter(folder, base=grown).close()
    with loadstone.open(base) as checkpoint, pytest.raises(LocationError, match="not a folder"):
        record_base(tmp_path / "nowhere", checkpoint)


def test_everything_exported_exists() -> None:
    import loadstone.adapters as package

    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = package.nothing
