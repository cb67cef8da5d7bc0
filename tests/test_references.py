"""References in samples: kept where samples are kept as objects, resolved where they become bytes, each value once.

The kind of reference here is a ticket for a value in a cloakroom; `tests/ray` does the same with Ray's objects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import MemoryStorage, ReplayBuffer, RolloutState, Status, Storage, UnsupportedPayload, group_bytes
from forebay.buffer.internal import internals
from forebay.codec.frame import decode_group, encode_group
from forebay.core.references import (
    REFERENCE_BYTES,
    Resolved,
    as_values,
    is_reference,
    references_of,
    register,
    resolve_group,
    resolve_or_fail,
    unregister,
    without_references,
)
from forebay.core.rollout import USER_FIELDS, Group
from forebay.errors import DamagedData, ReferenceLost
from forebay.storage.local.pandas import PandasStorage
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing import make_group
from tests.storage.postgres_server import Schemas
from tests.support import closed_ledger, turns
from tests.test_codec import same, values

VERSION = 4  # where a frame says which version it is


class Ticket:
    """For a value in a cloakroom; those with one number mean one value."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ticket) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __repr__(self) -> str:
        return f"Ticket({self.number})"


class Cloakroom:
    """Where the values are; `open` False: this process cannot put any there."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.open = True
        self.puts = 0
        self.gets = 0
        self.delivery = asyncio.Event()
        self.delivery.set()

    def put(self, value: Any) -> Ticket:
        self.puts += 1
        self.values[self.puts] = value
        return Ticket(self.puts)

    async def resolve(self, ticket: Ticket) -> Any:
        self.gets += 1
        await self.delivery.wait()
        if ticket.number not in self.values:
            raise ReferenceLost("the cloakroom burnt down")
        return self.values[ticket.number]


@pytest.fixture
def room() -> Iterator[Cloakroom]:
    cloakroom = Cloakroom()
    register(Ticket, resolve=cloakroom.resolve, put=cloakroom.put, available=lambda: cloakroom.open)
    yield cloakroom
    unregister(Ticket)


IMAGE = np.arange(12, dtype=np.uint8).reshape(3, 4)


def picture_group(image: Ticket, *, samples: int = 3, **options: Any) -> list[RolloutState]:
    """Members that share an image in their prompt, and each refer to it in their experts."""
    group = make_group(samples, **options)
    info = {"images": [image], "sizes": (3, 4)}
    for state in group:
        state.mm_info = info
        state.routed_experts = image if state.response_ids is not None else None
    return group


def images(group: list[RolloutState] | Group) -> list[Any]:
    return [state.mm_info["images"][0] for state in group if state.mm_info is not None]


def mention(count: int, name: str) -> Callable[[Any], list[RolloutState]]:
    """Makes groups with a value at some depth of a field."""

    def made(value: Any) -> list[RolloutState]:
        group = [RolloutState(rollout_id=index, message=[]) for index in range(count)]
        for state in group:
            whole = {"a": [{"b": (1, value)}]}
            fits: Any = [whole] if name in ("message", "tools", "tool_calls") else whole
            setattr(state, name, fits)
        return group

    return made


# --- frames -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", USER_FIELDS)
async def test_every_field_of_user_data_may_hold_references_at_any_depth(name: str, room: Cloakroom) -> None:
    group = tuple(mention(2, name)(room.put(IMAGE)))
    beside: list[Any] = []
    found = decode_group(encode_group(group, beside), beside)
    assert beside == [Ticket(1)]
    assert all(map(same, found, group))
    resolved = decode_group(encode_group(await resolve_group(group)))
    assert [list(references_of([state])) for state in resolved] == [[Ticket(2)]] * 2
    assert np.array_equal(room.values[2], IMAGE)


def test_frames_without_references_are_of_version_1(room: Cloakroom) -> None:
    group = make_group(3)
    beside: list[Any] = []
    frame = encode_group(group, beside)
    assert frame[VERSION] == 1
    assert beside == []
    unregister(Ticket)
    assert frame == encode_group(group)
    assert all(map(same, decode_group(frame, ()), decode_group(frame)))


def test_references_travel_beside_a_frame_each_once(room: Cloakroom) -> None:
    one, other = room.put(1), room.put(2)
    group = picture_group(one)
    group[1].extra_fields = {"x": [other, (one, {"y": other})], "again": Ticket(one.number)}
    beside: list[Any] = ["of another frame"]
    frame = encode_group(group, beside)
    assert frame[VERSION] == 2
    assert beside == ["of another frame", one, other]
    found = decode_group(frame, beside)
    assert all(map(same, found, group))
    assert found[1].extra_fields["again"] is one
    encode_group(group, beside)
    assert len(beside) == 3
    assert room.gets == 0


def test_a_reference_is_refused_where_nothing_can_carry_it(room: Cloakroom) -> None:
    with pytest.raises(UnsupportedPayload, match=r"\$\[0\]\.mm_info\.images\[0\]: a Ticket that was not resolved"):
        encode_group(picture_group(room.put(1)))
    frame = encode_group(picture_group(room.put(1)), [])
    for beside in (None, ()):
        with pytest.raises(DamagedData, match="reference"):
            decode_group(frame, beside)


async def test_a_value_that_members_share_is_written_once_and_put_back_once(room: Cloakroom) -> None:
    picture = np.zeros(50_000, np.uint8)
    image = room.put(picture)
    group = tuple(picture_group(image, samples=8))
    frame = encode_group(await resolve_group(group))
    assert len(frame) < 55_000
    found = decode_group(frame)
    assert room.puts == 2
    assert all(state.mm_info is found[0].mm_info for state in found)
    assert all(state.routed_experts is images(found)[0] for state in found)
    assert is_reference(found[0].routed_experts)


async def test_members_with_separate_prompts_share_a_value(room: Cloakroom) -> None:
    image = room.put(np.zeros(50_000, np.uint8))
    group = tuple(make_group(4))
    for index, state in enumerate(group):
        state.mm_info = {"images": [Ticket(image.number)]}
        state.data_source = index
    frame = encode_group(await resolve_group(group))
    assert len(frame) < 55_000
    assert len(set(map(id, images(decode_group(frame))))) == 1


async def test_equal_prompts_with_equal_references_are_one_prompt(room: Cloakroom) -> None:
    image = room.put(b"x" * 50_000)
    group = tuple(make_group(4))
    for state in group:
        state.mm_info = {"images": [Ticket(image.number)], "text": "y" * 50_000}
    assert len(encode_group(group, [])) < 55_000
    assert len(encode_group(await resolve_group(group))) < 110_000
    group[2].mm_info = {"images": [room.put(b"")], "text": "y" * 50_000}
    beside: list[Any] = []
    found = decode_group(encode_group(group, beside), beside)
    assert all(map(same, found, group))


@given(st.lists(values, min_size=1, max_size=4), st.data())
@settings(max_examples=100, deadline=None)
def test_groups_with_references_come_out_as_they_went_in(kept: list[Any], data: st.DataObject) -> None:
    cloakroom = Cloakroom()
    register(Ticket, resolve=cloakroom.resolve, put=cloakroom.put, available=lambda: cloakroom.open)
    try:
        tickets = st.sampled_from([cloakroom.put(value) for value in kept])
        nested = st.recursive(
            tickets | values,
            lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
            max_leaves=6,
        )
        group = tuple(
            RolloutState(
                rollout_id=index,
                message=[{"x": data.draw(nested)}],
                mm_info={"x": data.draw(nested)},
                routed_experts=data.draw(nested),
                extra_fields={"x": data.draw(nested)},
            )
            for index in range(data.draw(st.integers(1, 3)))
        )
        before = len(references_of(group))
        beside: list[Any] = []
        found = decode_group(encode_group(group, beside), beside)
        assert all(map(same, found, group))
        assert len(beside) == before

        resolved = asyncio.run(resolve_group(group))
        cloakroom.puts = 100
        found = decode_group(encode_group(resolved))
        assert cloakroom.puts == 100 + before
        again = asyncio.run(resolve_group(found))
        assert encode_group(again) == encode_group(resolved)
        with as_values():
            assert encode_group(decode_group(encode_group(resolved))) == encode_group(resolved)

        cloakroom.open = False
        plain = decode_group(encode_group(resolved))
        assert not references_of(plain)
        if not before:
            assert encode_group(resolved) == encode_group(group)
            assert all(map(same, plain, group))
    finally:
        unregister(Ticket)


def test_a_process_that_cannot_put_values_back_gets_plain_values(room: Cloakroom) -> None:
    frame = encode_group(asyncio.run(resolve_group(tuple(picture_group(room.put(IMAGE))))))
    room.open = False
    for _ in range(2):
        found = decode_group(frame)
        assert all(np.array_equal(image, IMAGE) for image in images(found))
        assert np.array_equal(found[2].routed_experts, IMAGE)
        unregister(Ticket)


@pytest.mark.parametrize("value", [object(), {"x": [object()]}, {1: 2}, "\ud800", 2**70])
async def test_a_value_that_is_not_plain_data_is_refused_with_its_path(value: Any, room: Cloakroom) -> None:
    group = tuple(mention(2, "extra_fields")(room.put(value)))
    with pytest.raises(UnsupportedPayload, match=r"\$\[0\]\.extra_fields"):
        encode_group(await resolve_group(group))


async def test_a_reference_in_the_value_of_another_is_refused(room: Cloakroom) -> None:
    group = tuple(picture_group(room.put([room.put(1)])))
    with pytest.raises(UnsupportedPayload, match="inside the value of another"):
        encode_group(await resolve_group(group))
    with pytest.raises(UnsupportedPayload, match="inside the value of another"):
        encode_group(await resolve_group(group), [])


async def test_a_field_that_has_to_be_a_dict_cannot_be_a_reference(room: Cloakroom) -> None:
    group = tuple(make_group())
    group[1].mm_info = room.put({})  # type: ignore[assignment]
    with pytest.raises(UnsupportedPayload, match=r"\$\[1\]\.mm_info: a reference; expected dict or None"):
        encode_group(await resolve_group(group))


async def test_the_error_names_what_cannot_be_encoded_and_not_the_reference_beside_it(room: Cloakroom) -> None:
    group = tuple(mention(1, "message")(room.put(1)))
    group[0].extra_fields["text"] = "\ud800"
    with pytest.raises(UnsupportedPayload, match=r"^\$\[0\]\.extra_fields:"):
        encode_group(await resolve_group(group))


# --- resolving ----------------------------------------------------------------------------------------


async def test_resolving_does_not_change_the_group_that_was_given(room: Cloakroom) -> None:
    image = room.put(IMAGE)
    group = tuple(picture_group(image))
    resolved = await resolve_group(group)
    assert images(group) == [image] * 3
    assert {type(found) for found in images(resolved)} == {Resolved}
    assert len({*images(resolved), *(state.routed_experts for state in resolved)}) == 1
    assert room.gets == 1
    untouched = tuple(make_group())
    assert await resolve_group(untouched) is untouched


async def test_a_lost_value_is_named_with_its_path(room: Cloakroom) -> None:
    group = tuple(make_group())
    group[1].extra_fields = {"frames": [room.put(1), Ticket(99)]}
    with pytest.raises(ReferenceLost, match=r"^\$\[1\]\.extra_fields\.frames\[1\]: the cloakroom burnt down$"):
        await resolve_group(group)
    failed = await resolve_or_fail(group)
    assert {state.status for state in failed} == {Status.FAILED}
    assert {state.error_msg for state in failed} == {"$[1].extra_fields.frames[1]: the cloakroom burnt down"}
    kept, gone = failed[1].extra_fields["frames"]
    assert (kept.value, gone) == (1, None)
    assert [state.status for state in group] == [Status.COMPLETED] * 2


async def test_the_codec_refuses_data_that_holds_itself_or_is_too_deep(room: Cloakroom) -> None:
    circle: list[Any] = [room.put(1)]
    circle += [circle, circle]
    deep: Any = [room.put(1)]
    for _ in range(5000):
        deep = [deep]
    for value in (circle, deep):
        group = (RolloutState(message=[], routed_experts=value),)
        assert len(references_of(group)) == (value is circle)
        with pytest.raises(UnsupportedPayload, match=r"\$\[0\]\.routed_experts"):
            encode_group(await resolve_group(group))


def test_a_group_without_its_references(room: Cloakroom) -> None:
    group = tuple(picture_group(room.put(IMAGE)))
    assert images(without_references(group)) == [None] * 3
    assert images(group) == [Ticket(1)] * 3
    assert room.gets == 0


async def test_sizes_count_a_reference_little_and_its_value_once(room: Cloakroom) -> None:
    empty = group_bytes(picture_group(None, samples=4))  # type: ignore[arg-type]
    group = tuple(picture_group(room.put(np.zeros(10_000, np.uint8)), samples=4))
    assert group_bytes(group) == empty + 5 * REFERENCE_BYTES  # one in the prompt, four as experts
    assert group_bytes(await resolve_group(group)) == empty + 5 * REFERENCE_BYTES + 10_000


def test_without_a_kind_nothing_is_a_reference() -> None:
    group = picture_group(Ticket(1))
    assert references_of(group) == {}
    assert not is_reference(Ticket(1))
    with pytest.raises(UnsupportedPayload, match="Ticket is not plain data"):
        encode_group(group, [])


# --- buffers ------------------------------------------------------------------------------------------

KEEPING: dict[str, Callable[[], Storage]] = {"memory": MemoryStorage, "pandas": PandasStorage}


@pytest.mark.parametrize("storage", KEEPING)
async def test_storages_of_objects_keep_references(storage: str, room: Cloakroom) -> None:
    image = room.put(IMAGE)
    async with ReplayBuffer(storage=KEEPING[storage]()) as buffer:
        assert not buffer.storage.durable
        await buffer.put(picture_group(image), "math")
        async with buffer.lease_batch({"math": 1}, train_step=1) as lease:
            assert all(found is image for found in images(lease.groups[0]))
    assert (room.puts, room.gets) == (1, 0)


async def test_durable_storages_keep_values_and_put_them_back_once_for_each_hand_out(
    room: Cloakroom, tmp_path: Path
) -> None:
    async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
        assert buffer.storage.durable
        uids = await buffer.put_many([picture_group(room.put(np.zeros(9_000, np.uint8))) for _ in range(3)], "math")
        records = await buffer.query({})
        assert all(record.bytes > 9_000 for record in records)
        room.values.clear()
        assert room.puts == 3
        assert await buffer.read(uids[0]) is not None
        assert room.puts == 4
    async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
        async with buffer.lease_batch({"math": 2}, train_step=1) as lease:
            assert room.puts == 6
            for group in lease.groups:
                (ticket,) = references_of(group)
                assert room.values[ticket.number].nbytes == 9_000
        assert await closed_ledger(buffer) == {"issued": 3, "buffered": 1, "trained": 2}


async def test_a_lost_value_fails_its_group_with_the_reason_and_no_other(room: Cloakroom, tmp_path: Path) -> None:
    async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
        prompts = [picture_group(room.put(IMAGE), status=Status.INIT) for _ in range(2)]
        drawn = (await internals(buffer).issue(prompts, "m", cursor=0)).groups
        for group, ticket in zip(drawn, (Ticket(99), room.put(IMAGE)), strict=True):
            assert all(type(image) is Ticket for image in images(group))
            for state in group:
                state.status, state.response_ids, state.routed_experts = Status.COMPLETED, [1], ticket
        uids = await buffer.put_many(drawn, "m")
        assert await closed_ledger(buffer, "m") == {"issued": 2, "buffered": 1, "failed": 1}
        reason = "$[0].routed_experts: the cloakroom burnt down"
        assert await buffer.reasons() == {"m": {reason: 1}}
        assert await buffer.read(uids[0]) is None

        (by_hand,) = await buffer.put_many([picture_group(Ticket(99))], "m")
        (record,) = await buffer.query({"uid": by_hand})
        assert record.status is Status.FAILED
        (failed,) = await buffer.get(1, "m", Status.FAILED)
        assert {state.error_msg for state in failed} == {"$[0].mm_info.images[0]: the cloakroom burnt down"}
        assert images(failed) == [None] * 3


async def test_a_prompt_with_a_lost_value_ends_when_it_is_drawn(room: Cloakroom, tmp_path: Path) -> None:
    async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
        prompts = [picture_group(ticket, status=Status.INIT) for ticket in (room.put(1), Ticket(99), room.put(2))]
        drawn = (await internals(buffer).issue(prompts, "math", cursor=0)).groups
        assert [group[0].group_id for group in drawn] == [0, 2]
        assert await closed_ledger(buffer) == {"issued": 3, "in_flight": 2, "failed": 1}
        assert list((await buffer.reasons())["math"]) == ["$[0].mm_info.images[0]: the cloakroom burnt down"]
        assert await internals(buffer).position("math") == (3, None)


async def test_values_of_groups_that_end_as_they_come_are_not_asked_for(room: Cloakroom, tmp_path: Path) -> None:
    async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
        prompts = [make_group(status=Status.INIT) for _ in range(2)]
        drawn = (await internals(buffer).issue(prompts, "math", cursor=0)).groups
        for group, status in zip(drawn, (Status.FILTERED, Status.FAILED), strict=True):
            for state in group:
                state.status, state.routed_experts = status, Ticket(99)
        await buffer.put_many(drawn, "math")
        await buffer.set_limits("math", stale_threshold=1, retryable=False)
        await buffer.put(picture_group(Ticket(99)), "math", model_step=0, current_train_step=9)
        assert room.gets == 0
        assert await closed_ledger(buffer) == {"issued": 3, "filtered": 1, "failed": 1, "discarded": 1}
        assert (await buffer.reasons())["math"].keys() == {"filtered", "failed", "stale"}


async def test_expiring_a_stored_group_keeps_its_references(room: Cloakroom, tmp_path: Path) -> None:
    async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
        await buffer.put(picture_group(room.put(IMAGE), model_step=0), "math")
        await buffer.set_limits("math", stale_threshold=2)
        assert await buffer.refresh_staleness(task_stale_thresholds={"math": 2}, current_train_step=9) == {"math": 1}
        assert room.puts == 1  # it was only written again
        (group,) = await internals(buffer).redraw(1, "math")
        (ticket,) = references_of(group)
        assert np.array_equal(room.values[ticket.number], IMAGE)
        assert all(state.routed_experts is None for state in group)


@pytest.fixture
def schemas() -> Iterator[Schemas]:
    made = Schemas()
    yield made
    made.drop_all()


async def test_a_shared_database_keeps_values_too(room: Cloakroom, schemas: Schemas, tmp_path: Path) -> None:
    async with ReplayBuffer(storage=schemas.make()) as buffer:
        lost, kept = await buffer.put_many(
            [picture_group(Ticket(99)), picture_group(room.put(IMAGE), model_step=0)], "math"
        )
        (record,) = await buffer.query({"uid": lost})
        assert record.status is Status.FAILED
        await buffer.save(tmp_path / "checkpoint", model_step=0)
        await buffer.refresh_staleness(task_stale_thresholds={"math": 2}, current_train_step=9)
        assert room.puts == 1
        (group,) = await internals(buffer).redraw(1, "math")
        (ticket,) = references_of(group)
        assert np.array_equal(room.values[ticket.number], IMAGE)
        assert room.puts == 2
        assert await buffer.storage.fail({kept: "lost"}) == {"math": 1}
        assert await closed_ledger(buffer) == {"issued": 2, "buffered": 1, "failed": 1}
    async with ReplayBuffer(storage=schemas.make()) as buffer:
        await buffer.resume(tmp_path / "checkpoint")
        assert room.puts == 2
        (group,) = await buffer.get(1, "math", Status.COMPLETED)
        assert len(references_of(group)) == 1
        assert room.puts == 3


async def test_g11_a_wait_for_values_is_listed_and_can_be_cancelled(room: Cloakroom, tmp_path: Path) -> None:
    async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
        room.delivery.clear()
        putting = asyncio.ensure_future(buffer.put(picture_group(room.put(IMAGE)), "math", timeout_s=0))
        waiting = asyncio.ensure_future(buffer.put(picture_group(room.put(IMAGE)), "math"))
        await turns(20)
        assert "the values of references in groups of task 'math'" in await buffer.explain_wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        room.delivery.set()
        assert await putting is not None
        assert "references" not in await buffer.explain_wait()
        assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}


# --- checkpoints --------------------------------------------------------------------------------------


async def saved(room: Cloakroom, path: Path) -> None:
    """Two groups that share an image, one in flight and one leased, and one without any."""
    image = room.put(np.zeros(9_000, np.uint8))
    buffer = ReplayBuffer()
    await internals(buffer).issue([picture_group(image, status=Status.INIT)], "math", cursor=0)
    await buffer.put_many([picture_group(image), make_group()], "math")
    await buffer.lease_batch({"math": 1}, train_step=5)
    await buffer.save(path / "checkpoint", model_step=1)
    await buffer.close()


@pytest.mark.parametrize("storage", [*KEEPING, "sqlite"])
async def test_checkpoints_hold_values_and_resuming_puts_each_back_once(
    storage: str, room: Cloakroom, tmp_path: Path
) -> None:
    await saved(room, tmp_path)
    room.values.clear()
    room.puts = 10
    sqlite = SQLiteStorage(tmp_path / "store.db")
    async with ReplayBuffer(storage=sqlite if storage == "sqlite" else KEEPING[storage]()) as buffer:
        await buffer.resume(tmp_path / "checkpoint")
        assert room.puts == (10 if storage == "sqlite" else 12)  # once for each group
        assert await closed_ledger(buffer) == {"issued": 3, "buffered": 3}
        sizes = {record.group_id: record.bytes for record in await buffer.query({})}
        assert (sizes[0] > 9_000) == (storage == "sqlite")
        drawn = await internals(buffer).redraw(1, "math")
        lease = await buffer.lease_batch({"math": 2}, train_step=2)
        assert room.puts == 12
        for group in (drawn[0], lease.groups[0]):
            (ticket,) = references_of(group)
            assert room.values[ticket.number].nbytes == 9_000


async def test_a_checkpoint_of_a_durable_store_moves_values_without_putting_them_back(
    room: Cloakroom, tmp_path: Path
) -> None:
    async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
        await buffer.put(picture_group(room.put(IMAGE)), "math")
        await buffer.save(tmp_path / "checkpoint", model_step=0)
        assert (room.puts, room.gets) == (1, 1)
    async with ReplayBuffer() as buffer:
        await buffer.resume(tmp_path / "checkpoint")
        assert room.puts == 2


async def test_a_process_without_that_kind_reads_a_checkpoint_with_plain_values(
    room: Cloakroom, tmp_path: Path
) -> None:
    await saved(room, tmp_path)
    unregister(Ticket)
    async with ReplayBuffer() as buffer:
        await buffer.resume(tmp_path / "checkpoint")
        (group,) = await internals(buffer).redraw(1, "math")
        assert all(image.nbytes == 9_000 for image in images(group))


async def test_g01_a_group_whose_value_is_lost_fails_in_the_storage_and_in_the_checkpoint(
    room: Cloakroom, tmp_path: Path
) -> None:
    buffer = ReplayBuffer(keep_trained=2)
    await internals(buffer).issue([picture_group(Ticket(99), status=Status.INIT)], "math", cursor=0)
    await buffer.put_many([picture_group(ticket) for ticket in (Ticket(99), room.put(1), Ticket(99))], "math")
    async with buffer.lease_batch({"math": 1}, train_step=5):
        pass
    await buffer.lease_batch({"math": 1}, train_step=6)
    before = {"issued": 4, "in_flight": 1, "leased": 1, "buffered": 1, "trained": 1}
    assert await closed_ledger(buffer) == before
    await buffer.save(tmp_path / "checkpoint", model_step=1)
    # The one that was trained on is over for this process, and cannot be handed out again by a resumed one.
    assert await closed_ledger(buffer) == {"issued": 4, "failed": 2, "leased": 1, "trained": 1}
    reason = "$[0].mm_info.images[0]: the cloakroom burnt down"
    assert await buffer.reasons() == {"math": {reason: 2}}
    resumed = ReplayBuffer()
    await resumed.resume(tmp_path / "checkpoint")
    assert await closed_ledger(resumed) == {"issued": 4, "failed": 3, "buffered": 1}
    assert await resumed.reasons() == {"math": {reason: 3}}
    tokens = (await resumed.ledger(tokens=True))["math"]
    assert (tokens["failed"], tokens["buffered"]) == (18, 9)


async def test_a_checkpoint_of_prompts_only_needs_no_values_of_responses(room: Cloakroom, tmp_path: Path) -> None:
    group = make_group()
    for state in group:
        state.routed_experts = Ticket(99)
    buffer = ReplayBuffer()
    await buffer.put(group, "math")
    await buffer.save(tmp_path / "checkpoint", model_step=0, no_save_replay_buffer=True)
    assert room.gets == 0
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}
