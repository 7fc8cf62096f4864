"""Tests of whole-stack mode: a layer computes the first part of the next layer's norm, unless something
between the two layers prevents this."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import small_models
import torch
import torch._dynamo
from layer_parts import loss_of
from small_models import own_operators, tokens, trained
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from coda_agent import fused
from coda_agent.fused import chains
from coda_agent.fused.huggingface import fit, stack

PART = "next layer's norm, without its row scaling"
Change = Callable[[Any], object]


def in_place(module: Any, given: tuple[Tensor, ...], *_: Any) -> None:
    given[0].mul_(1.5)


def other_stream(module: Any, given: Any, made: Tensor) -> Tensor:
    return made * 1.5


def reordered(layers: Any) -> None:
    layers[1], layers[2] = layers[2], layers[1]


def checkpointed(layers: Any) -> None:
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


CHANGES: dict[str, Change] = {
    "a hook changes the stream in place": lambda layers: layers[1].register_forward_pre_hook(in_place),
    "a hook of the layer changes its result in place": lambda layers: layers[0].register_forward_hook(
        lambda _, __, made: made.mul_(1.5)
    ),
    "a hook returns another stream": lambda layers: layers[0].register_forward_hook(other_stream),
    "a hook of the norm": lambda layers: layers[1].input_layernorm.register_forward_hook(other_stream),
    "a hook of a projection": lambda layers: layers[1].self_attn.q_proj.register_forward_hook(other_stream),
    "another order": reordered,
    "checkpointed by its user": checkpointed,
}


def beside(changed: Change) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return loss and gradients of a patched model, and the same of an unpatched model in fp64. ``changed``
    modifies the layers of both models after the patching."""
    model = small_models.model("Llama", num_hidden_layers=3)
    exact = copy.deepcopy(model).double()
    fused.patch(model, stack=True)
    for each in (model, exact):
        changed(each.model.layers)
    ids = tokens(2, 16)
    return trained(model, ids, use_cache=False), trained(exact, ids, use_cache=False)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:fused")
def test_a_change_between_layers_keeps_its_meaning(change: str) -> None:
    found, exact = beside(CHANGES[change])
    assert max(loss_of(found[name], exact[name]) for name in exact) < 3e-6


def test_a_stream_that_was_changed_in_place_begins_its_norm_again() -> None:
    layer = small_models.model("Llama").model.layers[0]
    begun = chains.Begun(torch.ones(2, 4), torch.ones(2))
    for changed in (False, True):
        stream = stack.hand_over(torch.ones(2, 4), layer.input_layernorm, begun)
        if changed:
            stream.add_(1)
        assert stack.take(stream, layer) is (None if changed else begun)


def test_a_late_hook_is_refused_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_warned", set())
    model = small_models.model("Llama")
    fused.patch(model, stack=True)
    model.model.layers[1].input_layernorm.register_forward_hook(lambda *_: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ran = own_operators(lambda: [trained(model, tokens()) for _ in range(2)])
    assert ["the next layer's norm has hooks" in str(each.message) for each in caught] == [True]
    assert not any("next_norm" in each for each in ran)


def unpatched_neighbour(model: Any) -> None:
    layer = model.model.layers[1]
    layer.__class__ = type("Mine", (type(layer),), {})


def adapted(model: Any) -> None:
    target = "model.layers.1.self_attn.q_proj"
    import peft

    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[target]))


REFUSED: dict[str, Change] = {
    "the next layer is a Mine": unpatched_neighbour,
    "in the next layer, self_attn.q_proj is a peft Linear": adapted,
    "in the next layer, input_layernorm has hooks": lambda model: model.model.layers[
        1
    ].input_layernorm.register_full_backward_hook(lambda *_: None),
    "the layer has hooks": lambda model: model.model.layers[0].register_forward_hook(lambda *_: None),
    "self_attn.o_proj has hooks": lambda model: model.model.layers[0].self_attn.o_proj.register_forward_hook(
        lambda *_: None
    ),
    "the next layer's norm is on meta, this layer on cpu": lambda model: model.model.layers[
        1
    ].input_layernorm.to("meta"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_the_table_says_why_a_layer_does_not_begin_the_next_norm(why: str) -> None:
    model = small_models.model("Llama")
    REFUSED[why](model)
    (row,) = (row for row in fused.patch(model, stack=True) if row.part == PART)
    assert (row.runs, row.why) == ("PyTorch", why)


def test_a_model_with_a_forward_of_its_own_is_left_module_local() -> None:
    model = small_models.model("Llama")
    model.model.forward = model.model.forward
    assert PART not in {row.part for row in fused.patch(model, stack=True)}


def test_nothing_that_is_begun_outlives_its_use() -> None:
    model = small_models.model("Llama", num_hidden_layers=3)
    fused.patch(model, stack=True)
    with torch.no_grad():
        streams = model(tokens(), output_hidden_states=True).hidden_states
        ran = own_operators(lambda: model(tokens(), output_hidden_states=True))
    assert len(ran) == 6 and sum("next_norm" in each for each in ran) == 2
    assert {getattr(each, "_coda_agent_begun_norm", None) for each in streams} == {None}


def test_it_works_in_inference_mode() -> None:
    model = small_models.model("Llama").eval()
    usual = model(tokens()).logits.detach()
    fused.patch(model, stack=True)
    with torch.inference_mode():
        assert loss_of(model(tokens()).logits, usual) < 1e-5


def test_layers_that_compile_one_by_one_hand_over() -> None:
    model, graphs = small_models.model("Llama"), list[list[str]]()
    usual = model(tokens()).logits.detach()
    fused.patch(model, stack=True)

    def noted(graph: Any, _: Any) -> Any:
        names = [getattr(node.target, "__name__", "") for node in graph.graph.nodes]
        graphs.append([name.partition(".")[0] for name in names])
        return graph

    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend=noted, fullgraph=True)
    found = model(tokens(), use_cache=False).logits
    assert loss_of(found.detach(), usual) < 1e-5
    first, last = graphs
    assert "rsqrt" in first and "block_swiglu_next_norm" in first
    assert "rsqrt" not in last and "block_swiglu" in last
