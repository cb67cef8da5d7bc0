"""How old generated tokens are, and what follows from it.

Two clocks: train step t (from 1) is the optimiser step that will consume the data, model step m is the step whose
weights generated a token (0 is the initial model). On-policy means t = m + 1. Producers, buffer and managers all call
the rules of this module. Nothing here stores anything.

A token is fresh for t under a threshold exactly if its model step is at least `floor_step(t, threshold)`. So expiry is
one comparison with a number that only moves when t does, and a storage finds expired groups at the end of an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from forebay.core.rollout import (
    Group,
    RolloutState,
    Status,
    TokenColumn,
    VersionSpans,
    reset_response,
    versioned_tokens,
)
from forebay.core.validate import checked_integer
from forebay.errors import InvalidGroup, InvalidInput

EXPIRABLE = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)
"""The statuses at which a buffered group can grow too old; in the others it waits for a decision."""


def staleness(model_step: int, train_step: int) -> int:
    """How many steps behind on-policy a token is.

    >>> staleness(3, 5), staleness(4, 5), staleness(5, 5)
    (1, 0, 0)
    """
    return max(0, train_step - model_step - 1)


def stale_threshold(max_staleness: int, sync_weights_interval: int) -> int:
    """The staleness at which data is too old, for a limit counted in weight updates.

    >>> stale_threshold(0, 1), stale_threshold(0, 4), stale_threshold(1, 4)
    (1, 4, 8)
    """
    checked_integer("max_staleness", max_staleness, least=0)
    checked_integer("sync_weights_interval", sync_weights_interval, least=1)
    return (max_staleness + 1) * sync_weights_interval


def floor_step(train_step: int, threshold: int) -> int:
    """The oldest model step that is still fresh for a train step.

    >>> [staleness(m, 9) >= 4 for m in (4, 5)], floor_step(9, 4)
    ([True, False], 5)
    """
    return train_step - threshold


def check_step(name: str, step: int | None, *, least: int) -> int | None:
    """A train step (from 1) or model step (from 0), or None; InvalidInput otherwise."""
    return None if step is None else checked_integer(name, step, least=least)


class Floors(msgspec.Struct, frozen=True, gc=False):
    """The oldest model steps that may still leave: of any token, and of a member's newest trainable token."""

    oldest: int | None = None
    token: int | None = None


class Limits(msgspec.Struct, frozen=True, gc=False):
    """How old the groups of a task may grow, and what becomes of those that do."""

    stale_threshold: int | None = None
    token_stale_threshold: int | None = None
    retryable: bool = True

    def __post_init__(self) -> None:
        for name in ("stale_threshold", "token_stale_threshold"):
            value = getattr(self, name)
            if value is not None:
                checked_integer(name, value, least=1)

    def floors(self, train_step: int) -> Floors:
        sequence, token = self.stale_threshold, self.token_stale_threshold
        return Floors(
            None if sequence is None else floor_step(train_step, sequence),
            None if token is None else floor_step(train_step, token),
        )


NO_FLOORS = Floors()
NO_LIMITS = Limits()


# --- versions -----------------------------------------------------------------------------------------


def stamp(spans: VersionSpans, tokens: int, model_step: int) -> VersionSpans:
    """Spans that cover `tokens` tokens, those without a version yet having `model_step`.

    >>> stamp(((1, 1),), 3, 4)
    ((1, 1), (4, 2))
    >>> stamp(((4, 1),), 3, 4)
    ((4, 3),)
    """
    if not spans:
        return ((model_step, tokens),) if tokens else ()
    missing = tokens - sum(run for _, run in spans)
    if missing < 0:
        raise InvalidGroup(f"versions for {tokens - missing} tokens, but only {tokens} tokens")
    if not missing:
        return spans
    if spans[-1][0] == model_step:
        return (*spans[:-1], (model_step, spans[-1][1] + missing))
    return (*spans, (model_step, missing))


def _oldest_step(state: RolloutState) -> int | None:
    spans = state.version_spans
    if not spans:
        return None
    return spans[0][0] if len(spans) == 1 else min(step for step, _ in spans)


def group_oldest_step(group: Sequence[RolloutState]) -> int | None:
    """The model step of the oldest token of a group, None without tokens."""
    return min((step for state in group if (step := _oldest_step(state)) is not None), default=None)


def group_newest_step(group: Sequence[RolloutState]) -> int | None:
    """The model step of the newest token of a group, None without tokens."""
    return max((step for state in group for step, _ in state.version_spans), default=None)


def group_token_step(group: Sequence[RolloutState]) -> int | None:
    """The least, over the members, of the newest step among a member's trainable tokens.

    Below the token floor some member has nothing left to train on. None if no member can expire that way.
    """
    return min((step for state in group if (step := _newest_trainable_step(state)) is not None), default=None)


def _newest_trainable_step(state: RolloutState) -> int | None:
    """None for a sample that token thresholds do not expire: no versions, an agent trace, masked out as it is."""
    spans = state.version_spans
    if not spans or state.input_ids is not None or state.labels is not None:
        return None
    mask = state.response_mask
    versioned, tokens = sum([run for _, run in spans]), versioned_tokens(state)
    if versioned < tokens and (mask is None or _any_set(mask, versioned, tokens)):
        return None  # it can be trained on tokens of unknown age
    if mask is None:
        return spans[0][0] if len(spans) == 1 else max(step for step, _ in spans)
    newest: int | None = None
    start = 0
    for step, run in spans:
        if (newest is None or step > newest) and _any_set(mask, start, start + run):
            newest = step
        start += run
    return newest


def _any_set(mask: TokenColumn, start: int, stop: int) -> bool:
    if mask[stop - 1] or mask[start]:  # nearly every run is trainable at one of its ends
        return True
    part = mask[start:stop]
    return bool(np.count_nonzero(part)) if isinstance(part, np.ndarray) else any(part)


def sample_staleness(state: RolloutState, train_step: int) -> int:
    """Staleness of a sample by its oldest token; 0 without tokens."""
    oldest = _oldest_step(state)
    return 0 if oldest is None else staleness(oldest, train_step)


def group_staleness(group: Sequence[RolloutState], train_step: int) -> int:
    """Staleness of a group by its stalest member."""
    return max(sample_staleness(state, train_step) for state in group)


# --- masks and expiry ---------------------------------------------------------------------------------


def token_mask(state: RolloutState, train_step: int, token_threshold: int) -> TokenColumn | None:
    """The semantic mask without the tokens at or over the threshold; None for an agent trace.

    >>> state = RolloutState(message=[], response_ids=[7, 8], version_spans=((0, 1), (4, 1)))
    >>> token_mask(state, 5, 4), token_mask(state, 5, 8)
    ([0, 1], [1, 1])
    """
    checked_integer("token_stale_threshold", token_threshold, least=1)
    if state.input_ids is not None or state.labels is not None or state.response_ids is None:
        return None
    semantic = state.response_mask
    if semantic is None:
        tokens = len(state.response_ids)
        semantic = [1] * tokens if isinstance(state.response_ids, list) else np.ones(tokens, dtype=np.int64)
    floor = floor_step(train_step, token_threshold)
    if all(step >= floor for step, _ in state.version_spans):
        return semantic
    mask: Any = semantic.copy()
    start = 0
    for step, run in state.version_spans:
        if step < floor:
            mask[start : start + run] = [0] * run if isinstance(mask, list) else 0
        start += run
    return mask  # type: ignore[no-any-return]


def apply_token_mask(state: RolloutState, train_step: int, token_threshold: int) -> None:
    """Write the token mask into a sample that is about to be trained on."""
    mask = token_mask(state, train_step, token_threshold)
    if isinstance(mask, np.ndarray):
        mask.setflags(write=False)
    if mask is not None:
        state.response_mask = mask


def expire_members(group: Sequence[RolloutState], floors: Floors) -> Group | None:
    """The group with every member below the floors EXPIRED and reset; None if none is.

    Fresh siblings are kept as they are. The segments of one rollout expire together and collapse to the
    one sample that was issued.
    """
    return _reset_members(group, [_below(state, floors) for state in group], Status.EXPIRED)


def reset_newer_members(group: Sequence[RolloutState], model_step: int) -> Group | None:
    """The group with every member that has tokens of later weights than these ABORTED and reset; None if none has."""
    return _reset_members(group, [is_newer(state, model_step) for state in group], Status.ABORTED)


def is_newer(state: RolloutState, model_step: int) -> bool:
    """Whether some token is of later weights than these. After a resume such weights are lost."""
    return any(step > model_step for step, _ in state.version_spans)


def _reset_members(group: Sequence[RolloutState], chosen: list[bool], status: Status) -> Group | None:
    if not any(chosen):
        return None
    rollouts = [state.rollout_id for state in group]
    if None in rollouts or len(set(rollouts)) == len(rollouts):
        return tuple([_reset(state, status) if each else state for state, each in zip(group, chosen, strict=True)])
    members: list[RolloutState] = []
    reset = {rollout_id for rollout_id, each in zip(rollouts, chosen, strict=True) if each}
    for state in group:
        if state.rollout_id not in reset:
            members.append(state)
        elif state.segment == min(other.segment for other in group if other.rollout_id == state.rollout_id):
            members.append(_reset(state, status))
    return tuple(members)


def _reset(state: RolloutState, status: Status) -> RolloutState:
    state = reset_response(state)
    state.status = status
    return state


def _below(state: RolloutState, floors: Floors) -> bool:
    if floors.oldest is not None:
        oldest = _oldest_step(state)
        if oldest is not None and oldest < floors.oldest:
            return True
    if floors.token is not None:
        newest = _newest_trainable_step(state)
        return newest is not None and newest < floors.token
    return False


def check_versions(group: Sequence[RolloutState]) -> None:
    """InvalidInput if some token has no version: its age could not be judged."""
    for state in group:
        versions = sum(run for _, run in state.version_spans)
        if versions < versioned_tokens(state):
            raise InvalidInput(
                f"rollout {state.rollout_id} of group {state.group_id} has {versioned_tokens(state)} tokens and "
                f"versions for {versions}; with current_train_step, pass model_step as well"
            )
