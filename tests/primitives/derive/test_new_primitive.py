"""If a primitive is added in its own file, as CONTRIBUTING.md describes, derived backwards use its derivative
like that of any other primitive."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from derived import backward, error, evaluate
from kernels import signature, tensor

from coda_agent import primitives
from coda_agent.agent.prompts.vocabulary import formed
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.derive import derive
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import OPERATIONS, Program
from coda_agent.primitives.lang.kernel_file import trace_source

FILE = '''
from coda_agent.primitives.lang.ops.operators import elementwise


@elementwise(
    torch=lambda torch, a: a / (1 + a * a),
    cute="({0} / (1.0 + {0} * {0}))",
    derivative=lambda g, y, a: (g * ((1 - a * a) / ((1 + a * a) * (1 + a * a))),),
)
def bump(a):
    """``a / (1 + a * a)``.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 10 instructions an element.
    Paper: family 1, elementwise.

        bent = bump(2 * t)
        rest = t - bent
    """


@elementwise(
    torch=lambda torch, a: torch.floor(a), cute="cute.math.floor({0})", caveat="it is a step function"
)
def steps(a):
    """The largest whole number up to ``a``.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 1 instruction an element.
    Paper: family 1, elementwise.

        whole = steps(t)
        rest = t - whole
    """
'''
KERNEL = """
from primitives import bump, gemm, kernel, per_row, row_sums, steps


@kernel
def k(x, w, r):
    t = gemm(x, w.mT) * per_row(r)
    return {{"y": {value}, "v": row_sums(t)}}
"""
SHAPE = signature(
    {"x": tensor("M, K"), "w": tensor("N, K"), "r": tensor("M", "fp32")},
    {"y": tensor("M, N"), "v": tensor("M", "fp32")},
)
SIZES = {"M": 6, "K": 4, "N": 8}


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Add the file's primitives to the vocabulary for one test, and yield the file's module."""
    path = tmp_path / "newcomer.py"
    path.write_text(FILE)
    known = dict(OPERATIONS)
    found = importlib.util.spec_from_file_location("newcomer", path)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    for name in ("bump", "steps"):
        monkeypatch.setattr(primitives, name, getattr(module, name), raising=False)
    monkeypatch.setattr(primitives, "__all__", [*primitives.__all__, "bump", "steps"])
    yield module
    for name in OPERATIONS.keys() - known.keys():
        del OPERATIONS[name]


def program(value: str) -> Program:
    return trace_source(KERNEL.format(value=value), SHAPE)


def test_its_derivative_is_autograds(added: ModuleType) -> None:
    made = program("bump(t)")
    derived = derive(made, SIZES)
    assert derived.program and lower(derived.program).text and not derived.notes
    assert all(formed(inspect.getdoc(getattr(added, name)) or "") for name in ("bump", "steps"))
    random = torch.Generator().manual_seed(0)
    leaves = {
        n: torch.randn([d(SIZES) for d in t.shape], generator=random, dtype=torch.float64).requires_grad_()
        for n, t in SHAPE.inputs.items()
    }
    outputs = evaluate(made, leaves, SIZES)
    coming = {n: torch.randn(t.shape, generator=random, dtype=torch.float64) for n, t in outputs.items()}
    truth = torch.autograd.grad(list(outputs.values()), list(leaves.values()), list(coming.values()))
    memory = leaves | outputs | {f"d_{n}": t for n, t in coming.items()}
    found = backward(made, derived, {n: t.detach() for n, t in memory.items()}, SIZES)
    for name, expected in zip(leaves, truth, strict=True):
        assert error(found[f"d_{name}"], expected) < 1e-12, name


def test_without_a_derivative_it_says_why(added: ModuleType) -> None:
    assert "steps: it is a step function" in derive(program("steps(t)"), SIZES).notes
    with pytest.raises(ProgramError) as refused:
        derive(program("steps(t)"), SIZES, of=["y"])
    assert refused.value.code == "wrt"
