"""Specs with one matrix per expert: an error names the mistake and its line, and the families of inputs
distribute rows among experts in every way that ``ROUTINGS`` lists."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkout import ROOT
from spec_files import write_changed

from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import reference
from coda_agent.verifier.numerics.inputs import EVERY, draw, routing
from coda_agent.verifier.numerics.values import ROUTINGS
from coda_agent.verifier.spec.file import SpecError

SPEC = ROOT / "specs" / "gemm_grouped_swiglu.yaml"
OFFSETS = "dtype: int32, init: {offsets: T}, domain: [0, T]"
WRONG = [
    (OFFSETS, "dtype: int32, init: {integers: [0, 2]}", 6, "w has 3 axes: a matrix for each expert"),
    (OFFSETS, "dtype: int32, init: {offsets: -T}", 7, "it must be at least 1"),
    (OFFSETS, "dtype: int64, init: {offsets: T}", 7, "it must be a vector of int32"),
    (OFFSETS, "dtype: fp32, init: {offsets: T}", 7, "offsets are for int32"),
    ("shape: [E, 2*F, D], dtype: bf16", "shape: [E, 2*F, D], dtype: fp32", 6, "may be bf16, fp16"),
    ("shape: [E, 2*F, D], dtype: bf16", "shape: [E, 2, F, D], dtype: bf16", 6, "at most three"),
]


@pytest.mark.parametrize(("old", "new", "line", "says"), WRONG)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, old: str, new: str, line: int, says: str) -> None:
    path = write_changed(tmp_path / "gemm_grouped_swiglu.yaml", SPEC.read_text(encoding="utf-8"), old, new)
    with pytest.raises(SpecError, match=says) as error:
        load(path, check=False)
    assert error.value.line == line


def test_families_share_rows_in_every_way() -> None:
    spec = load(SPEC, check=False)
    assert routing("normal") == "balanced" and {routing(family) for family in EVERY} == set(ROUTINGS)
    sizes = {"T": 64, "E": 6, "D": 8, "F": 8}
    found = {name: set[str]() for name in ROUTINGS}
    for family in EVERY:
        for seed in range(4):
            counts = draw(spec, sizes, seed, family=family)["offsets"].diff().tolist()
            assert sum(counts) == 64 and min(counts) >= 0
            kinds = {"one": 64 in counts, "single": 1 in counts, "empty": counts.count(0) >= 2}
            found[routing(family)] |= {name for name, there in kinds.items() if there}
    assert "one" in found["one"] and "single" in found["single"] and "empty" in found["empty"]
    assert not found["balanced"] & {"one", "empty"}


def test_a_block_of_rows_has_the_offsets_of_its_rows() -> None:
    spec = load(SPEC, check=False)
    sizes = {"T": 96, "E": 5, "D": 16, "F": 8}
    inputs = draw(spec, sizes, 3, family="tiny")
    whole = reference.oracle(spec, inputs, sizes)
    dtypes = dict.fromkeys(spec.outputs, torch.float64)
    row = reference.row_dim(spec)
    assert row == ("T", False)
    blocked = reference._in_blocks(spec, inputs, sizes, row, 7, torch.float64, dtypes)
    for name, value in whole.items():
        torch.testing.assert_close(blocked[name], value, rtol=1e-12, atol=1e-12)
