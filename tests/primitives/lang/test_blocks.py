"""Block scales of an fp8 output: the epilogue that stores a block also finds the block's largest
magnitude."""

from __future__ import annotations

import pytest
import torch
from kernels import Tensors, run_lowered, signature, tensor, trace

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import candidates
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import TILES, Schedule
from coda_agent.primitives.lang.signature import TensorType
from coda_agent.primitives.runtime.compile import report

# The kernel never reads ``block``. This input only declares the dimension B.
INPUTS = {"x": tensor("M, K"), "w": tensor("H*B, K"), "block": tensor("B")}
PAIRED = {"x": tensor("M, K"), "w": tensor("2*H*B, K"), "block": tensor("B")}
OUTPUTS = {"q": tensor("M, H*B", "fp8_e4m3"), "s": tensor("M, H", "fp32")}
SHAPES = {"gelu": INPUTS, "swiglu": PAIRED}
BODIES = {
    "gelu": (
        "t = gelu(gemm(x, w.mT))",
        "size = maximum(head_abs_max(t, B), 0.000001)",
        "return {'q': t * per_head(448 / size), 's': size / 448}",
    ),
    "swiglu": (
        "gate, up = pairs(gemm(x, w.mT))",
        "t = join(silu(gate) * up, silu(gate) * up)",
        "size = maximum(head_abs_max(t, 2 * B), 0.000001)",
        "return {'q': pairs(t * per_head(448 / size))[0], 's': size / 448}",
    ),
}


def blocks(name: str) -> Program:
    return trace(signature(SHAPES[name], OUTPUTS, ("B",)), *BODIES[name])


def drawn(name: str, rows: int, heads: int, width: int) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    shapes = {"x": (rows, 24), "w": (heads * width * (1 if name == "gelu" else 2), 24), "block": (width,)}
    return {n: torch.randn(s, generator=generator).bfloat16() for n, s in shapes.items()}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize(("heads", "width"), [(1, 32), (3, 32), (2, 64)])
def test_each_block_fills_the_range_by_its_own_scale(name: str, heads: int, width: int) -> None:
    program, inputs = blocks(name), drawn(name, 13, heads, width)
    got = sized(program, inputs)
    x, w = (inputs[n].double() for n in ("x", "w"))
    t = x @ w.mT
    if name == "gelu":
        t = torch.nn.functional.gelu(t, approximate="tanh")
    else:
        t = torch.nn.functional.silu(t[:, 0::2]) * t[:, 1::2]
    size = t.unflatten(1, (heads, width)).abs().amax(2)
    torch.testing.assert_close(got["s"].double(), size / 448, rtol=1e-5, atol=0)
    q = got["q"].double().unflatten(1, (heads, width))
    assert torch.equal(q.abs().amax(2), torch.full((13, heads), 448.0, dtype=torch.float64))
    error = (q * got["s"].double()[..., None] - t.unflatten(1, (heads, width))).abs()
    assert bool((error <= t.unflatten(1, (heads, width)).abs() * 2.0**-4 + size[..., None] * 2.0**-18).all())


def sized(program: Program, inputs: Tensors) -> Tensors:
    """Check that the lowered text computes the interpreter's outputs, but for rounding. Return the
    interpreter's outputs."""
    told, made = interpret(program, inputs), run_lowered(program, inputs)
    torch.testing.assert_close(made["s"], told["s"], rtol=1e-5, atol=0)
    assert (made["q"].view(torch.uint8) == told["q"].view(torch.uint8)).float().mean() > 0.99
    return told


@pytest.mark.parametrize(
    ("body", "remedy"),
    [("head_abs_max(pairs(t)[0], B)", "join(t, t)"), ("head_abs_max(join(t, t), 4 * B)", "abs(even)")],
)
def test_a_tile_of_another_width_is_refused_with_the_way_out(body: str, remedy: str) -> None:
    declared = signature(PAIRED, {"s": tensor("M, H", "fp32")}, ("B",))
    with pytest.raises(ProgramError) as refused:
        trace(declared, "t = gemm(x, w.mT)", f"return {{'s': {body}}}")
    assert refused.value.code == "width" and remedy in refused.value.message


# With pingpong and an fp8 output D, QuACK's epilogue works on subtiles of 64 columns. Such a subtile can hold
# two heads of 32 columns, or the end of one range and the start of the next range.
HEADS_OF_32 = {
    "statistic": (INPUTS, BODIES["gelu"], OUTPUTS),
    "table": (
        {"x": tensor("M, K"), "w": tensor("H*B, K"), "table": tensor("M, B")},
        ("return {'q': gemm(x, w.mT) * per_head(table)}",),
        {"q": OUTPUTS["q"]},
    ),
    "range": (
        PAIRED,
        ("t = gemm(x, w.mT)", "return {'q': t, 'r': column_range(t, H * B, H * B)}"),
        {"q": tensor("M, 2*H*B", "fp8_e4m3"), "r": tensor("M, H*B")},
    ),
}


@pytest.mark.parametrize("kind", HEADS_OF_32)
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "bf16"])
def test_no_subtile_holds_two_heads_or_the_start_of_a_range(kind: str, dtype: str) -> None:
    inputs, body, outputs = HEADS_OF_32[kind]
    returned = outputs | {"q": TensorType(outputs["q"].shape, dtype)}
    program = trace(signature(inputs, returned, ("B", "H")), *body)
    (gemm,) = lower(program).gemms
    assert gemm.d and gemm.d.node == program.outputs["q"]
    sizes = {"M": 64, "K": 64, "H": 1, "B": 32}
    refused = {t for t in TILES if not gemm.admits(Schedule(*t), sizes)}
    shared = {(m, n, p) for m, n, p in TILES if p and n % 64 == 0} if dtype != "bf16" else set()
    indivisible = {t for t in TILES if t[1] % 32} if kind != "range" else set()
    assert refused == shared | indivisible
    assert all(gemm.admits(Schedule(*t), sizes | {"B": 64}) for t in TILES if t[1] % 64 == 0)
    if shared:
        why = gemm.objection(Schedule(128, 128, True), sizes)
        assert why.startswith("a tile of 128 columns in subtiles of 64 does not hold")
        assert "multiples of 64" in why and candidates(gemm, sizes)


@pytest.mark.slow
def test_blocks_of_128_columns_compile_in_one_epilogue() -> None:
    (step,) = report(KernelSource(blocks("gelu")), {"B": 128}, (Schedule(128, 128, True, 2, 1),))
    assert step.registers <= 168 and step.hgmma > 0 and step.spill_loads < 100
