"""An endless supply of hostile sources: the cheats' lines in other places and wrappings. No two texts are
equal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from cheats import sandbox, takeover
from cheats.corpus import Cheat, Rejection
from cheats.sandbox import BODY, KERNEL
from cheats.twins import RMSNORM

SLOW = ("timeout", "memory")  # codes of cheats that each take seconds
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Hostile(NamedTuple):
    """A hostile source. ``taken_over``: whether a child that has been taken over executes the source."""

    source: str
    taken_over: bool
    wrapping: str


def sources(seed: int) -> Iterator[Hostile]:
    """Yield sources without end. The same seed gives the same sources."""
    random = Random(seed)
    quick = [c for c in sandbox.CHEATS if not isinstance(c.ends, Rejection) or not {*SLOW} & {*c.ends.codes}]
    kernels = [lines for cheat in quick if (lines := _inserted(cheat))]
    while True:
        if random.random() < 0.6:
            yield _kernel(random.choice(kernels), random)
        else:
            yield _child(random.choice(takeover.CHEATS), random)


def _inserted(cheat: Cheat) -> str:
    """Return the lines that a cheat inserts into its honest twin, dedented. Return "" if the cheat changes a
    line of its twin."""
    honest, lines = cheat.twin.source.splitlines(), cheat.source.splitlines()
    start = next((i for i, (a, b) in enumerate(zip(honest, lines, strict=False)) if a != b), len(honest))
    more = len(lines) - len(honest)
    whole = more > 0 and honest[start:] == lines[start + more :]
    return textwrap.dedent("\n".join(lines[start : start + more])).strip("\n") if whole else ""


def _kernel(lines: str, random: Random) -> Hostile:
    """Return the kernel with hostile lines inside, above or below it."""
    wrapping, lines = _wrapped(lines, random, WRAPPINGS)
    place = random.choice(("inside", "above", "below"))
    lines = _padded(lines, random)
    if place == "inside":
        source = RMSNORM.source.replace(BODY, textwrap.indent(lines, "    ") + "\n" + BODY)
    elif place == "above":
        source = RMSNORM.source.replace(KERNEL, f"{lines}\n\n\n{KERNEL}")
    else:
        source = f"{RMSNORM.source}\n\n{lines}\n"
    return Hostile(source, False, wrapping)


def _child(cheat: Cheat, random: Random) -> Hostile:
    """Return the code that a child runs before it sends its answer. Names that the code assigns are names of
    the module."""
    lines, _, after = cheat.source.partition(RMSNORM.sent)
    wrapping, lines = _wrapped(lines, random, BLOCKS)
    return Hostile(f"{_padded(lines, random)}\n{RMSNORM.sent}{after}", True, wrapping)


def _wrapped(
    lines: str, random: Random, wrappings: dict[str, Callable[[str, Random], str]]
) -> tuple[str, str]:
    """Put up to three wrappings around ``lines``. Return the name of the outermost wrapping, and the wrapped
    lines."""
    name = "nothing"
    for _ in range(random.randint(0, 3)):
        name = random.choice(list(wrappings))
        lines = wrappings[name](lines, random)
    return name, lines


def _padded(lines: str, random: Random) -> str:
    """Put honest lines and remarks before and after ``lines``, so that no two texts are equal."""
    return f"{_padding(random)}\n{lines}\n{_padding(random)}"


def _padding(random: Random) -> str:
    made = (
        lambda: f"{_name(random)} = {random.randint(-999, 999)}",
        lambda: f"{_name(random)} = ({random.random()!r}, {random.randint(0, 9)} + 1.5)",
        lambda: f"# {' '.join(_name(random) for _ in range(random.randint(1, 12)))}",
        lambda: "",
    )
    return "\n".join(random.choice(made)() for _ in range(random.randint(1, 5)))


def _name(random: Random) -> str:
    return "".join(random.choices(LETTERS, k=random.randint(6, 12)))


def _body(head: str, lines: str, tail: str = "") -> str:
    return f"{head}\n{textwrap.indent(lines, '    ')}\n    pass\n{tail}"


BLOCKS: dict[str, Callable[[str, Random], str]] = {
    "if": lambda lines, random: _body(f"if {random.randint(1, 99)}:", lines),
    "for": lambda lines, random: _body(f"for {_name(random)} in ({random.randint(0, 9)},):", lines),
    "while": lambda lines, random: _body("while 1:", lines, "    break"),
    "finally": lambda lines, random: _body("try:", lines, f"finally:\n    {_name(random)} = 1"),
}
WRAPPINGS: dict[str, Callable[[str, Random], str]] = BLOCKS | {
    "function": lambda lines, random: _body(f"def {(n := _name(random))}():", lines, f"{n}()"),
    "class": lambda lines, random: _body(f"class {_name(random)}:", lines),
    "nested class": lambda lines, random: _body(
        f"class {_name(random)}:", _body(f"class {_name(random)}:", lines)
    ),
    "decorator": lambda lines, random: _body(
        f"def {(n := _name(random))}(function):",
        lines,
        f"    return function\n@{n}\ndef {_name(random)}(): pass",
    ),
    "lambda": lambda lines, random: f"{_name(random)} = (lambda {_name(random)}: {_expression(lines)})(1)",
    "comprehension": lambda lines, random: (
        f"{_name(random)} = [{_expression(lines)} for {_name(random)} in (1, 2)]"
    ),
    "dictionary": lambda lines, random: f"{_name(random)} = {{'{_name(random)}': {_expression(lines)}}}",
}


def _expression(lines: str) -> str:
    """Return an expression: the last value that the lines compute. If they compute none, the expression
    reaches builtins."""
    last = lines.strip().splitlines()[-1].strip()
    value = last.partition(" = ")[2]
    return value or (last if last.endswith(")") and ":" not in last else "len.__self__")
