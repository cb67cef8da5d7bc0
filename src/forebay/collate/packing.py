"""Micro-batches of concatenated sequences, without padding between them.

Rollouts are placed by first-fit decreasing, so that few micro-batches are needed and the result depends on nothing but
the groups. All micro-batches of a call are views of the same arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from forebay.collate.estimators import Kind, scores_of
from forebay.collate.sequences import Layout, Samples, fill, flatten, measure, name_of
from forebay.collate.values import advantages_of, by_sample, tensors
from forebay.core.rollout import RolloutState
from forebay.core.validate import checked_integer
from forebay.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

A = TypeVar("A")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Packed(Generic[A]):
    """A micro-batch: sequence s has the tokens `cu_seqlens[s]` to `cu_seqlens[s + 1]`.

    Columns by token have one entry for each token, columns by sample one for each sample. With `align`, the padding at
    the end is a sequence of `cu_seqlens` without a sample.
    """

    # by token
    input_ids: A  # int64
    position_ids: A  # int64; from 0 in every sequence
    loss_mask: A  # bool
    logprobs: A | None  # float32; None if the samples have none
    advantages: A | None  # float32, the same for all tokens of a sample; None without advantages
    versions: A  # int64
    # by sample
    cu_seqlens: A  # int32, one entry more than sequences
    rewards: A | None  # float32; None if the samples have none
    sample_index: A  # int64, position among all samples of the groups
    group_index: A  # int64, position in the list of groups
    task: tuple[str | None, ...]
    routed_experts: tuple[Any, ...] | None  # as in the samples; None if none has any
    mm_info: tuple[dict[str, Any] | None, ...] | None
    # numbers
    max_seqlen: int
    masked_tokens: int  # response tokens that response_mask excludes

    def torch(self) -> Packed[Tensor]:
        """The same micro-batch with torch tensors that share memory with the arrays."""
        return Packed(**tensors({field.name: getattr(self, field.name) for field in fields(self)}))


def pack(
    groups: Sequence[Sequence[RolloutState]],
    *,
    max_tokens: int,
    align: int = 1,
    advantages: Kind | Sequence[float] | NDArray[Any] | None = "grpo",
    shifted: bool = False,
    pad_id: int = 0,
) -> list[Packed[NDArray[Any]]]:
    """Micro-batches of at most `max_tokens` tokens, padded at their end to a multiple of `align` with `pad_id`.

    The segments of a rollout are in the same micro-batch. Within a micro-batch samples have the order of the groups.
    `advantages`: a kind of `forebay.collate.advantages`, one number for each sample, or None. `shifted`: see
    `forebay.collate`. Cost: O(n log n) for n samples, and one pass over each column.

    >>> groups = [[RolloutState(message=[], prompt_ids=[1], response_ids=[2, 3])],
    ...           [RolloutState(message=[], prompt_ids=[4], response_ids=[5] * 4, version_spans=((7, 4),))]]
    >>> first, second = pack(groups, max_tokens=6, advantages=None)
    >>> first.input_ids.tolist(), first.loss_mask.astype(int).tolist(), first.versions.tolist()
    ([4, 5, 5, 5, 5], [0, 1, 1, 1, 1], [-1, 7, 7, 7, 7])
    >>> [both] = pack(groups, max_tokens=16, align=4, advantages=None)
    >>> both.input_ids.tolist(), both.cu_seqlens.tolist(), both.group_index.tolist()
    ([1, 2, 3, 4, 5, 5, 5, 5], [0, 3, 8], [0, 1])
    """
    checked_integer("max_tokens", max_tokens, least=1)
    checked_integer("align", align, least=1)
    checked_integer("pad_id", pad_id)
    samples = flatten(groups)
    lengths = measure(samples)
    capacity = max_tokens // align * align
    if not capacity:
        raise InvalidInput(f"align is {align}, but max_tokens only {max_tokens}; expected at most max_tokens")
    sizes = [0] * samples.rollouts
    for rollout, tokens in zip(samples.rollout_index.tolist(), lengths.total, strict=True):
        sizes[rollout] += tokens
    _check_sizes(samples, lengths.total, sizes, capacity, max_tokens)
    values = advantages_of(samples, advantages)
    rewards = scores_of(samples) if values is None or values.rewards is None else values.rewards

    bins = first_fit_decreasing(sizes, capacity)
    bin_of = [0] * samples.rollouts
    for position, rollouts in enumerate(bins):
        for rollout in rollouts:
            bin_of[rollout] = position
    contents: list[list[int]] = [[] for _ in bins]
    for index, rollout in enumerate(samples.rollout_index.tolist()):
        contents[bin_of[rollout]].append(index)
    order = [index for content in contents for index in content]
    padding = [-sum(sizes[rollout] for rollout in rollouts) % align for rollouts in bins]
    after = [0] * len(order)
    last = -1
    for content, tokens in zip(contents, padding, strict=True):
        last += len(content)
        after[last] = tokens
    columns = fill(
        samples,
        lengths,
        Layout(order, [0] * len(order), after, [len(content) for content in contents]),
        None if values is None else values.values,
        pad_id=pad_id,
        shifted=shifted,
    )

    starts, ends = columns.starts.tolist(), columns.ends.tolist()
    sample_index = np.array(order, dtype=np.int64)
    group_index = samples.group_index[sample_index]
    packed_rewards = None if rewards is None else rewards[sample_index].astype(np.float32)
    packed = []
    first = 0
    for content, tokens, masked in zip(contents, padding, columns.masked, strict=True):
        stop = first + len(content)
        start, end = starts[first], ends[stop - 1] + tokens
        bounds = [at - start for at in starts[first:stop]] + [ends[stop - 1] - start]
        if tokens:
            bounds.append(end - start)
        states = [samples.states[index] for index in content]
        packed.append(
            Packed(
                input_ids=columns.input_ids[start:end],
                position_ids=columns.position_ids[start:end],
                loss_mask=columns.loss_mask[start:end],
                logprobs=None if columns.logprobs is None else columns.logprobs[start:end],
                advantages=None if columns.advantages is None else columns.advantages[start:end],
                versions=columns.versions[start:end],
                cu_seqlens=np.array(bounds, dtype=np.int32),
                rewards=None if packed_rewards is None else packed_rewards[first:stop],
                sample_index=sample_index[first:stop],
                group_index=group_index[first:stop],
                task=tuple([state.task_name for state in states]),
                routed_experts=by_sample([state.routed_experts for state in states]),
                mm_info=by_sample([state.mm_info for state in states]),
                max_seqlen=max(*[lengths.total[index] for index in content], tokens),
                masked_tokens=masked,
            )
        )
        first = stop
    return packed


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of items: largest first, each into the first bin that still has space for it.

    Every size is at most `capacity`. A tree of the largest free space finds the bin in O(log n).

    >>> first_fit_decreasing([3, 5, 2, 4, 1], 6)
    [[1, 4], [3, 2], [0]]
    """
    # All bins but one are more than half full, so there are never more than these.
    most = min(len(sizes), 2 * (sum(sizes) // capacity) + 2)
    leaves = 1 << (most - 1).bit_length()
    free = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        size = sizes[item]
        node = 1
        while node < leaves:
            node *= 2
            if free[node] < size:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(item)
        free[node] -= size
        while node > 1:
            left = free[node & ~1]
            right = free[node | 1]
            node //= 2
            largest = left if left > right else right
            if free[node] == largest:
                break
            free[node] = largest
    return bins


def _check_sizes(samples: Samples, tokens: list[int], sizes: list[int], capacity: int, max_tokens: int) -> None:
    if max(sizes) <= capacity:
        return
    rollout = next(rollout for rollout, size in enumerate(sizes) if size > capacity)
    index = samples.rollout_index.tolist().index(rollout)
    limit = f"max_tokens is {max_tokens}" + (f" ({capacity} with align)" if capacity != max_tokens else "")
    if tokens[index] == sizes[rollout]:
        found = f"{name_of(samples.states[index])} has {sizes[rollout]} tokens"
    else:
        found = (
            f"{name_of(samples.states[index])} has {sizes[rollout]} tokens in all its segments, which stay in one "
            "micro-batch"
        )
    raise InvalidInput(
        f"{found}, but {limit}; raise max_tokens, limit the response (SampleParams.max_tokens), or filter the group"
    )
