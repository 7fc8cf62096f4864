"""A program may return ranges of a tile's columns as separate outputs. These tests check the values of the
outputs, which programs are refused, and that the programs compile."""

from __future__ import annotations

import math

import pytest
import torch
from kernels import signature, tensor, trace
from machine import run_lowered

from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.primitives.compiler.cubin import check_bulk
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import PROBES, candidates
from coda_agent.primitives.frozen_names import device
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import TILES
from coda_agent.primitives.lang.signature import TensorType
from coda_agent.primitives.runtime.compile import report

INPUTS = {
    "x": tensor("M, K"),
    "w": tensor("2*H*P + 4*G*P, K"),
    "bias": tensor("2*H*P + 4*G*P"),
    "cos_sin": tensor("M, 2*P"),
}
APART = {"q": tensor("M, 2*H*P"), "k": tensor("M, 2*G*P"), "v": tensor("M, 2*G*P")}
LINES = (
    "t = gemm(x, w.mT) + per_column(bias)",
    "heads, groups = 2 * P * H, 2 * P * G",
    "even, odd = pairs(t)",
    "cos, sin = pairs(per_head(cos_sin))",
    "turned = join(even * cos - odd * sin, even * sin + odd * cos)",
    "kept = where(in_columns(t, 0, heads + groups), turned, t)",
)
ENDS = "'q': column_range(kept, 0, heads), 'k': column_range(kept, heads, groups)"
WHOLE = f"return {{{ENDS}, 'v': column_range(kept, heads + groups, groups)}}"


def program(outputs: dict[str, TensorType], *lines: str) -> Program:
    return trace(signature(INPUTS, outputs, ("H", "G", "P")), *LINES, *lines)


def drawn(sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(sizes["M"])
    return {
        name: torch.randn([d(sizes) for d in t.shape], generator=random).bfloat16()
        for name, t in INPUTS.items()
    }


def truth(i: dict[str, torch.Tensor], sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    heads, groups = 2 * sizes["H"] * sizes["P"], 2 * sizes["G"] * sizes["P"]
    t = i["x"].double() @ i["w"].double().mT + i["bias"].double()
    turn = torch.view_as_complex(i["cos_sin"].double().unflatten(1, (-1, 2)))[:, None]
    pairs = torch.view_as_complex(t[:, : heads + groups].unflatten(1, (-1, sizes["P"], 2)))
    turned = torch.view_as_real(pairs * turn).flatten(1)
    return {"q": turned[:, :heads], "k": turned[:, heads:], "v": t[:, heads + groups :]}


@pytest.mark.parametrize(
    "sizes",
    [
        {"M": rows, "K": inner, "H": h, "G": g, "P": p}
        for rows, inner in ((1, 8), (33, 24))
        for h, g, p in ((4, 1, 4), (3, 3, 8), (7, 2, 16))
    ],
    ids=str,
)
def test_each_range_is_its_columns(sizes: dict[str, int]) -> None:
    made, inputs = program(APART, WHOLE), drawn(sizes)
    expected = truth(inputs, sizes)
    for got in (interpret(made, inputs, sizes=sizes), run_lowered(made, inputs, sizes)):
        for name, value in got.items():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-2, atol=1e-2)


def test_a_program_reads_back_and_its_ranges_share_a_stage() -> None:
    made = program(APART, WHOLE)
    assert Program.from_json(made.to_json(), made.signature) == made
    (gemm,) = lower(made).gemms
    assert gemm.d is None and [a.role for a in gemm.arguments].count("store") == 1
    assert sorted(first({"H": 4, "G": 2, "P": 8}) for _, first in gemm.starts) == [0, 64, 96]


def test_ranges_of_two_dtypes_and_the_whole_tile_have_stages_of_their_own() -> None:
    outputs = APART | {"v": tensor("M, 2*G*P", "fp32"), "t": tensor("M, 2*H*P + 4*G*P")}
    made = program(outputs, WHOLE.replace("}", ", 't': kept}"))
    (gemm,) = lower(made).gemms
    assert gemm.d is not None and gemm.d.node == made.outputs["t"]
    assert [a.role for a in gemm.arguments].count("store") == 2
    sizes = {"M": 5, "K": 8, "H": 2, "G": 1, "P": 8}
    inputs = drawn(sizes)
    got, expected = run_lowered(made, inputs, sizes), interpret(made, inputs, sizes=sizes)
    assert all(torch.equal(got[name], expected[name]) for name in outputs)
    assert torch.equal(torch.cat([got["q"], got["k"], got["v"].bfloat16()], 1), got["t"])


def test_a_range_begins_anywhere() -> None:
    made = program({"q": tensor("M, 2*H*P")}, "return {'q': column_range(kept, G * P, 2 * H * P)}")
    sizes = {"M": 3, "K": 8, "H": 2, "G": 1, "P": 8}
    inputs = drawn(sizes)
    assert torch.equal(interpret(made, inputs, sizes=sizes)["q"], run_lowered(made, inputs, sizes)["q"])


def test_a_range_of_another_width_is_refused() -> None:
    with pytest.raises(ProgramError, match="take the range before pairs") as refused:
        program({"q": tensor("M, P")}, "return {'q': column_range(pairs(kept)[0], 0, P)}")
    assert refused.value.code == "width"


def test_a_hostile_range_is_refused() -> None:
    made = program(APART, WHOLE)
    for attribute in ("0", "0, 2*H*P, 1", "0, 9*H*P", "0, Q", "H*2*P, 2*G*P", "0, -2*G*P"):
        text = made.to_json().replace('"0, 2*H*P"', f'"{attribute}"')
        assert text != made.to_json()
        with pytest.raises(ProgramError):
            Program.from_json(text, made.signature)


def test_a_range_that_begins_inside_a_stage_fits_no_tile() -> None:
    made = program(APART, WHOLE)
    (gemm,) = lower(made).gemms
    starts = {"k": 2 * 3 * 8, "v": 2 * 3 * 8 + 2 * 2 * 8}
    assert gemm.torn({"H": 3, "G": 2, "P": 8}) == {made.outputs[name]: at for name, at in starts.items()}
    for h, g, p in ((3, 2, 8), (1, 1, 8), (2, 2, 8)):
        sizes = {"M": 64, "K": 64, "H": h, "G": g, "P": p}
        assert bool(candidates(gemm, sizes)) == (h == 2) == (not gemm.torn(sizes))
    assert "ranges from columns 48, 80 on (multiples of 32)" in gemm.wants({"H": 3, "G": 2, "P": 8})


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [(96, 64, 64), (32, 8, 56), (256, 72, 40), (0, 520, 8)], ids=str)
def test_each_column_of_a_range_is_stored_once_and_none_before_it(bounds: tuple[int, int, int]) -> None:
    first, extent, after = bounds
    stored = device("ranges").holds
    for tile in {n for _, n, _ in TILES}:
        stage = math.gcd(32, tile)
        ends = -(-(first + extent + after) // tile) * tile
        begins = [at - first for at in range(0, ends, stage) if stored(at - first, extent)]
        assert begins == list(range(0, extent, stage))


@pytest.mark.parametrize("wrong", ["UTMASTG.3D", "UTMALDG.4D", "UTMAREDG.1D"])
def test_a_bulk_copy_of_another_rank_is_refused(wrong: str) -> None:
    check_bulk("UTMALDG.2D.MULTICAST [UR12], [UR24], UR29 ; UTMASTG.2D [UR28], [UR12] ; UTMACMDFLUSH ;")
    with pytest.raises(CompileError, match=wrong) as refused:
        check_bulk(f"UTMASTG.2D [UR28], [UR12] ; {wrong} [UR28], [UR12] ;")
    assert refused.value.code == "bulk_copy"


@pytest.mark.slow
def test_ranges_compile_without_spills_as_bulk_stores_of_two_axes() -> None:
    for sizes, probe in (({"H": 28, "G": 4, "P": 64}, PROBES[:1]), ({"H": 3, "G": 2, "P": 16}, PROBES[1:])):
        given = {"M": 16384, "K": 4096} | sizes
        for each in report(KernelSource(program(APART, WHOLE)), given, probe):
            assert (each.spill_loads, each.spill_stores, each.stack) == (0, 0, 0), each
