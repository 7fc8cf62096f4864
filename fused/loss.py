"""Compute the summed cross-entropy of an output head and, in the same forward, the gradients of this sum.

Rows are processed in blocks. A block's first matmul stores the exponentials of the block's logits. Two more
matmuls read the exponentials, and compute the gradients of the stream and of the head's weight. A backward
from ``primitives.derive`` would have to compute all logits again.

A softmax needs exponentials relative to the row's log-sum-exp, which is known only after the matmul. So the
matmul stores exponentials relative to a shift that is known before the matmul: the target's logit, computed
separately, plus ``SHIFT``. Later, the row's results are multiplied in fp32 by exp(shift - log-sum-exp), the
exact ratio between the two kinds of exponentials. The matmuls leave out the exponential of the target itself.
The target's term, (softmax - 1) times the target's row of the weight, is added afterwards in fp32. If a row's
loss exceeds 120, the row's exponentials may overflow. Then everything is computed again, with exponentials
relative to the log-sum-exp.

The loss and its derivative come from two values of the same matmul: the target's logit, and the log-sum-exp
of all other logits (see ``token_loss``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nn_f

from coda_agent.fused import ops
from coda_agent.fused.pointwise.programs import fused_on_gpu
from coda_agent.fused.programs import Order, accepted
from coda_agent.primitives import exp, gemm, per_row, row_logsumexp, row_select
from coda_agent.primitives.derive.chains import Chain, rest

ROWS = 4096  # the most rows whose exponentials exist at a time
IGNORED = -100  # the target of a row that has no loss
# ``SHIFT`` and ``MOST`` are exponents. bf16 can hold exp(x) for x from -87 to 88. So only softmax values
# below exp(SHIFT - 87) become 0, which is negligible. If a row's log-sum-exp exceeds its shift by more than
# ``MOST``, the row's exponentials may overflow.
SHIFT, MOST = 40.0, 80.0
# In the second pass, the shift is the log-sum-exp of the other logits minus ``AGAIN``, so that even fp16 can
# hold the exponentials: none exceeds 2**7.
AGAIN = 7 * log(2)


def _exponentials(h: Any, w: Any, target: Any, shift: Any) -> dict[str, Any]:
    logits: Any = gemm(h, w.mT)
    others = rest(logits, target)
    return {
        "others": exp(others - per_row(shift)),
        "rest_lse": row_logsumexp(others),
        "target_logit": row_select(logits, target),
    }


def _stream_gradient(others: Any, w: Any, scale: Any, chosen: Any, pull: Any) -> dict[str, Any]:
    product: Any = gemm(others, w)
    return {"dh": product * per_row(scale) + chosen * per_row(pull)}


def _op(name: str, chain: Chain) -> ops.Op:
    program = chain.program(name)
    order = Order(tuple(chain.inputs), tuple(chain.outputs))
    return ops.Op(program, order, program.signature.inputs, overwrites=True)


ROW = "M: fp32"
EXPONENTIALS = _op(
    "loss_exponentials",
    Chain(
        {"h": "M, D", "w": "V, D", "target": "M: int64", "shift": ROW},
        {"others": "M, V", "rest_lse": ROW, "target_logit": ROW},
        _exponentials,
    ),
)
STREAM_GRADIENT = _op(
    "loss_stream_gradient",
    Chain(
        {"others": "M, V", "w": "V, D", "scale": ROW, "chosen": "M, D", "pull": ROW},
        {"dh": "M, D: fp32"},
        _stream_gradient,
    ),
)
FIRST_WEIGHT_GRADIENT = _op(
    "loss_weight_gradient",
    Chain(
        {"others": "M, V", "h": "M, D"}, {"dw": "V, D: fp32"}, lambda others, h: {"dw": gemm(others.mT, h)}
    ),
)
_program, _order = accepted()["gemm_grad_accumulate"]
WEIGHT_GRADIENT = ops.Op(_program, _order, _program.signature.inputs, overwrites=True)


def token_loss(rest_lse: Tensor, target_logit: Tensor) -> Tensor:
    """The cross-entropy of tokens, never negative: ``log(1 + exp(rest_lse - target_logit))``. ``rest_lse``:
    the log-sum-exp of all logits but the target's. If one of the two is infinite, the loss is nan, as in
    PyTorch."""
    return nn_f.softplus(_margin(rest_lse, target_logit))


def _margin(rest_lse: Tensor, target_logit: Tensor) -> Tensor:
    """The log of the odds against the target; nan instead of an infinity."""
    return rest_lse - target_logit + 0.0 * (rest_lse + target_logit)


def targets_logits(h: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The targets' rows of the weight, [M, D], and the targets' logits, [M] in fp32. For an ignored target,
    row 0 is used. Autograd records nothing."""
    with torch.no_grad():
        return _targets_logits(h.detach(), w.detach(), target)


@fused_on_gpu
def _targets_logits(h: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    chosen = w[target.clamp(min=0)]
    return chosen, (h.float() * chosen.float()).sum(-1)


def _forward(
    h: Tensor, w: Tensor, target: Tensor, chosen: Tensor, logit: Tensor, stream: bool, weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss and the wanted gradients: of the stream, of the weight, or of both. After the
    host has enqueued all work, it checks once whether exponentials overflowed. The flag is copied to the host
    before the last two matmuls, so that the GPU computes these while the host waits."""
    run = partial(_pass, h, w, target, chosen, stream=stream, weight=weight)
    # Compute twice at once for fp16, which cannot hold the first pass's exponentials, and while a CUDA graph
    # records, because the host then cannot read the flag.
    twice = h.dtype == torch.float16 or (h.is_cuda and torch.cuda.is_current_stream_capturing())
    if not twice:
        results, over = run(logit + SHIFT, may_overflow=True)
        if not over():
            return results
        del results
    rest_lse, odds = _rests(h, w, target, logit)
    return run(rest_lse - AGAIN, unit=_unit(odds) if h.dtype == torch.float16 else None)[0]


def _rests(h: Tensor, w: Tensor, target: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the log-sum-exp of all logits but the target's, and the probability of all other tokens
    than the target."""
    rows = [t.split(ROWS) for t in (h, target, logit)]
    found = [EXPONENTIALS.run(own, w, *vectors)[1:] for own, *vectors in zip(*rows, strict=True)]
    rest_lse, target_logit = (torch.cat(parts) for parts in zip(*found, strict=True))
    return rest_lse, torch.where(target == IGNORED, 0.0, _margin(rest_lse, target_logit).sigmoid())


def _unit(odds: Tensor) -> Tensor:
    """A power of two, by which the rows of the weight gradient's matmul are multiplied while they are fp16:
    so the row of the least certain token has the stream's own range."""
    largest = torch.nan_to_num(odds.amax(), nan=1.0).clamp(min=2.0**-100)
    return torch.exp2(7.0 - largest.log2().round())


def _pass(
    h: Tensor,
    w: Tensor,
    target: Tensor,
    chosen: Tensor,
    shift: Tensor,
    *,
    stream: bool,
    weight: bool,
    may_overflow: bool = False,
    unit: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor], Callable[[], bool]]:
    """Return the summed loss, and the gradients of the stream and of the weight (an unwanted gradient is
    empty). Also return a function that says whether exponentials overflowed, if they ``may_overflow``.
    ``shift``: the exponentials of row i are relative to element i."""
    # the first block's matmul creates dw, because filling dw with zeros would take a pass over memory
    dw = torch.zeros(w.shape if weight and not len(h) else (0,), dtype=torch.float32, device=w.device)
    total, over = h.new_zeros((), dtype=torch.float32), h.new_zeros((), dtype=torch.bool)
    gradients, overflowed = list[Tensor](), lambda: False
    for at in range(0, len(h), ROWS):
        own, labels, some, shifts = (t[at : at + ROWS] for t in (h, target, chosen, shift))
        others, *logits = EXPONENTIALS.run(own, w, labels, shifts)
        scale, pull, total, over = _factors(*logits, shifts, labels, total, over)
        overflowed = _on_its_way(over) if may_overflow else overflowed
        gradients += [STREAM_GRADIENT.run(others, w, scale, some, pull)] if stream else []
        if weight:
            rows, pulled_rows, index = _weighted(own, scale, pull, labels, unit)
            add = partial(WEIGHT_GRADIENT.run if at else FIRST_WEIGHT_GRADIENT.run, others, rows)
            dw = add(dw) if at else add()
            dw.index_add_(0, index, pulled_rows)
    none = h.shape if stream else (0,)  # the shape of dh without rows, or of an unwanted one
    dh = torch.cat(gradients) if gradients else h.new_empty(none, dtype=torch.float32)
    return (total, dh, dw if unit is None else dw.div_(unit)), overflowed


@fused_on_gpu
def _factors(
    rest_lse: Tensor, target_logit: Tensor, shift: Tensor, target: Tensor, total: Tensor, over: Tensor
) -> tuple[Tensor, ...]:
    """Return two factors for each row: one for the row's exponentials, and one for the target's row of the
    weight. Also return ``total`` plus the rows' losses, and whether exponentials may have overflowed, in
    these rows or in earlier blocks (``over``)."""
    counts = target != IGNORED
    margin = _margin(rest_lse, target_logit)
    losses = nn_f.softplus(margin)
    # as in PyTorch, an infinity in an ignored row reaches the gradients
    scale = torch.where(counts, (shift - target_logit - losses).exp(), 0.0 * rest_lse)
    pull = torch.where(counts, -margin.sigmoid(), 0.0)
    losses = torch.where(counts, losses, 0.0)
    return scale, pull, total + losses.sum(), over | (rest_lse - shift > MOST).any()


@fused_on_gpu
def _weighted(
    h: Tensor, scale: Tensor, pull: Tensor, target: Tensor, unit: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the rows of ``h`` times ``scale``, and the rows of ``h`` times ``pull``, both times ``unit``.
    Also return, for each row of the second product, the row of the weight's gradient to which it is
    added."""
    scale, pull = (t if unit is None else t * unit for t in (scale, pull))
    return (h * scale[:, None]).to(h.dtype), h * pull[:, None], target.clamp(min=0)


def _on_its_way(flag: Tensor) -> Callable[[], bool]:
    """Start to copy the flag to the host. Return a function that waits for the copy, but not for work that is
    enqueued later, and returns the value."""
    if not flag.is_cuda:
        return lambda: bool(flag)
    there, arrived = flag.to("cpu", non_blocking=True), torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(flag.device))

    def value() -> bool:
        arrived.synchronize()
        return bool(there)

    return value


def _fake(
    h: Tensor, w: Tensor, target: Tensor, chosen: Tensor, logit: Tensor, stream: bool, weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dw = w.new_empty(w.shape if weight else (0,), dtype=torch.float32)
    if ops.watchers:
        own = (t[:ROWS] for t in (h, target, chosen, logit))
        some, target, chosen, logit = own
        others, *_ = EXPONENTIALS.fake(some, w, target, logit)
        if stream:
            STREAM_GRADIENT.fake(others, w, logit, chosen, logit)
        if weight:
            WEIGHT_GRADIENT.fake(others, some, FIRST_WEIGHT_GRADIENT.fake(others, some))
    dh = h.new_empty(h.shape if stream else (0,), dtype=torch.float32)
    return h.new_empty((), dtype=torch.float32), dh, dw


_SIGNATURE = (
    "summed_loss(Tensor h, Tensor w, Tensor target, Tensor chosen, Tensor logit, bool stream, bool weight)"
    " -> (Tensor, Tensor, Tensor)"
)
ops.library.define(_SIGNATURE)
for _device in ("CPU", "CUDA"):
    ops.library.impl("summed_loss", _forward, _device)
torch.library.register_fake(f"{ops.NAMESPACE}::summed_loss", _fake, lib=ops.library)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, w, target, *_ = inputs
    ctx.dtypes = h.dtype, w.dtype
    ctx.wanted = ctx.needs_input_grad[:2]
    ctx.save_for_backward((target != IGNORED).any(), *output[1:])
    ctx.set_materialize_grads(False)  # otherwise PyTorch would pass zeros as large as dh and dw


def _backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """Multiply the saved gradients by the incoming gradient of the sum. This gradient is infinite if the sum
    was divided by 0; it has no effect if no token has a target."""
    assert gradient is not None  # ``summed`` returns only the sum, so each backward has the sum's gradient
    ops.check_backward(gradient)
    any_target, *saved = ctx.saved_tensors
    gradient = torch.where(any_target, gradient, 0.0)
    found = zip(ctx.wanted, saved, ctx.dtypes, strict=True)
    return (*[scaled(t, gradient, dtype) if needed else None for needed, t, dtype in found], *[None] * 5)


@fused_on_gpu
def scaled(wide: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``wide * factor``, rounded once."""
    return (wide * factor).to(dtype)


torch.library.register_autograd(
    f"{ops.NAMESPACE}::summed_loss", _backward, setup_context=_setup, lib=ops.library
)


def summed(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """The sum of the rows' losses, a scalar in fp32, for ``h`` [M, D], ``w`` [V, D] and ``target`` [M].
    Raises NoBackward under torch.func."""
    ops.check_forward_mode((h, w))
    wanted = [t.requires_grad and torch.is_grad_enabled() for t in (h, w)]
    if any(wanted):
        ops.check_torch_func()
    chosen, logit = targets_logits(h, w, target)
    total, *_ = torch.ops.coda_agent.summed_loss(h, w, target, chosen, logit, *wanted)
    return total


def mean(total: Tensor, target: Tensor) -> Tensor:
    """``total`` divided by the number of targets. If all targets are ignored, the result is nan and its
    gradient 0, as in PyTorch."""
    number = (target != IGNORED).sum()
    return torch.where(number > 0, total / number.clamp(min=1), torch.nan)
