"""Setup that commands share. The functions create a run's provider and measuring function, let the author
work, and read the state of a run."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from coda_agent.agent import arguments, providers
from coda_agent.agent.options import AUTO, typed_options
from coda_agent.primitives.errors import Absent
from coda_agent.primitives.target import TARGET
from coda_agent.verifier.gpu import visible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coda_agent.agent.options import AuthoringOptions
    from coda_agent.agent.providers import Provider
    from coda_agent.agent.run.budget import RunLimits
    from coda_agent.agent.run.loop import Listener, Outcome
    from coda_agent.agent.run.runs import Run
    from coda_agent.agent.run.task import Measure
    from coda_agent.primitives.compiler.kernel_source import KernelSource
    from coda_agent.verifier.incumbent import Incumbent
    from coda_agent.verifier.measure import MeasureOptions
    from coda_agent.verifier.report import Measurement
    from coda_agent.verifier.spec.model import Spec
    from coda_agent.verifier.stages import Checkpoint


NO_H100 = "no H100 (CUDA capability {}.{}) here".format(*TARGET.capability)


def choose_provider(provider: str, spec: str, *, edits: bool = False) -> str:
    """The name of the provider to use. ``auto`` means the first provider that can author on this machine.
    ``edits``: whether the run edits CuTeDSL."""
    if provider != AUTO:
        return provider
    from coda_agent.agent.run.assembly import run_context

    run, lacking = run_context(spec, edits=edits), []
    for name, auto in providers.automatic():
        if not (lacks := auto.lacks(run)):
            return name
        lacking.append(lacks)
    raise Absent(f"{', and '.join(lacking)}; provide one of them, or answer yourself with --provider handoff")


def new_author(
    name: str, authoring: AuthoringOptions, limits: RunLimits, directory: Path | None, *, edits: bool = False
) -> tuple[dict[str, Any], Provider]:
    """Return the header of a new run's journal, and the run's provider. Raises an error if the options cannot
    work, so that no such run is created."""
    from coda_agent.agent.run.assembly import make_provider, run_context

    provider = choose_provider(authoring.provider, name, edits=edits)
    refuse_idle(provider, *typed_options(authoring), *(["--directory"] if directory else ()))
    given = {"directory": str(directory.absolute())} if directory else {}
    given |= providers.provider_spec(provider).header(run_context(name, edits=edits))
    refuse_uncounted(provider, limits, authoring.model)
    header = authoring.header() | {"provider": provider, "limits": limits.to_json()} | given
    return header, make_provider(header, name, edits=edits)


def refuse_idle(provider: str, *names: str) -> None:
    """Raise BadParameter if an option in ``names`` is only for other providers."""
    for name in names:
        users = providers.used_by(name)
        if users and provider not in users:
            arguments.refuse_unused(
                f"the author is {provider}, but this option is for {' and '.join(users)}; leave it out", name
            )


def refuse_uncounted(provider: str, limits: RunLimits, model: str | None = None) -> None:
    """Raise BadParameter for a limit on tokens or dollars that cannot be enforced for this provider and
    model."""
    spec = providers.provider_spec(provider)
    given = [f"--budget-{name}" for name in ("tokens", "dollars") if getattr(limits, name) is not None]
    if given and not spec.counted:
        raise typer.BadParameter(
            f"{' and '.join(given)} would limit nothing: the spending of {provider} is not known here; use "
            "--attempts, --time-limit or --budget-seconds"
        )
    if limits.dollars is not None and (objection := spec.objection(model)):
        raise typer.BadParameter(objection)


def author(
    run: Run,
    watch: Listener,
    measure: Measure | None,
    given: Mapping[str, Any] | None = None,
    provider: Provider | None = None,
) -> Outcome:
    """Run the loop with the options in the run's header. ``given``: options and limits for this call, which
    replace those in the header. ``provider``: by default, the provider that the header names."""
    from coda_agent.agent.run.assembly import provider_of, task_of
    from coda_agent.agent.run.budget import RunLimits
    from coda_agent.agent.run.loop import Loop

    changes = dict(given or {})
    limits = run.journal.header.get("limits", {}) | changes.pop("limits", {})
    header, task = run.journal.header | changes, task_of(run)
    loop = Loop(
        run.journal,
        run.spec,
        task,
        provider or provider_of(run, header),
        watch,
        header["attempts"],
        measure and task.measuring(measure, watch.gate),
        RunLimits.from_json(limits),
        header.get("improve", 0),
    )
    return loop.run()


def header_of(name: str) -> dict[str, Any]:
    """Read the header of a run to continue, even while another process has the run open. Raises
    JournalError."""
    from coda_agent.agent.run import runs
    from coda_agent.agent.storage import record

    path = runs.folder(name) / runs.JOURNAL
    header, _ = record.glance(path)
    runs.check_provider(path, header)
    return header


def run_result(name: str) -> Outcome:
    """Read a run's result from its journal, even while another process has the run open. Raises Absent if the
    run has no verified kernel yet."""
    from coda_agent.agent.run import loop, runs
    from coda_agent.agent.storage.journal import is_open

    outcome = loop.result_of(*runs.look(name))
    if outcome is None:
        run = runs.folder(name)
        remedy = "it is still running" if is_open(run / runs.JOURNAL) else f"coda-agent resume {run.name}"
        raise Absent(f"run {run.name} has no verified kernel yet: {remedy}")
    return outcome


def measurer(gpu: bool | None, options: MeasureOptions, watch: Listener) -> Measure | None:
    """Return a function that measures a checked kernel on this machine. Return None if this machine cannot
    measure, or if ``gpu`` is False."""
    if not use_gpu(gpu):
        return None
    from coda_agent.agent.storage.quack_tunings import quack
    from coda_agent.verifier.measure import measure as run_gates

    def measure(spec: Spec, kernel: KernelSource, keep: Checkpoint, kept: Incumbent | None) -> Measurement:
        return run_gates(
            spec,
            kernel,
            options,
            progress=watch.gate,
            keep=keep,
            kept=kept,
            quack=quack(spec),
        )

    return measure


def need_gpu(gpu: bool | None, *measuring: str) -> None:
    """Raise an error if a required GPU is missing, or if the options in ``measuring`` contradict --no-gpu.
    Commands call this function before they write anything."""
    if gpu is False:
        arguments.refuse_unused("--no-gpu measures nothing; leave one of the two out", *measuring)
    if gpu:
        use_gpu(True)


def use_gpu(gpu: bool | None) -> bool:
    """Whether to measure on this machine. Raises Absent if ``gpu`` is True and this machine has no H100."""
    if gpu is False:
        return False
    there = visible.usable()
    if there:
        import torch

        # lowered kernels run only on one GPU architecture
        there = torch.cuda.get_device_capability() == TARGET.capability
    if gpu and not there:
        raise Absent(f"{NO_H100}; leave out --gpu, or take a bundle to a machine with an H100")
    return there


def free_stdout(quiet: bool) -> AbstractContextManager[Any]:
    """If a program reads standard output (``quiet``), send what libraries print in the block to standard
    error. For example, Ray prints when it loses a node."""
    return redirect_stdout(sys.stderr) if quiet else nullcontext()


def console(quiet: bool) -> Any:
    """The console for tables. It writes to standard error if a program reads standard output (``quiet``)."""
    from coda_agent.agent.terminal.console import Console

    console = Console(stderr=quiet)
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a pipe has no width, but tables need a width
    return console
