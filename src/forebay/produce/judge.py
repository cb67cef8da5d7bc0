"""The door for results: reward, then filter.

Rewards are of a sample, or of a whole group; both, and filters, may be async. A sample is rewarded once: members kept
from an earlier attempt keep theirs. A group's reward is computed when all of it is there, each time anew. Filters see
finished groups only. Whatever raises here costs a try and no work: the responses are kept, and judged again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from forebay.errors import InvalidConfig, InvalidInput
from forebay.produce.filters import Filter
from forebay.produce.members import is_answered, leave_unjudged
from forebay.rollout import RolloutState, Status, group_reward
from forebay.threads import see_through

__all__ = ["GroupReward", "Judge", "SampleReward", "fail_judging", "set_aside"]

Score: TypeAlias = "float | dict[str, Any] | None"
SampleReward: TypeAlias = Callable[[RolloutState], "Score | Awaitable[Score]"]
GroupReward: TypeAlias = Callable[[list[RolloutState]], "Sequence[Score] | Awaitable[Sequence[Score]] | None"]


class Judge(msgspec.Struct, frozen=True, kw_only=True):
    """How results are judged. Nothing set: everything is kept, with the rewards that the agent loop gave."""

    reward_fn: SampleReward | None = None
    group_reward_fn: GroupReward | None = None
    filters: tuple[Filter, ...] = ()

    def __post_init__(self) -> None:
        if self.reward_fn is not None and self.group_reward_fn is not None:
            raise InvalidConfig("reward_fn and group_reward_fn are both given; expected one of them")
        for function in (self.reward_fn, self.group_reward_fn, *self.filters):
            if function is not None and not callable(function):
                raise InvalidConfig(f"{function!r:.80} is no function; expected one that judges samples or groups")

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.reward_fn is None and self.group_reward_fn is None and not self.filters

    async def judge(self, members: list[RolloutState], max_tries: int) -> str | None:
        """Reward the finished members; filter the group if it is whole. The error, if a function of the user's raised.

        Those that could not be judged wait for their retry with a try spent, or are FAILED if it was their last.
        """
        error = await self._reward(members, max_tries)
        if error is None and all(state.status is Status.COMPLETED for state in members):
            try:
                if self.group_reward_fn is not None:
                    await self._reward_group(self.group_reward_fn, members)
                await self._filter(members)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
                fail_judging(members, error, max_tries)
        return error

    async def _reward(self, members: Sequence[RolloutState], max_tries: int) -> str | None:
        if self.reward_fn is None:
            return None
        todo = [state for state in members if state.status is Status.COMPLETED and state.reward is None]
        results = [_called(self.reward_fn, state) for state in todo]
        if any(inspect.isawaitable(result) for result in results):
            results = await _awaited(results)
        error = None
        for state, result in zip(todo, results, strict=True):
            try:
                if isinstance(result, Exception):
                    raise result
                state.reward = _as_reward(result)
                group_reward((state,))
            except Exception as raised:
                state.reward = None
                error = f"the reward raised {type(raised).__name__}: {raised}"
                _spend(state, error, max_tries)
        return error

    async def _reward_group(self, reward: GroupReward, members: list[RolloutState]) -> None:
        given = reward(list(members))  # a list of its own: the group is not to lose members here
        if inspect.isawaitable(given):
            given = await given
        if given is None:
            return
        if len(given) != len(members):
            raise InvalidInput(
                f"group_reward_fn gave {len(given)} rewards for {len(members)} members; expected as many"
            )
        rewards = [_as_reward(score) for score in given]
        before = [state.reward for state in members]
        _give(members, rewards)
        try:
            group_reward(members)  # refuses scores that are no numbers
        except Exception:
            _give(members, before)  # the responses are kept, and could not be stored with these
            raise

    async def _filter(self, members: list[RolloutState]) -> None:
        for accepts in self.filters:
            verdict = accepts(list(members))
            if inspect.isawaitable(verdict):
                verdict = await verdict
            if isinstance(verdict, np.bool_):
                verdict = bool(verdict)
            if verdict is True:
                continue
            if verdict is not False and not isinstance(verdict, str):
                raise InvalidInput(f"a filter answered {verdict!r:.80}; expected True, False or a reason")
            for state in members:
                state.status, state.error_msg = Status.FILTERED, verdict or "filtered"
            return


def set_aside(members: Sequence[RolloutState]) -> None:
    """Judging was stopped from outside: what is finished waits for it, and nothing is spent."""
    for state in members:
        if is_answered(state):
            leave_unjudged(state)


def fail_judging(members: Sequence[RolloutState], error: str, max_tries: int) -> str:
    """A group could not be judged: what is finished spends a try, and waits for the next."""
    for state in members:
        if is_answered(state):
            _spend(state, error, max_tries)
    return error


def _spend(state: RolloutState, error: str, max_tries: int) -> None:
    state.num_tries += 1
    leave_unjudged(state)
    state.error_msg = error
    if state.num_tries >= max_tries:
        state.status = Status.FAILED


def _give(members: Sequence[RolloutState], rewards: Sequence[dict[str, Any] | None]) -> None:
    for state, reward in zip(members, rewards, strict=True):
        state.reward = reward


def _as_reward(score: Any) -> dict[str, Any] | None:
    if score is None:
        return None
    if isinstance(score, dict):
        return {name: value.item() if isinstance(value, np.generic) else value for name, value in score.items()}
    if isinstance(score, (bool, int, float, np.number, np.bool_)):
        return {"score": float(score)}
    if isinstance(score, RolloutState):
        raise InvalidInput("a reward function returned a sample; return its score, or None if it set `reward` itself")
    raise InvalidInput(f"a reward is {score!r:.80}; expected a number, a dict with a 'score', or None")


def _called(function: SampleReward, state: RolloutState) -> Any:
    try:
        return function(state)
    except Exception as error:
        return error


async def _awaited(values: Sequence[Any]) -> list[Any]:
    """The values, those that can be awaited replaced by their result or exception; none is left behind by a cancel."""
    tasks = {i: asyncio.ensure_future(value) for i, value in enumerate(values) if inspect.isawaitable(value)}
    try:
        await asyncio.wait(tasks.values())
    finally:
        for task in tasks.values():
            task.cancel()
        # A further cancel waits, too: a reward that still runs must not see its sample change hands.
        cancelled = await see_through(asyncio.gather(*tasks.values(), return_exceptions=True))
        if cancelled is not None:
            raise cancelled
    results = list(values)
    for i, task in tasks.items():
        if task.cancelled():
            results[i] = InvalidInput("it cancelled itself")
        else:
            results[i] = task.exception() or task.result()
    return results
