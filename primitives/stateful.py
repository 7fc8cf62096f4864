"""Family 5, stateful reductions: online log-sum-exp, selection along a row, statistics of heads."""

from __future__ import annotations

from typing import Any

from primitives.ir import Attribute, Operation, ProgramError, Reduction, Type, register
from primitives.reductions import reduces
from primitives.trace import Tensor, apply, dim_attribute, size_of

_LOGSUMEXP = Reduction("row", "logsumexp")


def _selected(types: tuple[Type, ...], attribute: Attribute) -> Type:
    if [t.kind for t in types] != ["tile", "vector"] or types[0].shape[0] != types[1].shape[0]:
        raise ProgramError(
            "arguments",
            f"row_select takes a tile and one index a row, not {', '.join(map(str, types)) or 'nothing'}",
        )
    return Type("vector", types[0].shape[:1])


def _heads(types: tuple[Type, ...], attribute: Attribute) -> Type:
    if [t.kind for t in types] != ["tile"]:
        raise ProgramError(
            "arguments", f"head_sums takes one tile, not {', '.join(map(str, types)) or 'nothing'}"
        )
    rows, columns = types[0].shape
    width = dim_attribute(attribute)
    try:
        return Type("head", (rows, columns.divided(width)), width)
    except ValueError as error:
        raise ProgramError("width", f"head_sums: {error}: a tile is a whole number of heads") from None


def _select(torch: Any, t: Any, index: Any) -> Any:
    inside = (index >= 0) & (index < t.shape[1])
    found = t.gather(1, index.where(inside, 0).long()[:, None])[:, 0]
    return found.where(inside, 0.0)


def _head_sums(torch: Any, t: Any, width: int) -> Any:
    return t.unflatten(1, (-1, width)).sum(dim=-1)


register(
    Operation(
        "row_logsumexp",
        reduces("row_logsumexp", _LOGSUMEXP),
        lambda torch, t: torch.logsumexp(t, dim=-1),
        reduction=_LOGSUMEXP,
    )
)
register(Operation("row_select", _selected, _select, reduction=Reduction("row", "select")))
register(Operation("head_sums", _heads, _head_sums))


def row_logsumexp(t: Tensor) -> Tensor:
    """``log(sum(exp(t)))`` along each row of a tile [M, N], as a vector [M] in fp32, without overflow.

    Kept online: a running maximum and a sum rescaled to it. Final after its step. Cost: an exponential an
    element. Paper: the stateful family. ``surplus = row_logsumexp(t) - row_max(t)``
    """
    return apply("row_logsumexp", t)


def row_select(t: Tensor, index: Tensor) -> Tensor:
    """Of each row of a tile [M, N] the element in column ``index[row]``, as a vector [M] in fp32.

    ``index`` is an input of int32 or int64, [M]; where it is below 0 or at least N (an ignored target), the
    result is 0. The tile has its gemm's width. Final after its step. ``first = row_select(t, index)``
    """
    return apply("row_select", t, index)


def head_sums(t: Tensor, width: Tensor) -> Tensor:
    """Sums over each head of a tile [M, H*W]: a statistic [M, H], final at once, within its step.

    ``width`` W is made of static dims (parameters of the kernel), so that a head lies inside one CTA tile.
    The tile has its gemm's width and uses no loaded tile. Arithmetic on statistics happens once a head;
    spread one with per_head, or return it. Cost: a sweep over the accumulator before the epilogue.
    ``centred = t - per_head(head_sums(t, W) / W)``
    """
    return apply("head_sums", t, attribute=size_of(width))
