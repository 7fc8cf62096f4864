"""Simplify expressions while they are added to a trace. The rules hold for all expressions, not only for
derivatives.

Each rule is exact for real numbers, at every size. Some rules do arithmetic on vectors before the vectors are
spread over tiles. Other rules apply a factor after a sum or matmul instead of before it, if the factor is
constant along a row or column. Another rule replaces ``pairs(join(a, b))`` by ``a`` and ``b``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from coda_agent.primitives.lang.ir import OPERATIONS, Node
from coda_agent.primitives.lang.signature import Signature, Type
from coda_agent.primitives.lang.trace import Trace

FOLDED: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "negative": lambda a: -a,
}
# for each operation, the right argument that leaves the left argument unchanged
UNIT = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "divide": 1.0}
EXTREMA = {"greater": "maximum", "less": "minimum"}
SPREADS = {"row": "per_row", "column": "per_column", "spread": "per_head"}


def reached(nodes: Sequence[Node], roots: Iterable[int], stop: Collection[int] = ()) -> list[int]:
    """The nodes ``roots`` and all nodes on which they depend, in order. What a node of ``stop`` depends on
    does not count."""
    seen, pending = set[int](), list(roots)
    while pending:
        index = pending.pop()
        if index not in seen:
            seen.add(index)
            pending += () if index in stop else nodes[index].args
    return sorted(seen)


class Factors(NamedTuple):
    """A value in three parts: ``core`` times the factors ``above``, divided by the factors ``below``. Each
    factor is a vector or scalar. ``core`` is a tile, or None if the value has only factors."""

    core: int | None
    above: tuple[int, ...] = ()
    below: tuple[int, ...] = ()

    def times(self, other: Factors, core: int | None) -> Factors:
        return Factors(core, self.above + other.above, self.below + other.below)


class Simplifier(Trace):
    """A trace that adds a simpler equivalent node in place of a given node, if a rule finds one.

    ``moves``: whether a row factor of a matmul's left operand may move. The factor moves to the matmul's
    result or, if the operand is a transpose, to the right operand. ``products``: the matmuls that the
    backward computes anyway, by their operands. ``turned`` uses these matmuls to compute sums over the
    results of other matmuls. ``used``: the optional simplifications ("moves", "turns") that had an effect.
    """

    def __init__(self, signature: Signature, moves: bool = False):
        super().__init__(signature)
        self.moves = moves
        self.used: set[str] = set()
        self.products: dict[tuple[int | None, ...], int] = {}

    def line(self) -> None:
        """Return None, because no line of a kernel file creates the nodes of this trace."""

    def add(self, node: Node) -> int:
        simpler = self.simpler(node)
        return super().add(node) if simpler is None else simpler

    def simpler(self, node: Node) -> int | None:
        """Return a simpler node with the same value; None if no rule applies."""
        op = node.op
        if op in ("even", "odd"):
            source = self.nodes[node.args[0]]
            return source.args[op == "odd"] if source.op == "join" else None
        if op in ("row_sums", "column_sums"):
            kind = op.removesuffix("_sums")
            scaled = self.sums(node, kind)
            return self.turned(node.args[0], kind) if scaled is None else scaled
        if op == "gemm":
            return self.product(*node.args)
        if op == "where":
            chosen = self.chosen(node)
            return self.unscaled(node) if chosen == node else self.add(chosen)
        if (reads := OPERATIONS[op].reads) is not None:
            shapes = (self.shaped(a) for a in node.args[reads:])
            other = node._replace(args=(*node.args[:reads], *shapes))
            return None if other == node else self.add(other)
        if OPERATIONS[op].cute and not OPERATIONS[op].lanes:
            return self.arithmetic(node)
        return None

    def chosen(self, node: Node) -> Node:
        """Simplify the branches of ``where(a > b, x, y)``: within x, replace maximum(a, b) by a; within y,
        replace it by b. If the condition is a < b, replace minimum(a, b) in the same way."""
        condition, *branches = node.args
        compared = self.nodes[condition]
        extremum = EXTREMA.get(compared.op)
        if extremum is None:
            return node
        extrema = {self.at(Node(extremum, args)) for args in (compared.args, compared.args[::-1])}
        values = zip(branches, compared.args, strict=True)
        return node._replace(args=(condition, *(self.instead(b, extrema, value) for b, value in values)))

    def unscaled(self, node: Node) -> int | None:
        """Rewrite ``where(c, number * vector, 0)`` as ``where(c, vector, 0) * number``, so that no kernel has
        to scale the vector."""
        condition, value, other = node.args
        spread = self.nodes[value]
        if spread.op not in SPREADS.values() or self.constant(other) != 0:
            return None
        vector = self.nodes[spread.args[0]]
        if vector.op != "multiply" or self.constant(vector.args[0]) is None:
            return None
        bare = self.add(spread._replace(args=(vector.args[1],)))
        return self.add(Node("multiply", (self.add(Node("where", (condition, bare, other))), vector.args[0])))

    def at(self, node: Node) -> int:
        """The index of a node, or -1 if the trace does not contain it."""
        return self.nodes.index(node) if node in self.nodes else -1

    def instead(self, index: int, replaced: set[int], value: int) -> int:
        """Rewrite an elementwise expression, with ``value`` in place of the nodes ``replaced``."""
        if index in replaced:
            return value if self.types[value] in (self.types[index], Type("scalar")) else index
        node = self.nodes[index]
        if not OPERATIONS[node.op].cute:
            return index
        args = tuple(self.instead(a, replaced, value) for a in node.args)
        return index if args == node.args else self.add(node._replace(args=args))

    def shaped(self, index: int) -> int:
        """Return a tile with the shape of the tile ``index``, for an operation that uses only the shape. If
        an input has this shape, return the input, because an input needs no computation."""
        node = self.nodes[index]
        if node.op in ("even", "odd"):
            return self.add(Node("even", (self.shaped(node.args[0]),)))
        same = (i for i, n in enumerate(self.nodes) if n.op == "input" and self.types[i] == self.types[index])
        return next(same, index)

    # Elementwise

    def constant(self, index: int) -> float | None:
        node = self.nodes[index]
        return float(node.attribute) if node.op == "constant" and node.attribute is not None else None

    def is_zero(self, index: int) -> bool:
        node = self.nodes[index]
        return self.constant(index) == 0 or (node.op == "multiply" and any(map(self.is_zero, node.args)))

    def arithmetic(self, node: Node) -> int | None:
        values = [self.constant(a) for a in node.args]
        if node.op in FOLDED and None not in values:
            return self.number(FOLDED[node.op](*values))
        if (unchanged := self.neutral(node)) is not None:
            return unchanged
        kinds = {self.types[a].kind for a in node.args}
        if node.op in ("multiply", "divide", "negative") and kinds <= {"vector", "head", "scalar"}:
            return self.monomial(node)
        if node.op == "multiply" and kinds == {"scalar", "tile"}:
            return self.scaled_spread(*sorted(node.args, key=lambda a: self.types[a].kind != "scalar"))
        if node.op == "add":
            if (doubled := self.doubled(*node.args)) is not None:
                return doubled
            a, b = (self.nodes[i] for i in node.args)
            if a.op == b.op == "join":
                halves = (self.add(Node("add", pair)) for pair in zip(a.args, b.args, strict=True))
                return self.add(Node("join", tuple(halves)))
            if a.op == "add" and b.op == "join":
                for joined, rest in (a.args, a.args[::-1]):
                    if self.nodes[joined].op == "join":
                        return self.add(Node("add", (rest, self.add(Node("add", (joined, node.args[1]))))))
        return self.bare(node) or self.together(node)

    def neutral(self, node: Node) -> int | None:
        """The argument that equals the result, such as x for x * 1 or x + 0; None if no argument does."""
        if node.op == "negative":
            argument = self.nodes[node.args[0]]
            return argument.args[0] if argument.op == "negative" else None
        if node.op not in UNIT:
            return None
        a, b = node.args
        same = self.types[a].kind == self.types[b].kind
        if self.constant(b) == UNIT[node.op] or (node.op in ("add", "subtract") and same and self.is_zero(b)):
            return a
        if node.op == "add" and (self.constant(a) == 0 or (same and self.is_zero(a))):
            return b
        return b if node.op == "multiply" and self.constant(a) == 1 else None

    def bare(self, node: Node) -> int | None:
        """Remove ``as_tile`` from arguments if another argument is already a tile."""
        tiles = [a for a in node.args if self.types[a].kind == "tile" and self.nodes[a].op != "as_tile"]
        if not tiles or not any(self.nodes[a].op == "as_tile" for a in node.args):
            return None
        bare = (self.nodes[a].args[0] if self.nodes[a].op == "as_tile" else a for a in node.args)
        return self.add(Node(node.op, tuple(bare)))

    def together(self, node: Node) -> int | None:
        """Rewrite arithmetic on spread vectors: compute on the vectors, then spread the result."""
        kinds = {self.types[a].kind for a in node.args} - {"scalar"}
        spread = SPREADS.get(next(iter(kinds))) if len(kinds) == 1 else None
        sources = [a for a in node.args if self.types[a].kind != "scalar"]
        if spread is None or any(self.nodes[a].op != spread for a in sources):
            return None
        bare = (a if self.types[a].kind == "scalar" else self.nodes[a].args[0] for a in node.args)
        return self.add(Node(spread, (self.add(Node(node.op, tuple(bare))),)))

    def doubled(self, a: int, b: int) -> int | None:
        """Rewrite b + b as 2 * b, and (b + c) + b as c + 2 * b."""
        if a == b:
            return self.add(Node("multiply", (self.number(2.0), a)))
        terms = self.nodes[a].args if self.nodes[a].op == "add" else ()
        if b not in terms:
            return None
        twice = self.add(Node("multiply", (self.number(2.0), b)))
        return self.add(Node("add", (terms[terms[0] == b], twice)))

    def scaled_spread(self, scalar: int, tile: int) -> int | None:
        """Rewrite scalar * (spread vector * tile) as (scalar * spread vector) * tile. The scalar then
        multiplies the vector, which has fewer elements than the tile."""
        node = self.nodes[tile]
        for place, argument in enumerate(node.args if node.op == "multiply" else ()):
            if self.nodes[argument].op in SPREADS.values():
                scaled = self.add(Node("multiply", (scalar, argument)))
                return self.add(Node("multiply", (scaled, node.args[1 - place])))
        return None

    def monomial(self, node: Node) -> int | None:
        """Cancel factors in products and quotients of vectors. The result is a number times factors, divided
        by other factors. Return None if the number is 0, or if no vector would remain."""
        number, powers = self.powers(node)
        above = [f for f, power in powers.items() for _ in range(power)]
        below = [f for f, power in powers.items() for _ in range(-power)]
        remaining = {self.types[f].kind for f in (*above, *below)}
        if not number or not {self.types[a].kind for a in node.args} - {"scalar"} <= remaining:
            return None
        if number != 1 or not above:
            above.insert(0, super().add(Node("constant", (), number)))
        numerator = self.chain(above)
        return super().add(Node("divide", (numerator, self.chain(below)))) if below else numerator

    def chain(self, factors: list[int]) -> int:
        """Multiply values in this order, without simplification."""
        product = factors[0]
        for factor in factors[1:]:
            product = super().add(Node("multiply", (product, factor)))
        return product

    def powers(self, node: Node) -> tuple[float, dict[int, int]]:
        """Split a product or quotient of vectors and scalars into its constant and the powers of its other
        factors."""
        number, totals = -1.0 if node.op == "negative" else 1.0, dict[int, int]()
        for place, argument in enumerate(node.args):
            own, sign = self.nodes[argument], -1 if node.op == "divide" and place else 1
            if own.op in ("multiply", "divide", "negative"):
                inner, powers = self.powers(own)
            else:
                known = self.constant(argument)
                inner, powers = (1.0, {argument: 1}) if not known else (known, {})
            number = number * inner if sign > 0 else number / inner
            for factor, power in powers.items():
                totals[factor] = totals.get(factor, 0) + sign * power
        return number, dict(sorted(totals.items()))

    def number(self, value: float) -> int:
        return self.add(Node("constant", (), value + 0.0))

    # Factors

    def factors(self, index: int, kind: str) -> Factors:
        """Split a value into a core and factors. A factor is a scalar, or a vector with one value per row
        (``kind`` "row") or column (``kind`` "column")."""
        node, own = self.nodes[index], self.types[index].kind
        if own == "scalar" or (own == kind and node.op == SPREADS[kind]):
            return Factors(None, (index if own == "scalar" else node.args[0],))
        if own != "tile" or node.op not in ("multiply", "divide", "negative"):
            return Factors(index)
        if node.op == "negative":
            inner = self.factors(node.args[0], kind)
            return Factors(inner.core, (*inner.above, self.number(-1.0)), inner.below)
        left, right = (self.factors(a, kind) for a in node.args)
        if node.op == "divide":
            right = Factors(right.core, right.below, right.above)
        if not (left.above or left.below or right.above or right.below):
            return Factors(index)
        if left.core is None and right.core is None:
            return Factors(index)
        core: int | None
        if left.core is not None and right.core is not None:
            core = self.add(Node(node.op, (left.core, right.core)))
        else:
            core = right.core if left.core is None and node.op == "multiply" else left.core
        if core is None or self.types[core].kind != "tile":
            return Factors(index)
        return left.times(right, core)

    def gathered(self, factors: Factors) -> tuple[int | None, int | None]:
        """Cancel each factor that is both above and below. Return the product of the remaining factors above,
        and the product of the remaining factors below. A product is None if no factor remains."""
        above, below = list(factors.above), list(factors.below)
        for factor in factors.above:
            if factor in below:
                above.remove(factor)
                below.remove(factor)
        return self.all_of(above), self.all_of(below)

    def all_of(self, factors: list[int]) -> int | None:
        product: int | None = None
        for factor in sorted(factors):
            product = factor if product is None else self.add(Node("multiply", (product, factor)))
        return product

    def scaled(self, index: int, factors: Factors, spread: str = "") -> int:
        """Multiply a value by ``factors``. ``spread``: the operation that spreads a vector over the value, if
        the value is a tile."""
        for op, factor in zip(("multiply", "divide"), self.gathered(factors), strict=True):
            if factor is not None:
                wide = spread and self.types[factor].kind == "vector"
                index = self.add(Node(op, (index, self.add(Node(spread, (factor,))) if wide else factor)))
        return index

    def sums(self, node: Node, kind: str) -> int | None:
        found = self.factors(node.args[0], kind)
        if found.core is None or found.core == node.args[0]:
            return None
        return self.scaled(self.add(Node(node.op, (found.core,))), found)

    def product(self, a: int, b: int, *offsets: int) -> int | None:
        """Rewrite a matmul whose operand has row or column factors, so that the factors multiply the result
        or the other operand. Return the new value; None if no factor can move. In a matmul with offsets, only
        row factors of the left operand can move."""
        turned = self.nodes[b].op == "transpose"
        right = self.nodes[b].args[0] if turned else b
        found = self.factors(right, "row" if turned else "column")
        if found.core not in (None, right) and not offsets:
            core = self.add(Node("transpose", (found.core,))) if turned else found.core
            return self.scaled(self.add(Node("gemm", (a, core))), found, "per_column")
        # With an index, the rows of the result are gathered from ``a``.
        # So a row factor of ``a`` does not have one value for each of these rows.
        if not self.moves or len(offsets) > 1:
            return None
        turned = self.nodes[a].op == "transpose"
        left = self.nodes[a].args[0] if turned else a
        found = self.factors(left, "row")
        if found.core in (None, left):
            return None
        self.used.add("moves")
        if not turned:
            return self.scaled(self.add(Node("gemm", (found.core, b, *offsets))), found, "per_row")
        if self.nodes[b].op == "transpose":
            return None
        core = self.add(Node("transpose", (found.core,)))
        return self.add(Node("gemm", (core, self.scaled(b, found, "per_row"), *offsets)))

    def turn(self, *groups: Mapping[Any, int]) -> Iterator[dict[Any, int]]:
        """Rebuild the nodes that are the values of the dicts ``groups``, and return dicts with the new nodes.
        Where possible, the new nodes compute sums over a matmul's result from another matmul (see
        ``turned``)."""
        own = reached(self.nodes, (i for group in groups for i in group.values()))
        self.products = {self.nodes[i].args: i for i in own if self.nodes[i].op == "gemm"}
        place: dict[int, int] = {}
        for index in own:
            node = self.nodes[index]
            place[index] = self.add(node._replace(args=tuple(place[a] for a in node.args)))
        return ({n: place[i] for n, i in group.items()} for group in groups)

    def turned(self, summed: int, kind: str) -> int | None:
        """Compute row or column sums of (A @ B) * C from a matmul that the backward computes anyway; None if
        there is no such matmul. The row sums equal the row sums of A * (C @ B'), and the column sums equal
        the column sums of B * (A' @ C). A prime means the transpose."""
        node = self.nodes[summed]
        for product, other in (node.args, node.args[::-1]) if node.op == "multiply" else ():
            gemm = self.nodes[product]
            if gemm.op != "gemm":
                continue
            if gemm.row_index is not None or (gemm.offsets is not None and kind == "column"):
                continue
            a, b, *offsets = gemm.args
            kept, left, right = (a, other, b) if kind == "row" else (b, a, other)
            pair: tuple[int | None, ...]
            pair = (left, self.mirrored(right)) if kind == "row" else (self.mirrored(left), right)
            turned = self.nodes[kept].op == "transpose"
            if turned:
                kept = self.nodes[kept].args[0]
                pair = self.mirrored(pair[1]), self.mirrored(pair[0])
            if (pair := (*pair, *offsets)) in self.products:
                along = kind if not turned else {"row": "column", "column": "row"}[kind]
                self.used.add("turns")
                # hide ``products``, because this rule would otherwise turn the new sum into the old sum
                known, self.products = self.products, {}
                product = self.add(Node("multiply", (known[pair], kept)))
                sums = self.add(Node(f"{along}_sums", (product,)))
                self.products = known
                return sums
        return None

    def mirrored(self, index: int | None) -> int | None:
        """The node of a value's transpose; None if the trace has no such node yet."""
        if index is None:
            return None
        node = self.nodes[index]
        return node.args[0] if node.op == "transpose" else self._known.get(Node("transpose", (index,)))
