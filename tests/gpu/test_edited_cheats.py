"""Tests on an H100: each cheat in edited CuTeDSL fails at its expected gate; the honest text passes."""

from __future__ import annotations

import pytest
from cheats.corpus import Cheat, Contained
from cheats.raw.games import GAMES
from cheats.raw.twin import TWIN

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.gpu.benchmark import Benchmark, score
from coda_agent.verifier.gpu.checks import KernelCase, numerics, stability
from coda_agent.verifier.worker import Worker

# No size is a multiple of a tile, and the number of rows is odd. The cheats' comments refer to these sizes.
SIZES = {"M": 521, "K": 520, "N": 776}
RACE = Benchmark(arms=(), rounds=12)


def failed(text: str) -> tuple[str, Failed] | None:
    """Return the first gate that an edited text fails, and the failure; or None if it passes all gates."""
    job = KernelCase(TWIN.spec, KernelSource(TWIN.program, edited=text), "ragged", SIZES, ({0: PROBES[1]},))
    gates = (("numerics", numerics, job), ("stability", stability, job), ("benchmark", score, (job, RACE)))
    with Worker() as worker:
        for gate, task, argument in gates:
            try:
                worker.ask(task, argument, patience=300.0)
            except Failed as reason:
                return gate, reason
    return None


def test_the_honest_twin_passes() -> None:
    assert failed(TWIN.source) is None


@pytest.mark.parametrize("cheat", GAMES, ids=lambda cheat: cheat.name)
def test_a_game_is_lost(cheat: Cheat) -> None:
    found = failed(cheat.source)
    assert found is not None and not isinstance(cheat.ends, Contained)
    gate, reason = found
    assert gate == cheat.ends.gate and reason.code in cheat.ends.codes, f"{gate}: {reason.code}: {reason}"
    assert cheat.ends.says in reason.message
