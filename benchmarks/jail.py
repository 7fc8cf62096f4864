"""Measure what the sandbox's jail costs: ``python -m benchmarks.jail [--json]``.

Every accepted kernel's file is traced in the jail, an isolated process. The traces alternate with runs of a
bare ``python -I -S``, so that the ratio of the two times is valid on a busy machine too.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

from coda_agent.primitives.system.files import KERNELS, SPECS
from coda_agent.verifier.loading import load
from coda_agent.verifier.sandbox import jail

ROUNDS = 5


def main(arguments: list[str]) -> None:
    found = measure(ROUNDS)
    if arguments == ["--json"]:
        print(json.dumps(found, indent=1))
        return
    print("\n".join(f"{name}: {value}" for name, value in found["where"].items()))
    for name, ms in found["milliseconds"].items():
        print(f"{name}: median {ms['median']:.1f} ms, 95th percentile {ms['p95']:.1f} ms")
    print(f"a trace is {found['ratio']:.1f} times a bare interpreter")


def measure(rounds: int) -> dict[str, Any]:
    """Measure the milliseconds of a jailed trace and of a bare interpreter, and the ratio of their medians.
    The result also describes the machine."""
    accepted = (path for path in sorted(KERNELS.glob("*.py")) if path.stem.isidentifier())
    honest = [(p.read_text(), load(SPECS / f"{p.stem}.yaml", check=False)) for p in accepted]
    jailed: list[float] = []
    bare: list[float] = []
    layers: tuple[str, ...] = ()
    for _ in range(rounds):
        for source, spec in honest:
            bare.append(_milliseconds(_start_bare))
            start = time.perf_counter()
            traced = jail.trace(source, spec.signature())
            jailed.append((time.perf_counter() - start) * 1e3)
            assert isinstance(traced, jail.Traced), traced
            layers = traced.layers
    return {
        "where": {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}",
            "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
            "layers": ", ".join(layers),
            "traces": f"{len(jailed)}, of {len(honest)} kernels",
        },
        "milliseconds": {"jailed trace": _summary(jailed), "python -I -S": _summary(bare)},
        "ratio": median(jailed) / median(bare),
    }


def _start_bare() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], env={}, check=True)


def _milliseconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "p95": quantiles(values, n=20)[-1]}


if __name__ == "__main__":
    main(sys.argv[1:])
