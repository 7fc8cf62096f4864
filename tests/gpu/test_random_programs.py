"""Tests of random programs on an H100 against the interpreter: ragged sizes, any schedule, poisoned memory.

CODA_AGENT_GPU_PROGRAMS is the number of programs (default 200), and CODA_AGENT_GPU_SEED the first seed
(default 0). If CODA_AGENT_FAILURES names a file, it receives the seed, sizes, schedules, source and error of
each failure.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkout import PYTHONPATH
from random_programs import Case, account, case, operations, run_case

from coda_agent.primitives.lang.ir import OPERATIONS
from coda_agent.verifier.worker import Lost, Worker

HERE = Path(__file__).parent
SECONDS = 150  # limit for one case; compiling takes most of the time


class Sample(NamedTuple):
    cases: list[Case]
    found: list[dict[str, Any]]
    refused: int
    seconds: float


def draw_cases(wanted: int, first: int) -> tuple[list[Case], int]:
    """Return ``wanted`` programs that trace, and the number of programs that the tracer refused."""
    cases: list[Case] = []
    for tried in count():
        if len(cases) == wanted:
            return cases, tried - wanted
        drawn = case(first + tried)
        cases += [drawn] if drawn else []
    raise AssertionError("count() never ends")


@pytest.fixture(scope="module")
def sample() -> Iterator[Sample]:
    wanted = int(os.environ.get("CODA_AGENT_GPU_PROGRAMS", "200"))
    cases, refused = draw_cases(wanted, int(os.environ.get("CODA_AGENT_GPU_SEED", "0")))
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), PYTHONPATH]))
        found = run_cases([c.seed for c in cases])
    yield Sample(cases, [found[c.seed] for c in cases], refused, time.monotonic() - start)


def run_cases(seeds: list[int]) -> dict[int, dict[str, Any]]:
    """Run the cases in parallel, and return their findings by seed. After a case that hangs or faults, the
    next case gets a new process."""
    found: dict[int, dict[str, Any]] = {}
    left = iter(seeds)  # the threads share it

    def run_some() -> None:
        worker = Worker()
        for seed in left:
            try:
                found[seed] = worker.ask(run_case, seed, patience=SECONDS)
            except Lost as lost:
                found[seed] = {"error": lost.message}
                worker = Worker()
        worker.close()

    processes = os.cpu_count() or 1
    with ThreadPoolExecutor(processes) as threads:
        for running in [threads.submit(run_some) for _ in range(processes)]:
            running.result()
    return found


def test_random_programs_agree_with_the_interpreter(
    sample: Sample, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = [(c, f["error"]) for c, f in zip(sample.cases, sample.found, strict=True) if f["error"]]
    far = [d for f in sample.found for d in f.get("far", {}).values()]
    passed_over = sum(len(f.get("passed_over", [])) for f in sample.found)
    with capsys.disabled():
        print(
            f"\nrandom programs: {len(sample.cases)} ran in {sample.seconds:.0f} s, {len(failed)} failed; "
            f"{sample.refused} refused by the tracer, {passed_over} schedules passed over; "
            f"{len(operations(sample.cases))} of {len(OPERATIONS)} operations; worst error "
            f"{max(far, default=0):.2f} of what is allowed"
        )
    if path := os.environ.get("CODA_AGENT_FAILURES"):
        records = [{**account(c), "error": error} for c, error in failed]
        records += [
            {**account(c), "passed_over": f["passed_over"]}
            for c, f in zip(sample.cases, sample.found, strict=True)
            if f.get("passed_over")
        ]
        Path(path).write_text(json.dumps(records, indent=1), encoding="utf-8")
    assert not failed, "\n".join(f"seed {c.seed}: {error[-300:]}" for c, error in failed[:10])


def test_the_sample_covers_the_vocabulary(sample: Sample) -> None:
    if len(sample.cases) >= 200:
        assert operations(sample.cases) == OPERATIONS.keys()
