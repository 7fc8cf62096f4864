"""Primitives that were added by a proposal (``specs/primitives/``), for tests of the whole vocabulary."""

from __future__ import annotations

from checkout import ROOT

from coda_agent import primitives
from coda_agent.verifier.proposals.proposal import Proposal, load

VALUES = ("{0}", "{1}", "{1}")
PROPOSED = ROOT / "specs" / "primitives"
MERGED = [
    p for path in sorted(PROPOSED.glob("*.yaml")) if (p := load(path, new=False)).name in primitives.__all__
]


def calls(arity: int) -> tuple[str, ...]:
    """Return the text of one call for each primitive of ``MERGED`` that takes ``arity`` arguments. The text
    clamps the placeholders ``{0}`` and ``{1}`` to the primitive's domain."""
    return tuple(
        f"{p.name}({', '.join(_kept(p, i, VALUES[i]) for i in range(arity))})"
        for p in MERGED
        if len(p.arguments) == arity
    )


def _kept(proposal: Proposal, position: int, value: str) -> str:
    low, high = proposal.interval(proposal.arguments[position])
    return f"maximum(minimum({value}, {min(high, max(low, 0) + 3)!r}), {max(low, min(high, 0) - 3)!r})"
