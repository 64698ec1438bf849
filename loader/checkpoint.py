"""A checkpoint: names to tensors, wherever the bytes are.

Ownership: a `Checkpoint` is immutable once open, but for the set of names copied (only added to) and the
closed flag, so it may be used from any number of threads, and in forked children. What is shared and
locked (transfers, the node cache) lies behind `Source` and `Blob`.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from loadstone.errors import ClosedError, LoadstoneWarning, NotFoundError
from loadstone.loader import opening
from loadstone.loader.ensure import ensure
from loadstone.loader.format.header import TensorInfo
from loadstone.loader.layout.manifest import Manifest
from loadstone.loader.layout.verify import VerifyReport, verify_files
from loadstone.loader.locations import check_name
from loadstone.loader.order import as_read, fetch_order
from loadstone.loader.ranges import ByteRange
from loadstone.loader.source import Prefetch, Source, Span
from loadstone.loader.tensors import selection, stream
from loadstone.loader.tensors.stats import Stats
from loadstone.settings import Settings

if TYPE_CHECKING:
    import torch

    from loadstone.loader.modules.bind import BindReport
    from loadstone.loader.tensors.reading import Reader
    from loadstone.loader.tensors.tensor_slice import TensorSlice

Default = TypeVar("Default")
Patterns = str | Iterable[str] | None
"""One or several ``fnmatch`` patterns of tensor names; ``None`` is every tensor."""


def open_checkpoint(
    location: str | os.PathLike[str],
    *,
    variant: str | None = None,
    verify: bool = False,
    cache: str | os.PathLike[str] | None = "auto",
    copy: bool = False,
    storage_options: Mapping[str, object] | None = None,
    settings: Settings | None = None,
) -> "Checkpoint":
    """Open a checkpoint: a folder, an HF-cache snapshot, or one file, local or in a store.

    Only headers are read. Tensors come as views of the file's memory, and wait for their own bytes.

    Parameters
    ----------
    location : str or path
        ``model/``, ``model.safetensors``, ``s3://bucket/model``, ``https://host/model``, …
    variant : str, optional
        ``"fp16"`` opens ``model.fp16.safetensors``; variants are never mixed.
    verify : bool
        Compare every file that has a digest (``loadstone.json``, an HF cache's blob names, S3 ETags) with
        it before this returns, which reads all of them.
    cache : str, path or None
        Folder of the node cache for remote files; ``None`` keeps them in memory; ``"auto"``: the settings.
    copy : bool
        Every tensor read is a private copy, safe even when a local file is cut or overwritten later.
    storage_options : mapping, optional
        Credentials and endpoints, as fsspec spells them.
    settings : Settings, optional
        ``Settings.from_env()`` by default.

    Raises
    ------
    LoadstoneError
        It cannot be opened; the message says why, and what to do.
    """
    settings = Settings.from_env() if settings is None else settings
    source, name, file = opening.open_source(location, cache, storage_options, settings)
    try:
        opened = opening.read_checkpoint(source, name, file, variant)
        checkpoint = Checkpoint(opened, copy=copy)
        if verify or settings.verify:
            checkpoint.verify()
    except BaseException:
        source.close()
        raise
    for message in opened.warnings:
        warnings.warn(message, LoadstoneWarning, stacklevel=2)
    return checkpoint


class Checkpoint(Mapping[str, "torch.Tensor"]):
    """Names to tensors.

    ``ckpt[name]`` waits for that tensor's bytes and returns a view: private to this process, writable,
    sharing memory with every other view of the same tensor. Iteration gives the stored names; a head tied
    to the embedding is not among them, but can be looked up. A file of this machine that was replaced or
    changed since (by its inode, size and modification time) is an error at the next access. If one is *cut*
    while a tensor handed out is in use, the system ends the process (SIGBUS): use ``copy=True`` there.
    """

    def __init__(self, opened: opening.Opened, *, copy: bool = False) -> None:
        self._opened = opened
        self._infos = opened.infos
        self._copy = copy
        self._copied: set[str] = set()
        self._closed = False

    @property
    def name(self) -> str:
        """Where it is, for messages."""
        return self._opened.name

    @property
    def source(self) -> Source:
        """The folder of its files."""
        return self._opened.source

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the headers say (``__metadata__``); where files disagree, the first one's word."""
        return self._opened.metadata

    @property
    def tied(self) -> Mapping[str, str]:
        """Names that can be looked up but are not stored, and the stored tensor each stands for."""
        return MappingProxyType(dict(self._opened.tied))

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the weight files."""
        return tuple(self._opened.blobs)

    @property
    def manifest(self) -> Manifest | None:
        """The publisher's sizes and digests, where there are any."""
        return self._opened.manifest

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self._infos.values())

    @property
    def stats(self) -> Stats:
        """Copies made so far because data is not aligned."""
        names = list(self._copied)
        return Stats(len(names), sum(self._infos[name].nbytes for name in names))

    def __len__(self) -> int:
        return len(self._infos)

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos or name in self._opened.tied

    __eq__ = object.__eq__  # comparing tensors would read them all
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<Checkpoint {self.name}: {len(self)} tensors, {self.nbytes} bytes>"

    def __getitem__(self, name: str) -> "torch.Tensor":
        return self._reader.tensors([self.info(name)])[0]

    @overload
    def get(self, name: str, default: None = None, *, copy: bool = False) -> "torch.Tensor | None": ...
    @overload
    def get(self, name: str, default: Default, *, copy: bool = False) -> "torch.Tensor | Default": ...
    @overload
    def get(
        self, name: list[str] | tuple[str, ...] | AbstractSet[str], *, copy: bool = False
    ) -> "dict[str, torch.Tensor]": ...
    def get(
        self,
        name: str | list[str] | tuple[str, ...] | AbstractSet[str],
        default: object = None,
        *,
        copy: bool = False,
    ) -> object:
        """Return one tensor, or ``default`` when there is none of that name; or several, brought together.

        Parameters
        ----------
        name : str, or a list, tuple or set of str
            Several names give a dict of tensors; each of them must exist.
        default : object
            For a single name that does not exist.
        copy : bool
            Return private copies that no change of the file can reach.
        """
        if isinstance(name, str):
            if name not in self:
                return default
            return self.copy(name) if copy else self[name]
        infos = {one: self.info(one) for one in name}
        read = self._reader.copies if copy else self._reader.tensors
        return dict(zip(infos, read(infos.values()), strict=True))

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape, size and place of a tensor. Moves no bytes."""
        info = self._infos.get(self._opened.tied.get(name, name))
        if info is None:
            raise selection.missing(name, self._infos, self.name)
        return info

    def view(self, name: str) -> "torch.Tensor":
        """Return a tensor at once, WITHOUT waiting: until `wait` has returned, it may read as zeros.

        For code that waits by itself before any use. Unaligned data is waited for, as it has to be copied.
        """
        return self._reader.view(self.info(name))

    def raw(self, name: str) -> "torch.Tensor":
        """Return a tensor's bytes as a 1-D uint8 tensor, whatever its dtype."""
        return self._reader.raw(self.info(name))

    def copy(self, name: str) -> "torch.Tensor":
        """Return a private copy of a tensor, read without going through the file's map."""
        return self._reader.copies([self.info(name)])[0]

    def slice(self, name: str) -> "TensorSlice":
        """Return what is indexed like the tensor, ``slice(name)[10:20]``, and brings only those bytes."""
        return self._reader.part(self.info(name))

    def is_ready(self, name: str) -> bool:
        """Say whether a tensor can be used without waiting."""
        info = self.info(name)
        return self._opened.blobs[info.file].ready(info.range)

    def wait(self, names: Iterable[str] | None = None, timeout: float | None = None) -> None:
        """Block until tensors (all of them by default) can be used, ahead of any prefetch.

        Raises
        ------
        LoadstoneError
            Their bytes cannot be had, or ``timeout`` seconds went by (`StalledError`).
        """
        spans: dict[str, list[ByteRange]] = {}
        for name in self._infos if names is None else names:
            info = self.info(name)
            spans.setdefault(info.file, []).append(info.range)
        self._ensure(spans, timeout)

    def match(self, patterns: Patterns = None) -> list[str]:
        """Return the stored names that match, in the order of `keys`; a full name matches itself.

        Raises
        ------
        TensorNotFoundError
            One of the patterns matches nothing.
        """
        return selection.match(self._infos, self._opened.tied, patterns, self.name)

    def prefetch(self, patterns: Patterns | Mapping[str, object] = None, *, warm: bool = True) -> Prefetch:
        """Begin to bring tensors here in the background, in the order in which a model uses them.

        What is on this machine's disk already, as a local file or in the node cache, is read into memory, up
        to four fifths of what is free; ``warm=False`` leaves the node cache on the disk. Without patterns,
        the small files beside the weights (configuration, tokenizer) come first. A mapping of names to what
        is written between the brackets of `slice` brings just those parts, in its own order, as one rank of
        several wants them: ``{"lm_head.weight": np.s_[:16000], …}``.
        """
        self._check_open()
        if isinstance(patterns, Mapping):
            parts = ((self.info(name), self.slice(name).ranges(index)) for name, index in patterns.items())
            blobs = self._opened.blobs
            wanted = [Span(blobs[info.file], part) for info, few in parts for part in few]
            return self.source.prefetch(wanted, warm=warm)
        first = opening.companion_spans(self._opened) if patterns is None else []
        infos = as_read(self._infos[name] for name in self.match(patterns))
        return self.source.prefetch([*first, *self._spans(infos)], warm=warm)

    def prefetch_names(self, names: Iterable[str]) -> Prefetch:
        """Begin to bring tensors here in the background, in the order given."""
        return self._begin(map(self.info, names))

    def _begin(self, infos: Iterable[TensorInfo]) -> Prefetch:
        return self.source.prefetch(self._spans(infos))

    def _spans(self, infos: Iterable[TensorInfo]) -> list[Span]:
        return [Span(self._opened.blobs[file], span) for file, span in selection.join_neighbours(infos)]

    def stream(
        self,
        patterns: Patterns = None,
        order: selection.Order = "arrival",
        *,
        copy: bool = False,
        device: "str | int | torch.device" = "cpu",
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        """Return (name, tensor) pairs while the bytes come in.

        Parameters
        ----------
        patterns : str or iterable of str, optional
            Which tensors.
        order : {"arrival", "layer", "file"}
            As they become ready; in the order in which a model uses them; as they lie in the files.
        copy : bool
            Give private copies.
        device : str, int or torch.device
            Where to put them. CUDA devices are written through page-locked buffers of bounded size.
        """
        infos = [self._infos[name] for name in self.match(patterns)]
        batches = stream.stream(infos, order, self._reader, self._begin, copy=copy)
        if device == "cpu":
            return (pair for batch in batches for pair in batch)
        from loadstone.loader.tensors.device import parse_device, to_device  # noqa: PLC0415  imports torch

        return to_device(batches, parse_device(device))

    def file_order(self) -> list[str]:
        """Return all names in the order in which they lie in the files."""
        return [info.name for info in selection.in_order(list(self._infos.values()), "file")]

    def save_order(self) -> list[str]:
        """Return all names in the order in which a publisher should write them: as a model uses them."""
        return fetch_order(self._infos.values())

    def config(self) -> dict[str, object] | None:
        """Return the folder's ``config.json``, or ``None``."""
        self._check_open()
        return opening.read_config(self.source, self.name)

    def read_file(self, name: str) -> bytes:
        """Return a small file of the folder.

        Raises
        ------
        NotFoundError
            There is none of that name.
        """
        self._check_open()
        check_name(name, self.source.name)
        data = opening.read_small(self.source, name)
        if data is None:
            raise NotFoundError(
                f"{self.source.name} has no file {name!r}; check the name, or publish it there"
            )
        return data

    def fingerprint(self) -> str:
        """Return a digest of the structure: names, dtypes and shapes, not values."""
        rows = sorted((name, info.dtype, list(info.shape)) for name, info in self._infos.items())
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def verify(self) -> VerifyReport:
        """Compare every file that has a published digest with it; reads all of them.

        Raises
        ------
        IntegrityError
            Digests or sizes differ; each such file is named.
        """
        self._check_open()
        manifest = self.manifest
        if manifest is None:  # of one file opened by itself, the manifest was not looked for yet
            manifest = opening.read_manifest(self.source, self._opened.blobs)
        return verify_files(self.source, self._opened.blobs, manifest, self.name)

    def bind(self, module: "torch.nn.Module", **options: Any) -> "BindReport":
        """Make a module's parameters views of this checkpoint; see `loadstone.loader.modules.bind.bind`."""
        from loadstone.loader.modules.bind import bind  # noqa: PLC0415  imports torch

        return bind(module, self, **options)

    def close(self) -> None:
        """Stop what is on its way and refuse further reads. Tensors handed out stay valid."""
        self._closed = True
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _reader(self) -> "Reader":
        from loadstone.loader.tensors.reading import Reader  # noqa: PLC0415  imports torch, which opening must not

        return Reader(self._opened.blobs, self._ensure, self._copy, self._copied)

    def _ensure(self, spans: Mapping[str, Sequence[ByteRange]], timeout: float | None = None) -> None:
        self._check_open()
        ensure(self.source, self._opened.blobs, spans, timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"checkpoint {self.name} is closed; open it again")
