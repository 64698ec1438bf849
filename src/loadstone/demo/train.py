"""Makes the demo's model and adapters: a Llama of a few million parameters, trained here in under a minute.

Everything is seeded, so that the same versions of torch and transformers give the same weights. The result
is written to a temporary folder first and renamed when complete: an interrupted run leaves nothing behind.
"""

import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from loadstone.demo.corpus import STYLES, lines

END = "<|end|>"
SHARD_BYTES = "6MB"  # three shards and an index, as a large model has
BASE_STEPS, ADAPTER_STEPS = 220, 110

ABANDONED_SECONDS = 3600
"""A scratch folder untouched for so long belongs to no run any more."""

Report = Callable[[str, int, int], None]
"""Called as ``report(what, step, steps)``."""


def make(folder: Path, report: Report) -> None:
    """Write ``folder/base`` and ``folder/adapters/<style>``, unless they are there already.

    Parameters
    ----------
    folder : Path
        Where to put them; its parent must be writable.
    report : callable
        Told how far the training has come.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}-*"):
        if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        with _quiet():
            _fill(scratch, report)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fill(folder: Path, report: Report) -> None:
    tokenizer = _make_tokenizer()
    model = _train_base(tokenizer, report)
    model.save_pretrained(folder / "base", max_shard_size=SHARD_BYTES)
    tokenizer.save_pretrained(str(folder / "base"))
    for style in STYLES:
        _train_adapter(folder, style, tokenizer, report)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' bars, and what it tells PEFT's authors to change, out of the demo's display."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it gives no types
    try:
        with warnings.catch_warnings():
            for module in ("transformers", "peft"):
                warnings.filterwarnings("ignore", category=FutureWarning, module=rf"{module}\b")
            yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the demo's own text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [a + b for style in (None, *STYLES) for a, b in lines(style)]
    tokenizer.train_from_iterator(text, trainer)
    # transformers gives its tokenizers no types.
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END, pad_token=END
    )


def _train_base(tokenizer: PreTrainedTokenizerFast, report: Report) -> LlamaForCausalLM:
    torch.manual_seed(0)
    end = int(tokenizer.convert_tokens_to_ids(END))  # type: ignore[arg-type]  # one token, one id
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = LlamaForCausalLM(config)
    _fit(
        model,
        tokenizer,
        lines(),
        steps=BASE_STEPS,
        rate=2e-3,
        report=lambda step: report("base model", step, BASE_STEPS),
    )
    return model


def _train_adapter(folder: Path, style: str, tokenizer: PreTrainedTokenizerFast, report: Report) -> None:
    torch.manual_seed(1)
    base = LlamaForCausalLM.from_pretrained(folder / "base")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    assert isinstance(model, PeftModel)
    name = f"adapter {style}"
    _fit(
        model,
        tokenizer,
        lines(style),
        steps=ADAPTER_STEPS,
        rate=5e-3,
        report=lambda step: report(name, step, ADAPTER_STEPS),
    )
    model.save_pretrained(str(folder / "adapters" / style))
    # PEFT records the folder it was trained in; the base is known by its name.
    path = folder / "adapters" / style / "adapter_config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "base_model_name_or_path": "base"}, indent=2))


def _fit(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    pairs: list[tuple[str, str]],
    *,
    steps: int,
    rate: float,
    report: Callable[[int], None],
) -> None:
    """Train ``model`` to continue each prompt by its answer; the prompt itself is not scored."""
    ids, labels = _encode(tokenizer, pairs)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=rate, total_steps=steps)
    model.train()
    for step in range(steps):
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        report(step + 1)
    model.eval()


def _encode(
    tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels, both (pairs, longest); padding and prompts are labelled -100."""
    end = tokenizer.convert_tokens_to_ids(END)
    rows = []
    for prompt, answer in pairs:
        asked = tokenizer(prompt)["input_ids"]
        told = [*tokenizer(answer)["input_ids"], end]
        rows.append((asked + told, [-100] * len(asked) + told))
    longest = max(len(row) for row, _ in rows)
    ids = torch.tensor([row + [end] * (longest - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for _, row in rows])
    return ids, labels
