"""A plan: a program bound to sizes and schedules, with compiled kernels and one workspace.

Building a plan does all work that depends only on sizes and schedules, so that a call only launches kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from coda_agent.primitives.runtime.calls import CallWriter
from coda_agent.primitives.runtime.compile import compile_gemm, compile_vector
from coda_agent.primitives.runtime.launchable import LaunchError
from coda_agent.primitives.runtime.turns import CudaStreams, Turns

if TYPE_CHECKING:
    import torch

NUMBERS = ("scalar", "extent", "count")  # roles of arguments that are numbers
GAP = 4096  # unused bytes before and after each tensor of a workspace; a check finds stray writes there
HERE = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which ``device`` is PyTorch's current device. A kernel that is launched in this context
    runs on the current stream of ``device``."""
    import torch

    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(device)


def _on_its_device(device: torch.device, call: Callable[..., Any]) -> Callable[..., Any]:
    def switched(*inputs: torch.Tensor) -> Any:
        with on_device(device):
            return call(*inputs)

    return switched


def picker(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """An itemgetter that returns a tuple even for a single key."""
    return itemgetter(*keys) if len(keys) > 1 else lambda values: (values[keys[0]],)


def _allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return a function (size, strides, dtype) that allocates an uninitialised tensor. The tensor is on the
    current device of the same type as ``device``. The function takes half the host time of ``torch.empty``.
    Inductor's generated code also calls this function."""
    from torch._C._dynamo import guards

    return getattr(guards, f"_empty_strided_{device.type}")  # the type stubs lack this function


# a part of a program: the GEMM of a step, or the vector kernels after a step
Part = tuple[Literal["gemm", "vector"], int]


class Plan:
    """A compiled kernel with a schedule for each of its steps, for one device and one set of sizes.

    ``plan.call(*inputs)`` takes inputs in the signature's order, allocates outputs, and returns them by name.
    An output that updates an input is stored in that input's tensor. ``plan.run(inputs, outputs)`` writes
    into the given outputs. ``call`` and ``run`` launch on the current stream. Tensors must have the shapes,
    dtypes and device of the plan.

    All calls share the workspace, a tensor of bytes. If the caller gives no workspace, or a workspace that is
    too small, the plan allocates one. Several threads and streams may call one plan, because ``Turns`` makes
    the plan's calls run one after another on the GPU. Calls of different plans do not wait for each other,
    even if the plans share a workspace.

    ``parts``: the parts of the program, in launch order. ``kept``: the tensors and numbers that calls share,
    by role and node. ``gaps``: the unused bytes of the workspace.
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
        signature = program.signature
        self._in_order, self._out_order = picker(tuple(signature.inputs)), picker(tuple(signature.outputs))
        like = {
            n: torch.empty([d(self.sizes) for d in t.shape], dtype=torch_dtype(t.dtype), device="meta")
            for n, t in (*signature.inputs.items(), *signature.outputs.items())
        }
        self._like = {n: (tuple(like[n].shape), like[n].stride(), like[n].dtype) for n in signature.outputs}
        self._updates, self._empty = signature.updates, _allocator(self.device)
        kernels: list[GemmKernel | VectorKernel] = [*self.lowered.gemms, *self.lowered.vectors]
        kernels.sort(key=lambda k: (k.step, isinstance(k, VectorKernel)))
        scalars = {(a.role, a.node) for k in kernels for a in k.arguments if a.role in NUMBERS}
        self.kept = {key: self._scalar(*key) for key in sorted(scalars)} | self._allocate(workspace)
        streams = CudaStreams(self.device) if self.device.type == "cuda" else None
        tensors = [v for v in self.kept.values() if isinstance(v, torch.Tensor)]
        turns = Turns(streams, [self.workspace, *tensors])
        known = {"lock": turns.lock, "take": turns.take}
        self._calls = CallWriter([*like.values()], known | {"empty": self._empty})
        self._values: dict[Hashable, str] = dict(zip(like, self._calls.given, strict=True))
        self._values |= {key: self._calls.constant(value) for key, value in self.kept.items()}
        self._launches: list[tuple[Part, str]] = []  # each launch as code
        for k in kernels:
            if isinstance(k, GemmKernel):
                self._launches += [(("gemm", k.step), launch) for launch in self._gemm(k)]
            else:
                self._launches.append((("vector", k.step), self._vector(k)))
        self.parts = list(dict.fromkeys(part for part, _ in self._launches))
        self._running: dict[tuple[Part, ...], Callable[..., Any]] = {}
        self.call = self._fresh_call()
        added = {self._names[k.adds] for k in self.lowered.gemms if k.adds is not None}
        self._added = [(o, name) for o, name in self._updates.items() if name in added]

    def _shape(self, index: int) -> list[int]:
        return [d(self.sizes) for d in self._steps.types[index].shape]

    def _partials(self, gemm: GemmKernel, reduced: int) -> list[int]:
        """The shape of a reduction's partial results: [1, M, tiles along N] for a reduction along rows, [1,
        tiles along M, N] for a reduction along columns."""
        rows, columns = self._shape(self._steps.gemms[gemm.step].gemm)
        schedule = self.schedules[gemm.step]
        if self._along_columns(reduced):
            return [1, -(-rows // schedule.tile_m), columns]
        return [1, rows, -(-columns // schedule.tile_n)]

    def _along_columns(self, reduced: int) -> bool:
        how = reduction(self.program.nodes[reduced])
        return how is not None and how.axis == "column"

    def _allocate(self, workspace: torch.Tensor | None) -> dict[Hashable, torch.Tensor]:
        """Allocate, in one buffer, the tensors that one kernel writes and a later kernel reads. Tiles and
        vectors come first. Partial results of reductions come last, because their number depends on the
        schedules."""
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
        # Plans of one tuning share a buffer, and a plan may run a step on results that another plan left in
        # the buffer. So the offsets of ``values`` must not depend on the schedules.
        wanted = values | partials
        sizes = {
            key: torch.Size(shape).numel() * torch_dtype(dtype).itemsize
            for key, (shape, dtype) in wanted.items()
        }
        total = GAP + sum(-(-n // 256) * 256 + GAP for n in sizes.values())
        if workspace is None or workspace.numel() < total:
            workspace = torch.empty(total, dtype=torch.uint8, device=self.device)
        self.workspace = workspace
        # The buffer of a ``row_select`` must hold -inf before each call; the vector kernel after the step
        # resets the buffer. The buffer is separate from the workspace, because another plan may write other
        # values to the workspace.
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
        """The value of an argument that is a number. For the role ``scalar``, the value is the size that the
        node names. For ``extent``, it is the node's number of columns; for ``count``, the node's number of
        rows."""
        from cutlass import Float32, Int32

        if role == "count":
            return Int32(self._shape(node)[0])
        named = role == "scalar"
        size = (
            Dim.parse(str(self.program.nodes[node].attribute)) if named else self._steps.types[node].shape[1]
        )
        return Float32(float(size(self.sizes)))

    def _value(self, node: int) -> str:
        return self._values[self._names.get(node) or ("value", node)]

    def _argument(self, argument: Argument | None) -> str:
        """The Python code of a kernel's argument."""
        import torch

        if argument is None or argument.role == "head":  # the head width is a constant of the compiled kernel
            return "None"
        if argument.role in (*NUMBERS, "bounds"):
            return self._values[argument.role, argument.node]
        if argument.role == "partial":
            value = self._values["partial", argument.node, argument.part]
            return self._calls.view(value, lambda t: t[0]) if argument.rank == 2 else value
        value = self._value(argument.node)
        return self._calls.view(value, lambda t: t.view(torch.float32)) if argument.packed else value

    def _gemm(self, kernel: GemmKernel) -> list[str]:
        from quack.cute_dsl_utils import get_max_active_clusters

        schedule = self.schedules[kernel.step]
        if objection := kernel.objection(schedule, self.sizes):
            raise LaunchError(f"step {kernel.step}: {objection}")
        clusters = get_max_active_clusters(schedule.cluster_m * schedule.cluster_n)
        if not schedule.split:
            return [self._launch(kernel, schedule, clusters)]
        left = (get_max_active_clusters(1) - 4 * clusters) // 2  # clusters of two on the idle SMs
        rows, columns = self._shape(self._steps.gemms[kernel.step].gemm)
        boundary = share((rows, columns), schedule, clusters, left)
        first, second = schedule.launches
        if boundary == rows:
            return [self._launch(kernel, first, clusters)]
        above, below = (0, boundary), (boundary, rows)
        return [self._launch(kernel, first, clusters, above), self._launch(kernel, second, left, below)]

    def _launch(
        self, kernel: GemmKernel, schedule: Schedule, clusters: int, rows: tuple[int, int] | None = None
    ) -> str:
        """The code that launches a step. ``rows`` (first, past) restricts the launch to these rows.
        ``clusters``: the number of clusters that can run at the same time."""
        from quack.gemm_tvm_ffi_utils import make_scheduler_args, make_varlen_args

        constant, view = self._calls.constant, self._calls.view
        epilogue = self._epilogue_arguments(kernel.step)
        own = {a.name: self._rows(a, schedule, rows) for a in kernel.arguments}
        a, b = self._value(kernel.a), self._value(kernel.b)
        a = view(a, lambda t: t.mT) if kernel.a_transposed else a
        a = view(a, lambda t: t[slice(*rows)]) if rows else a
        b = view(b, lambda t: t.mT) if kernel.own else b  # QuACK takes b as [N, K]
        bounds = None if kernel.offsets is None else self.kept["bounds", kernel.offsets]
        varlen = make_varlen_args(*((None, bounds) if kernel.own else (bounds, None)), None)
        by_expert = constant(varlen)
        if kernel.index is not None:
            by_expert = f"{constant(varlen._replace)}(mAIdx={self._value(kernel.index)})"
        arguments = [
            *(a, b, self._rows(kernel.d, schedule, rows), self._rows(kernel.c, schedule, rows)),
            f"{constant(epilogue._make)}(({''.join(f'{own.get(field)}, ' for field in epilogue._fields)}))",
            constant(make_scheduler_args(clusters, schedule.swizzle, None)),
            by_expert,
            *("None", "None"),
        ]
        compiled = compile_gemm(self.lowered, kernel, schedule, self.sizes)
        return f"{constant(compiled)}({', '.join(arguments)})"

    def _rows(self, argument: Argument | None, schedule: Schedule, rows: tuple[int, int] | None) -> str:
        """The code of a launch's argument. If the launch computes only some ``rows``, this is the code of the
        argument's slice for these rows."""
        if argument is not None and argument.role == "pointer":
            return self._calls.address(self._value(argument.node))
        value = self._argument(argument)
        if argument is None or rows is None:
            return value
        first, past = rows
        match argument.role:
            case "partial" if not argument.picks:
                if self._along_columns(argument.node):
                    first, past = first // schedule.tile_m, -(-past // schedule.tile_m)
                return self._calls.view(value, lambda t: t[:, first:past])
            case "load" | "store" | "range" | "table" | "row" | "index" | "partial":
                return self._calls.view(value, lambda t: t[first:past])
            case "memory" if argument.rank == 2:
                return self._calls.view(value, lambda t: t[first:past])
        return value

    def _epilogue_arguments(self, step: int) -> Any:
        """The class of a step's epilogue arguments. For an edited step, this is the class in the unedited
        code, because this process must not import edited code."""
        lowered = lower(self.program) if self.lowered.edited else self.lowered
        name = next(g.name for g in lowered.gemms if g.step == step)
        return getattr(load_module(lowered), name).EpilogueArguments

    def _vector(self, kernel: VectorKernel) -> str:
        compiled, view = self._calls.constant(compile_vector(self.lowered, kernel)), self._calls.view
        arguments = (
            view(self._value(a.node), lambda t: t.view(1)) if a.role == "pointer" else self._argument(a)
            for a in kernel.arguments
        )
        return f"{compiled}({', '.join(arguments)})"

    def _launching(self, wanted: Collection[Part]) -> list[str]:
        """The lines of code that wait for the previous call (``Turns.take``) and launch the ``wanted``
        parts."""
        launches = (f"    {text}" for part, text in self._launches if part in wanted)
        return ["with lock:", "    take()", *launches]

    def _fresh_call(self) -> Callable[..., dict[str, torch.Tensor]]:
        """A function of the inputs that allocates the outputs, launches everything on the plan's device, and
        returns the outputs by name."""
        import torch

        inputs = [self._values[name] for name in self.program.signature.inputs]
        lines = []
        for name, (shape, strides, dtype) in self._like.items():
            fresh = f"empty({shape}, {strides}, {self._calls.constant(dtype)})"
            updated = self._updates.get(name)
            lines.append(f"{self._values[name]} = {self._values[updated] if updated else fresh}")
        outputs = [f"{self._calls.constant(name)}: {self._values[name]}" for name in self._like]
        lines += [*self._launching(self.parts), f"return {{{', '.join(outputs)}}}"]
        call = self._calls.function(inputs, lines)
        if self.device.type != "cuda":
            return call
        current = self._calls.constant(torch._C._cuda_getDevice)
        switched = self._calls.constant(_on_its_device(self.device, call))
        switch = f"if {current}() != {self.device.index}: return {switched}({', '.join(inputs)})"
        return self._calls.function(inputs, [switch, *lines])

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Call the plan with inputs by name, and return its outputs by name."""
        return self.call(*self._in_order(inputs))

    def outputs(self) -> dict[str, torch.Tensor]:
        """Fresh, uninitialised tensors for all outputs, including outputs that update an input."""
        return {name: self._empty(*like) for name, like in self._like.items()}

    def in_place(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Outputs for ``run``. An output that updates an input is that input's tensor; any other output is a
        fresh tensor."""
        updated = {output: inputs[name] for output, name in self._updates.items()}
        return {n: updated[n] if n in updated else self._empty(*like) for n, like in self._like.items()}

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Launch the whole kernel on the current stream. Shapes, dtypes and device are not checked. An output
        that updates an input may be that input's tensor; the kernel then overwrites the tensor."""
        self.run_parts(self.parts, inputs, outputs)

    def run_step(
        self, step: int, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        """Launch one step's GEMM and the vector kernels after it, on the results of an earlier ``run``."""
        self.run_parts((("gemm", step), ("vector", step)), inputs, outputs)

    def run_parts(
        self,
        wanted: Sequence[Part],
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> None:
        """Launch the ``wanted`` parts in order, on the results of an earlier ``run``."""
        for output, name in self._added:
            if outputs[output] is not inputs[name]:  # the kernel adds to the output's contents
                outputs[output].copy_(inputs[name])
        key = tuple(wanted)
        if key not in self._running:
            self._running[key] = self._calls.function(self._calls.given, self._launching(key))
        self._running[key](*self._in_order(inputs), *self._out_order(outputs))
