"""Questions to an inference server about itself, for loops that have no control of it: small, bounded, read-only.

`until_idle` waits until a server runs no request. What servers publish lags behind what they do, so one zero proves
nothing: vLLM's gauges are set by its engine's steps (a request was seen to show up 0.2 s late), and SGLang's snapshot
leaves out a request that it has just begun. A server therefore counts as idle when it has said so often enough; a
control (`forebay.engines`) knows a surer way.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping

import httpx
import msgspec

from forebay.agent_loop.gate import Fetch, Unreachable
from forebay.errors import InvalidConfig

__all__ = ["authorization", "checked_url", "fetch", "is_refused", "same_server", "until_idle"]

log = logging.getLogger(__name__)

_TIMEOUT = httpx.Timeout(30.0, connect=5.0)
_ATTEMPTS = 3
_PASSING = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
_MAX_BYTES = 8 * 2**20
_ABSENT = frozenset((401, 403, 404, 405, 501))

_GAUGE_LAG_S = 0.5
_SNAPSHOTS = 3
_POLL_S = 0.02
_GAUGES = re.compile(
    rb"^(?:vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs)(?:\{[^}]*\})? ([0-9.eE+]+)\s*$",
    re.MULTILINE,
)


async def fetch(client: httpx.AsyncClient, url: str, headers: Mapping[str, str]) -> bytes | None:
    """The body of a GET; None if the server has no such path, Unreachable if it does not answer properly."""
    for attempt in range(_ATTEMPTS):
        try:
            return await _fetch(client, url, headers)
        except Unreachable as error:
            # A connection that was kept alive may be closed just when it is used again; much depends on the answer.
            if attempt == _ATTEMPTS - 1 or not isinstance(error.__cause__, _PASSING):
                raise
    raise AssertionError("unreachable")


async def _fetch(client: httpx.AsyncClient, url: str, headers: Mapping[str, str]) -> bytes | None:
    body = bytearray()
    try:
        async with client.stream("GET", url, headers=dict(headers), timeout=_TIMEOUT) as response:
            if response.status_code in _ABSENT:
                return None
            if not response.is_success:
                raise Unreachable(f"GET {url} answered {response.status_code}")
            async for data in response.aiter_raw():
                body += data
                if len(body) > _MAX_BYTES:
                    raise Unreachable(f"GET {url} answered more than {_MAX_BYTES} bytes")
    except httpx.TransportError as error:
        raise Unreachable(f"GET {url}: {type(error).__name__} {error}".rstrip()) from error
    return bytes(body)


def is_refused(error: BaseException | None) -> bool:
    """Whether nobody listens at an address. A host that does not answer may be busy all the same."""
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    if isinstance(error, BaseExceptionGroup):
        return bool(error.exceptions) and all(is_refused(inner) for inner in error.exceptions)
    return is_refused(error.__cause__ or error.__context__)


class _Load(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    timestamp: float


class _Loads(msgspec.Struct):
    loads: list[_Load]


async def until_idle(get: Fetch, url: str) -> None:
    """Wait until a server says that it runs no request. One that is gone, or publishes nothing, is not waited for.

    It never gives up: whoever waits has a limit.
    """
    clock = asyncio.get_running_loop().time
    seen: set[tuple[float, ...]] = set()  # the SGLang snapshots of an idle server
    since: float | None = None
    while True:
        try:
            body = await get("/v1/loads")
            loads = None if body is None else _read_loads(body)
            gauges = None if loads is not None else _GAUGES.findall(await get("/metrics") or b"")
        except Unreachable as error:
            if is_refused(error):
                log.warning("idle_server_gone url=%s: a server that is not there runs nothing", url)
                return
            seen, since = set(), None
        else:
            if loads is not None:
                if any(load.num_running_reqs or load.num_waiting_reqs for load in loads):
                    seen = set()
                else:
                    seen.add(tuple(load.timestamp for load in loads))
                if len(seen) >= _SNAPSHOTS:
                    return
            elif not gauges:
                log.warning("idle_unknown url=%s: it does not say whether it works; a pause is no barrier there", url)
                return
            elif any(float(value) for value in gauges):
                since = None
            else:
                since = clock() if since is None else since
                if clock() - since >= _GAUGE_LAG_S:
                    return
        await asyncio.sleep(_POLL_S)


def _read_loads(body: bytes) -> list[_Load] | None:
    """The loads of SGLang's ranks; None from a server that answers something else there."""
    try:
        return msgspec.json.decode(body, type=_Loads).loads
    except msgspec.MsgspecError:
        return None


def checked_url(base_url: str) -> str:
    """A URL of a server without a slash at its end, or InvalidConfig."""
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError):
        url = httpx.URL("")
    if url.userinfo or url.query or url.fragment:
        # Not shown: this is where keys are.
        raise InvalidConfig(
            "base_url has a user, a query or a fragment; expected none of them (give api_key, or a client)"
        )
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidConfig(f"base_url is {base_url!r:.200}; expected a URL like 'http://127.0.0.1:8000/v1'")
    return str(url).rstrip("/")


def same_server(one: str, other: str) -> bool:
    """Whether two URLs without /v1 name the same server, as far as their text says.

    >>> same_server("http://localhost:8000", "http://127.0.0.1:8000"), same_server("http://a:8000", "http://a:8001")
    (True, False)
    """
    return _without_alias(one) == _without_alias(other)


def _without_alias(url: str) -> httpx.URL:
    parsed = httpx.URL(url)
    return parsed.copy_with(host="127.0.0.1") if parsed.host in ("localhost", "::1") else parsed


def authorization(api_key: str | None) -> dict[str, str]:
    """The header for a key, which no error shows."""
    if api_key is None:
        return {}
    if not isinstance(api_key, str) or not re.fullmatch(r"[!-~]+", api_key):
        raise InvalidConfig(
            "api_key (not shown) is empty or cannot stand in a header; expected printable ASCII, no blanks"
        )
    return {"Authorization": f"Bearer {api_key}"}
