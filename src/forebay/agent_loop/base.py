"""The contract between a producer and the code that generates responses, one group at a time.

What a loop promises
- `generate_group` gets the members of one group and returns all of them: the same rollout ids, each with a status
  (COMPLETED, ABORTED, FAILED) and its response. It may return more samples of a rollout (segments 0, 1, ...), never
  fewer rollouts, and never members of another group. Members that are already COMPLETED are returned unchanged.
- Responses are cumulative: with partial rollout a member may arrive with tokens. The response that is returned then
  starts with these tokens, and their versions stay in front. Without partial rollout `generate_group` drops the
  response of an earlier attempt before it calls `generate`; it never drops tokens of this attempt.
- `pause` asks for an early end: running members return soon, as ABORTED with the tokens they have. Until `resume`,
  members that arrive are returned at once, unchanged. Both may be called repeatedly.
- When `generate_group` is cancelled, the producer takes the members from the list that it passed in.
- The status decides: a member is COMPLETED only if the loop says so when it returns. A finish reason, or a status that
  an earlier turn left in the sample, never makes an interrupted member complete.
- Changes of a sample (`message`, `extra_fields`, ...) are kept together with its tokens and dropped together with them:
  a reset returns to the prompt as issued. State that a partial rollout needs to continue belongs in `loop_state`.
- `idle` returns when the engine has stopped all requests of this loop: only then may it be given new weights.
- An unreachable engine costs time only. If `generate` raises a ConnectionError, or the equivalent of an HTTP client, or
  an error for status 502 to 504, it is called again when the engine may be back. Tokens that it has written into the
  sample stay there, and `enable_partial_rollout` is True: it continues after them, because the weights are the same.
  If it fails again although later calls succeeded, or if the loop can ask its engine and the engine answers, the cause
  is something else (a tool, for example), and the member fails. `EngineUnavailable` stops producing; the members keep
  their tokens and spend no try.

`AgentLoop` implements all of this; a subclass writes `generate` for one sample. Members run concurrently, a member that
raises is FAILED without stopping the others, and a cancel waits for all of them. `FunctionAgentLoop` makes a loop from
an async function of one sample.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

from forebay.agent_loop.outage import DOWN_TIMEOUT_S, Outage, is_outage
from forebay.core.aio import run_user_code, see_through
from forebay.core.rollout import RolloutState, Status, carries_response, finish_status, reset_response
from forebay.errors import EngineUnavailable, ForebayError, InvalidConfig, InvalidGroup, InvalidInput
from forebay.prompts.sources import independent, start_again

log = logging.getLogger(__name__)


class AgentLoop(ABC):
    """Generates responses. Subclasses write `generate`; the rest of the contract is implemented here."""

    takes_weights_while_running: ClassVar[bool] = False
    """Whether the engine may be given new weights without a pause; the loop then records token versions itself."""

    down_timeout_s: float = DOWN_TIMEOUT_S
    """How long the engine may be unreachable before producing stops with `EngineUnavailable`."""

    pauses: int = 0
    """How many pauses were requested."""

    # Created on first use: a subclass need not call our constructor, and a loop may outlive an event loop. The two
    # underscores leave all other names to subclasses of the user.
    __pause: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
    _outage: Outage | None = None
    __calls: int = 0  # of `generate`
    __last_success: int = 0  # the highest number of a call that succeeded
    __traced: frozenset[type[Exception]] = frozenset()  # error types whose traceback was logged

    @abstractmethod
    async def generate(
        self, state: RolloutState, *, enable_partial_rollout: bool
    ) -> RolloutState | Sequence[RolloutState]:
        """Generate the response of one sample: return the same object filled in, or new ones (several: its segments).

        Set `status` (or `finish_reason`, and use `finish_status`). Check `paused`, or wait for `until_paused()`, to end
        early as ABORTED. With partial rollout, continue after `state.response_ids`.
        """

    async def generate_group(
        self, group: list[RolloutState], *, enable_partial_rollout: bool = False
    ) -> list[RolloutState]:
        """Generate every member that is not COMPLETED, concurrently. See the top of this file.

        While this runs, the list holds only members that have ended, so that a running one is never taken for complete.
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
        cancelled: asyncio.CancelledError | None = None
        try:
            if running:
                await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError as error:
            cancelled = error
        stopped = cancelled is not None or any(not task.done() for task in running)
        if stopped:  # by a cancel, or because the engine is unavailable; all members end before this returns
            for task in running:
                task.cancel()
            cancelled = await see_through(asyncio.gather(*running, return_exceptions=True)) or cancelled
        unavailable: BaseException | None = None
        for task, index in running.items():
            if not _failed(task):
                results[index] = task.result()
                continue
            state = members[index]
            if task.cancelled() and not stopped and not self.paused:
                state = failed_member(state, "generate was cancelled from inside")
            else:
                # It never returned, so it is not complete, whatever its status says. Code that ignores cancels may
                # still run and change the sample, so this is a copy.
                state = independent(state.__copy__())
                state.status = Status.ABORTED
                unavailable = unavailable or (None if task.cancelled() else task.exception())
            results[index] = (state,)
        group[:] = [state for states in results for state in states]
        if (reason := cancelled or unavailable) is not None:
            raise reason
        return group

    async def _generate_member(self, state: RolloutState, enable_partial_rollout: bool) -> Sequence[RolloutState]:
        try:
            if not enable_partial_rollout and carries_response(state):
                start_again(state)  # in place: after a cancel the producer takes this object
            result = await self._generate_through_outages(state, enable_partial_rollout)
            members = [result] if isinstance(result, RolloutState) else result
            valid = isinstance(members, (list, tuple)) and all(isinstance(member, RolloutState) for member in members)
            if not valid or not members:
                raise InvalidGroup(f"generate returned {result!r:.80}; expected a RolloutState, or several")
            numbered = len({member.segment for member in members}) == len(members)
            for segment, member in enumerate(members):
                _identify_member(member, state, member.segment if numbered else segment)
        except EngineUnavailable:
            raise
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            # Our own errors explain themselves. An error of the user's code needs its traceback, once per type.
            known = isinstance(error, ForebayError) or type(error) in self.__traced
            self.__traced = self.__traced | {type(error)}
            log.warning(
                "member_failed task=%s rollout=%s error=%s",
                state.task_name, state.rollout_id, message, exc_info=None if known else error,
            )  # fmt: skip
            return (failed_member(state, message),)
        return members

    async def _generate_through_outages(
        self, state: RolloutState, enable_partial_rollout: bool
    ) -> RolloutState | Sequence[RolloutState]:
        """Call `generate`, again and again while the engine is unreachable."""
        failed_at: int | None = None  # the number of calls that had begun when this one last failed
        while True:
            self.__calls += 1
            call = self.__calls
            try:
                result = await self.generate(state, enable_partial_rollout=enable_partial_rollout)
            except Exception as error:
                if isinstance(error, ForebayError) or not is_outage(error):
                    raise
                if failed_at is not None and self.__last_success > failed_at:
                    raise  # a later call succeeded, so the cause is a tool, or this prompt, and not the engine
                failed_at = self.__calls
                waiting = asyncio.ensure_future(self._wait_for_engine(error))
                try:
                    await done_or_paused(self, waiting)
                finally:
                    waiting.cancel()
                if self.paused:
                    state.status = Status.ABORTED
                    return state
                waiting.result()
                # New weights need a pause, which ends this call, unless the engine takes them while it runs.
                if carries_response(state) and not self.takes_weights_while_running:
                    enable_partial_rollout = True
                elif not enable_partial_rollout:
                    start_again(state)
                state.status = Status.INIT
            else:
                if not isinstance(result, RolloutState) or result.status is not Status.ABORTED:
                    self.__last_success = max(self.__last_success, call)
                    self.outage.over()
                return result

    async def _wait_for_engine(self, error: Exception) -> None:
        if await self._engine_answers():
            raise error
        await self.outage.wait(f"{type(error).__name__}: {error}")

    async def _engine_answers(self) -> bool:
        """Whether the engine is known to be reachable, so that the failed connection was to a tool, for example."""
        return False  # the loop of a user has no way to ask its engine

    @property
    def outage(self) -> Outage:
        """Whether the engine is unreachable, and since when."""
        if self._outage is None:
            self._outage = Outage(repr(self)[:200], self.down_timeout_s)
        return self._outage

    def explain_wait(self) -> str | None:
        """Why the loop waits for its engine now, for people; None if it does not."""
        return None if self._outage is None else self._outage.describe()

    def outage_s(self) -> float:
        """How long the engine has been unreachable in total; this time counts toward no timeout."""
        return 0.0 if self._outage is None else self._outage.seconds()

    def excuses(self, group: Sequence[RolloutState]) -> bool:
        """Whether the loop last ended this group early because of a fault outside the group, such as a dead process.

        Its members are then ABORTED and spend no try.
        """
        return False

    # --- pausing --------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Ask running members to end soon. Subclasses that stop an engine extend this, and call it first."""
        self.pauses += 1
        self._pause_event().set()

    async def resume(self) -> None:
        """Generate again. Subclasses that start an engine extend this, and call it last."""
        self._pause_event().clear()

    async def idle(self) -> None:
        """Wait until the engine has stopped all requests of this loop; only then is a pause complete.

        A closed connection is not enough: a server computes for a while longer, and must not be given new weights then.
        The default returns at once; subclasses that can ask their engine override it (see `forebay.engines`).
        """
        return

    async def weights_loaded(self, model_step: int) -> None:
        """The engine was given the weights of this step. Called before anything is generated with them."""
        return

    @property
    def paused(self) -> bool:
        """Whether members have to end early."""
        return self.__pause is not None and self.__pause[1].is_set()

    async def until_paused(self) -> None:
        """Wait for the next pause; returns at once during a pause."""
        await self._pause_event().wait()

    def _pause_event(self) -> asyncio.Event:
        loop = asyncio.get_running_loop()
        if self.__pause is None or self.__pause[0] is not loop:
            paused, event = self.paused, asyncio.Event()
            if paused:
                event.set()
            self.__pause = (loop, event)
        return self.__pause[1]


async def done_or_paused(agent_loop: AgentLoop, future: asyncio.Future[Any]) -> None:
    """Wait until a future is done or the loop is paused; the future is not cancelled."""
    pausing = asyncio.ensure_future(agent_loop.until_paused())
    try:
        await asyncio.wait((future, pausing), return_when=asyncio.FIRST_COMPLETED)
    finally:
        pausing.cancel()


def _failed(task: asyncio.Task[Sequence[RolloutState]]) -> bool:
    return task.cancelled() or task.exception() is not None


def _identify_member(member: RolloutState, issued: RolloutState, segment: int) -> None:
    """Complete the identity of a sample that a loop created itself from the sample that it answers."""
    for name in ("task_name", "group_id", "rollout_id", "attempt"):
        if getattr(member, name) is None:
            setattr(member, name, getattr(issued, name))
    member.segment = segment
    member.num_tries = member.num_tries or issued.num_tries


def failed_member(state: RolloutState, error: str) -> RolloutState:
    """A member that failed: a copy of its prompt, and the error."""
    failed = independent(reset_response(state))
    failed.status = Status.FAILED
    failed.finish_reason = "error"
    failed.error_msg = error
    return failed


Answer: TypeAlias = RolloutState | Sequence[RolloutState] | None


class FunctionAgentLoop(AgentLoop):
    """Calls `function(state)` for every sample.

    The function fills in the sample (and returns None or the sample), or returns new samples. If it leaves the status
    at INIT, the status follows from `finish_reason`; without one, a sample with a response is COMPLETED.

    - `cancel_on_pause`: a pause cancels running calls, and their samples are kept as ABORTED with the tokens written so
      far. Otherwise a pause waits until the calls end.
    - `idle`: an async function that returns when the engine has stopped our requests, like `VLLMControl(url).idle`.
    - `down_timeout_s`: how long a function that raises a ConnectionError is called again. It finds the tokens that it
      has written into the sample, and continues after them or overwrites them.
    """

    def __init__(
        self,
        function: Callable[[RolloutState], Awaitable[Answer]],
        *,
        cancel_on_pause: bool = True,
        idle: Callable[[], Awaitable[None]] | None = None,
        down_timeout_s: float = DOWN_TIMEOUT_S,
    ) -> None:
        if not callable(function) or _is_plain(function):
            raise InvalidConfig(
                f"FunctionAgentLoop got {function!r:.80}; expected an async function of one sample (`async def`)"
            )
        if idle is not None and not callable(idle):
            raise InvalidConfig(f"idle is {idle!r:.80}; expected an async function, or None")
        self.function = function
        self.cancel_on_pause = cancel_on_pause
        self._idle = idle
        self.down_timeout_s = down_timeout_s
        self._outage = Outage(f"the engine of {getattr(function, '__qualname__', function)!s:.100}", down_timeout_s)

    async def idle(self) -> None:
        """Wait for the `idle` function, if one was given."""
        if self._idle is not None:
            await self._idle()

    async def generate(
        self, state: RolloutState, *, enable_partial_rollout: bool
    ) -> RolloutState | Sequence[RolloutState]:
        called = self.function(state)
        if not inspect.isawaitable(called):
            raise _unexpected(called, "an async function (`async def`)")
        until = partial(done_or_paused, self) if self.cancel_on_pause else None
        call = await run_user_code(called, until=until)
        if call.cancelled is not None:
            raise call.cancelled
        stopped = not call.in_time
        if stopped and (call.future.cancelled() or call.future.exception() is not None):
            state.status = Status.ABORTED  # errors that follow from the cancel are not failures of the function
            return state
        answer = call.future.result()
        result = state if answer is None else answer
        members = (result,) if isinstance(result, RolloutState) else result
        if not isinstance(members, (list, tuple)) or not all(isinstance(member, RolloutState) for member in members):
            raise _unexpected(answer, "None, the sample (filled in), or several samples")
        for member in members:
            if member.status is Status.INIT:
                _set_status(member, stopped)
            if member.status is Status.INIT:
                raise InvalidGroup(
                    "the function left response, response_ids and input_ids empty; fill in the answer, or set a status"
                )
        return result


def _is_plain(function: object) -> bool:
    """Whether a callable is a `def` that returns no awaitable; lambdas and wrappers of other functions may."""
    inner = inspect.unwrap(function) if callable(function) else function
    named = inspect.isroutine(inner) and getattr(inner, "__name__", "") != "<lambda>"
    return named and inner is function and not inspect.iscoroutinefunction(function)


def _unexpected(returned: object, expected: str) -> InvalidInput:
    return InvalidInput(f"the function of a FunctionAgentLoop returned {returned!r:.80}; expected {expected}")


def _set_status(state: RolloutState, stopped: bool) -> None:
    if stopped:
        state.status = Status.ABORTED  # it may be incomplete: the finish reason can be that of an earlier turn
    elif state.finish_reason is not None:
        state.status = finish_status(state.finish_reason)
        if state.finish_reason == "tool_calls":
            state.error_msg = (
                "it ended with finish_reason 'tool_calls', which ends a turn: run the tools and continue, or set the "
                "status to COMPLETED if the calls are the answer"
            )
    elif state.response is not None or state.response_ids is not None or state.input_ids is not None:
        state.status = Status.COMPLETED
