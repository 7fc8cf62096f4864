"""Accepted kernels for PyTorch programs.

``patch(model)`` lets them compute a Hugging Face model, and ``unpatch(model)`` gives it back. ``functional``
has the parts of a layer, with gradients, and ``torch.ops.coda_agent`` every accepted kernel.
"""

from coda_agent.fused import functional, ops
from coda_agent.fused.patching import PatchedPart, Table, patch, unpatch

__all__ = ["PatchedPart", "Table", "functional", "ops", "patch", "unpatch"]
