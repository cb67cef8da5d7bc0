"""Generations and epochs: which record comes after other prompts were set, after a restart, and at the end of data."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import (
    ChangedDataset,
    EndOfData,
    ForebayError,
    FunctionAgentLoop,
    InvalidConfig,
    InvalidDataset,
    InvalidInput,
    MemoryStorage,
    NoProgress,
    ReplayBuffer,
    RolloutState,
    Sampler,
    Status,
    Storage,
    evaluate,
)
from forebay.buffer.internal import internals
from forebay.core.fingerprint import Fingerprint, SourceState, pack_state, unpack_state
from forebay.prompts.sampler import SamplerWithReplayBuffer
from forebay.storage.sqlite import SQLiteStorage
from tests.support import closed_ledger
from tests.test_prompt_source import ByPosition, ByState
from tests.test_sampler import (
    EpochLoader,
    Groups,
    Loader,
    MapStyle,
    StatefulLoader,
    Suspending,
    complete,
    draw,
    ids,
    numbers,
    running,
    uninterrupted,
)

SIZES = (3, 4, 7)
BASES = (0, 100, 200)


def data(which: int) -> list[dict[str, Any]]:
    """One of three data sets; the number of a record says which."""
    return [{"prompt": f"{which}/{n}", "number": BASES[which] + n} for n in range(SIZES[which])]


class Offset(StatefulLoader):
    """A loader with a state whose records are those of one of three data sets."""

    def __init__(self, which: int) -> None:
        super().__init__(SIZES[which])
        self._records = data(which)


KINDS: dict[str, Callable[[int], Any]] = {
    "list": data,
    "loader": Offset,
    "by position": lambda which: ByPosition(SIZES[which], BASES[which]),
    "by state": lambda which: ByState(SIZES[which], BASES[which]),
}


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut would lose is tested elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


async def order(kind: Callable[[int], Any], which: int, n: int) -> list[int]:
    """The first n records of a data set."""
    return numbers(await draw(Sampler(kind(which)).with_buffer(ReplayBuffer()), n))


@functools.cache
def orders(kind: str) -> list[list[int]]:
    """The first records of each data set: more than a test draws."""

    async def main() -> list[list[int]]:
        return [await order(KINDS[kind], which, 60) for which in range(3)]

    return asyncio.run(main())


async def stored(buffer: ReplayBuffer) -> tuple[int, SourceState | None]:
    cursor, state = await internals(buffer).position("math")
    return cursor, None if state is None else unpack_state(state)


# --- a model ------------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(st.just("draw"), st.integers(1, 6))
    | st.tuples(st.just("set"), st.integers(0, 2))
    | st.tuples(st.just("restart"), st.just(0)),
    min_size=2,
    max_size=10,
)


class Model:
    """The stream of one task as a list: the generation that the store is at, and its next record."""

    def __init__(self, orders: list[list[int]]) -> None:
        self.orders = orders
        self.stored = (0, 0)  # data set, records drawn of its generation
        self.current = (0, 0)
        self.generation = 0

    def draw(self, n: int) -> list[int]:
        which, number = self.current
        self.generation += number == 0 and self.stored[1] > 0
        self.current = self.stored = (which, number + n)
        return self.orders[which][number : number + n]


@given(actions=ACTIONS, kind=st.sampled_from(sorted(KINDS)), durable=st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_sequence_of_draws_other_prompts_and_restarts_draws_the_records_of_a_model(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]], kind: str, durable: bool
) -> None:
    known = orders(kind)

    async def main() -> None:
        make, model = KINDS[kind], Model(known)
        path = tmp_path_factory.mktemp("store") / "store.db"
        memory = MemoryStorage()
        buffer = ReplayBuffer(storage=SQLiteStorage(path) if durable else memory)
        sampler = Sampler(make(0)).with_buffer(buffer)
        drawn: Groups = []
        expected: list[int] = []
        used = False
        for action, value in actions:
            if action == "draw":
                expected += model.draw(value)
                got = await draw_new(sampler, value)
                drawn += got
                await complete(buffer, got)
                used = True
            elif action == "set" and used:
                sampler.set_prompts(make(value))
                model.current = (value, 0)
            elif action == "restart":
                if durable:
                    await buffer.close()
                    buffer = ReplayBuffer(storage=SQLiteStorage(path))
                else:
                    buffer = ReplayBuffer(storage=memory)
                # Prompts that were set and never drawn are forgotten.
                model.current, used = model.stored, False
                sampler = Sampler(make(2 - model.stored[0] // 2)).with_buffer(buffer)
                sampler.set_prompts(make(model.stored[0]))
        assert numbers(drawn) == expected
        assert ids(drawn) == list(range(len(drawn)))
        cursor, state = await stored(buffer)
        assert cursor == len(drawn)
        assert (0 if state is None else state.generation) == model.generation
        await buffer.close()

    running(main())


async def draw_new(sampler: SamplerWithReplayBuffer, n: int) -> Groups:
    drawn: Groups = []
    while len(drawn) < n:
        drawn += await sampler.draw(n - len(drawn), "math", (), timeout_s=0)
    return drawn


# --- generations --------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Storage]:
    memory = MemoryStorage()
    return lambda: memory if request.param == "memory" else SQLiteStorage(tmp_path / "store.db")


async def test_a_new_generation_begins_at_its_first_record_and_group_ids_continue() -> None:
    buffer = ReplayBuffer()
    sampler = Sampler(data(0), shuffle=False)
    bound = sampler.with_buffer(buffer)
    assert numbers(await draw(bound, 5)) == [0, 1, 2, 0, 1]
    sampler.set_prompts(data(1))
    assert len(bound) == 4
    cursor, state = await stored(buffer)
    assert (cursor, state and state.generation) == (5, 0), "the next draw writes the new generation"
    drawn = await draw(bound, 5)
    assert (numbers(drawn), ids(drawn)) == ([100, 101, 102, 103, 100], [5, 6, 7, 8, 9])
    cursor, state = await stored(buffer)
    assert state is not None
    assert (cursor, state.generation, state.begun_at) == (10, 1, 5)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_restart_with_the_data_of_the_stored_generation_continues_exactly(
    kind: str, reopen: Callable[[], Storage]
) -> None:
    make = KINDS[kind]
    expected = await order(make, 1, 9)
    async with ReplayBuffer(storage=reopen()) as buffer:
        sampler = SamplerWithReplayBuffer(make(0), buffer)
        await draw(sampler, 2)
        sampler.set_prompts(make(1))
        assert numbers(await draw(sampler, 3)) == expected[:3]
    async with ReplayBuffer(storage=reopen()) as buffer:
        if kind != "loader":  # this one does not say its length, and cannot read its first records again
            with pytest.raises(ChangedDataset, match=r"at generation 1 of its prompts.* of generation 1,") as refused:
                await Sampler(make(0)).with_buffer(buffer).draw(1, "math", ())
            assert refused.value.generation == 1
        resumed = Sampler(make(0))
        resumed.set_prompts(make(1))  # nothing was drawn yet: this only replaces the data set
        assert numbers(await draw_new(resumed.with_buffer(buffer), 6)) == expected[3:]
        _, state = await stored(buffer)
        assert state is not None
        assert (state.generation, state.begun_at) == (1, 2)


async def test_groups_of_the_old_generation_are_retried_unchanged() -> None:
    buffer = ReplayBuffer()
    sampler = SamplerWithReplayBuffer(data(0), buffer, shuffle=False)
    first = await draw(sampler, 2)
    sampler.set_prompts(data(1))
    for group in first[:1]:
        group[0].status = Status.ABORTED
        await buffer.put(group, "math")
    assert numbers(await draw(sampler, 3)) == [0, 100, 101]
    await complete(buffer, first[1:])
    assert await closed_ledger(buffer) == {"issued": 4, "buffered": 1, "in_flight": 3}


async def test_records_that_were_read_ahead_of_other_prompts_are_dropped() -> None:
    buffer = ReplayBuffer(max_groups=2)
    sampler = SamplerWithReplayBuffer(data(2), buffer, shuffle=False)
    first = await sampler.try_draw(5, "math")
    assert numbers(first) == [200, 201]
    sampler.set_prompts(data(1))
    assert await sampler.try_draw(5, "math") == []
    await complete(buffer, first)
    async with buffer.lease_batch({"math": 2}, train_step=1):
        pass
    assert numbers(await sampler.try_draw(5, "math")) == [100, 101]


async def test_a_crash_between_other_prompts_and_the_next_draw_leaves_the_old_generation(
    reopen: Callable[[], Storage],
) -> None:
    async with ReplayBuffer(storage=reopen()) as buffer:
        sampler = SamplerWithReplayBuffer(data(0), buffer, shuffle=False)
        await draw(sampler, 2)
        sampler.set_prompts(data(1))
    async with ReplayBuffer(storage=reopen()) as buffer:
        with pytest.raises(ChangedDataset, match="length was 3, is 4") as refused:
            await Sampler(data(1), shuffle=False).with_buffer(buffer).draw(1, "math", ())
        assert refused.value.generation == 0
        assert "generation" not in str(refused.value)
        assert numbers(await draw_new(Sampler(data(0), shuffle=False).with_buffer(buffer), 2)) == [2, 0]


async def test_the_same_data_set_may_begin_again() -> None:
    sampler = SamplerWithReplayBuffer(data(2), ReplayBuffer(), shuffle=False)
    await draw(sampler, 2)
    sampler.set_prompts(data(2))
    assert numbers(await draw(sampler, 2)) == [200, 201]


async def test_a_resume_of_an_earlier_generation_needs_its_data_set(tmp_path: Path) -> None:
    buffer = ReplayBuffer()
    sampler = SamplerWithReplayBuffer(data(0), buffer, shuffle=False)
    await complete(buffer, await draw(sampler, 2))
    await buffer.save(tmp_path)
    sampler.set_prompts(data(1))
    await complete(buffer, await draw(sampler, 2))
    resumed = ReplayBuffer()
    await resumed.resume(tmp_path)
    bound = sampler._prompts.with_buffer(resumed)
    with pytest.raises(ChangedDataset):
        await bound.draw(1, "math")
    bound.set_prompts(data(0))
    drawn = await draw(bound, 2)
    assert (numbers(drawn), ids(drawn)) == ([2, 0], [2, 3])


async def test_the_right_data_set_may_be_given_after_a_refusal() -> None:
    buffer = ReplayBuffer()
    sampler = SamplerWithReplayBuffer(data(0), buffer, shuffle=False)
    await draw(sampler, 2)
    sampler.set_prompts(data(1))
    await draw(sampler, 2)
    other = Sampler(data(2), shuffle=False).with_buffer(buffer)
    with pytest.raises(ChangedDataset):
        await other.draw(1, "math", ())
    other.set_prompts(data(1))
    assert numbers(await draw_new(other, 2)) == [102, 103]


@pytest.mark.parametrize("kind", [data, lambda which: ByPosition(SIZES[which], BASES[which])])
async def test_producers_that_get_the_same_prompts_join_one_generation(kind: Callable[[int], Any]) -> None:
    storage = Suspending()
    samplers = [SamplerWithReplayBuffer(kind(0), ReplayBuffer(storage=storage), shuffle=False) for _ in range(3)]
    await samplers[2].compare_data("math", 0, None)
    drawn: Groups = []
    for which in (0, 2, 1):
        if which:
            for sampler in samplers:
                sampler.set_prompts(kind(which))
        # The last producer draws from no generation but the last: it follows the others.
        for groups in await asyncio.gather(*(draw_new(sampler, 4) for sampler in samplers[: 3 if which == 1 else 2])):
            drawn += groups
    drawn.sort(key=lambda group: group[0].group_id or 0)
    assert ids(drawn) == list(range(28))
    expected = [0, 1, 2] * 2 + [0, 1] + [200, 201, 202, 203, 204, 205, 206, 200] + [100, 101, 102, 103] * 3
    assert numbers(drawn) == expected
    _, state = await stored(samplers[0].replay_buffer)
    assert state is not None
    assert (state.generation, state.begun_at) == (2, 16)


async def test_one_task_of_a_sampler_may_get_other_prompts() -> None:
    sampler = Sampler(data(0), shuffle=False)
    bound = sampler.with_buffer(ReplayBuffer())
    for name in ("math", "code"):
        await draw(bound, 1, name)
    sampler.set_prompts(data(1), task_name="math")
    assert numbers(await draw(bound, 2, "math")) == [100, 101]
    assert numbers(await draw(bound, 2, "code")) == [1, 2]
    sampler.set_prompts(data(2))
    assert numbers(await draw(bound, 1, "math") + await draw(bound, 1, "code")) == [200, 200]
    with pytest.raises(InvalidInput, match="task_name is"):
        sampler.set_prompts(data(0), task_name="")


async def test_a_plain_sampler_keeps_the_generation_of_each_task_in_its_state() -> None:
    sampler = Sampler(data(0), shuffle=False)
    for name in ("math", "code"):
        await sampler.sample(name)
    sampler.set_prompts(data(1), task_name="math")
    await sampler.sample("math")
    again = Sampler(data(0), shuffle=False)
    again.set_prompts(data(1), task_name="math")
    again.load_state_dict(sampler.state_dict())
    assert numbers([await again.sample("math"), await again.sample("code")]) == [101, 1]


async def test_allow_changed_data_opens_the_generation_on_top_of_unknown_data() -> None:
    buffer = ReplayBuffer()
    await draw(SamplerWithReplayBuffer(data(0), buffer), 2)
    sampler = SamplerWithReplayBuffer(data(1), ReplayBuffer(), allow_changed_data=True, shuffle=False)
    await draw(sampler, 1)
    sampler.set_prompts(data(2))
    assert numbers(await draw_new(sampler._prompts.with_buffer(buffer), 2)) == [200, 201]


async def test_a_position_of_a_forebay_without_states_begins_a_generation() -> None:
    buffer = ReplayBuffer()
    sampler = Sampler(data(1), shuffle=False).with_buffer(buffer)
    await internals(buffer).issue([[RolloutState(message=[{"role": "user", "content": "a"}])]], "math", cursor=0)
    await sampler.compare_data("math", 1, None)
    sampler.set_prompts(data(2))
    assert numbers(await draw_new(sampler, 1)) == [200]


def test_states_of_earlier_versions_are_of_generation_0() -> None:
    class Earlier(msgspec.Struct):
        fingerprint: Fingerprint
        loader: bytes | None = None

    old = msgspec.msgpack.encode(Earlier(Fingerprint(kind="map-style", length=3), b"x"))
    state = unpack_state(old)
    assert (state.generation, state.begun_at, state.loader) == (0, 0, b"x")
    assert unpack_state(pack_state(state)) == state


async def test_an_evaluation_uses_the_current_prompts() -> None:
    async def answer(state: RolloutState) -> None:
        state.response_ids = [1]

    sampler = Sampler(data(0))
    for which in (0, 1):
        sampler.set_prompts(data(which))
        await draw(sampler.with_buffer(ReplayBuffer()), 1)
        result = await evaluate(FunctionAgentLoop(answer), sampler, model_step=0, progress=NoProgress())
        assert numbers(result.groups) == [record["number"] for record in data(which)]


# --- epochs -------------------------------------------------------------------------------------------

FINITE: list[Callable[[int], Any]] = [MapStyle, Loader, StatefulLoader, EpochLoader, ByPosition, ByState]


@given(
    kind=st.sampled_from(FINITE),
    size=st.integers(1, 5),
    epochs=st.integers(1, 3),
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_epochs_end_exactly_also_after_restarts(
    kind: Callable[[int], Any], size: int, epochs: int, chunks: list[int]
) -> None:
    async def main() -> None:
        storage, total = MemoryStorage(), size * epochs
        expected = await uninterrupted(kind, size, total)
        drawn: Groups = []
        while len(drawn) < total:
            for chunk in chunks:  # each with a sampler of its own, as after a restart
                sampler = SamplerWithReplayBuffer(kind(size), ReplayBuffer(storage=storage), epochs=epochs)
                assert await sampler.exhausted("math") == (len(drawn) == total)
                drawn += await sampler.try_draw(chunk, "math", ())
        assert numbers(drawn) == expected
        assert await sampler.try_draw(3, "math") == []
        assert await sampler.exhausted("math")
        with pytest.raises(EndOfData, match=f"task 'math' .*{total} records .* {epochs} epoch"):
            await sampler.draw(1, "math")
        more = SamplerWithReplayBuffer(kind(size), sampler.replay_buffer, epochs=epochs + 1)
        assert not await more.exhausted("math")
        assert len(await draw_new(more, size)) == size
        assert await more.exhausted("math")

    running(main())


@pytest.mark.parametrize("kind", FINITE)
async def test_a_plain_sampler_ends_with_its_epochs(kind: Callable[[int], Any]) -> None:
    sampler = Sampler(kind(3), epochs=2)
    drawn = [await sampler.sample("math") for _ in range(6)]
    assert numbers(drawn) == await uninterrupted(kind, 3, 6)
    for _ in range(2):
        with pytest.raises(EndOfData, match="6 records were drawn, which is all of 2 epochs"):
            await sampler.sample("math")
    assert issubclass(EndOfData, ForebayError)


async def test_retries_are_drawn_after_the_end_and_do_not_count() -> None:
    buffer = ReplayBuffer()
    sampler = SamplerWithReplayBuffer(data(0), buffer, epochs=1)
    drawn = await draw(sampler, 3)
    drawn[1][0].status = Status.ABORTED
    await buffer.put(drawn[1], "math")
    assert await sampler.exhausted("math")
    assert ids(await sampler.try_draw(5, "math")) == [1]
    with pytest.raises(EndOfData):
        await sampler.draw(1, "math")


async def test_a_draw_at_the_end_raises_instead_of_waiting_for_capacity() -> None:
    buffer = ReplayBuffer(max_groups=3)
    sampler = SamplerWithReplayBuffer(data(0), buffer, epochs=1)
    await draw(sampler, 3)
    with pytest.raises(EndOfData):
        await sampler.draw(1, "math")


async def test_several_producers_end_together() -> None:
    storage = Suspending()
    samplers = [SamplerWithReplayBuffer(data(2), ReplayBuffer(storage=storage), epochs=2) for _ in range(3)]

    async def produce(sampler: SamplerWithReplayBuffer) -> Groups:
        drawn: Groups = []
        while True:
            try:
                drawn += await sampler.draw(3, "math", ())
            except EndOfData:
                return drawn

    drawn = [group for groups in await asyncio.gather(*map(produce, samplers)) for group in groups]
    assert sorted(ids(drawn), key=int) == list(range(14))  # type: ignore[arg-type]


async def test_epochs_count_from_the_begin_of_a_generation() -> None:
    sampler = SamplerWithReplayBuffer(data(0), ReplayBuffer(), epochs=2, shuffle=False)
    await draw(sampler, 4)
    sampler.set_prompts(data(1))
    assert not await sampler.exhausted("math")
    assert numbers(await sampler.try_draw(20, "math")) == [100, 101, 102, 103] * 2
    assert await sampler.exhausted("math")
    sampler.set_prompts(data(0))
    assert not await sampler.exhausted("math")
    assert len(await sampler.try_draw(20, "math")) == 6


async def test_without_epochs_nothing_is_read_to_know_that_there_is_no_end() -> None:
    class Closed(MemoryStorage):
        async def summary(self, *arguments: Any, **named: Any) -> Any:
            raise AssertionError("the store was read")

    assert not await SamplerWithReplayBuffer(data(0), ReplayBuffer(storage=Closed())).exhausted("math")


async def test_an_empty_loader_is_an_error_and_no_end() -> None:
    with pytest.raises(InvalidDataset, match="gave no record in a whole epoch"):
        await SamplerWithReplayBuffer(Loader(0), ReplayBuffer(), epochs=1).draw(1, "math")


@pytest.mark.parametrize("epochs", [0, -1, 1.5, "2"])
def test_there_is_at_least_one_epoch(epochs: Any) -> None:
    with pytest.raises(InvalidInput, match=r"epochs is .*; expected an integer of at least 1"):
        Sampler(data(0), epochs=epochs)


async def test_an_endless_source_has_no_epochs() -> None:
    with pytest.raises(InvalidConfig, match=r"epochs=2, but length\(\) of .*ByPosition returned None"):
        Sampler(ByPosition(None), epochs=2)
    sampler = Sampler(ByPosition(3), epochs=2)
    with pytest.raises(InvalidConfig, match="endless"):
        sampler.set_prompts(ByPosition(None))
    assert len(await draw(Sampler(ByPosition(None)).with_buffer(ReplayBuffer()), 30)) == 30
