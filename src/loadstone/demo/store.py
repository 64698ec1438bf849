"""Where the demo keeps its model: a folder served over ranged HTTP, or a real object store."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import fsspec

from loadstone.errors import TransferError
from loadstone.fileserver import FileServer


@dataclass(frozen=True, slots=True)
class Store:
    """A folder of an object store that holds ``base`` and ``adapters/<style>``."""

    root: str
    options: dict[str, object]

    @property
    def base(self) -> str:
        """Where the base model is."""
        return f"{self.root}/base"

    @property
    def adapters(self) -> str:
        """The folder that all adapters are in."""
        return f"{self.root}/adapters"


@contextmanager
def open_store(folder: Path, url: str | None, endpoint_url: str | None) -> Iterator[Store]:
    """Put ``folder`` in a store: serve it from here, or copy it to ``url``.

    Raises
    ------
    TransferError
        The copy did not succeed.
    """
    if url is None:
        with FileServer(folder) as server:
            yield Store(server.url.rstrip("/"), {})
        return
    options: dict[str, object] = {"endpoint_url": endpoint_url} if endpoint_url else {}
    try:
        fs, root = fsspec.core.url_to_fs(url, **options)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                fs.put_file(str(path), f"{root}/{path.relative_to(folder).as_posix()}")
    except (OSError, ValueError, ImportError) as error:
        raise TransferError(
            f"cannot copy the demo's model to {url}: {error}; check the URL and credentials"
        ) from error
    yield Store(url.rstrip("/"), options)
