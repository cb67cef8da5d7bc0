"""Calls that are repeated while the storage is unavailable: an outage of the store must not end a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from forebay.buffer.buffer import ReplayBuffer
from forebay.core.validate import positive_seconds
from forebay.errors import NoCluster, NoSuchBuffer, StorageUnavailable
from forebay.produce.plan import backoff_s

log = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_DELAY_S = 5.0


class Patience:
    """Repeats calls for at most `retry_s`. `check_open()` raises when nobody waits for them any longer."""

    def __init__(self, replay_buffer: ReplayBuffer, retry_s: float, check_open: Callable[[], None]) -> None:
        self.retry_s = positive_seconds("storage_retry_s", retry_s)
        self._replay_buffer = replay_buffer
        self._check_open = check_open

    async def __call__(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call while the storage is unavailable; its error if that lasts longer than `retry_s`."""
        while True:
            try:
                return await call()
            except (NoCluster, NoSuchBuffer):
                raise
            except StorageUnavailable as error:
                await self._until_storage_is_back(error)

    async def _until_storage_is_back(self, error: StorageUnavailable) -> None:
        clock = asyncio.get_running_loop().time
        began, times = clock(), 0
        log.warning("storage_away retry_s=%g error=%s", self.retry_s, error)
        while True:
            times += 1
            delay_s = min(backoff_s(times), _MAX_DELAY_S)
            if clock() + delay_s - began > self.retry_s:
                raise error
            await asyncio.sleep(delay_s)
            self._check_open()
            try:
                await self._replay_buffer.ledger()
                break
            except StorageUnavailable as still:
                error = still
        log.warning("storage_back seconds=%.1f", clock() - began)
