"""Domains. An input's domain is the range of values for which the operator is defined.

``init`` describes an input's typical values; the domain describes all legal ones. The domain determines which
inputs the verifier tries. The domain does not change the operator's meaning, so no hash depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator

from coda_agent.verifier.spec.fields import fault
from coda_agent.verifier.spec.init import arithmetic

#: The largest finite value of each dtype.
LARGEST: dict[str, float] = {
    "bf16": (2 - 2**-7) * 2.0**127,
    "fp16": 65504.0,
    "fp32": (2 - 2**-23) * 2.0**127,
    "fp8_e4m3": 448.0,
    "fp8_e5m2": 57344.0,
    "int32": 2.0**31 - 1,
    "int64": 2.0**63 - 1,
}
WORDS = ("finite", "positive", "nonnegative")
Bound = float | str


def _domain(value: object) -> object:
    if value in WORDS:
        return value
    if isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_bound, value)):
        return value
    raise fault(f"domain is {value!r}; it must be {', '.join(WORDS)} or [low, high]")


def _is_bound(value: object) -> bool:
    return isinstance(value, float | int | str) and not isinstance(value, bool)


#: One of WORDS, or a pair of the least and the largest legal value. Each value of the pair is a number, or
#: arithmetic over dims.
Domain = Annotated[
    Literal["finite", "positive", "nonnegative"] | tuple[Bound | int, Bound | int], BeforeValidator(_domain)
]


def bounds(domain: Domain, dtype: str, sizes: Mapping[str, int]) -> tuple[float, float]:
    """The least and the largest legal value at these sizes, both inclusive.

    For floats, the least ``positive`` value is 2**-100, because squares and quotients of smaller values
    underflow in fp32. Raises ValueError if the arithmetic cannot be evaluated, or if low exceeds high.
    """
    largest = LARGEST[dtype]
    if isinstance(domain, str):
        integers = dtype.startswith("int")
        least = {"finite": -largest, "nonnegative": 0.0, "positive": 1.0 if integers else 2.0**-100}
        return least[domain], largest
    low, high = (arithmetic(bound, sizes) for bound in domain)
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(f"[{low:g}, {high:g}] is empty or not finite; write [low, high], low first")
    return max(low, -largest), min(high, largest)
