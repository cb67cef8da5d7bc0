"""Answers from a server that speaks OpenAI's completion protocol with token ids: vLLM and SGLang.

What it promises
- Tokens in, tokens out: nothing is tokenised again. Every token has its logprob, or the member fails.
- Nothing that came is lost: a pause, a cancel or a cut connection leaves it in the sample. With partial rollout, and
  after trouble inside one call, generation goes on behind it, with what is left of `max_tokens`.
- A pause or a cancel closes the connection, upon which these servers drop the request. A member that waits for its
  turn, or for the next attempt, ends at once as well.
- Trouble that may pass is tried again, with growing delays; what another attempt cannot help is an `EngineError` at
  once. A server that cannot be reached (refused, connection lost, status 502 to 504) is waited for: no attempt is
  counted, the tokens stay, and after `down_timeout_s` it is `EngineUnavailable`, which spends no try either. When a
  tool of a subclass cannot be reached while the server answers, the member fails.
- Tokens count only from a server that is known to have the current weights (see `gate`): one that restarted serves its
  start-up weights, and raises `EngineRestarted`, unless a control loads them again.
- A pause is over when the server has stopped our requests (`idle`), not when their connections are closed.

Logprobs are what the server sends. vLLM: of the raw model, before temperature, top-p and top-k (with
`--logprobs-mode processed_logprobs`: after all of them). SGLang: after temperature and `min_tokens`, before top-p and
top-k. At temperature 1 without the others they are the same; a trainer that compares them with its own must temper
alike.

It does not write `version_spans` unless the server reports versions: the buffer that takes the group in knows the
weights. It does not see a stop text that begins before an interruption and ends after it. Needs httpx: pip install
'forebay[http]'.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import re
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any, Self, cast

import httpx
import msgspec

from forebay.agent_loop.base import AgentLoop
from forebay.agent_loop.completion import (
    TRANSIENT_STATUSES,
    Answer,
    EventReader,
    Interrupted,
    WrongAnswer,
    merged,
    read_piece,
)
from forebay.agent_loop.gate import AnotherProcess, Engine, ServerGate, Unreachable
from forebay.agent_loop.names import NamedHosts
from forebay.agent_loop.outage import DOWN_TIMEOUT_S, Outage
from forebay.agent_loop.server import authorization, checked_url, fetch, same_server, until_idle
from forebay.errors import EngineError, InvalidConfig, InvalidInput
from forebay.rollout import RolloutState, SampleParams, Status
from forebay.threads import see_through

__all__ = ["OpenAIAgentLoop"]

log = logging.getLogger(__name__)

_MAX_DELAY_S = 30.0
_FAREWELL_S = 1.0
_CONFIRM_S = 35.0
_HURRIED_CONFIRM_S = 5.0  # in a pause, say
_GATEWAY_STATUSES = frozenset((502, 503, 504))
_MAX_LOSSES = 10  # connections lost in a row without a new token: it may be this request that brings the server down
_QUOTED = 200  # characters of a refusal that an error repeats
# What the loop sets itself, and what would make several answers of one.
_RESERVED = frozenset(("model", "prompt", "stream", "best_of", "echo", *SampleParams.__struct_fields__))


class OpenAIAgentLoop(AgentLoop):
    """Answers prompts through `POST {base_url}/completions`, streamed.

    - `base_url`: like `http://127.0.0.1:8000/v1`.
    - `sample_params`: defaults; what a sample has of its own wins. Give `max_tokens` in one of the two: without it
      the server chooses (vLLM: 16), again for each request.
    - `max_concurrency`: requests in flight, over all groups.
    - `read_timeout_s`: how long the server may be silent, before its first token and between two.
    - `max_retries`, `backoff_s`: attempts after a failed one, and the first delay; a new token starts the count again.
    - `down_timeout_s`: how long the server may be away.
    - `stream`: without it an interrupted request has no tokens to keep, but SGLang says which weights made each token
      (`weight_versions`), which then stand in `version_spans`.
    - `extra_body`: more fields for every request; a None there takes one out.
    - `max_response_bytes`: bound of one line of a stream, or of an answer that is not streamed.
    - `vocabulary`: the number of token ids that the model has (`vocab_size` of its config). A prompt with another id is
      refused here: such an id ends an SGLang server, and its retry ends the next one.
    - `engine`: the control of the server (`forebay.engines`), which knows when it is idle and what weights it has.
      Without one the loop finds out by itself, from what the server publishes.
    - `trust_restarts`: the server loads the current weights by itself whenever it starts.
    - `client`: your own (for a proxy, or certificates), which stays yours to close. Build it with
      `limits=httpx.Limits(max_connections=None)`: see the comment where we build ours. It resolves names in asyncio's
      default executor: if your tools fill that, give it `transport=forebay.agent_loop.names.NamedHosts(...)`, or an
      address as `base_url`.

        async with OpenAIAgentLoop(url, "policy", sample_params=SampleParams(max_tokens=1024)) as loop:
            group = await loop.generate_group(group)
    """

    def __init__(
        self,
        base_url: str,
        model: str,
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
        engine: Engine | None = None,
        trust_restarts: bool = False,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        base_url = checked_url(base_url)
        self.url = base_url + "/completions"
        self._root = base_url.removesuffix("/v1")
        if not isinstance(model, str) or not model:
            raise InvalidConfig(f"model is {model!r:.80}; expected the name under which the server knows it")
        if sample_params is not None and not isinstance(sample_params, SampleParams):
            raise InvalidConfig(f"sample_params is {sample_params!r:.80}; expected SampleParams or None")
        if client is not None and not isinstance(client, httpx.AsyncClient):
            raise InvalidConfig(f"client is {client!r:.80}; expected an httpx.AsyncClient or None")
        self.model = model
        self.sample_params = sample_params or SampleParams()
        self.max_retries = int(_number("max_retries", max_retries, least=0, whole=True))
        self.backoff_s = _number("backoff_s", backoff_s, least=0)
        self.down_timeout_s = down_timeout_s
        self._outage = Outage(self._root, down_timeout_s, first_delay_s=self.backoff_s)
        self._max_bytes = int(_number("max_response_bytes", max_response_bytes, least=1, whole=True))
        self._slots = asyncio.Semaphore(int(_number("max_concurrency", max_concurrency, least=1, whole=True)))
        self._stream = bool(stream)
        self._extra = _checked_extra(extra_body)
        if vocabulary is not None:
            vocabulary = int(_number("vocabulary", vocabulary, least=1, whole=True))
        self.vocabulary = vocabulary
        if engine is not None and trust_restarts:
            raise InvalidConfig("engine and trust_restarts are both given; give trust_restarts to the control")
        if engine is not None and not isinstance(getattr(engine, "gate", None), ServerGate):
            raise InvalidConfig(f"engine is {engine!r:.80}; expected a control of forebay.engines, or None")
        if engine is not None and not same_server(engine.gate.url, self._root):
            raise InvalidConfig(
                f"the loop asks {self._root}, but its engine is the control of {engine.gate.url}; expected one server, "
                "because tokens count by what the control knows of it"
            )
        self._engine = engine
        self._gate = (
            ServerGate(self._root, self._fetch, trust_restarts=trust_restarts) if engine is None else engine.gate
        )
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"} | authorization(api_key)
        self._api_key = api_key
        read_s = _positive("read_timeout_s", read_timeout_s)
        self._timeout = httpx.Timeout(read_s, connect=_positive("connect_timeout_s", connect_timeout_s))
        # Jitter keeps processes from coming back in step, so each has a seed of its own. Results do not depend on it.
        self._random = random.Random(f"{socket.gethostname()} {os.getpid()}")
        self._owns_client = client is None
        # Nothing from the environment: a proxy named there would stand between us and a server next door, and read
        # every prompt. No limit in the pool: `max_concurrency` is the limit, and httpcore never gets back the place of
        # a request that was cancelled while connecting (encode/httpcore#1099), so pauses would end in a standstill.
        self._client = client or httpx.AsyncClient(
            trust_env=False,
            transport=NamedHosts(
                httpx.AsyncHTTPTransport(
                    trust_env=False,
                    verify=self.url.startswith("https:"),  # plain HTTP, without redirects, needs no certificates loaded
                    limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_concurrency),
                )
            ),
        )

    def __repr__(self) -> str:
        return f"<OpenAIAgentLoop {self.model!r} at {self.url}>"

    async def close(self) -> None:
        """Close the connections. Call it when nothing is under way; again does nothing."""
        if self._owns_client:
            await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def idle(self) -> None:
        """Wait until the server has stopped our requests: all of its requests, as it does not tell them apart."""
        if self._engine is not None:
            await self._engine.idle()
        else:
            await until_idle(self._fetch, self._root)

    def explain_wait(self) -> str | None:
        """What the server is waited for, by requests or by an update of its weights."""
        waits = (super().explain_wait(), None if self._engine is None else self._engine.explain_wait())
        return "; ".join(filter(None, waits)) or None

    async def weights_loaded(self, model_step: int) -> None:
        """Note which process has the weights of this step. EngineError if the server cannot be asked."""
        await self._gate.weights_loaded(model_step)

    async def _fetch(self, path: str) -> bytes | None:
        return await fetch(self._client, self._root + path, self._headers)

    async def _engine_answers(self) -> bool:
        try:
            await self._gate.ask()
        except Unreachable:
            return False
        return True

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        """Answer one sample in place. InvalidInput without `prompt_ids`, EngineError if the server does not answer.

        It continues after `response_ids`, so a subclass may call it once for each turn. `generate_group` has dropped
        what an earlier attempt left, unless `enable_partial_rollout`.
        """
        if self.paused:
            state.status = Status.ABORTED
            return state
        _check_vocabulary(state, self.vocabulary)
        answer = Answer(state, merged(self.sample_params, state.sample_params))
        answering = asyncio.create_task(self._complete(answer))
        pausing = asyncio.create_task(self.until_paused())
        both = (answering, pausing)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped = not answering.done()
            for task in both:
                task.cancel()
            try:
                await asyncio.wait(both)
            finally:
                answer.write()
                if answering.done() and not answering.cancelled():
                    answering.exception()  # looked at, or asyncio complains when we are cancelled ourselves
        if not stopped:  # otherwise the sample is as it stands, whatever came up while the connection was closed
            answering.result()
        return state

    # --- attempts -------------------------------------------------------------------------------------

    async def _complete(self, answer: Answer) -> None:
        retries = losses = 0
        while not answer.settled():
            before = len(answer)
            try:
                async with self._slots:  # not held while waiting for the next attempt
                    await self._attempt(answer)
                continue
            except WrongAnswer as wrong:
                raise EngineError(f"{self.url}: {self._without_key(wrong)}") from wrong.__cause__
            except Interrupted as error:
                trouble = error
            if answer.settled():
                return  # all of it came; only the server's word for that is missing
            if len(answer) > before:
                retries = losses = 0
            retries += not trouble.away
            losses += isinstance(trouble.__cause__, (httpx.ReadError, httpx.RemoteProtocolError))
            if retries > self.max_retries or losses > _MAX_LOSSES:
                raise EngineError(
                    f"{self.url}: given up after {retries + losses} failed attempts in a row; the last one: "
                    f"{self._without_key(trouble)}"
                ) from trouble.__cause__
            if trouble.away:
                await self.outage.wait(self._without_key(trouble), self._gate.reachable)
                continue
            delay_s = _delay_s(retries, self.backoff_s, self._random.random(), trouble.retry_after_s)
            log.warning(
                "request_retried url=%s attempt=%d reason=%s tokens=%d delay_s=%.3f",
                self.url,
                retries + 1,
                self._without_key(trouble.reason),
                len(answer),
                delay_s,
            )
            await asyncio.sleep(delay_s)

    async def _attempt(self, answer: Answer) -> None:
        """One request. Returns when the answer has ended; WrongAnswer or Interrupted otherwise."""
        if self._client.is_closed:
            raise WrongAnswer("the loop, or its client, is closed; build a new one")
        fields = {"model": self.model, "stream": self._stream, "logprobs": 1, "return_token_ids": True}
        body = {name: value for name, value in (fields | answer.ask() | self._extra).items() if value is not None}
        vouched = False

        async def trace(event: str, _: object) -> None:
            nonlocal vouched
            if event.endswith("send_request_headers.started"):  # the connection has just been made, or chosen
                vouched = self._gate.vouches()

        request = self._client.build_request(
            "POST",
            self.url,
            content=msgspec.json.encode(body),
            headers=self._headers,
            timeout=self._timeout,
            extensions={"trace": trace},
        )
        try:
            await self._gate.opened()
            response = await self._client.send(request, stream=True, follow_redirects=False)
            if response.is_success:
                self.outage.over()
                await self._take(response, answer, vouched)
                if answer.finish_reason == "abort" and not self.paused:
                    await self._gate.confirm()  # nobody asked for it: the server may be going down
            else:
                try:
                    raise await self._refusal(response)
                finally:
                    await response.aclose()
        except httpx.TransportError as error:
            if not isinstance(error, httpx.ReadTimeout):
                self._gate.lost_connection()
            raise Interrupted(type(error).__name__, detail=f" {error}".rstrip(), away=_is_away(error)) from error
        except Unreachable as error:
            answer.finish_reason = None
            raise Interrupted(f"it does not say which weights it has: {error}", away=True) from error
        if answer.finish_reason is None:
            kind = response.headers.get("content-type", "no content type")
            raise Interrupted("the answer ended without a finish_reason", detail=f" ({kind:.80})")

    async def _take(self, response: httpx.Response, answer: Answer, vouched: bool) -> None:
        """Receive an answer, and keep it if the server is known to have the current weights.

        All that a connection brings is of one process; which one that is, is asked while it comes. `vouched`: what to
        believe if nobody answers.
        """
        confirming = asyncio.create_task(self._gate.confirm())
        receiving = asyncio.create_task(self._receive(response, answer))
        try:
            try:
                await asyncio.wait((receiving, confirming), return_when=asyncio.FIRST_COMPLETED)
                if not (confirming.done() and (confirming.cancelled() or confirming.exception())):
                    await asyncio.wait((receiving,))
            finally:
                # A stream that will not count is closed at once: a server that has to be loaded again must run dry.
                receiving.cancel()
                await see_through(receiving)
                await response.aclose()
                failed = None if receiving.cancelled() else receiving.exception()
            if failed is not None:
                raise failed
        except BaseException:
            await _settle(answer, confirming, _HURRIED_CONFIRM_S, vouched)
            raise
        if not await _settle(answer, confirming, _CONFIRM_S, vouched) or receiving.cancelled():
            if not confirming.done():
                raise Unreachable(f"no answer within {_CONFIRM_S:g} s")
            confirming.result()

    async def _receive(self, response: httpx.Response, answer: Answer) -> None:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            # Unpacked it could be a thousand times what came, and the limit on memory would come too late.
            raise WrongAnswer("a compressed answer, although asked for `Accept-Encoding: identity`")
        before = len(answer)
        if response.headers.get("content-type", "").lower().startswith("application/json"):
            piece = read_piece(await self._body(response), begun=False)
            if piece is not None:
                answer.add(piece)
            return
        reader = EventReader(max_bytes=self._max_bytes)
        async with aclosing(_raw(response)) as stream:
            async for data in stream:
                for payload in reader.feed(data):
                    if payload == b"[DONE]":
                        return
                    piece = read_piece(payload, begun=len(answer) > before)
                    if piece is None:
                        continue
                    answer.add(piece)
                    if answer.finish_reason is not None:
                        # Reading to the end lets the connection be used again. Nothing that happens there matters.
                        with suppress(TimeoutError, httpx.TransportError):
                            async with asyncio.timeout(_FAREWELL_S):
                                async for _ in stream:
                                    pass
                        return

    async def _body(self, response: httpx.Response) -> bytes:
        body = bytearray()
        if int(response.headers.get("content-length", 0)) <= self._max_bytes:
            async with aclosing(_raw(response)) as stream:
                async for data in stream:
                    if len(body) + len(data) > self._max_bytes:
                        break
                    body += data
                else:
                    return bytes(body)
        raise WrongAnswer(f"an answer of more than {self._max_bytes} bytes (max_response_bytes)")

    async def _refusal(self, response: httpx.Response) -> Interrupted | WrongAnswer:
        """The error for a status that is no success, with the beginning of what the server says."""
        said = bytearray()
        with suppress(httpx.TransportError):
            async with aclosing(_raw(response)) as stream:
                async for data in stream:
                    said += data[: 8 * _QUOTED]
                    if len(said) >= 4 * _QUOTED:  # no character takes more than 4 bytes
                        break
        text = self._without_key(said.decode("utf-8", "replace"))
        detail = f": {text[:_QUOTED]}" if text.strip() else ""
        if response.status_code not in TRANSIENT_STATUSES:
            missing = response.status_code == 404 and not self.url.endswith("/v1/completions")
            hint = "; base_url usually ends in /v1" if missing else ""
            return WrongAnswer(f"status {response.status_code}{detail}{hint}")
        if response.status_code in _GATEWAY_STATUSES:
            self._gate.lost_connection()
        wait = re.fullmatch(r"\d{1,9}(\.\d{1,9})?", response.headers.get("retry-after", "").strip())
        retry_after_s = 0.0 if wait is None else float(wait[0])
        away = response.status_code in _GATEWAY_STATUSES
        return Interrupted(f"status {response.status_code}", detail=detail, retry_after_s=retry_after_s, away=away)

    def _without_key(self, said: object) -> str:
        """For all that a server says: some repeat the headers."""
        return str(said) if self._api_key is None else str(said).replace(self._api_key, "***")


def _is_away(error: httpx.TransportError) -> bool:
    """Whether the server could not be reached, or went away in the middle."""
    if isinstance(error, httpx.RemoteProtocolError):  # also what is no HTTP at all
        return "disconnected" in str(error) or "closed connection" in str(error)
    return isinstance(error, (httpx.NetworkError, httpx.ConnectTimeout))


async def _settle(answer: Answer, confirming: asyncio.Task[None], timeout_s: float, vouched: bool) -> bool:
    """Wait for the word of the server, and keep what it sent, or not; whether it is kept. Also when cancelled."""
    known = vouched
    try:
        await asyncio.wait((confirming,), timeout=timeout_s)
    finally:
        if confirming.done() and not confirming.cancelled():
            error = confirming.exception()
            unanswered = isinstance(error, Unreachable) and not isinstance(error, AnotherProcess)
            known = error is None or (unanswered and vouched)
        confirming.cancel()
        answer.settle(known=known)
    return known


def _check_vocabulary(state: RolloutState, vocabulary: int | None) -> None:
    ids = state.prompt_ids
    if vocabulary is None or ids is None or not len(ids):
        return
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocabulary:
        raise InvalidInput(
            f"prompt_ids of rollout {state.rollout_id} of group {state.group_id} hold {low if low < 0 else high}; "
            f"expected ids from 0 to {vocabulary - 1} (vocabulary)"
        )


def _raw(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    return cast("AsyncGenerator[bytes, None]", response.aiter_raw())  # which is what it is; httpx declares less


def _delay_s(retries: int, backoff_s: float, jitter: float, retry_after_s: float) -> float:
    """How long to wait before a retry (the first is 1): doubling, half of it jitter, not before the server asks.

    >>> [_delay_s(retries, 0.5, 1.0, 0.0) for retries in (1, 2, 3, 9, 2000)]
    [0.5, 1.0, 2.0, 30.0, 30.0]
    >>> _delay_s(1, 0.5, 0.0, 0.0), _delay_s(1, 0.5, 0.0, 7.0), _delay_s(1, 0.5, 0.0, 3600.0)
    (0.25, 7.0, 30.0)
    """
    delay_s = backoff_s * 2.0 ** min(retries - 1, 64)
    return min(max(min(delay_s, _MAX_DELAY_S) * (0.5 + jitter / 2), retry_after_s), _MAX_DELAY_S)


# --- settings -----------------------------------------------------------------------------------------


def _checked_extra(extra_body: Mapping[str, Any] | None) -> dict[str, Any]:
    if extra_body is None:
        return {}
    if not isinstance(extra_body, Mapping):
        raise InvalidConfig(f"extra_body is {extra_body!r:.80}; expected a mapping of request fields")
    for name in extra_body:
        if name in _RESERVED:
            raise InvalidConfig(
                f"extra_body has {name!r}, which the loop sets itself; use sample_params or leave it out"
            )
    try:
        msgspec.json.encode(dict(extra_body))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise InvalidConfig(f"extra_body cannot be written as JSON: {error}") from None
    return dict(extra_body)


def _number(name: str, value: float, *, least: float, whole: bool = False) -> float:
    fits = isinstance(value, int) or (isinstance(value, float) and not whole and math.isfinite(value))
    if not fits or isinstance(value, bool) or value < least:
        raise InvalidConfig(
            f"{name} is {value!r:.80}; expected a {'whole ' if whole else ''}number of at least {least}"
        )
    return value


def _positive(name: str, value: float) -> float:
    if not _number(name, value, least=0):
        raise InvalidConfig(f"{name} is {value!r}; expected a number of seconds above 0")
    return value
