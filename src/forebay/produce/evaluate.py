"""Evaluation: every record of a data set once, with failures reported as failures.

In a training batch another prompt replaces a group that fails. In an evaluation the score would then be over different
questions each time. `evaluate` therefore draws exactly one epoch, into a buffer that exists for this call only, and
returns one group for each record, in the order of the data set. A group that could not be generated or judged is FAILED
and has its error. Evaluation groups never mix with training groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from forebay.agent_loop.base import AgentLoop
from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.internal import internals
from forebay.core.rollout import RolloutState, Status
from forebay.core.validate import checked_integer
from forebay.errors import InvalidDataset, InvalidInput
from forebay.produce.inflight import Steps, Works
from forebay.produce.judge import GroupReward, Judge, SampleReward
from forebay.produce.plan import StrategySettings, Timeouts
from forebay.produce.stats import Outcome, Progress, default_progress
from forebay.prompts.sampler import Sampler
from forebay.prompts.sources import MapSource


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One group for each record, in the order of the data set; a group that failed is FAILED and has `error_msg`."""

    model_step: int
    groups: list[list[RolloutState]]
    seconds: float

    @property
    def failed(self) -> dict[int, str]:
        """The error of each record that failed, by its index in the data set."""
        return {
            index: next((state.error_msg for state in group if state.error_msg), "failed")
            for index, group in enumerate(self.groups)
            if any(state.status is Status.FAILED for state in group)
        }

    def reward_mean(self, *, failed: float | None = None) -> float | None:
        """The mean score over all samples. `failed`: the score of samples that failed; None leaves them out."""
        scores = []
        for state in (state for group in self.groups for state in group):
            score = None if state.reward is None else state.reward.get("score")
            if state.status is not Status.COMPLETED or score is None:
                score = failed
            if score is not None:
                scores.append(float(score))
        return sum(scores) / len(scores) if scores else None


async def evaluate(
    agent_loop: AgentLoop,
    sampler: Sampler,
    *,
    model_step: int,
    name: str = "evaluation",
    reward_fn: SampleReward | None = None,
    group_reward_fn: GroupReward | None = None,
    reward_concurrency: int = 64,
    max_tries: int = 3,
    max_in_flight: int | None = None,
    timeouts: Timeouts | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Generate and judge every record of a sampler's data set once, with the weights of `model_step`.

    Use it while training is paused, or with a separate agent loop. A paused loop is resumed for the evaluation.
    `max_in_flight`: the maximum number of concurrent groups; by default all of them.
    """
    if not isinstance(agent_loop, AgentLoop):
        raise InvalidInput(f"agent_loop is {agent_loop!r:.80}; expected an AgentLoop")
    if not isinstance(sampler, Sampler):
        raise InvalidInput(f"sampler is {sampler!r:.80}; expected a Sampler")
    source = sampler.streams[name].source
    if not isinstance(source, MapSource):
        raise InvalidDataset("an iterable loader cannot be evaluated: its records are not fixed; expected a data set")
    checked_integer("model_step", model_step, least=0)
    records, clock = len(source), asyncio.get_running_loop().time
    most = records if max_in_flight is None else checked_integer("max_in_flight", max_in_flight, least=1)
    progress = default_progress() if progress is None else progress
    buffer = ReplayBuffer()
    drawing = sampler.over(source.once(), epochs=1).with_buffer(buffer)
    judge = Judge(reward_fn=reward_fn, group_reward_fn=group_reward_fn, concurrency=reward_concurrency)
    timeouts = Timeouts() if timeouts is None else timeouts
    works = Works(name, buffer, judge, StrategySettings(max_tries=max_tries, timeouts=timeouts, tail_after=2**62))
    started: set[int] = set()
    ended: dict[int, list[RolloutState]] = {}
    steps = Steps(model_step + 1, model_step)

    def note(outcome: Outcome, stored: Sequence[RolloutState]) -> None:
        if outcome.status in (Status.COMPLETED, Status.FAILED, Status.FILTERED):
            ended[outcome.group_id] = list(stored)

    async def step() -> int | None:
        broken, works.broken = works.broken, None
        if broken is not None:
            raise broken
        groups = await drawing.draw_again(records, name, own=False)
        drawn, _ = await internals(buffer).position(name)
        while drawn < records and (more := most - works.in_flight - len(groups)) > 0:
            groups += await drawing.try_draw(more, name, (), own=False)  # maybe none: bad records
            drawn, _ = await internals(buffer).position(name)
        for group in groups:
            started.add(group[0].group_id or 0)
            works.start(group, agent_loop, steps)
        progress.update(name, len(ended), records, works.in_flight, works.figures)
        return drawn if drawn >= records and len(ended) == len(started) else None

    works.on_end = note
    began, paused = clock(), agent_loop.paused
    try:
        if paused:
            await agent_loop.resume()
        if not agent_loop.takes_weights_while_running:
            await agent_loop.weights_loaded(model_step)
        await internals(buffer).until(step, f"{records} records of {name!r} to be answered", (name,))
    finally:
        try:
            await works.stop()
        finally:
            if paused:
                await agent_loop.pause()
            await buffer.close()
    groups = {source.index(group_id): group for group_id, group in ended.items()}
    for index in set(range(records)) - groups.keys():  # skipped by `skip_bad_records`
        failed = RolloutState(message=[], status=Status.FAILED, error_msg=f"record {index} makes no prompt")
        groups[index] = [failed]
    in_order = [groups[index] for index in range(records)]
    return Evaluation(model_step=model_step, groups=in_order, seconds=clock() - began)
