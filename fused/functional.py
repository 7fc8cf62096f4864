"""Parts of a Transformer layer, computed from weights in a checkpoint's layout.

Residual streams are [..., D], and weights are [out, in] as in torch.nn.Linear. All matrices of a call have
one dtype; a norm's weight has that dtype or fp32. With 16-bit weights, a norm also accepts a stream in fp32,
because autocast leaves streams in fp32. Some kernels need certain rows of a weight to be adjacent. PyTorch
then reorders the rows at each use, so that parameters and gradients keep the checkpoint's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nn_f

from coda_agent.fused import loss, ops
from coda_agent.fused.chains import NORMED, Begun, ByHand, Link, begun
from coda_agent.fused.pointwise import heads, rotation
from coda_agent.fused.reordering import packed as packed
from coda_agent.fused.reordering import paired as paired
from coda_agent.fused.reordering import rotary_pairs as rotary_pairs
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.derive import chains

GRAIN = 8  # 16-bit elements in 16 bytes; sizes of weights must be multiples
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
BLOCK_NEXT_NORM = {
    name: Link(
        f"block_{name}_next_norm",
        chains.attention_out().then(chains.mlp(name), h="h").then(chains.next_norm(), out="out"),
        ("out",),
        beside=("next_hg", "next_rstd"),
        plain=BLOCK[name],
    )
    for name in GATED
}


def _by_hand(bias: bool, rotates: bool) -> dict[tuple[str, ...], ByHand]:
    """The argument ``by_hand`` of the ``Link`` for ``attention_in``."""
    return {} if bias else {("out", "gamma_in", "w_qkv"): (rotation if rotates else heads).of_a_chain}


ATTENTION_IN = {
    (bias, rotates): Link(
        "_".join(("attention_in", *["bias"] * bias, *["rotated"] * rotates)),
        chains.attention_in(bias, rotates),
        ("qkv",),
        by_hand=_by_hand(bias, rotates),
        stream="out",
    )
    for bias, rotates in ((False, True), (False, False), (True, False))
}
LOSS = Link("loss", chains.loss(), ("rest_lse", "target_logit"), rows=loss.ROWS)


class Norm(NamedTuple):
    """An RMSNorm: its weight [D] and eps."""

    weight: Tensor
    eps: float


def rotary_halves(t: Tensor) -> Tensor:
    """Reorder the columns of heads [..., width]. In ``t``, the two columns of each rotated pair are adjacent.
    In the result, they are half a head apart, as in checkpoints."""
    return t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


@cache
def rotates(width: int) -> bool:
    """Whether some tile suits heads of this width, so that ``before_attention`` can rotate them."""
    (kernel,) = lower(ops.defined[ATTENTION_IN[False, True].name].program).gemms
    return width in kernel.fitting()


def angles(cos: Tensor, sin: Tensor, rows: torch.Size) -> Tensor:
    """Interleave cosines and sines [..., length, width] into a kernel's table [tokens, width]. In ``cos`` and
    in ``sin``, the first half of the columns must equal the second half."""
    half = cos.shape[-1] // 2
    table = torch.stack((cos[..., :half], sin[..., :half]), -1).flatten(-2)
    return table.expand(*rows, 2 * half).reshape(-1, 2 * half)


def link_of(links: Mapping[str, Link], activation: str) -> Link:
    """The link for an activation. Raises ValueError for an unknown activation."""
    if activation not in links:
        raise ValueError(f"activation {activation!r} is unknown; use one of {', '.join(links)}")
    return links[activation]


def feed_forward(
    x: Tensor, norm: Norm, up: Tensor, down: Tensor, activation: str, residual: bool = True
) -> Tensor:
    """Compute ``x + mlp(norm(x))``; without ``residual``, ``mlp(norm(x))``. ``up``: [F, D]; for a gated
    activation, the interleaved rows of gate and up [2*F, D]. ``down``: [D, F]. ``activation``: swiglu, geglu
    (tanh form), gelu (tanh form) or relu2."""
    separate = residual and up.dtype == torch.float16  # the chain's own stream is scaled
    link = link_of(BARE_MLP if separate or not residual else MLP, activation)
    given = _normed(x.flatten(0, -2), norm, up.dtype, ("h", "gamma", "rstd"))
    (out,) = link(**given, w_up=up, w_down=down, eps=norm.eps)
    out = _shaped(out, x)
    return x + out if separate else out


def _gamma(norm: Norm, dtype: torch.dtype) -> Tensor:
    """A norm's weight, in fp32 if it has another dtype than the matrices."""
    return norm.weight if norm.weight.dtype in (dtype, torch.float32) else norm.weight.float()


def _normed(
    x: Tensor, norm: Norm, dtype: torch.dtype, names: tuple[str, str, str], begun_norm: Begun | None = None
) -> dict[str, Tensor]:
    """A chain's inputs for its norm: ``hg``, and by their ``names`` the stream, the norm's weight and the
    reciprocal RMS. ``begun_norm``: the norm of the stream, if it is already begun.

    In fp16, the stream times the norm's weight could leave the dtype's range, and so could gradients times
    the reciprocal RMS. So each row of the stream is multiplied by a power of two just below its reciprocal
    RMS, and this reciprocal is divided by the same power."""
    gamma = _gamma(norm, dtype)
    if dtype != torch.float16:
        stream, (hg, rstd) = x.to(dtype), begun_norm or begun(x, gamma, norm.eps, dtype)
    else:
        with torch.no_grad():
            rstd = torch.rsqrt(x.float().square().mean(-1) + norm.eps)
            power = rstd.log2().floor().exp2()  # not above rstd, so gradients only grow
            power = torch.where(rstd > 0, power, 1.0)  # a row with an infinity has an rstd of 0
        stream = (x.float() * power[:, None]).to(dtype)
        hg, rstd = (stream.detach() * gamma.detach()).to(dtype), rstd / power
    return {NORMED: hg, **dict(zip(names, (stream, gamma, rstd), strict=True))}


def after_attention(
    a: Tensor, x: Tensor, norm: Norm, out: Tensor, up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """Compute the part of a layer after attention in one program: ``h + mlp(norm(h))`` with ``h = x + a @
    out'``. In fp16, the output projection is a matmul of its own (see ``_normed``)."""
    if up.dtype == torch.float16:
        return feed_forward(x + nn_f.linear(a, out), norm, up, down, activation)
    (made,) = link_of(BLOCK, activation)(**_block(a, x, norm, out, up, down))
    return _shaped(made, x)


def after_attention_with_next_norm(
    a: Tensor, x: Tensor, norm: Norm, out: Tensor, up: Tensor, down: Tensor, activation: str, next_norm: Norm
) -> tuple[Tensor, Begun | None]:
    """Return the result of ``after_attention``, and a ``Begun``: ``next_norm`` of the result, without the row
    scaling. Pass the ``Begun`` to the next layer's ``before_attention``. No gradient passes through the
    ``Begun``, because ``before_attention`` computes the gradient of the whole norm. In fp16 there is no
    ``Begun``, because it could leave the dtype's range."""
    if up.dtype == torch.float16:
        return after_attention(a, x, norm, out, up, down, activation), None
    given = _block(a, x, norm, out, up, down)
    given |= {"next_gamma": next_norm.weight.detach(), "next_eps": next_norm.eps}
    made, hg, rstd = link_of(BLOCK_NEXT_NORM, activation)(**given)
    return _shaped(made, x), Begun(hg, rstd)


def _shaped(made: Tensor, stream: Tensor) -> Tensor:
    """Give a new result the shape of the stream. ``_unsafe_view`` hides from autograd that the returned
    tensor is a view. If a module returned a visible view, FSDP2 would warn that an in-place operation on the
    view drops FSDP2's hooks."""
    return torch.ops.aten._unsafe_view.default(made, stream.shape)


def _block(a: Tensor, x: Tensor, norm: Norm, out: Tensor, up: Tensor, down: Tensor) -> dict[str, Any]:
    given = {"a": a.flatten(0, -2), "x": x.flatten(0, -2), "w_o": out, "gamma": _gamma(norm, up.dtype)}
    return given | {"w_up": up, "w_down": down, "eps": norm.eps}


def before_attention(
    x: Tensor,
    norm: Norm,
    weight: Tensor,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    turned: int = 0,
    begun_norm: Begun | None = None,
) -> Tensor:
    """Compute ``norm(x) @ weight' + bias``, [..., N].

    ``table`` [tokens, width] (from ``angles``): the angles by which columns 0 to ``turned`` - 1 of the result
    are rotated. The two columns of each rotated pair must be adjacent (see ``rotary_pairs``). A call cannot
    have both ``table`` and ``bias``. ``begun_norm``: ``norm(x)`` without the row scaling, if
    ``after_attention_with_next_norm`` has computed it."""
    link, given = _projection(x, norm, weight, bias, table, turned, begun_norm)
    (made,) = link(**given)
    return made.view(*x.shape[:-1], -1)


def before_attention_apart(
    sizes: Sequence[int],
    x: Tensor,
    norm: Norm,
    weight: Tensor,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    turned: int = 0,
    begun_norm: Begun | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Split the result of ``before_attention`` into parts [tokens, n] of ``sizes`` columns. Return the parts
    and ``x``. Later uses of the stream should read the returned ``x``, so that one kernel of the backward
    adds all gradients of the stream."""
    link, given = _projection(x, norm, weight, bias, table, turned, begun_norm)
    if x.dtype == weight.dtype != torch.float16:
        parts, stream = link.apart(sizes, **given)
        # torch.export would guard the shape of a view of its own input
        x = x if stream is given["out"] else stream.view(x.shape)
    else:  # the chain's stream is not ``x``: autocast keeps ``x`` in fp32, and ``_normed`` scales fp16
        (made,) = link(**given)
        parts = made.split(sizes, 1)
    return list(parts), x


def _projection(
    x: Tensor,
    norm: Norm,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    turned: int,
    begun_norm: Begun | None,
) -> tuple[Link, dict[str, Any]]:
    """The chain that ``before_attention`` runs, and its inputs."""
    if bias is not None and table is not None:
        raise ValueError("a kernel cannot add a bias before its rotation: rotate the result instead")
    given: dict[str, Any] = {"w_qkv": weight, "eps": norm.eps, "b_qkv": bias}
    given |= _normed(x.flatten(0, -2), norm, weight.dtype, ("out", "gamma_in", "rstd_in"), begun_norm)
    if table is not None:
        given |= {"cos_sin": table, "turned": float(turned)}
    return ATTENTION_IN[bias is not None, table is not None], given


def cross_entropy(h: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The loss of each token in fp32, [...]. The logits ``h @ weight'`` are never stored. The loss is 0 where
    the target [...] is -100. Every other target must be the number of a row of ``weight``; otherwise an
    assertion fails, as in PyTorch."""
    flat = _targets(target, weight)
    if not len(flat):
        return (h @ weight.mT).sum(-1).float()  # no value, but autograd finds ``h`` and ``weight``
    rest_lse, logit = LOSS(h=h.flatten(0, -2), w=weight, target=flat)
    ignored = flat == loss.IGNORED
    losses = loss.token_loss(rest_lse, torch.where(ignored, 0.0, logit))  # an ignored token has no logit
    return torch.where(ignored, 0.0, losses).view_as(target)


def summed_cross_entropy(h: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The sum of ``cross_entropy`` over all tokens, a scalar. The forward also computes the gradients, so
    that the backward need not compute the logits again."""
    ops.check_device("summed_cross_entropy", (h, weight, target))
    return loss.summed(h.flatten(0, -2), weight, _targets(target, weight))


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matmul of this tensor is computed. Autocast does not change fp64."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _targets(target: Tensor, weight: Tensor) -> Tensor:
    """Flatten the targets, and assert that each target is ignored or is the number of a row of the weight."""
    flat = target.flatten()
    inside = (flat >= 0) & (flat < len(weight)) | (flat == loss.IGNORED)
    torch._assert_async(inside.all(), "cross_entropy: a target is not a row of the weight")
    return flat
