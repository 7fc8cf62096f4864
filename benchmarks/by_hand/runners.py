"""Run a layer's kernels: launch them on a GPU, or interpret them on any machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from coda_agent.comparison.layers.shape import Shape
from coda_agent.fused import programs
from coda_agent.primitives.lang.interpret import interpret, solve_sizes
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.primitives.runtime.launchable import LaunchError

Tensors = Mapping[str, Tensor]


class KernelCall(NamedTuple):
    """An operator and the sizes at which a layer calls its kernel. Each pair of operator and sizes has its
    own schedule."""

    operator: str
    sizes: tuple[tuple[str, int], ...]


def calls(shape: Shape) -> dict[str, KernelCall]:
    """Every kernel call of a layer of this shape, by the call's position in the layer. The forward's calls
    come first; the positions of the backward's calls end in ``_backward``.

    An operator may occur at two positions with different sizes, and then needs a schedule for each position.
    """
    tokens, width, ffn = shape.tokens, shape.width, shape.ffn

    def call(operator: str, **sizes: int) -> KernelCall:
        return KernelCall(operator, tuple({"M": tokens, **sizes}.items()))

    return {
        "qk": call("gemm_rmsnorm_rope", K=width, H=2 * shape.heads, P=shape.pairs),
        "v": call("gemm_rmsnorm", K=width, N=width),
        "out": call("gemm_residual_partial_rmsnorm", K=width, N=width),
        "gate_up": call("gemm_rmsnorm_swiglu", D=width, F=ffn),
        "down": call("gemm_residual_partial_rmsnorm", K=ffn, N=width),
        "down_backward": call("gemm_swiglu_bwd", D=width, F=ffn),
        "gate_up_backward": call("gemm_residual_rmsnorm_bwd", K=2 * ffn, N=width),
        "qkv_backward": call("gemm_residual_rmsnorm_bwd", K=3 * width, N=width),
    }


def accepted_programs() -> dict[str, Program]:
    """The programs of all accepted kernels, by operator."""
    return {name: program for name, (program, _) in programs.accepted().items()}


class Runner(Protocol):
    def run(self, call: KernelCall, inputs: Tensors) -> dict[str, Tensor]:
        """Run the call's kernel, and return new outputs by name."""


class Launched:
    """Launch kernels on the inputs' GPU and the current stream. A kernel's first call builds its plan and, if
    needed, tunes the kernel; later calls must have inputs with the same shapes and dtypes."""

    def __init__(self, kernels: Mapping[KernelCall, Kernel]) -> None:
        self.kernels = kernels
        self._plans: dict[KernelCall, Plan] = {}

    def run(self, call: KernelCall, inputs: Tensors) -> dict[str, Tensor]:
        """Launch the call's kernel. Raises LookupError if there is no kernel for the call, and LaunchError if
        the inputs have other sizes."""
        if call not in self._plans:
            self._plans[call] = self._plan(call, inputs)
        return self._plans[call](inputs)

    def _plan(self, call: KernelCall, inputs: Tensors) -> Plan:
        if call not in self.kernels:
            raise LookupError(f"there is no kernel for {call.operator} at {dict(call.sizes)}")
        plan = self.kernels[call].plan(inputs, dict(call.sizes))
        _agree(call, plan.sizes)
        return plan


class Interpreted:
    """Interpret kernels in PyTorch on the inputs' device. The outputs are those of the kernels. The time that
    interpreting takes says nothing about the kernels' speed."""

    def __init__(self, programs: Mapping[str, Program]):
        self.programs = programs

    def run(self, call: KernelCall, inputs: Tensors) -> dict[str, Tensor]:
        """Interpret the call's kernel. Raises ValueError if the inputs' shapes contradict each other, and
        LaunchError if their sizes differ from the call's."""
        program = self.programs[call.operator]
        shapes = {name: t.shape for name, t in inputs.items()}
        _agree(call, solve_sizes(program.signature, shapes, dict(call.sizes)))
        return interpret(program, inputs, sizes=dict(call.sizes))


def _agree(call: KernelCall, sizes: Mapping[str, int]) -> None:
    if sizes != dict(call.sizes):
        raise LaunchError(f"{call.operator} is called at {dict(call.sizes)}; its inputs have {dict(sizes)}")
