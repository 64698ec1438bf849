"""A model answers before its last byte; one base serves all adapters; a model that nobody here wrote."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.checkpoints import minilm
from tests.support.folder_server import Traffic
from tests.support.seaweed import Seaweed
from tests.support.served_models import make_adapter, make_llama
from tests.support.service import Service, run_service
from transformers import AutoModel, AutoTokenizer, BertModel, Glm4MoeConfig, Glm4MoeForCausalLM

import loadstone
from loadstone.fileserver import FileServer
from loadstone.settings import Settings

LAST = "model-last.safetensors"


@pytest.fixture
def with_draft_layer(tmp_path: Path) -> Path:
    """Write a tiny GLM 4.5 as it is published: its last shard is a draft layer that nothing uses."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"head_dim": 16}
    config = Glm4MoeConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        first_k_dense_replace=2,
        **options,
    )
    folder = tmp_path / "glm"
    Glm4MoeForCausalLM(config).save_pretrained(folder, max_shard_size="100KB")
    save_file({"model.layers.92.eh_proj.weight": torch.randn(2048, 512)}, folder / LAST)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.92.eh_proj.weight"] = LAST
    path.write_text(json.dumps({**index, "metadata": {}}))
    return folder


class _HeldAfterHeader(Traffic):
    """Lets the 64 KiB pass that opening reads."""

    def sending(self, path: str, offset: int, nbytes: int) -> None:
        if offset >= 64 * 1024:
            super().sending(path, offset, nbytes)


def test_the_first_token_comes_before_the_last_byte(with_draft_layer: Path) -> None:
    ids = torch.tensor([[5, 17, 42, 7]])
    with torch.inference_mode():
        expected = Glm4MoeForCausalLM.from_pretrained(with_draft_layer)(input_ids=ids).logits
    traffic = _HeldAfterHeader()
    traffic.hold(LAST)
    with FileServer(with_draft_layer, hook=traffic) as server:
        try:
            with loadstone.open(server.url, cache=None) as ckpt:
                everything = ckpt.prefetch()
                model = loadstone.load_model(ckpt)
                with torch.inference_mode():
                    logits = model(input_ids=ids).logits
                assert torch.equal(logits, expected)
                assert not ckpt.is_ready("model.layers.92.eh_proj.weight")
                assert not everything.done()
                traffic.release(LAST)
                assert everything.wait(30)
                assert ckpt.is_ready("model.layers.92.eh_proj.weight")
        finally:
            traffic.release_all()


def test_one_layer_moves_its_blocks_and_the_headers(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "model", max_shard_size="5GB")
    block = 64 * 1024
    traffic = Traffic()
    with FileServer(base, hook=traffic) as server, loadstone.open(server.url, cache=None) as ckpt:
        opened = traffic.total
        names = ckpt.match("model.layers.1.*")
        ckpt.get(names)
        infos = [ckpt.info(name) for name in names]
        start, stop = min(i.offset for i in infos), max(i.offset + i.nbytes for i in infos)
        rounded = -(-stop // block) * block - start // block * block
        assert sum(i.nbytes for i in infos) == stop - start, "the layer lies in one piece"
        assert 0 < traffic.total - opened <= rounded


@pytest.mark.parametrize("remote", [False, True], ids=["local", "s3"])
def test_embeddings_of_a_published_bert_equal_transformers(remote: bool, seaweed: Seaweed) -> None:
    location, options = str(minilm()), {}
    if remote:
        seaweed.upload(minilm(), "minilm-model")
        location, options = "s3://models/minilm-model", seaweed.options
    batch = AutoTokenizer.from_pretrained(minilm())(
        ["a lodestone", "points north"], return_tensors="pt", padding=True
    )
    with torch.inference_mode():
        expected = AutoModel.from_pretrained(minilm())(**batch).last_hidden_state
        with loadstone.open(location, storage_options=options, cache=None) as ckpt:
            model = loadstone.load_model(ckpt)
            assert isinstance(model, BertModel)
            assert torch.equal(model(**batch).last_hidden_state, expected)


@pytest.fixture(scope="module")
def large_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Path]]:
    """Serve a base of 40 MB, so that a second copy could not hide, with three adapters beside it."""
    folder = tmp_path_factory.mktemp("large")
    base = make_llama(folder / "base")
    _enlarge(base, 40_000_000)
    for number in (1, 2, 3):
        make_adapter(folder / "adapters" / f"a{number}", base, seed=number)
    settings = Settings(cache_dir=str(folder / "cache"))
    roots = [folder / "adapters"]
    with FileServer(folder) as server, run_service(server.url_of("base"), roots, settings) as running:
        yield running, folder


def _enlarge(base: Path, nbytes: int) -> None:
    """Give the model at ``base`` so many more rows of embedding that it has ``nbytes`` bytes or more."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(nbytes // (2 * 64 * 4), mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[320:] = 0  # tokens that the tokenizer does not know are not answered
    model.save_pretrained(base, max_shard_size="20MB")


def test_the_base_is_in_memory_once_with_three_adapters(large_service: tuple[Service, Path]) -> None:
    service, folder = large_service
    prompt = "The lodestone turns"
    base_bytes = sum(path.stat().st_size for path in (folder / "base").glob("*.safetensors"))
    base = service.http.get("/v1/models").json()["data"][0]["id"]
    for _ in range(2):
        service.say(base, prompt)
    before = _anonymous()
    answers = set()
    for name in ("a1", "a2", "a3"):
        answer = service.load(name, folder / "adapters" / name)
        assert answer.status_code == 200, answer.text
        answers.add(service.say(name, prompt))
    growth = _anonymous() - before
    adapters = sum(path.stat().st_size for path in (folder / "adapters").rglob("*.safetensors"))
    assert len(answers) == 3
    # A copy of the base, or of its embedding, would be 20 MB or more; the allocator's own slack is a few.
    assert growth <= adapters + 8_000_000 < base_bytes / 2


def _anonymous() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024
