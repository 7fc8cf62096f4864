"""The error gate: compare a candidate's error with the yardstick's error. The yardstick is the reference in
fp32, with outputs rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from coda_agent.verifier.numerics.error_sums import ErrorSums, TileSums, measure, worst_place
from coda_agent.verifier.numerics.exactness import matrix, unequal
from coda_agent.verifier.numerics.limits import USUAL, ErrorLimits
from coda_agent.verifier.numerics.reference import Tensors
from coda_agent.verifier.numerics.sizes import TILE
from coda_agent.verifier.numerics.stretch import BEYOND
from coda_agent.verifier.numerics.values import DTYPES
from coda_agent.verifier.spec.model import Spec

FEW = 32  # with fewer elements n than this, the yardstick's error can be 2**(10/n) times too small by chance
OCTAVES = (-150, 128)  # exponents of all fp32 values
# error allowed for any value, in half fp32 ulps of the output's RMS; a small value may need this much,
# because it may be the difference of larger values, as in g - g * sigmoid(-g)
CANCELLED = 56
SHARE = 2.0**-5  # relative error allowed for any value left in fp32
# if values cancel, fp32's error may be this many times fp64's: 2**29 because fp32 rounds more coarsely, times
# 8 as slack
REST = 2.0**32
# an RMS error above this fraction of an output's RMS cannot come from the final rounding alone; fp8 outputs
# have a larger limit
LOST = 2.0**-8
ONE = 2.0**-24  # half an fp32 ulp of 1; differences of fp32 values near 1 are multiples of this number


class OutputError(BaseModel):
    """The error gate's result for one output: the ratios of the output's errors to the yardstick's errors,
    the slope of the output's regression on the truth, and the reason if the output failed.

    ``unequal`` counts the wrong values of an output that must be exact, and is None for other outputs.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    rms_ratio: float
    tile_ratio: float
    element_ratio: float
    slope: float
    unequal: int | None = None
    passed: bool
    reason: str = ""


def compare(
    spec: Spec,
    got: Tensors,
    truth: Tensors,
    yard: Tensors,
    limits: ErrorLimits = USUAL,
    exact: Collection[str] = (),
) -> list[OutputError]:
    """Judge every output; return one result per output, in the spec's order. A result's ``reason`` is a
    message for the kernel's author.

    ``got``: the candidate's outputs. ``truth``: the outputs of ``reference.oracle``. ``yard``: the outputs of
    ``reference.yardstick``. All three must be computed on the same kind of device, because fp32 sums are less
    accurate on tensor cores than on a CPU. For each output, the gate divides three errors of the candidate by
    the yardstick's errors, and limits the ratios. The three errors are the RMS error, the largest error, and
    the RMS error of the worst 128x128 tile. For outputs narrower than fp32, the gate also limits the slope of
    the output's regression on the truth. A value must be finite if the truth is finite and fits the output's
    dtype. In each row, the candidate may break this rule in as many values as the yardstick does. The reason
    is that an intermediate value may overflow in fp32. In one row, the candidate and the yardstick may then
    overflow at different places.

    The ``limits`` are widened by the spec's tolerance, and by slack for small samples. A ratio of two
    independent RMS errors over n elements scatters by about 1/sqrt(n). So each limit is multiplied by 1 +
    4/sqrt(n), where n counts the elements of the output or tile. This slack is 3% for a full tile, and almost
    nothing at benchmark sizes. The slope's slack is 4 times its standard error, which is sum(e^2 t^2)^0.5 /
    sum(t^2) for the yardstick's errors e and the truth t. With fewer than ``FEW`` elements, the yardstick's
    error may be small by chance, so limits are 2**(10/n) times as wide. For example, an output that is a
    single number may be wrong by up to about 0.1%. The values of a row have common inputs, and therefore
    common errors. So for an output of m rows, the slack is multiplied by 1 + 1/m. A yardstick error counts as
    at least half an fp32 ulp of the truth's RMS. If the yardstick's error could count as zero, no other order
    of summation could pass.

    For an output named in ``exact``, the truth is rounded once to the output's dtype. The output must equal
    this rounded truth bit for bit, except that -0.0 equals 0.0 (see ``verifier.numerics.exactness``).
    """
    return [
        _judge(spec, name, got[name], truth[name], yard[name], limits, name in exact) for name in spec.outputs
    ]


def loss(got: Tensor, truth: Tensor, yard: Tensor) -> tuple[float, float]:
    """Return an output's RMS error divided by the truth's RMS, and divided by the yardstick's RMS error. The
    output may have any dtype. Both ratios are NaN if a value is wrongly finite or wrongly non-finite. Values
    at which ``compare`` allows a non-finite result are left out."""
    stats, _ = measure(matrix(got), matrix(truth), matrix(yard), got.dtype)
    if stats.wrong:
        return math.nan, math.nan
    error, lost = math.sqrt(stats.e2 / stats.count), math.sqrt(stats.r2 / stats.count)
    return math.sqrt(stats.e2 / stats.t2) if stats.t2 else error, stats.ratio(error, lost)


def undefined(
    family: str, truth: Tensors, yard: Tensors, jittered: Callable[[], Tensors]
) -> dict[str, float]:
    """Return the outputs that the gate may excuse, each with the largest magnitude that it excuses.

    On families of inputs beyond the typical ones, an output is excused at any magnitude if the reference in
    fp32 overflows, or has a relative error above ``LOST``. If the truth is zero but ``reference.jittered`` is
    not, the zero comes only from cancellation in fp64. Then the output is excused up to the magnitude that
    cancellation can leave in fp32, in every family.
    """
    lost = set()
    if family in BEYOND:
        losses = {name: loss(yard[name], true, yard[name])[0] for name, true in truth.items()}
        allowed = {name: max(LOST, torch.finfo(stored.dtype).eps / 2) for name, stored in yard.items()}
        lost = {name for name, lost in losses.items() if not lost <= allowed[name]}
    zero = {name for name, true in truth.items() if not true.any()} - lost
    again = jittered() if zero else {}
    left = {name: REST * float(again[name].abs().max()) for name in zero}
    return dict.fromkeys(lost, math.inf) | {name: size for name, size in left.items() if size}


def counted(errors: Iterable[OutputError], got: Tensors, unjudged: Mapping[str, float]) -> list[OutputError]:
    """Return the errors that count. The error of an ``unjudged`` output does not count if no value of the
    output exceeds the excused magnitude."""

    def excused(name: str) -> bool:
        size = unjudged.get(name)
        return size == math.inf or size is not None and bool((got[name].double().abs() <= size).all())

    return [error for error in errors if not excused(error.name)]


def with_formula(error: OutputError, share: float | None) -> OutputError:
    """The result for an output, which fails if its formula is wrong. ``share``: the error of the program in
    fp64, as a share of the truth's RMS, if it is too large."""
    if share is None or not error.passed:
        return error
    reason = (
        f"output {error.name!r}: computed in fp64, without any rounding, it is still off by {share:.2g} of "
        "its RMS; it has another formula than the reference"
    )
    return error.model_copy(update={"passed": False, "reason": reason})


def _judge(
    spec: Spec, name: str, got: Tensor, truth: Tensor, yard: Tensor, limits: ErrorLimits, exact: bool
) -> OutputError:
    declared = spec.outputs[name].dtype
    _expect_type(name, got, truth, DTYPES[declared])
    stats, tiles = measure(matrix(got), matrix(truth), matrix(yard), DTYPES[declared])
    factor = spec.tolerance.factor if spec.tolerance else 1.0
    base = limits.shared if limits.shared and declared == "fp32" and stats.coarse else limits.ratios(declared)
    count = stats.effective if limits.effective else stats.count
    few = 2.0 ** (10 / count) if count < FEW else 1.0
    rms_limit, tile_limit, element_limit = (few * (factor * limit) for limit in base)
    deviations = limits.deviations * (1 + 1 / matrix(truth).shape[0])
    slack = 1 + deviations / math.sqrt(count)
    rms = stats.ratio(math.sqrt(stats.e2 / stats.count), math.sqrt(stats.r2 / stats.count))
    element = stats.ratio(stats.e_max, stats.r_max)
    tile, excess, at = _worst_tile(stats, tiles, deviations)
    slope_limit = limits.slope + deviations * stats.slope_error
    faults = []
    if stats.wrong:
        place = "row {}, column {}".format(*stats.first_wrong)
        faults.append(f"{stats.wrong} non-finite or wrongly finite values, the first at {place}")
    if rms > rms_limit * slack:
        faults.append(f"RMS error {rms:.3g}x the least a kernel must lose (limit {rms_limit * slack:.3g})")
    if excess > tile_limit:
        faults.append(f"worst tile, {_span(at, truth)}: {tile:.3g}x (limit {tile_limit * tile / excess:.3g})")
    if element > element_limit * slack:
        where = _example(got, truth, *worst_place(matrix(got), matrix(truth), stats.e_max))
        faults.append(f"worst element {element:.3g}x (limit {element_limit * slack:.3g}), at {where}")
    if declared != "fp32" and stats.slope_off > slope_limit:
        faults.append(f"slope on the truth {stats.slope:.6f} (allowed 1 +- {slope_limit:.2g})")
    # if the yardstick is coarse (see ``ErrorSums``), rounded operands cause most errors of small values
    if limits.values and not stats.coarse:
        faults += _off_by_themselves(got, truth, yard, factor * limits.values, stats.floor, limits.loud)
    wrong_bits, example = unequal(matrix(got), matrix(truth)) if exact else (None, "")
    if wrong_bits:
        faults.append(
            f"{wrong_bits} of {stats.count} values are not the truth rounded once, {example}; the inputs "
            "are such that every sum of products is exact in fp32"
        )
    hint = _hint(stats, rms, tile, _cancelled(got, truth)) if faults else ""
    reason = f"output {name!r}: {'; '.join(faults)}{hint}" if faults else ""
    return OutputError(
        name=name,
        rms_ratio=rms,
        tile_ratio=tile,
        element_ratio=element,
        slope=stats.slope,
        unequal=wrong_bits,
        passed=not faults,
        reason=reason,
    )


def _expect_type(name: str, got: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    if got.shape != truth.shape or got.dtype != dtype:
        wanted = f"{dtype} {list(truth.shape)}"
        raise ValueError(f"output {name!r} is {got.dtype} {list(got.shape)}; it must be {wanted}")


def _off_by_themselves(
    got: Tensor, truth: Tensor, yard: Tensor, limit: float, floor: float, loud: bool
) -> list[str]:
    """Judge values one by one, so that small values count as much as large ones; return the findings.

    The error of a value may be as large as the largest of three bounds. These are ``SHARE`` of the true
    value, ``CANCELLED`` times ``floor``, and ``limit`` times the yardstick's worst error among all values
    that are at most twice as large as this value. If ``loud``, a value in a large row and column may have a
    larger error (see ``_loudness``).
    """
    got, truth, yard = matrix(got), matrix(truth).double(), matrix(yard)
    least = CANCELLED * floor
    size, e = truth.abs(), (got - truth).abs()
    if not (e > (size * SHARE).clamp_min(least)).any():
        return []
    r = (yard - truth).abs()
    usable = truth.isfinite() & got.isfinite() & yard.isfinite()
    size, e, r = (values.where(usable, 0.0) for values in (size, e, r))
    octave = (torch.frexp(size).exponent.clamp(*OCTAVES) - OCTAVES[0]).long()
    worst = r.new_zeros(OCTAVES[1] - OCTAVES[0] + 1)
    worst = worst.scatter_reduce(0, octave.flatten(), r.flatten(), "amax").cummax(0).values
    off = e > torch.maximum(size * SHARE, limit * worst[octave]).clamp_min(least)
    if loud and off.any():
        off &= e > least * _loudness(size)
    if not (count := int(off.sum())):
        return []
    place = divmod(int((e / size).where(off, 0.0).argmax()), truth.shape[1])
    said = _example(got, truth, *place)
    return [f"{count} values off by much of themselves, the worst at {said}"]


def _example(got: Tensor, truth: Tensor, row: int, column: int) -> str:
    """Describe a value: its place, the value and the truth."""
    value, right = float(matrix(got)[row, column]), float(matrix(truth)[row, column])
    return f"row {row}, column {column}: {value:.4g} instead of {right:.4g}"


def _loudness(size: Tensor) -> Tensor:
    """Return a matrix [R, C]: each value's expected size, divided by the usual size of all values, but at
    least 1. The expected size follows from the mean squares of the value's row and column."""
    power = size.square()
    rows, columns = power.mean(1, keepdim=True), power.mean(0, keepdim=True)
    usual = power.mean().clamp_min(2.0**-300)  # all values may be zero
    return (rows * columns / usual.square()).clamp_min(1.0).sqrt()


def _worst_tile(stats: ErrorSums, tiles: TileSums, deviations: float) -> tuple[float, float, tuple[int, int]]:
    """Find the worst tile. Return its error ratio, the ratio divided by the slack for the tile's number of
    elements, and the tile's row and column."""
    yard = (tiles.r2 / tiles.count).sqrt().clamp_min(stats.floor)
    ratio = (tiles.e2 / tiles.count).sqrt() / yard
    excess = ratio / (1 + deviations / tiles.count.sqrt())
    row, column = divmod(int(excess.argmax()), excess.shape[1])
    return float(ratio[row, column]), float(excess[row, column]), (row, column)


def _span(tile: tuple[int, int], truth: Tensor) -> str:
    shape = matrix(truth).shape
    (a, b), (c, d) = ((i * TILE, min((i + 1) * TILE, n)) for i, n in zip(tile, shape, strict=True))
    rows = f"rows {a} to {b - 1}"
    return f"{rows}, columns {c} to {d - 1}" if truth.dim() > 1 else rows


def _cancelled(got: Tensor, truth: Tensor) -> bool:
    """Whether the errors look like cancellation. Differences of values near 1 are multiples of ``ONE``. So
    consider the values that the dtype could represent more finely than ``ONE``. Most of these values must be
    multiples of ``ONE``, and within a few ``ONE`` of the truth."""
    step, got = torch.finfo(got.dtype).eps, got.double()
    fine = (truth.abs() * step < ONE / 4) & (truth != 0) & got.isfinite()
    kept, error = got[fine], (got - truth)[fine].abs()
    stepped = (kept % ONE == 0) & (error < ONE * (2 + 14 * (kept != 0)))
    return int(stepped.sum()) > max(FEW, len(kept) / 2)


def _hint(stats: ErrorSums, rms: float, tile: float, cancelled: bool) -> str:
    """A guess at the mistake, or "" if the numbers suggest none."""
    # squared error that a wrong slope does not explain
    unexplained = max(stats.g2 - stats.slope * stats.gt, 0)
    residual = stats.ratio(math.sqrt(unexplained / stats.count), math.sqrt(stats.r2 / stats.count))
    hint = ""
    if cancelled:
        hint = "looks like cancellation: small values are whole fp32 steps of the values near 1 behind them"
    elif stats.zeros > stats.count // 1000:
        share = f"{stats.zeros} of {stats.count} values"
        hint = f"{share} are zero where the truth is not: is a tile never stored?"
    elif abs(stats.slope - 1) > 1e-3 and residual < 1.5:  # a smaller one would be printed as 1
        hint = f"looks like a factor of {stats.slope:.4g}"
    elif tile > 4 * rms:
        hint = "the error sits in few tiles: look at edges and indices"
    elif 1.2 < rms < 16:
        hint = "looks like an intermediate value rounded, or a sum accumulated, in too low a precision"
    elif stats.slope < 0.5:
        hint = "hardly follows the truth: look at signs, transposes and which output is which"
    return f"; {hint}" if hint else ""


def unrounded(spec: Spec) -> Spec:
    """The spec with its outputs in fp32, for ``limits.of_unrounded``."""
    wide = {name: output.model_copy(update={"dtype": "fp32"}) for name, output in spec.outputs.items()}
    return spec.model_copy(update={"outputs": wide})
