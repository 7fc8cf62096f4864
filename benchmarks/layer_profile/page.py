"""Draw a profile: a Markdown page with tables, and a chart for each width."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.layer_profile.ledger import (
    ATTENTION,
    DATA,
    GAPS,
    GROUPS,
    MEMORY,
    PASSES,
    TENSOR,
    UNKNOWN,
    WEIGHTS,
    BackwardPart,
    groups,
    peak,
    rows,
)
from coda_agent.agent.reporting.charts import image, styled
from coda_agent.comparison.competitors import PROGRAM
from coda_agent.primitives.system.files import write_atomic
from coda_agent.primitives.system.markdown_table import NONE, markdown_table
from coda_agent.verifier.statistics import MIN_ROUNDS, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    ATTENTION: "#0072B2",
    WEIGHTS: "#E69F00",
    DATA: "#D55E00",
    UNKNOWN: "#999999",
    PASSES: "#009E73",
    GAPS: "#FFFFFF",
}
LABELLED = 0.025  # fraction of the longest backward; narrower bars have no label


def write(found: Mapping[str, Any], out: Path) -> list[Path]:
    """Write the page to ``out``, and its charts to the folder ``images`` next to the page. If the page's
    folder contains ``PAGE.reading.md``, the text of that file follows the page's introduction."""
    reading = out.with_suffix(".reading.md")
    hand = reading.read_text(encoding="utf-8").strip() if reading.exists() else ""
    charts = {}
    for name, entry in found["widths"].items():
        if entry.get("backward"):
            file = f"{out.stem}_{re.sub(r'[^0-9A-Za-z]+', '_', name)}.svg"
            charts[name] = out.parent / "images" / file
            charts[name].parent.mkdir(parents=True, exist_ok=True)
            write_atomic(charts[name], chart(name, entry))
    parts = [_head(found), *([hand] if hand else [])]
    parts += [_width(name, entry, charts.get(name)) for name, entry in found["widths"].items()]
    write_atomic(out, "\n\n".join(parts) + "\n")
    return [out, *charts.values()]


def _head(found: Mapping[str, Any]) -> str:
    at, versions = found["conditions"], found["versions"]
    made = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"""# The layer's backward, kernel by kernel

{at.get("gpu", "unknown GPU")}, driver {at.get("driver", "unknown")}, {made}, {found["date"][:10]}.
Drawn by `python -m benchmarks.layer_profile draw` from what `measure` wrote.

There are two arms. "{PROGRAM}" is the layer in this project's kernels; the tables use the names in
`benchmarks/by_hand/layer.py`. The other arm is the plain layer under `torch.compile`. Both use PyTorch's
attention.

The time of a kernel is its mean over the steps of one profile (torch.profiler, CUDA activities only), in
which the arms take turns. The forward runs just before each backward, so the L2 is not cold. A kernel's
*bound* is the larger of two times: its FLOPs at {TENSOR / 1e12:.0f} TFLOP/s, and its bytes at
{MEMORY / 1e12:.1f} TB/s. The bytes count each operand and output once; for a Triton kernel they count its
tensor arguments. A *gap* is time in which no kernel runs; if it is negative, kernels overlap."""


def _width(name: str, entry: Mapping[str, Any], picture: Path | None) -> str:
    parts = [f"## {name}"]
    parts += [f"Not measured, {stage}: {why}" for stage, why in entry["failed"].items()]
    for arm, losses in entry.get("agreement", {}).items():
        worst = max(losses, key=lambda name: losses[name])
        parts.append(f"{worst} of {arm} differs most from {PROGRAM}'s: by {losses[worst]:.2g} of its RMS.")
    if entry.get("times"):
        parts += ["### Whole passes", _times(entry)]
    if entry.get("sustained"):
        parts += ["Each arm by itself, forward and backward repeated:", _clocks(entry["sustained"])]
    if not entry.get("backward"):
        return _joined(parts)
    if picture:
        parts.append(f"![kernels of the backward, {name}, by arm](images/{picture.name})")
    found = {arm: rows(entry, arm) for arm in entry["backward"]}
    parts += ["### By group, microseconds", _profiled(entry, found), _groups(found)]
    parts += ["### By product, microseconds", _products(found)]
    for arm, own in found.items():
        dropped = entry["backward"][arm]["dropped"]
        steps = (
            f", over {len(own[0].taken)} steps; {dropped} steps with other kernels were dropped"
            if own
            else ""
        )
        parts += [f"### {arm}: every kernel", f"In launch order{steps}.", _kernels(own), _names(own)]
    return _joined(parts)


def _joined(parts: list[str]) -> str:
    return "\n\n".join(part.rstrip("\n") for part in parts)


def _times(entry: Mapping[str, Any]) -> str:
    """A table of each arm's median time, and of the ratio of each arm's time to our arm's time."""
    times, table = entry["times"], []
    for key, found in times.items():
        arm, _, what = key.partition(": ")
        over = NONE
        if arm != PROGRAM and len(found) >= MIN_ROUNDS:
            over = str(ratio(found, times[f"{PROGRAM}: {what}"]))
        spread = f"{median(found):.3f} [{min(found):.3f}, {max(found):.3f}]"
        table.append([what, arm, spread, over, str(len(found))])
    table.sort(key=lambda row: row[0])
    return markdown_table(["pass", "arm", "ms, median [least, most]", f"over {PROGRAM}", "rounds"], table)


def _clocks(found: Mapping[str, Any]) -> str:
    table = []
    for arm, each in found.items():
        at = each["conditions"]
        told = [_reading(at, name) for name in ("sm_mhz", "power_w", "temperature_c")]
        step = f"{median(each['milliseconds']):.3f}" if each["milliseconds"] else NONE
        table.append([arm, step, *told, _limits(at)])
    return markdown_table(["arm", "ms", "SM MHz", "W", "°C", "clocks limited by"], table)


def _limits(at: Mapping[str, Any]) -> str:
    found = at.get("throttle")
    return ", ".join(found) if isinstance(found, list) and found else NONE


def _reading(at: Mapping[str, Any], name: str) -> str:
    match at.get(name):
        case [least, middle, most]:
            return f"{middle:.0f} [{least:.0f}, {most:.0f}]"
    return NONE


def _profiled(entry: Mapping[str, Any], found: Mapping[str, Sequence[BackwardPart]]) -> str:
    """Each arm's time for the whole backward, with and without the profiler. The profiler may slow the
    backward down."""
    told = []
    for arm, own in found.items():
        timed = entry.get("times", {}).get(f"{arm}: backward")
        clock = f", and {1e3 * median(timed):.0f} us without the profiler, from a cold L2" if timed else ""
        told.append(f"{arm} takes {sum(groups(own).values()):.0f} us in the profile{clock}.")
    return " ".join([_conditions(entry), *told])


def _conditions(entry: Mapping[str, Any]) -> str:
    known = peak(entry.get("backward_conditions", {}))
    if known is None:
        return "Clocks during the profile are not known."
    return (
        f"During the profile the SM clock's median was {known[0]:.0f} MHz; the tensor cores' peak at that "
        f"clock is {known[1] / 1e12:.0f} TFLOP/s."
    )


def _groups(found: Mapping[str, Sequence[BackwardPart]]) -> str:
    """A table of each group's time by arm. At the end, each arm except ours has a second column: the arm's
    time minus our arm's time."""
    sums = {arm: groups(own) for arm, own in found.items()}
    names = [n for n in GROUPS if any(abs(each[n]) > 0 for each in sums.values())]
    others = [arm for arm in sums if arm != PROGRAM] if PROGRAM in sums else []
    table = []
    for name in (*names, "all"):
        own = {arm: sum(each.values()) if name == "all" else each[name] for arm, each in sums.items()}
        more = [f"{own[arm] - own[PROGRAM]:+.1f}" for arm in others]
        table.append([name, *(f"{own[arm]:.1f}" for arm in sums), *more])
    return markdown_table(["group", *sums, *(f"{arm} less {PROGRAM}" for arm in others)], table)


def _products(found: Mapping[str, Sequence[BackwardPart]]) -> str:
    """A table of the matmuls and attention, with each arm's time and rate."""
    known: dict[str, dict[str, list[BackwardPart]]] = {}
    for arm, own in found.items():
        for row in own:
            if row.share.group not in (PASSES, GAPS):
                known.setdefault(row.share.what, {}).setdefault(arm, []).append(row)
    table = []
    for what, by_arm in known.items():
        every = [row for own in by_arm.values() for row in own]
        flops = max(row.share.flops or 0 for row in every)
        cells = [f"{sum(row.mean for row in by_arm[arm]):.1f}" if arm in by_arm else NONE for arm in found]
        rates = [_rate(flops, by_arm.get(arm, ())) for arm in found]
        table.append([what, f"{flops / 1e12:.3f}" if flops else NONE, *cells, *rates])
    return markdown_table(["what", "TFLOP", *found, *(f"{arm}, TFLOP/s" for arm in found)], table)


def _rate(flops: int, own: Sequence[BackwardPart]) -> str:
    taken = sum(row.mean for row in own)
    return f"{flops / taken / 1e6:.0f}" if flops and taken > 0 else NONE


def _kernels(own: Sequence[BackwardPart]) -> str:
    table = []
    for number, row in enumerate(own, 1):
        share, bound = row.share, row.bound
        rate = NONE
        if share.flops:
            rate = f"{share.flops / row.mean / 1e6:.0f} TFLOP/s"
        elif share.bytes:
            rate = f"{share.bytes / row.mean / 1e6:.2f} TB/s"
        table.append(
            [
                str(number),
                _short(share.what),
                share.group,
                "x".join(map(str, row.grid)) or NONE,
                f"{row.mean:.1f} [{min(row.taken):.1f}, {max(row.taken):.1f}]",
                f"{sum(row.gap) / len(row.gap):.1f}",
                f"{share.flops / 1e12:.3f}" if share.flops else NONE,
                f"{share.bytes / 1e9:.3f}" if share.bytes else NONE,
                rate,
                f"{bound:.1f}" if bound else NONE,
                f"{bound / row.mean:.0%}" if bound else NONE,
            ]
        )
    head = ["", "what", "group", "grid", "us, mean [least, most]", "gap before", "TFLOP", "GB", "rate"]
    return markdown_table([*head, "bound, us", "of bound"], table)


def _names(own: Sequence[BackwardPart]) -> str:
    """A list of the kernels' names. Each line begins with the kernel's number in the table."""
    lines = [f"{n}: {name}" for n, row in enumerate(own, 1) for name in row.names]
    return "\n".join(["<details><summary>names</summary>", "", "```", *lines, "```", "", "</details>"])


def _short(name: str) -> str:
    return name if len(name) <= 48 else f"{name[:45]}..."


def chart(name: str, entry: Mapping[str, Any]) -> bytes:
    """An SVG: one bar per arm's backward, with one segment per kernel in launch order."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    found = {arm: rows(entry, arm) for arm in entry["backward"]}
    with styled():
        figure = Figure(figsize=(11, 1.1 + 0.95 * len(found)), layout="constrained")
        axes = figure.subplots()
        most = max((sum(groups(own).values()) for own in found.values()), default=1.0)
        for place, own in enumerate(found.values()):
            _bar(axes, place, own, most)
        axes.set_yticks(range(len(found)), list(found))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.01 * most)
        axes.set_xlabel("microseconds; white: no kernel runs")
        axes.set_title(f"The layer's backward at {name}, by kernel", loc="left")
        there = [g for g in GROUPS if any(row.share.group == g for own in found.values() for row in own)]
        handles = [Patch(color=COLOURS[g], label=g) for g in there]
        figure.legend(handles=handles, loc="outside lower left", ncols=5, frameon=False)
        return image(figure)


def _bar(axes: Axes, place: int, own: Sequence[BackwardPart], most: float) -> None:
    at = 0.0
    for row in own:
        at += sum(row.gap) / len(row.gap)
        colour = COLOURS[row.share.group]
        axes.barh(place, row.mean, left=at, height=0.7, color=colour, edgecolor="white", linewidth=0.4)
        if row.mean > LABELLED * most:
            named = row.share.group != PASSES and row.mean > 2 * LABELLED * most
            words = f"{row.share.what.split(' = ')[0]}\n{row.mean:.0f}" if named else f"{row.mean:.0f}"
            axes.text(at + row.mean / 2, place, words, ha="center", va="center", fontsize=6, color="white")
        at += row.mean
