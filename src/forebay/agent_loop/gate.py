"""Whether a server is still the process that was given the current weights.

A server that restarts serves its start-up weights again, and nothing in its answers says so. `ServerGate` therefore
notes which process answers when weights were loaded, and compares. A connection belongs to one process: if, after it
was made, the server says that it is the process with the weights, everything that this connection brings was generated
by them. So tokens count only once a `confirm()` that began after their connection was made has returned. If that gets
no answer, because the server died meanwhile, they count if the process with the weights had answered less than 3 s
before the connection was made (`vouches`): no server dies, starts and takes requests in that time.

How a server says which process it is: the start time in its `/metrics` (vLLM), the random seed and start-up times in
its `/server_info` (SGLang), or else the version of its weights, which a restart sets back. A server that publishes none
of these is taken for restarted whenever a connection to it was lost. At model step 0 a restart changes nothing: the
start-up weights are the weights. A server that reports another step by then still has the weights of an earlier run,
and nothing from it counts.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import msgspec

from forebay.errors import EngineError, EngineRestarted

__all__ = ["AnotherProcess", "Engine", "EngineGone", "Fetch", "Process", "ServerGate", "Unreachable", "is_step"]

log = logging.getLogger(__name__)

_START_TIME = re.compile(rb"^process_start_time_seconds(?:\{[^}]*\})? ([0-9.eE+]+)\s*$", re.MULTILINE)
_STEP = re.compile(r"[0-9]{1,18}")
_VERSION_PATHS = ("/weight_info", "/model_info", "/get_model_info")
_MOST_SPACING_S = 0.25  # a pause may wait for so long
_FASTEST_START_S = 3.0  # a server that loads a model takes longer to start


class Unreachable(Exception):
    """The server did not answer a question about itself."""


class AnotherProcess(Unreachable):
    """Another process than that with the weights answered."""


class EngineGone(EngineError):
    """Nobody listens at the address of the server."""


Process: TypeAlias = str
"""What tells the process of a server from the next one at its address; empty if nothing does."""


Fetch = Callable[[str], Awaitable[bytes | None]]
"""GET a path below the root of a server: the body, None if there is no such path, or Unreachable."""


class _Weights(msgspec.Struct):
    weight_version: str | None = None


class _ServerInfo(msgspec.Struct):
    random_seed: int
    startup_time: dict[str, Any]


class Engine(Protocol):
    """What an agent loop needs of the control of its server: see `forebay.engines`."""

    gate: ServerGate

    async def idle(self) -> None:
        """Wait until the server has stopped our requests."""

    def explain_wait(self) -> str | None:
        """What the control waits for at the moment, for people; None if for nothing."""


class ServerGate:
    """Knows which process at `url` has the current weights. See the top of this file.

    `trust_restarts`: a server that restarts loads the current weights by itself. `controlled`: an engine's control owns
    it, and only that says when doubts are over; `reload` loads the weights again into a server that restarted.
    """

    def __init__(self, url: str, fetch: Fetch, *, trust_restarts: bool = False, controlled: bool = False) -> None:
        self.url = url
        self.trust_restarts = trust_restarts
        self.controlled = controlled
        self.reload: Callable[[], Awaitable[None]] | None = None
        self.model_step: int | None = None
        self._fetch = fetch
        self._expected: Process | None = None  # None: whoever answers next
        self._doubt: str | None = None  # why the server is not known to have the weights
        self._explicit = False  # a control has loaded the weights: they need not be those of the start-up
        self._anonymous = False
        self._has_metrics = True
        self._not_before = 0.0  # when the server may be asked again
        self._answered: tuple[Process, float] = "", 0.0  # which process did last; asked when
        self._running: asyncio.Task[Process] | None = None
        self._next: asyncio.Task[Process] | None = None
        self._askers: dict[asyncio.Task[Process], int] = {}
        self._reloading: asyncio.Task[None] | None = None

    # --- what the weights are -------------------------------------------------------------------------

    async def weights_loaded(self, model_step: int) -> None:
        """Whoever answers now was given the weights of this step, as far as its owner says."""
        if self.controlled and self._doubt is not None:
            if self.reload is not None and model_step == self.model_step:
                return  # they are loaded again before anything is generated
            raise self._restarted(self._doubt)
        if self._doubt is None and self.model_step == model_step and self._expected is not None:
            return  # a control that loaded them knows better
        if self._explicit:
            raise self._not_loaded(model_step, f"was loaded with the weights of step {self.model_step} by its control")
        if self.controlled or model_step == 0:
            with suppress(Unreachable):  # asked again before anything from it counts
                await self._check_version(model_step)
                if self.controlled and model_step > 0 and not self.trust_restarts:
                    version = await self.version()
                    if version != str(model_step):
                        raise self._not_loaded(
                            model_step, f"was given no weights by its control, and reports version {version!r}"
                        )
        self.model_step, self._doubt, self._expected, self._explicit = model_step, None, None, False
        if model_step > 0:
            try:
                self._expected = await self.ask()
            except Unreachable as error:
                problem = f"it is said to have the weights of step {model_step}, but cannot be reached: {error}"
                self.doubt(problem)
                raise self._restarted(problem) from error

    async def _check_version(self, model_step: int) -> None:
        """EngineRestarted if the server, which our control has not loaded, reports the weights of another step."""
        version = await self.version()
        if is_step(version) and version != str(model_step):
            raise EngineRestarted(
                f"{self.url} reports version {version}, but step {model_step} was asked for: it still has the weights "
                f"of an earlier run. Load those of step {model_step} with update_weights of its control, or restart "
                "the server"
            )

    def _not_loaded(self, model_step: int, found: str) -> EngineError:
        return EngineError(
            f"{self.url} {found}, but is said to have the weights of step {model_step}; give them to update_weights of "
            "its control. Several servers are updated together: pause_produce, update_weights of each control without "
            f"a manager, then continue_produce({model_step})"
        )

    def loaded(self, model_step: int, process: Process) -> None:
        """A control has loaded the weights of this step into this process."""
        self.model_step, self._expected, self._doubt, self._explicit = model_step, process, None, True

    @property
    def doubted(self) -> bool:
        """Whether the weights have to be loaded before anything of the server counts."""
        return self._doubt is not None

    def doubt(self, reason: str) -> None:
        """The server may not have the current weights; nothing from it counts until they are loaded."""
        self._doubt = reason

    def lost_connection(self) -> None:
        """A connection broke. A server that never says which process it is may be another one now."""
        if self._anonymous and self.model_step and not self.trust_restarts and self._doubt is None:
            self.doubt(
                "a connection was lost, and it does not say whether it restarted (no process_start_time_seconds in "
                "/metrics, no weight version); enable its metrics, or give the loop a control"
            )

    # --- asking ---------------------------------------------------------------------------------------

    async def opened(self) -> None:
        """Return when the server may be asked to generate: its weights are loaded again first, if they have to be.

        EngineRestarted if nobody can do that, Unreachable if the server is not there to be loaded.
        """
        if self._doubt is None:
            return
        if self.reload is None:
            raise self._restarted(self._doubt)
        loop = asyncio.get_running_loop()
        if self._reloading is None or self._reloading.done() or self._reloading.get_loop() is not loop:
            log.warning("server_loaded_again url=%s reason=%s", self.url, self._doubt)
            self._reloading = loop.create_task(self._reload(self.reload, self._doubt))
            self._reloading.add_done_callback(_look_at)
        await asyncio.shield(self._reloading)

    async def _reload(self, reload: Callable[[], Awaitable[None]], reason: str) -> None:
        try:
            await reload()
            await self.ask()  # connections are made now: see `vouches`
        except EngineGone as error:
            raise Unreachable(str(error)) from error
        except Unreachable:
            raise
        except Exception as error:
            raise self._restarted(f"{reason}; and loading the weights again failed: {error}") from error

    async def confirm(self) -> None:
        """Return if the server is known to have the current weights, at some moment after this call.

        Otherwise EngineRestarted, or Unreachable if it does not answer, or has to be loaded again first (see `opened`).
        Calls that come together share one question.
        """
        loop = asyncio.get_running_loop()
        if self._next is None or self._next.get_loop() is not loop:
            before = self._running if self._running is not None and self._running.get_loop() is loop else None
            self._next = loop.create_task(self._ask_after(before))
            self._next.add_done_callback(_look_at)
        asking = self._next
        self._askers[asking] = self._askers.get(asking, 0) + 1
        try:
            found = await asyncio.shield(asking)
        finally:
            self._askers[asking] -= 1
            if not self._askers[asking]:
                del self._askers[asking]
                self._forget(asking)
        await self._check(found)

    def _forget(self, asking: asyncio.Task[Process]) -> None:
        """Nobody waits for this answer any more."""
        if not asking.done():
            asking.cancel()
            if self._next is asking:
                self._next = None

    async def _ask_after(self, before: asyncio.Task[Process] | None) -> Process:
        if before is not None and not before.done():
            await asyncio.wait((before,))
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._not_before - clock())
        self._running, self._next = asyncio.current_task(), None  # whoever calls from now on needs a later answer
        began = clock()
        try:
            return await self.ask()
        finally:
            # An answer can cost a busy server 10 ms of its time: we take no more than a tenth of that.
            self._not_before = clock() + min(_MOST_SPACING_S, 9 * (clock() - began))

    async def reachable(self) -> None:
        """Return if the server answers; if it is another process, `opened` has to load its weights first.

        Unreachable if it does not, EngineRestarted if nobody can load them.
        """
        found = await self.ask()
        with suppress(Unreachable):
            await self._check(found)

    async def ask(self) -> Process:
        """Which process answers at the address now; Unreachable if none does."""
        began = asyncio.get_running_loop().time()
        process = await self.started()
        if not process:
            version = await self.version()
            process = "" if version in (None, "default") else f"with weights {version}"
        if not process and not self._anonymous:
            log.warning("server_anonymous url=%s: restarts cannot be told from lost connections", self.url)
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

    async def started(self) -> Process:
        """As `ask`, by what an update of the weights does not change; empty if the server does not say."""
        return await self._start_time() or await self._start_up()

    async def _start_time(self) -> str:
        if self._has_metrics:
            match = _START_TIME.search(await self._fetch("/metrics") or b"")
            if match:
                return f"started at {match[1].decode()}"
            self._has_metrics = False
        return ""

    async def _start_up(self) -> str:
        body = await self._fetch("/server_info")
        try:
            info = msgspec.json.decode(body or b"", type=_ServerInfo)
        except msgspec.MsgspecError:
            return ""
        return f"with seed {info.random_seed}, started up in {info.startup_time}"

    async def version(self) -> str | None:
        """The version that the server says its weights have, if it says any."""
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
                log.warning("server_restarted url=%s: it has the weights all the same", self.url)
                self._expected = found
                return
            if found == self._expected:
                return  # another call has settled it meanwhile
            self.doubt(f"it restarted ({found}; the weights were loaded into the process {self._expected})")
        reason = self._doubt or "its weights were just loaded again"
        if self.reload is None:
            raise self._restarted(reason)
        raise AnotherProcess(f"its weights have to be loaded again: {reason}")

    def _restarted(self, reason: str) -> EngineRestarted:
        return EngineRestarted(
            f"{self.url} is not known to have the weights of step {self.model_step}: {reason}. What it generated is "
            "not used. Push the weights again and continue, or set trust_restarts=True if it starts with the right ones"
        )


def is_step(version: str | None) -> bool:
    """Whether a version is one that an update has set, and not that of a server as it started.

    >>> is_step("3"), is_step("default"), is_step(None)
    (True, False, False)
    """
    return version is not None and _STEP.fullmatch(version) is not None


def _look_at(task: asyncio.Task[Any]) -> None:
    """Take note of an exception, if all who asked were cancelled meanwhile."""
    if not task.cancelled():
        task.exception()
