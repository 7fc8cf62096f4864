"""Family 1, elementwise: choices, activations, rotation.

Every operation works on tiles, vectors and scalars, in fp32 registers. The PyTorch function, the CuTeDSL code
and the derivative of an operation stand next to each other. The typing rule of all operations except
``as_tile`` is ``broadcast``.
"""

from __future__ import annotations

from typing import Any

from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Attribute, Operation, register
from coda_agent.primitives.lang.ops.operators import add, covers, elementwise, multiply, subtract
from coda_agent.primitives.lang.ops.tiles import join, pairs
from coda_agent.primitives.lang.ops.vectors import per_head, per_row
from coda_agent.primitives.lang.signature import Type
from coda_agent.primitives.lang.trace import Tensor, apply

TIE = "where both arguments are equal, the second has the gradient"


@elementwise(
    torch=lambda torch, c, a, b: torch.where(c != 0, a, b),
    cute="choose({0} != 0.0, {1}, {2})",
    sides=lambda torch, c, a, b: ((c != 0, a), (c == 0, b)),
    derivative=lambda g, y, c, a, b: (None, where(c, g, 0), where(c, 0, g)),
)
def where(condition, a, b):
    """Per element ``a`` where ``condition`` (a comparison or in_columns) holds, else ``b``. Both are
    computed.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 1 instruction an element, besides those of both
    values. Paper: family 1, elementwise.

        far = abs(t) > 3
        kept = where(far, 0, t)
    """


@elementwise(
    torch=lambda torch, a, b: torch.maximum(a, b),
    cute="cute.arch.fmax({0}, {1})",
    sides=lambda torch, a, b: ((a > b, a), (b > a, b)),
    derivative=lambda g, y, a, b: (where(a > b, g, 0), where(a > b, 0, g)),
    caveat=TIE,
)
def maximum(a, b):
    """The larger of ``a`` and ``b`` per element. If one is NaN, the result is the other; torch gives NaN.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 1 instruction an element.
    Paper: family 1, elementwise.

        low = maximum(t, -2)
        high = maximum(low, per_row(v))
    """


@elementwise(
    torch=lambda torch, a, b: torch.minimum(a, b),
    cute="(-cute.arch.fmax(-{0}, -{1}))",
    sides=lambda torch, a, b: ((a < b, a), (b < a, b)),
    derivative=lambda g, y, a, b: (where(a < b, g, 0), where(a < b, 0, g)),
    caveat=TIE,
)
def minimum(a, b):
    """The smaller of ``a`` and ``b`` per element; NaN as for maximum.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 2 instructions an element.
    Paper: family 1, elementwise.

        low = minimum(t, 6)
        least = minimum(low, per_column(b))
    """


@elementwise(
    torch=lambda torch, a: torch.abs(a),
    cute="cute.arch.fmax({0}, -{0})",
    sides=lambda torch, a: ((a > 0, a), (a < 0, -a)),
    derivative=lambda g, y, a: (g * ((a > 0) - (a < 0)),),
    caveat="at 0 its gradient is 0",
)
def abs(a):
    """The magnitude of ``a``.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 1 instruction an element.
    Paper: family 1, elementwise.

        size = abs(t)
        near = size < 0.5
    """


@elementwise(
    torch=lambda torch, a: torch.exp(a),
    cute="cute.math.exp({0}, fastmath=True)",
    limit=lambda torch, a: torch.where(a > 0, torch.exp(a), 0),
    derivative=lambda g, y, a: (g * y,),
)
def exp(a):
    """``e ** a``, to about 2 ulp of fp32.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 2 instructions an element, 1 of them MUFU.
    Paper: family 1, elementwise.

        half = -0.5 * t ** 2
        bell = exp(half)
    """


@elementwise(
    torch=lambda torch, a: torch.log(a),
    cute="cute.math.log({0}, fastmath=True)",
    derivative=lambda g, y, a: (g / a,),
)
def log(a):
    """Natural logarithm.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 2 instructions an element, 1 of them MUFU.
    Paper: family 1, elementwise.

        size = 1 + abs(t)
        level = log(size)
    """


@elementwise(
    torch=lambda torch, a: torch.sqrt(a),
    cute="cute.math.sqrt({0})",
    derivative=lambda g, y, a: (0.5 * g / y,),
)
def sqrt(a):
    """Square root, rounded correctly.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 15 instructions an element, 1 of them MUFU.
    Paper: family 1, elementwise.

        length = sqrt(1 + t ** 2)
        ratio = t / length
    """


@elementwise(
    torch=lambda torch, a: torch.rsqrt(a),
    cute="cute.math.rsqrt({0}, fastmath=True)",
    derivative=lambda g, y, a: (-0.5 * g * (y * y * y),),
)
def rsqrt(a):
    """``1 / sqrt(a)``, to about 2 ulp.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 1 instruction an element, a MUFU.
    Paper: family 1, elementwise.

        inverse = rsqrt(1 + t ** 2)
        ratio = inverse * t
    """


@elementwise(
    torch=lambda torch, a: torch.tanh(a),
    cute="cute.math.tanh({0})",
    fast="tanh_fast({0})",
    limit=lambda torch, a: a.sign(),
    derivative=lambda g, y, a: (g * (1 - y * y),),
)
def tanh(a):
    """Hyperbolic tangent.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 1 instruction an element, a MUFU; exact, 17 with 2
    MUFU. Paper: family 1, elementwise.

        bent = tanh(0.5 * t)
        rest = t - bent
    """


@elementwise(
    torch=lambda torch, a: torch.sin(a),
    cute="sine({0})",
    fast="sine_fast({0})",
    derivative=lambda g, y, a: (g * cos(a),),
)
def sin(a):
    """Sine of an angle in radians, accurate up to 2**20.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 6 instructions an element, 1 of them MUFU; exact,
    about 82. Paper: family 1, elementwise.

        turns = 6.2831853 * t
        wave = sin(turns)
    """


@elementwise(
    torch=lambda torch, a: torch.cos(a),
    cute="cosine({0})",
    fast="cosine_fast({0})",
    derivative=lambda g, y, a: (-(g * sin(a)),),
)
def cos(a):
    """Cosine of an angle in radians, with sin's accuracy.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 6 instructions an element, 1 of them MUFU; exact,
    about 84. Paper: family 1, elementwise.

        angle = 0.5 * t
        wave = cos(angle)
    """


@elementwise(
    torch=lambda torch, a: torch.sigmoid(a),
    cute="sigmoid({0})",
    fast="sigmoid_fast({0})",
    limit=lambda torch, a: (a > 0) * 1.0,
    derivative=lambda g, y, a: (g * (y * (1 - y)),),
)
def sigmoid(a):
    """``1 / (1 + exp(-a))``.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 3 instructions an element, 1 of them MUFU; exact, 6
    with 2 MUFU. Paper: family 1, elementwise.

        gate = sigmoid(t)
        odd = 2 * gate - 1
    """


@elementwise(
    torch=lambda torch, a: a * torch.sigmoid(a),
    cute="({0} * sigmoid({0}))",
    fast="({0} * sigmoid_fast({0}))",
    limit=lambda torch, a: torch.relu(a),
    derivative=lambda g, y, a: _silu_derivative(g, a),
)
def silu(a):
    """``a * sigmoid(a)``.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 4 instructions an element, 1 of them MUFU; exact, 7
    with 2 MUFU. Paper: family 1, elementwise.

        bent = silu(t)
        shifted = bent + 0.25
    """


@elementwise(
    torch=lambda torch, a: torch.nn.functional.gelu(a, approximate="tanh"),
    cute="gelu({0})",
    fast="gelu_fast({0})",
    limit=lambda torch, a: torch.relu(a),
    derivative=lambda g, y, a: _gelu_derivative(g, a),
)
def gelu(a):
    """GELU in its tanh form: ``0.5 * a * (1 + tanh(0.7978845608 * (a + 0.044715 * a**3)))``. Its derivative
    is not a primitive: write both with tanh, so that they share it.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 6 instructions an element, 1 of them MUFU; exact, 11
    with 2 MUFU. Paper: family 1, elementwise.

        bent = gelu(t)
        mixed = bent + 0.1 * t
    """


@elementwise(
    torch=lambda torch, x: torch.nn.functional.softplus(x),
    cute="softplus({0})",
    fast="softplus_fast({0})",
    limit=lambda torch, x: torch.relu(x),
    derivative=lambda g, y, x: (g * sigmoid(x),),
)
def softplus(x):
    """``log(1 + exp(x))``, with full relative accuracy everywhere.

    Shapes: as for operators. Dtypes: any to fp32. Cost: 8 instructions an element, 1 of them MUFU; exact, 12
    with 1 MUFU. Paper: family 1, elementwise.

        step = softplus(t)
        decay = exp(-step)
    """


def _silu_derivative(g: Any, a: Any) -> tuple[Any]:
    s: Any = sigmoid(a)
    return (g * (s + a * s * (1 - s)),)


def _gelu_derivative(g: Any, a: Any) -> tuple[Any]:
    """The gradient of gelu(a) = a * h, where h = (1 + tanh(u)) / 2 = sigmoid(2 * u), and u is the argument of
    tanh."""
    double, cubic, square = 2 * 0.7978845608028654, 2 * 0.7978845608028654 * 0.044715, a * a
    h: Any = sigmoid(a * (double + cubic * square))
    act = a * h
    return (g * (h + (act - act * h) * (double + 3 * cubic * square)),)


def _as_tile(types: tuple[Type, ...], attribute: Attribute) -> Type:
    if len(types) != 2 or types[1].kind != "tile" or not covers(types[1], types[0]):
        raise ProgramError(
            "broadcast", f"{' and '.join(map(str, types))}: the first does not cover the second"
        )
    return types[1]


def _over(torch: Any, a: Any, t: Any) -> Any:
    return torch.broadcast_to(a, t.shape)


register(
    Operation(
        "as_tile",
        _as_tile,
        _over,
        "{0}",
        lanes=lambda a: a,
        reads=1,
        derivative=lambda g, y, a, t: (g, None),
    )
)


def rope(t: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotary embedding of a tile [M, H*2P]: in each head, columns 2j and 2j + 1 are turned by the angle
    ``positions[row] * inv_freq[j]``. Backward: rope with -inv_freq.

    Shapes: ``positions`` [M], ``inv_freq`` [P]; P is a static dim. Dtypes: integers or fp32; angles and
    rotation are fp32. Cost: 7 instructions an element, 1 of them MUFU; exact, about 85.
    Paper: family 1, elementwise.

        turned = rope(t, steps, freq)
        back = rope(turned, steps, -freq)
    """
    even, odd = pairs(t)
    angle = multiply(apply("as_tile", per_row(positions), even), per_head(inv_freq))
    sine, cosine = sin(angle), cos(angle)
    turned = subtract(multiply(even, cosine), multiply(odd, sine))
    return join(turned, add(multiply(even, sine), multiply(odd, cosine)))
