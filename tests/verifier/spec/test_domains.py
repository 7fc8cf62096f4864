"""Tests of the domains of inputs: which domains are valid, that no hash depends on a domain, and which values
inputs take when they are stretched over their domains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from authoring import SHIPPED, SPECS, TOY
from spec_files import write_changed

from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.numerics.sizes import hidden
from coda_agent.verifier.numerics.stretch import STRETCHED, TURNS
from coda_agent.verifier.numerics.values import DTYPES
from coda_agent.verifier.spec.file import SpecError
from coda_agent.verifier.spec.model import Spec

V = "  v: {shape: [M], dtype: fp32, init: {uniform: [0.5, 1.5]}}"


def toy(
    tmp_path: Path,
    domain: str,
    init: str = "{uniform: [0.5, 1.5]}",
    dtype: str = "fp32",
    shape: str = "[M]",
) -> Spec:
    line = f"  v: {{shape: {shape}, dtype: {dtype}, init: {init}, domain: {domain}}}"
    return load(write_changed(tmp_path / "toy.yaml", TOY, V, line), check=False)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_input_of_a_shipped_spec_declares_its_domain(name: str) -> None:
    spec, text = load(SPECS / f"{name}.yaml", check=False), (SPECS / f"{name}.yaml").read_text()
    assert text.count("domain: ") == len(spec.inputs)


def test_no_hash_depends_on_a_domain(tmp_path: Path) -> None:
    specs = [toy(tmp_path, domain) for domain in ("finite", "positive", "[0.5, 2]", "[0, M / 2]")]
    assert len({spec.hash for spec in specs}) == len({spec.operator_hash for spec in specs}) == 1


@pytest.mark.parametrize(
    ("domain", "words"),
    [
        ("any", "it must be finite, positive, nonnegative or [low, high]"),
        ("[1, 2, 3]", "it must be finite, positive, nonnegative or [low, high]"),
        ("[true, 2]", "it must be finite, positive, nonnegative or [low, high]"),
        ("[2, 0]", "write [low, high], low first"),
        ("[0, Q]", "dim 'Q' is not declared"),
        ("[0, M +]", "has no value"),
        ('["(0 - M)**0.5", 2]', "it must be a real number"),
        ("[0.75, 2]", "init uniform draws 0.5 to 1.5, and the domain is 0.75 to 2"),
        ("[0, 1.25]", "init uniform draws 0.5 to 1.5, and the domain is 0 to 1.25"),
    ],
)
def test_a_domain_that_cannot_be(tmp_path: Path, domain: str, words: str) -> None:
    with pytest.raises(SpecError) as failed:
        toy(tmp_path, domain)
    assert (failed.value.line, words in failed.value.message) == (7, True), str(failed.value)


def test_bounds(tmp_path: Path) -> None:
    def bounds(domain: str, *rest: str) -> tuple[float, float]:
        return toy(tmp_path, domain, *rest).inputs["v"].bounds({"M": 12, "K": 2, "N": 3})

    assert bounds("[0, M / 2]") == (0.0, 6.0)
    assert bounds("nonnegative")[0] == 0.0 < bounds("positive")[0] < 1e-30
    assert bounds("finite", "{uniform: [0.5, 1.5]}", "fp16") == (-65504.0, 65504.0)
    assert bounds("positive", "{integers: [1, M]}", "int32") == (1.0, 2.0**31 - 1)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("family", STRETCHED)
def test_stretched_inputs_are_legal(name: str, family: str) -> None:
    spec = load(SPECS / f"{name}.yaml", check=False)
    for seed in range(3):
        sizes = hidden(spec, seed, 48)
        drawn = draw(spec, sizes, seed, family=family)
        again = draw(spec, sizes, seed, family=family)
        for input_name, tensor in spec.inputs.items():
            values, (low, high) = drawn[input_name].double(), tensor.bounds(sizes)
            ignored = values == tensor.init.ignored if tensor.init.ignored else torch.zeros_like(values) > 0
            assert drawn[input_name].dtype == DTYPES[tensor.dtype] and values.isfinite().all()
            assert (ignored | (values >= low - abs(low) * 2**-8) & (values <= high)).all()
            assert torch.equal(values, again[input_name].double())


def test_families_reach_far_beyond_what_is_typical(tmp_path: Path) -> None:
    spec, sizes = toy(tmp_path, "positive"), {"M": 400, "K": 16, "N": 24}
    drawn = {f: torch.stack([draw(spec, sizes, s, family=f)["v"] for s in range(40)]) for f in STRETCHED}
    assert drawn["faint"].max() < 1 and drawn["faint"].min() < 2**-14
    assert drawn["loud"].min() > 1 / 2 and drawn["loud"].max() > 2**14
    assert drawn["mixed"].min() < 2**-10 and drawn["mixed"].max() > 2**10
    (spread,) = drawn["ends"][:1]
    assert spread.min() < 2**-10 and spread.max() > 2**10


def test_signs_zeros_and_ends_are_tried_where_they_are_legal(tmp_path: Path) -> None:
    sizes = {"M": 400, "K": 16, "N": 24}

    def values(domain: str, family: str) -> torch.Tensor:
        return torch.stack([draw(toy(tmp_path, domain), sizes, s, family=family)["v"] for s in range(20)])

    assert (values("finite", "mixed") < 0).any() and (values("finite", "ends") < 0).any()
    assert not (values("nonnegative", "mixed") < 0).any() and (values("nonnegative", "ends") == 0).any()
    narrow = values("[0, 2]", "ends")
    assert {0.0, 2.0} <= set(narrow.flatten().tolist()) and not ((narrow < 0) | (narrow > 2)).any()


def test_a_scalar_takes_its_ends_by_turns(tmp_path: Path) -> None:
    def values(domain: str) -> list[float]:
        spec = toy(tmp_path, domain, shape="[]")
        return [float(draw(spec, {"M": 4, "K": 8, "N": 8}, s, family="ends")["v"]) for s in range(TURNS)]

    # without a domain: zero, the ends of init (0.5 and 1.5), and a scaled value
    assert [values("finite").count(end) for end in (0.0, 0.5, 1.5)] == [TURNS / 4] * 3
    for domain, ends in {"[-1, 2]": (-1.0, 2.0, 0.0, 0.5, 1.5), "[0, 2]": (0.0, 2.0, 0.5, 1.5)}.items():
        narrow = values(domain)  # scaled values may be clamped to an end, and then count, too
        assert min(narrow.count(end) for end in ends) >= TURNS / (len(ends) + 1)


def test_integers_reach_both_ends_and_what_lies_between(tmp_path: Path) -> None:
    spec = toy(tmp_path, "[0, 1000000]", "{count: 100}", "int32")
    sizes = {"M": 300, "K": 16, "N": 24}
    drawn = {f: torch.stack([draw(spec, sizes, s, family=f)["v"] for s in range(20)]) for f in STRETCHED}
    assert drawn["faint"].max() < 100 and drawn["loud"].min() > 999_900
    assert {0, 1_000_000} <= set(drawn["ends"].flatten().tolist())
    assert (drawn["mixed"].diff(dim=1) == 1).any() and len(drawn["mixed"].flatten().unique()) > 1500


def test_an_index_needs_a_domain(tmp_path: Path) -> None:
    text = (SPECS / "gemm_partial_cross_entropy.yaml").read_text(encoding="utf-8")
    path = tmp_path / "gemm_partial_cross_entropy.yaml"
    path.write_text(text.replace(", domain: [0, V - 1]", ""), encoding="utf-8")
    with pytest.raises(SpecError, match=r"out of bounds .* as in domain: \[0, V - 1\]"):
        load(path)


def test_an_integer_that_is_no_index_needs_none(tmp_path: Path) -> None:
    text = (SPECS / "gemm_rope_positions.yaml").read_text(encoding="utf-8")
    path, line = tmp_path / "gemm_rope_positions.yaml", "init: {count: 8192}, domain: [0, 1048576]"
    assert line in text
    path.write_text(text.replace(line, "init: {integers: [0, 8192]}"), encoding="utf-8")
    assert load(path).inputs["positions"].domain == "finite"
