"""Tests of which column ranges of a matrix product a program can compute.

Checkpoints may store a weight as two halves, one after the other. A program can separate the halves: it
computes a matrix that selects rows, and multiplies this matrix by the weight. All other column ranges must
have a static width.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from spec_files import fails, write_changed

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.signature import TensorType
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import Checked
from coda_agent.verifier.spec.rules import missing_static
from coda_agent.verifier.verify import check

GATE_UP = """\
name: mlp_halves
summary: Up projection whose weight holds gate, then up.
dims: {M: tokens, N: width, K: depth}
inputs:
  x: {shape: [M, K], dtype: bf16, init: {normal: {std: 1}}}
  w: {shape: [2*N, K], dtype: bf16, init: {normal: {std: K**-0.5}}}
outputs:
  act: {shape: [M, N], dtype: bf16}
reference: |
  gate, up = (x @ w.mT).chunk(2, dim=-1)
  act = silu(gate) * up
cases:
  - {name: small, M: 256, N: 128, K: 128}
accept: {speedup: 1.0}
"""
GATE_UP_KERNEL = """\
from primitives import abs, column_index, column_sums, gemm, kernel, pairs, per_row, silu, where


@kernel
def mlp_halves(x, w):
    at = column_index(gemm(x, w.mT))
    row = per_row(column_sums(at) / column_sums(0 * at + 1))
    square = gemm(w, w.mT)
    c = column_index(square)
    up = 2 * c + 1 - square.columns
    chosen = where(abs(row - where(up < 0, 2 * c, up)) < 0.5, 1.0, 0.0)
    gate, up = pairs(gemm(x, gemm(chosen, w).mT))
    return {"act": silu(gate) * up}
"""
ROTARY = """\
name: rope_halves
summary: Rotary embedding of heads whose halves are contiguous, as Hugging Face keeps them.
dims: {M: tokens, K: model width, H: heads, P: half of a head}
inputs:
  x: {shape: [M, K], dtype: bf16}
  w: {shape: [2*H*P, K], dtype: bf16, init: {normal: {std: K**-0.5}}}
  cos_table: {shape: [M, 2*P], dtype: bf16, init: {uniform: [-1.0, 1.0]}, domain: [-1.0, 1.0]}
  sin_table: {shape: [M, 2*P], dtype: bf16, init: {uniform: [-1.0, 1.0]}, domain: [-1.0, 1.0]}
static: [P]
outputs:
  q: {shape: [M, 2*H*P], dtype: bf16}
reference: |
  z = (x @ w.mT).unflatten(1, (H, 2*P))
  first, second = z.chunk(2, dim=-1)
  turned = cat((-second, first), -1)
  q = (z * cos_table[:, None] + turned * sin_table[:, None]).flatten(1)
cases:
  - {name: small, M: 256, K: 128, H: 4, P: 32}
accept: {speedup: 1.0}
"""
ROTARY_KERNEL = """\
from primitives import abs, column_index, column_sums, gemm, head_sums, join, kernel, pairs
from primitives import per_column, per_head, per_row, where


@kernel
def rope_halves(x, w, cos_table, sin_table, P):
    at = column_index(gemm(x, w.mT))
    number = column_sums(at) / column_sums(0 * at + 1)
    row, square = per_row(number), gemm(w, w.mT)
    zero = 0 * square
    c = zero + per_column(number)
    wide = per_head(head_sums(zero + 1, 2 * P))
    middle = per_head(head_sums(c, 2 * P)) / wide
    first = c < middle
    partner = where(first, c + wide / 2, c - wide / 2)
    own = where(abs(row - c) < 0.5, 1, 0)
    turned = where(abs(row - partner) < 0.5, where(first, -1, 1), 0)
    both = gemm(join(own, turned).mT, w)
    z, turned_z = pairs(gemm(x, both.mT))
    return {"q": z * per_head(cos_table) + turned_z * per_head(sin_table)}
"""


@pytest.mark.slow
@pytest.mark.usefixtures("some_runs", "some_compiles")
@pytest.mark.parametrize(("text", "source"), [(GATE_UP, GATE_UP_KERNEL), (ROTARY, ROTARY_KERNEL)])
def test_halves_of_a_weight_can_be_met(tmp_path: Path, text: str, source: str) -> None:
    path = tmp_path / f"{text.split()[1]}.yaml"
    path.write_text(text, encoding="utf-8")
    report, _ = check(load(path), source)
    assert isinstance(report, Checked), str(report)


THIRDS = """\
name: thirds
summary: Query, key and value of one product.
dims: {M: tokens, N: width, K: depth}
inputs:
  x: {shape: [M, K], dtype: bf16}
  w: {shape: [3*N, K], dtype: bf16}
outputs:
  q: {shape: [M, N], dtype: bf16}
  k: {shape: [M, N], dtype: bf16}
  v: {shape: [M, N], dtype: bf16}
reference: q, k, v = (x @ w.mT).chunk(3, dim=-1)
cases:
  - {name: small, M: 256, N: 128, K: 128}
"""


def test_parts_that_are_no_static_ranges_are_refused_with_a_remedy(tmp_path: Path) -> None:
    path = write_changed(tmp_path / "thirds.yaml", THIRDS)
    message = fails(path)
    assert message.startswith(f"{path}:8: output q has N columns"), message
    assert message.endswith("add N to static")
    assert load(write_changed(path, THIRDS, "outputs:", "static: [N]\noutputs:")).static == ("N",)


@pytest.mark.parametrize(
    ("rows", "columns", "static", "missing"),
    [
        ("3*N", "N", (), ("N",)),
        ("3*N", "2*N", (), ("N",)),
        ("(H + 2*G)*P", "H*P", ("P",), ("H",)),
        ("(H + 2*G)*P", "G*P", ("H", "G"), ("P",)),
        ("N + K", "N", ("K",), ("N",)),
        ("(H + 2*G)*P", "H*P", ("H", "G", "P"), ()),
        ("2*N", "N", (), ()),  # ``pairs`` halves the number of columns
        ("4*N", "N", (), ()),
        ("N", "2*N", (), ()),  # ``join`` doubles the number of columns
        ("2*H*P", "H", ("P",), ()),  # a statistic for each head
        ("96*H", "H", (), ()),
        ("N", "8", (), ()),
    ],
)
def test_static_ranges_are_needed_where_nothing_else_has_as_many_columns(
    rows: str, columns: str, static: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    weight = TensorType((Dim.parse(rows), Dim.parse("K2")), "bf16")
    assert missing_static((Dim.parse("M"), Dim.parse(columns)), [weight], static) == missing
