"""Launching: Program x CUDA tensors -> CUDA tensors, planned once and then called cheaply.

A ``Plan`` binds a program to sizes and schedules: kernels compiled, one workspace allocated, every
host decision taken. Calling it checks shapes once a metadata class and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primitives.compile import compile_gemm, compile_vector, load_module
from primitives.cut import cut
from primitives.dims import Dim
from primitives.interpret import solve_sizes, store_dtypes, torch_dtype
from primitives.ir import Program, Schedule
from primitives.lower import Argument, GemmKernel, VectorKernel, lower

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16  # bytes: what the bulk tensor copies need of addresses and row strides


class LaunchError(Exception):
    """Tensors or sizes that a program cannot be launched on, found before any kernel runs."""


def alignment_errors(program: Program, sizes: Mapping[str, int]) -> list[str]:
    """Which rows are no multiple of 16 bytes at these sizes, in words; empty if all are."""
    signature = program.signature
    width = {"bf16": 2, "fp16": 2, "fp32": 4}
    found = []
    for name, tensor in {**signature.inputs, **signature.outputs}.items():
        if len(tensor.shape) == 2:
            extent = tensor.shape[1](sizes)
            if extent * width[tensor.dtype] % ALIGNMENT:
                found.append(f"{name}: rows of {extent} {tensor.dtype} are no multiple of {ALIGNMENT} bytes")
    return found


def check_inputs(program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sizes of inputs that can be launched on; LaunchError naming what is wrong otherwise."""
    signature = program.signature
    if set(inputs) != set(signature.inputs):
        raise LaunchError(f"inputs must be {', '.join(signature.inputs)}; got {', '.join(inputs)}")
    devices = {str(t.device) for t in inputs.values()}
    if len(devices) != 1 or not next(iter(devices)).startswith("cuda"):
        raise LaunchError(f"inputs must be on one CUDA device; they are on {', '.join(sorted(devices))}")
    for name, tensor in inputs.items():
        declared = signature.inputs[name]
        if tensor.dtype != torch_dtype(declared.dtype):
            raise LaunchError(f"input {name!r} is {tensor.dtype}; the spec says {declared.dtype}")
        if tensor.ndim != len(declared.shape):
            raise LaunchError(f"input {name!r} has {tensor.ndim} dims; the spec says {len(declared.shape)}")
        if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
            raise LaunchError(
                f"input {name!r} must be contiguous and {ALIGNMENT}-byte aligned: call .contiguous()"
            )
    try:
        sizes = solve_sizes(signature, {k: tuple(t.shape) for k, t in inputs.items()})
    except ValueError as error:
        raise LaunchError(str(error)) from None
    errors = alignment_errors(program, sizes)
    if errors:
        raise LaunchError("; ".join(errors))
    if any(v <= 0 for v in sizes.values()):
        raise LaunchError(f"every dim must be positive; got {sizes}")
    return sizes


@dataclass(frozen=True)
class _Workspace:
    """Where each node that is no input lives inside the plan's one buffer, or that it is an output."""

    tensors: dict[int, torch.Tensor]
    bytes: int


Reader = Callable[[dict[int, Any]], Any]


def _fixed(value: Any) -> Reader:
    """A reader that needs nothing of the call."""
    return lambda tensors: value


class Plan:
    """A program bound to sizes, schedules and a device.

    ``plan(inputs)`` returns fresh outputs; ``plan.run(inputs, outputs)`` writes into given ones with
    no allocation and no decision. Tensors must have the shapes, dtypes and device of the plan.
    One stream at a time: the workspace is shared between calls.
    """

    def __init__(
        self,
        program: Program,
        sizes: Mapping[str, int],
        schedules: Mapping[int, Schedule],
        device: torch.device | str = "cuda",
    ):
        import torch

        self.program, self.sizes, self.device = program, dict(sizes), torch.device(device)
        self.lowered = lower(program)
        self.schedules = {g.step: schedules[g.step] for g in self.lowered.gemms}
        self.types = cut(program).types
        self.names = {index: name for name, index in program.outputs.items()}
        self.workspace = self._allocate()
        calls: list[tuple[float, Callable[[dict[int, Any]], None]]] = []
        for gemm in self.lowered.gemms:
            calls.append((gemm.step, self._gemm_call(gemm)))
        for vector in self.lowered.vectors:
            calls.append((vector.step + 0.5, self._vector_call(vector)))
        self.calls = [call for _, call in sorted(calls, key=lambda c: c[0])]
        self.inputs = {i: str(n.attribute) for i, n in enumerate(program.nodes) if n.op == "input"}

    def _shape(self, index: int) -> list[int]:
        return [d(self.sizes) for d in self.types[index].shape]

    def _allocate(self) -> _Workspace:
        """Partials sized by the chosen tiles, tiles and vectors between steps: one buffer."""
        import torch

        stored = store_dtypes(self.program)
        wanted: dict[int, tuple[list[int], str]] = {}
        for gemm in self.lowered.gemms:
            tile_n = self.schedules[gemm.step].tile_n
            columns = self._shape(cut(self.program).gemms[gemm.step].gemm)[1]
            for a in (*gemm.arguments, gemm.d):
                if a is None:
                    continue
                if a.role == "partial":
                    wanted[a.node] = ([1, *self._shape(a.node), -(-columns // tile_n)], "fp32")
                elif a.role == "store" and a.node not in self.names:
                    wanted[a.node] = (self._shape(a.node), stored[a.node])
        # A vector may be both a partial and, summed, a value of its own: the latter gets a negative key.
        for vector in self.lowered.vectors:
            for a in vector.arguments:
                if a.role == "out" and a.node not in self.names:
                    wanted[~a.node] = (self._shape(a.node), "fp32")
        offsets, total = {}, 0
        for key, (shape, dtype) in wanted.items():
            offsets[key] = total
            size = torch_dtype(dtype).itemsize
            for extent in shape:
                size *= extent
            total += -(-size // 256) * 256
        buffer = torch.empty(total, dtype=torch.uint8, device=self.device)
        tensors = {}
        for key, (shape, dtype) in wanted.items():
            count = torch.Size(shape).numel() * torch_dtype(dtype).itemsize
            view = buffer[offsets[key] : offsets[key] + count].view(torch_dtype(dtype))
            tensors[key] = view.view(shape)
        return _Workspace(tensors, total)

    def _reader(self, argument: Argument) -> Reader:
        """How a call finds an argument's tensor among its own: decided once."""
        import torch

        node, own = argument.node, self.workspace.tensors
        if argument.role == "scalar":
            value = float(Dim.parse(str(self.program.nodes[node].attribute))(self.sizes))
            return _fixed(value)
        if argument.role == "partial":
            return _fixed(own[node])
        key = ~node if argument.role in ("row", "column", "vector", "out") else node
        if key in own:
            return _fixed(own[key].view(torch.float32) if argument.packed else own[key])
        if argument.packed:
            return lambda tensors: tensors[node].view(torch.float32)
        return lambda tensors: tensors[node]

    def _gemm_call(self, kernel: GemmKernel) -> Callable[[dict[int, Any]], None]:
        from quack.cute_dsl_utils import get_max_active_clusters
        from quack.gemm_tvm_ffi_utils import make_scheduler_args, make_varlen_args

        schedule = self.schedules[kernel.step]
        compiled = compile_gemm(self.lowered, kernel, schedule)
        made = getattr(load_module(self.lowered), kernel.name).EpilogueArguments
        readers = {a.name: self._reader(a) for a in kernel.arguments}
        order = [readers.get(field) for field in made._fields]
        clusters = get_max_active_clusters(schedule.cluster_m * schedule.cluster_n)
        scheduler = make_scheduler_args(clusters, schedule.swizzle, None)
        varlen = make_varlen_args(None, None, None)
        read_a, read_b = (self._operand(i) for i in (kernel.a, kernel.b))
        read_c = self._reader(kernel.c) if kernel.c else None
        read_d = self._reader(kernel.d) if kernel.d else None
        scalars = {a.name for a in kernel.arguments if a.role == "scalar"}
        if scalars:
            order = [
                self._immediate(r) if f in scalars and r else r
                for f, r in zip(made._fields, order, strict=True)
            ]

        def call(tensors: dict[int, Any]) -> None:
            a = read_a(tensors)
            compiled(
                a.mT if kernel.a_transposed else a,
                read_b(tensors),
                read_d(tensors) if read_d else None,
                read_c(tensors) if read_c else None,
                made._make([r(tensors) if r else None for r in order]),
                scheduler,
                varlen,
                None,
                None,
            )

        return call

    @staticmethod
    def _immediate(read: Reader) -> Reader:
        from cutlass import Float32

        return _fixed(Float32(read({})))

    def _operand(self, node: int) -> Reader:
        own = self.workspace.tensors
        return _fixed(own[node]) if node in own else lambda tensors: tensors[node]

    def _vector_call(self, kernel: VectorKernel) -> Callable[[dict[int, Any]], None]:
        compiled = compile_vector(self.lowered, kernel)
        readers = [self._reader(a) for a in kernel.arguments]

        def call(tensors: dict[int, Any]) -> None:
            compiled(*(read(tensors) for read in readers))

        return call

    def outputs(self) -> dict[str, torch.Tensor]:
        """Fresh, uninitialised outputs."""
        import torch

        return {
            name: torch.empty(
                [d(self.sizes) for d in t.shape], dtype=torch_dtype(t.dtype), device=self.device
            )
            for name, t in self.program.signature.outputs.items()
        }

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Launch on the current stream. The caller vouches for shapes, dtypes and device."""
        tensors: dict[int, Any] = {i: inputs[name] for i, name in self.inputs.items()}
        for index, name in self.names.items():
            tensors[index] = outputs[name]
        for call in self.calls:
            call(tensors)

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs = self.outputs()
        self.run(inputs, outputs)
        return outputs


class Kernel:
    """A program as a function of CUDA tensors: ``Kernel.load("NAME.program.json")(x=x, w=w, ...)``.

    The first call with new shapes plans and tunes (seconds to minutes, kept on disk); later ones launch.
    ``schedules`` by step replace tuning; with ``known`` ones it only races those.
    """

    def __init__(
        self,
        program: Program,
        schedules: Mapping[int, Schedule] | None = None,
        known: Mapping[int, Sequence[Schedule]] | None = None,
    ):
        self.program, self.known = program, known
        self.schedules = {**(schedules or {}), **program.schedule}
        self._plans: dict[tuple[Any, ...], Plan] = {}

    @classmethod
    def load(cls, path: str | Path, schedules: Mapping[int, Schedule] | None = None) -> Kernel:
        """Read a NAME.program.json. Raises OSError, or ProgramError for what is no program."""
        return cls(Program.from_json(Path(path).read_text(encoding="utf-8")), schedules)

    def plan(self, inputs: Mapping[str, torch.Tensor]) -> Plan:
        """The plan for tensors like these. LaunchError for inputs that cannot be launched on."""
        from primitives.tune import tuned

        sizes = check_inputs(self.program, inputs)
        device = next(iter(inputs.values())).device
        key = (device, *sorted(sizes.items()))
        if key not in self._plans:
            steps = {n for n, _ in enumerate(cut(self.program).gemms)}
            schedules = self.schedules
            if not steps <= schedules.keys():
                schedules = {**tuned(self.program, inputs, sizes, self.known), **schedules}
            self._plans[key] = Plan(self.program, sizes, schedules, device)
        return self._plans[key]

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.plan(inputs)(inputs)
