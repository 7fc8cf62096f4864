"""Replace several files atomically: after a crash a reader sees all old files, or completes the replacement.

New files are first written into a draft folder. Renaming that folder commits the replacement. Then each file
is renamed to its final path, which needs no disk space.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from coda_agent.agent.storage.locks import alone, together
from coda_agent.primitives.system.files import sync_directory, write_atomic

# The states of a replacement's folder. draft: the new files are being written. whole: all new files are
# written. done: all new files are at their final paths.
STATES = ("draft", "whole", "done")
PLACES = "places.json"  # in a replacement's folder: the final paths of its files, in order


def put(directory: Path, name: str, contents: Mapping[Path, str]) -> None:
    """Replace the files with ``contents``, in order. The last file is the evidence for the other files, so
    the last file is absent while the other files are replaced. ``name`` distinguishes replacements in
    ``directory``. Raises OSError. After an error, either all files are still the old files, or the next
    reader completes the replacement."""
    directory.mkdir(parents=True, exist_ok=True)
    with alone(directory):
        _finish(directory, name)
        draft, whole, _ = _folders(directory, name)
        try:
            for number, content in enumerate(contents.values()):
                write_atomic(draft / str(number), content)
            write_atomic(draft / PLACES, json.dumps([_way(directory, path) for path in contents]))
            draft.rename(whole)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        _finish(directory, name)


@contextmanager
def consistent(directory: Path, name: str = "*") -> Iterator[None]:
    """Prevent replacements during the block, so that all files come from the same replacement. An interrupted
    replacement is first completed if its draft folder was already renamed, and discarded otherwise. By
    default, ``name`` matches all replacements in ``directory``. Raises OSError, for example FileNotFoundError
    if ``directory`` does not exist."""
    while True:
        _end(directory, name)
        with together(directory):
            if not any(
                folder.is_dir() for folder in directory.glob(f".{name}.whole")
            ):  # if such a folder exists, another process has just renamed a draft folder: look again
                yield
                return


def _end(directory: Path, name: str) -> None:
    for folder in [f for state in STATES for f in directory.glob(f".{name}.{state}")]:
        with alone(directory):
            _finish(directory, folder.stem[1:])


def _finish(directory: Path, name: str) -> None:
    draft, whole, done = _folders(directory, name)
    for folder in (draft, done):
        if folder.is_dir():
            shutil.rmtree(folder)
    if whole.is_dir():
        sync_directory(directory)
        _replace(directory, whole)
        # rename before rmtree, because a kill during rmtree may leave a "whole" folder without its PLACES
        whole.rename(done)
        shutil.rmtree(done)


def _replace(directory: Path, whole: Path) -> None:
    places = [directory / place for place in json.loads((whole / PLACES).read_text(encoding="utf-8"))]
    staged = [whole / str(number) for number in range(len(places))]
    if staged[-1].exists():
        places[-1].unlink(missing_ok=True)
    for file, place in zip(staged, places, strict=True):
        if file.exists():  # otherwise the file was moved before the interruption
            _move(file, place)


def _way(directory: Path, path: Path) -> str:
    """The relative path from a directory to a file. First resolve symbolic links, because ``..`` after a link
    leads to the parent of the link's target."""
    return os.path.relpath(path.parent.resolve() / path.name, directory.resolve())


def _move(staged: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        staged.rename(place)
    except OSError as error:
        if error.errno != errno.EXDEV:  # EXDEV: the file's directory is on another disk
            raise
        write_atomic(place, staged.read_bytes())
        staged.unlink()
    sync_directory(place.parent)


def _folders(directory: Path, name: str) -> tuple[Path, Path, Path]:
    draft, whole, done = (directory / f".{name}.{state}" for state in STATES)
    return draft, whole, done
