"""`ServerMonitor`: whether a server is still the process that was given the current weights.

A server that restarts serves its start-up weights again, and its answers do not say so. The monitor therefore records
which process answers when weights were loaded, and compares. A connection belongs to one process: if the server,
asked after the connection was made, is the process with the current weights, then everything that arrives on this
connection was generated with them. So tokens count only after a `confirm()` that began after their connection was made.
If the server dies before it answers, they count if the process with the current weights had answered within the 3 s
before the connection was made (`vouches`): no server stops, starts and accepts requests in less.

A server identifies its process by the start time in `/metrics` (vLLM), by the random seed and start-up times in
`/server_info` (SGLang), or by the version of its weights, which a restart resets. A server that publishes none of these
is treated as restarted whenever a connection to it is lost. At model step 0 a restart changes nothing: the start-up
weights are the current ones. A server that then reports another step still has the weights of an earlier run, and none
of its tokens count.

The monitor loads no weights itself; a control (`forebay.engines`) may give it a `reload` to call.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import msgspec

from forebay.core.aio import ignore_exception
from forebay.errors import EngineError, EngineRestarted

log = logging.getLogger(__name__)

_START_TIME = re.compile(rb"^process_start_time_seconds(?:\{[^}]*\})? ([0-9.eE+]+)\s*$", re.MULTILINE)
_STEP = re.compile(r"[0-9]{1,18}")
_VERSION_PATHS = ("/weight_info", "/model_info", "/get_model_info")
_MAX_SPACING_S = 0.25  # a pause may have to wait this long
_FASTEST_START_S = 3.0  # a server that loads a model takes longer to start


class Unreachable(Exception):
    """The server did not answer a question about itself."""


class AnotherProcess(Unreachable):
    """A process other than the one with the current weights answered."""


class EngineGone(EngineError):
    """No process listens at the address of the server."""


Process: TypeAlias = str
"""Distinguishes the process of a server from the next one at the same address; empty if the server does not say."""


Fetch = Callable[[str], Awaitable[bytes | None]]
"""GET a path below the root of a server: the body, None if there is no such path, or Unreachable."""


class _Weights(msgspec.Struct):
    weight_version: str | None = None


class _ServerInfo(msgspec.Struct):
    random_seed: int
    startup_time: dict[str, Any]


class Engine(Protocol):
    """The part of a server's control that an agent loop needs: see `forebay.engines`."""

    monitor: ServerMonitor

    async def idle(self) -> None:
        """Wait until the server has stopped our requests."""

    def explain_wait(self) -> str | None:
        """Why the control waits for the server now, for people; None if it does not."""


class Engines(Protocol):
    """The controls of several servers, for one agent loop: see `forebay.engines`."""

    @property
    def controls(self) -> Sequence[Engine]:
        """One for each server."""

    async def idle(self) -> None:
        """Wait until the servers have stopped our requests."""

    def explain_wait(self) -> str | None:
        """Why a control waits for its server now, for people; None if none does."""


class ServerMonitor:
    """Knows which process at `url` has the current weights. See the top of this file.

    `trust_restarts`: the server loads the current weights itself whenever it starts. `controlled`: an engine control
    owns the monitor, and only the control can clear doubts. `reload` loads the weights again after a restart.
    """

    def __init__(self, url: str, fetch: Fetch, *, trust_restarts: bool = False, controlled: bool = False) -> None:
        self.url = url
        self.trust_restarts = trust_restarts
        self.controlled = controlled
        self.reload: Callable[[], Awaitable[None]] | None = None
        self.model_step: int | None = None
        self._fetch = fetch
        self._expected: Process | None = None  # None: the process that answers next
        self._doubt: str | None = None  # why the server may not have the weights
        self._explicit = False  # a control has loaded the weights, so they need not be the start-up weights
        self._anonymous = False
        self._has_metrics = True
        self._not_before = 0.0  # when the server may be asked again
        self._answered: tuple[Process, float] = "", 0.0  # the last process that answered, and when it was asked
        self._running: asyncio.Task[Process] | None = None
        self._next: asyncio.Task[Process] | None = None
        self._waiters: dict[asyncio.Task[Process], int] = {}
        self._reloading: asyncio.Task[None] | None = None

    # --- the current weights --------------------------------------------------------------------------

    async def weights_loaded(self, model_step: int) -> None:
        """The user says that the server has the weights of this step; record which process answers now."""
        if self.controlled and self._doubt is not None:
            if self.reload is not None and model_step == self.model_step:
                return  # they are loaded again before anything is generated
            raise self._restarted(self._doubt)
        if self._doubt is None and self.model_step == model_step and self._expected is not None:
            return  # the control that loaded them has recorded the process
        if self._explicit:
            raise self._not_loaded(model_step, f"was loaded with the weights of step {self.model_step} by its control")
        if self.controlled or model_step == 0:
            with suppress(Unreachable):  # checked again before any of its tokens count
                await self._check_version(model_step)
                if self.controlled and model_step > 0 and not self.trust_restarts:
                    version = await self.version()
                    if version != str(model_step):
                        raise self._not_loaded(
                            model_step, f"was not loaded by its control and reports version {version!r}"
                        )
        self.model_step, self._doubt, self._expected, self._explicit = model_step, None, None, False
        if model_step > 0:
            try:
                self._expected = await self.find_process()
            except Unreachable as error:
                problem = f"step {model_step} was reported as loaded, but the server is unreachable: {error}"
                self.doubt(problem)
                raise self._restarted(problem) from error

    async def _check_version(self, model_step: int) -> None:
        """EngineRestarted if a server that our control has not loaded reports the weights of another step."""
        version = await self.version()
        if is_step(version) and version != str(model_step):
            raise EngineRestarted(
                f"{self.url} reports version {version}, but step {model_step} is needed: it still has the weights of "
                f"an earlier run. Load those of step {model_step} with update_weights of its control, or restart the "
                "server"
            )

    def _not_loaded(self, model_step: int, found: str) -> EngineError:
        return EngineError(
            f"{self.url} {found}, but step {model_step} was reported as loaded; load those weights with update_weights "
            "of its control. To update several servers together, call pause_produce, then update_weights of each "
            f"control without a manager, then continue_produce({model_step})"
        )

    def set_loaded(self, model_step: int, process: Process) -> None:
        """A control has loaded the weights of this step into this process."""
        self.model_step, self._expected, self._doubt, self._explicit = model_step, process, None, True

    def expect(self, model_step: int, reason: str) -> None:
        """The weights of this step are the current ones, and the server has yet to load them."""
        self.model_step, self._doubt, self._explicit = model_step, reason, True

    @property
    def loaded_step(self) -> int | None:
        """The step that a control has loaded, if no other load has begun since."""
        return self.model_step if self._explicit and self._doubt is None else None

    @property
    def doubts(self) -> str | None:
        """Why the weights have to be loaded before any token of the server counts; None if they do not."""
        return self._doubt

    @property
    def doubted(self) -> bool:
        """Whether the weights have to be loaded before any token of the server counts."""
        return self._doubt is not None

    def doubt(self, reason: str) -> None:
        """The server may not have the current weights; none of its tokens count until they are loaded."""
        self._doubt = reason

    def connection_lost(self) -> None:
        """A connection broke. A server that does not identify its process may have been replaced."""
        if self._anonymous and self.model_step and not self.trust_restarts and self._doubt is None:
            self.doubt(
                "a connection was lost, and the server does not say whether it restarted (no "
                "process_start_time_seconds in /metrics, no weight version); enable its metrics, or give the loop a "
                "control"
            )

    # --- asking the server ----------------------------------------------------------------------------

    async def ready(self) -> None:
        """Return when the server may be sent requests; after a restart its weights are loaded again first.

        EngineRestarted if there is no control to load them, Unreachable if the server cannot be loaded now.
        """
        if self._doubt is None:
            return
        if self.reload is None:
            raise self._restarted(self._doubt)
        loop = asyncio.get_running_loop()
        if self._reloading is None or self._reloading.done() or self._reloading.get_loop() is not loop:
            log.warning("server_loaded_again url=%s reason=%s", self.url, self._doubt)
            self._reloading = loop.create_task(self._reload(self.reload, self._doubt))
            self._reloading.add_done_callback(ignore_exception)  # every waiting request may have been cancelled
        await asyncio.shield(self._reloading)

    async def _reload(self, reload: Callable[[], Awaitable[None]], reason: str) -> None:
        try:
            await reload()
            await self.find_process()  # connections are made now: see `vouches`
        except EngineGone as error:
            raise Unreachable(str(error)) from error
        except Unreachable:
            raise
        except Exception as error:
            raise self._restarted(f"{reason}; and loading the weights again failed: {error}") from error

    async def confirm(self) -> None:
        """Return if the server has the current weights, at some moment after this call.

        Otherwise EngineRestarted, or Unreachable if the server does not answer or has to be loaded again first (see
        `ready`). Concurrent calls share one question.
        """
        loop = asyncio.get_running_loop()
        if self._next is None or self._next.get_loop() is not loop:
            before = self._running if self._running is not None and self._running.get_loop() is loop else None
            self._next = loop.create_task(self._find_after(before))
            self._next.add_done_callback(ignore_exception)
        asking = self._next
        self._waiters[asking] = self._waiters.get(asking, 0) + 1
        try:
            found = await asyncio.shield(asking)
        finally:
            self._waiters[asking] -= 1
            if not self._waiters[asking]:
                del self._waiters[asking]
                asking.cancel()  # no call waits for this answer any more
                if self._next is asking:
                    self._next = None
        await self._check(found)

    async def _find_after(self, before: asyncio.Task[Process] | None) -> Process:
        if before is not None and not before.done():
            await asyncio.wait((before,))
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._not_before - clock())
        self._running, self._next = asyncio.current_task(), None  # later calls need a later answer
        began = clock()
        try:
            return await self.find_process()
        finally:
            # An answer can cost a busy server 10 ms; questions may take a tenth of its time at most.
            self._not_before = clock() + min(_MAX_SPACING_S, 9 * (clock() - began))

    async def check_reachable(self) -> None:
        """Return if the server answers, even if its weights have to be loaded again (by `ready`).

        Unreachable if it does not answer, EngineRestarted if there is no control to load the weights.
        """
        found = await self.find_process()
        with suppress(Unreachable):
            await self._check(found)

    async def find_process(self) -> Process:
        """The process that answers at the address now; Unreachable if none does."""
        began = asyncio.get_running_loop().time()
        process = await self.find_start()
        if not process:
            version = await self.version()
            process = "" if version in (None, "default") else f"with weights {version}"
        if not process and not self._anonymous:
            log.warning("server_anonymous url=%s: a restart looks like a lost connection", self.url)
        self._anonymous = not process
        self._answered = process, began
        return process

    def vouches(self) -> bool:
        """Whether a connection that was just made must be to a process with the current weights. See the top."""
        if self._doubt is not None or self._expected is None:
            return False
        if self.trust_restarts or self._start_up_weights:
            return True
        process, asked = self._answered
        recent = asyncio.get_running_loop().time() - asked < _FASTEST_START_S
        return recent and bool(process) and process == self._expected

    @property
    def _start_up_weights(self) -> bool:
        """Whether the current weights are those that the server starts with."""
        return not self.model_step and not self._explicit

    async def find_start(self) -> Process:
        """As `find_process`, by properties that a weight update does not change; empty if the server has none."""
        if self._has_metrics:
            match = _START_TIME.search(await self._fetch("/metrics") or b"")
            if match:
                return f"started at {match[1].decode()}"
            self._has_metrics = False
        try:
            info = msgspec.json.decode(await self._fetch("/server_info") or b"", type=_ServerInfo)
        except msgspec.MsgspecError:
            return ""
        return f"with seed {info.random_seed}, started up in {info.startup_time}"

    async def version(self) -> str | None:
        """The version that the server reports for its weights, if any."""
        for path in _VERSION_PATHS:
            body = await self._fetch(path)
            if body is not None:
                try:
                    return msgspec.json.decode(body, type=_Weights).weight_version
                except msgspec.MsgspecError:
                    continue
        return None

    async def _check(self, found: Process) -> None:
        if self._doubt is None:
            if self._expected is None:
                if self.model_step is not None:
                    await self._check_version(self.model_step)
                if self._expected is None:
                    self._expected = found
            if found == self._expected:
                return
            if self._start_up_weights or self.trust_restarts or await self.version() == str(self.model_step):
                log.warning("server_restarted url=%s: it has the current weights", self.url)
                self._expected = found
                return
            if found == self._expected:
                return  # a concurrent call has accepted this process
            self.doubt(f"it restarted ({found}; the weights were loaded into the process {self._expected})")
        reason = self._doubt or "its weights were just loaded again"
        if self.reload is None:
            raise self._restarted(reason)
        raise AnotherProcess(f"its weights have to be loaded again: {reason}")

    def _restarted(self, reason: str) -> EngineRestarted:
        return EngineRestarted(
            f"{self.url} may not have the weights of step {self.model_step}: {reason}. Its tokens are not used. Push "
            "the weights again and continue, or set trust_restarts=True if it starts with the right ones"
        )


def is_step(version: str | None) -> bool:
    """Whether a version was set by an update, and is not the version of a server as it started.

    >>> is_step("3"), is_step("default"), is_step(None)
    (True, False, False)
    """
    return version is not None and _STEP.fullmatch(version) is not None
