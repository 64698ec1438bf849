"""``adapter_config.json``: read strictly, understood or refused by name. Pure, no I/O.

Every key falls in one of four groups: used here, without influence on inference, refused while it is switched
on, or unknown. An unknown key that is off (null, false, zero, empty) passes, because newer versions of PEFT
write their new switches into every file; an unknown key that is on is refused, because nobody can tell what
would be lost.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from loadstone.errors import AdapterFormatError, AdapterUnsupportedError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_WITHOUT_INFLUENCE = frozenset(
    {
        "auto_mapping",
        "corda_config",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
_REFUSED = {
    "alora_invocation_tokens": "activated LoRA works on part of a prompt only",
    "arrow_config": "Arrow routes between adapters",
    "ensure_weight_tying": "it ties an adapter's tensors to each other",
    "kasa_config": "KaSA changes the base's weights",
    "layer_replication": "it repeats layers of the base",
    "megatron_config": "it is for Megatron's parallel layers",
    "monteclora_config": "MonteCLoRA samples its update",
    "use_bdlora": "block-diagonal LoRA stores its tensors in another form",
    "use_qalora": "QALoRA pools the input of quantised layers",
    "velora_config": "VeLoRA stores tensors of its own",
}
_LONGEST = 1024 * 1024  # bytes; one with a rank for each of 10,000 modules has a third of that
_LARGEST = 1e30  # far above any scale in use; whole numbers of any length compare with it
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_INITIALISES_ONLY = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What an adapter says about itself, as far as it matters for using it.

    Attributes
    ----------
    rank, alpha
        The default rank and alpha (``r``, ``lora_alpha``).
    rank_pattern, alpha_pattern : Mapping
        Other ranks and alphas, by regular expression over module names, the first match counts.
    target_modules, exclude_modules : str or tuple[str, ...] or None
        A regular expression, or names that a module's name must end with.
    target_parameters, modules_to_save : tuple[str, ...]
        Parameters with an update of their own; modules replaced as a whole.
    token_indices : tuple[int, ...] or Mapping[str, tuple[int, ...]] or None
        Tokens with rows of their own, of the input embedding or by module.
    layers, layers_pattern
        Layer numbers that ``target_modules`` is restricted to, and how their list is called.
    rslora, dora, lora_bias, fan_in_fan_out : bool
        PEFT's switches of these names.
    base_name : str
        The base it was trained on, as its author called it, or empty.
    document : Mapping[str, object]
        The whole file.
    """

    rank: int
    alpha: float
    target_modules: str | tuple[str, ...] | None = None
    exclude_modules: str | tuple[str, ...] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None = None
    layers: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    rslora: bool = False
    dora: bool = False
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    base_name: str = ""
    document: Mapping[str, object] = field(default_factory=dict)

    def scale(self, rank: int, alpha: float) -> float:
        """Return what an update of ``rank`` and ``alpha`` is multiplied by."""
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def parse_config(text: bytes | str, where: str) -> AdapterConfig:
    """Read ``adapter_config.json``.

    Parameters
    ----------
    text
        The file's contents.
    where
        The file's location, for messages.

    Raises
    ------
    AdapterFormatError
        It is not JSON, or a value is not of its kind.
    AdapterUnsupportedError
        It asks for something that loadstone does not apply.
    """
    document = _load(text, where)
    reader = _Fields(document, where)
    _refuse_unsupported(document, where)
    config = AdapterConfig(
        rank=reader.rank("r", document.get("r", 8)),
        alpha=reader.number("lora_alpha", document.get("lora_alpha", 8)),
        target_modules=reader.pattern_or_names("target_modules"),
        exclude_modules=reader.pattern_or_names("exclude_modules"),
        rank_pattern={k: reader.rank(f"rank_pattern[{k!r}]", v) for k, v in reader.mapping("rank_pattern")},
        alpha_pattern={
            k: reader.number(f"alpha_pattern[{k!r}]", v) for k, v in reader.mapping("alpha_pattern")
        },
        target_parameters=reader.names("target_parameters"),
        modules_to_save=reader.names("modules_to_save"),
        token_indices=reader.token_indices(),
        layers=reader.layers(),
        layers_pattern=tuple(p for p in reader.names("layers_pattern", text_too=True) if p),
        rslora=reader.switch("use_rslora"),
        dora=reader.switch("use_dora"),
        lora_bias=reader.switch("lora_bias"),
        fan_in_fan_out=reader.switch("fan_in_fan_out"),
        base_name=reader.text("base_model_name_or_path"),
        document=document,
    )
    _refuse_contradictions(config, where)
    return config


def canonical(config: AdapterConfig) -> bytes:
    """Return the config's content in one spelling, whatever the order and spacing of the file."""
    return json.dumps(config.document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


_USED = frozenset(
    {
        "alpha_pattern",
        "base_model_name_or_path",
        "bias",
        "exclude_modules",
        "fan_in_fan_out",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)


def _load(text: bytes | str, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key appears twice in one object")
        return found

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    if len(text) > _LONGEST:
        raise AdapterFormatError(f"{where}: it has {len(text)} bytes, a config has at most {_LONGEST}")
    try:
        document = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise AdapterFormatError(f"{where}: not valid JSON ({error}); write it again with PEFT") from None
    if not isinstance(document, dict):
        raise AdapterFormatError(f"{where}: found a JSON {type(document).__name__}, expected an object")
    return document


def _refuse_unsupported(document: Mapping[str, Any], where: str) -> None:
    kind = document.get("peft_type")
    if kind != "LORA":
        raise AdapterUnsupportedError(f"{where}: peft_type is {kind!r}; only LORA adapters are applied")
    bias = document.get("bias", "none")
    if bias != "none":
        raise AdapterUnsupportedError(
            f"{where}: bias is {bias!r}, which trains the base's own biases; only 'none' can be applied"
            " over a shared base"
        )
    _refuse_initialisation(document.get("init_lora_weights", True), where)
    for key, value in document.items():
        if key in _USED or key in _WITHOUT_INFLUENCE or not value:
            continue
        reason = _REFUSED.get(key)
        if reason is not None:
            raise AdapterUnsupportedError(f"{where}: {key} is set; {reason}, which loadstone does not apply")
        raise AdapterUnsupportedError(
            f"{where}: {key} is set to {_short(value)} and is not known to this version of loadstone;"
            " what it asks for would be lost. Remove the key if it does not matter for inference"
        )


def _refuse_initialisation(value: object, where: str) -> None:
    if isinstance(value, bool):
        return
    name = str(value).lower()
    if name.startswith(_CHANGES_BASE):
        raise AdapterUnsupportedError(
            f"{where}: init_lora_weights is {value!r}, which changes the base's weights; convert it to plain"
            " LoRA with PEFT: save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    if value is not None and name not in _INITIALISES_ONLY:
        raise AdapterUnsupportedError(
            f"{where}: init_lora_weights is {_short(value)}, which is not known;"
            " it may change the base's weights"
        )


def _refuse_contradictions(config: AdapterConfig, where: str) -> None:
    if config.target_parameters:
        for key in ("use_dora", "lora_bias", "fan_in_fan_out"):
            if config.document.get(key):
                raise AdapterUnsupportedError(
                    f"{where}: target_parameters and {key} are both set; PEFT does not combine them either"
                )
    if isinstance(config.token_indices, Mapping):
        for name in config.token_indices:
            if name in config.modules_to_save:
                raise AdapterFormatError(
                    f"{where}: {name!r} is in trainable_token_indices and in modules_to_save;"
                    " keep one of them"
                )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to a config's values; every mistake names the key."""

    document: Mapping[str, Any]
    where: str

    def fail(self, key: str, value: object, expected: str) -> NoReturn:
        raise AdapterFormatError(f"{self.where}: {key} is {_short(value)}, expected {expected}")

    def rank(self, key: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(key, value, "a whole number, the rank")
        if value < 1:
            raise AdapterFormatError(f"{self.where}: the rank {key}={value} is not 1 or more")
        return value

    def number(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST:
            self.fail(key, value, "a finite number")
        return value

    def switch(self, key: str) -> bool:
        value = self.document.get(key)
        if value is not None and not isinstance(value, bool):
            self.fail(key, value, "true or false")
        return bool(value)

    def text(self, key: str) -> str:
        value = self.document.get(key)
        if value is not None and not isinstance(value, str):
            self.fail(key, value, "a text")
        return value or ""

    def mapping(self, key: str) -> Sequence[tuple[str, Any]]:
        value = self.document.get(key)
        if value is not None and not isinstance(value, dict):
            self.fail(key, value, "an object")
        return list((value or {}).items())

    def names(self, key: str, *, text_too: bool = False) -> tuple[str, ...]:
        value = self.document.get(key)
        if text_too and isinstance(value, str):
            return (value,)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self.fail(key, value, "a list of names")
        return tuple(value)

    def pattern_or_names(self, key: str) -> str | tuple[str, ...] | None:
        value = self.document.get(key)
        if value is None or isinstance(value, str):
            return value
        return self.names(key)

    def layers(self) -> tuple[int, ...] | None:
        value = self.document.get("layers_to_transform")
        if value is None or value == []:
            return None
        return self._indices("layers_to_transform", [value] if isinstance(value, int) else value)

    def token_indices(self) -> tuple[int, ...] | dict[str, tuple[int, ...]] | None:
        value = self.document.get("trainable_token_indices")
        if value is None:
            return None
        if isinstance(value, dict):
            return {k: self._indices(f"trainable_token_indices[{k!r}]", v) for k, v in value.items()}
        return self._indices("trainable_token_indices", value)

    def _indices(self, key: str, value: object) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
            self.fail(key, value, "a list of numbers from 0 upwards")
        if len(set(value)) < len(value):
            self.fail(key, value, "no number twice")
        return tuple(value)
