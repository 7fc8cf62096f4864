"""Compare finishing kernels that start early with the same kernels launched in the ordinary way:
``python -m benchmarks.early_launch FILE [--cases decode,1B] [KERNEL ...]``, on an H100.

A finishing kernel is a vector kernel after a GEMM. In the early version of a kernel, the finishing kernel
starts before the GEMM ends, and then waits for the GEMM. By default the command measures all accepted kernels
with a finishing kernel, with the schedules in their reports. The early and the ordinary version are
interleaved in one process, from a cold L2, and must give bitwise equal outputs. The GEMMs of the two versions
differ only in names. The table has the ordinary version's time over the early version's time. As a control,
the early version also runs as a second arm, and the table compares the times of these two equal arms.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.lowered import Lowered
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import by_step
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier.gpu.benchmark import milliseconds, rotating, timed
from coda_agent.verifier.gpu.telemetry import device
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.report import Accepted, Timing
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.statistics import ratio
from coda_agent.verifier.timing import Arm

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "generated_kernels"
EARLY, AGAIN, ORDINARY = "early", "early, again", "ordinary"
ROUNDS, LONGEST, SETS = 200, 4.0, 2


def names() -> list[str]:
    """The accepted kernels that have a finishing kernel."""
    paths = sorted(KERNELS.glob("*.program.json"))
    stems = [path.name.removesuffix(".program.json") for path in paths]
    programs = {stem: accepted(stem)[1] for stem in stems if not stem.endswith(".raw")}
    return [s for s, program in programs.items() if lower(program, early=True) != lower(program, early=False)]


def accepted(name: str) -> tuple[Spec, Program]:
    """An accepted kernel's spec and program."""
    spec = load(ROOT / "specs" / f"{name}.yaml", check=False)
    return spec, Program.from_json((KERNELS / f"{name}.program.json").read_text(), spec.signature())


@dataclass(frozen=True)
class ChosenLaunch(KernelSource):
    """A kernel whose finishing kernels start early if ``early`` is true."""

    early: bool = True

    @property
    def lowered(self) -> Lowered:
        return lower(self.program, early=self.early)


def measured(spec: Spec, program: Program, timing: Timing) -> dict[str, Any]:
    """Return the samples of all arms in milliseconds, and the GPU's conditions. Raises ValueError if the two
    versions of the kernel differ in any bit of an output."""
    kernel = ChosenLaunch(program, by_step(timing.schedules))
    plans = {
        EARLY: Plan(kernel, timing.sizes),
        ORDINARY: Plan(replace(kernel, early=False), timing.sizes),
    }
    sets = [draw(spec, timing.sizes, seed, device="cuda") for seed in range(SETS)]
    outputs = {name: [plan.outputs() for _ in sets] for name, plan in plans.items()}

    def arm(name: str, plan: str) -> Arm:
        calls = [partial(plans[plan].run, *pair) for pair in zip(sets, outputs[plan], strict=True)]
        return Arm(name, rotating(calls))

    arms = [arm(EARLY, EARLY), arm(ORDINARY, ORDINARY), arm(AGAIN, EARLY)]
    samples, conditions = timed(arms, ROUNDS, longest=LONGEST)
    torch.cuda.synchronize()
    for early, late in zip(outputs[EARLY], outputs[ORDINARY], strict=True):
        different = [n for n in early if not torch.equal(words(early[n]), words(late[n]))]
        if different:
            raise ValueError(f"{spec.name}, case {timing.case}: {', '.join(different)} differ")
    return {"times": {name: milliseconds(s) for name, s in samples.items()}, "conditions": conditions}


def words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def row(name: str, found: Mapping[str, Mapping[str, Any]], cases: Sequence[str]) -> str:
    """A kernel's line of the table."""

    def said(case: str, arm: str) -> str:
        if case not in found:
            return ""
        gain = ratio(found[case]["times"][arm], found[case]["times"][EARLY])
        return f"{gain.estimate:.3f} [{gain.low:.3f}, {gain.high:.3f}]"

    cells = [said(case, arm) for arm in (ORDINARY, AGAIN) for case in cases]
    return f"| `{name}` | {' | '.join(cells)} |"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("kernels", nargs="*")
    parser.add_argument("--cases", default="decode,1B")
    given = parser.parse_args()
    cases, found = given.cases.split(","), dict[str, Any]()
    where = device() | {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    for name in given.kernels or names():
        report = Accepted.model_validate_json((KERNELS / f"{name}.report.json").read_text())
        timings = [timing for timing in report.timings if timing.case in cases]
        found[name] = {timing.case: measured(*accepted(name), timing) for timing in timings}
        write_atomic(given.file, json.dumps({"where": where, "kernels": found}, indent=1))
        print(row(name, found[name], cases), flush=True)


if __name__ == "__main__":
    main()
