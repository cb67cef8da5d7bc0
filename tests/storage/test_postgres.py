"""PostgresStorage passes the conformance suite and the state machine, and keeps its own promises."""

from __future__ import annotations

import asyncio
import logging
import sys
import unittest
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from forebay import FIFOReplayPolicy, ReplayBuffer, ReplayPolicy, StalenessReplayPolicy, Storage
from forebay.core.capacity import Settings
from forebay.core.ledger import Account, Clock, Event, Place, Record, Row, describe
from forebay.core.query import Node, parse, predicate
from forebay.core.rollout import Status
from forebay.errors import (
    CursorMoved,
    DuplicateGroup,
    InvalidConfig,
    InvalidInput,
    InvalidQuery,
    LostLease,
    StorageUnavailable,
    UnreadableData,
)
from forebay.storage.base import Arrival, Claim, Claimed, Draw, Purpose
from forebay.storage.postgres import PostgresStorage
from forebay.storage.postgres.columns import COLUMNS, from_text, record_values, to_text
from forebay.storage.postgres.schema import VERSION
from forebay.storage.postgres.step import Step
from forebay.storage.values import Content
from forebay.testing import StorageConformance
from forebay.testing.machine import machine_for
from forebay.testing.samples import make_group
from tests.processes import HANG_S
from tests.storage.postgres_server import Schemas, dsn, execute

schemas = Schemas()
COMPLETED, ABORTED = Status.COMPLETED, Status.ABORTED


@pytest.fixture(autouse=True)
def dropped_schemas() -> Iterator[None]:
    yield
    schemas.drop_all()


class TestPostgresStorage(StorageConformance):
    def make_storage(self) -> Storage:
        return schemas.make()


RUNS = settings(stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))


def _case(policy: ReplayPolicy, examples: int) -> type[unittest.TestCase]:
    case: type[unittest.TestCase] = machine_for(schemas.make, policy).TestCase
    case.settings = settings(RUNS, max_examples=examples)  # type: ignore[attr-defined]
    return case


TestInOrderOfArrival = _case(FIFOReplayPolicy(), 6)
TestOldestFirst = _case(StalenessReplayPolicy(), 6)

TestInOrderOfArrivalForLong = pytest.mark.slow(_case(FIFOReplayPolicy(), 100))
TestOldestFirstForLong = pytest.mark.slow(_case(StalenessReplayPolicy(), 100))


# --- what the tests below share -----------------------------------------------------------------------


def by_hand(group_id: int | None = None, task_name: str = "math", **more: Any) -> Arrival:
    group = tuple(make_group(group_id=group_id, **more))
    return Arrival(task_name=task_name, content=Content(group, describe(group)), group_id=group_id)


def take(n: int, *, purpose: Purpose = Purpose.TAKE, owner: str = "me", whole: bool = False, **more: Any) -> Claim:
    statuses = (ABORTED,) if purpose is Purpose.DRAW else (COMPLETED,)
    wants = more.pop("wants", {"math": n})
    return Claim(wants=wants, statuses=statuses, purpose=purpose, owner=owner, whole=whole, **more)


def lease(n: int, lease_id: str = "lease", **more: Any) -> Claim:
    return take(n, purpose=Purpose.LEASE, lease_id=lease_id, train_step=1, whole=True, **more)


@asynccontextmanager
async def opened(storage: PostgresStorage, owner: str = "me", **more: Any) -> AsyncIterator[PostgresStorage]:
    await storage.open(owner, Settings(**more), None)
    try:
        yield storage
        assert not await storage.verify()
    finally:
        await storage.close(owner)


def another(storage: PostgresStorage) -> PostgresStorage:
    """The same buffer, as another process has it."""
    return PostgresStorage(dsn(), storage.name)


async def line(storage: PostgresStorage, task_name: str = "math") -> dict[str, int]:
    found = (await storage.summary()).ledger()[task_name]
    assert found["issued"] == sum(found.values()) - found["issued"]
    return {name: n for name, n in found.items() if n}


def rows_of(claimed: Claimed) -> list[Row]:
    assert claimed.rows is not None
    return claimed.rows["math"]


# --- names, versions, settings ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "A", "1a", "a-b", 'a"b', "a;drop", "a" * 42, None])
def test_a_buffer_name_that_is_no_identifier_is_refused(name: Any) -> None:
    with pytest.raises(InvalidConfig, match="lowercase letter"):
        PostgresStorage("postgresql://nowhere", name)


@pytest.mark.parametrize(
    ("version", "advice"), [(VERSION + 1, "newer Forebay"), (VERSION - 1, "the Forebay that made")]
)
async def test_a_schema_of_another_version_is_refused_and_left_alone(version: int, advice: str) -> None:
    storage = schemas.make()
    async with opened(storage):
        await execute(f'UPDATE "{storage.name}".store SET version = {version}')
        other = another(storage)
        with pytest.raises(InvalidConfig, match=f"schema version {version}.*{advice}"):
            await other.open("other", Settings(), None)
        with pytest.raises(InvalidConfig, match=f"schema version {version}"):
            await other.summary()


async def test_many_processes_can_create_one_buffer_at_once() -> None:
    first = schemas.make()
    storages = [first, *(another(first) for _ in range(5))]
    await asyncio.gather(*(storage.open(str(i), Settings(), None) for i, storage in enumerate(storages)))
    assert len({storage.store_id for storage in storages}) == 1
    for i, storage in enumerate(storages):
        await storage.close(str(i))


async def test_settings_are_shared_while_an_owner_has_the_buffer_open() -> None:
    storage = schemas.make()
    other = another(storage)
    async with opened(storage, max_groups=5):
        with pytest.raises(InvalidConfig, match="max_groups"):
            await other.open("other", Settings(max_groups=6), None)
    async with opened(other, "other", max_groups=6):
        pass


async def test_an_owner_that_died_does_not_keep_its_settings() -> None:
    storage = schemas.make()
    await storage.open("dead", Settings(), 0.05)
    await asyncio.sleep(0.1)
    async with opened(another(storage), max_groups=6):
        pass
    await storage.close("dead")


# --- many at one buffer -------------------------------------------------------------------------------


async def test_concurrent_claims_share_out_the_groups_in_order() -> None:
    storage = schemas.make()
    async with opened(storage):
        records = await storage.put([by_hand() for _ in range(60)], owner="me")
        claims = await asyncio.gather(*(storage.claim(lease(5, f"lease {i}")) for i in range(12)))
        claimed = [[row.record.uid for row in rows_of(claim)] for claim in claims]
        assert sorted(uid for uids in claimed for uid in uids) == [record.uid for record in records]
        assert all(uids == sorted(uids) for uids in claimed)


async def test_a_whole_claim_is_not_refused_because_another_had_the_groups_locked() -> None:
    storage = schemas.make()
    async with opened(storage):
        await storage.put([by_hand() for _ in range(4)], owner="me")
        locked, finish = asyncio.Event(), asyncio.Event()

        async def hold(step: Step) -> None:
            await step.connection.fetch("SELECT uid FROM groups FOR UPDATE")
            locked.set()
            await finish.wait()

        holder = asyncio.create_task(storage._connections.step(hold))
        await locked.wait()
        claim = asyncio.create_task(storage.claim(lease(4)))
        await asyncio.sleep(0.1)
        assert not claim.done()
        finish.set()
        await holder
        assert len(rows_of(await claim)) == 4


async def test_only_one_of_many_draws_at_a_cursor() -> None:
    storage = schemas.make()
    async with opened(storage):

        async def draw(i: int) -> int:
            group = tuple(make_group(status=Status.INIT))
            try:
                await storage.issue("math", [Content(group, describe(group))], Draw(str(i), 0))
            except CursorMoved as moved:
                return moved.cursor
            return 0

        assert sorted(await asyncio.gather(*(draw(i) for i in range(8)))) == [0] + [1] * 7
        assert await line(storage) == {"issued": 1, "in_flight": 1}


async def test_concurrent_puts_of_one_identity_store_it_once() -> None:
    storage = schemas.make()
    async with opened(storage):
        results = await asyncio.gather(
            *(storage.put([by_hand(7), by_hand()], owner="me") for _ in range(6)), return_exceptions=True
        )
        assert sum(isinstance(result, list) for result in results) == 1
        assert sum(isinstance(result, DuplicateGroup) for result in results) == 5
        assert await line(storage) == {"issued": 2, "buffered": 2}


async def test_capacity_holds_among_concurrent_putters() -> None:
    storage = schemas.make()
    async with opened(storage, max_groups=5):
        results = await asyncio.gather(
            *(storage.put([by_hand()], owner="me") for _ in range(12)), return_exceptions=True
        )
        assert sum(isinstance(result, list) for result in results) == 5
        assert (await storage.summary(())).usage.groups == 5


async def test_ids_of_groups_put_by_hand_avoid_those_that_users_gave() -> None:
    storage = schemas.make()
    async with opened(storage):
        await storage.put([by_hand(-n) for n in range(1, 20)], owner="me")
        records = await storage.put([by_hand() for _ in range(3)], owner="me")
        assert all(record.group_id < -19 for record in records)
        await storage.put([by_hand(-25)], owner="me")
        more = await storage.put([by_hand() for _ in range(5)], owner="me")
        assert -25 not in {record.group_id for record in more}


async def test_a_large_batch_goes_in_and_out_unchanged() -> None:
    storage = schemas.make()
    async with opened(storage):
        text = "x" * 100_000
        records = await storage.put([by_hand(text=f"{i} {text}") for i in range(40)], owner="me")
        claimed = rows_of(await storage.claim(take(40)))
        assert [row.record.uid for row in claimed] == [record.uid for record in records]
        for i, row in enumerate(claimed):
            assert row.group[0].message[0]["content"] == f"{i} {text}"


class Shy(ReplayPolicy):
    def choose(self, rows: Sequence[Record], n: int) -> list[int]:
        return [row.uid for row in rows[: n - 1]]


async def test_a_policy_may_choose_fewer_groups_than_a_whole_claim_wants() -> None:
    storage = schemas.make()
    async with opened(storage, choose=Shy().choose):
        await storage.put([by_hand() for _ in range(4)], owner="me")
        assert (await storage.claim(lease(3))).rows is None
        assert len(rows_of(await storage.claim(take(3)))) == 2


async def test_operations_take_few_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    for name in ("execute", "executemany", "fetch", "fetchrow", "fetchval"):
        as_it_is = getattr(asyncpg.Connection, name)

        async def counted(self: Any, sql: str, *arguments: Any, as_it_is: Any = as_it_is, **more: Any) -> Any:
            if "pg_notify" not in sql:
                sent.append(sql)
            return await as_it_is(self, sql, *arguments, **more)

        monkeypatch.setattr(asyncpg.Connection, name, counted)

    async def round_trips(work: Awaitable[Any]) -> int:
        sent.clear()
        await work
        return len(sent)

    prompts = [Content(group, describe(group)) for group in (tuple(make_group(status=Status.INIT)) for _ in range(4))]
    storage = schemas.make()
    async with opened(storage):
        await storage.issue("math", prompts[:2], Draw("me", 0))
        (record,) = await storage.put([by_hand()], owner="me")
        await storage.advance({"math": Clock(train_step=1)})
        assert await round_trips(storage.put([by_hand(), by_hand(task_name="code")], owner="me")) == 1
        assert await round_trips(storage.issue("math", prompts[2:], Draw("me", 2))) == 4
        back = [replace(by_hand(group_id), attempt=1) for group_id in range(4)]
        assert await round_trips(storage.put(back[:3], owner="me")) == 1, "it knows the groups that it drew"
        storage._drawn.clear()
        assert await round_trips(storage.put(back[3:], owner="me")) == 4
        assert await round_trips(storage.claim(lease(3))) == 6
        assert await round_trips(storage.claim(take(3, purpose=Purpose.DRAW))) == 1, "there is nothing to draw"
        assert await round_trips(storage.settle("lease", [record.uid], Event.ACKED)) == 4
        assert await round_trips(storage.summary(holdings=True)) == 1


# --- wake-ups -----------------------------------------------------------------------------------------


async def first_heard(heard: list[str]) -> set[str]:
    async with asyncio.timeout(HANG_S):
        while not heard:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return set(heard)


async def test_other_processes_hear_of_changes() -> None:
    storage = schemas.make()
    other = another(storage)
    heard: list[str] = []
    async with opened(storage), opened(other, "other"):
        other.subscribe(heard.extend)
        await storage.put([by_hand(task_name="odd \0 name")], owner="me")
        assert await first_heard(heard) == {"odd \0 name"}


async def test_a_listener_that_lost_its_connection_wakes_everybody(caplog: pytest.LogCaptureFixture) -> None:
    storage = schemas.make()
    other = another(storage)
    heard: list[str] = []
    async with opened(storage), opened(other, "other"):
        other.subscribe(heard.extend)
        await storage.put([by_hand()], owner="me")
        await first_heard(heard)
        await other.summary()
        heard.clear()
        assert other._notifier is not None
        pid = other._notifier._connection.get_server_pid()
        with caplog.at_level(logging.WARNING):
            await execute("SELECT pg_terminate_backend($1)", pid)
            assert await first_heard(heard) == {"math"}
        assert "postgres_listener_lost" in caplog.text
        heard.clear()
        await storage.put([by_hand()], owner="me")
        assert await first_heard(heard) == {"math"}


async def test_a_waiting_trainer_wakes_when_another_process_puts() -> None:
    storage = schemas.make()
    trainer, producer = (ReplayBuffer(storage=each) for each in (storage, another(storage)))
    async with trainer, producer:
        waiting = asyncio.create_task(trainer.wait_ready({"math": 1}, timeout_s=HANG_S))
        async with asyncio.timeout(HANG_S):
            while "math" not in await trainer.explain_wait():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await producer.put(make_group(), "math")
        await waiting


# --- cancellation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("keep_trained", [0, 2])
async def test_a_cancelled_claim_leaves_nothing_claimed(purpose: Purpose, keep_trained: int) -> None:
    storage = schemas.make()
    async with opened(storage, keep_trained=keep_trained):
        status = ABORTED if purpose is Purpose.DRAW else COMPLETED
        await storage.put([by_hand(status=status) for _ in range(6)], owner="me")
        cancelled = 0
        claim = lease(3) if purpose is Purpose.LEASE else take(3, purpose=purpose)
        for delay in [*(n * 0.0007 for n in range(20)), None]:
            task = asyncio.create_task(storage.claim(claim))
            if delay is None:  # during the commit
                while not _committing(task):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            else:
                await asyncio.sleep(delay)
            task.cancel()
            try:
                claimed = await task
            except asyncio.CancelledError:
                cancelled += 1
            else:
                await _give_back(storage, claim, rows_of(claimed))
            left = await line(storage)
            assert (left["buffered"], left.get("leased", 0), left.get("in_flight", 0)) == (6, 0, 0), delay
        assert cancelled
        records = await storage.records(parse({"place": "buffered"}), None)
        found = await storage.claim(take(6, purpose=purpose) if purpose is not Purpose.LEASE else lease(6))
        assert {row.record.uid for row in rows_of(found)} == {record.uid for record in records}
        assert not await storage.verify()


def _committing(task: asyncio.Task[Any]) -> bool:
    if task.done():
        return True
    runs = [each for each in asyncio.all_tasks() if "_repeat" in repr(each.get_coro())]
    return any((frame := _frame(each)) is not None and frame.f_locals["run"].committing for each in runs)


def _frame(task: asyncio.Task[Any]) -> Any:
    return getattr(task.get_coro(), "cr_frame", None)


async def _give_back(storage: PostgresStorage, claim: Claim, rows: list[Row]) -> None:
    """The cancel came too late: it was claimed, and the caller knows. Put things back for the next round."""
    if claim.purpose is Purpose.LEASE:
        await storage.settle("lease", [row.record.uid for row in rows], Event.NACKED)
    elif claim.purpose is Purpose.DRAW:
        await storage.release("me")
    else:
        await storage.put([by_hand() for _ in rows], owner="me")


async def test_a_cancelled_put_happened_or_not_and_is_never_half_done() -> None:
    storage = schemas.make()
    async with opened(storage):
        for n in range(25):
            arrivals = [by_hand(n * 10 + i, text="x" * 300_000) for i in range(5)]
            task = asyncio.create_task(storage.put(arrivals, owner="me"))
            await asyncio.sleep(n * 0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await line(storage) if (await storage.summary()).tasks else {}).get("buffered", 0) % 5 == 0
            assert not await storage.verify()


# --- owners -------------------------------------------------------------------------------------------


async def test_an_owner_without_a_lease_never_expires() -> None:
    storage = schemas.make()
    async with opened(storage):
        await storage.put([by_hand()], owner="me")
        await storage.claim(lease(1))
        assert (await storage.reap()).next_s is None
        assert await line(storage) == {"issued": 1, "leased": 1}


async def test_a_reaped_owner_cannot_settle_but_continues_after_its_next_heartbeat() -> None:
    storage = schemas.make()
    async with opened(storage):
        await storage.open("zombie", Settings(), 0.2)
        await storage.put([by_hand(), by_hand()], owner="me")
        claimed = rows_of(await storage.claim(lease(2, owner="zombie")))
        await asyncio.sleep(0.3)
        reaped = await storage.reap()
        assert (dict(reaped.returned), reaped.next_s) == ({"math": 2}, None)
        with pytest.raises(LostLease):
            await storage.settle("lease", [row.record.uid for row in claimed], Event.ACKED)
        await asyncio.to_thread(storage.beat, "zombie")
        again = rows_of(await storage.claim(lease(2, "again", owner="zombie")))
        assert [row.record.deliveries for row in again] == [2, 2]
        reaped = await storage.reap()
        assert not reaped.returned
        assert reaped.next_s is not None
        await storage.settle("again", [row.record.uid for row in again], Event.ACKED)
        await storage.close("zombie")


# --- streams ------------------------------------------------------------------------------------------


async def test_others_continue_while_a_snapshot_is_read() -> None:
    storage = schemas.make()
    async with opened(storage):
        await storage.put([by_hand() for _ in range(300)], owner="me")
        snapshot = await storage.snapshot()
        seen = []
        async for row in snapshot.rows:
            seen.append(row.record.uid)
            if len(seen) in (1, 150):
                await storage.put([by_hand()], owner="me")
                await storage.claim(take(50))
        assert len(seen) == 300
        assert seen == sorted(seen)
        assert await line(storage) == {"issued": 302, "buffered": 202, "trained": 100}


CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'forebay'"


@pytest.mark.parametrize("read", [True, False])
async def test_a_snapshot_of_a_storage_that_nobody_has_open_leaves_no_connection(read: bool) -> None:
    storage = schemas.make()
    async with opened(storage):
        await storage.put([by_hand() for _ in range(3)], owner="me")
    before = await execute(CONNECTIONS)
    snapshot = await storage.snapshot()
    if read:
        assert len([row async for row in snapshot.rows]) == 3
    del snapshot
    async with asyncio.timeout(HANG_S):
        while await execute(CONNECTIONS) > before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_failed_restore_leaves_an_empty_store_that_can_be_used() -> None:
    storage = schemas.make()

    async def broken() -> AsyncIterator[Row]:
        raise OSError("the disk is gone")
        yield

    async with opened(storage):
        with pytest.raises(OSError, match="disk is gone"):
            await storage.restore({"math": Account()}, 1, 1, broken())
        assert (await storage.summary()).tasks == {}
        await storage.put([by_hand()], owner="me")
        with pytest.raises(InvalidInput, match="empty storage"):
            await storage.restore({}, 1, 1, broken())


# --- queries ------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8", exclude_characters=""), max_size=3) | st.sampled_from(
    ["", "a", "b", "é", "\0", "\1", "\0\1", "\1\2", "Ω", "😀", "null", "true", "1"]
)
wholes = st.integers(-3, 3) | st.sampled_from([2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)])
floats = st.sampled_from([0.0, -0.0, 0.1, 1.0, 1.5, 2.0**53, 2.0**63, -1e300, 5e-324, float("inf"), -float("inf")])
scalars = st.none() | st.booleans() | texts | wholes | floats | st.floats(allow_nan=False)
tag_names = st.sampled_from(["a", "b", "'; --", "\0", 'q"'])
small = st.integers(-2, 3)
steps = st.none() | st.integers(0, 3)


@st.composite
def records(draw: st.DrawFn, uid: int) -> Record:
    return Record(
        uid=uid,
        timestamp_id=draw(st.integers(1, 99)),
        task_name=draw(texts.filter(bool)),
        group_id=uid * draw(st.sampled_from([1, -1])),
        status=draw(st.sampled_from(list(Status))),
        place=draw(st.sampled_from(list(Place))),
        samples=draw(small),
        tokens=draw(wholes),
        bytes=draw(small),
        num_tries=draw(small),
        reward=draw(st.none() | floats | st.floats(allow_nan=False)),
        oldest_step=draw(steps),
        newest_step=draw(steps),
        token_step=draw(steps),
        given_staleness=0,
        created_at=draw(st.floats(0, 1e10)),
        moved_at=0.0,
        priority=draw(floats.filter(lambda f: abs(f) < 1e301)),
        deliveries=draw(small),
        tags=draw(st.dictionaries(tag_names, scalars, max_size=3)),
    )


def _operands(field: str) -> st.SearchStrategy[Any]:
    if field.startswith("tags."):
        return scalars
    if field == "task_name":
        return texts
    if field in ("status", "place"):
        return st.sampled_from([str(each) for each in (Status if field == "status" else Place)])
    if field in ("reward", "priority", "created_at"):
        return (st.none() | wholes | floats) if field == "reward" else (wholes | floats)
    return (wholes | steps) if field in ("oldest_step", "newest_step") else wholes


FIELDS = [
    *("uid", "timestamp_id", "task_name", "status", "place", "oldest_step", "newest_step", "group_id", "samples"),
    *("tokens", "bytes", "num_tries", "deliveries", "reward", "priority", "created_at"),
]


@st.composite
def conditions(draw: st.DrawFn) -> dict[str, Any]:
    field = draw(st.sampled_from(FIELDS) | tag_names.map(lambda name: f"tags.{name}"))
    op = draw(st.sampled_from(["$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$not_in", "$between"]))
    operand: Any = draw(_operands(field))
    if op in ("$in", "$not_in"):
        operand = draw(st.lists(_operands(field), max_size=4))
    elif op == "$between":
        operand = [operand, draw(_operands(field))]
    return {field: {op: operand}}


queries = st.recursive(
    conditions(),
    lambda inner: st.one_of(
        st.builds(lambda parts: {"$and": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda parts: {"$or": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda part: {"$not": part}, inner),
    ),
    max_leaves=5,
)


def _parsed(query: dict[str, Any]) -> Node | None:
    try:
        return parse(query)
    except InvalidQuery:
        return None  # operators that do not fit the type are the parser's business


@pytest.mark.parametrize("examples", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_a_query_means_in_sql_what_it_means_in_python(examples: int) -> None:
    storage = schemas.make()
    loop = asyncio.new_event_loop()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return loop.run_until_complete(work)

    async def fill(rows: list[Record]) -> None:
        async def work(step: Step) -> None:
            await step.connection.execute("DELETE FROM groups")
            await step.connection.copy_records_to_table(
                "groups", columns=COLUMNS, records=[record_values(record) for record in rows]
            )

        await storage._connections.step(work)

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        rows=st.integers(1, 6).flatmap(lambda n: st.tuples(*(records(uid) for uid in range(1, n + 1)))),
        asked=st.lists(queries.map(_parsed).filter(lambda node: node is not None), min_size=1, max_size=6),
    )
    def agree(rows: tuple[Record, ...], asked: list[Node]) -> None:
        run(fill(list(rows)))
        assert run(storage.records(parse({}), None)) == list(rows)
        for node in asked:
            assert run(storage.records(node, None)) == [row for row in rows if predicate(node)(row)], node

    try:
        run(storage.open("me", Settings(), None))
        agree()
        run(storage.close("me"))
    finally:
        loop.close()


@given(text=texts | st.text("\0\1\2a", max_size=8), other=texts | st.text("\0\1\2a", max_size=8))
def test_strings_survive_and_keep_their_order(text: str, other: str) -> None:
    assert from_text(to_text(text)) == text
    assert "\0" not in to_text(text)
    assert (to_text(text) < to_text(other)) is (text < other)


async def test_a_surrogate_without_its_pair_is_refused() -> None:
    storage = schemas.make()
    async with opened(storage):
        with pytest.raises(InvalidInput, match="surrogate"):
            await storage.put([by_hand(task_name="\ud800")], owner="me")
        with pytest.raises(InvalidQuery, match="surrogate"):
            await storage.records(parse({"task_name": "\ud800"}), None)


# --- checkpoints and damage ---------------------------------------------------------------------------


async def test_a_checkpoint_goes_from_one_store_to_another_and_rewinds_its_own(tmp_path: Path) -> None:
    storage = schemas.make()
    async with ReplayBuffer(storage=storage) as buffer:
        for _ in range(4):
            await buffer.put(make_group(), "math", model_step=0)
        await buffer.save(tmp_path / "saved", model_step=0)
        async with buffer.lease_batch({"math": 3}, train_step=1):
            pass
        assert (await buffer.ledger())["math"]["trained"] == 3
        assert await buffer.resume(tmp_path / "saved") == 0
        assert await line(storage) == {"issued": 4, "buffered": 4}
        assert not await storage.verify()
        groups = await buffer.get(4, "math", COMPLETED)
        assert [group[0].response_ids for group in groups] == [[0, 1, 2]] * 4
    other = schemas.make()
    async with ReplayBuffer(StalenessReplayPolicy(), other) as buffer:
        await buffer.resume(tmp_path / "saved")
        assert await line(other) == {"issued": 4, "buffered": 4}
        assert not await other.verify()


async def test_g07_a_damaged_payload_costs_its_group_and_nothing_else() -> None:
    storage = schemas.make()
    async with opened(storage):
        records = await storage.put([by_hand(model_step=0) for _ in range(5)], owner="me")
        first, second = (record.uid for record in records[:2])
        payloads = f'"{storage.name}".payloads'
        await execute(f"UPDATE {payloads} SET frame = overlay(frame PLACING $1 FROM 40) WHERE uid = $2", b"?", first)
        await execute(f"DELETE FROM {payloads} WHERE uid = $1", second)
        claimed = rows_of(await storage.claim(lease(3)))
        assert [row.record.uid for row in claimed] == [record.uid for record in records[2:]]
        assert await line(storage) == {"issued": 5, "leased": 3, "failed": 2}
        assert (await storage.summary()).task("math").account.reasons == {"its payload was damaged on disk": 2}


# --- the server goes away -----------------------------------------------------------------------------


async def test_a_server_that_cannot_be_reached_is_a_typed_error() -> None:
    storage = PostgresStorage("postgresql://nobody@127.0.0.1:1/nothing", connect_timeout_s=2)
    for call in (
        lambda: storage.open("me", Settings(), None),
        lambda: storage.put([by_hand()], owner="me"),
        storage.summary,
        storage.snapshot,
    ):
        with pytest.raises(StorageUnavailable, match="cannot be reached"):
            await call()
    storage.beat("me")


END_ALL = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'forebay'"


async def test_connections_that_the_server_closed_are_replaced() -> None:
    storage = schemas.make()
    async with opened(storage):
        await storage.put([by_hand()], owner="me")
        await execute(END_ALL)
        outcomes: list[Any] = []
        for _ in range(5):
            try:
                outcomes.append(await storage.put([by_hand()], owner="me"))
            except StorageUnavailable as error:
                outcomes.append(error)
        assert isinstance(outcomes[-1], list)
        stored = sum(isinstance(outcome, list) for outcome in outcomes)
        assert (await line(storage))["buffered"] == 1 + stored


@pytest.mark.parametrize("arrived", [True, False])
@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("then", ["put", "claim"])
async def test_a_claim_whose_commit_was_not_answered_is_undone_if_it_happened(
    arrived: bool, purpose: Purpose, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = schemas.make()
    async with opened(storage):
        status = ABORTED if purpose is Purpose.DRAW else COMPLETED
        await storage.put([by_hand(status=status) for _ in range(3)], owner="me")
        execute_as_it_is = asyncpg.Connection.execute

        async def execute_and_break(self: Any, sql: str, *arguments: Any, **more: Any) -> Any:
            if sql != "COMMIT":
                return await execute_as_it_is(self, sql, *arguments, **more)
            if arrived:
                await execute_as_it_is(self, sql)
            self.terminate()
            raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

        monkeypatch.setattr(asyncpg.Connection, "execute", execute_and_break)
        claim = lease(3) if purpose is Purpose.LEASE else take(3, purpose=purpose)
        with pytest.raises(StorageUnavailable):
            await storage.claim(claim)
        monkeypatch.undo()
        if then == "put":
            await storage.put([by_hand()], owner="me")
            assert await line(storage) == {"issued": 4, "buffered": 4}
        assert len(rows_of(await storage.claim(claim))) == 3


async def test_an_intact_payload_that_cannot_be_read_here_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(1)
    group[0].extra_fields = {"image": np.ones(3, ml_dtypes.bfloat16)}
    storage = schemas.make()
    async with opened(storage):
        arrival = Arrival(task_name="math", content=Content(tuple(group), describe(group)))
        (record,) = await storage.put([arrival], owner="me")
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
        for call in (storage.claim(take(1)), storage.claim(lease(1)), storage.read(record.uid)):
            with pytest.raises(UnreadableData, match="needs the package ml_dtypes"):
                await call
        monkeypatch.undo()
        assert await line(storage) == {"issued": 1, "buffered": 1}
        assert await storage.read(record.uid) is not None


def listener(tasks: Collection[str]) -> None:
    raise AssertionError("this listener has ended its subscription")


def test_unsubscribing_ends_it() -> None:
    storage = schemas.make()
    stop: Callable[[], None] = storage.subscribe(listener)
    stop()
    storage._heard(None)
