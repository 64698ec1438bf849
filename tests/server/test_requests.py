"""Requests before they reach the engine: shapes, limits, and who may ask."""

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from tests.support.served_models import make_tokenizer

from loadstone import errors
from loadstone.server.access import check_admin, is_loopback
from loadstone.server.plan import plan_answers
from loadstone.server.problems import describe, from_validation, status_of
from loadstone.server.schema import CompletionRequest
from loadstone.server.text import Text
from loadstone.server.work import Completion, ModelFacts, Sampling
from loadstone.settings import Settings

FACTS = ModelFacts(
    context=32, vocabulary=320, ends=frozenset({1}), defaults=Sampling(temperature=0.7, top_k=5)
)
TEXT = Text(make_tokenizer().backend_tokenizer)
LOCAL = {"host": "127.0.0.1:8000"}


def _refusal(body: dict[str, object]) -> errors.RequestError:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(body)
    problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in caught.value.errors()]
    return from_validation(RequestValidationError(problems).errors())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("best_of", 2, "not supported"),
        ("frequency_penalty", 0.5, "not supported"),
        ("presence_penalty", -1, "not supported"),
        ("logit_bias", {"1": 5}, "not supported"),
        ("suffix", "end", "not supported"),
        ("guided_json", {}, "not a field"),
        ("n", 0, "greater than or equal to 1"),
        ("max_tokens", 0, "greater than or equal to 1"),
        ("max_tokens", True, "valid integer"),
        ("max_tokens", "5", "valid integer"),
        ("temperature", 2.5, "less than or equal to 2"),
        ("temperature", float("nan"), "finite"),
        ("top_p", 0, "greater than 0"),
        ("logprobs", 6, "less than or equal to 5"),
        ("stop", ["a", ""], "none of them empty"),
        ("stop", ["x"] * 17, "at most 16"),
        ("prompt", [], "a list of tokens"),
        ("prompt", [1, "x"], "a list of tokens"),
        ("prompt", [True], "a list of tokens"),
        ("prompt", "\ud800", "a list of tokens"),
        ("prompt", ["x"] * 2049, "send fewer"),
        ("prompt", [[1]] * 2049, "send fewer"),
        ("repetition_penalty", 1e-40, "greater than or equal to 0.01"),
        ("model", 5, "valid string"),
    ],
)
def test_a_wrong_field_is_refused_by_name(field: str, value: object, words: str) -> None:
    refusal = _refusal({"model": "m", "prompt": "p", field: value})
    assert refusal.param == field
    assert words in str(refusal)
    assert field in str(refusal)


def test_neutral_values_and_null_are_taken() -> None:
    neutral = {"best_of": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "suffix": ""}
    empty = {"n": None, "max_tokens": None, "stream": None, "stop": None, "temperature": None, "user": "me"}
    body = CompletionRequest.model_validate({"model": "m", "prompt": "p", **neutral, **empty})
    assert body.to_completion() == Completion(model="m", prompts=("p",))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        ("", ("",)),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: object, prompts: object) -> None:
    body = CompletionRequest.model_validate({"model": "m", "prompt": prompt})
    assert body.to_completion().prompts == prompts


def test_answers_are_planned_in_order_with_seeds_of_their_own() -> None:
    request = Completion("m", ("ab", (5, 6)), n=2, seed=10, stop=("x",), echo=True)
    plans = plan_answers(request, TEXT, FACTS, Settings())
    assert [plan.index for plan in plans] == [0, 1, 2, 3]
    assert [plan.seed for plan in plans] == [10, 11, 12, 13]
    assert [plan.prompt for plan in plans] == [TEXT.encode("ab")] * 2 + [(5, 6)] * 2
    assert [plan.echo for plan in plans] == ["ab"] * 2 + [TEXT.decode([5, 6])] * 2
    assert plans[0].ends == {1}
    assert plans[0].sampling == FACTS.defaults


def test_a_request_overrides_the_publishers_defaults() -> None:
    request = Completion("m", ("ab",), temperature=0.0, top_k=-1, ignore_eos=True)
    (plan,) = plan_answers(request, TEXT, FACTS, Settings())
    assert plan.sampling == Sampling(temperature=0.0, top_k=0)
    assert not plan.ends


@pytest.mark.parametrize(
    ("request_", "settings", "param", "words"),
    [
        (Completion("m", ((5,) * 30,)), Settings(), "max_tokens", "30 tokens and max_tokens is 16"),
        (Completion("m", ((5,) * 40,), max_tokens=1), Settings(), "prompt", "at most 32"),
        (Completion("m", ((320,),)), Settings(), "prompt", "token 320"),
        (Completion("m", ((-1,),)), Settings(), "prompt", "token -1"),
        (Completion("m", ((),)), Settings(), "prompt", "no tokens"),
        (Completion("m", ("a",), max_tokens=9), Settings(max_output_tokens=8), "max_tokens", "at most 8"),
        (Completion("m", ("a",), n=4), Settings(max_running=1, max_waiting=2), "n", "at most 3"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    request_: Completion, settings: Settings, param: str, words: str
) -> None:
    with pytest.raises(errors.RequestError, match=words) as caught:
        plan_answers(request_, TEXT, FACTS, settings)
    assert caught.value.param == param


def test_a_token_is_asked_for_when_there_is_one() -> None:
    for headers in (
        {},
        {"authorization": "Basic x"},
        {"authorization": "Bearer"},
        {"authorization": "secret"},
    ):
        with pytest.raises(errors.TokenError, match="missing"):
            check_admin(headers, "127.0.0.1", "secret", local_only=True)
    for wrong in ("Bearer secre", "Bearer secret2", "Bearer ünïcode"):
        with pytest.raises(errors.TokenError, match="wrong"):
            check_admin({"authorization": wrong}, "127.0.0.1", "secret", local_only=True)
    check_admin(
        {"authorization": "Bearer secret", "origin": "https://x"}, "9.9.9.9", "secret", local_only=False
    )


@pytest.mark.parametrize(
    ("headers", "client", "local_only", "words"),
    [
        (LOCAL, "127.0.0.1", False, "no admin token"),
        (LOCAL, "192.168.1.7", True, "comes from 192.168.1.7"),
        (LOCAL, None, True, "comes from None"),
        ({**LOCAL, "origin": "https://evil.example"}, "127.0.0.1", True, "browser"),
        ({**LOCAL, "x-forwarded-for": "9.9.9.9"}, "127.0.0.1", True, "proxy"),
        ({"host": "evil.example:8000"}, "127.0.0.1", True, "host 'evil.example:8000'"),
        ({}, "127.0.0.1", True, "host ''"),
    ],
)
def test_without_a_token_only_programs_on_this_machine_may(
    headers: dict[str, str], client: str | None, local_only: bool, words: str
) -> None:
    with pytest.raises(errors.DeniedError, match=words):
        check_admin(headers, client, "", local_only=local_only)


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "localhost:80", "[::1]:8000", "[::1]"])
def test_loopback_names_are_let_in(host: str) -> None:
    check_admin({"host": host}, "::1", "", local_only=True)
    assert is_loopback("127.8.9.1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.com")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.RequestError("x", "n"), 400),
        (errors.ModelNotFoundError("x"), 404),
        (errors.TokenError("x"), 401),
        (errors.DeniedError("x"), 403),
        (errors.RequestTooLargeError("x"), 413),
        (errors.QueueFullError("x"), 429),
        (errors.NotReadyError("x"), 503),
        (errors.AdapterBaseError("x"), 400),
        (errors.AdapterNotFoundError("x"), 404),
        (errors.AdapterBusyError("x"), 409),
        (errors.TruncatedError("x"), 400),
        (errors.StalledError("x"), 504),
        (errors.TransferError("x"), 502),
        (errors.GenerationError("x"), 500),
    ],
)
def test_every_error_has_one_status_and_shape(error: errors.LoadstoneError, status: int) -> None:
    assert status_of(error) == status
    body = describe(error)["error"]
    assert body == {"message": "x", "type": type(error).__name__, "param": body["param"], "code": status}


def test_half_surrogates_in_a_message_do_not_break_the_answer() -> None:
    body = describe(errors.RequestError("field \ud800", "\ud800"))
    assert body["error"]["message"] == "field \\ud800"
    assert body["error"]["param"] == "\\ud800"


def test_the_admin_token_is_in_no_repr() -> None:
    assert "secret" not in repr(Settings(admin_token="secret"))
    assert Settings.from_env({"LOADSTONE_ADMIN_TOKEN": "secret"}).admin_token == "secret"
