"""An agent loop from a plain async function: the shortest way to produce."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from forebay.agent_loop.base import AgentLoop
from forebay.agent_loop.outage import DOWN_TIMEOUT_S, Outage
from forebay.errors import InvalidConfig, InvalidInput
from forebay.rollout import RolloutState, Status, finish_status

__all__ = ["FunctionAgentLoop"]

Answer: TypeAlias = RolloutState | Sequence[RolloutState] | None


class FunctionAgentLoop(AgentLoop):
    """Calls `function(state)` for every sample.

    The function fills the sample in (and returns None or the sample), or returns new ones. One that leaves the status
    at INIT has it read from `finish_reason`, or is COMPLETED if it has a response. `cancel_on_pause`: a pause cancels
    running calls, and what they wrote into their sample by then is kept as ABORTED; otherwise it waits for their end.
    A function that raises a ConnectionError is called again when the engine may be back, for `down_timeout_s`, with
    what it has written into its sample by then: it continues behind that, or overwrites it.
    `idle`: an async function that returns when the engine has stopped our requests, like `VLLMControl(url).idle`.
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
        """Wait until the engine has stopped our requests, if it was said how."""
        if self._idle is not None:
            await self._idle()

    async def generate(
        self, state: RolloutState, *, enable_partial_rollout: bool
    ) -> RolloutState | Sequence[RolloutState]:
        called = self.function(state)
        if not inspect.isawaitable(called):
            raise _unexpected(called, "an async function (`async def`)")
        answering = asyncio.ensure_future(called)
        pausing = asyncio.ensure_future(self.until_paused()) if self.cancel_on_pause else None
        watched = {answering} if pausing is None else {answering, pausing}
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped = not answering.done()
            for future in watched:
                future.cancel()
            await asyncio.wait(watched)
            raised = None if answering.cancelled() else answering.exception()
        if stopped and (answering.cancelled() or raised is not None):
            # It was told to stop, and what it raises upon that is not held against it.
            state.status = Status.ABORTED
            return state
        answer = answering.result()
        result = state if answer is None else answer
        members = (result,) if isinstance(result, RolloutState) else result
        if not isinstance(members, (list, tuple)) or not all(isinstance(member, RolloutState) for member in members):
            raise _unexpected(answer, "None or the sample, which it has filled in, or several samples")
        for member in members:
            if member.status is Status.INIT:
                _settle_status(member, stopped)
        return result


def _is_plain(function: object) -> bool:
    """Whether something is a `def` that cannot be meant to be awaited; a lambda, or what wraps others, may be."""
    inner = inspect.unwrap(function) if callable(function) else function
    named = inspect.isroutine(inner) and getattr(inner, "__name__", "") != "<lambda>"
    return named and inner is function and not inspect.iscoroutinefunction(function)


def _unexpected(returned: object, expected: str) -> InvalidInput:
    return InvalidInput(f"the function of a FunctionAgentLoop returned {returned!r:.80}; expected {expected}")


def _settle_status(state: RolloutState, stopped: bool) -> None:
    if stopped:
        state.status = Status.ABORTED  # nobody says that it is whole: a finish reason may be that of an earlier turn
    elif state.finish_reason is not None:
        state.status = finish_status(state.finish_reason)
        if state.finish_reason == "tool_calls":
            state.error_msg = (
                "it ended with finish_reason 'tool_calls', which ends a turn: run the tools and continue, or set the "
                "status to COMPLETED if the calls are the answer"
            )
    elif state.response is not None or state.response_ids is not None or state.input_ids is not None:
        state.status = Status.COMPLETED
