"""The columns of the comparison. Each column is a way to compute a spec's outputs, in its best configuration.

A column stands for one library, and has one or more arms (ways to call the library). A cell shows the fastest
arm of its column. Importing this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coda_agent.comparison.competitors.entry import Implementation
from coda_agent.verifier.baselines.pytorch import CUBLAS, MAX_AUTOTUNE
from coda_agent.verifier.baselines.quack import LIBRARY_ARMS, OUR_SEARCH, OWN_TUNER, admitted
from coda_agent.verifier.baselines.quack_library import LIBRARY
from coda_agent.verifier.spec.model import Spec

TORCH, COMPILE, EAGER, EAGER_APART = "torch", "torch.compile", "eager", "eager, halves apart"
APART, APART_AUTOTUNE = "torch.compile, halves apart", "torch.compile max-autotune, halves apart"
LIGER, LIGER_APART = "Liger", "Liger, q, k and v apart"
QUACK = "QuACK's functions"
FLASHINFER, UPSTREAM = "FlashInfer", "upstream CODA"
HUMAN, LLM, MATMUL, ROOFLINE = "human", "LLM", "matmul", "roofline"
# Arms of the column LLM: PROGRAM and EDITED compute operators; FUSED, the package ``fused``, computes layers.
PROGRAM, EDITED, FUSED = "LLM", "LLM, edited CuTeDSL", "fused"


@dataclass(frozen=True)
class Column:
    """A column of the comparison. ``what``: the column's description in a legend. ``packages``: the Python
    distributions that the column's arms use. ``revision``: a number that increases when the column's calls
    change, so that old figures count as outdated."""

    name: str
    what: str
    arms: tuple[str, ...]
    packages: tuple[str, ...] = ()
    revision: int = 1


COLUMNS = (
    Column(TORCH, "eager PyTorch on cuBLAS", (EAGER, EAGER_APART), ("torch",)),
    Column(
        COMPILE,
        "the spec's formulation, compiled by PyTorch",
        (COMPILE, MAX_AUTOTUNE, APART, APART_AUTOTUNE),
        ("torch", "triton"),
    ),
    Column(
        LIGER, "liger-kernel's operators on cuBLAS", (LIGER, LIGER_APART), ("liger-kernel", "torch", "triton")
    ),
    Column(
        FLASHINFER, "flashinfer-python's operators on cuBLAS", (FLASHINFER,), ("flashinfer-python", "torch")
    ),
    Column(
        HUMAN,
        "QuACK's fused kernels, written by people and tuned; notes mark those that we composed ourselves",
        (OWN_TUNER, OUR_SEARCH, QUACK),
        ("quack-kernels", "nvidia-cutlass-dsl"),
    ),
    Column(
        UPSTREAM,
        "CODA's own package, in its own environment",
        (UPSTREAM,),
        ("coda-kernels", "quack-kernels", "nvidia-cutlass-dsl"),
        revision=2,
    ),
    Column(
        LLM,
        "accepted kernels from generated_kernels",
        (PROGRAM, EDITED, FUSED),
        ("quack-kernels", "nvidia-cutlass-dsl"),
    ),
    Column(MATMUL, "cuBLAS's bare matmuls", (CUBLAS,), ("torch",)),
)
LAYERS_ONLY = (LIGER_APART, QUACK, FUSED)  # arms that compute layers but no operators
REFERENCE_ARM = CUBLAS  # the arm that runs in every session
AUTOTUNED = (MAX_AUTOTUNE, APART_AUTOTUNE, OUR_SEARCH)  # slow arms, which --quick leaves out
COMPOSED = "composed by us from QuACK's operators, because QuACK has no such kernel"
LIBRARIES = (
    EAGER_APART,
    APART,
    APART_AUTOTUNE,
    LIGER,
    FLASHINFER,
    UPSTREAM,
)  # arms that ``entries`` implements


def entries(arm: str) -> Mapping[str, Implementation]:
    """The implementations of an arm, by spec. The arm must be in ``LIBRARIES``."""
    from coda_agent.comparison.competitors import apart, flashinfer, liger, upstream

    if arm == EAGER_APART:
        return apart.eager()
    if arm in (APART, APART_AUTOTUNE):
        return apart.entry("default" if arm == APART else "max-autotune")
    return {LIGER: liger.ENTRIES, FLASHINFER: flashinfer.ENTRIES, UPSTREAM: upstream.ENTRIES}[arm]


def composed(spec: str) -> bool:
    """Whether we composed the QuACK kernel for this spec from QuACK's operators, instead of taking it from
    QuACK's library."""
    return spec in LIBRARY and LIBRARY[spec].kind == "composed"


def helped(spec: str) -> bool:
    """Whether CODA's package leaves part of this spec to PyTorch, which then makes passes over whole
    matrices."""
    from coda_agent.comparison.competitors import upstream

    return spec in upstream.HELPED


def note(spec: Spec, arm: str) -> str:
    """A remark on how an arm computes a spec; "" if there is none."""
    if arm in LIBRARY_ARMS:
        return COMPOSED if composed(spec.name) else ""
    return entries(arm)[spec.name].note if arm in LIBRARIES else ""


def absent(spec: Spec, arm: str) -> str | None:
    """Why an arm cannot compute a spec on any machine; None if the arm can compute it, or if only a
    trial can tell."""
    from coda_agent.comparison.competitors import flashinfer, liger, upstream

    if arm in LIBRARY_ARMS and not admitted(spec, [arm]):
        return "QuACK has no epilogue for it"
    if arm not in LIBRARIES or spec.name in entries(arm):
        return None
    reasons: dict[str, dict[str, str]] = {
        LIGER: liger.ABSENT,
        FLASHINFER: flashinfer.ABSENT,
        UPSTREAM: upstream.ABSENT,
    }
    return reasons.get(arm, {}).get(spec.name, "no such operator")
