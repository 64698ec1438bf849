"""Which files of a folder make up a checkpoint, and which of them holds which tensor.

The rule, in this order; the first that fits decides:

1. ``model.safetensors.index.json``: the index alone decides, tensor by tensor. Other weight files are left
   alone, with a warning, be it ``model.safetensors`` itself.
2. ``model.safetensors``.
3. Shards ``model-00001-of-0000N.safetensors`` without an index: all of them, and all must be there, of one N.
4. The same three for ``diffusion_pytorch_model``, ``pytorch_model`` and ``adapter_model``.
5. The only other ``*.safetensors.index.json``, else all other ``*.safetensors`` files together.
6. ``consolidated.safetensors`` (or its index or shards): a second copy of the weights in their makers' own
   layout, taken only when there is nothing else, and otherwise ignored.

A variant such as ``fp16`` is asked for by name and has files of its own (``model.fp16.safetensors``,
``model.fp16-00001-of-0000N.safetensors``, ``model.safetensors.index.fp16.json``); nothing of one variant is
ever mixed with another. Subfolders are never looked into. Pickles are never opened.

Everything here is pure: names come as a list, the index through a callable.
"""

import re
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass

from loadstone.errors import IndexFileError, LocationError, NotFoundError
from loadstone.loader.format.header import Header, TensorInfo
from loadstone.loader.format.naming import enumerate_names, quote
from loadstone.loader.layout.dcp import RANK_FILE, SHARDING_INFO, refuse_slices
from loadstone.loader.layout.filenames import (
    CONSOLIDATED,
    INDEX_SUFFIX,
    STEMS,
    WeightFile,
    index_names,
    is_variant_index,
    missing_parts,
    mixed_counts,
    no_weights,
    parse_name,
    weights_name,
    why_missing,
)
from loadstone.loader.layout.tying import tied
from loadstone.loader.layout.weightmap import parse_index

__all__ = ["Layout", "choose_layout", "join", "tied"]

Read = Callable[[str], bytes | None]
"""Gives the content of a small file of the folder, ``None`` when there is no such file."""

_LISTED = 200
"""Most names in one message: every missing shard of any real checkpoint, but not of a hostile one."""

_VARIANT = re.compile(r"[\w-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of a checkpoint.

    Attributes
    ----------
    files : tuple[str, ...]
        The weight files, each once.
    weight_map : Mapping[str, str] or None
        Tensor name to file; ``None`` means every tensor of every file.
    index : str or None
        The name of the index that said so.
    warnings : tuple[str, ...]
        What is odd about the folder.
    total_size : int or None
        What the index says the tensors' bytes amount to.
    """

    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None
    index: str | None = None
    warnings: tuple[str, ...] = ()
    total_size: int | None = None


def choose_layout(names: Sequence[str] | None, read: Read, variant: str | None, where: str) -> Layout:
    """Decide which files to open.

    Parameters
    ----------
    names : Sequence[str] or None
        The names of the files directly in the folder; ``None`` when the store cannot list them: then
        ``model.safetensors.index.json`` is tried, and ``model.safetensors`` taken when there is none.
    read : Callable[[str], bytes | None]
        Gives the content of a small file, ``None`` when there is no such file. Only an index is read.
    variant : str or None
        The variant to open.
    where : str
        The folder's name, for messages.

    Raises
    ------
    LocationError
        ``variant`` is no such thing.
    NotFoundError
        There are no weights, or not of this variant, or shards are missing: all of them are named.
    FormatError
        The weights are in another format, with how to convert them.
    IndexFileError
        The index cannot be used.
    """
    if variant is not None and not _VARIANT.fullmatch(variant):
        raise LocationError(
            f"the variant {quote(variant)} is not one; expected letters, digits, '-' and '_', such as 'fp16'"
        )
    if names is None:
        return _unlisted(read, variant, where)
    other_index = _other_index(names, where) if variant is None else None
    for stem in STEMS:
        layout = _by_stem(stem, names, read, variant, where) or (
            None if other_index else _numbered(stem, names, variant, where)
        )
        if layout is not None:
            return layout
    if other_index:
        return _indexed(other_index, _read_index(other_index, read, where), names, variant, where)
    return (
        _others(names, variant, where)
        or _by_stem(CONSOLIDATED, names, read, variant, where)
        or _numbered(CONSOLIDATED, names, variant, where)
        or _refuse(names, variant, where)
    )


def _unlisted(read: Read, variant: str | None, where: str) -> Layout:
    for index in index_names(STEMS[0], variant):
        data = read(index)
        if data is not None:
            return _indexed(index, data, None, variant, where)
    return Layout((weights_name(STEMS[0], variant),))


def _by_stem(stem: str, names: Sequence[str], read: Read, variant: str | None, where: str) -> Layout | None:
    for index in index_names(stem, variant):
        if index in names:
            return _indexed(index, _read_index(index, read, where), names, variant, where)
    single = weights_name(stem, variant)
    if single in names:
        return Layout((single,), warnings=_left_alone((single,), names, variant, where))
    return None


def _numbered(stem: str, names: Sequence[str], variant: str | None, where: str) -> Layout | None:
    parts = [file for file in _weights(names, variant) if file.stem == stem and file.part is not None]
    return _together(parts, names, variant, where) if parts else None


def _other_index(names: Sequence[str], where: str) -> str | None:
    known = {name for stem in (*STEMS, CONSOLIDATED) for name in index_names(stem, None)}
    found = sorted(
        name
        for name in names
        if name.endswith(INDEX_SUFFIX) and name not in known and not is_variant_index(name)
    )
    if len(found) > 1 and not known & set(names):
        raise IndexFileError(
            f"{where}: {len(found)} indexes, {enumerate_names(found, _LISTED)}, expected one; "
            "keep only the one that is meant"
        )
    return found[0] if found else None


def _others(names: Sequence[str], variant: str | None, where: str) -> Layout | None:
    files = [file for file in _weights(names, variant) if file.stem != CONSOLIDATED]
    return _together(files, names, variant, where) if files else None


def _refuse(names: Sequence[str], variant: str | None, where: str) -> Layout:
    raise no_weights(names, variant, where)


def _weights(names: Sequence[str], variant: str | None) -> list[WeightFile]:
    return [file for file in map(parse_name, sorted(names)) if file and file.variant == variant]


def _together(files: Sequence[WeightFile], names: Sequence[str], variant: str | None, where: str) -> Layout:
    mixed = mixed_counts(files)
    if mixed:
        raise IndexFileError(
            f"{where}: no index, and shards of {len(mixed)} sets, {enumerate_names(mixed, _LISTED)}; remove "
            "those that are not meant, or add an index"
        )
    missing = missing_parts(files)
    if missing:
        raise NotFoundError(
            f"{where}: {len(missing)} shards are missing: {enumerate_names(missing, _LISTED)}; "
            "fetch the checkpoint again in full"
        )
    chosen = tuple(file.name for file in files)
    return Layout(chosen, warnings=_left_alone(chosen, names, variant, where))


def _read_index(index: str, read: Read, where: str) -> bytes:
    data = read(index)
    if data is None:
        raise IndexFileError(f"{where}: the index {index} was listed but is gone; open the checkpoint again")
    return data


def _indexed(index: str, data: bytes, names: Sequence[str] | None, variant: str | None, where: str) -> Layout:
    content = parse_index(data, f"{where.rstrip('/')}/{index}")
    files = tuple(sorted(set(content.files.values())))
    warnings: tuple[str, ...] = ()
    if names is not None:
        _check_there(files, names, index, where)
        warnings = _left_alone(files, names, variant, where)
    return Layout(files, content.files, index, warnings, content.total_size)


def _check_there(files: Sequence[str], names: Sequence[str], index: str, where: str) -> None:
    missing = sorted(set(files) - set(names))
    if not missing:
        return
    hints = [hint for hint in (why_missing(name, names) for name in missing) if hint]
    raise NotFoundError(
        f"{where}: {index} names {len(files)} weight files, and {len(missing)} of them are not there: "
        f"{enumerate_names(missing, _LISTED)}; "
        f"{'; '.join([*hints[:_LISTED], 'fetch the checkpoint again in full'])}"
    )


def _left_alone(
    chosen: Sequence[str], names: Sequence[str], variant: str | None, where: str
) -> tuple[str, ...]:
    rest = [
        file.name
        for file in _weights(names, variant)
        if file.name not in chosen and (file.stem != CONSOLIDATED or chosen[0].startswith(CONSOLIDATED))
    ]
    if not rest:
        return ()
    return (
        f"{where}: other weight files are there and left alone, stale or of another model perhaps: "
        f"{enumerate_names(rest, _LISTED)}",
    )


class _Joined(Mapping[str, TensorInfo]):
    """The tensors of several files by name; looks each up in its file's own table when asked."""

    def __init__(self, tables: dict[str, Mapping[str, TensorInfo]]) -> None:
        self._tables = tables

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tables[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __contains__(self, name: object) -> bool:
        return name in self._tables

    def keys(self) -> KeysView[str]:
        return self._tables.keys()


def join(
    layout: Layout, headers: Mapping[str, Header], where: str
) -> tuple[Mapping[str, TensorInfo], list[str]]:
    """Put the tensors of all files into one table.

    Parameters
    ----------
    layout : Layout
        The files, and which of their tensors count.
    headers : Mapping[str, Header]
        The header of each of ``layout.files``.
    where : str
        The folder's name, for messages.

    Returns
    -------
    Mapping[str, TensorInfo]
        Every tensor by name, file after file in the order of ``layout.files``, by offset within each.
    list[str]
        Warnings: tensors that the index does not list, sizes it is wrong about.

    Raises
    ------
    IndexFileError
        A file lacks a tensor that the index says it holds, two files without an index hold the same name,
        or files hold slices of tensors.
    """
    refuse_slices(headers, where)
    if layout.weight_map is not None:
        return _join_indexed(layout, layout.weight_map, headers, where)
    if len(layout.files) == 1:
        return headers[layout.files[0]].tensors, _perhaps_slices(layout, headers, where)
    tables: dict[str, Mapping[str, TensorInfo]] = {}
    for file in layout.files:
        tensors = headers[file].tensors
        for name in sorted(tensors.keys() & tables.keys()):
            first = next(other for other in layout.files if name in headers[other].tensors)
            raise IndexFileError(
                f"{where}: duplicate name: tensor {quote(name)} is in {quote(first)} and in {quote(file)}, "
                "and no index says which is meant; add an index, or remove the file that does not belong"
            )
        tables.update(dict.fromkeys(tensors, tensors))
    return _Joined(tables), _perhaps_slices(layout, headers, where)


def _join_indexed(
    layout: Layout, weight_map: Mapping[str, str], headers: Mapping[str, Header], where: str
) -> tuple[Mapping[str, TensorInfo], list[str]]:
    wanted: dict[str, set[str]] = {file: set() for file in layout.files}
    for name, file in weight_map.items():
        wanted[file].add(name)
    absent = [(name, file) for file in layout.files for name in wanted[file] - headers[file].tensors.keys()]
    if absent:
        raise IndexFileError(_absent_message(sorted(absent), layout, headers, where))
    tables: dict[str, Mapping[str, TensorInfo]] = {}
    warnings = _perhaps_slices(layout, headers, where)
    complete = True
    for file in layout.files:
        tensors = headers[file].tensors
        unlisted = [name for name in tensors if name not in wanted[file]]
        if unlisted:
            complete = False
            warnings.append(
                f"{where}: {len(unlisted)} tensors of {quote(file)} are not listed for it in {layout.index} "
                f"and left out, such as {quote(unlisted[0])}"
            )
        tables.update((name, tensors) for name in tensors if name in wanted[file])
    joined = _Joined(tables)
    if layout.total_size is not None:
        if complete:
            total = sum(header.file_size - header.data_start for header in headers.values())
        else:
            total = sum(info.nbytes for info in joined.values())
        if total != layout.total_size:
            warnings.append(
                f"{where}: {layout.index} says that its tensors have {layout.total_size} bytes, they have "
                f"{total}; the files' own headers are followed"
            )
    return joined, warnings


def _absent_message(
    absent: Sequence[tuple[str, str]], layout: Layout, headers: Mapping[str, Header], where: str
) -> str:
    shown = ", ".join(f"{quote(name)} in {quote(file)}" for name, file in absent[:_LISTED])
    more = f" and {len(absent) - _LISTED} more" if len(absent) > _LISTED else ""
    holders = [file for file in layout.files if absent[0][0] in headers[file].tensors]
    hint = f"{quote(absent[0][0])} is in {quote(holders[0])} instead; " if holders else ""
    return (
        f"{where}: {len(absent)} tensors are not where {layout.index} says: {shown}{more}; {hint}"
        "the index and the files do not belong together, fetch the checkpoint again in full"
    )


def _perhaps_slices(layout: Layout, headers: Mapping[str, Header], where: str) -> list[str]:
    written = [file for file in layout.files if SHARDING_INFO in headers[file].metadata]
    if not any(file.startswith(RANK_FILE) for file in written):
        return []
    return [
        f"{where}: written by torch's distributed checkpoint (DCP), one file per rank; whether the files of "
        "all ranks are there cannot be told"
    ]
