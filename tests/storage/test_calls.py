"""Calls that may come twice: an effect and its answer are one step, on every durable storage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay import MemoryStorage, Storage
from forebay.core.capacity import Settings
from forebay.core.ledger import Event, Place, Record, Row, describe
from forebay.core.query import parse
from forebay.core.rollout import RolloutState, Status
from forebay.errors import DamagedData, LostLease, StorageError, StorageUnavailable
from forebay.storage.base import Arrival, Claim, Claimed, Draw, Purpose, Rows
from forebay.storage.idempotency import CALL, Answered, Call, CallMemory, Handed, Returned, decode_kept
from forebay.storage.postgres import PostgresStorage
from forebay.storage.sqlite import SQLiteStorage
from forebay.storage.values import Content, Revision
from forebay.testing.samples import make_group
from tests.processes import started
from tests.storage.postgres_server import Schemas, dsn, execute

COMPLETED, ABORTED, INIT = Status.COMPLETED, Status.ABORTED, Status.INIT
FOREVER_S = 1e6


# --- places where a store can be, and can be found again after its process is gone --------------------


class Site:
    """A durable store, and how to come back to it after a crash."""

    def __init__(self) -> None:
        self.storage = self.make()

    def make(self) -> Any:
        raise NotImplementedError

    async def abandon(self, storage: Any) -> None:
        """End what belongs to a process, without telling the store."""

    async def crash(self) -> Any:
        """The store as the next process finds it; holders are alive elsewhere."""
        await self.abandon(self.storage)
        self.storage = self.make()
        await self.storage.open("host", Settings(), None)
        return self.storage

    async def close(self) -> None:
        for owner in ("me", "other", "host"):
            await self.storage.close(owner)


class SQLiteSite(Site):
    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__()

    def make(self) -> SQLiteStorage:
        storage = SQLiteStorage(self.path, clock=lambda: 1_000.0, synchronous="NORMAL")
        storage.holders_outlive_s = FOREVER_S
        return storage

    async def abandon(self, storage: SQLiteStorage) -> None:
        await storage._stop()


class PostgresSite(Site):
    def __init__(self, schemas: Schemas) -> None:
        self.first = schemas.make()
        super().__init__()

    def make(self) -> PostgresStorage:
        return PostgresStorage(dsn(), self.first.name)

    async def abandon(self, storage: PostgresStorage) -> None:
        storage._leases.clear()
        await storage._disconnect_if_idle()

    async def close(self) -> None:
        assert not await self.storage.verify()
        await super().close()


@pytest.fixture
def schemas() -> Iterator[Schemas]:
    schemas = Schemas()
    yield schemas
    schemas.drop_all()


@pytest.fixture(params=["sqlite", "postgres"])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    schemas = Schemas()
    site: Site = SQLiteSite(tmp_path / "store.db") if request.param == "sqlite" else PostgresSite(schemas)
    await site.storage.open("me", Settings(), None)
    yield site
    await site.close()
    await asyncio.to_thread(schemas.drop_all)


# --- what the tests share -----------------------------------------------------------------------------


@contextmanager
def called(sequence: int, *, client: str = "client", confirmed: int = 0) -> Iterator[None]:
    token = CALL.set(Call(client, sequence, confirmed))
    try:
        yield
    finally:
        CALL.reset(token)


def content(**more: Any) -> Content:
    group = tuple(make_group(**more))
    return Content(group, describe(group))


def arrival(group_id: int | None = None, *, attempt: int | None = None, **more: Any) -> Arrival:
    return Arrival(task_name="math", content=content(group_id=group_id, **more), group_id=group_id, attempt=attempt)


def wanting(purpose: Purpose, n: int, *statuses: Status, **more: Any) -> Claim:
    lease = {"lease_id": "lease", "train_step": 1} if purpose is Purpose.LEASE else {}
    return Claim(
        wants={"math": n, "none": 0},
        statuses=statuses or ((ABORTED,) if purpose is Purpose.DRAW else (COMPLETED,)),
        purpose=purpose,
        **{"owner": "me", **lease, **more},
    )


async def line(storage: Storage) -> dict[str, int]:
    found = (await storage.summary()).ledger().get("math", {"issued": 0})
    assert found["issued"] == sum(found.values()) - found["issued"], "G1"
    return {name: n for name, n in found.items() if n}


async def records(storage: Storage) -> list[Record]:
    return await storage.records(parse({}), None)


async def value(storage: Storage, sequence: int, client: str = "client") -> Any:
    assert isinstance(storage, CallMemory)
    found = await storage.answer(client, sequence)
    assert isinstance(found, Answered), f"call {sequence} of {client} has no answer"
    return found.value.rows if isinstance(found.value, Claimed) else found.value


async def claimed_by(storage: Storage, claim: Claim) -> Rows | None:
    return (await storage.claim(claim)).rows


# --- effect and answer --------------------------------------------------------------------------------


async def test_g07_every_operation_answers_the_same_after_a_crash(site: Site) -> None:
    storage = site.storage
    returned: dict[int, Any] = {}

    async def call(work: Awaitable[Any]) -> Any:
        with called(len(returned) + 1):
            result = returned[len(returned) + 1] = await work
        return result

    await call(storage.issue("math", [content(status=INIT), content(status=INIT)], Draw("me", 0)))
    put = await call(storage.put([arrival(0, attempt=1), arrival(1, attempt=1, status=ABORTED)], owner="me"))
    await call(storage.put([arrival(), arrival(tokens=5), arrival(status=Status.FAILED)], owner="me"))
    revision = Revision(put[0].uid, put[0].revision, content(group_id=0, status=Status.EXPIRED))
    assert await call(storage.revise([revision, revision])) == [True, False]
    leased = await call(claimed_by(storage, wanting(Purpose.LEASE, 1, whole=True)))
    assert await call(storage.settle("lease", [leased["math"][0].record.uid], Event.ACKED)) is None
    assert await call(storage.discard(parse({"status": "failed"}), "not wanted")) == {"math": 1}
    drawn = await call(claimed_by(storage, wanting(Purpose.DRAW, 2, Status.EXPIRED, ABORTED)))
    taken = await call(claimed_by(storage, wanting(Purpose.TAKE, 1)))
    assert (len(drawn["math"]), len(taken["math"]), taken["none"]) == (2, 1, [])
    lately = await call(claimed_by(storage, wanting(Purpose.LEASE, 5, lease_id="late")))
    assert lately == {"math": [], "none": []}
    before = await line(storage), await records(storage)
    again = await site.crash()
    for sequence in (1, 2, 3, 4, 6, 7, 8, 9):
        assert await value(again, sequence) == returned[sequence], f"call {sequence}"
    with pytest.raises(LostLease, match="1 of 1 groups that me claimed were taken back"):
        await again.answer("client", 5)  # it was settled
    assert await again.answer("client", 10) is None, "it moved nothing, and may be repeated"
    assert await again.answer("client", 11) is None
    assert await again.answer("another", 1) is None
    assert (await line(again), await records(again)) == before


@pytest.mark.parametrize("purpose", list(Purpose))
async def test_a_claim_is_answered_with_the_payloads_that_it_handed_out(site: Site, purpose: Purpose) -> None:
    storage = site.storage
    status = ABORTED if purpose is Purpose.DRAW else COMPLETED
    await storage.put([arrival(status=status, text=f"prompt {n}", score=n) for n in range(4)], owner="me")
    with called(1):
        claimed = await claimed_by(storage, wanting(purpose, 3))
    again = await site.crash()
    for _ in range(2):  # as often as it is asked for
        repeated = await value(again, 1)
        assert repeated == claimed
    group: tuple[RolloutState, ...] = repeated["math"][1].group
    # Drawn again are the least group ids, and those of groups put by hand are negative.
    assert group[0].message[0]["content"] == ("prompt 2" if purpose is Purpose.DRAW else "prompt 1")
    assert group[0].group_id == repeated["math"][1].record.group_id
    assert group[1].rollout_id is not None


async def test_a_restore_is_answered(site: Site) -> None:
    source = MemoryStorage()
    await source.open("me", Settings(), None)
    await source.put([arrival(), arrival()], owner="me")
    snapshot = await source.snapshot()
    with called(4):
        await site.storage.restore(snapshot.accounts, snapshot.next_uid, snapshot.next_timestamp_id, snapshot.rows)
    again = await site.crash()
    assert await again.answer("client", 4) == Answered(None)
    assert await line(again) == {"issued": 2, "buffered": 2}


async def test_without_a_call_nothing_is_remembered(site: Site) -> None:
    await site.storage.put([arrival()], owner="me")
    await site.storage.claim(wanting(Purpose.TAKE, 1))
    assert await stored_parts(site) == 0


async def stored_parts(site: Site) -> int:
    storage = site.storage
    if isinstance(storage, PostgresStorage):
        return int(await execute(f'SELECT count(*) FROM "{storage.name}".calls'))
    assert isinstance(storage, SQLiteStorage)
    return int(await storage._do(lambda connection: connection.execute("SELECT count(*) FROM calls").fetchone()[0]))


async def test_answers_that_were_seen_go_with_the_next_call(site: Site) -> None:
    storage = site.storage
    for sequence in (1, 2, 3):
        with called(sequence):
            await storage.put([arrival()], owner="me")
    with called(2, client="another"):
        other = await storage.put([arrival()], owner="me")
    with called(4):
        await storage.claim(wanting(Purpose.TAKE, 2))
    assert await stored_parts(site) == 4 + 1 + 2
    with called(5, confirmed=2):
        await storage.put([arrival()], owner="me")
    assert [await storage.answer("client", n) is not None for n in (1, 2, 3, 4, 5)] == [False, False, True, True, True]
    with called(6, confirmed=5):
        await storage.settle("lease", [], Event.ACKED)
    assert await stored_parts(site) == 2, "the frames of what was taken go with their answer"
    assert await value(storage, 6) is None
    assert await value(storage, 2, "another") == other, "calls of two clients do not meet"
    await storage.forget("client")
    assert await storage.answer("client", 6) is None
    assert await value(storage, 2, "another") == other


# --- neither effect nor answer ------------------------------------------------------------------------


async def test_a_call_that_was_refused_has_no_answer(site: Site) -> None:
    storage = site.storage
    with called(1), pytest.raises(LostLease):
        await storage.settle("no lease", [1], Event.ACKED)
    with called(2):
        assert await claimed_by(storage, wanting(Purpose.LEASE, 1, whole=True)) is None
    assert [await storage.answer("client", n) for n in (1, 2)] == [None, None]


@asynccontextmanager
async def failing_commits(storage: Storage) -> AsyncIterator[None]:
    """Transactions that write an answer fail at their very end."""
    if isinstance(storage, PostgresStorage):
        name = storage.name
        await execute(
            f'CREATE FUNCTION "{name}".refuse() RETURNS trigger LANGUAGE plpgsql AS '
            "$$ BEGIN RAISE EXCEPTION 'no commit'; END $$"
        )
        await execute(
            f'CREATE CONSTRAINT TRIGGER refusing AFTER INSERT ON "{name}".calls DEFERRABLE INITIALLY DEFERRED '
            f'FOR EACH ROW EXECUTE FUNCTION "{name}".refuse()'
        )
        yield
        await execute(f'DROP TRIGGER refusing ON "{name}".calls')
        return
    assert isinstance(storage, SQLiteStorage)
    script = (
        "CREATE TABLE checked (x REFERENCES meta (key) DEFERRABLE INITIALLY DEFERRED);"
        "CREATE TRIGGER refusing AFTER INSERT ON calls BEGIN INSERT INTO checked VALUES ('nothing'); END;"
        "PRAGMA foreign_keys = ON"
    )
    await storage._do(lambda transaction: transaction.connection.executescript(script), alone=True)
    yield
    await storage._do(lambda transaction: transaction.connection.executescript("DROP TRIGGER refusing"), alone=True)


@pytest.mark.parametrize("operation", ["issue", "put", "claim", "settle", "revise", "discard"])
async def test_a_commit_that_fails_leaves_neither_effect_nor_answer(site: Site, operation: str) -> None:
    storage = site.storage
    put = await storage.put([arrival(), arrival()], owner="me")
    await storage.claim(wanting(Purpose.LEASE, 1))
    operations: dict[str, Callable[[], Awaitable[Any]]] = {
        "issue": lambda: storage.issue("math", [content(status=INIT)], Draw("me", 0)),
        "put": lambda: storage.put([arrival()], owner="me"),
        "claim": lambda: claimed_by(storage, wanting(Purpose.TAKE, 1)),
        "settle": lambda: storage.settle("lease", [put[0].uid], Event.ACKED),
        "revise": lambda: storage.revise([Revision(put[1].uid, put[1].revision, None)]),
        "discard": lambda: storage.discard(parse({}), "all"),
    }
    before = await line(storage), await records(storage)
    async with failing_commits(storage):
        with called(1), pytest.raises((StorageError, asyncpg.PostgresError)):
            await operations[operation]()
        assert (await line(storage), await records(storage)) == before
        assert await storage.answer("client", 1) is None
    with called(1):
        result = await operations[operation]()
    again = await site.crash()
    assert await value(again, 1) == result
    assert await line(again) != before[0]


_CHILD = """
import asyncio, sys
from forebay.storage.base import Arrival, Settings
from forebay.storage.values import Content
from forebay.storage.idempotency import CALL, Call
from forebay.storage.sqlite import SQLiteStorage
from forebay.core.ledger import describe
from forebay.testing.samples import make_group

async def main():
    storage = SQLiteStorage(sys.argv[1])
    await storage.open("me", Settings(), None)

    async def put(number):
        group = tuple(make_group(group_id=number))
        CALL.set(Call("child", number, 0))
        content = Content(group, describe(group))
        await storage.put([Arrival(task_name="math", content=content, group_id=number)], owner="me")
        print(number, flush=True)

    for start in range(1, 100_000, 4):  # several share a commit
        await asyncio.gather(*(asyncio.create_task(put(start + n)) for n in range(4)))

asyncio.run(main())
"""


async def test_g07_a_killed_process_leaves_answers_of_exactly_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with started("-c", _CHILD, path) as child:
        assert child.stdout is not None
        acknowledged = {int(child.stdout.readline()) for _ in range(30)}
        child.kill()
        acknowledged |= {int(text) for text in child.stdout.read().split()}
    storage = SQLiteStorage(path)
    await storage.open("me", Settings(), None)
    there = {record.group_id for record in await records(storage)}
    assert acknowledged <= there
    last = max(there)
    answered = {n for n in range(1, last + 8) if await storage.answer("child", n) is not None}
    assert answered == there
    await storage.close("me")


# --- claims that were lost or undone --------------------------------------------------------------------


async def test_a_claim_that_was_taken_back_in_part_is_taken_back_whole(site: Site) -> None:
    storage = site.storage
    first, second, third = await storage.put([arrival() for _ in range(3)], owner="me")
    with called(1):
        await storage.claim(wanting(Purpose.LEASE, 2))
    await storage.fail({first.uid: "damaged"})
    again = await site.crash()
    with pytest.raises(LostLease, match="1 of 2 groups that me claimed"):
        await again.answer("client", 1)
    assert await line(again) == {"issued": 3, "buffered": 2, "failed": 1}, "nobody holds what nobody learned of"
    assert await again.answer("client", 1) is None
    claimed = await claimed_by(again, wanting(Purpose.LEASE, 2, owner="host"))
    assert claimed is not None
    assert [(row.record.uid, row.record.deliveries) for row in claimed["math"]] == [(second.uid, 1), (third.uid, 1)]


async def test_a_take_whose_drawn_groups_were_lost_gives_the_others_back(site: Site) -> None:
    storage = site.storage
    done, begun = await storage.put([arrival(text="done"), arrival(status=ABORTED)], owner="me")
    with called(1):
        claimed = await storage.claim(wanting(Purpose.TAKE, 2, COMPLETED, ABORTED))
    assert claimed.rows is not None
    assert await line(storage) == {"issued": 2, "trained": 1, "in_flight": 1}
    await storage.release("me")
    with pytest.raises(LostLease, match="1 of 2"):
        await storage.answer("client", 1)
    assert await line(storage) == {"issued": 2, "buffered": 2}
    row = await storage.read(done.uid)
    assert row is not None
    assert row.group[0].message[0]["content"] == "done"
    assert (row.record.place, row.record.status) == (Place.BUFFERED, COMPLETED)
    assert [record.uid for record in await records(storage)] == [done.uid, begun.uid]


@pytest.mark.parametrize("purpose", list(Purpose))
async def test_an_undone_claim_has_no_answer(site: Site, purpose: Purpose) -> None:
    storage = site.storage
    await storage.put([arrival(status=ABORTED if purpose is Purpose.DRAW else COMPLETED) for _ in range(2)], owner="me")
    claim = wanting(purpose, 2)
    with called(1):
        await storage.claim(claim)
    again = await site.crash()
    with called(1):
        await again.undo(claim, await value(again, 1))
    assert await again.answer("client", 1) is None
    assert await stored_parts(site) == 0
    assert await line(again) == {"issued": 2, "buffered": 2}


@pytest.mark.parametrize("purpose", list(Purpose))
async def test_a_cancelled_claim_has_no_answer(site: Site, purpose: Purpose) -> None:
    storage = site.storage
    await storage.put([arrival(status=ABORTED if purpose is Purpose.DRAW else COMPLETED) for _ in range(2)], owner="me")
    cancelled = 0
    for sequence in range(1, 60):
        with called(sequence):
            claiming = asyncio.create_task(claimed_by(storage, wanting(purpose, 2)))
        for _ in range(sequence):
            await asyncio.sleep(0)
        claiming.cancel()
        try:
            claimed = await claiming
        except asyncio.CancelledError:
            cancelled += 1
            assert await storage.answer("client", sequence) is None
            assert await line(storage) == {"issued": 2, "buffered": 2}
            continue
        assert claimed is not None
        assert await value(storage, sequence) == claimed
        await storage.undo(wanting(purpose, 2), claimed)
    assert cancelled


async def test_a_damaged_payload_costs_its_group_and_the_answer_is_of_the_rest(tmp_path: Path) -> None:
    site = SQLiteSite(tmp_path / "store.db")
    storage: SQLiteStorage = site.storage
    await storage.open("me", Settings(), None)
    first, second = await storage.put([arrival(), arrival()], owner="me")
    damage = "UPDATE payloads SET frame = x'00' WHERE uid = ?"
    await storage._do(lambda connection: connection.execute(damage, (first.uid,)))
    with called(1):
        claimed = await claimed_by(storage, wanting(Purpose.TAKE, 2))
    again = await site.crash()
    assert claimed is not None
    assert [row.record.uid for row in claimed["math"]] == [second.uid]
    assert await value(again, 1) == claimed
    assert await line(again) == {"issued": 2, "trained": 1, "failed": 1}
    await site.close()


async def test_a_damaged_answer_costs_its_call_and_nothing_else(tmp_path: Path) -> None:
    site = SQLiteSite(tmp_path / "store.db")
    storage: SQLiteStorage = site.storage
    await storage.open("me", Settings(), None)
    for sequence, damage in enumerate((b"\x00", "text"), 1):
        with called(sequence):
            await storage.put([arrival()], owner="me")
        await storage._do(
            lambda connection, damage=damage, sequence=sequence: connection.execute(  # type: ignore[misc]
                "UPDATE calls SET data = ? WHERE sequence = ?", (damage, sequence)
            )
        )
        other, answer = await asyncio.gather(
            storage.put([arrival()], owner="me"), storage.answer("client", sequence), return_exceptions=True
        )
        assert isinstance(other, list)
        assert isinstance(answer, DamagedData)
    with called(3):
        taken = await storage.claim(wanting(Purpose.TAKE, 4))
    assert taken is not None
    await storage._do(lambda connection: connection.execute("UPDATE calls SET data = x'00' WHERE part = 2"))
    with pytest.raises(LostLease, match="1 of 4"):
        await storage.answer("client", 3)
    assert await line(storage) == {"issued": 4, "buffered": 4}, "what cannot be handed out was not trained on"
    await storage.claim(wanting(Purpose.TAKE, 4))
    assert await line(storage) == {"issued": 4, "trained": 3, "failed": 1}
    await site.close()


# --- the bytes of an answer -----------------------------------------------------------------------------


@given(st.binary(max_size=200))
def test_g09_bytes_that_are_no_answer_are_damaged(data: bytes) -> None:
    with pytest.raises(DamagedData, match="a stored answer cannot be read"):
        decode_kept(b"\xc1" + data)
    with suppress(DamagedData):  # and nothing else
        decode_kept(data)


def test_answers_are_plain_messagepack() -> None:
    handed = Handed(Purpose.LEASE, "me", "lease", {"math": []})
    for kept in (Returned("settle", None), Returned("put", []), handed):
        assert decode_kept(msgspec.msgpack.encode(kept)) == kept
    for damaged in (msgspec.msgpack.encode(handed)[:-1], msgspec.msgpack.encode(Returned("put", 3))):
        with pytest.raises(DamagedData):
            decode_kept(damaged)
    with pytest.raises(DamagedData):
        decode_kept(msgspec.msgpack.encode(Returned("no_operation", None)))


# --- one buffer, two hosts --------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["issue", "back", "put", "claim", "settle"])
async def test_a_call_at_two_processes_at_once_happens_once(schemas: Schemas, operation: str) -> None:
    """As when a host that was thought dead still works."""
    storage = schemas.make()
    other = PostgresStorage(dsn(), storage.name)
    for each in (storage, other):
        await each.open("me", Settings(), None)
    put = await storage.put([arrival() for _ in range(3)], owner="me")
    await storage.issue("math", [content(status=INIT)], Draw("me", 0))
    await storage.claim(wanting(Purpose.LEASE, 1))
    operations: dict[str, Callable[[PostgresStorage], Awaitable[Any]]] = {
        "issue": lambda each: each.issue("math", [content(status=INIT)], Draw("me", 1)),
        "back": lambda each: each.put([arrival(0, attempt=1)], owner="me"),
        "put": lambda each: each.put([arrival()], owner="me"),
        "claim": lambda each: claimed_by(each, wanting(Purpose.TAKE, 1, whole=True)),
        "settle": lambda each: each.settle("lease", [put[0].uid], Event.ACKED),
    }
    issued = (await line(storage))["issued"]
    with called(1):
        one, two = await asyncio.gather(*(operations[operation](each) for each in (storage, other)))
    assert one == two
    assert await value(storage, 1) == one
    after = await line(storage)
    assert after["issued"] == issued + (operation in ("issue", "put"))
    assert after.get("trained", 0) == (operation in ("claim", "settle"))
    assert not await storage.verify()
    for each in (storage, other):
        await each.close("me")


class LostCommits:
    """Connections that break while a commit is under way, after it arrived or before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arrived: bool) -> None:
        execute_as_it_is = asyncpg.Connection.execute

        async def execute_and_break(connection: Any, sql: str, *arguments: Any, **more: Any) -> Any:
            if sql != "COMMIT":
                return await execute_as_it_is(connection, sql, *arguments, **more)
            if arrived:
                await execute_as_it_is(connection, sql)
            connection.terminate()
            raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

        monkeypatch.setattr(asyncpg.Connection, "execute", execute_and_break)


@pytest.mark.parametrize("arrived", [True, False])
async def test_a_put_whose_commit_nobody_saw_is_answered_iff_it_happened(
    schemas: Schemas, arrived: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = schemas.make()
    await storage.open("me", Settings(), None)
    LostCommits(monkeypatch, arrived)
    with called(1), pytest.raises(StorageUnavailable):
        await storage.put([arrival()], owner="me")
    monkeypatch.undo()
    assert (await storage.answer("client", 1) is not None) is arrived
    assert len(await records(storage)) == int(arrived)
    await storage.close("me")


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("arrived", [True, False])
@pytest.mark.parametrize("purpose", list(Purpose))
async def test_a_claim_whose_commit_nobody_saw_is_undone_with_its_answer_unless_that_was_seen_elsewhere(
    schemas: Schemas, purpose: Purpose, arrived: bool, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = schemas.make()
    await storage.open("me", Settings(), None)
    await storage.put([arrival(status=ABORTED if purpose is Purpose.DRAW else COMPLETED) for _ in range(2)], owner="me")
    LostCommits(monkeypatch, arrived)
    with called(1), pytest.raises(StorageUnavailable):
        await storage.claim(wanting(purpose, 2))
    monkeypatch.undo()
    if seen:
        other = PostgresStorage(dsn(), storage.name)
        assert (await other.answer("client", 1) is not None) is arrived
        await other.forget("client")
    assert await storage.answer("client", 1) is None
    is_claimed = arrived and seen
    assert (await line(storage)).get("buffered", 0) == (0 if is_claimed else 2)
    await storage.close("me")


# --- holders that outlive the process of the store ----------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


async def left_behind(path: Path, clock: Clock) -> None:
    """A store whose process ended while one owner had a lease and another a prompt."""
    storage = SQLiteStorage(path, clock=clock)
    await storage.open("trainer", Settings(), 5.0)
    await storage.open("producer", Settings(), 5.0)
    await storage.put([arrival(), arrival()], owner="me")
    await storage.claim(wanting(Purpose.LEASE, 1, owner="trainer"))
    await storage.issue("math", [content(status=INIT)], Draw("producer", 0))
    await storage._stop()


async def test_holders_end_with_the_process_unless_told_otherwise(tmp_path: Path) -> None:
    clock = Clock()
    await left_behind(tmp_path / "store.db", clock)
    storage = SQLiteStorage(tmp_path / "store.db", clock=clock)
    await storage.open("host", Settings(), None)
    assert await line(storage) == {"issued": 3, "buffered": 3}
    assert (await storage.summary(holdings=True)).holdings == []
    await storage.close("host")


async def test_holders_that_outlive_the_process_are_heard_of_or_lose_what_they_hold(tmp_path: Path) -> None:
    clock = Clock()
    await left_behind(tmp_path / "store.db", clock)
    storage = SQLiteStorage(tmp_path / "store.db", clock=clock)
    storage.holders_outlive_s = 10.0
    await storage.open("host", Settings(), None)
    assert await line(storage) == {"issued": 3, "buffered": 1, "leased": 1, "in_flight": 1}
    reaped = await storage.reap()
    assert (dict(reaped.returned), reaped.next_s) == ({}, 10.0)
    clock.now += 8.0
    storage.beat("trainer")
    clock.now += 8.0
    reaped = await storage.reap()
    assert (dict(reaped.returned), reaped.next_s) == ({"math": 1}, 2.0), "only the trainer was heard of"
    with pytest.raises(LostLease):
        await storage.put([arrival(0, attempt=1)], owner="producer")
    await storage.open("trainer", Settings(), None)  # from now on it never expires
    clock.now += 1_000.0
    assert (await storage.reap()).next_s is None
    (leased,) = [record for record in await records(storage) if record.place is Place.LEASED]
    await storage.settle("lease", [leased.uid], Event.ACKED)
    assert await line(storage) == {"issued": 3, "buffered": 2, "trained": 1}
    for owner in ("trainer", "host"):
        await storage.close(owner)


# --- any history, any crash -----------------------------------------------------------------------------


class Player:
    """Plays a history on a storage. What to act on is taken from its own answers, so that any two can be compared."""

    def __init__(self, storage: Storage, site: Site | None = None) -> None:
        self.storage = storage
        self.site = site
        self.sequence = 0
        self.leases: list[tuple[str, list[int]]] = []
        self.flying: list[Record] = []

    async def play(self, name: str, n: int, crash: bool) -> None:
        work: Callable[[], Awaitable[Any]] | None = getattr(self, name)(n)
        if work is None:
            return
        self.sequence += 1
        with called(self.sequence, confirmed=max(0, self.sequence - 3)):
            before = result = await work()
        if crash and self.site is not None:
            self.storage = await self.site.crash()
            assert isinstance(self.storage, CallMemory)
            found = await self.storage.answer("client", self.sequence)
            if found is None:  # as its caller would
                assert result in (None, {}) or not any(result.values()), f"{name} was done, and is not remembered"
                with called(self.sequence, confirmed=max(0, self.sequence - 3)):
                    again = await work()
                assert again == result
            else:
                result = await value(self.storage, self.sequence)
                assert result == before, name
        getattr(self, f"after_{name}", self.ignore)(result)

    def ignore(self, result: Any) -> None:
        pass

    def put(self, n: int) -> Any:
        statuses = (COMPLETED, ABORTED, Status.FAILED)
        return lambda: self.storage.put([arrival(status=statuses[n % 3], tokens=n) for _ in range(n)], owner="me")

    def issue(self, n: int) -> Any:
        async def issue() -> list[Record]:
            return await self.storage.issue("math", [content(status=INIT)] * n, Draw("me", self.issued))

        return issue

    issued = 0

    def after_issue(self, drawn: list[Record]) -> None:
        self.flying += drawn
        self.issued += len(drawn)

    def back(self, n: int) -> Any:
        if not self.flying:
            return None
        record = self.flying[n % len(self.flying)]
        self.flying.remove(record)
        status = (COMPLETED, ABORTED, Status.FILTERED)[n % 3]
        returned = arrival(record.group_id, attempt=record.attempt, status=status)
        return lambda: self.storage.put([returned], owner="me")

    def lease(self, n: int) -> Any:
        claim = wanting(Purpose.LEASE, n, lease_id=f"lease {self.sequence}", whole=n % 2 == 0)
        return lambda: claimed_by(self.storage, claim)

    def after_lease(self, claimed: Rows | None) -> None:
        rows: list[Row] = [] if claimed is None else claimed["math"]
        if rows:
            self.leases.append((str(rows[0].record.lease_id), [row.record.uid for row in rows]))

    def settle(self, n: int) -> Any:
        if not self.leases:
            return None
        lease_id, uids = self.leases.pop(n % len(self.leases))
        return lambda: self.storage.settle(lease_id, uids, (Event.ACKED, Event.NACKED, Event.REJECTED)[n % 3], "why")

    def take(self, n: int) -> Any:
        return lambda: claimed_by(self.storage, wanting(Purpose.TAKE, n, COMPLETED, Status.FAILED))

    def draw(self, n: int) -> Any:
        return lambda: claimed_by(self.storage, wanting(Purpose.DRAW, n, INIT, ABORTED))

    def after_draw(self, claimed: Rows) -> None:
        self.flying += [row.record for row in claimed["math"]]

    def discard(self, n: int) -> Any:
        return lambda: self.storage.discard(parse({"tokens": n}), "not wanted")


HISTORIES = st.lists(
    st.tuples(
        st.sampled_from(["put", "issue", "back", "lease", "settle", "take", "draw", "discard"]),
        st.integers(1, 4),
        st.booleans(),
    ),
    max_size=15,
)
FEW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


async def played(site: Site, history: list[tuple[str, int, bool]]) -> None:
    plain = MemoryStorage(clock=lambda: 1_000.0)
    await plain.open("me", Settings(), None)
    await site.storage.open("me", Settings(), None)
    expected, player = Player(plain), Player(site.storage, site)
    for name, n, crash in history:
        await expected.play(name, n, crash)
        await player.play(name, n, crash)
        assert await line(player.storage) == await line(plain), name
    accounts = [(await storage.summary()).task("math").account for storage in (player.storage, plain)]
    assert accounts[0].reasons == accounts[1].reasons
    if isinstance(site, SQLiteSite):
        assert await records(player.storage) == await records(plain)
    for owner in ("me", "host"):
        await site.storage.close(owner)


@FEW
@given(HISTORIES)
def test_g04_a_repeated_call_changes_nothing_in_sqlite(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int, bool]]
) -> None:
    site = SQLiteSite(tmp_path_factory.mktemp("calls") / "store.db")
    asyncio.run(played(site, history))


@settings(FEW, max_examples=15)
@given(HISTORIES)
def test_g04_a_repeated_call_changes_nothing_in_postgres(history: list[tuple[str, int, bool]]) -> None:
    schemas = Schemas()
    try:
        asyncio.run(played(PostgresSite(schemas), history))
    finally:
        schemas.drop_all()
