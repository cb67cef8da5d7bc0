"""The actor's side of `RayAgentLoop`: one agent loop in a process of its own.

An actor that Ray (re)starts is blank. It takes groups only after `start`, under the epoch that it was started with: so
none ever runs on a loop that lacks the pause or the weights that the others have. Groups come and go as codec frames.
What the user's code raises travels as text: no exception of theirs has to be pickled.
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
from forebay.checks import check_group
from forebay.codec import decode_group, encode_group
from forebay.errors import EngineRestarted, EngineUnavailable, InvalidConfig, InvalidGroup, InvalidInput
from forebay.prompts import independent
from forebay.rollout import Group, RolloutState

__all__ = ["KINDS", "Answer", "KeptCall", "LoopActor", "Started", "Trouble", "sendable"]

log = logging.getLogger(__name__)

# Errors of an engine that keep their type on their way out of an actor; the more special ones first.
KINDS = {"EngineRestarted": EngineRestarted, "EngineUnavailable": EngineUnavailable}


class Trouble(NamedTuple):
    """An exception as text."""

    message: str  # with its type
    traceback: str
    kind: str = "EngineError"  # or one of those that cost no try: see `KINDS`


class Started(NamedTuple):
    """The actor has a loop, and takes groups."""

    takes_weights_while_running: bool


class Answer(NamedTuple):
    """How a call ended.

    `kind`: done, raised (see `trouble`), cancelled, ended (cancelled, because the actor was started anew), or refused
    (nothing was done: the actor was started anew before). A group comes back as frame and references, also when it was
    cancelled or raised; None: nothing came back.
    """

    kind: str
    frame: bytes | None = None
    references: Sequence[Any] = ()
    trouble: Trouble | None = None
    value: Any = None


class KeptCall(NamedTuple):
    """A method call of the loop's that every actor has to have got."""

    version: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LoopActor:
    """Runs one agent loop on the event loop of an async actor."""

    def __init__(self) -> None:
        self._loop: AgentLoop | None = None
        self._epoch = 0  # none
        self._sequence = 0  # of the last pause or resume
        self._paused = False
        self._versions: dict[str, int] = {}  # of the kept calls that were made
        self._running: dict[int, asyncio.Future[Any]] = {}
        self._stopped: set[int] = set()  # told to stop before they arrived: large ones may be overtaken
        self._starting = asyncio.Lock()

    @ray.method(max_task_retries=-1)
    async def hello(self) -> None:
        """Answered when Ray has restarted the actor, however long that takes: the only call that Ray repeats."""

    async def start(
        self, epoch: int, make_loop: Callable[[], AgentLoop], sequence: int, paused: bool, kept: Sequence[KeptCall]
    ) -> Started | Trouble:
        """Make the loop if there is none, bring it up to date, and take groups under this epoch only."""
        async with self._starting:
            self._epoch = 0
            for running in self._running.values():  # nobody waits for them any more
                running.cancel()
            try:
                loop = self._loop
                if loop is None:
                    _end_with_this_thread()
                    loop = make_loop()
                    if not isinstance(loop, AgentLoop):
                        raise InvalidConfig(f"make_loop returned {loop!r:.80}; expected an AgentLoop")
                    self._loop = loop
                await self._set_paused(loop, sequence, paused)
                for call in sorted(kept):
                    await self._call(loop, call)
            except Exception as error:
                return _trouble(error)
            self._epoch = epoch
            return Started(bool(loop.takes_weights_while_running))

    async def watch(self, epoch: int) -> None:
        """Does not end while the actor lives; so whoever waits for it hears of its death."""
        if epoch == self._epoch:
            await asyncio.Event().wait()

    async def generate(
        self, epoch: int, number: int, frame: bytes, references: Sequence[Any], enable_partial_rollout: bool
    ) -> Answer:
        """Have a group generated."""
        loop = self._loop
        if loop is None or epoch != self._epoch:
            return Answer("refused")
        # Members get lists of their own: locally, too, a loop may change them in place.
        group = [independent(state) for state in decode_group(frame, references)]

        async def generating() -> object:
            return await loop.generate_group(group, enable_partial_rollout=enable_partial_rollout)

        answer = await self._run(number, generating())
        if answer.kind == "cancelled" and epoch != self._epoch:
            answer = Answer("ended")
        returned = answer.value if answer.kind == "done" else group
        carried: list[Any] = []
        try:
            back = sendable(returned, decode_group(frame, references), carried)
        except Exception as error:
            return Answer("raised", trouble=_trouble(error))
        return answer._replace(frame=back, references=carried, value=None)

    async def set_paused(self, epoch: int, number: int, sequence: int, paused: bool) -> Answer:
        """Pause or resume, unless a later word was heard."""
        if self._loop is None or epoch != self._epoch:
            return Answer("refused")
        return await self._run(number, self._set_paused(self._loop, sequence, paused))

    async def call(self, epoch: int, number: int, call: KeptCall) -> Answer:
        """Call a method of the loop."""
        if self._loop is None or epoch != self._epoch:
            return Answer("refused")
        return await self._run(number, self._call(self._loop, call))

    async def stop(self, number: int) -> None:
        """Cancel a call; it answers with what there is."""
        running = self._running.get(number)
        if running is None:
            self._stopped.add(number)
        else:
            running.cancel()

    async def close(self) -> None:
        """Close the loop, if it can be closed."""
        close = getattr(self._loop, "close", None)
        if callable(close):
            await _awaited(close())

    # --- parts ----------------------------------------------------------------------------------------

    async def _run(self, number: int, work: Awaitable[Any]) -> Answer:
        """See work through in a task that `stop` can cancel."""
        running = asyncio.ensure_future(work)
        self._running[number] = running
        if number in self._stopped:
            self._stopped.discard(number)
            running.cancel()
        try:
            await asyncio.wait((running,))
        finally:
            del self._running[number]
        if running.cancelled():
            return Answer("cancelled")
        error = running.exception()
        if error is not None:
            return Answer("raised", trouble=_trouble(error))
        return Answer("done", value=running.result())

    async def _set_paused(self, loop: AgentLoop, sequence: int, paused: bool) -> None:
        if sequence <= self._sequence:
            return
        self._sequence = sequence
        before, self._paused = self._paused, paused
        if paused:
            await loop.pause()
        elif before:
            await loop.resume()

    async def _call(self, loop: AgentLoop, call: KeptCall) -> Any:
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


def sendable(returned: object, issued: Group, references: list[Any]) -> bytes | None:
    """What a loop returned as a frame; a member that cannot be sent is FAILED and costs none of its siblings.

    `issued`: the group as it was given. `references` gets what the frame refers to.
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
    for rollout_id, prompt in {state.rollout_id: state for state in reversed(issued)}.items():
        answers = [state for state in states if state.rollout_id == rollout_id]
        try:
            for answer in answers:
                for name in ("task_name", "group_id", "attempt"):
                    if name == "attempt" or getattr(answer, name) is None:
                        setattr(answer, name, getattr(prompt, name))
            if answers:
                if check_group(answers, prompt.task_name or "")[0] != prompt.group_id:
                    raise InvalidGroup(f"the agent loop returned it as a member of group {answers[0].group_id}")
                encode_group(answers, [])
            members += answers
        except _REFUSALS as refusal:
            members.append(failed_member(prompt, f"what the agent loop returned cannot be sent: {refusal}"))
    order = {state.rollout_id: index for index, state in enumerate(issued)}
    members.sort(key=lambda state: order[state.rollout_id])
    return encode_group(members, references) if members else None


_REFUSALS = (InvalidInput, TypeError, ValueError, AttributeError)


async def _value(arg: Any) -> Any:
    return await arg if isinstance(arg, ray.ObjectRef) else arg


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _trouble(error: BaseException) -> Trouble:
    name = type(error).__name__
    try:
        kind = next((kind for kind, found in KINDS.items() if isinstance(error, found)), "EngineError")
        return Trouble(f"{name}: {error}", "".join(traceback.format_exception(error)), kind)
    except Exception:  # it cannot even say what it is
        return Trouble(f"{name}, which cannot be shown", "".join(traceback.format_tb(error.__traceback__)))


def _end_with_this_thread() -> None:
    """End the process if the thread of its event loop ends: otherwise all calls would wait for ever.

    `sys.exit()` in a task of the user's does that. Ray then restarts the actor.
    """
    thread = threading.current_thread()

    def outlive() -> None:
        thread.join()
        log.error("event_loop_ended: the actor ends, and is restarted")
        os._exit(1)

    threading.Thread(target=outlive, name="forebay-loop-guard", daemon=True).start()
