"""One new file adds a provider: the command's options, checks and errors then include this provider."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coda_agent.agent import providers

PROVIDER = """
from coda_agent.agent.finding import Finding
from coda_agent.agent.providers import Question, Turn, Usage
from coda_agent.agent.providers.spec import Auto, ProviderSpec


class Oracle:
    name = "oracle"

    def __init__(self, model: str | None = None):
        import an_sdk_that_is_not_installed

    def next_turn(self, question: Question) -> Turn:
        return Turn("", Usage(), "oracle", "end_turn")


SPEC = ProviderSpec(
    name="oracle",
    make=Oracle,
    arguments=lambda header, run: {"model": header["model"]},
    options=("--model",),
    package="oracle-sdk",
    counted=False,
    auto=Auto(0, "an oracle", lambda run: "no oracle"),
    check=lambda: Finding("oracle", "ok", "it speaks"),
)
"""
RUN = """
import sys
from coda_agent.agent import providers
providers.__path__.append(sys.argv.pop(1))
from coda_agent.agent.cli.main import main
main()
"""


def said(folder: Path, *words: str) -> tuple[int, str]:
    """Run coda-agent with an additional provider; return the exit status and the output of the process."""
    (folder / "oracle.py").write_text(PROVIDER)
    environment = {k: v for k, v in os.environ.items() if k != "ANTHROPIC_API_KEY"}
    environment |= {"COLUMNS": "300", "CODA_AGENT_RUNS": str(folder / "runs")}
    command = [sys.executable, "-c", RUN, str(folder), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_options_name_it(tmp_path: Path) -> None:
    status, text = said(tmp_path, "generate", "--help")
    offered = sorted([*(spec.name for spec in providers.specs().values() if spec.offered), "oracle"])
    assert status == 0 and "|".join(["auto", *offered]) in text
    assert "auto: an oracle, else anthropic" in text
    assert f"The model, for {' and '.join(sorted([*providers.used_by('--model'), 'oracle']))}" in text


def test_doctor_checks_it(tmp_path: Path) -> None:
    _, text = said(tmp_path, "doctor", "--json")
    found = {finding["name"]: finding for finding in json.loads(text)["findings"]}
    assert found["oracle"]["detail"] == "it speaks"


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        (("--budget-tokens", "9"), 2, "the spending of oracle"),
        (("--author", "Ada"), 2, "the author is oracle, but this option is for handoff"),
        ((), 3, "needs the package 'an_sdk_that_is_not_installed'; pip install 'oracle-sdk'"),
    ],
)
def test_a_run_obeys_its_spec(tmp_path: Path, words: tuple[str, ...], status: int, why: str) -> None:
    ended, text = said(tmp_path, "generate", "gemm_rope", "--no-gpu", "--provider", "oracle", *words)
    assert ended == status and why in text
