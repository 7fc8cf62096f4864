"""Tests of code that replaces classes and functions of transformers: the patched model computes what the
unpatched one computes, and the table or a warning says which parts PyTorch computes."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import small_models
import torch
import transformers
from layer_parts import loss_of
from small_models import FAMILIES, own_operators, tokens, trained

from coda_agent import fused
from coda_agent.fused.huggingface import fit

LATE = pytest.mark.parametrize("late", [False, True], ids=["before the patch", "after the patch"])


@pytest.fixture(autouse=True)
def warns_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_warned", set())


def code(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")


def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement that doubles what a function returns, and that has the function's name."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return (result[0] * 2, *result[1:]) if isinstance(result, tuple) else result * 2

    return replacement


def agrees(model: Any) -> list[str]:
    """Check that a patched model has the unpatched model's loss and gradients. Return its operators."""
    plain = copy.deepcopy(model)
    fused.unpatch(plain)
    expected = trained(plain, tokens(), use_cache=False)
    result = trained(model, tokens(), use_cache=False)
    assert max(loss_of(result[name], expected[name]) for name in expected) < 3e-6
    return own_operators(lambda: trained(model, tokens(), use_cache=False))


# the replaced function, a word of the operators that stand for it, and the part whose row names it
CHANGED = [
    ("{}Attention.forward", "attention", "all"),
    ("{}DecoderLayer.forward", "attention", "all"),
    ("{}MLP.forward", "block", "norm, MLP, residual"),
    ("{}RMSNorm.forward", "attention", "last norm"),
    ("rotate_half", "rotated", "rotation"),
    ("apply_rotary_pos_emb", "rotated", "rotation"),
    ("{}RotaryEmbedding.forward", "rotated", ""),
    ("eager_attention_forward", "none", ""),
]


@LATE
@pytest.mark.parametrize(("name", "operator", "part"), CHANGED)
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma"])
def test_a_replaced_function_counts(
    family: str, name: str, operator: str, part: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_models.model(family, attn_implementation="eager")
    *path, function = name.format(family).split(".")
    owner = functools.reduce(getattr, path, code(family))
    if late:
        fused.patch(model)
    monkeypatch.setattr(owner, function, doubled(getattr(owner, function)))
    if late:
        with pytest.warns(match="other code replaced") if part else nullcontext():
            ran = agrees(model)
    else:
        rows = {row.part.removeprefix("norms of heads, "): row for row in fused.patch(model)}
        assert not part or f"other code replaced {owner.__name__.rpartition('.')[2]}" in rows[part].why
        ran = agrees(model)
    assert not any(operator in each for each in ran)


def test_a_replaced_class_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(code("Llama").LlamaMLP):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return super().forward(x) * 2

    monkeypatch.setattr(code("Llama"), "LlamaMLP", Mine)
    model = small_models.model("Llama")
    assert any("mlp is a " in row.why and "Mine" in row.why for row in fused.patch(model))
    agrees(model)


@LATE
@pytest.mark.parametrize("name", ["ForCausalLMLoss", "fixed_cross_entropy"])
def test_a_replaced_loss_counts(name: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.loss import loss_utils

    model = small_models.model("Llama")
    if late:
        fused.patch(model)
    replacement = doubled(getattr(loss_utils, name))
    monkeypatch.setattr(loss_utils, name, replacement)
    if name == "ForCausalLMLoss":
        monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", replacement)
    if not late:
        assert name in {row.part: row.why for row in fused.patch(model)}["loss in training, without logits"]
    assert "summed_loss" not in agrees(model)


@LATE
def test_a_replaced_forward_of_the_causal_model_counts(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cls = small_models.model("Llama"), code("Llama").LlamaForCausalLM
    if late:
        fused.patch(model)
    original = cls.forward

    def forward(self: Any, **kwargs: Any) -> Any:
        result = original(self, **kwargs)
        result.loss = result.loss * 3
        return result

    monkeypatch.setattr(cls, "forward", forward)
    if not late:
        why = {row.part: row.why for row in fused.patch(model)}["loss in training, without logits"]
        assert why == "other code replaced LlamaForCausalLM.forward"
    assert "summed_loss" not in agrees(model)


def test_code_that_is_restored_is_fused_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, module = small_models.model("Llama"), code("Llama")
    with monkeypatch.context() as changed:
        fused.patch(model)
        changed.setattr(module, "rotate_half", doubled(module.rotate_half))
        assert not any("rotated" in each for each in agrees(model))
    assert any("rotated" in each for each in agrees(model))
    assert any("rotated" in each for each in agrees(pickle.loads(pickle.dumps(model))))


def test_compiled_code_follows_a_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    model, module = small_models.model("Llama"), code("Llama")
    fused.patch(model)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        expected = trained(model, tokens(), use_cache=False)
        result = trained(compiled, tokens(), use_cache=False)
        assert loss_of(result["loss"], expected["loss"]) < 3e-6
        monkeypatch.setattr(module.LlamaMLP, "forward", doubled(module.LlamaMLP.forward))


class Axes(torch.nn.Module):
    """Two-dimensional positions: the second half of the columns has angles of its own."""

    def __init__(self, rotary: Any):
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Any, position_ids: Any) -> Any:
        pairs = zip(self.rotary(x, position_ids), self.rotary(x, position_ids // 4), strict=True)
        half = self.rotary.inv_freq.shape[0]
        return tuple(torch.cat((a[..., :half], b[..., half:]), -1) for a, b in pairs)


@LATE
@pytest.mark.parametrize("family", FAMILIES)
def test_halves_of_cosines_may_differ(family: str, late: bool) -> None:
    model = small_models.model(family)
    if late:
        fused.patch(model)
    model.model.rotary_emb = Axes(model.model.rotary_emb)
    if not late:
        fused.patch(model)
    assert not any("rotated" in each for each in agrees(model))


def test_a_hook_may_change_cosines() -> None:
    model = small_models.model("Llama")
    fused.patch(model)
    model.model.rotary_emb.register_forward_hook(
        lambda module, given, angles: tuple(t * torch.linspace(0.5, 1, t.shape[-1]) for t in angles)
    )
    assert not any("rotated" in each for each in agrees(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_gets_a_window_in_the_families_that_pass_one(family: str) -> None:
    given = list[Any]()

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **how: Any) -> Any:
        given.append(how.get("sliding_window", "none"))
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(module, q, k, v, mask, **how)

    transformers.AttentionInterface.register("observed", attention)
    more: dict[str, Any] = (
        {"use_sliding_window": True, "max_window_layers": 1} if family.startswith("Qwen") else {}
    )
    model = small_models.model(family, sliding_window=4, attn_implementation="observed", **more)
    trained(model, tokens())
    expected = list(given)
    given.clear()
    fused.patch(model)
    trained(model, tokens())
    assert given == expected


def test_a_hook_may_change_a_layers_cosines() -> None:
    model = small_models.model("Llama")
    fused.patch(model)

    def stretched(module: Any, args: Any, kwargs: Any) -> Any:
        cos, sin = kwargs["position_embeddings"]
        ramp = torch.linspace(0.5, 1, cos.shape[-1])
        return args, kwargs | {"position_embeddings": (cos * ramp, sin * ramp.flip(0))}

    for layer in model.model.layers:
        layer.register_forward_pre_hook(stretched, with_kwargs=True)
    agrees(model)


def test_a_copy_of_a_layer_does_not_copy_its_model() -> None:
    model = small_models.model("Llama")
    fused.patch(model)
    layer, whole = copy.deepcopy(model.model.layers[0]), copy.deepcopy(model)
    owner = vars(layer)["_coda_agent_patch"].settings.owner.model
    assert owner is model.model
    assert vars(whole.model.layers[0])["_coda_agent_patch"].settings.owner.model is whole.model


def subclassed(module: Any) -> None:
    """Make an instance one of a user's subclass, which doubles what the module computes."""
    kind = type(module)
    module.__class__ = type("Mine", (kind,), {"forward": doubled(kind.forward)})


@LATE
@pytest.mark.parametrize("path", ["model.layers.0", "model.norm", "model.layers.0.mlp", "lm_head"])
def test_an_instance_of_another_class_counts(path: str, late: bool) -> None:
    model = small_models.model("Llama")
    if late:
        fused.patch(model)
    subclassed(model.get_submodule(path))
    if not late:
        fused.patch(model)
    agrees(model)


@LATE
@pytest.mark.parametrize("name", ["cross_entropy", "linear", "silu", "gelu"])
def test_a_replaced_function_of_torch_counts(name: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_models.model("Gemma" if name == "gelu" else "Llama")
    if late:
        fused.patch(model)
    function = getattr(torch.nn.functional, name)
    monkeypatch.setattr(torch.nn.functional, name, lambda *args, **how: function(*args, **how) * 1.5)
    if not late:
        fused.patch(model)
    agrees(model)


class SiLU(torch.nn.Module):
    """An activation of the user's, with the name of a known one."""

    def forward(self, x: Any) -> Any:
        return 2 * torch.nn.functional.silu(x)


@LATE
@pytest.mark.parametrize("activation", [SiLU(), torch.nn.functional.silu, lambda x: x.relu()])
def test_an_activation_is_known_by_its_class(activation: Any, late: bool) -> None:
    model = small_models.model("Llama")
    if late:
        fused.patch(model)
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = activation
    if not late:
        why = {row.part: row.why for row in fused.patch(model)}["norm, MLP, residual"]
        assert why.startswith("there is no kernel for the activation ")
    agrees(model)


def test_a_norm_method_of_an_instance_counts() -> None:
    model = small_models.model("Gemma")
    fused.patch(model)
    model.model.norm._norm = lambda x: x * 3
    model.model.layers[1].input_layernorm._norm = lambda x: x * 2
    agrees(model)


def test_hooks_see_the_models_own_arguments() -> None:
    model, given = small_models.model("Llama"), list[set[str]]()
    hook = lambda module, args, kwargs: given.append(set(kwargs))  # noqa: E731
    model.model.register_forward_pre_hook(hook, with_kwargs=True)
    ids = tokens()
    model(ids, labels=ids, num_items_in_batch=5)
    fused.patch(model)
    model(ids, labels=ids, num_items_in_batch=5)
    assert given[0] == given[1]


def test_a_registered_attention_may_return_weights() -> None:
    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **how: Any) -> Any:
        out, _ = transformers.integrations.sdpa_attention.sdpa_attention_forward(module, q, k, v, mask, **how)
        return out, q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT

    transformers.AttentionInterface.register("weighing", attention)
    model = small_models.model("Llama", attn_implementation="weighing").eval()
    expected = model(tokens(), output_attentions=True).attentions
    fused.patch(model)
    result = model(tokens(), output_attentions=True).attentions
    assert len(result) == len(expected) == 2
    assert all(loss_of(a, b) < 3e-6 for a, b in zip(result, expected, strict=True))
    assert any("attention" in each for each in own_operators(lambda: model(tokens())))


def test_the_table_names_a_hooked_attention() -> None:
    model = small_models.model("Llama")
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: None)
    rows = {row.module: row.why for row in fused.patch(model)}
    assert rows["model.layers.0"] == "self_attn has hooks"


@pytest.mark.parametrize("missing", ["model.norm", "lm_head", "model.layers.0.self_attn"])
def test_the_table_has_a_row_for_what_is_missing(missing: str) -> None:
    model = small_models.model("Llama")
    owner, _, name = missing.rpartition(".")
    delattr(model.get_submodule(owner), name)
    assert fused.patch(model)
