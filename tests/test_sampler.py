"""Samplers: which prompt comes next, from where they go on, and that nothing that was drawn gets lost."""

from __future__ import annotations

import asyncio
import datetime
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import (
    BufferClosed,
    ChangedDataset,
    DamagedData,
    InvalidDataset,
    InvalidInput,
    InvalidRecord,
    MemoryStorage,
    ReplayBuffer,
    RolloutState,
    Status,
    StorageError,
    WaitTimeout,
)
from forebay.buffer.internal import internals
from forebay.core.rollout import DRAWABLE
from forebay.prompts import sampler as sampler_module
from forebay.prompts.sampler import Sampler, SamplerWithReplayBuffer
from forebay.prompts.sources import shuffled_index
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing import make_group
from tests.processes import HANG_S
from tests.support import closed_ledger, turns

Groups = list[list[RolloutState]]


def records(size: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", "number": number} for number in range(size)]


class MapStyle:
    """A data set that is no list, and therefore read in a thread."""

    def __init__(self, size: int) -> None:
        self._records = records(size)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._records[index]


class Loader:
    """A re-iterable without state."""

    def __init__(self, size: int) -> None:
        self._records = records(size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._records)


class StatefulLoader:
    """Like torchdata's: shuffles with generators of its own; after the state of an epoch's end comes an empty one."""

    def __init__(self, size: int) -> None:
        self._records = records(size)
        self._python, self._numpy = random.Random(1), np.random.default_rng(1)
        self._order = np.arange(size)
        self._position, self._resumed = 0, False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._resumed:
            self._numpy.shuffle(self._order)
            self._python.random()
            self._position = 0
        self._resumed = False
        while self._position < len(self._order):
            self._position += 1
            yield self._records[self._order[self._position - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {
            "python": self._python.getstate(),
            "numpy": self._numpy.bit_generator.state,
            "order": self._order,
            "position": self._position,
            "workers": {0: None},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._python.setstate(state["python"])
        self._numpy.bit_generator.state = state["numpy"]
        self._order, self._position = state["order"], state["position"]
        assert state["workers"] == {0: None}
        self._resumed = True


class EpochLoader(StatefulLoader):
    """Shuffles by the epoch that it is told."""

    _epoch = 0

    def __len__(self) -> int:
        return len(self._records)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._resumed:
            self._order = np.random.default_rng(self._epoch).permutation(len(self._records))
            self._position = 0
        self._resumed = False
        while self._position < len(self._order):
            self._position += 1
            yield self._records[self._order[self._position - 1]]


class SeededLoader(Loader):
    """Without state, and shuffled by a generator that goes on from epoch to epoch: torch's DataLoader."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._generator = random.Random(size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self._generator.sample(self._records, len(self._records))
        self._generator.random()


class BatchLoader(Loader):
    """Batches of one, not collated."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[record] for record in self._records])


SOURCES: list[Callable[[int], Any]] = [records, MapStyle, Loader, StatefulLoader, EpochLoader, BatchLoader]
LOADERS = SOURCES[2:]


def numbers(groups: Sequence[Sequence[RolloutState]]) -> list[int]:
    return [group[0].extra_fields["number"] for group in groups]


def ids(groups: Sequence[Sequence[RolloutState]]) -> list[int | None]:
    return [group[0].group_id for group in groups]


def expected_order(size: int, n: int, seed: int = 0) -> list[int]:
    return [shuffled_index(seed, number // size, number % size, size) for number in range(n)]


async def draw(sampler: SamplerWithReplayBuffer, n: int, task_name: str = "math") -> Groups:
    """Exactly n groups, in flight."""
    drawn: Groups = []
    while len(drawn) < n:
        drawn += await sampler.draw(n - len(drawn), task_name, timeout_s=0)
    return drawn


async def uninterrupted(kind: Callable[[int], Any], size: int, n: int) -> list[int]:
    return numbers(await draw(SamplerWithReplayBuffer(kind(size), ReplayBuffer()), n))


@asynccontextmanager
async def resumed(buffer: ReplayBuffer, path: Path) -> AsyncIterator[ReplayBuffer]:
    """What a new process has after a crash: the buffer of a checkpoint."""
    await buffer.save(path)
    async with ReplayBuffer(storage=MemoryStorage()) as fresh:
        await fresh.resume(path)
        yield fresh


async def complete(buffer: ReplayBuffer, groups: Groups, task_name: str = "math") -> None:
    for group in groups:
        for state in group:
            state.status, state.response_ids, state.version_spans = Status.COMPLETED, [1], ()
        await buffer.put(group, task_name)


def running(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


# --- what is drawn ------------------------------------------------------------------------------------


@given(size=st.integers(1, 8), k=st.integers(1, 5), n=st.integers(1, 30), chunk=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_ids_count_on_over_epochs_and_every_epoch_has_every_record_once(size: int, k: int, n: int, chunk: int) -> None:
    async def main() -> None:
        sampler = SamplerWithReplayBuffer(records(size), ReplayBuffer(), group_size=k, seed=3)
        drawn: Groups = []
        while len(drawn) < n:
            drawn += await sampler.draw(min(chunk, n - len(drawn)), "math")
        assert ids(drawn) == list(range(n))
        assert numbers(drawn) == expected_order(size, n, seed=3)
        for group in drawn:
            group_id = group[0].group_id
            assert group_id is not None
            assert [state.rollout_id for state in group] == [group_id * k + j for j in range(k)]
            assert {(state.task_name, state.group_id, state.status) for state in group} == {
                ("math", group_id, Status.INIT)
            }
        for epoch in range(n // size):
            assert sorted(numbers(drawn[epoch * size : (epoch + 1) * size])) == list(range(size))
        assert await closed_ledger(sampler.replay_buffer) == {"issued": n, "in_flight": n}

    running(main())


async def test_a_new_epoch_has_a_new_order() -> None:
    drawn = numbers(await draw(SamplerWithReplayBuffer(records(20), ReplayBuffer()), 60))
    assert len({tuple(drawn[start : start + 20]) for start in (0, 20, 40)}) == 3


async def test_without_shuffling_the_order_is_the_data_sets_own() -> None:
    sampler = SamplerWithReplayBuffer(records(3), ReplayBuffer(), shuffle=False)
    assert numbers(await draw(sampler, 7)) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("kind", SOURCES)
async def test_both_samplers_draw_the_same(kind: Callable[[int], Any]) -> None:
    plain = Sampler(kind(5), group_size=2)
    one = [await plain.sample("math") for _ in range(12)]
    two = await draw(SamplerWithReplayBuffer(kind(5), ReplayBuffer(), group_size=2), 12)
    for group in two:
        for state in group:
            state.attempt = None
    assert one == two
    assert [state.rollout_id for group in one for state in group] == list(range(24))


async def test_tasks_have_positions_of_their_own() -> None:
    sampler = SamplerWithReplayBuffer(records(5), ReplayBuffer())
    await draw(sampler, 3, "math")
    assert numbers(await draw(sampler, 5, "code")) == expected_order(5, 5)
    assert numbers(await draw(sampler, 2, "math")) == expected_order(5, 5)[3:]
    plain = Sampler(records(5))
    for task_name in ("math", "code"):
        assert numbers([await plain.sample(task_name) for _ in range(5)]) == expected_order(5, 5)


async def test_a_sampler_given_a_buffer_draws_through_it() -> None:
    buffer = ReplayBuffer()
    sampler = Sampler(records(5), group_size=2).with_buffer(buffer)
    assert numbers([await sampler.sample("math") for _ in range(5)]) == expected_order(5, 5)
    assert len(sampler) == 5
    assert await closed_ledger(buffer) == {"issued": 5, "in_flight": 5}


async def test_records_are_mapped_and_tokenized() -> None:
    sampler = SamplerWithReplayBuffer(
        [("hello", 4)],
        ReplayBuffer(),
        to_rollout_state=lambda record: {"prompt": record[0], "answer": record[1]},
        tokenize=lambda state: [len(state.message[0]["content"])],
    )
    ((state,),) = await sampler.draw(1, "math")
    assert (state.prompt_ids, state.tokens, state.extra_fields) == ([5], [5], {"answer": 4})


@pytest.mark.parametrize("n", [0, -1, 1.5, None])
async def test_drawing_no_group_is_an_error(n: Any) -> None:
    with pytest.raises(InvalidInput, match="n is"):
        await SamplerWithReplayBuffer(records(2), ReplayBuffer()).draw(n, "math")


@pytest.mark.parametrize("k", [0, -1, 1.5])
def test_a_group_has_at_least_one_member(k: Any) -> None:
    with pytest.raises(InvalidInput, match="group_size is"):
        Sampler(records(2), group_size=k)


# --- nothing before the first sample ------------------------------------------------------------------


class Untouchable:
    def __len__(self) -> int:
        raise AssertionError("its length was asked for")

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was iterated")

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("its state was asked for")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("its state was set")


class UntouchableMap(Untouchable):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("it was indexed")


@pytest.mark.parametrize("kind", [Untouchable, UntouchableMap])
async def test_nothing_is_touched_before_the_first_sample(kind: type[Untouchable]) -> None:
    sampler = Sampler(kind())
    assert sampler.state_dict() == {"cursors": {}, "source": None}
    sampler.load_state_dict({"cursors": {"math": 5}, "source": b"of a loader"})
    assert sampler.state_dict() == {"cursors": {"math": 5}, "source": b"of a loader"}
    async with ReplayBuffer() as buffer:
        sampler.with_buffer(buffer)
        SamplerWithReplayBuffer(kind(), buffer)
        SamplerWithReplayBuffer("/nowhere/at/all.jsonl", buffer)


async def test_retries_do_not_touch_the_data_set() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(status=Status.ABORTED), "math")
    assert len(await SamplerWithReplayBuffer(UntouchableMap(), buffer).draw(1, "math")) == 1


# --- going on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*SOURCES, SeededLoader])
@pytest.mark.parametrize("cut", range(13))  # three epochs and one record
async def test_a_resumed_run_draws_what_an_uninterrupted_one_draws(
    kind: Callable[[int], Any], cut: int, tmp_path: Path
) -> None:
    expected = await uninterrupted(kind, 4, 18)
    buffer = ReplayBuffer()
    drawn = await draw(SamplerWithReplayBuffer(kind(4), buffer, group_size=2), cut)
    await complete(buffer, drawn[::2])
    async with resumed(buffer, tmp_path) as fresh:
        sampler = SamplerWithReplayBuffer(kind(4), fresh, group_size=2)
        again = await sampler.draw_again(20, "math")
        assert ids(again) == ids(drawn[1::2])  # what was in flight is not skipped
        assert numbers(again) == numbers(drawn[1::2])
        rest = await draw(sampler, 18 - cut)
        assert numbers(drawn) + numbers(rest) == expected
        assert ids(rest) == list(range(cut, 18))


@given(size=st.integers(1, 6), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=3), seed=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_any_number_of_resumes_repeats_and_skips_nothing(
    tmp_path_factory: pytest.TempPathFactory, size: int, cuts: list[int], seed: int
) -> None:
    async def main() -> None:
        path = tmp_path_factory.mktemp("resumes")
        buffer, seen = ReplayBuffer(), []
        for cut in cuts:
            drawn = await draw(SamplerWithReplayBuffer(records(size), buffer, seed=seed), cut)
            seen += numbers(drawn)
            await complete(buffer, drawn)
            async with resumed(buffer, path):
                pass
            buffer = ReplayBuffer()
            await buffer.resume(path)
        seen += numbers(await draw(SamplerWithReplayBuffer(records(size), buffer, seed=seed), size))
        assert seen == expected_order(size, sum(cuts) + size, seed)

    running(main())


@pytest.mark.parametrize("kind", [*SOURCES, SeededLoader])
@pytest.mark.parametrize("cut", range(13))
async def test_a_plain_sampler_goes_on_from_its_state(kind: Callable[[int], Any], cut: int) -> None:
    expected = await uninterrupted(kind, 4, 18)
    sampler = Sampler(kind(4))
    drawn = [await sampler.sample("math") for _ in range(cut)]
    again = Sampler(kind(4))
    again.load_state_dict(sampler.state_dict())
    drawn += [await again.sample("math") for _ in range(18 - cut)]
    assert numbers(drawn) == expected
    assert ids(drawn) == list(range(18))


@pytest.mark.parametrize("state", [None, {}, {"cursors": 5}, {"cursors": {"math": -1}}, {"cursors": {}, "source": "x"}])
def test_what_is_no_state_of_a_sampler_is_refused(state: Any) -> None:
    with pytest.raises(InvalidInput):
        Sampler(records(2)).load_state_dict(state)


async def test_a_damaged_state_of_a_loader_is_refused_when_it_is_needed() -> None:
    sampler = Sampler(Loader(3))
    sampler.load_state_dict({"cursors": {"math": 5}, "source": b"no state of ours"})
    with pytest.raises(DamagedData):
        await sampler.sample("math")


async def test_a_loader_cannot_go_on_from_a_map_style_position() -> None:
    buffer = ReplayBuffer()
    await draw(SamplerWithReplayBuffer(records(3), buffer), 2)
    with pytest.raises(ChangedDataset, match="kind was map-style, is iterable"):
        await SamplerWithReplayBuffer(Loader(3), buffer).draw(1, "math")
    with pytest.raises(InvalidDataset, match="came from a map-style data set"):
        await SamplerWithReplayBuffer(Loader(3), buffer, allow_changed_data=True).draw(1, "math")


async def test_a_loader_of_a_plain_sampler_serves_one_task() -> None:
    sampler = Sampler(Loader(3))
    await sampler.sample("math")
    with pytest.raises(InvalidInput, match="serves task 'math', and cannot also serve 'code'"):
        await sampler.sample("code")
    assert numbers([await sampler.sample("math")]) == [1]


@pytest.mark.parametrize("kind", LOADERS)
async def test_tasks_that_take_turns_at_one_loader_get_the_records_of_their_own_place(
    kind: Callable[[int], Any],
) -> None:
    expected = await uninterrupted(kind, 4, 8)
    sampler = SamplerWithReplayBuffer(kind(4), ReplayBuffer())
    seen: dict[str, list[int]] = {"math": [], "code": []}
    for task_name in ("math", "code", "code", "math", "math", "math", "code", "math", "code", "math"):
        seen[task_name] += numbers(await draw(sampler, 1, task_name))
    assert seen == {"math": expected[:6], "code": expected[:4]}


async def test_a_loader_with_a_state_is_not_started_again_for_a_second_buffer() -> None:
    sampler = Sampler(StatefulLoader(4))
    await draw(sampler.with_buffer(ReplayBuffer()), 3)
    with pytest.raises(InvalidDataset, match="cannot return to its start for another task or buffer"):
        await sampler.with_buffer(ReplayBuffer()).draw(1, "math")


async def test_a_buffer_that_was_wound_back_is_followed(tmp_path: Path) -> None:
    expected = await uninterrupted(StatefulLoader, 4, 9)
    sampler = Sampler(StatefulLoader(4))
    buffer = ReplayBuffer()
    bound = sampler.with_buffer(buffer)
    await complete(buffer, await draw(bound, 2))
    await buffer.save(tmp_path)
    await draw(bound, 5)
    fresh = ReplayBuffer()
    await fresh.resume(tmp_path)
    assert numbers(await draw(sampler.with_buffer(fresh), 7)) == expected[2:]


# --- several producers --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [records, MapStyle])
@pytest.mark.parametrize("shared", ["sampler", "buffer", "storage"])
async def test_producers_of_one_map_style_data_set_draw_no_record_twice_and_skip_none(
    kind: Callable[[int], Any], shared: str
) -> None:
    storage = Suspending()
    buffers = [ReplayBuffer(storage=storage) for _ in range(1 if shared == "buffer" else 2)] * 2
    samplers = [SamplerWithReplayBuffer(kind(10), buffer) for buffer in buffers[:2]]
    if shared == "sampler":
        samplers = samplers[:1] * 2
    chance = random.Random(4)

    async def produce(sampler: SamplerWithReplayBuffer) -> Groups:
        drawn: Groups = []
        for _ in range(8):
            drawn += await sampler.draw(chance.randint(1, 5), "math")
        return drawn

    drawn = [group for groups in await asyncio.gather(*map(produce, samplers)) for group in groups]
    drawn.sort(key=lambda group: group[0].group_id or 0)
    assert ids(drawn) == list(range(len(drawn)))
    assert numbers(drawn) == expected_order(10, len(drawn))
    assert await closed_ledger(buffers[0]) == {"issued": len(drawn), "in_flight": len(drawn)}


async def test_samples_of_a_plain_sampler_at_the_same_time_are_different_ones() -> None:
    for kind in SOURCES:
        sampler = Sampler(kind(5))
        drawn = await asyncio.gather(*(sampler.sample("math") for _ in range(12)))
        assert numbers(drawn) == await uninterrupted(kind, 5, 12)


class Meeting(StatefulLoader):
    """Gives its first record when another loader is asked for its own, too."""

    def __init__(self, size: int, barrier: threading.Barrier) -> None:
        super().__init__(size)
        self._barrier = barrier

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for record in super().__iter__():
            if self._position == 1:
                self._barrier.wait(timeout=HANG_S)
            yield record


async def test_a_loader_with_two_producers_at_once_is_refused_and_nothing_is_lost() -> None:
    expected = await uninterrupted(StatefulLoader, 6, 10)
    storage, barrier = MemoryStorage(), threading.Barrier(2)
    buffers = [ReplayBuffer(storage=storage) for _ in range(2)]
    samplers = [SamplerWithReplayBuffer(Meeting(6, barrier), buffer) for buffer in buffers]
    outcomes = await asyncio.gather(*(sampler.draw(1, "math") for sampler in samplers), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert [type(error) for error in refused] == [InvalidDataset]
    assert "an iterable loader, which has one producer per task" in str(refused[0])
    drawn = [group for outcome in outcomes if isinstance(outcome, list) for group in outcome]
    assert await closed_ledger(buffers[0]) == {"issued": 1, "in_flight": 1}
    barrier.abort()
    one = samplers[0] if isinstance(outcomes[0], list) else samplers[1]
    assert numbers(drawn + await draw(one, 5)) == expected[:6]


@pytest.mark.parametrize("kind", LOADERS)
async def test_producers_that_take_turns_at_loaders_of_their_own_go_on_exactly(kind: Callable[[int], Any]) -> None:
    expected = await uninterrupted(kind, 4, 10)
    storage = MemoryStorage()
    samplers = [SamplerWithReplayBuffer(kind(4), ReplayBuffer(storage=storage)) for _ in range(2)]
    seen: list[int] = []
    for number in (0, 1, 1, 0, 0, 1, 0, 1, 1, 0):
        seen += numbers(await draw(samplers[number], 1))
    assert seen == expected


def test_a_sampler_outlives_its_event_loop() -> None:
    sampler = Sampler(MapStyle(5))
    bound = sampler.with_buffer(ReplayBuffer())

    async def contend() -> None:
        await asyncio.gather(*(sampler.sample("math") for _ in range(3)), *(bound.draw(1, "math") for _ in range(3)))

    for _ in range(3):
        asyncio.run(contend())
    assert sampler.state_dict()["cursors"] == {"math": 9}


# --- retries first ------------------------------------------------------------------------------------


async def test_retries_come_first_by_status_then_by_group_id_with_their_ids_and_tokens() -> None:
    buffer = ReplayBuffer()
    sampler = SamplerWithReplayBuffer(records(20), buffer, group_size=2, tokenize=lambda state: [1, 2])
    drawn = await draw(sampler, 9)
    statuses = [Status.ABORTED, Status.EXPIRED, Status.INIT] * 3
    for group, status in reversed(list(zip(drawn, statuses, strict=True))):  # not in order of their ids
        for state in group:
            state.status = status
            if status is Status.ABORTED:
                state.response_ids, state.tokens = [7, 8], [1, 2, 7, 8]
        await buffer.put(group, "math", model_step=3 if status is Status.ABORTED else None)
    again = await sampler.draw(11, "math")
    assert ids(again) == [2, 5, 8, 1, 4, 7, 0, 3, 6, 9, 10]
    assert numbers(again[:9]) == [numbers(drawn)[number or 0] for number in ids(again)[:9]]
    for group in again:
        group_id = group[0].group_id
        assert group_id is not None
        assert [state.rollout_id for state in group] == [2 * group_id, 2 * group_id + 1]
    for group in again[6:9]:
        assert [(state.response_ids, state.tokens) for state in group] == [([7, 8], [1, 2, 7, 8])] * 2
        assert [state.response_model_steps for state in group] == [[3, 3]] * 2
    assert {state.attempt for group in again[:9] for state in group} == {2}
    await complete(buffer, again)
    assert await closed_ledger(buffer) == {"issued": 11, "buffered": 11}


async def test_only_the_statuses_that_were_asked_for_are_drawn_again() -> None:
    buffer = ReplayBuffer()
    sampler = SamplerWithReplayBuffer(records(20), buffer)
    for group, status in zip(await draw(sampler, 3), DRAWABLE, strict=True):
        group[0].status = status
        await buffer.put(group, "math")
    assert ids(await sampler.draw(2, "math", (Status.ABORTED,))) == [2, 3]
    assert ids(await sampler.draw(1, "math", ())) == [4]
    assert ids(await sampler.draw_again(5, "math", (Status.EXPIRED,))) == [1]
    assert ids(await sampler.draw_again(5, "math")) == [0]
    assert await sampler.draw_again(5, "math") == []
    with pytest.raises(InvalidInput, match="cannot be drawn again"):
        await sampler.draw(1, "math", (Status.COMPLETED,))


# --- who owns what was drawn --------------------------------------------------------------------------


def spoil(state: RolloutState) -> None:
    """What careless loops do."""
    state.message[0]["content"] = "changed"
    state.message.append({"role": "assistant", "content": "changed"})
    state.extra_fields["deep"]["list"].append("changed")
    state.extra_fields["new"] = "changed"
    for tokens in (state.prompt_ids, state.tokens):
        assert isinstance(tokens, list)
        tokens.append(99)
    assert state.tools is not None
    assert state.reward_model is not None
    assert isinstance(state.data_source, dict)
    state.tools.append({"name": "changed"})
    state.tools[0]["name"] = "changed"
    state.reward_model["style"] = "changed"
    state.data_source["name"] = "changed"


async def test_changing_a_member_changes_neither_its_siblings_nor_what_the_buffer_holds() -> None:
    record = {
        "prompt": "question",
        "prompt_ids": [1, 2],
        "tools": [{"name": "search"}],
        "reward_model": {"style": "rule"},
        "data_source": {"name": "gsm8k"},
        "deep": {"list": [1]},
    }
    dataset = [record]
    untouched = repr(dataset)
    buffer = ReplayBuffer()
    sampler = SamplerWithReplayBuffer(dataset, buffer, group_size=3)
    for first in (True, False):  # drawn from the data set, then drawn again
        (group,) = await sampler.draw(1, "math")
        sibling = repr(group[1])
        (held,) = await buffer.query({"place": "in_flight"})
        kept = repr(await buffer.read(held.uid))
        spoil(group[0])
        assert repr(group[1]) == sibling
        assert repr(await buffer.read(held.uid)) == kept
        assert repr(dataset) == untouched
        if first:
            await buffer.storage.release(buffer.owner)
    again = await buffer.read(held.uid)
    assert again is not None
    assert [(state.message, state.tools, state.extra_fields) for state in again] == [
        ([{"role": "user", "content": "question"}], [{"name": "search"}], {"deep": {"list": [1]}})
    ] * 3


async def test_a_plain_samplers_members_are_independent_too() -> None:
    record = {
        "prompt": "question",
        "prompt_ids": [1],
        "tools": [{"name": "search"}],
        "reward_model": {},
        "data_source": {},
        "deep": {"list": [1]},
    }
    sampler = Sampler([record], group_size=2)
    group = await sampler.sample("math")
    sibling = repr(group[1])
    spoil(group[0])
    assert repr(group[1]) == sibling
    assert (await sampler.sample("math"))[0].message == [{"role": "user", "content": "question"}]


async def test_the_prompt_of_a_group_is_stored_once() -> None:
    text = "x" * 10_000
    sizes = []
    for k in (1, 8):
        buffer = ReplayBuffer()
        await SamplerWithReplayBuffer([{"prompt": text}], buffer, group_size=k).draw(1, "math")
        sizes.append((await buffer.query({}))[0].bytes)
    assert sizes[1] < sizes[0] + 1_000


# --- room ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SOURCES)
async def test_a_draw_returns_as_many_as_fit(kind: Callable[[int], Any]) -> None:
    expected = await uninterrupted(kind, 10, 6)
    buffer = ReplayBuffer(max_groups=3)
    sampler = SamplerWithReplayBuffer(kind(10), buffer)
    drawn = await sampler.draw(5, "math")
    assert len(drawn) == 3
    for _ in range(2):
        with pytest.raises(WaitTimeout, match="capacity to draw 2 groups of task 'math'"):
            await sampler.draw(2, "math", timeout_s=0)
    assert await closed_ledger(buffer) == {"issued": 3, "in_flight": 3}
    await complete(buffer, drawn[:2])
    await buffer.get(2, "math", Status.COMPLETED)
    drawn += await sampler.draw(5, "math", timeout_s=0)
    assert numbers(drawn) == expected[:5]
    assert await closed_ledger(buffer) == {"issued": 5, "in_flight": 3, "trained": 2}


@pytest.mark.parametrize("kind", SOURCES)
async def test_a_draw_waits_for_room_for_one(kind: Callable[[int], Any]) -> None:
    expected = await uninterrupted(kind, 10, 3)
    buffer = ReplayBuffer(max_groups=2)
    sampler = SamplerWithReplayBuffer(kind(10), buffer)
    drawn = await sampler.draw(5, "math")
    waiting = asyncio.ensure_future(sampler.draw(5, "math"))
    await turns(20)
    assert not waiting.done()
    assert "capacity to draw 5 groups" in await buffer.explain_wait()
    await complete(buffer, drawn[:1])
    await turns(20)
    assert not waiting.done()
    await buffer.get(1, "math", Status.COMPLETED)
    drawn += await asyncio.wait_for(waiting, HANG_S)
    assert numbers(drawn) == expected


@pytest.mark.parametrize("kind", SOURCES)
async def test_room_in_bytes_counts_too(kind: Callable[[int], Any]) -> None:
    expected = await uninterrupted(kind, 10, 4)
    probe = ReplayBuffer()
    await SamplerWithReplayBuffer(kind(10), probe).draw(1, "math")
    size = (await probe.query({}))[0].bytes
    buffer = ReplayBuffer(max_bytes=int(2.5 * size), expect_group_bytes=1)
    sampler = SamplerWithReplayBuffer(kind(10), buffer)
    drawn = await sampler.draw(5, "math")
    assert len(drawn) == 2
    with pytest.raises(WaitTimeout, match="capacity to draw 1 groups"):
        await sampler.draw(1, "math", timeout_s=0)
    waiting = asyncio.ensure_future(sampler.draw(5, "math"))
    await turns(20)
    assert await closed_ledger(buffer) == {"issued": 2, "in_flight": 2}
    drawn[0][0].status = Status.FILTERED
    await buffer.put(drawn[0], "math")
    drawn += await asyncio.wait_for(waiting, HANG_S)
    assert numbers(drawn) == expected[:3]


@pytest.mark.parametrize("kind", SOURCES)
async def test_a_group_that_can_never_fit_is_an_error_every_time(kind: Callable[[int], Any]) -> None:
    buffer = ReplayBuffer(max_bytes=5)
    sampler = SamplerWithReplayBuffer(kind(3), buffer)
    for _ in range(2):
        with pytest.raises(InvalidInput, match="can never fit"):
            await sampler.draw(2, "math")
    assert await closed_ledger(buffer) == {}


async def test_a_draw_that_waits_for_room_takes_a_retry_that_comes_back() -> None:
    """A buffer full of what has to be generated again has no room, and never will if nobody draws that."""
    buffer = ReplayBuffer(max_groups=1)
    sampler = SamplerWithReplayBuffer(records(10), buffer)
    drawn = await sampler.draw(1, "math")
    waiting = asyncio.ensure_future(sampler.draw(1, "math"))
    await turns(20)
    await internals(buffer).give_back(drawn, "math")
    assert ids(await asyncio.wait_for(waiting, HANG_S)) == [0]


async def test_a_draw_that_waits_for_room_holds_up_no_other() -> None:
    buffer = ReplayBuffer(max_groups=2)
    sampler = SamplerWithReplayBuffer(records(10), buffer)
    drawn = await sampler.draw(2, "math")
    waiting = asyncio.ensure_future(sampler.draw(1, "math", ()))
    await turns(20)
    with pytest.raises(WaitTimeout):
        await asyncio.wait_for(sampler.draw(1, "math", timeout_s=0), 10)
    await internals(buffer).give_back(drawn[:1], "math")
    assert ids(await asyncio.wait_for(sampler.draw(4, "math"), HANG_S)) == [0]
    waiting.cancel()
    await asyncio.wait((waiting,))


async def test_closing_the_buffer_ends_a_draw_that_waits() -> None:
    buffer = ReplayBuffer(max_groups=1)
    sampler = SamplerWithReplayBuffer(records(10), buffer)
    await sampler.draw(1, "math")
    waiting = asyncio.ensure_future(sampler.draw(1, "math"))
    await turns(20)
    await buffer.close()
    with pytest.raises(BufferClosed):
        await asyncio.wait_for(waiting, HANG_S)


async def test_a_prompt_that_waits_for_room_is_not_made_again_each_time() -> None:
    made = 0

    def tokenize(state: RolloutState) -> list[int]:
        nonlocal made
        made += 1
        return [made]

    buffer = ReplayBuffer(max_bytes=150)
    sampler = SamplerWithReplayBuffer(records(10), buffer, tokenize=tokenize)
    drawn = await sampler.draw(5, "math")
    assert len(drawn) < made == 5
    for _ in range(3):
        with pytest.raises(WaitTimeout):
            await sampler.draw(1, "math", timeout_s=0)
    assert made == 5


# --- bad records --------------------------------------------------------------------------------------

BAD: list[Any] = [{"question": "no message"}, "no dict", {"prompt": "a", "prompt_ids": [0.5]}, None]


def half_bad(size: int) -> list[Any]:
    """The odd ones make no prompt."""
    return [record if number % 2 == 0 else BAD[number // 2 % 4] for number, record in enumerate(records(size))]


class HalfBadLoader:
    def __init__(self, size: int | list[Any]) -> None:
        self._records = half_bad(size) if isinstance(size, int) else size

    def __iter__(self) -> Iterator[Any]:
        return iter(self._records)


@pytest.mark.parametrize("kind", [half_bad, HalfBadLoader])
async def test_a_bad_record_is_an_error_that_names_it_every_time(kind: Callable[[int], Any]) -> None:
    buffer = ReplayBuffer()
    sampler = SamplerWithReplayBuffer(kind(6), buffer, shuffle=False)
    await sampler.draw(1, "math")
    plain = Sampler(kind(6), shuffle=False)
    await plain.sample("math")
    for _ in range(2):
        with pytest.raises(InvalidRecord, match="record 1 of the data set makes no prompt: it has no message") as error:
            await sampler.draw(1, "math")
        assert error.value.index == 1
        with pytest.raises(InvalidRecord, match="record 1 of the data set"):
            await plain.sample("math")
    assert await closed_ledger(buffer) == {"issued": 1, "in_flight": 1}


@pytest.mark.parametrize("kind", [half_bad, HalfBadLoader])
@pytest.mark.parametrize("cut", range(1, 8))
async def test_bad_records_are_skipped_if_asked_and_counted_with_their_reasons(
    kind: Callable[[int], Any], cut: int, tmp_path: Path
) -> None:
    buffer = ReplayBuffer()
    sampler = SamplerWithReplayBuffer(kind(6), buffer, group_size=2, shuffle=False, skip_bad_records=True)
    drawn = await draw(sampler, cut)
    assert numbers(drawn) == [0, 2, 4, 0, 2, 4, 0][:cut]
    assert ids(drawn) == [0, 2, 4, 6, 8, 10, 12][:cut]
    ledger = await closed_ledger(buffer)
    failed = ledger.get("failed", 0)
    assert ledger["issued"] == cut + failed
    assert cut - 1 <= failed <= cut
    reasons = (await buffer.reasons()).get("math", {})
    assert sum(reasons.values()) == failed
    assert all(reason.startswith("bad record: record ") for reason in reasons)
    await complete(buffer, drawn)
    async with resumed(buffer, tmp_path) as fresh:
        again = SamplerWithReplayBuffer(kind(6), fresh, group_size=2, shuffle=False, skip_bad_records=True)
        rest = await draw(again, 4)
        assert ids(rest) == [2 * cut, 2 * cut + 2, 2 * cut + 4, 2 * cut + 6]
        assert numbers(rest) == [(number or 0) % 6 for number in ids(rest)]
    plain = Sampler(kind(6), shuffle=False, skip_bad_records=True)
    assert ids([await plain.sample("math") for _ in range(cut)]) == ids(drawn)


async def test_garbage_in_a_file_is_skipped_if_asked(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a"}\n{garbage\n[1]\n{"prompt": "b"}\n')
    sampler = SamplerWithReplayBuffer(path, ReplayBuffer(), shuffle=False, skip_bad_records=True)
    drawn = await draw(sampler, 3)
    assert [group[0].message[0]["content"] for group in drawn] == ["a", "b", "a"]
    assert ids(drawn) == [0, 3, 4]
    reasons = (await sampler.replay_buffer.reasons())["math"]
    assert sorted(reason.split(" (")[0] for reason in reasons) == [
        "bad record: record 1 of the data set",
        "bad record: record 2 of the data set",
    ]


@pytest.mark.parametrize("failing", ["to_rollout_state", "tokenize"])
async def test_functions_that_raise_make_bad_records(failing: str) -> None:
    def function(value: Any) -> Any:
        raise LookupError("nothing there")

    functions: dict[str, Any] = {failing: function}
    sampler = SamplerWithReplayBuffer(records(3), ReplayBuffer(), **functions)
    with pytest.raises(InvalidRecord, match="LookupError: nothing there"):
        await sampler.draw(1, "math")


@pytest.mark.parametrize("kind", [list, HalfBadLoader])
async def test_nothing_but_bad_records_ends_in_an_error(
    kind: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "_MAX_BAD_IN_A_ROW", 20)
    bad = kind(BAD)
    buffer = ReplayBuffer()
    sampler = SamplerWithReplayBuffer(bad, buffer, skip_bad_records=True)
    with pytest.raises(InvalidDataset, match="20 records in a row make no prompt; the last one: bad record: record"):
        await sampler.draw(3, "math")
    with pytest.raises(InvalidDataset, match="in a row make no prompt"):
        await sampler.draw(3, "math")
    ledger = await closed_ledger(buffer)
    assert "in_flight" not in ledger
    assert ledger["failed"] >= 20
    with pytest.raises(InvalidDataset, match="20 records in a row make no prompt"):
        await Sampler(bad, skip_bad_records=True).sample("math")


async def test_what_was_drawn_with_a_record_that_fails_is_given_back() -> None:
    buffer = ReplayBuffer()
    sampler = SamplerWithReplayBuffer(half_bad(6), buffer, shuffle=False)
    await internals(buffer).give_back(await sampler.draw(1, "math"), "math")
    with pytest.raises(InvalidRecord):
        await sampler.draw(3, "math")
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}


async def test_a_bad_record_is_not_handed_out_after_a_crash_between_its_two_steps() -> None:
    class Broken(MemoryStorage):
        broken = True

        async def put(self, arrivals: Any, *, owner: str) -> Any:
            if self.broken:
                raise StorageError("the disk is full")
            return await super().put(arrivals, owner=owner)

    storage = Broken()
    buffer = ReplayBuffer(storage=storage)
    sampler = SamplerWithReplayBuffer(half_bad(6), buffer, group_size=2, shuffle=False, skip_bad_records=True)
    with pytest.raises(StorageError):
        await sampler.draw(2, "math")
    await buffer.close()
    storage.broken = False
    fresh = ReplayBuffer(storage=storage)
    assert await closed_ledger(fresh) == {"issued": 2, "buffered": 2}
    sampler = SamplerWithReplayBuffer(half_bad(6), fresh, group_size=2, shuffle=False, skip_bad_records=True)
    drawn = await draw(sampler, 2)
    assert (ids(drawn), numbers(drawn)) == ([0, 2], [0, 2])
    assert (await closed_ledger(fresh))["failed"] >= 1
    reasons = (await fresh.reasons())["math"]
    assert "bad record: record 1 of the data set makes no prompt" in next(iter(reasons))


@pytest.mark.parametrize("skip", [False, True])
async def test_a_record_that_a_durable_store_cannot_hold_is_a_bad_record(tmp_path: Path, skip: bool) -> None:
    dataset = records(4)
    dataset[2]["when"] = datetime.date(2025, 1, 1)
    async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
        sampler = SamplerWithReplayBuffer(dataset, buffer, shuffle=False, skip_bad_records=skip)
        if skip:
            assert numbers(await draw(sampler, 5)) == [0, 1, 3, 0, 1]
            assert "record 2 of the data set cannot be stored" in next(iter((await buffer.reasons())["math"]))
            return
        for _ in range(2):
            with pytest.raises(InvalidRecord, match=r"record 2 .* cannot be stored: .*when: a datetime\.date"):
                await sampler.draw(4, "math")
        assert await closed_ledger(buffer) in ({"issued": 2, "buffered": 2}, {})


async def test_an_empty_data_set_is_an_error_every_time() -> None:
    for kind in SOURCES:
        sampler = SamplerWithReplayBuffer(kind(0), ReplayBuffer())
        for _ in range(2):
            with pytest.raises(InvalidDataset, match="is empty"):
                await sampler.draw(1, "math")


async def test_a_loader_that_fails_once_skips_nothing() -> None:
    class Fragile(Loader):
        failing = True

        def __iter__(self) -> Iterator[dict[str, Any]]:
            for record in self._records:
                if record["number"] == 2 and self.failing:
                    raise OSError("connection reset")
                yield record

    loader = Fragile(4)
    sampler, plain = SamplerWithReplayBuffer(loader, ReplayBuffer()), Sampler(loader)
    await draw(sampler, 2)
    await plain.sample("math")
    await plain.sample("math")
    for _ in range(2):
        with pytest.raises(InvalidDataset, match="failed at record 2: OSError: connection reset"):
            await sampler.draw(1, "math")
        with pytest.raises(InvalidDataset, match="failed at record 2: OSError: connection reset"):
            await plain.sample("math")
    loader.failing = False
    assert numbers(await draw(sampler, 4)) == [2, 3, 0, 1]
    assert numbers([await plain.sample("math") for _ in range(4)]) == [2, 3, 0, 1]


# --- cancelled at any moment --------------------------------------------------------------------------


class Suspending(MemoryStorage):
    """Gives way before and after each step, as a database does; a claim only before it took effect."""

    async def issue(self, *arguments: Any, **named: Any) -> Any:
        await turns(2)
        done = await super().issue(*arguments, **named)
        await turns(2)
        return done

    async def put(self, *arguments: Any, **named: Any) -> Any:
        await turns(1)
        done = await super().put(*arguments, **named)
        await turns(1)
        return done

    async def claim(self, claim: Any) -> Any:
        await turns(1)
        return await super().claim(claim)

    async def summary(self, *arguments: Any, **named: Any) -> Any:
        await turns(1)
        return await super().summary(*arguments, **named)


class ShutDown(Suspending):
    """Issues, and is cancelled itself: what happens to every task when a loop shuts down."""

    shutting_down = True

    async def issue(self, *arguments: Any, **named: Any) -> Any:
        done = await super().issue(*arguments, **named)
        if self.shutting_down:
            raise asyncio.CancelledError
        return done


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes on in threads takes some turns of the loop, always the same number."""

    async def to_thread(work: Callable[[], Any]) -> Any:
        await turns(2)
        done = work()
        await turns(2)
        return done

    monkeypatch.setattr(asyncio, "to_thread", to_thread)


async def cancelled_after(work: Coroutine[Any, Any, Any], iterations: int, again_after: int | None = None) -> bool:
    """Cancel work after so many turns of the loop, and maybe once more; False if it was done by then."""
    task = asyncio.ensure_future(work)
    await turns(iterations)
    in_time = task.cancel()
    if again_after is not None:
        await turns(again_after)
        task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled() or task.exception() is None, repr(task)
    return in_time and task.cancelled()


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("again_after", [None, 1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*SOURCES, half_bad, HalfBadLoader])
async def test_a_draw_cancelled_at_any_point_leaves_nothing_in_flight_and_skips_nothing(
    kind: Callable[[int], Any], again_after: int | None
) -> None:
    whole = SamplerWithReplayBuffer(kind(6), ReplayBuffer(), skip_bad_records=True)
    expected = await draw(whole, 9)
    left = expected[:1] + expected[2:]  # the second one stays in flight all the time
    iterations = 0
    while True:
        buffer = ReplayBuffer(storage=Suspending())
        sampler = SamplerWithReplayBuffer(kind(6), buffer, group_size=2, skip_bad_records=True)
        first = await sampler.draw(2, "math")
        await internals(buffer).give_back(first[:1], "math")  # so that the draw claims, too
        if not await cancelled_after(sampler.draw(3, "math"), iterations, again_after):
            break
        assert (await closed_ledger(buffer))["in_flight"] == 1, iterations
        rest = await draw(sampler, 8)
        assert (numbers(rest), ids(rest)) == (numbers(left), ids(left)), iterations
        assert (await closed_ledger(buffer))["in_flight"] == 9, iterations
        await buffer.close()
        iterations += 1
    assert 8 < iterations < 1_000


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("kind", SOURCES)
async def test_the_very_first_draw_cancelled_at_any_point_leaves_nothing_in_flight(kind: Callable[[int], Any]) -> None:
    expected = await uninterrupted(kind, 4, 6)
    for iterations in range(100):
        buffer = ReplayBuffer(storage=Suspending())
        sampler = SamplerWithReplayBuffer(kind(4), buffer)
        if not await cancelled_after(sampler.draw(2, "math"), iterations):
            assert iterations > 5
            return
        assert "in_flight" not in await closed_ledger(buffer), iterations
        assert numbers(await draw(sampler, 6)) == expected, iterations
    pytest.fail("the draw never came to its end")


async def test_a_large_draw_cancelled_while_it_is_handed_out_is_given_back() -> None:
    for iterations in range(100):
        buffer = ReplayBuffer(storage=Suspending())
        sampler = SamplerWithReplayBuffer(records(10), buffer)
        if not await cancelled_after(sampler.draw(100, "math"), iterations):
            assert iterations > 8
            return
        assert "in_flight" not in await closed_ledger(buffer), iterations
        assert numbers(await draw(sampler, 100)) == expected_order(10, 100), iterations
    pytest.fail("the draw never came to its end")


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("kind", SOURCES)
async def test_an_issue_that_happened_although_it_was_cancelled_is_given_back(kind: Callable[[int], Any]) -> None:
    expected = await uninterrupted(kind, 6, 6)
    storage = ShutDown()
    buffer = ReplayBuffer(storage=storage)
    sampler = SamplerWithReplayBuffer(kind(6), buffer)
    with pytest.raises(asyncio.CancelledError):
        await sampler.draw(3, "math")
    ledger = await closed_ledger(buffer)
    assert ledger["issued"] == ledger["buffered"] > 0
    storage.shutting_down = False
    drawn = await draw(sampler, 6)
    assert (numbers(drawn), ids(drawn)) == (expected, list(range(6)))


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("kind", SOURCES)
async def test_a_draw_cancelled_while_it_waits_for_room_skips_nothing(kind: Callable[[int], Any]) -> None:
    expected = await uninterrupted(kind, 6, 4)
    buffer = ReplayBuffer(storage=Suspending(), max_bytes=60)
    sampler = SamplerWithReplayBuffer(kind(6), buffer)
    drawn = await sampler.draw(5, "math")
    for iterations in range(0, 40, 3):
        assert await cancelled_after(sampler.draw(1, "math"), iterations)
        assert await closed_ledger(buffer) == {"issued": len(drawn), "in_flight": len(drawn)}
    while len(drawn) < 4:
        await complete(buffer, drawn[-1:])
        await buffer.get(9, "math", Status.COMPLETED)
        drawn += await sampler.draw(1, "math", timeout_s=0)
    assert numbers(drawn)[:4] == expected


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("go_on", ["same sampler", "its state"])
@pytest.mark.parametrize("kind", SOURCES)
async def test_a_plain_sample_that_is_cancelled_skips_nothing(kind: Callable[[int], Any], go_on: str) -> None:
    expected = await uninterrupted(kind, 4, 8)
    for iterations in range(8):
        sampler = Sampler(kind(4))
        seen = [await sampler.sample("math") for _ in range(3)]
        for _ in range(2):
            task = asyncio.ensure_future(sampler.sample("math"))
            await turns(iterations)
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                seen.append(task.result())
            if go_on == "its state":
                state = sampler.state_dict()
                sampler = Sampler(kind(4))
                sampler.load_state_dict(state)
        while len(seen) < 8:
            seen.append(await sampler.sample("math"))
        assert numbers(seen) == expected, iterations


@pytest.mark.usefixtures("no_threads")
async def test_a_cancelled_draw_does_not_take_what_another_sampler_of_the_buffer_drew() -> None:
    for iterations in range(60):
        buffer = ReplayBuffer(storage=Suspending())
        samplers = [SamplerWithReplayBuffer(MapStyle(6), buffer) for _ in range(2)]
        other = asyncio.ensure_future(samplers[1].draw(3, "math"))
        await cancelled_after(samplers[0].draw(3, "math"), iterations)
        for group in await other:
            for state in group:
                state.status, state.response_ids = Status.COMPLETED, [1]
            await buffer.put(group, "math")  # LostLease if it was taken away
        await buffer.close()


async def test_a_group_that_cannot_go_back_does_not_keep_the_others() -> None:
    buffer = ReplayBuffer()
    sampler = SamplerWithReplayBuffer(records(6), buffer)
    drawn = await sampler.draw(3, "math")
    drawn[0][0].response_ids, drawn[0][0].logprobs = [1], [0.1, 0.2]
    with pytest.raises(InvalidInput, match=r"logprobs .* has 2 items"):
        await internals(buffer).give_back(drawn, "math")
    assert await closed_ledger(buffer) == {"issued": 3, "in_flight": 1, "buffered": 2}


# --- loaders that people use --------------------------------------------------------------------------


async def exact_cuts(make: Callable[[], Any], size: int, cuts: Sequence[int], n: int, path: Path) -> list[int]:
    """The cuts after which a resumed run draws exactly what an uninterrupted one draws, whose epochs are whole."""
    expected = numbers(await draw(SamplerWithReplayBuffer(make(), ReplayBuffer()), n))
    for start in range(0, n - size + 1, size):
        assert sorted(expected[start : start + size]) == list(range(size))
    exact = []
    for cut in cuts:
        buffer = ReplayBuffer()
        drawn = await draw(SamplerWithReplayBuffer(make(), buffer), cut)
        await complete(buffer, drawn)
        async with resumed(buffer, path / str(cut)) as fresh:
            rest = await draw(SamplerWithReplayBuffer(make(), fresh), n - cut)
        if numbers(drawn) + numbers(rest) == expected:
            exact.append(cut)
    return exact


def as_they_are(batch: Any) -> Any:
    return batch


CUTS = (0, 1, 3, 5, 7, 10)  # in the middle, and at the end, of epochs of five


@pytest.mark.filterwarnings("ignore")
async def test_a_data_set_of_hugging_face_is_drawn_from_as_it_is(tmp_path: Path) -> None:
    import datasets

    dataset = datasets.Dataset.from_list(records(5))
    assert await exact_cuts(lambda: dataset, 5, CUTS, 12, tmp_path) == list(CUTS)
    sampler = SamplerWithReplayBuffer(dataset, ReplayBuffer())
    assert numbers(await draw(sampler, 12)) == expected_order(5, 12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("shuffled", [False, True])
async def test_a_stream_of_hugging_face_goes_on_exactly(shards: int, shuffled: bool, tmp_path: Path) -> None:
    import datasets

    def make() -> Any:
        stream = datasets.Dataset.from_list(records(5)).to_iterable_dataset(num_shards=shards)
        # With a larger buffer its state leaves out what is in the buffer, as its documentation says.
        return stream.shuffle(seed=1, buffer_size=1) if shuffled else stream

    assert await exact_cuts(make, 5, CUTS, 12, tmp_path) == list(CUTS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("workers", "batch_size", "shuffled"),
    [
        *[(0, batch_size, shuffled) for batch_size in (1, None) for shuffled in (False, True)],
        (2, 1, True),
        *[pytest.param(2, *more, marks=pytest.mark.slow) for more in ((1, False), (None, False), (None, True))],
    ],
)
async def test_torchdatas_loader_goes_on_exactly(
    workers: int, batch_size: int | None, shuffled: bool, tmp_path: Path
) -> None:
    import torch
    from torchdata import stateful_dataloader

    def make() -> Any:
        torch.manual_seed(3)
        return stateful_dataloader.StatefulDataLoader(
            records(5), batch_size=batch_size, shuffle=shuffled, num_workers=workers, collate_fn=as_they_are
        )

    assert await exact_cuts(make, 5, CUTS, 12, tmp_path) == list(CUTS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shuffled", [False, True])
async def test_torchs_loader_without_state_goes_on_exactly_if_it_has_its_own_generator(
    shuffled: bool, tmp_path: Path
) -> None:
    import torch

    def make() -> Any:
        generator = torch.Generator().manual_seed(3)
        dataset: Any = records(5)
        return torch.utils.data.DataLoader(
            dataset, batch_size=1, shuffle=shuffled, generator=generator, collate_fn=as_they_are
        )

    assert await exact_cuts(make, 5, CUTS, 12, tmp_path) == list(CUTS)


@pytest.mark.filterwarnings("ignore")
async def test_records_that_torch_collated_are_refused() -> None:
    import torch

    collated: Any = [{"messages": [{"role": "user", "content": "hello"}]}]
    sampler = SamplerWithReplayBuffer(torch.utils.data.DataLoader(collated, batch_size=1), ReplayBuffer())
    with pytest.raises(InvalidRecord, match="must not collate records"):
        await sampler.draw(1, "math")
