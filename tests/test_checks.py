"""Which groups and integers are refused, and what the error says about them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from forebay.core.rollout import COLUMNS, RolloutState, Status
from forebay.core.validate import check_group, checked_integer
from forebay.errors import InvalidGroup, InvalidInput


class Tensor:
    """Like a tensor of another library: it has a length and a shape, but is not a numpy array."""

    shape = (2,)

    def __len__(self) -> int:
        return 2


def sample(**fields: Any) -> RolloutState:
    return RolloutState(**{"message": [], "group_id": 3, "rollout_id": 7, **fields})


def refused(group: Any, message: str) -> None:
    """The group is refused, with a message that contains this one."""
    with pytest.raises(InvalidGroup, match=re.escape(message)) as caught:
        check_group(group, "math")
    assert isinstance(caught.value, ValueError)


# --- who belongs to a group ---------------------------------------------------------------------------


def test_a_group_is_known_by_the_id_and_attempt_that_its_members_share() -> None:
    group = [sample(task_name="math", rollout_id=rollout_id, attempt=2) for rollout_id in range(4)]
    assert check_group(group, "math") == (3, 2)


def test_a_group_needs_neither_ids_nor_a_task() -> None:
    assert check_group([RolloutState(message=[]), RolloutState(message=[])], "math") == (None, None)


def test_a_group_without_members_is_refused() -> None:
    refused([], "task 'math' has no members")


def test_members_must_be_samples() -> None:
    refused([{"message": []}], "first member is a dict")
    refused([sample(), "text"], "one member is a str")


def test_members_of_two_groups_are_refused() -> None:
    refused([sample(), sample(group_id=4, rollout_id=8)], "groups 3 and 4 are mixed")


def test_a_group_of_which_only_some_have_a_group_id_is_refused() -> None:
    refused([sample(), sample(group_id=None, rollout_id=8)], "groups 3 and None are mixed")


def test_a_member_of_another_task_is_refused() -> None:
    group = [sample(task_name="math"), sample(task_name="code", rollout_id=8)]
    refused(group, "rollout 8 of group 3 belongs to task 'code', but was put for task 'math'")


def test_members_of_two_attempts_are_refused() -> None:
    refused([sample(attempt=1), sample(attempt=2, rollout_id=8)], "group 3 come from attempts 1 and 2")


def test_a_rollout_that_appears_twice_is_refused() -> None:
    refused([sample(), sample(rollout_id=8), sample()], "rollout_id 7 (segment 0) appears twice")


def test_a_segment_that_appears_twice_is_refused() -> None:
    group = [sample(segment=0), sample(segment=1), sample(segment=1)]
    refused(group, "rollout_id 7 (segment 1) appears twice")


def test_segments_of_one_rollout_are_accepted() -> None:
    group = [sample(segment=0), sample(segment=1), sample(rollout_id=8)]
    assert check_group(group, "math") == (3, None)


def test_a_group_of_which_only_some_have_a_rollout_id_is_refused() -> None:
    refused([sample(), sample(rollout_id=None)], "group 3: only some members have a rollout_id")


@pytest.mark.parametrize("group_id", ["3", 3.0, True])
def test_a_group_id_must_be_an_integer(group_id: object) -> None:
    refused([sample(group_id=group_id)], f"group_id is {group_id!r}; expected an integer")


# --- state --------------------------------------------------------------------------------------------


def test_a_status_given_as_a_string_becomes_a_status() -> None:
    state = sample(status="completed")
    check_group([state], "math")
    assert state.status is Status.COMPLETED


@pytest.mark.parametrize("status", ["done", "COMPLETED", None, 1])
def test_an_unknown_status_is_refused(status: object) -> None:
    refused([sample(status=status)], f"rollout 7 of group 3 has status {status!r}; expected one of init, completed")


@pytest.mark.parametrize("field", ["num_tries", "segment", "seq_staleness"])
def test_counts_below_0_are_refused(field: str) -> None:
    refused(
        [sample(), sample(rollout_id=8, **{field: -1})],
        f"{field} of rollout 8 of group 3 is -1; expected an integer of at least 0",
    )
    check_group([sample(**{field: 0})], "math")


@pytest.mark.parametrize("field", ["num_tries", "segment", "seq_staleness"])
@pytest.mark.parametrize("value", ["1", None])
def test_counts_that_are_not_integers_are_refused(field: str, value: object) -> None:
    refused([sample(**{field: value})], field)


# --- columns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(
    ("content", "described"),
    [
        (np.zeros((2, 1)), "numpy array of shape (2, 1)"),
        (np.array(2), "numpy array of shape ()"),
        ((1, 2), "tuple"),
        ("ab", "str"),
        (Tensor(), "Tensor"),
    ],
    ids=["2-d array", "0-d array", "tuple", "str", "tensor"],
)
def test_a_column_is_a_list_or_a_flat_array(column: str, content: object, described: str) -> None:
    refused([sample(**{column: content})], f"{column} of rollout 7 of group 3 is a {described}; expected a list")


@pytest.mark.parametrize("as_column", [list, np.array])
def test_columns_of_equal_lengths_are_accepted(as_column: Any) -> None:
    state = sample(
        prompt_ids=as_column([1]),
        tokens=as_column([1, 2, 3]),
        response_ids=as_column([2, 3]),
        logprobs=as_column([-0.5, -0.5]),
        response_mask=as_column([1, 0]),
        version_spans=((0, 1), (4, 1)),
    )
    assert check_group([state], "math") == (3, None)


@pytest.mark.parametrize("column", ["logprobs", "response_mask"])
@pytest.mark.parametrize("entries", [0, 1, 3])
def test_columns_beside_the_response_must_have_its_length(column: str, entries: int) -> None:
    expected = f"{column} of rollout 7 of group 3 has {entries} items but response_ids has 2; the lengths must match"
    refused([sample(response_ids=[1, 2], **{column: [1] * entries})], expected)
    refused([sample(response_ids=np.arange(2), **{column: np.ones(entries)})], expected)


@pytest.mark.parametrize(
    ("column", "content"), [("logprobs", [0.0]), ("response_mask", [1]), ("version_spans", ((1, 1),))]
)
def test_columns_without_a_response_are_refused(column: str, content: object) -> None:
    refused([sample(**{column: content})], f"{column} of rollout 7 of group 3 has 1 items, but it has no response_ids")


def test_logprobs_of_an_agent_trace_may_cover_the_whole_trace() -> None:
    state = sample(response_ids=[1], input_ids=[1, 2, 3], labels=[1, 2, 3], logprobs=[0.0] * 3)
    assert check_group([state], "math") == (3, None)


def test_labels_and_input_ids_must_have_the_same_length() -> None:
    refused(
        [sample(input_ids=[1, 2, 3], labels=[1, 2])],
        "labels of rollout 7 of group 3 has 2 items but input_ids has 3; the lengths must match",
    )


# --- versions -----------------------------------------------------------------------------------------


def test_fewer_versions_than_tokens_are_accepted() -> None:
    assert check_group([sample(response_ids=[1, 2, 3], version_spans=((4, 1),))], "math") == (3, None)


def test_more_versions_than_tokens_are_refused() -> None:
    state = sample(response_ids=[1, 2], version_spans=((1, 2), (4, 1)))
    refused([state], "version_spans of rollout 7 of group 3 covers 3 tokens, but it has only 2")


@pytest.mark.parametrize("span", [(-1, 1), (1, 0), (1, -2), (1.5, 1), ("1", 1), (1, True)])
def test_a_span_is_a_step_from_0_and_a_number_of_tokens_from_1(span: tuple[object, object]) -> None:
    refused(
        [sample(response_ids=[1, 2], version_spans=(span,))], f"version_spans of rollout 7 of group 3 is ({span!r},)"
    )


@pytest.mark.parametrize("spans", [(3,), ((3,),), ((3, 1, 1),)])
def test_versions_that_are_not_spans_are_refused(spans: object) -> None:
    refused([sample(response_ids=[1, 2], version_spans=spans)], "version_spans of rollout 7 of group 3")


# --- integers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [5, np.int64(5), np.uint8(5), np.int32(5)])
def test_integers_of_any_kind_become_ints(value: object) -> None:
    number = checked_integer("groups", value)
    assert number == 5
    assert type(number) is int


@pytest.mark.parametrize("value", [True, np.True_, 5.0, np.float64(5), "5", None, [5], np.array([5])])
def test_values_that_are_not_integers_are_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match=re.escape(f"groups is {value!r}; expected an integer")):
        checked_integer("groups", value)


def test_an_integer_may_have_a_least_value() -> None:
    assert checked_integer("groups", 1, least=1) == 1
    assert checked_integer("groups", -1) == -1
    with pytest.raises(InvalidInput, match="groups is 0; expected an integer of at least 1"):
        checked_integer("groups", 0, least=1)


@pytest.mark.parametrize("name", ["group_id", "rollout_id", "attempt"])
def test_ids_fit_into_64_bits(name: str) -> None:
    refused([sample(**{name: 10**30})], f"{name} is {10**30}")


@pytest.mark.parametrize("group", [{"a": 1}, "text", None, 3])
def test_a_group_must_be_a_list_or_a_tuple(group: object) -> None:
    refused(group, f"got a {type(group).__name__}")
