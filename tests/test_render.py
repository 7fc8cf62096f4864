"""What a person sees: the live view takes any text, and a pipe gets whole lines."""

from __future__ import annotations

import io

from rich.console import Console

from agent.render import Watch


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
