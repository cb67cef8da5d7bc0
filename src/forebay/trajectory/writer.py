"""The thread that makes trajectories durable: rows, syncs, then the catalogue's row, for all that waits at once.

A trajectory waits here as rows in memory that stay where they are until it is durable. An error is kept and raised to
everybody who asks from then on; nothing that waits is dropped, and nothing is tried twice. Everything here runs in the
writer's thread, except where a method says so.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from forebay.errors import ForebayError, StorageError
from forebay.trajectory.listing import ROW, Listing, SegmentRows
from forebay.trajectory.prepare import Prepared
from forebay.trajectory.segments import Segment, checksum, doing, file_names, new_name, open_files, row_bytes
from forebay.trajectory.space import Space
from forebay.trajectory.store import Store, segment_limit

__all__ = ["Job", "Writer", "listing_of"]

_log = logging.getLogger(__name__)


class Job(NamedTuple):
    """A trajectory that is to become durable, and where in memory it is."""

    id: int
    prepared: Prepared
    weights: int
    added_at: float
    first_step: int
    first_observation: int
    bytes: int


def listing_of(job: Job, segment: int, place: SegmentRows, crc: int) -> Listing:
    """The catalogue's row of a trajectory."""
    prepared = job.prepared
    row = np.zeros(1, ROW)
    row[0] = (
        job.id,
        segment,
        place.steps,
        place.observations,
        prepared.steps,
        prepared.envs,
        prepared.epochs,
        prepared.observations,
        prepared.transitions,
        len(prepared.runs),
        len(prepared.chains),
        prepared.max_episode_length,
        job.weights,
        0,
        crc,
        prepared.reward,
        job.added_at,
    )
    return Listing(row, prepared.runs, prepared.chains)


class _Open:
    """The segment that is written to."""

    def __init__(self, number: int, segment: Segment, descriptors: list[int], size: int, limit: int) -> None:
        self.number, self.segment, self.descriptors = number, segment, descriptors
        self.bytes, self.limit = size, limit


class Writer:
    """Writes what is submitted.

    `made_durable` is called under the lock: with jobs, with the number of the segment and the first rows of each, and
    with the segments that were sealed.
    """

    def __init__(
        self,
        store: Store,
        segments: dict[int, Segment],
        changed: threading.Condition,
        made_durable: Callable[[list[Job], list[tuple[int, SegmentRows]], list[Segment]], None],
        texts: list[str],
        retained_bytes: int,
        segment_bytes: int | None,
    ) -> None:
        self._store, self._files, self._changed, self._made_durable = store, store.files, changed, made_durable
        self.segments = segments
        self._segment_bytes = segment_bytes
        self._retained_bytes = retained_bytes
        self._space: Space | None = None
        self._jobs: deque[Job] = deque()
        self._texts = texts  # grows
        self._texts_written = len(store.texts)
        self._schema_written = store.layout is not None
        self._open: _Open | None = None
        self._full: list[_Open] = []  # to be sealed
        self._last_id: dict[int, int] = {}
        self._floor_id = self._floor_written = store.floor_id
        self._retain_from = 0
        self._busy = self._stopping = False
        self.holds = 0  # somebody links files of segments: none may be removed
        self.removing = False  # files are being removed
        self.pending_bytes = 0  # of what waits, and of what is being copied to wait
        self.durable_id = store.next_id - 1
        self.error: ForebayError | None = None
        self._thread = threading.Thread(target=self._run, name="forebay-trajectories", daemon=True)

    # --- called by the buffer, under the lock

    def start(self, listing: Listing, space: Space | None) -> None:
        """Go on where the store was left; the open segment is continued."""
        self._space = space
        rows = listing.rows
        for number, segment in self.segments.items():
            ids = rows["id"][rows["segment"] == number]
            if segment.problem:  # its files may come back
                ids = self._store.catalogue.listing(segment=number).rows["id"]
            self._last_id[number] = int(ids.max()) if len(ids) else -1
        opened = sorted(number for number, segment in self.segments.items() if not segment.sealed)
        whole = [number for number in opened if not self.segments[number].problem and not self.segments[number].is_torn]
        if opened:
            # A reader may look at rows that were found torn here: they are not cut off.
            with self._store.catalogue.transaction():
                for number in opened:
                    if number not in whole[-1:]:
                        self._store.catalogue.seal_segment(number)
                        self.segments[number].sealed = True
        for number in whole[-1:]:
            self._continue(number, rows[rows["segment"] == number])
        self._thread.start()

    def _continue(self, number: int, rows: np.ndarray[Any, Any]) -> None:
        """Open the last segment for more: what is behind its last trajectory was never durable."""
        space, segment = self._space, self.segments[number]
        assert space is not None
        steps = int((rows["first_step"] + rows["steps"] * rows["envs"]).max(initial=0))
        observations = int((rows["first_observation"] + rows["observations"]).max(initial=0))
        counts = [steps] * len(space.layout.steps) + [observations] * len(space.layout.observations)
        strips = (*space.layout.steps, *space.layout.observations)
        descriptors: list[int] = []
        try:
            for name, strip, count in zip(file_names(segment.name, space.layout), strips, counts, strict=True):
                path = segment.directory / name
                with doing("open", path):
                    descriptors.append(self._files.append(path, count * strip.row_bytes))
            size = sum(count * strip.row_bytes for strip, count in zip(strips, counts, strict=True))
            limit = self._segment_bytes or segment_limit(self._retained_bytes)
            segment.rows = SegmentRows(steps, observations)
            with open_files(segment.directory, file_names(segment.name, space.layout), self._files) as readers:
                segment.map(space, [reader for reader, _ in readers], _capacity(space, limit, steps, observations))
        except BaseException:
            for descriptor in descriptors:
                with suppress(OSError):
                    self._files.close(descriptor)
            raise
        self._open = _Open(number, segment, descriptors, size, limit)

    def set_space(self, space: Space) -> None:
        self._space = space

    def submit(self, jobs: list[Job]) -> None:
        self._jobs += jobs
        self._changed.notify_all()

    def retain(self, from_id: int) -> None:
        """Nothing below this id is kept on disk any more."""
        if from_id > self._retain_from:
            self._retain_from = from_id
            self._changed.notify_all()

    def set_floor(self, floor_id: int) -> None:
        """Nothing below this id is sampled when the store is opened again."""
        self._floor_id = floor_id
        self._changed.notify_all()

    @property
    def floor_waits(self) -> bool:
        return self._floor_id != self._floor_written

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._busy and not self.floor_waits and not self._removable()

    def stop(self) -> None:
        self._stopping = True
        self._changed.notify_all()

    # --- called by the buffer, without the lock

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        if self._open is not None:
            self._full.append(self._open)
            self._open = None
        self._close_full()
        del self._made_durable  # so that the buffer, and its range of addresses, end with their last user

    def _close_full(self) -> None:
        while self._full:
            for descriptor in self._full.pop().descriptors:
                with suppress(OSError):
                    self._files.close(descriptor)

    # --- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while self.idle and not self._stopping:
                    self._changed.wait()
                if self.idle:
                    return
                self._busy = True
                jobs = list(self._jobs)
                self._jobs.clear()
                removable, floor_id = self._removable(), self._floor_id
                self.removing = bool(removable)
            try:
                places, sealed = self._commit(jobs, removable, floor_id)
                with self._changed:
                    self._floor_written = floor_id
                    self._forget(removable)
                    self.removing = False
                    self.pending_bytes -= sum(job.bytes for job in jobs)
                    for segment in sealed:  # not before: what just became durable is going to be read from it
                        segment.sealed = True
                    if jobs:
                        self.durable_id = jobs[-1].id
                        self._made_durable(jobs, places, sealed)
                    self._changed.notify_all()
            except BaseException as error:
                with self._changed:
                    self.error = _as_error(error)
                    self._busy = self.removing = False
                    self._jobs.extendleft(reversed(jobs))
                    self._changed.notify_all()
                return

    def _commit(
        self, jobs: list[Job], removable: list[int], floor_id: int
    ) -> tuple[list[tuple[int, SegmentRows]], list[Segment]]:
        texts = self._texts[self._texts_written :]
        new: list[_Open] = []
        places: list[tuple[int, SegmentRows]] = []
        rows: list[Listing] = []
        grouped: dict[int, tuple[_Open, list[Job]]] = {}
        for job in jobs:
            opened = self._room_for(job, new)
            place = opened.segment.rows
            places.append((opened.number, place))
            opened.segment.rows = SegmentRows(
                place.steps + job.prepared.rows, place.observations + job.prepared.observations
            )
            opened.bytes += job.bytes
            grouped.setdefault(opened.number, (opened, []))[1].append(job)
        for opened, theirs in grouped.values():
            self._write(opened, theirs)
        assert self._space is not None or not jobs
        for job, (number, place) in zip(jobs, places, strict=True):
            assert self._space is not None
            crc = checksum(
                self._space, job.first_step, job.prepared.rows, job.first_observation, job.prepared.observations
            )
            rows.append(listing_of(job, number, place, crc))
            self._last_id[number] = job.id
        for opened, _ in grouped.values():
            for descriptor in opened.descriptors:
                with doing("sync", self._store.directory):
                    self._files.sync(descriptor)
        if new:
            self._sync_directory()
        catalogue = self._store.catalogue
        with catalogue.transaction():
            if jobs and not self._schema_written:
                assert self._space is not None
                catalogue.set_schema(self._space.layout)
            catalogue.add_texts(self._texts_written, texts)
            for opened in new:
                catalogue.add_segment(opened.number, opened.segment.name)
            for opened in self._full:
                catalogue.seal_segment(opened.number)
            for number in removable:
                catalogue.remove_segment(number)
            if rows:
                catalogue.add(Listing.joined(rows))
                catalogue.set_meta(next_id=jobs[-1].id + 1)
            catalogue.set_meta(floor_id=floor_id)
        self._texts_written += len(texts)
        self._schema_written = self._schema_written or bool(jobs)
        self._retained_bytes += sum(job.bytes for job in jobs)
        sealed = [opened.segment for opened in self._full]
        self._close_full()
        for number in removable:
            self._remove_files(self.segments[number])
        return places, sealed

    def _room_for(self, job: Job, new: list[_Open]) -> _Open:
        opened = self._open
        if opened is not None:
            rows, capacity = opened.segment.rows, opened.segment.capacity
            if (
                opened.bytes + job.bytes <= opened.limit
                and rows.steps + job.prepared.rows <= capacity.steps
                and rows.observations + job.prepared.observations <= capacity.observations
            ):
                return opened
            self._full.append(opened)
            self._open = None
        self._open = self._new_segment(job)
        new.append(self._open)
        return self._open

    def _new_segment(self, job: Job) -> _Open:
        space = self._space
        assert space is not None
        limit = max(self._segment_bytes or segment_limit(self._retained_bytes), job.bytes)
        capacity = _capacity(space, limit, job.prepared.rows, job.prepared.observations)
        segment = Segment(self._store.directory, new_name(), SegmentRows(0, 0), sealed=False)
        descriptors: list[int] = []
        readers: list[int] = []
        try:
            for name in file_names(segment.name, space.layout):
                path = self._store.directory / name
                with doing("create", path):
                    descriptors.append(self._files.create(path))
                    readers.append(self._files.open(path)[0])
            with self._changed:
                number = max((0, *self.segments)) + 1  # those of checkpoints are negative
                segment.map(space, readers, capacity)
                self.segments[number] = segment
        except BaseException:
            for descriptor in descriptors:
                with suppress(OSError):
                    self._files.close(descriptor)
            raise
        finally:
            for descriptor in readers:
                with suppress(OSError):
                    self._files.close(descriptor)
        return _Open(number, segment, descriptors, 0, limit)

    def _write(self, opened: _Open, jobs: list[Job]) -> None:
        space = self._space
        assert space is not None
        parts: list[list[memoryview]] = [[] for _ in opened.descriptors]
        steps = len(space.layout.steps)
        for job in jobs:
            for k, part in enumerate(row_bytes(space.steps, job.first_step, job.prepared.rows)):
                parts[k].append(part)
            for k, part in enumerate(row_bytes(space.observations, job.first_observation, job.prepared.observations)):
                parts[steps + k].append(part)
        for descriptor, theirs in zip(opened.descriptors, parts, strict=True):
            with doing("write", self._store.directory):
                self._files.write(descriptor, theirs)

    def _sync_directory(self) -> None:
        with doing("sync", self._store.directory):
            descriptor = self._files.open_directory(self._store.directory)
            try:
                self._files.sync(descriptor)
            finally:
                self._files.close(descriptor)

    # --- letting go

    def _removable(self) -> list[int]:
        """Sealed segments of which nothing is kept any more."""
        if self.holds or not self._retain_from:
            return []
        return [
            number
            for number, segment in self.segments.items()
            if number > 0
            and segment.sealed
            and not segment.in_window
            and self._last_id.get(number, -1) < self._retain_from
        ]

    def _forget(self, removed: list[int]) -> None:
        for number in removed:
            self.segments.pop(number)
            self._last_id.pop(number, None)

    def _remove_files(self, segment: Segment) -> None:
        assert self._space is not None
        for name in file_names(segment.name, self._space.layout):
            with suppress(OSError):
                path = segment.directory / name
                size = path.stat().st_size
                self._files.remove(path)
                self._retained_bytes -= size


def _capacity(space: Space, limit: int, steps: int, observations: int) -> SegmentRows:
    """Room for all the rows that could come until the limit is reached: addresses cost nothing."""
    layout = space.layout
    return SegmentRows(
        steps + limit // layout.step_bytes + 1, observations + limit // max(layout.observation_bytes, 1) + 1
    )


def _as_error(error: BaseException) -> ForebayError:
    if isinstance(error, ForebayError):
        return error
    _log.exception("writing trajectories failed", exc_info=error)
    failed = StorageError(f"trajectories cannot be written: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
