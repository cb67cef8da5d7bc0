"""Host names of servers, resolved in dedicated threads.

httpx resolves names in the default executor of asyncio, which belongs to the user: tools that block fill it, and a
server then looks unreachable. `NamedHosts` therefore resolves the name before the request reaches httpx, which gets an
address; the Host header and the name that a certificate is checked against stay those of the URL. It tries all
addresses of a name in order. Requests to addresses are passed on unchanged.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import httpx

from forebay.core.aio import Pool, start_thread

_FRESH_S = 30.0
_RESOLVER = Pool("names", 8, "host names")

Place = tuple[str, int]


class NamedHosts(httpx.AsyncBaseTransport):
    """Sends requests through another transport, to an address of the host that they name."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport
        self._known: dict[Place, tuple[float, list[str]]] = {}  # until when, in order
        self._asking: dict[Place, asyncio.Future[list[str]]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if _is_address(host):
            return await self._transport.handle_async_request(request)
        place = (host, request.url.port or (443 if request.url.scheme == "https" else 80))
        addresses = await self._addresses(place, request)
        for address in addresses:
            there = httpx.Request(
                request.method,
                request.url.copy_with(host=address),
                headers=request.headers,
                stream=request.stream,
                extensions={"sni_hostname": host, **request.extensions},
            )
            try:
                response = await self._transport.handle_async_request(there)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if address != addresses[-1]:
                    continue
                self._known.pop(place, None)  # it may have moved
                raise
            if address != addresses[0]:
                until, known = self._known.get(place, (0.0, []))
                self._known[place] = until, sorted(known, key=lambda other: other != address)
            return response
        raise AssertionError("a name has at least one address")

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _addresses(self, place: Place, request: httpx.Request) -> list[str]:
        loop = asyncio.get_running_loop()
        until, known = self._known.get(place, (0.0, []))
        if known and loop.time() < until:
            return known
        asking = self._asking.get(place)
        if asking is None or asking.get_loop() is not loop:
            asking = self._asking[place] = start_thread(lambda: _resolve(*place), pool=_RESOLVER)
            asking.add_done_callback(lambda done: self._resolved(place, done))
        try:
            async with asyncio.timeout(request.extensions.get("timeout", {}).get("connect")):
                return await asyncio.shield(asking)
        except TimeoutError:
            raise httpx.ConnectTimeout(f"the name {place[0]} was not resolved in time", request=request) from None
        except OSError as error:
            raise httpx.ConnectError(f"the name {place[0]} cannot be resolved: {error}", request=request) from error

    def _resolved(self, place: Place, done: asyncio.Future[list[str]]) -> None:
        if self._asking.get(place) is done:
            del self._asking[place]
        if not done.cancelled() and done.exception() is None:
            self._known[place] = done.get_loop().time() + _FRESH_S, done.result()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
