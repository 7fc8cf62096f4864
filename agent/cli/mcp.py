"""``coda-agent mcp``: serve the Model Context Protocol, so that a client can author kernels.

A client can read, draft, submit and measure; these actions write only journals. Only a person changes specs
and accepts kernels.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from inspect import getdoc
from pathlib import Path
from typing import Any

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

from coda_agent.agent import setup
from coda_agent.agent.arguments import SPECS, shipped
from coda_agent.agent.options import MeasuringOptions
from coda_agent.agent.prompts import prompt
from coda_agent.agent.providers import Tool, ToolCall
from coda_agent.agent.providers.mcp import NAME, Submission
from coda_agent.agent.run import assembly, run_summary, runs, tools
from coda_agent.agent.run.budget import Spent
from coda_agent.agent.run.loop import Loop, Outcome, extract, result_of
from coda_agent.agent.run.task import Measure
from coda_agent.agent.storage.kernel_files import is_there
from coda_agent.primitives.errors import Absent, CodaError
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import Accepted, Checked, Rejected, Report
from coda_agent.verifier.spec.file import SpecError

AUTHOR_LENGTH = 80
INSTRUCTIONS = """\
Author a CODA kernel for a spec. `prompt` starts a run, and returns the language and the task. `read` returns
one page of the language. `check` tests a draft in seconds. `verify` submits the whole file as one of a few
attempts, and says what is wrong. If the server has an H100, `measure` times a kernel that passed `verify`. If
you fixed a rejection, call `propose_tip` with the lesson. A person accepts kernels. Do not change specs."""
FAILURES = (CodaError, OSError)  # their messages are meant for the client; any other exception is a bug


def server(attempts: int) -> MCPServer:
    """Create the server, for any transport. Each run that the server starts has ``attempts`` attempts."""
    made = MCPServer(
        "coda-agent", version=version("coda-agent"), instructions=INSTRUCTIONS, log_level="WARNING"
    )
    bench = McpTools(attempts)
    looks = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    adds = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
    offered: list[tuple[Callable[..., Any], ToolAnnotations, bool]] = [
        (bench.list_specs, looks, True),
        (bench.report, looks, True),
        (bench.read, looks, False),
        (bench.prompt, adds, False),
        (bench.check, adds, False),
        (bench.verify, adds, False),
        (bench.measure, adds, False),
        (bench.propose_tip, adds, False),
    ]
    for tool, hints, data in offered:
        made.add_tool(_in_words(tool), description=getdoc(tool), annotations=hints, structured_output=data)
    return made


def _in_words(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tool: turn its failures into tool errors of the protocol."""

    @functools.wraps(tool)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return tool(*arguments, **named)
        except FAILURES as error:
            raise ToolError(str(error)) from None

    return call


@dataclass(frozen=True)
class McpTools:
    """The server's tools. The SDK calls each tool in a thread, and gives the tool's docstring to clients."""

    attempts: int
    alone: threading.Lock = field(default_factory=threading.Lock)  # the compilers are not thread-safe

    def list_specs(self) -> dict[str, Any]:
        """List the specs that kernels can be authored for, and whether each has an accepted kernel."""
        return {"specs": [_spec(name, path) for name, path in _specs().items()]}

    def prompt(self, spec: str, ctx: Context) -> list[str]:
        """Start a run for a spec (its name or path). Returns the run's name, then the language and the
        task."""
        paths = _specs()
        whole = os.path.abspath(spec)  # Path.resolve would raise ValueError for a null byte
        spec = next((name for name, path in paths.items() if whole == os.path.abspath(path)), spec)
        if spec not in paths:
            raise ToolError(f"{SPECS}: no spec {spec!r}; there are {', '.join(paths) or 'none'}")
        header = {
            "provider": NAME,
            "attempts": self.attempts,
            "model": None,
            "author": _client(ctx),
            "weak_jail": False,
            "directory": None,
            "time_limit": None,
            "max_tokens": None,
        }
        with self.alone:
            run = runs.start(paths[spec], header)
            with run.journal:
                text = str(_loop(run, Progress(ctx)).opening())
        words = f"check and verify take the whole file as `source`; you have {self.attempts} attempts"
        return [f"run: {run.name}", text, words]

    def check(self, run: str, source: str, ctx: Context) -> str:
        """Check a draft of a run's kernel (the whole Python file) without using an attempt: trace it, check
        the contract, compare numerics with PyTorch on the CPU, and compile it for sm_90a."""
        with self._opened(run) as opened:
            if over := _why_closed(opened, result_of(opened.journal, opened.spec)):
                raise ToolError(over)
            return _used(opened, tools.CHECK, ctx, source=extract(_answer(source)))

    def verify(self, run: str, source: str, ctx: Context) -> str:
        """Submit a kernel (the whole Python file) as one of the run's attempts. Returns which gate rejects
        the kernel and why, or that it passes all gates that need no GPU."""
        with self._opened(run) as opened:
            submission = Submission(_answer(source), f"{_client(ctx)} via {NAME}")
            outcome = _loop(opened, Progress(ctx), submission).run()
            if not submission.taken:  # the run ended, or this call judged an earlier, interrupted attempt
                raise ToolError(_why_closed(opened, outcome))
            return _verdict_text(opened, outcome)

    def measure(self, run: str, ctx: Context) -> str:
        """Measure a run's checked kernel on this machine's H100: whether it is correct and stable on the GPU,
        and faster than torch.compile. Takes minutes."""
        with self._opened(run) as opened:
            outcome = result_of(opened.journal, opened.spec)
            if outcome is None or not isinstance(outcome.report, Checked):
                status = outcome.report.status if outcome else "without a verified kernel"
                raise ToolError(f"run {run} is {status}: only a checked kernel can be measured")
            progress = Progress(ctx)
            gates = setup.measurer(None, MeasuringOptions().options(), progress)
            if gates is None:
                raise Absent(
                    f"there is no H100 here; a person can have it measured elsewhere: coda-agent bundle {run}"
                )
            return _verdict_text(opened, _loop(opened, progress, measure=gates).run())

    def read(self, run: str, page: str, ctx: Context) -> str:
        """Read a page that a run's prompt names: a primitive, such as per_row, or a worked example, such as
        gemm_l1norm_gemm."""
        with self._opened(run) as opened:
            return _used(opened, tools.READ, ctx, page=page)

    def propose_tip(self, run: str, lesson: str, failed: str, fix: str, ctx: Context) -> str:
        """Propose a lesson for later authors of other kernels, from a rejection that this run has fixed.
        ``lesson``: one imperative line of at most 200 characters. ``failed``: the gate and reason of that
        rejection. ``fix``: what fixed it. A person decides whether to accept it."""
        with self._opened(run) as opened:
            return _used(opened, tools.PROPOSE_TIP, ctx, lesson=lesson, failed=failed, fix=fix)

    def report(self, run: str) -> dict[str, Any]:
        """Return the state of a run: status, gates passed, the verifier's message, attempts and tokens."""
        read = run_summary.read(runs.runs_dir() / _existing(run))
        reports = [attempt.report for attempt in read.attempts if attempt.report]
        judged = [report for report in reports if report.status == read.past.status]
        told = asdict(read.past) | {"attempts_at_most": read.header.get("attempts")}
        if not judged:
            return told
        found = judged[-1]
        told |= {
            "gates": [g.model_dump(mode="json") for g in found.gates],
            "message": _report_text(run, found),
        }
        if isinstance(found, Accepted):
            shown = {"milliseconds", "ratios", "roofline_milliseconds"}
            told["timings"] = {t.case: t.model_dump(mode="json", include=shown) for t in found.timings}
        return told

    @contextmanager
    def _opened(self, name: str) -> Iterator[runs.Run]:
        """Open a run that an MCP client authors. Raises JournalError if another process has the run open."""
        with self.alone:
            run = runs.reopen(_existing(name))
            with run.journal:
                provider = run.journal.header["provider"]
                if provider != NAME:
                    raise ToolError(
                        f"run {name} is authored through {provider}; start your own run with prompt"
                    )
                yield run


class Progress:
    """A listener that tells the client which gate runs."""

    def __init__(self, ctx: Context):
        self._ctx = ctx
        self._told = itertools.count(1)

    def gate(self, name: str, words: str) -> None:
        anyio.from_thread.run(self._ctx.report_progress, float(next(self._told)), None, f"{name}: {words}")

    def attempt(self, number: int, limit: int) -> None: ...
    def text(self, words: str) -> None: ...
    def report(self, number: int, report: Report) -> None: ...
    def tool(self, name: str, words: str) -> None: ...
    def spent(self, spent: Spent) -> None: ...


def _loop(
    run: runs.Run, progress: Progress, submission: Submission | None = None, measure: Measure | None = None
) -> Loop:
    """The run's loop. It replays the journal. If there is a submission, it then makes one more attempt."""
    header = run.journal.header
    made = sum(event.kind == "answer" for event in run.journal.events())
    attempts = min(made + (submission is not None), header["attempts"])
    author = submission or Submission()
    return Loop(run.journal, run.spec, assembly.task_of(run), author, progress, attempts, measure)


def _used(run: runs.Run, tool: Tool, ctx: Context, **given: str | None) -> str:
    """Call a tool for the author of a run, and return the tool's result. The journal numbers the
    call by the answer that the author prepares."""
    keys = [event.key for event in run.journal.events()]
    turn = 1 + sum(key.startswith("answer/") for key in keys)
    used = sum(key.startswith((f"{tools.DRAFT}/{turn}.", f"{tools.TIP}/{turn}.")) for key in keys)
    place = f"{turn}.{1 + used}"
    return _loop(run, Progress(ctx)).desk.answer(place, ToolCall(place, tool.name, given))


def _why_closed(run: runs.Run, outcome: Outcome | None) -> str:
    """Why a run accepts no more sources; "" if the run still accepts a source."""
    if outcome is None:
        return ""
    made, limit = outcome.authorship.attempts, run.journal.header["attempts"]
    if not isinstance(outcome.report, Rejected):
        return f"run {run.name} is {outcome.report.status} since attempt {made}: it accepts no more sources"
    return f"run {run.name} has used all {limit} attempts" if made >= limit else ""


def _answer(source: str) -> str:
    """Put a source into the form of an author's answer, unless it already has that form."""
    if extract(source) is not None:
        return source
    answer = f"```python\n{source.rstrip()}\n```\n"
    if (extract(answer) or "").rstrip() != source.rstrip():
        raise ToolError("a line of the source begins with ```, which ends the source: remove that line")
    return answer


def _verdict_text(run: runs.Run, outcome: Outcome) -> str:
    left = run.journal.header["attempts"] - outcome.authorship.attempts
    return f"{_report_text(run.name, outcome.report)}\n\nAttempts left: {left}."


def _report_text(run: str, report: Report) -> str:
    """The verifier's message, and what to do next."""
    if isinstance(report, Rejected):
        return prompt.rejection(report)
    if isinstance(report, Checked):
        passed = ", ".join(gate.gate for gate in report.gates)
        return f"Gates passed: {passed}. It is {report.unmeasured}."
    return f"Passes every gate, and is faster than its spec demands. For a person: coda-agent review {run}"


def _specs() -> dict[str, Path]:
    return {path.stem: path for path in sorted(shipped(SPECS).glob("*.yaml"))}


def _spec(name: str, path: Path) -> dict[str, Any]:
    told: dict[str, Any] = {"name": name, "path": str(path)}
    try:
        spec = load(path, check=False)
    except SpecError as error:
        return told | {"error": str(error)}
    return told | {"summary": spec.summary, "accepted": is_there(spec.name)}


def _existing(name: str) -> str:
    """Return the name of an existing run. Raises ToolError for any other text, such as a path."""
    if name not in runs.names():
        raise ToolError(f"there is no run {name!r}; {runs.latest()}")
    return name


def _client(ctx: Context) -> str:
    """The name by which the client introduces itself."""
    params = ctx.session.client_params
    if params is None:
        return "unnamed client"
    words = " ".join(f"{params.client_info.name} {params.client_info.version}".split())
    return "".join(filter(str.isprintable, words))[:AUTHOR_LENGTH] or "unnamed client"
