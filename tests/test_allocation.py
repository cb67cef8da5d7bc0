"""How a batch is shared among tasks: exact over time, whatever the weights, however small the batch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import InvalidConfig, InvalidInput
from forebay.manager.schedule import Credits, allocate, check_weights, load_credits, save_credits
from tests.support import calls_of

WEIGHTS = st.lists(
    st.one_of(st.integers(0, 100), st.sampled_from([0.1, 0.25, 1.5, 1e-3, 1 / 3])), min_size=1, max_size=9
).filter(any)


def named(weights: list[float]) -> dict[str, float]:
    return {f"task{number}": weight for number, weight in enumerate(weights)}


def shares(weights: Mapping[str, float]) -> dict[str, Fraction]:
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    return {name: weight / sum(exact.values()) for name, weight in exact.items()}


# --- the rule -------------------------------------------------------------------------------------------


def test_seven_over_one_two_and_nothing() -> None:
    sizes, _ = allocate(7, {"b": 1, "a": 2, "c": 0}, {})
    assert sizes == {"a": 5, "b": 2, "c": 0}
    assert list(sizes) == ["b", "a", "c"]


def test_ties_go_in_task_order() -> None:
    assert allocate(1, {"b": 1, "a": 1}, {})[0] == {"b": 1, "a": 0}
    assert allocate(2, {"z": 1, "y": 1, "x": 1}, {})[0] == {"z": 1, "y": 1, "x": 0}


def test_what_one_step_lacks_the_next_one_gives() -> None:
    """The reference shares every batch anew: of three tasks and a batch of one, two never get a seat."""
    credits: Credits = {}
    order = []
    for _ in range(6):
        sizes, credits = allocate(1, {"a": 1, "b": 1, "c": 1}, credits)
        order += [name for name, seats in sizes.items() if seats]
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_a_batch_of_nothing_changes_nothing() -> None:
    credits = {"a": Fraction(1, 3), "b": Fraction(-1, 3)}
    assert allocate(0, {"a": 1, "b": 2}, credits) == ({"a": 0, "b": 0}, credits)


def test_credits_are_those_of_the_caller() -> None:
    credits: Credits = {}
    allocate(3, {"a": 1, "b": 2}, credits)
    assert credits == {}


@given(WEIGHTS, st.lists(st.integers(0, 12), min_size=1, max_size=30))
@settings(max_examples=150, deadline=None)
def test_the_mix_is_right_after_every_step(weights: list[float], batches: list[int]) -> None:
    """Less than a seat ahead of its share, at most 1/2 + ... + 1/n seats behind it, at any moment."""
    by_name = named(weights)
    behind = sum((Fraction(1, k) for k in range(2, sum(1 for weight in weights if weight) + 1)), Fraction(0))
    credits: Credits = {}
    given_seats = dict.fromkeys(by_name, 0)
    for batch in batches:
        sizes, credits = allocate(batch, by_name, credits)
        assert sum(sizes.values()) == batch
        given_seats = {name: given_seats[name] + sizes[name] for name in by_name}
        for name, share in shares(by_name).items():
            ahead = given_seats[name] - share * sum(given_seats.values())
            assert -behind <= ahead < 1
            assert credits[name] == -ahead
            assert by_name[name] or not given_seats[name]
    assert sum(credits.values()) == 0


def test_four_tasks_can_be_more_than_a_seat_behind_and_never_more_than_the_bound() -> None:
    """A bound of one seat would not hold; this is why the bound is what it is."""
    weights = {"a": 7.0, "b": 100.0, "c": 100.0, "d": 1.0}
    credits: Credits = {}
    worst = Fraction(0)
    for _ in range(208):
        _, credits = allocate(1, weights, credits)
        worst = max(worst, *credits.values())
    assert 1 < worst <= Fraction(1, 2) + Fraction(1, 3) + Fraction(1, 4)


@given(WEIGHTS, st.integers(1, 7))
@settings(max_examples=100, deadline=None)
def test_after_as_many_seats_as_the_shares_have_in_common_nobody_is_owed(weights: list[float], batch: int) -> None:
    by_name = named([float(round(weight)) for weight in weights] + [1.0])
    total = int(sum(by_name.values()))
    credits: Credits = {}
    seats = dict.fromkeys(by_name, 0)
    for _ in range(total):  # total x batch seats: a multiple of the total
        sizes, credits = allocate(batch, by_name, credits)
        seats = {name: seats[name] + sizes[name] for name in by_name}
    assert seats == {name: weight * batch for name, weight in by_name.items()}
    assert not any(credits.values())


def test_steps_make_no_difference_only_seats_do() -> None:
    weights = {"a": 3, "b": 0.7, "c": 2}
    whole, _ = allocate(60, weights, {})
    credits: Credits = {}
    seats = dict.fromkeys(weights, 0)
    for batch in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 5):
        sizes, credits = allocate(batch, weights, credits)
        seats = {name: seats[name] + sizes[name] for name in weights}
    assert seats == whole


def test_nothing_is_lost_to_rounding_over_a_million_seats() -> None:
    weights = {"a": 0.1, "b": 0.2, "c": 0.7}
    credits: Credits = {}
    seats = dict.fromkeys(weights, 0)
    for _ in range(1_000):
        sizes, credits = allocate(1_000, weights, credits)
        seats = {name: seats[name] + sizes[name] for name in weights}
    assert seats == {"a": 100_000, "b": 200_000, "c": 700_000}


# --- other weights, other tasks -------------------------------------------------------------------------


def test_credits_were_counted_in_weights_and_starved_a_task_after_these_were_scaled_down() -> None:
    """Weights of {200, 100} in one run and {2, 1} in the next are the same mix: no debt of a hundred seats."""
    _, credits = allocate(1, {"a": 200, "b": 100}, {})
    assert credits == {"a": Fraction(-1, 3), "b": Fraction(1, 3)}
    sizes, _ = allocate(30, {"a": 2, "b": 1}, credits)
    assert sizes == {"a": 20, "b": 10}


def test_a_task_that_has_no_credit_yet_begins_with_none() -> None:
    sizes, credits = allocate(3, {"a": 1, "b": 1, "new": 1}, {"a": Fraction(0), "b": Fraction(0)})
    assert sizes == {"a": 1, "b": 1, "new": 1}
    assert set(credits) == {"a", "b", "new"}


def test_a_credit_of_a_task_without_weight_takes_no_seat() -> None:
    sizes, credits = allocate(2, {"a": 1, "off": 0}, {"a": Fraction(-5), "off": Fraction(5)})
    assert sizes == {"a": 2, "off": 0}
    assert credits["off"] == 5


# --- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({}, "there is no task"),
        ({"a": 0, "b": 0.0}, "the weights of all tasks (a, b) are 0"),
        ({"a": 1, "b": -0.5}, "the weight of task 'b' is -0.5"),
        ({"a": float("nan")}, "the weight of task 'a' is nan"),
        ({"a": float("inf")}, "the weight of task 'a' is inf"),
        ({"a": True}, "the weight of task 'a' is True"),
        ({"a": "1"}, "the weight of task 'a' is '1'"),
        ({"a": None}, "the weight of task 'a' is None"),
    ],
)
def test_weights_that_make_no_mix_are_refused_by_name(weights: dict[str, float], says: str) -> None:
    for refuse in (lambda: check_weights(weights), lambda: allocate(1, weights, {})):
        with pytest.raises(InvalidConfig) as caught:
            refuse()
        assert says in str(caught.value)


@pytest.mark.parametrize("batch_size", [-1, 1.5, None, True])
def test_a_size_that_is_none_is_refused(batch_size: int) -> None:
    with pytest.raises(InvalidInput, match="batch_size is"):
        allocate(batch_size, {"a": 1}, {})


# --- saving ---------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(max_size=3), st.fractions(), max_size=4))
def test_credits_survive_saving(credits: dict[str, Fraction]) -> None:
    assert load_credits(save_credits(credits)) == credits


@pytest.mark.parametrize("credit", ["1e999999999", "1.5", "x", "", " 1/3", "1/-3", 3, None, "9" * 1001, "１/3"])
def test_a_saved_credit_that_is_none_is_refused(credit: str) -> None:
    with pytest.raises(ValueError, match="the credit of task 'a'"):
        load_credits({"a": credit})


def test_a_saved_credit_over_nothing_is_refused() -> None:
    with pytest.raises(ZeroDivisionError):
        load_credits({"a": "1/0"})


def test_a_large_batch_of_many_tasks_does_not_hold_the_event_loop() -> None:
    chance = random.Random(0)
    weights = {f"task{number}": chance.random() for number in range(16)}
    credits = allocate(3, weights, {})[1]
    once = calls_of(lambda: allocate(1, weights, credits))
    assert calls_of(lambda: allocate(1024, weights, credits)) < once + 2 * 1024
