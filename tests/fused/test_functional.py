"""Tests of the functions for the parts of a layer. The tests compare results and all gradients with fp64,
and use the functions with PyTorch's features, such as compilation and checkpointing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from layer_parts import PARTS, Counted, Where, gradients, loss_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from coda_agent.fused import chains, functional, loss, ops
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.derive import chains as derive_chains

LINKS = [
    *functional.MLP.values(),
    *functional.BARE_MLP.values(),
    *functional.BLOCK.values(),
    *functional.BLOCK_NEXT_NORM.values(),
    *functional.ATTENTION_IN.values(),
    functional.LOSS,
]
SOME = [
    "mlp swiglu",
    "after attention swiglu",
    "between attentions swiglu",
    "before attention, rotated",
    "loss",
    "summed loss",
]
LOSS_OPS = (loss.EXPONENTIALS, loss.STREAM_GRADIENT, loss.FIRST_WEIGHT_GRADIENT, loss.WEIGHT_GRADIENT)
EVERY_PART = pytest.mark.parametrize("name", PARTS)


class Observed(TorchDispatchMode):
    """Record the operators of ``fused`` that the dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [str(func)] if str(func).startswith("coda_agent") else []
        return func(*args, **(kwargs or {}))


def truth(name: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    wide = {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in given.items()}
    return gradients(PARTS[name].plain, wide)


@EVERY_PART
def test_a_part_and_its_gradients_are_those_of_fp64(name: str) -> None:
    given = PARTS[name].drawn(12)
    found, exact = gradients(PARTS[name].ours, given), truth(name, given)
    for each in exact:
        assert loss_of(found[each], exact[each]) < 1e-6, each


@EVERY_PART
def test_in_bf16_it_loses_no_more_than_pytorch(name: str, where: Where) -> None:
    given = PARTS[name].drawn(48, torch.bfloat16, where.device)
    found, exact = gradients(PARTS[name].ours, given), truth(name, given)
    usual = gradients(PARTS[name].plain, given)
    for each in exact:
        assert found[each].dtype == usual[each].dtype or "loss" in name
        assert loss_of(found[each], exact[each]) < max(1.2 * loss_of(usual[each], exact[each]), 2e-3), each


@pytest.mark.parametrize(
    "name", ["mlp swiglu", "between attentions geglu", "before attention, rotated", "loss", "summed loss"]
)
def test_each_input_may_be_frozen(name: str, where: Where) -> None:
    for frozen in PARTS[name].shapes:
        given = PARTS[name].drawn(12, where.dtype, where.device)
        given[frozen].requires_grad_(False)
        found, exact = gradients(PARTS[name].ours, given), truth(name, given)
        assert found.keys() == exact.keys() and frozen not in found
        for each in exact:
            assert loss_of(found[each], exact[each]) < where.close, (frozen, each)


@pytest.mark.parametrize("link", LINKS, ids=[link.name for link in LINKS])
def test_every_program_of_a_link_lowers(link: chains.Link) -> None:
    outside = ("cos_sin", "rstd", "hg", "next_gamma")
    wrt = tuple(n for n in link.inputs if n in link.floats and n not in outside)
    derived = link.derived(wrt)
    assert not derived.left and not derived.saves
    for name in (link.name, f"{link.name}_inference", link.backward_name(wrt)):
        assert lower(ops.defined[name].program).text


@pytest.mark.parametrize("name", ["mlp swiglu", "before attention, rotated", "loss"])
def test_without_gradients_nothing_is_kept_for_them(name: str, where: Where) -> None:
    given = PARTS[name].drawn(12, where.dtype, where.device)
    trained = PARTS[name].ours(**given)
    with torch.no_grad(), Observed() as observed:
        assert torch.equal(PARTS[name].ours(**given), trained)
    (own,) = observed.seen
    assert own.endswith("_inference.default")


def test_a_loss_does_its_rows_in_parts(monkeypatch: pytest.MonkeyPatch, where: Where) -> None:
    given = PARTS["loss"].drawn(30, where.dtype, where.device)
    whole = gradients(PARTS["loss"].ours, given)
    link = chains.Link("loss_in_parts", derive_chains.loss(), ("rest_lse", "target_logit"), rows=8)
    monkeypatch.setattr(functional, "LOSS", link)
    parts = gradients(PARTS["loss"].ours, given)
    for each in whole:
        assert loss_of(parts[each], whole[each]) < where.close


@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_a_summed_loss_does_its_rows_in_parts(
    monkeypatch: pytest.MonkeyPatch, where: Where, scale: float
) -> None:
    """With scale 60, logits reach 200, and some exponentials overflow. So all products run a second time,
    after a pass that only computes log-sum-exps."""
    given = PARTS["summed loss"].drawn(30, where.dtype, where.device)
    given["w"].data *= scale
    monkeypatch.setattr(loss, "ROWS", 8)
    happened = observed(monkeypatch)
    found, exact = gradients(PARTS["summed loss"].ours, given), truth("summed loss", given)
    gradients_of = ["loss_stream_gradient", "gemm_grad_accumulate"]

    def products(exponentials: list[str]) -> list[str]:
        whole = [*exponentials, *gradients_of] * 4
        whole[len(exponentials) + 1] = "loss_weight_gradient"  # the first rows have no earlier sum to add to
        return whole

    again = ["loss_exponentials"] * 4 + products(["loss_exponentials"]) if scale > 1 else []
    assert happened == products(["loss_exponentials"]) + again
    for each in exact:
        assert loss_of(found[each], exact[each]) < max(where.close, 4e-6), each


def observed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list. Whenever the summed loss enqueues a product, the name of the product is appended."""
    happened = list[str]()
    for op in LOSS_OPS:

        def run(*arguments: Any, own: Any = op, usual: Any = op.run) -> Any:
            happened.append(own.program.signature.name)
            with _disable_current_modes():
                return usual(*arguments)

        monkeypatch.setattr(op, "run", run)
    return happened


@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_a_summed_loss_reads_one_value_after_all_products(
    monkeypatch: pytest.MonkeyPatch, where: Where, scale: float
) -> None:
    given = {n: t.detach() for n, t in PARTS["summed loss"].drawn(30, where.dtype, where.device).items()}
    given["w"] *= scale
    target = torch.arange(30, device=where.device)
    rows = loss.targets_logits(**given, target=target)
    monkeypatch.setattr(loss, "ROWS", 8)
    happened = observed(monkeypatch)

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                happened.append("read")
            return func(*args, **(kwargs or {}))

    with Reads():
        loss._forward(given["h"], given["w"], target, *rows, stream=True, weight=True)
    assert happened.count("read") == 1 and happened.index("read") == 12
    assert len(happened) == 13 + 16 * (scale > 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_a_summed_loss_rounds_less_than_a_derived_backward(dtype: torch.dtype, scale: float) -> None:
    given = PARTS["summed loss"].drawn(96, dtype)
    given["w"].data *= scale
    exact = truth("summed loss", given)
    found = gradients(PARTS["summed loss"].ours, given)
    derived = gradients(lambda **inputs: PARTS["loss"].ours(**inputs).sum(), given)
    for each in ("h", "w"):
        assert loss_of(found[each], exact[each]) < 1.05 * loss_of(derived[each], exact[each])


def test_every_program_of_the_summed_loss_lowers() -> None:
    for op in LOSS_OPS:
        assert lower(op.program).text


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True), (False, False)])
def test_opcheck_passes_for_the_summed_loss(wanted: tuple[bool, bool], where: Where) -> None:
    given = PARTS["summed loss"].drawn(12, where.dtype, where.device)
    for leaf, needed in zip(given.values(), wanted, strict=True):
        leaf.requires_grad_(needed)
    target = torch.arange(12, device=where.device)
    rows = loss.targets_logits(given["h"], given["w"], target)
    torch.library.opcheck(torch.ops.coda_agent.summed_loss.default, (*given.values(), target, *rows, *wanted))


@pytest.mark.parametrize("name", SOME)
def test_second_derivatives_are_refused(name: str) -> None:
    given = PARTS[name].drawn(12)
    with pytest.raises(ops.NoBackward, match="no second derivative: leave out create_graph"):
        torch.autograd.grad(PARTS[name].ours(**given).sum(), list(given.values()), create_graph=True)


@pytest.mark.parametrize("name", SOME)
def test_torch_func_is_refused(name: str) -> None:
    given = {n: t.detach() for n, t in PARTS[name].drawn(12).items()}
    with pytest.raises(ops.NoBackward, match="use torch.autograd.grad"):
        torch.func.grad(lambda inputs: PARTS[name].ours(**inputs).sum())(given)


@pytest.mark.parametrize("name", SOME)
def test_forward_mode_is_refused_even_without_trainable_weights(name: str) -> None:
    given = {n: t.detach() for n, t in PARTS[name].drawn(12).items()}
    tangents = {n: torch.ones_like(t) for n, t in given.items()}
    with pytest.raises(ops.NoBackward, match="no forward-mode derivative"):
        torch.func.jvp(lambda inputs: PARTS[name].ours(**inputs), (given,), (tangents,))


@pytest.mark.parametrize("name", SOME)
def test_a_mode_sees_the_operators_and_changes_no_gradient(name: str, where: Where) -> None:
    given = PARTS[name].drawn(12, where.dtype, where.device)
    plain = gradients(PARTS[name].ours, given)
    with Observed() as observed:
        found = gradients(PARTS[name].ours, given)
    assert observed.seen
    for each in plain:
        assert torch.equal(found[each], plain[each]), each


class Subclass(Tensor):
    """A subclass of Tensor that changes nothing."""


@pytest.mark.parametrize("name", ["mlp swiglu", "before attention, rotated"])
def test_a_subclass_of_tensor_takes_the_operator(name: str, where: Where, monkeypatch) -> None:
    given = PARTS[name].drawn(12, where.dtype, where.device)
    plain = gradients(PARTS[name].ours, given)
    for link in LINKS:
        monkeypatch.setattr(link, "_record", None)
    found = gradients(PARTS[name].ours, {n: t.as_subclass(Subclass) for n, t in given.items()})
    for each in plain:
        assert torch.equal(found[each], plain[each]), each


def test_a_target_that_is_no_row_is_refused() -> None:
    h, w = torch.randn(4, 16), torch.randn(40, 16)
    for wrong in (40, -1, -101):
        with pytest.raises(RuntimeError, match="a target is not a row of the weight"):
            functional.cross_entropy(h, w, torch.tensor([0, -100, wrong, 39]))


def test_an_unknown_activation_is_named_with_the_known_ones() -> None:
    norm, x, w = functional.Norm(torch.ones(16), 1e-5), torch.randn(4, 16), torch.randn(16, 16)
    with pytest.raises(ValueError, match="'silu' is unknown; use one of .*swiglu"):
        functional.feed_forward(x, norm, w, w, "silu")
    with pytest.raises(ValueError, match="'silu' is unknown; use one of .*swiglu"):
        functional.after_attention(x, x, norm, w, w, w, "silu")


def test_a_bias_before_a_rotation_is_refused() -> None:
    norm, x, w = functional.Norm(torch.ones(16), 1e-5), torch.randn(4, 16), torch.randn(16, 16)
    with pytest.raises(ValueError, match="rotate the result instead"):
        functional.before_attention(x, norm, w, torch.randn(16), torch.randn(4, 8), 16)


def test_weights_that_do_not_fit_are_refused() -> None:
    norm, x, w = functional.Norm(torch.ones(16), 1e-5), torch.randn(4, 16), torch.randn(16, 16)
    for up, down in ((w, torch.randn(16, 24)), (torch.randn(16, 24), w), (w, w.bfloat16()), (w.half(), w)):
        with pytest.raises((TypeError, ValueError), match="mlp_gelu|w_up|w_down"):
            functional.feed_forward(x, norm, up, down, "gelu")


@pytest.mark.parametrize("train", [True, False])
def test_tensors_on_two_devices_are_refused(train: bool) -> None:
    norm, x, w = functional.Norm(torch.ones(16), 1e-5), torch.randn(4, 16), torch.randn(16, 16)
    for up, down in ((w.to("meta"), w), (w, w.to("meta"))):
        with pytest.raises(ValueError, match="on cpu, meta; move them to one device"):
            functional.feed_forward(x.requires_grad_(train), norm, up, down, "gelu")


@pytest.mark.parametrize("loss", [functional.cross_entropy, functional.summed_cross_entropy])
def test_a_loss_of_tensors_on_two_devices_is_refused(loss: Any) -> None:
    h, w, target = torch.randn(4, 16), torch.randn(40, 16), torch.arange(4)
    for place in range(3):
        given = [t.to("meta") if i == place else t for i, t in enumerate((h, w, target))]
        with pytest.raises(ValueError, match="on cpu, meta; move them to one device"):
            loss(*given)


@pytest.mark.parametrize("loss", [functional.cross_entropy, functional.summed_cross_entropy])
def test_a_loss_without_rows_has_gradients(loss: Any) -> None:
    h, w = torch.randn(2, 0, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    found = loss(h, w, torch.empty(2, 0, dtype=torch.int64))
    assert found.shape == ((2, 0) if loss is functional.cross_entropy else ())
    dh, dw = torch.autograd.grad(found.sum(), (h, w))
    assert found.sum() == 0 and dh.shape == h.shape and torch.equal(dw, torch.zeros_like(w))


def test_heads_are_rotated_in_the_epilogue_if_a_tile_suits_them() -> None:
    assert all(map(functional.rotates, (32, 64, 80, 96, 128, 256, 320, 512)))
    assert not any(map(functional.rotates, (72, 100, 120, 352)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    x, w = torch.ones(4, 16, dtype=dtype), torch.ones(16, 16, dtype=dtype)
    with pytest.raises(TypeError, match=f"mlp_gelu: h is {dtype}"):
        functional.feed_forward(x, functional.Norm(w[0], 1e-5), w, w, "gelu")
    with pytest.raises(TypeError, match=f"{dtype}"):
        functional.summed_cross_entropy(x, w, torch.arange(4))


@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each in SOME if each != "summed loss"])
def test_opcheck_passes_with_gradients(name: str, where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    given = PARTS[name].drawn(12, where.dtype, where.device)
    seen: list[tuple[Any, tuple[Any, ...]]] = []
    for link in LINKS:

        def note(*arguments: Any, own: Any = link.op) -> Any:
            seen.append((own, arguments))
            return own(*arguments)

        monkeypatch.setattr(link, "op", note)
    with Observed():  # if no dispatch mode is active, the call bypasses the operator
        PARTS[name].ours(**given)
    assert seen
    for op, arguments in seen:
        torch.library.opcheck(op, arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in SOME), *((name, "inductor") for name in SOME[3:])],
)
def test_it_compiles_whole_for_any_rows(name: str, backend: str, where: Where) -> None:
    torch._dynamo.reset()
    counted = Counted(backend)
    compiled = torch.compile(PARTS[name].ours, backend=counted, fullgraph=True)
    for rows in (8, 16, 40):
        given = PARTS[name].drawn(rows, where.dtype, where.device)
        found, plain = gradients(compiled, given), gradients(PARTS[name].ours, given)
        for each in plain:
            assert loss_of(found[each], plain[each]) < where.close, (rows, each)
    assert 0 < counted.graphs <= 2  # one graph for the first number of rows, one for any other number


@pytest.mark.parametrize("name", SOME)
def test_activation_checkpointing_gives_the_same_gradients(name: str, where: Where) -> None:
    given, ours = PARTS[name].drawn(12, where.dtype, where.device), PARTS[name].ours
    expected = gradients(ours, given)

    def keep(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        own = str(op).startswith("coda_agent")
        return CheckpointPolicy.MUST_SAVE if own else CheckpointPolicy.PREFER_RECOMPUTE

    selective = partial(create_selective_checkpoint_contexts, keep)
    for how in ({}, {"context_fn": selective}):

        def again(how: Any = how, **inputs: Any) -> Tensor:
            return checkpoint(ours, use_reentrant=False, **how, **inputs)

        found = gradients(again, given)
        for each in expected:
            assert torch.equal(found[each], expected[each]), each
