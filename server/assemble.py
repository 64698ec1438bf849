"""Model, tokenizer, adapter pool and limits, put together from an open checkpoint.

This imports torch and transformers. Only the engine thread uses what is made here, except `Loaded.text` and
the pool, which any thread may.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from loadstone.adapters.pool import AdapterPool
from loadstone.errors import FormatError, NotFoundError
from loadstone.loader.checkpoint import Checkpoint
from loadstone.loader.modules.load import load_model
from loadstone.server.generate import Answer, Decoder
from loadstone.server.text import Text
from loadstone.server.work import AnswerPlan, ModelFacts, Sampling
from loadstone.settings import Settings

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
)
_CONTEXT = 8192
"""Most tokens of a request where neither the model nor the settings say."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that can answer, and what belongs to it."""

    checkpoint: Checkpoint
    decoder: Decoder
    pool: AdapterPool
    text: Text
    facts: ModelFacts

    def begin(self, plan: AnswerPlan) -> Answer:
        """Begin one answer."""
        return Answer(plan, self.text)

    def warm_up(self) -> None:
        """Compute one token: returns when every weight that takes has arrived, and the device is done."""
        token = min(self.facts.ends, default=0)
        self.decoder.logits([token], self.decoder.new_cache()).cpu()

    def close(self) -> None:
        """Let go of adapters and files."""
        self.pool.close()
        self.checkpoint.close()


def assemble(
    checkpoint: Checkpoint,
    roots: Sequence[str],
    settings: Settings,
    storage_options: Mapping[str, object] | None = None,
) -> Loaded:
    """Put everything together, on ``settings.device``; no parameter is waited for."""
    place = torch.device(settings.device)
    if place.type == "cuda" and place.index is not None:
        torch.cuda.set_device(place)  # this thread's: kernels that do not ask where tensors are take it
    model = load_model(checkpoint, device=settings.device, settings=settings)
    return Loaded(
        checkpoint=checkpoint,
        decoder=Decoder(model),
        pool=AdapterPool(model, checkpoint, roots=roots, settings=settings, storage_options=storage_options),
        text=read_text(checkpoint),
        facts=read_facts(model, settings),
    )


def read_text(checkpoint: Checkpoint) -> Text:
    """Read the tokenizer that belongs to a checkpoint.

    Raises
    ------
    NotFoundError
        There is no ``tokenizer.json``.
    FormatError
        It cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="loadstone-") as folder:
        for name in _TOKENIZER_FILES:
            try:
                data = checkpoint.read_file(name)
            except NotFoundError:
                if name == "tokenizer.json":
                    raise
                continue
            (Path(folder) / name).write_bytes(data)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            backend = tokenizer.backend_tokenizer
        except Exception as error:
            text = " ".join(str(error).split()).replace(folder, checkpoint.name)
            raise FormatError(
                f"{checkpoint.name}: the tokenizer cannot be read ({type(error).__name__}: {text:.300}); "
                "check tokenizer.json and tokenizer_config.json"
            ) from error
    backend.no_truncation()
    backend.no_padding()
    return Text(backend)


def read_facts(model: PreTrainedModel, settings: Settings) -> ModelFacts:
    """Return the model's limits, and the defaults in its ``generation_config.json``, as vLLM does."""
    config = model.config.get_text_config(decoder=True)
    published = model.generation_config
    ends = config.eos_token_id if published.eos_token_id is None else published.eos_token_id
    positions = getattr(config, "max_position_embeddings", None) or settings.max_context or _CONTEXT
    return ModelFacts(
        context=min(positions, settings.max_context or positions),
        vocabulary=config.vocab_size,
        ends=frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends]),
        defaults=Sampling(
            temperature=1.0 if published.temperature is None else published.temperature,
            top_p=published.top_p or 1.0,
            top_k=published.top_k or 0,
            repetition_penalty=published.repetition_penalty or 1.0,
        ),
    )
