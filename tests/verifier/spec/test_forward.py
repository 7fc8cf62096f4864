"""Tests of a backward's ``forward``: what cannot be differentiated, and gradients of another shape, are
refused when the spec is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics.gradients import wrong
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.spec.file import SpecError

SPEC = """\
name: backward
summary: A test.
dims: {M: tokens, K: inner, N: width}
inputs:
  x: {shape: [M, K], dtype: bf16}
  w: {shape: [N, K], dtype: bf16, init: {normal: {std: K**-0.5}}}
  d_y: {shape: [M, N], dtype: bf16}
outputs:
  GRADIENT: {shape: [ROWS], dtype: bf16}
forward:
  reference: |
    FORWARD
reference: |
  z = x @ w.mT
  s = sigmoid(z)
  d_x = (d_y * s * (1 + z * (1 - s))) @ w
  d_x_parts = d_x
cases:
  - {name: a, M: 256, K: 128, N: 512}
accept: {speedup: 1.0}
"""


def loaded(folder: Path, forward: str, gradient: str = "d_x", shape: str = "M, K", **changed: str) -> None:
    text = SPEC.replace("FORWARD", forward.replace("\n", "\n    "))
    text = text.replace("GRADIENT", gradient).replace("ROWS", shape)
    for old, new in changed.items():
        text = text.replace(f"  {old} = ", f"  {old} = {new}  # ")
    path = folder / "backward.yaml"
    path.write_text(text, encoding="utf-8")
    load(path)


def test_a_right_forward_is_loaded(tmp_path: Path) -> None:
    loaded(tmp_path, "y = silu(x @ w.mT)")


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        ("y = (x @ w.mT).to(torch.complex64)", "forward: y is torch.complex64; only a floating-point tensor"),
        ("y = (x @ w.mT).argmax(-1)", "y is torch.int64"),
        ("y = (x @ w.mT) > 0", "y is torch.bool"),
        ("y = [1, 2]", "y is list"),
        ("y = None", "y is NoneType"),
        ("y = x @ x.mT", r"y has shape .*, and its gradient d_y has shape"),
        ("y = ones(M, N, dtype=x.dtype)", "y does not depend on x"),
        ("y = (x @ w.mT).detach()", "y does not depend on x"),
        ("with torch.no_grad():\n    y = silu(x @ w.mT)", "y does not depend on x"),
        ("y = x @ w.mT\ny.sqrt_()\ny.mul_(x.sum())", "forward: one of the variables needed for gradient"),
        ("y = gelu(x @ w.mT)", "d_x is not the gradient of forward"),
        ("torch.sys.exit(0)\ny = x @ w.mT", "forward: 0 "),
    ],
)
def test_a_forward_without_the_gradient_is_refused(forward: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=words):
        loaded(tmp_path, forward)


def test_a_gradient_has_the_shape_of_its_input(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"output d_x has shape \[M, N\], and x has shape \[M, K\]"):
        loaded(tmp_path, "y = silu(x @ w.mT)", shape="M, N", d_x="d_y")


def test_partial_sums_are_whole_parts(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="columns of partial sums, no multiple of the .* of x"):
        loaded(tmp_path, "y = silu(x @ w.mT)", gradient="d_x_parts", shape="M, N", d_x_parts="d_y")


RELU = """\
name: relu_backward
summary: A test.
dims: {M: tokens, K: inner, N: width}
inputs:
  x: {shape: [M, K], dtype: bf16}
  w: {shape: [N, K], dtype: bf16, init: {normal: {std: K**-0.5}}}
  d_y: {shape: [M, N], dtype: bf16}
outputs:
  d_x: {shape: [M, K], dtype: bf16}
forward:
  reference: |
    z = x @ w.mT
    y = FORWARD
reference: |
  z = x @ w.mT
  d_x = where(CONDITION, d_y, 0) @ w
cases:
  - {name: a, M: 256, K: 128, N: 512}
"""


@pytest.mark.parametrize(
    ("forward", "condition", "right"),
    [
        ("maximum(z, 0 * z)", "z > 0", True),
        ("z.clamp(min=0)", "z > 0", True),
        ("z.clamp(min=0)", "z >= 0", True),
        ("z.clamp(-1, 1)", "(z > -1) & (z < 1)", True),
        ("z.clamp(-1, 1)", "(z > -1) & (z < 1.001)", False),
        ("z.abs()", "z > 0", False),
    ],
)
def test_at_a_tie_either_gradient_is_right(tmp_path: Path, forward: str, condition: str, right: bool) -> None:
    path = tmp_path / "relu_backward.yaml"
    path.write_text(RELU.replace("FORWARD", forward).replace("CONDITION", condition), encoding="utf-8")
    spec, sizes = load(path, check=False), {"M": 48, "K": 16, "N": 40}
    drawn = draw(spec, sizes, 3, family="integers")
    drawn["w"][:, 1:] = 0  # then every product is a small integer, times a power of two
    assert (wrong(spec, drawn, sizes) == {}) is right
