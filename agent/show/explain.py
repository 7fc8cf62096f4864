"""Describe a program's kernels as text. The text lists each kernel's loads, computations, stores and
reductions, and writes values as expressions over names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from coda_agent.primitives.compiler.lowered import Writer
from coda_agent.primitives.compiler.roofline import (
    gemm_reads,
    partial_shape,
    selects,
    value_names,
    vector_reads,
)
from coda_agent.primitives.compiler.vector_codegen import FinishWriter, finish_writers
from coda_agent.primitives.lang.assign_steps import untransposed, values_read
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.ir import OPERATIONS, Program, reduction, sizes_named
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.steps import GemmStep

Verb = Literal["load", "sweep", "compute", "store", "reduce"]


@dataclass(frozen=True)
class Action:
    """One action of a step, for example ``store hg = h * per_column(gamma) bf16 [M, N]``.

    A ``sweep`` is a loop over the accumulator. The loop runs before the epilogue, and computes a statistic of
    each head (a block of columns).
    """

    verb: Verb
    text: str
    tensor: str = ""


@dataclass(frozen=True)
class StepText:
    """A kernel as text. ``step``: the index of a GEMM's step. For a kernel between GEMMs ("vector"), the
    index of the step before the kernel; -1 if there is no such step."""

    step: int
    kind: Literal["gemm", "vector"]
    title: str
    lines: tuple[Action, ...]


def steps(program: Program) -> list[StepText]:
    """The loads, computations, stores and reductions of each kernel of a checked program, in launch order."""
    writer = _Writer(program)
    texts = [(float(s.index), writer.gemm(s)) for s in writer.steps.gemms]
    texts += [(v.stage + 0.5, writer.vector(v)) for v in finish_writers(program, writer.steps)]
    return [text for _, text in sorted(texts, key=lambda t: t[0])]


# Operators and their precedence. fp32 sums and products are not associative, so a right operand of the same
# precedence gets parentheses.
_COMPARE = {
    "greater": ">", "greater_equal": ">=", "less": "<", "less_equal": "<=", "equal": "==", "not_equal": "!=",
}  # fmt: skip
_INFIX = {"add": ("+", 2), "subtract": ("-", 2), "multiply": ("*", 3), "divide": ("/", 3)}
_NEGATIVE, _ATOM = 4, 5
# Values of these operations never get a name.
_SPREAD = ("per_row", "per_column", "per_head")
_CHEAP = ("input", "constant", "dim", "transpose", "as_tile", "column_index", *_SPREAD)
_LANES = ("even", "odd")


class _Writer(Writer):
    """Write the graph's nodes as expressions. A value gets a name if it is in memory, or if a step uses it
    more than once."""

    def __init__(self, program: Program):
        super().__init__(program, cut(program))
        self.memory = value_names(program, self.steps)
        self.updated = {program.outputs[o]: name for o, name in program.signature.updates.items()}

    def gemm(self, step: GemmStep) -> StepText:
        *_, rows, columns = self.steps.types[step.gemm].shape
        lines = [self.load(i) for i in gemm_reads(self.program, step)]
        known = {i: self.memory[i] for i in (*step.stores, *step.loads)}
        roots = [*step.stores, *(self.nodes[r].args[0] for r in step.reductions)]
        lines += self.computed({*step.sweep, *step.statistics, *step.body}, roots, step.stores, known)
        lines += [self.reduced(r, known) for r in sorted(step.reductions)]
        inner = self.steps.types[self.nodes[step.gemm].args[0]].shape[1]
        experts = ", by expert" if self.nodes[step.gemm].offsets is not None else ""
        title = f"step {step.index}: gemm [{rows}, {columns}] over {inner}{experts}"
        return StepText(step.index, "gemm", title, tuple(dict.fromkeys(lines)))

    def vector(self, kernel: FinishWriter) -> StepText:
        length = self.steps.types[kernel.roots[0]].shape[0]
        after = f"after step {kernel.stage}" if kernel.stage >= 0 else "before step 0"
        read = vector_reads(kernel)
        known = {i: self.memory[i] for i in (*kernel.roots, *read) if i >= 0}
        known |= {r: self.finished(r) for r in kernel.reductions if r not in kernel.roots}
        body = {*kernel.order, *(r for r in kernel.reductions if r in kernel.roots)}
        lines = [self.load(i) for i in read]
        lines += self.computed(body, kernel.roots, kernel.roots, known)
        emptied = [r for r in kernel.reductions if selects(self.program, r)]
        lines += [Action("store", f"{self.memory[~r]} = -inf", self.tensor(~r)) for r in emptied]
        return StepText(kernel.stage, "vector", f"vectors [{length}] {after}", tuple(lines))

    def load(self, index: int) -> Action:
        return Action("load", self.memory[index], self.tensor(index))

    def computed(
        self, body: Iterable[int], roots: Iterable[int], stores: Iterable[int], known: dict[int, str]
    ) -> list[Action]:
        """The lines for stored values, for statistics and for values that are used more than once. The method
        also adds the names of statistics and of reused values to ``known``."""
        body, stored = sorted(body), set(stores)
        uses = [a for i in body for a in values_read(self.program, i)] + list(roots)
        lines = []
        for index in body:
            op = self.nodes[index].op
            if index in stored:
                text = f"{known[index]} = {self.defined(index, known)}"
                lines.append(Action("store", text, self.tensor(index)))
            elif OPERATIONS[op].statistic or uses.count(index) > 1 and not self.cheap(index, known):
                sweep = OPERATIONS[op].statistic
                name = self.fresh(known, "acc" if op == "gemm" else "heads" if sweep else "r")
                verb: Verb = "sweep" if sweep else "compute"
                lines.append(Action(verb, f"{name} = {self.defined(index, known)}"))
                known[index] = name
        return lines

    def cheap(self, index: int, known: Mapping[int, str]) -> bool:
        node = self.nodes[index]
        lanes = node.op in _LANES and (
            node.args[0] in known or self.nodes[node.args[0]].op in ("input", "per_head")
        )
        return lanes or node.op in _CHEAP

    def fresh(self, known: Mapping[int, str], stem: str) -> str:
        taken = {*known.values(), *self.memory.values()}
        candidates = [*(["acc"] if stem == "acc" else []), *(f"{stem}{k}" for k in range(len(taken) + 1))]
        return next(name for name in candidates if name not in taken)

    def reduced(self, index: int, known: Mapping[int, str]) -> Action:
        return Action("reduce", f"{self.memory[~index]} = {self.call(index, known)}", self.tensor(~index))

    def tensor(self, index: int) -> str:
        """The dtype and shape of a node's value in memory. An index ``~r`` stands for the partial results of
        the reduction at node ``r``."""
        if index < 0:
            shape = partial_shape(self.program, self.steps, ~index)
            return f"fp32 [{', '.join(f'{_factor(d)} / {tile}' if tile else str(d) for d, tile in shape)}]"
        over = f" over {self.updated[index]}" if index in self.updated else ""
        return f"{self.dtype(index)} [{', '.join(map(str, self.steps.types[index].shape))}]{over}"

    def defined(self, index: int, known: Mapping[int, str]) -> str:
        """The expression for a node's value, without the node's own name."""
        if reduction(self.nodes[index]):
            return self.finished(index)
        return self.written(index, known)[0]

    def finished(self, index: int) -> str:
        """The expression that computes a reduction from its stored partial results."""
        how, node, kept = reduction(self.nodes[index]), self.nodes[index], self.memory[~index]
        assert how is not None  # the node is a reduction
        chosen = self.memory[node.args[1]] if how.selects else ""
        columns = _factor(self.steps.types[node.args[0]].shape[1])
        return how.said.format(kept=kept, index=chosen, extent=columns)

    def product(self, index: int) -> str:
        operands = [
            self.memory[untransposed(self.program, o)] + (".mT" if self.nodes[o].op == "transpose" else "")
            for o in self.nodes[index].args
        ]
        return f"gemm({', '.join(operands)})"

    def term(self, index: int, known: Mapping[int, str]) -> tuple[str, int]:
        """The text for a node's value, and the text's precedence. The text is the value's name if the value
        has a name, and its expression otherwise."""
        if index in known:
            return known[index], _ATOM
        return self.written(index, known)

    def written(self, index: int, known: Mapping[int, str]) -> tuple[str, int]:
        node = self.nodes[index]
        match node.op:
            case "input":
                return self.memory[index], _ATOM
            case "gemm":
                return self.product(index), _ATOM
            case "dim":
                return _factor(Dim.parse(str(node.attribute))), _ATOM
            case "constant":
                number = _number(self.constant(index))
                return number, _NEGATIVE if number.startswith("-") else _ATOM
            case "as_tile":  # the other argument of as_tile only gives a shape
                return self.term(node.args[0], known)
            case "column_index":
                return f"column_index({self.steps.types[index].shape[1]})", _ATOM
            case "negative":
                return "-" + self.bound(node.args[0], known, _ATOM), _NEGATIVE
        if node.op in _SPREAD and node.args[0] in self.memory:
            return f"{node.op}({self.memory[node.args[0]]})", _ATOM
        if node.op in _COMPARE:  # gets parentheses as an operand, because Python chains a < b < c
            left, right = (self.bound(a, known, 2) for a in node.args)
            return f"{left} {_COMPARE[node.op]} {right}", 1
        if node.op in _INFIX:
            sign, strength = _INFIX[node.op]
            left, right = (self.bound(a, known, strength + k) for k, a in enumerate(node.args))
            return f"{left} {sign} {right}", strength
        return self.call(index, known), _ATOM

    def call(self, index: int, known: Mapping[int, str]) -> str:
        node = self.nodes[index]
        given = [self.term(a, known)[0] for a in node.args]
        given += sizes_named(node)
        return f"{node.op}({', '.join(given)})"

    def bound(self, index: int, known: Mapping[int, str], strength: int) -> str:
        text, own = self.term(index, known)
        return text if own >= strength else f"({text})"


def _factor(dim: Dim) -> str:
    text = str(dim)
    return text if text.isalnum() else f"({text})"


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
