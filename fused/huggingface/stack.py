"""Implement whole-stack mode. In this mode the last kernel of a layer also computes the next layer's first
norm, except for the row scaling. This saves a pass over the residual stream.

The layer returns the residual stream. It attaches the begun norm (the norm without the row scaling) to the
stream as an attribute. The next layer removes the attribute, and uses the begun norm if it was computed for
that layer's own norm. If the attribute is missing, for example because a hook replaced the stream, the next
layer computes the whole norm itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from coda_agent.fused.chains import Begun

_ATTRIBUTE = "_coda_agent_begun_norm"


class BegunFor(NamedTuple):
    """A stream's attribute: a norm of the stream, without the row scaling. ``norm``: the norm's module.
    ``changes``: how often the stream had been changed in place when the norm was computed; None if
    unknown."""

    norm: nn.Module
    begun: Begun | None
    changes: int | None


def _changes(stream: Tensor) -> int | None:
    """How often the stream was changed in place. The result is None for inference tensors, which do not count
    changes, and in compiled code, which cannot read the count."""
    return None if torch.compiler.is_compiling() or stream.is_inference() else stream._version


def hand_over(stream: Tensor, norm: nn.Module, begun: Begun | None) -> Tensor:
    setattr(stream, _ATTRIBUTE, BegunFor(norm, begun, _changes(stream)))
    return stream


def take(stream: Tensor, layer: Any) -> Begun | None:
    """Remove the attribute from the stream. Return the begun norm if it was computed for the layer's first
    norm, and if the stream has not changed since; otherwise return None."""
    found: BegunFor | None = getattr(stream, _ATTRIBUTE, None)
    if found is None:
        return None
    setattr(stream, _ATTRIBUTE, None)
    own = found.norm is layer.input_layernorm and not changing(layer._forward_pre_hooks)
    changed = None not in (found.changes, now := _changes(stream)) and found.changes != now
    return found.begun if own and not changed else None


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks, which may read or change its values or gradients. PyTorch's global hooks
    count, because they are every module's."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks or _has_any_global_hook())


def changing(hooks: Mapping[int, Any]) -> bool:
    """Whether any of these hooks may change a stream in place. Transformers' own hooks only record the
    stream."""
    return any(getattr(hook, "__name__", "") != "output_capturing_hook" for hook in hooks.values())


def refusal(layer: Any, norm: Any, sharded: bool = False) -> str:
    """Say why a layer cannot compute the next layer's norm without its row scaling; return "" if it can.
    ``sharded``: FSDP shards the weights while the layer does not run."""
    own, other = layer.post_attention_layernorm.weight, norm.weight
    if changing(layer._forward_hooks):
        return "the layer has hooks"
    if hooked(norm):
        return "the next layer's norm has hooks"
    if type(other) not in (nn.Parameter, Tensor) and not sharded:
        return f"the next layer's norm has a {type(other).__name__} as weight"
    if own.dtype == torch.float16:
        return "in fp16 each layer computes its whole first norm"
    if other.device != own.device:
        return f"the next layer's norm is on {other.device}, this layer on {own.device}"
    return ""
