"""When an engine cannot be reached: requests wait, and the outage costs time only.

Whoever finds the engine away calls `wait`, which returns when it is worth trying again: after a growing delay and, if
the caller can ask the server something, an answer. All requests of a loop share one delay and one question, and one log
line. An outage is over when a request succeeds, which `over` reports; after `down_timeout_s` without that, waits end
with `EngineUnavailable`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from forebay.agent_loop.gate import Unreachable
from forebay.errors import EngineUnavailable, InvalidConfig

__all__ = ["DOWN_TIMEOUT_S", "Outage", "is_outage"]

log = logging.getLogger(__name__)

DOWN_TIMEOUT_S = 600.0
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 5.0


def is_outage(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a connection that was refused or lost."""
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            return bool(error.exceptions) and all(is_outage(inner) for inner in error.exceptions)
        if isinstance(error, ConnectionError):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


class Outage:
    """The outages of one engine, one after the other. `first_delay_s`: how long the first wait lasts."""

    def __init__(
        self, name: str, down_timeout_s: float = DOWN_TIMEOUT_S, *, first_delay_s: float = _FIRST_DELAY_S
    ) -> None:
        valid = isinstance(down_timeout_s, (int, float)) and not isinstance(down_timeout_s, bool)
        if not valid or not 0 < down_timeout_s < float("inf"):
            raise InvalidConfig(f"down_timeout_s is {down_timeout_s!r}; expected a positive number of seconds")
        self.name = name
        self.down_timeout_s = float(down_timeout_s)
        self.first_delay_s = first_delay_s
        self._before_s = 0.0  # seconds of the outages before
        self._since: float | None = None
        self._reason = ""
        self._delays = 0
        self._opening: asyncio.Task[None] | None = None

    def seconds(self) -> float:
        """How long the engine was away in all, this outage included."""
        now = 0.0 if self._since is None else asyncio.get_running_loop().time() - self._since
        return self._before_s + now

    def describe(self) -> str | None:
        """What is wrong at the moment, for people; None if nothing is."""
        if self._since is None:
            return None
        left_s = self.down_timeout_s - (asyncio.get_running_loop().time() - self._since)
        return f"{self.name} is away ({self._reason}); given up in {max(0.0, left_s):.0f} s"

    async def wait(self, reason: str, probe: Callable[[], Awaitable[object]] | None = None) -> None:
        """Return when it is worth trying again; EngineUnavailable if the engine was away for `down_timeout_s`."""
        loop = asyncio.get_running_loop()
        self._reason = reason
        if self._since is None:
            self._since, self._delays = loop.time(), 0
            log.warning(
                "engine_away engine=%s reason=%s: requests wait, for down_timeout_s=%g at most",
                self.name, reason, self.down_timeout_s,
            )  # fmt: skip
        if self._opening is None or self._opening.done() or self._opening.get_loop() is not loop:
            self._opening = loop.create_task(self._open(self._since, probe))
            self._opening.add_done_callback(_look_at)
        await asyncio.shield(self._opening)

    async def _open(self, since: float, probe: Callable[[], Awaitable[object]] | None) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            delay_s = min(self.first_delay_s * 2.0 ** min(self._delays, 16), _MAX_DELAY_S)
            self._delays += 1
            if clock() + delay_s - since > self.down_timeout_s:
                raise EngineUnavailable(
                    f"{self.name} could not be reached for {clock() - since:.0f} s (down_timeout_s is "
                    f"{self.down_timeout_s:g}): {self._reason}. Nothing was lost and no try was spent: start producing "
                    "again when it is back"
                )
            await asyncio.sleep(delay_s)
            if probe is None:
                return
            try:
                await probe()
                return
            except Unreachable as error:
                self._reason = str(error)

    def over(self) -> None:
        """A request succeeded."""
        if self._since is not None:
            away_s = asyncio.get_running_loop().time() - self._since
            log.warning("engine_back engine=%s seconds=%.1f", self.name, away_s)
            self._before_s, self._since = self._before_s + away_s, None


def _look_at(task: asyncio.Task[None]) -> None:
    """Take note of an exception, if all who waited were cancelled meanwhile."""
    if not task.cancelled():
        task.exception()
