"""If outputs are column ranges of one tile, the backward reads their gradients side by side, as one
tensor."""

from __future__ import annotations

import pytest
from kernels import signature, tensor, trace

from coda_agent.primitives.derive import derive
from coda_agent.primitives.derive.ranges import joined
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.partition import cut

SIZES = {"M": 16, "K": 8, "H": 3, "G": 2}
INPUTS = {"x": tensor("M, K"), "w": tensor("H + G, K"), "r": tensor("M", "fp32")}


def program(*ranges: str, **outputs: str) -> Program:
    shape = signature(INPUTS, {n: tensor(s) for n, s in outputs.items()}, static=("H", "G"))
    return trace(shape, "t = gemm(x, w.mT) * per_row(r)", f"return {{{', '.join(ranges)}}}")


WHOLE = program('"b": column_range(t, H, G)', '"a": column_range(t, 0, H)', b="M, G", a="M, H")
PART = program('"a": column_range(t, 0, H)', a="M, H")


def test_all_ranges_of_a_tile_are_the_tile() -> None:
    found = joined(WHOLE)
    assert found.parts == {"a_b": ("a", "b")} and found.program.signature.outputs == {
        "a_b": tensor("M, G + H")
    }
    assert joined(PART) == (PART, {})


def test_the_gradient_of_a_row_scale_needs_no_third_product() -> None:
    """The gradient of the row scale r needs the row sums of ``dt * t``. The ranges of t are stored side by
    side, as ``a_b``, so these sums read the stored values of t."""
    derived = derive(WHOLE, SIZES, positive=["r"])
    assert derived.program and derived.head and len(cut(derived.program).gemms) == 2
    assert "a_b" in derived.stored and {"d_a_b", "a_b"} <= derived.head.signature.inputs.keys()


def test_their_gradients_are_asked_for_together() -> None:
    assert derive(WHOLE, SIZES, of=["b", "a"]) == derive(WHOLE, SIZES, of=["a_b"]) == derive(WHOLE, SIZES)
    for asked in (["a"], ["c"]):
        with pytest.raises(ProgramError) as refused:
            derive(WHOLE, SIZES, of=asked)
        assert refused.value.code == "of" and "\n" not in refused.value.message


def test_some_columns_of_a_tile_have_no_gradient_to_come_in() -> None:
    with pytest.raises(ProgramError) as refused:
        derive(PART, SIZES, of=["a"])
    assert refused.value.code == "of" and "leave it out" in refused.value.message
