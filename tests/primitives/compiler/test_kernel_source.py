"""Test that a schedule in a kernel's program takes precedence over a chosen schedule."""

from __future__ import annotations

from kernels import BACKWARD

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.schedule import Schedule


def test_the_programs_own_schedule_comes_before_a_chosen_one() -> None:
    own, chosen = Schedule(128, 160), Schedule(256, 128, False)
    program = BACKWARD.program._replace(schedule={0: own})
    assert KernelSource(program, {0: chosen, 1: chosen}).fixed == {0: own, 1: chosen}
