"""Read a cubin with CUDA's tools: the registers and memory per thread, and the instructions."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.primitives.system.subprocesses import output
from coda_agent.primitives.target import TARGET

BULK = "bulk_copy"  # the error code for a bulk copy that the GPU would refuse
PLAIN = ("UTMALDG.2D", "UTMASTG.2D", "UTMAREDG.2D")  # bulk copies of an ordinary GEMM
# bulk copies of a GEMM whose rows belong to experts; each expert has its own matrix
GROUPED = ("UTMALDG.2D", "UTMALDG.3D", "UTMASTG.3D")
# bulk copies of a kernel with one GEMM per expert, whose inner dimension is the expert's rows
OWN = ("UTMALDG.4D", "UTMASTG.3D")


@dataclass(frozen=True)
class Resources:
    """A compiled kernel's resources: registers, stack bytes, spill loads and spill stores per thread, and
    counts of Hopper-specific instructions. ``stages``: the numbers of a GEMM's pipeline stages for operands,
    for stores and for loads. ``own_launch``: as in ``primitives.raw.Built``."""

    kernel: str
    schedule: dict[str, int | bool] | None
    registers: int
    stack: int
    stages: tuple[int, int, int] | None
    spill_loads: int
    spill_stores: int
    hgmma: int
    tma_loads: int
    tma_stores: int
    seconds: float
    own_launch: bool = field(default=True, kw_only=True)


def inspect_cubin(
    cubin: Path,
    name: str,
    schedule: dict[str, Any] | None,
    stages: tuple[int, int, int] | None,
    seconds: float,
    copies: Collection[str] = PLAIN,
) -> Resources:
    """Read a cubin's registers and memory with cuobjdump, and count instructions in its SASS. Raises
    CompileError with the code BULK for bulk copies that the GPU would refuse at run time."""
    found = usage(cubin)
    # skip the data-flow analysis, because nothing here needs the targets of indirect branches
    sass = tool("nvdisasm", "-c", "-ndf", str(cubin))
    check_bulk(sass, copies)

    def count(mnemonic: str) -> int:
        return len(re.findall(rf"\b{mnemonic}\b", sass))

    return Resources(
        name,
        schedule,
        found["REG"],
        found["STACK"],
        stages,
        count("LDL"),
        count("STL"),
        count(TARGET.matrix),
        count("UTMALDG"),
        count("UTMASTG"),
        round(seconds, 2),
    )


def check_bulk(sass: str, allowed: Collection[str] = PLAIN) -> None:
    """Raise CompileError for a bulk copy that is not ``allowed``. By default, only copies of a matrix's tile
    are allowed.

    For a tensor without a batch axis, QuACK gives the GPU a description with a third axis, as if the rows
    belonged to many problems, and with an address far from the tensor's own. A kernel with expert offsets
    needs stores with this description, because no other store stops at the end of an expert's rows. In a
    kernel without expert offsets, the GPU refuses a copy with this description as an illegal instruction."""
    if wrong := sorted(set(re.findall(r"\bUTMA(?:LDG|STG|REDG)\.[1-5]D", sass)) - {*allowed}):
        raise CompileError(f"{', '.join(wrong)}: bulk copies here are {', '.join(allowed)}", BULK)


def usage(cubin: Path) -> dict[str, int]:
    """The registers (REG) and the stack bytes (STACK) per thread."""
    words = tool("cuobjdump", "-res-usage", str(cubin))
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", words)}


def deepest_stack(folder: Path) -> int:
    """Return the largest stack, in bytes per thread, of the cubins in a folder, and delete the cubins."""
    deepest = 0
    for cubin in folder.rglob("*.cubin"):
        deepest = max(deepest, usage(cubin)["STACK"])
        cubin.unlink()
    return deepest


def tool(name: str, *arguments: str) -> str:
    """Run a CUDA binary tool, and return its output. The triton package contains these tools, so no CUDA
    toolkit is needed."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return output(str(path), *arguments)
