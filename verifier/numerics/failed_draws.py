"""Draws on which a program failed. It is judged on them again whenever it is submitted, in this run or a
later one, so that a wrong program does not pass because another draw is kinder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.system.files import cache_dir, read_json, write_atomic
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.spec.model import Spec

if TYPE_CHECKING:
    from coda_agent.verifier.numerics.cpu_numerics import InputSettings

MOST = 16  # number of draws that are kept per program, the latest first


def of(spec: Spec, program: Program, device: str = "cpu") -> list[InputSettings]:
    """The draws on which the program failed on this kind of device. A damaged or unreadable file counts as
    none."""
    from coda_agent.verifier.numerics.cpu_numerics import KNOWN, InputSettings

    try:
        draws = TypeAdapter(list[InputSettings]).validate_python(read_json(_path(spec, program, device)))
    except (ValidationError, OSError):
        return []
    return [draw for draw in draws if draw.family in KNOWN]


@contextmanager
def remembered(spec: Spec, program: Program, device: str = "cpu") -> Iterator[None]:
    """Remember the draw of a Failed that leaves the ``with`` block, if it has one."""
    try:
        yield
    except Failed as failed:
        if draw := failed.evidence.get("draw"):
            others = [known for other in of(spec, program, device) if (known := other._asdict()) != draw]
            with suppress(OSError):  # the verdict counts even if the cache cannot be written
                write_atomic(_path(spec, program, device), json.dumps([draw, *others][:MOST]))
        raise


def _path(spec: Spec, program: Program, device: str) -> Path:
    key = json.dumps([spec.operator_hash, program._replace(schedule={}).hash, device])
    return cache_dir() / "failed_draws" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
