"""One cold start, in a fresh process: ``cold_start_child WAY SPEC`` prints its figures as one JSON line.

``SPEC`` is a JSON object: ``location``, ``files`` (names in the folder), ``options`` (storage options),
``scratch`` (a folder of this run's own), ``prompt``, and ``started`` (``time.monotonic`` of the moment
before this process was started: the clock is one for all processes of a machine).
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadstone.bench.process import status_bytes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Spec = Mapping[str, Any]


def main() -> int:
    """Carry out one cold start and print its figures."""
    way, spec = sys.argv[1], json.loads(sys.argv[2])
    figures = WAYS[way](spec)
    figures |= _memory()
    print(json.dumps(figures))
    return 0


def _since(spec: Spec) -> float:
    return time.monotonic() - float(spec["started"])


def download_then_load(spec: Spec) -> dict[str, float]:
    """Fetch every file with fsspec to a local folder, then ``from_pretrained``."""
    import fsspec  # noqa: PLC0415  what is imported when is what is measured

    folder = Path(spec["scratch"]) / "model"
    folder.mkdir()
    fs, root = fsspec.core.url_to_fs(spec["location"], **spec["options"])
    moved = 0
    for name in spec["files"]:
        fs.get_file(f"{root}/{name}", str(folder / name))
        moved += (folder / name).stat().st_size
    here = _since(spec)
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    imported = _since(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    first = _first_token(model, spec, lambda name: (folder / name).read_bytes())
    return {
        "imports_done_seconds": imported,
        "first_token_seconds": first,
        "all_bytes_seconds": here,
        "moved_bytes": moved,
    }


def lazy(spec: Spec) -> dict[str, float]:
    """Import first, then map lazily: each tensor is fetched when the first forward pass needs it."""
    from transformers import AutoModelForCausalLM  # noqa: F401, PLC0415  imported for its cost

    imported = _since(spec)
    return _serve_from_checkpoint(spec, imported)


def overlapped(spec: Spec) -> dict[str, float]:
    """Do the same, while ``loadstone run`` has been fetching since before this process began."""
    return lazy(spec)


def _serve_from_checkpoint(spec: Spec, imported: float) -> dict[str, float]:
    import loadstone  # noqa: PLC0415

    with loadstone.open(spec["location"], storage_options=spec["options"]) as checkpoint:
        model = loadstone.load_model(checkpoint)
        first = _first_token(model, spec, checkpoint.read_file)
        checkpoint.wait()
        return {
            "imports_done_seconds": imported,
            "first_token_seconds": first,
            "all_bytes_seconds": _since(spec),
        }


def _first_token(model: "PreTrainedModel", spec: Spec, read: Callable[[str], bytes]) -> float:
    """Answer the prompt greedily; return when the first token was known."""
    import torch  # noqa: PLC0415

    ids = _encode(spec["prompt"], read)
    with torch.inference_mode():
        int(model(input_ids=ids).logits[0, -1].argmax())
    return _since(spec)


def _encode(prompt: str, read: Callable[[str], bytes]) -> "torch.Tensor":
    import torch  # noqa: PLC0415
    from tokenizers import Tokenizer  # noqa: PLC0415

    tokenizer = Tokenizer.from_str(read("tokenizer.json").decode())
    return torch.tensor([tokenizer.encode(prompt).ids])


def _memory() -> dict[str, float]:
    """Return the peak of all memory and the anonymous memory at the end, in bytes."""
    return {"peak_memory_bytes": status_bytes("VmHWM"), "anonymous_memory_bytes": status_bytes("RssAnon")}


WAYS: dict[str, Callable[[Spec], dict[str, float]]] = {
    "download": download_then_load,
    "lazy": lazy,
    "overlap": overlapped,
}

if __name__ == "__main__":
    raise SystemExit(main())
