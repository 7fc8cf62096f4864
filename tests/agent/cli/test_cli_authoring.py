"""The commands ``generate`` and ``resume``. Most tests run the command in this process; the author's answers
are in files before the command starts. Other tests stop, interrupt and resume real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fake_messages as fake
import pytest
from authoring import (
    BROKEN,
    RECORDINGS,
    SPECS,
    TOY_KERNEL,
    coda_agent,
    fenced,
    make_run,
    measured,
)
from checkout import ROOT
from commanding import Command, Done, of_process

from coda_agent.agent import providers, setup
from coda_agent.agent.options import Further, flags
from coda_agent.agent.reporting import progress as live
from coda_agent.agent.run import runs
from coda_agent.agent.run.budget import RunLimits
from coda_agent.agent.storage.journal import read_export
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.verifier import loading
from coda_agent.verifier.baselines.quack import LIBRARY_ARMS, MATMUL
from coda_agent.verifier.gates import Progress
from coda_agent.verifier.incumbent import Incumbent
from coda_agent.verifier.measure import MeasureOptions
from coda_agent.verifier.report import REPORT, Checked, QuackTuned
from coda_agent.verifier.spec import file
from coda_agent.verifier.stages import Checkpoint

pytestmark = [pytest.mark.usefixtures("runs_home", "plain", "nothing_beside"), pytest.mark.slow]


def answered(directory: Path, *answers: str) -> Path:
    directory.mkdir(exist_ok=True)
    for number, answer in enumerate(answers, 1):
        (directory / f"answer-{number}.md").write_text(f"{answer}\n<!-- end -->\n")
    return directory


@pytest.mark.usefixtures("no_compiler")
def test_generate_says_how_it_went(command: Command, spec: Path, tmp_path: Path) -> None:
    directory = answered(tmp_path / "handoff", fenced(BROKEN), fenced(TOY_KERNEL))
    options = ("--provider", "handoff", "--directory", directory, "--author", "[/x] A")
    done = command("generate", spec, *options, "--no-gpu")
    assert done.status == 0 and done.err == ""
    (name,) = runs.names()
    assert f"run {name}, provider handoff\n" in done.out
    assert "attempt 1: rejected" in done.out and "trace/python: line 7: TypeError: gemm() missing" in done.out
    assert "attempt 2: checked" in done.out and "written by [/x] A via handoff in 2 attempt(s)" in done.out
    assert f"coda-agent bundle {name}" in done.out


@pytest.mark.usefixtures("no_compiler")
def test_a_run_finds_its_answers_from_every_folder(
    command: Command, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answered(Path("hands"), fenced(BROKEN), fenced(TOY_KERNEL))
    options = ("--provider", "handoff", "--directory", "hands", "--attempts", 1, "--no-gpu")
    assert command("generate", spec.absolute(), *options).status == 1
    (name,) = runs.names()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert command("resume", name, "--attempts", 2, "--no-gpu", "--time-limit", 20).status == 0


@pytest.mark.usefixtures("no_compiler")
def test_a_command_reads_its_spec_and_makes_its_provider_once(
    command: Command, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def noted(usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(of: object, *given: Any, **more: Any) -> Any:
            seen.append(str(of))
            return usual(of, *given, **more)

        return call

    monkeypatch.setattr(loading, "read", noted(file.read))
    monkeypatch.setattr(providers, "make", noted(providers.make))
    directory = answered(tmp_path / "handoff", fenced(TOY_KERNEL))
    done = command("generate", spec, "--provider", "handoff", "--directory", directory, "--no-gpu")
    assert (done.status, seen) == (0, [f"{spec}", "handoff"])
    seen.clear()
    (name,) = runs.names()
    assert command("resume", name, "--no-gpu").status == 0
    assert seen == [f"{runs.folder(name) / 'spec.yaml'}", "handoff"]


def test_resume_takes_what_may_be_more(command: Command, spec: Path, tmp_path: Path) -> None:
    """The run's header limits the run to one attempt. Options of ``resume`` replace the limits in the header,
    but only while this ``resume`` runs."""
    directory = answered(tmp_path / "handoff", "no code")
    options = ("--provider", "handoff", "--directory", directory, "--attempts", 1)
    assert command("generate", spec, *options, "--no-gpu").status == 1
    (name,) = runs.names()
    done = command("resume", name, "--no-gpu", "--attempts", 2, "--time-limit", 0.1)
    assert done.status == 3 and "did not come within 0.1 s" in done.err and "--time-limit" in done.err
    (directory / "answer-2.md").write_text("nor here\n<!-- end -->\n")
    more = ("--attempts", 2, "--time-limit", 60, "--improve", 2)
    done = command("resume", name, "--no-gpu", *more)
    assert done.status == 1 and "attempt 2: rejected" in done.out
    assert f"in 2 attempt(s), run {name}" in command("resume", name, "--no-gpu").out
    assert flags(None, Further(attempts=2, time_limit=60.0)) == ["--attempts", "2", "--time-limit", "60.0"]


def test_what_is_given_replaces_the_header_s(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr("coda_agent.agent.providers.make", lambda name, **options: made.update(options))
    monkeypatch.setattr("coda_agent.agent.run.loop.Loop.run", lambda loop: made.update(vars(loop)))
    limits = {"tokens": 5000, "dollars": 2.0}
    run = runs.reopen(make_run(spec, provider="claude-code", limits=limits, improve=1))
    given = Further(attempts=9, improve=3, max_tokens=2048, time_limit=5.0).header()
    with run.journal, live.LiveView(setup.console(True)) as watch:
        setup.author(run, watch, None, given | {"limits": {"dollars": 9.0}})
        assert (made["max_tokens"], made["time_limit"]) == (2048, 5.0)
        assert (made["attempts"], made["improve"]) == (9, 3)
        assert made["limits"] == RunLimits(tokens=5000, dollars=9.0)
        setup.author(run, watch, None)
        assert (made["attempts"], made["improve"], made["limits"]) == (6, 1, RunLimits(5000, 2.0))


def test_a_run_s_name_is_not_coloured_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console = setup.console(False)
    with console.capture() as shown:
        console.print("the best: toy-20261121-032539")
    assert shown.get() == "the best: toy-20261121-032539\n"


@pytest.mark.usefixtures("no_compiler")
def test_generate_with_a_gpu(
    command: Command, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms: list[tuple[str, ...]] = []
    before = {"large": QuackTuned(gpu="a GPU", version="1", arms={})}
    monkeypatch.setattr("coda_agent.agent.storage.quack_tunings.quack", lambda spec: before)

    def measure(
        spec: Any,
        kernel: KernelSource,
        options: MeasureOptions,
        *,
        progress: Progress,
        keep: Checkpoint,
        kept: Incumbent | None,
        quack: Mapping[str, QuackTuned],
    ) -> object:
        assert kept is None and kernel.edited is None and quack == before
        arms.append(options.arms)
        progress("benchmark", "case large")
        return measured(spec, kernel.program)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("coda_agent.verifier.gpu.visible.DEVICES", ("/",))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("coda_agent.verifier.measure.measure", measure)
    directory = answered(tmp_path / "handoff", fenced(TOY_KERNEL))
    done = command("generate", spec, "--provider", "handoff", "--directory", directory, "--gpu", "--quack")
    assert done.status == 0 and "accepted: toy" in done.out
    assert f"coda-agent accept {runs.names()[0]} --commit" in done.out
    assert arms == [("torch.compile", "cuBLAS matmul", MATMUL, *LIBRARY_ARMS)]


@pytest.mark.usefixtures("no_compiler")
def test_json_is_all_there_is_on_stdout(command: Command, spec: Path, tmp_path: Path) -> None:
    directory = answered(tmp_path / "handoff", fenced(TOY_KERNEL))
    done = command("generate", spec, "--provider", "handoff", "--directory", directory, "--no-gpu", "--json")
    assert done.status == 0 and isinstance(REPORT.validate_json(done.out), Checked)
    assert "provider handoff" in done.err
    done = command("resume", runs.names()[0], "--no-gpu", "--json")
    assert done.status == 0 and isinstance(REPORT.validate_json(done.out), Checked)


def background(*arguments: object) -> subprocess.Popen[str]:
    # If pytest is a background job of a shell, pytest and its child processes ignore SIGINT. Therefore
    # ``preexec_fn`` resets SIGINT.
    return subprocess.Popen(
        [sys.executable, "-m", "coda_agent.agent.cli.main", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "220"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        restore_signals=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def finished(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    return Done(process.returncode, out, err)


def appears(path: Path, after: float = 0.0) -> None:
    """Wait until ``path`` exists and was last written after the time ``after``."""
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_mtime <= after:
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def test_a_handoff_is_stopped_interrupted_and_resumed(spec: Path, tmp_path: Path) -> None:
    directory = tmp_path / "handoff"
    prompt, stop = directory / "prompt-1.md", directory / "stop"
    options = ("--provider", "handoff", "--directory", directory, "--author", "Ada", "--attempts", 2)
    waiting = background("generate", spec, *options, "--no-gpu")
    appears(prompt)
    stop.touch()
    done = finished(waiting)
    assert done.status == 3 and f"coda-agent: stopped by {stop}; remove that file and resume" in done.err
    (name,) = runs.names()
    assert f"run {name}, provider handoff" in done.out

    stop.unlink()
    written = prompt.stat().st_mtime
    waiting = background("resume", name, "--no-gpu", "--json")
    appears(prompt, after=written)
    waiting.send_signal(signal.SIGINT)
    done = finished(waiting)
    assert done.status == 130 and done.out == ""
    assert "continue with: " in done.err and done.err.endswith("coda-agent: interrupted\n")

    answered(directory, fenced(BROKEN), "I have no other idea.")
    done = of_process(coda_agent("resume", name, "--no-gpu", "--json"))
    report = REPORT.validate_json(done.out)
    assert done.status == 1 and report.status == "rejected" and report.code == "no_source"
    done = of_process(coda_agent("review", name, "--json"))
    assert done.status == 1 and REPORT.validate_json(done.out) == report


# a real process, and a real compile
def test_status_0_a_recorded_run_is_authored_again(command: Command, tmp_path: Path) -> None:
    """A visitor without a key or a GPU can run this command: it replays a recorded run, passes all gates that
    need no GPU, and really compiles."""
    path = SPECS / "gemm_rmsnorm_swiglu.yaml"
    done = of_process(coda_agent("generate", path, "--json"))
    assert done.status == 0, done.err
    report = REPORT.validate_json(done.out)
    assert isinstance(report, Checked) and [g.gate for g in report.gates][-1] == "compile"
    kernels = report.gates[3].figures["kernels"]
    assert {(k["tile"], k["pingpong"]) for k in kernels} == {("128x128", True), ("256x128", False)}
    assert all(k["hgmma"] > 0 and 0 < k["registers"] <= 255 for k in kernels)
    (name,) = runs.names()
    assert f"run {name}, provider replay" in done.err and "Traceback" not in done.err
    # The commands from here on run in this process and reuse the compiler's report.
    assert REPORT.validate_json(command("review", name, "--json").out) == report
    assert command("bundle", name, "-o", tmp_path / "b.json").status == 0
    source = tmp_path / "gemm_rmsnorm_swiglu.py"
    run = runs.reopen(name)
    with run.journal:
        source.write_text(run.journal.events()[-1].payload["source"])
        recorded, _ = read_export(RECORDINGS / f"{path.stem}.jsonl")
        assert run.journal.header["replays"] == recorded["run"] != name
    assert "HGMMA" in command("show", source, "--spec", path).out
    again = command("verify", source, "--spec", path, "--no-gpu", "--json")
    found = REPORT.validate_json(again.out)
    assert isinstance(found, Checked) and found.identity == report.identity


def test_a_key_is_in_nothing_that_a_run_leaves(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the server's errors repeat the key, the key is neither in the run's files nor in the output.
    The real SDK sends the requests."""
    key = "sk-ant-secret-0123456789"
    monkeypatch.setenv("ANTHROPIC_API_KEY", key)
    passing, final = (
        fake.status(code, kind, f"the key {key} is not welcome", retry_after_ms="10")
        for code, kind in ((500, "api_error"), (401, "authentication_error"))
    )
    with fake.FakeMessages(fake.answer(fenced(BROKEN)), passing, final) as server:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "coda_agent.agent.cli.main",
                "generate",
                str(spec),
                "--provider",
                "anthropic",
                "--no-gpu",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 3 and "[key] is not welcome" in done.stderr
    assert "answered 500" in done.stdout and any(key in value for value in server.headers[0].values())
    kept = [path.read_bytes() for path in runs.runs_dir().rglob("*") if path.is_file()]
    assert len(kept) >= 3 and key.encode() not in b"".join(
        [*kept, done.stdout.encode(), done.stderr.encode()]
    )
