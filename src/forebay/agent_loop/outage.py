"""When an engine cannot be reached: requests wait, and the outage costs time only.

A request that finds the engine away calls `wait`, which returns when it is worth trying again: after a growing delay
and, if the caller can ask the server something, an answer. All requests of a loop share one delay, one question and one
log line. An outage is over when a request succeeds, which `over` reports; after `down_timeout_s` without that, waits
end with `EngineUnavailable`. That time counts only while all engines of the run are away (`peers`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from forebay.agent_loop.gate import Unreachable
from forebay.errors import EngineUnavailable, InvalidConfig
from forebay.waiting import RESOLUTION_S

__all__ = ["DOWN_TIMEOUT_S", "Outage", "is_outage"]

log = logging.getLogger(__name__)

DOWN_TIMEOUT_S = 600.0
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 5.0


_AWAY_STATUSES = frozenset((502, 503, 504))
# Errors of HTTP clients that do not name a ConnectionError as their cause; by name, because none of them is imported.
_AWAY_ERRORS = frozenset(
    (
        ("aiohttp", "ClientConnectionError"),
        ("httpcore", "NetworkError"),
        ("httpcore", "ConnectTimeout"),
        ("httpx", "NetworkError"),
        ("httpx", "ConnectTimeout"),
        ("openai", "APIConnectionError"),
        ("requests", "ConnectionError"),
        ("urllib3", "ProtocolError"),
    )
)


def is_outage(error: BaseException | None) -> bool:
    """Whether an error says that a server could not be reached: a refused or lost connection, or a status 502 to 504.

    Errors of httpx, aiohttp, requests and the openai client are known; so is a ConnectionError that caused another one.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, BaseExceptionGroup):
            return bool(error.exceptions) and all(is_outage(inner) for inner in error.exceptions)
        if isinstance(error, ConnectionError) or _status(error) in _AWAY_STATUSES or _names_outage(error):
            return True
        error = error.__cause__ or error.__context__  # httpcore hides its causes
    return False


def _status(error: BaseException) -> object:
    """The status of a response that a client made an error of."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status or getattr(error, "status_code", None) or getattr(error, "status", None)


def _names_outage(error: BaseException) -> bool:
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    if not kinds.isdisjoint((("httpx", "RemoteProtocolError"), ("httpcore", "RemoteProtocolError"))):
        return "disconnected" in str(error) or "closed connection" in str(error)  # not what is no HTTP at all
    return not kinds.isdisjoint(_AWAY_ERRORS) and ("openai", "APITimeoutError") not in kinds


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
        self._said = False  # whether the log has this outage
        self.on_change: Callable[[], None] | None = None
        self._probes = 0  # groups that may be started to find out whether it is the engine
        self._opening: asyncio.Task[None] | None = None
        self.peers: Sequence[Outage] = ()  # of the other engines of a run: while one of them is not away, it waits

    def seconds(self) -> float:
        """How long the engine was away in all, this outage included."""
        now = 0.0 if self._since is None else asyncio.get_running_loop().time() - self._since
        return self._before_s + now

    @property
    def away(self) -> bool:
        """Whether the engine was away when it was last asked."""
        return self._since is not None

    def describe(self) -> str | None:
        """What is wrong at the moment, for people; None if nothing is."""
        if self._since is None:
            return None
        left_s = self._left_s()
        given_up = "not given up while another engine works" if left_s is None else f"given up in {left_s:.0f} s"
        return f"{self.name} is away ({self._reason}); {given_up}"

    def _left_s(self) -> float | None:
        """How long it is still waited for; None while another engine of the run is not away."""
        began = [outage._since for outage in (self, *self.peers)]
        since = [moment for moment in began if moment is not None]
        if len(since) < len(began):
            return None
        return max(0.0, self.down_timeout_s - (asyncio.get_running_loop().time() - max(since)))

    async def wait(self, reason: str, probe: Callable[[], Awaitable[object]] | None = None) -> None:
        """Return when it is worth trying again; EngineUnavailable if the engine was away for `down_timeout_s`."""
        loop = asyncio.get_running_loop()
        self._reason = reason
        if self._since is None:
            self._since, self._delays, self._said, self._probes = loop.time(), 0, False, 0
        if self._opening is None or self._opening.done() or self._opening.get_loop() is not loop:
            self._opening = loop.create_task(self._open(probe))
            self._opening.add_done_callback(_look_at)
        await asyncio.shield(self._opening)

    async def _open(self, probe: Callable[[], Awaitable[object]] | None) -> None:
        clock = asyncio.get_running_loop().time
        while self._since is not None:  # otherwise a request succeeded meanwhile
            left_s = self._left_s()
            if left_s is not None and left_s <= RESOLUTION_S:
                raise EngineUnavailable(
                    f"{self.name} could not be reached for {clock() - self._since:.0f} s (down_timeout_s is "
                    f"{self.down_timeout_s:g}): {self._reason}. Nothing was lost and no try was spent: try "
                    "again when it is back"
                )
            delay_s = min(self.first_delay_s * 2.0 ** min(self._delays, 16), _MAX_DELAY_S)
            delay_s = delay_s if left_s is None else min(delay_s, left_s)
            self._delays += 1
            await asyncio.sleep(delay_s)
            if self._since is None:
                return
            if not self._said:  # one lost connection is no outage
                self._said = True
                log.warning(
                    "engine_away engine=%s reason=%s: requests wait, for down_timeout_s=%g at most",
                    self.name, self._reason, self.down_timeout_s,
                )  # fmt: skip
            if probe is None:
                self._allow_probe()
                return
            try:
                await probe()
                return
            except Unreachable as error:
                self._reason = str(error)

    def _allow_probe(self) -> None:
        """After 1, 2, 4, ... delays; a dozen groups would find out no more."""
        if self._delays & (self._delays - 1) == 0:
            self._probes += 1
            if self.on_change is not None:
                self.on_change()

    def take_probe(self) -> bool:
        """Whether another group is to be started: if it succeeds, what fails is a tool, say, and not the engine.

        Nobody can be asked about an engine behind a function of the user's, and all groups in flight may be those of
        one broken tool.
        """
        taken = self._since is not None and self._probes > 0
        self._probes -= taken
        return taken

    def over(self) -> None:
        """A request succeeded."""
        if self._since is not None:
            away_s = asyncio.get_running_loop().time() - self._since
            if self._said:
                log.warning("engine_back engine=%s seconds=%.1f", self.name, away_s)
            self._before_s, self._since = self._before_s + away_s, None


def _look_at(task: asyncio.Task[None]) -> None:
    """Take note of an exception, if all who waited were cancelled meanwhile."""
    if not task.cancelled():
        task.exception()
