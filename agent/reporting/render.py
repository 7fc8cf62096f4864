"""Render a report for the terminal: tables of gates and measurements, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coda_agent.verifier.report import (
    GATES,
    PRIMITIVE_GATES,
    RAW_GATES,
    Accepted,
    Checked,
    Config,
    Finalists,
    Gate,
    Identity,
    Ratio,
    Rejected,
    Report,
    Timing,
)

if TYPE_CHECKING:
    from coda_agent.agent.run.loop import Outcome


def gates(report: Report) -> Table:
    """A table of all gates, with the time and the figures of each gate."""
    table = Table(title="Gates", title_justify="left")
    for heading in ("gate", "result", "seconds", "figures"):
        table.add_column(heading, justify="right" if heading == "seconds" else "left")
    for gate in report.gates:
        findings = Text("".join(f"\n{finding}" for finding in gate.findings), "yellow")
        words = Text(figures(gate)).append_text(findings)
        table.add_row(gate.gate, Text("passed", "green"), f"{gate.seconds:.2f}", words)
    if isinstance(report, Rejected):
        table.add_row(report.gate, Text("rejected", "red"), "", report.code)
    if isinstance(report, Checked):
        for name in not_run(report):
            table.add_row(name, Text("not run", "dim"), "", Text("needs an H100", "dim"))
    return table


def not_run(report: Checked) -> list[str]:
    """The gates that a checked kernel, edit or primitive has not yet run."""
    passed = {gate.gate for gate in report.gates}
    every = PRIMITIVE_GATES if "form" in passed else RAW_GATES if report.identity.raw else GATES
    return [name for name in every if name not in passed]


def figures(gate: Gate) -> str:
    """The figures of a gate in one or two lines. If another version of coda-agent wrote the figures in an
    unknown form, the result is their JSON."""
    try:
        return _FIGURES[gate.gate](gate.figures)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return json.dumps(gate.figures)


def _pairs(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items())


def _choices(interpreted: dict[str, Any]) -> str:
    """Text about each choice between values (such as relu or maximum). For each side of the choice, the text
    shows the percentage of elements that took the value of this side. It is the largest percentage over all
    inputs that the gate tried."""
    return "".join(
        f"; {choice['op']} decides " + " and ".join(f"{side['share']:.1%}" for side in choice["sides"])
        for choice in interpreted.get("choices", ())  # older reports have no choices
    )


def _kernel(kernel: dict[str, Any]) -> str:
    shape = (
        f"{kernel['tile']} {'pingpong' if kernel['pingpong'] else 'cooperative'}"
        if kernel["tile"]
        else "vectors"
    )
    shape += "".join(f", {dim} = {size}" for dim, size in kernel.get("static", {}).items())
    return (
        f"{shape}: {kernel['registers']} registers, {kernel['spill_loads']} spills, {kernel['hgmma']} HGMMA"
    )


_FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "edit": lambda f: f"{f['lines']} lines of raw CuTeDSL",
    "form": lambda f: f"{f['lines']} lines of device functions",
    "trace": lambda f: f"{f['nodes']} nodes; jailed {f['milliseconds']:.0f} ms: {', '.join(f['layers'])}",
    "contract": lambda f: f"{f['steps']} step(s), {f['vector_kernels']} vector kernel(s)",
    "interpret": lambda f: "RMS error / yardstick: " + _pairs(f["worst_rms_ratio"]) + _choices(f),
    "compile": lambda f: "; ".join(_kernel(k) for k in f["kernels"]),
    "numerics": lambda f: (
        "RMS error / yardstick: "
        + "; ".join(
            f"{case}: " + _pairs({n: e["rms_ratio"] for n, e in got["outputs"].items()})
            for case, got in f.items()
        )
    ),
    "stability": lambda f: f"repeats bitwise equal, guards and inputs untouched: {', '.join(f)}",
    "benchmark": lambda f: "see timings",
    "decision": lambda f: (
        _pairs({c: r["low"] for c, r in f["speedup"].items()})
        + f" (lower bounds) over {f['baseline']}, must exceed {f['threshold']}"
    ),
}


def timings(rows: tuple[Timing, ...]) -> Table:
    """A table with one row per measured case. A row has the candidate's time. For each other arm, it has that
    arm's time divided by the candidate's time, with a confidence interval."""
    table = Table(
        title="Timings (ratios: arm / candidate, above 1 the candidate is faster)", title_justify="left"
    )
    for heading in ("case", "candidate ms", "in a graph", "roofline ms", "host us", "sees"):
        table.add_column(heading, justify="right" if heading != "case" else "left")
    arms = list(dict.fromkeys(arm for t in rows for arm in t.ratios))
    for arm in arms:
        table.add_column(arm, justify="right")
    for t in rows:
        cells = [interval(t.ratios.get(arm)) for arm in arms]
        table.add_row(
            t.case,
            f"{t.milliseconds['candidate']:.3f}",
            f"{t.graph_milliseconds:.3f}" if t.graph_milliseconds else "",
            f"{t.roofline_milliseconds:.3f}",
            f"{t.host_microseconds['candidate']:.0f}",
            _sees(t),
            *cells,
        )
    return table


def interval(ratio: Ratio | None) -> str:
    """Format a ratio with its confidence interval; empty if the ratio is None."""
    return f"{ratio.estimate:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]" if ratio else ""


def rivals(rows: tuple[Timing, ...]) -> list[str]:
    """One line per case in which QuACK was measured, with the schedules of QuACK's arms."""
    return [
        f"{t.case}: " + "; ".join(f"{arm} {_stages(stages)}" for arm, stages in t.quack.items())
        for t in rows
        if t.quack
    ]


def _stages(stages: Finalists) -> str:
    return ", then ".join(_config(first) for first, *_ in stages)


def _config(config: Config) -> str:
    tile_m, tile_n, cluster_m, cluster_n, group = (
        config.get(name) for name in ("tile_m", "tile_n", "cluster_m", "cluster_n", "max_swizzle_size")
    )
    kind = "pingpong" if config.get("pingpong") else "cooperative"
    swapped = ", operands swapped" if config.get("swap_ab") else ""
    return f"{tile_m}x{tile_n} {kind}, cluster {cluster_m}x{cluster_n}, group {group}{swapped}"


def _sees(t: Timing) -> str:
    """Return the least difference in speed that the measurement could detect for each of its arms, as
    text."""
    least = [r.detectable for r in t.ratios.values() if r.detectable is not None]
    return f"{max(least):.1%}" if least else ""


def summary(report: Report) -> Text:
    """The verdict in one line."""
    if isinstance(report, Accepted):
        return Text(f"accepted: {_identity(report.identity)}", "bold green")
    if isinstance(report, Checked):
        return Text(f"{report.unmeasured} ({_identity(report.identity)})", "bold cyan")
    return Text(f"rejected at {report.gate}: {report.code}", "bold red")


def _identity(identity: Identity) -> str:
    mark = f", raw CuTeDSL {identity.lowered_hash[:12]}" if identity.raw else ""
    return f"{identity.spec}, program {identity.program_hash[:12]}{mark}"


def credits(outcome: Outcome) -> str:
    """A line with a kernel's author, run, number of attempts, and numbers of tokens."""
    a, u = outcome.authorship, outcome.usage
    spent = (
        f"tokens {u.given:,} in ({u.cache_read_tokens / u.given:.0%} from the cache), {u.output_tokens:,} out"
        if u.given
        else "tokens not counted"
    )
    return f"written by {a.author} in {a.attempts} attempt(s), run {a.run}; {spent}"


def show(console: Console, report: Report) -> None:
    """Print the whole report."""
    console.print(gates(report))
    if isinstance(report, Accepted):
        console.print(timings(report.timings))
        for line in rivals(report.timings):
            console.print(line, style="dim")
    if isinstance(report, Rejected):
        console.print(Text(f"{report.place}{report.message}"))
    console.print(summary(report))
