"""Replay a recorded run. A replay gives the same answers in the same order, without a model or cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coda_agent.agent.providers import ProviderError, Question, Turn
from coda_agent.agent.providers.spec import Auto, ProviderSpec, RunContext
from coda_agent.agent.storage.journal import JournalError


class Replay:
    """A provider that answers turn n of a conversation with the n-th "answer" event of an exported journal.

    n is the number of user messages, so a resumed run continues at the right answer. The author and usage of
    each turn come from the recording. Raises ProviderError for a file that is missing, damaged or without
    answers.
    """

    def __init__(self, path: str | Path):
        from coda_agent.agent.storage.record import read_recording

        self._path = Path(path)
        try:
            _, events = read_recording(self._path)
        except JournalError as error:
            raise ProviderError(str(error), "give the export of a recorded run") from error
        self._turns = [Turn.from_json(event.payload) for event in events if event.kind == "answer"]
        if not self._turns:
            raise ProviderError(
                f"{self._path} has no recorded answer", "give the export of a run with an answer"
            )

    def next_turn(self, question: Question) -> Turn:
        """The recorded turn. Raises ProviderError if the run asks for more turns than were recorded."""
        number = question.number
        if not 1 <= number <= len(self._turns):
            raise ProviderError(
                f"{self._path} has {len(self._turns)} recorded answers, but the run asks for number {number}",
                "a verdict differs from the recorded one: look at the last report, or record a new run",
            )
        turn = self._turns[number - 1]
        question.say(turn.text)
        return turn


def _header(run: RunContext) -> dict[str, Any]:
    """The header field that names the recorded run. Raises ProviderError if there is no recording, and
    JournalError if the recording is damaged."""
    from coda_agent.agent.storage.record import read_recording

    if not run.recording.is_file():
        raise ProviderError(f"{run.recording}: no recorded run of {run.task}", "author one first")
    header, _ = read_recording(run.recording)
    return {"replays": str(header["run"])}


def _no_recording(run: RunContext) -> str:
    return "" if run.recording.is_file() else f"no recorded run of {run.task} to replay"


SPEC = ProviderSpec(
    name="replay",
    make=Replay,
    arguments=lambda header, run: {"path": run.recording},
    header=_header,
    replays=True,
    auto=Auto(2, "a recorded run", _no_recording),
)
