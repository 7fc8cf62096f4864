"""Run accepted kernels in PyTorch models.

``patch(model)`` makes a Hugging Face model run on these kernels, and ``unpatch(model)`` restores the model.
``with frozen(model)`` keeps reordered weights between calls without gradients.
``functional`` has differentiable functions that compute parts of a layer. ``modules`` has ``nn.Module``
classes that use these functions. ``torch.ops.coda_agent`` has every accepted kernel. The import raises
``versions.UnprovedVersion`` for untested versions of PyTorch, QuACK and CuTeDSL.
"""

from coda_agent.fused import versions

versions.expect("torch", "quack-kernels", "nvidia-cutlass-dsl")

from coda_agent.fused import functional, modules, ops  # noqa: E402  # these import the packages checked above
from coda_agent.fused.huggingface.frozen import frozen  # noqa: E402
from coda_agent.fused.huggingface.patching import PatchedPart, Table, patch, unpatch  # noqa: E402

__all__ = ["PatchedPart", "Table", "frozen", "functional", "modules", "ops", "patch", "unpatch"]
