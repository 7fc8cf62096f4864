"""Write random kernels that use the whole vocabulary.

Values stay of order one, and expressions are continuous in every rounded value. So rounding errors stay
small, and tests can compare two evaluations of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from merged import calls

from coda_agent import primitives
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.signature import Signature, TensorType

# Expressions with placeholders: of one value (UNARY), of two values (BINARY), of scalars, and of tiles.
UNARY = (
    "tanh({0})", "sigmoid({0})", "silu({0})", "gelu({0})", "sin({0})", "cos({0} * 2)", "abs({0})", "-{0}",
    "exp(minimum({0}, 1))", "1 / (1 + exp(-{0}))", "sqrt({0} * {0} + 1)", "rsqrt({0} ** 2 + 0.25)",
    "log(1 + {0} ** 2)", "log(abs({0}) + 0.5)", "{0} * c - 0.125", "1 - {0} / 3", "maximum({0}, 0)",
    "minimum(maximum({0}, 0), 2) ** 2", "maximum(minimum({0}, 3), -3)", "where({0} > 0.5, {0}, 0.5)",
    "where({0} >= 0, {0}, {0} * 0.25)", "where({0} < 0.25, {0} * 2, 0.5)", "where({0} <= 0, 0, {0})",
    "where({0} == {0}, {0}, 7)", "where({0} != {0}, 7, {0})", "({0} > 0) * {0}", "{0} * alpha",
    *calls(1),
)  # fmt: skip
BINARY = (
    "{0} - {1}", "({0} + {1}) * 0.5", "{1} * 0.75 + {0} * 0.25", "{0} * tanh({1})", "{0} / (1 + {1} * {1})",
    "maximum({0}, {1})", "minimum({1}, {0})", "where({0} < {1}, {1}, {0})", "where({1} <= {0}, {0}, {1})",
    "where({0} > {1}, {0} - {1}, 0)", "({0} >= {1}) * ({0} - {1})", "{0} + silu({1})", "{0} * sigmoid({1})",
    "where({1} > 0.5, {0} * ({1} - 0.5), 0)", *calls(2), *calls(3),
)  # fmt: skip
SCALARS = (
    "alpha", "tanh(alpha)", "1 / (alpha + 2)", "maximum(alpha, 0.5) * c", "exp(-alpha) + c", "cos(0.5)",
)  # fmt: skip
MASKS = (
    "where(column_index({0}) == per_row({1}), 0.5, {0})",
    "where(column_index({0}) != per_row({1}), {0}, {0} - 1)",
    "where(column_index({0}) <= per_row({1}), {0}, 0)",
    "where(column_index({0}) < 12, {0}, 0.5)",
    "where(column_index({0}) >= {0}.columns - 5, 0.25, {0})",
    "{0} + column_index({0}) / {0}.columns",
)
HEAD_MASKS = ("where(in_columns({0}, P, P), {0}, 0.5)", "{0} * (2 - in_columns({0}, 0, P))")
ROW_REDUCTIONS = (
    "row_sums({0}) / {0}.columns", "row_sums({0} * {0}) / {0}.columns", "row_max({0})", "row_abs_max({0})",
    "row_max(-{0})", "row_logsumexp({0})", "row_logsumexp({0} * 8) / 8",
    "row_sums(exp(minimum({0}, 1))) / 64",
)  # fmt: skip
COLUMN_REDUCTIONS = (
    "column_sums({0}) / {0}.rows", "column_sums({0} * {0}) / {0}.rows", "column_max({0})",
    "column_abs_max({0})", "column_max(-{0})", "column_sums(cos({0})) / {0}.rows",
)  # fmt: skip
VECTOR_DTYPES = ("fp32", "fp32", "bf16", "fp16")
TILE_DTYPES = ("bf16", "bf16", "fp16", "fp32")
HALF = {"one": "half", "double": "one"}
DOUBLE = {"half": "one", "one": "double"}
FACTOR = {"half": 1, "one": 2, "double": 4}
MOVES = (
    "unary", "unary", "binary", "binary", "binary", "pairs", "join", "mask", "row", "row", "column", "select",
    "vector", "vector", "rope", "heads",
)  # fmt: skip

Init = tuple[Any, ...]


class Space(NamedTuple):
    """The shapes of tiles that belong together: one height and three widths. The width "half" has ``base``
    columns, "one" has twice as many, and "double" has four times as many."""

    rows: str
    base: str

    def columns(self, width: str) -> str:
        return str(Dim.parse(f"{FACTOR[width]}*{self.base}"))

    @property
    def heads(self) -> str:
        """The number of heads in a tile of width one, where a head has 2*P columns; "" if the tile has no
        heads."""
        return self.base.removesuffix("*P") if self.base.endswith("*P") else ""


class Tile(NamedTuple):
    """A tile. ``home``: the step that computes the tile, -1 for an input; ``pure``: head_sums may reduce the
    tile."""

    name: str
    space: Space
    width: str
    home: int
    pure: bool = False


class Vector(NamedTuple):
    """A vector whose values are final after step ``after``."""

    name: str
    length: str
    after: int


class Statistic(NamedTuple):
    """A statistic per head; a head is ``period`` columns wide."""

    name: str
    space: Space
    period: str
    home: int


@dataclass
class Writer:
    """A kernel under construction."""

    random: Random
    bold: float = 0.03  # probability of breaking a rule, after which the tracer must refuse the kernel
    inputs: dict[str, TensorType] = field(default_factory=dict)
    inits: dict[str, Init] = field(default_factory=dict)
    grains: dict[str, int] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)  # names by expression
    tiles: list[Tile] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)
    statistics: list[Statistic] = field(default_factory=list)
    spaces: list[Space] = field(default_factory=list)
    operands: dict[str, str] = field(default_factory=dict)  # dtypes of the tiles that a gemm reads
    outputs: dict[str, TensorType] = field(default_factory=dict)
    updates: dict[str, str] = field(default_factory=dict)
    gemms: int = 0
    loads: int = 0
    offsets: str = ""  # the input with each expert's first row, if the rows belong to experts
    grouped: set[int] = field(default_factory=set)  # the steps whose GEMM has one matrix per expert

    # Parts

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def input(self, shape: tuple[str, ...], dtype: str, init: Init, name: str = "") -> str:
        name = name or f"in_{len(self.inputs)}"
        self.inputs[name] = TensorType(tuple(Dim.parse(d) for d in shape), dtype)
        self.inits[name] = init
        return name

    def line(self, expression: str) -> str:
        """Return the name of an expression. Equal expressions share a name, because equal values cannot be
        two outputs."""
        return self.lines.setdefault(expression, f"t{len(self.lines)}")

    def recent(self, values: list[Any]) -> Any:
        return self.random.choice(values[-6:])

    def tile(self, **wanted: Any) -> Tile | None:
        """Return a recent tile whose fields have these values, or None."""
        found = [t for t in self.tiles if all(getattr(t, k) == v for k, v in wanted.items())]
        return self.recent(found) if found else None

    def vector(self, length: str, before: int) -> Vector:
        """Return a vector that is final before step ``before``. With probability ``bold``, the vector may not
        be final yet."""
        known = [v for v in self.vectors if v.length == length]
        ready = [v for v in known if v.after < before or self.chance(self.bold)]
        if ready and self.chance(0.7):
            return self.recent(ready)
        low, high = self.random.choice([(0.5, 1.5), (-1.0, 1.0)])
        made = Vector(self.input((length,), self.vector_dtype(length), ("uniform", low, high)), length, -1)
        self.vectors.append(made)
        return made

    def vector_dtype(self, length: str) -> str:
        """Choose a vector's dtype. If rows belong to experts, a vector along the rows must not be 16-bit."""
        wide = self.offsets and length == "M" and not self.chance(self.bold)
        return "fp32" if wide else self.random.choice(VECTOR_DTYPES)

    def by_experts(self, rows: str) -> bool:
        return bool(self.offsets) and rows == "M" and self.chance(0.7)

    def indices(self, space: Space) -> str:
        """Add an integer input with one target per row; some targets are out of range."""
        dtype = self.random.choice(("int32", "int64"))
        return self.input((space.rows,), dtype, ("integers", space.columns("one")))

    # Steps

    def first_gemm(self) -> None:
        if self.chance(0.2):  # rows are sorted by expert, and tiles have no heads
            self.offsets = self.input(("E + 1",), "int32", ("offsets", "M"))
        space = Space("M", "F" if self.offsets else self.random.choice(("F", "F", "H*P")))
        self.spaces.append(space)
        self.gemms, n = 1, space.columns("one")
        if self.chance(0.12):
            self.grains["K"] = 16
            a = self.input(("M", "K"), "fp8_e4m3", ("uniform", -2.0, 2.0))
            b = self.input((n, "K"), "fp8_e4m3", ("normal", "K"))
            scale = [f"per_row({self.vector('M', 0).name})", f"per_column({self.vector(n, 0).name})", "alpha"]
            scales = " * ".join(self.random.sample(scale, self.random.randint(1, 3)))
            product = f"gemm({a}, {b}.mT) * {scales}"
        else:
            product = self.product("M", "K", n)
        self.tiles.append(Tile(self.line(product), space, "one", 0, pure=True))

    def product(self, rows: str, inner: str, columns: str) -> str:
        dtype = self.random.choice(("bf16", "bf16", "fp16"))
        if self.by_experts(rows):
            gathers = self.chance(0.4)
            a = self.input(("T" if gathers else rows, inner), dtype, ("normal", "1"))
            index = self.input((rows,), "int32", ("rows", "T")) if gathers else ""
            return self.experts_product(a, inner, columns, dtype, index)
        if self.chance(0.25):
            a = self.input((inner, rows), dtype, ("normal", "1")) + ".mT"
            self.grains["M"] = 8
        else:
            a = self.input((rows, inner), dtype, ("normal", "1"))
        return f"gemm({a}, {self.weight(inner, columns, dtype)})"

    def experts_product(self, rows: str, inner: str, columns: str, dtype: str, index: str = "") -> str:
        """Return an expression that multiplies the rows of each expert by the expert's own matrix. If
        ``index`` is given, the input of this name selects the rows."""
        self.grouped.add(self.gemms - 1)
        if self.chance(0.5):
            own = self.input(("E", columns, inner), dtype, ("normal", inner)) + ".mT"
        else:
            own = self.input(("E", inner, columns), dtype, ("normal", inner))
        return f"gemm({rows}, {own}, {self.offsets}{index and f', {index}'})"

    def own_product(self, source: Tile, dtype: str) -> None:
        """Add an output with one matrix per expert. The matrix is a product of two tiles, of which only the
        expert's rows count. No other expression reads this output."""
        other = Tile(self.input(("M", "G"), dtype, ("normal", "M")), Space("M", "G"), "half", -1)
        a, b = self.random.sample([source, other], 2)
        name = self.line(f"gemm({a.name}.mT, {b.name}, {self.offsets})")
        shape = ("E", a.space.columns(a.width), b.space.columns(b.width))
        kept = self.random.choice(("bf16", "fp16", "fp32", "fp32"))
        self.outputs[name] = TensorType(tuple(map(Dim.parse, shape)), kept)

    def weight(self, inner: str, columns: str, dtype: str) -> str:
        if self.chance(0.5):
            return self.input((columns, inner), dtype, ("normal", inner)) + ".mT"
        return self.input((inner, columns), dtype, ("normal", inner))

    def second_gemm(self) -> None:
        source = self.recent([t for t in self.tiles if t.home == 0])
        inner, dtype = source.space.columns(source.width), self.random.choice(("bf16", "bf16", "fp16"))
        dtype = self.operands.get(source.name, dtype)
        base = "G" if self.offsets else self.random.choice(("G", "G", "J*P"))
        more = ("gradient", "gradient") if self.offsets else ()
        form = self.random.choice(("chain", "chain", "chain", "beside", "gradient", "product", *more))
        self.gemms += 1
        if form != "beside":
            self.operands[source.name] = dtype
        if form == "gradient" and self.by_experts(source.space.rows):
            return self.own_product(source, dtype)
        if form == "beside":
            space = source.space
            product = self.product(space.rows, "L", space.columns("one"))
        elif form == "gradient":  # like the gradient of a weight: [inner, N], summed over rows
            space = Space(inner, base)
            rows = source.space.rows
            other = self.input((rows, space.columns("one")), dtype, ("normal", rows))
            product = f"gemm({source.name}.mT, {other})"
        elif form == "product" and source.width == "one":
            space = Space(f"2*{base}", source.space.base)
            other = self.input((source.space.rows, space.rows), dtype, ("normal", source.space.rows))
            product = f"gemm({other}.mT, {source.name})"
        else:
            space = Space(source.space.rows, base)
            columns = space.columns("one")
            if self.by_experts(space.rows):
                product = self.experts_product(source.name, inner, columns, dtype)
            else:
                product = f"gemm({source.name}, {self.weight(inner, columns, dtype)})"
        name = self.line(product)
        made = Tile(name, space, "one", 1, pure=True)
        if self.chance(0.6):
            scale = self.vector(space.rows, 1)
            made = made._replace(name=self.line(f"{name} * per_row({scale.name})"))
        self.spaces.append(space)
        self.tiles.append(made)

    # Moves

    def operand(self, t: Tile) -> tuple[str, int, bool]:
        """Choose an operand for a tile. Return its text, the step that computes it, and whether head_sums may
        reduce it."""
        kinds = ["tile", "tile", "row", "column", "load", "scalar", "heads", "heads"]
        kind = self.random.choice(kinds)
        other = self.tile(space=t.space, width=t.width) or t
        if kind == "tile" and other != t:
            return other.name, other.home, other.pure
        if kind in ("load", "tile") and self.loads < 4:
            return self.load(t.space, t.width), -1, False
        if kind == "scalar":
            return f"({self.random.choice(SCALARS)})", -1, True
        if kind == "heads" and t.space.heads and t.width != "double":
            return self.per_head(t)
        axis = "row" if kind == "row" else "column"
        length = t.space.rows if axis == "row" else t.space.columns(t.width)
        text = f"per_{axis}({self.vector(length, t.home).name})"
        if self.chance(0.25):
            text = "(" + self.random.choice(UNARY).format(text) + ")"
        return text, -1, axis == "row" or t.width == "one"

    def load(self, space: Space, width: str) -> str:
        self.loads += 1
        dtype = self.random.choice(TILE_DTYPES)
        name = self.input((space.rows, space.columns(width)), dtype, ("normal", "1"))
        # A later expression may then use no tile but this input. If a step uses the value of the expression,
        # the step computes it; otherwise the expression belongs to no step.
        if self.chance(self.bold * 3):
            self.tiles.append(Tile(name, space, width, -1))
        return name

    def per_head(self, t: Tile) -> tuple[str, int, bool]:
        own = [s for s in self.statistics if s.space == t.space and s.home == t.home]
        if own and t.width == "one" and self.chance(0.5):
            return f"per_head({self.recent(own).name})", t.home, False
        period = "P" if t.width == "half" or self.chance(0.3) else "2*P"
        paired = t.width == "half" and self.chance(0.4)
        wide = "2*P" if paired else period
        if self.chance(0.5):
            name = self.vector(wide, t.home).name
        else:
            dtype = self.random.choice(TILE_DTYPES)
            name = self.input((t.space.rows, wide), dtype, ("uniform", -1.0, 1.0))
        text = f"per_head({name})"
        return (f"pairs({text})[{self.random.randint(0, 1)}]" if paired else text), -1, False

    def move_unary(self, t: Tile) -> None:
        name = self.line(self.random.choice(UNARY).format(t.name))
        self.tiles.append(t._replace(name=name))

    def move_binary(self, t: Tile) -> None:
        text, home, pure = self.operand(t)
        home = max(home, t.home)
        name = self.line(self.random.choice(BINARY).format(t.name, text))
        pure = pure and t.pure and self.tile_home(text) in (-1, home)
        self.tiles.append(t._replace(name=name, home=home, pure=pure and t.home == home))

    def tile_home(self, name: str) -> int:
        return next((t.home for t in self.tiles if t.name == name), -1)

    def move_pairs(self, t: Tile) -> None:
        if t.width in HALF:
            for side in range(2):
                name = self.line(f"pairs({t.name})[{side}]")
                self.tiles.append(t._replace(name=name, width=HALF[t.width]))

    def move_join(self, t: Tile) -> None:
        if t.width in DOUBLE:
            other = self.tile(space=t.space, width=t.width, home=t.home) or t
            name = self.line(f"join({t.name}, {other.name})")
            self.tiles.append(t._replace(name=name, width=DOUBLE[t.width], pure=t.pure and other.pure))

    def move_mask(self, t: Tile) -> None:
        heads = HEAD_MASKS if t.space.heads and t.width != "half" else ()
        text = self.random.choice((*MASKS, *heads))
        index = self.indices(t.space) if "{1}" in text else ""
        self.tiles.append(t._replace(name=self.line(text.format(t.name, index)), pure=False))

    def move_rope(self, t: Tile) -> None:
        if t.space.heads and t.width != "half":
            positions = self.input((t.space.rows,), self.random.choice(("int32", "int64")), ("count", 60))
            inverse = self.input(("P",), "fp32", ("geometric", 1.0, 1e-3))
            name = self.line(f"rope({t.name}, {positions}, {inverse})")
            self.tiles.append(t._replace(name=name, pure=False))

    def move_heads(self, t: Tile) -> None:
        """Add a statistic of heads, arithmetic on the statistic, and a tile that uses the result."""
        if not t.space.heads or t.width != "one" or not (t.pure or self.chance(self.bold)):
            return
        period = self.random.choice(("P", "2*P", "2*P"))
        expression = self.random.choice(("{0} * {0}", "{0}", "abs({0})")).format(t.name)
        over = self.random.choice(("head_sums({0}, {1}) / ({1})", "head_abs_max({0}, {1})"))
        mean = self.line(over.format(expression, period))
        made = self.line(self.random.choice(("rsqrt(abs({0}) + 0.5)", "{0}", *UNARY)).format(mean))
        self.statistics.append(Statistic(made, t.space, period, t.home))
        name = self.line(f"{t.name} * per_head({made})")
        self.tiles.append(t._replace(name=name, pure=False))

    def move_row(self, t: Tile) -> None:
        name = self.line(self.random.choice(ROW_REDUCTIONS).format(t.name))
        self.vectors.append(Vector(name, t.space.rows, t.home))

    def move_select(self, t: Tile) -> None:
        """Add a vector of the values that targets select from a tile. Sometimes the vector is the tile's
        log-sum-exp minus these values."""
        if t.width == "one" or self.chance(self.bold):
            text = f"row_select({t.name}, {self.indices(t.space)})"
            text = f"row_logsumexp({t.name}) - {text}" if self.chance(0.4) else text
            self.vectors.append(Vector(self.line(text), t.space.rows, t.home))

    def move_column(self, t: Tile) -> None:
        if t.home in self.grouped and not self.chance(self.bold):
            return  # the reduction would add rows of several experts
        name = self.line(self.random.choice(COLUMN_REDUCTIONS).format(t.name))
        self.vectors.append(Vector(name, t.space.columns(t.width), t.home))

    def move_vector(self, t: Tile) -> None:
        """Add a vector that is computed from other vectors, between steps."""
        made = [v for v in self.vectors if v.after >= 0]
        v = self.recent(made) if made else self.vector(t.space.rows, 0)
        if self.chance(0.5):
            other = self.vector(v.length, v.after + 1)
            other = self.vector(v.length, v.after + 1) if other == v else other
            text = self.random.choice(BINARY).format(v.name, other.name)
        else:
            other, text = v, self.random.choice(UNARY).format(v.name)
        if self.chance(0.3):
            text = f"({text}) * ({self.random.choice(SCALARS)})"
        self.vectors.append(Vector(self.line(text), v.length, max(v.after, other.after)))

    # Outputs

    def update(self) -> None:
        """Add an output that overwrites an input's buffer."""
        reduced = [v for v in self.vectors if v.after >= 0]
        if reduced and self.chance(0.4):
            v = self.recent(reduced)
            name, shape = v.name, [v.length]
        else:
            t = self.recent([t for t in self.tiles if t.home >= 0])
            name, shape = t.name, [t.space.rows, t.space.columns(t.width)]
        dtype = self.vector_dtype(shape[0]) if len(shape) == 1 else self.random.choice(TILE_DTYPES)
        old = self.input(tuple(shape), dtype, ("normal", "1"))
        new = self.line(f"{old} * 0.5 + {name}")
        self.outputs[new] = self.inputs[old]
        self.updates[new] = old

    def output(self, value: Tile | Vector | Statistic) -> None:
        last = isinstance(value, Tile) and value.home == self.gemms - 1  # no later step may read an fp8 tile
        eights = ("fp8_e4m3", "fp8_e5m2") if last else ()
        dtype = self.operands.get(value.name) or self.random.choice(("bf16", "bf16", "fp16", "fp32", *eights))
        if isinstance(value, Vector) and self.offsets:
            dtype = self.vector_dtype(value.length)
        shape: tuple[str, ...]
        match value:
            case Tile(name, space, width):
                shape = (space.rows, space.columns(width))
            case Vector(name, length):
                shape = (length,)
            case Statistic(name, space, period):
                shape = (space.rows, str(Dim.parse(space.columns("one")).divided(Dim.parse(period))))
        self.outputs[name] = TensorType(tuple(Dim.parse(d) for d in shape), dtype)

    def cut(self) -> None:
        """Add an output that is a column range of a tile with heads."""
        whole = [t for t in self.tiles if t.home >= 0 and t.space.heads and t.width == "one"]
        if whole:
            t = self.recent(whole)
            name = self.line(f"column_range({t.name}, P, P)")
            dtype = self.random.choice(("bf16", "fp16", "fp32"))
            self.outputs[name] = TensorType((Dim.parse(t.space.rows), Dim.parse("P")), dtype)

    def finish(self) -> None:
        """Choose the outputs: the last tile of each step, and a few other values."""
        made: list[Any] = [t for t in self.tiles if t.home >= 0 or self.chance(0.5)]
        named = set(self.lines.values())
        vectors: list[Any] = [v for v in self.vectors if v.name in named]
        chosen = [t for k in range(self.gemms) if (t := next((t for t in made[::-1] if t.home == k), None))]
        rest = [v for v in made + vectors + self.statistics if v.name in named]
        chosen += self.random.sample(rest, min(len(rest), self.random.randint(1, 3)))
        chosen += vectors[-1:] if self.chance(0.5) else []
        if self.chance(0.2):
            self.update()
        if self.chance(0.3):
            self.cut()
        for value in chosen:
            if value.name not in self.outputs:
                self.output(value)
        if "P" in self.dims():  # an input whose shape determines P
            self.input(("P",), "fp32", ("geometric", 1.0, 1e-3))

    def write(self, moves: int) -> None:
        self.input((), "fp32", ("uniform", 0.5, 1.5), "alpha")
        self.first_gemm()
        for _ in range(moves):
            self.extend()
        if self.chance(0.7 if self.offsets else 0.4):
            self.second_gemm()
            for _ in range(moves // 2 + 1):
                self.extend()
        self.finish()

    def extend(self) -> None:
        move = self.random.choice(MOVES)
        getattr(self, f"move_{move}")(self.recent(self.tiles))

    def dims(self) -> set[str]:
        return {n for t in (*self.inputs.values(), *self.outputs.values()) for d in t.shape for n in d.names}

    @property
    def signature(self) -> Signature:
        """The signature of the kernel as written so far."""
        used = self.dims()
        return Signature(
            "random_program",
            tuple(sorted(used)),
            self.inputs,
            {f"out_{name}": t for name, t in self.outputs.items()},
            {"c": 0.75},
            ("P",) if "P" in used else (),
            {f"out_{new}": old for new, old in self.updates.items()},
        )

    @property
    def source(self) -> str:
        """The text of the kernel file."""
        declared = self.signature
        parameters = ", ".join([*declared.inputs, *declared.constants, *declared.static])
        lines = [f"{name} = {text}" for text, name in self.lines.items()]
        returned = ", ".join(f"'out_{name}': {name}" for name in self.outputs)
        lines.append(f"return {{{returned}}}")
        body = "".join(f"    {line}\n" for line in lines)
        imports = ", ".join(primitives.__all__)
        return f"from primitives import {imports}\n\n\n@kernel\ndef k({parameters}):\n{body}"
