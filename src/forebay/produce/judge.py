"""`Judge`: rewards results, then filters them.

Rewards are computed per sample or per group; rewards and filters may be async. Plain functions run in dedicated
threads, so that a slow one does not block the event loop, unless `on_loop` declares them cheap. A sample is rewarded
once: members kept from an earlier attempt keep their reward. A group reward is computed again for every attempt, when
the group is complete. Filters see complete groups only. `judge` sets no status but FILTERED and does not retry: a
function that raises may depend on an unreachable service, and the caller repeats the call until it gives up.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from forebay.core.aio import Pool, run_user_code, start_thread
from forebay.core.rollout import RolloutState, Status, group_reward
from forebay.core.validate import checked_integer
from forebay.errors import InvalidConfig, InvalidInput
from forebay.produce.filters import Filter, is_cheap
from forebay.produce.members import is_answered, leave_unjudged

__all__ = ["GroupReward", "Judge", "Judged", "SampleReward", "fail_judging", "set_aside"]

log = logging.getLogger(__name__)

Score: TypeAlias = "float | dict[str, Any] | None"
SampleReward: TypeAlias = Callable[[RolloutState], "Score | Awaitable[Score]"]
GroupReward: TypeAlias = Callable[[list[RolloutState]], "Sequence[Score] | Awaitable[Sequence[Score]] | None"]

_LONG_CALL_S = 0.05


class Judged(NamedTuple):
    """The result of judging. `error`: the exception, or the problem with a score or verdict.

    `passing`: it may be an outage, so judging can be repeated. `rewarded`: the rewards were given, and a later step
    failed. `rejected`: the reason of a filter. `hung`: it did not end in time.
    """

    error: str | None = None
    passing: bool = False
    rewarded: bool = False
    rejected: str | None = None
    hung: bool = False


class Judge:
    """Rewards and filters results. By default every group is kept, with the rewards that the agent loop gave.

    `concurrency`: the maximum number of concurrent calls of rewards and filters.
    """

    def __init__(
        self,
        *,
        reward_fn: SampleReward | None = None,
        group_reward_fn: GroupReward | None = None,
        filters: Sequence[Filter] = (),
        concurrency: int = 64,
    ) -> None:
        if reward_fn is not None and group_reward_fn is not None:
            raise InvalidConfig("reward_fn and group_reward_fn are both set; expected one of them")
        for function in (reward_fn, group_reward_fn, *filters):
            if function is not None and not callable(function):
                raise InvalidConfig(f"{function!r:.80} is not a function; expected one that judges samples or groups")
        self.reward_fn = reward_fn
        self.group_reward_fn = group_reward_fn
        self.filters = tuple(filters)
        self.rewards = reward_fn is not None or group_reward_fn is not None
        self.idle = not self.rewards and not self.filters
        self.concurrency = checked_integer("reward_concurrency", concurrency, least=1)
        self.pool = Pool("judge", concurrency, "rewards and filters")
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._warned: set[int] = set()
        self._calls: dict[Any, asyncio.Future[Any]] = {}  # in threads

    async def judge(self, members: list[RolloutState], *, keep_rejected: bool = False) -> Judged:
        """Reward the COMPLETED members, and filter the group if it is complete.

        Rejected members become FILTERED, unless `keep_rejected`.
        """
        error = await self._reward(members)
        if error is not None:
            return Judged(_describe(error, "the reward raised "), passing=not isinstance(error, InvalidInput))
        if not all(state.status is Status.COMPLETED for state in members):
            return Judged()
        try:
            if self.group_reward_fn is not None:
                await self._reward_group(self.group_reward_fn, members)
            rejected = await self._rejected(members)
        except Exception as raised:
            return Judged(_describe(raised), passing=not isinstance(raised, InvalidInput), rewarded=True)
        if rejected is not None and not keep_rejected:
            for state in members:
                state.status, state.error_msg = Status.FILTERED, rejected
        return Judged(rejected=rejected)

    async def _reward(self, members: Sequence[RolloutState]) -> Exception | None:
        """Compute the missing rewards. Returns the last error, preferring one that a retry cannot fix."""
        function = self.reward_fn
        if function is None:
            return None
        todo = [state for state in members if state.status is Status.COMPLETED and state.reward is None]
        results: Sequence[Any]
        if is_cheap(function):
            results = [self._called(function, state) for state in todo]
            if any(inspect.isawaitable(result) for result in results):
                results = await _all_ended([self._awaited(function, result) for result in results])
        else:
            results = await _all_ended([self._result(function, state) for state in todo])
        failed: Exception | None = None
        for state, result in zip(todo, results, strict=True):
            try:
                if isinstance(result, Exception):
                    raise result
                state.reward = _reward_of(state, result, function)
                group_reward((state,))
            except Exception as raised:
                state.reward = None
                failed = failed if isinstance(failed, InvalidInput) else raised
        return failed

    async def _reward_group(self, reward: GroupReward, members: list[RolloutState]) -> None:
        before = [state.reward for state in members]
        given = await self._result(reward, list(members))  # a copy, so that the function cannot remove members
        given = [None] * len(members) if given is None else given
        if len(given) != len(members):
            raise InvalidInput(
                f"group_reward_fn returned {len(given)} rewards for {len(members)} members; the numbers must match"
            )
        try:
            rewards = [_reward_of(state, score, reward) for state, score in zip(members, given, strict=True)]
            _set_rewards(members, rewards)
            group_reward(members)  # refuses scores that are not numbers
        except Exception:
            _set_rewards(members, before)  # samples with invalid rewards could not be stored
            raise

    async def _rejected(self, members: list[RolloutState]) -> str | None:
        for accepts in self.filters:
            verdict = await self._result(accepts, list(members))
            if isinstance(verdict, np.bool_):
                verdict = bool(verdict)
            if verdict is True:
                continue
            if verdict is not False and not isinstance(verdict, str):
                raise InvalidInput(f"a filter returned {verdict!r:.80}; expected True, False or a reason")
            return verdict or "filtered"
        return None

    # --- calls of user functions ----------------------------------------------------------------------

    async def _result(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """The result of a user function: called in a thread unless it is async or cheap, and awaited if necessary."""
        if is_cheap(function):
            result = self._called(function, argument)
            if isinstance(result, Exception):
                raise result
            return await self._awaited(function, result)
        async with self._slot():
            if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
                return await self._watched(function, function(argument))
            result = await self._in_thread(function, argument)
            return await self._watched(function, result) if inspect.isawaitable(result) else result

    async def _in_thread(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """The result of a call in a thread. A cancel leaves the call behind; a repeated call waits for the first one.

        So a reward that hangs occupies one thread, however often its group is judged.
        """
        key = _key(function, argument)
        calling = self._calls.get(key)
        if calling is None or calling.get_loop() is not asyncio.get_running_loop():
            calling = self._calls[key] = start_thread(lambda: function(argument), pool=self.pool)
            calling.add_done_callback(lambda done: self._calls.pop(key, None) if self._calls.get(key) is done else None)
        return await asyncio.shield(calling)

    async def _awaited(self, function: Callable[[Any], Any], result: Any) -> Any:
        if isinstance(result, Exception) or not inspect.isawaitable(result):
            return result
        async with self._slot():
            return await self._watched(function, result)

    async def _watched(self, function: Callable[[Any], Any], result: Awaitable[Any]) -> Any:
        """Await the result of a user function, and warn if it blocks the event loop."""
        if not inspect.iscoroutine(result):
            return await result
        return await _stepwise(result, lambda seconds: self._note_hold(function, seconds, cheap=False))

    def _called(self, function: Callable[[Any], Any], argument: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(argument)
        except Exception as error:
            return error
        finally:
            self._note_hold(function, time.perf_counter() - began, cheap=True)

    def _note_hold(self, function: Callable[[Any], Any], seconds: float, *, cheap: bool) -> None:
        if seconds > _LONG_CALL_S and id(function) not in self._warned:
            self._warned.add(id(function))
            declared = "on_loop declares it cheap, but it" if cheap else "it is async, but between two awaits it"
            other = "without on_loop it runs in a thread" if cheap else "a plain function runs in a thread"
            log.warning(
                "loop_held function=%s seconds=%.3f: %s blocks the event loop; %s",
                getattr(function, "__qualname__", function), seconds, declared, other,
            )  # fmt: skip

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self.concurrency))
        return self._slots[1]


@types.coroutine
def _stepwise(work: Coroutine[Any, Any, Any], note: Callable[[float], None]) -> Generator[Any, Any, Any]:
    """Run a coroutine, and call `note` with the seconds of each step between two suspensions."""
    value: Any = None
    error: BaseException | None = None
    while True:
        began = time.perf_counter()
        try:
            awaited = work.send(value) if error is None else work.throw(error)
        except StopIteration as ended:
            return ended.value
        finally:
            note(time.perf_counter() - began)
        try:
            value, error = (yield awaited), None
        except BaseException as raised:
            value, error = None, raised


def set_aside(members: Sequence[RolloutState]) -> None:
    """Judging was stopped by a pause or a cancel: answered members are judged on their retry, and spend no try."""
    for state in members:
        if is_answered(state):
            leave_unjudged(state)


def fail_judging(members: Sequence[RolloutState], judged: Judged, max_tries: int) -> str:
    """Judging was given up: members that are not judged spend a try and wait for a retry. Returns the error."""
    error = judged.error or "it could not be judged"
    for state in members:
        if is_answered(state) and (judged.rewarded or state.reward is None):
            state.num_tries += 1
            leave_unjudged(state)
            state.error_msg = error
            if state.num_tries >= max_tries:
                state.status = Status.FAILED
    return error


def _key(function: Callable[[Any], Any], argument: Any) -> Any:
    """Identifies a call: the function, and the answers that it judges."""
    states = argument if isinstance(argument, list) else [argument]
    return id(function), isinstance(argument, list), tuple(_answer_key(state) for state in states)


def _answer_key(state: RolloutState) -> Any:
    if state.rollout_id is None or state.response is None:
        return id(state)
    return state.task_name, state.rollout_id, state.segment, state.response


class _BadReward(InvalidInput):
    """A function returned something that is not a reward; the message names the function."""


def _describe(error: Exception, prefix: str = "") -> str:
    return str(error) if isinstance(error, _BadReward) else f"{prefix}{type(error).__name__}: {error}"


def _set_rewards(members: Sequence[RolloutState], rewards: Sequence[dict[str, Any] | None]) -> None:
    for state, reward in zip(members, rewards, strict=True):
        state.reward = reward


def _reward_of(state: RolloutState, score: Any, function: Callable[..., Any]) -> dict[str, Any]:
    """The reward of a sample: the result of the function, or `reward` if the function or the agent loop set it."""
    score = state.reward if score is None else score
    name = getattr(function, "__qualname__", function)
    sample = f"for rollout {state.rollout_id} of group {state.group_id}"
    if score is None:
        raise _BadReward(f"{name} returned None {sample}, and `reward` is not set; return its score, or set `reward`")
    if isinstance(score, RolloutState):
        raise _BadReward(f"{name} returned a sample; return its score, or None if it set `reward` itself")
    reward = _as_reward(score)
    if reward is None or not _is_finite(reward.get("score", 0.0)):
        raise _BadReward(
            f"{name} returned {score!r:.80} {sample}; expected a finite number, a dict whose 'score', if any, is "
            "a finite number, or None if it set `reward` itself"
        )
    return reward


def _as_reward(score: Any) -> dict[str, Any] | None:
    """The reward as it is stored; None if the score is invalid."""
    if isinstance(score, dict):
        return {name: _plain(value) for name, value in score.items()}
    number = _plain(score)
    return {"score": float(number)} if isinstance(number, (bool, int, float)) else None


def _plain(value: Any) -> Any:
    """A scalar of numpy or torch as a number of Python; any other value unchanged."""
    if isinstance(value, np.generic) or (getattr(value, "shape", None) == () and hasattr(value, "item")):
        return value.item()
    return value


def _is_finite(score: Any) -> bool:
    return score is None or (isinstance(score, (bool, int, float)) and math.isfinite(score))


async def _all_ended(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of calls, or the exceptions that they raised.

    A cancel waits for all calls: a sample must not be used again while a reward function still has it.
    """
    ended = await run_user_code(asyncio.gather(*calls, return_exceptions=True))
    if ended.cancelled is not None:
        raise ended.cancelled
    results = ended.future.result()
    return [InvalidInput("it cancelled itself") if isinstance(r, asyncio.CancelledError) else r for r in results]
