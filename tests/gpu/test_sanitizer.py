"""Tests on an H100: compute-sanitizer finds planted faults, and finds nothing in accepted kernels."""

from __future__ import annotations

import os
from pathlib import Path

import faults
import pytest
from checkout import PYTHONPATH, ROOT

from coda_agent.agent.storage import kernel_files
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import choices
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.gpu.checks import KernelCase
from coda_agent.verifier.gpu.sanitizer import TOOLS, errors, sanitized
from coda_agent.verifier.loading import load

SPECS = sorted((ROOT / "specs").glob("gemm_*.yaml"))
KERNELS = [
    pytest.param(path, False, id=path.stem) for path in SPECS if kernel_files.files(path.stem)[0].exists()
]
EDITED = [
    pytest.param(path, True, id=f"edited-{path.stem}")
    for path in SPECS
    if kernel_files.files(path.stem, edited=True)[0].exists()
]


@pytest.fixture(autouse=True)
def faults_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [PYTHONPATH, str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.parametrize(
    ("tool", "fault", "words"),
    [("memcheck", faults.one_too_far, "Invalid __global__ write"), ("racecheck", faults.race, "hazard")],
)
def test_what_is_planted_is_found(tool, fault, words):
    with pytest.raises(Failed, match=words) as failed:
        errors(tool, fault, None)
    assert failed.value.code == "sanitizer"


@pytest.mark.parametrize(("path", "edited"), [*KERNELS, *EDITED])
def test_an_accepted_kernel_is_clean(path, edited):
    spec = load(path)
    found = kernel_files.read(spec, edited=edited)
    assert found is not None
    kernel = found.kernel
    (ragged,) = (case for case in spec.cases if case.name == "ragged")
    schedules = tuple(choices(kernel.program, lower(kernel.program).gemms, ragged.sizes))
    job = KernelCase(spec, kernel, ragged.name, ragged.sizes, schedules)
    assert sanitized(job) == dict.fromkeys(TOOLS, 0)
