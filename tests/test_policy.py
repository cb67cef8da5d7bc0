"""In which order groups leave, and what a policy of the user's own may choose."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core import policy
from forebay.core.ledger import Place, Record
from forebay.core.policy import (
    ARRIVAL,
    Column,
    FIFOReplayPolicy,
    FreshestReplayPolicy,
    Order,
    PriorityReplayPolicy,
    ReplayPolicy,
    StalenessReplayPolicy,
    checked_choice,
    order_key,
)
from forebay.core.rollout import Status
from forebay.errors import ForebayError, InvalidConfig, PolicyError

_COUNTS = ["given_staleness", "group_id", "samples", "tokens", "bytes", "num_tries", "deliveries"]
_ORDERABLE = ["oldest_step", "newest_step", *_COUNTS, "reward", "priority", "created_at"]


_ZERO = dict.fromkeys(("samples", "tokens", "bytes", "num_tries", "given_staleness", "created_at", "moved_at"), 0)
_NULL = dict.fromkeys(("reward", "oldest_step", "newest_step", "token_step"))


def record(uid: int, **fields: Any) -> Record:
    """A record that arrived as the uid-th, with everything else at 0 or null."""
    known = {"timestamp_id": uid, "group_id": uid, "task_name": "math", "status": Status.COMPLETED}
    return Record(**{"uid": uid, "place": Place.BUFFERED, **known, **_ZERO, **_NULL, **fields})


def uids(order: Order, records: Sequence[Record]) -> list[int]:
    return [row.uid for row in sorted(records, key=order_key(order))]


def plainly_sorted(order: Order, records: Sequence[Record]) -> list[int]:
    """By arrival, then stably by each column from the last to the first, groups without a value behind."""
    rows = sorted(records, key=lambda row: row.timestamp_id)
    for column in reversed(order.columns):
        known = [row for row in rows if getattr(row, column.name) is not None]
        unknown = [row for row in rows if getattr(row, column.name) is None]
        name, descending = column.name, column.descending
        rows = sorted(known, key=lambda row: getattr(row, name), reverse=descending) + unknown
    return [row.uid for row in rows]


_STEPS = st.none() | st.integers(0, 3)
_ORDERS = st.lists(st.builds(Column, st.sampled_from(_ORDERABLE), st.booleans()), max_size=3).map(
    lambda columns: Order(tuple(columns))
)


@st.composite
def _records(draw: st.DrawFn) -> list[Record]:
    arrivals = draw(st.lists(st.integers(1, 20), unique=True, max_size=10))
    return [
        record(
            uid,
            timestamp_id=arrival,
            oldest_step=draw(_STEPS),
            newest_step=draw(_STEPS),
            reward=draw(st.sampled_from([None, -0.5, 0.0, 1.0])),
            priority=draw(st.sampled_from([-1.5, 0.0, 2.0])),
            given_staleness=draw(st.integers(0, 2)),
            group_id=draw(st.integers(-2, 2)),
            tokens=draw(st.integers(0, 2)),
        )
        for uid, arrival in enumerate(arrivals)
    ]


@settings(deadline=None, max_examples=300)
@given(order=_ORDERS, records=_records())
def test_order_keys_sort_like_a_plain_sort_by_column(order: Order, records: list[Record]) -> None:
    assert uids(order, records) == plainly_sorted(order, records)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("name", ["oldest_step", "newest_step", "reward"])
def test_groups_without_a_value_come_last_in_both_directions(name: str, descending: bool) -> None:
    records = [record(1), record(2, **{name: 7}), record(3, **{name: 0}), record(4, **{name: 9})]
    expected = [4, 2, 3, 1] if descending else [3, 2, 4, 1]
    assert uids(Order((Column(name, descending),)), records) == expected


@pytest.mark.parametrize("order", [ARRIVAL, StalenessReplayPolicy.order, PriorityReplayPolicy.order])
def test_ties_resolve_by_arrival(order: Order) -> None:
    records = [record(1, timestamp_id=30), record(2, timestamp_id=10), record(3, timestamp_id=20)]
    assert uids(order, records) == [2, 3, 1]


_WAITING = [
    record(1, oldest_step=4, newest_step=9, priority=1.0),
    record(2, given_staleness=1),
    record(3, oldest_step=2, newest_step=5),
    record(4, given_staleness=6, priority=-1.0),
    record(5, oldest_step=4, newest_step=5, priority=3.0),
]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (FIFOReplayPolicy(), [1, 2, 3, 4, 5]),
        (ReplayPolicy(), [1, 2, 3, 4, 5]),
        (StalenessReplayPolicy(), [3, 1, 5, 4, 2]),
        (FreshestReplayPolicy(), [1, 3, 5, 2, 4]),
        (PriorityReplayPolicy(), [5, 1, 2, 3, 4]),
    ],
    ids=repr,
)
def test_the_order_of_each_policy(chosen: ReplayPolicy, expected: list[int]) -> None:
    assert uids(chosen.order, _WAITING) == expected
    assert chosen.choose is None


def test_a_policy_prints_as_the_call_that_makes_it() -> None:
    assert repr(PriorityReplayPolicy()) == "PriorityReplayPolicy()"


def test_policies_are_compared_by_type_and_order() -> None:
    one, same, other = FIFOReplayPolicy(), FIFOReplayPolicy(), ReplayPolicy()
    assert one == same
    assert one != other


@pytest.mark.parametrize("name", _ORDERABLE)
def test_every_number_of_a_record_can_be_ordered_by(name: str) -> None:
    assert uids(Order((Column(name, True),)), [record(1, **{name: 1}), record(2, **{name: 2})]) == [2, 1]


@pytest.mark.parametrize("name", ["staleness", "status", "task_name", "uid", "tags.level", ""])
def test_a_column_that_cannot_be_ordered_by_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"cannot order by '{name}'; expected one of oldest_step, newest_step"):
        Column(name)


# --- policies of the user's own -----------------------------------------------------------------------


def test_a_choice_among_the_rows_is_taken_as_it_is() -> None:
    asked: list[tuple[list[int], int]] = []

    def choose(rows: Sequence[Record], n: int) -> Sequence[int]:
        asked.append(([row.uid for row in rows], n))
        return (5, 2)

    assert checked_choice(choose, _WAITING, 3) == [5, 2]
    assert asked == [([1, 2, 3, 4, 5], 3)]


def test_choosing_nothing_is_allowed() -> None:
    assert checked_choice(lambda rows, n: [], _WAITING, 3) == []


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ([1, 17], "uid 17, which is not among its 5 rows"),
        (["1"], "uid '1', which is not among"),
        ([2, 1, 2], r"a uid twice: \[2, 1, 2\]"),
        ([1, 2, 3, 4], "4 uids; expected at most 3"),
    ],
)
def test_a_choice_outside_of_the_rows_is_an_error(choice: list[Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        checked_choice(lambda rows, n: choice, _WAITING, 3)
    assert isinstance(caught.value, ForebayError)


def test_the_examples_in_the_module_hold() -> None:
    result = doctest.testmod(policy)
    assert result.failed == 0
    assert result.attempted > 0
