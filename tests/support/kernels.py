"""Signatures, kernel sources and inputs that several tests share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from machine import Tensors, kernel_names, run_lowered

from coda_agent import primitives
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.interpret import torch_dtype
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.primitives.lang.signature import INDICES, Signature, TensorType

__all__ = [
    "EXAMPLES", "IMPORTS", "Example", "Tensors", "draw", "kernel_names", "run_lowered", "signature", "source",
    "tensor", "trace",
]  # fmt: skip
IMPORTS = f"from primitives import {', '.join(primitives.__all__)}\n"


def tensor(shape: str, dtype: str = "bf16") -> TensorType:
    """Return a tensor type, such as ``tensor("M, 2*F")``; a scalar is ``tensor("", "fp32")``."""
    return TensorType(tuple(Dim.parse(d.strip()) for d in shape.split(",") if d), dtype)


def signature(
    inputs: dict[str, TensorType],
    outputs: dict[str, TensorType],
    static: tuple[str, ...] = (),
    updates: Mapping[str, str] | None = None,
    **constants: float,
) -> Signature:
    """Return a signature whose dims are all the dims in the shapes of its inputs and outputs."""
    dims = sorted({n for t in (*inputs.values(), *outputs.values()) for d in t.shape for n in d.names})
    return Signature("kernel", tuple(dims), inputs, outputs, constants, static, updates or {})


def source(signature: Signature, *lines: str) -> str:
    """Return a kernel file whose parameters match the signature. The first of ``lines`` is line 4 of the
    file."""
    parameters = ", ".join([*signature.inputs, *signature.constants, *signature.static])
    return f"{IMPORTS}@kernel\ndef k({parameters}):\n" + "".join(f"    {line}\n" for line in lines)


def trace(signature: Signature, *lines: str) -> Program:
    return trace_source(source(signature, *lines), signature)


@dataclass(frozen=True)
class Example:
    signature: Signature
    lines: tuple[str, ...]
    sizes: dict[str, int]

    @property
    def program(self) -> Program:
        return trace(self.signature, *self.lines)


NORM = Example(
    signature(
        {"y": tensor("M, K"), "w": tensor("N, K"), "x": tensor("M, N"), "gamma": tensor("N")},
        {"h": tensor("M, N"), "hg": tensor("M, N"), "rstd": tensor("M", "fp32")},
        eps=1e-6,
    ),
    (
        "h = gemm(y, w.mT) + x",
        "rstd = rsqrt(row_sums(h * h) / h.columns + eps)",
        "return {'h': h, 'hg': h * per_column(gamma), 'rstd': rstd}",
    ),
    {"M": 24, "K": 32, "N": 48},
)
SWIGLU = Example(
    signature(
        {"x": tensor("M, D"), "w": tensor("2*F, D"), "rstd": tensor("M", "fp32")},
        {"preact": tensor("M, 2*F"), "act": tensor("M, F")},
    ),
    (
        "z = gemm(x, w.mT) * per_row(rstd)",
        "g, u = pairs(z)",
        "return {'preact': z, 'act': silu(g) * u}",
    ),
    {"M": 24, "D": 32, "F": 16},
)
BACKWARD = Example(
    signature(
        {"dy": tensor("M, D"), "w_down": tensor("D, F"), "z": tensor("M, 2*F")},
        {"dz": tensor("M, 2*F"), "act": tensor("M, F"), "s": tensor("M", "fp32")},
    ),
    (
        "d = gemm(dy, w_down)",
        "g, u = pairs(z)",
        "s = sigmoid(g)",
        "sg = g * s",
        "dg = d * u * (s + sg * (1.0 - s))",
        "du = d * sg",
        "return {'dz': join(dg, du), 'act': sg * u, 's': row_sums(dg * g + du * u)}",
    ),
    {"M": 24, "D": 32, "F": 16},
)
# An output projection, a residual add and a second projection. The norm's row scale is applied after the
# second projection.
CHAIN = Example(
    signature(
        {"y": tensor("M, K"), "wo": tensor("K, N"), "x": tensor("M, N"), "gamma": tensor("N"),
         "w_up": tensor("P, N")},
        {"h": tensor("M, N"), "up": tensor("M, P")},
        eps=1e-6,
    ),
    (
        "h = gemm(y, wo) + x",
        "rstd = rsqrt(row_sums(h * h) / h.columns + eps)",
        "up = gemm(h * per_column(gamma), w_up.mT) * per_row(rstd)",
        "return {'h': h, 'up': up}",
    ),
    {"M": 24, "K": 32, "N": 48, "P": 40},
)  # fmt: skip
# Each head is normed by its own statistic, then rotated. The angle of the rotation is computed from row and
# column.
QK_NORM = Example(
    signature(
        {"x": tensor("M, K"), "w": tensor("2*H*P, K"), "gamma": tensor("2*P"),
         "positions": tensor("M", "int32"), "inv_freq": tensor("P", "fp32")},
        {"q": tensor("M, 2*H*P"), "rstd": tensor("M, H", "fp32")},
        ("P",),
        eps=1e-6,
    ),
    (
        "t = gemm(x, w.mT)",
        "rstd = rsqrt(head_sums(t * t, 2 * P) / (2 * P) + eps)",
        "n = t * per_head(rstd) * per_head(gamma)",
        "return {'q': rope(n, positions, inv_freq), 'rstd': rstd}",
    ),
    {"M": 24, "K": 32, "H": 3, "P": 8},
)  # fmt: skip
# The angles are computed from row and column, so a tile need not contain a whole head.
TURNED = Example(
    signature(
        {"x": tensor("M, K"), "w": tensor("2*H*P, K"), "positions": tensor("M", "int32"),
         "inv_freq": tensor("P", "fp32")},
        {"q": tensor("M, 2*H*P")},
        ("P",),
    ),
    ("return {'q': rope(gemm(x, w.mT), positions, inv_freq)}",),
    {"M": 24, "K": 32, "H": 3, "P": 8},
)  # fmt: skip
ROPE = Example(
    signature(
        {"x": tensor("M, K"), "w": tensor("2*H*P, K"), "cos_sin": tensor("M, 2*P")},
        {"q": tensor("M, 2*H*P")},
        ("P",),
    ),
    (
        "even, odd = pairs(gemm(x, w.mT))",
        "cosine, sine = pairs(per_head(cos_sin))",
        "return {'q': join(even * cosine - odd * sine, even * sine + odd * cosine)}",
    ),
    {"M": 24, "K": 32, "H": 3, "P": 8},
)
CROSS_ENTROPY = Example(
    signature(
        {"x": tensor("M, D"), "w": tensor("V, D"), "target": tensor("M", "int64")},
        {"logits": tensor("M, V"), "lse": tensor("M", "fp32"), "picked": tensor("M", "fp32")},
    ),
    (
        "z = gemm(x, w.mT)",
        "return {'logits': z, 'lse': row_logsumexp(z), 'picked': row_select(z, target)}",
    ),
    {"M": 24, "D": 32, "V": 40},
)
CROSS_ENTROPY_BACKWARD = Example(
    signature(
        {"x": tensor("M, D"), "w": tensor("V, D"), "target": tensor("M", "int64"),
         "lse": tensor("M", "fp32"), "dloss": tensor("M", "fp32")},
        {"dlogits": tensor("M, V")},
    ),
    (
        "z = gemm(x, w.mT)",
        "onehot = column_index(z) == per_row(target)",
        "return {'dlogits': (exp(z - per_row(lse)) - onehot) * per_row(dloss)}",
    ),
    {"M": 24, "D": 32, "V": 40},
)  # fmt: skip
NORM_BACKWARD = Example(
    signature(
        {"dz": tensor("M, K"), "w": tensor("K, N"), "h": tensor("M, N"), "gamma": tensor("N"),
         "rstd": tensor("M", "fp32"), "s": tensor("M", "fp32"), "dres": tensor("M, N")},
        {"dx": tensor("M, N"), "dgamma": tensor("N", "fp32"), "hn": tensor("M, N")},
    ),
    (
        "d = gemm(dz, w)",
        "hhat = h * per_row(rstd)",
        "dx = dres + per_row(rstd) * (d * per_column(gamma) - hhat * per_row(s))",
        "return {'dx': dx, 'dgamma': column_sums(d * hhat), 'hn': hhat * per_column(gamma)}",
    ),
    {"M": 24, "K": 32, "N": 48},
)  # fmt: skip
GELU_BACKWARD = Example(
    signature(
        {"dy": tensor("M, D"), "w": tensor("D, F"), "z": tensor("M, F")},
        {"dz": tensor("M, F"), "act": tensor("M, F"), "dbias": tensor("F", "fp32")},
    ),
    (
        "d = gemm(dy, w)",
        "t = tanh(0.7978845608 * (z + 0.044715 * z * z * z))",
        "slope = 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * 0.7978845608 * (1 + 3 * 0.044715 * z * z)",
        "return {'dz': d * slope, 'act': gelu(z), 'dbias': column_sums(d * slope)}",
    ),
    {"M": 24, "D": 32, "F": 16},
)
ACCUMULATE = Example(
    signature(
        {"dy": tensor("M, N"), "x": tensor("M, K"), "dw": tensor("N, K", "fp32")},
        {"dw_new": tensor("N, K", "fp32")},
        updates={"dw_new": "dw"},
    ),
    ("return {'dw_new': dw + gemm(dy.mT, x)}",),
    {"M": 32, "K": 24, "N": 40},
)
IN_PLACE = Example(
    signature(
        {"x": tensor("M, K"), "w": tensor("N, K"), "d": tensor("M, N")},
        {"o": tensor("M, N")},
        updates={"o": "d"},
    ),
    ("return {'o': d * 0.5 + gemm(x, w.mT)}",),
    {"M": 24, "K": 32, "N": 40},
)
ALPHA = Example(
    signature(
        {"y": tensor("M, K"), "w": tensor("N, K"), "x": tensor("M, N"), "alpha": tensor("", "fp32")},
        {"h": tensor("M, N"), "amax": tensor("M", "fp32")},
    ),
    ("h = x + alpha * gemm(y, w.mT)", "return {'h': h, 'amax': row_abs_max(h) * alpha}"),
    {"M": 24, "K": 32, "N": 40},
)
FP8 = Example(
    signature(
        {"x": tensor("M, K", "fp8_e4m3"), "w": tensor("N, K", "fp8_e4m3"), "sx": tensor("M", "fp32"),
         "sw": tensor("N", "fp32")},
        {"y": tensor("M, N")},
    ),
    ("return {'y': gemm(x, w.mT) * per_row(sx) * per_column(sw)}",),
    {"M": 24, "K": 32, "N": 48},
)  # fmt: skip
# Tiles, vectors and reductions that are half or twice as wide as the GEMM. No loaded or stored tile has the
# GEMM's own width, so the lowered text uses no bulk copy.
WIDTHS = Example(
    signature(
        {"x": tensor("M, K"), "w": tensor("2*F, K"), "half": tensor("M, F"), "wide": tensor("M, 4*F", "fp32"),
         "b": tensor("F"), "b2": tensor("4*F", "fp32")},
        {"h": tensor("M, F", "fp32"), "d": tensor("M, 4*F", "fp32"), "sums": tensor("4*F", "fp32"),
         "largest": tensor("F", "fp32"), "high": tensor("M", "fp32"), "lse": tensor("M", "fp32"),
         "half_lse": tensor("M", "fp32")},
    ),
    (
        "t = gemm(x, w.mT)",
        "even, odd = pairs(t)",
        "h = even * odd + half + per_column(b)",
        "d = join(t, t * t) + wide * per_column(b2)",
        "return {'h': h, 'd': d, 'sums': column_sums(d), 'largest': column_abs_max(h), 'high': row_max(h),"
        " 'lse': row_logsumexp(d), 'half_lse': row_logsumexp(h)}",
    ),
    {"M": 24, "K": 32, "F": 16},
)  # fmt: skip
EXAMPLES = {
    "norm": NORM, "swiglu": SWIGLU, "backward": BACKWARD, "chain": CHAIN, "qk norm": QK_NORM, "rope": ROPE,
    "cross entropy": CROSS_ENTROPY, "cross entropy backward": CROSS_ENTROPY_BACKWARD,
    "norm backward": NORM_BACKWARD, "gelu backward": GELU_BACKWARD, "accumulate": ACCUMULATE, "alpha": ALPHA,
    "fp8": FP8, "widths": WIDTHS,
}  # fmt: skip


def draw(signature: Signature, sizes: dict[str, int], seed: int = 0) -> Tensors:
    """Draw normal inputs, scaled by 0.4 so that the results of a GEMM at these sizes stay near one. Indices
    lie between -3 and the largest size plus 2, so some indices are out of range."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, declared in signature.inputs.items():
        shape = [d(sizes) for d in declared.shape]
        if declared.dtype in INDICES:
            drawn[name] = torch.randint(-3, max(sizes.values()) + 3, shape, generator=generator)
        else:
            drawn[name] = torch.randn(shape, generator=generator) * 0.4
        drawn[name] = drawn[name].to(torch_dtype(declared.dtype))
    return drawn
