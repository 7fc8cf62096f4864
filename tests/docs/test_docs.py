"""Tests of the documentation: every block of code runs, unless its title is one of ``NEEDS``; parts of specs
agree with the specs; and every link has a target."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import ruamel.yaml
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


# runs blocks of Python; a block with the title "your model" finds a small model
EACH = f"""\
import json, sys
sys.path.append({str(ROOT / "tests/support")!r})
from small_models import model
for name, title, block in json.loads(sys.argv[1]):
    given = {{"model": model("Llama")}} if title == "your model" else {{}}
    exec(compile(block, name, "exec"), {{"__name__": "__main__"}} | given)
"""
# titles of blocks that this test cannot run
NEEDS = {
    "needs KubeRay",
    "needs Slurm",
    "needs a cluster",
    "needs a model",
    "needs a run",
    "needs an API key",
    "needs an H100",
    "needs an author",
    "needs ten minutes",
    "needs the checkout",
    "needs your own text",
}
PART = re.compile("part of specs/")
YAML = ruamel.yaml.YAML(typ="safe")


class Block(NamedTuple):
    name: str
    language: str
    title: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of code on a page."""
    if page.name in GENERATED:
        return
    for n, match in enumerate(FENCE.finditer(page.read_text(encoding="utf-8"))):
        language, _, rest = match[2].partition(" ")
        title = re.fullmatch(r'title="(.*)"', rest)
        assert title or not rest, f"{page.name}: {match[2]}"
        yield Block(f"{page.name}-{n}", language, title[1] if title else "", textwrap.dedent(match[3]))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks(language: str) -> list[Block]:
    """The blocks that a test can run."""
    return [b for b in BLOCKS if b.language == language and b.title not in NEEDS and not PART.match(b.title)]


def each(found: Iterable[Block]) -> pytest.MarkDecorator:
    """Run a test on each of these blocks, named by the block."""
    return pytest.mark.parametrize("block", [pytest.param(block, id=block.name) for block in found])


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
    assert {block.language for block in BLOCKS} == {"bash", "python", "yaml", "json", "text"}


def test_every_need_is_used() -> None:
    assert {block.title for block in BLOCKS} >= NEEDS


@each(block for block in BLOCKS if block.title in NEEDS)
def test_a_block_that_is_not_run_has_no_syntax_error(block: Block) -> None:
    if block.language == "bash":
        run("bash", "-n", "-c", block.text)
    elif block.language == "python":
        compile(block.text, block.name, "exec")
    else:
        assert block.language == "yaml" and YAML.load(block.text)


@each(block for block in BLOCKS if PART.match(block.title))
def test_a_part_of_a_spec_is_in_the_spec(block: Block) -> None:
    spec = YAML.load((ROOT / block.title.removeprefix("part of ")).read_text(encoding="utf-8"))
    for key, value in YAML.load(block.text).items():
        if isinstance(value, str):
            assert set(value.splitlines()) <= set(spec[key].splitlines())
        else:
            assert {name: spec[key][name] for name in value} == value


@each(blocks("bash"))
def test_commands_run(here: Path, no_keys: None, command: Command, block: Block) -> None:
    """If a block has only ``coda-agent`` commands, perhaps with output to a file, the block runs in this
    process. This saves time, because this process has already imported PyTorch and has a compiler. Any other
    block runs in a shell."""
    made = [line.partition("#")[0].strip() for line in block.text.splitlines() if line.startswith("make ")]
    continuous = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    # make commands are not run here: CI runs all of them except ``make test-gpu``, and all need ``make env``
    assert set(made) <= {*continuous, "make env", "make test-gpu"}
    rest = [line for line in block.text.splitlines() if not line.startswith("make ")]
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
    alone = list[tuple[str, str, str]]()
    for block in blocks("python"):
        if "from primitives" in block.text:
            kernel = re.findall(r"def (\w+)", block.text)[0]
            trace_source(block.text, loading.load(here / "specs" / f"{kernel}.yaml", check=False).signature())
        else:
            alone.append((block.name, block.title, block.text))
    run(sys.executable, "-c", EACH, json.dumps(alone))


@each(blocks("yaml"))
def test_specs_load(here: Path, block: Block) -> None:
    (path := here / "spec.yaml").write_text(block.text)
    if "cases:" in block.text:
        loading.load(path)
    else:
        proposal.load(path, new=False)


@each(blocks("json"))
def test_json_parses(block: Block) -> None:
    json.loads(block.text)


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
