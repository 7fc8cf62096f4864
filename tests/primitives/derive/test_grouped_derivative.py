"""The backward of products with offsets, which assign rows to experts. The backward multiplies each row by
the matrix of the row's expert. A separate product computes the gradients of the experts' matrices."""

from __future__ import annotations

import pytest
import torch
from derived import backward, error, evaluate
from kernels import signature, tensor, trace

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.primitives.derive import Derived, derive
from coda_agent.primitives.derive.reference import reference
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.runtime.compile import report
from coda_agent.verifier.numerics.reference import scope

INPUTS = {
    "x": tensor("T, K"),
    "w": tensor("E, 2*F, K"),
    "v": tensor("E, N, F"),
    "offsets": tensor("E + 1", "int32"),
    "gate": tensor("T", "fp32"),
}
SIZES = {"T": 4096, "E": 8, "K": 1024, "F": 512, "N": 1024}


@pytest.fixture(scope="module")
def experts() -> tuple[Program, Derived]:
    """Return a program with the two projections of a mixture of experts, and the derived backward."""
    program = trace(
        signature(INPUTS, {"preact": tensor("T, 2*F"), "y": tensor("T, N")}),
        "preact = gemm(x, w.mT, offsets)",
        "even, odd = pairs(preact)",
        "act = silu(even) * odd",
        "return {'preact': preact, 'y': gemm(act, v.mT, offsets) * per_row(gate)}",
    )
    return program, derive(program, of=("y",), sizes=SIZES)


@pytest.mark.parametrize("offsets", [[0, 5, 9, 16], [0, 0, 16, 16], [0, 1, 1, 16], [0, 16, 16, 16]], ids=str)
def test_a_mixture_has_autograds_gradients(experts: tuple[Program, Derived], offsets: list[int]) -> None:
    program, derived = experts
    sizes, random = {"T": 16, "E": 3, "K": 5, "F": 4, "N": 7}, torch.Generator().manual_seed(0)
    leaves = {
        name: torch.randn([d(sizes) for d in t.shape], generator=random, dtype=torch.float64)
        for name, t in INPUTS.items()
        if name != "offsets"
    }
    floats = {name: t.requires_grad_() for name, t in leaves.items()}
    memory = leaves | {"offsets": torch.tensor(offsets)}
    outputs = evaluate(program, memory, sizes)
    d_y = torch.randn(outputs["y"].shape, generator=random, dtype=torch.float64)
    truth = dict(zip(floats, torch.autograd.grad(outputs["y"], [*floats.values()], d_y), strict=True))
    known = {n: t.detach() for n, t in (memory | outputs | {"d_y": d_y}).items()}
    got = backward(program, derived, known, sizes)
    assert got.keys() == {f"d_{name}" for name in floats} and not derived.left
    assert max(error(got[f"d_{name}"], value) for name, value in truth.items()) < 1e-12
    assert derived.program and not derived.head
    said: dict[str, torch.Tensor] = dict(known)
    # the derived program, written as PyTorch text, computes the same gradients
    exec(reference(derived.program), dict(scope()), said)
    assert max(error(said[name], value) for name, value in got.items()) < 1e-12


def test_it_is_four_products_in_one_program(experts: tuple[Program, Derived]) -> None:
    """The backward recomputes no product of the forward, and the gradient of the router's gate needs no extra
    product."""
    _, derived = experts
    assert derived.program
    gemms = lower(derived.program).gemms
    assert len(gemms) == 4 and [gemm.own for gemm in gemms].count(True) == 2
    assert not derived.recomputed.keys() & {"preact", "y"}


def test_a_buffer_for_an_experts_gradient_is_refused(experts: tuple[Program, Derived]) -> None:
    program, _ = experts
    with pytest.raises(ProgramError, match="d_w has a matrix for each expert, which a kernel cannot add"):
        derive(program, of=("y",), sizes=SIZES, accumulate=("w",))


@pytest.mark.slow
def test_it_compiles(experts: tuple[Program, Derived]) -> None:
    _, derived = experts
    assert derived.program
    found = report(KernelSource(derived.program), {}, PROBES[:1])
    assert {r.kernel[:5] for r in found} >= {"Step0", "Step1", "Step2", "Step3", "Bound", "Finis"}


def test_gathered_rows_have_no_gradient_yet() -> None:
    inputs = INPUTS | {"x": tensor("S, K"), "index": tensor("T", "int32")}
    program = trace(
        signature({n: inputs[n] for n in ("x", "w", "offsets", "index")}, {"y": tensor("T, 2*F")}),
        "return {'y': gemm(x, w.mT, offsets, index)}",
    )
    with pytest.raises(ProgramError, match="gather x before the kernel"):
        derive(program, of=("y",), sizes=SIZES | {"S": 512})
