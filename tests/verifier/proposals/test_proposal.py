"""Proposals of primitives: which proposals are valid, and how an author's functions are judged. No GPU is
needed; one test simulates a GPU."""

from __future__ import annotations

import io
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from rich.console import Console
from softsign import CONSTANT, EXACT, FAST, GOOD, NAIVE, proposed, verdict, write

from coda_agent.agent.reporting import render
from coda_agent.agent.run import primitive_task
from coda_agent.primitives.compiler import lower as lowering
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.primitives.lang.ir import OPERATIONS, Program
from coda_agent.primitives.raw import arithmetic, interpreter
from coda_agent.primitives.raw.error import RawError
from coda_agent.primitives.runtime.compile import report
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.proposals import proposal, proposal_gates
from coda_agent.verifier.proposals.proposal import SIZES, Proposal
from coda_agent.verifier.proposals.proposal_gates import PrimitiveCase
from coda_agent.verifier.proposals.proposal_points import FAMILIES, draw, errors_of
from coda_agent.verifier.report import Accepted, Checked, Measured, Rejected
from coda_agent.verifier.spec.file import SpecError

pytestmark = pytest.mark.slow

# valid and invalid proposals


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("name: softsign", "name: abs", 1, "no word of Python's own"),
        ("name: softsign", "name: silu", 1, "primitives has 'silu' already"),
        ("name: softsign", "name: choose", 1, "primitives has 'choose' already"),
        ("[x]", "[x, y, z, w]", 3, "4 arguments: a primitive of this kind works element by element"),
        ("[x]", "[left]", 3, "'left' is taken"),
        ("x / (1 + abs(x))", "x * sigmoid(x)", 4, "this is silu, which is there already"),
        ("x / (1 + abs(x))", "softmax(x, -1)", 4, "not element by element"),
        ("x / (1 + abs(x))", "x.sum()", 4, "not element by element"),
        ("x / (1 + abs(x))", "x / (1 + magnitude(x))", 4, "'magnitude' is neither a torch name"),
        ("x / (1 + abs(x))", "x > 0", 4, "leave out casts"),
        ("x / (1 + abs(x))", "x = 1", 4, "not one expression"),
        ("x / (1 + abs(x))", "(" * 500 + "x" + ")" * 500, 4, "not one expression"),
        ("x / (1 + abs(x))", "log(x)", 5, "not finite at x = "),
        ("[-inf, inf]", "[3, 2]", 5, "is not an fp32 interval"),
        ("{x: [", "{y: [", 5, "'y' is not one of the arguments x"),
        ("example:", "ulps: 0\nexample:", 6, "ulps is 0.0"),
        ("example:", "derivative_of: tanh\nexample:", 6, "not the derivative of tanh"),
        ("example:", "derivative_of: mish\nexample:", 6, "there is no operation 'mish'"),
        ("example:", "rule: elementwise\nexample:", 6, "unknown key 'rule'"),
    ],
)
def test_what_is_wrong_with_a_proposal(tmp_path: Path, old: str, new: str, line: int, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        proposal.load(write(tmp_path, old, new))
    assert words in str(caught.value) and f"softsign.yaml:{line}:" in str(caught.value)


def test_an_argument_without_a_use_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"softsign\.yaml:3: reference: does not use y: leave it out"):
        proposal.load(write(tmp_path, "[x]\nreference: x / (1", "[x, y]\nreference: x / (1"))


def test_a_derivative_is_one(tmp_path: Path) -> None:
    made, _ = proposed(tmp_path, "x / (1 + abs(x))", "1 - tanh(x) ** 2\nderivative_of: tanh")
    assert made.meaning == "lambda torch, x: 1 - torch.tanh(x) ** 2"


def test_points(tmp_path: Path) -> None:
    made, _ = proposed(tmp_path, "[-inf, inf]", "[-4, .inf]")
    seen = {family: draw(made, family, 1) for family in FAMILIES}
    for family, inputs in seen.items():
        assert not made.truth(inputs["x"] + inputs["left"].float()).isnan().any()
        met = inputs["x"] if family != "accumulator" else inputs["left"].float()
        assert met.min() >= -4
    edges = seen["edges"]["x"]
    assert {-4.0, 0.0, 2.0**-149, 3.4028234663852886e38} <= set(edges.flatten().tolist())
    assert (torch.signbit(edges) & (edges == 0)).any()
    assert seen["accumulator"]["left"].unique().numel() > 32000
    assert torch.equal(seen["accumulator"]["right"].float(), torch.eye(SIZES["K"]))
    assert seen["wide"]["x"].abs().log2().std() > 30
    assert not torch.equal(seen["usual"]["x"], draw(made, "usual", 2)["x"])


# judging functions


def test_good_functions(tmp_path: Path, no_compiler: None) -> None:
    found = verdict(proposed(tmp_path), GOOD)
    assert isinstance(found, Checked), found
    assert [g.gate for g in found.gates] == ["form", "interpret", "compile"]
    assert found.identity.raw and found.unmeasured == proposal_gates.UNMEASURED
    assert set(found.gates[1].figures["worst_rms_ratio"]) == set(FAMILIES)
    assert "softsign" not in OPERATIONS  # softsign is registered only while the frame is lowered


@pytest.mark.parametrize(
    ("old", "new", "code", "words"),
    [
        (
            "1.0 + magnitude(x)))",
            "1.0001 + magnitude(x)))",
            "numerics",
            "usual arguments, softsign in fp32: at x",
        ),
        ("weight = 1.0", "weight = 1.01", "numerics", "rounded to bf16: output 'fused': RMS"),
        (
            "SOFTSIGN_LARGE = 2.0**64",
            "SOFTSIGN_LARGE = 0.125",
            "numerics",
            "units in the last place off, of 4",
        ),
        ("choose(x > 0.0, 1.0, -1.0)", "1.0", "numerics", "softsign in fp32"),
        (CONSTANT, CONSTANT + "import os\n\n\n", "form", "nothing else"),
        (CONSTANT, CONSTANT + "print(1)\n\n\n", "form", "nothing else"),
        (CONSTANT, "TURN = 2.0\n\n\n" + CONSTANT, "form", "constants named SOFTSIGN_"),
        (
            CONSTANT,
            CONSTANT + "".join(f"SOFTSIGN_{n} = 1.0\n" for n in range(30)) + "\n\n",
            "form",
            "over 32 functions and constants",
        ),
        ("def softsign(x: Any)", "@cute.jit\ndef softsign(x: Any)", "form", "undecorated"),
        ("def softsign(x: Any) -> Any", "def softsign(x)", "form", "write def softsign(x: Any) -> Any"),
        ("def softsign(x: Any)", "def softsign(x: Any, y: Any)", "form", "takes 1 argument"),
        ("def softsign(x: Any)", "def softsine(x: Any)", "form", "nothing else"),
        ('"""``x / (1 + abs(x))``. One division."""', '"\\\\n"', "form", "docstring"),
        ("return x * _softsign_weight(x)", "return x * ", "syntax", "syntax error"),
        ("_softsign_weight(x)\n", "_softsign_weight(x, x)\n", "form", "takes 1 argument(s), not 2"),
        ("return x * _softsign_weight(x)", "return x > 0.0", "form", "one fp32 value"),
        ("weight = 1.0", "weight = 1.0 / 0 ", "arithmetic", "division by zero"),
        ("x * _softsign_weight(x)", "cute.math.absf(x) * 7.0 - 3.0", "arithmetic", "cute.math.absf: this"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, no_compiler: None, old: str, new: str, code: str, words: str
) -> None:
    assert old in GOOD
    found = verdict(proposed(tmp_path), GOOD.replace(old, new))
    assert isinstance(found, Rejected) and found.code == code and words in found.message, found


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("for i in range(3):\n        x = x + 1.0\n    return x", "for i in range(3):"),
        ("return cute.arch.warp_reduction(x, max)", "max"),
        ("return x if x > 0.0 else -x", "x if x > 0.0 else -x"),
        ("return x ** 3", "**"),
        ("return math.tau ** 65 * x", "power over 64"),
        ("return (" + "\n+".join(["x"] * 2100) + ")", "nested too deep"),
        ("x = x + x + x + x + x + x + x\n    " * 180 + "return x", "over 2000 operations"),
        ("return softsign(x)", "over 16 deep"),
        ("return x.value", "x.value"),
        ("return math.__doc__", "math.__doc__"),
        ("return open('/etc/passwd')", "'/etc/passwd'"),
    ],
)
def test_what_cannot_be_computed_is_refused(statement: str, words: str) -> None:
    """A function that the interpreter cannot compute must be refused. Otherwise it would count as checked,
    although its values are unknown."""
    source = f'def softsign(x: Any) -> Any:\n    """Page."""\n    {statement}\n'
    with pytest.raises(RawError, match=re.escape(f"{words}: this cannot be computed without a GPU")) as found:
        arithmetic.answer(source, "softsign", 1, [(False, [torch.ones(4)])])
    assert found.value.code == "arithmetic" and (found.value.line or 0) >= 3


def test_what_cannot_be_computed_is_refused_with_its_line_and_what_can_be(
    tmp_path: Path, no_compiler: None
) -> None:
    """A helper calls an unknown function. The error names the line of this call, although another call
    returned before it. The author's prompt lists the known functions."""
    unknown = FAST.replace("cute.arch.rcp_approx(weight)", "cute.math.absf(weight)")
    unknown = unknown.replace("return x *", "y = magnitude(x)\n    return y *")
    source = CONSTANT + EXACT + unknown
    found = verdict(proposed(tmp_path), source)
    assert isinstance(found, Rejected) and (found.gate, found.code) == ("interpret", "arithmetic"), found
    assert found.line and "absf" in source.splitlines()[found.line - 1]
    assert found.message.startswith("cute.math.absf: ") and found.message.endswith(interpreter.known_words())
    assert interpreter.known_words() in primitive_task.pack()
    offered = {*lowering.exports()["values"]} - {"LOWEST"}
    assert offered <= interpreter.known_functions().keys()


def test_what_functions_compute() -> None:
    source = '''\
def several(x: Any, y: Any) -> Any:
    """Page."""
    low, high = largest(x, 0.0), cute.math.exp2(-cute.math.abs(y), fastmath=True)
    low += math.sqrt(2.0) * SEVERAL_HALF
    return choose((x > y) & (x != 2.0), low / high, _several_rest(x)) - sigmoid(-y)


def _several_rest(x: Any) -> Any:
    return cute.math.erf(Float32(x)) + math.pi


SEVERAL_HALF = 1 / 2
'''
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(64, 64, generator=generator) for _ in range(2))
    found = arithmetic.answer(source, "several", 2, [(True, [x, y])])
    (got,) = found.values
    low, high = x.double().clamp(min=0) + 2**0.5 / 2, torch.exp2(-y.double().abs())
    wanted = torch.where((x > y) & (x != 2), low / high, torch.erf(x.double()) + torch.pi) - torch.sigmoid(
        -y.double()
    )
    assert (got - wanted).abs().max() < 3e-6 and got.dtype == torch.float32


def test_overflow_cancellation_and_lost_infinities_are_found(tmp_path: Path, no_compiler: None) -> None:
    made = proposed(tmp_path, "x / (1 + abs(x))", "softplus(x + x)")
    made = made[0].model_copy(update={"name": "steep"}), made[1]
    found = verdict(made, NAIVE)
    assert isinstance(found, Rejected) and "steep in fp32: at x = -" in found.message
    sound = NAIVE.replace(
        "cute.math.log(1.0 + cute.math.exp(x + x))",
        "largest(x + x, 0.0) + cute.math.log1p(cute.math.exp(-magnitude(x + x)))",
    )
    assert isinstance(verdict(made, sound), Checked)


def test_ulps_are_the_owners(tmp_path: Path) -> None:
    made, spec = proposed(tmp_path)
    inputs = draw(made, "usual", 5)
    truth = made.truth(inputs["x"].double())
    outputs = {"fused": truth.bfloat16(), "loaded": (truth * (1 + 40 * 2.0**-23)).float()}
    with pytest.raises(Failed, match="of 4 allowed"):
        errors_of(made, spec, inputs, outputs, "here")
    wide = made.model_copy(update={"ulps": 128.0})
    off = errors_of(wide, spec, inputs, outputs, "here")["ulps"]
    assert 15 < off < 128
    with pytest.raises(Failed, match="units in the last place off"):
        errors_of(made.model_copy(update={"ulps": off - 1}), spec, inputs, outputs, "here")
    assert errors_of(made.model_copy(update={"ulps": off + 1}), spec, inputs, outputs, "here")["ulps"] == off


# the gates that need a GPU, with a stand-in for the plan


@dataclass
class Plan:
    """A plan that writes the truth times ``factor`` instead of running a kernel. A factor above 1 applies
    only after 20 calls."""

    proposal: Proposal
    program: Program
    factor: float
    schedules: dict[int, Any] = field(default_factory=dict)
    calls: int = 0
    workspace: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    gaps: tuple[torch.Tensor, ...] = ()

    def outputs(self) -> dict[str, torch.Tensor]:
        return {"fused": torch.empty(256, 256, dtype=torch.bfloat16), "loaded": torch.empty(256, 256)}

    def run(self, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> None:
        self.calls += 1
        for name, met in (("fused", inputs["left"].float() + inputs["x"]), ("loaded", inputs["x"])):
            wobble = self.factor if self.factor < 1 or self.calls > 20 else 1.0
            outputs[name].copy_(self.proposal.truth(met.double()) * wobble)


class Here:
    """A worker that runs its tasks in this process."""

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, task: Any, argument: Any, **_: object) -> Any:
        return task(argument)


@pytest.mark.parametrize(
    ("factor", "gate", "code"),
    [(1.0, "", ""), (0.99, "numerics", "numerics"), (1.5, "stability", "unstable")],
)
def test_the_gates_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, gate: str, code: str
) -> None:
    made, spec = proposed(tmp_path)
    plans = [Plan(made, made.program(spec), factor)]
    drawn = PrimitiveCase.draw
    monkeypatch.setattr(PrimitiveCase, "plans", lambda self: plans)
    monkeypatch.setattr(PrimitiveCase, "draw", lambda self, family="usual": drawn(self, family, "cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = proposal_gates.measure(made, spec, GOOD, worker=Here())  # type: ignore[arg-type]
    if gate:
        assert isinstance(found, Rejected) and (found.gate, found.code) == (gate, code), found
        return
    assert isinstance(found, Measured) and [g.gate for g in found.gates] == ["numerics", "stability"]
    assert set(found.seeds) == {*(f"numerics/{f}" for f in FAMILIES), "stability"} and found.identity.raw
    assert set(found.gates[0].figures["frame"]["outputs"]) == set(FAMILIES)
    joined = Accepted(**found.model_dump(exclude={"status"}))
    render.show(Console(file=io.StringIO()), joined)


# the frame


def test_a_device_module_that_an_edit_does_not_name_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, spec = proposed(tmp_path)
    program, raw = made.program(spec), made.framed(spec, GOOD, True)
    before = KernelSource(program, edited=raw).lowered.hash
    device = tmp_path / "device"
    shutil.copytree(ROOT / "primitives" / "device", device)
    (device / "another.py").write_text('__all__ = ["another"]\n')
    monkeypatch.setattr("coda_agent.primitives.compiler.lower.DEVICE", device)
    caches = (lowering.exports, lowering.device_source)
    try:
        for changed in ("another", "values"):
            with (device / f"{changed}.py").open("a") as file:
                file.write("# changed\n")
            for cache in caches:
                cache.cache_clear()
            assert (KernelSource(program, edited=raw).lowered.hash == before) is (changed == "another")
    finally:
        for cache in caches:
            cache.cache_clear()


def test_the_frame_calls_the_fast_function_where_there_is_one(tmp_path: Path) -> None:
    """The text with the fast function and the text with the exact function have the same program. So the
    cache of lowering must tell the two texts apart."""
    made, spec = proposed(tmp_path)
    fast, exact = (made.framed(spec, GOOD, fast) for fast in (True, False))
    called = [f"{made.name}_fast(" in text.partition("\nclass ")[2] for text in (fast, exact)]
    assert called == [True, False]


def test_the_frame_compiles_and_refuses_what_is_no_arithmetic(tmp_path: Path) -> None:
    """This test runs the real compiler, in confinement."""
    made, spec = proposed(tmp_path)
    raw = made.framed(spec, GOOD, True)
    resources = report(KernelSource(made.program(spec), edited=raw), SIZES, PROBES[:1])
    assert len(resources) == 1 and not any(r.spill_loads for r in resources)
    assert KernelSource(made.program(spec), edited=raw).lowered.edited
    found = verdict((made, spec), f"{GOOD}    return open('/etc/passwd')\n")  # the statement is never reached
    assert isinstance(found, Rejected) and (found.gate, found.code) == ("compile", "language"), found
