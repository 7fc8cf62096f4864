"""Read QuACK's tuned schedules from earlier reports."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import version

from coda_agent.agent.storage import kernel_files
from coda_agent.verifier.report import QuackTuned
from coda_agent.verifier.spec.model import Spec


def quack(spec: Spec) -> dict[str, QuackTuned]:
    """Map each case to the tuned schedules of QuACK's arms. The schedules come from the report of the spec's
    accepted kernel, or else from the report of that kernel's edited code. A report counts only if it was made
    for this version of the spec, and with the installed version of QuACK. Without such a report, the result
    is empty."""
    for edited in (False, True):
        with suppress(kernel_files.KernelError):  # another version of coda-agent wrote the report
            found = kernel_files.read(spec, edited=edited)
            told = found.report.quack() if found and found.report.identity.spec_hash == spec.hash else {}
            if told and {each.version for each in told.values()} == {version("quack-kernels")}:
                return told
    return {}
