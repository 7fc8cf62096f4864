"""Sizes other than a spec's cases: fixed sizes that a CPU runs quickly, and hidden sizes.

The seed of hidden sizes is drawn after the candidate is fixed, so no candidate can be fitted to the hidden
sizes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from random import Random

from coda_agent.primitives.compiler.roofline import ITEM_BYTES
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.runtime.launchable import ALIGNMENT
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import OutputSpec, TensorSpec

Rows = Sequence[tuple[Dim, int]]  # for each tensor: the length of a row, and the bytes of an element
TILE = 128  # the rows and columns of a kernel's tile are multiples of this
HALF_TILE = TILE // 2
LARGEST = 1500  # largest extent on a GPU: several tiles in each dimension
LARGEST_ON_CPU = 320
LARGEST_ONCE = 1024  # largest extent of the one CPU run in which all dims are long; the run takes 0.3 s
# if one dim is long: the largest extent of all other dims; slightly exceeded if aligned rows need it
SHORT = 24
MEDIUM = 120  # replaces SHORT if the long dim is at most LARGEST_ON_CPU; fewer values make poor statistics
ELEMENTS = 1 << 21  # limit on the elements of a tensor with a long extent; this many take 0.1 s on a CPU
HEADS = 8
EXPERTS = 12  # limit on the experts in hidden sizes
HEAD = 16  # columns of the narrowest head
TRIES = 400  # number of draws after which LARGEST counts as too small for the spec's static dims
DOUBLINGS = 8  # after TRIES failed draws, the largest extent is doubled, at most this often


def small_sizes(spec: Spec) -> list[dict[str, int]]:
    """Return two fixed sets of sizes. In each set, the dims differ, so that swapped axes are detected. In the
    second set, most dims are smaller than a tile, and only static dims can be multiples of a tile. Static
    dims have the sizes of the spec's first case in the first set, and of its last case in the second set.
    Dims that count heads or experts are small."""
    first, last = ({dim: case.sizes[dim] for dim in spec.static} for case in (spec.cases[0], spec.cases[-1]))
    heads = dict.fromkeys(_heads(spec), HEADS)
    return [
        {dim: 264 + 40 * i for i, dim in enumerate(spec.dims)} | heads | first,
        {dim: 72 + 16 * ((3 * i) % 5) for i, dim in enumerate(spec.dims)} | heads | last,
    ]


def hidden(
    spec: Spec,
    seed: int,
    largest: int = LARGEST,
    rows: int | None = None,
    least: float = 1 / 4,
    vary: bool = False,
) -> dict[str, int]:
    """Draw sizes that the spec's kernels must support in addition to the spec's cases. A seed always gives
    the same sizes.

    All extents differ. No extent exceeds ``largest``, except where static dims require a larger limit. Rows
    that are aligned in all cases of the spec are also aligned at these sizes. Static dims have the sizes of
    one of the spec's cases; with ``vary``, half of the seeds give them other sizes, in other ratios. A dim
    that is not static has a new size, which is no multiple of 64 and which the dim has in no case. ``rows``:
    the size of the row dims, if given. Every other dim is at least ``least`` times its largest possible size.
    If no sizes are found, sizes that are given (of static dims and of rows) may equal each other, or a
    case's. Raises InvalidInput if there are no such sizes either.
    """
    for strict in (True, False):
        random = Random(seed)
        vary = vary and random.random() < 1 / 2
        if sizes := _hidden(spec, random, largest, rows, least, strict, vary):
            return sizes
    raise InvalidInput(
        f"spec {spec.name}: no sizes beside its cases' keep rows aligned and extents different; give it a "
        "case with other sizes, or fewer static dims"
    )


def _hidden(
    spec: Spec, random: Random, largest: int, rows: int | None, least: float, strict: bool, vary: bool
) -> dict[str, int] | None:
    """Draw sizes for ``hidden``; return None if none are found. ``strict``: the rules also hold for sizes
    that are not drawn. ``vary``: static dims have new sizes."""
    extents, leading, aligned = _extents(spec), row_dims(spec), _aligned_rows(spec)
    fewest = [{}] if vary else [{d: case.sizes[d] for d in spec.static} for case in spec.cases]
    ones = [dict.fromkeys(spec.dims, 1) | least_static for least_static in fewest]
    smallest = min(max(extent(sizes) for extent in extents) for sizes in ones)
    # for each choice of the static dims' sizes: the largest factor by which an extent multiplies each dim
    reaches: dict[tuple[int, ...], dict[str, int]] = {}
    for _ in range(DOUBLINGS):
        for _ in range(TRIES if smallest <= largest else 0):
            static = _static_sizes(spec, random, vary)
            fixed = static | (dict.fromkeys(leading, rows) if rows else {})
            fixed |= {dim: random.randint(1, EXPERTS) for dim in sorted(_experts(spec) - static.keys())}
            key = tuple(static.values())
            if key not in reaches:
                reaches[key] = {dim: max(_reach(spec, dim, static), 1) for dim in spec.dims}
            sizes = _drawn(reaches[key], fixed, random, largest, least, leading)
            if _fits(spec, sizes, largest, extents, aligned, () if strict else fixed):
                return sizes
        largest *= 2
    return None


def _static_sizes(spec: Spec, random: Random, vary: bool) -> dict[str, int]:
    """Draw sizes of the static dims: those of a case or, with ``vary``, each up to its largest size in the
    cases, small ones as often as large ones. A dim with ``only`` some sizes has one of these."""
    if not vary:
        known = random.choice(spec.cases).sizes if spec.static else {}
        return {dim: known[dim] for dim in spec.static}
    most = {dim: max(case.sizes[dim] for case in spec.cases) for dim in spec.static}
    return {
        dim: random.choice(spec.only[dim]) if dim in spec.only else int((size + 1) ** random.random())
        for dim, size in most.items()
    }


def stretched(spec: Spec, seed: int) -> Iterator[dict[str, int]]:
    """Yield sizes for a CPU in which one dim is long and all other dims are short. Such sizes detect programs
    that behave differently above some extent.

    The long dim has a size from one of the spec's cases. Each such size of each dim gives one set of sizes.
    Static dims have the sizes of the same case, rows are aligned, and the short extents all differ. The long
    dim is halved until every tensor has at most ``ELEMENTS`` elements. Extents up to ``LARGEST_ON_CPU`` are
    left out, because ``hidden`` draws such extents.
    """
    random = Random(seed)
    for dim in (d for d in spec.dims if d not in spec.static):
        kept = [{d: case.sizes[d] for d in (dim, *spec.static)} for case in reversed(spec.cases)]
        for sizes in {_reach(spec, dim, sizes): sizes for sizes in kept}.values():
            while _reach(spec, dim, sizes) > LARGEST_ON_CPU:
                if drawn := _short_sizes(spec, sizes, random):
                    yield drawn
                    break
                sizes = sizes | {dim: sizes[dim] // 2}


def between(spec: Spec, seed: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield a dim, and sizes for a CPU in which all other dims are short. The dim itself has a size between 1
    and its largest size in the spec's cases. Such sizes detect programs that behave differently between the
    cases' sizes.

    In each octave [2**k, 2**(k+1)), the dim takes one ragged size, which is no multiple of 64 but keeps rows
    aligned. From 64 on, each octave is divided into two halves. One half gives the ragged size. The other
    half gives a second size, a multiple of 64 or of a larger power of two. No size of the dim equals its size
    in a case. A size is left out if no sizes of the other dims are possible with it.
    """
    random = Random(seed)
    for dim in (d for d in spec.dims if d not in spec.static):
        for span, even in _octaves(max(case.sizes[dim] for case in spec.cases), random):
            if drawn := _within(spec, dim, span, even, random):
                yield dim, drawn


def _within(spec: Spec, dim: str, span: range, even: bool, random: Random) -> dict[str, int] | None:
    """Draw sizes with the dim in this span; return None if there are no such sizes. Static dims have new
    sizes, or those of a case, in random order; the first that allow the span count."""
    statics = [{d: case.sizes[d] for d in spec.static} for case in spec.cases]
    statics += [_static_sizes(spec, random, vary=True) for _ in spec.cases]
    for static in random.sample(statics, len(statics) if spec.static else 1):
        kept = dict(static)
        if choices := _extents_within(spec, dim, span, even, kept):
            kept[dim] = random.choice(random.choice(choices))
            short = SHORT if _reach(spec, dim, kept) > LARGEST_ON_CPU else MEDIUM
            if drawn := _short_sizes(spec, kept, random, short):
                return drawn
    return None


def _octaves(largest: int, random: Random) -> Iterator[tuple[range, bool]]:
    """Yield spans to draw from. Each span comes with True if multiples of a power of two are to be drawn, and
    with False for ragged extents. Below 64, each octave is one span. From 64 on, the two halves of an octave
    are two spans, of which a random one is for ragged extents."""
    for power in range(largest.bit_length()):
        low, high = 2**power, min(2 ** (power + 1), largest + 1)
        if high <= HALF_TILE:
            yield range(low, high), False
            continue
        middle = math.isqrt(low * high)
        halves = [range(low, middle), range(middle, high)]
        random.shuffle(halves)
        yield from zip(halves, (False, True), strict=True)


def _extents_within(
    spec: Spec, dim: str, span: range, even: bool, static: Mapping[str, int]
) -> list[list[int]]:
    """A dim's possible extents in a span, in groups. If ``even``, each group holds the multiples of one power
    of two (64, 128 and so on). Otherwise the only group holds the ragged extents."""
    powers = [HALF_TILE << p for p in range(span.stop.bit_length())]
    steps = powers if even else [_ragged_step(spec, dim, static, _aligned_rows(spec))]
    cases = {case.sizes[dim] for case in spec.cases}
    found = [
        [
            n
            for n in range(-(-span.start // s) * s, span.stop, s)
            if n not in cases and (even or n % HALF_TILE)
        ]
        for s in steps
    ]
    return [extents for extents in found if extents]


def _ragged_step(spec: Spec, dim: str, static: Mapping[str, int], rows: Rows) -> int:
    """The smallest step for the extents of a dim: if the dim is a multiple of the step, and the static dims
    have these sizes, all ``rows`` are aligned."""
    others = dict.fromkeys(spec.dims, ALIGNMENT) | dict(static)
    return next((s for s in (1, 2, 4, 8) if _aligned(rows, others | {dim: s})), ALIGNMENT)


def together(spec: Spec, seed: int) -> Iterator[dict[str, int]]:
    """Yield hidden sizes for a CPU in which all dims are long. Yield nothing if static dims make a tensor
    larger than ``ELEMENTS``."""
    sizes = hidden(spec, seed, LARGEST_ONCE, least=3 / 4)
    if _bearable(spec, sizes):
        yield sizes


def scaled(spec: Spec, seed: int) -> Iterator[dict[str, int]]:
    """Yield each case's sizes, reduced for a CPU. Static dims keep their sizes. Row dims and numbers of
    experts become small random numbers. All other dims are divided by the same number, so that their ratios
    do not change. Cases with the same ratios give one set of sizes."""
    random, rows, found, aligned = Random(seed), row_dims(spec), set(), _aligned_rows(spec)
    for case in spec.cases:
        kept = {dim: case.sizes[dim] for dim in spec.static}
        few = {dim: random.randint(SHORT, 2 * SHORT) for dim in rows}
        few |= {dim: random.randint(1, EXPERTS) for dim in sorted(_experts(spec) - kept.keys())}
        free = [dim for dim in spec.dims if dim not in few and dim not in kept]
        common = math.gcd(*(case.sizes[dim] for dim in free))
        for divisor in (n for n in range(common, 0, -1) if common % n == 0):
            sizes = kept | few | {dim: case.sizes[dim] // divisor for dim in free}
            sizes = {dim: sizes[dim] for dim in spec.dims}
            if _bearable(spec, sizes) and _aligned(aligned, sizes) and _drawable(spec, sizes):
                if (ratios := tuple(sizes[dim] for dim in free)) not in found:
                    found.add(ratios)
                    yield sizes
                break


def _bearable(spec: Spec, sizes: Mapping[str, int]) -> bool:
    return all(math.prod(extent(sizes) for extent in t.shape) <= ELEMENTS for t in _tensors(spec))


def _reach(spec: Spec, dim: str, sizes: Mapping[str, int]) -> int:
    """The largest extent that contains a dim. Dims without a size in ``sizes`` count as 1."""
    known = dict.fromkeys(spec.dims, 1) | dict(sizes)
    return max((extent(known) for extent in _extents(spec) if dim in extent.names), default=0)


def _short_sizes(
    spec: Spec, kept: Mapping[str, int], random: Random, short: int = SHORT
) -> dict[str, int] | None:
    """Draw sizes for all dims outside ``kept``: at most ``short``, or slightly more if smaller sizes do not
    work. Return None if no sizes work."""
    heads, rows = _heads(spec), _aligned_rows(spec)
    loose = [extent for extent in _extents(spec) if extent.names - kept.keys()]
    static = {dim: kept[dim] for dim in spec.static}
    steps = {dim: _ragged_step(spec, dim, static, rows) for dim in spec.dims}

    def stepped(sizes: Mapping[str, int]) -> dict[str, int]:
        return {dim: max(n // steps[dim], 1) * steps[dim] for dim, n in sizes.items()} | dict(kept)

    growing = all(number > 0 for extent in _extents(spec) for _, number in extent.terms)
    if growing and not _bearable(
        spec, stepped({dim: 1 if dim in heads else short // 3 for dim in spec.dims})
    ):
        return None
    for more in range(SHORT):
        most = {dim: 1 + more // 3 if dim in heads else short + more for dim in spec.dims}
        for _ in range(TRIES // 20):
            sizes = stepped({dim: random.randint(min(short // 3, n), n) for dim, n in most.items()})
            if (
                len({extent(sizes) for extent in loose}) == len(loose)
                and _bearable(spec, sizes)
                and _aligned(rows, sizes)
                and _drawable(spec, sizes)
            ):
                return sizes
    return None


def row_dims(spec: Spec) -> frozenset[str]:
    """The dims that are the first axis of at least two tensors, and no other axis of any tensor (usually M).
    Inputs whose first axis is a row dim are activations; other matrices are weights. A backward has the row
    dims of its forward, because the first axis of a weight's gradient must not count as a row dim."""
    tensors = _tensors(spec.before or spec)
    leading = Counter(name for t in tensors for d in t.shape[:1] for name in d.names)
    inner = {name for t in tensors for d in t.shape[1:] for name in d.names}
    found = {name for name, tensors in leading.items() if tensors > 1 and name not in inner}
    return frozenset(found - _experts(spec))


def activation_dims(spec: Spec) -> frozenset[str]:
    """The dims that are the first axis of activations. These are the row dims and, in a spec with experts,
    the first axis of every two-axis tensor. With experts, there may be several such dims: for example, the
    number of tokens from which rows are gathered, and the number of rows of the product."""
    rows = row_dims(spec)
    matrices = [t for t in _tensors(spec.before or spec) if len(t.shape) == 2] if _experts(spec) else []
    return rows.union(*(t.shape[0].names for t in matrices))


def _tensors(spec: Spec) -> list[TensorSpec | OutputSpec]:
    return [*spec.inputs.values(), *spec.outputs.values()]


def _extents(spec: Spec) -> set[Dim]:
    return {extent for tensor in _tensors(spec) for extent in tensor.shape}


def _heads(spec: Spec) -> set[str]:
    """The dims that count heads or experts. A dim counts heads if some extent multiplies it by a static dim,
    or by a number of at least ``HEAD`` (the least width of a head)."""
    static = set(spec.static)
    products = [(set(m), number) for extent in _extents(spec) for m, number in extent.terms]
    heads = {n for names, number in products if names & static or number >= HEAD for n in names - static}
    return heads | (_experts(spec) - static)


def _experts(spec: Spec) -> set[str]:
    """The dims that count experts (each expert has its own matrix)."""
    return {name for t in _tensors(spec) if len(t.shape) == 3 for name in t.shape[0].names}


def _drawn(
    reach: Mapping[str, int],
    fixed: Mapping[str, int],
    random: Random,
    largest: int,
    least: float,
    leading: Collection[str],
) -> dict[str, int]:
    sizes = {}
    for dim, factor in reach.items():
        most = max(1, largest // factor)
        fewest = math.ceil(most * least)
        # The caller draws until all sizes have the alignment that they need. Row dims need no alignment.
        step = 1 if dim in leading else random.choice((1, 2, 4, 8, 16))
        drawn = random.randint(fewest, most)
        whole = drawn // step * step
        sizes[dim] = fixed.get(dim, whole if whole >= fewest else drawn)
    return sizes


def _fits(
    spec: Spec,
    sizes: dict[str, int],
    largest: int,
    every: Collection[Dim],
    rows: Rows,
    given: Collection[str],
) -> bool:
    """Whether these sizes follow the rules of ``hidden``. ``given``: dims whose sizes may equal each other,
    or a case's."""
    extents = [extent(sizes) for extent in every if extent.names]
    same = {extent(sizes) for extent in every if extent.names and extent.names <= {*given}}
    others = [extent(sizes) for extent in every if not extent.names <= {*given}]
    free = [dim for dim in spec.dims if dim not in spec.static]
    new = [dim for dim in free if dim not in given]
    return (
        all(1 <= extent <= largest for extent in extents)
        and len({*others, *same}) == len(others) + len(same)
        and all(sizes[dim] % HALF_TILE for dim in free)
        and not any(sizes[dim] == case.sizes[dim] for dim in new for case in spec.cases)
        and _aligned(rows, sizes)
        and _drawable(spec, sizes)
    )


def _aligned_rows(spec: Spec) -> Rows:
    """The rows that must be multiples of 16 bytes. A tensor's rows are not included if some case of the spec
    has unaligned rows in this tensor (as in a head's statistics)."""
    rows = dict.fromkeys((t.shape[-1], ITEM_BYTES[t.dtype]) for t in _tensors(spec) if len(t.shape) > 1)
    every = [case.sizes for case in spec.cases]
    return [(row, b) for row, b in rows if not any(row(known) * b % ALIGNMENT for known in every)]


def _aligned(rows: Rows, sizes: Mapping[str, int]) -> bool:
    return not any(row(sizes) * b % ALIGNMENT for row, b in rows)


def _drawable(spec: Spec, sizes: dict[str, int]) -> bool:
    """Whether the inputs' ranges of integers, and their domains, contain any values at these sizes."""
    try:
        for tensor in spec.drawn.values():
            tensor.bounds(sizes)
            if tensor.init.form in ("integers", "count", "offsets"):
                tensor.init.range_at(sizes)
    except ValueError:
        return False
    return True
