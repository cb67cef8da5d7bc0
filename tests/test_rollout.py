"""Samples and groups alone: the table of fields, status, versions, resetting, size and reward."""

from __future__ import annotations

import gc
import re
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import ReplayBuffer
from forebay.core.payload import freeze_arrays, group_bytes, shares_prompt
from forebay.core.rollout import (
    COLUMNS,
    DRAWABLE,
    FIELDS,
    ISSUED_FIELDS,
    PROMPT_FIELDS,
    USER_FIELDS,
    Part,
    RolloutState,
    SampleParams,
    Status,
    finish_status,
    group_reward,
    group_status,
    group_tokens,
    reset_response,
    version_spans_of,
    versioned_tokens,
)
from forebay.errors import InvalidGroup, InvalidInput, UnsupportedPayload


def sample(**fields: Any) -> RolloutState:
    return RolloutState(**{"message": [], **fields})


def members(*statuses: Status) -> list[RolloutState]:
    return [sample(status=status) for status in statuses]


# --- status -------------------------------------------------------------------------------------------


def test_statuses_are_their_lower_case_names() -> None:
    assert {status.name: str(status) for status in Status} == {name: name.lower() for name in Status.__members__}


def test_a_status_and_its_string_find_the_same_entry_of_a_dict() -> None:
    assert {Status.FAILED: 1}["failed"] == 1  # type: ignore[index]
    assert {"failed": 1}[Status.FAILED] == 1


def restated_status(statuses: list[Status]) -> Status:
    """The rule as it is written in the design, step by step."""
    if all(status == Status.COMPLETED for status in statuses):
        return Status.COMPLETED
    for status in (Status.FAILED, Status.EXPIRED, Status.ABORTED, Status.FILTERED):
        if status in statuses:
            return status
    return Status.INIT if Status.INIT in statuses else Status.ARCHIVED


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(Status), min_size=1, max_size=6))
def test_a_group_has_the_first_status_that_decides(statuses: list[Status]) -> None:
    assert group_status(members(*statuses)) is restated_status(statuses)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ("completed completed", "completed"),
        ("completed init", "init"),
        ("completed archived", "archived"),
        ("archived archived", "archived"),
        ("archived init", "init"),
        ("init filtered completed", "filtered"),
        ("filtered aborted", "aborted"),
        ("aborted expired completed", "expired"),
        ("archived filtered aborted expired failed init completed", "failed"),
    ],
)
def test_the_status_of_a_group(statuses: str, expected: str) -> None:
    assert group_status(members(*map(Status, statuses.split()))) is Status(expected)


def test_a_group_without_members_has_no_status() -> None:
    with pytest.raises(InvalidGroup, match="without members"):
        group_status([])


@pytest.mark.parametrize("reason", ["stop", "length", "STOP"])
def test_the_finish_reasons_stop_and_length_mean_a_completed_sample(reason: str) -> None:
    assert finish_status(reason) is Status.COMPLETED


def test_the_finish_reason_abort_means_an_aborted_sample() -> None:
    assert finish_status("abort") is Status.ABORTED


@pytest.mark.parametrize("reason", ["content_filter", "error", "tool_calls", "", None])
def test_any_other_finish_reason_is_a_failure(reason: str | None) -> None:
    assert finish_status(reason) is Status.FAILED


def test_the_drawable_statuses_are_those_that_wait_for_another_try() -> None:
    assert DRAWABLE == (Status.INIT, Status.EXPIRED, Status.ABORTED)


# --- the table of fields ------------------------------------------------------------------------------


def stated_types(hint: Any) -> set[type]:
    """The exact types that an annotation allows; empty for Any."""
    if get_origin(hint) in (Union, UnionType):
        return set().union(*map(stated_types, get_args(hint)))
    return set() if hint is Any else {get_origin(hint) or hint}


def test_the_table_has_every_field_in_the_order_of_the_class() -> None:
    assert tuple(FIELDS) == RolloutState.__struct_fields__


@pytest.mark.parametrize("name", FIELDS)
def test_the_table_agrees_with_the_annotations_of_the_class(name: str) -> None:
    field, hint = FIELDS[name], get_type_hints(RolloutState)[name]
    if field.column:
        assert RolloutState.__annotations__[name] == "TokenColumn | None"
        assert set(field.types) == {list, np.ndarray, type(None)}
    else:
        assert set(field.types) == stated_types(hint)
    assert field.of_dicts == ("list[dict[str, Any]]" in RolloutState.__annotations__[name])
    assert field.user_data == ("Any" in RolloutState.__annotations__[name]), "untyped data is the user's"


def test_the_groups_of_fields_follow_from_the_table() -> None:
    assert COLUMNS == ("prompt_ids", "tokens", "response_ids", "logprobs", "response_mask", "input_ids", "labels")
    prompt = ("message", "prompt_ids", "data_source", "reward_model", "mm_info", "tools", "tool_choice")
    assert prompt == PROMPT_FIELDS
    assert set(ISSUED_FIELDS) == {*prompt, "session_id", "sample_params", "extra_fields"}
    response = {"tool_calls", "routed_experts", "reward", "loop_state"}
    assert set(USER_FIELDS) == {*prompt, *response, "extra_fields"} - {"prompt_ids"}
    assert response == {name for name in USER_FIELDS if FIELDS[name].part is Part.RESPONSE}


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.types and name != "issued"])
async def test_put_refuses_a_field_of_a_type_that_the_table_does_not_list(name: str) -> None:
    """The checks that are written out for speed cover every field of the table."""
    group = [sample(), sample()]
    setattr(group[1], name, 1.5)
    with pytest.raises(InvalidInput):
        await ReplayBuffer().put(group, "math")


@pytest.mark.parametrize("name", FIELDS)
def test_samples_share_a_prompt_exactly_if_all_prompt_fields_are_the_same_objects(name: str) -> None:
    one = sample()
    other = one.__copy__()
    assert shares_prompt(one, other)
    setattr(other, name, object())
    assert shares_prompt(one, other) == (name not in PROMPT_FIELDS)


@pytest.mark.parametrize("name", USER_FIELDS)
def test_the_size_of_a_group_counts_every_field_of_user_data(name: str) -> None:
    value: Any = [{"key": b"x" * 100}] if FIELDS[name].of_dicts else {"key": b"x" * 100}
    assert group_bytes([sample(**{name: value})]) >= 100


# --- versions -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 3), max_size=12))
def test_versions_per_token_survive_being_kept_as_runs(steps: list[int]) -> None:
    state = sample()
    state.response_model_steps = steps
    assert state.response_model_steps == steps
    assert sum(run for _, run in state.version_spans) == len(steps)
    neighbours = zip(state.version_spans, state.version_spans[1:], strict=False)
    assert all(left != right for (left, _), (right, _) in neighbours), "runs are as long as they can be"


def test_versions_given_as_numpy_numbers_are_kept_as_plain_ones() -> None:
    state = sample()
    state.response_model_steps = np.array([2, 2, 5])  # type: ignore[assignment]
    assert state.version_spans == ((2, 2), (5, 1))
    assert {type(step) for step, _ in state.version_spans} == {int}


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 0),
        ({"response_ids": [1, 2, 3], "input_ids": [1, 2, 3, 4]}, 3),
        ({"input_ids": np.arange(4), "labels": np.arange(4)}, 4),
        ({"labels": [1, 2]}, 2),
        ({"prompt_ids": [1, 2]}, 0),
    ],
)
def test_the_tokens_of_a_sample_are_its_response_or_else_its_trace(fields: dict[str, Any], tokens: int) -> None:
    assert versioned_tokens(sample(**fields)) == tokens
    assert group_tokens([sample(**fields), sample(response_ids=[9])]) == tokens + 1


# --- resetting ----------------------------------------------------------------------------------------

GONE: dict[str, Any] = {
    "response": "four",
    "response_ids": [4, 5],
    "logprobs": [-0.1, -0.2],
    "response_mask": [1, 1],
    "version_spans": ((3, 2),),
    "finish_reason": "stop",
    "tool_calls": [{"name": "add"}],
    "routed_experts": np.zeros(2),
    "input_ids": [1, 2],
    "labels": [1, 2],
    "reward": {"score": 1.0},
    "error_msg": "timeout",
    "seq_staleness": 7,
    "segment": 2,
    "unjudged": True,
    "loop_state": {"turn": 2},
}
KEPT: dict[str, Any] = {
    "task_name": "math",
    "group_id": 11,
    "rollout_id": 45,
    "num_tries": 2,
    "attempt": 3,
    "message": [{"role": "user", "content": "2 + 2"}],
    "prompt_ids": [1, 2, 3],
    "data_source": "gsm",
    "reward_model": {"style": "rule"},
    "mm_info": {"image": b"x"},
    "tools": [{"name": "add"}],
    "tool_choice": "auto",
    "session_id": 9,
    "sample_params": SampleParams(max_tokens=8),
    "status": Status.COMPLETED,
    "extra_fields": {"seed": 1},
}


def test_a_reset_removes_the_fields_of_the_response_and_keeps_the_others() -> None:
    response_fields = {name for name, field in FIELDS.items() if field.part is Part.RESPONSE}
    assert response_fields == {*GONE, "tokens", "issued"}
    assert FIELDS.keys() - response_fields == set(KEPT)


def test_a_reset_sample_has_its_prompt_and_nothing_of_its_response() -> None:
    state = sample(**GONE, **KEPT, tokens=[1, 2, 3, 4])
    fresh, untouched = reset_response(state), sample()
    assert all(getattr(fresh, name) is value for name, value in KEPT.items())
    assert all(getattr(fresh, name) == getattr(untouched, name) for name in GONE)
    assert fresh.tokens == [1, 2, 3]
    assert fresh.tokens is not fresh.prompt_ids


def test_the_original_of_a_reset_sample_is_untouched() -> None:
    state = sample(**GONE, **KEPT, tokens=[1, 2, 3, 4])
    fresh = reset_response(state)
    assert isinstance(fresh.tokens, list)
    fresh.tokens.append(99)
    assert all(getattr(state, name) is value for name, value in {**GONE, **KEPT}.items())
    assert state.tokens == [1, 2, 3, 4]


def test_a_reset_sample_has_a_copy_of_a_prompt_that_is_an_array() -> None:
    prompt = np.arange(3)
    prompt.setflags(write=False)
    tokens = reset_response(sample(prompt_ids=prompt)).tokens
    assert isinstance(tokens, np.ndarray)
    assert tokens.tolist() == [0, 1, 2]
    assert not np.shares_memory(tokens, prompt)


def test_a_reset_sample_without_prompt_ids_has_no_tokens() -> None:
    assert reset_response(sample(tokens=[1])).tokens is None


# --- sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([], 0),
        ([1, 2, 3], 24),
        ([0.5] * 40, 320),
        (np.zeros(5, dtype=np.int32), 20),
        (np.zeros(40, dtype=np.bool_), 40),
    ],
)
def test_lists_count_8_per_item_and_arrays_their_buffer(column: str, content: Any, expected: int) -> None:
    assert group_bytes([sample(**{column: content})]) == expected


def plain_bytes(value: Any) -> int:
    """8 per list item or number, and text as UTF-8, by recursion."""
    match value:
        case None:
            return 0
        case str():
            return len(value.encode())
        case dict():
            return sum(plain_bytes(part) for item in value.items() for part in item)
        case list():
            return sum(8 if isinstance(item, int | float) else 8 + plain_bytes(item) for item in value)
        case _:
            return 8


_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(extra_fields=st.dictionaries(_TEXT, _JSON, max_size=3), response=_TEXT, reward=_JSON)
def test_nested_values_and_strings_count_as_restated(extra_fields: dict[str, Any], response: str, reward: Any) -> None:
    state = sample(extra_fields=extra_fields, response=response, reward={"score": reward})
    expected = plain_bytes(extra_fields) + plain_bytes(response) + plain_bytes({"score": reward})
    assert group_bytes([state]) == expected


@pytest.mark.parametrize(("text", "expected"), [("abc", 3), ("né", 3), ("水", 3), ("🜄", 4)])
def test_strings_count_as_utf_8(text: str, expected: int) -> None:
    assert group_bytes([sample(response=text)]) == expected
    assert group_bytes([sample(error_msg=text)]) == expected
    assert group_bytes([sample(data_source=text)]) == expected


def test_bytes_and_foreign_arrays_count_their_length() -> None:
    assert group_bytes([sample(mm_info={"i": b"123"}, routed_experts=np.zeros((2, 3), dtype=np.int8))]) == 1 + 3 + 6


def test_strings_inside_a_long_list_of_numbers_are_counted() -> None:
    mixed = [0, *["x" * 100] * 20, 0]
    assert group_bytes([sample(extra_fields={"": mixed})]) == plain_bytes(mixed)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_a_prompt_that_members_share_counts_once(k: int) -> None:
    prompt = {"message": [{"role": "user"}], "prompt_ids": np.arange(10), "mm_info": {"image": b"x" * 50}}
    alone = group_bytes([sample(**prompt)])
    assert alone == 8 + 8 + 80 + 55
    group = [sample(**prompt, response_ids=[1, 2]) for _ in range(k)]
    assert group_bytes(group) == alone + 16 * k


def test_the_separate_prompt_of_a_member_counts_beside_the_shared_one() -> None:
    shared = list(range(10))
    group = [sample(prompt_ids=shared), sample(prompt_ids=shared), sample(prompt_ids=list(shared))]
    assert group_bytes(group) == 160


def test_a_value_nested_deeper_than_python_recurses_is_refused_without_recursing() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(UnsupportedPayload, match="deeper than 64 levels"):
        group_bytes([sample(extra_fields={"deep": nested})])


def test_frozen_columns_cannot_be_written() -> None:
    columns: dict[str, Any] = {name: np.arange(2) for name in COLUMNS}
    freeze_arrays([sample(**columns), sample(response_ids=[1, 2])])
    assert [name for name in COLUMNS if columns[name].flags.writeable] == []


# --- rewards ------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(-1e6, 1e6) | st.integers(-9, 9), min_size=1, max_size=8))
def test_the_reward_of_a_group_is_the_mean_score(scores: list[float]) -> None:
    reward = group_reward([sample(reward={"score": score, "length": "long"}) for score in scores])
    assert type(reward) is float
    assert reward == pytest.approx(sum(scores) / len(scores), abs=1e-6)


@pytest.mark.parametrize("reward", [None, {}, {"score": None}, {"accuracy": 1.0}])
def test_a_group_with_a_member_without_score_has_no_reward(reward: dict[str, Any] | None) -> None:
    assert group_reward([sample(reward={"score": 1.0}), sample(reward=reward)]) is None


_BAD_SCORES = ["high", [1.0], float("nan"), float("inf"), -float("inf"), 1j, 10**400, np.array([1.0, 2.0])]


@pytest.mark.parametrize("score", _BAD_SCORES, ids=lambda score: f"{type(score).__name__} {score}"[:20])
def test_a_score_that_is_not_a_finite_number_is_refused(score: Any) -> None:
    bad = sample(group_id=3, rollout_id=7, reward={"score": score})
    with pytest.raises(InvalidGroup, match=r"rollout 7 of group 3 .* finite number"):
        group_reward([sample(reward={"score": 0.5}), bad])


def test_a_reward_that_is_not_a_dict_is_refused() -> None:
    with pytest.raises(InvalidGroup, match=r"rollout 7 of group 3 .*0\.25"):
        group_reward([sample(group_id=3, rollout_id=7, reward=0.25)])


# --- garbage collection -------------------------------------------------------------------------------


def test_samples_are_not_tracked_by_the_collector() -> None:
    state = sample(**GONE, **KEPT)
    assert not any(map(gc.is_tracked, (state, state.__copy__(), reset_response(state))))


def test_the_size_of_a_group_does_not_depend_on_the_order_of_its_members() -> None:
    shared, own = [{"content": "x" * 50}], [{"content": "y" * 50}]
    a, b, c = (RolloutState(message=message) for message in (own, shared, shared))
    assert group_bytes([a, b, c]) == group_bytes([b, c, a]) == group_bytes([b, a, c])


# --- parameters and tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_tokens", 0, "an integer from 1"),
        ("max_tokens", 1.5, "an integer from 1"),
        ("max_tokens", True, "an integer from 1"),
        ("min_tokens", -1, "an integer from 0"),
        ("temperature", -0.1, "a number from 0"),
        ("temperature", float("nan"), "a number from 0"),
        ("temperature", "hot", "a number from 0"),
        ("top_p", 1.1, "a number from 0 to 1"),
        ("top_k", -2, "an integer from -1"),
        ("min_p", -0.1, "a number from 0 to 1"),
        ("repetition_penalty", -1, "a number from 0"),
        ("presence_penalty", 2.5, "a number from -2 to 2"),
        ("frequency_penalty", -3, "a number from -2 to 2"),
        ("seed", "7", f"an integer from {-(2**63)} to {2**63 - 1}"),
        ("stop", "END", "a tuple of strings"),
        ("stop", (1,), "a tuple of strings"),
        ("stop_token_ids", 5, "a tuple of token ids from 0"),
        ("stop_token_ids", ["a"], "a tuple of token ids from 0"),
        ("stop_token_ids", (-1,), "a tuple of token ids from 0"),
        ("ignore_eos", "yes", "True, False or None"),
        ("skip_special_tokens", 1, "True, False or None"),
    ],
)
def test_parameters_that_no_engine_takes_are_refused_with_their_range(field: str, value: Any, expected: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(f"{field} is {value!r}; expected {expected}") + "$"):
        SampleParams(**{field: value})


def test_more_tokens_than_there_may_be_are_refused() -> None:
    assert SampleParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(InvalidInput, match="min_tokens is 10, but max_tokens only 5"):
        SampleParams(min_tokens=10, max_tokens=5)


def test_several_answers_to_one_request_are_refused_because_groups_have_members() -> None:
    assert SampleParams(n=1).n == 1
    with pytest.raises(InvalidInput, match=r"n is 4, .* give the sampler group_size=4 instead"):
        SampleParams(n=4)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 0),
        ({"prompt_ids": [1, 2]}, 2),
        ({"prompt_ids": np.array([1, 2]), "response_ids": [3]}, 3),
        ({"prompt_ids": [1, 2], "input_ids": [1, 2, 3]}, 3),
        ({"prompt_ids": [1, 2], "response_ids": [3, 4], "input_ids": [1, 2, 3, 4]}, 4),
    ],
)
def test_the_tokens_of_a_sample_are_those_of_prompt_and_response(fields: dict[str, Any], tokens: int) -> None:
    assert sample(**fields).num_tokens == tokens


@given(st.lists(st.integers(0, 3)))
def test_versions_may_be_given_token_by_token(steps: list[int]) -> None:
    state = sample(version_spans=version_spans_of(steps))
    assert state.response_model_steps == steps
    state.response_model_steps = steps
    assert state.version_spans == version_spans_of(steps)
    assert all(one[0] != other[0] for one, other in zip(state.version_spans, state.version_spans[1:], strict=False))
