"""The tables of docs/results.md: their figures agree with figures computed by hand, and the
committed page agrees with the reports and recordings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from authoring import KERNELS, RECORDINGS, SHIPPED
from checkout import ROOT
from typer.testing import CliRunner

from coda_agent.agent.cli import main
from coda_agent.agent.cli.exit_codes import USAGE
from coda_agent.agent.reporting import table, table_rows
from coda_agent.agent.reporting.table_rows import Estimate
from coda_agent.agent.storage.kernel_files import KernelError
from coda_agent.primitives.errors import InvalidInput
from coda_agent.verifier.report import Accepted, Authorship, Identity, Ratio, Timing

BASE = {"candidate": 2.0, "torch.compile": 3.0, "cuBLAS matmul": 1.6}
H100 = {"gpu": "NVIDIA H100", "driver": "580.1", "torch": "2.11.0+cu130"}
VERSIONS = {"nvidia-cutlass-dsl": "4.8.1", "quack-kernels": "0.6.5"}


def ratio(estimate: float, side: float = 0.25) -> Ratio:
    return Ratio(estimate=estimate, low=estimate - side, high=estimate + side)


def timing(case: str = "1B", host: float = 20.0, **changes: Any) -> Timing:
    """Return a timing: the candidate takes 2 ms, torch.compile 3 ms, cuBLAS's matmul 1.6 ms, and the roofline
    is 1.5 ms."""
    fields: dict[str, Any] = {
        "case": case,
        "sizes": {"M": 16384},
        "schedules": {},
        "milliseconds": BASE,
        "ratios": {"torch.compile": ratio(1.5), "cuBLAS matmul": ratio(0.8, 0.3)},
        "roofline_milliseconds": 1.5,
        "host_microseconds": {"candidate": host, "cuBLAS matmul": 18.0},
        "tuning_seconds": 1.0,
        "rounds": 100,
        "samples": {},
    }
    return Timing(**fields | changes)


def put_report(
    directory: Path,
    spec: str,
    *timings: Timing,
    run: str = "",
    day: str = "2026-11-21",
    raw: bool = False,
    **conditions: str,
) -> None:
    hashes: dict[str, Any] = dict.fromkeys(("spec_hash", "program_hash", "lowered_hash"), "0")
    report = Accepted(
        identity=Identity(spec=spec, versions=VERSIONS, raw=raw, **hashes),
        gates=(),
        timings=timings or (timing(),),
        conditions=H100 | conditions,
        seeds={},
        date=f"{day}T01:00:00+00:00",
        authorship=Authorship(author="Ada", attempts=1, run=run or f"{spec}-1"),
    )
    path = directory / f"{spec}{'.raw' * raw}.report.json"
    path.write_text(report.model_dump_json(), encoding="utf-8")


def put_run(
    directory: Path, spec: str, *steps: str, run: str = "", author: str = "Ada", file: str = ""
) -> None:
    """Write a recording. ``steps[k - 1]`` is the verdict on the k-th answer: checked, rejected, or empty if
    nobody judged the answer. The result of a measurement, measured or rejected, may follow the verdict."""
    events: list[tuple[str, str, dict[str, Any]]] = [
        ("prompt", "prompt", {"system": "x" * 3500, "task": "x" * 349})
    ]
    for number, found in enumerate(steps, 1):
        status, _, later = found.partition(" ")
        answer = {"text": "y" * 70, "author": author, "stop_reason": "end_turn"}
        events.append((f"answer/{number}", "answer", answer))
        if status:
            events.append((f"report/{number}", "report", {"report": {"status": status}, "source": ""}))
        if later:
            events.append((f"measurement/{number}", "measurement", {"status": later}))
    header = {"run": run or f"{spec}-1", "spec": spec, "author": "nobody"}
    lines: list[dict[str, Any]] = [{"coda_agent_journal": 1, "header": header}]
    for seq, (key, kind, payload) in enumerate(events, 1):
        time = "2026-11-21T00:00:00+00:00"
        lines.append({"seq": seq, "key": key, "kind": kind, "payload": payload, "time": time})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / f"{file or spec}.jsonl").write_text(text, encoding="utf-8")


def read(directory: Path) -> table.Tables:
    return table.read(directory, directory)


def cells(markdown: str) -> list[list[str]]:
    """Return the rows of all tables, without headings."""
    rows = [
        line.removeprefix("| ").removesuffix(" |").split(" | ")
        for line in markdown.splitlines()
        if line.startswith("|")
    ]
    return [row for row in rows if row[0] != "operator" and set(row[0]) != {"-"}]


# ── Measured ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_by_hand(tmp_path: Path) -> None:
    arms = {
        "torch.compile": ratio(1.5),
        "torch.compile max-autotune": ratio(1.25),
        "cuBLAS matmul": Ratio(estimate=0.8, low=0.5, high=1.0),
        "QuACK (its own tuner)": ratio(1.125, 0.125),
        "QuACK (our search)": ratio(1.0, 0.0625),
        "QuACK matmul": ratio(0.875),  # not shown: it computes only a part of the operator
    }
    put_report(tmp_path, "gemm_rope", timing(ratios=arms))
    (row,) = read(tmp_path).rows
    assert row == table_rows.MeasuredCase(
        group="CODA's ten",
        operator="gemm_rope",
        case="1B",
        milliseconds=2.0,
        speedup=Estimate(1.5, 1.25, 1.75),
        autotune=Estimate(1.25, 1.0, 1.5),
        before=None,
        quack=Estimate(1.0, 0.9375, 1.0625),  # the QuACK arm that is hardest to beat
        quack_arm="QuACK (our search)",
        over_cublas=Estimate(1.25, 1.0, 2.0),  # 2.0 ms / 1.6 ms, with bounds 1 / 1.0 and 1 / 0.5
        roofline=0.75,
    )
    (shown,) = cells(read(tmp_path).parts()["measured"])
    assert shown == [
        "`gemm_rope`",
        "1B",
        "2.000",
        "1.500 [1.250, 1.750]",
        "1.250 [1.000, 1.500]",
        "1.000 [0.938, 1.062]",
        "1.250 [1.000, 2.000]",
        "75%",
    ]


def test_an_arm_that_was_not_measured_is_a_dash_and_one_that_never_was_no_column(tmp_path: Path) -> None:
    put_report(tmp_path, "gemm_rope", timing(ratios={"torch.compile": ratio(1.5)}))
    (shown,) = cells(read(tmp_path).parts()["measured"])
    assert shown[3:] == ["1.500 [1.250, 1.750]", "75%"]
    arms = {"torch.compile": ratio(1.5), "cuBLAS matmul": ratio(1.0), "QuACK (our search)": ratio(1.0)}
    put_report(tmp_path, "gemm_swiglu_mlp", timing(ratios=arms))  # a spec of another group
    markdown = read(tmp_path).parts()["measured"]
    assert [len(row) for row in cells(markdown)] == [7, 7] and "max-autotune" not in markdown
    assert cells(markdown)[0][3:] == ["1.500 [1.250, 1.750]", "–", "–", "75%"]


def test_groups_operators_and_cases_have_an_order(tmp_path: Path) -> None:
    widths = [timing(case) for case in ("decode", "70B", "7B square", "1B", "7B")]
    several = ("unheard_of", "gemm_swiglu_mlp", "gemm_grouped_down", "gemm_qkv_rope", "gemm_geglu")
    for spec in (*several, "gemm_swiglu_bwd", "gemm_qk_norm_rope"):
        put_report(tmp_path, spec)
    put_report(tmp_path, "gemm_rmsnorm", *widths)
    shown = read(tmp_path).parts()["measured"]
    headings = [line.strip("*") for line in shown.splitlines() if line.startswith("**")]
    assert headings == [*table_rows.GROUPS, "Others"]
    names = [row[0].strip("`") for row in cells(shown) if row[0]]
    assert names == [
        "gemm_rmsnorm",
        "gemm_swiglu_bwd",
        "gemm_qk_norm_rope",
        "gemm_geglu",
        "gemm_qkv_rope",
        "gemm_grouped_down",
        "gemm_swiglu_mlp",
        "unheard_of",
    ]
    rows = read(tmp_path).rows
    cases = [row.case for row in rows if row.operator == "gemm_rmsnorm"]
    assert cases == ["1B", "7B", "70B", "7B square", "decode"]
    assert rows[-1].group == "Others"


def test_every_spec_has_one_group() -> None:
    grouped = [name for names in table_rows.GROUPS.values() for name in names]
    assert sorted(grouped) == SHIPPED
    assert len(table_rows.GROUPS["CODA's ten"]) == 10


def test_device_versions_and_dates_are_those_of_the_reports(tmp_path: Path) -> None:
    put_report(tmp_path, "gemm_rope", day="2026-11-23")
    first = read(tmp_path).parts()["measured"].splitlines()[0]
    assert first == (
        "1 operator on NVIDIA H100 (driver 580.1, PyTorch 2.11.0+cu130, nvidia-cutlass-dsl 4.8.1, "
        "quack-kernels 0.6.5), 2026-11-23, 100 rounds in one process."
    )
    put_report(tmp_path, "gemm_geglu", timing(rounds=30, processes=3), day="2026-11-21", driver="590.2")
    first = read(tmp_path).parts()["measured"].splitlines()[0]
    assert first.startswith("2 operators on NVIDIA H100 (driver 580.1 and 590.2, PyTorch 2.11.0+cu130,")
    assert first.endswith("2026-11-21 to 2026-11-23, 30 to 100 rounds in each of 1 to 3 processes.")


def test_host_time_names_who_misses_the_goal(tmp_path: Path) -> None:
    # cuBLAS takes 18 us, and the goal allows 5 us more. Only the case 1B counts, so 90 us at 7B are ignored.
    put_report(tmp_path, "gemm_rope", timing(host=23.0), timing("7B", host=90.0))
    assert "23.0 us; of cuBLAS's bare matmuls: 18.0 us." in str(read(tmp_path))
    assert "goal of at most 5 us more than cuBLAS is met by all." in str(read(tmp_path))
    put_report(tmp_path, "gemm_geglu", timing(host=23.1))
    assert ": 23.0 to 23.1 us;" in str(read(tmp_path))
    assert "missed by `gemm_geglu` (23.1 against 18.0)." in str(read(tmp_path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "accept that kernel again"),
        ('{"status": "accepted"}', "identity: Field required"),
        ('{"status": "rejected", "gate": "trace", "code": "c", "message": "m"}', "is rejected, not accepted"),
    ],
)
def test_a_report_that_is_none_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "gemm_rope.report.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(KernelError, match=f"{path.name}.*{words}"):
        read(tmp_path)


# ── Authoring ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("steps", "passed"),
    [
        (["checked"], 1),
        (["rejected", "checked"], 2),
        (["rejected", "rejected", "checked measured"], 3),
        (["checked rejected", "checked measured"], 2),  # correct, but too slow at first
        (["checked rejected"], None),
        (["rejected", "rejected"], None),
        (["rejected", ""], None),  # an answer without a verdict
        ([], None),
    ],
)
def test_the_first_answer_that_passed(tmp_path: Path, steps: list[str], passed: int | None) -> None:
    put_run(tmp_path, "gemm_rope", *steps)
    (run,) = read(tmp_path).runs
    assert (run.passed, run.answers) == (passed, len(steps))
    assert run.author == ("Ada" if steps else "nobody")


def test_success_counts_every_run_that_is_kept(tmp_path: Path) -> None:
    put_run(tmp_path, "gemm_rope", "checked")
    put_run(
        tmp_path, "gemm_rope", "rejected", "rejected", "checked", run="gemm_rope-0", file="gemm_rope.before"
    )
    put_run(tmp_path, "gemm_geglu", "rejected", "rejected", "rejected", "checked")
    put_run(tmp_path, "unheard_of", "rejected", author="A | B\n")
    put_report(tmp_path, "gemm_rope")
    tables = read(tmp_path)
    assert [table.success(tables.runs, k) for k in (1, 2, 3, 4)] == [1, 1, 2, 3]
    assert [run.operator for run in tables.of_specs()] == ["gemm_rope", "gemm_rope", "gemm_geglu"]
    shown = tables.parts()["authoring"]
    assert cells(shown) == [
        ["`gemm_rope`", "Ada", "0", "3", "3", "1,100", "60", "0", "checked"],
        ["`gemm_rope`", "Ada", "0", "1", "1", "1,100", "20", "0", "accepted"],
        ["`gemm_geglu`", "Ada", "0", "4", "4", "1,100", "80", "0", "checked"],
        ["`unheard_of`", r"A \| B", "0", "1", "–", "1,100", "20", "0", "none"],
    ]
    assert (
        "Passed at the first try: 1 of 3 runs, 33% [6.1%, 79.2%], of specs in `specs/`; "
        "1 of 4 runs, 25% [4.6%, 69.9%], in all.\n"
    ) in shown
    assert (
        "Passed within 3 tries: 2 of 3 runs, 67% [20.8%, 93.9%], of specs in `specs/`; "
        "2 of 4 runs, 50% [15.0%, 85.0%], in all.\n"
    ) in shown


def test_runs_of_other_functions_alone_have_one_rate(tmp_path: Path) -> None:
    put_run(tmp_path, "unheard_of", "checked")
    tables = read(tmp_path)
    said = "Passed at the first try: 1 of 1 run, 100% [20.7%, 100.0%], in all.\n"
    assert said in tables.parts()["authoring"]
    assert tables.to_json()["authoring"]["success_of_specs"] == {}


def test_a_draft_that_failed_is_a_try_and_tips_are_counted() -> None:
    runs = {run.operator: run for run in table.read(KERNELS, RECORDINGS).runs}
    mended, at_once = runs["selu_statistics"], runs["mish_linear"]
    assert (mended.drafts, mended.answers, mended.passed, mended.tips) == (2, 1, 2, 2)
    assert (at_once.drafts, at_once.answers, at_once.passed, at_once.tips) == (1, 1, 1, 0)


# ── The command and docs/results.md ───────────────────────────────────────────────────────────────────────

MARKED = (
    "# A\n<!-- table: authoring -->\nold\n<!-- /table -->\nB\n<!-- table: edited -->\n<!-- /table -->\n"
    "<!-- table: measured -->\n<!-- /table -->\nC\n"
)


def test_write_replaces_what_is_between_the_comments_only(tmp_path: Path) -> None:
    put_report(tmp_path, "gemm_rope", run=r"\1")
    put_run(tmp_path, "gemm_rope", "checked", author=r"\1 \g<0>")  # the text \1 must stay as it is
    page, tables = tmp_path / "page.md", read(tmp_path)
    page.write_text(MARKED, encoding="utf-8")
    table.write(page, tables)
    parts = tables.parts()
    wanted = MARKED.replace("old\n", parts["authoring"])
    for name in ("measured", "edited"):
        wanted = wanted.replace(f"{name} -->\n", f"{name} -->\n" + parts[name])
    assert page.read_text(encoding="utf-8") == wanted
    table.write(page, tables)
    assert page.read_text(encoding="utf-8") == wanted


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("no table", "none"),
        (MARKED.replace("table: measured", "table: other"), "authoring, edited, other"),
        (MARKED + MARKED, "authoring, edited, measured, authoring, edited, measured"),
    ],
)
def test_a_page_without_its_comments_stays_as_it_was(tmp_path: Path, text: str, found: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match=f"page.md: has tables {found}; mark one place with each of"):
        table.write(page, read(tmp_path))
    assert page.read_text(encoding="utf-8") == text


def test_without_evidence_the_tables_say_so(tmp_path: Path) -> None:
    tables = read(tmp_path)
    assert str(tables).splitlines()[::2] == [
        "No kernel has been measured yet.",
        "No edit is accepted at present.",
        "No run has been recorded yet.",
    ]
    assert tables.to_json() == {
        "measured": [],
        "edited": [],
        "superseded": [],
        "authoring": {"runs": [], "success": {}, "success_of_specs": {}},
    }


def test_an_edit_stands_beside_the_kernel_that_it_was_made_from(tmp_path: Path) -> None:
    put_report(tmp_path, "gemm_rope")
    put_report(tmp_path, "gemm_rope", timing(ratios={"the kernel before": ratio(1.125, 0.0625)}), raw=True)
    found = read(tmp_path)
    assert len(found.rows) == len(found.edits) == 1 and len(found.reports) == 1
    (shown,) = cells(found.parts()["edited"])
    assert shown[:4] == ["`gemm_rope`", "1B", "2.000", "1.125 [1.062, 1.188]"]
    assert not found.superseded and "again" not in found.parts()["edited"]
    put_report(tmp_path, "gemm_rope", day="2026-11-22")
    since = read(tmp_path)
    assert since.superseded == ("gemm_rope",) and since.to_json()["superseded"] == ["gemm_rope"]
    assert "The programs of `gemm_rope` were measured again" in since.parts()["edited"]


def test_the_command_prints_writes_and_gives_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_report(tmp_path, "gemm_rope")
    put_run(tmp_path, "gemm_rope", "checked")
    tables = read(tmp_path)
    monkeypatch.setattr(table, "read", lambda: tables)
    page = tmp_path / "page.md"
    page.write_text(MARKED, encoding="utf-8")

    def said(*arguments: str) -> str:
        done = CliRunner().invoke(main.app, ["table", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert said() == str(tables)
    assert said("--write", str(page)) == "" and tables.parts()["measured"] in page.read_text(encoding="utf-8")
    data = json.loads(said("--json"))
    assert data["measured"][0]["speedup"] == {"estimate": 1.5, "low": 1.25, "high": 1.75}
    assert data["authoring"]["runs"][0]["passed"] == 1
    assert data["authoring"]["success"]["3"] == data["authoring"]["success_of_specs"]["3"]
    assert data["authoring"]["success"]["3"]["runs"] == 1


def test_a_mistake_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("no table", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["coda-agent", "table", "--write", str(page)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == USAGE
    assert capsys.readouterr().err.startswith(f"coda-agent: {page}: has tables none;")


def test_the_results_page_is_up_to_date(tmp_path: Path) -> None:
    page, kept = tmp_path / "results.md", ROOT / "docs" / "results.md"
    page.write_text(kept.read_text(encoding="utf-8"), encoding="utf-8")
    table.write(page, table.read(KERNELS, RECORDINGS))
    now = page.read_text(encoding="utf-8")
    assert now == kept.read_text(encoding="utf-8"), "run: coda-agent table --write docs/results.md"
