"""Lowering: Program -> the text of one CuTeDSL module, and which tensor each of its arguments is.

A step becomes a class on QuACK's Hopper mainloop whose visitor works on pairs of accumulator lanes,
so that any mix of half, single and double width is one case. Vector arithmetic after a step becomes
one small kernel. Every identifier is invented here; constants pass through ``float.hex``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from primitives.cut import REDUCTIONS, GemmStep, Steps, cut
from primitives.interpret import store_dtypes
from primitives.ir import OPERATIONS, Program, ProgramError

CUTE_DTYPES = {"bf16": "cutlass.BFloat16", "fp16": "cutlass.Float16", "fp32": "Float32"}
PACKAGES = ("nvidia-cutlass-dsl", "quack-kernels")


@dataclass(frozen=True)
class Argument:
    """One tensor or number that a kernel takes: a node of the program under an invented name.

    ``packed``: 16-bit values, twice as wide as the GEMM, passed as 32-bit lanes.
    """

    name: str
    role: Literal["load", "store", "row", "column", "partial", "scalar", "vector", "out"]
    node: int
    dtype: str
    packed: bool = False


@dataclass(frozen=True)
class GemmKernel:
    """A step's class and what it is called with. ``c`` and ``d`` are the mainloop's own epilogue
    load and store; further ones are among ``arguments``."""

    step: int
    name: str
    a: int
    b: int
    a_transposed: bool
    b_transposed: bool
    dtype: str
    c: Argument | None
    d: Argument | None
    arguments: tuple[Argument, ...]
    half: bool  # stores a tile half as wide, which wants tile_n % 32 == 0


@dataclass(frozen=True)
class VectorKernel:
    """The kernel for the vectors that are final after ``step`` (-1: before all)."""

    step: int
    name: str
    length: int  # a node of the vectors' length
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Lowered:
    """``text`` is the product; the rest says how to call it, and follows from the program too."""

    text: str
    hash: str
    gemms: tuple[GemmKernel, ...]
    vectors: tuple[VectorKernel, ...]

    @property
    def module(self) -> str:
        return f"coda_lowered_{self.hash[:16]}"


def lower(program: Program) -> Lowered:
    """Lower a checked program. ProgramError where QuACK's resources do not reach, saying what would."""
    steps = cut(program)
    stored = store_dtypes(program)
    writers = [_StepWriter(program, steps, step, stored) for step in steps.gemms]
    finishes = [
        _FinishWriter(program, steps, stage, nodes)
        for stage, members in sorted(steps.finishes.items())
        for nodes in _by_length(steps, members)
    ]
    body = "\n\n".join([w.text() for w in writers] + [w.text() for w in finishes])
    digest = hashlib.sha256("\0".join([body, device_sources(), *map(version, PACKAGES)]).encode()).hexdigest()
    suffix = f"_{digest[:12]}"
    text = _HEADER + "\n\n" + re.sub(r"@@(\w+)", lambda m: m[1] + suffix, body)
    return Lowered(
        text,
        digest,
        tuple(replace(w.kernel(), name=w.kernel().name + suffix) for w in writers),
        tuple(replace(w.kernel(), name=w.kernel().name + suffix) for w in finishes),
    )


@cache
def device_sources() -> str:
    """The project's own device code: it is part of what a lowered text means."""
    return (Path(__file__).parent / "device.py").read_text(encoding="utf-8")


_HEADER = '''\
"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad, RowVecLoad, Scalar, TileLoad, TileStore

from primitives.device import (
    BLOCK, LANES_PER_ROW, FusedGemm, RowSum, arguments, choose, edge, fragment, half_fragment, inside,
    pack, sigmoid, sigmoid_fast, sum_partials, tanh, tanh_fast, unpack, wide_fragment,
)
'''


def _literal(value: float) -> str:
    """A Python number that reads back exactly; its hexadecimal form stands behind as a check."""
    if float(repr(value)).hex() != value.hex():
        raise ValueError(f"{value!r} does not survive printing")
    return f"({value!r})" if value < 0 else repr(value)


class _Writer:
    """What both kinds of kernel share: names of values and the text of an operation."""

    def __init__(self, program: Program, steps: Steps):
        self.program, self.nodes, self.steps = program, program.nodes, steps

    def expression(self, index: int, values: list[str], exact: bool) -> str:
        operation = OPERATIONS[self.nodes[index].op]
        template = operation.cute if exact or operation.fast is None else operation.fast
        if template is None:
            raise ValueError(f"operation {operation.name} has no CuTeDSL text of its own")
        return template.format(*values)

    def constant(self, index: int) -> float:
        return float(str(self.nodes[index].attribute))

    def input_dtype(self, index: int) -> str:
        return self.program.signature.inputs[str(self.nodes[index].attribute)].dtype

    def vector_dtype(self, index: int) -> str:
        """Vectors in memory keep their input's or output's dtype; further ones are fp32."""
        return self.input_dtype(index) if self.nodes[index].op == "input" else self.output_dtype(index)

    def output_dtype(self, index: int) -> str:
        for name, node in self.program.outputs.items():
            if node == index:
                return self.program.signature.outputs[name].dtype
        return "fp32"


class _StepWriter(_Writer):
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

    def width(self, index: int) -> Fraction:
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
    def check_packed(width: Fraction, dtype: str, done: str) -> None:
        if width != 1 and dtype == "fp32":
            raise ProgramError(
                "width", f"an fp32 tile {done} at another width than its gemm's: use bf16 or fp16 there"
            )

    def exact_nodes(self) -> set[int]:
        """Nodes that an fp32 output can see: no coarse instruction may reach one."""
        pending = [a for r in self.step.reductions for a in self.nodes[r].args]
        pending += [i for i in self.step.stores if self.stored_dtype[i] == "fp32"]
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
        import torch

        meaning = OPERATIONS[op].torch
        if None in arguments or meaning is None:
            return None
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
            return [_literal(self.constant(index))]
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


def _by_length(steps: Steps, members: tuple[int, ...]) -> list[list[int]]:
    lengths: dict[str, list[int]] = {}
    for index in members:
        lengths.setdefault(str(steps.types[index].shape[0]), []).append(index)
    return [lengths[key] for key in sorted(lengths)]


class _FinishWriter(_Writer):
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
        return f"Float32({_literal(self.constant(index))})" if node.op == "constant" else f"n{index}"
