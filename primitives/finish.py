"""Vectors that are final after a step, in one kernel: sums of partials in a fixed order, and arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

from primitives.cut import REDUCTIONS, Steps
from primitives.ir import Program
from primitives.lowered import Argument, VectorKernel, Writer, literal


def by_length(steps: Steps, members: tuple[int, ...]) -> list[list[int]]:
    lengths: dict[str, list[int]] = {}
    for index in members:
        lengths.setdefault(str(steps.types[index].shape[0]), []).append(index)
    return [lengths[key] for key in sorted(lengths)]


class FinishWriter(Writer):
    """Vectors of one length: a thread group a row sums its partials, then does the arithmetic."""

    def __init__(self, program: Program, steps: Steps, stage: int, roots: list[int]):
        super().__init__(program, steps)
        self.stage, self.roots = stage, roots
        self.stored = {i for members in steps.finishes.values() for i in members}
        self.order: list[int] = []
        self.arguments: list[Argument] = []
        for root in roots:
            self.visit(root)
        self.arguments += [Argument(f"o{i}", "out", i, self.output_dtype(i)) for i in roots]

    def visit(self, index: int) -> None:
        node = self.nodes[index]
        if index in self.order or any(a.node == index for a in self.arguments) or node.op == "constant":
            return
        if node.op == "input" or (index in self.stored and index not in self.roots):
            self.arguments.append(Argument(f"v{index}", "vector", index, self.vector_dtype(index)))
        elif node.op in REDUCTIONS:  # of this step or an earlier one: partials stay in the workspace
            self.arguments.append(Argument(f"p{index}", "partial", index, "fp32"))
        elif node.op == "dim":
            self.arguments.append(Argument(f"s{index}", "scalar", index, "fp32"))
        else:
            for argument in node.args:
                self.visit(argument)
            self.order.append(index)

    @property
    def name(self) -> str:
        return f"Finish{self.stage + 1}_{self.roots[0]}"

    def kernel(self) -> VectorKernel:
        return VectorKernel(self.stage, self.name, self.roots[0], tuple(self.arguments))

    def text(self) -> str:
        names = ", ".join(a.name for a in self.arguments)
        lines = "".join(f"        {line}\n" for line in self.row())
        length = f"o{self.roots[0]}.shape[0]"
        return (
            f"class @@{self.name}:\n"
            "    @cute.jit\n"
            f"    def __call__(self, {names}, stream):\n"
            f"        blocks = cute.ceil_div({length} * LANES_PER_ROW, BLOCK)\n"
            f"        launched = self.kernel({names})\n"
            "        launched.launch(grid=[blocks, 1, 1], block=[BLOCK, 1, 1], stream=stream)\n\n"
            "    @cute.kernel\n"
            f"    def kernel(self, {names}):\n"
            "        thread = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]\n"
            "        lane = thread % LANES_PER_ROW\n"
            "        # Past the end, the last row again: shuffles want whole warps.\n"
            f"        row = cutlass.min(thread // LANES_PER_ROW, {length} - 1)\n"
            f"{lines}"
        )

    def row(self) -> Iterator[str]:
        for a in self.arguments:
            if a.role == "partial":
                yield f"n{a.node} = sum_partials({a.name}, row, lane)"
            elif a.role == "vector":
                yield f"n{a.node} = {a.name}[row].to(Float32)"
            elif a.role == "scalar":
                yield f"n{a.node} = {a.name}"
        for index in self.order:
            parts = [self.value(a) for a in self.nodes[index].args]
            yield f"n{index} = {self.expression(index, parts, exact=True)}"
        yield "if thread == row * LANES_PER_ROW:"
        for root in self.roots:
            yield f"    o{root}[row] = ({self.value(root)}).to(o{root}.element_type)"

    def value(self, index: int) -> str:
        node = self.nodes[index]
        return f"Float32({literal(self.constant(index))})" if node.op == "constant" else f"n{index}"
