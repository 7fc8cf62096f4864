"""The GPU checks detect forbidden uses of memory by guard bands, by poisoned outputs and workspaces, and by
repeated runs.

Here the kernels are PyTorch functions on a CPU. All other code is the product's, as it runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from test_scoring import SCALED, CpuPlan, doubled, on_a_cpu
from test_timing import SIZES, updating
from torch import Tensor

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.runtime.launchable import ALIGNMENT, LaunchError
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.gpu.checks import REPEATS, KernelCase, numerics, stability
from coda_agent.verifier.gpu.guards import GUARD, POISONS, Guarded
from coda_agent.verifier.spec.model import Spec

__all__ = ["on_a_cpu"]  # an autouse fixture, which applies to this module too

Tensors = Mapping[str, Tensor]
BETWEEN = 16  # bytes in the middle of the workspace, where a kernel leaves data for the next kernel


@dataclass
class Raw(CpuPlan):
    """A plan that also runs ``raw``, a function of the inputs, the outputs and the workspace."""

    raw: Callable[[Tensors, Tensors, Tensor], object] = lambda *given: None
    schedules: dict[int, Any] = field(default_factory=dict)

    @property
    def gaps(self) -> list[Tensor]:
        return [self.workspace[:BETWEEN], self.workspace[2 * BETWEEN :]]

    def run(self, inputs: Tensors, outputs: Tensors) -> None:
        super().run(inputs, outputs)
        self.raw(inputs, outputs, self.workspace)


def job_of(monkeypatch: pytest.MonkeyPatch, plan: CpuPlan, spec: Spec = SCALED) -> KernelCase:
    monkeypatch.setattr(KernelCase, "plans", lambda job: [plan])
    return KernelCase(spec, KernelSource(plan.program), "tiny", SIZES)


def test_a_chosen_schedule_that_does_not_fit_is_the_kernels_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def misfit(*given: object) -> object:
        raise LaunchError("step 0: a tile of 208 columns does not hold whole heads of 64 columns")

    monkeypatch.setattr("coda_agent.primitives.runtime.executable.Plan", misfit)
    with pytest.raises(Failed, match="case tiny: step 0: a tile of 208") as caught:
        KernelCase(SCALED, KernelSource(Program(SCALED.signature(), (), {})), "tiny", SIZES, ({},)).plans()
    assert caught.value.code == "schedule"


def past(tensor: Tensor, by: int = 1) -> Tensor:
    """Return the ``by`` elements that follow the last element of ``tensor`` in memory."""
    return tensor.as_strided((by,), (1,), tensor.storage_offset() + tensor.numel())


def before(tensor: Tensor) -> Tensor:
    return tensor.as_strided((1,), (1,), tensor.storage_offset() - 1)


def between(workspace: Tensor) -> Tensor:
    return workspace[BETWEEN : 2 * BETWEEN].view(torch.float32)


def writes(target: Callable[[Tensors, Tensors, Tensor], Tensor]) -> Callable[..., object]:
    return lambda *given: target(*given).zero_()


ASTRAY: dict[str, tuple[Callable[..., object], str, str]] = {
    "behind an output": (writes(lambda i, o, w: past(o["s"])), "out_of_bounds", "wrote outside output 's'"),
    "before an output": (writes(lambda i, o, w: before(o["s"])), "out_of_bounds", "wrote outside output 's'"),
    "behind an input": (writes(lambda i, o, w: past(i["w"])), "out_of_bounds", "wrote outside input 'w'"),
    "before a vector": (writes(lambda i, o, w: before(i["rstd"])), "out_of_bounds", "outside input 'rstd'"),
    "in the workspace": (writes(lambda i, o, w: w[-1]), "out_of_bounds", "into gaps of the workspace"),
    "an input": (writes(lambda i, o, w: i["w"][0, 0]), "inputs_written", "input(s) w were changed"),
    "reads past an input": (
        lambda i, o, w: o["s"].add_(past(i["rstd"]).nan_to_num(1.0)), "unstable", "output 's' differs",
    ),
    "reads before an input": (
        lambda i, o, w: o["s"].add_(before(i["w"]).float().nan_to_num(1.0)), "unstable", "output 's' differs",
    ),
    "reads what no kernel left": (
        lambda i, o, w: o["s"].add_(between(w)[1].nan_to_num(1.0)), "unstable", "output 's' differs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", ASTRAY)
def test_what_reaches_beside_a_tensor_is_rejected(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, code, words = ASTRAY[how]
    with pytest.raises(Failed) as failed:
        stability(job_of(monkeypatch, Raw(SCALED, doubled, raw=raw)))
    assert failed.value.code == code and words in failed.value.message


def test_a_kernel_that_stays_where_it_belongs_is_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[float, ...]] = []

    def hands_on(inputs: Tensors, outputs: Tensors, workspace: Tensor) -> None:
        found.append((float(between(workspace)[0]), float(past(inputs["rstd"])), float(past(outputs["s"]))))
        between(workspace)[0] = outputs["s"][0]
        outputs["s"][0] = between(workspace)[0]

    given = stability(job_of(monkeypatch, Raw(SCALED, doubled, raw=hands_on)))
    assert given["repeats"] == REPEATS == len(found)
    assert all(torch.tensor(each).isnan().all() for each in found[::2])
    assert all(torch.tensor(each).isfinite().all() for each in found[1::2])


def test_an_update_is_proved_in_its_inputs_buffer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _ = updating()

    def updated(inputs: Tensors) -> dict[str, Tensor]:
        step = inputs["alpha"] * (inputs["dy"].mT.float() @ inputs["x"].float())
        return {"picked": inputs["x"][:, 0].float(), "new": inputs["dw"] + step, "old": inputs["dw"].sum(0)}

    assert stability(job_of(monkeypatch, Raw(spec, updated), spec))["repeats"] == REPEATS


def test_numerics_find_nan_in_what_no_kernel_left(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SCALED
    assert numerics(job_of(monkeypatch, Raw(spec, doubled)))["plans"] == 1

    def left_by_the_last_plan(inputs: Tensors, outputs: Tensors, workspace: Tensor) -> None:
        outputs["s"][0] += between(workspace)[0] * 0

    with pytest.raises(Failed, match="'s'") as failed:
        numerics(job_of(monkeypatch, Raw(spec, doubled, raw=left_by_the_last_plan)))
    assert failed.value.code == "numerics"


@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (1, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_a_guarded_tensor_is_as_a_fresh_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    fresh = torch.arange(21)[: torch.Size(shape).numel()].to(dtype).view(shape)
    held = Guarded.holding({"t": fresh}, POISONS[0])
    tensor = held.tensors["t"]
    assert torch.equal(tensor.float(), fresh.float()) and tensor.dtype == dtype
    assert tensor.shape == fresh.shape and tensor.stride() == fresh.stride()
    assert tensor.storage_offset() * tensor.itemsize == GUARD and GUARD % 128 == 0
    assert tensor.data_ptr() % ALIGNMENT == 0 and tensor.is_contiguous()
    assert held.written_beside(POISONS[0]) == [] and held.written_beside(POISONS[1]) == ["t"]
    held.poison(POISONS[1])
    assert held.written_beside(POISONS[1]) == [] and torch.equal(tensor.float(), fresh.float())
    if dtype.is_floating_point:
        poisoned = [Guarded({"t": fresh}, poison).tensors["t"].float() for poison in POISONS]
        assert poisoned[0].isnan().all() and poisoned[1].isfinite().all()
