"""Loading, replacing and unloading adapters while the service answers."""

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.served_models import make_adapter, reference
from tests.support.service import Service, check_error, run_service

from loadstone.errors import LoadstoneWarning
from loadstone.settings import Settings

PROMPT = "The lodestone turns"
LONG = {"model": "a1", "prompt": PROMPT, "temperature": 0, "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def moving(root: Path) -> Path:
    """Return the folder of an adapter whose content the test exchanges."""
    folder = root / "moving"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "a1", folder)
    return folder


def _publish(source: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(source, folder)


def test_success_is_vllms_line_of_text(service: Service, root: Path) -> None:
    answer = service.http.post(
        "/v1/load_lora_adapter", json={"lora_name": "a1", "lora_path": str(root / "a1")}
    )
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a1' added successfully.")
    assert answer.headers["content-type"].startswith("text/plain")
    answer = service.unload("a1")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a1' removed successfully.")


def test_json_tells_what_a_load_cost(service: Service, root: Path) -> None:
    told = service.load("a1", root / "a1").json()
    weights = load_file(root / "a1" / "adapter_model.safetensors")
    assert told["bytes"] == sum(tensor.nbytes for tensor in weights.values())
    assert told["changed"] is True
    assert 0 < told["milliseconds"] < 20_000
    assert told["version"]
    assert told["message"] == "Success: LoRA adapter 'a1' added successfully."


def test_a_name_alone_is_looked_for_in_the_roots(service: Service, base: Path, root: Path) -> None:
    assert service.load("a2").status_code == 200
    assert service.say("a2", PROMPT) == reference(base, PROMPT, root / "a2")


def test_the_same_content_again_is_no_work(service: Service, root: Path) -> None:
    first = service.load("a1", root / "a1").json()
    again = service.load("a1", root / "a1")
    assert again.status_code == 200
    assert again.json()["changed"] is False
    assert again.json()["version"] == first["version"]


def test_other_content_needs_load_inplace(service: Service, base: Path, root: Path, moving: Path) -> None:
    service.load("moving", moving)
    _publish(root / "a2", moving)
    check_error(service.load("moving", moving), 400, "load_inplace")
    assert service.say("moving", PROMPT) == reference(base, PROMPT, root / "a1")
    swapped = service.load("moving", moving, load_inplace=True)
    assert swapped.json()["changed"] is True
    assert service.say("moving", PROMPT) == reference(base, PROMPT, root / "a2")


def test_a_running_answer_keeps_the_version_it_began_with(service: Service, root: Path, moving: Path) -> None:
    service.load("moving", moving)
    body = {**LONG, "model": "moving"}
    expected = service.http.post("/v1/completions", json=body).json()
    text, swapped, fingerprints = "", False, set()
    for event in service.stream(body):
        text += event["choices"][0]["text"]
        fingerprints.add(event["system_fingerprint"])
        if not swapped:
            _publish(root / "a2", moving)
            assert service.load("moving", moving, load_inplace=True).status_code == 200
            swapped = True
    assert text == expected["choices"][0]["text"]
    assert fingerprints == {expected["system_fingerprint"]}
    after = service.http.post("/v1/completions", json=body).json()
    assert after["choices"][0]["text"] != text
    assert after["system_fingerprint"] != expected["system_fingerprint"]


def test_while_an_adapter_is_swapped_every_answer_is_all_old_or_all_new(
    service: Service, base: Path, root: Path, moving: Path
) -> None:
    contents = [root / "a1", root / "a2"]
    allowed = {reference(base, PROMPT, folder) for folder in contents}
    service.load("moving", moving)
    swapped = threading.Event()

    def keep_asking() -> set[str]:
        found = {service.say("moving", PROMPT)}
        while not swapped.is_set():
            found.add(service.say("moving", PROMPT))
        return found

    with ThreadPoolExecutor(4) as pool:
        askers = [pool.submit(keep_asking) for _ in range(4)]
        try:
            seen = set()
            for turn in range(8):
                _publish(contents[(turn + 1) % 2], moving)
                assert service.load("moving", moving, load_inplace=True).status_code == 200
                seen.add(service.say("moving", PROMPT))
        finally:
            swapped.set()
    assert seen == allowed
    assert set().union(*(asker.result() for asker in askers)) <= allowed


def test_all_that_is_known_is_listed(service: Service, root: Path) -> None:
    service.load("a1", root / "a1")
    service.load("broken", root / "nothing-here")
    listed = {status["name"]: status for status in service.http.get("/v1/loadstone/adapters").json()}
    assert listed["a1"]["state"] == "ready"
    assert listed["broken"]["state"] == "failed"
    assert "nothing-here" in listed["broken"]["error"]
    check_error(service.http.get("/v1/loadstone/adapters", headers={"Origin": "https://evil.example"}), 403)


def test_unload_waits_for_running_answers_and_takes_no_new_ones(service: Service, root: Path) -> None:
    service.load("a1", root / "a1")
    expected = service.http.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
    answers: list[str] = []

    def ask() -> None:
        answers.append(service.http.post("/v1/completions", json=LONG).json()["choices"][0]["text"])

    asking = threading.Thread(target=ask)
    asking.start()
    service.until("busy")
    assert service.unload("a1").status_code == 200
    asking.join(30)
    assert answers == [expected]
    for name in ("a1", "nobody"):
        check_error(service.http.post("/v1/completions", json={"model": name, "prompt": "x"}), 404, "model")


def test_what_is_not_loaded_cannot_be_unloaded(service: Service, root: Path) -> None:
    check_error(service.unload("nobody"), 404)
    service.load("broken", root / "nothing-here")
    assert "nothing-here" in check_error(service.unload("broken"), 404)
    assert service.http.get("/v1/loadstone/adapters").json() == []
    check_error(service.unload("broken"), 404)


def test_many_unloads_that_wait_keep_nobody_from_loading_and_unloading(
    service: Service, base: Path, root: Path
) -> None:
    names = [f"held{number}" for number in range(12)]
    pool = service.engine.loaded().pool
    with ThreadPoolExecutor(len(names)) as threads:
        for name in names:
            assert service.load(name, root / "a1").status_code == 200
        with pool.lease(names, "a long answer"):
            waiting = [threads.submit(service.unload, name) for name in names]
            while not all(status.state == "draining" for status in pool.list()):
                time.sleep(0.005)
            assert service.load("a2", root / "a2").status_code == 200
            assert service.say("a2", PROMPT) == reference(base, PROMPT, root / "a2")
            assert service.unload("a2").status_code == 200
            assert not any(each.done() for each in waiting)
        assert {each.result(20).status_code for each in waiting} == {200}


def test_the_bases_name_is_taken(service: Service, root: Path) -> None:
    check_error(service.load("tiny", root / "a1"), 400, "lora_name")


def test_the_bases_name_is_taken_in_every_spelling(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.engine.startup, "name", "modèle")
    check_error(service.load("mode\N{COMBINING GRAVE ACCENT}le", "a1"), 400, "lora_name")


@pytest.mark.parametrize(
    "path", ["/etc", "../secret", "https://example.com/a1", "s3://elsewhere/a1", "file:///etc"]
)
def test_locations_outside_the_roots_are_refused(service: Service, path: str) -> None:
    check_error(service.load("evil", path), 400)
    assert "evil" not in {model.id for model in service.client.models.list()}


@pytest.mark.parametrize("name", ["../a1", "a/b", "", ".hidden", "x" * 200, "\n"])
def test_odd_names_are_refused(service: Service, root: Path, name: str) -> None:
    assert service.load(name, root / "a1").status_code == 400


def _broken(folder: Path, kind: str, base: Path, other: Path) -> int:
    """Turn a good adapter into a bad one; return the status it should get."""
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    match kind:
        case "missing folder":
            shutil.rmtree(folder)
            return 404
        case "no weights":
            weights.unlink()
            return 404
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-10])
        case "not json":
            config.write_text("{")
        case "unsupported":
            config.write_text(json.dumps({**json.loads(config.read_text()), "peft_type": "IA3"}))
        case "for another model":
            make_adapter(other, base, seed=9)
            tensors = load_file(other / "adapter_model.safetensors")
            save_file({name: torch.cat([t, t], -1) for name, t in tensors.items()}, weights)
        case "a base weight":
            tensors = load_file(weights)
            tensors["base_model.model.lm_head.weight"] = torch.zeros(320, 64)
            save_file(tensors, weights)
    return 400


@pytest.mark.parametrize(
    "kind",
    [
        "missing folder",
        "no weights",
        "truncated",
        "not json",
        "unsupported",
        "for another model",
        "a base weight",
    ],
)
def test_a_bad_adapter_leaves_nothing_behind(
    service: Service, base: Path, moving: Path, tmp_path: Path, kind: str
) -> None:
    root = moving.parent
    status = _broken(moving, kind, base, tmp_path / "other")
    check_error(service.load("moving", moving), status)
    assert {model.id for model in service.client.models.list()} == {"tiny"}
    assert service.say("tiny", PROMPT) == reference(base, PROMPT)
    shutil.rmtree(moving, ignore_errors=True)
    shutil.copytree(root / "a1", moving)
    assert service.load("moving", moving).status_code == 200
    assert service.say("moving", PROMPT) == reference(base, PROMPT, root / "a1")


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"temperature": 1}], ids=str)
def test_an_adapter_of_nans_gives_an_error_and_no_text(
    service: Service, moving: Path, options: dict[str, object]
) -> None:
    weights = moving / "adapter_model.safetensors"
    save_file({name: tensor * float("nan") for name, tensor in load_file(weights).items()}, weights)
    with pytest.warns(LoadstoneWarning, match="not finite"):
        assert service.load("moving", moving).status_code == 200
    body = {"model": "moving", "prompt": PROMPT, "temperature": 0, **options}
    assert "not finite" in check_error(service.http.post("/v1/completions", json=body), 500)


def test_a_bad_replacement_leaves_the_loaded_one(
    service: Service, base: Path, root: Path, moving: Path, tmp_path: Path
) -> None:
    service.load("moving", moving)
    good = moving.rename(tmp_path / "good")
    shutil.copytree(good, moving)
    _broken(moving, "truncated", base, tmp_path)
    check_error(service.load("moving", moving, load_inplace=True), 400)
    assert service.say("moving", PROMPT) == reference(base, PROMPT, root / "a1")


def test_browsers_and_other_hosts_may_not_load(service: Service) -> None:
    for headers in (
        {"Origin": "https://evil.example"},
        {"Host": "evil.example"},
        {"X-Forwarded-For": "9.9.9.9"},
    ):
        answer = service.http.post("/v1/unload_lora_adapter", json={"lora_name": "a1"}, headers=headers)
        check_error(answer, 403)


def test_with_a_token_only_its_holder_may_load(
    base: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(cache_dir="none", admin_token="s3cret-token")
    with run_service(base, [root], settings, host="0.0.0.0") as service:
        refused = service.load("a1", root / "a1")
        check_error(refused, 401)
        assert refused.headers["www-authenticate"] == "Bearer"
        service.http.headers["Authorization"] = "Bearer s3cret-tokem"
        check_error(service.load("a1", root / "a1"), 401)
        service.http.headers["Authorization"] = "Bearer s3cret-token"
        assert service.load("a1", root / "a1").status_code == 200
        assert service.say("a1", PROMPT) == reference(base, PROMPT, root / "a1")
    assert "s3cret" not in caplog.text


def test_open_to_the_network_without_a_token_nobody_may_load(base: Path, root: Path) -> None:
    with run_service(base, [root], Settings(cache_dir="none"), host="0.0.0.0") as service:
        assert "LOADSTONE_ADMIN_TOKEN" in check_error(service.load("a1", root / "a1"), 403)
        assert service.say("tiny", PROMPT)
