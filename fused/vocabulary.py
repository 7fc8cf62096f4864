"""Forward programs of chains that begin and end with a product, written in the vocabulary.

Each is one program, whose backward ``primitives.derive`` finds. They stand here until accepted kernels of the
same mathematics take their place. A chain's norm begins outside, in PyTorch: ``x`` comes in times the norm's
weight, and ``rstd`` scales the product's rows. Gate and up are adjacent columns, as the sides of a rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coda_agent.primitives import (
    gelu,
    gemm,
    join,
    maximum,
    pairs,
    per_column,
    per_head,
    per_row,
    row_sums,
    rsqrt,
    silu,
)
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.ir import Node, Program, Signature, TensorType
from coda_agent.primitives.lang.trace import Tensor, Trace, tracing

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "silu": silu,
    "gelu": gelu,  # in its tanh form
    "relu2": lambda t: maximum(t, 0.0) ** 2,
}
FP32 = ("rstd", "eps")


def rstd_of(x: Any, eps: Any) -> Any:
    """The reciprocal RMS of each row."""
    return rsqrt(row_sums(x * x) / x.columns + eps)


def feed_forward(hg: Any, rstd: Any, w_in: Any, w_out: Any, act: str, gated: bool) -> dict[str, Any]:
    """Two products with an activation between. ``rstd``: None where no norm stands before."""
    z = gemm(hg, w_in.mT) if rstd is None else gemm(hg, w_in.mT) * per_row(rstd)
    if gated:
        gate, up = pairs(z)
        made = ACTIVATIONS[act](gate) * up
    else:
        made = ACTIVATIONS[act](z)
    return {"z": z, "act": made, "out": gemm(made, w_out.mT)}


def block(
    a: Any, x: Any, gamma: Any, w_o: Any, w_in: Any, w_out: Any, eps: Any, act: str, gated: bool
) -> dict[str, Any]:
    """What follows attention in a layer: output projection, residual, norm, feed-forward, residual."""
    h = gemm(a, w_o.mT) + x
    rstd = rstd_of(h, eps)
    made = feed_forward(h * per_column(gamma), rstd, w_in, w_out, act, gated)
    return {"h": h, "rstd": rstd, **made, "out": made["out"] + h}


def projected(hg: Any, rstd: Any, w: Any, bias: Any) -> Any:
    z = gemm(hg, w.mT) * per_row(rstd)
    return z if bias is None else z + per_column(bias)


def rotated(t: Any, cos_sin: Any) -> Any:
    """Each head's pairs of columns, turned by a table's angles."""
    even, odd = pairs(t)
    cosine, sine = pairs(per_head(cos_sin))
    return join(even * cosine - odd * sine, even * sine + odd * cosine)


def traced(
    name: str,
    function: Callable[..., Mapping[str, Any]],
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    static: tuple[str, ...] = (),
) -> Program:
    """The program of a function over tensors of these shapes, such as ``{"x": "M,D"}``."""
    tensors = {n: _tensor(n, shape) for n, shape in inputs.items()}
    dims = tuple(dict.fromkeys(d for t in tensors.values() for dim in t.shape for d in sorted(dim.names)))
    made = {n: _tensor(n, shape) for n, shape in outputs.items()}
    trace = Trace(Signature(name, dims, tensors, made, static=static))
    with tracing(trace):
        found = function(**{n: Tensor(trace.add(Node("input", (), n))) for n in tensors})
        nodes = {n: found[n]._index for n in outputs}
    return _reached(trace, nodes)


def _tensor(name: str, shape: str) -> TensorType:
    dims = tuple(Dim.parse(each) for each in shape.split(",") if each)
    return TensorType(dims, "fp32" if name in FP32 else "bf16")


def _reached(trace: Trace, outputs: Mapping[str, int]) -> Program:
    """The nodes that outputs need, in order."""
    needed, pending = set[int](), list(outputs.values())
    while pending:
        index = pending.pop()
        if index not in needed:
            needed.add(index)
            pending += trace.nodes[index].args
    place = {index: k for k, index in enumerate(sorted(needed))}
    nodes = (trace.nodes[i] for i in place)
    moved = tuple(Node(n.op, tuple(place[a] for a in n.args), n.attribute) for n in nodes)
    return Program(trace.signature, moved, {n: place[i] for n, i in outputs.items()}).check()
