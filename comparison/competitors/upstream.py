"""Run CODA's own package, coda-kernels, on our specs. We call the functions of coda.core in the same way as
the package's own layers and tests. The first call of a function tunes its kernel (see ``tuner``).

The package lacks kernels for some of the paper's operators (``ABSENT``). PyTorch computes row scales.
Importing this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from coda_agent.comparison.competitors.apart import SCALED, scaled_rows
from coda_agent.comparison.competitors.entry import Given, Implementation, Prepared, gated_mlp
from coda_agent.comparison.competitors.tuner import TIMED, prepare
from coda_agent.verifier.baselines.quack_epilogue import fp32, fused

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # a row with this target is ignored


# ── Activations ───────────────────────────────────────────────────────────────────────────────────────────


def _swiglu(g: Given) -> Prepared:
    from coda.core.gemm.functional import gemm_swiglu

    (x, scale), w = scaled_rows(g), g.inputs["w"]
    preact, act = x.new_empty(x.shape[0], w.shape[0]), x.new_empty(x.shape[0], w.shape[0] // 2)

    def call() -> Any:
        scale()
        return gemm_swiglu(x, w.mT, preact, act)

    return Prepared(call, lambda found: {"preact": found[0], "act": found[1]})


def _swiglu_mlp(g: Given) -> Prepared:
    from coda.core.gemm.functional import gemm

    return gated_mlp(g, _swiglu, gemm)


def act_and_dots(z: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
    """The SwiGLU of z's interleaved columns, [M, F], and the dot products of z's rows with the same rows of
    dz, fp32 [M]."""
    import torch

    act = torch.nn.functional.silu(z[:, 0::2].float()) * z[:, 1::2]
    return act.type_as(z), (z.float() * dz.float()).sum(-1)


def _swiglu_bwd(g: Given) -> Prepared:
    import torch
    from coda.core.elementwise.functional import dswiglu_backward
    from coda.core.gemm.functional import gemm

    dy, w, z = (g.inputs[name] for name in ("dy", "w_down", "z"))
    d, dz = dy.new_empty(dy.shape[0], w.shape[1]), torch.empty_like(z)

    def call() -> Any:
        gemm(dy, w, d)
        dswiglu_backward(z, d, dz)
        return dz, *fused(act_and_dots)(z, dz)

    return Prepared(call, lambda found: dict(zip(("dz", "act", "s"), found, strict=True)))


# ── Rotary embedding ──────────────────────────────────────────────────────────────────────────────────────
# The package rotates by the negative of an angle, so the calls below pass negated frequencies.


def _rope_positions(g: Given) -> Prepared:
    from coda.core.gemm.functional import gemm_rope

    x, w, positions = (g.inputs[name] for name in ("x", "w", "positions"))
    frequencies = -g.inputs["inv_freq"].repeat_interleave(2).repeat(g.sizes["H"])
    q = x.new_empty(x.shape[0], w.shape[0])
    call = partial(gemm_rope, x, w.mT, positions, frequencies, q)
    return Prepared(call, lambda found: {"q": found}, (frequencies,))


def _qk_norm_rope(g: Given) -> Prepared:
    import torch
    from coda.core.elementwise.functional import qknorm_rope_fwd
    from coda.core.gemm.functional import _sqsum_num_segments, gemm_qkv_sqsum

    x, w, gamma, positions = (g.inputs[name] for name in ("x", "w", "gamma", "positions"))
    heads, width, eps = g.sizes["H"], gamma.shape[0], g.constants["eps"]
    frequencies = -g.inputs["inv_freq"].repeat(heads)
    segments = _sqsum_num_segments(width)
    product = x.new_empty(x.shape[0], w.shape[0])
    q = torch.empty_like(product)

    def call() -> Any:
        _, squares = gemm_qkv_sqsum(x, w.mT, width, segments, product)
        return qknorm_rope_fwd(
            product, squares, gamma, positions, frequencies, width, heads, segments, eps, q
        )

    return Prepared(call, lambda found: {"q": found}, (frequencies,))


# ── Cross-entropy ─────────────────────────────────────────────────────────────────────────────────────────


def picked(logits: Tensor, target: Tensor) -> Tensor:
    """Each row's logit at its target, fp32 [M]; 0 for an ignored target."""
    import torch

    found = logits.gather(1, target.clamp(min=0)[:, None])[:, 0]
    return torch.where(target >= 0, found.float(), 0.0)


def _partial_cross_entropy(g: Given) -> Prepared:
    from coda.core.gemm.functional import gemm_lse

    (x, scale), w, target = scaled_rows(g), g.inputs["w"], g.inputs["target"]
    logits, lse = x.new_empty(x.shape[0], w.shape[0]), fp32(x, x.shape[0])

    def call() -> Any:
        scale()
        gemm_lse(x, w.mT, logits, lse)
        return logits, lse, fused(picked)(logits, target)

    return Prepared(call, lambda found: dict(zip(("logits", "lse", "target_logit"), found, strict=True)))


def _partial_cross_entropy_unstored(g: Given) -> Prepared:
    """Log-sum-exp and target logit of each row, without stored logits. The kernel writes no target logit for
    an ignored row, so each call first sets all target logits to zero."""
    from coda.core.gemm.functional import gemm_lse_select_logits

    x, w, target = g.inputs["x"], g.inputs["w"], g.inputs["target"].int()
    losses, logit = fp32(x, x.shape[0]), fp32(x, x.shape[0])

    def call() -> Any:
        logit.zero_()
        return gemm_lse_select_logits(
            x, w.mT, target, IGNORED, return_lse=True, losses=losses, target_logits=logit
        )

    return Prepared(call, lambda found: {"lse": found[1], "target_logit": found[2]}, (target,))


PICKED = "a compiled gather reads target_logit from the stored logits"

TUNED = (
    f"its own tuner chooses the schedule: it times each at most {TIMED} times, and the fastest few as usual, "
    "200 times"
)


def _entry(build: Callable[[Given], Prepared], note: str = "") -> Implementation:
    """An entry that prepares its process before the package is imported."""

    def built(g: Given) -> Prepared:
        prepare()
        return build(g)

    return Implementation(built, "; ".join(filter(None, (note, TUNED))))


ENTRIES: dict[str, Implementation] = {
    "gemm_swiglu": _entry(_swiglu),
    "gemm_rmsnorm_swiglu": _entry(_swiglu, SCALED),
    "gemm_rmsnorm_swiglu_fp16": _entry(_swiglu, SCALED),
    "gemm_swiglu_mlp": _entry(_swiglu_mlp),
    "gemm_swiglu_bwd": _entry(
        _swiglu_bwd,
        "a matmul and an elementwise kernel; a compiled pass over z and the stored dz computes act and s",
    ),
    "gemm_rope_positions": _entry(_rope_positions, "before timing, frequencies are made for every column"),
    "gemm_qk_norm_rope": _entry(
        _qk_norm_rope,
        "two kernels; before timing, frequencies are made for every pair of columns; returns partial sums of "
        "squares instead of rstd",
    ),
    "gemm_partial_cross_entropy": _entry(_partial_cross_entropy, PICKED),
    "gemm_rmsnorm_partial_cross_entropy": _entry(_partial_cross_entropy, f"{SCALED}; {PICKED}"),
    "gemm_partial_cross_entropy_unstored": _entry(
        _partial_cross_entropy_unstored,
        "also returns the losses; before timing, targets are converted to int32",
    ),
}

# For these specs, PyTorch computes a part in passes over whole matrices. The part is a row scale or, for the
# backward, all outputs except dz.
HELPED = frozenset(
    {
        "gemm_rmsnorm_swiglu",
        "gemm_rmsnorm_swiglu_fp16",
        "gemm_rmsnorm_partial_cross_entropy",
        "gemm_swiglu_bwd",
    }
)

# Version 0.2 has host functions for all ten operators of the paper (coda.kernels.gens.gpt). The version lacks
# the module with the operators' kernels, coda.kernels.gens.epilogue, so the host functions cannot be
# imported.
LEFT_OUT = "coda.kernels.gens has its host function, but the package lacks its kernel"

ABSENT: dict[str, str] = {
    "gemm_rope": f"{LEFT_OUT}; its other rotary kernel takes positions instead of a table",
    "gemm_rmsnorm": f"{LEFT_OUT}; without the row scale only a plain matmul would be left",
    "gemm_rmsnorm_rope": f"{LEFT_OUT}; its other rotary kernel takes positions instead of a table",
    "gemm_residual_partial_rmsnorm": LEFT_OUT,
    "gemm_residual_rmsnorm_bwd": LEFT_OUT,
}
