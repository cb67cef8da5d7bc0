"""Outages: while an engine is unreachable its requests wait, so that an outage costs time only.

A request that cannot reach the engine calls `wait`. It returns when another attempt makes sense: after a growing delay
and, if the caller has a probe, after a successful one. All requests of a loop share one delay, one probe and one log
line. An outage ends when a request succeeds, which `over` reports. If none does for `down_timeout_s`, `wait` raises
`EngineUnavailable`. That time counts only while all engines of the run are unreachable (`peers`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from forebay.agent_loop.monitor import Unreachable
from forebay.core.aio import RESOLUTION_S, ignore_exception
from forebay.core.validate import positive_seconds
from forebay.errors import EngineUnavailable

log = logging.getLogger(__name__)

DOWN_TIMEOUT_S = 600.0
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 5.0

GATEWAY_STATUSES = frozenset((502, 503, 504))
"""HTTP statuses of a gateway whose server is unreachable."""

# Errors of HTTP clients that do not name a ConnectionError as their cause; by name, because none of them is imported.
_CLIENT_ERRORS = frozenset(
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
    """Whether an error means that a server is unreachable: a refused or lost connection, or a status 502 to 504.

    It knows the errors of httpx, aiohttp, requests and the openai client, and errors caused by a ConnectionError.
    """
    return caused_by(
        error, lambda e: isinstance(e, ConnectionError) or _status(e) in GATEWAY_STATUSES or _is_client_error(e)
    )


def caused_by(error: BaseException | None, is_cause: Callable[[BaseException], bool]) -> bool:
    """Whether an error, or one that caused it, is such a cause. A group is if all of its errors are."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, BaseExceptionGroup):
            return all(caused_by(inner, is_cause) for inner in error.exceptions)
        if is_cause(error):
            return True
        error = error.__cause__ or error.__context__  # httpcore sets no cause
    return False


def _status(error: BaseException) -> object:
    """The status of the response that a client raised an error for."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status or getattr(error, "status_code", None) or getattr(error, "status", None)


def _is_client_error(error: BaseException) -> bool:
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    if not kinds.isdisjoint((("httpx", "RemoteProtocolError"), ("httpcore", "RemoteProtocolError"))):
        return "disconnected" in str(error) or "closed connection" in str(error)  # other protocol errors are no outage
    return not kinds.isdisjoint(_CLIENT_ERRORS) and ("openai", "APITimeoutError") not in kinds


class Outage:
    """The outages of one engine, one after the other. `first_delay_s`: the delay before the first new attempt."""

    def __init__(
        self, name: str, down_timeout_s: float = DOWN_TIMEOUT_S, *, first_delay_s: float = _FIRST_DELAY_S
    ) -> None:
        self.name = name
        self.down_timeout_s = positive_seconds("down_timeout_s", down_timeout_s)
        self.first_delay_s = first_delay_s
        self._before_s = 0.0  # seconds of earlier outages
        self._since: float | None = None
        self._reason = ""
        self._delays = 0
        self._logged = False
        self.on_change: Callable[[], None] | None = None
        self._probes = 0  # groups that may be started to find out whether the engine is the cause
        self._waiting: asyncio.Task[None] | None = None  # shared by all requests
        self.peers: Sequence[Outage] = ()  # of the other engines of a run: it gives up only if all are unreachable

    def seconds(self) -> float:
        """How long the engine has been unreachable in total, including this outage."""
        now = 0.0 if self._since is None else asyncio.get_running_loop().time() - self._since
        return self._before_s + now

    @property
    def away(self) -> bool:
        """Whether the last request could not reach the engine."""
        return self._since is not None

    @property
    def lasts(self) -> bool:
        """Whether the engine is still unreachable after the first delay."""
        return self.away and self._logged

    def forget(self) -> None:
        """Let the next request find out whether the engine is back."""
        if self._since is not None:
            self._before_s, self._since = self.seconds(), None

    def describe(self) -> str | None:
        """The current outage, for people; None if there is none."""
        if self._since is None:
            return None
        left_s = self._left_s()
        end = "not giving up while another engine works" if left_s is None else f"giving up in {left_s:.0f} s"
        return f"{self.name} is unreachable ({self._reason}); {end}"

    def _left_s(self) -> float | None:
        """The time until `wait` gives up; None while another engine of the run is reachable."""
        began = [outage._since for outage in (self, *self.peers)]
        since = [moment for moment in began if moment is not None]
        if len(since) < len(began):
            return None
        return max(0.0, self.down_timeout_s - (asyncio.get_running_loop().time() - max(since)))

    async def wait(self, reason: str, probe: Callable[[], Awaitable[object]] | None = None) -> None:
        """Return when another attempt makes sense; EngineUnavailable after `down_timeout_s`."""
        loop = asyncio.get_running_loop()
        self._reason = reason
        if self._since is None:
            self._since, self._delays, self._logged, self._probes = loop.time(), 0, False, 0
        if self._waiting is None or self._waiting.done() or self._waiting.get_loop() is not loop:
            self._waiting = loop.create_task(self._wait(probe))
            self._waiting.add_done_callback(ignore_exception)  # every waiting request may have been cancelled
        await asyncio.shield(self._waiting)

    async def _wait(self, probe: Callable[[], Awaitable[object]] | None) -> None:
        clock = asyncio.get_running_loop().time
        while self._since is not None:  # a request that succeeds meanwhile ends the outage
            left_s = self._left_s()
            if left_s is not None and left_s <= RESOLUTION_S:
                raise EngineUnavailable(
                    f"{self.name} was unreachable for {clock() - self._since:.0f} s (down_timeout_s is "
                    f"{self.down_timeout_s:g}): {self._reason}. Nothing was lost and no try was spent; continue when "
                    "it is back"
                )
            delay_s = min(self.first_delay_s * 2.0 ** min(self._delays, 16), _MAX_DELAY_S)
            delay_s = delay_s if left_s is None else min(delay_s, left_s)
            self._delays += 1
            await asyncio.sleep(delay_s)
            if self._since is None:
                return
            if not self._logged:  # a single lost connection is not worth a warning
                self._logged = True
                if self.on_change is not None:
                    self.on_change()
                end = "requests wait, for down_timeout_s={:g} at most" if left_s is not None else "others work"
                log.warning(
                    "engine_away engine=%s reason=%s: %s",
                    self.name, self._reason, end.format(self.down_timeout_s),
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
        """Allow one more group after 1, 2, 4, ... delays; more groups would show nothing new."""
        if self._delays & (self._delays - 1) == 0:
            self._probes += 1
            if self.on_change is not None:
                self.on_change()

    def take_probe(self) -> bool:
        """Whether to start another group as a probe: if it succeeds, the failing part is a tool, say, not the engine.

        An engine behind a function of the user cannot be asked directly, and all groups in flight may depend on the
        same broken tool.
        """
        taken = self._since is not None and self._probes > 0
        self._probes -= taken
        return taken

    def over(self) -> None:
        """A request succeeded."""
        if self._since is not None:
            away_s = asyncio.get_running_loop().time() - self._since
            if self._logged:
                log.warning("engine_back engine=%s seconds=%.1f", self.name, away_s)
            self._before_s, self._since = self._before_s + away_s, None
