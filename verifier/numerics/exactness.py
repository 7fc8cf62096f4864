"""Find the outputs that must be bit-exact: sums and products of small integers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coda_agent.verifier.numerics.reference import Tensors
from coda_agent.verifier.numerics.sizes import TILE

# The number of elements to compare at once. On a GPU, this many elements take 2 GB of fp64 temporaries; on a
# CPU, they fit in a core's cache.
CHUNK = {"cuda": 1 << 25, "cpu": 1 << 16}
EXACT_BITS = 22  # two of fp32's 24 bits are spare, because partial sums in another order may need more bits


def exact_outputs(values: Tensors, truth: Tensors) -> frozenset[str]:
    """The outputs that a kernel must compute exactly on inputs of the family "integers".

    ``values`` are the reference's outputs in fp32 on the kernel's device. An output must be exact if two
    conditions hold. First, its values equal the fp64 ``truth`` in every element. Second, all its values are
    integers of at most ``EXACT_BITS`` bits, times one common power of two. Then sums in any order are exact,
    so a dropped term, a wrong column or an extra rounding changes a bit. An RMS error over all elements may
    be too coarse to detect such a mistake.
    """
    return frozenset(name for name in truth if _is_exact(matrix(values[name]), matrix(truth[name])))


def _is_exact(values: Tensor, truth: Tensor) -> bool:
    largest = float(truth.abs().max())
    if not math.isfinite(largest):
        return False
    fraction = 2.0 ** (EXACT_BITS - math.frexp(largest)[1])  # a power of two, so that the product is exact
    rows = rows_at_once(truth)
    return all(
        torch.equal(v.double(), t) and not bool((t * fraction).frac().any())
        for v, t in zip(values.split(rows), truth.split(rows), strict=True)
    )


def rows_at_once(values: Tensor) -> int:
    """How many rows to process at once: a multiple of a tile's rows."""
    return max(TILE, CHUNK[values.device.type] // values.shape[1] // TILE * TILE)


def matrix(tensor: Tensor) -> Tensor:
    """View a tensor as a matrix, to count tiles and positions: the first axis becomes the rows, and all other
    axes together become the columns."""
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)


def unequal(got: Tensor, truth: Tensor) -> tuple[int, str]:
    """Count the values that differ from the truth, after the truth is rounded once to their dtype. Also
    describe the first such value."""
    count, example, rows = 0, "", rows_at_once(truth)
    for start in range(0, truth.shape[0], rows):
        part, wanted = got[start : start + rows], truth[start : start + rows].to(got.dtype)
        wrong = part != wanted
        if (found := int(wrong.sum())) and not count:
            row, column = divmod(int(wrong.flatten().int().argmax()), truth.shape[1])
            place = f"the first at row {start + row}, column {column}"
            example = f"{place}: {float(part[row, column]):.9g} for {float(wanted[row, column]):.9g}"
        count += found
    return count, example
