"""Check patched models in the hands of other libraries: ``python -m benchmarks.models.libraries``.

Each situation uses a library as its users do: it trains or evaluates a tiny Hugging Face model on a CPU. The
situation runs twice from one seed, without and with ``fused.patch``, and what the two runs return must agree.
Then the script prints a table. Its exit status is 1 if a situation is wrong or raises. Each library runs in a
process of its own, because some libraries replace classes or keep global state. Nothing is downloaded.

``--only NAME`` runs one library. ``--json`` prints JSON. ``--stack`` and ``--keep-reordered`` are passed to
``fused.patch`` in every situation.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
from torch import Tensor

from benchmarks.models.situations import SITUATIONS, Patch, Results, Situation
from coda_agent import fused
from coda_agent.primitives.system.markdown_table import markdown_table

# In bf16, the errors of both models are measured against a run in fp32. Those of the patched model may be
# this many times as large, plus half a unit in the last place.
FARTHER, FLOOR = 1.5, 2.0**-9
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "torchao", "bitsandbytes", "liger-kernel")
HEADINGS = ("library", "situation", "compared", "relative error", "fused parts that ran", "right?")


class LibraryRow(NamedTuple):
    library: str
    situation: str
    compared: str = ""
    error: str = ""
    programs: int | None = None
    right: str = "yes"


@contextmanager
def watched() -> Iterator[set[str]]:
    """The names of the fused programs that run inside, compiled code included. A dispatch mode would change
    how ``fused`` calls its programs."""
    names, plain = set[str](), fused.ops.Op.interpreted

    def interpreted(op: Any, *args: Any, **kwargs: Any) -> Any:
        names.add(op.program.signature.name)
        return plain(op, *args, **kwargs)

    with mock.patch.object(fused.ops.Op, "interpreted", interpreted):
        yield names


def error(a: Tensor, b: Tensor) -> float:
    """The relative error of ``a``. It is infinite if the shapes differ, or the places of nan."""
    a, b = a.detach().double(), b.detach().double()
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def worst(results: Results, exact: Results) -> dict[str, float]:
    """For each kind of tensor, the largest relative error."""
    if results.keys() != exact.keys():
        raise ValueError(f"only one of two runs returned {sorted(results.keys() ^ exact.keys())}")
    errors: dict[str, float] = {}
    for name, tensor in results.items():
        kind = name.partition("/")[0]
        errors[kind] = max(errors.get(kind, 0.0), error(tensor, exact[name]))
    return errors


def compare(case: Situation, patch: Patch) -> LibraryRow:
    def run(patch: Patch, **more: Any) -> Results:
        torch.manual_seed(0)
        return case.run(patch, **more)

    def nothing(*_: Any, **__: Any) -> None: ...

    rounded = {"bf16": True} if case.rounded else {}
    plain = run(nothing, **rounded)
    with watched() as programs:
        results = run(patch, **rounded)
    exact = run(nothing, bf16=False) if case.rounded else plain
    errors, base = worst(results, exact), worst(plain, exact)
    limits = {kind: FARTHER * each + FLOOR if case.rounded else case.limit for kind, each in base.items()}
    wrong = [f"{kind} differ by {each:.1e}" for kind, each in errors.items() if not each <= limits[kind]]
    wrong += ["nothing ran fused"] if case.runs_fused and not programs else []
    largest = f"{max(errors.values()):.1e}"
    largest += f" (unpatched: {max(base.values()):.1e})" if case.rounded else ""
    right = f"no: {', '.join(wrong)}" if wrong else "yes"
    return LibraryRow(case.library, case.name, ", ".join(errors), largest, len(programs), right)


def check(library: str, options: Mapping[str, bool]) -> list[LibraryRow]:
    """Check a library's situations, in a process of its own."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    warnings.simplefilter("ignore")  # of the libraries, and of ``fused`` about parts that PyTorch computes
    torch.set_num_threads(1)
    try:
        import_module(library.replace("-", "_"))
    except ImportError:
        return [LibraryRow(library, "all", right="not installed")]
    import_module("transformers").logging.set_verbosity_error()
    rows, sys.stdout = list[LibraryRow](), sys.stderr  # trainers print what they log
    for case in (each for each in SITUATIONS if each.library == library):
        begun = time.perf_counter()
        try:
            row = compare(case, partial(cast(Any, fused.patch), **options))
        except Exception as problem:  # a library's failure is a row of the table
            traceback.print_exc()
            row = LibraryRow(library, case.name, right=f"no: {type(problem).__name__}: {problem}")
        rows.append(row._replace(library=f"{library} {version(library)}"))
        seconds = time.perf_counter() - begun
        print(f"{library}: {row.situation}: {row.right} ({seconds:.1f} s)", file=sys.stderr, flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models.libraries")
    parser.add_argument("--only", choices=LIBRARIES, help="run the situations of one library")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--stack", action="store_true", help="patch in whole-stack mode")
    parser.add_argument("--keep-reordered", action="store_true", help="patch with keep_reordered=True")
    asked = parser.parse_args(arguments)
    work = partial(check, options={"stack": asked.stack, "keep_reordered": asked.keep_reordered})
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as processes:
        tables = processes.map(work, [asked.only] if asked.only else LIBRARIES)
        rows = [row for table in tables for row in table]
    print(
        json.dumps([row._asdict() for row in rows], indent=1)
        if asked.json
        else markdown_table(HEADINGS, rows)
    )
    sys.exit(any(row.right.startswith("no:") for row in rows))


if __name__ == "__main__":
    main()
