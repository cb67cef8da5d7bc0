"""Groups in flight: each from its draw until it is back in the buffer.

One `Works` has all groups that a strategy has in flight for one task, and nothing else starts, stops or finishes them.
A separate asyncio task does the same with each group: rest, generate, judge, put. However that ends (an answer, an
exception, a cancel, a timeout, a loop that ignores cancels), the group returns to the buffer, once, under the attempt
that it was drawn with (G3). If the storage fails then, the group is kept here and put again at the next opportunity. A
finished group is counted, once, and wakes the strategy.

A group whose attempt was cut short (by a timeout, an abort that no pause asked for, or a pause that had to cancel it)
is a suspect: it rests before its next attempt, and no batch relies on it, so that one that always hangs delays none.
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
from forebay.buffer.internal import internals, mark_aborted
from forebay.core.aio import RESOLUTION_S, ignore_exception, run_user_code, see_through, uncancelled
from forebay.core.ledger import Account, Place, Record
from forebay.core.rollout import RolloutState, Status, carries_response, group_status
from forebay.errors import BufferClosed, DuplicateGroup, EngineUnavailable, InvalidInput, LostLease, TooManyFailures
from forebay.produce.judge import Judge, Judged, Judging, Pause
from forebay.produce.members import (
    collect,
    complete_rollouts,
    new_rewards,
    new_tokens,
    prepare,
    refused_members,
    set_aside,
    settle_tries,
    stopped_members,
    untrusted_responses,
)
from forebay.produce.plan import StrategySettings, Suspects, acceptance, too_many_rejections
from forebay.produce.stats import Elsewhere, Figures, Outcome, Stage
from forebay.prompts.sources import independent

log = logging.getLogger(__name__)


class Steps(msgspec.Struct):
    """The two clocks of a task: results are for this train step, and these weights generate them."""

    train_step: int
    model_step: int


class _Return(NamedTuple):
    """A group to put; `tell` gets the members as they were put, the status of the group, and an error of the put."""

    members: list[RolloutState]
    issued: Sequence[RolloutState]
    train_step: int | None
    model_step: int | None
    failed: bool
    tell: Callable[[Sequence[RolloutState], Status | None, str | None], None]


class Works:
    """The groups in flight of one task."""

    def __init__(self, task_name: str, buffer: ReplayBuffer, judge: Judge, settings: StrategySettings) -> None:
        self.task_name = task_name
        self.figures = Figures()
        self.failures_in_a_row = 0
        self._failing: dict[int, bool] = {}  # groups of these failures; whether they ended as failed
        self.rejections_in_a_row = 0
        self._elsewhere = Elsewhere()
        self._failures_overall = 0  # in a row, of all producers
        self.last_error: str | None = None
        self._overran_pause = False  # whether the last error is of an attempt that a pause had to cancel
        self.broken: BaseException | None = None
        self.on_end: Callable[[Outcome, Sequence[RolloutState]], None] | None = None  # of an attempt
        self.stragglers: set[int] = set()
        self.batch_size = 1
        self.pause = Pause()
        self._suspects = Suspects()
        self.judging = Judging(
            task_name, judge, settings, self.pause, self._suspects, self._keeps_rejected, lambda: self.stages
        )
        self._internals = internals(buffer)
        self._judge = judge
        self._settings = settings
        self._partial, self._max_tries = settings.enable_partial_rollout, settings.max_tries
        self._running: dict[asyncio.Task[None], AgentLoop] = {}
        self._unbegun: dict[asyncio.Task[None], list[RolloutState]] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._back: set[asyncio.Task[None]] = set()  # running tasks whose group is back in the buffer
        self._late: list[_Return] = []  # the storage failed when they were put
        self._stages: dict[asyncio.Task[None], Stage] = {}
        self._overran: set[int] = set()  # groups that a pause had to cancel, and that are not counted yet
        self._overrun_pause = 0  # the last pause for which a failure was counted
        self._loop: asyncio.AbstractEventLoop | None = None  # on which the last group was started

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
        """The stage of each group in flight, oldest first."""
        stages = [stage for task, stage in self._stages.items() if task not in self._back]
        return sorted(stages, key=lambda stage: stage.since)

    def age_s(self, stage: Stage) -> float:
        """For how long a group has been at its stage; for any thread."""
        return 0.0 if self._loop is None else self._loop.time() - stage.since

    @property
    def accepted(self) -> float:
        """The share of groups that filters keep, as measured; all of them when rejected ones are accepted."""
        if self._keeps_rejected():
            return 1.0
        verdicts = self.figures.verdicts
        kept = sum(verdicts)
        return acceptance(kept, len(verdicts) - kept)

    @property
    def exhausted(self) -> bool:
        """Whether the filters rejected more groups in a row than the budget allows."""
        return self.rejections_in_a_row >= self._settings.budgets.rejections(self.batch_size)

    def _keeps_rejected(self) -> bool:
        return self.exhausted and self._settings.budgets.when_exhausted == "accept"

    def check(self) -> None:
        """Raise an unexpected error, or if too many attempts failed or groups were rejected in a row."""
        broken, self.broken = self.broken, None
        if broken is not None:
            raise broken
        attempts = max(self.failures_in_a_row, self._failures_overall)
        if attempts >= self._settings.budgets.max_consecutive_failures:
            self.failures_in_a_row = self._failures_overall = 0
            failed, groups = sum(self._failing.values()), len(self._failing)
            self._failing.clear()
            advice = "let `generate` end early when the loop is `paused`, or raise pause_timeout_s"
            advice = f" (pauses had to cancel them: {advice})" if self._overran_pause else ""
            raise TooManyFailures(
                f"{attempts} attempts in a row at groups of task {self.task_name!r} failed, and none was completed; "
                f"the last error: {self.last_error}{advice}. Of these groups {failed} spent their last try and ended "
                f"as failed, {groups - failed} are back in the buffer; fix the cause and produce again, or raise "
                "Budgets(max_consecutive_failures=...)"
            )
        if self.exhausted and self._settings.budgets.when_exhausted == "raise":
            rejections, self.rejections_in_a_row = self.rejections_in_a_row, 0
            raise too_many_rejections(self.task_name, rejections, self.last_error)

    def hear(self, account: Account) -> None:
        """Count what other producers of the task have done since the last time, for the budgets and the acceptance."""
        completed, rejected, failures = self._elsewhere.hear(account)
        self.rejections_in_a_row = rejected + (0 if completed else self.rejections_in_a_row)
        self._failures_overall = failures + (0 if completed else self._failures_overall)
        self.figures.verdicts.extend([True] * completed + [False] * rejected)

    @property
    def waiting_stragglers(self) -> set[int]:
        """Groups that were returned `tail_after` times and are not in flight: they are drawn before all others."""
        return self.stragglers - {stage.group_id for stage in self._stages.values()} if self.stragglers else set()

    @property
    def agent_loops(self) -> list[AgentLoop]:
        """The loops that are generating, each once."""
        return list(dict.fromkeys(self._running.values()))

    def start(self, group: Sequence[RolloutState], agent_loop: AgentLoop, steps: Steps) -> None:
        """Have a drawn group generated, judged and put."""
        name = f"group {group[0].group_id} of {self.task_name}"
        attempt = group[0].attempt or 0
        if attempt > self._settings.tail_after:
            self.stragglers.add(group[0].group_id or 0)
        # An eager start would run the user's code inside the strategy's own step.
        task = asyncio.create_task(self._process(list(group), agent_loop, steps), name=name)
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
        """Cancel all groups; they are back in the buffer when this returns, also if the caller is cancelled."""
        cancelled = None
        while len(self):
            for task in self._running:
                task.cancel()
            ending = asyncio.gather(*self._running, *self._returning, return_exceptions=True)
            cancelled = await see_through(ending) or cancelled
        if self._late:
            late = asyncio.ensure_future(self.bring_back())
            cancelled = await see_through(late) or cancelled
            ignore_exception(late)
        if cancelled is not None:
            raise cancelled

    async def give_back(self, groups: Sequence[list[RolloutState]]) -> None:
        """Return groups that were drawn and not started, as ABORTED with the tokens that they have."""
        for group in groups:
            mark_aborted(group)
            self._late.append(_Return(group, group, None, None, False, lambda stored, status, error: None))
        await uncancelled(self.bring_back())

    async def bring_back(self) -> None:
        """Put groups that the storage did not take before; those that it does not take now are kept again."""
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
            self._internals.nudge()  # a strategy that took them for groups in flight tries again
            raise failed

    async def wait(self, timeout_s: float) -> None:
        """Until nothing is in flight, or for `timeout_s`."""
        if len(self):
            await asyncio.wait((*self._running, *self._returning), timeout=timeout_s)

    def begin_pause(self) -> None:
        """From now on judging is short of time, and no group may be started."""
        self.pause.begin()
        self._internals.nudge()

    # --- one group ------------------------------------------------------------------------------------

    async def _process(self, group: list[RolloutState], agent_loop: AgentLoop, steps: Steps) -> None:
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
                members, error = stopped_members(issued, working, partial=self._partial), None
            else:
                stage.name, stage.since = "generating", clock()
                members, error, cancelled = await self._generate(issued, working, agent_loop, known_step)
                seconds = None if members is issued else clock() - stage.since
                tokens = new_tokens(members, issued)
            if cancelled is not None or not rested:
                if not self._judge.idle:
                    set_aside(members)
            else:
                stage.name, stage.since = "judging", clock()
                answered = any(state.status is Status.COMPLETED for state in members)
                if answered and not self._judge.idle:
                    judged, judge_error, cancelled = await self.judging.run(members, stage)
                    self.broken = self.broken or judged.outage
                    error = judge_error or error
                    if judge_error or not any(state.unjudged for state in members):
                        judge_s = clock() - stage.since
        except Exception as wrong:
            # A sample has an unforeseen value; the group returns to the buffer in any case.
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

        back = _Return(members, issued, steps.train_step, model_step, error is not None, count)
        stage.name, stage.since = "storing", clock()
        storing = asyncio.ensure_future(self._store(back))
        cancelled = await see_through(storing) or cancelled
        if storing.cancelled() or storing.exception() is not None:
            self._late.append(back)
        storing.result()
        if cancelled is not None:
            raise cancelled

    async def _rest(self, stage: Stage) -> tuple[bool, asyncio.CancelledError | None]:
        """Wait until a suspect may be tried again, or for a pause; whether it may, and a cancel meanwhile."""
        clock = asyncio.get_running_loop().time
        _, until = self._suspects.get(stage.group_id, (0, 0.0))
        stage.name = "resting"
        try:
            while (left_s := until - clock()) > RESOLUTION_S and not self.pause.on:
                await self.pause.wait(left_s)
        except asyncio.CancelledError as stopped:
            return False, stopped
        return until - clock() <= RESOLUTION_S, None

    async def _generate(
        self, issued: list[RolloutState], working: list[RolloutState], agent_loop: AgentLoop, model_step: int | None
    ) -> tuple[list[RolloutState], str | None, asyncio.CancelledError | None]:
        """The members after the attempt, an error that cost a try, and a cancel meanwhile."""
        if all(state.status is Status.COMPLETED for state in issued):
            return issued, None, None  # they only wait to be judged
        pauses, group_id = (self.pause.count, agent_loop.pauses), issued[0].group_id or 0
        generating, in_time, cancelled = await run_user_code(
            self._generate_group(agent_loop, working),
            until=lambda generating: self._until_generated(generating, agent_loop),
            cancel_timeout_s=self._settings.timeouts.cancel_timeout_s,
        )
        now = asyncio.get_running_loop().time()
        partial = self._partial or agent_loop.outage.away  # the same weights continue what an outage interrupted
        returned: object = working
        if not generating.done():
            # The call that was left behind may still change its members, and must not change the stored ones.
            returned = [independent(state.__copy__()) for state in working if isinstance(state, RolloutState)]
        elif not generating.cancelled() and generating.exception() is None:
            returned = generating.result()
        raised = None if not generating.done() or generating.cancelled() else generating.exception()
        if isinstance(raised, EngineUnavailable):
            self.broken = self.broken or raised  # the strategy raises it; the group lost nothing but time
            return stopped_members(issued, working, partial=True), None, cancelled
        cut = None
        if cancelled is not None or (in_time and generating.cancelled() and (self.pause.on or agent_loop.paused)):
            if self.pause.overdue is None or cancelled is None:
                return stopped_members(issued, returned, partial=partial), None, cancelled
            cut = f"did not end within {self.pause.overdue} of a pause"
        elif not in_time:
            cut = f"not generated within member_timeout_s={self._settings.timeouts.member_timeout_s:g}"
        if cut is not None:
            if cancelled is not None:
                self._overran.add(group_id)
            self._suspects.cut_short(group_id, now)
            members = stopped_members(issued, returned, partial=self._partial)
            return members, settle_tries(members, issued, self._max_tries, aborted=cut), cancelled
        missing = None
        if generating.cancelled():
            missing = "the agent loop cancelled itself"
        elif raised is not None:
            log.warning("agent_loop_raised task=%s group=%s", self.task_name, group_id, exc_info=raised)
            missing = f"the agent loop raised {type(raised).__name__}: {raised}"
        if missing is not None:
            returned = complete_rollouts(returned)
        members = collect(issued, returned, partial=partial, missing=missing, model_step=model_step)
        asked = pauses != (self.pause.count, agent_loop.pauses) or self.pause.on or agent_loop.paused
        excused = asked or agent_loop.excuses(issued)
        aborted = None if excused else "the agent loop ended it early (ABORTED) although no pause was requested"
        if aborted is not None and any(state.status is Status.ABORTED for state in members):
            self._suspects.cut_short(group_id, now)
        return members, settle_tries(members, issued, self._max_tries, aborted=aborted), None

    async def _until_generated(self, generating: asyncio.Future[Any], agent_loop: AgentLoop) -> None:
        """Wait for `member_timeout_s`; outages of the engine do not count. All members of a group begin together."""
        clock = asyncio.get_running_loop().time
        began, away_s = clock(), agent_loop.outage_s()
        while not generating.done():
            left_s = self._settings.timeouts.member_timeout_s + agent_loop.outage_s() - away_s - (clock() - began)
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

    async def _generate_group(self, agent_loop: AgentLoop, working: list[RolloutState]) -> object:
        # A separate coroutine, so that a `generate_group` that is no coroutine function fails like any other.
        continues = any(state.status is not Status.COMPLETED and carries_response(state) for state in working)
        return await agent_loop.generate_group(working, enable_partial_rollout=self._partial or continues)

    async def _store(self, back: _Return) -> None:
        """Put a group, without members that cannot be stored; it is counted in the turn in which it is put."""
        members, error = back.members, None
        for resort in ("as it is", "without those that are refused", "without any"):
            try:
                (record,) = await self._internals.put(
                    (members,),
                    self.task_name,
                    model_step=back.model_step,
                    train_step=back.train_step,
                    failed=back.failed or error is not None,
                )
            except (LostLease, BufferClosed, DuplicateGroup) as gone:
                # Another owner has it, the buffer returned all groups in flight, or an earlier put did succeed.
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
        self._elsewhere.count(outcome)
        self._internals.hurry()
        if outcome.failed:
            # A pause cancels all running groups at once, for the same reason, so they count as one failure.
            counts = not overran or self._overrun_pause != self.pause.count
            self.failures_in_a_row += counts
            self._failures_overall += counts
            self._overrun_pause = self.pause.count if overran else self._overrun_pause
            self._overran_pause = overran
            self._failing[outcome.group_id] = outcome.status is Status.FAILED
            self.last_error = outcome.error
        if outcome.kept is not None:
            self.rejections_in_a_row = 0 if outcome.kept else self.rejections_in_a_row + 1
            self.last_error = self.last_error if outcome.kept else outcome.error or self.last_error
        if outcome.status is Status.COMPLETED:
            self.failures_in_a_row = self._failures_overall = 0
            self._failing.clear()
        if outcome.status not in (Status.COMPLETED, Status.FAILED, Status.FILTERED, None):
            if outcome.attempt >= self._settings.tail_after:
                self.stragglers.add(outcome.group_id)
        else:
            self.stragglers.discard(outcome.group_id)
            self._suspects.pop(outcome.group_id, None)
            self.judging.aside.pop(outcome.group_id, None)


def _status_of(record: Record) -> Status | None:
    """The status of a group that was put; None if it was too old, and left at once."""
    ended = record.place is not Place.BUFFERED and record.status not in (Status.FAILED, Status.FILTERED)
    return None if ended else record.status
