"""Partition a program into steps. A step is one GEMM with the tile expressions of its epilogue. The step also
includes the vector arithmetic that becomes possible once the step's reductions are final.

``assign_steps`` finds the step of each tile. If a later step needs the tile, the tile's own step stores the
tile once, and the later step loads it. This module refuses programs that no kernel can run. Its errors name
the line of the kernel file. The module needs only the standard library, because the jail (the process that
traces a kernel file) imports it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

from coda_agent.primitives.lang import diagnostics
from coda_agent.primitives.lang.assign_steps import (
    Placement,
    place,
    rows_by_expert,
    untransposed,
    values_read,
)
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import OPERATIONS, Program, reduction, sizes_named
from coda_agent.primitives.lang.signature import DTYPES, EIGHTS
from coda_agent.primitives.lang.steps import GemmStep, Steps, read_elsewhere

WIDTHS = {(1, 2): 0.5, (1, 1): 1.0, (2, 1): 2.0}  # a tile's width relative to its step's N


@functools.lru_cache(maxsize=64)
def cut(program: Program, lines: tuple[int | None, ...] = ()) -> Steps:
    """Partition a checked program into steps. Raises ProgramError if the program cannot be partitioned. The
    error has the line in the kernel file, if known."""
    return _Cutter(program, lines).cut()


class _Cutter:
    def __init__(self, program: Program, lines: tuple[int | None, ...]):
        self.program, self.nodes, self.types = program, program.nodes, program.types()
        self.lines = lines or (None,) * len(self.nodes)
        self.placed: Placement = place(program, self.types)
        self.steps = [GemmStep(k, g) for k, g in enumerate(self.placed.gemms)]
        self.finishes: dict[int, list[int]] = {}
        self.width: dict[tuple[int, int], float] = {}
        self.dtypes: dict[int, str] = {}

    def fail(self, code: str, message: str, index: int, reader: int | None = None) -> ProgramError:
        """Create an error at the line of the node ``index``. If the node has no line, use the line of the
        node ``reader``."""
        line = self.lines[index]
        if line is None and reader is not None:
            line = self.lines[reader]
        return ProgramError(code, message, line)

    def cut(self) -> Steps:
        self.check_outputs()
        for name, index in self.program.outputs.items():
            self.dtypes[index] = self.program.signature.outputs[name].dtype
            if self.types[index].kind == "vector":
                self.finish(index)
            else:
                self.store(index, diagnostics.output(name))
        for step in self.steps:
            self.operands(step)
        for index, node in enumerate(self.nodes):
            if how := reduction(node):
                home = self.ready(node.args[0], diagnostics.reduced(node.op), index)
                self.steps[home].reductions.append(index)
                if how.selects:
                    # The vector kernel after the step clears the buffer of partial results, so later readers
                    # must read the vector instead.
                    self.finish(index)
        # Later steps first, because they decide which tiles an earlier step must store.
        for step in reversed(self.steps):
            self.collect(step)
            if not step.stores and not step.reductions:
                words = "only the shape of this gemm's result is used: use another tile of this shape"
                raise self.fail("graph", words, step.gemm)
            self.check_grouped(step)
        if not self.steps:
            raise ProgramError("homeless", "the kernel calls no gemm, so there is no epilogue to fuse into")
        finishes = {k: tuple(sorted(v)) for k, v in self.finishes.items()}
        steps = Steps(tuple(self.steps), finishes, self.width, self.types, self.dtypes)
        for output, name in self.program.signature.updates.items():
            if (reader := read_elsewhere(self.program, self.placed, steps, output, name)) is not None:
                raise self.fail(
                    "updates",
                    f"output {output!r} overwrites input {name!r}, which is also read elsewhere: use it "
                    "element by element where that output is computed, and nowhere else",
                    reader,
                )
        return steps

    # Values that leave a step

    def check_outputs(self) -> None:
        """Check that the outputs are distinct values, and that no output is just an input."""
        seen: dict[int, str] = {}
        for name, index in sorted(self.program.outputs.items()):
            node = self.nodes[index]
            if node.op == "input":
                raise self.fail(
                    "outputs",
                    f"output {name!r} is the input {node.attribute!r} itself: leave copying to the caller",
                    index,
                )
            if index in seen:
                raise self.fail(
                    "outputs",
                    f"outputs {seen[index]!r} and {name!r} are one value: return it once and let "
                    "the spec declare one output",
                    index,
                )
            seen[index] = name

    def ready(self, index: int, use: diagnostics.Use, reader: int | None = None) -> int:
        """Return the step that computes a tile. ``use`` is a use of the tile outside this step, for example
        as an output. Raises ProgramError if no step can compute the tile."""
        home, after = self.placed.home[index], self.placed.after[index]
        if home < 0:
            raise self.homeless(use, index, reader)
        if after >= home:
            raise self.fail(
                "pending",
                f"{use.said} needs a reduction over whole rows or columns, which is final only after all "
                f"tiles of its step: {use.pending}",
                index,
            )
        return home

    def homeless(self, use: diagnostics.Use, index: int, reader: int | None = None) -> ProgramError:
        return self.fail(
            "homeless",
            f"{use.said} belongs to no GEMM: a tile is computed in the epilogue of a gemm whose result "
            f"it uses, or whose epilogue loads all of its inputs anyway; {use.homeless}",
            index,
            reader,
        )

    def store(self, index: int, use: diagnostics.Use) -> None:
        self.keep(index, self.ready(index, use))

    def keep(self, index: int, home: int) -> None:
        if index not in self.steps[home].stores:
            self.steps[home].stores.append(index)

    def finish(self, index: int) -> None:
        """Record that a vector must be stored, because it will be read from memory. An input is already in
        memory."""
        if self.nodes[index].op == "input":
            return
        stage = self.finishes.setdefault(self.placed.after[index], [])
        if index not in stage:
            stage.append(index)

    def operands(self, step: GemmStep) -> None:
        """Check that the dtypes of a GEMM's operands agree. An operand that an earlier step computes gets the
        dtype of the other operand, if the other operand is an input."""
        sources = [untransposed(self.program, a) for a in self.nodes[step.gemm].args[:2]]
        given = [tensor.dtype for i in sources if (tensor := self.program.input_tensor(i))]
        dtype = next(iter(given), self.any_operand())
        for source in sources:
            if self.nodes[source].op != "input":
                self.store(source, diagnostics.OPERAND)
                # the operand must be a tile of an earlier step
                if self.placed.home[source] >= step.index:
                    raise self.homeless(diagnostics.OPERAND, source)
                given.append(self.dtypes.setdefault(source, dtype))
        if len(set(given)) > 1 or given[0] == "fp32":
            raise self.fail(
                "dtype",
                f"gemm's operands are {' and '.join(sorted(set(given)))}: both must be bf16, both fp16, "
                "or both fp8_e4m3",
                step.gemm,
            )
        a, b = (self.nodes[i].op for i in self.nodes[step.gemm].args[:2])
        own = all(map(self.program.input_tensor, sources))
        if given[0] in EIGHTS and not (own and (a, b) == ("input", "transpose")):
            raise self.fail(
                "dtype",
                f"gemm of {given[0]} reads both operands along K: gemm(x, w.mT) of inputs [M, K] and [N, K]",
                step.gemm,
            )

    def any_operand(self) -> str:
        """Return the dtype for stored tiles without a declared dtype. It is the dtype of the first GEMM
        operand that is an input and not fp8. If there is no such operand, it is bf16."""
        for gemm in self.placed.gemms:
            for operand in self.nodes[gemm].args[:2]:
                given = self.program.input_tensor(untransposed(self.program, operand))
                if given and given.dtype in DTYPES:
                    return given.dtype
        return "bf16"

    # Values that a step computes

    def collect(self, step: GemmStep) -> None:
        """Collect the values that a step's epilogue computes or loads. Start from the values that the step
        stores or reduces."""
        wanted = {*step.stores, *(self.nodes[r].args[0] for r in step.reductions)}
        step.stores.sort()
        for reduced in step.reductions:
            self.check_own_width(reduced, step)
        self.walk(wanted, lambda index: self.visit(index, step, step.body))
        swept = {self.nodes[i].args[0] for i in step.statistics}
        for statistic in step.statistics:
            self.check_own_width(statistic, step)
        before = len(step.loads), len(step.statistics)
        self.walk(swept, lambda index: self.visit(index, step, step.sweep))
        self.check_sweep(step, step.loads[before[0] :], step.statistics[before[1] :])
        for nodes in (step.loads, step.repeats, step.vectors, step.scalars, step.statistics):
            nodes[:] = sorted(set(nodes))
        step.body.reverse()
        step.sweep.reverse()

    def check_sweep(self, step: GemmStep, loads: list[int], statistics: list[int]) -> None:
        """Check the sweep, the pass over the accumulator before the epilogue. The sweep must not read a
        loaded tile or another head statistic. It must not use a column's number either, because only the
        epilogue knows the column of each value."""
        read = {a for i in step.sweep for a in self.nodes[i].args}
        found = {
            "loaded": loads,
            "statistic": statistics,
            "column_index": [i for i in step.sweep if OPERATIONS[self.nodes[i].op].at],
            "per_head": read & set(step.repeats),
            "width": [i for i in read if self.nodes[i].op == "per_column" and self.width[step.index, i] != 1],
        }
        for why, nodes in found.items():
            if nodes:
                raise self.fail(
                    "sweep",
                    "head_sums of a value that is loaded, or that uses column_index, per_head, another head "
                    "statistic or a vector of another width: the pass before the epilogue, which computes "
                    "head_sums, has only the accumulator, its vectors and scalars; " + diagnostics.SWEEP[why],
                    next(i for i in sorted(step.statistics) if self.made_of(i, nodes)),
                )

    def check_grouped(self, step: GemmStep) -> None:
        """Check that the epilogue of a GEMM with offsets never combines the rows of two experts."""
        offsets = self.nodes[step.gemm].offsets
        if offsets is None:
            return
        alike = (i for i, node in enumerate(self.nodes) if node.offsets == offsets)
        if len({self.types[rows_by_expert(self.program, i)].shape[0] for i in alike}) > 1:
            message = f"gemm with offsets: {diagnostics.GROUPED['rows']}"
            raise self.fail("grouped", message, step.gemm)
        vectors = {i: self.nodes[i].args[0] for i in step.vectors if self.nodes[i].op == "per_row"}
        known = {i: self.program.input_tensor(v) for i, v in vectors.items()}
        dtypes = {i: t.dtype if t else self.dtypes.get(vectors[i], "fp32") for i, t in known.items()}
        found = {
            "columns": [i for i in step.reductions if self.types[i].shape != self.types[step.gemm].shape[:1]],
            "heads": [*step.statistics, *step.repeats],
            "range": [i for i in step.stores if self.types[i].kind == "range"],
            "narrow": [i for i, dtype in dtypes.items() if dtype in ("bf16", "fp16")],
        }
        for why, nodes in found.items():
            if nodes:
                op = self.nodes[nodes[0]].op
                message = f"{op} of a gemm with offsets: {diagnostics.GROUPED[why]}"
                raise self.fail("grouped", message, nodes[0])

    def made_of(self, root: int, wanted: Collection[int]) -> bool:
        """Whether the node ``root`` depends on a node of ``wanted`` in the same step."""
        seen, pending = set[int](), [root]
        while pending:
            node = self.nodes[index := pending.pop()]
            new = () if node.op == "gemm" or reduction(node) else set(values_read(self.program, index)) - seen
            if any(i in wanted for i in new):
                return True
            seen.update(new)
            pending += new
        return False

    def walk(self, wanted: set[int], visit: Callable[[int], tuple[int, ...]]) -> None:
        for index in range(max(wanted, default=-1), -1, -1):
            if index in wanted:
                wanted.update(visit(index))

    def visit(self, index: int, step: GemmStep, body: list[int]) -> tuple[int, ...]:
        """Record that a step loads a value or computes it. If the step computes the value, return the
        arguments that the step needs; otherwise, return an empty tuple."""
        node, kind = self.nodes[index], self.types[index].kind
        if node.op == "constant":
            return ()
        if kind == "scalar" and node.op in ("dim", "input"):
            step.scalars.append(index)
            return ()
        if OPERATIONS[node.op].spread:
            self.finish(node.args[0])
            if kind == "column":
                self.width[step.index, index] = self.relative(index, step, axis=0)
            step.vectors.append(index)
            return ()
        if kind == "tile":
            self.width[step.index, index] = self.relative(index, step)
            if self.comes_loaded(index, step):
                step.loads.append(index)
                return ()
        elif kind == "experts":
            self.width[step.index, index] = 1
        elif kind == "range":
            self.check_range(index, step)
        elif kind in ("head", "spread") and self.placed.home[index] not in (-1, step.index):
            raise self.fail(
                "pending",
                "a statistic of heads stays in its step: use it on that step's tile, before the next gemm",
                index,
            )
        if OPERATIONS[node.op].statistic:
            self.static(self.types[index].period, index)
            step.statistics.append(index)
            return ()
        self.check_sizes(index)
        read = values_read(self.program, index)
        for argument in read:
            if self.types[argument].kind == "repeated":
                self.repeat(argument, index, step)
        if node.op == "per_head" and kind == "repeated":
            step.repeats.append(index)
            return ()
        body.append(index)
        return () if node.op == "gemm" else read

    def check_sizes(self, index: int) -> None:
        """Check that the dims in an operation's sizes are static, so that the compiler knows them."""
        for size in sizes_named(self.nodes[index]):
            if missing := sorted(Dim.parse(size).names - set(self.program.signature.static)):
                op, names = self.nodes[index].op, ", ".join(missing)
                raise self.fail("static", f"{op} of {size}: the spec must declare {names} static", index)

    def check_range(self, index: int, step: GemmStep) -> None:
        """Check that the tile of a ``column_range`` is as wide as the accumulator."""
        if self.relative(self.nodes[index].args[0], step, reader=index) != 1:
            raise self.fail(
                "width", f"column_range takes a tile as wide as its gemm: {diagnostics.RANGE}", index
            )
        self.width[step.index, index] = 1

    def comes_loaded(self, index: int, step: GemmStep) -> bool:
        """Whether a step loads a tile. A step loads inputs, and tiles that an earlier step computes. In the
        second case, make the earlier step store the tile."""
        if self.nodes[index].op == "input":
            return True
        home = self.placed.home[index]
        if home >= 0 and self.placed.after[index] < home < step.index:
            self.keep(index, home)
            if self.dtypes.setdefault(index, self.any_operand()) in EIGHTS:
                raise self.fail(
                    "dtype",
                    f"a tile that leaves step {home} in fp8 is used in step {step.index}, which would read "
                    "only its four significant bits: use the tile only in its own step",
                    index,
                )
            return True
        return False

    def repeat(self, index: int, reader: int, step: GemmStep) -> None:
        """Record the width of a value that is repeated for each head. It is the width of the tile that reads
        the value."""
        width = self.width[step.index, reader] * (
            2 if self.nodes[reader].op in ("even", "odd") and self.types[reader].kind == "repeated" else 1
        )
        if width > 1:
            raise self.fail("width", f"{self.types[index]} {diagnostics.WIDE_REPEAT}", index)
        if self.width.setdefault((step.index, index), width) != width:
            raise self.fail("width", f"{self.types[index]} {diagnostics.TWO_WIDTHS}", index)
        self.static(self.types[index].period, index)
        if self.nodes[index].op == "per_head":
            source = self.nodes[index].args[0]
            if self.types[source].kind == "vector":
                self.finish(source)
            elif self.nodes[source].op != "input":
                raise self.fail(
                    "argument",
                    "per_head takes a tile only if it is an input: compute with the spread tile instead",
                    index,
                )

    def static(self, period: Dim | None, index: int) -> None:
        names = period.names if period else frozenset()
        missing = sorted(names - set(self.program.signature.static))
        if missing:
            repeated = self.types[index].kind == "repeated" and len(self.types[index].shape) == 2
            raise self.fail(
                "static",
                f"heads of {period} columns: the spec must declare {', '.join(missing)} static"
                f"{diagnostics.REPEATED if repeated else ''}",
                index,
            )

    def check_own_width(self, index: int, step: GemmStep) -> None:
        """Check that the tile of a ``row_select`` or head statistic is as wide as the accumulator."""
        operation = OPERATIONS[self.nodes[index].op]
        how = operation.reduction or operation.statistic
        if how and how.own_width:
            width = self.relative(self.nodes[index].args[0], step, reader=index)
            if width != 1:
                instead = how.own_width[width > 1]
                raise self.fail(
                    "width", f"{operation.name} takes a tile as wide as its gemm: {instead}", index
                )

    def relative(self, index: int, step: GemmStep, axis: int = 1, reader: int | None = None) -> float:
        """The width of a tile, or of a vector spread over columns, relative to the step's accumulator."""
        rows, columns = self.types[step.gemm].shape
        own = self.types[index].shape
        width = WIDTHS.get(own[axis].ratio(columns) or (0, 0))
        other_rows = axis == 1 and own[0] != rows
        if width is None or other_rows:
            readers = [i for i in (*step.body, *step.sweep) if index in self.nodes[i].args]
            raise self.fail(
                "width",
                f"a {self.types[index]} in the epilogue of a gemm [{rows}, {columns}]: tiles in an epilogue "
                "have the gemm's rows, and half, once or twice its columns; "
                + (diagnostics.ROWS if other_rows else diagnostics.WIDTH),
                index,
                min(readers, default=reader),
            )
        return width
