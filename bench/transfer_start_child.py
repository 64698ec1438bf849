"""A process that imports torch and transformers, takes a model and answers: ``transfer_start_child SPEC``.

``SPEC`` is as for `loadstone.bench.transfer_child`. Prints its figures as one JSON line; times count from the
moment before the first process of the run was started.
"""

import json
import sys
import time

from loadstone.bench.transfer_child import Spec

_PROMPT = [[1, 2, 3, 4, 5, 6, 7, 8]]


def main() -> int:
    """Answer with one token, then wait for whatever the answer did not need."""
    spec = Spec.parse(sys.argv[1])
    import torch  # noqa: PLC0415  what is imported when is what is measured
    from transformers import LlamaForCausalLM  # noqa: F401, PLC0415

    imported = time.monotonic() - spec.started
    import loadstone  # noqa: PLC0415

    with loadstone.open(spec.location) as checkpoint:
        model = loadstone.load_model(checkpoint)
        with torch.inference_mode():
            int(model(input_ids=torch.tensor(_PROMPT)).logits[0, -1].argmax())
        first = time.monotonic() - spec.started
        checkpoint.wait()
        everything = time.monotonic() - spec.started
    print(
        json.dumps(
            {
                "imports_done_seconds": imported,
                "first_token_seconds": first,
                "all_bytes_seconds": everything,
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
