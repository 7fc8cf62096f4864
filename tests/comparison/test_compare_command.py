"""Tests of the command ``coda-agent compare``. Some tests have a fake GPU, the others have no GPU."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from comparison_machine import Machine, stood_in
from gpu_taken import gpu_taken

from coda_agent.agent.cli import main
from coda_agent.agent.cli.exit_codes import ABSENT, INTERRUPTED, OK, REJECTED, UNFINISHED, USAGE
from coda_agent.agent.fleet.pool import GivenUp
from coda_agent.comparison import measuring, rows
from coda_agent.comparison.competitors import (
    AUTOTUNED,
    COMPILE,
    EAGER,
    EAGER_APART,
    HUMAN,
    LIGER,
    MATMUL,
    PROGRAM,
    REFERENCE_ARM,
    UPSTREAM,
)
from coda_agent.comparison.drawing import markdown
from coda_agent.comparison.drawing.cells import lines
from coda_agent.comparison.drawing.summary import against
from coda_agent.comparison.options import QUICK_ROUNDS, Choice
from coda_agent.comparison.results import LAYER_BOTH, LAYER_FORWARD, read, write
from coda_agent.primitives.system.files import ROOT
from coda_agent.verifier.baselines.quack import OWN_TUNER
from coda_agent.verifier.statistics import ratio
from coda_agent.verifier.worker import Lost
from comparison import results as made_up

# matches coordinates, but not colours or identifiers
NUMBER = re.compile(r"(?<![\w#.-])-?\d+(?:\.\d+)?(?![\w%])")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with stood_in(monkeypatch) as found:
        yield found


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coda-agent", "compare", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def test_results_are_drawn_without_a_gpu(command: Callable[..., Any], tmp_path: Path) -> None:
    kept = tmp_path / "results.json"
    write(kept, made_up((("gemm_rope", "7B"), ("gemm_swiglu", "7B"))))
    status, said, _ = command("--from", kept, "--out", tmp_path / "drawn")
    assert status == 0 and "Against human" in said
    drawn = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert {"table.md", "comparison.html", "speedup.svg", "speedup.png", "roofline.png"} <= drawn
    assert "rows on made-up GPU" in (tmp_path / "drawn" / "speedup.svg").read_text()
    status, said, _ = command("--from", kept, "--out", tmp_path / "drawn", "--json")
    found = json.loads(said)["rows"]
    assert status == 0 and [row["operator"] for row in found] == ["gemm_rope", "gemm_swiglu"]


def test_what_is_drawn_may_be_chosen(command: Callable[..., Any], tmp_path: Path) -> None:
    write(
        tmp_path / "results.json", made_up((("gemm_rope", "7B"), ("gemm_rope", "1B"), ("gemm_swiglu", "7B")))
    )
    words = ("--from", tmp_path, "--out", tmp_path / "drawn")
    chosen = ("--only", "gemm_rope", "--cases", "7B", "--columns", "human")
    (row,) = json.loads(command(*words, *chosen, "--json")[1])["rows"]
    assert (row["operator"], row["case"]) == ("gemm_rope", "7B") and set(row["cells"]) == {HUMAN, MATMUL}
    status, said, _ = command(*words, *chosen)
    assert status == 0 and "Against human" in said and "Against torch" not in said
    page = (tmp_path / "drawn" / "comparison.html").read_text()
    table = (tmp_path / "drawn" / "table.md").read_text()
    for drawn in (page, table):
        assert OWN_TUNER in drawn and "gemm_swiglu" not in drawn.split("claims")[0]
        assert LIGER not in drawn.split("claims")[0] and LIGER not in drawn.split("Milliseconds")[1]
    status, _, told = command(*words, "--cases", "70B")
    assert (
        status == USAGE
        and "--cases 70B: no row is left: these results have gemm_rope 7B, gemm_rope 1B" in told
    )


def test_what_results_do_not_have_is_wrong_usage(command: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "results.json", made_up((("gemm_rope", "7B"), (LAYER_FORWARD, "7B"))))
    words = ("--from", tmp_path, "--out", tmp_path / "drawn", "--only", "gemm_rope", "--cases", "7B")
    for more in (("--only", "gemm_nothing"), ("--cases", "9B")):
        status, _, told = command(*words, *more)
        assert (
            status == USAGE and f"{' '.join(more)}: no row is left: these results have gemm_rope 7B" in told
        )
    assert command(*words, "--only", "layer", "--json")[0] == 0


def test_a_drawing_leaves_no_chart_of_an_earlier_one(command: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "results.json", made_up((("gemm_rope", "7B"),)))
    out = tmp_path / "drawn"
    assert command("--from", tmp_path, "--out", out)[0] == 0 and (out / "speedup.svg").exists()
    assert command("--from", tmp_path, "--out", out, "--columns", "matmul")[0] == 0
    assert not (out / "speedup.svg").exists() and not (out / "speedup.png").exists()
    assert (out / "roofline.svg").exists()


def test_layer_is_both_of_a_layer_to_draw_and_to_measure(command: Callable[..., Any], tmp_path: Path) -> None:
    named = ["layer, forward", "layer, forward and backward"]
    write(tmp_path / "results.json", made_up((("gemm_rope", "7B"), *((name, "1B") for name in named))))
    _, said, _ = command("--from", tmp_path, "--out", tmp_path / "drawn", "--only", "layer", "--json")
    assert [row["operator"] for row in json.loads(said)["rows"]] == named
    asked = Choice(only=["gemm_rope", "layer"]).operators
    found = rows.choose_rows(asked, ("1B",), everything=False, quick=False)
    assert [row.operator for row in found] == ["gemm_rope", *named]


def test_results_that_are_not_there_say_how_to_get_them(command: Callable[..., Any], tmp_path: Path) -> None:
    status, _, said = command("--from", tmp_path / "none.json")
    assert status == USAGE and "no such file" in said and "coda-agent compare --out" in said
    status, _, said = command("--from", tmp_path / "none")
    assert status == USAGE and f"coda-agent compare --out {tmp_path / 'none'} creates it" in said


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (("roofline",), 0.0, "sittings.0.roofline: Input should be greater than 0"),
        (
            ("arms", PROGRAM, "milliseconds", 3),
            0.0,
            f"{PROGRAM}.milliseconds.3: Input should be greater than 0",
        ),
        (
            ("arms", PROGRAM, "milliseconds", 3),
            None,
            f"{PROGRAM}.milliseconds.3: Input should be a valid number",
        ),
        (("arms", PROGRAM, "milliseconds"), [1.0] * 7, "at least 8 items after validation, not 7"),
        (("arms", PROGRAM, "milliseconds"), [1.0] * 9, "equally many rounds"),
        (("arms", PROGRAM, "losses", "y", "relative"), -0.1, "should be greater than or equal to 0"),
        (("anchor",), "nobody", "a session needs its reference arm"),
    ],
)
def test_figures_that_are_none_are_refused(
    command: Callable[..., Any], tmp_path: Path, place: tuple[str | int, ...], value: object, why: str
) -> None:
    write(tmp_path / "results.json", made_up((("gemm_rope", "7B"),)))
    told = json.loads((tmp_path / "results.json").read_text())
    inner = told["sittings"][0]
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    (tmp_path / "results.json").write_text(json.dumps(told))
    status, _, said = command("--from", tmp_path)
    assert status == USAGE and why in " ".join(said.split()) and "measure again into another" in said


def test_a_readme_gets_the_ratios_at_its_mark(command: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "results.json", made_up((("gemm_rope", "7B"),)))
    readme = tmp_path / "README.md"
    words = ("--from", tmp_path, "--out", tmp_path / "drawn", "--write", readme)
    status, _, told = command(*words)
    assert status == USAGE and "README.md: no such file" in " ".join(told.split())
    readme.write_text("no place\n")
    status, _, told = command(*words)
    assert status == USAGE and "mark one place for the comparison" in told
    readme.write_text("a\n<!-- table: comparison -->\nnothing\n<!-- /table -->\nz\n")
    assert command(*words)[0] == 0
    once = readme.read_text()
    assert once.startswith("a\n<!-- table: comparison -->\n1 row on made-up GPU") and once.endswith(
        "-->\nz\n"
    )
    assert "| `gemm_rope` | 7B |" in once and "Against human" in once and "nothing\n" not in once
    assert command(*words)[0] == 0 and readme.read_text() == once


def test_what_is_committed_is_drawn_from_its_results(command: Callable[..., Any], tmp_path: Path) -> None:
    """The committed tables and pages are exactly what the command draws from the committed samples. The
    charts agree except for small shifts."""
    there, first = ROOT / "docs" / "comparison", ROOT / "docs" / "results.md"
    for page in (first, ROOT / "README.md"):
        drawn = tmp_path / page.name
        drawn.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
        if page == first:
            assert command("--from", there, "--out", tmp_path, "--write", drawn)[0] == 0
        else:  # write the same text as the command, without drawing the charts again
            markdown.write(drawn, read(there / "results.json"))
        again = f"run: coda-agent compare --from docs/comparison --out docs/comparison --write {page}"
        assert drawn.read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), again
    drawn, kept = (at / "table.md" for at in (tmp_path, there))
    assert drawn.read_text(encoding="utf-8") == kept.read_text(encoding="utf-8"), again
    for chart in ("speedup.svg", "roofline.svg"):  # another machine's fonts may move coordinates
        now, then = ([float(n) for n in NUMBER.findall((at / chart).read_text())] for at in (tmp_path, there))
        assert len(now) > 1000 and now == pytest.approx(then, abs=0.1), again


def test_the_readmes_headline_is_what_was_measured() -> None:
    found = lines(read(ROOT / "docs" / "comparison" / "results.json"))
    compiled, human = against(found, COMPILE), against(found, HUMAN)
    layers = {tally.name: tally for tally in compiled.operators}
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    headline = readme.partition("**Measured on an H100**")[2].partition("## ")[0]
    operators = (compiled.totals[0], human.kinds[0], layers[LAYER_FORWARD], layers[LAYER_BOTH])
    llama = json.loads((ROOT / "docs" / "training.json").read_text(encoding="utf-8"))["llama"]
    times, peak = llama["times"], llama["peak"]
    training = [ratio(times[arm], times["fused"]) for arm in ("torch.compile", "Liger")]
    assert f"in {1 - peak['fused'] / peak['torch.compile']:.0%} less memory, and" in headline
    measured = [*(tally.mean for tally in operators), *training]
    assert re.findall(r"([0-9.]+)x", headline) == [f"{each.estimate:.2f}" for each in measured]


@pytest.mark.parametrize(
    ("words", "of", "why"),
    [
        (("--from", "there", "--quick"), "--quick", "--from draws existing results; to measure more"),
        (("--from", "there", "--processes", 2, "--rounds", 20), "--processes and --rounds", "leave --from"),
        (("--from", "there", "--budget-seconds", 9, "--again"), "--budget-seconds and --again", "to --out"),
        (("--install", "--from", "there", "--all"), "--all and --from", "--install only creates"),
        (("--install", "--quick", "--json"), "--quick and --json", "compare afterwards, without it"),
        (("--quick", "--all"), "--all", "--quick has three rows; leave one of the two out"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    gpu: Machine,
    command: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[object, ...],
    of: str,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("coda_agent.agent.setup.use_gpu", lambda wanted: True)
    monkeypatch.setattr("coda_agent.comparison.environment.install", lambda: pytest.fail("installed"))
    write(tmp_path / "there" / "results.json", made_up((("gemm_rope", "7B"),)))
    status, said, told = command(*words)
    told = " ".join(told.split())
    assert status == USAGE and f"{of} would do nothing: " in told and why in told and not said
    assert not gpu.sat and {path.name for path in tmp_path.iterdir()} == {"there"}


def test_measuring_needs_an_h100(command: Callable[..., Any], tmp_path: Path) -> None:
    status, _, said = command("--out", tmp_path)
    assert status == ABSENT and "needs an H100" in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--columns", "nobody"), "no column 'nobody'"),
        (("--columns", ""), "no column ''"),
        (("--columns", "human", "--columns", "roofline"), "every table has roofline; leave it out"),
        (("--only", "gemm_nothing"), "there is no gemm_nothing"),
    ],
)
def test_a_wrong_choice_is_wrong_usage(
    command: Callable[..., Any], tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    status, _, said = command("--out", tmp_path, *words)
    assert status == USAGE and told in said


def test_a_file_that_is_none_is_wrong_usage(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"sittings": [{"operator": 3}]}')
    status, _, said = command("--from", tmp_path / "results.json", "--out", tmp_path)
    assert status == USAGE and "sittings.0.operator" in said


def test_the_command_measures_keeps_and_draws(
    gpu: Machine, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coda_agent.agent.setup.use_gpu", lambda wanted: True)
    words = ("--out", tmp_path, "--only", "gemm_swiglu", "--cases", "1B", "--quick", "--columns", "tor")
    status, said, told = command(*words)
    assert status == 0 and "gemm_swiglu 1B, process 1, 0 to come: torch.compile" in told, told
    assert gpu.sat[0][1][:4] == (REFERENCE_ARM, EAGER, EAGER_APART, COMPILE) and LIGER not in gpu.sat[0][1]
    assert "Against torch.compile: no row has both" in said
    assert read(tmp_path / "results.json").sessions


def test_a_columns_whole_name_is_that_column_alone(
    gpu: Machine, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coda_agent.agent.setup.use_gpu", lambda wanted: True)
    words = ("--only", "gemm_swiglu", "--cases", "1B", "--processes", 1, "--columns")
    for name in ("torch", "Torch"):
        assert command("--out", tmp_path / name, *words, name)[0] == 0
    assert gpu.sat == [(None, (REFERENCE_ARM, EAGER, EAGER_APART))] * 2
    assert command("--out", tmp_path / "begun", *words, "torch.")[0] == 0
    assert COMPILE in gpu.sat[-1][1] and EAGER not in gpu.sat[-1][1]


def test_where_ratios_are_to_be_written_is_looked_at_before_anything_is_measured(
    gpu: Machine, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coda_agent.agent.setup.use_gpu", lambda wanted: True)
    (tmp_path / "placeless.md").write_text("no place\n")
    words = ("--out", tmp_path / "out", "--only", "gemm_swiglu", "--cases", "1B", "--columns", "torch")
    for name, why in (("none.md", "no such file"), ("placeless.md", "mark one place")):
        status, _, told = command(*words, "--write", tmp_path / name)
        assert status == USAGE and why in " ".join(told.split())
    assert not gpu.opened and not (tmp_path / "out").exists()


def test_where_results_are_to_be_stored_is_looked_at_before_anything_is_measured(
    gpu: Machine, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coda_agent.agent.setup.use_gpu", lambda wanted: True)
    (tmp_path / "file").touch()
    words = ("--only", "gemm_swiglu", "--cases", "1B", "--columns", "torch")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        status, _, told = command("--out", out, *words)
        assert status == USAGE and "is not a folder; give another folder" in " ".join(told.split())
    assert not gpu.opened and not gpu.sat


def test_two_comparisons_at_once_measure_one_after_the_other(
    gpu: Machine, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comparison reads the results that the first comparison wrote meanwhile, and measures nothing
    again."""
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("coda_agent.agent.setup.use_gpu", lambda wanted: True)
    words = ("--only", "gemm_swiglu", "--cases", "1B", "--columns", "torch", "--processes", 1)
    command("--out", tmp_path / "first", *words)
    sat = len(gpu.sat)

    def first() -> bool:
        shutil.copytree(tmp_path / "first", tmp_path / "out")
        return len(gpu.sat) > sat

    with gpu_taken(monkeypatch, first) as waited:
        status, _, told = command("--out", tmp_path / "out", *words)
    assert status == 0 and waited == [False] and "waiting for it" in told and len(gpu.sat) == sat


def test_a_quick_look_leaves_out_what_takes_long(
    gpu: Machine, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coda_agent.agent.setup.use_gpu", lambda wanted: True)
    gpu.seconds = 50.0
    status, _, told = command("--out", tmp_path, "--quick")
    assert UNFINISHED not in (OK, REJECTED, USAGE, ABSENT, INTERRUPTED)
    assert (tmp_path / "table.md").exists()
    assert status == UNFINISHED and "20 s are left" in told and "repeat the command to continue" in told
    assert len(gpu.sat) == 2 and all(python is None for python, _ in gpu.sat)
    assert not {arm for _, arms in gpu.sat for arm in arms} & {UPSTREAM, *AUTOTUNED}
    assert command("--out", tmp_path, "--quick")[0] == 0 and len(gpu.sat) == 3
    command("--out", tmp_path, "--quick", "--columns", "upstream")
    assert gpu.sat[-1] == ("/other/python", (REFERENCE_ARM, UPSTREAM))


def test_a_quick_look_is_as_long_as_it_is_told(
    gpu: Machine, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coda_agent.agent.setup.use_gpu", lambda wanted: True)
    rounds: list[int] = []
    real = gpu.ask

    def ask(python: str | None, task: Any, asked: Any, **more: Any) -> Any:
        rounds.extend([asked.rounds] if hasattr(asked, "rounds") else [])
        return real(python, task, asked, **more)

    monkeypatch.setattr(gpu, "ask", ask)
    words = ("--only", "gemm_swiglu", "--cases", "1B", "--columns", "torch", "--quick")
    command("--out", tmp_path / "short", *words)
    assert rounds == [QUICK_ROUNDS]
    command("--out", tmp_path / "long", *words, "--processes", 2, "--rounds", 20)
    assert rounds[1:] == [20, 20] and len(gpu.sat) == 3


def test_a_gpu_that_is_gone_is_one_message_and_what_was_measured_is_drawn(
    gpu: Machine, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coda_agent.agent.setup.use_gpu", lambda wanted: True)
    words = ("--out", tmp_path, "--only", "gemm_swiglu", "--cases", "1B", "--columns", "torch")
    assert command(*words, "--processes", 1)[0] == 0
    (tmp_path / "table.md").unlink()

    def gone(*given: Any, **more: Any) -> Any:
        raise Lost("device_error", "CUDA error: the device is gone")

    monkeypatch.setattr(gpu, "ask", gone)
    status, _, told = command(*words)
    assert status == ABSENT and "the results so far are drawn: CUDA error: the device is gone" in told
    assert "gemm_swiglu" in (tmp_path / "table.md").read_text()


def test_a_row_that_is_given_up_leaves_the_others_drawn(
    gpu: Machine, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coda_agent.agent.setup.use_gpu", lambda wanted: True)
    usual = measuring.measure

    def given_up(*given: Any) -> None:
        usual(*given)
        raise GivenUp("gemm_rope 1B measure failed twice")

    monkeypatch.setattr(measuring, "measure", given_up)
    words = ("--out", tmp_path, "--only", "gemm_swiglu", "--cases", "1B", "--columns", "torch")
    status, _, told = command(*words, "--processes", 1)
    assert status == ABSENT and "results so far are drawn: gemm_rope 1B measure failed twice" in told
    assert "gemm_swiglu" in (tmp_path / "table.md").read_text()
