"""Tests of the fused layer against the plain layer: outputs, all gradients, and two layers in sequence.
Planted errors must be found."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from checkout import ROOT
from small_models import own_operators
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from coda_agent.comparison import interleaved, layers
from coda_agent.comparison import rows as rows_of_layers
from coda_agent.comparison.competitors import COMPILE, EAGER, FUSED, LIGER, LIGER_APART
from coda_agent.comparison.keys import Keyed, keyed
from coda_agent.comparison.layers import liger as liger_layer
from coda_agent.comparison.layers.errors import relative, results, truth
from coda_agent.comparison.layers.fused import Fused, packed, unpacked
from coda_agent.comparison.layers.layer import Gradients, Layer
from coda_agent.comparison.layers.plain import Differentiated, Plain, rmsnorm, rotated
from coda_agent.comparison.layers.session import LayerArms, _Stage, measure_layer
from coda_agent.comparison.layers.shape import EPS, GROUPED, WIDTHS, Drawn, Shape, Weights, draw, rotary
from coda_agent.comparison.results import LAYER_BOTH
from coda_agent.comparison.rows import LayerRow
from coda_agent.verifier.baselines.pytorch import MAX_AUTOTUNE, under_compile

pytestmark = pytest.mark.slow

KERNELS = ROOT / "generated_kernels"
SMALL = Shape(heads=2, head_width=32, ffn=96, sequences=2, length=48)
ODD = Shape(heads=3, head_width=16, ffn=40, sequences=1, length=56)
FEWER = Shape(heads=4, head_width=16, ffn=40, sequences=2, length=24, groups=2)
NAMES = {"y", "normed", "d x", *(f"d {name}" for name in Weights._fields)}
WORSE = 1.5  # an error above 1.5 times the plain bf16 layer's error is a mistake


KINDS: dict[str, Callable[[Shape, Weights, Tensor], Layer[Any, Any]]] = {
    "fused": Fused,
    "fused, compiled": partial(Fused, compiled=partial(under_compile, mode="default", backend="aot_eager")),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def ratios(shape: Shape, drawn: Drawn, weights: Weights, next_norm: Tensor, kind: str) -> dict[str, float]:
    """Return, for each result, the error of a fused layer with these weights, divided by the error of the
    plain bf16 layer."""
    exact = truth(shape, drawn)
    plain = relative(results(Plain(shape, drawn.weights, drawn.next_norm), drawn), exact)
    found = relative(results(KINDS[kind](shape, weights, next_norm), drawn), exact)
    return {name: found[name] / plain[name] for name in exact}


@EVERY_KIND
@pytest.mark.parametrize("shape", [SMALL, ODD, FEWER])
def test_the_fused_layer_loses_no_more_than_the_plain_one(shape: Shape, kind: str) -> None:
    drawn = draw(shape, 0, "cpu")
    found = ratios(shape, drawn, drawn.weights, drawn.next_norm, kind)
    assert found.keys() == NAMES
    assert max(found.values()) < WORSE, found


@EVERY_KIND
@pytest.mark.parametrize(
    ("norm", "seen"),
    [
        ("attention_norm", {"y", "d x", "d qkv"}),
        ("ffn_norm", {"y", "d x", "d gate_up", "d attention_norm"}),
        ("next_norm", {"normed"}),
    ],
)
def test_a_wrong_weight_of_a_norm_is_caught(norm: str, seen: set[str], kind: str) -> None:
    drawn = draw(SMALL, 1, "cpu")
    wrong = {**drawn.weights._asdict(), "next_norm": drawn.next_norm}
    wrong[norm] = wrong[norm].roll(1)
    next_norm = wrong.pop("next_norm")
    found = ratios(SMALL, drawn, Weights(**wrong), next_norm, kind)
    assert seen <= {name for name, ratio in found.items() if ratio > WORSE}, found
    # only ``normed`` is wrong, because the gradient of next_norm belongs to the next layer
    if norm == "next_norm":
        assert {name for name, ratio in found.items() if ratio > WORSE} == seen


@pytest.mark.parametrize("field", Weights._fields)
def test_a_gradient_that_is_a_fiftieth_off_is_caught(field: str) -> None:
    drawn = draw(SMALL, 2, "cpu")
    exact = truth(SMALL, drawn)
    found = results(Fused(SMALL, drawn.weights, drawn.next_norm), drawn)
    limit = relative(results(Plain(SMALL, drawn.weights, drawn.next_norm), drawn), exact)[f"d {field}"]
    off = {**found, f"d {field}": found[f"d {field}"].float() * 1.02}
    assert relative(off, exact)[f"d {field}"] > WORSE * limit


def chained(one: Layer[Any, Any], two: Layer[Any, Any], drawn: Drawn, last: Tensor) -> dict[str, Tensor]:
    """Run two layers and the last norm. Return the norm's output, and all gradients of a loss on this
    output."""
    between, first = one.train(one.start(drawn.x))
    after, second = two.train(between)
    outputs = two.outputs(after)
    y, gamma = (t.detach().requires_grad_() for t in (outputs["y"], last))
    dy, dlast = torch.autograd.grad(rmsnorm(y, gamma), (y, gamma), drawn.dout)
    of_two = two.backward(second, dy)
    of_one = one.gradients(one.backward(first, of_two["x"]))
    found = {f"1 {name}": t for name, t in of_one.items()}
    found |= {f"2 {name}": t for name, t in two.gradients(of_two).items()}
    return found | {"normed": outputs["normed"], "last": dlast}


@EVERY_KIND
def test_two_layers_chain_into_the_last_norm(kind: str) -> None:
    a, b = draw(SMALL, 3, "cpu"), draw(SMALL, 4, "cpu")
    last = b.next_norm

    def stack(made: Callable[..., Layer[Any, Any]], dtype: torch.dtype) -> dict[str, Tensor]:
        weights = [Weights(*(w.to(dtype) for w in d.weights)) for d in (a, b)]
        norms = [weights[1].attention_norm, last.to(dtype)]
        wide = Drawn(weights[0], norms[0], a.x.to(dtype), a.dout.to(dtype))
        one, two = (made(SMALL, w, n) for w, n in zip(weights, norms, strict=True))
        return chained(one, two, wide, norms[1])

    exact = stack(Plain, torch.float32)
    plain = relative(stack(Plain, torch.bfloat16), exact)
    found = relative(stack(KINDS[kind], torch.bfloat16), exact)
    assert len(exact) == 2 * (1 + len(Weights._fields)) + 2
    worst = {name: found[name] / plain[name] for name in exact}
    assert max(worst.values()) < WORSE, worst


def by_hand(shape: Shape, drawn: Drawn) -> Tensor:
    """Compute the layer in fp64 from formulas: rotation by complex numbers, softmax of masked products."""
    weights = Weights(*(w.double() for w in drawn.weights))
    x = drawn.x.double()
    cosine, sine = (t[:, : shape.pairs].double() for t in rotary(shape, "cpu"))
    mask = torch.ones(shape.length, shape.length, dtype=torch.bool).tril()

    def norm(t: Tensor, gamma: Tensor) -> Tensor:
        return t / (t.square().mean(-1, keepdim=True) + EPS).sqrt() * gamma

    def turned(t: Tensor) -> Tensor:
        pairs = torch.complex(t[..., : shape.pairs], t[..., shape.pairs :]) * torch.complex(cosine, sine)
        return torch.cat((pairs.real, pairs.imag), -1)

    rows = []
    for part in norm(x, weights.attention_norm).split(shape.length):
        mixed = []
        for head in range(shape.heads):
            at = torch.arange(head * shape.head_width, (head + 1) * shape.head_width)
            of_group = head * (shape.groups or shape.heads) // shape.heads
            other = torch.arange(of_group * shape.head_width, (of_group + 1) * shape.head_width)
            firsts = (0, shape.width, shape.width + shape.projections[1])
            q, k, v = (part @ weights.qkv[a + i].T for a, i in zip((at, other, other), firsts, strict=True))
            scores = turned(q) @ turned(k).T / shape.head_width**0.5
            mixed.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v)
        rows.append(torch.cat(mixed, -1))
    h = x + torch.cat(rows) @ weights.out.T
    product = norm(h, weights.ffn_norm) @ weights.gate_up.T
    gate, up = product[:, : shape.ffn], product[:, shape.ffn :]
    return h + (gate / (1 + (-gate).exp()) * up) @ weights.down.T


@pytest.mark.parametrize("shape", [SMALL, ODD, FEWER])
def test_the_truth_is_the_layer_that_the_formulas_say(shape: Shape) -> None:
    drawn = draw(shape, 5, "cpu")
    assert relative({"y": truth(shape, drawn)["y"]}, {"y": by_hand(shape, drawn)})["y"] < 1e-6


@pytest.mark.parametrize("backward", [False, True])
def test_a_session_runs_of_every_variant_what_it_will_time_and_no_more(
    backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session of the forward trains no layer; otherwise each compiler would compile and tune a backward for
    nothing."""
    drawn, trained = draw(SMALL, 13, "cpu"), list[Tensor]()
    monkeypatch.setattr("coda_agent.comparison.layers.shape.draw", lambda shape, seed: drawn)
    usual = Plain.train

    def train(layer: Plain, stream: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        trained.append(stream)
        return usual(layer, stream)

    monkeypatch.setattr(Plain, "train", train)
    stage = _Stage(LayerArms(SMALL, (EAGER,), (), 12, backward))
    entrant = stage.enter(EAGER)
    assert entrant.losses.keys() == (NAMES if backward else {"y", "normed"})
    assert all(loss["yardsticks"] == 1 and loss["relative"] < 0.01 for loss in entrant.losses.values())
    entrant.call()
    assert len(trained) == 3 * backward


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace CUDA's functions. The timing returns no samples, the compiler returns its function unchanged,
    and every session draws the same inputs on the CPU."""
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    untimed = SimpleNamespace(seconds=())
    monkeypatch.setattr(
        interleaved, "timed", lambda arms, *_, **__: ({arm.name: untimed for arm in arms}, {})
    )
    monkeypatch.setattr(layers, "under_compile", lambda function, mode: function)
    drawn = draw(SMALL, 15, "cpu")
    monkeypatch.setattr("coda_agent.comparison.layers.shape.draw", lambda shape, seed: drawn)


NOT_FINITE = "output 'd ffn_norm' is NaN or infinite where the truth is not, or the other way round"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (9.0, r"output 'd ffn_norm' is off by \d.* of the truth's RMS \(limit 0\.1\)"),
        (torch.nan, NOT_FINITE),
        (torch.inf, NOT_FINITE),
    ],
)
def test_a_variant_with_a_wrong_gradient_fails_and_the_others_are_timed(
    value: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Fused.gradients

    def wrong(layer: Fused, found: Mapping[str, Tensor]) -> Gradients:
        gradients = usual(layer, found)
        ffn_norm = gradients["ffn_norm"].clone()
        ffn_norm[:9] = value * ffn_norm.norm()
        return gradients | {"ffn_norm": ffn_norm}

    request = LayerArms(SMALL, (EAGER, FUSED, COMPILE), (), 12, backward=True)
    assert set(measure_layer(request)["arms"]) == {EAGER, FUSED, COMPILE}
    monkeypatch.setattr(Fused, "gradients", wrong)
    found = measure_layer(request)
    assert set(found["arms"]) == {EAGER, COMPILE} and found["failed"].keys() == {FUSED}
    assert re.fullmatch(reason, found["failed"][FUSED])


@pytest.mark.usefixtures("no_gpu")
def test_a_variants_yardstick_is_what_the_eager_layer_loses() -> None:
    """A layer's yardstick is the error of eager PyTorch. So a variant whose error is below 1 yardstick is
    nearer to the truth than eager PyTorch."""
    stage = _Stage(LayerArms(SMALL, (EAGER, FUSED), (), 12, backward=True))
    usual, found = stage.enter(EAGER).losses, stage.enter(FUSED).losses
    by_hand = {name: told["relative"] / usual[name]["relative"] for name, told in found.items()}
    assert {name: told["yardsticks"] for name, told in found.items()} == pytest.approx(by_hand)
    assert min(by_hand.values()) < 0.9  # an inverted ratio would be above 1


# PyTorch in place of Liger's operators ------------------------------------------------------------


class Played:
    """Stands in for the functions of ``liger_kernel.ops`` that a layer calls. ``eps`` records the eps of each
    call of a norm."""

    def __init__(self) -> None:
        self.eps: list[float] = []
        for name in ("RMSNorm", "Rope", "FusedAddRMSNorm", "FusedGateUpSiLUMul"):
            setattr(self, f"Liger{name}Function", SimpleNamespace(apply=getattr(self, name)))

    def RMSNorm(self, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        self.eps.append(eps)
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).type_as(x) * gamma

    def FusedAddRMSNorm(
        self, x: Tensor, residual: Tensor, gamma: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        h = x + residual
        return self.RMSNorm(h, gamma, eps), h

    def Rope(self, q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        assert cosine.shape == sine.shape == (1, *q.shape[2:])
        return rotated(q, (cosine[0], sine[0])), rotated(k, (cosine[0], sine[0]))

    def FusedGateUpSiLUMul(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(
    ("name", "projections"), [(LIGER, ["qkv"]), (LIGER_APART, ["q", "k", "v"])], ids=["joint", "apart"]
)
@pytest.mark.parametrize("shape", [SMALL, FEWER])
def test_a_layer_of_ligers_operators_is_the_layer_by_as_many_products_as_its_name_says(
    shape: Shape, name: str, projections: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    played, products, usual = Played(), list[Tensor](), torch.nn.functional.linear
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", cast(ModuleType, played))

    def linear(x: Tensor, w: Tensor) -> Tensor:
        products.append(w)
        return usual(x, w)

    monkeypatch.setattr(liger_layer, "linear", linear)
    drawn = draw(shape, 16, "cpu")
    layer = layers.variant(name, shape, drawn)
    exact = truth(shape, drawn)
    plain = relative(results(Plain(shape, drawn.weights, drawn.next_norm), drawn), exact)
    found = relative(results(layer, drawn), exact)
    assert found.keys() == NAMES and max(found[n] / plain[n] for n in exact) < WORSE, found
    parameters = cast(Differentiated, layer).parameters
    assert [id(w) for w in products] == [id(parameters[n]) for n in (*projections, "out", "gate_up", "down")]
    assert played.eps == [EPS, EPS]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shape", [SMALL, FEWER])
def test_the_least_time_is_that_of_the_products_which_the_plain_layer_makes(
    shape: Shape, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch counts the operations of the plain layer's products. The batched products are attention's; half
    of their operations do not count, because of the causal mask."""
    monkeypatch.setitem(WIDTHS, "1B", shape)
    drawn = draw(shape, 14, "cpu")
    layer = Plain(shape, drawn.weights, drawn.next_norm)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        layer.step(drawn.x, drawn.dout) if backward else layer.forward(drawn.x)
    flops = {str(name): number for name, number in counter.get_flop_counts()["Global"].items()}
    assert flops.keys() == {"aten.mm", "aten.bmm"}
    found = LayerRow("1B", backward).least({"tensor": 1e9, "memory": 1.0})
    assert found * 1e9 == pytest.approx(flops["aten.mm"] + flops["aten.bmm"] / 2, rel=1e-12)


def test_the_truth_is_not_taken_in_tf32() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(RuntimeError, match="highest"):
            truth(SMALL, draw(SMALL, 0, "cpu"))
    finally:
        torch.set_float32_matmul_precision("highest")


def test_errors_are_not_taken_of_other_names_or_shapes() -> None:
    one = {"y": torch.ones(2)}
    for other in ({}, {"y": torch.ones(3)}, {"y": torch.ones(2), "d x": torch.ones(2)}):
        with pytest.raises(ValueError, match="the exact values"):
            relative(other, one)
    assert relative({"y": torch.tensor([1.0, 2.0])}, one) == {"y": pytest.approx(0.5**0.5)}


@EVERY_KIND
def test_a_layer_keeps_nothing_between_calls(kind: str) -> None:
    drawn = draw(SMALL, 7, "cpu")
    layer = KINDS[kind](SMALL, drawn.weights, drawn.next_norm)
    stream = layer.start(drawn.x)
    before = [t.clone() for t in tree_leaves(stream)]
    first, second = (layer.step(stream, drawn.dout) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(t, kept) for t, kept in zip(tree_leaves(stream), before, strict=True))
    forward, trained = tree_leaves(layer.forward(stream)), tree_leaves(layer.train(stream)[0])
    assert all(torch.equal(a, b) for a, b in zip(forward, trained, strict=True))


def test_packed_weights_have_pairs_side_by_side_and_come_back() -> None:
    weights = draw(SMALL, 9, "cpu").weights
    made = packed(SMALL, weights)
    half, wide, width = SMALL.pairs, SMALL.head_width, SMALL.width
    assert torch.equal(made.qkv[wide], weights.qkv[wide])
    assert torch.equal(made.qkv[wide + 1], weights.qkv[wide + half])
    assert torch.equal(made.qkv[2 * width :], weights.qkv[2 * width :])
    assert torch.equal(made.gate_up[0::2], weights.gate_up[: SMALL.ffn])
    assert torch.equal(made.gate_up[1::2], weights.gate_up[SMALL.ffn :])
    back = unpacked(SMALL, made)
    assert all(torch.equal(a, b) for a, b in zip(back, weights, strict=True))


def test_the_plain_layer_compiles_whole() -> None:
    drawn = draw(SMALL, 11, "cpu")
    compiled = partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")
    layer = Plain(SMALL, drawn.weights, drawn.next_norm, compiled)
    eager = Plain(SMALL, drawn.weights, drawn.next_norm)
    assert max(relative(results(layer, drawn), results(eager, drawn)).values()) < 1e-3
    assert torch.equal(layer.forward(drawn.x), eager.forward(drawn.x))


def test_variants_are_built_by_name() -> None:
    drawn = draw(SMALL, 12, "cpu")
    plain = layers.variant(EAGER, SMALL, drawn)
    assert torch.equal(plain.forward(drawn.x), Plain(SMALL, drawn.weights, drawn.next_norm).forward(drawn.x))
    assert isinstance(layers.variant(FUSED, SMALL, drawn), Fused)
    with pytest.raises(ValueError, match=r"'Ligre' is unknown; use one of eager, .*, fused"):
        layers.variant("Ligre", SMALL, drawn)


def test_a_session_of_fused_compiles_what_its_layer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WIDTHS, "1B", SMALL)
    rows = {backward: LayerRow("1B", backward) for backward in (False, True)}
    names = {b: [kernel.program.signature.name for kernel in row.made_of(FUSED)] for b, row in rows.items()}
    assert names[False] == ["attention_in_rotated", "block_swiglu_next_norm"]
    assert names[True] == [*names[False], "block_swiglu_backward", "attention_in_rotated_backward"]
    drawn = draw(SMALL, 17, "cpu")
    layer = Fused(SMALL, drawn.weights, drawn.next_norm)
    ran = own_operators(lambda: layer.step(layer.start(drawn.x), drawn.dout))
    assert [name.partition("_backward")[0] for name in ran] == [
        name.removesuffix("_backward") for name in names[True]
    ]
    (request,) = (row.task((EAGER, FUSED), 12)[1] for row in [rows[True]])
    assert len(list(request.compiles())) == len(names[True]) and not list(request.tunes())
    keys = [keyed(row, FUSED, None, "a GPU") for row in rows.values()]
    assert all(isinstance(each, Keyed) for each in keys) and keys[0] != keys[1]
    assert rows[True].note(FUSED) and rows[True].absent(FUSED) is None


def test_weights_in_a_layout_of_its_own_are_told_apart_from_what_a_call_holds() -> None:
    drawn = draw(SMALL, 0, "cpu")
    layer = Fused(SMALL, drawn.weights, drawn.next_norm)
    given = {t.data_ptr() for t in (*drawn.weights, drawn.next_norm, drawn.x, drawn.dout)}
    own = [t for t in (*layer.weights, layer.table) if t.data_ptr() not in given]
    assert {id(t) for t in layer.arranged()} == {id(t) for t in own} and len(own) == 3
    assert Plain(SMALL, drawn.weights, drawn.next_norm).arranged() == ()


def test_rows_with_grouped_heads_are_measured_if_they_are_asked_for() -> None:
    assert tuple(GROUPED) == rows_of_layers.GROUPED
    made = rows_of_layers.choose_rows((LAYER_BOTH,), GROUPED, everything=False, quick=False)
    assert [row.sizes["groups"] for row in made] == [8, 8, 8]
    usual = rows_of_layers.choose_rows((LAYER_BOTH,), (), everything=False, quick=False)
    assert [row.case for row in usual] == list(WIDTHS) and all("groups" not in row.sizes for row in usual)


def test_naming_the_variants_needs_no_torch() -> None:
    code = "import sys, coda_agent.comparison.layers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=KERNELS.parent, check=False).returncode == 0


def test_what_is_compiled_is_static_and_has_a_code_object_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []

    def under_compile(function: Any, mode: str) -> Any:
        made.append((function.__name__, mode))
        return function

    monkeypatch.setattr(layers, "under_compile", under_compile)
    drawn = draw(SMALL, 0, "cpu")
    for name in (EAGER, COMPILE, MAX_AUTOTUNE, FUSED):
        layers.variant(name, SMALL, drawn)
    assert made == [("layer", "default"), ("layer", "max-autotune"), ("layer", "default")]
