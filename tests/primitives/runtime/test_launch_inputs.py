"""A kernel accepts the tensors that it can be launched on. It refuses all other tensors before anything runs
on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kernels
import pytest
import torch

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.interpret import torch_dtype
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime import executable
from coda_agent.primitives.runtime.familiar import recognizer
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.primitives.runtime.launchable import LaunchError, check_sizes, check_tensors

SIZES = {"M": 100, "K": 64, "N": 200, "D": 64, "F": 104, "P": 64, "H": 3, "V": 200}


class On(torch.Tensor):
    """A CPU tensor that claims to be on a GPU."""

    place: str

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, place: str = "cuda:0") -> On:
        made = tensor.as_subclass(cls)
        made.place = place
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(self.place)


def on_gpu(program: Program, **changed: Any) -> dict[str, Any]:
    """Return the program's inputs at SIZES, as if on a GPU. ``changed`` replaces inputs; the value
    ``MISSING`` leaves an input out."""
    inputs = {
        name: torch.zeros([d(SIZES) for d in t.shape], dtype=torch_dtype(t.dtype))
        for name, t in program.signature.inputs.items()
    }
    return {
        k: On(v) if type(v) is torch.Tensor else v
        for k, v in {**inputs, **changed}.items()
        if v is not MISSING
    }


MISSING = object()


def check_inputs(program: Program, inputs: dict[str, Any]) -> dict[str, int]:
    """Check the inputs as ``Kernel`` does before it makes a plan, and return the sizes."""
    sizes = check_tensors(program.signature, inputs)
    check_sizes(program, sizes)
    return sizes


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


SHARED = zeros(26400)
BAD: dict[str, tuple[kernels.Example, dict[str, Any], str]] = {
    "one on the CPU": (
        kernels.ALPHA,
        {"x": On(zeros(100, 200), "cpu")},
        "inputs must be on one CUDA device; they are on cpu, cuda:0",
    ),
    "two GPUs": (kernels.ALPHA, {"alpha": On(torch.tensor(1.0), "cuda:1")}, "they are on cuda:0, cuda:1"),
    "dtype": (
        kernels.ALPHA,
        {"x": zeros(100, 200, dtype=torch.float16)},
        "'x' is torch.float16; the spec says bf16",
    ),
    "dtype of an index": (
        kernels.CROSS_ENTROPY,
        {"target": zeros(100, dtype=torch.int32)},
        "'target' is torch.int32; the spec says int64",
    ),
    "dtype of a scalar": (
        kernels.ALPHA,
        {"alpha": torch.tensor(1)},
        "'alpha' is torch.int64; the spec says fp32",
    ),
    "other fp8": (
        kernels.FP8,
        {"x": zeros(100, 64).to(torch.float8_e5m2)},
        "'x' is torch.float8_e5m2; the spec says fp8_e4m3",
    ),
    "a number": (
        kernels.ALPHA,
        {"alpha": zeros(1, dtype=torch.float32)},
        "'alpha' has 1 dims; the spec says 0",
    ),
    "rank": (kernels.ALPHA, {"x": zeros(100 * 200)}, "'x' has 1 dims; the spec says 2"),
    "missing": (kernels.ALPHA, {"w": MISSING}, "inputs must be y, w, x, alpha; got y, x, alpha"),
    "extra": (kernels.ALPHA, {"z": zeros(1, 1)}, "inputs must be y, w, x, alpha; got y, w, x, alpha, z"),
    "none": (kernels.ALPHA, {"x": None}, "input 'x' must be a tensor; it is of type NoneType"),
    "a list": (kernels.ALPHA, {"y": [[1.0]]}, "input 'y' must be a tensor; it is of type list"),
    "one row with the stride of a column": (
        kernels.ALPHA,
        {"y": zeros(64, 1).mT, "x": zeros(1, 200)},
        r"'y' of shape \(1, 64\) has strides \(1, 1\), .*: call .flatten\(\).view\(1, 64\)",
    ),
    "an operand that is written over": (
        kernels.IN_PLACE,
        {"x": SHARED[:6400].view(100, 64), "w": zeros(64, 64), "d": SHARED[:6400].view(100, 64)},
        "output 'o' overwrites input 'd', which shares memory with input 'x': give 'x' a tensor",
    ),
    "the end of an operand that is written over": (
        kernels.IN_PLACE,
        {"x": SHARED[:6400].view(100, 64), "d": SHARED[6400 - 8 : 26400 - 8].view(100, 200)},
        "which shares memory with input 'x'",
    ),
    "the start of an operand that is written over": (
        kernels.IN_PLACE,
        {"x": SHARED[20000 - 8 : 26400 - 8].view(100, 64), "d": SHARED[:20000].view(100, 200)},
        "which shares memory with input 'x'",
    ),
    "what wants a gradient": (
        kernels.ALPHA,
        {"w": zeros(200, 64).requires_grad_()},
        r"input 'w' requires grad, .*: call .detach\(\), or launch under torch.no_grad",
    ),
    "transposed": (
        kernels.ALPHA,
        {"x": zeros(200, 100).mT},
        "'x' must be contiguous and 16-byte aligned: call .contig",
    ),
    "every other column": (kernels.ALPHA, {"x": zeros(100, 400)[:, ::2]}, "'x' must be contiguous"),
    "a slice of columns": (kernels.ALPHA, {"x": zeros(100, 208)[:, :200]}, "'x' must be contiguous"),
    "every other position": (
        kernels.QK_NORM,
        {"positions": zeros(200, dtype=torch.int32)[::2]},
        "'positions' must be contiguous",
    ),
    "expanded": (kernels.ALPHA, {"x": zeros(1, 200).expand(100, 200)}, "'x' must be contiguous"),
    "unaligned": (kernels.ALPHA, {"x": zeros(100 * 200 + 1)[1:].view(100, 200)}, "16-byte aligned"),
    "unaligned vector": (
        kernels.QK_NORM,
        {"positions": zeros(101, dtype=torch.int32)[1:]},
        "16-byte aligned",
    ),
    "shapes apart": (kernels.ALPHA, {"x": zeros(104, 200)}, "input 'x' has shape \\(104, 200\\)"),
    "no rows": (
        kernels.ALPHA,
        {"y": zeros(0, 64), "x": zeros(0, 200)},
        "input 'y', axis 0: no positive M makes M = 0",
    ),
    "no inner size": (
        kernels.ALPHA,
        {"y": zeros(100, 0), "w": zeros(200, 0)},
        "input 'y', axis 1: no positive K makes K = 0",
    ),
    "no columns": (
        kernels.ALPHA,
        {"w": zeros(0, 64), "x": zeros(100, 0)},
        "input 'w', axis 0: no positive N makes N = 0",
    ),
    "no heads": (
        kernels.QK_NORM,
        {"w": zeros(0, 64)},
        "input 'w', axis 0: no positive H makes 2\\*H\\*P = 0",
    ),
    "odd columns where pairs are": (kernels.SWIGLU, {"w": zeros(207, 64)}, "no positive F makes 2\\*F = 207"),
    "part of a head": (kernels.QK_NORM, {"w": zeros(200, 64)}, "no positive H makes 2\\*H\\*P = 200"),
    "rows of 12 bytes": (
        kernels.ALPHA,
        {"w": zeros(206, 64), "x": zeros(100, 206)},
        "x: rows of 206 bf16 are not a multiple of 16 bytes",
    ),
    "K of fp8": (
        kernels.FP8,
        {"x": zeros(100, 72).to(torch.float8_e4m3fn), "w": zeros(200, 72).to(torch.float8_e4m3fn)},
        "x: rows of 72 fp8_e4m3 are not a multiple of 16 bytes",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_inputs_that_cannot_be_launched_on_are_refused(name):
    example, changed, words = BAD[name]
    with pytest.raises(LaunchError, match=words):
        check_inputs(example.program, on_gpu(example.program, **changed))


def test_neighbours_of_what_is_written_over_are_no_part_of_it():
    changed = {"x": SHARED[20000:].view(100, 64), "d": SHARED[:20000].view(100, 200)}
    assert check_inputs(kernels.IN_PLACE.program, on_gpu(kernels.IN_PLACE.program, **changed))["M"] == 100
    read_only = {
        "x": SHARED[:20000].view(100, 200),
        "y": SHARED[:6400].view(100, 64),
    }  # inputs that are only read may overlap
    assert check_inputs(kernels.ALPHA.program, on_gpu(kernels.ALPHA.program, **read_only))["M"] == 100


def test_parameters_are_fine_where_no_gradient_is_recorded():
    weight = zeros(200, 64).requires_grad_()
    with torch.no_grad():
        assert check_inputs(kernels.ALPHA.program, on_gpu(kernels.ALPHA.program, w=weight))["N"] == 200


@pytest.mark.parametrize("current", [0, 1])
def test_launches_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    entered = [current]

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        entered.append(wanted.index)
        yield
        entered.pop()

    def compiled(*_: Any) -> Callable[..., None]:
        made = entered[-1]
        return lambda *given: ran.append((made, entered[-1], len(entered)))

    def nowhere(plan: Any, _: Any) -> dict[Any, Any]:
        plan.workspace = torch.empty(0)
        return {}

    class NoStreams:
        __init__ = current = handle = lambda *_: None

    ran: list[tuple[int, int, int]] = []
    on_cpu = executable._allocator(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: entered[-1])
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: entered[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(executable, "CudaStreams", NoStreams)
    monkeypatch.setattr(executable, "_allocator", lambda _: on_cpu)
    monkeypatch.setattr(executable.Plan, "_allocate", nowhere)
    monkeypatch.setattr(executable, "compile_gemm", compiled)
    monkeypatch.setattr("quack.cute_dsl_utils.get_max_active_clusters", lambda size: 132 // size)
    inputs = {k: On(v, "cuda:1") for k, v in on_gpu(kernels.SWIGLU.program).items()}
    Kernel(KernelSource(kernels.SWIGLU.program, {0: Schedule()}))(**inputs)
    assert ran == [(1, 1, 2 - current)]  # if the device is already current, it is not set again
    assert entered == [current]


@pytest.mark.parametrize("example", kernels.EXAMPLES.values(), ids=kernels.EXAMPLES)
def test_good_inputs_give_the_sizes(example):
    sizes = check_inputs(example.program, on_gpu(example.program))
    assert sizes == {d: SIZES[d] for d in example.signature.dims}


def test_a_scalar_may_lie_anywhere_and_one_row_is_enough():
    alpha = torch.zeros(3)[1]
    inputs = on_gpu(kernels.ALPHA.program, alpha=alpha, y=zeros(1, 64), x=zeros(1, 200))
    assert check_inputs(kernels.ALPHA.program, inputs)["M"] == 1


def test_outputs_without_elements_are_refused():
    shape = kernels.tensor
    declared = kernels.signature(
        {"x": shape("M, K"), "w": shape("N, K"), "v": shape("N - 8")}, {"o": shape("M, N")}
    )
    program = kernels.trace(declared, "return {'o': gemm(x, w.mT)}")
    good = {"x": On(zeros(8, 64)), "w": On(zeros(16, 64)), "v": On(zeros(8))}
    assert check_inputs(program, good) == {"M": 8, "K": 64, "N": 16}
    bad = {"x": On(zeros(8, 64)), "w": On(zeros(8, 64)), "v": On(zeros(0))}
    with pytest.raises(LaunchError, match=r"v would be \[0\] at .*: every extent is at least 1"):
        check_inputs(program, bad)


def passed() -> list[torch.Tensor]:
    return [zeros(100, 64), zeros(200, 64), zeros(100, dtype=torch.float32)]


def other_strides(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [zeros(64, 100).mT, *tensors[1:]]


def misaligned(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [zeros(100 * 64 + 1)[1:].view(100, 64), *tensors[1:]]


STRANGERS: dict[str, Callable[[list[torch.Tensor]], list[Any]]] = {
    "size": lambda t: [zeros(101, 64), *t[1:]],
    "dtype": lambda t: [t[0].half(), *t[1:]],
    "strides": other_strides,
    "misaligned": misaligned,
    "requires grad": lambda t: [t[0].clone().requires_grad_(), *t[1:]],
    "one twice": lambda t: [t[0], t[1], t[1]],
    "other class": lambda t: [On(t[0]), *t[1:]],
    "no tensor": lambda t: [None, *t[1:]],
}


@pytest.mark.parametrize("change", STRANGERS.values(), ids=STRANGERS)
def test_only_tensors_of_the_same_kind_are_familiar(change):
    familiar = recognizer(passed())
    assert familiar(*passed())
    assert not familiar(*change(passed()))


@pytest.mark.parametrize("first", [-8, 0, 8, 100 * 64 - 8])
def test_a_tensor_that_is_written_over_must_be_apart_from_all_others(first):
    memory = zeros(4 * 100 * 64)
    start = 100 * 64 * 2
    kept, before, behind, over = (
        memory[at : at + 100 * 64].view(100, 64)
        for at in (start, start - 100 * 64, start + 100 * 64, start + first)
    )
    familiar = recognizer([kept, before], written=[0])
    assert familiar(kept, before) and familiar(kept, behind)
    assert not familiar(kept, over)
    assert recognizer([kept, before])(kept, over)  # two inputs that are only read may overlap


def test_integers_must_be_equal_and_floats_may_differ():
    familiar = recognizer([*passed(), 4, 1e-6])
    assert familiar(*passed(), 4, 1e-5) and not familiar(*passed(), 5, 1e-6)


def test_parameters_are_familiar_only_where_no_gradient_is_recorded():
    tensors = [each.requires_grad_(each.ndim == 2) for each in passed()]
    familiar = recognizer(tensors)
    assert not familiar(*tensors)
    with torch.no_grad():
        assert familiar(*tensors)
