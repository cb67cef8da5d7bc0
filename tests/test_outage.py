"""Which errors of common HTTP clients mean that a server is unreachable."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable

import httpx
import pytest

from forebay.agent_loop.outage import is_outage


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


async def server_of(answer: bytes) -> asyncio.Server:
    """A server that reads a request, sends this answer, and closes the connection."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    return await asyncio.start_server(connected, "127.0.0.1", 0)


async def raised(call: Callable[[], Awaitable[object]]) -> Exception:
    try:
        await call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


async def with_httpx(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=300) as client:
        (await client.get(url)).raise_for_status()


async def with_urllib(url: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    await asyncio.to_thread(lambda: opener.open(url, timeout=300).read())


@pytest.mark.parametrize("client", [with_httpx, with_urllib])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_refused_connection_is_an_outage(client: Callable[[str], Awaitable[None]], host: str) -> None:
    assert is_outage(await raised(lambda: client(f"http://{host}:{free_port()}/")))


@pytest.mark.parametrize("client", [with_httpx, with_urllib])
@pytest.mark.parametrize(
    ("answer", "outage"),
    [
        (b"", True),
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", False),
        (b"this is no HTTP\r\n\r\n", False),
    ],
    ids=["closed", "503", "500", "404", "garbage"],
)
async def test_gateway_errors_and_lost_connections_are_an_outage(
    client: Callable[[str], Awaitable[None]], answer: bytes, outage: bool
) -> None:
    async with await server_of(answer) as server:
        port = server.sockets[0].getsockname()[1]
        error = await raised(lambda: client(f"http://127.0.0.1:{port}/"))
    if isinstance(error, urllib.error.HTTPError):
        error.close()
    assert is_outage(error) is outage


async def test_a_truncated_body_is_an_outage() -> None:
    async with await server_of(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc") as server:
        port = server.sockets[0].getsockname()[1]
        assert is_outage(await raised(lambda: with_httpx(f"http://127.0.0.1:{port}/")))


def test_other_errors_are_no_outage() -> None:
    for error in (ValueError("x"), TimeoutError(), KeyError("status"), RuntimeError("connection refused"), None):
        assert not is_outage(error)
    hidden = RuntimeError("the tool failed")
    hidden.__context__, hidden.__suppress_context__ = ConnectionResetError("reset"), True  # `from None`
    assert is_outage(hidden), "clients hide their causes"
