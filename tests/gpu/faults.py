"""Tasks for a worker. Each task causes one fault that a wrong kernel can cause on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _astray(pointer, offset):
    tl.store(pointer + offset, 1.0)


def illegal_address(_: object) -> dict[str, Any]:
    _astray[(1,)](torch.zeros(1, device="cuda"), 1 << 44)
    torch.cuda.synchronize()
    return {}


def hang(_: object) -> dict[str, Any]:
    torch.cuda._sleep(1 << 50)
    torch.cuda.synchronize()
    return {}


def out_of_memory(_: object) -> dict[str, Any]:
    torch.empty(1 << 45, device="cuda")
    return {}


def assertion(_: object) -> dict[str, Any]:
    torch.zeros(4, device="cuda")[torch.tensor([7], device="cuda")].sum().item()
    return {}


def one_too_far(_: object) -> dict[str, Any]:
    """Write directly behind the end of a tensor. The address belongs to memory that PyTorch has allocated, so
    the GPU raises no error."""
    _astray[(1,)](torch.zeros(128, device="cuda"), 128)
    torch.cuda.synchronize()
    return {}


RACE = """
extern "C" __global__ void race(int *out) {
    __shared__ int seen[128];
    seen[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = seen[(threadIdx.x + 64) % 128];
}
"""


def race(_: object) -> dict[str, Any]:
    """Let warps read shared memory that other warps write, without a barrier."""
    out = torch.zeros(128, device="cuda", dtype=torch.int32)
    torch.cuda._compile_kernel(RACE, "race")((1, 1, 1), (128, 1, 1), (out,))
    torch.cuda.synchronize()
    return {}
