"""Measure the host time of a call: ``python -m benchmarks.host_time [--json] [--case CASE] [NAME ...]``.

The host time of a call is the time that Python and C++ take before the call returns, in microseconds. The
benchmark reads the CPU time of the thread, so other processes do not count. ``torch.mm`` is measured in the
same rounds. For a kernel, the benchmark measures the launcher and the operator of ``fused`` at the kernel's
smallest case, because this case is most like decoding. For a chain of operations, the benchmark measures the
launcher of the chain's forward, then the chain without and with autograd. On a GPU, the calls launch kernels.
Without a GPU, stubs replace the compiled kernels and the tensors are on the CPU, so the figures include only
the launcher, the operator and autograd.

With ``--case``, kernels are measured at this case of their reports, with its sizes and schedules, and each
call starts on an idle GPU, as in the reports.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from coda_agent.fused import launching, ops, programs, schedules
from coda_agent.fused.chains import Link
from coda_agent.fused.programs import Order
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.derive import chains
from coda_agent.primitives.lang.interpret import solve_sizes, torch_dtype
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.schedule import by_step
from coda_agent.primitives.runtime import launch
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.primitives.runtime.launchable import sorted_rows
from coda_agent.primitives.system.files import KERNELS
from coda_agent.primitives.system.markdown_table import markdown_table
from coda_agent.verifier.gpu.telemetry import device
from coda_agent.verifier.statistics import ratio

ROUNDS, CALLS = 40, 100
# Limit on every size. Small sizes suffice, because host time does not depend on sizes. Small sizes also avoid
# two disturbances: a queue of long kernels on a GPU, and the allocator's system calls for large CPU tensors.
LARGEST = 128
CHAINS = {
    "mlp_swiglu": (chains.mlp("swiglu"), ("out",)),
    "block_swiglu": (chains.attention_out().then(chains.mlp("swiglu"), h="h"), ("out",)),
    "attention_in_rotated": (chains.attention_in(False, True), ("qkv",)),
    "loss": (chains.loss(), ("rest_lse", "target_logit")),
}
CHAIN_SIZES = dict.fromkeys("MDFAV", LARGEST) | {"N": 192, "H": 6, "P": 32}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="kernels and chains; default: all")
    parser.add_argument("--case", help="a case of the reports; default: the smallest, in small sizes")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    names = asked.names or [*programs.accepted(), *CHAINS]
    on_gpu = torch.cuda.is_available()
    where = "cuda" if on_gpu else "cpu"
    with nullcontext() if on_gpu else stand_ins():
        kernels = {name: measured(name, where, asked.case) for name in names if name not in CHAINS}
        chained = {name: measured_chain(name, where) for name in names if name in CHAINS}
    if asked.json:
        machine = device() if on_gpu else "CPU, stand-ins"
        print(json.dumps({"where": machine, "kernels": kernels, "chains": chained}, indent=1))
        return
    lines: list[list[object]] = []
    for name, row in kernels.items():
        times, low, high = row["ratio"]
        taken = [f"{row[each]:.1f}" for each in ("call", "operator", "mm")]
        more = f"{(row['call'] - row['mm']) / row['steps']:.1f}"
        lines.append([f"`{name}`", row["steps"], *taken, f"{times:.2f} [{low:.2f}, {high:.2f}]", more])
    titles = ["kernel", "steps", "call, us", "operator, us", "torch.mm, us", "over torch.mm"]
    print(markdown_table([*titles, "more, us a step"], lines))
    columns = {
        "launcher": "launcher, us",
        "inference": "inference, us",
        "inference_more": "over launcher, us",
        "training": "training, us",
        "training_more": "over launcher, us",
        "mm": "torch.mm, us",
        "mm_training": "torch.mm training, us",
    }
    lines = [[f"`{name}`", *(f"{row[each]:.1f}" for each in columns)] for name, row in chained.items()]
    print(markdown_table(["chain", *columns.values()], lines), end="")


def measured(name: str, where: str, case: str | None = None) -> dict[str, Any]:
    """Medians in microseconds of a kernel's call, of its operator's call, and of ``torch.mm``. ``ratio``: the
    kernel's time over the time of ``torch.mm``, with an interval. Raises SystemExit if the kernel's report
    lacks the case."""
    program, order = programs.accepted()[name]
    report = json.loads((KERNELS / f"{name}.report.json").read_text(encoding="utf-8"))
    timings = [each for each in report["timings"] if case in (None, each["case"])]
    if not timings:
        raise SystemExit(f"{name}: no case {case} was measured")
    timing = min(timings, key=lambda each: math.prod(each["sizes"].values()))
    sizes = {d: n if case else min(n, LARGEST) for d, n in timing["sizes"].items()}
    inputs = {
        n: torch.zeros([d(sizes) for d in t.shape], dtype=torch_dtype(t.dtype), device=where)
        for n, t in program.signature.inputs.items()
    }
    for rows_of, rows in sorted_rows(program):
        inputs[rows_of][1:] = rows(sizes)  # so that all rows belong to the first expert
    kernel = Kernel(KernelSource(program, by_step(timing["schedules"])))
    operator = ops.define(program, order, f"{name}_host_time")  # without a GPU, the operator runs on stubs
    dims = [sizes[dim] for dim in program.signature.named]
    given = [inputs[n] if inputs[n].ndim else 1.0 for n in order.inputs if n in inputs] + dims
    inputs |= zip(program.signature.named, dims, strict=True)
    square = torch.zeros(8, 8, device=where)
    calls: list[Callable[[], Any]] = [
        lambda: kernel(**inputs),
        lambda: operator(*given),
        lambda: torch.mm(square, square),
    ]
    with torch.no_grad():
        own, through, mm = rounds(calls, where, 1 if case else CALLS)
    against = ratio(own, mm)
    return {
        "steps": len(cut(program).gemms),
        "call": statistics.median(own),
        "operator": statistics.median(through),
        "mm": statistics.median(mm),
        "ratio": [against.estimate, against.low, against.high],
    }


def measured_chain(name: str, where: str) -> dict[str, float]:
    """Medians in microseconds of a chain's launcher, of the chain without and with autograd, and of
    ``torch.mm`` without and with autograd. ``inference_more`` and ``training_more``: the chain's time minus
    its launcher's time in the same round, as a median over the rounds."""
    chain, results = CHAINS[name]
    link = Link(f"{name}_host_time", chain, results)  # without a GPU, the chain runs on stubs
    program = ops.defined[link.name].program
    declared = link.whole.signature.inputs | program.signature.inputs
    inputs: dict[str, Any] = {}
    for each in link.inputs:
        shape, dtype = [d(CHAIN_SIZES) for d in declared[each].shape], torch_dtype(declared[each].dtype)
        inputs[each] = torch.zeros(shape, dtype=dtype, device=where) if shape else 1.0
    trained = link.floats - {"cos_sin"}
    leaves = {n: t.clone().requires_grad_() if n in trained else t for n, t in inputs.items()}
    launcher = ops.Op(program, Order(link.inputs, link.outputs), declared)
    given = [*inputs.values()]
    square = torch.zeros(8, 8, device=where)
    leaf = square.clone().requires_grad_()
    calls: dict[str, Callable[[], Any]] = {
        "launcher": lambda: launcher.on_cuda(*given),
        "inference": lambda: link(**inputs),
        "training": lambda: link(**leaves),
        "mm": lambda: torch.mm(square, square),
        "mm_training": lambda: torch.mm(leaf, leaf),
    }
    times = dict(zip(calls, rounds([*calls.values()], where), strict=True))
    for each in ("inference", "training"):
        times[f"{each}_more"] = [a - b for a, b in zip(times[each], times["launcher"], strict=True)]
    return {each: statistics.median(values) for each, values in times.items()}


def rounds(calls: Sequence[Callable[[], Any]], where: str, times_each: int = CALLS) -> list[list[float]]:
    """For each call, the mean microseconds in each round of ``times_each`` calls. The calls are interleaved
    in random order."""
    settle = torch.cuda.synchronize if where == "cuda" else lambda: None
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    gc.disable()
    for _ in range(ROUNDS):
        for index in random.sample(range(len(calls)), len(calls)):
            settle()
            start = time.thread_time()
            for _ in range(times_each):
                calls[index]()
            times[index].append((time.thread_time() - start) / times_each * 1e6)
    gc.enable()
    return times


@contextmanager
def stand_ins() -> Iterator[None]:
    """In the block, replace compiled kernels by functions that do nothing, and let the launcher accept CPU
    tensors."""
    executable = "coda_agent.primitives.runtime.executable"

    def compiled(*_: Any) -> Callable[..., None]:
        return lambda *arguments: None

    def checked(signature: Any, inputs: Any, given: Any) -> dict[str, int]:
        return solve_sizes(signature, {k: tuple(t.shape) for k, t in inputs.items()}, given)

    def planned(_: Any, program: Program, sizes: Any, device: torch.device) -> Plan:
        chosen = schedules.chosen(program, sizes, "", schedules.known())
        return Plan(KernelSource(program, chosen), sizes, device)

    with (
        patch(f"{executable}.compile_gemm", compiled),
        patch(f"{executable}.compile_vector", compiled),
        patch("quack.cute_dsl_utils.get_max_active_clusters", lambda size: 30 if size == 4 else 132 // size),
        patch.object(launch, "check_tensors", checked),
        patch.object(ops.Op, "on_cpu", ops.Op.on_cuda),
        patch.object(launching.Plans, "plan", planned),
    ):
        yield


if __name__ == "__main__":
    main()
