"""The provider that hands each prompt to whoever is there: any agent or person can be the author.

Turn N writes `prompt-N.md` into a directory and waits for `answer-N.md` beside it. An answer counts once it
is not blank, its size and time have stood still for a moment and its last block of code is closed: one that
is renamed into place is read whole, and so is one that is written there with pauses in its code. A file named
`stop` in the directory ends the wait.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

from agent.providers import Message, ProviderError, Question, Turn, Usage
from primitives.files import write_atomic

FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")  # Markdown's, as it opens or closes a block of code


class Handoff:
    """Prompts and answers as files in `directory`, which is made where it is missing.

    `author` names whoever answers, for the reports. `time_limit` bounds the wait for one answer, `settle` is
    how long an answer must have stood still, `patience` how long one whose last block of code is open, which
    is then taken as it is; `poll` how often to look; all in seconds.
    """

    name = "handoff"

    def __init__(
        self,
        directory: str | Path,
        author: str,
        *,
        run: str = "",
        time_limit: float = 3600.0,
        settle: float = 1.0,
        patience: float = 60.0,
        poll: float = 0.2,
    ):
        self._directory = Path(directory)
        self._author = author
        self._run = run
        if not 0 <= time_limit < math.inf:
            raise ProviderError(f"a time limit of {time_limit} s", "give a positive number of seconds")
        self._time_limit = time_limit
        self._settle = settle
        self._patience = patience
        self._poll = poll

    def next_turn(self, question: Question) -> Turn:
        """The content of the answer file; usage is unknown and counts as zero.

        An answer that is already there is used without writing its prompt again. Raises ProviderError on the
        time limit or the question's deadline (retryable), a `stop` file, or files that cannot be used;
        KeyboardInterrupt passes after a word to `say`.
        """
        say, number = question.say, question.number
        prompt, answer = self._directory / f"prompt-{number}.md", self._directory / f"answer-{number}.md"
        try:
            self._put(prompt, answer, _render(number, question.system, question.messages, self._run))
            say(f"prompt {prompt} awaits its answer in {answer}\n")
            text = self._wait(answer, question.deadline)
        except OSError as error:
            remedy = "give a directory that can be read and written"
            raise ProviderError(f"handoff: {error}", remedy) from error
        except KeyboardInterrupt:
            say(f"interrupted; {prompt} stays, and a resumed run goes on waiting for {answer}\n")
            raise
        return Turn(text, Usage(), f"{self._author} via handoff", "end_turn")

    def _put(self, prompt: Path, answer: Path, text: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        if not answer.exists():
            write_atomic(prompt, text)
        elif prompt.exists() and prompt.read_bytes() != text.encode():
            raise ProviderError(  # else an old run's answer would pass for this one's
                f"{answer} answers another prompt than the present one ({prompt} differs)",
                "use a fresh directory, or remove both files",
            )

    def _wait(self, answer: Path, deadline: float | None) -> str:
        limit = time.monotonic() + self._time_limit
        end = limit if deadline is None else min(limit, deadline)
        seen, since, text = None, time.monotonic(), ""
        while True:
            self._check_stop()
            state, now = _state(answer), time.monotonic()
            if state != seen:
                seen, since, text = state, now, ""
            if state and now - since >= self._settle:
                text = text or _read(answer)
                if text and (_closed(text) or now - since >= self._patience):
                    return text
            if now >= end:
                raise self._late(answer, text)
            time.sleep(self._poll)

    def _late(self, answer: Path, text: str) -> ProviderError:
        """The time is up. ``text``: what the file holds, of which the last block of code is open."""
        late = "is not whole, its last block of code is open," if text else "did not come"
        remedy = "close it with ``` and resume the run" if text else "resume the run to wait again"
        return ProviderError(
            f"{answer} {late} within {self._time_limit:g} s",
            f"{remedy}, with a larger --time-limit where that is too short",
            retryable=True,
        )

    def _check_stop(self) -> None:
        stop = self._directory / "stop"
        if stop.exists():
            raise ProviderError(f"stopped by {stop}", "remove that file and resume the run to go on")


def _state(path: Path) -> tuple[int, int, int] | None:
    """What changes when the file does; None where it is missing or empty."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if found.st_size else None


def _read(answer: Path) -> str:
    """The answer; "" while it is blank."""
    try:
        text = answer.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        remedy = "save it as UTF-8 and resume the run"
        raise ProviderError(f"{answer} is not UTF-8: {error}", remedy) from error
    return text if text.strip() else ""


def _closed(text: str) -> bool:
    """Whether no block of code is open at the end."""
    fence = ""
    for found in map(FENCE.fullmatch, text.splitlines()):
        if found is None:
            continue
        marks, words = found.groups()
        if not fence:
            fence = "" if "`" in marks and "`" in words else marks  # else it is code within a line
        elif marks.startswith(fence) and not words.strip():
            fence = ""
    return not fence


def _render(number: int, system: str, messages: Sequence[Message], run: str) -> str:
    # The run tells its prompts from those of another run of the same spec, and so their answers.
    parts = [f"<!-- run {run} -->"] if run else []
    parts.append(f"<!-- system -->\n\n{system}")
    parts += [f"<!-- message {i}: {m.role} -->\n\n{m.text}" for i, m in enumerate(messages, 1)]
    name = f"answer-{number}.md"
    parts.append(
        f"<!-- how to answer -->\n\nWrite your next message, and nothing else, to `{name}` in this directory:"
        f" write it to another name first and rename it to `{name}` when it is whole."
    )
    return "\n\n".join(parts) + "\n"
