"""Accepted kernels for PyTorch programs.

``patch(model)`` lets them compute a Hugging Face model, and ``unpatch(model)`` gives it back. ``functional``
has the parts of a layer, with gradients, and ``torch.ops.coda_agent`` every accepted kernel. Importing it
refuses versions of PyTorch, QuACK and CuTeDSL that it was not proved with (``versions.UnprovedVersion``).
"""

from coda_agent.fused import versions

versions.expect("torch", "quack-kernels", "nvidia-cutlass-dsl")

from coda_agent.fused import functional, ops  # noqa: E402  # after the versions that they need
from coda_agent.fused.patching import PatchedPart, Table, patch, unpatch  # noqa: E402

__all__ = ["PatchedPart", "Table", "functional", "ops", "patch", "unpatch"]
