"""Tests of sizes that no case of a spec has. A kernel must run at these sizes, and cannot be fitted to
them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from authoring import SHIPPED, SPECS, kernel_of, program_of

from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import candidates
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.runtime.launchable import alignment_errors
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics.sizes import (
    ELEMENTS,
    LARGEST,
    LARGEST_ON_CPU,
    activation_dims,
    between,
    hidden,
    row_dims,
    small_sizes,
    together,
)
from coda_agent.verifier.spec.file import of_text
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import OutputSpec, TensorSpec


def spec_of(name: str) -> Spec:
    return load(SPECS / f"{name}.yaml", check=False)


def row_of(spec: Spec) -> str:
    return "M" if "M" in spec.dims else "T"


def extents(spec: Spec, sizes: dict[str, int]) -> dict[str, int]:
    tensors: list[TensorSpec | OutputSpec] = [*spec.inputs.values(), *spec.outputs.values()]
    return {str(d): d(sizes) for t in tensors for d in t.shape}


@pytest.mark.parametrize("name", SHIPPED)
def test_small_sizes_tell_axes_apart(name: str) -> None:
    spec = spec_of(name)
    large, small = small_sizes(spec)
    for sizes in (large, small):
        # if a spec has several static dims, these dims take their sizes from a case
        static = [sizes[dim] for dim in spec.static] if len(spec.static) > 1 else []
        free = [size for dim, size in sizes.items() if not static or dim not in spec.static]
        assert sizes.keys() == spec.dims.keys() and len(set(free)) == len(free)
        assert all(size % 8 == 0 for size in free)
        assert max(extents(spec, sizes).values()) <= (1 << 14 if static else 1024)
    assert any(size % 128 for size in large.values()) and max(large.values()) > 256
    assert small[row_of(spec)] < 128


@pytest.mark.parametrize("name", SHIPPED)
def test_hidden_sizes_can_be_launched_and_are_told_apart(name: str) -> None:
    spec = spec_of(name)
    program = program_of(spec, kernel_of(name))
    for largest in (LARGEST, LARGEST_ON_CPU):
        for seed in range(6):
            sizes = hidden(spec, seed, largest)
            assert list(sizes) == list(spec.dims) and alignment_errors(program, sizes) == []
            found = extents(spec, sizes)
            assert len(set(found.values())) == len(found) and min(found.values()) > 0
            assert max(found.values()) <= largest
            free = set(spec.dims) - set(spec.static)
            assert all(sizes[dim] % 64 and sizes[dim] != c.sizes[dim] for dim in free for c in spec.cases)
            assert any(all(sizes[dim] == c.sizes[dim] for dim in spec.static) for c in spec.cases)
            assert all(candidates(gemm, sizes) for gemm in lower(program).gemms)


def test_a_seed_gives_the_same_sizes_again_and_another_others() -> None:
    spec = spec_of("gemm_residual_rmsnorm_gemm")
    drawn = [hidden(spec, seed) for seed in range(20)]
    assert drawn == [hidden(spec, seed) for seed in range(20)]
    assert len({tuple(sizes.values()) for sizes in drawn}) == 20
    assert {sizes["M"] % 8 for sizes in drawn} >= {1, 3, 5, 7}  # odd numbers of rows are aligned, too
    assert max(sizes["M"] for sizes in drawn) > 750 and {sizes["K"] % 16 for sizes in drawn} == {0, 8}


@pytest.mark.parametrize("name", SHIPPED)
def test_one_row(name: str) -> None:
    spec = spec_of(name)
    rows = row_of(spec)
    assert row_dims(spec) == {rows}
    sizes = hidden(spec, 3, LARGEST_ON_CPU, rows=1)
    assert sizes[rows] == 1 and min(size for dim, size in sizes.items() if dim != rows) > 0


def changed(name: str, *changes: tuple[str, str]) -> Spec:
    """The spec with these replacements of text."""
    text = (SPECS / f"{name}.yaml").read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return of_text(Path(f"{name}.yaml"), text, Spec, lambda spec: None)


def test_one_row_may_be_a_case_of_the_spec() -> None:
    spec = changed("gemm_rmsnorm", ("M: 128,", "M: 1,"))
    sizes = hidden(spec, 3, rows=1)
    assert sizes["M"] == 1 and all(sizes[dim] != case.sizes[dim] for dim in "KN" for case in spec.cases)


def test_two_dims_may_count_rows() -> None:
    """N leads the weight and a bias, and no output has columns."""
    spec = changed(
        "gemm_row_abs_max",
        ("outputs:\n  y:    {shape: [M, N], dtype: bf16}\n", "  bias: {shape: [N], dtype: bf16}\noutputs:\n"),
        ("  y = x @ w.mT\n  amax = y.abs().amax(-1)\n", "  amax = (x @ w.mT + bias).abs().amax(-1)\n"),
    )
    assert row_dims(spec) == {"M", "N"}
    sizes = hidden(spec, 3, rows=1)
    assert sizes["M"] == sizes["N"] == 1 and sizes["K"] > 1


def test_gathered_rows_are_activations_though_they_count_other_tokens() -> None:
    assert activation_dims(spec_of("gemm_gathered_swiglu")) == {"M", "T"}
    assert activation_dims(spec_of("gemm_grouped_swiglu")) == {"T"}


def test_weights_that_only_their_rows_name_are_no_activations() -> None:
    # V is the first dim of w and never the inner dim
    unstored = spec_of("gemm_partial_cross_entropy_unstored")
    assert "V" not in row_dims(unstored)


@pytest.mark.parametrize("name", SHIPPED)
def test_all_dims_are_long_at_once(name: str) -> None:
    spec = spec_of(name)
    (sizes,) = together(spec, 4)
    free = [dim for dim in spec.dims if dim not in (*spec.static, "E")]  # not E: there are few experts
    found = extents(spec, sizes)
    longest = {dim: max(n for text, n in found.items() if dim in Dim.parse(text).names) for dim in free}
    assert min(longest.values()) > 700 and max(found.values()) <= 1024


def test_static_dims_may_leave_no_room_for_that() -> None:
    spec = spec_of("gemm_rmsnorm_swiglu")
    large = spec.model_copy(update={"static": ("D",), "cases": spec.cases[:1]})
    assert not list(together(large, 4))


@pytest.mark.parametrize("name", SHIPPED)
def test_each_octave_up_to_the_largest_case_has_sizes_that_no_case_has(name: str) -> None:
    spec = spec_of(name)
    program = program_of(spec, kernel_of(name))
    drawn = list(between(spec, 4))
    for dim in set(spec.dims) - set(spec.static):
        cases = {case.sizes[dim] for case in spec.cases}
        found = [sizes[dim] for d, sizes in drawn if d == dim]
        assert not cases & set(found) and max(found) < max(cases)
        # At least four heads (256 columns) are drawn; ``ELEMENTS`` allows 8192 rows of 256 columns.
        most = 8191 if "qk" in name and dim == "M" else max(cases)
        whole = [power for power in range(6, 20) if 2 ** (power + 1) <= most]
        for octave in (range(2**power, 2 ** (power + 1)) for power in whole):
            many = [n for n in found if n in octave]
            ragged = [n for n in many if n % 64]
            assert len(ragged) == 1 and len(many) <= 2, (dim, octave)
            assert (
                len(many) == 2 or octave.start < 256
            )  # 64 or 128 may be a case's size, or lie in the half of the octave for ragged sizes
    for _, sizes in drawn:
        assert alignment_errors(program, sizes) == []
        tensors: list[TensorSpec | OutputSpec] = [*spec.inputs.values(), *spec.outputs.values()]
        assert all(math.prod(d(sizes) for d in t.shape) <= ELEMENTS for t in tensors)


def test_what_lies_between_is_drawn_anywhere_and_at_round_sizes_too() -> None:
    spec = spec_of("gemm_residual_partial_rmsnorm")
    drawn = [list(between(spec, seed)) for seed in range(120)]
    assert drawn[:2] == [list(between(spec, seed)) for seed in range(2)] and drawn[0] != drawn[1]
    by_seed = [{sizes["N"] for dim, sizes in once if dim == "N"} for once in drawn]
    found = [n for once in by_seed for n in once]
    for low, high in ((1504, 2040), (2100, 2400), (3800, 4090), (4100, 5000), (7000, 8190)):
        assert sum(low < n < high for n in found) > 12, (low, high)
    assert {512, 1024, 3072, 5120, 6144} <= set(found)
    assert all(any(2048 < n < 4096 for n in once) for once in by_seed)  # every draw has a size in this octave


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(InvalidInput, match="spec gemm_rope: no sizes beside its cases"):
        hidden(spec_of("gemm_rope"), 0, rows=64)  # hidden sizes are no multiples of half a tile, 64
