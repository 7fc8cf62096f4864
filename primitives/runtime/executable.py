"""A plan: a program bound to sizes and schedules, with compiled kernels and one workspace.

The host decides everything when it builds the plan, so that calling the plan only launches kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from coda_agent.primitives.compiler.jit import load_module
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import Argument, GemmKernel, VectorKernel, lower
from coda_agent.primitives.compiler.split import share
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.interpret import torch_dtype
from coda_agent.primitives.lang.ir import reduction
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime.compile import compile_gemm, compile_vector
from coda_agent.primitives.runtime.launchable import LaunchError
from coda_agent.primitives.runtime.turns import CudaStreams, Turns

if TYPE_CHECKING:
    import torch

NUMBERS = ("scalar", "extent", "count")  # roles of arguments that are numbers
GAP = 4096  # unused bytes before and after each tensor of a workspace, in which a check finds stray writes


class _Slots:
    """The tensors and numbers that launches use, by position. First come a call's inputs and outputs, then
    fixed values, then views of any of these."""

    def __init__(self, names: Sequence[str]):
        self._index: dict[Hashable, int] = {name: i for i, name in enumerate(names)}
        self.fixed: list[Any] = []
        self.derived: list[tuple[int, Callable[[Any], Any]]] = []
        self._given = len(names)
        self.nothing = self.fix(None, None)

    def fix(self, key: Hashable, value: Any) -> int:
        """Add a value that is the same in all calls; return its slot. All fixed values must be added before
        the first derived one."""
        self._index[key] = self._given + len(self.fixed)
        self.fixed.append(value)
        return self._index[key]

    def at(self, key: Hashable) -> int:
        """The slot of a named or fixed value."""
        return self._index[key]

    def value(self, key: Hashable) -> Any:
        """A fixed value."""
        return self.fixed[self._index[key] - self._given]

    def derive(self, source: int, change: Callable[[Any], Any]) -> int:
        """The slot of a view of another slot. Each call takes the view again, but a view of a fixed slot is
        taken once, here."""
        if (source, change) not in self._index:
            self._index[source, change] = self._given + len(self.fixed) + len(self.derived)
            once = 0 <= source - self._given < len(self.fixed)
            view = _always(change(self.fixed[source - self._given])) if once else change
            self.derived.append((source, view))
        return self._index[source, change]


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view(torch.float32)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _unbatched(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[0]


def _listed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(1)


@dataclass(frozen=True)
class _Span:
    """A range along an axis of a tensor."""

    axis: int
    first: int
    past: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.axis == 0:
            return tensor[self.first : self.past]  # half the host time of narrow
        return tensor.narrow(self.axis, self.first, self.past - self.first)


def _picker(keys: Sequence[int | str]) -> Callable[[Any], tuple[Any, ...]]:
    """Like itemgetter, but it returns a tuple even for one item."""
    if len(keys) > 1:
        return itemgetter(*keys)
    (only,) = keys
    return lambda values: (values[only],)


def _allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """A function that allocates an uninitialised tensor of given size, strides and dtype, on the current
    device of this type. Inductor's generated code calls the same function, which takes half the host time of
    ``torch.empty``."""
    from torch._C._dynamo import guards

    return getattr(guards, f"_empty_strided_{device.type}")  # the type stubs lack this function


Launch = Callable[[Sequence[Any]], None]
# a part of a program: a step's GEMM, or the vector kernels after it
Part = tuple[Literal["gemm", "vector"], int]


class Plan:
    """A kernel with a schedule for each of its steps, bound to sizes and a device.

    ``plan(inputs)`` returns fresh outputs. ``plan.run(inputs, outputs)`` writes into the given outputs and
    allocates nothing. Tensors must have the shapes, dtypes and device of the plan. All calls share the
    workspace, a tensor of bytes. The plan allocates it if the caller gives none, or one that is too small.
    Any threads and streams may call a plan; its calls run one after another on the GPU (``turns``). But
    different plans that share a workspace do not wait for each other. ``parts``: the parts of the program, in
    launch order. ``gaps``: the unused bytes of the workspace.
    """

    def __init__(
        self,
        kernel: KernelSource,
        sizes: Mapping[str, int],
        device: torch.device | str = "cuda",
        workspace: torch.Tensor | None = None,
    ):
        import torch

        program = kernel.program
        self.program, self.sizes, self.device = program, dict(sizes), torch.device(device)
        self.lowered = kernel.lowered
        self.schedules = {g.step: kernel.schedules[g.step] for g in self.lowered.gemms}
        self._steps = cut(program)
        self._names = {i: str(n.attribute) for i, n in enumerate(program.nodes) if n.op == "input"}
        self._names |= {index: name for name, index in program.outputs.items()}
        self._inputs, self._outputs = tuple(program.signature.inputs), tuple(program.signature.outputs)
        self._slots = _Slots([*self._inputs, *self._outputs])
        self._in_order, self._out_order = _picker(self._inputs), _picker(self._outputs)
        self._empty = _allocator(self.device)
        self._like: dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {}
        self._updates = tuple(program.signature.updates.items())
        for name, t in program.signature.outputs.items():
            like = torch.empty([d(self.sizes) for d in t.shape], dtype=torch_dtype(t.dtype), device="meta")
            self._like[name] = tuple(like.shape), like.stride(), like.dtype
        self._fresh = [(n, like) for n, like in self._like.items() if n not in program.signature.updates]
        kernels: list[GemmKernel | VectorKernel] = [*self.lowered.gemms, *self.lowered.vectors]
        scalars = {(a.role, a.node) for k in kernels for a in k.arguments if a.role in NUMBERS}
        fixed = {key: self._scalar(*key) for key in sorted(scalars)} | self._allocate(workspace)
        for key, value in fixed.items():
            self._slots.fix(key, value)
        tensors = [self.workspace, *(v for v in fixed.values() if isinstance(v, torch.Tensor))]
        streams = CudaStreams(self.device) if self.device.type == "cuda" else None
        self._turns = Turns(streams, tensors)
        kernels.sort(key=lambda k: (k.step, isinstance(k, VectorKernel)))
        self._launches: list[tuple[Part, Launch]] = []
        for k in kernels:
            if isinstance(k, GemmKernel):
                self._launches += [(("gemm", k.step), launch) for launch in self._gemm(k)]
            else:
                self._launches.append((("vector", k.step), self._vector(k)))
        self.parts = list(dict.fromkeys(part for part, _ in self._launches))
        added = {self._names[k.adds] for k in self.lowered.gemms if k.adds is not None}
        self._added = [(o, name) for o, name in program.signature.updates.items() if name in added]

    def _shape(self, index: int) -> list[int]:
        return [d(self.sizes) for d in self._steps.types[index].shape]

    def _partials(self, gemm: GemmKernel, reduced: int) -> list[int]:
        """The shape of a reduction's partial results: [1, M, tiles along N] along rows, [1, tiles along M, N]
        along columns."""
        rows, columns = self._shape(self._steps.gemms[gemm.step].gemm)
        schedule = self.schedules[gemm.step]
        if self._along_columns(reduced):
            return [1, -(-rows // schedule.tile_m), columns]
        return [1, rows, -(-columns // schedule.tile_n)]

    def _along_columns(self, reduced: int) -> bool:
        how = reduction(self.program.nodes[reduced])
        return how is not None and how.axis == "column"

    def _allocate(self, workspace: torch.Tensor | None) -> dict[Hashable, torch.Tensor]:
        """Allocate, in one buffer, the tensors that one kernel writes and a later one reads. First come tiles
        and vectors that are not outputs. Partial results of reductions follow, because their number depends
        on the chosen tiles."""
        import torch

        values: dict[Hashable, tuple[list[int], str]] = {}
        partials: dict[Hashable, tuple[list[int], str]] = {}
        for gemm in self.lowered.gemms:
            for a in (*gemm.arguments, gemm.d):
                if a is not None and a.role == "partial" and not a.picks:
                    partials["partial", a.node, a.part] = (self._partials(gemm, a.node), "fp32")
                elif a is not None and a.role == "store" and a.node not in self._names:
                    values["value", a.node] = (self._shape(a.node), self._steps.dtypes[a.node])
        for vector in self.lowered.vectors:
            for a in vector.arguments:
                if a.role == "bounds":
                    values["bounds", a.node] = (self._shape(a.node), a.dtype)
                elif a.role == "out" and a.node not in self._names:
                    values["value", a.node] = (self._shape(a.node), a.dtype)
        # The offsets of ``values`` must not depend on the tiles: plans of one tuning share a buffer, and a
        # plan may run a step on results that another plan left there.
        wanted = values | partials
        sizes = {
            key: torch.Size(shape).numel() * torch_dtype(dtype).itemsize
            for key, (shape, dtype) in wanted.items()
        }
        total = GAP + sum(-(-n // 256) * 256 + GAP for n in sizes.values())
        if workspace is None or workspace.numel() < total:
            workspace = torch.empty(total, dtype=torch.uint8, device=self.device)
        self.workspace = workspace
        # Partial results of a selection must be -inf before each call; the finishing kernel resets them. They
        # have their own buffer, because the shared buffer may contain another plan's bytes.
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
        """The value of a scalar argument: the size that the node names. For the roles ``extent`` and
        ``count``, it is the node's number of columns or of rows."""
        from cutlass import Float32, Int32

        if role == "count":
            return Int32(self._shape(node)[0])
        named = role == "scalar"
        size = (
            Dim.parse(str(self.program.nodes[node].attribute)) if named else self._steps.types[node].shape[1]
        )
        return Float32(float(size(self.sizes)))

    def _value(self, node: int) -> int:
        return self._slots.at(self._names.get(node) or ("value", node))

    def _slot(self, argument: Argument | None, pointer: Callable[[torch.Tensor], Any] = _address) -> int:
        """The slot of an argument. ``pointer`` turns a tensor of one number into the argument that the kernel
        takes."""
        if argument is None or argument.role == "head":  # the head width is a constant of the compiled kernel
            return self._slots.nothing
        if argument.role in NUMBERS:
            return self._slots.at((argument.role, argument.node))
        if argument.role == "partial":
            slot = self._slots.at(("partial", argument.node, argument.part))
            return self._slots.derive(slot, _unbatched) if argument.rank == 2 else slot
        if argument.role == "bounds":
            return self._slots.at(("bounds", argument.node))
        slot = self._value(argument.node)
        if argument.role == "pointer":
            return self._slots.derive(slot, pointer)
        return self._slots.derive(slot, _packed) if argument.packed else slot

    def _gemm(self, kernel: GemmKernel) -> list[Launch]:
        from quack.cute_dsl_utils import get_max_active_clusters

        schedule = self.schedules[kernel.step]
        if not kernel.admits(schedule, self.sizes):
            raise LaunchError(
                f"step {kernel.step}: a tile of {schedule.tile_n} columns does not hold "
                f"{kernel.wants(self.sizes)}"
            )
        clusters = get_max_active_clusters(schedule.cluster_m * schedule.cluster_n)
        if not schedule.split:
            return [self._launch(kernel, schedule, clusters)]
        beside = (get_max_active_clusters(1) - 4 * clusters) // 2
        rows, columns = self._shape(self._steps.gemms[kernel.step].gemm)
        taken = share((rows, columns), schedule, clusters, beside)
        spans = (0, taken, clusters), (taken, rows, beside)
        return [
            self._launch(kernel, each, most, (first, past))
            for each, (first, past, most) in zip(schedule.launches, spans, strict=True)
            if first < past
        ]

    def _launch(
        self, kernel: GemmKernel, schedule: Schedule, clusters: int, rows: tuple[int, int] | None = None
    ) -> Launch:
        """A function that launches a step, or only some of its ``rows``. At most ``clusters`` clusters run at
        a time."""
        from quack.gemm_tvm_ffi_utils import make_scheduler_args, make_varlen_args

        compiled = compile_gemm(self.lowered, kernel, schedule, self.sizes)
        made = self._epilogue_arguments(kernel.step)
        own = {a.name: self._rows(a, schedule, rows) for a in kernel.arguments}
        epilogue = _picker([own.get(field, self._slots.nothing) for field in made._fields])
        make = made._make
        a = self._value(kernel.a)
        a = self._slots.derive(a, _transposed) if kernel.a_transposed else a
        a = self._slots.derive(a, _Span(0, *rows)) if rows else a
        tiles = [self._rows(each, schedule, rows) for each in (kernel.d, kernel.c)]
        b = self._value(kernel.b)
        b = self._slots.derive(b, _transposed) if kernel.own else b  # [N, K], as QuACK takes it
        operands = _picker([a, b, *tiles])
        scheduler = make_scheduler_args(clusters, schedule.swizzle, None)
        varlen = make_varlen_args(None, None, None)
        if kernel.offsets is not None:
            bounds = self._slots.value(("bounds", kernel.offsets))
            varlen = make_varlen_args(*((None, bounds) if kernel.own else (bounds, None)), None)

        def launch(slots: Sequence[Any]) -> None:
            compiled(*operands(slots), make(epilogue(slots)), scheduler, varlen, None, None)

        return launch

    def _rows(self, argument: Argument | None, schedule: Schedule, rows: tuple[int, int] | None) -> int:
        """The slot of an argument; for a launch of only some rows, the slot of that part."""
        slot = self._slot(argument)
        if argument is None or rows is None:
            return slot
        first, past = rows
        match argument.role:
            case "partial" if not argument.picks:
                if self._along_columns(argument.node):
                    first, past = first // schedule.tile_m, -(-past // schedule.tile_m)
                return self._slots.derive(slot, _Span(1, first, past))
            case "load" | "store" | "range" | "table" | "row" | "index" | "partial":
                return self._slots.derive(slot, _Span(0, first, past))
            case "memory" if argument.rank == 2:
                return self._slots.derive(slot, _Span(0, first, past))
        return slot

    def _epilogue_arguments(self, step: int) -> Any:
        """The class of a step's epilogue arguments. Edited code uses the class of the unedited code."""
        lowered = lower(self.program) if self.lowered.edited else self.lowered
        name = next(g.name for g in lowered.gemms if g.step == step)
        return getattr(load_module(lowered), name).EpilogueArguments

    def _vector(self, kernel: VectorKernel) -> Launch:
        compiled = compile_vector(self.lowered, kernel)
        arguments = _picker([self._slot(a, _listed) for a in kernel.arguments])
        return lambda slots: compiled(*arguments(slots))

    def outputs(self) -> dict[str, torch.Tensor]:
        """Fresh, uninitialised tensors for all outputs, including those that update an input."""
        return {name: self._empty(*like) for name, like in self._like.items()}

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Launch on the current stream. The caller guarantees shapes, dtypes and device. An output that
        updates an input may be that input's tensor, and then overwrites it."""
        with self._turns.lock:
            self._turns.take()
            slots = self._fill(inputs, outputs)
            for _, launch in self._launches:
                launch(slots)

    def run_step(
        self, step: int, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        """Launch one step's GEMM and the vector kernels after it, using results of an earlier ``run``."""
        self.run_parts((("gemm", step), ("vector", step)), inputs, outputs)

    def run_parts(
        self,
        wanted: Sequence[Part],
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> None:
        """Launch some of ``parts`` in order, using results of an earlier ``run``."""
        with self._turns.lock:
            self._turns.take()
            slots = self._fill(inputs, outputs)
            for part, launch in self._launches:
                if part in wanted:
                    launch(slots)

    def _fill(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> Sequence[Any]:
        for output, name in self._added:
            if outputs[output] is not inputs[name]:  # the kernel adds to the output's contents
                outputs[output].copy_(inputs[name])
        slots = [*self._in_order(inputs), *self._out_order(outputs), *self._slots.fixed]
        for source, change in self._slots.derived:
            slots.append(change(slots[source]))
        return slots

    def in_place(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs of a call: an output that updates an input is that input's tensor, and the others are
        fresh."""
        outputs = {name: self._empty(*like) for name, like in self._fresh}
        for output, name in self._updates:
            outputs[output] = inputs[name]
        return outputs

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs = self.in_place(inputs)
        self.run(inputs, outputs)
        return outputs
