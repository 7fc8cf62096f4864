"""The description that each provider's file exports as ``SPEC``.

Options, budgets, doctor, ``auto`` and the journal's header read it, so that one file in this package adds a
provider. ``--help`` imports that file, which therefore imports its SDK inside the functions that need it.
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
    """The run that a provider is chosen or made for.

    ``task``: what it authors, for messages. ``folder``: the run's, which need not exist yet. ``recording``:
    the file that holds the recorded run of the same task, which need not exist either.
    """

    task: str
    folder: Path
    recording: Path


@dataclass(frozen=True)
class Auto:
    """How ``--provider auto`` comes to a provider: the lowest ``rank`` that lacks nothing wins.

    ``help`` ends "auto: ..."; ``lacks`` says what is missing here, or "".
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
    make: Callable[..., Provider]  # takes what `arguments` returns
    arguments: Callable[[Mapping[str, Any], RunContext], dict[str, Any]] = _nothing  # of a run's header
    header: Callable[[RunContext], dict[str, Any]] = _nothing  # fields that it adds to a new run's header
    options: tuple[str, ...] = ()  # of the command's options for some providers, those it uses
    package: str = ""  # installs what it imports lazily
    offered: bool = True  # at --provider
    counted: bool = True  # whether the tokens that it costs are known here
    objection: Callable[[str | None], str] = _no_objection  # to limiting a model's dollars; "" for none
    by_hand: bool = False  # somebody outside answers: shown where, and named by --author
    replays: bool = False  # answers come from a recording, whatever the prompt says
    auto: Auto | None = None
    check: Callable[[], Finding] | None = None  # for doctor
