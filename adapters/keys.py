"""Names of tensors in an adapter file: taken apart, or refused by name. Pure, no I/O.

PEFT writes ``base_model.model.<module>.lora_A.weight`` and the like. The prefix may be absent, and the name
that the adapter had while it was trained may have stayed in (``lora_A.default.weight``). Nothing else is
guessed: a key of another kind is refused, because a tensor that is skipped silently is an adapter that works
half.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from loadstone.errors import AdapterFormatError, AdapterUnsupportedError

Kind = Literal["A", "B", "B_bias", "embedding_A", "embedding_B", "magnitude", "token_rows", "base", "full"]
"""What a tensor is: ``base`` is a copy of a wrapped module's own parameter, ``full`` any plain parameter."""

PREFIX = "base_model.model."

_LORA: dict[str, Kind] = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_B.bias": "B_bias",
    "lora_embedding_A": "embedding_A",
    "lora_embedding_B": "embedding_B",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "trainable_tokens_delta": "token_rows",
    "token_adapter.trainable_tokens_delta": "token_rows",
}
_LONGEST = 1000  # patterns of the config are matched against names, at quadratic cost
_USUAL_A = ".lora_A.weight"
_USUAL: dict[str, Kind] = {_USUAL_A: "A", ".lora_B.weight": "B"}
"""Nearly every key ends in one of these, and needs no closer look."""
_FORMS = re.compile(
    r"(?P<module>.+?)\.(?P<form>(?:token_adapter\.)?trainable_tokens_delta|lora_[A-Za-z_]+)(?P<rest>(?:\..*)?)",
    re.DOTALL,
)
_KOHYA = re.compile(r"^lora_(unet|te\d?|transformer)_|\.lora_(down|up)(\.|$)|\.lora\.(down|up)\.|\.alpha$")
_OTHER_METHODS = re.compile(
    r"\.(lokr_\w+|hada_\w+|oft_\w+|boft_\w+|ia3_l|vera_lambda_\w|vblora_\w+|lora_E|ranknum|hra_u|c3a_kernel)(\.|$)"
)
_COPY = re.compile(
    r"(?P<module>.+?)\.(?:modules_to_save(?:\.default)?|original_module)\.(?P<name>.+)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Key:
    """One tensor of an adapter file.

    Attributes
    ----------
    text : str
        The key as it stands in the file.
    kind : str
        What the tensor is.
    module : str
        The module of the base that it belongs to; of a ``full`` parameter, its whole name.
    name : str
        Of kind ``base``, the parameter's name inside the module.
    depth : int
        How many parameters of the same module are wrapped inside this one (``target_parameters`` nest).
    """

    text: str
    kind: Kind
    module: str
    name: str = ""
    depth: int = 0


def parse_key(text: str, where: str) -> Key:
    """Take one key apart.

    Raises
    ------
    AdapterUnsupportedError
        It is of a kind that is not applied: Kohya's names, another method's tensors.
    AdapterFormatError
        It belongs to another adapter, or makes no sense.
    """
    plain = text.removeprefix(PREFIX)
    stem, kind = plain[: -len(_USUAL_A)], _USUAL.get(plain[-len(_USUAL_A) :])
    if kind is not None and stem and "lora" not in stem and not stem.endswith(".base_layer"):
        return Key(text, kind, stem)
    _refuse_foreign(text, plain, where)
    form = _FORMS.fullmatch(plain)
    if form is not None:
        return _lora_key(text, form, where)
    copy = _COPY.fullmatch(plain)
    if copy is not None:
        if ".original_module." in plain:
            raise AdapterFormatError(
                f"{where}: {text!r} is the base's own parameter, not the adapter's; save the adapter"
                " with PEFT's save_pretrained"
            )
        return Key(text, "full", f"{copy['module']}.{copy['name']}")
    module, layer, name = plain.rpartition(".base_layer.")
    if layer:
        return Key(text, "base", module, name)
    return Key(text, "full", plain)


def parse_keys(texts: Iterable[str], where: str) -> list[Key]:
    """Take every key apart; two keys that mean the same tensor are refused."""
    seen: dict[tuple[object, ...], str] = {}
    keys = []
    for text in texts:
        if len(text) > _LONGEST:
            raise AdapterFormatError(
                f"{where}: the key {text[:60]!r}... has {len(text)} characters, the most is {_LONGEST}"
            )
        key = parse_key(text, where)
        twin = seen.setdefault((key.kind, key.module, key.name, key.depth), text)
        if twin is not text:
            raise AdapterFormatError(f"{where}: {twin!r} and {text!r} name the same tensor; keep one of them")
        keys.append(key)
    return keys


def _refuse_foreign(text: str, plain: str, where: str) -> None:
    if _KOHYA.search(plain):
        raise AdapterUnsupportedError(
            f"{where}: the key {text!r} is in Kohya's style (lora_down, lora_up, alpha), not PEFT's;"
            " convert the file to PEFT's keys first"
        )
    other = _OTHER_METHODS.search(plain)
    if other is not None:
        raise AdapterUnsupportedError(
            f"{where}: the key {text!r} is of another method ({other[1]}), not LoRA"
        )


def _lora_key(text: str, form: re.Match[str], where: str) -> Key:
    rest = form["rest"]
    kind = _LORA.get(form["form"] + rest) or _LORA.get(form["form"] + rest.replace(".default", "", 1))
    module = form["module"]
    if kind is None:
        raise _unknown(text, form, where)
    depth = 0
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
        depth += 1
    if depth and kind not in ("A", "B"):
        raise AdapterFormatError(
            f"{where}: {text!r} lies inside a wrapped module, where only LoRA's A and B can"
        )
    return Key(text, kind, module, depth=depth)


def _unknown(text: str, form: re.Match[str], where: str) -> AdapterFormatError:
    owner = re.match(r"\.([^.]+)(\.weight|\.bias)?$", form["rest"])
    forms = {known.partition(".")[0] for known in _LORA}
    if owner is not None and form["form"] in forms and owner[1] not in ("weight", "bias"):
        return AdapterFormatError(
            f"{where}: the key {text!r} belongs to an adapter named {owner[1]!r}; save one adapter alone with"
            " PEFT's save_pretrained"
        )
    return AdapterFormatError(
        f"{where}: the key {text!r} is none of the kinds an adapter may hold (lora_A, lora_B,"
        " lora_embedding_A, lora_embedding_B, lora_magnitude_vector, trainable_tokens_delta, modules to save)"
    )
