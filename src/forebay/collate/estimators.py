"""One advantage for each sample, from the rewards of its group or its batch.

The reward of a sample is `reward["score"]`. The segments of one rollout share its reward and its advantage, and count
once in all statistics. Everything is computed in float64, and has to fit into float32, which trainers use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from forebay.collate.sequences import Samples, flatten, name_of
from forebay.core.rollout import RolloutState
from forebay.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector: TypeAlias = NDArray[np.float64]

Estimator: TypeAlias = Literal["grpo", "rloo", "dr_grpo", "reinforce_pp"]
Kind: TypeAlias = "Estimator | Callable[[Vector], Any]"

EPSILON = 1e-4
"""Added to standard deviations, as TRL does."""
MOST = float(np.finfo(np.float32).max)
"""Larger rewards and advantages are refused."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Advantages:
    """Advantages and rewards, one for each sample in the order of the groups.

    Groups with one rollout (`single_groups`) or with equal rewards (`flat_groups`) have no gradient under "grpo",
    "rloo" and "dr_grpo": their advantages are exactly 0.
    """

    values: Vector
    rewards: Vector
    groups: int
    single_groups: int
    flat_groups: int


def advantages(groups: Sequence[Sequence[RolloutState]], kind: Kind) -> Advantages:
    """The advantage of each sample. `kind` is a name of the table below, or a function of the rewards of one group.

    | kind | advantage of reward r |
    |---|---|
    | "grpo" | (r - mean) / (std + 1e-4) of the group, as TRL with `scale_rewards="group"` |
    | "dr_grpo" | r - mean of the group |
    | "rloo" | r - mean of the other rollouts of the group |
    | "reinforce_pp" | (r - mean) / (std + 1e-4) of all groups given (REINFORCE++ without baseline) |

    Standard deviations are unbiased (divided by n - 1). "reinforce_pp" needs the groups of the whole batch: compute it
    before the batch is divided among ranks. A function gets an array with one reward for each rollout, and returns the
    same number of advantages.

    >>> def group(*scores):
    ...     return [RolloutState(message=[], rollout_id=n, reward={"score": r}) for n, r in enumerate(scores)]
    >>> groups = [group(1, 0, 0, 1), group(2, 2), group(5)]
    >>> advantages(groups, "grpo").values.round(3).tolist()
    [0.866, -0.866, -0.866, 0.866, 0.0, 0.0, 0.0]
    >>> advantages(groups, "dr_grpo").values.tolist()
    [0.5, -0.5, -0.5, 0.5, 0.0, 0.0, 0.0]
    >>> advantages(groups, "rloo").values.round(3).tolist()
    [0.667, -0.667, -0.667, 0.667, 0.0, 0.0, 0.0]
    >>> advantages(groups, "reinforce_pp").values.round(3).tolist()
    [-0.333, -0.914, -0.914, -0.333, 0.249, 0.249, 1.995]
    >>> advantages(groups, lambda rewards: rewards - rewards.max()).values.tolist()
    [0.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    >>> found = advantages(groups, "grpo")
    >>> found.groups, found.single_groups, found.flat_groups
    (3, 1, 1)
    """
    return estimated(flatten(groups), kind)


def estimated(samples: Samples, kind: Kind) -> Advantages:
    """`advantages` of samples that were already flattened."""
    if not callable(kind) and kind not in get_args(Estimator):
        names = ", ".join(map(repr, get_args(Estimator)))
        raise InvalidInput(f"advantages is {kind!r:.80}; expected {names}, or a function of the rewards of a group")
    scores = scores_of(samples)
    if scores is None:
        raise _missing(samples.states[0])
    rollouts, first = np.unique(samples.rollout_index, return_index=True)
    rewards = scores[first]
    group_of = samples.group_index[first]
    starts = np.flatnonzero(np.diff(group_of, prepend=-1))
    counts = np.diff(starts, append=len(rollouts))
    is_flat = np.maximum.reduceat(rewards, starts) == np.minimum.reduceat(rewards, starts)
    is_single = counts == 1
    with np.errstate(all="ignore"):  # a result that is not finite is refused below
        if callable(kind):
            values = _custom(kind, rewards, starts, counts, samples)
        elif kind == "reinforce_pp":
            values = _normalised_over_batch(rewards)
        else:
            values = _relative_to_group(kind, rewards, starts, counts)
            values[np.repeat(is_flat, counts)] = 0.0  # rounding of the mean must not become a gradient
    if (wrong := first_not_finite(values)) is not None:
        at = int(first[wrong])
        raise InvalidInput(
            f"the advantage of {name_of(samples.states[at])} is {values[wrong]:g} (its reward is {scores[at]:g}); "
            f"expected a finite number of at most {MOST:.1e}: use smaller rewards, or correct the function"
        )
    return Advantages(
        values=values[samples.rollout_index],
        rewards=scores,
        groups=len(starts),
        single_groups=int(is_single.sum()),
        flat_groups=int((is_flat & ~is_single).sum()),
    )


def first_not_finite(values: Vector) -> int | None:
    """The position of the first value that float32 cannot hold, if there is one."""
    fits = np.abs(values) <= MOST
    return None if fits.all() else int(np.argmin(fits))


def _relative_to_group(kind: str, rewards: Vector, starts: Any, counts: Any) -> Vector:
    means = np.add.reduceat(rewards, starts) / counts
    deviations: Vector = rewards - np.repeat(means, counts)
    if kind == "dr_grpo":
        return deviations
    others = np.maximum(counts - 1, 1)
    if kind == "rloo":  # r - (sum - r) / (n - 1), written with the deviation from the mean
        deviations *= np.repeat(counts / others, counts)
        return deviations
    spreads = np.sqrt(np.add.reduceat(deviations * deviations, starts) / others)
    deviations /= np.repeat(spreads, counts) + EPSILON
    return deviations


def _normalised_over_batch(rewards: Vector) -> Vector:
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    result: Vector = (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON)
    return result


def _custom(function: Callable[[Vector], Any], rewards: Vector, starts: Any, counts: Any, samples: Samples) -> Vector:
    values = np.empty_like(rewards)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        part = slice(start, start + count)
        found = np.asarray(function(rewards[part]), dtype=np.float64)
        if found.shape != (count,):
            raise InvalidInput(
                f"the advantage function returned shape {found.shape} for a group of {count} rollouts; expected "
                "one advantage for each reward that it got"
            )
        values[part] = found
    return values


def scores_of(samples: Samples) -> Vector | None:
    """`reward["score"]` of every sample; None if no sample has one."""
    scores = [_score(state) for state in samples.states]
    if None in scores:
        if any(score is not None for score in scores):
            raise _missing(samples.states[scores.index(None)])
        return None
    found = np.array(scores, dtype=np.float64)
    _check_segments(samples, found)
    return found


def _score(state: RolloutState) -> float | None:
    reward = state.reward
    score = reward.get("score") if isinstance(reward, dict) else reward
    if score is None:
        return None
    try:
        number = float(score) if not isinstance(score, str) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not isinstance(reward, dict) or not abs(number) <= MOST:
        raise InvalidInput(
            f"reward of {name_of(state)} is {reward!r:.80}; expected a dict whose 'score' is a finite number of at "
            f"most {MOST:.1e}"
        )
    return number


def _check_segments(samples: Samples, scores: Vector) -> None:
    if samples.rollouts == len(scores):
        return
    first = np.unique(samples.rollout_index, return_index=True)[1]
    differs = np.flatnonzero(scores != scores[first[samples.rollout_index]])
    if len(differs):
        state, other = samples.states[differs[0]], samples.states[first[samples.rollout_index[differs[0]]]]
        raise InvalidInput(
            f"{name_of(state)} has score {scores[differs[0]]:g} in segment {state.segment} and "
            f"{_score(other):g} in segment {other.segment}; give all segments of a rollout the same score"
        )


def _missing(state: RolloutState) -> InvalidInput:
    return InvalidInput(
        f"{name_of(state)} has no reward['score'] (its reward is {state.reward!r:.80}); give the task a reward that "
        "returns a number or a dict with 'score', or call pack or pad with advantages=None if no sample has one"
    )
