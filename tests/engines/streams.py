"""An HTTP client that counts what servers stream: tests act at the n-th token, not after some time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx

__all__ = ["StreamCounter"]


class StreamCounter(httpx.AsyncBaseTransport):
    """Passes every request on, and counts the events of completion streams (one holds one token or a few).

    `events_per_stream`: a stream that begins while this is set stalls behind that number of events, until its client
    gives it up. However fast the server and the machine are, a pause then finds the stream at that event.
    """

    def __init__(self) -> None:
        self.events = 0
        self.tokens = 0
        self.stalled = 0
        self.ended = 0
        self.events_per_stream: int | None = None
        self._moved = asyncio.Event()
        # The agent loop limits its requests itself.
        self._inner = httpx.AsyncHTTPTransport(trust_env=False, limits=httpx.Limits(max_connections=None))

    def client(self) -> httpx.AsyncClient:
        """A client that sends its requests through this."""
        return httpx.AsyncClient(transport=self, trust_env=False)

    async def more(self, events: int) -> None:
        """Wait until this number of further events has arrived."""
        goal = self.events + events
        while self.events < goal:
            await self._next_move()

    async def until_stalled(self, streams: int) -> None:
        """Wait until this number of streams, of those that begin from now on, stall or have ended."""
        before = self.ended
        while self.stalled + self.ended - before < streams:
            await self._next_move()

    async def _next_move(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        if request.url.path.endswith("/completions"):
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _Counted(response.stream, self, self.events_per_stream)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()

    def count(self, event: bytes) -> None:
        """One more event has arrived."""
        self.events += 1
        payload = event.removeprefix(b"data: ")
        if payload.startswith(b"{"):
            choices = json.loads(payload).get("choices") or [{}]
            self.tokens += len(choices[0].get("token_ids") or ())
        self._moved.set()

    def end(self) -> None:
        """A stream came to its end."""
        self.ended += 1
        self._moved.set()

    async def stall(self) -> None:
        """A stream waits here until it is given up."""
        self.stalled += 1
        self._moved.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.stalled -= 1


class _Counted(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, counter: StreamCounter, limit: int | None) -> None:
        self._stream, self._counter, self._limit = stream, counter, limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        events, begun = 0, b""
        async for data in self._stream:
            *complete, begun = (begun + data).split(b"\n\n")
            for event in complete:
                if events == self._limit:
                    await self._counter.stall()
                events += 1
                self._counter.count(event)
                yield event + b"\n\n"
        self._counter.end()
        if begun:
            yield begun

    async def aclose(self) -> None:
        await self._stream.aclose()
