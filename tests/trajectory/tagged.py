"""Trajectories in which every value says where it belongs, and what a buffer must give back of them.

`make` builds what *should* be stored first, cell by cell and in plain loops, and lays that out as a rollout has it:
with extra rows of poison where an epoch has them. So what is compared with is never computed as the library does it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from forebay.trajectory.data import Trajectory

__all__ = [
    "EXTRA_ALLOWED",
    "LEADING",
    "Made",
    "as_trajectory",
    "assert_rows",
    "assert_same",
    "assert_sequences",
    "flat",
    "made_at_random",
    "make",
    "nested",
    "plain",
    "runs_of",
    "to_torch",
]

Array: TypeAlias = np.ndarray[Any, Any]
Cell: TypeAlias = tuple[int, int]

LEADING = ("terminations", "truncations", "dones")
EXTRA_ALLOWED = (
    *LEADING,
    "actions",
    "intervene_flags",
    "prev_logprobs",
    "prev_values",
    "versions",
    "forward_inputs.ids",
    "forward_inputs.deep.x",
)
"""Fields that may come with a row more for each epoch."""

_KINDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "actions": (np.float32, (3,)),
    "rewards": (np.float32, (1,)),
    "intervene_flags": (np.bool_, (3,)),
    "prev_logprobs": (np.float16, ()),
    "prev_values": (np.float64, (1,)),
    "versions": (np.int64, ()),
    "forward_inputs.ids": (np.uint16, (2,)),
    "forward_inputs.deep.x": (ml_dtypes.bfloat16, (2,)),
    "forward_inputs.key": (np.uint64, ()),
    "curr_obs.only_now": (np.int32, (2,)),
    "next_obs.only_next": (np.int16, ()),
}
_SHARED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "state": (np.float32, (4,)),
    "image": (np.uint8, (14, 14, 3)),  # more than 512 bytes: a strip of its own
    "deep.flag": (np.bool_, ()),
    "deep.word": (np.uint32, ()),
}


@dataclass(frozen=True)
class Made:
    """A trajectory as it is handed in, and what every cell of it must be."""

    given: dict[str, Any]
    want: dict[str, Array]
    """By dotted name: `[T, B, ...]`; text as objects."""
    steps: int
    envs: int
    epochs: int
    valid: frozenset[Cell]
    goes_on: frozenset[Cell]
    """Cells (t, b) whose step continues into (t + 1, b)."""
    gaps: frozenset[Cell]
    """Cells whose step would continue if its next_obs were the following one."""

    @property
    def transitions(self) -> int:
        return len(self.valid)


def tag(number: int, t: int, b: int) -> int:
    """One number for a cell of a trajectory."""
    assert t < 64
    assert b < 16
    return ((number % 900) * 64 + t) * 16 + b + 1


def value(kind: Any, shape: tuple[int, ...], mark: int, field: int) -> Array:
    """A value that says which cell and which field it is of."""
    kind = np.dtype(kind)
    if kind == np.bool_:
        # Bits of the mark: each cell has another pattern where there are several of them.
        bits = [(mark * 2654435761 >> (k + field)) & 1 for k in range(int(np.prod(shape)))]
        return np.array(bits, bool).reshape(shape)
    most = {1: 1, 2: 2**11, 4: 2**24}.get(kind.itemsize, 2**40) if kind.kind != "u" else 2 ** (8 * kind.itemsize)
    if kind == np.dtype(ml_dtypes.bfloat16):
        most = 2**8
    if kind == np.uint8:
        digits = [(mark >> (8 * (k % 4))) & 255 for k in range(int(np.prod(shape)))]
        return np.array(digits, np.uint8).reshape(shape)
    each = [(mark + k * 7 + field) % most for k in range(max(int(np.prod(shape)), 1))]
    return np.array(each, np.float64).astype(kind).reshape(shape)


def make(
    number: int,
    steps: int = 4,
    envs: int = 2,
    *,
    epochs: int = 1,
    extra: Collection[str] = (),
    ends: Collection[Cell] = (),
    stops: Collection[Cell] = (),
    gaps: Collection[Cell] = (),
    invalid: Collection[Cell] = (),
    text: bool = True,
    mask: bool | None = None,
    weights: str = "",
) -> Made:
    """T steps of B envs in E epochs. `extra`: which fields come with extra rows. `gaps`: next_obs is another one.

    An end (t, b) is a done step after which the env was reset, so its next_obs is another one, too; a stop is a done
    step whose next_obs is the following one nevertheless.
    """
    assert steps % epochs == 0
    each = steps // epochs
    cells = [(t, b) for t in range(steps) for b in range(envs)]
    want: dict[str, Array] = {}
    for k, (name, (kind, shape)) in enumerate(_KINDS.items()):
        want[name] = _grid(steps, envs, lambda t, b, s=shape, d=kind, f=k: value(d, s, tag(number, t, b), f))
    apart = {(t, b) for t, b in cells if t == steps - 1 or (t, b) in gaps or (t, b) in ends}
    for k, (name, (kind, shape)) in enumerate(_SHARED.items()):
        now = _grid(steps, envs, lambda t, b, s=shape, d=kind, f=k: value(d, s, tag(number, t, b), f))
        own = _grid(steps, envs, lambda t, b, s=shape, d=kind, f=k: value(d, s, tag(number, t, b) + 450 * 1024, f))
        following = own.copy()
        for t, b in cells:
            if (t, b) not in apart:
                following[t, b] = now[t + 1, b]
        want[f"curr_obs.{name}"], want[f"next_obs.{name}"] = now, following
    done = _grid(steps, envs, lambda t, b: np.array([(t, b) in ends or (t, b) in stops]))
    third = _grid(steps, envs, lambda t, b: np.array([tag(number, t, b) % 3 == 0]))
    want["dones"], want["terminations"], want["truncations"] = done, done & ~third, done & third
    if text:
        for name in ("curr_obs.task", "curr_obs.word", "next_obs.word", "forward_inputs.prompt"):
            want[name] = np.empty((steps, envs), object)
        for t, b in cells:
            want["curr_obs.task"][t, b] = f"task {number} of env {b}"
            want["curr_obs.word"][t, b] = f"{number}/{t}/{b}"
            want["next_obs.word"][t, b] = f"{number}/{t}/{b} end" if (t, b) in apart else f"{number}/{t + 1}/{b}"
            want["forward_inputs.prompt"][t, b] = f"prompt {tag(number, t, b) % 7}"
    given = {name: _laid_out(name, array, epochs, name in extra) for name, array in want.items()}
    if text:
        given["curr_obs.task"] = want["curr_obs.task"][0].tolist()
        for name in ("curr_obs.word", "next_obs.word", "forward_inputs.prompt"):
            given[name] = want[name].tolist()
    tree = nested(given)
    if invalid or mask:
        tree["valid"] = _grid(steps, envs, lambda t, b: np.array((t, b) not in invalid))
    if weights:
        tree["model_weights_id"] = weights
    valid = frozenset(set(cells) - set(invalid))
    over = set(ends) | set(stops)
    may_go_on = {(t, b) for t, b in cells if (t + 1) % each and (t, b) not in over and {(t, b), (t + 1, b)} <= valid}
    return Made(tree, want, steps, envs, epochs, valid, frozenset(may_go_on - apart), frozenset(may_go_on & set(gaps)))


def made_at_random(number: int, random: np.random.Generator, *, most_steps: int = 6, text: bool = True) -> Made:
    """Any shape, any epochs, extra rows of some fields, ends, gaps and steps that must not be drawn."""
    epochs = int(random.integers(1, 4))
    steps = epochs * int(random.integers(1, max(most_steps // epochs, 1) + 1))
    envs = int(random.integers(1, 4))
    cells = [(t, b) for t in range(steps) for b in range(envs)]

    def some(share: float) -> list[Cell]:
        return [cell for cell in cells if random.random() < share]

    extra = [name for name in EXTRA_ALLOWED if random.random() < 0.5]
    # Without an extra row nobody says how many epochs there are.
    extra = extra if extra or epochs == 1 else ["dones"]
    return make(
        number,
        steps,
        envs,
        epochs=epochs,
        extra=extra,
        ends=some(0.1),
        stops=some(0.1),
        gaps=some(0.1),
        invalid=some(0.2) if random.random() < 0.4 else (),
        text=text,
        weights=f"weights {number % 3}",
    )


def _grid(steps: int, envs: int, of: Any) -> Array:
    return np.stack([np.stack([np.asarray(of(t, b)) for b in range(envs)]) for t in range(steps)])


def _laid_out(name: str, array: Array, epochs: int, extra: bool) -> Array:
    """As a rollout has it: with a poisoned row before (flags) or behind (others) each epoch, if there are such."""
    if not extra:
        return array.copy()
    poison = np.zeros_like(array[:1])
    poison[...] = True if array.dtype == bool else 111
    each = len(array) // epochs
    parts = []
    for k in range(epochs):
        rows = array[k * each : (k + 1) * each]
        parts += [poison, rows] if name in LEADING else [rows, poison]
    return np.concatenate(parts)


# --- shapes of dicts ------------------------------------------------------------------------------------


def nested(named: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        place = tree
        *path, last = name.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = leaf
    return tree


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    named: dict[str, Any] = {}
    for name, leaf in tree.items():
        if isinstance(leaf, Mapping):
            named.update(flat(leaf, f"{prefix}{name}."))
        else:
            named[f"{prefix}{name}"] = leaf
    return named


def to_torch(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The same with tensors instead of arrays."""
    import torch

    found: dict[str, Any] = {}
    for name, leaf in tree.items():
        if isinstance(leaf, Mapping):
            found[name] = to_torch(leaf)
        elif isinstance(leaf, np.ndarray) and leaf.dtype.name == "bfloat16":
            found[name] = torch.from_numpy(leaf.view(np.uint16).copy()).view(torch.bfloat16)
        else:
            found[name] = torch.from_numpy(leaf.copy()) if isinstance(leaf, np.ndarray) else leaf
    return found


def plain(leaf: Any) -> Array:
    """What came out, as numpy; text as objects."""
    if isinstance(leaf, np.ndarray):
        return leaf
    if isinstance(leaf, list):
        lead = (len(leaf), len(leaf[0])) if leaf and isinstance(leaf[0], list) else (len(leaf),)
        found = np.empty(lead, object)
        found[...] = leaf
        return found
    import torch

    assert isinstance(leaf, torch.Tensor)
    if leaf.dtype is torch.bfloat16:
        return leaf.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return leaf.numpy()


# --- comparing ------------------------------------------------------------------------------------------


def assert_same(found: Array, expected: Array, what: str) -> None:
    """Equal in dtype, shape and every bit."""
    assert found.dtype == expected.dtype, f"{what}: {found.dtype} instead of {expected.dtype}"
    assert found.shape == expected.shape, f"{what}: {found.shape} instead of {expected.shape}"
    if found.dtype == object:
        assert found.tolist() == expected.tolist(), what
    else:
        assert np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(expected).tobytes(), what


def assert_rows(
    batch: Mapping[str, Any], made: Mapping[int, Made], *, newest: int | None = None, also: Collection[str] = ()
) -> list[tuple[int, int, int]]:
    """Every row of a batch is what its own id, step and env say, in every field; these three, by row.

    `newest` is the newest id of the window: ages are then checked, too.
    """
    named = flat(batch)
    ids, steps, envs, ages = (plain(named.pop(name)).reshape(-1) for name in ("trajectory_id", "step", "env", "age"))
    for name in also:
        named.pop(name)
    lead = plain(batch["trajectory_id"]).ndim
    rows = [(int(i), int(t), int(b)) for i, t, b in zip(ids, steps, envs, strict=True)]
    for i, t, b in rows:
        assert i in made, f"trajectory {i} is not in the window"
        assert (t, b) in made[i].valid, f"step {t} of env {b} of trajectory {i} must not be drawn"
    assert named.keys() == made[rows[0][0]].want.keys()
    for name, leaf in named.items():
        found = plain(leaf)
        found = found.reshape(len(rows), *found.shape[lead:])
        expected = [made[i].want[name][t, b] for i, t, b in rows]
        if found.dtype == object:
            assert found.tolist() == expected, name
        else:
            assert_same(found, np.stack(expected), name)
    if newest is not None:
        assert ages.tolist() == [newest - i for i, _, _ in rows]
    return rows


def runs_of(made: Made, length: int) -> list[Cell]:
    """Starts of so many continuing steps."""
    return [
        (t, b)
        for t, b in sorted(made.valid)
        if all((t + k, b) in made.goes_on for k in range(length - 1)) and t + length <= made.steps
    ]


def assert_sequences(rows: Sequence[tuple[int, int, int]], made: Mapping[int, Made], length: int) -> None:
    """Rows of a sequence batch go on from each other."""
    for start in range(0, len(rows), length):
        for (i, t, b), after in zip(rows[start : start + length], rows[start + 1 : start + length], strict=False):
            assert after == (i, t + 1, b)
            assert (t, b) in made[i].goes_on, f"step {t} of env {b} of trajectory {i} does not go on"


def as_trajectory(tree: Mapping[str, Any]) -> Trajectory:
    return Trajectory(**tree)
