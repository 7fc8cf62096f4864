"""Stored exports of Nsight Compute: which metrics are read, and to which kernel they belong."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from kernels import BACKWARD
from operators import SPECS, of_spec, two_steps
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import counters as command
from coda_agent.agent import show
from coda_agent.agent.cli.main import app
from coda_agent.agent.run.optimize import _counted
from coda_agent.agent.show import counters
from coda_agent.agent.show.counters import Counters, Export
from coda_agent.agent.storage.kernel_files import KernelError
from coda_agent.primitives.compiler.cubin import Resources
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import editable, lower
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule, by_step
from coda_agent.primitives.raw import Wanted
from coda_agent.primitives.runtime.compile import report
from coda_agent.primitives.runtime.sass import Listing
from coda_agent.verifier.loading import load

pytestmark = pytest.mark.slow

PROGRAM = of_spec("gemm_swiglu_bwd")
KEPT = SPECS.parent / "generated_kernels" / "gemm_swiglu_bwd.program.json"
SIZES = {"M": 16384, "D": 2048, "F": 5632}
IDENTITY = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC"'
)
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS = {  # name: unit, then the values of three launches
    "dram__bytes_read.sum": ("Mbyte", "650.12", "1.44", "652.12"),
    "dram__bytes_write.sum": ("Gbyte", "0.56", "0.00", "0.56"),
    "gpu__time_duration.sum": ("usecond", "663.42", "7.42", "653.42"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": ("", "1,234,567", "0", "1,234,569"),
    "launch__grid_size": ("", "132", "2,048", "132"),
    "launch__registers_per_thread": ("register/thread", "168", "24", "168"),
    "lts__t_sectors_op_read.sum": ("sector", "142,000,000", "44,000", "142,000,000"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("%", "70.11", "0", "70.21"),
    STALLED.format("barrier"): ("inst", "0.50", "2.10", "0.60"),
    STALLED.format("long_scoreboard"): ("inst", "4.21", "30.10", "4.41"),
    STALLED.format("gmma"): ("inst", "0.05", "0", "0.05"),
    STALLED.format("wait"): ("inst", "1.00", "1.10", "1.00"),
    STALLED.format("selected"): ("inst", "9.00", "9.00", "9.00"),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "n/a", "n/a", "n/a"),
}


def mangled(name: str) -> str:
    """Return the name that CuTeDSL gives the compiled kernel of class ``name``."""
    return f"kernel_cutlass_kernel_coda_lowered_8a68ed9784a60c16{name}_object_at__TiledMMA_ThrLayoutVMNK_0"


def launched(program: Program) -> list[str]:
    """Return the kernels' class names in three launches: first kernel, last kernel, first kernel again."""
    found = lower(program)
    first, last = found.gemms[0].name, found.vectors[-1].name
    return [first, last, first]


def fields(*texts: str) -> str:
    return ",".join(f'"{text}"' for text in texts)


def identity(number: int, kernel: str) -> str:
    place = (
        "4242",
        "python3",
        "127.0.0.1",
        mangled(kernel),
        "1",
        "7",
        "(384, 1, 1)",
        "(132, 1, 1)",
        "0",
        "9.0",
    )
    return fields(str(number), *place)


def raw(names: list[str], said: str = "# gemm_swiglu_bwd at 1B: M 16384, D 2048, F 5632") -> str:
    """Return the combined output of ``ncu --csv --page raw`` and of the command that ncu runs."""
    rows = [
        "==PROF== Connected to process 4242 (/usr/bin/python3.11)",
        '==PROF== Profiling "kernel_cutlass_kernel_coda_lo..." - 0: 0%....50%....100% - 9 passes',
        said,
        "==PROF== Disconnected from process 4242",
        f"{IDENTITY},{fields(*METRICS)}",
        f"{fields(*[''] * 11)},{fields(*(unit for unit, *_ in METRICS.values()))}",
    ]
    for number, name in enumerate(names):
        rows.append(f"{identity(number, name)},{fields(*(v[number] for _, *v in METRICS.values()))}")
        rows.append("==WARNING== a line of ncu's own")
    return "\n".join(rows) + "\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "gemm_swiglu_bwd.counters.csv"
    path.write_text(raw(launched(PROGRAM)))
    return path


def found(path: Path, program: Program = PROGRAM) -> tuple[Counters, ...]:
    return counters.counters(KernelSource(program), counters.read(path), SIZES)


def test_a_raw_page(path: Path) -> None:
    export = counters.read(path)
    assert (export.program, export.case, len(export.launches)) == ("gemm_swiglu_bwd", "1B", 3)
    step, finish = found(path)
    assert (step.kernel, step.launches, step.other_text) == ("Step0", 2, False)
    assert step.values["time"] == pytest.approx(658.42e-6)
    assert step.values["read"] == pytest.approx(651.12e6) and step.values["written"] == pytest.approx(0.56e9)
    assert step.values["conflicts"] == 1_234_568 and step.values["ctas"] == 132
    assert step.values["tensor"] == pytest.approx(70.16) and "sm" not in step.values
    assert list(step.stalls) == ["long scoreboard", "wait", "barrier", "gmma"]  # `selected` is no stall
    assert finish.kernel.startswith("Finish") and finish.values["ctas"] == 2048
    assert step.floor and step.floor.reads["z"] == 369_098_752


def test_words_put_the_roofline_beside_bytes_and_time(path: Path) -> None:
    text = counters.words(found(path))
    assert text.splitlines()[0].startswith("| hardware counter | Step0, median of 2 launches | Finish")
    assert "| time | 658 us (roofline 382) | 7.42 us" in text
    assert "| read from DRAM | 651 MB (roofline 459) | 1.44 MB" in text
    assert "| SM throughput | – | – |" in text
    assert "| stalls, warps at each issue | long scoreboard 4.31, wait 1.00, barrier 0.55 |" in text


def test_the_table_and_json_hold_the_same(path: Path) -> None:
    out = io.StringIO()
    Console(file=out, width=160).print(counters.as_table(found(path), counters.read(path)))
    assert "gemm_swiglu_bwd.counters.csv, case 1B" in out.getvalue()
    assert re.search(r"tensor pipe active +│ 70.2 % +│ 0 %", out.getvalue())
    step, _ = json.loads(json.dumps(counters.as_dict(found(path))))
    assert step["sm"] is None and step["registers"] == 168 and step["roofline"]["kind"] == "gemm"


def test_a_details_page(path: Path) -> None:
    def row(section: str, name: str, unit: str, value: str) -> str:
        return f"{identity(0, launched(PROGRAM)[0])},{fields(section, name, unit, value)}"

    rows = [
        "==PROF== Connected to process 4242",
        f"{IDENTITY},{fields('Section Name', 'Metric Name', 'Metric Unit', 'Metric Value')}",
        row("GPU Speed Of Light Throughput", "Duration", "ms", "1.5"),
        row("GPU Speed Of Light Throughput", "Compute (SM) Throughput", "%", "61.5"),
        row("Launch Statistics", "Registers Per Thread", "register/thread", "168"),
        row("Command line profiler metrics", "dram__bytes_read.sum", "byte", "1,000"),
    ]
    path.write_text("\n".join(rows))
    (step,) = counters.counters(KernelSource(PROGRAM), counters.read(path))
    assert step.values == {"time": pytest.approx(1.5e-3), "sm": 61.5, "registers": 168, "read": 1000}
    assert step.floor is None and "roofline" not in counters.words([step])


def test_steps_are_told_apart_and_another_lowering_is_named(path: Path) -> None:
    program = two_steps()
    path.write_text(raw(["Step1_0123456789ab", "Step0", "Step1_0123456789ab"], said=""))
    zero, one = counters.counters(KernelSource(program), counters.read(path))
    assert (zero.kernel, zero.launches, one.kernel, one.launches) == ("Step0", 1, "Step1", 2)
    assert zero.other_text and one.other_text and "of other lowered code" in counters.words([one])


def test_the_two_launches_of_a_split_step_are_told_apart(path: Path) -> None:
    """The export has three launches of one kernel. The grids tell the two parts of the step apart: 132 CTAs
    in the first and third launch, and 2048 in the second."""
    path.write_text(raw(["Step0"] * 3))
    first, second = found(path)
    assert (first.kernel, first.launches, second.launches) == ("Step0, part 1 of 2", 2, 1)
    assert (first.values["ctas"], second.values["ctas"]) == (132, 2048)
    assert first.floor is second.floor is None  # a roofline is for a whole step, not for a part


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a CSV export of ncu; use ncu --csv --page raw"),
        ('"ID","Metric"\n"0","1"\n', ":1: no column Kernel Name"),
        (raw(["Other_0123456789ab"] * 3), "it has no kernel of this program .*its kernels: kernel_cutlass"),
        (raw(["Step0"], said="# gemm_rope at 1B: M 8"), "measures gemm_rope, not gemm_swiglu_bwd"),
    ],
)
def test_what_is_no_export_of_this_program(path: Path, text: str, said: str) -> None:
    path.write_text(text)
    with pytest.raises(InvalidInput, match=said):
        found(path)


def test_a_file_that_is_missing_or_of_another_case(path: Path) -> None:
    with pytest.raises(InvalidInput, match="it measures case 1B, not 7B"):
        counters.read(path, "7B")
    assert counters.read(path, "1B").case == "1B"
    with pytest.raises(InvalidInput, match=r"docs/performance\.md has the command"):
        counters.read(path.with_name("none.csv"))


def test_what_is_asked_for_is_what_is_read() -> None:
    asked = counters.wanted()
    assert len(asked) == len(set(asked)) and "gpu__time_duration.sum" in asked
    launch = (mangled("Step0"), dict.fromkeys(asked, 1.0))
    (step,) = counters.counters(KernelSource(PROGRAM), Export(Path("x"), None, None, (launch,)))
    assert set(step.values) == set(counters.METRICS) and len(step.stalls) + len(step.values) == len(asked)


@pytest.mark.usefixtures("no_compiler")
def test_the_command_takes_the_export_beside_the_kernel(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    listing = Listing("Step0_0123456789ab", None, {}, ())

    def disassemble(*given: Any) -> tuple[Listing, ...]:
        asked.append(given)
        return (listing,)

    monkeypatch.setattr("coda_agent.primitives.runtime.sass.disassemble", disassemble)
    kernel = path.with_name("gemm_swiglu_bwd.program.json")
    kernel.write_text(KEPT.read_text())
    kernel.with_name("gemm_swiglu_bwd.report.json").write_text(
        KEPT.with_name("gemm_swiglu_bwd.report.json").read_text()
    )

    def show(*options: str) -> Any:
        spec = ["--spec", str(SPECS / "gemm_swiglu_bwd.yaml")]
        return CliRunner().invoke(app, ["show", str(kernel), *spec, *options])

    data = json.loads(show("--counters", "--json").output)
    assert [c["kernel"] for c in data["counters"]][0] == "Step0" and data["sass"] is None
    assert data["counters"][0]["roofline"]["reads"]["z"] == 369_098_752  # the roofline at the export's case
    assert "hardware counters, gemm_swiglu_bwd.counters.csv, case 1B" in show("--counters").output
    data = json.loads(show("--sass", "--case", "7B", "--json").output)
    assert data["sass"][0]["kernel"] == "Step0_0123456789ab" and data["counters"] is None
    ((source, sizes),) = asked
    assert sizes["D"] == 4096 and source.schedules == tuned_there("7B")
    assert isinstance(show("--counters", "--case", "7B").exception, InvalidInput)
    wrong = show("--case", "8B")
    assert wrong.exit_code == 2 and "has the cases 1B, 7B" in " ".join(wrong.output.split())


def tuned_there(case: str, name: str = "gemm_swiglu_bwd") -> dict[int, Schedule]:
    timings = json.loads(KEPT.with_name(f"{name}.report.json").read_text())["timings"]
    (found,) = (t["schedules"] for t in timings if t["case"] == case)
    return by_step(found)


def test_a_cases_resources_are_those_of_its_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def compiled(source: KernelSource, sizes: dict[str, int], schedules: Any) -> tuple[()]:
        asked.append((sizes["D"], tuple(schedules)))
        return ()

    monkeypatch.setattr("coda_agent.primitives.runtime.compile.report", compiled)
    for options in (["--case", "70B"], []):
        assert CliRunner().invoke(app, ["show", "gemm_swiglu_bwd", *options]).exit_code == 0
    assert asked == [(8192, tuple(tuned_there("70B").values())), (2048, PROBES)]


def test_each_steps_resources_are_on_its_own_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(source: KernelSource, sizes: dict[str, int], schedules: Any) -> tuple[Resources, ...]:
        rows = [(gemm.name, schedule) for gemm in source.lowered.gemms for schedule in schedules]
        return tuple(Resources(name, schedule.to_json(), 0, 0, None, *[0] * 6) for name, schedule in rows)

    monkeypatch.setattr("coda_agent.primitives.runtime.compile.report", compiled)
    said = CliRunner().invoke(app, ["show", "gemm_swiglu_mlp", "--case", "1B", "--json"]).output
    found = [each["schedule"] for each in json.loads(said)["resources"]]
    assert found == [s.to_json() for s in tuned_there("1B", "gemm_swiglu_mlp").values()]


# ── Schedules ─────────────────────────────────────────────────────────────────────────────────────────────

ACCEPTED = Program.from_json(KEPT.read_text(), load(SPECS / "gemm_swiglu_bwd.yaml", check=False).signature())
OTHER = {0: Schedule(tile_m=64, tile_n=64, cluster_m=1, cluster_n=2, evict_loads=True, deep=True)}


@pytest.fixture
def kernel(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an accepted kernel and its report beside the kernel's export; return the path of the kernel."""
    monkeypatch.setattr("coda_agent.primitives.runtime.compile.report", lambda *given, **more: ())
    for suffix in ("program.json", "report.json"):
        there = KEPT.with_name(f"gemm_swiglu_bwd.{suffix}")
        path.with_name(there.name).write_text(there.read_text())
    return path.with_name(KEPT.name)


def counted_on(path: Path, schedules: dict[int, Schedule]) -> None:
    path.write_text(raw(launched(ACCEPTED), counters.heading("gemm_swiglu_bwd", "1B", SIZES, schedules)))


def shown(kernel: Path, *options: str) -> str:
    spec = ["--spec", str(SPECS / "gemm_swiglu_bwd.yaml")]
    found = CliRunner().invoke(app, ["show", str(kernel), *spec, "--counters", *options], terminal_width=200)
    assert found.exit_code == 0, found.output
    return found.output


def test_what_is_counted_says_its_schedules(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``counters.read`` finds program, case and schedules in the line that benchmarks/counters.py prints."""

    class Plan:
        def __init__(self, kernel: KernelSource, sizes: Any):
            self.lowered = kernel.lowered

        def outputs(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr("coda_agent.primitives.runtime.executable.Plan", Plan)
    monkeypatch.setattr("coda_agent.verifier.numerics.inputs.draw", lambda *given, **more: {})
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    command.main(["gemm_swiglu_bwd", "--case", "7B", "--compile-only"])
    path.write_text(raw(launched(ACCEPTED), said=capsys.readouterr().out.strip()))
    export = counters.read(path)
    assert (export.program, export.case) == ("gemm_swiglu_bwd", "7B")
    assert export.schedules == {0: counters.spelled(tuned_there("7B")[0])}
    several = counters.heading("k", "c", {"M": 8}, OTHER | {1: Schedule(split=True)}, "0123")
    path.write_text(raw(launched(ACCEPTED), said=several))
    export = counters.read(path)
    assert export.schedules == {
        0: "64x64 pingpong cluster 1x2 swizzle 8 evict_loads deep",
        1: "128x128 pingpong cluster 2x1 swizzle 8 split",
    }
    assert (export.program, export.case, export.text) == ("k.raw", "c", "0123")


def test_a_schedule_is_spelled_out_whole() -> None:
    others = [
        {name: not value if isinstance(value, bool) else value * 2}
        for name, value in Schedule()._asdict().items()
    ]
    assert len({counters.spelled(Schedule()._replace(**each)) for each in [{}, *others]}) == len(others) + 1


def test_counters_of_another_schedule_than_the_reports_say_so(path: Path, kernel: Path) -> None:
    for schedules, other in ((tuned_there("1B"), False), (OTHER, True)):
        counted_on(path, schedules)
        step, finish = json.loads(shown(kernel, "--json"))["counters"]
        assert step["other_schedule"] is other and step["schedule"] == counters.spelled(schedules[0])
        assert finish["other_schedule"] is None and finish["schedule"] is None  # a finishing kernel has none
        assert ("NOT as in" in " ".join(shown(kernel).split())) is other
    path.write_text(raw(launched(ACCEPTED)))  # as in an older export, which names no schedules
    assert "not in this export" in " ".join(shown(kernel).split())
    assert json.loads(shown(kernel, "--json"))["counters"][0]["other_schedule"] is None


def test_an_author_is_not_given_counters_of_another_schedule(path: Path, kernel: Path) -> None:
    spec = load(SPECS / "gemm_swiglu_bwd.yaml", check=False)
    counted_on(path, tuned_there("1B"))
    told = _counted(spec, KernelSource(ACCEPTED), path.parent)
    assert f"| schedule | {counters.spelled(tuned_there('1B')[0])} | – |" in told
    counted_on(path, OTHER)
    assert _counted(spec, KernelSource(ACCEPTED), path.parent) == ""
    path.write_text(raw(launched(ACCEPTED)))
    told = _counted(spec, KernelSource(ACCEPTED), path.parent)
    assert "| schedule | not in this export; it may differ from the schedule in the report | – |" in told


# ── Edited texts, and the command that counts ─────────────────────────────────────────────────────────────

EDITED = editable(PROGRAM)
TEXT = KernelSource(PROGRAM, edited=EDITED).lowered


def edited_export(text: str = TEXT.hash[:12], module: str = TEXT.module) -> str:
    first, last = TEXT.gemms[0].name, TEXT.vectors[-1].name
    said = f"# gemm_swiglu_bwd.raw at 1B square, text {text}: M 16384, D 2048, F 5632"
    return raw([first, last, first], said).replace("coda_lowered_8a68ed9784a60c16", module)


def test_an_edited_texts_export_is_its_own(path: Path) -> None:
    path.write_text(edited_export())
    export = counters.read(path)
    assert (export.program, export.case) == ("gemm_swiglu_bwd.raw", "1B square")
    step, finish = counters.counters(KernelSource(PROGRAM, edited=EDITED), export, SIZES)
    assert (step.kernel, step.launches, step.other_text) == ("Step0", 2, False)
    assert finish.kernel.startswith("Finish") and finish.launches == 1
    with pytest.raises(InvalidInput, match="measures gemm_swiglu_bwd.raw, not gemm_swiglu_bwd;"):
        counters.counters(KernelSource(PROGRAM), export, SIZES)
    path.write_text(edited_export("0123456789ab"))
    edited = KernelSource(PROGRAM, edited=EDITED)
    assert all(c.other_text for c in counters.counters(edited, counters.read(path), SIZES))
    path.write_text(raw(launched(PROGRAM), said=""))
    with pytest.raises(InvalidInput, match="it has no kernel of this program"):
        counters.counters(KernelSource(PROGRAM, edited=EDITED), counters.read(path), SIZES)


def test_the_command_and_an_author_find_an_edited_texts_export_beside_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load(SPECS / "gemm_swiglu_bwd.yaml", check=False)
    for suffix, text in {
        "raw.py": EDITED,
        "raw.program.json": KEPT.read_text(),
        "raw.counters.csv": edited_export().replace("1B square", "1B"),
    }.items():
        path.with_name(f"gemm_swiglu_bwd.{suffix}").write_text(text)
    monkeypatch.setattr("coda_agent.primitives.runtime.compile.report", lambda *given, **more: ())
    kernel = path.with_name("gemm_swiglu_bwd.raw.py")
    options = ["--spec", str(SPECS / "gemm_swiglu_bwd.yaml"), "--counters", "--json"]
    data = json.loads(CliRunner().invoke(app, ["show", str(kernel), *options]).output)
    assert [c["kernel"] for c in data["counters"]][0] == "Step0"
    path.unlink()  # the export of the program's own text
    assert "Step0, median of 2 launches" in _counted(spec, KernelSource(PROGRAM, edited=EDITED), path.parent)
    assert _counted(spec, KernelSource(PROGRAM), path.parent) == ""


def test_the_filter_takes_the_names_of_kernels_as_they_are_compiled() -> None:
    """The kernel filter for ncu matches the names in the compiled object of an edited text, and the name of
    an unedited kernel."""
    program = BACKWARD.program
    text, sizes, (probe, *_) = editable(program), {dim: 256 for dim in program.signature.dims}, PROBES
    kernel = KernelSource(program, edited=text)
    report(kernel, sizes, (probe,))
    lowered = kernel.lowered
    wanted = Wanted(lowered, lowered.gemms[0], probe, sizes)
    # Search only the names of sections, because they are whole. Elsewhere in the object, the host's compiler
    # may split a name into pieces as wide as this processor's vectors.
    names = set(re.findall(rb"\.text\.(kernel_cutlass_\w+)", wanted.path().read_bytes()))
    assert names and all(re.search(command.OURS.removeprefix("regex:").encode(), name) for name in names)
    export = Export(Path("x"), None, None, tuple((name.decode(), {"a__b": 1.0}) for name in names))
    assert [c.kernel for c in counters.counters(kernel, export, sizes)] == ["Step0"]
    assert re.search(command.OURS.removeprefix("regex:"), mangled("Step0"))


def test_a_metric_that_a_gpu_lacks_is_not_asked_for() -> None:
    lacks = counters.METRICS["tensor"].names[0].partition(".")[0]
    names = [n for m in counters.METRICS.values() for n in m.names] + counters.wanted()
    asked = counters.wanted({name.partition(".")[0] for name in names} - {lacks, "lts__t_sectors_op_read"})
    assert counters.METRICS["tensor"].names[1] in asked and counters.METRICS["tensor"].names[0] not in asked
    assert "lts__t_sectors_op_read.sum" not in asked and "gpu__time_duration.sum" in asked
    assert "launch__grid_size" in counters.wanted({"gpu__time_duration"})
    assert len(counters.wanted({"gpu__time_duration"})) == 3


NCU = """#!/bin/sh
if [ "$1" = --query-metrics ]; then cat {listed}; exit 0; fi
echo "$@" > {asked}
cat {answer}
"""


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake ``ncu`` on the PATH; return its folder. Files in this folder: ``listed`` has the metrics
    that ``ncu`` lists, ``answer`` the output of profiling, and ``asked`` the arguments of profiling."""
    listed = ["Device NVIDIA H100 (GH100)", "Metric Name   Metric Unit   Metric Description"]
    every = [*counters.wanted(), *(name for metric in counters.METRICS.values() for name in metric.names)]
    names = {name.partition(".")[0] for name in every} - {"sm__pipe_tensor_cycles_active"}
    listed += [f"{name}   cycle   # of {name}" for name in sorted(names)]
    listed += [f"sm__other_{n}   cycle   another" for n in range(command.FEWEST)]
    (tmp_path / "listed").write_text("\n".join(listed))
    (tmp_path / "answer").write_text(edited_export())
    script = tmp_path / "ncu"
    files = {name: tmp_path / name for name in ("listed", "asked", "answer")}
    script.write_text(NCU.format(**files))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def test_profiling_compiles_first_and_names_the_export(ncu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[list[str]] = []
    run = command._said

    def heard(given: list[str]) -> str:
        said.append(given)
        return "" if "--compile-only" in given else run(given)

    monkeypatch.setattr(command, "_said", heard)
    text = ncu / "gemm_swiglu_bwd.raw.py"
    command.main(["gemm_swiglu_bwd", "--ncu", "--case", "1B", "--raw", str(text)])
    first, second = said
    assert "--compile-only" in first and second[0] == str(ncu / "ncu")
    # ncu runs the same command as the first call, but without the last option, --compile-only.
    assert second[-len(first) + 1 :] == first[:-1]
    asked = (ncu / "asked").read_text()
    assert "-k regex:coda_(lowered|edited)" in asked and "sm__pipe_tensor_cycles_active" not in asked
    assert counters.METRICS["tensor"].names[1] in asked
    assert counters.read(ncu / "gemm_swiglu_bwd.raw.counters.csv").program == "gemm_swiglu_bwd.raw"
    (ncu / "answer").write_text("==ERROR== ERR_NVGPUCTRPERM")
    with pytest.raises(SystemExit, match="ncu profiled no kernel; its output: ==ERROR== ERR_NVGPUCTRPERM"):
        command.main(["gemm_swiglu_bwd", "--ncu", "--raw", str(text)])


def test_what_ncu_lists_is_read_and_silence_asks_for_all(
    ncu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main(["--metrics"])
    asked = capsys.readouterr().out.strip().split(",")
    assert "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active" not in asked
    (ncu / "listed").write_text("==ERROR== no device\n")
    command.main(["--metrics"])
    assert capsys.readouterr().out.strip().split(",") == counters.wanted()


def test_profiling_what_does_not_compile_says_why(ncu: Path) -> None:
    with pytest.raises(SystemExit, match=r"no_kernel\.program\.json: no such kernel"):
        command.main(["no_kernel", "--ncu"])
    assert not (ncu / "asked").exists()


def test_the_schedules_of_a_report_beside_the_kernel(tmp_path: Path) -> None:
    program = ACCEPTED
    assert show.report_schedules(KEPT, program, "7B") == tuned_there("7B")
    assert show.report_schedules(KEPT, program, "of no such case") == {}
    assert show.report_schedules(KEPT, two_steps(), "7B") == {}  # the report is for another program
    assert show.report_schedules(tmp_path / KEPT.name, program, "7B") == {}  # the folder has no report
    (tmp_path / "gemm_swiglu_bwd.report.json").write_text("{}")
    with pytest.raises(KernelError, match=r"gemm_swiglu_bwd\.report\.json: .*accept that kernel again"):
        show.report_schedules(tmp_path / KEPT.name, program, "7B")
