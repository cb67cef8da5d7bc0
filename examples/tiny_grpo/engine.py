"""An inference engine in the same process: continuous batching in a thread of its own. It knows nothing of Forebay.

What it promises
- `submit` returns a future at once. Prompts take the lowest free slot and join the others between two tokens; every
  step gives each running sequence one more token. A prompt is fed a token a step, too, as a response is.
- A completion has the tokens, the log-probability of each under the distribution that it was sampled from
  (temperature included), and the model step of the weights that each came from.
- `abort` ends everything that was submitted before it, with the tokens that are there. Cancelling a future drops it.
- `load_weights` copies weights between two steps; what is running goes on with them.
- A completion depends on weights, tokens, temperature and seed, and not on what else is running.
- After `close` there is no thread left, and no future that was not settled.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tiny_grpo.model import Cache, Policy

__all__ = ["Completion", "Engine"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_ROWS_AT_ONCE = 16  # steps run on a multiple of so many slots: the kernels for fewer rows round in other ways


@dataclass(frozen=True)
class Completion:
    """What came of a prompt. `finish_reason`: stop (the end token, which is included), length, or abort."""

    tokens: Array
    logprobs: Array
    model_steps: list[int]
    finish_reason: str


@dataclass(frozen=True)
class _Request:
    tokens: Array
    max_tokens: int
    temperature: float
    chances: Array  # a random number for each token to come
    on_token: Callable[[int, float], None] | None
    future: Future[Completion]


class Engine:
    """Generates with a copy of the policy's weights, on one core."""

    def __init__(self, policy: Policy, *, end_token: int, slots: int = 128, model_step: int = 0) -> None:
        self.model_step = model_step
        self._policy = copy.deepcopy(policy).requires_grad_(False)
        self._end_token = end_token
        self._cache = Cache(policy.config, slots)
        # One row a slot. A sequence has `known` tokens, those before `at` are in the cache.
        context = policy.config.context
        self._slots: list[_Request | None] = [None] * slots
        self._tokens = np.zeros((slots, context), dtype=np.int64)
        self._logprobs = np.zeros((slots, context), dtype=np.float32)
        self._model_steps = np.zeros((slots, context), dtype=np.int64)
        self._chances = np.zeros((slots, context))
        self._temperatures = np.ones(slots, dtype=np.float32)
        self._at = np.zeros(slots, dtype=np.int64)
        self._known = np.zeros(slots, dtype=np.int64)
        self._limit = np.zeros(slots, dtype=np.int64)
        # What other threads leave for ours, under the lock.
        self._changed = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._weights: tuple[Mapping[str, Tensor], int, Future[None]] | None = None
        self._aborting = False
        self._closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="tiny-engine", daemon=True)
        self._thread.start()

    # --- from any thread ------------------------------------------------------------------------------

    def submit(
        self,
        tokens: Array,
        *,
        max_tokens: int,
        temperature: float,
        seed: Sequence[int],
        on_token: Callable[[int, float], None] | None = None,
    ) -> Future[Completion]:
        """Have a prompt completed (or a response that was begun: prompt and response so far).

        `on_token` gets every token and its log-probability at once, in the engine's thread: it must not take long.
        """
        tokens = np.asarray(tokens)
        context, vocabulary = self._policy.config.context, self._policy.config.vocabulary
        if len(tokens) < 1 or max_tokens < 1 or len(tokens) + max_tokens > context:
            raise ValueError(
                f"{len(tokens)} tokens and max_tokens={max_tokens}; expected some of both, {context} at most together"
            )
        if tokens.min() < 0 or tokens.max() >= vocabulary or temperature <= 0:
            raise ValueError(
                f"tokens from {tokens.min()} to {tokens.max()}, temperature={temperature}; expected tokens from 0 to "
                f"{vocabulary - 1}, and a temperature above 0"
            )
        chances = np.random.default_rng(seed).random(max_tokens)
        request = _Request(tokens, max_tokens, temperature, chances, on_token, Future())
        with self._changed:
            self._check_open()
            self._waiting.append(request)
            self._changed.notify()
        return request.future

    @property
    def load(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        with self._changed:
            return sum(request is not None for request in self._slots), len(self._waiting)

    def abort(self) -> None:
        """End what was submitted so far; each completion has the tokens that there are."""
        with self._changed:
            self._aborting = True
            self._changed.notify()

    def load_weights(self, weights: Mapping[str, Tensor], model_step: int) -> Future[None]:
        """Generate with these weights from the next step on; they may be changed again once the future is done."""
        done: Future[None] = Future()
        with self._changed:
            self._check_open()
            if self._weights is not None:
                raise RuntimeError("other weights are being loaded; wait for them first")
            self._weights = (weights, model_step, done)
            self._changed.notify()
        return done

    def close(self) -> None:
        """Abort everything, and end the thread. Closing twice is allowed."""
        with self._changed:
            self._closing = self._aborting = True
            self._changed.notify()
        self._thread.join()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine failed: {self._failure!r}") from self._failure
        if self._closing:
            raise RuntimeError("this engine was closed")

    # --- in the engine's thread -----------------------------------------------------------------------

    @torch.inference_mode()
    def _work(self) -> None:
        try:
            while self._take_orders():
                self._step()
        except Exception as error:
            self._fail(error)

    def _take_orders(self) -> bool:
        """What was asked for between two steps; waits while there is nothing to do. False: it is over."""
        with self._changed:
            while not (self._waiting or any(self._slots) or self._weights or self._aborting):
                self._changed.wait()
            aborting, self._aborting = self._aborting, False
            loading, self._weights = self._weights, None
            dropped = [self._waiting.popleft() for _ in range(len(self._waiting) if aborting else 0)]
            free = [
                slot
                for slot, request in enumerate(self._slots)
                if request is None or request.future.cancelled() or aborting
            ]
            joining = [self._waiting.popleft() for _ in range(min(len(free), len(self._waiting)))]
            closing = self._closing
        if aborting:
            self._abort_all(dropped)
        if loading is not None:
            self._load(*loading)
        for slot in free:
            self._slots[slot] = None
        for slot, request in zip(free, joining, strict=False):
            self._join(slot, request)
        return not closing

    def _load(self, weights: Mapping[str, Tensor], model_step: int, done: Future[None]) -> None:
        try:
            self._policy.load_state_dict(weights)
        except Exception as error:  # of another shape, say: whoever brought them hears of it
            done.set_exception(error)
            return
        self.model_step = model_step
        _settle(done, None)

    def _abort_all(self, waiting: Sequence[_Request]) -> None:
        for slot, request in enumerate(self._slots):
            if request is not None:
                self._finish(slot, "abort")
        for request in waiting:
            nothing = np.zeros(0, dtype=np.int64)
            _settle(request.future, Completion(nothing, nothing.astype(np.float32), [], "abort"))

    def _join(self, slot: int, request: _Request) -> None:
        start, stop = len(request.tokens), len(request.tokens) + request.max_tokens
        self._slots[slot] = request
        self._tokens[slot, :start] = request.tokens
        self._chances[slot, start:stop] = request.chances
        self._temperatures[slot] = request.temperature
        self._at[slot], self._known[slot], self._limit[slot] = 0, start, stop

    def _step(self) -> None:
        """One more token into the cache for every sequence; a new one for those whose tokens are all there."""
        used = max((slot for slot, request in enumerate(self._slots) if request is not None), default=-1) + 1
        rows = min(-(-used // _ROWS_AT_ONCE) * _ROWS_AT_ONCE, len(self._slots))
        if not rows:
            return
        every, at = np.arange(rows), self._at[:rows]
        tokens = torch.from_numpy(self._tokens[every, at])
        logits = self._policy.step(tokens, torch.from_numpy(at.copy()), self._cache)
        logprobs = torch.log_softmax(logits / torch.from_numpy(self._temperatures[:rows, None]), dim=-1)
        running = np.array([request is not None for request in self._slots[:rows]])
        (new,) = np.nonzero(running & (at + 1 == self._known[:rows]))
        self._at[:rows][running] += 1
        if len(new):
            self._sample(new, logprobs.numpy()[new])

    def _sample(self, new: Array, logprobs: Array) -> None:
        """Draw the next token of these slots, and finish those that are done."""
        position = self._known[new]
        cumulated = np.cumsum(np.exp(logprobs, dtype=np.float64), axis=-1)
        chance = self._chances[new, position] * cumulated[:, -1]
        token = np.minimum((cumulated <= chance[:, None]).sum(axis=-1), logprobs.shape[-1] - 1)
        self._tokens[new, position] = token
        self._logprobs[new, position] = logprobs[np.arange(len(new)), token]
        self._model_steps[new, position] = self.model_step
        self._known[new] += 1
        ended, spent = token == self._end_token, self._known[new] == self._limit[new]
        for index, slot in enumerate(new.tolist()):
            request = self._slots[slot]
            if request is not None and request.on_token is not None:
                request.on_token(int(token[index]), float(self._logprobs[slot, position[index]]))
            if ended[index] or spent[index]:
                self._finish(slot, "stop" if ended[index] else "length")

    def _finish(self, slot: int, reason: str) -> None:
        request = self._slots[slot]
        assert request is not None
        self._slots[slot] = None
        generated = np.s_[slot, len(request.tokens) : self._known[slot]]
        completion = Completion(
            self._tokens[generated].copy(),
            self._logprobs[generated].copy(),
            self._model_steps[generated].tolist(),
            reason,
        )
        _settle(request.future, completion)

    def _fail(self, error: Exception) -> None:
        """Nobody shall wait for a thread that has died."""
        with self._changed:
            self._failure = error
            left = [*self._waiting, *[request for request in self._slots if request is not None]]
            futures: list[Future[Any]] = [request.future for request in left]
            if self._weights is not None:
                futures.append(self._weights[2])
        for future in futures:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(RuntimeError(f"the engine failed: {error!r}"))


def _settle(future: Future[Any], result: object) -> None:
    with contextlib.suppress(InvalidStateError):  # it was cancelled meanwhile
        future.set_result(result)
