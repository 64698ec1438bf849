"""Writes a base with an adapter merged into it, as a checkpoint of its own.

One tensor is held at a time. Tensors without an update are copied byte for byte. Everything is written to a
folder beside the destination, which takes its place only when it is complete; no state, any thread may merge.
"""

import ctypes
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from loadstone.adapters.adapter import Adapter
from loadstone.adapters.base import BaseIndex, index_of
from loadstone.errors import AdapterBaseError, AdapterUnsupportedError, LocationError, NotFoundError
from loadstone.loader.checkpoint import Checkpoint
from loadstone.loader.format.header import TensorInfo

_INDEX = "model.safetensors.index.json"
_MERGEABLE = frozenset({"F64", "F32", "F16", "BF16"})
_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_NOT_COPIED = frozenset({_INDEX, "config.json", "loadstone.json"})
_USUAL = (
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is written.

    Attributes
    ----------
    changed : Mapping[str, tuple[str, str]]
        Stored tensors that change: name to module and parameter.
    untied : Mapping[str, tuple[str, str] | None]
        Tensors that were tied to another and become their own: name to module and parameter, ``None`` for one
        that stays as it was.
    """

    changed: Mapping[str, tuple[str, str]]
    untied: Mapping[str, tuple[str, str] | None]


def merge_into(adapter: Adapter, checkpoint: Checkpoint, out: str | os.PathLike[str]) -> Path:
    """Write ``checkpoint`` with ``adapter`` merged into its weights.

    The result computes what the base computes with the adapter attached, but for rounding. Where the adapter
    changes an embedding or the head tied to it, but not both alike, they are written apart and
    ``tie_word_embeddings`` becomes false.

    Parameters
    ----------
    adapter
        Read with this base.
    checkpoint
        The base.
    out
        A folder that does not exist yet.

    Returns
    -------
    Path
        The folder: ``model*.safetensors``, an index if there are several, and the base's small files.

    Raises
    ------
    AdapterBaseError
        The adapter was read with another base.
    AdapterUnsupportedError
        A weight is quantised.
    LocationError
        ``out`` exists.
    """
    index = index_of(checkpoint)
    if adapter.base is None or index_of(adapter.base).fingerprint != index.fingerprint:
        read_with = "no base" if adapter.base is None else adapter.base.name
        raise AdapterBaseError(
            f"{adapter.source}: it was read with {read_with}; read it with"
            f" base={checkpoint.name!r} to merge it"
        )
    target = Path(out)
    if target.exists():
        raise LocationError(f"{target} exists already; choose a new folder to merge into")
    plan = _plan(adapter, checkpoint, index)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        folder.chmod(0o755)
        _write_shards(adapter, checkpoint, plan, folder)
        _copy_beside(checkpoint, folder, untie=bool(plan.untied))
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return target


def _plan(adapter: Adapter, checkpoint: Checkpoint, index: BaseIndex) -> _Plan:
    """Decide what becomes of each stored tensor, and which ties are cut."""
    wanted: dict[str, tuple[str, str]] = {}
    for module in adapter.updates:
        for parameter in adapter.parameters(module):
            wanted[f"{module}.{parameter}"] = (module, parameter)
    changed, untied = {}, {}
    for name, source in wanted.items():
        stored = index.stored(name)
        if stored is None:
            raise AdapterBaseError(
                f"{adapter.source}: the base {checkpoint.name} has no {name} to merge into"
            )
        info = checkpoint.info(stored)
        if info.dtype not in _MERGEABLE:
            raise AdapterUnsupportedError(
                f"{checkpoint.name}: {stored!r} has dtype {info.dtype};"
                " only F64, F32, F16 and BF16 can be merged into"
            )
        if name not in index.tied:
            changed[stored] = source
    for alias, stored in index.tied.items():
        head, body = wanted.get(alias), changed.get(stored)
        if not (head is None and body is None) and not _alike(adapter, head, body):
            untied[alias] = head
    return _Plan(changed, untied)


def _alike(adapter: Adapter, first: tuple[str, str] | None, second: tuple[str, str] | None) -> bool:
    """Say whether the very same updates are made to two parameters."""
    if first is None or second is None:
        return False
    return adapter.updates.same(first[0], second[0])


def _write_shards(adapter: Adapter, checkpoint: Checkpoint, plan: _Plan, folder: Path) -> None:
    shards: dict[str, list[TensorInfo]] = {}
    for name in checkpoint:
        info = checkpoint.info(name)
        shards.setdefault(info.file, []).append(info)
    weight_map: dict[str, str] = {}
    total = 0
    for number, infos in enumerate(shards.values(), 1):
        infos.sort(key=lambda info: info.offset)
        file = _shard_name(number, len(shards))
        new = plan.untied if number == len(shards) else {}
        rows = [(info.name, info) for info in infos]
        rows += [(alias, checkpoint.info(alias)) for alias in new]
        with (folder / file).open("wb") as out:
            out.write(_header(rows, checkpoint.metadata))
            for name, info in rows:
                _write(out, _value(adapter, checkpoint, plan, name))
                weight_map[name] = file
                total += info.nbytes
            out.flush()
            os.fsync(out.fileno())
    if len(shards) > 1:
        document = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(document, indent=2) + "\n")


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _header(rows: list[tuple[str, TensorInfo]], metadata: Mapping[str, str]) -> bytes:
    document: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    for name, info in rows:
        offsets = [position, position + info.nbytes]
        document[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": offsets}
        position += info.nbytes
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _value(adapter: Adapter, checkpoint: Checkpoint, plan: _Plan, name: str) -> torch.Tensor:
    """Return a tensor as it is to be written."""
    source = plan.untied[name] if name in plan.untied else plan.changed.get(name)
    if source is None:
        return checkpoint.raw(name)
    module, parameter = source
    return adapter.updated(module, checkpoint)[parameter]


def _write(out: BinaryIO, tensor: torch.Tensor) -> None:
    """Write a tensor's bytes, without numpy and without a copy."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.numel():
        out.write((ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr()))


def _copy_beside(checkpoint: Checkpoint, folder: Path, *, untie: bool) -> None:
    """Copy the config and the tokenizer's files."""
    config = checkpoint.config()
    if config is not None:
        if untie:
            _cut_ties(config)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name, data in _small_files(checkpoint):
        (folder / name).write_bytes(data)


def _cut_ties(config: dict[str, object]) -> None:
    config["tie_word_embeddings"] = False
    text = config.get("text_config")
    if isinstance(text, dict) and "tie_word_embeddings" in text:
        text["tie_word_embeddings"] = False


def _small_files(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    listed = checkpoint.source.names()
    for name in _USUAL if listed is None else listed:
        if not name.endswith(_BESIDE) or name in _NOT_COPIED or ".safetensors.index." in name:
            continue
        try:
            yield name, checkpoint.read_file(name)
        except NotFoundError:
            if listed is not None:
                raise
