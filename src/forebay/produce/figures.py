"""What producing can say of itself: figures for any logger. Reading them resets nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from forebay.rollout import Status

__all__ = ["Figures", "Outcome", "quantile"]

_TIMES_KEPT = 4096


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one attempt at a group ended."""

    group_id: int
    attempt: int
    status: Status | None  # as it went into the buffer; None: it was no longer ours
    samples: int
    tokens: int  # new ones
    seconds: float | None  # of generating; None: it was only judged
    judge_s: float = 0.0
    failed: bool  # a try was spent
    kept: bool | None = None  # by the filters, whatever became of it; None: it was not finished
    error: str | None
    rewards: Sequence[float] = ()  # of members rewarded for the first time


class Figures(msgspec.Struct, kw_only=True):
    """Counts of one task since its strategy was made."""

    groups: int = 0  # attempts that ended
    samples: int = 0
    tokens: int = 0
    completed: int = 0
    returned: int = 0  # to be generated again
    failed: int = 0  # for good
    filtered: int = 0
    discarded: int = 0  # by anyone, as of the last call
    failures: int = 0  # attempts that cost a try
    dropped_responses: int = 0  # samples that came with a response that nobody generated for them
    reward_sum: float = 0.0
    reward_count: int = 0
    pauses: int = 0
    pause_s: float = 0.0
    timed: int = 0  # groups that were generated to their end
    times_s: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_TIMES_KEPT))

    def count(self, outcome: Outcome) -> None:
        self.groups += 1
        self.samples += outcome.samples
        self.tokens += outcome.tokens
        self.failures += outcome.failed
        self.reward_sum += sum(outcome.rewards)
        self.reward_count += len(outcome.rewards)
        match outcome.status:
            case Status.COMPLETED:
                self.completed += 1
                self._time(outcome.seconds)
            case Status.FAILED:
                self.failed += 1
            case Status.FILTERED:
                self.filtered += 1
                self._time(outcome.seconds)
            case None:
                pass
            case _:
                self.returned += 1

    def _time(self, seconds: float | None) -> None:
        if seconds is not None:
            self.timed += 1
            self.times_s.append(seconds)

    def since(self, before: Figures) -> Figures:
        """What was counted after an earlier copy of these figures was made."""
        new = {
            name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__ if name != "times_s"
        }
        times = list(self.times_s)
        return Figures(times_s=deque(times[max(0, len(times) - new["timed"]) :]), **new)

    def copy(self) -> Figures:
        """The figures as they are now."""
        return replace(self, times_s=deque())

    def flat(self, task_name: str, in_flight: int) -> dict[str, float]:
        """As `forebay/<task>/produce/...`, in groups unless the name says otherwise; times in seconds."""
        times = sorted(self.times_s)
        values: dict[str, float] = {
            "groups": self.groups,
            "samples": self.samples,
            "tokens": self.tokens,
            "completed": self.completed,
            "returned": self.returned,
            "failed": self.failed,
            "filtered": self.filtered,
            "discarded": self.discarded,
            "failures": self.failures,
            "dropped_responses": self.dropped_responses,
            "in_flight": in_flight,
            "pauses": self.pauses,
            "pause_s": self.pause_s,
        }
        if times:
            values |= {"group_p50_s": quantile(times, 0.5), "group_p99_s": quantile(times, 0.99)}
        if self.reward_count:
            values["raw_reward_mean"] = self.reward_sum / self.reward_count
        return {f"forebay/{task_name}/produce/{name}": value for name, value in values.items()}


def quantile(ordered: Iterable[float], share: float) -> float:
    """The value below which this share of sorted values lies.

    >>> quantile([1, 2, 3, 4], 0.5), quantile([1, 2, 3, 4], 0.99)
    (3, 4)
    """
    values = list(ordered)
    return values[min(len(values) - 1, int(len(values) * share))]
