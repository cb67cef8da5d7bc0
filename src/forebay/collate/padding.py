"""The classic form: one row of equal length for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from forebay.collate.estimators import Kind, scores_of
from forebay.collate.sequences import Layout, fill, flatten, measure, name_of
from forebay.collate.values import advantages_of, by_sample, tensors
from forebay.core.rollout import RolloutState
from forebay.core.validate import checked_integer
from forebay.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

A = TypeVar("A")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Padded(Generic[A]):
    """All samples of the groups, in order. Columns by token have the shape [samples, length]."""

    # by token
    input_ids: A  # int64
    attention_mask: A  # bool; False on padding
    position_ids: A  # int64; 0 at the first token of each sample
    loss_mask: A  # bool
    logprobs: A | None  # float32; None if the samples have none
    advantages: A | None  # float32, the same for all tokens of a sample; None without advantages
    versions: A  # int64
    # by sample
    lengths: A  # int64, tokens without padding
    rewards: A | None  # float32; None if the samples have none
    sample_index: A  # int64, position among all samples of the groups
    group_index: A  # int64, position in the list of groups
    task: tuple[str | None, ...]
    routed_experts: tuple[Any, ...] | None  # as in the samples; None if none has any
    mm_info: tuple[dict[str, Any] | None, ...] | None
    # numbers
    masked_tokens: int  # response tokens that response_mask excludes

    def torch(self) -> Padded[Tensor]:
        """The same batch with torch tensors that share memory with the arrays."""
        return Padded(**tensors({field.name: getattr(self, field.name) for field in fields(self)}))


def pad(
    groups: Sequence[Sequence[RolloutState]],
    *,
    pad_id: int,
    side: Literal["right", "left"] = "right",
    multiple_of: int = 1,
    max_length: int | None = None,
    advantages: Kind | Sequence[float] | NDArray[Any] | None = "grpo",
    shifted: bool = False,
) -> Padded[NDArray[Any]]:
    """One row for each sample, as long as the longest one, rounded up to a multiple of `multiple_of`.

    A sample of more than `max_length` tokens is refused before memory is allocated. `advantages`: a kind of
    `forebay.collate.advantages`, one number for each sample, or None. `shifted`: see `forebay.collate`.

    >>> groups = [[RolloutState(message=[], prompt_ids=[1], response_ids=[2, 3])],
    ...           [RolloutState(message=[], prompt_ids=[4], response_ids=[5])]]
    >>> pad(groups, pad_id=0, advantages=None).input_ids.tolist()
    [[1, 2, 3], [4, 5, 0]]
    >>> pad(groups, pad_id=0, side="left", multiple_of=4, advantages=None).input_ids.tolist()
    [[0, 1, 2, 3], [0, 0, 4, 5]]
    """
    checked_integer("pad_id", pad_id)
    checked_integer("multiple_of", multiple_of, least=1)
    if side not in ("right", "left"):
        raise InvalidInput(f"side is {side!r:.80}; expected 'right' or 'left'")
    samples = flatten(groups)
    lengths = measure(samples)
    longest = max(lengths.total)
    if max_length is not None and longest > checked_integer("max_length", max_length, least=1):
        state = samples.states[lengths.total.index(longest)]
        raise InvalidInput(
            f"{name_of(state)} has {longest} tokens, but max_length is {max_length}; raise max_length, limit the "
            "response (SampleParams.max_tokens), or filter the group"
        )
    values = advantages_of(samples, advantages)
    rewards = scores_of(samples) if values is None or values.rewards is None else values.rewards
    width = longest + -longest % multiple_of
    count = len(samples.states)
    missing, none = [width - total for total in lengths.total], [0] * count
    before, after = (missing, none) if side == "left" else (none, missing)
    columns = fill(
        samples,
        lengths,
        Layout(list(range(count)), before, after, [count]),
        None if values is None else values.values,
        pad_id=pad_id,
        shifted=shifted,
    )
    totals = np.array(lengths.total, dtype=np.int64)
    offsets = np.array(before, dtype=np.int64)[:, None]
    positions = np.arange(width)
    shape = (count, width)
    return Padded(
        input_ids=columns.input_ids.reshape(shape),
        attention_mask=(positions >= offsets) & (positions < offsets + totals[:, None]),
        position_ids=columns.position_ids.reshape(shape),
        loss_mask=columns.loss_mask.reshape(shape),
        logprobs=None if columns.logprobs is None else columns.logprobs.reshape(shape),
        advantages=None if columns.advantages is None else columns.advantages.reshape(shape),
        versions=columns.versions.reshape(shape),
        lengths=totals,
        rewards=None if rewards is None else rewards.astype(np.float32),
        sample_index=np.arange(count, dtype=np.int64),
        group_index=samples.group_index,
        task=tuple([state.task_name for state in samples.states]),
        routed_experts=by_sample([state.routed_experts for state in samples.states]),
        mm_info=by_sample([state.mm_info for state in samples.states]),
        masked_tokens=columns.masked[0],
    )
