"""Tests of a comparison's charts, drawn from made-up rows: texts, colours, and the positions of bars and
dots."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

import comparison
from coda_agent.comparison.competitors import (
    COLUMNS,
    COMPILE,
    FLASHINFER,
    HUMAN,
    LIGER,
    LLM,
    MATMUL,
    UPSTREAM,
)
from coda_agent.comparison.drawing import charts
from coda_agent.comparison.drawing.cells import TableRow, lines
from coda_agent.comparison.drawing.charts import draw
from comparison import line


@pytest.fixture(scope="module")
def found() -> list[TableRow]:
    return lines(
        comparison.results([("gemm_rmsnorm_partial_cross_entropy", "70B"), ("gemm_swiglu_bwd", "1B")])
    )


def test_charts_are_valid_and_the_same_when_drawn_again(found: list[TableRow]) -> None:
    drawn = draw(found)
    assert list(drawn) == ["speedup.svg", "speedup.png", "roofline.svg", "roofline.png"]
    assert draw(found) == drawn
    for name, file in drawn.items():
        if name.endswith(".svg"):
            assert ElementTree.fromstring(file).tag == "{http://www.w3.org/2000/svg}svg"
            assert b"dc:date" not in file
        else:
            assert file.startswith(b"\x89PNG\r\n\x1a\n")


def drawn_words(made: Sequence[TableRow], name: str) -> list[str]:
    """Return the texts of a chart. Matplotlib draws each text as outlines, and writes the text into an XML
    comment."""
    return re.findall(r"<!-- (.*?) -->", draw(made)[name].decode(), re.DOTALL)


def test_speedups_have_a_bar_for_each_rival_and_a_dash_for_each_that_lacks() -> None:
    made = [
        line("1B", ratios={COMPILE: (1.5, 1.4, 1.6), HUMAN: (0.9, 0.8, 1.0), LIGER: (2.0, 1.9, 2.1)}),
        line("7B", ratios={COMPILE: (1.25, 1.2, 1.3), HUMAN: (1.0, 0.9, 1.1)}),
    ]
    words = drawn_words(made, "speedup.svg")
    assert {"1.50", "0.90", "2.00", "1.25", "1.00", "1B", "7B", "rope", "over human"} <= set(words)
    assert words.count("–") == 1


def test_only_what_was_measured_is_drawn() -> None:
    assert draw([]) == {}
    assert list(draw([line("1B")])) == ["roofline.svg", "roofline.png"]
    assert {"LLM"} == set(drawn_words([line("1B")], "roofline.svg")) & {c.name for c in COLUMNS}


def test_a_chart_takes_any_name() -> None:
    odd = "a$b$ <x> -- \x00 " + "wide" * 20
    drawn = draw([line(odd, odd, ratios={COMPILE: (1.5, 1.4, 1.6)})])
    for name in ("speedup.svg", "roofline.svg"):
        ElementTree.fromstring(drawn[name])


def test_every_column_has_its_own_colour_and_shape() -> None:
    names = {column.name for column in COLUMNS}
    assert names == charts.COLOURS.keys() == charts.SHAPES.keys()
    assert len(set(charts.COLOURS.values())) == len(set(charts.SHAPES.values())) == len(names)


def test_matplotlib_is_imported_only_to_draw() -> None:
    imports = "import coda_agent.comparison.drawing.html_page, coda_agent.comparison.drawing.terminal, sys"
    code = f"{imports}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ── Positions ─────────────────────────────────────────────────────────────────────────────────────────────


def axes(made: Sequence[TableRow], name: str) -> Any:
    (found,) = charts._figures(made, "")[name].axes
    return found


def dots(made: Sequence[TableRow]) -> dict[str, Any]:
    """Return, for each column in a roofline chart, the matplotlib line that draws the column's dots."""
    shapes = {shape: name for name, shape in charts.SHAPES.items()}
    return {
        shapes[one.get_marker()]: one for one in axes(made, "roofline").lines if one.get_marker() in shapes
    }


def test_bars_begin_at_1_and_their_intervals_reach_from_low_to_high() -> None:
    made = [line("1B", ratios={COMPILE: (1.5, 1.4, 1.8)}), line("7B", ratios={COMPILE: (0.8, 0.5, 0.9)})]
    drawn = axes(made, "speedup")
    assert [(bar.get_x(), bar.get_width()) for bar in drawn.patches] == [
        pytest.approx((1, 0.5)), pytest.approx((1, -0.2)),
    ]  # fmt: skip
    reached = [segment[:, 0] for bars in drawn.collections for segment in bars.get_segments()]
    assert [list(ends) for ends in reached] == [pytest.approx([1.4, 1.8]), pytest.approx([0.5, 0.9])]


def test_every_rival_that_any_row_has_is_among_the_bars_in_the_columns_order() -> None:
    ratios = {UPSTREAM: (1.1, 1.0, 1.2), HUMAN: (0.9, 0.8, 1.0), FLASHINFER: (1.3, 1.2, 1.4)}
    made = [line("1B", ratios=ratios), line("7B", ratios={LIGER: (2.0, 1.9, 2.1), COMPILE: (1.5, 1.4, 1.6)})]
    (legend,) = charts._figures(made, "")["speedup"].legends
    order = [COMPILE, LIGER, FLASHINFER, HUMAN, UPSTREAM]
    assert [text.get_text() for text in legend.get_texts()] == [f"over {name}" for name in order]
    assert order == [column.name for column in COLUMNS if column.name in order]
    heights = sorted((bar.get_y(), round(bar.get_width() + 1, 3)) for bar in axes(made, "speedup").patches)
    assert [width for _, width in heights] == [1.3, 0.9, 1.1, 1.5, 2.0]  # the bars from the top, row by row


def test_bars_are_as_high_as_their_ratios_in_a_table_of_47_rows() -> None:
    ratios = {name: (1.5, 1.4, 1.6) for name in charts.RIVALS}
    figure = charts._figures([line(f"{i}", ratios=ratios) for i in range(47)], "")["speedup"]
    (drawn,) = figure.axes
    bar: Any = drawn.patches[0]
    inch = (
        drawn.get_position().height * figure.get_figheight() / abs(drawn.get_ylim()[1] - drawn.get_ylim()[0])
    )
    assert bar.get_height() * inch >= 0.9 * 7 / 72  # at least 90% of 7 points; a point is 1/72 inch
    assert figure.get_figheight() < 40


def test_a_dot_stands_at_the_time_over_the_roofline() -> None:
    made = [line("1B", ratios={HUMAN: (3.0, 3.0, 3.0)}, roofline=0.5), line("7B", roofline=0.8)]
    found = dots(made)
    assert list(found[LLM].get_xdata()) == pytest.approx([1 / 0.5, 1 / 0.8])
    assert list(found[HUMAN].get_xdata()) == pytest.approx([3 / 0.5])
    assert list(found[LLM].get_ydata()) == [0, 1]


def test_a_dot_of_another_session_stands_where_its_ratio_over_the_kernel_puts_it() -> None:
    made = line("1B", ratios={UPSTREAM: (1.2, 1.1, 1.3)}, roofline=0.5, indirect=True)
    cell = made.cell(UPSTREAM)
    assert cell
    made = replace(made, cells={**made.cells, UPSTREAM: replace(cell, milliseconds=0.9)})
    assert list(dots([made])[UPSTREAM].get_xdata()) == pytest.approx([1.2 / 0.5])
    words = "upstream CODA: never in the same session as LLM, so drawn at LLM's time multiplied by the ratio."
    assert words in drawn_words([made], "roofline.svg")
    assert words not in drawn_words([line("1B", ratios={UPSTREAM: (1.2, 1.1, 1.3)})], "roofline.svg")


def test_where_dots_coincide_a_cross_is_above_a_diamond_and_a_ring_above_both() -> None:
    same = (1.0, 0.9, 1.1)
    found = dots([line("1B", ratios={name: same for name in charts.COLOURS if name != LLM})])
    over = {name: drawn.get_zorder() for name, drawn in found.items()}
    assert all(over[LLM] > over[FLASHINFER] > over[name] for name in over if name not in (LLM, FLASHINFER))
    # these markers are hollow, so that the markers below them stay visible
    for name in (LLM, FLASHINFER, MATMUL):
        assert found[name].get_markerfacecolor() == "none"
