"""SortedKeys beside a plain sorted list, with blocks so small that every edge of theirs is met."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.storage.local.memory import SortedKeys

_LOADS = st.integers(2, 4)
_KEYS = st.integers(0, 40)
_STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "remove"]), _KEYS) | st.tuples(st.just("drop_first"), st.integers(0, 6)),
    max_size=80,
)


def run(keys: SortedKeys, model: list[int], action: str, number: int) -> None:
    """One step on both; adding what is there and dropping more than there is are not allowed, so they are bent."""
    if action == "add":
        if number not in model:
            keys.add(number)
            model.append(number)
            model.sort()
    elif action == "remove":
        if number in model:
            keys.remove(number)
            model.remove(number)
        else:
            with pytest.raises(KeyError, match=str(number)):
                keys.remove(number)
    else:
        count = min(number, len(model))
        keys.drop_first(count)
        del model[:count]


@settings(deadline=None, max_examples=300)
@given(load=_LOADS, start=st.lists(_KEYS, unique=True, max_size=30), steps=_STEPS)
def test_it_holds_what_a_sorted_list_holds(load: int, start: list[int], steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SortedKeys, "LOAD", load)
        keys, model = SortedKeys(start), sorted(start)
        keys._check()
        for action, number in steps:
            run(keys, model, action, number)
            keys._check()
            assert list(keys) == model
            assert len(keys) == len(model)


@settings(deadline=None, max_examples=200)
@given(load=_LOADS, start=st.lists(_KEYS, unique=True, max_size=40), limit=st.integers(0, 45), steps=_STEPS)
def test_what_is_below_a_key_is_what_a_sorted_list_has_there(
    load: int, start: list[int], limit: int, steps: list[tuple[str, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SortedKeys, "LOAD", load)
        keys, model = SortedKeys(start), sorted(start)
        for action, number in steps:
            run(keys, model, action, number)
    for key in range(-1, 42):
        below = [other for other in model if other < key]
        assert keys.count_below(key) == len(below)
        assert keys.first_below(key, limit) == below[:limit]
        assert keys.first_below(key, len(model)) == below


@settings(deadline=None, max_examples=100)
@given(load=_LOADS, pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), unique=True, max_size=30))
def test_keys_may_be_tuples_of_which_a_shorter_one_bounds_the_longer(load: int, pairs: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SortedKeys, "LOAD", load)
        keys = SortedKeys(list(pairs))
    keys._check()
    below: list[Any] = sorted(pair for pair in pairs if pair[0] < 2)
    assert keys.first_below((2,), len(pairs)) == below
    assert keys.count_below((2,)) == len(below)


def test_small_blocks_are_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SortedKeys, "LOAD", 4)
    keys = SortedKeys(list(range(64)))
    assert len(keys._blocks) > 8
    for key in range(64):
        if key % 16:
            keys.remove(key)
            keys._check()
    assert list(keys) == [0, 16, 32, 48]
    assert len(keys._blocks) <= 2


def test_a_small_block_that_joins_a_full_one_is_split_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SortedKeys, "LOAD", 3)
    keys = SortedKeys([0, 10, 20, 30, 40, 50, 60, 1, 2, 3])
    assert [len(block) for block in keys._blocks] == [6, 4]
    for key in (30, 40, 50):
        keys.remove(key)
        keys._check()
    assert list(keys) == [0, 1, 2, 3, 10, 20, 60]
    assert [len(block) for block in keys._blocks] == [3, 4]


@pytest.mark.parametrize("key", [-1, 5, 10, 99])
def test_a_key_that_is_not_there_cannot_be_removed(key: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SortedKeys, "LOAD", 2)
    keys = SortedKeys([0, 2, 4, 6, 8])
    with pytest.raises(KeyError, match=str(key)):
        keys.remove(key)
    keys._check()
    assert list(keys) == [0, 2, 4, 6, 8]


def test_nothing_is_below_anything_in_an_empty_collection() -> None:
    keys = SortedKeys()
    keys.drop_first(0)
    keys._check()
    assert (len(keys), list(keys), keys.count_below(5), keys.first_below(5, 3)) == (0, [], 0, [])
    with pytest.raises(KeyError):
        keys.remove(5)


@pytest.mark.parametrize("start", [[3, 1, 3], [1, 2, 2]])
def test_the_check_finds_a_key_that_was_added_twice(start: list[int]) -> None:
    with pytest.raises(AssertionError, match="distinct"):
        SortedKeys(start)._check()
