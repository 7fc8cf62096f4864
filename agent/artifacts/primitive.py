"""``coda-agent primitive``: add a missing elementwise primitive to the vocabulary.

A person defines the primitive's meaning in ``specs/primitives/NAME.yaml``. An author writes the primitive's
CuTeDSL code in a run. This module turns the code into a patch, and a person applies the patch. This module
never changes a file of the vocabulary itself.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from coda_agent.agent.artifacts import accept
from coda_agent.agent.prompts.vocabulary import formed
from coda_agent.agent.run import runs
from coda_agent.agent.run.primitive_task import FAMILY, PROPOSES
from coda_agent.agent.storage import kernel_files
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.lang.ir import OPERATIONS
from coda_agent.primitives.raw.arithmetic import answer
from coda_agent.primitives.raw.interpreter import LINE
from coda_agent.primitives.system.files import ROOT, write_atomic
from coda_agent.verifier.proposals import proposal as proposing
from coda_agent.verifier.proposals.proposal import Proposal
from coda_agent.verifier.report import Accepted, Checked, Rejected
from coda_agent.verifier.spec.file import SpecError, of_text
from coda_agent.verifier.spec.model import Spec

if TYPE_CHECKING:
    from coda_agent.agent.run.loop import Outcome

PROPOSED = Path("specs") / "primitives"
VOCABULARY, LANGUAGE = "primitives/__init__.py", "primitives/raw/names.py"
DEVICE = "primitives/device"
IMPORTED, EXPORTED = (
    "from coda_agent.primitives.lang.ops.elementwise import (\n",
    "__all__ = [\n",
)  # in the vocabulary's module: the first lines of the lists of imported and of exported names


# Proposing


def path_of(name: str) -> Path:
    """The path of a primitive's proposal."""
    return PROPOSED / f"{name}.yaml"


def proposed(name: str) -> Path:
    """The path of a primitive's proposal. Raises InvalidInput if the file does not exist."""
    path = path_of(name)
    if not path.is_file():
        raise InvalidInput(
            f"{path}: no such proposal; scaffold it: coda-agent primitive {name} --reference "
            "'x / (1 + abs(x))' --arguments x"
        )
    return path


def scaffold(name: str, reference: str, arguments: Iterable[str]) -> Path:
    """Write a draft of a primitive's proposal, for a person to complete. If the proposal exists or the
    arguments are invalid, raise InvalidInput and write nothing."""
    path = path_of(name)
    if path.exists():
        raise InvalidInput(f"{path} already exists: edit it, or remove it first")
    names = list(arguments)
    every = ", ".join(f"{n}: [-inf, inf]" for n in names)
    text = (
        f"name: {name}\n"
        f"summary: {name}, element by element.  # for people\n"
        f"arguments: [{', '.join(names)}]\n"
        f"reference: {json.dumps(reference)}  # the meaning, in torch's names\n"
        f"domain: {{{every}}}  # where it has to hold\n"
        "ulps: 4  # how many units in the last place of fp32 the exact function may be off\n"
    )
    with TemporaryDirectory() as trial:
        draft = Path(trial) / path.name
        draft.write_text(text, encoding="utf-8")
        try:
            proposing.load(draft)
        except SpecError as error:
            raise InvalidInput(f"{name}: {error.message}") from None
    write_atomic(path, text)
    return path


def start(path: Path, options: Mapping[str, Any]) -> runs.Run:
    """Start a run that writes the primitive proposed at ``path``, or a run that replays a recording. For a
    replay, the vocabulary may already contain the primitive. If the proposal is invalid, raise SpecError or
    InvalidInput and start no run."""
    from coda_agent.verifier.apart import check_reference

    merged = "replays" in options and path.stem in OPERATIONS
    made = proposing.load(path, new=not merged)
    if made.name != path.stem:
        raise InvalidInput(f"{path} proposes {made.name!r}: name the file {made.name}.yaml")
    spec = of_text(Path(f"{made.name}.yaml"), made.frame, Spec, check_reference)
    return runs.create(spec, made.frame, {**options, PROPOSES: path.read_text(encoding="utf-8")})


# Merging


def latest(name: str) -> str:
    """The name of the last run that authored a primitive. Raises InvalidInput if there is no such run."""
    for run in reversed(runs.names()):
        if run.startswith(f"{name}-"):
            opened = runs.reopen(run)
            opened.journal.close()
            if PROPOSES in opened.journal.header and opened.spec.name == name:
                return run
    raise InvalidInput(f"no run has authored {name} yet; start one: coda-agent primitive {name}")


def merge(name: str, out: Path | None = None) -> tuple[Path, Outcome, str]:
    """Write a patch that adds a primitive to the vocabulary, with the code of the primitive's last run.
    Return the patch's path, the run's outcome, and a message. A primitive's page is its docstring, which
    prompts show; the message lists the parts that the page lacks. Raises InvalidInput."""
    from coda_agent.agent.run import loop

    if name in OPERATIONS:
        raise InvalidInput(f"primitives already has {name!r}: nothing to merge")
    run = runs.reopen(latest(name))
    with run.journal:
        outcome = loop.result_of(run.journal, run.spec)
        text = str(run.journal.header[PROPOSES])
        recording = "" if "replays" in run.journal.header else accept.recorded(run.journal)
    if outcome is None or isinstance(outcome.report, Rejected):
        raise InvalidInput(f"run {run.name} has no {name} that passed: coda-agent resume {run.name}")
    if not _computed(outcome.report):
        raise InvalidInput(f"run {run.name} checked no arithmetic; run it again: coda-agent primitive {name}")
    path, proposal = out or Path(f"{name}.patch"), proposing.parse(text)
    write_atomic(path, patch(proposal, outcome.source, recording))
    return path, outcome, missing_parts(answer(outcome.source, name, len(proposal.arguments)).page)


def _computed(report: Accepted | Checked) -> bool:
    """Whether the run compared the primitive's results with the reference. A run of an early version of
    coda-agent may lack this comparison."""
    return report.status == "accepted" or any(g.figures.get("worst_rms_ratio") for g in report.gates)


def missing_parts(page: str) -> str:
    """A message that lists the parts that a page lacks; empty if the page is complete."""
    if formed(page):
        return ""
    parts = ("Shapes:", "Dtypes:", "Cost:", "Paper: family 1, elementwise")
    missing = [part for part in parts if part not in page] or ["an example of two lines"]
    return f"its page lacks {', '.join(missing)}: complete it in {FAMILY}, in the form of the pages there"


def patch(proposal: Proposal, source: str, recording: str = "") -> str:
    """A unified diff that adds the primitive to the vocabulary, and the ``recording`` of its run to the
    recordings. The primitive's functions go into a new module, because a change of an existing module would
    invalidate the reports of accepted kernels. Raises RawError if the source lacks a required function."""
    name = proposal.name
    form = answer(source, name, len(proposal.arguments))
    device = f"{DEVICE}/{name}.py"
    kept = kernel_files.recording_path(name, edited=True).relative_to(ROOT).as_posix()
    paths = (VOCABULARY, FAMILY, LANGUAGE, kept)
    before = {path: (ROOT / path).read_text(encoding="utf-8") for path in paths if (ROOT / path).exists()}
    after = {
        VOCABULARY: _listed(_listed(before[VOCABULARY], IMPORTED, ")\n", name), EXPORTED, "]\n", f'"{name}"'),
        FAMILY: _entered(before[FAMILY], proposal, form.page, form.fast),
        LANGUAGE: _permitted(before[LANGUAGE], name),
        device: _module(proposal, source, form.fast),
    } | ({kept: recording} if recording else {})
    parts: list[str] = []
    for path, text in after.items():
        old = before.get(path, "")
        origin = f"a/{path}" if old else "/dev/null"
        parts += unified_diff(old.splitlines(True), text.splitlines(True), origin, f"b/{path}")
    return "".join(parts)


def _module(proposal: Proposal, source: str, fast: bool) -> str:
    """The text of a new module with the primitive's device functions."""
    names = [proposal.name, f"{proposal.name}_fast"][: 1 + fast]
    return (
        f'"""{proposal.name} of register values, which are fp32."""\n\n'
        f"from __future__ import annotations\n\n{proposing.imports(source)}\n"
        f"__all__ = [{', '.join(json.dumps(n) for n in names)}]\n\n\n{source.strip()}\n"
    )


def _permitted(text: str, name: str) -> str:
    """Add the primitive's new module to ``text``, the module that lists the imports of edited code."""
    place = text.index('    "primitives.device.values": ')
    return text[:place] + f'    "primitives.device.{name}": (),\n' + text[place:]


def _listed(text: str, opening: str, closing: str, name: str) -> str:
    """Return the text with ``name`` added to a sorted list. The list stands between ``opening`` and
    ``closing``, with one name per line."""
    head, begin, rest = text.partition(opening)
    body, end, tail = rest.partition(closing)
    return head + begin + "".join(sorted([*body.splitlines(True), f"    {name},\n"])) + end + tail


def _entered(text: str, proposal: Proposal, page: str, fast: bool) -> str:
    """Add the new primitive to ``text``, the module of elementwise primitives, after the activations."""
    exact, coarse = proposal.templates(fast)
    given = [f"torch={proposal.meaning}", f'cute="{exact}"', *([f'fast="{coarse}"'] if coarse else [])]
    decorator = f"@elementwise({', '.join(given)})"
    if len(decorator) > LINE:
        decorator = "@elementwise(\n" + "".join(f"    {one},\n" for one in given) + ")"
    shown = proposal.example and not formed(page)  # a complete page has its own example
    words = f"{page}\n\n``{proposal.example}``" if shown else page
    quoted = f'"""{words}"""' if "\n" not in words else f'"""{words}\n"""'
    entry = (
        f"{decorator}\ndef {proposal.name}({', '.join(proposal.arguments)}):\n"
        f"{textwrap.indent(quoted, '    ')}\n\n\n"
    )
    place = text.index("def _as_tile(")
    return text[:place] + entry + text[place:]
