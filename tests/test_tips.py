"""The tips log: entries read in order, prose around them left alone, mistakes named with their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.tips import TIPS, Tip, TipsError, read_tips

LOG = """\
# Tips log

Read into every prompt. For example:

    ## tip-0: an example that is indented, and so none

## tip-1: Spread a row sum only in a later gemm
- spec: gemm_chain
- failed: trace/row_sums_same_step
- fix: scaled the second gemm's result instead
- versions: quack-kernels 0.6.5

Some words of a person.

## tip-2: Use one sigmoid: it serves `a` and [b]
- spec: gemm_swiglu_bwd
- failed: decision/slow
- fix: kept the value in a name
- versions: quack-kernels 0.6.5, nvidia-cutlass-dsl 4.8.1
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "tips.md"
    path.write_text(LOG)
    return path


def test_entries_in_order(log: Path) -> None:
    first, second = read_tips(log)
    assert first == Tip(
        "tip-1",
        "Spread a row sum only in a later gemm",
        "gemm_chain",
        "trace/row_sums_same_step",
        "scaled the second gemm's result instead",
        "quack-kernels 0.6.5",
    )
    assert second.lesson == "Use one sigmoid: it serves `a` and [b]"
    assert second.versions == "quack-kernels 0.6.5, nvidia-cutlass-dsl 4.8.1"


def test_no_log_no_tips(tmp_path: Path) -> None:
    assert read_tips(tmp_path / "tips.md") == []


def test_the_projects_own_log_reads() -> None:
    assert TIPS.name == "tips_log.md"
    assert all(tip.id.startswith("tip-") for tip in read_tips())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "- fix: scaled the second gemm's result instead\n",
            "",
            "tips.md:7: tip-1 needs exactly the fields spec",
        ),
        ("- fix: kept", "- fixed: kept", "tips.md:15: tip-2 needs exactly the fields"),
        ("- versions: quack-kernels 0.6.5\n", "- author: Ada\n- versions: x\n", "tips.md:7: tip-1 needs"),
        (
            "## tip-2: Use",
            "## tip two: Use",
            "tips.md:15: a tip's heading is '## tip-N: lesson', not '## tip two",
        ),
        ("## tip-1: Spread", "## tip-1:Spread", "tips.md:7: a tip's heading is"),
        ("- spec: gemm_swiglu_bwd", "- spec:", "tips.md:15: tip-2 needs"),
    ],
)
def test_a_mistake_has_its_line(log: Path, old: str, new: str, words: str) -> None:
    assert old in LOG
    log.write_text(LOG.replace(old, new, 1))
    with pytest.raises(TipsError) as caught:
        read_tips(log)
    assert words in str(caught.value)
