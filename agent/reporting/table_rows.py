"""Rows of the result tables: measured cases of accepted kernels, and recorded runs.

Times are in milliseconds; intervals have 95% confidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coda_agent.agent.prompts.prompt import tokens
from coda_agent.agent.run.tools import DRAFT, TIP
from coda_agent.agent.storage.journal import Event
from coda_agent.verifier.baselines.pytorch import CUBLAS, MAX_AUTOTUNE
from coda_agent.verifier.baselines.quack import LIBRARY_ARMS
from coda_agent.verifier.decision import BASELINE, KEPT
from coda_agent.verifier.report import Accepted, Timing

GROUPS = {  # operators by group, in the order of the tables
    "CODA's ten": (
        "gemm_residual_partial_rmsnorm",
        "gemm_rmsnorm",
        "gemm_rmsnorm_swiglu",
        "gemm_rmsnorm_rope",
        "gemm_rmsnorm_partial_cross_entropy",
        "gemm_swiglu",
        "gemm_rope",
        "gemm_partial_cross_entropy",
        "gemm_swiglu_bwd",
        "gemm_residual_rmsnorm_bwd",
    ),
    "Newer": (
        "gemm_qk_norm_rope",
        "gemm_rope_positions",
        "gemm_alpha_residual",
        "gemm_partial_cross_entropy_unstored",
        "gemm_cross_entropy_bwd",
        "gemm_grad_accumulate",
    ),
    "Other architectures": (
        "gemm_bias_gelu",
        "gemm_gelu_bwd",
        "gemm_geglu",
        "gemm_relu2",
        "gemm_residual_partial_layernorm",
        "gemm_layernorm",
        "gemm_softcap_cross_entropy",
        "gemm_row_abs_max",
        "gemm_rmsnorm_swiglu_fp16",
        "gemm_fp8_tensor_scale",
        "gemm_fp8_row_scale",
    ),
    "Today's models": (
        "gemm_qkv_rope",
        "gemm_rmsnorm_qkv_rope",
        "gemm_rmsnorm_qkv_bias_rope",
        "gemm_rmsnorm_qkv_norm_rope",
        "gemm_qk_norm_rope_eps",
        "gemm_residual_partial_rmsnorm_eps",
        "gemm_residual_partial_layernorm_eps",
        "gemm_residual_rmsnorm_gemm_eps",
        "gemm_softcap_cross_entropy_cap",
        "gemm_fp8_bias_gelu",
        "gemm_fp8_swiglu",
        "gemm_fp8_gelu_blocks",
        "gemm_fp8_residual_rmsnorm",
    ),
    "Experts": (
        "gemm_grouped_swiglu",
        "gemm_gathered_swiglu",
        "gemm_grouped_down",
        "gemm_grouped_swiglu_bwd",
        "gemm_grouped_weight_grad",
    ),
    "Several GEMMs": ("gemm_residual_rmsnorm_gemm", "gemm_residual_rmsnorm_gemm_bwd", "gemm_swiglu_mlp"),
}
OTHERS = "Others"
_GROUP = {name: group for group, names in GROUPS.items() for name in names}
_PLACE = {name: place for place, name in enumerate(_GROUP)}
WIDTHS, DECODE = ("1B", "7B", "70B"), "decode"
RMSNORM_BACKWARD = "gemm_residual_rmsnorm_bwd"
SQUARE_WEIGHTS = ("1B square", "7B square")  # cases of RMSNorm's backward with a (d, d) weight
JUDGED = (DRAFT, "report", "measurement")  # kinds of events that hold a verdict


@dataclass(frozen=True)
class Estimate:
    """An estimate with its 95% interval."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class MeasuredCase:
    """One measured case. Each of ``speedup``, ``autotune``, ``before`` and ``quack`` is the time of a
    competing implementation, divided by the kernel's time; None if the competitor was not measured.
    ``speedup``: ``torch.compile``. ``autotune``: ``torch.compile`` with max-autotune. ``before``: the
    previous kernel, for example before an edit. ``quack``: the fastest of QuACK's implementations;
    ``quack_arm`` is its name. ``over_cublas``: the kernel's time divided by cuBLAS's time. ``roofline``: the
    roofline's time divided by the kernel's time."""

    group: str
    operator: str
    case: str
    milliseconds: float
    speedup: Estimate | None
    autotune: Estimate | None
    before: Estimate | None
    quack: Estimate | None
    quack_arm: str | None
    over_cublas: Estimate | None
    roofline: float


@dataclass(frozen=True)
class RunRow:
    """One recorded run. ``drafts``: how many drafts its author checked. ``answers``: how many answers the
    author gave. ``passed``: the number, from 1, of the first try that passed all gates which the run's
    machine could run; None if no try passed. A try is an answer or a failed draft. ``prompt_tokens`` and
    ``answer_tokens``: the approximate tokens of the prompt and of all answers. ``tips``: how many tips the
    author proposed. ``accepted``: whether an accepted kernel comes from this run."""

    group: str
    operator: str
    run: str
    author: str
    drafts: int
    answers: int
    passed: int | None
    prompt_tokens: int
    answer_tokens: int
    tips: int
    accepted: bool


def order(operator: str) -> tuple[int, str]:
    """A sort key for operators: the order of ``GROUPS``, then all other operators by name."""
    return _PLACE.get(operator, len(_PLACE)), operator


def case_order(case: str) -> int:
    """A sort key for cases: first the widths of real models, then other cases in the spec's order, and
    decoding last."""
    return WIDTHS.index(case) if case in WIDTHS else len(WIDTHS) + (case == DECODE)


def rows_of(reports: Iterable[Accepted]) -> tuple[MeasuredCase, ...]:
    return tuple(
        _row(report.identity.spec, timing)
        for report in reports
        for timing in sorted(report.timings, key=lambda timing: case_order(timing.case))
    )


def _row(operator: str, timing: Timing) -> MeasuredCase:
    ratios = {arm: Estimate(r.estimate, r.low, r.high) for arm, r in timing.ratios.items()}
    rivals = {arm: ratios[arm] for arm in LIBRARY_ARMS if arm in ratios}
    fastest = min(rivals, key=lambda arm: rivals[arm].estimate, default=None)
    bare, milliseconds = ratios.get(CUBLAS), timing.milliseconds["candidate"]
    return MeasuredCase(
        group=_GROUP.get(operator, OTHERS),
        operator=operator,
        case=timing.case,
        milliseconds=milliseconds,
        speedup=ratios.get(BASELINE),
        autotune=ratios.get(MAX_AUTOTUNE),
        before=ratios.get(KEPT),
        quack=rivals[fastest] if fastest else None,
        quack_arm=fastest,
        over_cublas=Estimate(1 / bare.estimate, 1 / bare.high, 1 / bare.low) if bare else None,
        roofline=timing.roofline_milliseconds / milliseconds,
    )


def run_row(header: Mapping[str, Any], events: Sequence[Event], accepted: set[str]) -> RunRow:
    answers = [e.payload for e in events if e.kind == "answer"]
    prompts = [e.payload for e in events if e.kind == "prompt"]
    failed = {
        e.key
        for e in events
        if e.kind in JUDGED and e.payload.get("report", e.payload)["status"] == "rejected"
    }
    # an answer with a rejected measurement has failed, even if its report passed
    failed |= {key.replace("measurement", "report") for key in failed}
    tries = [e.key for e in events if e.kind == "report" or (e.kind == DRAFT and e.key in failed)]
    return RunRow(
        group=_GROUP.get(header["spec"], OTHERS),
        operator=header["spec"],
        run=header["run"],
        author=answers[-1]["author"] if answers else str(header["author"]),
        drafts=sum(e.kind == DRAFT for e in events),
        answers=len(answers),
        passed=next((n for n, key in enumerate(tries, 1) if key not in failed), None),
        prompt_tokens=sum(tokens(text) for prompt in prompts for text in prompt.values()),
        answer_tokens=sum(tokens(answer["text"]) for answer in answers),
        tips=sum(e.kind == TIP for e in events),
        accepted=header["run"] in accepted,
    )


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun, for example "1 row" or "2 rows"."""
    return f"{number} {noun}{plural if number != 1 else ''}"


def span(low: object, high: object) -> str:
    """A range in words, or one value if the range's ends are equal."""
    return f"{low} to {high}" if low != high else f"{low}"


def in_processes(least: int, most: int) -> str:
    """The number of processes that measured, in words."""
    return "one process" if most == 1 else f"each of {span(least, most)} processes"
