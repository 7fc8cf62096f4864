"""Judge candidates in single-threaded processes, with a progress bar."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.campaign.judge import CampaignTask, Result, judged

CHUNK = 20  # candidates per task of a process; all are variants of one program, which is prepared once
ROUND = 1000  # approximate number of candidates per seed; results of earlier seeds come first


def run(tasks: list[CampaignTask], jobs: int) -> Iterator[Result]:
    """Yield results as they come, with a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    context = get_context("spawn")
    with (
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_alone) as pool,
        Progress(*columns) as progress,
    ):
        bar = progress.add_task("candidates", total=len(tasks))
        try:
            futures = [pool.submit(_several, c) for c in _chunks(tasks)]
            for future in as_completed(futures):
                for result in future.result():
                    progress.advance(bar)
                    yield result
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _chunks(tasks: list[CampaignTask]) -> list[tuple[CampaignTask, ...]]:
    """Split the candidates into chunks, each with variants of only one program. Order the chunks by the seed
    of their first candidate."""
    by_name: dict[tuple[str, str], list[CampaignTask]] = {}
    for task in tasks:
        by_name.setdefault((task.group, task.name), []).append(task)
    chunks = [tuple(m[i : i + CHUNK]) for m in by_name.values() for i in range(0, len(m), CHUNK)]
    return sorted(chunks, key=lambda chunk: tasks.index(chunk[0]) // ROUND)


def _several(tasks: tuple[CampaignTask, ...]) -> list[Result]:
    return [judged(task) for task in tasks]


def _alone() -> None:
    """Use one thread and a cache of its own, and let the parent process handle interrupts."""
    import torch

    os.environ |= {"OMP_NUM_THREADS": "1", "CODA_AGENT_CACHE": tempfile.mkdtemp(prefix="coda-campaign-")}
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
