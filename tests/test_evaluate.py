"""Evaluation: each record exactly once, with failures reported as failures."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import (
    AsyncProduceStrategy,
    EngineUnavailable,
    FunctionAgentLoop,
    InvalidDataset,
    InvalidInput,
    ReplayBuffer,
    RolloutState,
    Sampler,
    Status,
    evaluate,
)
from forebay.produce import NoProgress
from forebay.testing.simulate import run


def answer(state: RolloutState) -> None:
    state.response_ids, state.response, state.status = [1, 2], "x", Status.COMPLETED


def index_of(state: RolloutState) -> int:
    return int(str(state.message[-1]["content"]).split()[-1])


def questions(n: int, **options: Any) -> Sampler:
    return Sampler([{"prompt": f"eval {i}"} for i in range(n)], **options)


@settings(max_examples=60, deadline=None)
@given(
    records=st.integers(1, 30),
    members=st.integers(1, 3),
    shuffle=st.booleans(),
    most=st.none() | st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_each_record_appears_once_in_order_whatever_fails(
    records: int, members: int, shuffle: bool, most: int | None, seed: int
) -> None:
    fate = random.Random(seed)
    fails = {i for i in range(records) if fate.random() < 0.2}
    stumbles = {i for i in range(records) if fate.random() < 0.2}
    seen: set[int] = set()

    async def generate(state: RolloutState) -> None:
        index = index_of(state)
        await asyncio.sleep(fate.random())
        if index in fails or (index in stumbles and index not in seen):
            seen.add(index)
            raise RuntimeError(f"no answer to {index}")
        answer(state)

    async def main() -> None:
        sampler = questions(records, group_size=members, shuffle=shuffle, seed=seed)
        for _ in range(2):
            result = await evaluate(
                FunctionAgentLoop(generate),
                sampler,
                model_step=3,
                reward_fn=lambda state: float(index_of(state)),
                max_in_flight=most,
                progress=NoProgress(),
            )
            assert [index_of(group[0]) for group in result.groups] == list(range(records))
            assert set(result.failed) == fails
            assert all(f"no answer to {index}" in error for index, error in result.failed.items())
            for index, group in enumerate(result.groups):
                assert len(group) == members
                if index not in fails:
                    assert [state.reward for state in group] == [{"score": float(index)}] * members
            kept = [i for i in range(records) if i not in fails]
            assert result.reward_mean() == (pytest.approx(sum(kept) / len(kept)) if kept else None)

    run(main)


def test_failed_samples_may_count_with_a_given_score() -> None:
    async def generate(state: RolloutState) -> None:
        if index_of(state) == 1:
            raise RuntimeError("no")
        answer(state)

    async def main() -> None:
        result = await evaluate(
            FunctionAgentLoop(generate), questions(4), model_step=0, reward_fn=lambda state: 1.0, progress=NoProgress()
        )
        assert (result.reward_mean(), result.reward_mean(failed=0.0)) == (1.0, 0.75)
        assert result.failed == {1: "RuntimeError: no"}

    run(main)


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("epochs", [None, 1, 2])
@pytest.mark.parametrize("most", [None, 1])
def test_bad_records_are_failures_and_the_others_are_generated_once(
    bad: int, epochs: int | None, most: int | None
) -> None:
    generated: list[int] = []

    async def generate(state: RolloutState) -> None:
        generated.append(state.extra_fields["number"])
        answer(state)

    async def main() -> None:
        records: list[Any] = [{"prompt": f"eval {number}", "number": number} for number in range(3)]
        records[bad] = {"nothing": 1}
        sampler = Sampler(records, skip_bad_records=True, epochs=epochs)
        result = await evaluate(
            FunctionAgentLoop(generate), sampler, model_step=0, max_in_flight=most, progress=NoProgress()
        )
        assert list(result.failed) == [bad]
        assert sorted(generated) == [number for number in range(3) if number != bad]

    run(main)


def test_a_paused_loop_is_resumed_for_an_evaluation_and_paused_again() -> None:
    async def main() -> None:
        async def generate(state: RolloutState) -> None:
            await asyncio.sleep(1)
            answer(state)

        loop, buffer = FunctionAgentLoop(generate), ReplayBuffer()
        strategy = AsyncProduceStrategy(buffer, progress=NoProgress())
        await strategy.produce_batch(loop, questions(9), 4, "math", train_step=1, model_step=0)
        await strategy.pause()
        await loop.pause()
        result = await evaluate(loop, questions(5), model_step=0, progress=NoProgress())
        assert len(result.groups) == 5
        assert not result.failed
        assert loop.paused
        assert (await buffer.ledger())["math"]["buffered"] == 4

    run(main)


def test_an_evaluation_raises_if_the_engine_stays_unreachable() -> None:
    async def generate(state: RolloutState) -> None:
        raise ConnectionRefusedError("refused")

    async def main() -> None:
        with pytest.raises(EngineUnavailable):
            await evaluate(
                FunctionAgentLoop(generate, down_timeout_s=30), questions(5), model_step=0, progress=NoProgress()
            )

    run(main)


def test_wrong_arguments_of_an_evaluation_are_refused() -> None:
    async def main() -> None:
        loop: Any = FunctionAgentLoop(lambda state: asyncio.sleep(0))
        with pytest.raises(InvalidInput, match="agent_loop"):
            await evaluate("loop", questions(1), model_step=0)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="sampler"):
            await evaluate(loop, [1], model_step=0)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="model_step"):
            await evaluate(loop, questions(1), model_step=-1)
        with pytest.raises(InvalidInput, match="max_in_flight"):
            await evaluate(loop, questions(1), model_step=0, max_in_flight=0)
        with pytest.raises(InvalidDataset, match="iterable loader"):
            await evaluate(loop, Sampler({"prompt": "q"}.items()), model_step=0)

    run(main)
