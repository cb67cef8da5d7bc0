"""A trajectory made ready to be stored: what is drawn, what continues, and which next observations are kept.

Rows are stored environment after environment (b * T + t), so that a run of steps is one slice. `next_obs` is stored
once: where it is bitwise the following `curr_obs`, the step says which row that is; where it is not (auto-reset, a gap,
the last step) it becomes an extra observation row behind the others, which is never drawn. Preparing copies nothing but
what had to be made contiguous, and changes nothing; `write` copies into rows that were taken for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from forebay.core.dtypes import BFLOAT16
from forebay.errors import InvalidTrajectory
from forebay.trajectory.data import STRING, Aligned, Leaf, Path, dotted
from forebay.trajectory.region import same_bytes
from forebay.trajectory.schema import NEXT, VALID, Layout
from forebay.trajectory.space import Space

__all__ = ["Prepared", "prepare", "write"]

Encode = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]

_SMALL_BYTES = 2**18


class Following(NamedTuple):
    """Where the next observation of each step is, and which are kept as rows of their own."""

    rows: np.ndarray[Any, Any]
    """By step, in the order of rows: which observation row of the trajectory it is."""
    step: np.ndarray[Any, Any]
    env: np.ndarray[Any, Any]
    """The (t, b) of those with a row of their own."""


class Prepared(NamedTuple):
    """What is to be written, and what the index has to know of it."""

    steps: int
    envs: int
    epochs: int
    observations: int
    transitions: int
    reward: float
    model_weights_id: str
    max_episode_length: int
    runs: np.ndarray[Any, Any]
    """`[k, 2]`: where a run of rows that may be drawn begins, and how many they are."""
    chains: np.ndarray[Any, Any]
    """`[k, 2]`: the same for runs of steps that continue into each other."""
    leaves: dict[Path, np.ndarray[Any, Any]]
    """By path: `[epoch, step, env, ...]`."""
    following: Following | None
    valid: np.ndarray[Any, Any] | None
    """`[B * T]`, in the order of rows; None if all are."""

    @property
    def rows(self) -> int:
        return self.steps * self.envs


def prepare(found: Aligned, leaves: dict[Path, Leaf], layout: Layout, encode: Encode) -> Prepared:
    """Make a trajectory ready that fits the schema; `encode` makes codes of text."""
    steps, envs = found.steps, found.envs
    values = {
        path: _encoded(path, leaf, encode) if leaf.dtype == STRING else leaf.values for path, leaf in leaves.items()
    }
    valid = _valid(values)
    same = _same_next(values, layout, steps, envs)
    ends = _ends(values, found)
    following = _regular_following(steps, envs) if same is None else _following(~same)
    runs = np.array([[0, steps * envs]]) if valid is None else _runs(valid[:-1] & valid[1:], valid)
    if valid is None and same is None and ends is None:
        chains = _regular_chains(found.epoch_steps, found.epochs * envs)
    else:
        chains = _runs(_continues(found, same, ends, valid), valid)
    return Prepared(
        steps,
        envs,
        found.epochs,
        steps * envs + len(following.step) if layout.schema.observations else 0,
        steps * envs if valid is None else int(np.count_nonzero(valid)),
        _reward(leaves[("rewards",)], valid),
        found.model_weights_id,
        found.max_episode_length,
        runs,
        chains,
        values,
        following if layout.schema.observations else None,
        valid,
    )


def write(prepared: Prepared, space: Space, first_step: int, first_observation: int) -> None:
    """Copy it into rows that were taken for it."""
    envs = prepared.envs
    for strip, columns in zip(space.steps.strips, space.steps.columns, strict=True):
        for column, (path, _, _) in zip(columns, strip.fields, strict=True):
            target = column[first_step : first_step + prepared.rows]
            if path == VALID:
                target[:] = True if prepared.valid is None else prepared.valid
            elif path == NEXT:
                assert prepared.following is not None
                target[:] = prepared.following.rows
            else:
                _copy(target, prepared.leaves[path], envs)
    extra = prepared.following
    if extra is None:
        return
    for strip, columns in zip(space.observations.strips, space.observations.columns, strict=True):
        for column, (path, _, _) in zip(columns, strip.fields, strict=True):
            target = column[first_observation : first_observation + prepared.observations]
            _copy(target[: prepared.rows], prepared.leaves[("curr_obs", *path)], envs)
            following = prepared.leaves[("next_obs", *path)]
            following = following.reshape(prepared.steps, *following.shape[2:])
            target[prepared.rows :] = following[extra.step, extra.env]


def _encoded(path: Path, leaf: Leaf, encode: Encode) -> np.ndarray[Any, Any]:
    try:
        return encode(leaf.values)
    except InvalidTrajectory as error:
        raise InvalidTrajectory(f"{dotted(path)}: {error}") from None


def _copy(rows: np.ndarray[Any, Any], values: np.ndarray[Any, Any], envs: int) -> None:
    """Write `[epoch, step, env, ...]` into rows, environment after environment."""
    epochs, steps = values.shape[:2]
    if epochs == envs == 1:
        rows[:] = values[0, :, 0]
    else:
        rows.reshape(envs, epochs, steps, *rows.shape[1:])[:] = np.moveaxis(values, 2, 0)


def _valid(values: dict[Path, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any] | None:
    given = values.get(("valid",))
    if given is None or given.all():
        return None
    return np.ascontiguousarray(np.moveaxis(given, 2, 0).reshape(-1))


def _reward(leaf: Leaf, valid: np.ndarray[Any, Any] | None) -> float:
    """The sum over all steps that may be drawn; not a number if a reward is none."""
    rewards = leaf.values
    if leaf.dtype == BFLOAT16:  # the upper half of a float32
        rewards = (rewards.astype(np.uint32) << 16).view(np.float32)
    if valid is not None:
        rewards = np.moveaxis(rewards, 2, 0).reshape(len(valid), -1)[valid]
    with np.errstate(all="ignore"):  # rewards may be infinite
        return float(rewards.sum(dtype=np.float64))


def _runs(joined: np.ndarray[Any, Any], valid: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    """Stretches of valid rows; `joined[i]` says that rows i and i + 1 are in the same one.

    >>> _runs(np.array([True, False, False]), np.array([True, True, False, True])).tolist()
    [[0, 2], [3, 1]]
    >>> _runs(np.array([True, False, True]), None).tolist()
    [[0, 2], [2, 2]]
    """
    if valid is None:
        breaks = np.flatnonzero(~joined)
        runs = np.empty((len(breaks) + 1, 2), np.int64)
        runs[0, 0], runs[-1, 1] = 0, len(joined) + 1
        runs[1:, 0] = runs[:-1, 1] = breaks + 1
        runs[:, 1] -= runs[:, 0]
        return runs
    starts = np.flatnonzero(valid & ~np.concatenate(([False], joined)))
    ends = np.flatnonzero(valid & ~np.concatenate((joined, [False]))) + 1
    return np.stack((starts, ends - starts), axis=1)


def _ends(values: dict[Path, np.ndarray[Any, Any]], found: Aligned) -> np.ndarray[Any, Any] | None:
    """`[T, B]`: where an episode ends; None if none does before the end of an epoch."""
    ends: np.ndarray[Any, Any] | None = None
    for name in ("dones", "terminations", "truncations"):
        flags = values.get((name,))
        if flags is not None and flags[:, :-1].any():  # where an epoch ends, nothing goes on anyway
            here = np.any(flags.reshape(found.steps, found.envs, -1), axis=2)
            ends = here if ends is None else ends | here
    return ends


def _continues(
    found: Aligned,
    same: np.ndarray[Any, Any] | None,
    ends: np.ndarray[Any, Any] | None,
    valid: np.ndarray[Any, Any] | None,
) -> np.ndarray[Any, Any]:
    """By row but the last: whether its step goes on into the next.

    It does not if it is done, the last of its epoch, not valid, or if its next_obs is not the following curr_obs.
    """
    goes_on = np.ones((found.steps, found.envs), bool) if same is None else same.copy()
    goes_on[found.epoch_steps - 1 :: found.epoch_steps] = False
    if ends is not None:
        goes_on &= ~ends
    by_row = goes_on.T.reshape(-1)[:-1]
    return by_row if valid is None else by_row & valid[:-1] & valid[1:]


@lru_cache(maxsize=64)
def _regular_chains(length: int, count: int) -> np.ndarray[Any, Any]:
    chains = np.empty((count, 2), np.int64)
    chains[:, 0], chains[:, 1] = np.arange(0, length * count, length), length
    chains.setflags(write=False)
    return chains


def _following(differs: np.ndarray[Any, Any]) -> Following:
    """`differs[t, b]`: the next observation is not the following one."""
    steps, envs = differs.shape
    rows = np.arange(1, steps * envs + 1, dtype=np.int32)
    where = np.flatnonzero(differs.T)
    rows[where] = np.arange(steps * envs, steps * envs + len(where))
    env, step = np.divmod(where, steps)
    return Following(rows, step, env)


@lru_cache(maxsize=64)
def _regular_following(steps: int, envs: int) -> Following:
    """As most trajectories are: all but the last of each env are the following ones."""
    differs = np.zeros((steps, envs), bool)
    differs[-1] = True
    found = _following(differs)
    for array in found:
        array.setflags(write=False)
    return found


# --- which next observations are the following ones ---------------------------------------------------


def _same_next(
    values: dict[Path, np.ndarray[Any, Any]], layout: Layout, steps: int, envs: int
) -> np.ndarray[Any, Any] | None:
    """`[T, B]`: whether next_obs is bitwise the following curr_obs, in all leaves; None if all but the last are."""
    rows = (steps - 1) * envs
    found: np.ndarray[Any, Any] | None = None
    for field in layout.schema.observations:
        size = field.row_bytes
        now = np.ascontiguousarray(values[("curr_obs", *field.path)])
        following = np.ascontiguousarray(values[("next_obs", *field.path)])
        if not same_bytes(_address(following), _address(now) + envs * size, rows * size):
            if found is None:
                found = np.ones(rows, bool)
            _compare(following, now, envs, size, found)
    if found is None:
        return None
    same = np.zeros((steps, envs), bool)
    same[:-1] = found.reshape(steps - 1, envs)
    return same


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _compare(
    following: np.ndarray[Any, Any], now: np.ndarray[Any, Any], envs: int, size: int, found: np.ndarray[Any, Any]
) -> None:
    """Clear `found` where row i of one is not row i + envs of the other. Images are compared as memory is."""
    one, other = _address(following), _address(now) + envs * size
    stretches = [(0, len(found))]
    while stretches:
        start, end = stretches.pop()
        length = (end - start) * size
        if same_bytes(one + start * size, other + start * size, length):
            continue
        if end - start == 1:
            found[start] = False
        elif length <= _SMALL_BYTES:
            left = following.reshape(-1).view(np.uint8).reshape(-1, size)[start:end]
            right = now.reshape(-1).view(np.uint8).reshape(-1, size)[start + envs : end + envs]
            found[start:end] &= (left == right).all(axis=1)
        else:
            middle = (start + end) // 2
            stretches += [(middle, end), (start, middle)]
