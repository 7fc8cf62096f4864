"""Lowering: Program -> the text of one CuTeDSL module, and which tensor each of its arguments is.

Each step becomes a class (``primitives.visitor``), vector arithmetic after it one small kernel
(``primitives.finish``). Every identifier is invented there; constants pass through ``float.hex``.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

from primitives.cut import cut
from primitives.finish import FinishWriter, by_length
from primitives.interpret import store_dtypes
from primitives.ir import Program, ProgramError
from primitives.lowered import Argument, GemmKernel, Lowered, VectorKernel
from primitives.visitor import StepWriter

PACKAGES = ("nvidia-cutlass-dsl", "quack-kernels")


def lower(program: Program) -> Lowered:
    """Lower a checked program. ProgramError where QuACK's resources do not reach, saying what would."""
    steps = cut(program)
    stored = store_dtypes(program)
    writers = [StepWriter(program, steps, step, stored) for step in steps.gemms]
    finishes = [
        FinishWriter(program, steps, stage, nodes)
        for stage, members in sorted(steps.finishes.items())
        for nodes in by_length(steps, members)
    ]
    body = "\n\n".join([w.text() for w in writers] + [w.text() for w in finishes])
    digest = hashlib.sha256("\0".join([body, device_sources(), *map(version, PACKAGES)]).encode()).hexdigest()
    suffix = f"_{digest[:12]}"
    text = _HEADER + "\n\n" + re.sub(r"@@(\w+)", lambda m: m[1] + suffix, body)
    for kernel in (w.kernel() for w in writers):
        schedule = program.schedule.get(kernel.step)
        if kernel.half and schedule and schedule.tile_n % 32:
            raise ProgramError(
                "schedule",
                f"step {kernel.step} stores a tile half as wide as its gemm: tile_n is a multiple of 32 "
                f"then, not {schedule.tile_n}",
            )
    return Lowered(
        text,
        digest,
        tuple(replace(w.kernel(), name=w.kernel().name + suffix) for w in writers),
        tuple(replace(w.kernel(), name=w.kernel().name + suffix) for w in finishes),
    )


@cache
def device_sources() -> str:
    """The project's own device code: it is part of what a lowered text means."""
    return (Path(__file__).parent / "device.py").read_text(encoding="utf-8")


_HEADER = '''\
"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad, RowVecLoad, Scalar, TileLoad, TileStore

from primitives.device import (
    BLOCK, LANES_PER_ROW, FusedGemm, RowSum, arguments, choose, edge, fragment, half_fragment, inside,
    pack, sigmoid, sigmoid_fast, sum_partials, tanh, tanh_fast, unpack, wide_fragment,
)
'''

__all__ = ["PACKAGES", "Argument", "GemmKernel", "Lowered", "VectorKernel", "device_sources", "lower"]
