"""The answer of a completion server: from the bytes of its stream to the fields of a sample.

Pure: network and retries are in `openai`. What it promises
- Ids and logprobs always have the same length. A piece of the stream is added as a whole, or raises and adds nothing.
- Memory is bounded: no line or answer larger than the caller's limit is assembled.
- Columns of the sample are never changed in place. An answer to a bare prompt is stored as numpy arrays (int64 ids,
  float32 logprobs: a third of the memory of lists); an answer that continues a list is a list.

The ids are authoritative. The text is the concatenation of what the server sent: if a sample was interrupted inside a
character, or while the server held back a possible stop string, a few characters are missing from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec
import numpy as np

from forebay.core.rollout import RolloutState, SampleParams, Status, TokenColumn, VersionSpans, finish_status
from forebay.errors import InvalidInput

_SEED_STEP = 1_000_003
TRANSIENT_STATUSES = frozenset((408, 425, 429, 500, 502, 503, 504))


class Interrupted(Exception):
    """A failure that another attempt may fix. `reason` is for the log, `detail` may quote the server.

    `away`: the server was unreachable, which is not the fault of the request.
    """

    def __init__(self, reason: str, *, detail: str = "", retry_after_s: float = 0.0, away: bool = False) -> None:
        super().__init__(reason + detail)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.away = away


class WrongAnswer(Exception):
    """A failure that another attempt would not fix."""


# --- the wire -----------------------------------------------------------------------------------------


class EventReader:
    """Splits a stream of bytes into the payloads of its `data:` lines. Each line holds one JSON document.

    >>> reader = EventReader(max_bytes=64)
    >>> reader.feed(b': hello\\ndata: {"a"'), reader.feed(b': 1}\\r\\n\\r\\ndata: [DONE]\\n')
    ([], [b'{"a": 1}', b'[DONE]'])
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes; WrongAnswer if a line is longer than `max_bytes`."""
        payloads = []
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._check(end - start)
            line = bytes(self._rest) + data[start:end]
            self._rest.clear()
            start = end + 1
            if line.startswith(b"data:"):
                payloads.append(line[len(b"data:") :].strip())
        self._check(len(data) - start)
        self._rest += data[start:]
        return payloads

    def _check(self, more: int) -> None:
        if len(self._rest) + more > self._max_bytes:
            raise WrongAnswer(f"a line of the stream is longer than {self._max_bytes} bytes (max_response_bytes)")


class Piece(NamedTuple):
    """The part of an answer that one chunk adds."""

    ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str | None
    versions: VersionSpans = ()  # of all tokens of this answer so far, if the server reports them
    version: int | None = None  # which the server said it had when it sent this piece, if it says so in each


_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Logprob = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]  # in the range of float32


class _Logprobs(msgspec.Struct):
    tokens: list[str] | None = None
    token_logprobs: list[_Logprob | None] | None = None


class WeightVersion(msgspec.Struct):
    """A run of tokens and the version of the weights that generated it."""

    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[_TokenId] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[WeightVersion] | None = None


class _Metadata(msgspec.Struct):
    weight_versions: list[WeightVersion] | None = None


class _Message(msgspec.Struct):
    choices: list[_Choice] | None = None
    metadata: _Metadata | None = None
    error: Any = None
    # Older vLLM, and SGLang, write an error's fields without the outer "error".
    object: str | None = None
    code: Any = None
    message: Any = None


_decoder = msgspec.json.Decoder(_Message)


def read_piece(payload: bytes, *, begun: bool) -> Piece | None:
    """Read a chunk of a stream, or a whole JSON answer; None if it has no choice (usage statistics, for example).

    `begun`: tokens arrived before it. An error that the server then reports concerns a request that it had accepted, so
    another attempt makes sense whatever the code is (vLLM reports 400 for every failure inside a stream).
    """
    try:
        message = _decoder.decode(payload)
    except msgspec.ValidationError as error:
        raise WrongAnswer(f"the answer is not a completion: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Interrupted(f"{len(payload)} bytes that are not JSON") from None
    if message.error is not None or message.object == "error":
        reported = message.error if isinstance(message.error, dict) else {}
        said = reported.get("message", message.message if message.error is None else message.error)
        raise_reported(reported.get("code", message.code), said, begun)
    if not message.choices:
        return None
    choice = message.choices[0]
    text = choice.text or ""
    entries = choice.logprobs or _Logprobs()
    ids = choice.token_ids
    if ids is None and (entries.tokens is not None or not text):
        ids = _ids_in_names(entries.tokens or [])
    if ids is None:
        raise WrongAnswer(
            "text without token ids; the server must support `return_token_ids` (vLLM 0.10.2 and later, recent "
            "SGLang), or `return_tokens_as_token_ids`: for the latter, pass "
            'extra_body={"return_tokens_as_token_ids": True}'
        )
    given = entries.token_logprobs or []
    logprobs = [value for value in given if value is not None]
    if len(given) != len(ids) or len(logprobs) != len(ids):
        raise WrongAnswer(
            f"{len(ids)} token ids with {len(logprobs)} logprobs in one chunk; the server must send one logprob for "
            "each token (`logprobs: 1`)"
        )
    versions = choice.weight_versions or (message.metadata and message.metadata.weight_versions)
    return Piece(ids, logprobs, text, choice.finish_reason, spans_of(versions or ()))


def spans_of(reported: Sequence[WeightVersion], *, start_step: int | None = None) -> VersionSpans:
    """The versions that a server reports, if they are model steps without gaps; otherwise none.

    `start_step`: the step of a version that is not a number, which is that of a server as it started.
    """
    spans: list[tuple[int, int]] = []
    end = 0
    for part in reported:
        step = step_of(part.version, start_step)
        if step is None or end != part.start:
            return ()
        end = part.end
        if part.end > part.start:
            spans.append((step, part.end - part.start))
    return tuple(spans)


def step_of(version: str, start_step: int | None = None) -> int | None:
    """The model step that a version of a server names; `start_step` if it is not a number.

    >>> step_of("12"), step_of("default"), step_of("default", 3)
    (12, None, 3)
    """
    return int(version) if version.isascii() and version.isdigit() and len(version) < 19 else start_step


def _ids_in_names(names: list[str]) -> list[int] | None:
    ids = []
    for name in names:
        prefix, _, number = name.partition(":")
        if prefix != "token_id" or not (number.isascii() and number.isdigit() and len(number) < 19):
            return None
        ids.append(int(number))
    return ids


def raise_reported(code: object, text: object, begun: bool) -> NoReturn:
    """Raise the error that a server reports inside an answer. `begun`: see `read_piece`."""
    if begun or not isinstance(code, int) or code in TRANSIENT_STATUSES:
        raise Interrupted(f"error {code!s:.20} in the answer", detail=f": {text!s:.200}")
    raise WrongAnswer(f"error {code} in the answer: {text!s:.200}")


# --- the sample ---------------------------------------------------------------------------------------


def merged(defaults: SampleParams, own: SampleParams | None) -> SampleParams:
    """The parameters of a sample: its own values where they are set, the defaults elsewhere.

    >>> merged(SampleParams(top_k=5, temperature=1.0), SampleParams(temperature=0.0)).top_k
    5
    """
    if own is None:
        return defaults
    given = {name: value for name in own.__struct_fields__ if (value := getattr(own, name)) not in (None, ())}
    return msgspec.structs.replace(defaults, **given)


class Answer:
    """A sample and the part of its answer that has arrived. `write` copies it into the sample once: O(n) in total."""

    def __init__(self, state: RolloutState, params: SampleParams) -> None:
        if state.prompt_ids is None or not len(state.prompt_ids):
            raise InvalidInput(
                f"{_name(state)} has no prompt_ids, and completion requests consist of tokens; give the sampler a "
                "`tokenize` function"
            )
        if state.mm_info:
            raise InvalidInput(
                f"{_name(state)} has mm_info ({', '.join(map(str, state.mm_info))}), and completion requests consist "
                "of tokens only; write your own AgentLoop for multimodal prompts"
            )
        self.state = state
        self.params = params
        self.finish_reason: str | None = None
        self._prefix = 0 if state.response_ids is None else len(state.response_ids)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._reported: VersionSpans = ()  # by the server, for tokens that are not confirmed yet
        self._said: set[int] = set()  # versions that came with pieces that are not confirmed yet
        self._confirmed = 0  # tokens of known weights; later ones may still be removed
        self._confirmed_texts = 0
        self._versions: VersionSpans | None = state.version_spans  # None: some tokens have no version
        # A response string without its beginning would be wrong.
        self._texts: list[str] | None = None if self._prefix and state.response is None else []
        for name, column in (("logprobs", state.logprobs), ("response_mask", state.response_mask)):
            found = 0 if column is None else len(column)
            if found != self._prefix and (column is not None or name == "logprobs"):
                raise InvalidInput(
                    f"{_name(state)} has {self._prefix} response_ids but {found} entries in {name}; the lengths must "
                    "match to continue it"
                )

    def __len__(self) -> int:
        """The number of tokens of the response."""
        return self._prefix + len(self._ids)

    def add(self, piece: Piece) -> None:
        """Add a piece; WrongAnswer if it cannot belong to this answer."""
        limit = self.params.max_tokens
        if limit is not None and len(self) + len(piece.ids) > limit:
            raise WrongAnswer(f"more tokens than max_tokens ({limit}) allows; the server seems to ignore it")
        if piece.text and not piece.ids and not len(self):
            raise WrongAnswer("text before the first token id; the server must send the ids of each chunk with it")
        self._ids += piece.ids
        self._logprobs += piece.logprobs
        if self._texts is not None and piece.text:
            self._texts.append(piece.text)
        self.finish_reason = piece.finish_reason
        if piece.versions:
            self._reported = piece.versions
        if piece.version is not None:
            self._said.add(piece.version)

    @property
    def needs_version(self) -> bool:
        """Whether the server names versions, and has not said which one each new token has: the answer was cut off."""
        new = len(self._ids) - self._confirmed
        return bool(self._said) and sum(run for _, run in self._reported) != new > 0

    def settle(self, *, known: bool, version: int | None = None) -> None:
        """Keep the tokens that were added since the last call, or remove them: their weights are not known.

        `version`: the version that the server had at the end of an answer that was cut off. Its tokens count if all of
        its pieces came with this version: nothing changed in between.
        """
        if self.needs_version:
            known = known and self._said == {version}
            self._reported = tuple((step, len(self._ids) - self._confirmed) for step in self._said)
        if not known:
            del self._ids[self._confirmed :], self._logprobs[self._confirmed :]
            if self._texts is not None:
                del self._texts[self._confirmed_texts :]
            self.finish_reason = None
        elif len(self._ids) > self._confirmed:
            reported = sum(run for _, run in self._reported)
            if self._versions is None or reported != len(self._ids) - self._confirmed:
                self._versions = None  # the buffer knows the weights
            else:
                self._versions += self._reported
        self._reported, self._said = (), set()
        self._confirmed = len(self._ids)
        self._confirmed_texts = len(self._texts or ())

    def complete(self) -> bool:
        """Whether the answer has ended: the server said so, or the last token is one that ends it.

        A token that the model did not generate (its mask is 0) does not end the answer.
        """
        if self.finish_reason is None and len(self):
            last = self._ids[-1] if self._ids else self.state.response_ids[-1]  # type: ignore[index]
            mask = None if self._ids else self.state.response_mask
            if last in self.params.stop_token_ids and (mask is None or mask[-1]):
                self.finish_reason = "stop"
            elif self.params.max_tokens is not None and len(self) >= self.params.max_tokens:
                self.finish_reason = "length"
        return self.finish_reason is not None

    def ask(self) -> dict[str, Any]:
        """The fields of a request for the rest of the answer; sets the sample's `tokens` to the tokens sent."""
        state, params, present = self.state, self.params, len(self)
        prompt = [*_plain_ids(state, "prompt_ids"), *_plain_ids(state, "response_ids"), *self._ids]
        state.tokens = prompt if isinstance(state.prompt_ids, list) else np.array(prompt, dtype=np.int64)
        fields = msgspec.structs.asdict(params) | {"prompt": prompt}
        if params.seed is not None:
            # The same seed for all members would give k equal answers and advantages of zero. The same seed for a
            # continuation would repeat the random choices of the beginning.
            fields["seed"] = (params.seed + (state.rollout_id or 0) + present * _SEED_STEP) % 2**63
        if params.max_tokens is not None:
            fields["max_tokens"] = params.max_tokens - present
        if params.min_tokens is not None:
            fields["min_tokens"] = max(0, params.min_tokens - present)
        return {name: value for name, value in fields.items() if value not in (None, ())}

    def write(self) -> None:
        """Write the answer and its status (ABORTED if it has not ended) into the sample. Call it once."""
        state, reason = self.state, self.finish_reason or "abort"
        state.finish_reason = reason
        state.status = finish_status(reason)
        completed = state.status is Status.COMPLETED
        if completed:
            state.error_msg = None
        elif state.status is Status.FAILED:
            state.error_msg = f"the server ended with finish_reason {reason!r:.80}"
        if self._ids or (completed and not self._prefix):
            mask = state.response_mask
            state.response_ids = _extended(state.response_ids, self._ids, np.dtype(np.int64))
            state.logprobs = _extended(state.logprobs, self._logprobs, np.dtype(np.float32))
            if self._versions is not None and sum(run for _, run in self._versions) == len(state.response_ids):
                state.response_model_steps = [step for step, run in self._versions for _ in range(run)]
            if mask is not None:
                ones = [1] * len(self._ids)
                state.response_mask = _extended(mask, ones, getattr(mask, "dtype", np.dtype(np.int64)))
        if self._texts is not None and (self._texts or self._ids or completed):
            state.response = ((state.response or "") if self._prefix else "") + "".join(self._texts)


def _plain_ids(state: RolloutState, name: str) -> list[int]:
    column: TokenColumn | None = getattr(state, name)
    tokens: list[Any] = column.tolist() if isinstance(column, np.ndarray) else column or []
    try:
        return [index(token) for token in tokens]
    except TypeError:
        raise InvalidInput(f"{name} of {_name(state)} has an item that is not an integer; expected token ids") from None


def _extended(column: TokenColumn | None, new: list[Any], dtype: np.dtype[Any]) -> TokenColumn:
    """A new column with items appended, of the same kind as the old one."""
    if isinstance(column, list):
        return [*column, *new]
    more = np.array(new, dtype=dtype)
    if column is None or not len(column):  # the dtype of an empty array is often float by accident
        return more
    # Logprobs in float64 keep their precision; ids in a narrow type must not make new ids overflow.
    kind = np.promote_types(column.dtype, dtype) if dtype.kind == "f" else dtype
    return np.concatenate((column, more), dtype=kind, casting="same_kind")


def _name(state: RolloutState) -> str:
    return f"rollout {state.rollout_id} of group {state.group_id}"
