"""Reading an adapter: two files, checked completely before anything of it can be used.

No state of its own; any thread may read.
"""

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from loadstone.adapters.adapter import Adapter
from loadstone.adapters.base import BaseIndex, index_of, same_name
from loadstone.adapters.build import Built, Contents, build
from loadstone.adapters.config import CONFIG_NAME, WEIGHTS_NAME, AdapterConfig, canonical, parse_config
from loadstone.adapters.experts import Experts
from loadstone.adapters.look import Look, look_at
from loadstone.adapters.updates import EmbeddingLowRank, ExpertsLowRank, LowRank, TokenRows, Update
from loadstone.errors import (
    AdapterBaseError,
    AdapterFormatError,
    FormatError,
    LoadstoneError,
    LoadstoneWarning,
    LocationError,
    NotFoundError,
)
from loadstone.loader import opening
from loadstone.loader.checkpoint import Checkpoint, open_checkpoint
from loadstone.loader.header import TensorInfo
from loadstone.loader.ranges import ByteRange
from loadstone.loader.source import Blob, Source
from loadstone.loader.views import is_aligned, view
from loadstone.settings import Settings

FINGERPRINT_KEY = "loadstone.base_fingerprint"
"""In an adapter file's metadata: the structural fingerprint of the base that it was made for."""

_PICKLE = "adapter_model.bin"

Location = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Options:
    """How strictly an adapter is read; see `read_adapter`."""

    strict_base: bool = False
    nonfinite: Literal["warn", "refuse"] = "warn"
    experts: Experts = "auto"


@dataclass(frozen=True, slots=True)
class Access:
    """How locations are opened; see `loadstone.open`."""

    cache: str | os.PathLike[str] | None = "auto"
    storage_options: Mapping[str, object] | None = None
    settings: Settings | None = None


def read_adapter(
    location: Location,
    *,
    base: Location | Checkpoint | None,
    strict_base: bool = False,
    nonfinite: Literal["warn", "refuse"] = "warn",
    experts: Experts = "auto",
    cache: str | os.PathLike[str] | None = "auto",
    storage_options: Mapping[str, object] | None = None,
    settings: Settings | None = None,
) -> Adapter:
    """Read an adapter and check it against its base.

    Parameters
    ----------
    location : str or path
        The folder of ``adapter_config.json`` and ``adapter_model.safetensors``: local, an HF-cache snapshot,
        or in a store.
    base : str, path, Checkpoint or None
        The base it is for. ``None`` checks the adapter against itself only.
    strict_base : bool
        Refuse an adapter that says it was made for a base of another name or structure; otherwise warn.
    nonfinite : {"warn", "refuse"}
        What to do about NaN and infinite values.
    experts : {"auto", "in_out", "out_in"}
        How fused experts are stored in the base, for ``target_parameters`` whose shapes do not tell.
    cache, storage_options, settings
        As for `loadstone.open`; they are for the adapter and for a base that is opened here.

    Raises
    ------
    LoadstoneError
        It cannot be used; the message says why. Nothing of it was attached anywhere.
    """
    options = Options(strict_base, nonfinite, experts)
    adapter = read_quietly(location, base, options, Access(cache, storage_options, settings))
    for message in adapter.warnings:
        warnings.warn(message, LoadstoneWarning, stacklevel=2)
    return adapter


def read_quietly(
    location: Location, base: Location | Checkpoint | None, options: Options, access: Access
) -> Adapter:
    """Do what `read_adapter` does, but leave what is suspect in `Adapter.warnings`."""
    settings = Settings.from_env() if access.settings is None else access.settings
    if base is None or isinstance(base, Checkpoint):
        checkpoint, owned = base, None
    else:
        checkpoint = owned = open_checkpoint(
            base, cache=access.cache, storage_options=access.storage_options, settings=settings
        )
    source = None
    try:
        source, name, file = opening.open_source(location, access.cache, access.storage_options, settings)
        return _read(source, name, file, checkpoint, options, owns_base=owned is not None)
    except BaseException:
        if source is not None:
            source.close()
        if owned is not None:
            owned.close()
        raise


def _read(
    source: Source, name: str, file: str | None, base: Checkpoint | None, options: Options, *, owns_base: bool
) -> Adapter:
    if file not in (None, WEIGHTS_NAME, CONFIG_NAME):
        found = source.open([file])[file]
        if isinstance(found, LoadstoneError):
            raise found
        raise LocationError(f"{name} is a file called {file!r}; give the folder that holds {WEIGHTS_NAME}")
    where = source.name
    opened = source.open([CONFIG_NAME, WEIGHTS_NAME])  # side by side: one round trip
    text = opening.read_small(source, CONFIG_NAME)
    if text is None:
        raise _missing(source, CONFIG_NAME, "without it the scale of the update is unknown")
    config = parse_config(text, f"{where}/{CONFIG_NAME}")
    blob = opened[WEIGHTS_NAME]
    if isinstance(blob, NotFoundError):
        raise _missing(source, WEIGHTS_NAME, "no other file is read instead")
    if isinstance(blob, Exception):
        raise blob
    try:
        checkpoint = Checkpoint(opening.read_checkpoint(source, name, WEIGHTS_NAME, None))
    except FormatError as error:
        raise AdapterFormatError(str(error)) from error
    index = None if base is None else index_of(base)
    infos = {key: checkpoint.info(key) for key in checkpoint}
    views = _views(checkpoint, blob, infos)
    contents = Contents(
        {key: info.shape for key, info in infos.items()},
        {key: info.dtype for key, info in infos.items()},
        views.__getitem__,
    )
    built = build(contents, config, index, options.experts, f"{where}/{WEIGHTS_NAME}")
    built.warnings += _identity_warnings(config, checkpoint, index, options)
    blob.ensure([ByteRange(0, blob.size)])
    look = look_at(blob, views)
    silent = {views[key].data_ptr() for key in look.zero}
    built.warnings += _value_warnings(built, look, silent, where, options)
    if base is not None:
        _compare_copies(built, views, base, where)
    digest = hashlib.sha256(canonical(config) + b"\0" + look.sha256)
    if options.experts != "auto":
        digest.update(options.experts.encode())
    return Adapter(checkpoint, config, built, digest.hexdigest(), base, owns_base=owns_base)


def _views(checkpoint: Checkpoint, blob: Blob, infos: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
    """Return every tensor without waiting, as `Checkpoint.view` does, but look at the file once for all."""
    buffer = blob.buffer()
    return {
        key: view(info, buffer) if is_aligned(info) else checkpoint.view(key) for key, info in infos.items()
    }


def _missing(source: Source, wanted: str, why: str) -> NotFoundError:
    """Describe what is there instead of a file that is not."""
    names = source.names()
    if names is None and not isinstance(source.open([_PICKLE])[_PICKLE], Exception):
        names = (_PICKLE,)
    pickles = [name for name in names or () if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if wanted == WEIGHTS_NAME and pickles:
        return NotFoundError(
            f"{source.name} has {pickles[0]} instead of {wanted}: a .bin file is a pickle, which can run code"
            " and is never read; where you trust it, load it with PEFT and"
            " save_pretrained(safe_serialization=True)"
        )
    there = "" if names is None else f"; it holds {_some(sorted(names))}"
    return NotFoundError(f"{source.name} has no {wanted}{there}; {why}")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return (shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")) or "no files"


def _identity_warnings(
    config: AdapterConfig, checkpoint: Checkpoint, base: BaseIndex | None, options: Options
) -> list[str]:
    """Compare what the adapter says about its base with the base."""
    if base is None:
        return []
    found = []
    where = checkpoint.source.name
    recorded = checkpoint.metadata.get(FINGERPRINT_KEY)
    if recorded is not None and recorded != base.fingerprint:
        found.append(
            f"{where}: it was made for a base of another structure (fingerprint {recorded[:12]}) than"
            f" {base.name} ({base.fingerprint[:12]}), although every shape that it uses fits"
        )
    own_name = base.config.get("_name_or_path")
    names = [base.name, *([own_name] if isinstance(own_name, str) else [])]
    said = config.base_name
    if recorded != base.fingerprint and said and not any(same_name(said, name) for name in names):
        found.append(
            f"{where}: it says that its base is {said!r}, but it is used with {base.name}; the shapes fit,"
            " the answers may still be wrong"
        )
    if found and options.strict_base:
        raise AdapterBaseError(f"{found[0]}; strict_base refuses it")
    return found


def _value_warnings(built: Built, look: Look, zero: set[int], where: str, options: Options) -> list[str]:
    """Judge values that are not numbers, and updates that change nothing.

    ``zero`` has the addresses of tensors in which every value is zero.
    """
    found = []
    if look.nonfinite:
        text = (
            f"{where}: {len(look.nonfinite)} tensors hold NaN or infinite values (not finite), the first is"
        )
        text += f" {look.nonfinite[0]!r}"
        if options.nonfinite == "refuse":
            raise AdapterFormatError(f"{text}; train it again or read it with nonfinite='warn'")
        found.append(text)
    updates = [update for several in built.updates.values() for update in several]
    if updates and all(_is_silent(update, zero) for update in updates):
        found.append(f"{where}: every lora_B (or lora_A) is zero: the adapter has no effect")
    if built.copies:
        found.append(
            f"{where}: {len(built.copies)} tensors repeat parameters of the base and are left out, the first"
            f" is {next(iter(built.copies))!r}"
        )
    return found


def _is_silent(update: Update, zero: set[int]) -> bool:
    if isinstance(update, TokenRows):
        return not update.rows
    if not isinstance(update, LowRank | EmbeddingLowRank | ExpertsLowRank):
        return False
    extra = isinstance(update, LowRank) and update.bias is not None
    dora = not isinstance(update, ExpertsLowRank) and update.magnitude is not None
    return not extra and not dora and (update.a.data_ptr() in zero or update.b.data_ptr() in zero)


def _compare_copies(built: Built, views: Mapping[str, torch.Tensor], base: Checkpoint, where: str) -> None:
    """Refuse whole parameters of the base in the file, unless they are what the base has already."""
    index = index_of(base)
    for key, name in built.copies.items():
        stored = index.stored(name)
        assert stored is not None
        own, theirs = views[key], base[stored]
        if not torch.equal(own.to(theirs.dtype), theirs):
            raise AdapterBaseError(
                f"{where}: {key!r} is another {name} than the base's; it would overwrite the"
                " base for everyone. Name its module in modules_to_save to keep it with the adapter"
            )
