"""Tests on an H100: QuACK's arms compute the outputs of their specs, on fixed and on tuned schedules.

The limits differ from those of our kernels, because QuACK uses approximate functions where our kernels may
not. If an arm's formula is correct, its error stays within the limits of this file.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from importlib.metadata import version

import pytest
import torch
from checkout import ROOT
from torch import Tensor

from coda_agent.verifier.baselines import quack
from coda_agent.verifier.baselines.pytorch import products
from coda_agent.verifier.baselines.quack import LIBRARY_ARMS, MATMUL, OWN_TUNER, chained, config, tuned_calls
from coda_agent.verifier.baselines.quack_library import LIBRARY, quack_library
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import error_gate, reference
from coda_agent.verifier.numerics.inputs import FAMILIES, draw
from coda_agent.verifier.numerics.limits import ErrorLimits
from coda_agent.verifier.report import QuackTuned
from coda_agent.verifier.spec.model import Spec

SPECS = ROOT / "specs"
LIMITS = ErrorLimits(rms=2, tile=3, element=4, slope=1e-3, fp32_rms=8, fp32_tile=12, fp32_element=16)
WIDEST = 16384  # larger sizes of a case are reduced to this size, because the truth is computed in fp64
INEXACT = 2.0**-9  # limit on RMS(error) / RMS(truth) of an output that uses approximate functions
SCHEDULES = {
    "pingpong": config(128, 128, True),
    "cooperative": config(256, 128, False, cluster=(1, 2)),
    "swapped": replace(config(128, 192, True), swap_ab=True),
}


def judge(spec: Spec, got: dict[str, Tensor], inputs: dict[str, Tensor], sizes: dict[str, int]) -> None:
    torch.cuda.synchronize()
    truth, yard = reference.oracle(spec, inputs, sizes), reference.yardstick(spec, inputs, sizes)
    loose = LIBRARY[spec.name].inexact
    errors = error_gate.compare(spec, got, truth, yard, LIMITS)
    assert all(e.passed for e in errors if e.name not in loose), [e.reason for e in errors]
    for name in loose:
        error = (got[name].double() - truth[name]).square().mean().sqrt()
        assert error < INEXACT * truth[name].square().mean().sqrt(), name


def poisoned(stages):
    for stage in stages:
        for tensor in () if stage.accumulate else stage.outs.values():
            tensor.fill_(float("nan"))


def admitted(stages):
    """Return the schedules on which the stages can run. QuACK can swap the operands only if no epilogue pairs
    columns or reduces."""
    swaps = not any(s.paired or s.mod.sinks for s in stages)
    return {label: c for label, c in SCHEDULES.items() if swaps or not c.swap_ab}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", ["ragged", "decode"])
@pytest.mark.parametrize("name", LIBRARY)
def test_an_arm_computes_the_outputs_of_its_spec(name, case, family):
    spec = load(SPECS / f"{name}.yaml", check=False)
    sizes = {dim: min(size, WIDEST) for dim, size in spec.case(case).sizes.items()}
    inputs = draw(spec, sizes, 1, device="cuda", family=family)
    for chosen in admitted(quack_library(name, inputs, sizes, spec.constants)).values():
        # new stages for each schedule, because a stage may add to its output
        stages = quack_library(name, inputs, sizes, spec.constants)
        poisoned(stages)
        judge(spec, chained([s.prepare(chosen) for s in stages])(), inputs, sizes)


def test_an_ignored_target_leaves_no_logit_of_the_call_before():
    spec = load(SPECS / "gemm_partial_cross_entropy.yaml", check=False)
    sizes = dict(spec.case("ragged").sizes)
    inputs = draw(spec, sizes, 0, device="cuda")
    (stage,) = quack_library(spec.name, inputs, sizes, spec.constants)
    call = stage.prepare(config(128, 128, True))
    assert call()["target_logit"].count_nonzero() > 800
    inputs["target"].fill_(-100)
    assert call()["target_logit"].count_nonzero() == 0


@pytest.mark.parametrize("arm", LIBRARY_ARMS)
@pytest.mark.parametrize("name", ["gemm_rmsnorm", "gemm_swiglu_mlp", "gemm_qk_norm_rope"])
def test_a_search_finds_a_schedule_that_is_right(name, arm, tmp_path, monkeypatch):
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    spec = load(SPECS / f"{name}.yaml", check=False)
    sizes = dict(spec.case("ragged").sizes)
    inputs = draw(spec, sizes, 0, device="cuda")
    (call,), finalists = tuned_calls(arm, spec, [inputs], sizes)
    judge(spec, call(), inputs, sizes)
    (kept,) = (tmp_path / "tuning").iterdir()
    written = os.stat(kept).st_mtime_ns
    (call,), told = tuned_calls(arm, spec, [inputs], sizes)
    judge(spec, call(), inputs, sizes)
    assert os.stat(kept).st_mtime_ns == written  # the second call read the file and did not search again
    assert told == finalists and all(finalists)


@pytest.mark.parametrize("arm", [OWN_TUNER, MATMUL])
def test_what_was_raced_last_is_raced_again_alone(arm, tmp_path, monkeypatch):
    spec = load(SPECS / "gemm_swiglu_mlp.yaml", check=False)
    sizes = dict(spec.case("ragged").sizes)
    inputs = draw(spec, sizes, 0, device="cuda")
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "first"))
    first = tuned_calls(arm, spec, [inputs], sizes).finalists
    raced, race = [], quack._race

    def watched(*given):
        raced.append([asdict(c) for c in given[-2]])
        return race(*given)

    monkeypatch.setattr(quack, "_race", watched)
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "second"))
    here = {"gpu": torch.cuda.get_device_name(), "version": version("quack-kernels")}
    known = QuackTuned.model_validate(here | {"arms": {arm: first}})
    (call,), again = tuned_calls(arm, spec, [inputs], sizes, known)
    assert raced == first and len(first) == 2
    assert all(after[0] in before for before, after in zip(first, again, strict=True))
    if arm == OWN_TUNER:
        judge(spec, call(), inputs, sizes)


@pytest.mark.parametrize("name", ["gemm_swiglu_mlp", "gemm_grad_accumulate", "gemm_rmsnorm_swiglu_fp16"])
def test_the_bare_matmuls_are_those_of_the_formulation(name, tmp_path, monkeypatch):
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    spec = load(SPECS / f"{name}.yaml", check=False)
    sizes = dict(spec.case("ragged").sizes)
    sets = [draw(spec, sizes, seed, device="cuda") for seed in (0, 1)]
    for inputs, call in zip(sets, tuned_calls(MATMUL, spec, sets, sizes).calls, strict=True):
        made = call()
        torch.cuda.synchronize()
        for found, product in zip(made.values(), products(spec, inputs, sizes), strict=True):
            want = product.a.double() @ product.b.double()
            error = (found.double() - want).square().mean().sqrt()
            assert found.dtype == product.dtype and error < 2**-8 * want.square().mean().sqrt()


def test_a_call_that_finishes_reductions_is_captured_in_a_cuda_graph():
    """A captured call must neither wait for the host nor compile."""
    for name in (
        "gemm_partial_cross_entropy",
        "gemm_residual_rmsnorm_gemm",
        "gemm_residual_partial_layernorm",
    ):
        spec = load(SPECS / f"{name}.yaml", check=False)
        sizes = dict(spec.case("ragged").sizes)
        inputs = draw(spec, sizes, 0, device="cuda")
        stages = quack_library(name, inputs, sizes, spec.constants)
        call = chained([s.prepare(config(128, 128, True)) for s in stages])
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = call()
        poisoned(stages)
        graph.replay()
        judge(spec, outputs, inputs, sizes)
