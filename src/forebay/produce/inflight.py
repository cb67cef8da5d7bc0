"""Groups in flight: each from its draw until it is back in the buffer.

One `Works` has all groups that a strategy has in flight for one task, and nothing else starts, stops or finishes those.
Every group takes the same way in a separate task: rest, generate, judge, put. However that ends (an answer, an
exception, a cancel, a timeout, a loop that ignores cancels), the group goes back into the buffer, once, under the
attempt that it was drawn with (G3). If the store fails then, the group is kept here and put again at the next
opportunity. A finished one is counted, once, and wakes the strategy.

A group whose attempt was cut short (by a timeout, an abort that nobody asked for, or a pause that had to cancel it) is
a suspect: it rests before its next attempt, and no batch relies on it, so that one that always hangs delays none.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from forebay.agent_loop.base import AgentLoop
from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.internal import internals
from forebay.core.aio import RESOLUTION_S, see_through
from forebay.core.ledger import Place, Record
from forebay.core.rollout import RolloutState, Status, carries_response, group_status
from forebay.errors import BufferClosed, DuplicateGroup, EngineUnavailable, InvalidInput, LostLease, RewardUnavailable
from forebay.produce.judge import Judge, Judged, fail_judging, set_aside
from forebay.produce.members import (
    collect,
    new_rewards,
    new_tokens,
    prepare,
    refused_members,
    settle_tries,
    untrusted_responses,
)
from forebay.produce.plan import Budgets, Timeouts, acceptance, backoff_s
from forebay.produce.stats import Figures, Outcome
from forebay.prompts.sources import independent

__all__ = ["STAGES", "Stage", "Steps", "Works", "look_at"]

_MAX_ASIDE = 3  # pauses that a group is judged over before it is a suspect
STAGES = ("resting", "generating", "judging", "storing")

log = logging.getLogger(__name__)


class Steps:
    """The two clocks of a task as its producer sees them: who will train on what comes back, and what generates now."""

    def __init__(self, train_step: int, model_step: int) -> None:
        self.train_step = train_step
        self.model_step = model_step


class Stage(msgspec.Struct):
    """What a group in flight is being done to, and since when on the clock of the event loop."""

    group_id: int
    attempt: int
    name: str  # one of STAGES
    since: float
    note: str = ""


class _Return(NamedTuple):
    """A group on its way back; `tell` gets it as it was put, its status there, and an error that this brought."""

    members: list[RolloutState]
    issued: Sequence[RolloutState]
    train_step: int | None
    model_step: int | None
    tell: Callable[[Sequence[RolloutState], Status | None, str | None], None]


class Works:
    """What is in flight for one task."""

    def __init__(
        self,
        task_name: str,
        buffer: ReplayBuffer,
        judge: Judge,
        timeouts: Timeouts,
        *,
        partial: bool,
        max_tries: int,
        tail_after: int,
        budgets: Budgets,
    ) -> None:
        self.task_name = task_name
        self.figures = Figures()
        self.failures_in_a_row = 0
        self.failing: dict[int, bool] = {}  # groups of these failures; whether they ended as failed
        self.rejections_in_a_row = 0
        self.last_error: str | None = None
        self.overran_pause = False  # whether the last error is of an attempt that a pause had to cancel
        self.broken: BaseException | None = None
        self.on_end: Callable[[Outcome, Sequence[RolloutState]], None] | None = None  # of an attempt
        self.stragglers: set[int] = set()
        self.batch_size = 1
        self.pausing = False
        self.overdue: str | None = None  # the limit of a pause, which cancels the attempts that did not end within it
        self.pauses = 0  # asked for so far
        self._internals = internals(buffer)
        self._judge = judge
        self._timeouts = timeouts
        self._partial = partial
        self._max_tries = max_tries
        self._tail_after = tail_after
        self._running: dict[asyncio.Task[None], AgentLoop] = {}
        self._unbegun: dict[asyncio.Task[None], list[RolloutState]] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._back: set[asyncio.Task[None]] = set()  # of those that are running
        self._late: list[_Return] = []  # the store failed when they were put
        self._budgets = budgets
        self._stages: dict[asyncio.Task[None], Stage] = {}
        self._suspects: dict[int, tuple[int, float]] = {}  # times cut short in a row; rests until
        self._judging_failed: float | None = None  # since when rewards or filters raise
        self._not_judged: set[int] = set()  # groups for which they have raised since then
        self._judged_at = 0.0  # when judging worked last
        self._aside: dict[int, tuple[float, int]] = {}  # how long groups were judged, and how often set aside
        self._overran: set[int] = set()  # groups that a pause had to cancel, and that are not counted yet
        self._overrun_pause = 0  # the last pause for which a failure was counted
        self._pause: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that the last group was started on

    def __len__(self) -> int:
        """Tasks that have not ended."""
        return len(self._running) + len(self._returning)

    @property
    def in_flight(self) -> int:
        """Groups that are not back in the buffer; a task outlives the return of its group by a moment."""
        return len(self) - len(self._back)

    @property
    def relied_on(self) -> int:
        """Groups in flight that a batch, or a pause, may wait for: all but suspects."""
        if not self._suspects:
            return self.in_flight
        return self.in_flight - sum(
            stage.group_id in self._suspects for task, stage in self._stages.items() if task not in self._back
        )

    @property
    def stages(self) -> list[Stage]:
        """What is being done to each group in flight, oldest first."""
        stages = [stage for task, stage in self._stages.items() if task not in self._back]
        return sorted(stages, key=lambda stage: stage.since)

    def age_s(self, stage: Stage) -> float:
        """For how long a group has been at its stage; for any thread."""
        return 0.0 if self._loop is None else self._loop.time() - stage.since

    @property
    def accepted(self) -> float:
        """The share of groups that filters keep, as measured; all of them when rejected ones are accepted."""
        if self.exhausted and self._budgets.when_exhausted == "accept":
            return 1.0
        verdicts = self.figures.verdicts
        kept = sum(verdicts)
        return acceptance(kept, len(verdicts) - kept)

    @property
    def exhausted(self) -> bool:
        """Whether so many groups in a row were rejected that something has to happen."""
        return self.rejections_in_a_row >= self._budgets.rejections(self.batch_size)

    @property
    def waiting_stragglers(self) -> set[int]:
        """Groups that were returned `tail_after` times and are not in flight: they are drawn before all others."""
        return self.stragglers - {stage.group_id for stage in self._stages.values()} if self.stragglers else set()

    @property
    def agent_loops(self) -> list[AgentLoop]:
        """The loops that are generating, each once."""
        return list(dict.fromkeys(self._running.values()))

    def start(self, group: Sequence[RolloutState], agent_loop: AgentLoop, steps: Steps) -> None:
        """Have a drawn group generated; it is ours until it is back in the buffer."""
        name = f"group {group[0].group_id} of {self.task_name}"
        attempt = group[0].attempt or 0
        if attempt > self._tail_after:
            self.stragglers.add(group[0].group_id or 0)
        # An eager start would run the user's code inside the strategy's own step.
        task = asyncio.create_task(self._walk(list(group), agent_loop, steps), name=name)
        self._running[task] = agent_loop
        self._unbegun[task] = list(group)
        self._loop = asyncio.get_running_loop()
        note = group[0].error_msg or ""
        self._stages[task] = Stage(group[0].group_id or 0, attempt, "generating", self._loop.time(), note)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        self._stages.pop(task, None)
        self._back.discard(task)
        self._returning.discard(task)
        unbegun = self._unbegun.pop(task, None)
        if unbegun is not None:
            # Cancelled before its first step: its own code, which brings groups back, never ran.
            returning = asyncio.ensure_future(self.give_back([unbegun]))
            self._returning.add(returning)
            returning.add_done_callback(self._ended)
        error = None if task.cancelled() else task.exception()
        self.broken = self.broken or error
        self._internals.nudge()

    async def stop(self) -> None:
        """Cancel everything; all of it is back in the buffer when this returns, also if the caller is cancelled."""
        cancelled = None
        while len(self):
            for task in self._running:
                task.cancel()
            ending = asyncio.gather(*self._running, *self._returning, return_exceptions=True)
            cancelled = await see_through(ending) or cancelled
        if self._late:
            late = asyncio.ensure_future(self.bring_back())
            cancelled = await see_through(late) or cancelled
            look_at(late)
        if cancelled is not None:
            raise cancelled

    async def give_back(self, groups: Sequence[list[RolloutState]]) -> None:
        """Return groups that were drawn and not started, as ABORTED with what they have."""
        for group in groups:
            for state in group:
                if state.status is not Status.COMPLETED:
                    state.status = Status.ABORTED
            self._late.append(_Return(group, group, None, None, lambda stored, status, error: None))
        returning = asyncio.ensure_future(self.bring_back())
        cancelled = await see_through(returning)
        returning.result()
        if cancelled is not None:
            raise cancelled

    async def bring_back(self) -> None:
        """Put what the store did not take before. What it does not take now either stays for the next time."""
        waiting, self._late = self._late, []
        failed: Exception | None = None
        try:
            while waiting:
                try:
                    await self._store(waiting[0])
                except Exception as error:
                    failed = failed or error
                    self._late.append(waiting[0])
                waiting.pop(0)
        finally:
            self._late += waiting
        if failed is not None:
            log.warning("groups_not_returned task=%s groups=%d error=%s", self.task_name, len(self._late), failed)
            raise failed

    async def wait(self, timeout_s: float) -> None:
        """Until nothing is in flight, or for so long."""
        if len(self):
            await asyncio.wait((*self._running, *self._returning), timeout=timeout_s)

    def begin_pause(self) -> None:
        """From now on judging is short of time, and nothing is to be started."""
        self.pausing = True
        self.pauses += 1
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    def end_pause(self) -> None:
        self.pausing = False
        if self._pause is not None and self._pause.done():
            self._pause = None  # otherwise somebody waits for it, and shall hear of the next one

    # --- the walk of one group ------------------------------------------------------------------------

    async def _walk(self, group: list[RolloutState], agent_loop: AgentLoop, steps: Steps) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._unbegun.pop(task, None)
        clock, model_step = asyncio.get_running_loop().time, steps.model_step
        self._count_dropped(group)
        known_step = None if agent_loop.takes_weights_while_running else model_step
        issued, working = prepare(group, partial=self._partial, model_step=known_step)
        rewarded = {(state.rollout_id, state.segment) for state in issued if state.reward is not None}
        cancelled, seconds, tokens, judged = None, None, 0, Judged()
        judge_s: float | None = None
        stage = self._stages[task]
        try:
            rested, cancelled = await self._rest(stage)
            if not rested:
                members, error = self._what_there_is(issued, working), None
            else:
                stage.name, stage.since = "generating", clock()
                members, error, cancelled = await self._generate(issued, working, agent_loop, steps)
                seconds = None if members is issued else clock() - stage.since
                tokens = new_tokens(members, issued)
            if cancelled is not None or not rested:
                if not self._judge.idle:
                    set_aside(members)
            else:
                stage.name, stage.since = "judging", clock()
                answered = any(state.status is Status.COMPLETED for state in members)
                judged, judge_error, cancelled = await self._judged(members, stage)
                error = judge_error or error
                if answered and not self._judge.idle and (judge_error or not any(state.unjudged for state in members)):
                    judge_s = clock() - stage.since
        except Exception as wrong:
            # An unforeseen value in a sample; in any case the group goes back.
            log.exception("group_mishandled task=%s group=%s", self.task_name, issued[0].group_id)
            members = refused_members((), issued, f"{type(wrong).__name__}: {wrong}", everyone=True)
            error = settle_tries(members, issued, self._max_tries)

        kept = None
        if all(state.status in (Status.COMPLETED, Status.FILTERED) for state in members):
            kept = judged.rejected is None and group_status(members) is Status.COMPLETED

        def count(stored: Sequence[RolloutState], status: Status | None, refused: str | None) -> None:
            if task in self._running:
                self._back.add(task)
            failure = refused or error
            outcome = Outcome(
                group_id=issued[0].group_id or 0,
                attempt=issued[0].attempt or 0,
                status=status,
                samples=len(stored),
                tokens=tokens,
                seconds=seconds,
                judge_s=judge_s,
                failed=failure is not None,
                error=failure or judged.rejected or (members[0].error_msg if kept is False else None),
                kept=kept,
                usable=group_status(members) is Status.COMPLETED,
                rewards=new_rewards(stored, rewarded),
            )
            self._count(outcome)
            if self.on_end is not None:
                self.on_end(outcome, stored)

        back = _Return(members, issued, steps.train_step, model_step, count)
        stage.name, stage.since = "storing", clock()
        storing = asyncio.ensure_future(self._store(back))
        cancelled = await see_through(storing) or cancelled
        if storing.cancelled() or storing.exception() is not None:
            self._late.append(back)
        storing.result()
        if cancelled is not None:
            raise cancelled

    async def _rest(self, stage: Stage) -> tuple[bool, asyncio.CancelledError | None]:
        """Wait until a suspect may be tried again; whether it may, and a cancel meanwhile. A pause ends it."""
        clock = asyncio.get_running_loop().time
        _, until = self._suspects.get(stage.group_id, (0, 0.0))
        stage.name = "resting"
        try:
            while (left_s := until - clock()) > RESOLUTION_S and not self.pausing:
                await asyncio.wait((self._pause_future(),), timeout=left_s)
        except asyncio.CancelledError as stopped:
            return False, stopped
        return until - clock() <= RESOLUTION_S, None

    def _cut_short(self, group_id: int) -> None:
        times = self._suspects.get(group_id, (0, 0.0))[0] + 1
        self._suspects[group_id] = times, asyncio.get_running_loop().time() + backoff_s(times)

    async def _generate(
        self, issued: list[RolloutState], working: list[RolloutState], agent_loop: AgentLoop, steps: Steps
    ) -> tuple[list[RolloutState], str | None, asyncio.CancelledError | None]:
        """The members as they came back, an error that cost a try, and a cancel meanwhile."""
        if all(state.status is Status.COMPLETED for state in issued):
            return issued, None, None  # they only wait to be judged
        pauses, group_id = (self.pauses, agent_loop.pauses), issued[0].group_id or 0
        generating = asyncio.ensure_future(self._call(agent_loop, working))
        cancelled = None
        try:
            await self._until_generated(generating, agent_loop)
        except asyncio.CancelledError as stopped:
            cancelled = stopped
        in_time = generating.done()
        if not in_time:
            cancelled = await self._cancel(generating) or cancelled
        returned: object = working
        if not generating.done():
            # It may continue to change them, and must not change what is stored.
            returned = [independent(state.__copy__()) for state in working if isinstance(state, RolloutState)]
        elif not generating.cancelled() and generating.exception() is None:
            returned = generating.result()
        raised = None if not generating.done() or generating.cancelled() else generating.exception()
        if isinstance(raised, EngineUnavailable):
            self.broken = self.broken or raised  # the strategy hears of it; the group lost nothing but time
            return self._what_there_is(issued, working, keep=True), None, cancelled
        cut = None
        if cancelled is not None or (in_time and generating.cancelled() and (self.pausing or agent_loop.paused)):
            if self.overdue is None or cancelled is None:
                return self._what_there_is(issued, returned, keep=agent_loop.outage.away), None, cancelled
            cut = f"did not end within {self.overdue} of a pause"
        elif not in_time:
            cut = f"not generated within member_timeout_s={self._timeouts.member_timeout_s:g}"
        if cut is not None:
            if cancelled is not None:
                self._overran.add(group_id)
            self._cut_short(group_id)
            members = self._what_there_is(issued, returned)
            return members, settle_tries(members, issued, self._max_tries, aborted=cut), cancelled
        missing = None
        if generating.cancelled():
            missing = "the agent loop cancelled itself"
        elif raised is not None:
            log.warning("agent_loop_raised task=%s group=%s", self.task_name, group_id, exc_info=raised)
            missing = f"the agent loop raised {type(raised).__name__}: {raised}"
        if missing is not None:
            returned = self._finished(returned)
        partial = self._partial or agent_loop.outage.away
        latest = None if agent_loop.takes_weights_while_running else steps.model_step
        members = collect(issued, returned, partial=partial, missing=missing, model_step=latest)
        asked = pauses != (self.pauses, agent_loop.pauses) or self.pausing or agent_loop.paused
        excused = asked or agent_loop.excuses(issued)
        aborted = None if excused else "the agent loop ended it early (ABORTED) although nobody asked for that"
        if aborted is not None and any(state.status is Status.ABORTED for state in members):
            self._cut_short(group_id)
        return members, settle_tries(members, issued, self._max_tries, aborted=aborted), None

    async def _until_generated(self, generating: asyncio.Future[Any], agent_loop: AgentLoop) -> None:
        """Wait for `member_timeout_s`, in which time that the engine was away does not count.

        Members of a group are begun together, so those that have not ended then have all had that long.
        """
        clock = asyncio.get_running_loop().time
        began, away_s = clock(), agent_loop.outage_s()
        while not generating.done():
            left_s = self._timeouts.member_timeout_s + agent_loop.outage_s() - away_s - (clock() - began)
            if left_s <= RESOLUTION_S:
                return
            await asyncio.wait((generating,), timeout=left_s)

    def _count_dropped(self, group: Sequence[RolloutState]) -> None:
        dropped = untrusted_responses(group)
        if dropped and not self.figures.dropped_responses:
            log.warning(
                "responses_dropped task=%s group=%s: its samples carry responses that were not generated for them, and "
                "are generated; more of them are counted as produce/dropped_responses",
                self.task_name, group[0].group_id,
            )  # fmt: skip
        self.figures.dropped_responses += dropped

    async def _call(self, agent_loop: AgentLoop, working: list[RolloutState]) -> object:
        # In a coroutine of ours, so that one that is no coroutine function fails like any other.
        continues = any(state.status is not Status.COMPLETED and carries_response(state) for state in working)
        return await agent_loop.generate_group(working, enable_partial_rollout=self._partial or continues)

    def _finished(self, returned: object) -> list[RolloutState]:
        """The samples of complete rollouts. A rollout is incomplete if one of its segments is."""
        given = returned if isinstance(returned, (list, tuple)) else ()
        states = [state for state in given if isinstance(state, RolloutState)]
        incomplete = [state.rollout_id for state in states if state.status != Status.COMPLETED]
        return [state for state in states if state.rollout_id not in incomplete]

    def _what_there_is(
        self, issued: Sequence[RolloutState], returned: object, *, keep: bool = False
    ) -> list[RolloutState]:
        """The members of a group that was stopped: those with an answer keep it, partial ones if they can continue.

        `keep`: partial ones keep their tokens also without partial rollout; the same weights continue them.
        """
        for state in returned if isinstance(returned, (list, tuple)) else ():
            if isinstance(state, RolloutState) and state.status == Status.INIT:
                state.status = Status.ABORTED
        partial = self._partial or keep
        members = collect(issued, returned, partial=partial, missing="stopped", stopped=True)
        settle_tries(members, issued, self._max_tries + 1, spend=False)
        return members

    async def _cancel(self, future: asyncio.Future[Any], what: str = "agent_loop") -> asyncio.CancelledError | None:
        """Cancel, and give it a moment to end; a further cancel of ours waits for that, too, and is returned."""
        future.cancel()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeouts.cancel_timeout_s
        cancelled = None
        while not future.done() and (left_s := deadline - loop.time()) > RESOLUTION_S:
            try:
                await asyncio.wait((future,), timeout=left_s)
            except asyncio.CancelledError as again:
                cancelled = again
        if not future.done():
            log.warning("%s_ignores_cancel task=%s: left behind, its group goes back", what, self.task_name)
            future.add_done_callback(look_at)
        else:
            look_at(future)
        return cancelled

    async def _judged(
        self, members: list[RolloutState], stage: Stage
    ) -> tuple[Judged, str | None, asyncio.CancelledError | None]:
        """Reward and filter; how it went, the error if it cost a try, and a cancel meanwhile.

        While rewards or filters raise they are called again, with growing delays, and nothing is spent before
        `judge_give_up_s`. If they fail for all groups, producing ends then, and nothing is spent. A pause shortens the
        time.
        """
        if self._judge.idle or not any(state.status is Status.COMPLETED for state in members):
            return Judged(), None, None
        clock = asyncio.get_running_loop().time
        began, times, failing_since = clock(), 0, None
        # Over all attempts: a pause must not begin the time of a reward that hangs again.
        before_s, aside = self._aside.pop(stage.group_id, (0.0, 0))
        deadline = began + self._timeouts.judge_give_up_s - before_s
        while True:
            judged, cancelled = await self._judge_once(members, stage.group_id, max(0.0, deadline - clock()))
            if judged is None:
                set_aside(members)
                self._aside[stage.group_id] = before_s + clock() - began, aside + 1
                if cancelled is None and aside + 1 >= _MAX_ASIDE:
                    self._cut_short(stage.group_id)  # pauses waited for it in vain: the next ones shall not
                return Judged(), None, cancelled
            self._note_outage(stage, judged)
            if judged.error is None:
                return judged, None, cancelled
            times += 1
            delay_s = backoff_s(times)
            failing_since = clock() if failing_since is None else failing_since
            away_since = self._away_since(stage, judged, began if judged.hung else failing_since)
            if away_since is not None and judged.passing:
                deadline = max(deadline, away_since + self._timeouts.judge_give_up_s)
            if not judged.passing or clock() + delay_s >= deadline - RESOLUTION_S:
                if away_since is not None:
                    set_aside(members)
                    self._break(away_since, judged)
                    return Judged(), None, cancelled
                return judged, fail_judging(members, judged, self._max_tries), cancelled
            stage.note = f"repeated after {judged.error}"
            try:
                await asyncio.wait((self._pause_future(),), timeout=delay_s)
            except asyncio.CancelledError as stopped:
                cancelled = stopped
            if cancelled is not None or self.pausing:
                set_aside(members)
                self._aside[stage.group_id] = before_s + clock() - began, aside
                return Judged(), None, cancelled

    async def _judge_once(
        self, members: list[RolloutState], group_id: int, left_s: float
    ) -> tuple[Judged | None, asyncio.CancelledError | None]:
        """One call of the judge, and a cancel meanwhile; None if it was stopped from outside."""
        keep_rejected = self.exhausted and self._budgets.when_exhausted == "accept"
        # With a list of its own: one that is left behind must not get hold of what we keep instead.
        judging = asyncio.ensure_future(self._judge.judge(list(members), keep_rejected=keep_rejected))
        cancelled, hurried = None, False
        try:
            await asyncio.wait((judging, self._pause_future()), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            hurried = self.pausing
            if not judging.done() and hurried and group_id not in self._suspects:
                await asyncio.wait((judging,), timeout=self._timeouts.judge_timeout_s)
        except asyncio.CancelledError as stopped:
            cancelled = stopped
        in_time = judging.done()
        if not in_time:
            cancelled = await self._cancel(judging, "judging") or cancelled
        if judging.done() and not judging.cancelled():
            return judging.result(), cancelled
        members[:] = [independent(state.__copy__()) for state in members]  # a thread may still change the others
        if cancelled is not None or (hurried and not in_time):
            return None, cancelled
        if not in_time:
            self._cut_short(group_id)  # no batch waits for its next attempt
        error = "judging cancelled itself" if in_time else f"not judged within {self._timeouts.judge_give_up_s:g} s"
        return Judged(error, rewarded=self._judge.reward_fn is None, hung=not in_time), None

    def _note_outage(self, stage: Stage, judged: Judged) -> None:
        """One line when judging begins to fail, and one when it works again."""
        now = asyncio.get_running_loop().time()
        if judged.error is None:
            if self._judging_failed is not None:
                seconds = now - self._judging_failed
                log.warning("judging_works_again task=%s seconds=%.1f", self.task_name, seconds)
            self._judging_failed = None
            self._not_judged.clear()
            self._judged_at = now
            return
        if not judged.passing and not judged.hung:
            return
        self._not_judged.add(stage.group_id)
        if self._judging_failed is None:
            self._judging_failed = max(stage.since, self._judged_at) if judged.hung else now
            log.warning(
                "judging_failed task=%s group=%d error=%s: repeated, and nothing is spent, for judge_give_up_s=%g",
                self.task_name, stage.group_id, judged.error, self._timeouts.judge_give_up_s,
            )  # fmt: skip

    def _away_since(self, stage: Stage, judged: Judged, since: float) -> float | None:
        """The time since when judging has failed for several groups and worked for none; None if it has not."""
        failed = self._judging_failed
        if not (judged.passing or judged.hung) or failed is None or failed > since + RESOLUTION_S:
            return None
        others = self._not_judged - {stage.group_id}
        if judged.hung:  # the others have not timed out yet
            began = asyncio.get_running_loop().time() - self._timeouts.judge_give_up_s / 2
            others |= {other.group_id for other in self.stages if other.name == "judging" and other.since <= began}
        return failed if others - {stage.group_id} else None

    def _break(self, away_since: float, judged: Judged) -> None:
        seconds = asyncio.get_running_loop().time() - away_since
        self.broken = self.broken or RewardUnavailable(
            f"judging groups of task {self.task_name!r} has failed for {seconds:.0f} s, and worked for none of them "
            f"(judge_give_up_s={self._timeouts.judge_give_up_s:g}); the last error: {judged.error}. No try was spent, "
            "and the responses are kept; produce again when the reward or filter works"
        )

    def forget_outage(self) -> None:
        """Producing ended because of an outage of the reward: the next call gives the reward its full time again.

        No batch relies on groups for which it failed: if they are the cause, other prompts replace them.
        """
        for group_id in self._not_judged:
            self._cut_short(group_id)
        self._not_judged.clear()
        self._judging_failed = None
        self._aside.clear()

    def _pause_future(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        if self._pause is None or self._pause.get_loop() is not loop:  # strategies outlive event loops, as buffers do
            self._pause = loop.create_future()
            if self.pausing:
                self._pause.set_result(None)
        return self._pause

    async def _store(self, back: _Return) -> None:
        """Put a group, without what cannot be stored of it; it is counted in the very turn in which it is back."""
        members, error = back.members, None
        for resort in ("as it is", "without those that are refused", "without any"):
            try:
                (record,) = await self._internals.put(
                    (members,), self.task_name, model_step=back.model_step, train_step=back.train_step
                )
            except (LostLease, BufferClosed, DuplicateGroup) as gone:
                # Someone else has it, the buffer gave back all that was in flight, or a put that failed was done.
                log.info("group_gone task=%s group=%s reason=%s", self.task_name, back.issued[0].group_id, gone)
                back.tell(members, None, error)
                return
            except InvalidInput as refused:
                if resort == "without any":
                    raise
                log.warning("group_refused task=%s group=%s error=%s", self.task_name, back.issued[0].group_id, refused)
                by_judge = self._judge.rewards and re.search(r"\$\[\d+\]\.reward\b", str(refused))
                what = "the reward" if by_judge else "what the agent loop returned"
                error = f"{what} cannot be stored: {refused}"
                everyone = resort == "without those that are refused"
                members = refused_members(members, back.issued, error, everyone=everyone)
                settle_tries(members, back.issued, self._max_tries)
            else:
                back.tell(members, _status_of(record), error)
                return

    def _count(self, outcome: Outcome) -> None:
        self.figures.count(outcome)
        overran = outcome.group_id in self._overran
        self._overran.discard(outcome.group_id)
        if outcome.failed:
            # A pause cancels all running groups at once, for the same reason, so they count as one failure.
            self.failures_in_a_row += not overran or self._overrun_pause != self.pauses
            self._overrun_pause = self.pauses if overran else self._overrun_pause
            self.overran_pause = overran
            self.failing[outcome.group_id] = outcome.status is Status.FAILED
            self.last_error = outcome.error
        if outcome.kept is not None:
            self.rejections_in_a_row = 0 if outcome.kept else self.rejections_in_a_row + 1
            self.last_error = self.last_error if outcome.kept else outcome.error or self.last_error
        if outcome.status is Status.COMPLETED:
            self.failures_in_a_row = 0
            self.failing.clear()
        if outcome.status not in (Status.COMPLETED, Status.FAILED, Status.FILTERED, None):
            if outcome.attempt >= self._tail_after:
                self.stragglers.add(outcome.group_id)
        else:
            self.stragglers.discard(outcome.group_id)
            self._suspects.pop(outcome.group_id, None)
            self._aside.pop(outcome.group_id, None)


def _status_of(record: Record) -> Status | None:
    """The status of a group that was put; None if it was too old, and left at once."""
    ended = record.place is not Place.BUFFERED and record.status not in (Status.FAILED, Status.FILTERED)
    return None if ended else record.status


def look_at(future: asyncio.Future[Any]) -> None:
    """Take note of an exception that nobody else will, so that asyncio does not complain of it."""
    if not future.cancelled():
        future.exception()
