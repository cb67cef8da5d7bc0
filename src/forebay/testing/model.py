"""A plain model of a buffer for `forebay.testing.machine`: its rules restated with lists and scans.

It shares no code with the buffer that it checks, on purpose: of Forebay it uses only the statuses.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from forebay.core.rollout import Status

TASKS = ("a", "b")
PLACES = ("in_flight", "buffered", "leased")
ENDS = ("trained", "filtered", "failed", "discarded")
PRECEDENCE = (Status.FAILED, Status.EXPIRED, Status.ABORTED, Status.FILTERED, Status.INIT)
AGEING = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)
RETRIES = (Status.INIT, Status.EXPIRED, Status.ABORTED)


@dataclass(eq=False)
class Member:
    """One sample: its status, and the model step of each of its tokens."""

    status: Status
    steps: list[int]


@dataclass(eq=False)
class ModelGroup:
    """One group."""

    task: str
    group_id: int
    members: list[Member]
    place: str = "nowhere"
    arrival: int = 0
    attempt: int = 0
    train_step: int = 0
    created: int = 0

    @property
    def identity(self) -> tuple[str, int]:
        return self.task, self.group_id

    @property
    def status(self) -> Status:
        found = [member.status for member in self.members]
        return next((status for status in PRECEDENCE if status in found), Status.COMPLETED)

    @property
    def tokens(self) -> int:
        return sum(len(member.steps) for member in self.members)

    @property
    def oldest(self) -> float:
        return min((step for member in self.members for step in member.steps), default=float("inf"))

    def draw(self) -> None:
        """The group is generated again."""
        self.place = "in_flight"
        self.attempt += 1


@dataclass(eq=False)
class Model:
    """The buffer, restated with a list."""

    by_staleness: bool
    max_groups: int
    groups: list[ModelGroup] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # groups issued and ended, by task
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)  # tokens issued, ended and reset, by task
    cursor: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TASKS, 0))
    ends: list[tuple[str, int, str]] = field(default_factory=list)  # that on_group_end has to report, in any order
    arrivals: int = 0
    created: int = 0
    thresholds: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    retryable: dict[str, bool] = field(default_factory=lambda: dict.fromkeys(TASKS, True))
    watermark: dict[str, int] = field(default_factory=dict)
    saved_step: int | None = None  # of the checkpoint that the store can be rewound to
    archive: list[ModelGroup] = field(default_factory=list)  # acknowledged after the saved weights

    def add(self, group: ModelGroup) -> None:
        self.created += 1
        group.created = self.created
        self.groups.append(group)

    def rewind(self, model_step: int) -> list[ModelGroup]:
        """The weights go back to an earlier step: groups that only lost weights were trained on are buffered again."""
        lost = [group for group in self.archive if group.train_step > model_step]
        for group in lost:
            group.place = "buffered"
            self.groups.append(group)
            self.counts[group.task, "trained"] -= 1
            self.tokens[group.task, "trained"] -= group.tokens
        self.archive.clear()
        for task, step in self.watermark.items():
            self.watermark[task] = min(step, model_step + 1)
        return lost

    def find(self, identity: tuple[str, int]) -> ModelGroup:
        return next(group for group in self.groups if group.identity == identity)

    def at(self, place: str, task: str | None = None) -> list[ModelGroup]:
        return [group for group in self.groups if group.place == place and task in (None, group.task)]

    def free(self) -> int:
        return max(0, self.max_groups - len(self.groups))

    def arrive(self, group: ModelGroup, place: str = "buffered") -> None:
        self.arrivals += 1
        group.arrival = self.arrivals
        group.place = place

    def end(self, group: ModelGroup, end: str, *, reported: bool = True) -> None:
        self.groups.remove(group)
        if reported:
            self.ends.append((*group.identity, end))
        self.counts[group.task, end] += 1
        self.tokens[group.task, end] += group.tokens

    def is_stale(self, task: str, member: Member, train_step: int) -> bool:
        threshold, token_threshold = self.thresholds[task]
        if threshold is not None and any(train_step - step - 1 >= threshold for step in member.steps):
            return True
        if token_threshold is None or not member.steps:
            return False
        return all(train_step - step - 1 >= token_threshold for step in member.steps)

    def judge(self, group: ModelGroup, train_step: int) -> bool:
        """Expire the stale members of a group; False if it has to be dropped instead."""
        if group.status not in AGEING:
            return True
        stale = [member for member in group.members if self.is_stale(group.task, member, train_step)]
        if not self.retryable[group.task]:
            return not stale
        for member in stale:
            if group in self.groups:
                self.tokens[group.task, "reset"] += len(member.steps)
            member.status, member.steps = Status.EXPIRED, []
        return True

    def keeps(self, group: ModelGroup, train_step: int | None) -> bool:
        """Judge a group on arrival, unless there is no train step; whether it is kept."""
        if train_step is None:
            return True
        return self.judge(group, train_step) and (self.retryable[group.task] or group.status is not Status.EXPIRED)

    def expire_due(self, task: str) -> int:
        """Judge every buffered group of a task by its watermark; how many newly expired."""
        newly_expired = 0
        for group in self.at("buffered", task):
            before = group.status
            if task in self.watermark and not self.judge(group, self.watermark[task]):
                self.end(group, "discarded")
                newly_expired += before is not Status.EXPIRED
            elif group.status is Status.EXPIRED and before is not Status.EXPIRED:
                newly_expired += 1
        return newly_expired

    def in_order(self, task: str, *statuses: Status, by_group: bool = False) -> list[ModelGroup]:
        def key(group: ModelGroup) -> tuple[float, ...]:
            if by_group:
                return (group.group_id,)
            return (group.oldest, group.arrival) if self.by_staleness else (group.arrival,)

        found: list[ModelGroup] = []
        for status in statuses:
            found += sorted((group for group in self.at("buffered", task) if group.status is status), key=key)
        return found

    def claimed(self, task: str, n: int, *statuses: Status, by_group: bool = False) -> list[ModelGroup]:
        """The groups that a claim takes: fresh groups first, then those that expire because of the claim."""
        if not n:
            return []
        before = {group: group.status for group in self.at("buffered", task)}
        self.expire_due(task)
        found = self.in_order(task, *statuses, by_group=by_group)
        return sorted(found, key=lambda group: before[group] is not group.status)[:n]

    def ledger(self, task: str, *, tokens: bool) -> dict[str, int]:
        counted = self.tokens if tokens else self.counts
        line = {"issued": counted[task, "issued"]}
        line |= {place: sum(g.tokens if tokens else 1 for g in self.at(place, task)) for place in PLACES}
        line |= {end: counted[task, end] for end in (*ENDS, *(("reset",) if tokens else ()))}
        return line
