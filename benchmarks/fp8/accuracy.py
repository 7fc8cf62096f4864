"""Measure the accuracy of an MLP and a layer in fp8: ``python -m benchmarks.fp8.accuracy [--seeds 5]``.

The benchmark needs no GPU. All arms compute from the same bf16 numbers. The error of an output or gradient is
the RMS of its difference from the plain layer's fp32 value, over the RMS of that value. Programs run in the
interpreter, and torchao's recipes run on PyTorch's CPU kernels.

In the arm *row-wise*, a linear layer has three matmuls, one in the forward and two for the gradients. Each
matmul quantises every row of its operands by the row's own maximum, as in torchao's recipe. All three matmuls
run ``gemm_fp8_row_scale``, so gradients need no kernel of their own. In the arm *fused*, the matmuls write
the activation and the normalised rows in fp8, with scales from another batch. This arm has only a forward.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from benchmarks.programs import forward
from coda_agent.comparison.layers.errors import relative, results
from coda_agent.comparison.layers.plain import Differentiated, Function, Rotary, layer, rmsnorm, rotated
from coda_agent.comparison.layers.shape import Drawn, Shape, Weights, draw, rotary
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.system.markdown_table import markdown_table
from coda_agent.verifier.statistics import student_quantile

SHAPE = Shape(heads=16, head_width=64, ffn=2816, sequences=2, length=128)
END = torch.finfo(torch.float8_e4m3fn).max
LOUD, TIMES = 64, 30.0  # one input channel of every LOUD is multiplied by TIMES, as in trained models

Product = Callable[[Tensor, Tensor], Tensor]
Scaled = tuple[Tensor, Tensor]


@cache
def program(name: str) -> Program:
    """The program of a shipped spec."""
    return forward(name)[1]


def rows(t: Tensor) -> Scaled:
    """Quantise a matrix to fp8, with one scale per row."""
    scale = (t.float().abs().amax(1) / END).clamp(min=1e-12)
    return (t.float() / scale[:, None]).clamp(-END, END).to(torch.float8_e4m3fn), scale


def scaled_product(a: Scaled, b: Scaled) -> Tensor:
    """The matmul of ``a`` [M, K] and the transpose of ``b`` [N, K], in bf16. ``a`` and ``b`` each have one
    scale per row."""
    inputs = {"x": a[0], "sx": a[1], "w": b[0], "sw": b[1]}
    return interpret(program("gemm_fp8_row_scale"), inputs)["y"]


class RowWise(torch.autograd.Function):
    """A linear layer whose three matmuls are all in fp8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return scaled_product(rows(x), rows(w))

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        (dy,), (x, w) = given, ctx.saved_tensors
        return scaled_product(rows(dy), rows(w.mT)), scaled_product(rows(dy.mT), rows(x.mT))


def by_torchao(recipe: str) -> Product:
    """Return a linear layer in fp8 that follows one of torchao's training recipes."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name(recipe)

    def product(x: Tensor, w: Tensor) -> Tensor:
        plain = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype, device="meta")
        made = Float8Linear.from_float(plain, config)
        return torch.func.functional_call(made, {"weight": w}, x)

    return product


def mlp(shape: Shape, x: Tensor, weights: Weights, turn: Rotary) -> Tensor:
    """An MLP, x [tokens, D] -> [tokens, D]: SwiGLU between two matmuls."""
    gate, up = linear(x, weights.gate_up).chunk(2, -1)
    return linear(silu(gate) * up, weights.down)


class Fp8Arm(Differentiated):
    """An arm that runs the function ``mlp`` or ``layer`` with ``product`` in place of ``linear``. Autograd
    computes the gradients."""

    def __init__(self, function: Function, product: Product, shape: Shape, drawn: Drawn):
        parts = ("gate_up", "down") if function is mlp else Weights._fields
        self.drawn = drawn
        super().__init__(shape, {n: getattr(drawn.weights, n) for n in parts}, drawn.next_norm)
        scope = function.__globals__ | {"linear": product}
        self._function: Function = FunctionType(function.__code__, scope)

    def call(self, x: Tensor) -> Tensor:
        return self._function(self.shape, x, self.drawn.weights._replace(**self.parameters), self.turn)


def wide(drawn: Drawn) -> Drawn:
    """Convert the drawn numbers to fp32."""
    weights = Weights(*(w.float() for w in drawn.weights))
    return Drawn(weights, drawn.next_norm.float(), drawn.x.float(), drawn.dout.float())


class FusedFp8:
    """A layer whose matmuls write fp8. The matmuls run in the kernels ``gemm_fp8_swiglu`` and
    ``gemm_fp8_residual_rmsnorm``. The scale of each fp8 tensor comes from the tensor's largest magnitude in
    another batch. In training, this other batch would be the previous batch."""

    def __init__(self, shape: Shape, drawn: Drawn):
        self.shape, self.weights, self.next_norm = shape, drawn.weights, drawn.next_norm
        self.turn = rotary(shape, "cpu")
        w = drawn.weights
        interleaved = w.gate_up.unflatten(0, (2, shape.ffn)).transpose(0, 1).flatten(0, 1)
        self.qkv, self.out, self.up, self.down = map(rows, (w.qkv, w.out, interleaved, w.down))
        self.scales = {name: torch.tensor(1.0) for name in ("act", "hg", "normed")}
        self.amax: dict[str, Tensor] = {}

    def learn(self, call: Callable[[Tensor], Tensor], x: Tensor) -> None:
        """Learn the scales from a batch. There is one pass per scale, because a tensor's scale changes the
        maxima of the tensors after it."""
        for _ in self.scales:
            call(x)
            self.scales |= {name: END / amax for name, amax in self.amax.items()}

    def _activation(self, x: Scaled) -> Scaled:
        scale = self.scales["act"]
        inputs = {"x": x[0], "sx": x[1], "w": self.up[0], "sw": self.up[1], "scale": scale}
        made = interpret(program("gemm_fp8_swiglu"), inputs)
        self.amax["act"] = made["amax"].amax()
        return made["act"], (1 / scale).expand(len(x[0])).contiguous()

    def _added(self, y: Scaled, w: Scaled, x: Tensor, gamma: Tensor, name: str) -> tuple[Tensor, Scaled]:
        """Return the residual stream, and its normalised rows in fp8."""
        scale = self.scales[name]
        inputs = {"y": y[0], "sy": y[1], "w": w[0], "sw": w[1], "x": x, "gamma": gamma, "scale": scale}
        made = interpret(program("gemm_fp8_residual_rmsnorm"), inputs)
        self.amax[name] = made["amax"].amax()
        return made["h"], (made["hg"], made["rstd"] / scale)

    def mlp(self, x: Tensor) -> Tensor:
        return scaled_product(self._activation(rows(x)), self.down)

    def layer(self, x: Tensor) -> Tensor:
        shape, weights = self.shape, self.weights
        qkv = scaled_product(rows(rmsnorm(x, weights.attention_norm)), self.qkv)
        q, k, v = (shape.apart(t) for t in qkv.unflatten(1, (3, shape.width)).unbind(1))
        q, k = (rotated(t, self.turn) for t in (q, k))
        mixed = shape.together(scaled_dot_product_attention(q, k, v, is_causal=True))
        h, normed = self._added(rows(mixed), self.out, x, weights.ffn_norm, "hg")
        return self._added(self._activation(normed), self.down, h, self.next_norm, "normed")[0]


LINEARS: dict[str, Callable[[], Product]] = {
    "bf16": lambda: linear,
    "row-wise, interpreted": lambda: RowWise.apply,
    "row-wise, torchao": partial(by_torchao, "rowwise"),
    "tensor-wise, torchao": partial(by_torchao, "tensorwise"),
}
FUSED = "fused, interpreted"


def drawn_at(shape: Shape, seed: int, loud: bool) -> Drawn:
    """Draw a layer and its inputs. ``loud``: multiply one input channel in ``LOUD`` by ``TIMES``."""
    drawn = draw(shape, seed, "cpu")
    if loud:
        drawn.x[:, ::LOUD] *= TIMES
    return drawn


def errors(shape: Shape, function: Function, seed: int, loud: bool) -> dict[str, dict[str, float]]:
    """The error of each output and gradient, by arm. An error is the RMS of the difference from the exact
    value, over the RMS of the exact value."""
    drawn, before = drawn_at(shape, seed, loud), drawn_at(shape, seed + 1000, loud)
    exact = results(Fp8Arm(function, linear, shape, wide(drawn)), wide(drawn))
    exact.pop("normed")
    found = {}
    for name, make in LINEARS.items():
        got = results(Fp8Arm(function, make(), shape, drawn), drawn)
        found[name] = relative({n: got[n] for n in exact}, exact)
    fused = FusedFp8(shape, drawn)
    call = fused.mlp if function is mlp else fused.layer
    fused.learn(call, before.x)
    found[FUSED] = relative({"y": call(drawn.x)}, {"y": exact["y"]})
    return found


def interval(values: list[float]) -> str:
    """The mean of these fractions in percent, with the mean's 95% interval."""
    mean = 100 * statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.2f}"
    half = 100 * student_quantile(0.95, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.2f} [{mean - half:.2f}, {mean + half:.2f}]"


def table(found: Iterable[Mapping[str, Mapping[str, float]]], values: Iterable[str]) -> str:
    """A Markdown table of errors in percent, with one line per arm and one column per output or gradient."""
    several, columns = list(found), list(values)
    lines = [
        [arm, *(interval([f[arm][v] for f in several]) if v in first else None for v in columns)]
        for arm, first in several[0].items()
    ]
    return markdown_table(["arm", *columns], lines)


VALUES = {mlp: ("y", "d x", "d gate_up", "d down"), layer: ("y", "d x", "d qkv", "d out", "d down")}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args(arguments).seeds)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchao"))
    print(f"{SHAPE.tokens} tokens of {SHAPE.width}, FFN {SHAPE.ffn}; CPU, {packages}, {datetime.now(UTC):%F}")
    for function, values in VALUES.items():
        for loud in (False, True):
            said = f"one channel in {LOUD} is {TIMES:g} times as large" if loud else "normal"
            print(f"\n{function.__name__}, inputs {said}; error in percent, {len(seeds)} draws\n")
            print(table([errors(SHAPE, function, seed, loud) for seed in seeds], values), flush=True)


if __name__ == "__main__":
    main()
