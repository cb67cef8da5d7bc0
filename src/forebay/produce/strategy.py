"""How a batch is produced: how many groups are in flight, which ones, and when to stop.

Both strategies are one machine with two plans. It keeps as many groups in flight as are missing towards a target,
draws what has to be generated again before new prompts, and looks again whenever the buffer changes or a group ends; it
never polls. What is available is read from the ledger, so that nothing has to be remembered between calls, and a
restart or a second producer changes nothing. `SyncProduceStrategy` starts what is missing and leaves nothing running.
`AsyncProduceStrategy` runs ahead: it over-issues, and `pause` brings in what is still under way.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import msgspec

from forebay.agent_loop.base import AgentLoop
from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.explain import full_pools
from forebay.buffer.internal import internals
from forebay.core.aio import DATA, RESOLUTION_S, see_through
from forebay.core.ledger import Clock, End, Place
from forebay.core.rollout import DRAWABLE, Status
from forebay.core.staleness import Limits, stale_threshold, staleness
from forebay.core.validate import checked_integer, checked_task
from forebay.errors import (
    EngineError,
    EngineUnavailable,
    InvalidConfig,
    InvalidInput,
    RewardUnavailable,
    TooManyFailures,
    TooManyRejections,
)
from forebay.produce.filters import Filter
from forebay.produce.inflight import STAGES, Stage, Steps, Works, look_at
from forebay.produce.judge import GroupReward, Judge, SampleReward
from forebay.produce.plan import (
    Budgets,
    Plan,
    Timeouts,
    checked_budgets,
    checked_timeouts,
    make_plan,
    over_issue,
    to_start,
    waiting_again,
)
from forebay.produce.stats import Figures, Progress, default_progress
from forebay.prompts.sampler import Sampler, SamplerWithReplayBuffer, check_sampler
from forebay.storage.base import TaskSummary

__all__ = ["AsyncProduceStrategy", "ProduceStrategy", "Production", "SyncProduceStrategy", "too_many_rejections"]

log = logging.getLogger(__name__)


class Production(msgspec.Struct, frozen=True, kw_only=True):
    """How a call of `produce_batch` ended, in groups.

    `complete`: the target was reached; otherwise a pause came, or the task is `exhausted`.
    """

    task_name: str
    complete: bool
    exhausted: bool = False  # filters reject everything, and the task is to be skipped
    rejections: int = 0  # groups in a row that filters rejected last
    target: int
    available: int
    started: int
    tail: bool
    seconds: float


class _Task:
    """What a strategy knows of one task."""

    def __init__(self, works: Works) -> None:
        self.works = works
        self.drawing: asyncio.Future[int] | None = None
        self.drawing_since: float | None = None
        self.producing = False
        self.pausing: set[asyncio.Task[Any]] = set()
        self.paused: dict[AgentLoop, None] = {}  # for its order, as a set has none
        self.used: dict[AgentLoop, None] = {}  # since the last pause: their engines may still run requests of ours
        self.told: dict[AgentLoop, int] = {}  # the weights that a loop was last told of
        self.recalled = False  # whether what an earlier run left was looked at
        self.discarded: int | None = None  # groups of the ledger when this strategy first looked
        self.sampler: tuple[Sampler | SamplerWithReplayBuffer, SamplerWithReplayBuffer] | None = None


class ProduceStrategy:
    """The machine that both strategies are. Not made directly."""

    leaves_work_running: ClassVar[bool] = False

    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        *,
        over_sample_threshold: float,
        enable_partial_rollout: bool,
        max_staleness: int,
        max_token_staleness: int | None,
        sync_weights_interval: int,
        tail_batch_trigger_size: int,
        tail_after: int,
        max_tries: int,
        reward_fn: SampleReward | None,
        group_reward_fn: GroupReward | None,
        reward_concurrency: int,
        is_valid_sample_fn: Filter | Sequence[Filter] | None,
        should_continue_fn: Callable[[int, int], bool] | None,
        timeouts: Timeouts | None,
        budgets: Budgets | None,
        progress: Progress | None,
    ) -> None:
        if not isinstance(replay_buffer, ReplayBuffer):
            raise InvalidConfig(f"replay_buffer is {replay_buffer!r:.80}; expected a ReplayBuffer")
        if (
            isinstance(over_sample_threshold, bool)
            or not isinstance(over_sample_threshold, (int, float))
            or not 0 <= over_sample_threshold < math.inf
        ):
            raise InvalidConfig(f"over_sample_threshold is {over_sample_threshold!r}; expected a number from 0")
        self.replay_buffer = replay_buffer
        self._internals = internals(replay_buffer)
        self.over_sample_threshold = over_sample_threshold
        self.enable_partial_rollout = bool(enable_partial_rollout)
        self.sync_weights_interval = checked_integer("sync_weights_interval", sync_weights_interval, least=1)
        self.stale_threshold = stale_threshold(max_staleness, sync_weights_interval)
        self.token_stale_threshold = (
            None if max_token_staleness is None else stale_threshold(max_token_staleness, sync_weights_interval)
        )
        self.tail_batch_trigger_size = checked_integer("tail_batch_trigger_size", tail_batch_trigger_size, least=-1)
        self.tail_after = checked_integer("tail_after", tail_after, least=1)
        self.max_tries = checked_integer("max_tries", max_tries, least=1)
        if should_continue_fn is not None and not callable(should_continue_fn):
            raise InvalidConfig(f"should_continue_fn is {should_continue_fn!r:.80}; expected a function of (A, T)")
        self.should_continue_fn = should_continue_fn
        self.timeouts = checked_timeouts(timeouts)
        self.budgets = checked_budgets(budgets)
        self.progress = default_progress() if progress is None else progress
        filters = () if is_valid_sample_fn is None else is_valid_sample_fn
        self.judge = Judge(
            reward_fn=reward_fn,
            group_reward_fn=group_reward_fn,
            filters=(filters,) if callable(filters) else tuple(filters),
            concurrency=reward_concurrency,
        )
        if self.enable_partial_rollout and self.stale_threshold == 1:
            raise InvalidConfig(
                "enable_partial_rollout with a stale threshold of 1 would throw every continued token away; raise "
                f"max_staleness (it is {max_staleness}) or sync_weights_interval (it is {sync_weights_interval})"
            )
        if max_token_staleness is not None and max_token_staleness > max_staleness:
            raise InvalidConfig(
                f"max_token_staleness={max_token_staleness} is over max_staleness={max_staleness}: a sample would "
                "expire before any of its tokens is masked; lower it"
            )
        self._tasks: dict[str, _Task] = {}

    @property
    def limits(self) -> Limits:
        """How old the groups of a task may grow."""
        return Limits(self.stale_threshold, self.token_stale_threshold, self.tail_batch_trigger_size >= 0)

    @property
    def reach(self) -> int:
        """For how many train steps after its weights' own what is generated can be trained on."""
        token = self.token_stale_threshold
        return self.stale_threshold if token is None else min(self.stale_threshold, token)

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
        """Fill the buffer until a batch of COMPLETED groups is there for `train_step`.

        `target`: the total number of groups of the task that shall be available or trained. By default one batch more
        than are leased or trained, at any moment: a lease that is returned meanwhile counts as available. An exception
        or a cancel brings everything in flight back into the buffer first.
        """
        checked_integer("train_step", train_step, least=1)
        checked_integer("model_step", model_step, least=0)
        ahead = getattr(agent_loop, "takes_weights_while_running", False)  # it knows better which weights it has
        if staleness(model_step, train_step) >= self.reach and not ahead:
            raise InvalidInput(
                f"what weights of model_step={model_step} generate is too old for train_step={train_step} when it "
                f"arrives (the stale threshold is {self.reach}), so a batch would never fill; sync the "
                "weights first, or raise max_staleness or sync_weights_interval"
            )
        return await self.produce(
            agent_loop, sampler, batch_size, task_name, steps=Steps(train_step, model_step), target=target
        )

    async def produce(
        self,
        agent_loop: AgentLoop,
        sampler: Sampler | SamplerWithReplayBuffer,
        batch_size: int,
        task_name: str,
        *,
        steps: Steps,
        target: int | None = None,
        stopped: Callable[[], bool] = lambda: False,
        spare: int | None = None,
    ) -> Production:
        """As `produce_batch`, with clocks that may go on meanwhile: for managers. It ends early when `stopped()`.

        `spare`: how many groups more than the target and the over-issue may be in flight because filters reject some;
        by default as many as the buffer has room for.
        """
        if not isinstance(agent_loop, AgentLoop):
            raise InvalidInput(f"agent_loop is {agent_loop!r:.80}; expected an AgentLoop")
        checked_task(task_name)
        checked_integer("batch_size", batch_size, least=0)
        self._refuse_what_never_fits(batch_size)
        task = self._task(task_name)
        if task.producing:
            raise InvalidInput(f"task {task_name!r} is being produced already; one call at a time")
        bound = self._bound(task, sampler)
        task.producing = True
        try:
            while task.pausing:
                await asyncio.wait(tuple(task.pausing))
            task.works.batch_size = max(1, batch_size)
            if spare is None and self.replay_buffer.max_groups is not None:
                spare = self.replay_buffer.max_groups - batch_size - over_issue(self.over_sample_threshold, batch_size)
            return await self._produce(task, agent_loop, bound, batch_size, steps, target, stopped, spare)
        except BaseException as error:
            await self._stop(task)
            task.works.broken = None  # of those that were stopped: the first error is the one to hear of
            if isinstance(error, RewardUnavailable):
                task.works.forget_outage()
            if isinstance(error, EngineUnavailable):
                task.told.clear()  # producing again says that the weights were pushed again
            raise
        finally:
            task.producing = False

    async def _produce(
        self,
        task: _Task,
        agent_loop: AgentLoop,
        sampler: SamplerWithReplayBuffer,
        batch_size: int,
        steps: Steps,
        target: int | None,
        stopped: Callable[[], bool],
        spare: int | None,
    ) -> Production:
        loop = asyncio.get_running_loop()
        began, works, task_name = loop.time(), task.works, task.works.task_name
        pauses = works.pauses
        await works.bring_back()
        summary = await self._set_clock(task, steps.train_step)
        if task.told.get(agent_loop) != steps.model_step and not agent_loop.takes_weights_while_running:
            await agent_loop.weights_loaded(steps.model_step)
            task.told[agent_loop] = steps.model_step
            if isinstance(works.broken, EngineUnavailable):
                works.broken = None  # of the weights before
        if works.pauses == pauses and not stopped():
            await self._resume(task, agent_loop)
        if works.pauses == pauses and not stopped():  # else a pause came meanwhile, and this call ends at once
            works.end_pause()
        plan = await self._plan(task, batch_size, summary)
        agent_loop.outage.on_change = self._internals.nudge
        started = 0

        async def step() -> Production | None:
            nonlocal started
            while True:
                self._check(works)
                skip = works.exhausted and self.budgets.when_exhausted == "skip"
                flying = works.relied_on  # read first: a group that returns meanwhile would be in neither count
                summary = await self._summary(task)
                # Computed each time: leased groups may return to the buffer before the batch is complete.
                available, goal = summary.produced, summary.taken + batch_size if target is None else target
                enough = not self._should_continue(available, goal)
                self.progress.update(task_name, available, goal, works.in_flight, works.figures)
                if enough or skip or works.pausing or agent_loop.paused or stopped():  # another task may pause the loop
                    return Production(
                        task_name=task_name,
                        complete=enough,
                        exhausted=skip and not enough,
                        rejections=works.rejections_in_a_row,
                        target=goal,
                        available=available,
                        started=started,
                        tail=plan.tail,
                        seconds=loop.time() - began,
                    )
                missing = to_start(
                    target=goal,
                    available=available,
                    budget=plan.budget,
                    in_flight=flying,
                    accepted=works.accepted,
                    spare=spare,
                )
                if missing <= 0 and not agent_loop.outage.take_probe():
                    return None
                missing = max(1, missing)
                begun = await self._start_again(task, agent_loop, sampler, missing, plan.statuses, steps, summary)
                if not begun:
                    begun = await self._start(task, agent_loop, sampler, missing, (), steps)
                    if not begun and not len(works):
                        # Groups that wait for a tail must not keep the buffer full forever.
                        begun = await self._start_again(task, agent_loop, sampler, missing, DRAWABLE, steps, summary)
                    if not begun:
                        return None  # there is no room: wait for some
                started += begun

        if target is None:
            what = f"task {task_name!r} to have {batch_size} completed groups in the buffer"
        else:
            what = f"task {task_name!r} to have {target} groups completed, leased or trained"
        production = await self._internals.until(step, what, (task_name,))
        if production.exhausted:
            works.rejections_in_a_row = 0  # the next call tries again
        if not self.leaves_work_running or production.exhausted:
            if works.pausing:
                await works.wait(self.timeouts.pause_timeout_s)  # whoever pauses brings them in
            await self._stop(task)
        log.info(
            "batch_produced task=%s complete=%s available=%d target=%d started=%d seconds=%.3f",
            task_name, production.complete, production.available, production.target, started, production.seconds,
        )  # fmt: skip
        return production

    async def _set_clock(self, task: _Task, train_step: int) -> TaskSummary:
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

    async def _summary(self, task: _Task) -> TaskSummary:
        """The counts of a task; groups that anybody discarded are counted in its figures."""
        name = task.works.task_name
        summary = (await self._internals.summary((name,))).task(name)
        discarded = summary.account.ended.get(End.DISCARDED, 0)
        if task.discarded is None:
            task.discarded = discarded
        task.works.figures.discarded = discarded - task.discarded
        return summary

    async def _resume(self, task: _Task, agent_loop: AgentLoop) -> None:
        """Let go on what this task paused, and the loop that it is to use now, whoever paused that."""
        if agent_loop.paused:
            task.paused[agent_loop] = None
        for paused in list(task.paused):
            await paused.resume()
            task.paused.pop(paused, None)

    async def _start_again(
        self,
        task: _Task,
        agent_loop: AgentLoop,
        sampler: SamplerWithReplayBuffer,
        missing: int,
        again: Sequence[Status],
        steps: Steps,
        summary: TaskSummary,
    ) -> int:
        """Draw and start up to `missing` groups of the statuses, and stragglers first, if there are any; how many."""
        statuses = DRAWABLE if self._first(task.works) else again
        if not summary.due and not any(summary.statuses.get(status, 0) for status in statuses):
            return 0
        return await self._start(task, agent_loop, sampler, missing, again, steps)

    async def _start(
        self,
        task: _Task,
        agent_loop: AgentLoop,
        sampler: SamplerWithReplayBuffer,
        missing: int,
        again: Sequence[Status],
        steps: Steps,
    ) -> int:
        """Draw up to `missing` groups, of the statuses or new ones, and start them; how many.

        A pause finds a draw under way, and waits for it.
        """
        works = task.works
        if works.pausing:
            return 0
        drawing = asyncio.ensure_future(self._draw(task, agent_loop, sampler, missing, again, steps))
        task.drawing, task.drawing_since = drawing, asyncio.get_running_loop().time()
        try:
            await asyncio.wait((drawing,))
        except asyncio.CancelledError:
            drawing.cancel()
            await see_through(drawing)
            look_at(drawing)
            raise
        finally:
            task.drawing = task.drawing_since = None
        return 0 if drawing.cancelled() else drawing.result()  # a pause, or the end, does not wait for a data set

    async def _draw(
        self,
        task: _Task,
        agent_loop: AgentLoop,
        sampler: SamplerWithReplayBuffer,
        missing: int,
        again: Sequence[Status],
        steps: Steps,
    ) -> int:
        works = task.works
        if again:
            groups = await sampler.draw_again(missing, works.task_name, again, own=False, first=self._first(works))
        else:
            groups = await sampler.try_draw(missing, works.task_name, (), own=False)
        if works.pausing:
            await works.give_back(groups)
            return 0
        task.used[agent_loop] = None
        for group in groups:
            works.start(group, agent_loop, steps)
        return len(groups)

    def _first(self, works: Works) -> Collection[int]:
        """Ids of stragglers that are drawn before all other groups."""
        return works.waiting_stragglers if self.tail_batch_trigger_size >= 0 else ()

    async def _plan(self, task: _Task, batch_size: int, summary: TaskSummary) -> Plan:
        works, counts = task.works, summary.statuses
        aborted = counts.get(Status.ABORTED, 0)
        unjudged = await self._unjudged(works.task_name) if aborted else 0
        await self._look_for_stragglers(task, waiting=any(counts.get(status, 0) for status in DRAWABLE))
        aborted -= unjudged
        return make_plan(
            trigger=self.tail_batch_trigger_size,
            waiting=waiting_again(counts.get(Status.EXPIRED, 0), aborted, partial=self.enable_partial_rollout),
            partial=self.enable_partial_rollout or bool(unjudged),
            budget=over_issue(self.over_sample_threshold, batch_size),
        )

    async def _unjudged(self, task_name: str) -> int:
        """Groups that have nothing left to generate: they are only judged when they are drawn again."""
        query = {"task_name": task_name, "place": Place.BUFFERED, "status": Status.ABORTED, "unjudged": 1}
        return len(await self.replay_buffer.query(query))

    async def _look_for_stragglers(self, task: _Task, *, waiting: bool) -> None:
        """Find stragglers of an earlier run, once; forget those that left the buffer otherwise."""
        works = task.works
        query: dict[str, Any] = {"task_name": works.task_name, "place": {"$in": [Place.BUFFERED, Place.IN_FLIGHT]}}
        if not task.recalled:
            if waiting:
                found = await self.replay_buffer.query(query | {"status": {"$in": list(DRAWABLE)}})
                works.stragglers |= {record.group_id for record in found if record.attempt >= self.tail_after}
            task.recalled = True
        elif works.stragglers:
            some = sorted(works.stragglers)[:1000]
            there = await self.replay_buffer.query(query | {"group_id": {"$in": some}})
            works.stragglers -= {*some} - {record.group_id for record in there if record.status in DRAWABLE}

    def _should_continue(self, available: int, target: int) -> bool:
        if self.should_continue_fn is not None:
            return bool(self.should_continue_fn(available, target))
        return available < target

    def _check(self, works: Works) -> None:
        """Raise if something broke, or too much went wrong in a row."""
        broken, works.broken = works.broken, None
        if broken is not None:
            raise broken
        if works.failures_in_a_row >= self.budgets.max_consecutive_failures:
            attempts, works.failures_in_a_row = works.failures_in_a_row, 0
            failed = sum(works.failing.values())
            back = len(works.failing) - failed
            works.failing.clear()
            advice = (
                " (pauses had to cancel them: let `generate` end early when the loop is `paused`, or raise "
                "pause_timeout_s)"
                if works.overran_pause
                else ""
            )
            raise TooManyFailures(
                f"{attempts} attempts in a row at groups of task {works.task_name!r} failed, and none was completed; "
                f"the last error: {works.last_error}{advice}. Of these groups {failed} spent their last try and ended "
                f"as failed, {back} are back in the buffer; fix the cause and produce again, or raise "
                "max_consecutive_failures"
            )
        if works.exhausted and self.budgets.when_exhausted == "raise":
            rejections, works.rejections_in_a_row = works.rejections_in_a_row, 0
            raise too_many_rejections(works.task_name, rejections, works.last_error)

    # --- pausing --------------------------------------------------------------------------------------

    async def pause(self, task_name: str | None = None) -> float:
        """Ask what is generating to end, bring it in, and wait for idle engines; the seconds that this took.

        A barrier: nothing is in flight afterwards, and the engines have stopped our requests, so that new weights meet
        none of them. Completed groups count; stopped ones keep their tokens if partial rollout is on. What does not end
        in time is cancelled, spends a try, and goes back with what it has. EngineError if an engine does not become
        idle: it is not safe to load weights then; pause again. `produce_batch` resumes.
        """
        names = list(self._tasks) if task_name is None else [task_name]
        tasks = [self._tasks[name] for name in names if name in self._tasks]
        began = asyncio.get_running_loop().time()
        ended = await asyncio.gather(*[self._pause_task(task) for task in tasks], return_exceptions=True)
        for problem in ended:
            if isinstance(problem, BaseException):
                raise problem  # when all of them have ended: none runs into the next pause
        return asyncio.get_running_loop().time() - began

    async def _pause_task(self, task: _Task) -> None:
        pausing = asyncio.current_task()
        assert pausing is not None
        task.pausing.add(pausing)
        try:
            await self._bring_in(task)
        finally:
            task.pausing.discard(pausing)

    async def _bring_in(self, task: _Task) -> None:
        loop = asyncio.get_running_loop()
        works, began = task.works, loop.time()
        works.begin_pause()
        self._internals.nudge()
        await self._end_drawing(task, self.timeouts.pause_timeout_s)
        agent_loops = works.agent_loops
        task.paused.update(dict.fromkeys(agent_loops))
        requests: list[asyncio.Task[None]] = []
        try:
            while len(works):
                # Suspects did not end by themselves before: they get one request, and hold up nobody.
                grace_s = self.timeouts.pause_timeout_s if works.relied_on else self.timeouts.pause_interval_s
                left_s = min(grace_s, self.timeouts.pause_timeout_s) - (loop.time() - began)
                if left_s <= RESOLUTION_S:
                    log.warning("pause_timed_out task=%s groups=%d: cancelled", works.task_name, len(works))
                    limit = "pause_timeout_s" if works.relied_on else "pause_interval_s"
                    works.overdue = f"{limit}={min(grace_s, self.timeouts.pause_timeout_s):g}"
                    break
                requests = [request for request in requests if not request.done()]
                requests += [asyncio.create_task(self._ask(agent_loop)) for agent_loop in agent_loops]
                await works.wait(min(self.timeouts.pause_interval_s, left_s))
            await works.stop()
        finally:
            works.overdue = None
            for request in requests:
                request.cancel()
            if requests:  # one that ignores the cancel is left behind
                await asyncio.wait(requests, timeout=self.timeouts.cancel_timeout_s)
        await self._until_idle(task)
        works.figures.pauses += 1
        works.figures.pause_s += loop.time() - began

    async def _ask(self, agent_loop: AgentLoop) -> None:
        try:
            async with asyncio.timeout(self.timeouts.pause_request_timeout_s):
                await agent_loop.pause()
        except Exception as error:
            log.warning("pause_request_failed loop=%s", type(agent_loop).__name__, exc_info=error)

    async def _until_idle(self, task: _Task) -> None:
        for agent_loop in list(task.used):
            try:
                async with asyncio.timeout(self.timeouts.idle_timeout_s):
                    await agent_loop.idle()
            except TimeoutError:
                raise EngineError(
                    f"the engine of {agent_loop!r:.200} still runs requests {self.timeouts.idle_timeout_s:g} s after a "
                    "pause (idle_timeout_s): it is not safe to give it new weights; see what else uses it"
                ) from None
            task.used.pop(agent_loop, None)

    async def close(self) -> None:
        """Cancel what is under way; all of it is back in the buffer when this returns. Ends a `produce_batch`, too."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.works.begin_pause()
        self._internals.nudge()
        for task in tasks:
            await self._stop(task)

    async def _stop(self, task: _Task) -> None:
        cancelled = await self._end_drawing(task, self.timeouts.cancel_timeout_s)
        await task.works.stop()
        if cancelled is not None:
            raise cancelled

    async def _end_drawing(self, task: _Task, timeout_s: float) -> asyncio.CancelledError | None:
        """Wait for a draw; one that a data set holds up is cancelled, its thread left behind. A cancel meanwhile."""
        drawing = task.drawing
        if drawing is None:
            return None
        try:
            await asyncio.wait((drawing,), timeout=timeout_s)
        except asyncio.CancelledError as stopped:
            await see_through(drawing)
            return stopped
        if not drawing.done():
            log.warning(
                "draw_timed_out task=%s seconds=%g: the data set does not answer", task.works.task_name, timeout_s
            )
            drawing.cancel()
        return await see_through(drawing)

    # --- looking --------------------------------------------------------------------------------------

    def in_flight(self, task_name: str) -> int:
        """Groups under way."""
        task = self._tasks.get(task_name)
        return 0 if task is None else task.works.in_flight

    def last_error(self, task_name: str) -> str | None:
        """Why an attempt at a group failed, or was filtered, last."""
        return self._task(task_name).works.last_error

    def explain(self, task_name: str) -> list[str]:
        """What happens to the groups in flight, for people: how many at each stage, and the oldest of them."""
        task = self._tasks.get(task_name)
        if task is None:
            return []
        now = asyncio.get_running_loop().time()
        lines = [] if task.drawing_since is None else [f"  drawing: for {now - task.drawing_since:.1f} s"]
        by_stage: dict[str, list[Stage]] = {}
        for stage in task.works.stages:
            by_stage.setdefault(stage.name, []).append(stage)
        for name, stages in by_stage.items():
            oldest = stages[0]
            note = f"; {oldest.note}" if oldest.note else ""
            lines.append(
                f"  {name}: {len(stages)} groups, the oldest (group {oldest.group_id}, attempt {oldest.attempt}) for "
                f"{now - oldest.since:.1f} s{note}"
            )
        loops = dict.fromkeys((*task.works.agent_loops, *task.told))  # a paused task has no running loops
        lines += [f"  {waits}" for loop in loops if (waits := loop.explain_wait()) is not None]
        lines += [f"  {line}" for line in full_pools((DATA, self.judge.pool))]
        return lines

    def figures(self, task_name: str) -> Figures:
        """Counts since this strategy was made; reading them resets nothing."""
        return self._task(task_name).works.figures

    def stats(self) -> dict[str, float]:
        """Flat figures for any logger, as `forebay/<task>/produce/...`."""
        flat: dict[str, float] = {}
        for task_name, task in self._tasks.items():
            works, prefix = task.works, f"forebay/{task_name}/produce"
            flat |= works.figures.flat(task_name, works.in_flight)
            stages = works.stages
            flat |= {f"{prefix}/{name}": sum(stage.name == name for stage in stages) for name in STAGES}
            oldest = [works.age_s(stage) for stage in stages if stage.name == "generating"]
            flat[f"{prefix}/oldest_generation_s"] = max(oldest, default=0.0)
            if task.sampler is not None:
                flat[f"forebay/{task_name}/produce/dropped_responses"] += task.sampler[1].dropped_responses
        return flat

    # --- parts ----------------------------------------------------------------------------------------

    def _task(self, task_name: str) -> _Task:
        task = self._tasks.get(task_name)
        if task is None:
            works = Works(
                checked_task(task_name),
                self.replay_buffer,
                self.judge,
                self.timeouts,
                partial=self.enable_partial_rollout,
                max_tries=self.max_tries,
                tail_after=self.tail_after,
                budgets=self.budgets,
            )
            task = self._tasks[task_name] = _Task(works)
        return task

    def _bound(self, task: _Task, sampler: Sampler | SamplerWithReplayBuffer) -> SamplerWithReplayBuffer:
        if task.sampler is not None and task.sampler[0] is sampler:
            return task.sampler[1]
        check_sampler(sampler)
        if isinstance(sampler, Sampler):
            bound = sampler.with_buffer(self.replay_buffer)
        elif isinstance(sampler, SamplerWithReplayBuffer):
            bound = sampler
            if bound.replay_buffer is not self.replay_buffer:
                raise InvalidConfig("the sampler draws through another buffer than this strategy's; expected the same")
        else:
            raise InvalidInput(f"sampler is {sampler!r:.80}; expected a Sampler or a SamplerWithReplayBuffer")
        task.sampler = (sampler, bound)
        return bound

    def _refuse_what_never_fits(self, batch_size: int) -> None:
        limit = self.replay_buffer.max_groups
        if limit is not None and batch_size > limit:
            raise InvalidConfig(
                f"a batch of {batch_size} groups never fits into a buffer of max_groups={limit}; raise max_groups"
            )


def too_many_rejections(task_name: str, groups: int, reason: str | None, *, skip: bool = False) -> TooManyRejections:
    """The error for a task whose groups are all filtered. `skip`: there is no other task to skip it for."""
    found = " when_exhausted='skip' found no other task to produce instead." if skip else ""
    advice = "add a task, or use when_exhausted='accept'" if skip else "or choose another when_exhausted"
    return TooManyRejections(
        f"{groups} groups of task {task_name!r} in a row were filtered, and none was kept; the last reason: {reason}."
        f"{found} Loosen the filter, change the prompts, raise max_consecutive_rejections, {advice}"
    )


class SyncProduceStrategy(ProduceStrategy):
    """Starts what is missing, replaces what is filtered or fails, returns when the batch is there; nothing runs on."""

    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        *,
        sync_weights_interval: int = 1,
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
        super().__init__(
            replay_buffer,
            over_sample_threshold=0.0,
            enable_partial_rollout=False,
            max_staleness=0,
            max_token_staleness=None,
            sync_weights_interval=sync_weights_interval,
            tail_batch_trigger_size=0,
            tail_after=3,
            max_tries=max_tries,
            reward_fn=reward_fn,
            group_reward_fn=group_reward_fn,
            reward_concurrency=reward_concurrency,
            is_valid_sample_fn=is_valid_sample_fn,
            should_continue_fn=should_continue_fn,
            timeouts=timeouts,
            budgets=budgets,
            progress=progress,
        )


class AsyncProduceStrategy(ProduceStrategy):
    """Runs ahead: over-issues, continues what was interrupted, keeps stragglers from starving.

    `over_sample_threshold`: how many groups beyond the target to run, as a share of the batch. `max_staleness` and
    `max_token_staleness` count weight updates. `tail_batch_trigger_size`: -1 drops what expired, 0 generates it again
    at once, N waits for N of them and then runs them first, without over-issue; a group that was returned
    `tail_after` times is drawn first at any setting from 0 on.
    """

    leaves_work_running = True

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
        super().__init__(
            replay_buffer,
            over_sample_threshold=over_sample_threshold,
            enable_partial_rollout=enable_partial_rollout,
            max_staleness=max_staleness,
            max_token_staleness=max_token_staleness,
            sync_weights_interval=sync_weights_interval,
            tail_batch_trigger_size=tail_batch_trigger_size,
            tail_after=tail_after,
            max_tries=max_tries,
            reward_fn=reward_fn,
            group_reward_fn=group_reward_fn,
            reward_concurrency=reward_concurrency,
            is_valid_sample_fn=is_valid_sample_fn,
            should_continue_fn=should_continue_fn,
            timeouts=timeouts,
            budgets=budgets,
            progress=progress,
        )
