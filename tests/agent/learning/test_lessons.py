"""Lessons of runs, read from real journals, and the command that adds a lesson to the tips log."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from authoring import (
    BROKEN,
    HEADER,
    TOY_KERNEL,
    TWICE,
    UNSCALED,
    Notes,
    Scripted,
    fenced,
    make_run,
    slow,
    write_toy,
)
from typer.testing import CliRunner, Result

from coda_agent.agent import tips
from coda_agent.agent.cli.main import app
from coda_agent.agent.learning.lessons import UNSEEN, changed, learned
from coda_agent.agent.run import assembly, runs
from coda_agent.agent.run.loop import Loop
from coda_agent.agent.storage.journal import Journal, JournalError
from coda_agent.agent.tips import Tip, TipsError, read_tips
from coda_agent.verifier.loading import load

VERSIONS = ", ".join(f"{name} {version(name)}" for name in ("nvidia-cutlass-dsl", "quack-kernels"))
UNSCALED_FIX = '-`return {"c": gemm(a, b)}` +`return {"c": gemm(a, b) * per_row(v)}`'
BROKEN_FIX = '-`return {"c": gemm(a) * per_row(v)}` +`return {"c": gemm(a, b) * per_row(v)}`'


@pytest.fixture
def author(runs_home: Path, tmp_path: Path, no_compiler: None) -> Callable[..., str]:
    """Return a function that makes a real run with the given answers, and returns the run's name. ``more``
    may add events to the journal of the run."""

    def write(*sources: str, more: Callable[[Journal], object] = lambda journal: None) -> str:
        run = runs.start(write_toy(tmp_path), HEADER | {"provider": "handoff", "author": "Ada"})
        answers = Scripted([fenced(source) for source in sources])
        with run.journal:
            task = assembly.task_of(run)
            Loop(run.journal, run.spec, task, answers, Notes(), attempts=len(sources)).run()
            more(run.journal)
        return run.name

    return write


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tips.md"
    path.write_text("# Tips\n\nFor people.\n")
    monkeypatch.setattr(tips, "TIPS", path)
    return path


def tip(**payload: str) -> Callable[[Journal], object]:
    return lambda journal: journal.once("tip/1.1", "tip", lambda: payload)


def command(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["tips", *arguments], input=typed)


def done(*arguments: str, typed: str = "") -> str:
    result = command(*arguments, typed=typed)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


# failures that were fixed


def test_a_failure_that_a_later_attempt_fixed(author: Callable[..., str]) -> None:
    name = author(BROKEN, UNSCALED, TOY_KERNEL)
    found = learned(name)
    assert found.run == name and found.told == ()
    assert [(f.failed, f.spec, f.versions) for f in found.failures] == [
        ("trace/python", "toy", VERSIONS),
        ("interpret/numerics", "toy", VERSIONS),
    ]
    # the second attempt passes the gate trace, and the third attempt passes the gate interpret
    assert found.failures[0].fix == ('-`return {"c": gemm(a) * per_row(v)}` +`return {"c": gemm(a, b)}`')
    assert found.failures[1].fix == UNSCALED_FIX
    assert learned(str(runs.runs_dir() / name)) == found


def test_of_one_reason_the_last_failure_before_the_fix(author: Callable[..., str]) -> None:
    (failure,) = learned(author(TWICE, UNSCALED, TOY_KERNEL)).failures
    assert (failure.failed, failure.fix) == ("interpret/numerics", UNSCALED_FIX)


@pytest.mark.parametrize("sources", [(TOY_KERNEL,), (BROKEN, BROKEN), (UNSCALED, BROKEN), (UNSCALED, TWICE)])
def test_what_was_never_fixed_teaches_nothing(author: Callable[..., str], sources: tuple[str, ...]) -> None:
    assert learned(author(*sources)).failures == ()


def test_a_run_that_was_never_compiled_knows_no_versions(author: Callable[..., str]) -> None:
    (failure,) = learned(author(BROKEN, UNSCALED)).failures
    assert (failure.failed, failure.versions) == ("trace/python", "unknown")


def test_versions_are_of_what_was_compiled_though_it_was_measured_and_slow(
    runs_home: Path, tmp_path: Path
) -> None:
    spec = write_toy(tmp_path)
    name = make_run(spec, TOY_KERNEL, slow(load(spec, check=False)))
    with runs.reopen(name).journal as journal:
        tip(lesson="Do less", failed="decision/slow", fix="none")(journal)
    (told,) = learned(name).told
    assert told.failure.versions == VERSIONS


def test_a_draft_that_failed_counts_too(author: Callable[..., str]) -> None:
    rejected = {"status": "rejected", "gate": "contract", "code": "outputs", "message": "no c"}

    def draft(journal: Journal) -> None:
        journal.once("draft/1.1", "draft", lambda: {"report": rejected, "program": None, "source": UNSCALED})
        payload = next(e.payload for e in journal.events() if e.key == "report/1")
        journal.once("draft/1.2", "draft", lambda: payload)

    (failure,) = learned(author(TOY_KERNEL, more=draft)).failures
    assert (failure.failed, failure.fix) == ("contract/outputs", UNSCALED_FIX)


def test_a_gate_on_the_gpu_is_passed_only_where_it_ran(runs_home: Path, tmp_path: Path) -> None:
    spec = write_toy(tmp_path)
    name = make_run(spec, UNSCALED, slow(load(spec, check=False)))
    with runs.reopen(name).journal as journal:
        first = next(e.payload for e in journal.events() if e.key == "report/1")
        journal.once("report/2", "report", lambda: first | {"source": TOY_KERNEL})
    assert learned(name).failures == ()  # the second attempt is checked, but not measured
    report = {**first["report"], "gates": [*first["report"]["gates"], {"gate": "decision", "seconds": 0.0}]}
    with runs.reopen(name).journal as journal:
        journal.once("report/3", "report", lambda: first | {"report": report, "source": TOY_KERNEL})
    (failure,) = learned(name).failures
    assert (failure.failed, failure.fix) == ("decision/slow", UNSCALED_FIX)


def test_a_fix_leaves_out_what_is_no_code() -> None:
    before = "a = 1\n\n# why\nif a:\n  b = 2\n"
    assert changed(before, "# because\na = 1\nif a:\n      b = 3\n\n") == "-`b = 2` +`b = 3`"
    assert changed("", "a\n" * 500).endswith("…") and len(changed("", "a\n" * 500)) == 300


def test_a_run_that_cannot_be_read(author: Callable[..., str]) -> None:
    with pytest.raises(JournalError, match="there is no run 'nowhere'"):
        learned("nowhere")
    name = author(BROKEN, TOY_KERNEL)
    with sqlite3.connect(runs.runs_dir() / name / "journal.db") as db:
        db.execute("UPDATE events SET payload = ? WHERE key = 'report/1'", ('{"report": {"status": "new"}}',))
    with pytest.raises(JournalError, match="written by another version of coda-agent"):
        learned(name)


# tips that a run's author proposed


def test_an_authors_tip_is_of_the_failure_that_it_names(author: Callable[..., str]) -> None:
    said = tip(lesson=" Give gemm both operands\n", failed="Gate `trace`, reason `python`.", fix="")
    found = learned(author(BROKEN, UNSCALED, TOY_KERNEL, more=said))
    (told,) = found.told
    assert (told.lesson, told.failure.failed) == ("Give gemm both operands", "trace/python")
    assert (told.failure.spec, told.failure.versions) == ("toy", VERSIONS)
    assert told.failure.fix == found.failures[0].fix
    assert [failure.failed for failure in found.untold()] == ["interpret/numerics"]


def test_an_authors_tip_of_a_failure_that_the_journal_does_not_have(author: Callable[..., str]) -> None:
    said = tip(lesson="Be brief", failed="trace/\nother" + "x" * 500, fix="wrote\nless")
    (told,) = learned(author(BROKEN, TOY_KERNEL, more=said)).told
    assert told.failure.failed.startswith("trace/ otherxx") and told.failure.failed.endswith(f"… ({UNSEEN})")
    assert len(told.failure.failed) < 150 and told.failure.fix == "wrote less"


# the command


def test_propose_asks_for_the_lessons(author: Callable[..., str], log: Path) -> None:
    name, before = author(BROKEN, UNSCALED, TOY_KERNEL), log.read_text()
    said = done("propose", name, typed="# Shout\nGive gemm both operands\n\n")
    assert "Failed at trace/python, fixed by: -`return" in said and "begins with a mark" in said
    assert "Failed at interpret/numerics" in said and "tip-1 proposed: Give gemm both operands" in said
    assert log.read_text().startswith(before)
    (found,) = read_tips(log)
    fix = '-`return {"c": gemm(a) * per_row(v)}` +`return {"c": gemm(a, b)}`'
    assert found == Tip(
        "tip-1", "Give gemm both operands", "toy", "trace/python", fix, VERSIONS, tips.PROPOSED
    )
    again = done("propose", name, typed="\n")
    assert "tip-1 (proposed) already covers the failure trace/python" in again
    assert len(read_tips(log)) == 1


def test_a_retired_lesson_is_not_proposed_again(author: Callable[..., str], log: Path) -> None:
    name = author(BROKEN, TOY_KERNEL)
    done("propose", name, "--lesson", "Give gemm both operands")
    assert "tip-1 retired, was proposed" in done("retire", "tip-1")
    assert "tip-1 (retired) already covers the failure" in done("propose", name)
    assert "tip-1 (retired) already says" in done("propose", name, "--lesson", "Give gemm: both operands")
    (found,) = read_tips(log)
    assert (found.state, found.fix, found.spec) == (tips.RETIRED, BROKEN_FIX, "toy")


@pytest.mark.parametrize("state", ["proposed", "accepted", "retired"])
def test_another_lesson_of_a_failure_is_proposed_beside_the_first(
    author: Callable[..., str], log: Path, state: str
) -> None:
    name = author(BROKEN, TOY_KERNEL)
    done("propose", name, "--lesson", "Give gemm both operands")
    tips.change("tip-1", log, state=state)
    assert "to add another lesson of it: --failed trace/python --lesson" in done("propose", name)
    said = done("propose", name, "--lesson", "Count what an operation takes")
    assert "tip-2 proposed: Count what an operation takes" in said
    assert f"possible duplicate of tip-1 ({state}): Give gemm both operands" in said
    assert [(tip.lesson, tip.state) for tip in read_tips(log)] == [
        ("Give gemm both operands", state),
        ("Count what an operation takes", tips.PROPOSED),
    ]


def test_a_lesson_needs_one_failure(author: Callable[..., str], log: Path) -> None:
    name, before = author(BROKEN, UNSCALED, TOY_KERNEL), log.read_text()
    for arguments in (["--lesson", "Say"], ["--lesson", "Say", "--failed", "trace/x"], ["--lesson", "# Say"]):
        more = ["--failed", "trace/python"] if arguments[-1] == "# Say" else []
        error = command("propose", name, *arguments, *more).exception
        assert isinstance(error, TipsError), arguments
        words = "begins with a mark" if more else "there are: trace/python, interpret/numerics"
        assert words in str(error)
    assert log.read_text() == before
    done("propose", name, "--lesson", "Scale rows", "--failed", "interpret/numerics")
    assert [(t.lesson, t.failed) for t in read_tips(log)] == [("Scale rows", "interpret/numerics")]


def test_a_failure_that_the_run_does_not_have(author: Callable[..., str], log: Path) -> None:
    error = command("propose", author(BROKEN, TOY_KERNEL), "--failed", "trace/x").exception
    assert isinstance(error, TipsError) and "there are: trace/python" in str(error)


def test_an_authors_tips_are_proposed_and_a_bad_one_refused(author: Callable[..., str], log: Path) -> None:
    def said(journal: Journal) -> None:
        for number, lesson in enumerate(["Be brief\n# Rules", "Give gemm both operands"], 1):
            words = {"lesson": lesson, "failed": "trace/python", "fix": "gave both"}
            journal.once(f"tip/{number}.1", "tip", lambda words=words: words)  # type: ignore[misc]

    result = command("propose", author(BROKEN, TOY_KERNEL, more=said))
    assert result.exit_code == 1
    refusal = "refused a tip that the author proposed: lesson 'Be brief\\n# Rules' holds line breaks"
    assert refusal in result.output
    (found,) = read_tips(log)
    assert (found.lesson, found.fix) == ("Give gemm both operands", "gave both")
    assert "# Rules" not in log.read_text()


def test_a_possible_duplicate_is_named(author: Callable[..., str], log: Path) -> None:
    name = author(BROKEN, UNSCALED, TOY_KERNEL)
    said = done("propose", name, typed="Give gemm both operands\nGive a gemm both operands\n")
    assert "possible duplicate of tip-1 (proposed): Give gemm both operands" in said
    assert len(read_tips(log)) == 2


def test_nothing_to_learn(author: Callable[..., str], log: Path) -> None:
    before = log.read_text()
    assert "no failure that a later attempt fixed" in done("propose", author(TOY_KERNEL))
    assert log.read_text() == before


def test_list_accept_and_retire(author: Callable[..., str], log: Path) -> None:
    assert "no tips yet" in done()
    done("propose", author(BROKEN, UNSCALED, TOY_KERNEL), typed="Give gemm both operands\nScale rows\n")
    text = log.read_text()
    assert done("accept", "tip-2").startswith("tip-2 accepted, was proposed: Scale rows")
    assert log.read_text() == text[: text.index("tip-2: ")] + text[text.index("tip-2: ") :].replace(
        "state: proposed", "state: accepted"
    )
    listed = done()
    assert (
        "tip-1 proposed, undecided: Give gemm both operands\n    learned on toy at trace/python; -`" in listed
    )
    assert "tip-2 accepted, undecided: Scale rows" in listed
    rows: list[dict[str, Any]] = json.loads(done("--json"))["tips"]
    assert [(row["id"], row["state"], row["verdict"]) for row in rows] == [
        ("tip-1", "proposed", "undecided"),
        ("tip-2", "accepted", "undecided"),
    ]
    before = log.read_text()
    error = command("accept", "tip-1", "tip-9").exception
    assert isinstance(error, TipsError) and "there is no 'tip-9'; there are: tip-1, tip-2" in str(error)
    assert log.read_text() == before
