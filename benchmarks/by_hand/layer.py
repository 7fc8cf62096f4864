"""A Transformer layer whose projections run in this project's accepted kernels, in forward and backward.
PyTorch computes attention and all other steps.

An RMSNorm's row scale commutes with the matmul after the norm. So the kernel that writes the residual stream
h also returns rstd and hg = h * gamma, where gamma is the weight of the next norm. The next projection
multiplies hg, and scales the rows of its result by rstd. A layer therefore takes (h, hg, rstd) and returns
these three for the next layer. So this layer computes hg and rstd for the norm of its output, whereas the
layer in plain PyTorch computes the norm of its input. A stack of layers of either kind does the same total
work. PyTorch computes the stream that enters the first layer (``start``). The gradients equal those of the
plain layer. They include the gradient of the first norm's weight, although the previous layer computes that
norm's hg and rstd. The kernel that computes the backward of the q, k and v projection also computes this
gradient.

D is the model's width, and F the FFN's width. z is a projection's result with the row scale applied, and dz
is the gradient of z.

| step | runs in |
|---|---|
| q, k = rotated(rstd * (hg @ Wqk')) | gemm_rmsnorm_rope |
| v = rstd * (hg @ Wv') | gemm_rmsnorm, because gemm_rmsnorm_rope would rotate v too |
| a = attention(q, k, v) | PyTorch |
| h1 = x + a @ Wo', hg1 = h1 * gamma, rstd1 | gemm_residual_partial_rmsnorm |
| z = rstd1 * (hg1 @ Wgu'), act = silu(gate) * up | gemm_rmsnorm_swiglu |
| y = h1 + act @ Wd', and its hg and rstd | gemm_residual_partial_rmsnorm |
| dz, act (computed again), sum(dz * z), from dy @ Wd | gemm_swiglu_bwd |
| dWd = dy' @ act | torch.mm |
| s = sum(dz * z) / D | PyTorch, [tokens] |
| dh1, dgamma, hn1 = h1 * rstd1 * gamma, from dz @ Wgu, dres = dy | gemm_residual_rmsnorm_bwd |
| dWgu = dz' @ hn1 | torch.mm |
| da = dh1 @ Wo, dWo = dh1' @ a | torch.mm |
| dq, dk, dv of attention | PyTorch |
| dqkv: dq and dk rotated back, and dv; s = sum(dqkv * qkv) / D | ``unrotated``: torch.compile on a GPU |
| dx, dgamma, hn, from dqkv @ Wqkv, dres = dh1 | gemm_residual_rmsnorm_bwd |
| dWqkv = dqkv' @ hn | torch.mm |

The forward saves neither hg nor act. The backward computes hn = h * rstd * gamma and act again. Each of these
tensors is freed once the weight gradient that needs the tensor is computed. Weight gradients are in bf16, as
in the plain layer. The kernel always writes z, but inference does not keep z.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.by_hand.runners import Runner, calls
from coda_agent.comparison.layers.fused import packed, unpacked
from coda_agent.comparison.layers.layer import Gradients, Layer
from coda_agent.comparison.layers.plain import Rotary
from coda_agent.comparison.layers.shape import EPS, Shape, Weights, rotary

Unrotate = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class ResidualStream(NamedTuple):
    """The residual stream h [tokens, D], with two tensors for the next norm: hg = h * gamma [tokens, D] and
    rstd [tokens]. h and hg are bf16, rstd is fp32."""

    h: Tensor
    hg: Tensor
    rstd: Tensor


class Attended(NamedTuple):
    """Attention's inputs and output. ``heads``: q, k and v, [sequences, heads, length, head width].
    ``mixed``: the output, through which autograd differentiates. The same values as matrices: ``qk`` [tokens,
    2*D] has q and k, ``v`` [tokens, D] has v, and ``a`` [tokens, D] has the output."""

    heads: tuple[Tensor, Tensor, Tensor]
    mixed: Tensor
    qk: Tensor
    v: Tensor
    a: Tensor


class Saved(NamedTuple):
    """The tensors that the backward reads. Each residual stream is stored only as h and rstd."""

    x: Tensor
    rstd: Tensor
    attended: Attended
    h1: Tensor
    rstd1: Tensor
    z: Tensor


class HandArranged(Layer[ResidualStream, Saved]):
    """The layer with this project's kernels. ``weights`` and ``next_norm`` have the plain layer's layout. The
    constructor packs the weights for the kernels. ``unrotate``: the function ``unrotated``, compiled or
    not."""

    def __init__(
        self, shape: Shape, weights: Weights, next_norm: Tensor, runner: Runner, unrotate: Unrotate
    ) -> None:
        self.shape, self.next_norm, self.runner, self.unrotate = shape, next_norm, runner, unrotate
        self.weights = packed(shape, weights)
        self.table = table(shape, rotary(shape, next_norm.device))
        self._qk, self._v = self.weights.qkv.tensor_split([2 * shape.width])
        self._calls = calls(shape)

    def start(self, x: Tensor) -> ResidualStream:
        rstd = torch.rsqrt(x.float().square().mean(-1) + EPS)
        return ResidualStream(x, x * self.weights.attention_norm, rstd)

    def forward(self, stream: ResidualStream) -> ResidualStream:
        h1 = self._project(self._attend(stream, training=False).a, stream)
        return self._reduce(self._expand(h1)["act"], h1)

    def train(self, stream: ResidualStream) -> tuple[ResidualStream, Saved]:
        attended = self._attend(stream, training=True)
        h1 = self._project(attended.a, stream)
        ffn = self._expand(h1)
        saved = Saved(stream.h, stream.rstd, attended, h1.h, h1.rstd, ffn["preact"])
        return self._reduce(ffn["act"], h1), saved

    def _attend(self, x: ResidualStream, training: bool) -> Attended:
        shape = self.shape
        qk = self._kernel("qk", x=x.hg, w=self._qk, rstd=x.rstd, cos_sin=self.table)["q"]
        v = self._kernel("v", x=x.hg, w=self._v, rstd=x.rstd)["y"]
        q, k = qk.view(shape.sequences, shape.length, 2, shape.heads, -1).transpose(1, 3).unbind(2)
        q, k, values = (t.detach().requires_grad_(training) for t in (q, k, shape.apart(v)))
        with torch.set_grad_enabled(training):
            mixed = scaled_dot_product_attention(q, k, values, is_causal=True)
        return Attended((q, k, values), mixed, qk, v, shape.together(mixed.detach()))

    def _project(self, a: Tensor, x: ResidualStream) -> ResidualStream:
        return self._add("out", a, self.weights.out, x.h, self.weights.ffn_norm)

    def _expand(self, h1: ResidualStream) -> dict[str, Tensor]:
        return self._kernel("gate_up", x=h1.hg, w=self.weights.gate_up, rstd=h1.rstd)

    def _reduce(self, act: Tensor, h1: ResidualStream) -> ResidualStream:
        return self._add("down", act, self.weights.down, h1.h, self.next_norm)

    def backward(self, saved: Saved, dout: Tensor) -> Gradients:
        dh1, ffn = self._ffn_backward(saved, dout)
        return ffn | self._mixing_backward(saved, dh1)

    def _ffn_backward(self, saved: Saved, dout: Tensor) -> tuple[Tensor, Gradients]:
        """Return dh1, and the gradients of the MLP's weights and norm."""
        found = self._kernel("down_backward", dy=dout, w_down=self.weights.down, z=saved.z)
        down = dout.mT @ found.pop("act")
        dh1, norm, hn1 = self._norm_backward(
            "gate_up", found["dz"], saved.h1, saved.rstd1, found["s"] / self.shape.width, dout
        )
        return dh1, {"ffn_norm": norm, "gate_up": found["dz"].mT @ hn1, "down": down}

    def _mixing_backward(self, saved: Saved, dh1: Tensor) -> Gradients:
        out = dh1.mT @ saved.attended.a
        dqkv, s = self._attention_backward(saved.attended, dh1 @ self.weights.out)
        dx, norm, hn = self._norm_backward("qkv", dqkv, saved.x, saved.rstd, s, dh1)
        return {"x": dx, "attention_norm": norm, "qkv": dqkv.mT @ hn, "out": out}

    def _attention_backward(self, attended: Attended, da: Tensor) -> tuple[Tensor, Tensor]:
        dq, dk, dv = torch.autograd.grad(attended.mixed, attended.heads, self.shape.apart(da))
        return self.unrotate(dq, dk, dv, attended.qk, attended.v, self.table)

    def _norm_backward(
        self, of: str, dz: Tensor, h: Tensor, rstd: Tensor, s: Tensor, dres: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dx, dgamma and hn of the norm before a projection. ``of``: the projection's name."""
        w, gamma = {
            "gate_up": (self.weights.gate_up, self.weights.ffn_norm),
            "qkv": (self.weights.qkv, self.weights.attention_norm),
        }[of]
        found = self._kernel(f"{of}_backward", dz=dz, w=w, h=h, gamma=gamma, rstd=rstd, s=s, dres=dres)
        return found["dx"], found["dgamma"].type_as(gamma), found["hn"]

    def _add(self, place: str, y: Tensor, w: Tensor, x: Tensor, gamma: Tensor) -> ResidualStream:
        return ResidualStream(**self._kernel(place, y=y, w=w, x=x, gamma=gamma))

    def _kernel(self, place: str, **inputs: Tensor) -> dict[str, Tensor]:
        return self.runner.run(self._calls[place], inputs)

    def outputs(self, stream: ResidualStream) -> dict[str, Tensor]:
        normed = (stream.hg * stream.rstd[:, None]).type_as(stream.hg)
        return {"y": stream.h, "normed": normed}

    def arranged(self) -> tuple[Tensor, ...]:
        return self.weights.qkv, self.weights.gate_up, self.table

    def gradients(self, found: Mapping[str, Tensor]) -> Gradients:
        weights = unpacked(self.shape, Weights(*(found[name] for name in Weights._fields)))
        return {"x": found["x"], **weights._asdict()}


def unrotated(
    dq: Tensor, dk: Tensor, dv: Tensor, qk: Tensor, v: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient [tokens, 3*D] of q, k and v before the rotation, and the row sums of dz * z,
    divided by D.

    dq, dk and dv have attention's layout, [sequences, heads, length, head width]; qk is [tokens, 2*D], v
    [tokens, D]. The backward applies the rotation's transpose R'. For the row sums, dq and dk before R' are
    multiplied with q and k after the rotation R. These sums equal those of dz * z, because (R' dq) . q = dq .
    (R q). The equality also holds if cosines and sines are rounded.
    """
    dq, dk, dv = (t.transpose(1, 2).flatten(2).flatten(0, 1) for t in (dq, dk, dv))
    cosine, sine = (t[:, None] for t in cos_sin.float().unflatten(1, (-1, 2)).unbind(-1))
    pairs = cosine.shape[-1]

    def back(t: Tensor) -> Tensor:
        even, odd = t.float().unflatten(1, (-1, pairs, 2)).unbind(-1)
        turned = torch.stack((even * cosine + odd * sine, odd * cosine - even * sine), -1)
        return turned.flatten(1).type_as(t)

    q, k = qk.tensor_split(2, 1)
    sums = [(d.float() * z.float()).sum(-1) for d, z in ((dq, q), (dk, k), (dv, v))]
    return torch.cat((back(dq), back(dk), dv), 1), sum(sums[1:], sums[0]) / v.shape[1]


def table(shape: Shape, turn: Rotary) -> Tensor:
    """The table [tokens, head width] of interleaved cosine and sine columns, repeated for every sequence."""
    cosine, sine = (t[:, : shape.pairs] for t in turn)
    return torch.stack((cosine, sine), -1).flatten(1).repeat(shape.sequences, 1)
