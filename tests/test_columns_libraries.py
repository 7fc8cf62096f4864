"""The libraries' columns without a GPU: each entry against its spec's reference, at tiny sizes.

Halves apart run as they are, without the compiler. Liger's own kernels run in Triton's interpreter, in a
process of its own. FlashInfer and upstream CODA do not run without a GPU: PyTorch plays their functions
here, so that what is tested is what they are given and how their outputs are read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from verifier import reference
from verifier.columns import APART, APART_AUTOTUNE, EAGER_APART, apart, entries, flashinfer, liger, upstream
from verifier.columns.entry import Entry, Given
from verifier.inputs import draw
from verifier.spec import Spec
from verifier.spec_file import load

SPECS = Path(__file__).parent.parent / "specs"
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
LIBRARIES = {"Liger": liger, "FlashInfer": flashinfer, "upstream CODA": upstream}
GIVEN = {  # of the outputs: what a library does not give, or gives another number for
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


def losses(name: str, entry: Entry, *, half: bool = False) -> dict[str, float]:
    """Each given output's error relative to the reference's rms, of the second of two calls: what the first
    left must not show. A wrong shape is an error of infinity. ``half``: fp16 in place of bf16."""
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
    assert all(loss < 0.01 for loss in found.values()), found  # bf16 rounds at 0.002, a few times


# ── What there is ─────────────────────────────────────────────────────────────────────────────────────────


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
    entries: dict[str, Entry] = LIBRARIES[library].ENTRIES
    for name, entry in entries.items():
        spec = load(SPECS / f"{name}.yaml", check=False)
        if wanted(library, name) < set(spec.outputs):
            assert "give" in entry.note or "not compared" in entry.note
        if "rstd" in spec.inputs and "x" in spec.inputs:
            assert "PyTorch scales x's rows first" in entry.note


# ── Halves apart ──────────────────────────────────────────────────────────────────────────────────────────


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
    apart._compiled.cache_clear()
    check("apart", "gemm_swiglu", losses("gemm_swiglu", entries(arm)["gemm_swiglu"]))
    apart._compiled.cache_clear()
    assert asked == modes


def test_every_spec_that_a_library_gets_with_halves_apart_pytorch_gets_so_too() -> None:
    """Else a library would be compared with PyTorch on a layout that nobody keeps for it."""
    assert {name for name, entry in liger.ENTRIES.items() if "apart" in entry.note} <= set(apart.FORMULATIONS)
    assert all("outside the clock" in formulation.note for formulation in apart.FORMULATIONS.values())
    for arm in (EAGER_APART, APART, APART_AUTOTUNE):
        assert entries(arm).keys() == apart.FORMULATIONS.keys()


def test_halves_apart_lie_contiguous() -> None:
    for name, formulation in apart.FORMULATIONS.items():
        assert all(tensor.is_contiguous() for tensor in formulation.arrange(case(name)[1])), name


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode 'fast' is unknown; use one of default, max-autotune"):
        apart.entry("fast")


def test_rows_are_scaled_by_one_compiled_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For all three libraries, which have no row scale: what PyTorch adds to them is as good as it can be."""
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
def interpreted() -> dict[str, dict[str, float]]:
    """What ``main`` prints, in a process where Triton interprets and nothing is compiled."""
    root = str(Path(__file__).parent.parent)
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", liger.ENTRIES)
def test_ligers_kernels_give_the_spec(name: str, interpreted: dict[str, dict[str, float]]) -> None:
    found = interpreted[name]
    extra = {key: found.pop(key) for key in ("loss",) if key in found}
    check("Liger", name, found)
    assert all(loss < 0.01 for loss in extra.values()), extra


def _as_compiled() -> None:
    """The interpreter has none of CUDA's own functions, so Triton's stand for the two that Liger takes; and
    it leaves floats as they are, which the compiler makes fp32 scalars."""
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import fused_add_rms_norm, geglu, layer_norm, rms_norm
    from triton.runtime import interpreter

    for module in (fused_add_rms_norm, layer_norm, rms_norm):
        module.rsqrt = lambda x: tl.rsqrt(x)  # looked up late: the interpreter swaps it
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
    """Every entry of Liger's, and the loss that it gives in place of a log-sum-exp. In fp16, because the
    interpreter multiplies two numbers in bf16 wrongly."""
    _as_compiled()
    found = {name: losses(name, entry, half=True) for name, entry in liger.ENTRIES.items()}
    for name in ("gemm_partial_cross_entropy", "gemm_rmsnorm_partial_cross_entropy"):
        spec, given = case(name)
        given = in_half(given)
        truth = reference.oracle(spec, given.inputs, given.sizes)
        rows = given.inputs["target"] >= 0
        _, loss = liger.ENTRIES[name].build(given).call()
        found[name]["loss"] = _loss(loss[rows], (truth["lse"] - truth["target_logit"])[rows])
    print(json.dumps(found))


# ── FlashInfer and upstream CODA, played by PyTorch ───────────────────────────────────────────────────────


def _act_and_mul(input: Tensor, out: Tensor, **act: str) -> Tensor:
    gate, up = input.float().chunk(2, -1)
    acted = torch.nn.functional.gelu(gate, **act) if act else torch.nn.functional.silu(gate)
    return out.copy_(acted * up)


def _rmsnorm(input: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    wide = input.float()
    return out.copy_(wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight)


def _fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual.copy_(input.float() + residual)
    _rmsnorm(residual, weight, eps, input)


def _apply_rope(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    assert cos_sin_cache.dtype == torch.float32 and not is_neox
    cos, sin = cos_sin_cache[positions].chunk(2, -1)
    for part in (query, key):
        _turn(part.view(part.shape[0], -1, head_size), cos[:, None], sin[:, None])


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    even, odd = heads[..., 0::2].float(), heads[..., 1::2].float()
    heads[..., 0::2], heads[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos


def _gemm(A: Tensor, B: Tensor, out: Tensor) -> Tensor:
    return torch.mm(A, B, out=out)


def _gemm_swiglu(A: Tensor, B: Tensor, pre_act: Tensor, post_act: Tensor) -> tuple[Tensor, Tensor]:
    torch.mm(A, B, out=pre_act)
    gate, up = pre_act[:, 0::2].float(), pre_act[:, 1::2]
    return pre_act, post_act.copy_(torch.nn.functional.silu(gate) * up)


def _dswiglu_backward(pre_act: Tensor, grad_out: Tensor, grad_pre: Tensor) -> Tensor:
    leaf = pre_act.float().requires_grad_()
    act = torch.nn.functional.silu(leaf[:, 0::2]) * leaf[:, 1::2]
    return grad_pre.copy_(torch.autograd.grad(act, leaf, grad_out.float())[0])


def _gemm_rope(A: Tensor, B: Tensor, pos: Tensor, freq: Tensor, out: Tensor) -> Tensor:
    """The package turns by the negative of the angle; an even column's frequency is its pair's."""
    torch.mm(A, B, out=out)
    angle = pos[:, None] * freq[0::2]
    _turn(out, angle.cos(), -angle.sin())
    return out


def _gemm_qkv_sqsum(
    A: Tensor, B: Tensor, head_dim: int, num_segments: int, out: Tensor
) -> tuple[Tensor, Tensor]:
    heads = torch.mm(A, B, out=out).float().unflatten(1, (-1, head_dim))
    squares = torch.zeros(*heads.shape[:2], num_segments)
    squares[..., 0] = heads.square().sum(-1)
    return out, squares.flatten(1)


def _qknorm_rope_fwd(
    x: Tensor, ssq: Tensor, gamma: Tensor, pos: Tensor, freq: Tensor, head_dim: int, num_heads_qk: int,
    num_segments: int, eps: float, y: Tensor,
) -> Tensor:  # fmt: skip
    squares = ssq.view(-1, num_heads_qk, num_segments).sum(-1, keepdim=True)
    heads = x.float().unflatten(1, (-1, head_dim)) * (squares / head_dim + eps).rsqrt() * gamma
    angle = (pos[:, None] * freq).unflatten(1, (num_heads_qk, -1))
    _turn(heads, angle.cos(), -angle.sin())
    return y.copy_(heads.flatten(1))


def _gemm_lse(A: Tensor, B: Tensor, logits: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    torch.mm(A, B, out=logits)
    return logits, lses.copy_(logits.float().logsumexp(-1))


def _gemm_lse_select_logits(
    A: Tensor, B: Tensor, target: Tensor, ignore_index: int, return_lse: bool, losses: Tensor,
    target_logits: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert target.dtype == torch.int32 and return_lse
    logits, kept = (A @ B).float(), target != ignore_index
    target_logits[kept] = logits[kept].gather(1, target[kept].long()[:, None])[:, 0]
    lse = logits.logsumexp(-1)
    return losses.copy_((lse - target_logits) * kept), lse, target_logits


PLAYED: dict[str, dict[str, Any]] = {
    "flashinfer.activation": {
        "silu_and_mul": _act_and_mul,
        "gelu_tanh_and_mul": lambda input, out: _act_and_mul(input, out, approximate="tanh"),
    },
    "flashinfer.norm": {"rmsnorm": _rmsnorm, "fused_add_rmsnorm": _fused_add_rmsnorm},
    "flashinfer.rope": {"apply_rope_with_cos_sin_cache_inplace": _apply_rope},
    "coda.core.gemm.functional": {
        "gemm": _gemm,
        "gemm_swiglu": _gemm_swiglu,
        "gemm_rope": _gemm_rope,
        "gemm_qkv_sqsum": _gemm_qkv_sqsum,
        "_sqsum_num_segments": lambda head_dim: 2,
        "gemm_lse": _gemm_lse,
        "gemm_lse_select_logits": _gemm_lse_select_logits,
    },
    "coda.core.elementwise.functional": {
        "dswiglu_backward": _dswiglu_backward,
        "qknorm_rope_fwd": _qknorm_rope_fwd,
    },
}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules: dict[str, ModuleType] = {}
    for name, functions in PLAYED.items():
        parts = name.split(".")
        for depth in range(len(parts)):
            path = ".".join(parts[: depth + 1])
            module = modules.setdefault(path, ModuleType(path))
            module.__path__ = []
            if depth:
                setattr(modules[".".join(parts[:depth])], parts[depth], module)
        vars(modules[name]).update(functions)
    for path, module in modules.items():
        monkeypatch.setitem(sys.modules, path, module)
    for module in (upstream, flashinfer):
        monkeypatch.setattr(module, "prepare", lambda: None)
    for module in (upstream, apart):
        monkeypatch.setattr(module, "fused", lambda function: function)
    yield


@pytest.mark.parametrize("name", flashinfer.ENTRIES)
def test_flashinfer_is_given_and_read_as_the_spec_says(name: str, played: None) -> None:
    check("FlashInfer", name, losses(name, flashinfer.ENTRIES[name]))


@pytest.mark.parametrize("name", ["gemm_residual_partial_rmsnorm", "gemm_residual_rmsnorm_gemm"])
def test_flashinfer_adds_and_norms_in_its_one_kernel(
    name: str, played: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after PyTorch has added, in a pass more: that is how it is used, and what its stream is for."""
    called: list[str] = []
    norms = sys.modules["flashinfer.norm"]
    for kernel in ("rmsnorm", "fused_add_rmsnorm"):
        monkeypatch.setattr(norms, kernel, lambda *given, kernel=kernel, **named: called.append(kernel))
    monkeypatch.setattr(torch, "addmm", lambda *given, **named: called.append("addmm"))
    flashinfer.ENTRIES[name].build(case(name)[1])
    assert called == ["fused_add_rmsnorm"]


@pytest.mark.parametrize("name", upstream.ENTRIES)
def test_upstream_is_given_and_read_as_the_spec_says(name: str, played: None) -> None:
    check("upstream CODA", name, losses(name, upstream.ENTRIES[name]))


def test_no_input_and_no_output_counts_as_arranged(played: None) -> None:
    for library in (flashinfer, upstream):
        for name, entry in library.ENTRIES.items():
            _, given = case(name)
            prepared = entry.build(given)
            outputs = prepared.read(prepared.call()).values()
            theirs = {t.data_ptr() for t in (*given.inputs.values(), *outputs)}
            assert not theirs & {t.data_ptr() for t in prepared.arranged}, name


if __name__ == "__main__":
    main()
