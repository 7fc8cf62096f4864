"""Run our specs with flashinfer-python. PyTorch computes the matmuls; FlashInfer computes the norms,
activations and rotary embedding. All results go to preallocated buffers.

FlashInfer is a library for inference, so it returns no rstd. Importing this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from coda_agent.comparison.competitors.apart import (
    SCALED,
    WEIGHT,
    columns_together,
    rows_apart,
    scaled_rows,
    tables,
)
from coda_agent.comparison.competitors.entry import Given, Implementation, Prepared, followed, gated_mlp
from coda_agent.comparison.competitors.toolkit import BUILD, last_words, prepare

if TYPE_CHECKING:
    from torch import Tensor


# ── Activations ───────────────────────────────────────────────────────────────────────────────────────────


def _gated(g: Given, name: str) -> Prepared:
    import torch
    from flashinfer import activation

    (x, scale), act_and_mul = scaled_rows(g), getattr(activation, name)
    w = rows_apart(g.inputs["w"])
    preact, act = x.new_empty(x.shape[0], w.shape[0]), x.new_empty(x.shape[0], w.shape[0] // 2)

    def call() -> Any:
        scale()
        torch.mm(x, w.mT, out=preact)
        return preact, act_and_mul(preact, out=act)

    return Prepared(call, lambda found: {"preact": columns_together(found[0]), "act": found[1]}, (w,))


_swiglu, _geglu = (partial(_gated, name=name) for name in ("silu_and_mul", "gelu_tanh_and_mul"))


def _swiglu_mlp(g: Given) -> Prepared:
    return gated_mlp(g, _swiglu)


# ── Norms ─────────────────────────────────────────────────────────────────────────────────────────────────


def _added(g: Given, w: Tensor) -> Prepared:
    """A projection with its residual, then RMSNorm. A call returns (h, the normalised stream). The kernel
    adds to the residual in place. So this arm has its own copy of the residual, whose values grow with every
    call."""
    import torch
    from flashinfer.norm import fused_add_rmsnorm

    y, x, gamma, eps = g.inputs["y"], g.inputs["x"], g.inputs["gamma"], g.constants["eps"]
    h, normed = x.clone(), torch.empty_like(x)

    def call() -> Any:
        torch.mm(y, w.mT, out=normed)
        fused_add_rmsnorm(normed, h, gamma, eps)
        return h, normed

    return Prepared(call, lambda found: {"h": found[0]})


def _afresh(g: Given, prepared: Prepared) -> Prepared:
    """Return an arm like ``prepared``, which adds to its own copy of the residual in every call. The new
    arm's ``read`` restores the copy and calls the arm once more before it reads the results."""

    def read(found: Any) -> dict[str, Tensor]:
        found[0].copy_(g.inputs["x"])
        return prepared.read(prepared.call())

    return prepared._replace(read=read)


def _residual_partial_rmsnorm(g: Given) -> Prepared:
    return _afresh(g, _added(g, g.inputs["w"]))


def _residual_rmsnorm_gemm(g: Given) -> Prepared:
    first = _added(g, g.inputs["w_o"])
    return _afresh(g, followed(first, g.inputs["w_up"], g.inputs["y"].shape[0], "z"))


# ── Rotary embedding ──────────────────────────────────────────────────────────────────────────────────────


def _turned(g: Given, *, normed: bool = False) -> Prepared:
    """Compute all heads with one matmul, normalise the heads if ``normed``, and rotate the heads in place.
    The rotation's kernel expects queries and keys. So this arm passes the first half of the heads as queries
    and the second half as keys. Both halves are views of one buffer."""
    import torch
    from flashinfer.norm import rmsnorm
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    (x, scale), w, width = scaled_rows(g), g.inputs["w"], 2 * g.sizes["P"]
    cache = torch.cat(tables(g), 1)
    rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    out = x.new_empty(x.shape[0], w.shape[0])
    q = torch.empty_like(out) if normed else out
    queries, keys = q.tensor_split([g.sizes["H"] // 2 * width], 1)
    heads, normed_heads = (t.view(t.shape[0], -1, width) for t in (out, q))

    def call() -> Any:
        scale()
        torch.mm(x, w.mT, out=out)
        if normed:
            rmsnorm(heads, g.inputs["gamma"], g.constants["eps"], out=normed_heads)
        apply_rope_with_cos_sin_cache_inplace(rows, queries, keys, width, cache, is_neox=False)
        return q

    return Prepared(call, lambda found: {"q": found}, (cache, rows))


TURNED = "before timing, the table is converted to fp32, cosines first; adjacent pairs are rotated in place"
ADDED = "adds to a copy of the residual stream in place, so its values grow from call to call; "


def _entry(build: Callable[[Given], Prepared], note: str = "") -> Implementation:
    """An entry that calls its operator once when it is built, because FlashInfer compiles an operator in its
    first call."""

    def built(g: Given) -> Prepared:
        prepare()
        try:
            prepared = build(g)
            prepared.call()
        except RuntimeError as error:
            if BUILD not in str(error):
                raise
            raise RuntimeError(f"its build failed: {last_words(str(error))}") from None
        return prepared

    return Implementation(built, note)


ENTRIES: dict[str, Implementation] = {
    "gemm_swiglu": _entry(_swiglu, WEIGHT),
    "gemm_rmsnorm_swiglu": _entry(_swiglu, f"{SCALED}; {WEIGHT}"),
    "gemm_rmsnorm_swiglu_fp16": _entry(_swiglu, f"{SCALED}; {WEIGHT}"),
    "gemm_swiglu_mlp": _entry(_swiglu_mlp, WEIGHT),
    "gemm_geglu": _entry(_geglu, WEIGHT),
    "gemm_residual_partial_rmsnorm": _entry(
        _residual_partial_rmsnorm, ADDED + "returns the normalised stream instead of hg, and no rstd"
    ),
    "gemm_residual_rmsnorm_gemm": _entry(_residual_rmsnorm_gemm, ADDED + "returns no rstd"),
    "gemm_rope": _entry(_turned, TURNED),
    "gemm_rope_positions": _entry(_turned, TURNED),
    "gemm_rmsnorm_rope": _entry(_turned, f"{SCALED}; {TURNED}"),
    "gemm_qk_norm_rope": _entry(partial(_turned, normed=True), TURNED + "; returns no rstd"),
}

ABSENT: dict[str, str] = {
    "gemm_rmsnorm": "no kernel takes a given row scale, so only PyTorch would be left",
    "gemm_partial_cross_entropy": "its language-model head with loss runs only on Blackwell",
    "gemm_rmsnorm_partial_cross_entropy": "its language-model head with loss runs only on Blackwell",
    "gemm_residual_rmsnorm_bwd": "its RMSNorm backward runs only on Blackwell",
    "gemm_swiglu_bwd": "it has no activation backward",
}
