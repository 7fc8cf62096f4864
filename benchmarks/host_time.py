"""Measure the host time of a kernel's call: ``python -m benchmarks.host_time [--json] [KERNEL ...]``.

It measures the microseconds that Python and C++ take before a call returns, for the launcher and for the
operator of ``fused``. ``torch.mm`` is measured in the same rounds. The case is the smallest one, which is
nearest to decoding. On a GPU, the calls launch kernels. Without a GPU, stubs replace the compiled
kernels and the tensors are on the CPU, so the figures include only the launcher and the operator.
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
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from coda_agent.fused import launching, ops, programs, schedules
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.interpret import solve_sizes, torch_dtype
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.schedule import by_step
from coda_agent.primitives.runtime import launch
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.primitives.runtime.launchable import sorted_rows
from coda_agent.primitives.system.markdown_table import markdown_table
from coda_agent.verifier.gpu.telemetry import device
from coda_agent.verifier.statistics import ratio

KERNELS = Path(__file__).resolve().parents[1] / "generated_kernels"
ROUNDS, CALLS = 40, 100
# The largest size. Host time depends on none, small kernels leave no queue on a GPU, and a CPU's allocator,
# which stands in for a GPU's, makes a system call for a large tensor.
LARGEST = 128


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="default: all accepted ones")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    names = asked.kernels or list(programs.accepted())
    on_gpu = torch.cuda.is_available()
    with nullcontext() if on_gpu else stand_ins(), torch.no_grad():
        rows = {name: measured(name, "cuda" if on_gpu else "cpu") for name in names}
    if asked.json:
        print(json.dumps({"where": device() if on_gpu else "CPU, stand-ins", "kernels": rows}, indent=1))
        return
    lines: list[list[object]] = []
    for name, row in rows.items():
        times, low, high = row["ratio"]
        taken = [f"{row[each]:.1f}" for each in ("call", "operator", "mm")]
        more = f"{(row['call'] - row['mm']) / row['steps']:.1f}"
        lines.append([f"`{name}`", row["steps"], *taken, f"{times:.2f} [{low:.2f}, {high:.2f}]", more])
    titles = ["kernel", "steps", "call, us", "operator, us", "torch.mm, us", "over torch.mm"]
    print(markdown_table([*titles, "more, us a step"], lines), end="")


def measured(name: str, where: str) -> dict[str, Any]:
    """Medians in microseconds of a kernel's call, of its operator's call, and of ``torch.mm``. The ratio is
    the kernel's call over ``torch.mm``, with an interval."""
    program, order = programs.accepted()[name]
    report = json.loads((KERNELS / f"{name}.report.json").read_text(encoding="utf-8"))
    timing = min(report["timings"], key=lambda each: math.prod(each["sizes"].values()))
    sizes = {d: min(n, LARGEST) for d, n in timing["sizes"].items()}
    inputs = {
        n: torch.zeros([d(sizes) for d in t.shape], dtype=torch_dtype(t.dtype), device=where)
        for n, t in program.signature.inputs.items()
    }
    for rows_of, rows in sorted_rows(program):
        inputs[rows_of][1:] = rows(sizes)  # all rows belong to the first expert
    kernel = Kernel(KernelSource(program, by_step(timing["schedules"])))
    operator = ops.define(program, order, f"{name}_host_time")  # its CPU side may be a stub
    dims = [sizes[dim] for dim in program.signature.named]
    given = [inputs[n] if inputs[n].ndim else 1.0 for n in order.inputs if n in inputs] + dims
    inputs |= zip(program.signature.named, dims, strict=True)
    square = torch.zeros(8, 8, device=where)
    calls: list[Callable[[], Any]] = [
        lambda: kernel(**inputs),
        lambda: operator(*given),
        lambda: torch.mm(square, square),
    ]
    own, through, mm = rounds(calls, torch.cuda.synchronize if where == "cuda" else lambda: None)
    against = ratio(own, mm)
    return {
        "steps": len(cut(program).gemms),
        "call": statistics.median(own),
        "operator": statistics.median(through),
        "mm": statistics.median(mm),
        "ratio": [against.estimate, against.low, against.high],
    }


def rounds(calls: Sequence[Callable[[], Any]], settle: Callable[[], Any]) -> list[list[float]]:
    """For each call, the mean microseconds in each round. The calls are interleaved in random order."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    gc.disable()
    for _ in range(ROUNDS):
        for index in random.sample(range(len(calls)), len(calls)):
            settle()
            start = time.perf_counter()
            for _ in range(CALLS):
                calls[index]()
            times[index].append((time.perf_counter() - start) / CALLS * 1e6)
    gc.enable()
    return times


@contextmanager
def stand_ins() -> Iterator[None]:
    """Replace compiled kernels by functions that do nothing, and accept CPU tensors."""
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
        patch("quack.cute_dsl_utils.get_max_active_clusters", lambda size: 132 // size),
        patch.object(launch, "check_tensors", checked),
        patch.object(ops.Op, "on_cpu", ops.Op.on_cuda),
        patch.object(launching.Plans, "plan", planned),
    ):
        yield


if __name__ == "__main__":
    main()
