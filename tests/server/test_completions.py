"""``/v1/completions`` against transformers' generate and PEFT's, by the openai client and plain HTTP."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tests.support.served_models import reference
from tests.support.service import Service, check_error
from transformers import AutoTokenizer, LlamaForCausalLM

PROMPT = "The lodestone turns"


def test_the_base_says_what_generate_says(service: Service, base: Path) -> None:
    answer = service.client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=40)
    assert answer.choices[0].text == reference(base, PROMPT, tokens=40)
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(AutoTokenizer.from_pretrained(base)(PROMPT).input_ids)
    assert answer.usage.completion_tokens == 40
    assert answer.object == "text_completion"


def test_each_adapter_says_what_peft_says(service: Service, base: Path, root: Path) -> None:
    for name in ("a1", "a2", "a3"):
        assert service.load(name, root / name).status_code == 200
    said = {name: service.say(name, PROMPT) for name in ("tiny", "a1", "a2", "a3")}
    assert said["tiny"] == reference(base, PROMPT)
    for name in ("a1", "a2", "a3"):
        assert said[name] == reference(base, PROMPT, root / name)
    assert len(set(said.values())) == 4


def test_requests_side_by_side_do_not_mix(service: Service, base: Path, root: Path) -> None:
    for name in ("a1", "a2", "a3"):
        service.load(name, root / name)
    prompts = [PROMPT, "A harbour", "Grüße aus"]
    cases = [(name, prompt) for name in ("tiny", "a1", "a2", "a3") for prompt in prompts]
    expected = {case: service.say(*case) for case in cases}
    with ThreadPoolExecutor(6) as pool:
        said = list(pool.map(lambda case: service.say(*case), cases * 3))
    assert said == [expected[case] for case in cases * 3]


def test_a_stream_is_the_answer_in_pieces(service: Service) -> None:
    whole = service.client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=40)
    stream = service.client.completions.create(
        model="tiny",
        prompt=PROMPT,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    texts = [chunk.choices[0].text for chunk in chunks[:-1]]
    assert "".join(texts) == whole.choices[0].text
    assert len(texts) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(texts) - 1) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_is_server_sent_events(service: Service) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "stream": True}
    with service.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line[6:])["object"] == "text_completion" for line in lines[:-1])


@pytest.mark.parametrize("options", [{"temperature": 0.8}, {"top_p": 0.6}, {"temperature": 1.4, "top_k": 9}])
def test_seeded_sampling_is_transformers_own(service: Service, base: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(11)
    defaults: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    expected = reference(base, PROMPT, do_sample=True, **(defaults | options))
    assert service.say("tiny", PROMPT, seed=11, **({"temperature": 1.0} | options)) == expected
    assert service.say("tiny", PROMPT, seed=12, **({"temperature": 1.0} | options)) != expected


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-310])
def test_next_to_no_temperature_is_none(service: Service, temperature: float) -> None:
    assert service.say("tiny", PROMPT, temperature=temperature) == service.say("tiny", PROMPT)


def test_repetition_penalty_is_transformers_own(service: Service, base: Path) -> None:
    expected = reference(base, PROMPT, repetition_penalty=1.3)
    assert service.say("tiny", PROMPT, repetition_penalty=1.3) == expected


def test_several_prompts_and_several_answers(service: Service) -> None:
    prompts = [PROMPT, "A harbour"]
    answer = service.client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=8, seed=5, temperature=0.9
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for index, choice in enumerate(answer.choices):
        alone = service.say("tiny", prompts[index // 2], seed=5 + index, temperature=0.9, max_tokens=8)
        assert choice.text == alone
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 32


def test_tokens_are_taken_as_a_prompt(service: Service, base: Path) -> None:
    ids = AutoTokenizer.from_pretrained(base)(PROMPT).input_ids
    for prompt in (ids, [ids]):
        answer = service.client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=12)
        assert answer.choices[0].text == service.say("tiny", PROMPT)


def test_an_answer_ends_before_a_stop_sequence(service: Service) -> None:
    whole = service.say("tiny", PROMPT, max_tokens=40)
    stop = whole[10:13]
    body: dict[str, object] = {
        "model": "tiny",
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 40,
        "stop": ["never this", stop],
    }
    answer = service.http.post("/v1/completions", json=body).json()["choices"][0]
    assert answer == {
        "index": 0,
        "text": whole[: whole.index(stop)],
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert "".join(event["choices"][0]["text"] for event in service.stream(body)) == answer["text"]


def test_an_answer_ends_at_the_models_own_end(service: Service) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "temperature": 1.6, "n": 16, "seed": 1}
    choices = service.http.post("/v1/completions", json=body).json()["choices"]
    longer = service.http.post("/v1/completions", json={**body, "ignore_eos": True}).json()["choices"]
    stopped = [choice["index"] for choice in choices if choice["finish_reason"] == "stop"]
    assert stopped
    for index in stopped:
        assert "</s>" not in choices[index]["text"]
        assert longer[index]["text"].startswith(choices[index]["text"])
        assert longer[index]["finish_reason"] == "length"


def test_echo_puts_the_prompt_first(service: Service) -> None:
    said = service.say("tiny", PROMPT)
    assert service.say("tiny", PROMPT, echo=True) == PROMPT + said


def test_logprobs_are_the_models_own(service: Service, base: Path) -> None:
    answer = service.client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=6, logprobs=3, echo=True
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    model, tokenizer = LlamaForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    output = model.generate(
        input_ids=ids, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    for step, logits in enumerate(output.logits):
        scores = torch.log_softmax(logits[0], dim=-1)
        token = int(output.sequences[0, ids.shape[1] + step])
        assert found.token_logprobs[step] == pytest.approx(float(scores[token]), abs=1e-5)
        assert sorted(found.top_logprobs[step].values()) == pytest.approx(
            sorted(torch.topk(scores, 3).values.tolist()), abs=1e-5
        )
    assert found.text_offset is not None
    assert found.text_offset[0] == len(PROMPT)
    assert found.text_offset == sorted(found.text_offset)


def test_models_are_listed(service: Service, base: Path, root: Path) -> None:
    service.load("a1", root / "a1")
    models = {model.id: model for model in service.client.models.list()}
    assert set(models) == {"tiny", "a1"}
    assert service.client.models.retrieve("a1").to_dict()["parent"] == "tiny"
    assert service.client.models.retrieve("tiny").to_dict()["max_model_len"] == 256
    with pytest.raises(openai.NotFoundError):
        service.client.models.retrieve("a2")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "nobody", "prompt": "x"}, 404, "model"),
        ({"model": "../tiny", "prompt": "x"}, 404, "model"),
        ({"model": "\ud800", "prompt": "x"}, 404, "model"),
        ({"model": "tiny"}, 400, "prompt"),
        ({"model": "tiny", "prompt": [999]}, 400, "prompt"),
        ({"model": "tiny", "prompt": "word " * 300}, 400, "prompt"),
        ({"model": "tiny", "prompt": "x", "max_tokens": 300}, 400, "max_tokens"),
        ({"model": "tiny", "prompt": "x", "n": 17}, 400, "n"),
        ({"model": "tiny", "prompt": "x", "best_of": 3}, 400, "best_of"),
    ],
)
def test_a_wrong_request_gets_one_clear_error(
    service: Service, body: dict[str, object], status: int, param: str
) -> None:
    answer = service.http.post(
        "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    check_error(answer, status, param)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b'{"model": "tiny", "prompt": "\xff"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"model": "tiny", "prompt": "x", "\\ud800": 1}', "half a surrogate pair"),
        (b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 9000 + b"}", "not valid JSON"),
    ],
)
def test_a_malformed_body_gets_the_same_shape(service: Service, content: bytes, words: str) -> None:
    answer = service.http.post(
        "/v1/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert words in check_error(answer, 400)


def test_a_body_that_is_not_called_json_is_refused(service: Service) -> None:
    answer = service.http.post("/v1/completions", data={"model": "tiny", "prompt": "x"})
    assert "Content-Type: application/json" in check_error(answer, 400)


def test_unknown_paths_and_methods_get_the_same_shape(service: Service) -> None:
    check_error(service.http.get("/v2/nothing"), 404)
    check_error(service.http.get("/v1/completions"), 405)


def test_a_body_over_the_limit_is_refused_whole_or_chunked(service: Service) -> None:
    big = b" " * (5 * 1024 * 1024)
    headers = {"Content-Type": "application/json"}
    check_error(service.http.post("/v1/completions", content=big, headers=headers), 413)
    chunks = iter([big[: 3 * 1024 * 1024]] * 2)
    check_error(service.http.post("/v1/completions", content=chunks, headers=headers), 413)
    assert service.say("tiny", PROMPT)
