"""Define parts of a Transformer (chains) as graphs, from which backwards are derived.

A chain begins and ends with a matmul, so that the epilogues of matmuls can compute the chain's gradients. The
forward of a chain with a norm takes several kernels. Weights have the layout of ``torch.nn.Linear``. In the
weight of a gated MLP, rows of the gate alternate with rows of the up projection. In the weight of queries and
keys, the two rows of each rotated pair are adjacent. A chain returns its results, and also the values that
the forward stores for the backward. A number such as ``eps`` is a scalar input, which the caller passes to
each launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from coda_agent.primitives import (
    column_index,
    gelu,
    gemm,
    join,
    maximum,
    pairs,
    per_column,
    per_head,
    per_row,
    row_logsumexp,
    row_select,
    row_sums,
    rsqrt,
    silu,
    where,
)
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.ir import Node, Program
from coda_agent.primitives.lang.signature import Signature, TensorType
from coda_agent.primitives.lang.trace import Tensor, Trace, tracing

Shapes = dict[str, str]  # for each name, the dims, and the dtype if not bf16: "M, 2*F" or "M: fp32"
Body = Callable[..., dict[str, Any]]
SCALAR = ": fp32"


class Chain(NamedTuple):
    """A chain: the shapes of its inputs and outputs, and the function that computes outputs from inputs."""

    inputs: Shapes
    outputs: Shapes
    body: Body
    static: tuple[str, ...] = ()

    def then(self, other: Chain, **linked: str) -> Chain:
        """Return this chain followed by ``other``. ``linked`` maps inputs of ``other`` to outputs of this
        chain. If the two chains have an input of the same name, it is one input."""

        def body(**given: Any) -> dict[str, Any]:
            first = self.body(**{n: given[n] for n in self.inputs})
            own = {n: given[n] for n in other.inputs if n not in linked}
            return first | other.body(**own, **{n: first[o] for n, o in linked.items()})

        later = {n: s for n, s in other.inputs.items() if n not in linked}
        static = tuple(dict.fromkeys(self.static + other.static))
        return Chain(self.inputs | later, self.outputs | other.outputs, body, static)

    def through(self, stream: str) -> Chain:
        """Return this chain with one more output, ``through``, which is the input ``stream`` unchanged. The
        gradient of ``through`` comes from later uses of the stream. The chain's backward adds this gradient
        to the gradient from the chain's own use of the stream."""

        def body(**given: Any) -> dict[str, Any]:
            return self.body(**given) | {"through": given[stream]}

        return self._replace(outputs=self.outputs | {"through": self.inputs[stream]}, body=body)

    def program(self, name: str) -> Program:
        """Trace the chain to a program."""
        inputs, outputs = (
            {n: _tensor(s) for n, s in shapes.items()} for shapes in (self.inputs, self.outputs)
        )
        shapes = [t.shape for t in (*inputs.values(), *outputs.values())]
        dims = dict.fromkeys(d for shape in shapes for dim in shape for d in sorted(dim.names))
        signature = Signature(name, tuple(dims), inputs, outputs, static=self.static)
        trace = Trace(signature)
        with tracing(trace):
            results = self.body(**{n: Tensor(trace.add(Node("input", (), n))) for n in inputs})
        return Program(signature, tuple(trace.nodes), {n: results[n]._index for n in outputs}).check()


def _tensor(text: str) -> TensorType:
    shape, _, dtype = text.partition(":")
    return TensorType(tuple(Dim.parse(d.strip()) for d in shape.split(",") if d), dtype.strip() or "bf16")


def _scaled(x: Any, w: Any, rstd: Any) -> Any:
    product: Any = gemm(x, w.mT)
    return product * per_row(rstd)


def _added(x: Any, w: Any, stream: Any) -> Any:
    product: Any = gemm(x, w.mT)
    return product + stream


def _rotated(z: Any, cos_sin: Any) -> Any:
    even: Any
    odd: Any
    (even, odd), (cosine, sine) = pairs(z), pairs(per_head(cos_sin))
    return join(even * cosine - odd * sine, even * sine + odd * cosine)


def _normed(h: Any, eps: Any) -> Any:
    return rsqrt(row_sums(h * h) / h.columns + eps)


ACTIVATIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "swiglu": ("2*F", lambda z: _gated(silu, z)),
    "geglu": ("2*F", lambda z: _gated(gelu, z)),
    "gelu": ("F", gelu),
    "relu2": ("F", lambda z: maximum(z, 0.0) ** 2),
}


def _gated(function: Callable[[Any], Any], z: Any) -> Any:
    gate, up = pairs(z)
    return function(gate) * up


def mlp(activation: str = "swiglu", residual: bool = True) -> Chain:
    """Pre-norm MLP of the residual stream ``h``. ``residual``: add ``h`` to the result. The forward stores
    rstd (the norm's row scale), z (the first matmul's result times rstd) and act (the activation's
    result)."""
    width, act_of = ACTIVATIONS[activation]

    def body(h: Any, gamma: Any, w_up: Any, w_down: Any, eps: Any) -> dict[str, Any]:
        rstd = _normed(h, eps)
        z = _scaled(h * per_column(gamma), w_up, rstd)
        act = act_of(z)
        out = _added(act, w_down, h) if residual else gemm(act, w_down.mT)
        return {"rstd": rstd, "z": z, "act": act, "out": out}

    inputs = {"h": "M, D", "gamma": "D", "w_up": f"{width}, D", "w_down": "D, F", "eps": SCALAR}
    return Chain(inputs, {"rstd": "M: fp32", "z": f"M, {width}", "act": "M, F", "out": "M, D"}, body)


def attention_out() -> Chain:
    """Project the attention output ``a``, and add it to the residual stream ``x``."""

    def body(a: Any, w_o: Any, x: Any) -> dict[str, Any]:
        return {"h": _added(a, w_o, x)}

    return Chain({"a": "M, A", "w_o": "D, A", "x": "M, D"}, {"h": "M, D"}, body)


def attention_in(bias: bool = False, rotates: bool = True) -> Chain:
    """Pre-norm projection of the residual stream ``out`` to queries, keys and values, with or without a bias.
    With ``rotates``, the angles in ``cos_sin`` rotate the first ``turned`` columns. The forward stores
    rstd_in, the norm's row scale."""

    def body(
        out: Any,
        gamma_in: Any,
        w_qkv: Any,
        eps: Any,
        b_qkv: Any = None,
        cos_sin: Any = None,
        turned: Any = None,
    ) -> dict[str, Any]:
        rstd = _normed(out, eps)
        z = _scaled(out * per_column(gamma_in), w_qkv, rstd)
        z = z + per_column(b_qkv) if bias else z
        if not rotates:
            return {"rstd_in": rstd, "qkv": z}
        turns: Any = column_index(z)
        return {"rstd_in": rstd, "qkv": where(turns < turned, _rotated(z, cos_sin), z)}

    width = "2*H*P" if rotates else "N"
    inputs = {"out": "M, D", "gamma_in": "D", "w_qkv": f"{width}, D"}
    inputs |= {"b_qkv": width} if bias else {}
    inputs |= {"cos_sin": "M, 2*P", "turned": SCALAR} if rotates else {}
    inputs |= {"eps": SCALAR}
    outputs = {"rstd_in": "M: fp32", "qkv": f"M, {width}"}
    return Chain(inputs, outputs, body, ("P",) if rotates else ())


def loss() -> Chain:
    """The parts of the cross-entropy of ``h``: the log-sum-exp of all logits but the target's, and the
    target's logit. Both come from one matmul. The loss is softplus(rest_lse - target_logit). So it is exact
    for a nearly certain token too, whose whole log-sum-exp differs from the target's logit by less than a
    rounding error. The forward does not store the logits."""

    def body(h: Any, w: Any, target: Any) -> dict[str, Any]:
        logits: Any = gemm(h, w.mT)
        return {"rest_lse": row_logsumexp(rest(logits, target)), "target_logit": row_select(logits, target)}

    inputs = {"h": "M, D", "w": "V, D", "target": "M: int64"}
    return Chain(inputs, {"rest_lse": "M: fp32", "target_logit": "M: fp32"}, body)


def rest(logits: Any, target: Any) -> Any:
    """The logits, with a value in the target's column that vanishes in a log-sum-exp."""
    index: Any = column_index(logits)
    return where(index == per_row(target), -1e30, logits)


def next_norm() -> Chain:
    """Compute two values for the next chain, which begins with a norm of the residual stream ``out``.
    ``next_hg`` is ``out`` times the norm's weight, and ``next_rstd`` is the norm's row scale. The next
    chain's first matmul reads ``next_hg``. The epilogue of this matmul multiplies rows by ``next_rstd``."""

    def body(out: Any, next_gamma: Any, next_eps: Any) -> dict[str, Any]:
        return {"next_hg": out * per_column(next_gamma), "next_rstd": _normed(out, next_eps)}

    inputs = {"out": "M, D", "next_gamma": "D", "next_eps": SCALAR}
    return Chain(inputs, {"next_hg": "M, D", "next_rstd": "M: fp32"}, body)


def between_attentions(activation: str = "swiglu") -> Chain:
    """The chain between two attentions: from the output of one attention to the queries, keys and values of
    the next attention."""
    return attention_out().then(mlp(activation), h="h").then(attention_in(), out="out")
