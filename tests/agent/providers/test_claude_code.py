"""The `claude` command as an author. A stand-in on the PATH replaces the command, and the provider runs it.

The stand-in prints copies of the lines that Claude Code 2.1.330 printed on 2026-11-22 (`claude_says.py`). The
last line is the account, which states the result and the cost. Where the command dies, fails while it
executes, or prints no account, the output is made up.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from authoring import BROKEN, HEADER, TOY_KERNEL, Notes, coda_agent, fenced, write_toy
from claude_says import (
    CONTINUE,
    CUT_FOUR_TIMES,
    DECLINED,
    LIMIT,
    OVERLOADED,
    REFUSED,
    RESET,
    RESULT,
    TWICE,
    WHOLE,
    failed,
    goes_on,
    printed,
    response,
)
from small_disk import mounted
from typer.testing import CliRunner

from coda_agent.agent import setup
from coda_agent.agent.cli.main import app
from coda_agent.agent.options import BudgetOptions
from coda_agent.agent.prompts.prompt import tokens
from coda_agent.agent.providers import (
    Message,
    OutOfBudget,
    ProviderError,
    Question,
    ToolCall,
    Turn,
    Usage,
    make,
)
from coda_agent.agent.providers.patience import UNKNOWN, Patience
from coda_agent.agent.providers.prices import price
from coda_agent.agent.run import assembly, runs
from coda_agent.agent.run.budget import BudgetLedger, RunLimits, Spent
from coda_agent.agent.run.history import past
from coda_agent.agent.run.loop import Loop
from coda_agent.agent.run.tools import TOOLS, submission
from coda_agent.agent.storage.journal import Journal

pytestmark = pytest.mark.slow

# The stand-in records in kept.json how it was started, and carries out the first plan in plan.json. It also
# removes this plan from plan.json, unless this plan is the last one.
STAND_IN = f"""#!{sys.executable}
import json, os, subprocess, sys, time
here = os.path.dirname(os.path.abspath(__file__))
plan, *later = json.load(open(here + "/plan.json"))
json.dump(later or [plan], open(here + "/plan.json", "w"))
system = open(sys.argv[sys.argv.index("--system-prompt-file") + 1]).read()
kept = {{"argv": sys.argv[1:], "prompt": sys.stdin.read(), "system": system, "env": dict(os.environ),
        "files": os.listdir(".")}}
json.dump(kept, open(here + "/kept.json", "w"))
if plan.get("hangs"):
    child = subprocess.Popen(["sleep", "600"])
    open(here + "/child", "w").write(str(child.pid))
    time.sleep(600)
if plan.get("fills"):
    with open(os.environ["TMPDIR"] + "/filler", "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass
sys.stderr.write(plan.get("stderr", ""))
sys.stdout.write(plan.get("stdout", ""))
sys.exit(plan.get("status", 0))
"""
TASK = [Message("user", "write a kernel")]
Plan = Callable[..., Path]
ONCE = Patience(total=0.0)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Put the stand-in on the PATH. Return a function that sets the stand-in's plans and returns its
    folder."""
    here = tmp_path / "bin"
    here.mkdir()
    (here / "claude").write_text(STAND_IN)
    (here / "claude").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}{os.pathsep}{os.environ['PATH']}")

    def told(*results: dict[str, Any], **only: Any) -> Path:
        plans = [_planned(result) for result in results]
        (here / "plan.json").write_text(json.dumps(plans or [only]))
        return here

    return told


def _planned(result: dict[str, Any]) -> dict[str, Any]:
    """Return a plan that prints the account ``result``. If the account is no error, the plan prints an answer
    first. A ``result`` without a subtype is a plan already, and is returned unchanged."""
    if "subtype" not in result:
        return result
    return printed(*([] if result["is_error"] else response(result["result"])), result)


def kept(here: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((here / "kept.json").read_text())
    return found


def test_an_answer_with_its_model_and_tokens(plan: Plan) -> None:
    plan(RESULT)
    heard: list[str] = []
    turn = make("claude-code").next_turn(Question("S", TASK, say=heard.append))
    assert turn.text == "Here it is. " and turn.author == "claude-sonnet-5-5 via claude-code"
    assert turn.usage == Usage(11, 7, 4000, 300) and heard[-1] == turn.text


def test_an_answer_is_all_its_blocks(plan: Plan) -> None:
    """If thinking came between blocks of text, the command's account contains only the last block. The turn
    still contains all blocks."""
    plan(printed(*response("first \u2028", "second"), RESULT | {"result": "second"}))
    assert make("claude-code").next_turn(Question("S", TASK)).text == "first \u2028second"
    empty = goes_on("[Your previous response had no visible output. Please continue.]")
    account = RESULT | {"num_turns": 2, "usage": TWICE, "result": "late"}
    plan(printed(*response(), empty, *response("late"), account))
    turn = make("claude-code").next_turn(Question("S", TASK))
    assert turn.text == "late" and turn.usage == Usage(22, 14, 8000, 600)


def test_it_gets_the_conversation_and_nothing_else(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-secret")
    monkeypatch.setenv("CLAUDE_CODE_MAX_RETRIES", "20")
    here = plan(RESULT)
    system = "the prefix " * 30_000  # longer than a command-line argument may be
    talk = [*TASK, Message("assistant", "my draft"), Message("user", "rejected: why")]
    make("claude-code", model="opus").next_turn(Question(system, talk))
    found = kept(here)
    assert found["system"] == system and found["files"] == []
    assert "ANTHROPIC_API_KEY" not in found["env"] and "sk-ant-secret" not in json.dumps(found)
    places = [found["prompt"].index(message.text) for message in talk]
    assert places == sorted(places)
    flags = found["argv"]
    assert flags[flags.index("--tools") + 1] == "" and flags[flags.index("--setting-sources") + 1] == ""
    assert flags[flags.index("--model") + 1] == "opus" and "--strict-mcp-config" in flags
    assert "--no-session-persistence" in flags
    assert (
        found["env"]["CLAUDE_CODE_DISABLE_ATTACHMENTS"] == "1" and not Path(found["env"]["TMPDIR"]).exists()
    )
    assert found["env"]["CLAUDE_CODE_MAX_RETRIES"] == "0"  # the provider retries, so the command does not
    make("claude-code").next_turn(Question("S", TASK))
    assert kept(here)["prompt"] == "write a kernel" and "--model" not in kept(here)["argv"]


def test_without_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProviderError, match="no `claude` command .*; install Claude Code") as caught:
        make("claude-code")
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("answer", "words", "retryable"),
    [
        (failed("Not logged in · Please run /login"), "not logged in: Not .*; run `claude`, log in", False),
        (failed("Failed to authenticate. API Error: 401 Invalid bearer token", 401), "not logged in", False),
        (failed("Failed to authenticate: OAuth token revoked. Please log in again.", 403), "log in", False),
        ({"stderr": "error: unknown option '--tools'", "status": 1}, "unknown option.*; update", False),
        (failed("There's an issue with the selected model (claude-of-nowhere). It may not exist or you may"
                " not have access to it.", 404), "answered 404: There's.*; choose another --model", False),
        (failed("Prompt is too long · the request is ~230000 tokens (limit 200000)", 400),
         "answered 400: Prompt is too long", False),
        (failed("Credit balance is too low", 400), "answered 400: Credit balance is too low", False),
        (printed(*response("no ", stop="model_context_window_exceeded"),
                 failed("API Error: The model has reached its context window limit.")),
         "context window limit.; start a new run", False),
        (printed(*DECLINED), "claude refused to answer: API Error: Sonnet.*; reword", False),
        (printed(*CUT_FOUR_TIMES), "cut at its limit of 32,000 tokens.*larger --max-tokens", False),
        (printed(*response("half an ", stop="max_tokens"), CONTINUE, *response("other half "),
                 RESULT | {"num_turns": 2, "result": "other half "}), "cut at its limit", False),
        (LIMIT, "status 1: You've hit your 5-hour limit", True),
        (failed("API Error: 500 Internal server error. This is a server-side issue.", 500), "500", True),
        (failed("API Error: Server is temporarily limiting requests (not your usage limit) · slow down", 429),
         "status 1: API Error: Server is temporarily limiting", True),
        (RESET, "was lost", True),
        (failed("API Error: Stream ended without receiving any events"), "without receiving any", True),
        (RESULT | {"is_error": True, "subtype": "error_during_execution", "result": "", "errors": ["odd"]},
         "status 1: .*odd", True),
        ({"stderr": "boom\n" * 900, "status": 134}, "status 134: ", True),
        ({"stdout": "no JSON"}, "status 0: no JSON", True),
        ({"stdout": "[1]"}, r"status 0: \[1\]", True),
        ({}, "status 0: nothing", True),
        (RESULT | {"result": "  \n"}, "an empty answer", True),
    ],
)  # fmt: skip
def test_no_answer_says_why(plan: Plan, answer: dict[str, Any], words: str, retryable: bool) -> None:
    plan(answer)
    with pytest.raises(ProviderError, match=words) as caught:
        make("claude-code", patience=ONCE).next_turn(Question("S", TASK))
    assert caught.value.retryable is retryable and len(str(caught.value)) < 800


# outages


def quick(waits: list[float]) -> Patience:
    """Return the default patience with a fake sleep, which appends the waiting time to ``waits`` and does not
    wait."""
    return Patience(sleep=waits.append)


def test_an_outage_is_outlived(plan: Plan, ledger: BudgetLedger) -> None:
    """The provider outlives a broken connection, an overloaded API, a reached limit and a command that
    dies."""
    here, waits, heard = plan(RESET, OVERLOADED, LIMIT, {}, RESULT), list[float](), list[str]()
    question = Question("S", TASK, meter=ledger, say=heard.append)
    turn = make("claude-code", patience=quick(waits)).next_turn(question)
    assert turn.text == "Here it is. " and len(waits) == 4 and json.loads((here / "plan.json").read_text())
    assert 0.75 <= waits[0] <= 1 and waits == sorted(waits)  # each wait is about twice the wait before
    assert "claude ended with status 1: API Error: Connection to the API was lost" in "".join(heard)
    # Two requests have an unknown cost, and two cost nothing. The last request stays reserved until the loop
    # settles it.
    told = ledger.spent()
    assert told.uncertain_tokens == (2 + 1) * (tokens("S") + tokens(TASK[0].text) + 32_000)
    assert told.tokens == told.uncertain_tokens and told.dollars == 0


def test_an_outage_that_stays_is_given_up(plan: Plan) -> None:
    plan(RESET)
    waits: list[float] = []
    with pytest.raises(ProviderError, match=rf"try again. \({UNKNOWN} requests in") as caught:
        make("claude-code", patience=quick(waits)).next_turn(Question("S", TASK))
    assert caught.value.retryable and len(waits) == UNKNOWN - 1
    plan(RESULT | {"result": " "})
    with pytest.raises(ProviderError, match=r"an empty answer \(3 requests"):
        make("claude-code", patience=quick(waits)).next_turn(Question("S", TASK))


@pytest.mark.parametrize("account", [OVERLOADED, LIMIT, REFUSED])
def test_requests_that_cost_nothing_are_made_for_as_long_as_patience_lasts(
    plan: Plan, account: dict[str, Any]
) -> None:
    plan(*[account] * (UNKNOWN + 1), RESULT)
    assert make("claude-code", patience=quick([])).next_turn(Question("S", TASK)).text == "Here it is. "


# tools: this author writes its tool calls into its text


def used(plan: Plan, text: str) -> tuple[ToolCall, ...]:
    plan(RESULT | {"result": text})
    turn = make("claude-code").next_turn(Question("S", TASK, TOOLS))
    assert turn.text == text and (turn.stop_reason == "tool_use") == bool(turn.calls)
    return turn.calls


def test_it_is_told_of_the_tools(plan: Plan) -> None:
    here = plan(RESULT)
    make("claude-code").next_turn(Question("S", TASK, TOOLS))
    system = kept(here)["system"]
    assert system.startswith("S\n\n# Tools\n") and "```submit" not in system
    for tool in TOOLS:
        assert tool.name == "submit" or (tool.description in system and f"```{tool.name}\n" in system)
    make("claude-code").next_turn(Question("S", TASK))
    assert kept(here)["system"] == "S"


def test_blocks_use_tools(plan: Plan) -> None:
    tip = {"lesson": "Say: per_row.", "failed": "trace/call", "fix": "said it"}
    words = "".join(f"{name}: {value}\n" for name, value in tip.items())
    text = f"```check\n{TOY_KERNEL}```\nand\n```read\nper_row\n```\n```propose_tip\n{words}```\n"
    calls = (
        ToolCall("1", "check", {"source": TOY_KERNEL}),
        ToolCall("2", "read", {"page": "per_row"}),
        ToolCall("3", "propose_tip", tip),
    )
    assert used(plan, text) == calls
    both = used(plan, text + fenced(BROKEN))
    assert both == (*calls, ToolCall("4", "submit", {"source": BROKEN}))
    assert used(plan, fenced(TOY_KERNEL)) == () == used(plan, "```bash\nls\n```\nI read `per_row`.")


def test_a_run_with_tools(plan: Plan, tmp_path: Path, runs_home: Path, no_compiler: None) -> None:
    """Run the loop with this provider. Each use of tools is a turn, which is recorded and charged separately.
    The next prompt contains the results of the tools."""
    looks = f"```check\n{BROKEN}```\n```read\nper_row\n```\n"
    here = plan(RESULT | {"result": looks}, RESULT | {"result": fenced(TOY_KERNEL)})
    run, notes = runs.start(write_toy(tmp_path), HEADER | {"provider": "claude-code"}), Notes()
    with run.journal:
        outcome = Loop(run.journal, run.spec, assembly.task_of(run), make("claude-code"), notes).run()
        kinds = [event.kind for event in run.journal.events()]
        (answer, *_) = [e.payload for e in run.journal.events() if e.kind == "answer"]
    assert outcome.report.status == "checked" and outcome.authorship.attempts == 1
    assert kinds == ["prompt", "reserved", "answer", "draft", "reserved", "answer", "report"]
    assert submission(Turn.from_json(answer)) is None and notes.tools[0].startswith("check")
    asked = kept(here)["prompt"]
    assert looks in asked and "gemm() missing" in asked and "per_row" in asked.rpartition(looks)[2]


# costs


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[BudgetLedger]:
    with Journal.create(tmp_path / "journal.db", {"run": "r"}) as journal:
        yield BudgetLedger(journal, turn=1)


def test_dollars_are_those_the_command_tells_or_its_models_prices(plan: Plan) -> None:
    def dollars(**changes: Any) -> float | None:
        plan(RESULT | changes)
        return make("claude-code").next_turn(Question("S", TASK)).dollars

    models = {
        "claude-opus-4-5": {"inputTokens": 5, "outputTokens": 7, "cacheReadInputTokens": 11},
        "claude-haiku-4-5": {"inputTokens": 3, "cacheCreationInputTokens": 13},
    }
    opus, haiku = price("claude-opus-4-5", Usage(5, 7, 11)), price("claude-haiku-4-5", Usage(3, 0, 0, 13))
    assert opus and haiku
    assert dollars() == 0.001242
    for unknown in (None, "dear", -1, float("nan")):
        assert dollars(total_cost_usd=unknown, modelUsage=models) == pytest.approx(opus + haiku)
    assert dollars(total_cost_usd=None, modelUsage=models | {"claude-of-nowhere": {}}) is None
    assert dollars(total_cost_usd=None, modelUsage=None) is None


@pytest.mark.parametrize(("model", "known"), [("claude-opus-4-5", True), ("opus", False), (None, False)])
def test_a_request_is_reserved_before_it_and_stays_charged_where_it_is_killed(
    plan: Plan, ledger: BudgetLedger, model: str | None, known: bool
) -> None:
    plan(hangs=True)
    with pytest.raises(ProviderError):
        options = {"model": model, "max_tokens": 4000, "time_limit": 0.2, "patience": ONCE}
        make("claude-code", **options).next_turn(Question("the system", TASK, meter=ledger))
    read = tokens("the system") + tokens(TASK[0].text)
    worst = price("claude-opus-4-5", Usage(cache_write_tokens=read, output_tokens=4000)) if known else 0.0
    assert worst is not None and ledger.spent() == Spent(read + 4000, worst, read + 4000, worst)


def test_what_a_failure_tells_settles_its_request(plan: Plan, ledger: BudgetLedger) -> None:
    def fails(**answer: Any) -> Spent:
        plan(**answer)
        before = ledger.spent().tokens
        with pytest.raises(ProviderError):
            make("claude-code", patience=ONCE).next_turn(Question("S", TASK, meter=ledger))
        found = ledger.spent()
        return Spent(found.tokens - before, found.dollars, found.uncertain_tokens)

    assert fails(**printed(*CUT_FOUR_TIMES)) == Spent(4 * WHOLE, 0.004968)
    assert fails(**printed(*DECLINED)).tokens == WHOLE
    assert fails(stderr="error: unknown option '--tools'", status=1).tokens == 0
    for account in (OVERLOADED, LIMIT, REFUSED, failed("Not logged in · Please run /login")):
        assert fails(**printed(account)) == Spent(0, 0.006210)
    half = response("half an ", stop=None)  # it was cut off, so its number of tokens is unknown
    for broken in (failed("API Error: told in the stream", 529), RESET | {"usage": RESULT["usage"]}):
        assert fails(**printed(*half, broken)).tokens > 32_000
    assert fails(stderr="boom", status=134).tokens > 32_000


def test_an_answer_shrinks_to_what_is_left(plan: Plan, ledger: BudgetLedger) -> None:
    here = plan(RESULT)
    make("claude-code").next_turn(Question("S", TASK))
    assert kept(here)["env"]["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "32000"
    ledger.limits = RunLimits(tokens=5000)
    make("claude-code").next_turn(Question("S", TASK, meter=ledger))
    left = 5000 - tokens("S") - tokens(TASK[0].text)
    assert kept(here)["env"]["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == str(left)
    with pytest.raises(OutOfBudget, match="5,000 of 5,000 tokens"):  # the first request is not settled
        make("claude-code").next_turn(Question("S", TASK, meter=ledger))
    ledger.limits = RunLimits(tokens=10_000)
    plan(printed(*CUT_FOUR_TIMES))
    with pytest.raises(OutOfBudget, match="the answer was cut off at 4,9.. tokens"):
        make("claude-code").next_turn(Question("S", TASK, meter=ledger))


def test_it_waits_until_the_deadline_at_most(plan: Plan) -> None:
    plan(hangs=True)
    with pytest.raises(ProviderError, match="time ended before an answer came: .*not answer within 0"):
        make("claude-code").next_turn(Question("S", TASK, deadline=time.monotonic() + 0.2))


def test_one_that_hangs_is_ended_with_all_it_started(plan: Plan) -> None:
    here = plan(hangs=True)
    with pytest.raises(ProviderError, match="did not answer within 2 s; resume"):
        make("claude-code", time_limit=2.0, patience=ONCE).next_turn(Question("S", TASK))
    child = int((here / "child").read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# This stand-in answers, and also starts a process in another session. That process keeps writing into the
# TMPDIR of the stand-in.
LITTERING = f"""#!{sys.executable}
import os, subprocess, sys
here = os.path.dirname(os.path.abspath(__file__))
code = "import os, time; n = 0; end = time.time() + 5\\nwhile time.time() < end:\\n    n += 1\\n    open(" + \
    "os.environ['TMPDIR'] + f'/{{n}}', 'w').close()"
litter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                          start_new_session=True)
open(here + "/litter", "w").write(str(litter.pid))
while len(os.listdir(os.environ["TMPDIR"])) < 50:
    pass
sys.stdout.write(open(here + "/says").read())
"""


def test_an_answer_is_not_lost_to_what_the_command_leaves_behind(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = plan(RESULT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (here / "says").write_text(_planned(RESULT)["stdout"])
    (here / "claude").write_text(LITTERING)
    try:
        assert make("claude-code").next_turn(Question("S", TASK)).text == "Here it is. "
    finally:
        os.kill(int((here / "litter").read_text()), signal.SIGKILL)


def test_a_disk_that_fills_up_meanwhile_loses_no_answer(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is not lost if the command fills the disk that holds the command's scratch folder. The
    stand-in fills the disk only if this user may mount a small disk."""
    with mounted(tmp_path / "disk", 1 << 20) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        plan(_planned(RESULT) | {"fills": os.path.ismount(disk)})
        assert make("claude-code", patience=ONCE).next_turn(Question("S", TASK)).text == "Here it is. "


def test_a_command_that_cannot_be_started_is_tried_again_and_costs_nothing(
    plan: Plan, ledger: BudgetLedger
) -> None:
    """For example, the command cannot be started while it is being updated, or while the disk of the scratch
    folder is full."""
    here = plan(RESULT)

    def back(seconds: float) -> None:
        (here / "gone").rename(here / "claude")

    author = make("claude-code", patience=Patience(sleep=back))
    (here / "claude").rename(here / "gone")
    heard: list[str] = []
    question = Question("S", TASK, meter=ledger, say=heard.append)
    assert author.next_turn(question).text == "Here it is. "
    assert "claude could not be started: " in "".join(heard) and "No such file" in "".join(heard)
    assert ledger.spent().tokens == tokens("S") + tokens(TASK[0].text) + 32_000  # only for the second request


def test_a_command_on_a_relative_path(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plan(RESULT).parent)
    monkeypatch.setenv("PATH", "bin")
    assert make("claude-code").next_turn(Question("S", TASK)).text == "Here it is. "


def test_unknown_fields_and_a_missing_account_do_no_harm(plan: Plan) -> None:
    account = {"type": "result", "subtype": "success", "usage": None, "news": 1}
    odd = [{"type": "stream_event", "event": event} for event in (None, {}, {"delta": 1}, {"type": ["x"]})]
    plan(printed(*odd, *response("x"), account))
    turn = make("claude-code").next_turn(Question("S", TASK))
    assert (turn.usage, turn.author) == (Usage(), "Claude via claude-code")


@pytest.mark.parametrize("model", [None, "opus", "claude-of-nowhere"])
def test_dollars_that_cannot_be_reserved_are_refused_at_the_start(
    plan: Plan, tmp_path: Path, runs_home: Path, model: str | None
) -> None:
    plan(RESULT)
    limits = BudgetOptions(budget_dollars=1.0).limits()
    with pytest.raises(typer.BadParameter, match="no price is known for .*; give --model a full name"):
        setup.refuse_uncounted("claude-code", limits, model)
    for provider, named in (("claude-code", "claude-opus-5-5"), ("anthropic", model), ("replay", model)):
        setup.refuse_uncounted(provider, limits, named)
    setup.refuse_uncounted("claude-code", BudgetOptions(budget_tokens=9).limits(), model)
    flags = ["--model", model] if model else []
    options = ["--provider", "claude-code", "--no-gpu", "--budget-dollars", "1", *flags]
    found = CliRunner().invoke(app, ["generate", str(write_toy(tmp_path)), *options])
    assert found.exit_code == 2 and "no price is known" in " ".join(found.output.split())
    assert runs.names() == []


def test_dollars_end_a_run(plan: Plan, tmp_path: Path, runs_home: Path) -> None:
    plan(RESULT | {"result": fenced(BROKEN)})
    run = runs.start(write_toy(tmp_path), HEADER | {"provider": "claude-code"})
    with run.journal:
        author, limits = make("claude-code"), RunLimits(dollars=0.001)
        loop = Loop(run.journal, run.spec, assembly.task_of(run), author, Notes(), limits=limits)
        assert "of 0.001 dollars used" in loop.run().stopped
    (found,) = past()
    assert (found.attempts, found.spent) == (1, Spent(WHOLE, 0.001242))


def test_a_run_by_the_command_line(plan: Plan, tmp_path: Path) -> None:
    plan(RESULT | {"result": fenced(TOY_KERNEL)})
    spec = write_toy(tmp_path)
    done = coda_agent(
        "generate", spec, "--provider", "claude-code", "--no-gpu", CODA_AGENT_RUNS=str(tmp_path / "r")
    )
    assert done.returncode == 0, done.stderr
    assert "checked" in done.stdout
