"""Try a fleet on the GPUs of one host: ``python -m benchmarks.fleet.two_gpus COMMAND``.

``measure BUNDLE --out FOLDER`` does the same as ``coda-agent measure BUNDLE --ray auto``; with ``--here`` it
does not use Ray. The command also records every lease of a slot, and the time that
``benchmarks.fleet.simulation`` predicts from the seconds of the leases. ``compare -- OPTIONS`` runs
``coda-agent compare --ray auto OPTIONS``, and also records the seconds of every session and a predicted time.
This prediction assumes that all rows take equally long. ``faults`` measures a bundle; meanwhile it kills a
worker and removes a GPU. ``disturb`` times a measurement's controls on the first GPU: a kernel against
itself, without and with a planted delay. The controls are timed while the second GPU idles, while other cores
compile, and while the second GPU measures. Each command writes FOLDER/NAME.json.
``benchmarks.models.sharded`` tests training on a host with several GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.fleet.simulation import SimulatedResources, simulate
from coda_agent.agent.artifacts import bundle as bundles
from coda_agent.agent.artifacts import bundle_measuring
from coda_agent.agent.fleet.bundles import measure
from coda_agent.agent.fleet.executor import Executor, environment, usable_gpus
from coda_agent.agent.fleet.local import Local
from coda_agent.agent.fleet.pool import Pool
from coda_agent.primitives.system import workers
from coda_agent.primitives.system.files import SPECS, write_atomic
from coda_agent.verifier.gates import Progress
from coda_agent.verifier.measure import DEFAULT_ARMS, ROUNDS, MeasureOptions
from coda_agent.verifier.report import CANDIDATE
from coda_agent.verifier.worker import Task, Worker

JOINING = 120.0  # limit on the seconds until all GPUs have joined the pool
STORE = 100 << 20  # bytes of Ray's object store, which this work hardly uses
HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500}
HEALTH |= {"health_check_failure_threshold": 4}  # Ray then detects a lost node in less than its usual 15 s
CONTROL = "gemm_swiglu", "1B"  # an accepted kernel, and a case at which it takes about a millisecond
TRIES = 5  # number of timings of the controls in each state of the machine: idle, compiling, measuring
SPARE = 4  # cores that the compiling neighbours leave free
PATIENCE = 300.0

Rows = list[dict[str, Any]]


def write(folder: Path, name: str, found: Mapping[str, Any]) -> None:
    """Write a command's JSON, with the machine, the versions and the date."""
    versions = environment()
    with suppress(PackageNotFoundError):  # ``measure --here`` does not need Ray
        versions["ray"] = version("ray")
    about = {
        "gpus": [gpu.name for gpu in usable_gpus()],
        "cores": os.cpu_count(),
        "versions": versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_atomic(folder / f"{name}.json", json.dumps({**found, **about}, indent=1) + "\n")
    print(f"{name}: {json.dumps({k: v for k, v in found.items() if k != 'events'})}", flush=True)


# Measure


def on_ray(address: str) -> Executor:
    from coda_agent.agent.fleet.on_ray import OnRay  # imports Ray, which ``--here`` does not need

    return OnRay(address, cores=False)


@dataclass
class PoolEvents:
    """The events of a pool, each with its time."""

    events: Rows = field(default_factory=list)

    def __call__(self, kind: str, told: dict[str, Any]) -> None:
        self.events.append({"event": kind, "at": round(time.monotonic(), 2), **told})
        print(kind, told, flush=True)

    def leases(self) -> Rows:
        return leases_in(self.events)


def leases_in(events: Rows) -> Rows:
    return [event for event in events if event["event"] == "lease"]


def chosen(path: Path, entries: int | None) -> bundles.Bundle:
    """Read a bundle. If ``entries`` is given, keep only this many entries from the end of the bundle."""
    whole = bundles.read(path)
    return whole.model_copy(update={"entries": whole.entries[-entries:]}) if entries else whole


def joined(pool: Pool, gpus: int) -> None:
    """Wait until this many GPUs are in the pool."""
    end = time.monotonic() + JOINING
    while len(pool.gpus) < gpus:
        if time.monotonic() > end:
            raise SystemExit(f"{len(pool.gpus)} of {gpus} GPUs joined; {pool.refusals}")
        time.sleep(0.1)


def measured(
    pool: Pool, record: PoolEvents, entries: bundles.Bundle, asked: argparse.Namespace
) -> dict[str, Any]:
    """Measure a bundle's entries on the pool's GPUs. The result has the measured seconds and the seconds that
    the simulation predicts. The prediction uses the leases in the file ``asked.pieces``, if given, or else
    the leases of this run."""

    def heard(run: str) -> Progress:
        return lambda gate, words: print(f"{run}: {gate} {words}", flush=True)

    gpus, begun = len(pool.gpus), time.monotonic()
    options = MeasureOptions(arms=tuple(asked.arms.split(",")), rounds=asked.rounds)
    done = measure(asked.bundle, entries, asked.results, options, pool, heard)
    seconds, leases = round(time.monotonic() - begun, 2), record.leases()
    known = leases_in(json.loads(asked.pieces.read_text())["events"]) if asked.pieces else leases
    forecast = round(predicted([event["seconds"] for event in known], gpus), 2)
    what = f"{len(entries.entries)} kernels measured on {gpus} GPU(s)"
    return {
        "seconds": seconds,
        "an_hour": round(3600 * len(entries.entries) / seconds, 2),
        "busy": round(sum(event["seconds"] for event in leases) / (seconds * gpus), 4),
        "compared": [{"run": what, "seconds": seconds, "predicted": forecast}],
        "results": {
            each.run: {
                "status": each.measurement["status"],
                "identity": each.identity.lowered_hash,
                "gpu": each.measurement.get("conditions", {}).get("uuid"),
                "seconds": each.measurement.get("seconds"),
            }
            for each in done.results
        },
        "events": record.events,
    }


def predicted(seconds: Sequence[float], gpus: int) -> float:
    """The simulation's prediction, in seconds, for measurements that take ``seconds`` each."""
    runs = [[("gpu", each)] for each in seconds]
    return simulate(runs, SimulatedResources(gpus=gpus, cores=0, places=len(runs))).seconds


def measure_command(asked: argparse.Namespace) -> None:
    record, gpus = PoolEvents(), len(usable_gpus())
    executor = Local(cpus=0) if asked.here else on_ray("auto")
    try:
        pool = Pool(executor, record)
        joined(pool, gpus)
        found = measured(pool, record, chosen(asked.bundle, asked.entries), asked)
        pool.close()
    finally:
        executor.close()
    write(asked.out, asked.name, found)


def compare_command(asked: argparse.Namespace) -> None:
    gpus, begun = len(usable_gpus()), time.monotonic()
    line = [sys.executable, "-m", "coda_agent.agent.cli.main", "compare", "--ray", "auto"]
    subprocess.run([*line, "--out", str(asked.results), *asked.options], check=True)
    seconds = round(time.monotonic() - begun, 2)
    sittings = json.loads((asked.results / "results.json").read_text())["sittings"]
    rows = {(each["operator"], each["case"]) for each in sittings}
    alone = asked.alone or seconds
    forecast = round(predicted([alone / len(rows)] * len(rows), gpus), 2)
    what = f"{len(rows)} rows compared on {gpus} GPU(s)"
    keys = ("operator", "case", "process", "seconds")
    found = {
        "seconds": seconds,
        "an_hour": round(3600 * len(rows) / seconds, 2),
        "compared": [{"run": what, "seconds": seconds, "predicted": forecast}],
        "pieces": [{key: each[key] for key in keys} for each in sittings],
    }
    write(asked.out, asked.name, found)


# Faults


def faults_command(asked: argparse.Namespace) -> None:
    """Measure on a cluster with one node per GPU. Kill the worker of the first GPU after ``--kill`` seconds,
    and remove the node of the second GPU after ``--take`` seconds."""
    from ray.cluster_utils import Cluster

    record, gpus = PoolEvents(), usable_gpus()
    head = {"num_cpus": 0, "num_gpus": 0, "object_store_memory": STORE, "_system_config": HEALTH}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head | {"include_dashboard": False})
    try:
        nodes = {}
        for number, gpu in enumerate(gpus):
            seen = {"CUDA_VISIBLE_DEVICES": str(number)}
            node = cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=STORE, env_vars=seen)
            nodes[gpu.uuid] = node
        executor = on_ray(cluster.address)
        pool = Pool(executor, record)
        joined(pool, len(gpus))
        timers = [
            threading.Timer(asked.kill, partial(kill_worker, pool, record, gpus[0].uuid)),
            threading.Timer(asked.take, partial(take_node, cluster, nodes[gpus[1].uuid], record)),
        ]
        for timer in timers:
            timer.start()
        try:
            found = measured(pool, record, chosen(asked.bundle, asked.entries), asked)
        finally:
            for timer in timers:
                timer.cancel()
        pool.close()
        executor.close()
    finally:
        cluster.shutdown()
    write(asked.out, asked.name, found)


def kill_worker(pool: Pool, record: PoolEvents, uuid: str) -> None:
    import ray

    record("fault", {"killed": uuid, "under": pool.uses[uuid].now})
    slot: Any = pool.uses[uuid].slot
    ray.kill(slot.actor)


def take_node(cluster: Any, node: Any, record: PoolEvents) -> None:
    record("fault", {"taken": node.node_id})
    cluster.remove_node(node, allow_graceful=False)


# Disturbance


def own_jobs(path: Path) -> list[workers.Job]:
    """The compilations with which the tuning of the bundle's entries begins."""
    from coda_agent.primitives.compiler.probe_schedules import candidates
    from coda_agent.primitives.runtime.precompile import to_compile

    jobs: list[workers.Job] = []
    for entry in bundles.read(path).entries:
        spec, kernel = bundle_measuring.verified(path, entry)
        for case in (case for case in spec.cases if case.bench):
            first = [(g.step, s) for g in kernel.lowered.gemms for s in candidates(g, case.sizes)]
            jobs += to_compile(kernel, case.sizes, first)
    return list(dict.fromkeys(jobs))


def quack_jobs(path: Path) -> list[workers.Job]:
    """The compilations with which the tuning of QuACK's matmuls begins, for the bundle's entries. These
    compilations use the GPU."""
    from coda_agent.verifier.baselines.quack import MATMUL, admitted, to_compile

    jobs: list[workers.Job] = []
    for entry in bundles.read(path).entries:
        spec, _ = bundle_measuring.verified(path, entry)
        for case in (case for case in spec.cases if case.bench and MATMUL in admitted(spec, (MATMUL,))):
            jobs += to_compile(MATMUL, spec, case.sizes)
    return jobs


@contextmanager
def beside(act: Callable[[threading.Event], None]) -> Iterator[threading.Thread]:
    """Run ``act`` in a thread during the block. ``act`` gets an event that is set when the block ends."""
    ended = threading.Event()
    thread = threading.Thread(target=act, args=(ended,))
    thread.start()
    try:
        yield thread
    finally:
        ended.set()
        thread.join()


def controls(worker: Worker, tries: int) -> Rows:
    """Repeat the timing of the controls ``tries`` times, with fresh inputs each time. Return the controls'
    intervals and the candidate's median milliseconds."""
    found = []
    for _ in range(tries):
        told = worker.ask(*control_task(), patience=PATIENCE)
        middle = median(told["samples"][CANDIDATE])
        found.append({"milliseconds": middle, "conditions": told["conditions"], **told["controls"]})
    return found


def control_task() -> tuple[Task, Any]:
    """The task that times an accepted kernel at one case, with its tuned schedules. Apart from the kernel
    itself, only the control arms are timed."""
    from coda_agent.agent.storage import kernel_files
    from coda_agent.primitives.lang.schedule import by_step
    from coda_agent.verifier.gpu.benchmark import Benchmark, score
    from coda_agent.verifier.gpu.checks import KernelCase
    from coda_agent.verifier.loading import load

    name, wanted = CONTROL
    spec = load(SPECS / f"{name}.yaml")
    found = kernel_files.read(spec)
    assert found is not None  # because the kernel is committed
    (timing,) = (t for t in found.report.timings if t.case == wanted)
    chosen = by_step(timing.schedules)
    job = KernelCase(spec, found.kernel, wanted, timing.sizes, schedules=(chosen,))
    return score, (job, Benchmark((), timing.rounds, controlled=True))


def disturb_command(asked: argparse.Namespace) -> None:
    first, second = (dict(os.environ) | {"CUDA_VISIBLE_DEVICES": gpu.uuid} for gpu in usable_gpus()[:2])
    workers_ahead = ("coda_agent.verifier.gpu.benchmark", "quack.gemm_sm90")
    found: dict[str, Any] = {"control": CONTROL, "tries": asked.tries}
    jobs = own_jobs(asked.bundle)
    os.environ.setdefault("QUACK_COMPILE_WORKERS", str(max(1, (os.cpu_count() or 1) - SPARE)))
    with Worker(env=first, ahead=workers_ahead) as one, Worker(env=second, ahead=workers_ahead) as other:
        for worker in (one, other):  # so that the kernel is compiled before the timing
            worker.ask(*control_task(), patience=PATIENCE)

        def compiling(ended: threading.Event) -> None:
            begun = time.monotonic()
            done = workers.run_jobs(jobs)
            found["compiled"] = {"jobs": len(done), "refused": done.count(False)}
            found["compiled"]["seconds"] = round(time.monotonic() - begun, 1)

        def measuring(ended: threading.Event) -> None:
            found["neighbour"] = []
            while not ended.is_set():
                found["neighbour"] += controls(other, 1)

        found["idle"] = controls(one, asked.tries)
        with beside(compiling) as thread:
            time.sleep(asked.settle)  # until the compile workers have finished their imports
            found["compiling"] = controls(one, asked.tries)
            found["compiling_all_along"] = thread.is_alive()
        with beside(measuring):
            found["measuring"] = controls(one, asked.tries)
    found["verdict"] = {state: verdict(found[state]) for state in ("idle", "compiling", "measuring")}
    begun = time.monotonic()
    found["quack"] = len(workers.run_jobs(quack_jobs(asked.bundle)))  # compiled now for later measurements
    found["quack_seconds"] = round(time.monotonic() - begun, 1)
    write(asked.out, asked.name, found)


def verdict(found: Rows) -> dict[str, Any]:
    """The range of the controls' estimates, and the number of timings whose controls failed."""
    same, planted = ([each[name]["estimate"] for each in found] for name in ("same", "planted"))
    return {
        "same": [min(same), max(same)],
        "planted": [min(planted), max(planted)],
        "failed": sum(bool(each["faults"]) for each in found),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet.two_gpus")
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("compare")
    compare.add_argument(
        "--results", type=Path, required=True, help="the folder for results, as in compare --out"
    )
    compare.add_argument("--alone", type=float, help="seconds of the same run on one GPU, for the prediction")
    compare.add_argument("options", nargs="*", help="options of coda-agent compare")
    compare.set_defaults(run=compare_command)
    for name, run in (("measure", measure_command), ("faults", faults_command), ("disturb", disturb_command)):
        command = commands.add_parser(name)
        command.add_argument("bundle", type=Path)
        command.set_defaults(run=run)
        if name == "disturb":
            command.add_argument("--tries", type=int, default=TRIES)
            command.add_argument("--settle", type=float, default=10.0)
            continue
        command.add_argument(
            "--results", type=Path, required=True, help="the file for results, as in measure -o"
        )
        command.add_argument(
            "--entries", type=int, help="measure only this many entries, from the end of the bundle"
        )
        command.add_argument(
            "--pieces", type=Path, help="predict from the leases in the JSON file of another run"
        )
        command.add_argument("--arms", default=",".join(DEFAULT_ARMS))
        command.add_argument("--rounds", type=int, default=ROUNDS)
        if name == "measure":
            command.add_argument("--here", action="store_true", help="measure without Ray")
        else:
            command.add_argument("--kill", type=float, default=10.0, help="seconds until a worker is killed")
            command.add_argument("--take", type=float, default=30.0, help="seconds until a GPU is removed")
    for name, command in commands.choices.items():
        command.add_argument("--out", type=Path, required=True, help="the folder for the JSON file")
        command.add_argument("--name", default=name, help="the name of the JSON file, without its suffix")
    asked = parser.parse_args(arguments)
    asked.run(asked)


if __name__ == "__main__":
    main()
