"""A small real completion server on loopback: HTTP/1.1, chunked, server-sent events; it misbehaves on request.

Its model is a pure function: the next token follows from all tokens before it, so an answer that was interrupted and
continued must equal an uninterrupted one. Each request takes the next `Script`, or `server.usual` if there is none.
Requests are recorded in `server.received`; `until` waits for them without polling.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from tests.processes import HANG_S

__all__ = ["CompletionServer", "Received", "Script", "answer_to", "logprob_of", "text_of"]

_VOCABULARY = 1000
# Closing the server cancels its handlers; asyncio logs a handler that ends with a cancel.
_ENDINGS = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)


def answer_to(prompt: Sequence[int], tokens: int, stop: Sequence[int] = ()) -> list[int]:
    """The answer of the model: up to `tokens` tokens, ending with the first one in `stop`."""
    ids = [int(token) for token in prompt]
    start = len(ids)
    while len(ids) < start + tokens and not (len(ids) > start and ids[-1] in stop):
        ids.append(zlib.crc32(repr(ids).encode()) % _VOCABULARY)
    return ids[start:]


def logprob_of(token: int) -> float:
    return -(token % 64) / 16  # exact in float32


def text_of(token: int) -> str:
    return f"<{token}>"


@dataclass(frozen=True, kw_only=True)
class Script:
    """How one request is answered; by default correctly."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None  # instead of an answer
    body_length: int | None = None  # in the header; -1: no header, the body ends with the connection
    plain: bool = False  # one JSON document instead of a stream
    silent: bool = False  # no answer at all
    refuse: bool = False  # the connection is reset when the request has arrived
    cut_after: int | None = None  # the connection is closed after n tokens
    end_after: int | None = None  # a clean end after n tokens, without a finish_reason
    hold_after: int | None = None  # waits for `server.go` after n tokens
    pause_s: float = 0.0  # before each chunk
    hold_end: bool = False  # waits for `server.go` after the finish_reason
    report_after: int | None = None  # an error event with status `report_code` after n tokens
    report_code: int | None = 500
    ids: str | None = "token_ids"  # the field of the ids; "logprobs": as token names; None: no ids
    logprobs: int | None = 0  # how many more than ids in each chunk; None: no field
    null_logprobs: bool = False
    tokens_per_chunk: int = 1
    extra_tokens: int = 0  # beyond max_tokens
    bytes_per_chunk: int | None = None  # HTTP chunks that do not end with lines
    finish_reason: str | None = None  # instead of stop or length
    noise: bool = False  # comments, blank lines, chunks without a choice


@dataclass
class Received:
    """One request as it was received."""

    body: dict[str, Any]
    headers: dict[str, str]
    aborted: bool = False
    sent: int = 0


@dataclass
class CompletionServer:
    """`async with CompletionServer() as server:` listens on a free port."""

    scripts: deque[Script] = field(default_factory=deque)
    usual: Script = field(default_factory=Script)
    received: list[Received] = field(default_factory=list)
    connections: int = 0
    active: int = 0
    most_active: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    start: float | None = 1.5  # the published start time of its process; a new value means a new process
    asked: list[str] = field(default_factory=list)  # paths of requests about the server
    port: int = 0
    generates: str = "/v1/completions"

    _server: asyncio.Server | None = None
    _handlers: set[asyncio.Task[None]] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _asking: set[asyncio.StreamWriter] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def aborted(self) -> int:
        """Requests whose client went away before their answer was complete."""
        return sum(request.aborted for request in self.received)

    async def until(self, condition: Callable[[Self], bool]) -> None:
        """Wait until the server has seen something."""
        async with asyncio.timeout(HANG_S):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    # --- HTTP -----------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        try:
            with contextlib.suppress(*_ENDINGS):
                while await self._exchange(reader, writer):
                    pass
        finally:
            self._handlers.discard(handler)
            writer.close()
            with contextlib.suppress(*_ENDINGS):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection can be used for another."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if (method, path) != ("POST", self.generates):
            self.asked.append(f"{method} {path}")
            status, answer = await self.control(method, path, json.loads(body) if body else None)
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(answer)}\r\n\r\n".encode() + answer)
            await writer.drain()
            return True
        self.connections += not self._counted(writer)
        request = Received(json.loads(body), headers)
        script = self.scripts.popleft() if self.scripts else self.usual
        self.received.append(request)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        self._changed.set()
        answering = asyncio.ensure_future(self._answer(request, script, writer))
        leaving = asyncio.ensure_future(reader.read(1))  # nothing may arrive before the answer is complete
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                request.aborted = True
                return False
            leaving.cancel()
            if not answering.result():
                return False
            writer.write(b"0\r\n\r\n" if script.body is None and not script.plain else b"")
            await writer.drain()
            return True
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            self.active -= 1
            self._changed.set()

    async def _answer(self, request: Received, script: Script, writer: asyncio.StreamWriter) -> bool:
        if script.refuse:
            writer.transport.abort()
            return False
        if script.silent:
            await asyncio.Event().wait()
        if script.plain or script.body is not None:
            body = script.body if script.body is not None else json.dumps(await self.whole(request, script)).encode()
            kind = ("Content-Type", "application/json" if script.plain else "text/plain")
            announced = len(body) if script.body_length is None else script.body_length
            _head(writer, script, kind, *([("Content-Length", str(announced))] if announced >= 0 else []))
            writer.write(body)
            return announced == len(body)
        _head(writer, script, ("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked"))
        async for data in self._stream(request, script):
            size = script.bytes_per_chunk or len(data)
            for start in range(0, len(data), size):
                part = data[start : start + size]
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                if script.bytes_per_chunk:
                    await asyncio.sleep(0)  # mostly sends each part in its own packet
            await writer.drain()
        if script.cut_after is not None:
            writer.write(b"20\r\ndata: half a li")
            return False
        return True

    def _counted(self, writer: asyncio.StreamWriter) -> bool:
        """Whether a connection is counted: those that only ask about the server are not."""
        known = writer in self._asking
        self._asking.add(writer)
        return known

    async def control(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        """The status and body of the answer to anything but a completion."""
        if (method, path) == ("GET", "/metrics") and self.start is not None:
            return 200, (
                f"process_start_time_seconds {self.start}\n"
                f'vllm:num_requests_running{{engine="0"}} {self.active:.1f}\n'
                'vllm:num_requests_waiting{engine="0"} 0.0\n'
            ).encode()
        return 404, b"{}"

    # --- answers --------------------------------------------------------------------------------------

    async def whole(self, request: Received, script: Script) -> dict[str, Any]:
        """An answer that is not streamed."""
        ids, reason = _generated(request, script)
        request.sent = len(ids)
        return {"object": "text_completion", "choices": [_choice(ids, script, reason)]}

    async def _stream(self, request: Received, script: Script) -> AsyncIterator[bytes]:
        ids, reason = _generated(request, script)
        if script.noise:
            yield b": hello\n\nevent: message\n" + _event({"choices": []})
        ends = (script.cut_after, script.end_after, script.report_after)
        last = min((end for end in ends if end is not None), default=len(ids))
        for start in range(0, last, script.tokens_per_chunk):
            if script.hold_after is not None and start >= script.hold_after:
                await self.go.wait()
            await asyncio.sleep(script.pause_s)
            part = ids[start : min(start + script.tokens_per_chunk, last)]
            done = start + len(part) == len(ids) and all(end is None for end in ends)
            yield _event({"choices": [_choice(part, script, reason if done else None)]})
            request.sent += len(part)
            self._changed.set()
        if script.hold_after is not None and last <= script.hold_after:
            await self.go.wait()
        if script.report_after is not None:
            yield _event({"error": {"message": "the engine stumbled", "code": script.report_code}})
        elif any(end is not None for end in ends):
            return
        if script.noise:
            yield _event({"choices": [], "usage": {"completion_tokens": len(ids)}})
        if script.hold_end:
            await self.go.wait()
        yield b"data: [DONE]\n\n"


def _generated(request: Received, script: Script) -> tuple[list[int], str]:
    asked, stop = request.body.get("max_tokens", 16), request.body.get("stop_token_ids", ())
    ids = answer_to(request.body["prompt"], asked + script.extra_tokens, stop)
    return ids, script.finish_reason or ("stop" if ids[-1] in stop else "length")


def _choice(ids: list[int], script: Script, reason: str | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "text": "".join(map(text_of, ids)), "finish_reason": reason}
    if script.ids not in (None, "logprobs"):
        choice[str(script.ids)] = ids
    if script.logprobs is not None:
        entries = [None if script.null_logprobs else logprob_of(token) for token in ids]
        entries += [0.0] * script.logprobs
        names = [f"token_id:{token}" if script.ids == "logprobs" else text_of(token) for token in ids]
        choice["logprobs"] = {"tokens": names, "token_logprobs": entries[: max(0, len(ids) + script.logprobs)]}
    return choice


def _event(message: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def _head(writer: asyncio.StreamWriter, script: Script, *headers: tuple[str, str]) -> None:
    lines = [f"{name}: {value}" for name, value in (dict(headers) | dict(script.headers)).items()]
    writer.write("\r\n".join((f"HTTP/1.1 {script.status} Said", *lines, "", "")).encode())
