"""The JSON that clients send and get: OpenAI's completions, vLLM's adapter calls.

What is not supported is refused by name instead of ignored: an answer that silently lacks what was asked for
is worse than none. Fields of OpenAI's that change nothing at their neutral value are taken at that value.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from loadstone.server.work import Completion

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
}

Prompt = str | tuple[int, ...]

_HALF = re.compile("[\ud800-\udfff]")
_MOST_PROMPTS = 2048  # OpenAI's own limit; checking many more would keep other requests waiting


def _is_text(value: object) -> bool:
    # JSON can spell half of a surrogate pair, which no tokenizer can read and no UTF-8 answer can hold.
    return isinstance(value, str) and _HALF.search(value) is None


def _to_prompts(value: object) -> object:
    """Bring the four forms of a prompt into one: a list of prompts."""
    if _is_text(value):
        return [value]
    if isinstance(value, list) and value:
        if len(value) > _MOST_PROMPTS and type(value[0]) is not int:
            raise ValueError(f"{len(value)} prompts are more than {_MOST_PROMPTS}; send fewer at a time")
        if all(_is_text(item) for item in value):
            return value
        if all(type(item) is int for item in value):
            return [tuple(value)]
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
            return [tuple(item) for item in value]
    raise ValueError("send a text, a list of texts, a list of tokens, or a list of lists of tokens")


def _to_stops(value: object) -> object:
    if value is None:
        return []
    stops = [value] if _is_text(value) else value
    if not isinstance(stops, list) or not all(_is_text(stop) and stop for stop in stops):
        raise ValueError("send a text, or a list of texts, none of them empty")
    if len(stops) > 16 or any(len(stop) > 1000 for stop in stops):
        raise ValueError("send at most 16 texts of at most 1000 characters")
    return stops


class StreamOptions(BaseModel):
    """What a stream should hold besides the text."""

    model_config = _STRICT

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """The body of ``POST /v1/completions``."""

    model_config = _STRICT

    model: str
    prompt: Annotated[list[Prompt], BeforeValidator(_to_prompts)]
    n: int = Field(1, ge=1, le=128)
    max_tokens: int = Field(16, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str], BeforeValidator(_to_stops)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=5)
    user: str | None = Field(None, description="Taken and not used.")
    top_k: int | None = Field(None, ge=-1, description="As in vLLM; 0 and -1 leave all tokens.")
    repetition_penalty: float | None = Field(None, ge=0.01, le=10, description="As in vLLM.")
    ignore_eos: bool = Field(default=False, description="As in vLLM: go on until max_tokens.")
    best_of: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None
    suffix: Any = None

    @field_validator("n", "max_tokens", "stream", "echo", "ignore_eos", mode="before")
    @classmethod
    def _null_is_default(cls, value: object, info: Any) -> object:
        return cls.model_fields[info.field_name].default if value is None else value

    @field_validator(*_NEUTRAL, mode="before")
    @classmethod
    def _only_neutral(cls, value: object, info: Any) -> None:
        if value is not None and value not in _NEUTRAL[info.field_name]:
            raise ValueError("not supported by this service; leave it out")

    def to_completion(self) -> Completion:
        """Return the request as the engine takes it."""
        return Completion(
            model=self.model,
            prompts=tuple(self.prompt),
            n=self.n,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            stop=tuple(self.stop),
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            echo=self.echo,
        )


class LoadAdapterRequest(BaseModel):
    """The body of ``POST /v1/load_lora_adapter``."""

    model_config = _STRICT

    lora_name: str = Field(min_length=1)
    lora_path: str | None = Field(
        None,
        min_length=1,
        description="Folder or URL inside an adapter root; left out: the name, in the roots.",
    )
    load_inplace: bool = Field(default=False, description="Replace another adapter of this name.")


class UnloadAdapterRequest(BaseModel):
    """The body of ``POST /v1/unload_lora_adapter``."""

    model_config = _STRICT

    lora_name: str = Field(min_length=1)


class Logprobs(BaseModel):
    """Log-probabilities of one choice's tokens."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float] = Field(default_factory=list)
    top_logprobs: list[dict[str, float]] = Field(default_factory=list)
    text_offset: list[int] = Field(default_factory=list)


class Choice(BaseModel):
    """One answer, or what a stream adds to it."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class Usage(BaseModel):
    """What a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionResponse(BaseModel):
    """The answer to ``POST /v1/completions``, whole or one event of a stream.

    ``system_fingerprint`` names the version of the adapter that answers; it stays the same for all of one
    answer, also when the adapter is replaced meanwhile.
    """

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    system_fingerprint: str | None = None


class LoadAdapterResponse(BaseModel):
    """What loading an adapter did and cost, for callers that accept JSON."""

    lora_name: str
    version: str = Field(description="Identifies the adapter's content.")
    changed: bool = Field(description="False: this very content was loaded already, nothing was done.")
    bytes: int = Field(description="Bytes of tensors now held for it.")
    milliseconds: float
    warnings: list[str] = Field(description="What is doubtful about it, such as another base's name.")
    message: str


class ModelCard(BaseModel):
    """One entry of ``GET /v1/models``: the base, or an adapter, whose ``parent`` the base is."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["loadstone"] = "loadstone"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    """The answer to ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
