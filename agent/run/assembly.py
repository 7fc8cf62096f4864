"""Assemble a run's task and provider, as the run's header says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coda_agent.agent import providers
from coda_agent.agent.providers import Provider
from coda_agent.agent.providers.spec import RunContext
from coda_agent.agent.run.optimize import EditingTask
from coda_agent.agent.run.primitive_task import PROPOSES, PrimitiveTask
from coda_agent.agent.run.runs import Run
from coda_agent.agent.run.task import AuthoringTask, Task
from coda_agent.agent.storage import kernel_files
from coda_agent.agent.tips import tips_of


def task_of(run: Run) -> Task:
    """The task of a run's author."""
    header = run.journal.header
    if "optimizes" in header:
        return EditingTask.of(run)
    if PROPOSES in header:
        return PrimitiveTask.of(run)
    return AuthoringTask(run.spec, run.text, tips_of(header), header.get("weak_jail", False), run.derived)


def provider_of(run: Run, header: Mapping[str, Any] | None = None) -> Provider:
    """The provider that ``header`` names (by default the run's header). Raises ProviderError."""
    header = header or run.journal.header
    return make_provider(header, run.spec.name, edits=_edits(header))


def make_provider(header: Mapping[str, Any], spec: str, *, edits: bool) -> Provider:
    """The provider that a header names, for a run of the spec named ``spec``. ``edits``: whether the run
    edits CuTeDSL. Raises ProviderError."""
    name = header["provider"]
    options = providers.provider_spec(name).arguments(header, run_context(spec, edits=edits))
    return providers.make(name, **{k: v for k, v in options.items() if v is not None})


def run_context(spec: str, *, edits: bool) -> RunContext:
    """The facts about a run that its provider may use. ``edits``: whether the run edits CuTeDSL."""
    return RunContext(f"{spec}'s CuTeDSL" if edits else spec, kernel_files.recording_path(spec, edited=edits))


def _edits(header: Mapping[str, Any]) -> bool:
    return bool(header.keys() & {"optimizes", PROPOSES})
