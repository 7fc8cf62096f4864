"""Ways to tamper with the evidence of the accepted kernel toy, and the problem that must be reported for
each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.verifier.audit.provenance import problems
from coda_agent.verifier.decision import central, compared
from coda_agent.verifier.report import PROTOCOL


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def edit(kernels: Path, change: Callable[[Any], object]) -> None:
    path = kernels / "toy.report.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def found(kernels: Path) -> list[str]:
    return problems("toy", kernels, kernels)


def pin(kernels: Path) -> None:
    """Add a schedule to the program, and put the new program's hash into the report."""
    path = kernels / "toy.program.json"
    program = Program.from_json(path.read_text())._replace(schedule={0: Schedule(128, 32, False)})
    path.write_text(program.to_json())
    edit(kernels, lambda r: r["identity"].update(program_hash=program.hash))


def rerate(report: Any) -> None:
    """Update the medians, the ratios, and the numbers of processes and rounds to match the samples."""
    for t in report["timings"]:
        own = t["samples"]["candidate"]
        t["milliseconds"] = {arm: round(central(rows), 5) for arm, rows in t["samples"].items()}
        t["ratios"] = {arm: compared(t["samples"][arm], own).model_dump() for arm in t["ratios"]}
        t["processes"], t["rounds"] = len(own), len(own[0])


def resample(report: Any, change: Callable[[str, Any], Any]) -> None:
    """Replace the samples of each arm, and update all fields that are computed from the samples."""
    for t in report["timings"]:
        t["samples"] = {arm: change(arm, rows) for arm, rows in t["samples"].items()}
    rerate(report)


def faster(arm: str, rows: Any) -> Any:
    """Divide the candidate's times by 100. No H100 could be that fast."""
    return [[x / 100 if arm == "candidate" else x for x in row] for row in rows]


def one_faster(arm: str, rows: Any) -> Any:
    """Give one process of the candidate a time that no H100 could reach. The mean over processes hides this
    time."""
    return [*rows[:2], [0.1] * len(rows[2])] if arm == "candidate" else rows


def without(report: Any, arm: str) -> None:
    for t in report["timings"]:
        for told in ("samples", "milliseconds", "ratios"):
            del t[told][arm]


def replaced(report: Any, times: int) -> None:
    """Record that the first process was replaced ``times`` times, each time for a fault."""
    worse = report["controls"][0] | {"faults": ["a kernel timed against itself gave 1.2"]}
    report["controls"][:0] = [worse] * times


def itself(report: Any, **changes: float) -> None:
    figures(report, "benchmark")["against_itself"].update(changes)


CONTROLLED = "score/1/large/controlled.0"


def seen(report: Any, piece: str) -> Any:
    return report["conditions"]["during"][piece]


def figures(report: Any, gate: str) -> Any:
    return next(g["figures"] for g in report["gates"] if g["gate"] == gate)


TAMPERED: dict[str, tuple[Callable[[Path], object], str]] = {
    "source, the result": (
        lambda k: replace(k / "toy.py", "gemm(a, b) *", "2 * gemm(a, b) *"),
        "toy.py does not trace to toy.program.json",
    ),
    "source, the language": (
        lambda k: replace(k / "toy.py", "@kernel", "import os\n@kernel"),
        "toy.py:4: rejected (language)",
    ),
    "program": (
        lambda k: replace(k / "toy.program.json", '"multiply"', '"add"'),
        "toy.py does not trace to toy.program.json",
    ),
    "program, malformed": (
        lambda k: replace(k / "toy.program.json", '"multiply"', '"shell"'),
        "toy.program.json is not a program of toy: node",
    ),
    "text": (
        lambda k: replace(k / "toy.cutedsl.py", "\n", "\n# harmless\n"),
        "toy.program.json lowers to another text than toy.cutedsl.py",
    ),
    "text, its line ends": (
        lambda k: (k / "toy.cutedsl.py").write_bytes(
            (k / "toy.cutedsl.py").read_bytes().replace(b"\n", b"\r\n")
        ),
        "lowers to another text",
    ),
    "spec, its mathematics": (
        lambda k: replace(k / "toy.yaml", "c = (a @ b) * v", "c = 2 * (a @ b) * v"),
        "the report is for spec hash",
    ),
    "spec, its sizes": (
        lambda k: replace(k / "toy.yaml", "M: 2048", "M: 4096"),
        "case wide was measured at {'M': 2048, 'K': 4096, 'N': 8192}, not at {'M': 4096",
    ),
    "spec, its threshold": (
        lambda k: replace(k / "toy.yaml", "speedup: 1.1", "speedup: 1.25"),
        "decided again, it is rejected: case large: 1.300x torch.compile [1.250, 1.352], but the lower bound",
    ),
    "spec, another case": (
        lambda k: replace(
            k / "toy.yaml", "  - {name: wide", "  - {name: huge, M: 8192, K: 8, N: 8}\n  - {name: wide"
        ),
        "the report has 0 timings of case huge, not one",
    ),
    "spec, a typing error": (
        lambda k: replace(k / "toy.yaml", "bf16", "bfloat"),
        "toy.yaml:5: dtype 'bfloat'",
    ),
    "report of another spec": (
        lambda k: edit(k, lambda r: r["identity"].update(spec="other")),
        "the report is for spec other, but here it is toy",
    ),
    "report of another spec hash": (
        lambda k: edit(k, lambda r: r["identity"].update(spec_hash="0" * 64)),
        "the report is for spec hash 0000",
    ),
    "report of another program": (
        lambda k: edit(k, lambda r: r["identity"].update(program_hash="0" * 64)),
        "the report is for program hash 0000",
    ),
    "report of another text": (
        lambda k: edit(k, lambda r: r["identity"].update(lowered_hash="0" * 64)),
        "install the versions it was made with (nvidia-cutlass-dsl ",
    ),
    "report, no author": (lambda k: edit(k, lambda r: r.update(authorship=None)), "names no author"),
    "report, a blank author": (
        lambda k: edit(k, lambda r: r["authorship"].update(author=" ")),
        "names no author",
    ),
    "report, no stretched inputs": (
        lambda k: edit(k, lambda r: figures(r, "numerics")["hidden"].pop("beyond")),
        "gate numerics has no figures of stretched inputs for case hidden",
    ),
    "report, far off on stretched inputs": (
        lambda k: edit(k, lambda r: figures(r, "numerics")["hidden"]["beyond"]["c"].update(rms_ratio=1e9)),
        "output 'c' has a rms_ratio of 1000000000.0, over",
    ),
    "report, a control beyond all bounds": (
        lambda k: edit(k, lambda r: r["controls"][0]["same"].update(estimate=1e300)),
        "not a ratio of two times",
    ),
    "report, a case left out": (
        lambda k: edit(k, lambda r: r["timings"].pop()),
        "the report has 0 timings of case wide, not one",
    ),
    "report, a case twice": (
        lambda k: edit(k, lambda r: r["timings"].append(r["timings"][0])),
        "the report has 2 timings of case large, not one",
    ),
    "report, another ratio": (
        lambda k: edit(k, lambda r: r["timings"][1]["ratios"]["torch.compile"].update(low=1.2501)),
        "case wide: its ratio to torch.compile does not follow from its samples",
    ),
    "report, not a number": (
        lambda k: edit(k, lambda r: r["timings"][1]["ratios"]["torch.compile"].update(low=float("nan"))),
        "toy.report.json is not a report of an accepted kernel: timings.1.ratios.torch.compile.low",
    ),
    "report, faster samples": (
        lambda k: edit(k, lambda r: r["timings"][1]["samples"].update(candidate=[[1.0] * 8] * 3)),
        "case wide: its ratio to torch.compile does not follow from its samples",
    ),
    "report, samples below the roofline": (
        lambda k: edit(k, lambda r: resample(r, faster)),
        "decided again, it is invalid: case large: process 0: 0.02 ms is less than the",
    ),
    "report, one process below the roofline": (
        lambda k: edit(k, lambda r: resample(r, one_faster)),
        "decided again, it is invalid: case large: process 2: 0.1 ms is less than the",
    ),
    "report, a graph below the roofline": (
        lambda k: edit(k, lambda r: r["timings"][0].update(graph_milliseconds=0.02)),
        "decided again, it is invalid: case large: in a CUDA graph: 0.02 ms is less than the",
    ),
    "report, no graph": (
        lambda k: edit(k, lambda r: r["timings"][0].update(graph_milliseconds=None)),
        "case large was not measured in a CUDA graph: measure again",
    ),
    "report, another roofline": (
        lambda k: edit(k, lambda r: r["timings"][1].update(roofline_milliseconds=0.2)),
        "case wide says a roofline of 0.2 ms, the program's is 0.13891: measure again",
    ),
    "report, no cuBLAS": (
        lambda k: edit(k, lambda r: without(r, "cuBLAS matmul")),
        "case large was not measured against cuBLAS matmul: measure again",
    ),
    "report, no QuACK": (
        lambda k: edit(k, lambda r: without(r, "QuACK matmul")),
        "case wide was not measured against QuACK matmul: measure again",
    ),
    "report, one set of inputs": (
        lambda k: edit(k, lambda r: r["timings"][1].update(input_sets=1)),
        "case wide was measured on 1 set(s) of inputs; it needs at least 2: measure again",
    ),
    "report, a sample of no time": (
        lambda k: edit(k, lambda r: r["timings"][1]["samples"]["candidate"][0].__setitem__(0, 0.0)),
        "toy.report.json is not a report of an accepted kernel: timings.1.samples.candidate.0.0",
    ),
    "report, slow samples": (
        lambda k: edit(k, lambda r: resample(r, lambda arm, rows: [[2.0] * len(row) for row in rows])),
        "decided again, it is rejected: case large: 1.000x torch.compile",
    ),
    "report, one process": (
        lambda k: edit(k, lambda r: resample(r, lambda arm, rows: rows[:1])),
        "case large says 1 process(es) and has samples of 1; it needs at least 3: measure again",
    ),
    "report, two processes": (
        lambda k: edit(k, lambda r: resample(r, lambda arm, rows: rows[:2])),
        "case large says 2 process(es) and has samples of 2; it needs at least 3: measure again",
    ),
    "report, more processes than sampled": (
        lambda k: edit(k, lambda r: r["timings"][1].update(processes=5)),
        "case wide says 5 process(es) and has samples of 3",
    ),
    "report, eight rounds": (
        lambda k: edit(k, lambda r: resample(r, lambda arm, rows: [row[:8] for row in rows])),
        "case large says 8 rounds and has 8; it needs at least 12 a process",
    ),
    "report, more rounds than sampled": (
        lambda k: edit(k, lambda r: r["timings"][1].update(rounds=40)),
        "case wide says 40 rounds and has 12",
    ),
    "report, an arm of fewer rounds": (
        lambda k: edit(k, lambda r: r["timings"][1]["samples"]["cuBLAS matmul"][1].pop()),
        "case wide: its samples of cuBLAS matmul and of the candidate differ in rounds",
    ),
    "report, a warm L2": (
        lambda k: edit(k, lambda r: r["timings"][1].update(cold=False)),
        "case wide was measured from a warm L2",
    ),
    "report, another arm's ratio": (
        lambda k: edit(k, lambda r: r["timings"][1]["ratios"]["cuBLAS matmul"].update(estimate=9.0, low=8.9)),
        "case wide: its ratio to cuBLAS matmul does not follow from its samples",
    ),
    "report, a ratio of no arm": (
        lambda k: edit(
            k, lambda r: r["timings"][1]["ratios"].update(eager={"estimate": 9, "low": 8, "high": 9})
        ),
        "case wide: its ratio to eager does not follow from its samples",
    ),
    "report, another median": (
        lambda k: edit(k, lambda r: r["timings"][1]["milliseconds"].update(candidate=0.001)),
        "case wide: its time of candidate is not its samples' median",
    ),
    "report, another arm's median": (
        lambda k: edit(k, lambda r: r["timings"][1]["milliseconds"].update({"cuBLAS matmul": 0.001})),
        "case wide: its time of cuBLAS matmul is not its samples' median",
    ),
    "report, a case of nobody's": (
        lambda k: edit(k, lambda r: r["timings"].append(r["timings"][0] | {"case": "small"})),
        "the report has a timing of case small, which the spec does not measure",
    ),
    "report, another decision": (
        lambda k: edit(k, lambda r: figures(r, "decision")["speedup"]["wide"].update(estimate=9.0)),
        "gate decision has other figures than its timings give",
    ),
    "report, no controls": (
        lambda k: edit(k, lambda r: r.update(controls=[])),
        "toy: the controls are not those of 3 processes",
    ),
    "report, a process without controls": (
        lambda k: edit(k, lambda r: r["controls"].pop()),
        "toy: the controls are not those of 3 processes",
    ),
    "report, controls with faults": (
        lambda k: edit(k, lambda r: r["controls"][1].update(faults=["a kernel against itself: 1.2"])),
        "process 1's controls have faults: a kernel against itself: 1.2",
    ),
    "report, controls that hide their faults": (
        lambda k: edit(k, lambda r: r["controls"][2]["same"].update(estimate=1.2)),
        "process 2's controls have faults: a kernel timed against itself gave 1.2000",
    ),
    "report, a process replaced for no fault": (
        lambda k: edit(k, lambda r: r["controls"].insert(1, r["controls"][0] | {"attempt": 1})),
        "process 0 was replaced 1 times, once without a fault, or too often",
    ),
    "report, a process replaced too often": (
        lambda k: edit(k, lambda r: replaced(r, 3)),
        "process 0 was replaced 3 times, once without a fault, or too often",
    ),
    "report, controls that do not say their process": (
        lambda k: edit(k, lambda r: r["controls"][2].pop("process")),
        "toy: the controls are invalid: 2.process: Field required: measure again",
    ),
    "report, a control's interval beside its estimate": (
        lambda k: edit(k, lambda r: r["controls"][2]["planted"].update(low=1.03)),
        "process 2's controls have an interval that is not around its estimate: measure again",
    ),
    "report, a control's interval the wrong way": (
        lambda k: edit(k, lambda r: r["controls"][1]["same"].update(low=3.0, high=-1.0)),
        "process 1's controls have an interval that is not around its estimate: measure again",
    ),
    "report, a control's interval of neither method": (
        lambda k: edit(k, lambda r: r["controls"][1]["same"].update(high=1.5)),
        "process 1's controls have an interval that is not around its estimate: measure again",
    ),
    "report, not against itself": (
        lambda k: edit(k, lambda r: figures(r, "benchmark").clear()),
        "gate benchmark does not say how the kernel did against itself: ",
    ),
    "report, another against itself": (
        lambda k: edit(k, lambda r: itself(r, estimate=1.0005)),
        "1.0005 [0.999, 1.001] of the kernel against itself, but its processes' controls give 1.0",
    ),
    "report, an interval beside itself": (
        lambda k: edit(k, lambda r: itself(r, low=1.0001)),
        "gate benchmark says 1.0 [1.0001, 1.001] of the kernel against itself",
    ),
    "report, against itself no number": (
        lambda k: edit(k, lambda r: itself(r, estimate=float("nan"))),
        "gate benchmark does not say how the kernel did against itself: estimate",
    ),
    "report, more detectable against itself": (
        lambda k: edit(k, lambda r: itself(r, detectable=0.001)),
        "gate benchmark says 1.0 [0.999, 1.001] of the kernel against itself",
    ),
    "report, a control that is no ratio": (
        lambda k: edit(k, lambda r: r["controls"][0]["same"].update(estimate=0.0)),
        "the controls of a kernel against itself are not ratios: measure again",
    ),
    "report, nothing read": (
        lambda k: edit(k, lambda r: r["conditions"]["during"].update({"score/1/wide": {}})),
        "clocks and power are not known during score/1/wide: nothing was read: measure again",
    ),
    "report, no power": (
        lambda k: edit(k, lambda r: seen(r, "score/1/wide").update(power_w="unavailable: Not Supported")),
        "clocks and power are not known during score/1/wide: power_w unavailable: Not Supported: measure",
    ),
    "report, no NVML": (
        lambda k: edit(k, lambda r: r["conditions"]["during"].update({CONTROLLED: {"nvml": "unavailable"}})),
        f"clocks and power are not known during {CONTROLLED}: NVML unavailable: measure again",
    ),
    "report, read in other rounds": (
        lambda k: edit(k, lambda r: seen(r, "score/1/wide").update(readings=40)),
        "clocks and power are not known during score/1/wide: they were read 40 times in 12 rounds: measure",
    ),
    "report, pieces by name alone": (
        lambda k: edit(k, lambda r: r["conditions"].update(during=list(r["conditions"]["during"]))),
        "the report lacks the GPU's state during score/0/wide: measure again",
    ),
    "report, a process of nobody's": (
        lambda k: edit(k, lambda r: r["controls"].append(r["controls"][0] | {"process": 3})),
        "toy: the controls are not those of 3 processes",
    ),
    "report, a planted delay not found": (
        lambda k: edit(k, lambda r: r["controls"][0]["planted"].update(low=0.99)),
        "process 0's controls have faults: a planted delay of 2% was measured as",
    ),
    "report, empty controls": (
        lambda k: edit(k, lambda r: r["controls"][0].pop("case")),
        "toy: the controls are invalid: 0.case: Field required",
    ),
    "report, controls of no measured case": (
        lambda k: edit(k, lambda r: r["controls"][0].update(case="ragged")),
        "the controls of process 0 belong to no measured case",
    ),
    "report, controls by themselves": (
        lambda k: edit(k, lambda r: r["conditions"]["during"].pop("score/2/large/controlled.0")),
        "the report lacks the GPU's state during score/2/large",
    ),
    "report, a process that did not score": (
        lambda k: edit(k, lambda r: r["conditions"]["during"].pop("score/1/wide")),
        "the report lacks the GPU's state during score/1/wide",
    ),
    "report, another GPU": (
        lambda k: edit(k, lambda r: r["conditions"].update(gpu="NVIDIA GeForce GTX 1050")),
        "toy: it was measured on NVIDIA GeForce GTX 1050, not on an H100",
    ),
    "report, no GPU": (
        lambda k: edit(k, lambda r: r["conditions"].pop("gpu")),
        "toy: it was measured on a GPU without a name, not on an H100",
    ),
    "report, no hidden sizes": (
        lambda k: edit(k, lambda r: figures(r, "numerics").pop("hidden")),
        "gate numerics has no figures for case hidden",
    ),
    "report, no single row": (
        lambda k: edit(k, lambda r: figures(r, "stability").pop("hidden, one row")),
        "gate stability has no figures for case hidden, one row",
    ),
    "report, hidden sizes of no seed": (
        lambda k: edit(k, lambda r: r["seeds"].pop("hidden/hidden")),
        "the report has no seed of sizes hidden",
    ),
    "report, emptied numerics": (
        lambda k: edit(k, lambda r: figures(r, "numerics").update(large={})),
        "gate numerics has no figures for case large: outputs: Field required",
    ),
    "report, emptied stability": (
        lambda k: edit(k, lambda r: figures(r, "stability").update(large={})),
        "gate stability has no figures for case large: repeats: Field required",
    ),
    "report, no outputs": (
        lambda k: edit(k, lambda r: figures(r, "numerics")["large"].update(outputs={})),
        "gate numerics has figures of other outputs than the spec's for case large",
    ),
    "report, a family left out": (
        lambda k: edit(k, lambda r: figures(r, "numerics")["ragged"]["families"].pop()),
        "faint, loud, mixed of inputs, not on normal, positive",
    ),
    "report, few repeats": (
        lambda k: edit(k, lambda r: figures(r, "stability")["ragged"].update(repeats=8)),
        "gate stability repeated case ragged 8 times on 2 choices of schedules, not 20 times on 2",
    ),
    "report, repeats on fewer schedules": (
        lambda k: edit(k, lambda r: figures(r, "stability")["ragged"].update(plans=1)),
        "gate stability repeated case ragged 20 times on 1 choices of schedules, not 20 times on 2",
    ),
    **{
        f"report, {statistic} of 99": (
            lambda k, s=statistic: edit(  # type: ignore[misc]
                k, lambda r: figures(r, "numerics")["wide"]["outputs"]["c"].update({s: 99.0})
            ),
            f"case wide: output 'c' has a {statistic} of 99.0, over {limit}",
        )
        for statistic, limit in {"rms_ratio": 1.251, "tile_ratio": 1.547, "element_ratio": 2.002}.items()
    },
    "report, an error a little over the limit": (
        lambda k: edit(k, lambda r: figures(r, "numerics")["wide"]["outputs"]["c"].update(rms_ratio=1.26)),
        "case wide: output 'c' has a rms_ratio of 1.26, over 1.251",
    ),
    "report, no number": (
        lambda k: edit(k, lambda r: figures(r, "numerics")["wide"]["outputs"]["c"].update(rms_ratio=None)),
        "gate numerics has no figures for case wide: outputs.c.rms_ratio: Input should be a valid number",
    ),
    "report, no protocol": (
        lambda k: edit(k, lambda r: r.update(protocol=0)),
        f"the report says no protocol; this version knows {PROTOCOL}: measure again, or update",
    ),
    "report, a step without a schedule": (
        lambda k: edit(k, lambda r: r["timings"][1]["schedules"].clear()),
        "case wide: it does not have one schedule per step: measure again",
    ),
    "report, a schedule that is none": (
        lambda k: edit(k, lambda r: r["timings"][1]["schedules"].update({"0": {"tile_m": 64}})),
        "case wide: it does not have one schedule per step: measure again",
    ),
    "report, a kernel before on a schedule that is none": (
        lambda k: edit(k, lambda r: r["timings"][1].update(kept_schedules={"0": {"foo": 1}})),
        "case wide: it does not have one schedule per step: measure again",
    ),
    "report, a day that is none": (
        lambda k: edit(k, lambda r: r.update(date="yesterday")),
        "date: 'yesterday' is not a time with a zone, such as 2026-11-22T03:05:37+00:00",
    ),
    "report, a day without its zone": (
        lambda k: edit(k, lambda r: r.update(date="1970-01-01")),
        "date: '1970-01-01' is not a time with a zone, such as 2026-11-22T03:05:37+00:00",
    ),
    "report, a protocol to come": (
        lambda k: edit(k, lambda r: r.update(protocol=PROTOCOL + 1)),
        f"the report is of protocol {PROTOCOL + 1}; this version knows {PROTOCOL}: measure again, or update",
    ),
    "report, no samples": (
        lambda k: edit(k, lambda r: r["timings"][1]["samples"].clear()),
        "case wide: its ratio to torch.compile does not follow from its samples",
    ),
    "report, no baseline": (
        lambda k: edit(k, lambda r: r["timings"][0]["ratios"].pop("torch.compile")),
        "case large was not measured against torch.compile",
    ),
    "report, a gate left out": (
        lambda k: edit(k, lambda r: r["gates"].pop(4)),
        "the report has no gate numerics",
    ),
    "report, a ragged case unchecked": (
        lambda k: edit(k, lambda r: r["gates"][4]["figures"].pop("ragged")),
        "gate numerics has no figures for case ragged",
    ),
    "report, only checked": (
        lambda k: edit(k, lambda r: r.update(status="checked")),
        "toy.report.json is not a report of an accepted kernel: status",
    ),
    "report, malformed": (
        lambda k: (k / "toy.report.json").write_text("{"),
        "toy.report.json is not a report of an accepted kernel",
    ),
    "program, another schedule than was timed": (pin, "step 0 did not run on the program's schedule"),
    "spec, removed": (lambda k: (k / "toy.yaml").unlink(), "toy.yaml: no such file"),
    **{
        f"{suffix}, removed": (lambda k, s=suffix: (k / f"toy.{s}").unlink(), f"toy.{suffix}")  # type: ignore[misc]
        for suffix in ("py", "program.json", "cutedsl.py", "report.json")
    },
}
