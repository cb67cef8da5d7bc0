"""How old tokens are, which of them are masked, and which members expire."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.ledger import Place, Record, describe, is_fresh
from forebay.core.rollout import RolloutState, Status, VersionSpans
from forebay.core.staleness import (
    Floors,
    Limits,
    apply_token_mask,
    check_step,
    check_versions,
    expire_members,
    floor_step,
    group_newest_step,
    group_oldest_step,
    group_staleness,
    group_token_step,
    sample_staleness,
    stale_threshold,
    staleness,
    stamp,
    token_mask,
)
from forebay.errors import InvalidGroup, InvalidInput


def sample(steps: list[int] | None = None, **fields: Any) -> RolloutState:
    """A completed sample with one response token for each model step."""
    state = RolloutState(message=[], status=Status.COMPLETED)
    if steps is not None:
        state.response_ids = list(range(len(steps)))
        state.response_model_steps = steps
    for name, value in fields.items():
        setattr(state, name, value)
    return state


# --- staleness and thresholds -------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "t", "expected"), [(3, 5, 1), (4, 5, 0), (5, 5, 0), (0, 1, 0), (0, 9, 8), (9, 5, 0)])
def test_staleness_counts_the_steps_behind_on_policy(m: int, t: int, expected: int) -> None:
    assert staleness(m, t) == expected


@pytest.mark.parametrize(("max_staleness", "interval", "expected"), [(0, 1, 1), (0, 4, 4), (1, 4, 8), (3, 1, 4)])
def test_a_threshold_is_counted_in_weight_updates(max_staleness: int, interval: int, expected: int) -> None:
    assert stale_threshold(max_staleness, interval) == expected


@pytest.mark.parametrize(("threshold", "last_good"), [(4, 8), (8, 12)])
def test_tokens_of_model_step_4_are_good_up_to_a_train_step(threshold: int, last_good: int) -> None:
    assert staleness(4, last_good) < threshold <= staleness(4, last_good + 1)


@pytest.mark.parametrize(
    ("max_staleness", "interval", "message"),
    [
        (-1, 1, "max_staleness is -1; expected an integer of at least 0"),
        (0, 0, "sync_weights_interval is 0; expected an integer of at least 1"),
        (0, -4, "sync_weights_interval is -4"),
        (0.5, 1, "max_staleness is 0.5; expected an integer"),
        (0, True, "sync_weights_interval is True; expected an integer"),
    ],
)
def test_a_threshold_that_is_not_positive_cannot_be_made(max_staleness: Any, interval: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        stale_threshold(max_staleness, interval)
    assert isinstance(caught.value, ValueError)


@settings(deadline=None, max_examples=300)
@given(m=st.integers(0, 60), t=st.integers(1, 60), threshold=st.integers(1, 60))
def test_a_token_is_stale_exactly_below_the_floor(m: int, t: int, threshold: int) -> None:
    assert (staleness(m, t) >= threshold) is (m < floor_step(t, threshold))


@pytest.mark.parametrize("name", ["stale_threshold", "token_stale_threshold"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_limits_are_positive_integers(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=f"^{name} is {value!r}"):
        Limits(**{name: value})


def test_the_floors_of_limits_are_those_of_their_thresholds() -> None:
    assert Limits().floors(9) == Floors(None, None)
    assert Limits(stale_threshold=4, token_stale_threshold=2).floors(9) == Floors(oldest=5, token=7)


def test_a_step_may_be_missing_but_not_below_its_least() -> None:
    assert check_step("train_step", None, least=1) is None
    assert check_step("train_step", 1, least=1) == 1
    with pytest.raises(InvalidInput, match="train_step is 0; expected an integer of at least 1"):
        check_step("train_step", 0, least=1)


# --- versions -----------------------------------------------------------------------------------------


def steps_of(spans: VersionSpans) -> list[int]:
    return [step for step, run in spans for _ in range(run)]


def test_stamping_gives_a_version_to_tokens_without_one() -> None:
    assert steps_of(stamp(((1, 1),), 3, 4)) == [1, 4, 4]


@settings(deadline=None, max_examples=200)
@given(given_steps=st.lists(st.integers(0, 5), max_size=6), more=st.integers(0, 4), model_step=st.integers(0, 5))
def test_stamping_keeps_given_versions_and_appends_the_model_step(
    given_steps: list[int], more: int, model_step: int
) -> None:
    spans = stamp(sample(given_steps).version_spans, len(given_steps) + more, model_step)
    assert steps_of(spans) == given_steps + [model_step] * more
    assert spans == sample(steps_of(spans)).version_spans, "runs are as long as they can be"


def test_more_versions_than_tokens_cannot_be_stamped() -> None:
    with pytest.raises(InvalidGroup, match="versions for 3 tokens, but only 2 tokens"):
        stamp(((1, 2), (4, 1)), 2, 5)


def test_tokens_without_a_version_cannot_be_judged() -> None:
    check_versions([sample([1, 2]), sample()])
    half = sample([1], response_ids=[7, 8], group_id=3, rollout_id=9)
    with pytest.raises(InvalidInput, match=r"rollout 9 of group 3 has 2 tokens and versions for 1; .* model_step"):
        check_versions([sample([1, 2]), half])


def test_the_oldest_token_of_the_stalest_member_decides() -> None:
    group = [sample([4, 2, 5]), sample([3, 3]), sample()]
    assert [sample_staleness(state, 6) for state in group] == [3, 2, 0]
    assert group_staleness(group, 6) == 3
    assert (group_oldest_step(group), group_newest_step(group)) == (2, 5)


def test_a_group_without_tokens_has_no_steps_and_staleness_0() -> None:
    group = [sample(), sample([])]
    assert (group_oldest_step(group), group_newest_step(group), group_token_step(group)) == (None, None, None)
    assert group_staleness(group, 100) == 0


# --- token masks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_column", [list, np.array])
@pytest.mark.parametrize(
    ("semantic", "threshold", "expected"),
    [
        (None, 4, [0, 1]),
        (None, 8, [1, 1]),
        ([1, 0], 4, [0, 0]),
        ([1, 0], 8, [1, 0]),
        ([0, 1], 4, [0, 1]),
        ([1, 1], 1, [0, 1]),
    ],
)
def test_the_token_mask_is_the_semantic_one_without_stale_tokens(
    as_column: Any, semantic: list[int] | None, threshold: int, expected: list[int]
) -> None:
    state = sample([0, 4], response_ids=as_column([7, 8]))
    state.response_mask = None if semantic is None else as_column(semantic)
    mask = token_mask(state, 5, threshold)
    assert type(mask) is type(state.response_ids)
    assert mask is not None
    assert list(mask) == expected
    assert semantic is None or list(state.response_mask) == semantic, "the sample itself is not written to"  # type: ignore[arg-type]


@pytest.mark.parametrize("trace", [{"input_ids": [1, 2]}, {"labels": [1, 2]}])
def test_agent_traces_are_exempt_from_token_masks(trace: dict[str, Any]) -> None:
    state = sample([0, 0], response_mask=[1, 1], **trace)
    assert token_mask(state, 50, 1) is None
    apply_token_mask(state, 50, 1)
    assert state.response_mask == [1, 1]
    assert group_token_step([state]) is None


def test_a_sample_without_a_response_has_no_token_mask() -> None:
    assert token_mask(sample(), 5, 1) is None


def test_an_applied_mask_is_of_the_samples_own() -> None:
    stored = np.array([1, 1])
    state = sample([0, 4], response_mask=stored)
    apply_token_mask(state, 5, 4)
    assert isinstance(state.response_mask, np.ndarray)
    assert state.response_mask.tolist() == [0, 1]
    assert not state.response_mask.flags.writeable
    assert stored.tolist() == [1, 1]


# --- expiry -------------------------------------------------------------------------------------------


def test_only_members_below_the_floor_expire_and_siblings_stay_the_same_objects() -> None:
    old = sample([3, 6], rollout_id=1, response="old", reward={"score": 1.0}, prompt_ids=[1], seq_staleness=5)
    fresh, empty = sample([5, 6], rollout_id=2), sample(rollout_id=3)
    group = expire_members([fresh, old, empty], Floors(oldest=4))
    assert group is not None
    assert group[0] is fresh
    assert group[2] is empty
    expired = group[1]
    assert (expired.status, expired.rollout_id, expired.seq_staleness) == (Status.EXPIRED, 1, 0)
    assert (expired.response, expired.response_ids, expired.version_spans, expired.reward) == (None, None, (), None)
    assert expired.tokens == [1]
    assert (old.status, old.response) == (Status.COMPLETED, "old")


def test_a_group_at_the_floor_does_not_expire() -> None:
    assert expire_members([sample([4, 4]), sample([5])], Floors(oldest=4, token=4)) is None


def test_a_member_with_nothing_left_to_train_on_expires() -> None:
    stale, partly = sample([0, 1]), sample([0, 4])
    assert expire_members([partly], Floors(token=2)) is None
    group = expire_members([stale, partly], Floors(token=2))
    assert group is not None
    assert group[0].status is Status.EXPIRED
    assert group[1] is partly


@pytest.mark.parametrize("as_column", [list, np.array])
def test_tokens_that_the_semantic_mask_leaves_out_keep_no_member_alive(as_column: Any) -> None:
    state = sample([0, 4, 4, 4], response_mask=as_column([1, 0, 0, 0]))
    assert expire_members([state], Floors(token=2)) is not None
    state.response_mask = as_column([1, 0, 1, 0])
    assert expire_members([state], Floors(token=2)) is None


@pytest.mark.parametrize("as_column", [list, np.array])
def test_a_semantic_mask_that_is_all_zero_by_itself_does_not_expire(as_column: Any) -> None:
    state = sample([0, 0, 0], response_mask=as_column([0, 0, 0]))
    assert expire_members([state], Floors(token=9)) is None
    assert group_token_step([state]) is None


def test_an_agent_trace_expires_by_its_oldest_token_only() -> None:
    state = sample([0, 0], input_ids=[1, 2], labels=[1, 2])
    assert expire_members([state], Floors(token=9)) is None
    assert expire_members([state], Floors(oldest=9)) is not None


def test_segments_of_a_rollout_expire_together_and_collapse_to_the_issued_one() -> None:
    later = sample([9], rollout_id=1, segment=1)
    issued = sample([0], rollout_id=1, segment=0, prompt_ids=[7])
    kept = [sample([9], rollout_id=2, segment=0), sample([9], rollout_id=2, segment=1)]
    group = expire_members([kept[0], later, issued, kept[1]], Floors(oldest=5))
    assert group is not None
    assert group[0] is kept[0]
    assert group[2] is kept[1]
    assert [(state.rollout_id, state.segment) for state in group] == [(2, 0), (1, 0), (2, 1)]
    assert (group[1].status, group[1].tokens) == (Status.EXPIRED, [7])


@st.composite
def _members(draw: st.DrawFn) -> RolloutState:
    state = sample(draw(st.none() | st.lists(st.integers(0, 8), max_size=5)))
    if state.response_ids is not None:
        tokens = len(state.response_ids)
        mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens))
        state.response_mask = np.array(mask, dtype=np.int64) if mask is not None and draw(st.booleans()) else mask
        if draw(st.integers(0, 4)) == 0:
            state.input_ids = [0] * 9
    return state


_GROUPS = st.lists(_members(), min_size=1, max_size=4)
_THRESHOLDS = st.none() | st.integers(1, 8)


@settings(deadline=None, max_examples=300)
@given(group=_GROUPS, rollouts=st.integers(1, 4), oldest=_THRESHOLDS, token=_THRESHOLDS)
def test_a_group_expires_exactly_if_its_record_is_not_fresh(
    group: list[RolloutState], rollouts: int, oldest: int | None, token: int | None
) -> None:
    for index, state in enumerate(group):
        state.rollout_id, state.segment = index % rollouts, index // rollouts
    facts = msgspec.structs.asdict(describe(group))
    about: dict[str, Any] = {
        "uid": 1,
        "timestamp_id": 1,
        "task_name": "math",
        "group_id": 1,
        "created_at": 0.0,
        "moved_at": 0.0,
    }
    del facts["response_bytes"]
    record = Record(place=Place.BUFFERED, **about, **facts)
    floors = Floors(oldest, token)
    expired = expire_members(group, floors)
    assert (expired is None) is is_fresh(record, floors)
    assert expired is None or expire_members(expired, floors) is None, "what expired does not expire again"


@settings(deadline=None, max_examples=300)
@given(group=_GROUPS, t=st.integers(1, 12), limit=_THRESHOLDS, token_limit=_THRESHOLDS)
def test_a_member_expires_by_its_oldest_token_or_by_what_its_mask_leaves(
    group: list[RolloutState], t: int, limit: int | None, token_limit: int | None
) -> None:
    def expires(state: RolloutState) -> bool:
        if limit is not None and sample_staleness(state, t) >= limit:
            return True
        left = None if token_limit is None else token_mask(state, t, token_limit)
        semantic = [1] * len(left or []) if state.response_mask is None else state.response_mask
        return left is not None and any(semantic) and not any(left)

    expected = [expires(state) for state in group]
    members = expire_members(group, Limits(stale_threshold=limit, token_stale_threshold=token_limit).floors(t))
    assert [state.status is Status.EXPIRED for state in members or group] == expected


@settings(deadline=None, max_examples=200)
@given(state=_members(), t=st.integers(1, 12), threshold=st.integers(1, 8))
def test_a_token_is_trained_on_if_it_is_meant_to_be_and_fresh(state: RolloutState, t: int, threshold: int) -> None:
    mask = token_mask(state, t, threshold)
    if state.response_ids is None or state.input_ids is not None:
        assert mask is None
        return
    versions = state.response_model_steps
    semantic = [1] * len(versions) if state.response_mask is None else state.response_mask
    assert mask is not None
    assert list(mask) == [s * (staleness(m, t) < threshold) for s, m in zip(semantic, versions, strict=True)]


def test_tokens_of_unknown_age_keep_a_member_from_expiring_by_tokens() -> None:
    state = RolloutState(message=[], response_ids=[1, 2], version_spans=((0, 1),), status=Status.COMPLETED)
    assert token_mask(state, 5, 2) == [0, 1]
    assert expire_members([state], Floors(token=3)) is None
    state.response_mask = [1, 0]
    assert expire_members([state], Floors(token=3)) is not None
