"""What a trajectory is: a window of T steps of B parallel environments, and how its rows are lined up.

`Trajectory` is what users hand in and get back; a plain dict with the same keys does as well. `aligned` makes one sense
of it: every leaf as an array `[epoch, step, env, ...]` in which row t carries what belongs to action t, whatever extra
rows came along. It copies nothing, changes nothing, and refuses what it would have to guess, by name.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from forebay.core.dtypes import BFLOAT16, DTYPES, dtype_name
from forebay.errors import InvalidTrajectory

__all__ = ["RESERVED", "STRING", "Aligned", "Array", "Leaf", "Path", "Trajectory", "aligned", "dotted", "is_tensor"]

Array: TypeAlias = Any
"""A numpy array or a torch tensor."""

Path: TypeAlias = tuple[str, ...]

STRING = "STRING"
"""The dtype name of text, which is stored as a code."""

RESERVED = ("trajectory_id", "step", "env", "age", "source")
"""Columns that sampling adds."""

_LEADING = ("terminations", "truncations", "dones")
_TRAILING = ("actions", "intervene_flags", "prev_logprobs", "prev_values", "versions", "forward_inputs")
_MAY_HAVE_EXTRA = frozenset((*_LEADING, *_TRAILING))
_NESTED = ("forward_inputs", "curr_obs", "next_obs")
_MAX_DEPTH, _MAX_NAME, _MAX_LEAVES, _MAX_DIMENSIONS = 8, 200, 512, 16


@dataclass
class Trajectory:
    """T steps of B parallel environments, T = `rewards.shape[0]`; it may hold several episodes, and is not one.

    Arrays are `[T, B, ...]`, numpy or torch; observations are dicts of any depth. With E rollout epochs the flags may
    have T + E rows (the flags before the first action of each epoch), and so may what is computed once more at the
    end of an epoch. `valid` is False for steps that must never be drawn. Text is a list: per env, or per step and env.
    """

    max_episode_length: int = 0
    model_weights_id: str = ""
    actions: Array | None = None
    intervene_flags: Array | None = None
    rewards: Array | None = None
    terminations: Array | None = None
    truncations: Array | None = None
    dones: Array | None = None
    prev_logprobs: Array | None = None
    prev_values: Array | None = None
    versions: Array | None = None
    forward_inputs: dict[str, Any] = field(default_factory=dict)
    curr_obs: dict[str, Any] = field(default_factory=dict)
    next_obs: dict[str, Any] = field(default_factory=dict)
    valid: Array | None = None

    def extract_intervene_traj(self, mode: Literal["any", "all"] = "any") -> list[Trajectory] | None:
        """The steps that a human took over, a trajectory of one env for each env that has some; None if there are none.

        A step counts if any (or all) of its `intervene_flags` are set. Where nothing would show that steps are missing
        in between (without `next_obs`, or in a scene that stands still) another trajectory begins.
        """
        if mode not in ("any", "all"):
            raise InvalidTrajectory(f"mode is {mode!r}; expected 'any' or 'all'")
        if self.intervene_flags is None:
            return None
        whole = aligned(self)
        flags = _in_order(whole.leaves[("intervene_flags",)].values).astype(bool)
        flags = flags.reshape(*flags.shape[:2], -1)
        reduce = np.any if mode == "any" else np.all
        chosen = np.asarray(reduce(flags, axis=2))
        if ("valid",) in whole.leaves:
            chosen &= _in_order(whole.leaves[("valid",)].values).astype(bool)
        found = []
        for env in range(whole.envs):
            steps = np.flatnonzero(chosen[:, env])
            breaks = np.flatnonzero((np.diff(steps) > 1) | (steps[1:] % whole.epoch_steps == 0)) + 1
            hidden = [k for k in breaks.tolist() if _looks_joined(whole, steps[k - 1], steps[k], env)]
            found += [_cut(self, whole, run, env) for run in np.split(steps, hidden) if len(run)]
        return found or None


_FIELDS = tuple(item.name for item in dataclasses.fields(Trajectory))
_LEAVES = tuple(name for name in _FIELDS if name not in ("max_episode_length", "model_weights_id"))


class Leaf(NamedTuple):
    """One array of a trajectory, lined up: `values` is `[epoch, step, env, *shape]`; text is an array of objects."""

    dtype: str
    shape: tuple[int, ...]
    values: np.ndarray[Any, Any]


class Aligned(NamedTuple):
    """A trajectory that makes sense: all leaves have `epochs * epoch_steps` rows of `envs` environments."""

    epochs: int
    epoch_steps: int
    envs: int
    leaves: dict[Path, Leaf]
    model_weights_id: str
    max_episode_length: int

    @property
    def steps(self) -> int:
        return self.epochs * self.epoch_steps


def dotted(path: Path) -> str:
    return ".".join(path)


def is_tensor(value: object) -> bool:
    """Whether it is a torch tensor. Does not import torch: who has one has imported it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def aligned(trajectory: Trajectory | Mapping[str, Any]) -> Aligned:
    """Read a trajectory; InvalidTrajectory names the field that is wrong."""
    given = _fields_of(trajectory)
    rewards = given.get("rewards")
    if rewards is None:
        raise InvalidTrajectory("rewards are missing; they say how many steps and environments there are")
    raw = _leaves_of(given)
    rewards = raw[("rewards",)][1]
    if rewards.ndim < 2 or not rewards.shape[0] or not rewards.shape[1]:
        raise InvalidTrajectory(f"rewards have shape {list(rewards.shape)}; expected [T, B, ...] with T and B from 1")
    steps, envs = rewards.shape[:2]
    epochs = _epochs(raw, steps)
    leaves = {path: _lined_up(path, *found, steps, envs, epochs) for path, found in raw.items()}
    valid = leaves.get(("valid",))
    if valid is not None and (valid.dtype != "BOOL" or valid.shape):
        raise InvalidTrajectory(f"valid is {valid.dtype} with shape [T, B{_more(valid.shape)}]; expected BOOL [T, B]")
    weights_id, longest = given.get("model_weights_id", ""), given.get("max_episode_length", 0)
    if not isinstance(weights_id, str) or len(weights_id) > _MAX_NAME or not _encodable(weights_id):
        raise InvalidTrajectory(
            f"model_weights_id is {weights_id!r:.100}; expected text of at most {_MAX_NAME} letters"
        )
    if isinstance(longest, bool) or not isinstance(longest, (int, np.integer)) or not 0 <= longest <= 2**62:
        raise InvalidTrajectory(f"max_episode_length is {longest!r}; expected a whole number from 0")
    return Aligned(epochs, steps // epochs, envs, leaves, weights_id, int(longest))


# --- reading what was handed in -----------------------------------------------------------------------


def _fields_of(trajectory: Trajectory | Mapping[str, Any]) -> dict[str, Any]:
    if type(trajectory) is Trajectory:
        return vars(trajectory)
    if isinstance(trajectory, Mapping):
        given = dict(trajectory)
    elif dataclasses.is_dataclass(trajectory) and not isinstance(trajectory, type):
        # By its fields and not by its class: RLinf's own is as good.
        given = {item.name: getattr(trajectory, item.name) for item in dataclasses.fields(trajectory)}
    else:
        raise InvalidTrajectory(f"a trajectory is a {type(trajectory).__name__}; expected a Trajectory or a dict")
    for name in given:
        if name in RESERVED:
            raise InvalidTrajectory(f"a trajectory has a field {name!r}; that name is added by sample()")
        if name not in _FIELDS:
            raise InvalidTrajectory(
                f"a trajectory has no field {name!r:.100}; it has {', '.join(_FIELDS)}. Keep what else a model "
                "needs in forward_inputs"
            )
    return given


def _leaves_of(given: Mapping[str, Any]) -> dict[Path, tuple[str, np.ndarray[Any, Any]]]:
    """Every leaf: the name of its dtype, and its array."""
    found: dict[Path, tuple[str, np.ndarray[Any, Any]]] = {}
    for name in _LEAVES:
        value = given.get(name)
        if value is None:
            continue
        if name not in _NESTED:
            found[(name,)] = _array((name,), value)
        elif isinstance(value, Mapping):
            _walk((name,), value, found)
        else:
            raise InvalidTrajectory(f"{name} is a {type(value).__name__}; expected a dict of arrays")
    if len(found) > _MAX_LEAVES:
        raise InvalidTrajectory(f"a trajectory has {len(found)} arrays; expected at most {_MAX_LEAVES}")
    return found


def _walk(path: Path, values: Mapping[str, Any], found: dict[Path, tuple[str, np.ndarray[Any, Any]]]) -> None:
    if len(path) > _MAX_DEPTH:
        raise InvalidTrajectory(f"{dotted(path)} is nested deeper than {_MAX_DEPTH} levels")
    for key, value in values.items():
        if not isinstance(key, str) or not key or len(key) > _MAX_NAME:
            raise InvalidTrajectory(
                f"{dotted(path)} has the key {key!r:.100}; expected text of 1 to {_MAX_NAME} letters"
            )
        if isinstance(value, Mapping):
            _walk((*path, key), value, found)
        elif value is not None:
            found[(*path, key)] = _array((*path, key), value)


def _array(path: Path, value: Any) -> tuple[str, np.ndarray[Any, Any]]:
    """The dtype name and the array of a leaf, without copying it where that is possible."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "OUT":
            return STRING, _text(path, value.tolist() if value.ndim else [None])
        found = dtype_name(value.dtype)
        if found is None:
            raise InvalidTrajectory(f"{dotted(path)} is of dtype {value.dtype}; expected one of {', '.join(DTYPES)}")
        name = found
        if name == BFLOAT16:
            value = value.view(np.uint16)
        elif not value.dtype.isnative:
            value = value.astype(value.dtype.newbyteorder("<"))
    elif is_tensor(value):
        name, value = _of_tensor(path, value)
    elif isinstance(value, (list, tuple)):
        return STRING, _text(path, value)
    else:
        raise InvalidTrajectory(
            f"{dotted(path)} is a {type(value).__name__}; expected a torch tensor, a numpy array, or a list of text"
        )
    if value.ndim > _MAX_DIMENSIONS:
        raise InvalidTrajectory(f"{dotted(path)} has {value.ndim} dimensions; expected at most {_MAX_DIMENSIONS}")
    return name, value


def _of_tensor(path: Path, tensor: Any) -> tuple[str, np.ndarray[Any, Any]]:
    import torch

    try:
        array = tensor.numpy()  # as most are: dense, on the CPU, and not part of a graph
    except (TypeError, RuntimeError):
        array = None
    if array is not None and (found := dtype_name(array.dtype)) is not None:
        return found, array
    if tensor.is_meta:
        raise InvalidTrajectory(f"{dotted(path)} is a tensor on the device meta, which has no values")
    plain = tensor.detach().cpu()
    if plain.layout is not torch.strided:
        raise InvalidTrajectory(f"{dotted(path)} is a tensor of layout {plain.layout}; expected a dense one")
    plain = plain.resolve_conj().resolve_neg()
    if plain.dtype is torch.bfloat16:
        return BFLOAT16, plain.contiguous().view(torch.uint16).numpy()
    try:
        array = plain.numpy()
    except (TypeError, RuntimeError):
        array = None
    name = None if array is None else dtype_name(array.dtype)
    if array is None or name is None:
        raise InvalidTrajectory(f"{dotted(path)} is of dtype {plain.dtype}; expected one of {', '.join(DTYPES)}")
    return name, array


def _text(path: Path, value: Any) -> np.ndarray[Any, Any]:
    """Text per env or per step and env, as an array of str with one or two dimensions."""
    if path[0] not in _NESTED:
        raise InvalidTrajectory(
            f"{dotted(path)} is a list or text; expected an array or a tensor. Keep text in forward_inputs or in "
            "observations"
        )
    rows = list(value)
    if rows and all(isinstance(row, str) for row in rows):
        flat, shape = rows, [len(rows)]
    elif rows and all(isinstance(row, (list, tuple)) and len(row) == len(rows[0]) for row in rows):
        flat, shape = [item for row in rows for item in row], [len(rows), len(rows[0])]
    else:
        flat, shape = [None], [1]
    if not all(isinstance(item, str) for item in flat):
        raise InvalidTrajectory(
            f"{dotted(path)} is a list; expected text per env or per step and env (or an array, or a tensor)"
        )
    found = np.empty(len(flat), object)
    found[:] = flat
    return found.reshape(shape)


# --- lining up ----------------------------------------------------------------------------------------


def _epochs(raw: Mapping[Path, tuple[str, np.ndarray[Any, Any]]], steps: int) -> int:
    """How many rollout epochs the extra rows speak of; 1 if there are none."""
    epochs, said_by = 0, ""
    for path, (_, values) in raw.items():
        extra = values.shape[0] - steps if values.ndim > 1 else 0
        if extra <= 0 or path[0] not in _MAY_HAVE_EXTRA:
            continue
        if steps % extra:
            raise InvalidTrajectory(
                f"{dotted(path)} has {steps + extra} rows for {steps} steps: {extra} extra ones, one for each rollout "
                f"epoch; but {steps} steps are not a multiple of {extra}"
            )
        if epochs and extra != epochs:
            raise InvalidTrajectory(
                f"{said_by} has {epochs} extra rows and {dotted(path)} has {extra}; both say how many rollout epochs "
                "there are"
            )
        epochs, said_by = extra, dotted(path)
    return epochs or 1


def _lined_up(path: Path, dtype: str, values: np.ndarray[Any, Any], steps: int, envs: int, epochs: int) -> Leaf:
    if epochs == 1 and values.shape[:2] == (steps, envs):  # as most are
        return Leaf(dtype, values.shape[2:], values[None])
    each = steps // epochs
    if dtype == STRING and values.ndim == 1:
        _check_axes(path, (steps, *values.shape), steps, envs)
        return Leaf(STRING, (), np.broadcast_to(values, (epochs, each, envs)))
    extra = values.shape[0] - steps if values.ndim else 0
    if extra == epochs and path[0] in _MAY_HAVE_EXTRA:
        _check_axes(path, values.shape, steps, envs, extra)
        wider = values.reshape(epochs, each + 1, *values.shape[1:])
        lined_up = wider[:, 1:] if path[0] in _LEADING else wider[:, :-1]
    else:
        _check_axes(path, values.shape, steps, envs)
        lined_up = values.reshape(epochs, each, *values.shape[1:])
    return Leaf(dtype, lined_up.shape[3:], lined_up)


def _check_axes(path: Path, shape: tuple[int, ...], steps: int, envs: int, extra: int = 0) -> None:
    if len(shape) < 2 or shape[:2] != (steps + extra, envs):
        raise InvalidTrajectory(
            f"{dotted(path)} has shape {list(shape)}; expected [{steps}, {envs}, ...] as rewards have"
        )


def _more(shape: tuple[int, ...]) -> str:
    return "".join(f", {size}" for size in shape)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


# --- cutting out --------------------------------------------------------------------------------------


def _in_order(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`[epoch, step, env, ...]` as `[T, B, ...]`."""
    return values.reshape(values.shape[0] * values.shape[1], *values.shape[2:])


def _looks_joined(whole: Aligned, step: int, after: int, env: int) -> bool:
    """Whether the observation after one step is that of another, in all that both have."""
    for path, leaf in whole.leaves.items():
        following = whole.leaves.get(("next_obs", *path[1:])) if path[0] == "curr_obs" else None
        if following is not None and following[:2] == leaf[:2]:
            one, other = _in_order(following.values)[step, env], _in_order(leaf.values)[after, env]
            if one != other if leaf.dtype == STRING else one.tobytes() != other.tobytes():
                return False
    return True


def _cut(source: Trajectory, whole: Aligned, steps: np.ndarray[Any, Any], env: int) -> Trajectory:
    """These steps of one env, in what kind of array they came."""
    result = Trajectory(max_episode_length=source.max_episode_length, model_weights_id=source.model_weights_id)
    for path, leaf in whole.leaves.items():
        rows = _in_order(leaf.values)[steps, env][:, None]
        place: Any = result.__dict__
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = _as_came(_value_at(source, path), leaf.dtype, rows)
    return result


def _value_at(source: Trajectory, path: Path) -> Any:
    value = getattr(source, path[0])
    for name in path[1:]:
        value = value[name]
    return value


def _as_came(original: Any, dtype: str, rows: np.ndarray[Any, Any]) -> Any:
    if dtype == STRING:
        return rows.tolist()
    if is_tensor(original):
        import torch

        tensor = torch.from_numpy(np.ascontiguousarray(rows))
        return tensor.view(torch.bfloat16) if dtype == BFLOAT16 else tensor
    return rows.view(original.dtype) if dtype == BFLOAT16 else rows
