"""Write the message that asks for an improvement of an accepted kernel, and read the schedules in the
answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coda_agent.agent.prompts.markdown_fences import last
from coda_agent.primitives.compiler.roofline import roofline
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import CLUSTERS, SWIZZLES, TILES, Schedule, by_step
from coda_agent.verifier.decision import BASELINE
from coda_agent.verifier.report import CANDIDATE, Accepted, Timing
from coda_agent.verifier.spec.model import Spec

HOW = f"""\
Change the program (fuse differently, use fewer or cheaper operations, compute a value once and reuse it), its
schedules, or both. Answer with the whole kernel file in one ```python block. Schedules are tuned for you
unless you set them, in one ```json block that maps steps to fields, such as
{{"0": {{"tile_m": 128, "tile_n": 256, "pingpong": false}}}}:
- tile_m, tile_n, pingpong together, one of {", ".join(str(tile) for tile in sorted(TILES))};
- cluster_m, cluster_n, one of {", ".join(map(str, CLUSTERS))};
- swizzle, one of {", ".join(map(str, SWIZZLES))};
- evict_loads, evict_stores: mark the epilogue's loads or stores as the first to leave the L2;
- deep: give some of the epilogue's shared memory to the mainloop, for one more stage;
- split: clusters of four leave some SMs idle; a second launch gives these SMs their share of the work.
A change is kept only if it is faster than the current kernel in at least one case and slower in none. Both
are measured in the same run; faster means that the lower end of the speedup's interval is above 1.
"""


BOUND = """\
The bound of each step, by the H100's datasheet. Shares are of the whole bound (the time that no version can
beat), not of the measured time."""


def words(spec: Spec, report: Accepted, program: Program, rounds: int) -> str:
    """The message after an acceptance: the measured times, each step's bound, and the compiler's resource
    report."""
    parts = [
        f"Accepted: it is right, and faster than {BASELINE}. {rounds} round(s) are left to make it faster.",
        *account(spec, report, program),
        HOW,
    ]
    return "\n\n".join(part.strip() for part in parts)


def account(spec: Spec, report: Accepted, program: Program) -> list[str]:
    """Paragraphs of facts about an accepted kernel's speed."""
    kernels = next(gate.figures["kernels"] for gate in report.gates if gate.gate == "compile")
    return [
        "\n".join(case_words(timing) for timing in report.timings),
        f"{BOUND}\n"
        + "\n".join(_floors(program, case.name, case.sizes) for case in spec.cases if case.bench),
        "The compiler's report:\n" + "\n".join(_resources(k) for k in kernels),
    ]


def schedules(text: str) -> dict[int, Schedule]:
    """The schedules in an answer's last ```json block, by step; empty if the answer has no such block. Raises
    ProgramError."""
    block = last(text, "json")
    if block is None:
        return {}
    try:
        found = json.loads(block)
        return by_step(_objects(found))
    except (ValueError, RecursionError) as error:
        raise ProgramError(
            "schedule", f"the ```json block must map steps to a schedule's fields: {error}"
        ) from None


def _objects(found: Any) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(found, dict) or not all(isinstance(fields, dict) for fields in found.values()):
        raise ValueError('it is not an object of objects, such as {"0": {"swizzle": 16}}')
    return found


def case_words(t: Timing) -> str:
    """The measurements of one case, on one line."""
    own = t.milliseconds[CANDIDATE]
    rivals = ", ".join(f"{r.estimate:.3f}x {arm} [{r.low:.3f}, {r.high:.3f}]" for arm, r in t.ratios.items())
    chosen = "; ".join(f"step {step}: {_fields(schedule)}" for step, schedule in t.schedules.items())
    return (
        f"- {t.case} ({', '.join(f'{d} = {n}' for d, n in t.sizes.items())}): {own:.4f} ms, "
        f"{t.roofline_milliseconds / own:.0%} of the roofline; {rivals}; {_parts(t)}tuned to {chosen}"
    )


def _parts(t: Timing) -> str:
    """Text about the time of each part of the kernel by itself; "" if no parts were timed."""
    whole = sum(t.parts.values())
    told = [f"{name} {taken:.4f} ms ({taken / whole:.0%})" for name, taken in t.parts.items()]
    return f"its parts, each by itself: {', '.join(told)}; " if told else ""


def _fields(schedule: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in schedule.items())


def _floors(program: Program, case: str, sizes: Mapping[str, int]) -> str:
    bound = roofline(program, sizes)
    steps = "; ".join(
        f"{floor.kind} of step {floor.step}: {floor.seconds / bound.seconds:.0%} of the bound, "
        f"bound by {floor.binds}, "
        f"{floor.bytes / 1e6:.1f} MB, {floor.flops / 1e9:.1f} GFLOP"
        for floor in bound.steps
    )
    return f"- {case}: {bound.seconds * 1e3:.4f} ms at best; {steps}"


def _resources(kernel: Mapping[str, Any]) -> str:
    tile = f", tile {kernel['tile']}" if kernel["tile"] else ""
    spills = f"{kernel['spill_loads']} loads and {kernel['spill_stores']} stores spilled"
    return f"- {kernel['kernel']}{tile}: {kernel['registers']} registers, {spills}, {kernel['hgmma']} HGMMA"
