"""Evidence is for what is committed: an accepted kernel, every way to tamper with it, and the real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

from agent import runs, session
from agent.accept import accept, files
from agent.journal import read_export
from agent.loop import Loop, standing
from agent.providers.replay import Replay
from agent.table import edited
from primitives.ir import Program
from primitives.lower import lower
from verifier.evidence import problems
from verifier.report import Accepted, Checked
from verifier.spec import load

COMMITTED = sorted(
    p.name.removesuffix(".report.json") for p in KERNELS.glob("*.report.json") if not edited(p)
)
EDITED = sorted(p.name.removesuffix(".raw.report.json") for p in KERNELS.glob("*.raw.report.json"))


@pytest.fixture
def kernels(runs_home: Path, tmp_path: Path) -> Path:
    """A directory with the spec, the four files and the recording of an accepted kernel, toy."""
    directory = tmp_path / "kernels"
    directory.mkdir()
    run = runs.reopen(accepted_run(write_toy(directory)))
    with run.journal:
        outcome = standing(run.journal, run.spec)
        assert outcome is not None
        accept(outcome, run.journal, directory, directory)
    return directory


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def edit(kernels: Path, change: Callable[[Any], object]) -> None:
    path = kernels / "toy.report.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def found(kernels: Path) -> list[str]:
    return problems("toy", kernels, kernels)


def test_what_was_accepted_stands(kernels: Path) -> None:
    assert found(kernels) == []


def test_prose_may_change(kernels: Path) -> None:
    replace(kernels / "toy.py", "The row scale rides", "# The row scale is carried")
    replace(kernels / "toy.yaml", "Matmul with a row scale.", "A matmul, each row times a number.")
    assert found(kernels) == []


# tampering, and what is said of it

TAMPERED: dict[str, tuple[Callable[[Path], object], str]] = {
    "source, the result": (
        lambda k: replace(k / "toy.py", "gemm(a, b) *", "2 * gemm(a, b) *"),
        "toy.py traces to another program than toy.program.json",
    ),
    "source, the language": (
        lambda k: replace(k / "toy.py", "@kernel", "import os\n@kernel"),
        "toy.py:4: rejected (language)",
    ),
    "program": (
        lambda k: replace(k / "toy.program.json", '"multiply"', '"add"'),
        "toy.py traces to another program than toy.program.json",
    ),
    "program, malformed": (
        lambda k: replace(k / "toy.program.json", '"multiply"', '"shell"'),
        "toy.program.json is no program of toy: node",
    ),
    "text": (
        lambda k: replace(k / "toy.cutedsl.py", "\n", "\n# harmless\n"),
        "toy.program.json lowers to another text than toy.cutedsl.py",
    ),
    "text, its line ends": (
        lambda k: (k / "toy.cutedsl.py").write_bytes(
            (k / "toy.cutedsl.py").read_bytes().replace(b"\n", b"\r\n")
        ),
        "lowers to another text",
    ),
    "spec, its mathematics": (
        lambda k: replace(k / "toy.yaml", "c = (a @ b) * v", "c = 2 * (a @ b) * v"),
        "the report is for spec hash",
    ),
    "spec, its sizes": (
        lambda k: replace(k / "toy.yaml", "M: 2048", "M: 4096"),
        "case wide was measured at {'M': 2048, 'K': 4096, 'N': 8192}, not at {'M': 4096",
    ),
    "spec, its threshold": (
        lambda k: replace(k / "toy.yaml", "speedup: 1.1", "speedup: 1.25"),
        "case large has a lower bound of 1.250 on its speedup over torch.compile, which does not exceed 1.25",
    ),
    "spec, another case": (
        lambda k: replace(
            k / "toy.yaml", "  - {name: wide", "  - {name: huge, M: 8192, K: 8, N: 8}\n  - {name: wide"
        ),
        "the report has 0 timings of case huge, not one",
    ),
    "spec, a typing error": (
        lambda k: replace(k / "toy.yaml", "bf16", "bfloat"),
        "toy.yaml:5: dtype 'bfloat'",
    ),
    "report of another spec": (
        lambda k: edit(k, lambda r: r["identity"].update(spec="other")),
        "the report is for spec other, here it is toy",
    ),
    "report of another spec hash": (
        lambda k: edit(k, lambda r: r["identity"].update(spec_hash="0" * 64)),
        "the report is for spec hash 0000",
    ),
    "report of another program": (
        lambda k: edit(k, lambda r: r["identity"].update(program_hash="0" * 64)),
        "the report is for program hash 0000",
    ),
    "report of another text": (
        lambda k: edit(k, lambda r: r["identity"].update(lowered_hash="0" * 64)),
        "install the versions it was made with (nvidia-cutlass-dsl ",
    ),
    "report, no author": (lambda k: edit(k, lambda r: r.update(authorship=None)), "names no author"),
    "report, a blank author": (
        lambda k: edit(k, lambda r: r["authorship"].update(author=" ")),
        "names no author",
    ),
    "report, a case left out": (
        lambda k: edit(k, lambda r: r["timings"].pop()),
        "the report has 0 timings of case wide, not one",
    ),
    "report, a case twice": (
        lambda k: edit(k, lambda r: r["timings"].append(r["timings"][0])),
        "the report has 2 timings of case large, not one",
    ),
    "report, another ratio": (
        lambda k: edit(k, lambda r: r["timings"][1]["ratios"]["torch.compile"].update(low=1.2501)),
        "case wide: its ratio to torch.compile is not its samples'",
    ),
    "report, not a number": (
        lambda k: edit(k, lambda r: r["timings"][1]["ratios"]["torch.compile"].update(low=float("nan"))),
        "case wide: its ratio to torch.compile is not its samples'",
    ),
    "report, faster samples": (
        lambda k: edit(k, lambda r: r["timings"][1]["samples"].update(candidate=[[1.0] * 8] * 3)),
        "case wide: its ratio to torch.compile is not its samples'",
    ),
    "report, no samples": (
        lambda k: edit(k, lambda r: r["timings"][1]["samples"].clear()),
        "case wide: its ratio to torch.compile is not its samples'",
    ),
    "report, no baseline": (
        lambda k: edit(k, lambda r: r["timings"][0]["ratios"].pop("torch.compile")),
        "case large was not measured against torch.compile",
    ),
    "report, a gate left out": (
        lambda k: edit(k, lambda r: r["gates"].pop(4)),
        "the report has no gate numerics",
    ),
    "report, a ragged case unchecked": (
        lambda k: edit(k, lambda r: r["gates"][4]["figures"].pop("ragged")),
        "gate numerics has no figures for case ragged",
    ),
    "report, only checked": (
        lambda k: edit(k, lambda r: r.update(status="checked")),
        "toy.report.json is no report of an accepted kernel: status",
    ),
    "report, malformed": (
        lambda k: (k / "toy.report.json").write_text("{"),
        "toy.report.json is no report of an accepted kernel",
    ),
    "spec, removed": (lambda k: (k / "toy.yaml").unlink(), "toy.yaml: there is no such file"),
    **{
        f"{suffix}, removed": (lambda k, s=suffix: (k / f"toy.{s}").unlink(), f"toy.{suffix}")  # type: ignore[misc]
        for suffix in ("py", "program.json", "cutedsl.py", "report.json")
    },
}


@pytest.mark.parametrize(("tamper", "words"), TAMPERED.values(), ids=TAMPERED)
def test_tampering_is_named(kernels: Path, tamper: Callable[[Path], object], words: str) -> None:
    tamper(kernels)
    assert any(words in problem for problem in found(kernels)), found(kernels)


def test_all_files_swapped_for_another_kernels(kernels: Path) -> None:
    """Source, program and text agree with each other; the report is still the first one's."""
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
    assert len(found(kernels)) == 5  # spec hash, author, text, and two cases that are too slow


# the real ones


def replayed(name: str, specs: Path, recording: Path) -> Program:
    """The program that the recorded answers end in, by the real gates but for the compiler."""
    run = runs.start(specs / f"{name}.yaml", {})
    with run.journal:
        outcome = Loop(run.journal, run.spec, session.work_of(run), Replay(recording), Notes()).run()
    assert isinstance(outcome.report, Checked) and outcome.program is not None, outcome.report
    return outcome.program


def test_committed_evidence_stands() -> None:
    assert [problem for name in COMMITTED for problem in problems(name, KERNELS, SPECS)] == []
    assert [problem for name in EDITED for problem in problems(name, KERNELS, SPECS, raw=True)] == []


def test_committed_recordings_replay_to_their_kernels(runs_home: Path, no_compiler: None) -> None:
    for name in COMMITTED:
        program = replayed(name, SPECS, RECORDINGS / f"{name}.jsonl")
        report = Accepted.model_validate_json((KERNELS / f"{name}.report.json").read_text(encoding="utf-8"))
        assert program.hash == report.identity.program_hash


def test_committed_recordings_say_nothing_of_the_machine() -> None:
    for name in COMMITTED:
        header, _ = read_export(RECORDINGS / f"{name}.jsonl")
        assert header.keys() <= {"run", "spec", "spec_hash", "provider", "attempts", "author", "model"}


def test_a_recording_replays_to_its_kernel(kernels: Path, no_compiler: None) -> None:
    assert (
        replayed("toy", kernels, kernels / "toy.jsonl").to_json()
        == (kernels / "toy.program.json").read_text()
    )


def test_nothing_lies_about_without_evidence() -> None:
    vouched = {path.name for name in COMMITTED for path in files(name)}
    vouched |= {path.name for name in EDITED for path in files(name, raw=True)}
    lying = [p.name for p in KERNELS.glob("*") if p.suffix in (".py", ".json") and p.name not in vouched]
    assert lying == []
