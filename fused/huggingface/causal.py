"""The last norm and the training loss of Hugging Face's causal models, computed by fused parts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as nn_f

from coda_agent.fused import functional, loss
from coda_agent.fused.functional import matmul_dtype
from coda_agent.fused.huggingface.family import Code, code_of
from coda_agent.fused.huggingface.fit import PLAIN_WEIGHTS, not_plain, noted, rename_cache, unfit
from coda_agent.fused.huggingface.layers import norm_of
from coda_agent.fused.pointwise.norm import rms_norm

LOSSES = "transformers.loss.loss_utils"
INPUTS = ("input_ids", "attention_mask", "position_ids", "cache", "inputs_embeds", "use_cache")


def norm_forward(module: Any, usual: Callable[..., Any], x: Tensor, *, centered: bool, original: Code) -> Any:
    """The forward of a model's last norm. ``original``: the code of the norm's class."""
    weight = module.weight
    other = type(weight) not in PLAIN_WEIGHTS or x.dtype != weight.dtype or "_norm" in vars(module)
    if other or noted(original.replaced(module)) or unfit(x, [weight]):
        return usual(x)
    return rms_norm(x, *norm_of(module, centered))


def loss_refusal(model: Any, sharded: bool = False) -> str:
    """Say why a causal model's loss cannot be fused; return "" if it can."""
    head = getattr(model, "lm_head", None)
    if head is None:
        return "there is no lm_head"
    if why := not_plain(head, sharded):
        return f"lm_head {why}"
    if head.bias is not None:
        return "lm_head has a bias"
    if getattr(model.config, "final_logit_softcapping", None):
        return "logits are soft-capped"
    own = model.loss_function
    if own is not sys.modules[LOSSES].ForCausalLMLoss:
        name = getattr(own, "__name__", type(own).__name__)
        return f"the loss is {name}, not transformers' own ForCausalLMLoss"
    return ""


def loss_code() -> tuple[Code, ...]:
    """The functions that compute a causal model's loss from the stream."""
    return (
        code_of(LOSSES, "ForCausalLMLoss", "fixed_cross_entropy"),
        code_of("torch.nn.functional", "cross_entropy", "linear"),
    )


def causal_forward(
    model: Any, usual: Callable[..., Any], *args: Any, originals: tuple[Code, ...], **kwargs: Any
) -> Any:
    """The forward of a causal model. In training with labels, a fused part computes the loss, and no logits
    are returned. ``originals``: the code of the model's class and of its loss."""
    keeps = kwargs.get("logits_to_keep", 0)
    usually = (
        len(args) > 1
        or not model.training
        or kwargs.get("labels") is None
        or isinstance(keeps, Tensor)
        or keeps != 0
        or kwargs.get("ignore_index", loss.IGNORED) != loss.IGNORED
        or noted(originals[0].replaced(model))
        or any(noted(code.replaced()) for code in originals[1:])
        or loss_refusal(model)
        or unfit(model.lm_head.weight, [model.lm_head.weight])
    )
    if usually:
        return usual(*args, **kwargs)
    labels, asked = kwargs.pop("labels"), kwargs.pop("return_dict", None)
    kwargs.pop("logits_to_keep", None)
    rename_cache(kwargs)
    inputs = dict(zip(("input_ids",), args, strict=False))
    # as the model's own forward does, whatever hooks read
    inputs |= {name: kwargs.pop(name, inputs.get(name)) for name in INPUTS}
    found = model.model(**inputs, **kwargs)
    items = kwargs.get("num_items_in_batch")
    total = _loss(found.last_hidden_state, model.lm_head.weight, labels, kwargs.get("shift_labels"), items)
    code = sys.modules["transformers.modeling_outputs"]
    made = code.CausalLMOutputWithPast(
        loss=total, cache=found.cache, hidden_states=found.hidden_states, attentions=found.attentions
    )
    return made if (model.config.return_dict if asked is None else asked) else made.to_tuple()


def _loss(h: Tensor, weight: Tensor, labels: Tensor, shift_labels: Any, num_items_in_batch: Any) -> Tensor:
    """The sum of all tokens' losses, divided by ``num_items_in_batch``. If ``num_items_in_batch`` is None,
    the divisor is the number of tokens that have a target."""
    target = shift_labels
    if target is None:
        target = nn_f.pad(labels, (0, 1), value=loss.IGNORED)[..., 1:]
    target = target.to(h.device)
    total = functional.summed_cross_entropy(h.to(matmul_dtype(h)), weight.to(matmul_dtype(weight)), target)
    number = num_items_in_batch
    if number is None:
        return loss.mean(total, target)
    return total / (number.to(total.device) if isinstance(number, Tensor) else number)
