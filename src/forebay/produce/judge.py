"""`Judge`: rewards results, then filters them. `Judging`: has the groups of a task judged, through outages and pauses.

Rewards are computed per sample or per group; rewards and filters may be async. Plain functions run in dedicated
threads, so that a slow one does not block the event loop, unless `on_loop` declares them cheap. A sample is rewarded
once: members kept from an earlier attempt keep their reward. A group reward is computed again for every attempt, when
the group is complete. Filters see complete groups only. `judge` sets no status but FILTERED and does not retry: a
function that raises may depend on an unreachable service, so `Judging` repeats the call until it gives up.
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

from forebay.core.aio import RESOLUTION_S, Pool, run_user_code, start_thread
from forebay.core.rollout import RolloutState, Status, group_reward
from forebay.core.validate import checked_integer
from forebay.errors import InvalidConfig, InvalidInput, RewardUnavailable
from forebay.produce.filters import Filter, is_cheap
from forebay.produce.members import fail_judging, set_aside
from forebay.produce.plan import StrategySettings, Suspects, backoff_s
from forebay.produce.stats import Stage
from forebay.prompts.sources import independent

log = logging.getLogger(__name__)

Score: TypeAlias = "float | dict[str, Any] | None"
SampleReward: TypeAlias = Callable[[RolloutState], "Score | Awaitable[Score]"]
GroupReward: TypeAlias = Callable[[list[RolloutState]], "Sequence[Score] | Awaitable[Sequence[Score]] | None"]

Judgement: TypeAlias = "tuple[Judged, str | None, asyncio.CancelledError | None]"

_LONG_CALL_S = 0.05
_MAX_ASIDE = 3  # how often pauses may interrupt the judging of a group before it is a suspect


class Judged(NamedTuple):
    """The result of judging. `error`: the exception, or the problem with a score or verdict.

    `transient`: it may be an outage, so judging can be repeated. `rewarded`: the rewards were given, and a later step
    failed. `rejected`: the reason of a filter. `hung`: it did not end in time. `outage`: judging fails for all groups,
    so that producing has to end.
    """

    error: str | None = None
    transient: bool = False
    rewarded: bool = False
    rejected: str | None = None
    hung: bool = False
    outage: RewardUnavailable | None = None


class Pause:
    """Whether a task is to stop. A pause ends waits, shortens judging, and keeps new groups from being started."""

    def __init__(self) -> None:
        self.on = False
        self.count = 0  # pauses so far
        self.overdue: str | None = None  # the limit of a pause, which cancels the attempts that did not end within it
        self._waiters: set[asyncio.Future[None]] = set()

    def begin(self) -> None:
        self.on = True
        self.count += 1
        for waiter in self._waiters:
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)

    async def wait(self, timeout_s: float, *others: asyncio.Future[Any]) -> None:
        """Until a pause begins, one of the others is done, or for `timeout_s`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        if self.on:
            waiter.set_result(None)
        try:
            await asyncio.wait((waiter, *others), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiters.discard(waiter)
            waiter.cancel()


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
            return Judged(_describe(error, "the reward raised "), transient=not isinstance(error, InvalidInput))
        if not all(state.status is Status.COMPLETED for state in members):
            return Judged()
        try:
            if self.group_reward_fn is not None:
                await self._reward_group(self.group_reward_fn, members)
            rejected = await self._rejected(members)
        except Exception as raised:
            return Judged(_describe(raised), transient=not isinstance(raised, InvalidInput), rewarded=True)
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


class Judging:
    """Has the groups of one task judged.

    While rewards or filters raise they are called again, with growing delays, and nothing is spent before
    `judge_give_up_s`. If they fail for all groups, producing ends then, and nothing is spent. A pause shortens the
    time; a group that it stops is judged on its retry.
    """

    def __init__(
        self,
        task_name: str,
        judge: Judge,
        settings: StrategySettings,
        pause: Pause,
        suspects: Suspects,
        keep_rejected: Callable[[], bool],
        stages: Callable[[], Sequence[Stage]],
    ) -> None:
        self.judge = judge
        self._task_name = task_name
        self._timeouts = settings.timeouts
        self._max_tries = settings.max_tries
        self._pause = pause
        self._suspects = suspects
        self._keep_rejected = keep_rejected
        self._stages = stages
        self._failing_since: float | None = None  # since when rewards or filters raise
        self._failed: set[int] = set()  # groups for which they have raised since then
        self._worked_at = 0.0  # when judging worked last
        self.aside: dict[int, tuple[float, int]] = {}  # how long groups were judged, and how often set aside

    async def run(self, members: list[RolloutState], stage: Stage) -> Judgement:
        """Reward and filter a group; the result, the error if it cost a try, and a cancel meanwhile."""
        clock, group_id = asyncio.get_running_loop().time, stage.group_id
        began, times, failing_since = clock(), 0, None
        # Over all attempts: a pause must not restart the clock of a reward that hangs.
        before_s, aside = self.aside.pop(group_id, (0.0, 0))
        deadline = began + self._timeouts.judge_give_up_s - before_s
        while True:
            judged, cancelled = await self._call(members, group_id, max(0.0, deadline - clock()))
            if judged is None:
                set_aside(members)
                self.aside[group_id] = before_s + clock() - began, aside + 1
                if cancelled is None and aside + 1 >= _MAX_ASIDE:
                    self._suspects.cut_short(group_id, clock())  # later pauses do not wait for it
                return Judged(), None, cancelled
            self._note_outage(stage, judged)
            if judged.error is None:
                return judged, None, cancelled
            times += 1
            delay_s = backoff_s(times)
            failing_since = clock() if failing_since is None else failing_since
            away_since = self._away_since(group_id, judged, began if judged.hung else failing_since)
            if away_since is not None and judged.transient:
                deadline = max(deadline, away_since + self._timeouts.judge_give_up_s)
            if not judged.transient or clock() + delay_s >= deadline - RESOLUTION_S:
                if away_since is not None:
                    set_aside(members)
                    return Judged(outage=self._outage(clock() - away_since, judged)), None, cancelled
                return judged, fail_judging(members, judged.error, self._max_tries, rewarded=judged.rewarded), cancelled
            stage.note = f"repeated after {judged.error}"
            try:
                await self._pause.wait(delay_s)
            except asyncio.CancelledError as stopped:
                cancelled = stopped
            if cancelled is not None or self._pause.on:
                set_aside(members)
                self.aside[group_id] = before_s + clock() - began, aside
                return Judged(), None, cancelled

    async def _call(
        self, members: list[RolloutState], group_id: int, left_s: float
    ) -> tuple[Judged | None, asyncio.CancelledError | None]:
        """One call of the judge, and a cancel meanwhile; None if a pause or a cancel stopped it."""
        hurried = False

        async def until(judging: asyncio.Future[Any]) -> None:
            nonlocal hurried
            await self._pause.wait(left_s, judging)
            hurried = self._pause.on
            if not judging.done() and hurried and group_id not in self._suspects:
                await asyncio.wait((judging,), timeout=self._timeouts.judge_timeout_s)

        # With a separate list: a call that is left behind must not change the list that we keep.
        judging = self.judge.judge(list(members), keep_rejected=self._keep_rejected())
        call = await run_user_code(judging, until=until, cancel_timeout_s=self._timeouts.cancel_timeout_s)
        if call.future.done() and not call.future.cancelled():
            return call.future.result(), call.cancelled
        members[:] = [independent(state.__copy__()) for state in members]  # a thread may still change the others
        if call.cancelled is not None or (hurried and not call.in_time):
            return None, call.cancelled
        if call.in_time:
            return Judged("judging cancelled itself", rewarded=self.judge.reward_fn is None), None
        self._suspects.cut_short(group_id, asyncio.get_running_loop().time())  # no batch waits for its next attempt
        error = f"not judged within {self._timeouts.judge_give_up_s:g} s"
        return Judged(error, rewarded=self.judge.reward_fn is None, hung=True), None

    def _note_outage(self, stage: Stage, judged: Judged) -> None:
        """Log once when judging begins to fail, and once when it works again."""
        now = asyncio.get_running_loop().time()
        if judged.error is None:
            if self._failing_since is not None:
                log.warning("judging_works_again task=%s seconds=%.1f", self._task_name, now - self._failing_since)
            self._failing_since = None
            self._failed.clear()
            self._worked_at = now
        elif judged.transient or judged.hung:
            self._failed.add(stage.group_id)
            if self._failing_since is None:
                self._failing_since = max(stage.since, self._worked_at) if judged.hung else now
                log.warning(
                    "judging_failed task=%s group=%d error=%s: repeated, and nothing is spent, for judge_give_up_s=%g",
                    self._task_name, stage.group_id, judged.error, self._timeouts.judge_give_up_s,
                )  # fmt: skip

    def _away_since(self, group_id: int, judged: Judged, since: float) -> float | None:
        """The time since when judging has failed for several groups and worked for none; None if it has not."""
        failed = self._failing_since
        if not (judged.transient or judged.hung) or failed is None or failed > since + RESOLUTION_S:
            return None
        others = set(self._failed)
        if judged.hung:  # the others have not timed out yet
            began = asyncio.get_running_loop().time() - self._timeouts.judge_give_up_s / 2
            others |= {stage.group_id for stage in self._stages() if stage.name == "judging" and stage.since <= began}
        return failed if others - {group_id} else None

    def _outage(self, seconds: float, judged: Judged) -> RewardUnavailable:
        return RewardUnavailable(
            f"judging groups of task {self._task_name!r} has failed for {seconds:.0f} s, and worked for none of them "
            f"(judge_give_up_s={self._timeouts.judge_give_up_s:g}); the last error: {judged.error}. No try was spent, "
            "and the responses are kept; produce again when the reward or filter works"
        )

    def forget_outage(self) -> None:
        """Producing ended because of an outage of the reward: the next call gives the reward its full time again.

        No batch relies on groups for which it failed: if they are the cause, other prompts replace them.
        """
        for group_id in self._failed:
            self._suspects.cut_short(group_id, asyncio.get_running_loop().time())
        self._failed.clear()
        self._failing_since = None
        self.aside.clear()


def _key(function: Callable[[Any], Any], argument: Any) -> Any:
    """Identifies a call: the function, and the answers that it judges."""
    states = argument if isinstance(argument, list) else [argument]
    answers = [
        (state.task_name, state.rollout_id, state.segment, state.response)
        if state.rollout_id is not None and state.response is not None
        else id(state)
        for state in states
    ]
    return id(function), isinstance(argument, list), tuple(answers)


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
