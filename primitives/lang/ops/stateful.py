"""Family 5, stateful reductions: online log-sum-exp, selection along a row, head statistics."""

from __future__ import annotations

from typing import Any

from coda_agent.primitives.lang import diagnostics
from coda_agent.primitives.lang.cutedsl import Reduction, Statistic
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Attribute, Operation, Sides, register
from coda_agent.primitives.lang.ops.reductions import EXTREMUM, Rule, reduces
from coda_agent.primitives.lang.signature import Type, sole
from coda_agent.primitives.lang.trace import Tensor, apply, size_attributes, size_of


def _selected(types: tuple[Type, ...], attribute: Attribute) -> Type:
    if [t.kind for t in types] != ["tile", "vector"] or types[0].shape[0] != types[1].shape[0]:
        raise ProgramError(
            "arguments",
            f"row_select takes a tile and one index a row, not {', '.join(map(str, types)) or 'nothing'}",
        )
    return Type("vector", types[0].shape[:1])


def _heads(name: str) -> Rule:
    """The typing rule of a head statistic, which takes one tile and returns one value per head."""

    def infer(types: tuple[Type, ...], attribute: Attribute) -> Type:
        rows, columns = sole(name, "tile", types).shape
        (width,) = size_attributes(attribute, 1)
        try:
            return Type("head", (rows, columns.divided(width)), width)
        except ValueError as error:
            raise ProgramError("width", f"{name}: {error}: a tile is a whole number of heads") from None

    return infer


def _select(torch: Any, t: Any, index: Any) -> Any:
    inside = (index >= 0) & (index < t.shape[1])
    found = t.gather(1, index.where(inside, 0).long()[:, None])[:, 0]
    return found.where(inside, 0.0)


def _selected_from(torch: Any, t: Any, index: Any) -> Sides:
    """``Operation.sides`` of a selection. The first side is chosen if the index lies in the first half of the
    columns, and the second side if it lies in the second half."""
    value, middle, columns = _select(torch, t, index), (t.shape[1] + 1) // 2, t.shape[1]
    first, second = (index >= 0) & (index < middle), (index >= middle) & (index < columns)
    return (first, value.where(first, 0.0)), (second, value.where(second, 0.0))


def _head_sums(torch: Any, t: Any, width: int) -> Any:
    return t.unflatten(1, (-1, width)).sum(dim=-1)


def _head_abs_max(torch: Any, t: Any, width: int) -> Any:
    return t.unflatten(1, (-1, width)).abs().amax(dim=-1)


def _head_halves(torch: Any, t: Any, width: int) -> Sides:
    """``Operation.sides`` of a head's largest magnitude. The first side is chosen if the magnitude lies in
    the first half of the head, and the second side if it lies in the second half."""
    first, second = t.unflatten(1, (-1, width)).tensor_split([(width + 1) // 2], dim=-1)
    a, b = (half.abs().amax(dim=-1) for half in (first, second if second.numel() else first))
    return (a > b, a), (b > a, b)


_LOGSUMEXP = Reduction(
    "row",
    resource='OnlineLSEReduce("{name}")',  # this resource masks the fragment in place
    finish="finish_logsumexp({partial}, at, lane)",
    said="logsumexp({kept})",
    spoils=True,
)


@reduces(
    _LOGSUMEXP,
    torch=lambda torch, t: torch.logsumexp(t, dim=-1),
    derivative=lambda g, y, t: (
        apply("multiply", apply("exp", apply("subtract", t, apply("per_row", y))), apply("per_row", g)),
    ),
)
def row_logsumexp(t: Tensor) -> Tensor:
    """``log(sum(exp(t)))`` along each row of a tile, without overflow. A row of -inf gives -inf.
    Final after its step, as row_sums.

    Shapes: [M, N] to [M]. Dtypes: fp32. Cost: 9 instructions an element, 1.2 of them MUFU and 0.1 shuffles;
    else as row_sums. Paper: family 5, stateful.

        level = row_logsumexp(t)
        surplus = level - row_max(t)
    """
    return apply("row_logsumexp", t)


_SELECT = Reduction(
    "row",
    resource='ColVecSelect("{name}", ColVecLoad("{index}"))',
    finish="finish_select({partial}, at, {index}, {extent})",
    said="where(({index} >= 0) & ({index} < {extent}), {kept}, 0)",
    selects=True,
    own_width=(diagnostics.SELECT, diagnostics.SELECT),
)


@reduces(
    _SELECT,
    torch=_select,
    rule=_selected,
    sides=_selected_from,
    derivative=lambda g, y, t, index: (
        apply(
            "where",
            apply("equal", apply("column_index", t), apply("per_row", index)),
            apply("per_row", g),
            0,
        ),
        None,
    ),
)
def row_select(t: Tensor, index: Tensor) -> Tensor:
    """The element of each row of a tile in column ``index[row]``; 0 if the index is below 0 or at least N (an
    ignored target). Final after its step, as row_sums.

    Shapes: a tile [M, N] of its gemm's width and an input [M], to [M]. Dtypes: the index int32 or int64, the
    result fp32. Cost: 4 instructions an element. Paper: family 5, stateful.

        first = row_select(t, index)
        gap = row_max(t) - first
    """
    return apply("row_select", t, index)


_HEADS = Statistic('HeadSums("{name}")', own_width=(diagnostics.NARROW_HEADS, diagnostics.WIDE_HEADS))
register(
    Operation(
        "head_sums",
        _heads("head_sums"),
        _head_sums,
        statistic=_HEADS,
        sizes=1,
        derivative=lambda g, y, t: (apply("as_tile", apply("per_head", g), t),),
    )
)


def head_sums(t: Tensor, width: Tensor) -> Tensor:
    """The sum over each head of a tile: a statistic, final within its own step. The tile must have its gemm's
    width and may use spread vectors, but no loaded tile. Arithmetic on statistics runs once per head; spread
    a statistic with per_head, or return it.

    Shapes: [M, H*W] to [M, H]; ``width`` W is made of static dims and whole numbers. Dtypes: fp32. Cost: 2
    instructions an element, 0.1 of them shuffles.
    Paper: family 5, stateful.

        total = head_sums(t, W)
        centred = t - per_head(total / W)
    """
    return apply("head_sums", t, attribute=size_of(width))


_BLOCKS = Statistic('HeadAbsMax("{name}")', own_width=(diagnostics.NARROW_BLOCKS, diagnostics.WIDE_BLOCKS))
register(
    Operation(
        "head_abs_max",
        _heads("head_abs_max"),
        _head_abs_max,
        statistic=_BLOCKS,
        sizes=1,
        sides=_head_halves,
        caveat=EXTREMUM,
    )
)


def head_abs_max(t: Tensor, width: Tensor) -> Tensor:
    """The largest magnitude of each head of a tile, as head_sums. W = 128 gives the block scales of an fp8
    output. For a tile t half as wide as its gemm, use join(t, t) and 2 * W, and scale join(t, t).

    Shapes: [M, H*W] to [M, H], W made of static dims. Dtypes: fp32. Cost: 2 instructions an element, else as
    head_sums. Paper: family 5, stateful.

        size = head_abs_max(t, W)
        share = t / per_head(size + 1)
    """
    return apply("head_abs_max", t, attribute=size_of(width))
