"""Functions of the package ``fused`` at small sizes, each with an equivalent function in plain PyTorch. The
tensors may have any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo import lookup_backend
from torch.nn import functional as nn_f

from coda_agent.fused import functional
from coda_agent.fused import loss as fused_loss

EPS = 1e-3


class Where(NamedTuple):
    """``dtype``: the widest dtype of a fused part's matrices on ``device``; ``close``: the relative
    difference allowed between two computations of the same values in this dtype."""

    device: str
    dtype: torch.dtype
    close: float


CPU, GPU = Where("cpu", torch.float32, 1e-6), Where("cuda", torch.bfloat16, 2e-2)
D, F, A, WIDTH, QUERIES, KEYS, VOCABULARY = 16, 24, 32, 8, 3, 1, 40
TURNED = (QUERIES + KEYS) * WIDTH
Function = Callable[..., Tensor]


class Counted:
    """A torch.compile backend that counts the graphs it compiles. PyTorch's own counter would also count the
    graphs of functions that ``fused`` compiles for a GPU."""

    def __init__(self, backend: str):
        self.backend, self.graphs = lookup_backend(backend), 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return self.backend(graph, inputs)


class Part(NamedTuple):
    """A function, the shapes of its tensors (M stands for the rows), and the same function in plain
    PyTorch."""

    shapes: dict[str, tuple[Any, ...]]
    ours: Function
    plain: Function

    def drawn(self, rows: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Tensor]:
        """Draw leaf tensors that require gradients."""
        random = torch.Generator().manual_seed(0)
        found = {}
        for name, shape in self.shapes.items():
            sizes = [rows if size == "M" else size for size in shape]
            scale = 1.0 if "M" in shape else sizes[-1] ** -0.5
            value = torch.randn(sizes, generator=random) * scale + (1.0 if name == "gamma" else 0.0)
            found[name] = value.to(device, dtype).requires_grad_()
        return found


def normed(x: Tensor, gamma: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * gamma


def _gelu(t: Tensor) -> Tensor:
    return nn_f.gelu(t, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": lambda z: nn_f.silu(z[..., 0::2]) * z[..., 1::2],
    "geglu": lambda z: _gelu(z[..., 0::2]) * z[..., 1::2],
    "gelu": _gelu,
    "relu2": lambda z: z.relu().square(),
}


def feed_forward(activation: str, residual: bool) -> Part:
    wide = 2 * F if activation in functional.GATED else F

    def ours(x: Tensor, gamma: Tensor, up: Tensor, down: Tensor) -> Tensor:
        norm = functional.Norm(gamma, EPS)
        return functional.feed_forward(x, norm, up, down, activation, residual)

    def plain(x: Tensor, gamma: Tensor, up: Tensor, down: Tensor) -> Tensor:
        made = ACTIVATIONS[activation](normed(x, gamma) @ up.mT) @ down.mT
        return x + made if residual else made

    return Part({"x": ("M", D), "gamma": (D,), "up": (wide, D), "down": (D, F)}, ours, plain)


def after_attention(activation: str) -> Part:
    rest = feed_forward(activation, True)

    def ours(a: Tensor, x: Tensor, gamma: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return functional.after_attention(a, x, functional.Norm(gamma, EPS), out, up, down, activation)

    def plain(a: Tensor, x: Tensor, gamma: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return rest.plain(x + a @ out.mT, gamma, up, down)

    return Part({"a": ("M", A), "out": (D, A), **rest.shapes}, ours, plain)


def before_attention(bias: bool, rotates: bool) -> Part:
    columns = TURNED + KEYS * WIDTH

    def table(x: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.arange(x.shape[0] * WIDTH // 2, device=x.device).view(-1, WIDTH // 2) * 0.1
        both = torch.cat((angles, angles), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    def ours(x: Tensor, gamma: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        norm = functional.Norm(gamma, EPS)
        if not rotates:
            return functional.before_attention(x, norm, w, b)
        turned, rest = w.split([TURNED, KEYS * WIDTH])
        packed = torch.cat((functional.rotary_pairs(turned, WIDTH), rest))
        made = functional.before_attention(
            x, norm, packed, b, functional.angles(*table(x), x.shape[:-1]), TURNED
        )
        first, last = made.split([TURNED, KEYS * WIDTH], -1)
        halves = functional.rotary_halves(first.unflatten(-1, (-1, WIDTH))).flatten(-2)
        return torch.cat((halves, last), -1)

    def plain(x: Tensor, gamma: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        z = normed(x, gamma) @ w.mT + (0 if b is None else b)
        if not rotates:
            return z
        cos, sin = (t[:, None] for t in table(x))
        heads = z[..., :TURNED].unflatten(-1, (-1, WIDTH))
        low, high = heads.chunk(2, -1)
        return torch.cat(((heads * cos + torch.cat((-high, low), -1) * sin).flatten(-2), z[..., TURNED:]), -1)

    shapes = {"x": ("M", D), "gamma": (D,), "w": (columns, D)} | ({"b": (columns,)} if bias else {})
    return Part(shapes, ours, plain)


def between_attentions(activation: str) -> Part:
    """Return a part whose result concatenates two tensors: the residual stream after one layer, and the next
    layer's projections of the normed stream."""
    first, last = after_attention(activation), before_attention(False, False)

    def ours(w: Tensor, next_gamma: Tensor, gamma: Tensor, **given: Tensor) -> Tensor:
        norm, following = functional.Norm(gamma, EPS), functional.Norm(next_gamma, EPS)
        out, begun = functional.after_attention_with_next_norm(
            norm=norm, activation=activation, next_norm=following, **given
        )
        return torch.cat((out, functional.before_attention(out, following, w, begun_norm=begun)), -1)

    def plain(w: Tensor, next_gamma: Tensor, **given: Tensor) -> Tensor:
        out = first.plain(**given)
        return torch.cat((out, last.plain(out, next_gamma, w)), -1)

    return Part({**first.shapes, "w": last.shapes["w"], "next_gamma": (D,)}, ours, plain)


def loss(summed: bool) -> Part:
    def target(h: Tensor) -> Tensor:
        rows = torch.arange(h.shape[0], device=h.device)
        return torch.where(rows % 5 == 3, fused_loss.IGNORED, rows * 7 % VOCABULARY)

    def ours(h: Tensor, w: Tensor) -> Tensor:
        run = functional.summed_cross_entropy if summed else functional.cross_entropy
        return run(h, w, target(h))

    def plain(h: Tensor, w: Tensor) -> Tensor:
        return nn_f.cross_entropy(h @ w.mT, target(h), reduction="sum" if summed else "none")

    return Part({"h": ("M", D), "w": (VOCABULARY, D)}, ours, plain)


PARTS = {
    **{f"mlp {each}": feed_forward(each, True) for each in ACTIVATIONS},
    "mlp without residual": feed_forward("swiglu", False),
    **{f"after attention {each}": after_attention(each) for each in ACTIVATIONS},
    "before attention": before_attention(False, False),
    "before attention, rotated": before_attention(False, True),
    "before attention, bias": before_attention(True, False),
    **{f"between attentions {each}": between_attentions(each) for each in functional.GATED},
    "loss": loss(False),
    "summed loss": loss(True),
}


def gradients(function: Function, given: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Return the function's result, and the gradient of each leaf tensor that requires a gradient. The
    differentiated scalar is a randomly weighted sum of the result."""
    result = function(**given)
    weight = torch.randn(result.shape, generator=torch.Generator().manual_seed(seed)).to(result)
    wanted = {n: t for n, t in given.items() if t.requires_grad}
    found = torch.autograd.grad((result * weight).sum(), list(wanted.values()))
    return {"result": result.detach(), **dict(zip(wanted, found, strict=True))}


def loss_of(found: Tensor, exact: Tensor) -> float:
    """Return the RMS of the error divided by the RMS of the exact values."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())
