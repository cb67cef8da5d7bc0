"""A batch for trainer ranks: whole groups, each on one rank, as many as on the others, balanced by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import InvalidInput, ReplayBuffer, RolloutState
from forebay.collate import shard
from forebay.testing import make_group
from tests.support import calls_of

TOKENS = st.lists(st.one_of(st.integers(0, 60), st.sampled_from([0, 1, 1000])), max_size=40)


def batch(tokens: Sequence[int]) -> list[list[RolloutState]]:
    """Groups of one sample of so many tokens; the prompt has none."""
    groups = [make_group(1, group_id=number, tokens=count) for number, count in enumerate(tokens)]
    for group in groups:
        group[0].prompt_ids = None
    return groups


def size(group: Sequence[RolloutState]) -> int:
    return sum(0 if state.response_ids is None else len(state.response_ids) for state in group)


def sharded(groups: list[list[RolloutState]], world_size: int) -> list[list[list[RolloutState]]]:
    return [shard(groups, rank, world_size) for rank in range(world_size)]


@given(TOKENS, st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_every_group_is_whole_on_exactly_one_rank(tokens: list[int], world_size: int) -> None:
    groups = batch(tokens)
    ranks = sharded(groups, world_size)
    assert sorted(id(group) for rank in ranks for group in rank) == sorted(id(group) for group in groups)


@given(TOKENS, st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_ranks_have_equal_numbers_to_one_and_earlier_ones_have_the_one_more(tokens: list[int], world_size: int) -> None:
    counts = [len(rank) for rank in sharded(batch(tokens), world_size)]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(TOKENS, st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_no_rank_has_more_than_its_share_and_the_largest_group(tokens: list[int], world_size: int) -> None:
    loads = [sum(map(size, rank)) for rank in sharded(batch(tokens), world_size)]
    assert max(loads) <= sum(tokens) / world_size + max(tokens, default=0)
    if len(tokens) % world_size == 0:
        assert max(loads) - min(loads) <= max(tokens, default=0)


def test_the_order_within_a_rank_is_that_of_the_batch() -> None:
    groups = batch([1, 9, 2, 8, 3, 7])
    for rank in sharded(groups, 2):
        ids = [group[0].group_id or 0 for group in rank]
        assert ids == sorted(ids)


def test_large_and_small_go_together() -> None:
    ranks = sharded(batch([10, 1, 1, 10, 9, 2, 2, 9]), 4)
    assert [sum(map(size, rank)) for rank in ranks] == [11, 11, 11, 11]


def test_every_rank_computes_the_same_from_its_own_copy() -> None:
    first = [[group[0].group_id for group in shard(batch([5] * 7), rank, 3)] for rank in range(3)]
    again = [[group[0].group_id for group in shard(batch([5] * 7), rank, 3)] for rank in range(3)]
    assert first == again == [[0, 3, 6], [1, 4], [2, 5]]


def test_prompts_and_traces_count_too() -> None:
    groups = batch([1, 1, 1, 1])
    groups[0][0].prompt_ids = np.arange(50)
    groups[1][0].response_ids, groups[1][0].input_ids = None, list(range(50))
    ranks = sharded(groups, 2)
    assert [[group[0].group_id for group in rank] for rank in ranks] == [[0, 3], [1, 2]]


def test_more_ranks_than_groups_leave_some_with_nothing() -> None:
    assert [len(rank) for rank in sharded(batch([3, 3]), 4)] == [1, 1, 0, 0]
    assert sharded([], 3) == [[], [], []]


def test_one_rank_has_everything() -> None:
    groups = batch([3, 1, 2])
    assert shard(groups, 0, 1) == groups


@pytest.mark.parametrize(
    ("rank", "world_size", "says"),
    [
        (2, 2, "rank is 2 of world_size 2; expected 0 to 1"),
        (-1, 2, "rank is -1; expected an integer of at least 0"),
        (0, 0, "world_size is 0; expected an integer of at least 1"),
        (0, -4, "world_size is -4; expected an integer of at least 1"),
        (0.5, 2, "rank is 0.5; expected an integer"),
        (0, "2", "world_size is '2'; expected an integer"),
        (None, 2, "rank is None; expected an integer"),
    ],
)
def test_a_rank_that_is_none_is_refused(rank: Any, world_size: Any, says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        shard(batch([1]), rank, world_size)
    assert says in str(caught.value)


async def test_a_lease_hands_out_its_groups_by_rank() -> None:
    buffer = ReplayBuffer()
    for tokens in (8, 1, 2, 9):
        await buffer.put(make_group(2, tokens=tokens), "math")
    async with buffer.lease_batch({"math": 4}, train_step=1) as lease:
        assert [sum(map(size, lease.shard(rank, 2))) for rank in range(2)] == [20, 20]
        assert all(len(group) == 2 for rank in range(2) for group in lease.shard(rank, 2))
        await lease.reject(lease.shard(1, 2), "no gradient")
        assert len(lease.shard(0, 2)) == len(lease.shard(1, 2)) == 1


def test_the_share_of_a_rank_costs_no_more_with_a_thousand_ranks() -> None:
    groups = batch([number % 97 for number in range(4096)])
    assert calls_of(lambda: shard(groups, 1023, 1024)) < 2 * calls_of(lambda: shard(groups, 1, 2))
