"""Tests of lowered text. Some tests run the text lane by lane and compare the results with the interpreter.
Other tests check the names and masks in the text, and the tiles that a program admits."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from checkout import ROOT
from kernels import (
    ALPHA,
    BACKWARD,
    CHAIN,
    CROSS_ENTROPY,
    EXAMPLES,
    FP8,
    NORM,
    QK_NORM,
    ROPE,
    SWIGLU,
    TURNED,
    WIDTHS,
    Example,
    draw,
    kernel_names,
    run_lowered,
    signature,
    tensor,
    trace,
)
from machine import LANGUAGE

from coda_agent.primitives.compiler import lower as lowering
from coda_agent.primitives.compiler.lower import GemmKernel, VectorKernel, lower
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import Node, Program
from coda_agent.primitives.lang.schedule import TILES, Schedule
from coda_agent.primitives.lang.signature import Signature, TensorType

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
    "wf": tensor("M, 2*N", "fp32"),
    "b2": tensor("2*N", "fp16"),
    "i": tensor("M", "int32"),
    "j": tensor("M", "int64"),
    "alpha": tensor("", "fp32"),
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
            "k = where(alpha > h.rows, 1, 2) + maximum(alpha, h.rows) * exp(0.5) - rsqrt(h.columns)",
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
    "half-width loads, read back and given": (
        given(o=tensor("M, N"), e=tensor("M, N", "fp32")),
        (
            H,
            "a, c = pairs(gemm(h, wide.mT))",
            "return {'o': a * c + r, 'e': a * h + full}",
        ),
    ),
    "fp32 at other widths": (
        given(o=tensor("M, 2*N", "fp32"), e=tensor("M, 2*N", "fp16"), p=tensor("M, N")),
        (H, "d = join(h, h * 2) + wf", "return {'o': d, 'e': d * wf, 'p': pairs(wf)[0] + h}"),
    ),
    "columns of all widths": (
        given(o=tensor("M, N", "fp32"), d=tensor("M, 2*N")),
        (
            "t = gemm(r, wide.mT)",
            "a, c = pairs(t)",
            "return {'o': a * per_column(b) + c, 'd': t * per_column(b2) * per_row(i)}",
        ),
    ),
    "reductions of all kinds and widths": (
        given(
            a=tensor("M", "fp32"),
            b1=tensor("M", "bf16"),
            c=tensor("M", "fp32"),
            d=tensor("2*N", "fp32"),
            e=tensor("N", "fp32"),
            f=tensor("N", "fp32"),
            g=tensor("2*N", "fp16"),
            k=tensor("M", "fp32"),
        ),  # fmt: skip
        (
            H,
            "j2 = join(h, h * r)",
            "return {'a': row_max(exp(j2)) + row_abs_max(h), 'b1': row_logsumexp(h * 3),"
            " 'c': row_select(h, i), 'd': column_sums(exp(j2)), 'e': column_max(h - 9),"
            " 'f': column_abs_max(h) * b, 'g': column_max(j2 - 9),"
            " 'k': row_logsumexp(j2) - row_select(h + 1, j) / row_logsumexp(h - 80)}",
        ),
    ),
    "reductions between steps": (
        given(o=tensor("M, N", "fp32"), s=tensor("M", "fp32")),
        (
            H,
            "lse = row_logsumexp(h)",
            "g = gemm(h, q) * per_row(lse) + per_column(column_sums(h)) * per_row(row_select(h, j))",
            "return {'o': g, 's': row_select(g, j) * row_select(h, j) + row_max(g)}",
        ),
    ),
    "comparisons and columns by number": (
        given(
            o=tensor("M, N", "fp32"),
            d=tensor("M, 2*N", "fp32"),
            p=tensor("M, N", "fp32"),
            n=tensor("M", "fp32"),
        ),
        (
            H,
            "t = join(h, r)",
            "hot = column_index(h) == per_row(j)",
            "return {'o': where(hot, h, -h), 'd': column_index(t) * t, 'p': (h != r) * 2 + (h == h),"
            " 'n': (i == j) + (i != 3)}",
        ),
    ),
    "scalars in memory": (
        given(o=tensor("M, N"), s=tensor("M", "fp32"), t=tensor("M", "fp32")),
        (
            H,
            "k = 1 / (alpha * alpha + 1)",
            "return {'o': h * k + alpha, 's': v * alpha, 't': row_sums(h) * k}",
        ),
    ),
    "rows and columns": (
        given(o=tensor("M, N", "fp32"), p=tensor("M, N"), s=tensor("M", "fp32")),
        (H, "u = per_row(v) * per_column(b)", "return {'o': h - u, 'p': u, 's': row_sums(u)}"),
    ),
    "functions": (
        given(o=tensor("M, N", "fp32"), p=tensor("M, N")),
        (H, "return {'o': gelu(h) + sin(h * 9) - cos(h) * abs(r), 'p': gelu(r) * sin(r) - cos(h) - abs(-h)}"),
    ),
    "literals": (
        TILE,
        (H, "return {'o': maximum(h, -1.5) - (-2) * minimum(-0.1, h) + where(1, h, r) * where(0, r, h)}"),
    ),
}


W = signature(
    {
        "x": tensor("M, K"), "w": tensor("2*H*P, K"), "r": tensor("M, 2*H*P"), "v": tensor("M", "fp32"),
        "b": tensor("2*H*P"), "alpha": tensor("", "fp32"), "gamma": tensor("2*P"),
        "freq": tensor("P", "fp32"), "cos_sin": tensor("M, 2*P", "fp32"), "i": tensor("M", "int64"),
        "q": tensor("2*H*P, 2*H*P"),
    },
    {},
    ("P",),
)  # fmt: skip
ONE, HALF, STATISTIC = tensor("M, 2*H*P", "fp32"), tensor("M, H*P", "fp32"), tensor("M, H", "fp32")
OF_HEADS: dict[str, tuple[dict[str, TensorType], tuple[str, ...]]] = {
    "two statistics of two widths": (
        {"o": ONE, "s": STATISTIC, "n": tensor("M, 2*H", "fp32")},
        (
            "mean = head_sums(t, 2 * P) / (2 * P)",
            "n = head_sums(t * t, P)",
            "return {'o': (t - per_head(mean)) * per_head(rsqrt(n + 1)), 's': mean * per_row(v), 'n': n}",
        ),
    ),
    "a sweep over vectors and scalars": (
        {"s": tensor("M, H", "bf16"), "o": ONE},
        (
            "u = t * per_column(b) * per_row(v) * alpha + 1 / t.columns",
            "s = head_sums(join(pairs(u)[1], abs(pairs(u)[0])), 2 * P)",
            "return {'s': s, 'o': where(per_head(s) > 0.5, t, r)}",
        ),
    ),
    "what repeats, at both widths": (
        {"o": ONE, "h": HALF, "p": tensor("M, 2*H*P")},
        (
            "left, right = pairs(t)",
            "c, s = pairs(per_head(cos_sin))",
            "g = per_head(gamma)",
            "return {'o': t * g + per_head(cos_sin), 'h': left * per_head(freq) - s * right + c,"
            " 'p': rope(t * exp(g), v, freq)}",
        ),
    ),
    "what repeats is computed before": (
        {"o": tensor("M, 2*H*P")},
        ("return {'o': rope(gemm(t, q), i, exp(-freq)) * per_head(gamma * 2 + 1)}",),
    ),
}


SUMMED: dict[str, tuple[str, bool]] = {
    "return {'o': total + t}": ("a bulk store adds it", True),
    "return {'o': abs(t) * r + total}": ("whichever side it stands on", True),
    "return {'o': total + t, 'p': t * total}": ("it is read for more", False),
    "return {'o': total - t}": ("no sum", False),
    "return {'o': total + t * total}": ("read twice", False),
    "return {'o': total + per_head(head_sums(t, 2 * P))}": ("one value for a pair of lanes", False),
    "o = total + t\nreturn {'o': o, 's': row_max(o)}": ("the sum itself is wanted", False),
}


@pytest.mark.parametrize("text", SUMMED, ids=[why for why, _ in SUMMED.values()])
def test_a_sum_over_its_own_input_is_added_by_the_store_where_it_can_be(text: str) -> None:
    outputs = {"o": ONE, "p": tensor("M, 2*H*P"), "s": tensor("M", "fp32")}
    declared = W._replace(
        inputs={**W.inputs, "total": ONE},
        outputs={n: t for n, t in outputs.items() if f"'{n}'" in text},
        updates={"o": "total"},
    )
    program = trace(declared, "t = gemm(x, w.mT)", *text.split("\n"))
    (kernel,) = lower(program).gemms
    assert (kernel.adds is not None) == SUMMED[text][1]
    agree(program, {"M": 12, "K": 16, "H": 3, "P": 4})


@pytest.mark.parametrize("name", OF_HEADS)
def test_texts_of_heads_compute_what_the_interpreter_does(name: str) -> None:
    outputs, lines = OF_HEADS[name]
    agree(trace(W._replace(outputs=outputs), "t = gemm(x, w.mT)", *lines), {"M": 12, "K": 16, "H": 3, "P": 4})


@pytest.mark.parametrize("name", PROGRAMS)
def test_texts_of_many_shapes_compute_what_the_interpreter_does(name: str) -> None:
    declared, lines = PROGRAMS[name]
    agree(trace(declared, *lines), SIZES)


def everything() -> list[Program]:
    heads = [trace(W._replace(outputs=o), "t = gemm(x, w.mT)", *lines) for o, lines in OF_HEADS.values()]
    others = [trace(s, *lines) for s, lines in PROGRAMS.values()]
    return [e.program for e in EXAMPLES.values()] + heads + others


def test_no_string_of_a_program_enters_its_text() -> None:
    """If all names of a program change, its text stays the same, byte for byte. So no name in the text comes
    from the program."""
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
                declared.static,
                {renamed[n]: inputs[t] for n, t in declared.updates.items()},
            ),
            nodes,
            {renamed[n]: i for n, i in program.outputs.items()},
            {0: Schedule(swizzle=2)},
        ).check()
        assert lower(other).text == lower(program).text and lower(other).hash == lower(program).hash
        assert lower(other) != lower(trace(TILE, H, "return {'o': h + 42}"))


INVENTED = re.compile(r"[tonwfpvrshie]\d+(_\d)?|(Step\d+|Finish\d+_\d+)_[0-9a-f]{12}")
OWN = {
    "self", "params", "states", "resources", "accumulator", "operand", "at", "number", "i", "place", "lane",
    "blocks", "launched", "min", "thread", "stream", "_epi_ops", "EpilogueArguments", "epi_visit_subtile",
    "epi_prepass_subtile", "epi_needs_acc_prepass", "kernel", "__call__", "cute", "cutlass", "Float32",
    "add", "max", "max_abs",
}  # fmt: skip
OFFERED = {*lowering.resources(), *(name for names in lowering.exports().values() for name in names)}


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
        assert {n for n in names(body) if not INVENTED.fullmatch(n)} <= OWN | OFFERED
        others = [n for n in tree.body if not isinstance(n, ast.ClassDef)]
        assert all(isinstance(n, ast.Import | ast.ImportFrom | ast.Expr) for n in others)
        imported = {a.name for n in others if isinstance(n, ast.ImportFrom) for a in n.names}
        assert imported == {"Float32"} | {n for n in names(body) if n in OFFERED}


def test_a_finishing_kernel_starts_early_and_waits_before_it_touches_memory() -> None:
    seen = 0
    wait = "        cute.arch.griddepcontrol_wait()\n"
    for program in everything():
        lowered = lower(program)
        for kernel in (v for v in lowered.vectors if v.name.startswith("Finish")):
            text = lowered.text.partition(f"class {kernel.name}:")[2].partition("\nclass ")[0]
            launch, body = text.split("@cute.kernel")
            before, waits, after = body.partition(wait)
            assert launch.count(", use_pdl=True)") == 1 and waits and "griddepcontrol" not in after
            tensors = "|".join(a.name for a in kernel.arguments if a.rank)
            assert not re.search(rf"\b(?:{tensors})\[|finish_", before)
            assert re.search(rf"\b(?:{tensors})\[", after)
            seen += 1
    assert seen > 20


def test_the_machine_knows_every_word_of_device_code() -> None:
    assert set(LANGUAGE) >= OFFERED


def test_text_and_hash_are_the_same_in_every_process() -> None:
    code = (
        "import sys\nfrom coda_agent.primitives.lang.ir import Program\n"
        "from coda_agent.primitives.compiler.lower import lower\n"
        "made = lower(Program.from_json(sys.stdin.read()))\nprint(made.hash, made.text)\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "31337", "PYTHONPATH": str(ROOT / "src")}
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
    source = lowering.device_source
    for module, told in (("mainloop", True), ("finish", True), ("heads", False)):
        changed = {module: "other device code"}
        monkeypatch.setattr(lowering, "device_source", lambda m, c=changed: c.get(m) or source(m))
        assert (lower(NORM.program).hash != made.hash) == told, module
        assert lower(QK_NORM.program).hash != lower(NORM.program).hash


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
    """The text has each constant as a literal that reads back as the same bits."""
    program = trace(TILE, H, "return {'o': h - 77.0}")
    nodes = tuple(n._replace(attribute=value) if n.op == "constant" else n for n in program.nodes)
    text = lower(Program(TILE, nodes, program.outputs).check()).text
    (line,) = [line for line in text.splitlines() if " - " in line and "_0 = " in line]
    match ast.parse(line.strip()).body[0]:
        case ast.Assign(value=ast.BinOp(right=ast.expr() as right)):
            assert float(ast.literal_eval(right)).hex() == value.hex()
        case other:
            pytest.fail(ast.dump(other))


def test_lowering_remembers_the_sign_of_zero() -> None:
    """Two programs that differ only in the sign of a zero compare equal, but must have different texts."""
    program = trace(TILE, H, "return {'o': h - 77.0}")

    def with_constant(value: float) -> Program:
        nodes = tuple(n._replace(attribute=value) if n.op == "constant" else n for n in program.nodes)
        return Program(TILE, nodes, program.outputs).check()

    assert with_constant(0.0) == with_constant(-0.0)
    assert lower(with_constant(0.0)).text != lower(with_constant(-0.0)).text


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
    ("h * per_column(b)", True),  # memory behind the vector's end may hold NaN
    ("h - per_row(v)", True),
    ("h + h.columns", True),
    ("join(h, h + 1)", True),
    ("h + exp(pairs(z)[0])", True),
    ("abs(h) + gelu(r) * sin(h)", False),
    ("where(h == 0, 0, h)", False),
    ("h != 0", False),
    ("cos(h)", True),
    ("h == 0", True),
    ("where(h == 0, 1, h)", True),
    ("column_index(h) * h", True),
    ("h + full - full", False),
    ("join(h, r) * wf", True),  # beyond the edge, a read of wf returns the value at the edge, not 0
    ("h * alpha", True),  # alpha may be infinite or NaN
]


@pytest.mark.parametrize(("expression", "masked"), MASKS, ids=[m[0] for m in MASKS])
def test_masks_appear_exactly_where_zeros_do_not_stay_zero(expression: str, masked: bool) -> None:
    text = lower(trace(SUM, H, f"return {{'s': row_sums({expression})}}")).text
    assert ("choose(inside_columns(place" in text) == masked and "inside_rows" not in text
    wide = given(s=tensor("2*N" if "join" in expression else "N", "fp32"))
    text = lower(trace(wide, H, f"return {{'s': column_abs_max(where(1, {expression}, 0))}}")).text
    assert ("choose(inside_rows(place" in text) == masked and "inside_columns" not in text
    text = lower(trace(SUM, H, f"return {{'s': row_max({expression})}}")).text
    assert "choose(inside_columns(place" in text and text.count("LOWEST") > 1  # 0 is not max's identity


def test_a_mask_looks_through_a_later_steps_loads_and_vectors() -> None:
    program = trace(SUM, H, "g = gemm(h, q) * per_row(row_sums(exp(h)))", "return {'s': row_sums(g + h)}")
    assert lower(program).text.count("choose(inside_columns") == 4  # two lanes in each of two steps
    program = trace(SUM, H, "g = gemm(exp(h), q)", "return {'s': row_sums(g * h)}")
    assert "inside_columns" not in lower(program).text


FUNCTIONS = "sigmoid|tanh|gelu|sine|cosine"
EXACT: list[tuple[dict[str, str], str, set[str]]] = [
    ({"o": "bf16"}, "return {'o': sigmoid(h)}", {"sigmoid_fast"}),
    ({"o": "bf16"}, "return {'o': silu(h)}", {"sigmoid_fast"}),
    ({"o": "bf16"}, "return {'o': tanh(h)}", {"tanh_fast"}),
    ({"o": "fp16"}, "return {'o': sigmoid(h) * 2}", {"sigmoid"}),  # fp16 shows errors that bf16 hides
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
    # An earlier step's result is rounded to bf16 before a later step reads it.
    ({"e": "fp32"}, "return {'e': gemm(silu(h), q)}", {"sigmoid_fast"}),
    ({"s": "fp32"}, "return {'s': sigmoid(row_sums(h))}", {"sigmoid"}),
    ({"o": "bf16"}, "return {'o': gelu(h) * sin(h) - cos(h)}", {"gelu_fast", "sine_fast", "cosine_fast"}),
    ({"o": "fp32"}, "return {'o': gelu(h) * sin(h) - cos(h)}", {"gelu", "sine", "cosine"}),
    ({"s": "bf16"}, "return {'s': row_logsumexp(gelu(h)) + sin(v)}", {"gelu", "sine"}),
]


@pytest.mark.parametrize(("dtypes", "line", "used"), EXACT, ids=[e[1] for e in EXACT])
def test_no_coarse_instruction_reaches_an_fp32_output(
    dtypes: dict[str, str], line: str, used: set[str]
) -> None:
    outputs = {n: tensor("M" if n == "s" else "M, N", d) for n, d in dtypes.items()}
    text = lower(trace(given(**outputs), H, line)).text
    body = text[text.index("\nclass ") :]
    assert set(re.findall(rf"\b((?:{FUNCTIONS})(?:_fast)?)\(", body)) == used


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
    assert (kernel.a_transposed, kernel.b_transposed, kernel.dtype) == (False, False, "bf16")
    assert kernel.periods == kernel.grains == ()
    (vector,) = made.vectors
    assert [(a.role, a.node) for a in vector.arguments] == [("partial", outputs["s"]), ("out", outputs["s"])]
    (kernel,) = lower(SWIGLU.program).gemms
    assert (kernel.b_transposed, kernel.c) == (True, None)
    assert [str(g) for g in kernel.grains] == ["32"]  # because act is half as wide as the GEMM


def roles(kernel: GemmKernel | VectorKernel, program: Program) -> dict[str, str]:
    """Return the role and dtype of each argument, by the name of its input or output."""
    names = {i: str(n.attribute) for i, n in enumerate(program.nodes) if n.op in ("input", "dim")}
    names |= {i: name for name, i in program.outputs.items()}
    return {names.get(a.node, program.nodes[a.node].op): f"{a.role} {a.dtype}" for a in kernel.arguments}


def test_arguments_of_every_role() -> None:
    (kernel,) = lower(QK_NORM.program).gemms
    assert roles(kernel, QK_NORM.program) == {
        "gamma": "memory bf16", "inv_freq": "memory fp32", "positions": "row int32", "P": "scalar fp32",
        "head_sums": "head fp32", "rstd": "memory fp32",
    }  # fmt: skip
    assert [str(p) for p in kernel.periods] == ["2*P"] and kernel.head_widths({"P": 64}) == (128,)
    assert kernel.d is not None and kernel.d.node == QK_NORM.program.outputs["q"]
    (kernel,), (vector,) = lower(ALPHA.program).gemms, lower(ALPHA.program).vectors
    assert roles(kernel, ALPHA.program) == {"alpha": "pointer fp32", "row_abs_max": "partial fp32"}
    assert roles(vector, ALPHA.program)["alpha"] == "pointer fp32"
    (kernel,), (vector,) = lower(CROSS_ENTROPY.program).gemms, lower(CROSS_ENTROPY.program).vectors
    assert [(a.role, a.dtype, a.rank) for a in kernel.arguments] == [
        ("partial", "fp32", 3), ("index", "int64", 1), ("partial", "fp32", 1),
    ]  # fmt: skip
    assert [a.role for a in vector.arguments] == ["partial", "partial", "vector", "extent", "out", "out"]
    (kernel,) = lower(FP8.program).gemms
    assert (kernel.dtype, kernel.b_transposed) == ("fp8_e4m3", True)
    (kernel,) = lower(WIDTHS.program).gemms
    # no tile is as wide as the GEMM, so threads load and store all tiles
    assert (kernel.c, kernel.d, kernel.grains) == (None, None, ())
    assert sorted(a.part for a in kernel.arguments if a.role == "partial") == [0, 0, 0, 0, 0, 1]


FITS: list[tuple[Example, dict[str, int], set[int]]] = [
    (NORM, {}, {32, 64, 128, 160, 192, 208, 224, 256}),
    (SWIGLU, {}, {32, 64, 128, 160, 192, 224, 256}),  # pairs are stored in multiples of 32 columns
    (QK_NORM, {"P": 64}, {128, 256}),
    (QK_NORM, {"P": 48}, {192}),
    (QK_NORM, {"P": 16}, {32, 64, 128, 160, 192, 224, 256}),
    (QK_NORM, {"P": 104}, set()),  # sums of heads need a multiple of 32 columns, and 2 * 104 is not one
    (QK_NORM, {"P": 24}, set()),
    (QK_NORM, {"P": 8}, set()),
    (QK_NORM, {"P": 40}, set()),
    (QK_NORM, {"P": 256}, set()),
    (ROPE, {"P": 104}, {208}),
    (ROPE, {"P": 8}, {32, 64, 128, 160, 192, 208, 224, 256}),
    (ROPE, {"P": 24}, {192}),
    (ROPE, {"P": 40}, {160}),
    (ROPE, {"P": 64}, {32, 64, 128, 256}),  # a head that reads a table may be several tiles wide
    (ROPE, {"P": 176}, {32}),
    (ROPE, {"P": 312}, set()),  # but not if threads address the table, as at 624 columns, three times 208
    (TURNED, {"P": 64}, {32, 64, 128, 160, 192, 208, 224, 256}),  # a vector's heads may straddle tiles
    (TURNED, {"P": 256}, {32, 64, 128, 160, 192, 208, 224, 256}),
    (TURNED, {"P": 6}, set()),
    (ROPE, {"P": 2}, set()),  # a thread's lanes recur every 8 columns, so a thread would mix heads
    (ROPE, {"P": 6}, set()),
    (ROPE, {"P": 72}, set()),
]


@pytest.mark.parametrize(("example", "sizes", "fitting"), FITS)
def test_tiles_hold_whole_heads_and_pairs(example: Example, sizes: dict[str, int], fitting: set[int]) -> None:
    (kernel,) = lower(example.program).gemms
    schedules = [Schedule(m, n, p) for m, n, p in TILES]
    assert {s.tile_n for s in schedules if kernel.admits(s, sizes)} == fitting
    words = kernel.wants(sizes)
    assert (f"heads of {2 * sizes['P']} columns" in words) if sizes else not words or "32" in words
    table = example is ROPE and 2 * sizes["P"] % 32 == 0
    assert ("whole" in words, "equal part" in words) == (example in (QK_NORM, ROPE), table)


def test_the_deepest_program_is_lowered() -> None:
    """A tile, a row, a scalar and a vector each pass through more than a hundred operations."""
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
