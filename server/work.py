"""What the parts of the service hand to each other: plain data, without torch and without HTTP."""

from dataclasses import dataclass
from typing import Literal

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Attributes
    ----------
    temperature : float
        0, and what is next to it, takes the likeliest token always.
    top_p, top_k : float, int
        Choose among the likeliest tokens only; 1.0 and 0 leave all of them.
    repetition_penalty : float
        Above 1, tokens that occurred already become less likely, also with a temperature of 0.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A valid request for completions; ``None`` leaves a choice to the model's own defaults.

    Attributes
    ----------
    prompts : tuple of str or tuple of int
        Each a text, or the tokens themselves.
    n : int
        Answers to each prompt.
    logprobs : int, optional
        Report the log-probability of each token, and of so many likeliest others.
    """

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    n: int = 1
    max_tokens: int = 16
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    echo: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a request is checked against.

    Attributes
    ----------
    context : int
        Most tokens, prompt and answer together.
    vocabulary : int
        Tokens are 0 up to this, exclusive.
    ends : frozenset of int
        Tokens that end an answer.
    defaults : Sampling
        What holds for choices that a request leaves open.
    """

    context: int
    vocabulary: int
    ends: frozenset[int]
    defaults: Sampling


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """One answer to write: a prompt in tokens, and everything that decides how it goes on and ends.

    Attributes
    ----------
    index : int
        Which of the request's answers it is.
    ends : frozenset of int
        Tokens that end it.
    echo : str
        The text it begins with: the prompt's, where the request asks for it.
    """

    index: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    seed: int | None
    stop: tuple[str, ...]
    ends: frozenset[int]
    logprobs: int | None
    echo: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of an answer, its log-probability, the likeliest others, and where its text begins."""

    text: str
    logprob: float
    top: dict[str, float]
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one answer.

    ``text`` may be empty while a character, or what may become a stop sequence, is incomplete.
    """

    index: int
    text: str
    finish: Finish | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
