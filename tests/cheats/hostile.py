"""Hostile sources without end: what the cheats try, in other places and wrappings, each another text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from cheats import sandbox, takeover
from cheats.corpus import Cheat, Rejection
from cheats.sandbox import BODY, KERNEL
from cheats.twins import RMSNORM

SLOW = ("timeout", "memory")  # seconds each
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Hostile(NamedTuple):
    """A source, and whether a child that has been taken over executes it."""

    source: str
    taken_over: bool
    wrapping: str


def sources(seed: int) -> Iterator[Hostile]:
    """As many as are asked for; a seed gives the same ones again."""
    random = Random(seed)
    quick = [c for c in sandbox.CHEATS if not isinstance(c.ends, Rejection) or not {*SLOW} & {*c.ends.codes}]
    kernels = [lines for cheat in quick if (lines := _inserted(cheat))]
    while True:
        if random.random() < 0.6:
            yield _kernel(random.choice(kernels), random)
        else:
            yield _child(random.choice(takeover.CHEATS), random)


def _inserted(cheat: Cheat) -> str:
    """The lines that a cheat inserts into its honest twin, dedented; empty if the cheat changes a line."""
    honest, lines = cheat.twin.source.splitlines(), cheat.source.splitlines()
    start = next((i for i, (a, b) in enumerate(zip(honest, lines, strict=False)) if a != b), len(honest))
    more = len(lines) - len(honest)
    whole = more > 0 and honest[start:] == lines[start + more :]
    return textwrap.dedent("\n".join(lines[start : start + more])).strip("\n") if whole else ""


def _kernel(lines: str, random: Random) -> Hostile:
    """The kernel with hostile lines in it or beside it."""
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
    """The code that a child runs before it sends its answer. The names it assigns are the module's."""
    lines, _, after = cheat.source.partition(RMSNORM.sent)
    wrapping, lines = _wrapped(lines, random, BLOCKS)
    return Hostile(f"{_padded(lines, random)}\n{RMSNORM.sent}{after}", True, wrapping)


def _wrapped(
    lines: str, random: Random, wrappings: dict[str, Callable[[str, Random], str]]
) -> tuple[str, str]:
    """Up to three wrappings around lines, and the outermost one's name."""
    name = "nothing"
    for _ in range(random.randint(0, 3)):
        name = random.choice(list(wrappings))
        lines = wrappings[name](lines, random)
    return name, lines


def _padded(lines: str, random: Random) -> str:
    """Honest lines and remarks before and after: no two texts are one."""
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
    """The last value that the lines compute. If they compute none, an expression that reaches builtins."""
    last = lines.strip().splitlines()[-1].strip()
    value = last.partition(" = ")[2]
    return value or (last if last.endswith(")") and ":" not in last else "len.__self__")
