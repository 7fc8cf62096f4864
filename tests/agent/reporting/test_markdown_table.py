"""The text of a cell in a Markdown table cannot end the cell or the line."""

from __future__ import annotations

from coda_agent.primitives.system.markdown_table import markdown_table


def test_no_cell_ends_its_cell_or_line() -> None:
    table = markdown_table(["a", "b"], [[None, 1], ["x | y\n| z |", r"already \| escaped"]])
    assert table.splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| – | 1 |",
        r"| x \| y \| z \| | already \| escaped |",
    ]
