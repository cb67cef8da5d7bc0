"""What is in a directory of trajectories: counts, fields, rewards, and mean and deviation of states and actions.

`info` reads the listings and, of the rows, only what the statistics are of: actions, and observations of up to 64
floating-point numbers; never an image. They are taken over the steps that can be drawn, in chunks, in float64. Plain
data comes out, which is JSON as it is. Nothing is changed or printed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from forebay.checkpoint.files import FileOps
from forebay.checkpoint.publish import MANIFEST
from forebay.core.dtypes import BFLOAT16
from forebay.core.report import Progress, Steps
from forebay.errors import InvalidInput
from forebay.trajectory.checkpoint import (
    MAIN,
    Contents,
    check_same_schema,
    checkpoint_manifest,
    find_directories,
    open_contents,
    part_names,
)
from forebay.trajectory.data import STRING, Aligned, aligned, dotted
from forebay.trajectory.data import Path as LeafPath
from forebay.trajectory.exchange import rlinf_directories
from forebay.trajectory.joining import fields_of
from forebay.trajectory.reader import Reader
from forebay.trajectory.rlinf import RlinfDirectory, open_rlinf
from forebay.trajectory.schema import Field, schema_of

__all__ = ["Moments", "info"]

_MOST_STATE_VALUES, _MOST_ACTION_VALUES = 64, 4096
_FLOATS = ("F16", "F32", "F64", BFLOAT16)
_CHUNK_ROWS = 2**15


class Moments:
    """Mean and deviation of each of some numbers, a chunk at a time; what is not finite is counted and left out.

    >>> moments = Moments(1)
    >>> for chunk in ([[1.0], [2.0]], [[6.0], [float("nan")]]):
    ...     moments.add(np.array(chunk))
    >>> moments.result()["mean"], round(moments.result()["std"][0], 3), moments.result()["not_finite"]
    ([3.0], 2.16, 1)
    """

    def __init__(self, size: int) -> None:
        self._count = np.zeros(size, np.int64)
        self._mean, self._squares = np.zeros(size), np.zeros(size)
        self._not_finite = 0

    def add(self, values: np.ndarray[Any, Any]) -> None:
        """`values` are `[rows, size]` of float64."""
        finite = np.isfinite(values)
        count = finite.sum(axis=0)
        self._not_finite += values.size - int(count.sum())
        # Two passes inside a chunk, and then Chan's sum of two: neither loses digits to a large mean.
        divisor = np.maximum(count, 1)
        with np.errstate(all="ignore"):
            mean = np.where(finite, values, 0.0).sum(axis=0) / divisor
            squares = (np.where(finite, values - mean, 0.0) ** 2).sum(axis=0)
            total = np.maximum(self._count + count, 1)
            apart = mean - self._mean
            self._squares += squares + apart**2 * self._count * count / total
            self._mean += np.where(count > 0, apart * count / total, 0.0)
        self._count += count

    def result(self) -> dict[str, Any]:
        """As plain data; None where there was no number, or none that a float can hold."""
        std = np.sqrt(self._squares / np.maximum(self._count, 1))
        return {
            "count": int(self._count.max(initial=0)),
            "not_finite": self._not_finite,
            "mean": _plain(np.where(self._count > 0, self._mean, np.nan)),
            "std": _plain(np.where(self._count > 0, std, np.nan)),
        }


def _plain(values: np.ndarray[Any, Any]) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]


def info(
    path: str | PathLike[str], progress: Progress | None = None, *, files: FileOps | None = None
) -> dict[str, Any]:
    """Describe a checkpoint, a store, their ranks, or a directory of RLinf's; `parts` has the figures of each part."""
    root, files = Path(path), files or FileOps()
    if not root.is_dir():
        raise InvalidInput(f"there is no directory {root}; expected one with trajectories")
    foreign = rlinf_directories(root)
    if foreign:
        return _rlinf_info(root, [open_rlinf(one, files=files) for one in foreign], progress)
    directories = find_directories(root)
    parts: dict[str, list[Contents]] = {}
    described = []
    for directory in directories:
        for part in part_names(directory, files):
            parts.setdefault(part, []).append(open_contents(directory, part, files))
        described.append(_directory(directory, files))
    kinds = {one["kind"] for one in described}
    steps = Steps(progress, sum(len(one.listing) for contents in parts.values() for one in contents))
    return {
        "path": str(root),
        "kind": kinds.pop() if len(kinds) == 1 else "mixed",
        "ranks": len(directories),
        "directories": described,
        "bytes_on_disk": sum(one["bytes_on_disk"] for one in described),
        "parts": {part: _part(contents, steps, files) for part, contents in sorted(parts.items(), key=_main_first)},
    }


def _main_first(item: tuple[str, Any]) -> tuple[bool, str]:
    return item[0] != MAIN, item[0]


def _directory(directory: Path, files: FileOps) -> dict[str, Any]:
    is_checkpoint = (directory / MANIFEST).exists()
    manifest = checkpoint_manifest(directory, files) if is_checkpoint else None
    return {
        "path": str(directory),
        "kind": "checkpoint" if is_checkpoint else "store",
        "created_at": None if manifest is None else manifest.created_at,
        "forebay_version": None if manifest is None else manifest.forebay_version,
        "bytes_on_disk": sum(entry.stat().st_size for entry in directory.iterdir() if entry.is_file()),
    }


def _part(contents: Sequence[Contents], steps: Steps, files: FileOps) -> dict[str, Any]:
    rows = np.concatenate([one.listing.rows for one in contents])
    cells = rows["steps"] * rows["envs"]
    transitions = int(rows["transitions"].sum())
    fields: dict[LeafPath, Field] = {}
    for one in contents:
        fields = {**(fields_of(one.layout.schema) if one.layout is not None else {}), **fields}
    try:
        check_same_schema(contents)
        differs = None
    except InvalidInput as error:
        differs = str(error)
    added = rows["added_at"]
    return {
        "trajectories": len(rows),
        "transitions": transitions,
        "steps": int(cells.sum()),
        "lengths": _range(rows["steps"]),
        "envs": _range(rows["envs"]),
        "bytes": sum(one.bytes() for one in contents),
        "segments": sum(len(one.segments) for one in contents),
        "ids": _range(rows["id"]),
        "next_id": max(one.next_id for one in contents),
        "seed": contents[0].seed,
        "weights": len({one.texts[code] for one in contents for code in np.unique(one.listing.rows["weights"])}),
        "left_out_damaged": sum(one.left_out for one in contents),
        **_rewards(rows["reward"], transitions),
        "added_at": _range(added),
        "age_s": _range(np.maximum(time.time() - added, 0.0)),
        "fields": _fields(fields),
        "differs": differs,
        "statistics": _statistics(contents, steps, files),
    }


def _range(values: np.ndarray[Any, Any]) -> list[Any] | None:
    """The least and the most; None of nothing."""
    return [values.min().item(), values.max().item()] if len(values) else None


def _rewards(rewards: np.ndarray[Any, Any], transitions: int) -> dict[str, Any]:
    with np.errstate(all="ignore"):
        total = rewards.sum()
        per_trajectory, per_transition = total / max(len(rewards), 1), total / max(transitions, 1)
    names = ("reward_sum", "reward_per_trajectory", "reward_per_transition")
    return dict(zip(names, _plain(np.array([total, per_trajectory, per_transition])), strict=True))


def _fields(fields: Mapping[LeafPath, Field]) -> list[dict[str, Any]]:
    return [
        {"name": dotted(path), "dtype": field.dtype, "shape": list(field.shape)}
        for path, field in sorted(fields.items())
    ]


# --- statistics ---------------------------------------------------------------------------------------


def _is_measured(path: LeafPath, dtype: str, shape: Sequence[int]) -> bool:
    size = int(np.prod(shape, dtype=np.int64))
    if path == ("actions",):
        return dtype != STRING and 0 < size <= _MOST_ACTION_VALUES
    return path[0] == "curr_obs" and dtype in _FLOATS and 0 < size <= _MOST_STATE_VALUES


def _statistics(contents: Sequence[Contents], steps: Steps, files: FileOps) -> dict[str, Any]:
    found: dict[tuple[LeafPath, int], Moments] = {}
    for one in contents:
        with Reader(one, files) as reader:
            for path, values in _chunks(reader, steps):
                found.setdefault((path, values.shape[1]), Moments(values.shape[1])).add(values)
    return {dotted(path): moments.result() for (path, _), moments in sorted(found.items(), key=lambda item: item[0])}


def _chunks(reader: Reader, steps: Steps) -> Iterator[tuple[LeafPath, np.ndarray[Any, Any]]]:
    """Values of measured fields, `[rows, size]`, some trajectories of one segment at a time."""
    listing, space = reader.contents.listing, reader.space
    if space is None:
        return
    measured = [
        (path if table is space.steps else ("curr_obs", *path), field, table.columns[strip_number][k], table)
        for table in (space.steps, space.observations)
        for strip_number, strip in enumerate(table.strips)
        for k, (path, field, _) in enumerate(strip.fields)
        if _is_measured(path if table is space.steps else ("curr_obs", *path), field.dtype, field.shape)
    ]
    transitions = listing.rows["transitions"]
    for number in np.unique(listing.rows["segment"]).tolist():
        which = np.flatnonzero(listing.rows["segment"] == number)
        segment = reader.mapped(number)
        for group in np.split(which, np.flatnonzero(np.diff(np.cumsum(transitions[which]) // _CHUNK_ROWS)) + 1):
            part = listing.chosen(group)
            local = _positions(part.runs)
            owner = np.repeat(np.arange(len(group)), part.rows["transitions"])
            for path, field, column, table in measured:
                name = "first_step" if table is space.steps else "first_observation"
                values = column[getattr(segment, name) + part.rows[name][owner] + local]
                yield path, _as_float(field.dtype, values).reshape(len(local), -1)
            steps.more(len(group))


def _positions(runs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Every row of runs of start and length, one after another.

    >>> _positions(np.array([[0, 2], [5, 1]])).tolist()
    [0, 1, 5]
    """
    lengths = runs[:, 1]
    inside = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    found: np.ndarray[Any, Any] = np.repeat(runs[:, 0], lengths) + inside
    return found


def _as_float(dtype: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if dtype == BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


# --- RLinf --------------------------------------------------------------------------------------------


def _rlinf_info(root: Path, directories: Sequence[RlinfDirectory], progress: Progress | None) -> dict[str, Any]:
    steps = Steps(progress, sum(map(len, directories)))
    moments: dict[tuple[LeafPath, int], Moments] = {}
    fields: dict[LeafPath, Field] = {}
    sizes: list[tuple[int, int, int]] = []
    rewards: list[float] = []
    for directory in directories:
        for _, trajectory in directory:
            found = aligned(trajectory)
            fields = {**fields_of(schema_of(found, {})), **fields}
            valid = _valid(found)
            sizes.append((found.steps, found.envs, int(np.count_nonzero(valid))))
            for path, leaf in found.leaves.items():
                if _is_measured(path, leaf.dtype, leaf.shape):
                    values = _as_float(leaf.dtype, leaf.values.reshape(found.steps * found.envs, -1)[valid])
                    moments.setdefault((path, values.shape[1]), Moments(values.shape[1])).add(values)
            reward = found.leaves[("rewards",)].values.reshape(found.steps * found.envs, -1)[valid]
            rewards.append(float(reward.sum(dtype=np.float64)))
            steps.more()
    ids = np.array([number for directory in directories for number in directory.names], np.int64)
    shape = np.array(sizes, np.int64).reshape(-1, 3)
    transitions = int(shape[:, 2].sum())
    part = {
        "trajectories": len(sizes),
        "transitions": transitions,
        "steps": int((shape[:, 0] * shape[:, 1]).sum()),
        "lengths": _range(shape[:, 0]),
        "envs": _range(shape[:, 1]),
        "ids": _range(ids),
        "seed": directories[0].seed,
        **_rewards(np.array(rewards), transitions),
        "fields": _fields(fields),
        "statistics": {
            dotted(path): found.result() for (path, _), found in sorted(moments.items(), key=lambda item: item[0])
        },
    }
    return {
        "path": str(root),
        "kind": "rlinf",
        "ranks": len(directories),
        "directories": [{"path": str(one.path), "kind": "rlinf", "bytes_on_disk": one.bytes} for one in directories],
        "bytes_on_disk": sum(one.bytes for one in directories),
        "missing": sum(len(one.missing) for one in directories),
        "ignored": sorted({name for one in directories for name in one.ignored}),
        "parts": {MAIN: part},
    }


def _valid(found: Aligned) -> np.ndarray[Any, Any]:
    leaf = found.leaves.get(("valid",))
    if leaf is None:
        return np.ones(found.steps * found.envs, bool)
    return np.ascontiguousarray(leaf.values.reshape(-1))
