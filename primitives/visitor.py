"""A step as a class on QuACK's Hopper mainloop: its resources, and the visitor of an epilogue subtile.

The visitor works on pairs of accumulator lanes, so any mix of half, single and double width is one case.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from primitives.cut import GemmStep, Steps
from primitives.ir import OPERATIONS, Program, ProgramError
from primitives.lowered import CUTE_DTYPES, Argument, GemmKernel, Writer, literal


class StepWriter(Writer):
    def __init__(self, program: Program, steps: Steps, step: GemmStep, stored_dtype: dict[int, str]):
        super().__init__(program, steps)
        self.step, self.stored_dtype = step, stored_dtype
        self.exact = self.exact_nodes()
        self.past_edge = self.values_past_edge()
        self.loads = [self.load(i) for i in step.loads]
        self.stores = [self.store(i) for i in step.stores]
        # The mainloop's own operand and output take the widest: they size its epilogue tile.
        self.c = max(self.loads, key=lambda a: self.width(a.node), default=None)
        wide = [s for s in self.stores if self.width(s.node) >= 1]
        self.d = max(wide, key=lambda a: self.width(a.node), default=None)

    def width(self, index: int) -> float:
        return self.steps.width[self.step.index, index]

    def load(self, index: int) -> Argument:
        width = self.width(index)
        dtype = self.input_dtype(index) if self.nodes[index].op == "input" else self.stored_dtype[index]
        if width < 1:
            raise ProgramError(
                "width",
                "a tile half as wide as its gemm can be stored but not loaded: "
                "let the gemm's own width be the narrower one",
            )
        self.check_packed(width, dtype, "loaded")
        return Argument(f"t{index}", "load", index, dtype, width == 2)

    def store(self, index: int) -> Argument:
        width, dtype = self.width(index), self.stored_dtype[index]
        self.check_packed(width, dtype, "stored")
        return Argument(f"o{index}", "store", index, dtype, width == 2)

    @staticmethod
    def check_packed(width: float, dtype: str, done: str) -> None:
        if width != 1 and dtype == "fp32":
            raise ProgramError(
                "width", f"an fp32 tile {done} at another width than its gemm's: use bf16 or fp16 there"
            )

    def exact_nodes(self) -> set[int]:
        """Nodes that an fp32 output can see: no coarse instruction may reach one."""
        pending = [a for r in self.step.reductions for a in self.nodes[r].args]
        pending += [i for i in self.step.stores if self.stored_dtype[i] != "bf16"]
        found: set[int] = set()
        while pending:
            index = pending.pop()
            if index not in found:
                found.add(index)
                pending.extend(self.nodes[index].args)
        return found

    def resources(self) -> list[tuple[Argument, str]]:
        """The epilogue's resources beside C and D: argument and constructor."""
        found: list[tuple[Argument, str]] = []
        for load in self.loads:
            if load is not self.c:
                found.append((load, f'TileLoad("{load.name}")'))
        for index in self.step.vectors:
            vector = self.nodes[index].args[0]
            row = self.nodes[index].op == "per_row"
            role: Literal["row", "column"] = "row" if row else "column"
            argument = Argument(f"v{index}", role, vector, self.vector_dtype(vector))
            found.append((argument, f'{"ColVecLoad" if row else "RowVecLoad"}("v{index}")'))
        for index in self.step.scalars:
            found.append((Argument(f"s{index}", "scalar", index, "fp32"), f'Scalar("s{index}")'))
        for store in self.stores:
            if store is not self.d:
                gated = ", gated=True" if self.width(store.node) < 1 else ""
                found.append((store, f'TileStore("{store.name}"{gated})'))
        for index in self.step.reductions:
            masked = not self.vanishes(self.nodes[index].args[0])
            found.append(
                (Argument(f"p{index}", "partial", index, "fp32"), f'RowSum("p{index}", masked={masked})')
            )
        return found

    def values_past_edge(self) -> dict[int, float | None]:
        """What each value is past a ragged edge, where accumulator and loads are zero; None if unknown."""
        known: dict[int, float | None] = dict.fromkeys(self.step.loads, 0.0)
        for index in self.step.body:
            node = self.nodes[index]
            arguments = [
                self.constant(a) if self.nodes[a].op == "constant" else known.get(a) for a in node.args
            ]
            if node.op == "gemm":
                known[index] = 0.0
            elif node.op in ("even", "odd", "join"):
                known[index] = arguments[0] if len(set(arguments)) == 1 else None
            else:
                known[index] = self.evaluated(node.op, arguments)
        return known

    @staticmethod
    def evaluated(op: str, arguments: list[float | None]) -> float | None:
        """An operation on numbers. A spread vector holds anything past the edge: that is None."""
        meaning = OPERATIONS[op].torch
        if None in arguments or meaning is None:
            return None
        import torch

        return float(meaning(torch, *(torch.tensor(a) for a in arguments)))

    def vanishes(self, index: int) -> bool:
        """Whether a tile is certainly zero past a ragged edge."""
        return self.past_edge.get(index) == 0.0

    def kernel(self) -> GemmKernel:
        a, b = (self.nodes[i] for i in self.nodes[self.step.gemm].args)
        sources = [
            n.args[0] if n.op == "transpose" else i
            for n, i in zip((a, b), self.nodes[self.step.gemm].args, strict=True)
        ]
        dtypes = {
            self.input_dtype(s) if self.nodes[s].op == "input" else self.stored_dtype[s] for s in sources
        }
        if len(dtypes) != 1 or "fp32" in dtypes:
            raise ProgramError(
                "dtype",
                f"gemm's operands are {' and '.join(sorted(dtypes))}: both must be bf16, or both fp16",
            )
        return GemmKernel(
            self.step.index,
            f"Step{self.step.index}",
            sources[0],
            sources[1],
            a.op == "transpose",
            b.op == "transpose",
            dtypes.pop(),
            self.c,
            self.d,
            tuple(argument for argument, _ in self.resources()),
            any(self.width(s.node) < 1 for s in self.stores),
        )

    def text(self) -> str:
        resources = self.resources()
        made = "".join(f"        {constructor},\n" for _, constructor in resources)
        lines = "\n".join(f"        {line}".rstrip() for line in self.visitor())
        return (
            f"class @@Step{self.step.index}(FusedGemm):\n"
            f"    _epi_ops = (\n{made}    )\n"
            "    EpilogueArguments = arguments(_epi_ops)\n\n"
            "    @cute.jit\n"
            "    def epi_visit_subtile(self, params, resources, accumulator, operand=None):\n"
            f"{lines}\n"
        )

    def visitor(self) -> Iterator[str]:
        yield from self.prologue()
        yield "for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):"
        for line in self.lanes():
            yield "    " + line
        for store in self.stores:
            if store.packed:
                target = "accumulator" if store is self.d else store.name
                yield f"pack(w{store.node}, {CUTE_DTYPES[store.dtype]}, {target})"
        extra = [s.name for s in self.stores if s is not self.d]
        yield f"return ({''.join(name + ', ' for name in extra)})"

    def prologue(self) -> Iterator[str]:
        """Fragments and resources, outside the loop over lanes."""
        for load in self.loads:
            source = "operand" if load is self.c else f'resources["{load.name}"]'
            yield (
                f"{load.name} = unpack({source}, {CUTE_DTYPES[load.dtype]})"
                if load.packed
                else f"{load.name} = {source}.to(Float32)"
            )
        for index in self.step.vectors:
            yield f'v{index} = resources["v{index}"]'
        for index in self.step.scalars:
            yield f's{index} = resources["s{index}"]'
        for store in self.stores:
            if store.packed:
                yield f"w{store.node} = wide_fragment(accumulator)"
            if store is not self.d:
                half = self.width(store.node) < 1
                yield f"{store.name} = {'half_fragment' if half else 'fragment'}(accumulator)"
        for index in self.step.reductions:
            if self.vanishes(self.nodes[index].args[0]):
                yield f'p{index} = resources["p{index}"]'
            else:
                yield f'p{index} = resources["p{index}"][0]'
                yield f'offsets{index}, left{index} = edge(self, resources["p{index}"])'

    def lanes(self) -> Iterator[str]:
        """One pair of accumulator lanes: every value of the step, then stores and sums."""
        values: dict[int, list[str]] = {}
        for load in self.loads:
            count = int(2 * self.width(load.node))
            values[load.node] = [f"{load.name}[{count} * i + {k}]" for k in range(count)]
        for index in self.step.body:
            yield from self.compute(index, values)
        for store in self.stores:
            got = self.value(store.node, values)
            target = f"w{store.node}" if store.packed else "accumulator" if store is self.d else store.name
            for k, value in enumerate(got):
                place = f"{len(got)} * i + {k}" if len(got) > 1 else "i"
                yield f"{target}[{place}] = {value}"
        for index in self.step.reductions:
            yield self.fold(index, self.value(self.nodes[index].args[0], values))

    def compute(self, index: int, values: dict[int, list[str]]) -> Iterator[str]:
        node = self.nodes[index]
        if node.op == "gemm":
            yield f"n{index}_0, n{index}_1 = accumulator[2 * i], accumulator[2 * i + 1]"
            values[index] = [f"n{index}_0", f"n{index}_1"]
            return
        arguments = [self.value(a, values) for a in node.args]
        if node.op in ("even", "odd"):
            values[index] = arguments[0][0 if node.op == "even" else 1 :: 2]
            return
        if node.op == "join":
            values[index] = [v for pair in zip(*arguments, strict=True) for v in pair]
            return
        count = max(len(a) for a in arguments)
        values[index] = [f"n{index}_{k}" for k in range(count)]
        for k in range(count):
            parts = [a[k] if len(a) > 1 else a[0] for a in arguments]
            if self.steps.types[index].kind == "scalar":
                parts = [f"Float32({p})" for p in parts]  # never an operation on Python numbers alone
            yield f"n{index}_{k} = {self.expression(index, parts, index in self.exact)}"

    def value(self, index: int, values: dict[int, list[str]]) -> list[str]:
        node = self.nodes[index]
        if index in values:
            return values[index]
        if node.op == "constant":
            return [literal(self.constant(index))]
        if node.op == "dim":
            return [f"s{index}"]
        if node.op == "per_row":
            return [f"v{index}[2 * i]"]
        if node.op == "per_column":
            return [f"v{index}[2 * i]", f"v{index}[2 * i + 1]"]
        raise ValueError(f"node {index} ({node.op}) is read before it is computed")

    def fold(self, index: int, values: list[str]) -> str:
        """Straight into the running sum, which costs no fragment of its own."""
        if self.vanishes(self.nodes[index].args[0]):
            return f"p{index}[2 * i] = p{index}[2 * i] + ({' + '.join(values)})"
        per_lane = len(values) // 2 or 1
        terms = [
            f"choose(inside(offsets{index}, 2 * i + {k // per_lane}, left{index}), {value}, 0.0)"
            for k, value in enumerate(values)
        ]
        return f"p{index}[2 * i] = p{index}[2 * i] + ({' + '.join(terms)})"
