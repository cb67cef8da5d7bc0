"""Calls that arrive twice happen once; waits are one call; a host forgets answers that were seen. No cluster needed.

`Host` is called directly here, with the very messages that clients send.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay import LostLease, Status, Storage
from forebay.core.capacity import Settings
from forebay.core.ledger import Account, Clock, Event, Record, describe
from forebay.core.query import parse
from forebay.errors import InvalidInput, TooManyWaits
from forebay.ray import wire
from forebay.ray.host import actor as actor_module
from forebay.ray.host.actor import Host
from forebay.ray.host.operations import FrameStorage, HostSpec
from forebay.ray.table import OPERATIONS
from forebay.ray.wire import Parcel
from forebay.storage.base import Arrival, Claim, Claimed, Draw, Purpose
from forebay.storage.sqlite import SQLiteStorage
from forebay.storage.urls import build_storage
from forebay.storage.values import Content, Ready, Revision
from forebay.testing import make_group

COMPLETED, ABORTED = Status.COMPLETED, Status.ABORTED
Call = tuple[wire.Request, Any, list[Any]]
SPEC = HostSpec(name="grpo", settings=Settings(), lease_s=60.0, wait_places=3)


class Client:
    """Sends calls to a host, and can send the same one again."""

    def __init__(self, host: Host, name: str = "client") -> None:
        self.host = host
        self.name = name
        self.last = 0

    def message(self, op: str, *arguments: Any, confirmed: int = 0) -> Call:
        self.last += 1
        operation, parcel = OPERATIONS[op], Parcel()
        packed = [wire.with_groups(argument, parcel.add_group) for argument in arguments]
        if operation.carried is not None:
            parcel.objects.append(packed[operation.carried])
            packed[operation.carried] = None
        body = msgspec.Raw(wire.encoded(packed))
        request = wire.Request(op, self.name, self.last, confirmed, body, parcel.frames)
        return request, parcel.payload(), parcel.objects

    async def send(self, message: Call) -> Any:
        head, _, _ = await self.host.call(*message)
        answer: wire.Answer = wire.decoded(head, wire.Answer)
        if answer.failure is not None:
            raise wire.error_of(answer.failure)
        return wire.decoded(answer.body, OPERATIONS[message[0].op].result)

    async def call(self, op: str, *arguments: Any, confirmed: int = 0) -> Any:
        return await self.send(self.message(op, *arguments, confirmed=confirmed))

    async def open(self, owner: str = "me") -> None:
        await self.call("open", owner, SPEC.settings, 60.0)

    async def put(self, groups: int, *, task_name: str = "math", status: Status = COMPLETED) -> list[Record]:
        records: list[Record] = await self.send(self.putting(groups, task_name=task_name, status=status))
        return records

    def putting(self, groups: int, *, task_name: str = "math", status: Status = COMPLETED) -> Call:
        contents = [content(status=status) for _ in range(groups)]
        return self.message("put", [Arrival(task_name=task_name, content=each) for each in contents], "me")


def content(**fields: Any) -> Content:
    group = tuple(make_group(**fields))
    return Content(group, describe(group))


def lease(n: int, lease_id: str = "lease") -> Claim:
    return Claim(
        wants={"math": n},
        statuses=(COMPLETED,),
        purpose=Purpose.LEASE,
        owner="me",
        whole=True,
        lease_id=lease_id,
        train_step=1,
    )


def take(n: int, purpose: Purpose = Purpose.TAKE) -> Claim:
    statuses = (ABORTED,) if purpose is Purpose.DRAW else (COMPLETED,)
    return Claim(wants={"math": n}, statuses=statuses, purpose=purpose, owner="me")


class Place:
    """The storage of a host, and how the host is restarted on it."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self._path = path
        self.host: Host

    def storage(self) -> Storage:
        if self.kind == "memory":
            return FrameStorage()
        return SQLiteStorage(self._path, holders_outlive_s=60.0) if self.kind == "sqlite" else build_storage(self.kind)

    async def begin(self, *, restarted: bool = False, spec: HostSpec = SPEC) -> Host:
        self.host = Host(self.storage(), spec, restarted=restarted)
        await self.host.start()
        return self.host

    async def crash(self) -> Host:
        """The process of the host ends, and another takes its place. In memory nothing comes back."""
        await self.host.storage._stop()  # type: ignore[attr-defined]
        return await self.begin(restarted=True)


@pytest.fixture(params=["memory", "pandas", "sqlite"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(request.param, tmp_path / "store.db")
    yield place
    await _end(place)


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place("sqlite", tmp_path / "store.db")
    yield place
    await _end(place)


async def _end(place: Place) -> None:
    for owner in list(place.host.operations.owners):
        await place.host.storage.close(owner)
    await place.host.stop()


async def line(host: Host, task_name: str = "math") -> dict[str, int]:
    found = (await host.storage.summary()).ledger()[task_name]
    assert found["issued"] == sum(found.values()) - found["issued"]
    return {name: n for name, n in found.items() if n}


# --- once, however often it arrives ---------------------------------------------------------------------

Make = Callable[[Client, list[Record]], Call]


def _revising(client: Client, stored: list[Record]) -> Call:
    revision = Revision(stored[0].uid, stored[0].revision, content(status=COMPLETED, tokens=7))
    return client.message("revise", [revision])


CALLS: dict[str, Make] = {
    "put": lambda client, stored: client.putting(3),
    "issue": lambda client, stored: client.message("issue", "math", [content(status=Status.INIT)], Draw("me", 0)),
    "lease": lambda client, stored: client.message("claim", lease(2)),
    "take": lambda client, stored: client.message("claim", take(2)),
    "draw": lambda client, stored: client.message("claim", take(1, Purpose.DRAW)),
    "settle": lambda client, stored: client.message("settle", "first", [stored[0].uid], Event.ACKED, None),
    "revise": _revising,
    "discard": lambda client, stored: client.message("discard", parse({"place": "buffered"}), "old"),
}
"""Each changes something, and would change more the second time."""


async def _prepared(host: Host) -> tuple[Client, list[Record]]:
    client = Client(host)
    await client.open()
    stored = await client.put(6)
    await client.put(2, status=ABORTED)
    await client.call("claim", lease(1, "first"))
    return client, stored


def _plain(value: Any) -> Any:
    """A result as plain data; of a claim the rows, because its other fields are as of the moment of the answer."""
    return msgspec.to_builtins(value.rows if isinstance(value, Claimed) else value)


@pytest.mark.parametrize("what", CALLS)
async def test_a_call_that_arrives_twice_happens_once(place: Place, what: str) -> None:
    host = await place.begin()
    client, stored = await _prepared(host)
    records = stored[1:] if what == "revise" else stored
    message = CALLS[what](client, records)
    first = await client.send(message)
    after = (await host.storage.summary()).ledger()
    again = await client.send(message)
    assert _plain(again) == _plain(first)
    assert (await host.storage.summary()).ledger() == after
    # At the same moment, too: the second one waits for the answer of the first.
    message = client.putting(1)
    one, two = await asyncio.gather(client.send(message), client.send(message))
    assert _plain(one) == _plain(two)
    await line(host)


@pytest.mark.parametrize("what", CALLS)
async def test_g07_a_call_that_arrives_again_after_a_crash_gets_the_stored_answer(sqlite: Place, what: str) -> None:
    client, stored = await _prepared(await sqlite.begin())
    records = stored[1:] if what == "revise" else stored
    message = CALLS[what](client, records)
    first = await client.send(message)
    after = (await sqlite.host.storage.summary()).ledger()
    client.host = host = await sqlite.crash()
    again = await client.send(message)
    assert _plain(again) == _plain(first)
    assert (await host.storage.summary()).ledger() == after
    # And those that were not answered before the crash are done now.
    assert len(await client.put(1)) == 1
    await line(host)


async def test_payloads_come_with_a_repeated_claim(sqlite: Place) -> None:
    client, _ = await _prepared(await sqlite.begin())
    message = client.message("claim", take(2))
    _, payload, _ = await sqlite.host.call(*message)
    host = await sqlite.crash()
    _, again, _ = await host.call(*message)
    assert bytes(again) == bytes(payload)
    assert len(bytes(again)) > 100


async def test_a_repeated_call_gets_the_same_error(place: Place) -> None:
    client = Client(await place.begin())
    await client.open()
    message = client.message("settle", "no such lease", [1], Event.ACKED, None)
    for _ in range(2):
        with pytest.raises(LostLease):
            await client.send(message)


async def test_a_call_whose_answer_was_seen_never_happens_again(place: Place) -> None:
    host = await place.begin()
    client = Client(host)
    await client.open()
    message = client.putting(2)
    await client.send(message)
    await client.call("saved", 1, None, confirmed=client.last)
    with pytest.raises(InvalidInput, match="arrived again"):
        await client.send(message)
    assert await line(host) == {"issued": 2, "buffered": 2}


async def test_a_host_does_not_grow_with_the_calls_that_it_served(place: Place) -> None:
    host = await place.begin()
    client = Client(host)
    await client.open()
    for _ in range(50):
        await client.put(1)
        await client.call("claim", take(1), confirmed=client.last)
    book = host._books[client.name]
    assert len(book.answers) <= 2
    assert len(book.claims) <= 1
    await host.confirm(client.name, client.last)
    assert not book.answers
    assert not book.claims
    assert await line(host) == {"issued": 50, "trained": 50}
    if place.kind == "sqlite":
        kept = await host.storage._do(  # type: ignore[attr-defined]
            lambda transaction: transaction.execute("SELECT count(*) FROM calls").fetchone()[0]
        )
        assert kept <= 2  # they go with the next one that is kept
        await client.call("close", "me")
        assert (
            await host.storage._do(  # type: ignore[attr-defined]
                lambda transaction: transaction.execute("SELECT count(*) FROM calls").fetchone()[0]
            )
            == 0
        )


async def test_g03_withdrawing_a_claim_puts_its_groups_back_once(place: Place) -> None:
    host = await place.begin()
    client, _ = await _prepared(host)
    before = await line(host)
    for purpose in (Purpose.TAKE, Purpose.DRAW):
        claim = take(2, purpose)
        await client.call("claim", claim)
        assert await line(host) != before
        undo = client.message("withdraw", client.last, claim)
        await client.send(undo)
        assert await line(host) == before
        await client.send(undo)
        assert await line(host) == before


async def test_g03_a_withdrawal_that_arrives_again_after_a_crash_puts_nothing_back_twice(sqlite: Place) -> None:
    client, _ = await _prepared(await sqlite.begin())
    claim = take(2)
    await client.call("claim", claim)
    undo = client.message("withdraw", client.last, claim)
    await client.send(undo)
    # Somebody else takes what came back, for good.
    other = Client(sqlite.host, "other")
    await other.open("you")
    await other.call("claim", take(2))
    before = await line(sqlite.host)
    client.host = await sqlite.crash()
    await client.send(undo)
    assert await line(client.host) == before


async def test_g03_a_claim_that_arrives_after_its_withdrawal_takes_nothing(place: Place) -> None:
    """As when a client gave up while its host was away, and both calls arrive when it is back."""
    host = await place.begin()
    client, _ = await _prepared(host)
    before = await line(host)
    claim = take(2)
    message = client.message("claim", claim)
    await client.call("withdraw", client.last, claim)
    assert (await client.send(message)).rows is None
    assert await line(host) == before


# --- after a restart ----------------------------------------------------------------------------------


async def test_g03_owners_continue_under_their_names_after_a_restart(sqlite: Place) -> None:
    client, stored = await _prepared(await sqlite.begin())
    client.host = host = await sqlite.crash()
    await client.call("settle", "first", [stored[0].uid], Event.ACKED, None)
    assert len((await client.call("claim", lease(2))).rows["math"]) == 2
    await host.beat("me", client.name, client.last)
    assert (await line(host))["leased"] == 2


async def test_a_wait_from_before_a_restart_with_a_faster_clock_is_answered(place: Place) -> None:
    host = await place.begin()
    later = host._version + 10_000_000
    wait = await host.begin_wait(_waiting(later))
    assert wait.over.is_set()
    answer: wire.Answer = wire.decoded(await host.end_wait(wait), wire.Answer)
    assert answer.version < later


# --- waits --------------------------------------------------------------------------------------------


def _waiting(since: int, ready: Ready | None = None, *, wait_id: str = "wait", client: str = "client") -> wire.Request:
    return wire.Request("wait", client, 0, 0, msgspec.Raw(wire.encoded((wait_id, since, ready))))


async def test_a_wait_ends_when_its_condition_holds_and_not_before(place: Place) -> None:
    host = await place.begin()
    client = Client(host)
    await client.open()
    wait = await host.begin_wait(_waiting(0, Ready(wants={"math": 3})))
    for stored in range(1, 4):
        assert not wait.over.is_set()
        await client.put(1)
        assert wait.over.is_set() == (stored == 3)
    await host.end_wait(wait)
    # Without a condition: as soon as anything changed.
    wait = await host.begin_wait(_waiting(host._version))
    assert not wait.over.is_set()
    await client.put(1, task_name="other")
    assert wait.over.is_set()


async def test_places_for_waits_are_counted_and_freed(place: Place) -> None:
    host = await place.begin()
    ready = Ready(wants={"math": 1})
    waits = [await host.begin_wait(_waiting(0, ready, wait_id=str(number))) for number in range(3)]
    with pytest.raises(TooManyWaits, match="3 places"):
        await host.begin_wait(_waiting(0, ready, wait_id="one too many"))
    assert not any(wait.over.is_set() for wait in waits)
    await host.leave_wait("1")
    assert waits[1].over.is_set()
    await host.end_wait(waits[1])
    await host.end_wait(await _left_before_it_came(host, ready))
    await host.begin_wait(_waiting(0, ready, wait_id="now there is room"))
    await host.stop()
    assert all(wait.over.is_set() for wait in host._waits.values())
    place.host = await place.begin()


async def _left_before_it_came(host: Host, ready: Ready) -> Any:
    await host.leave_wait("late")
    wait = await host.begin_wait(_waiting(0, ready, wait_id="late"))
    assert wait.over.is_set()
    return wait


async def test_the_places_of_dead_clients_are_freed(place: Place) -> None:
    host = await place.begin()
    dead, living = Client(host, "dead"), Client(host, "living")
    await dead.open()
    await living.open("you")
    ready = Ready(wants={"math": 1})
    waits = [await host.begin_wait(_waiting(0, ready, wait_id=name, client=name)) for name in ("dead", "living")]
    host._books["dead"].heard_at -= 61
    await host.attend()
    assert [wait.over.is_set() for wait in waits] == [True, False]


async def test_streams_and_restores_of_a_dead_client_are_ended(place: Place) -> None:
    host = await place.begin()
    dead = Client(host, "dead")
    await dead.open()
    await dead.call("restore", {"math": Account()}, 10, 10)
    await asyncio.sleep(0)
    await dead.call("snapshot")
    host._books["dead"].heard_at -= 121
    await host.attend()
    assert not host.operations.streams
    assert not host.operations.restores
    host._books["dead"].heard_at -= 4_000
    host._newcomers.add("dead")
    await host.attend()
    assert not host._books
    assert not host._newcomers
    # The storage is as if nobody had tried.
    living = Client(host, "living")
    assert len(await living.put(1)) == 1


async def test_changes_from_elsewhere_wake_waiters(sqlite: Place) -> None:
    poked = []
    host = Host(sqlite.storage(), SPEC, poke=lambda: poked.append(1))
    await host.start()
    sqlite.host = host
    wait = await host.begin_wait(_waiting(0, Ready(wants={"math": 1})))
    group = tuple(make_group())
    await host.storage.put([Arrival(task_name="math", content=Content(group, describe(group)))], owner="elsewhere")
    assert poked
    await host.attend()
    assert wait.over.is_set()


# --- what an answer says ------------------------------------------------------------------------------


async def test_an_answer_names_the_tasks_that_its_call_changed(place: Place) -> None:
    host = await place.begin()
    client = Client(host)
    await client.open()
    clocks = {"math": Clock(train_step=9), "code": Clock(train_step=9)}
    for message, changed in (
        (client.putting(1), ["math"]),
        (client.message("advance", clocks), ["math", "code"]),
        (client.message("advance", clocks), []),
        (client.message("claim", take(1, Purpose.DRAW)), []),
        (client.message("settle", "no such lease", [1], Event.ACKED, None), []),
    ):
        answer: wire.Answer = wire.decoded((await host.call(*message))[0], wire.Answer)
        assert answer.changed == changed


async def test_a_reaper_continues_after_an_unexpected_error(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FrameStorage):
        async def reap(self) -> Any:
            raise KeyError("a bug")

    host = Host(Broken(), SPEC)
    await host.start()
    assert await host.attend() == actor_module._LOOK_S
    assert "reap_failed" in caplog.text


async def test_a_snapshot_is_streamed_through_calls_that_happen_once(place: Place) -> None:
    host = await place.begin()
    client = Client(host)
    await client.open()
    await client.put(3)
    _, _, _, stream_id = await client.call("snapshot")
    message = client.message("stream", stream_id)
    first = await client.send(message)
    assert [head.record.group_id for head in first] == [-1, -2, -3]
    assert _plain(await client.send(message)) == _plain(first)
    assert await client.call("stream", stream_id) == []
