"""Count checks per minute on Ray clusters: ``python -m benchmarks.fleet.checks [--kernels 24] [--out FILE]``.

The benchmark runs real checks (trace, contract, interpreter, sm_90a compile) of accepted kernels on this
machine. The first pass uses one node and the second pass two nodes; each node is pinned to its own core.
Every pass starts with empty caches. A check consists of two pieces of work, which run in worker processes.
The report also gives the fraction of the time that Ray and the driver spend outside the worker processes.
Under ``compared``, the report gives the seconds of each pass, and the seconds that
``benchmarks.fleet.simulation`` predicts from the pieces of work in the first pass. Other work on this machine
distorts the figures, so the report includes the machine's load.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import ray
from ray.cluster_utils import Cluster

from benchmarks.fleet.simulation import SimulatedResources, simulate
from coda_agent.agent.fleet import pieces
from coda_agent.agent.fleet.driver import SILENCE
from coda_agent.agent.fleet.executor import CPU, environment
from coda_agent.agent.fleet.on_ray import OnRay
from coda_agent.agent.fleet.pool import Pool
from coda_agent.primitives.system.files import KERNELS, ROOT, SPECS

STORE = 100 << 20  # bytes of Ray's object store, which this work hardly uses
JOINING = 300.0  # limit on the seconds until all cores have joined the pool


def examined(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the result of ``pieces.examine``, with the seconds that the worker spent on it."""
    return _timed(pieces.examine, asked)


def compiled(asked: dict[str, Any]) -> dict[str, Any]:
    return _timed(pieces.compile_program, asked)


def _timed(piece: Any, asked: dict[str, Any]) -> dict[str, Any]:
    begun = time.monotonic()
    found = piece(asked)
    return found | {"worker_seconds": time.monotonic() - begun}


def kernels(number: int) -> list[tuple[str, str]]:
    """The specs and sources of the first ``number`` accepted kernels."""
    found = []
    for path in sorted(KERNELS.glob("*.py")):
        spec = SPECS / f"{path.stem}.yaml"
        if spec.is_file():
            found.append((spec.read_text(encoding="utf-8"), path.read_text(encoding="utf-8")))
    return found[:number]


def check(pool: Pool, place: int, spec: str, source: str) -> list[float]:
    """Check one kernel; return the seconds that its two pieces of work took in their workers."""
    asked = {"spec": spec, "source": source, "weak_jail": False, "schedules": {}}
    first = pool.run(f"{place} check", examined, asked, patience=SILENCE)
    second = first
    if "rejected" not in first:
        second = pool.run(f"{place} compile", compiled, {"spec": spec, **first}, patience=SILENCE)
    if "rejected" in second:
        raise SystemExit(f"an accepted kernel is rejected here: {second}")
    return [first["worker_seconds"], second["worker_seconds"]]


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """In the block, let new processes run on one core only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[core % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measured(nodes: int, work: Sequence[tuple[str, str]], scratch: Path) -> dict[str, Any]:
    """Run one pass over all kernels except the last, on ``nodes`` one-core nodes. The last kernel only warms
    up the workers."""
    os.environ["QUACK_COMPILE_WORKERS"] = "1"
    head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    try:
        for node in range(nodes):
            cache = {"CODA_AGENT_CACHE": str(scratch / f"{nodes}.{node}")}
            cache["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            with pinned(node):
                cluster.add_node(num_cpus=1, object_store_memory=STORE, env_vars=cache)
        events: list[dict[str, Any]] = []
        executor = OnRay(cluster.address, gpus=False)
        pool = Pool(executor, lambda kind, told: events.append(told) if kind == "lease" else None)
        end = time.monotonic() + JOINING
        while len(pool.uses) < nodes and time.monotonic() < end:
            time.sleep(0.1)
        warm, work = list(work[-1:]) * nodes, work[:-1]  # the workers import their modules before the timing
        with ThreadPoolExecutor(len(work)) as threads:
            list(threads.map(lambda each: check(pool, *each), [(-1 - i, *w) for i, w in enumerate(warm)]))
            events.clear()
            begun = time.monotonic()
            inside = list(threads.map(lambda each: check(pool, *each), [(i, *w) for i, w in enumerate(work)]))
            seconds = time.monotonic() - begun
        pool.close()
        executor.close()
    finally:
        cluster.shutdown()
    within, leased = sum(map(sum, inside)), sum(event["seconds"] for event in events)
    return {
        "seconds": round(seconds, 2),
        "a_minute": round(60 * len(work) / seconds, 3),
        "own_share": round(1 - within / leased, 4),
        "busy": round(leased / (nodes * seconds), 4),
        "pieces": [[round(part, 3) for part in parts] for parts in inside],
    }


def predicted(pieces_of: Sequence[Sequence[float]], nodes: int) -> float:
    """The seconds that the simulation predicts for these pieces of work on ``nodes`` cores."""
    runs = [[("core", seconds) for seconds in parts] for parts in pieces_of]
    return simulate(runs, SimulatedResources(gpus=0, cores=nodes, places=len(runs))).seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", type=int, default=24)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    work, before = kernels(options.kernels + 1), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="coda-fleet-") as scratch:
        passes = {nodes: measured(nodes, work, Path(scratch)) for nodes in (1, 2)}
    forecast = {n: round(predicted(passes[1]["pieces"], n), 2) for n in passes}
    found = {
        "kernels": options.kernels,
        "passes": passes,
        "speedup": round(passes[2]["a_minute"] / passes[1]["a_minute"], 3),
        "compared": [
            {
                "run": f"{options.kernels} checks on {n} one-core node(s)",
                "seconds": told["seconds"],
                "predicted": forecast[n],
            }
            for n, told in passes.items()
        ],
        "mean_piece": round(mean(part for parts in passes[1]["pieces"] for part in parts), 3),
        "load": [before, os.getloadavg()[0]],
        "cores": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
        "versions": environment() | {"ray": ray.__version__},
        "kind": CPU,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    text = json.dumps(found, indent=1)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    # The workers must unpickle these functions, but a worker's __main__ is another module. So this module is
    # imported by name.
    from benchmarks.fleet import checks

    checks.main()
