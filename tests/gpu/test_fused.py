"""Tests of ``fused`` on an H100. Some tests of tests/fused run here again, on the GPU. The other tests need a
GPU: operators against fp64, text that models generate, CUDA graphs, streams and threads."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import small_models
import torch
from checkout import ROOT
from layer_parts import GPU, PARTS, gradients, loss_of
from small_models import FAMILIES, own_operators, tokens
from test_apart import test_each_input_may_be_frozen as test_inputs_of_projections_apart_may_be_frozen
from test_apart import test_gradients_are_those_of_the_projection_and_the_stream
from test_frozen import reordered, test_a_frozen_model_reorders_each_weight_once
from test_functional import (
    test_a_loss_does_its_rows_in_parts,
    test_a_mode_sees_the_operators_and_changes_no_gradient,
    test_a_subclass_of_tensor_takes_the_operator,
    test_a_summed_loss_does_its_rows_in_parts,
    test_a_summed_loss_reads_one_value_after_all_products,
    test_each_input_may_be_frozen,
    test_in_bf16_it_loses_no_more_than_pytorch,
    test_it_compiles_whole_for_any_rows,
    test_opcheck_passes_for_the_summed_loss,
    test_opcheck_passes_with_gradients,
    test_without_gradients_nothing_is_kept_for_them,
)
from test_functional import (
    test_activation_checkpointing_gives_the_same_gradients as test_checkpointing_a_part,
)
from test_half import (
    test_an_fp16_loss_keeps_gradients_of_tiny_streams,
    test_fp16_has_the_unpatched_models_range,
    test_one_16_bit_type_trains_under_autocast_in_the_other,
)
from test_loss import (
    test_an_infinite_value_reaches_the_gradients_that_it_reaches_in_pytorch,
    test_many_gradients_at_once_are_refused,
    test_nearly_certain_tokens_have_the_yardsticks_error,
    test_one_word_is_certain,
    test_without_a_target_gradients_are_zero_whatever_the_loss_is_divided_by,
)
from test_norm import test_either_input_may_be_frozen, test_it_and_its_gradients_are_those_of_fp64
from test_ops import NAMES, drawn, on_gpu, test_opcheck_passes
from test_patching import (
    test_every_part_of_a_layer_runs_fused,
    test_loss_and_every_gradient_pass_the_error_gate,
    test_the_models_own_checkpointing_gives_the_same_gradients,
    warns_anew,
)
from test_training import (
    test_a_model_compiles_whole_for_any_length,
    test_autocast_keeps_the_stream_and_the_gradients_in_fp32,
    test_it_converges_as_the_unpatched_model,
)
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from coda_agent import fused
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import error_gate, reference

__all__ = [
    "reordered",
    "test_a_frozen_model_reorders_each_weight_once",
    "test_a_loss_does_its_rows_in_parts",
    "test_a_mode_sees_the_operators_and_changes_no_gradient",
    "test_a_model_compiles_whole_for_any_length",
    "test_a_subclass_of_tensor_takes_the_operator",
    "test_a_summed_loss_does_its_rows_in_parts",
    "test_a_summed_loss_reads_one_value_after_all_products",
    "test_an_fp16_loss_keeps_gradients_of_tiny_streams",
    "test_an_infinite_value_reaches_the_gradients_that_it_reaches_in_pytorch",
    "test_autocast_keeps_the_stream_and_the_gradients_in_fp32",
    "test_checkpointing_a_part",
    "test_each_input_may_be_frozen",
    "test_either_input_may_be_frozen",
    "test_every_part_of_a_layer_runs_fused",
    "test_fp16_has_the_unpatched_models_range",
    "test_gradients_are_those_of_the_projection_and_the_stream",
    "test_in_bf16_it_loses_no_more_than_pytorch",
    "test_inputs_of_projections_apart_may_be_frozen",
    "test_it_and_its_gradients_are_those_of_fp64",
    "test_it_compiles_whole_for_any_rows",
    "test_it_converges_as_the_unpatched_model",
    "test_loss_and_every_gradient_pass_the_error_gate",
    "test_many_gradients_at_once_are_refused",
    "test_nearly_certain_tokens_have_the_yardsticks_error",
    "test_one_16_bit_type_trains_under_autocast_in_the_other",
    "test_one_word_is_certain",
    "test_opcheck_passes",
    "test_opcheck_passes_for_the_summed_loss",
    "test_opcheck_passes_with_gradients",
    "test_the_models_own_checkpointing_gives_the_same_gradients",
    "test_without_a_target_gradients_are_zero_whatever_the_loss_is_divided_by",
    "test_without_gradients_nothing_is_kept_for_them",
    "warns_anew",
]
CHAINS = ["mlp swiglu", "after attention geglu", "before attention, rotated", "loss"]


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_agrees_with_fp64(name: str) -> None:
    spec = load(ROOT / "specs" / f"{name}.yaml", check=False)
    op, inputs = drawn(name, "cuda")
    made = op(*inputs.values())
    found = dict(zip(spec.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    sizes = on_gpu(spec)
    given = {n: torch.as_tensor(v, device="cuda") for n, v in inputs.items() if n in spec.inputs}
    truth, yard = reference.oracle(spec, given, sizes), reference.yardstick(spec, given, sizes)
    errors = error_gate.compare(spec, found, truth, yard)
    assert all(e.passed for e in errors), [e.reason for e in errors]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("frozen", [False, True])
def test_generate_takes_a_token_that_is_the_most_likely_but_for_rounding(family: str, frozen: bool) -> None:
    model = small_models.model(family, torch.bfloat16, device="cuda").eval()
    ids = tokens(2, 9).cuda()
    fused.patch(model)
    found: list[Tensor] = []
    with fused.frozen(model) if frozen else nullcontext():
        ran = own_operators(
            lambda: found.append(
                model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
            )
        )
    assert len(ran) == 12 * 2 * 2 and all(each.endswith("_inference") for each in ran)
    fused.unpatch(model)
    with torch.no_grad():
        logits = model.float()(found[0]).logits[:, 8:-1]
    best = logits.max(-1).values
    taken = logits.gather(-1, found[0][:, 9:, None])[..., 0]
    assert ((best - taken) < 0.05 * logits.std(-1)).all()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_graph_reads_the_weights_that_it_may_read(frozen: bool) -> None:
    """A graph that is captured inside ``frozen`` reads copies of the weights; any other reads the weights."""
    model, ids = small_models.model("Llama", torch.bfloat16, device="cuda").eval(), tokens(2, 9).cuda()
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool, device="cuda").tril()
    fused.patch(model)

    def logits() -> Tensor:
        result: Tensor = model(ids, attention_mask=mask, use_cache=False).logits
        return result

    with torch.no_grad(), fused.frozen(model) if frozen else nullcontext():
        expected = logits()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = logits()
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, expected)
        if not frozen:
            for parameter in model.parameters():
                parameter.data.mul_(1.5)
            graph.replay()
            assert torch.equal(captured, logits()) and not torch.equal(captured, expected)


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_captured_after_one_call(name: str) -> None:
    given = PARTS[name].drawn(40, torch.bfloat16, "cuda")
    plain = {n: t.detach() for n, t in given.items()}
    with torch.no_grad():
        expected = PARTS[name].ours(**plain)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = PARTS[name].ours(**plain)
        for _ in range(2):
            found.fill_(float("nan"))
            graph.replay()
            assert torch.equal(found, expected)
        for tensor in plain.values():
            tensor.mul_(0.5)
        graph.replay()
        assert torch.equal(found, PARTS[name].ours(**plain))


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_training_step_is_captured_after_one_call(family: str) -> None:
    model = small_models.model(family, torch.bfloat16, device="cuda")
    fused.patch(model)
    ids = tokens(4, 24).cuda()

    def step() -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a warm-up; it frees the gradients, so that the capture allocates new ones
        expected = step().clone()
        usual = {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for parameter in model.parameters():
        parameter.grad.fill_(float("nan"))
    loss.fill_(float("nan"))
    graph.replay()
    assert loss_of(loss, expected) < 1e-3
    for name, parameter in model.named_parameters():
        assert loss_of(parameter.grad, usual[name]) < GPU.close, name


def test_torch_compile_calls_the_kernel_that_rotates_gradients_back() -> None:
    called: set[str] = set()

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        called.update(str(node.target) for node in graph.graph.nodes)
        return graph

    part = PARTS["before attention, rotated"]
    compiled = torch.compile(part.ours, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    given = part.drawn(40, torch.bfloat16, "cuda")
    found, plain = gradients(compiled, given), gradients(part.ours, given)
    assert "coda_agent.rotated_back.default" in called
    for each in plain:
        assert loss_of(found[each], plain[each]) < GPU.close, each


@pytest.mark.parametrize("name", CHAINS)
def test_threads_and_streams_may_call_at_once(name: str) -> None:
    draws = [PARTS[name].drawn(rows, torch.bfloat16, "cuda") for rows in (24, 24, 40, 56)]
    expected = [gradients(PARTS[name].ours, given) for given in draws]
    torch.cuda.synchronize()
    wrong: list[Any] = []

    def work(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    found = gradients(PARTS[name].ours, draws[index])
                    torch.cuda.current_stream().synchronize()
                    wrong.extend(n for n, t in found.items() if not torch.equal(t, expected[index][n]))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(draws))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_accepted_operator_is_captured_and_called_from_streams() -> None:
    op, inputs = drawn("gemm_residual_rmsnorm_gemm", "cuda")
    expected = op(*inputs.values())
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                for mine, plain in zip(op(*inputs.values()), expected, strict=True):
                    stream.wait_stream(torch.cuda.default_stream())
                    assert torch.equal(mine, plain)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = op(*inputs.values())
    for tensor in found:
        tensor.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
