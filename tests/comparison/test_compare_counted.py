"""Tests of the basis of a comparison's figures: which sessions a cell counts, which ratio is a win, who wrote
a human kernel, which rows decide a claim."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

import comparison
from coda_agent.comparison import rows
from coda_agent.comparison.competitors import (
    COMPILE,
    EAGER,
    HUMAN,
    LIGER,
    LLM,
    MATMUL,
    PROGRAM,
    REFERENCE_ARM,
    UPSTREAM,
    composed,
    entries,
    helped,
    note,
)
from coda_agent.comparison.drawing import charts
from coda_agent.comparison.drawing.cells import Cell, Empty, TableRow, lines
from coda_agent.comparison.drawing.charts import draw
from coda_agent.comparison.drawing.html_page import page
from coda_agent.comparison.drawing.markdown import brief, markdown
from coda_agent.comparison.drawing.sheets import sheets, summed
from coda_agent.comparison.drawing.summary import (
    CLAIMS,
    RowRatio,
    against,
    conditions_text,
    findings,
    ratio_text,
)
from coda_agent.comparison.drawing.terminal import NAME
from coda_agent.comparison.results import (
    LAYER_BOTH,
    LAYER_FORWARD,
    ArmFailure,
    ArmResult,
    Loss,
    Results,
    Session,
)
from coda_agent.primitives.system.files import SPECS
from coda_agent.verifier.baselines.pytorch import MAX_AUTOTUNE
from coda_agent.verifier.baselines.quack import LIBRARY_ARMS, OWN_TUNER
from coda_agent.verifier.loading import load
from comparison import arm, interval, line, printed, session

TWO = (0, 1)


def cell(name: str, *sessions: Session) -> Cell:
    """Return the cell of column ``name``. All sessions belong to one row."""
    (found,) = lines(Results(sessions=sessions))
    made = found.cell(name)
    assert made is not None, found.cells[name]
    return made


def empty(name: str, *sessions: Session) -> bool:
    (found,) = lines(Results(sessions=sessions))
    return isinstance(found.cells[name], Empty)


def layer(arms: dict[str, ArmResult], process: int = 0) -> Session:
    """Return a session of a whole layer. Its reference arm is eager PyTorch."""
    return Session(
        operator=LAYER_BOTH,
        case="7B",
        sizes={"heads": 32},
        question="0",
        process=process,
        reference_arm=EAGER,
        roofline=1.0,
        arms={EAGER: arm(9.0)} | arms,
        date="2001-02-03T04:05:06+00:00",
    )


def drawn_words(made: Sequence[TableRow], name: str = "speedup.svg", told: str = "") -> list[str]:
    """Return the texts of a chart. Matplotlib draws each text as outlines, and writes the text into an XML
    comment."""
    return re.findall(r"<!-- (.*?) -->", draw(made, told)[name].decode(), re.DOTALL)


# ── The sessions of a cell ────────────────────────────────────────────────────────────────────────────────


def test_a_session_beside_another_reference_arm_is_not_counted() -> None:
    """Arms of different sessions are compared through the reference arm. So a session with an old version of
    the reference arm does not count."""
    old = session({REFERENCE_ARM: arm(1.0, key="0"), PROGRAM: arm(4.0), COMPILE: arm(9.0)})
    new = session({PROGRAM: arm(2.0)}, process=1)
    assert cell(LLM, old, new).milliseconds == pytest.approx(2.0)
    assert empty(COMPILE, old, new)


def test_a_session_of_another_question_is_not_counted() -> None:
    """After a spec has changed, the figures of older sessions do not count, even if the arm has not
    changed."""
    failed = {LIGER: ArmFailure(key="1", reason="no such width")}
    old = session({PROGRAM: arm(4.0), COMPILE: arm(9.0)}, question="before", failed=failed)
    new = session({PROGRAM: arm(2.0)}, process=1)
    assert cell(LLM, old, new).milliseconds == pytest.approx(2.0)
    assert empty(COMPILE, old, new)
    (found,) = lines(Results(sessions=(old, new)))
    assert found.cells[LIGER] == Empty("not measured")


def test_a_cell_has_the_worst_error_and_peak_of_all_processes_and_the_time_between_them() -> None:
    def lost(yardsticks: float) -> dict[str, Loss]:  # the yardstick's own error differs from draw to draw
        return {"y": Loss(relative=1e-3 / yardsticks, yardsticks=yardsticks)}

    sat = [
        session({PROGRAM: arm(time, losses=lost(error), bytes=held)}, process=process)
        for process, (time, error, held) in enumerate([(2.0, 1.0, 5), (4.0, 4.0, 9), (8.0, 2.0, 7)])
    ]
    made = cell(LLM, *sat)
    assert made.losses == lost(4.0) and made.bytes == 9
    assert made.milliseconds == pytest.approx(4.0)  # the geometric mean


def test_the_fastest_arm_is_so_beside_the_reference_arm_and_not_by_the_clock() -> None:
    """Two arms are compared by their ratios to the reference arm, not by their times. The two arms were
    measured in different processes, and the first process was twice as slow."""
    slow = session({REFERENCE_ARM: arm(2.0), COMPILE: arm(3.8), PROGRAM: arm(4.0)})
    fast = session({MAX_AUTOTUNE: arm(2.0), PROGRAM: arm(2.0)}, process=1)
    assert cell(COMPILE, slow, fast).arm == COMPILE
    assert cell(COMPILE, session({COMPILE: arm(2.1)}), fast).arm == MAX_AUTOTUNE


def test_a_ratio_says_how_many_processes_it_rests_on() -> None:
    """A ratio states its number of processes. The number of sessions would be too large, because the
    reference arm is also in the sessions of another environment and of arms that were measured again."""
    together = [session({PROGRAM: arm(2.0), COMPILE: arm(2.6)}, process=process) for process in range(3)]
    apart = [session({UPSTREAM: arm(2.2)}, process=process) for process in TWO]
    again = [session({OWN_TUNER: arm(2.1)}, process=0)]
    found = {name: cell(name, *together, *apart, *again) for name in (LLM, COMPILE, MATMUL, UPSTREAM, HUMAN)}
    assert {name: made.processes for name, made in found.items()} == {
        LLM: 3, COMPILE: 3, MATMUL: 3, UPSTREAM: 2, HUMAN: 1,
    }  # fmt: skip
    assert found[UPSTREAM].indirect and found[HUMAN].indirect and not found[MATMUL].indirect
    without = [session({COMPILE: arm(2.6)}, process=process) for process in TWO]
    # no session has an LLM's kernel, so the processes that timed the matmul are counted
    assert cell(MATMUL, *without, *apart).processes == 2


# ── One process decides nothing ───────────────────────────────────────────────────────────────────────────


def test_what_rests_on_one_process_is_undecided() -> None:
    win, loss = (1.2, 1.1, 1.3), (0.8, 0.7, 0.9)
    told = against(
        [
            line("1B", ratios={COMPILE: win}, processes=1),
            line("7B", ratios={COMPILE: loss}, processes=1),
            line("70B", ratios={COMPILE: win}, processes=2),
        ],
        COMPILE,
    )
    (every,) = told.totals
    assert [row.outcome for row in every.rows] == ["undecided", "undecided", "win"]
    assert "1 win, 0 ties, 0 losses and 2 undecided in 3 rows of 1 operator" in str(told)
    assert "; it is undecided if it comes from one process (‡), and a mean" in str(told)
    assert RowRatio.of(line("1B"), line("1B").cells[LLM]) is None  # type: ignore[arg-type]
    made = [line("7B", "gemm_swiglu_bwd", ratios={COMPILE: loss}, processes=n) for n in (1, 2)]
    verdicts = [f.verdict for one in made for f in findings([one]) if f.claim.what == "SwiGLU backward"]
    assert verdicts == ["undecided", "below"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_ratio_of_one_process_is_marked_wherever_it_is_shown(processes: int) -> None:
    alone = processes == 1
    sat = [session({PROGRAM: arm(2.0), COMPILE: arm(2.6)}, process=process) for process in range(processes)]
    results = Results(sessions=tuple(sat))
    found = lines(results)
    text, words = markdown(results), drawn_words(found)
    assert ("1.300 [1.300, 1.300] ‡ |" in text) is alone
    assert ("‡: measured in one process" in text) is alone
    assert (" 1.30‡" in printed(results)) is alone and ("‡: measured" in printed(results)) is alone
    assert ("1.30‡" in words) is alone and any(word.startswith("‡: measured") for word in words) is alone
    assert ("1.300 [1.300, 1.300], of one process" in page(results, {})) is alone
    assert "undecided" in text.split("LLM against torch.compile")[1].split("\n")[4]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_mean_with_a_row_of_one_process_is_marked_and_has_no_interval(processes: int) -> None:
    alone = processes == 1
    sat = [
        session({PROGRAM: arm(2.0), COMPILE: arm(2.6)}, case=case, process=process)
        for case, several in (("1B", 2), ("7B", processes))
        for process in range(several)
    ]
    results = Results(sessions=tuple(sat))
    mean = "1.300 ‡" if alone else "1.300 [1.300, 1.300]"
    for text in (brief(results), markdown(results)):
        under = text.split("**LLM against torch.compile**")[1].split("**The paper")[0]
        assert f"(geometric mean {mean})" in under and ("(‡)" in under) is alone
        assert f"| `gemm_rope` | {mean} | 2 |" in under and f"| all operators | {mean} | 2 |" in under
    shown = page(results, {}).split("claims")[0]
    assert shown.count(mean) == 3 and f"(geometric mean {mean})" in shown


def test_whole_layers_are_summed_apart_from_operators() -> None:
    made = [
        line("1B", "gemm_rope", ratios={COMPILE: (2.0, 1.9, 2.1), HUMAN: (2.0, 1.9, 2.1)}),
        line("1B", LAYER_FORWARD, ratios={COMPILE: (0.5, 0.4, 0.6), HUMAN: (0.5, 0.4, 0.6)}),
        line("7B", LAYER_BOTH, ratios={COMPILE: (0.5, 0.4, 0.6)}),
    ]
    told = against(made, COMPILE)
    assert "1 win, 0 ties and 0 losses in 1 row of 1 operator (geometric mean 2.000 [" in str(told)
    assert "; 0 wins, 0 ties and 2 losses in 2 rows of whole layers (geometric mean 0.500 [" in str(told)
    names = ["gemm_rope", "all operators", LAYER_FORWARD, LAYER_BOTH, "all layers"]
    assert [name for name, *_ in summed(told)] == names
    people = against(made, HUMAN)
    assert [tally.name for tally in people.kinds] == ["QuACK's own kernels"]
    assert str(people).count("1 row of") == 2 and "in 1 row of whole layers" in str(people)
    assert [tally.name for tally in against(made[1:], COMPILE).totals] == ["all layers"]


# ── Impossible times ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("percent", [4, 6])
def test_a_time_below_the_roofline_is_noted_and_decides_nothing(percent: int) -> None:
    doubted = percent > 5
    arms = {PROGRAM: arm(2.0), COMPILE: arm(1 - percent / 100), LIGER: arm(1.5), REFERENCE_ARM: arm(0.5)}
    sat = [session(arms, roofline=1.0, process=process) for process in TWO]
    results = Results(sessions=tuple(sat))
    found, note = lines(results), "its time lies over 5% below the roofline, which the measured peak"
    (times, ratios, errors, _), notes = sheets(found)
    bold = [name for name, entry in zip(times.columns, times.rows[0][2], strict=True) if entry.best]
    assert bold == [LIGER if doubted else COMPILE]
    place = times.columns.index(COMPILE)
    for sheet in (times, errors):
        noted = [dict(notes)[number] for number in sheet.rows[0][2][place].notes]
        assert any(text.startswith(note) for text in noted) is doubted
    # the bare matmul gets no note, though its time is below the roofline, too
    assert sum(text.startswith(note) for _, text in notes) == doubted
    told = against(found, COMPILE)
    (every,) = told.totals
    assert every.rows[0].outcome == ("undecided" if doubted else "loss")
    assert every.average.endswith(" §") is ("below the roofline (§), and a mean" in str(told)) is doubted
    assert ("§" in ratios.says) is ("§: one of the two times lies over 5% below" in ratios.says) is doubted
    mean = f"0.{50 - percent // 2}"
    assert (f" {mean}§" in printed(results)) is (f"{mean}§" in drawn_words(found)) is doubted
    assert ("of an impossible time" in page(results, {})) is doubted


def test_where_the_llms_own_time_cannot_be_no_ratio_decides() -> None:
    ratios = {HUMAN: (1.5, 1.4, 1.6)}
    # ``own`` is the roofline in ms; the LLM's kernel takes 1 ms
    for own, outcome in ((1.04, "win"), (1.07, "undecided")):
        made = line("7B", ratios=ratios, roofline=own)
        hidden = replace(made, cells={HUMAN: made.cells[HUMAN]})
        for seen in (made, hidden):
            (every,) = against([seen], HUMAN).totals
            assert [row.outcome for row in every.rows] == [outcome]
    slow = line("7B", "gemm_swiglu_bwd", ratios={COMPILE: (1.4, 1.35, 1.45)}, roofline=1.07)
    assert [f.verdict for f in findings([slow]) if f.rows] == ["undecided"]


# ── Who wrote the kernels ─────────────────────────────────────────────────────────────────────────────────


def test_a_kernel_that_we_composed_of_quacks_operators_says_so() -> None:
    ours = {name for name in rows.TEN if composed(name)}
    assert ours == {
        "gemm_rmsnorm",
        "gemm_rmsnorm_rope",
        "gemm_rmsnorm_partial_cross_entropy",
        "gemm_residual_rmsnorm_bwd",
    }
    assert not composed("gemm_fp8_row_scale")  # QuACK has no kernel for this operator
    for name in ("gemm_rmsnorm", "gemm_rope"):
        spec = load(SPECS / f"{name}.yaml", check=False)
        for each in LIBRARY_ARMS:
            assert ("composed by us" in note(spec, each)) is (name in ours)
        assert note(spec, PROGRAM) == ""


def test_the_human_summary_keeps_the_librarys_own_kernels_apart() -> None:
    made = [
        line("1B", "gemm_rmsnorm", ratios={HUMAN: (2.0, 1.9, 2.1), COMPILE: (2.0, 1.9, 2.1)}),
        line("1B", "gemm_rope", ratios={HUMAN: (0.5, 0.4, 0.6), COMPILE: (2.0, 1.9, 2.1)}),
        line("7B", "gemm_rope", ratios={HUMAN: (0.5, 0.4, 0.6), COMPILE: (2.0, 1.9, 2.1)}),
    ]
    told = against(made, HUMAN)
    own, ours = told.kinds
    assert [own.count(o) for o in ("win", "tie", "loss")] == [0, 0, 2]
    assert own.mean.estimate == pytest.approx(0.5) and ours.mean.estimate == pytest.approx(2.0)
    assert "0 wins, 0 ties and 2 losses in 2 rows of 1 operator (geometric mean 0.500 [" in str(told)
    assert "where the kernel is QuACK's own, 0 wins, 0 ties and 2 losses in 2 rows" in str(told)
    assert "; where we composed the kernel from QuACK's operators (gemm_rmsnorm), 1 win, 0 ties" in str(told)
    assert "3 rows" not in str(told)
    plain = against(made, COMPILE)
    assert plain.kinds == () and "3 wins, 0 ties and 0 losses in 3 rows of 2 operators" in str(plain)
    assert [tally.name for tally in against(made[1:], HUMAN).kinds] == ["QuACK's own kernels"]
    by = {finding.claim.column: finding for finding in findings(made)}
    assert by[HUMAN].measured == "0.500 to 0.500 in 2 rows"


def test_what_codas_package_leaves_to_pytorch_is_kept_apart() -> None:
    for name, entry in entries(UPSTREAM).items():
        assert helped(name) is any(words in entry.note for words in ("PyTorch scales", "compiled pass"))
    made = [
        line("1B", "gemm_swiglu", ratios={UPSTREAM: (1.0, 0.9, 1.1)}),
        line("1B", "gemm_swiglu_bwd", ratios={UPSTREAM: (2.0, 1.9, 2.1)}),
    ]
    told = against(made, UPSTREAM)
    own, shared = told.kinds
    assert [own.mean.estimate, shared.mean.estimate] == pytest.approx([1.0, 2.0])
    assert "where the kernel is CODA's own, 0 wins, 1 tie and 0 losses in 1 row" in str(told)
    assert "; where CODA's package leaves a part to PyTorch (gemm_swiglu_bwd), 1 win, 0 ties" in str(told)
    assert [name for name, *_ in summed(told)][2:] == [own.name, shared.name, "all operators"]
    words = drawn_words(made)
    assert "upstream CODA: for swiglu_bwd, its kernels leave passes over whole matrices to PyTorch." in words


def test_the_table_has_the_librarys_own_and_ours_apart_too() -> None:
    results = comparison.results([("gemm_rmsnorm", "7B"), ("gemm_rope", "7B")])
    for text in (markdown(results), brief(results)):
        under = text.split("**LLM against human**")[1].split("**LLM against")[0]
        assert "| QuACK's own kernels | " in under and "| composed by us from QuACK's operators | " in under
    words = drawn_words(lines(results))
    assert "human: for rmsnorm, we composed the kernel from QuACK's operators." in words


# ── The paper's claims ────────────────────────────────────────────────────────────────────────────────────


def test_the_claim_of_rmsnorms_backward_is_about_weights_that_are_square() -> None:
    name = "gemm_residual_rmsnorm_bwd"
    (claim,) = (claim for claim in CLAIMS if claim.what.startswith("RMSNorm backward"))
    assert "(d, d)" in claim.what and "K = N = 2048 and 4096" in claim.what
    made = [
        line(case, name, ratios={COMPILE: (ratio, ratio, ratio)})
        for case, ratio in (("1B", 1.1), ("1B square", 1.5), ("7B square", 1.6))
    ]
    (finding,) = (finding for finding in findings(made) if finding.claim == claim)
    assert (finding.measured, finding.verdict) == ("1.500 to 1.600 in 2 rows", "within")
    chosen = rows.choose_rows((), (), everything=False, quick=False)
    usual = {row.case: row.sizes for row in chosen if row.operator == name}
    assert set(claim.cases) <= set(usual)
    assert [(usual[case]["K"], usual[case]["N"]) for case in claim.cases] == [(2048, 2048), (4096, 4096)]


# ── Texts beside the figures ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (0.97, 1.03, "0.999 [0.970, 1.030]"),
        (0.998, 0.99962, "0.9990 [0.9980, 0.9996]"),
        (0.998, 1.00004, "0.99900 [0.99800, 1.00004]"),
        (0.9996, 1.02, "0.9990 [0.9996, 1.0200]"),
        (1.0, 1.02, "0.999 [1.000, 1.020]"),
    ],
)
def test_an_interval_shows_on_which_side_of_1_it_ends(low: float, high: float, told: str) -> None:
    assert ratio_text(interval(0.999, low, high)) == told


def test_a_terminal_says_that_an_anchored_times_clock_may_be_another() -> None:
    apart = [session({PROGRAM: arm(2.0)}), session({UPSTREAM: arm(3.0)}, process=1)]
    words = "the GPU's clock rate may have differed"
    assert words in " ".join(printed(Results(sessions=tuple(apart))).split())
    assert words not in " ".join(
        printed(Results(sessions=(session({PROGRAM: arm(2.0), UPSTREAM: arm(3.0)}),))).split()
    )


def test_charts_say_what_was_measured_and_what_their_marks_mean() -> None:
    results = comparison.results([("gemm_swiglu_bwd", "70B"), ("gemm_rope", "7B")])
    told = conditions_text(results)
    for name in ("speedup.svg", "roofline.svg"):
        words = " ".join(drawn_words(lines(results), name, told))
        assert told in words and "made-up GPU" in words and "2001-02-03" in words
    indirect = [line("7B", ratios={COMPILE: (1.5, 1.4, 1.6)}, indirect=True), line("7B", "gemm_swiglu")]
    indirect += [line("1B", "gemm_swiglu", ratios={HUMAN: (1.5, 1.4, 1.6)})]
    texts = drawn_words(indirect)
    notes = " ".join(texts)
    assert "1.50†" in texts and "†: the two were never measured in the same session" in notes
    assert "–: no figure; the table has the reason." in texts
    assert "‡" not in notes and "composed" not in notes


def test_a_bars_ratio_and_its_marks_are_within_the_chart() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    wide = {COMPILE: (9.41, 9.3, 9.5), HUMAN: (0.2, 0.19, 0.21), LIGER: (12.34, 12.2, 12.5)}
    figure = charts._figures([line("7B", ratios=wide, processes=1, indirect=True)], "")["speedup"]
    FigureCanvasAgg(figure).draw()
    edges = {text.get_text(): text.get_window_extent().x1 for text in figure.axes[0].texts}
    assert "12.34†‡" in edges and max(edges.values()) < figure.bbox.x1


def test_what_was_measured_may_be_long_or_hostile() -> None:
    told = "a GPU $x$ <b> \x1b[31m " + "wide" * 200 + " end"
    words = drawn_words([line("7B", ratios={COMPILE: (1.5, 1.4, 1.6)})], told=told)
    assert any(word.endswith("end") for word in words)
    assert max(map(len, words)) < 200


def test_a_mark_names_the_reference_arm_that_a_ratio_went_through() -> None:
    bare = line("7B", ratios={COMPILE: (1.5, 1.4, 1.6)}, indirect=True)
    whole = line("7B", LAYER_BOTH, ratios={COMPILE: (1.5, 1.4, 1.6)}, indirect=True, reference_arm=EAGER)
    by_eager, by_bare = "eager PyTorch of the whole layer", "cuBLAS's bare matmul"
    for made, named in (([bare], {by_bare}), ([whole], {by_eager}), ([bare, whole], {by_bare, by_eager})):
        (_, ratios, *_), _ = sheets(made)
        assert {name for name in (by_eager, by_bare) if name in ratios.says} == named
    sat = (layer({PROGRAM: arm(6.0)}), layer({COMPILE: arm(7.0)}, process=1))
    assert "computed through eager PyTorch" in markdown(Results(sessions=sat))


def test_long_names_of_operators_are_whole() -> None:
    results = Results(sessions=(layer({PROGRAM: arm(6.0), COMPILE: arm(7.0)}),))
    words = drawn_words(lines(results))
    assert "layer, forward and\nbackward" in words or {"layer, forward and", "backward"} <= set(words)
    told = printed(results)
    assert "layer, forward  7B" in told and "and backward " in told
    names = [("gemm_rmsnorm_partial_cross_entropy", "7B"), ("gemm_rmsnorm_partial_cross_entropy", "1B")]
    begun = [row[:NAME].rstrip() for row in printed(comparison.results(names)).splitlines()]
    assert "".join(begun).count("rmsnorm_partial_cross_entropy") == 1


def test_the_short_form_has_operators_ratios_and_the_claims() -> None:
    results = comparison.results([("gemm_rope", "7B"), ("gemm_rope", "1B")])
    for text in (brief(results), markdown(results)):
        for name in (HUMAN, COMPILE):
            under = text.split(f"**LLM against {name}**")[1]
            assert "(geometric mean " in under.split("|")[0]
            assert "| geometric mean of time over LLM's [95%] |" in under
            assert re.search(r"\| `gemm_rope` \| \d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\] \| 2 \|", under)
        assert "**The paper's claims**" in text and "| SwiGLU backward |" in text
