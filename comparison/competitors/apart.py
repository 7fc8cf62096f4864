"""Compute specs with PyTorch, compiled and eager, in the layout that is best for PyTorch. In this layout,
gate and up are separate contiguous blocks. The first and the second elements of rotated pairs are separate
blocks too. The specs interleave gate with up, and first with second elements.

PyTorch users have no reason to interleave, so PyTorch is compared in the layout with separate blocks.
Importing this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from coda_agent.comparison.competitors.entry import Given, Implementation, Prepared
from coda_agent.verifier.baselines.pytorch import under_compile
from coda_agent.verifier.baselines.quack_epilogue import fused

if TYPE_CHECKING:
    from torch import Tensor

Several = tuple["Tensor", ...]
Sizes = tuple[tuple[str, int], ...]


# ── Layouts and operands, which all libraries share ──────────────────────────────────────────────


def rows_apart(w: Tensor) -> Tensor:
    """Rearrange the interleaved rows of a weight [2F, D] into contiguous halves: rows 0::2, then rows
    1::2."""
    import torch

    return torch.cat((w[0::2], w[1::2]))


def columns_apart(z: Tensor) -> Tensor:
    """Rearrange the interleaved columns of [M, 2F] into contiguous halves: columns 0::2, then 1::2."""
    return z.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1).contiguous()


def columns_together(z: Tensor) -> Tensor:
    """The inverse of ``columns_apart``."""
    return z.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)


def heads_apart(w: Tensor, pairs: int) -> Tensor:
    """Reorder the first dim of a weight or vector, so that the adjacent pairs of each head (a0, b0, a1, b1,
    ...) become halves (a0, a1, ..., b0, b1, ...). The result is contiguous."""
    return w.unflatten(0, (-1, pairs, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def heads_together(q: Tensor, pairs: int) -> Tensor:
    """Reorder the columns of [M, 2*H*P], so that the halves of each head become adjacent pairs again."""
    return q.unflatten(1, (-1, 2, pairs)).transpose(2, 3).flatten(1)


def tables(g: Given) -> tuple[Tensor, Tensor]:
    """The cosines and the sines of a case's rows, each [M, P] in fp32 and contiguous. Both tables come from
    the input ``cos_sin`` if the spec has this input, or else from the positions."""
    if (table := g.inputs.get("cos_sin")) is not None:
        return table[:, 0::2].float().contiguous(), table[:, 1::2].float().contiguous()
    angle = g.inputs["positions"].double()[:, None] * g.inputs["inv_freq"].double()
    return angle.cos().float(), angle.sin().float()


def scale_into(x: Tensor, rstd: Tensor, out: Tensor) -> None:
    """Write x [M, K] with its rows scaled by rstd (fp32, [M]) into ``out``."""
    out.copy_(x * rstd[:, None])


SCALED = "PyTorch scales x's rows first, one compiled pass"  # the note on ``scaled_rows``


def scaled_rows(g: Given) -> tuple[Tensor, Callable[[], object]]:
    """Return the left operand of a case's matmul, and a function that must run before each matmul. If the
    case has rstd, the function scales x's rows into a buffer; otherwise it does nothing. The scaling is one
    compiled pass, because eager PyTorch is slow on mixed dtypes, or takes two passes."""
    import torch

    x, rstd = g.inputs["x"], g.inputs.get("rstd")
    if rstd is None:
        return x, lambda: None
    scaled = torch.empty_like(x)
    return scaled, partial(fused(scale_into), x, rstd, scaled)


# ── Formulations ──────────────────────────────────────────────────────────────────────────────────────────


def _gated(x: Tensor, w: Tensor, act: Callable[[Tensor], Tensor]) -> Several:
    preact = x @ w.mT
    gate, up = preact.chunk(2, -1)
    return preact, act(gate) * up


def _swiglu(x: Tensor, w: Tensor) -> Several:
    import torch

    return _gated(x, w, torch.nn.functional.silu)


def _rmsnorm_swiglu(x: Tensor, w: Tensor, rstd: Tensor) -> Several:
    return _swiglu((x * rstd[:, None]).type_as(x), w)


def _geglu(x: Tensor, w: Tensor) -> Several:
    import torch

    return _gated(x, w, partial(torch.nn.functional.gelu, approximate="tanh"))


def _swiglu_mlp(x: Tensor, w: Tensor, w_down: Tensor) -> Several:
    preact, act = _swiglu(x, w)
    return preact, act, act @ w_down.mT


def _swiglu_bwd(dy: Tensor, w_down: Tensor, z: Tensor) -> Several:
    import torch

    d = dy @ w_down
    gate, up = z.chunk(2, -1)
    sig = torch.sigmoid(gate)
    act = gate * sig * up
    dgate = d * up * (sig + gate * sig * (1 - sig))
    dz = torch.cat((dgate, d * gate * sig), -1)
    return dz, act, (dz * z).sum(-1, dtype=torch.float32)


def _rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    import torch

    first, second = t.unflatten(1, (-1, 2, cos.shape[1])).unbind(2)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), 2).flatten(1)


def _rmsnorm_rope(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, rstd: Tensor) -> Several:
    return (_rotated((x @ w.mT) * rstd[:, None], cos, sin).type_as(x),)


def _rope(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Several:
    return (_rotated(x @ w.mT, cos, sin).type_as(x),)


def _qk_norm_rope(x: Tensor, w: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Several:
    import torch

    heads = (x @ w.mT).unflatten(1, (-1, gamma.shape[0])).float()
    rstd = torch.rsqrt(heads.square().mean(-1) + eps)
    normed = heads * rstd[:, :, None] * gamma
    return _rotated(normed.flatten(1), cos, sin).type_as(x), rstd


# ── Inputs and outputs of the formulations ───────────────────────────────────────────────────


def _gated_inputs(g: Given) -> Several:
    w, more = g.inputs["w"], [g.inputs["rstd"]] if "rstd" in g.inputs else []
    return g.inputs["x"], rows_apart(w), *more


def _mlp_inputs(g: Given) -> Several:
    return g.inputs["x"], rows_apart(g.inputs["w_gate_up"]), g.inputs["w_down"]


def _bwd_inputs(g: Given) -> Several:
    return g.inputs["dy"], g.inputs["w_down"], columns_apart(g.inputs["z"])


def _rope_inputs(g: Given) -> Several:
    x, w, table = (g.inputs[name] for name in ("x", "w", "cos_sin"))
    more = [g.inputs["rstd"]] if "rstd" in g.inputs else []
    cos, sin = table[:, 0::2].contiguous(), table[:, 1::2].contiguous()
    return x, heads_apart(w, g.sizes["P"]), cos, sin, *more


def _positions_inputs(g: Given) -> Several:
    pairs = g.sizes["P"]
    gamma = [heads_apart(g.inputs["gamma"], pairs)] if "gamma" in g.inputs else []
    return g.inputs["x"], heads_apart(g.inputs["w"], pairs), *gamma, *tables(g)


def _read_gated(g: Given, found: Several) -> dict[str, Tensor]:
    preact, act, *out = found
    return {"preact": columns_together(preact), "act": act} | dict(zip(("out",), out, strict=False))


def _read_bwd(g: Given, found: Several) -> dict[str, Tensor]:
    dz, act, s = found
    return {"dz": columns_together(dz), "act": act, "s": s}


def _read_rope(g: Given, found: Several) -> dict[str, Tensor]:
    q, *rstd = found
    return {"q": heads_together(q, g.sizes["P"])} | dict(zip(("rstd",), rstd, strict=False))


@dataclass(frozen=True)
class Formulation:
    """A way to compute a spec with separate halves. ``arrange`` prepares the tensors before the timed calls.
    ``step`` computes results from these tensors and the spec's ``constants``. ``read`` converts the results
    into the spec's outputs by name."""

    step: Callable[..., Several]
    arrange: Callable[[Given], Several]
    read: Callable[[Given, Several], dict[str, Tensor]]
    note: str
    constants: tuple[str, ...] = ()


WEIGHT = "before timing, the weight's gate rows are moved before its up rows; preact has this layout too"
TURNED = "before timing, each head's weight rows and the table are split into halves; q has this layout too"
TABLES = "split into halves, and fp32 tables are made of the positions; q has this layout too"

FORMULATIONS = {
    "gemm_swiglu": Formulation(_swiglu, _gated_inputs, _read_gated, WEIGHT),
    "gemm_rmsnorm_swiglu": Formulation(_rmsnorm_swiglu, _gated_inputs, _read_gated, WEIGHT),
    "gemm_rmsnorm_swiglu_fp16": Formulation(_rmsnorm_swiglu, _gated_inputs, _read_gated, WEIGHT),
    "gemm_geglu": Formulation(_geglu, _gated_inputs, _read_gated, WEIGHT),
    "gemm_swiglu_mlp": Formulation(_swiglu_mlp, _mlp_inputs, _read_gated, WEIGHT),
    "gemm_swiglu_bwd": Formulation(
        _swiglu_bwd,
        _bwd_inputs,
        _read_bwd,
        "before timing, z's gate is moved before its up; dz has this layout too",
    ),
    "gemm_rope": Formulation(_rope, _rope_inputs, _read_rope, TURNED),
    "gemm_rmsnorm_rope": Formulation(_rmsnorm_rope, _rope_inputs, _read_rope, TURNED),
    "gemm_rope_positions": Formulation(
        _rope, _positions_inputs, _read_rope, f"before timing, each head's weight rows are {TABLES}"
    ),
    "gemm_qk_norm_rope": Formulation(
        _qk_norm_rope,
        _positions_inputs,
        _read_rope,
        f"before timing, each head's weight rows and gamma are {TABLES}",
        ("eps",),
    ),
}


def entry(mode: str, backend: str = "inductor") -> dict[str, Implementation]:
    """The formulations under torch.compile, by spec. The first call of a formulation compiles it, as one full
    graph with static shapes.

    ``mode`` is "default" or "max-autotune" (without CUDA graphs).
    """
    return _entries(partial(_compiled_step, mode, backend))


def eager() -> dict[str, Implementation]:
    """The formulations in eager PyTorch, by spec."""
    return _entries(lambda name, sizes: FORMULATIONS[name].step)


def _entries(made: Callable[[str, Sizes], Callable[..., Several]]) -> dict[str, Implementation]:
    """Make an entry for every formulation. ``made`` returns the function to call, given the formulation's
    name and a case's sizes."""
    return {name: Implementation(partial(_build, made, name), f.note) for name, f in FORMULATIONS.items()}


def _build(made: Callable[[str, Sizes], Callable[..., Several]], name: str, g: Given) -> Prepared:
    chosen = FORMULATIONS[name]
    step = made(name, tuple(sorted(g.sizes.items())))
    given = chosen.arrange(g)
    constants = {constant: g.constants[constant] for constant in chosen.constants}
    own = tuple(t for t in given if not any(t is each for each in g.inputs.values()))
    return Prepared(partial(step, *given, **constants), partial(chosen.read, g), own)


@cache
def _compiled_step(mode: str, backend: str, name: str, sizes: Sizes) -> Callable[..., Several]:
    """Compile a formulation's step once for all sets of inputs of a case."""
    compiled: Callable[..., Several] = under_compile(FORMULATIONS[name].step, mode, backend)
    return compiled
