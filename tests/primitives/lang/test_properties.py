"""Random programs are traced or refused. A traced program survives JSON, agrees with fp64, and its lowered
text computes the same values.

Three programs are compiled for sm_90a, or two hundred with --thorough. Every step is compiled, as in the
compile gate. The tests record registers and spills as JUnit properties; with --junitxml, pytest writes them
to a file.
"""

from __future__ import annotations

import ast
import copy
import itertools
import json
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from eager import truth
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from kernels import CHAIN, Tensors, run_lowered, signature, source, tensor
from programs import Made, make, random_program

from coda_agent import primitives
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import OPERATIONS, Program
from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.signature import TensorType
from coda_agent.primitives.runtime.compile import report

pytestmark = pytest.mark.slow

# The largest relative error of an output that is rounded to nearest: half a unit in the last place. An fp32
# output is not rounded.
ROUNDING = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 0.0,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}
# The allowed error if all values are fp32. A product has at most 24 terms, followed by about a dozen
# operations. Each operation adds a few units of 2**-24 and amplifies earlier errors a little. The largest
# error in thousands of programs was 4e-6.
FP32 = 2e-5
# The allowed error if values are rounded to 16 bits between steps. Rounding changes each value by up to
# 2**-8, and later operations amplify this error.
CHAINED = 0.08
# The allowed difference between the interpreter and the lowered text, if both round between steps. Sometimes
# the two round a value to different neighbouring numbers.
FLIPPED = 0.02
REFUSALS = {"homeless", "pending", "sweep", "width", "updates", "dtype", "outputs", "size_choice", "grouped"}

PROPERTY = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=False,
)


def check_close(got: Tensors, expected: Tensors, slack: float) -> None:
    """Check that the error of each output is at most its rounding error plus ``slack`` times its typical
    magnitude. If the expected output is rounded too, its rounding error is added."""
    for name, value in got.items():
        exact = expected[name].double()
        size = max(exact.square().mean().sqrt().item(), 0.05)
        rounding = ROUNDING[value.dtype] + ROUNDING.get(expected[name].dtype, 0.0)
        # the distance between neighbouring subnormal numbers
        least = torch.finfo(value.dtype).tiny * torch.finfo(value.dtype).eps
        allowed = rounding * exact.abs() + least + slack * size
        off = ((value.double() - exact).abs() / allowed).max().item()
        assert value.shape == exact.shape
        assert off <= 1, f"{name}: {off:.3g} times what is allowed"


def check(made: Made, program: Program) -> None:
    """Check all properties of a program that can be checked without a compiler."""
    assert made.trace() == program
    text = program.to_json()
    again = Program.from_json(text, made.signature)
    assert again == program and again.hash == program.hash and again.to_json() == text
    sizes = made.sizes(program, Random(0), large=False)
    inputs = made.draw(sizes, len(text))
    got = interpret(program, inputs)
    exact = truth(made.source, made.signature, inputs, sizes)
    check_close(got, exact, CHAINED if rounds_between(program) else FP32)
    check_text(made, lower(program).text)
    assert lower(again).text == lower(program).text
    check_close(run_lowered(program, inputs), got, FLIPPED if rounds_between(program) else FP32)


def check_text(made: Made, text: str) -> None:
    """Check that the lowered text parses and contains no name of the program."""
    said: set[Any] = set()
    for node in ast.walk(ast.parse(text)):
        said |= {getattr(node, field, None) for field in ("id", "attr", "arg", "name")}
        said |= {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
    declared = made.signature
    own = {*declared.inputs, *declared.outputs, *declared.constants, *declared.dims, declared.name}
    assert not said & own


def rounds_between(program: Program) -> bool:
    """Return whether a step reads a value that an earlier kernel computed and stored."""
    steps = cut(program)
    return len(steps.gemms) > 1 or -1 in steps.finishes


def kernels(bold: float) -> st.SearchStrategy[Made]:
    """Return a strategy that makes random kernels. ``bold`` sets how often a kernel breaks a rule on
    purpose."""
    return st.randoms(use_true_random=False).map(lambda random: make(random, bold))


@settings(PROPERTY, max_examples=80)
@given(kernels(0))
def test_programs_by_the_rules_are_never_refused(made: Made) -> None:
    check(made, made.trace())


@settings(PROPERTY, max_examples=120)
@given(kernels(0.3))
def test_programs_are_right_or_refused(made: Made) -> None:
    try:
        program = made.trace()
    except ProgramError as error:
        event(f"refused: {error.code}")
        assert error.code in REFUSALS
        assert error.line is not None and error.message
        return
    gemms = lower(program).gemms
    event(f"gemms: {len(gemms)}, with offsets: {sum(g.offsets is not None for g in gemms)}")
    check(made, program)


def features(program: Program) -> set[object]:
    """Return the features of a program that matter to a compiler: its operations, and the arguments of its
    kernels."""
    lowered = lower(program)
    found: set[object] = {n.op for n in program.nodes}
    for gemm in lowered.gemms:
        found |= {("gemm", a.role, a.dtype, a.packed, a.rank) for a in gemm.arguments}
        found |= {(at, a.dtype, a.packed) for at, a in (("c", gemm.c), ("d", gemm.d)) if a}
        found |= {(gemm.dtype, gemm.a_transposed, gemm.b_transposed, gemm.offsets is not None, gemm.own)}
        found |= {("gathers", gemm.index is not None)}
    for vector in lowered.vectors:
        found |= {("vector", a.role, a.dtype, a.rank) for a in vector.arguments}
    return found


@cache
def varied(count: int) -> list[int]:
    """Return the seeds of ``count`` programs, chosen so that small programs together have many features."""
    found = {}
    for seed in range(max(60, 10 * count)):
        try:
            program = random_program(seed).trace()
        except ProgramError:
            continue
        found[seed] = features(program), len(program.nodes)
    chosen: list[int] = []
    seen: set[object] = set()
    for _ in range(count):
        best = max(found.keys() - set(chosen), key=lambda s: len(found[s][0] - seen) / found[s][1] ** 1.3)
        chosen.append(best)
        seen |= found[best][0]
    return chosen


def test_every_operation_occurs() -> None:
    programs = []
    for seed in range(150):
        try:
            programs.append(random_program(seed).trace())
        except ProgramError as error:
            assert error.code in REFUSALS
    assert {n.op for p in programs for n in p.nodes} == OPERATIONS.keys()
    assert len(programs) > 120  # a lower number means that the generator makes too many refused programs
    gemms = [g for p in programs for g in lower(p).gemms if g.offsets is not None]
    assert {g.own for g in gemms} == {False, True} and len(gemms) > 20
    assert any(g.index is not None for g in gemms)


@pytest.mark.parametrize("experts", [1, 2, 5])
def test_offsets_rise_and_leave_experts_without_rows(experts: int) -> None:
    """Some draws give all rows to one expert, so the other experts have none. If there are several experts,
    some draws give one expert all rows except one."""
    made = Made(signature({"o": tensor("E + 1", "int32")}, {}), "", {"o": ("offsets", "M")}, {})
    drawn = [made.draw({"E": experts, "M": 24}, seed)["o"].tolist() for seed in range(40)]
    assert all(len(o) == experts + 1 and o == sorted(o) and (o[0], o[-1]) == (0, 24) for o in drawn)
    counts = [sorted(b - a for a, b in itertools.pairwise(o)) for o in drawn]
    assert any(c[-1] == 24 for c in counts) and any(c[-2:] == [1, 23] for c in counts) == (experts > 1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "nth" in metafunc.fixturenames:
        count = 200 if metafunc.config.getoption("--thorough") else 3
        metafunc.parametrize(("nth", "count"), [(nth, count) for nth in range(count)])


def test_random_programs_compile(
    nth: int, count: int, record_property: Callable[[str, object], None]
) -> None:
    seed = varied(count)[nth]
    made = random_program(seed)
    program = made.trace()
    lowered = lower(program)
    sizes = made.sizes(program, Random(seed), large=True)
    probe = PROBES if count > 3 else (PROBES[nth % len(PROBES)],)
    compiled = report(KernelSource(program), sizes, probe)
    steps = [r for r in compiled if r.schedule]
    assert {r.kernel for r in steps} == {g.name for g in lowered.gemms}
    assert all(r.hgmma for r in steps)
    for r in compiled:
        tile = f"{r.schedule['tile_m']}x{r.schedule['tile_n']}: " if r.schedule else ""
        spilled = f"{r.spill_loads} loads and {r.spill_stores} stores spilled"
        record_property(r.kernel, f"{tile}{r.registers} registers, {spilled}")
    assert [r.kernel for r in compiled if not r.schedule] == [v.name for v in lowered.vectors]


INPUTS = {
    "x": tensor("M, K"),
    "w": tensor("2*F, K"),
    "r": tensor("M, 2*F"),
    "z": tensor("M, 4*F"),
    "v": tensor("M", "fp32"),
    "b": tensor("2*F"),
    "i": tensor("M", "int32"),
    "a": TensorType((), "fp32"),
}
NAMES = (
    "x",
    "w",
    "x.mT",
    "w.mT",
    "v",
    "b",
    "z",
    "r",
    "i",
    "a",
    "c",
    "1.5",
    "h",
    "t",
    "'s'",
    "None",
    "[]",
    "h.columns",
    "v.rows",
)
CALLS = tuple(n for n in primitives.__all__ if n != "kernel")


@st.composite
def nonsense(pick: st.DrawFn) -> list[str]:
    """Draw lines that apply random operations to random values, whether or not these fit together."""
    lines = ["h = t = gemm(x, w.mT)"]
    for _ in range(pick(st.integers(1, 4))):
        a, b, c = (pick(st.sampled_from(NAMES)) for _ in range(3))
        operator = pick(st.sampled_from(["+", "-", "*", "/", "<", ">=", "**", "@", "==", "and", "%"]))
        function = pick(st.sampled_from(CALLS))
        count = pick(st.integers(0, 3))
        line = pick(
            st.sampled_from(
                [
                    f"t = {a} {operator} {b}",
                    f"t = {function}({', '.join((a, b, c)[:count])})",
                    f"t = {function}({a})",
                    f"t = {a}[{b}]",
                    f"t, h = {a}, {b}",
                    f"t, h = {function}({a})",
                    f"t = -{a} if {b} else {c}",
                ]
            )
        )
        lines.append(line)
    return [*lines, f"return {{'o': {pick(st.sampled_from(NAMES))}}}"]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@settings(PROPERTY, max_examples=150)
@given(nonsense())
def test_nonsense_is_refused_in_words(lines: list[str]) -> None:
    declared = signature(INPUTS, {"o": tensor("M, 2*F")}, c=0.75)
    try:
        program = trace_source(source(declared, *lines), declared)
        lower(Program.from_json(program.to_json(), declared))
    except ProgramError as error:
        event(error.code)
        assert error.code and error.message
    else:
        event("accepted")


LEAVES: st.SearchStrategy[Any] = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        3,
        10**6,
        2**70,
        0.5,
        "",
        "x",
        "M",
        "K*K",
        "gemm",
        "add",
        "row_sums",
        "column_max",
        "row_select",
        "head_sums",
        "per_head",
        "column_index",
        "as_tile",
        "even",
        "join",
        "per_row",
        "transpose",
        "input",
        "constant",
        "dim",
        [],
        [0],
        [0, 0],
        [3, 3],
        {},
        {"0": {}},
        ["float", "0x1p3"],
        ["float", "nan"],
        ["input", [], "x"],
        ["dim", [], "N"],
        ["negative", [3], None],
        "\ud800",
        "\x00",
    ]
)


def places(data: Any) -> list[tuple[Any, Any]]:
    """Return a pair for every value inside ``data``: the dict or list that contains it, and its key or index
    there."""
    if not isinstance(data, dict | list):
        return []
    keys = list(data) if isinstance(data, dict) else range(len(data))
    return [place for key in keys for place in [(data, key), *places(data[key])]]


@st.composite
def tampered(pick: st.DrawFn) -> str:
    """Draw a program's JSON with one to three values overwritten at random places."""
    data = json.loads(CHAIN.program.to_json())
    for _ in range(pick(st.integers(1, 3))):
        container, key = pick(st.sampled_from(places(data)))
        container[key] = copy.deepcopy(pick(LEAVES))
    return json.dumps(data)


@settings(PROPERTY, max_examples=300)
@given(tampered())
@pytest.mark.parametrize("trusted", [True, False])
def test_tampered_programs_are_refused_or_well_formed(trusted: bool, text: str) -> None:
    try:
        program = Program.from_json(text, CHAIN.signature if trusted else None)
        assert Program.from_json(program.to_json()).hash == program.hash
        compile(lower(program).text, "<lowered>", "exec")
    except ProgramError as error:
        event(error.code)
        assert error.code and error.message
    else:
        event("accepted")
