"""Timed calls must do the verified work. To ensure this, the benchmark compares fingerprints of tensors, and
overwrites ("poisons") the outputs before each call.

In these tests, the kernels are PyTorch functions on a CPU, and the clock is simulated. A GPU run uses all
other code unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from simulated_clock import SimulatedClock
from test_timing import SIZES, tiny, updating
from torch import Tensor

import coda_agent.verifier.gpu.fingerprint
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.verifier import timing
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.gpu.benchmark import MOST_SETS, _incumbent_arm, _Sets, sets_wanted
from coda_agent.verifier.gpu.checks import KernelCase, poisoned_run
from coda_agent.verifier.gpu.fingerprint import Fingerprints, overwrite, words
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.spec.model import Spec

DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.int32, torch.int64, torch.int8,
)  # fmt: skip


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(10).to(dtype)


def changed(tensor: Tensor, change: Callable[[Tensor], object]) -> bool:
    """Return whether a fingerprint detects a change to the tensor's memory."""
    before = Fingerprints({"t": tensor})
    assert before.differing({"t": tensor.clone()}) == []
    change(tensor)
    return before.differing({"t": tensor}) == ["t"]


# Fingerprints -------------------------------------------------------------------------------------


def three_in_a_row(bits: Tensor) -> None:
    """Change three words so that neither the sum of all words nor their sum weighted by position changes."""
    bits[100] += 1
    bits[101] -= 2
    bits[102] += 1


def swapped(bits: Tensor) -> None:
    """Swap two words whose positions are equal modulo 65521. The sum of all words does not change. If each
    word is weighted by its position modulo 65521, the sum does not change either."""
    bits[[7, 7 + 65521]] = bits[[7 + 65521, 7]]


@pytest.mark.parametrize("change", [three_in_a_row, swapped])
def test_changes_that_linear_sums_do_not_see_are_found(change: Callable[[Tensor], None]) -> None:
    tensor = drawn(torch.bfloat16, 70_000)
    assert tensor[7] != tensor[7 + 65521]
    assert changed(tensor, lambda t: change(t.view(torch.int16)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (4, 6)], ids=str)
def test_one_bit_anywhere_is_found(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        coda_agent.verifier.gpu.fingerprint, "BLOCK", 5
    )  # blocks of five words, so that larger tensors have several blocks and a short last one
    tensor = drawn(dtype, *shape)
    for byte in tensor.view(-1).view(torch.uint8):
        assert changed(tensor, lambda _, byte=byte: byte.bitwise_xor_(1))  # type: ignore[misc]
        assert changed(tensor, lambda _, byte=byte: byte.bitwise_xor_(128))  # type: ignore[misc]


def test_bits_of_nan_and_of_zeros_count() -> None:
    assert changed(torch.tensor([float("nan"), 1.0]), lambda t: t.view(torch.int32)[0].bitwise_xor_(1))
    assert changed(torch.zeros(3), lambda t: t.neg_())
    assert not changed(torch.full((3,), float("nan")), lambda t: None)


def test_shape_dtype_and_strides_belong_to_it() -> None:
    tensor = torch.zeros(4, 4)
    before = Fingerprints({"t": tensor})
    for other in (tensor.view(2, 8), tensor.view(torch.int32), tensor.mT, torch.zeros(4, 5)):
        assert before.differing({"t": other}) == ["t"]


def test_a_fingerprint_has_a_secret_of_its_own_and_wipes_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[Tensor] = []
    empty = torch.empty

    def kept(*size: Any, **more: Any) -> Tensor:
        rooms.append(empty(*size, **more))
        return rooms[-1]

    tensor = drawn(torch.float32, 33)
    monkeypatch.setattr(torch, "empty", kept)
    first, second = Fingerprints({"t": tensor}), Fingerprints({"t": tensor})
    assert first._found != second._found
    assert len(rooms) == 2 and not any(room.any() for room in rooms)


def test_words_are_the_tensor_s_own_memory() -> None:
    for dtype in DTYPES:
        for count in (1, 2, 3, 8):
            tensor = drawn(dtype, 10)[1 : 1 + count]
            row = words(tensor)
            assert row.data_ptr() == tensor.data_ptr()
            assert row.numel() * row.itemsize == count * tensor.itemsize
    assert words(drawn(torch.bfloat16, 4)).dtype == torch.int32
    with pytest.raises(RuntimeError, match="view"):
        words(torch.zeros(2, 3).mT)  # if ``words`` returned a copy, the poison would miss the tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_poison_leaves_nothing_is_another_each_time_and_could_be_an_answer(dtype: torch.dtype) -> None:
    tensor = drawn(dtype, 5, 3)
    seen = set()
    for _ in range(20):
        tensor.fill_(float("nan"))
        overwrite([words(tensor)])
        assert bool((tensor > 0).all()) and bool((tensor < 2.01).all())
        seen.add(float(tensor[0, 0]))
    assert len(seen) > 10


# Timed calls --------------------------------------------------------------------------------------

Kernel = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
Write = Callable[[Tensor, Tensor], object]  # arguments: an output and its correct value


def doubled(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"s": inputs["rstd"] * 2}


@dataclass
class CpuPlan:
    """A CPU stand-in for ``Plan``. ``write`` stores the kernel's answer in an output."""

    spec: Spec
    kernel: Kernel
    write: Write = Tensor.copy_
    poisoned: list[bool] = field(default_factory=list)
    workspace: Tensor = field(default_factory=lambda: torch.zeros(64, dtype=torch.uint8))

    @property
    def program(self) -> Any:
        return SimpleNamespace(signature=self.spec.signature())

    def outputs(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros([d(SIZES) for d in t.shape], dtype=getattr(torch, LONG[t.dtype]))
            for name, t in self.spec.outputs.items()
        }

    def in_place(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        updates = self.spec.signature().updates
        return self.outputs() | {output: inputs[name] for output, name in updates.items()}

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        right = self.kernel(inputs)
        self.poisoned.append(not any(torch.equal(outputs[name], t) for name, t in right.items()))
        for name, answer in right.items():
            self.write(outputs[name], answer)


LONG = {"fp32": "float32", "bf16": "bfloat16"}


def sets_of(plan: CpuPlan, count: int = 2) -> _Sets:
    """Return ``count`` sets of inputs, as ``_Sets.drawn`` does, but without the error gate."""
    job = KernelCase(plan.spec, KernelSource(plan.program), "tiny", SIZES)
    sets = _Sets(job, cast(Plan, plan), [], [], [], [], [])
    for seed in range(count):
        inputs = draw(plan.spec, SIZES, seed)
        sets.seeds.append(seed)
        sets.inputs.append(inputs)
        sets.given.append(Fingerprints(inputs))
        sets.proved.append(Fingerprints(poisoned_run(sets.plan, inputs)))
        sets.outputs.append(plan.in_place(inputs))
    return sets


def race(arms: list[timing.Arm]) -> None:
    timing.measure(arms, rounds=13, warmup_seconds=0.2, clock=SimulatedClock())


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    on_gpu = draw
    monkeypatch.setattr(
        "coda_agent.verifier.numerics.inputs.draw", lambda *args, device="cpu", **more: on_gpu(*args, **more)
    )


SCALED = tiny(outputs={"s": {"shape": ("M",), "dtype": "fp32"}}, reference="s = rstd * 2")


def keep_what_looks_right(out: Tensor, right: Tensor) -> None:
    """Keep an output value that is finite and positive; replace any other value, such as the NaN that
    ``poisoned_run`` writes."""
    out.copy_(torch.where(out.isfinite() & (out > 0), out, right))


def test_the_verified_work_passes_and_every_timed_call_finds_its_outputs_poisoned() -> None:
    plan = CpuPlan(SCALED, doubled)
    sets = sets_of(plan)
    plan.poisoned.clear()
    rival = CpuPlan(SCALED, doubled)
    kept = _incumbent_arm(cast(KernelCase, SimpleNamespace(plans=lambda: [rival])), sets)
    race([sets.candidate("candidate"), sets.candidate("again", after=lambda: None), kept])
    sets.compare()
    assert len(plan.poisoned) >= 2 * 13 and all(plan.poisoned)
    assert len(rival.poisoned) >= 13 and all(rival.poisoned)


def test_a_kernel_that_keeps_what_looks_right_is_another_output() -> None:
    plan = CpuPlan(SCALED, doubled, keep_what_looks_right)
    sets = sets_of(plan)
    for inputs, outputs in zip(sets.inputs, sets.outputs, strict=True):
        plan.run(inputs, outputs)
    sets.compare()  # raises nothing, because the run above left correct values
    race([sets.candidate("candidate")])
    with pytest.raises(Failed, match=r"case tiny: output\(s\) s of timed calls differ") as failed:
        sets.compare()
    assert failed.value.code == "other_output"


def test_a_kernel_that_keeps_its_answers_in_its_workspace_finds_none_there() -> None:
    plan = CpuPlan(SCALED, doubled)
    kept, seen = plan.workspace[:4].view(torch.float32), []

    def remembering(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        seen.append(bool(kept == inputs["rstd"].sum()))
        kept.copy_(inputs["rstd"].sum())
        return doubled(inputs)

    sets = sets_of(plan, 1)
    plan.kernel = remembering
    for _ in range(2):
        plan.run(sets.inputs[0], sets.outputs[0])
    assert seen == [False, True]
    race([sets.candidate("candidate"), sets.arm("rival", [lambda: None])])
    assert len(seen) > 13 and not any(seen[2:])


def test_a_kernel_that_makes_its_task_an_easier_one_is_found() -> None:
    def easier(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        right = doubled(inputs)
        three_in_a_row(inputs["w"].view(-1).view(torch.int16))
        return right

    sets = sets_of(CpuPlan(SCALED, doubled))
    cast(CpuPlan, sets.plan).kernel = easier
    race([sets.candidate("candidate")])
    with pytest.raises(Failed, match=r"input\(s\) w were changed") as failed:
        sets.compare()
    assert failed.value.code == "inputs_written"


def test_an_arm_without_outputs_of_ours_has_as_much_overwritten_elsewhere() -> None:
    plan = CpuPlan(SCALED, doubled)
    sets = sets_of(plan)
    fresh = sets.arm("rival", [lambda: None, lambda: None])
    assert fresh.before is not None
    outputs = [each["s"].clone() for each in sets.outputs]
    fresh.before()
    assert bool((sets.spare["s"] > 0).all()) and sets.spare["s"].shape == outputs[0].shape
    assert all(torch.equal(a, b["s"]) for a, b in zip(outputs, sets.outputs, strict=True))


def test_an_update_keeps_its_buffer_and_is_compared_on_inputs_drawn_again() -> None:
    spec, _ = updating()

    def updated(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        step = inputs["alpha"] * (inputs["dy"].mT.float() @ inputs["x"].float())
        return {"picked": inputs["x"][:, 0].float(), "new": inputs["dw"] + step, "old": inputs["dw"].sum(0)}

    plan = CpuPlan(spec, updated)
    sets = sets_of(plan)
    first = [inputs["dw"].clone() for inputs in sets.inputs]
    arm = sets.candidate("candidate")
    assert arm.before is not None
    before = [
        {n: t.clone() for n, t in {**i, **o}.items()} for i, o in zip(sets.inputs, sets.outputs, strict=True)
    ]
    arm.before()
    assert bool((plan.workspace.view(torch.float32) > 0).all())  # only the workspace is overwritten
    for each, *now in zip(before, sets.inputs, sets.outputs, strict=True):
        assert all(torch.equal(each[n], t) for tensors in now for n, t in tensors.items())
    race([arm])
    assert all(not torch.equal(a, b["dw"]) for a, b in zip(first, sets.inputs, strict=True))
    sets.compare()
    plan.kernel = lambda inputs: updated(inputs) | {"picked": inputs["x"][:, 1].float()}
    with pytest.raises(Failed, match=r"output\(s\) picked"):
        sets.compare()


def test_sets_are_two_at_least_and_together_larger_than_the_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=50 * 1024)
    )
    wanted = {n: sets_wanted({"x": torch.empty(n * 1024, dtype=torch.uint8)}) for n in (1, 20, 25, 50, 100)}
    assert wanted == {1: MOST_SETS, 20: 3, 25: 2, 50: 2, 100: 2}
