"""Authoring a proposed primitive: the run, its replay, and the patch that a person merges."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from authoring import HEADER, Notes, Scripted, coda_agent, fenced
from checkout import ROOT
from softsign import EXACT, GOOD, SOFTSIGN, write
from typer.testing import CliRunner

from coda_agent.agent.artifacts import accept, bundle, primitive
from coda_agent.agent.cli.exit_codes import OK, USAGE
from coda_agent.agent.cli.main import app, main
from coda_agent.agent.prompts import prompt
from coda_agent.agent.prompts.vocabulary import formed
from coda_agent.agent.run import assembly, primitive_task, runs
from coda_agent.agent.run.loop import Loop, Outcome, result_of
from coda_agent.agent.storage import kernel_files
from coda_agent.agent.storage.journal import read_export
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.errors import InvalidInput, Refused
from coda_agent.verifier.loading import load
from coda_agent.verifier.proposals import proposal, proposal_gates
from coda_agent.verifier.report import Checked, Measured
from coda_agent.verifier.spec.file import SpecError
from coda_agent.verifier.spec.model import Spec

pytestmark = pytest.mark.slow

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
        work = assembly.task_of(run)
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
        again = result_of(reopened.journal, reopened.spec)
    assert again is not None and again.source == GOOD and again.report == outcome.report


def test_the_pack_is_one_prefix_and_lacks_the_function() -> None:
    pack = primitive_task.pack()
    assert prompt.tokens(pack) < 6000 and "{exports}" not in pack and "`choose`" in pack
    assert "def gelu(x: Any)" in pack and "softsign" not in pack and "griddepcontrol" not in pack
    for name in primitive_task.EXAMPLES:
        assert f"def {name}(" in pack


def test_a_measured_one_is_accepted(begun: runs.Run) -> None:
    def measure(spec: Spec, kernel: KernelSource, keep: object, kept: object) -> Measured:
        assert kernel.edited == GOOD
        found = checked_identity(begun, GOOD)
        return Measured(
            identity=found, gates=(), timings=(), conditions={}, seeds={}, date="2026-11-22T12:00:00+00:00"
        )

    outcome, _ = author(begun, GOOD, measure=measure)
    assert outcome.report.status == "accepted"
    path, again, lacking = primitive.merge("softsign")
    assert path.name == "softsign.patch" and again.report.status == "accepted"
    assert "its page lacks Shapes:, Dtypes:, Cost:, Paper: family 1" in lacking


def checked_identity(run: runs.Run, source: str) -> Any:
    made = primitive_task.PrimitiveTask.of(run).proposal
    found = proposal_gates.check(made, run.spec, source).report
    assert isinstance(found, Checked)
    return found.identity


def test_it_is_no_kernel(begun: runs.Run) -> None:
    author(begun, GOOD)
    found = CliRunner().invoke(app, ["review", begun.name])
    assert found.exit_code == OK and "lines of device functions" in found.output and "---" not in found.output
    opened = runs.reopen(begun.name)
    with opened.journal:
        outcome = result_of(opened.journal, opened.spec)
        assert outcome is not None
        with pytest.raises(Refused, match="coda-agent primitive softsign --merge"):
            accept.accept(outcome, opened.journal, looked=True)
    both = "resume softsign-.* --gpu.* primitive softsign --provider replay --gpu"
    with pytest.raises(InvalidInput, match=both):
        bundle.pack([begun.name], Path("bundle.json"))


def test_nothing_to_merge(begun: runs.Run) -> None:
    with pytest.raises(InvalidInput, match="no run has authored mish"):
        primitive.merge("mish")
    with pytest.raises(InvalidInput, match="coda-agent resume softsign-"):
        begun.journal.close()
        primitive.merge("softsign")


def test_what_was_checked_without_a_number_is_not_merged(
    begun: runs.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposal_gates, "_interpret", lambda *given: None)
    outcome, _ = author(begun, GOOD)
    assert isinstance(outcome.report, Checked)
    with pytest.raises(InvalidInput, match="checked no arithmetic; run it again: coda-agent primitive"):
        primitive.merge("softsign")


def test_a_merged_one_is_played_back_and_not_merged_again(
    runs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_compiler: None
) -> None:
    """The replay verifies the recorded functions again. The verified text defines ``softplus`` and does not
    use the vocabulary's own function. The test removes one comma from the recorded text, so that this text
    differs from the merged module ``device/softplus.py``. If both texts were equal, the audit of the test
    session would take the merged module for a candidate, and report that it ran outside the jail."""
    kept = kernel_files.recording_path("softplus", edited=True)
    (changed := tmp_path / kept.name).write_text(
        kept.read_text().replace("exp(-abs(x)), in", "exp(-abs(x)) in")
    )
    monkeypatch.setattr(kernel_files, "recording_path", lambda name, edited=False: changed)
    monkeypatch.chdir(ROOT)
    found = CliRunner().invoke(app, ["primitive", "softplus", "--provider", "replay"])
    assert found.exit_code == OK, found.output
    assert "attempt 1: checked" in found.output and "--merge" not in found.output
    with pytest.raises(InvalidInput, match="nothing to merge"):
        primitive.merge("softplus")
    made = proposal.load(primitive.path_of("softplus"), new=False)
    (frame := tmp_path / "softplus.yaml").write_text(made.frame)
    _, events = read_export(kept)
    source = next(e.payload["source"] for e in events if e.kind == "report")
    framed = made.framed(load(frame), source, fast=True)
    assert "def softplus(" in framed and "device.softplus" not in framed
    proposal_gates._interpret(made, load(frame), source, {})  # the recorded source, unchanged
    for given in ("handoff", "anthropic"):
        with pytest.raises(SpecError, match="primitives has 'softplus' already"):
            primitive.start(primitive.path_of("softplus"), HEADER | {"provider": given})


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
    assert entry.startswith(f"def softsign(x):\n    {PAGE}\n")


def test_what_a_page_lacks_is_said() -> None:
    page = inspect.cleandoc(PAGE.strip('"'))
    assert formed(page)
    parts = {"Shapes: as for operators. ": "Shapes:", "        rest = t - bent\n": "an example of two lines"}
    for part, name in parts.items():
        cut = inspect.cleandoc(PAGE.strip('"').replace(part, ""))
        assert (
            f"its page lacks {name}: complete it in primitives/lang/ops/element"
            in primitive.missing_parts(cut)
        )


def test_the_command_from_proposal_to_patch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run uses a separate process and the real compiler. After ``git apply`` of the patch, the vocabulary
    has the primitive."""
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
    for number, source in enumerate((EXACT, GOOD), 1):  # the first source lacks a constant
        (handoff / f"answer-{number}.md").write_text(f"{fenced(source)}<!-- end -->")
    options = ("--provider", "handoff", "--directory", handoff, "--author", "Ada")
    place = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = coda_agent("primitive", "softsign", *options, cwd=tmp_path, **place)
    assert done.returncode == OK, done.stdout + done.stderr
    assert "attempt 2: checked" in done.stdout and "primitive softsign --merge" in done.stdout
    status, said = here("softsign", "--merge")
    assert status == OK and "git apply softsign.patch" in said and "its page lacks Shapes:" in said
    _check_merged(tmp_path)


def _check_merged(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for folder in ("primitives", "fused", "verifier", "agent", "comparison", "tests", "specs"):
        files = [p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        for path in files:
            (clone / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            (clone / path.relative_to(ROOT)).write_bytes(path.read_bytes())
    for name in ("pyproject.toml", "__init__.py"):
        (clone / name).write_bytes((ROOT / name).read_bytes())
    (clone / "src").mkdir()
    (clone / "src" / "coda_agent").symlink_to("..")
    (clone / "specs" / "primitives").mkdir(exist_ok=True)
    (clone / "specs" / "primitives" / "softsign.yaml").write_text(SOFTSIGN)

    def run(*command: str | Path) -> str:
        environment = os.environ | {"PYTHONPATH": str(clone / "src")}
        told = subprocess.run(
            command, cwd=clone, env=environment, capture_output=True, text=True, check=False
        )
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout

    run("git", "init", "--quiet", ".")
    run("git", "apply", tmp_path / "softsign.patch")
    run(sys.executable, "-c", MERGED)
    made = [f"primitives/{path}.py" for path in ("__init__", "lang/ops/elementwise", "device/softsign")]
    header, events = read_export(clone / "agent" / "recordings" / "softsign.raw.jsonl")
    assert header["author"] == "Ada" and [e.kind for e in events].count("answer") == 2
    assert str(tmp_path) not in json.dumps(header)
    for tool in (("check",), ("format", "--check")):
        run(sys.executable, "-m", "ruff", *tool, *made)


MERGED = '''
import sys

import torch

sys.path.append("tests/support")
from machine import run_lowered
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import Signature, TensorType
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.raw import arithmetic
from coda_agent.primitives.lang.kernel_file import trace_source

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
