"""Tests of the compared libraries without a GPU. An entry computes one spec with one library. At tiny sizes,
each entry is compared with its spec's reference.

PyTorch's entries that take gate and up as separate matrices run without Inductor. Liger's own kernels run in
Triton's interpreter, in a separate process. FlashInfer and upstream CODA need a GPU, so
test_columns_played.py replaces their functions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from checkout import PYTHONPATH, ROOT
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from coda_agent.comparison.competitors import (
    APART,
    APART_AUTOTUNE,
    EAGER_APART,
    apart,
    entries,
    flashinfer,
    liger,
    upstream,
)
from coda_agent.comparison.competitors.entry import Given, Implementation
from coda_agent.verifier.baselines.pytorch import eager
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import reference
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.spec.model import Spec

pytestmark = pytest.mark.slow

SPECS = ROOT / "specs"
TEN = {
    "gemm_rope",
    "gemm_swiglu",
    "gemm_partial_cross_entropy",
    "gemm_residual_partial_rmsnorm",
    "gemm_rmsnorm",
    "gemm_rmsnorm_swiglu",
    "gemm_rmsnorm_rope",
    "gemm_rmsnorm_partial_cross_entropy",
    "gemm_residual_rmsnorm_bwd",
    "gemm_swiglu_bwd",
}
Told = dict[str, dict[str, dict[str, float]]]  # for each spec, the dicts "losses", "extra" and "counted"
LIBRARIES = {"Liger": liger, "FlashInfer": flashinfer, "upstream CODA": upstream}
GIVEN = {  # the compared outputs, where a library does not compute all outputs of a spec
    ("Liger", "gemm_residual_partial_rmsnorm"): {"h", "rstd"},
    ("Liger", "gemm_residual_partial_layernorm"): {"h", "mean", "rstd"},
    ("Liger", "gemm_residual_rmsnorm_bwd"): {"dgamma", "hn"},
    ("Liger", "gemm_partial_cross_entropy"): {"logits"},
    ("Liger", "gemm_rmsnorm_partial_cross_entropy"): {"logits"},
    ("FlashInfer", "gemm_residual_partial_rmsnorm"): {"h"},
    ("FlashInfer", "gemm_residual_rmsnorm_gemm"): {"h", "z"},
    ("FlashInfer", "gemm_qk_norm_rope"): {"q"},
    ("upstream CODA", "gemm_qk_norm_rope"): {"q"},
}


def case(name: str) -> tuple[Spec, Given]:
    spec = load(SPECS / f"{name}.yaml", check=False)
    sizes = {dim: {"M": 6, "H": 3, "P": 16}.get(dim, 24 + 8 * i) for i, dim in enumerate(spec.dims)}
    return spec, Given(draw(spec, sizes, 0), sizes, spec.constants)


def losses(name: str, entry: Implementation, *, half: bool = False) -> dict[str, float]:
    """Return, for each output of ``entry``, the RMS of its error divided by the RMS of the reference. If the
    shape of an output is wrong, the output's error is infinite.

    The entry is called twice, and the second call's outputs are checked: they must not depend on what the
    first call left behind. ``half``: use fp16 instead of bf16.
    """
    spec, given = case(name)
    if half:
        given = in_half(given)
    before = {key: value.clone() for key, value in given.inputs.items()}
    prepared = entry.build(given)
    prepared.call()
    found = prepared.read(prepared.call())
    assert all(torch.equal(before[key], value) for key, value in given.inputs.items()), name
    truth = reference.oracle(spec, given.inputs, given.sizes)
    return {key: _loss(value, truth[key]) for key, value in found.items()}


def _loss(found: Tensor, truth: Tensor) -> float:
    if found.shape != truth.shape:
        return float("inf")
    return float((found.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt())


def in_half(given: Given) -> Given:
    narrow = {k: v.half() if v.dtype == torch.bfloat16 else v for k, v in given.inputs.items()}
    return given._replace(inputs=narrow)


def wanted(library: str, name: str) -> set[str]:
    return GIVEN.get((library, name), set(load(SPECS / f"{name}.yaml", check=False).outputs))


def check(library: str, name: str, found: Mapping[str, float]) -> None:
    assert found.keys() == wanted(library, name)
    # 0.01 allows a few roundings to bf16; each adds an error of about 0.002
    assert all(loss < 0.01 for loss in found.values()), found


def flops(call: Callable[[], object]) -> int:
    """Count the floating-point operations of the matrix products in ``call``."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def flops_wanted(name: str) -> int:
    """Count the floating-point operations of the matrix products in the spec's own formulation."""
    spec, given = case(name)
    return flops(*eager(spec, [given.inputs], given.sizes))


# ── Entries and reasons for their absence ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_of_the_ten_operators_has_an_entry_or_a_reason_why_not(library: str) -> None:
    entries, absent = LIBRARIES[library].ENTRIES, LIBRARIES[library].ABSENT
    assert not TEN - entries.keys() - absent.keys()
    assert not entries.keys() & absent.keys()
    assert all(len(reason.split()) > 3 for reason in absent.values())


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_of_a_library_is_a_spec(library: str) -> None:
    names = LIBRARIES[library].ENTRIES.keys() | LIBRARIES[library].ABSENT.keys()
    assert names <= {path.stem for path in SPECS.glob("*.yaml")}


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_differs_from_the_spec_stands_in_the_note(library: str) -> None:
    entries: dict[str, Implementation] = LIBRARIES[library].ENTRIES
    for name, entry in entries.items():
        spec = load(SPECS / f"{name}.yaml", check=False)
        if wanted(library, name) < set(spec.outputs):
            assert "return" in entry.note or "not compared" in entry.note
        if "rstd" in spec.inputs and "x" in spec.inputs:
            assert "PyTorch scales x's rows first" in entry.note


# ── PyTorch with separate halves ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", apart.FORMULATIONS)
@pytest.mark.parametrize("compiled", [True, False])
def test_halves_apart_give_the_spec_in_its_layout_and_dtypes(name: str, compiled: bool) -> None:
    spec, given = case(name)
    entry = (apart.entry("default", backend="eager") if compiled else entries(EAGER_APART))[name]
    check("apart", name, losses(name, entry))
    prepared = entry.build(given)
    found = prepared.read(prepared.call())
    yardstick = reference.yardstick(spec, given.inputs, given.sizes)
    assert {key: value.dtype for key, value in found.items()} == {k: v.dtype for k, v in yardstick.items()}


def test_halves_apart_are_compiled_once_for_all_sets_of_inputs_of_a_case() -> None:
    _, given = case("gemm_swiglu")
    other = given._replace(sizes={**given.sizes, "M": 7})
    built = apart.entry("default", backend="eager")["gemm_swiglu"].build
    first, second, third = (built(each).call for each in (given, given, other))
    assert isinstance(first, partial) and isinstance(second, partial) and isinstance(third, partial)
    assert first.func is second.func
    assert first.func is not third.func


@pytest.mark.parametrize(
    ("arm", "modes"), [(EAGER_APART, []), (APART, ["default"]), (APART_AUTOTUNE, ["max-autotune"])]
)
def test_an_arm_with_halves_apart_is_compiled_as_its_name_says(
    arm: str, modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def under_compile(step: Any, mode: str, backend: str) -> Any:
        asked.append(mode)
        assert backend == "inductor"
        return step

    monkeypatch.setattr(apart, "under_compile", under_compile)
    apart._compiled_step.cache_clear()
    check("apart", "gemm_swiglu", losses("gemm_swiglu", entries(arm)["gemm_swiglu"]))
    apart._compiled_step.cache_clear()
    assert asked == modes


def test_every_spec_that_a_library_gets_with_halves_apart_pytorch_gets_so_too() -> None:
    """If a library has an entry with separate halves, PyTorch needs one, too. Otherwise the library would be
    compared with PyTorch in the interleaved layout, which no PyTorch user would choose."""
    notes = ("halves", "moved before", "separate")
    found = {name for name, entry in liger.ENTRIES.items() if any(words in entry.note for words in notes)}
    assert found and found <= set(apart.FORMULATIONS)
    assert all("before timing" in formulation.note for formulation in apart.FORMULATIONS.values())
    for arm in (EAGER_APART, APART, APART_AUTOTUNE):
        assert entries(arm).keys() == apart.FORMULATIONS.keys()


def test_halves_apart_lie_contiguous() -> None:
    for name, formulation in apart.FORMULATIONS.items():
        assert all(tensor.is_contiguous() for tensor in formulation.arrange(case(name)[1])), name


def test_rows_are_scaled_by_one_compiled_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None of the three libraries can scale rows. So PyTorch scales the rows, in the fastest way: one
    compiled pass."""
    compiled: list[Any] = []

    def fused(function: Any) -> Any:
        compiled.append(function)
        return function

    monkeypatch.setattr(apart, "fused", fused)
    _, given = case("gemm_rmsnorm_swiglu")
    operand, scale = apart.scaled_rows(given)
    assert compiled == [apart.scale_into] and operand is not given.inputs["x"]
    scale()
    x, rstd = given.inputs["x"], given.inputs["rstd"]
    assert torch.equal(operand, (x * rstd[:, None]).bfloat16())
    _, plain = case("gemm_swiglu")
    assert apart.scaled_rows(plain)[0] is plain.inputs["x"] and len(compiled) == 1


# ── Liger ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def interpreted() -> Told:
    """Run ``main`` in a process in which Triton interprets kernels and torch.compile is disabled. Return the
    output of ``main``."""
    paths = os.pathsep.join(filter(None, [PYTHONPATH, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: Told = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", liger.ENTRIES)
def test_ligers_kernels_give_the_spec(name: str, interpreted: Told) -> None:
    told = interpreted[name]
    check("Liger", name, told["losses"])
    assert all(loss < 0.01 for loss in told["extra"].values()), told


@pytest.mark.parametrize("name", liger.ENTRIES)
def test_ligers_calls_make_the_specs_products_and_no_more(name: str, interpreted: Told) -> None:
    assert interpreted[name]["counted"]["flops"] == flops_wanted(name) > 0


WEIGHT, TURNED = ("w",), ("w", "tables")
# For each spec, the inputs that Liger copies into its own layout. For layer norm, Liger needs a beta, which
# has the size of gamma; so gamma is listed.
ARRANGED = {
    "gemm_swiglu": WEIGHT,
    "gemm_rmsnorm_swiglu": WEIGHT,
    "gemm_rmsnorm_swiglu_fp16": WEIGHT,
    "gemm_swiglu_mlp": ("w_gate_up",),
    "gemm_geglu": WEIGHT,
    "gemm_swiglu_bwd": ("z",),
    "gemm_residual_partial_layernorm": ("gamma",),
    "gemm_rope": TURNED,
    "gemm_rope_positions": TURNED,
    "gemm_rmsnorm_rope": TURNED,
    "gemm_qk_norm_rope": ("w", "gamma", "tables"),
    "gemm_partial_cross_entropy": ("target",),
    "gemm_rmsnorm_partial_cross_entropy": ("target",),
}


@pytest.mark.parametrize("name", liger.ENTRIES)
def test_what_liger_keeps_in_its_own_layout_is_told_apart_from_what_a_call_holds(
    name: str, interpreted: Told
) -> None:
    _, given = case(name)
    sizes = {key: t.numel() * t.element_size() for key, t in given.inputs.items()}
    sizes["tables"] = 2 * given.sizes["M"] * given.sizes.get("P", 0) * torch.float32.itemsize
    assert interpreted[name]["counted"]["arranged"] == sum(sizes[key] for key in ARRANGED.get(name, ()))


def _as_compiled() -> None:
    """Make Triton's interpreter compute what Triton's compiler computes.

    The interpreter lacks two CUDA functions that Liger calls, so Triton's own functions replace them. The
    compiler turns Python floats into fp32 scalars; the patched interpreter does the same.
    """
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import fused_add_rms_norm, geglu, layer_norm, rms_norm
    from triton.runtime import interpreter

    for module in (fused_add_rms_norm, layer_norm, rms_norm):
        module.rsqrt = lambda x: tl.rsqrt(x)  # a lambda, because the interpreter replaces tl.rsqrt later
    geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
    for module in (liger, apart):
        vars(module)["fused"] = lambda function: function
    convert = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = converted


def main() -> None:
    """Print, as JSON, the losses and the counts of each Liger entry. For cross-entropy, also print the error
    of the loss that Liger returns instead of a log-sum-exp. Inputs are fp16, because the interpreter
    multiplies bf16 numbers wrongly."""
    _as_compiled()
    found: Told = {}
    for name, entry in liger.ENTRIES.items():
        prepared = entry.build(in_half(case(name)[1]))
        counted: dict[str, float] = {"arranged": prepared.arranged_bytes, "flops": flops(prepared.call)}
        found[name] = {"losses": losses(name, entry, half=True), "extra": {}, "counted": counted}
    for name in ("gemm_partial_cross_entropy", "gemm_rmsnorm_partial_cross_entropy"):
        spec, given = case(name)
        given = in_half(given)
        truth = reference.oracle(spec, given.inputs, given.sizes)
        rows = given.inputs["target"] >= 0
        _, loss = liger.ENTRIES[name].build(given).call()
        found[name]["extra"]["loss"] = _loss(loss[rows], (truth["lse"] - truth["target_logit"])[rows])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
