"""Tests of the simulation of sweeps: small fleets whose seconds are computed by hand, and the generated
page."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from checkout import ROOT

from benchmarks.fleet import simulation
from benchmarks.fleet.simulation import SimulatedResources, drawn, efficiency, phases, simulate

RUN = [("author", 5.0), ("core", 2.0), ("gpu", 10.0)]


def test_fleets_that_are_worked_out_by_hand() -> None:
    assert simulate([RUN], SimulatedResources(1, 1, 1)).seconds == 17
    assert (
        simulate([RUN] * 3, SimulatedResources(1, 1, 9)).seconds == 5 + 2 + 30
    )  # the GPU is idle only before it measures its first kernel
    assert simulate([RUN] * 3, SimulatedResources(1, 1, 1)).seconds == 3 * 17  # one place: one run at a time
    assert (
        simulate([RUN] * 4, SimulatedResources(4, 1, 9)).seconds == 5 + 4 * 2 + 10
    )  # one core serves four GPUs; the last GPU starts after 5 + 4 * 2 seconds
    ended = simulate([RUN] * 4, SimulatedResources(4, 1, 9, driver=1.0))
    assert ended.busy == {"core": 8, "gpu": 40, "driver": 12, "place": 0, "author": 20}
    assert ended.seconds >= 5 + 2 + 10 + 3


def test_sixty_four_gpus_reach_nine_tenths_of_linear() -> None:
    runs = drawn(1000, 30.0, random.Random(1))
    assert efficiency(runs, SimulatedResources.of(64, 64, 0.03)) > 0.9


def test_the_page_has_what_was_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulation, "GPUS", (1, 4))
    monkeypatch.setattr(simulation, "SPECS", (30,))
    monkeypatch.setattr(simulation, "WORK", 30)
    monkeypatch.setattr(simulation, "FLEET", 4)
    run = {"run": "24 checks on 2 one-core node(s)", "seconds": 50.0, "predicted": 55.0}
    (tmp_path / "runs.json").write_text(json.dumps({"compared": [run]}))
    real = [tmp_path / "runs.json", ROOT / "docs" / "fleet_runs" / "neighbours.json"]
    files = ["--out", str(tmp_path), "--runs", *map(str, real)]
    simulation.main(["--driver", "0.03", *files])
    found = json.loads(capsys.readouterr().out)
    assert found["kernels"] == len(phases()) and found["driver"] == 0.03
    assert all(row[0] == 1.0 and 0 < row[1] <= 1.0 for row in found["efficiency"].values())
    text = " ".join((tmp_path / "fleet_simulation.md").read_text().split())
    assert f"{found['usual']['gpu_seconds_a_kernel']} GPU seconds" in text
    assert "| measures | 0.9999 to 1.0001 | 2.39% to 2.85% | 0 of 5 |" in text
    assert "| 24 checks on 2 one-core node(s) | 50 | 55 | +10% |" in text
    assert (tmp_path / "fleet_simulation.svg").read_bytes().startswith(b"<?xml")
