"""The provider that hands each prompt to whoever is there: any agent or person can be the author.

Turn N writes `prompt-N.md` into a directory and waits for `answer-N.md` beside it. An answer counts once it
is not blank and its size and time have stood still for a moment, so one that is written elsewhere and renamed
into place is never read half-written. A file named `stop` in the directory ends the wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from agent.providers import Message, ProviderError, Question, Turn, Usage
from primitives.files import write_atomic


class Handoff:
    """Prompts and answers as files in `directory`, which is made where it is missing.

    `author` names whoever answers, for the reports. `time_limit` bounds the wait for one answer, `settle` is
    how long an answer must have stood still, `poll` how often to look; all in seconds.
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
        poll: float = 0.2,
    ):
        self._directory = Path(directory)
        self._author = author
        self._run = run
        if not 0 <= time_limit < math.inf:
            raise ProviderError(f"a time limit of {time_limit} s", "give a positive number of seconds")
        self._time_limit = time_limit
        self._settle = settle
        self._poll = poll

    def next_turn(self, question: Question) -> Turn:
        """The content of the answer file; usage is unknown and counts as zero.

        An answer that is already there is used without writing its prompt again. Raises ProviderError on the
        time limit (retryable), a `stop` file, or files that cannot be used; KeyboardInterrupt passes after a
        word to `say`.
        """
        say, number = question.say, question.number
        prompt, answer = self._directory / f"prompt-{number}.md", self._directory / f"answer-{number}.md"
        try:
            self._put(prompt, answer, _render(number, question.system, question.messages, self._run))
            say(f"prompt {prompt} awaits its answer in {answer}\n")
            text = self._wait(answer)
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

    def _wait(self, answer: Path) -> str:
        deadline = time.monotonic() + self._time_limit
        seen, since = None, time.monotonic()
        while True:
            self._check_stop()
            state, now = _state(answer), time.monotonic()
            if state != seen:
                seen, since = state, now
            if state and now - since >= self._settle and (text := _read(answer)):
                return text
            if now >= deadline:
                raise ProviderError(
                    f"{answer} did not come within {self._time_limit:g} s",
                    "resume the run to wait again, or raise the time limit",
                    retryable=True,
                )
            time.sleep(self._poll)

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
