"""`FunctionAgentLoop`: an agent loop from an async function of one sample.

It keeps the contract of `AgentLoop` for functions that know nothing of it. It does not retry errors of the function,
except outages of its engine (see `outage`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

from forebay.agent_loop.base import AgentLoop, done_or_paused
from forebay.agent_loop.outage import DOWN_TIMEOUT_S, Outage
from forebay.core.aio import run_user_code
from forebay.core.rollout import RolloutState, Status, finish_status
from forebay.errors import InvalidConfig, InvalidInput

__all__ = ["FunctionAgentLoop"]

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
