"""The description that each provider's file exports as ``SPEC``.

Options, budgets, doctor, ``auto`` and the journal's header read it, so one file in this package adds a
provider. ``--help`` imports that file, so it imports its SDK inside the functions that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coda_agent.agent.finding import Finding
from coda_agent.agent.providers import Provider

__all__ = ["Auto", "ProviderSpec", "RunContext"]


@dataclass(frozen=True)
class RunContext:
    """The run for which a provider is chosen or created.

    ``task``: the name of the spec or primitive, for messages. ``recording``: the file with the recorded run
    of the same task, which need not exist.
    """

    task: str
    recording: Path


@dataclass(frozen=True)
class Auto:
    """The rule by which ``--provider auto`` chooses: the available provider with the lowest ``rank`` wins.

    ``help`` completes "auto: ..."; ``lacks`` says what is missing here, or "".
    """

    rank: int
    help: str
    lacks: Callable[[RunContext], str]


def _nothing(*_: object) -> dict[str, Any]:
    return {}


def _no_objection(model: str | None) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class ProviderSpec:
    """One provider, as the rest of the agent sees it."""

    name: str
    make: Callable[..., Provider]  # called with the result of `arguments`
    arguments: Callable[[Mapping[str, Any], RunContext], dict[str, Any]] = _nothing  # from a run's header
    header: Callable[[RunContext], dict[str, Any]] = _nothing  # fields that it adds to a new run's header
    options: tuple[str, ...] = ()  # options that only some providers use, among them this one
    package: str = ""  # pip package with its lazy imports
    offered: bool = True  # whether --provider offers it
    counted: bool = True  # whether its token cost is known here
    objection: Callable[[str | None], str] = _no_objection  # to a dollar limit for a model; "" for none
    by_hand: bool = False  # someone outside answers; the run shows where, and --author names them
    replays: bool = False  # answers come from a recording, whatever the prompt says
    auto: Auto | None = None
    check: Callable[[], Finding] | None = None  # for doctor
