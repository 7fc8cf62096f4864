"""A kernel file is traced to a graph. Every mistake in a kernel file is refused with a code and the line of
the mistake."""

from __future__ import annotations

import pytest
from kernels import BACKWARD, IMPORTS, NORM, signature, source, tensor, trace

from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Node, Program
from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.primitives.lang.signature import Signature
from coda_agent.primitives.lang.trace import Tensor

TILE = signature(
    {
        "x": tensor("M, K"),
        "w": tensor("N, K"),
        "v": tensor("M", "fp32"),
        "b": tensor("N"),
        "odd": tensor("M, 2*N + 1"),
        "z": tensor("M, 2*N"),
    },
    {"o": tensor("M, N")},
    c=0.5,
)
UNREAL = "return {'o': gemm(x, w.mT)}"


def refused(text: str, given: Signature = TILE) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        trace_source(text, given)
    return caught.value


def test_traces_a_graph_without_names_or_repeats() -> None:
    program = trace(
        TILE, "a = gemm(x, w.mT) * c", "b = a + 2", "d = gemm(x, w.mT) * c", "return {'o': b - d * 1.0}"
    )
    assert program.nodes == (
        Node("input", (), "x"),
        Node("input", (), "w"),
        Node("transpose", (1,)),
        Node("gemm", (0, 2)),
        Node("constant", (), 0.5),
        Node("multiply", (3, 4)),
        Node("constant", (), 2.0),
        Node("add", (5, 6)),
        Node("constant", (), 1.0),
        Node("multiply", (5, 8)),
        Node("subtract", (7, 9)),
    )
    assert program.outputs == {"o": 10}


@pytest.mark.parametrize(
    ("expression", "tail"),
    [
        ("-h", [Node("negative", (3,))]),
        ("+h * 1", [Node("constant", (), 1.0), Node("multiply", (3, 4))]),
        ("h ** 2", [Node("multiply", (3, 3))]),
        ("h > 0", [Node("constant", (), 0.0), Node("greater", (3, 4))]),
        ("h >= 0", [Node("constant", (), 0.0), Node("greater_equal", (3, 4))]),
        ("0 > h", [Node("constant", (), 0.0), Node("less", (3, 4))]),
        ("h <= True", [Node("constant", (), 1.0), Node("less_equal", (3, 4))]),
        ("h / h.rows", [Node("dim", (), "M"), Node("divide", (3, 4))]),
        ("h * z.columns", [Node("dim", (), "2*N"), Node("multiply", (3, 4))]),
        ("where(h, c, h)", [Node("constant", (), 0.5), Node("where", (3, 4, 3))]),
        ("h == 1", [Node("constant", (), 1.0), Node("equal", (3, 4))]),
        ("1 != h", [Node("constant", (), 1.0), Node("not_equal", (3, 4))]),
        ("abs(h)", [Node("abs", (3,))]),
        ("column_index(h)", [Node("column_index", (3,))]),
    ],
)
def test_operators(expression: str, tail: list[Node]) -> None:
    nodes = trace(TILE, "h = gemm(x, w.mT)", f"return {{'o': {expression}}}").nodes
    assert nodes[3].op == "gemm"
    assert list(nodes[4:]) == tail


def test_rows_and_columns_make_a_tile() -> None:
    nodes = trace(TILE, "h = gemm(x, w.mT)", "return {'o': h + per_row(v) * per_column(b)}").nodes
    assert [n.op for n in nodes[4:]] == ["input", "per_row", "input", "per_column", "multiply", "add"]


def test_subtraction_from_a_number_keeps_its_sides() -> None:
    nodes = trace(TILE, "h = gemm(x, w.mT)", "return {'o': 1 - h}").nodes
    last = nodes[-1]
    assert (last.op, [nodes[a].op for a in last.args]) == ("subtract", ["constant", "gemm"])


def test_parameters_may_come_in_any_order_and_go_unused() -> None:
    text = f"{IMPORTS}@kernel\ndef k(c, w, z, odd, b, v, x):\n    return {{'o': gemm(x, w.mT)}}\n"
    program = trace_source(text, TILE)
    assert program.hash == trace(TILE, UNREAL).hash
    assert {n.attribute for n in program.nodes if n.op == "input"} == {"x", "w"}
    assert Program.from_json(program.to_json(), TILE) == program


ERRORS: list[tuple[str, str, int, str]] = [
    # An entry has the expression or statement on line 5, then the code of the error, the line that the error
    # names, and words of its message. Line 4 is "h = gemm(x, w.mT)".
    ("return {}", "outputs", 5, "missing o"),
    ("return {'o': h, 'p': h}", "outputs", 5, "extra p"),
    ("return {'p': h}", "outputs", 5, "missing o; extra p"),
    ("return h", "outputs", 5, "must return a dict"),
    ("return", "outputs", 5, "must return a dict"),
    ("return {1: h}", "outputs", 5, "must return a dict"),
    ("return {'o': 1.0}", "outputs", 5, "output 'o' is float"),
    ("return {'o': pairs(z)}", "outputs", 5, "output 'o' is tuple"),
    (
        "return {'o': z + join(h, h)}",
        "output_shape",
        5,
        "'o' is tile [M, 2*N], but the spec says tile [M, N]",
    ),
    ("return {'o': row_sums(h)}", "output_shape", 5, "'o' is vector [M]"),
    ("return {'o': per_row(v)}", "output_shape", 5, "'o' is per_row of [M]"),
    ("return {'o': h.columns}", "output_shape", 5, "'o' is a scalar"),
    ("return {'o': w.mT}", "output_shape", 5, "operand [K, N]"),
    ("return {'o': x}", "output_shape", 5, "tile [M, K]"),
    ("h + v", "broadcast", 5, "spread the vector with per_row(v)"),
    ("b * h", "broadcast", 5, "per_column(v)"),
    (
        "h + per_row(b)",
        "broadcast",
        5,
        "tile [M, N] and per_row of [N] do not fit together: over a tile [M, N], per_row(v) takes",
    ),
    ("h + per_column(v)", "broadcast", 5, "do not fit"),
    ("v + b", "broadcast", 5, "vector [M] and vector [N] do not fit"),
    ("h + x", "broadcast", 5, "do not fit together: their columns, N and K, are different sizes"),
    ("h + z", "broadcast", 5, "do not fit together; pairs(t) and join(a, b) change a tile's width"),
    ("h + gemm(w, x.mT)", "broadcast", 5, "their rows differ, M and N; a kernel cannot move values"),
    ("h + h.mT", "broadcast", 5, ".mT is for operands of gemm"),
    ("where(h > 0, h, v)", "broadcast", 5, "per_row"),
    ("gemm(x, w)", "shapes", 5, "the inner sizes K and N differ; a weight stored [N, K] is used as w.mT"),
    ("gemm(x, x)", "shapes", 5, "inner sizes K and M"),
    ("gemm(x, v)", "arguments", 5, "two matrices"),
    ("gemm(x, 2.0)", "arguments", 5, "two matrices"),
    ("w.mT.mT", "arguments", 5, ".mT takes a matrix"),
    ("v.mT", "arguments", 5, ".mT takes a matrix"),
    ("pairs(odd)", "width", 5, "columns are not even for every size"),
    ("pairs(h)", "width", 5, "N columns are not even"),
    ("pairs(v)", "arguments", 5, "pairs takes one tile, not vector [M]: let the vector meet the tile first"),
    ("pairs(per_column(b))", "arguments", 5, "let it meet the tile first, as pairs(t + per_column(v))"),
    ("pairs(per_row(v))", "arguments", 5, "per_row of [M]: use it unchanged with each half of a tile"),
    ("pairs(2.0)", "arguments", 5, "pairs takes one tile, not a scalar"),
    ("join(h, z)", "arguments", 5, "two tiles of one shape"),
    ("row_sums(v)", "arguments", 5, "row_sums takes one tile"),
    ("row_sums(1.0)", "arguments", 5, "row_sums takes one tile"),
    ("per_row(h)", "arguments", 5, "one vector"),
    ("per_column(1.0)", "arguments", 5, "one vector"),
    ("exp(h, h)", "arguments", 5, "exp takes 1 argument(s), not 2"),
    ("where(h)", "arguments", 5, "where takes 3 argument(s), not 1"),
    ("gemm(x)", "python", 5, "TypeError"),
    ("exp('h')", "argument", 5, "expected a tile, vector or number, got str"),
    ("h + [1]", "argument", 5, "got list"),
    ("h + None", "argument", 5, "got NoneType"),
    ("v.columns", "argument", 5, "only a tile has .columns; this is vector [M]"),
    ("h[0]", "argument", 5, "cannot be indexed: pairs(t)"),
    ("h[:, ::2]", "argument", 5, "cannot be indexed"),
    ("a, d = h", "argument", 5, "unpacked or iterated; pairs(t)"),
    ("[t for t in h]", "argument", 5, "iterated"),
    ("h if h > 0 else -h", "control_flow", 5, "where(condition, a, b)"),
    ("not h", "control_flow", 5, "no truth value"),
    ("0 < h < 1", "control_flow", 5, "no truth value"),
    ("h and h", "control_flow", 5, "no truth value"),
    ("h == v", "broadcast", 5, "equal: tile [M, N] and vector [M] do not fit together"),
    ("h != None", "argument", 5, "not_equal: expected a tile, vector or number, got NoneType"),
    ("1 if h == 0 else 2", "control_flow", 5, "where(condition, a, b)"),
    ("h in (x, w)", "broadcast", 5, "equal: tile [M, K] and tile [M, N] do not fit"),
    ("h in (z, h)", "broadcast", 5, "equal: tile [M, 2*N] and tile [M, N] do not fit"),
    ("h in (h * 2, h)", "control_flow", 5, "no truth value"),
    ("abs(h, h)", "arguments", 5, "abs takes 1 argument(s), not 2"),
    ("gelu('h')", "argument", 5, "gelu: expected a tile, vector or number, got str"),
    ("column_max(v)", "arguments", 5, "column_max takes one tile, not vector [M]"),
    ("row_logsumexp(per_row(v))", "arguments", 5, "row_logsumexp takes one tile, not per_row of [M]"),
    ("column_index(v)", "arguments", 5, "column_index takes the tile whose columns it numbers"),
    ("row_select(h)", "python", 5, "TypeError"),
    (
        "row_select(h, 3)",
        "arguments",
        5,
        "row_select takes a tile and one index a row, not tile [M, N], a scalar",
    ),
    ("row_select(h, b)", "arguments", 5, "not tile [M, N], vector [N]"),
    ("x @ w.mT", "argument", 5, "gemm multiplies matrices"),
    ("h % 2", "argument", 5, "not in the vocabulary"),
    ("h // 2", "argument", 5, "not in the vocabulary"),
    ("h ** 3", "argument", 5, "only ** 2"),
    ("h ** 0.5", "argument", 5, "only ** 2"),
    ("h ** h", "argument", 5, "only ** 2"),
    ("2 ** h", "argument", 5, "write 2 ** t as exp(0.6931471805599453 * t)"),
    ("2 % h", "argument", 5, "% is not in the vocabulary"),
    ("h & h", "argument", 5, "write a * b for and, maximum(a, b) for or"),
    ("1 << h", "argument", 5, "<< is not in the vocabulary"),
    ("~(h > 0)", "argument", 5, "1 - a for not"),
    ("{h: 1}", "python", 5, "TypeError"),
    ("len(h)", "argument", 5, "sizes are t.rows and t.columns"),
    ("float(h)", "argument", 5, "a traced value is not one Python number"),
    ("int(h)", "argument", 5, "a traced value is not one Python number"),
    ("range(h)", "argument", 5, "a traced value is not one Python number"),
    ("h.sum()", "argument", 5, "there is no .sum here; values have only columns, mT, rows"),
    ("h.sum()", "argument", 5, "write row_sums(t), column_sums(t) or head_sums(t, width)"),
    ("h.shape[0]", "argument", 5, "write t.rows and t.columns"),
    ("h.T", "argument", 5, "write t.mT"),
    ("h.tanh()", "argument", 5, "write tanh(t)"),
    ("h.erf()", "argument", 5, "everything else is a function of primitives"),
    ("exp(a=h)", "arguments", 5, "exp takes its arguments by position: exp(a)"),
    ("where(h > 0, a=h, b=0)", "arguments", 5, "takes its arguments by position: where(condition, a, b)"),
    ("h * 1e999", "constant", 5, "inf is not finite"),
    ("h * -1e999", "constant", 5, "inf is not finite in fp32: write a finite number, such as -3.4e38"),
    ("where(h > 0, h, float('-inf'))", "constant", 5, "-inf is not finite in fp32: write a finite number"),
    ("h * (1e999 - 1e999)", "constant", 5, "nan is not finite"),
    ("h * 4e38", "constant", 5, "4e+38 is not finite in fp32"),
    ("h * 10**400", "constant", 5, "inf is not finite"),
    ("relu(h)", "python", 5, "NameError: name 'relu'"),
    ("erf(h)", "python", 5, "is not defined: there are abs, column_abs_max"),
    ("softmax(h)", "python", 5, "where; compose everything else from these"),
    ("print(h)", "python", 5, "NameError"),
    ("1 / 0", "python", 5, "ZeroDivisionError"),
    ("{}['h']", "python", 5, "KeyError"),
    ("[][0]", "python", 5, "IndexError"),
    ("int('h')", "python", 5, "ValueError"),
    ("assert c > 1", "python", 5, "AssertionError"),
    ("import os", "python", 5, "ImportError"),
]


@pytest.mark.parametrize(("line", "code", "at", "words"), ERRORS, ids=[e[0] for e in ERRORS])
def test_mistakes_are_refused_with_code_and_line(line: str, code: str, at: int, words: str) -> None:
    error = refused(source(TILE, "h = gemm(x, w.mT)", line, UNREAL))
    assert (error.code, words in error.message) == (code, True), f"{error.code}: {error.message}"
    assert error.line == at


HEADS = signature(
    {
        "x": tensor("M, K"),
        "w": tensor("2*H*P, K"),
        "q": tensor("2*H*P, 2*H*P"),
        "r": tensor("M, 2*H*P"),
        "cos_sin": tensor("M, 2*P"),
        "gamma": tensor("2*P"),
        "freq": tensor("P", "fp32"),
        "v": tensor("M", "fp32"),
        "target": tensor("M", "int64"),
        "alpha": tensor("", "fp32"),
        "x8": tensor("M, K", "fp8_e4m3"),
        "w8": tensor("2*H*P, K", "fp8_e4m3"),
        "n8": tensor("K, 2*H*P", "fp8_e4m3"),
        "s8": tensor("2*H*P, 2*H*P", "fp8_e4m3"),
    },
    {"o": tensor("M, 2*H*P")},
    ("P",),
)


def test_static_dims_are_parameters_and_widths_are_made_of_them() -> None:
    wanted = Node("head_sums", (3,), "2*P")
    for text in ("2 * P", "P * 2", "P + P", "P * (1 + 1)"):
        lines = ("t = gemm(x, w.mT)", f"return {{'o': t * per_head(head_sums(t, {text}))}}")
        assert trace(HEADS, *lines).nodes[4] == wanted
    nodes = trace(HEADS, "t = gemm(x, w.mT)", "return {'o': t / P}").nodes
    assert nodes[4:] == (Node("dim", (), "P"), Node("divide", (3, 4)))


def test_rope_is_made_of_other_primitives() -> None:
    made = trace(HEADS, "t = gemm(x, w.mT)", "return {'o': rope(t, v, freq)}")
    spread = {"input", "per_row", "as_tile", "per_head", "multiply", "sin", "cos"}
    assert {n.op for n in made.nodes[3:]} == spread | {"gemm", "even", "odd", "add", "subtract", "join"}


SUMS = "a size is made of static dims (parameters of the kernel) and whole numbers by + and *"
SWEEP = "has only the accumulator, its vectors and scalars"
MISUSES: list[tuple[str, str, int, str]] = [
    # An entry has the same fields as in ERRORS. Line 4 is "t = gemm(x, w.mT)". Line 5 assigns the entry's
    # expression to o, and line 6 returns o.
    ("head_sums(t)", "python", 5, "TypeError"),
    ("head_sums(t, 4)", "width", 5, "2*H*P is not divisible by 4"),
    ("head_sums(t, True)", "argument", 5, SUMS),
    ("head_sums(t, '2*P')", "argument", 5, SUMS),
    ("head_sums(t, alpha)", "argument", 5, SUMS),
    ("head_sums(t, t)", "argument", 5, SUMS),
    ("head_sums(t, 2.5 * P)", "argument", 5, SUMS),
    ("head_sums(t, 4 * P / 2)", "argument", 5, SUMS),
    ("head_sums(t, 3 * P)", "width", 5, "2*H*P is not divisible by 3*P: a tile is a whole number of heads"),
    ("head_sums(t, P * P)", "width", 5, "2*H*P is not divisible by P*P"),
    ("head_sums(t, 0 * P)", "width", 5, "2*H*P is not divisible by 0"),
    ("head_sums(t, -2 * P)", "width", 5, "2*H*P is not divisible by -2*P"),
    ("head_sums(t, P + 1)", "width", 5, "2*H*P is not divisible by 1 + P"),
    ("head_sums(x, 2 * P)", "width", 5, "K is not divisible by 2*P"),
    ("head_sums(v, P)", "arguments", 5, "head_sums takes one tile, not vector [M]"),
    (
        "t * per_head(head_sums(t, t.columns))",
        "static",
        5,
        "heads of 2*H*P columns: the spec must declare H static",
    ),
    ("column_range(t, 0, 2 * P) * 2", "broadcast", 5, "can only be an output"),
    ("exp(column_range(t, 0, 2 * P))", "broadcast", 5, "can only be an output"),
    ("row_sums(column_range(t, 0, 2 * P))", "arguments", 5, "row_sums takes one tile, not a column_range"),
    ("gemm(column_range(t, 0, 2 * P), x)", "arguments", 5, "gemm takes two matrices, not a column_range"),
    ("column_range(t, P, t.columns)", "shapes", 5, "2*H*P columns do not contain them at every size"),
    ("column_range(t, 0, 3 * P)", "shapes", 5, "column_range of 3*P columns from 0 on"),
    ("column_range(t, -2 * P, 2 * P)", "shapes", 5, "2*P columns from -2*P on"),
    ("column_range(t, 0, v)", "argument", 5, SUMS),
    ("t * in_columns(t, 0, 3 * P)", "shapes", 5, "in_columns of 3*P columns from 0 on"),
    ("t * in_columns(t, 0, t.columns)", "static", 5, "in_columns of 2*H*P: the spec must declare H static"),
    ("t * in_columns(v, 0, P)", "arguments", 5, "in_columns takes one tile, not vector [M]"),
    ("t * per_head(head_sums(t * in_columns(t, 0, P), 2 * P))", "sweep", 5, SWEEP),
    ("column_range(v, 0, P)", "arguments", 5, "column_range takes one tile, not vector [M]"),
    ("column_range(t, 0, 2 * P)", "output_shape", 6, "'o' is a column_range [M, 2*P], but the spec says"),
    ("gemm(t, q.mT) + r + column_index(x)", "broadcast", 5, "are different sizes"),
    ("t * per_head(head_sums(r, 2 * P))", "sweep", 5, SWEEP),
    ("t * per_head(head_sums(t + r, 2 * P))", "sweep", 5, SWEEP),
    ("t * per_head(head_sums(t * per_head(gamma), 2 * P))", "sweep", 5, SWEEP),
    ("t * per_head(head_sums(t * column_index(t), 2 * P))", "sweep", 5, SWEEP),
    ("t * per_head(head_sums(t * per_head(head_sums(t, 2 * P)), 2 * P))", "sweep", 5, SWEEP),
    ("t * head_sums(t, 2 * P)", "broadcast", 5, "spread the statistic with per_head(v)"),
    (
        "t * per_row(head_sums(t, 2 * P))",
        "arguments",
        5,
        "per_row takes one vector, not head statistic [M, H]",
    ),
    ("row_sums(head_sums(t, 2 * P))", "arguments", 5, "row_sums takes one tile, not head statistic [M, H]"),
    ("gemm(head_sums(t, 2 * P), x)", "arguments", 5, "gemm takes two matrices, not head statistic [M, H]"),
    ("pairs(head_sums(t, 2 * P))", "arguments", 5, "pairs takes one tile, not head statistic [M, H]"),
    ("head_sums(t, 2 * P).columns", "argument", 5, "only a tile has .columns; this is head statistic [M, H]"),
    ("head_sums(t, 2 * P)", "output_shape", 6, "'o' is head statistic [M, H], but the spec says tile"),
    ("per_head(head_sums(t, 2 * P)) * 1", "output_shape", 6, "'o' is per_head of a statistic [M, H]"),
    ("gemm(t, q) * per_head(head_sums(t, 2 * P))", "pending", 5, "a statistic of heads stays in its step"),
    (
        "t * per_head(alpha)",
        "arguments",
        5,
        "per_head takes a statistic of head_sums, a vector or an input tile",
    ),
    ("t * per_head(per_row(v))", "arguments", 5, "not per_row of [M]"),
    ("t * per_head(v)", "broadcast", 5, "tile [M, 2*H*P] and per_head of [M] do not fit"),
    ("t * per_head(x)", "broadcast", 5, "tile [M, 2*H*P] and per_head of [M, K] do not fit"),
    (
        "t * (per_head(gamma) * per_head(cos_sin))",
        "broadcast",
        5,
        "per_head of [2*P] and per_head of [M, 2*P]",
    ),
    ("t * per_head(cos_sin * 2)", "argument", 5, "per_head takes a tile only if it is an input"),
    ("t * per_head(r)", "static", 5, "heads of 2*H*P columns: the spec must declare H static"),
    ("pairs(join(t, t) * per_head(gamma))[0]", "width", 5, "meets a tile wider than its gemm"),
    ("join(pairs(t)[0] * per_head(freq), pairs(t)[1]) * per_head(freq)", "width", 5, "tiles of two widths"),
    ("rope(t, v, gamma)", "broadcast", 5, "tile [M, H*P] and per_head of [2*P] do not fit"),
    ("rope(t, freq, freq)", "broadcast", 5, "the first does not cover the second"),
    ("rope(x, v, freq)", "width", 5, "K columns are not even"),
    ("rope(t, v)", "python", 5, "TypeError"),
    ("t * per_row(row_select(t, v))", "dtype", 5, "row_select's index is an input of int32 or int64"),
    (
        "t * per_row(row_select(t, target + 1))",
        "dtype",
        5,
        "row_select's index is an input of int32 or int64",
    ),
    ("t * per_row(row_select(pairs(t)[0], target))", "pending", 5, "needs a reduction"),
    (
        "gemm(t, q) * per_row(row_select(pairs(t)[0], target))",
        "width",
        5,
        "row_select takes a tile as wide as its gemm",
    ),
    ("t * per_row(row_logsumexp(t))", "pending", 5, "needs a reduction over whole rows or columns"),
    ("t * per_column(column_max(t))", "pending", 5, "needs a reduction over whole rows or columns"),
    ("alpha * 2", "output_shape", 6, "'o' is a scalar"),
    ("alpha.columns", "argument", 5, "only a tile has .columns; this is a scalar"),
    ("t * s8", "broadcast", 5, "do not fit"),
    (
        "t * per_row(row_sums(x8))",
        "dtype",
        5,
        "input 'x8' is fp8_e4m3: only gemm reads that; scale its product instead",
    ),
    ("gemm(x8 * 2, w8.mT)", "dtype", 5, "input 'x8' is fp8_e4m3: only gemm reads that"),
    ("t * per_head(s8)", "broadcast", 5, "do not fit"),
    ("gemm(x8, n8)", "dtype", 5, "reads both operands along K: gemm(x, w.mT) of inputs [M, K] and [N, K]"),
    ("gemm(n8.mT, w8.mT)", "output_shape", 6, "'o' is tile [2*H*P, 2*H*P]"),
    ("gemm(gemm(n8.mT, w8.mT), q)", "output_shape", 6, "'o' is tile [2*H*P, 2*H*P]"),
    ("gemm(x8, w.mT)", "dtype", 5, "gemm's operands are bf16 and fp8_e4m3"),
    ("gemm(t, s8)", "dtype", 5, "reads both operands along K"),
    ("gemm(gemm(x8, w8.mT), s8.mT)", "dtype", 5, "reads both operands along K"),
]


@pytest.mark.parametrize(("line", "code", "at", "words"), MISUSES, ids=[e[0] for e in MISUSES])
def test_misuses_are_refused_with_code_and_line(line: str, code: str, at: int, words: str) -> None:
    error = refused(source(HEADS, "t = gemm(x, w.mT)", f"o = {line}", "return {'o': o}"), HEADS)
    assert (error.code, words in error.message) == (code, True), f"{error.code}: {error.message}"
    assert error.line == at


def test_an_fp8_operand_is_no_tile_of_the_kernels_own() -> None:
    declared = signature(
        {"x": tensor("M, K", "fp8_e4m3"), "w": tensor("N, K", "fp8_e4m3"), "s": tensor("N, N", "fp8_e4m3")},
        {"o": tensor("N, M")},
    )
    error = refused(source(declared, "t = gemm(x, w.mT)", "return {'o': gemm(s, t.mT)}"), declared)
    assert (error.code, error.line) == ("dtype", 5) and "reads both operands along K" in error.message


def test_parameters_include_static_dims() -> None:
    text = f"{IMPORTS}@kernel\ndef k({', '.join(HEADS.inputs)}):\n    return {{'o': gemm(x, w.mT)}}\n"
    error = refused(text, HEADS)
    assert (error.code, error.line) == ("parameters", 2) and error.message.endswith("missing P")


FILES: list[tuple[str, str, int | None, str]] = [
    ("", "kernel", None, "this has 0"),
    ("from primitives import kernel\n\ndef k(x):\n    pass\n", "kernel", None, "this has 0"),
    (source(TILE, UNREAL) + "@kernel\ndef other(x):\n    pass\n", "kernel", None, "this has 2"),
    (f"{IMPORTS}@kernel\ndef k(x, w, v, b, odd, z):\n    pass\n", "parameters", 2, "missing c"),
    (f"{IMPORTS}@kernel\ndef k(x, w, v, b, odd, z, c, d):\n    pass\n", "parameters", 2, "unknown d"),
    (f"{IMPORTS}@kernel\ndef k(*x):\n    pass\n", "parameters", 2, "missing x, w, v, b, odd, z, c"),
    (f"{IMPORTS}@kernel\ndef k(x, w, v, b, odd, z, /, c):\n    pass\n", "python", None, "positional-only"),
    (
        "from primitives import (\n    kernel,\n    relu,\n)\n",
        "vocabulary",
        1,
        "primitives has no 'relu'; it has abs, column_abs_max",
    ),
    ("\nfrom primitives import __builtins__ as b\n", "vocabulary", 2, "no '__builtins__'"),
    ("from primitives import Tensor\n", "vocabulary", 1, "no 'Tensor'"),
    ("from primitives import *\n", "vocabulary", 1, "no '*'"),
    ("def f():\n    f()\n\nf()\n", "depth", None, "recurses"),
    ("import primitives\n", "python", 1, "ImportError"),
    ("\nfrom os import system\n", "python", 2, "ImportError"),
    ("x = 1\ndef f(:\n", "syntax", 2, "invalid syntax"),
    ("\nreturn 1\n", "syntax", 2, "outside function"),
    ("await 1\n", "syntax", 1, "outside function"),
    ("(" * 300, "syntax", 1, "nested"),
    ("-" * 100_000 + "1", "syntax", None, "nested"),
    ("\0", "syntax", None, "null"),
    ("\ud800", "python", None, "surrogates"),
    ("from primitives import exp\n\nexp(1.0)\n", "trace", 3, "outside a @kernel function"),
    ("from primitives import kernel\nk = kernel(3)\n", "python", None, "no attribute '__code__'"),
    (f"{IMPORTS}@kernel\n@kernel\ndef k(x):\n    pass\n", "python", None, "no attribute '__code__'"),
]


@pytest.mark.parametrize(("text", "code", "at", "words"), FILES, ids=range(len(FILES)))
def test_files_are_refused(text: str, code: str, at: int | None, words: str) -> None:
    error = refused(text)
    assert (error.code, words in error.message) == (code, True), f"{error.code}: {error.message}"
    assert code == "syntax" and at is None or error.line == at


def test_the_line_is_the_kernel_files_own() -> None:
    """If a helper function in the kernel file fails, the error names the line in the helper."""
    helper = "def helper(t):\n    y = t + 1\n    return y[0]\n"
    text = source(TILE, "h = gemm(x, w.mT)", "helper(h)", UNREAL).replace("@kernel", helper + "@kernel")
    assert refused(text).line == 4


def test_values_live_as_long_as_their_kernel_runs() -> None:
    with pytest.raises(ProgramError, match="after its kernel had returned") as caught:
        _ = Tensor(0).rows
    assert caught.value.code == "trace"


def test_tracing_leaves_nothing_behind() -> None:
    """A refused kernel does not change how the next kernel is traced."""
    before = NORM.program.hash
    refused(source(TILE, "gemm(x, w.mT)[0]"))
    assert NORM.program.hash == before


def test_lines_reach_the_cut() -> None:
    """If partitioning refuses a program, the error names the line of the expression that no step can
    compute."""
    lines = ["h = gemm(x, w.mT)", "t = h * per_row(row_sums(h))", "u = t + 1", "return {'o': u}"]
    assert (refused(source(TILE, *lines)).code, refused(source(TILE, *lines)).line) == ("pending", 6)


def test_docstrings_and_loops_over_numbers() -> None:
    text = ['"""Doc."""', *BACKWARD.lines]
    assert trace(BACKWARD.signature, *text).hash == BACKWARD.program.hash
    looped = trace(TILE, "h = gemm(x, w.mT)", "for i in range(3):", "    h = h * i", "return {'o': h}")
    assert [n.attribute for n in looped.nodes if n.op == "constant"] == [0.0, 1.0, 2.0]
