"""Damage the bytes, lines or values of valid files. The same seed does the same damage."""

from __future__ import annotations

import json
import math
import random
from copy import deepcopy
from typing import Any

Json = Any

# values that a field should not have
VALUES: list[Json] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 10**18, 10**400),
    *(0.5, -1.0, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf),
    *("", " ", "0", "-1", "nan", "/dev/null", "../x", "\x1b]0;x\x07\x1b[2J", "[/x]", "{0}", "%s", "\x00"),
    *("\ud800", "\u202egnp", "\u2028", "é" * 300, "x" * 5000, "1e999", "2026-11-22", "\r\n"),
    *([], {}, [[]], [None], {"": None}, {"status": "accepted"}, [1, 2, 3], ["a"] * 100),
]
SCRAPS = [
    *(b"\x00", b"\xff\xfe", b"\x1b[31m", b"\r", b"\xed\xa0\x80", b"[" * 3000, b"{" * 50, b"]", b"}", b'"'),
    *(b":", b",", b"-", b"NaN", b"Infinity", b"9" * 5000, b"1e999", b"0x" + b"f" * 6000, b"&a "),
    *(b"*a", b"!!", b"? {a: 1}\n: "),
    *(b"\n", b"\t", b"'", b"# ", b"@", b"<<: ", b"- - - ", b"(" * 300, b"~" * 300, b"lambda: ", b"__class__"),
]
DEEP = 400  # levels of nesting


class Damage:
    """Random damage to valid data. The seed determines the damage."""

    def __init__(self, seed: str):
        self.random = random.Random(seed)

    def value(self, sound: Json) -> Json:
        """Return a copy of a JSON value with one to three changes."""
        tree = [deepcopy(sound)]
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            self._change(tree)
        return tree[0]

    def json(self, sound: Json) -> bytes:
        """Return ``value(sound)`` as JSON bytes, or sometimes the JSON of ``sound`` with damaged bytes."""
        if self.random.random() < 0.15:
            return self.bytes(json.dumps(sound).encode())
        return json.dumps(self.value(sound)).encode()

    def bytes(self, sound: bytes) -> bytes:
        """Return a copy of ``sound`` that is cut off, overwritten or rearranged, or in which bytes are
        inserted or removed."""
        start = self.random.randrange(len(sound) + 1)
        end = min(len(sound), start + self.random.choice((1, 1, 4, 40, 400)))
        scrap = self.random.choice(SCRAPS)
        return self.random.choice(
            (
                sound[:start],
                sound[:start] + scrap + sound[start:],
                sound[:start] + scrap + sound[end:],
                sound[:start] + sound[end:],
                sound[:end] + sound[start:],
                sound[:start] + self.random.randbytes(end - start) + sound[end:],
            )
        )

    def text(self, sound: str) -> str:
        """Return the text with damaged lines, or the text decoded from damaged bytes of the original."""
        if self.random.random() < 0.5:
            return self.bytes(sound.encode()).decode("utf-8", "replace")
        return self.lines(sound)

    def lines(self, sound: str) -> str:
        """Return a copy of ``sound`` with one to three changes. A change removes, doubles or indents a line,
        swaps two lines, or replaces a word."""
        lines = sound.split("\n")
        for _ in range(self.random.choice((1, 1, 2, 3))):
            at, other = (self.random.randrange(len(lines)) for _ in range(2))
            match self.random.randrange(6):
                case 0:
                    del lines[at : at + 1]
                    lines = lines or [""]
                case 1:
                    lines.insert(other, lines[at])
                case 2:
                    lines[at], lines[other] = lines[other], lines[at]
                case 3:
                    lines[at] = self.random.choice(("  ", "    ", "\t", "- ")) + lines[at]
                case _:
                    lines[at] = self._word(lines[at])
        return "\n".join(lines)

    def _word(self, line: str) -> str:
        words = line.split(" ")
        scrap = self.random.choice((*map(str, VALUES[:27]), *VALUES[27:47]))
        words[self.random.randrange(len(words))] = str(scrap)
        return " ".join(words)

    def _change(self, tree: list[Json]) -> None:
        places = list(_places(tree))
        holder, key = self.random.choice(places)
        source, other = self.random.choice(places)
        match self.random.randrange(8):
            case 0 if holder is not tree:
                del holder[key]
            case 1:
                holder[key] = deepcopy(source[other])  # a value from another place
            case 2 if isinstance(holder, dict):
                holder[f"{key}{self.random.choice(('x', '/2', '0', chr(27)))}"] = deepcopy(holder[key])
            case 3 if isinstance(holder, dict):
                holder[str(self.random.choice(VALUES))] = holder.pop(key)
            case 4 if isinstance(holder, list) and holder is not tree:
                holder[key:key] = [deepcopy(holder[key])] * self.random.choice((1, 2, 50))
            case 5 if self.random.random() < 0.2:
                for _ in range(DEEP):
                    holder[key] = [holder[key]]
            case 6 if type(holder[key]) in (int, float):
                holder[key] = self.random.choice((-holder[key], holder[key] * 10**9, 0, holder[key] + 1))
            case _:
                holder[key] = self.random.choice(VALUES)


def _places(node: Json) -> Any:
    """Yield the place of every value: its container, and its key or index there."""
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        yield node, key
        if isinstance(value, dict | list):
            yield from _places(value)
