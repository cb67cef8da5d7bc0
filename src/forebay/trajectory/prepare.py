"""A trajectory made ready to be stored: what is drawn, what continues, and which next observations are kept.

Rows are stored environment after environment (b * T + t), so that a run of steps is one slice. `next_obs` is stored
once: where it is bitwise the following `curr_obs`, the step says which row that is; where it is not (auto-reset, a gap,
the last step) it becomes an extra observation row behind the others, which is never drawn. Preparing copies nothing but
what had to be made contiguous, and changes nothing; `write` copies into rows that were taken for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from forebay.trajectory.data import STRING, Aligned, Leaf, Path
from forebay.trajectory.region import same_bytes
from forebay.trajectory.schema import NEXT, VALID, Layout
from forebay.trajectory.space import Space

__all__ = ["Prepared", "prepare", "write"]

Encode = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]

_SMALL_BYTES = 2**18


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
    next_rows: np.ndarray[Any, Any] | None
    extra: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None
    """The (t, b) of next observations that are kept as rows of their own."""
    valid: np.ndarray[Any, Any] | None
    """`[B * T]`, in the order of rows; None if all are."""

    @property
    def rows(self) -> int:
        return self.steps * self.envs


def prepare(found: Aligned, leaves: dict[Path, Leaf], layout: Layout, encode: Encode) -> Prepared:
    """Make a trajectory ready that fits the schema; `encode` makes codes of text."""
    steps, envs = found.steps, found.envs
    values = {path: encode(leaf.values) if leaf.dtype == STRING else leaf.values for path, leaf in leaves.items()}
    valid = _valid(values)
    same = _same_next(values, layout, steps, envs)
    next_rows = extra = None
    observations = 0
    if same is not None:
        next_rows = np.arange(1, steps * envs + 1, dtype=np.int32)
        differs = np.flatnonzero(~same.T)  # in the order of rows
        next_rows[differs] = np.arange(steps * envs, steps * envs + len(differs))
        env, step = np.divmod(differs, steps)
        extra = (step, env)
        observations = steps * envs + len(differs)
    goes_on = _continues(values, found, same).T.reshape(-1)[:-1]
    return Prepared(
        steps,
        envs,
        found.epochs,
        observations,
        steps * envs if valid is None else int(np.count_nonzero(valid)),
        _reward(values[("rewards",)], valid),
        found.model_weights_id,
        found.max_episode_length,
        np.array([[0, steps * envs]]) if valid is None else _runs(valid[:-1] & valid[1:], valid),
        _runs(goes_on, None) if valid is None else _runs(goes_on & valid[:-1] & valid[1:], valid),
        values,
        next_rows,
        extra,
        valid,
    )


def write(prepared: Prepared, space: Space, first_step: int, first_observation: int) -> None:
    """Copy it into rows that were taken for it."""
    envs = prepared.envs
    for strip, records in zip(space.steps.strips, space.steps.records, strict=True):
        rows = records[first_step : first_step + prepared.rows]
        for k, (path, _, _) in enumerate(strip.fields):
            target = rows[f"f{k}"]
            if path == VALID:
                target[:] = True if prepared.valid is None else prepared.valid
            elif path == NEXT:
                target[:] = prepared.next_rows
            else:
                _by_env(target, envs)[:] = _environments_first(prepared.leaves[path], target.shape)
    if prepared.extra is None:
        return
    for strip, records in zip(space.observations.strips, space.observations.records, strict=True):
        rows = records[first_observation : first_observation + prepared.observations]
        for k, (path, _, _) in enumerate(strip.fields):
            target = rows[f"f{k}"]
            now = target[: prepared.rows]
            _by_env(now, envs)[:] = _environments_first(prepared.leaves[("curr_obs", *path)], now.shape)
            following = prepared.leaves[("next_obs", *path)]
            following = following.reshape(prepared.steps, *following.shape[2:])
            target[prepared.rows :] = following[prepared.extra]


def _by_env(rows: np.ndarray[Any, Any], envs: int) -> np.ndarray[Any, Any]:
    return rows.reshape(envs, len(rows) // envs, *rows.shape[1:])


def _environments_first(values: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """`[epoch, step, env, ...]` as `[env, T, ...]`."""
    epochs, steps, envs = values.shape[:3]
    if epochs == 1:
        whole: np.ndarray[Any, Any] = values[0].swapaxes(0, 1)
        return whole
    return np.moveaxis(values, 2, 0).reshape(envs, epochs * steps, *shape[1:])


def _valid(values: dict[Path, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any] | None:
    given = values.get(("valid",))
    if given is None or given.all():
        return None
    return np.ascontiguousarray(np.moveaxis(given, 2, 0).reshape(-1))


def _reward(rewards: np.ndarray[Any, Any], valid: np.ndarray[Any, Any] | None) -> float:
    """The sum over all steps that may be drawn; not a number if a reward is none."""
    if valid is not None:
        rewards = np.moveaxis(rewards, 2, 0).reshape(len(valid), -1)[valid]
    return float(rewards.sum(dtype=np.float64))


def _runs(joined: np.ndarray[Any, Any], valid: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    """Stretches of valid rows; `joined[i]` says that rows i and i + 1 are in the same one.

    >>> _runs(np.array([True, False, False]), np.array([True, True, False, True])).tolist()
    [[0, 2], [3, 1]]
    >>> _runs(np.array([True, False, True]), None).tolist()
    [[0, 2], [2, 2]]
    """
    if valid is None:
        breaks = np.flatnonzero(~joined) + 1
        edges = np.concatenate(([0], breaks, [len(joined) + 1]))
        return np.stack((edges[:-1], np.diff(edges)), axis=1)
    starts = np.flatnonzero(valid & ~np.concatenate(([False], joined)))
    ends = np.flatnonzero(valid & ~np.concatenate((joined, [False]))) + 1
    return np.stack((starts, ends - starts), axis=1)


def _continues(
    values: dict[Path, np.ndarray[Any, Any]], found: Aligned, same: np.ndarray[Any, Any] | None
) -> np.ndarray[Any, Any]:
    """`[T, B]`: whether a step goes on into the next: not done, not the last of its epoch, and next_obs is its obs."""
    steps, envs = found.steps, found.envs
    goes_on = np.ones((steps, envs), bool) if same is None else same.copy()
    goes_on[found.epoch_steps - 1 :: found.epoch_steps] = False
    for name in ("dones", "terminations", "truncations"):
        flags = values.get((name,))
        if flags is not None:
            goes_on &= ~np.any(flags.reshape(steps, envs, -1), axis=2)
    return goes_on


# --- which next observations are the following ones ---------------------------------------------------


def _same_next(
    values: dict[Path, np.ndarray[Any, Any]], layout: Layout, steps: int, envs: int
) -> np.ndarray[Any, Any] | None:
    """`[T, B]`: whether next_obs is bitwise the following curr_obs, in all leaves that both have."""
    if not layout.schema.observations:
        return None
    same = np.zeros((steps, envs), bool)
    rows = (steps - 1) * envs
    if rows:
        found = np.ones(rows, bool)
        for field in layout.schema.observations:
            now = np.ascontiguousarray(values[("curr_obs", *field.path)])
            following = np.ascontiguousarray(values[("next_obs", *field.path)])
            if field.row_bytes:
                _compare(following, now, envs, field.row_bytes, found)
        same[:-1] = found.reshape(steps - 1, envs)
    return same


def _compare(
    following: np.ndarray[Any, Any], now: np.ndarray[Any, Any], envs: int, size: int, found: np.ndarray[Any, Any]
) -> None:
    """Clear `found` where row i of one is not row i + envs of the other. Images are compared as memory is."""
    one, other = following.ctypes.data, now.ctypes.data + envs * size
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
