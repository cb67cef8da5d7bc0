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
- With several servers a request moves to another one, with its tokens, when its server goes away or restarts. Only
  when no server is left do requests wait, or does the loop raise `EngineRestarted` (see `routing`).
- A pause is complete when the server has stopped our requests (`idle`), not when their connections are closed.

Logprobs are those that the server sends. vLLM: of the raw model, before temperature, top-p and top-k (with
`--logprobs-mode processed_logprobs`: after all of them). SGLang: after temperature and `min_tokens`, before top-p and
top-k. At temperature 1 without the others they are equal; a trainer that compares them with its own has to apply the
temperature in the same way.

It does not write `version_spans` unless the server reports versions: the buffer adds them. It does not recognize a stop
string that begins before an interruption and ends after it. Needs httpx: pip install 'forebay[http]'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from forebay.agent_loop.completion import Answer, Piece, read_piece
from forebay.agent_loop.endpoint import ReadPiece
from forebay.agent_loop.http import HTTPAgentLoop
from forebay.agent_loop.monitor import Engine, Engines
from forebay.agent_loop.outage import DOWN_TIMEOUT_S
from forebay.core.rollout import SampleParams
from forebay.errors import InvalidConfig


class OpenAIAgentLoop(HTTPAgentLoop):
    """Generates through `POST {base_url}/completions`, streamed.

    - `base_url`: like `http://127.0.0.1:8000/v1`; several, if several servers have the same model.
    - `sample_params`: defaults; the parameters of a sample take precedence. Set `max_tokens` in one of the two: without
      it the server chooses (vLLM: 16), again for each request.
    - `max_concurrency`: the maximum number of requests in flight, over all groups and servers.
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
      Without one the loop uses what the server publishes. For several servers: `EngineControls`.
    - `trust_restarts`: the server loads the current weights itself whenever it starts.
    - `client`: your own client (for a proxy, or certificates), which you close yourself. Build it with
      `limits=httpx.Limits(max_connections=None)`: the comment in `endpoint` says why. It resolves names in the
      default executor of asyncio: if your tools fill that, give it `transport=forebay.agent_loop.names.NamedHosts(...)`
      or use an address as `base_url`.

        async with OpenAIAgentLoop(url, "policy", sample_params=SampleParams(max_tokens=1024)) as loop:
            group = await loop.generate_group(group)
    """

    path = "/completions"
    # Fields that the loop sets itself, and fields that would return several answers.
    reserved = frozenset(("model", "prompt", "stream", "best_of", "echo", *SampleParams.__struct_fields__))

    def __init__(
        self,
        base_url: str | Sequence[str],
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
        engine: Engine | Engines | None = None,
        trust_restarts: bool = False,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        if not isinstance(model, str) or not model:
            raise InvalidConfig(f"model is {model!r:.80}; expected the name that the server uses for it")
        self.model = model
        super().__init__(
            base_url,
            sample_params=sample_params,
            api_key=api_key,
            max_concurrency=max_concurrency,
            connect_timeout_s=connect_timeout_s,
            read_timeout_s=read_timeout_s,
            max_retries=max_retries,
            backoff_s=backoff_s,
            down_timeout_s=down_timeout_s,
            stream=stream,
            extra_body=extra_body,
            max_response_bytes=max_response_bytes,
            vocabulary=vocabulary,
            engine=engine,
            trust_restarts=trust_restarts,
            client=client,
        )

    def __repr__(self) -> str:
        return f"<OpenAIAgentLoop {self.model!r} at {self.url}>"

    def body(self, answer: Answer) -> dict[str, Any]:
        """See `Wire`."""
        fields = {"model": self.model, "stream": self._stream, "logprobs": 1, "return_token_ids": True}
        return {name: value for name, value in (fields | answer.ask() | self._extra).items() if value is not None}

    def reader(self) -> ReadPiece:
        """See `Wire`."""
        return _read


def _read(payload: bytes, begun: bool) -> Piece | None:
    return read_piece(payload, begun=begun)
