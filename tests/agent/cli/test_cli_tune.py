"""The command tune: it needs a GPU, and sizes of the kernel's own dims."""

from __future__ import annotations

import pytest
from checkout import ROOT
from commanding import Command

pytestmark = pytest.mark.usefixtures("runs_home", "plain", "nothing_beside")
KERNEL = ROOT / "generated_kernels" / "gemm_swiglu.program.json"


@pytest.mark.parametrize("sizes", ["M=8", "M=8,D=8,F=8,N=8", "M=8,D=8,F=", "M=8,D=8,F=0", "M=8,D=8,D=8", "8"])
def test_wrong_sizes_are_one_line_with_an_example(command: Command, sizes: str) -> None:
    done = command("tune", KERNEL, sizes)
    assert done.status == 2 and "M=4096,D=4096,F=4096" in done.err


def test_it_needs_a_gpu(command: Command) -> None:
    assert command("tune", KERNEL, "M=128,D=64,F=64").status == 3
