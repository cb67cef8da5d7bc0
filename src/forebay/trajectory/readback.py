"""A stored trajectory as it was handed in: `[T, B, ...]` arrays in the order of time, next observations filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forebay.core.dtypes import BFLOAT16, bfloat16_dtype
from forebay.errors import DamagedData
from forebay.trajectory.data import STRING, Trajectory
from forebay.trajectory.schema import NEXT, VALID, Field
from forebay.trajectory.space import Space

__all__ = ["read_trajectory"]


def read_trajectory(space: Space, row: Mapping[str, Any], texts: Sequence[str]) -> Trajectory:
    """Copy a trajectory out of its rows; `row` has absolute rows, otherwise as a listing has them."""
    steps, envs, observations = int(row["steps"]), int(row["envs"]), int(row["observations"])
    rows = steps * envs
    first, first_observation = int(row["first_step"]), int(row["first_observation"])
    result = Trajectory(max_episode_length=int(row["longest"]), model_weights_id=texts[int(row["weights"])])
    texts = texts[int(row["texts"]) :]
    following = None
    for strip, columns in zip(space.steps.strips, space.steps.columns, strict=True):
        for column, (path, field, _) in zip(columns, strip.fields, strict=True):
            values = column[first : first + rows]
            if path == NEXT:
                following = np.clip(values, 0, observations - 1)
            elif path == VALID:
                if not values.all():
                    result.valid = _by_time(values, steps, envs)
            else:
                _put(result, path, _shown(field, _by_time(values, steps, envs), texts))
    for strip, columns in zip(space.observations.strips, space.observations.columns, strict=True):
        for column, (path, field, _) in zip(columns, strip.fields, strict=True):
            values = column[first_observation : first_observation + observations]
            assert following is not None
            _put(result, ("curr_obs", *path), _shown(field, _by_time(values[:rows], steps, envs), texts))
            _put(result, ("next_obs", *path), _shown(field, _by_time(values[following], steps, envs), texts))
    return result


def _by_time(values: np.ndarray[Any, Any], steps: int, envs: int) -> np.ndarray[Any, Any]:
    return np.array(values.reshape(envs, steps, *values.shape[1:]).swapaxes(0, 1), order="C")


def _shown(field: Field, values: np.ndarray[Any, Any], texts: Sequence[str]) -> Any:
    if field.dtype == STRING:
        if values.size and not 0 <= values.min() <= values.max() < len(texts):
            raise DamagedData(f"a text has the code {values.max()}; there are {len(texts)} texts")
        return [[texts[code] for code in row] for row in values.tolist()]
    return values.view(bfloat16_dtype()) if field.dtype == BFLOAT16 else values


def _put(result: Trajectory, path: tuple[str, ...], value: Any) -> None:
    place: Any = result.__dict__
    for name in path[:-1]:
        place = place.setdefault(name, {})
    place[path[-1]] = value
