"""Read Chrome traces of torch.profiler: the kernels of each marked region, and the operators that launched
them.

A region lies between two marker kernels on the stream. This module needs only the standard library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Trace = Mapping[str, Any]
MARKER = "spin_kernel"  # the kernel of torch.cuda._sleep
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class TraceError(Exception):
    """The trace does not contain the expected marked regions. The message says what it contains instead."""


@dataclass(frozen=True)
class GpuActivity:
    """One activity of the GPU. Times are microseconds; ``call`` is the profiler's id of the operator that
    launched the activity."""

    name: str
    start: float
    duration: float
    grid: tuple[int, ...]
    call: int | None

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Region:
    """The activities between two markers; ``begin`` is the end of the first marker."""

    begin: float
    events: tuple[GpuActivity, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(event.name for event in self.events)

    def gaps(self) -> list[float]:
        """Microseconds from the end of one activity to the start of the next. A gap is negative if two
        activities overlap. Gaps and durations add up to the time from the first marker to the end of the last
        activity."""
        found, end = [], self.begin
        for event in self.events:
            found.append(event.start - end)
            end = event.end
        return found


def regions(trace: Trace, expected: int) -> list[Region]:
    """The marked regions in order. Raises TraceError if their number is not ``expected``."""
    events = _on_device(trace)
    marks = [place for place, event in enumerate(events) if MARKER in event.name]
    if len(marks) != 2 * expected:
        raise TraceError(
            f"the trace has {len(marks)} markers among {len(events)} activities of the GPU; "
            f"{2 * expected} were launched"
        )
    pairs = zip(marks[::2], marks[1::2], strict=True)
    return [Region(events[first].end, tuple(events[first + 1 : last])) for first, last in pairs]


def summary(found: Sequence[Region]) -> dict[str, Any]:
    """The kernels of an arm, each with its microseconds in every region. Most regions have the same kernels.
    A region with other kernels is dropped; ``dropped`` is the number of dropped regions."""
    usual, _ = Counter(region.names for region in found).most_common(1)[0]
    alike = [region for region in found if region.names == usual]
    gaps = [region.gaps() for region in alike]
    kernels = [
        {
            "name": event.name,
            "grid": event.grid,
            "microseconds": [round(region.events[place].duration, 3) for region in alike],
            "gap": [round(row[place], 3) for row in gaps],
        }
        for place, event in enumerate(alike[0].events)
    ]
    return {"kernels": kernels, "dropped": len(found) - len(alike)}


def operators(trace: Trace, region: Region) -> list[dict[str, Any]]:
    """For each kernel of a region, the operator that launched the kernel. An entry also has the shapes of the
    operator's inputs, and the enclosing operators."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") == "cpu_op"]
    by_id = {_id(event): event for event in events}
    found = []
    for event in region.events:
        op = by_id.get(event.call) if event.call is not None else None
        told: dict[str, Any] = {"name": event.name}
        if op is not None:
            args = op.get("args", {})
            told |= {"op": op["name"], "call": event.call, "dims": args.get("Input Dims")}
            told |= {
                "types": args.get("Input type"),
                "within": [e["name"] for e in events if _encloses(e, op)],
            }
        found.append(told)
    return found


def _encloses(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> bool:
    if outer is inner or outer.get("tid") != inner.get("tid"):
        return False
    ends = float(inner["ts"]) + float(inner["dur"])
    return outer["ts"] <= inner["ts"] and ends <= float(outer["ts"]) + float(outer["dur"])


def _on_device(trace: Trace) -> list[GpuActivity]:
    found = [
        _event(e) for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in ON_DEVICE
    ]  # fmt: skip
    return sorted(found, key=lambda event: event.start)


def _event(given: Mapping[str, Any]) -> GpuActivity:
    args = given.get("args", {})
    return GpuActivity(
        name=str(given["name"]),
        start=float(given["ts"]),
        duration=float(given["dur"]),
        grid=tuple(args.get("grid", ())),
        call=_id(given),
    )


def _id(given: Mapping[str, Any]) -> int | None:
    args = given.get("args", {})
    found = args.get("External id", args.get("external id"))
    return int(found) if found else None
