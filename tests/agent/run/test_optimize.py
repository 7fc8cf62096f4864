"""Edits: what the author of an edit is given, what an edit has to beat, and where an edit is stored.

Fakes replace the compiler and the GPU gates; tests/primitives/raw/test_raw.py uses the real compiler.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from authoring import (
    HEADER,
    TOY_KERNEL,
    Notes,
    Scripted,
    accepted_run,
    fenced,
    measured,
    program_of,
    resources,
    write_toy,
)
from typer.testing import CliRunner

from coda_agent.agent import tips
from coda_agent.agent.artifacts import accept, bundle, bundle_measuring
from coda_agent.agent.cli.exit_codes import OK
from coda_agent.agent.cli.main import app
from coda_agent.agent.learning.lessons import changed, learned
from coda_agent.agent.reporting.table import read
from coda_agent.agent.run import assembly, runs
from coda_agent.agent.run.loop import Loop, Outcome, result_of
from coda_agent.agent.run.optimize import base
from coda_agent.agent.run.task import Measure
from coda_agent.agent.storage import kernel_files
from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import editable, lower
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.primitives.errors import Absent, InvalidInput, Refused
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.verifier.audit.provenance import UNTOLD, problems
from coda_agent.verifier.decision import KEPT, NO_FASTER, central, compared
from coda_agent.verifier.gates import identity
from coda_agent.verifier.incumbent import Incumbent
from coda_agent.verifier.loading import load
from coda_agent.verifier.measure import MeasureOptions
from coda_agent.verifier.report import Accepted, Checked, Measured, Rejected
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.timing import FEWEST

pytestmark = pytest.mark.slow

# Measured milliseconds of the original kernel. An edit of this kernel takes 2.0 ms.
SAMPLES = ((2.2,) * FEWEST, (2.21,) * FEWEST, (2.19,) * FEWEST)


@pytest.fixture
def spec(runs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a spec that has an accepted kernel. A fake compiler refuses only texts that contain
    `BAD`."""
    path = write_toy(tmp_path)
    run = runs.reopen(accepted_run(path))
    kept, recorded = tmp_path / "kernels", tmp_path / "recordings"
    for directory in (kept, recorded):
        directory.mkdir()
    with run.journal:
        outcome = result_of(run.journal, run.spec)
        assert outcome is not None
        accept.accept(outcome, run.journal, kept, recorded)
    monkeypatch.setattr("coda_agent.agent.storage.kernel_files.KERNELS", kept)
    monkeypatch.setattr("coda_agent.agent.storage.kernel_files.RECORDINGS", recorded)
    monkeypatch.setattr("coda_agent.primitives.runtime.compile.report", compiled)
    return path


def compiled(kernel: KernelSource, sizes: object, schedules: object = ()) -> object:
    if "BAD" in (kernel.edited or ""):
        raise CompileError("nothing is named 'BAD' here", "language", 7)
    return resources(kernel.program)


def program(spec: Path) -> Program:
    return program_of(load(spec), TOY_KERNEL)


def edit(spec: Path, idea: str = "quicker") -> str:
    return editable(program(spec)).replace("Lowered by coda-agent", f"{idea}: lowered by coda-agent")


def start(spec: Path, **header: Any) -> runs.Run:
    return runs.start(spec, HEADER | {"optimizes": "toy"} | header)


def faster(spec: Spec, kernel: KernelSource) -> Measured:
    """Return the measurement of a correct edit that beats the original kernel."""
    found = measured(spec, kernel.program)
    rows = tuple(
        t.model_copy(
            update={
                "samples": t.samples | {KEPT: SAMPLES},
                "milliseconds": t.milliseconds | {KEPT: round(central(SAMPLES), 5)},
                "ratios": t.ratios | {KEPT: compared(SAMPLES, t.samples["candidate"])},
                "kept_schedules": t.schedules,
            }
        )
        for t in found.timings
    )
    rival = lower(kernel.program).hash
    update = {"identity": identity(spec, kernel), "timings": rows, "rival": rival}
    return found.model_copy(update=update)


def no_faster() -> Rejected:
    return Rejected(gate="decision", code=NO_FASTER, message="no case is faster beyond doubt")


class Gpu:
    """A fake for the GPU gates. ``seen`` records each measured kernel with the incumbent that this kernel has
    to beat."""

    def __init__(self) -> None:
        self.seen: list[tuple[KernelSource, Incumbent | None]] = []

    def __call__(
        self, spec: Spec, kernel: KernelSource, keep: object, kept: Incumbent | None
    ) -> Measured | Rejected:
        self.seen.append((kernel, kept))
        return faster(spec, kernel)


def author(run: runs.Run, answers: list[str], gpu: Measure | None = None, improve: int = 0) -> Outcome:
    work = assembly.task_of(run)
    provider, attempts = Scripted(answers), len(answers)
    return Loop(run.journal, run.spec, work, provider, Notes(), attempts, gpu, improve=improve).run()


def keep(run_name: str, spec: Path) -> None:
    """Accept the edit of a run, as a person does who has read the edit. Put the spec beside the edit."""
    run = runs.reopen(run_name)
    with run.journal:
        outcome = result_of(run.journal, run.spec)
        assert outcome is not None
        accept.accept(outcome, run.journal, kernel_files.KERNELS, kernel_files.RECORDINGS, looked=True)
    (kernel_files.KERNELS / "toy.yaml").write_text(spec.read_text())


def optimized(spec: Path) -> str:
    """Make a run whose edit is accepted; return the name of the run."""
    run = start(spec)
    with run.journal:
        assert isinstance(author(run, [fenced(edit(spec))], Gpu()).report, Accepted)
    return run.name


def test_the_author_gets_the_module_and_what_was_measured(spec: Path) -> None:
    run = start(spec)
    with run.journal:
        given = assembly.task_of(run).opening()
    assert editable(program(spec)).strip() in given.task and "class Step0(FusedGemm)" in given.task
    assert "1.300x torch.compile" in given.task and "GFLOP" in given.task and "168 registers" in given.task
    assert "CuTeDSL" in given.system


def test_tips_of_this_level_are_read_and_no_others(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "tips.md"
    for number, (lesson, about, level) in enumerate(
        [("Hoist it", "other", "cutedsl"), ("Write per_row", "other", ""), ("Unroll it", "toy", "cutedsl")], 1
    ):
        tips.add(tips.Lesson(lesson, about, f"compile/{number}", "so", "now", level), log)
        tips.change(f"tip-{number}", log, state="accepted")
    monkeypatch.setattr("coda_agent.agent.run.optimize.read_tips", lambda: tips.read_tips(log))
    run = start(spec)
    with run.journal:
        system = assembly.task_of(run).opening().system
    assert "- Hoist it" in system and "per_row" not in system.partition("# Tips")[2]
    assert "Unroll it" not in system  # an author gets no tip that was learned on the run's own spec


def test_a_failed_round_teaches_those_who_edit(spec: Path, tmp_path: Path) -> None:
    run = start(spec)
    with run.journal:
        author(run, [fenced(edit(spec, "BAD")), fenced(edit(spec))])
    (failure,) = learned(run.name).failures
    assert failure.failed == "compile/language" and failure.level == "cutedsl"
    added = tips.add(failure.teaches("Name what is there"), tmp_path / "tips.md")
    assert added.tip.level == "cutedsl" and tips.read_tips(tmp_path / "tips.md") == [added.tip]


def test_an_edit_that_is_no_faster_teaches_what_to_leave_alone(spec: Path) -> None:
    """If an edit is no faster than its incumbent, the fix in the lesson is the diff from the edit to the
    incumbent. The incumbent is the unedited kernel, or an earlier edit that was kept."""
    ideas = [edit(spec, idea) for idea in ("slower", "quicker", "quickest")]

    def judge(spec: Spec, kernel: KernelSource, keep: object, kept: Incumbent | None) -> Measured | Rejected:
        return no_faster() if kernel.edited in (ideas[0], ideas[2]) else faster(spec, kernel)

    for count, kept in ((1, editable(program(spec))), (3, ideas[1])):
        run = start(spec)
        with run.journal:
            author(run, [fenced(idea) for idea in ideas[:count]], judge, improve=1)
        (failure,) = learned(run.name).failures
        assert failure.failed == "decision/no_faster" and failure.level == "cutedsl"
        assert failure.fix == changed(ideas[count - 1], kept)


def test_an_edit_is_measured_against_the_kernel_that_it_was_made_from(spec: Path) -> None:
    run, gpu = start(spec), Gpu()
    with run.journal:
        outcome = author(run, [fenced(edit(spec))], gpu)
        assert isinstance(outcome.report, Accepted) and outcome.report.identity.raw
        assert result_of(run.journal, run.spec) == outcome
    ((kernel, kept),) = gpu.seen
    assert outcome.kernel == kernel == KernelSource(program(spec), edited=edit(spec))
    assert kept is not None and kept.kernel == KernelSource(program(spec))
    assert kept.schedules["large"] == {0: Schedule(256, 128, False)}
    assert kept.finalists["large"][0][1] == Schedule(swizzle=16)


def test_the_next_round_has_to_beat_the_edit(spec: Path) -> None:
    run, gpu = start(spec), Gpu()
    with run.journal:
        author(run, [fenced(edit(spec)), fenced(edit(spec, "quickest"))], gpu, improve=1)
    assert [kept.kernel.edited for _, kept in gpu.seen if kept] == [None, edit(spec)]


def test_what_does_not_compile_is_told_with_its_line(spec: Path) -> None:
    run = start(spec)
    with run.journal:
        outcome = author(run, [fenced(edit(spec, "BAD")), fenced(edit(spec))])
        first = next(e.payload for e in run.journal.events() if e.key == "report/1")["report"]
    assert (first["gate"], first["code"], first["line"]) == ("compile", "language", 7)
    assert isinstance(outcome.report, Checked)
    assert [g.gate for g in outcome.report.gates] == ["edit", "contract", "interpret", "compile"]


def test_the_author_may_set_schedules(spec: Path) -> None:
    run = start(spec)
    with run.journal:
        answer = fenced(edit(spec)) + '\n```json\n{"0": {"swizzle": 4}}\n```\n'
        outcome = author(run, [answer])
    assert outcome.kernel is not None and outcome.kernel.program.schedule == {0: Schedule(swizzle=4)}


def test_the_kernel_it_starts_from_is_that_of_the_runs_first_moment(spec: Path) -> None:
    run = start(spec)
    with run.journal:
        first = assembly.task_of(run).opening()
        for path in kernel_files.files("toy", kernel_files.KERNELS):
            path.unlink()
        assert assembly.task_of(run).opening() == first


def test_there_must_be_a_kernel(spec: Path, tmp_path: Path) -> None:
    with pytest.raises(Absent, match=r"coda-agent generate specs/toy\.yaml"):
        base(load(spec), tmp_path / "nowhere")


def test_two_machines(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(spec)
    with run.journal:
        assert isinstance(author(run, [fenced(edit(spec))]).report, Checked)
    path, results = tmp_path / "bundle.json", tmp_path / "results.json"
    wanted: list[tuple[int, Schedule]] = []
    monkeypatch.setattr(
        "coda_agent.primitives.runtime.precompile.compile_all", lambda *given: wanted.extend(given[2])
    )
    bundle.pack([run.name], path)
    assert {(0, s) for s in (*PROBES, Schedule(swizzle=16), Schedule(256, 128, False))} <= set(wanted)
    seen: dict[str, Any] = {}

    def measure(spec: Spec, kernel: KernelSource, options: MeasureOptions, **given: Any) -> Measured:
        seen.update(given | {"edited": kernel.edited})
        return faster(spec, kernel)

    monkeypatch.setattr("coda_agent.verifier.measure.measure", measure)
    quiet = lambda name: lambda gate, words: None  # noqa: E731
    bundle_measuring.measure(path, bundle.read(path), results, MeasureOptions(), progress=quiet)
    assert seen["edited"] == edit(spec) and seen["kept"].kernel.program == program(spec)
    [*bundle.take(results)]
    again = runs.reopen(run.name)
    with again.journal:
        outcome = result_of(again.journal, again.spec)
    assert outcome is not None and isinstance(outcome.report, Accepted)

    changed = json.loads(path.read_text())
    changed["entries"][0]["raw"] += "# slower\n"
    path.write_text(json.dumps(changed))
    with pytest.raises(InvalidInput, match="the lowered text differs"):
        bundle_measuring.measure(
            path, bundle.read(path), tmp_path / "others.json", MeasureOptions(), progress=quiet
        )


def test_accepting_takes_a_person_who_has_looked(spec: Path, tmp_path: Path) -> None:
    run = runs.reopen(optimized(spec))
    with run.journal:
        outcome = result_of(run.journal, run.spec)
        assert outcome is not None
        with pytest.raises(Refused, match="read first: .* --looked"):
            accept.accept(outcome, run.journal)
        paths = accept.accept(
            outcome, run.journal, kernel_files.KERNELS, kernel_files.RECORDINGS, looked=True
        )
    names = ["toy.raw.py", "toy.raw.program.json", "toy.raw.report.json", "toy.raw.jsonl"]
    assert [path.name for path in paths] == names
    assert paths[0].read_text() == edit(spec)
    assert "raw CuTeDSL" in accept.message(outcome.report, outcome.authorship)  # type: ignore[arg-type]
    beside = kernel_files.KERNELS / "toy.yaml"
    beside.write_text(spec.read_text())
    assert problems("toy", kernel_files.KERNELS, kernel_files.KERNELS, edited=True) == []
    assert problems("toy", kernel_files.KERNELS, kernel_files.KERNELS) == []
    assert len(read(kernel_files.KERNELS, kernel_files.RECORDINGS).runs) == 1

    assert base(load(spec)).kernel.edited == edit(spec)  # the next run starts from the accepted edit
    replay = start(spec, provider="replay")
    with replay.journal:
        rival = assembly.task_of(replay).rival()
        assert rival is not None and rival.kernel.edited is None  # a replay starts from the unedited kernel
    own = kernel_files.KERNELS / "toy.report.json"
    report = json.loads(own.read_text())
    own.write_text(json.dumps(report | {"date": "2099-01-01T00:00:00+00:00"}))
    assert base(load(spec)).kernel.edited is None  # the unedited kernel was measured later than the edit


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("toy.raw.py", "quicker", "slower", "the report is for lowered text"),
        ("toy.raw.report.json", '"raw": true', '"raw": false', "does not cover edited CuTeDSL"),
        ("toy.raw.report.json", "2.2,", "1.9,", "no case is faster than the kernel before"),
        ("toy.raw.report.json", '"edit"', '"trace"', "has no gate edit"),
    ],
)
def test_evidence_for_another_edit_is_none(spec: Path, name: str, old: str, new: str, words: str) -> None:
    keep(optimized(spec), spec)
    path = kernel_files.KERNELS / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new).replace("2.21,", "1.9,").replace("2.19,", "1.9,"))
    found = problems("toy", kernel_files.KERNELS, kernel_files.KERNELS, edited=True)
    assert any(words in problem for problem in found), found


def test_evidence_says_what_an_edit_has_beaten(spec: Path) -> None:
    keep(optimized(spec), spec)
    path = kernel_files.KERNELS / "toy.raw.report.json"
    report = json.loads(path.read_text())
    assert report["rival"] == lower(program(spec)).hash
    first, *others = report["timings"]
    for less in ({"rival": ""}, {"timings": [first | {"kept_schedules": {}}, *others]}):
        path.write_text(json.dumps(report | less))
        (problem,) = problems("toy", kernel_files.KERNELS, kernel_files.KERNELS, edited=True)
        assert UNTOLD in problem


def test_the_command(spec: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "toy.yaml").write_text(spec.read_text())
    monkeypatch.chdir(tmp_path)
    command = CliRunner()
    folder = tmp_path / "handoff"
    folder.mkdir()
    (folder / "answer-1.md").write_text(f"{fenced(edit(spec))}<!-- end -->")
    asked = ["optimize", "toy", "--provider", "handoff", "--author", "Ada", "--directory", str(folder)]
    done = command.invoke(app, [*asked, "--no-gpu"])
    assert done.exit_code == OK and "coda-agent bundle toy-" in done.output, done.output
    replayed = command.invoke(app, ["optimize", "toy", "--provider", "replay", "--no-gpu"])
    assert replayed.exit_code != OK and "toy.raw.jsonl: no recorded run of toy" in str(replayed.exception)


def test_lowering_takes_the_text_as_it_is(spec: Path) -> None:
    own, plain = lower(program(spec)), editable(program(spec))
    first, second = (KernelSource(program(spec), edited=text).lowered for text in (plain, plain + "\n"))
    assert first.text == plain and first.edited and [g.name for g in first.gemms] == ["Step0"]
    assert len({own.hash, first.hash, second.hash}) == 3 and own.text != plain
