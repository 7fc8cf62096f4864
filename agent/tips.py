"""The running tips log: what failed attempts taught, read into every prompt but its own spec's.

tips_log.md is for people to read and edit. A tip is a heading ``## tip-N: lesson in the imperative``
followed by ``- field: value`` lines: spec, failed (gate and reason), fix, versions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TIPS = Path(__file__).parent.parent / "tips_log.md"
HEADING = re.compile(r"^## (tip-\d+): (.+)$")
FIELD = re.compile(r"^- (\w+): (.+)$")
FIELDS = ("spec", "failed", "fix", "versions")


@dataclass(frozen=True)
class Tip:
    """One lesson and its evidence."""

    id: str
    lesson: str
    spec: str
    failed: str
    fix: str
    versions: str


class TipsError(Exception):
    """The tips log has an entry that cannot be read: file, line and what is expected."""


def read_tips(path: Path = TIPS) -> list[Tip]:
    """All tips of the log, in order; none where there is no log. Raises TipsError."""
    if not path.exists():
        return []
    tips: list[Tip] = []
    entry: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        heading, field = HEADING.match(line), FIELD.match(line)
        if heading:
            tips += _finish(path, entry)
            entry = {"id": heading[1], "lesson": heading[2], "line": str(number)}
        elif line.startswith("## "):
            raise TipsError(f"{path}:{number}: a tip's heading is '## tip-N: lesson', not {line!r}")
        elif entry and field:
            entry[field[1]] = field[2]
    return tips + _finish(path, entry)


def _finish(path: Path, entry: dict[str, str]) -> list[Tip]:
    if not entry:
        return []
    line = entry.pop("line")
    if set(entry) != {"id", "lesson", *FIELDS}:
        raise TipsError(f"{path}:{line}: {entry['id']} needs exactly the fields {', '.join(FIELDS)}")
    return [Tip(**entry)]
