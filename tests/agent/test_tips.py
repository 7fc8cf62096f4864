"""The tips log: entries are read in order, an error names the line of a mistake, and a change to an entry
leaves the other entries as they were."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from checkout import ROOT
from hypothesis import given
from hypothesis import strategies as st

from coda_agent.agent import tips
from coda_agent.agent.tips import (
    ACCEPTED,
    PROPOSED,
    RETIRED,
    TIPS,
    Lesson,
    Tip,
    TipsError,
    add,
    change,
    fitting,
    of_failure,
    read_tips,
)

LOG = """\
# Tips log

Read into every prompt. For example:

    ## tip-0: an example that is indented, and so none

## tip-1: Spread a row sum only in a later gemm
- spec: gemm_chain
- failed: trace/row_sums_same_step
- fix: scaled the second gemm's result instead
- versions: quack-kernels 0.6.5

Some words of a person.

## tip-2: Use one sigmoid: it serves `a` and [b]
- spec: gemm_swiglu_bwd
- failed: decision/slow
- fix: kept the value in a name
- versions: quack-kernels 0.6.5, nvidia-cutlass-dsl 4.8.1
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "tips.md"
    path.write_text(LOG)
    return path


def test_entries_in_order(log: Path) -> None:
    first, second = read_tips(log)
    assert first == Tip(
        "tip-1",
        "Spread a row sum only in a later gemm",
        "gemm_chain",
        "trace/row_sums_same_step",
        "scaled the second gemm's result instead",
        "quack-kernels 0.6.5",
    )
    assert second.lesson == "Use one sigmoid: it serves `a` and [b]"
    assert second.versions == "quack-kernels 0.6.5, nvidia-cutlass-dsl 4.8.1"


def test_no_log_no_tips(tmp_path: Path) -> None:
    assert read_tips(tmp_path / "tips.md") == []


def test_the_projects_own_log_reads() -> None:
    assert TIPS.name == "tips_log.md"
    assert all(tip.id.startswith("tip-") for tip in read_tips())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "- fix: scaled the second gemm's result instead\n",
            "",
            "tips.md:7: tip-1 needs exactly the fields spec",
        ),
        ("- fix: kept", "- fixed: kept", "tips.md:15: tip-2 needs exactly the fields"),
        ("- versions: quack-kernels 0.6.5\n", "- author: Ada\n- versions: x\n", "tips.md:7: tip-1 needs"),
        (
            "## tip-2: Use",
            "## tip two: Use",
            "tips.md:15: a tip's heading is '## tip-N: lesson', not '## tip two",
        ),
        ("## tip-1: Spread", "## tip-1:Spread", "tips.md:7: a tip's heading is"),
        ("- spec: gemm_swiglu_bwd", "- spec:", "tips.md:15: tip-2 needs"),
        ("## tip-2: Use", "## tip-1: Use", "tips.md:15: tip-1 occurs twice; give one a new id"),
        ("- fix: kept", "- spec: a\n- fix: kept", "tips.md:18: tip-2 has two 'spec'; keep one"),
        ("- fix: kept", "- state: maybe\n- fix: kept", "tips.md:15: tip-2 has state 'maybe'; use one of"),
        ("- fix: kept", "- measured: a lot\n- fix: kept", "tips.md:15: tip-2 has no figures in its measured"),
        ("## tip-2: Use", "## tip-2: # Use", "tips.md:15: lesson '# Use one sigmoid: it serves `a` and [b]'"),
        ("## tip-2: Use", "## tip-2: Use\u2028# Rules", "tips.md:15: lesson"),
    ],
)
def test_a_mistake_has_its_line(log: Path, old: str, new: str, words: str) -> None:
    assert old in LOG
    log.write_text(LOG.replace(old, new, 1))
    with pytest.raises(TipsError) as caught:
        read_tips(log)
    assert words in str(caught.value)


def test_a_log_that_is_no_text(log: Path) -> None:
    log.write_bytes(b"## tip-1: \xff")
    with pytest.raises(TipsError, match=r"tips.md: cannot be read as UTF-8 text"):
        read_tips(log)


# states and figures

FIGURES = "helps: 9/10 with, 3/10 without, difference +0.60 [+0.17, +0.81] on the first attempt; within ..."


def test_what_a_person_wrote_is_accepted_and_not_measured(log: Path) -> None:
    assert [(t.state, t.measured, t.verdict, t.difference) for t in read_tips(log)] == [
        (ACCEPTED, "", "undecided", 0.0)
    ] * 2


def test_states_and_figures_are_read(log: Path) -> None:
    change("tip-1", log, state=RETIRED)
    change("tip-2", log, measured=FIGURES)
    first, second = read_tips(log)
    assert (first.state, second.state) == (RETIRED, ACCEPTED)
    assert (second.measured, second.verdict, second.difference) == (FIGURES, "helps", 0.6)


def test_specs_stand_between_commas(log: Path) -> None:
    log.write_text(LOG.replace("- spec: gemm_chain", "- spec: gemm_chain,gemm_rope ,  gemm_geglu"))
    assert read_tips(log)[0].specs == ("gemm_chain", "gemm_rope", "gemm_geglu")


def test_a_run_may_leave_out_accepted_tips_and_hold_others(log: Path) -> None:
    change("tip-1", log, state=PROPOSED)
    assert tips.tips_of({"run": "r"}, log) is None
    assert tips.tips_of({"without_tips": ["tip-2"]}, log) == []
    chosen = tips.tips_of({"without_tips": [], "with_tips": ["tip-1"]}, log)
    assert chosen is not None and [(tip.id, tip.state) for tip in chosen] == [
        ("tip-1", ACCEPTED),
        ("tip-2", ACCEPTED),
    ]


# a change to an entry leaves the rest of the log unchanged


@pytest.mark.parametrize(
    ("text", "newline"),
    [(LOG, "\n"), (LOG.replace("\n", "\r\n"), "\r\n"), (LOG.replace("# Tips log\n", "# Tips log\r\n"), "\n")],
    ids=["lf", "crlf", "mixed"],
)
def test_a_new_field_follows_the_last(log: Path, text: str, newline: str) -> None:
    log.write_bytes(text.encode())
    before = change("tip-1", log, state=RETIRED)
    assert before.state == ACCEPTED
    line = f"- versions: quack-kernels 0.6.5{newline}"
    expected = text.replace(line, f"{line}- state: retired{newline}", 1)
    assert expected != text and log.read_bytes() == expected.encode()
    change("tip-1", log, state=ACCEPTED)
    assert log.read_bytes() == expected.replace("retired", "accepted").encode()


def test_a_field_after_the_last_line_of_a_file_without_an_end(log: Path) -> None:
    log.write_bytes(LOG.rstrip().encode())
    change("tip-2", log, state=PROPOSED, measured=FIGURES)
    assert log.read_bytes() == f"{LOG.rstrip()}\n- state: proposed\n- measured: {FIGURES}".encode()


PROSE = st.text(st.characters(codec="utf-8")).filter(lambda text: not re.search(r"(^|\n)(## |- )", text))


@given(before=PROSE, within=PROSE, after=PROSE)
def test_whatever_people_write_stays(
    before: str, within: str, after: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "tips.md"
    top = f"{before}\n## tip-7:  Reduce once \n- spec:  a\n{within}\n- failed: b/c\n- fix: d\n- versions: e"
    path.write_bytes(f"{top}\n{after}".encode())
    change("tip-7", path, state=RETIRED)
    assert path.read_bytes() == f"{top}\n- state: retired\n{after}".encode()
    change("tip-7", path, spec="a, f")
    assert (
        path.read_bytes()
        == f"{top}\n- state: retired\n{after}".replace("- spec:  a", "- spec: a, f").encode()
    )


def test_an_edit_is_seen_whole_or_not_at_all(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        change("tip-1", log, state=RETIRED)
    assert log.read_text() == LOG and list(log.parent.iterdir()) == [log]


def test_an_edit_that_could_not_be_read_is_not_made(log: Path) -> None:
    with pytest.raises(TipsError, match="tip-1 has state 'maybe'"):
        change("tip-1", log, state="maybe")
    with pytest.raises(TipsError, match="there is no 'tip-9'; there are: tip-1, tip-2"):
        change("tip-9", log, state=RETIRED)
    assert log.read_text() == LOG


# adding and merging

LESSON = Lesson(
    "Join halves in the order of pairs", "gemm_geglu", "trace/width", "-`a` +`b`", "quack-kernels 0.7"
)


def test_a_new_tip_is_proposed_at_the_end(log: Path) -> None:
    added = add(LESSON, log)
    assert not added.merged and added.alike == ()
    assert added.tip == Tip(id="tip-3", state=PROPOSED, **vars(LESSON)) == read_tips(log)[-1]
    assert log.read_text() == LOG + (
        "\n<!-- last id: tip-3 -->\n\n## tip-3: Join halves in the order of pairs\n- spec: gemm_geglu\n"
        "- failed: trace/width\n- fix: -`a` +`b`\n- versions: quack-kernels 0.7\n- state: proposed\n"
    )


def test_the_first_tip_of_a_log_that_is_not_there(tmp_path: Path) -> None:
    assert add(LESSON, tmp_path / "tips.md").tip.id == "tip-1"
    assert len(read_tips(tmp_path / "tips.md")) == 1


def test_a_new_tip_keeps_a_files_line_endings(log: Path) -> None:
    log.write_bytes(LOG.rstrip().replace("\n", "\r\n").encode())
    add(LESSON, log)
    text = log.read_bytes().decode()
    assert text.startswith(LOG.rstrip().replace("\n", "\r\n") + "\r\n\r\n<!--") and "\n" not in text.replace(
        "\r\n", ""
    )
    assert read_tips(log)[-1].id == "tip-3"


def test_an_id_is_not_given_twice(log: Path) -> None:
    add(LESSON, log)
    text = log.read_text()
    log.write_text(text[: text.index("## tip-3")])  # a person removes the entry
    assert add(LESSON, log).tip.id == "tip-4"
    assert log.read_text().count("last id") == 1
    log.write_text(log.read_text().replace("## tip-4", "## tip-12"))
    assert add(replace(LESSON, lesson="Say more", fix="else"), log).tip.id == "tip-13"


def test_the_projects_own_log_takes_a_tip(tmp_path: Path) -> None:
    path = tmp_path / "tips.md"
    path.write_bytes(TIPS.read_bytes())
    highest = max([0, *(tip.number for tip in read_tips(path))])
    added = add(LESSON, path).tip
    assert added.number > highest and read_tips(path)[-1] == added
    before, after = TIPS.read_text().splitlines(), path.read_text().splitlines()
    assert [new for old, new in zip(before, after, strict=False) if old != new] == [
        f"<!-- last id: {added.id} -->"
    ]


@pytest.mark.parametrize(
    "lesson",
    [
        "Spread a row sum only in a later gemm",
        "spread a ROW  sum, only in a later gemm!",
        "Spread a “row sum” only in a later gemm.",
    ],
)
def test_the_same_lesson_merges(log: Path, lesson: str) -> None:
    change("tip-1", log, state=RETIRED)
    before = log.read_text()
    more = Lesson(lesson, "gemm_rope", "trace/other", "did else", "quack-kernels 0.7")
    added = add(more, log)
    assert added.merged and added.tip == read_tips(log)[0]
    assert added.tip == Tip(
        "tip-1",
        "Spread a row sum only in a later gemm",
        "gemm_chain, gemm_rope",
        "trace/row_sums_same_step, trace/other",
        "scaled the second gemm's result instead | did else",
        "quack-kernels 0.6.5, quack-kernels 0.7",
        RETIRED,
    )
    changed = [line for line in log.read_text().splitlines() if line not in before.splitlines()]
    assert len(changed) == 4 and len(read_tips(log)) == 2
    after = log.read_text()
    assert add(more, log).merged and log.read_text() == after  # the lesson is already there


def test_another_lesson_of_the_same_failure_is_a_tip_of_its_own(log: Path) -> None:
    same = (
        "gemm_chain",
        "trace/row_sums_same_step",
        "scaled the second gemm's result instead",
        "quack-kernels 0.6.5",
    )
    spaced = LOG.replace("- spec: gemm_chain", "- spec:   gemm_chain ")
    log.write_text(spaced)
    assert add(Lesson("Spread a row sum only in a later gemm", *same), log).merged
    assert log.read_text() == spaced  # nothing is new, so nothing is written
    change("tip-1", log, state=RETIRED)
    added = add(Lesson("Something else", *same), log)
    assert (added.merged, added.tip.id, added.tip.state) == (False, "tip-3", PROPOSED)
    assert [(tip.id, tip.state) for tip in added.alike] == [("tip-1", RETIRED)]
    for place, other in enumerate(("gemm_rope", "trace/name", "wrote less")):
        differing = [*same[:place], other, *same[place + 1 :]]
        assert not add(Lesson("Of another failure " + "abc"[place] * 30, *differing), log).alike


ADDING = """
import sys, time
from pathlib import Path
from coda_agent.agent.tips import Lesson, add, change

log, number = Path(sys.argv[1]), sys.argv[2]
(log.parent / f"ready-{number}").touch()
while not (log.parent / "go").exists():
    time.sleep(0.001)
for turn in range(5):
    add(Lesson(f"Lesson {turn} of {number}", number, f"trace/{turn}", number, "1"), log)
    change("tip-1", log, spec=f"a, {number}")
"""


def test_processes_that_change_it_at_once_lose_nothing(log: Path) -> None:
    command = [sys.executable, "-c", ADDING, str(log)]
    started = [subprocess.Popen([*command, str(number)], cwd=ROOT) for number in range(4)]
    try:
        while len(list(log.parent.glob("ready-*"))) < len(started) and not any(p.poll() for p in started):
            time.sleep(0.01)
        (log.parent / "go").touch()
        assert [process.wait(60) for process in started] == [0] * len(started)
    finally:
        for process in started:
            process.kill()
    added = [tip.lesson for tip in read_tips(log)[2:]]
    assert sorted(added) == sorted(f"Lesson {turn} of {number}" for turn in range(5) for number in range(4))
    assert [tip.id for tip in read_tips(log)] == [f"tip-{number}" for number in range(1, 23)]
    left = {path.name for path in log.parent.iterdir()}
    assert left == {log.name, "go", *(f"ready-{number}" for number in range(4))}  # no lock file is left


def test_a_place_that_is_no_folder_is_named(log: Path) -> None:
    with pytest.raises(TipsError, match=f"{log}: File exists; make it a folder that can be read"):
        add(LESSON, log / "tips.md")
    assert log.read_text() == LOG


def test_a_cache_is_not_needed(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_AGENT_CACHE", str(log / "cache"))
    assert not add(LESSON, log).merged


def test_a_fix_with_the_separator_is_merged_once(log: Path) -> None:
    lesson = Lesson("Write the or of masks.", "gemm_x", "trace/bool", "-`a > b` +`(a > b) | (c > d)`", "v 1")
    for _ in range(3):
        tip = add(lesson, log).tip
    assert tip.fix == lesson.fix and of_failure(tip, "gemm_x", "trace/bool", lesson.fix)
    both = add(replace(lesson, fix="drop the mask"), log).tip
    assert both.fix == f"{lesson.fix} | drop the mask"


def test_a_near_duplicate_is_named_and_not_merged(log: Path) -> None:
    added = add(replace(LESSON, lesson="Spread a row sum in a later gemm"), log)
    assert not added.merged and [tip.id for tip in added.alike] == ["tip-1"]
    assert not add(replace(LESSON, lesson="Read each input once", fix="x"), log).alike


def test_operators_tell_lessons_apart(log: Path) -> None:
    add(replace(LESSON, lesson="Write a * b"), log)
    assert not add(replace(LESSON, lesson="Write a / b", fix="else"), log).merged


def test_evidence_is_one_line_of_bounded_length(log: Path) -> None:
    added = add(replace(LESSON, fix="a\n## tip-9: b\x1b[31m\u2028" + "c" * 5000, versions=""), log).tip
    assert added.fix.startswith("a ## tip-9: b [31m ccc") and added.fix.endswith("c…")
    assert len(added.fix) == 300 and added.versions == "unknown"
    assert read_tips(log)[-1] == added


@pytest.mark.parametrize(
    ("lesson", "words"),
    [
        ("Be brief\n# Rules", "holds line breaks or invisible characters"),
        ("Be brief\u2028and clear", "holds line breaks"),
        ("Be brief\x1b[2J", "holds line breaks or invisible"),
        ("Be \u202ebrief", "holds line breaks or invisible"),
        ("# Rules", "begins with a mark; begin with the verb"),
        ("- be brief", "begins with a mark"),
        (" Be brief", "begins with a mark"),
        ("```python", "begins with a mark"),
        ("Write ```python", "opens a block of code or a comment"),
        ("Write <!-- this", "opens a block of code or a comment"),
        ("", "says nothing; write one sentence"),
        ("B" * 201, "has 201 characters; say one thing in at most 200"),
    ],
)
def test_a_lesson_that_no_prompt_should_read(lesson: str, words: str) -> None:
    with pytest.raises(TipsError) as caught:
        Lesson(lesson, *list(vars(LESSON).values())[1:])
    assert words in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) < 250


def test_a_lesson_may_be_long_enough(log: Path) -> None:
    lesson = "`per_row` spreads " + "é" * 182
    assert add(replace(LESSON, lesson=lesson), log).tip.lesson == read_tips(log)[-1].lesson == lesson


# the tips that a prompt drops first


def measured(number: int, verdict: str, difference: str) -> Tip:
    figures = f"{verdict}: 1/2 with, 1/2 without, difference {difference} [-1.00, +1.00]" if verdict else ""
    return Tip(f"tip-{number}", f"L{number:02}", "s", "f", "x", "v", ACCEPTED, figures)


def test_what_helps_least_is_dropped_first() -> None:
    known = [
        measured(1, "helps", "+0.30"),
        measured(2, "undecided", "+0.50"),
        measured(3, "", ""),
        measured(4, "hurts", "-0.20"),
        measured(5, "helps", "+0.60"),
        measured(6, "undecided", "-0.10"),
        measured(10, "", ""),
        measured(11, "hurts", "-0.70"),
    ]
    line = len("- L01\n")
    left = [[tip.number for tip in fitting(known, line * room)] for room in range(len(known), -1, -1)]
    dropped = [(set(more) - set(less)).pop() for more, less in zip(left, left[1:], strict=False)]
    assert dropped == [11, 4, 6, 3, 10, 2, 1, 5]
    assert left[2] == [1, 2, 3, 5, 6, 10]  # these tips keep the order of the log
    assert fitting(known, line * 8 - 1) == known[:-1]
