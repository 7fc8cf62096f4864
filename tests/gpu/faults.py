"""Tasks that do to a GPU what a wrong kernel can do."""

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
