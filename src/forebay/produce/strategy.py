"""How a batch is produced: how many groups are in flight, which ones, and when to stop.

Both strategies run the same loop. It keeps the groups that a target still needs in flight, draws groups that
have to be generated again before new prompts, and checks again whenever the buffer changes or a group ends; it never
polls. The number of available groups is read from the ledger, so that nothing has to be remembered between calls, and a
restart or a second producer changes nothing. `SyncProduceStrategy` starts the missing groups and leaves none running.
`AsyncProduceStrategy` runs ahead: it over-issues, and `pause` brings in the groups that are still in flight.
"""

from __future__ import annotations

import asyncio
import logging
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, TypedDict, Unpack

from msgspec.structs import replace

from forebay.agent_loop.base import AgentLoop
from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.explain import full_pools
from forebay.buffer.internal import internals
from forebay.core.aio import DATA, run_user_code
from forebay.core.capacity import check_ever_fits
from forebay.core.ledger import Clock, End, Place
from forebay.core.rollout import DRAWABLE, Status
from forebay.core.staleness import staleness
from forebay.core.validate import checked_integer, checked_task
from forebay.errors import EngineUnavailable, EpochMoved, InvalidConfig, InvalidInput, RewardUnavailable, WeightsTooOld
from forebay.produce.filters import Filter
from forebay.produce.inflight import Steps, Works
from forebay.produce.judge import GroupReward, Judge, SampleReward
from forebay.produce.pausing import ProducedTask
from forebay.produce.plan import (
    Among,
    Budgets,
    Demand,
    Need,
    Plan,
    StrategySettings,
    Timeouts,
    make_plan,
    to_run,
    to_start,
    waiting_again,
)
from forebay.produce.stats import Figures, Production, Progress, default_progress
from forebay.prompts.check import check_sampler
from forebay.prompts.sampler import Sampler, SamplerWithReplayBuffer
from forebay.storage.base import TaskSummary

log = logging.getLogger(__name__)


class ProduceStrategy:
    """The base of both strategies. Not made directly."""

    leaves_work_running: ClassVar[bool] = False

    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        *,
        over_sample_threshold: float = 0.0,
        enable_partial_rollout: bool = False,
        max_staleness: int = 0,
        max_token_staleness: int | None = None,
        sync_weights_interval: int = 1,
        tail_batch_trigger_size: int = 0,
        tail_after: int = 3,
        max_tries: int = 3,
        reward_fn: SampleReward | None = None,
        group_reward_fn: GroupReward | None = None,
        reward_concurrency: int = 64,
        is_valid_sample_fn: Filter | Sequence[Filter] | None = None,
        should_continue_fn: Callable[[int, int], bool] | None = None,
        timeouts: Timeouts | None = None,
        budgets: Budgets | None = None,
        progress: Progress | None = None,
    ) -> None:
        if not isinstance(replay_buffer, ReplayBuffer):
            raise InvalidConfig(f"replay_buffer is {replay_buffer!r:.80}; expected a ReplayBuffer")
        if should_continue_fn is not None and not callable(should_continue_fn):
            raise InvalidConfig(f"should_continue_fn is {should_continue_fn!r:.80}; expected a function of (A, T)")
        self.replay_buffer = replay_buffer
        self._internals = internals(replay_buffer)
        self.settings = StrategySettings(
            over_sample_threshold=over_sample_threshold,
            enable_partial_rollout=enable_partial_rollout,
            max_staleness=max_staleness,
            max_token_staleness=max_token_staleness,
            tail_batch_trigger_size=tail_batch_trigger_size,
            tail_after=tail_after,
            max_tries=max_tries,
            timeouts=Timeouts() if timeouts is None else timeouts,
            budgets=Budgets() if budgets is None else budgets,
        )
        self.sync_weights_interval = sync_weights_interval
        self.limits = self.settings.limits(sync_weights_interval)
        self.should_continue_fn = operator.lt if should_continue_fn is None else should_continue_fn
        self.progress = default_progress() if progress is None else progress
        filters = () if is_valid_sample_fn is None else is_valid_sample_fn
        self.judge = Judge(
            reward_fn=reward_fn,
            group_reward_fn=group_reward_fn,
            filters=(filters,) if callable(filters) else tuple(filters),
            concurrency=reward_concurrency,
        )
        self._tasks: dict[str, ProducedTask] = {}

    @property
    def stale_threshold(self) -> int:
        """The staleness, in train steps, at which a group is too old."""
        assert self.limits.stale_threshold is not None
        return self.limits.stale_threshold

    @property
    def reach(self) -> int:
        """The number of train steps after the step of its weights for which a result can be trained on."""
        token = self.limits.token_stale_threshold
        return self.stale_threshold if token is None else min(self.stale_threshold, token)

    def refuse_too_old(self, agent_loop: AgentLoop, model_step: int, train_step: int, task_name: str) -> None:
        """WeightsTooOld if results of these weights are too old for a train step when they arrive."""
        if self.is_too_old(agent_loop, model_step, train_step):
            reason = f"the stale threshold of task {task_name!r} is {self.reach}"
            raise WeightsTooOld(train_step, model_step, reason)

    def is_too_old(self, agent_loop: AgentLoop, model_step: int, train_step: int) -> bool:
        """Whether results of these weights are too old for a train step when they arrive."""
        ahead = getattr(agent_loop, "takes_weights_while_running", False)  # it knows better which weights it has
        return staleness(model_step, train_step) >= self.reach and not ahead

    # --- producing ------------------------------------------------------------------------------------

    async def produce_batch(
        self,
        agent_loop: AgentLoop,
        sampler: Sampler | SamplerWithReplayBuffer,
        batch_size: int,
        task_name: str,
        *,
        train_step: int,
        model_step: int,
        target: int | None = None,
    ) -> Production:
        """Fill the buffer until it has a batch of COMPLETED groups for `train_step`.

        `target`: the total number of groups of the task that must be available or trained. By default one batch more
        than are leased or trained, at any moment: a lease that is returned meanwhile counts as available. An exception
        or a cancel brings everything in flight back into the buffer first.
        """
        checked_integer("train_step", train_step, least=1)
        checked_integer("model_step", model_step, least=0)
        self.refuse_too_old(agent_loop, model_step, train_step, task_name)
        steps = Steps(train_step, model_step)
        return await self.produce(Demand(agent_loop, sampler, batch_size, task_name, steps, target))

    async def produce(self, demand: Demand) -> Production:
        """As `produce_batch`, for managers."""
        agent_loop, sampler, batch_size, task_name = demand[:4]
        if not isinstance(agent_loop, AgentLoop):
            raise InvalidInput(f"agent_loop is {agent_loop!r:.80}; expected an AgentLoop")
        checked_task(task_name)
        checked_integer("batch_size", batch_size, least=0)
        check_ever_fits(self._internals.session.settings, batch_size)
        task = self._task(task_name)
        if task.producing:
            raise InvalidInput(f"task {task_name!r} is already being produced; one call at a time")
        self._bind(task, sampler)
        task.producing = True
        try:
            while task.pausing:
                await asyncio.wait(tuple(task.pausing))
            task.works.batch_size = max(1, batch_size)
            limit = self.replay_buffer.max_groups
            if demand.spare is None and limit is not None:
                demand = demand._replace(spare=limit - batch_size - self.settings.over_issue(batch_size))
            return await self._produce(task, demand)
        except BaseException as error:
            await task.stop()
            task.works.broken = None  # of the groups that were stopped: the first error is the one to raise
            if isinstance(error, RewardUnavailable):
                task.works.judging.forget_outage()
            if isinstance(error, EngineUnavailable):
                task.told.clear()  # producing again says that the weights were pushed again
            raise
        finally:
            task.producing = False

    async def _produce(self, task: ProducedTask, demand: Demand) -> Production:
        loop = asyncio.get_running_loop()
        agent_loop, steps, stopped = demand.agent_loop, demand.steps, demand.stopped
        began, works, task_name = loop.time(), task.works, task.works.task_name
        pauses = works.pause.count
        await works.bring_back()
        summary = await self._set_clock(task, steps.train_step if demand.among.sets_clock() else None)
        if task.told.get(agent_loop) != steps.model_step and not agent_loop.takes_weights_while_running:
            await agent_loop.weights_loaded(steps.model_step)
            task.told[agent_loop] = steps.model_step
            if isinstance(works.broken, EngineUnavailable):
                works.broken = None  # of the weights before
        if works.pause.count == pauses and not stopped() and (agent_loop.paused or task.paused):
            await task.resume(agent_loop)
        if works.pause.count == pauses and not stopped():  # else a pause began meanwhile, and this call ends at once
            works.pause.on = False
        plan = await self._plan(task, demand.batch_size, summary)
        agent_loop.outage.on_change = self._internals.nudge
        started = 0

        async def step() -> Production | None:
            nonlocal started
            while True:
                works.check()
                await (
                    works.bring_back()
                )  # a pause may have failed to: they count as in flight, and nobody generates them
                skip = works.exhausted and self.settings.budgets.when_exhausted == "skip"
                summary = await self._summary(task, demand.among)
                # Computed each time: leased groups may return to the buffer before the batch is complete.
                goal = summary.taken + demand.batch_size if demand.target is None else demand.target
                available = summary.produced
                enough = not self.should_continue_fn(available, goal)
                self.progress.update(task_name, available, goal, works.in_flight, works.figures)
                stops = works.pause.on or agent_loop.paused or stopped()  # another task may have paused
                production = Production(
                    task_name=task_name,
                    complete=enough,
                    exhausted=skip and not enough,
                    rejections=works.rejections_in_a_row,
                    target=goal,
                    available=available,
                    left=available - summary.line()["trained"],
                    started=started,
                    tail=plan.tail,
                    seconds=loop.time() - began,
                )
                if enough or skip or stops or demand.among.leaves_to_others(agent_loop.outage):
                    return production
                if not demand.among.follows(summary.account.epoch):
                    return None
                wanted = to_run(
                    target=goal, available=available, budget=plan.budget, accepted=works.accepted, spare=demand.spare
                )
                need = to_start(summary, wanted, works.in_flight, works.relied_on, demand.among.share(wanted))
                if need.missing <= 0:
                    if not agent_loop.outage.take_probe():
                        return None
                    need = need.at_least_one(summary)
                try:
                    begun = await self._start_again(task, demand, need, plan.statuses, summary)
                    begun = begun or await self._start(task, demand, need, ())
                    if not begun and not len(works):
                        # Groups that wait for a tail must not keep the buffer full forever.
                        begun = await self._start_again(task, demand, need, DRAWABLE, summary)
                except EpochMoved:
                    return None  # a pause begins: wait for it
                if not begun:  # at the end of the data, or the buffer is full: wait for a change
                    return replace(production, ended=True) if await self._is_at_end(task, summary) else None
                started += begun

        what = f"{demand.target} groups completed, leased or trained"
        what = f"{demand.batch_size} completed groups in the buffer" if demand.target is None else what
        woken_by = (task_name,) if demand.among.lead is None else (task_name, demand.among.lead)
        what = f"task {task_name!r} to have {what}"
        production = await self._internals.until(step, what, woken_by, calm_s=demand.among.calm_s)
        if production.exhausted:
            works.rejections_in_a_row = 0  # the next call tries again
        if not self.leaves_work_running or production.exhausted:
            if works.pause.on:
                await works.wait(self.settings.timeouts.pause_timeout_s)  # the pause brings them in
            await task.stop()
        log.info(
            "batch_produced task=%s complete=%s available=%d target=%d started=%d seconds=%.3f",
            task_name, production.complete, production.available, production.target, started, production.seconds,
        )  # fmt: skip
        return production

    async def _set_clock(self, task: ProducedTask, train_step: int | None) -> TaskSummary:
        """Set the limits of a task in the storage, advance its clock, and expire groups that are too old by them."""
        name, limits = task.works.task_name, self.limits
        await self._internals.advance({name: Clock(train_step=train_step, limits=limits)})
        summary = await self._summary(task)
        left = not limits.retryable and summary.statuses.get(Status.EXPIRED, 0)
        if summary.due:
            await self._internals.expiry.expire((name,))
        if left:
            await self._internals.expiry.drop_expired(name)  # from a time when they could be retried
        return await self._summary(task) if summary.due or left else summary

    async def _summary(self, task: ProducedTask, among: Among | None = None) -> TaskSummary:
        """The counts of a task; its figures get what other producers did, and the number of discarded groups."""
        name = task.works.task_name
        lead = name if among is None else among.lead or name
        summary = (await self._internals.summary(dict.fromkeys((name, lead)))).task(name)
        task.works.hear(summary.account)
        discarded = summary.account.ended.get(End.DISCARDED, 0)
        if task.discarded is None:
            task.discarded = discarded
        task.works.figures.discarded = discarded - task.discarded
        return summary

    async def _start_again(
        self, task: ProducedTask, demand: Demand, need: Need, again: Sequence[Status], summary: TaskSummary
    ) -> int:
        """Start groups of these statuses, stragglers first, if the buffer has any; how many."""
        statuses = DRAWABLE if self._first(task.works) else again
        if not summary.due and not any(summary.statuses.get(status, 0) for status in statuses):
            return 0
        return await self._start(task, demand, need, again)

    async def _start(self, task: ProducedTask, demand: Demand, need: Need, again: Sequence[Status]) -> int:
        """Draw groups, of these statuses or new ones, and start them; how many. Pauses wait for it."""
        if task.works.pause.on:
            return 0
        task.drawing = asyncio.ensure_future(self._draw(task, demand, need, again))
        task.drawing_since = asyncio.get_running_loop().time()
        try:
            drawing, _, cancelled = await run_user_code(task.drawing)
        finally:
            task.drawing = task.drawing_since = None
        if cancelled is not None:
            raise cancelled
        return 0 if drawing.cancelled() else drawing.result()  # a pause, or the end, does not wait for a data set

    async def _draw(self, task: ProducedTask, demand: Demand, need: Need, again: Sequence[Status]) -> int:
        assert task.sampler is not None
        works, (_, sampler), (missing, share) = task.works, task.sampler, need
        name, first = works.task_name, self._first(works)
        if again:
            groups = await sampler.draw_again(missing, name, again, own=False, first=first, share=share)
        else:
            groups = await sampler.try_draw(missing, name, (), own=False, share=share)
        if works.pause.on:
            await works.give_back(groups)
            return 0
        task.used[demand.agent_loop] = None
        for group in groups:
            works.start(group, demand.agent_loop, demand.steps)
        return len(groups)

    async def _is_at_end(self, task: ProducedTask, summary: TaskSummary) -> bool:
        """Whether nothing is in flight, nothing waits to be generated again, and the data set has no more prompts."""
        assert task.sampler is not None
        if summary.unfinished or not await task.sampler[1].exhausted(task.works.task_name):
            return False
        now = await self._summary(task)  # another producer may have drawn the last prompt in between
        return not now.unfinished and now.produced == summary.produced

    def _first(self, works: Works) -> Collection[int]:
        """Ids of stragglers that are drawn before all other groups."""
        return works.waiting_stragglers if self.limits.retryable else ()

    async def _plan(self, task: ProducedTask, batch_size: int, summary: TaskSummary) -> Plan:
        works, counts, settings = task.works, summary.statuses, self.settings
        aborted, unjudged = counts.get(Status.ABORTED, 0), 0
        if aborted:  # groups that have nothing left to generate are only judged when they are drawn again
            query = {"task_name": works.task_name, "place": Place.BUFFERED, "status": Status.ABORTED, "unjudged": 1}
            unjudged = len(await self.replay_buffer.query(query))
        await self._look_for_stragglers(task, waiting=any(counts.get(status, 0) for status in DRAWABLE))
        partial = settings.enable_partial_rollout
        return make_plan(
            trigger=settings.tail_batch_trigger_size,
            waiting=waiting_again(counts.get(Status.EXPIRED, 0), aborted - unjudged, partial=partial),
            partial=partial or bool(unjudged),
            budget=settings.over_issue(batch_size),
        )

    async def _look_for_stragglers(self, task: ProducedTask, *, waiting: bool) -> None:
        """Find stragglers of an earlier run, once; forget those that left the buffer otherwise."""
        works = task.works
        query: dict[str, Any] = {"task_name": works.task_name, "place": {"$in": [Place.BUFFERED, Place.IN_FLIGHT]}}
        if not task.recalled:
            if waiting:
                found = await self.replay_buffer.query(query | {"status": {"$in": list(DRAWABLE)}})
                works.stragglers |= {record.group_id for record in found if record.attempt >= self.settings.tail_after}
            task.recalled = True
        elif works.stragglers:
            some = sorted(works.stragglers)[:1000]
            there = await self.replay_buffer.query(query | {"group_id": {"$in": some}})
            works.stragglers -= {*some} - {record.group_id for record in there if record.status in DRAWABLE}

    # --- pausing --------------------------------------------------------------------------------------

    async def pause(self, task_name: str | None = None) -> float:
        """Ask the agent loops to stop, bring all groups in, and wait for idle engines; the seconds that this took.

        A barrier: nothing is in flight afterwards, and the engines have stopped our requests, so that new weights meet
        none of them. Completed groups count; stopped ones keep their tokens if partial rollout is on. Groups that do
        not end in time are cancelled, spend a try, and return with the tokens that they have. EngineError if an engine
        does not become idle: it is not safe to load weights then; pause again. `produce_batch` resumes.
        """
        tasks = [task for name, task in self._tasks.items() if task_name in (None, name)]
        began = asyncio.get_running_loop().time()
        ended = await asyncio.gather(*[task.pause() for task in tasks], return_exceptions=True)
        for problem in ended:
            if isinstance(problem, BaseException):
                raise problem  # now that all of them have ended: none overlaps the next pause
        return asyncio.get_running_loop().time() - began

    async def close(self) -> None:
        """Cancel all groups in flight; they are back in the buffer when this returns. Ends a `produce_batch`, too."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.works.begin_pause()
        for task in tasks:
            await task.stop()

    # --- reporting ------------------------------------------------------------------------------------

    def in_flight(self, task_name: str) -> int:
        """The number of groups in flight."""
        return self._task(task_name).works.in_flight

    def last_error(self, task_name: str) -> str | None:
        """The error of the last attempt that failed or was filtered."""
        return self._task(task_name).works.last_error

    def explain(self, task_name: str) -> list[str]:
        """The stages of the groups in flight, and what they wait for, as lines for people."""
        return self._task(task_name).explain() + [f"  {line}" for line in full_pools((DATA, self.judge.pool))]

    def figures(self, task_name: str) -> Figures:
        """Counts since this strategy was made; reading them resets nothing."""
        return self._task(task_name).works.figures

    def stats(self) -> dict[str, float]:
        """Flat figures for any logger, as `forebay/<task>/produce/...`."""
        return {name: value for task in self._tasks.values() for name, value in task.stats().items()}

    def _task(self, task_name: str) -> ProducedTask:
        task = self._tasks.get(task_name)
        if task is None:
            works = Works(checked_task(task_name), self.replay_buffer, self.judge, self.settings)
            task = self._tasks[task_name] = ProducedTask(works, self.settings.timeouts)
        return task

    def _bind(self, task: ProducedTask, sampler: Sampler | SamplerWithReplayBuffer) -> None:
        if task.sampler is not None and task.sampler[0] is sampler:
            return
        check_sampler(sampler)
        bound = sampler.with_buffer(self.replay_buffer) if isinstance(sampler, Sampler) else sampler
        if not isinstance(bound, SamplerWithReplayBuffer):
            raise InvalidInput(f"sampler is {sampler!r:.80}; expected a Sampler or a SamplerWithReplayBuffer")
        if bound.replay_buffer is not self.replay_buffer:
            raise InvalidConfig("the sampler draws through another buffer than this strategy's; expected the same")
        task.sampler = (sampler, bound)


class _SyncArguments(TypedDict, total=False):
    sync_weights_interval: int
    max_tries: int
    reward_fn: SampleReward | None
    group_reward_fn: GroupReward | None
    reward_concurrency: int
    is_valid_sample_fn: Filter | Sequence[Filter] | None
    should_continue_fn: Callable[[int, int], bool] | None
    timeouts: Timeouts | None
    budgets: Budgets | None
    progress: Progress | None


SYNC_ARGUMENTS = _SyncArguments.__optional_keys__
"""The arguments of `SyncProduceStrategy`: those of `AsyncProduceStrategy`, without the settings of running ahead."""


class SyncProduceStrategy(ProduceStrategy):
    """Starts the missing groups, replaces groups that are filtered or fail, and leaves nothing running."""

    def __init__(self, replay_buffer: ReplayBuffer, **arguments: Unpack[_SyncArguments]) -> None:
        if unknown := arguments.keys() - SYNC_ARGUMENTS:
            raise TypeError(
                f"SyncProduceStrategy takes no {', '.join(sorted(unknown))}; expected some of "
                f"{', '.join(sorted(SYNC_ARGUMENTS))}"
            )
        super().__init__(replay_buffer, **arguments)


class AsyncProduceStrategy(ProduceStrategy):
    """Runs ahead: over-issues, continues interrupted groups, keeps stragglers from starving.

    `over_sample_threshold`: how many groups beyond the target to run, as a share of the batch. `max_staleness` and
    `max_token_staleness` count weight updates. `tail_batch_trigger_size`: -1 drops expired groups, 0 generates them
    again at once, N waits for N of them and then runs them first, without over-issue; a group that was returned
    `tail_after` times is drawn first at any setting from 0 on.
    """

    leaves_work_running = True
