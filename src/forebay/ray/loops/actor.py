"""The actor side of `RayAgentLoop`: one agent loop in its own process.

An actor that Ray (re)starts has no loop. It accepts groups only after `start`, and only under the epoch that it was
started with, so that no group runs on a loop that lacks the pause or the weights of the other actors. Groups are sent
as codec frames. Exceptions of user code are sent as strings, so that none of them has to be pickled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import ray

from forebay.agent_loop.base import AgentLoop, failed_member
from forebay.codec.frame import decode_group, encode_group
from forebay.core.rollout import Group, RolloutState
from forebay.core.validate import check_group
from forebay.errors import EngineRestarted, EngineUnavailable, InvalidConfig, InvalidGroup, InvalidInput
from forebay.prompts.sources import independent

log = logging.getLogger(__name__)

# Errors of an engine that keep their type when an actor sends them; subclasses first.
KINDS = {"EngineRestarted": EngineRestarted, "EngineUnavailable": EngineUnavailable}


class RemoteError(NamedTuple):
    """An exception as strings."""

    message: str  # with its type
    traceback: str
    kind: str = "EngineError"  # or a key of `KINDS`: these errors spend no try


class Reply(NamedTuple):
    """How a call ended.

    `kind`: "done", "raised" (see `error`), "cancelled", "restarted" (cancelled, because the actor was started again) or
    "refused" (not begun, because the actor was started again). A group is returned as frame and references, also if the
    call was cancelled or raised; None: no sample was returned.
    """

    kind: str
    frame: bytes | None = None
    references: Sequence[Any] = ()
    error: RemoteError | None = None
    value: Any = None


class MethodCall(NamedTuple):
    """A call of a method of the loop. `version` orders calls that are repeated on restarted actors; 0: not repeated."""

    version: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LoopActor:
    """Runs one agent loop on the event loop of an async actor."""

    def __init__(self) -> None:
        self._loop: AgentLoop | None = None
        self._epoch = 0  # 0: accepts no groups
        self._sequence = 0  # of the last pause or resume
        self._paused = False
        self._versions: dict[str, int] = {}  # of the last repeated call, by method
        self._running: dict[int, asyncio.Future[Any]] = {}
        self._stopped: set[int] = set()  # calls to stop that have not arrived: a large one may be overtaken
        self._starting = asyncio.Lock()

    @ray.method(max_task_retries=-1)
    async def ping(self) -> None:
        """Returns when the actor runs, however long Ray needs to restart it. Ray retries no other call."""

    async def start(
        self, epoch: int, make_loop: Callable[[], AgentLoop], sequence: int, paused: bool, calls: Sequence[MethodCall]
    ) -> bool | RemoteError:
        """Make the loop if there is none, bring it up to date, and accept groups under this epoch only.

        Returns whether the loop takes weights while it runs.
        """
        async with self._starting:
            self._epoch = 0
            for running in self._running.values():  # no caller waits for them any more
                running.cancel()
            try:
                loop = self._loop
                if loop is None:
                    _end_process_with_this_thread()
                    loop = make_loop()
                    if not isinstance(loop, AgentLoop):
                        raise InvalidConfig(f"make_loop returned {loop!r:.80}; expected an AgentLoop")
                    self._loop = loop
                await self._set_paused(loop, sequence, paused)
                for call in sorted(calls):
                    await self._call(loop, call)
            except Exception as error:
                return _remote_error(error)
            self._epoch = epoch
            return bool(loop.takes_weights_while_running)

    async def watch(self, epoch: int) -> None:
        """Never returns while the actor runs under this epoch, so that the caller notices its death."""
        if epoch == self._epoch:
            await asyncio.Event().wait()

    async def generate(
        self, epoch: int, number: int, frame: bytes, references: Sequence[Any], enable_partial_rollout: bool
    ) -> Reply:
        """Generate a group."""
        # As in a local loop, members may be changed in place, so they must not share lists and dicts.
        group = [independent(state) for state in decode_group(frame, references)]
        reply = await self._run(
            epoch, number, lambda loop: loop.generate_group(group, enable_partial_rollout=enable_partial_rollout)
        )
        if reply.kind == "refused":
            return reply
        returned = reply.value if reply.kind == "done" else group
        carried: list[Any] = []
        try:
            encoded = _encode_returned(returned, decode_group(frame, references), carried)
        except Exception as error:
            return Reply("raised", error=_remote_error(error))
        return reply._replace(frame=encoded, references=carried, value=None)

    async def set_paused(self, epoch: int, number: int, sequence: int, paused: bool) -> Reply:
        """Pause or resume, unless a later request came first."""
        return await self._run(epoch, number, lambda loop: self._set_paused(loop, sequence, paused))

    async def call(self, epoch: int, number: int, call: MethodCall) -> Reply:
        """Call a method of the loop."""
        return await self._run(epoch, number, lambda loop: self._call(loop, call))

    async def stop(self, number: int) -> None:
        """Cancel a call; it replies with the samples as they are."""
        running = self._running.get(number)
        if running is None:
            self._stopped.add(number)
        else:
            running.cancel()

    async def close(self) -> None:
        """Close the loop, if it has a `close` method."""
        close = getattr(self._loop, "close", None)
        if callable(close):
            await _awaited(close())

    # --- internals ------------------------------------------------------------------------------------

    async def _run(self, epoch: int, number: int, work: Callable[[AgentLoop], Awaitable[Any]]) -> Reply:
        """Run work on the loop, in a task that `stop` can cancel."""
        loop = self._loop
        if loop is None or epoch != self._epoch:
            return Reply("refused")

        async def working() -> Any:
            return await work(loop)

        running = self._running[number] = asyncio.ensure_future(working())
        if number in self._stopped:
            self._stopped.discard(number)
            running.cancel()
        try:
            await asyncio.wait((running,))
        finally:
            del self._running[number]
        if running.cancelled():
            return Reply("cancelled" if epoch == self._epoch else "restarted")
        error = running.exception()
        if error is not None:
            return Reply("raised", error=_remote_error(error))
        return Reply("done", value=running.result())

    async def _set_paused(self, loop: AgentLoop, sequence: int, paused: bool) -> None:
        if sequence <= self._sequence:
            return
        self._sequence = sequence
        before, self._paused = self._paused, paused
        if paused:
            await loop.pause()
        elif before:
            await loop.resume()

    async def _call(self, loop: AgentLoop, call: MethodCall) -> Any:
        if call.version and self._versions.get(call.method, 0) >= call.version:
            return None
        method = getattr(loop, call.method, None)
        if not callable(method):
            raise InvalidInput(f"{type(loop).__name__} has no method {call.method!r}")
        args = [await _value(arg) for arg in call.args]
        kwargs = {name: await _value(arg) for name, arg in call.kwargs.items()}
        result = await _awaited(method(*args, **kwargs))
        if call.version:
            self._versions[call.method] = call.version
        return result


def _encode_returned(returned: object, issued: Group, references: list[Any]) -> bytes | None:
    """The samples that a loop returned, as a frame. A member that cannot be encoded is FAILED; the others are kept.

    `issued`: the group as the loop got it. `references` is extended by the references in the frame.
    """
    found = returned if isinstance(returned, (list, tuple)) else ()
    states = [state for state in found if isinstance(state, RolloutState)]
    if not states:
        return None
    try:
        check_group(states, issued[0].task_name or "")
        return encode_group(states, references)
    except _REFUSALS:
        references.clear()
    members: list[RolloutState] = []
    prompts: dict[int | None, RolloutState] = {}
    for state in issued:
        prompts.setdefault(state.rollout_id, state)
    for prompt in prompts.values():
        answers = [state for state in states if state.rollout_id == prompt.rollout_id]
        try:
            for answer in answers:
                answer.attempt = prompt.attempt
                answer.task_name = prompt.task_name if answer.task_name is None else answer.task_name
                answer.group_id = prompt.group_id if answer.group_id is None else answer.group_id
            if answers:
                if check_group(answers, prompt.task_name or "")[0] != prompt.group_id:
                    raise InvalidGroup(f"the agent loop returned it as a member of group {answers[0].group_id}")
                encode_group(answers, [])
            members += answers
        except _REFUSALS as refusal:
            members.append(failed_member(prompt, f"the agent loop returned a sample that cannot be sent: {refusal}"))
    return encode_group(members, references) if members else None


_REFUSALS = (InvalidInput, TypeError, ValueError, AttributeError)


async def _value(arg: Any) -> Any:
    return await arg if isinstance(arg, ray.ObjectRef) else arg


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _remote_error(error: BaseException) -> RemoteError:
    name = type(error).__name__
    try:
        kind = next((kind for kind, found in KINDS.items() if isinstance(error, found)), "EngineError")
        return RemoteError(f"{name}: {error}", "".join(traceback.format_exception(error)), kind)
    except Exception:  # its __str__ raises
        return RemoteError(f"{name}, which cannot be shown", "".join(traceback.format_tb(error.__traceback__)))


def _end_process_with_this_thread() -> None:
    """End the process when the thread of its event loop ends; otherwise all calls would wait forever.

    `sys.exit()` in a task of the user ends that thread. Ray then restarts the actor.
    """
    thread = threading.current_thread()

    def wait() -> None:
        thread.join()
        log.error("event_loop_ended: the actor ends, and Ray restarts it")
        os._exit(1)

    threading.Thread(target=wait, name="forebay-loop-guard", daemon=True).start()
