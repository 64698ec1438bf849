"""``loadstone adapters load|unload|list`` against a real service."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.served_models import make_adapter, make_llama
from tests.support.service import Service, run_service

from loadstone.cli import main
from loadstone.settings import Settings


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("adapters-command")
    base = make_llama(folder / "tiny")
    for number in (1, 2):
        make_adapter(folder / "adapters" / f"a{number}", base, seed=number)
    with run_service(base, [folder / "adapters"], Settings(cache_dir="none", drain_seconds=5)) as running:
        yield running


def test_load_list_replace_unload(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--url", service.url]
    assert main(["adapters", "load", "a1", *at]) == 0
    assert capsys.readouterr().out == "Success: LoRA adapter 'a1' added successfully.\n"
    assert main(["adapters", "list", *at]) == 0
    header, base, adapter = (line.split("  ") for line in capsys.readouterr().out.splitlines())
    assert (header[0], base[0], adapter[0].strip()) == ("name", "tiny", "a1")
    assert any(cell.strip() == "adapter of tiny" for cell in adapter)
    assert adapter[-1].endswith("/adapters/a1")
    before = service.say("a1", "The harbour")

    assert main(["adapters", "load", "a1", "a2", *at]) == 1
    refused = capsys.readouterr().err
    assert refused.startswith("error: ")
    assert refused.count("\n") == 1
    assert service.say("a1", "The harbour") == before

    assert main(["adapters", "load", "a1", "a2", "--replace", "--json", *at]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] is True
    assert service.say("a1", "The harbour") != before

    assert main(["adapters", "unload", "a1", *at]) == 0
    assert main(["adapters", "list", "--json", *at]) == 0
    listed = json.loads(capsys.readouterr().out.split("\n", 1)[1])
    assert [model["id"] for model in listed["data"]] == ["tiny"]


def test_what_the_service_refuses_is_one_line(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["load", "nothing"], ["load", "x", str(tmp_path)], ["unload", "nothing"]):
        assert main(["adapters", *words, "--url", service.url]) == 1
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
