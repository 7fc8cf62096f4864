"""The handoff provider waits for answer files that an author writes slowly, late, in pieces, or never."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import ASK, TALK

from coda_agent.agent.providers import Provider, ProviderError, Question, Turn, Usage, handoff, make


def hand(directory: Path, **options: Any) -> Provider:
    defaults = {"directory": directory, "author": "Ada", "settle": 0.1, "patience": 0.1, "poll": 0.02}
    return make("handoff", **{**defaults, **options})


def in_background(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 5
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


def test_handoff_answered_by_a_rename(tmp_path: Path) -> None:
    def author() -> None:
        wait_for(tmp_path / "prompt-2.md")
        (tmp_path / "draft").write_text("the answer\n<!-- end -->\n")
        (tmp_path / "draft").rename(tmp_path / "answer-2.md")

    told: list[str] = []
    in_background(author)
    turn = hand(tmp_path, settle=60.0).next_turn(Question("SYSTEM", TALK, say=told.append))
    assert turn == Turn("the answer\n", Usage(), "Ada via handoff", "end_turn")
    prompt = (tmp_path / "prompt-2.md").read_text()
    places = [prompt.index(part) for part in ("SYSTEM", *(m.text for m in TALK), "answer-2.md")]
    assert places == sorted(places)
    assert len(told) == 1 and "prompt-2.md" in told[0] and "answer-2.md" in told[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answer-2.md", "prompt-2.md"]


def test_handoff_waits_for_a_slow_writer(tmp_path: Path) -> None:
    def author() -> None:
        with (tmp_path / "answer-1.md").open("w") as file:
            for part, pause in (("", 0.1), ("  \n", 1.2), ("one ", 0.1), ("two ", 0.1), ("three", 0)):
                file.write(part)
                file.flush()
                time.sleep(pause)

    in_background(author)
    patient = hand(tmp_path, time_limit=20, patience=1.0)
    assert patient.next_turn(Question("S", ASK)).text == "  \none two three"


@pytest.mark.parametrize(
    ("first", "rest"),
    [
        ("Two steps.\n\n```python\na = 1\n", "b = 2\n```\n"),  # a pause within a block of code
        ("I think that\n", "this is it:\n\n```python\na = 1\n```\n"),  # a pause before any block of code
        ("```python\na = 1\n```\n", "No:\n\n```python\na = 2\n```\n"),  # a pause between two blocks of code
    ],
)
def test_handoff_waits_for_a_writer_that_pauses(tmp_path: Path, first: str, rest: str) -> None:
    """The provider takes an answer as soon as its last line is ``<!-- end -->``, so the author may pause for
    long before this line."""
    answer = tmp_path / "answer-1.md"

    def author() -> None:
        wait_for(tmp_path / "prompt-1.md")
        answer.write_text(first)
        time.sleep(0.3)
        with answer.open("a") as file:
            file.write(f"{rest}<!-- end -->")

    in_background(author)
    patient = hand(tmp_path, settle=60.0, patience=60.0)
    assert patient.next_turn(Question("S", ASK)).text == first + rest


def test_handoff_an_answer_without_its_end_has_to_stand_still_for_long(tmp_path: Path) -> None:
    """With the default options, the provider does not take an answer just because its author pauses for a few
    seconds."""
    (tmp_path / "answer-1.md").write_text("```python\na = 1\n```\n")
    with pytest.raises(
        ProviderError, match=r"answer-1.md looks incomplete \(it was still changing\) .*end it"
    ):
        make("handoff", directory=tmp_path, author="Ada", time_limit=1.2).next_turn(Question("S", ASK))


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("no code", "it holds no block of code"),
        ("```python\na = 1\n```", ""),
        ("```python\na = 1\n``", "its last block of code is open"),
        ("```yaml\na: 1\n```\nand\n```python\n", "its last block of code is open"),
        ("~~~\n```\n~~~\n", ""),
        ("````md\n```python\n```\n", "its last block of code is open"),
        ("a ``` in a line, ```code``` too\n```in one``` line\n", "it holds no block of code"),
    ],
)
def test_handoff_takes_what_looks_unfinished_after_a_long_while(
    tmp_path: Path, text: str, lacks: str
) -> None:
    (tmp_path / "answer-1.md").write_text(text)
    patient = hand(tmp_path, time_limit=0.2, settle=0.0, patience=60.0)
    if not lacks:
        assert patient.next_turn(Question("S", ASK)).text == text
        return
    with pytest.raises(ProviderError, match=rf"looks incomplete \({lacks}\).*end it with") as caught:
        patient.next_turn(Question("S", ASK))
    assert caught.value.retryable
    assert hand(tmp_path, time_limit=20, patience=0.3).next_turn(Question("S", ASK)).text == text


@pytest.mark.parametrize("text", ["<!-- end -->", "\n\n  <!-- end -->\r\n", "\ufeff<!-- end -->\n"])
def test_handoff_waits_for_more_than_an_end(tmp_path: Path, text: str) -> None:
    answer = tmp_path / "answer-1.md"
    answer.write_text(text)
    words = f"{answer} has only the line <!-- end --> .*write the answer above it and resume"
    with pytest.raises(ProviderError, match=words) as caught:
        hand(tmp_path, time_limit=0.1, settle=0.0, patience=0.0).next_turn(Question("S", ASK))
    assert caught.value.retryable
    answer.write_text("an answer\n" + text.lstrip("\ufeff"))
    assert hand(tmp_path, settle=60.0).next_turn(Question("S", ASK)).text.startswith("an answer\n")


@pytest.mark.parametrize("text", ["I say <!-- end -->", "a = 1<!-- end -->\n", "<!-- end --> and more"])
def test_handoff_s_end_is_a_line_of_its_own(tmp_path: Path, text: str) -> None:
    """``<!-- end -->`` ends an answer only on a line of its own. Elsewhere it is part of the text, and the
    provider takes the answer only after the file has stayed unchanged for a while."""
    (tmp_path / "answer-1.md").write_text(text)
    with pytest.raises(ProviderError, match="looks incomplete"):
        hand(tmp_path, time_limit=0.1, settle=60.0).next_turn(Question("S", ASK))
    assert hand(tmp_path, settle=0.0, patience=0.0).next_turn(Question("S", ASK)).text == text


def test_handoff_gives_up_at_its_limit(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match=r"did not come within 0.1 s; .*--time-limit") as caught:
        hand(tmp_path / "new", time_limit=0.1).next_turn(Question("S", ASK))
    assert caught.value.retryable
    assert (tmp_path / "new" / "prompt-1.md").exists()


def test_handoff_gives_up_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="did not come"):
        hand(tmp_path, time_limit=600).next_turn(Question("S", ASK, deadline=time.monotonic() + 0.1))


def test_handoff_stops_when_told(tmp_path: Path) -> None:
    def person() -> None:
        wait_for(tmp_path / "prompt-1.md")
        (tmp_path / "stop").touch()

    in_background(person)
    with pytest.raises(ProviderError, match="stopped by .*stop; remove that file") as caught:
        hand(tmp_path, time_limit=5).next_turn(Question("S", ASK))
    assert not caught.value.retryable


def test_handoff_says_a_word_when_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    told: list[str] = []
    provider = hand(tmp_path)
    monkeypatch.setattr("coda_agent.agent.providers.handoff.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        provider.next_turn(Question("S", ASK, say=told.append))
    assert "interrupted" in told[-1] and "prompt-1.md" in told[-1]


def test_handoff_resumes_with_the_answer_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(ProviderError):
        hand(tmp_path, time_limit=0.0).next_turn(Question("S", ASK))
    prompt = tmp_path / "prompt-1.md"
    before = prompt.stat()
    (tmp_path / "answer-1.md").write_text("late")
    assert hand(tmp_path, time_limit=5).next_turn(Question("S", ASK)).text == "late"
    assert (prompt.stat().st_ino, prompt.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_handoff_refuses_the_answer_to_another_prompt(tmp_path: Path) -> None:
    (tmp_path / "answer-1.md").write_text("for another run")
    (tmp_path / "prompt-1.md").write_text("another prompt")
    with pytest.raises(ProviderError, match="answers an older prompt"):
        hand(tmp_path).next_turn(Question("S", ASK))


def test_handoff_takes_an_answer_to_the_same_prompt_of_another_version(tmp_path: Path) -> None:
    with pytest.raises(ProviderError):
        hand(tmp_path, time_limit=0.0).next_turn(Question("S", ASK))
    prompt = tmp_path / "prompt-1.md"
    asked, mark, _ = prompt.read_text().partition("<!-- how to answer -->")
    prompt.write_text(f"{asked}{mark}\n\nBy a pigeon.\n")
    (tmp_path / "answer-1.md").write_text("late\n<!-- end -->\n")
    assert hand(tmp_path, settle=60.0).next_turn(Question("S", ASK)).text == "late\n"


def test_handoff_names_what_it_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "answer-1.md").write_bytes(b"caf\xe9")
    with pytest.raises(ProviderError, match="answer-1.md is not UTF-8"):
        hand(tmp_path).next_turn(Question("S", ASK))
    with pytest.raises(ProviderError, match="start a run with another --directory"):
        hand(tmp_path / "answer-1.md").next_turn(Question("S", ASK))


# hostile files in a directory that others can write to


def refused(directory: Path) -> str:
    """Return the provider's reason for refusing the answer file; check that the error is not retryable."""
    with pytest.raises(ProviderError) as error:
        hand(directory, time_limit=5).next_turn(Question("S", ASK))
    assert not error.value.retryable and "answer-1.md" in error.value.message
    return error.value.message


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_no_answer(tmp_path: Path, there: bool) -> None:
    """If the provider followed the link, the text of the link's target would go into the next prompt."""
    secret = tmp_path / "secret"
    if there:
        secret.write_text("a key\n<!-- end -->\n")
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "answer-1.md").symlink_to(secret)
    assert refused(tmp_path / "box").endswith("is a link")


def test_a_link_that_takes_an_answers_place_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answer-1.md").symlink_to("/etc/hostname")
    monkeypatch.setattr(Path, "is_symlink", lambda path: False)  # as if the link appeared after this check
    with pytest.raises(OSError) as error:
        handoff._read(tmp_path / "answer-1.md", 100)
    assert error.value.errno == errno.ELOOP


def test_a_pipe_or_a_folder_is_no_answer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "answer-1.md")
    assert refused(tmp_path).endswith("is not a regular file")
    (tmp_path / "answer-1.md").unlink()
    (tmp_path / "answer-1.md").mkdir()
    assert refused(tmp_path).endswith("is not a regular file")


def test_an_answer_has_a_largest_size(tmp_path: Path) -> None:
    answer = tmp_path / "answer-1.md"
    whole = "x" * (handoff.LARGEST - len(handoff.END) - 2) + f"\n{handoff.END}\n"
    answer.write_text(whole)
    assert len(hand(tmp_path).next_turn(Question("S", ASK)).text) == whole.index("\n") + 1
    with answer.open("r+b") as file:
        file.truncate(1 << 40)  # a sparse file, too large for memory
    assert refused(tmp_path).endswith("bytes")


def test_a_prompt_is_not_written_through_a_link(tmp_path: Path) -> None:
    """Neither the prompt nor its temporary file is written through a link. Whoever writes the answers knows
    both file names, and could create links with these names."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    for name in ("prompt-1.md", f".prompt-1.md.{os.getpid()}.{threading.get_native_id()}.tmp"):
        (tmp_path / name).symlink_to(mine)
    with pytest.raises(ProviderError, match="did not come"):
        hand(tmp_path, time_limit=0).next_turn(Question("S", ASK))
    assert mine.read_text() == "precious"
