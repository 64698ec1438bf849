"""One model, loaded or held, in a fresh process: ``loader_models_child WAY FOLDER`` prints figures as JSON.

``FOLDER`` is what `loadstone.bench.loader_inputs` wrote. Ways that hold a model print ``ready``, wait for a
line on standard input, print their figures, and stay until standard input ends.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadstone.bench.loader_child import Clock, Figures, explained, need, touch
from loadstone.bench.loader_inputs import Inputs
from loadstone.bench.process import proportional_bytes, status_bytes

if TYPE_CHECKING:
    import torch

    Model = torch.nn.Module

_PROMPT = [[1, 2, 3, 4, 5, 6, 7, 8]]


def _build(inputs: Inputs) -> "Model":
    """Build the module on the meta device, as loading does first."""
    transformers, initialization, torch = need("transformers", "transformers.initialization", "torch")
    config = transformers.AutoConfig.from_pretrained(inputs.llama)
    with torch.device("meta"), initialization.no_init_weights():
        model: Model = transformers.AutoModelForCausalLM.from_config(config)
    return model


def _load(inputs: Inputs) -> "Model":
    model: Model = need("loadstone")[0].load_model(inputs.llama)
    return model


def _from_pretrained(inputs: Inputs) -> "Model":
    model: Model = need("transformers")[0].AutoModelForCausalLM.from_pretrained(inputs.llama)
    return model


def prepare_models() -> None:
    """Import what loading needs, so that only the loading is measured."""
    need("transformers.models.llama.modeling_llama", "transformers.initialization")
    need(
        *(
            f"loadstone.loader.{name}"
            for name in ("modules.load", "modules.architectures", "modules.direct", "tensors.reading")
        )
    )
    (logging,) = need("transformers.utils.logging")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _timed(make: Callable[[Inputs], "Model"], inputs: Inputs) -> Figures:
    """Measure until the model can be called, in a process that has loaded none before, and once more."""
    prepare_models()
    clock = Clock()
    model = make(inputs)
    figures = clock.figures("callable", clock.seconds())
    if not next(model.parameters()).is_meta:
        figures |= answered(model, clock)
    del model
    clock = Clock()
    make(inputs)
    return figures | {"again_seconds": clock.seconds()}


def answered(model: "Model", clock: Clock) -> Figures:
    """Have an answer of ``model``; return when it was there, and what it adds up to."""
    (torch,) = need("torch")
    prompt = torch.tensor(_PROMPT, device=next(model.parameters()).device)
    with torch.inference_mode():
        total = float(model(input_ids=prompt).logits.double().sum())
    return {"first_answer_seconds": clock.seconds(), "logits_sum": total}


def _held(make: Callable[[Inputs], "Model"], inputs: Inputs) -> None:
    """Hold a model with every byte of it touched, and say so; then wait to be asked."""
    prepare_models()
    model = make(inputs)
    touch(tensor for tensor in model.parameters() if not tensor.is_meta)
    print("ready", flush=True)
    sys.stdin.readline()
    figures = {"proportional_bytes": proportional_bytes(), "anonymous_bytes": status_bytes("RssAnon")}
    print(json.dumps(figures), flush=True)
    sys.stdin.read()


MAKERS: dict[str, Callable[[Inputs], Any]] = {
    "loadstone": _load,
    "from_pretrained": _from_pretrained,
    "meta": _build,
}


def main() -> int:
    """Carry out one way: ``load_…`` or ``hold_…``, then whose."""
    what, _, whose = sys.argv[1].partition("_")
    inputs = Inputs(Path(sys.argv[2]))
    with explained():
        if what == "load":
            print(json.dumps(_timed(MAKERS[whose], inputs)))
        else:
            _held(MAKERS[whose], inputs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
