"""A folder of weight files in memory, opened as a checkpoint's files are chosen and joined."""

from collections.abc import Mapping
from random import Random

from loadstone.loader.format.header import Header, TensorInfo, parse_header
from loadstone.loader.layout.index import Layout, choose_layout, join
from tests.support.safetensors_files import tensor, tensors_file


def weights(*names: str, metadata: Mapping[str, str] | None = None) -> bytes:
    rng = Random(1)
    return tensors_file([tensor(rng, name, "F32", (2,)) for name in names], metadata)


class Folder:
    """A folder in memory that records what is read of it."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self.read_names: list[str] = []

    def read(self, name: str) -> bytes | None:
        self.read_names.append(name)
        return self.files.get(name)

    def layout(self, variant: str | None = None, *, listed: bool = True) -> Layout:
        return choose_layout(list(self.files) if listed else None, self.read, variant, "folder")

    def headers(self, layout: Layout) -> dict[str, Header]:
        return {
            file: parse_header(self.files[file], len(self.files[file]), file, f"folder/{file}")
            for file in layout.files
        }

    def open(self, variant: str | None = None) -> tuple[dict[str, TensorInfo], list[str]]:
        layout = self.layout(variant)
        infos, warnings = join(layout, self.headers(layout), "folder")
        return dict(infos), [*layout.warnings, *warnings]
