"""Options that several commands share. Some options are fields of dataclasses. If a command has such a
dataclass as a parameter, ``grouped`` turns the fields into options of the command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from coda_agent.agent import providers

if TYPE_CHECKING:
    from coda_agent.agent.run.budget import RunLimits
    from coda_agent.verifier.measure import MeasureOptions


AUTO = "auto"
_NAMES = (AUTO, *(spec.name for spec in providers.specs().values() if spec.offered))
ProviderName = StrEnum("ProviderName", [(name, name) for name in _NAMES])  # type: ignore[misc]
_AUTO_HELP = ", else ".join(auto.help for _, auto in providers.automatic())


def _users(option: str) -> str:
    return " and ".join(providers.used_by(option))


Gpu = Annotated[
    bool | None,
    typer.Option("--gpu/--no-gpu", help="Require a GPU, or use none. Default: use one if present."),
]
SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="A spec's YAML file, or a name in specs/.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON, for other software.")]
WeakJail = Annotated[
    bool, typer.Option("--weak-jail", help="Trace even if this machine has neither seccomp nor Landlock.")
]


@dataclass(frozen=True)
class MeasuringOptions:
    """The options that say how to measure."""

    max_autotune: Annotated[
        bool, typer.Option("--max-autotune", help="Also measure torch.compile's max-autotune.")
    ] = False
    quack: Annotated[
        bool,
        typer.Option(
            "--quack",
            help="Also measure QuACK's own kernel of the operator, tuned by QuACK and by coda-agent.",
        ),
    ] = False
    rounds: Annotated[
        int, typer.Option(min=8, help="Limit on the interleaved rounds that each process measures.")
    ] = 40
    processes: Annotated[
        int, typer.Option(min=1, max=20, help="Processes that time a kernel; acceptance requires 3 or more.")
    ] = 3
    warm: Annotated[
        bool,
        typer.Option("--warm", help="Time with a warm L2, for information: the kernel is not accepted."),
    ] = False
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="Also run small sizes under compute-sanitizer (minutes).")
    ] = False

    def options(self) -> MeasureOptions:
        from coda_agent.verifier.baselines.pytorch import MAX_AUTOTUNE
        from coda_agent.verifier.baselines.quack import LIBRARY_ARMS
        from coda_agent.verifier.measure import DEFAULT_ARMS, MeasureOptions

        extra = [(MAX_AUTOTUNE, self.max_autotune), *((name, self.quack) for name in LIBRARY_ARMS)]
        arms = (*DEFAULT_ARMS, *(name for name, wanted in extra if wanted))
        return MeasureOptions(arms, self.rounds, self.processes, not self.warm, self.sanitize)


# A run's journal must stay readable, so these limits are below those of ``storage.record``.
MOST_TOKENS, MOST = 10**15, 1e11


@dataclass(frozen=True)
class BudgetOptions:
    """The options that limit what a run spends."""

    budget_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_TOKENS, help="Limit on tokens: input, output and cached."),
    ] = None
    budget_dollars: Annotated[float | None, typer.Option(min=0.0, max=MOST, help="Limit on US dollars.")] = (
        None
    )
    budget_gpu_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=MOST, help="Seconds of GPU measurement, after which no new measurement starts."
        ),
    ] = None
    budget_seconds: Annotated[
        float | None,
        typer.Option(min=0.0, max=MOST, help="Seconds after which this command makes no new requests."),
    ] = None

    def limits(self) -> RunLimits:
        from coda_agent.agent.run.budget import RunLimits

        return RunLimits.from_json({n.removeprefix("budget_"): value for n, value in _changed(self).items()})


ATTEMPTS = typer.Option(min=1, max=50, help="Limit on the number of attempts.")
IMPROVE = typer.Option(min=0, max=50, help="Rounds to make an accepted kernel faster.")
MAX_TOKENS = typer.Option(min=1024, max=10**9, help="Limit on the tokens of one answer, including thinking.")
TIME_LIMIT = typer.Option(
    min=0.1, max=1e7, help=f"Seconds to wait for an answer, for {_users('--time-limit')}."
)


@dataclass(frozen=True)
class AuthoringOptions:
    """The options that choose the author and limit the number of attempts."""

    provider: Annotated[
        ProviderName,
        typer.Option(help=f"The author. auto: {_AUTO_HELP}."),
    ] = ProviderName(AUTO)
    attempts: Annotated[int, ATTEMPTS] = 6
    model: Annotated[str | None, typer.Option(help=f"The model, for {_users('--model')}.")] = None
    author: Annotated[
        str, typer.Option(help=f"The author's name in the report, for {_users('--author')}.")
    ] = "unnamed author"
    max_tokens: Annotated[int, MAX_TOKENS] = 32000
    time_limit: Annotated[float, TIME_LIMIT] = 3600.0

    def header(self) -> dict[str, Any]:
        """These options as fields of the run's journal header."""
        return asdict(self) | {"directory": None}


@dataclass(frozen=True)
class Further:
    """Options that replace a resumed run's options; None keeps the run's value."""

    attempts: Annotated[int | None, ATTEMPTS] = None
    improve: Annotated[int | None, IMPROVE] = None
    max_tokens: Annotated[int | None, MAX_TOKENS] = None
    time_limit: Annotated[float | None, TIME_LIMIT] = None

    def header(self) -> dict[str, Any]:
        """The given options, as changes to the run's journal header."""
        return _changed(self)


def flags(gpu: bool | None, *groups: Any) -> list[str]:
    """Return these options as command-line words. Options with their default values are left out."""
    words = [] if gpu is None else ["--gpu" if gpu else "--no-gpu"]
    for group in groups:
        for name, value in _changed(group).items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def typed_options(*groups: Any) -> list[str]:
    """The names (such as ``--model``) of all options in ``groups`` whose values are not the defaults."""
    return [_typed(group, name) for group in groups for name in _changed(group)]


def _typed(group: Any, field: str) -> str:
    (option,) = get_type_hints(type(group), include_extras=True)[field].__metadata__
    # In Annotated, typer stores the option's first name in ``default``. The dataclass field holds the default
    # value.
    return option.default if isinstance(option.default, str) else f"--{field.replace('_', '-')}"


def _changed(group: Any) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    return {f.name: value for f in fields(group) if (value := getattr(group, f.name)) != f.default}


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``command`` for typer: each parameter that is a dataclass becomes one option per field."""
    parameters = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: p.annotation for name, p in parameters.items() if is_dataclass(p.annotation)
    }
    flat: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        if name in groups:
            flat += inspect.signature(groups[name], eval_str=True).parameters.values()
        else:
            flat.append(parameter)

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        return command(**given)

    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run
