"""PEFT's rules for names, and the time they may take."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from loadstone.adapters import patterns
from loadstone.adapters.config import parse_config
from loadstone.adapters.patterns import Query, match_table, matcher
from loadstone.errors import AdapterFormatError, AdapterUnsupportedError

NAMES = [f"model.layers.{i}.{part}" for i in (0, 1, 11) for part in ("self_attn.q_proj", "mlp.up_proj")]
NAMES += ["lm_head", "model.embed_tokens", "q_proj", "model.layers.1.mlp.experts.3.up_proj", "xq_proj"]


def parse(**config: Any) -> Any:
    return parse_config(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6, **config}), "here")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "TIME_LIMIT", 0.5)


TARGETS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["self_attn.q_proj", "lm_head"]},
    {"target_modules": r".*\.(q|up)_proj"},
    {"target_modules": r"(?:.*?(?:layers).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)"},
    {"target_modules": r"^(?!.*mlp).*proj$"},
    {"target_modules": ["q_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
    {"target_modules": ["q_proj"], "exclude_modules": r".*\.11\..*"},
    {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["up_proj"], "modules_to_save": ["mlp"]},
    {"target_modules": ["up_proj"], "layers_to_transform": [1]},
    {"target_modules": ["up_proj"], "layers_to_transform": 11},
    {"target_modules": ["up_proj"], "layers_to_transform": [1, 3], "layers_pattern": ["layers", "experts"]},
    {"target_modules": ["up_proj", "lm_head"], "layers_to_transform": [3], "layers_pattern": "experts"},
    {"target_modules": None, "target_parameters": ["experts.up_proj"]},
    {"target_modules": []},
]


@pytest.mark.parametrize("config", TARGETS, ids=str)
def test_targets_are_those_of_peft(config: dict[str, Any]) -> None:
    keys = (
        "exclude_modules",
        "modules_to_save",
        "layers_to_transform",
        "layers_pattern",
        "target_parameters",
    )
    theirs = SimpleNamespace(**{**dict.fromkeys(keys), **config})
    expected = {name for name in NAMES if check_target_module_exists(theirs, name)}
    assert matcher(parse(**config), NAMES, "here").targets == expected


KEYS = [
    "q_proj",
    "mlp.up_proj",
    r"^model.*q_proj",
    r"layers\.\d+\.mlp\..*",
    "model.layers.0.self_attn.q_proj",
]
ODD_KEYS = [r".*", r"q_proj|up_proj", r"layers.1.*", r"(?!model).*", r"\w+", r"a)|(.*up_proj", "", r"q_proj$"]
PATTERNS = st.dictionaries(st.sampled_from(KEYS + ODD_KEYS), st.integers(1, 64), max_size=5)


@settings(max_examples=40, deadline=None)
@given(PATTERNS, PATTERNS)
def test_ranks_and_alphas_are_those_of_peft(ranks: dict[str, int], alphas: dict[str, int]) -> None:
    found = matcher(parse(rank_pattern=ranks, alpha_pattern=alphas), NAMES, "here")
    for name in NAMES:
        assert found.rank(name) == ranks.get(get_pattern_key(list(ranks), name), 4)
        assert found.alpha(name) == alphas.get(get_pattern_key(list(alphas), name), 6)


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)x"])
def test_a_pattern_that_never_ends_is_refused_in_time(pattern: str, hurried: None) -> None:
    began = time.monotonic()
    with pytest.raises(AdapterUnsupportedError, match=r"more than 0\.5 s"):
        matcher(parse(rank_pattern={pattern: 2}), ["a" * 300 + "!"], "here")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("kind", ["(?i){}", "(?i:{})"])
def test_a_pattern_that_takes_long_to_compile_is_refused_in_time(kind: str, hurried: None) -> None:
    began = time.monotonic()
    with pytest.raises(AdapterUnsupportedError, match=r"more than 0\.5 s"):
        matcher(parse(target_modules=kind.format("[\0-\uffff]" * 700)), NAMES, "here")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("keys", [[f".*{i}x" for i in range(20_000)], ["(a?.*x)"]], ids=["many", "slow"])
def test_cheap_patterns_are_refused_in_time(keys: list[str], hurried: None) -> None:
    names = ["a." * 450 + str(i) for i in range(3000)]
    began = time.monotonic()
    with pytest.raises(AdapterUnsupportedError, match=r"more than 0\.5 s"):
        matcher(parse(rank_pattern=dict.fromkeys(keys, 2)), names, "here")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("pattern", ["(", "a**", "[", r"(?P<x>a)(?P<x>b)", "a{2,1}", r"(\w+)+("])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(AdapterFormatError, match="not a regular expression"):
        matcher(parse(target_modules=pattern), NAMES, "here")


def test_an_absurdly_long_pattern_is_refused() -> None:
    with pytest.raises(AdapterUnsupportedError, match="characters long"):
        match_table([Query("a" * 10_001)], NAMES, "here")


def test_cheap_and_other_patterns_keep_their_places() -> None:
    queries = [Query("b"), Query(r"(a+)+b"), Query("a"), Query(r"(?P<idx>\d+)-(.*)(.*)")]
    table = match_table(queries, ["b", "aab", "7-"], "here")
    assert table == [{"b": ""}, {"aab": ""}, {"aab": ""}, {"7-": "7"}]
