"""A node of a fleet has this project's hash only if all its packages are equal."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkout import ROOT

from coda_agent.agent.fleet import executor


@pytest.mark.parametrize("package", ["agent", "comparison", "fused", "primitives", "verifier"])
def test_a_change_in_any_package_changes_the_hash(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CODA_AGENT_VERSION", raising=False)
    for name in executor.PACKAGES:
        (tmp_path / name).mkdir()
        shutil.copy(ROOT / name / "__init__.py", tmp_path / name)
    monkeypatch.setattr(executor, "ROOT", tmp_path)
    before = executor._own_hash.__wrapped__()
    (tmp_path / package / "more.py").write_text("")
    assert executor._own_hash.__wrapped__() != before
