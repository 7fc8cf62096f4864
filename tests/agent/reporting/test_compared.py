"""Runs side by side: their strategies, costs and outcomes, as data and as one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fake_messages
import pytest
from authoring import (
    BROKEN,
    HEADER,
    TOY_KERNEL,
    UNSCALED,
    USAGE,
    accepted_run,
    checked,
    coda_agent,
    fenced,
    make_run,
    measured,
    program_of,
    slow,
    write_toy,
)
from test_page import cells, judged, parsed
from typer.testing import CliRunner

from coda_agent.agent.cli.main import app
from coda_agent.agent.providers import Turn
from coda_agent.agent.reporting import compared
from coda_agent.agent.run import runs
from coda_agent.agent.storage.journal import GPU_SECONDS, JournalError
from coda_agent.verifier.decision import KEPT
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import Measured, Rejected


@pytest.fixture
def toy(runs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_toy(tmp_path)


SLOW = "decision/slow"
GAIN = "large 1.050 [1.010, 1.092], wide 1.050 [1.010, 1.092]"


def candidate(number: int, first: str = "") -> dict[str, Any]:
    limits = {"tokens": 4500, "dollars": 1.5}
    group = {"group": first} if first else {}
    return {"candidate": number, "candidates": 3, "improve": 1, "limits": limits} | group


def too_slow(toy: Path) -> Rejected:
    spec = load(toy, check=False)
    rows = measured(spec, program_of(spec, TOY_KERNEL), 0.9).timings
    evidence = {"timings": [t.model_dump(mode="json", exclude={"samples"}) for t in rows]}
    return slow(spec).model_copy(update={"evidence": evidence})


def repaired_and_improved(toy: Path, **header: Any) -> str:
    """Make a run of three attempts; return the name of the run. The first attempt is rejected, the second is
    accepted, and the third is faster than the second in both cases."""
    run = runs.start(toy, HEADER | header)
    program = program_of(run.spec, TOY_KERNEL)
    found = measured(run.spec, program, 1.5)
    gain = measured(run.spec, program, 1.05).timings[0].ratios["torch.compile"]
    rows = tuple(t.model_copy(update={"ratios": t.ratios | {KEPT: gain}}) for t in found.timings)
    reports = [
        judged(Rejected(gate="trace", code="arguments", message="no"), BROKEN),
        judged(checked(run.spec, program), TOY_KERNEL, program.to_json()),
        judged(checked(run.spec, program), TOY_KERNEL, program.to_json()),
    ]
    timed: list[Measured | None] = [None, found, found.model_copy(update={"timings": rows})]
    with run.journal as journal:
        for n, (report, measurement) in enumerate(zip(reports, timed, strict=True), 1):
            turn = Turn(fenced(report["source"]), USAGE, "Ada via handoff", "end_turn").to_json()
            journal.once(f"answer/{n}", "answer", lambda turn=turn: turn | {"dollars": 0.25})  # type: ignore[misc]
            journal.once(f"report/{n}", "report", lambda report=report: report)  # type: ignore[misc]
            if measurement:
                payload = measurement.model_dump(mode="json") | {GPU_SECONDS: 40.0}
                journal.once(f"measurement/{n}", "measurement", lambda payload=payload: payload)  # type: ignore[misc]
    return run.name


def group(toy: Path) -> list[str]:
    """Make the runs of three candidates; return the names of the runs. The first candidate is repaired and
    improved, the second is too slow, and the third is only checked."""
    first = repaired_and_improved(toy, **candidate(1))
    second = make_run(toy, found=too_slow(toy), **candidate(2, first))
    return [first, second, make_run(toy, **candidate(3, first))]


def test_candidates_are_set_side_by_side_by_the_name_of_any(toy: Path, tmp_path: Path) -> None:
    names = group(toy)
    alone = accepted_run(toy)  # a run of the same spec, outside the group
    done = CliRunner().invoke(app, ["report", names[1]])
    assert done.exit_code == 0, done.output
    home = runs.runs_dir()
    path = home / names[0] / f"{names[0]}.compared.html"
    assert done.output.split() == [str(path), *(str(home / name / f"{name}.html") for name in names)]
    text = path.read_text(encoding="utf-8")
    root = parsed(text)
    links = [a.get("href") for a in root.every("a")]
    assert links == [f"{names[0]}.html", *(f"../{name}/{name}.html" for name in names[1:])]
    assert all((path.parent / link).is_file() for link in links)
    budget = "4,500 tokens, 1.5 dollars"
    strategy = "of 3 candidates, 6 attempts, 1 improvement rounds"
    assert cells(root, "Strategy, outcome")[1:] == [
        [names[0], f"1 {strategy}", "Ada via handoff", budget, "accepted", "3", "3,333", "0.75", "80"],
        [names[1], f"2 {strategy}", "Ada via handoff", budget, f"rejected {SLOW}", "1", "1,111", "–", "–"],
        [names[2], f"3 {strategy}", "Ada via handoff", budget, "checked", "1", "1,111", "–", "–"],
    ]  # fmt: skip
    assert alone not in root.text
    times = cells(root, "Times")[1:]
    assert [row[:2] for row in times[1:3]] == [[names[0], "wide"], [f"{names[1]} (not accepted)", "large"]]
    assert times[0] == [names[0], "large", "2.000", "1.500 [1.442, 1.560]", "7%"]
    assert times[2][2:] == ["2.000", "0.900 [0.865, 0.936]", "7%"]
    assert cells(root, "Cost and outcome")[1:] == [
        [names[0], "1", "first", "rejected trace/arguments", "1,111", "0.25", "–", "0", ""],
        [names[0], "2", "repair", "accepted", "1,111", "0.25", "40", "0", ""],
        [names[0], "3", "improvement", "accepted", "1,111", "0.25", "40", "0", GAIN],
        [names[1], "1", "first", f"rejected {SLOW}", "1,111", "–", "–", "0", ""],
        [names[2], "1", "first", "checked", "1,111", "–", "–", "0", ""],
    ]
    assert compared.write([alone]) == [home / alone / f"{alone}.html"]


def test_a_program_gets_figures(toy: Path) -> None:
    names = group(toy)
    told = json.loads(CliRunner().invoke(app, ["report", *names, "--json"]).output)
    best, rejected, unmeasured = told["runs"]
    assert [r["kind"] for r in best["rounds"]] == ["first", "repair", "improvement"]
    assert best["rounds"][2]["gain"]["large"]["estimate"] == pytest.approx(1.05)
    assert best["rounds"][1]["spent"]["gpu_seconds"] == 40 and best["spent"]["dollars"] == 0.75
    assert best["cases"]["wide"]["speedup"]["estimate"] == pytest.approx(1.5)
    assert not rejected["accepted"] and rejected["cases"]["large"]["milliseconds"] == 2.0
    assert unmeasured["cases"] == {} and unmeasured["budget"] == {"tokens": 4500, "dollars": 1.5}


def test_a_change_that_was_not_kept_says_by_how_much(toy: Path) -> None:
    name = accepted_run(toy)
    run = runs.reopen(name)
    program = program_of(run.spec, UNSCALED)
    found = measured(run.spec, program, 1.3).timings
    worse = measured(run.spec, program, 0.95).timings[0].ratios["torch.compile"]
    rows = [t.model_copy(update={"ratios": t.ratios | {KEPT: worse}}) for t in found]
    evidence = {"timings": [t.model_dump(mode="json", exclude={"samples"}) for t in rows]}
    no = Rejected(gate="decision", code="no_faster", message="not kept", evidence=evidence)
    with run.journal as journal:
        turn = Turn(fenced(UNSCALED), USAGE, "Ada via handoff", "end_turn").to_json()
        journal.once("answer/2", "answer", lambda: turn)
        report = judged(checked(run.spec, program), UNSCALED, program.to_json())
        journal.once("report/2", "report", lambda: report)
        journal.once("measurement/2", "measurement", lambda: no.model_dump(mode="json"))
    (told,) = compared.as_dict([name])["runs"]
    assert told["rounds"][1]["status"] == "rejected"
    assert told["rounds"][1]["gain"]["large"]["high"] == pytest.approx(0.988, abs=1e-3)
    # the speedup of the kept kernel, not of the rejected change
    assert told["cases"]["large"]["speedup"]["estimate"] == pytest.approx(1.3)


def test_a_comparison_does_not_overwrite_a_runs_page(toy: Path, tmp_path: Path) -> None:
    one, two = accepted_run(toy), make_run(toy)
    paths = compared.write([one, two], Path("both.html"))
    assert [path.name for path in paths] == ["both.html", f"{one}.html", f"{two}.html"]
    with pytest.raises(JournalError, match="this is the page of one of the runs"):
        compared.write([one, two], Path(f"{two}.html"))
    first, *_ = group(toy)
    assert {path.name for path in compared.write([first], Path("mine.html"))} >= {"mine.html"}
    assert '<a href="mine.html">' in (tmp_path / f"{first}.compared.html").read_text(encoding="utf-8")


def test_candidates_that_a_model_answers_tell_their_dollars(toy: Path, runs_home: Path) -> None:
    replies = [fake_messages.answer(fenced(BROKEN)) for _ in range(4)]
    with fake_messages.FakeMessages(*replies) as server:
        done = coda_agent(
            "generate", toy, "--no-gpu", "--provider", "anthropic", "--model", "claude-opus-4-5",
            "--candidates", "2", "--attempts", "2", "--budget-dollars", "3",
            ANTHROPIC_BASE_URL=server.url, ANTHROPIC_API_KEY="sk-of-nobody",
        )  # fmt: skip
    assert done.returncode == 1, done.stderr
    told = compared.as_dict(runs.names()[:1])
    assert [run["budget"] for run in told["runs"]] == [{"dollars": 1.5}] * 2
    for run in told["runs"]:
        first, repair = run["rounds"]
        assert run["spent"]["dollars"] == pytest.approx(
            first["spent"]["dollars"] + repair["spent"]["dollars"]
        )
        assert repair["spent"]["dollars"] > 0 and repair["spent"]["tokens"] > 4000
        assert (first["status"], repair["status"]) == ("rejected", "rejected") and not run["accepted"]
