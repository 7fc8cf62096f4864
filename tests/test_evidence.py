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
from agent.accept import accept, files, superseded
from agent.journal import read_export
from agent.loop import Loop, standing
from agent.providers.replay import Replay
from agent.table import edited
from primitives.ir import Program
from primitives.lower import lower
from primitives.schedule import Schedule
from verifier.claims import AMONG, protocol
from verifier.decision import central, compared
from verifier.evidence import UNTOLD, problems
from verifier.report import CONTROLS_AMONG_ARMS, PROTOCOL, SEPARATE_CONTROLS, Accepted, Checked
from verifier.spec_file import load

COMMITTED = sorted(
    p.name.removesuffix(".report.json") for p in KERNELS.glob("*.report.json") if not edited(p)
)
EDITED = sorted(p.name.removesuffix(".raw.report.json") for p in KERNELS.glob("*.raw.report.json"))

# Kernels that await to be measured as kernels are now, by the protocol of their reports (verifier/report.py).
# Whoever measures one takes it off; none is ever put on.
OLDER = {
    SEPARATE_CONTROLS: {
        "gemm_cross_entropy_bwd",
        "gemm_softcap_cross_entropy",
    },
    CONTROLS_AMONG_ARMS: {
        "gemm_bias_gelu",
        "gemm_geglu",
        "gemm_partial_cross_entropy",
        "gemm_rmsnorm_partial_cross_entropy",
    },
}

SUPERSEDED: set[str] = set()


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


def pin(kernels: Path) -> None:
    """The program says a schedule, and the report is of that program by its hash."""
    path = kernels / "toy.program.json"
    program = Program.from_json(path.read_text())._replace(schedule={0: Schedule(128, 32, False)})
    path.write_text(program.to_json())
    edit(kernels, lambda r: r["identity"].update(program_hash=program.hash))


def test_what_was_accepted_stands(kernels: Path) -> None:
    assert found(kernels) == []


def test_prose_may_change(kernels: Path) -> None:
    replace(kernels / "toy.py", "The row scale rides", "# The row scale is carried")
    replace(kernels / "toy.yaml", "Matmul with a row scale.", "A matmul, each row times a number.")
    assert found(kernels) == []


def test_a_process_may_have_been_replaced_for_its_faults(kernels: Path) -> None:
    def replaced(report: Any) -> None:
        worse = report["controls"][0] | {"faults": ["a kernel against itself came out at 1.2"]}
        report["controls"].insert(0, worse)

    edit(kernels, replaced)
    assert found(kernels) == []


# tampering, and what is said of it


def rerate(report: Any) -> None:
    """Medians and ratios are the samples' again, whatever these are by now."""
    for t in report["timings"]:
        own = t["samples"]["candidate"]
        t["milliseconds"] = {arm: round(central(rows), 5) for arm, rows in t["samples"].items()}
        t["ratios"] = {arm: compared(t["samples"][arm], own).model_dump() for arm in t["ratios"]}
        t["processes"], t["rounds"] = len(own), len(own[0])


def resample(report: Any, change: Callable[[str, Any], Any]) -> None:
    """Other samples by arm, and all that follows from them."""
    for t in report["timings"]:
        t["samples"] = {arm: change(arm, rows) for arm, rows in t["samples"].items()}
    rerate(report)


def faster(arm: str, rows: Any) -> Any:
    """The candidate takes a hundredth of the time, which no H100 could."""
    return [[x / 100 if arm == "candidate" else x for x in row] for row in rows]


def figures(report: Any, gate: str) -> Any:
    return next(g["figures"] for g in report["gates"] if g["gate"] == gate)


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
        "decided again, it is rejected: case large: 1.300x torch.compile [1.250, 1.352], but the lower bound",
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
    "report, samples below the roofline": (
        lambda k: edit(k, lambda r: resample(r, faster)),
        "decided again, it is void: case large: 0.02 ms is less than the",
    ),
    "report, a graph below the roofline": (
        lambda k: edit(k, lambda r: r["timings"][0].update(graph_milliseconds=0.02)),
        "decided again, it is void: case large: 0.02 ms is less than the",
    ),
    "report, slow samples": (
        lambda k: edit(k, lambda r: resample(r, lambda arm, rows: [[2.0] * len(row) for row in rows])),
        "decided again, it is rejected: case large: 1.000x torch.compile",
    ),
    "report, one process": (
        lambda k: edit(k, lambda r: resample(r, lambda arm, rows: rows[:1])),
        "case large says 1 process(es) and has samples of 1; there are at least 3: measure again",
    ),
    "report, more processes than sampled": (
        lambda k: edit(k, lambda r: r["timings"][1].update(processes=5)),
        "case wide says 5 process(es) and has samples of 3",
    ),
    "report, eight rounds": (
        lambda k: edit(k, lambda r: resample(r, lambda arm, rows: [row[:8] for row in rows])),
        "case large says 8 rounds and has 8; there are at least 12 a process",
    ),
    "report, more rounds than sampled": (
        lambda k: edit(k, lambda r: r["timings"][1].update(rounds=40)),
        "case wide says 40 rounds and has 12",
    ),
    "report, an arm of fewer rounds": (
        lambda k: edit(k, lambda r: r["timings"][1]["samples"]["cuBLAS matmul"][1].pop()),
        "case wide: its samples of cuBLAS matmul are not of the candidate's rounds",
    ),
    "report, a warm L2": (
        lambda k: edit(k, lambda r: r["timings"][1].update(cold=False)),
        "case wide was measured from a warm L2",
    ),
    "report, another arm's ratio": (
        lambda k: edit(k, lambda r: r["timings"][1]["ratios"]["cuBLAS matmul"].update(estimate=9.0, low=8.9)),
        "case wide: its ratio to cuBLAS matmul is not its samples'",
    ),
    "report, a ratio of no arm": (
        lambda k: edit(
            k, lambda r: r["timings"][1]["ratios"].update(eager={"estimate": 9, "low": 8, "high": 9})
        ),
        "case wide: its ratio to eager is not its samples'",
    ),
    "report, another median": (
        lambda k: edit(k, lambda r: r["timings"][1]["milliseconds"].update(candidate=0.001)),
        "case wide: its time of candidate is not its samples' median",
    ),
    "report, another arm's median": (
        lambda k: edit(k, lambda r: r["timings"][1]["milliseconds"].update({"cuBLAS matmul": 0.001})),
        "case wide: its time of cuBLAS matmul is not its samples' median",
    ),
    "report, a case of nobody's": (
        lambda k: edit(k, lambda r: r["timings"].append(r["timings"][0] | {"case": "small"})),
        "the report has a timing of case small, which the spec does not measure",
    ),
    "report, another decision": (
        lambda k: edit(k, lambda r: figures(r, "decision")["speedup"]["wide"].update(estimate=9.0)),
        "gate decision has other figures than its timings give",
    ),
    "report, no controls": (
        lambda k: edit(k, lambda r: r.update(controls=[])),
        "toy: the controls are not those of 3 processes",
    ),
    "report, a process without controls": (
        lambda k: edit(k, lambda r: r["controls"].pop()),
        "toy: the controls are not those of 3 processes",
    ),
    "report, controls with faults": (
        lambda k: edit(k, lambda r: r["controls"][1].update(faults=["a kernel against itself: 1.2"])),
        "process 1's controls have faults: a kernel against itself: 1.2",
    ),
    "report, controls that hide their faults": (
        lambda k: edit(k, lambda r: r["controls"][2]["same"].update(estimate=1.2)),
        "process 2's controls have faults: a kernel against itself came out at 1.2000",
    ),
    "report, a process replaced for no fault": (
        lambda k: edit(k, lambda r: r["controls"].insert(1, r["controls"][0] | {"attempt": 1})),
        "process 0 was replaced 1 times, once for no fault or too often",
    ),
    "report, a process of nobody's": (
        lambda k: edit(k, lambda r: r["controls"].append(r["controls"][0] | {"process": 3})),
        "toy: the controls are not those of 3 processes",
    ),
    "report, a planted delay not found": (
        lambda k: edit(k, lambda r: r["controls"][0]["planted"].update(low=0.99)),
        "process 0's controls have faults: a planted delay of 2% came out at",
    ),
    "report, empty controls": (
        lambda k: edit(k, lambda r: r["controls"][0].pop("case")),
        "toy: the controls are none: 0.case: Field required",
    ),
    "report, controls of no measured case": (
        lambda k: edit(k, lambda r: r["controls"][0].update(case="ragged")),
        "process 0's controls are of no measured case",
    ),
    "report, controls by themselves": (
        lambda k: edit(k, lambda r: r["conditions"]["during"].pop("score/2/large/controlled.0")),
        "nothing says how the GPU fared during score/2/large",
    ),
    "report, a process that did not score": (
        lambda k: edit(k, lambda r: r["conditions"]["during"].pop("score/1/wide")),
        "nothing says how the GPU fared during score/1/wide",
    ),
    "report, another GPU": (
        lambda k: edit(k, lambda r: r["conditions"].update(gpu="NVIDIA GeForce GTX 1050")),
        "toy: it was measured on NVIDIA GeForce GTX 1050, not on an H100",
    ),
    "report, no GPU": (
        lambda k: edit(k, lambda r: r["conditions"].pop("gpu")),
        "toy: it was measured on a GPU without a name, not on an H100",
    ),
    "report, no hidden sizes": (
        lambda k: edit(k, lambda r: figures(r, "numerics").pop("hidden")),
        "gate numerics has no figures for case hidden",
    ),
    "report, no single row": (
        lambda k: edit(k, lambda r: figures(r, "stability").pop("hidden, one row")),
        "gate stability has no figures for case hidden, one row",
    ),
    "report, hidden sizes of no seed": (
        lambda k: edit(k, lambda r: r["seeds"].pop("hidden/hidden")),
        "the report has no seed of sizes hidden",
    ),
    "report, emptied numerics": (
        lambda k: edit(k, lambda r: figures(r, "numerics").update(large={})),
        "gate numerics has no figures for case large: outputs: Field required",
    ),
    "report, emptied stability": (
        lambda k: edit(k, lambda r: figures(r, "stability").update(large={})),
        "gate stability has no figures for case large: repeats: Field required",
    ),
    "report, no outputs": (
        lambda k: edit(k, lambda r: figures(r, "numerics")["large"].update(outputs={})),
        "gate numerics has figures of other outputs than the spec's for case large",
    ),
    "report, a family left out": (
        lambda k: edit(k, lambda r: figures(r, "numerics")["ragged"]["families"].pop()),
        "low_rank of inputs, not on normal, positive",
    ),
    "report, few repeats": (
        lambda k: edit(k, lambda r: figures(r, "stability")["ragged"].update(repeats=8)),
        "gate stability repeated case ragged 8 times on 2 choices of schedules, not 20 times on 2",
    ),
    **{
        f"report, {statistic} of 99": (
            lambda k, s=statistic: edit(  # type: ignore[misc]
                k, lambda r: figures(r, "numerics")["wide"]["outputs"]["c"].update({s: 99.0})
            ),
            f"case wide: output 'c' has a {statistic} of 99.0, over {limit}",
        )
        for statistic, limit in {"rms_ratio": 1.251, "tile_ratio": 1.547, "element_ratio": 2.002}.items()
    },
    "report, no number": (
        lambda k: edit(k, lambda r: figures(r, "numerics")["wide"]["outputs"]["c"].update(rms_ratio=None)),
        "gate numerics has no figures for case wide: outputs.c.rms_ratio: Input should be a valid number",
    ),
    "report, a protocol to come": (
        lambda k: edit(k, lambda r: r.update(protocol=PROTOCOL + 1)),
        f"the report is of protocol {PROTOCOL + 1}; known are 2, 3, 4: measure again, or update",
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
    "program, another schedule than was timed": (pin, "step 0 ran on another schedule than the program's"),
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
    assert len(found(kernels)) == 4  # spec hash, author, text, and a case that is too slow


# the real ones


def replayed(name: str, specs: Path, recording: Path) -> Program:
    """The program that the recorded answers end in, by the real gates but for the compiler."""
    run = runs.start(specs / f"{name}.yaml", {})
    with run.journal:
        outcome = Loop(run.journal, run.spec, session.work_of(run), Replay(recording), Notes()).run()
    assert isinstance(outcome.report, Checked) and outcome.program is not None, outcome.report
    return outcome.program


def report_of(stem: str) -> Accepted:
    return Accepted.model_validate_json((KERNELS / f"{stem}.report.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_evidence_stands(name: str) -> None:
    assert problems(name, KERNELS, SPECS) == []


def test_committed_edits_evidence_stands() -> None:
    found = {name: problems(name, KERNELS, SPECS, raw=True) for name in EDITED}
    assert all(UNTOLD in problem for name in SUPERSEDED for problem in found.pop(name))
    assert [problem for told in found.values() for problem in told] == []
    assert [name for name in EDITED if protocol(report_of(f"{name}.raw")) not in (*OLDER, PROTOCOL)] == []


def test_edits_whose_programs_were_measured_again_are_listed() -> None:
    """Whether they are still the faster ones has yet to be measured."""
    found = {n for n in EDITED if superseded(report_of(f"{n}.raw"), report_of(n))}
    assert found == SUPERSEDED


def test_what_an_older_protocol_measured_is_listed() -> None:
    """A protocol promises less the older it is: nothing new may go by an older one, and what was measured
    again leaves its list."""
    reports = {name: report_of(name) for name in COMMITTED}
    assert AMONG.keys() == {*OLDER, PROTOCOL}
    for number, listed in OLDER.items():
        assert {name for name, report in reports.items() if protocol(report) == number} == listed


def test_an_older_protocols_promises_are_kept_too(tmp_path: Path) -> None:
    """Of a report from before they said their protocol: what it lacks makes it an older one's, no better."""
    name = "gemm_geglu"
    for path in files(name):
        if path.parent == KERNELS:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / f"{name}.report.json"
    report = json.loads(path.read_text())
    report["conditions"]["during"] = {
        piece.partition("/controlled.")[0]: seen for piece, seen in report["conditions"]["during"].items()
    }
    report["controls"].pop()
    resample(report, faster)
    path.write_text(json.dumps(report))
    assert protocol(Accepted.model_validate(report)) == SEPARATE_CONTROLS
    said = problems(name, tmp_path, SPECS)
    assert len(said) == 2 and "it is void: case 1B" in said[0] and "not those of 3 processes" in said[1]
    del report["conditions"]["during"]
    path.write_text(json.dumps(report))
    assert protocol(Accepted.model_validate(report)) is None
    (alone,) = problems(name, tmp_path, SPECS)
    assert alone.endswith("says no protocol, and shows none; known are 2, 3, 4: measure again, or update")


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
