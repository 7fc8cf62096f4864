"""Make the images of docs/authoring.md anew: ``.venv/bin/python docs/images/make.py``, with chromium on PATH.

Three candidates go through the real loop, SDK, jail and gates; the tests' Messages API answers them on
loopback, and in place of a GPU there are *stand-in figures*, as the spec's name says in both images.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import fake_messages  # noqa: E402
from authoring import TOY, TOY_KERNEL, fenced, measured, slow  # noqa: E402
from rich.console import Console  # noqa: E402

from coda_agent.agent import setup  # noqa: E402
from coda_agent.agent.cli.authoring import create_runs  # noqa: E402
from coda_agent.agent.options import AuthoringOptions  # noqa: E402
from coda_agent.agent.reporting import html_report, progress  # noqa: E402
from coda_agent.agent.run import history, runs  # noqa: E402
from coda_agent.agent.run.budget import RunLimits  # noqa: E402
from coda_agent.primitives.compiler.kernel_source import KernelSource  # noqa: E402
from coda_agent.verifier.decision import BASELINE, KEPT  # noqa: E402
from coda_agent.verifier.report import Measured, Rejected, Timing  # noqa: E402
from coda_agent.verifier.spec.model import Spec  # noqa: E402

NAME = "stand_in_figures"
MODEL = "claude-opus-4-5"  # whose prices are known
KERNEL = TOY_KERNEL.replace("toy", NAME)
UNSCALED = KERNEL.replace(" * per_row(v)", "")
SCHEDULED = f'{fenced(KERNEL)}\n```json\n{{"0": {{"swizzle": 16}}}}\n```\n'
USAGE = fake_messages.USAGE | {"cache_read_input_tokens": 24_000}
WIDTH, HEIGHT = 1100, 2660
Answers = list[fake_messages.Reply]


def stand_in(speedup: float) -> Callable[..., Measured | Rejected]:
    """Measures nothing: so many times the baseline's speed, and a change gains 6 %."""

    def measure(spec: Spec, kernel: KernelSource, keep: object, kept: object) -> Measured | Rejected:
        now = speedup * 1.06 if kept else speedup
        found = measured(spec, kernel.program, now)
        gain = measured(spec, kernel.program, 1.06).timings[0].ratios[BASELINE]
        rows = tuple(_timed(t, now) for t in found.timings)
        if kept:
            rows = tuple(t.model_copy(update={"ratios": t.ratios | {KEPT: gain}}) for t in rows)
        if now < spec.accept.speedup:
            evidence = {"timings": [t.model_dump(mode="json", exclude={"samples"}) for t in rows]}
            return slow(spec).model_copy(update={"evidence": evidence})
        return found.model_copy(update={"timings": rows, "conditions": {"gpu": "none: stand-in figures"}})

    return measure


def _timed(t: Timing, speedup: float) -> Timing:
    """With a baseline that takes as long each time."""
    factor = 2.6 / t.milliseconds[BASELINE]
    return t.model_copy(update={"milliseconds": {arm: ms * factor for arm, ms in t.milliseconds.items()}})


def answer(text: str) -> fake_messages.Reply:
    """As large as such answers are, for what they cost to be seen."""
    return fake_messages.answer(text, output_tokens=2100, usage=USAGE)


def author(name: str, answers: Answers, speedup: float, log: StringIO) -> None:
    """Go through a run with these answers; without one more, until it waits."""
    run = runs.reopen(name)
    with fake_messages.FakeMessages(*answers) as server, run.journal:
        os.environ |= {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "of-nobody"}
        setup.author(run, progress.LiveView(Console(file=log, width=80)), stand_in(speedup))


def candidates(spec: Path) -> list[str]:
    """One is mended and then improved, one is right and slow, one waits for its first answer."""
    limits = RunLimits(dollars=1.0, tokens=300_000).to_json()
    options = {"provider": "anthropic", "model": MODEL, "limits": limits, "improve": 1, "attempts": 2}
    names = create_runs(partial(runs.start, spec), AuthoringOptions().header() | options, 3)
    good, wrong, faster = (answer(text) for text in (fenced(KERNEL), fenced(UNSCALED), SCHEDULED))
    log = StringIO()
    author(names[0], [wrong, good, faster], 1.3, log)
    author(names[1], [good, good], 0.9, log)
    waiting = (names[2], [fake_messages.stalls], 1.0, log)
    threading.Thread(target=author, args=waiting, daemon=True).start()
    while not history.past_of(names[2]).spent.uncertain_tokens:
        time.sleep(0.1)
    return names


def table(names: list[str], path: Path) -> None:
    says = ["ended", "ended", "waiting for an answer"]
    rows = [
        (n, history.past_of(name), said) for n, (name, said) in enumerate(zip(names, says, strict=True), 1)
    ]
    console = Console(record=True, width=130, file=StringIO(), force_terminal=True)
    console.print(progress.table(rows))
    console.save_svg(str(path), title="coda-agent generate --candidates 3: stand-in figures, no measurement")


def screenshot(html: Path, path: Path) -> None:
    """The page's top, as chromium shows it."""
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={path}", html.absolute().as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["CODA_AGENT_RUNS"] = str(Path(temporary) / "runs")
        spec = Path(temporary) / f"{NAME}.yaml"
        spec.write_text(TOY.replace("name: toy", f"name: {NAME}"), encoding="utf-8")
        names = candidates(spec)
        table(names, HERE / "candidates.svg")
        screenshot(html_report.write(names[0], Path(temporary) / "run.html"), HERE / "report.png")
    print(*names)


if __name__ == "__main__":
    main()
