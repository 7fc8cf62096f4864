"""A program is cut into GEMM steps. The tests check what each step computes, stores, loads and finishes, and
which programs are refused."""

from __future__ import annotations

import time

import pytest
from kernels import (
    BACKWARD,
    CHAIN,
    CROSS_ENTROPY,
    NORM,
    QK_NORM,
    SWIGLU,
    WIDTHS,
    signature,
    source,
    tensor,
    trace,
)

from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import MAX_NODES, Node, Program
from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.signature import Signature, TensorType
from coda_agent.primitives.lang.steps import GemmStep, Steps

INPUTS = {
    "x": tensor("M, K"),
    "w": tensor("N, K"),
    "q": tensor("N, N"),
    "wide": tensor("2*N, N"),
    "p": tensor("P, N"),
    "r": tensor("M, N"),
    "z": tensor("M, 2*N"),
    "v": tensor("M", "fp32"),
    "b": tensor("N"),
    "b2": tensor("2*N"),
    "four": tensor("4*N, N"),
    "i": tensor("M", "int32"),
}
H = "h = gemm(x, w.mT)"


def given(**outputs: TensorType) -> Signature:
    return signature(INPUTS, outputs)


def tiles(*names: str) -> Signature:
    return given(**dict.fromkeys(names, tensor("M, N")))


ONE = tiles("o")


def said(program: Program, nodes: list[int]) -> list[str]:
    """Return short names of the nodes: an output's name, a leaf's name, or else the operation."""
    names = {index: name for name, index in program.outputs.items()}
    return [names.get(i) or str(program.nodes[i].attribute or program.nodes[i].op) for i in nodes]


def summary(program: Program, step: GemmStep) -> dict[str, list[str]]:
    spread = [program.nodes[i].args[0] for i in step.vectors]
    found = {
        "stores": said(program, step.stores),
        "loads": said(program, step.loads),
        "spreads": said(program, spread),
        "sums": said(program, [program.nodes[r].args[0] for r in step.reductions]),
        "scalars": said(program, step.scalars),
    }
    return {k: v for k, v in found.items() if v}


def finishes(program: Program, steps: Steps) -> dict[int, list[str]]:
    return {stage: said(program, list(members)) for stage, members in steps.finishes.items()}


def refused(given: Signature, *lines: str) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        trace_source(source(given, *lines), given)
    return caught.value


def test_norm_is_one_step() -> None:
    program = NORM.program
    steps = cut(program)
    assert [summary(program, s) for s in steps.gemms] == [
        {"stores": ["h", "hg"], "loads": ["x"], "spreads": ["gamma"], "sums": ["multiply"]}
    ]
    assert finishes(program, steps) == {0: ["rstd"]}


def test_widths_are_relative_to_the_gemm() -> None:
    program = SWIGLU.program
    steps = cut(program)
    assert steps.width[0, program.outputs["preact"]] == 1
    assert steps.width[0, program.outputs["act"]] == 0.5
    program = BACKWARD.program
    steps = cut(program)
    assert steps.width[0, program.outputs["dz"]] == 2
    assert steps.width[0, program.outputs["act"]] == 1
    assert steps.width[0, steps.gemms[0].loads[0]] == 2


def test_a_tile_of_inputs_alone_rides_with_the_step_that_loads_them() -> None:
    """SwiGLU's backward recomputes the activation in the step that loads z, although the activation does not
    depend on this step's accumulator."""
    program = BACKWARD.program
    (step,) = cut(program).gemms
    assert summary(program, step) == {"stores": ["act", "dz"], "loads": ["z"], "sums": ["add"]}


def test_a_tile_of_inputs_and_a_sum_rides_where_the_sum_is_final() -> None:
    """Both steps load r, but only the second step starts after h's sums are complete."""
    lines = (H, "g = gemm(h + r, q) + r", "return {'o': g, 't': r * per_row(row_sums(h))}")
    program = trace(tiles("o", "t"), *lines)
    first, second = cut(program).gemms
    assert said(program, first.loads) == said(program, second.loads) == ["r"]
    assert said(program, second.stores) == ["o", "t"]


def test_a_row_scale_deferred_past_the_next_gemm() -> None:
    program = CHAIN.program
    steps = cut(program)
    first, second = steps.gemms
    assert summary(program, first) == {
        "stores": ["h", "multiply"],
        "loads": ["x"],
        "spreads": ["gamma"],
        "sums": ["multiply"],
    }
    assert summary(program, second) == {"stores": ["up"], "spreads": ["rsqrt"]}
    # the vector rsqrt is finished after the first step; the second step reads rsqrt and scales rows by it
    assert finishes(program, steps) == {0: ["rsqrt"]}
    assert [program.nodes[s.gemm].op for s in steps.gemms] == ["gemm", "gemm"]


def test_a_tile_read_back_is_stored_by_its_own_step() -> None:
    program = trace(ONE, H, "t = silu(h)", "return {'o': t - gemm(r, q)}")
    first, last = cut(program).gemms
    assert [program.nodes[i].op for i in last.loads] == ["silu"]
    assert first.stores == last.loads and first.loads == []


def test_an_expression_that_waits_for_a_vector_is_computed_where_it_can_be() -> None:
    """``h * per_row(rstd)`` needs the sums of complete rows of h. The step of the next GEMM reads h back and
    computes this expression."""
    lines = (H, "n = h * per_row(rsqrt(row_sums(h * h)))", "return {'o': gemm(h, q) + n}")
    program = trace(ONE, *lines)
    first, second = cut(program).gemms
    h = program.outputs["o"]
    assert first.stores == second.loads == [first.gemm]
    assert [program.nodes[i].op for i in second.body] == ["gemm", "multiply", "add"] and second.body[-1] == h
    assert [program.nodes[i].op for i in first.body] == ["gemm", "multiply"]


def test_vectors_are_finished_once_their_sums_are() -> None:
    outputs = given(early=tensor("M", "fp32"), middle=tensor("M", "fp32"), late=tensor("M", "fp32"))
    lines = (
        H,
        "s = row_sums(h)",
        "g = gemm(h, q) * per_row(s + 1)",
        "return {'early': exp(v), 'middle': s * v, 'late': row_sums(g) + s}",
    )
    program = trace(outputs, *lines)
    assert finishes(program, cut(program)) == {-1: ["early"], 0: ["add", "middle"], 1: ["late"]}


def test_a_computed_scalar_is_part_of_the_body() -> None:
    program = trace(ONE, H, "return {'o': h * (1 / h.columns)}")
    (step,) = cut(program).gemms
    assert said(program, step.scalars) == ["N"]
    assert [program.nodes[i].op for i in step.body] == ["gemm", "divide", "multiply"]


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_independent_gemms_run_in_the_order_that_their_sums_ask_for(names: tuple[str, str]) -> None:
    """If a sum of h is spread over g, the step of h runs before the step of g. The names of the outputs do
    not change this order."""
    plain, scaled = names
    lines = (H, "g = gemm(r, q)", f"return {{'{plain}': g * 2, '{scaled}': g * per_row(row_sums(h))}}")
    program = trace(tiles(*names), *lines)
    first, second = cut(program).gemms
    assert summary(program, first) == {"sums": ["gemm"]}
    assert sorted(said(program, second.stores)) == ["a", "b"]
    assert trace(ONE, H, "return {'o': gemm(r, q) * per_row(row_sums(h))}").nodes


def test_gemms_that_wait_for_each_others_sums_have_no_order() -> None:
    lines = (H, "g = gemm(r, q)", "return {'a': h * per_row(row_sums(g)), 'b': g * per_row(row_sums(h))}")
    assert refused(tiles("a", "b"), *lines).code == "pending"


HOMELESS = "belongs to no GEMM"
PENDING = "a row scale commutes with the next matmul, so write gemm(t, w) * per_row(scale)"
S = "s = row_sums(h * h)"

REFUSED: dict[str, tuple[Signature, tuple[str, ...], str, int, str]] = {
    "output of inputs": (ONE, (H, "t = r * 2", "return {'o': t}"), "homeless", 5, f"output 'o' {HOMELESS}"),
    "operand of inputs": (
        ONE,
        ("t = r * per_column(b)", "return {'o': gemm(t, q)}"),
        "homeless",
        4,
        f"this operand of gemm {HOMELESS}",
    ),
    "sum of inputs": (
        given(o=tensor("M, N"), s=tensor("M", "fp32")),
        (H, "t = r * r", "return {'o': h, 's': row_sums(t)}"),
        "homeless",
        5,
        f"the argument of row_sums {HOMELESS}",
    ),
    "operand of inputs that only a later step loads": (
        tiles("a", "c", "d"),
        ("t = r * 2", "a = gemm(t, q)", "c = gemm(a, q) + r", "return {'a': a, 'c': c, 'd': gemm(t, q.mT)}"),
        "homeless",
        4,
        f"this operand of gemm {HOMELESS}",
    ),
    "no gemm": (given(o=tensor("M", "fp32")), ("return {'o': exp(v)}",), "homeless", 4, "calls no gemm"),
    "scaled before the row is done": (
        ONE,
        (H, S, "t = h * per_row(s)", "return {'o': t}"),
        "pending",
        6,
        "output 'o' needs a reduction",
    ),
    "scaled operand": (
        ONE,
        (H, S, "t = h * per_row(s)", "return {'o': gemm(t, q)}"),
        "pending",
        6,
        PENDING,
    ),
    "sum of what is scaled": (
        given(o=tensor("M", "fp32")),
        (H, S, "t = h * per_row(s)", "return {'o': row_sums(t)}"),
        "pending",
        6,
        "the argument of row_sums needs a reduction",
    ),
    "output is an input": (ONE, (H, "return {'o': r}"), "outputs", 5, "output 'o' is the input 'r' itself"),
    "output is an input vector": (
        given(o=tensor("M, N"), s=tensor("M", "fp32")),
        (H, "return {'o': h, 's': v}"),
        "outputs",
        5,
        "output 's' is the input 'v' itself",
    ),
    "outputs are one tile": (
        tiles("a", "b"),
        (H, "return {'b': h, 'a': h}"),
        "outputs",
        4,
        "outputs 'a' and 'b' are one value",
    ),
    "outputs are equal tiles": (
        tiles("a", "b"),
        (H, "t = h + 1", "return {'b': t, 'a': gemm(x, w.mT) + 1.0}"),
        "outputs",
        5,
        "outputs 'a' and 'b' are one value",
    ),
    "outputs are one vector": (
        given(a=tensor("M", "fp32"), b=tensor("M", "fp32")),
        (H, "return {'a': row_sums(h), 'b': row_sums(h)}"),
        "outputs",
        5,
        "outputs 'a' and 'b' are one value",
    ),
    "a quarter": (
        ONE,
        ("f, _ = pairs(gemm(r, four.mT))", "t, _ = pairs(f)", "return {'o': t}"),
        "width",
        5,
        "a tile [M, N] in the epilogue of a gemm [M, 4*N]",
    ),
    "four times": (
        given(o=tensor("M, 4*N")),
        (H, "d = join(h, h)", "return {'o': join(d, d)}"),
        "width",
        6,
        "half, once or twice",
    ),
    "per_column of a quarter": (
        ONE,
        ("f, _ = pairs(gemm(r, four.mT))", "t, _ = pairs(f)", "return {'o': gemm(t * per_column(b), q)}"),
        "width",
        6,
        "in the epilogue of a gemm [M, 4*N]",
    ),
    "operand of inputs made of an output that comes later": (
        tiles("o", "u"),
        (H, "u = r * 2", "t = u + 1", "return {'o': gemm(t, q) + h + r, 'u': u}"),
        "homeless",
        6,
        f"this operand of gemm {HOMELESS}",
    ),
    "selected from half": (
        given(s=tensor("M", "fp32")),
        (H, "return {'s': row_select(pairs(gemm(h, wide.mT))[0], i)}"),
        "width",
        5,
        "row_select takes a tile as wide as its gemm: write row_sums(where(",
    ),
    "selected from inputs": (
        given(o=tensor("M, N"), s=tensor("M", "fp32")),
        (H, "t = r * r", "return {'o': h, 's': row_select(t, i)}"),
        "homeless",
        5,
        f"the argument of row_select {HOMELESS}",
    ),
    "scaled before the column is done": (
        ONE,
        (H, "t = h * per_column(column_abs_max(h))", "return {'o': t}"),
        "pending",
        5,
        "output 'o' needs a reduction over whole rows or columns",
    ),
    "column of what is scaled": (
        given(o=tensor("N", "fp32")),
        (H, "t = h * per_row(row_logsumexp(h))", "return {'o': column_sums(t)}"),
        "pending",
        5,
        "the argument of column_sums needs a reduction",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_would_work(name: str) -> None:
    given, lines, code, line, words = REFUSED[name]
    error = refused(given, *lines)
    assert (error.code, words in error.message) == (code, True), f"{error.code}: {error.message}"
    assert error.line == line


def test_widths_of_vectors_and_stores_are_relative_to_the_gemm() -> None:
    program = WIDTHS.program
    steps = cut(program)
    (step,) = steps.gemms
    spread = {str(program.nodes[program.nodes[i].args[0]].attribute): steps.width[0, i] for i in step.vectors}
    assert spread == {"b": 0.5, "b2": 2.0}
    stored = {i: steps.width[0, i] for i in step.stores}
    assert stored == {program.outputs["h"]: 0.5, program.outputs["d"]: 2.0}
    assert sorted(said(program, step.loads)) == ["half", "wide"]
    assert len(step.reductions) == 5 and len(steps.finishes[0]) == 5


def test_statistics_of_heads_take_a_sweep_and_stay_in_their_step() -> None:
    program = QK_NORM.program
    steps = cut(program)
    (step,) = steps.gemms
    assert [program.nodes[i].op for i in step.sweep] == ["gemm", "multiply"]
    assert said(program, step.statistics) == ["2*P"]
    assert sorted(said(program, step.stores)) == ["q", "rstd"]
    repeated = {
        str(program.nodes[program.nodes[i].args[0]].attribute): steps.width[0, i] for i in step.repeats
    }
    assert repeated == {"gamma": 1.0, "inv_freq": 0.5}
    assert said(program, [program.nodes[i].args[0] for i in step.vectors]) == ["positions"]
    assert steps.finishes == {} and step.loads == [] and said(program, step.scalars) == ["P"]


def test_a_selection_is_finished_where_its_step_is_done() -> None:
    """A selection is finished with its own step, even if only a later step reads it. The finishing kernel
    also resets the buffer of selected values for the next call."""
    lines = (H, "s = row_select(h, i)", "return {'o': gemm(h, q) * per_row(s + 1)}")
    program = trace(ONE, *lines)
    steps = cut(program)
    (select,) = (i for i, n in enumerate(program.nodes) if n.op == "row_select")
    assert select in steps.finishes[0]
    program = CROSS_ENTROPY.program
    assert finishes(program, cut(program)) == {0: ["lse", "picked"]}


def test_dtypes_are_those_of_what_leaves_a_step() -> None:
    program = trace(
        given(o=tensor("M, N", "fp16"), s=tensor("M", "bf16"), e=tensor("M, N", "fp32")),
        "h = gemm(x, w.mT)",
        "t = silu(h)",
        "return {'o': gemm(t, q) + h, 's': row_sums(h), 'e': h * 2}",
    )
    dtypes = cut(program).dtypes
    outputs = program.outputs
    assert (dtypes[outputs["o"]], dtypes[outputs["s"]], dtypes[outputs["e"]]) == ("fp16", "bf16", "fp32")
    between = {program.nodes[i].op: dtype for i, dtype in dtypes.items() if i not in outputs.values()}
    assert between == {"gemm": "bf16", "silu": "bf16"}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "last",
    [
        "return {'o': gemm(x, q) + h}",  # the second step's epilogue loads h
        "return {'o': gemm(h, gemm(x, q))}",  # no operand of this gemm is an input
    ],
)
def test_a_tile_between_steps_has_the_dtype_of_the_programs_operands(dtype: str, last: str) -> None:
    square = signature(
        {"x": tensor("N, N", dtype), "w": tensor("N, N", dtype), "q": tensor("N, N", dtype)},
        {"o": tensor("N, N", "fp32")},
    )
    program = trace(square, "h = gemm(x, w)", last)
    between = cut(program).dtypes
    del between[program.outputs["o"]]
    assert between and set(between.values()) == {dtype}


def test_rows_and_columns_alone_make_a_tile_that_rides_along() -> None:
    program = trace(tiles("a", "o"), H, "return {'o': h, 'a': per_row(v) * per_column(b)}")
    (step,) = cut(program).gemms
    assert sorted(said(program, step.stores)) == ["a", "o"] and step.loads == []


def test_a_gemm_needs_more_use_than_its_shape() -> None:
    error = refused(ONE, H, "u = gemm(r, q)", "return {'o': h * column_index(u)}")
    assert error.line == 5 and "only the shape" in error.message


UPDATES: dict[str, tuple[dict[str, TensorType], dict[str, str], tuple[str, ...], int | None]] = {
    # each entry: the outputs, the inputs that they overwrite, the kernel, and the refused line or None
    "read where it is made": ({"o": tensor("M, N")}, {"o": "r"}, (H, "return {'o': h + r}"), None),
    "not read": ({"o": tensor("M, N")}, {"o": "r"}, (H, "return {'o': h}"), None),
    "read for another output of the step": (
        {"o": tensor("M, N"), "a": tensor("M, N")},
        {"o": "r"},
        (H, "return {'o': h + r, 'a': h * r}"),
        None,
    ),
    "read in pairs": (
        {"o": tensor("M, 2*N")},
        {"o": "z"},
        (H, "a, c = pairs(z)", "return {'o': join(c * h, a)}"),
        None,
    ),
    "a vector with its sum": (
        {"s": tensor("M", "fp32")},
        {"s": "v"},
        (H, "return {'s': v + row_sums(h)}"),
        None,
    ),
    "an operand": ({"o": tensor("M, N")}, {"o": "r"}, ("return {'o': gemm(r, q)}",), 4),
    "a transposed operand": (
        {"o": tensor("M, N")},
        {"o": "r"},
        (H, "g = gemm(r.mT, h)", "return {'o': gemm(x, w.mT) + gemm(h, g)}"),
        5,
    ),
    "read by a later step": (
        {"o": tensor("M, N"), "a": tensor("M, N")},
        {"o": "r"},
        (H, "o = h + r", "return {'o': o, 'a': gemm(h, q) * r}"),
        6,
    ),
    "read by an earlier step": (
        {"o": tensor("M, N"), "a": tensor("M, N")},
        {"o": "r"},
        (H, "a = h * r", "return {'a': a, 'o': gemm(a, q) + r}"),
        4,
    ),
    "a vector that is spread": (
        {"o": tensor("M, N"), "s": tensor("M", "fp32")},
        {"s": "v"},
        (H, "t = h * per_row(v)", "return {'o': t, 's': v + row_sums(h)}"),
        5,
    ),
    "a vector read at another time": (
        {"e": tensor("M", "fp32"), "s": tensor("M", "fp32")},
        {"s": "v"},
        (H, "e = exp(v)", "return {'e': e, 's': v + row_sums(h)}"),
        5,
    ),
}


@pytest.mark.parametrize("name", UPDATES)
def test_what_is_written_over_is_read_in_its_place_alone(name: str) -> None:
    outputs, updates, lines, line = UPDATES[name]
    declared = signature(INPUTS, outputs, updates=updates)
    if line is None:
        assert trace(declared, *lines).signature.updates == updates
        return
    error = refused(declared, *lines)
    assert (error.code, error.line) == ("updates", line)
    (output,), (target,) = updates.keys(), updates.values()
    assert f"output '{output}' overwrites input '{target}', which is also read elsewhere" in error.message


@pytest.mark.parametrize(
    ("inputs", "lines", "unread", "read"),
    [
        (
            {"w": tensor("H*P, K"), "few": tensor("H, K"), "r": tensor("M, H", "fp32")},
            ("o = head_sums(gemm(x, w.mT), P)", "t = gemm(x, few.mT)"),
            "t",
            "t + r",
        ),
        (
            {"w": tensor("2*P, K"), "r": tensor("M, P", "fp32")},
            ("t = gemm(x, w.mT)", "o, (a, c) = column_range(t, 0, P), pairs(t)"),
            "a * c",
            "a * c + r",
        ),
    ],
    ids=["head statistic", "range"],
)
def test_a_statistic_or_range_overwrites_nothing_that_a_step_reads(inputs, lines, unread, read) -> None:
    overwritten = inputs["r"]
    outputs = {"o": overwritten, "a": tensor(f"M, {overwritten.shape[1]}")}
    declared = signature({"x": tensor("M, K"), **inputs}, outputs, ("P",), updates={"o": "r"})
    assert trace(declared, *lines, f"return {{'o': o, 'a': {unread}}}").signature.updates == {"o": "r"}
    error = refused(declared, *lines, f"return {{'o': o, 'a': {read}}}")
    assert error.code == "updates"


def test_widths_are_those_of_the_step_that_reads() -> None:
    """h is as wide as its own GEMM but half as wide as the next GEMM. So h has a relative width for each
    step."""
    program = trace(ONE, H, "a, c = pairs(gemm(h, wide.mT))", "return {'o': a * c + h}")
    steps = cut(program)
    h = steps.gemms[0].gemm
    assert steps.gemms[1].loads == [h]
    assert (steps.width[0, h], steps.width[1, h]) == (1.0, 0.5)


def test_a_program_as_large_as_allowed_is_cut_in_a_blink() -> None:
    """A hostile program must not take unbounded time to cut, even if every node is read twice or every node
    is a GEMM."""
    wide = MAX_NODES - 5
    doubled = [Node("input", (), "x"), Node("input", (), "w"), Node("transpose", (1,)), Node("gemm", (0, 2))]
    doubled += [Node("input", (), "r")] + [Node("add", (i + 4, i + 4)) for i in range(wide)]
    doubled[-1] = Node("add", (3, len(doubled) - 2))
    chained = [*doubled[:4], Node("input", (), "q")]
    chained += [Node("gemm", (3 if i == 0 else i + 4, 4)) for i in range(wide)]
    rows = [*doubled[:4], Node("input", (), "v"), Node("per_row", (4,))]
    rows += [Node("negative", (i + 5,)) for i in range(wide - 2)] + [Node("multiply", (3, wide + 3))]
    start = time.monotonic()
    for nodes in (doubled, chained, rows):
        program = Program(ONE, tuple(nodes), {"o": len(nodes) - 1}).check()
        assert len(nodes) in (MAX_NODES, MAX_NODES - 1)
        steps = cut(Program.from_json(program.to_json()))
        assert sum(len(s.body) for s in steps.gemms) >= wide - 1
    assert time.monotonic() - start < 30
