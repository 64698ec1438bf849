"""Reading an adapter: two files, checked completely before anything of it can be used.

No state of its own; any thread may read.
"""

import hashlib
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from loadstone.adapters.adapter import Adapter
from loadstone.adapters.base import BaseIndex, converted_index_of, index_of, same_name
from loadstone.adapters.config import CONFIG_NAME, WEIGHTS_NAME, parse_config
from loadstone.adapters.experts import Experts
from loadstone.adapters.layout import FileUpdates, Layout, recall, work_out
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
from loadstone.loader.ranges import ByteRange
from loadstone.loader.source import Blob, Source
from loadstone.settings import Settings

FINGERPRINT_KEY = "loadstone.base_fingerprint"
"""In an adapter file's metadata: the structural fingerprint of the base that it was made for."""

_PICKLE = "adapter_model.bin"
_FIRST = 64 * 1024  # what `Source.open` makes ready of each file
_LONGEST = 8 * 1024 * 1024

Location = str | os.PathLike[str]
OnSuspicion = Literal["warn", "refuse"]


@dataclass(frozen=True, slots=True)
class Options:
    """How strictly an adapter is read; see `read_adapter`."""

    strict_base: bool
    nonfinite: OnSuspicion
    no_effect: OnSuspicion
    experts: Experts

    @classmethod
    def of(
        cls,
        settings: Settings | None,
        *,
        strict_base: bool,
        nonfinite: OnSuspicion | None,
        no_effect: OnSuspicion | None,
        experts: Experts | None,
    ) -> "Options":
        """Take from the settings what is left open."""
        settings = Settings.from_env() if settings is None else settings
        values: OnSuspicion = "refuse" if settings.adapter_values == "refuse" else "warn"
        ways: dict[str, Experts] = {"auto": "auto", "in_out": "in_out", "out_in": "out_in"}
        way = ways[settings.adapter_experts]
        return cls(strict_base, nonfinite or values, no_effect or values, experts or way)


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
    nonfinite: OnSuspicion | None = None,
    no_effect: OnSuspicion | None = None,
    experts: Experts | None = None,
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
    nonfinite, no_effect : {"warn", "refuse"}, optional
        What to do about NaN and infinite values; about an adapter whose every B is zero. By default what the
        settings say.
    experts : {"auto", "in_out", "out_in"}, optional
        How fused experts are stored in the base, for ``target_parameters`` whose shapes do not tell. By
        default what the settings say.
    cache, storage_options, settings
        As for `loadstone.open`; they are for the adapter and for a base that is opened here.

    Raises
    ------
    LoadstoneError
        It cannot be used; the message says why. Nothing of it was attached anywhere.
    """
    options = Options.of(
        settings, strict_base=strict_base, nonfinite=nonfinite, no_effect=no_effect, experts=experts
    )
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
    blob = opened[WEIGHTS_NAME]
    if isinstance(blob, Exception):
        parse_config(text, f"{where}/{CONFIG_NAME}")
        if isinstance(blob, NotFoundError):
            raise _missing(source, WEIGHTS_NAME, "no other file is read instead")
        raise blob
    index = None if base is None else index_of(base)
    try:
        layout = _layout(source, name, blob, text, index=index, options=options)
    except AdapterBaseError:
        # Its names may be those of the model, for which the base's tensors are converted as they are loaded.
        index = None if base is None else converted_index_of(base)
        if index is None:
            raise
        layout = _layout(source, name, blob, text, index=index, options=options)
    files = {WEIGHTS_NAME: blob}
    checkpoint = Checkpoint(opening.Opened(source, name, files, layout.infos, layout.metadata, {}, None, ()))
    suspect = [*layout.built.warnings, *_identity_warnings(layout, checkpoint, index, options)]
    blob.ensure([ByteRange(0, blob.size)])
    look = look_at(blob, layout.infos.values(), lambda: {key: checkpoint.view(key) for key in layout.infos})
    suspect += _value_warnings(layout, look, where, options)
    if base is not None:
        _compare_copies(layout.built.copies, checkpoint, base, where)
    digest = hashlib.sha256(layout.said + b"\0" + look.sha256)
    if options.experts != "auto":
        digest.update(options.experts.encode())
    updates = FileUpdates(layout, checkpoint, blob.buffer())
    return Adapter(checkpoint, updates, suspect, digest.hexdigest(), base, owns_base=owns_base, blob=blob)


def _layout(
    source: Source, name: str, blob: Blob, text: bytes, *, index: BaseIndex | None, options: Options
) -> Layout:
    """Work out what the header, the config and the base say together, or remember it."""

    def fresh() -> Layout:
        config = parse_config(text, f"{source.name}/{CONFIG_NAME}")
        try:
            checkpoint = Checkpoint(opening.read_checkpoint(source, name, WEIGHTS_NAME, None))
        except FormatError as error:
            raise AdapterFormatError(str(error)) from error
        return work_out(checkpoint, config, index, options.experts, f"{source.name}/{WEIGHTS_NAME}")

    header = _header_bytes(blob)
    size = blob.size.to_bytes(8, "little")
    facts = None if header is None else (header, size, text, options.experts.encode())
    return recall(index, facts, fresh)


def _header_bytes(blob: Blob) -> bytes | None:
    """Return the header as it stands in the file; ``None`` when there is none of a usual size."""
    first = blob.read(ByteRange(0, min(_FIRST, blob.size)))
    end = 8 + int.from_bytes(first[:8], "little")
    if end <= len(first):
        return first[:end]
    return first + blob.read(ByteRange(len(first), end)) if end <= min(blob.size, _LONGEST) else None


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
    layout: Layout, checkpoint: Checkpoint, base: BaseIndex | None, options: Options
) -> list[str]:
    """Compare what the adapter says about its base with the base."""
    if base is None:
        return []
    found = []
    where = checkpoint.source.name
    recorded = layout.metadata.get(FINGERPRINT_KEY)
    if recorded is not None and recorded != base.fingerprint:
        found.append(
            f"{where}: it was made for a base of another structure (fingerprint {recorded[:12]}) than"
            f" {base.name} ({base.fingerprint[:12]}), although every shape that it uses fits"
        )
    own_name = base.config.get("_name_or_path")
    names = [base.name, *([own_name] if isinstance(own_name, str) else [])]
    said = layout.config.base_name
    if recorded != base.fingerprint and said and not any(same_name(said, name) for name in names):
        found.append(
            f"{where}: it says that its base is {said!r}, but it is used with {base.name}; the shapes fit,"
            " the answers may still be wrong"
        )
    if found and options.strict_base:
        raise AdapterBaseError(f"{found[0]}; strict_base refuses it")
    return found


def _value_warnings(layout: Layout, look: Look, where: str, options: Options) -> list[str]:
    """Judge values that are not numbers, and updates that change nothing."""
    found = []
    if look.nonfinite:
        text = (
            f"{where}: {len(look.nonfinite)} tensors hold NaN or infinite values (not finite), the first is"
        )
        text += f" {look.nonfinite[0]!r}"
        if options.nonfinite == "refuse":
            raise AdapterFormatError(f"{text}; train it again or read it with nonfinite='warn'")
        found.append(text)
    zero = {layout.ids[key] for key in look.zero if key in layout.ids}
    updates = [update for several in layout.built.updates.values() for update in several]
    if updates and all(_is_silent(update, zero) for update in updates):
        text = f"{where}: every lora_B (or lora_A) is zero: the adapter has no effect"
        if options.no_effect == "refuse":
            raise AdapterFormatError(f"{text}; train it, or read it with no_effect='warn'")
        found.append(text)
    copies = layout.built.copies
    if copies:
        found.append(
            f"{where}: {len(copies)} tensors repeat parameters of the base and are left out, the first"
            f" is {next(iter(copies))!r}"
        )
    return found


def _is_silent(update: Update, zero: Collection[int]) -> bool:
    """Say whether an update changes nothing; ``zero`` has the placeholders of tensors that are all zero."""
    if isinstance(update, TokenRows):
        return not update.rows
    if not isinstance(update, LowRank | EmbeddingLowRank | ExpertsLowRank):
        return False
    extra = isinstance(update, LowRank) and update.bias is not None
    dora = not isinstance(update, ExpertsLowRank) and update.magnitude is not None
    return not extra and not dora and (id(update.a) in zero or id(update.b) in zero)


def _compare_copies(copies: Mapping[str, str], own: Checkpoint, base: Checkpoint, where: str) -> None:
    """Refuse whole parameters of the base in the file, unless they are what the base has already."""
    index = index_of(base)
    for key, name in copies.items():
        stored = index.stored(name)
        assert stored is not None
        value, theirs = own.view(key), base[stored]
        if not torch.equal(value.to(theirs.dtype), theirs):
            raise AdapterBaseError(
                f"{where}: {key!r} is another {name} than the base's; it would overwrite the"
                " base for everyone. Name its module in modules_to_save to keep it with the adapter"
            )
