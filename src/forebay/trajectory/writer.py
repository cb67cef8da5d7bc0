"""The thread that makes trajectories durable: rows, syncs, then the catalogue's row, for all that waits at once.

A trajectory waits here as rows in memory that stay where they are until it is durable. A commit that fails is undone:
nothing that waits is dropped, and nothing that may be half on disk is used again. If fewer trajectories fit, those are
committed. The error is kept and raised to everybody who adds, until `ask` tries again and succeeds. Everything here
runs in the writer's thread, except where a method says so.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from forebay.errors import ForebayError, StorageError, StorageVanished
from forebay.trajectory.listing import ROW, Listing, SegmentRows
from forebay.trajectory.prepare import Prepared
from forebay.trajectory.segments import (
    Segment,
    checksum,
    doing,
    file_names,
    file_sizes,
    new_name,
    open_files,
    row_bytes,
)
from forebay.trajectory.space import Space
from forebay.trajectory.store import Store, segment_limit
from forebay.trajectory.window import IN_MEMORY

__all__ = ["Job", "Writer", "in_memory", "listing_of"]


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


def in_memory(job: Job) -> Listing:
    """The row of a trajectory that is not in a file yet."""
    return listing_of(job, IN_MEMORY, SegmentRows(job.first_step, job.first_observation), 0)


class _Open:
    """The segment that is written to."""

    def __init__(self, number: int, segment: Segment, files: dict[Path, int], size: int, limit: int) -> None:
        """`files`: the descriptor of each."""
        self.number, self.segment, self.files = number, segment, files
        self.bytes, self.limit = size, limit


class Writer:
    """Writes what is submitted.

    `made_durable` is called under the lock: with jobs, with the number of the segment and the first rows of each, and
    with the segments that were sealed. It is a method that is held weakly: the thread does not keep the buffer alive.
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
        self._store, self._files, self._changed = store, store.files, changed
        self._made_durable = weakref.WeakMethod(made_durable)
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
        self._busy = self._stopping = self._asked = False
        self._begun = self.rounds = 0
        self.holds = 0  # somebody links files of segments: none may be removed
        self.removing = False  # files are being removed
        self.pending_bytes = 0  # of what waits, and of what is being copied to wait
        self.durable_id = store.next_id - 1
        self.error: ForebayError | None = None  # of the last round
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
            self._continue(number)
        self._thread.start()

    def _continue(self, number: int) -> None:
        """Open the last segment for more: what is behind its last trajectory was never durable."""
        space, segment = self._space, self.segments[number]
        assert space is not None
        sizes = file_sizes(segment.rows, space.layout)
        files: dict[Path, int] = {}
        try:
            for name, size in zip(file_names(segment.name, space.layout), sizes, strict=True):
                path = segment.directory / name
                with doing("open", path):
                    files[path] = self._files.append(path, size)
            limit = self._segment_bytes or segment_limit(self._retained_bytes)
            with open_files(segment.directory, file_names(segment.name, space.layout), self._files) as readers:
                segment.map(space, [reader for reader, _ in readers], _capacity(space, limit, *segment.rows))
        except BaseException:
            self._close(files)
            raise
        self._open = _Open(number, segment, files, sum(sizes), limit)

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

    @property
    def pending(self) -> list[Job]:
        """What is not durable, by id; its rows are in memory."""
        return list(self._jobs)

    def ask(self) -> int:
        """Try to write, also after an error. When so many `rounds` ended, what is submitted now is durable, or failed.

        A round that has nothing to write checks that the files are still in their place.
        """
        self._asked = True
        self._changed.notify_all()
        return self._begun + 1

    def stop(self) -> None:
        """Write what waits, or fail to, and end."""
        self._stopping = True
        self.ask()

    # --- called by the buffer, without the lock

    @property
    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        if self._open is not None:
            self._full.append(self._open)
            self._open = None
        self._close_full()

    def _close_full(self) -> None:
        while self._full:
            self._close(self._full.pop().files)

    def _close(self, files: dict[Path, int]) -> None:
        for descriptor in files.values():
            with suppress(OSError):
                self._files.close(descriptor)

    # --- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._asked and (self.idle or self.error is not None):
                    if self._stopping:
                        return
                    self._changed.wait()
                self._asked, self._busy = False, True
                self._begun += 1
                jobs, removable, floor_id = list(self._jobs), self._removable(), self._floor_id
                self.removing = bool(removable)
            error: ForebayError | None = None
            try:
                self._write_all(jobs, removable, floor_id)
            except BaseException as raised:
                error = _as_error(raised)
            with self._changed:
                self.error = error
                self._busy = self.removing = False
                self.rounds += 1
                self._changed.notify_all()

    def _write_all(self, jobs: list[Job], removable: list[int], floor_id: int) -> None:
        """Commit all of it at once; if that fails, whatever fits, in order."""
        most = len(jobs)
        while True:
            part = jobs[:most]
            try:
                places, sealed = self._commit(part, removable, floor_id)
            except StorageVanished:
                raise
            except StorageError:
                if not part or (len(part) == 1 and not removable):
                    raise
                most = 0 if removable else len(part) // 2  # removing alone may make room
                continue
            self._committed(part, places, sealed, removable, floor_id)
            jobs, removable = jobs[len(part) :], []
            if not jobs:
                return
            most = most or len(jobs)

    def _committed(
        self,
        jobs: list[Job],
        places: list[tuple[int, SegmentRows]],
        sealed: list[Segment],
        removed: list[int],
        floor_id: int,
    ) -> None:
        with self._changed:
            self._floor_written = floor_id
            self._forget(removed)
            self.removing = False
            for segment in sealed:  # not before: what just became durable is going to be read from it
                segment.sealed = True
            for job in jobs:
                self.pending_bytes -= job.bytes
                self.durable_id = job.id
                self._jobs.popleft()
            made_durable = self._made_durable()
            if (jobs or sealed) and made_durable is not None:
                made_durable(jobs, places, sealed)
            self._changed.notify_all()

    def _commit(
        self, jobs: list[Job], removable: list[int], floor_id: int
    ) -> tuple[list[tuple[int, SegmentRows]], list[Segment]]:
        """All of it or nothing."""
        self._check_in_place()
        if not jobs and not removable and floor_id == self._floor_written:
            return [], []
        opened, new = self._open, list[_Open]()
        before = None if opened is None else (opened.segment.rows, opened.bytes)
        try:
            places = self._write_and_list(jobs, removable, floor_id, new)
        except BaseException:
            for made in new:
                self._discard(made)
            self._full = [one for one in self._full if one not in new]
            self._open = None
            if opened is not None and before is not None:
                # A sync that failed says nothing about a second one: other files are written next time.
                opened.segment.rows, opened.bytes = before
                self._cut_off(opened)
                if opened not in self._full:
                    self._full.append(opened)
            raise
        for job, (number, _) in zip(jobs, places, strict=True):
            self._last_id[number] = job.id
        self._retained_bytes += sum(job.bytes for job in jobs)
        sealed = [opened.segment for opened in self._full]
        self._close_full()
        for number in removable:
            self._retained_bytes -= self._remove_files(self.segments[number])
        return places, sealed

    def _write_and_list(
        self, jobs: list[Job], removable: list[int], floor_id: int, new: list[_Open]
    ) -> list[tuple[int, SegmentRows]]:
        texts = self._texts[self._texts_written :]
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
        for opened, _ in grouped.values():
            for path, descriptor in opened.files.items():
                with doing("sync", path):
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
            self._check_in_place()
        self._texts_written += len(texts)
        self._schema_written = self._schema_written or bool(jobs)
        return places

    def _check_in_place(self) -> None:
        opened = [*self._full, *([] if self._open is None else [self._open])]
        with doing("check", self._store.directory):
            files = {path: self._files.identity(descriptor) for one in opened for path, descriptor in one.files.items()}
        self._store.check_in_place(files)

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
        files: dict[Path, int] = {}
        readers: list[int] = []
        try:
            for name in file_names(segment.name, space.layout):
                path = self._store.directory / name
                with doing("create", path):
                    files[path] = self._files.create(path)
                    readers.append(self._files.open(path)[0])
            with self._changed:
                number = max((0, *self.segments)) + 1  # those of checkpoints are negative
                segment.map(space, readers, capacity)
                self.segments[number] = segment
        except BaseException:
            self._close(files)
            self._remove_files(segment)
            raise
        finally:
            for descriptor in readers:
                with suppress(OSError):
                    self._files.close(descriptor)
        return _Open(number, segment, files, 0, limit)

    def _discard(self, made: _Open) -> None:
        """Nobody has seen this segment: it was made for a commit that failed."""
        assert self._space is not None
        with self._changed:
            del self.segments[made.number]
            made.segment.unmap(self._space)
        self._close(made.files)
        self._remove_files(made.segment)

    def _cut_off(self, opened: _Open) -> None:
        assert self._space is not None
        for descriptor, size in zip(
            opened.files.values(), file_sizes(opened.segment.rows, self._space.layout), strict=True
        ):
            with suppress(OSError):
                self._files.truncate(descriptor, size)

    def _write(self, opened: _Open, jobs: list[Job]) -> None:
        space = self._space
        assert space is not None
        parts: list[list[memoryview]] = [[] for _ in opened.files]
        steps = len(space.layout.steps)
        for job in jobs:
            for k, part in enumerate(row_bytes(space.steps, job.first_step, job.prepared.rows)):
                parts[k].append(part)
            for k, part in enumerate(row_bytes(space.observations, job.first_observation, job.prepared.observations)):
                parts[steps + k].append(part)
        for (path, descriptor), theirs in zip(opened.files.items(), parts, strict=True):
            with doing("write", path):
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

    def _remove_files(self, segment: Segment) -> int:
        """How many bytes that frees."""
        assert self._space is not None
        freed = 0
        for name in file_names(segment.name, self._space.layout):
            with suppress(OSError):
                path = segment.directory / name
                size = path.stat().st_size
                self._files.remove(path)
                freed += size
        return freed


def _capacity(space: Space, limit: int, steps: int, observations: int) -> SegmentRows:
    """Room for all the rows that could come until the limit is reached: addresses cost nothing."""
    layout = space.layout
    return SegmentRows(
        steps + limit // layout.step_bytes + 1, observations + limit // max(layout.observation_bytes, 1) + 1
    )


def _as_error(error: BaseException) -> ForebayError:
    if isinstance(error, ForebayError):
        return error
    failed = StorageError(f"trajectories cannot be written: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
