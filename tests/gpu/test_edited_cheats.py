"""On an H100: a game that edited CuTeDSL plays is lost at the gate that it names; the honest text passes."""

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
from coda_agent.verifier.gpu.worker import Worker

# No multiples of a tile, and an odd number of rows: what the games say of sizes is meant of these.
SIZES = {"M": 521, "K": 520, "N": 776}
RACE = Benchmark(arms=(), rounds=12)


def failed(text: str) -> tuple[str, Failed] | None:
    """The first gate that an edited text does not pass, and why."""
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
