"""`SGLangGenerateLoop`: generates through `/generate` of SGLang, and takes new weights while requests run.

It promises what `OpenAIAgentLoop` does (see the top of `openai`), and beyond it
- The server says which weights generated each token (`weight_versions`), and `version_spans` holds what it says. So the
  weights may change in the middle of an answer, and producing is not paused for an update
  (`takes_weights_while_running`). Versions have to be numbers: an update names its step.
- The server says so at the end of an answer. If an answer is cut off (a pause, a lost connection), its tokens count
  only if the server named one version with all of them and still has it afterwards; otherwise they are generated again.

The logprobs are SGLang's: after temperature and `min_tokens`, before top-p and top-k. By default SGLang repeats the
whole answer in each event of a stream; start it with `--incremental-streaming-output` for long answers. Both are read.
Needs httpx: pip install 'forebay[http]'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import httpx
import msgspec

from forebay.agent_loop.completion import (
    Answer,
    Interrupted,
    Piece,
    WeightVersion,
    WrongAnswer,
    raise_reported,
    spans_of,
    step_of,
)
from forebay.agent_loop.endpoint import ReadPiece
from forebay.agent_loop.http import HTTPAgentLoop
from forebay.agent_loop.monitor import Engine, Engines
from forebay.agent_loop.outage import DOWN_TIMEOUT_S
from forebay.core.rollout import SampleParams
from forebay.core.validate import checked_integer
from forebay.errors import InvalidConfig

# Our names of sampling parameters, and SGLang's where they differ.
_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}


class SGLangGenerateLoop(HTTPAgentLoop):
    """Generates through `POST {url}/generate` of SGLang, streamed.

    - `url`: the root of the server, like `http://127.0.0.1:30000`; several, if several servers have the same model.
    - `start_step`: the model step of the weights that the servers start with. Their version is then no number.
    - `engine`: `SGLangControl(url, while_running=True)`, or `EngineControls` of several.
    - `extra_body`: more fields for every request, beside `sampling_params`.

    The others are those of `OpenAIAgentLoop`. Without `max_tokens` SGLang generates 128.

        control = SGLangControl(url, while_running=True)
        async with SGLangGenerateLoop(url, sample_params=SampleParams(max_tokens=1024), engine=control) as loop:
            group = await loop.generate_group(group)
    """

    takes_weights_while_running = True
    path = "/generate"
    reserved = frozenset(("text", "input_ids", "sampling_params", "stream", "return_logprob"))

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        start_step: int = 0,
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
        client: httpx.AsyncClient | None = None,
    ) -> None:
        super().__init__(
            url,
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
            client=client,
        )
        if any(each.endswith("/v1/generate") for each in self.urls):
            raise InvalidConfig(f"url is {url!r:.200}; expected the root of the server, without /v1")
        self.start_step = checked_integer("start_step", start_step, least=0)

    def __repr__(self) -> str:
        return f"<SGLangGenerateLoop at {self.url}>"

    def step_of(self, version: str) -> int | None:
        """See `Wire`. A version that is no number is that of a server as it started."""
        return step_of(version, self.start_step)

    def body(self, answer: Answer) -> dict[str, Any]:
        """See `Wire`."""
        asked = answer.ask()
        prompt = asked.pop("prompt")
        params = {_NAMES.get(name, name): value for name, value in asked.items()}
        fields = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "stream": self._stream}
        return {name: value for name, value in (fields | self._extra).items() if value is not None}

    def reader(self) -> ReadPiece:
        """See `Wire`."""
        return _Reader(self.start_step)


_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Logprob = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]  # in the range of float32


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None


class _MetaInfo(msgspec.Struct):
    completion_tokens: int = 0
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[_Logprob | None, _TokenId, str | None]] | None = None
    weight_version: str | None = None
    weight_versions: list[WeightVersion] | None = None


class _Event(msgspec.Struct):
    text: str | None = None
    output_ids: list[_TokenId] | None = None
    meta_info: _MetaInfo | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


class _Reader:
    """Reads the events of one answer. Each holds the new tokens, or all tokens so far, as the server was started."""

    def __init__(self, start_step: int) -> None:
        self._start_step = start_step
        self._tokens = 0  # read so far
        self._text = ""

    def __call__(self, payload: bytes, begun: bool) -> Piece:
        try:
            event = _decoder.decode(payload)
        except msgspec.ValidationError as error:
            raise WrongAnswer(f"the answer is not one of /generate: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise Interrupted(f"{len(payload)} bytes that are not JSON") from None
        if event.error is not None:
            reported = event.error if isinstance(event.error, dict) else {}
            raise_reported(reported.get("code"), reported.get("message", event.error), begun)
        if event.meta_info is None or event.output_ids is None:
            raise WrongAnswer("the answer has no output_ids or no meta_info; expected /generate of SGLang")
        meta, total = event.meta_info, event.meta_info.completion_tokens
        ids = self._new(event.output_ids, total, "output_ids")
        entries = self._new(meta.output_token_logprobs or [], total, "output_token_logprobs")
        if [entry[1] for entry in entries] != ids:
            raise WrongAnswer("output_token_logprobs are of other tokens than output_ids")
        logprobs = [value for value, _, _ in entries if value is not None]
        if len(logprobs) != len(ids):
            raise WrongAnswer(f"{len(ids)} token ids with {len(logprobs)} logprobs; expected one for each token")
        whole = len(event.output_ids) == total
        self._tokens = total
        spans = spans_of(meta.weight_versions or (), start_step=self._start_step)
        version = None if meta.weight_version is None else step_of(meta.weight_version, self._start_step)
        reason = None if meta.finish_reason is None else meta.finish_reason.type
        return Piece(ids, logprobs, self._new_text(event.text or "", whole), reason, spans, version)

    def _new(self, column: list[Any], total: int, name: str) -> list[Any]:
        """The new entries of a column."""
        new = total - self._tokens
        if len(column) == total:
            return column[self._tokens :]
        if new == 0:
            return []  # an abort repeats the last token
        if new < 0 or len(column) != new:
            raise WrongAnswer(
                f"{len(column)} {name} after {self._tokens} of {total} tokens; expected {new}, or {total}"
            )
        return column

    def _new_text(self, text: str, whole: bool) -> str:
        if text.startswith(self._text) and whole:
            text, self._text = text[len(self._text) :], text
            return text
        if whole:
            return ""  # it changed what it had sent; the ids are authoritative
        self._text += text
        return text
