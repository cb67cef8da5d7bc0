"""Requests to an inference server about itself: small, bounded and read-only.

`until_idle` waits until a server runs no request, for loops without a control. Published counts lag behind: vLLM sets
its gauges in the steps of its engine (a request appeared up to 0.2 s late), and SGLang's snapshot leaves out a request
that has just begun. A single zero therefore proves nothing, and a server counts as idle only after several of them. A
control (`forebay.engines`) has a more reliable way.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import cast

import httpx
import msgspec

from forebay.agent_loop.monitor import Fetch, Unreachable
from forebay.agent_loop.outage import caused_by
from forebay.errors import InvalidConfig

log = logging.getLogger(__name__)

_TIMEOUT = httpx.Timeout(30.0, connect=5.0)
_ATTEMPTS = 3
_TRANSIENT = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
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
    """The body of a GET; None if the server has no such path, Unreachable if there is no valid answer."""
    for attempt in range(_ATTEMPTS):
        try:
            return await _fetch(client, url, headers)
        except Unreachable as error:
            # The server may close a kept-alive connection just as it is used again, which is no outage.
            if attempt == _ATTEMPTS - 1 or not isinstance(error.__cause__, _TRANSIENT):
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
            await read_into(body, response, _MAX_BYTES + 1)
    except httpx.TransportError as error:
        raise Unreachable(f"GET {url}: {type(error).__name__} {error}".rstrip()) from error
    if len(body) > _MAX_BYTES:
        raise Unreachable(f"GET {url} answered more than {_MAX_BYTES} bytes")
    return bytes(body)


async def read_into(body: bytearray, response: httpx.Response, limit: int) -> None:
    """Read a body up to a limit, as it was sent."""
    async with aclosing(raw(response)) as stream:
        async for data in stream:
            body += data[: limit - len(body)]
            if len(body) >= limit:
                break


def raw(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The bytes of a body, not decompressed."""
    return cast("AsyncGenerator[bytes, None]", response.aiter_raw())  # httpx declares an iterator


def is_refused(error: BaseException) -> bool:
    """Whether no process listens at the address. A host that does not answer may still be running requests."""
    return caused_by(error, lambda cause: isinstance(cause, ConnectionRefusedError))


class _Load(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    timestamp: float


class _Loads(msgspec.Struct):
    loads: list[_Load]


async def until_idle(get: Fetch, url: str) -> None:
    """Wait until a server reports that it runs no request; return at once if it is gone or reports nothing.

    There is no timeout: the caller sets one.
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
                log.warning("idle_server_gone url=%s: nothing listens there, so it runs no request", url)
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
                log.warning("idle_unknown url=%s: it reports no request counts; requests may outlive a pause", url)
                return
            elif any(float(value) for value in gauges):
                since = None
            else:
                since = clock() if since is None else since
                if clock() - since >= _GAUGE_LAG_S:
                    return
        await asyncio.sleep(_POLL_S)


def _read_loads(body: bytes) -> list[_Load] | None:
    """The loads of SGLang's ranks; None if the body is something else."""
    try:
        return msgspec.json.decode(body, type=_Loads).loads
    except msgspec.MsgspecError:
        return None


def checked_url(base_url: str) -> str:
    """The URL of a server without a trailing slash, or InvalidConfig."""
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError):
        url = httpx.URL("")
    if url.userinfo or url.query or url.fragment:
        # The value is not shown: these parts contain keys.
        raise InvalidConfig(
            "base_url has a user, a query or a fragment; expected none of them (pass api_key or a client instead)"
        )
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidConfig(f"base_url is {base_url!r:.200}; expected a URL like 'http://127.0.0.1:8000/v1'")
    return str(url).rstrip("/")


def same_server(one: str, other: str) -> bool:
    """Whether two URLs without /v1 name the same server. Compares the URLs only; resolves no names.

    >>> same_server("http://localhost:8000", "http://127.0.0.1:8000"), same_server("http://a:8000", "http://a:8001")
    (True, False)
    """
    return _without_alias(one) == _without_alias(other)


def _without_alias(url: str) -> httpx.URL:
    parsed = httpx.URL(url)
    return parsed.copy_with(host="127.0.0.1") if parsed.host in ("localhost", "::1") else parsed


def authorization(api_key: str | None) -> dict[str, str]:
    """The header for a key. Errors do not show the key."""
    if api_key is None:
        return {}
    if not isinstance(api_key, str) or not re.fullmatch(r"[!-~]+", api_key):
        raise InvalidConfig(
            "api_key (not shown) is empty or not allowed in a header; expected printable ASCII without spaces"
        )
    return {"Authorization": f"Bearer {api_key}"}
