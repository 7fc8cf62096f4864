"""Prepare kernels for ``fused``.

``coda-agent tune`` measures schedules at your sizes, and writes them into the table that ``fused`` reads.
``coda-agent build`` compiles kernels into the cache that ``fused`` loads from.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coda_agent.agent import arguments, setup
from coda_agent.agent.cli.exit_codes import REJECTED
from coda_agent.agent.terminal.safe_text import echo
from coda_agent.primitives.errors import Absent, InvalidInput
from coda_agent.primitives.system.files import regular

if TYPE_CHECKING:
    import torch

    from coda_agent.fused.ahead import Bound
    from coda_agent.primitives.lang.ir import Program


What = Annotated[
    Path,
    typer.Argument(
        metavar="KERNEL|MODEL",
        help="An accepted kernel's name or program.json, or a folder with a Hugging Face config.json.",
    ),
]
Sizes = Annotated[
    list[str],
    typer.Argument(
        metavar="SIZES...",
        help="Sizes such as M=4096,D=5120,F=13824; for a model, sequences x length, such as 8x2048.",
    ),
]
Stack = Annotated[bool, typer.Option("--stack", help="For a model that is patched with stack=True.")]
Training = Annotated[bool, typer.Option("--training", help="Only the kernels that training calls.")]


def tune(what: What, sizes: Sizes, stack: Stack = False, training: Training = False) -> None:
    """Find the fastest schedules on this GPU for the kernels that coda_agent.fused calls at these sizes, and
    store them where fused reads them. Each program's schedules are stored as soon as they are found."""
    wanted = _wanted(what, sizes, stack, training)
    if not setup.use_gpu(None):
        raise Absent(f"{setup.NO_H100}; tune on a machine with an H100, or run build, which needs none")
    import torch

    from coda_agent.fused import schedules
    from coda_agent.primitives.compiler.kernel_source import KernelSource
    from coda_agent.primitives.runtime.launchable import LaunchError, check_sizes
    from coda_agent.primitives.runtime.tune import NoSchedule, tuned_schedules

    gpu = torch.cuda.get_device_name()
    for program, each in wanted:
        shapes, name = schedules.products(program, each), program.signature.name
        try:
            check_sizes(program, each)
            found = tuned_schedules(KernelSource(program), _drawn(program, each), each)
        except (LaunchError, NoSchedule) as error:
            raise InvalidInput(f"{name}: {error}") from None
        rows = [schedules.TunedStep(gpu, name, step, shapes[step], one) for step, one in found.items()]
        echo(f"{len(rows)} schedules in {schedules.keep(name, rows)}")


def build(what: What, sizes: Sizes, stack: Stack = False, training: Training = False) -> None:
    """Compile the kernels that coda_agent.fused calls at these sizes, so that the first call only loads them.
    Needs no GPU."""
    wanted = _wanted(what, sizes, stack, training)
    from coda_agent.fused import ahead
    from coda_agent.primitives.runtime.launchable import LaunchError

    try:
        built = ahead.build(wanted)
    except LaunchError as error:
        raise InvalidInput(str(error)) from None
    for each in built:
        said = ", ".join(f"{dim}={size}" for dim, size in each.sizes.items())
        echo(f"{each.name}  {said}  {'refused by the compiler' if each.refused else 'ready'}")
    if any(each.refused for each in built):
        raise typer.Exit(REJECTED)


def _wanted(what: Path, sizes: list[str], stack: bool, training: bool) -> list[Bound]:
    if not what.is_dir():
        arguments.refuse_unused("it is for a model; leave it out", stack=stack, training=training)
        return _of_kernel(what, sizes)
    if not (what / "config.json").is_file():
        raise InvalidInput(f"{what}: this folder has no config.json; give a model's folder, or a kernel")
    return _of_model(what, sizes, stack, training)


def _of_kernel(kernel: Path, sizes: list[str]) -> list[Bound]:
    program = _read(arguments.existing_kernel(arguments.accepted_file(kernel, "program.json")))
    wanted = [_sizes(program, text) for text in sizes]
    from coda_agent.fused.ahead import Bound

    return [Bound(program, each) for each in wanted]


def _of_model(folder: Path, sizes: list[str], stack: bool, training: bool) -> list[Bound]:
    """The programs that a patched model with 16-bit weights calls in inference and in training, or only in
    training if ``training`` is set."""
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text) for text in sizes]
    if not all(found):
        raise InvalidInput(f"sizes {' '.join(sizes)}: for a model, give sequences x length, such as 8x2048")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise Absent("reading a model's config needs transformers: pip install transformers") from None
    import torch

    from coda_agent import fused
    from coda_agent.fused import ahead

    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        dtype = torch.float16 if config.dtype == torch.float16 else torch.bfloat16
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config).to(dtype)
    except Exception as error:  # the config's values may be wrong in any way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidInput(
            f"{folder}: transformers cannot make a causal language model of its config.json: {reason}"
        ) from None
    if not fused.patch(model, stack=stack).fused:
        raise InvalidInput(f"{folder}: no part of a {type(model).__name__} runs fused")
    shapes = [(int(each[1]), int(each[2])) for each in found if each]
    return [
        bound
        # The training program has the same name as the inference program, but more outputs. The training
        # program is tuned last, so that its schedules replace those of the inference program.
        for how in (*[ahead.inference] * (not training), ahead.training)
        for shape in shapes
        for bound in ahead.called(how(model, *shape))
    ]


def _read(path: Path) -> Program:
    from coda_agent.primitives.lang.errors import ProgramError
    from coda_agent.primitives.lang.ir import Program

    try:
        return Program.from_json(regular(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ProgramError) as error:
        raise InvalidInput(f"{path}: {error}") from None


def _sizes(program: Program, text: str) -> dict[str, int]:
    """Parse a text such as ``M=128,K=4096``, which must give one size for every dim of the program."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    found = {name.strip(): int(value) for name, _, value in pairs if value.strip().isdecimal()}
    dims = program.signature.dims
    if set(found) != set(dims) or len(pairs) != len(dims) or not all(found.values()):
        example = ",".join(f"{dim}=4096" for dim in dims)
        raise InvalidInput(f"sizes {text!r} must give {', '.join(dims)} once each, such as {example}")
    return found


def _drawn(program: Program, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    import torch

    from coda_agent.primitives.lang.interpret import torch_dtype
    from coda_agent.primitives.lang.signature import INDICES

    drawn = {}
    for name, tensor in program.signature.inputs.items():
        shape, dtype = [d(sizes) for d in tensor.shape], torch_dtype(tensor.dtype)
        made = torch.zeros if tensor.dtype in INDICES else torch.randn
        drawn[name] = made(shape, device="cuda").to(dtype)
        if not shape:
            drawn[name].abs_()  # a negative scalar, such as a negative eps, could make every result NaN
    return drawn
