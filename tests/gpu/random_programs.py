"""A task of a GPU worker: compile one random program, run it, and compare its outputs with the
interpreter's."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from programs import Made, Tensors, random_program, random_schedule

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import OPERATIONS, Program
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.primitives.runtime.precompile import refusals
from coda_agent.verifier.gpu.guards import POISONS, Guarded, untouched

DEVICE = "cuda"
POISON = POISONS[0]  # the value of every poisoned byte; a poisoned float is NaN, an integer is -1
ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NameError,
    OSError,
    TypeError,
    *refusals(),
)


class Limits(NamedTuple):
    """Limits on the difference between a kernel's output and the interpreter's output. The difference is
    first reduced by what rounding may cause. ``most`` limits the largest difference, and ``mean`` the root
    mean square of all differences. Both limits are relative to the root mean square of the interpreter's
    output."""

    most: float
    mean: float


# These limits allow for sums in another order, and for the hardware's exp, log and rsqrt.
EXACT = Limits(1e-4, 1e-5)
# These limits allow for the hardware's tanh, which has an error of 2**-11. Lowered text uses this tanh only
# where the result is rounded to bf16.
COARSE = Limits(8e-3, 2e-3)
# Between two promotions to fp32, the hardware sums fp8 products with about 14 bits.
FP8 = Limits(8e-3, 2e-3)
# A value near the middle between two 16-bit values may be rounded to either of the two. So the values that
# the next step reads may differ by one ulp of bf16.
CHAINED = Limits(4e-2, 4e-3)


def limits(program: Program, dtype: torch.dtype) -> Limits:
    steps = cut(program)
    chained = len(steps.gemms) > 1 or -1 in steps.finishes
    fp8 = any(t.dtype == "fp8_e4m3" for t in program.signature.inputs.values())
    coarse = dtype == torch.bfloat16
    chosen = [CHAINED] * chained + [FP8] * fp8 + [COARSE] * coarse + [EXACT]
    return Limits(max(c.most for c in chosen), max(c.mean for c in chosen))


def distance(got: torch.Tensor, want: torch.Tensor, allowed: Limits) -> float:
    """Return an output's error divided by the allowed error; a value above 1 is too large. Return infinity if
    the output is not finite."""
    got, exact = got.double(), want.double()  # torch.isfinite refuses fp8
    if not got.isfinite().all():
        return float("inf")
    scale = max(exact.square().mean().sqrt().item(), 0.05)
    error = (got - exact).abs()
    steps = torch.finfo(want.dtype)
    # One ulp is no error, because both outputs are rounded.
    rounding = 1.5 * steps.eps * exact.abs().clamp(min=steps.smallest_normal)
    past = (error - rounding).clamp(min=0)
    most = (past / (allowed.most * scale + 1e-30)).max().item()
    mean = past.square().mean().sqrt().item() / (allowed.mean * scale)
    return max(most, mean)


class Case(NamedTuple):
    seed: int
    made: Made
    program: Program
    sizes: dict[str, int]
    schedules: dict[int, Schedule]


def case(seed: int) -> Case | None:
    """Return the case that a seed determines, or None if the tracer refuses its program."""
    made, random = random_program(seed), Random(seed)
    try:
        program = made.trace()
    except ProgramError:
        return None
    sizes = made.sizes(program, random, large=True)
    schedules = {g.step: random_schedule(random, g, sizes) for g in lower(program).gemms}
    return Case(seed, made, program, sizes, schedules)


def run_case(seed: int) -> dict[str, Any]:
    """Compile and run the program that the seed determines, and compare its outputs with the interpreter's.
    Return the findings. Raises RuntimeError after a GPU fault, from which the process cannot recover."""
    chosen = case(seed)
    assert chosen is not None  # the caller passes only seeds whose programs trace
    try:
        found = check(chosen)
    except ERRORS:
        found = {"error": traceback.format_exc(limit=-6)[-3000:]}
    torch.cuda.synchronize()
    return found


def check(chosen: Case) -> dict[str, Any]:
    """Return the findings for the first schedules that can be launched: the case's own or a fallback. Like
    the tuner, skip schedules that need more resources than an SM has."""
    words = []
    for schedules in (chosen.schedules, *fallbacks(chosen)):
        try:
            with few_clusters(any(s.split for s in schedules.values())):
                plan = Plan(KernelSource(chosen.program, schedules), chosen.sizes, DEVICE)
            found = compare(chosen.made, plan, chosen.seed)
        except refusals():  # the tuner also skips a schedule after such an error
            words.append(traceback.format_exc(limit=-3)[-1500:])
            if "illegal" in words[-1] or "misaligned" in words[-1]:
                break
        else:
            return found | {"passed_over": words}
    return {"error": "\n".join(words)}


@contextlib.contextmanager
def few_clusters(split: bool) -> Iterator[None]:
    """If ``split``, pretend that the GPU has 24 SMs. On 24 SMs the small outputs of a case need several
    waves, so that a second launch saves time."""
    if not split:
        yield
        return
    with patch("quack.cute_dsl_utils.get_max_active_clusters", {1: 24, 2: 12, 4: 5}.__getitem__):
        yield


def fallbacks(chosen: Case) -> list[dict[int, Schedule]]:
    gemms = lower(chosen.program).gemms
    common = [s for s in PROBES if all(g.admits(s, chosen.sizes) for g in gemms)]
    return [{g.step: s for g in gemms} for s in common]


def compare(made: Made, plan: Plan, seed: int) -> dict[str, Any]:
    """Run the plan twice, and compare its outputs with the interpreter's."""
    program, signature = plan.program, plan.program.signature
    drawn = made.draw(plan.sizes, seed, DEVICE)
    fresh = {name: t for name, t in plan.outputs().items() if name not in signature.updates}
    read, written = Guarded(drawn, POISON), Guarded(fresh, POISON)
    inputs = read.tensors
    outputs = written.tensors | {name: inputs[old] for name, old in signature.updates.items()}
    runs = [launch(plan, drawn, inputs, outputs) for _ in range(2)]
    beside = [held.written_beside(POISON) for held in (read, written)]
    faults = [f"{k}: the bytes around it were written" for names in beside for k in names]
    if not untouched(plan.gaps, POISON):
        faults.append("the workspace: bytes between its tensors were written")
    read_only = drawn.keys() - signature.updates.values()
    faults += [f"{k}: an input was written" for k in sorted(read_only) if differ(inputs[k], drawn[k])]
    faults += [f"{k}: two runs differ" for k in outputs if differ(runs[0][k], runs[1][k])]
    expected = interpret(program, drawn)
    far = {k: distance(v, expected[k], limits(program, v.dtype)) for k, v in runs[0].items()}
    faults += [f"{k}: {describe(runs[0][k], expected[k])}" for k, v in far.items() if not v <= 1]
    return {"error": "; ".join(faults), "far": far}


def launch(plan: Plan, drawn: Tensors, inputs: Tensors, outputs: Tensors) -> Tensors:
    """Run the plan once on poisoned memory; return copies of the outputs."""
    for tensor in outputs.values():
        tensor.copy_(torch.full_like(tensor, float("nan")))
    plan.workspace.fill_(POISON)
    for name, tensor in inputs.items():
        tensor.copy_(drawn[name])
    plan.run(inputs, outputs)
    torch.cuda.synchronize()
    return {name: t.clone() for name, t in outputs.items()}


def differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors differ in any bit."""
    return not torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def describe(got: torch.Tensor, want: torch.Tensor) -> str:
    """Describe where the output ``got`` differs most from the expected output ``want``."""
    error = (got.double() - want.double()).abs().nan_to_num(nan=1e30, posinf=1e30)
    at = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
    many = int((error > 0.05 * error.max()).sum())
    nan = int((~got.double().isfinite()).sum())
    return (
        f"{list(got.shape)} {got.dtype} at {at}: {float(got[tuple(at)]):.6g} for "
        f"{float(want[tuple(at)]):.6g}; {many} of {error.numel()} elements off like that, {nan} not finite"
    )


def operations(cases: list[Case]) -> set[str]:
    return {n.op for c in cases for n in c.program.nodes} & OPERATIONS.keys()


def account(chosen: Case) -> Mapping[str, Any]:
    """Return the facts that are needed to reproduce a failure of this case."""
    return {
        "seed": chosen.seed,
        "sizes": chosen.sizes,
        "schedules": {k: s.to_json() for k, s in chosen.schedules.items()},
        "signature": chosen.made.signature.to_json(),
        "source": chosen.made.source,
    }
