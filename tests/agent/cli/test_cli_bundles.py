"""The commands ``bundle``, ``measure`` and ``import``: a machine without a GPU authors kernels, and another
machine measures them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from authoring import TOY_KERNEL, TURNED, make_run, measured, slow
from commanding import Command, Done
from gpu_taken import gpu_taken

from coda_agent.agent import setup
from coda_agent.agent.fleet import executor, local
from coda_agent.agent.fleet.executor import ProcessSlot
from coda_agent.agent.fleet.pieces import spec_of
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.gates import Progress
from coda_agent.verifier.gpu.visible import Gpu
from coda_agent.verifier.report import Measured
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.worker import Task

pytestmark = pytest.mark.usefixtures("runs_home", "plain", "nothing_beside")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has a GPU, and replace measurements by made-up figures."""
    monkeypatch.setattr(setup, "use_gpu", lambda gpu: True)
    monkeypatch.setattr(
        "coda_agent.verifier.measure.measure",
        lambda spec, kernel, *_, **options: measured(spec, kernel.program),
    )


def test_bundle_measure_import(command: Command, spec: Path, tmp_path: Path, gpu: None) -> None:
    name, path, results = make_run(spec), tmp_path / "b.json", tmp_path / "r.json"
    done = command("bundle", name, "-o", path)
    assert done == Done(0, f"{path}: 1 kernel(s). On the H100: coda-agent measure {path}\n", "")
    done = command("measure", path, "-o", results)
    assert (
        done.status == 0 and f"{name}: measured\n" in done.out and f"coda-agent import {results}" in done.out
    )
    for _ in range(2):
        done = command("import", results)
        assert done == Done(0, f"{name}: measured. Look at it: coda-agent review {name}\n", "")
    assert "accepted: toy, program " in command("review", name).out


def test_results_of_another_bundle_are_not_replaced(
    command: Command, spec: Path, tmp_path: Path, gpu: None
) -> None:
    results = tmp_path / "r.json"
    names = [make_run(spec, source) for source in (TOY_KERNEL, TURNED)]
    for name in names:
        command("bundle", name, "-o", tmp_path / f"{name}.json")
    first, second = (tmp_path / f"{name}.json" for name in names)
    for _ in range(2):  # a bundle may replace its own results
        assert command("measure", first, "-o", results).status == 0
    before = results.read_text()
    done = command("measure", second, "-o", results)
    assert (
        done.status == 2 and f"holds results of another bundle than {second} (run {names[0]})" in done.said()
    )
    assert command("measure", second, "-o", first).status == 2
    assert results.read_text() == before
    assert command("measure", second, "-o", tmp_path / "other.json").status == 0


def test_a_bundle_is_measured_when_the_gpu_is_free(
    command: Command, spec: Path, tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    begun: list[KernelSource] = []

    def measure(spec: Spec, kernel: KernelSource, *_: object, **options: object) -> Measured:
        begun.append(kernel)
        return measured(spec, kernel.program)

    monkeypatch.setattr("coda_agent.verifier.measure.measure", measure)
    command("bundle", make_run(spec), "-o", tmp_path / "b.json")
    with gpu_taken(monkeypatch, lambda: begun) as waited:
        done = command("measure", tmp_path / "b.json", "-o", tmp_path / "r.json")
    assert done.status == 0 and waited == [False] and len(begun) == 1 and "waiting for it" in done.out


def test_several_gpus_of_a_machine_measure_at_once(
    command: Command, spec: Path, tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, used = [Gpu(f"GPU-{n}", "NVIDIA H100 80GB HBM3", (9, 0)) for n in (1, 2)], list[str]()
    both = threading.Barrier(2, timeout=60)

    def run(
        slot: ProcessSlot, task: Task, asked: dict[str, Any], *, patience: float, progress: Progress
    ) -> dict[str, Any]:
        used.append(slot.name)
        progress("numerics", "passed")
        both.wait()
        loaded = spec_of(asked["entry"]["spec_text"])
        program = Program.from_json(asked["entry"]["program"], loaded.signature())
        return measured(loaded, program).model_dump(mode="json")

    monkeypatch.setattr(executor, "usable_gpus", lambda: gpus)
    monkeypatch.setattr(local, "usable_gpus", lambda: gpus)
    monkeypatch.setattr(ProcessSlot, "run", run)
    names = [make_run(spec, source) for source in (TOY_KERNEL, TURNED)]
    command("bundle", *names, "-o", tmp_path / "b.json")
    done = command("measure", tmp_path / "b.json", "-o", tmp_path / "r.json")
    assert done.status == 0 and sorted(used) == ["GPU-1", "GPU-2"]
    for name in names:
        assert f"{name}: measured\n" in done.out and f"{name} numerics passed\n" in done.out


def test_a_slow_kernel_there(
    command: Command, spec: Path, tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "coda_agent.verifier.measure.measure", lambda spec, program, *_, **options: slow(spec)
    )
    name = make_run(spec)
    command("bundle", name, "-o", tmp_path / "b.json")
    done = command("measure", tmp_path / "b.json", "-o", tmp_path / "r.json")
    assert done.status == 1 and f"{name}: rejected at decision: case large: 0.900x" in done.out
    done = command("import", tmp_path / "r.json")
    assert done.status == 0 and f"rejected at decision: slow. Continue: coda-agent resume {name}" in done.out


def test_a_program_that_no_tracer_wrote(command: Command, spec: Path, tmp_path: Path, gpu: None) -> None:
    name, path = make_run(spec), tmp_path / "b.json"
    command("bundle", name, "-o", path)
    data = json.loads(path.read_text())
    data["entries"][0]["program"] = '{"__import__": "os"}'
    path.write_text(json.dumps(data))
    done = command("measure", path, "-o", tmp_path / "r.json")
    assert done.status == 2 and f"b.json: run {name}: its program cannot be used: " in done.said()
    assert not (tmp_path / "r.json").exists()


def test_files_that_are_none(command: Command, spec: Path, gpu: None) -> None:
    for name, kind, what in (
        ("measure", "bundle", "a file written by bundle"),
        ("import", "results", "a file"),
    ):
        done = command(name, spec)
        assert done.status == 2 and f"toy.yaml: this is not a {kind} file of coda-agent" in done.said()
        done = command(name, spec.with_name("nothing"))
        assert done.status == 2 and "nothing: " in done.err and f"give {what}" in done.err
