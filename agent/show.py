"""What ``coda-agent show KERNEL`` says: a program's steps in words, its CuTeDSL, its resources, its roofline.

Data first: ``steps`` and ``as_dict`` need the standard library only; ``render`` draws the same with rich.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from primitives.cut import REDUCTIONS, GemmStep, cut
from primitives.dims import Dim
from primitives.ir import Program
from primitives.roofline import (
    H100,
    Machine,
    Roofline,
    StepFloor,
    VectorStep,
    memory_dtypes,
    operand_source,
    roofline,
    value_names,
    vector_steps,
)

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from primitives.compile import Resources

Verb = Literal["load", "compute", "store", "reduce"]
Cases = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Line:
    """One thing that a step does: ``store  hg = h * per_column(gamma)  bf16 [M, N]``."""

    verb: Verb
    text: str
    tensor: str = ""


@dataclass(frozen=True)
class StepText:
    """A kernel in words. ``step`` is the GEMM step, or the one that a vector kernel follows (-1: none)."""

    step: int
    kind: Literal["gemm", "vector"]
    title: str
    lines: tuple[Line, ...]


def steps(program: Program) -> list[StepText]:
    """What each kernel of a checked program loads, computes, stores and reduces, in the order they run."""
    writer = _Writer(program)
    texts = [(float(s.index), writer.gemm(s)) for s in writer.cut.gemms]
    texts += [(v.stage + 0.5, writer.vector(v)) for v in vector_steps(program, writer.cut)]
    return [text for _, text in sorted(texts, key=lambda t: t[0])]


# Signs and how tightly they bind. fp32 sums and products do not associate: the right side binds one tighter.
_COMPARE = {"greater": ">", "greater_equal": ">=", "less": "<", "less_equal": "<="}
_INFIX = {"add": ("+", 2), "subtract": ("-", 2), "multiply": ("*", 3), "divide": ("/", 3)}
_NEGATIVE, _ATOM = 4, 5
_CHEAP = ("input", "constant", "dim", "per_row", "per_column", "transpose")  # never worth a name of its own
_LANES = ("even", "odd")


class _Writer:
    """Expressions from the graph. What lies in memory has a name; so has what a step uses twice."""

    def __init__(self, program: Program):
        self.program, self.nodes = program, program.nodes
        self.cut = cut(program)
        self.memory = value_names(program, self.cut)
        self.dtypes = memory_dtypes(program)

    def gemm(self, step: GemmStep) -> StepText:
        shape = self.cut.types[step.gemm].shape
        operands = self.nodes[step.gemm].args
        sources = dict.fromkeys(operand_source(self.program, o) for o in operands)
        spread = dict.fromkeys(self.nodes[i].args[0] for i in step.vectors)
        loads = [Line("load", self.memory[i], self.tensor(i)) for i in (*sources, *step.loads, *spread)]
        known = {i: self.memory[i] for i in (*step.stores, *step.loads)}
        roots = [*step.stores, *(self.nodes[r].args[0] for r in step.reductions)]
        lines = self.computed(step.body, roots, step.stores, known)
        lines += [self.reduced(r, known) for r in sorted(step.reductions)]
        inner = self.cut.types[operands[0]].shape[1]
        title = f"step {step.index}: gemm [{shape[0]}, {shape[1]}] over {inner}"
        return StepText(step.index, "gemm", title, tuple(dict.fromkeys(loads + lines)))

    def vector(self, step: VectorStep) -> StepText:
        length = self.cut.types[step.roots[0]].shape[0]
        after = f"after step {step.stage}" if step.stage >= 0 else "before step 0"
        loads = [Line("load", self.memory[~p], self.partial_tensor(p)) for p in step.partials]
        loads += [Line("load", self.memory[i], self.tensor(i)) for i in step.vectors]
        known = {i: self.memory[i] for i in (*step.roots, *step.vectors)}
        known |= {p: f"sum({self.memory[~p]})" for p in step.partials if p not in step.roots}
        lines = self.computed(
            [*step.body, *(p for p in step.partials if p in step.roots)], step.roots, step.roots, known
        )
        return StepText(step.stage, "vector", f"vectors [{length}] {after}", tuple(loads + lines))

    def computed(
        self, body: Iterable[int], roots: Iterable[int], stores: Iterable[int], known: dict[int, str]
    ) -> list[Line]:
        """Lines for what is stored and what is used more than once; ``known`` gains the latter's names."""
        body, stored = sorted(body), set(stores)
        uses = [a for i in body for a in self.nodes[i].args] + list(roots)
        lines = []
        for index in body:
            if index in stored:
                text = f"{known[index]} = {self.defined(index, known)}"
                lines.append(Line("store", text, self.tensor(index)))
            elif uses.count(index) > 1 and not self.cheap(index):
                name = self.fresh(known, "acc" if self.nodes[index].op == "gemm" else "r")
                lines.append(Line("compute", f"{name} = {self.defined(index, known)}"))
                known[index] = name
        return lines

    def cheap(self, index: int) -> bool:
        node = self.nodes[index]
        return node.op in _CHEAP or (node.op in _LANES and self.nodes[node.args[0]].op == "input")

    def fresh(self, known: Mapping[int, str], stem: str) -> str:
        taken = {*known.values(), *self.memory.values()}
        candidates = [*(["acc"] if stem == "acc" else []), *(f"{stem}{k}" for k in range(len(taken) + 1))]
        return next(name for name in candidates if name not in taken)

    def reduced(self, reduction: int, known: Mapping[int, str]) -> Line:
        text = f"{self.memory[~reduction]} = {self.call(reduction, known)}"
        return Line("reduce", text, self.partial_tensor(reduction))

    def tensor(self, index: int) -> str:
        shape = ", ".join(map(str, self.cut.types[index].shape))
        return f"{self.dtypes.get(index, 'fp32')} [{shape}]"

    def partial_tensor(self, reduction: int) -> str:
        step = next(s for s in self.cut.gemms if reduction in s.reductions)
        rows, columns = self.cut.types[step.gemm].shape
        return f"fp32 [{rows}, {_factor(columns)} / tile_n]"

    def defined(self, index: int, known: Mapping[int, str]) -> str:
        """The right-hand side of a node that has a name."""
        if self.nodes[index].op in REDUCTIONS:
            return f"sum({self.memory[~index]})"
        if self.nodes[index].op == "gemm":
            return self.product(index)
        return self.written(index, known)[0]

    def product(self, index: int) -> str:
        operands = [
            self.memory[operand_source(self.program, o)] + (".mT" if self.nodes[o].op == "transpose" else "")
            for o in self.nodes[index].args
        ]
        return f"gemm({', '.join(operands)})"

    def expression(self, index: int, known: Mapping[int, str]) -> tuple[str, int]:
        """Text and how tightly it binds."""
        if index in known:
            return known[index], _ATOM
        return self.written(index, known)

    def written(self, index: int, known: Mapping[int, str]) -> tuple[str, int]:
        node = self.nodes[index]
        if node.op == "input":
            return self.memory[index], _ATOM
        if node.op == "gemm":
            return self.product(index), _ATOM
        if node.op == "dim":
            return _factor(Dim.parse(str(node.attribute))), _ATOM
        if node.op == "constant":
            number = _number(float(str(node.attribute)))
            return number, _NEGATIVE if number.startswith("-") else _ATOM
        if node.op in ("per_row", "per_column"):
            return f"{node.op}({self.memory[node.args[0]]})", _ATOM
        if node.op == "negative":
            return "-" + self.bound(node.args[0], known, _ATOM), _NEGATIVE
        if node.op in _COMPARE:  # Python would chain them
            left, right = (self.bound(a, known, 2) for a in node.args)
            return f"{left} {_COMPARE[node.op]} {right}", 1
        if node.op in _INFIX:
            sign, strength = _INFIX[node.op]
            left, right = (self.bound(a, known, strength + k) for k, a in enumerate(node.args))
            return f"{left} {sign} {right}", strength
        return self.call(index, known), _ATOM

    def call(self, index: int, known: Mapping[int, str]) -> str:
        node = self.nodes[index]
        return f"{node.op}({', '.join(self.expression(a, known)[0] for a in node.args)})"

    def bound(self, index: int, known: Mapping[int, str], strength: int) -> str:
        text, own = self.expression(index, known)
        return text if own >= strength else f"({text})"


def _factor(dim: Dim) -> str:
    text = str(dim)
    return text if text.isalnum() else f"({text})"


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def floors(program: Program, sizes: Cases | None, machine: Machine = H100) -> dict[str, Roofline]:
    """The roofline at each case's sizes, by the case's name. ValueError for a case that lacks a dim."""
    return {case: roofline(program, at, machine) for case, at in (sizes or {}).items()}


def as_dict(
    program: Program,
    *,
    spec_name: str | None = None,
    resources: Sequence[Resources] | None = None,
    sizes: Cases | None = None,
    cutedsl: bool = False,
) -> dict[str, Any]:
    """Everything that ``render`` shows, for ``--json``. ProgramError if ``cutedsl`` cannot be lowered."""
    return {
        "spec": spec_name or program.signature.name,
        "program": program.hash,
        "steps": [asdict(step) for step in steps(program)],
        "schedule": {str(k): s.to_json() for k, s in sorted(program.schedule.items())},
        "resources": None if resources is None else [asdict(r) for r in resources],
        "roofline": {case: floor.to_dict() for case, floor in floors(program, sizes).items()},
        "cutedsl": _lowered(program) if cutedsl else None,
    }


def _lowered(program: Program) -> str:
    from primitives.lower import lower

    return lower(program).text


def render(
    program: Program,
    *,
    spec_name: str | None = None,
    resources: Sequence[Resources] | None = None,
    sizes: Cases | None = None,
    cutedsl: bool = False,
) -> Group:
    """Steps; where given, resources and the roofline of each case; on request the CuTeDSL text."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [
        Text.assemble((spec_name or program.signature.name, "bold"), f"  program {program.hash[:12]}"),
        Text("a name is a value in fp32 registers; its store rounds, other lines do not", style="dim"),
    ]
    parts += [step_table(step) for step in steps(program)]
    parts += tables(resources, floors(program, sizes))
    if cutedsl:
        from rich.syntax import Syntax

        parts.append(Syntax(_lowered(program), "python", theme="ansi_dark", word_wrap=True))
    return Group(*parts)


def step_table(step: StepText) -> Table:
    """One step: a row a line, with the dtype and shape of what it touches in memory."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=step.title, title_justify="left", title_style="bold cyan", box=None, pad_edge=False)
    table.show_header = False
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_column(style="green")
    for line in step.lines:
        table.add_row(line.verb, Text(line.text), Text(line.tensor))  # Text: [M, N] is no markup
    return table


def tables(resources: Sequence[Resources] | None, rooflines: Mapping[str, Roofline]) -> list[Table]:
    """The resource table and the roofline table, each where there is something to say."""
    found = [resource_table(resources)] if resources else []
    return found + ([roofline_table(rooflines)] if rooflines else [])


def resource_table(resources: Sequence[Resources]) -> Table:
    """One row a compiled kernel and configuration; spills, and a GEMM without HGMMA, stand out."""
    numbers = ["registers", "stack B", "static shared B", "spills ld/st", "HGMMA", "TMA ld/st", "compile s"]
    table = _table("resources, compiled for sm_90a", ["kernel", "schedule"], numbers)
    for r in resources:
        spilled = f"{r.spill_loads}/{r.spill_stores}"
        idle = r.schedule is not None and not r.hgmma
        table.add_row(
            r.kernel.rpartition("_")[0] or r.kernel, _schedule(r.schedule), str(r.registers), str(r.stack),
            str(r.shared), f"[yellow]{spilled}[/]" if r.spill_loads or r.spill_stores else spilled,
            "[red]0[/]" if idle else str(r.hgmma), f"{r.tma_loads}/{r.tma_stores}", f"{r.seconds:.1f}",
        )  # fmt: skip
    return table


def _schedule(schedule: Mapping[str, int | bool] | None) -> str:
    if schedule is None:
        return "-"
    kind = "pingpong" if schedule["pingpong"] else "cooperative"
    return f"{schedule['tile_m']}x{schedule['tile_n']} {kind} {schedule['cluster_m']}x{schedule['cluster_n']}"


def roofline_table(rooflines: Mapping[str, Roofline]) -> Table:
    """Per case and kernel: work, what it takes at the machine's ceilings, and which of the two binds."""
    machine = next(iter(rooflines.values())).machine
    title = (
        f"roofline, {machine.name}: {machine.tensor.value / 1e12:.1f} T{machine.tensor.unit}, "
        f"{machine.memory.value / 1e12:.2f} T{machine.memory.unit}; epilogue arithmetic not counted"
    )
    table = _table(
        title, ["case", "kernel"], ["GFLOP", "read MB", "written MB", "compute us", "memory us", "floor us"]
    )
    table.add_column("binds")
    for case, found in rooflines.items():
        label = f"{case} ({', '.join(f'{k} {v}' for k, v in found.sizes.items())})"
        for position, floor in enumerate(found.steps):
            table.add_row(
                label if position == 0 else "",
                _kernel(floor),
                *_figures([floor]),
                f"{floor.seconds * 1e6:.1f}",
                floor.binds,
            )
        table.add_row(
            "",
            "all",
            *_figures(found.steps),
            f"{found.seconds * 1e6:.1f}",
            found.binds,
            style="bold",
            end_section=True,
        )
    return table


def _kernel(floor: StepFloor) -> str:
    if floor.kind == "gemm":
        return f"step {floor.step}"
    return f"vectors after {floor.step}" if floor.step >= 0 else "vectors before 0"


def _figures(found: Sequence[StepFloor]) -> list[str]:
    return [
        f"{sum(f.flops for f in found) / 1e9:.1f}",
        f"{sum(sum(f.reads.values()) for f in found) / 1e6:.1f}",
        f"{sum(sum(f.writes.values()) for f in found) / 1e6:.1f}",
        f"{sum(f.compute_seconds for f in found) * 1e6:.1f}",
        f"{sum(f.memory_seconds for f in found) * 1e6:.1f}",
    ]


def _table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold cyan")
    for word in words:
        table.add_column(word, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right")
    return table
