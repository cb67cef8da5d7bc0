"""The line that a terminal shows while a batch is waited for."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from forebay import StepProgress
from forebay.loader.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def state(groups: int, *, step: int = 3, waited_s: float = 1.0, done: bool = False) -> StepProgress:
    missing = {"math": 4 - groups} if groups < 4 else {}
    return StepProgress(
        step=step,
        groups=groups,
        wanted=4,
        in_flight=2,
        missing=missing,
        tokens_per_s=1500.0,
        waited_s=waited_s,
        done=done,
    )


def test_a_terminal_shows_one_line_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    show = ProgressLine()
    for each in (state(1), state(2), state(4, done=True), state(0, step=4), state(4, step=4, done=True)):
        show(each)
    shown = terminal.getvalue()
    assert shown.count("\n") == 2, "a line for each step"
    for text in ("step 3", "1/4", "2 in flight, waits for math (3), 1,500 tokens/s", "4/4", "step 4"):
        assert text in shown
    assert shown.rindex("step 3") < shown.index("step 4")


def test_without_a_terminal_the_log_says_it_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    show = ProgressLine()
    with caplog.at_level(logging.INFO, "forebay"):
        for waited_s in (1.0, 9.5, 10.0, 15.0, 20.5):
            show(state(1, waited_s=waited_s))
        show(state(4, done=True))
    assert stream.getvalue() == ""
    assert [record.getMessage() for record in caplog.records] == [
        "waiting_for_batch step=3 groups=1/4 2 in flight, waits for math (3), 1,500 tokens/s"
    ] * 2
