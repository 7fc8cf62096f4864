"""A fake Messages API on loopback. A script holds one reply for each request: an answer, an error or a broken
stream."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

MODEL = "claude-fake-1"
USAGE = {
    "input_tokens": 11,
    "cache_creation_input_tokens": 300,
    "cache_read_input_tokens": 4000,
    "output_tokens": 1,
}


COUNTED = 4311  # the number of tokens that the server counts for every request


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a body waits 40 ms for the acknowledgement of its headers
    server: _Server

    def do_GET(self) -> None:
        """Send the API's description of a model."""
        self.server.model(self)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "count_tokens" in self.path:
            self.server.counted.append(json.loads(body))
            self.server.count(self)
            return
        request = json.loads(body)
        self.server.requests.append(request)
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        if _blank_text(request):
            said = "messages: text content blocks must contain non-whitespace text"
            status(400, "invalid_request_error", said)(self)
            return
        self.server.script.pop(0)(self)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def start(self, status: int, kind: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **headers}.items():
            self.send_header(name.replace("_", "-"), value)

    def start_stream(self) -> None:
        self.start(200, "text/event-stream", Transfer_Encoding="chunked")
        self.end_headers()

    def chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def event(self, event: str, **fields: Any) -> None:
        self.chunk(f"event: {event}\ndata: {json.dumps({'type': event, **fields})}\n\n")

    def start_message(self, usage: dict[str, int] = USAGE) -> None:
        """Begin a stream: send everything that comes before its first block."""
        message: dict[str, Any] = {
            "id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip
        self.start_stream()
        self.event("message_start", message=message)

    def begin(self, text: str, usage: dict[str, int] = USAGE) -> None:
        """Begin a stream: send everything up to the middle of its only text block."""
        self.start_message(usage)
        self.event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        self.event("ping")
        for part in text.split(" "):
            self.say(part + " ")

    def say(self, text: str) -> None:
        self.event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def end(self, stop_reason: str, output_tokens: int = 7, **details: Any) -> None:
        """End a stream whose blocks have ended."""
        delta = {"stop_reason": stop_reason, "stop_sequence": None, **details}
        self.event("message_delta", delta=delta, usage={"output_tokens": output_tokens})
        self.event("message_stop")
        self.end_cleanly()

    def json(self, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        self.start(200, "application/json", Content_Length=str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_cleanly(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def cut(self) -> None:
        self.close_connection = True


Reply = Callable[[_Handler], None]


def _blank_text(request: dict[str, Any]) -> bool:
    """Return whether a message contains a text block of only whitespace, which the API refuses."""
    blocks = [block for message in request["messages"] for block in message["content"]]
    return any(block["type"] == "text" and not block["text"].strip() for block in blocks)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    script: list[Reply]
    requests: list[dict[str, Any]]
    headers: list[dict[str, str]]
    counted: list[dict[str, Any]]
    count: Reply
    model: Reply
    over: threading.Event


class FakeMessages:
    """Serves ``script``, one reply for each request, within the ``with`` block. ``requests`` and ``headers``
    record the requests.

    Requests that count tokens or ask for a model are not part of the script. ``count`` and ``model`` answer
    them, and ``counted`` records the requests that count tokens.
    """

    def __init__(self, *script: Reply, count: Reply | None = None, model: Reply | None = None):
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.script, self._server.requests, self._server.headers = list(script), [], []
        self._server.counted, self._server.over = [], threading.Event()
        self._server.count, self._server.model = count or counts(COUNTED), model or describes()
        self.counted = self._server.counted
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.script, self.requests, self.headers = (
            self._server.script, self._server.requests, self._server.headers
        )  # fmt: skip

    def __enter__(self) -> FakeMessages:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.over.set()
        self._server.shutdown()
        self._server.server_close()


def counts(tokens: int) -> Reply:
    return lambda handler: handler.json({"input_tokens": tokens})


def describes(adaptive: bool = True, max_tokens: int = 64_000) -> Reply:
    """Send a description of a model, with or without adaptive thinking."""
    thinking = {
        "supported": True,
        "types": {"adaptive": {"supported": adaptive}, "enabled": {"supported": True}},
    }
    data = {"id": MODEL, "type": "model", "max_tokens": max_tokens, "capabilities": {"thinking": thinking}}
    return lambda handler: handler.json(data)


def answer(
    text: str,
    stop_reason: str = "end_turn",
    output_tokens: int = 7,
    usage: dict[str, int] = USAGE,
    **details: Any,
) -> Reply:
    """Send a complete answer, word by word."""

    def reply(handler: _Handler) -> None:
        handler.begin(text, usage)
        handler.event("content_block_stop", index=0)
        handler.end(stop_reason, output_tokens, **details)

    return reply


def slowly(*parts: str, pause: float, ping: bool = False) -> Reply:
    """Send a complete answer with ``pause`` seconds after each part. If ``ping`` is true, send a ping in the
    middle of each pause."""

    def reply(handler: _Handler) -> None:
        handler.start_message()
        handler.event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        for part in parts:
            handler.say(part)
            for half in range(2):
                handler.server.over.wait(pause / 2)
                if ping and not half:
                    handler.event("ping")
        handler.event("content_block_stop", index=0)
        handler.end("end_turn")

    return reply


def nothing(handler: _Handler) -> None:
    """Send a complete answer without blocks."""
    handler.start_message()
    handler.end("end_turn")


def uses(*calls: tuple[str, dict[str, Any]], text: str = "", thinking: str = "", cut: bool = False) -> Reply:
    """Send an answer with text, thinking and tool calls. A call is a pair (name, input). If ``cut`` is true,
    the answer stops for max_tokens in the middle of each call's input."""

    def reply(handler: _Handler) -> None:
        handler.begin(text)
        handler.event("content_block_stop", index=0)
        index = 1
        if thinking:
            begun = {"type": "thinking", "thinking": "", "signature": ""}
            handler.event("content_block_start", index=index, content_block=begun)
            handler.event(
                "content_block_delta", index=index, delta={"type": "thinking_delta", "thinking": thinking}
            )
            handler.event(
                "content_block_delta", index=index, delta={"type": "signature_delta", "signature": "s1"}
            )
            handler.event("content_block_stop", index=index)
            index += 1
        for number, (name, given) in enumerate(calls, 1):
            block: dict[str, Any] = {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": {}}
            handler.event("content_block_start", index=index, content_block=block)
            written = json.dumps(given)
            for part in (written[:9], written[9:] if not cut else ""):
                delta = {"type": "input_json_delta", "partial_json": part}
                handler.event("content_block_delta", index=index, delta=delta)
            handler.event("content_block_stop", index=index)
            index += 1
        handler.end("max_tokens" if cut else "tool_use")

    return reply


def status(code: int, kind: str, message: str = "no", **headers: str) -> Reply:
    """Send an error before any stream. In the names of ``headers``, `_` stands for `-`."""

    def reply(handler: _Handler) -> None:
        body = json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()
        handler.start(code, "application/json", Content_Length=str(len(body)), **headers)
        handler.end_headers()
        handler.wfile.write(body)

    return reply


def error_in_stream(kind: str) -> Reply:
    """Send a stream with status 200, and then an error in the stream."""

    def reply(handler: _Handler) -> None:
        handler.begin("half an")
        handler.event("error", error={"type": kind, "message": "told in the stream"})
        handler.end_cleanly()

    return reply


def cut_off(handler: _Handler) -> None:
    """Close the connection in the middle of the message."""
    handler.begin("half an")
    handler.cut()


def ends_early(handler: _Handler) -> None:
    """End the response properly in the middle of the message."""
    handler.begin("half an")
    handler.end_cleanly()


def stalls(handler: _Handler) -> None:
    """Send half of a message, then nothing until the server stops, but for at most 30 s."""
    handler.begin("half an")
    handler.server.over.wait(30)
    handler.cut()


def pings(handler: _Handler) -> None:
    """Send half of a message, then only pings for ten seconds. Stop earlier if the server stops or the client
    disconnects."""
    handler.begin("half an")
    with suppress(OSError):
        for _ in range(500):
            if handler.server.over.wait(0.02):
                break
            handler.event("ping")
    handler.cut()


def not_json(handler: _Handler) -> None:
    """Send an event with incomplete data."""
    handler.begin("half an")
    handler.chunk('event: content_block_delta\ndata: {"type": "content_block_de\n\n')
    handler.end_cleanly()


def out_of_order(handler: _Handler) -> None:
    """Send a delta for a block that never began."""
    handler.begin("half an")
    handler.event("content_block_delta", index=5, delta={"type": "text_delta", "text": "?"})
    handler.end_cleanly()


def a_web_page(handler: _Handler) -> None:
    """Send a web page with status 200, as a captive portal does."""
    handler.start(200, "text/html", Content_Length="13")
    handler.end_headers()
    handler.wfile.write(b"<html></html>")
