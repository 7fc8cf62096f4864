"""Products with offsets have two forms. One form multiplies the rows of each expert by the expert's matrix.
The other form sums over the rows of each expert and returns one matrix for each expert."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import torch
from kernels import Tensors, signature, tensor, trace

from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.primitives.compiler.cubin import GROUPED, OWN, check_bulk
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import editable, lower
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.raw.error import RawError
from coda_agent.primitives.raw.language import check
from coda_agent.primitives.runtime.compile import compile_gemm, report
from coda_agent.primitives.runtime.launchable import LaunchError, check_offsets

X, OFFSETS, GATE = tensor("T, K"), tensor("E + 1", "int32"), tensor("T", "fp32")
UP = signature(
    {"x": X, "w": tensor("E, 2*F, K"), "offsets": OFFSETS, "gate": GATE},
    {"act": tensor("T, F", "fp32"), "sums": tensor("T", "fp32")},
)
UP_LINES = (
    "even, odd = pairs(gemm(x, w.mT, offsets) * per_row(gate))",
    "act = silu(even) * odd",
    "return {'act': act, 'sums': row_sums(act)}",
)
AS_IT_IS = signature({"x": X, "w": tensor("E, K, N"), "offsets": OFFSETS}, {"y": tensor("T, N", "fp32")})
OWN_PRODUCT = signature({"d": tensor("T, N"), "x": X, "offsets": OFFSETS}, {"dw": tensor("E, N, K", "fp32")})
OWN_LINE = "return {'dw': gemm(d.mT, x, offsets)}"
GATHERED = signature(
    {"x": tensor("S, K"), "w": tensor("E, N, K"), "offsets": OFFSETS, "index": tensor("T", "int32")},
    {"y": tensor("T, N", "fp32")},
)
GATHERED_LINE = "return {'y': gemm(x, w.mT, offsets, index)}"
COUNTS = [[4, 7, 5], [0, 16, 0], [1, 0, 15], [0, 0, 0, 16], [16], [1] * 16, [5, 0, 0, 11, 0]]


def drawn(counts: list[int], seed: int = 0, inner: int = 24, width: int = 16) -> Tensors:
    random, rows, experts = torch.Generator().manual_seed(seed), sum(counts), len(counts)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).bfloat16()

    return {
        "x": normal(rows, inner),
        "w": normal(experts, width, inner),
        "d": normal(rows, width),
        "gate": torch.rand(rows, generator=random),
        "offsets": torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
    }


def expert_of(offsets: torch.Tensor) -> list[int]:
    """Return the expert of each row."""
    return [e for e, n in enumerate(offsets.diff().tolist()) for _ in range(n)]


def run(program: Program, inputs: Tensors) -> Tensors:
    return interpret(program, {name: inputs[name] for name in program.signature.inputs})


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_each_row_meets_its_own_experts_matrix(counts: list[int]) -> None:
    inputs = drawn(counts)
    x, w = inputs["x"].double(), inputs["w"].double()
    rows = torch.stack([w[e] @ x[row] for row, e in enumerate(expert_of(inputs["offsets"]))])
    scaled = rows * inputs["gate"].double()[:, None]
    act = torch.nn.functional.silu(scaled[:, 0::2]) * scaled[:, 1::2]
    got = run(trace(UP, *UP_LINES), inputs)
    torch.testing.assert_close(got["act"].double(), act, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got["sums"].double(), act.sum(1), rtol=1e-4, atol=1e-3)
    turned = run(
        trace(AS_IT_IS, "return {'y': gemm(x, w, offsets)}"), inputs | {"w": inputs["w"].mT.contiguous()}
    )
    torch.testing.assert_close(turned["y"].double(), rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_each_experts_own_product_is_of_its_rows_alone(counts: list[int]) -> None:
    inputs = drawn(counts)
    d, x, expected = inputs["d"].double(), inputs["x"].double(), torch.zeros(len(counts), 16, 24).double()
    for row, expert in enumerate(expert_of(inputs["offsets"])):
        expected[expert] += torch.outer(d[row], x[row])
    got = run(trace(OWN_PRODUCT, OWN_LINE), inputs)
    torch.testing.assert_close(got["dw"].double(), expected, rtol=1e-4, atol=1e-4)


def test_rows_do_not_depend_on_other_experts() -> None:
    """For random numbers of rows, the output rows of each expert equal a plain product of the expert's rows
    and matrix. So the output rows do not depend on the rows of other experts."""
    random, plain = (
        Random(1),
        trace(signature({"x": X, "w": tensor("N, K")}, {"y": tensor("T, N")}), "return {'y': gemm(x, w.mT)}"),
    )
    made = trace(
        signature({"x": X, "w": tensor("E, N, K"), "offsets": OFFSETS}, {"y": tensor("T, N")}),
        "return {'y': gemm(x, w.mT, offsets)}",
    )
    for seed in range(20):
        inputs = drawn([random.choice((0, 1, 2, 9, 30)) for _ in range(random.randint(1, 8))] + [3], seed)
        got = run(made, inputs)["y"]
        for expert, (first, past) in enumerate(itertools.pairwise(inputs["offsets"].tolist())):
            if first < past:
                own = interpret(plain, {"x": inputs["x"][first:past], "w": inputs["w"][expert]})["y"]
                assert torch.equal(got[first:past], own)


GATHERS = {
    "repeated": lambda rows: [3] * rows,
    "reversed": lambda rows: [*range(rows)][::-1],
    "ends": lambda rows: [0, 19] * (rows // 2),
    "random": lambda rows: [Random(rows + i).randrange(20) for i in range(rows)],
}


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", GATHERS)
def test_a_gathered_product_is_the_product_of_gathered_rows(counts: list[int], name: str) -> None:
    inputs = drawn(counts) | {"x": drawn([20])["x"]}
    inputs["index"] = torch.tensor(GATHERS[name](sum(counts)), dtype=torch.int32)
    plain = trace(
        signature({"x": X, "w": tensor("E, N, K"), "offsets": OFFSETS}, {"y": tensor("T, N", "fp32")}),
        "return {'y': gemm(x, w.mT, offsets)}",
    )
    got = run(trace(GATHERED, GATHERED_LINE), inputs)["y"]
    copied = run(
        plain, inputs | {"x": torch.stack([inputs["x"][token] for token in inputs["index"].tolist()])}
    )
    assert torch.equal(got, copied["y"])


@pytest.mark.parametrize("index", [[0, 1, 2, -1], [0, 1, 2, 20], [-(2**31), 0, 0, 2**31 - 1]], ids=str)
def test_an_index_that_lies_is_refused(index: list[int]) -> None:
    inputs, program = drawn([1, 3]) | {"x": drawn([20])["x"]}, trace(GATHERED, GATHERED_LINE)
    inputs = {n: inputs[n] for n in ("x", "w", "offsets")} | {"index": torch.tensor(index, dtype=torch.int32)}
    with pytest.raises(ValueError, match="must be from 0 to 19"):
        interpret(program, inputs)
    with pytest.raises(LaunchError, match="'index': .* must be from 0 to 19"):
        check_offsets(program, inputs)
    check_offsets(program, inputs | {"index": inputs["index"].clamp(0, 19)})


WRONG = {"backwards": [0, 9, 4, 16], "short": [0, 4, 9, 15], "long": [0, 4, 9, 17], "late": [1, 4, 9, 16]}


@pytest.mark.parametrize("offsets", WRONG.values(), ids=WRONG)
def test_offsets_that_lie_are_refused(offsets: list[int]) -> None:
    inputs = drawn([4, 5, 7]) | {"offsets": torch.tensor(offsets, dtype=torch.int32)}
    for program in (trace(UP, *UP_LINES), trace(OWN_PRODUCT, OWN_LINE)):
        with pytest.raises(ValueError, match="must rise from 0 to 16"):
            run(program, inputs)
        with pytest.raises(LaunchError, match="'offsets': .* must rise from 0 to 16"):
            check_offsets(program, {name: inputs[name] for name in program.signature.inputs})
    inputs = drawn([4, 5, 7])
    check_offsets(trace(UP, *UP_LINES), {name: inputs[name] for name in UP.inputs})


REFUSED = {
    "no offsets": ("return {'y': gemm(x, w.mT)}", "needs row offsets", 4),
    "columns of A": ("return {'y': gemm(x.mT, w.mT, offsets)}", "one product per expert", 4),
    "other experts": ("return {'y': gemm(x, w2.mT, offsets)}", "one product per expert", 4),
    "fp32 offsets": ("return {'y': gemm(x, w.mT, floats)}", "an input of int32", 4),
    "fp32 index": ("return {'y': gemm(x, w.mT, offsets, gate)}", "an input of int32", 4),
    "index arithmetic": ("return {'y': gemm(x, w.mT, offsets, index + 1)}", "an input of int32", 4),
    "index of a matrix": ("return {'y': gemm(x, w.mT, offsets, x)}", "by an index", 4),
    "columns gathered": ("return {'y': gemm(x.mT, x, offsets, index)}", "gathers rows of x", 4),
    "arithmetic": ("return {'y': gemm(x, w.mT, offsets) + exp(w)}", "an operand of gemm only", 4),
    "columns": (
        "t = gemm(x, w.mT, offsets)\n    s = column_sums(t)\n    return {'y': t, 'columns': s}",
        "Return the tile",
        5,
    ),
    "two numbers of rows": (
        "return {'y': gemm(x, w.mT, offsets), 'other': gemm(x3, w.mT, offsets)}",
        "each number of rows",
        4,
    ),
    "heads": (
        "t = gemm(x, w.mT, offsets)\n    return {'y': t * per_head(v)}",
        "per_column",
        5,
    ),
    "range": (
        "t = gemm(x, w.mT, offsets)\n    r = column_range(t, 0, P)\n    return {'y': t, 'part': r}",
        "whole tile",
        5,
    ),
    "16-bit vector": (
        "t = gemm(x, w.mT, offsets)\n    return {'y': t * per_row(narrow)}",
        "declare the vector fp32",
        5,
    ),
}


@pytest.mark.parametrize(("lines", "says", "line"), REFUSED.values(), ids=REFUSED)
def test_what_would_mix_experts_is_refused_with_its_line(lines: str, says: str, line: int) -> None:
    inputs = {
        "x": X,
        "w": tensor("E, P + Q, K"),
        "w2": tensor("E + 1, P + Q, K"),
        "offsets": OFFSETS,
        "floats": tensor("E + 1", "fp32"),
        "v": tensor("P"),
        "gate": GATE,
        "index": tensor("T", "int32"),
        "narrow": tensor("T"),
        "x3": tensor("S, K"),
    }
    outputs = {"y": tensor("T, P + Q")}
    outputs |= {"other": tensor("S, P + Q")} if "'other'" in lines else {}
    outputs |= {"columns": tensor("P + Q", "fp32")} if "'columns'" in lines else {}
    outputs |= {"part": tensor("T, P")} if "'part'" in lines else {}
    if "per_head" in lines:
        inputs, outputs = inputs | {"w": tensor("E, 2*P, K")}, {"y": tensor("T, 2*P")}
    with pytest.raises(ProgramError, match=says) as refused:
        trace(signature(inputs, outputs, ("P",)), lines)
    assert refused.value.line == line


@pytest.mark.slow
@pytest.mark.parametrize("program", [trace(UP, *UP_LINES), trace(OWN_PRODUCT, OWN_LINE)], ids=["rows", "own"])
def test_its_text_is_edited_but_for_its_bounds(program: Program) -> None:
    text, one = editable(program), [Schedule(128, 128, True, 2, 1)]
    place = '        place = resources["place"]\n'
    more = text.replace(place, f"{place}        unused = 1\n")
    own, same = (report(KernelSource(program, edited=given), {}, one) for given in ("", more))
    kept = ("registers", "stack", "stages", "spill_loads", "tma_loads", "tma_stores", "own_launch")
    assert [[getattr(r, k) for k in kept] for r in own] == [[getattr(r, k) for k in kept] for r in same]
    lowered = KernelSource(program, edited=more).lowered
    assert callable(compile_gemm(lowered, lowered.gemms[0], one[0], {}))


BOUNDS = "class Bounds3(Bounds):\n    pass\n"


@pytest.mark.slow
def test_no_edit_changes_how_offsets_are_bounded() -> None:
    program = trace(OWN_PRODUCT, OWN_LINE)
    text, names = editable(program), ["Step0", "Bounds3"]
    check(text, names)
    for changed in (BOUNDS.replace("pass", "WARP = 1"), f"{BOUNDS}\n\nclass More(Bounds3):\n    WARP = 1\n"):
        with pytest.raises(RawError, match="holds pass and nothing else"):
            check(text.replace(BOUNDS, changed), names)
    edited = text.replace(BOUNDS, BOUNDS.replace("(Bounds)", ""))
    with pytest.raises(CompileError, match="must stay a class of Bounds"):
        report(KernelSource(program, edited=edited), {}, [Schedule(128, 128, True, 2, 1)])


def test_only_a_store_that_ends_with_an_experts_rows_is_compiled() -> None:
    check_bulk("UTMALDG.3D [UR8] ; UTMALDG.2D [UR12] ; UTMASTG.3D [UR28] ;", GROUPED)
    for wrong in ("UTMASTG.2D", "UTMAREDG.3D", "UTMALDG.4D"):
        with pytest.raises(CompileError, match=wrong):
            check_bulk(f"UTMALDG.3D [UR8] ; {wrong} [UR28] ;", GROUPED)
    check_bulk("UTMALDG.4D [UR8] ; UTMASTG.3D [UR28] ;", OWN)
    with pytest.raises(CompileError, match="UTMALDG.2D"):  # this load would read rows of the next expert
        check_bulk("UTMALDG.2D [UR8] ; UTMASTG.3D [UR28] ;", OWN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "probe"),
    zip([("y", "s"), ("lse", "z"), ("h",), ("e",)], PROBES * 2, strict=True),
    ids=["row sum", "logsumexp", "half as wide", "fp8"],
)
def test_every_kind_of_load_and_store_compiles_without_spills(
    names: tuple[str, ...], probe: Schedule
) -> None:
    inputs = {"x": X, "w": tensor("E, K, 2*N"), "offsets": OFFSETS, "r": tensor("T, 2*N")}
    inputs |= {"u": tensor("T, N", "fp32"), "b": tensor("2*N"), "gate": GATE, "i": tensor("T", "int32")}
    outputs = {"y": tensor("T, 2*N"), "h": tensor("T, N", "fp32"), "e": tensor("T, N", "fp8_e4m3")}
    outputs |= {name: tensor("T", "fp32") for name in ("s", "lse", "z")}
    texts = {"y": "t * per_row(gate)", "h": "h", "e": "0.5 * h"}
    texts |= {"s": "row_sums(t * t)", "lse": "row_logsumexp(t)", "z": "row_select(t, i)"}
    program = trace(
        signature(inputs, {name: outputs[name] for name in names}),
        "t = gemm(x, w, offsets) + per_column(b) + r",
        "even, odd = pairs(t)",
        "h = even * odd + u",
        f"return {{{', '.join(f'{name!r}: {texts[name]}' for name in names)}}}",
    )
    (gemm,) = lower(program).gemms
    assert not gemm.admits(Schedule(128, 128, True, 4, 1, split=True), {})
    found = report(KernelSource(program), {}, (probe,))
    assert {r.kernel[:5] for r in found} >= {"Step0", "Bound"}
    assert not any(r.spill_loads or r.spill_stores for r in found)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "probe"), zip(["bf16", "fp32"], PROBES, strict=True), ids=["bf16", "fp32"])
def test_each_experts_own_product_compiles_without_spills(dtype: str, probe: Schedule) -> None:
    own = OWN_PRODUCT._replace(outputs={"dw": tensor("E, N, K", dtype)})
    program = trace(own, OWN_LINE)
    found = report(KernelSource(program), {}, (probe,))
    assert [r.kernel[:5] for r in found] == ["Step0", "Bound"] and found[0].hgmma
    assert not any(r.spill_loads or r.spill_stores for r in found)


@pytest.mark.slow
def test_a_gathering_step_compiles_without_spills_and_stays_its_class() -> None:
    program, probe = trace(GATHERED, GATHERED_LINE), PROBES[0]._replace(cluster_m=2, cluster_n=1)
    (gemm,) = lower(program).gemms
    assert "one tile along N" in gemm.objection(probe._replace(cluster_m=1, cluster_n=2), {})
    found = report(KernelSource(program), {}, (probe,))
    assert found[0].hgmma and not any(r.spill_loads or r.spill_stores for r in found)
    text = editable(program)
    edited = text.replace("(GatheredGemm)", "(GroupedGemm)").replace(
        "gathered import Gathered", "grouped import Grouped"
    )
    with pytest.raises(CompileError, match="must stay a class of GatheredGemm"):
        report(KernelSource(program, edited=edited), {}, [probe])
