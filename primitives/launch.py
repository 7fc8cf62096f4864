"""Launching: Program x CUDA tensors -> CUDA tensors, planned once and then called cheaply.

A ``Plan`` binds a program to sizes and schedules: kernels compiled, one workspace allocated, every
host decision taken; calling it launches. A ``Kernel`` checks its tensors and keeps a plan for their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from primitives.compile import compile_gemm, compile_vector
from primitives.cut import cut
from primitives.dims import Dim
from primitives.interpret import solve_sizes, torch_dtype
from primitives.ir import Program, Schedule, Signature, reduction
from primitives.jit import load_module
from primitives.lower import Argument, GemmKernel, VectorKernel, lower

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16  # bytes: what the bulk tensor copies need of addresses and row strides
GAP = 4096  # bytes around each tensor of a workspace, in which a proof sees what is written astray


class LaunchError(Exception):
    """Tensors or sizes that a program cannot be launched on, found before any kernel runs."""


def alignment_errors(program: Program, sizes: Mapping[str, int]) -> list[str]:
    """Which rows are no multiple of 16 bytes at these sizes, in words; empty if all are."""
    signature, types = program.signature, program.types()
    tensors = {name: (t.shape, t.dtype) for name, t in {**signature.inputs, **signature.outputs}.items()}
    for index, dtype in cut(program).dtypes.items():
        if types[index].kind == "tile" and index not in program.outputs.values():
            tensors[f"the tile that node {index} hands on"] = (types[index].shape, dtype)
    for name, index in program.outputs.items():
        if types[index].kind == "head":  # threads store statistics themselves, one by one
            del tensors[name]
    found = []
    for name, (shape, dtype) in tensors.items():
        if len(shape) == 2:
            extent = shape[1](sizes)
            if extent * torch_dtype(dtype).itemsize % ALIGNMENT:
                found.append(f"{name}: rows of {extent} {dtype} are no multiple of {ALIGNMENT} bytes")
    return found


def check_inputs(program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sizes of inputs that can be launched on; LaunchError naming what is wrong otherwise."""
    sizes = check_tensors(program.signature, inputs)
    check_sizes(program, sizes)
    return sizes


def check_sizes(program: Program, sizes: Mapping[str, int]) -> None:
    """LaunchError for sizes at which a tensor is empty or has rows that do not align."""
    errors = [*empty(program.signature, sizes), *alignment_errors(program, sizes)]
    if errors:
        raise LaunchError("; ".join(errors))


def check_tensors(signature: Signature, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sizes of tensors that are what the signature says; LaunchError naming what is wrong otherwise.

    A tensor that requires grad is refused while PyTorch records gradients: a kernel is no autograd function,
    so a loss made of its outputs would train nothing, and nobody would be told.
    """
    import torch

    if set(inputs) != set(signature.inputs):
        raise LaunchError(f"inputs must be {', '.join(signature.inputs)}; got {', '.join(inputs)}")
    for name, tensor in inputs.items():
        if not isinstance(tensor, torch.Tensor):
            raise LaunchError(f"input {name!r} must be a tensor; it is of type {type(tensor).__name__}")
    devices = {str(t.device) for t in inputs.values()}
    if len(devices) != 1 or not next(iter(devices)).startswith("cuda"):
        raise LaunchError(f"inputs must be on one CUDA device; they are on {', '.join(sorted(devices))}")
    for name, tensor in inputs.items():
        declared = signature.inputs[name]
        if tensor.dtype != torch_dtype(declared.dtype):
            raise LaunchError(f"input {name!r} is {tensor.dtype}; the spec says {declared.dtype}")
        if tensor.ndim != len(declared.shape):
            raise LaunchError(f"input {name!r} has {tensor.ndim} dims; the spec says {len(declared.shape)}")
        if not tensor.is_contiguous() or tensor.ndim and tensor.data_ptr() % ALIGNMENT:
            raise LaunchError(
                f"input {name!r} must be contiguous and {ALIGNMENT}-byte aligned: call .contiguous()"
            )
        if dense(tensor) is not tensor:
            shape, strides = tuple(tensor.shape), tensor.stride()
            raise LaunchError(
                f"input {name!r} of shape {shape} has strides {strides}, which bulk copies do not take: "
                f"call .flatten().view{shape}"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise LaunchError(
                f"input {name!r} requires grad, and a kernel's outputs carry none: call .detach(), or launch "
                "under torch.no_grad()"
            )
    _check_updates(signature, inputs)
    try:
        return solve_sizes(signature, {k: tuple(t.shape) for k, t in inputs.items()})
    except ValueError as error:
        raise LaunchError(str(error)) from None


def _check_updates(signature: Signature, inputs: Mapping[str, torch.Tensor]) -> None:
    """LaunchError where an input that is written over shares memory with another one. What the program itself
    reads of it, element by element where the output is computed, was checked when it was traced."""
    spans = {n: (t.data_ptr(), t.data_ptr() + t.numel() * t.itemsize) for n, t in inputs.items()}
    for output, written in signature.updates.items():
        start, end = spans[written]
        for other, (first, last) in spans.items():
            if other != written and first < end and start < last:
                raise LaunchError(
                    f"output {output!r} is written over input {written!r}, with which input {other!r} shares "
                    f"memory: give {other!r} a tensor of its own, with .clone()"
                )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements with the strides of a fresh tensor, no copy; most tensors come back as they are.
    PyTorch calls one row contiguous whatever its stride, which bulk copies want to be a multiple of 16 bytes.
    """
    if 1 not in tensor.shape or not tensor.is_contiguous():
        return tensor
    strides = tuple(prod(max(1, n) for n in tensor.shape[axis + 1 :]) for axis in range(tensor.ndim))
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)


def empty(signature: Signature, sizes: Mapping[str, int]) -> list[str]:
    """Which inputs and outputs would have no elements at these sizes, in words: a shape may subtract."""
    found = []
    for name, tensor in {**signature.inputs, **signature.outputs}.items():
        extents = [d(sizes) for d in tensor.shape]
        if min(extents, default=1) < 1:
            found.append(f"{name} would be {extents} at {dict(sizes)}: every extent is at least 1")
    return found


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


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _listed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(1)


def _picker(slots: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """itemgetter that gives a tuple for one item too."""
    if len(slots) > 1:
        return itemgetter(*slots)
    (only,) = slots
    return lambda values: (values[only],)


Launch = Callable[[Sequence[Any]], None]
Part = tuple[Literal["gemm", "vector"], int]  # of a program: a step's GEMM, or the vectors final after it


class Plan:
    """A program bound to sizes, schedules and a device.

    ``plan(inputs)`` returns fresh outputs; ``plan.run(inputs, outputs)`` writes into given ones with
    no allocation and no decision. Tensors must have the shapes, dtypes and device of the plan.
    One stream at a time: the workspace (bytes; made where none, or too small a one, is given) is shared
    between calls. ``raw``: an edited text to compile in place of the program's own, in a confined child.
    ``parts``: what is launched, in order; ``gaps``: bytes of the workspace in which nothing lies.
    """

    def __init__(
        self,
        program: Program,
        sizes: Mapping[str, int],
        schedules: Mapping[int, Schedule],
        device: torch.device | str = "cuda",
        workspace: torch.Tensor | None = None,
        raw: str = "",
    ):
        import torch

        self.program, self.sizes, self.device = program, dict(sizes), torch.device(device)
        self.lowered = lower(program, raw)
        self.schedules = {g.step: schedules[g.step] for g in self.lowered.gemms}
        self._steps = cut(program)
        self._names = {i: str(n.attribute) for i, n in enumerate(program.nodes) if n.op == "input"}
        self._names |= {index: name for name, index in program.outputs.items()}
        self._inputs, self._outputs = tuple(program.signature.inputs), tuple(program.signature.outputs)
        self._slots = _Slots([*self._inputs, *self._outputs])
        kernels: list[GemmKernel | VectorKernel] = [*self.lowered.gemms, *self.lowered.vectors]
        scalars = {(a.role, a.node) for k in kernels for a in k.arguments if a.role in ("scalar", "extent")}
        fixed = {key: self._scalar(*key) for key in sorted(scalars)} | self._allocate(workspace)
        for key, value in fixed.items():
            self._slots.fix(key, value)
        kernels.sort(key=lambda k: (k.step, isinstance(k, VectorKernel)))
        self._launches: list[tuple[Part, Launch]] = [
            (("gemm", k.step), self._gemm(k))
            if isinstance(k, GemmKernel)
            else (("vector", k.step), self._vector(k))
            for k in kernels
        ]
        self.parts = list(dict.fromkeys(part for part, _ in self._launches))
        added = {self._names[k.adds] for k in self.lowered.gemms if k.adds is not None}
        self._added = [(o, name) for o, name in program.signature.updates.items() if name in added]

    def _shape(self, index: int) -> list[int]:
        return [d(self.sizes) for d in self._steps.types[index].shape]

    def _partials(self, gemm: GemmKernel, reduced: int) -> list[int]:
        """[1, M, tiles along N] of a reduction along rows, [1, tiles along M, N] of one along columns."""
        rows, columns = self._shape(self._steps.gemms[gemm.step].gemm)
        schedule, how = self.schedules[gemm.step], reduction(self.program.nodes[reduced])
        if how is not None and how.axis == "column":
            return [1, -(-rows // schedule.tile_m), columns]
        return [1, rows, -(-columns // schedule.tile_n)]

    def _allocate(self, workspace: torch.Tensor | None) -> dict[Hashable, torch.Tensor]:
        """What lives between kernels, in one buffer: tiles and vectors that are no outputs, and partials
        sized by the chosen tiles."""
        import torch

        wanted: dict[Hashable, tuple[list[int], str]] = {}
        for gemm in self.lowered.gemms:
            for a in (*gemm.arguments, gemm.d):
                if a is not None and a.role == "partial" and not a.picks:
                    wanted["partial", a.node, a.part] = (self._partials(gemm, a.node), "fp32")
                elif a is not None and a.role == "store" and a.node not in self._names:
                    wanted["value", a.node] = (self._shape(a.node), self._steps.dtypes[a.node])
        for vector in self.lowered.vectors:
            for a in vector.arguments:
                if a.role == "out" and a.node not in self._names:
                    wanted["value", a.node] = (self._shape(a.node), a.dtype)
        sizes = {
            key: torch.Size(shape).numel() * torch_dtype(dtype).itemsize
            for key, (shape, dtype) in wanted.items()
        }
        total = GAP + sum(-(-n // 256) * 256 + GAP for n in sizes.values())
        if workspace is None or workspace.numel() < total:
            workspace = torch.empty(total, dtype=torch.uint8, device=self.device)
        self.workspace = workspace
        # Selections start and are left at -inf (the finishing kernel sees to it): no other plan's bytes.
        selected = {("partial", a.node, a.part) for g in self.lowered.gemms for a in g.arguments if a.picks}
        tensors: dict[Hashable, torch.Tensor] = {
            key: torch.full(self._shape(key[1]), -torch.inf, device=self.device) for key in sorted(selected)
        }
        offset, end = GAP, 0
        self.gaps: list[torch.Tensor] = []
        for key, (shape, dtype) in wanted.items():
            self.gaps.append(workspace[end:offset])
            end = offset + sizes[key]
            tensors[key] = workspace[offset:end].view(torch_dtype(dtype)).view(shape)
            offset += -(-sizes[key] // 256) * 256 + GAP
        self.gaps.append(workspace[end:])
        return tensors

    def _scalar(self, role: str, node: int) -> Any:
        """The size that a node names, or for an ``extent`` how many columns it has."""
        from cutlass import Float32

        named = role == "scalar"
        size = (
            Dim.parse(str(self.program.nodes[node].attribute)) if named else self._steps.types[node].shape[1]
        )
        return Float32(float(size(self.sizes)))

    def _value(self, node: int) -> int:
        return self._slots.at(self._names.get(node) or ("value", node))

    def _slot(self, argument: Argument | None, pointer: Callable[[torch.Tensor], Any] = _address) -> int:
        """Where a launch finds an argument; ``pointer``: as what a number in memory crosses."""
        if argument is None or argument.role == "head":  # which is a number in the compiled kernel
            return self._slots.nothing
        if argument.role in ("scalar", "extent"):
            return self._slots.at((argument.role, argument.node))
        if argument.role == "partial":
            return self._slots.at(("partial", argument.node, argument.part))
        slot = self._value(argument.node)
        if argument.role == "pointer":
            return self._slots.derive(slot, pointer)
        return self._slots.derive(slot, _packed) if argument.packed else slot

    def _gemm(self, kernel: GemmKernel) -> Launch:
        from quack.cute_dsl_utils import get_max_active_clusters
        from quack.gemm_tvm_ffi_utils import make_scheduler_args, make_varlen_args

        schedule = self.schedules[kernel.step]
        if not kernel.admits(schedule, self.sizes):
            raise LaunchError(
                f"step {kernel.step}: a tile of {schedule.tile_n} columns does not hold "
                f"{kernel.wants(self.sizes)}"
            )
        compiled = compile_gemm(self.lowered, kernel, schedule, self.sizes)
        made = self._epilogue_arguments(kernel.step)
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

    def _epilogue_arguments(self, step: int) -> Any:
        """The class of a step's epilogue arguments: an edited text's are those of the program's own."""
        lowered = lower(self.program) if self.lowered.raw else self.lowered
        name = next(g.name for g in lowered.gemms if g.step == step)
        return getattr(load_module(lowered), name).EpilogueArguments

    def _vector(self, kernel: VectorKernel) -> Launch:
        compiled = compile_vector(self.lowered, kernel)
        arguments = _picker([self._slot(a, _listed) for a in kernel.arguments])
        return lambda slots: compiled(*arguments(slots))

    def outputs(self) -> dict[str, torch.Tensor]:
        """Fresh, uninitialised outputs; those that update an input among them, too."""
        import torch

        return {
            name: torch.empty(
                [d(self.sizes) for d in t.shape], dtype=torch_dtype(t.dtype), device=self.device
            )
            for name, t in self.program.signature.outputs.items()
        }

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Launch on the current stream. The caller vouches for shapes, dtypes and device. An output that
        updates an input may be that input's tensor: it is then written over."""
        slots = self._fill(inputs, outputs)
        for _, launch in self._launches:
            launch(slots)

    def run_step(
        self, step: int, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        """One GEMM and the vectors that are final after it, on what ``run`` left for it."""
        self.run_parts((("gemm", step), ("vector", step)), inputs, outputs)

    def run_parts(
        self,
        wanted: Sequence[Part],
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> None:
        """Some of ``parts``, in their order, on what ``run`` left for them."""
        slots = self._fill(inputs, outputs)
        for part, launch in self._launches:
            if part in wanted:
                launch(slots)

    def _fill(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> Sequence[Any]:
        for output, name in self._added:
            if outputs[output] is not inputs[name]:  # a sum is added to what is there
                outputs[output].copy_(inputs[name])
        slots: list[Any] = [inputs[name] for name in self._inputs]
        slots += [outputs[name] for name in self._outputs]
        slots += self._slots.fixed
        for source, change in self._slots.derived:
            slots.append(change(slots[source]))
        return slots

    def in_place(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Outputs as a caller wants them: fresh ones, but for those that are written over an input."""
        updated = {output: inputs[name] for output, name in self.program.signature.updates.items()}
        return {**self.outputs(), **updated}

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs = self.outputs()
        self.run(inputs, outputs)
        return outputs


class Kernel:
    """A program as a function of CUDA tensors: ``Kernel.load("NAME.program.json")(x=x, w=w, ...)``.

    It launches on the tensors' device, on that one's current stream. The first call with new shapes plans
    and tunes (seconds to minutes, kept on disk); later ones launch.
    ``schedules`` by step replace tuning; with ``known`` ones it only races those. ``raw``: as for ``Plan``.
    """

    def __init__(
        self,
        program: Program,
        schedules: Mapping[int, Schedule] | None = None,
        known: Mapping[int, Sequence[Schedule]] | None = None,
        raw: str = "",
    ):
        self.program, self.known, self.raw = program, known, raw
        self.schedules = {**(schedules or {}), **program.schedule}
        self._plans: dict[tuple[Any, ...], Plan] = {}

    @classmethod
    def load(
        cls, path: str | Path, schedules: Mapping[int, Schedule] | None = None, raw: str | Path | None = None
    ) -> Kernel:
        """Read a NAME.program.json; ``raw``: and a NAME.raw.py, which is compiled in confinement and runs in
        place of the program's own text. Raises OSError, or ProgramError for what is no program."""
        text, edited = (Path(p).read_text(encoding="utf-8") if p else "" for p in (path, raw))
        return cls(Program.from_json(text), schedules, raw=edited)

    def plan(self, inputs: Mapping[str, torch.Tensor]) -> Plan:
        """The plan for tensors like these. LaunchError for inputs that cannot be launched on."""
        from primitives.tune import tuned

        sizes = check_tensors(self.program.signature, inputs)
        device = next(iter(inputs.values())).device
        key = (device, *sorted(sizes.items()))
        if key not in self._plans:
            check_sizes(self.program, sizes)  # of a plan's sizes this is known
            steps = {n for n, _ in enumerate(cut(self.program).gemms)}
            schedules = self.schedules
            with _current(device):
                if not steps <= schedules.keys():
                    schedules = {**tuned(self.program, inputs, sizes, self.known, self.raw), **schedules}
                self._plans[key] = Plan(self.program, sizes, schedules, device, raw=self.raw)
        return self._plans[key]

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Outputs by name; one that updates an input is that input's tensor, written over. LaunchError for
        inputs that cannot be launched on."""
        import torch

        taken = {name: dense(t) if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}
        plan = self.plan(taken)
        outputs = plan.in_place(taken)
        with _current(plan.device):
            plan.run(taken, outputs)
        return outputs | {output: inputs[name] for output, name in self.program.signature.updates.items()}


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Within, ``device`` is PyTorch's current one: a kernel goes to that one's stream, wherever its tensors
    lie."""
    import torch

    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
