"""The decode loop: one model, one answer, one token at a time.

Everything here runs in the thread that owns the model. Each answer has its own key-value cache and its own
forward passes, so that what it says does not depend on what else is being answered: a temperature of 0
gives the tokens that transformers' ``generate(do_sample=False)`` gives.
"""

import inspect
from collections.abc import Sequence
from typing import cast

import torch
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from loadstone.errors import BindError, GenerationError
from loadstone.server.text import Detokenizer, StopScanner, Text
from loadstone.server.work import AnswerPlan, Finish, Piece, Sampling, TokenLogprob

_KEEPS_STATE = frozenset({"recurrent_gemma"})
"""Types of models that keep in their modules what an answer has so far, so that answers would mix."""

_COLD = 1e-5
"""Temperatures below take the likeliest token, as in vLLM: divided by less, scores would overflow."""


class Decoder:
    """A causal language model that is asked for the next token's logits.

    Attributes
    ----------
    model : PreTrainedModel
        The model itself.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        accepted = inspect.signature(model.forward).parameters
        names = [name for name in ("cache", "past_key_values") if name in accepted]
        if not model.can_generate() or model.config.is_encoder_decoder or not names:
            raise BindError(
                f"{type(model).__name__} cannot be served: it does not generate from a key-value cache; "
                "serve a decoder-only language model"
            )
        if model.config.model_type in _KEEPS_STATE:
            raise BindError(
                f"{type(model).__name__} cannot be served: it keeps one answer's state in its layers, where"
                " the next one would find it; serve another model"
            )
        self.model = model
        self._cache_name = names[0]
        # Only the last position is used: the head of a long prompt need not be computed.
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def new_cache(self) -> DynamicCache:
        """Return an empty key-value cache."""
        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], cache: DynamicCache) -> torch.Tensor:
        """Return the scores, (1, vocabulary), of what comes after ``tokens``, which continue ``cache``."""
        ids = torch.tensor([tokens], dtype=torch.long, device=self.model.device)
        output = self.model(input_ids=ids, use_cache=True, **{self._cache_name: cache}, **self._options)
        last: torch.Tensor = output.logits[:, -1]
        return last.to(copy=True, dtype=torch.float32)


class Answer:
    """One answer while it is written."""

    def __init__(self, plan: AnswerPlan, text: Text) -> None:
        self._plan = plan
        self._text = text
        self._tokens = list(plan.prompt)
        self._cache: DynamicCache | None = None
        self._choose = Chooser(plan.sampling, plan.seed)
        self._detokenizer = Detokenizer(text.decode, plan.prompt)
        self._stops = StopScanner(plan.stop)
        self._unsent = plan.echo
        self._length = len(plan.echo)

    def step(self, decoder: Decoder) -> Piece:
        """Work out one more token."""
        if self._cache is None:
            self._cache = decoder.new_cache()
            logits = decoder.logits(self._tokens, self._cache)
        else:
            logits = decoder.logits(self._tokens[-1:], self._cache)
        if not torch.isfinite(logits.max()):
            raise GenerationError(
                "the model's scores are not finite, so no token is the likeliest; look for NaN or infinite"
                " values in the adapter and the base"
            )
        token = self._choose(self._tokens, logits)
        self._tokens.append(token)
        report = self._report(token, logits)
        text, finish = self._extend(token)
        text, self._unsent = self._unsent + text, ""
        return Piece(self._plan.index, text, finish, report)

    def _extend(self, token: int) -> tuple[str, Finish | None]:
        """Return the text that may be shown now, and whether the answer has ended."""
        ended = token in self._plan.ends
        full = len(self._tokens) - len(self._plan.prompt) >= self._plan.max_tokens
        delta = "" if ended else self._detokenizer.push(token)
        if ended or full:
            delta += self._detokenizer.flush()
        self._length += len(delta)
        shown, stopped = self._stops.push(delta)
        if stopped:
            return shown, "stop"
        if ended or full:
            return shown + self._stops.flush(), "stop" if ended else "length"
        return shown, None

    def _report(self, token: int, logits: torch.Tensor) -> tuple[TokenLogprob, ...]:
        """Return the token's log-probability by the model itself, before temperature and penalties."""
        if self._plan.logprobs is None:
            return ()
        scores = torch.log_softmax(logits[0], dim=-1).cpu()  # at once: each number below is a copy otherwise
        best = torch.topk(scores, self._plan.logprobs).indices.tolist()
        tokens = list(dict.fromkeys([token, *best]))
        names = dict(zip(tokens, self._text.names(tokens), strict=True))
        top = {names[other]: float(scores[other]) for other in best}
        return (TokenLogprob(names[token], float(scores[token]), top, self._length),)


class Chooser:
    """Chooses the next token, with transformers' own arithmetic."""

    def __init__(self, sampling: Sampling, seed: int | None) -> None:
        self._processors = LogitsProcessorList()
        self._generator: torch.Generator | None = None
        if sampling.repetition_penalty != 1:
            self._processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.temperature < _COLD:
            return
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        if sampling.temperature != 1:
            self._processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            self._processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._processors.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        """Return the token after ``tokens``."""
        scores = logits
        if self._processors:
            seen = torch.tensor([tokens], dtype=torch.long, device=logits.device)
            scores = self._processors(
                cast("torch.LongTensor", seen), cast("torch.FloatTensor", logits.clone())
            )
        if self._generator is None:
            return int(torch.argmax(scores, dim=-1))
        probabilities = torch.softmax(scores, dim=-1).cpu()
        return int(torch.multinomial(probabilities, num_samples=1, generator=self._generator))
