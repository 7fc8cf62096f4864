"""The schedules of QuACK's arms come from a committed report. The report must be for the same version of the
spec and the same version of QuACK."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from authoring import QUACK, TOY_KERNEL, measured, program_of, write_toy

from coda_agent.agent.storage import kernel_files, quack_tunings
from coda_agent.verifier.baselines.quack import OWN_TUNER
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import Accepted
from coda_agent.verifier.spec.model import Spec


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spec:
    monkeypatch.setattr(kernel_files, "KERNELS", tmp_path)
    return load(write_toy(tmp_path), check=False)


def commit(directory: Path, spec: Spec, *, edited: bool = False, **identity: str) -> None:
    """Write the files of an accepted kernel. The identity in its report has the fields ``identity``."""
    program = program_of(spec, TOY_KERNEL)
    found = measured(spec, program)
    found = found.model_copy(update={"identity": found.identity.model_copy(update=identity)})
    report = Accepted(**found.model_dump(exclude={"status"}))
    source, kept, *_, evidence = kernel_files.files(spec.name, directory, edited=edited)
    source.write_text("")
    kept.write_text(program.to_json())
    evidence.write_text(report.model_dump_json())


def test_what_a_report_of_the_spec_says(spec: Spec, tmp_path: Path) -> None:
    assert quack_tunings.quack(spec) == {}
    commit(tmp_path, spec, lowered_hash="another lowering")
    told = quack_tunings.quack(spec)
    assert told.keys() == {"large", "wide"}
    for tuned in told.values():
        assert (tuned.gpu, tuned.version) == ("NVIDIA H100 80GB HBM3", version("quack-kernels"))
        assert tuned.arms == {OWN_TUNER: (QUACK,)}


def test_an_edited_texts_report_says_so_too(spec: Spec, tmp_path: Path) -> None:
    commit(tmp_path, spec, edited=True)
    kernel_files.files(spec.name, tmp_path)[-1].write_text("{}")  # as if another version wrote it
    assert quack_tunings.quack(spec).keys() == {"large", "wide"}


def test_what_was_raced_of_another_spec_or_by_another_quack_is_not_known(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, spec, spec_hash="another")
    assert quack_tunings.quack(spec) == {}
    commit(tmp_path, spec)
    assert quack_tunings.quack(spec)
    monkeypatch.setattr(quack_tunings, "version", lambda name: "0.1")
    assert quack_tunings.quack(spec) == {}
