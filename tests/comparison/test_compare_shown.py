"""Tests of how a comparison with made-up results is shown: figures that are computed by hand, reasons for
empty cells, and hostile text."""

from __future__ import annotations

import html
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

import comparison
from coda_agent.comparison.competitors import (
    APART,
    COLUMNS,
    COMPILE,
    FLASHINFER,
    HUMAN,
    LIGER,
    LLM,
    MATMUL,
    PROGRAM,
    REFERENCE_ARM,
    UPSTREAM,
)
from coda_agent.comparison.drawing import summary
from coda_agent.comparison.drawing.cells import TableRow, lines
from coda_agent.comparison.drawing.charts import draw
from coda_agent.comparison.drawing.html_page import page
from coda_agent.comparison.drawing.markdown import markdown, plain
from coda_agent.comparison.drawing.sheets import sheets
from coda_agent.comparison.drawing.summary import (
    CLAIMS,
    NOTHING,
    against,
    conditions_text,
    findings,
    ordered,
)
from coda_agent.comparison.results import ArmFailure, Loss, Present, Results
from coda_agent.verifier.baselines.pytorch import MAX_AUTOTUNE
from coda_agent.verifier.baselines.quack import OUR_SEARCH, OWN_TUNER
from coda_agent.verifier.statistics import product
from comparison import WIDE, arm, interval, line, printed, session

HOSTILE = (
    '| </td><script src="https://evil.example/x">alert(1)</script>\n'
    "# `x` *b* [l](https://evil.example) \x1b[31m \u202e $x$"
)
NEAR = 1e-9


def hand() -> Results:
    """Return the results of one row, measured in two processes. The LLM's kernel takes 2 ms, so ratios are
    easy to check."""
    arms = {
        PROGRAM: arm(
            2.0, losses={"y": Loss(relative=1e-3, yardsticks=1.25), "s": Loss(relative=1e-7, yardsticks=1.5)}
        ),
        COMPILE: arm(2.6),
        OUR_SEARCH: arm(1.9, bytes=5 << 20, note="weight transposed"),
        OWN_TUNER: arm(2.1),
    }
    failed = {LIGER: ArmFailure(key="1", reason="no kernel")}
    return Results(
        sessions=tuple(session(arms, failed=failed, process=process) for process in range(2)),
        absent={"gemm_rope": {FLASHINFER: "does not build"}},
    )


@pytest.fixture(scope="module")
def whole() -> Results:
    return comparison.results([("gemm_rmsnorm_partial_cross_entropy", "70B"), ("gemm_swiglu_bwd", "1B")])


@pytest.fixture(scope="module")
def found(whole: Results) -> list[TableRow]:
    return lines(whole)


@pytest.fixture(scope="module")
def shown(whole: Results) -> str:
    return page(whole, draw(lines(whole)))


def rows(text: str, title: str) -> list[list[str]]:
    """Return the cells of the Markdown table below ``title``, with its headings but without the line of
    dashes."""
    under = text.split(f"**{title}**\n")[1].split("\n**")[0]
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        for row in under.splitlines()
        if row.startswith("|") and not row.startswith("| ---")
    ]


def column(table_rows: Sequence[Sequence[str]], name: str) -> list[str]:
    place = table_rows[0].index(name)
    return [row[place] for row in table_rows[1:]]


# ── The summary ───────────────────────────────────────────────────────────────────────────────────────────


def test_half_widths_of_rows_add_as_squares_in_logarithms() -> None:
    first, second = (
        interval(1.2, 1.2 / math.exp(0.03), 1.2 * math.exp(0.06)),
        interval(1.0, math.exp(-0.04), math.exp(0.08)),
    )
    mean = product([first, second], 1 / 2)
    assert mean.estimate == pytest.approx(math.sqrt(1.2), abs=NEAR)
    assert math.log(mean.estimate / mean.low) == pytest.approx(0.05 / 2, abs=NEAR)
    assert math.log(mean.high / mean.estimate) == pytest.approx(0.10 / 2, abs=NEAR)
    assert mean.student == mean.bootstrap == pytest.approx((mean.low, mean.high))


def test_one_row_is_its_own_mean() -> None:
    only = interval(1.1, 1.05, 1.2)
    mean = product([only])
    assert (mean.estimate, mean.low, mean.high) == pytest.approx((1.1, 1.05, 1.2), abs=NEAR)


def test_a_win_and_a_loss_need_the_whole_interval() -> None:
    told = against(
        [
            line("1B", ratios={HUMAN: (1.1, 1.01, 1.2)}),
            line("7B", ratios={HUMAN: (1.1, 0.99, 1.2)}),
            line("70B", ratios={HUMAN: (0.9, 0.8, 0.99)}),
            line("square", ratios={HUMAN: (1.0, 1.0, 1.0)}),
            line("1B", "gemm_swiglu", ratios={HUMAN: (0.9, 0.8, 1.0)}),
            line("7B", "gemm_swiglu"),
        ],
        HUMAN,
    )
    counted = {t.name: [t.count(o) for o in ("win", "tie", "loss")] for t in (*told.operators, *told.totals)}
    assert counted == {"gemm_swiglu": [0, 1, 0], "gemm_rope": [1, 2, 1], "all operators": [1, 3, 1]}
    assert str(told).startswith(
        "Against human (wins are the LLM's): where the kernel is QuACK's own, "
        "1 win, 3 ties and 1 loss in 5 rows of 2 operators"
    )


def test_a_column_that_no_row_has_is_said_to_have_none() -> None:
    told = against([line("1B")], HUMAN)
    assert (told.operators, str(told)) == ((), "Against human: no row has both.")


def test_a_claim_lies_where_the_rows_intervals_do() -> None:
    lies = {
        ((1.5, 1.45, 1.55),): "within",
        ((1.2, 1.1, 1.29),): "below",
        ((1.28, 1.25, 1.31),): "within",
        ((2.0, 1.9, 2.1),): "above",
        ((1.2, 1.1, 1.29), (1.5, 1.4, 1.6), (2.0, 1.9, 2.1)): "1 below, 1 within, 1 above",
    }
    for ratios, verdict in lies.items():
        made = [line(f"{i}", "gemm_swiglu_bwd", ratios={COMPILE: ratio}) for i, ratio in enumerate(ratios)]
        by = {finding.claim.what: finding for finding in findings(made)}
        assert by["SwiGLU backward"].verdict == verdict, ratios
        assert by["forward operators"].verdict == by["a whole layer, forward"].verdict == "not measured"
    assert by["SwiGLU backward"].measured == "1.200 to 2.000 in 3 rows"


def test_claims_are_those_of_the_paper_and_have_a_source() -> None:
    spans = {claim.what: (claim.column, claim.low, claim.high, len(claim.operators)) for claim in CLAIMS}
    assert spans["forward operators"] == (COMPILE, 1.0, 1.3, 8)
    (backward,) = (span for what, span in spans.items() if what.startswith("RMSNorm backward"))
    assert backward == (COMPILE, 1.4, 1.8, 1)
    assert spans["SwiGLU backward"] == (COMPILE, 1.3, 1.6, 1)
    assert spans["a whole layer, forward"] == (COMPILE, 1.05, 1.2, 1)
    assert all("2605.19269" in claim.source for claim in CLAIMS)


def test_rows_stand_in_the_order_of_all_tables() -> None:
    made = [
        line("square", "gemm_rope"),
        line("70B", "gemm_rope"),
        line("x", "b"),
        line("x", "a"),
        line("y", "b"),
    ]
    made += [line("1B", "gemm_rope"), line("7B", "gemm_rmsnorm")]
    assert [(one.operator, one.case) for one in ordered(made)] == [
        ("gemm_rmsnorm", "7B"), ("gemm_rope", "1B"), ("gemm_rope", "70B"), ("gemm_rope", "square"),
        ("b", "x"), ("b", "y"), ("a", "x"),
    ]  # fmt: skip


def test_what_was_measured_leaves_out_what_has_become_another() -> None:
    old = session({PROGRAM: arm(2.0, key="0")}, conditions={"gpu": "old GPU"}, process=0)
    new = session({PROGRAM: arm(2.0)}, process=1, date="2001-02-05T00:00:00+00:00")
    bare = session({COMPILE: arm(2.0)}, conditions={}, process=2)
    assert conditions_text(Results(sessions=(old, new, bare))) == (
        "1 row on made-up GPU (driver 1.2.3, PyTorch 9.9.9, CUDA 99.0, liger-kernel 0.0.2, "
        "quack-kernels 0.0.1), 2001-02-03 to 2001-02-05, 8 rounds in each of 2 processes a row."
    )
    assert conditions_text(Results(sessions=(bare,))).startswith(
        "1 row on an unknown device, 2001-02-03, 8 rounds in one process"
    )


# ── Markdown ──────────────────────────────────────────────────────────────────────────────────────────────


def test_markdown_says_what_was_computed_by_hand() -> None:
    text = markdown(hand())
    times, ratios = rows(text, "Milliseconds"), rows(text, "Time over LLM's")
    assert times[0] == ["operator", "case", *(c.name for c in COLUMNS), "roofline"]
    assert column(times, LLM) == ["2.000"]
    # notes 4 and 5: QuACK (our search), weight transposed
    assert column(times, HUMAN) == ["**1.900** <sup>4, 5</sup>"]
    assert column(times, MATMUL) == ["1.000"]  # the fastest, but not bold: a matmul alone does less
    assert column(times, "roofline") == ["0.8000"]
    assert column(ratios, COMPILE) == ["1.300 [1.300, 1.300]"]
    assert column(ratios, HUMAN) == ["0.950 [0.950, 0.950]"]
    assert column(ratios, "roofline") == ["0.400"]
    assert column(rows(text, "Error against fp64"), LLM) == ["1.50"]
    assert column(rows(text, "Peak memory, MiB"), HUMAN) == ["5.0"]
    assert rows(text, "LLM against human")[1] == [
        "`gemm_rope`", "0.950 [0.950, 0.950]", "1", "0", "0", "1", "0",
    ]  # fmt: skip
    assert rows(text, "LLM against torch.compile")[1][2:] == ["1", "1", "0", "0", "0"]
    assert column(rows(text, "The paper's claims"), "it lies")[0] == "within"
    assert column(rows(text, "The paper's claims"), "it lies")[-1] == "below"


def test_an_empty_cell_gives_its_reason_in_a_note_named_once() -> None:
    text = markdown(hand())
    notes = text.split("**Notes**\n\n")[1].split("\n\n")[0].splitlines()
    assert notes == [
        "1. not measured",
        "2. Liger: no kernel",
        "3. does not build",
        "4. QuACK (our search)",
        "5. weight transposed",
    ]
    for title in ("Milliseconds", "Time over LLM's", "Error against fp64", "Peak memory, MiB"):
        assert column(rows(text, title), FLASHINFER) == ["– <sup>3</sup>"]


def test_a_ratio_through_the_reference_arm_is_marked_and_explained(found: list[TableRow]) -> None:
    (times, ratios, *_), _ = sheets(found)
    place = ratios.columns.index(UPSTREAM)
    assert "has †, the two times come from different sessions" in times.says
    cells = {operator: entries[place].text for operator, _, entries in ratios.rows}
    assert cells["gemm_swiglu_bwd"].endswith(" †‡") and cells["gemm_rmsnorm_partial_cross_entropy"] == "–"
    assert "†: the two were never" in ratios.says and "cuBLAS's bare matmul, which" in ratios.says
    assert "‡: measured in one process" in ratios.says
    assert not any("†" in e.text for _, _, es in ratios.rows for i, e in enumerate(es) if i != place)
    assert "†" not in markdown(hand())


def test_a_note_names_the_arm_where_it_is_not_the_first(found: list[TableRow]) -> None:
    (times, *_), notes = sheets(found)
    texts = dict(notes)
    told = {
        (operator, case): {texts[n] for n in entries[times.columns.index(COMPILE)].notes}
        for operator, case, entries in times.rows
    }
    assert {frozenset(names) for names in told.values()} <= {frozenset(), frozenset({MAX_AUTOTUNE})}
    assert any(told.values()) and not all(told.values())
    assert len(texts) == len(set(texts.values()))


@pytest.mark.parametrize("tuned", [True, False])
def test_the_legend_names_the_arms_that_have_figures(tuned: bool) -> None:
    arms = {PROGRAM: arm(2.0), COMPILE: arm(2.6), APART: arm(2.5)} | (
        {MAX_AUTOTUNE: arm(2.4)} if tuned else {}
    )
    results = Results(sessions=(session(arms),))
    for text in (markdown(results), page(results, {})):
        told = text.split("Milliseconds")[0]
        assert (MAX_AUTOTUNE in told) is ("max-autotune" in told) is tuned and APART in told
        assert f"{APART} ({COMPILE} unless a note names another)" in told
        assert "(LLM unless a note" not in told and "flashinfer-python" in told
    stale = results.model_copy(
        update={"present": {"gemm_rope": {"7B": Present(question="0", keys={MAX_AUTOTUNE: "2"})}}}
    )
    assert "max-autotune" not in markdown(stale).split("Milliseconds")[0]


def test_without_the_llms_kernel_the_fastest_is_by_time() -> None:
    text = markdown(Results(sessions=(session({COMPILE: arm(2.0), "eager": arm(3.0)}),)))
    assert column(rows(text, "Milliseconds"), COMPILE) == ["**2.000**"]
    assert column(rows(text, "Time over LLM's"), COMPILE) == ["–"]
    assert "Against human: no row has both." in text and f"Against {UPSTREAM}" not in text


def test_codas_own_package_is_summed_up_where_it_has_figures() -> None:
    text = markdown(Results(sessions=(session({PROGRAM: arm(2.0), UPSTREAM: arm(3.0)}),)))
    assert "**LLM against upstream CODA**" in text and "geometric mean 1.500" in text


def test_the_error_table_has_notes_and_says_that_outputs_may_be_fewer() -> None:
    text = markdown(hand())
    assert column(rows(text, "Error against fp64"), HUMAN) == ["1.01 <sup>4, 5</sup>"]
    assert column(rows(text, "Peak memory, MiB"), HUMAN) == ["5.0"]
    # both notes, 4 and 5, are in two tables: times and errors
    assert page(hand(), {}).count(">4</a>, <a") == 2
    under = text.split("**Error against fp64**")[1].split("|")[0]
    assert "Notes name outputs that a column does not compute." in under


def test_bold_is_said_to_be_the_fastest_of_the_columns_shown() -> None:
    """Bold marks the fastest of the columns shown. In this test, the LLM's kernel is faster, but is not
    shown."""
    results = Results(sessions=(session({PROGRAM: arm(1.5), OWN_TUNER: arm(2.0)}),))
    text = markdown(results, (HUMAN, MATMUL))
    assert column(rows(text, "Milliseconds"), HUMAN) == ["**2.000**"]
    for told in (text, page(results, {}, (HUMAN, MATMUL))):
        assert "Bold: the fastest column of a row" in told


@pytest.mark.parametrize("show", [markdown, lambda found: page(found, {}), printed])
def test_nothing_measured_is_a_sentence(show: object) -> None:
    assert callable(show) and NOTHING in show(Results())


def hostile() -> Results:
    arms = {PROGRAM: arm(2.0, note=HOSTILE), COMPILE: arm(2.5, key=HOSTILE)}
    failed = {LIGER: ArmFailure(key=HOSTILE, reason=HOSTILE)}
    conditions = {"gpu": HOSTILE, "versions": {HOSTILE: HOSTILE}, "driver": 5}
    return Results(
        sessions=(session(arms, case="a|b<i>", failed=failed, conditions=conditions),),
        absent={"gemm_rope": {FLASHINFER: HOSTILE}},
    )


def test_markdown_shows_hostile_text_as_it_is() -> None:
    text = markdown(hostile())
    assert "<script" not in text and "\x1b" not in text and "\u202e" not in text
    assert r"\# \`x\` \*b\* \[l\](https" in text and "[l](" not in text
    times = rows(text, "Milliseconds")
    assert {len(row) for row in times} == {len(times[0])}
    assert times[1][1] == r"a\|b&lt;i&gt;"
    assert plain("a_b\n*c* <d> & `e` [f](g) \\| ~h~ $i$") == (
        r"a\_b \*c\* &lt;d&gt; &amp; \`e\` \[f\](g) \\\| \~h\~ \$i\$"
    )


# ── HTML ──────────────────────────────────────────────────────────────────────────────────────────────────


class Tags(HTMLParser):
    """Collect every element with its attributes. Fail if elements are not closed in order."""

    VOID = {"meta", "br", "hr", "link", "img"}

    def __init__(self, text: str):
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_alone(text: str) -> None:
    """Assert that a page has no script, loads nothing from elsewhere, and has each id only once."""
    tags = Tags(text)
    assert not {tag for tag, _ in tags.seen} & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "image",
        "base",
        "form",
    }
    names = [attributes["id"] for _, attributes in tags.seen if "id" in attributes]
    assert len(names) == len(set(names))
    for tag, attributes in tags.seen:
        assert not [
            name for name in attributes if name.startswith("on") or name in ("src", "srcset", "data")
        ], tag
        for name in ("href", "xlink:href"):
            if name in attributes:
                assert (attributes[name] or "").removeprefix("#") in names
    assert not re.search(r"@import|url\((?!#)", text)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(names)
    assert "default-src 'none'" in text


def test_the_page_is_one_well_formed_file_that_needs_no_other(shown: str) -> None:
    assert_alone(shown)
    assert shown.count("<svg") == 2 and "<?xml" not in shown and shown.count("<!DOCTYPE") == 0


def test_the_page_has_all_that_was_measured(shown: str) -> None:
    for words in (
        "made-up GPU", "By operator and case", "LLM against human", "LLM against torch.compile", "claims",
        comparison.FLASHINFER_REASON, comparison.UPSTREAM_REASON, comparison.NOTE, comparison.AUTOTUNE_REASON,
        "has changed since", "through the reference arm", "rstd: 4.00e-07, 1.20",
        *(column.what for column in COLUMNS if "'" not in column.what), "s to prepare", "41.5", "321.5",
    ):  # fmt: skip
        assert words in shown, words
    assert "hidden size 8192 | &lt;none&gt;" in shown


def test_an_arm_that_has_changed_since_every_session_is_marked() -> None:
    found = Results(sessions=(session({PROGRAM: arm(1.25)}),))
    (name,) = found.sessions
    now = Present(question=name.question, keys={PROGRAM: "of later versions"})
    changed = found.model_copy(update={"present": {name.operator: {name.case: now}}})
    assert "has changed since" not in page(found, {})
    assert "has changed since" in page(changed, {}).partition("what it was")[2]


def rules(text: str) -> dict[str, str]:
    """Return the declarations of the page's style sheet, by selector."""
    style = text.split("<style>")[1].split("</style>")[0]
    found: dict[str, str] = {}
    for selectors, declared in re.findall(r"([^{}]+)\{([^{}]*)\}", style):
        for selector in selectors.split(","):
            found[selector.strip()] = found.get(selector.strip(), "") + declared
    return found


def test_on_a_narrow_window_tables_scroll_and_all_else_wraps(shown: str) -> None:
    assert shown.count("<table>") == len(re.findall(r'<div class="wide" tabindex="0"><table>', shown)) > 3
    style = rules(shown)
    assert "overflow-x: auto" in style[".wide"] and "overflow-x: auto" in style["pre"]
    # an operator's name is a long word that must wrap
    for wraps in ("h1", "h2", "li", "p", "dd", "summary"):
        assert "overflow-wrap: anywhere" in style[wraps], wraps
    assert "minmax(min(14rem, 100%), 1fr)" in style["dl"]


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs a browser")
def test_a_browser_scrolls_no_page_sideways(shown: str, tmp_path: Path) -> None:
    """The page is in a narrow frame, because a browser's window cannot be so narrow. All folded parts are
    open."""
    text = re.sub(r"<meta http-equiv[^>]*>", "", shown).replace("<details>", "<details open>")
    told = (
        "<script>onload = () => { const page = document.documentElement; parent.document.title = "
        "[page.scrollWidth - page.clientWidth, [...document.querySelectorAll('.wide')]"
        ".filter(box => box.scrollWidth > box.clientWidth).length] }</script>"
    )
    frame = html.escape(text.replace("</body>", f"{told}</body>"))
    outer = tmp_path / "outer.html"
    outer.write_text(f'<title></title><iframe style="width: 220px" srcdoc="{frame}"></iframe>')
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9000"]
    command += [f"--user-data-dir={tmp_path}/browser", "--dump-dom", outer.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>(\d+),(\d+)</title>", done.stdout)
    assert found and found[1] == "0" and int(found[2]) > 3, done.stdout[:200]


def test_the_page_escapes_hostile_text() -> None:
    text = page(hostile(), draw(lines(hostile())))
    assert_alone(text)
    assert "&lt;/td&gt;&lt;script" in text and "a|b&lt;i&gt;" in text


# ── The terminal ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_terminal_has_times_ratios_and_reasons_within_its_width(whole: Results) -> None:
    told = printed(whole, "measuring [red]gemm_rope[/red]")
    # The message comes before the table, because a long table would push it off the screen. The message's
    # brackets are not parsed as markup.
    assert told.startswith("measuring [red]gemm_rope[/red]\n")
    assert f"\n2 {comparison.FLASHINFER_REASON}" in told and "hidden size 8192 | <none>" in told
    assert "1.12†‡" in told and "…" not in told.split("swiglu_bwd")[1].split("\n")[0]
    assert max(map(len, told.splitlines())) <= WIDE


@pytest.mark.parametrize("width", [50, 60, 80, 100])
def test_a_narrow_terminal_has_every_figure_in_blocks(whole: Results, width: int) -> None:
    wide, narrow = printed(whole), printed(whole, width=width)
    assert max(map(len, narrow.splitlines())) <= width
    figures = re.compile(r"\d+\.\d{2,3}\S*")
    assert sorted(figures.findall(narrow.split("†:")[0])) == sorted(figures.findall(wide.split("†:")[0]))
    assert narrow.count("swiglu_bwd") == narrow.count("operator ") > 1


def test_the_terminal_says_what_was_computed_by_hand() -> None:
    row = next(text for text in printed(hand()).splitlines() if text.startswith("rope"))
    assert row.split() == [
        "rope",
        "7B",
        "–",
        "2.600",
        "1.30",
        "–",
        "1",
        "–",
        "2",
        "1.900",
        "0.95",
        "–",
        "2.000",
        "1.000",
        "0.50",
    ]


def test_the_terminal_takes_hostile_text() -> None:
    told = printed(hostile(), HOSTILE)
    assert "\x1b" not in told and "\u202e" not in told
    assert max(map(len, told.splitlines())) <= WIDE


def test_nothing_is_said_of_an_reference_arm_that_no_one_sat_beside() -> None:
    alone = Results(sessions=(session({}),))
    assert summary.against(lines(alone), COMPILE).operators == ()
    assert column(rows(markdown(alone), "Milliseconds"), MATMUL) == ["1.000"]
    assert REFERENCE_ARM in page(alone, {})
