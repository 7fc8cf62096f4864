"""Known schedules of QuACK's arms, from earlier reports."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import version

from coda_agent.agent.artifacts import accept
from coda_agent.verifier.report import QuackTuned
from coda_agent.verifier.spec.model import Spec


def quack(spec: Spec) -> dict[str, QuackTuned]:
    """By case, the schedules that the installed QuACK's arms were tuned to when a kernel of this spec, or an
    edited text of it, was measured; empty without such a report in generated_kernels/."""
    for edited in (False, True):
        with suppress(accept.KernelError):  # another version's
            found = accept.read(spec, edited=edited)
            told = found.report.quack() if found and found.report.identity.spec_hash == spec.hash else {}
            if told and {each.version for each in told.values()} == {version("quack-kernels")}:
                return told
    return {}
