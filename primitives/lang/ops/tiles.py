"""Family 3, tiles: the GEMM that computes a tile, its operands, and halves and ranges of a tile's columns.

Loads and stores are implicit. A step loads an input tile, or a tile of an earlier step, if an expression of
the step reads it. A step stores a tile if the kernel returns the tile, or if a later step reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Attribute, Operation, register
from coda_agent.primitives.lang.signature import Type, sole
from coda_agent.primitives.lang.trace import Tensor, apply, size_attributes, size_of


def _transpose(types: tuple[Type, ...], attribute: Attribute) -> Type:
    if [t.kind for t in types] not in (["tile"], ["experts"]):
        raise ProgramError("arguments", f".mT takes a matrix, not {', '.join(map(str, types)) or 'nothing'}")
    *outer, rows, columns = types[0].shape
    return Type("operand", (*outer, columns, rows))


def _gemm(types: tuple[Type, ...], attribute: Attribute) -> Type:
    if len(types) == 4:
        return _grouped(_gathered(types[0], types[3]), *types[1:3])
    if len(types) == 3:
        return _grouped(*types)
    if len(types) != 2 or any(t.kind not in ("tile", "operand", "experts") for t in types):
        raise ProgramError("arguments", f"gemm takes two matrices, not {', '.join(map(str, types))}")
    if any(len(t.shape) == 3 for t in types):
        raise ProgramError(
            "arguments", "with a matrix for each expert, gemm needs row offsets: gemm(x, w.mT, offsets)"
        )
    (m, k), (k2, n) = types[0].shape, types[1].shape
    if k != k2:
        raise ProgramError(
            "shapes",
            f"gemm of [{m}, {k}] and [{k2}, {n}]: the inner sizes {k} and {k2} differ; "
            "a weight stored [N, K] is used as w.mT",
        )
    return Type("tile", (m, n))


def _grouped(a: Type, b: Type, offsets: Type) -> Type:
    """The type of a GEMM with offsets. There are two forms: the GEMM multiplies each row by its expert's
    matrix, or it computes one product for each expert, over the expert's rows."""
    if offsets.kind != "vector":
        raise ProgramError("arguments", f"gemm's offsets are a vector [E + 1], not {offsets}")
    experts = offsets.shape[0] + Dim.parse(-1)
    of_rows = (a.kind, len(b.shape)) == ("tile", 3) and b.kind in ("experts", "operand")
    if of_rows and b.shape[:2] == (experts, a.shape[1]):
        return Type("tile", (a.shape[0], b.shape[2]))
    if (a.kind, len(a.shape), b.kind) == ("operand", 2, "tile") and a.shape[1] == b.shape[0]:
        return Type("experts", (experts, a.shape[0], b.shape[1]))
    raise ProgramError(
        "shapes",
        f"gemm of {a}, {b} and offsets [{offsets.shape[0]}]: with offsets [E + 1], gemm takes x [T, K] and "
        "w.mT of [E, N, K] (or w [E, K, N]); for one product per expert, y.mT of [T, N] and x [T, K]",
    )


def _gathered(a: Type, index: Type) -> Type:
    """The type of the matrix that consists of rows of ``a``, gathered by an index."""
    if a.kind != "tile" or index.kind != "vector":
        raise ProgramError(
            "arguments",
            f"gemm gathers rows of x [T, K] by an index [M], which are not {a} and {index}: "
            "gemm(x, w.mT, offsets, index)",
        )
    return Type("tile", (*index.shape, a.shape[1]))


def check_offsets(offsets: Sequence[int], rows: int) -> None:
    """Raise ValueError if the offsets do not rise from 0 to the number of rows."""
    if (offsets[0], offsets[-1]) != (0, rows) or sorted(offsets) != list(offsets):
        raise ValueError(f"offsets {list(offsets)[:8]} must rise from 0 to {rows}, the number of rows")


def check_index(index: Any, rows: int) -> None:
    """Raise ValueError if a value of the tensor ``index`` is below 0, or is at least ``rows``."""
    first, last = (int(end) for end in index.aminmax())
    if first < 0 or last >= rows:
        raise ValueError(f"its values are {first} to {last}; they must be from 0 to {rows - 1}, row numbers")


def _by_expert(torch: Any, a: Any, b: Any, offsets: Any = None, index: Any = None) -> Any:
    """A GEMM in PyTorch. With offsets, it computes one product for each expert. With an index, it first
    gathers rows. Raises ValueError if offsets do not rise from 0 to the number of rows, or if the index has
    an invalid row."""
    if offsets is None:
        return a @ b
    if index is not None:
        check_index(index, len(a))
        a = a[index]
    ends = [int(end) for end in offsets.tolist()]
    check_offsets(ends, b.shape[0] if b.dim() == 2 else a.shape[0])
    if b.dim() == 3:
        return torch.cat([a[i:j] @ own for (i, j), own in zip(pairwise(ends), b, strict=True)])
    return torch.stack([a[:, i:j] @ b[i:j] for i, j in pairwise(ends)])


def _half(types: tuple[Type, ...], attribute: Attribute) -> Type:
    if len(types) != 1 or types[0].kind not in ("tile", "repeated"):
        instead = {
            "vector": ": let the vector meet the tile first, as pairs(t + per_column(v))",
            "column": ": let it meet the tile first, as pairs(t + per_column(v))",
            "row": ": use it unchanged with each half of a tile",
        }.get(types[0].kind if len(types) == 1 else "", "")
        raise ProgramError(
            "arguments",
            f"pairs takes one tile, not {', '.join(map(str, types)) or 'nothing'}{instead}",
        )
    (whole,) = types
    try:
        half = whole.shape[-1].divided(Dim.parse(2))
    except ValueError:
        raise ProgramError(
            "width",
            f"pairs of {whole}: {whole.shape[-1]} columns are not even for every size; "
            "write an even number in the spec, such as 2*F",
        ) from None
    return Type(whole.kind, (*whole.shape[:-1], half), half if whole.kind == "repeated" else None)


def _join(types: tuple[Type, ...], attribute: Attribute) -> Type:
    if [t.kind for t in types] != ["tile", "tile"] or types[0] != types[1]:
        raise ProgramError(
            "arguments", f"join takes two tiles of one shape, not {', '.join(map(str, types))}"
        )
    rows, columns = types[0].shape
    return Type("tile", (rows, columns + columns))


def _index(types: tuple[Type, ...], attribute: Attribute) -> Type:
    if [t.kind for t in types] != ["tile"]:
        raise ProgramError("arguments", "column_index takes the tile whose columns it numbers")
    return types[0]


def _columns(torch: Any, t: Any) -> Any:
    return torch.arange(t.shape[1], device=t.device, dtype=torch.float32).expand(t.shape)


def _interleave(torch: Any, a: Any, b: Any) -> Any:
    return torch.stack((a, b), dim=-1).flatten(-2)


def _interleaved(even: list[str], odd: list[str]) -> list[str]:
    return [value for pair in zip(even, odd, strict=True) for value in pair]


def _gemm_derivative(
    g: Tensor, y: Tensor, a: Tensor, b: Tensor, offsets: Tensor | None = None, index: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """The gradients of the two operands, computed by two GEMMs. If an operand is a transpose, its gradient
    has the shape of the tile that is transposed. Offsets have no gradient."""
    if index is not None:
        raise ProgramError(
            "derivative",
            "the gradient of gathered rows adds rows of several experts, which no epilogue can: gather x "
            "before the kernel, as gemm(x, w.mT, offsets), and add each token's rows by index_add_ after it",
        )
    left, right = a.untransposed, b.untransposed
    if offsets is not None and left is not None:  # the result is [E, N, K], one product per expert
        return gemm(b, g.mT, offsets), gemm(left, g, offsets), None
    given = () if offsets is None else (offsets,)
    return (
        gemm(g, b.mT if right is None else right, *given) if left is None else gemm(b, g.mT),
        gemm(a.mT if left is None else left, g, *given) if right is None else gemm(g.mT, a, *given),
        *(None for _ in given),
    )


register(Operation("transpose", _transpose, lambda torch, a: a.mT, derivative=lambda g, y, a: (g,)))
register(Operation("gemm", _gemm, _by_expert, derivative=_gemm_derivative))


def gemm(a: Tensor, b: Tensor, offsets: Tensor | None = None, index: Tensor | None = None) -> Tensor:
    """The matrix product of ``a`` and ``b``, accumulated in fp32: the tile of an epilogue. With offsets,
    int32 [E + 1], b[e] multiplies rows offsets[e] to offsets[e + 1]; the epilogue has no heads, column sums
    or ranges, and per_row takes fp32. With an index, int32 [M], the rows are a[index].

    Shapes: [M, K] by [K, N] to [M, N]; with offsets by [E, K, N], or y.mT of [M, N] by [M, K] to [E, N, K]:
    one product per expert, an output. An operand is an input, its transpose (a weight [N, K] or [E, N, K] as
    ``w.mT``), or an earlier step's tile. Dtypes: one 16-bit dtype, or fp8_e4m3 in gemm(x, w.mT) of inputs.
    Cost: 2*M*N*K FLOPs and a kernel; an earlier step's tile is written and read. Paper: family 3,
    tiles.

        t = gemm(left, right.mT)
        back = gemm(t, right)
    """
    return apply("gemm", a, b, *(given for given in (offsets, index) if given is not None))


def _zero(g: Tensor) -> Tensor:
    return apply("multiply", g, 0)


register(
    Operation(
        "even",
        _half,
        lambda torch, a: a[..., 0::2],
        lanes=lambda a: a[0::2],
        derivative=lambda g, y, a: (join(g, _zero(g)),),
    )
)
register(
    Operation(
        "odd",
        _half,
        lambda torch, a: a[..., 1::2],
        lanes=lambda a: a[1::2],
        derivative=lambda g, y, a: (join(_zero(g), g),),
    )
)


def pairs(t: Tensor) -> tuple[Tensor, Tensor]:
    """Split a tile into two tiles: its even columns and its odd columns. pairs also splits per_head(v).

    Shapes: [M, 2F] to two [M, F]. Dtypes: any to fp32. Cost: none. Paper: family 3, tiles.

        left, right = pairs(t)
        apart = left - right
    """
    return apply("even", t), apply("odd", t)


register(
    Operation("join", _join, _interleave, lanes=_interleaved, derivative=lambda g, y, even, odd: pairs(g))
)


def join(even: Tensor, odd: Tensor) -> Tensor:
    """Interleave two tiles: the inverse of pairs.

    Shapes: two [M, F] to [M, 2F]. Dtypes: fp32. Cost: none. Paper: family 3, tiles.

        left, right = pairs(t)
        swapped = join(right, left)
    """
    return apply("join", even, odd)


register(
    Operation(
        "column_index",
        _index,
        _columns,
        at="Float32(column(place, {0}))",
        reads=0,
        derivative=lambda g, y, t: (None,),
    )
)


def _ranged(name: str, types: tuple[Type, ...], attribute: Attribute) -> Dim:
    """Check a range of a tile's columns, and return its width."""
    columns = sole(name, "tile", types).shape[1]
    first, width = size_attributes(attribute, 2)
    if not all(size.never_negative() for size in (first, width, columns + -first + -width)):
        raise ProgramError(
            "shapes",
            f"{name} of {width} columns from {first} on: {columns} columns do not contain them at every size",
        )
    return width


def _range(types: tuple[Type, ...], attribute: Attribute) -> Type:
    width = _ranged("column_range", types, attribute)
    return Type("range", (types[0].shape[0], width))


def _inside(types: tuple[Type, ...], attribute: Attribute) -> Type:
    _ranged("in_columns", types, attribute)
    return types[0]


def _is_inside(torch: Any, t: Any, first: int, width: int) -> Any:
    at = torch.arange(t.shape[1], device=t.device)
    return (((at >= first) & (at < first + width)) * 1.0).expand(t.shape)


register(
    Operation(
        "column_range",
        _range,
        lambda torch, t, first, width: t[:, first : first + width],
        lanes=lambda t: t,
        sizes=2,
        caveat="the backward takes the gradient of the whole tile, not one gradient per range",
    )
)


def column_range(t: Tensor, first: Tensor, width: Tensor) -> Tensor:
    """Some columns of a tile, which can only be an output. Compute over the whole tile, choose columns by
    in_columns, and take the range last.

    Shapes: [M, N] to [M, width]; ``first`` and ``width`` are made of static dims and whole numbers;
    the tile has its gemm's width. Dtypes: as stored. Cost: none beyond the store, which the ranges of a tile
    share. Paper: family 3, tiles.

        left = column_range(t, 0, P)
        right = column_range(t, P, P)
    """
    return apply("column_range", t, attribute=f"{size_of(first)}, {size_of(width)}")


register(
    Operation(
        "in_columns",
        _inside,
        _is_inside,
        at="choose(within(column(place, {0}), {bounds}), 1.0, 0.0)",
        reads=0,
        sizes=2,
        derivative=lambda g, y, t: (None,),
    )
)


def in_columns(t: Tensor, first: Tensor, width: Tensor) -> Tensor:
    """1 in some columns of a tile, 0 elsewhere: to treat some heads differently.

    Shapes: [M, N] to [M, N]; ``first`` and ``width`` as for column_range, in the tile's own columns,
    of any width. Dtypes: fp32. Cost: half an instruction an element. Paper: family 3, tiles.

        mine = in_columns(t, P, P)
        louder = where(mine, 2 * t, t)
    """
    return apply("in_columns", t, attribute=f"{size_of(first)}, {size_of(width)}")


def column_index(t: Tensor) -> Tensor:
    """The number of each column of a tile, from 0.

    Shapes: [M, N] to [M, N]. Dtypes: fp32, exact up to 2**24. Cost: half an instruction an element.
    Paper: family 3, tiles.

        place = column_index(t)
        kept = where(place < per_row(v), t, 0)
    """
    return apply("column_index", t)
