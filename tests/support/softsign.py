"""The proposed primitive softsign, device functions to judge, and helpers that return the gates' verdicts."""

from __future__ import annotations

from pathlib import Path

from spec_files import write_changed

from coda_agent.verifier.loading import load
from coda_agent.verifier.proposals import proposal, proposal_gates
from coda_agent.verifier.proposals.proposal import Proposal
from coda_agent.verifier.report import Accepted, Checked, Rejected
from coda_agent.verifier.spec.model import Spec

SOFTSIGN = """\
name: softsign
summary: From -1 to 1, without an exponential.
arguments: [x]
reference: x / (1 + abs(x))
domain: {x: [-inf, inf]}
example: y = softsign(t)
"""
EXACT = '''\
def softsign(x: Any) -> Any:
    """``x / (1 + abs(x))``. One division."""
    return choose(magnitude(x) > SOFTSIGN_LARGE, choose(x > 0.0, 1.0, -1.0), x / (1.0 + magnitude(x)))
'''
FAST = '''

def softsign_fast(x: Any) -> Any:
    """By a reciprocal."""
    return x * _softsign_weight(x)


def _softsign_weight(x: Any) -> Any:
    weight = 1.0 + magnitude(x)
    return cute.arch.rcp_approx(weight)
'''
CONSTANT = "SOFTSIGN_LARGE = 2.0**64\n\n\n"
GOOD = CONSTANT + EXACT + FAST
NAIVE = 'def steep(x: Any) -> Any:\n    """Naive."""\n    return cute.math.log(1.0 + cute.math.exp(x + x))\n'


def write(directory: Path, old: str = "", new: str = "") -> Path:
    return write_changed(directory / "softsign.yaml", SOFTSIGN, old, new)


def proposed(directory: Path, old: str = "", new: str = "") -> tuple[Proposal, Spec]:
    """Return a proposal, and the spec of its frame (the toy kernel in which the gates test the primitive)."""
    made = proposal.load(write(directory, old, new))
    frame = directory / "frame.yaml"
    frame.write_text(made.frame)
    return made, load(frame)


def verdict(made: tuple[Proposal, Spec], source: str) -> Checked | Rejected:
    found = proposal_gates.check(*made, source).report
    assert not isinstance(found, Accepted)
    return found
