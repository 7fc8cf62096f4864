"""Compute decoder layers of Hugging Face models by fused parts.

A layer has three parts: the norm with the projections of queries, keys and values; the output projection; the
norm with the MLP. A part is fused if its projections are plain ``torch.nn.Linear``. Otherwise the model
computes the part itself, so that adapters, hooks and other kinds of weights keep working. The model itself
computes attention and the cache.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules.module import _has_any_global_hook

from coda_agent.fused import functional
from coda_agent.fused.chains import Begun, remade
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
from coda_agent.fused.huggingface.frozen import copy_of, is_frozen
from coda_agent.fused.pointwise.heads import heads
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


def _projections(layer: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
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


def _warn(why: str) -> None:
    if not torch.compiler.is_compiling() and why not in _warned:
        _warned.add(why)
        warnings.warn(f"fused: PyTorch computes this, not a kernel: {why}", stacklevel=3)


def noted(why: str) -> str:
    """Warn if a part is not fused because other code has replaced a function; return ``why``."""
    if REPLACED in why:
        _warn(why)
    return why


def layer_forward(layer: Any, how: Settings, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a decoder layer. This forward respects the model's own activation checkpointing."""
    if "past_key_values" in kwargs:  # the former name of ``cache``, which transformers accepts until 5.40
        kwargs["cache"] = kwargs.pop("past_key_values")
    if layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
        if kwargs.get("cache") is not None or kwargs.get("use_cache"):
            _warn("a cache has no effect under activation checkpointing")
            kwargs |= {"cache": None, "use_cache": False}
        # Without next_norm: in the backward, a recomputed layer computes its whole first norm itself. The
        # forward must do the same, because otherwise the two results would be rounded differently.
        run = partial(_layer, layer, how._replace(next_norm=None, keeps=False), usual, **kwargs)
        return layer._gradient_checkpointing_func(run, *args)
    return _layer(layer, how, usual, *args, **kwargs)


def _layer(
    layer: Any,
    how: Settings,
    usual: Callable[..., Any],
    hidden_states: Tensor,
    attention_mask: Any = None,
    position_ids: Any = None,
    cache: Any = None,
    use_cache: Any = False,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Any:
    own = {
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "cache": cache,
        "use_cache": use_cache,
        "position_embeddings": position_embeddings,
    }
    begun = stack.take(hidden_states, layer)
    why = _replaced(layer, how)
    if not why:
        last = getattr(layer.mlp, "down_proj", None), layer.self_attn.o_proj
        why = unfit(hidden_states, [part.weight for part in last if type(part) is nn.Linear])
    if not why and watched(layer.self_attn):
        why = "self_attn has hooks"
    if why:
        _warn(why)
        return usual(hidden_states, **own, **kwargs)
    return _rest(layer, how, *_attended(layer, how, hidden_states, begun, **own, **kwargs))


def _replaced(layer: Any, how: Settings) -> str:
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


def norm_of(module: Any, centered: bool) -> functional.Norm:
    weight = 1.0 + module.weight.float() if centered else module.weight
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return functional.Norm(weight, eps)


def _attended(
    layer: Any,
    how: Settings,
    x: Tensor,
    begun: Begun | None,
    attention_mask: Any,
    cache: Any,
    position_embeddings: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Return the input of attention's output projection, [..., A], and the stream."""
    attention = layer.self_attn
    (q, k, v), x = _heads(layer, how, x, begun, position_embeddings, cached=cache is not None)
    if cache is not None:
        k, v = cache.update(k, v, attention.layer_idx, kwargs=kwargs)
    config, globals = attention.config, sys.modules[how.module]
    run = globals.ALL_ATTENTION_FUNCTIONS.get_interface(
        config._attn_implementation, globals.eager_attention_forward
    )
    window = getattr(config if how.window == "config" else attention, "sliding_window", None)
    found, _ = run(
        attention,
        q,
        k,
        v,
        attention_mask,
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        **({"sliding_window": window} if how.window else {}),
        **kwargs,
    )
    return found.reshape(*x.shape[:-1], -1), x


def _heads(
    layer: Any, how: Settings, x: Tensor, begun: Begun | None, angles: tuple[Tensor, Tensor], cached: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return queries and keys (normalized and rotated), values, and the stream. Queries, keys and values are
    [sequences, heads, length, width]. ``angles``: cosines and sines."""
    attention, (cos, sin) = layer.self_attn, angles
    norms = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    rotated = False
    if noted(refusal(layer, how, "attention_in")):
        normed = layer.input_layernorm(x)
        projected: Any = [part(normed) for part in _projections(layer)]
    else:
        usual = cos.shape[-1] == attention.head_dim and not noted(rotation_refusal(layer, how))
        # A cache keeps the model's own order of columns, because other code may read the cache.
        rotated = (
            usual
            and how.rotates
            and attention.q_proj.bias is None
            and not cached
            and equal_halves(layer, how)
        )
        sizes = [part.weight.shape[0] for part in _projections(layer)]
        one = usual and not rotated  # ``heads`` takes queries, keys and values in one matrix
        projected, x = _projected(
            layer, how, x, begun, angles if rotated else None, [sum(sizes)] if one else sizes
        )
        if one:
            gammas = (norms[0].weight, norms[1].weight) if norms else None
            eps = norms[0].variance_epsilon if norms else 0.0
            return heads(projected[0], cos, sin, sizes[1] // attention.head_dim, gammas, eps), x
    q, k, v = (t.reshape(*x.shape[:-1], -1, attention.head_dim) for t in projected)
    if norms:
        q, k = norms[0](q), norms[1](k)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return ((q, k, v) if rotated else (*sys.modules[how.module].apply_rotary_pos_emb(q, k, cos, sin), v)), x


def _projected(
    layer: Any,
    how: Settings,
    x: Tensor,
    begun: Begun | None,
    angles: tuple[Tensor, Tensor] | None,
    sizes: Sequence[int],
) -> tuple[list[Tensor], Tensor]:
    """Return queries, keys and values, split into parts [tokens, n] of ``sizes`` columns, and the stream.
    With ``angles``, queries and keys are rotated, and the columns of each rotated pair are adjacent."""
    parts, dtype = _projections(layer), matmul_dtype(x)
    weights = [part.weight for part in parts]
    bias = None
    if parts[0].bias is not None:  # fp32 stays fp32
        bias = torch.cat([b if b.dtype == torch.float32 else b.to(dtype) for b in (p.bias for p in parts)])
    table = None
    if angles:
        cos, sin = (t.to(dtype) for t in angles)
        table = functional.angles(cos, sin, x.shape[:-1])
    norm = norm_of(layer.input_layernorm, how.centered)
    width = layer.self_attn.head_dim if angles else 0
    packed = _reordered(layer, how, partial(_packed, dtype=dtype, width=width), *weights)
    turned = sum(len(weight) for weight in weights[:2])
    return functional.before_attention_apart(sizes, x, norm, packed, bias, table, turned, begun)


def _reordered(layer: Any, how: Settings, make: partial[Tensor], *weights: Tensor) -> Tensor:
    """Combine weights in the order that a kernel needs."""
    if is_frozen(layer):
        return copy_of(layer, make, *weights)
    return make(*weights) if how.keeps else remade(make, *weights)


def _packed(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    return functional.packed(q.to(dtype), k.to(dtype), v.to(dtype), width)


def _paired(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    return functional.paired(gate.to(dtype), up.to(dtype))


def _rest(layer: Any, how: Settings, a: Tensor, x: Tensor) -> Tensor:
    """The part of the layer after attention."""
    out, mlp, dtype = layer.self_attn.o_proj, layer.mlp, matmul_dtype(x)
    if noted(refusal(layer, how, "mlp")):
        h = x + out(a)
        return h + mlp(layer.post_attention_layernorm(h))
    norm = norm_of(layer.post_attention_layernorm, how.centered)
    up = _reordered(layer, how, partial(_paired, dtype=dtype), mlp.gate_proj.weight, mlp.up_proj.weight)
    down = mlp.down_proj.weight.to(dtype)
    if x.dtype == dtype and a.dtype == dtype and not refusal(layer, how, "attention_out"):
        given = (a, x, norm, out.weight, up, down, how.activation)
        if not _begins_next(layer, how):
            return functional.after_attention(*given)
        following = norm_of(how.next_norm, how.centered)
        made, begun = functional.after_attention_with_next_norm(*given, following)
        return stack.hand_over(made, how.next_norm, begun)
    h = x + out(a)
    if h.dtype == dtype:
        return functional.feed_forward(h, norm, up, down, how.activation)
    return h + functional.feed_forward(h, norm, up, down, how.activation, residual=False)


def _begins_next(layer: Any, how: Settings) -> bool:
    """Whether the layer computes the next layer's norm without its row scaling (see ``stack``)."""
    if how.next_norm is None:
        return False
    if why := stack.refusal(layer, how.next_norm):
        _warn(why)
    return not why
