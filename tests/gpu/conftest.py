"""A fixture of all GPU tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def unused_memory_goes_back() -> Iterator[None]:
    """After each test, return PyTorch's cached memory to the GPU. The other test processes on the GPU, and
    the workers of their tests, may need it."""
    yield
    torch.cuda.empty_cache()
