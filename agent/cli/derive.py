"""``coda-agent derive``: write the backward of a kernel as programs, with their spec."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coda_agent.agent import arguments
from coda_agent.agent.cli.show import read
from coda_agent.agent.options import WeakJail, grouped
from coda_agent.agent.terminal.safe_text import echo
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.system.files import write_atomic

if TYPE_CHECKING:
    from coda_agent.agent.backward import Pair
    from coda_agent.primitives.derive import Derived
    from coda_agent.primitives.lang.ir import Program
    from coda_agent.verifier.spec.model import Spec

KERNEL_OR_SPEC = "An accepted kernel's name or program.json, a kernel's file, or its spec."


@dataclass(frozen=True)
class DeriveOptions:
    """The options that choose the gradients to derive, and the values to store for the backward."""

    wrt: Annotated[
        str | None,
        typer.Option(help="Inputs to differentiate, such as x,w. Default: all floating-point inputs."),
    ] = None
    of: Annotated[
        str | None, typer.Option(help="Outputs with incoming gradients, such as act. Default: all.")
    ] = None
    behind: Annotated[
        str | None,
        typer.Option(
            metavar="OUTPUT",
            help="An output that the next matmul reads; its gradient is the matmul of d_next and w_next.",
        ),
    ] = None
    save_bytes: Annotated[
        int | None,
        typer.Option(help="Limit on the bytes per row stored for the backward, not counting the inputs."),
    ] = None
    save: Annotated[
        str | None,
        typer.Option(help="Values that must be stored, such as 'act,node 3': an output and a node."),
    ] = None
    recompute: Annotated[str | None, typer.Option(help="Outputs that must be recomputed, such as act,z.")] = (
        None
    )
    accumulate: Annotated[
        str | None, typer.Option(help="Inputs whose gradients are added to an fp32 buffer, such as w.")
    ] = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``primitives.derive.derive``."""
        wanted: dict[str, Any] = {"wrt": _names(self.wrt), "of": _names(self.of)}
        lists = {"save": self.save, "recompute": self.recompute, "accumulate": self.accumulate}
        wanted |= {name: _names(value) or () for name, value in lists.items()}
        return wanted | {"behind": self.behind, "save_bytes": self.save_bytes}


@grouped
def derive(
    kernel: Annotated[Path, typer.Argument(metavar="KERNEL_OR_SPEC", help=KERNEL_OR_SPEC)],
    options: DeriveOptions,
    spec: Annotated[
        Path | None, typer.Option(help="The kernel's spec. Default: NAME.yaml next to NAME.py, or in specs/.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Compare forward and backward with fp64 autograd, as verify does."),
    ] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write to.")] = Path(),
    weak_jail: WeakJail = False,
) -> None:
    """Derive a kernel's backward: programs of matmuls with fused epilogues, and their spec."""
    from coda_agent.agent.backward import pair
    from coda_agent.primitives.derive import derive as derived_of
    from coda_agent.primitives.lang.errors import ProgramError

    kernel, spec = _kernel(kernel, spec)
    loaded, source = read(kernel, spec, weak_jail)
    try:
        derived = derived_of(
            source.program,
            loaded.cases[0].sizes,
            positive={n for n, t in loaded.inputs.items() if t.domain == "positive"},
            **options.arguments(),
        )
        made = pair(loaded, source.program, derived, _names(options.of), options.behind)
    except ProgramError as error:
        raise typer.BadParameter(f"{kernel}: {error.message}") from None
    if not out.is_dir():
        raise typer.BadParameter(f"--out {out}: no such folder; create it first")
    for line in (*_summary(derived, loaded), *_written(derived, made, out)):
        echo(line)
    if check:
        refused = _refused(made) if made else "the backward has no matmuls"
        missing = f"; not formed: {', '.join(derived.left)}" if derived.left else ""
        right = f"right: forward and backward agree with fp64 autograd{missing}"
        echo(f"refused: {refused}" if refused else right)
        raise typer.Exit(bool(refused))


def _kernel(given: Path, spec: Path | None) -> tuple[Path, Path | None]:
    """The kernel's file and its spec. If ``given`` is a spec, use the kernel next to it, or else the accepted
    kernel of that name."""
    if given.suffix not in (".yaml", ".yml"):
        return arguments.accepted_file(given, "program.json"), spec
    if spec:
        raise typer.BadParameter(f"--spec {spec}: {given} is a spec itself; give one of them")
    beside = [given.with_suffix(ending) for ending in (".program.json", ".py")]
    accepted = arguments.shipped(arguments.KERNELS / f"{given.stem}.program.json")
    found = [path for path in (*beside, accepted) if path.is_file()]
    if not found:
        words = f"it has no kernel: neither {' nor '.join(map(str, (*beside, accepted)))} exists"
        raise typer.BadParameter(f"{given}: {words}; author one first: coda-agent generate {given}")
    return found[0], given


def _refused(made: Pair) -> str:
    """Why the derived program fails a gate of the verifier; "" if the program passes."""
    from coda_agent.verifier.spec.file import SpecError
    from coda_agent.verifier.verify import check_program

    try:
        rejected = check_program(made.spec, made.program)
    except SpecError as error:
        return error.message
    return f"{rejected.code}: {rejected.message}" if rejected else ""


def _names(given: str | None) -> list[str] | None:
    return [name.strip() for name in given.split(",")] if given else None


def _summary(derived: Derived, spec: Spec) -> list[str]:
    """Lines about the steps, stored and recomputed tensors, bytes and FLOPs, and the inputs without a
    gradient."""
    from coda_agent.primitives.derive import NEXT, NEXT_SIZE, all_sizes, ledger
    from coda_agent.primitives.lang.partition import cut

    lines: list[str] = []
    if derived.program:
        signature = derived.program.signature
        for step in cut(derived.program).gemms:
            lines.append(f"step {step.index}: {_step(derived.program, step)}")
        sizes = all_sizes(derived, {NEXT: NEXT_SIZE, **spec.cases[0].sizes})
        count, bound = ledger.count(derived.program, derived.head, sizes), derived.bound
        lines.append(
            f"at {spec.cases[0].name}: {count.moved / 1e6:.1f} MB moved, {bound.least / 1e6:.1f} MB at "
            f"least; {count.flops / 1e12:.3f} TFLOP in {len(cut(derived.program).gemms)} matmuls, "
            f"{bound.flops / 1e12:.3f} at least"
        )
        if NEXT in signature.dims:
            lines.append(f"{NEXT}, the next matmul's inner size, is taken as {NEXT_SIZE}")
    lines.append(f"reads from the forward: {', '.join(derived.stored)}")
    for name, node in derived.saves.items():
        lines.append(f"the forward must also store node {node} as {name}")
    if derived.recomputed:
        lines.append(f"computed again: {', '.join(derived.recomputed)}")
    if derived.head:
        lines.append(f"computed without a matmul, by torch.compile: {', '.join(derived.head.outputs)}")
    lines += [f"{name} equals {other}" for name, other in derived.same.items()]
    lines += [f"{name} is the sum of {parts}" for name, parts in derived.folds.items()]
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
    parts = [f"gemm({operands})", f"{len(step.body) - 1} operations in its epilogue"]
    if step.stores:
        parts.append(f"stores {', '.join(map(said, step.stores))}")
    if step.reductions:
        parts.append(f"sums for {', '.join(said(i) for i in step.reductions)}")
    return "; ".join(parts)


def _written(derived: Derived, made: Pair | None, out: Path) -> list[str]:
    """Write the files, and return one output line per file."""
    from coda_agent.primitives.derive.reference import reference

    texts: dict[str, str] = {}
    if made:
        name = made.program.signature.name
        texts |= {f"{name}.program.json": made.program.to_json(), f"{name}.yaml": made.text}
    if derived.head:
        name = derived.head.signature.name
        texts |= {f"{name}.program.json": derived.head.to_json(), f"{name}.txt": reference(derived.head)}
    for name, text in texts.items():
        path = out / name
        with arguments.naming_file(path):
            if path.exists() and path.read_text(encoding="utf-8") != text:
                raise InvalidInput(f"{path}: the file exists, with other content; remove it, or give --out")
    for name, text in texts.items():
        with arguments.naming_file(out / name):
            write_atomic(out / name, text)
    return [str(out / name) for name in texts]
