"""Make mutants of a program, with one mistake each. A mutant is identified by its program, kind and seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.campaign.graph import Graph, Skip
from benchmarks.campaign.mutations import clamps, conditions, landmarks, operands, sizes, terms
from benchmarks.campaign.mutations.site import Edit, Site
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.spec.model import Spec

KINDS: dict[str, Edit] = (
    clamps.KINDS | terms.KINDS | conditions.KINDS | sizes.KINDS | operands.KINDS | landmarks.KINDS
)
TRIES = 40  # attempts before a kind counts as not applicable


@dataclass(frozen=True)
class ProgramMutant:
    """A program with one mistake. ``aims``: the values that the mistake's conditions test (see
    ``site.Site``). ``frozen``: versions of the mutant in which the condition tests fixed sizes instead of the
    actual sizes. The fixed sizes are those of a case, or sizes at which the condition changes."""

    seed: int
    words: str
    program: Program
    aims: Sequence[tuple[int, float]]
    frozen: Sequence[Program]


def mutant(
    spec: Spec, program: Program, scales: Sequence[float], kind: str, seed: int
) -> ProgramMutant | None:
    """The mutant of this kind and seed; None if the kind does not apply to the program."""
    for attempt in range(TRIES):
        stream = f"{spec.name}/{kind}/{seed}/{attempt}"
        try:
            made, site, words = _edited(spec, program, scales, kind, stream)
        except (Skip, ProgramError):
            continue
        frozen = list(_frozen(spec, program, scales, kind, stream, site)) if "size" in kind else []
        return ProgramMutant(seed, words, made, tuple(site.aims), tuple(frozen))
    return None


def _edited(
    spec: Spec,
    program: Program,
    scales: Sequence[float],
    kind: str,
    stream: str,
    at: Mapping[str, int] | None = None,
) -> tuple[Program, Site, str]:
    site = Site(spec, Graph(program, at), Random(stream), scales)
    words = KINDS[kind](site)
    return site.graph.finish(), site, words


def _frozen(
    spec: Spec, program: Program, scales: Sequence[float], kind: str, stream: str, site: Site
) -> Iterator[Program]:
    """Yield versions of the mutant whose condition tests fixed sizes: each case's sizes, and the sizes at
    which the condition changes."""
    if kind == "size: other dim":  # not needed, because this mistake applies at nearly all sizes
        return
    known = set[str]()
    for at in (*site.sizes, *(case.sizes for case in spec.cases)):
        try:
            made = _edited(spec, program, scales, kind, stream, at)[0]
        except (Skip, ProgramError):
            continue
        if (text := made.to_json()) not in known:
            known.add(text)
            yield made
