"""`OpenAIAgentLoop`: generates through the completion protocol of OpenAI with token ids (vLLM, SGLang).

What it promises
- Tokens in, tokens out: nothing is tokenized again. Every token has its logprob, or the member fails.
- No received token is lost: a pause, a cancel or a lost connection leaves them in the sample. With partial rollout, and
  after a failure inside one call, generation continues after them, with the remainder of `max_tokens`.
- A pause or a cancel closes the connection, and the server then drops the request. A member that waits for a free slot,
  or for its next attempt, ends at once as well.
- Transient failures are retried with growing delays; other failures are an `EngineError` at once. An unreachable server
  (connection refused or lost, status 502 to 504) is waited for: no attempt is counted, the tokens stay, and after
  `down_timeout_s` the call raises `EngineUnavailable`, which spends no try either. If a tool of a subclass is
  unreachable while the server answers, the member fails.
- Tokens count only if the server has the current weights (see `monitor`): a server that restarted serves its start-up
  weights, and the loop raises `EngineRestarted`, unless a control loads the current ones again.
- A pause is complete when the server has stopped our requests (`idle`), not when their connections are closed.

Logprobs are those that the server sends. vLLM: of the raw model, before temperature, top-p and top-k (with
`--logprobs-mode processed_logprobs`: after all of them). SGLang: after temperature and `min_tokens`, before top-p and
top-k. At temperature 1 without the others they are equal; a trainer that compares them with its own has to apply the
temperature in the same way.

It does not write `version_spans` unless the server reports versions: the buffer adds them. It does not recognize a stop
string that begins before an interruption and ends after it. Needs httpx: pip install 'forebay[http]'.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import socket
from collections.abc import Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Self

import httpx
import msgspec

from forebay.agent_loop.base import AgentLoop, done_or_paused
from forebay.agent_loop.completion import (
    TRANSIENT_STATUSES,
    Answer,
    EventReader,
    Interrupted,
    WrongAnswer,
    merged,
    read_piece,
)
from forebay.agent_loop.monitor import AnotherProcess, Engine, ServerMonitor, Unreachable
from forebay.agent_loop.names import NamedHosts
from forebay.agent_loop.outage import DOWN_TIMEOUT_S, GATEWAY_STATUSES, Outage, is_outage
from forebay.agent_loop.server import authorization, checked_url, fetch, raw, read_into, same_server, until_idle
from forebay.core.aio import run_user_code, see_through
from forebay.core.rollout import RolloutState, SampleParams, Status
from forebay.core.validate import integer_setting, positive_seconds
from forebay.errors import EngineError, InvalidConfig, InvalidInput

log = logging.getLogger(__name__)

_MAX_DELAY_S = 30.0
_DRAIN_S = 1.0  # for the end of a stream after its last token
_CONFIRM_S = 35.0
_HURRIED_CONFIRM_S = 5.0  # after a pause, a cancel or an error
_MAX_LOSSES = 10  # lost connections in a row without a new token: this request may be what crashes the server
_QUOTED = 200  # characters of a server's message that an error repeats
# Fields that the loop sets itself, and fields that would return several answers.
_RESERVED = frozenset(("model", "prompt", "stream", "best_of", "echo", *SampleParams.__struct_fields__))


class OpenAIAgentLoop(AgentLoop):
    """Generates through `POST {base_url}/completions`, streamed.

    - `base_url`: like `http://127.0.0.1:8000/v1`.
    - `sample_params`: defaults; the parameters of a sample take precedence. Set `max_tokens` in one of the two: without
      it the server chooses (vLLM: 16), again for each request.
    - `max_concurrency`: the maximum number of requests in flight, over all groups.
    - `read_timeout_s`: how long the server may be silent, before its first token and between two tokens.
    - `max_retries`, `backoff_s`: attempts after a failed one, and the first delay; a new token resets the count.
    - `down_timeout_s`: how long the server may be unreachable.
    - `stream`: without streaming an interrupted request has no tokens to keep, but SGLang reports the weights of each
      token (`weight_versions`), which are then stored in `version_spans`.
    - `extra_body`: more fields for every request; None removes a field.
    - `max_response_bytes`: the maximum size of one line of a stream, or of an answer that is not streamed.
    - `vocabulary`: the number of token ids of the model (`vocab_size` of its config). Prompts with other ids are
      refused here: such an id crashes an SGLang server, and its retry crashes the next one.
    - `engine`: the control of the server (`forebay.engines`), which knows when it is idle and which weights it has.
      Without one the loop uses what the server publishes.
    - `trust_restarts`: the server loads the current weights itself whenever it starts.
    - `client`: your own client (for a proxy, or certificates), which you close yourself. Build it with
      `limits=httpx.Limits(max_connections=None)`: the comment in the constructor says why. It resolves names in the
      default executor of asyncio: if your tools fill that, give it `transport=forebay.agent_loop.names.NamedHosts(...)`
      or use an address as `base_url`.

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
            raise InvalidConfig(f"model is {model!r:.80}; expected the name that the server uses for it")
        if sample_params is not None and not isinstance(sample_params, SampleParams):
            raise InvalidConfig(f"sample_params is {sample_params!r:.80}; expected SampleParams or None")
        if client is not None and not isinstance(client, httpx.AsyncClient):
            raise InvalidConfig(f"client is {client!r:.80}; expected an httpx.AsyncClient or None")
        self.model = model
        self.sample_params = sample_params or SampleParams()
        self.max_retries = integer_setting("max_retries", max_retries, least=0)
        self.backoff_s = positive_seconds("backoff_s", backoff_s, or_zero=True)
        self.down_timeout_s = down_timeout_s
        self._outage = Outage(self._root, down_timeout_s, first_delay_s=self.backoff_s)
        self._max_bytes = integer_setting("max_response_bytes", max_response_bytes, least=1)
        self._max_concurrency = integer_setting("max_concurrency", max_concurrency, least=1)
        self._slots = asyncio.Semaphore(self._max_concurrency)
        self._stream = bool(stream)
        self._extra = _checked_extra(extra_body)
        if vocabulary is not None:
            vocabulary = integer_setting("vocabulary", vocabulary, least=1)
        self.vocabulary = vocabulary
        if engine is not None and trust_restarts:
            raise InvalidConfig("engine and trust_restarts are both set; set trust_restarts on the control instead")
        if engine is not None and not isinstance(getattr(engine, "monitor", None), ServerMonitor):
            raise InvalidConfig(f"engine is {engine!r:.80}; expected a control of forebay.engines, or None")
        if engine is not None and not same_server(engine.monitor.url, self._root):
            raise InvalidConfig(
                f"the loop sends requests to {self._root}, but its engine controls {engine.monitor.url}; expected one "
                "server, because the control decides which tokens count"
            )
        self._engine = engine
        self._monitor = (
            ServerMonitor(self._root, self._fetch, trust_restarts=trust_restarts) if engine is None else engine.monitor
        )
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"} | authorization(api_key)
        self._api_key = api_key
        read_s = positive_seconds("read_timeout_s", read_timeout_s)
        self._timeout = httpx.Timeout(read_s, connect=positive_seconds("connect_timeout_s", connect_timeout_s))
        # Jitter keeps processes from retrying in step, so each has a different seed. Results do not depend on it.
        self._random = random.Random(f"{socket.gethostname()} {os.getpid()}")
        self._owns_client = client is None
        self._client = client or self._new_client()

    def _new_client(self) -> httpx.AsyncClient:
        # The environment is ignored: a proxy that it names would be put between us and a local server, and read every
        # prompt. The pool has no limit: `max_concurrency` is the limit, and httpcore never frees the slot of a request
        # that was cancelled while connecting (encode/httpcore#1099), so that pauses would exhaust the pool.
        return httpx.AsyncClient(
            trust_env=False,
            transport=NamedHosts(
                httpx.AsyncHTTPTransport(
                    trust_env=False,
                    verify=self.url.startswith("https:"),  # plain HTTP without redirects needs no certificates
                    limits=httpx.Limits(max_connections=None, max_keepalive_connections=self._max_concurrency),
                )
            ),
        )

    def __repr__(self) -> str:
        return f"<OpenAIAgentLoop {self.model!r} at {self.url}>"

    async def close(self) -> None:
        """Close the connections, when no request is in progress. The loop can be used again, on any event loop."""
        if self._owns_client:
            closing, self._client = self._client, self._new_client()
            self._slots = asyncio.Semaphore(self._max_concurrency)
            await closing.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def idle(self) -> None:
        """Wait until the server has stopped our requests, and all others: it does not distinguish them."""
        if self._engine is not None:
            await self._engine.idle()
        else:
            await until_idle(self._fetch, self._root)

    def explain_wait(self) -> str | None:
        """Why requests, or an update of the weights, wait for the server now."""
        waits = (super().explain_wait(), None if self._engine is None else self._engine.explain_wait())
        return "; ".join(filter(None, waits)) or None

    async def weights_loaded(self, model_step: int) -> None:
        """Record which process has the weights of this step. EngineError if the server cannot be asked."""
        await self._monitor.weights_loaded(model_step)

    async def _fetch(self, path: str) -> bytes | None:
        return await fetch(self._client, self._root + path, self._headers)

    async def _engine_answers(self) -> bool:
        try:
            await self._monitor.find_process()
        except Unreachable:
            return False
        return True

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
            try:
                async with self._slots:  # not held while waiting for the next attempt
                    await self._attempt(answer)
                continue
            except WrongAnswer as wrong:
                raise EngineError(f"{self.url}: {self._without_key(wrong)}") from wrong.__cause__
            except Interrupted as error:
                failure = error
            if answer.complete():
                return  # all tokens arrived; only the finish reason is missing
            if len(answer) > before:
                retries = losses = 0
            retries += not failure.away
            losses += isinstance(failure.__cause__, (httpx.ReadError, httpx.RemoteProtocolError))
            if retries > self.max_retries or losses > _MAX_LOSSES:
                raise EngineError(
                    f"{self.url}: gave up after {retries + losses} failed attempts in a row; the last one: "
                    f"{self._without_key(failure)}"
                ) from failure.__cause__
            if failure.away:
                await self.outage.wait(self._without_key(failure), self._monitor.check_reachable)
                continue
            delay_s = _delay_s(retries, self.backoff_s, self._random.random(), failure.retry_after_s)
            log.warning(
                "request_retried url=%s attempt=%d reason=%s tokens=%d delay_s=%.3f",
                self.url, retries + 1, self._without_key(failure.reason), len(answer), delay_s,
            )  # fmt: skip
            await asyncio.sleep(delay_s)

    async def _attempt(self, answer: Answer) -> None:
        """One request. Returns when the answer has ended; WrongAnswer or Interrupted otherwise."""
        if self._client.is_closed:
            raise WrongAnswer("the loop, or its client, is closed; create a new one")
        fields = {"model": self.model, "stream": self._stream, "logprobs": 1, "return_token_ids": True}
        body = {name: value for name, value in (fields | answer.ask() | self._extra).items() if value is not None}
        vouched = False

        async def trace(event: str, _: object) -> None:
            nonlocal vouched
            if event.endswith("send_request_headers.started"):  # the connection has just been made, or chosen
                vouched = self._monitor.vouches()

        request = self._client.build_request(
            "POST",
            self.url,
            content=msgspec.json.encode(body),
            headers=self._headers,
            timeout=self._timeout,
            extensions={"trace": trace},
        )
        try:
            await self._monitor.ready()
            response = await self._client.send(request, stream=True, follow_redirects=False)
            if response.is_success:
                self.outage.over()
                await self._take(response, answer, vouched)
                if answer.finish_reason == "abort" and not self.paused:
                    await self._monitor.confirm()  # we did not ask for it: the server may be shutting down
            else:
                try:
                    raise await self._refusal(response)
                finally:
                    await response.aclose()
        except httpx.TransportError as error:
            if not isinstance(error, httpx.ReadTimeout):
                self._monitor.connection_lost()
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
        confirming = asyncio.create_task(self._monitor.confirm())
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
        try:
            await asyncio.wait((confirming,), timeout=timeout_s)
        finally:
            known = vouched and not self._monitor.doubted
            if confirming.done() and not confirming.cancelled():
                error = confirming.exception()
                unanswered = isinstance(error, Unreachable) and not isinstance(error, AnotherProcess)
                known = error is None or (unanswered and known)
            confirming.cancel()
            answer.settle(known=known)
        return known

    async def _receive(self, response: httpx.Response, answer: Answer) -> None:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            # Decompressed it could be a thousand times larger, beyond the limit on memory.
            raise WrongAnswer("the answer is compressed, although the request had `Accept-Encoding: identity`")
        before = len(answer)
        if response.headers.get("content-type", "").lower().startswith("application/json"):
            piece = read_piece(await self._body(response), begun=False)
            if piece is not None:
                answer.add(piece)
            return
        reader = EventReader(max_bytes=self._max_bytes)
        async with aclosing(raw(response)) as stream:
            async for data in stream:
                for payload in reader.feed(data):
                    if payload == b"[DONE]":
                        return
                    piece = read_piece(payload, begun=len(answer) > before)
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
        if int(response.headers.get("content-length", 0)) <= self._max_bytes:
            body = bytearray()
            await read_into(body, response, self._max_bytes + 1)
            if len(body) <= self._max_bytes:
                return bytes(body)
        raise WrongAnswer(f"the answer is longer than {self._max_bytes} bytes (max_response_bytes)")

    async def _refusal(self, response: httpx.Response) -> Interrupted | WrongAnswer:
        """The error for a status other than success, with the beginning of the server's message."""
        said = bytearray()
        with suppress(httpx.TransportError):
            await read_into(said, response, 4 * _QUOTED)  # no character takes more than 4 bytes
        text = self._without_key(said.decode("utf-8", "replace"))
        detail = f": {text[:_QUOTED]}" if text.strip() else ""
        if response.status_code not in TRANSIENT_STATUSES:
            missing = response.status_code == 404 and not self.url.endswith("/v1/completions")
            hint = "; base_url usually ends in /v1" if missing else ""
            return WrongAnswer(f"status {response.status_code}{detail}{hint}")
        away = response.status_code in GATEWAY_STATUSES
        if away:
            self._monitor.connection_lost()
        wait = re.fullmatch(r"\d{1,9}(\.\d{1,9})?", response.headers.get("retry-after", "").strip())
        retry_after_s = 0.0 if wait is None else float(wait[0])
        return Interrupted(f"status {response.status_code}", detail=detail, retry_after_s=retry_after_s, away=away)

    def _without_key(self, said: object) -> str:
        """A server's message without our key: some servers repeat the headers."""
        return str(said) if self._api_key is None else str(said).replace(self._api_key, "***")


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


def _checked_extra(extra_body: Mapping[str, Any] | None) -> dict[str, Any]:
    if extra_body is None:
        return {}
    if not isinstance(extra_body, Mapping):
        raise InvalidConfig(f"extra_body is {extra_body!r:.80}; expected a mapping of request fields")
    for name in extra_body:
        if name in _RESERVED:
            raise InvalidConfig(
                f"extra_body has {name!r}, which the loop sets itself; use sample_params, or leave it out"
            )
    try:
        msgspec.json.encode(dict(extra_body))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise InvalidConfig(f"extra_body cannot be written as JSON: {error}") from None
    return dict(extra_body)
