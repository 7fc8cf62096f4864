"""What a person sees of a run under way, at a terminal and through a pipe, and the keys that stop it."""

from __future__ import annotations

import io
from pathlib import Path

from attending import eventually, going, terminal
from authoring import BROKEN, fenced, write_toy
from rich.console import Console

from agent import history
from agent.live import Watch


def test_the_live_view_takes_white_space() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Watch(console) as watch:
        watch.attempt(1, 6)
        for words in ("\n\n", " ", "thinking\n", "[/x]"):
            watch.text(words)
        watch.gate("trace", "started")
        watch.gate("trace", "passed")


def test_a_pipe_gets_whole_lines() -> None:
    file = io.StringIO()
    with Watch(Console(file=file, width=80)) as watch:
        for words in (
            "every",
            "thing rides in ",
            "the epilogue\n```python\nfrom prim",
            "itives import gemm\n",
        ):
            watch.text(words)
    assert [line.strip() for line in file.getvalue().splitlines()] == [
        "everything rides in the epilogue",
        "```python",
        "from primitives import gemm",
    ]


def test_a_run_has_a_row_and_a_key_that_stops_it(runs_home: Path, tmp_path: Path) -> None:
    hands = tmp_path / "hands"
    options = ["--provider", "handoff", "--directory", str(hands), "--no-gpu"]
    command = ["generate", str(write_toy(tmp_path)), *options]
    with terminal() as screen, going(command, [hands / "prompt-1.md"], **screen.streams) as process:
        (hands / "answer-1.md").write_text(fenced(BROKEN))
        eventually((hands / "prompt-2.md").exists)
        (past,) = history.past()
        eventually(lambda: f"1 {past.run} rejected waiting" in " ".join(screen.seen.split()))
        screen.press("x")
        screen.press("1")
        process.wait(timeout=60)
    assert process.returncode == 130
    assert "1 or q stops it" in screen.seen and f"coda-agent resume {past.run} goes on" in screen.seen
    (past,) = history.past()
    assert (past.status, past.attempts) == ("rejected", 1)
