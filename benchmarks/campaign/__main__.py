"""``python -m benchmarks.campaign``: count the mutants of correct programs that the verifier rejects."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from benchmarks.campaign.graph import correct
from benchmarks.campaign.judge import CampaignTask, Result, applies
from benchmarks.campaign.mutations import mutate
from benchmarks.campaign.pool import run
from benchmarks.campaign.rewrites import rewrite
from benchmarks.campaign.tables import show


def main() -> None:
    arguments = _arguments()
    known = list(_read(arguments.json)) if arguments.json else []
    done = {_task(result) for result in known}
    names, kinds = _only(arguments.only)
    wanted = [
        task
        for group, every, number in (
            ("mutants", mutate.KINDS, arguments.mutants),
            ("rewrites", rewrite.KINDS, arguments.rewrites),
        )
        for task in _tasks(group, names, [k for k in every if k in kinds], number, arguments.seed)
    ]
    results = [r for r in known if _task(r) in set(wanted)]
    try:
        for result in run([t for t in wanted if t not in done], arguments.jobs):
            results.append(result)
            if arguments.json:
                with arguments.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
    except KeyboardInterrupt:
        print("interrupted: repeat the command with --json to continue")
    show(results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=__doc__)
    parser.add_argument("--mutants", type=int, default=5000, help="number of mutants")
    parser.add_argument("--rewrites", type=int, default=300, help="number of equivalent programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first candidates")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with one thread")
    parser.add_argument("--only", action="append", help="a program or a kind; may be repeated")
    parser.add_argument(
        "--json", type=Path, help="file of results, one per line; those that it has are not judged again"
    )
    return parser.parse_args()


def _only(given: list[str] | None) -> tuple[list[str], list[str]]:
    """The programs and the kinds that ``--only`` names. If ``--only`` names no program, return all programs.
    If it names no kind, return all kinds."""
    known, every = correct(), [*mutate.KINDS, *rewrite.KINDS]
    if unknown := set(given or ()) - {*known, *every}:
        raise SystemExit(
            f"--only {min(unknown)!r} is neither a program nor one of the kinds: {'; '.join(every)}"
        )
    names, kinds = ([n for n in of if n in (given or ())] for of in (known, every))
    return names or known, kinds or every


def _tasks(group: str, names: list[str], kinds: list[str], number: int, seed: int) -> Iterator[CampaignTask]:
    """The first ``number`` tasks of a sequence. The sequence begins with every pair of a program and a kind
    that applies to the program, in random order. Then the same pairs follow with the next seed, in another
    order, and so on."""
    pairs = [(n, k) for n in names for k in kinds if number and applies(CampaignTask(group, n, k, seed))]
    for turn in range(-(-number // len(pairs)) if pairs else 0):
        Random(seed + turn).shuffle(pairs)
        for name, kind in pairs[: number - turn * len(pairs)]:
            yield CampaignTask(group, name, kind, seed + turn)


def _task(result: Result) -> CampaignTask:
    return CampaignTask(*(result[field] for field in CampaignTask._fields))


def _read(path: Path) -> Iterator[Result]:
    """Read the results in a file. Skip incomplete lines."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


if __name__ == "__main__":
    main()
