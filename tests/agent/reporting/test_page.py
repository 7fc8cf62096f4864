"""The page of a run: one well-formed file that agrees with the journal, whatever the run's author wrote."""

from __future__ import annotations

import difflib
import json
import re
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from authoring import (
    BROKEN,
    HEADER,
    TOY_KERNEL,
    UNSCALED,
    USAGE,
    accepted_run,
    checked,
    fenced,
    make_run,
    measured,
    program_of,
    write_toy,
)
from matplotlib.patches import Rectangle
from typer.testing import CliRunner

from coda_agent.agent.cli.main import app
from coda_agent.agent.providers import Turn, Usage
from coda_agent.agent.reporting import charts, html_report
from coda_agent.agent.reporting.charts import LONG, Mark, duration, number
from coda_agent.agent.reporting.pages import macro
from coda_agent.agent.reporting.render import not_run, rivals
from coda_agent.agent.run import runs
from coda_agent.agent.storage.journal import GPU_SECONDS, Journal, JournalError
from coda_agent.agent.terminal.safe_text import visible
from coda_agent.verifier.decision import KEPT
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import (
    GATES,
    PRIMITIVE_GATES,
    RAW_GATES,
    Checked,
    Gate,
    Identity,
    Measured,
    Rejected,
    Unmeasured,
)
from coda_agent.verifier.spec.model import Spec

HOSTILE = '</script></pre><script>alert(1)</script><img src="https://evil.example/x" onerror=alert(1)>'
ODD = "\x00\x1b[31mred\x1b[0m \u202egnp.exe \ud800 \r é λ 𝛾 & &amp; ]]> <!--"


@dataclass
class Node:
    """An HTML element and its children in order."""

    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    def every(self, tag: str = "", css: str = "") -> list[Node]:
        return [
            n
            for n in self.walk()
            if tag in ("", n.tag) and {*css.split()} <= {*(n.get("class") or "").split()}
        ]

    def get(self, name: str) -> str:
        return self.attributes.get(name) or ""

    def number(self, name: str) -> float:
        return float(self.get(name))

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()


class Tree(HTMLParser):
    """Parse HTML into a tree of elements; fail if an element is closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open = [Node("")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), "an attribute given twice"
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag != "meta":  # a void element is never closed
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError("nothing here writes comments")


ELEMENTS = """
html head meta title style body main header section h1 h2 h3 p ul li dl div dt dd strong span pre code
details summary table caption thead tbody tr th td svg defs clippath g path use rect text a
"""
ATTRIBUTES = """
lang charset http-equiv content name class id scope tabindex viewbox role aria-label x y x1 x2 y1 y2
width height href type xmlns xmlns:xlink xlink:href version d transform clip-path clip-rule style
"""


def parsed(text: str) -> Node:
    """Check that the page is well-formed, and that no element runs or fetches anything. Return the root of
    the page."""
    tree = Tree()
    tree.feed(text)
    tree.close()
    (root,) = tree.open
    assert text.startswith("<!doctype html>\n") and "�" not in text
    assert {n.tag for n in root.walk()} - {""} <= {*ELEMENTS.split()}
    assert {name for n in root.walk() for name in n.attributes} <= {*ATTRIBUTES.split()}
    style = root.every("style")[0]
    assert "url(" not in style.text and "@import" not in style.text
    assert all(re.fullmatch(r"(\.\./[\w.-]+/)?[\w.-]+\.html", a.get("href")) for a in root.every("a"))
    ids = [n.get("id") for n in root.walk() if n.get("id")]
    assert len(ids) == len(set(ids))
    assert all(svg.get("role") == "img" and svg.get("aria-label") for svg in root.every("svg"))
    return root


def shown(run: str, out: Path) -> Node:
    return parsed(html_report.write(run, out).read_text(encoding="utf-8"))


def cells(section: Node, caption: str) -> list[list[str]]:
    """Return the rows, headings first, of the last table whose caption begins with ``caption``."""
    *_, found = (t for t in section.every("table") if t.every("caption")[0].text.startswith(caption))
    return [[c.text for c in row.walk() if c.tag in ("th", "td")] for row in found.every("tr")]


def attempts(root: Node) -> list[Node]:
    return [n for n in root.every("section") if n.get("id").startswith("attempt-")]


@pytest.fixture
def toy(runs_home: Path, tmp_path: Path) -> Path:
    return write_toy(tmp_path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "page.html"


TRACE = Rejected(gate="trace", code="arguments", message="gemm takes 2 operands\n  not 1", line=7)
PASSED = Gate(gate="trace", seconds=0.25, figures={"milliseconds": 50.0, "layers": ["seccomp"], "nodes": 5})
WRONG = Rejected(
    gate="numerics", code="numerics", message="output 'c' is wrong", evidence={"rms": 7}, gates=(PASSED,)
)


def judged(report: Any, source: str, program: str | None = None) -> dict[str, Any]:
    return {"report": report.model_dump(mode="json"), "program": program, "source": source}


def worked(toy: Path) -> tuple[str, Spec, Measured]:
    """Make a run with three attempts, a draft, a void measurement and an unknown event. The last attempt is
    accepted. Return the run's name, its spec and the measurement."""
    run = runs.start(toy, HEADER | {"author": "Ada"})
    program = program_of(run.spec, TOY_KERNEL)
    found = measured(run.spec, program)
    void = Unmeasured(reason="the clock stood still")
    reports = {1: judged(TRACE, BROKEN), 2: judged(WRONG, UNSCALED)}
    reports[3] = judged(checked(run.spec, program), TOY_KERNEL, program.to_json())
    with run.journal as journal:
        journal.once("prompt", "prompt", lambda: {"system": "SYSTEM", "task": "TASK"})
        for n, source in enumerate((BROKEN, UNSCALED, TOY_KERNEL), 1):
            turn = Turn(f"Words of {n}.\n\n{fenced(source)}", USAGE, "Ada via handoff", "end_turn")
            journal.once(f"answer/{n}", "answer", turn.to_json)
            if n == 2:
                journal.once("draft/2.1", "draft", lambda: judged(TRACE, "a draft's source"))
            journal.once(f"report/{n}", "report", lambda n=n: reports[n])  # type: ignore[misc]
        journal.once("rumour/1", "rumour", lambda: {"anything": ["at", "all"]})
        journal.once("piece/3.0/tune", "piece", dict)
        journal.once("void/3/0", "void", lambda: void.model_dump(mode="json"))
        journal.once("measurement/3", "measurement", lambda: found.model_dump(mode="json"))
    return run.name, run.spec, found


def test_the_head_says_how_the_run_stands(toy: Path, out: Path) -> None:
    name, _, _ = worked(toy)
    (head,) = shown(name, out).every("header")
    said = {d.every("dt")[0].text: d.every("dd")[0].text.strip() for d in head.every("dl")[0].every("div")}
    assert head.every("h1")[0].text == name
    assert (said["spec"], said["status"], said["provider"]) == ("toy", "accepted", "handoff")
    assert (said["author"], said["attempts"]) == ("Ada via handoff", "3 of at most 6")
    assert said["tokens"] == "300 in, 3,000 read from the cache, 3 written to it, 30 out"
    assert said["spent"] == "3,333 tokens" and said["budget"] == "none"
    again = shown(make_run(toy, improve=2), out).every("header")[0].text
    assert "1 of at most 6 and 2 to improve it" in again
    assert HEADER["directory"] not in out.read_text(encoding="utf-8")  # this path is private


def test_every_attempt_is_there_with_its_words_and_gates(toy: Path, out: Path) -> None:
    name, _, found = worked(toy)
    first, second, third = attempts(shown(name, out))
    titles = [a.every("h2")[0].text for a in (first, second, third)]
    assert titles == ["Attempt 1: rejected", "Attempt 2: rejected", "Attempt 3: accepted"]
    (words,) = first.every("p", "rejected")
    assert words.text == f"line 7: {BROKEN.splitlines()[6].strip()}\n{TRACE.message}"
    assert cells(second, "In the order")[1:] == [
        ["trace", "passed", "0.25", "5 nodes; jailed 50 ms: seccomp"],
        ["numerics", "rejected", "", "numerics"],
    ]
    assert '"rms": 7' in second.text and "rms" not in first.text
    gates = cells(third, "In the order")[1:]
    assert [row[0] for row in gates] == [*GATES] and {row[1] for row in gates} == {"passed"}
    low = found.timings[0].ratios["torch.compile"].low
    assert f"large {low:.2f}" in gates[-1][3] and "must exceed 1.1" in gates[-1][3]
    for n, attempt in enumerate((first, second, third), 1):
        (said,) = (d for d in attempt.every("details") if d.text.startswith("The answer's words"))
        assert f"Words of {n}." in said.text and "@kernel" not in said.text
        assert "Tokens: 100 in, 1,000 read" in attempt.text


@pytest.mark.parametrize(
    ("raw", "first", "left"),
    [(False, "trace", GATES[1:]), (True, "edit", RAW_GATES[1:]), (True, "form", PRIMITIVE_GATES[1:])],
)
def test_the_gates_left_are_those_of_a_kernel_an_edit_or_a_primitive(
    raw: bool, first: str, left: tuple[str, ...]
) -> None:
    hashes: dict[str, Any] = dict.fromkeys(("spec_hash", "program_hash", "lowered_hash"), "0")
    own = Identity(spec="c", versions={}, raw=raw, **hashes)
    assert not_run(Checked(identity=own, gates=(Gate(gate=first, seconds=1.0),), unmeasured="")) == [*left]


def test_rounds_say_what_each_cost_and_brought(toy: Path, out: Path) -> None:
    name, spec, found = worked(toy)
    faster = found.timings[0].ratios["torch.compile"]  # any ratio will do
    rows = tuple(t.model_copy(update={"ratios": t.ratios | {KEPT: faster}}) for t in found.timings)
    change = found.model_copy(update={"timings": rows})
    program = program_of(spec, TOY_KERNEL)
    run = runs.reopen(name)
    with run.journal as journal:
        turn = Turn(fenced(TOY_KERNEL), Usage(), "Ada via handoff", "end_turn")
        journal.once("answer/4", "answer", lambda: turn.to_json() | {"dollars": 0.25})
        report = judged(checked(spec, program), TOY_KERNEL, program.to_json())
        journal.once("report/4", "report", lambda: report)
        took = {GPU_SECONDS: 40.0}
        journal.once("measurement/4", "measurement", lambda: change.model_dump(mode="json") | took)
    root = shown(name, out)
    assert cells(root, "Cost and outcome")[1:] == [
        ["1", "first", "rejected trace/arguments", "1,111", "–", "–", "0", ""],
        ["2", "repair", "rejected numerics/numerics", "1,111", "–", "–", "1", ""],
        ["3", "repair", "accepted", "1,111", "–", "–", "0", ""],
        ["4", "improvement", "accepted", "not counted", "0.25", "40", "0",
         "large 1.300 [1.250, 1.352], wide 1.300 [1.250, 1.352]"],
    ]  # fmt: skip
    assert "Rounds" not in shown(make_run(toy), out).text


def test_a_run_that_ended_before_its_time_says_why(toy: Path, out: Path) -> None:
    name = make_run(toy)
    with runs.reopen(name).journal as journal:
        journal.once("stopped/1", "stopped", lambda: {"reason": "9 of 9 tokens are used up"})
    assert "9 of 9 tokens are used up" in shown(name, out).every("header")[0].text


def test_figures_that_this_version_has_no_words_for_are_shown_as_they_are(toy: Path, out: Path) -> None:
    gates = (
        Gate(gate="astrology", seconds=1.0, figures={"sign": "Leo"}, findings=("[red]a finding",)),
        Gate(gate="contract", seconds=1.0, figures={"other": 1}),
    )
    strange = Rejected(gate="numerics", code="numerics", message="no", line=-99, gates=gates)
    (attempt,) = attempts(shown(make_run(toy, found=strange), out))
    rows = cells(attempt, "In the order")[5:7]  # skip the headings and the check's four gates
    assert rows[0] == ["astrology", "passed", "1.00", '{"sign": "Leo"}\n[red]a finding']
    assert rows[1] == ["contract", "passed", "1.00", '{"other": 1}']
    assert attempt.every("p", "rejected")[0].text == "line -99: \nno"


def test_sources_are_diffs_after_the_first(toy: Path, out: Path) -> None:
    name, _, _ = worked(toy)
    first, *later = attempts(shown(name, out))
    assert first.every("pre")[0].text == BROKEN
    for before, after, attempt in zip((BROKEN, UNSCALED), (UNSCALED, TOY_KERNEL), later, strict=True):
        old, new = before.splitlines(), after.splitlines()
        _, _, *lines = difflib.unified_diff(old, new, lineterm="")
        diff = next(pre for pre in attempt.every("pre") if pre.every("span"))
        assert diff.text.splitlines() == lines
        assert [s.text[:-1] for s in diff.every("span", "add")] == [x for x in lines if x.startswith("+")]
        assert [s.text[:-1] for s in diff.every("span", "del")] == [x for x in lines if x.startswith("-")]
        assert diff.every("span", "add") and diff.every("span", "del")
        assert after in [pre.text for pre in attempt.every("pre")]  # the whole source is there too, collapsed


def test_drafts_and_void_measurements_stand_with_their_attempt(toy: Path, out: Path) -> None:
    name, _, _ = worked(toy)
    first, second, third = attempts(shown(name, out))
    (draft,) = (
        d for d in second.every("details") if d.text.startswith("Draft 1: rejected at trace: arguments")
    )
    assert "a draft's source" in draft.text and TRACE.message in draft.text
    assert "Draft" not in first.text + third.text
    assert [p.text for p in third.every("p", "unmeasured")] == [
        "A measurement was void: the clock stood still"
    ]


def test_the_timeline_has_every_event_in_its_row(toy: Path, out: Path) -> None:
    name, _, _ = worked(toy)
    root = shown(name, out)
    said = [text.text for text in root.every("svg")[0].every("text")]
    assert {"run", "attempt 1", "attempt 2", "attempt 3"} <= {*said}
    assert {"prompt", "draft", "void", "other"} <= {*said} and "rumour" not in said
    assert "rumour" in [row[1] for row in cells(root, "Events")]
    assert "rumour" not in "".join(a.text for a in attempts(root))


def test_a_long_wait_hides_no_other_event() -> None:
    marks = [Mark("a", "answer", 60.0), Mark("b", "measurement", 30 * LONG)]
    (axes,) = charts._timeline(marks).axes
    short, long = (bar for bar in axes.patches if isinstance(bar, Rectangle))
    assert long.get_width() == LONG and short.get_width() == 60 and long.get_x() == 60
    assert [round(bar.get_y() + bar.get_height() / 2) for bar in (short, long)] == [0, 1]  # one row each
    assert (long.get_alpha(), short.get_alpha()) == (0.35, 1)
    assert "… 5 h 0 min …" in [text.get_text() for text in axes.texts]  # the text states the whole time


def test_bars_have_the_lengths_of_times() -> None:
    times = {"candidate": 0.5, "torch.compile": 0.75, "a $very$ long name of an arm, cut": 1.0}
    (axes,) = charts._bars(times, 0.25).axes
    assert [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)] == [*times.values()]
    assert list(np.asarray(axes.lines[0].get_xdata())) == [0.25, 0.25]
    assert axes.get_xlim() == (0, 1.0)
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["candidate", "torch.compile", r"a \$very\$ long name of an arm,…"]


def test_charts_and_tables_hold_the_measured_figures(toy: Path, out: Path) -> None:
    name, _, found = worked(toy)
    accepted = attempts(shown(name, out))[2]
    drawn = accepted.every("svg")
    assert len(drawn) == len(found.timings) == 2
    for t, chart in zip(found.timings, drawn, strict=True):
        assert f"Case {t.case}:" in chart.get("aria-label")
        told = [text.text for text in chart.every("text")]
        assert {*t.milliseconds} | {f"{number(ms)} ms" for ms in t.milliseconds.values()} <= {*told}
        assert f"roofline: {number(t.roofline_milliseconds)} ms" in told
    heading, *rows = cells(accepted, "Ratios")
    assert heading == ["case", *found.timings[0].ratios]
    for t, row in zip(found.timings, rows, strict=True):
        ratios = [f"{r.estimate:.3f} [{r.low:.3f}, {r.high:.3f}]" for r in t.ratios.values()]
        assert row == [t.case, *ratios]
    said = [p.text for p in accepted.every("p")]
    assert [line for line in rivals(found.timings) if line in said] == rivals(found.timings) != []


def test_conditions_versions_and_controls_are_shown(toy: Path, out: Path) -> None:
    spec = load(toy, check=False)
    during = {"score/0/large": {"sm_mhz": [1470, 1545.0], "throttle": ["software power cap"]}}
    same = {"estimate": 1.001, "low": 0.9973, "high": 1.0028, "confidence": 0.95}
    found = measured(spec, program_of(spec, TOY_KERNEL)).model_copy(
        update={
            "conditions": {"gpu": "H100", "torch": "2.11.0+cu130", "during": during},
            "controls": ({"case": "large", "same": same, "faults": ["late"]},),
        }
    )
    (attempt,) = attempts(shown(make_run(toy, found=found), out))
    pairs = [pair for dl in attempt.every("dl") for pair in dl.every("div")]
    said = [(pair.every("dt")[0].text, pair.every("dd")[0].text) for pair in pairs]
    told = {"measured": found.date, "gpu": "H100", "torch": "2.11.0+cu130"}
    assert said == [*told.items(), *found.identity.versions.items()]
    assert cells(attempt, "during")[1] == ["score/0/large", "1470, 1545", "software power cap"]
    assert cells(attempt, "Controls")[1] == ["1", "large", "1.001 [0.997, 1.003]", "late"]


def test_a_kernel_that_was_measured_as_slow_has_its_charts(toy: Path, out: Path) -> None:
    spec = load(toy, check=False)
    rows = measured(spec, program_of(spec, TOY_KERNEL), 0.9).timings
    evidence = {"timings": [t.model_dump(mode="json", exclude={"samples"}) for t in rows]}
    slow = Rejected(gate="decision", code="slow", message="too slow", evidence=evidence)
    root = shown(make_run(toy, found=slow), out)
    (attempt,) = attempts(root)
    assert attempt.every("h2")[0].text == "Attempt 1: rejected"
    assert len(attempt.every("svg")) == len(rows)
    assert cells(attempt, "Ratios")[1][1].startswith(f"{rows[0].ratios['torch.compile'].estimate:.3f} [")
    assert "Evidence" not in attempt.text  # such a section would repeat these figures


@pytest.mark.parametrize("words", [HOSTILE, ODD, "'\" onload=x ><b>", "{{7*7}} ${x} %s"])
def test_what_others_wrote_is_text_wherever_it_stands(toy: Path, out: Path, words: str) -> None:
    run = runs.start(toy, HEADER | {"author": words, "replays": words})
    answer = Turn(f"{words}\n```python\n{words}\n```\n{words}", USAGE, words, "end_turn")
    bad = Rejected(gate=words, code=words, message=words, line=1, evidence={words: [words]})
    with run.journal as journal:
        journal.once("prompt", "prompt", lambda: {"system": words, "task": words})
        for n in (1, 2):
            journal.once(f"draft/{n}", "draft", lambda: judged(bad, words))
            journal.once(f"answer/{n}", "answer", answer.to_json)
            journal.once(f"report/{n}", "report", lambda n=n: judged(bad, f"{n}\n{words}"))  # type: ignore[misc]
        journal.once(f"{visible(words)}/1", visible(words), dict)  # a key in SQLite cannot hold a surrogate
    root = shown(run.name, out)
    told = visible(words)
    first, second = attempts(root)
    assert f"1\n{told}" in [pre.text for pre in first.every("pre")]
    assert f" {told}\n" in next(pre for pre in second.every("pre") if pre.every("span")).text
    for attempt in (first, second):
        assert attempt.every("p", "rejected")[-1].text.endswith(f"\n{told}")
        assert f"[the source]\n\n{told}".strip() in attempt.text
    assert told in root.every("header")[0].text and told in root.every("table")[0].text


def test_without_matplotlib_a_page_has_its_tables(
    toy: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, _ = worked(toy)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    root = shown(name, out)
    assert not root.every("svg") and "pip install 'coda-agent[draw]'" in root.text
    assert cells(root, "Events") and cells(attempts(root)[2], "Ratios")


def test_a_spec_is_shown_and_a_changed_one_is_called_so(toy: Path, runs_home: Path, out: Path) -> None:
    name = accepted_run(toy)
    yaml = runs_home / name / "spec.yaml"
    said = shown(name, out).every("section")[-1]
    assert said.every("pre")[0].text == yaml.read_text(encoding="utf-8") and "Edited" not in said.text
    for text in (yaml.read_text(encoding="utf-8").replace("speedup: 1.1", "speedup: 1.0"), f"[{HOSTILE}"):
        yaml.write_text(text, encoding="utf-8")
        said = shown(name, out).every("section")[-1]
        assert said.every("pre")[0].text == text and "Edited since the run started" in said.text
    yaml.unlink()
    assert "Edited since" in shown(name, out).every("section")[-1].text


def test_a_run_that_is_under_way_is_shown_as_it_stands(toy: Path, out: Path) -> None:
    run = runs.start(toy, HEADER)
    try:  # ``run`` keeps the journal open and locked
        root = shown(run.name, out)
        assert "authoring" in root.every("header")[0].text and "No event yet." in root.text
        assert not attempts(root)
        run.journal.once("prompt", "prompt", lambda: {"system": "SYSTEM", "task": "TASK"})
        run.journal.once("draft/1.1", "draft", lambda: judged(TRACE, BROKEN))
        (attempt,) = attempts(shown(run.name, out))
        assert attempt.every("h2")[0].text == "Attempt 1: not judged yet" and "No source yet." in attempt.text
        turn = Turn(fenced(TOY_KERNEL), USAGE, "Ada via handoff", "end_turn")
        run.journal.once("answer/1", "answer", turn.to_json)
        (attempt,) = attempts(shown(run.name, out))
        assert attempt.every("h2")[0].text == "Attempt 1: not judged yet"
        assert TOY_KERNEL in [pre.text for pre in attempt.every("pre")]
    finally:
        run.journal.close()


def test_an_attempt_may_take_several_turns(toy: Path, out: Path) -> None:
    """A turn that only uses tools has an answer but no report. So turns 2 and 4 of this run are its attempts
    1 and 2, and the keys of their reports contain 2 and 4."""
    run = runs.start(toy, HEADER)
    program = program_of(run.spec, TOY_KERNEL)
    found = measured(run.spec, program)
    with run.journal as journal:
        for n in (1, 2, 3, 4):
            turn = Turn(f"Turn {n}.", USAGE, "Ada via a script", "end_turn")
            journal.once(f"answer/{n}", "answer", turn.to_json)
            if n == 2:
                journal.once("report/2", "report", lambda: judged(WRONG, UNSCALED))
        good = judged(checked(run.spec, program), TOY_KERNEL, program.to_json())
        journal.once("report/4", "report", lambda: good)
        journal.once("measurement/4", "measurement", lambda: found.model_dump(mode="json"))
    first, second = attempts(shown(run.name, out))
    assert [a.every("h2")[0].text for a in (first, second)] == ["Attempt 1: rejected", "Attempt 2: accepted"]
    assert "Turn 1." in first.text and "Turn 2." in first.text and "Turn 3." not in first.text
    assert "Tokens: 200 in" in second.text and len(second.every("svg")) == 2


def test_the_command_writes_a_file_and_says_where(
    toy: Path, runs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = accepted_run(toy)
    monkeypatch.chdir(tmp_path)
    before = (runs_home / name / "journal.db").read_bytes()
    done = CliRunner().invoke(app, ["report", name])
    written = runs_home / name / f"{name}.html"
    assert (done.exit_code, done.output) == (0, f"{written}\n")
    assert not list(tmp_path.glob("*.html"))
    done = CliRunner().invoke(app, ["report", str(runs_home / name), "--out", "deep/er.html"])
    assert (done.exit_code, done.output) == (0, "deep/er.html\n")
    pages = [(tmp_path / path).read_text(encoding="utf-8") for path in (written, "deep/er.html")]
    assert pages[0] == pages[1] and name in parsed(pages[0]).every("title")[0].text
    assert (runs_home / name / "journal.db").read_bytes() == before
    with Journal.open(runs_home / name / "journal.db") as journal:  # the command has released the journal
        assert len(journal.events()) == 4


def test_what_cannot_be_shown_is_an_error_and_writes_nothing(toy: Path, runs_home: Path, out: Path) -> None:
    with pytest.raises(JournalError, match="there is no run 'nowhere'"):
        html_report.write("nowhere", out)
    for payload in ({"report": {"status": "new"}, "source": ""}, {"source": ""}, {"report": 7, "source": ""}):
        name = make_run(toy)
        with sqlite3.connect(runs_home / name / "journal.db") as db:
            db.execute("UPDATE events SET payload = ? WHERE key = 'report/1'", (json.dumps(payload),))
        with pytest.raises(JournalError, match="another version of coda-agent"):
            html_report.write(name, out)
    assert not out.exists()


def test_markup_escapes_all_but_itself() -> None:
    assert macro("span", "<b>&", '"x"') == '<span class="&#34;x&#34;">&lt;b&gt;&amp;</span>'
    assert macro("link", macro("span", ODD, ""), "\x00") == f'<a href="\\u0000">{macro("span", ODD, "")}</a>'
    assert visible(ODD).replace("&", "&amp;").replace(">", "&gt;").replace("<", "&lt;") in macro("code", ODD)
    assert visible(ODD).startswith("\\u0000red \\u202egnp.exe \\ud800 \\u000d é λ 𝛾 &")


def test_durations_are_in_words() -> None:
    said = [duration(s) for s in (0, 0.0213, 12.34, 59.99, 200, 3600 * 6 + 52 * 60)]
    assert said == ["0 s", "0.0213 s", "12.3 s", "60 s", "3 min 20 s", "6 h 52 min"]
