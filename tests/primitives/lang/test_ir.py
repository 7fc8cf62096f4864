"""Programs in JSON: writing and reading a program leaves it unchanged. The hash of a program depends only on
its meaning. Hostile JSON is refused with a code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from authoring import resources
from checkout import ROOT
from kernels import ACCUMULATE, BACKWARD, EXAMPLES, NORM, QK_NORM, signature, source, tensor, trace

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import MAX_BYTES, MAX_NODES, Node, Operation, Program, register
from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.lang.signature import Signature

PLAIN = signature({"x": tensor("M, K"), "w": tensor("N, K")}, {"o": tensor("M, N")}, c=0.5)


def plain(*lines: str) -> Program:
    return trace(PLAIN, *lines)


def refused(text: str, given: Signature | None = None) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        Program.from_json(text, given)
    assert caught.value.message
    return caught.value


@pytest.mark.parametrize("name", EXAMPLES)
def test_round_trip(name: str) -> None:
    program = EXAMPLES[name].program._replace(schedule={0: Schedule(256, 192, False, 1, 2, 16, True, True)})
    text = program.to_json()
    for given in (None, program.signature):
        again = Program.from_json(text, given)
        assert again == program
        assert again.to_json() == text and again.hash == program.hash


def test_json_is_canonical() -> None:
    program = NORM.program
    shuffled = Program(
        Signature(
            program.signature.name,
            program.signature.dims,
            dict(reversed(program.signature.inputs.items())),
            dict(reversed(program.signature.outputs.items())),
            program.signature.constants,
        ),
        program.nodes,
        dict(reversed(program.outputs.items())),
    )
    assert shuffled.to_json() == program.to_json()
    assert (
        Program.from_json(json.dumps(json.loads(program.to_json()), indent=3)).to_json() == program.to_json()
    )


SAME = [
    ("h = gemm(x, w.mT)", "a = exp(h)", "b = tanh(h * 0.5)", "return {'o': a + b}"),
    (
        "'''Docstring.'''",
        "acc = gemm(x, w.mT)  # comment",
        "",
        "right = tanh(acc * 0.5)",
        "left = exp(acc)",
        "return {'o': left + right}",
    ),
    ("return dict(o=exp(gemm(x, w.mT)) + tanh(gemm(x, w.mT) * c))",),
    (
        "unused = silu(gemm(w, w.mT))",
        "h = gemm(x, w.mT)",
        "h0 = h",
        "return {'o': exp(h0) + tanh(h * (1 / 2))}",
    ),
]


@pytest.mark.parametrize("lines", SAME)
def test_hash_knows_meaning_only(lines: tuple[str, ...]) -> None:
    assert plain(*lines).to_json() == plain(*SAME[0]).to_json()


def test_hash_of_zeros_does_not_depend_on_which_came_first() -> None:
    first = ("h = gemm(x, w.mT)", "a = h * 0.0", "b = h - (-0.0)", "return {'o': a + b}")
    assert plain(first[0], first[2], first[1], first[3]).hash == plain(*first).hash


@pytest.mark.parametrize(
    "lines",
    [
        ("h = gemm(x, w.mT)", "return {'o': tanh(h * 0.5) + exp(h)}"),
        ("h = gemm(x, w.mT)", "return {'o': exp(h) + tanh(h * 0.5000000000000001)}"),
        ("h = gemm(x, w.mT)", "return {'o': exp(h) - tanh(h * 0.5)}"),
        ("h = gemm(x, w.mT)", "return {'o': exp(h) + tanh(h * h)}"),
    ],
)
def test_hash_tells_programs_apart(lines: tuple[str, ...]) -> None:
    assert plain(*lines).hash != plain(*SAME[0]).hash


def test_hash_covers_signature_and_schedule() -> None:
    program = plain(*SAME[0])
    fp16 = {"x": tensor("M, K", "fp16"), "w": tensor("N, K", "fp16")}
    others = [
        Program(PLAIN._replace(name="other"), program.nodes, program.outputs),
        Program(PLAIN._replace(constants={"c": 0.25}), program.nodes, program.outputs),
        Program(PLAIN._replace(inputs=fp16), program.nodes, program.outputs),
        Program(PLAIN._replace(static=("M",)), program.nodes, program.outputs),
        Program(PLAIN._replace(updates={"o": "x"}), program.nodes, program.outputs),
        program._replace(schedule={0: Schedule()}),
        program._replace(schedule={0: Schedule(swizzle=4)}),
    ]
    assert len({program.hash, *(p.hash for p in others)}) == 8


def test_hash_is_the_same_in_every_process() -> None:
    code = (
        "import json, sys\n"
        "from coda_agent.primitives.lang.ir import Signature\n"
        "from coda_agent.primitives.lang.kernel_file import trace_source\n"
        "text, data = json.load(sys.stdin)\n"
        "print(trace_source(text, Signature.from_json(data)).hash)\n"
    )
    request = json.dumps([source(BACKWARD.signature, *BACKWARD.lines), BACKWARD.signature.to_json()])

    def child(seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT / "src")}
        return subprocess.run(
            [sys.executable, "-c", code],
            input=request,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    assert {child(seed) for seed in ("0", "1", "4242", "random")} == {BACKWARD.program.hash}


def test_an_operation_is_defined_once() -> None:
    with pytest.raises(ValueError, match="'gemm' is defined twice"):
        register(Operation("gemm", lambda types, attribute: types[0]))


Edit = Callable[[dict[str, Any]], Any]


def edited(edit: Edit) -> str:
    """Return the JSON of NORM after an edit. ``edit`` changes the data in place or returns other data."""
    data = json.loads(NORM.program.to_json())
    return json.dumps(edit(data) or data)


def node(index: int, value: Any) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        data["nodes"][index] = value

    return edit


def put(path: str, value: Any) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for key in parents:
            data = data[key]
        data[last] = value

    return edit


def test_the_program_under_edit_is_as_the_edits_assume() -> None:
    program = NORM.program
    at = {index: node.op for index, node in enumerate(program.nodes)}
    assert (at[0], at[2], at[3], at[8], at[10]) == ("input", "transpose", "gemm", "multiply", "row_sums")
    assert (at[11], at[13]) == ("dim", "constant")


HOSTILE: dict[str, tuple[Edit, str]] = {
    "list": (lambda d: [d], "json"),
    "missing key": (lambda d: d.pop("schedule") and None, "json"),
    "extra key": (put("extra", 1), "json"),
    "older format": (put("format", 1), "format"),
    "newer format": (put("format", 3), "format"),
    "format true": (put("format", True), "format"),
    "format float": (put("format", 2.0), "format"),
    "unknown operation": (node(8, ["system", [3, 3], None]), "operation"),
    "private operation": (node(8, ["__class__", [3, 3], None]), "operation"),
    "operation a list": (node(8, [["add"], [3, 3], None]), "json"),
    "node too short": (node(8, ["add", [3, 3]]), "json"),
    "node a string": (node(8, "abc"), "json"),
    "node a dict": (node(8, {"op": "add", "args": [3], "attribute": None}), "json"),
    "node none": (node(8, None), "json"),
    "nodes a dict": (put("nodes", {}), "size"),
    "forward reference": (node(8, ["multiply", [5, 9], None]), "graph"),
    "itself": (node(8, ["multiply", [5, 8], None]), "graph"),
    "negative argument": (node(8, ["multiply", [5, -1], None]), "graph"),
    "argument beyond": (node(8, ["multiply", [5, 10**30], None]), "graph"),
    "argument true": (node(8, ["multiply", [5, True], None]), "json"),
    "argument float": (node(8, ["multiply", [5, 3.0], None]), "json"),
    "arguments a string": (node(8, ["multiply", "53", None]), "json"),
    "too few arguments": (node(8, ["multiply", [5], None]), "arguments"),
    "too many arguments": (node(8, ["multiply", [5] * 1000, None]), "arguments"),
    "gemm of one": (node(3, ["gemm", [0], None]), "arguments"),
    "sum of a vector": (node(10, ["row_sums", [6], None]), "arguments"),
    "unknown input": (node(0, ["input", [], "z"]), "input"),
    "input of a node": (node(1, ["input", [0], "w"]), "input"),
    "input unnamed": (node(0, ["input", [], None]), "input"),
    "input a number": (node(0, ["input", [], ["float", "0x1p0"]]), "input"),
    "attribute on add": (node(8, ["multiply", [5, 5], "x"]), "arguments"),
    "attribute on gemm": (node(3, ["gemm", [0, 2], "x"]), "arguments"),
    "attribute on row_sums": (node(10, ["row_sums", [9], ["float", "0x1p0"]]), "arguments"),
    "attribute a list": (node(8, ["multiply", [5, 5], [1, 2, 3]]), "json"),
    "attribute a dict": (node(8, ["multiply", [5, 5], {"a": 1}]), "json"),
    "attribute true": (node(13, ["constant", [], True]), "json"),
    "constant none": (node(13, ["constant", [], None]), "arguments"),
    "constant a string": (node(13, ["constant", [], "1.0"]), "arguments"),
    "constant decimal": (node(13, ["constant", [], 0.5]), "json"),
    "constant not a number": (node(13, ["constant", [], ["float", "nan"]]), "json"),
    "constant infinite": (node(13, ["constant", [], ["float", "-inf"]]), "json"),
    "constant overflowing": (node(13, ["constant", [], ["float", "0x1p9999"]]), "json"),
    "constant infinite in fp32": (node(13, ["constant", [], ["float", "0x1p128"]]), "constant"),
    "constant of another kind": (node(13, ["constant", [], ["int", "0x1p0"]]), "json"),
    "constant of a list": (node(13, ["constant", [], ["float", ["0x1p0"]]]), "json"),
    "dim undeclared": (node(11, ["dim", [], "Q"]), "dim"),
    "dim no size": (node(11, ["dim", [], "N/2"]), "dim"),
    "dim a call": (node(11, ["dim", [], "exit()"]), "dim"),
    "dim and a line": (node(11, ["dim", [], "N\n"]), "dim"),
    "dim and a comment": (node(11, ["dim", [], "N#x"]), "dim"),
    "dim in wide letters": (node(11, ["dim", [], "\uff2e"]), "dim"),
    "dim in hexadecimal": (node(11, ["dim", [], "0x10"]), "dim"),
    "dim with an underscore": (node(11, ["dim", [], "1_000"]), "dim"),
    "dim multiplied out": (node(11, ["dim", [], "N*(1)"]), "dim"),
    "dim in another order": (node(11, ["dim", [], "N + M"]), "dim"),
    "dim none": (node(11, ["dim", [], None]), "dim"),
    "dim of a node": (node(11, ["dim", [0], "N"]), "arguments"),
    "dead node": (lambda d: d["nodes"].append(["gemm", [0, 2], None]), "graph"),
    "too many nodes": (lambda d: d["nodes"].extend([["negative", [5], None]] * MAX_NODES), "size"),
    "outputs a list": (put("outputs", [1, 2, 3]), "json"),
    "output a string": (put("outputs/h", "5"), "json"),
    "output true": (put("outputs/h", True), "json"),
    "output beyond": (put("outputs/h", 99), "graph"),
    "output negative": (put("outputs/h", -1), "graph"),
    "output missing": (lambda d: d["outputs"].pop("h") and None, "outputs"),
    "output extra": (put("outputs/more", 5), "outputs"),
    "output of another kind": (put("outputs/rstd", 5), "output_shape"),
    "output a spread vector": (put("outputs/h", 7), "output_shape"),
    "schedule a list": (put("schedule", []), "json"),
    "schedule of a list": (put("schedule", {"0": []}), "json"),
    "schedule of a name": (put("schedule", {"x": {}}), "json"),
    "schedule of -1": (put("schedule", {"-1": {}}), "json"),
    "schedule of 00": (put("schedule", {"00": {}}), "json"),
    "schedule of another digit": (put("schedule", {"\u0660": {}}), "json"),
    "schedule of a huge step": (put("schedule", {"9" * 5000: {}}), "json"),
    "schedule of no step": (put("schedule", {"1": {}}), "schedule"),
    "schedule field unknown": (put("schedule", {"0": {"stages": 4}}), "schedule"),
    "schedule field true": (put("schedule", {"0": {"swizzle": True}}), "schedule"),
    "schedule field a number": (put("schedule", {"0": {"pingpong": 1}}), "schedule"),
    "schedule field a string": (put("schedule", {"0": {"tile_m": "128"}}), "schedule"),
    "schedule of no tile": (put("schedule", {"0": {"tile_m": 96}}), "schedule"),
    "schedule of no cluster": (put("schedule", {"0": {"cluster_m": 4}}), "schedule"),
    "schedule of no swizzle": (put("schedule", {"0": {"swizzle": 3}}), "schedule"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_are_refused(name: str) -> None:
    edit, code = HOSTILE[name]
    text = edited(edit)
    assert refused(text).code == code
    assert refused(text, NORM.signature).code == code


HOSTILE_SIGNATURES: dict[str, Edit] = {
    "none": put("signature", None),
    "string": put("signature", "norm"),
    "nameless": lambda d: d["signature"].pop("name") and None,
    "name of code": put("signature/name", "x; import os"),
    "inputs a list": put("signature/inputs", ["y"]),
    "input of code": put("signature/inputs/__import__('os')", {"shape": ["M"], "dtype": "bf16"}),
    "input with a capital": put("signature/inputs/X", {"shape": ["M"], "dtype": "bf16"}),
    "input's name too long": put(f"signature/inputs/{'x' * 65}", {"shape": ["M"], "dtype": "bf16"}),
    "output's name empty": put("signature/outputs/", {"shape": ["M"], "dtype": "bf16"}),
    "dim undeclared": put("signature/dims", ["M", "K"]),
    "dims a number": put("signature/dims", 3),
    "shape no size": put("signature/inputs/x/shape", ["M", "N/2"]),
    "shape huge": put("signature/inputs/x/shape", ["M", 10**4000]),
    "shape too many factors": put("signature/inputs/x/shape", ["M", "*".join("N" * 30)]),
    "scalar in bf16": put("signature/inputs/gamma/shape", []),
    "scalar output": put("signature/outputs/rstd", {"shape": [], "dtype": "fp32"}),
    "matrix of integers": put("signature/inputs/x/dtype", "int32"),
    "vector in fp8": put("signature/inputs/gamma/dtype", "fp8_e4m3"),
    "output of integers": put("signature/outputs/rstd/dtype", "int64"),
    "vector out in fp8": put("signature/outputs/rstd/dtype", "fp8_e4m3"),
    "static missing": lambda d: d["signature"].pop("static") and None,
    "static a number": put("signature/static", 3),
    "static no dim": put("signature/static", ["Q"]),
    "static a formula": put("signature/static", ["2*N"]),
    "static a list": put("signature/static", [["N"]]),
    "updates missing": lambda d: d["signature"].pop("updates") and None,
    "updates a list": put("signature/updates", ["h"]),
    "update of no output": put("signature/updates", {"nothing": "x"}),
    "update over no input": put("signature/updates", {"h": "nothing"}),
    "update over an output": put("signature/updates", {"h": "hg"}),
    "update over another shape": put("signature/updates", {"h": "y"}),
    "update over another dtype": put("signature/updates", {"rstd": "gamma"}),
    "update over nothing": put("signature/updates", {"h": None}),
    "updates over one input": put("signature/updates", {"h": "x", "hg": "x"}),
    "rank 4": put("signature/inputs/x/shape", ["M", "N", "K", "K"]),
    "dtype unknown": put("signature/inputs/x/dtype", "fp64"),
    "dtype missing": put("signature/inputs/x", {"shape": ["M", "N"]}),
    "constant not a number": put("signature/constants/eps", "nan"),
    "constant a number": put("signature/constants/eps", 1e-6),
    "constant overflowing": put("signature/constants/eps", "0x1p9999"),
}


@pytest.mark.parametrize("name", HOSTILE_SIGNATURES)
def test_hostile_signatures_are_refused(name: str) -> None:
    text = edited(HOSTILE_SIGNATURES[name])
    assert refused(text).code == "signature"
    assert refused(text, NORM.signature).code == "signature"


AT = {n.op: i for i, n in enumerate(QK_NORM.program.nodes)}  # for each operation, the index of its last node
SUMS, SPREAD, JOIN = AT["head_sums"], AT["per_head"], AT["join"]
SQUARE, ANGLE = QK_NORM.program.nodes[SUMS].args[0], AT["as_tile"]


def sums(attribute: Any) -> Edit:
    return node(SUMS, ["head_sums", [SQUARE], attribute])


HOSTILE_HEADS: dict[str, tuple[Edit, str]] = {
    "width in another order": (sums("P*2"), "dim"),
    "width spaced": (sums("2 * P"), "dim"),
    "width and a comment": (sums("2*P#"), "dim"),
    "width none": (sums(None), "dim"),
    "width empty": (sums(""), "dim"),
    "width a number": (sums(["float", "0x1p3"]), "dim"),
    "width an integer": (sums(64), "json"),
    "width of code": (sums("__import__('os')"), "dim"),
    "width a quotient": (sums("4*P/2"), "dim"),
    "width too long": (sums("2*" * 60 + "P"), "dim"),
    "width huge": (sums("9" * 5000), "dim"),
    "width zero": (sums("0"), "width"),
    "width negative": (sums("-2*P"), "width"),
    "width a sum": (sums("P + P*H"), "width"),
    "width too large": (sums("4*P"), "width"),
    "width undeclared": (sums("2*Q"), "width"),
    "width of another shape": (sums("P"), "output_shape"),
    "of two tiles": (node(SUMS, ["head_sums", [SQUARE, SQUARE], "2*P"]), "arguments"),
    "of nothing": (node(SUMS, ["head_sums", [], "2*P"]), "arguments"),
    "of a vector": (node(SPREAD, ["head_sums", [AT["input"]], "P"]), "arguments"),
    "attribute on per_head": (node(SPREAD, ["per_head", [AT["input"]], "P"]), "arguments"),
    "attribute on as_tile": (node(ANGLE, ["as_tile", [ANGLE - 1, ANGLE - 1], "P"]), "arguments"),
    "per_head of two": (node(SPREAD, ["per_head", [0, 1], None]), "arguments"),
    "per_head of an operand": (node(SPREAD, ["per_head", [2], None]), "arguments"),
    "as_tile of one": (node(ANGLE, ["as_tile", [0], None]), "broadcast"),
    "as_tile of tiles": (node(ANGLE, ["as_tile", [0, 1], None]), "broadcast"),
    "as_tile of a vector": (node(ANGLE, ["as_tile", [ANGLE - 2, SQUARE], None]), "broadcast"),
    "join of other things": (node(JOIN, ["join", [SUMS, SUMS], None]), "arguments"),
    "select by a sum": (node(JOIN, ["row_select", [SQUARE, AT["input"]], None]), "arguments"),
    "index of a head statistic": (node(JOIN, ["column_index", [SUMS], None]), "arguments"),
    "logsumexp named": (node(JOIN, ["row_logsumexp", [SQUARE], "P"]), "arguments"),
}


@pytest.mark.parametrize("name", HOSTILE_HEADS)
def test_hostile_heads_are_refused(name: str) -> None:
    edit, code = HOSTILE_HEADS[name]
    data = json.loads(QK_NORM.program.to_json())
    edit(data)
    assert refused(json.dumps(data)).code == code


def test_an_index_from_a_file_is_an_input_of_integers() -> None:
    given = {"x": tensor("M, K"), "w": tensor("N, K"), "i": tensor("M", "int32"), "v": tensor("M", "fp32")}
    program = trace(
        signature(given, {"s": tensor("M", "fp32")}), "return {'s': row_select(gemm(x, w.mT), i) + v}"
    )
    data = json.loads(program.to_json())
    (select,) = (n for n in data["nodes"] if n[0] == "row_select")
    select[1][1] = next(i for i, n in enumerate(data["nodes"]) if n == ["input", [], "v"])
    assert refused(json.dumps(data)).code in ("dtype", "graph")  # "graph" if v comes after the selection


def test_an_fp8_input_from_a_file_is_read_by_gemm_alone() -> None:
    data = json.loads(NORM.program.to_json())
    data["signature"]["inputs"]["x"]["dtype"] = "fp8_e4m3"
    assert refused(json.dumps(data)).code == "dtype"
    data["signature"]["inputs"]["x"]["dtype"] = "bf16"
    for name in "yw":
        data["signature"]["inputs"][name]["dtype"] = "fp8_e4m3"
    assert Program.from_json(json.dumps(data)).signature.inputs["y"].dtype == "fp8_e4m3"


def test_what_updates_is_read_back() -> None:
    again = Program.from_json(ACCUMULATE.program.to_json())
    assert again.signature.updates == {"dw_new": "dw"} and again == ACCUMULATE.program
    other = ACCUMULATE.signature._replace(updates={})
    assert refused(ACCUMULATE.program.to_json(), other).code == "signature"


def test_a_program_for_another_spec_is_refused() -> None:
    other = NORM.signature._replace(constants={"eps": 1e-5})
    assert refused(NORM.program.to_json(), other).code == "signature"


def test_a_size_that_is_spelt_otherwise_is_refused_in_place() -> None:
    assert (
        refused(edited(node(11, ["dim", [], "N*(1)"]))).message == "node 11: the size 'N*(1)' is written 'N'"
    )


def test_committed_programs_are_read() -> None:
    for file in sorted((ROOT / "generated_kernels").glob("*.program.json")):
        assert Program.from_json(text := file.read_text()).to_json() == text


DEEP = 100_000


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "json"),
        ("{", "json"),
        ("\x00", "json"),
        ("\ud800", "json"),
        ("1e999", "json"),
        ("9" * 5000, "json"),
        ("[" * DEEP, "json"),
        ("[" * DEEP + "]" * DEEP, "json"),
        ('{"a":' * DEEP + "1" + "}" * DEEP, "json"),
        (" " * (MAX_BYTES + 1), "size"),
        ('"' + "\u20ac" * (MAX_BYTES // 3) + '"', "size"),
        (NORM.program.to_json().replace('"format":2', '"format":2,"format":2'), "json"),
        (NORM.program.to_json().replace('"h":5', '"h":5,"h":8'), "json"),
        (NORM.program.to_json().replace('["float","0x1.0c6f7a0b5ed8dp-20"]', "NaN"), "json"),
        (NORM.program.to_json().replace('["float","0x1.0c6f7a0b5ed8dp-20"]', "-Infinity"), "json"),
        (NORM.program.to_json().replace('["float","0x1.0c6f7a0b5ed8dp-20"]', "1e999"), "json"),
    ],
    ids=range(16),
)
def test_hostile_text_is_refused(text: str, code: str) -> None:
    assert text != NORM.program.to_json()
    assert refused(text).code == code


@pytest.mark.parametrize("place", ["schedule/0", "outputs/h", "format", "signature/name", "signature/dims"])
def test_nesting_of_any_depth_is_refused(place: str) -> None:
    """The JSON parser still reads a value that is nested just below the parser's limit. But writing
    it into an error message takes deeper recursion, and would raise RecursionError."""
    data = json.loads(NORM.program.to_json())
    data["schedule"]["0"] = {}
    put(place, {"swizzle": "@"} if place == "schedule/0" else "@")(data)
    text = json.dumps(data)
    for depth in [*range(1, 1100, 3), 10_000]:
        refused(text.replace('"@"', "[" * depth + "]" * depth))


def test_programs_as_large_as_allowed_are_read_and_cut() -> None:
    """The longest permitted chain of nodes is read. Each node uses the previous node twice, so the number of
    paths doubles with each node. A walk along every path would never end."""
    lines = ["h = gemm(x, w.mT)", f"for _ in range({MAX_NODES - 4}):", "    h = h + h", "return {'o': h}"]
    program = plain(*lines)
    assert len(program.nodes) == MAX_NODES
    assert Program.from_json(program.to_json(), PLAIN) == program
    longer = Program(PLAIN, (*program.nodes, Node("negative", (MAX_NODES - 1,))), {"o": MAX_NODES})
    assert refused(longer.to_json()).code == "size"
    with pytest.raises(ProgramError) as caught:
        trace_source(source(PLAIN, lines[0], "for _ in range(600):", *lines[2:]), PLAIN)
    assert caught.value.code == "size"


def test_an_output_cannot_bear_an_inputs_name() -> None:
    data = json.loads(NORM.program.to_json())
    inputs, outputs = data["signature"]["inputs"], data["signature"]["outputs"]
    taken, given = next(iter(inputs)), next(iter(outputs))
    outputs[taken] = outputs.pop(given)
    data["outputs"][taken] = data["outputs"].pop(given)
    with pytest.raises(ProgramError, match="used twice"):
        Program.from_json(json.dumps(data))


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the compiler's child process by a function that returns an invented report. Return the list of
    requests that the function receives."""
    asked: list[str] = []

    def child(request: str) -> str:
        asked.append(request)
        return json.dumps([asdict(resource) for resource in resources()])

    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    monkeypatch.setattr("coda_agent.primitives.runtime.compile._run_child", child)
    return asked


def test_reports_are_kept_by_program_not_by_text_alone(requests: list[str]) -> None:
    from coda_agent.primitives.compiler.lower import lower
    from coda_agent.primitives.runtime.compile import report

    made = []
    for dtype in ("bf16", "fp16"):
        inputs = {"x": tensor("M, K", dtype), "w": tensor("K, N", dtype)}
        made.append(trace(signature(inputs, {"o": tensor("M, N", dtype)}), "return {'o': gemm(x, w)}"))
    assert lower(made[0]).hash == lower(made[1]).hash
    for program in (*made, made[0]):
        report(KernelSource(program), {"M": 8, "K": 8})  # no dim is static, so the request contains no sizes
    assert len(requests) == 2
    assert [json.loads(r)["sizes"] for r in requests] == [{}, {}]


def test_reports_are_kept_by_the_sizes_of_static_dims(requests: list[str]) -> None:
    from coda_agent.primitives.runtime.compile import report

    for p, m in ((16, 8), (32, 8), (16, 4096)):
        report(KernelSource(QK_NORM.program), {"P": p, "M": m})
    assert [json.loads(r)["sizes"] for r in requests] == [{"P": 16}, {"P": 32}]


@pytest.mark.parametrize("field", ["dims", "constants", "static"])
def test_a_signature_of_many_names_is_refused_before_it_is_read(field: str) -> None:
    data = PLAIN.to_json()
    many = [f"D{i}" for i in range(60_000)]
    data[field] = dict.fromkeys(many, "0x1p+0") if field == "constants" else many
    start = time.monotonic()
    with pytest.raises(ProgramError, match=f"60000 {field}, of at most 64"):
        Signature.from_json(data)
    assert time.monotonic() - start < 1


def test_a_shape_of_many_dims_is_refused_before_it_is_read() -> None:
    data = PLAIN.to_json()
    data["inputs"]["x"]["shape"] = ["M"] * 150_000
    with pytest.raises(ProgramError, match="rank 150000"):
        Signature.from_json(data)


def test_messages_quote_no_megabyte() -> None:
    assert len(ProgramError("json", "x" * 10**6).message) < 2100
