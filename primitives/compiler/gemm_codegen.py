"""Generate the code of a step: a class that extends QuACK's Hopper mainloop with the epilogue's resources and
the code for one epilogue subtile.

The code works on pairs of accumulator lanes, so that it can mix tiles of half, single and double width
without special cases.
"""

from __future__ import annotations

from collections.abc import Iterator

from coda_agent.primitives.compiler.lowered import CUTE_DTYPES, GemmKernel, Writer, literal
from coda_agent.primitives.compiler.resources import StepResources
from coda_agent.primitives.lang.assign_steps import untransposed, values_read
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.ir import OPERATIONS, Program
from coda_agent.primitives.lang.signature import EIGHTS
from coda_agent.primitives.lang.steps import GemmStep, Steps

Values = dict[int, list[str]]  # the code of a node's values (one, two or four) in one pair of lanes


class StepWriter(Writer):
    def __init__(self, program: Program, steps: Steps, step: GemmStep):
        super().__init__(program, steps)
        self.step = step
        self.resources = StepResources(program, steps, step)
        # Reductions that take a subtile's whole fragment. Reductions that overwrite the fragment come last.
        blocked = [i for i in step.reductions if not self.reduction(i).fold]
        self.blocked = sorted(blocked, key=lambda i: self.reduction(i).spoils)
        self.exact = self.exact_nodes()
        self.past_edge = self.values_past_edge()

    def exact_nodes(self) -> set[int]:
        """The nodes on which a reduction, a statistic, or an fp32 or fp16 output depends. These nodes must
        not use approximate instructions."""
        pending = [self.nodes[r].args[0] for r in (*self.step.reductions, *self.step.statistics)]
        pending += [i for i in self.step.stores if self.dtype(i) not in ("bf16", *EIGHTS)]
        found: set[int] = set()
        while pending:
            index = pending.pop()
            if index not in found:
                found.add(index)
                pending.extend(self.nodes[index].args)
        return found

    def values_past_edge(self) -> dict[int, float | None]:
        """The value of each node in lanes beyond a ragged edge of the matrix, or None if the value is
        unknown. In these lanes, the accumulator and TMA loads are zero."""
        known: dict[int, float | None] = {a.node: 0.0 for a in self.resources.loads if a.role == "load"}
        for index in self.step.body:
            node = self.nodes[index]
            arguments = [
                self.constant(a) if self.nodes[a].op == "constant" else known.get(a) for a in node.args
            ]
            if node.op == "gemm":
                known[index] = 0.0
            elif OPERATIONS[node.op].lanes:
                known[index] = arguments[0] if len(set(arguments)) == 1 else None
            else:
                known[index] = self.evaluated(node.op, arguments)
        return known

    @staticmethod
    def evaluated(op: str, arguments: list[float | None]) -> float | None:
        """Evaluate an operation on numbers. The result is None if an argument is unknown. The result is also
        None for a vector that is spread over a tile, because it may contain anything beyond the edge."""
        operation = OPERATIONS[op]
        if None in arguments or operation.torch is None or operation.cute is None:
            return None
        import torch

        return float(operation.torch(torch, *(torch.tensor(a) for a in arguments)))

    def masked(self, reduced: int) -> bool:
        """Whether to mask lanes beyond a ragged edge. A mask is needed if the lanes' values may differ from
        the reduction's identity."""
        zero = self.past_edge.get(self.nodes[reduced].args[0]) == 0.0
        return not (zero and self.reduction(reduced).identity == 0.0)

    def shape(self) -> tuple[Dim, Dim]:
        """The GEMM's rows and columns."""
        *_, rows, columns = self.steps.types[self.step.gemm].shape
        return rows, columns

    def kernel(self) -> GemmKernel:
        gemm = self.nodes[self.step.gemm]
        operands = gemm.args[:2]
        a, b = (untransposed(self.program, i) for i in operands)
        a_transposed, b_transposed = (self.nodes[i].op == "transpose" for i in operands)
        return GemmKernel(
            self.step.index,
            f"Step{self.step.index}",
            a,
            b,
            a_transposed,
            b_transposed,
            self.dtype(a),
            self.resources.c,
            self.resources.d,
            tuple(argument for argument, _ in self.resources.all()),
            self.shape(),
            tuple(self.resources.periods),
            self.resources.grains(),
            self.resources.sums[1] if self.resources.sums else None,
            self.resources.starts(),
            tuple((first, past) for _, first, past in self.resources.bounds()),
            gemm.offsets,
            self.resources.own,
            gemm.row_index,
        )

    # The class

    def text(self) -> str:
        made = "".join(f"        {constructor},\n" for _, constructor in self.resources.all())
        methods = self.method(
            "epi_visit_subtile(self, params, resources, accumulator, operand=None)", self.visit()
        )
        if self.step.statistics:
            sweep = "epi_prepass_subtile(self, params, states, accumulator, at, number)"
            methods = (
                "    epi_needs_acc_prepass = True\n\n" + self.method(sweep, self.sweep()) + "\n" + methods
            )
        adds = ", adds=True" if self.resources.sums else ""
        base = "TableGemm" if any(map(self.resources.tables, self.step.repeats)) else "FusedGemm"
        if self.resources.grouped and not self.resources.own:
            base = "GroupedGemm" if self.nodes[self.step.gemm].row_index is None else "GatheredGemm"
        return (
            f"class @@Step{self.step.index}({base}):\n"
            f"    _epi_ops = (\n{made}    )\n"
            f"    EpilogueArguments = arguments(_epi_ops{adds})\n\n{methods}"
        )

    @staticmethod
    def method(head: str, lines: Iterator[str]) -> str:
        body = "\n".join(f"        {line}".rstrip() for line in lines)
        return f"    @cute.jit\n    def {head}:\n{body}\n"

    def sweep(self) -> Iterator[str]:
        """The code that runs before the epilogue and computes the statistics of heads, such as sums."""
        used = {a for i in self.step.sweep for a in self.nodes[i].args}
        for index in self.step.vectors:
            if index in used:
                yield f'v{index} = at_subtile(self, "v{index}", states, at)'
        for index in self.step.scalars:
            yield f's{index} = states["s{index}"]'
        for index in self.step.statistics:
            yield f"f{index} = fragment(accumulator)"
        yield "for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):"
        values: Values = {}
        for index in self.step.sweep:
            for line in self.compute(index, values):
                yield "    " + line
        for index in self.step.statistics:
            for k, value in enumerate(self.value(self.nodes[index].args[0], values)):
                yield f"    f{index}[2 * i + {k}] = {value}"
        for index in self.step.statistics:
            yield f'fold(self, "h{index}", at_subtile(self, "h{index}", states, at), f{index})'

    def visit(self) -> Iterator[str]:
        yield from self.prologue()
        yield "for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):"
        for line in self.lanes():
            yield "    " + line
        for index in self.blocked:
            (partial,) = self.partials(index)
            for part in range(self.fragments(index)):
                name = partial.name
                yield f'fold(self, "{name}", resources["{name}"], {self.collected(index)}_{part})'
        d, stores = self.resources.d, [s for s in self.resources.stores if s.role == "store"]
        for store in stores:
            if store.packed:
                target = "accumulator" if store is d else store.name
                yield f"pack(w{store.node}, {CUTE_DTYPES[store.dtype]}, {target})"
        yield f"return ({''.join(s.name + ', ' for s in stores if s is not d)})"

    def collected(self, reduced: int) -> str:
        """The name of the fragment that a blocked reduction takes as a whole. Blocked reductions of the same
        tile share one fragment."""
        return f"f{self.nodes[reduced].args[0]}"

    def fragments(self, reduced: int) -> int:
        return 2 if self.reduced_width(reduced) == 2 else 1

    def prologue(self) -> Iterator[str]:
        """The code before the loop over lanes: declare fragments and resources."""
        yield 'place = resources["place"]'
        for load in self.resources.loads:
            source = "operand" if load is self.resources.c else f'resources["{load.name}"]'
            if load.role == "memory":
                yield f"{load.name} = {source}"
            else:
                unpacked = f"unpack({source}, {CUTE_DTYPES[load.dtype]})"
                yield f"{load.name} = {unpacked if load.packed else f'{source}.to(Float32)'}"
        for prefix, nodes in (("v", self.step.vectors), ("r", self.step.repeats), ("s", self.step.scalars)):
            for index in nodes:
                source = f'resources["{prefix}{index}"]'
                tables = prefix == "r" and self.resources.tables(index)
                yield f"{prefix}{index} = {f'table({source})' if tables else source}"
        for index in self.step.statistics:
            yield f'h{index} = statistic(self, "h{index}", resources["h{index}"])'
        for store in self.resources.stores:
            if store.packed:
                yield f"w{store.node} = wide_fragment(accumulator)"
            if store.role == "memory":
                yield f'{store.name} = resources["{store.name}"]'
            elif store.role == "store" and store is not self.resources.d:
                half = self.resources.width_of(store) < 1
                yield f"{store.name} = {'half_fragment' if half else 'fragment'}(accumulator)"
        for index in self.step.reductions:
            if index not in self.blocked:
                for partial in self.partials(index):
                    yield f'{partial.name} = resources["{partial.name}"]'
        for name in dict.fromkeys(
            f"{self.collected(i)}_{p}" for i in self.blocked for p in range(self.fragments(i))
        ):
            yield f"{name} = fragment(accumulator)"

    # One pair of lanes

    def lanes(self) -> Iterator[str]:
        """The code for one pair of accumulator lanes: compute every value of the step, then store and
        reduce."""
        values: Values = {}
        for load in self.resources.loads:
            if load.role == "load":
                count = int(2 * self.resources.width_of(load))
                values[load.node] = [f"{load.name}[{count} * i + {k}]" for k in range(count)]
            else:
                yield from self.fetch(load.node, load.name, "take", self.resources.width_of(load), values)
        for index in self.step.vectors:
            if self.spread(index).role == "column" and self.resources.width(index) != 1:
                yield from self.fetch(index, f"v{index}", "take", self.resources.width(index), values)
        for index in self.step.repeats:
            how = "tabled" if self.resources.tables(index) else "wrapped"
            yield from self.fetch(index, f"r{index}", how, self.resources.width(index), values)
        sums = self.resources.sums
        for index in self.step.body:
            if not sums or index != sums[0]:
                yield from self.compute(index, values)
        # A tile's ranges share one fragment. The loop writes it once, for the range whose role is "store".
        apart = {s.node for s in self.resources.stores if s.role == "range"}
        for index in (i for i in self.step.stores if i not in apart):
            yield from self.keep(index, self.value(sums[2] if sums and index == sums[0] else index, values))
        for index in self.step.reductions:
            if index not in self.blocked:
                yield from self.fold(index, self.value(self.nodes[index].args[0], values))
        for tile in dict.fromkeys(self.nodes[i].args[0] for i in self.blocked):
            got = self.value(tile, values)
            for part in range(max(1, len(got) // 2)):
                first, second = got[part :: max(1, len(got) // 2)] if len(got) > 1 else (*got, "LOWEST")
                yield f"f{tile}_{part}[2 * i], f{tile}_{part}[2 * i + 1] = {first}, {second}"

    def fetch(self, index: int, name: str, how: str, width: float, values: Values) -> Iterator[str]:
        """The code with which each thread itself reads the values at its columns from memory, without TMA."""
        count = int(2 * width)
        heads = f", {self.resources.heads(index)}" if how in ("tabled", "wrapped") else ""
        heads += ", self.cta_tile_shape_mnk[1]" if how == "wrapped" else ""
        values[index] = [f"n{index}_{k}" for k in range(count)]
        for k in range(count):
            yield f"n{index}_{k} = {how}(place, {name}, {self.where(count, k)}{heads})"

    @staticmethod
    def lane(count: int, k: int) -> str:
        """The code for the accumulator lane that holds the k-th of ``count`` values in a pair of lanes."""
        return f"2 * i + {k * 2 // count}" if count > 1 else "2 * i"

    def where(self, count: int, k: int) -> str:
        """The code of a lane (see ``lane``), and the code that maps the lane's column of the GEMM to a column
        of a tile. The map halves, keeps or doubles the column, and adds an offset."""
        return f"{self.lane(count, k)}, " + {1: "-1, 0", 2: "0, 0", 4: f"1, {k % 2}"}[count]

    def keep(self, index: int, got: list[str]) -> Iterator[str]:
        """The code that writes values to a store's fragment, or directly to memory."""
        store = next(s for s in self.resources.stores if s.node == index)
        if self.steps.types[index].kind == "head":
            yield f"put_head(place, {store.name}, 2 * i, {self.resources.heads(index)}, {got[0]})"
            return
        if store.role == "memory" and store.dtype in EIGHTS:
            yield f"put_four(place, {store.name}, {self.where(len(got), 0)}, {', '.join(got)})"
            return
        for k, value in enumerate(got):
            if store.role == "memory":
                yield f"put(place, {store.name}, {self.where(len(got), k)}, {value})"
                continue
            d = store is self.resources.d
            target = f"w{index}" if store.packed else "accumulator" if d else store.name
            yield f"{target}[{f'{len(got)} * i + {k}' if len(got) > 1 else 'i'}] = {value}"

    def compute(self, index: int, values: Values) -> Iterator[str]:
        node = self.nodes[index]
        if node.op == "gemm":
            yield f"n{index}_0, n{index}_1 = accumulator[2 * i], accumulator[2 * i + 1]"
            values[index] = [f"n{index}_0", f"n{index}_1"]
            return
        operation = OPERATIONS[node.op]
        if operation.at:
            yield from self.number(index, operation.at, values)
            return
        arguments = [self.value(a, values) for a in values_read(self.program, index)]
        if operation.lanes:
            lanes = operation.lanes(*arguments)
            if self.steps.types[index].kind == "tile" and len(lanes) == 1:  # a row's lanes share one value
                lanes = lanes * int(2 * self.resources.width(index))
            values[index] = lanes
            return
        count = max(len(a) for a in arguments)
        values[index] = [f"n{index}_{k}" for k in range(count)]
        for k in range(count):
            parts = [a[k] if len(a) > 1 else a[0] for a in arguments]
            if self.steps.types[index].kind == "scalar":
                parts = [f"Float32({p})" for p in parts]  # an operation needs at least one CuTeDSL value
            yield f"n{index}_{k} = {self.expression(index, parts, index in self.exact)}"

    def number(self, index: int, template: str, values: Values) -> Iterator[str]:
        """The code for values computed from a lane's position."""
        order = [node for node, *_ in self.resources.bounds()]
        bounds = f"self.column_bounds[{order.index(index)}]" if index in order else ""
        count = int(2 * self.resources.width(index))
        values[index] = [f"n{index}_{k}" for k in range(count)]
        for k in range(count):
            yield f"n{index}_{k} = {template.format(self.where(count, k), bounds=bounds)}"

    def value(self, index: int, values: Values) -> list[str]:
        node = self.nodes[index]
        if index in values:
            return values[index]
        if node.op == "constant":
            return [literal(self.constant(index))]
        if self.steps.types[index].kind == "scalar" and node.op in ("dim", "input"):
            return [f"s{index}"]
        operation = OPERATIONS[node.op]
        if operation.statistic:
            return [f"h{index}[2 * i]"]
        if operation.spread:
            return [lane.format(name=f"v{index}") for lane in operation.spread.lanes]
        raise ValueError(f"node {index} ({node.op}) is read before it is computed")

    def fold(self, index: int, values: list[str]) -> Iterator[str]:
        """The code that folds values directly into a reduction's running value, without a fragment."""
        how, count = self.reduction(index), len(values)
        assert how.fold is not None  # only blocked reductions lack a fold
        if self.masked(index):
            inside = "inside_columns" if how.axis == "row" else "inside_rows"
            empty = literal(how.identity)
            lanes = [self.lane(count, k) for k in range(count)]
            values = [
                f"choose({inside}(place, {at}), {v}, {empty})" for at, v in zip(lanes, values, strict=True)
            ]
        names = [partial.name for partial in self.partials(index)]
        if how.axis == "row":
            yield f"{names[0]}[2 * i] = {how.fold(f'{names[0]}[2 * i]', values)}"
            return
        for k, value in enumerate(values):
            target = f"{names[k % len(names)]}[{self.lane(count, k)}]"
            yield f"{target} = {how.fold(target, [value])}"
