"""``coda-agent sweep``: author many specs under one budget, on this machine or on a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coda_agent.agent import arguments as typed
from coda_agent.agent import setup
from coda_agent.agent.cli.exit_codes import ABSENT, OK, REJECTED
from coda_agent.agent.options import (
    IMPROVE,
    AuthoringOptions,
    BudgetOptions,
    Further,
    Gpu,
    Json,
    MeasuringOptions,
    WeakJail,
    grouped,
    typed_options,
)
from coda_agent.agent.terminal.safe_text import echo
from coda_agent.primitives.errors import Absent

if TYPE_CHECKING:
    from rich.console import Console

    from coda_agent.agent.fleet.driver import Driver
    from coda_agent.agent.fleet.executor import Executor
    from coda_agent.agent.fleet.pool import Pool, Record
    from coda_agent.agent.fleet.sweep import Sweep
    from coda_agent.verifier.spec.model import Spec

Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="auto|ADDRESS",
        help="Run on this Ray cluster; auto finds or starts one. Default: this machine.",
    ),
]
AT_ONCE = typer.Option(min=1, max=10_000, help="Limit on runs at once. Default: 4 per core and 4 per GPU.")
AtOnce = Annotated[int | None, AT_ONCE]
Readmit = Annotated[
    list[str] | None,
    typer.Option("--readmit", metavar="NAME", help="An excluded GPU (its UUID) or core, to use it again."),
]
GRACE = 20.0  # seconds after Ctrl-C in which requests in flight may finish
TICK = 0.5  # seconds between two updates of the live table


@grouped
def sweep(
    spec: Annotated[list[str], typer.Argument(metavar="SPEC...", help="YAML files, or names in specs/.")],
    authoring: AuthoringOptions,
    budget: BudgetOptions,
    measuring: MeasuringOptions,
    gpu: Gpu = None,
    improve: Annotated[int, IMPROVE] = 0,
    candidates: Annotated[int, typer.Option(min=1, max=99, help="Number of runs per spec.")] = 1,
    ray: Ray = None,
    at_once: AtOnce = None,
    weak_jail: WeakJail = False,
    as_json: Json = False,
) -> None:
    """Have a model author kernels for many specs under one shared budget, on many cores and GPUs."""
    from coda_agent.agent.fleet import sweep as sweeps
    from coda_agent.agent.run import runs
    from coda_agent.verifier.loading import load

    paths = [typed.spec_file(Path(each)) for each in dict.fromkeys(spec)]
    loaded = {path.absolute(): (load(path), typed.source(path)) for path in paths}
    headers: list[dict[str, Any]] = []
    # check all specs and options before any file is written
    for path, (checked, _) in loaded.items():
        header, _ = setup.new_author(checked.name, authoring, budget.limits(), None)
        headers.append(
            header | {"improve": improve, "weak_jail": weak_jail, **runs.derived_beside(path, checked)}
        )
    if ray is None or gpu is False:
        setup.need_gpu(gpu, *typed_options(measuring))
    made = sweeps.create(
        {
            "specs": [str(path) for path in loaded],
            "candidates": candidates,
            "limits": budget.limits().to_json(),
            "headers": headers,
        }
    )
    _drive(made, budget, measuring, gpu, ray, at_once, as_json, loaded)


def resume(
    name: str,
    budget: BudgetOptions,
    measuring: MeasuringOptions,
    gpu: bool | None,
    ray: str | None,
    as_json: bool,
    further: Further,
    readmit: Sequence[str] = (),
) -> None:
    """Continue a sweep, perhaps on another cluster. The options in ``further`` replace the options of the
    sweep's runs. ``readmit``: the names of excluded slots (cores or GPUs) to use again."""
    from coda_agent.agent.fleet import sweep as sweeps

    if ray is None or gpu is False:
        setup.need_gpu(gpu, *typed_options(measuring))
    made = sweeps.reopen(name)
    try:
        for header in made.header["headers"]:
            setup.refuse_idle(header["provider"], *typed_options(further))
            setup.refuse_uncounted(header["provider"], budget.limits(), header.get("model"))
        left = made.left_out()
        for slot in readmit:
            if slot not in left:
                out = ", ".join(left) or "none"
                raise typer.BadParameter(f"{name} has not excluded {slot}; it has excluded {out}")
        for slot in readmit:
            made.record("readmitted", {"slot": slot})
    except BaseException:
        made.close()
        raise
    _drive(made, budget, measuring, gpu, ray, None, as_json, {}, further.header())


def executor(ray: str | None, gpu: bool | None, *, cores: bool = True) -> Executor:
    """Return the executor for the Ray cluster ``ray``, or for this machine if ``ray`` is None. The executor
    offers no GPUs if ``gpu`` is False, and no cores if ``cores`` is False."""
    if ray is not None:
        from coda_agent.agent.fleet.on_ray import OnRay

        return OnRay(ray, gpus=gpu is not False, cores=cores)
    from coda_agent.agent.fleet.local import Local

    return Local(cpus=None if cores else 0, gpus=[] if gpu is False else None)


def _drive(
    made: Sweep,
    budget: BudgetOptions,
    measuring: MeasuringOptions,
    gpu: bool | None,
    ray: str | None,
    at_once: int | None,
    as_json: bool,
    loaded: Mapping[Path, tuple[Spec, str]],
    given: dict[str, Any] | None = None,
) -> None:
    from coda_agent.agent.fleet.driver import Driver, spent_before
    from coda_agent.agent.run.budget import Purse, RunLimits

    limits = RunLimits.from_json({**made.header["limits"], **budget.limits().to_json()})
    try:
        names = _members(made, loaded)
        purse = Purse(spent_before(names))
        with (
            setup.free_stdout(as_json),
            _pool(ray, gpu, made.record, made.left_out(), made.kind()) as pool,
        ):
            if gpu and ray is not None:
                pool.await_gpu()
            elif gpu and not pool.gpus:
                raise Absent("the sweep has excluded every H100 here; add --readmit, or leave out --gpu")
            wanted = measuring.options() if gpu is not False and (pool.gpus or ray) else None
            driver = Driver(made, pool, purse, limits, wanted, given or {})
            thread = driver.start(driver.unfinished(names), at_once)
            try:
                _attend(driver, thread, names, setup.console(as_json))
            finally:
                driver.close()
    finally:
        made.close()
    _end(driver, as_json)


@contextmanager
def _pool(
    ray: str | None,
    gpu: bool | None,
    record: Record,
    left_out: dict[str, str] | None = None,
    kind: str = "",
    *,
    cores: bool = True,
) -> Iterator[Pool]:
    """Open a pool of slots (cores and GPUs) of ``executor(ray, gpu)``, and close the pool after the block."""
    from coda_agent.agent.fleet.pool import Pool

    with (
        closing(executor(ray, gpu, cores=cores)) as slots,
        closing(Pool(slots, record, left_out or {}, kind)) as pool,
    ):
        yield pool


def spreads(ray: str | None) -> bool:
    """Whether a measurement outside a sweep uses a fleet: true on a Ray cluster, and on a machine with
    several GPUs."""
    from coda_agent.agent.fleet.executor import usable_gpus

    return ray is not None or len(usable_gpus()) > 1


@contextmanager
def fleet(ray: str | None) -> Iterator[Pool]:
    """Open a pool of the GPUs of a Ray cluster or of this machine, for measurements outside a sweep. Before
    the block, wait for the first GPU."""

    def record(kind: str, told: dict[str, Any]) -> None:
        if kind in ("left", "refused"):
            echo(f"{told.get('slot') or told['node']}: {told['reason']}", err=True)

    with _pool(ray, None, record, cores=False) as pool:
        pool.await_gpu()
        yield pool


def _members(made: Sweep, loaded: Mapping[Path, tuple[Spec, str]]) -> list[str]:
    """Return the sweep's runs. Create missing runs: first one run of every spec, then a second run of every
    spec, and so on. ``loaded``: by path, specs that are already loaded, with their texts."""
    from coda_agent.agent.run import runs
    from coda_agent.verifier.loading import load

    @cache
    def spec_and_text(path: Path) -> tuple[Spec, str]:
        return loaded.get(path) or (load(path, check=False), typed.source(path))

    for number in range(1, made.header["candidates"] + 1):
        for path, header in zip(map(Path, made.header["specs"]), made.header["headers"], strict=True):

            def create(
                path: Path = path, header: dict[str, Any] = header, number: int = number
            ) -> dict[str, Any]:
                own = {"sweep": made.name, "sweep_candidate": number}
                run = runs.create(*spec_and_text(path), header | own)
                run.journal.close()
                return {"run": run.name}

            made.once(f"run/{number}/{path}", "run", create)
    return made.runs()


def _attend(driver: Driver, thread: Thread, names: Sequence[str], console: Console) -> None:
    """Show the sweep until its runs have ended. On Ctrl-C, start no new requests, and give the requests in
    flight ``GRACE`` seconds to finish."""
    try:
        _watch(driver, thread, names, console)
    except KeyboardInterrupt:
        driver.purse.stop("interrupted")
        driver.pool.close("interrupted")
        deadline = time.monotonic() + GRACE
        while thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        echo(f"continue with: coda-agent resume {driver.sweep.name}", err=True)
        raise
    if driver.bug:
        raise driver.bug


def _watch(driver: Driver, thread: Thread, names: Sequence[str], console: Console) -> None:
    from rich.live import Live

    from coda_agent.agent.reporting import sweep_view
    from coda_agent.agent.run.history import Reading

    console.print(f"sweep {driver.sweep.name}: {len(names)} runs")
    readings = {name: Reading(name) for name in names}
    if not console.is_terminal:
        told: set[str] = set()
        alive = True
        while alive:
            time.sleep(TICK)
            alive = thread.is_alive()
            for words in driver.news():
                if words not in told:
                    told.add(words)
                    console.print(words, soft_wrap=True)
        return
    with Live(console=console, auto_refresh=False) as shown:
        while thread.is_alive():
            time.sleep(TICK)
            shown.update(sweep_view.live(driver, readings), refresh=True)


def _end(driver: Driver, as_json: bool) -> None:
    """Print how the sweep ended, write its page, and exit. The status is 3 if a run ended early, else 1 if a
    run has no kernel, else 0."""
    import json

    from coda_agent.agent.reporting import sweep_view

    name = driver.sweep.name
    path = sweep_view.write(name)
    told = sweep_view.as_dict(name)
    if as_json:
        echo(json.dumps(told, indent=1))
    else:
        for run, why in driver.problems.items():
            echo(f"{run}: {why}", err=True)
        echo(", ".join(f"{number} {status}" for status, number in told["statuses"].items()))
        echo(str(path))
    if driver.problems:
        echo(f"continue with: coda-agent resume {name}", err=True)
        raise typer.Exit(ABSENT)
    raise typer.Exit(OK if not set(told["statuses"]) - {"accepted", "checked"} else REJECTED)
