"""Models whose parameters come to lie on a GPU."""

import copy
from typing import Any

import pytest
import torch
from tests.modules.conftest import Saved
from tests.support.gated_source import open_gated
from tests.support.tiny_models import TINY, usual
from torch import nn

from loadstone.loader.checkpoint import open_checkpoint
from loadstone.loader.modules.bind import pending_tensors, wait_for
from loadstone.loader.modules.load import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def _check_same(got: Any, want: nn.Module) -> None:
    left, right = got.state_dict(), want.state_dict()
    assert list(left) == list(right)
    for key, tensor in left.items():
        assert tensor.is_cuda
        assert tensor.dtype == right[key].dtype
        assert torch.equal(tensor.cpu(), right[key].cpu()), key
    assert not list(pending_tensors(got))
    assert {type(tensor) for tensor in (*got.parameters(), *got.buffers())} <= {nn.Parameter, torch.Tensor}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("wait", [True, False])
def test_a_model_on_cuda_is_the_one_that_transformers_loads(
    saved: Saved, name: str, late: bool, wait: bool
) -> None:
    folder = saved(name)
    checkpoint, gate = open_gated(folder)
    if not late or wait:
        gate.release()
    got: Any = load_model(checkpoint if late else folder, device="cuda", wait=wait)
    assert all(tensor.is_cuda for tensor in (*got.parameters(), *got.buffers()))
    gate.release()
    if wait:
        assert not list(pending_tensors(got))
    want: Any = usual(folder, TINY[name].model).to("cuda")
    assert torch.equal(TINY[name].run(got), TINY[name].run(want))
    _check_same(got, want)


@pytest.mark.parametrize("late", [True, False])
def test_tied_parameters_stay_one_on_cuda(saved: Saved, late: bool) -> None:
    checkpoint, gate = open_gated(saved("llama-tied"))
    if not late:
        gate.release()
    model: Any = load_model(checkpoint, device="cuda")
    gate.release()
    wait_for(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_module_on_cuda_is_bound_there(saved: Saved) -> None:
    folder = saved("llama")
    want: Any = usual(folder, TINY["llama"].model)
    module = copy.deepcopy(want).to("cuda")
    for parameter in module.parameters():
        parameter.data.zero_()
    open_checkpoint(folder).bind(module, wait=True)
    _check_same(module, want)


def test_graph_capture_works_once_everything_is_here(saved: Saved) -> None:
    model: Any = load_model(saved("llama"), device="cuda", wait=True)
    ids = torch.tensor([[1, 2, 3]], device="cuda")
    with torch.inference_mode():
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                want = model(input_ids=ids, use_cache=False).logits
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = model(input_ids=ids, use_cache=False).logits
        got.zero_()
        graph.replay()
    assert torch.allclose(got, want, atol=1e-5)  # other kernels may be chosen while capturing
