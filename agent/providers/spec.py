"""The description that each provider's file exports as ``SPEC``.

The command line, the budgets, ``doctor``, ``--provider auto`` and the header of the journal take all that
they need from this description. So a new provider needs only one file in this package. ``--help`` imports
that file, so the file must import its SDK inside the functions that use the SDK.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coda_agent.agent.finding import Finding
from coda_agent.agent.providers import Provider


@dataclass(frozen=True)
class RunContext:
    """The run for which a provider is chosen or created.

    ``task``: the name of the spec or primitive, for messages. ``recording``: the path for a recorded run of
    the same task; the file may be missing.
    """

    task: str
    recording: Path


@dataclass(frozen=True)
class Auto:
    """How ``--provider auto`` treats a provider. ``auto`` chooses the available provider with the lowest
    ``rank``.

    ``help`` is the provider's part of the help text "auto: ...". ``lacks`` returns what this machine lacks
    for the provider, or "" if the provider is available.
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
    """A provider's description. The rest of the agent knows nothing else of the provider."""

    name: str
    make: Callable[..., Provider]  # called with the result of `arguments`
    arguments: Callable[[Mapping[str, Any], RunContext], dict[str, Any]] = _nothing  # takes a run's header
    header: Callable[[RunContext], dict[str, Any]] = _nothing  # fields to add to a new run's header
    options: tuple[str, ...] = ()  # options that this provider uses, except those that all providers use
    package: str = ""  # the pip package with the modules that the provider's file imports lazily
    offered: bool = True  # whether --provider offers this provider
    counted: bool = True  # whether we can count the tokens that the provider uses
    # why a dollar limit cannot be enforced for a model; "" if it can be enforced
    objection: Callable[[str | None], str] = _no_objection
    # whether a person or another program answers; --author then names the author in reports
    by_hand: bool = False
    replays: bool = False  # whether answers come from a recording, so that the prompt does not affect them
    auto: Auto | None = None
    check: Callable[[], Finding] | None = None  # the check that doctor runs
