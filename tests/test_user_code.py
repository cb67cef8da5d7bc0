"""`run_user_code`: user code has a limit, is cancelled at the limit, and is left behind if it ignores the cancel."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from forebay.core.aio import run_user_code
from forebay.testing import simulate
from tests.test_strategy import now, simulated


async def one_second(future: asyncio.Future[Any]) -> None:
    await asyncio.wait((future,), timeout=1)


async def after(seconds: float, result: str = "done") -> str:
    await asyncio.sleep(seconds)
    return result


async def slow_to_stop(seconds: float) -> str:
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        await asyncio.sleep(seconds)
    return "stopped"


@simulated
async def test_code_that_ends_in_time_has_its_result() -> None:
    call = await run_user_code(after(0.5), until=one_second)
    assert (call.in_time, call.cancelled, call.future.result(), now()) == (True, None, "done", 0.5)


@simulated
async def test_code_without_a_limit_takes_as_long_as_it_needs() -> None:
    call = await run_user_code(after(500))
    assert (call.in_time, call.future.result(), now()) == (True, "done", 500)


@simulated
async def test_an_exception_is_in_the_future_and_not_raised() -> None:
    async def raising() -> None:
        raise KeyError("gold")

    call = await run_user_code(raising())
    assert call.in_time
    assert isinstance(call.future.exception(), KeyError)


@simulated
async def test_code_is_cancelled_at_its_limit() -> None:
    call = await run_user_code(after(500), until=one_second)
    assert (call.in_time, call.cancelled, call.future.cancelled(), now()) == (False, None, True, 1)


@simulated
async def test_code_that_takes_a_moment_to_stop_is_waited_for() -> None:
    for limit in (5.0, None):
        call = await run_user_code(slow_to_stop(3), until=one_second, cancel_timeout_s=limit)
        assert (call.in_time, call.future.result()) == (False, "stopped")
    assert now() == 8


@simulated
async def test_code_that_ignores_its_cancel_is_left_behind() -> None:
    call = await run_user_code(slow_to_stop(50), until=one_second, cancel_timeout_s=5)
    assert (call.in_time, call.future.done(), now()) == (False, False, 6)
    assert await call.future == "stopped"


def test_left_behind_code_is_logged_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        call = await run_user_code(slow_to_stop(50), until=one_second, cancel_timeout_s=5)
        await call.future

    with caplog.at_level(logging.WARNING, "forebay.core.aio"):
        simulate.run(main)
    assert caplog.messages == ["user_code_left_behind call=slow_to_stop: it ignored a cancel for 5 s"]


@simulated
async def test_a_cancel_of_the_caller_cancels_the_code_and_is_returned() -> None:
    async def caller() -> str:
        call = await run_user_code(slow_to_stop(3), cancel_timeout_s=5)
        assert call.cancelled is not None
        assert not call.in_time
        return call.future.result()

    calling = asyncio.create_task(caller())
    await asyncio.sleep(1)
    calling.cancel()
    await asyncio.sleep(1)
    calling.cancel()  # does not end the wait either
    assert await calling == "stopped"
    assert now() == 4
