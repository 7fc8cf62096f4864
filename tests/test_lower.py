"""Lowered text: what it computes (run lane by lane), what it may contain, where it masks, what it refuses."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from kernels import (
    BACKWARD,
    CHAIN,
    EXAMPLES,
    NORM,
    SWIGLU,
    draw,
    kernel_names,
    run_lowered,
    signature,
    tensor,
    trace,
)

from primitives import lower as lowering
from primitives.interpret import interpret
from primitives.ir import Node, Program, ProgramError, Schedule, Signature, TensorType
from primitives.lower import lower

ROOT = Path(__file__).parent.parent
INPUTS = {
    "x": tensor("M, K"),
    "w": tensor("N, K"),
    "q": tensor("N, N"),
    "wide": tensor("2*N, N"),
    "r": tensor("M, N"),
    "z": tensor("M, 2*N"),
    "full": tensor("M, N", "fp32"),
    "v": tensor("M", "fp32"),
    "b": tensor("N"),
    "half": tensor("N, K", "fp16"),
}
SIZES = {"M": 16, "K": 8, "N": 24}
H = "h = gemm(x, w.mT)"


def given(**outputs: TensorType) -> Signature:
    return signature(INPUTS, outputs)


TILE = given(o=tensor("M, N"))
FULL = given(o=tensor("M, N", "fp32"))
SUM = given(s=tensor("M", "fp32"))


def agree(program: Program, sizes: dict[str, int]) -> None:
    inputs = draw(program.signature, sizes, 7)
    expected, got = interpret(program, inputs), run_lowered(program, inputs)
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert value.dtype == expected[name].dtype
        half_ulp = 2.0**-8 if value.dtype == torch.bfloat16 else 0
        torch.testing.assert_close(
            value.float(),
            expected[name].float(),
            rtol=1e-5 + 2 * half_ulp,
            atol=1e-5,
            msg=partial("{}: {}".format, name),
        )


@pytest.mark.parametrize("name", EXAMPLES)
def test_text_computes_what_the_interpreter_does(name: str) -> None:
    agree(EXAMPLES[name].program, EXAMPLES[name].sizes)


PROGRAMS: dict[str, tuple[Signature, tuple[str, ...]]] = {
    "all widths at once": (
        given(d=tensor("M, 2*N"), o=tensor("M, N"), e=tensor("M, N", "fp32"), s=tensor("M", "fp32")),
        (
            H,
            "a, c = pairs(z)",
            "t = join(h * a, c + 1)",
            "return {'d': t, 'o': r * a + h, 'e': full - h, 's': row_sums(t * t)}",
        ),
    ),
    "half": (
        given(o=tensor("M, N"), s=tensor("M", "fp32")),
        (
            "a, c = pairs(gemm(r, wide.mT))",
            "return {'o': a * c, 's': row_sums(exp(a) - c)}",
        ),
    ),
    "sums alone, masked and not": (
        given(s=tensor("M", "fp32"), t=tensor("M", "fp32"), u=tensor("M", "fp32"), v2=tensor("M", "fp32")),
        (
            H,
            "a, c = pairs(z)",
            "j = join(exp(h), h)",
            "u = row_sums(h + per_column(b))",
            "return {'s': row_sums(h * h), 't': row_sums(exp(h)), 'u': u, 'v2': row_sums(j)}",
        ),
    ),
    "scalars": (
        TILE,
        (
            H,
            "k = where(h.columns > h.rows, 1, 2) + maximum(1, h.rows) * exp(0.5) - rsqrt(h.columns)",
            "return {'o': h / h.columns * k + where(h > -0.5, r, minimum(h, 0.25))}",
        ),
    ),
    "spread vectors": (
        TILE,
        (
            "f = per_row(v) * 2 + per_row(exp(v))",
            H,
            "return {'o': (h + per_column(b) * per_column(b)) * f}",
        ),
    ),
    "vectors before, between and after": (
        given(o=tensor("M, N"), s=tensor("M", "fp32"), t=tensor("M", "bf16"), u=tensor("M", "fp16")),
        (
            H,
            "rstd = rsqrt(row_sums(h * h) / h.columns + 1e-6)",
            "g = gemm(h * per_row(silu(v)), q) * per_row(rstd)",
            "return {'o': g + 1, 's': row_sums(g + 1) + rstd * row_sums(h), 't': rstd, 'u': exp(v)}",
        ),
    ),
    "read back": (
        given(o=tensor("M, N"), e=tensor("M, N", "fp32")),
        (H, "t = silu(h)", "e = t * 2", "return {'o': e + gemm(t, q), 'e': e}"),
    ),
    "riding late": (
        given(o=tensor("M, N"), t=tensor("M, N")),
        (H, "g = gemm(h + r, q) + r", "return {'o': g, 't': r * per_row(row_sums(h))}"),
    ),
    "waiting": (TILE, (H, "n = h * per_row(row_sums(h))", "return {'o': gemm(h, q) + n}")),
    "three in a chain": (
        TILE,
        (
            H,
            "g = tanh(gemm(h, q))",
            "f = gemm(g, q.mT) * per_row(row_sums(h)) + per_column(b)",
            "return {'o': f * g}",
        ),
    ),
    "a transposed intermediate": (
        given(o=tensor("M, N"), d=tensor("N, N")),
        (H, "return {'o': h, 'd': gemm((h * 2).mT, r)}"),
    ),
    "literals": (
        TILE,
        (H, "return {'o': maximum(h, -1.5) - (-2) * minimum(-0.1, h) + where(1, h, r) * where(0, r, h)}"),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_texts_of_many_shapes_compute_what_the_interpreter_does(name: str) -> None:
    declared, lines = PROGRAMS[name]
    agree(trace(declared, *lines), SIZES)


def everything() -> list[Program]:
    return [e.program for e in EXAMPLES.values()] + [trace(s, *lines) for s, lines in PROGRAMS.values()]


def test_no_string_of_a_program_enters_its_text() -> None:
    """Renamed throughout, a program lowers to the same bytes; all identifiers are ours."""
    for program in everything():
        declared = program.signature
        renamed = {n: f"evil_{i:03}" for i, n in enumerate(sorted(declared.outputs))}
        inputs = {n: f"import_os_{i:03}" for i, n in enumerate(declared.inputs)}
        nodes = tuple(
            n._replace(attribute=inputs[str(n.attribute)]) if n.op == "input" else n for n in program.nodes
        )
        other = Program(
            Signature(
                "hostile",
                declared.dims,
                {inputs[n]: t for n, t in declared.inputs.items()},
                {renamed[n]: t for n, t in declared.outputs.items()},
                {"evil_constant": 1.0},
            ),
            nodes,
            {renamed[n]: i for n, i in program.outputs.items()},
            {0: Schedule(swizzle=2)},
        ).check()
        assert lower(other).text == lower(program).text and lower(other).hash == lower(program).hash
        assert lower(other) != lower(trace(TILE, H, "return {'o': h + 42}"))


INVENTED = re.compile(r"[tonpvsw]\d+(_\d)?|(offsets|left)\d+|(Step\d+|Finish\d+_\d+)_[0-9a-f]{12}")
OWN = {
    "self",
    "params",
    "resources",
    "accumulator",
    "operand",
    "i",
    "row",
    "lane",
    "blocks",
    "launched",
    "min",
    "thread",
    "stream",
    "_epi_ops",
    "EpilogueArguments",
    "epi_visit_subtile",
    "kernel",
    "__call__",
    "cute",
    "cutlass",
    "Float32",
    "FusedGemm",
    "RowSum",
    "ColVecLoad",
    "RowVecLoad",
    "Scalar",
    "TileLoad",
    "TileStore",
    "arguments",
    "choose",
    "edge",
    "fragment",
    "inside",
    "half_fragment",
    "wide_fragment",
    "pack",
    "unpack",
    "sigmoid",
    "sigmoid_fast",
    "tanh",
    "tanh_fast",
    "sum_partials",
    "BLOCK",
    "LANES_PER_ROW",
}


def names(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Constant(value=str(text)):
                found.add(text)
    return found


def test_every_identifier_and_string_is_known() -> None:
    for program in everything():
        tree = ast.parse(lower(program).text)
        body = ast.Module([n for n in tree.body if isinstance(n, ast.ClassDef)], [])
        assert len(body.body) == len(lower(program).gemms) + len(lower(program).vectors)
        assert {n for n in names(body) if not INVENTED.fullmatch(n)} <= OWN
        others = [n for n in tree.body if not isinstance(n, ast.ClassDef)]
        assert all(isinstance(n, ast.Import | ast.ImportFrom | ast.Expr) for n in others)


def test_text_and_hash_are_the_same_in_every_process() -> None:
    code = (
        "import sys\nfrom primitives.ir import Program\nfrom primitives.lower import lower\n"
        "made = lower(Program.from_json(sys.stdin.read()))\nprint(made.hash, made.text)\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "31337", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=CHAIN.program.to_json(),
        env=environment,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    made = lower(CHAIN.program)
    assert done.stdout == f"{made.hash} {made.text}\n"


def test_hash_names_every_class_and_knows_the_program_and_the_devices_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = lower(NORM.program)
    assert made.module.endswith(made.hash[:16])
    for name in kernel_names(made):
        assert name.endswith(made.hash[:12]) and f"class {name}" in made.text
    others = [
        trace(NORM.signature, *(line.replace("+ eps", "+ 2e-6") for line in NORM.lines)),
        trace(NORM.signature, *(line.replace("h * per_column", "x * per_column") for line in NORM.lines)),
        SWIGLU.program,
    ]
    assert len({made.hash, *(lower(p).hash for p in others)}) == 4
    monkeypatch.setattr(lowering, "device_sources", lambda: "other device code")
    assert lower(NORM.program).hash != made.hash


@pytest.mark.parametrize(
    "value",
    [
        0.1,
        1 / 3,
        -2.5,
        1e-6,
        1e-38,
        1e-45,
        3.4028234663852886e38,
        16777217.0,
        -0.0,
        5e-324,
        123456789.123456789,
    ],
)
def test_constants_survive(value: float) -> None:
    """Each as a literal that reads back to the bit."""
    program = trace(TILE, H, "return {'o': h - 77.0}")
    nodes = tuple(n._replace(attribute=value) if n.op == "constant" else n for n in program.nodes)
    text = lower(Program(TILE, nodes, program.outputs).check()).text
    (line,) = [line for line in text.splitlines() if " - " in line and "_0 = " in line]
    match ast.parse(line.strip()).body[0]:
        case ast.Assign(value=ast.BinOp(right=ast.expr() as right)):
            assert float(ast.literal_eval(right)).hex() == value.hex()
        case other:
            pytest.fail(ast.dump(other))


MASKS: list[tuple[str, bool]] = [
    ("h", False),
    ("h * h", False),
    ("h * 3 + r * r - h / 2", False),
    ("-h", False),
    ("silu(h) + tanh(r) + sqrt(h)", False),
    ("maximum(h, 0)", False),
    ("minimum(h, 2)", False),
    ("maximum(h, -1) * 1", False),
    ("where(h > 0, h, 0)", False),
    ("where(h > 0, 1, h)", False),
    ("h * exp(h)", False),
    ("exp(h) - 1", False),
    ("where(h >= 0, h, 1)", False),
    ("join(h, r)", False),
    ("pairs(z)[0] * h", False),
    ("h * (h + 1)", False),
    ("exp(h)", True),
    ("exp(h * 0.5)", True),
    ("h + 1", True),
    ("(h - 0.5) ** 2", True),
    ("sigmoid(h)", True),
    ("maximum(h, 0.5)", True),
    ("minimum(h, -0.5)", True),
    ("h >= 0", True),
    ("h <= 0", True),
    ("where(h > 0, h, 1)", True),
    ("h / r", True),
    ("log(h)", True),
    ("rsqrt(h)", True),
    ("h / h", True),
    ("h * log(h)", True),  # 0 * -inf is not a number
    ("h + per_column(b)", True),
    ("h * per_column(b)", True),  # a vector past its end may hold what is not a number
    ("h - per_row(v)", True),
    ("h + h.columns", True),
    ("join(h, h + 1)", True),
    ("h + exp(pairs(z)[0])", True),
]


@pytest.mark.parametrize(("expression", "masked"), MASKS, ids=[m[0] for m in MASKS])
def test_masks_appear_exactly_where_zeros_do_not_stay_zero(expression: str, masked: bool) -> None:
    text = lower(trace(SUM, H, f"return {{'s': row_sums({expression})}}")).text
    assert f"masked={masked})" in text and f"masked={not masked})" not in text
    assert ("choose(inside(offsets" in text) == masked and ("edge(self" in text) == masked


def test_a_mask_looks_through_a_later_steps_loads_and_vectors() -> None:
    program = trace(SUM, H, "g = gemm(h, q) * per_row(row_sums(exp(h)))", "return {'s': row_sums(g + h)}")
    text = lower(program).text
    assert re.findall(r"masked=(\w+)", text) == ["True", "True"]
    program = trace(SUM, H, "g = gemm(exp(h), q)", "return {'s': row_sums(g * h)}")
    assert re.findall(r"masked=(\w+)", lower(program).text) == ["False"]


EXACT: list[tuple[dict[str, str], str, set[str]]] = [
    ({"o": "bf16"}, "return {'o': sigmoid(h)}", {"sigmoid_fast"}),
    ({"o": "bf16"}, "return {'o': silu(h)}", {"sigmoid_fast"}),
    ({"o": "bf16"}, "return {'o': tanh(h)}", {"tanh_fast"}),
    ({"o": "fp16"}, "return {'o': sigmoid(h) * 2}", {"sigmoid"}),  # 11 bits see what 8 do not
    ({"o": "fp32"}, "return {'o': sigmoid(h)}", {"sigmoid"}),
    ({"o": "fp32"}, "return {'o': silu(tanh(h))}", {"sigmoid", "tanh"}),
    ({"s": "fp32"}, "return {'s': row_sums(silu(h))}", {"sigmoid"}),
    ({"s": "bf16"}, "return {'s': row_sums(silu(h))}", {"sigmoid"}),
    ({"o": "bf16", "s": "fp32"}, "return {'o': tanh(h), 's': row_sums(silu(h))}", {"tanh_fast", "sigmoid"}),
    (
        {"o": "bf16", "s": "fp32"},
        "return {'o': tanh(silu(h)), 's': row_sums(silu(h))}",
        {"tanh_fast", "sigmoid"},
    ),
    ({"o": "bf16", "e": "fp32"}, "return {'o': sigmoid(h), 'e': sigmoid(h) + 1}", {"sigmoid"}),
    ({"o": "bf16", "e": "fp32"}, "return {'o': sigmoid(h), 'e': tanh(h)}", {"sigmoid_fast", "tanh"}),
    # What a later step sees of an earlier one was rounded to bf16 in between.
    ({"e": "fp32"}, "return {'e': gemm(silu(h), q)}", {"sigmoid_fast"}),
    ({"s": "fp32"}, "return {'s': sigmoid(row_sums(h))}", {"sigmoid"}),
]


@pytest.mark.parametrize(("dtypes", "line", "used"), EXACT, ids=[e[1] for e in EXACT])
def test_no_coarse_instruction_reaches_an_fp32_output(
    dtypes: dict[str, str], line: str, used: set[str]
) -> None:
    outputs = {n: tensor("M" if n == "s" else "M, N", d) for n, d in dtypes.items()}
    text = lower(trace(given(**outputs), H, line)).text
    body = text[text.index("\nclass ") :]
    assert set(re.findall(r"\b(sigmoid_fast|sigmoid|tanh_fast|tanh)\(", body)) == used


def test_arguments_say_what_each_tensor_is() -> None:
    made = lower(BACKWARD.program)
    (kernel,) = made.gemms
    outputs = BACKWARD.program.outputs
    assert kernel.c is not None and kernel.d is not None
    assert (kernel.c.role, kernel.c.dtype, kernel.c.packed) == ("load", "bf16", True)
    assert (kernel.d.node, kernel.d.packed) == (outputs["dz"], True)
    assert [(a.role, a.node, a.dtype) for a in kernel.arguments] == [
        ("store", outputs["act"], "bf16"),
        ("partial", outputs["s"], "fp32"),
    ]
    assert (kernel.a_transposed, kernel.b_transposed, kernel.dtype, kernel.half) == (
        False,
        False,
        "bf16",
        False,
    )
    (vector,) = made.vectors
    assert [(a.role, a.node) for a in vector.arguments] == [("partial", outputs["s"]), ("out", outputs["s"])]
    (kernel,) = lower(SWIGLU.program).gemms
    assert (kernel.half, kernel.b_transposed, kernel.c) == (True, True, None)


REFUSED: dict[str, tuple[Signature, tuple[str, ...], str, str]] = {
    "half-width load": (
        TILE,
        (H, "a, c = pairs(gemm(h, wide.mT))", "return {'o': a * c + r}"),
        "width",
        "can be stored but not loaded",
    ),
    "half-width read back": (
        TILE,
        (H, "a, c = pairs(gemm(h, wide.mT))", "return {'o': a * c + h}"),
        "width",
        "can be stored but not loaded",
    ),
    "half-width fp32": (
        FULL,
        (H, "a, c = pairs(gemm(h, wide.mT))", "return {'o': a * c}"),
        "width",
        "an fp32 tile stored at another",
    ),
    "double-width fp32": (
        given(o=tensor("M, 2*N", "fp32")),
        (H, "return {'o': join(h, h)}"),
        "width",
        "an fp32 tile stored at another",
    ),
    "double-width fp32 load": (
        signature(INPUTS | {"z": tensor("M, 2*N", "fp32")}, {"o": tensor("M, N")}),
        (H, "return {'o': pairs(z)[0] + h}"),
        "width",
        "an fp32 tile loaded at another",
    ),
    "fp32 operand": (TILE, ("return {'o': gemm(full, q)}",), "dtype", "bf16 and fp32: both must be bf16"),
    "fp32 output as operand": (
        given(o=tensor("M, N"), e=tensor("M, N", "fp32")),
        (H, "return {'e': h, 'o': gemm(h, q)}"),
        "dtype",
        "bf16 and fp32",
    ),
    "operands of two dtypes": (TILE, ("return {'o': gemm(x, half.mT)}",), "dtype", "bf16 and fp16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_reach_is_refused(name: str) -> None:
    declared, lines, code, words = REFUSED[name]
    program = trace(declared, *lines)
    with pytest.raises(ProgramError) as caught:
        lower(program)
    assert (caught.value.code, words in caught.value.message) == (code, True), caught.value.message


def test_the_deepest_program_is_lowered() -> None:
    """A tile, a row, a scalar and a vector through hundreds of operations each."""
    lines = (
        H,
        "t, f, k, s = h, per_row(v), 1 / h.columns, row_sums(h)",
        "for _ in range(110):",
        "    t, f, k, s = -t, -f, -k, -s",
        "return {'o': t * f * k, 's': s + row_sums(t)}",
    )
    program = trace(given(o=tensor("M, N"), s=tensor("M", "fp32")), *lines)
    agree(program, SIZES)
    nodes = [Node("input", (), "x"), Node("input", (), "w"), Node("transpose", (1,)), Node("gemm", (0, 2))]
    sums = [*nodes, *(Node("negative", (i + 3,)) for i in range(500)), Node("row_sums", (503,))]
    vectors = [*nodes, Node("row_sums", (3,)), *(Node("negative", (i + 4,)) for i in range(500))]
    for made in (sums, vectors):
        compile(lower(Program(SUM, tuple(made), {"s": 504}).check()).text, "<lowered>", "exec")
