"""Family 2, vectors and scalars: one value per row or column, spread over tiles; sizes and literals.

Small generated kernels between the steps do the arithmetic on vectors. There is one such kernel for each step
and vector length.
"""

from __future__ import annotations

from coda_agent.primitives.lang import diagnostics
from coda_agent.primitives.lang.cutedsl import Spread
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Attribute, Operation, register
from coda_agent.primitives.lang.signature import Type, sole
from coda_agent.primitives.lang.trace import Tensor, apply, dim_attribute

LARGEST = (2 - 2**-23) * 2.0**127  # the largest fp32 number


def _row(types: tuple[Type, ...], attribute: Attribute) -> Type:
    return Type("row", sole("per_row", "vector", types).shape)


def _column(types: tuple[Type, ...], attribute: Attribute) -> Type:
    return Type("column", sole("per_column", "vector", types).shape)


def _per_head(types: tuple[Type, ...], attribute: Attribute) -> Type:
    match types:
        case (Type(kind="head") as given,):
            return Type("spread", given.shape, given.period)
        case (Type(kind="vector" | "tile") as given,):
            return Type("repeated", given.shape, given.shape[-1])
    raise ProgramError(
        "arguments",
        "per_head takes a statistic of head_sums, a vector or an input tile, "
        f"not {', '.join(map(str, types)) or 'nothing'}",
    )


def _leaf(types: tuple[Type, ...], attribute: Attribute) -> Type:
    if types or not isinstance(attribute, float):
        raise ProgramError("arguments", "a constant is one number")
    if not abs(attribute) <= LARGEST:
        raise ProgramError(
            "constant", f"constant {attribute!r} is not finite in fp32: write {diagnostics.FINITE}"
        )
    return Type("scalar")


def _dim(types: tuple[Type, ...], attribute: Attribute) -> Type:
    if types:
        raise ProgramError("arguments", "a dim reads no other node")
    dim_attribute(attribute)
    return Type("scalar")


def _no_rule(types: tuple[Type, ...], attribute: Attribute) -> Type:
    raise ProgramError("arguments", "an input's type comes from the signature")


register(Operation("input", _no_rule))
register(Operation("constant", _leaf))
register(Operation("dim", _dim))

ROW = Spread("row", 'ColVecLoad("{name}")', ("{name}[2 * i]",))
register(
    Operation(
        "per_row",
        _row,
        lambda torch, v: v[:, None],
        spread=ROW,
        derivative=lambda g, y, v: (apply("row_sums", g),),
    )
)


def per_row(v: Tensor) -> Tensor:
    """Spread a vector over a tile: one value per row. The vector is an input, or computed from reductions of
    an *earlier* gemm.

    Shapes: [M], over [M, N]. Dtypes: any to fp32. Cost: half a load an element. Paper: family 2, vectors.

        share = t / per_row(v)
        rest = 1 - share
    """
    return apply("per_row", v)


COLUMN = Spread("column", 'RowVecLoad("{name}")', ("{name}[2 * i]", "{name}[2 * i + 1]"))
register(
    Operation(
        "per_column",
        _column,
        lambda torch, v: v[None, :],
        spread=COLUMN,
        derivative=lambda g, y, v: (apply("column_sums", g),),
    )
)


def per_column(v: Tensor) -> Tensor:
    """Spread a vector over a tile: one value per column, such as a bias.

    Shapes: [N], the tile's columns, over [M, N]. Dtypes: any to fp32. Cost: half a load an element.
    Paper: family 2, vectors.

        centred = t - per_column(b)
        size = abs(centred)
    """
    return apply("per_column", v)


def _per_head_derivative(g: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor]:
    """The gradient of per_head. If a vector [W] is repeated in H heads, the result [H*W] contains one part
    for each head, and the caller must add the H parts."""
    if y._type.kind == "spread":
        return (apply("head_sums", g, attribute=str(y._type.period)),)
    if len(y._type.shape) == 2:
        raise ProgramError("derivative", f"{y._type} repeats for each head: no primitive adds tiles of heads")
    return (apply("column_sums", g),)


register(
    Operation("per_head", _per_head, lambda torch, v: v, lanes=lambda v: v, derivative=_per_head_derivative)
)


def per_head(v: Tensor) -> Tensor:
    """Spread over a tile of heads: one value for each head, or values that repeat in every head. Combine the
    result with a tile, or first with another per_head of its kind.

    Shapes: a head statistic [M, H] (over its head's columns), a vector [W] or an input tile [M, W] (both
    repeated in each head), over [M, H*W]: H heads of W columns, W made of static dims. Dtypes: any to
    fp32. Cost: none for a statistic; for a vector half a load an element; for a tile 5
    instructions an element. Paper: family 2, vectors.

        shifted = t - per_head(g)
        ratio = shifted / per_head(1 + g * g)
    """
    return apply("per_head", v)
