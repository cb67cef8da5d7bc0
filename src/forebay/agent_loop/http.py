"""`HTTPAgentLoop`: what the loops of inference servers have in common: attempts, retries, outages, several servers.

A subclass is a `Wire` (see `endpoint`): it says what a request contains and how an answer is read. The top of `openai`
lists what the loops promise; `routing` says which of several servers gets a request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import httpx
import msgspec

from forebay.agent_loop.base import AgentLoop, done_or_paused
from forebay.agent_loop.completion import Answer, Interrupted, WrongAnswer, merged, step_of
from forebay.agent_loop.endpoint import Endpoint, Link, ReadPiece
from forebay.agent_loop.monitor import Engine, Engines, ServerMonitor, Unreachable
from forebay.agent_loop.outage import DOWN_TIMEOUT_S, Outage
from forebay.agent_loop.routing import Router
from forebay.agent_loop.server import authorization, checked_url, same_server
from forebay.core.aio import run_user_code
from forebay.core.rollout import RolloutState, SampleParams, Status
from forebay.core.validate import integer_setting, positive_seconds
from forebay.errors import EngineError, EngineRestarted, InvalidConfig, InvalidInput

log = logging.getLogger(__name__)

_MAX_DELAY_S = 30.0
_MIN_WAIT_S = 0.02
_MAX_LOSSES = 10  # lost connections in a row without a new token: this request may be what crashes the server


class HTTPAgentLoop(AgentLoop):
    """Generates through one HTTP server, or several. Abstract: see `OpenAIAgentLoop` and `SGLangGenerateLoop`."""

    path: ClassVar[str]
    """Added to each base URL."""

    reserved: ClassVar[frozenset[str]] = frozenset()
    """Fields that `extra_body` cannot set."""

    def __init__(
        self,
        base_url: str | Sequence[str],
        *,
        sample_params: SampleParams | None = None,
        api_key: str | None = None,
        max_concurrency: int = 256,
        connect_timeout_s: float = 10.0,
        read_timeout_s: float = 120.0,
        max_retries: int = 3,
        backoff_s: float = 0.5,
        down_timeout_s: float = DOWN_TIMEOUT_S,
        stream: bool = True,
        extra_body: Mapping[str, Any] | None = None,
        max_response_bytes: int = 16 * 2**20,
        vocabulary: int | None = None,
        engine: Engine | Engines | None = None,
        trust_restarts: bool = False,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        urls = _checked_urls(base_url)
        if sample_params is not None and not isinstance(sample_params, SampleParams):
            raise InvalidConfig(f"sample_params is {sample_params!r:.80}; expected SampleParams or None")
        if client is not None and not isinstance(client, httpx.AsyncClient):
            raise InvalidConfig(f"client is {client!r:.80}; expected an httpx.AsyncClient or None")
        if engine is not None and trust_restarts:
            raise InvalidConfig("engine and trust_restarts are both set; set trust_restarts on the control instead")
        self.sample_params = sample_params or SampleParams()
        self.max_retries = integer_setting("max_retries", max_retries, least=0)
        self.backoff_s = positive_seconds("backoff_s", backoff_s, or_zero=True)
        self.down_timeout_s = down_timeout_s
        self._max_concurrency = integer_setting("max_concurrency", max_concurrency, least=1)
        self._slots = asyncio.Semaphore(self._max_concurrency)
        self._stream = bool(stream)
        self._extra = _checked_extra(extra_body, self.reserved)
        if vocabulary is not None:
            vocabulary = integer_setting("vocabulary", vocabulary, least=1)
        self.vocabulary = vocabulary
        read_s = positive_seconds("read_timeout_s", read_timeout_s)
        self._link = Link(
            client,
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"} | authorization(api_key),
            timeout=httpx.Timeout(read_s, connect=positive_seconds("connect_timeout_s", connect_timeout_s)),
            max_bytes=integer_setting("max_response_bytes", max_response_bytes, least=1),
            max_connections=self._max_concurrency,
            api_key=api_key,
            secure=any(url.startswith("https:") for url in urls),
        )
        self._engine = engine
        engines = _matched(urls, engine, while_running=self.takes_weights_while_running)
        self._router = Router(
            [
                Endpoint(
                    url,
                    self,
                    self._link,
                    Outage(url.removesuffix("/v1"), down_timeout_s, first_delay_s=self.backoff_s),
                    engine=control,
                    trust_restarts=trust_restarts,
                    paused=lambda: self.paused,
                )
                for url, control in zip(urls, engines, strict=True)
            ]
        )
        self.urls = tuple(server.url for server in self._router.servers)
        self.url = ", ".join(self.urls)
        # With several servers it is the outage of all of them.
        self._outage = self._router.servers[0].outage
        if self._router.several:
            name = "each of " + ", ".join(server.root for server in self._router.servers)
            # Its probe asks no server, so that a delay of zero would be a busy loop.
            self._outage = Outage(name, down_timeout_s, first_delay_s=max(self.backoff_s, _MIN_WAIT_S))
        # Jitter keeps processes from retrying in step, so each has a different seed. Results do not depend on it.
        self._random = random.Random(f"{socket.gethostname()} {os.getpid()}")

    @abstractmethod
    def body(self, answer: Answer) -> dict[str, Any]:
        """The fields of a request for the rest of an answer."""

    @abstractmethod
    def reader(self) -> ReadPiece:
        """Reads the answer to one request."""

    def step_of(self, version: str) -> int | None:
        """The model step that a version of a server names; None if it names none."""
        return step_of(version)

    async def close(self) -> None:
        """Close the connections, when no request is in progress. The loop can be used again, on any event loop."""
        await self._router.close()
        if self._link.owned:
            self._slots = asyncio.Semaphore(self._max_concurrency)
            await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def in_flight(self) -> dict[str, int]:
        """The number of requests of this loop that each server has now, by its root."""
        return {server.root: server.in_flight for server in self._router.servers}

    async def idle(self) -> None:
        """Wait until the servers have stopped our requests, and all others: they do not distinguish them."""
        if self._engine is not None:
            await self._engine.idle()
        else:
            await asyncio.gather(*(server.idle() for server in self._router.servers))

    def explain_wait(self) -> str | None:
        """Why requests, or an update of the weights, wait for the server now, and which servers get no requests."""
        engine = None if self._engine is None else self._engine.explain_wait()
        return "; ".join(filter(None, (super().explain_wait(), self._router.explain(), engine))) or None

    async def weights_loaded(self, model_step: int) -> None:
        """Record which processes have the weights of this step. EngineError if no server can be asked."""
        await self._router.weights_loaded(model_step)

    async def _engine_answers(self) -> bool:
        asked = (server.monitor.find_process() for server in self._router.servers)
        results = await asyncio.gather(*asked, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Unreachable):
                raise result
        return any(isinstance(result, str) for result in results)

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        """Generate one sample in place. InvalidInput without `prompt_ids`, EngineError if the server fails.

        It continues after `response_ids`, so a subclass may call it once for each turn. `generate_group` has dropped
        the response of an earlier attempt, unless `enable_partial_rollout`.
        """
        if self.paused:
            state.status = Status.ABORTED
            return state
        _check_vocabulary(state, self.vocabulary)
        answer = Answer(state, merged(self.sample_params, state.sample_params))
        call = await run_user_code(self._complete(answer), until=partial(done_or_paused, self))
        answer.write()
        if call.cancelled is not None:
            raise call.cancelled
        if call.in_time:  # errors that follow from a pause do not matter
            call.future.result()
        return state

    # --- attempts -------------------------------------------------------------------------------------

    async def _complete(self, answer: Answer) -> None:
        retries = losses = 0
        while not answer.complete():
            before = len(answer)
            async with self._slots:  # not held while waiting for the next attempt
                server = self._router.choose(answer.state)
                failure = None if server is None else await self._attempt(server, answer)
            if server is None:
                await self._wait_for_any()
                continue
            if self._router.several and (failure is None or not failure.away or len(answer) > before):
                self.outage.over()
            if failure is None:
                continue
            if answer.complete():
                return  # all tokens arrived; only the finish reason is missing
            if len(answer) > before:
                retries = losses = 0
            retries += not failure.away
            losses += isinstance(failure.__cause__, (httpx.ReadError, httpx.RemoteProtocolError))
            said = self._link.without_key(failure)
            if retries > self.max_retries or losses > _MAX_LOSSES:
                raise EngineError(
                    f"{server.url}: gave up after {retries + losses} failed attempts in a row; the last one: {said}"
                ) from failure.__cause__
            if failure.away:
                if self._router.several:
                    self._router.leave(server, said)
                else:
                    await self.outage.wait(said, server.monitor.check_reachable)
                continue
            delay_s = _delay_s(retries, self.backoff_s, self._random.random(), failure.retry_after_s)
            log.warning(
                "request_retried url=%s attempt=%d reason=%s tokens=%d delay_s=%.3f",
                server.url, retries + 1, self._link.without_key(failure.reason), len(answer), delay_s,
            )  # fmt: skip
            await asyncio.sleep(delay_s)

    async def _attempt(self, server: Endpoint, answer: Answer) -> Interrupted | None:
        """One attempt; why another one is needed, if one is."""
        try:
            with server.busy():
                await server.attempt(answer)
        except WrongAnswer as wrong:
            raise EngineError(f"{server.url}: {self._link.without_key(wrong)}") from wrong.__cause__
        except Interrupted as error:
            return error
        except EngineRestarted as error:
            if not self._router.several:
                raise
            return Interrupted(str(error), away=True)
        return None

    async def _wait_for_any(self) -> None:
        """Wait until a server can be used. EngineRestarted if all lost their weights, EngineUnavailable in the end."""
        try:
            await self._router.check_any()
        except Unreachable as none:
            await self.outage.wait(self._link.without_key(none), self._router.check_any)


def _checked_urls(base_url: str | Sequence[str]) -> list[str]:
    given = [base_url] if isinstance(base_url, str) or not isinstance(base_url, Sequence) else list(base_url)
    urls = [checked_url(url) for url in given]
    if not urls:
        raise InvalidConfig("base_url is empty; expected the URL of a server, or several")
    for position, url in enumerate(urls):
        if any(same_server(url, other) for other in urls[:position]):
            raise InvalidConfig(f"base_url has {url} twice; expected different servers")
    return urls


def _matched(urls: Sequence[str], engine: Engine | Engines | None, *, while_running: bool) -> list[Engine | None]:
    """The control of each server."""
    if engine is None:
        return [None] * len(urls)
    controls: Sequence[Any] = getattr(engine, "controls", (engine,))
    for control in controls:
        if not isinstance(getattr(control, "monitor", None), ServerMonitor):
            raise InvalidConfig(f"engine is {engine!r:.80}; expected a control of forebay.engines, or None")
        if getattr(control, "while_running", False) != while_running:
            raise InvalidConfig(
                f"{control!r:.80} has while_running={not while_running}; expected {while_running}: only a loop that "
                "reads the version of each token, like SGLangGenerateLoop, can take weights while it runs"
            )
    roots = [url.removesuffix("/v1") for url in urls]
    found = [next((c for c in controls if same_server(c.monitor.url, root)), None) for root in roots]
    if None in found or len(controls) != len(urls):
        raise InvalidConfig(
            f"the loop sends requests to {', '.join(roots)}, but its engine controls "
            f"{', '.join(control.monitor.url for control in controls)}; expected "
            f"{'one server' if len(urls) == 1 else 'the same servers'}, because the control decides which tokens count"
        )
    return found


def _check_vocabulary(state: RolloutState, vocabulary: int | None) -> None:
    ids = state.prompt_ids
    if vocabulary is None or ids is None or not len(ids):
        return
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocabulary:
        raise InvalidInput(
            f"prompt_ids of rollout {state.rollout_id} of group {state.group_id} include {low if low < 0 else high}; "
            f"expected ids from 0 to {vocabulary - 1} (vocabulary)"
        )


def _delay_s(retries: int, backoff_s: float, jitter: float, retry_after_s: float) -> float:
    """The delay before a retry (the first is 1): doubled each time, half of it jitter, and at least `retry_after_s`.

    >>> [_delay_s(retries, 0.5, 1.0, 0.0) for retries in (1, 2, 3, 9, 2000)]
    [0.5, 1.0, 2.0, 30.0, 30.0]
    >>> _delay_s(1, 0.5, 0.0, 0.0), _delay_s(1, 0.5, 0.0, 7.0), _delay_s(1, 0.5, 0.0, 3600.0)
    (0.25, 7.0, 30.0)
    """
    delay_s = backoff_s * 2.0 ** min(retries - 1, 64)
    return min(max(min(delay_s, _MAX_DELAY_S) * (0.5 + jitter / 2), retry_after_s), _MAX_DELAY_S)


def _checked_extra(extra_body: Mapping[str, Any] | None, reserved: frozenset[str]) -> dict[str, Any]:
    if extra_body is None:
        return {}
    if not isinstance(extra_body, Mapping):
        raise InvalidConfig(f"extra_body is {extra_body!r:.80}; expected a mapping of request fields")
    for name in extra_body:
        if name in reserved:
            raise InvalidConfig(
                f"extra_body has {name!r}, which the loop sets itself; use sample_params, or leave it out"
            )
    try:
        msgspec.json.encode(dict(extra_body))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise InvalidConfig(f"extra_body cannot be written as JSON: {error}") from None
    return dict(extra_body)
