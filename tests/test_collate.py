"""`forebay.collate`: arrays hold what the samples hold, at the place that the alignment says."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import InvalidInput, ReplayBuffer, RolloutState
from forebay.collate import Packed, Padded, advantages, pack, pad, shard
from forebay.collate.packing import first_fit_decreasing
from forebay.testing import make_group
from tests.support import calls_of

Groups = list[list[RolloutState]]
KINDS = ("grpo", "rloo", "dr_grpo", "reinforce_pp")


# --- random groups, and what a reader would expect of them ---------------------------------------------------


@st.composite
def columns(draw: st.DrawFn, items: st.SearchStrategy[Any], size: int, dtype: Any) -> Any:
    """A token column: a list, or an array that may be read-only or strided."""
    values = draw(st.lists(items, min_size=size, max_size=size))
    form = draw(st.sampled_from(["list", "array", "read-only", "strided"]))
    if form == "list":
        return values
    array = np.array(values, dtype=dtype)
    if form == "strided":
        return np.repeat(array, 2)[::2]
    array.setflags(write=form == "array")
    return array


@st.composite
def samples(draw: st.DrawFn, has_logprobs: bool, score: float) -> RolloutState:
    tokens = draw(st.integers(1, 9))
    ids, logprobs = st.integers(0, 300), st.floats(-5, 0, width=32)
    state = RolloutState(message=[], reward={"score": score})
    if draw(st.booleans()):
        state.prompt_ids = draw(columns(ids, draw(st.integers(0, 5)), np.int32))
        state.response_ids = draw(columns(ids, tokens, np.int64))
        if draw(st.booleans()):
            state.response_mask = draw(columns(st.integers(0, 1), tokens, draw(st.sampled_from([np.bool_, np.int64]))))
    else:
        state.input_ids = draw(columns(ids, tokens, np.uint16))
        state.labels = draw(columns(st.sampled_from([-100, 0, 7]), tokens, np.int64))
    if has_logprobs:
        state.logprobs = draw(columns(logprobs, tokens, draw(st.sampled_from([np.float32, np.float64]))))
    runs = draw(st.lists(st.integers(1, 4), max_size=3))
    spans: list[tuple[int, int]] = []
    for run in runs:
        if sum(length for _, length in spans) + run <= tokens:
            spans.append((draw(st.integers(0, 9)), run))
    state.version_spans = tuple(spans)
    return state


@st.composite
def batches(draw: st.DrawFn) -> Groups:
    has_logprobs = draw(st.booleans())
    groups: Groups = []
    for number in range(draw(st.integers(1, 4))):
        group = []
        for rollout in range(draw(st.integers(1, 4))):
            score = draw(st.sampled_from([0.0, 1.0, 0.5, -2.25]))
            for segment in range(draw(st.integers(1, 2))):
                state = draw(samples(has_logprobs, score))
                state.task_name, state.group_id = f"task{number % 2}", number
                state.rollout_id, state.segment = rollout, segment
                group.append(state)
        groups.append(draw(st.permutations(group)))
    return groups


class Expected(msgspec.Struct):
    """What the sequence of one sample has to hold, one entry for each token."""

    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    versions: list[int]
    advantages: list[float]


def expected(state: RolloutState, advantage: float, *, shifted: bool) -> Expected:
    """Token by token, in plain Python."""
    if state.response_ids is None:
        assert state.input_ids is not None
        assert state.labels is not None
        prompt: list[int] = []
        response = [int(token) for token in state.input_ids]
        mask = [int(label) != -100 for label in state.labels]
    else:
        assert state.prompt_ids is not None
        prompt = [int(token) for token in state.prompt_ids]
        response = [int(token) for token in state.response_ids]
        mask = [True] * len(response) if state.response_mask is None else [bool(flag) for flag in state.response_mask]
    logprobs = [0.0] * len(response) if state.logprobs is None else [float(np.float32(x)) for x in state.logprobs]
    versions = state.response_model_steps + [-1] * (len(response) - len(state.response_model_steps))
    result = Expected(
        prompt + response,
        [False] * len(prompt) + mask,
        [0.0] * len(prompt) + logprobs,
        [-1] * len(prompt) + versions,
        [float(np.float32(advantage))] * (len(prompt) + len(response)),
    )
    if shifted:
        result.mask = [*result.mask[1:], False]
        result.logprobs = [*result.logprobs[1:], 0.0]
        result.versions = [*result.versions[1:], -1]
        result.advantages = [*result.advantages[1:], 0.0]
    return result


def all_expected(groups: Groups, *, shifted: bool) -> list[Expected]:
    values = advantages(groups, "grpo").values
    states = [state for group in groups for state in group]
    return [expected(state, value, shifted=shifted) for state, value in zip(states, values, strict=True)]


def part(batch: Packed[Any] | Padded[Any], at: Any) -> Expected:
    return Expected(
        batch.input_ids[at].tolist(),
        batch.loss_mask[at].tolist(),
        [0.0] * len(batch.input_ids[at]) if batch.logprobs is None else batch.logprobs[at].tolist(),
        batch.versions[at].tolist(),
        batch.advantages[at].tolist(),  # type: ignore[index]
    )


def unpacked(batches: Sequence[Packed[Any]]) -> dict[int, Expected]:
    """The sequence of each sample, by sample_index."""
    found: dict[int, Expected] = {}
    for packed in batches:
        bounds = packed.cu_seqlens.tolist()
        for sequence, index in enumerate(packed.sample_index.tolist()):
            assert index not in found
            found[index] = part(packed, slice(bounds[sequence], bounds[sequence + 1]))
    return found


def frozen(value: Any) -> Any:
    """Arrays as bytes, so that batches can be compared."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    return [frozen(getattr(value, field.name)) for field in fields(value)] if isinstance(value, Packed) else repr(value)


def largest(groups: Groups) -> int:
    """The tokens of the largest rollout."""
    sizes: dict[tuple[int, int | None], int] = {}
    for number, group in enumerate(groups):
        for state in group:
            key = (number, state.rollout_id)
            sizes[key] = sizes.get(key, 0) + state.num_tokens
    return max(sizes.values())


# --- pack and pad ---------------------------------------------------------------------------------------------


@given(batches(), st.integers(0, 40), st.integers(1, 5), st.booleans())
@settings(max_examples=100, deadline=None)
def test_packed_sequences_equal_the_slow_reference(groups: Groups, extra: int, align: int, shifted: bool) -> None:
    limit = largest(groups) + extra + align
    batches = pack(groups, max_tokens=limit, align=align, shifted=shifted, pad_id=9999)
    reference = all_expected(groups, shifted=shifted)
    assert unpacked(batches) == dict(enumerate(reference))
    states = [(number, state) for number, group in enumerate(groups) for state in group]
    for packed in batches:
        size, samples = len(packed.input_ids), len(packed.sample_index)
        assert size <= limit
        assert size % align == 0
        bounds = packed.cu_seqlens.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == size
        assert packed.max_seqlen == max(np.diff(bounds))
        padding = size - bounds[samples]
        assert padding < align
        assert len(bounds) == samples + 1 + (padding > 0)
        positions = [at for start, stop in itertools.pairwise(bounds) for at in range(stop - start)]
        assert packed.position_ids.tolist() == positions
        rest = slice(bounds[samples], size)
        assert part(packed, rest) == Expected(
            [9999] * padding, [False] * padding, [0.0] * padding, [-1] * padding, [0.0] * padding
        )
        chosen = [states[index] for index in packed.sample_index]
        assert packed.sample_index.tolist() == sorted(packed.sample_index.tolist())
        assert packed.group_index.tolist() == [number for number, _ in chosen]
        assert list(packed.task) == [state.task_name for _, state in chosen]
        assert packed.rewards is not None
        assert packed.rewards.tolist() == [(state.reward or {})["score"] for _, state in chosen]


@given(batches(), st.sampled_from(["left", "right"]), st.integers(1, 6), st.booleans())
@settings(max_examples=100, deadline=None)
def test_padded_rows_equal_the_slow_reference(groups: Groups, side: Any, multiple_of: int, shifted: bool) -> None:
    padded = pad(groups, pad_id=9999, side=side, multiple_of=multiple_of, shifted=shifted)
    reference = all_expected(groups, shifted=shifted)
    longest = max(len(row.ids) for row in reference)
    width = math.ceil(longest / multiple_of) * multiple_of
    assert padded.input_ids.shape == (len(reference), width)
    for row, wanted in enumerate(reference):
        size = len(wanted.ids)
        start = width - size if side == "left" else 0
        at = slice(start, start + size)
        assert part(padded, (row, at)) == wanted
        assert padded.position_ids[row, at].tolist() == list(range(size))
        outside = np.ones(width, dtype=bool)
        outside[at] = False
        empty = width - size
        assert part(padded, (row, outside)) == Expected(
            [9999] * empty, [False] * empty, [0.0] * empty, [-1] * empty, [0.0] * empty
        )
        assert padded.attention_mask[row].tolist() == (~outside).tolist()
    assert padded.lengths.tolist() == [len(row.ids) for row in reference]
    assert padded.sample_index.tolist() == list(range(len(reference)))
    assert padded.group_index.tolist() == [number for number, group in enumerate(groups) for _ in group]


@given(batches())
@settings(max_examples=50, deadline=None)
def test_segments_of_a_rollout_are_in_one_micro_batch(groups: Groups) -> None:
    states = [(number, state.rollout_id) for number, group in enumerate(groups) for state in group]
    places: dict[tuple[int, int | None], set[int]] = {}
    for position, packed in enumerate(pack(groups, max_tokens=largest(groups))):
        for index in packed.sample_index:
            places.setdefault(states[index], set()).add(position)
    assert all(len(positions) == 1 for positions in places.values())


@given(batches())
@settings(max_examples=50, deadline=None)
def test_the_same_groups_give_the_same_bytes_and_are_not_changed(groups: Groups) -> None:
    before = repr(groups)
    first = [frozen(packed) for packed in pack(groups, max_tokens=64, align=3)]
    assert [frozen(packed) for packed in pack(groups, max_tokens=64, align=3)] == first
    pad(groups, pad_id=0, shifted=True)
    assert repr(groups) == before


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("times", [8, 16])
def test_micro_batches_of_log_normal_lengths_are_95_percent_full(seed: int, times: int) -> None:
    random = np.random.default_rng(seed)
    lengths = np.minimum(random.lognormal(5, 0.7, 400).astype(int) + 2, 1_500)
    groups = [[RolloutState(message=[], prompt_ids=[1], response_ids=np.zeros(n - 1, dtype=np.int64))] for n in lengths]
    limit = max(int(times * lengths.mean()), int(lengths.max()))
    sizes = [len(packed.input_ids) for packed in pack(groups, max_tokens=limit, advantages=None)]
    assert sum(sizes) == lengths.sum()
    assert min(sizes[:-1]) >= 0.95 * limit


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_first_fit_decreasing_equals_its_definition(sizes: list[int], extra: int) -> None:
    capacity = max(sizes) + extra
    bins: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        for content in bins:
            if sum(sizes[other] for other in content) + sizes[item] <= capacity:
                content.append(item)
                break
        else:
            bins.append([item])
    assert first_fit_decreasing(sizes, capacity) == bins


def test_the_number_of_steps_grows_with_n_log_n() -> None:
    def lines(count: int) -> int:
        sizes = [1 + index * 7919 % 97 for index in range(count)]
        steps = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal steps
            steps += event == "line"
            return trace

        sys.settrace(trace)
        try:
            first_fit_decreasing(sizes, 100)
        finally:
            sys.settrace(None)
        return steps

    assert lines(2_000) < 2.5 * lines(1_000)


def test_the_number_of_calls_does_not_depend_on_the_number_of_tokens() -> None:
    def groups(tokens: int) -> Groups:
        return [[state] for state in make_group(64, tokens=tokens, score=1.0)]

    few, many = groups(2), groups(2_000)
    assert calls_of(lambda: pack(many, max_tokens=2_002 * 8)) <= calls_of(lambda: pack(few, max_tokens=4 * 8)) + 5


def test_padding_that_is_longer_than_all_samples_is_the_longest_sequence() -> None:
    [packed] = pack([make_group(1, tokens=1)], max_tokens=16, align=16, advantages=None)
    assert packed.cu_seqlens.tolist() == [0, 3, 16]
    assert packed.max_seqlen == 13


def test_tensors_share_memory_with_the_arrays() -> None:
    groups = [make_group(3, score=1.0, tokens=4)]
    [packed] = pack(groups, max_tokens=100, align=8)
    padded = pad(groups, pad_id=0)
    for arrays, tensors in ((packed, packed.torch()), (padded, padded.torch())):
        for field in fields(arrays):
            array, tensor = getattr(arrays, field.name), getattr(tensors, field.name)
            if isinstance(array, np.ndarray):
                assert isinstance(tensor, torch.Tensor)
                assert tensor.data_ptr() == array.ctypes.data
                assert tensor.tolist() == array.tolist()
            else:
                assert tensor == array
    assert packed.torch().cu_seqlens.dtype is torch.int32
    assert packed.torch().input_ids.dtype is torch.int64


def test_routed_experts_and_images_stay_with_their_sample() -> None:
    groups = [make_group(3, score=1.0), make_group(1, score=0.0, tokens=9)]
    experts, image = np.zeros((3, 2), dtype=np.uint8), {"image": "cat.png"}
    groups[0][1].routed_experts, groups[0][2].mm_info = experts, image
    first, second = pack(groups, max_tokens=15)
    assert first.routed_experts is None
    assert first.mm_info is None
    assert second.sample_index.tolist() == [0, 1, 2]
    assert second.routed_experts == (None, experts, None)
    assert second.mm_info == (None, None, image)
    padded = pad(groups, pad_id=0)
    assert padded.routed_experts == (None, experts, None, None)
    assert padded.mm_info == (None, None, image, None)


def test_lists_of_numpy_scalars_and_float_masks_are_columns_too() -> None:
    odd: dict[str, Any] = {"prompt_ids": [np.int64(1)], "response_ids": [np.int32(2), np.uint8(3)]}
    odd |= {"logprobs": [np.float32(-1.5), -1], "response_mask": [1.0, 0.0]}
    state = RolloutState(message=[], **odd)
    [packed] = pack([[state]], max_tokens=3, advantages=None)
    assert packed.input_ids.tolist() == [1, 2, 3]
    assert packed.logprobs is not None
    assert packed.logprobs.tolist() == [0, -1.5, -1]
    assert packed.loss_mask.tolist() == [False, True, False]


def test_a_logprob_below_float32_is_minus_infinity() -> None:
    groups = changed(logprobs=np.array([-1e300, -1.0, -1.0]))
    assert pad(groups, pad_id=0).logprobs[1].tolist() == [0, 0, -math.inf, -1, -1]  # type: ignore[index]


# --- token masks ----------------------------------------------------------------------------------------------


async def test_tokens_that_the_buffer_masked_are_excluded_and_counted_once() -> None:
    buffer = ReplayBuffer()
    await buffer.set_limits("math", token_stale_threshold=3)
    group = make_group(2, tokens=4, score=1.0)
    for state in group:
        state.version_spans = ((0, 3), (4, 1))  # three tokens too old for step 5
    group[1].response_mask = [0, 1, 1, 1]  # of which a tool wrote one
    await buffer.put(group, "math")
    await buffer.put(make_group(1, tokens=4, score=0.0, model_step=4), "math")
    async with buffer.lease_batch({"math": 2}, train_step=5) as lease:
        [packed] = pack(lease.groups, max_tokens=100)
        padded = pad(lease.groups, pad_id=0, shifted=True)
    assert packed.masked_tokens == padded.masked_tokens == 6
    assert packed.loss_mask.sum() == padded.loss_mask.sum() == 2 + 4


def test_labels_of_an_agent_trace_are_its_mask_and_count_as_no_masked_tokens() -> None:
    state = RolloutState(message=[], input_ids=[5, 6, 7], labels=[-100, 6, 7], version_spans=((2, 3),))
    [packed] = pack([[state]], max_tokens=3, advantages=None)
    assert packed.loss_mask.tolist() == [False, True, True]
    assert packed.masked_tokens == 0
    assert packed.versions.tolist() == [2, 2, 2]


def test_masked_tokens_belong_to_their_micro_batch() -> None:
    groups = [make_group(1, tokens=tokens, score=0.0) for tokens in (8, 6)]
    groups[0][0].response_mask, groups[1][0].response_mask = [0] * 3 + [1] * 5, [0] + [1] * 5
    assert [packed.masked_tokens for packed in pack(groups, max_tokens=10)] == [3, 1]


# --- advantages -----------------------------------------------------------------------------------------------


def slow_advantages(groups: Groups, kind: str) -> list[float]:
    rewards = [{state.rollout_id: (state.reward or {})["score"] for state in group} for group in groups]
    batch = [score for group in rewards for score in group.values()]
    result = []
    for group, scores in zip(groups, rewards, strict=True):
        values = list(scores.values())
        for state in group:
            score = scores[state.rollout_id]
            others = [other for rollout, other in scores.items() if rollout != state.rollout_id]
            if kind == "reinforce_pp":
                spread = statistics.stdev(batch) if len(batch) > 1 else 0.0
                result.append((score - statistics.fmean(batch)) / (spread + 1e-4))
            elif not others:
                result.append(0.0)
            elif kind == "rloo":
                result.append(score - statistics.fmean(others))
            else:
                scale = statistics.stdev(values) + 1e-4 if kind == "grpo" else 1.0
                result.append((score - statistics.fmean(values)) / scale)
    return result


@given(batches(), st.sampled_from(KINDS))
@settings(max_examples=150, deadline=None)
def test_advantages_equal_the_slow_reference(groups: Groups, kind: Any) -> None:
    found = advantages(groups, kind)
    np.testing.assert_allclose(found.values, slow_advantages(groups, kind), atol=1e-9)
    scores = [{state.rollout_id: (state.reward or {})["score"] for state in group} for group in groups]
    assert found.groups == len(groups)
    assert found.single_groups == sum(len(group) == 1 for group in scores)
    assert found.flat_groups == sum(len(group) > 1 and len(set(group.values())) == 1 for group in scores)
    assert found.rewards.tolist() == [(state.reward or {})["score"] for group in groups for state in group]


def scored(*scores: Any) -> list[RolloutState]:
    group = make_group(len(scores), group_id=4)
    for number, (state, score) in enumerate(zip(group, scores, strict=True)):
        state.task_name, state.rollout_id, state.reward = "math", number, {"score": score}
    return group


@pytest.mark.parametrize("kind", ["grpo", "rloo", "dr_grpo"])
@pytest.mark.parametrize("score", [0.1, 1e-9, 1e9, -3.3])
def test_equal_rewards_have_advantages_of_exactly_zero(kind: Any, score: float) -> None:
    found = advantages([scored(*[score] * 7), scored(score), scored(0, 1)], kind)
    assert found.values[:8].tolist() == [0.0] * 8
    assert found.values[8] < 0 < found.values[9]
    assert (found.groups, found.single_groups, found.flat_groups) == (3, 1, 1)


def test_samples_without_a_rollout_id_are_rollouts_by_themselves() -> None:
    group = scored(0, 1, 1)
    for state in group:
        state.rollout_id = None
    assert advantages([group], "dr_grpo").values == pytest.approx([-2 / 3, 1 / 3, 1 / 3])


def test_a_function_gets_one_reward_for_each_rollout_of_a_group() -> None:
    group = scored(1, 1, 3)
    group[1].rollout_id, group[1].segment = 0, 1
    seen = []

    def halved(rewards: Any) -> Any:
        seen.append(rewards.tolist())
        rewards /= 2
        return rewards

    found = advantages([group, scored(5)], halved)
    assert seen == [[1, 3], [5]]
    assert found.values.tolist() == [0.5, 0.5, 1.5, 2.5]
    assert found.rewards.tolist() == [1, 1, 3, 5]


def test_advantages_that_are_given_are_taken_by_sample() -> None:
    groups = [scored(1, 0), scored(2)]
    [packed] = pack(groups, max_tokens=100, advantages=np.array([1.0, 2.0, 3.0]))
    assert packed.advantages is not None
    assert packed.advantages.tolist() == [1] * 5 + [2] * 5 + [3] * 5
    assert packed.rewards is not None
    assert packed.rewards.tolist() == [1, 0, 2]
    [none] = pack(groups, max_tokens=100, advantages=None)
    assert none.advantages is None
    assert none.rewards is not None


# --- shard ----------------------------------------------------------------------------------------------------


def test_a_cost_function_decides_the_balance() -> None:
    groups = [make_group(1, tokens=tokens) for tokens in (3, 2, 2, 2, 1, 1)]

    def squared(group: list[RolloutState]) -> float:
        return sum(len(state.response_ids or []) ** 2 for state in group)

    loads = [sum(map(squared, shard(groups, rank, 2, cost=squared))) for rank in range(2)]
    assert loads == [11, 12]


@pytest.mark.parametrize("cost", [-1, math.nan, math.inf, None, "many"])
def test_a_cost_that_is_no_finite_number_is_refused(cost: Any) -> None:
    with pytest.raises(InvalidInput, match=r"cost of group 4 is .*; expected a finite number, 0 or more"):
        shard([scored(1)], 0, 1, cost=lambda _: cost)


# --- refusals -------------------------------------------------------------------------------------------------


def changed(**values: Any) -> Groups:
    """Two samples of which the second is changed."""
    group = scored(1, 0)
    for name, value in values.items():
        setattr(group[1], name, value)
    return [group]


SECOND = "rollout 1 of group 4 of task 'math'"


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([], "groups is []; expected a list with at least one group"),
        ([[]], "groups[0] is []; expected a list of at least one RolloutState"),
        (scored(1), "groups[0] is RolloutState("),
        ([[1]], "groups[0] contains a int; expected only RolloutState"),
        (changed(prompt_ids=None), f"{SECOND} has no prompt_ids, so there are no tokens to train on; give the sampler"),
        (changed(response_ids=None, logprobs=None), f"{SECOND} has no response_ids"),
        (changed(response_ids=[], logprobs=[]), "use an engine or agent loop that returns token ids, and tokenize="),
        (changed(response_mask=[1]), f"response_mask of {SECOND} has 1 items but response_ids has 3"),
        (changed(logprobs=[-1.0]), f"logprobs of {SECOND} has 1 items but response_ids has 3"),
        (changed(logprobs=None), f"{SECOND} has no logprobs, but other samples have"),
        (changed(version_spans=((1, 4),)), f"version_spans of {SECOND} covers 4 tokens, but it has only 3"),
        (changed(response_ids=[1, 2.5, 3]), f"response_ids of {SECOND} is [1, 2.5, 3]; expected a list or an array of"),
        (changed(response_ids=[1, 2, 2**64]), f"response_ids of {SECOND}"),
        (changed(response_ids=np.zeros(3)), f"response_ids of {SECOND} is an array of float64; expected"),
        (changed(prompt_ids=np.zeros((2, 2), dtype=int)), f"prompt_ids of {SECOND}"),
        (changed(logprobs=["a", "b", "c"]), f"logprobs of {SECOND} is ['a', 'b', 'c']; expected"),
        (changed(response_mask=[1, -1, 0]), f"response_mask of {SECOND} is [1, -1, 0]; expected"),
        (changed(response_ids=None, input_ids=[1, 2, 3]), f"{SECOND} is an agent trace without labels; set labels"),
        (changed(response_ids=None, input_ids=[1], labels=[1, 2]), f"labels of {SECOND} has 2 items but input_ids"),
        (changed(response_ids=None, input_ids=[1], labels=[1]), f"logprobs of {SECOND} has 3 items but input_ids"),
        (changed(reward=None), f"{SECOND} has no reward['score'] (its reward is None); give the task a reward"),
        (changed(reward={}), f"{SECOND} has no reward['score'] (its reward is {{}})"),
        (changed(reward={"score": math.nan}), f"reward of {SECOND} is {{'score': nan}}; expected a dict whose 'score'"),
        (changed(reward={"score": 10**400}), f"reward of {SECOND} is"),
        (changed(reward={"score": "1"}), f"reward of {SECOND} is"),
        (changed(reward=1.0), f"reward of {SECOND} is 1.0; expected a dict"),
        (changed(rollout_id=0, segment=1), "has score 0 in segment 1 and 1 in segment 0; give all segments"),
        ([scored(1, 1e39)], f"reward of {SECOND} is {{'score': 1e+39}}; expected a dict whose 'score' is a finite"),
    ],
)
@pytest.mark.parametrize("function", ["pack", "pad"])
def test_groups_that_make_no_arrays_are_refused(groups: Any, says: str, function: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        pack(groups, max_tokens=100) if function == "pack" else pad(groups, pad_id=0)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_tokens": 4}, "rollout 0 of group 4 of task 'math' has 5 tokens, but max_tokens is 4; raise max_tokens"),
        ({"max_tokens": 7, "align": 4}, "has 5 tokens, but max_tokens is 7 (4 with align)"),
        ({"max_tokens": 3, "align": 4}, "align is 4, but max_tokens only 3"),
        ({"max_tokens": 0}, "max_tokens is 0; expected an integer of at least 1"),
        ({"max_tokens": 10, "align": 0}, "align is 0; expected an integer of at least 1"),
        ({"max_tokens": 10, "pad_id": "x"}, "pad_id is 'x'; expected an integer"),
        ({"max_tokens": 10, "advantages": "gae"}, "advantages is 'gae'; expected 'grpo', 'rloo', 'dr_grpo'"),
        ({"max_tokens": 10, "advantages": [1.0]}, "advantages has shape (1,), but there are 2 samples"),
        ({"max_tokens": 10, "advantages": [1.0, math.inf]}, "advantages[1] of rollout 1 of group 4"),
        ({"max_tokens": 10, "advantages": [1.0, "x"]}, "expected a kind, or one number for each sample"),
        ({"max_tokens": 10, "advantages": lambda r: r[:1]}, "returned shape (1,) for a group of 2 rollouts"),
        ({"max_tokens": 10, "advantages": lambda r: r + 1e39}, "is 1e+39 (its reward is 1); expected a finite number"),
        ({"max_tokens": 10, "advantages": lambda r: r / 0}, "the advantage of rollout 0 of group 4 of"),
    ],
)
def test_settings_of_pack_are_checked(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        pack([scored(1, 0)], **settings)
    assert says in str(caught.value)


def test_segments_that_do_not_fit_together_are_refused() -> None:
    group = scored(1, 1)
    group[1].rollout_id, group[1].segment = 0, 1
    with pytest.raises(InvalidInput, match="has 10 tokens in all its segments, which stay in one micro-batch"):
        pack([group], max_tokens=9)
    assert len(pack([group], max_tokens=10)) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"side": "top"}, "side is 'top'; expected 'right' or 'left'"),
        ({"multiple_of": 0}, "multiple_of is 0; expected an integer of at least 1"),
        ({"max_length": 4}, "rollout 0 of group 4 of task 'math' has 5 tokens, but max_length is 4; raise max_length"),
        ({"pad_id": None}, "pad_id is None; expected an integer"),
    ],
)
def test_settings_of_pad_are_checked(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        pad([scored(1, 0)], **{"pad_id": 0, **settings})
    assert says in str(caught.value)


class Immense(list[int]):
    """A list that says it has very many items, and cannot be read."""

    def __len__(self) -> int:
        return 10**15

    def __iter__(self) -> Any:
        raise AssertionError("read before it was refused")


def test_limits_are_checked_before_anything_is_read_or_allocated() -> None:
    groups = changed(response_ids=Immense(), logprobs=Immense())
    with pytest.raises(InvalidInput, match=r"has 1000000000000002 tokens, but max_tokens is 4096"):
        pack(groups, max_tokens=4096)
    with pytest.raises(InvalidInput, match=r"has 1000000000000002 tokens, but max_length is 4096"):
        pad(groups, pad_id=0, max_length=4096)


def test_samples_without_rewards_are_packed_without_advantages() -> None:
    groups = [make_group(2)]
    [packed] = pack(groups, max_tokens=100, advantages=None)
    assert packed.rewards is None
    with pytest.raises(InvalidInput, match=r"call pack or pad with advantages=None"):
        pack(groups, max_tokens=100)
