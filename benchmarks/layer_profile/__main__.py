"""Profile layers with ``python -m benchmarks.layer_profile``: ``measure`` on an H100, ``draw`` anywhere."""

from __future__ import annotations

import argparse
import faulthandler
import json
from collections.abc import Sequence
from pathlib import Path

# seconds from the time limit to the forced end of a process that hangs; the file keeps the finished stages
GRACE = 8.0


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layer_profile")
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="profile both arms on this machine's H100")
    measuring.add_argument("--widths", default="1B,7B,70B", help="layer sizes, measured in this order")
    measuring.add_argument("--seconds", type=float, default=480.0, help="time limit in seconds")
    measuring.add_argument("--out", type=Path, required=True, help="the JSON file, written after each stage")
    drawing = commands.add_parser("draw", help="a page with tables, and a chart for each width")
    drawing.add_argument("file", type=Path)
    drawing.add_argument("--out", type=Path, required=True, help="the page; charts go to images/ beside it")
    arguments = parser.parse_args(given)
    if arguments.command == "measure":
        measure(arguments.widths.split(","), arguments.seconds, arguments.out)
    else:
        from benchmarks.layer_profile.page import write

        for path in write(json.loads(arguments.file.read_text(encoding="utf-8")), arguments.out):
            print(f"wrote {path}")


def measure(widths: Sequence[str], seconds: float, out: Path) -> None:
    from benchmarks.layer_profile.measuring import TimeBudget, run

    budget = TimeBudget(seconds)
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True)
    try:
        from benchmarks.layer_profile.bench import LayerStages  # takes seconds to import

        run(widths, LayerStages, budget, out)
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
