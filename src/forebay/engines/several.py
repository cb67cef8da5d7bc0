"""`EngineControls`: the weights of several servers that serve one model, updated together in one pause.

What `update_weights` promises, beyond what one control does
- The servers load at the same time. It returns when at least `min_ready` of them have the weights. A server that does
  not have them leaves the routing of its agent loop at once, so none of its tokens count; it loads them in the
  background when it is back, and then returns.
- An unreachable server does not delay the others: once `min_ready` are ready, it is waited for `grace_s` longer, not
  at all if it had missed an update before. A server that is loading is waited for, up to its `load_timeout_s`.
- If fewer than `min_ready` can take the weights it raises, as one control does: the producer stays paused, nothing is
  lost, and the call can be repeated. Unreachable servers that are needed are waited for, up to their `down_timeout_s`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from os import PathLike

from forebay.agent_loop.monitor import Unreachable
from forebay.agent_loop.server import same_server
from forebay.core.aio import Turns
from forebay.core.validate import checked_integer, integer_setting, positive_seconds
from forebay.engines.control import EngineControl, Producer, WeightUpdate
from forebay.errors import EngineError, EngineUnavailable, InvalidConfig

log = logging.getLogger(__name__)

_Updates = dict[asyncio.Task[WeightUpdate], EngineControl]


class EngineControls:
    """The controls of several servers; accepted wherever one control is.

    - `min_ready`: how many servers must have the weights for an update to succeed.
    - `grace_s`: how long an update waits for unreachable servers when enough others are ready.

        controls = EngineControls([VLLMControl(url) for url in roots], min_ready=1)
        loop = OpenAIAgentLoop([url + "/v1" for url in roots], "policy", engine=controls)
        loader.update_weights(controls, path="checkpoints/step_7")
    """

    def __init__(self, controls: Sequence[EngineControl], *, min_ready: int = 1, grace_s: float = 10.0) -> None:
        self.controls = tuple(controls)
        if not self.controls or not all(isinstance(control, EngineControl) for control in self.controls):
            raise InvalidConfig(f"controls is {controls!r:.200}; expected controls, like VLLMControl(url)")
        for position, control in enumerate(self.controls):
            if any(same_server(control.url, other.url) for other in self.controls[:position]):
                raise InvalidConfig(f"{control.url} has two controls; expected one for each server")
        self.min_ready = integer_setting("min_ready", min_ready, least=1)
        if self.min_ready > len(self.controls):
            raise InvalidConfig(f"min_ready is {min_ready}, but there are {len(self.controls)} servers")
        self.grace_s = positive_seconds("grace_s", grace_s, or_zero=True)
        self._turns = Turns()

    def __repr__(self) -> str:
        return f"<EngineControls of {', '.join(control.url for control in self.controls)}>"

    def explain_wait(self) -> str | None:
        """Why an update, or `idle`, waits now, for people; None if none is in progress."""
        return "; ".join(filter(None, (control.explain_wait() for control in self.controls))) or None

    async def idle(self) -> None:
        """Return when all servers have stopped our requests. EngineError if one that answers has not in time.

        A server that does not answer gets new weights only when its control has found it idle.
        """
        results = await asyncio.gather(*(control.idle() for control in self.controls), return_exceptions=True)
        for control, error in zip(self.controls, results, strict=True):
            if error is None:
                continue
            if not isinstance(error, EngineError):
                raise error
            try:
                await control.monitor.find_process()
            except Unreachable:
                log.warning("idle_server_away url=%s error=%s", control.url, error)
            else:
                raise error

    async def update_weights(
        self, path: str | PathLike[str], *, model_step: int, manager: Producer | None = None
    ) -> WeightUpdate:
        """Load weights from a directory into all servers, in a safe order. See the top of this file.

        `manager`: paused before and continued afterwards; without one, pause all producers of the servers yourself.
        The result counts tensors over all servers that have the weights now.
        """
        checked_integer("model_step", model_step, least=0)
        began = time.monotonic()
        async with self._turns():
            shared = None if manager is None else _OnePause(manager)
            behind = {control for control in self.controls if control.behind}
            updates: _Updates = {
                asyncio.create_task(control.update_weights(path, model_step=model_step, manager=shared)): control
                for control in self.controls
            }
            try:
                await self._until_enough(updates, behind)
            finally:
                for task in updates:
                    task.cancel()
                await asyncio.gather(*updates, return_exceptions=True)
                if shared is not None:
                    shared.close()
            done = [task.result() for task in updates if _succeeded(task)]
            for task, control in updates.items():
                if not _succeeded(task):
                    error = None if task.cancelled() else task.exception()
                    reason = "it is unreachable" if error is None else str(error)
                    log.warning("weights_postponed url=%s model_step=%d reason=%s", control.url, model_step, reason)
                    control.postpone(path, model_step=model_step, reason=reason)
            if manager is not None:
                await manager.continue_produce(model_step)
        return WeightUpdate(
            model_step=model_step,
            path=done[0].path,
            checked=sum(update.checked for update in done),
            unchecked=sum(update.unchecked for update in done),
            seconds=time.monotonic() - began,
            servers=len(done),
        )

    async def _until_enough(self, updates: _Updates, behind: set[EngineControl]) -> None:
        """Return when no more servers are worth waiting for; raise if fewer than `min_ready` took the weights."""
        clock = asyncio.get_running_loop().time
        enough_at: float | None = None
        while pending := {task for task in updates if not task.done()}:
            failed = [task for task in updates if task.done() and not _succeeded(task)]
            ready = len(updates) - len(pending) - len(failed)
            self._check(failed, ready + len(pending))
            timeout_s = None
            if ready >= self.min_ready:
                enough_at = clock() if enough_at is None else enough_at
                left_s = enough_at + self.grace_s - clock()
                waited = [updates[task] for task in pending if not updates[task].away or updates[task] not in behind]
                if not any(not control.away or left_s > 0 for control in waited):
                    return
                timeout_s = _POLL_S  # a server that loads now may go away, and one that is away may come back
            await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        failed = [task for task in updates if not _succeeded(task)]
        self._check(failed, len(updates) - len(failed))

    def _check(self, failed: Sequence[asyncio.Task[WeightUpdate]], possible: int) -> None:
        """Raise if an update failed for a reason that concerns all servers, or too few can still succeed."""
        errors = [error for task in failed if (error := None if task.cancelled() else task.exception()) is not None]
        for error in errors:
            if not isinstance(error, EngineError):
                raise error  # the files are wrong, for example, or the producer could not be paused
        if possible < self.min_ready:
            kind = EngineUnavailable if all(isinstance(e, EngineUnavailable) for e in errors) else EngineError
            raise kind(
                f"only {possible} of {len(self.controls)} servers can take the weights (min_ready is "
                f"{self.min_ready}); repeat the update. {'; '.join(map(str, errors))}"
            ) from (errors[0] if errors else None)


_POLL_S = 0.05


class _OnePause:
    """A producer that several updates share: it is paused once, and continued by the owner of the updates."""

    def __init__(self, manager: Producer) -> None:
        self._manager = manager
        self._pausing: asyncio.Task[float] | None = None

    async def pause_produce(self) -> float:
        if self._pausing is None:
            self._pausing = asyncio.ensure_future(self._manager.pause_produce())
        return await asyncio.shield(self._pausing)

    async def continue_produce(self, model_step: int) -> None:
        """Not here: other servers may still be loading."""

    def close(self) -> None:
        """Cancel a pause that no update waits for any more."""
        if self._pausing is not None and not self._pausing.done():
            self._pausing.cancel()


def _succeeded(task: asyncio.Task[WeightUpdate]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
