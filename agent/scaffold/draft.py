"""A draft of a spec. It is written as YAML in the layout of the shipped specs, and read back by the
loader."""

from __future__ import annotations

import re
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.agent.scaffold.function import Function, ScaffoldError, SourceLine
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.system.files import write_atomic

if TYPE_CHECKING:
    from coda_agent.verifier.spec.model import Spec

TEXTS = ("reference", "baseline")
WRAP = 100
PLAIN = re.compile(r"[A-Z][\w ,.;()'/+-]*")  # text that needs no quotes in YAML


class TensorDraft(NamedTuple):
    shape: tuple[Dim, ...]
    dtype: str
    init: str = ""
    domain: str = ""


@dataclass
class SpecDraft:
    """A draft of a spec. ``dims``: descriptions of the dims. ``static``: the static dims."""

    name: str
    function: Function
    inputs: dict[str, TensorDraft]
    dims: dict[str, str]
    static: tuple[str, ...]
    outputs: dict[str, TensorDraft]
    cases: list[dict[str, Any]] = field(default_factory=list)

    def text_of(self, key: str) -> list[SourceLine]:
        """The lines of the reference or baseline (``key``). Before them come assignments of integer
        parameters that are not dims."""
        lines: tuple[SourceLine, ...] | None = getattr(self.function, key)
        fixed = {n: s.value for n, s in self.function.sizes.items() if n not in self.dims}
        return (
            [SourceLine(f"{n} = {v}", self.function.line) for n, v in fixed.items()] + list(lines)
            if lines
            else []
        )

    def __str__(self) -> str:
        parts = [
            f"name: {self.name}",
            _prose("summary", self.function.summary),
            f"dims: {{{', '.join(f'{dim}: {words}' for dim, words in self.dims.items())}}}",
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
        """Remarks for the owner of the file."""
        told = ((n.number, "; ".join(filter(None, [n.text, n.remedy]))) for n in self.function.notes)
        return [f"{self.function.path}:{number}: {words}".replace("\n", " ") for number, words in told]

    def spec(self, check: bool = False) -> Spec:
        """Load the draft as a spec. If the loader objects, raises ScaffoldError, which names the user's
        line."""
        from coda_agent.verifier.loading import load
        from coda_agent.verifier.spec.file import SpecError

        text = str(self)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / f"{self.name}.yaml"
            write_atomic(path, text)
            try:
                return load(path, check=check)
            except SpecError as error:
                raise self._objected(text.split("\n"), error.line or 1, error.message) from None

    def fail(self, message: str, key: str = "", line: int | None = None) -> ScaffoldError:
        """An error at the line of the user's file that produced line ``line`` of the text ``key``; by default
        at the function's def."""
        lines = self.text_of(key) if key in TEXTS else []
        number = lines[line - 1].number if line and line <= len(lines) else self.function.line
        return ScaffoldError(f"{self.function.path}:{number}: {message}")

    def rows(self) -> frozenset[str]:
        """The dims that count rows. Such a dim is the first axis of at least two tensors, and never another
        axis. If there is none, the draft's first dim."""
        from coda_agent.verifier.numerics.sizes import row_dims

        return row_dims(self.spec()) or frozenset([next(iter(self.dims))])

    def heads(self) -> set[str]:
        """The dims that appear only in products with static dims, for example a number of heads."""
        extents = [d for e in [*self.inputs.values(), *self.outputs.values()] for d in e.shape]
        products = [set(m) for d in extents for m, _ in d.terms]
        static = set(self.static)
        return {n for n in self.dims if n not in static and all(m & static for m in products if n in m)}

    def _objected(self, text: list[str], line: int, message: str) -> ScaffoldError:
        for key in TEXTS:
            inside = line - 1 - text.index(f"{key}: |") if f"{key}: |" in text else 0
            if 0 < inside <= len(self.text_of(key)):
                return self.fail(message, key, inside)
        said = text[line - 1].strip()
        return self.fail(message if said.endswith("|") else f"{message} (in the spec: {said})")

    def _constants(self) -> str:
        return ", ".join(f"{name}: {_number(value)}" for name, value in self.function.constants.items())


def _prose(key: str, text: str) -> str:
    if PLAIN.fullmatch(text) and len(text) <= WRAP:
        return f"{key}: {text}"
    return f"{key}: >-\n" + textwrap.indent(textwrap.fill(text, WRAP), "  ")


def _comment(text: str) -> list[str]:
    words, _, code = text.partition("\n")
    lines = textwrap.wrap(words, WRAP - 2, break_on_hyphens=False) + [f"  {code}"] * bool(code)
    return [f"# {line}" for line in lines]


def _number(value: float) -> str:
    mantissa, e, exponent = repr(value).partition("e")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}e{int(exponent)}" if e else mantissa


def _entries(kind: str, entries: Mapping[str, TensorDraft]) -> list[str]:
    """The lines of a section: its name, then one line per entry, in aligned columns."""
    shapes = {name: f"[{', '.join(map(str, e.shape))}]," for name, e in entries.items()}
    wide = max(map(len, shapes.values())), max(map(len, entries)) + 1
    return [f"{kind}:"] + [
        f"  {name + ':':{wide[1]}} {{shape: {shapes[name]:{wide[0]}} dtype: {e.dtype}"
        + "".join(f", {key}: {words}" for key, words in (("init", e.init), ("domain", e.domain)) if words)
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
