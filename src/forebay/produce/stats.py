"""Statistics of producing, for any logger, and its progress.

Reading statistics resets nothing. A `Progress` is called whenever the progress of a task changes: the default draws a
bar on standard error if that is a terminal, and logs every ten seconds otherwise; `NoProgress` does neither.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple, Protocol, TextIO

import msgspec
from msgspec.structs import replace

from forebay.core.ledger import Account, End
from forebay.core.rollout import Status

log = logging.getLogger(__name__)

_TIMES_KEPT = 4096
_REWARDS_KEPT = 1024
_VERDICTS_KEPT = 256


STAGES = ("resting", "generating", "judging", "storing")


class Stage(msgspec.Struct):
    """The stage of a group in flight, and since when on the clock of the event loop."""

    group_id: int
    attempt: int
    name: str  # one of STAGES
    since: float
    note: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one attempt at a group ended."""

    group_id: int
    attempt: int
    status: Status | None  # in the buffer; None: the group no longer belonged to this producer
    samples: int
    tokens: int  # new ones
    seconds: float | None  # of generating; None: it was only judged
    judge_s: float | None = None  # None: it was not judged
    failed: bool  # a try was spent
    kept: bool | None = None  # the verdict of the filters; None: it was not finished
    usable: bool = False  # kept, or accepted in spite of a rejection
    error: str | None
    rewards: Sequence[float] = ()  # of members rewarded for the first time


class Figures(msgspec.Struct, kw_only=True):
    """Counts of one task since the start of its run, including resumed runs; groups unless the name says otherwise."""

    attempts: int = 0  # that have ended, in any way
    groups: int = 0  # finished: completed or filtered
    samples: int = 0  # of finished groups
    tokens: int = 0  # generated, in all attempts
    completed: int = 0
    returned: int = 0  # to be generated again
    failed: int = 0  # permanently
    failed_samples: int = 0
    filtered: int = 0
    filtered_samples: int = 0
    discarded: int = 0  # by any process, as of the last call
    failures: int = 0  # attempts that spent a try
    kept: int = 0  # by the filters
    rejected: int = 0
    judged: int = 0  # attempts whose results were judged
    judge_s: float = 0.0
    dropped_responses: int = 0  # samples with a response that was not generated for them
    reward_sum: float = 0.0
    reward_count: int = 0
    pauses: int = 0
    pause_s: float = 0.0
    timed: int = 0  # groups that were generated completely
    times_s: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_TIMES_KEPT))
    rewards: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_REWARDS_KEPT))  # the latest
    verdicts: deque[bool] = msgspec.field(default_factory=lambda: deque(maxlen=_VERDICTS_KEPT))  # of filters

    def count(self, outcome: Outcome) -> None:
        self.attempts += 1
        self.tokens += outcome.tokens
        self.failures += outcome.failed
        self.reward_sum += sum(outcome.rewards)
        self.reward_count += len(outcome.rewards)
        self.rewards.extend(outcome.rewards)
        if outcome.judge_s is not None:
            self.judged += 1
            self.judge_s += outcome.judge_s
        if outcome.kept is not None:
            self.verdicts.append(outcome.usable)
            self.kept += outcome.kept
            self.rejected += not outcome.kept
        if outcome.status in (Status.COMPLETED, Status.FILTERED):
            self.groups += 1
            self.samples += outcome.samples
            if outcome.seconds is not None:
                self.timed += 1
                self.times_s.append(outcome.seconds)
        match outcome.status:
            case Status.COMPLETED:
                self.completed += 1
            case Status.FAILED:
                self.failed += 1
                self.failed_samples += outcome.samples
            case Status.FILTERED:
                self.filtered += 1
                self.filtered_samples += outcome.samples
            case None:
                pass
            case _:
                self.returned += 1

    def since(self, before: Figures) -> Figures:
        """The counts since an earlier copy."""
        new = {name: getattr(self, name) - getattr(before, name) for name in COUNTERS}
        times = list(self.times_s)
        return Figures(times_s=deque(times[max(0, len(times) - new["timed"]) :]), **new)

    def copy(self) -> Figures:
        """A copy of the current counters."""
        return replace(self, times_s=deque(), rewards=deque(), verdicts=deque())

    def counters(self) -> dict[str, float]:
        """The counters, for a checkpoint."""
        return {name: getattr(self, name) for name in COUNTERS}

    def load(self, counters: Mapping[str, float]) -> None:
        """Continue from counters of a checkpoint."""
        for name in COUNTERS:
            kind = float if name.endswith("_s") or name == "reward_sum" else int
            setattr(self, name, kind(counters.get(name, 0)))

    @property
    def acceptance_rate(self) -> float | None:
        """The share of finished groups that the filters kept."""
        finished = self.kept + self.rejected
        return self.kept / finished if finished else None

    def flat(self, task_name: str, in_flight: int) -> dict[str, float]:
        """Values named `forebay/<task>/produce/...`: groups unless the name says otherwise; times in seconds.

        Quantiles are over the last 4,096 groups, the reward over the last 1,024 samples, before filtering.
        """
        hidden = ("reward_sum", "reward_count", "timed")
        values = {name: getattr(self, name) for name in COUNTERS if name not in hidden} | {"in_flight": in_flight}
        values["group_p50_s"], values["group_p99_s"] = quantile(self.times_s, 0.5), quantile(self.times_s, 0.99)
        values["raw_reward_mean"] = mean(self.rewards)
        values["acceptance_rate"] = self.acceptance_rate
        return {f"forebay/{task_name}/produce/{name}": value for name, value in values.items() if value is not None}


COUNTERS = tuple(name for name in Figures.__struct_fields__ if name not in ("times_s", "rewards", "verdicts"))


def quantile(values: Iterable[float], share: float) -> float | None:
    """The value below which this share of the values lies; None if there are none.

    >>> quantile([3, 1, 2, 4], 0.5), quantile([1, 2, 3, 4], 0.99), quantile([], 0.5)
    (3, 4, None)
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else None


def mean(values: Collection[float]) -> float | None:
    """The mean; None if there are no values."""
    return sum(values) / len(values) if values else None


_DRAW_INTERVAL_S = 0.1
_LOG_INTERVAL_S = 10.0


class Progress(Protocol):
    """Receives the progress of tasks. Called often, on the event loop: it must be quick."""

    def update(self, task_name: str, available: int, target: int, in_flight: int, figures: Figures) -> None:
        """Groups available toward a cumulative target, groups in flight, and the counts so far."""


class NoProgress:
    """Shows nothing."""

    def update(self, task_name: str, available: int, target: int, in_flight: int, figures: Figures) -> None:
        pass


class TerminalProgress:
    """One line for all tasks, redrawn in place; without a terminal, a log line every ten seconds."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._next_s: dict[str | None, float] = {}  # by task for the log; None: the line on the terminal
        self._lines: dict[str, str] = {}
        self._width = 0

    def update(self, task_name: str, available: int, target: int, in_flight: int, figures: Figures) -> None:
        stream = sys.stderr if self._stream is None else self._stream
        terminal = _is_terminal(stream)
        now, key = time.monotonic(), None if terminal else task_name
        due = now >= self._next_s.get(key, 0.0)
        if not due and not (terminal and available >= target):
            return
        counts = (
            f"{figures.completed} done, {in_flight} in flight, {figures.filtered} filtered, {figures.failed} failed"
        )
        self._next_s[key] = now + (_DRAW_INTERVAL_S if terminal else _LOG_INTERVAL_S)
        if not terminal:
            log.info("produce_progress task=%s available=%d target=%d %s", task_name, available, target, counts)
            return
        missing = max(0, target - available)
        self._lines[task_name] = f"{task_name} {bar(target - missing, target)} {counts}"
        line = "  ".join(self._lines.values())
        with suppress(OSError, ValueError):  # the stream is closed, or cannot encode a name; neither ends a run
            stream.write("\r" + line.ljust(self._width))
            stream.flush()
        self._width = len(line)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()  # None in a process without a console
    except ValueError:  # closed
        return False


def bar(done: int, total: int, width: int = 16) -> str:
    """A progress bar as a string.

    >>> bar(3, 4, width=8)
    '[######..] 3/4'
    """
    filled = width if total <= 0 else width * min(done, total) // total
    return f"[{'#' * filled}{'.' * (width - filled)}] {done}/{total}"


@cache
def default_progress() -> TerminalProgress:
    """The instance that all strategies of a process share, so that they draw one line."""
    return TerminalProgress()


class Totals(NamedTuple):
    """Groups that came back complete, groups that filters rejected, and attempts that failed, as the storage counts."""

    completed: int
    rejected: int
    failures: int


class Elsewhere:
    """What other producers of a task do: the counts of the storage without those of this one."""

    def __init__(self) -> None:
        self._here = Totals(0, 0, 0)
        self._heard: Totals | None = None

    def count(self, outcome: Outcome) -> None:
        """An attempt of this producer has ended."""
        completed, rejected = outcome.status is Status.COMPLETED, outcome.status is Status.FILTERED
        new = (completed, rejected, outcome.failed)
        self._here = Totals(*[known + more for known, more in zip(self._here, new, strict=True)])

    def hear(self, account: Account) -> Totals:
        """What others have done since the last time."""
        counted = (account.completed, account.ended.get(End.FILTERED, 0), account.failures)
        now = Totals(*[count - here for count, here in zip(counted, self._here, strict=True)])
        before, self._heard = self._heard or now, now
        return Totals(*[max(0, n - known) for n, known in zip(now, before, strict=True)])


class Production(msgspec.Struct, frozen=True, kw_only=True):
    """How a call of `produce_batch` ended, in groups."""

    task_name: str
    complete: bool  # the target was reached; otherwise a pause began, or the task is exhausted
    exhausted: bool = False  # filters reject everything, and the task is to be skipped
    ended: bool = False  # the data set has no more prompts, and nothing is left to generate
    left: int = 0  # groups that are buffered or leased, complete
    rejections: int = 0  # groups in a row that filters rejected last
    target: int
    available: int
    started: int
    tail: bool
    seconds: float
