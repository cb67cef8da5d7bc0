"""A state machine: random histories of a buffer, compared with the plain `model` after every step. Needs hypothesis.

    TestMyStorage = machine_for(MyStorage, StalenessReplayPolicy()).TestCase

After every step the ledger is closed and equal to the model's (G1), groups are whole and unmixed (G2), and places and
statuses agree. Groups are handed out in the order of the policy and below their staleness threshold (G6), and a lost
lease cannot be settled (G5).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

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
from forebay.testing.model import RETRIES, TASKS, Member, Model, ModelGroup

T = TypeVar("T")

Members: TypeAlias = list[tuple[Status, int]]

member = st.tuples(st.sampled_from([Status.COMPLETED, Status.COMPLETED, Status.ABORTED]), st.integers(0, 3))
members = st.lists(member, min_size=1, max_size=3)
ends = st.sampled_from([None] * 6 + [Status.FAILED, Status.FILTERED])
limits = st.tuples(st.sampled_from([None, 1, 3]), st.sampled_from([None, None, 2]))
tasks = st.sampled_from(TASKS)
others = [Status.ABORTED, Status.EXPIRED, Status.INIT, Status.FAILED, Status.FILTERED]
statuses = st.sampled_from([Status.COMPLETED] * 8 + others)
# A rule that would end most histories early acts in one of four turns.
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
        self.reported: list[tuple[str, int, str]] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    def teardown(self) -> None:
        try:
            if hasattr(self, "buffer"):  # a run can end before its first step
                self.close()
        finally:
            self.loop.close()
            self.directory.cleanup()

    @initialize(thresholds=st.fixed_dictionaries(dict.fromkeys(TASKS, limits)), retryable=st.booleans())
    def start(self, thresholds: dict[str, tuple[int | None, int | None]], retryable: bool) -> None:
        self.model.thresholds = thresholds
        self.model.retryable["b"] = retryable
        self.open()

    def open(self) -> None:
        self.buffer = ReplayBuffer(
            self.policy, self.storage, max_groups=self.model.max_groups, on_group_end=self.report
        )
        for task, (threshold, token_threshold) in self.model.thresholds.items():
            limits = {"stale_threshold": threshold, "token_stale_threshold": token_threshold}
            self.run(self.buffer.set_limits(task, **limits, retryable=self.model.retryable[task]))

    async def report(self, event: GroupEnd) -> None:
        self.reported.append((event.task_name, event.group_id, str(event.end)))

    def close(self) -> None:
        """Without a crash every end is reported exactly once, on every storage."""
        self.run(self.buffer.close())
        assert sorted(self.reported) == sorted(self.model.ends)

    # --- in -----------------------------------------------------------------------------------------

    @rule(task=tasks, n=st.integers(1, 3))
    def issue(self, task: str, n: int) -> None:
        cursor = self.model.cursor[task]
        prompts = [[RolloutState(message=[{"content": f"{task}:{cursor + i}"}]) for _ in range(2)] for i in range(n)]
        issued = self.run(internals(self.buffer).issue(prompts, task, cursor=cursor))
        n = min(n, self.model.free())
        assert issued.taken == len(issued.groups) == n
        for i, group in enumerate(issued.groups):
            assert [(state.group_id, state.attempt) for state in group] == [(cursor + i, 1)] * 2
            drawn = ModelGroup(task, cursor + i, [Member(Status.INIT, []) for _ in range(2)], attempt=1)
            self.model.arrive(drawn, "in_flight")
            self.model.add(drawn)
        self.model.cursor[task] += n
        self.model.counts[task, "issued"] += n

    @precondition(lambda self: self.model.at("in_flight"))
    @rule(data=st.data(), made=members, end=ends, judged=st.booleans(), lag=st.integers(0, 3), named=st.booleans())
    def bring_back(
        self, data: st.DataObject, made: Members, end: Status | None, judged: bool, lag: int, named: bool
    ) -> None:
        group = data.draw(st.sampled_from(self.model.at("in_flight")))
        model_step = max(0, self.train_step - 1 - lag)
        before = group.tokens
        group.members = [Member(end or status, [model_step] * tokens) for status, tokens in made]
        self.model.tokens[group.task, "issued"] += max(0, group.tokens - before)
        self.model.tokens[group.task, "reset"] += max(0, before - group.tokens)
        samples, step = self.samples(group, attempt=group.attempt if named else None), self.step_if(judged)
        self.run(self.buffer.put(samples, group.task, current_train_step=step))
        self.arrived(group, step, came_back=True)

    def step_if(self, judged: bool) -> int | None:
        return self.train_step if judged else None

    def arrived(self, group: ModelGroup, step: int | None, *, came_back: bool) -> None:
        if not self.model.keeps(group, step):
            self.model.end(group, "discarded")
        elif came_back and group.status in (Status.FAILED, Status.FILTERED):
            self.model.end(group, str(group.status))
        else:
            self.model.arrive(group)

    @rule(task=tasks, status=statuses, tokens=st.integers(0, 2), judged=st.booleans(), lag=st.integers(0, 3))
    def put_by_hand(self, task: str, status: Status, tokens: int, judged: bool, lag: int) -> None:
        generated = tokens if status not in (Status.INIT, Status.EXPIRED) else 0
        steps = [max(0, self.train_step - 1 - lag)] * generated
        self.next_hand_id += 1
        group, probe = (ModelGroup(task, self.next_hand_id, [Member(status, [*steps]) for _ in "ab"]) for _ in "ab")
        step = self.step_if(judged)
        put = self.buffer.put(self.samples(group), task, current_train_step=step, timeout_s=0)
        # A group that is stale on arrival needs no space.
        if self.model.keeps(probe, step) and not self.model.free():
            self.expect(WaitTimeout, put)
            return
        self.run(put)
        self.model.add(group)
        self.model.counts[task, "issued"] += 1
        self.model.tokens[task, "issued"] += group.tokens
        self.arrived(group, step, came_back=False)

    # Single steps rarely make up the whole life cycle of a group; these two rules make sure that they do.

    @rule(task=tasks, n=st.integers(1, 4), tokens=st.integers(0, 2))
    def put_several(self, task: str, n: int, tokens: int) -> None:
        for _ in range(n):
            self.put_by_hand(task, Status.COMPLETED, tokens, False, 0)

    @rule(a=st.integers(0, 3), b=st.integers(0, 3), how=st.sampled_from(["ack", "ack", "nack", "reject"]))
    def train_on_buffered_groups(self, a: int, b: int, how: str) -> None:
        before = len(self.leases)
        self.lease(a, b, 0, False)
        if len(self.leases) > before:
            self.settle_lease(self.leases.pop(), how)

    @precondition(lambda self: self.model.at("buffered") + self.model.at("leased"))
    @rule(data=st.data())
    def put_an_existing_group(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.model.at("buffered") + self.model.at("leased")))
        self.expect(DuplicateGroup, self.buffer.put(self.samples(group), group.task))

    @precondition(lambda self: self.lost_attempts)
    @rule(data=st.data())
    def put_under_a_lost_attempt(self, data: st.DataObject) -> None:
        task, group_id, attempt = data.draw(st.sampled_from(self.lost_attempts))
        group = ModelGroup(task, group_id, [Member(Status.COMPLETED, [0])])
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
                group.draw()
            else:
                self.model.end(group, "trained" if status is Status.COMPLETED else str(status))
                self.train(group)

    @rule(task=tasks, n=st.integers(1, 3))
    def redraw(self, task: str, n: int) -> None:
        expected = self.model.claimed(task, n, *RETRIES, by_group=True)
        groups = self.run(internals(self.buffer).redraw(n, task))
        for group in expected:
            group.draw()
        self.handed_out(groups, expected)
        assert [group[0].attempt for group in groups] == [group.attempt for group in expected]

    @rule(a=st.integers(0, 2), b=st.integers(0, 2), advance=st.sampled_from([0, 0, 1, 2]), too_much=seldom)
    def lease(self, a: int, b: int, advance: int, too_much: bool) -> None:
        self.train_step += advance
        wants = {"a": a, "b": b}
        if not too_much:  # mostly ask for available groups, so that batches are granted
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
        """G6, stated again for a batch of the trainer."""
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
            self.model.end(groups.pop(0), "discarded")
        self.run(lease.nack() if how == "nack" else lease.ack())
        for group in groups:
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
        self.expect((LostLease, BufferClosed), lease.ack() if ack else lease.nack(), "G5: a lost lease was settled")

    def handed_out(self, groups: list[list[RolloutState]], expected: list[ModelGroup]) -> None:
        """The groups are those of the model, in its order, whole and unmixed (G2)."""
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
        limits = dict.fromkeys(TASKS)
        refresh = self.buffer.refresh_staleness(task_stale_thresholds=limits, current_train_step=self.train_step)
        assert self.run(refresh) == expected

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
        """The process ends, and its groups come back; perhaps all groups move to another storage on the way."""
        if not now:
            return
        self.close()
        if move:
            self.storage = self.run(self.moved())
            self.model.saved_step = None  # it was of the other store; archived groups moved too
        self.open()
        self.came_back()

    def came_back(self) -> None:
        for group in sorted(self.model.at("in_flight"), key=lambda group: group.created):
            self.abort(group)
            self.model.arrive(group)
        for group in self.model.at("leased"):
            group.place = "buffered"
        self.lose_leases()

    def abort(self, group: ModelGroup) -> None:
        self.lost_attempts.append((group.task, group.group_id, group.attempt))
        for member in group.members:
            if member.status is not Status.COMPLETED:
                member.status = Status.ABORTED

    def lose_leases(self) -> None:
        self.lost_leases += [lease for lease in self.leases if lease.groups]
        self.leases.clear()

    @rule(lag=st.sampled_from([None, 0, 1]), now=seldom)
    def resume_from_a_checkpoint(self, lag: int | None, now: bool) -> None:
        """The process ends; another one resumes its checkpoint, with the weights of some step, in an empty storage."""
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
            self.lose_weights(model_step)
        self.model.saved_step = None  # it was of another store
        self.model.archive.clear()
        for group in list(self.model.groups):
            if group.place == "leased" and model_step is not None and group.train_step <= model_step:
                self.model.end(group, "trained", reported=False)  # it ended in the checkpoint
                self.train(group)
            elif group.place == "in_flight":
                self.abort(group)
            group.place = "buffered"
        self.lose_leases()

    def lose_weights(self, model_step: int) -> None:
        self.trained -= {group.identity for group in self.model.rewind(model_step)}

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
        """A sequence that random steps rarely make: a batch is trained on, and then its weights are lost."""
        self.lease(a, b, 1, False)
        if self.leases:
            self.settle_lease(self.leases.pop(), "ack")
        self.rewind()

    @precondition(lambda self: self.model.saved_step is not None)
    @rule()
    def rewind(self) -> None:
        """The weights are lost, and the same store goes back to those of the checkpoint."""
        saved = self.model.saved_step
        assert saved is not None
        assert self.run(self.buffer.resume(self.directory.name)) == saved
        self.lose_weights(saved)

    @rule(now=seldom)
    def lose_everything_held(self, now: bool) -> None:
        """The storage presumes that this buffer is dead; the buffer continues and does not know it."""
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

    def expect(
        self, kind: type[Exception] | tuple[type[Exception], ...], work: Coroutine[Any, Any, object], rule: str = ""
    ) -> None:
        try:
            self.run(work)
        except kind:
            return
        raise AssertionError(rule or f"{kind} was expected")

    @invariant()
    def the_model_agrees(self) -> None:
        if not hasattr(self, "buffer"):
            return
        for tokens in (False, True):
            ledger = self.run(self.buffer.ledger(tokens=tokens))
            for task in TASKS:
                expected_line = self.model.ledger(task, tokens=tokens)
                line = ledger.get(task, dict.fromkeys(expected_line, 0))
                assert line == expected_line
                assert line["issued"] == sum(line.values()) - line["issued"], f"G1: the ledger is open ({tokens=})"
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
        getattr(self.storage, "_check", lambda: None)()


def machine_for(make_storage: Callable[[], Storage], policy: ReplayPolicy) -> type[BufferMachine]:
    """A machine class for a storage and a policy (arrival or staleness order); its `TestCase` runs under pytest."""
    if policy.choose is not None:
        raise InvalidInput("the model knows arrival and staleness order only")
    attributes = {"make_storage": staticmethod(make_storage), "policy": policy}
    return type(f"{type(policy).__name__}Machine", (BufferMachine,), attributes)
