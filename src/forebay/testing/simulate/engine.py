"""An inference engine in virtual time: long tails, failures, hangs, pauses and new weights, without a model.

What it promises
- The tokens of a sample are a pure function of (seed, rollout_id, try, position), its length of (seed, group_id,
  rollout_id), and its failure or hang of (seed, rollout_id, try); never of timing. With partial rollout, interruptions
  do not change the final sample.
- Timing is that of a server: `slots` sequences decode at once at `tokens_per_second` each, the others wait in order; a
  pause ends running sequences after `abort_latency_s`, with the tokens that they had at the pause.
- Every token is versioned with the weights that generated it.
- A sample costs one timer, whatever its length.

It runs on any event loop, but only on a simulated one in no time.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from forebay.agent_loop.base import AgentLoop
from forebay.core.rollout import RolloutState, Status, TokenColumn, VersionSpans, finish_status
from forebay.core.staleness import stamp
from forebay.core.validate import checked_integer
from forebay.errors import EngineError, InvalidConfig
from forebay.prompts.sources import start_again

if TYPE_CHECKING:
    from numpy.typing import NDArray

VOCABULARY = 32_000
"""Token ids are below this."""


class LengthModel(Protocol):
    """How long answers get. Everything is a pure function of its arguments."""

    @property
    def max_tokens(self) -> int:
        """Where an answer is cut off; it then finishes with "length"."""

    def is_long(self, seed: int, group_id: int | None) -> bool:
        """Whether a prompt is one of those with long answers."""

    def length(self, seed: int, group_id: int | None, rollout_id: int | None) -> int:
        """How many tokens an answer has, from 1, before it is cut off."""


class LongTail(msgspec.Struct, frozen=True):
    """Lengths that are lognormal around a median, and `long_factor` times as long for some prompts.

    >>> lengths = LongTail(median=100, sigma=0.0, long_share=0.5, long_factor=8)
    >>> [lengths.length(0, group_id, 7) for group_id in range(6)]
    [800, 800, 100, 100, 800, 800]
    """

    median: float = 200
    sigma: float = 0.8
    long_share: float = 0.25
    long_factor: float = 8
    max_tokens: int = 4096

    def __post_init__(self) -> None:
        if not (self.median > 0 and self.sigma >= 0 and self.long_factor > 0 and 0 <= self.long_share <= 1):
            raise InvalidConfig(f"{self} cannot be: median and factor are above 0, sigma from 0, the share from 0 to 1")
        checked_integer("max_tokens", self.max_tokens, least=1)

    def is_long(self, seed: int, group_id: int | None) -> bool:
        """Whether a prompt is one of those with long answers; the same for all members of its group."""
        return _draw(seed, _IS_LONG, group_id) < self.long_share

    def length(self, seed: int, group_id: int | None, rollout_id: int | None) -> int:
        """How many tokens an answer has, before it is cut off at `max_tokens`."""
        middle = self.median * (self.long_factor if self.is_long(seed, group_id) else 1)
        return max(1, round(middle * math.exp(self.sigma * _NORMAL.inv_cdf(_draw(seed, _LENGTH, rollout_id)))))


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of an engine. A started sample is finished, aborted, failed, or still running."""

    samples_started: int
    samples_finished: int
    samples_aborted: int  # by a pause or a cancel
    samples_failed: int
    tokens_generated: int  # of samples that ended
    busy_s: float  # slot-seconds: of every sample from its turn until its end or the pause; running ones count

    def idle_share(self, slots: int, elapsed_s: float) -> float:
        """The share of the slots' time in which nothing was generated."""
        return 1 - self.busy_s / (slots * elapsed_s)


class SimulatedEngine(AgentLoop):
    """Answers prompts in virtual time. See the top of this file.

    `failure_rate` and `hang_rate` are shares of tries. A failure raises EngineError at some token. A hang stops at one
    and never returns by itself, only for a pause or a cancel; continued, it gets past that token, and begun again in
    the same try, it hangs again.
    `ignores_pause`: running samples continue to their end in spite of `pause`. `reward(state)` is the score of a
    sample that has finished. Weights may change at any time; a subclass may set `takes_weights_while_running`.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        lengths: LengthModel | None = None,
        tokens_per_second: float = 100,
        slots: int | None = None,
        failure_rate: float = 0.0,
        hang_rate: float = 0.0,
        abort_latency_s: float = 0.05,
        ignores_pause: bool = False,
        model_step: int = 0,
        reward: Callable[[RolloutState], float] | None = None,
    ) -> None:
        if not (0 <= failure_rate <= 1 and 0 <= hang_rate <= 1):
            raise InvalidConfig(f"rates are from 0 to 1, got failure_rate={failure_rate}, hang_rate={hang_rate}")
        if not (tokens_per_second > 0 and abort_latency_s >= 0):
            raise InvalidConfig(
                f"expected tokens_per_second above 0 and abort_latency_s from 0, got {tokens_per_second} and "
                f"{abort_latency_s}"
            )
        self.seed = checked_integer("seed", seed)
        self.lengths: LengthModel = LongTail() if lengths is None else lengths
        self.tokens_per_second = tokens_per_second
        self.slots = None if slots is None else checked_integer("slots", slots, least=1)
        self.failure_rate = failure_rate
        self.hang_rate = hang_rate
        self.abort_latency_s = abort_latency_s
        self.ignores_pause = ignores_pause
        self.reward = reward
        self._model_step = checked_integer("model_step", model_step, least=0)
        self._decoding: dict[_Sequence, None] = {}  # for its order, as a set has none
        self._waiting: OrderedDict[_Sequence, None] = OrderedDict()  # a plain dict is slow to give its first away
        self._started = self._tokens = 0
        self._ended = {"finished": 0, "aborted": 0, "failed": 0}
        self._busy_s = 0.0

    # --- planning -------------------------------------------------------------------------------------

    def is_long(self, group_id: int | None) -> bool:
        """Whether a prompt is one of those with long answers."""
        return self.lengths.is_long(self.seed, group_id)

    def length(self, state: RolloutState) -> int:
        """How many tokens a sample has when it has finished."""
        return min(self.lengths.length(self.seed, state.group_id, state.rollout_id), self._max_tokens(state))

    def _max_tokens(self, state: RolloutState) -> int:
        asked = None if state.sample_params is None else state.sample_params.max_tokens
        return self.lengths.max_tokens if asked is None else min(asked, self.lengths.max_tokens)

    def _plan(self, state: RolloutState) -> _Sequence:
        """The first and the last token, and how it ends."""
        first = 0 if state.response_ids is None else len(state.response_ids)
        wanted = self.lengths.length(self.seed, state.group_id, state.rollout_id)
        limit = self._max_tokens(state)
        length = min(wanted, limit)
        last, ending = length, "stop" if wanted <= limit else "length"
        failure = self._accident(self.failure_rate, _FAILS, state, length)
        if failure is not None and failure >= first:
            last, ending = failure, "error"
        hang = self._accident(self.hang_rate, _HANGS, state, length)
        if hang is not None and first < hang <= last:  # a sample that a pause ended in a hang gets past it
            last, ending = hang, "hang"
        return _Sequence(state, first, max(first, last), ending)

    def _accident(self, rate: float, what: int, state: RolloutState, length: int) -> int | None:
        """After how many tokens of this try it happens, if it does."""
        if not rate or _draw(self.seed, what, state.rollout_id, state.num_tries) >= rate:
            return None
        return math.ceil(_draw(self.seed, what + 1, state.rollout_id, state.num_tries) * length)

    # --- generating -----------------------------------------------------------------------------------

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        """Answer one sample: in place, in virtual time."""
        if self.paused and not self.ignores_pause:
            state.status = Status.ABORTED
            return state
        if not enable_partial_rollout:
            start_again(state)
        sequence = self._plan(state)
        self._arrive(sequence)
        ending = "abort"
        try:
            ending = await sequence.ended
        finally:  # a cancel keeps the tokens too, as in a loop that streams
            self._leave(sequence, ending)
        if ending == "error":
            raise EngineError(
                f"simulated failure of rollout {state.rollout_id} at token {sequence.last}, in try {state.num_tries}"
            )
        if self.reward is not None and state.status is Status.COMPLETED:
            state.reward = {"score": float(self.reward(state))}
        return state

    def _arrive(self, sequence: _Sequence) -> None:
        self._started += 1
        sequence.ended = asyncio.get_running_loop().create_future()
        self._waiting[sequence] = None
        self._begin_next()

    def _begin_next(self) -> None:
        while self._waiting and (self.slots is None or len(self._decoding) < self.slots):
            sequence, _ = self._waiting.popitem(last=False)
            self._decoding[sequence] = None
            loop = asyncio.get_running_loop()
            sequence.began_at = loop.time()
            if sequence.ending != "hang":
                duration_s = (sequence.last - sequence.first) / self.tokens_per_second
                sequence.timer = loop.call_later(duration_s, _end, sequence.ending, sequence.ended)

    def _leave(self, sequence: _Sequence, ending: str) -> None:
        now = asyncio.get_running_loop().time()
        position = self._position(sequence, now) if ending == "abort" else sequence.last
        self._busy_s += sequence.busy_s(now)
        self._tokens += position - sequence.first
        self._write(sequence, position)
        state = sequence.state
        state.finish_reason = ending
        state.status = finish_status(ending)
        self._ended[_COUNTED_AS[ending]] += 1
        if sequence.timer is not None:
            sequence.timer.cancel()
        self._waiting.pop(sequence, None)
        self._decoding.pop(sequence, None)
        self._begin_next()

    def _position(self, sequence: _Sequence, now: float) -> int:
        # The fraction makes up for what a difference of two times loses: 0.3 - 0.2 is less than a tenth.
        return min(sequence.last, sequence.first + int(sequence.busy_s(now) * self.tokens_per_second + 1e-6))

    def _write(self, sequence: _Sequence, position: int) -> None:
        state, first = sequence.state, sequence.first
        if position == first:
            return
        ids, logprobs = _decode(self.seed, state.rollout_id, state.num_tries, first, position)
        if state.response_mask is not None:
            state.response_mask = _extended(state.response_mask, np.ones(position - first, dtype=np.int64))
        if not first or state.logprobs is not None:  # otherwise the lengths would differ
            state.logprobs = _extended(state.logprobs, logprobs)
        state.response_ids = _extended(state.response_ids, ids)
        state.version_spans = stamp(sequence.spans, position, self._model_step)

    # --- pausing, weights, figures --------------------------------------------------------------------

    async def pause(self) -> None:
        """End running and waiting samples after the abort latency."""
        await super().pause()
        if self.ignores_pause:
            return
        loop = asyncio.get_running_loop()
        stopped = []
        for sequence in (*self._decoding, *self._waiting):
            if sequence.stopped_at is None and not sequence.ended.done():
                sequence.stopped_at = loop.time()
                if sequence.timer is not None:
                    sequence.timer.cancel()
                stopped.append(sequence.ended)
        self._waiting.clear()
        if stopped:
            loop.call_later(self.abort_latency_s, _end, "abort", *stopped)

    @property
    def model_step(self) -> int:
        """The step of the weights; new tokens are versioned with it."""
        return self._model_step

    @model_step.setter
    def model_step(self, model_step: int) -> None:
        self.set_weights(model_step)

    def set_weights(self, model_step: int) -> None:
        """New weights, from the next token on. Costs one step per sequence that is being decoded."""
        model_step = checked_integer("model_step", model_step, least=0)
        if self._decoding and model_step != self._model_step:
            now = asyncio.get_running_loop().time()
            for sequence in self._decoding:
                sequence.spans = stamp(sequence.spans, self._position(sequence, now), self._model_step)
        self._model_step = model_step

    def figures(self) -> EngineFigures:
        """The counts so far."""
        running_s = 0.0
        if self._decoding:
            now = asyncio.get_running_loop().time()
            running_s = sum(sequence.busy_s(now) for sequence in self._decoding)
        return EngineFigures(
            samples_started=self._started,
            samples_finished=self._ended["finished"],
            samples_aborted=self._ended["aborted"],
            samples_failed=self._ended["failed"],
            tokens_generated=self._tokens,
            busy_s=self._busy_s + running_s,
        )


class _Sequence:
    """One running sample: from token `first` to token `last`, where `ending` happens."""

    __slots__ = ("began_at", "ended", "ending", "first", "last", "spans", "state", "stopped_at", "timer")

    ended: asyncio.Future[str]

    def __init__(self, state: RolloutState, first: int, last: int, ending: str) -> None:
        self.state = state
        self.first = first
        self.last = last
        self.ending = ending
        self.spans: VersionSpans = state.version_spans
        self.began_at: float | None = None
        self.stopped_at: float | None = None
        self.timer: asyncio.TimerHandle | None = None

    def busy_s(self, now: float) -> float:
        if self.began_at is None:
            return 0.0
        return (now if self.stopped_at is None else self.stopped_at) - self.began_at


_COUNTED_AS = {"stop": "finished", "length": "finished", "abort": "aborted", "error": "failed"}


def _end(ending: str, *sequences: asyncio.Future[str]) -> None:
    for ended in sequences:
        if not ended.done():
            ended.set_result(ending)


def _extended(column: TokenColumn | None, new: NDArray[Any]) -> NDArray[Any]:
    return new if column is None else np.concatenate([np.asarray(column, dtype=new.dtype), new])


# --- drawing --------------------------------------------------------------------------------------------
# splitmix64: a mixed counter, so that any draw can be had without those before it, in numpy as in Python.

_MASK = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TOKENS, _IS_LONG, _LENGTH, _FAILS, _HANGS = 1, 2, 3, 4, 6  # what is drawn; _FAILS + 1 and _HANGS + 1 are where
_NORMAL = NormalDist()


def _mixed(seed: int, *numbers: int | None) -> int:
    """64 bits that depend on every number."""
    bits = seed & _MASK
    for number in numbers:
        bits = (bits + _STEP * (1 if number is None else 2 * number + 2)) & _MASK
        bits = ((bits ^ (bits >> 30)) * _FIRST) & _MASK
        bits = ((bits ^ (bits >> 27)) * _SECOND) & _MASK
        bits ^= bits >> 31
    return bits


def _draw(seed: int, *numbers: int | None) -> float:
    """A number between 0 and 1, both excluded."""
    return ((_mixed(seed, *numbers) >> 12) + 0.5) / (1 << 52)


def _decode(
    seed: int, rollout_id: int | None, tries: int, start: int, stop: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Tokens and logprobs of the positions from `start` to before `stop`."""
    bits = np.arange(start + 1, stop + 1, dtype=np.uint64)
    bits *= np.uint64(_STEP)
    bits += np.uint64(_mixed(seed, _TOKENS, rollout_id, tries))
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(_FIRST)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(_SECOND)
    bits ^= bits >> np.uint64(31)
    ids = ((bits >> np.uint64(32)) % np.uint64(VOCABULARY)).astype(np.int32)
    logprobs = (bits & np.uint64(0xFFFFFFFF)).astype(np.float32) * np.float32(-(2.0**-31))
    return ids, logprobs


def tokens(seed: int, rollout_id: int | None, tries: int, start: int, stop: int) -> NDArray[np.int32]:
    """The tokens of an engine at the positions from `start` to before `stop`.

    >>> tokens(0, 7, 0, 2, 5).tolist() == [token(0, 7, 0, position) for position in (2, 3, 4)]
    True
    """
    return _decode(seed, rollout_id, tries, start, stop)[0]


def token(seed: int, rollout_id: int | None, tries: int, position: int) -> int:
    """The token of an engine at one position of one try."""
    return int(tokens(seed, rollout_id, tries, position, position + 1)[0])
