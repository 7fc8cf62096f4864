"""Runs of a derived spec: an author's kernel has to beat the derived program, and an edit may start from this
program."""

from __future__ import annotations

from pathlib import Path

import pytest
from authoring import HEADER, Notes, Scripted, fenced, measured, resources
from checkout import ROOT

from coda_agent.agent.backward import pair
from coda_agent.agent.run import assembly, runs
from coda_agent.agent.run.loop import Loop
from coda_agent.agent.run.optimize import EditingTask
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.derive import derive
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.incumbent import Incumbent
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import Measured
from coda_agent.verifier.spec.file import SpecError
from coda_agent.verifier.spec.model import Spec

ANSWER = '''\
from primitives import gemm, kernel


@kernel
def k(d_y, w, x):
    """The weight's gradient first."""
    d_w = gemm(d_y.mT, x)
    return {"d_x": gemm(d_y, w), "d_w": d_w}
'''


@pytest.fixture
def spec(runs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a derived spec; its program is a file in the same folder. A fake replaces the
    compiler."""
    forward = load(ROOT / "specs" / "gemm_row_abs_max.yaml", check=False)
    text = (ROOT / "generated_kernels" / "gemm_row_abs_max.program.json").read_text()
    program = Program.from_json(text, forward.signature())
    made = pair(forward, program, derive(program, forward.cases[0].sizes))
    assert made is not None
    path = tmp_path / "backward.yaml"
    path.write_text(made.text)
    path.with_suffix(".program.json").write_text(made.program.to_json())
    monkeypatch.setattr(
        "coda_agent.primitives.runtime.compile.report", lambda kernel, *_, **__: resources(kernel.program)
    )
    return path


def derived(path: Path) -> Program:
    text = path.with_suffix(".program.json").read_text()
    return Program.from_json(text, load(path, check=False).signature())


def test_an_author_has_to_beat_the_derived_program(spec: Path) -> None:
    seen: list[Incumbent | None] = []

    def gpu(spec: Spec, kernel: KernelSource, keep: object, kept: Incumbent | None) -> Measured:
        seen.append(kept)
        return measured(spec, kernel.program)

    run = runs.start(spec, HEADER)
    with run.journal:
        provider = Scripted([fenced(ANSWER)])
        outcome = Loop(run.journal, run.spec, assembly.task_of(run), provider, Notes(), 1, gpu).run()
    assert outcome.report.status == "accepted", outcome.report
    assert seen == [Incumbent(KernelSource(derived(spec)), {}, {})]
    ((_, (task,)),) = provider.asked
    assert "gemm(d_y, w)" in task.text and "derived program" in task.text


def test_its_rival_is_the_program_of_the_run_s_start(spec: Path) -> None:
    before = derived(spec)
    run = runs.start(spec, HEADER)
    run.journal.close()
    spec.with_suffix(".program.json").unlink()
    again = runs.reopen(run.name)
    with again.journal:
        rival = assembly.task_of(again).rival()
    assert rival is not None and rival.kernel.program == before


def test_without_its_program_there_is_no_rival(spec: Path) -> None:
    spec.with_suffix(".program.json").unlink()
    run = runs.start(spec, HEADER)
    with run.journal:
        assert assembly.task_of(run).rival() is None


def test_a_program_of_another_spec_is_refused(spec: Path) -> None:
    other = (ROOT / "generated_kernels" / "gemm_swiglu.program.json").read_text()
    spec.with_suffix(".program.json").write_text(other)
    with pytest.raises(SpecError) as refused:
        runs.start(spec, HEADER)
    assert refused.value.path == spec.with_suffix(".program.json")
    assert runs.names() == []


def test_an_edit_starts_from_the_derived_program(spec: Path) -> None:
    run = runs.start(spec, HEADER | {"optimizes": "gemm_row_abs_max_backward"})
    with run.journal:
        work = assembly.task_of(run)
        assert isinstance(work, EditingTask)
        assert work.base.kernel == KernelSource(derived(spec)) and work.base.report is None
        rival = work.rival()
        assert rival.kernel == work.base.kernel and rival.schedules == {}
        task = work.opening().task
        assert work.base.kernel.text.strip() in task and "measured of it" not in task
