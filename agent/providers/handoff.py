"""Hand prompts over as files, so that any agent or person can be the author.

Turn N writes `prompt-N.md` into a directory and waits for `answer-N.md` there. An answer is complete if its
last line is END. Without END the author may still be writing, so the answer must stay unchanged for some
time. This time is longer if the answer has no code block, or if its last code block is open. A file named
`stop` in the directory ends the wait.

The author needs access only to this directory. An answer must be a regular file of limited size. A link is
refused, because the text of its target would enter the next prompt.
"""

from __future__ import annotations

import codecs
import math
import os
import re
import stat
import time
from pathlib import Path

from coda_agent.agent.finding import Finding
from coda_agent.agent.providers import ProviderError, Question, Turn, Usage
from coda_agent.agent.providers.spec import ProviderSpec
from coda_agent.primitives.system.files import write_atomic

END = "<!-- end -->"
HOW = "<!-- how to answer -->"
LARGEST = 1 << 20  # limit on the bytes of an answer
LARGEST_PROMPT = 1 << 26
FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")  # the opening or closing line of a Markdown code block


class Handoff:
    """Exchange prompts and answers as files in `directory`, which is created if needed. The default is
    `handoff` in the run's folder.

    `author` names the author in reports. The other parameters are in seconds. `time_limit` limits the wait
    for one answer. `settle`: how long an answer without END must stay unchanged. `patience`: the same for an
    answer without END that looks unfinished. `poll`: the time between two looks at the file.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        author: str,
        time_limit: float = 3600.0,
        settle: float = 10.0,
        patience: float = 60.0,
        poll: float = 0.2,
    ):
        self._directory = directory
        self._author = author
        if not 0 <= time_limit < math.inf:
            raise ProviderError(f"the time limit is {time_limit} s", "give a positive number of seconds")
        self._time_limit = time_limit
        self._settle = settle
        self._patience = patience
        self._poll = poll

    def next_turn(self, question: Question) -> Turn:
        """Return the contents of the answer file as a turn. The usage is unknown and counts as zero.

        An existing answer is used, and its prompt is not written again. Raises ProviderError at the time
        limit, at the question's deadline, for a `stop` file, and for unusable files. Only the errors at the
        time limit and at the deadline are retryable. After Ctrl-C, `say` receives a message, and
        KeyboardInterrupt is raised again.
        """
        say, number = question.say, question.number
        folder = Path(self._directory or (question.run or Path()) / "handoff")
        prompt, answer = folder / f"prompt-{number}.md", folder / f"answer-{number}.md"
        try:
            self._put(prompt, answer, _render(question))
            say(f"prompt {prompt} awaits its answer in {answer}\n")
            text = self._wait(answer, question.deadline)
        except OSError as error:
            remedy = "make it readable and writable, and resume; or start a run with another --directory"
            raise ProviderError(f"handoff: {error}", remedy) from error
        except KeyboardInterrupt:
            say(f"interrupted; {prompt} remains, and a resumed run waits for {answer}\n")
            raise
        return Turn(text, Usage(), f"{self._author} via handoff", "end_turn")

    def _put(self, prompt: Path, answer: Path, text: str) -> None:
        prompt.parent.mkdir(parents=True, exist_ok=True)
        if not answer.exists():
            write_atomic(prompt, text)
        elif prompt.exists() and _without_instructions(
            _read(prompt, LARGEST_PROMPT).decode("utf-8", "replace")
        ) != _without_instructions(text):
            raise ProviderError(  # otherwise an answer to an old run's prompt would count in this run
                f"{answer} answers an older prompt ({prompt} has changed)",
                "remove both files, and resume; or start a run with another --directory",
            )

    def _wait(self, answer: Path, deadline: float | None) -> str:
        limit = time.monotonic() + self._time_limit
        end = limit if deadline is None else min(limit, deadline)
        seen, since = None, time.monotonic()
        while True:
            _check_stop(answer.with_name("stop"))
            state, now = _state(answer), time.monotonic()
            if state != seen:
                seen, since = state, now
            if state and (text := self._whole(answer, now - since)):
                return text
            if now >= end:
                raise self._late(answer, state is not None)
            time.sleep(self._poll)

    def _whole(self, answer: Path, still: float) -> str:
        """The answer; "" if it may be incomplete. ``still``: seconds since the file's last change."""
        content = _read(answer, LARGEST)
        ended = _is_complete(content)
        if not ended and still < self._settle:
            return ""
        text = _text(answer, content)
        if ended:
            return _before_end(text)
        return text if not _unfinished(text) or still >= self._patience else ""

    def _late(self, answer: Path, there: bool) -> ProviderError:
        content = _read(answer, LARGEST) if there else b""
        lacks = _unfinished(_text(answer, content))
        if not there:
            late, remedy = "did not come", "resume the run to wait again"
        elif _is_complete(content):
            late, remedy = f"has only the line {END}", "write the answer above it and resume the run"
        else:
            late = f"looks incomplete ({lacks or 'it was still changing'})"
            remedy = f"end it with the line {END} and resume the run"
        return ProviderError(
            f"{answer} {late} within {self._time_limit:g} s",
            f"{remedy}, with a larger --time-limit if needed",
            retryable=True,
        )


def _check_stop(stop: Path) -> None:
    if stop.exists():
        raise ProviderError(f"stopped by {stop}", "remove that file and resume the run")


def _state(path: Path) -> tuple[int, int, int] | None:
    """A value that changes when the file changes; None if the file is missing or empty. Raises ProviderError
    if the path is not a regular file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    _refuse_other(path, found.st_mode)
    return (found.st_ino, found.st_size, found.st_mtime_ns) if found.st_size else None


def _read(path: Path, largest: int) -> bytes:
    """A file's bytes. Raises ProviderError if the path is not a regular file, or if the file is too large."""
    if path.is_symlink():
        _refuse_other(path, stat.S_IFLNK)
    # O_NOFOLLOW, because a link may have replaced the file. O_NONBLOCK, because a pipe without a writer would
    # block.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _refuse_other(path, os.fstat(file.fileno()).st_mode)
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ProviderError(f"{path} has more than {largest} bytes", "shorten it and resume the run")
    return content


def _refuse_other(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = "a link" if stat.S_ISLNK(mode) else "not a regular file"
        raise ProviderError(f"{path} is {what}", "write the answer itself there and resume the run")


def _is_complete(content: bytes) -> bool:
    """Whether the last line is END. The check uses bytes, because the content may end in the middle of a
    character."""
    return content.removeprefix(codecs.BOM_UTF8).rstrip().rpartition(b"\n")[2].strip() == END.encode()


def _before_end(text: str) -> str:
    """An answer without its last line (END); "" if the answer has no other line."""
    said = text.rstrip().removesuffix(END)
    return said if said.strip() else ""


def _text(answer: Path, content: bytes) -> str:
    """The answer as text; "" if the answer is blank. Raises ProviderError if the answer is not UTF-8."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        remedy = "save it as UTF-8 and resume the run"
        raise ProviderError(f"{answer} is not UTF-8: {error}", remedy) from error
    return text.replace("\r\n", "\n") if text.strip() else ""


def _unfinished(text: str) -> str:
    """Why an answer looks unfinished; "" if it looks finished."""
    blocks, closed = _blocks(text)
    if not closed:
        return "its last block of code is open"
    return "" if blocks else "it holds no block of code"


def _blocks(text: str) -> tuple[int, bool]:
    """The number of code blocks, and whether the last block is closed."""
    fence, blocks = "", 0
    for found in map(FENCE.fullmatch, text.splitlines()):
        if found is None:
            continue
        marks, words = found.groups()
        if not fence:
            fence = "" if "`" in marks and "`" in words else marks  # "" for code within a line
            blocks += bool(fence)
        elif marks.startswith(fence) and not words.strip():
            fence = ""
    return blocks, not fence


def _without_instructions(prompt: str) -> str:
    """A prompt without its instructions on how to answer, because these instructions differ between
    versions."""
    return prompt.partition(HOW)[0]


def _render(question: Question) -> str:
    # the run's name distinguishes this prompt from another run's prompt for the same spec
    parts = [f"<!-- run {question.run.name} -->"] if question.run else []
    parts.append(f"<!-- system -->\n\n{question.system}")
    parts += [f"<!-- message {i}: {m.role} -->\n\n{m.text}" for i, m in enumerate(question.messages, 1)]
    name = f"answer-{question.number}.md"
    parts.append(
        f"{HOW}\n\nWrite your next message, and nothing else, to `{name}` in this directory, and end it with"
        f" the line\n\n{END}\n\nwhich marks it as complete. Without that line the reader waits until the "
        "file has not changed for a while."
    )
    return "\n\n".join(parts) + "\n"


SPEC = ProviderSpec(
    name="handoff",
    make=Handoff,
    arguments=lambda header, run: {
        "directory": header["directory"],
        "author": header["author"],
        "time_limit": header["time_limit"],
    },
    options=("--time-limit", "--author", "--directory"),
    counted=False,
    by_hand=True,
    check=lambda: Finding("handoff provider", "ok", "always available: any agent or person can answer"),
)
