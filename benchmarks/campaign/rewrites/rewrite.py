"""Write equivalent programs by applying one to four rules at random places."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from benchmarks.campaign.graph import Graph, Skip, honest
from benchmarks.campaign.rewrites import arithmetic, functions, tiles
from benchmarks.campaign.rewrites.rules import Rule
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program

RULES: dict[str, Rule] = arithmetic.RULES | functions.RULES | tiles.RULES
COMBINED = "several"
KINDS = (*RULES, COMBINED)
TRIES = 30  # after this many failed attempts per wanted rule, a kind counts as not applicable to a program


class Rewritten(NamedTuple):
    """A program that computes the same as its original."""

    words: str
    program: Program


def rewritten(name: str, kind: str, seed: int) -> Rewritten | None:
    """Rewrite the spec's accepted program, or a program of a correct kernel from the tests (``honest``).
    Return None if the rewrite applies to none of these programs. Name, kind and seed determine all random
    choices."""
    random = Random(f"{name}/{kind}/{seed}")
    programs = honest(name)
    for which in random.sample(list(programs), len(programs)):
        wanted = random.randint(2, 4) if kind == COMBINED else 1
        if made := _rewritten(programs[which], kind, wanted, random):
            return made._replace(words=f"{which}; {made.words}")
    return None


def _rewritten(program: Program, kind: str, wanted: int, random: Random) -> Rewritten | None:
    words: list[str] = []
    for _ in range(TRIES * wanted):
        rule = random.choice(list(RULES)) if kind == COMBINED else kind
        graph = Graph(program)
        try:
            said = RULES[rule](graph, random)
            program = graph.finish()
        except (Skip, ProgramError):
            continue
        words.append(f"{rule} ({said})")
        if len(words) == wanted:
            return Rewritten("; ".join(words), program)
    return None
