"""Tests of the check that evidence is intact. The check finds no problem in the evidence of an accepted toy
kernel and of the committed kernels. After each kind of tampering, the check names the problem."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from authoring import (
    KERNELS,
    RECORDINGS,
    SPECS,
    TWICE,
    Notes,
    accepted_run,
    program_of,
    write_toy,
)
from tampering import TAMPERED, edit, found, replace, replaced

from coda_agent.agent.artifacts.accept import accept
from coda_agent.agent.providers.replay import Replay
from coda_agent.agent.reporting.table import edited
from coda_agent.agent.run import assembly, runs
from coda_agent.agent.run.loop import Loop, result_of
from coda_agent.agent.storage.journal import read_export
from coda_agent.agent.storage.kernel_files import files, superseded
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.audit.provenance import UNTOLD, problems
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import cpu_numerics
from coda_agent.verifier.report import Accepted, Checked

pytestmark = pytest.mark.slow

COMMITTED = sorted(
    p.name.removesuffix(".report.json") for p in KERNELS.glob("*.report.json") if not edited(p)
)
EDITED = sorted(p.name.removesuffix(".raw.report.json") for p in KERNELS.glob("*.raw.report.json"))

# Kernels that are checked but not yet measured: their specs have a recording and no report.
WAITING = sorted(
    {p.stem for p in SPECS.glob("*.yaml")} & {p.stem for p in RECORDINGS.glob("*.jsonl")} - {*COMMITTED}
)

# Edited kernels whose original programs were measured again after the edit.
SUPERSEDED: set[str] = set()


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the spec, the four files and the recording of the accepted kernel toy."""
    directory = tmp_path_factory.mktemp("accepted")
    run = runs.reopen(accepted_run(write_toy(directory)))
    with run.journal:
        outcome = result_of(run.journal, run.spec)
        assert outcome is not None
        accept(outcome, run.journal, directory, directory)
    return directory


@pytest.fixture
def kernels(accepted: Path, tmp_path: Path) -> Path:
    """Return a copy of the accepted kernel's directory, to tamper with."""
    return shutil.copytree(accepted, tmp_path / "kernels")


def test_what_was_accepted_stands(kernels: Path) -> None:
    assert found(kernels) == []


def test_prose_may_change(kernels: Path) -> None:
    replace(kernels / "toy.py", "The row scale rides", "# The row scale is carried")
    replace(kernels / "toy.yaml", "Matmul with a row scale.", "A matmul, each row times a number.")
    assert found(kernels) == []


def test_a_process_may_have_been_replaced_for_its_faults(kernels: Path) -> None:
    edit(kernels, lambda report: replaced(report, 2))
    assert found(kernels) == []


# tampering


@pytest.mark.parametrize(("tamper", "words"), TAMPERED.values(), ids=TAMPERED)
def test_tampering_is_named(kernels: Path, tamper: Callable[[Path], object], words: str) -> None:
    tamper(kernels)
    assert any(words in problem for problem in found(kernels)), found(kernels)


def test_all_files_swapped_for_another_kernels(kernels: Path) -> None:
    """Source, program and lowered text belong together, but the report belongs to the original kernel."""
    program = program_of(load(kernels / "toy.yaml", check=False), TWICE)
    (kernels / "toy.py").write_text(TWICE)
    (kernels / "toy.program.json").write_text(program.to_json())
    (kernels / "toy.cutedsl.py").write_text(lower(program).text)
    said = found(kernels)
    assert len(said) == 2 and "program hash" in said[0] and "lowered text" in said[1]


def test_problems_are_told_together(kernels: Path) -> None:
    replace(kernels / "toy.yaml", "speedup: 1.1", "speedup: 2.0")
    replace(kernels / "toy.cutedsl.py", "\n", "\n\n")
    edit(kernels, lambda report: report.update(authorship=None))
    assert len(found(kernels)) == 4  # spec hash, author, text, and a case that is too slow


# the real kernels


def replayed(name: str, specs: Path, recording: Path) -> Program:
    """Replay a run from its recorded answers, and return the program of the resulting kernel. All gates are
    real, except for the compiler."""
    run = runs.start(specs / f"{name}.yaml", {})
    with run.journal:
        outcome = Loop(run.journal, run.spec, assembly.task_of(run), Replay(recording), Notes()).run()
    assert isinstance(outcome.report, Checked) and outcome.kernel is not None, outcome.report
    return outcome.kernel.program


def report_of(stem: str) -> Accepted:
    return Accepted.model_validate_json((KERNELS / f"{stem}.report.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_evidence_stands(name: str) -> None:
    assert problems(name, KERNELS, SPECS) == []


def test_committed_edits_evidence_stands() -> None:
    found = {name: problems(name, KERNELS, SPECS, edited=True) for name in EDITED}
    assert all(UNTOLD in problem for name in SUPERSEDED for problem in found.pop(name))
    assert [problem for told in found.values() for problem in told] == []


def test_edits_whose_programs_were_measured_again_are_listed() -> None:
    """If a program is measured again after its edit, the program may have become as fast as the edit. No
    measurement has compared the two yet, so ``SUPERSEDED`` must list the edit."""
    found = {n for n in EDITED if superseded(report_of(f"{n}.raw"), report_of(n))}
    assert found == SUPERSEDED


def test_committed_recordings_replay_to_their_kernels(
    runs_home: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """To save time, the interpret gate does only a part of its runs for each kernel. The part differs between
    kernels, so that the kernels together cover runs of every kind."""
    every, parts = cpu_numerics.runs, 5 if request.config.getoption("thorough") else 15
    for place, name in enumerate([*COMMITTED, *WAITING]):
        part = slice(place % parts, None, parts)
        monkeypatch.setattr(cpu_numerics, "runs", lambda *given, part=part: [*every(*given)][part])
        program = replayed(name, SPECS, RECORDINGS / f"{name}.jsonl")
        assert name in WAITING or program.hash == report_of(name).identity.program_hash


def test_every_spec_has_a_kernel_or_waits_for_its_measurement() -> None:
    assert {p.stem for p in SPECS.glob("*.yaml")} == {*COMMITTED, *WAITING}


def test_committed_recordings_say_nothing_of_the_machine() -> None:
    for name in COMMITTED:
        header, _ = read_export(RECORDINGS / f"{name}.jsonl")
        assert header.keys() <= {"run", "spec", "spec_hash", "provider", "attempts", "author", "model"}


def test_a_recording_replays_to_its_kernel(kernels: Path, runs_home: Path, no_compiler: None) -> None:
    assert (
        replayed("toy", kernels, kernels / "toy.jsonl").to_json()
        == (kernels / "toy.program.json").read_text()
    )


def test_nothing_lies_about_without_evidence() -> None:
    vouched = {path.name for name in COMMITTED for path in files(name)}
    vouched |= {path.name for name in EDITED for path in files(name, edited=True)}
    lying = [p.name for p in KERNELS.glob("*") if p.suffix in (".py", ".json") and p.name not in vouched]
    assert lying == []
