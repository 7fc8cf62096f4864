"""Output lines of the `claude` command, without the fields that the claude-code provider does not read.

Claude Code 2.1.330 printed such lines on 2026-11-22, when the claude-code provider ran it against a Messages
API on loopback. No subscription was used.
"""

from __future__ import annotations

import json
import re
from typing import Any

NONE = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
SONNET = {"inputTokens": 11, "outputTokens": 7, "cacheReadInputTokens": 4000, "cacheCreationInputTokens": 300,
          "webSearchRequests": 0, "costUSD": 0.001242, "canonicalModel": "claude-sonnet-5-5"}  # fmt: skip
RESULT: dict[str, Any] = {
    "stop_reason": "end_turn",
    "total_cost_usd": 0.001242,
    "usage": {"input_tokens": 11, "cache_creation_input_tokens": 300, "cache_read_input_tokens": 4000,
              "output_tokens": 7, "service_tier": "standard", "speed": "standard"},
    "modelUsage": {"claude-sonnet-5-5": SONNET},
    "permission_denials": [],
    "terminal_reason": "completed",
    "is_error": False,
    "num_turns": 1,
    "subtype": "success",
    "api_error_status": None,
    "result": "Here it is. ",
    "type": "result",
}  # fmt: skip
WHOLE = 11 + 300 + 4000 + 7  # tokens
FAILED = RESULT | {"stop_reason": "stop_sequence", "total_cost_usd": 0, "usage": NONE, "modelUsage": {},
                   "terminal_reason": "api_error", "is_error": True}  # fmt: skip


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "stream_event", "event": {"type": kind, **fields}, "parent_tool_use_id": None}


def response(*texts: str, stop: str | None = "end_turn") -> list[dict[str, Any]]:
    """Return the printed lines of one response, with a block for each text. ``stop`` is None if the response
    breaks off."""
    head = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-5-5",
        "content": [],
    }
    lines: list[dict[str, Any]] = [{"type": "system", "subtype": "status", "status": "requesting"}]
    lines += [event("message_start", message=head | {"stop_reason": None, "usage": RESULT["usage"]})]
    for i, text in enumerate(texts):
        block = {"type": "text", "text": text}
        lines.append(event("content_block_start", index=i, content_block={"type": "text", "text": ""}))
        for part in re.findall(r".+?\b|.", text, re.DOTALL):
            lines.append(event("content_block_delta", index=i, delta={"type": "text_delta", "text": part}))
        lines.append({"type": "assistant", "message": head | {"content": [block], "stop_reason": None}})
        lines.append(event("content_block_stop", index=i))
    delta = {"stop_reason": stop, "stop_sequence": None}
    return [*lines, event("message_delta", delta=delta, usage={"output_tokens": 7}), event("message_stop")]


def goes_on(words: str) -> dict[str, Any]:
    """Return the message with which the command, and not the user, tells the model to continue."""
    message = {"role": "user", "content": [{"type": "text", "text": words}]}
    return {"type": "user", "message": message, "parent_tool_use_id": None, "isSynthetic": True}


def printed(*lines: dict[str, Any]) -> dict[str, Any]:
    """Return what a stand-in for the command has to do: print these lines, then exit. The last line is the
    command's final result."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    return {"stdout": text, "status": int(lines[-1].get("is_error", False))}


def failed(words: str, code: int | None = None, **fields: Any) -> dict[str, Any]:
    """Return the command's final result for a failure. ``words`` is the result's text, and ``code`` is the
    status that the API returned."""
    return FAILED | {"api_error_status": code, "result": words, **fields}


RESET = failed(
    "API Error: Connection to the API was lost (ECONNRESET). This is usually temporary — try again.",
    api_error="connection_failed",
)
REFUSED = failed(
    "API Error: Connection refused — a firewall or proxy may be blocking it (ECONNREFUSED)",
    api_error="connection_failed",
)
OVERLOADED = failed(
    "API Error: 529 Overloaded. This is a server-side issue, usually temporary — try again in a moment.",
    529,
    api_error_type="overloaded_error",
)
LIMIT = failed(
    "You've hit your 5-hour limit · resets 5:38am (UTC)",
    429,
    api_error_type="rate_limit_error",
    api_error="usage_limit_reached",
)
CONTINUE = goes_on("Output token limit hit. Resume directly — no apology, no recap of what you were doing.")
TWICE = {"input_tokens": 22, "cache_creation_input_tokens": 600, "cache_read_input_tokens": 8000,
         "output_tokens": 14}  # fmt: skip
CUT_FOUR_TIMES = [
    *[line for _ in range(3) for line in (*response("half an ", stop="max_tokens"), CONTINUE)],
    *response("half an ", stop="max_tokens"),
    failed(
        "API Error: Claude's response exceeded the 32000 output token maximum. To configure this behavior,"
        " set the CLAUDE_CODE_MAX_OUTPUT_TOKENS environment variable.",
        api_error="max_output_tokens",
        num_turns=4,
        usage={name: 2 * count for name, count in TWICE.items()},
        total_cost_usd=0.004968,
    ),
]
DECLINED = [
    *response("no ", stop="refusal"),
    failed(
        "API Error: Sonnet 5.5's safeguards flagged this message (https://www.anthropic.com/legal/aup).",
        stop_reason="refusal",
        usage=RESULT["usage"],
        total_cost_usd=0.001242,
    ),
]
