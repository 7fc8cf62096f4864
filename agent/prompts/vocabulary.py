"""The prompt's section on the vocabulary: one paragraph per primitive, made from its docstring."""

from __future__ import annotations

import inspect
import re
from textwrap import fill

from coda_agent import primitives

FAMILIES = ("tiles", "elementwise", "vectors", "reductions", "stateful")
FORM = re.compile(  # a primitive's docstring, with each paragraph joined to one line
    r"(?P<summary>.+?)\n\nShapes: (?P<shapes>.+) Dtypes: (?P<dtypes>.+) Cost: (?P<cost>.+)"
    r"[ \n]Paper: family (?P<number>\d), (?P<family>\w+)\.\n\n(?P<example>    .+\n    .+)",
    re.DOTALL,
)
# usual shapes and dtypes, which the prompt omits
EVERYWHERE, SIMPLE = "as for operators.", ("fp32.", "any to fp32.")
WIDTH = 110
ALIKE = re.compile(r",? (Final after its step,|else) as \w+")  # a reference to another reduction's docstring
UNIT = re.compile(r"( an)? instructions? an element|(?<=\d) of them")


def formed(docstring: str) -> re.Match[str] | None:
    """The parts of a docstring; None if the docstring does not match ``FORM``."""
    return FORM.fullmatch(re.sub(r"(?<!\n)\n(?![\n ])", " ", docstring))


def vocabulary() -> str:
    """The section's text: all primitives by family, with one paragraph per primitive."""
    parts = ["# Vocabulary"]
    for family in FAMILIES:
        module = f"coda_agent.primitives.lang.ops.{family}"
        names = [name for name in primitive_names() if getattr(primitives, name).__module__ == module]
        parts.append("\n".join([f"## {family.capitalize()}\n", *map(_paragraph, names)]))
    return "\n\n".join(parts)


def primitive_names() -> list[str]:
    """The names of all primitives. Each primitive has a ``page``."""
    return [name for name in primitives.__all__ if name != "kernel"]


def page(name: str) -> str:
    """A primitive's call and docstring."""
    return f"### {_call(name)}\n\n{inspect.getdoc(getattr(primitives, name))}"


def _paragraph(name: str) -> str:
    """A primitive's docstring in short: without the example and without the usual shapes and dtypes."""
    found = formed(inspect.getdoc(getattr(primitives, name)) or "")
    assert found is not None, f"{name}: its docstring is not in the vocabulary's form"
    said = [f"- `{_call(name)}`: {found['summary']}"]
    said += [found["shapes"]] if found["shapes"] != EVERYWHERE else []
    said += [f"Dtypes: {found['dtypes']}"] if found["dtypes"] not in SIMPLE else []
    said += [f"Cost: {UNIT.sub('', found['cost'])}"]
    text = re.sub(r"[.;]+(?=\.|$)", "", ALIKE.sub("", " ".join(said))).replace("``", "`")
    return fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _call(name: str) -> str:
    return f"{name}({', '.join(inspect.signature(getattr(primitives, name)).parameters)})"
