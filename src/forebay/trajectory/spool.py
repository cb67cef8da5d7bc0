"""Trajectories that come one after another become sealed segments, whatever their number, in bounded memory.

What importing and rewriting write with: rows are collected in memory up to a limit, then written and synced as one
segment. Nobody knows of the segments until a manifest names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from forebay.checkpoint.files import FileOps
from forebay.trajectory.data import Aligned
from forebay.trajectory.listing import Listing, SegmentRows
from forebay.trajectory.prepare import prepare, write
from forebay.trajectory.schema import Layout, fitted, schema_of
from forebay.trajectory.segments import Segment, checksum, doing, file_names, new_name, row_bytes
from forebay.trajectory.space import Space
from forebay.trajectory.texts import Texts
from forebay.trajectory.writer import Job, listing_of

__all__ = ["Spool", "Spooled"]


class Spooled(NamedTuple):
    """What was written, in the order in which it came."""

    layout: Layout | None
    listing: Listing
    segments: dict[int, Segment]
    texts: list[str]


class Spool:
    """Writes segments into a directory that exists. Without a layout the first trajectory decides."""

    segment_bytes = 64 * 2**20

    def __init__(self, directory: Path, layout: Layout | None, files: FileOps) -> None:
        self._directory, self._files = directory, files
        self._layout = layout
        self._space: Space | None = None
        self._texts = Texts([])
        self._waiting: list[Job] = []
        self._bytes = 0
        self._listings: list[Listing] = []
        self._segments: dict[int, Segment] = {}

    def add(self, trajectory_id: int, found: Aligned, added_at: float, fill: Mapping[str, Any]) -> None:
        """InvalidTrajectory if it does not fit; `fill` has the values of fields that may be missing."""
        if self._layout is None:
            self._layout = Layout(schema_of(found, fill))
        layout = self._layout
        space = self._space = self._space or Space(layout)
        prepared = prepare(found, fitted(found, layout.schema, fill), layout, self._texts.encode)
        weights = self._texts.code(prepared.model_weights_id)
        size = prepared.rows * layout.step_bytes + prepared.observations * layout.observation_bytes
        if self._waiting and self._bytes + size > self.segment_bytes:
            self._write()
        place = space.steps.take(prepared.rows), space.observations.take(prepared.observations)
        write(prepared, space, *place)
        # Its arrays are in rows now; only what the listing needs is kept.
        self._waiting.append(Job(trajectory_id, prepared._replace(leaves={}), weights, added_at, *place, size))
        self._bytes += size

    def finish(self) -> Spooled:
        """Write what waits."""
        if self._waiting:
            self._write()
        return Spooled(self._layout, Listing.joined(self._listings), self._segments, self._texts.known)

    def _write(self) -> None:
        space = self._space
        assert space is not None
        segment = Segment(self._directory, new_name(), SegmentRows(0, 0), sealed=True)
        listings = []
        for job in self._waiting:
            rows, observations = job.prepared.rows, job.prepared.observations
            crc = checksum(space, job.first_step, rows, job.first_observation, observations)
            listings.append(listing_of(job, len(self._segments), segment.rows, crc))
            segment.rows = SegmentRows(segment.rows.steps + rows, segment.rows.observations + observations)
        names = iter(file_names(segment.name, space.layout))
        for table, first, count in (
            (space.steps, "first_step", "rows"),
            (space.observations, "first_observation", "observations"),
        ):
            places = [(getattr(job, first), getattr(job.prepared, count)) for job in self._waiting]
            for k in range(len(table.strips)):
                self._write_file(self._directory / next(names), [row_bytes(table, *place)[k] for place in places])
        self._segments[len(self._segments)] = segment
        self._listings.append(Listing.joined(listings))
        for job in self._waiting:
            space.steps.give_back(job.first_step, job.prepared.rows)
            space.observations.give_back(job.first_observation, job.prepared.observations)
        self._waiting.clear()
        self._bytes = 0

    def _write_file(self, path: Path, parts: list[memoryview]) -> None:
        with doing("create", path):
            descriptor = self._files.create(path)
        try:
            with doing("write", path):
                self._files.write(descriptor, parts)
                self._files.sync(descriptor)
        finally:
            with suppress(OSError):
                self._files.close(descriptor)
