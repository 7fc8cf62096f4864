"""Parts of a Transformer layer, over weights as a checkpoint has them.

Streams are [..., D]; weights [out, in] as torch.nn.Linear keeps them. All of a call's matrices are of one
dtype, and a norm's weight of that or fp32. A norm also takes a stream in fp32 before 16-bit weights, as
autocast leaves it. Rows that a kernel wants adjacent are brought together at use, by
PyTorch, so that parameters, their gradients and checkpoints keep their own order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from coda_agent.fused.chains import NORMED, Link, begun
from coda_agent.primitives.derive import chains

LOSS_ROWS = 4096  # of which the backward of a loss holds logits' gradients at a time
IGNORED = -100  # targets of rows without a loss

GATED = ("swiglu", "geglu")
MLP = {name: Link(f"mlp_{name}", chains.mlp(name), ("out",)) for name in chains.ACTIVATIONS}
BARE_MLP = {
    name: Link(f"mlp_{name}_without_residual", chains.mlp(name, residual=False), ("out",))
    for name in chains.ACTIVATIONS
}
BLOCK = {
    name: Link(f"block_{name}", chains.attention_out().then(chains.mlp(name), h="h"), ("out",))
    for name in chains.ACTIVATIONS
}
ATTENTION_IN = {
    (bias, rotates): Link(
        "_".join(("attention_in", *["bias"] * bias, *["rotated"] * rotates)),
        chains.attention_in(bias, rotates),
        ("qkv",),
    )
    for bias, rotates in ((False, True), (False, False), (True, False))
}
LOSS = Link("loss", chains.loss(), ("lse", "target_logit"), rows=LOSS_ROWS)


class Norm(NamedTuple):
    """An RMSNorm: its weight [D] as it multiplies, and eps."""

    weight: Tensor
    eps: float


def paired(first: Tensor, second: Tensor) -> Tensor:
    """Rows of two matrices [N, D] by turns: [2*N, D]."""
    return torch.stack((first, second), 1).flatten(0, 1)


def rotary_pairs(weight: Tensor, width: int) -> Tensor:
    """Rows [heads * width, D] with the two sides of each rotation, half a head apart, made adjacent."""
    return weight.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


def rotary_halves(t: Tensor) -> Tensor:
    """[..., width] with adjacent sides of a rotation -> half a head apart, as checkpoints have them."""
    return t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def angles(cos: Tensor, sin: Tensor, rows: torch.Size) -> Tensor:
    """Cosines and sines, [..., length, width] with equal halves, as a kernel's table [tokens, width]."""
    half = cos.shape[-1] // 2
    table = torch.stack((cos[..., :half], sin[..., :half]), -1).flatten(-2)
    return table.expand(*rows, 2 * half).reshape(-1, 2 * half)


def _known(links: Mapping[str, Link], activation: str) -> Link:
    if activation not in links:
        raise ValueError(f"activation {activation!r} is unknown; use one of {', '.join(links)}")
    return links[activation]


def feed_forward(
    x: Tensor, norm: Norm, up: Tensor, down: Tensor, activation: str, residual: bool = True
) -> Tensor:
    """``x + mlp(norm(x))``, or without ``x +``. ``up``: [F, D], or rows of gate and up by turns [2*F, D];
    ``down``: [D, F]; ``activation``: swiglu, geglu (tanh form), gelu (tanh form) or relu2."""
    flat = x.flatten(0, -2)
    hg, rstd = begun(flat, norm.weight, norm.eps, up.dtype)
    link = _known(MLP if residual else BARE_MLP, activation)
    given = {"h": flat.to(up.dtype), "gamma": norm.weight, "w_up": up, "w_down": down, "eps": norm.eps}
    (out,) = link(**given, **{NORMED: hg, "rstd": rstd})
    return out.view_as(x)


def after_attention(
    a: Tensor, x: Tensor, norm: Norm, out: Tensor, up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """``h + mlp(norm(h))`` of ``h = x + a @ out'``, in one program: what follows attention in a layer."""
    (made,) = _known(BLOCK, activation)(
        a=a.flatten(0, -2),
        x=x.flatten(0, -2),
        w_o=out,
        gamma=norm.weight,
        w_up=up,
        w_down=down,
        eps=norm.eps,
    )
    return made.view_as(x)


def before_attention(
    x: Tensor,
    norm: Norm,
    weight: Tensor,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    turned: int = 0,
) -> Tensor:
    """``norm(x) @ weight' + bias``, [..., N]. ``table`` [tokens, width] (``angles``) turns the first
    ``turned`` columns, whose sides are adjacent (``rotary_pairs``); not with a bias."""
    if bias is not None and table is not None:
        raise ValueError("a bias stands between the product and its rotation: rotate the result instead")
    flat = x.flatten(0, -2)
    hg, rstd = begun(flat, norm.weight, norm.eps, weight.dtype)
    stream = flat.to(weight.dtype)
    given = {"out": stream, "gamma_in": norm.weight, "w_qkv": weight, "eps": norm.eps, "b_qkv": bias}
    if table is not None:
        given |= {"cos_sin": table, "turned": float(turned)}
    link = ATTENTION_IN[bias is not None, table is not None]
    (made,) = link(**given, **{NORMED: hg, "rstd_in": rstd})
    return made.view(*x.shape[:-1], -1)


def cross_entropy(h: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The loss of each token in fp32, [...], of logits ``h @ weight'`` that are never stored: 0 where its
    target [...] is -100. Other targets that are no row of ``weight`` are a failed assertion, as PyTorch's."""
    flat = target.flatten()
    inside = (flat >= 0) & (flat < len(weight)) | (flat == IGNORED)
    torch._assert_async(inside.all(), "cross_entropy: a target is no row of the weight")
    lse, chosen = LOSS(h=h.flatten(0, -2), w=weight, target=flat)
    return torch.where(flat == IGNORED, 0.0, lse - chosen).view_as(target)
