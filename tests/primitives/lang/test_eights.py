"""fp8 outputs of every width are rounded once and saturate. A program whose later step would read such an
output is refused."""

from __future__ import annotations

import math

import pytest
import torch
from kernels import run_lowered, signature, tensor, trace

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.interpret import interpret, rounded
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.lang.signature import EIGHTS
from coda_agent.primitives.runtime.sass import disassemble

ENDS = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
INPUTS = {"x": tensor("M, K"), "w": tensor("2*N, K"), "scale": tensor("", "fp32")}
# The fp8 output for each width: half as wide as the GEMM, as wide, and twice as wide. The program also stores
# a bf16 tile as wide as the GEMM.
WIDTHS = {"half": "gate * up * scale", "one": "t * scale", "double": "join(t * scale, t + scale)"}
SHAPES = {"half": "M, N", "one": "M, 2*N", "double": "M, 4*N"}


def stores(width: str, dtype: str) -> Program:
    outputs = {"y": tensor(SHAPES[width], dtype), "amax": tensor("M", "fp32"), "t2": tensor("M, 2*N")}
    return trace(
        signature(INPUTS, outputs),
        "t = gemm(x, w.mT)",
        "gate, up = pairs(t)",
        f"y = {WIDTHS[width]}",
        "return {'y': y, 'amax': row_abs_max(y), 't2': t * 2}",
    )


def significands(dtype: str) -> list[float]:
    """Return every finite, non-negative value of an fp8 dtype, computed from the meaning of its bits."""
    mantissa, bias, top = {"fp8_e4m3": (3, 7, 0x7E), "fp8_e5m2": (2, 15, 0x7B)}[dtype]
    found = []
    for code in range(top + 1):
        exponent, fraction = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
        normal = exponent > 0
        found.append(math.ldexp(normal + fraction, max(exponent, 1) - bias))
    return found


@pytest.mark.parametrize("dtype", EIGHTS)
def test_values_round_to_the_nearest_that_the_dtype_holds(dtype: str) -> None:
    held = torch.tensor(significands(dtype), dtype=torch.float64)
    assert held.max() == ENDS[dtype]
    middles = (held[1:] + held[:-1]) / 2
    near = torch.cat([held, middles * (1 - 1e-6), middles * (1 + 1e-6), middles])
    every = torch.cat([near, -near])
    got = rounded(every.float(), dtype).double()
    error = (got - every).abs()
    assert torch.equal(error, (every.abs()[:, None] - held).abs().amin(1))
    last = rounded(middles.float(), dtype).view(torch.uint8) & 1
    assert not last.any()  # ties go to the even neighbour


@pytest.mark.parametrize("dtype", EIGHTS)
def test_what_lies_beyond_the_range_becomes_its_end(dtype: str) -> None:
    end = ENDS[dtype]
    given = torch.tensor([end, end * 1.04, end * 1.2, 1e30, math.inf, -math.inf, math.nan])
    got = rounded(given, dtype).float()
    assert got[:6].tolist() == [end] * 5 + [-end] and got[6].isnan()


@pytest.mark.parametrize("dtype", EIGHTS)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_lowered_text_stores_what_the_interpreter_says(width: str, dtype: str) -> None:
    program = stores(width, dtype)
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(n, 16, generator=generator) for n in (13, 16))
    inputs = {"x": (8 * x).bfloat16(), "w": w.bfloat16(), "scale": torch.tensor(ENDS[dtype] / 40)}
    inputs["x"][0, 0], inputs["x"][1, 0] = math.inf, math.nan
    told, made = interpret(program, inputs), run_lowered(program, inputs)
    assert told["y"].dtype == made["y"].dtype
    assert told["y"][1].float().isnan().all()
    ends = told["y"].float().abs() == ENDS[dtype]
    assert 0.02 < ends.float().mean() < 0.9
    same = told["y"].view(torch.uint8) == made["y"].view(torch.uint8)
    assert same[[0, *range(2, 13)]].float().mean() > 0.999  # a sum in another order may round differently


def test_each_width_has_its_own_store() -> None:
    texts = {width: lower(stores(width, "fp8_e4m3")).text for width in WIDTHS}
    assert "EightStore(" in texts["half"] and "put_four(" in texts["double"]
    assert "EightStore(" not in texts["one"] and "put_four(" not in texts["one"]


def test_a_statistic_of_heads_is_not_stored_in_fp8() -> None:
    inputs = {"x": tensor("M, K"), "w": tensor("2*H*P, K")}
    declared = signature(inputs, {"y": tensor("M, H", "fp8_e4m3")}, ("P",))
    with pytest.raises(ProgramError) as refused:
        trace(declared, "return {'y': head_sums(gemm(x, w.mT), 2 * P)}")
    assert (refused.value.code, refused.value.line) == ("output_dtype", 4)


@pytest.mark.parametrize(
    ("later", "line"),
    [("gemm(x, v.mT) + y", 4), ("gemm(y, v.mT)", 5), ("gemm(y, y.mT)", 5), ("gemm(x, v.mT) * y", 4)],
)
def test_a_later_step_does_not_read_what_was_rounded_to_fp8(later: str, line: int) -> None:
    inputs = {"x": tensor("M, N"), "w": tensor("N, N"), "v": tensor("N, N")}
    square = "y, y" in later
    outputs = {"y": tensor("M, N", "fp8_e4m3"), "z": tensor("M, M" if square else "M, N")}
    with pytest.raises(ProgramError) as refused:
        trace(signature(inputs, outputs), "y = gemm(x, w.mT)", f"return {{'y': y, 'z': {later}}}")
    assert (refused.value.code, refused.value.line) == ("dtype", line)


def test_coarse_instructions_may_serve_an_fp8_output_alone() -> None:
    def text(dtype: str) -> str:
        declared = signature(INPUTS, {"y": tensor("M, 2*N", dtype)})
        whole = lower(trace(declared, "return {'y': silu(gemm(x, w.mT)) * scale}")).text
        return whole[whole.index("class") :]

    assert text("fp8_e4m3").count("fast") == text("bf16").count("fast") > 0 == text("fp16").count("fast")


@pytest.mark.slow
def test_every_width_compiles_to_conversions_that_saturate() -> None:
    """One program contains all three widths, because compiling three programs would take three times as
    long."""
    dtypes = {"half": "fp8_e4m3", "one": "fp8_e5m2", "double": "fp8_e4m3"}
    program = trace(
        signature(INPUTS, {width: tensor(SHAPES[width], dtype) for width, dtype in dtypes.items()}),
        "t = gemm(x, w.mT)",
        "gate, up = pairs(t)",
        f"return {{{', '.join(f'{width!r}: {WIDTHS[width]}' for width in dtypes)}}}",
    )
    code, *_ = disassemble(KernelSource(program, {0: Schedule(128, 128, True, 2, 1)}), {})
    assert code.total()["HGMMA"] and code.total()["spill"] <= 10
    bulk = [i.text for i in code.instructions if "UTMASTG" in i.text]
    assert len(bulk) >= len(dtypes) and all("UTMASTG.2D" in text for text in bulk)
    pairs = dict.fromkeys(EIGHTS, 0)  # the number of conversion instructions; each converts two values
    for instruction in code.instructions:
        for dtype in EIGHTS:
            if dtype[4:].upper() in instruction.text:
                assert "F2FP.SATFINITE" in instruction.text
                pairs[dtype] += 1
    # A thread has 128 of a tile's accumulators. The half-wide output has 64 values for each thread, the
    # output of width one has 128, and the double-wide output has 256.
    assert pairs == {"fp8_e4m3": (64 + 256) // 2, "fp8_e5m2": 128 // 2}
