"""Tests of the benchmark of fp8 accuracy, at a small shape."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fp8 import accuracy as bench
from benchmarks.fp8.accuracy import FUSED, RowWise, errors, mlp
from coda_agent.comparison.layers.plain import Function, layer
from coda_agent.comparison.layers.shape import Shape

SMALL = Shape(heads=4, head_width=32, ffn=256, sequences=1, length=64)


def test_a_linear_in_fp8_is_its_three_products_by_rows() -> None:
    random = torch.Generator().manual_seed(1)
    x, w, dy = (torch.randn(s, generator=random).bfloat16() for s in ((32, 48), (64, 48), (32, 64)))
    x, w = x.requires_grad_(), w.requires_grad_()
    y = RowWise.apply(x, w)
    got = {"y": y, **dict(zip(("x", "w"), torch.autograd.grad(y, (x, w), dy), strict=True))}
    wide = {n: t.detach().double() for n, t in {"x": x, "w": w, "dy": dy}.items()}
    exact = {"y": wide["x"] @ wide["w"].mT, "x": wide["dy"] @ wide["w"], "w": wide["dy"].mT @ wide["x"]}
    for name, true in exact.items():
        error = (got[name].double() - true).norm() / true.norm()
        assert 0.02 < error < 0.05, name


@pytest.mark.parametrize("function", [mlp, layer], ids=lambda f: f.__name__)
@pytest.mark.parametrize("loud", [False, True])
def test_arms_lose_what_their_dtype_loses(function: Function, loud: bool) -> None:
    found = errors(SMALL, function, 1, loud)
    assert list(found) == [*bench.LINEARS, FUSED]
    theirs = found["row-wise, torchao"]
    for name, error in found["row-wise, interpreted"].items():
        assert 2 * found["bf16"][name] < error < 1.1 * theirs[name] < 0.2
    assert found[FUSED]["y"] < 1.3 * theirs["y"]


def test_the_table_has_a_line_an_arm_and_its_intervals() -> None:
    runs = [{"bf16": {"y": 0.004, "d x": 0.01}, "fused": {"y": y}} for y in (0.03, 0.04, 0.05)]
    lines = bench.table(runs, ("y", "d x")).splitlines()
    assert lines[0] == "| arm | y | d x |" and lines[2] == "| bf16 | 0.40 [0.40, 0.40] | 1.00 [1.00, 1.00] |"
    assert lines[3] == "| fused | 4.00 [1.52, 6.48] | – |"
