"""Patch whole Hugging Face models: ``patch`` lets fused parts compute a model, and ``unpatch`` restores the
model.

A patched module has another ``forward``. The module's parameters, names, state dict and class do not change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from types import CodeType
from typing import Any, NamedTuple, cast

from torch import nn

from coda_agent.fused import versions
from coda_agent.fused.huggingface import causal, fit, layers
from coda_agent.fused.huggingface import stack as whole_stack
from coda_agent.fused.huggingface.family import (
    FAMILIES,
    check_module,
    code,
    descends,
    family,
    kind,
    own_forward,
    sharded,
)
from coda_agent.fused.huggingface.fit import Settings
from coda_agent.primitives.system.markdown_table import markdown_table

_ATTRIBUTE = "_coda_agent_patch"


class PatchedPart(NamedTuple):
    """A row of the table: a kind of part, and what computes parts of this kind. For fused parts, ``programs``
    names the programs. For other parts, ``why`` says why they cannot be fused."""

    module: str
    part: str
    runs: str
    programs: str
    why: str


class Table(tuple[PatchedPart, ...]):
    """The table that ``patch`` returns, with one row per kind of part. It is printed as Markdown."""

    def __str__(self) -> str:
        return markdown_table(PatchedPart._fields, self)

    _repr_markdown_ = __str__

    @property
    def fused(self) -> bool:
        """Whether any part is fused."""
        return any(row.runs == "fused" for row in self)


class Patch(NamedTuple):
    """An attribute of a patched module: the function that computes the module. A module is patched as long as
    it has this attribute, even if other code has wrapped its forward."""

    run: Callable[..., Any]
    settings: Settings | None


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that is, or was, patched."""
    usual = partial(type(module).forward, module)
    patch: Patch | None = getattr(module, _ATTRIBUTE, None)
    if patch is None:
        return usual(*args, **kwargs)
    own = () if patch.settings is None else (patch.settings,)
    return patch.run(module, *own, usual, *args, **kwargs)


@cache
def _function(cls: type[nn.Module]) -> Callable[..., Any]:
    """``_forward`` with the signature of the class's own forward."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _forward(module, *args, **kwargs)

    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    return forward


class PatchedForward:
    """The forward of a patched module, which can be copied and pickled with the module."""

    def __init__(self, module: nn.Module):
        self.module = module

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function that accelerate wraps, as it would wrap that of a method. So copies of a wrapped
        module read their own weights."""
        return _function(cast(Any, type(self.module)))

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward.__get__(self.module))

    @property
    def __code__(self) -> CodeType:
        """The code of the module's own forward, whose parameters torch.export reads."""
        return cast(CodeType, inspect.unwrap(type(self.module).forward).__code__)

    def replica(self) -> nn.Module:
        """A replica of the module for torch.nn.DataParallel. Its forward reads the replica's own weights."""
        made = cast(nn.Module, type(self.module)._replicate_for_data_parallel(self.module))
        made.forward = PatchedForward(made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _forward(self.module, *args, **kwargs)


def _attach(module: nn.Module, run: Callable[..., Any], settings: Settings | None = None) -> None:
    setattr(module, _ATTRIBUTE, Patch(run, settings))
    module.forward = PatchedForward(module)
    module._replicate_for_data_parallel = module.forward.replica  # type: ignore[method-assign]


def patch(
    model: nn.Module,
    keep_reordered: bool = False,
    stack: bool = False,
    *,
    attention_in: bool = True,
    rotation: bool = True,
    attention_out: bool = True,
    mlp: bool = True,
    last_norm: bool = True,
    loss: bool = True,
) -> Table:
    """Let fused parts compute the decoder layers, the last norm and the training loss of each Hugging Face
    model in ``model``. The known models are Llama, Mistral, Qwen2, Qwen3 and Gemma. If ``model`` is already
    patched, the earlier patch is undone first.

    ``keep_reordered``: keep copies of the weights that a kernel needs in another order, from a forward to its
    backward. By default forward and backward each reorder the weights. The copies take nearly as much memory
    as the layers' weights. Under activation checkpointing, copies are not kept. ``frozen`` keeps copies
    between calls without gradients.

    ``stack``: each layer also computes the next layer's first norm without the row scaling, if the layer can
    read that norm's weight. Otherwise the next layer computes the whole norm.

    A part that is switched off is computed by PyTorch. ``attention_in``: the norm and the projections of
    queries, keys and values. ``rotation``: the rotation of queries and keys, and the norms of their heads.
    ``attention_out``: the output projection and its residual. ``mlp``: the norm, the MLP and its residual.
    ``last_norm``: the model's last norm. ``loss``: the loss in training, which then returns no logits.

    The model itself computes parts that cannot be fused, and the table says why: for example a part whose
    class or instance has another forward than the family's own. Raises TypeError if ``model`` is no module,
    and UnprovedVersion for an untested version of transformers.
    """
    unpatch(model)
    switches = {
        "attention_in": attention_in,
        "rotation": rotation,
        "attention_out": attention_out,
        "mlp": mlp,
    }
    parts = frozenset(name for name, on in switches.items() if on)
    rows: dict[PatchedPart, list[str]] = {}
    shards = sharded(model)
    following = dict(_following(model)) if stack else {}
    owners = {
        layer: module
        for module in model.modules()
        if descends(module, "Model")
        for layer in cast(Any, module).layers
    }
    last = {getattr(module, "norm", None) for module in model.modules() if descends(module, "Model")}
    for name, module in list(model.named_modules()):
        if module in owners or descends(module, "DecoderLayer"):
            keeps = keep_reordered and not shards
            own = _layer(module, owners.get(module), shards, keeps, parts, following.get(module))
        elif module in last:
            own = _last_norm(module, last_norm)
        elif descends(module, "PreTrainedModel") and not descends(module, "Model"):
            own = _causal(module, shards, loss)
        else:
            continue
        for row in own:
            rows.setdefault(row, []).append(name or "model")
    if not rows:
        known = ", ".join(FAMILIES)
        rows[_row(model, "all", "", f"it has no layer of these families of transformers: {known}")] = [
            "model"
        ]
    return Table(row._replace(module=_together(names)) for row, names in rows.items())


def unpatch(model: nn.Module) -> None:
    """Undo ``patch``. Modules that ``patch`` left alone do not change. A forward that other code has wrapped
    since ``patch`` stays wrapped, and computes what the unpatched module computes. Raises TypeError if
    ``model`` is no module."""
    check_module(model)
    for module in model.modules():
        if vars(module).pop(_ATTRIBUTE, None) is None:
            continue
        vars(module).pop("_replicate_for_data_parallel", None)
        if getattr(module.forward, "__func__", None) is PatchedForward(module).__func__:
            del module.forward


def _following(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield each decoder layer with the next layer. Leave out models in which other code than Hugging Face's
    passes the stream from layer to layer."""
    for module in model.modules():
        if family(module, "Model") and not own_forward(module):
            yield from pairwise(cast(Any, module.layers))


def _no_next_norm(layer: Any, following: Any, why: dict[str, str], how: Settings, shards: bool) -> str:
    """Say why a layer cannot compute the following layer's first norm without the row scaling; return "" if
    it can."""
    if not family(following, "DecoderLayer"):
        return f"the next layer is a {type(following).__name__}"
    if other := fit.foreign(following):
        return f"the next layer is not patched: {other}"
    if own := why["attention_out"] or why["mlp"]:
        return own
    if other := fit.refusal(following, how, "attention_in", shards):
        return f"in the next layer, {other}"
    if type(following).__name__.startswith("FSDP"):
        return "FSDP shards the next layer separately"
    return whole_stack.refusal(layer, following.input_layernorm, shards)


def _layer(
    layer: Any, owner: Any, shards: bool, keeps: bool, parts: frozenset[str], following: Any = None
) -> list[PatchedPart]:
    versions.expect("transformers")
    if not family(layer, "DecoderLayer"):
        return [_row(layer, "all", "", f"it is a {kind(layer)}, not a decoder layer of transformers")]
    if foreign := fit.foreign(layer):
        return [_row(layer, "all", "", foreign)]
    how = fit.settings(layer, owner, parts, keeps)
    why = {part: fit.refusal(layer, how, part, shards) for part in fit.PARTS}
    no_next = "" if following is None else _no_next_norm(layer, following, why, how, shards)
    if following is not None and not no_next:
        how = how._replace(next_norm=following.input_layernorm)
    _attach(layer, layers.layer_forward, how)
    bias = getattr(layer.self_attn.q_proj, "bias", None) is not None
    turns = why["attention_in"] or fit.rotation_refusal(layer, how)
    turned = how.rotates and not bias and not turns and fit.equal_halves(layer, how)
    before = f"attention_in{'_bias' * bias}{'_rotated' * turned} (derived)"
    after = f"{'block' if not why['attention_out'] else 'mlp'}_{how.activation}"
    after += "_next_norm" * (how.next_norm is not None) + " (derived)"
    heads = "norms of heads, rotation" if hasattr(layer.self_attn, "q_norm") else "rotation"
    return [
        _row(layer, "norm, queries, keys, values", before, why["attention_in"]),
        _row(layer, heads, before if turned else "heads", turns),
        _row(layer, "attention", "", "the model's own"),
        _row(layer, "output projection, residual", after, why["attention_out"] or why["mlp"]),
        _row(layer, "norm, MLP, residual", after, why["mlp"]),
    ] + [_row(layer, "next layer's norm, without its row scaling", after, no_next)] * (following is not None)


def _causal(model: Any, shards: bool, on: bool) -> list[PatchedPart]:
    versions.expect("transformers")
    original = code(model, "ForCausalLM")
    if original is None:
        why = f"it is a {kind(model)}, not a causal model of transformers"
    elif own_forward(model):
        why = "the model has a forward of its own"
    elif not on:
        why = fit.OFF
    else:
        originals = original, *causal.loss_code()
        replaced = next((why for each in originals if (why := each.replaced())), "")
        why = replaced or causal.loss_refusal(model, shards)
        _attach(model, partial(causal.causal_forward, originals=originals))
    return [_row(model, "loss in training, without logits", "summed_loss", why)]


def _last_norm(norm: Any, on: bool) -> list[PatchedPart]:
    versions.expect("transformers")
    original = code(norm, "RMSNorm")
    if original is None:
        why = f"it is a {kind(norm)}, not a norm of transformers"
    elif own_forward(norm):
        why = "it has a forward of its own"
    elif not on:
        why = fit.OFF
    elif not (why := original.replaced()):
        centered = family(norm, "RMSNorm") == "gemma"
        _attach(norm, partial(causal.norm_forward, centered=centered, original=original))
    return [_row(norm, "last norm", "rms_norm", why)]


def _row(module: nn.Module, part: str, program: str, why: str) -> PatchedPart:
    name = type(module).__name__
    return PatchedPart(name, part, "PyTorch" if why else "fused", "" if why else program, why)


def _together(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"
