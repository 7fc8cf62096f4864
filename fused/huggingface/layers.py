"""Compute decoder layers of Hugging Face models by fused parts.

A layer has three parts: the norm with the projections of queries, keys and values; the output projection; the
norm with the MLP. A part is fused if its projections are plain ``torch.nn.Linear``. Otherwise the model
computes the part itself, so that adapters, hooks and other kinds of weights keep working. The model itself
computes attention and the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coda_agent.fused import functional
from coda_agent.fused.chains import Begun, remade
from coda_agent.fused.functional import matmul_dtype
from coda_agent.fused.huggingface import stack
from coda_agent.fused.huggingface.fit import (
    Settings,
    equal_halves,
    noted,
    projections,
    refusal,
    rename_cache,
    replaced,
    rotation_refusal,
    unfit,
    warn,
    watched,
)
from coda_agent.fused.huggingface.frozen import copy_of, is_frozen
from coda_agent.fused.pointwise.heads import heads


def layer_forward(layer: Any, how: Settings, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a decoder layer. This forward respects the model's own activation checkpointing."""
    rename_cache(kwargs)
    if layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
        if kwargs.get("cache") is not None or kwargs.get("use_cache"):
            warn("a cache has no effect under activation checkpointing")
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
    why = replaced(layer, how)
    if not why:
        last = getattr(layer.mlp, "down_proj", None), layer.self_attn.o_proj
        why = unfit(hidden_states, [part.weight for part in last if type(part) is nn.Linear])
    if not why and watched(layer.self_attn):
        why = "self_attn has hooks"
    if why:
        warn(why)
        return usual(hidden_states, **own, **kwargs)
    return _rest(layer, how, *_attended(layer, how, hidden_states, begun, **own, **kwargs))


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
        projected: Any = [part(normed) for part in projections(layer)]
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
        sizes = [part.weight.shape[0] for part in projections(layer)]
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
    parts, dtype = projections(layer), matmul_dtype(x)
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
        warn(why)
    return not why
