"""``coda-agent show KERNEL --sass``: show lowered code next to its machine code.

``as_dict`` returns the data for other software; ``tables`` draws the data with rich.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from coda_agent.agent.show import new_table, schedule_words
from coda_agent.primitives.runtime.sass import KINDS, LOWERED, Instruction, Listing

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MEANING = (
    "Instructions in code order, by the line of lowered code from which they were traced. The "
    "epilogue is fully unrolled, so its counts are those of one thread for one tile."
)


def as_dict(listings: Sequence[Listing], *, full: bool = False) -> list[dict[str, Any]]:
    """One entry per kernel; a step that has two launches has one entry per launch. An entry counts
    instructions by kind: in total, for each line of the kernel's class in the lowered code, and for each
    other source file. ``full``: also list every instruction, by address."""
    return [
        {
            "kernel": listing.kernel,
            "schedule": listing.schedule and listing.schedule.to_json(),
            "part": list(listing.part),
            "total": _ordered(listing.total()),
            "lines": [
                {"line": line, "text": text, "counts": _ordered(listing.lines().get(line, Counter()))}
                for line, text in listing.source.items()
            ],
            "elsewhere": {file: _ordered(counts) for file, counts in listing.elsewhere().items()},
            "instructions": [_instruction(i) for i in listing.instructions] if full else None,
        }
        for listing in listings
    ]


def _instruction(i: Instruction) -> dict[str, Any]:
    place = {"file": None, "line": i.line} if i.file == LOWERED else {"file": i.file, "line": i.line}
    return {"address": i.address, "text": i.text, "kind": i.kind, **place}


def _kinds(counts: Counter[str]) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in _ordered(counts).items())


def _ordered(counts: Counter[str]) -> dict[str, int]:
    return {kind: counts[kind] for kind in KINDS if counts[kind]}


def _title(listing: Listing) -> str:
    name = listing.kernel.rpartition("_")[0] or listing.kernel
    number, parts = listing.part
    name += f", part {number} of {parts}" if parts > 1 else ""
    return f"{name}, {schedule_words(listing.schedule.to_json())}" if listing.schedule else name


def tables(listings: Sequence[Listing], *, full: bool = False) -> Iterator[RenderableType]:
    """One table per kernel; a step that has two launches has one table per launch. A table has a row for each
    line of the kernel's class in the lowered code, and then a row for each other source file. ``full``: after
    each table, also list the kernel's instructions by line."""
    from rich.text import Text

    yield Text(MEANING, style="dim")
    for listing in listings:
        yield _table(listing)
        if full:
            yield from _code(listing)


def _table(listing: Listing) -> Table:
    from rich.text import Text

    drawn = new_table(f"instructions of {_title(listing)}", ["line", "CuTeDSL"], ["all"])
    drawn.add_column("of which", overflow="fold")
    lines = listing.lines()
    for number, text in listing.source.items():
        counts = lines.get(number, Counter())
        row = (str(number), Text(text), str(counts.total() or ""), _kinds(counts))
        drawn.add_row(*row, style="" if counts else "dim")
    drawn.add_section()
    for file, counts in listing.elsewhere().items():
        drawn.add_row("", Text(file), str(counts.total()), _kinds(counts))
    drawn.add_section()
    drawn.add_row("", "all", str(listing.total().total()), _kinds(listing.total()), style="bold")
    return drawn


def _code(listing: Listing) -> Iterator[RenderableType]:
    """Each source line that has instructions, followed by the line's instructions in order of address. Lines
    of the lowered code come first."""
    from rich.text import Text

    places: dict[tuple[str, int], list[Instruction]] = {}
    for i in listing.instructions:
        places.setdefault((i.file, i.line), []).append(i)
    for (file, line), found in sorted(places.items()):
        where = f"{line} {listing.source.get(line, '').strip()}" if file == LOWERED else f"{file}:{line}"
        yield Text(where, style="bold")
        yield Text("\n".join(f"    {i.address:06x}  {i.text}" for i in found))
