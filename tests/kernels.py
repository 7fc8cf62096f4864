"""Signatures and kernel sources that several tests share, inputs for them, and a way to run lowered text.

``run_lowered`` executes what ``lower`` wrote, lane by lane, with Python in CuTeDSL's place: a fragment is
a list of columns, each of all rows at once. Past the ragged edge, accumulator and tiles are zero and
spread vectors are NaN, so that a mask that is missing shows.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch

import primitives
from primitives.dims import Dim
from primitives.interpret import solve_sizes, torch_dtype
from primitives.ir import Program, Signature, TensorType
from primitives.lower import Argument, GemmKernel, Lowered, VectorKernel, lower
from primitives.trace import trace_source

IMPORTS = f"from primitives import {', '.join(primitives.__all__)}\n"
Tensors = dict[str, torch.Tensor]


def tensor(shape: str, dtype: str = "bf16") -> TensorType:
    """``tensor("M, 2*F")``"""
    return TensorType(tuple(Dim.parse(d.strip()) for d in shape.split(",")), dtype)


def signature(inputs: dict[str, TensorType], outputs: dict[str, TensorType], **constants: float) -> Signature:
    """A signature whose dims are those that its shapes name."""
    dims = sorted({n for t in (*inputs.values(), *outputs.values()) for d in t.shape for n in d.names})
    return Signature("kernel", tuple(dims), inputs, outputs, constants)


def source(signature: Signature, *lines: str) -> str:
    """A kernel file with the right parameters; the first of ``lines`` is line 4 of it."""
    parameters = ", ".join([*signature.inputs, *signature.constants])
    return f"{IMPORTS}@kernel\ndef k({parameters}):\n" + "".join(f"    {line}\n" for line in lines)


def trace(signature: Signature, *lines: str) -> Program:
    return trace_source(source(signature, *lines), signature)


@dataclass(frozen=True)
class Example:
    signature: Signature
    lines: tuple[str, ...]
    sizes: dict[str, int]

    @property
    def program(self) -> Program:
        return trace(self.signature, *self.lines)


NORM = Example(
    signature(
        {"y": tensor("M, K"), "w": tensor("N, K"), "x": tensor("M, N"), "gamma": tensor("N")},
        {"h": tensor("M, N"), "hg": tensor("M, N"), "rstd": tensor("M", "fp32")},
        eps=1e-6,
    ),
    (
        "h = gemm(y, w.mT) + x",
        "rstd = rsqrt(row_sums(h * h) / h.columns + eps)",
        "return {'h': h, 'hg': h * per_column(gamma), 'rstd': rstd}",
    ),
    {"M": 24, "K": 32, "N": 48},
)
SWIGLU = Example(
    signature(
        {"x": tensor("M, D"), "w": tensor("2*F, D"), "rstd": tensor("M", "fp32")},
        {"preact": tensor("M, 2*F"), "act": tensor("M, F")},
    ),
    (
        "z = gemm(x, w.mT) * per_row(rstd)",
        "g, u = pairs(z)",
        "return {'preact': z, 'act': silu(g) * u}",
    ),
    {"M": 24, "D": 32, "F": 16},
)
BACKWARD = Example(
    signature(
        {"dy": tensor("M, D"), "w_down": tensor("D, F"), "z": tensor("M, 2*F")},
        {"dz": tensor("M, 2*F"), "act": tensor("M, F"), "s": tensor("M", "fp32")},
    ),
    (
        "d = gemm(dy, w_down)",
        "g, u = pairs(z)",
        "s = sigmoid(g)",
        "sg = g * s",
        "dg = d * u * (s + sg * (1.0 - s))",
        "du = d * sg",
        "return {'dz': join(dg, du), 'act': sg * u, 's': row_sums(dg * g + du * u)}",
    ),
    {"M": 24, "D": 32, "F": 16},
)
# Output projection and residual, then the next projection with the norm's row scale deferred past it.
CHAIN = Example(
    signature(
        {"y": tensor("M, K"), "wo": tensor("K, N"), "x": tensor("M, N"), "gamma": tensor("N"),
         "w_up": tensor("P, N")},
        {"h": tensor("M, N"), "up": tensor("M, P")},
        eps=1e-6,
    ),
    (
        "h = gemm(y, wo) + x",
        "rstd = rsqrt(row_sums(h * h) / h.columns + eps)",
        "up = gemm(h * per_column(gamma), w_up.mT) * per_row(rstd)",
        "return {'h': h, 'up': up}",
    ),
    {"M": 24, "K": 32, "N": 48, "P": 40},
)  # fmt: skip
EXAMPLES = {"norm": NORM, "swiglu": SWIGLU, "backward": BACKWARD, "chain": CHAIN}


def draw(signature: Signature, sizes: dict[str, int], seed: int = 0) -> Tensors:
    """Normal inputs; matrices scaled so that a product over any of these sizes stays near one."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, declared in signature.inputs.items():
        values = torch.randn([d(sizes) for d in declared.shape], generator=generator)
        drawn[name] = (values * 0.4).to(torch_dtype(declared.dtype))
    return drawn


class Lanes:
    """A fragment: one tensor [M] a lane."""

    def __init__(self, lanes: list[Any]):
        self.lanes = lanes

    def __getitem__(self, lane: int) -> Any:
        return self.lanes[lane]

    def __setitem__(self, lane: int, value: Any) -> None:
        self.lanes[lane] = torch.as_tensor(value, dtype=torch.float32)

    def to(self, dtype: Any) -> Lanes:
        return self


class Same:
    """A vector along M, or a running sum: the same value whatever the column."""

    def __init__(self, value: Any):
        self.value = value

    def __getitem__(self, lane: int) -> Any:
        assert lane % 2 == 0
        return self.value

    def __setitem__(self, lane: int, value: Any) -> None:
        self.value = value


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
    """A register of a vector kernel, which is converted on its way to memory."""

    def to(self, *args: Any) -> Any:  # type: ignore[override]
        return self if args == (Vector.element_type,) else super().to(*args)


def _choose(condition: Any, a: Any, b: Any) -> torch.Tensor:
    a, b = (torch.as_tensor(v, dtype=torch.float32) for v in (a, b))
    return torch.where(torch.as_tensor(condition), a, b)


def _unary(function: Any) -> Any:
    return lambda x, fastmath=False: function(torch.as_tensor(x, dtype=torch.float32))


def _fmax(a: Any, b: Any) -> torch.Tensor:
    return torch.maximum(*(torch.as_tensor(v, dtype=torch.float32) for v in (a, b)))


def _pack(wide: Lanes, dtype: Any, target: Lanes) -> None:
    target.lanes = wide.lanes


PAST_EDGE = 4  # lanes

LANGUAGE: dict[str, Any] = {
    "FusedGemm": object, "arguments": lambda resources: None,
    "Float32": lambda value: torch.as_tensor(value, dtype=torch.float32),
    "cutlass": types.SimpleNamespace(
        range=lambda n, unroll_full: range(n), min=min, BFloat16="bf16", Float16="fp16"
    ),
    "sigmoid": torch.sigmoid, "sigmoid_fast": torch.sigmoid, "tanh": torch.tanh, "tanh_fast": torch.tanh,
    "choose": _choose, "pack": _pack, "unpack": lambda packed, dtype: packed,
    "fragment": lambda like: Lanes([None] * len(like.lanes)),
    "wide_fragment": lambda like: Lanes([None] * (2 * len(like.lanes))),
    "half_fragment": lambda like: Lanes([None] * (len(like.lanes) // 2)),
    "edge": lambda gemm, state: (None, state[1]), "inside": lambda offsets, lane, left: lane < left,
    "BLOCK": 256, "LANES_PER_ROW": 8,
    "sum_partials": lambda partials, row, lane: partials[row].as_subclass(Number),
    **dict.fromkeys(("ColVecLoad", "RowVecLoad", "Scalar", "TileLoad", "TileStore", "RowSum"),
                    lambda name, **flags: (name, flags)),
}  # fmt: skip


class _Machine:
    def __init__(self, program: Program, inputs: Tensors):
        self.program, self.lowered = program, lower(program)
        self.sizes = solve_sizes(program.signature, {k: tuple(t.shape) for k, t in inputs.items()})
        self.memory = {i: inputs[str(n.attribute)] for i, n in enumerate(program.nodes) if n.op == "input"}
        self.partials: dict[int, torch.Tensor] = {}
        self.thread = 0
        functions = {
            f.__name__: _unary(f) for f in (torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.tanh)
        }
        arch = types.SimpleNamespace(
            fmax=_fmax, block_idx=lambda: (0, 0, 0), thread_idx=lambda: (self.thread, 0, 0)
        )
        cute = types.SimpleNamespace(
            jit=lambda f: f, kernel=lambda f: f, size=lambda lanes: len(lanes.lanes), arch=arch,
            math=types.SimpleNamespace(**functions),
        )  # fmt: skip
        self.module: dict[str, Any] = LANGUAGE | {"cute": cute}
        body = self.lowered.text[self.lowered.text.index("\nclass ") :]
        exec(compile(body, "<lowered>", "exec"), self.module)

    def scalar(self, argument: Argument) -> torch.Tensor:
        extent = Dim.parse(str(self.program.nodes[argument.node].attribute))(self.sizes)
        return torch.tensor(float(extent))

    def lanes(self, argument: Argument, columns: int) -> Lanes:
        tile = self.memory[argument.node].float()
        assert str(self.memory[argument.node].dtype) == str(torch_dtype(argument.dtype))
        past = tile.shape[1] * PAST_EDGE // columns
        return Lanes([*tile.unbind(1), *torch.zeros(past, tile.shape[0])])

    def gemm(self, kernel: GemmKernel) -> None:
        a, b = (self.memory[i].float() for i in (kernel.a, kernel.b))
        product = (a.mT if kernel.a_transposed else a) @ (b.mT if kernel.b_transposed else b)
        columns = product.shape[1]
        accumulator = Lanes([*product.unbind(1), *torch.zeros(PAST_EDGE, product.shape[0])])
        made = self.module[kernel.name]()
        masked = {name for name, flags in made._epi_ops if flags.get("masked")}
        resources: dict[str, Any] = {}
        for argument in kernel.arguments:
            name = argument.name
            if argument.role == "load":
                resources[name] = self.lanes(argument, columns)
            elif argument.role == "row":
                resources[name] = Same(self.memory[argument.node].float())
            elif argument.role == "column":
                past = torch.full((PAST_EDGE,), torch.nan)
                resources[name] = Lanes([*self.memory[argument.node].float(), *past])
            elif argument.role == "scalar":
                resources[name] = self.scalar(argument)
            elif argument.role == "partial":
                running = Same(torch.zeros(product.shape[0]))
                resources[name] = (running, columns) if name in masked else running
        operand = self.lanes(kernel.c, columns) if kernel.c else None
        stored = made.epi_visit_subtile(None, resources, accumulator, operand)
        stores = [argument for argument in kernel.arguments if argument.role == "store"]
        for argument, fragment in zip(stores, stored, strict=True):
            self.store(argument, fragment, columns)
        if kernel.d:
            self.store(kernel.d, accumulator, columns)
        for argument in kernel.arguments:
            if argument.role == "partial":
                running = resources[argument.name]
                self.partials[argument.node] = (running[0] if argument.name in masked else running).value

    def store(self, argument: Argument, fragment: Lanes, columns: int) -> None:
        keep = len(fragment.lanes) * columns // (columns + PAST_EDGE)
        tile = torch.stack([torch.as_tensor(lane) for lane in fragment.lanes[:keep]], dim=1)
        self.memory[argument.node] = tile.to(torch_dtype(argument.dtype))

    def vectors(self, kernel: VectorKernel) -> None:
        given: list[Any] = []
        for argument in kernel.arguments:
            if argument.role == "scalar":
                given.append(self.scalar(argument))
            elif argument.role == "partial":
                given.append(self.partials[argument.node])
            elif argument.role == "vector":
                assert str(self.memory[argument.node].dtype) == str(torch_dtype(argument.dtype))
                given.append(Vector(self.memory[argument.node]))
            else:
                given.append(Vector(torch.empty(self.rows(argument.node), dtype=torch_dtype(argument.dtype))))
        for row in range(self.rows(kernel.length) + 3):  # a grid ends past the last row
            self.thread = 8 * row
            self.module[kernel.name]().kernel(*given)
        for argument, vector in zip(kernel.arguments, given, strict=True):
            if argument.role == "out":
                self.memory[argument.node] = vector.values

    def rows(self, node: int) -> int:
        return self.program.types()[node].shape[0](self.sizes)


def kernel_names(lowered: Lowered) -> list[str]:
    return [g.name for g in lowered.gemms] + [v.name for v in lowered.vectors]


def run_lowered(program: Program, inputs: Tensors) -> Tensors:
    """Outputs of the lowered text, by name."""
    machine = _Machine(program, inputs)
    kernels: list[GemmKernel | VectorKernel] = [*machine.lowered.gemms, *machine.lowered.vectors]
    for kernel in sorted(kernels, key=lambda k: (k.step, isinstance(k, VectorKernel))):
        if isinstance(kernel, GemmKernel):
            machine.gemm(kernel)
        else:
            machine.vectors(kernel)
    return {name: machine.memory[index] for name, index in program.outputs.items()}
