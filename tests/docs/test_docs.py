"""Tests of the documentation: every block of code runs, unless the block states what it needs, and every link
has a target."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from checkout import ROOT
from commanding import Command

from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.verifier import loading
from coda_agent.verifier.proposals import proposal

pytestmark = pytest.mark.slow

# benchmarks.layer_profile writes this page; its blocks of code are names of kernels
GENERATED = {"layer_backward.md"}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#[^)]*)?\)")
PATH = re.compile(
    r"`((?:agent|benchmarks|comparison|docs|generated_kernels|primitives|specs|tests|verifier)/[^`\s]*)`"
)
# one command without shell syntax, except that its output may go to a file
PLAIN = re.compile(r"coda-agent ([\w ./-]+?)(?: > ([\w.]+))?")
MADE = {"contributing.md", "commands.md"}  # pages that docs/pages.py generates


EACH = """\
import json, sys
for name, block in json.loads(sys.argv[1]).items():
    exec(compile(block, name, "exec"), {"__name__": "__main__"})
"""


def blocks_of(page: Path, language: str) -> list[tuple[str, str]]:
    """Return the name and text of each block in ``language`` on a page. Blocks whose first line states a
    need, such as ``title="needs an H100"``, are left out."""
    if page.name in GENERATED:
        return []
    found = enumerate(FENCE.finditer(page.read_text(encoding="utf-8")))
    return [(f"{page.name}-{n}", textwrap.dedent(match[3])) for n, match in found if match[2] == language]


def blocks(language: str) -> list[object]:
    return [pytest.param(block, id=name) for page in PAGES for name, block in blocks_of(page, language)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a new folder with the checkout's specs and kernels, and put ``coda-agent`` on the PATH.
    Return the folder."""
    for name in ("specs", "generated_kernels"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = tmp_path / "bin" / "coda-agent"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m coda_agent.agent.cli.main "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("CODA_AGENT_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_block_has_a_language() -> None:
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGES if page.name not in GENERATED}
    openings = {(name, m[2].partition(" ")[0]) for name, text in pages.items() for m in FENCE.finditer(text)}
    assert {language for _, language in openings} <= {"bash", "python", "yaml", "json", "text"}, openings


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks("bash"))
def test_commands_run(here: Path, no_keys: None, command: Command, block: str) -> None:
    """If a block has only ``coda-agent`` commands, perhaps with output to a file, the block runs in this
    process. This saves time, because this process has already imported PyTorch and has a compiler. Any other
    block runs in a shell."""
    made = [line.partition("#")[0].strip() for line in block.splitlines() if line.startswith("make ")]
    continuous = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    # make commands are not run here, because CI runs all of them except ``make test-gpu``
    assert set(made) <= {*continuous, "make test-gpu"}
    rest = [line for line in block.splitlines() if not line.startswith("make ")]
    plain = [PLAIN.fullmatch(line) for line in rest]
    if not all(plain):
        return run("bash", "-euo", "pipefail", "-c", "\n".join(rest))
    for match in filter(None, plain):
        done = command(*shlex.split(match[1]))
        assert done.status == 0, done.out + done.err
        if match[2]:
            Path(match[2]).write_text(done.out, encoding="utf-8")


def test_python_runs(here: Path) -> None:
    """Kernel files are only traced. All other blocks run in one process, because a process for each block
    would have to import PyTorch. A block does not see the names of earlier blocks."""
    alone = dict[str, str]()
    for name, block in (each for page in PAGES for each in blocks_of(page, "python")):
        if "from primitives" in block:
            kernel = re.findall(r"def (\w+)", block)[0]
            trace_source(block, loading.load(here / "specs" / f"{kernel}.yaml", check=False).signature())
        else:
            alone[name] = block
    run(sys.executable, "-c", EACH, json.dumps(alone))


@pytest.mark.parametrize("block", blocks("yaml"))
def test_specs_load(here: Path, block: str) -> None:
    (path := here / "spec.yaml").write_text(block)
    if "cases:" in block:
        loading.load(path)
    else:
        proposal.load(path, new=False)


@pytest.mark.parametrize("block", blocks("json"))
def test_json_parses(block: str) -> None:
    json.loads(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if target]
    lost = [t for t in targets if t not in MADE and not (page.parent / t).exists()]
    assert not lost


@pytest.mark.parametrize(
    "page", [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"], ids=lambda p: p.name
)
def test_every_path_that_contributors_read_is_there(page: Path) -> None:
    named = [path for path in PATH.findall(page.read_text(encoding="utf-8")) if "NAME" not in path]
    assert len(named) > 10 and [path for path in named if not any(ROOT.glob(path.rstrip("/")))] == []
