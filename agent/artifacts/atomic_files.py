"""Replace several files atomically: after a crash a reader sees all old files, or completes the replacement.

New files go into a draft folder. Once that folder has been renamed, the replacement will be completed. Each
file is then renamed to its final path, which needs no disk space.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from coda_agent.agent.artifacts.locks import alone, together
from coda_agent.primitives.system.files import sync_directory, write_atomic

STATES = ("draft", "whole", "done")  # a replacement's folder is being written, is complete, or is emptied
PLACES = "places.json"  # this file in a replacement's folder lists the final paths of its files, in order


def put(directory: Path, name: str, contents: Mapping[Path, str]) -> None:
    """Replace files by ``contents``, in order. The last file is the evidence for the other files, so it is
    missing while they are replaced. ``name`` distinguishes replacements in ``directory``. Raises OSError;
    then either all files are old, or the next reader completes the replacement."""
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
    """Guarantee in the block that all files come from the same replacement. If a replacement was interrupted,
    it is completed first if its draft folder was already renamed, and discarded otherwise. Without ``name``,
    this holds for all replacements in ``directory``. Raises OSError, and FileNotFoundError if ``directory``
    does not exist."""
    while True:
        _end(directory, name)
        with together(directory):
            if not any(
                folder.is_dir() for folder in directory.glob(f".{name}.whole")
            ):  # otherwise another process has just renamed a draft folder, so look again
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
        whole.rename(done)  # so a kill during rmtree cannot leave a "whole" folder without its list of paths
        shutil.rmtree(done)


def _replace(directory: Path, whole: Path) -> None:
    places = [directory / place for place in json.loads((whole / PLACES).read_text(encoding="utf-8"))]
    staged = [whole / str(number) for number in range(len(places))]
    if staged[-1].exists():
        places[-1].unlink(missing_ok=True)
    for file, place in zip(staged, places, strict=True):
        if file.exists():  # otherwise it was moved before a kill
            _move(file, place)


def _way(directory: Path, path: Path) -> str:
    """The relative path from a directory to a file. Links are resolved first, since ``..`` means the parent
    of a link's target."""
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
