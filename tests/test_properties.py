"""Random programs: traced or refused, the same after JSON, right against fp64, lowered to what runs alike."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from kernels import CHAIN, Tensors, draw, run_lowered, signature, source, tensor

import primitives
from primitives.cut import cut
from primitives.interpret import interpret
from primitives.ir import Program, ProgramError, Signature, TensorType
from primitives.lower import lower
from primitives.trace import trace_source

SIZES = {"M": 8, "K": 16, "F": 4}
INPUTS = {
    "x": tensor("M, K"),
    "w": tensor("2*F, K"),
    "q": tensor("2*F, 2*F"),
    "r": tensor("M, 2*F"),
    "z": tensor("M, 4*F"),
    "v": tensor("M", "fp32"),
    "b": tensor("2*F"),
}
SHAPES = {"half": "M, F", "one": "M, 2*F", "double": "M, 4*F", "vector": "M"}

# What a kernel says, and the same in PyTorch. Bounded, and continuous, so that errors stay errors.
UNARY = [
    ("tanh({0})", "torch.tanh({0})"),
    ("sigmoid({0})", "1 / (1 + torch.exp(-{0}))"),
    ("silu({0})", "{0} / (1 + torch.exp(-{0}))"),
    ("exp(minimum({0}, 1))", "torch.exp({0}.clamp(max=1))"),
    ("sqrt({0} * {0} + 1)", "({0}.square() + 1).pow(0.5)"),
    ("rsqrt({0} ** 2 + 0.25)", "({0}.square() + 0.25).pow(-0.5)"),
    ("log(1 + {0} ** 2)", "torch.log1p({0}.square())"),
    ("-{0}", "torch.neg({0})"),
    ("{0} * c - 0.125", "torch.add(c * {0}, -1 / 8)"),
    ("1 - {0} / 3", "torch.sub(1, {0} * (1 / 3))"),
    ("maximum({0}, 0)", "torch.relu({0})"),
    ("where({0} > 0.5, {0}, 0.5)", "{0}.clamp(min=0.5)"),
    ("where({0} <= 0.1, {0} * 2, 0.2)", "(2 * {0}).clamp(max=0.2)"),
]
BINARY = [
    ("{0} - {1}", "torch.sub({0}, {1})"),
    ("({0} + {1}) * 0.5", "torch.lerp({0}, {1}, 0.5)"),
    ("{0} * tanh({1})", "torch.mul({0}, {1}.tanh())"),
    ("{0} / (1 + {1} * {1})", "torch.div({0}, {1}.square() + 1)"),
    ("maximum({0}, {1})", "torch.fmax({0}, {1})"),
    ("minimum({1}, {0})", "torch.fmin({0}, {1})"),
    ("where({0} < {1}, {1}, {0})", "torch.fmax({0}, {1})"),
]


@dataclass
class Made:
    """A random kernel under construction: its lines, their PyTorch, and the names of each kind."""

    kernel: list[str] = field(default_factory=list)
    torch: list[str] = field(default_factory=list)
    known: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in SHAPES})
    computed: list[tuple[str, str]] = field(default_factory=list)
    gemms: int = 1
    outputs: dict[str, TensorType] = field(default_factory=dict)

    def add(self, kind: str, kernel: str, torch: str) -> None:
        """Unless it was said before: equal lines are one value, which cannot be two outputs."""
        if any(line.endswith(f" = {kernel}") for line in self.kernel):
            return
        name = f"t{len(self.kernel)}"
        self.kernel.append(f"{name} = {kernel}")
        self.torch.append(f"{name} = {torch}")
        self.known[kind].append(name)
        self.computed.append((kind, name))

    @property
    def signature(self) -> Signature:
        return signature(INPUTS, self.outputs, c=0.75)

    @property
    def source(self) -> str:
        returned = ", ".join(f"{name!r}: {name}" for name in self.outputs)
        return source(self.signature, *self.kernel, f"return {{{returned}}}")

    def truth(self, inputs: Tensors) -> Tensors:
        """In fp64, without any rounding."""
        names: dict[str, Any] = {"torch": torch, "c": 0.75} | {k: t.double() for k, t in inputs.items()}
        exec("\n".join(self.torch), names)
        return {name: names[name] for name in self.outputs}


@st.composite
def kernels(pick: st.DrawFn, *, safe: bool) -> Made:
    """``safe``: one GEMM, and no tile without its accumulator, so that nothing is to be refused."""
    made = Made()
    made.add("one", "gemm(x, w.mT)", "x @ w.T")
    made.known["vector"].append("v")
    if not safe and pick(st.integers(0, 3)) == 0:  # tiles that may turn out to have no home
        made.known["one"].append("r")
        made.known["double"].append("z")
    moves = ["unary", "unary", "binary", "pairs", "join", "row", "column", "load", "sum", "mean"]
    if not safe:
        moves += ["gemm", "gemm", "deferred", "deferred", "deferred", "mean"]
    for _ in range(pick(st.integers(2, 12))):
        _extend(pick, made, pick(st.sampled_from(moves)))
    # The last value is made of most others.
    chosen = pick(st.lists(st.sampled_from(made.computed[::-1]), max_size=2, unique=True))
    chosen = list(dict.fromkeys([made.computed[-1], made.computed[0], *chosen]))
    for kind, name in chosen:
        wide = kind in ("half", "double")  # what is not as wide as its gemm is stored in 16 bits
        made.outputs[name] = tensor(
            SHAPES[kind], pick(st.sampled_from(["bf16"] if wide else ["bf16", "fp32"]))
        )
    return made


def _extend(pick: st.DrawFn, made: Made, move: str) -> None:
    kind = pick(st.sampled_from([k for k, names in made.known.items() if names]))
    a, b = (pick(st.sampled_from(made.known[kind])) for _ in range(2))
    one = pick(st.sampled_from(made.known["one"]))
    vector = pick(st.sampled_from(made.known["vector"]))
    if move == "unary" and (kind, a) != ("vector", "v"):
        kernel, torch = pick(st.sampled_from(UNARY))
        made.add(kind, kernel.format(a), torch.format(a))
    elif move == "binary":
        kernel, torch = pick(st.sampled_from(BINARY))
        made.add(kind, kernel.format(a, b), torch.format(a, b))
    elif move == "pairs" and kind in ("one", "double"):
        half = {"one": "half", "double": "one"}[kind]
        made.add(half, f"pairs({a})[0]", f"{a}[:, 0::2]")
        made.add(half, f"pairs({a})[1]", f"{a}[:, 1::2]")
    elif move == "join" and kind in ("half", "one"):
        shape = f"({a}.shape[0], -1)"
        double = {"half": "one", "one": "double"}[kind]
        made.add(double, f"join({a}, {b})", f"torch.stack([{a}, {b}], 2).reshape{shape}")
    elif move == "row" and kind != "vector":
        scale = vector if vector == "v" or made.gemms > 1 else "v"
        made.add(kind, f"{a} * per_row({scale})", f"torch.einsum('mn,m->mn', {a}, {scale})")
    elif move == "column":
        made.add(
            "one",
            f"{one} + per_column(b) * c",
            f"torch.addcmul({one}, b.expand_as({one}), b.new_tensor([c]))",
        )
    elif move == "load" and kind in ("one", "double"):
        loaded = {"one": "r", "double": "z"}[kind]
        made.add(kind, f"{a} + silu({loaded})", f"torch.add({a}, {loaded} * torch.sigmoid({loaded}))")
    elif move == "sum" and kind != "vector":
        made.add("vector", f"row_sums({a}) * 0.25", f"torch.einsum('mn->m', {a}) / 4")
    elif move == "mean" and kind != "vector":
        made.add("vector", f"row_sums({a} * {a}) / {a}.columns", f"{a}.square().mean(1)")
    elif move == "gemm" and made.gemms < 4:
        made.gemms += 1
        made.add("one", f"gemm({one}, q.mT)", f"{one} @ q.T")
    elif move == "deferred" and made.gemms < 4:
        made.gemms += 1
        made.add("one", f"gemm({one}, q) * per_row({vector})", f"({one} @ q) * {vector}[:, None]")


def check_close(got: Tensors, expected: Tensors, slack: float) -> None:
    for name, value in got.items():
        rounding = 2.0**-8 if value.dtype == torch.bfloat16 else 0
        torch.testing.assert_close(
            value.double(),
            expected[name].double(),
            rtol=slack + rounding,
            atol=slack,
            msg=partial("{}: {}".format, name),
        )


def check(made: Made, program: Program) -> None:
    text = program.to_json()
    again = Program.from_json(text, made.signature)
    assert again == program and again.hash == program.hash and again.to_json() == text
    inputs = draw(made.signature, SIZES, len(text))
    got = interpret(program, inputs)
    # A chain rounds what it stores in between, which the truth does not.
    chained = len(cut(program).gemms) > 1
    check_close(got, made.truth(inputs), 0.05 if chained else 1e-4)
    lowered = lower(program)
    compile(lowered.text, "<lowered>", "exec")
    assert lower(again).text == lowered.text
    check_close(run_lowered(program, inputs), got, 0.02 if chained else 1e-4)


PROPERTY = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=False,
)


@settings(PROPERTY, max_examples=40)
@given(kernels(safe=True))
def test_one_gemms_programs_are_never_refused(made: Made) -> None:
    check(made, trace_source(made.source, made.signature))


@settings(PROPERTY, max_examples=60)
@given(kernels(safe=False))
def test_programs_are_right_or_refused(made: Made) -> None:
    try:
        program = trace_source(made.source, made.signature)
    except ProgramError as error:
        event(f"trace: {error.code}")
        assert error.code in ("homeless", "pending", "outputs", "width")
        assert error.line is not None and error.message
        return
    try:
        lower(program)
    except ProgramError as error:
        event(f"lower: {error.code}")
        assert error.code in ("width", "dtype")
        return
    event(f"gemms: {len(cut(program).gemms)}")
    check(made, program)


NAMES = (
    "x",
    "w",
    "x.mT",
    "w.mT",
    "v",
    "b",
    "z",
    "r",
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
    """Lines of any operation on anything."""
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
    """Every container in a JSON value, with each of its keys or indices."""
    if not isinstance(data, dict | list):
        return []
    keys = list(data) if isinstance(data, dict) else range(len(data))
    return [place for key in keys for place in [(data, key), *places(data[key])]]


@st.composite
def tampered(pick: st.DrawFn) -> str:
    """A program's JSON with one to three places overwritten, wherever they are."""
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
