"""The user's cache may be damaged, or the user may not have permission to write to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from authoring import resources
from checkout import ROOT
from commanding import Command
from kernels import NORM

from coda_agent.primitives.compiler.jit import load_module
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.primitives.runtime import compile as compiling
from coda_agent.primitives.runtime.compile import report
from coda_agent.primitives.system.files import CacheError, read_json, usable_cache, write_atomic

LOOK = """\
import os, sys
from coda_agent.agent.cli import main as cli
sys.argv = ["coda-agent", "--help"]
try:
    cli.main()
except SystemExit:
    print(os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules)
"""


def test_a_cache_that_is_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """The cache is at fault and not the kernel, so the kernel is not rejected."""
    place = tmp_path / "cache"
    place.write_text("")
    monkeypatch.setenv("CODA_AGENT_CACHE", str(place))
    with pytest.raises(CacheError, match=f"the cache {place} cannot be written"):
        usable_cache()
    monkeypatch.chdir(ROOT)
    done = command("verify", "gemm_rope", "--no-gpu")
    assert done.status == 3 and f"the cache {place} cannot be written (it is not a folder)" in done.err
    assert "set CODA_AGENT_CACHE to another folder" in done.err and "rejected" not in done.out + done.err


def test_a_cache_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    # the tests may run as root, and root may write even to a read-only folder
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CacheError, match="you may not write to it"):
        usable_cache()


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"null", b'[1, {"a": 3}]', b'[{"kernel"', b'[{"kernel": 1}]', b"\xff\xfe\x00"],
)
def test_a_damaged_report_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    asked: list[str] = []

    def compiled(request: str) -> str:
        asked.append(request)
        return json.dumps([asdict(resource) for resource in resources()])

    monkeypatch.setattr(compiling, "_run_child", compiled)
    kernel = KernelSource(NORM.program)
    first = report(kernel, {}, PROBES[:1])
    (kept,) = (tmp_path / "resources").iterdir()
    kept.write_bytes(content)
    assert report(kernel, {}, PROBES[:1]) == report(kernel, {}, PROBES[:1]) == first
    assert len(asked) == 2 and read_json(kept) == json.loads(compiled(""))


def test_a_damaged_lowered_text_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    lowered = lower(NORM.program)
    path = tmp_path / "lowered" / f"{lowered.module}.py"
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe\x00")
    monkeypatch.delitem(sys.modules, lowered.module, raising=False)
    load_module(lowered)
    assert path.read_text(encoding="utf-8") == lowered.text


@pytest.mark.parametrize(("given", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_that_wait_leave_the_cores_to_others(given: dict[str, str], policy: str) -> None:
    """OMP_WAIT_POLICY is set before PyTorch is imported, because PyTorch reads it at import. A user's own
    value is kept."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], cwd=ROOT, env=environment | given, capture_output=True, text=True
    )
    assert done.stdout.split()[-2:] == [policy, "False"], done.stderr


def test_threads_that_write_one_file_leave_it_whole(tmp_path: Path) -> None:
    path, texts = tmp_path / "one", [letter * 100_000 for letter in "abcd"]
    write_atomic(path, texts[0])

    def write(text: str) -> None:
        for _ in range(20):
            write_atomic(path, text)
            assert path.read_text() in texts

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, texts))
    assert [*tmp_path.iterdir()] == [path]
