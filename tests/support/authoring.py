"""Helpers for tests of the agent: specs, kernels, a scripted author, runs and invented measurements.

Programs, hashes and journals are real. Only the figures that a GPU would give are invented.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import operators
from checkout import ROOT, TESTS
from spec_files import write_changed

from coda_agent.agent.providers import Message, Question, Turn, Usage
from coda_agent.agent.run import runs
from coda_agent.agent.run.budget import Spent
from coda_agent.primitives.compiler.cubin import Resources
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.roofline import roofline
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.verifier.baselines.quack import MATMUL, OWN_TUNER
from coda_agent.verifier.decision import central, compared
from coda_agent.verifier.gates import identity
from coda_agent.verifier.gpu.checks import REPEATS
from coda_agent.verifier.loading import load
from coda_agent.verifier.measure import FEW_FLOPS, ROUTINE, SINGLE_ROW
from coda_agent.verifier.report import PROTOCOL, Accepted, Checked, Config, Gate, Measured, Rejected, Timing
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import Case
from coda_agent.verifier.spec.rules import HIDDEN, ONE_ROW
from coda_agent.verifier.timing import FEWEST

SPECS, KERNELS, RECORDINGS = ROOT / "specs", ROOT / "generated_kernels", ROOT / "agent" / "recordings"
SHIPPED = sorted(path.stem for path in SPECS.glob("*.yaml"))
# the other specs have no accepted kernel yet
ACCEPTED = [name for name in SHIPPED if (KERNELS / f"{name}.py").exists()]


def activation(folder: Path, reference: str) -> Spec:
    """Return a spec with one product, ``z = x @ w.mT`` [M, F]. Its only output is y in bf16; ``reference`` is
    the expression that computes y from z."""
    text = (SPECS / "gemm_relu2.yaml").read_text(encoding="utf-8")
    outputs, cases = text.index("outputs:"), text.index("cases:")
    lines = ["outputs:", "  y: {shape: [M, F], dtype: bf16}", "reference: |", "  z = x @ w.mT"]
    path = folder / "made.yaml"
    made = "\n".join([*lines, f"  y = {reference}", text[cases:]])
    path.write_text(text[:outputs].replace("gemm_relu2", "made") + made, encoding="utf-8")
    return load(path, check=False)


TOY = """\
name: toy
summary: Matmul with a row scale.
dims: {M: rows, K: inner, N: columns}
inputs:
  a: {shape: [M, K], dtype: bf16}
  b: {shape: [K, N], dtype: bf16, init: {normal: {std: K**-0.5}}}
  v: {shape: [M], dtype: fp32, init: {uniform: [0.5, 1.5]}}
outputs:
  c: {shape: [M, N], dtype: bf16}
reference: |
  c = (a @ b) * v[:, None]
cases:
  - {name: large, M: 4096, K: 4096, N: 4096}
  - {name: wide, M: 2048, K: 4096, N: 8192}
  - {name: ragged, M: 1000, K: 520, N: 776, bench: false}
accept: {speedup: 1.1}
"""
TOY_KERNEL = '''\
from primitives import gemm, kernel, per_row


@kernel
def toy(a, b, v):
    """The row scale rides on the gemm."""
    return {"c": gemm(a, b) * per_row(v)}
'''
UNSCALED = TOY_KERNEL.replace(" * per_row(v)", "")
BROKEN = TOY_KERNEL.replace("gemm(a, b)", "gemm(a)")
TWICE = TOY_KERNEL.replace("gemm(a, b)", "2 * gemm(a, b)")
# a different program, equally correct
TURNED = TOY_KERNEL.replace("gemm(a, b) * per_row(v)", "per_row(v) * gemm(a, b)")

# Honest kernels of shipped specs. For the kernels from ``operators``, other tests compare counts and lowered
# texts with values worked out by hand. The last three kernels are worded differently from every generated
# kernel. tests/verifier/test_verify.py plants mistakes in these three kernels.
HONEST = {name: operators.source_of(name) for name in operators.BODIES} | {
    "gemm_residual_partial_rmsnorm": """\
from primitives import gemm, kernel, per_column, row_sums, sqrt
@kernel
def gemm_residual_partial_rmsnorm(y, w, x, gamma, eps):
    stream = x + gemm(y, w.mT)
    mean = row_sums(stream * stream) / stream.columns
    return {"rstd": 1 / sqrt(mean + eps), "hg": per_column(gamma) * stream, "h": stream}
""",
    "gemm_rmsnorm_swiglu": """\
from primitives import gemm, kernel, pairs, per_row, sigmoid
@kernel
def gemm_rmsnorm_swiglu(x, w, rstd):
    z = per_row(rstd) * gemm(x, w.mT)
    g, u = pairs(z)
    return {"act": g * sigmoid(g) * u, "preact": z}
""",
    "gemm_swiglu_bwd": """\
from primitives import gemm, join, kernel, pairs, row_sums, sigmoid
@kernel
def gemm_swiglu_bwd(dy, w_down, z):
    d = gemm(dy, w_down)
    g, u = pairs(z)
    t = sigmoid(g)
    dg, du = d * u * t * (1 + g * (1 - t)), d * g * t
    return {"dz": join(dg, du), "act": g * t * u, "s": row_sums(g * dg + u * du)}
""",
}


def kernel_of(name: str) -> str:
    """Return the accepted kernel of a shipped spec. If the spec has no accepted kernel yet, return its kernel
    in tests/honest."""
    if name in ACCEPTED:
        return (KERNELS / f"{name}.py").read_text(encoding="utf-8")
    return next((TESTS / "honest" / name).glob("*.py")).read_text(encoding="utf-8")


USAGE = Usage(100, 10, 1000, 1)


def fenced(source: str) -> str:
    return f"Here it is.\n\n```python\n{source}```\n"


def write_toy(directory: Path, old: str = "", new: str = "") -> Path:
    """Write toy.yaml with ``old`` replaced by ``new``; return its path."""
    return write_changed(directory / "toy.yaml", TOY, old, new)


@dataclass
class Scripted:
    """A provider that answers from a list and records the questions. If an answer is an exception, it is
    raised."""

    answers: Sequence[str | Turn | BaseException]
    asked: list[tuple[str, list[Message]]] = field(default_factory=list)
    name: str = "scripted"

    def next_turn(self, question: Question) -> Turn:
        self.asked.append((question.system, list(question.messages)))
        answer = self.answers[question.number - 1]
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, Turn) else Turn(answer, USAGE, "Ada via a script", "end_turn")


@dataclass
class Notes:
    """A listener that records the attempts, gates, verdicts, tools and costs of a run."""

    attempts: list[int] = field(default_factory=list)
    gates: list[str] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    costs: list[Spent] = field(default_factory=list)

    def attempt(self, number: int, limit: int) -> None:
        self.attempts.append(number)

    def text(self, words: str) -> None:
        pass

    def gate(self, name: str, words: str) -> None:
        self.gates.append(f"{name} {words}")

    def report(self, number: int, report: Accepted | Checked | Rejected) -> None:
        self.reports.append(report.status)

    def tool(self, name: str, words: str) -> None:
        self.tools.append(name)

    def spent(self, spent: Spent) -> None:
        self.costs.append(spent)


def resources(*_: object, **__: object) -> tuple[Resources, ...]:
    """Return an invented compile report of a typical kernel."""
    return (Resources("Step0_0123456789ab", Schedule().to_json(), 168, 0, (5, 2, 4), 0, 0, 16, 4, 2, 2.0),)


def program_of(spec: Spec, source: str) -> Program:
    return trace_source(source, spec.signature())


def checked(spec: Spec, program: Program) -> Checked:
    """Return the report of ``verifier.verify.check`` for a good kernel, without running the gates."""
    kernels = [
        {"kernel": r.kernel, "registers": r.registers, "stack": r.stack, "spill_loads": 0, "spill_stores": 0,
         "hgmma": r.hgmma, "tile": "128x128", "pingpong": True}
        for r in resources()
    ]  # fmt: skip
    gates = (
        Gate(gate="trace", seconds=0.1, figures={"milliseconds": 50.0, "layers": ["seccomp"], "nodes": 5}),
        Gate(gate="contract", seconds=0.1, figures={"steps": 1, "vector_kernels": 0}),
        Gate(gate="interpret", seconds=0.1, figures={"worst_rms_ratio": {"c": 1.0}}),
        Gate(gate="compile", seconds=9.0, figures={"kernels": kernels}),
    )
    own = identity(spec, KernelSource(program))
    return Checked(identity=own, gates=gates, unmeasured="checked, not benchmarked")


def _quack(tile: tuple[int, int], pingpong: bool, cluster: tuple[int, int], swap_ab: bool) -> Config:
    return {
        "tile_m": tile[0],
        "tile_n": tile[1],
        "pingpong": pingpong,
        "cluster_m": cluster[0],
        "cluster_n": cluster[1],
        "max_swizzle_size": 8,
        "swap_ab": swap_ab,
    }


# the two schedules that QuACK's own tuner timed last, the faster one first
QUACK = (_quack((128, 192), True, (2, 1), True), _quack((256, 128), False, (1, 2), False))


def timing(case: Case, speedup: float = 1.3) -> Timing:
    """Return invented figures of one case. The three processes differ, so that the confidence intervals reach
    4 % to either side."""
    own = ((2.0,) * FEWEST,) * 3
    rivals = {
        arm: tuple((2.0 * ratio * factor,) * FEWEST for factor in (0.98433, 1.0, 1.01592))
        for arm, ratio in {"torch.compile": speedup, "cuBLAS matmul": 0.95, MATMUL: 0.95}.items()
    }
    return Timing(
        case=case.name,
        sizes=dict(case.sizes),
        schedules={"0": {"tile_m": 256, "tile_n": 128, "pingpong": False}},
        milliseconds={arm: round(central(rows), 5) for arm, rows in {"candidate": own, **rivals}.items()},
        ratios={arm: compared(rows, own) for arm, rows in rivals.items()},
        roofline_milliseconds=1.5,
        host_microseconds={"candidate": 13.0, "cuBLAS matmul": 17.0},
        graph_milliseconds=2.0,
        tuning_seconds=20.0,
        finalists={"0": ({"tile_m": 256, "tile_n": 128, "pingpong": False}, {"swizzle": 16})},
        quack={OWN_TUNER: (QUACK,)},
        processes=3,
        rounds=FEWEST,
        input_sets=2,
        samples={"candidate": own, **rivals},
    )


def proofs(spec: Spec, program: Program) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures of the numerics and stability gates for a kernel whose errors equal the
    yardstick's."""
    from coda_agent.verifier.numerics.inputs import EVERY

    outputs = {name: {"rms_ratio": 1.0, "tile_ratio": 1.0, "element_ratio": 1.0} for name in spec.outputs}
    families = {case.name: EVERY for case in spec.cases} | {HIDDEN: EVERY}
    families |= {
        case.name: ROUTINE
        for case in spec.cases
        if case.bench and roofline(program, case.sizes).flops > FEW_FLOPS
    }
    plans = {case.name: 1 if case.bench else 2 for case in spec.cases} | {HIDDEN: 2, ONE_ROW: 2}
    families[ONE_ROW] = SINGLE_ROW
    return (
        {
            c: {"outputs": outputs, "families": list(families[c]), "plans": n}
            | ({"beyond": outputs} if families[c] == EVERY else {})
            for c, n in plans.items()
        },
        {c: {"repeats": REPEATS, "plans": n} for c, n in plans.items()},
    )


def came_out(ratio: float) -> dict[str, Any]:
    """Return the result of a control: ``ratio``, with an interval of 0.1 % to either side."""
    low, high = 0.999 * ratio, 1.001 * ratio
    interval = {"estimate": ratio, "low": low, "high": high, "confidence": 0.95}
    return interval | {"bootstrap": [low, high], "student": [low, high]}


# the GPU's telemetry during a case, read once a round
SEEN: dict[str, Any] = {
    "sm_mhz": [1500, 1600, 1700],
    "memory_mhz": [2619, 2619, 2619],
    "power_w": [640.0, 690.0, 700.0],
    "readings": FEWEST,
}
ITSELF = {"estimate": 1.0, "low": 0.999, "high": 1.001, "confidence": 0.95, "detectable": 0.0}


def measured(spec: Spec, program: Program, speedup: float = 1.3) -> Measured:
    """Return the report of ``verifier.measure.measure`` for a correct and fast kernel."""
    proved, repeated = proofs(spec, program)
    rows = tuple(timing(case, speedup) for case in spec.cases if case.bench)
    said = {str(step): schedule.to_json() for step, schedule in program.schedule.items()}
    rows = tuple(
        row.model_copy(
            update={
                "schedules": row.schedules | said,
                "roofline_milliseconds": round(roofline(program, row.sizes).seconds * 1e3, 5),
            }
        )
        for row in rows
    )
    lows = {t.case: t.ratios["torch.compile"].model_dump() for t in rows}
    decision = {"baseline": "torch.compile", "threshold": spec.accept.speedup, "speedup": lows}
    control, *others = [t.case for t in rows]
    scores = [f"score/{n}/{c}" for n in range(3) for c in (f"{control}/controlled.0", *others)]
    return Measured(
        protocol=PROTOCOL,
        identity=identity(spec, KernelSource(program)),
        gates=(
            Gate(gate="numerics", seconds=1.0, figures=proved),
            Gate(gate="stability", seconds=1.0, figures=repeated),
            Gate(gate="benchmark", seconds=1.0, figures={"against_itself": ITSELF}),
            Gate(gate="decision", seconds=0.0, figures=decision),
        ),
        timings=rows,
        conditions={"gpu": "NVIDIA H100 80GB HBM3", "during": {score: SEEN for score in scores}},
        controls=tuple(
            {"process": n, "attempt": 0, "case": control, "same": came_out(1.0), "planted": came_out(1.025)}
            | {"faults": []}
            for n in range(3)
        ),
        seeds={"large/benchmark": 7, "hidden/hidden": 8, "hidden/hidden, one row": 9},
        date="2026-11-20T12:00:00+00:00",
    )


def slow(spec: Spec) -> Rejected:
    """Return the report for a kernel that is correct but slow."""
    words = "case large: 0.900x torch.compile [0.850, 0.950], but the lower bound must exceed 1.1"
    return Rejected(gate="decision", code="slow", message=words)


HEADER: dict[str, Any] = {
    "provider": "handoff",
    "attempts": 6,
    "model": None,
    "author": "Ada",
    "weak_jail": False,
    "directory": "/home/ada/secret project",
    "time_limit": 60.0,
}


def make_run(
    spec: Path, source: str = TOY_KERNEL, found: Measured | Rejected | None = None, **header: Any
) -> str:
    """Create a run on disk and return the run's name. The run has one attempt, whose verdict is "checked". If
    ``found`` is given, the run also has a measurement with this result."""
    run = runs.start(spec, HEADER | header)
    with run.journal as journal:
        program = program_of(run.spec, source)
        turn = Turn(fenced(source), USAGE, f"{journal.header['author']} via handoff", "end_turn")
        report = checked(run.spec, program).model_dump(mode="json")
        journal.once("prompt", "prompt", lambda: {"system": "SYSTEM", "task": "TASK"})
        journal.once("answer/1", "answer", turn.to_json)
        judged = {"report": report, "program": program.to_json(), "source": source}
        journal.once("report/1", "report", lambda: judged)
        if found is not None:
            journal.once("measurement/1", "measurement", lambda: found.model_dump(mode="json"))
    return run.name


def accepted_run(spec: Path, source: str = TOY_KERNEL, **header: Any) -> str:
    """Create a run like ``make_run``, whose kernel was measured and is fast enough."""
    loaded = load(spec, check=False)
    return make_run(spec, source, measured(loaded, program_of(loaded, source)), **header)


def coda_agent(
    *arguments: str | Path, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the real command in its own process, without an API key."""
    return subprocess.run(
        [sys.executable, "-m", "coda_agent.agent.cli.main", *map(str, arguments)],
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k != "ANTHROPIC_API_KEY"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
