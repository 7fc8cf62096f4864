"""Simulate where a sweep stops scaling: ``python -m benchmarks.fleet.simulation --driver SECONDS``.

A discrete-event simulation runs sweeps on 1 to 1,024 GPUs, and writes a page and a chart to the folder
``--out`` (default: docs). The seconds of every phase come from the committed reports of accepted kernels, and
the numbers of attempts from the recorded runs. For each simulated run, a report and a number of attempts are
drawn at random, with replacement.

A run authors one kernel. From start to end the run occupies one of the driver's places for runs in progress.
The run asks its author, and then waits for a core that examines the answer. If the answer passes, the run
waits for a core that compiles the kernel, and for a GPU that measures it. Before each stage (an answer, an
examination, a compilation or a measurement), the driver works for ``--driver`` seconds. The driver is a
single process.

``--runs`` names JSON files of ``benchmarks.fleet.checks`` and ``benchmarks.fleet.two_gpus``. The page
compares the real runs in these files with simulations of the same runs.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from coda_agent.agent.reporting.charts import image, styled
from coda_agent.primitives.system.files import KERNELS, ROOT, write_atomic
from coda_agent.primitives.system.markdown_table import markdown_table

GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SPECS = (30, 100, 300, 1000, 3000)
AUTHORS = (5.0, 30.0, 120.0)  # median seconds of an author's answer
SPREAD = 0.5  # standard deviation of the logarithm of an answer's seconds
# the standard sweep: GPUs, specs, and seconds of an author's answer; each result varies some of these numbers
FLEET, WORK, AUTHOR = 64, 1000, 30.0
NEAR = 0.98  # fraction of the highest throughput that counts as sufficient
PLACES = 4  # runs in progress for each core, and for each GPU; the default of ``coda-agent sweep``
SEED = 2026

Stage = tuple[str, float]  # resource, seconds


@dataclass(frozen=True)
class Phases:
    """Seconds of one kernel's phases."""

    examine: float
    compile: float
    measure: float


@dataclass(frozen=True)
class SimulatedResources:
    """The resources of a fleet. ``places``: the limit on the number of runs in progress. ``driver``: the
    seconds that the driver works before each stage."""

    gpus: int
    cores: int
    places: int
    driver: float = 0.0

    @classmethod
    def of(cls, gpus: int, cores: int, driver: float) -> SimulatedResources:
        return cls(gpus, cores, PLACES * (gpus + cores), driver)


@dataclass
class SimulatedEnd:
    """A simulated sweep: its seconds, and the busy seconds of each resource."""

    seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)


def simulate(runs: Iterable[Sequence[Stage]], fleet: SimulatedResources) -> SimulatedEnd:
    """Simulate these runs, each a sequence of stages. A stage uses a ``core``, a ``gpu`` or an ``author``;
    the number of authors is unlimited."""
    free = {"core": fleet.cores, "gpu": fleet.gpus, "driver": 1, "place": fleet.places}
    queues: dict[str, deque[Callable[[float], None]]] = {name: deque() for name in free}
    events: list[tuple[float, int, Callable[[float], None]]] = []
    ended, number = SimulatedEnd(busy=dict.fromkeys((*free, "author"), 0.0)), 0

    def at(time: float, act: Callable[[float], None]) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (time, number, act))

    def use(resource: str, seconds: float, now: float, then: Callable[[float], None]) -> None:
        def begin(now: float) -> None:
            ended.busy[resource] += seconds
            at(now + seconds, end)

        def end(now: float) -> None:
            release(resource, now)
            then(now)

        acquire(resource, now, begin)

    def acquire(resource: str, now: float, begin: Callable[[float], None]) -> None:
        if resource not in free:
            begin(now)
        elif free[resource]:
            free[resource] -= 1
            begin(now)
        else:
            queues[resource].append(begin)

    def release(resource: str, now: float) -> None:
        if resource in free:
            if queues[resource]:
                queues[resource].popleft()(now)
            else:
                free[resource] += 1

    def go(stages: Sequence[Stage], now: float) -> None:
        if not stages:
            ended.seconds = max(ended.seconds, now)
            release("place", now)
            return
        (resource, seconds), rest = stages[0], stages[1:]
        use("driver", fleet.driver, now, lambda now: use(resource, seconds, now, lambda now: go(rest, now)))

    for stages in runs:
        acquire("place", 0.0, lambda now, stages=stages: go(stages, now))  # type: ignore[misc]
    while events:
        now, _, act = heapq.heappop(events)
        act(now)
    return ended


def phases() -> list[Phases]:
    """The phases in the committed reports of kernels that a model wrote in the vocabulary. A report whose
    compilation came from a cache gets the median compile seconds of the other reports."""
    found = []
    for path in sorted(KERNELS.glob("*.report.json")):
        told = json.loads(path.read_text())
        gates = {gate["gate"]: gate["seconds"] for gate in told["gates"]}
        if "trace" in gates and "all" in told.get("seconds", {}):
            examine = gates["trace"] + gates["contract"] + gates["interpret"]
            found.append(Phases(examine, gates["compile"], told["seconds"]["all"]))
    usual = median(each.compile for each in found if each.compile > 1)
    return [replace(each, compile=each.compile if each.compile > 1 else usual) for each in found]


def attempts() -> list[int]:
    """The number of attempts in every recorded run of a kernel."""
    found = []
    for path in sorted((ROOT / "agent" / "recordings").glob("*.jsonl")):
        if ".raw" not in path.name:
            lines = path.read_text().splitlines()
            found.append(sum('"kind": "report"' in line for line in lines))
    return [number for number in found if number]


def drawn(specs: int, author: float, random_: random.Random) -> list[list[Stage]]:
    """Draw the stages of ``specs`` runs. Every attempt of a run is examined; only the last attempt passes,
    and is also compiled and measured."""
    known, tries = phases(), attempts()
    runs = []
    for _ in range(specs):
        kernel, stages = random_.choice(known), list[Stage]()
        for number in range(count := random_.choice(tries)):
            stages += [("author", author * random_.lognormvariate(0, SPREAD)), ("core", kernel.examine)]
            if number == count - 1:
                stages += [("core", kernel.compile), ("gpu", kernel.measure)]
        runs.append(stages)
    return runs


def efficiency(runs: Sequence[Sequence[Stage]], fleet: SimulatedResources) -> float:
    """The efficiency of scaling: the fleet's throughput per GPU over the throughput of a single GPU."""
    one = simulate(runs, SimulatedResources.of(1, max(1, round(fleet.cores / fleet.gpus)), fleet.driver))
    return one.seconds / (fleet.gpus * simulate(runs, fleet).seconds)


def enough(runs: Sequence[Sequence[Stage]], fleet: SimulatedResources, vary: str, most: int) -> int:
    """The smallest sufficient amount of the resource ``vary``. An amount is sufficient if its throughput is
    at least ``NEAR`` times the throughput of the amount ``most``."""
    best = simulate(runs, replace(fleet, **{vary: most})).seconds
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if best / simulate(runs, replace(fleet, **{vary: middle})).seconds >= NEAR:
            high = middle
        else:
            low = middle + 1
    return low


def results(driver: float) -> dict[str, Any]:
    """Everything that the page and the charts show."""

    def made(specs: int, author: float) -> list[list[Stage]]:
        return drawn(specs, author, random.Random(SEED))

    table = {
        f"{specs} specs, {author:.0f} s": [
            round(efficiency(made(specs, author), SimulatedResources.of(gpus, gpus, driver)), 4)
            for gpus in GPUS
        ]
        for specs in SPECS
        for author in (AUTHORS if specs == WORK else (AUTHOR,))
    }
    runs, usual = made(WORK, AUTHOR), SimulatedResources.of(FLEET, FLEET, driver)
    whole = simulate(runs, usual)
    return {
        "gpus": list(GPUS),
        "efficiency": table,
        "driver": driver,
        "kernels": len(phases()),
        "mean": {name: round(mean(getattr(p, name) for p in phases()), 2) for name in vars(phases()[0])},
        "longest": max(p.measure for p in phases()),
        "usual": {
            "seconds": round(whole.seconds),
            "gpu_seconds_a_kernel": round(FLEET * whole.seconds / WORK, 1),
            "core_seconds_a_kernel": round(whole.busy["core"] / WORK, 1),
            "idle": round(1 - whole.busy["gpu"] / (FLEET * whole.seconds), 4),
            "driver": round(whole.busy["driver"] / whole.seconds, 4),
        },
        "cores": {
            n: enough(made(16 * n, AUTHOR), SimulatedResources.of(n, n, driver), "cores", n)
            for n in (16, 64, 256)
        },
        "places": {
            f"{author:.0f}": enough(made(WORK, author), usual, "places", 4 * usual.places)
            for author in AUTHORS
        },
    }


def chart(found: dict[str, Any]) -> bytes:
    """A chart of scaling efficiency by the number of GPUs, with one line per number of specs and answer
    time."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(7.5, 3.6), layout="constrained")
        axes = figure.subplots()
        for name, row in found["efficiency"].items():
            style = "-" if name.endswith(f", {AUTHOR:.0f} s") else ":"
            axes.plot(found["gpus"], row, style, marker="o", markersize=3, label=f"{name} an answer")
        axes.axhline(0.9, color="#999999", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_xticks(found["gpus"], [str(n) for n in found["gpus"]])
        axes.set_xlabel("GPUs")
        axes.set_ylabel("share of linear scaling")
        axes.set_ylim(0, 1.05)
        axes.legend(frameon=False, fontsize=8)
        return image(figure)


def _neighbours_page(told: dict[str, Any]) -> str:
    """The page's section on the timings of ``benchmarks.fleet.two_gpus disturb``."""
    states = {
        "idle": "is idle, and so are the cores",
        "compiling": "is idle, and the cores compile",
        "measuring": "measures",
    }
    rows = []
    for state, words in states.items():
        found, planted = told["verdict"][state], told["verdict"][state]["planted"]
        same = f"{found['same'][0]:.4f} to {found['same'][1]:.4f}"
        delay = f"{planted[0] - 1:.2%} to {planted[1] - 1:.2%}"
        rows.append((words, same, delay, f"{found['failed']} of {len(told[state])}"))
    table = markdown_table(
        ("the other GPU", "kernel over itself", "a planted delay of 2%", "invalid timings"), rows
    )
    versions = ", ".join(f"{name} {told['versions'][name]}" for name in ("torch", "quack-kernels", "ray"))
    kernel, case = told["control"]
    return f"""
## Do neighbours disturb each other?

`{kernel}` at {case} was timed on one of {len(told["gpus"])} {told["gpus"][0]} of a host with {told["cores"]}
cores (`python -m benchmarks.fleet.two_gpus disturb`; {versions}, {told["date"][:10]}).
Each timing has fresh inputs, and gives one estimate for each of two controls: the kernel over itself, and a
planted delay. The table has the smallest and the largest estimate. The launch of the planted delay adds one
or two microseconds to it.

{table}"""


def _compared_page(runs: Sequence[dict[str, Any]]) -> str:
    rows = [
        (run["run"], f"{run['seconds']:.0f}", f"{run['predicted']:.0f}",
         f"{run['predicted'] / run['seconds'] - 1:+.0%}")
        for run in runs
    ]  # fmt: skip
    table = markdown_table(("run", "seconds", "simulated", "off by"), rows)
    return f"""
## Compared with real runs

The simulation of a run takes the seconds of each task from the real run on one node or GPU. If there was no
such run, it takes them from the compared run itself.

{table}"""


def page(found: dict[str, Any]) -> str:
    usual, rows = found["usual"], found["efficiency"]
    headings = ("specs, time of an answer", *(str(n) for n in found["gpus"]))
    table = markdown_table(headings, [(name, *(f"{x:.2f}" for x in row)) for name, row in rows.items()])
    mean_of, driver = found["mean"], found["driver"] * 1e3
    cores = ", ".join(f"{cores} cores for {gpus} GPUs" for gpus, cores in found["cores"].items())
    places = ", ".join(
        f"{number} runs for answers of {author} s" for author, number in found["places"].items()
    )
    return f"""# Where a sweep stops scaling

Simulated by `python -m benchmarks.fleet.simulation`; no fleet of this size was measured. The seconds of each
phase come from the {found["kernels"]} committed reports, each from one NVIDIA H100 80GB HBM3. On average it
takes {mean_of["examine"]:.1f} s to examine a source, {mean_of["compile"]:.1f} s to compile it, and
{mean_of["measure"]:.0f} s to measure it. There is one core per GPU, in addition to the cores that tuning uses
on the GPU's host. The driver works {driver:.0f} ms before each task.

![share of linear scaling by the number of GPUs](fleet_simulation.svg)

The share of linear scaling is the throughput of the fleet, divided by the number of GPUs times the throughput
of one GPU. Each row is for a number of specs and a median time of an author's answer. Each column is for a
number of GPUs.

{table}
- **The limit.** A sweep cannot end before its longest measurement, of up to {found["longest"]:.0f} s. So if
  each GPU has few kernels to measure, GPUs are idle at the end. The driver is one process; with {FLEET} GPUs
  it is busy {usual["driver"]:.1%} of the time.
- **Cores.** {NEAR:.0%} of the highest throughput needs {cores}.
- **Runs in progress.** With {FLEET} GPUs and {WORK:,} specs, {NEAR:.0%} of the highest throughput needs
  {places}. By default a sweep has
  at most {PLACES} runs in progress for each core, and {PLACES} for each GPU.
- **Cost.** With {FLEET} GPUs and {WORK:,} specs a kernel takes {usual["gpu_seconds_a_kernel"]} GPU
  seconds, of which {usual["idle"]:.1%} are idle, and {usual["core_seconds_a_kernel"]} core seconds. The
  sweep takes {usual["seconds"] / 60:.0f} minutes.
{_compared_page(found["compared"]) if found["compared"] else ""}{
        "".join(map(_neighbours_page, found["neighbours"]))
    }"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--driver", type=float, required=True, help="seconds of the driver before each piece")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="JSON files of real runs")
    options = parser.parse_args(arguments)
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in options.runs]
    found = results(options.driver)
    found["compared"] = [run for told in runs for run in told.get("compared", ())]
    found["neighbours"] = [told for told in runs if "verdict" in told]
    write_atomic(options.out / "fleet_simulation.svg", chart(found))
    write_atomic(options.out / "fleet_simulation.md", page(found))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
