"""Kernels of shipped specs, and two further kernels. Tests compare the lowered texts of these kernels, and
counts of bytes or operations, with values worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping

from checkout import ROOT

from coda_agent import primitives
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.lang.signature import Signature, TensorType
from coda_agent.verifier.loading import load

SPECS = ROOT / "specs"
BODIES = {
    "gemm_residual_partial_rmsnorm": """
    h = gemm(y, w.mT) + x
    return {"h": h, "hg": h * per_column(gamma), "rstd": rsqrt(row_sums(h * h) / h.columns + eps)}
""",
    "gemm_rmsnorm_swiglu": """
    z = gemm(x, w.mT) * per_row(rstd)
    gate, up = pairs(z)
    return {"preact": z, "act": silu(gate) * up}
""",
    "gemm_swiglu_bwd": """
    d = gemm(dy, w_down)
    gate, up = pairs(z)
    s = sigmoid(gate)
    dgate, dup = d * up * (s + gate * s * (1 - s)), d * gate * s
    return {"dz": join(dgate, dup), "act": gate * s * up, "s": row_sums(dgate * gate + dup * up)}
""",
    "gemm_rope": """
    even, odd = pairs(gemm(x, w.mT))
    cos, sin = pairs(per_head(cos_sin))
    return {"q": join(even * cos - odd * sin, even * sin + odd * cos)}
""",
    "gemm_qk_norm_rope": """
    t = gemm(x, w.mT)
    rstd = rsqrt(head_sums(t * t, 2 * P) / (2 * P) + eps)
    return {"rstd": rstd, "q": rope(t * per_head(rstd) * per_head(gamma), positions, inv_freq)}
""",
    "gemm_partial_cross_entropy": """
    z = gemm(x, w.mT)
    return {"logits": z, "lse": row_logsumexp(z), "target_logit": row_select(z, target)}
""",
    "gemm_cross_entropy_bwd": """
    z = gemm(x, w.mT)
    onehot = where(column_index(z) == per_row(target), 1, 0)
    return {"dlogits": (exp(z - per_row(lse)) - onehot) * per_row(dloss)}
""",
    "gemm_residual_rmsnorm_bwd": """
    d, hhat = gemm(dz, w), h * per_row(rstd)
    dx = dres + per_row(rstd) * (d * per_column(gamma) - hhat * per_row(s))
    return {"dx": dx, "dgamma": column_sums(d * hhat), "hn": hhat * per_column(gamma)}
""",
    "gemm_grad_accumulate": """
    return {"dw_new": dw + gemm(dy.mT, x)}
""",
    "gemm_alpha_residual": """
    return {"h": x + alpha * gemm(y, w.mT)}
""",
    "gemm_fp8_row_scale": """
    return {"y": gemm(x, w.mT) * per_row(sx) * per_column(sw)}
""",
}
# A projection, a residual add and an RMSNorm whose row scale is applied after the next GEMM.
TWO_STEPS = """
    h = gemm(y, w) + x
    return {"up": gemm(h * per_column(gamma), u) * per_row(rsqrt(row_sums(h * h) / h.columns + 1e-6))}
"""
# Tiles half and twice as wide as their GEMM, reduced along rows and columns; a scalar from memory scales one
# reduction.
WIDTHS = """
    t = gemm(x, w.mT)
    even, odd = pairs(t)
    h = even * odd + half + per_column(b)
    d = join(t, t * t) + wide * per_column(c)
    return {
        "h": h, "d": d, "sums": column_sums(d), "largest": column_abs_max(h), "top": row_max(h) * alpha,
        "lse": row_logsumexp(d), "peak": row_abs_max(h),
    }
"""


def source(signature: Signature, body: str) -> str:
    """Return a kernel file with this body. The file imports the whole vocabulary."""
    parameters = ", ".join([*signature.inputs, *signature.constants, *signature.static])
    names = ", ".join(primitives.__all__)
    return f"from primitives import {names}\n@kernel\ndef k({parameters}):\n{body.lstrip(chr(10))}"


def kernel(signature: Signature, body: str) -> Program:
    """Return the traced program of the kernel file with this body."""
    return trace_source(source(signature, body), signature)


def source_of(name: str) -> str:
    """Return the kernel file of a shipped spec."""
    return source(load(SPECS / f"{name}.yaml", check=False).signature(), BODIES[name])


def of_spec(name: str, body: str = "") -> Program:
    return kernel(load(SPECS / f"{name}.yaml", check=False).signature(), body or BODIES[name])


def tensor(dtype: str, *shape: str) -> TensorType:
    return TensorType(tuple(map(Dim.parse, shape)), dtype)


def two_steps(schedule: Mapping[int, Schedule] | None = None) -> Program:
    inputs = {
        "y": tensor("bf16", "M", "K"), "w": tensor("bf16", "K", "N"), "x": tensor("bf16", "M", "N"),
        "gamma": tensor("bf16", "N"), "u": tensor("bf16", "N", "P"),
    }  # fmt: skip
    signature = Signature("two", ("M", "K", "N", "P"), inputs, {"up": tensor("bf16", "M", "P")})
    return kernel(signature, TWO_STEPS)._replace(schedule=schedule or {})


def widths() -> Program:
    inputs = {
        "x": tensor("bf16", "M", "K"), "w": tensor("bf16", "2*F", "K"), "half": tensor("bf16", "M", "F"),
        "wide": tensor("fp32", "M", "4*F"), "b": tensor("bf16", "F"), "c": tensor("fp32", "4*F"),
        "alpha": tensor("fp32"),
    }  # fmt: skip
    outputs = {
        "h": tensor("fp32", "M", "F"), "d": tensor("bf16", "M", "4*F"), "sums": tensor("fp32", "4*F"),
        "largest": tensor("fp32", "F"), "top": tensor("fp32", "M"), "lse": tensor("fp32", "M"),
        "peak": tensor("fp32", "M"),
    }  # fmt: skip
    return kernel(Signature("widths", ("M", "K", "F"), inputs, outputs), WIDTHS)
