"""How one group is generated: the contract between a producer and whatever answers prompts.

What a loop promises
- `generate_group` gets the members of one group and returns every one of them: the same rollout ids, each with a
  status (COMPLETED, ABORTED, FAILED) and its response. It may return more samples of a rollout (segments 0, 1, ...),
  never fewer rollouts, and never another group's. Members that are COMPLETED already are kept as they are.
- Cumulative fields: with partial rollout a member may arrive with tokens. The response that comes back then starts
  with them, and versions that it brings along stay in front. Without partial rollout `generate_group` drops what an
  earlier attempt left before it calls `generate`; what this attempt generated, turn by turn, is never dropped.
- `pause` asks for an early end: members that are under way come back soon, as ABORTED with the tokens they have.
  Until `resume`, everything that arrives comes back at once, untouched. Both may be called again and again.
- When `generate_group` is cancelled, whatever is in the list that it was given counts as what there is.
- The status decides: a member is COMPLETED only if the loop says so when it returns. What a turn in between left in a
  sample (a finish reason, or the status of a call to another loop) never makes an interrupted member complete.
- Whatever a loop changes in a sample (`message`, `extra_fields`, ...) is kept with its tokens, and dropped with them:
  a reset returns to the prompt as issued. What it needs to continue a partial rollout belongs in `loop_state`.
- `idle` returns when the engine has stopped all requests of this loop: only then may it be given new weights.
- An engine that is away costs time only. `generate` raises a ConnectionError, or what HTTP clients make of one, or of a
  status 502 to 504: it is called again when the engine may be back. Tokens that it has written into the sample by then
  stay there, and `enable_partial_rollout` is True: it continues behind them, as the weights are the same. If it fails
  again although others succeeded meanwhile, or if the loop can ask its engine and that answers, it was something else
  (a tool, say), and the member fails. `EngineUnavailable` ends producing; the members keep their tokens, and spend no
  try.

`AgentLoop` keeps all that for you if you write `generate` for one sample: members run concurrently, one that raises is
FAILED and keeps none of its siblings from finishing, and a cancel waits for all of them.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from forebay.agent_loop.outage import DOWN_TIMEOUT_S, Outage, is_outage
from forebay.errors import EngineUnavailable, ForebayError, InvalidGroup
from forebay.prompts import independent, start_again
from forebay.rollout import RolloutState, Status, carries_response, reset_response

__all__ = ["AgentLoop", "failed_member", "identify_member"]

log = logging.getLogger(__name__)


class AgentLoop(ABC):
    """Answers prompts. Write `generate`; everything else is here."""

    takes_weights_while_running: ClassVar[bool] = False
    """Whether the engine behind it may get new weights without a pause; it then versions its tokens itself."""

    down_timeout_s: float = DOWN_TIMEOUT_S
    """How long the engine may be away before producing ends with `EngineUnavailable`."""

    pauses: int = 0
    """How often a pause was asked for."""

    # Made at the first use: a subclass need not call our constructor, and a loop may outlive an event loop. Two
    # underscores, so that a subclass of the user's may call its own attributes what it likes.
    __pause: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
    _outage: Outage | None = None
    __begun: int = 0  # calls of `generate`
    __answered: int = 0  # the number of the last of them to begin that succeeded
    __traced: frozenset[type[Exception]] = frozenset()  # kinds of errors whose traceback was logged

    @abstractmethod
    async def generate(
        self, state: RolloutState, *, enable_partial_rollout: bool
    ) -> RolloutState | Sequence[RolloutState]:
        """Answer one sample: the same object filled in, or new ones (several: its segments).

        Set `status` (or `finish_reason`, and use `finish_status`). Look at `paused`, or wait for `until_paused()`,
        to end early as ABORTED. With partial rollout, continue after `state.response_ids`.
        """

    async def generate_group(
        self, group: list[RolloutState], *, enable_partial_rollout: bool = False
    ) -> list[RolloutState]:
        """Answer every member that is not COMPLETED, concurrently. See the top of this file.

        While it runs, the list has only members that have ended: nobody mistakes one that runs for complete.
        """
        members = list(group)
        results: list[Sequence[RolloutState]] = [(state,) for state in members]
        running: dict[asyncio.Task[Sequence[RolloutState]], int] = {}
        group.clear()
        for index, state in enumerate(members):
            if state.status is not Status.COMPLETED:
                if not self.paused:
                    member = self._generate_member(state, enable_partial_rollout)
                    task = asyncio.create_task(member, name=f"rollout {state.rollout_id}")
                    task.add_done_callback(lambda ended: None if _failed(ended) else group.extend(ended.result()))
                    running[task] = index
                    continue
                state.status = Status.ABORTED
            group.append(state)
        unavailable: BaseException | None = None
        stopped = True
        try:
            if running:
                await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            stopped = any(not task.done() for task in running)
        finally:
            # A cancel, or an engine that cannot be used, gets here with members that still run; they end before we do.
            for task in running:
                task.cancel()
            if any(not task.done() for task in running):
                await asyncio.wait(running)
            for task, index in running.items():
                if not _failed(task):
                    results[index] = task.result()
                    continue
                state = members[index]
                if task.cancelled() and not stopped and not self.paused:
                    state = failed_member(state, "generate was cancelled from inside")
                else:
                    # It never returned: whatever it says of itself, it is not complete. A part of it that ignores
                    # cancels may still run and change the sample, so what there is now is copied.
                    state = independent(state.__copy__())
                    state.status = Status.ABORTED
                    unavailable = unavailable or (None if task.cancelled() else task.exception())
                results[index] = (state,)
            group[:] = [state for states in results for state in states]
        if unavailable is not None:
            raise unavailable
        return group

    async def _generate_member(self, state: RolloutState, enable_partial_rollout: bool) -> Sequence[RolloutState]:
        try:
            if not enable_partial_rollout and carries_response(state):
                start_again(state)  # in place: when the group is cancelled, this very sample is what there is
            result = await self._generate_through_outages(state, enable_partial_rollout)
            members = [result] if isinstance(result, RolloutState) else result
            well = isinstance(members, (list, tuple)) and all(isinstance(member, RolloutState) for member in members)
            if not well or not members:
                raise InvalidGroup(f"generate returned {result!r:.80}; expected a RolloutState, or several")
            numbered = len({member.segment for member in members}) == len(members)
            for segment, member in enumerate(members):
                identify_member(member, state, member.segment if numbered else segment)
        except EngineUnavailable:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            # An engine's refusal explains itself; an error in a loop of the user's own needs its traceback, once.
            known = isinstance(error, ForebayError) or type(error) in self.__traced
            self.__traced = self.__traced | {type(error)}
            log.warning(
                "member_failed task=%s rollout=%s error=%s",
                state.task_name, state.rollout_id, said, exc_info=None if known else error,
            )  # fmt: skip
            return (failed_member(state, said),)
        return members

    async def _generate_through_outages(
        self, state: RolloutState, enable_partial_rollout: bool
    ) -> RolloutState | Sequence[RolloutState]:
        failed_at: int | None = None  # how many calls had begun when this one failed last
        while True:
            self.__begun += 1
            call = self.__begun
            try:
                result = await self.generate(state, enable_partial_rollout=enable_partial_rollout)
            except Exception as error:
                if isinstance(error, ForebayError) or not is_outage(error):
                    raise
                if failed_at is not None and self.__answered > failed_at:
                    raise  # a later call succeeded: it is not the engine, but a tool, say, or this very prompt
                failed_at = self.__begun
                waiting = asyncio.ensure_future(self._wait_for_engine(error))
                pausing = asyncio.ensure_future(self.until_paused())
                try:
                    await asyncio.wait((waiting, pausing), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
                    pausing.cancel()
                if self.paused:
                    state.status = Status.ABORTED
                    return state
                waiting.result()
                # Weights change in a pause, which ends this call; unless the engine takes them while it runs.
                if carries_response(state) and not self.takes_weights_while_running:
                    enable_partial_rollout = True
                elif not enable_partial_rollout:
                    start_again(state)
                state.status = Status.INIT
            else:
                if not isinstance(result, RolloutState) or result.status is not Status.ABORTED:
                    self.__answered = max(self.__answered, call)
                    self.outage.over()
                return result

    async def _wait_for_engine(self, error: Exception) -> None:
        if await self._engine_answers():
            raise error
        await self.outage.wait(f"{type(error).__name__}: {error}")

    async def _engine_answers(self) -> bool:
        """Whether the engine is known to be up, so that a connection that failed was another one, to a tool, say."""
        return False  # a loop of the user's own has nobody to ask

    @property
    def outage(self) -> Outage:
        """Whether the engine is away, and since when."""
        if self._outage is None:
            self._outage = Outage(repr(self)[:200], self.down_timeout_s)
        return self._outage

    def explain_wait(self) -> str | None:
        """What the engine is waited for at the moment, for people; None if it is not."""
        return None if self._outage is None else self._outage.describe()

    def outage_s(self) -> float:
        """How long the engine was away so far, in all; this time counts for no timeout."""
        return 0.0 if self._outage is None else self._outage.seconds()

    def excuses(self, group: Sequence[RolloutState]) -> bool:
        """Whether the loop last ended this group early because of a fault outside of it, such as a dead process.

        Its members are ABORTED then, and spend no try.
        """
        return False

    # --- pausing --------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Ask what is under way to end soon. Subclasses that stop an engine extend this, and call it first."""
        self.pauses += 1
        self._pause_event().set()

    async def resume(self) -> None:
        """Generate again. Subclasses that start an engine extend this, and call it last."""
        self._pause_event().clear()

    async def idle(self) -> None:
        """Wait until the engine has stopped all requests of this loop; a pause is over only then.

        A closed connection is not enough: a server computes on for a while, and new weights must not meet that. Nothing
        to wait for unless a subclass says how: see `forebay.engines`.
        """
        return

    async def weights_loaded(self, model_step: int) -> None:
        """The engine was given the weights of this step; called before anything is generated with them."""
        return

    @property
    def paused(self) -> bool:
        """Whether members shall end early."""
        return self.__pause is not None and self.__pause[1].is_set()

    async def until_paused(self) -> None:
        """Wait for the next pause (or the one that is on)."""
        await self._pause_event().wait()

    def _pause_event(self) -> asyncio.Event:
        loop = asyncio.get_running_loop()
        if self.__pause is None or self.__pause[0] is not loop:
            paused, event = self.paused, asyncio.Event()
            if paused:
                event.set()
            self.__pause = (loop, event)
        return self.__pause[1]


def _failed(task: asyncio.Task[Sequence[RolloutState]]) -> bool:
    return task.cancelled() or task.exception() is not None


def identify_member(member: RolloutState, issued: RolloutState, segment: int) -> None:
    """Give a sample that a loop built anew the identity of the one that it answers, where it has none."""
    for name in ("task_name", "group_id", "rollout_id", "attempt"):
        if getattr(member, name) is None:
            setattr(member, name, getattr(issued, name))
    member.segment = segment
    member.num_tries = member.num_tries or issued.num_tries


def failed_member(state: RolloutState, error: str) -> RolloutState:
    """A member that failed: its prompt, with lists and dicts of its own, and why."""
    failed = independent(reset_response(state))
    failed.status = Status.FAILED
    failed.finish_reason = "error"
    failed.error_msg = error
    return failed
