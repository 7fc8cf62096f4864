"""Functions that all gates share: run or leave a gate, collect the hashes for reports, and explain wrong
numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import PACKAGES
from coda_agent.verifier.report import Gate, Identity, Rejected
from coda_agent.verifier.spec.model import Spec

Progress = Callable[[str, str], None]  # arguments: a gate's name, and words on its state


class Failed(Exception):
    """Raised to leave a gate with a reason; ``Gates`` turns it into a Rejected report."""

    def __init__(self, code: str, message: str, line: int | None = None, **evidence: Any):
        super().__init__(message)
        self.code, self.message, self.line, self.evidence = code, message, line, evidence


@dataclass
class Gates:
    """Run gates one after another; record their times and figures."""

    progress: Progress
    passed: list[Gate] = field(default_factory=list)

    @contextmanager
    def gate(self, name: str) -> Iterator[dict[str, Any]]:
        """Run a gate in a ``with`` block. The block fills the yielded dict with figures, or raises Failed.

        The dict's ``findings`` are recorded separately.
        """
        self.progress(name, "started")
        start = time.monotonic()
        figures: dict[str, Any] = {}
        try:
            yield figures
        except Failed as failed:
            self.progress(name, f"rejected: {failed.code}")
            raise Stop(self.rejected(name, failed)) from None
        findings = tuple(figures.pop("findings", ()))
        gate = Gate(gate=name, seconds=round(time.monotonic() - start, 3), figures=figures, findings=findings)
        self.passed.append(gate)
        self.progress(name, "passed")

    def rejected(self, name: str, failed: Failed) -> Rejected:
        return Rejected(
            gate=name,
            code=failed.code,
            message=failed.message,
            line=failed.line,
            evidence=failed.evidence,
            gates=tuple(self.passed),
        )


class Stop(Exception):
    """Raised after a gate has failed; holds the report on the failure."""

    def __init__(self, rejected: Rejected):
        self.rejected = rejected


def silent(gate: str, words: str) -> None:
    """A Progress that prints nothing."""


def identity(spec: Spec, kernel: KernelSource) -> Identity:
    """The hashes and versions that bind evidence to this kernel."""
    packages = (*PACKAGES, "torch", "triton", "apache-tvm-ffi")
    return Identity(
        spec=spec.name,
        spec_hash=spec.hash,
        program_hash=kernel.program.hash,
        lowered_hash=kernel.lowered.hash,
        versions={name: version(name) for name in packages},
        raw=kernel.edited is not None,
    )


def judge(errors: list[Any], where: str, draw: Mapping[str, Any]) -> None:
    """Raise Failed, with a message for the author, if an output exceeds the error gate's limits. ``draw``:
    the sizes, family and seed of the inputs, for ``failed_draws``."""
    bad = [e for e in errors if not e.passed]
    if bad:
        raise Failed(
            "numerics",
            f"{where}: " + "; ".join(e.reason for e in bad),
            outputs=[e.model_dump() for e in errors],
            draw=dict(draw),
        )
