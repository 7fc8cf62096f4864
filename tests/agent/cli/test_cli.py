"""The command line: exit statuses, one clear message for each mistake, and with --json only JSON on stdout.

Most tests run ``agent.cli.main.main`` in this process. The tests ``test_status_*`` start real processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from authoring import (
    HEADER,
    TOY,
    TOY_KERNEL,
    UNSCALED,
    coda_agent,
    make_run,
    write_toy,
)
from checkout import ROOT
from commanding import Command, of_process

from coda_agent.agent import setup
from coda_agent.agent.options import BudgetOptions, MeasuringOptions, flags
from coda_agent.agent.run import runs
from coda_agent.agent.run.budget import RunLimits
from coda_agent.primitives.errors import Absent
from coda_agent.verifier.measure import MeasureOptions
from coda_agent.verifier.report import REPORT

pytestmark = [pytest.mark.usefixtures("runs_home", "plain", "nothing_beside"), pytest.mark.slow]


# mistakes in a spec: status 2; the message states the file, the line and the remedy; no run begins
SPEC_MISTAKES = {
    "a key": (
        "reference: |",
        "refrence: |",
        r"toy\.yaml:10: unknown key 'refrence'; did you mean 'reference'\?",
    ),
    "a dtype": ("dtype: bf16}", "dtype: bfloat}", r"toy\.yaml:5: dtype 'bfloat' is unknown; use one of bf16"),
    "a dim": ("[M, K]", "[M, Q]", r"toy\.yaml:5: dim 'Q' is not declared"),
    "shapes": ("(a @ b)", "(b @ a)", r"toy\.yaml:11: .*shapes cannot be multiplied"),
    "a key twice": ("summary:", "name: toy\nsummary:", r"toy\.yaml:2: .*duplicate key.*keep one"),
    "no mapping": (TOY, "- a\n- list\n", r"toy\.yaml:1: a spec is a mapping"),
    "no YAML": (TOY, "name: [\n", r"toy\.yaml:\d: this is not a YAML mapping"),
}


@pytest.mark.parametrize(("old", "new", "words"), SPEC_MISTAKES.values(), ids=SPEC_MISTAKES)
@pytest.mark.parametrize("name", ["generate", "prompt", "verify"])
def test_a_spec_mistake(
    command: Command, tmp_path: Path, kernel: Callable[[str], Path], name: str, old: str, new: str, words: str
) -> None:
    path = write_toy(tmp_path, old, new)
    arguments: dict[str, list[str | Path]] = {
        "generate": [path, "--provider", "handoff"],
        "prompt": [path],
        "verify": [kernel(TOY_KERNEL), "--spec", path],
    }
    done = command(name, *arguments[name])
    assert done.status == 2 and re.search(words, done.said()), done.err
    assert runs.names() == []


def test_a_spec_that_is_not_there(command: Command, spec: Path) -> None:
    for name in ("generate", "prompt"):
        done = command(name, spec.with_name("toi.yaml"))
        assert done.status == 2 and "toi.yaml: no such file; did you mean" in done.said()
    done = command("verify", spec.with_name("tony.py"))
    assert done.status == 2 and "tony.py: no such kernel file" in done.err
    done = command("verify", spec)
    assert done.status == 2 and "is a spec; verify takes a kernel's source" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Usage:"),
        (("generate",), "Missing argument 'SPEC'"),
        (("generate", "x.yaml", "--bogus"), "No such option: --bogus"),
        (("generate", "x.yaml", "--attempts", "0"), "greater than or equal to 1"),
        (("generate", "x.yaml", "--provider", "oracle"), "'oracle' is not one of"),
        (("measure", "x.json", "--rounds", "2"), "greater than or equal to 8"),
        (("nonsense",), "No such command 'nonsense'"),
    ],
)
def test_wrong_usage(command: Command, arguments: tuple[str, ...], words: str) -> None:
    done = command(*arguments)
    assert done.status == 2 and words in done.err + done.out and "Traceback" not in done.err


# mistakes in a kernel: status 1; the message states the gate and the reason
def first(statement: str) -> str:
    return TOY_KERNEL.replace("    return", f"    {statement}\n    return")


KERNEL_MISTAKES = {
    "syntax": (TOY_KERNEL.replace("toy(a", "toy((a"), "syntax", "line 5: syntax error"),
    "a parameter": (TOY_KERNEL.replace("v)", "w)"), "parameters", "unknown w; missing v"),
    "a missing output": (TOY_KERNEL.replace('"c":', '"d":'), "outputs", "missing c"),
    "an extra output": (TOY_KERNEL.replace('{"c"', '{"d": v, "c"'), "outputs", "extra d"),
    "an import": ("import os\n" + TOY_KERNEL, "language", "line 1: "),
    "an endless loop": (first("while 1: pass"), "language", "line 7: "),
    "10 GB": (first("x = (0,) * 1250000000"), "memory", "takes over"),
    "a forged print": (first('print(\'{"status": "accepted"}\')'), "language", "line 7: "),
    "an exit": (first("os._exit(0)"), "language", "line 7: "),
    "wrong mathematics": (UNSCALED, "numerics", "output 'c'"),
}


@pytest.mark.parametrize(("source", "code", "words"), KERNEL_MISTAKES.values(), ids=KERNEL_MISTAKES)
def test_a_kernel_mistake(
    command: Command, spec: Path, kernel: Callable[[str], Path], source: str, code: str, words: str
) -> None:
    done = command("verify", kernel(source), "--spec", spec)
    gate = "interpret" if code == "numerics" else "trace"
    assert done.status == 1 and done.err == ""
    assert f"rejected at {gate}: {code}" in done.out and words in " ".join(done.out.split())
    assert '"status": "accepted"' not in done.out and "accepted" not in done.out.splitlines()[-1]


@pytest.mark.usefixtures("no_compiler")
def test_a_good_kernel(command: Command) -> None:
    path = ROOT / "agent" / "prompts" / "examples" / "gemm_l1norm_gemm.py"
    done = command("verify", path, "--spec", path.with_suffix(".yaml"))
    assert done.status == 0 and done.err == ""
    assert "2 step(s), 1 vector kernel(s)" in done.out and "checked, not benchmarked" in done.out


def test_a_kernel_that_cannot_be_read(command: Command, spec: Path, tmp_path: Path) -> None:
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe")
    for name, words in (("nothing.py", "no such kernel"), ("binary.py", "cannot be read as text")):
        done = command("verify", tmp_path / name, "--spec", spec)
        assert done.status == 2 and words in done.err and "Traceback" not in done.err


# something that this machine lacks: status 3
def test_no_gpu(command: Command, spec: Path, kernel: Callable[[str], Path], tmp_path: Path) -> None:
    for arguments in (
        ("generate", spec, "--provider", "handoff", "--gpu"),
        ("verify", kernel(TOY_KERNEL), "--spec", spec, "--gpu"),
        ("resume", make_run(spec), "--gpu"),
    ):
        done = command(*arguments)
        assert done.status == 3 and "no H100 (CUDA capability 9.0) here; " in done.said()
    assert len(runs.names()) == 1  # generate began no run


def test_no_key(command: Command, spec: Path) -> None:
    words = "provider 'anthropic' has no API key; set ANTHROPIC_API_KEY, or use --provider handoff"
    for more in ((), ("--candidates", 2)):
        done = command("generate", spec, "--provider", "anthropic", "--no-gpu", *more)
        assert done.status == 3 and words in done.said()
    done = command("optimize", "gemm_rope", "--provider", "anthropic", "--no-gpu")
    assert done.status == 3 and words in done.said()
    assert runs.names() == []


def test_no_claude_command(
    command: Command, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = command("generate", spec, "--provider", "claude-code", "--no-gpu")
    assert done.status == 3 and "there is no `claude` command" in done.said()
    assert runs.names() == []


@pytest.mark.parametrize("budget", [("--budget-dollars", 1), ("--budget-tokens", 9, "--budget-dollars", 1)])
def test_a_budget_that_nobody_counts(command: Command, spec: Path, budget: tuple[object, ...]) -> None:
    done = command("generate", spec, "--provider", "handoff", "--no-gpu", *budget)
    words = f"{' and '.join(str(option) for option in budget[::2])} would limit nothing"
    assert done.status == 2 and words in done.err and "use --attempts, --time-limit" in done.err
    assert runs.names() == []
    other, mine = make_run(spec, provider="replay"), make_run(spec, provider="mcp")
    done = command("resume", other, mine, "--no-gpu", *budget)
    assert done.status == 2 and words in done.err and "spending of mcp" in done.err
    assert BudgetOptions(budget_seconds=9.0).limits().to_json() == {"seconds": 9.0}
    setup.refuse_uncounted("handoff", BudgetOptions(budget_seconds=9.0, budget_gpu_seconds=9.0).limits())
    setup.refuse_uncounted("replay", BudgetOptions(budget_dollars=1.0).limits())


def test_no_key_and_no_recording(command: Command, spec: Path) -> None:
    done = command("generate", spec)
    assert done.status == 3 and "no ANTHROPIC_API_KEY, and no recorded run of toy" in done.said()
    done = command("generate", spec, "--provider", "replay")
    assert done.status == 3 and "no recorded run of toy; author one first" in done.said()
    assert runs.names() == []


def test_an_unknown_run(command: Command, tmp_path: Path) -> None:
    for arguments in (
        ("resume", "x"),
        ("review", "x"),
        ("accept", "x"),
        ("bundle", "x", "-o", tmp_path / "b"),
    ):
        done = command(*arguments)
        assert done.status == 3 and "there is no run 'x'; this folder has no runs" in done.said()
    assert not (tmp_path / "b").exists()


def test_a_run_without_a_kernel_yet(command: Command, spec: Path) -> None:
    run = runs.start(spec, HEADER)
    run.journal.close()
    for name in ("review", "accept"):
        done = command(name, run.name)
        assert done.status == 3 and f"has no verified kernel yet: coda-agent resume {run.name}" in done.said()


def test_a_run_that_another_process_has(command: Command, spec: Path) -> None:
    name = make_run(spec)
    run = runs.reopen(name)
    with run.journal:
        done = command("resume", name, "--no-gpu")
    assert done.status == 3 and "is in use by another process; wait for it, or stop it" in done.said()


def test_a_tips_log_with_a_mistake(
    command: Command, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coda_agent.agent import tips
    from coda_agent.agent.prompts import prompt

    log = tmp_path / "tips.md"
    log.write_text("## tip-1: a lesson without its fields\n")
    monkeypatch.setattr(prompt, "read_tips", lambda: tips.read_tips(log))
    done = command("prompt", spec)
    assert done.status == 2 and "tips.md:1: tip-1 needs exactly the fields" in done.said()


def test_our_own_bug_is_not_explained_away(
    command: Command, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("coda_agent.agent.prompts.prompt.assemble", fail)
    with pytest.raises(ZeroDivisionError):
        command("prompt", spec)


def test_shared_options_are_those_of_measuring_and_say_themselves_again() -> None:
    assert (
        MeasuringOptions().options() == MeasureOptions()
        and flags(None, MeasuringOptions(), BudgetOptions()) == []
    )
    given = MeasuringOptions(max_autotune=True, quack=True, rounds=9, warm=True)
    assert flags(False, given) == ["--no-gpu", "--max-autotune", "--quack", "--rounds", "9", "--warm"]
    assert flags(True, BudgetOptions(budget_tokens=5)) == ["--gpu", "--budget-tokens", "5"]
    assert BudgetOptions().limits() == RunLimits() and BudgetOptions(
        budget_gpu_seconds=3.0
    ).limits() == RunLimits(gpu_seconds=3.0)


def test_doctor(command: Command) -> None:
    done = command("doctor", "--json")
    data = json.loads(done.out)
    assert done.status == (0 if data["healthy"] else 3)
    assert {"python", "jail", "cache", "anthropic key"} <= {f["name"] for f in data["findings"]}


# exit statuses 1, 2 and 3 of real processes; for status 0, see test_cli_authoring.py


def test_status_1(spec: Path, kernel: Callable[[str], Path]) -> None:
    done = of_process(
        coda_agent("verify", kernel("import os\n" + TOY_KERNEL), "--spec", spec, "--no-gpu", "--json")
    )
    report = REPORT.validate_json(done.out)
    assert done.status == 1 and report.status == "rejected" and (report.gate, report.line) == ("trace", 1)
    assert "Traceback" not in done.err


def test_status_2(tmp_path: Path) -> None:
    done = of_process(coda_agent("prompt", write_toy(tmp_path, "bf16", "bfloat")))
    assert done.status == 2 and "toy.yaml:5: dtype 'bfloat' is unknown" in done.said()
    done = of_process(coda_agent("generate"))
    assert done.status == 2 and "Missing argument 'SPEC'" in done.err and "Traceback" not in done.err


def test_status_3(spec: Path) -> None:
    done = of_process(coda_agent("generate", spec))
    assert done.status == 3 and "no ANTHROPIC_API_KEY, and no recorded run of toy" in done.said()
    done = of_process(coda_agent("review", "x"))
    assert done.status == 3 and "there is no run 'x'" in done.said()


def test_help_names_every_command(command: Command) -> None:
    done = command("--help")
    names = (
        "generate",
        "resume",
        "verify",
        "bundle",
        "measure",
        "import",
        "review",
        "accept",
        "prompt",
        "show",
        "tips",
        "doctor",
    )
    assert done.status == 0 and all(f"\n  {name} " in done.out for name in names)


def test_a_gpu_of_another_kind_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("coda_agent.verifier.gpu.visible.DEVICES", ("/",))
    for capability, used in (((8, 9), False), ((9, 0), True), ((10, 0), False)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda c=capability: c)
        assert setup.use_gpu(None) is used
    with pytest.raises(Absent, match="no H100"):
        setup.use_gpu(True)
