"""Read and change the tips log, which contains lessons from failed attempts. A prompt contains the accepted
tips, except those learned from the prompt's own spec.

People read and edit tips_log.md. A tip is a heading ``## tip-N: lesson in the imperative`` and a line ``-
field: value`` for each field. The fields are spec (one, or several with commas), failed (gate/reason), fix
and versions. Optional fields are state, level and measured. The state is accepted by default, because a
person who writes a tip wants it used. The level is cutedsl if the tip is for authors who edit CuTeDSL; other
tips are for authors of programs. The field measured holds the tip's measurement. When this module changes an
entry, it changes or adds lines of that entry, and leaves every other byte of the log unchanged.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from coda_agent.agent.storage import locks
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.system.files import ROOT, regular, write_atomic

TIPS = ROOT / "tips_log.md"
HEADING = re.compile(r"^## (tip-\d+): (.+)$")
FIELD = re.compile(r"^- (\w+): (.+)$")
LAST = re.compile(r"^<!-- last id: tip-(\d+) -->$")
MEASURED = re.compile(r"^(helps|hurts|undecided): .*? difference ([+-]?\d\.\d+) \[")

ACCEPTED, PROPOSED, RETIRED = STATES = ("accepted", "proposed", "retired")
FIELDS = ("spec", "failed", "fix", "versions")
OPTIONAL = ("state", "level", "measured")
VOCABULARY, CUTEDSL = LEVELS = ("", "cutedsl")  # the two kinds of authors that read tips
LONGEST_LESSON, LONGEST_FIX = 200, 300  # characters
AND, OR_ELSE = ", ", " | "  # separators in merged tips' fields: OR_ELSE in fix, AND in the other fields
ALIKE = 0.85  # two lessons may mean the same if difflib's ratio for them exceeds this value
VERDICTS = ("hurts", "undecided", "helps")


class TipsError(InvalidInput):
    """The tips log, or a request to change it, is invalid. The message names the place, the fault and the
    remedy."""


@dataclass(frozen=True)
class Lesson:
    """A lesson with its evidence, not yet in the log."""

    lesson: str
    spec: str
    failed: str
    fix: str
    versions: str
    level: str = VOCABULARY

    def __post_init__(self) -> None:
        check_lesson(self.lesson)


@dataclass(frozen=True)
class Tip:
    """One entry of the log. ``measured``: a verdict and its figures; empty if the tip was not measured."""

    id: str
    lesson: str
    spec: str
    failed: str
    fix: str
    versions: str
    state: str = ACCEPTED
    measured: str = ""
    level: str = VOCABULARY

    @property
    def specs(self) -> tuple[str, ...]:
        return _parts(self.spec)

    @property
    def number(self) -> int:
        return int(self.id.removeprefix("tip-"))

    @property
    def verdict(self) -> str:
        return self._measured()[0]

    @property
    def difference(self) -> float:
        """How much the tip raises the share of first attempts that pass; 0 if the tip was not measured."""
        return self._measured()[1]

    @property
    def help(self) -> tuple[int, float, int]:
        """A sort key: verdict, then difference, then number. More helpful tips come later. Among equally
        helpful tips, newer tips come later."""
        return VERDICTS.index(self.verdict), self.difference, self.number

    def _measured(self) -> tuple[str, float]:
        found = MEASURED.match(self.measured)
        return (found[1], float(found[2])) if found else ("undecided", 0.0)


@dataclass(frozen=True)
class Added:
    """The entry that ``add`` created or changed for a lesson. ``merged``: whether ``add`` added the evidence
    to an older entry with the same words. ``alike``: for a new entry, the older entries that may mean the
    same, in any state."""

    tip: Tip
    merged: bool
    alike: tuple[Tip, ...] = ()


def read_tips(path: Path = TIPS) -> list[Tip]:
    """All tips of the log in order, in any state; empty if there is no log. Raises TipsError."""
    return [entry.tip for entry in _entries(path, _text(path))]


def in_prompts(tips: Iterable[Tip], level: str = VOCABULARY) -> list[Tip]:
    """The accepted tips for one of the two kinds of authors. ``level``: VOCABULARY or CUTEDSL."""
    return [tip for tip in tips if tip.state == ACCEPTED and tip.level == level]


def tips_of(header: Mapping[str, Any], path: Path | None = None) -> list[Tip] | None:
    """The tips that a run's header requests. The header may remove some of the log's accepted tips, and add
    tips that are not accepted. None if the header requests no change."""
    if "without_tips" not in header:
        return None
    without, extra = set(header["without_tips"]), set(header.get("with_tips", ()))
    known = read_tips(path or TIPS)
    chosen = [tip for tip in known if tip.id in extra or (tip.state == ACCEPTED and tip.id not in without)]
    return [replace(tip, state=ACCEPTED) for tip in chosen]


def fitting(tips: Iterable[Tip], length: int) -> list[Tip]:
    """The tips whose lessons fit into ``length`` characters, including list markers. The least helpful tips
    are dropped first. Among equally helpful tips, the oldest is dropped first."""
    tips = list(tips)
    sizes = {tip.id: len(f"- {tip.lesson}\n") for tip in tips}
    left = sum(sizes.values())
    for least in sorted(tips, key=lambda tip: tip.help):
        if left <= length:
            break
        left -= sizes.pop(least.id)
    return [tip for tip in tips if tip.id in sizes]


def check_lesson(lesson: str) -> None:
    """Raise TipsError unless a lesson is one short line that begins like a sentence. The lesson goes into
    prompts, where it must not look like a heading, a horizontal rule or code."""
    shown = repr(lesson if len(lesson) <= 60 else lesson[:60] + "…")
    if len(lesson) > LONGEST_LESSON:
        wrong = f"has {len(lesson)} characters; say one thing in at most {LONGEST_LESSON}"
    elif not lesson.isprintable():
        wrong = "holds line breaks or invisible characters; write it as one line of plain text"
    elif not lesson.strip():
        wrong = "says nothing; write one sentence in the imperative"
    elif not (lesson[0].isalpha() or lesson[0] == "`") or lesson.startswith("```"):
        wrong = "begins with a mark; begin with the verb"
    elif "```" in lesson or "<!--" in lesson:
        wrong = "opens a block of code or a comment; write it as one line of plain text"
    else:
        return
    raise TipsError(f"lesson {shown} {wrong}")


def one_line(words: str, longest: int = LONGEST_FIX) -> str:
    """Format evidence as a field's value: printable, on one line, and shortened if necessary."""
    plain = "".join(c if c.isprintable() else " " for c in words)
    text = " ".join(plain.split()) or "unknown"
    return text if len(text) <= longest else text[: longest - 1] + "…"


# ── Changing the log ──────────────────────────────────────────────────────────────────────────────────────


def add(lesson: Lesson, path: Path = TIPS) -> Added:
    """Add a lesson to the log as a proposed tip. If an entry has the same words, only add the evidence to
    that entry, and keep its state and lesson. Raises TipsError and OSError."""
    with _changing(path):
        text = _text(path)
        tips = [entry.tip for entry in _entries(path, text)]
        same = next((tip for tip in tips if same_words(tip, lesson)), None)
        if same:
            values = {name: _united(name, getattr(same, name), getattr(lesson, name)) for name in FIELDS}
            _write(path, _edited(path, text, same.id, values))
            return Added(replace(same, **values), merged=True)
        number = 1 + max([_last(text), *(tip.number for tip in tips)])
        evidence = {name: one_line(getattr(lesson, name)) for name in FIELDS}
        said, level = lesson.lesson.strip(), lesson.level
        tip = Tip(id=f"tip-{number}", lesson=said, state=PROPOSED, level=level, **evidence)
        _write(path, _appended(text, tip))
    return Added(tip, merged=False, alike=tuple(other for other in tips if _alike(other, lesson)))


def change(id: str, path: Path = TIPS, **values: str) -> Tip:
    """Change a tip's state, or record its measurement. Return the old tip. Raises TipsError and OSError."""
    with _changing(path):
        before = find(id, path)
        _write(path, _edited(path, _text(path), id, values))
    return before


def find(id: str, path: Path = TIPS) -> Tip:
    """The tip with this id. Raises TipsError if the log has no such tip."""
    tips = read_tips(path)
    for tip in tips:
        if tip.id == id:
            return tip
    known = ", ".join(tip.id for tip in tips) or "none"
    raise TipsError(f"{path}: there is no {id!r}; there are: {known}")


def same_words(tip: Tip, lesson: Lesson) -> bool:
    """Whether a tip and a lesson have the same words and level. Their failures may differ."""
    return tip.level == lesson.level and _plain(tip.lesson) == _plain(lesson.lesson)


def of_failure(tip: Tip, spec: str, failed: str, fix: str) -> bool:
    """Whether a tip was learned from this failure and fix."""
    return spec in tip.specs and one_line(failed) in _parts(tip.failed) and _offers(tip.fix, one_line(fix))


def _plain(lesson: str) -> str:
    """A lesson normalised for comparison. Arithmetic operators stay, because a * b differs from a / b."""
    return " ".join(re.sub(r"[^\w\s+*/<>=-]", " ", unicodedata.normalize("NFKC", lesson).casefold()).split())


def _alike(tip: Tip, lesson: Lesson) -> bool:
    """Whether a person should compare a tip with a lesson, because their words are similar, or because their
    failures and fixes are equal."""
    words = SequenceMatcher(None, _plain(tip.lesson), _plain(lesson.lesson), autojunk=False)
    return words.ratio() > ALIKE or of_failure(tip, lesson.spec, lesson.failed, lesson.fix)


def _offers(fixes: str, fix: str) -> bool:
    """Whether a fix is one of the ``fixes``. A fix may contain the separator."""
    return OR_ELSE + fix + OR_ELSE in OR_ELSE + fixes + OR_ELSE


def _parts(value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(","))


def _united(name: str, old: str, new: str) -> str:
    """The union of two values of a field: ``old``, then the parts of ``new`` that ``old`` lacks."""
    if name == "fix":
        return old if _offers(old, one_line(new)) else old + OR_ELSE + one_line(new)
    parts = _parts(one_line(new))
    return old + "".join(AND + part for part in parts if part not in _parts(old))


# ── The file ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Entry:
    """An entry in the file. ``line``: the index of the heading's line. ``fields``: for each field, the index
    of the field's line, and the value."""

    path: Path
    line: int
    id: str
    lesson: str
    fields: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line + 1}"

    @property
    def end(self) -> int:
        """The index of the line after the last field."""
        return max(index for index, _ in self.fields.values()) + 1

    @property
    def tip(self) -> Tip:
        values = {name: value for name, (_, value) in self.fields.items()}
        if not set(FIELDS) <= values.keys() <= {*FIELDS, *OPTIONAL}:
            raise TipsError(
                f"{self.place}: {self.id} needs exactly the fields {', '.join(FIELDS)}, "
                f"and may have {' and '.join(OPTIONAL)}"
            )
        tip = Tip(id=self.id, lesson=self.lesson, **values)
        if tip.state not in STATES:
            raise TipsError(
                f"{self.place}: {self.id} has state {tip.state!r}; use one of {', '.join(STATES)}"
            )
        if tip.level not in LEVELS:
            raise TipsError(f"{self.place}: {self.id} has level {tip.level!r}; write {CUTEDSL}, or no level")
        if tip.measured and not MEASURED.match(tip.measured):
            raise TipsError(
                f"{self.place}: {self.id} has no figures in its measured line, which only "
                f"'coda-agent tips measure {self.id}' may write"
            )
        try:
            check_lesson(tip.lesson)
        except TipsError as error:
            raise TipsError(f"{self.place}: {error}") from None
        return tip


def _entries(path: Path, text: str) -> list[_Entry]:
    found: list[_Entry] = []
    for index, line in enumerate(_lines(text)):
        heading, value = HEADING.match(line), FIELD.match(line)
        if heading:
            if any(entry.id == heading[1] for entry in found):
                raise TipsError(f"{path}:{index + 1}: {heading[1]} occurs twice; give one a new id")
            found.append(_Entry(path, index, heading[1], heading[2].strip()))
        elif line.startswith("## "):
            raise TipsError(f"{path}:{index + 1}: a tip's heading is '## tip-N: lesson', not {line!r}")
        elif found and value:
            if value[1] in found[-1].fields:
                raise TipsError(f"{path}:{index + 1}: {found[-1].id} has two {value[1]!r}; keep one")
            found[-1].fields[value[1]] = index, value[2].strip()
    return found


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Lock the log against other processes. The lock is on the log's folder, because every change replaces
    the log's file."""
    directory = path.resolve().parent
    with ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locks.alone(directory))
        except OSError as error:
            raise TipsError(f"{directory}: {error.strerror}; make it a folder that can be read") from None
        yield


def _text(path: Path) -> str:
    """The log's text, with its line endings unchanged; "" if the file does not exist."""
    try:
        return regular(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise TipsError(f"{path}: cannot be read as UTF-8 text ({error}); repair it by hand") from None


def _lines(text: str) -> list[str]:
    return [line.removesuffix("\r") for line in text.split("\n")]


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _edited(path: Path, text: str, id: str, values: Mapping[str, str]) -> str:
    """The log's text, with the fields ``values`` set in the entry ``id``. Fields that the entry did not have
    are added after its last field."""
    entry = next(entry for entry in _entries(path, text) if entry.id == id)
    lines = text.split("\n")
    for name, value in values.items():
        if name in entry.fields:
            index, old = entry.fields[name]
            if old != value:
                lines[index] = f"- {name}: {value}" + "\r" * lines[index].endswith("\r")
    added = [f"- {name}: {value}" for name, value in values.items() if name not in entry.fields]
    last = entry.end - 1
    bare = lines[last].removesuffix("\r")
    ending = lines[last][len(bare) :]
    newline = _newline(text) if last == len(lines) - 1 else f"{ending}\n"
    lines[last] = newline.join([bare, *added]) + ending
    return "\n".join(lines)


def _appended(text: str, tip: Tip) -> str:
    """The text with a new entry at its end. A comment in the text records the new id, so that the id is never
    reused, even after the entry is removed."""
    newline, mark = _newline(text), f"<!-- last id: {tip.id} -->"
    lines = text.split("\n")
    marks = [index for index, line in enumerate(_lines(text)) if LAST.match(line)]
    if marks:
        lines[marks[0]] = mark + "\r" * lines[marks[0]].endswith("\r")
    values = [f"- {name}: {getattr(tip, name)}" for name in (*FIELDS, "state")]
    values += [f"- level: {tip.level}"] if tip.level else []
    entry = [*([] if marks else [mark, ""]), f"## {tip.id}: {tip.lesson}", *values]
    before = "\n".join(lines)
    gap = "" if not before else newline if before.endswith("\n") else newline * 2
    return before + gap + newline.join(entry) + newline


def _last(text: str) -> int:
    """The highest number that the log's comment records; 0 if there is no comment."""
    return max((int(found[1]) for line in _lines(text) if (found := LAST.match(line))), default=0)


def _write(path: Path, text: str) -> None:
    for entry in _entries(path, text):  # an unreadable entry would break every prompt
        assert entry.tip
    write_atomic(path, text)
