"""Run lowered text lane by lane, with Python in place of CuTeDSL.

A fragment is a list of columns; a column holds all rows. The whole matrix is one CTA tile. Beyond the edge of
the matrix, accumulators and bulk-loaded tiles hold zeros, and a broadcast vector holds NaN. A load whose
address each thread computes itself returns the value at the edge. Because of these values, a missing mask
changes the result.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from merged import MERGED

from coda_agent.primitives.compiler.lower import Argument, GemmKernel, Lowered, VectorKernel, lower
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.interpret import solve_sizes, torch_dtype
from coda_agent.primitives.lang.ir import OPERATIONS, Program

Tensors = dict[str, torch.Tensor]
PAST = 4  # rows and lanes beyond the matrix
LOWEST = -torch.inf


def fp32(value: Any) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float32)


class Lanes:
    """A fragment: one tensor per lane, which holds all rows."""

    def __init__(self, lanes: list[Any]):
        self.lanes = lanes

    def __getitem__(self, lane: int) -> Any:
        return self.lanes[lane]

    def __setitem__(self, lane: int, value: Any) -> None:
        self.lanes[lane] = fp32(value)

    def to(self, dtype: Any) -> Lanes:
        return self


class Same:
    """A vector along M, or one running value per row. Every column has the same value."""

    def __init__(self, value: Any):
        self.value = value

    def __getitem__(self, lane: int) -> Any:
        assert lane % 2 == 0
        return self.value

    def __setitem__(self, lane: int, value: Any) -> None:
        self.value = value


@dataclass
class Heads:
    """Sums or largest magnitudes per head. A head is ``width`` lanes of the values that ``fold`` receives."""

    width: int
    kind: str
    sums: list[torch.Tensor] = field(default_factory=list)

    def fold(self, values: Lanes) -> None:
        for at in range(0, len(values.lanes), self.width):
            lanes = torch.stack(values.lanes[at : at + self.width])
            self.sums.append(fp32(lanes.sum(0) if self.kind == "HeadSums" else lanes.abs().amax(0)))

    def fragment(self) -> Lanes:
        return Lanes([total for total in self.sums for _ in range(self.width)])


@dataclass
class LogSumExp:
    """A model of the log-sum-exp along rows, which a class of QuACK implements and not the lowered text. The
    reduction leaves out lanes past the edge, and overwrites the fragment that ``fold`` receives."""

    place: Place
    blocks: list[torch.Tensor] = field(default_factory=list)

    def fold(self, values: Lanes) -> None:
        inside = [v for lane, v in enumerate(values.lanes) if inside_columns(self.place, lane)]
        self.blocks.append(torch.stack([v.expand(self.place.rows + PAST) for v in inside]).logsumexp(0))
        values.lanes = [fp32(torch.nan)] * len(values.lanes)

    @property
    def value(self) -> torch.Tensor:
        return torch.stack(self.blocks).logsumexp(0)


@dataclass
class Select:
    """A model of the selection of one value per row, which a class of QuACK implements and not the lowered
    text. If a row's index is not a valid column, the selection writes nothing for this row."""

    place: Place
    index: torch.Tensor
    target: torch.Tensor

    def fold(self, values: Lanes) -> None:
        for row, index in enumerate(self.index.tolist()):
            if 0 <= index < self.place.columns:
                self.target[row] = values.lanes[index].expand(self.place.rows + PAST)[row]


class Element:
    """One element of a vector in memory."""

    def __init__(self, value: torch.Tensor):
        self.value = value

    def to(self, dtype: Any) -> Number:
        return self.value.float().as_subclass(Number)


class Vector:
    element_type = "its own"

    def __init__(self, values: torch.Tensor):
        self.values, self.shape = values, values.shape

    def __getitem__(self, row: int) -> Element:
        return Element(self.values[row])

    def __setitem__(self, row: int, value: Any) -> None:
        self.values[row] = value


class Number(torch.Tensor):
    """A register of a vector kernel. The value is converted only when it is stored in memory."""

    def to(self, *args: Any) -> Any:  # type: ignore[override]
        return self if args == (Vector.element_type,) else super().to(*args)


# Positions of lanes


@dataclass(frozen=True)
class Place:
    rows: int
    columns: int


def column(place: Place, lane: int, twice: int, past: int) -> int:
    assert past in (0, 1) and (past == 0 or twice == 1)
    return {-1: lane // 2, 0: lane, 1: 2 * lane + past}[twice]


def inside_columns(place: Place, lane: int) -> bool:
    return lane < place.columns


def inside_rows(place: Place, lane: int) -> torch.Tensor:
    return torch.arange(place.rows + PAST) < place.rows


def _down(place: Place, source: torch.Tensor, at: int) -> torch.Tensor:
    """Return a column of memory. Past the end, the column repeats the value of its last row."""
    if source.ndim == 1:
        return source[at].float()
    return source[:, at].float()[torch.arange(place.rows + PAST).clamp(max=place.rows - 1)]


def take(place: Place, source: torch.Tensor, lane: int, twice: int, past: int) -> torch.Tensor:
    return _down(place, source, min(column(place, lane, twice, past), source.shape[-1] - 1))


def repeated(place: Place, source: torch.Tensor, lane: int, twice: int, past: int, width: int) -> Any:
    assert twice < 1 and source.shape[-1] == (width // 2 if twice else width)
    return _down(place, source, column(place, lane % width, twice, past))


def put(place: Place, target: torch.Tensor, lane: int, twice: int, past: int, value: Any) -> None:
    across = column(place, lane, twice, past)
    if across < target.shape[1]:
        target[:, across] = fp32(value).expand(place.rows + PAST)[: place.rows]


def put_four(place: Place, target: torch.Tensor, lane: int, twice: int, past: int, *values: Any) -> None:
    across = column(place, lane, twice, past)
    assert (lane % 2, twice, past, target.shape[1] % 4) == (0, 1, 0, 0) and target.itemsize == 1
    for k, value in enumerate(values if across < target.shape[1] else ()):
        target[:, across + k] = stored(fp32(value).expand(place.rows + PAST)[: place.rows], target.dtype)


def stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert as the conversion instruction does: values saturate in 8-bit dtypes."""
    end = torch.finfo(dtype).max if dtype.itemsize == 1 else torch.inf
    return values.clamp(-end, end).to(dtype)


def put_head(place: Place, target: torch.Tensor, lane: int, width: int, value: Any) -> None:
    if lane % width == 0 and lane < place.columns:
        target[:, lane // width] = fp32(value).expand(place.rows + PAST)[: place.rows]


# Between steps


def _finished(values: torch.Tensor, how: str) -> Number:
    reduce: dict[str, Callable[..., torch.Tensor]] = {
        "add": torch.sum, "max": torch.amax, "max_abs": torch.amax, "logsumexp": torch.logsumexp,
    }  # fmt: skip
    assert how != "max_abs" or bool((values >= 0).all())
    return reduce[how](values, dim=0).as_subclass(Number)


def finish_row(partials: torch.Tensor, at: int, lane: int, how: str) -> Number:
    return _finished(partials[0, at], how)


def finish_column(parts: tuple[torch.Tensor, ...], at: int, lane: int, how: str, half: bool) -> Number:
    if len(parts) == 2:
        return _finished(parts[at % 2][0, :, at // 2], how)
    return _finished(parts[0][0, :, 2 * at if half else at], how)


def finish_select(selected: Vector, at: int, index: torch.Tensor, extent: torch.Tensor) -> Number:
    found = selected.values[at] if 0 <= index < extent else torch.tensor(0.0)
    return found.as_subclass(Number)


# The language


def _choose(condition: Any, a: Any, b: Any) -> torch.Tensor:
    return torch.where(torch.as_tensor(condition), fp32(a), fp32(b))


def _largest(a: Any, b: Any) -> torch.Tensor:
    return torch.fmax(fp32(a), fp32(b))


def _unary(function: Any) -> Any:
    return lambda x, fastmath=False: function(fp32(x))


def _gelu(x: Any) -> torch.Tensor:
    return torch.nn.functional.gelu(fp32(x), approximate="tanh")


def _pack(wide: Lanes, dtype: Any, target: Lanes) -> None:
    target.lanes = wide.lanes


def _fragment(share: float) -> Callable[[Lanes], Lanes]:
    return lambda like: Lanes([None] * int(share * len(like.lanes)))


def _resource(kind: str) -> Callable[..., tuple[Any, ...]]:
    return lambda *arguments, **flags: (kind, *arguments, *flags.items())


LANGUAGE: dict[str, Any] = {
    **dict.fromkeys(("FusedGemm", "GatheredGemm", "GroupedGemm", "TableGemm", "Bounds"), object),
    "Float32": fp32,
    "arguments": lambda resources, adds=False: adds,
    "cutlass": types.SimpleNamespace(
        range=lambda n, unroll_full: range(n), min=min, BFloat16="bf16", Float16="fp16"
    ),
    "sigmoid": torch.sigmoid, "sigmoid_fast": torch.sigmoid, "tanh": torch.tanh, "tanh_fast": torch.tanh,
    "gelu": _gelu, "gelu_fast": _gelu, "sine": torch.sin, "sine_fast": torch.sin,
    "cosine": torch.cos, "cosine_fast": torch.cos,
    "choose": _choose, "largest": _largest, "magnitude": lambda a: fp32(a).abs(), "LOWEST": LOWEST,
    "pack": _pack, "unpack": lambda packed, dtype: packed,
    "fragment": _fragment(1), "wide_fragment": _fragment(2), "half_fragment": _fragment(0.5),
    "column": column, "inside_columns": inside_columns, "inside_rows": inside_rows, "take": take,
    "repeated": repeated, "wrapped": lambda *given: repeated(*given[:-1]), "tabled": repeated,
    "table": lambda source: source,
    "put": put, "put_four": put_four, "put_head": put_head,
    "within": lambda at, bounds: bounds[0] <= at < bounds[1],
    "at_subtile": lambda gemm, name, states, at: states[name],
    "fold": lambda gemm, name, state, values: state.fold(values),
    "statistic": lambda gemm, name, state: state.fragment(),
    "BLOCK": 256, "LANES": 8, "finish_row": finish_row, "finish_column": finish_column,
    "finish_select": finish_select,
    "finish_logsumexp": lambda partials, at, lane: _finished(partials[0, at], "logsumexp"),
    **{kind: _resource(kind) for kind in (
        "ColVecLoad", "ColVecSelect", "ColumnPartials", "EightStore", "HeadAbsMax", "HeadSums", "HeadTable",
        "Memory", "OnlineLSEReduce", "Range", "RangeStore", "RowPartials", "RowVecLoad", "Rows", "Scalar",
        "TileLoad", "TileStore",
    )},
}  # fmt: skip

for _proposal in MERGED:
    LANGUAGE |= dict.fromkeys((_proposal.name, f"{_proposal.name}_fast"), _proposal.truth)


class Machine:
    """Run one program on given inputs. ``memory``: tensors by node; ``partials``: partial results of
    reductions, by node and part."""

    def __init__(self, program: Program, inputs: Tensors, sizes: Mapping[str, int]):
        self.program, self.lowered = program, lower(program)
        self.sizes = solve_sizes(program.signature, {k: tuple(t.shape) for k, t in inputs.items()}, sizes)
        self.types = program.types()
        self.memory = {i: inputs[str(n.attribute)] for i, n in enumerate(program.nodes) if n.op == "input"}
        self.partials: dict[tuple[int, int], torch.Tensor] = {}
        self.combines: dict[str, Callable[..., torch.Tensor]] = {}  # by argument: the reduction over rows
        self.thread = 0
        functions = {
            f.__name__: _unary(f) for f in (torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.tanh)
        }
        arch = types.SimpleNamespace(
            fmax=_largest,
            block_idx=lambda: (0, 0, 0),
            thread_idx=lambda: (self.thread, 0, 0),
            griddepcontrol_wait=lambda: None,  # the GEMM has ended
        )
        cute = types.SimpleNamespace(
            jit=lambda f: f, kernel=lambda f: f, size=lambda lanes: len(lanes.lanes), arch=arch,
            math=types.SimpleNamespace(**functions),
        )  # fmt: skip
        self.module: dict[str, Any] = LANGUAGE | {"cute": cute}
        body = self.lowered.text[self.lowered.text.index("\nclass ") :]
        exec(compile(body, "<lowered>", "exec"), self.module)

    def read(self, argument: Argument) -> torch.Tensor:
        tensor = self.memory[argument.node]
        assert tensor.dtype == torch_dtype(argument.dtype)
        return tensor

    def shape(self, node: int) -> list[int]:
        return [d(self.sizes) for d in self.types[node].shape]

    def number(self, argument: Argument) -> torch.Tensor:
        """Return the number of columns of the argument's node if the argument is an extent. Otherwise return
        the size that the node names."""
        if argument.role == "extent":
            return fp32(self.shape(argument.node)[1])
        return fp32(Dim.parse(str(self.program.nodes[argument.node].attribute))(self.sizes))

    # A step

    def gemm(self, kernel: GemmKernel) -> None:
        a, b = (self.memory[i].float() for i in (kernel.a, kernel.b))
        offsets = [self.memory[i] for i in (kernel.offsets, kernel.index) if i is not None]
        multiply = OPERATIONS["gemm"].torch
        assert multiply is not None
        a, b = a.mT if kernel.a_transposed else a, b.mT if kernel.b_transposed else b
        product = multiply(torch, a, b, *offsets).flatten(0, -2)  # stack the experts' matrices along the rows
        made, place = self.module[kernel.name](), Place(*product.shape)
        made.head_widths, made.cta_tile_shape_mnk = kernel.head_widths(self.sizes), (128, 128, 64)
        made.column_bounds = kernel.column_bounds(self.sizes)
        rows = torch.nn.functional.pad(product, (0, PAST, 0, PAST))
        resources: dict[str, Any] = {"place": place}
        kinds = {name: (kind, *rest) for kind, name, *rest in made._epi_ops}
        assert list(kinds) == [a.name for a in kernel.arguments]
        for argument in kernel.arguments:
            resources[argument.name] = self.resource(argument, kinds[argument.name], kernel, place)
        if hasattr(made, "epi_prepass_subtile"):
            assert made.epi_needs_acc_prepass
            made.epi_prepass_subtile(None, resources, Lanes([*rows.unbind(1)]), (0, 0), 0)
        operand = self.lanes(kernel.c, place) if kernel.c else None
        accumulator = Lanes([*rows.unbind(1)])
        stored = made.epi_visit_subtile(None, resources, accumulator, operand)
        stores = [argument for argument in kernel.arguments if argument.role == "store"]
        for argument, fragment in zip(stores, stored, strict=True):
            kind, *others = kinds[argument.name]
            self.store(argument, fragment, place, kernel if kind == "RangeStore" else None)
            for further in (a for a in kernel.arguments if kind == "RangeStore" and a.name in others):
                assert kinds[further.name] == ("Range",)
                self.store(further, fragment, place, kernel)
        if kernel.d:
            self.store(kernel.d, accumulator, place)
        assert made.EpilogueArguments == (kernel.adds is not None)
        if kernel.d and kernel.adds is not None:  # the buffer holds an earlier sum; the GEMM adds to it
            self.memory[kernel.d.node] += self.memory[kernel.adds]
        for argument in kernel.arguments:
            if argument.role == "partial" and argument.rank > 1:
                self.keep(argument, resources[argument.name], place)

    def resource(self, argument: Argument, kind: tuple[Any, ...], kernel: GemmKernel, place: Place) -> Any:
        """Return the object that ``epi_visit_subtile`` receives for an argument."""
        match argument.role:
            case "load":
                return self.lanes(argument, place)
            case "row":
                return Same(torch.cat([self.read(argument).float(), torch.full((PAST,), torch.nan)]))
            case "column":
                return Lanes([*self.read(argument).float(), *torch.full((PAST,), torch.nan)])
            case "pointer":
                return self.read(argument)
            case "scalar":
                return self.number(argument)
            case "memory" | "table" if argument.node in self.memory:
                return self.read(argument)
            case "memory":
                made = torch.full(self.shape(argument.node), torch.nan, dtype=torch_dtype(argument.dtype))
                return self.memory.setdefault(argument.node, made)
            case "head":
                assert argument.period is not None
                return Heads(argument.period(self.sizes), kind[0])
            case "partial":
                return self.partial(argument, kind, kernel, place)
        return None

    def partial(self, argument: Argument, kind: tuple[Any, ...], kernel: GemmKernel, place: Place) -> Any:
        match kind:
            case ("OnlineLSEReduce",):
                return LogSumExp(place)
            case ("ColVecSelect", (_, index)):
                (chosen,) = (a for a in kernel.arguments if a.name == index)
                target = torch.full((place.rows,), LOWEST)
                self.partials[argument.node, argument.part] = target
                return Select(place, self.read(chosen), target)
            case ("RowPartials", how):
                return Same(torch.full((place.rows + PAST,), LOWEST if how == "max" else 0.0))
            case ("ColumnPartials", how):
                empty = torch.full((place.rows + PAST,), LOWEST if how == "max" else 0.0)
                self.combines[argument.name] = torch.sum if how == "add" else torch.amax
                return Lanes([empty] * (place.columns + PAST))
        raise ValueError(kind)

    def keep(self, argument: Argument, running: Any, place: Place) -> None:
        """Store partial results in the form in which a GEMM kernel leaves them. Column partials are combined
        over all rows of the tile."""
        if isinstance(running, Lanes):
            combine = self.combines[argument.name]
            kept = torch.stack([combine(fp32(v), dim=0) for v in running.lanes[: place.columns]])
            self.partials[argument.node, argument.part] = kept[None, None, :]
        else:
            value = fp32(running.value).expand(place.rows + PAST)
            self.partials[argument.node, argument.part] = value[None, : place.rows, None]

    def lanes(self, argument: Argument, place: Place) -> Lanes:
        """Return the lanes of a bulk load. If the tile is twice as wide as the GEMM, each lane packs two
        values."""
        tile = self.read(argument).float()
        across = PAST * tile.shape[1] // place.columns
        assert argument.packed == (tile.shape[1] == 2 * place.columns)
        return Lanes([*torch.nn.functional.pad(tile, (0, across, 0, PAST)).unbind(1)])

    def store(
        self, argument: Argument, fragment: Lanes, place: Place, ranges: GemmKernel | None = None
    ) -> None:
        keep = len(fragment.lanes) * place.columns // (place.columns + PAST)
        lanes = [fp32(lane).expand(place.rows + PAST) for lane in fragment.lanes[:keep]]
        tile = torch.stack(lanes, dim=1)[: place.rows]
        if ranges:
            first = dict(ranges.range_starts(self.sizes))[argument.name]
            tile = tile[:, first : first + self.shape(argument.node)[1]]
        shape = self.shape(argument.node)
        assert list(tile.shape) == [math.prod(shape[:-1]), shape[-1]]
        self.memory[argument.node] = stored(tile, torch_dtype(argument.dtype)).reshape(shape)

    # Between steps

    def vectors(self, kernel: VectorKernel) -> None:
        if kernel.name.startswith("Bounds"):
            return  # this kernel clamps wrong offsets; here all offsets are correct
        given = [self.given(argument) for argument in kernel.arguments]
        (length,) = self.shape(kernel.length)
        for row in range(length + 3):  # as on a GPU, some threads lie past the last value
            self.thread = 8 * row
            self.module[kernel.name]().kernel(*given)
        for argument, vector in zip(kernel.arguments, given, strict=True):
            if argument.role == "out":
                self.memory[argument.node] = vector.values
            elif argument.role == "partial" and argument.rank == 1:
                assert bool((vector.values == LOWEST).all())  # the kernel resets partials for its next call

    def given(self, argument: Argument) -> Any:
        match argument.role:
            case "scalar" | "extent":
                return self.number(argument)
            case "pointer":
                return self.read(argument).reshape(1)
            case "partial" if argument.rank == 3:
                return self.partials[argument.node, argument.part]
            case "partial":
                return Vector(self.partials[argument.node, argument.part])
            case "vector":
                return Vector(self.read(argument))
        return Vector(torch.empty(self.shape(argument.node), dtype=torch_dtype(argument.dtype)))


def kernel_names(lowered: Lowered) -> list[str]:
    return [g.name for g in lowered.gemms] + [v.name for v in lowered.vectors]


def run_lowered(
    program: Program, inputs: Tensors, sizes: Mapping[str, int] = types.MappingProxyType({})
) -> Tensors:
    """Run the lowered text; return the outputs by name."""
    machine = Machine(program, inputs, sizes)
    kernels: list[GemmKernel | VectorKernel] = [*machine.lowered.gemms, *machine.lowered.vectors]
    for kernel in sorted(kernels, key=lambda k: (k.step, isinstance(k, VectorKernel))):
        if isinstance(kernel, GemmKernel):
            machine.gemm(kernel)
        else:
            machine.vectors(kernel)
    return {name: machine.memory[index] for name, index in program.outputs.items()}
