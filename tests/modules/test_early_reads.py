"""A model read before its bytes are here, in any way, waits and gives what the whole model gives."""

import copy
import io
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.modules.conftest import Saved
from tests.support.gated_source import Gate, open_gated
from tests.support.tiny_models import IDS, TINY, usual

from loadstone.errors import TransferError
from loadstone.loader.modules.bind import pending_tensors, wait_for
from loadstone.loader.modules.load import load_model


def run_late(gate: Gate, use: Callable[[], Any]) -> Any:
    """Return what ``use`` gives when every byte arrives only after it is seen to wait for one."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():
                results.append(use())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 60
    while not gate.waiting and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    blocked = thread.is_alive() and bool(gate.waiting) and not results
    gate.release()
    thread.join(60)
    if errors:
        raise errors[0]
    assert blocked, "it did not wait for its bytes"
    return results[0]


untyped: Any = torch  # for what torch leaves without types


def logits(model: Any) -> Any:
    return model(IDS).logits


def attach(model: Any, dora: bool) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=dora, init_lora_weights=False)
    return get_peft_model(model, config).eval()


def resize(model: Any) -> Any:
    torch.manual_seed(4)
    model.resize_token_embeddings(103, mean_resizing=False)
    return logits(model)


def save_whole(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return flat(torch.load(file))


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for value in state.values()])


def changed_in_place(model: Any) -> Any:
    model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
    return logits(model)


def loaded_over(model: Any) -> Any:
    model.load_state_dict({name: torch.zeros_like(t) for name, t in model.state_dict().items()})
    return logits(model)


def traced(model: Any) -> Any:
    def call(ids: torch.Tensor) -> Any:
        return model(ids, use_cache=False).logits

    return untyped.jit.trace(call, (IDS,), check_trace=False)(IDS)


USES: dict[str, Callable[[Any], Any]] = {
    "forward": logits,
    "generate": lambda m: m.generate(IDS, max_new_tokens=5, do_sample=False),
    "lm_head.weight": lambda m: m.lm_head.weight @ torch.ones(64),
    "data": lambda m: m.lm_head.weight.data * 1,
    "numpy": lambda m: torch.from_numpy(m.lm_head.weight.numpy().copy()),
    "parameters": lambda m: torch.stack([p.sum() for p in m.parameters()]),
    "state_dict": lambda m: flat(m.state_dict()),
    "torch.save": save_whole,
    "pickle": lambda m: logits(pickle.loads(pickle.dumps(m))),
    "deepcopy": lambda m: logits(copy.deepcopy(m)),
    "to float64": lambda m: logits(m.to(torch.float64)),
    "half and back": lambda m: logits(m.half().float()),
    "bfloat16": lambda m: logits(m.bfloat16()),
    "in place": changed_in_place,
    "load_state_dict": loaded_over,
    "resize_token_embeddings": resize,
    "LoRA": lambda m: logits(attach(m, dora=False)),
    "DoRA": lambda m: logits(attach(m, dora=True)),
    "merge": lambda m: logits(attach(m, dora=False).merge_and_unload()),
    "merge DoRA": lambda m: logits(attach(m, dora=True).merge_and_unload()),
    "functional_call": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (IDS,)).logits,
    "trace": traced,
}


CASES = [
    *(("llama", name) for name in USES),
    *(("llama-tied", name) for name in ("forward", "state_dict", "torch.save", "deepcopy", "half and back")),
    *(("llama-tied", name) for name in ("resize_token_embeddings", "load_state_dict", "LoRA")),
]


@pytest.mark.parametrize(("model", "name"), CASES)
@pytest.mark.filterwarnings("ignore")  # torch and peft on what is done here
def test_an_early_use_waits_and_is_right(saved: Saved, model: str, name: str) -> None:
    use = USES[name]
    with torch.no_grad():
        want = use(usual(saved(model), "LlamaForCausalLM"))
    checkpoint, gate = open_gated(saved(model))
    late = load_model(checkpoint)
    assert not gate.waited
    got = run_late(gate, lambda: use(late))
    assert torch.equal(got, want)
    assert not isinstance(got, torch.nn.Parameter)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_kind_of_model_waits_in_its_first_call(saved: Saved, name: str) -> None:
    tiny = TINY[name]
    want = tiny.run(usual(saved(name), tiny.model))
    checkpoint, gate = open_gated(saved(name))
    model = load_model(checkpoint)
    assert len(list(pending_tensors(model))) == len(list(model.parameters()))
    assert not gate.waited
    assert torch.equal(run_late(gate, lambda: tiny.call(model)), want)
    kinds = {type(tensor) for tensor in (*model.parameters(), *model.buffers())}
    assert kinds <= {torch.nn.Parameter, torch.Tensor}
    assert torch.equal(tiny.run(model), want)


def test_compiled_before_the_bytes_are_here(saved: Saved) -> None:
    torch.compiler.reset()
    want = TINY["llama"].run(usual(saved("llama"), "LlamaForCausalLM"))
    checkpoint, gate = open_gated(saved("llama"))
    model = load_model(checkpoint)
    compiled = torch.compile(model.model.layers[0].mlp, backend="eager")
    model.model.layers[0].mlp = compiled
    assert torch.equal(run_late(gate, lambda: logits(model)), want)
    assert not list(pending_tensors(model))


def test_a_failed_transfer_reaches_the_caller_and_a_retry_works(saved: Saved) -> None:
    want = TINY["llama"].run(usual(saved("llama"), "LlamaForCausalLM"))
    checkpoint, gate = open_gated(saved("llama"))
    model = load_model(checkpoint)
    gate.fail(TransferError("the store is away"))
    with pytest.raises(TransferError, match="the store is away"):
        logits(model)
    with pytest.raises(TransferError, match="the store is away"):
        wait_for(model)
    gate.fail(None)
    gate.release()
    assert torch.equal(TINY["llama"].run(model), want)


def test_experts_that_must_be_fused_report_a_failed_transfer(saved: Saved) -> None:
    checkpoint, gate = open_gated(saved("mixtral"))
    model = load_model(checkpoint)
    gate.fail(TransferError("the store is away"))
    with pytest.raises(TransferError, match="the store is away"):
        model.model.layers[0].mlp.experts.gate_up_proj.sum()
    gate.fail(None)
    gate.release()
    assert torch.equal(
        TINY["mixtral"].run(model), TINY["mixtral"].run(usual(saved("mixtral"), "MixtralForCausalLM"))
    )


def test_only_the_bytes_of_what_is_read_are_waited_for(saved: Saved) -> None:
    checkpoint, gate = open_gated(saved("llama"))
    model = load_model(checkpoint)
    run_late(gate, lambda: model.model.layers[1].mlp.up_proj(torch.ones(1, 64)))
    info = checkpoint.info("model.layers.1.mlp.up_proj.weight")
    assert [span for _, span in gate.waited] == [info.range]
    assert len(list(pending_tensors(model))) == len(list(model.parameters())) - 1


def test_the_first_calls_of_many_threads_are_all_right(saved: Saved) -> None:
    want = TINY["llama"].run(usual(saved("llama"), "LlamaForCausalLM"))
    checkpoint, gate = open_gated(saved("llama"))
    model = load_model(checkpoint)
    results: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(TINY["llama"].run(model))) for _ in range(6)]
    for thread in threads:
        thread.start()
    gate.until_someone_waits()
    gate.release()
    for thread in threads:
        thread.join(60)
    assert len(results) == 6
    assert all(torch.equal(result, want) for result in results)
    assert len(gate.waited) == len(checkpoint)  # each tensor was waited for once
