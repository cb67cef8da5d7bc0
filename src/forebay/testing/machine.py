"""A machine that tries everything: random histories of a buffer, compared with a plain model after every step.

    TestMyStorage = machine_for(MyStorage, StalenessReplayPolicy()).TestCase

Needs hypothesis. The model restates the rules in the plainest way (lists, scans, no index), on purpose without the
functions that it checks. After every step: the ledger is closed and equal to the model's (G1), groups are whole
and unmixed (G2), places and statuses agree; on every hand-out the order is the policy's, nothing reaches its
staleness threshold (G6), and a lost lease cannot be settled (G5).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.internal import internals
from forebay.buffer.lease import Lease
from forebay.core.ledger import GroupEnd, Place
from forebay.core.policy import ReplayPolicy, StalenessReplayPolicy
from forebay.core.rollout import RolloutState, Status
from forebay.errors import BufferClosed, DuplicateGroup, InvalidInput, LostLease, WaitTimeout
from forebay.storage.base import Storage

__all__ = ["BufferMachine", "machine_for"]

T = TypeVar("T")
TASKS = ("a", "b")
PRECEDENCE = (Status.FAILED, Status.EXPIRED, Status.ABORTED, Status.FILTERED, Status.INIT)
AGEING = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)
RETRIES = (Status.INIT, Status.EXPIRED, Status.ABORTED)


class Member:
    """One sample of the model: its status, and the model step of each of its tokens."""

    def __init__(self, status: Status, steps: list[int]) -> None:
        self.status = status
        self.steps = steps


class ModelGroup:
    """One group of the model."""

    def __init__(self, task: str, group_id: int, members: list[Member], place: str) -> None:
        self.task = task
        self.group_id = group_id
        self.members = members
        self.place = place
        self.arrival = 0
        self.attempt = 0
        self.train_step = 0
        self.created = 0

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


class Model:
    """The buffer, restated with a list."""

    def __init__(self, by_staleness: bool, max_groups: int) -> None:
        self.by_staleness = by_staleness
        self.max_groups = max_groups
        self.groups: list[ModelGroup] = []
        self.issued = dict.fromkeys(TASKS, 0)
        self.cursor = dict.fromkeys(TASKS, 0)
        self.ended: dict[tuple[str, str], int] = {}
        self.issued_tokens = dict.fromkeys(TASKS, 0)
        self.reset_tokens = dict.fromkeys(TASKS, 0)
        self.ended_tokens: dict[tuple[str, str], int] = {}
        self.told: list[tuple[str, int, str]] = []  # what on_group_end has to be told, in any order
        self.arrivals = 0
        self.thresholds: dict[str, tuple[int | None, int | None]] = {}
        self.retryable = dict.fromkeys(TASKS, True)
        self.watermark: dict[str, int] = {}
        self.created = 0
        self.saved_step: int | None = None  # of the checkpoint that the store can be rewound to
        self.archive: list[ModelGroup] = []  # acknowledged, and unknown to the saved weights

    def add(self, group: ModelGroup) -> None:
        self.created += 1
        group.created = self.created
        self.groups.append(group)

    def come_back(self, model_step: int) -> list[ModelGroup]:
        """The weights go back: what only the lost ones were trained on is buffered again."""
        lost = [group for group in self.archive if group.train_step > model_step]
        for group in lost:
            group.place = "buffered"
            self.groups.append(group)
            self.ended[group.task, "trained"] -= 1
            self.ended_tokens[group.task, "trained"] -= group.tokens
        self.archive.clear()
        for task, step in self.watermark.items():
            self.watermark[task] = min(step, model_step + 1)
        return lost

    def find(self, identity: tuple[str, int]) -> ModelGroup | None:
        return next((group for group in self.groups if group.identity == identity), None)

    def at(self, place: str, task: str | None = None) -> list[ModelGroup]:
        return [group for group in self.groups if group.place == place and task in (None, group.task)]

    def has_room(self, n: int) -> bool:
        return len(self.groups) + n <= self.max_groups

    def arrive(self, group: ModelGroup, place: str = "buffered") -> None:
        self.arrivals += 1
        group.arrival = self.arrivals
        group.place = place

    def end(self, group: ModelGroup, end: str, *, told: bool = True) -> None:
        self.groups.remove(group)
        if told:
            self.told.append((*group.identity, end))
        self.ended[group.task, end] = self.ended.get((group.task, end), 0) + 1
        self.ended_tokens[group.task, end] = self.ended_tokens.get((group.task, end), 0) + group.tokens

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
                self.reset_tokens[group.task] += len(member.steps)
            member.status, member.steps = Status.EXPIRED, []
        return True

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
        """What a claim takes: fresh groups first, then those that expire because of the claim."""
        if not n:
            return []
        before = {id(group): group.status for group in self.at("buffered", task)}
        self.expire_due(task)
        found = self.in_order(task, *statuses, by_group=by_group)
        fresh = [group for group in found if before[id(group)] is group.status]
        return [*fresh, *(group for group in found if group not in fresh)][:n]

    def token_ledger(self, task: str) -> dict[str, int]:
        line = {place: sum(g.tokens for g in self.at(place, task)) for place in ("in_flight", "buffered", "leased")}
        line |= {end: self.ended_tokens.get((task, end), 0) for end in ("trained", "filtered", "failed", "discarded")}
        return {"issued": self.issued_tokens[task], **line, "reset": self.reset_tokens[task]}

    def ledger(self, task: str) -> dict[str, int]:
        line = {place: len(self.at(place, task)) for place in ("in_flight", "buffered", "leased")}
        line |= {end: self.ended.get((task, end), 0) for end in ("trained", "filtered", "failed", "discarded")}
        return {"issued": self.issued[task], **line}


members = st.lists(
    st.tuples(st.sampled_from([Status.COMPLETED, Status.COMPLETED, Status.ABORTED]), st.integers(0, 3)),
    min_size=1,
    max_size=3,
)
tasks = st.sampled_from(TASKS)
others = [Status.ABORTED, Status.EXPIRED, Status.INIT, Status.FAILED, Status.FILTERED]
statuses = st.sampled_from([Status.COMPLETED] * 8 + others)


# What ends many stories early happens in one of its turns out of four.
seldom = st.sampled_from([False, False, False, True])


class BufferMachine(RuleBasedStateMachine):
    """See `machine_for`."""

    make_storage: Callable[[], Storage]
    policy: ReplayPolicy

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.storage = type(self).make_storage()
        self.train_step = 1
        self.model = Model(isinstance(self.policy, StalenessReplayPolicy), max_groups=24)
        self.leases: list[Lease] = []
        self.lost_leases: list[Lease] = []
        self.lost_attempts: list[tuple[str, int, int]] = []
        self.trained: set[tuple[str, int]] = set()
        self.next_hand_id = 1_000
        self.directory = tempfile.TemporaryDirectory()
        self.heard: list[tuple[str, int, str]] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    def teardown(self) -> None:
        try:
            if hasattr(self, "buffer"):  # a run can end before its first step
                self.close()
        finally:
            self.loop.close()
            self.directory.cleanup()

    @initialize(
        thresholds=st.fixed_dictionaries(
            {task: st.tuples(st.sampled_from([None, 1, 3]), st.sampled_from([None, None, 2])) for task in TASKS}
        ),
        retryable=st.booleans(),
    )
    def start(self, thresholds: dict[str, tuple[int | None, int | None]], retryable: bool) -> None:
        self.model.thresholds = thresholds
        self.model.retryable["b"] = retryable
        self.open()

    def open(self) -> None:
        self.buffer = ReplayBuffer(self.policy, self.storage, max_groups=self.model.max_groups, on_group_end=self.hear)
        for task, (threshold, token_threshold) in self.model.thresholds.items():
            self.run(
                self.buffer.set_limits(
                    task,
                    stale_threshold=threshold,
                    token_stale_threshold=token_threshold,
                    retryable=self.model.retryable[task],
                )
            )

    async def hear(self, event: GroupEnd) -> None:
        self.heard.append((event.task_name, event.group_id, str(event.end)))

    def close(self) -> None:
        """Without a crash every end is told exactly once, on every storage."""
        self.run(self.buffer.close())
        assert sorted(self.heard) == sorted(self.model.told)

    # --- in -----------------------------------------------------------------------------------------

    @rule(task=tasks, n=st.integers(1, 3))
    def issue(self, task: str, n: int) -> None:
        cursor = self.model.cursor[task]
        prompts = [[RolloutState(message=[{"content": f"{task}:{cursor + i}"}]) for _ in range(2)] for i in range(n)]
        issued = self.run(internals(self.buffer).issue(prompts, task, cursor=cursor))
        while not self.model.has_room(n):
            n -= 1
        assert issued.taken == len(issued.groups) == n
        for i, group in enumerate(issued.groups):
            assert [(state.group_id, state.attempt) for state in group] == [(cursor + i, 1)] * 2
            drawn = ModelGroup(task, cursor + i, [Member(Status.INIT, []) for _ in range(2)], "in_flight")
            drawn.attempt = 1
            self.model.arrive(drawn, "in_flight")
            self.model.add(drawn)
        self.model.cursor[task] += n
        self.model.issued[task] += n

    @precondition(lambda self: self.model.at("in_flight"))
    @rule(
        data=st.data(),
        made=members,
        end=st.sampled_from([None] * 6 + [Status.FAILED, Status.FILTERED]),
        judged=st.booleans(),
        lag=st.integers(0, 3),
        named=st.booleans(),
    )
    def bring_back(
        self,
        data: st.DataObject,
        made: list[tuple[Status, int]],
        end: Status | None,
        judged: bool,
        lag: int,
        named: bool,
    ) -> None:
        group = data.draw(st.sampled_from(self.model.at("in_flight")))
        model_step = max(0, self.train_step - 1 - lag)
        before = group.tokens
        group.members = [Member(end or status, [model_step] * tokens) for status, tokens in made]
        self.model.issued_tokens[group.task] += max(0, group.tokens - before)
        self.model.reset_tokens[group.task] += max(0, before - group.tokens)
        samples = self.samples(group, attempt=group.attempt if named else None)
        self.run(self.buffer.put(samples, group.task, current_train_step=self.train_step if judged else None))
        self.arrived(group, judged, came_back=True)

    def arrived(self, group: ModelGroup, judged: bool, *, came_back: bool) -> None:
        model = self.model
        dropped = judged and (
            not model.judge(group, self.train_step)
            or (group.status is Status.EXPIRED and not model.retryable[group.task])
        )
        if dropped:
            model.end(group, "discarded")
        elif came_back and group.status in (Status.FAILED, Status.FILTERED):
            model.end(group, str(group.status))
        else:
            model.arrive(group)

    @rule(task=tasks, status=statuses, tokens=st.integers(0, 2), judged=st.booleans(), lag=st.integers(0, 3))
    def put_by_hand(self, task: str, status: Status, tokens: int, judged: bool, lag: int) -> None:
        generated = tokens if status not in (Status.INIT, Status.EXPIRED) else 0
        steps = [max(0, self.train_step - 1 - lag)] * generated
        self.next_hand_id += 1
        group = ModelGroup(task, self.next_hand_id, [Member(status, list(steps)) for _ in range(2)], "buffered")
        step = self.train_step if judged else None
        put = self.buffer.put(self.samples(group), task, current_train_step=step, timeout_s=0)
        # What is stale on arrival never takes a place.
        self.model.add(group)
        probe = ModelGroup(task, 0, [Member(status, list(steps)) for _ in range(2)], "probe")
        stays = not judged or (
            self.model.judge(probe, self.train_step)
            and not (probe.status is Status.EXPIRED and not self.model.retryable[task])
        )
        if stays and not self.model.has_room(0):
            self.model.groups.remove(group)
            self.expect(WaitTimeout, put)
            return
        self.run(put)
        self.model.issued[task] += 1
        self.model.issued_tokens[task] += group.tokens
        self.arrived(group, judged, came_back=False)

    # Single steps seldom line up to a whole life of a group; these two make sure that they do.

    @rule(task=tasks, n=st.integers(1, 4), tokens=st.integers(0, 2))
    def put_several(self, task: str, n: int, tokens: int) -> None:
        for _ in range(n):
            self.put_by_hand(task, Status.COMPLETED, tokens, False, 0)

    @rule(a=st.integers(0, 3), b=st.integers(0, 3), how=st.sampled_from(["ack", "ack", "nack", "reject"]))
    def train_on_what_is_there(self, a: int, b: int, how: str) -> None:
        before = len(self.leases)
        self.lease(a, b, 0, False)
        if len(self.leases) > before:
            self.settle_lease(self.leases.pop(), how)

    @precondition(lambda self: self.model.at("buffered") + self.model.at("leased"))
    @rule(data=st.data())
    def put_what_is_there(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.model.at("buffered") + self.model.at("leased")))
        self.expect(DuplicateGroup, self.buffer.put(self.samples(group), group.task))

    @precondition(lambda self: self.lost_attempts)
    @rule(data=st.data())
    def put_under_a_lost_attempt(self, data: st.DataObject) -> None:
        task, group_id, attempt = data.draw(st.sampled_from(self.lost_attempts))
        group = ModelGroup(task, group_id, [Member(Status.COMPLETED, [0])], "nowhere")
        self.expect(LostLease, self.buffer.put(self.samples(group, attempt=attempt), task))

    def samples(self, group: ModelGroup, attempt: int | None = None) -> list[RolloutState]:
        made = []
        for index, member in enumerate(group.members):
            text_only = member.status is Status.COMPLETED and not member.steps
            state = RolloutState(
                message=[{"content": f"{group.task}:{group.group_id}"}],
                task_name=group.task,
                group_id=group.group_id,
                rollout_id=index,
                attempt=attempt,
                response="text" if text_only else None,
                response_ids=None if text_only else [0] * len(member.steps),
                status=member.status,
            )
            state.response_model_steps = member.steps
            made.append(state)
        return made

    # --- out ----------------------------------------------------------------------------------------

    @rule(task=tasks, n=st.integers(0, 3), status=st.sampled_from([Status.COMPLETED, *others]))
    def take(self, task: str, n: int, status: Status) -> None:
        expected = self.model.claimed(task, n, status)
        self.handed_out(self.run(self.buffer.get(n, task, status)), expected)
        for group in expected:
            if status in RETRIES:
                group.place = "in_flight"
                group.attempt += 1
            else:
                self.model.end(group, "trained" if status is Status.COMPLETED else str(status))
                self.train(group)

    @rule(task=tasks, n=st.integers(1, 3))
    def redraw(self, task: str, n: int) -> None:
        expected = self.model.claimed(task, n, *RETRIES, by_group=True)
        groups = self.run(internals(self.buffer).redraw(n, task))
        for group in expected:
            group.place = "in_flight"
            group.attempt += 1
        self.handed_out(groups, expected)
        assert [group[0].attempt for group in groups] == [group.attempt for group in expected]

    @rule(a=st.integers(0, 2), b=st.integers(0, 2), advance=st.sampled_from([0, 0, 1, 2]), too_much=seldom)
    def lease(self, a: int, b: int, advance: int, too_much: bool) -> None:
        self.train_step += advance
        wants = {"a": a, "b": b}
        if not too_much:  # nearly always ask for what is there, so that batches are granted
            wants = {task: min(n, len(self.model.in_order(task, Status.COMPLETED))) for task, n in wants.items()}
        expected: dict[str, list[ModelGroup]] = {}
        for task, n in wants.items():
            if n:
                self.model.watermark[task] = self.train_step
                self.model.expire_due(task)
            expected[task] = self.model.in_order(task, Status.COMPLETED)[:n]

        async def lease() -> Lease:
            return await self.buffer.lease_batch(wants, train_step=self.train_step, timeout_s=0)

        if any(len(expected[task]) < n for task, n in wants.items()):
            self.expect(WaitTimeout, lease())
            return
        leased = self.run(lease())
        for task, groups in leased.groups_by_task.items():
            self.handed_out(groups, expected[task])
            for group in groups:
                self.is_fresh(task, group)
            for known in expected[task]:
                known.place = "leased"
                known.train_step = self.train_step
        self.leases.append(leased)

    def is_fresh(self, task: str, group: list[RolloutState]) -> None:
        """G6, stated once more on what the trainer got."""
        threshold, token_threshold = self.model.thresholds[task]
        for state in group:
            steps = state.response_model_steps
            if threshold is not None and steps:
                assert self.train_step - min(steps) - 1 < threshold
            if token_threshold is not None and steps:
                assert state.response_mask is not None
                expected = [int(self.train_step - step - 1 < token_threshold) for step in steps]
                assert list(state.response_mask) == expected
                assert any(expected)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), how=st.sampled_from(["ack", "nack", "reject"]))
    def settle(self, data: st.DataObject, how: str) -> None:
        self.settle_lease(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))), how)

    def settle_lease(self, lease: Lease, how: str) -> None:
        groups = [self.model.find((group[0].task_name or "", group[0].group_id or 0)) for group in lease.groups]
        if how == "reject" and lease.groups:
            self.run(lease.reject(lease.groups[:1], "not this one"))
            rejected = groups.pop(0)
            assert rejected is not None
            self.model.end(rejected, "discarded")
        self.run(lease.nack() if how == "nack" else lease.ack())
        for group in groups:
            assert group is not None
            if how == "nack":
                group.place = "buffered"
            else:
                self.model.end(group, "trained")
                self.train(group)
                saved = self.model.saved_step
                if self.storage.durable and saved is not None and group.train_step > saved:
                    self.model.archive.append(group)

    def train(self, group: ModelGroup) -> None:
        if group.status is Status.COMPLETED:
            assert group.identity not in self.trained, "trained twice"
            self.trained.add(group.identity)

    @precondition(lambda self: self.lost_leases)
    @rule(data=st.data(), ack=st.booleans())
    def settle_a_lost_lease(self, data: st.DataObject, ack: bool) -> None:
        lease = data.draw(st.sampled_from(self.lost_leases))
        try:
            self.run(lease.ack() if ack else lease.nack())
        except (LostLease, BufferClosed):
            return
        raise AssertionError("G5: a lost lease was settled")

    def handed_out(self, groups: list[list[RolloutState]], expected: list[ModelGroup]) -> None:
        """What came out is what the model says, in its order, whole and unmixed (G2)."""
        assert [(group[0].task_name, group[0].group_id) for group in groups] == [g.identity for g in expected]
        for group, known in zip(groups, expected, strict=True):
            assert {state.message[0]["content"] for state in group} == {f"{known.task}:{known.group_id}"}
            assert [len(state.response_model_steps) for state in group] == [len(m.steps) for m in known.members]

    # --- age, discards, restarts --------------------------------------------------------------------

    @rule(advance=st.integers(0, 3))
    def refresh(self, advance: int) -> None:
        self.train_step += advance
        self.model.watermark |= dict.fromkeys(TASKS, self.train_step)
        expected = {task: self.model.expire_due(task) for task in TASKS}
        for task in TASKS:
            if not self.model.retryable[task]:
                for group in self.model.in_order(task, Status.EXPIRED):
                    self.model.end(group, "discarded")
        found = self.run(
            self.buffer.refresh_staleness(
                task_stale_thresholds=dict.fromkeys(TASKS), current_train_step=self.train_step
            )
        )
        assert found == expected

    @rule(task=tasks, tokens=st.integers(2, 5), now=seldom)
    def discard(self, task: str, tokens: int, now: bool) -> None:
        if not now:
            return
        query = {"task_name": task, "tokens": {"$gte": tokens}}
        matching = [g for g in self.model.at("buffered", task) if g.tokens >= tokens]
        assert self.run(self.buffer.discard(query, "too long")) == len(matching)
        for group in matching:
            self.model.end(group, "discarded")

    @rule(move=st.booleans(), now=seldom)
    def reopen(self, move: bool, now: bool) -> None:
        """The process ends, what it held comes back; perhaps everything moves to another storage on the way."""
        if not now:
            return
        self.close()
        if move:
            self.storage = self.run(self.moved())
            self.model.saved_step = None  # that was of another store; acknowledged groups that are kept came along
        self.open()
        self.came_back()

    def came_back(self) -> None:
        for group in sorted(self.model.at("in_flight"), key=lambda group: group.created):
            self.lost_attempts.append((group.task, group.group_id, group.attempt))
            for member in group.members:
                if member.status is not Status.COMPLETED:
                    member.status = Status.ABORTED
            self.model.arrive(group)
        for group in self.model.at("leased"):
            group.place = "buffered"
        self.lost_leases += [lease for lease in self.leases if lease.groups]
        self.leases.clear()

    @rule(lag=st.sampled_from([None, 0, 1]), now=seldom)
    def resume_from_a_checkpoint(self, lag: int | None, now: bool) -> None:
        """The process ends; another one takes up its checkpoint, with the weights of some step, in an empty storage."""
        if not now:
            return
        model_step = None if lag is None else max(0, self.train_step - lag)
        with tempfile.TemporaryDirectory() as directory:
            self.run(self.buffer.save(directory, model_step=model_step))
            self.close()
            self.storage = type(self).make_storage()
            self.open()
            assert self.run(self.buffer.resume(directory)) == model_step
        if model_step is not None:
            for group in self.model.come_back(model_step):
                self.trained.discard(group.identity)
        self.forget_the_checkpoint()
        for group in list(self.model.groups):
            if group.place == "leased" and model_step is not None and group.train_step <= model_step:
                self.model.end(group, "trained", told=False)  # it ended in the checkpoint
                self.train(group)
            elif group.place == "in_flight":
                self.lost_attempts.append((group.task, group.group_id, group.attempt))
                for member in group.members:
                    if member.status is not Status.COMPLETED:
                        member.status = Status.ABORTED
            group.place = "buffered"
        self.lost_leases += [lease for lease in self.leases if lease.groups]
        self.leases.clear()

    def forget_the_checkpoint(self) -> None:
        """It was of another store than the one that is used now, and has no acknowledged groups."""
        self.model.saved_step = None
        self.model.archive.clear()

    @precondition(lambda self: self.storage.durable)
    @rule(lag=st.integers(0, 3), advance=st.integers(0, 1))
    def save(self, lag: int, advance: int) -> None:
        self.train_step += advance
        model_step = max(0, self.train_step - lag)
        self.run(self.buffer.save(self.directory.name, model_step=model_step))
        self.model.saved_step = model_step
        self.model.archive = [group for group in self.model.archive if group.train_step > model_step]

    @precondition(lambda self: self.model.saved_step is not None)
    @rule(a=st.integers(0, 2), b=st.integers(0, 2))
    def train_and_lose_the_weights(self, a: int, b: int) -> None:
        """What random steps seldom line up: a batch is trained on, and then its weights are gone."""
        self.lease(a, b, 1, False)
        if self.leases:
            self.settle_lease(self.leases.pop(), "ack")
        self.rewind()

    @precondition(lambda self: self.model.saved_step is not None)
    @rule()
    def rewind(self) -> None:
        """The weights are lost, those of the checkpoint are taken up, and the same store goes back to them."""
        saved = self.model.saved_step
        assert saved is not None
        assert self.run(self.buffer.resume(self.directory.name)) == saved
        for group in self.model.come_back(saved):
            self.trained.discard(group.identity)

    @rule(now=seldom)
    def lose_everything_held(self, now: bool) -> None:
        """The storage takes this buffer for dead; the buffer itself lives on, and does not know."""
        if not now:
            return
        self.run(self.storage.release(self.buffer.owner))
        self.came_back()

    async def moved(self) -> Storage:
        storage = type(self).make_storage()
        for each in (self.storage, storage):
            await each.open("mover", self.buffer._session.settings, None)
        snapshot = await self.storage.snapshot()
        await storage.restore(snapshot.accounts, snapshot.next_uid, snapshot.next_timestamp_id, snapshot.rows)
        for each in (self.storage, storage):
            await each.close("mover")
        return storage

    # --- always -------------------------------------------------------------------------------------

    def expect(self, kind: type[Exception], work: Coroutine[Any, Any, object]) -> None:
        try:
            self.run(work)
        except kind:
            return
        raise AssertionError(f"{kind.__name__} was expected")

    @invariant()
    def the_model_agrees(self) -> None:
        if not hasattr(self, "buffer"):
            return
        ledger, token_ledger = self.run(self.buffer.ledger()), self.run(self.buffer.ledger(tokens=True))
        for task in TASKS:
            line = ledger.get(task, dict.fromkeys(self.model.ledger(task), 0))
            assert line == self.model.ledger(task)
            assert line["issued"] == sum(line.values()) - line["issued"], "G1: the ledger is open"
            line = token_ledger.get(task, dict.fromkeys(self.model.token_ledger(task), 0))
            assert line == self.model.token_ledger(task)
            assert line["issued"] == sum(line.values()) - line["issued"], "G1: the ledger in tokens is open"
        records = self.run(self.buffer.query({}))
        live = [record for record in records if record.place is not Place.ARCHIVED]
        found = {(r.task_name, r.group_id): (str(r.place), r.status, r.tokens) for r in live}
        expected = {g.identity: (g.place, g.status, g.tokens) for g in self.model.groups}
        assert found == expected
        assert len(self.buffer) == len(self.model.at("buffered"))
        counts = self.run(self.buffer.count_statuses(TASKS, list(Status)))
        for task in TASKS:
            for status in Status:
                assert counts[task][status] == len(self.model.in_order(task, status))
        check = getattr(self.storage, "_check", None)
        if check is not None:
            check()


def machine_for(make_storage: Callable[[], Storage], policy: ReplayPolicy) -> type[BufferMachine]:
    """A machine class for a storage and a policy (arrival or staleness order); its `TestCase` runs under pytest."""
    if policy.choose is not None:
        raise InvalidInput("the model knows arrival and staleness order only")
    attributes = {"make_storage": staticmethod(make_storage), "policy": policy}
    return type(f"{type(policy).__name__}Machine", (BufferMachine,), attributes)
