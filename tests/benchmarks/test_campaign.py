"""Tests of the campaign of mutants (``benchmarks.campaign``). A mutant of a correct program is rejected if
the mutant computes something different; an honest rewrite is accepted. The campaign's own fp64 evaluator
agrees with the specs' references."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import torch

from benchmarks.campaign import fp64
from benchmarks.campaign.differs import CampaignDraw
from benchmarks.campaign.draws import draws
from benchmarks.campaign.graph import Graph, correct, original
from benchmarks.campaign.judge import CampaignTask, judge_of, judged, made_mutant, verdict
from benchmarks.campaign.mutations import mutate
from benchmarks.campaign.mutations.operands import anew
from benchmarks.campaign.mutations.site import Site
from benchmarks.campaign.rewrites import rewrite
from coda_agent.primitives.lang.ir import Node, Program
from coda_agent.verifier.spec.domain import LARGEST

pytestmark = pytest.mark.slow

# Kinds of mutants that cannot be made of every program. Each kind needs something that not every program has,
# such as a constant, a comparison, or inputs of the same type.
PARTIAL = {
    "static: literal",
    "static: other ratio",
    "static: parabola",
    "bump near a value",
    "two sizes at once, smooth",
    "clamp: by a value",
    "dropped term",
    "taken twice",
    "dropped function",
    "swapped operands",
    "neighbour",
    "other input",
    "other spread",
    "other range",
    "constant",
    "eps",
    "abs of a difference",
    "abs left out",
    "size: other dim",
    "on an operand",
}

# this program has no epilogue, so a mutant can change only the operands of an expert's GEMM
ALONE = "gemm_grouped_weight_grad"


@pytest.mark.parametrize("name", correct())
def test_the_evaluator_agrees_with_the_reference(name: str) -> None:
    spec, program = original(name)
    for draw in itertools.islice(draws(spec, 1), 2):
        sample = CampaignDraw(spec, program, draw)
        got = fp64.outputs(program, draw.inputs, draw.sizes)
        assert sample.says
        for output, truth in sample.truth.items():
            assert torch.allclose(got[output], truth, rtol=1e-9, atol=1e-12 * float(truth.abs().max()))


def test_each_kind_is_made_for_the_programs_that_it_applies_to() -> None:
    whole = [kind for kind in mutate.KINDS if kind not in PARTIAL]
    several = [name for name in correct() if name != ALONE]
    for k, (name, kind) in enumerate(itertools.product(several, whole)):
        if k % 8 == 0:  # every eighth pair; a kind is still tried on several programs
            assert made_mutant(CampaignTask("mutants", name, kind, 0)), (name, kind)
    made = [kind for kind in mutate.KINDS if made_mutant(CampaignTask("mutants", ALONE, kind, 0))]
    assert made == ["on an operand"]
    for kind in PARTIAL:
        assert any(made_mutant(CampaignTask("mutants", name, kind, 0)) for name in correct()), kind
    for kind in rewrite.KINDS:
        assert any(rewrite.rewritten(name, kind, 0) for name in correct()), kind


def test_an_identity_makes_the_same_mutant_again() -> None:
    task = CampaignTask("mutants", "gemm_rmsnorm", "on two values", 3)
    assert made_mutant(task) == made_mutant(task) != made_mutant(task._replace(seed=4))


def bounded(name: str, value: str, limit: float) -> Program:
    """Return an accepted program in which ``minimum`` bounds the input ``value`` by ``limit``."""
    graph = Graph(original(name)[1])
    index = graph.add("input", attribute=value)
    graph.replace(index, graph.add("minimum", index, graph.constant(limit)))
    return graph.finish()


@pytest.mark.parametrize(
    ("name", "value", "limit"), [("gemm_rope_positions", "positions", 8191.0), ("gemm_rmsnorm", "rstd", 1.5)]
)
def test_what_holds_on_usual_inputs_alone_is_seen_to_differ(name: str, value: str, limit: float) -> None:
    assert judge_of(name).seen(bounded(name, value, limit))


def test_what_never_binds_is_equivalent() -> None:
    assert not judge_of("gemm_rmsnorm").seen(bounded("gemm_rmsnorm", "rstd", LARGEST["fp32"]))


def test_an_operand_that_is_computed_anew_is_the_same_if_nothing_is_wrong_with_it() -> None:
    """A mutation may compute an operand anew, which adds products to the program. If the new operand is
    correct, the program is accepted. So a mutant is rejected for its mistake, not for the added products."""
    spec, program = original(ALONE)
    graph = Graph(program)
    site = Site(spec, graph, Random(0), judge_of(ALONE).scales)
    matrix = graph.program.nodes.index(Node("input", (), "x"))
    graph.rewire(site.node("gemm"), 1, anew(site, matrix, matrix))
    assert verdict(spec, graph.finish())["verdict"] == "accepted"


def test_what_is_wrong_at_sizes_of_cases_alone_is_seen_to_differ() -> None:
    task = CampaignTask("mutants", "gemm_rmsnorm", "size: ratio", 0)
    made = made_mutant(task)
    assert made is not None
    judge = judge_of(task.name)
    assert not judge.seen(made.program) and judge.seen(made.program, *made.frozen)


# Programs that are judged quickly. The tests below are a sample of the work of ``python -m
# benchmarks.campaign``.
QUICK = ("gemm_rmsnorm", "gemm_layernorm", "gemm_fp8_tensor_scale", "gemm_row_abs_max")


def test_no_mutant_that_differs_is_accepted() -> None:
    seen = 0
    for k, kind in enumerate(mutate.KINDS):
        task = CampaignTask("mutants", QUICK[k % len(QUICK)], kind, 1)
        if made := made_mutant(task):
            judge = judge_of(task.name)
            if judge.seen(made.program, *made.frozen):
                seen += 1
                assert verdict(judge.spec, made.program)["verdict"] != "accepted", (task, made.words)
    assert seen >= 25


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gemm_relu2", "relu written out"),
        ("gemm_layernorm", "several"),
        ("gemm_row_abs_max", "magnitude before the maximum"),
    ],
)
def test_an_honest_rewrite_passes(name: str, kind: str) -> None:
    result = judged(CampaignTask("rewrites", name, kind, 1))
    assert result["verdict"] == "accepted" and not result["differs"], result
