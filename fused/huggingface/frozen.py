"""Keep reordered copies of weights while a caller promises that the weights do not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from coda_agent.fused.huggingface.family import check_module, sharded


class _Copy(NamedTuple):
    """A reordered weight, and the state of the original weights when it was computed."""

    reordered: Tensor
    state: list[Any]


# The copies of each module in a frozen model, by the function that computes them and its keywords.
_copies: WeakKeyDictionary[nn.Module, dict[Any, _Copy]] = WeakKeyDictionary()


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """A context in which the weights of a patched model do not change, as the caller promises. Calls without
    gradients then reorder each weight only once, and keep the copy until the context ends. The copies take
    nearly as much memory as the layers' weights. A model that FSDP shards keeps none.

    Inside the context, a call that records gradients of weights raises RuntimeError, and so does a call after
    a change of weights, if PyTorch noticed the change. A CUDA graph that was captured inside reads the
    copies: replay it only inside.
    """
    check_module(model)
    added = [] if sharded(model) else [module for module in model.modules() if module not in _copies]
    _copies.update({module: {} for module in added})
    try:
        yield
    finally:
        for module in added:
            del _copies[module]


def is_frozen(module: nn.Module) -> bool:
    """Whether a module may keep copies of its weights. Compiled code keeps none."""
    return not torch.compiler.is_compiling() and module in _copies


def copy_of(module: nn.Module, make: partial[Tensor], *weights: Tensor) -> Tensor:
    """``make(*weights)``, computed once for a frozen module."""
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        raise RuntimeError(
            "fused.frozen: this call records gradients of weights, which must not change inside the context: "
            "train outside of it, or call the model under torch.no_grad()"
        )
    state = [(id(w), w.data_ptr(), None if w.is_inference() else w._version) for w in weights]
    copies, key = _copies[module], (make.func, *sorted(make.keywords.items()))
    copy = copies.get(key)
    if copy is None:
        with torch.inference_mode(False), torch.no_grad():  # autograd cannot save inference tensors
            copy = _Copy(make(*weights), state)
        if weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return copy.reordered  # every replay of the graph computes it again
        copies[key] = copy
    if copy.state != state:
        raise RuntimeError(
            f"fused.frozen: weights of a {type(module).__name__} changed inside the context: "
            "change weights outside of it"
        )
    return copy.reordered
