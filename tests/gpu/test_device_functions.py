"""Tests on an H100: an author's device functions run at the same points at which the check without a GPU
evaluates these functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda_agent.verifier.loading import load
from coda_agent.verifier.proposals import proposal_gates
from coda_agent.verifier.proposals.proposal import Proposal
from coda_agent.verifier.proposals.proposal_points import FAMILIES
from coda_agent.verifier.report import Measured, Rejected
from coda_agent.verifier.spec.model import Spec

SOFTSIGN = '''\
def softsign(x: Any) -> Any:
    """``x / (1 + abs(x))``."""
    return x / (1.0 + magnitude(x))


def softsign_fast(x: Any) -> Any:
    """By a reciprocal."""
    return x * cute.arch.rcp_approx(1.0 + magnitude(x))
'''


def proposed(directory: Path, reference: str, **more: object) -> tuple[Proposal, Spec]:
    made = Proposal.model_validate(
        {"name": "softsign", "summary": "", "arguments": ("x",), "reference": reference, **more}
    )
    frame = directory / "frame.yaml"
    frame.write_text(made.frame)
    return made, load(frame)


def test_good_functions_pass_on_the_gpu(tmp_path: Path) -> None:
    # 1 / (1 + abs(x)) must not be a denormal number, which the GPU's reciprocal replaces by zero
    made, spec = proposed(tmp_path, "x / (1 + abs(x))", domain={"x": (-1e30, 1e30)})
    checked = proposal_gates.check(made, spec, SOFTSIGN).report
    assert checked.status == "checked", checked
    found = proposal_gates.measure(made, spec, SOFTSIGN)
    assert isinstance(found, Measured), found
    assert [g.gate for g in found.gates] == ["numerics", "stability"]
    outputs = found.gates[0].figures["frame"]["outputs"]
    assert set(outputs) == set(FAMILIES) and max(o["ulps"] for o in outputs.values()) <= made.ulps
    assert found.identity.same(checked.identity)


@pytest.mark.parametrize(
    ("reference", "exact"),
    [
        ("tanh(x) * 1.0 + 0 * x", "tanh_fast(x)"),  # MUFU.TANH is not exact
        (
            "1 / (2.0**-127 + abs(x))",
            "cute.arch.rcp_approx(magnitude(x) + 5.877471754111438e-39)",
        ),  # the GPU's reciprocal treats denormals as zero
    ],
)
def test_what_only_a_gpu_tells(tmp_path: Path, reference: str, exact: str) -> None:
    """The check without a GPU accepts these functions, because it assumes that each library function rounds
    only once. The check on a GPU finds their larger errors."""
    made, spec = proposed(tmp_path, reference, domain={"x": (-1024.0, 1024.0)})
    source = f'def softsign(x: Any) -> Any:\n    """Page."""\n    return {exact}\n'
    assert proposal_gates.check(made, spec, source).report.status == "checked"
    found = proposal_gates.measure(made, spec, source)
    assert isinstance(found, Rejected) and (found.gate, found.code) == ("numerics", "numerics"), found
    assert "on the GPU" in found.message
