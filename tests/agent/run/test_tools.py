"""The tools of an author: their answers, the events that they record, and the loop's handling of their
use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from authoring import BROKEN, HEADER, TOY_KERNEL, UNSCALED, USAGE, Notes, Scripted, fenced, write_toy

from coda_agent.agent.providers import ToolCall, Turn
from coda_agent.agent.run import assembly, runs
from coda_agent.agent.run.loop import CALLS, Loop, Outcome, result_of
from coda_agent.agent.run.tools import LONGEST, TOOLS, results, submission
from coda_agent.verifier.report import Checked, Rejected

GOOD = fenced(TOY_KERNEL)


def using(*calls: tuple[str, dict[str, Any]], text: str = "") -> Turn:
    made = tuple(ToolCall(f"id{i}", name, given) for i, (name, given) in enumerate(calls))
    blocks = tuple({"type": "tool_use", "id": c.id, "name": c.name, "input": c.input} for c in made)
    return Turn(text, USAGE, "Ada via a script", "tool_use", made, blocks)


@pytest.fixture
def run(runs_home: Path, tmp_path: Path, no_compiler: None) -> runs.Run:
    return runs.start(write_toy(tmp_path), HEADER)


def author(run: runs.Run, *answers: Any, attempts: int = 6) -> tuple[Outcome, Scripted, Notes]:
    provider, notes = Scripted(answers), Notes()
    loop = Loop(run.journal, run.spec, assembly.task_of(run), provider, notes, attempts)
    return loop.run(), provider, notes


def said(provider: Scripted) -> str:
    """Return the text of the last message in the last request."""
    return provider.asked[-1][1][-1].text


def keys(run: runs.Run) -> list[str]:
    return [event.key for event in run.journal.events()]


def test_a_draft_is_checked_without_being_an_attempt(run: runs.Run) -> None:
    with run.journal:
        outcome, provider, notes = author(run, using(("check", {"source": UNSCALED})), GOOD)
        assert isinstance(outcome.report, Checked) and outcome.authorship.attempts == 1
        assert keys(run) == ["prompt", "answer/1", "draft/1.1", "answer/2", "report/1"]
        draft = run.journal.events()[2].payload
        assert draft["source"] == UNSCALED and draft["report"]["code"] == "numerics"
        assert result_of(run.journal, run.spec) == outcome
    assert "gate `interpret`, reason `numerics`" in said(provider) and "output 'c'" in said(provider)
    assert notes.tools == ["check"] and notes.attempts == [1]
    assert outcome.usage == USAGE + USAGE
    (result,) = provider.asked[-1][1][-1].blocks
    assert result == {"type": "tool_result", "tool_use_id": "id0", "content": said(provider)}


def test_a_draft_that_passes_says_its_resources(run: runs.Run) -> None:
    with run.journal:
        _, provider, _ = author(run, using(("check", {"source": TOY_KERNEL})), GOOD)
    assert said(provider).startswith("Passes every gate of this machine (168 registers, 0 spills)")


def test_submissions_are_attempts_and_are_answered_where_they_were_made(run: runs.Run) -> None:
    first = using(("submit", {"source": BROKEN}), ("read", {"page": "per_row"}))
    with run.journal:
        outcome, provider, _ = author(run, first, using(("submit", {"source": TOY_KERNEL})))
        assert isinstance(outcome.report, Checked) and outcome.authorship.attempts == 2
        assert outcome.source == TOY_KERNEL
        assert keys(run) == ["prompt", "answer/1", "report/1", "answer/2", "report/2"]
    submitted, read = provider.asked[-1][1][-1].blocks
    assert submitted["tool_use_id"] == "id0" and "Rejected at gate `trace`" in submitted["content"]
    assert read["tool_use_id"] == "id1" and read["content"].startswith("### per_row(")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("read", {"page": "gemm_l1norm_gemm"}), "gemm(h, w2.mT) * per_row(scale)"),
        (("read", {"page": "toy"}), "there is no page 'toy'"),
        (("read", {"page": "../../../etc/passwd"}), "there is no page"),
        (("read", {"page": "kernel"}), "there is no page 'kernel'"),
        (("read", {}), "read takes page, each a string"),
        (("read", {"page": 3}), "read takes page, each a string"),
        (("check", {"source": "x", "spec": "y"}), "check takes source"),
        (
            ("shell", {"command": "ls"}),
            "there is no tool 'shell'; there are check, submit, read, propose_tip",
        ),
        (("propose_tip", {"lesson": "a" * (LONGEST + 1), "failed": "b", "fix": "c"}), "2001 characters"),
        (("propose_tip", {"lesson": "a" * 201, "failed": "b", "fix": "c"}), "at most 200"),
        (("propose_tip", {"lesson": "# Say", "failed": "b", "fix": "c"}), "begin with the verb"),
    ],
)
def test_what_tools_say(run: runs.Run, call: tuple[str, dict[str, Any]], words: str) -> None:
    with run.journal:
        _, provider, _ = author(run, using(call), GOOD)
        assert keys(run) == ["prompt", "answer/1", "answer/2", "report/1"]
    assert words in said(provider)


def test_a_tip_is_kept_for_a_person(run: runs.Run) -> None:
    tip = {"lesson": "Spread a vector before it meets a tile.", "failed": "trace/kind", "fix": "per_row(v)"}
    with run.journal:
        author(run, using(("propose_tip", tip)), GOOD)
        (event,) = [e for e in run.journal.events() if e.kind == "tip"]
    assert event.key == "tip/1.1" and event.payload == tip


def test_an_author_that_never_answers_uses_its_attempts_up(run: runs.Run) -> None:
    looking = [using(("read", {"page": "gemm"}))] * 100
    with run.journal:
        outcome, provider, notes = author(run, *looking, attempts=2)
    assert isinstance(outcome.report, Rejected) and outcome.report.code == "no_source"
    assert len(provider.asked) == 2 * (CALLS + 1) and notes.attempts == [1, 2]


@pytest.mark.parametrize("source", [None, 3, {"a": 1}])
def test_a_submission_of_nothing_is_an_attempt_without_source(run: runs.Run, source: object) -> None:
    with run.journal:
        outcome, _, _ = author(run, using(("submit", {"source": source}), text=GOOD), attempts=1)
    assert isinstance(outcome.report, Rejected) and outcome.report.code == "no_source"


def test_a_submission_counts_before_a_block_and_the_last_one_counts() -> None:
    two = using(("submit", {"source": "a"}), ("submit", {"source": "b"}))
    assert submission(two) == "b" and submission(using(("check", {"source": "a"}))) is None
    assert results(Turn("t", USAGE, "a", "end_turn"), {}, "words").blocks == ()
    assert {t.name for t in TOOLS} == {"check", "submit", "read", "propose_tip"}


def test_a_resumed_run_uses_no_tool_again(
    run: runs.Run, monkeypatch: pytest.MonkeyPatch, runs_home: Path
) -> None:
    with run.journal:
        author(run, using(("check", {"source": UNSCALED})), GOOD)

    def never(*_: object, **__: object) -> Callable[[], object]:
        raise AssertionError("checked again")

    monkeypatch.setattr("coda_agent.verifier.verify.check", never)
    again = runs.reopen(run.name)
    with again.journal:
        outcome, provider, notes = author(again)
    assert isinstance(outcome.report, Checked) and not provider.asked and notes.tools == ["check"]
