"""Forward order from names, and the requests that follow from it."""

import random
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from loadstone.loader.order import Wanted, fetch_order, plan, requests
from loadstone.loader.ranges import BLOCK, ByteRange, coalesce, to_blocks


@dataclass(frozen=True)
class Info:
    name: str
    file: str = "model.safetensors"
    offset: int = 0


def ordered(*names: str) -> list[str]:
    """Return the order of ``names`` when they lie in the file in another one."""
    shuffled = list(names)
    random.Random(0).shuffle(shuffled)
    return fetch_order(Info(name, offset=number) for number, name in enumerate(sorted(shuffled)))


def assert_order(*names: str) -> None:
    assert ordered(*names) == list(names)


def test_llama() -> None:
    assert_order(
        "model.embed_tokens.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.10.self_attn.q_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    )


def test_gpt2() -> None:
    assert_order(
        "wpe.weight", "wte.weight", "h.0.ln_1.weight", "h.9.attn.c_attn.weight", "h.11.ln_1.bias", "ln_f.bias"
    )


def test_bert() -> None:
    assert_order(
        "bert.embeddings.LayerNorm.bias",
        "bert.embeddings.word_embeddings.weight",
        "bert.encoder.layer.0.output.dense.weight",
        "bert.encoder.layer.11.output.dense.weight",
        "bert.pooler.dense.weight",
        "classifier.weight",
    )


def test_t5_runs_its_encoder_first() -> None:
    assert_order(
        "shared.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        "encoder.block.11.layer.1.DenseReluDense.wi.weight",
        "encoder.final_layer_norm.weight",
        "decoder.block.0.layer.1.EncDecAttention.q.weight",
        "decoder.block.2.layer.1.EncDecAttention.q.weight",
        "decoder.final_layer_norm.weight",
        "lm_head.weight",
    )


def test_experts_come_after_the_dense_part_of_their_layer() -> None:
    assert_order(
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.mlp.experts.1.up_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.block_sparse_moe.experts.0.w1.weight",
    )


def test_unknown_names_keep_file_order_between_layers_and_head() -> None:
    infos = [
        Info("lm_head.weight", "a", 0),
        Info("odd", "a", 1),
        Info("even", "a", 2),
        Info("m.layers.3.w", "b", 0),
    ]
    assert fetch_order(infos) == ["m.layers.3.w", "odd", "even", "lm_head.weight"]
    assert fetch_order([]) == []


sizes = st.integers(1, 40 * BLOCK)
pieces = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40 * BLOCK), st.integers(0, 5 * BLOCK)), max_size=20
)


@given(pieces, st.integers(1, 8))
def test_a_plan_covers_what_is_wanted_and_nothing_else(
    wanted: list[tuple[int, int, int]], blocks: int
) -> None:
    size = 50 * BLOCK + 7
    wants = [Wanted(blob, size, ByteRange(start, min(size, start + count))) for blob, start, count in wanted]
    planned = plan(wants, blocks * BLOCK)
    for blob in range(3):
        asked = coalesce(to_blocks(want.range, size) for want in wants if want.blob == blob)
        given_back = coalesce(want.range for want in planned if want.blob == blob)
        assert given_back == asked
    assert all(0 < want.range.nbytes <= blocks * BLOCK for want in planned)
    assert all(want.range == to_blocks(want.range, size) for want in planned)


def test_a_plan_keeps_order_and_joins_neighbours() -> None:
    wants = [
        Wanted(0, 100 * BLOCK, ByteRange(at * BLOCK, (at + 1) * BLOCK)) for at in (9, 8, 7, 6, 1, 0, 3, 2)
    ]
    assert [want.range.start // BLOCK for want in plan(wants, 4 * BLOCK)] == [6, 0]
    assert [want.range.start // BLOCK for want in plan(wants, 2 * BLOCK)] == [8, 6, 0, 2]


def test_requests_are_split() -> None:
    spans = [ByteRange(5, 6), ByteRange(BLOCK, 4 * BLOCK + 1), ByteRange(9 * BLOCK, 9 * BLOCK)]
    assert requests(spans, 10 * BLOCK, 3 * BLOCK) == [
        ByteRange(0, 3 * BLOCK),
        ByteRange(3 * BLOCK, 5 * BLOCK),
    ]
