"""Run our specs with liger-kernel. PyTorch computes the matmuls, and Liger's kernels run before and after
them. We call the functions that Liger's autograd classes call, so no autograd graph is stored.

Matmuls write into preallocated buffers; Liger allocates its own results. Norms use Liger's "gemma" casting,
which computes everything in fp32 and rounds once. Importing this module imports nothing heavy.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from coda_agent.comparison.competitors.apart import (
    SCALED,
    WEIGHT,
    columns_apart,
    columns_together,
    heads_apart,
    heads_together,
    rows_apart,
    scaled_rows,
    tables,
)
from coda_agent.comparison.competitors.entry import Given, Implementation, Prepared, followed, gated_mlp
from coda_agent.verifier.baselines.quack_epilogue import fp32, fused

if TYPE_CHECKING:
    from torch import Tensor


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """The dot products of the rows of ``a`` with the same rows of ``b``, fp32 [M]."""
    return (a.float() * b.float()).sum(-1)


def normalised(h: Tensor, rstd: Tensor, gamma: Tensor) -> Tensor:
    return (h * rstd[:, None] * gamma).type_as(h)


# ── Activations ───────────────────────────────────────────────────────────────────────────────────────────


def _swiglu(g: Given) -> Prepared:
    import torch
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_forward

    x, scale = scaled_rows(g)
    w = rows_apart(g.inputs["w"])
    preact = x.new_empty(x.shape[0], w.shape[0])

    def call() -> Any:
        scale()
        torch.mm(x, w.mT, out=preact)
        return swiglu_fused_gate_up_forward(preact)

    return Prepared(call, lambda found: {"preact": columns_together(found[0]), "act": found[1]}, (w,))


def _swiglu_mlp(g: Given) -> Prepared:
    return gated_mlp(g, _swiglu)


def _geglu(g: Given) -> Prepared:
    import torch
    from liger_kernel.ops.geglu import geglu_forward

    x, w = g.inputs["x"], g.inputs["w"]
    weights = [w[0::2].contiguous(), w[1::2].contiguous()]
    gate, up = (x.new_empty(x.shape[0], each.shape[0]) for each in weights)

    def call() -> Any:
        for each, out in zip(weights, (gate, up), strict=True):
            torch.mm(x, each.mT, out=out)
        return geglu_forward(gate, up)

    def read(found: Any) -> dict[str, Tensor]:
        return {"preact": columns_together(torch.cat(found[:2], 1)), "act": found[2]}

    return Prepared(call, read, tuple(weights))


def _relu2(g: Given) -> Prepared:
    import torch
    from liger_kernel.ops.relu_squared import relu_squared_forward

    x, w = g.inputs["x"], g.inputs["w"]
    preact = x.new_empty(x.shape[0], w.shape[0])

    def call() -> Any:
        torch.mm(x, w.mT, out=preact)
        return relu_squared_forward(preact)

    return Prepared(call, lambda act: {"preact": preact, "act": act})


def _swiglu_bwd(g: Given) -> Prepared:
    import torch
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_backward, swiglu_fused_gate_up_forward

    dy, w, z = g.inputs["dy"], g.inputs["w_down"], columns_apart(g.inputs["z"])
    d = dy.new_empty(dy.shape[0], w.shape[1])

    def call() -> Any:
        torch.mm(dy, w, out=d)
        dz = swiglu_fused_gate_up_backward(z, d)
        act = swiglu_fused_gate_up_forward(z)[1]
        return dz, act, fused(row_dots)(dz, z)

    def read(found: Any) -> dict[str, Tensor]:
        return {"dz": columns_together(found[0]), "act": found[1], "s": found[2]}

    return Prepared(call, read, (z,))


# ── Norms ─────────────────────────────────────────────────────────────────────────────────────────────────


def _added(g: Given, w: Tensor) -> Prepared:
    """A projection with its residual, then RMSNorm. A call returns (h, the normalised stream, rstd)."""
    import torch
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

    y, x, gamma, eps = g.inputs["y"], g.inputs["x"], g.inputs["gamma"], g.constants["eps"]
    projected = torch.empty_like(x)

    def call() -> Any:
        torch.mm(y, w.mT, out=projected)
        normed, h, rstd, *_ = fused_add_rms_norm_forward(projected, x, gamma, eps, 0.0, "gemma")
        return h, normed, rstd

    return Prepared(call, lambda found: {"h": found[0], "rstd": found[2]})


def _residual_partial_rmsnorm(g: Given) -> Prepared:
    return _added(g, g.inputs["w"])


def _residual_rmsnorm_gemm(g: Given) -> Prepared:
    first = _added(g, g.inputs["w_o"])
    return followed(first, g.inputs["w_up"], g.inputs["y"].shape[0], "z")


def _residual_partial_layernorm(g: Given) -> Prepared:
    import torch
    from liger_kernel.ops.layer_norm import layer_norm_forward

    y, w, x, gamma = (g.inputs[name] for name in ("y", "w", "x", "gamma"))
    h, beta = torch.empty_like(x), torch.zeros_like(gamma)

    def call() -> Any:
        torch.addmm(x, y, w.mT, out=h)
        return layer_norm_forward(h, gamma, beta, g.constants["eps"])

    return Prepared(call, lambda found: {"h": h, "mean": found[2], "rstd": found[3]}, (beta,))


def _residual_rmsnorm_bwd(g: Given) -> Prepared:
    import torch
    from liger_kernel.ops.fused_add_rms_norm import _str_to_casting_mode, fused_add_rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    dz, w, h, gamma, rstd, dres = (g.inputs[name] for name in ("dz", "w", "h", "gamma", "rstd", "dres"))
    d, mode = torch.empty_like(h), _str_to_casting_mode["gemma"]
    block, warps = calculate_settings(h.shape[1])
    backward = partial(
        fused_add_rms_norm_backward, offset=0.0, casting_mode=mode, BLOCK_SIZE=block, num_warps=warps
    )

    def call() -> Any:
        torch.mm(dz, w, out=d)
        dx, _, dgamma = backward(d, dres, h, gamma, rstd, num_stages=2, in_place=True)
        return dx, dgamma, fused(normalised)(h, rstd, gamma)

    return Prepared(call, lambda found: {"dgamma": found[1].float(), "hn": found[2]})


# ── Rotary embedding ──────────────────────────────────────────────────────────────────────────────────────


def _in_two(g: Given) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weight of the query heads and the weight of the key heads, with separate halves. Also return
    a buffer for the result of each weight's matmul. The kernel needs queries and keys as two contiguous
    tensors, and pads each tensor's number of heads to a power of two. The number of query heads is the
    largest power of two below H, so that queries need no padding."""
    pairs, heads = g.sizes["P"], g.sizes["H"]
    queries = 1 << (heads - 1).bit_length() - 1
    w, x = heads_apart(g.inputs["w"], pairs), g.inputs["x"]
    weights = list(w.split([2 * pairs * queries, 2 * pairs * (heads - queries)]))
    return weights, [x.new_empty(x.shape[0], each.shape[0]) for each in weights]


def _turnable(q: Tensor, width: int) -> Tensor:
    """View [M, heads * width] in the kernel's shape [1, heads, M, width]."""
    return q.view(1, q.shape[0], -1, width).transpose(1, 2)


def _rope(g: Given) -> Prepared:
    import torch
    from liger_kernel.ops.rope import rope_forward

    (x, scale), (cos, sin), pairs = scaled_rows(g), tables(g), g.sizes["P"]
    weights, outs = _in_two(g)
    q, k = (_turnable(out, 2 * pairs) for out in outs)

    def call() -> Any:
        scale()
        for w, out in zip(weights, outs, strict=True):
            torch.mm(x, w.mT, out=out)
        rope_forward(q, k, cos, sin, rotary_dim=2 * pairs)  # in place
        return outs

    arranged = (*weights, cos, sin)
    return Prepared(call, lambda found: {"q": heads_together(torch.cat(found, 1), pairs)}, arranged)


def _qk_norm_rope(g: Given) -> Prepared:
    import torch
    from liger_kernel.ops.rms_norm import rms_norm_forward
    from liger_kernel.ops.rope import rope_forward

    x, (cos, sin), pairs, eps = g.inputs["x"], tables(g), g.sizes["P"], g.constants["eps"]
    gamma = heads_apart(g.inputs["gamma"], pairs)
    weights, outs = _in_two(g)
    rows = x.shape[0]

    def call() -> Any:
        normed = []
        for w, out in zip(weights, outs, strict=True):
            torch.mm(x, w.mT, out=out)
            normed.append(rms_norm_forward(out.view(-1, 2 * pairs), gamma, eps, 0.0, "gemma", None))
        q, k = (_turnable(each[0].view(rows, -1), 2 * pairs) for each in normed)
        rope_forward(q, k, cos, sin, rotary_dim=2 * pairs)  # in place
        return normed

    def read(found: Any) -> dict[str, Tensor]:
        q = torch.cat([each[0].view(rows, -1) for each in found], 1)
        rstd = torch.cat([each[2].view(rows, -1) for each in found], 1)
        return {"q": heads_together(q, pairs), "rstd": rstd}

    return Prepared(call, read, (*weights, gamma, cos, sin))


# ── Cross-entropy ─────────────────────────────────────────────────────────────────────────────────────────


def _cross_entropy(g: Given) -> Prepared:
    """The cross-entropy of each row. A call returns (logits, loss). A row's fp32 loss is its log-sum-exp
    minus its target's logit."""
    import torch
    import triton
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

    (x, scale), w = scaled_rows(g), g.inputs["w"]
    rows, columns = x.shape[0], w.shape[0]
    target = g.inputs["target"].clamp(min=0)
    logits, loss = x.new_empty(rows, columns), fp32(x, rows)
    launch = partial(
        liger_cross_entropy_kernel[(rows,)],
        X_stride=columns,
        Y_stride=1,
        weight_ptr=None,
        z_loss_ptr=None,
        loss_stride=1,
        token_accuracy_ptr=None,
        token_accuracy_stride=0,
        predicted_tokens_ptr=None,
        predicted_tokens_stride=0,
        n_cols=columns,
        n_non_ignore=rows,
        sum_non_ignore_weight=rows,
        weight_sum=0.0,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="none",
        softcap=None,
        RETURN_Z_LOSS=False,
        RETURN_TOKEN_ACCURACY=False,
        RETURN_PREDICTED_TOKENS=False,
        BLOCK_SIZE=min(MAX_FUSED_SIZE, triton.next_power_of_2(columns)),
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=False,
        num_warps=32,  # the value that cross_entropy_forward uses on Hopper
    )

    def call() -> Any:
        scale()
        torch.mm(x, w.mT, out=logits)
        launch(X_ptr=logits, Y_ptr=target, loss_ptr=loss)
        return logits, loss

    return Prepared(call, lambda found: {"logits": found[0]}, (target,))


TURNED = (
    "before timing, each head's weight rows are split into halves, and tables are converted to fp32; the "
    "kernel needs separate queries and keys, so they are two matmuls; q has the split layout too"
)
LOSS = (
    "returns each row's loss in fp32 instead of lse and target_logit; no gradient; the kernel is launched "
    "directly, because cross_entropy_forward waits for the GPU; before timing, ignored targets are set to 0, "
    "because the kernel would clear their logits"
)

ENTRIES: dict[str, Implementation] = {
    "gemm_swiglu": Implementation(_swiglu, WEIGHT),
    "gemm_rmsnorm_swiglu": Implementation(_swiglu, f"{SCALED}; {WEIGHT}"),
    "gemm_rmsnorm_swiglu_fp16": Implementation(_swiglu, f"{SCALED}; {WEIGHT}"),
    "gemm_swiglu_mlp": Implementation(_swiglu_mlp, WEIGHT),
    "gemm_geglu": Implementation(
        _geglu, "the kernel needs separate gate and up, so they are two matmuls with contiguous weights"
    ),
    "gemm_relu2": Implementation(_relu2),
    "gemm_swiglu_bwd": Implementation(
        _swiglu_bwd,
        "before timing, z is split into halves; the forward kernel computes act again; a compiled pass sums "
        "the rows of the stored dz for s",
    ),
    "gemm_residual_partial_rmsnorm": Implementation(
        _residual_partial_rmsnorm,
        "returns the normalised stream instead of hg; computes rstd from the rounded h",
    ),
    "gemm_residual_rmsnorm_gemm": Implementation(_residual_rmsnorm_gemm, "computes rstd from the rounded h"),
    "gemm_residual_partial_layernorm": Implementation(
        _residual_partial_layernorm,
        "torch.addmm adds the residual, which it copies first; returns the normalised stream instead of hg; "
        "computes mean and rstd from the rounded h",
    ),
    "gemm_residual_rmsnorm_bwd": Implementation(
        _residual_rmsnorm_bwd,
        "dx uses each row's own dot product instead of s: equal work but another value, so it is not "
        "compared; dgamma is rounded to bf16; a compiled pass computes hn",
    ),
    "gemm_rope": Implementation(_rope, TURNED),
    "gemm_rope_positions": Implementation(_rope, TURNED),
    "gemm_rmsnorm_rope": Implementation(_rope, f"{SCALED}; {TURNED}"),
    "gemm_qk_norm_rope": Implementation(_qk_norm_rope, TURNED),
    "gemm_partial_cross_entropy": Implementation(_cross_entropy, LOSS),
    "gemm_rmsnorm_partial_cross_entropy": Implementation(_cross_entropy, f"{SCALED}; {LOSS}"),
}

ABSENT: dict[str, str] = {
    "gemm_rmsnorm": "no kernel takes a given row scale, so only PyTorch would be left",
}
