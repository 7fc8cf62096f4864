"""Measure a bundle (a file of checked kernels) on the GPUs of this machine or of a cluster. Each entry of the
bundle is a kernel, which is measured on one GPU."""

from __future__ import annotations

import shutil
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.agent.artifacts import bundle as bundles
from coda_agent.agent.artifacts import bundle_measuring
from coda_agent.agent.fleet.driver import VOIDS, measured_on
from coda_agent.agent.fleet.executor import SlotLost
from coda_agent.agent.fleet.pool import LOSSES, GivenUp, Pool, Suspect
from coda_agent.agent.storage.checkpoint import SAME, FilePieces
from coda_agent.verifier.gates import Progress, identity
from coda_agent.verifier.report import Measurement, Unmeasured

if TYPE_CHECKING:
    from coda_agent.verifier.measure import MeasureOptions


def measure(
    path: Path,
    bundle: bundles.Bundle,
    out: Path,
    options: MeasureOptions,
    pool: Pool,
    progress: Callable[[str], Progress],
) -> bundles.BundleResults:
    """Measure every entry of a bundle, like ``bundle_measuring.measure``, but use all GPUs of the pool at
    once. Results are written to ``out`` one by one, in the order of the bundle's entries."""
    checked = [bundle_measuring.verified(path, entry) for entry in bundle.entries]
    done: dict[int, bundles.KernelResult] = {}
    # Equal entries store their finished stages in the same folder, so measure them one after the other.
    turns = defaultdict[Path, threading.Lock](threading.Lock)

    def whole(entry: bundles.PackedKernel) -> dict[str, Any]:
        keep = bundle_measuring.stages(out, entry, options)
        with turns[keep.directory]:
            return bundle_measuring.whole(
                keep, partial(_measured, pool, entry, options, keep, progress(entry.run))
            )

    def results() -> bundles.BundleResults:
        return bundles.BundleResults(results=tuple(done[place] for place in sorted(done)))

    # one thread per entry, because more GPUs may join
    with pool.threads(len(bundle.entries)) as threads:
        found = [threads.submit(whole, entry) for entry in bundle.entries]
        for place, (entry, kernel, each) in enumerate(zip(bundle.entries, checked, found, strict=True)):
            done[place] = bundles.KernelResult(
                run=entry.run, attempt=entry.attempt, identity=identity(*kernel), measurement=each.result()
            )
            bundles.write(out, results())
    shutil.rmtree(bundle_measuring.partial_folder(out), ignore_errors=True)
    return results()


def _measured(
    pool: Pool,
    entry: bundles.PackedKernel,
    options: MeasureOptions,
    keep: FilePieces,
    progress: Progress,
) -> Measurement:
    """Measure an entry on one GPU. If the GPU is lost or the measurement is invalid, measure again, perhaps
    on another GPU. After ``VOIDS`` invalid measurements, return the last one. Raises GivenUp after ``LOSSES``
    lost GPUs."""
    voids = lost = 0
    while lost < LOSSES:
        try:
            began = (keep.load(SAME) or {}).get("gpu", "")
            with pool.lease(True, f"{entry.run} measure", prefer=began) as slot:
                found = measured_on(pool, slot, entry, options, keep, progress)
        except (SlotLost, Suspect):
            lost += 1
            continue
        if not isinstance(found, Unmeasured):
            return found
        keep.clear()
        voids += 1
        if voids == VOIDS:
            return found
    raise GivenUp(f"{entry.run}: {LOSSES} GPUs were lost while measuring; measure the bundle again")
