"""Decide which parts of a decoder layer fused parts can compute, and say why not the others.

``patch`` asks for its table, and each call asks again, because other code may change a model between calls.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules.module import _has_any_global_hook

from coda_agent.fused import functional
from coda_agent.fused.functional import GRAIN, matmul_dtype
from coda_agent.fused.huggingface import stack
from coda_agent.fused.huggingface.family import (
    REPLACED,
    WINDOWS,
    Code,
    Owner,
    changed,
    code,
    code_of,
    family,
    kind,
    own_forward,
    place,
)
from coda_agent.primitives.target import TARGET

ACTIVATIONS = {  # by Python module and class
    "torch.nn.modules.activation.SiLU": "swiglu",
    "transformers.activations.SiLUActivation": "swiglu",
    "transformers.activations.GELUTanh": "geglu",
    "transformers.activations.PytorchGELUTanh": "geglu",
    "transformers.activations.NewGELUActivation": "geglu",
}
FUNCTIONS = ("silu", "gelu", "linear")  # of torch.nn.functional, for which fused parts stand
PLAIN_WEIGHTS = (nn.Parameter, Tensor, FakeTensor, FunctionalTensor)  # the last two while torch.export traces
PARTS = {
    "attention_in": ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "mlp": ("post_attention_layernorm", "mlp", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}
OFF = "switched off in the call of patch"
LINEAR = code_of(nn.Linear, "forward")
PLAIN_FUNCTIONS = code_of("torch.nn.functional", *FUNCTIONS)


class OriginalCode(NamedTuple):
    """The code of transformers for which a layer's fused parts stand."""

    layer: Code | None
    attention: Code | None
    norm: Code | None
    mlp: Code | None
    activation: Code | None
    model: Code | None  # of the model that owns the layer
    rotary: Code | None  # of the owner's module that computes cosines and sines
    rotation: Code


class Settings(NamedTuple):
    """How to compute a layer. ``parts``: the parts that may be fused. ``centered``: norms multiply by 1 +
    weight. ``rotates``: the matmul's epilogue rotates queries and keys, if they have no bias. ``keeps``: keep
    reordered weights from a forward to its backward. ``window``: what holds the sliding window that the
    family passes to attention, or "". ``module``: the name of the family's Python module. ``owner``: the
    model that has the layer. ``next_norm``: the next layer's first norm, if this layer also computes that
    norm, without the row scaling; otherwise None."""

    parts: frozenset[str]
    activation: str
    centered: bool
    rotates: bool
    keeps: bool
    window: str
    module: str
    original: OriginalCode
    owner: Owner
    next_norm: Any = None


def settings(layer: Any, owner: Any, parts: frozenset[str], keeps: bool = False) -> Settings:
    name = family(layer, "DecoderLayer")
    attention, activation = layer.self_attn, type(getattr(layer.mlp, "act_fn", None))
    kernel = ACTIVATIONS.get(f"{activation.__module__}.{activation.__qualname__}", "")
    return Settings(
        parts=parts,
        activation=kernel,
        centered=name == "gemma",
        rotates=not hasattr(attention, "q_norm") and functional.rotates(attention.head_dim),
        keeps=keeps,
        window=WINDOWS.get(name, ""),
        module=place(name),
        original=OriginalCode(
            layer=code(layer, "DecoderLayer"),
            attention=code(attention, "Attention"),
            norm=code(layer.input_layernorm, "RMSNorm") or code(layer.post_attention_layernorm, "RMSNorm"),
            mlp=code(layer.mlp, "MLP"),
            activation=code_of(activation, "forward") if kernel else None,
            model=code(owner, "Model"),
            rotary=code(getattr(owner, "rotary_emb", owner), "RotaryEmbedding"),
            rotation=code_of(place(name), "apply_rotary_pos_emb", "rotate_half"),
        ),
        owner=Owner(owner),
    )


def foreign(layer: Any) -> str:
    """Say why no part of a layer can be fused: the layer or its attention computes something else than the
    family's classes. Return "" if parts can be fused."""
    name = family(layer, "DecoderLayer")
    attention: Any = getattr(layer, "self_attn", None)
    if own_forward(layer):
        return "it has a forward of its own"
    if attention is None or not family(attention, "Attention"):
        return f"self_attn is a {kind(attention)}, not {name}'s"
    if own_forward(attention):
        return "self_attn has a forward of its own"
    if watched(attention):
        return "self_attn has hooks"
    originals = code(layer, "DecoderLayer"), code(attention, "Attention")
    return next((why for each in originals if each and (why := each.replaced())), "")


def _modules(layer: Any, part: str) -> Iterator[tuple[str, Any]]:
    for path in PARTS[part]:
        module: Any = layer
        for name in path.split("."):
            module = getattr(module, name)
        yield path, module


def not_plain(module: Any, sharded: bool = False) -> str:
    """Say why fused parts cannot compute a projection; return "" if the projection is plain. ``sharded``:
    accept a DTensor as weight, because FSDP gathers the whole weight whenever the module runs."""
    if why := changed(module, LINEAR):
        return why
    weight = type(module.weight)
    if weight not in PLAIN_WEIGHTS and not (sharded and weight.__name__ == "DTensor"):
        return f"has a {weight.__name__} as weight"
    if any(size % GRAIN for size in module.weight.shape):
        return f"has shape {tuple(module.weight.shape)}, which is not a multiple of {GRAIN}"
    return ""


def projections(layer: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """The linear modules of queries, keys and values."""
    attention = layer.self_attn
    return attention.q_proj, attention.k_proj, attention.v_proj


def refusal(layer: Any, how: Settings, part: str, sharded: bool = False) -> str:
    """Say why a part of a layer cannot be fused; return "" if it can. ``sharded``: FSDP shards the weights
    while the layer does not run."""
    if part not in how.parts:
        return OFF
    original = how.original
    for path, module in _modules(layer, part):
        if path.endswith("_proj"):
            why = not_plain(module, sharded)
            if not why and module.bias is not None and part != "attention_in":
                why = "has a bias"
        else:
            why = changed(module, original.mlp if path == "mlp" else original.norm)
        if why:
            return f"{path} {why}"
    if part == "mlp" and (why := _other_activation(layer.mlp.act_fn, how)):
        return why
    if why := PLAIN_FUNCTIONS.replaced():
        return why
    attention = layer.self_attn
    if part == "attention_in" and len({getattr(attention, f"{n}_proj").bias is None for n in "qkv"}) > 1:
        return "some of queries, keys and values have a bias, and some have none"
    return ""


def _other_activation(module: Any, how: Settings) -> str:
    """Say why a kernel cannot compute an MLP's activation; return "" if it can."""
    if not how.activation or not isinstance(module, nn.Module):
        name = getattr(module, "__name__", type(module).__name__)
        return f"there is no kernel for the activation {name}"
    why = changed(module, how.original.activation)
    return f"mlp.act_fn {why}" if why else ""


def rotation_refusal(layer: Any, how: Settings) -> str:
    """Say why fused parts cannot rotate queries and keys, or normalize their heads; return "" if they can."""
    if "rotation" not in how.parts:
        return OFF
    names = [name for name in ("q_norm", "k_norm") if hasattr(layer.self_attn, name)]
    norms = [getattr(layer.self_attn, name) for name in names]
    for name, norm in zip(names, norms, strict=True):
        if why := changed(norm, how.original.norm):
            return f"self_attn.{name} {why}"
    if len({norm.variance_epsilon for norm in norms}) > 1:
        return "the norms of heads have an eps each"
    return how.original.rotation.replaced()


def equal_halves(layer: Any, how: Settings) -> bool:
    """Whether the two halves of a layer's cosines are equal, and those of its sines, because the family's own
    code computes them, and no hook changes them."""
    model, original = how.owner.model, how.original
    hooks = layer._forward_pre_hooks.values()
    if any(not getattr(hook, "__module__", "").startswith("torch.distributed") for hook in hooks):
        return False
    if original.model is None or original.model.replaced() or own_forward(model):
        return False
    return not changed(model.rotary_emb, original.rotary)


def unfit(x: Tensor, weights: Iterable[Tensor]) -> str:
    """Say why fused parts cannot compute with these tensors; return "" if they can."""
    dtype, others = matmul_dtype(x), {matmul_dtype(w) for w in weights}
    if not others <= {dtype}:
        return f"a stream of {x.dtype} and weights of {', '.join(sorted(map(str, others)))}"
    if x.device.type == "cuda":
        if torch.cuda.get_device_capability(x.device) != TARGET.capability:
            return f"{torch.cuda.get_device_name(x.device)} is not a Hopper GPU"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"matrices of {dtype} on a GPU"
    elif x.device.type not in ("cpu", "meta") or dtype == torch.float64:
        return f"{dtype} on {x.device.type}"
    return ""


_warned: set[str] = set()


def warn(why: str) -> None:
    if not torch.compiler.is_compiling() and why not in _warned:
        _warned.add(why)
        warnings.warn(f"fused: PyTorch computes this, not a kernel: {why}", stacklevel=3)


def noted(why: str) -> str:
    """Warn if a part is not fused because other code has replaced a function; return ``why``."""
    if REPLACED in why:
        warn(why)
    return why


def rename_cache(arguments: dict[str, Any]) -> None:
    """Give the argument ``past_key_values`` its new name, ``cache``. Transformers accepts both until 5.40."""
    if "past_key_values" in arguments:
        arguments["cache"] = arguments.pop("past_key_values")


def replaced(layer: Any, how: Settings) -> str:
    """Say which code of the layer or of its attention was replaced after ``patch``; return "" if none was."""
    layer_code, attention_code = how.original.layer, how.original.attention
    assert layer_code is not None and attention_code is not None  # otherwise ``patch`` leaves the layer alone
    attention: Any = layer.self_attn
    if own_forward(attention) or type(attention) is not attention_code.holder:
        return f"self_attn is a changed {kind(attention)}"
    return layer_code.replaced(layer) or attention_code.replaced()


def watched(attention: Any) -> bool:
    """Whether a hook reads the attention module's result, which a fused layer does not produce. Transformers'
    own hooks read it while they record attention weights."""
    hooks = {**attention._forward_hooks, **attention._forward_pre_hooks}
    if attention._backward_hooks or attention._backward_pre_hooks or _has_any_global_hook():
        return True
    if not hooks:
        return False
    recorded = sys.modules["transformers.utils.output_capturing"]._active_collector.get() or {}
    return "attentions" in recorded or stack.changing(hooks)
