"""Another data set is noticed: by its fingerprint in the checkpoint and in the store, before anything is drawn."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import (
    AgentLoopManager,
    ChangedDataset,
    DamagedData,
    FunctionAgentLoop,
    InvalidDataset,
    ManagedTask,
    MemoryStorage,
    ReplayBuffer,
    RolloutState,
    Sampler,
    Storage,
    SyncProduceStrategy,
)
from forebay.core.fingerprint import Fingerprint, SourceState, digest, pack_state, sampled_positions, unpack_state
from forebay.prompts.sampler import SamplerWithReplayBuffer
from forebay.storage.postgres import PostgresStorage
from forebay.storage.sqlite import SQLiteStorage
from tests.storage.postgres_server import Schemas, dsn
from tests.support import closed_ledger
from tests.test_sampler import EpochLoader, Loader, StatefulLoader, records

RECORDS = records(100)
VARIANTS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "shorter": (RECORDS[:40], {}, "length"),
    "reversed": (RECORDS[::-1], {}, "record 0"),
    "other seed": (RECORDS, {"seed": 7}, "seed"),
    "shuffle off": (RECORDS, {"shuffle": False}, "shuffle"),
    "other group size": (RECORDS, {"group_size": 2}, "group_size"),
}


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut would lose is tested elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def postgres() -> Iterator[Callable[[], Storage]]:
    schemas = Schemas()
    made = schemas.make()
    yield lambda: PostgresStorage(dsn(), made.name)
    schemas.drop_all()


@pytest.fixture(params=["sqlite", "postgres"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Storage]:
    """Opens one durable store again and again."""
    if request.param == "sqlite":
        return lambda: SQLiteStorage(tmp_path / "store.db")
    made: Callable[[], Storage] = request.getfixturevalue("postgres")
    return made


@asynccontextmanager
async def manager(sampler: Sampler, storage: Storage | None = None) -> AsyncIterator[AgentLoopManager]:
    async def answer(state: RolloutState) -> None:
        state.response_ids = [1]

    buffer = ReplayBuffer(storage=MemoryStorage() if storage is None else storage)
    strategy = SyncProduceStrategy(buffer)
    task = ManagedTask(name="math", sampler=sampler, agent_loop=FunctionAgentLoop(answer), strategy=strategy)
    async with AgentLoopManager(task, buffer) as made:
        yield made
    await buffer.close()


async def train(plane: AgentLoopManager, first: int, last: int) -> list[int]:
    """Trains steps of four groups; the records, in order."""
    seen = []
    for step in range(first, last + 1):
        async with plane.produce_batch(4, step, model_step=step - 1) as batch:
            seen += [group[0].extra_fields["number"] for group in batch.groups]
    return seen


# --- resuming -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
async def test_g04_a_checkpoint_is_not_resumed_with_another_data_set(variant: str, tmp_path: Path) -> None:
    async with manager(Sampler(RECORDS)) as plane:
        before = await train(plane, 1, 3)
        await plane.save(tmp_path / "checkpoint", 3)
    data, settings, field = VARIANTS[variant]
    async with manager(Sampler(data, **settings)) as plane:
        with pytest.raises(ChangedDataset, match=f"task 'math' .* 12 groups .*{field} was .*, is ") as refused:
            await plane.resume(tmp_path / "checkpoint")
        assert field in refused.value.changes
        assert await plane.ledger() == {}, "nothing was taken up"
    async with manager(Sampler(list(RECORDS))) as plane:
        assert await plane.resume(tmp_path / "checkpoint") == 3
        assert set(await train(plane, 4, 6)).isdisjoint(before)


@pytest.mark.parametrize("variant", VARIANTS)
async def test_g04_a_durable_store_is_not_drawn_from_with_another_data_set(
    variant: str, reopen: Callable[[], Storage]
) -> None:
    async with manager(Sampler(RECORDS), reopen()) as plane:
        before = await train(plane, 1, 3)
        ledger = await closed_ledger(plane.replay_buffer)
    data, settings, field = VARIANTS[variant]
    async with manager(Sampler(data, **settings), reopen()) as plane:
        with pytest.raises(ChangedDataset) as refused:
            await train(plane, 4, 4)
        assert field in refused.value.changes
        assert await closed_ledger(plane.replay_buffer) == ledger
    async with manager(Sampler(list(RECORDS)), reopen()) as plane:
        assert set(await train(plane, 4, 6)).isdisjoint(before)


async def test_allow_changed_data_continues_and_keeps_the_new_fingerprint(
    reopen: Callable[[], Storage], caplog: pytest.LogCaptureFixture
) -> None:
    async with manager(Sampler(RECORDS), reopen()) as plane:
        await train(plane, 1, 1)
    async with manager(Sampler(RECORDS[:40], allow_changed_data=True), reopen()) as plane:
        await train(plane, 2, 3)
    assert [record.getMessage() for record in caplog.records if "data_changed" in record.message] == [
        "data_changed task=math changes={'length': (100, 40)}: allow_changed_data was given"
    ]
    async with manager(Sampler(RECORDS[:40]), reopen()) as plane:
        await train(plane, 4, 4)
    async with manager(Sampler(RECORDS), reopen()) as plane:
        with pytest.raises(ChangedDataset, match="length was 40, is 100"):
            await train(plane, 5, 5)


async def test_allow_changed_data_resumes_a_checkpoint(tmp_path: Path) -> None:
    async with manager(Sampler(RECORDS)) as plane:
        await train(plane, 1, 3)
        await plane.save(tmp_path / "checkpoint", 3)
    async with manager(Sampler(RECORDS[::-1], allow_changed_data=True)) as plane:
        await plane.resume(tmp_path / "checkpoint")
        await train(plane, 4, 4)


async def test_a_group_to_be_retried_is_not_drawn_with_another_data_set(tmp_path: Path) -> None:
    buffer = ReplayBuffer()
    await Sampler(RECORDS).with_buffer(buffer).draw(4, "math")
    await buffer.save(tmp_path / "checkpoint")
    resumed = ReplayBuffer()
    await resumed.resume(tmp_path / "checkpoint")
    with pytest.raises(ChangedDataset):
        await Sampler(RECORDS[:40]).with_buffer(resumed).draw_again(4, "math")
    assert await closed_ledger(resumed) == {"issued": 4, "buffered": 4}
    assert len(await Sampler(RECORDS).with_buffer(resumed).draw_again(4, "math")) == 4


async def test_another_process_that_changes_the_data_stops_those_that_draw_with_the_old(
    reopen: Callable[[], Storage],
) -> None:
    buffer = ReplayBuffer(storage=reopen())
    first = Sampler(RECORDS).with_buffer(buffer)
    await first.draw(2, "math", ())
    await Sampler(RECORDS[:40], allow_changed_data=True).with_buffer(buffer).draw(2, "math", ())
    with pytest.raises(ChangedDataset, match="length was 40, is 100"):
        await first.draw(2, "math", ())
    await buffer.close()


async def test_the_seed_matters_only_where_it_orders() -> None:
    buffer = ReplayBuffer()
    await Sampler(RECORDS, shuffle=False, seed=1).with_buffer(buffer).draw(2, "math", ())
    await Sampler(RECORDS, shuffle=False, seed=2).with_buffer(buffer).draw(2, "math", ())


async def test_a_plain_sampler_refuses_the_state_of_another_data_set() -> None:
    sampler = Sampler(RECORDS)
    await sampler.sample("math")
    other = Sampler(RECORDS[:40])
    other.load_state_dict(sampler.state_dict())
    with pytest.raises(ChangedDataset, match="length was 100, is 40"):
        await other.sample("math")


# --- what is read -------------------------------------------------------------------------------------


class Watched:
    """A map-style data set that notes what is read of it; `read` makes the record."""

    def __init__(self, size: int, read: Callable[[int], Any] = lambda index: {"prompt": f"{index}"}) -> None:
        self.size, self._read = size, read
        self.indexes: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.indexes.append(index)
        return self._read(index)


async def test_records_for_the_fingerprint_are_read_once_at_the_first_draw() -> None:
    data = Watched(1000)
    sampler = SamplerWithReplayBuffer(data, ReplayBuffer(), shuffle=False)
    assert data.indexes == []
    await sampler.draw(1, "math")
    assert data.indexes == [0, *sampled_positions(1000)]
    await sampler.draw(3, "math")
    assert data.indexes[17:] == [1, 2, 3]


async def test_values_that_cannot_be_hashed_are_said_to_be_unverified(caplog: pytest.LogCaptureFixture) -> None:
    class Image:
        """As opaque as an image of PIL."""

    def read(index: int) -> dict[str, Any]:
        return {"prompt": f"{index}", "image": Image()} if index else {"prompt": "0"}

    buffer = ReplayBuffer()
    settings: dict[str, Any] = {"to_rollout_state": lambda record: {"prompt": record["prompt"]}}
    await Sampler(Watched(3, read), **settings).with_buffer(buffer).draw(1, "math")
    said = [record.getMessage() for record in caplog.records if "data_unverified" in record.message]
    assert len(said) == 1
    assert "task=math: record 1: $.image is a " in said[0]
    assert (await buffer.stats())["forebay/math/unverified_records"] == 2
    await Sampler(Watched(3, read), **settings).with_buffer(buffer).draw(1, "math")
    other = Watched(3, lambda index: read(index) | {"prompt": "another"} if index else read(index))
    with pytest.raises(ChangedDataset, match="record 1 was"):  # the text beside it is compared
        await Sampler(other, **settings).with_buffer(buffer).draw(1, "math")


async def test_records_that_differ_each_time_are_unverified_and_no_change() -> None:
    chance = random.Random(1)
    buffer = ReplayBuffer()
    for _ in range(2):
        data = Watched(3, lambda index: {"prompt": f"{index}", "noise": chance.random() if index == 1 else 0})
        await Sampler(data).with_buffer(buffer).draw(1, "math")
    assert (await buffer.stats())["forebay/math/unverified_records"] == 1


async def test_a_record_that_cannot_be_read_is_unverified() -> None:
    def read(index: int) -> Any:
        if index == 99:
            raise OSError("the network is away")
        return RECORDS[index]

    buffer = ReplayBuffer()
    await Sampler(Watched(100, read), shuffle=False).with_buffer(buffer).draw(1, "math", ())
    assert (await buffer.stats())["forebay/math/unverified_records"] == 1
    await Sampler(RECORDS, shuffle=False).with_buffer(buffer).draw(1, "math", ())
    assert (await buffer.stats())["forebay/math/unverified_records"] == 0


async def test_a_data_set_may_give_its_own_fingerprint() -> None:
    class Versioned(Watched):
        def __init__(self, version: Any) -> None:
            super().__init__(100)
            self.version = version

        def fingerprint(self) -> Any:
            return self.version

    buffer = ReplayBuffer()
    data = Versioned("v1")
    await Sampler(data, shuffle=False).with_buffer(buffer).draw(1, "math", ())
    assert data.indexes == [0]
    await Sampler(Versioned("v1")).with_buffer(ReplayBuffer()).draw(1, "math", ())
    with pytest.raises(ChangedDataset, match=r"own was .*, is "):
        await Sampler(Versioned("v2"), shuffle=False).with_buffer(buffer).draw(1, "math", ())
    with pytest.raises(InvalidDataset, match=r"fingerprint\(\) of .*Versioned returned a value that is not plain data"):
        await Sampler(Versioned(object())).with_buffer(ReplayBuffer()).draw(1, "math", ())


# --- loaders ------------------------------------------------------------------------------------------


class OtherKeys(StatefulLoader):
    """The same class name cannot be had twice in one module; its state has another key."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"version": 2}


OtherKeys.__qualname__ = StatefulLoader.__qualname__


@pytest.mark.parametrize(
    ("first", "then", "field"),
    [
        (StatefulLoader(9), EpochLoader(9), "loader"),
        (StatefulLoader(9), OtherKeys(9), "state_keys"),
        (EpochLoader(9), EpochLoader(8), "length"),
    ],
)
async def test_another_loader_is_refused(first: Any, then: Any, field: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer()
    await Sampler(first).with_buffer(buffer).draw(2, "math", ())
    with pytest.raises(ChangedDataset) as refused:
        await Sampler(then).with_buffer(buffer).draw(1, "math", ())
    assert list(refused.value.changes) == [field]
    assert (await closed_ledger(buffer))["issued"] == 2


@pytest.mark.parametrize("drawn", [1, 5, 12])
async def test_a_loader_that_is_read_again_is_compared_record_by_record(drawn: int) -> None:
    buffer = ReplayBuffer()
    await Sampler(Loader(9)).with_buffer(buffer).draw(drawn, "math", ())
    other = Loader(9)
    other._records[0] = {"prompt": "another", "number": 0}
    with pytest.raises(ChangedDataset, match="record 0 was"):
        await Sampler(other).with_buffer(buffer).draw(1, "math", ())
    await Sampler(Loader(9)).with_buffer(buffer).draw(1, "math", ())


async def test_a_loader_that_cannot_be_read_again_is_said_to_be_unverified(caplog: pytest.LogCaptureFixture) -> None:
    buffer = ReplayBuffer()
    await Sampler(StatefulLoader(9)).with_buffer(buffer).draw(4, "math", ())
    assert "data_unverified" not in caplog.text
    await Sampler(StatefulLoader(9)).with_buffer(buffer).draw(1, "math", ())
    assert "data_unverified task=math: not all records of the fingerprint can be read again" in caplog.text


async def test_bytes_that_are_not_a_state_are_damaged_data() -> None:
    with pytest.raises(DamagedData, match="cannot be read"):
        unpack_state(b"\x93\x01\x02\x03")
    state = SourceState(fingerprint=Fingerprint(kind="map-style", length=3, records=("a", None)), loader=b"x")
    assert unpack_state(pack_state(state)) == state


# --- hashing ------------------------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(PLAIN)
def test_the_hash_of_a_record_survives_json_and_the_order_of_keys(value: Any) -> None:
    def turned(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: turned(item) for key, item in reversed(part.items())}
        return tuple(map(turned, part)) if isinstance(part, list) else part

    hashed, skipped = digest(value)
    assert hashed is not None
    assert skipped is None
    assert digest(json.loads(json.dumps(value))) == digest(turned(value)) == (hashed, None)


@given(PLAIN, PLAIN)
def test_different_records_have_different_hashes(one: Any, other: Any) -> None:
    assert (digest(one) == digest(other)) == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))


@dataclasses.dataclass
class _Point:
    x: int


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int64)),
        (np.arange(4), np.arange(4).reshape(2, 2)),
        (np.zeros(2), np.zeros(3)),
        (np.array([{"a": 1}], dtype=object), np.array([{"a": 2}], dtype=object)),
        (np.datetime64("2026-01-01"), np.datetime64("2026-01-02")),
        (np.array(["2026-01-01"], dtype="M8[D]"), np.array(["2026-01-02"], dtype="M8[D]")),
        (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
        ({1, 2}, {1, 3}),
        ({1: "a"}, {"1": "a"}),
        (_Point(1), _Point(2)),
        (RolloutState(message=[{"content": "a"}]), RolloutState(message=[{"content": "b"}])),
        (b"a", b"b"),
        (bytearray(b"a"), bytearray(b"b")),
        (1, True),
        (1, 1.0),
    ],
)
def test_values_of_many_types_are_hashed(one: Any, other: Any) -> None:
    for value in (one, other):
        assert digest({"v": value})[1] is None
    assert digest({"v": one}) != digest({"v": other})


@pytest.mark.parametrize("value", [object(), lambda: None, 2**70, "\ud800"])
def test_a_value_that_cannot_be_hashed_is_named_without_an_address(value: Any) -> None:
    _, skipped = digest({"text": "a", "value": value})
    assert skipped is not None
    assert "0x" not in skipped
    assert digest({"text": "a", "value": value}) == digest({"text": "a", "value": value})


def test_a_record_that_holds_itself_is_unverified() -> None:
    record: dict[str, Any] = {}
    record["self"] = record
    assert digest(record) == (None, "it cannot be encoded: RecursionError")


def test_the_hash_is_the_same_in_every_process() -> None:
    program = (
        "from forebay.core.fingerprint import digest; print(digest({'b': {'x', 'y', 'z'}, 'a': [1, 'text', None]})[0])"
    )
    done = [
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert done[0] == done[1] == f"{digest({'a': [1, 'text', None], 'b': {'z', 'y', 'x'}})[0]}\n"


@given(st.integers(1, 10**9))
def test_the_sampled_positions_are_distinct_and_reach_both_ends(length: int) -> None:
    positions = sampled_positions(length)
    assert positions == sorted(set(positions))
    assert (positions[0], positions[-1]) == (0, length - 1)
    assert len(positions) == min(length, 16)
