"""A draft of a spec. ``str(draft)`` is YAML in the layout of the shipped specs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.agent.scaffold.function import Function, ScaffoldError, SourceLine
from coda_agent.primitives.lang.dims import Dim

if TYPE_CHECKING:
    from coda_agent.verifier.spec.model import Spec

TEXTS = ("reference", "baseline")
WRAP = 100
BLOCK = 16  # a block of a tile has at least this many columns
PLAIN = re.compile(r"[A-Z][\w ,.;()'/+-]*")  # text that needs no quotes in YAML


class TensorDraft(NamedTuple):
    shape: tuple[Dim, ...]
    dtype: str
    init: str = ""
    domain: str = ""


@dataclass
class SpecDraft:
    """A draft of a spec. ``dims`` maps each dim to its description. ``static`` names the static dims."""

    name: str
    function: Function
    inputs: dict[str, TensorDraft]
    dims: dict[str, str]
    static: tuple[str, ...]
    outputs: dict[str, TensorDraft]
    cases: list[dict[str, Any]] = field(default_factory=list)

    def text_of(self, key: str) -> list[SourceLine]:
        """Return the lines of the text ``key`` ("reference" or "baseline"). The first lines assign the
        integer parameters that are not dims."""
        lines: tuple[SourceLine, ...] | None = getattr(self.function, key)
        fixed = {n: v for n, v in self.function.sizes.items() if n not in self.dims}
        return (
            [SourceLine(f"{n} = {v}", self.function.line) for n, v in fixed.items()] + list(lines)
            if lines
            else []
        )

    def __str__(self) -> str:
        parts = [
            f"name: {self.name}",
            _prose("summary", self.function.summary),
            f"dims: {{{', '.join(f'{dim}: {text}' for dim, text in self.dims.items())}}}",
            *_entries("inputs", self.inputs),
            *([f"constants: {{{constants}}}"] if (constants := self._constants()) else []),
            *([f"static: [{', '.join(self.static)}]"] if self.static else []),
            *_entries("outputs", self.outputs),
        ]
        parts += [line for note in self.function.notes for line in _comment(note.text)]
        for key in TEXTS:
            if lines := self.text_of(key):
                parts += [f"{key}: |", *(f"  {line.text}".rstrip() for line in lines)]
        return "\n".join([*parts, "cases:", *_table(self.cases), "accept: {speedup: 1.0}\n"])

    def notes(self) -> list[str]:
        """Return the notes as remarks for the user. Each remark begins with the line of the user's file that
        it is about."""
        remarks = ((n.number, "; ".join(filter(None, [n.text, n.remedy]))) for n in self.function.notes)
        return [f"{self.function.path}:{number}: {text}".replace("\n", " ") for number, text in remarks]

    def spec(self, check: bool = False) -> Spec:
        """Load the draft as a spec. If the draft is not a valid spec, raises ScaffoldError, which names a
        line of the user's file."""
        from coda_agent.verifier.apart import check_reference
        from coda_agent.verifier.spec.file import SpecError, of_text
        from coda_agent.verifier.spec.model import Spec

        text = str(self)
        try:
            return of_text(
                Path(f"{self.name}.yaml"), text, Spec, check_reference if check else lambda spec: None
            )
        except SpecError as error:
            raise self._objected(text.split("\n"), error.line or 1, error.message) from None

    def fail(self, message: str, key: str = "", line: int | None = None) -> ScaffoldError:
        """Return an error that names a line of the user's file. By default, this is the line of the
        function's ``def``. If ``key`` ("reference" or "baseline") and ``line`` are given, it is the origin of
        line ``line`` in the text ``key``."""
        lines = self.text_of(key) if key in TEXTS else []
        number = lines[line - 1].number if line and line <= len(lines) else self.function.line
        return ScaffoldError(f"{self.function.path}:{number}: {message}")

    def rows(self) -> frozenset[str]:
        """Return the dims that count rows. A dim counts rows if at least two tensors have it as their first
        axis, and no tensor has it as another axis. If no dim counts rows, return the first dim."""
        from coda_agent.verifier.numerics.sizes import row_dims

        return row_dims(self.spec()) or frozenset([next(iter(self.dims))])

    def heads(self) -> set[str]:
        """Return the dims that count blocks of columns, for example the number of heads. A dim counts blocks
        if every shape multiplies the dim by a static dim, or by a number of at least ``BLOCK``."""
        extents = [d for e in [*self.inputs.values(), *self.outputs.values()] for d in e.shape]
        products, static = [term for d in extents for term in d.terms], set(self.static)
        single = {n for m, number in products if number < BLOCK and not static & {*m} for n in m}
        return {*self.dims} - static - single

    def _objected(self, text: list[str], line: int, message: str) -> ScaffoldError:
        for key in TEXTS:
            inside = line - 1 - text.index(f"{key}: |") if f"{key}: |" in text else 0
            if 0 < inside <= len(self.text_of(key)):
                return self.fail(message, key, inside)
        wrong = text[line - 1].strip()
        return self.fail(message if wrong.endswith("|") else f"{message} (in the spec: {wrong})")

    def _constants(self) -> str:
        return ", ".join(f"{name}: {_number(value)}" for name, value in self.function.constants.items())


def _prose(key: str, text: str) -> str:
    if PLAIN.fullmatch(text) and len(text) <= WRAP:
        return f"{key}: {text}"
    return f"{key}: >-\n" + textwrap.indent(textwrap.fill(text, WRAP), "  ")


def _comment(text: str) -> list[str]:
    prose, _, code = text.partition("\n")
    lines = textwrap.wrap(prose, WRAP - 2, break_on_hyphens=False) + [f"  {code}"] * bool(code)
    return [f"# {line}" for line in lines]


def _number(value: float) -> str:
    mantissa, e, exponent = repr(value).partition("e")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}e{int(exponent)}" if e else mantissa


def _entries(kind: str, entries: Mapping[str, TensorDraft]) -> list[str]:
    """Return the lines of a section: its name, then one line per entry, in aligned columns."""
    shapes = {name: f"[{', '.join(map(str, e.shape))}]," for name, e in entries.items()}
    wide = max(map(len, shapes.values())), max(map(len, entries)) + 1
    return [f"{kind}:"] + [
        f"  {name + ':':{wide[1]}} {{shape: {shapes[name]:{wide[0]}} dtype: {e.dtype}"
        + "".join(f", {key}: {text}" for key, text in (("init", e.init), ("domain", e.domain)) if text)
        + "}"
        for name, e in entries.items()
    ]


def _table(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = [key for key in cases[0] if key != "bench"]
    wide = {key: max(len(f"{case[key]},") for case in cases) for key in columns[:-1]}
    rows = []
    for case in cases:
        cells = [f"{key}: {f'{case[key]},':{wide.get(key, 0)}}" for key in columns]
        bench = f" bench: {case['bench']}" if "bench" in case else ""
        rows.append(f"  - {{{' '.join(cells)}{bench}".rstrip(",") + "}")
    return rows
