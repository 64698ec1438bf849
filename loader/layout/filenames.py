"""What the names of files in a checkpoint's folder say: weights, variants, shard numbers, other formats.

Pure rules over names; nothing is opened.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadstone.errors import FormatError, LoadstoneError, NotFoundError
from loadstone.loader.format.naming import enumerate_names, quote

STEMS = ("model", "diffusion_pytorch_model", "pytorch_model", "adapter_model")
"""How libraries call the weights of a folder, most usual first."""

CONSOLIDATED = "consolidated"
"""A second copy of the weights, in the layout of whoever trained them, beside the shards of a model."""

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

_NUMBERED = re.compile(r"(?P<stem>.+?)-(?P<part>\d{1,6})-of-(?P<count>\d{1,6})(?:\.(?P<variant>[\w-]+))?")
_VARIANT = re.compile(rf"(?P<stem>{'|'.join((*STEMS, CONSOLIDATED))})\.(?P<variant>[\w-]+)")
_RANK = re.compile(
    r"shard-\d+-.+"
)  # one rank's files of a distributed checkpoint: it writes what it has only
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_UNFINISHED = (".incomplete", ".part", ".partial", ".aria2", ".crdownload", ".download", ".tmp")
_FOREIGN = (
    (".gguf", "GGUF (llama.cpp)"),
    (".msgpack", "Flax msgpack"),
    (".h5", "HDF5 (Keras, TensorFlow)"),
    (".onnx", "ONNX"),
    (".npz", "NumPy"),
)
_LISTED = 8
_MOST_SHARDS = 100_000


@dataclass(frozen=True, slots=True)
class WeightFile:
    """What the name of a weight file says.

    Attributes
    ----------
    name, stem : str
        The whole name; its first part, ``model`` of ``model.fp16-00001-of-00002.safetensors``.
    variant : str or None
        ``fp16`` there.
    part, count : int or None
        1 and 2 there.
    """

    name: str
    stem: str
    variant: str | None = None
    part: int | None = None
    count: int | None = None


def parse_name(name: str) -> WeightFile | None:
    """Take the name of a weight file apart; ``None`` when it is not one's."""
    if not name.lower().endswith(SUFFIX) or name.startswith("."):  # ``._model.safetensors`` is macOS's own
        return None
    body = name[: -len(SUFFIX)]
    numbered = _NUMBERED.fullmatch(body)
    if numbered and int(numbered["count"]) > _MOST_SHARDS:
        numbered = None
    stem, variant = (numbered["stem"], numbered["variant"]) if numbered else (body, None)
    with_variant = _VARIANT.fullmatch(stem)
    if with_variant and variant is None:
        stem, variant = with_variant["stem"], with_variant["variant"]
    if numbered is None:
        return WeightFile(name, stem, variant)
    return WeightFile(name, stem, variant, int(numbered["part"]), int(numbered["count"]))


def weights_name(stem: str, variant: str | None) -> str:
    """Return the name of a single file of weights."""
    return f"{stem}{SUFFIX}" if variant is None else f"{stem}.{variant}{SUFFIX}"


def index_names(stem: str, variant: str | None) -> tuple[str, ...]:
    """Return the names that an index may have."""
    if variant is None:
        return (f"{stem}{INDEX_SUFFIX}",)
    return (f"{stem}{SUFFIX}.index.{variant}.json", f"{stem}.{variant}{INDEX_SUFFIX}")


def is_variant_index(name: str) -> bool:
    """Say whether a name is that of an index of a variant, ``model.fp16.safetensors.index.json``."""
    return name.endswith(INDEX_SUFFIX) and _VARIANT.fullmatch(name[: -len(INDEX_SUFFIX)]) is not None


def is_pickle(name: str) -> bool:
    """Say whether a file's name is that of a pickle, which can run code when it is loaded."""
    return name.lower().endswith(_PICKLES)


def missing_parts(files: Iterable[WeightFile]) -> list[str]:
    """Return what is missing among numbered shards, as ``model-00002-of-00003``."""
    groups: dict[tuple[str, str | None, int], set[int]] = {}
    for file in files:
        if file.part is not None and file.count is not None and not _RANK.fullmatch(file.stem):
            groups.setdefault((file.stem, file.variant, file.count), set()).add(file.part)
    missing: list[str] = []
    for (stem, _, count), parts in groups.items():
        first = 0 if 0 in parts else 1
        absent = sorted(set(range(first, first + count)) - parts)
        missing += [f"{stem}-{part:05d}-of-{count:05d}" for part in absent]
    return missing


def mixed_counts(files: Iterable[WeightFile]) -> list[str]:
    """Return sets of shards that cannot be one model's, as ``model-…-of-00002``: empty when all is well."""
    groups: dict[tuple[str, str | None], set[int]] = {}
    for file in files:
        if file.count is not None:
            groups.setdefault((file.stem, file.variant), set()).add(file.count)
    return [
        f"{stem}-…-of-{count:05d}"
        for (stem, _), counts in groups.items()
        if len(counts) > 1
        for count in sorted(counts)
    ]


def why_missing(name: str, names: Sequence[str]) -> str | None:
    """Say what is there instead of a missing file: another spelling of it, or an unfinished download."""
    for other in names:
        if other.lower() == name.lower():
            return f"{quote(other)} differs from it in upper and lower case only, rename it"
        if other.startswith(name) and other[len(name) :].lower().endswith(_UNFINISHED):
            return f"{quote(other)} is an unfinished download of it"
    return None


def no_weights(names: Sequence[str], variant: str | None, where: str) -> LoadstoneError:
    """Return the error for a folder without weights that can be opened, saying what it holds instead."""
    variants = sorted(
        {file.variant or "" for file in map(parse_name, names) if file and file.stem != CONSOLIDATED}
    )
    if variants:
        there = ", ".join(f"variant={name!r}" if name else "none (variant=None)" for name in variants)
        wanted = "weights without a variant" if variant is None else f"weights of the variant {variant!r}"
        return NotFoundError(f"{where}: no {wanted}; the variants here are {there}")
    if any(name.endswith(".distcp") for name in names):
        return FormatError(
            f"{where}: a torch distributed checkpoint (DCP, .distcp files), whose metadata is a pickle and "
            "never opened; convert it: `python -m torch.distributed.checkpoint.format_utils dcp_to_torch`, "
            "then save the result as safetensors"
        )
    pickles = [name for name in names if is_pickle(name)]
    if pickles:
        return FormatError(
            f"{where}: only pickle files ({enumerate_names(pickles, _LISTED)}), which can run code when "
            "loaded and are never opened; convert them, with `torch.load(file, weights_only=True)` and "
            "`safetensors.torch.save_file`, or take a .safetensors revision instead of .bin"
        )
    for suffix, what in _FOREIGN:
        found = [name for name in names if name.lower().endswith(suffix)]
        if found:
            return FormatError(
                f"{where}: only {what} files ({enumerate_names(found, _LISTED)}), which are not read; "
                "convert them to safetensors"
            )
    if "model_index.json" in names:
        return NotFoundError(
            f"{where}: a diffusers pipeline; open the folder of one of its parts, such as its `unet`"
        )
    found_here = f"found {enumerate_names(names, _LISTED)}" if names else "there is nothing in it"
    return NotFoundError(
        f"{where}: no {SUFFIX} file, {found_here}; give the folder that holds the weights, or a file"
    )
