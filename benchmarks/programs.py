"""Programs of shipped specs. A benchmark can get a program even if the spec has no accepted kernel yet."""

from __future__ import annotations

from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.primitives.system.files import KERNELS, ROOT, SPECS
from coda_agent.verifier.loading import load
from coda_agent.verifier.spec.model import Spec


def forward(name: str) -> tuple[Spec, Program]:
    """A spec with the program of its accepted kernel. If no kernel is accepted yet, the program is that of a
    correct kernel from the tests."""
    spec = load(SPECS / f"{name}.yaml", check=False)
    file = KERNELS / f"{name}.py"
    source = file if file.exists() else min((ROOT / "tests" / "honest" / name).glob("*.py"))
    return spec, trace_source(source.read_text(encoding="utf-8"), spec.signature())
