"""Tests of FlashInfer's and upstream CODA's entries without a GPU. PyTorch replaces the functions of both
libraries. The tests cover the arguments that these functions receive, what else an entry computes in a
call, and how it reads the outputs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from test_columns_libraries import LIBRARIES, case, check, flops, flops_wanted, losses
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coda_agent.comparison.competitors import apart, flashinfer, upstream


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
    """Rotate by the negative of the angle, as upstream CODA does. Columns 2*i and 2*i + 1 are a pair, whose
    frequency is ``freq[2*i]``."""
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
    """FlashInfer's users add the residual with FlashInfer's fused kernel, so the entry must not add it in an
    additional pass of PyTorch."""
    called: list[str] = []
    norms = sys.modules["flashinfer.norm"]
    for kernel in ("rmsnorm", "fused_add_rmsnorm"):
        monkeypatch.setattr(norms, kernel, lambda *given, kernel=kernel, **named: called.append(kernel))
    monkeypatch.setattr(torch, "addmm", lambda *given, **named: called.append("addmm"))
    flashinfer.ENTRIES[name].build(case(name)[1])
    assert called == ["fused_add_rmsnorm"]


@pytest.mark.parametrize("name", flashinfer.ENTRIES)
def test_flashinfers_calls_are_a_product_its_kernels_and_nothing_else(
    name: str, played: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call may also have one pass of PyTorch that scales the rows of x. The entry's note must state this
    pass."""

    class Launched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            launched.extend([] if func.is_view else [func.overloadpacket.__name__])
            return func(*args, **(kwargs or {}))

    launched: list[str] = []
    for module in ("flashinfer.activation", "flashinfer.norm", "flashinfer.rope"):
        for kernel in PLAYED[module]:
            monkeypatch.setattr(sys.modules[module], kernel, lambda *given, **named: named.get("out"))
    prepared = flashinfer.ENTRIES[name].build(case(name)[1])
    with Launched():
        prepared.call()
    scaled = ["mul", "copy_"] if "scales" in flashinfer.ENTRIES[name].note else []
    products = launched[len(scaled) :]
    assert launched[: len(scaled)] == scaled and products and set(products) == {"mm"}


@pytest.mark.parametrize(
    ("library", "name"), [(m, n) for m in ("FlashInfer", "upstream CODA") for n in LIBRARIES[m].ENTRIES]
)
def test_played_calls_make_the_specs_products_and_no_more(library: str, name: str, played: None) -> None:
    assert flops(LIBRARIES[library].ENTRIES[name].build(case(name)[1]).call) == flops_wanted(name) > 0


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
