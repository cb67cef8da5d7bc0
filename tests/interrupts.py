"""Ctrl-C at a chosen moment of a blocking call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forebay.blocking.thread import Call

__all__ = ["interrupted"]


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch, *, after_the_result: bool) -> Iterator[None]:
    """Raise KeyboardInterrupt in the first wait for a result: at once, or when the result exists."""
    wait = Call.result
    calls: list[int] = []

    def interrupt(self: Call[object], timeout_s: float | None = None) -> object:
        calls.append(1)
        if len(calls) > 1:
            return wait(self, timeout_s)
        if after_the_result:
            wait(self, timeout_s)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Call, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield
