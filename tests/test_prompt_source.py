"""Sources of prompts that users write: by position or by state, their errors, and several producers."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import ChangedDataset, InvalidDataset, InvalidRecord, MemoryStorage, PromptSource, ReplayBuffer, Sampler
from forebay.prompts.prompt_source import AdaptedSource
from forebay.prompts.sampler import SamplerWithReplayBuffer
from forebay.prompts.sources import open_source
from forebay.storage.sqlite import SQLiteStorage
from tests.processes import HANG_S
from tests.support import closed_ledger
from tests.test_sampler import Groups, Suspending, complete, draw, ids, numbers


class ByPosition:
    """Reads by position: the records in order, epoch after epoch."""

    def __init__(self, size: int | None, base: int = 0) -> None:
        self.size, self.base = size, base
        self.calls: list[tuple[int, Any]] = []

    def read(self, position: int, state: Any) -> tuple[Any, Any]:
        self.calls.append((position, state))
        number = self.base + (position if self.size is None else position % self.size)
        return {"prompt": f"question {number}", "number": number}, None

    def length(self) -> int | None:
        return self.size

    def fingerprint(self) -> str:
        return f"{self.size} from {self.base}"


class ByState(ByPosition):
    """Reads by state: shuffles each epoch with a generator that it keeps in its state, which it changes in place."""

    def read(self, position: int, state: Any) -> tuple[Any, Any]:
        assert self.size is not None
        assert (position == 0) == (state is None)
        if state is None:
            state = {"random": random.Random(self.base).getstate(), "left": []}
        chance = random.Random()
        chance.setstate(state["random"])
        if not state["left"]:
            state["left"] = chance.sample(range(self.size), self.size)
        number = self.base + state["left"].pop()
        state["random"] = chance.getstate()
        return {"prompt": f"question {number}", "number": number}, state


def opened(source: Any) -> AdaptedSource:
    made = open_source(source, seed=0, shuffle=True)
    assert isinstance(made, AdaptedSource)
    return made


def test_the_protocol_is_public_and_recognised() -> None:
    source: PromptSource = ByPosition(3)
    assert isinstance(source, forebay.PromptSource)
    assert isinstance(opened(source), AdaptedSource)


async def test_the_order_is_the_sources_own_and_the_position_continues_over_epochs() -> None:
    source = ByPosition(3)
    sampler = Sampler(source, seed=7).with_buffer(ReplayBuffer())
    assert numbers(await draw(sampler, 7)) == [0, 1, 2, 0, 1, 2, 0]
    assert source.calls == [(position, None) for position in range(7)]
    assert len(sampler) == 3
    with pytest.raises(InvalidDataset, match="is endless; it has no length"):
        len(Sampler(ByPosition(None)))


async def test_nothing_is_asked_before_the_first_draw() -> None:
    class Untouchable:
        def read(self, position: int, state: Any) -> tuple[Any, Any]:
            raise AssertionError

        length = fingerprint = read

    Sampler(Untouchable()).with_buffer(ReplayBuffer())


@pytest.mark.parametrize("cut", range(8))
async def test_a_source_that_reads_by_state_restarts_exactly(cut: int, tmp_path: Path) -> None:
    expected = numbers(await draw(Sampler(ByState(3)).with_buffer(ReplayBuffer()), 10))
    drawn: Groups = []
    for n in (cut, 10 - cut):
        async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
            sampler = SamplerWithReplayBuffer(ByState(3), buffer)
            while n > 0:
                drawn += (more := await sampler.draw(n, "math", ()))
                n -= len(more)
    assert numbers(drawn) == expected
    assert ids(drawn) == list(range(10))


async def test_a_draw_that_found_no_capacity_reads_the_same_record_again() -> None:
    expected = numbers(await draw(Sampler(ByState(3)).with_buffer(ReplayBuffer()), 6))
    buffer = ReplayBuffer(max_groups=2)
    sampler = Sampler(ByState(3)).with_buffer(buffer)
    seen: list[int] = []
    for step in (1, 2, 3):
        drawn = await sampler.try_draw(4, "math", ())
        seen += numbers(drawn)
        assert await sampler.try_draw(4, "math", ()) == []
        await complete(buffer, drawn)
        async with buffer.lease_batch({"math": 2}, train_step=step):
            pass
    assert seen == expected


async def test_a_source_that_reads_by_state_serves_several_tasks() -> None:
    sampler = Sampler(ByState(3))
    expected = numbers(await draw(Sampler(ByState(3)).with_buffer(ReplayBuffer()), 4))
    bound = sampler.with_buffer(ReplayBuffer())
    for draw_one in (bound.sample, sampler.sample):
        seen: dict[str, list[int]] = {"math": [], "code": []}
        for name in ("math", "code", "code", "math", "math", "code", "math", "code"):
            seen[name] += numbers([await draw_one(name)])
        assert seen == {"math": expected, "code": expected}


# --- several producers --------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", ["source", "nothing"])
async def test_producers_of_a_source_that_reads_by_position_draw_each_record_once(shared: str) -> None:
    storage, one = Suspending(), ByPosition(10)
    samplers = [
        SamplerWithReplayBuffer(one if shared == "source" else ByPosition(10), ReplayBuffer(storage=storage), epochs=5)
        for _ in range(3)
    ]
    chance = random.Random(4)

    async def produce(sampler: SamplerWithReplayBuffer) -> Groups:
        drawn: Groups = []
        while more := await sampler.try_draw(chance.randint(1, 5), "math", ()):
            drawn += more
        return drawn

    drawn = [group for groups in await asyncio.gather(*map(produce, samplers)) for group in groups]
    drawn.sort(key=lambda group: group[0].group_id or 0)
    assert ids(drawn) == list(range(50))
    assert numbers(drawn) == list(range(10)) * 5
    assert await closed_ledger(samplers[0].replay_buffer) == {"issued": 50, "in_flight": 50}


async def test_a_source_that_reads_by_state_has_one_producer() -> None:
    barrier = threading.Barrier(2)

    class Meeting(ByState):
        def read(self, position: int, state: Any) -> tuple[Any, Any]:
            if position == 0:
                barrier.wait(timeout=HANG_S)
            return super().read(position, state)

    storage = MemoryStorage()
    samplers = [SamplerWithReplayBuffer(Meeting(6), ReplayBuffer(storage=storage)) for _ in range(2)]
    outcomes = await asyncio.gather(*(sampler.draw(1, "math") for sampler in samplers), return_exceptions=True)
    (refused,) = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert isinstance(refused, InvalidDataset)
    assert "PromptSource that reads by state" in str(refused)
    assert await closed_ledger(samplers[0].replay_buffer) == {"issued": 1, "in_flight": 1}


# --- what a source may get wrong ----------------------------------------------------------------------


def made(**methods: Callable[..., Any]) -> Any:
    """A source by position with some methods of its own."""

    class Wrong(ByPosition):
        pass

    for name, method in methods.items():
        setattr(Wrong, name, method)
    return Wrong(3)


def failing(*arguments: Any) -> Any:
    raise OSError("the network is away")


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ({"read": failing}, "Wrong failed at record 0: OSError: the network is away"),
        (
            {"read": lambda self, position, state: {"prompt": "a"}},
            r"read\(\) of .* returned a dict .*; expected a tuple",
        ),
        ({"read": lambda self, position, state: ("a", 1, 2)}, "returned a tuple for record 0; expected a tuple of two"),
        ({"read": lambda self, position, state: ({"prompt": "a"}, object())}, "state of .* is not plain data"),
        ({"length": failing}, r"length\(\) of .* failed: OSError"),
        ({"length": lambda self: 0}, r"length\(\) of .* returned 0; expected a number of records of at least 1"),
        ({"length": lambda self: "3"}, "returned '3'"),
        ({"fingerprint": failing}, r"fingerprint\(\) of .* failed: OSError"),
        ({"fingerprint": lambda self: 5}, r"fingerprint\(\) of .* returned 5; expected a string"),
    ],
)
async def test_errors_of_a_source_are_named(methods: dict[str, Any], said: str) -> None:
    buffer = ReplayBuffer()
    for _ in range(2):
        with pytest.raises(InvalidDataset, match=said):
            await Sampler(made(**methods)).with_buffer(buffer).draw(1, "math")
    assert await closed_ledger(buffer) == {}


async def test_a_record_of_a_source_that_reads_by_position_can_be_skipped() -> None:
    def read(self: ByPosition, position: int, state: Any) -> tuple[Any, Any]:
        if position == 1:
            raise OSError("away")
        return ByPosition.read(self, position, state)

    with pytest.raises(InvalidRecord, match="record 1 of the data set cannot be read: OSError: away"):
        await draw(Sampler(made(read=read)).with_buffer(ReplayBuffer()), 3)
    sampler = Sampler(made(read=read), skip_bad_records=True).with_buffer(ReplayBuffer())
    assert numbers(await draw(sampler, 2)) == [0, 2]


async def test_a_record_of_a_source_that_reads_by_state_cannot_be_skipped() -> None:
    class Failing(ByState):
        failed = False

        def read(self, position: int, state: Any) -> tuple[Any, Any]:
            if position == 2 and not self.failed:
                self.failed = True
                raise OSError("away")
            return super().read(position, state)

    expected = numbers(await draw(Sampler(ByState(3)).with_buffer(ReplayBuffer()), 5))
    sampler = Sampler(Failing(3), skip_bad_records=True).with_buffer(ReplayBuffer())
    drawn = await draw(sampler, 2)
    with pytest.raises(InvalidDataset, match="failed at record 2: OSError: away"):
        await sampler.draw(1, "math", ())
    assert numbers(drawn + await sampler.draw(3, "math", ())) == expected


def test_a_source_does_not_change_the_way_it_reads() -> None:
    source = opened(made(read=lambda self, position, state: (position, 1 if position else None)))
    assert source.read(0) == (0, 0)
    with pytest.raises(InvalidDataset, match="returned a state for record 1, but none for earlier records"):
        source.read(1)


def test_a_source_that_reads_by_state_does_not_continue_without_one() -> None:
    source = opened(ByState(3))
    source.read(0)
    source.restore(5, None)
    with pytest.raises(InvalidDataset, match="there is no state for record 5"):
        source.read(5)
    fresh = opened(ByState(3))
    with pytest.raises(InvalidDataset, match="not one of a prompt source"):
        fresh.restore(5, open_state())


def open_state() -> bytes:
    """The state of a loader after one record."""
    loader = open_source(iter_of([1, 2]), seed=0, shuffle=True)
    loader.read(0)
    return loader.state() or b""


def iter_of(values: list[Any]) -> Any:
    class Values:
        def __iter__(self) -> Any:
            return iter(values)

    return Values()


async def test_another_fingerprint_or_another_kind_of_data_set_is_refused() -> None:
    buffer = ReplayBuffer()
    await draw(SamplerWithReplayBuffer(ByPosition(3), buffer), 2)
    with pytest.raises(ChangedDataset, match=r"own was .*, is "):
        await Sampler(ByPosition(3, base=1)).with_buffer(buffer).draw(1, "math", ())
    with pytest.raises(ChangedDataset, match="kind was prompt source, is map-style"):
        await Sampler([{"prompt": "a"}] * 3).with_buffer(buffer).draw(1, "math", ())
