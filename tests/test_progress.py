"""Statistics and progress of producing: counts for any logger, a bar on a terminal, otherwise a log line."""

from __future__ import annotations

import asyncio
import io
import logging
import sys

import pytest

from forebay import NoProgress, RolloutState, Status, TerminalProgress
from forebay.produce import stats
from forebay.produce.stats import Figures, Outcome, quantile
from forebay.testing import make_group
from tests.test_strategy import TASK, Counted, Producer, after, answer, never, running_ahead, simulated

PREFIX = f"forebay/{TASK}/produce/"
COUNTS = {
    "attempts",
    "groups",
    "samples",
    "tokens",
    "completed",
    "returned",
    "failed",
    "failed_samples",
    "filtered",
    "filtered_samples",
    "discarded",
    "failures",
    "kept",
    "rejected",
    "judged",
    "judge_s",
    "dropped_responses",
    "in_flight",
    "pauses",
    "pause_s",
}

# --- statistics -------------------------------------------------------------------------------------------


def short(stats: dict[str, float]) -> dict[str, float]:
    """The counts of the task by the last part of their name, without zeros."""
    return {name.removeprefix(PREFIX): value for name, value in stats.items() if value}


def outcome(status: Status | None, **changes: object) -> Outcome:
    fields: dict[str, object] = {
        "group_id": 0,
        "attempt": 1,
        "status": status,
        "samples": 2,
        "tokens": 10,
        "seconds": 1.0,
        "failed": False,
        "error": None,
    }
    return Outcome(**(fields | changes))  # type: ignore[arg-type]


def test_a_task_without_groups_has_only_zeros() -> None:
    flat = Figures().flat(TASK, 0)
    assert flat == dict.fromkeys((PREFIX + name for name in COUNTS), 0)


def test_every_end_of_an_attempt_is_counted_under_its_name() -> None:
    figures = Figures()
    for status in (Status.COMPLETED, Status.COMPLETED, Status.FAILED, Status.FILTERED, Status.ABORTED, Status.EXPIRED):
        figures.count(outcome(status))
    figures.count(outcome(None))  # it no longer belonged to this producer
    figures.count(outcome(Status.ABORTED, failed=True, error="down"))
    assert short(figures.flat(TASK, 3)) == {
        "attempts": 8,
        "groups": 3,
        "samples": 6,
        "tokens": 80,
        "completed": 2,
        "returned": 3,
        "failed": 1,
        "failed_samples": 2,
        "filtered": 1,
        "filtered_samples": 2,
        "failures": 1,
        "in_flight": 3,
        "group_p50_s": 1.0,
        "group_p99_s": 1.0,
    }


def test_times_count_only_completely_generated_groups() -> None:
    figures = Figures()
    for seconds in range(1, 101):
        figures.count(outcome(Status.COMPLETED, seconds=float(seconds)))
    figures.count(outcome(Status.ABORTED, seconds=1000.0))
    figures.count(outcome(Status.FAILED, seconds=1000.0))
    figures.count(outcome(Status.COMPLETED, seconds=None))  # it was only judged
    flat = figures.flat(TASK, 0)
    assert (flat[PREFIX + "group_p50_s"], flat[PREFIX + "group_p99_s"]) == (51, 100)


def test_only_the_last_times_are_kept() -> None:
    figures = Figures()
    for _ in range(5000):
        figures.count(outcome(Status.COMPLETED))
    assert len(figures.times_s) == 4096
    assert figures.completed == 5000


def test_quantiles_of_few_values() -> None:
    assert quantile([5.0], 0.5) == quantile([5.0], 0.99) == 5
    assert quantile([1, 2], 0.5) == 2
    assert quantile(range(1, 101), 0.99) == 100


def test_rewards_are_averaged_over_samples() -> None:
    figures = Figures()
    figures.count(outcome(Status.COMPLETED, rewards=[1.0, 0.0]))
    figures.count(outcome(Status.FILTERED, rewards=[1.0, 1.0]))
    assert figures.flat(TASK, 0)[PREFIX + "raw_reward_mean"] == 0.75


@simulated
async def test_the_counts_of_a_run_match_the_ledger() -> None:
    calls = Counted()

    async def mixed(state: RolloutState) -> None:
        if state.group_id == 3:
            await never(state)
        await asyncio.sleep(1 + (state.group_id or 0))
        if state.group_id == 1:
            raise RuntimeError("no answer")
        answer(state, 5, score=float(state.group_id or 0))

    calls.function = mixed
    producer = running_ahead(
        calls, over_sample_threshold=1.0, max_tries=1, is_valid_sample_fn=lambda group: group[0].group_id != 0 or "dull"
    )
    await producer.buffer.put(make_group(model_step=0), TASK)
    await producer.produce(1, 1)
    assert await producer.strategy.pause() == 0
    await producer.train(1)
    production = await producer.produce(1, 9)
    assert production.complete
    stats = producer.strategy.stats()
    figures = producer.strategy.figures(TASK).flat(TASK, producer.strategy.in_flight(TASK))
    assert {name: stats[name] for name in figures} == figures
    assert stats[PREFIX + "generating"] == stats[PREFIX + "in_flight"]
    ledger = await producer.ledger()
    assert (stats[PREFIX + "failed"], stats[PREFIX + "filtered"]) == (ledger["failed"], ledger["filtered"]) == (1, 1)
    assert stats[PREFIX + "in_flight"] == ledger["in_flight"]
    assert stats[PREFIX + "pauses"] == 1
    assert producer.strategy.stats() == stats  # reading resets nothing
    await producer.strategy.close()


@simulated
async def test_counts_are_final_when_a_batch_is_ready() -> None:
    """All groups of the batch are counted, and none of them is in flight."""
    producer = running_ahead(after(2), over_sample_threshold=0.5)
    await producer.produce(4)
    assert short(producer.strategy.stats()) == {
        "attempts": 6,
        "groups": 6,
        "samples": 12,
        "tokens": 36,
        "completed": 6,
        "kept": 6,
        "acceptance_rate": 1.0,
        "group_p50_s": 2.0,
        "group_p99_s": 2.0,
    }


@simulated
async def test_dropped_expired_groups_are_counted_as_discarded() -> None:
    producer = running_ahead(tail_batch_trigger_size=-1, max_staleness=0, members=1)
    await producer.buffer.put(make_group(model_step=0), "code")
    await producer.produce(3, 1)
    await producer.produce(2, 5)
    stats = producer.strategy.stats()
    assert stats[PREFIX + "discarded"] == (await producer.ledger())["discarded"] == 3
    assert stats[PREFIX + "completed"] == 5


@simulated
async def test_discarded_counts_from_the_creation_of_the_strategy() -> None:
    producer = Producer(members=1)
    await producer.buffer.put(make_group(), TASK)
    await producer.buffer.discard({}, "of an earlier run")
    await producer.produce(1)
    assert producer.strategy.stats()[PREFIX + "discarded"] == 0


# --- progress ---------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("forebay.produce.stats.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_terminal_shows_one_line_that_is_redrawn(clock: Clock) -> None:
    terminal = Terminal()
    shown = TerminalProgress(terminal)
    figures = Figures(completed=1, filtered=2, failed=3)
    shown.update("math", 1, 4, 3, figures)
    assert terminal.getvalue() == "\rmath [####............] 1/4 1 done, 3 in flight, 2 filtered, 3 failed"
    clock.now += 1
    shown.update("code", 0, 2, 1, Figures())
    line = terminal.getvalue().split("\r")[-1]
    assert line.startswith("math [####............] 1/4")
    assert "  code [................] 0/2 0 done" in line


def test_a_line_overwrites_a_longer_one_before_it(clock: Clock) -> None:
    terminal = Terminal()
    shown = TerminalProgress(terminal)
    shown.update("math", 0, 4, 3, Figures(completed=1000))
    clock.now += 1
    shown.update("math", 1, 4, 3, Figures())
    before, last = terminal.getvalue().split("\r")[1:]
    assert len(last) == len(before)


def test_a_terminal_is_redrawn_at_most_ten_times_per_second(clock: Clock) -> None:
    terminal = Terminal()
    shown = TerminalProgress(terminal)
    for available in range(50):
        shown.update("math", available, 100, 3, Figures())
        clock.now += 0.01
    assert 4 <= terminal.getvalue().count("\r") <= 6
    shown.update("math", 100, 100, 0, Figures())
    assert "100/100" in terminal.getvalue()  # the end is always shown


def test_without_a_terminal_each_task_is_logged_in_turn(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """A task that is updated often does not keep the others out of the log."""
    stream = io.StringIO()
    shown = TerminalProgress(stream)
    with caplog.at_level(logging.INFO, "forebay.produce.stats"):
        for second in range(21):
            shown.update("math", second, 100, 3, Figures(completed=second))
            shown.update("code", 1, 2, 1, Figures())
            clock.now += 1
    assert stream.getvalue() == ""
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "task=math" in line]) == 3
    assert len([line for line in lines if "task=code" in line]) == 3
    assert lines[0] == ("produce_progress task=math available=0 target=100 0 done, 3 in flight, 0 filtered, 0 failed")


def test_a_stream_that_is_closed_missing_or_broken_ends_no_run(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = Terminal()
    closed.close()
    TerminalProgress(closed).update("math", 1, 4, 3, Figures())

    class Broken(Terminal):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    TerminalProgress(Broken()).update("math", 1, 4, 3, Figures())

    class Ascii(Terminal):
        def write(self, text: str) -> int:
            text.encode("ascii")
            return len(text)

    TerminalProgress(Ascii()).update("größe", 1, 4, 3, Figures())
    monkeypatch.setattr(sys, "stderr", None)
    with caplog.at_level(logging.INFO, "forebay.produce.stats"):
        TerminalProgress().update("math", 1, 4, 3, Figures())
    assert "produce_progress task=math" in caplog.text


def test_the_default_progress_follows_standard_error(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    TerminalProgress().update("math", 1, 4, 3, Figures())
    assert "math" in terminal.getvalue()
    assert stats.default_progress() is stats.default_progress()


def test_a_bar_is_full_at_and_beyond_its_target() -> None:
    assert stats.bar(0, 0, width=4) == "[####] 0/0"
    assert stats.bar(9, 3, width=4) == "[####] 9/3"
    assert stats.bar(0, 3, width=4) == "[....] 0/3"


@simulated
async def test_a_strategy_reports_its_progress() -> None:
    heard: list[tuple[str, int, int, int]] = []

    class Listening(NoProgress):
        def update(self, task_name: str, available: int, target: int, in_flight: int, figures: Figures) -> None:
            heard.append((task_name, available, target, in_flight))

    async def staggered(state: RolloutState) -> None:
        await asyncio.sleep(1 + (state.group_id or 0))
        answer(state)

    await Producer(staggered, progress=Listening()).produce(3)
    assert heard[0] == (TASK, 0, 3, 0)
    assert heard[-1] == (TASK, 3, 3, 0)
    assert [available for _, available, _, _ in heard] == sorted(available for _, available, _, _ in heard)
    assert {available + in_flight for _, available, _, in_flight in heard} == {0, 3}
