"""``coda-agent tune``: measure a kernel's schedules at sizes of your own, into the table that fused reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coda_agent.agent import arguments, setup
from coda_agent.agent.reporting.safe_text import echo
from coda_agent.primitives.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from coda_agent.primitives.lang.ir import Program


def tune(
    kernel: Annotated[
        Path, typer.Argument(metavar="KERNEL", help="An accepted kernel's name or program.json.")
    ],
    sizes: Annotated[list[str], typer.Argument(metavar="SIZES...", help="Such as M=4096,D=5120,F=13824.")],
) -> None:
    """Find the fastest schedules at these sizes, on this GPU, and keep them for fused."""
    program = _read(arguments.accepted(kernel, "program.json"))
    wanted = [_sizes(program, text) for text in sizes]
    setup.use_gpu(True)
    import torch

    from coda_agent.fused import schedules
    from coda_agent.primitives.compiler.kernel_source import KernelSource
    from coda_agent.primitives.runtime.tune import tuned

    rows, gpu = [], torch.cuda.get_device_name()
    for each in wanted:
        shapes = schedules.products(program, each)
        for step, schedule in tuned(KernelSource(program), _drawn(program, each), each).items():
            rows.append(schedules.TunedStep(gpu, program.signature.name, step, shapes[step], schedule))
    echo(f"{len(rows)} schedules in {schedules.keep(program.signature.name, rows)}")


def _read(path: Path) -> Program:
    from coda_agent.primitives.lang.errors import ProgramError
    from coda_agent.primitives.lang.ir import Program

    try:
        return Program.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ProgramError) as error:
        raise InvalidInput(f"{path}: {error}") from None


def _sizes(program: Program, text: str) -> dict[str, int]:
    """``M=128,K=4096`` for every dim of the program."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    found = {name.strip(): int(value) for name, _, value in pairs if value.strip().isdecimal()}
    dims = program.signature.dims
    if set(found) != set(dims) or len(pairs) != len(dims) or not all(found.values()):
        example = ",".join(f"{dim}=4096" for dim in dims)
        raise InvalidInput(f"sizes {text!r} are not {', '.join(dims)}, each once; write them as {example}")
    return found


def _drawn(program: Program, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    import torch

    from coda_agent.primitives.lang.interpret import torch_dtype
    from coda_agent.primitives.lang.ir import INDICES

    drawn = {}
    for name, tensor in program.signature.inputs.items():
        shape, dtype = [d(sizes) for d in tensor.shape], torch_dtype(tensor.dtype)
        made = torch.zeros if tensor.dtype in INDICES else torch.randn
        drawn[name] = made(shape, device="cuda").to(dtype)
    return drawn
