"""``coda-agent derive``: write the backward of a kernel as programs, with their spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coda_agent.agent import arguments
from coda_agent.agent.cli.show import read
from coda_agent.agent.options import WeakJail
from coda_agent.agent.reporting.safe_text import echo

if TYPE_CHECKING:
    from coda_agent.primitives.derive import Derived
    from coda_agent.primitives.lang.ir import Program
    from coda_agent.verifier.spec.model import Spec

WIDTH = 2048  # of the next product where its size is not known


def derive(
    kernel: Annotated[
        Path, typer.Argument(metavar="KERNEL", help="An accepted kernel's name or program.json, or a file.")
    ],
    spec: Annotated[
        Path | None, typer.Option(help="Its spec. Default: NAME.yaml beside NAME.py, or in specs/.")
    ] = None,
    wrt: Annotated[
        str | None, typer.Option(help="Inputs whose gradients are wanted, as x,w. Default: all of floats.")
    ] = None,
    of: Annotated[
        str | None, typer.Option(help="Outputs whose gradients come in, as act. Default: all.")
    ] = None,
    behind: Annotated[
        str | None,
        typer.Option(metavar="OUTPUT", help="The output whose gradient the next operator's product makes."),
    ] = None,
    save_bytes: Annotated[
        int | None,
        typer.Option(help="At most so many bytes a row are stored for the backward, beside the inputs."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write to.")] = Path(),
    weak_jail: WeakJail = False,
) -> None:
    """Derive a kernel's backward: programs of products with what rides on them, and their spec."""
    from coda_agent.primitives.derive import derive as derived_of
    from coda_agent.primitives.lang.errors import ProgramError

    kernel = arguments.accepted(kernel, "program.json")
    loaded, program, _ = read(kernel, spec, weak_jail)
    try:
        derived = derived_of(
            program,
            loaded.cases[0].sizes,
            wrt=_names(wrt),
            of=_names(of),
            behind=behind,
            save_bytes=save_bytes,
            positive={n for n, t in loaded.inputs.items() if t.domain == "positive"},
        )
    except ProgramError as error:
        raise typer.BadParameter(f"{kernel}: {error.message}") from None
    if not out.is_dir():
        raise typer.BadParameter(f"--out {out}: there is no such folder")
    for line in (*_told(derived, loaded), *_written(derived, loaded, out)):
        echo(line)


def _names(given: str | None) -> list[str] | None:
    return [name.strip() for name in given.split(",")] if given else None


def _told(derived: Derived, spec: Spec) -> list[str]:
    """Lines about the steps, what is stored and recomputed, bytes and FLOPs, and what is left."""
    from coda_agent.primitives.derive import NEXT, all_sizes, ledger
    from coda_agent.primitives.lang.partition import cut

    lines: list[str] = []
    if derived.program:
        signature = derived.program.signature
        for step in cut(derived.program).gemms:
            lines.append(f"step {step.index}: {_step(derived.program, step)}")
        sizes = all_sizes(derived, {NEXT: WIDTH, **spec.cases[0].sizes})
        count = ledger.count(derived.program, sizes)
        lines.append(
            f"at {spec.cases[0].name}: {count.moved / 1e6:.1f} MB moved, {count.least / 1e6:.1f} MB at "
            f"least; {count.flops / 1e12:.3f} TFLOP in {len(cut(derived.program).gemms)} products"
        )
        if NEXT in signature.dims:
            lines.append(f"{NEXT}, the next product's inner size, counts as {WIDTH}")
    lines.append(f"reads of the forward: {', '.join(derived.stored)}")
    for name, node in derived.saves.items():
        lines.append(f"the forward must also store node {node} as {name}")
    if derived.head:
        lines.append(f"without a product to ride on, for torch.compile: {', '.join(derived.head.outputs)}")
    lines += [f"{name} is {other} as it is" for name, other in derived.same.items()]
    lines += [f"no gradient of {name}: {why}" for name, why in derived.left.items()]
    return lines + list(derived.notes)


def _step(program: Program, step: Any) -> str:
    names = {i: n for n, i in program.outputs.items()}

    def said(index: int) -> str:
        node = program.nodes[index]
        if node.op == "transpose":
            return f"{said(node.args[0])}.mT"
        return str(node.attribute) if node.op == "input" else names.get(index, f"node {index}")

    operands = ", ".join(said(i) for i in program.nodes[step.gemm].args)
    parts = [f"gemm({operands})", f"{len(step.body) - 1} operations ride on it"]
    if step.stores:
        parts.append(f"stores {', '.join(map(said, step.stores))}")
    if step.reductions:
        parts.append(f"sums for {', '.join(said(i) for i in step.reductions)}")
    return "; ".join(parts)


def _written(derived: Derived, spec: Spec, out: Path) -> list[str]:
    """Write the files; a line for each."""
    from coda_agent.primitives.derive.reference import reference
    from coda_agent.primitives.lang.errors import ProgramError

    texts: dict[str, str] = {}
    lines: list[str] = []
    for part in (derived.program, derived.head):
        if part:
            texts[f"{part.signature.name}.program.json"] = part.to_json()
    if derived.program:
        name = derived.program.signature.name
        try:
            texts[f"{name}.yaml"] = _spec(derived, derived.program, spec)
        except ProgramError as error:
            lines.append(f"no spec: {error.message}")
    if derived.head:
        try:
            text = reference(derived.head)
            texts[f"{derived.head.signature.name}.txt"] = text
        except ProgramError as error:
            lines.append(f"no PyTorch text of the head: {error.message}")
    for name, text in texts.items():
        with arguments.named(out / name):
            (out / name).write_text(text, encoding="utf-8")
        lines.append(str(out / name))
    return lines


def _spec(derived: Derived, program: Program, forward: Spec) -> str:
    """The YAML of a spec whose reference is what the program computes."""
    from coda_agent.primitives.derive import NEXT, all_sizes
    from coda_agent.primitives.derive.reference import reference

    signature = program.signature
    lines = [f"name: {signature.name}", f"summary: Backward of {forward.name}, derived from its program."]
    said = {d: forward.dims.get(d, "width") for d in signature.dims}
    lines += [f"dims: {json.dumps(said)}", "inputs:"]
    for name, tensor in signature.inputs.items():
        entry: dict[str, Any] = {"shape": [str(d) for d in tensor.shape], "dtype": tensor.dtype}
        known = forward.inputs.get(name)
        if known:
            entry |= known.model_dump(mode="json", include={"init", "domain"}, exclude_none=True)
        lines.append(f"  {name}: {json.dumps(entry)}")
    if signature.static:
        lines.append(f"static: {json.dumps(list(signature.static))}")
    lines.append("outputs:")
    for name, tensor in signature.outputs.items():
        shape = [str(d) for d in tensor.shape]
        lines.append(f"  {name}: {json.dumps({'shape': shape, 'dtype': tensor.dtype})}")
    for key, cast in (("reference", False), ("baseline", True)):
        lines += [f"{key}: |", *(f"  {line}" for line in reference(program, cast).splitlines())]
    lines.append("cases:")
    for case in forward.cases:
        sized = all_sizes(derived, {NEXT: WIDTH, **case.sizes})
        sizes = {d: sized[d] for d in signature.dims}
        lines.append(f"  - {json.dumps({'name': case.name, **sizes, 'bench': case.bench})}")
    return "\n".join([*lines, "accept: {speedup: 1.0}"]) + "\n"
