"""The window: which trajectories can be sampled, where their rows are, and when a row may be used again.

A trajectory starts in memory. If it is also written to a store, then once it is durable, and no longer among the newest
few that stay resident, it is read from its mapped file instead; readers notice nothing. What leaves the window gives
its rows back when no reader can see them any more. Every method is called under the buffer's lock.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple

import numpy as np

from forebay.trajectory.index import Index
from forebay.trajectory.listing import Listing, Row, SegmentRows
from forebay.trajectory.pins import Pins
from forebay.trajectory.segments import Segment
from forebay.trajectory.space import Space

__all__ = ["IN_MEMORY", "Limits", "Window"]

IN_MEMORY = -1
"""The segment number of a trajectory whose rows are in memory."""


class Limits(NamedTuple):
    """What the window holds at most; None or 0 trajectories: no limit."""

    trajectories: int
    transitions: int | None
    bytes: int | None


class _Rows(NamedTuple):
    """Rows of memory."""

    first_step: int
    steps: int
    first_observation: int
    observations: int


def _rows_of(row: Row) -> _Rows:
    return _Rows(row.first_step, row.steps * row.envs, row.first_observation, row.observations)


class Window:
    """The newest trajectories, over the rows of one space."""

    def __init__(self, space: Space, limits: Limits, resident: int, segments: dict[int, Segment]) -> None:
        self.space, self._limits, self._resident = space, limits, resident
        self.index, self.pins = Index(), Pins()
        self.segments = segments
        """Files that are mapped, or can be, by number."""
        self.bytes = 0
        self.evicted = 0
        self._pending: dict[int, int] = {}  # by id: the slot of what is not durable yet
        self._orphans: dict[int, _Rows] = {}  # left the window before they were durable
        self._movable: deque[tuple[int, int, int, int]] = deque()  # durable and in memory: slot, segment, rows

    # --- adding

    def take_rows(self, steps: int, observations: int) -> tuple[int, int]:
        """Rows of memory for a trajectory that nobody sees yet."""
        first = self.space.steps.take(steps)
        try:
            return first, self.space.observations.take(observations)
        except BaseException:
            self.space.steps.give_back(first, steps)
            raise

    def give_back_rows(self, first_step: int, steps: int, first_observation: int, observations: int) -> None:
        self.space.steps.give_back(first_step, steps)
        self.space.observations.give_back(first_observation, observations)

    def append(self, listing: Listing, size: int, *, pending: bool) -> None:
        """Trajectories of `size` bytes whose rows (absolute ones) are written become visible; the oldest leave."""
        first = self.index.append(listing)
        self.bytes += size
        if pending:
            for k, number in enumerate(listing.rows["id"].tolist()):
                self._pending[number] = first + k
        for number in listing.rows["segment"].tolist():
            if number != IN_MEMORY:
                self.segments[number].in_window += 1
        self._evict()

    def _evict(self) -> None:
        limits, index = self._limits, self.index
        while len(index) > 1 and (
            (limits.trajectories and len(index) > limits.trajectories)
            or (limits.transitions is not None and index.transitions > limits.transitions)
            or (limits.bytes is not None and self.bytes > limits.bytes)
        ):
            self.evict_oldest()

    def _bytes(self, rows: _Rows) -> int:
        layout = self.space.layout
        return rows.steps * layout.step_bytes + rows.observations * layout.observation_bytes

    def evict_oldest(self) -> None:
        slot = self.index.slots.first
        gone = self.index.forget_oldest()
        rows, number, segment = _rows_of(gone), gone.id, gone.segment
        self.bytes -= self._bytes(rows)
        self.evicted += 1
        if segment != IN_MEMORY:
            self._leave_segment(segment)
        elif self._movable and self._movable[0][0] == slot:
            self._leave_segment(self._movable.popleft()[1])
            self._let_go(rows)
        elif self._pending.pop(number, None) is not None:
            self._orphans[number] = rows
        else:
            self._let_go(rows)

    def clear(self) -> None:
        while len(self.index):
            self.evict_oldest()

    # --- from memory to files

    def made_durable(self, ids: list[int], places: list[tuple[int, SegmentRows]]) -> None:
        """These trajectories can be read from files from now on."""
        for number, (segment, place) in zip(ids, places, strict=True):
            orphan = self._orphans.pop(number, None)
            if orphan is not None:
                self._let_go(orphan)
                continue
            slot = self._pending.pop(number)
            found = self.segments[segment]
            found.in_window += 1  # its rows are in memory still, but are going to be read from there
            first_observation = found.first_observation + place.observations
            self._movable.append((slot, segment, found.first_step + place.steps, first_observation))
        while len(self._movable) > self._resident:
            self._move()

    def drop_resident(self) -> None:
        """Read everything that is durable from its file."""
        while self._movable:
            self._move()

    def _move(self) -> None:
        slot, segment, first_step, first_observation = self._movable.popleft()
        row = self.index.rows[slot - self.index.slots.first]
        rows = _rows_of(Row(*row.item()))
        row["segment"], row["first_step"], row["first_observation"] = segment, first_step, first_observation
        self._let_go(rows)

    def sealed(self, segment: Segment) -> None:
        """A segment gets no more rows; without a trajectory in the window it need not be mapped."""
        if not segment.in_window:
            self._unmap(segment)

    def _leave_segment(self, number: int) -> None:
        segment = self.segments[number]
        segment.in_window -= 1
        if segment.in_window:
            return
        if number < 0:  # of a checkpoint: nobody asks for it again
            self._unmap(segment)
            del self.segments[number]
        elif segment.sealed:
            self._unmap(segment)

    def _unmap(self, segment: Segment) -> None:
        def unmap() -> None:
            if not segment.in_window:
                segment.unmap(self.space)

        self.pins.let_go(unmap)

    def _let_go(self, rows: _Rows) -> None:
        self.pins.let_go(partial(self.give_back_rows, *rows))

    def _check(self) -> None:
        """Counts agree with what is there, and no two trajectories share a row of memory."""
        self.index._check()
        listing = self.index.listing()
        assert self.bytes == int(listing.bytes(self.space.layout).sum())
        in_memory = listing.rows[listing.rows["segment"] == IN_MEMORY]
        order = np.argsort(in_memory["first_step"])
        ends = (in_memory["first_step"] + in_memory["steps"] * in_memory["envs"])[order]
        assert (in_memory["first_step"][order][1:] >= ends[:-1]).all()
        for number, segment in self.segments.items():
            movable = sum(item[1] == number for item in self._movable)
            assert segment.in_window == int((listing.rows["segment"] == number).sum()) + movable
