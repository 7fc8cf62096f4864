"""Tests of a light install: the packages that ``fused`` needs, and the versions that it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import pytest
import small_models
from checkout import ROOT

from coda_agent import fused
from coda_agent.fused import versions
from coda_agent.fused.versions import PROVED, UnprovedVersion

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# This script uses ``fused``, while imports of the agent and of the packages that only the agent needs are
# blocked. The script also forbids network connections.
LIGHT = """
import sys

BLOCKED = {"anthropic", "genai_prices", "httpx2", "jinja2", "mcp", "peft", "pydantic", "pynvml", "rich",
           "transformers", "typer", "coda_agent.agent", "coda_agent.comparison", "coda_agent.verifier"}


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in BLOCKED:
            raise ImportError(f"{name} is blocked")


def offline(event, arguments):
    assert not event.startswith("socket."), event


sys.meta_path.insert(0, Blocked())
sys.addaudithook(offline)

import torch
from coda_agent import fused
from coda_agent.fused import functional, ops
from coda_agent.primitives.compiler.lower import lower

assert not {"torch._dynamo", "torch._inductor.compile_fx"} & sys.modules.keys()  # longer than PyTorch itself
x, up, down = (torch.randn(shape).requires_grad_() for shape in ((8, 16), (24, 16), (16, 24)))
norm = functional.Norm(torch.ones(16), 1e-5)
functional.feed_forward(x, norm, up, down, "gelu").sum().backward()
assert x.grad is not None and lower(ops.defined["mlp_gelu"].program).text
assert not fused.patch(torch.nn.Linear(8, 8)).fused
"""


@pytest.mark.slow
def test_fused_needs_neither_the_agent_nor_a_network() -> None:
    told = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", LIGHT]
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_versions_are_those_of_the_project() -> None:
    listed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]
    for name, proved in PROVED.items():
        (pinned,) = (each.removeprefix(name) for each in listed if re.match(rf"{name}[><=]", each))
        assert pinned in (proved, proved.split(",")[0])


@pytest.mark.parametrize("found", ["2.10.1", "3.0.0", "1.13", "unknown"])
def test_another_version_is_refused_with_words(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(versions, "version", lambda _: found)
    with pytest.raises(UnprovedVersion, match=rf"tested with torch>=2.11,<3; this is {found}: pip"):
        versions.expect("torch")


@pytest.mark.parametrize("found", ["2.11", "2.13.0+cpu", "2.14.0a0+git1a2b3c"])
def test_builds_of_a_proved_version_are_taken(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(versions, "version", lambda _: found)
    versions.expect("torch")


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROVED, "no-such-package-here", ">=1,<2")
    with pytest.raises(UnprovedVersion, match="pip install 'no-such-package-here>=1,<2'"):
        versions.expect("no-such-package-here")


def test_another_transformers_is_refused_where_a_model_of_it_is_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "version", lambda _: "4.57.1")
    with pytest.raises(UnprovedVersion, match=r"transformers>=5.24,<6; this is 4.57.1"):
        fused.patch(small_models.model("Llama"))
