"""Generate the vector kernels, which run between GEMM steps. A vector kernel combines the partial results of
reductions in a fixed order, and then does the arithmetic on the resulting vectors."""

from __future__ import annotations

from collections.abc import Iterator

from coda_agent.primitives.compiler.lowered import Argument, VectorKernel, Writer, literal
from coda_agent.primitives.lang.assign_steps import rows_by_expert
from coda_agent.primitives.lang.ir import Program, reduction
from coda_agent.primitives.lang.steps import Steps

WAIT = (
    "        # It starts before its predecessor ends, and waits for that here: "
    "nothing above touches memory.\n"
    "        cute.arch.griddepcontrol_wait()\n"
)


def finish_writers(program: Program, steps: Steps) -> list[FinishWriter]:
    """Return writers of the vector kernels, ordered by stage, and within a stage by vector length. Stage k
    runs after step k; stage -1 runs before all steps."""
    return [
        FinishWriter(program, steps, stage, roots)
        for stage, members in sorted(steps.finishes.items())
        for roots in _by_length(steps, members)
    ]


def bounds_writers(program: Program, steps: Steps) -> list[BoundsWriter]:
    """Return writers of the kernels that clamp experts' offsets: one kernel for each input that holds
    offsets."""
    found: dict[int, BoundsWriter] = {}
    for step in steps.gemms:
        offsets = program.nodes[step.gemm].offsets
        if offsets is not None:
            rows = rows_by_expert(program, step.gemm)
            found.setdefault(offsets, BoundsWriter(program, steps, offsets, rows))
    return [found[offsets] for offsets in sorted(found)]


def _by_length(steps: Steps, members: tuple[int, ...]) -> list[list[int]]:
    lengths: dict[str, list[int]] = {}
    for index in members:
        lengths.setdefault(str(steps.types[index].shape[0]), []).append(index)
    return [lengths[key] for key in sorted(lengths)]


class BoundsWriter(Writer):
    """Writes the kernel that clamps the offsets in one input, so that no offset points outside the tensors.
    The kernel runs before all steps."""

    def __init__(self, program: Program, steps: Steps, offsets: int, rows: int):
        super().__init__(program, steps)
        self.offsets, self.rows = offsets, rows

    def kernel(self) -> VectorKernel:
        arguments = (
            Argument(f"v{self.offsets}", "vector", self.offsets, "int32"),
            Argument(f"c{self.rows}", "count", self.rows, "int32", rank=0),
            Argument(f"o{self.offsets}", "bounds", self.offsets, "int32"),
        )
        return VectorKernel(-1, f"Bounds{self.offsets}", self.offsets, arguments)

    def text(self) -> str:
        return f"class @@Bounds{self.offsets}(Bounds):\n    pass\n"


class FinishWriter(Writer):
    """Writes one kernel for all vectors of one stage and length. For each element of a vector, a group of
    threads combines the partial results and then does the arithmetic.

    The kernel is launched by programmatic dependent launch. The kernel's blocks start when the GEMM's
    blocks have no more tiles. Each thread waits for the end of the GEMM before the thread touches memory. So
    this kernel ends after the GEMM, and after every kernel for which the GEMM waited. A successor of this
    kernel therefore need not wait for those earlier kernels. This kernel never signals its successor. So the
    next kernel on the stream, such as the next call's GEMM, starts only when this kernel has ended. The next
    kernel therefore cannot overwrite partial results before this kernel reads them.
    """

    def __init__(self, program: Program, steps: Steps, stage: int, roots: list[int]):
        super().__init__(program, steps)
        self.stage, self.roots = stage, roots
        self.stored = steps.vectors
        self.order: list[int] = []
        self.reductions: list[int] = []
        self.arguments: list[Argument] = []
        for root in roots:
            self.visit(root)
        self.arguments += [Argument(f"o{i}", "out", i, self.dtype(i)) for i in roots]

    def visit(self, index: int) -> None:
        node = self.nodes[index]
        if index in self.order or index in self.reductions or node.op == "constant":
            return
        if any(a.node == index and a.role != "extent" for a in self.arguments):
            return
        if self.steps.types[index].kind == "vector" and (
            node.op == "input" or (index in self.stored and index not in self.roots)
        ):
            self.arguments.append(Argument(f"v{index}", "vector", index, self.dtype(index)))
        elif reduction(node):  # its partial results are in the workspace
            self.reduce(index)
        elif node.op == "input":
            self.arguments.append(Argument(f"s{index}", "pointer", index, "fp32", rank=0))
        elif node.op == "dim":
            self.arguments.append(Argument(f"s{index}", "scalar", index, "fp32", rank=0))
        else:
            for argument in node.args:
                self.visit(argument)
            self.order.append(index)

    def reduce(self, index: int) -> None:
        tile, *chosen = self.nodes[index].args
        self.arguments += self.partials(index)
        for each in chosen:
            self.visit(each)
            self.arguments.append(Argument(f"e{index}", "extent", tile, "fp32", rank=0))
        self.reductions.append(index)

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
            f"        blocks = cute.ceil_div({length} * LANES, BLOCK)\n"
            f"        launched = self.kernel({names})\n"
            f"        launched.launch(grid=[blocks, 1, 1], block=[BLOCK, 1, 1], stream=stream, "
            "use_pdl=True)\n\n"
            "    @cute.kernel\n"
            f"    def kernel(self, {names}):\n"
            "        thread = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]\n"
            "        lane = thread % LANES\n"
            "        # Past the end, the last value again: shuffles want whole warps.\n"
            f"        at = cutlass.min(thread // LANES, {length} - 1)\n"
            f"{WAIT}{lines}"
        )

    def row(self) -> Iterator[str]:
        for a in self.arguments:
            if a.role == "vector":
                yield f"n{a.node} = {a.name}[at].to(Float32)"
            elif a.role == "pointer":
                yield f"n{a.node} = {a.name}[0]"
            elif a.role == "scalar":
                yield f"n{a.node} = {a.name}"
        for index in self.reductions:
            yield f"n{index} = {self.reduced(index)}"
        for index in self.order:
            parts = [self.value(a) for a in self.nodes[index].args]
            yield f"n{index} = {self.expression(index, parts, exact=True)}"
        yield "if thread == at * LANES:"
        for root in self.roots:
            yield f"    o{root}[at] = ({self.value(root)}).to(o{root}.element_type)"
        for a in self.arguments:
            if a.picks:
                yield f"    {a.name}[at] = Float32(LOWEST)  # what it holds where nothing is selected"

    def reduced(self, index: int) -> str:
        """The code that combines a reduction's partial results."""
        names = [partial.name for partial in self.partials(index)]
        return self.reduction(index).finish.format(
            partial=names[0],
            partials="".join(f"{name}, " for name in names),
            half=self.reduced_width(index) < 1,
            index=f"n{self.nodes[index].args[-1]}",
            extent=f"e{index}",
        )

    def value(self, index: int) -> str:
        node = self.nodes[index]
        return f"Float32({literal(self.constant(index))})" if node.op == "constant" else f"n{index}"
