"""What values an input may have: all finite ones of its dtype, of targets those that the init names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from primitives.interpret import torch_dtype
from verifier.spec_parts import TensorSpec


def bounds(tensor: TensorSpec, sizes: Mapping[str, int]) -> tuple[float, float]:
    """The least and the largest value of an input's domain at these sizes."""
    if tensor.init.integers:
        low, high = tensor.init.range_at(sizes)
        ignored = tensor.init.ignored
        return float(low if ignored is None else min(low, ignored)), float(high)
    dtype = torch_dtype(tensor.dtype)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        return info.min, info.max
    return 0.0 if tensor.init.count is not None else torch.iinfo(dtype).min, torch.iinfo(dtype).max
