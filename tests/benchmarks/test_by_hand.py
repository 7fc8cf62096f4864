"""Tests of the hand-arranged layer: its gradients, the position of each kernel in the layer, and its
memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.by_hand import measuring
from benchmarks.by_hand.layer import HandArranged, table, unrotated
from benchmarks.by_hand.runners import (
    Interpreted,
    KernelCall,
    Launched,
    Tensors,
    accepted_programs,
    calls,
)
from coda_agent.comparison.competitors import EAGER, PROGRAM
from coda_agent.comparison.layers.errors import relative, results, truth
from coda_agent.comparison.layers.plain import Plain
from coda_agent.comparison.layers.shape import EPS, WIDTHS, Shape, Weights, draw, rotary
from coda_agent.primitives.lang.interpret import torch_dtype
from coda_agent.primitives.runtime.launchable import ALIGNMENT, LaunchError, check_sizes
from coda_agent.primitives.system import workers

SMALL = Shape(heads=2, head_width=32, ffn=96, sequences=2, length=48)
ODD = Shape(heads=3, head_width=16, ffn=40, sequences=1, length=56)
PROGRAMS = accepted_programs()
WORSE = 1.5  # largest accepted error, as a multiple of the error of the plain bf16 layer


def fused(shape: Shape, weights: Weights, next_norm: Tensor) -> HandArranged:
    return HandArranged(shape, weights, next_norm, Interpreted(PROGRAMS), unrotated)


@pytest.mark.parametrize("shape", [SMALL, ODD])
def test_it_loses_no_more_than_the_plain_layer(shape: Shape) -> None:
    drawn = draw(shape, 0, "cpu")
    exact = truth(shape, drawn)
    plain = relative(results(Plain(shape, drawn.weights, drawn.next_norm), drawn), exact)
    found = relative(results(fused(shape, drawn.weights, drawn.next_norm), drawn), exact)
    assert max(found[name] / plain[name] for name in exact) < WORSE


def test_it_is_built_by_name_beside_the_comparisons_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "under_compile", lambda function, mode: function)
    drawn, runner = draw(SMALL, 12, "cpu"), Interpreted(PROGRAMS)
    found = measuring.variant(PROGRAM, SMALL, drawn, runner)
    own = fused(SMALL, drawn.weights, drawn.next_norm)
    assert torch.equal(found.forward(found.start(drawn.x)).h, own.forward(own.start(drawn.x)).h)
    assert isinstance(measuring.variant(EAGER, SMALL, drawn, runner), Plain)


def test_its_kernels_are_the_accepted_ones_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measuring.known_kernels("1B")
    assert list(found) == list(calls(WIDTHS["1B"]).values())
    assert all(kernel.source.schedules or kernel.known for kernel in found.values())
    jobs: list[Any] = []
    monkeypatch.setattr(workers, "run_jobs", jobs.extend)
    kernel: Any = SimpleNamespace(compile_jobs=lambda sizes: [sizes])
    call = next(iter(found))
    assert list(measuring.compiled({call: kernel}).kernels) == [call] and jobs == [dict(call.sizes)]


class Watched(Interpreted):
    """Record, for each call of a kernel, which earlier outputs still hold their memory."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(PROGRAMS)
        self.places = {call: place for place, call in calls(shape).items()}
        self.made: dict[str, StorageWeakRef] = {}
        self.held: dict[str, set[str]] = {}

    def run(self, call: KernelCall, inputs: Tensors) -> dict[str, Tensor]:
        place = self.places[call]
        self.held[place] = {name for name, storage in self.made.items() if not storage.expired()}
        found = super().run(call, inputs)
        self.made |= {f"{place} {name}": StorageWeakRef(t.untyped_storage()) for name, t in found.items()}
        return found


def test_what_nobody_reads_any_more_is_let_go_of() -> None:
    """The layer frees an output after its last use, because the benchmark reports the layer's peak memory."""
    drawn, runner = draw(ODD, 5, "cpu"), Watched(ODD)
    layer = HandArranged(ODD, drawn.weights, drawn.next_norm, runner, unrotated)
    stream = layer.start(drawn.x)
    layer.forward(stream)
    h1 = {"out h", "out hg", "out rstd"}
    assert runner.held["gate_up"] == h1 and runner.held["down"] == {*h1, "gate_up act"}
    runner.made.clear()
    layer.step(stream, drawn.dout)
    kept = {"qk q", "v y", "out h", "out rstd", "gate_up preact"}
    assert runner.held["down_backward"] == kept
    assert runner.held["gate_up_backward"] == {*kept, "down_backward dz", "down_backward s"}
    assert runner.held["qkv_backward"] == {*kept, "gate_up_backward dx"}


class Strict(Interpreted):
    """Refuse inputs that a launch would refuse: a wrong dtype, wrong strides or an unaligned address.
    ``seen`` records the calls."""

    def __init__(self) -> None:
        super().__init__(PROGRAMS)
        self.seen: list[KernelCall] = []

    def run(self, call: KernelCall, inputs: Tensors) -> dict[str, Tensor]:
        self.seen.append(call)
        declared = self.programs[call.operator].signature.inputs
        assert inputs.keys() == declared.keys()
        for name, tensor in inputs.items():
            assert tensor.dtype == torch_dtype(declared[name].dtype), (call, name)
            assert tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0, (call, name)
        return super().run(call, inputs)


def test_kernels_get_what_they_can_be_launched_on_each_in_its_place() -> None:
    drawn, runner = draw(SMALL, 6, "cpu"), Strict()
    layer = HandArranged(SMALL, drawn.weights, drawn.next_norm, runner, unrotated)
    layer.step(layer.start(drawn.x), drawn.dout)
    assert runner.seen == list(calls(SMALL).values())


def test_a_call_at_other_sizes_is_refused() -> None:
    drawn = draw(SMALL, 6, "cpu")
    call = calls(ODD)["v"]
    inputs = {"x": drawn.x, "w": drawn.weights.out, "rstd": torch.ones(SMALL.tokens)}
    with pytest.raises(LaunchError, match="gemm_rmsnorm is called at"):
        Interpreted(PROGRAMS).run(call, inputs)


@pytest.mark.parametrize("shape", WIDTHS.values(), ids=list(WIDTHS))
def test_every_width_can_be_launched(shape: Shape) -> None:
    assert shape.tokens == 16384
    for call in calls(shape).values():
        check_sizes(PROGRAMS[call.operator], dict(call.sizes))
        assert {"eps": EPS}.items() >= PROGRAMS[call.operator].signature.constants.items()


def test_a_launch_without_a_kernel_names_the_call() -> None:
    with pytest.raises(LookupError, match=r"no kernel for gemm_rmsnorm at .*'N': 64"):
        Launched({}).run(calls(SMALL)["v"], {})


def test_a_stream_is_begun_as_the_kernels_go_on_with_it() -> None:
    drawn = draw(SMALL, 8, "cpu")
    layer = fused(SMALL, drawn.weights, drawn.next_norm)
    stream = layer.forward(layer.start(drawn.x))
    after = fused(SMALL, drawn.weights._replace(attention_norm=drawn.next_norm), drawn.next_norm)
    begun = after.start(stream.h)
    found = relative(stream._asdict(), begun._asdict())
    assert found["h"] == 0 and found["hg"] < 4e-3 and found["rstd"] < 1e-3
    assert {n: t.dtype for n, t in begun._asdict().items()} == {
        n: t.dtype for n, t in stream._asdict().items()
    }


def test_rotating_back_is_the_gradient_of_rotating() -> None:
    drawn = draw(SMALL, 10, "cpu")
    turn = table(SMALL, rotary(SMALL, "cpu"))
    cosine, sine = (t[:, None].double() for t in turn.unflatten(1, (-1, 2)).unbind(-1))

    def rotated(t: Tensor) -> Tensor:
        even, odd = t.unflatten(1, (-1, SMALL.pairs, 2)).unbind(-1)
        return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(1)

    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(SMALL.tokens, 3 * SMALL.width, generator=generator).double().requires_grad_()
    qk, v = qkv.tensor_split([2 * SMALL.width], 1)
    turned = rotated(qk)
    parts = (drawn.dout, drawn.x, drawn.dout - drawn.x)  # used as gradients of q, k and v
    (exact,) = torch.autograd.grad((turned, v), qkv, (torch.cat(parts[:2], 1).double(), parts[2].double()))
    dq, dk, dv = (SMALL.apart(t) for t in parts)
    found, s = unrotated(dq, dk, dv, turned.detach().float(), v.detach().float(), turn)
    assert relative({"d": found}, {"d": exact})["d"] < 4e-3
    assert relative({"s": s}, {"s": (exact * qkv.detach()).sum(-1) / SMALL.width})["s"] < 1e-5
