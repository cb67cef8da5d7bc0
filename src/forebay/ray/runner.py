"""How the coroutines of a host run for the threads that Ray's calls arrive in: two ways, one event loop each.

`Inline`: the calling thread runs the loop itself, one at a time. That is the fastest for a storage in memory, whose
operations never wait. `InThread`: the loop runs in a thread of its own, so that operations that wait for a disk or a
server overlap, and share their syncs.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["InThread", "Inline", "Runner"]

T = TypeVar("T")


class Runner(ABC):
    """Runs coroutines on one event loop for any thread."""

    @abstractmethod
    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work comes to; waits for it."""


class Inline(Runner):
    """In the thread of the caller."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._turn = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._turn:
            return self._loop.run_until_complete(work)


class InThread(Runner):
    """In a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="forebay-host", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
