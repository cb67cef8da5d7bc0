"""Which trajectories there are, and where their rows lie: the same table for a store, a checkpoint and a window.

A listing is a structured array with a row per trajectory, and two arrays of runs: where drawing, and where a sequence,
may begin (see `index`). It comes from files, so it is checked before anything is looked up with it: what passes leads
to rows that its segments have, no two trajectories share a row, and no run leaves its trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forebay.errors import DamagedData
from forebay.trajectory.schema import Layout

__all__ = ["ROW", "Listing", "Row", "SegmentRows"]

ROW = np.dtype(
    [
        ("id", "<i8"),
        ("segment", "<i8"),
        ("first_step", "<i8"),
        ("first_observation", "<i8"),
        ("steps", "<i8"),
        ("envs", "<i8"),
        ("epochs", "<i8"),
        ("observations", "<i8"),
        ("transitions", "<i8"),
        ("runs", "<i8"),
        ("chains", "<i8"),
        ("longest", "<i8"),
        ("weights", "<i8"),
        ("texts", "<i8"),
        ("crc", "<i8"),
        ("reward", "<f8"),
        ("added_at", "<f8"),
    ]
)
"""Of a trajectory: `weights` is the code of its model_weights_id, `longest` its max_episode_length.

`texts` is added to the codes that its rows have: rows of several directories, each with its own texts, can be together.
"""


class Row(NamedTuple):
    """A row of a listing, as plain numbers."""

    id: int
    segment: int
    first_step: int
    first_observation: int
    steps: int
    envs: int
    epochs: int
    observations: int
    transitions: int
    runs: int
    chains: int
    longest: int
    weights: int
    texts: int
    crc: int
    reward: float
    added_at: float


_NAMES: tuple[str, ...] = ROW.names or ()
_MOST = 2**48  # rows; sums of what is checked against it stay inside 64 bits


class SegmentRows(NamedTuple):
    """How many rows a segment has."""

    steps: int
    observations: int

    @classmethod
    def used_by(cls, rows: np.ndarray[Any, Any]) -> SegmentRows:
        """As many as these trajectories of one segment reach."""
        return cls(
            int((rows["first_step"] + rows["steps"] * rows["envs"]).max(initial=0)),
            int((rows["first_observation"] + rows["observations"]).max(initial=0)),
        )


class Listing(NamedTuple):
    """Trajectories in the order of their ids; their runs and chains one after another, `[k, 2]` of start and length."""

    rows: np.ndarray[Any, Any]
    runs: np.ndarray[Any, Any]
    chains: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def empty(cls) -> Listing:
        nothing = np.empty((0, 2), np.int64)
        return cls(np.empty(0, ROW), nothing, nothing)

    @classmethod
    def joined(cls, parts: Sequence[Listing]) -> Listing:
        if len(parts) < 2:
            return parts[0] if parts else cls.empty()
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def chosen(self, which: np.ndarray[Any, Any]) -> Listing:
        """These trajectories, in this order; `which` are positions."""
        return Listing(
            self.rows[which],
            _chosen_runs(self.runs, self.rows["runs"], which),
            _chosen_runs(self.chains, self.rows["chains"], which),
        )

    def with_rows(self, **columns: Any) -> Listing:
        """The same with other values in some columns."""
        rows = self.rows.copy()
        for name, values in columns.items():
            rows[name] = values
        return Listing(rows, self.runs, self.chains)

    def bytes(self, layout: Layout) -> np.ndarray[Any, Any]:
        """How many bytes each takes."""
        steps: np.ndarray[Any, Any] = self.rows["steps"] * self.rows["envs"] * layout.step_bytes
        both: np.ndarray[Any, Any] = steps + self.rows["observations"] * layout.observation_bytes
        return both

    def check(self, segments: Mapping[int, SegmentRows], layout: Layout, texts: int) -> None:
        """DamagedData unless everything that it says can be."""
        rows = self.rows
        numbers = np.stack([rows[name] for name in _NAMES[:14]]) if len(rows) else np.zeros((14, 0), np.int64)
        if numbers.size and (numbers.min() < 0 or numbers.max() > 2**62):
            raise DamagedData("the list of trajectories has a number below 0, or one that is impossible")
        if (np.diff(rows["id"]) <= 0).any():
            raise DamagedData("the ids of trajectories do not grow in the list of trajectories")
        small = ("steps", "envs", "observations", "first_step", "first_observation", "runs", "chains")
        if (
            any((rows[name] > _MOST).any() for name in small)
            or ((rows["weights"] >= texts) | (rows["texts"] > texts)).any()
        ):
            raise DamagedData("the list of trajectories has a number that is impossible")
        if (rows["steps"] * rows["envs"].astype(float) > _MOST).any():
            raise DamagedData("the list of trajectories has one with an impossible number of steps")
        cells = rows["steps"] * rows["envs"]
        least = np.where(bool(layout.observations), cells, 0)
        most = 2 * least
        wrong = (cells < 1) | (rows["epochs"] < 1) | (rows["observations"] < least) | (rows["observations"] > most)
        wrong |= rows["steps"] % np.maximum(rows["epochs"], 1) != 0
        if wrong.any():
            raise DamagedData(f"trajectory {rows['id'][wrong][0]} has an impossible shape")
        self._check_places(segments, cells)
        self._check_runs(self.runs, rows["runs"], cells, rows["transitions"])
        self._check_runs(self.chains, rows["chains"], cells, None)
        steps = np.repeat(rows["steps"], rows["chains"])
        if (self.chains[:, 0] % steps + self.chains[:, 1] > steps).any():
            raise DamagedData("the list of trajectories has a run that goes on from one environment into another")

    def _check_places(self, segments: Mapping[int, SegmentRows], cells: np.ndarray[Any, Any]) -> None:
        rows = self.rows
        unknown = ~np.isin(rows["segment"], list(segments))
        if unknown.any():
            raise DamagedData(f"trajectory {rows['id'][unknown][0]} is in a segment that is not there")
        for first, sizes, part in (("first_step", cells, 0), ("first_observation", rows["observations"], 1)):
            has = np.array([segments[number][part] for number in rows["segment"].tolist()], np.int64)
            end = rows[first] + sizes
            if (end > has).any():
                raise DamagedData(f"trajectory {rows['id'][end > has][0]} goes on behind the end of its segment")
            order = np.lexsort((rows[first], rows["segment"]))
            same = rows["segment"][order][1:] == rows["segment"][order][:-1]
            if (same & (rows[first][order][1:] < end[order][:-1])).any():
                raise DamagedData("two trajectories share rows")

    def _check_runs(
        self,
        runs: np.ndarray[Any, Any],
        counts: np.ndarray[Any, Any],
        cells: np.ndarray[Any, Any],
        total: np.ndarray[Any, Any] | None,
    ) -> None:
        # Each first: a sum of numbers that are too large may come out right.
        if (counts > len(runs)).any() or int(counts.sum()) != len(runs):
            raise DamagedData(f"the list of trajectories has {len(runs)} runs; its rows say {int(counts.sum())}")
        owner = np.repeat(np.arange(len(counts)), counts)
        start, length = runs[:, 0], runs[:, 1]
        limit = cells[owner]
        bad = (start < 0) | (length < 1) | (start > limit) | (length > limit) | (start + length > limit)
        follows = (owner[1:] == owner[:-1]) & (start[1:] < start[:-1] + length[:-1])
        if bad.any() or follows.any():
            raise DamagedData("the list of trajectories has a run that leaves its trajectory, or overlaps another")
        if total is not None and (np.bincount(owner, length, len(counts)) != total).any():
            raise DamagedData("the list of trajectories counts other transitions than its runs have")


def _chosen_runs(
    runs: np.ndarray[Any, Any], counts: np.ndarray[Any, Any], which: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    starts = np.cumsum(counts) - counts
    sizes = counts[which]
    inside = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    found: np.ndarray[Any, Any] = runs[np.repeat(starts[which], sizes) + inside]
    return found
