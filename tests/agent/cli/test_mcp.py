"""The MCP server, driven by the official client. One session uses a server process and a real compile; the
other tests run the server in this process."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from authoring import (
    BROKEN,
    SPECS,
    TOY,
    TOY_KERNEL,
    TURNED,
    UNSCALED,
    fenced,
    make_run,
    measured,
    write_toy,
)
from checkout import ROOT
from mcp import Client, StdioServerParameters
from mcp.client.session import IncomingMessage
from mcp_types import CallToolResult, Implementation, TextContent, Tool

from coda_agent.agent import setup
from coda_agent.agent.cli.mcp import server
from coda_agent.agent.learning.lessons import learned
from coda_agent.agent.prompts import prompt
from coda_agent.agent.providers import ProviderError, Question, Turn, Usage
from coda_agent.agent.providers.mcp import Submission
from coda_agent.agent.run import history, runs, tools
from coda_agent.agent.run.loop import result_of
from coda_agent.verifier import verify
from coda_agent.verifier.report import Checked, Rejected
from coda_agent.verifier.sandbox.jail import JailUnavailable
from coda_agent.verifier.verify import Verdict

pytestmark = pytest.mark.anyio
LOOKING = {"list_specs", "report", "read"}
TOOLS = LOOKING | {"prompt", "check", "verify", "measure", "propose_tip"}
LESSON = {"lesson": "Give gemm two operands.", "failed": "trace/python", "fix": "gemm(a, b)"}
ADA = Implementation(name="Ada's\neditor", version="1.2")
KEY = "sk-ant-a-key-that-nobody-sees"
SHIPPED = "gemm_row_abs_max"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_home: Path) -> Path:
    """Change the working directory to a folder with specs, and hide every GPU; return this folder."""
    (tmp_path / "specs").mkdir()
    write_toy(tmp_path / "specs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return tmp_path


@pytest.fixture
def here(place: Path, no_compiler: None) -> Client:
    """Return a client of a server in this process. The server allows two attempts for each run."""
    return Client(server(attempts=2), client_info=ADA)


def words(result: CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


async def said(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, words(result)
    return words(result)


async def refused(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error and "Traceback" not in words(result)
    return words(result)


async def told(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error and isinstance(result.structured_content, dict)
    return result.structured_content


async def begun(client: Client, spec: str = "toy") -> str:
    """Begin a run; return its name."""
    first, *_ = (await said(client, "prompt", spec=spec)).splitlines()
    return first.removeprefix("run: ")


@contextmanager
def opened(name: str) -> Iterator[runs.Run]:
    run = runs.reopen(name)
    with run.journal:
        yield run


def keys(name: str) -> list[str]:
    with opened(name) as run:
        return [event.key for event in run.journal.events()]


@dataclass(frozen=True)
class Story:
    """All answers that a client received from a server in another process, from the first question to a
    checked kernel."""

    place: Path
    specs_before: dict[Path, str]
    run: str
    tools: list[Tool]
    specs: list[dict[str, Any]]
    prompt: str
    drafted: str
    failed: str
    busy: str
    passed: str
    reports: dict[str, dict[str, Any]]  # the run's report after the prompt, the failure and the success
    gates: list[str]
    strange: list[Exception]  # lines on stdout that are not part of the protocol


async def lived(place: Path) -> Story:
    """Run one client's session; return the server's answers. The session has a prompt, a checked draft, a
    kernel that fails, a run that another process uses, and a kernel that passes."""
    environment = os.environ | {"ANTHROPIC_API_KEY": KEY, "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), environment["PYTHONPATH"]])
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "coda_agent.agent.cli.main", "mcp"], env=environment, cwd=place
    )
    before = {path: path.read_text() for path in (place / "specs").iterdir()}
    strange: list[Exception] = []
    gates: list[str] = []

    async def listen(message: IncomingMessage) -> None:
        if isinstance(message, Exception):
            strange.append(message)

    async def watch(progress: float, total: float | None, message: str | None) -> None:
        gates.append(message or "")

    # In mode "legacy" the client begins with the request ``initialize``, as most clients do. Clients of a
    # server in this process use the newer protocol.
    async with Client(command, mode="legacy", client_info=ADA, message_handler=listen) as client:
        listed = (await client.list_tools()).tools
        specs = (await told(client, "list_specs"))["specs"]
        prompt = await said(client, "prompt", spec="toy")
        (run,) = runs.names()
        reports = {"begun": await told(client, "report", run=run)}
        drafted = await said(client, "check", run=run, source=UNSCALED)
        failed = await said(client, "verify", run=run, source=BROKEN)
        with opened(run):
            busy = await refused(client, "verify", run=run, source=TOY_KERNEL)
            reports["failed"] = await told(client, "report", run=run)
        done = await client.call_tool("verify", {"run": run, "source": TOY_KERNEL}, progress_callback=watch)
        reports["passed"] = await told(client, "report", run=run)
    return Story(
        place, before, run, listed, specs, prompt, drafted, failed, busy, words(done), reports, gates, strange
    )


@pytest.fixture(scope="module")
def whole_story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Run the session once for all tests, because it takes seconds: the server imports PyTorch and really
    compiles."""
    place = tmp_path_factory.mktemp("client")
    (place / "specs").mkdir()
    write_toy(place / "specs")
    shutil.copy(SPECS / f"{SHIPPED}.yaml", place / "specs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODA_AGENT_RUNS", str(place / "runs"))
        return anyio.run(lived, place)


@pytest.fixture
def story(whole_story: Story, monkeypatch: pytest.MonkeyPatch) -> Story:
    """Have the product look for runs in the folder of the recorded session; return this session."""
    monkeypatch.setenv("CODA_AGENT_RUNS", str(whole_story.place / "runs"))
    return whole_story


def test_a_client_finds_tools_and_specs(story: Story) -> None:
    assert {tool.name for tool in story.tools} == TOOLS
    assert {t.name for t in story.tools if t.annotations and t.annotations.read_only_hint} == LOOKING
    ours, toy = story.specs
    assert (ours["name"], ours["accepted"]) == (SHIPPED, True)
    path = os.path.join("specs", "toy.yaml")
    summary = "Matmul with a row scale."
    assert toy == {"name": "toy", "path": path, "summary": summary, "accepted": False}


def test_a_prompt_begins_a_run(story: Story) -> None:
    assert story.prompt.startswith(f"run: {story.run}\n")
    assert TOY in story.prompt and "- `per_row(" in story.prompt
    assert story.reports["begun"]["status"] == "authoring"


def test_what_fails_is_told_in_the_verifiers_words(story: Story) -> None:
    assert "gate `interpret`, reason `numerics`" in story.drafted
    assert "gate `trace`" in story.failed and story.failed.endswith("Attempts left: 5.")
    report = story.reports["failed"]
    assert (report["status"], report["attempts"], report["attempts_at_most"]) == ("rejected", 1, 6)
    assert report["message"] in story.failed and report["gates"] == []


def test_a_run_that_another_process_has_is_only_looked_at(story: Story) -> None:
    assert "in use by another process" in story.busy and story.reports["failed"]["attempts"] == 1


def test_a_kernel_that_passes_is_checked_gate_by_gate(story: Story) -> None:
    assert "compile. It is checked, not benchmarked" in story.passed and "Attempts left: 4." in story.passed
    started, passed = story.gates[::2], story.gates[1::2]
    assert started == [f"{gate}: started" for gate in ("trace", "contract", "interpret", "compile")]
    assert passed == [f"{gate}: passed" for gate in ("trace", "contract", "interpret", "compile")]
    report = story.reports["passed"]
    assert report["status"] == "checked" and report["gates"][3]["figures"]["kernels"][0]["hgmma"] > 0


def test_a_client_s_run_is_like_any_other(story: Story) -> None:
    (past,) = history.past()
    assert (past.run, past.status, past.attempts, past.usage) == (story.run, "checked", 2, Usage())
    assert past.author == "Ada's editor 1.2 via mcp"
    with opened(story.run) as run:
        events = run.journal.events()
        outcome = result_of(run.journal, run.spec)
        header = run.journal.header
    assert [e.key for e in events] == ["prompt", "draft/1.1", "answer/1", "report/1", "answer/2", "report/2"]
    assert [e.kind for e in events] == ["prompt", "draft", "answer", "report", "answer", "report"]
    assert events[1].payload["source"].rstrip() == UNSCALED.rstrip()
    assert Turn.from_json(events[4].payload) == Turn(
        f"```python\n{TOY_KERNEL}```\n", Usage(), past.author, "end_turn"
    )
    assert outcome and isinstance(outcome.report, Checked) and outcome.source == TOY_KERNEL
    assert (header["provider"], header["author"], header["weak_jail"]) == ("mcp", "Ada's editor 1.2", False)


def test_a_client_s_run_writes_nothing_else_and_no_key(story: Story) -> None:
    assert not story.strange
    assert {path: path.read_text() for path in (story.place / "specs").iterdir()} == story.specs_before
    assert {path.name for path in story.place.iterdir()} == {"specs", "runs"}
    heard = [story.prompt, story.drafted, story.failed, story.busy, story.passed]
    kept = b"".join(path.read_bytes() for path in (story.place / "runs" / story.run).iterdir())
    assert not [text for text in (*map(str.encode, heard), kept) if KEY.encode() in text]


async def test_a_spec_is_given_by_its_name_or_path(here: Client, place: Path) -> None:
    async with here as client:
        for given in ("toy", "specs/toy.yaml", str(place / "specs" / "toy.yaml")):
            assert (await begun(client, given)) in runs.names()


@pytest.mark.parametrize("spec", ["", ".", "\0", "toi", "toy.yaml", "specs/toy", "../specs/toy", "../secret"])
async def test_a_spec_is_a_name_of_the_list(here: Client, place: Path, spec: str) -> None:
    write_toy(place, "toy", "secret").rename(place / "secret.yaml")
    async with here as client:
        for given in (spec, str(place / "secret")):
            assert ": no spec " in await refused(client, "prompt", spec=given)
    assert runs.names() == []


async def test_a_spec_s_path_of_the_list_will_do(here: Client) -> None:
    async with here as client:
        (listed,) = (await told(client, "list_specs"))["specs"]
        assert "run: toy-" in await said(client, "prompt", spec=listed["path"])


@pytest.mark.parametrize(
    ("tool", "given"),
    [
        ("check", {"source": TOY_KERNEL}),
        ("verify", {"source": TOY_KERNEL}),
        ("measure", {}),
        ("report", {}),
        ("read", {"page": "per_row"}),
        ("propose_tip", LESSON),
    ],
)
async def test_a_run_is_a_name_of_the_list(
    here: Client, place: Path, tool: str, given: dict[str, str]
) -> None:
    async with here as client:
        name = await begun(client)
        shutil.copytree(place / "runs" / name, place / "outside")
        for run in ("", ".", "..", "../outside", f"../runs/{name}", f"{name}/", f"runs/{name}", "\0"):
            assert f"the latest runs are {name}" in await refused(client, tool, run=run, **given), run
    assert keys(name) == ["prompt"]


async def test_a_page_or_an_example_is_read(here: Client) -> None:
    async with here as client:
        name = await begun(client)
        assert (await said(client, "read", run=name, page="per_row")).startswith("### per_row(")
        example = await said(client, "read", run=name, page="gemm_l1norm_gemm")
        assert "reference:" in example and "def gemm_l1norm_gemm(" in example
        for page in ("toy", "../examples/gemm_l1norm_gemm", "kernel", ""):
            assert f"there is no page {page!r}" in await said(client, "read", run=name, page=page)
    assert keys(name) == ["prompt"]


async def test_the_example_of_a_runs_own_spec_is_not_read(here: Client, place: Path) -> None:
    shutil.copy(prompt.EXAMPLES / "gemm_l1norm_gemm.yaml", place / "specs")
    async with here as client:
        name = await begun(client, "gemm_l1norm_gemm")
        assert "there is no page" in await said(client, "read", run=name, page="gemm_l1norm_gemm")


async def test_tips_await_a_person(here: Client, place: Path) -> None:
    async with here as client:
        name = await begun(client)
        await said(client, "check", run=name, source=BROKEN)
        assert "a person will look at it" in await said(client, "propose_tip", run=name, **LESSON)
        long = LESSON | {"fix": "x" * (tools.LONGEST + 1)}
        assert f"{tools.LONGEST} at most" in await said(client, "propose_tip", run=name, **long)
        await said(client, "verify", run=name, source=TOY_KERNEL)
        again = LESSON | {"lesson": "Name both operands of gemm."}  # proposed after the kernel passed
        assert "a person will look at it" in await said(client, "propose_tip", run=name, **again)
    assert keys(name) == ["prompt", "draft/1.1", "tip/1.2", "answer/1", "report/1", "tip/2.1"]
    assert [told.lesson for told in learned(name).told] == [LESSON["lesson"], again["lesson"]]


async def test_attempts_are_used_up(here: Client) -> None:
    async with here as client:
        name = await begun(client)
        assert "Attempts left: 1." in await said(client, "verify", run=name, source=BROKEN)
        for draft in (BROKEN, UNSCALED):
            await said(client, "check", run=name, source=draft)
        assert "Attempts left: 0." in await said(client, "verify", run=name, source=UNSCALED)
        for tool in ("verify", "check"):
            assert "used all 2 attempts" in await refused(client, tool, run=name, source=TOY_KERNEL)
        assert "only a checked kernel" in await refused(client, "measure", run=name)
    expected = ["prompt", "answer/1", "report/1", "draft/2.1", "draft/2.2", "answer/2", "report/2"]
    assert keys(name) == expected


async def test_after_a_kernel_that_passed_nothing_is_taken(here: Client) -> None:
    async with here as client:
        name = await begun(client)
        assert "without a verified kernel" in await refused(client, "measure", run=name)
        await said(client, "verify", run=name, source=TOY_KERNEL)
        for tool in ("verify", "check"):
            assert "is checked since attempt 1" in await refused(client, tool, run=name, source=TOY_KERNEL)
        assert f"no H100 here; a person can have it measured elsewhere: coda-agent bundle {name}" in (
            await refused(client, "measure", run=name)
        )
    assert keys(name) == ["prompt", "answer/1", "report/1"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Return a function ``be``. After ``be(measure)``, this machine measures by calling ``measure``."""

    def be(measure: Callable[..., Any]) -> None:
        monkeypatch.setattr(setup, "measurer", lambda *_: measure)

    return be


async def test_a_measured_kernel_awaits_a_person(
    here: Client, gpu: Callable[[Callable[..., Any]], None]
) -> None:
    gpu(lambda spec, kernel, *_: measured(spec, kernel.program))
    async with here as client:
        name = await begun(client)
        await said(client, "verify", run=name, source=TOY_KERNEL)
        assert f"For a person: coda-agent review {name}" in await said(client, "measure", run=name)
        report = await told(client, "report", run=name)
        assert report["status"] == "accepted" and report["timings"]["large"]["milliseconds"]["candidate"] == 2
        assert "is accepted: only a checked kernel" in await refused(client, "measure", run=name)
    assert keys(name)[-1] == "measurement/1"


async def test_after_a_slow_kernel_the_next_is_taken(
    here: Client, gpu: Callable[[Callable[..., Any]], None]
) -> None:
    gpu(lambda *_: Rejected(gate="decision", code="too_slow", message="1.01x of 1.1x"))
    async with here as client:
        name = await begun(client)
        await said(client, "verify", run=name, source=TOY_KERNEL)
        slow = await said(client, "measure", run=name)
        assert "gate `decision`, reason `too_slow`" in slow and slow.endswith("Attempts left: 1.")
        await said(client, "verify", run=name, source=TURNED)
    assert keys(name) == ["prompt", "answer/1", "report/1", "measurement/1", "answer/2", "report/2"]


async def test_long_verifies_take_turns_and_block_nothing_else(
    here: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go = threading.Event(), threading.Event()

    def check(*given: Any, **options: Any) -> Verdict:
        began.set()
        assert go.wait(timeout=20)
        return real(*given, **options)

    real = verify.check
    monkeypatch.setattr("coda_agent.verifier.verify.check", check)
    async with here as client:
        name = await begun(client)

        async def submit() -> None:
            await said(client, "verify", run=name, source=BROKEN)

        async with anyio.create_task_group() as both:
            both.start_soon(submit)
            both.start_soon(submit)
            while not began.is_set():
                await anyio.sleep(0.01)
            assert (await told(client, "report", run=name))["status"] == "authoring"
            go.set()
    assert keys(name) == ["prompt", "answer/1", "report/1", "answer/2", "report/2"]


@pytest.mark.parametrize("first", [BROKEN, TOY_KERNEL])
async def test_an_attempt_that_was_cut_off_is_judged_first(here: Client, first: str) -> None:
    async with here as client:
        name = await begun(client)
        with opened(name) as run:
            turn = Turn(fenced(first), Usage(), "Ada via mcp", "end_turn")
            run.journal.once("answer/1", "answer", turn.to_json)
        if first == BROKEN:
            assert "Attempts left: 0." in await said(client, "verify", run=name, source=TOY_KERNEL)
            assert keys(name) == ["prompt", "answer/1", "report/1", "answer/2", "report/2"]
        else:
            assert "checked since attempt 1" in await refused(client, "verify", run=name, source=BROKEN)
            assert keys(name) == ["prompt", "answer/1", "report/1"]


async def test_a_run_of_another_author_is_only_looked_at(here: Client, place: Path) -> None:
    name = make_run(place / "specs" / "toy.yaml")
    async with here as client:
        assert (await told(client, "report", run=name))["author"].endswith("via handoff")
        for tool in ("check", "verify"):
            assert "authored through handoff" in await refused(client, tool, run=name, source=TOY_KERNEL)
        assert "authored through handoff" in await refused(client, "propose_tip", run=name, **LESSON)
        assert "authored through handoff" in await refused(client, "measure", run=name)


def test_nobody_else_is_asked_for_an_answer() -> None:
    with pytest.raises(ProviderError, match="an MCP client; let it verify another source"):
        Submission().next_turn(Question("", []))


async def test_a_source_may_come_as_the_prompt_asks_for_answers(here: Client) -> None:
    async with here as client:
        name = await begun(client)
        stray = TOY_KERNEL.replace('gemm."""', 'gemm.\n```\n"""')
        assert stray != TOY_KERNEL
        for tool in ("check", "verify"):
            assert "remove that line" in await refused(client, tool, run=name, source=stray)
        await said(client, "verify", run=name, source=fenced(TOY_KERNEL))
    with opened(name) as run:
        outcome = result_of(run.journal, run.spec)
    assert outcome and outcome.source == TOY_KERNEL and outcome.authorship.attempts == 1


async def test_a_spec_mistake_is_told(here: Client, place: Path) -> None:
    write_toy(place / "specs", "dtype: bf16}", "dtype: bfloat}")
    async with here as client:
        (spec,) = (await told(client, "list_specs"))["specs"]
        assert "toy.yaml:5: dtype 'bfloat' is unknown" in spec["error"] and "accepted" not in spec
        assert "toy.yaml:5: dtype 'bfloat' is unknown" in await refused(client, "prompt", spec="toy")
    assert runs.names() == []


async def test_our_failures_have_words_and_our_bugs_keep_theirs(
    here: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: Exception) -> None:
        def check(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("coda_agent.verifier.verify.check", check)

    async with here as client:
        name = await begun(client)
        fail(JailUnavailable("no seccomp here"))
        assert "no seccomp here" in await refused(client, "check", run=name, source=TOY_KERNEL)
        fail(ZeroDivisionError("inner words"))
        assert "inner words" not in await refused(client, "check", run=name, source=TOY_KERNEL)
    assert keys(name) == ["prompt"]
