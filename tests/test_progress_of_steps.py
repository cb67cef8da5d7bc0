"""Which steps are planned, what is owed for them, and what of that survives: a plan is never counted twice."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import DamagedData, InvalidInput
from forebay.manager.schedule import ProduceProgress


def filled(weights: Mapping[str, float] | None = None, *, upto: int = 5, consumed: int = 2, batch_size: int = 1) -> Any:
    """Progress whose producer filled the steps up to one, and whose consumer is at the one after `consumed`."""
    progress = ProduceProgress({"math": 1.0} if weights is None else weights)
    for step in range(1, upto + 1):
        progress.plan(batch_size, step)
        progress.skip_to(step)
        if step <= consumed:
            progress.consume(step)
    return progress


def numbers(progress: ProduceProgress) -> tuple[int, int, int, int, int]:
    """Next consumer, future, consumed, target, filled to."""
    return (
        progress.next_consumer_step,
        progress.producer_future_step,
        sum(progress.consumed.values()),
        sum(progress.target.values()),
        progress.target_upto,
    )


def through_json(state: dict[str, Any]) -> Any:
    return msgspec.json.decode(msgspec.json.encode(state))


# --- the vector -----------------------------------------------------------------------------------------


def test_targets_are_set_back_so_that_the_producer_owes_exactly_one_batch() -> None:
    progress = filled()
    assert numbers(progress) == (3, 5, 2, 5, 5)
    progress.forget_planned()
    assert numbers(progress) == (3, 3, 2, 2, 2)
    progress.plan(1, 3)
    assert progress.owed("math", 3) == 1


def test_a_new_run_has_planned_nothing() -> None:
    progress = ProduceProgress({"math": 1.0, "code": 2.0})
    assert numbers(progress) == (1, 1, 0, 0, 0)
    assert not progress.begun


# --- planning -------------------------------------------------------------------------------------------


def test_a_step_is_planned_once() -> None:
    progress = ProduceProgress({"a": 2.0, "b": 1.0})
    first = progress.plan(2, 1)
    assert progress.plan(2, 1) == first == {"a": 1, "b": 1}
    assert progress.plan(2, 2) == {"a": 2, "b": 0}
    assert progress.plan(2, 3) == {"a": 1, "b": 1}
    assert {name: progress.owed(name, 2) for name in "ab"} == {"a": 3, "b": 1}
    assert {name: progress.owed(name, 9) for name in "ab"} == {"a": 4, "b": 2}
    assert progress.begun


def test_an_acknowledged_step_is_refused_with_the_next_one() -> None:
    progress = filled()
    with pytest.raises(InvalidInput, match="train step 2 was already acknowledged; the next one is 3"):
        progress.plan(1, 2)


def test_a_planned_step_keeps_its_size_until_the_trainer_asks_for_another() -> None:
    progress = filled(batch_size=4)
    assert progress.plan(5, 3) == {"math": 4}
    assert progress.plan(5, 3, leased=()) == {"math": 5}


def test_the_last_groups_of_the_data_are_for_the_step_that_is_asked_for() -> None:
    progress = ProduceProgress({"math": 1.0})
    progress.end_task("math", 4, leased=())
    assert progress.plan(4, 2) == {"math": 4}, "a producer was faster"
    assert progress.plan(4, 1, leased=()) == {"math": 4}
    assert progress.sizes(2) == {"math": 0}


def test_a_leased_step_keeps_its_size_and_is_counted_when_the_batch_size_changes() -> None:
    progress = ProduceProgress({"math": 1.0})
    for step in (1, 2, 3):
        progress.plan(4, step)
    progress.change_batch_size(2, leased={1})
    assert (sorted(progress.planned), progress.producer_future_step) == ([1], 2)
    progress.consume(1)
    assert progress.consumed == {"math": 4}
    assert progress.plan(2, 2) == {"math": 2}


def test_steps_that_were_left_out_cost_credit_and_a_task_was_never_evaluated() -> None:
    """Every third step of a batch of one fell on the same task."""
    progress = ProduceProgress({"a": 1.0, "b": 1.0, "c": 1.0})
    order = []
    for step in (3, 6, 9, 12):
        order += [name for name, groups in progress.plan(1, step).items() if groups]
        progress.consume(step)
    assert order == ["a", "b", "c", "a"]


def test_a_step_before_one_that_is_planned_can_still_be_planned() -> None:
    progress = ProduceProgress({"a": 1.0, "b": 1.0})
    assert progress.plan(1, 5) == {"a": 1, "b": 0}
    assert progress.plan(1, 3) == {"a": 0, "b": 1}
    assert progress.target_upto == 5
    assert (progress.owed("a", 3), progress.owed("b", 3)) == (0, 1)


def test_going_on_from_a_later_step_never_goes_back() -> None:
    progress = ProduceProgress({"math": 1.0})
    progress.skip_to(7)
    progress.skip_to(4)
    assert (progress.producer_future_step, progress.next_consumer_step) == (7, 1)


def test_another_batch_size_plans_anew_and_the_same_one_changes_nothing() -> None:
    progress = filled({"a": 2.0, "b": 1.0}, batch_size=2)
    before = numbers(progress)
    progress.change_batch_size(2, leased=())
    assert numbers(progress) == before
    progress.change_batch_size(3, leased=())
    assert numbers(progress) == (3, 3, 4, 4, 2)
    assert progress.plan(3, 3) == {"a": 2, "b": 1}


# --- consuming ------------------------------------------------------------------------------------------


def test_a_consumed_step_is_owed_no_more() -> None:
    progress = filled(batch_size=4)
    assert progress.owed("math", 5) == 12
    progress.consume(3)
    assert (progress.owed("math", 5), progress.consumed, progress.next_consumer_step) == (8, {"math": 12}, 4)


def test_the_producer_is_never_behind_the_consumer() -> None:
    progress = ProduceProgress({"math": 1.0})
    progress.plan(1, 1)
    progress.consume(1)
    assert progress.producer_future_step == 2


def test_steps_that_the_consumer_left_out_are_owed_no_more_and_not_consumed() -> None:
    progress = filled(batch_size=4)
    progress.consume(5)
    assert numbers(progress) == (6, 6, 12, 12, 5)


def test_an_acknowledgement_that_failed_is_undone() -> None:
    progress = filled({"a": 2.0, "b": 1.0}, batch_size=2)
    before, planned = numbers(progress), dict(progress.planned)
    progress.undo_consume(progress.consume(4))
    assert numbers(progress) == (before[0], *before[1:])
    assert progress.planned == planned
    assert progress.plan(2, 3) == {"a": 1, "b": 1}


def test_only_the_last_acknowledgement_can_be_undone() -> None:
    progress = filled()
    third, fourth = progress.consume(3), progress.consume(4)
    after = numbers(progress)
    progress.undo_consume(third)
    assert numbers(progress) == after
    progress.undo_consume(fourth)
    assert numbers(progress) == (4, 5, 3, 5, 5)


def test_a_step_consumed_twice_counts_once() -> None:
    progress = filled()
    progress.consume(3)
    once = numbers(progress)
    progress.consume(3)
    assert numbers(progress) == once


def test_forgetting_takes_the_credits_back_too() -> None:
    progress = filled({"a": 2.0, "b": 1.0}, upto=6, consumed=2)
    mix = [progress.plan(1, step) for step in (3, 4, 5, 6)]
    progress.forget_planned()
    assert [progress.plan(1, step) for step in (3, 4, 5, 6)] == mix


def test_forgetting_nothing_changes_no_credit() -> None:
    progress = filled({"a": 2.0, "b": 1.0}, upto=2, consumed=2)
    credits = dict(progress.credits)
    progress.forget_planned()
    assert progress.credits == credits


# --- saving ---------------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([1.0, 2.0, 0.3]), min_size=1),
    st.integers(1, 5),
    st.lists(st.booleans(), min_size=1, max_size=12),
)
@settings(max_examples=80, deadline=None)
def test_what_is_saved_goes_on_as_if_it_had_not_been(weights: dict[str, float], batch: int, acks: list[bool]) -> None:
    progress = ProduceProgress(weights)
    step = 0
    for ack in acks:
        progress.plan(batch, progress.target_upto + 1)
        if ack:
            step += 1
            progress.consume(step)
    other = ProduceProgress(weights)
    assert other.load_state(through_json(progress.state(step))) == set()
    assert numbers(other) == numbers(progress)
    assert (other.planned, other.consumed, other.credits) == (progress.planned, progress.consumed, progress.credits)
    upto = progress.target_upto + 3
    for number in range(progress.next_consumer_step, upto + 1):
        assert other.plan(batch, number) == progress.plan(batch, number)


def test_steps_that_are_in_the_weights_are_saved_as_consumed() -> None:
    progress = filled(batch_size=4)
    other = ProduceProgress({"math": 1.0})
    other.load_state(progress.state(4))
    assert numbers(other) == (5, 5, 16, 20, 5)
    assert numbers(progress) == (3, 5, 8, 20, 5), "saving changes nothing"
    other.load_state(progress.state(9))
    assert numbers(other) == (10, 10, 20, 20, 9)


def test_a_task_that_was_removed_is_named_and_what_was_planned_is_planned_anew() -> None:
    progress = filled({"math": 1.0, "code": 1.0}, batch_size=2)
    other = ProduceProgress({"math": 1.0})
    assert other.load_state(through_json(progress.state(2))) == {"code"}
    assert (other.consumed, other.planned, other.producer_future_step) == ({"math": 2}, {}, 3)
    assert set(other.credits) == {"math"}
    assert other.plan(2, 3) == {"math": 2}


def test_a_task_that_was_added_begins_with_nothing_and_gets_its_share() -> None:
    progress = filled({"math": 1.0}, batch_size=2)
    other = ProduceProgress({"math": 1.0, "code": 1.0})
    assert other.load_state(through_json(progress.state(2))) == set()
    assert (other.consumed, other.planned) == ({"math": 4, "code": 0}, {})
    assert other.plan(2, 3) == {"math": 1, "code": 1}


def test_a_task_whose_weight_is_now_0_still_had_to_fill_what_was_planned_before() -> None:
    progress = filled({"math": 1.0, "code": 1.0}, batch_size=2)
    other = ProduceProgress({"math": 1.0, "code": 0.0})
    other.load_state(through_json(progress.state(2)))
    assert other.owed("code", 9) == 0
    assert other.plan(2, 3) == {"math": 2, "code": 0}


GOOD = filled().state(2)


@pytest.mark.parametrize(
    "change",
    [
        {"next_consumer_step": None},
        {"next_consumer_step": "third"},
        {"next_consumer_step": 0},
        {"next_consumer_step": 2**70},
        {"producer_future_step": -1},
        {"consumed": [2]},
        {"consumed": {"math": -2}},
        {"planned": {"three": {"sizes": {"math": 1}, "credits_before": {}}}},
        {"planned": {"3": {"sizes": {"math": -1}, "credits_before": {}}}},
        {"planned": {"3": {"sizes": {"math": 1}}}},
        {"planned": {"3": {"sizes": {"math": 1}, "credits_before": {"math": "a third"}}}},
        {"planned": {"2": {"sizes": {"math": 1}, "credits_before": {}}}},
        {"planned": {"0": {"sizes": {"math": 1}, "credits_before": {}}}},
        {"credits": {"math": "1/0"}},
        {"credits": {"math": "1e999999999"}},
        {"credits": None},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    progress = filled({"math": 1.0}, upto=4)
    before = copy.deepcopy(vars(progress))
    with pytest.raises(DamagedData, match="the progress in a checkpoint cannot be read"):
        progress.load_state(GOOD | change)
    assert vars(progress) == before


@pytest.mark.parametrize("state", [None, [], "state", 7, {}, {"next_consumer_step": 1}])
def test_what_is_no_state_is_refused(state: object) -> None:
    with pytest.raises(DamagedData):
        ProduceProgress({"math": 1.0}).load_state(state)


def test_a_state_without_credits_is_that_of_a_run_that_planned_nothing() -> None:
    progress = ProduceProgress({"math": 1.0})
    progress.load_state(through_json(ProduceProgress({"math": 1.0}).state(0)))
    assert numbers(progress) == (1, 1, 0, 0, 0)
    assert progress.credits == {}
    assert progress.plan(3, 1) == {"math": 3}
    assert progress.credits == {"math": "0"}
