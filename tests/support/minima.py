"""Two reductions that the vocabulary lacks. Each is registered in one place, in the same way as the
reductions of the module ``reductions``.

If this module runs as a program, it registers both reductions and then compiles kernels on request, like the
child process of ``primitives.runtime.compile``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coda_agent import primitives
from coda_agent.primitives.lang.ir import OPERATIONS
from coda_agent.primitives.lang.ops.reductions import Fold, largest, reduces
from coda_agent.primitives.lang.trace import Tensor, apply
from coda_agent.primitives.runtime import compile as compiling


@contextmanager
def registered() -> Iterator[None]:
    """Add ``row_min`` and ``column_min`` to the vocabulary until the ``with`` block ends."""
    least = Fold(largest("-{0}"), math.inf, "max", "-{0}")  # the fold receives negated values

    @reduces(least.along("row"), torch=lambda torch, t: t.amin(dim=-1))
    def row_min(t: Tensor) -> Tensor:
        return apply("row_min", t)

    @reduces(least.along("column"), torch=lambda torch, t: t.amin(dim=0))
    def column_min(t: Tensor) -> Tensor:
        return apply("column_min", t)

    made = (row_min, column_min)
    with pytest.MonkeyPatch.context() as patch:
        for function in made:
            patch.setattr(primitives, function.__name__, function, raising=False)
        patch.setattr(primitives, "__all__", [*primitives.__all__, *(f.__name__ for f in made)])
        try:
            yield
        finally:
            for function in made:
                del OPERATIONS[function.__name__]


if __name__ == "__main__":
    with registered():
        compiling._serve(Path(sys.argv[1]))
