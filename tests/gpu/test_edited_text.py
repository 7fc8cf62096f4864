"""Test on an H100: an editable text without edits gives the same bits as the program's own lowering."""

from __future__ import annotations

import pytest
import torch
from checkout import ROOT

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import editable
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.verifier.gpu.checks import bits, poisoned_run
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.spec.model import Spec

KERNELS = {
    "column sums": "gemm_residual_rmsnorm_bwd",
    "row sums": "gemm_residual_partial_rmsnorm",
    "a head norm": "gemm_qk_norm_rope",
}


def ragged(spec: Spec) -> dict[str, int]:
    return dict(next(case.sizes for case in spec.cases if case.name == "ragged"))


def square(spec: Spec) -> dict[str, int]:
    """Return sizes at which operands and outputs are 512 by 512. If columns belong to heads, there are 8
    heads of 64 columns."""
    return dict.fromkeys(spec.dims, 512) | ({"H": 8, "P": 32} if "P" in spec.dims else {})


@pytest.mark.parametrize("sizes_of", [ragged, square])
@pytest.mark.parametrize("schedule", PROBES, ids=lambda s: f"{s.tile_m}x{s.tile_n}")
@pytest.mark.parametrize("name", KERNELS.values(), ids=KERNELS)
def test_an_unedited_text_gives_the_same_bits(name, schedule, sizes_of):
    spec = load(ROOT / "specs" / f"{name}.yaml")
    program = Program.from_json((ROOT / "generated_kernels" / f"{name}.program.json").read_text())
    sizes = sizes_of(spec)
    inputs = draw(spec, sizes, seed=1, device="cuda")
    own, again = (
        poisoned_run(Plan(KernelSource(program, {0: schedule}, edited=text), sizes), inputs)
        for text in (None, editable(program))
    )
    assert own.keys() == again.keys() == spec.outputs.keys()
    for output in own:
        assert not own[output].isnan().any(), output
        assert torch.equal(bits(own[output]), bits(again[output])), output
