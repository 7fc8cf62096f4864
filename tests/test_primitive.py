"""Proposing a primitive: what its owner may say, how an author's functions are judged without a GPU, the run,
and the patch that a person merges."""

from __future__ import annotations

import inspect
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from authoring import HEADER, ROOT, Notes, Scripted, coda_agent, fenced
from rich.console import Console
from spec_files import write_changed
from typer.testing import CliRunner

from agent import accept, bundle, primitive, prompt, render, runs, session
from agent.cli import app, main
from agent.ending import OK, USAGE
from agent.journal import read_export
from agent.loop import Loop, Outcome, standing
from primitives import lower as lowering
from primitives.compile import PROBES, report
from primitives.ir import OPERATIONS, Program
from primitives.lower import lower
from primitives.raw import arithmetic
from verifier import proposal, proposal_gates
from verifier.gates import Failed
from verifier.proposal import FAMILIES, SIZES, Proposal, draw, judged
from verifier.proposal_gates import Proof
from verifier.report import Accepted, Checked, Measured, Rejected
from verifier.spec import Spec
from verifier.spec_file import SpecError, load

SOFTSIGN = """\
name: softsign
summary: From -1 to 1, without an exponential.
arguments: [x]
reference: x / (1 + abs(x))
domain: {x: [-inf, inf]}
example: y = softsign(t)
"""
EXACT = '''\
def softsign(x: Any) -> Any:
    """``x / (1 + abs(x))``. One division."""
    return choose(magnitude(x) > SOFTSIGN_LARGE, choose(x > 0.0, 1.0, -1.0), x / (1.0 + magnitude(x)))
'''
FAST = '''

def softsign_fast(x: Any) -> Any:
    """By a reciprocal."""
    return x * _softsign_weight(x)


def _softsign_weight(x: Any) -> Any:
    weight = 1.0 + magnitude(x)
    return cute.arch.rcp_approx(weight)
'''
CONSTANT = "SOFTSIGN_LARGE = 2.0**64\n\n\n"
GOOD = CONSTANT + EXACT + FAST
NAIVE = 'def steep(x: Any) -> Any:\n    """Naive."""\n    return cute.math.log(1.0 + cute.math.exp(x + x))\n'


def write(directory: Path, old: str = "", new: str = "") -> Path:
    return write_changed(directory / "softsign.yaml", SOFTSIGN, old, new)


def proposed(directory: Path, old: str = "", new: str = "") -> tuple[Proposal, Spec]:
    """A proposal and its frame."""
    made = proposal.load(write(directory, old, new))
    frame = directory / "frame.yaml"
    frame.write_text(made.frame)
    return made, load(frame)


def verdict(made: tuple[Proposal, Spec], source: str) -> Checked | Rejected:
    found = proposal_gates.check(*made, source).report
    assert not isinstance(found, Accepted)
    return found


# what an owner may say


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
        ("x / (1 + abs(x))", "x / (1 + magnitude(x))", 4, "'magnitude' is no name of torch's"),
        ("x / (1 + abs(x))", "x > 0", 4, "leave out casts"),
        ("x / (1 + abs(x))", "x = 1", 4, "not one expression"),
        ("x / (1 + abs(x))", "log(x)", 5, "not finite at x = "),
        ("[-inf, inf]", "[3, 2]", 5, "is no interval"),
        ("{x: [", "{y: [", 5, "'y' is none of the arguments x"),
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


# how functions are judged


def test_good_functions(tmp_path: Path, no_compiler: None) -> None:
    found = verdict(proposed(tmp_path), GOOD)
    assert isinstance(found, Checked), found
    assert [g.gate for g in found.gates] == ["form", "interpret", "compile"]
    assert found.identity.raw and found.unmeasured == proposal_gates.UNMEASURED
    assert set(found.gates[1].figures["worst_rms_ratio"]) == set(FAMILIES)
    assert "softsign" not in OPERATIONS  # outside the frame


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
        ("def softsign(x: Any)", "@cute.jit\ndef softsign(x: Any)", "form", "undecorated"),
        ("def softsign(x: Any) -> Any", "def softsign(x)", "form", "write def softsign(x: Any) -> Any"),
        ("def softsign(x: Any)", "def softsign(x: Any, y: Any)", "form", "takes 1 argument"),
        ("def softsign(x: Any)", "def softsine(x: Any)", "form", "nothing else"),
        ('"""``x / (1 + abs(x))``. One division."""', '"\\\\n"', "form", "docstring"),
        ("return x * _softsign_weight(x)", "return x * ", "syntax", "syntax error"),
        ("_softsign_weight(x)\n", "_softsign_weight(x, x)\n", "form", "takes 1 argument(s), not 2"),
        ("return x * _softsign_weight(x)", "return x > 0.0", "form", "one value of fp32"),
        ("weight = 1.0", "weight = 1.0 / 0 ", "arithmetic", "division by zero"),
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
        ("for i in range(3):\n        x = x + 1.0\n    return x", "line 3: for i in range(3):"),
        ("return cute.arch.warp_reduction(x, max)", "max"),
        ("return x if x > 0.0 else -x", "if x > 0.0"),
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
def test_what_only_a_gpu_can_tell(statement: str, words: str) -> None:
    source = f'def softsign(x: Any) -> Any:\n    """Page."""\n    {statement}\n'
    found = arithmetic.answer(source, "softsign", 1, [(False, [torch.ones(4)])])
    assert found.values is None and words in found.beyond


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
    assert found.values is not None, found.beyond
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
        judged(made, spec, inputs, outputs, "here")
    wide = made.model_copy(update={"ulps": 128.0})
    assert 15 < judged(wide, spec, inputs, outputs, "here")["ulps"] < 128


# the gates of a GPU, with a plan that stands in for it


@dataclass
class Plan:
    """Gives the truth, times ``factor``, in place of a kernel."""

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
    """A worker that is this process."""

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
    drawn = Proof.draw
    monkeypatch.setattr(Proof, "plans", lambda self: plans)
    monkeypatch.setattr(Proof, "draw", lambda self, family="usual": drawn(self, family, "cpu"))
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


# a run


@pytest.fixture
def begun(runs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_compiler: None) -> runs.Run:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "specs" / "primitives"
    directory.mkdir(parents=True)
    return primitive.start(write(directory), HEADER)


def author(run: runs.Run, *answers: str, measure: Any = None) -> tuple[Outcome, Scripted]:
    provider = Scripted([fenced(a) for a in answers])
    with run.journal:
        work = session.work_of(run)
        outcome = Loop(run.journal, run.spec, work, provider, Notes(), measure=measure).run()
    return outcome, provider


def test_a_run_corrects_and_is_checked(begun: runs.Run) -> None:
    outcome, provider = author(begun, GOOD.replace("1.0 +", "1.5 +"), GOOD)
    assert isinstance(outcome.report, Checked) and outcome.source == GOOD
    (system, first), (_, second) = provider.asked
    assert "x / (1 + abs(x))" in first[0].text and "def softsign(x: Any) -> Any" in first[0].text
    assert "Rejected at gate `interpret`" in second[-1].text
    reopened = runs.reopen(begun.name)
    with reopened.journal:
        again = standing(reopened.journal, reopened.spec)
    assert again is not None and again.source == GOOD and again.report == outcome.report


def test_the_pack_is_one_prefix_and_lacks_the_function() -> None:
    pack = primitive.pack()
    assert prompt.tokens(pack) < 6000 and "{exports}" not in pack and "`choose`" in pack
    assert "def gelu(x: Any)" in pack and "softsign" not in pack and "griddepcontrol" not in pack
    for name in primitive.EXAMPLES:
        assert f"def {name}(" in pack


def test_a_measured_one_is_accepted(begun: runs.Run) -> None:
    def measure(spec: Spec, program: Any, keep: object, kept: object, raw: str) -> Measured:
        assert raw == GOOD
        found = checked_identity(begun, raw)
        return Measured(identity=found, gates=(), timings=(), conditions={}, seeds={}, date="today")

    outcome, _ = author(begun, GOOD, measure=measure)
    assert outcome.report.status == "accepted"
    path, again, lacking = primitive.merge("softsign")
    assert path.name == "softsign.patch" and again.report.status == "accepted"
    assert "its page lacks Shapes:, Dtypes:, Cost:, Paper: family 1" in lacking


def checked_identity(run: runs.Run, source: str) -> Any:
    made = primitive.Proposing.of(run).proposal
    found = proposal_gates.check(made, run.spec, source).report
    assert isinstance(found, Checked)
    return found.identity


def test_it_is_no_kernel(begun: runs.Run) -> None:
    author(begun, GOOD)
    found = CliRunner().invoke(app, ["review", begun.name])
    assert found.exit_code == OK and "lines of device functions" in found.output and "---" not in found.output
    opened = runs.reopen(begun.name)
    with opened.journal:
        outcome = standing(opened.journal, opened.spec)
        assert outcome is not None
        with pytest.raises(accept.AcceptError, match="coda-agent primitive softsign --merge"):
            accept.accept(outcome, opened.journal, looked=True)
    both = "resume softsign-.* --gpu.* primitive softsign --provider replay --gpu"
    with pytest.raises(bundle.BundleError, match=both):
        bundle.pack([begun.name], Path("bundle.json"))


def test_nothing_to_merge(begun: runs.Run) -> None:
    with pytest.raises(primitive.PrimitiveError, match="no run has authored mish"):
        primitive.merge("mish")
    with pytest.raises(primitive.PrimitiveError, match="coda-agent resume softsign-"):
        begun.journal.close()
        primitive.merge("softsign")


# the page, the command, and the patch

PAGE = '''"""From -1 to 1, ``x / (1 + abs(x))``, by one division.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 4 instructions an element, 1 of them MUFU; exact, 12
    with 1 MUFU. Paper: family 1, elementwise.

        bent = softsign(t)
        rest = t - bent
    """'''


def test_a_page_of_the_form_is_merged_as_it_is(begun: runs.Run) -> None:
    author(begun, GOOD.replace('"""``x / (1 + abs(x))``. One division."""', PAGE))
    path, _, lacking = primitive.merge("softsign")
    assert not lacking
    added = [line[1:] for line in path.read_text().splitlines() if line.startswith("+")]
    entry = "\n".join(added[added.index("def softsign(x):") :])
    assert entry.startswith(f"def softsign(x):\n    {PAGE}\n\n\n")


def test_what_a_page_lacks_is_said() -> None:
    page = inspect.cleandoc(PAGE.strip('"'))
    assert primitive.formed(page)
    parts = {"Shapes: as for operators. ": "Shapes:", "        rest = t - bent\n": "an example of two lines"}
    for part, name in parts.items():
        cut = inspect.cleandoc(PAGE.strip('"').replace(part, ""))
        assert primitive.lacking(cut).startswith(f"its page lacks {name}: complete it in primitives/element")


def test_the_command_from_proposal_to_patch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its run in a process of its own, with the real compiler; the patched vocabulary has the primitive."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CODA_AGENT_RUNS", str(tmp_path / "runs"))

    def here(*arguments: str) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", ["coda-agent", "primitive", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, "".join(capsys.readouterr())

    status, said = here("softsign")
    assert status == USAGE and "--reference" in said
    status, said = here("swish", "--reference", "x * sigmoid(x)")
    assert status == USAGE and "this is silu" in said and not (tmp_path / "specs" / "primitives").exists()
    status, said = here("softsign", "--reference", "x / (1 + abs(x))")
    assert status == OK and (tmp_path / "specs" / "primitives" / "softsign.yaml").exists(), said
    handoff = tmp_path / "handoff"
    handoff.mkdir()
    for number, source in enumerate((EXACT, GOOD), 1):  # the first lacks a constant
        (handoff / f"answer-{number}.md").write_text(f"{fenced(source)}<!-- end -->")
    options = ("--provider", "handoff", "--directory", handoff, "--author", "Ada")
    place = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = coda_agent("primitive", "softsign", *options, cwd=tmp_path, **place)
    assert done.returncode == OK, done.stdout + done.stderr
    assert "attempt 2: checked" in done.stdout and "primitive softsign --merge" in done.stdout
    status, said = here("softsign", "--merge")
    assert status == OK and "git apply softsign.patch" in said and "its page lacks Shapes:" in said
    _check_merged(tmp_path)


def _check_merged(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for folder in ("primitives", "verifier", "agent", "tests", "specs"):
        files = [p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        for path in files:
            (clone / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            (clone / path.relative_to(ROOT)).write_bytes(path.read_bytes())
    (clone / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    (clone / "specs" / "primitives").mkdir(exist_ok=True)
    (clone / "specs" / "primitives" / "softsign.yaml").write_text(SOFTSIGN)

    def run(*command: str | Path) -> str:
        environment = os.environ | {"PYTHONPATH": str(clone)}
        told = subprocess.run(
            command, cwd=clone, env=environment, capture_output=True, text=True, check=False
        )
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout

    run("git", "init", "--quiet", ".")
    run("git", "apply", tmp_path / "softsign.patch")
    run(sys.executable, "-c", MERGED)
    made = [f"primitives/{path}.py" for path in ("__init__", "elementwise", "device/softsign")]
    header, events = read_export(clone / "agent" / "recordings" / "softsign.raw.jsonl")
    assert header["author"] == "Ada" and [e.kind for e in events].count("answer") == 2
    assert str(tmp_path) not in json.dumps(header)
    for tool in (("check",), ("format", "--check")):
        run(sys.executable, "-m", "ruff", *tool, *made)


MERGED = '''
import sys

import torch

sys.path.append("tests")
from machine import run_lowered
from primitives.interpret import interpret
from primitives.ir import Signature, TensorType
from primitives.dims import Dim
from primitives.lower import lower
from primitives.raw import arithmetic
from primitives.trace import trace_source

m, n, k = map(Dim.parse, "MNK")
signature = Signature(
    "k",
    ("M", "N", "K"),
    {"a": TensorType((m, k), "bf16"), "b": TensorType((k, n), "bf16")},
    {"rounded": TensorType((m, n), "bf16"), "whole": TensorType((m, n), "fp32")},
)
program = trace_source("""
from primitives import gemm, kernel, softsign

@kernel
def k(a, b):
    h = gemm(a, b)
    return {"rounded": softsign(2 * h), "whole": softsign(h)}
""", signature)
text = lower(program).text
assert "softsign_fast(" in text and "from primitives.device.softsign import softsign, softsign_fast" in text
inputs = {"a": torch.randn(48, 32).bfloat16(), "b": torch.randn(32, 64).bfloat16()}
h = inputs["a"].float() @ inputs["b"].float()
for outputs in (interpret(program, inputs), run_lowered(program, inputs)):
    assert torch.allclose(outputs["whole"], h / (1 + h.abs()), atol=1e-6)
'''


def test_a_device_module_that_an_edit_does_not_name_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, spec = proposed(tmp_path)
    program, raw = made.program(spec), made.framed(spec, GOOD, True)
    before = lower(program, raw).hash
    device = tmp_path / "device"
    shutil.copytree(ROOT / "primitives" / "device", device)
    (device / "another.py").write_text('__all__ = ["another"]\n')
    monkeypatch.setattr("primitives.lower.DEVICE", device)
    caches = (lowering.exports, lowering.device_source)
    try:
        for changed in ("another", "values"):
            with (device / f"{changed}.py").open("a") as file:
                file.write("# changed\n")
            for cache in caches:
                cache.cache_clear()
            assert (lower(program, raw).hash == before) is (changed == "another")
    finally:
        for cache in caches:
            cache.cache_clear()


def test_the_frame_compiles_and_refuses_what_is_no_arithmetic(tmp_path: Path) -> None:
    """With the real compiler, in confinement."""
    made, spec = proposed(tmp_path)
    raw = made.framed(spec, GOOD, True)
    resources = report(made.program(spec), SIZES, PROBES[:1], raw)
    assert len(resources) == 1 and not any(r.spill_loads for r in resources)
    assert lower(made.program(spec), raw).raw
    found = verdict((made, spec), GOOD.replace("weight = 1.0", "weight = open('/etc/passwd') + 1.0"))
    assert isinstance(found, Rejected) and (found.gate, found.code) == ("compile", "language"), found
