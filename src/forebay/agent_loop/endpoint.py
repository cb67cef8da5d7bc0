"""`Endpoint`: one server that generates, and one attempt at an answer there.

What an attempt promises: it returns when the answer has ended, or raises `Interrupted` (another attempt may succeed,
here or elsewhere) or `WrongAnswer` (none will). Tokens that arrived stay in the answer in all cases, if they were
generated with weights that are known (see `monitor`). It neither waits for a server that is away nor chooses another:
the loop does.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Protocol

import httpx
import msgspec

from forebay.agent_loop.completion import TRANSIENT_STATUSES, Answer, EventReader, Interrupted, Piece, WrongAnswer
from forebay.agent_loop.monitor import AnotherProcess, Engine, ServerMonitor, Unreachable
from forebay.agent_loop.names import NamedHosts
from forebay.agent_loop.outage import GATEWAY_STATUSES, Outage, is_outage
from forebay.agent_loop.server import fetch, raw, read_into, until_idle
from forebay.core.aio import see_through

_DRAIN_S = 1.0  # for the end of a stream after its last token
_CONFIRM_S = 35.0
_HURRIED_CONFIRM_S = 5.0  # after a pause, a cancel or an error
_QUOTED = 200  # characters of a server's message that an error repeats

ReadPiece = Callable[[bytes, bool], Piece | None]
"""Reads one chunk of a stream, or a whole answer; the flag: tokens of this attempt arrived before it."""


class Wire(Protocol):
    """The protocol of a server: what is sent, and how the answer is read."""

    @property
    def path(self) -> str:
        """Added to the URL of a server."""

    def body(self, answer: Answer) -> dict[str, Any]:
        """The fields of a request for the rest of an answer."""

    def reader(self) -> ReadPiece:
        """Reads the answer to one request."""

    def step_of(self, version: str) -> int | None:
        """The model step that a version of a server names; None if it names none."""


class Link:
    """The HTTP client of a loop, shared by its servers, and what all requests have in common."""

    def __init__(
        self,
        client: httpx.AsyncClient | None,
        *,
        headers: dict[str, str],
        timeout: httpx.Timeout,
        max_bytes: int,
        max_connections: int,
        api_key: str | None,
        secure: bool,
    ) -> None:
        self.headers, self.timeout, self.max_bytes = headers, timeout, max_bytes
        self._max_connections, self._api_key, self._secure = max_connections, api_key, secure
        self.owned = client is None
        self.client = client or self._new_client()

    def _new_client(self) -> httpx.AsyncClient:
        # The environment is ignored: a proxy that it names would be put between us and a local server, and read every
        # prompt. The pool has no limit: `max_concurrency` is the limit, and httpcore never frees the slot of a request
        # that was cancelled while connecting (encode/httpcore#1099), so that pauses would exhaust the pool.
        return httpx.AsyncClient(
            trust_env=False,
            transport=NamedHosts(
                httpx.AsyncHTTPTransport(
                    trust_env=False,
                    verify=self._secure,  # plain HTTP without redirects needs no certificates
                    limits=httpx.Limits(max_connections=None, max_keepalive_connections=self._max_connections),
                )
            ),
        )

    async def close(self) -> None:
        """Close the connections; a new client serves later requests, on any event loop."""
        closing, self.client = self.client, self._new_client()
        await closing.aclose()

    def without_key(self, said: object) -> str:
        """A server's message without our key: some servers repeat the headers."""
        return str(said) if self._api_key is None else str(said).replace(self._api_key, "***")


class Endpoint:
    """One server of a loop: its address, its monitor, its outages and its load.

    `gone`: why it is left out of routing; None while it may be sent requests. `paused` says whether the loop is.
    """

    def __init__(
        self,
        base_url: str,
        wire: Wire,
        link: Link,
        outage: Outage,
        *,
        engine: Engine | None,
        trust_restarts: bool,
        paused: Callable[[], bool],
    ) -> None:
        self.url = base_url + wire.path
        self.root = base_url.removesuffix("/v1")
        self.outage = outage
        self.engine = engine
        self.monitor = (
            ServerMonitor(self.root, self._fetch, trust_restarts=trust_restarts) if engine is None else engine.monitor
        )
        self.in_flight = 0
        self.gone: str | None = None
        self._wire, self._link, self._paused = wire, link, paused

    def __repr__(self) -> str:
        return f"<Endpoint {self.url}>"

    @property
    def usable(self) -> bool:
        """Whether a request may be sent to it now."""
        return self.gone is None and not self.monitor.doubted

    @property
    def lost(self) -> bool:
        """Whether it answers with unknown weights, and nothing here can load the current ones."""
        return self.monitor.doubted and self.monitor.reload is None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a request while the block runs."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def idle(self) -> None:
        """Wait until the server has stopped our requests; used if it has no control."""
        await until_idle(self._fetch, self.root)

    async def _fetch(self, path: str) -> bytes | None:
        return await fetch(self._link.client, self.root + path, self._link.headers)

    # --- one attempt ----------------------------------------------------------------------------------

    async def attempt(self, answer: Answer) -> None:
        """One request. Returns when the answer has ended; WrongAnswer or Interrupted otherwise."""
        client = self._link.client
        if client.is_closed:
            raise WrongAnswer("the loop, or its client, is closed; create a new one")
        vouched = False

        async def trace(event: str, _: object) -> None:
            nonlocal vouched
            if event.endswith("send_request_headers.started"):  # the connection has just been made, or chosen
                vouched = self.monitor.vouches()

        request = client.build_request(
            "POST",
            self.url,
            content=msgspec.json.encode(self._wire.body(answer)),
            headers=self._link.headers,
            timeout=self._link.timeout,
            extensions={"trace": trace},
        )
        try:
            await self.monitor.ready()
            response = await client.send(request, stream=True, follow_redirects=False)
            if response.is_success:
                self.outage.over()
                await self._take(response, answer, vouched)
                if answer.finish_reason == "abort" and not self._paused():
                    await self.monitor.confirm()  # we did not ask for it: the server may be shutting down
            else:
                try:
                    raise await self._refusal(response)
                finally:
                    await response.aclose()
        except httpx.TransportError as error:
            if not isinstance(error, httpx.ReadTimeout):
                self.monitor.connection_lost()
            raise Interrupted(type(error).__name__, detail=f" {error}".rstrip(), away=is_outage(error)) from error
        except Unreachable as error:
            answer.finish_reason = None
            raise Interrupted(f"the server does not say which weights it has: {error}", away=True) from error
        if answer.finish_reason is None:
            kind = response.headers.get("content-type", "no content type")
            raise Interrupted("the answer ended without a finish_reason", detail=f" ({kind:.80})")

    async def _take(self, response: httpx.Response, answer: Answer, vouched: bool) -> None:
        """Receive an answer, and keep it if the server has the current weights.

        One connection belongs to one process; the server is asked which one while the answer arrives. `vouched`:
        whether to keep the answer if the server does not say.
        """
        confirming = asyncio.create_task(self.monitor.confirm())
        receiving = asyncio.create_task(self._receive(response, answer))
        try:
            try:
                await asyncio.wait((receiving, confirming), return_when=asyncio.FIRST_COMPLETED)
                if not (confirming.done() and (confirming.cancelled() or confirming.exception())):
                    await asyncio.wait((receiving,))
            finally:
                # A stream that will not count is closed at once: a server must be idle to be loaded again.
                receiving.cancel()
                await see_through(receiving)
                await response.aclose()
                failed = None if receiving.cancelled() else receiving.exception()
            if failed is not None:
                raise failed
        except BaseException:
            await self._settle(answer, confirming, _HURRIED_CONFIRM_S, vouched)
            raise
        if not await self._settle(answer, confirming, _CONFIRM_S, vouched) or receiving.cancelled():
            if not confirming.done():
                raise Unreachable(f"no answer within {_CONFIRM_S:g} s")
            confirming.result()

    async def _settle(self, answer: Answer, confirming: asyncio.Task[None], timeout_s: float, vouched: bool) -> bool:
        """Wait for the confirmation; keep the new tokens if they count, else remove them. Also when cancelled."""
        version: int | None = None
        try:
            await asyncio.wait((confirming,), timeout=timeout_s)
            if answer.needs_version:
                version = await self._version_now(timeout_s)
        finally:
            known = vouched and not self.monitor.doubted
            if confirming.done() and not confirming.cancelled():
                error = confirming.exception()
                unanswered = isinstance(error, Unreachable) and not isinstance(error, AnotherProcess)
                known = error is None or (unanswered and known)
            confirming.cancel()
            answer.settle(known=known, version=version)
        return known

    async def _version_now(self, timeout_s: float) -> int | None:
        """The step of the weights that the server has; of a dead server, of those that its control loaded last."""
        try:
            async with asyncio.timeout(timeout_s):
                version = await self.monitor.version()
        except (Unreachable, TimeoutError):
            return self.monitor.loaded_step
        return None if version is None else self._wire.step_of(version)

    async def _receive(self, response: httpx.Response, answer: Answer) -> None:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            # Decompressed it could be a thousand times larger, beyond the limit on memory.
            raise WrongAnswer("the answer is compressed, although the request had `Accept-Encoding: identity`")
        before, read_piece = len(answer), self._wire.reader()
        if response.headers.get("content-type", "").lower().startswith("application/json"):
            piece = read_piece(await self._body(response), False)
            if piece is not None:
                answer.add(piece)
            return
        reader = EventReader(max_bytes=self._link.max_bytes)
        async with aclosing(raw(response)) as stream:
            async for data in stream:
                for payload in reader.feed(data):
                    if payload == b"[DONE]":
                        return
                    piece = read_piece(payload, len(answer) > before)
                    if piece is None:
                        continue
                    answer.add(piece)
                    if answer.finish_reason is not None:
                        # Reading to the end lets the connection be reused. Errors do not matter any more.
                        with suppress(TimeoutError, httpx.TransportError):
                            async with asyncio.timeout(_DRAIN_S):
                                async for _ in stream:
                                    pass
                        return

    async def _body(self, response: httpx.Response) -> bytes:
        limit = self._link.max_bytes
        if int(response.headers.get("content-length", 0)) <= limit:
            body = bytearray()
            await read_into(body, response, limit + 1)
            if len(body) <= limit:
                return bytes(body)
        raise WrongAnswer(f"the answer is longer than {limit} bytes (max_response_bytes)")

    async def _refusal(self, response: httpx.Response) -> Interrupted | WrongAnswer:
        """The error for a status other than success, with the beginning of the server's message."""
        said = bytearray()
        with suppress(httpx.TransportError):
            await read_into(said, response, 4 * _QUOTED)  # no character takes more than 4 bytes
        text = self._link.without_key(said.decode("utf-8", "replace"))
        detail = f": {text[:_QUOTED]}" if text.strip() else ""
        if response.status_code not in TRANSIENT_STATUSES:
            missing = response.status_code == 404 and self.url.endswith("/completions")
            hint = "; base_url usually ends in /v1" if missing and not self.url.endswith("/v1/completions") else ""
            return WrongAnswer(f"status {response.status_code}{detail}{hint}")
        away = response.status_code in GATEWAY_STATUSES
        if away:
            self.monitor.connection_lost()
        wait = re.fullmatch(r"\d{1,9}(\.\d{1,9})?", response.headers.get("retry-after", "").strip())
        retry_after_s = 0.0 if wait is None else float(wait[0])
        return Interrupted(f"status {response.status_code}", detail=detail, retry_after_s=retry_after_s, away=away)
