"""``python -m benchmarks.numerics``: check all accepted kernels again on a GPU, by the gates numerics and
stability, on the schedules of their reports. Nothing is timed."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.system.files import KERNELS, SPECS
from coda_agent.primitives.system.markdown_table import markdown_table
from coda_agent.verifier.gates import Failed, Gates, silent
from coda_agent.verifier.loading import load
from coda_agent.verifier.measure import MeasureOptions, _Session
from coda_agent.verifier.numerics import failed_draws
from coda_agent.verifier.spec.parts import Case
from coda_agent.verifier.stages import StageRunner

AT_ONCE = 5  # kernels that share the GPU; each takes at most 20 GB


class _OnReportedSchedules(_Session):
    """A measurement that does not tune: it takes the schedules of the kernel's report."""

    reported: dict[str, Any]

    def _tuned(self, case: Case) -> dict[str, Any]:
        return {"schedules": self.reported[case.name]}


def check(name: str) -> dict[str, Any]:
    """Check one kernel; return the largest RMS error over the yardstick's, and the seconds, or the fault."""
    spec, start = load(SPECS / f"{name}.yaml"), time.monotonic()
    text, report = (_text(f"{name}.{suffix}") for suffix in ("program.json", "report.json"))
    program, stages = Program.from_json(text, spec.signature()), StageRunner(1, silent, None, [])
    session = _OnReportedSchedules(
        spec, KernelSource(program), MeasureOptions(), Gates(silent), stages, {}, None
    )
    session.reported = {timing["case"]: timing["schedules"] for timing in json.loads(report)["timings"]}
    result: dict[str, Any] = {"kernel": name}
    try:
        with failed_draws.remembered(spec, program, "cuda"):
            figures = session._numerics()
        session._stability()
        ratios = [output["rms_ratio"] for case in figures.values() for output in case["outputs"].values()]
        result |= {"error": round(max(ratios), 3), "fault": ""}
    except Failed as failed:
        result |= {"error": "", "fault": f"{failed.code}: {failed.message}"}
    finally:
        stages.close()
    return result | {"seconds": round(time.monotonic() - start)}


def results(names: list[str]) -> Iterator[dict[str, Any]]:
    """Check kernels, several at a time; yield results as they come."""
    with ProcessPoolExecutor(AT_ONCE, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(check, name) for name in names]):
            yield future.result()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.numerics", description=__doc__)
    parser.add_argument("names", nargs="*", help="accepted kernels; by default all")
    parser.add_argument("--json", type=Path, help="also write the results to this file, one per line")
    arguments = parser.parse_args()
    every = sorted(path.name.partition(".")[0] for path in KERNELS.glob("*.program.json"))
    checked = []
    for result in results(arguments.names or every):
        checked.append(result)
        print(*result.values(), flush=True)
        if arguments.json:
            arguments.json.write_text("".join(json.dumps(each) + "\n" for each in checked), encoding="utf-8")
    checked.sort(key=lambda result: str(result["kernel"]))
    print(markdown_table(list(checked[0]), [[str(value) for value in each.values()] for each in checked]))
    if any(result["fault"] for result in checked):
        raise SystemExit(1)


def _text(name: str) -> str:
    return (KERNELS / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
