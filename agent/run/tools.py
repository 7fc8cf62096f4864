"""The tools of an author: check a draft, submit a kernel, read a page, and propose a tip. The journal records
every checked draft and every proposed tip.

A draft goes through the gates that need no GPU, in the same jail as an answer. The kernel's cost includes the
turns in which the author calls tools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from coda_agent.agent.prompts import prompt
from coda_agent.agent.providers import Message, Tool, ToolCall, Turn
from coda_agent.agent.storage.journal import Journal
from coda_agent.agent.tips import LONGEST_LESSON, TipsError, check_lesson
from coda_agent.verifier.report import REPORT, Rejected
from coda_agent.verifier.spec.model import Spec

DRAFT, TIP = "draft", "tip"  # kinds of events
LONGEST = 2000  # a field of a tip has at most this many characters
_TEXT = {"type": "string"}


def _tool(name: str, description: str, **arguments: str) -> Tool:
    properties = {key: _TEXT | {"description": words} for key, words in arguments.items()}
    return Tool(
        name,
        description,
        {
            "type": "object",
            "properties": properties,
            "required": list(arguments),
            "additionalProperties": False,
        },
    )


CHECK = _tool(
    "check",
    "Run a draft through the gates of this machine (trace, contract, numerics against PyTorch on the CPU, "
    "compilation for sm_90a) in some seconds. Returns what is wrong, or the kernel's resources. It submits "
    "nothing.",
    source="The whole kernel file.",
)
SUBMIT = _tool(
    "submit",
    "Submit the kernel for full verification. It counts as one of your attempts.",
    source="The whole kernel file.",
)
READ = _tool(
    "read",
    "Read a primitive's page, or a worked example.",
    page="The name of a primitive, such as per_row, or of an example, such as gemm_l1norm_gemm.",
)
PROPOSE_TIP = _tool(
    "propose_tip",
    "Propose one lesson for later authors of other kernels, learned from a rejection that you have since "
    "fixed. A person decides whether it is kept.",
    lesson=f"One line in the imperative, of use beyond this spec; at most {LONGEST_LESSON} characters.",
    failed="The gate and reason of that rejection.",
    fix="What fixed it, in one line.",
)
TOOLS = (CHECK, SUBMIT, READ, PROPOSE_TIP)
Judge = Callable[[str], dict[str, Any]]  # maps a source to its report and program


@dataclass(frozen=True)
class Tools:
    """Executes a run's tool calls. The journal stores each result of ``check`` and each proposed tip, so a
    resumed run does not repeat these calls."""

    journal: Journal
    spec: Spec
    judge: Judge

    def answer(self, place: str, call: ToolCall) -> str:
        """The result of calling ``check``, ``read`` or ``propose_tip``. ``place``: the call's key in the
        journal."""
        arguments = _arguments(call)
        if isinstance(arguments, str):
            return arguments
        if call.name == CHECK.name:
            payload = self.journal.once(f"{DRAFT}/{place}", DRAFT, lambda: self.judge(arguments["source"]))
            return checked(payload["report"])
        if call.name == READ.name:
            page = prompt.read(arguments["page"], exclude=self.spec.name)
            return (
                page or f"there is no page {arguments['page']!r}: the names are those of the vocabulary above"
            )
        self.journal.once(f"{TIP}/{place}", TIP, lambda: dict(arguments))
        return "noted: a person will look at it"


def submission(turn: Turn) -> str | None:
    """The source that a turn submits with the ``submit`` tool; None if the turn does not call ``submit``."""
    for call in reversed(turn.calls):
        if call.name == SUBMIT.name:
            source = call.input.get("source")
            return source if isinstance(source, str) else ""
    return None


def submits(turn: Turn) -> bool:
    """Whether a turn ends an attempt. A turn that only calls other tools does not."""
    return not turn.calls or submission(turn) is not None


def results(turn: Turn, words: Mapping[str, str], text: str = "") -> Message:
    """The message that answers a turn. ``words``: the results of the turn's tool calls, by id. ``text``: the
    result of a call that has no entry in ``words``; if the turn has no calls, the whole message."""
    if not turn.calls:
        return Message("user", text)
    blocks = [
        {"type": "tool_result", "tool_use_id": call.id, "content": words.get(call.id, text)}
        for call in turn.calls
    ]
    return Message("user", "\n\n".join(str(block["content"]) for block in blocks), tuple(blocks))


def checked(report: Mapping[str, Any]) -> str:
    """Text for the author about the result of checking a draft."""
    found = REPORT.validate_python(report)
    if isinstance(found, Rejected):
        return prompt.rejection(found)
    kernels = next(g.figures["kernels"] for g in found.gates if g.gate == "compile")
    resources = "; ".join(f"{k['registers']} registers, {k['spill_loads']} spills" for k in kernels)
    return f"Passes every gate of this machine ({resources}). Submit it to have it measured."


def _arguments(call: ToolCall) -> dict[str, str] | str:
    """The input of a call, or a message that says what is wrong with the call."""
    tool = next((t for t in TOOLS if t.name == call.name), None)
    if tool is None:
        return f"there is no tool {call.name!r}; there are {', '.join(t.name for t in TOOLS)}"
    given, wanted = dict(call.input), tool.schema["required"]
    if given.keys() != set(wanted) or not all(isinstance(value, str) for value in given.values()):
        return f"{call.name} takes {', '.join(wanted)}, each a string, and nothing else"
    return _tip(given) if tool is PROPOSE_TIP else given


def _tip(given: dict[str, str]) -> dict[str, str] | str:
    """The tip if it is valid; otherwise a message that says what is wrong, so that the author can correct the
    tip."""
    longest = max(map(len, given.values()))
    if longest > LONGEST:
        return f"a tip's field has {longest} characters; {LONGEST} at most"
    try:
        check_lesson(given["lesson"])
    except TipsError as error:
        return str(error)
    return given
