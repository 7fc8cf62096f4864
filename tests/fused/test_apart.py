"""Tests of a projection that returns its parts (q, k and v) and the residual stream. One backward program
takes the gradients of the parts and of the stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_parts import EPS, KEYS, TURNED, WIDTH, Where, loss_of
from torch import Tensor

from coda_agent.fused import ahead, chains, functional, ops
from coda_agent.fused.pointwise import heads
from coda_agent.primitives.compiler.lower import lower

D, ROWS = 16, 12
SIZES = (TURNED - KEYS * WIDTH, KEYS * WIDTH, KEYS * WIDTH)
KINDS = pytest.mark.parametrize(
    ("bias", "rotates"), [(False, True), (False, False), (True, False)], ids=["rotated", "plain", "bias"]
)


def drawn(bias: bool, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"x": (2, ROWS // 2, D), "gamma": (D,), "w": (sum(SIZES), D)}
    shapes |= {"b": (sum(SIZES),)} if bias else {}
    made = {n: torch.randn(shape, generator=random) * shape[-1] ** -0.5 for n, shape in shapes.items()}
    return {n: t.to(device, dtype).requires_grad_() for n, t in made.items()}


def given(leaves: dict[str, Tensor], rotates: bool) -> tuple[Any, ...]:
    angle = torch.arange(ROWS * WIDTH // 2, device=leaves["x"].device).view(ROWS, -1) * 0.1
    table = torch.stack((angle.cos(), angle.sin()), -1).flatten(1).to(leaves["x"].dtype) if rotates else None
    norm = functional.Norm(leaves["gamma"], EPS)
    return leaves["x"], norm, leaves["w"], leaves.get("b"), table, TURNED if rotates else 0


def apart(leaves: dict[str, Tensor], rotates: bool) -> list[Tensor]:
    """Return the projection's parts, and then the stream."""
    parts, stream = functional.before_attention_apart(SIZES, *given(leaves, rotates))
    return [*parts, stream]


def together(leaves: dict[str, Tensor], rotates: bool) -> list[Tensor]:
    whole = functional.before_attention(*given(leaves, rotates))
    return [*whole.flatten(0, -2).split(SIZES, 1), leaves["x"]]


def gradients(results: list[Tensor], leaves: dict[str, Tensor], used: set[int]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    weights = [torch.randn(t.shape).to(t) for t in results]
    total = torch.stack([(results[i] * weights[i]).float().sum() for i in sorted(used)]).sum()
    wanted = {n: t for n, t in leaves.items() if t.requires_grad}
    found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(wanted, found, strict=True))


@KINDS
@pytest.mark.parametrize("used", [{0, 1, 2, 3}, {0, 1, 2}, {2}, {1, 3}, {3}], ids=str)
def test_gradients_are_those_of_the_projection_and_the_stream(
    bias: bool, rotates: bool, used: set[int], where: Where
) -> None:
    leaves = drawn(bias, where.dtype, where.device)
    found, usual = apart(leaves, rotates), together(leaves, rotates)
    assert all(torch.equal(a, b) for a, b in zip(found, usual, strict=True))
    exact = gradients(usual, leaves, used)
    for name, each in gradients(found, leaves, used).items():
        assert loss_of(each, exact[name]) < where.close or not exact[name].any() and not each.any(), name


@KINDS
@pytest.mark.parametrize("frozen", ["x", "gamma", "w"])
def test_each_input_may_be_frozen(bias: bool, rotates: bool, frozen: str, where: Where) -> None:
    leaves = drawn(bias, where.dtype, where.device)
    leaves[frozen].requires_grad_(False)
    exact = gradients(together(leaves, rotates), leaves, {0, 1, 2, 3})
    found = apart(leaves, rotates)
    assert found[3].requires_grad == (frozen != "x")
    for name, each in gradients(found, leaves, {0, 1, 2, 3}).items():
        assert loss_of(each, exact[name]) < where.close, name


@KINDS
def test_the_backward_adds_the_streams_gradient_in_its_program(bias: bool, rotates: bool) -> None:
    leaves = {n: t.detach().to("meta").requires_grad_() for n, t in drawn(bias).items()}
    found = ahead.called(lambda: torch.cat([t.flatten() for t in apart(leaves, rotates)]).sum().backward())
    assert ["d_through" in bound.program.signature.inputs for bound in found] == [False, True]
    link = functional.ATTENTION_IN[bias, rotates]
    wrt = ("out", "gamma_in", "w_qkv", *["b_qkv"] * bias, chains.THROUGH)
    derived = link.derived(wrt)
    assert not derived.left and not derived.saves
    assert lower(ops.defined[link.backward_name(wrt)].program).text


def test_sums_that_a_gradient_carries_replace_the_derived_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    link, leaves = functional.ATTENTION_IN[False, False], drawn(False)

    class Rotation(torch.autograd.Function):
        """Stands in for the function that normalises and rotates heads on a GPU."""

        @staticmethod
        def forward(ctx: Any, packed: Tensor) -> Tensor:
            ctx.save_for_backward(packed)
            return packed * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (packed,) = ctx.saved_tensors
            d = gradient * 2
            setattr(d, heads._ATTRIBUTE, heads.RowSums((d * packed).sum(1), d._version))
            return d

    def run() -> dict[str, Tensor]:
        (packed,), stream = functional.before_attention_apart((sum(SIZES),), *given(leaves, False))
        return gradients([Rotation.apply(packed), stream], leaves, {0, 1})

    with monkeypatch.context() as derived:
        derived.setattr(link, "by_hand", {})
        usual = run()
    monkeypatch.setattr(link, "_head", None)  # calling the derived program would raise an error
    for name, each in run().items():
        assert loss_of(each, usual[name]) < 1e-6, name
