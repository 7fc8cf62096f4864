"""Launching: Program x CUDA tensors -> CUDA tensors, planned once and then called cheaply.

A ``Plan`` binds a program to sizes and schedules: kernels compiled, one workspace allocated, every
host decision taken; calling it launches. A ``Kernel`` checks its tensors and keeps a plan for their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
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
    signature, types = program.signature, program.types()
    tensors = {name: (t.shape, t.dtype) for name, t in {**signature.inputs, **signature.outputs}.items()}
    for index, dtype in store_dtypes(program).items():
        if types[index].kind == "tile" and index not in program.outputs.values():
            tensors[f"the tile that node {index} hands on"] = (types[index].shape, dtype)
    found = []
    for name, (shape, dtype) in tensors.items():
        if len(shape) == 2:
            extent = shape[1](sizes)
            if extent * torch_dtype(dtype).itemsize % ALIGNMENT:
                found.append(f"{name}: rows of {extent} {dtype} are no multiple of {ALIGNMENT} bytes")
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
    return sizes


class _Slots:
    """The tensors and numbers that launches pick from, by position: a call's inputs and outputs, then
    what is fixed once, then what derives from the former."""

    def __init__(self, names: Sequence[str]):
        self._index: dict[Hashable, int] = {name: i for i, name in enumerate(names)}
        self.fixed: list[Any] = []
        self.derived: list[tuple[int, Callable[[Any], Any]]] = []
        self._given = len(names)
        self.nothing = self.fix(None, None)

    def fix(self, key: Hashable, value: Any) -> int:
        """The slot of something that no call changes. All of these come before any derived one."""
        self._index[key] = self._given + len(self.fixed)
        self.fixed.append(value)
        return self._index[key]

    def at(self, key: Hashable) -> int:
        """The slot of what was named or fixed before."""
        return self._index[key]

    def derive(self, source: int, change: Callable[[Any], Any]) -> int:
        """The slot of a view that each call takes of another slot."""
        if (source, change) not in self._index:
            self._index[source, change] = self._given + len(self.fixed) + len(self.derived)
            self.derived.append((source, change))
        return self._index[source, change]


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view(torch.float32)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT


def _picker(slots: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """itemgetter that gives a tuple for one item too."""
    if len(slots) > 1:
        return itemgetter(*slots)
    (only,) = slots
    return lambda values: (values[only],)


Launch = Callable[[Sequence[Any]], None]


class Plan:
    """A program bound to sizes, schedules and a device.

    ``plan(inputs)`` returns fresh outputs; ``plan.run(inputs, outputs)`` writes into given ones with
    no allocation and no decision. Tensors must have the shapes, dtypes and device of the plan.
    One stream at a time: the workspace (bytes; made where none, or too small a one, is given) is shared
    between calls.
    """

    def __init__(
        self,
        program: Program,
        sizes: Mapping[str, int],
        schedules: Mapping[int, Schedule],
        device: torch.device | str = "cuda",
        workspace: torch.Tensor | None = None,
    ):
        import torch

        self.program, self.sizes, self.device = program, dict(sizes), torch.device(device)
        self.lowered = lower(program)
        self.schedules = {g.step: schedules[g.step] for g in self.lowered.gemms}
        self._steps = cut(program)
        self._names = {i: str(n.attribute) for i, n in enumerate(program.nodes) if n.op == "input"}
        self._names |= {index: name for name, index in program.outputs.items()}
        self._inputs, self._outputs = tuple(program.signature.inputs), tuple(program.signature.outputs)
        self._slots = _Slots([*self._inputs, *self._outputs])
        kernels: list[GemmKernel | VectorKernel] = [*self.lowered.gemms, *self.lowered.vectors]
        scalars = {a.node for k in kernels for a in k.arguments if a.role == "scalar"}
        fixed = {("scalar", node): self._scalar(node) for node in sorted(scalars)} | self._allocate(workspace)
        for key, value in fixed.items():
            self._slots.fix(key, value)
        kernels.sort(key=lambda k: (k.step, isinstance(k, VectorKernel)))
        self._launches: list[Launch] = [
            self._gemm(k) if isinstance(k, GemmKernel) else self._vector(k) for k in kernels
        ]

    def _shape(self, index: int) -> list[int]:
        return [d(self.sizes) for d in self._steps.types[index].shape]

    def _allocate(self, workspace: torch.Tensor | None) -> dict[tuple[str, int], torch.Tensor]:
        """What lives between kernels, in one buffer: tiles and vectors that are no outputs, and partials
        sized by the chosen tiles."""
        import torch

        stored = store_dtypes(self.program)
        wanted: dict[tuple[str, int], tuple[list[int], str]] = {}
        for gemm in self.lowered.gemms:
            columns = self._shape(self._steps.gemms[gemm.step].gemm)[1]
            tiles = -(-columns // self.schedules[gemm.step].tile_n)
            for a in (*gemm.arguments, gemm.d):
                if a is not None and a.role == "partial":
                    wanted["partial", a.node] = ([1, *self._shape(a.node), tiles], "fp32")
                elif a is not None and a.role == "store" and a.node not in self._names:
                    wanted["value", a.node] = (self._shape(a.node), stored[a.node])
        for vector in self.lowered.vectors:
            for a in vector.arguments:
                if a.role == "out" and a.node not in self._names:
                    wanted["value", a.node] = (self._shape(a.node), a.dtype)
        sizes = {
            key: torch.Size(shape).numel() * torch_dtype(dtype).itemsize
            for key, (shape, dtype) in wanted.items()
        }
        total = sum(-(-n // 256) * 256 for n in sizes.values())
        if workspace is None or workspace.numel() < total:
            workspace = torch.empty(total, dtype=torch.uint8, device=self.device)
        self.workspace = workspace
        tensors, offset = {}, 0
        for key, (shape, dtype) in wanted.items():
            tensors[key] = workspace[offset : offset + sizes[key]].view(torch_dtype(dtype)).view(shape)
            offset += -(-sizes[key] // 256) * 256
        return tensors

    def _scalar(self, node: int) -> Any:
        from cutlass import Float32

        return Float32(float(Dim.parse(str(self.program.nodes[node].attribute))(self.sizes)))

    def _value(self, node: int) -> int:
        return self._slots.at(self._names.get(node) or ("value", node))

    def _slot(self, argument: Argument | None) -> int:
        """Where a launch finds an argument."""
        if argument is None:
            return self._slots.nothing
        if argument.role in ("partial", "scalar"):
            return self._slots.at((argument.role, argument.node))
        slot = self._value(argument.node)
        return self._slots.derive(slot, _packed) if argument.packed else slot

    def _gemm(self, kernel: GemmKernel) -> Launch:
        from quack.cute_dsl_utils import get_max_active_clusters
        from quack.gemm_tvm_ffi_utils import make_scheduler_args, make_varlen_args

        schedule = self.schedules[kernel.step]
        compiled = compile_gemm(self.lowered, kernel, schedule)
        made = getattr(load_module(self.lowered), kernel.name).EpilogueArguments
        own = {a.name: self._slot(a) for a in kernel.arguments}
        epilogue = _picker([own.get(field, self._slots.nothing) for field in made._fields])
        make = made._make
        a = self._value(kernel.a)
        a = self._slots.derive(a, _transposed) if kernel.a_transposed else a
        operands = _picker([a, self._value(kernel.b), self._slot(kernel.d), self._slot(kernel.c)])
        clusters = get_max_active_clusters(schedule.cluster_m * schedule.cluster_n)
        scheduler = make_scheduler_args(clusters, schedule.swizzle, None)
        varlen = make_varlen_args(None, None, None)

        def launch(slots: Sequence[Any]) -> None:
            compiled(*operands(slots), make(epilogue(slots)), scheduler, varlen, None, None)

        return launch

    def _vector(self, kernel: VectorKernel) -> Launch:
        compiled = compile_vector(self.lowered, kernel)
        arguments = _picker([self._slot(a) for a in kernel.arguments])
        return lambda slots: compiled(*arguments(slots))

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
        slots: list[Any] = [inputs[name] for name in self._inputs]
        slots += [outputs[name] for name in self._outputs]
        slots += self._slots.fixed
        for source, change in self._slots.derived:
            slots.append(change(slots[source]))
        for launch in self._launches:
            launch(slots)

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
