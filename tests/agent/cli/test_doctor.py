"""The command ``doctor``: its findings on machines that meet the requirements of kernels, and on machines
that do not."""

from __future__ import annotations

import importlib.metadata
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from rich.console import Console, RenderableType

from coda_agent.agent import providers
from coda_agent.agent.cli import doctor
from coda_agent.agent.finding import Finding
from coda_agent.verifier.report import Rejected
from coda_agent.verifier.sandbox import jail


def checked(provider: str) -> Finding:
    check = providers.specs()[provider].check
    assert check
    return check()


def printed(what: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(what)
    return out.getvalue()


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {f.name: f for f in findings}


def test_doctor_looks_at_all_and_hides_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "made-up-value-1")
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    found = doctor.check()
    names = by_name(found)
    assert len(names) == len(found)
    assert {
        "python",
        "torch",
        "torch build",
        "CUDA device",
        "cuobjdump",
        "nvdisasm",
        "jail",
        "cache",
        "git",
        "anthropic key",
        "claude command",
        "handoff provider",
        "quack-kernels",
        "nvidia-cutlass-dsl",
    } <= names.keys()
    assert all(bool(f.remedy) == (f.status != "ok") for f in found)
    assert names["handoff provider"].status == names["anthropic key"].status == "ok"
    said = printed(doctor.table(found)) + json.dumps(doctor.as_dict(found))
    assert "made-up-value-1" not in said
    assert all(name in said for name in names)


def test_doctors_jail_is_the_real_one() -> None:
    found = doctor.jail()
    assert found.status == "ok" and "limits" in found.detail
    assert re.search(r"\d+ ms per trace", found.detail)


def test_doctor_judges_what_the_jail_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*args: object) -> None:
        raise jail.JailUnavailable("no seccomp: allow it")

    monkeypatch.setattr(jail, "trace", unavailable)
    assert doctor.jail().status == "broken" and "no seccomp" in doctor.jail().detail
    refusal = Rejected(gate="trace", code="crashed", message="it died")
    monkeypatch.setattr(jail, "trace", lambda *args: refusal)
    assert doctor.jail().status == "broken" and "crashed" in doctor.jail().detail


def test_what_is_absent_is_missing_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    assert checked("anthropic").status == "missing" and "handoff" in checked("anthropic").remedy
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_driver", lambda: ("unknown", ""))
    absent = doctor.device()
    assert absent.status == "missing" and "bundle" in absent.remedy
    assert doctor.healthy([checked("anthropic"), absent])


def test_a_gpu_that_pytorch_cannot_use_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_driver", lambda: ("580.1", "NVIDIA H100"))
    found = doctor.device()
    assert found.status == "broken" and "580.1" in found.detail and torch.__version__ in found.detail
    assert not doctor.healthy([found])


def test_only_hopper_is_a_device_to_measure_on() -> None:
    assert doctor.judged_device("NVIDIA H100 80GB HBM3", (9, 0), "580.1") == Finding(
        "CUDA device", "ok", "NVIDIA H100 80GB HBM3, driver 580.1, capability 9.0"
    )
    assert doctor.judged_device("NVIDIA A100", (8, 0), "580.1").status == "missing"


@pytest.mark.parametrize(
    ("installed", "status"),
    [("0.6.4", "broken"), ("0.6.5", "ok"), ("0.6.5.post1", "ok"), ("0.6.10", "ok"), ("0.7", "broken"),
     ("1.0+cu130", "broken")],
)  # fmt: skip
def test_versions_compare_as_numbers(monkeypatch: pytest.MonkeyPatch, installed: str, status: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    found = doctor.package(Requirement("quack-kernels>=0.6.5,<0.7"))
    assert found.status == status
    assert found.remedy == ("" if status == "ok" else "pip install 'quack-kernels<0.7,>=0.6.5'")


def test_requirements_are_the_projects_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    declared = {r.name: r for r in doctor.requirements()}
    assert declared["quack-kernels"] == Requirement("quack-kernels>=0.6.5,<0.7")
    assert "pytest" not in declared
    monkeypatch.setattr(doctor, "PYPROJECT", tmp_path / "none.toml")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["rich>=15", 'mypy>=2; extra == "test"'])
    assert doctor.requirements() == [Requirement("rich>=15")]


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.package(Requirement("coda-agent-has-no-such-package>=1"))
    assert (found.status, found.remedy) == ("missing", "pip install 'coda-agent-has-no-such-package>=1'")
    assert doctor.python((3, 10, 9)).status == "broken"
    assert doctor.python(sys.version_info[:3]).status == "ok"


def test_cache_that_cannot_be_written_or_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "file" / "below"))
    assert doctor.cache().status == "broken" and "CODA_AGENT_CACHE" in doctor.cache().remedy
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    assert doctor.cache().status == "ok"
    monkeypatch.setattr(doctor, "FREE_BYTES", 1 << 80)
    assert doctor.cache().status == "broken" and "GiB free" in doctor.cache().detail


def test_the_claude_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checked("claude-code").status == "missing"
    command = tmp_path / "claude"
    command.write_text("#!/bin/sh\necho '2.1.0 (Claude Code)'\n")
    command.chmod(0o755)
    assert checked("claude-code") == Finding("claude command", "ok", "2.1.0 (Claude Code)")
    command.write_text("#!/bin/sh\nexit 3\n")
    assert checked("claude-code").status == "broken"


def test_tools_and_git_that_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.tool(tmp_path / "cuobjdump").status == "missing"
    failing = tmp_path / "nvdisasm"
    failing.write_text("#!/bin/sh\nexit 3\n")
    failing.chmod(0o755)
    assert doctor.tool(failing).status == "broken"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.git().status == "missing"
