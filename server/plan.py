"""From a request to the answers to write: tokens, defaults, and the limits. Pure."""

from typing import TypeVar

from loadstone.errors import RequestError
from loadstone.server.text import Text
from loadstone.server.work import AnswerPlan, Completion, ModelFacts, Sampling
from loadstone.settings import Settings

Number = TypeVar("Number", int, float)


def plan_answers(request: Completion, text: Text, facts: ModelFacts, settings: Settings) -> list[AnswerPlan]:
    """Return the answers that ``request`` asks for, ``n`` for each prompt, in order.

    Raises
    ------
    RequestError
        It asks for more than the model or the settings allow.
    """
    count = len(request.prompts) * request.n
    most = settings.max_running + settings.max_waiting
    if count > most:
        raise RequestError(
            f"the request asks for {count} answers, at most {most} are allowed; lower n or split it",
            "n",
        )
    limit = settings.max_output_tokens
    if limit and request.max_tokens > limit:
        raise RequestError(f"max_tokens is {request.max_tokens}, at most {limit} are allowed", "max_tokens")
    sampling = _sampling(request, facts.defaults)
    plans: list[AnswerPlan] = []
    for prompt in request.prompts:
        tokens = _tokens(prompt, text, facts)
        _check_length(len(tokens), request.max_tokens, facts.context)
        echo = "" if not request.echo else prompt if isinstance(prompt, str) else text.decode(tokens)
        for _ in range(request.n):
            index = len(plans)
            plans.append(
                AnswerPlan(
                    index=index,
                    prompt=tokens,
                    max_tokens=request.max_tokens,
                    sampling=sampling,
                    # Answers of one request differ, and each is the same again for the same seed.
                    seed=None if request.seed is None else request.seed + index,
                    stop=request.stop,
                    ends=frozenset() if request.ignore_eos else facts.ends,
                    logprobs=request.logprobs,
                    echo=echo,
                )
            )
    return plans


def _sampling(request: Completion, defaults: Sampling) -> Sampling:
    return Sampling(
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        top_k=max(_or(request.top_k, defaults.top_k), 0),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
    )


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _tokens(prompt: str | tuple[int, ...], text: Text, facts: ModelFacts) -> tuple[int, ...]:
    if isinstance(prompt, str):
        tokens = text.encode(prompt)
    else:
        tokens = prompt
        wrong = next((token for token in tokens if not 0 <= token < facts.vocabulary), None)
        if wrong is not None:
            raise RequestError(
                f"token {wrong} is not among the model's 0 to {facts.vocabulary - 1}", "prompt"
            )
    if not tokens:
        raise RequestError("the prompt has no tokens, at least one is needed", "prompt")
    return tokens


def _check_length(prompt: int, answer: int, context: int) -> None:
    if prompt + answer > context:
        raise RequestError(
            f"the prompt has {prompt} tokens and max_tokens is {answer}, together at most {context} fit; "
            "shorten the prompt or lower max_tokens",
            "prompt" if prompt >= context else "max_tokens",
        )
