"""Tests of the fused losses where they are hard: nearly certain tokens, infinite values, no targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_parts import Where
from torch import Tensor
from torch.nn import functional as nn_f

from coda_agent.fused import functional, ops

OURS = {
    "summed": functional.summed_cross_entropy,
    "each row": lambda h, w, target: functional.cross_entropy(h, w, target).sum(),
}
BOTH = pytest.mark.parametrize("ours", OURS.values(), ids=OURS)


def plain(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    logits = h @ w.mT
    wide = logits if h.dtype == torch.float64 else logits.float()
    return nn_f.cross_entropy(wide, target, reduction="sum")


def run(loss: Callable[..., Tensor], h: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h, w = (t.detach().clone().requires_grad_() for t in (h, w))
    total = loss(h, w, target)
    total.backward()
    assert h.grad is not None and w.grad is not None
    return total.detach().double(), h.grad.double(), w.grad.double()


def sure(seed: int, margin: float, rows: int = 64, columns: int = 256, words: int = 1024) -> Any:
    """Rows whose target's logit exceeds every other logit by ``margin``, with logits of about 20."""
    random = torch.Generator().manual_seed(seed)
    w = torch.randn(words, columns, generator=random)
    target = torch.randint(0, words, (rows,), generator=random)
    h = torch.randn(rows, columns, generator=random) * 20 / columns**0.5
    logits = h @ w.mT
    others = logits.scatter(1, target[:, None], -1e9).amax(1)
    lacking = others + margin - logits.gather(1, target[:, None])[:, 0]
    return h + lacking[:, None] * w[target] / w[target].square().sum(1, keepdim=True), w, target


@BOTH
@pytest.mark.parametrize("margin", [6, 12, 18, 25, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nearly_certain_tokens_have_the_yardsticks_error(
    ours: Callable[..., Tensor], margin: float, dtype: torch.dtype, where: Where
) -> None:
    dtype = dtype if where.device == "cpu" or dtype != torch.float32 else torch.bfloat16
    squares = torch.zeros(2, 3, dtype=torch.float64)
    for seed in range(4):
        h, w, target = (t.to(where.device) for t in sure(seed, margin))
        h, w = h.to(dtype), w.to(dtype)
        exact = run(plain, h.double(), w.double(), target)
        for row, loss in enumerate((ours, plain)):
            result = run(loss, h, w, target)
            assert result[0] >= 0
            relative = [(a - b).norm() / b.norm() for a, b in zip(result, exact, strict=True)]
            squares[row] += torch.stack(relative).square().cpu()
    error, usual = squares.sqrt()
    floor = 2e-5 if dtype == torch.float32 else 5e-3
    assert (error < 1.5 * usual + floor).all(), (error, usual)


@BOTH
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("ignored", [False, True])
def test_an_infinite_value_reaches_the_gradients_that_it_reaches_in_pytorch(
    ours: Callable[..., Tensor], value: float, ignored: bool, where: Where
) -> None:
    random = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, 32, generator=random).to(where.device, where.dtype) for n in (9, 40))
    target = torch.randint(0, 40, (9,), generator=random).to(where.device)
    h[4, 3] = value
    target[4] = -100 if ignored else target[4]
    for result, expected in zip(run(ours, h, w, target), run(plain, h, w, target), strict=True):
        assert torch.equal(result.isfinite(), expected.isfinite())


@BOTH
def test_without_a_target_gradients_are_zero_whatever_the_loss_is_divided_by(
    ours: Callable[..., Tensor], where: Where
) -> None:
    h, w = (torch.randn(n, 32, device=where.device, dtype=where.dtype) for n in (9, 40))
    target = torch.full((9,), -100, device=where.device)
    _, dh, dw = run(lambda *given: ours(*given) / torch.zeros((), device=where.device), h, w, target)
    assert not dh.any() and not dw.any()


@BOTH
def test_one_word_is_certain(ours: Callable[..., Tensor], where: Where) -> None:
    columns = 8 if where.device == "cuda" else 1  # a kernel needs rows of 16 bytes
    h, w = (torch.randn(n, 32, device=where.device, dtype=where.dtype) for n in (9, columns))
    target = torch.zeros(9, dtype=torch.int64, device=where.device)
    total, dh, _ = run(ours, h, w, target)
    assert total >= 0 and dh.isfinite().all() and (columns > 1 or not dh.any())


@BOTH
@pytest.mark.parametrize("vectorized", [False, True])
def test_many_gradients_at_once_are_refused(
    ours: Callable[..., Tensor], vectorized: bool, where: Where
) -> None:
    w = torch.randn(40, 32, device=where.device, dtype=where.dtype)
    target = torch.arange(9, device=where.device)
    h = torch.randn(9, 32, device=where.device, dtype=where.dtype, requires_grad=True)
    with pytest.raises(ops.NoBackward, match="leave out is_grads_batched and vectorize"):
        if vectorized:
            torch.autograd.functional.jacobian(lambda h: ours(h, w, target)[None], h, vectorize=True)
        else:
            ones = torch.ones(3, device=where.device)
            torch.autograd.grad(ours(h, w, target), h, ones, is_grads_batched=True)
