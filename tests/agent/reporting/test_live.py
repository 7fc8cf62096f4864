"""Live progress of a run, in a terminal and through a pipe."""

from __future__ import annotations

import io
import signal
from pathlib import Path

from attending import PATIENCE, expect, going, terminal
from authoring import BROKEN, fenced, write_toy
from rich.console import Console

from coda_agent.agent.reporting.progress import LiveView
from coda_agent.agent.run import history


def test_the_live_view_takes_white_space() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with LiveView(console) as watch:
        watch.attempt(1, 6)
        for words in ("\n\n", " ", "thinking\n", "[/x]"):
            watch.text(words)
        watch.gate("trace", "started")
        watch.gate("trace", "passed")


class Overtaken(LiveView):
    """A view whose words are gone at the second read, as if the loop had begun the next attempt between the
    two reads."""

    looks = 0

    @property
    def _words(self) -> str:
        self.looks += 1
        return "thinking" if self.looks == 1 else ""

    @_words.setter
    def _words(self, words: str) -> None:
        pass


def test_the_row_goes_on_while_the_loop_does() -> None:
    watch = Overtaken(Console(file=io.StringIO(), force_terminal=True))
    assert [str(row) for row in watch._view().renderables][-1] == "thinking"
    assert watch.looks == 1


def test_a_pipe_gets_whole_lines() -> None:
    file = io.StringIO()
    with LiveView(Console(file=file, width=80)) as watch:
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


def test_a_run_has_a_row_and_ctrl_c_stops_it(runs_home: Path, tmp_path: Path) -> None:
    hands = tmp_path / "hands"
    options = ["--provider", "handoff", "--directory", str(hands), "--no-gpu"]
    command = ["generate", str(write_toy(tmp_path)), *options]
    with terminal() as screen, going(command, [hands / "prompt-1.md"], **screen.streams) as process:
        (hands / "answer-1.md").write_text(f"{fenced(BROKEN)}<!-- end -->")
        expect((hands / "prompt-2.md").exists, process)
        (past,) = history.past()
        row = f"1 {past.run} rejected waiting"
        expect(lambda: row in " ".join(screen.seen.split()), process)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=PATIENCE)
    assert process.returncode == 130
    assert f"continue with: coda-agent resume {past.run}" in screen.seen
    (past,) = history.past()
    assert (past.status, past.attempts) == ("rejected", 1)
