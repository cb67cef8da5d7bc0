"""The simulated engine: the same answers whatever the timing, and the timing of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.rollout import RolloutState, SampleParams, Status
from forebay.core.validate import check_group
from forebay.errors import EngineError, InvalidConfig
from forebay.testing import simulate
from forebay.testing.simulate import LongTail, SimulatedEngine, SimulationStuck, token, tokens

EXACTLY_100 = LongTail(median=100, sigma=0.0, long_share=0.0)
"""A hundred tokens for everyone: one second at the default speed."""


def sample(rollout_id: int = 0, *, group_id: int = 0, tries: int = 0, max_tokens: int | None = None) -> RolloutState:
    params = None if max_tokens is None else SampleParams(max_tokens=max_tokens)
    return RolloutState(
        message=[], group_id=group_id, rollout_id=rollout_id, num_tries=tries, prompt_ids=[1, 2], sample_params=params
    )


def group_of(members: int, group_id: int = 0) -> list[RolloutState]:
    return [sample(group_id * members + index, group_id=group_id) for index in range(members)]


def ids_of(state: RolloutState) -> list[int]:
    return [] if state.response_ids is None else [int(number) for number in state.response_ids]


def now() -> float:
    return asyncio.get_running_loop().time()


async def generate_with_pauses(
    engine: SimulatedEngine, group: list[RolloutState], pauses_s: Sequence[float], *, partial: bool = True
) -> list[RolloutState]:
    """Generate to the end, with a pause so long after each beginning."""
    for after_s in pauses_s:
        under_way = asyncio.create_task(engine.generate_group(group, enable_partial_rollout=partial))
        await asyncio.sleep(after_s)
        await engine.pause()
        await under_way
        await engine.resume()
    return await engine.generate_group(group, enable_partial_rollout=partial)


# --- what it says ---------------------------------------------------------------------------------------


def test_tokens_are_a_function_of_seed_rollout_try_and_position() -> None:
    assert tokens(1, 2, 3, 10, 20).tolist() == [token(1, 2, 3, position) for position in range(10, 20)]
    assert tokens(1, 2, 3, 0, 20).dtype == np.int32
    texts = {
        tuple(tokens(seed, rollout_id, tries, 0, 20)) for seed in (0, 1) for rollout_id in (0, 1) for tries in (0, 1)
    }
    assert len(texts) == 8


def test_a_sample_is_what_the_functions_say() -> None:
    engine = SimulatedEngine(seed=5, model_step=3)
    (state,) = simulate.run(engine.generate_group([sample(7, group_id=2, tries=1)]))
    assert ids_of(state) == tokens(5, 7, 1, 0, engine.length(state)).tolist()
    assert isinstance(state.response_ids, np.ndarray)
    assert isinstance(state.logprobs, np.ndarray)
    assert state.logprobs.max() <= 0
    assert state.version_spans == ((3, engine.length(state)),)
    assert (state.status, state.finish_reason) == (Status.COMPLETED, "stop")
    check_group([state], "math")


def test_answers_do_not_depend_on_the_order_of_events() -> None:
    def answers(seed: int, slots: int | None) -> list[list[int]]:
        engine = SimulatedEngine(slots=slots)

        async def main() -> list[list[RolloutState]]:
            return await asyncio.gather(*(engine.generate_group(group_of(4, group_id)) for group_id in range(5)))

        return [ids_of(state) for group in simulate.run(main, seed=seed) for state in group]

    assert all(answers(seed, slots) == answers(0, None) for seed in range(5) for slots in (1, 3))


def test_all_members_of_a_prompt_are_long_or_none_is() -> None:
    lengths = LongTail(sigma=0.1)
    engine = SimulatedEngine(seed=9, lengths=lengths)
    long = [group_id for group_id in range(1000) if engine.is_long(group_id)]
    assert 200 < len(long) < 300
    for group_id in range(100):
        members = [engine.length(state) for state in group_of(8, group_id)]
        assert len(set(members)) > 1
        assert all((length > 600) == engine.is_long(group_id) for length in members)


def test_lengths_are_spread_around_their_median() -> None:
    lengths = LongTail(median=200, sigma=0.8, long_share=0.0)
    drawn = [lengths.length(1, 0, rollout_id) for rollout_id in range(4000)]
    assert 190 < median(drawn) < 210
    assert 0.14 < sum(length > 200 * 2.718**0.8 for length in drawn) / 4000 < 0.18  # one sigma up: 16 %


def test_an_answer_that_is_too_long_is_cut_off() -> None:
    engine = SimulatedEngine(lengths=LongTail(median=500, sigma=0.0, long_share=0.0, max_tokens=400))
    whole, asked = simulate.run(engine.generate_group([sample(0), sample(1, max_tokens=30)]))
    assert [(len(ids_of(state)), state.finish_reason) for state in (whole, asked)] == [(400, "length"), (30, "length")]
    assert whole.status is asked.status is Status.COMPLETED


@settings(max_examples=60, deadline=None)
@given(
    pauses_s=st.lists(st.floats(0, 10), max_size=6),
    rollout_id=st.integers(0, 1000),
    seed=st.integers(0, 50),
    max_tokens=st.none() | st.integers(1, 500),
)
def test_interrupted_anywhere_and_continued_is_as_if_in_one_go(
    pauses_s: list[float], rollout_id: int, seed: int, max_tokens: int | None
) -> None:
    engine = SimulatedEngine(seed=seed)
    (once,) = simulate.run(engine.generate_group([sample(rollout_id, max_tokens=max_tokens)]))
    group = [sample(rollout_id, max_tokens=max_tokens)]
    (state,) = simulate.run(generate_with_pauses(engine, group, pauses_s), seed=seed)
    assert ids_of(state) == ids_of(once)
    np.testing.assert_array_equal(np.asarray(state.logprobs), np.asarray(once.logprobs))
    assert (state.finish_reason, state.version_spans) == (once.finish_reason, once.version_spans)


def test_without_partial_rollout_a_sample_begins_again() -> None:
    engine = SimulatedEngine(lengths=EXACTLY_100)

    async def main() -> float:
        (state,) = await generate_with_pauses(engine, [sample()], [0.5, 0.9], partial=False)
        assert ids_of(state) == tokens(0, 0, 0, 0, 100).tolist()
        return now()

    assert simulate.run(main) == pytest.approx(0.5 + 0.9 + 2 * 0.05 + 1)
    assert engine.figures().tokens_generated == 50 + 90 + 100


def test_a_continuation_keeps_tokens_that_came_as_lists() -> None:
    state = sample()
    state.response_ids, state.logprobs, state.response_mask = [5, 6], [-1.0, -2.0], [0, 1]
    state.response_model_steps = [1, 1]
    engine = SimulatedEngine(lengths=EXACTLY_100, model_step=4)
    simulate.run(engine.generate_group([state], enable_partial_rollout=True))
    assert ids_of(state) == [5, 6, *tokens(0, 0, 0, 2, 100).tolist()]
    assert state.version_spans == ((1, 2), (4, 98))
    assert state.response_mask is not None
    assert list(state.response_mask) == [0] + [1] * 99
    check_group([state], "math")


# --- when it says it ------------------------------------------------------------------------------------


def test_a_pause_leaves_the_tokens_that_there_are_and_returns_after_the_latency() -> None:
    engine = SimulatedEngine(lengths=EXACTLY_100, abort_latency_s=0.2)

    async def main() -> float:
        group = group_of(3)
        under_way = asyncio.create_task(engine.generate_group(group))
        await asyncio.sleep(0.37)
        await engine.pause()
        await engine.pause()
        assert await under_way is group
        assert [(state.status, len(ids_of(state))) for state in group] == [(Status.ABORTED, 37)] * 3
        return now()

    assert simulate.run(main) == pytest.approx(0.57)


def test_a_tenth_of_a_second_is_ten_tokens_though_the_difference_of_two_times_is_less() -> None:
    engine = SimulatedEngine(lengths=EXACTLY_100)

    async def main() -> RolloutState:
        state = sample()
        await asyncio.sleep(0.2)
        under_way = asyncio.create_task(engine.generate_group([state]))
        rung = asyncio.Event()
        asyncio.get_running_loop().call_at(0.3, rung.set)
        await rung.wait()
        await engine.pause()
        await under_way
        return state

    assert 0.3 - 0.2 < 0.1
    assert len(ids_of(simulate.run(main))) == 10


def test_what_arrives_during_a_pause_comes_back_untouched() -> None:
    engine = SimulatedEngine()

    async def main() -> None:
        await engine.pause()
        state = await engine.generate(sample(), enable_partial_rollout=False)
        assert (state.status, state.response_ids, now()) == (Status.ABORTED, None, 0.0)
        await engine.resume()
        assert (await engine.generate(state, enable_partial_rollout=False)).status is Status.COMPLETED

    simulate.run(main)
    assert engine.figures().samples_started == 1


def test_what_has_finished_when_the_pause_comes_stays_finished() -> None:
    engine = SimulatedEngine(lengths=EXACTLY_100)

    async def main() -> list[RolloutState]:
        return await generate_with_pauses(engine, [sample(0), sample(1, max_tokens=10)], [0.5])

    assert [state.finish_reason for state in simulate.run(main)] == ["stop", "length"]
    assert engine.figures().tokens_generated == 110


def test_more_samples_than_slots_take_turns_in_order() -> None:
    engine = SimulatedEngine(lengths=EXACTLY_100, slots=2)
    finished: list[tuple[int | None, float]] = []

    async def one(rollout_id: int) -> None:
        state = await engine.generate(sample(rollout_id), enable_partial_rollout=False)
        finished.append((state.rollout_id, now()))

    async def main() -> float:
        tasks = []
        for rollout_id in range(6):
            tasks.append(asyncio.create_task(one(rollout_id)))
            await asyncio.sleep(0)
        await asyncio.wait(tasks)
        return engine.figures().idle_share(2, now())

    assert simulate.run(main) == pytest.approx(0)
    assert sorted(finished) == [(number, number // 2 + 1) for number in range(6)]


def test_a_pause_ends_those_who_wait_for_their_turn_too() -> None:
    engine = SimulatedEngine(lengths=EXACTLY_100, slots=1)

    async def main() -> list[RolloutState]:
        return await generate_with_pauses(engine, group_of(3), [0.5])

    assert [len(ids_of(state)) for state in simulate.run(main)] == [100] * 3
    assert engine.figures().samples_aborted == 3
    assert engine.figures().busy_s == pytest.approx(3)


def test_an_engine_that_ignores_a_pause_goes_on() -> None:
    engine = SimulatedEngine(lengths=EXACTLY_100, ignores_pause=True, slots=1)

    async def main() -> float:
        group = group_of(2)
        under_way = asyncio.create_task(engine.generate_group(group))
        await asyncio.sleep(0.5)
        await engine.pause()
        await under_way
        assert [state.status for state in group] == [Status.COMPLETED] * 2
        return now()

    assert simulate.run(main) == 2


@pytest.mark.parametrize("partial", [True, False])
def test_a_cancel_keeps_the_tokens_that_there_are(partial: bool) -> None:
    engine = SimulatedEngine(lengths=EXACTLY_100, slots=2)
    group = group_of(3)

    async def main() -> None:
        under_way = asyncio.create_task(engine.generate_group(group, enable_partial_rollout=partial))
        await asyncio.sleep(0.25)
        under_way.cancel()
        await asyncio.wait([under_way])
        assert under_way.cancelled()

    simulate.run(main)
    assert sorted(len(ids_of(state)) for state in group) == [0, 25, 25]
    assert [state.status for state in group] == [Status.ABORTED] * 3
    check_group(group, "math")


# --- weights --------------------------------------------------------------------------------------------


def test_every_token_has_the_version_of_the_weights_that_made_it() -> None:
    engine = SimulatedEngine(lengths=EXACTLY_100)

    async def main() -> RolloutState:
        state = sample()
        under_way = asyncio.create_task(engine.generate_group([state]))
        await asyncio.sleep(0.3)
        engine.set_weights(1)
        engine.set_weights(1)
        await asyncio.sleep(0.3)
        engine.model_step = 4
        await under_way
        return state

    assert simulate.run(main).version_spans == ((0, 30), (1, 30), (4, 40))
    assert engine.model_step == 4


def test_weights_that_come_while_a_pause_takes_effect_made_no_token() -> None:
    engine = SimulatedEngine(lengths=EXACTLY_100)

    async def main() -> RolloutState:
        state = sample()
        under_way = asyncio.create_task(engine.generate_group([state]))
        await asyncio.sleep(0.3)
        await engine.pause()
        engine.set_weights(1)
        await under_way
        return state

    assert simulate.run(main).version_spans == ((0, 30),)


# --- accidents ------------------------------------------------------------------------------------------


def test_a_failure_leaves_the_siblings_alone_and_another_try_has_another_fate() -> None:
    engine = SimulatedEngine(failure_rate=0.3)
    group = simulate.run(engine.generate_group(group_of(100)))
    failed = [state for state in group if state.status is Status.FAILED]
    assert 15 < len(failed) < 45
    assert {state.status for state in group} == {Status.FAILED, Status.COMPLETED}
    assert all("EngineError: simulated failure" in (state.error_msg or "") for state in failed)
    again = [sample(state.rollout_id or 0, tries=1) for state in failed]
    assert {state.status for state in simulate.run(engine.generate_group(again))} == {Status.FAILED, Status.COMPLETED}


@settings(max_examples=30, deadline=None)
@given(pauses_s=st.lists(st.floats(0, 3), max_size=4), rollout_id=st.integers(0, 100))
def test_whether_and_where_a_try_fails_does_not_depend_on_pauses(pauses_s: list[float], rollout_id: int) -> None:
    async def fate(pauses_s: Sequence[float]) -> str:
        engine = SimulatedEngine(failure_rate=0.5)
        state = sample(rollout_id)
        try:
            for after_s in pauses_s:
                under_way = asyncio.create_task(engine.generate(state, enable_partial_rollout=True))
                await asyncio.sleep(after_s)
                await engine.pause()
                await under_way
                await engine.resume()
                if state.status is Status.COMPLETED:
                    return "none"
            await engine.generate(state, enable_partial_rollout=True)
        except EngineError as error:
            return f"{error} with {len(ids_of(state))}"
        return "none"

    assert simulate.run(fate(pauses_s)) == simulate.run(fate(()))


def test_a_try_that_was_paused_right_where_it_fails_fails_at_once() -> None:
    engine = SimulatedEngine(failure_rate=1.0)
    state = sample()
    with pytest.raises(EngineError):
        simulate.run(engine.generate(state, enable_partial_rollout=True))
    assert len(ids_of(state)) > 0
    with pytest.raises(EngineError, match=f"at token {len(ids_of(state))}, in try 0"):
        simulate.run(engine.generate(state, enable_partial_rollout=True))


def test_a_hang_never_ends_by_itself() -> None:
    engine = SimulatedEngine(hang_rate=1.0)
    with pytest.raises(SimulationStuck, match=r"rollout 0: .*engine.py:\d+ in generate"):
        simulate.run(engine.generate_group([sample()]))


def test_a_hang_ends_with_a_pause_and_its_continuation_gets_past_it() -> None:
    engine = SimulatedEngine(hang_rate=1.0, lengths=EXACTLY_100)

    async def main() -> list[RolloutState]:
        return await generate_with_pauses(engine, group_of(10), [1000])

    assert [ids_of(state) for state in simulate.run(main)] == [
        tokens(0, rollout_id, 0, 0, 100).tolist() for rollout_id in range(10)
    ]
    assert engine.figures().tokens_generated == 1000


def test_a_hang_that_ignores_a_pause_ends_with_a_cancel() -> None:
    engine = SimulatedEngine(hang_rate=1.0, lengths=EXACTLY_100, ignores_pause=True)

    async def main() -> RolloutState:
        state = sample()
        under_way = asyncio.create_task(engine.generate_group([state]))
        await asyncio.sleep(1000)
        await engine.pause()
        await asyncio.sleep(1000)
        assert not under_way.done()
        under_way.cancel()
        await asyncio.wait([under_way])
        return state

    state = simulate.run(main)
    assert state.status is Status.ABORTED
    assert 0 < len(ids_of(state)) <= 100


# --- figures and settings -------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    slots=st.none() | st.integers(1, 5),
    events=st.lists(st.tuples(st.floats(0, 20), st.sampled_from(["pause", "cancel", "weights"])), max_size=8),
)
def test_whatever_happens_the_figures_add_up(seed: int, slots: int | None, events: list[tuple[float, str]]) -> None:
    engine = SimulatedEngine(seed=seed, slots=slots, failure_rate=0.1, hang_rate=0.1)

    async def main() -> None:
        for after_s, event in events:
            group = group_of(6)
            under_way = asyncio.create_task(engine.generate_group(group, enable_partial_rollout=True))
            await asyncio.sleep(after_s)
            if event == "weights":
                engine.set_weights(engine.model_step + 1)
                await asyncio.sleep(after_s)
            if event == "cancel":
                under_way.cancel()
            else:
                await engine.pause()
            await asyncio.wait([under_way])
            await engine.resume()
            check_group(group, "math")
            for state in group:
                assert sum(run for _, run in state.version_spans) == len(ids_of(state))
        figures = engine.figures()
        ended = figures.samples_finished + figures.samples_aborted + figures.samples_failed
        assert figures.samples_started == ended <= 6 * len(events)
        assert figures.tokens_generated <= figures.busy_s * 100 + 1e-6
        assert not slots or figures.busy_s <= slots * now() + 1e-6
        assert not engine._decoding
        assert not engine._waiting

    simulate.run(main, seed=seed)


def test_figures_count_what_is_under_way() -> None:
    engine = SimulatedEngine(lengths=EXACTLY_100)

    async def main() -> None:
        under_way = asyncio.create_task(engine.generate_group(group_of(4)))
        await asyncio.sleep(0.5)
        figures = engine.figures()
        assert (figures.samples_started, figures.samples_finished, figures.busy_s) == (4, 0, 2.0)
        assert figures.idle_share(8, 0.5) == 0.5
        await under_way

    simulate.run(main)


def test_the_reward_is_given_to_what_has_finished() -> None:
    engine = SimulatedEngine(lengths=EXACTLY_100, reward=lambda state: len(ids_of(state)) / 50)

    async def main() -> None:
        group = group_of(2)
        under_way = asyncio.create_task(engine.generate_group(group))
        await asyncio.sleep(0.5)
        await engine.pause()
        assert [state.reward for state in await under_way] == [None, None]
        await engine.resume()
        assert [state.reward for state in await engine.generate_group(group)] == [{"score": 2.0}] * 2

    simulate.run(main)


@pytest.mark.parametrize(
    "build",
    [
        lambda: SimulatedEngine(failure_rate=1.5),
        lambda: SimulatedEngine(hang_rate=-0.1),
        lambda: SimulatedEngine(tokens_per_second=0),
        lambda: SimulatedEngine(abort_latency_s=-1),
        lambda: LongTail(median=0),
        lambda: LongTail(long_share=2),
    ],
)
def test_settings_that_cannot_be_are_refused(build: type[SimulatedEngine]) -> None:
    with pytest.raises(InvalidConfig):
        build()
