"""Judging results: reward, then filter.

Rewards are of a sample, or of a whole group; both, and filters, may be async. Plain functions run in threads of their
own, so that a slow one does not hold the event loop, unless `on_loop` declares them cheap. A sample is rewarded once:
members kept from an earlier attempt keep their reward. A group reward is computed when the whole group is there, each
time again. Filters see finished groups only. `judge` changes no status but FILTERED: a function that raises may be a
service that is away, and the caller repeats the call until it gives up.
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

from forebay.checks import whole_number
from forebay.errors import InvalidConfig, InvalidInput
from forebay.produce.filters import Filter, is_cheap
from forebay.produce.members import is_answered, leave_unjudged
from forebay.rollout import RolloutState, Status, group_reward
from forebay.threads import Pool, see_through, start_thread

__all__ = ["GroupReward", "Judge", "Judged", "SampleReward", "fail_judging", "set_aside"]

log = logging.getLogger(__name__)

Score: TypeAlias = "float | dict[str, Any] | None"
SampleReward: TypeAlias = Callable[[RolloutState], "Score | Awaitable[Score]"]
GroupReward: TypeAlias = Callable[[list[RolloutState]], "Sequence[Score] | Awaitable[Sequence[Score]] | None"]

_LONG_HOLD_S = 0.05


class Judged(NamedTuple):
    """How judging went. `error`: what raised, or was wrong with a score or verdict.

    `passing`: it may be an outage, so judging can be repeated. `rewarded`: the rewards were given, and something behind
    them failed. `rejected`: the reason of a filter. `hung`: it did not end in time.
    """

    error: str | None = None
    passing: bool = False
    rewarded: bool = False
    rejected: str | None = None
    hung: bool = False


class Judge:
    """How results are judged. Nothing set: everything is kept, with the rewards that the agent loop gave.

    `concurrency`: how many calls of rewards and filters run at a time.
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
            raise InvalidConfig("reward_fn and group_reward_fn are both given; expected one of them")
        for function in (reward_fn, group_reward_fn, *filters):
            if function is not None and not callable(function):
                raise InvalidConfig(f"{function!r:.80} is no function; expected one that judges samples or groups")
        self.reward_fn = reward_fn
        self.group_reward_fn = group_reward_fn
        self.filters = tuple(filters)
        self.concurrency = whole_number("reward_concurrency", concurrency, least=1)
        self.pool = Pool("judge", concurrency, "rewards and filters")
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._warned: set[int] = set()
        self._calls: dict[Any, asyncio.Future[Any]] = {}  # in threads

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.reward_fn is None and self.group_reward_fn is None and not self.filters

    @property
    def rewards(self) -> bool:
        """Whether it gives rewards."""
        return self.reward_fn is not None or self.group_reward_fn is not None

    async def judge(self, members: list[RolloutState], *, keep_rejected: bool = False) -> Judged:
        """Reward the finished members, and filter the group if it is complete.

        Members that are rejected become FILTERED, unless `keep_rejected`.
        """
        error = await self._reward(members)
        if error is not None:
            return Judged(_text(error, "the reward raised "), passing=not isinstance(error, InvalidInput))
        if not all(state.status is Status.COMPLETED for state in members):
            return Judged()
        try:
            if self.group_reward_fn is not None:
                await self._reward_group(self.group_reward_fn, members)
            rejected = await self._rejected(members)
        except Exception as raised:
            return Judged(_text(raised), passing=not isinstance(raised, InvalidInput), rewarded=True)
        if rejected is not None and not keep_rejected:
            for state in members:
                state.status, state.error_msg = Status.FILTERED, rejected
        return Judged(rejected=rejected)

    async def _reward(self, members: Sequence[RolloutState]) -> Exception | None:
        """Give the rewards that are missing; the last error, one that no retry can help before others."""
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
        given = await self._result(reward, list(members))  # a list of its own: the group is not to lose members here
        given = [None] * len(members) if given is None else given
        if len(given) != len(members):
            raise InvalidInput(
                f"group_reward_fn gave {len(given)} rewards for {len(members)} members; the numbers must match"
            )
        try:
            _give(members, [_reward_of(state, score, reward) for state, score in zip(members, given, strict=True)])
            group_reward(members)  # refuses scores that are no numbers
        except Exception:
            _give(members, before)  # the responses are kept, and could not be stored with these
            raise

    async def _rejected(self, members: list[RolloutState]) -> str | None:
        for accepts in self.filters:
            verdict = await self._result(accepts, list(members))
            if isinstance(verdict, np.bool_):
                verdict = bool(verdict)
            if verdict is True:
                continue
            if verdict is not False and not isinstance(verdict, str):
                raise InvalidInput(f"a filter answered {verdict!r:.80}; expected True, False or a reason")
            return verdict or "filtered"
        return None

    # --- functions of the user ------------------------------------------------------------------------

    async def _result(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """What a function of the user returns: awaited if it can be, called in a thread unless it is async or cheap."""
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
        """The result of a call in a thread. A cancel leaves it behind; whoever asks the same again waits for that call.

        So a reward that hangs takes one thread, however often its group is judged.
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
        """Await what a function of the user returned, and note how long it holds the event loop at a time."""
        if not inspect.iscoroutine(result):
            return await result
        return await _stepwise(result, lambda held_s: self._note_hold(function, held_s, cheap=False))

    def _called(self, function: Callable[[Any], Any], argument: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(argument)
        except Exception as error:
            return error
        finally:
            self._note_hold(function, time.perf_counter() - began, cheap=True)

    def _note_hold(self, function: Callable[[Any], Any], held_s: float, *, cheap: bool) -> None:
        if held_s > _LONG_HOLD_S and id(function) not in self._warned:
            self._warned.add(id(function))
            declared = "it is declared cheap with on_loop, but" if cheap else "it is async, but between two awaits it"
            other = "without on_loop it runs in a thread" if cheap else "a plain function runs in a thread"
            log.warning(
                "loop_held function=%s seconds=%.3f: %s holds the event loop; %s",
                getattr(function, "__qualname__", function), held_s, declared, other,
            )  # fmt: skip

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self.concurrency))
        return self._slots[1]


@types.coroutine
def _stepwise(work: Coroutine[Any, Any, Any], note: Callable[[float], None]) -> Generator[Any, Any, Any]:
    """Run a coroutine, and tell for each of its steps from one suspension to the next how many seconds it took."""
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
    """Judging was stopped from outside: finished members wait for it, and spend nothing."""
    for state in members:
        if is_answered(state):
            leave_unjudged(state)


def fail_judging(members: Sequence[RolloutState], judged: Judged, max_tries: int) -> str:
    """Judging was given up: members that are not judged spend a try, and wait for the next. The error."""
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
    """What makes two calls the same: the function, and the answers that it judges."""
    states = argument if isinstance(argument, list) else [argument]
    return id(function), isinstance(argument, list), tuple(_answer(state) for state in states)


def _answer(state: RolloutState) -> Any:
    if state.rollout_id is None or state.response is None:
        return id(state)
    return state.task_name, state.rollout_id, state.segment, state.response


class _BadReward(InvalidInput):
    """What a function returned is no reward; the message says so by itself."""


def _text(error: Exception, prefix: str = "") -> str:
    return str(error) if isinstance(error, _BadReward) else f"{prefix}{type(error).__name__}: {error}"


def _give(members: Sequence[RolloutState], rewards: Sequence[dict[str, Any] | None]) -> None:
    for state, reward in zip(members, rewards, strict=True):
        state.reward = reward


def _reward_of(state: RolloutState, score: Any, function: Callable[..., Any]) -> dict[str, Any]:
    """The reward that a function gave a sample: what it returned, or None if it, or the agent loop, set `reward`."""
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
    """A reward as it is kept; None if it is none."""
    if isinstance(score, dict):
        return {name: _plain(value) for name, value in score.items()}
    number = _plain(score)
    return {"score": float(number)} if isinstance(number, (bool, int, float)) else None


def _plain(value: Any) -> Any:
    """A scalar of numpy or torch as a number of Python; anything else as it is."""
    if isinstance(value, np.generic) or (getattr(value, "shape", None) == () and hasattr(value, "item")):
        return value.item()
    return value


def _is_finite(score: Any) -> bool:
    return score is None or (isinstance(score, (bool, int, float)) and math.isfinite(score))


async def _all_ended(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of calls, or the exceptions that they raised; none is left behind by a cancel."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
        # A further cancel waits, too: a reward that still runs must not see its sample change hands.
        cancelled = await see_through(asyncio.gather(*tasks, return_exceptions=True))
        if cancelled is not None:
            raise cancelled
    return [_outcome(task) for task in tasks]


def _outcome(task: asyncio.Task[Any]) -> Any:
    if task.cancelled():
        return InvalidInput("it cancelled itself")
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error or task.result()
