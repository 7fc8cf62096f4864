"""Tests of patched Hugging Face models: loss, gradients, logits and text equal the unpatched model's."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import math
import pickle
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_models
import torch
import transformers
from layer_parts import Where, loss_of
from small_models import FAMILIES, faults, own_operators, tokens, trained
from torch import Tensor

from coda_agent import fused
from coda_agent.fused import ops
from coda_agent.fused.huggingface import fit

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
BOTH_MODES = pytest.mark.parametrize("stack", [False, True], ids=["module-local", "whole stack"])


@pytest.fixture(autouse=True)
def warns_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_warned", set())


@EVERY_FAMILY
@BOTH_MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_loss_and_every_gradient_pass_the_error_gate(
    family: str, stack: bool, dtype: torch.dtype, where: Where
) -> None:
    model, ids = small_models.model(family, dtype, device=where.device), tokens(4, 24)
    exact, usual = trained(copy.deepcopy(model).double(), ids), trained(model, ids)
    fused.patch(model, stack=stack)
    found = trained(model, ids)
    assert found.keys() == {"loss", *(n for n, _ in model.named_parameters())}
    assert faults(found, exact, usual) == []


def test_the_error_gate_sees_a_wrong_eps() -> None:
    model, ids = small_models.model("Llama", torch.bfloat16, rms_norm_eps=1e-3), tokens(4, 24)
    exact, usual = trained(copy.deepcopy(model).double(), ids), trained(model, ids)
    fused.patch(model)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-6
    assert faults(trained(model, ids), exact, usual)


@EVERY_FAMILY
@BOTH_MODES
def test_every_part_of_a_layer_runs_fused(family: str, stack: bool, where: Where) -> None:
    model = small_models.model(family, where.dtype, device=where.device)
    table = fused.patch(model, stack=stack)
    ran = own_operators(lambda: trained(model, tokens(), use_cache=False))
    forward = [each for each in ran if "backward" not in each]
    activation = "geglu" if family == "Gemma" else "swiglu"
    before = {"Qwen2": "attention_in_bias", "Qwen3": "attention_in"}.get(family, "attention_in_rotated")
    after = f"block_{activation}"
    assert forward == [before, after + "_next_norm" * stack, before, after, "summed_loss"]
    # every operator has a backward, except the loss, which computes its gradients in the forward
    assert len(ran) == 2 * len(forward) - 1
    said = {row.part: row.runs for row in table}
    assert said["norm, MLP, residual"] == said["norm, queries, keys, values"] == "fused"
    assert said.get("next layer's norm, without its row scaling") == ("fused" if stack else None)
    assert said["norms of heads, rotation" if family == "Qwen3" else "rotation"] == "fused"
    assert said["last norm"] == "fused" and "forward" in vars(model.model.norm)
    assert said["attention"] == "PyTorch" and "the model's own" in str(table)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_norm_of_heads_runs_its_hooks(register: str) -> None:
    model, ran = small_models.model("Qwen3"), list[Any]()
    fused.patch(model)
    getattr(model.model.layers[0].self_attn.k_norm, register)(lambda *given: ran.append(given))
    trained(model, tokens(), use_cache=False)
    assert len(ran) == 1


@EVERY_FAMILY
@BOTH_MODES
def test_generate_gives_the_same_tokens(family: str, stack: bool) -> None:
    model = small_models.model(family).eval()
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0  # the second prompt is shorter than the first
    how = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    usual = model.generate(tokens(2, 9), **how)
    fused.patch(model, stack=stack)
    ran = own_operators(lambda: model.generate(tokens(2, 9), **how))
    assert torch.equal(model.generate(tokens(2, 9), **how), usual)
    assert len(ran) == 12 * 2 * 2 and all(each.endswith("_inference") for each in ran)


def test_a_cache_that_an_unpatched_model_filled_can_be_read_on() -> None:
    model = small_models.model("Llama").eval()
    ids = tokens(1, 8)
    with torch.no_grad():
        usual = model(ids).logits[:, -1]
        begun = model(ids[:, :5], use_cache=True)
        fused.patch(model)
        mixed = model(ids[:, 5:], cache=begun.cache).logits[:, -1]
    assert loss_of(mixed, usual) < 1e-5


def test_scaled_rotations_are_the_models() -> None:
    model = small_models.model("Llama", rope_parameters=small_models.SCALED)
    exact = trained(copy.deepcopy(model).double(), tokens())
    fused.patch(model)
    found = trained(model, tokens())
    assert max(loss_of(found[name], exact[name]) for name in exact) < 3e-6


@EVERY_FAMILY
@BOTH_MODES
def test_unpatched_it_is_bitwise_what_it_was(family: str, stack: bool) -> None:
    model = small_models.model(family)
    before = trained(model, tokens())
    fused.patch(model, stack=stack)
    fused.unpatch(model)
    after = trained(model, tokens())
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any("forward" in vars(module) for module in model.modules())


def saved(model: Any, folder: Path) -> dict[str, bytes]:
    model.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@EVERY_FAMILY
@BOTH_MODES
def test_checkpoints_are_byte_for_byte_the_models(family: str, stack: bool, tmp_path: Path) -> None:
    model = small_models.model(family)
    plain, state = saved(model, tmp_path / "plain"), model.state_dict()
    fused.patch(model, stack=stack)
    assert saved(model, tmp_path / "patched") == plain
    assert list(model.state_dict()) == list(state)
    other = small_models.model(family, seed=5)
    fused.patch(other, stack=stack)
    other.load_state_dict(state)
    loaded = type(model).from_pretrained(tmp_path / "patched").train()
    for again in (other, loaded):
        found, expected = trained(again, tokens()), trained(model, tokens())
        assert all(loss_of(found[name], expected[name]) < 1e-5 for name in expected)


def test_an_optimizer_made_before_patching_goes_on() -> None:
    model = small_models.model("Llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fused.patch(model)
    losses = []
    for _ in range(5):
        losses.append(float(trained(model, tokens())["loss"]))
        optimizer.step()
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.05


@BOTH_MODES
def test_frozen_weights_have_no_gradient_and_no_product(stack: bool) -> None:
    model = small_models.model("Llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    exact = trained(copy.deepcopy(model).double(), tokens())
    fused.patch(model, stack=stack)
    found = trained(model, tokens())
    assert found.keys() == exact.keys() == {"loss", *(n for n, _ in model.named_parameters() if "norm" in n)}
    assert max(loss_of(found[name], exact[name]) for name in exact) < 3e-6
    ran = own_operators(lambda: trained(model, tokens()))
    assert "block_swiglu_backward_a_x_gamma" in ran


@pytest.mark.parametrize("first", [True, False], ids=["patched first", "adapted first"])
def test_lora_adapters_stand_beside(first: bool) -> None:
    # imported inside this test, because a machine with a GPU may lack peft
    import peft

    model = small_models.model("Llama")
    how = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    if first:
        fused.patch(model)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, how)
    plain = copy.deepcopy(adapted)
    fused.unpatch(plain)
    exact = trained(plain.double(), tokens())
    if not first:
        said = {row.part: row for row in fused.patch(adapted)}
        assert "self_attn.q_proj is a peft Linear" in said["norm, queries, keys, values"].why
        assert said["norm, MLP, residual"].runs == "fused"
    found = trained(adapted, tokens())
    assert found.keys() == exact.keys() and any("lora" in name for name in exact)
    assert max(loss_of(found[name], exact[name]) for name in exact) < 3e-6
    ran = own_operators(lambda: trained(adapted, tokens()))
    assert ran.count("block_swiglu") == 2 and "attention_in_rotated" not in ran


@BOTH_MODES
@pytest.mark.parametrize("when", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
@pytest.mark.parametrize(
    "path",
    [
        *("layers.0.mlp.up_proj", "layers.0.mlp", "layers.0.mlp.act_fn"),
        *("layers.1.self_attn", "layers.1.input_layernorm", "head"),
    ],
)
def test_a_hook_is_called(path: str, when: str, stack: bool) -> None:
    model, seen = small_models.model("Llama"), list[int]()
    fused.patch(model, stack=stack)
    module = model.lm_head if path == "head" else model.model.get_submodule(path)
    getattr(module, f"register_{when}_hook")(partial(lambda seen, *_: seen.append(1), seen))
    trained(model, tokens(), use_cache=False)
    assert seen == [1]


def test_a_global_hook_sees_every_module() -> None:
    model, seen = small_models.model("Llama"), list[str]()
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        with torch.no_grad():
            model(tokens(), use_cache=False)
            expected, seen[:] = sorted(seen), []
            fused.patch(model)
            model(tokens(), use_cache=False)
    finally:
        hook.remove()
    assert sorted(seen) == expected and "SiLUActivation" in expected


@BOTH_MODES
def test_hidden_states_and_attentions_are_recorded(stack: bool) -> None:
    model = small_models.model("Llama", attn_implementation="eager").eval()
    asked = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        usual = model(tokens(), **asked)
        fused.patch(model, stack=stack)
        found = model(tokens(), **asked)
    for mine, theirs in ((found.hidden_states, usual.hidden_states), (found.attentions, usual.attentions)):
        assert len(mine) == len(theirs)
        assert all(loss_of(a, b) < 1e-5 for a, b in zip(mine, theirs, strict=True))


@BOTH_MODES
def test_the_models_own_checkpointing_gives_the_same_gradients(stack: bool, where: Where) -> None:
    model = small_models.model("Llama", where.dtype, device=where.device)
    fused.patch(model)
    plain = trained(model, tokens(), use_cache=False)
    fused.patch(model, stack=stack)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ran = own_operators(lambda: trained(model, tokens(), use_cache=False))
    again = trained(model, tokens(), use_cache=False)
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    assert ran.count("block_swiglu") == 4  # two layers; the backward runs the forward of each layer again


class Scaled(torch.nn.Module):
    """Quantized weights: no tensor is called ``weight``."""

    def __init__(self, plain: torch.nn.Linear):
        super().__init__()
        self.qweight, self.bias = torch.nn.Buffer(plain.weight.detach() * 8), None

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.qweight / 8)


class Integer(torch.nn.Module):
    """Quantized weights in int8."""

    bias = None

    def __init__(self, plain: torch.nn.Linear):
        super().__init__()
        self.weight = torch.nn.Buffer((plain.weight.detach() * 100).to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) / 100)


class Experts(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.1


def subclassed(module: Any) -> None:
    """Make an instance one of a user's subclass, which doubles what the module computes."""
    kind = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = kind.forward(self, *args, **kwargs)
        return (made[0] * 2, made[1]) if isinstance(made, tuple) else made * 2

    module.__class__ = type("Mine", (kind,), {"forward": forward})


def with_forward(module: Any) -> None:
    """Give an instance a forward of its own, as accelerate's hooks and many patches of attention do."""
    usual = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = usual(self, *args, **kwargs)
        return (made[0] * 2, made[1]) if isinstance(made, tuple) else made * 2

    module.forward = types.MethodType(forward, module)


PLACES = [
    "self_attn",
    "mlp",
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.o_proj",
    "mlp.up_proj",
]


@BOTH_MODES
@pytest.mark.parametrize("change", [subclassed, with_forward])
@pytest.mark.parametrize("path", PLACES)
def test_a_module_that_computes_something_else_is_the_models(
    path: str, change: Callable[[Any], None], stack: bool
) -> None:
    model = small_models.model("Llama")
    change(model.model.layers[1].get_submodule(path))
    expected = trained(model, tokens(), use_cache=False)
    table = fused.patch(model, stack=stack)
    assert any(path in row.why for row in table)
    found = trained(model, tokens(), use_cache=False)
    assert max(loss_of(found[name], expected[name]) for name in expected) < 3e-6
    assert own_operators(lambda: trained(model, tokens(), use_cache=False))


@pytest.mark.parametrize("late", [False, True], ids=["before the patch", "after the patch"])
def test_another_norm_and_another_mlp_are_the_models(late: bool) -> None:
    model = small_models.model("Llama")
    if late:
        fused.patch(model)
    norm = torch.nn.LayerNorm(32)
    torch.nn.init.constant_(norm.bias, 0.3)
    model.model.layers[0].input_layernorm, model.model.layers[1].mlp = norm, Experts()
    plain = copy.deepcopy(model)
    fused.unpatch(plain)
    expected = trained(plain, tokens())
    if not late:
        why = {row.why for row in fused.patch(model)}
        assert "input_layernorm is a torch LayerNorm" in why and any("Experts" in each for each in why)
    found = trained(model, tokens())
    assert max(loss_of(found[name], expected[name]) for name in expected) < 3e-6


def test_an_activation_that_is_replaced_after_the_patch_counts() -> None:
    model = small_models.model("Llama")
    fused.patch(model)
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    found = trained(model, tokens())
    fused.unpatch(model)
    expected = trained(model, tokens())
    assert max(loss_of(found[name], expected[name]) for name in expected) < 3e-6


def test_a_batch_without_a_target_has_gradients_of_zero() -> None:
    model, ids = small_models.model("Llama"), tokens()
    fused.patch(model)
    loss = model(input_ids=ids, labels=torch.full_like(ids, -100), use_cache=False).loss
    loss.backward()
    assert loss.isnan() and all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("strict", [False, True])
def test_a_patched_model_is_exported_with_its_operators(strict: bool) -> None:
    model, ids = small_models.model("Llama").eval(), tokens()
    expected = model(ids, use_cache=False).logits
    fused.patch(model)
    with torch.no_grad():
        exported = torch.export.export(model, (ids,), {"use_cache": False}, strict=strict)
        assert loss_of(exported.module()(ids, use_cache=False).logits, expected) < 1e-5
        shapes = {"input_ids": {1: torch.export.Dim("length", min=2, max=64)}, "use_cache": None}
        given = ((ids,), {"use_cache": False})
        anyhow = torch.export.export(model, *given, dynamic_shapes=shapes, strict=strict).module()
        assert anyhow(ids[:, :5], use_cache=False).logits.shape[1] == 5
    assert sum("coda_agent" in str(node.target) for node in exported.graph.nodes) == 4


def test_a_window_without_a_target_leaves_all_weights_finite() -> None:
    """``num_items_in_batch`` is 0 where the Trainer accumulates batches that have no target."""
    model, ids = small_models.model("Llama"), tokens()
    fused.patch(model)
    labels = torch.full_like(ids, -100)
    model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(0)).loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_an_adaption_prompt_may_come_after_patch() -> None:
    import peft

    def loss(patched: bool) -> Tensor:
        model = small_models.model("Llama")
        if patched:
            fused.patch(model)
        torch.manual_seed(0)
        config = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1)
        adapted = peft.get_peft_model(model, config)
        return trained(adapted, tokens())["loss"]

    assert loss_of(loss(True), loss(False)) < 3e-6


def test_batched_gradients_of_a_model_are_refused() -> None:
    model, stream = small_models.model("Llama"), torch.randn(1, 4, 32, requires_grad=True)
    fused.patch(model)
    logits = model(inputs_embeds=stream).logits[0, -1, :3]
    with pytest.raises(ops.NoBackward):
        torch.autograd.grad(logits, stream, torch.eye(3), is_grads_batched=True)


SWITCHES = {  # the rows of the table that a switch turns off
    "attention_in": {"norm, queries, keys, values", "rotation"},
    "rotation": {"rotation"},
    "attention_out": {"output projection, residual"},
    "mlp": {"norm, MLP, residual", "output projection, residual"},
    "last_norm": {"last norm"},
    "loss": {"loss in training, without logits"},
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_part_may_be_switched_off(switch: str) -> None:
    model = small_models.model("Llama")
    expected = trained(model, tokens(), use_cache=False)
    table = fused.patch(model, **{switch: False})
    off = {row.part for row in table if row.why == fit.OFF}
    assert off == SWITCHES[switch]
    assert off | {"attention"} == {row.part for row in table if row.runs == "PyTorch"}
    result = trained(model, tokens(), use_cache=False)
    assert max(loss_of(result[name], expected[name]) for name in expected) < 3e-6
    ids = tokens()
    assert (model(input_ids=ids, labels=ids).logits is None) == (switch != "loss")


def descended(module: Any) -> None:
    module.__class__ = type("Mine", (type(module),), {})


PARTS = {
    "": ("model", "loss in training, without logits"),
    "model.layers.1": ("model.layers.1", "all"),
    "model.norm": ("model.norm", "last norm"),
}


@pytest.mark.parametrize("path", PARTS)
@pytest.mark.parametrize("change", [descended, with_forward])
def test_the_table_has_a_row_for_a_part_that_is_a_subclass_or_has_its_own_forward(
    change: Callable[[Any], None], path: str
) -> None:
    model = small_models.model("Llama")
    every = {(row.module.partition(" to ")[0], row.part) for row in fused.patch(model)}
    fused.unpatch(model)
    change(model.get_submodule(path))
    rows = {(row.module, row.part): row for row in fused.patch(model)}
    assert rows[PARTS[path]].runs == "PyTorch" and rows[PARTS[path]].why
    assert {part for _, part in every} <= {part for _, part in rows} | {"all"}


def test_the_table_has_a_row_for_a_part_of_another_kind() -> None:
    model = small_models.model("Llama")
    model.model.layers[1], model.model.norm = torch.nn.Identity(), torch.nn.RMSNorm(32)
    rows = {row.module: row.why for row in fused.patch(model)}
    assert rows["model.layers.1"] == "it is a torch Identity, not a decoder layer of transformers"
    assert rows["model.norm"] == "it is a torch RMSNorm, not a norm of transformers"


@pytest.mark.parametrize("kind", [Scaled, Integer])
def test_quantized_weights_are_the_models_and_the_rest_stays_fused(kind: Any) -> None:
    model = small_models.model("Llama")
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, kind(getattr(layer.mlp, name)))
    expected = trained(model, tokens(), use_cache=False)
    fused.patch(model)
    found = trained(model, tokens(), use_cache=False)
    assert max(loss_of(found[name], expected[name]) for name in expected) < 3e-6
    assert own_operators(lambda: trained(model, tokens(), use_cache=False)).count("attention_in_rotated") == 2


def test_a_forward_of_the_models_own_keeps_its_meaning() -> None:
    model, seen = small_models.model("Llama"), list[bool]()
    usual = model.forward

    def autocast(*args: Any, **kwargs: Any) -> Any:  # as accelerate's ``prepare`` wraps a model
        with torch.autocast("cpu", torch.bfloat16):
            return usual(*args, **kwargs)

    model.forward = autocast
    model.model.norm.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    said = {row.part: row.why for row in fused.patch(model)}
    assert said["loss in training, without logits"] == "the model has a forward of its own"
    assert "attention_in_rotated" in own_operators(lambda: trained(model, tokens(), use_cache=False))
    assert seen == [True]


@pytest.mark.parametrize(
    "wrap", [partial, lambda own: functools.wraps(own)(lambda *a, **k: 2 * own(*a, **k))]
)
def test_another_loss_is_the_models(wrap: Any) -> None:
    model = small_models.model("Llama")
    model.loss_function = wrap(model.loss_function)
    expected = trained(model, tokens())
    said = {row.part: row.why for row in fused.patch(model)}
    assert "the loss is" in said["loss in training, without logits"]
    found = trained(model, tokens())
    assert max(loss_of(found[name], expected[name]) for name in expected) < 3e-6


def test_training_takes_the_former_name_of_a_cache() -> None:
    model = small_models.model("Llama")
    with torch.no_grad():
        prefix = model(tokens(), use_cache=True).cache
    expected = trained(model, tokens(), past_key_values=copy.deepcopy(prefix))
    fused.patch(model)
    result = trained(model, tokens(), past_key_values=copy.deepcopy(prefix))
    assert max(loss_of(result[name], expected[name]) for name in expected) < 3e-6


def test_a_layer_takes_the_former_name_of_a_cache() -> None:
    model = small_models.model("Llama").eval()
    cache, x = transformers.DynamicCache(config=model.config), torch.randn(1, 4, 32)
    angles = model.model.rotary_emb(x, torch.arange(4)[None])
    fused.patch(model)
    with torch.no_grad():
        model.model.layers[0](x, position_embeddings=angles, past_key_values=cache)
    assert cache.get_seq_length() == 4


def test_a_replica_reads_its_own_weights() -> None:
    model = small_models.model("Llama")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    expected = other(tokens(), labels=tokens()).loss
    fused.patch(model)
    # what torch.nn.parallel.replicate does for each GPU
    made = {module: module._replicate_for_data_parallel() for module in model.modules()}
    given = dict(other.named_modules())
    for name, module in model.named_modules():
        for key, child in module._modules.items():
            setattr(made[module], key, made[child])
        for key, weight in given[name]._parameters.items():
            setattr(made[module], key, weight)
    found = made[model](tokens(), labels=tokens())
    assert loss_of(found.loss, expected) < 1e-5 and found.logits is None
    fused.unpatch(model)
    assert not any("_replicate_for_data_parallel" in vars(module) for module in model.modules())


@pytest.fixture
def accelerator() -> Iterator[Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    try:
        yield Accelerator(cpu=True, mixed_precision="bf16")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_a_model_that_accelerate_wrapped_is_still_patched(accelerator: Any) -> None:
    model = small_models.model("Llama")
    own = inspect.signature(model.forward)
    fused.patch(model)
    wrapped = accelerator.prepare(model)
    assert inspect.signature(wrapped.forward) == own
    copied = copy.deepcopy(wrapped)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.zero_()
    found = copied(tokens(), labels=tokens())
    found.loss.backward()
    assert found.logits is None and float(found.loss) == pytest.approx(math.log(small_models.VOCABULARY))
    assert all(weight.grad is None for weight in model.parameters())
    plain = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    assert plain(tokens(), labels=tokens()).logits is None
    fused.unpatch(plain)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_accelerate_wrapped_can_be_unpatched(accelerator: Any) -> None:
    model = small_models.model("Llama")
    usual = model(tokens()).logits
    fused.patch(model)
    wrapped = accelerator.prepare(model)
    fused.unpatch(wrapped)
    assert wrapped(tokens(), labels=tokens()).logits is not None
    said = {row.part: row.why for row in fused.patch(wrapped)}
    assert said["loss in training, without logits"] == "the model has a forward of its own"
    assert wrapped(tokens(), labels=tokens()).logits is not None
    fused.unpatch(wrapped)
    assert torch.equal(accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)(tokens()).logits, usual)


def test_quantized_weights_can_be_replaced() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = small_models.model("Llama").eval()
    quantize_(model, Int8WeightOnlyConfig())
    fused.patch(model, keep_reordered=True)
    assert model.to(torch.bfloat16)(tokens()).logits.dtype == torch.bfloat16


def test_biases_may_come_after_patch() -> None:
    model = small_models.model("Llama", rms_norm_eps=0.0)
    fused.patch(model)
    for layer in model.model.layers:
        for part in fit.projections(layer):
            part.bias = torch.nn.Parameter(torch.randn(len(part.weight)))
    plain = copy.deepcopy(model)
    fused.unpatch(plain)
    exact, usual = trained(copy.deepcopy(plain).double(), tokens()), trained(plain, tokens())
    assert own_operators(lambda: trained(model, tokens(), use_cache=False)).count("attention_in_bias") == 2
    assert faults(trained(model, tokens()), exact, usual) == []


# Bad input


def says(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
        call()
    return [str(each.message) for each in caught if "fused" in str(each.message)]


def plain_losses(model: Any) -> Tensor:
    plain = copy.deepcopy(model)
    fused.unpatch(plain)
    return trained(plain, tokens())["loss"]


def test_fp64_takes_the_models_path_with_one_warning() -> None:
    model = small_models.model("Llama", torch.float64)
    fused.patch(model)
    (said,) = says(lambda: trained(model, tokens()))
    assert "PyTorch computes this, not a kernel: torch.float64 on cpu" in said
    assert torch.equal(trained(model, tokens())["loss"], plain_losses(model))


@pytest.mark.parametrize(
    ("dtype", "capability", "why"),
    [
        (torch.bfloat16, (9, 0), ""),
        (torch.bfloat16, (8, 0), "NVIDIA A100 is not a Hopper GPU"),
        (torch.float32, (9, 0), "matrices of torch.float32 on a GPU"),
    ],
)
def test_what_a_gpu_does_not_take_goes_the_models_way(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, capability: tuple[int, int], why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    x: Any = SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
    assert fit.unfit(x, [x]) == why


def test_a_stream_in_another_dtype_than_the_weights_goes_the_models_way() -> None:
    model = small_models.model("Llama")
    layer, x = model.model.layers[0], torch.randn(1, 4, 32, dtype=torch.bfloat16)
    given = {"position_embeddings": model.model.rotary_emb(x, torch.arange(4)[None])}
    usual = layer(x, **given)
    fused.patch(model)
    (said,) = says(lambda: layer(x, **given))
    assert "a stream of torch.bfloat16 and weights of torch.float32" in said
    assert torch.equal(layer(x, **given), usual)


@pytest.mark.parametrize("moved", ["", "self_attn.q_proj", "mlp.up_proj", "input_layernorm"])
def test_a_layer_with_tensors_on_two_devices_is_refused(moved: str) -> None:
    model = small_models.model("Llama")
    layer, x = model.model.layers[0], torch.randn(1, 4, 32)
    given = {"position_embeddings": model.model.rotary_emb(x, torch.arange(4)[None])}
    fused.patch(model)
    layer.get_submodule(moved).to("meta")
    with pytest.raises((ValueError, RuntimeError), match="cpu.*meta|meta.*cpu"):
        layer(x, **given)


def test_norms_of_heads_with_an_eps_each_are_left_to_the_model() -> None:
    model = small_models.model("Qwen3")
    for layer in model.model.layers:
        layer.self_attn.k_norm.variance_epsilon = 0.5
    exact, usual = trained(copy.deepcopy(model).double(), tokens()), trained(model, tokens())
    fused.patch(model)
    assert faults(trained(model, tokens()), exact, usual) == []


def test_heads_that_no_tile_holds_are_rotated_by_the_model() -> None:
    model = small_models.model("Llama", head_dim=72)
    exact, usual = trained(copy.deepcopy(model).double(), tokens()), trained(model, tokens())
    said = {row.part: row.programs for row in fused.patch(model)}
    assert (said["norm, queries, keys, values"], said["rotation"]) == ("attention_in (derived)", "heads")
    assert faults(trained(model, tokens()), exact, usual) == []


def test_another_activation_is_left_to_the_model() -> None:
    model = small_models.model("Llama", hidden_act="relu")
    exact = trained(copy.deepcopy(model).double(), tokens())
    said = {row.part: row.why for row in fused.patch(model)}
    assert said["norm, MLP, residual"] == "there is no kernel for the activation ReLU"
    found = trained(model, tokens())
    assert max(loss_of(found[name], exact[name]) for name in exact) < 3e-6


def test_odd_widths_are_left_to_the_model() -> None:
    model = small_models.model("Gemma", hidden_size=36)
    exact = trained(copy.deepcopy(model).double(), tokens())
    table = fused.patch(model)
    assert {row.part for row in table if row.runs == "fused"} == {"last norm"}
    assert all("is not a multiple of 8" in row.why for row in table if "norm, " in row.part)
    assert own_operators(lambda: trained(model, tokens())) == []
    assert max(loss_of(g, exact[name]) for name, g in trained(model, tokens()).items()) < 3e-6


def test_a_bias_of_the_mlp_is_left_to_the_model() -> None:
    model = small_models.model("Llama", mlp_bias=True, attention_bias=True)
    exact = trained(copy.deepcopy(model).double(), tokens())
    said = {row.part: row.why for row in fused.patch(model)}
    assert "has a bias" in said["norm, MLP, residual"] and "has a bias" in said["output projection, residual"]
    assert said["norm, queries, keys, values"] == ""
    found = trained(model, tokens())
    assert max(loss_of(found[name], exact[name]) for name in exact) < 3e-6


def test_unknown_models_are_left_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    table = fused.patch(model)
    assert not table.fused
    assert [(row.module, row.runs) for row in table] == [("model", "PyTorch")]
    assert "llama, mistral, qwen2, qwen3, gemma" in table[0].why
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_class_that_overrides_the_models_is_left_alone() -> None:
    model = small_models.model("Llama")
    kind = type(model.model.layers[0])
    model.model.layers[0].__class__ = type("Mine", (kind,), {"forward": lambda self, x, **_: x})
    assert "model.layers.1" in {row.module for row in fused.patch(model)}
    assert "forward" not in vars(model.model.layers[0])


def test_patching_twice_is_patching_once() -> None:
    model = small_models.model("Llama")
    assert fused.patch(model) == fused.patch(model)
    fused.unpatch(model)
    assert not any("forward" in vars(module) for module in model.modules())
    fused.unpatch(model)


def test_an_instances_own_forward_is_given_back() -> None:
    model = small_models.model("Llama")
    layer = model.model.layers[0]
    calls: list[int] = []

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return type(layer).forward(layer, *args, **kwargs)

    layer.forward = mine
    fused.patch(model)
    fused.unpatch(model)
    assert layer.forward is mine
    trained(model, tokens())
    assert calls == [1]


def copies(model: Any) -> Iterator[Any]:
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    yield torch.load(buffer, weights_only=False)


def test_a_copy_of_a_patched_model_is_patched_and_its_own() -> None:
    model = small_models.model("Llama")
    fused.patch(model)
    expected = trained(model, tokens())
    for other in copies(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.0)
        found = trained(other, tokens())
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert other.model.layers[0].forward.module is other.model.layers[0]
        assert own_operators(partial(trained, other, tokens()))


def test_a_forward_keeps_its_parameters_for_those_who_ask() -> None:
    model = small_models.model("Llama")
    before = inspect.signature(model.forward), inspect.signature(model.model.layers[0].forward)
    fused.patch(model)
    assert (inspect.signature(model.forward), inspect.signature(model.model.layers[0].forward)) == before
