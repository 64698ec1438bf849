"""Writes what the transfer benchmark serves: ``transfer_inputs FOLDER SIZE MODEL_SIZE``.

- ``sharded``: a Llama of 32 layers in four shards of bf16, at least SIZE bytes;
- ``llama``: a Llama of 16 layers in two shards, at least MODEL_SIZE bytes, which answers;
- ``many``: a small Llama of 30 layers in 30 shards.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from loadstone.bench.loader_inputs import LAYERS, SHARDS, llama_config, write_llama

MANY_SHARDS = 30

_MODEL_LAYERS = 16


@dataclass(frozen=True, slots=True)
class Served:
    """Where everything lies: folders of one bucket."""

    folder: Path

    @property
    def sharded(self) -> Path:
        """The checkpoint that is moved."""
        return self.folder / "sharded"

    @property
    def llama(self) -> Path:
        """The model that answers."""
        return self.folder / "llama"

    @property
    def many(self) -> Path:
        """The checkpoint that is only opened."""
        return self.folder / "many"


def weights(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint's folder."""
    return sorted(folder.glob("*.safetensors"))


def main() -> int:
    """Write everything below a folder, and print how many bytes it has."""
    served, size, model_size = Served(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    write_llama(served.sharded, llama_config(LAYERS, size), SHARDS)
    write_llama(served.llama, llama_config(_MODEL_LAYERS, model_size), 2)
    write_llama(served.many, llama_config(MANY_SHARDS, 0), MANY_SHARDS)
    written = sum(path.stat().st_size for path in served.folder.rglob("*") if path.is_file())
    print(json.dumps({"written_bytes": written}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
