"""How a process of a test dies: by `kill -9` at the n-th call that it makes, never after some time.

Calls are those into C (SQLite, files, locks, the event loop) in any thread, counted from an event on that the process
reports. Half of the kills come before such a call, the other half as soon as a call waits for the operating system:
in the middle of a commit or a write.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from typing import Any

__all__ = ["Doom"]


class Doom:
    """Kills this process at a call after its n-th event. Make it before other threads start."""

    def __init__(self, events: int, calls: int) -> None:
        self._events = events
        self._calls = calls
        self._due: queue.SimpleQueue[None] | None = None
        if calls % 2:
            self._due = queue.SimpleQueue()
            threading.Thread(target=self._kill_when_due, daemon=True).start()
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def event(self) -> None:
        self._events -= 1

    def _called(self, frame: Any, event: str, argument: Any) -> None:
        if event != "c_call" or self._events > 0:
            return
        self._calls = left = self._calls - 1
        if left < 0:
            if self._due is None:
                _kill()
            else:
                self._due.put(None)  # which keeps the interpreter: the other thread gets it from the doomed call

    def _kill_when_due(self) -> None:
        assert self._due is not None
        self._due.get()
        _kill()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
