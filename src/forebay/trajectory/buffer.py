"""TrajectoryReplayBuffer: trajectories go in, random steps of the newest of them come out.

Safe with any number of writing and reading threads: what a sample sees is decided under a lock, the copying is done
outside of it, and no row is used again while a reader may look at it. An add is all or nothing, and what it was given
is copied before it returns. With `auto_save` a thread makes trajectories durable in a native store; a trajectory is
acknowledged when its id is at most `durable_id`.

Draws come from numpy's Philox, keyed by seed and rank; no global random state is touched, and the state is part of a
checkpoint. Not here: how rows are found (`window`, `index`), how they are gathered, what files look like.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from forebay.checks import whole_number
from forebay.errors import BufferClosed, InvalidConfig, InvalidInput, InvalidTrajectory, StorageError, WaitTimeout
from forebay.files import FileOps
from forebay.trajectory.checkpoint import MAIN, PartSource, write_checkpoint
from forebay.trajectory.data import Aligned, Trajectory, aligned
from forebay.trajectory.gather import Batch, Gatherer
from forebay.trajectory.listing import Listing, SegmentRows
from forebay.trajectory.pool import BlockPool
from forebay.trajectory.prepare import Prepared, prepare, write
from forebay.trajectory.readback import read_trajectory
from forebay.trajectory.restore import Shard, Taken, block, keyed_random, map_taken, random_state, restored_random, take
from forebay.trajectory.rlinf import export_rlinf, find_rlinf, open_rlinf
from forebay.trajectory.schema import Layout, Schema, check_optional, fitted, schema_of
from forebay.trajectory.segments import MissingFile, Segment
from forebay.trajectory.space import Space
from forebay.trajectory.store import Store, map_segment
from forebay.trajectory.texts import Texts
from forebay.trajectory.window import IN_MEMORY, Limits, Window
from forebay.trajectory.writer import Job, Writer, listing_of

__all__ = ["TrajectoryReplayBuffer"]

_PENDING_BYTES = 256 * 2**20


class TrajectoryReplayBuffer:
    """A moving window of trajectories, sampled uniformly by transition.

    `sample_window_size`: only the newest so many trajectories are sampled (0: all). `max_transitions` and `max_bytes`
    limit it further. With `auto_save` everything is also kept in `auto_save_path`/rank_<rank>, for ever unless
    `retain="window"` or one of these limits is given; then `cache_size` of the newest (if `enable_cache`) stay in the
    process's memory, and the others are read from mapped files. Results never depend on that. `optional` names fields
    that may be missing, with their fill. `arrays` says what comes out: "torch", "numpy", or None for torch where it is
    installed.
    """

    _segment_bytes: int | None = None  # tests make segments tiny
    _files: FileOps | None = None

    def __init__(
        self,
        seed: int = 1234,
        enable_cache: bool = True,
        cache_size: int = 5,
        sample_window_size: int = 100,
        auto_save: bool = False,
        auto_save_path: str | os.PathLike[str] = "",
        trajectory_format: Literal["native", "pt"] = "native",
        *,
        rank: int = 0,
        retain: Literal["all", "window"] = "all",
        max_transitions: int | None = None,
        max_bytes: int | None = None,
        max_pending_bytes: int = _PENDING_BYTES,
        optional: Mapping[str, Any] | None = None,
        read_only: bool = False,
        arrays: Literal["torch", "numpy"] | None = None,
    ) -> None:
        self.seed, self.rank = whole_number("seed", seed, least=0), whole_number("rank", rank, least=0)
        if self.seed >= 2**64 or self.rank >= 2**64:
            raise InvalidConfig(f"seed is {seed} and rank is {rank}; expected at most {2**64 - 1}")
        window = whole_number("sample_window_size", sample_window_size, least=0)
        cached = whole_number("cache_size", cache_size, least=0) if enable_cache else 0
        self._limits = Limits(window, _limit("max_transitions", max_transitions), _limit("max_bytes", max_bytes))
        self._max_pending_bytes = whole_number("max_pending_bytes", max_pending_bytes, least=1)
        self.trajectory_format = _check_format(trajectory_format)
        if retain not in ("all", "window"):
            raise InvalidConfig(f"retain is {retain!r}; expected 'all' or 'window'")
        self._retain_window = retain == "window"
        self._optional = dict(optional or {})
        check_optional(self._optional)
        self._torch = _torch(arrays)
        self.arrays = "numpy" if self._torch is None else "torch"
        self.read_only, self._cached = read_only, cached
        if (auto_save or read_only) and not os.fspath(auto_save_path):
            raise InvalidConfig("auto_save and read_only need auto_save_path: the directory of the trajectories")
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._pool = BlockPool()
        self._window: Window | None = None
        self._gatherer: Gatherer | None = None
        self._store: Store | None = None
        self._writer: Writer | None = None
        self._closed = False
        self._next_id = self._added = self._evicted = 0
        self._segments: dict[int, Segment] = {}
        self._texts = Texts([])
        self._content_floor = 0  # below it nothing of the store belongs to what is saved
        self._generator = keyed_random(self.seed, self.rank)
        if auto_save or read_only:
            self._open_store(Path(auto_save_path) / f"rank_{rank}")
        _close_at_exit(self)

    # --- the store ------------------------------------------------------------------------------------

    def _open_store(self, directory: Path) -> None:
        self._store = store = Store(directory, read_only=self.read_only, files=self._files)
        try:
            self._texts = Texts(store.texts)
            self._next_id = store.next_id
            self._content_floor = store.floor_id
            if store.layout is not None:
                self._set_layout(store.layout)
            space = None if self._window is None else self._window.space
            listing, segments = store.load(space)
            self._segments.update(segments)
            if not self.read_only:
                kept = int(listing.bytes(store.layout).sum()) if store.layout is not None else 0
                self._writer = Writer(
                    store,
                    self._segments,
                    self._changed,
                    self._on_durable,
                    self._texts.known,
                    self._limits.bytes or kept,
                    self._segment_bytes,
                )
                self._writer.start(listing, space)
            if self._window is not None:
                with self._changed:
                    self._fill_window(listing.chosen(np.flatnonzero(listing.rows["id"] >= store.floor_id)))
        except BaseException:
            if self._writer is not None:
                with self._changed:
                    self._writer.stop()
                self._writer.join()
            store.close(clean=False)
            raise

    def _fill_window(self, listing: Listing) -> None:
        """Show the newest of trajectories that are in files: their segments are mapped."""
        window = self._window
        assert window is not None
        newest = listing.chosen(np.arange(len(listing))[self._first_within(listing) :])
        for number in np.unique(newest.rows["segment"]).tolist():
            try:
                map_segment(self._segments[number], window.space, self._files or FileOps())
            except MissingFile:
                if not self.read_only:
                    raise
                # Its files were there a moment ago: who writes has let go of them.
                newest = newest.chosen(np.flatnonzero(newest.rows["segment"] != number))
        window.append(_absolute(newest, self._segments), pending=False)
        for name, table in (("step", window.space.steps), ("observation", window.space.observations)):
            for row in window.index.listing().rows[max(len(newest) - self._cached, 0) :] if self._cached else ():
                rows = int(row["steps"] * row["envs"]) if name == "step" else int(row["observations"])
                table.populate(int(row[f"first_{name}"]), rows)

    def _first_within(self, listing: Listing) -> int:
        """The position of the oldest trajectory that the limits leave in."""
        if not len(listing):
            return 0
        assert self._window is not None
        first = max(len(listing) - self._limits.trajectories, 0) if self._limits.trajectories else 0
        sums = (
            (listing.rows["transitions"], self._limits.transitions),
            (listing.bytes(self._window.space.layout), self._limits.bytes),
        )
        for sizes, limit in sums:
            if limit is not None:
                newest_first = np.cumsum(sizes[::-1])
                first = max(first, len(listing) - max(int(np.searchsorted(newest_first, limit, side="right")), 1))
        return first

    def _on_durable(self, jobs: list[Job], places: list[tuple[int, SegmentRows]], sealed: list[Segment]) -> None:
        assert self._window is not None
        self._window.made_durable([job.id for job in jobs], places)
        for segment in sealed:
            self._window.sealed(segment)
        self._retain()

    def _retain(self) -> None:
        """Tell the writer what need not be kept on disk."""
        limits = self._limits
        if self._writer is None or self._window is None:
            return
        if self._retain_window or limits.transitions is not None or limits.bytes is not None:
            ids = self._window.index.rows["id"]
            self._writer.retain(int(ids[0]) if len(ids) else self._next_id)

    # --- adding ---------------------------------------------------------------------------------------

    def add_trajectories(
        self, trajectories: Sequence[Trajectory | Mapping[str, Any]], *, durable: bool = False
    ) -> list[int]:
        """Add all of them or none; their ids, which only grow. `durable` waits until they are on disk.

        InvalidTrajectory says what does not fit; a buffer whose writing failed raises that error. With `auto_save` a
        call waits while `max_pending_bytes` wait to be written.
        """
        self._check_usable(writing=True)
        if durable and self._writer is None:
            raise InvalidInput("durable=True needs auto_save: this buffer has no directory")
        if isinstance(trajectories, (Trajectory, Mapping)) or not isinstance(trajectories, Sequence):
            raise InvalidTrajectory(f"a {type(trajectories).__name__} was handed in; expected a list of trajectories")
        found = [_aligned(k, trajectory, len(trajectories)) for k, trajectory in enumerate(trajectories)]
        if not found:
            return []
        ids = self._store_all(*self._prepare(found))
        if durable:
            self._wait_durable(ids[-1])
        return ids

    def _prepare(self, found: list[Aligned]) -> tuple[Window, list[Prepared]]:
        with self._changed:
            self._check_usable(writing=True)
            layout = None if self._window is None else self._window.space.layout
        # The first one decides, and only once all of the call are known to fit does it.
        schema = schema_of(found[0], self._optional) if layout is None else layout.schema
        fits = []
        for k, one in enumerate(found):
            try:
                fits.append(fitted(one, schema, self._optional))
            except InvalidTrajectory as error:
                raise _numbered(error, k, len(found)) from None
        layout = layout or Layout(schema)
        prepared = [prepare(one, leaves, layout, self._encode_texts) for one, leaves in zip(found, fits, strict=True)]
        self._check_size(prepared, layout)
        with self._changed:
            window = self._window or self._set_layout(layout)
            if window.space.layout.schema != schema:
                raise InvalidTrajectory(
                    "another thread added the first trajectory meanwhile, and its fields are others; add this one again"
                )
        return window, prepared

    def _encode_texts(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with self._changed:
            return self._texts.encode(values)

    def _check_size(self, prepared: list[Prepared], layout: Layout) -> None:
        for k, one in enumerate(prepared):
            size = one.rows * layout.step_bytes + one.observations * layout.observation_bytes
            if self._limits.bytes is not None and size > self._limits.bytes:
                problem = f"it takes {size} bytes; max_bytes is {self._limits.bytes}"
            elif self._limits.transitions is not None and one.transitions > self._limits.transitions:
                problem = f"it has {one.transitions} transitions; max_transitions is {self._limits.transitions}"
            else:
                continue
            raise _numbered(InvalidTrajectory(f"a trajectory does not fit: {problem}"), k, len(prepared))

    def _set_layout(self, layout: Layout, space: Space | None = None) -> Window:
        space = space or Space(layout)
        self._window = Window(space, self._limits, self._cached, self._segments)
        self._gatherer = Gatherer(layout, self._pool, self._torch)
        if self._writer is not None:
            self._writer.set_space(space)
        return self._window

    def _store_all(self, window: Window, prepared: list[Prepared]) -> list[int]:
        layout = window.space.layout
        sizes = [one.rows * layout.step_bytes + one.observations * layout.observation_bytes for one in prepared]
        with self._changed:
            self._wait_for_writer(sum(sizes))
            places: list[tuple[int, int]] = []
            try:
                self._check_same(window)
                places.extend(window.take_rows(one.rows, one.observations) for one in prepared)
            except BaseException:
                self._give_back(window, prepared, places, sizes)
                raise
        try:
            for one, place in zip(prepared, places, strict=True):
                write(one, window.space, *place)
        except BaseException:
            with self._changed:
                self._give_back(window, prepared, places, sizes)
            raise
        with self._changed:
            try:
                self._check_usable(writing=True)
                self._check_same(window)
                weights = [self._texts.code(one.model_weights_id) for one in prepared]
            except BaseException:
                self._give_back(window, prepared, places, sizes)
                raise
            return self._commit(window, prepared, places, sizes, weights)

    def _check_same(self, window: Window) -> None:
        if self._window is not window:
            raise InvalidTrajectory("a checkpoint was loaded meanwhile; add the trajectories again")

    def _give_back(
        self, window: Window, prepared: list[Prepared], places: list[tuple[int, int]], sizes: list[int]
    ) -> None:
        if self._writer is not None:
            self._writer.pending_bytes -= sum(sizes)
            self._changed.notify_all()
        for one, (first_step, first_observation) in zip(prepared, places, strict=False):
            window.give_back_rows(first_step, one.rows, first_observation, one.observations)

    def _commit(
        self,
        window: Window,
        prepared: list[Prepared],
        places: list[tuple[int, int]],
        sizes: list[int],
        weights: list[int],
    ) -> list[int]:
        now = time.time()
        jobs = [
            # Without the arrays of the caller, which it may want to be rid of.
            Job(self._next_id + k, one._replace(leaves={}), code, now, *place, size)
            for k, (one, place, size, code) in enumerate(zip(prepared, places, sizes, weights, strict=True))
        ]
        listing = Listing.joined(
            [listing_of(job, IN_MEMORY, SegmentRows(job.first_step, job.first_observation), 0) for job in jobs]
        )
        self._next_id += len(jobs)
        self._added += len(jobs)
        if self._writer is not None:
            self._writer.submit(jobs)
        window.append(listing, pending=self._writer is not None)
        self._retain()
        self._changed.notify_all()
        return [job.id for job in jobs]

    def _wait_for_writer(self, size: int) -> None:
        """Until there is room for more to be written; what is larger than all room goes alone."""
        writer = self._writer
        if writer is None:
            return
        while writer.pending_bytes and writer.pending_bytes + size > self._max_pending_bytes and writer.error is None:
            self._changed.wait()
            self._check_usable(writing=True)
        self._raise_write_error()
        writer.pending_bytes += size

    # --- durability -----------------------------------------------------------------------------------

    @property
    def durable_id(self) -> int:
        """The last id that is on disk; -1 if there is none."""
        self._check_usable()
        return -1 if self._writer is None else self._writer.durable_id

    def flush(self) -> None:
        """Wait until everything that was added is on disk."""
        self._check_usable()
        with self._changed:
            last = self._next_id - 1
        self._wait_durable(last)

    def _wait_durable(self, last: int) -> None:
        writer = self._writer
        if writer is None:
            return
        with self._changed:
            while writer.error is None and ((writer.durable_id < last and writer.pending_bytes) or writer.floor_waits):
                self._changed.wait()
        self._raise_write_error()

    def _raise_write_error(self) -> None:
        error = None if self._writer is None else self._writer.error
        if error is not None:
            raise StorageError(
                f"trajectories can no longer be written: {error}. What was added can still be sampled; make room, and "
                "open the directory again"
            ) from error

    # --- sampling -------------------------------------------------------------------------------------

    def sample(self, num_chunks: int, *, replace: bool = True, sequence_length: int | None = None) -> dict[str, Any]:
        """Exactly `num_chunks` steps of the window, uniformly, in draw order, as a nested dict of `[num_chunks, ...]`.

        `trajectory_id`, `step`, `env` and `age` (trajectories added since) say which they are. `replace=False`: no step
        twice in one call. `sequence_length=L`: `[num_chunks, L, ...]`, uniform over starts with L continuing steps.
        InvalidInput says what is there if that is not enough.
        """
        self._check_usable()
        count, length = _check_draw(num_chunks, sequence_length)
        with self._changed:
            window, gatherer = self._drawable(count)
            drawn = window.index.draw(count, length, replace, self._generator)
            pin = window.pins.pin()
        try:
            rows = drawn.rows(length)
            batch = gatherer.batch(len(rows.row))
            gatherer.fill(batch, 0, rows, window.space)
        finally:
            with self._changed:
                window.pins.unpin(pin)
        return gatherer.finish(batch, self._texts.known, (count,) if length is None else (count, length))

    def gatherer(self) -> Gatherer:
        """What makes batches of these fields; InvalidInput as long as they are not known."""
        self._check_usable()
        return self._drawable(0)[1]

    def texts(self) -> list[str]:
        """All texts that were ever stored, by code."""
        return self._texts.known

    def fill_batch(self, gatherer: Gatherer, batch: Batch, start: int, count: int, *, first_text: int = 0) -> None:
        """Draw steps into rows of a batch that was made for the same fields; texts are counted from `first_text`."""
        self._check_usable()
        with self._changed:
            window, _ = self._drawable(count)
            drawn = window.index.draw(count, None, True, self._generator)
            pin = window.pins.pin()
        try:
            rows = drawn.rows(None)
            gatherer.fill(batch, start, rows._replace(texts=rows.texts + first_text), window.space)
        finally:
            with self._changed:
                window.pins.unpin(pin)

    def _drawable(self, count: int) -> tuple[Window, Gatherer]:
        if self._window is None or self._gatherer is None:
            raise InvalidInput(
                f"{count} transitions were asked for; the buffer is empty: nothing was added yet. wait_ready() waits"
            )
        return self._window, self._gatherer

    # --- what is there --------------------------------------------------------------------------------

    @property
    def schema(self) -> Schema | None:
        """The fields of the trajectories; None until the first one fixes them."""
        return None if self._window is None else self._window.space.layout.schema

    def __len__(self) -> int:
        """Trajectories in the window."""
        self._check_usable()
        return 0 if self._window is None else len(self._window.index)

    @property
    def num_transitions(self) -> int:
        """Transitions in the window that can be drawn."""
        self._check_usable()
        return 0 if self._window is None else self._window.index.transitions

    def is_ready(self, num_trajectories: int) -> bool:
        """Whether the window has so many trajectories."""
        return len(self) >= num_trajectories

    def wait_ready(self, min_transitions: int = 1, timeout_s: float | None = None) -> None:
        """Wait until so many transitions can be drawn; WaitTimeout says how many there are."""
        self._check_usable()
        wanted = whole_number("min_transitions", min_transitions, least=0)
        most = self._limits.transitions
        if most is not None and wanted > most:
            raise InvalidConfig(f"{wanted} transitions were waited for; max_transitions is {most}: it would never end")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while self.num_transitions < wanted:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise WaitTimeout(
                        f"{wanted} transitions to draw",
                        timeout_s or 0.0,
                        f"the window has {len(self)} trajectories with {self.num_transitions} transitions; "
                        f"{self._added} trajectories were added so far",
                    )
                self._changed.wait(left)
                self._check_usable()

    def trajectory(self, trajectory_id: int) -> Trajectory:
        """One trajectory of the window, as numpy arrays `[T, B, ...]`."""
        self._check_usable()
        with self._changed:
            window = self._window
            ids = np.empty(0, np.int64) if window is None else window.index.rows["id"]
            k = int(np.searchsorted(ids, trajectory_id))
            if window is None or k == len(ids) or ids[k] != trajectory_id:
                there = f"{ids[0]} to {ids[-1]}" if len(ids) else "no trajectory"
                raise InvalidInput(f"trajectory {trajectory_id!r} is not in the window, which has {there}")
            row = window.index.rows[k].copy()
            pin = window.pins.pin()
        try:
            return read_trajectory(window.space, row, self._texts.known)
        finally:
            with self._changed:
                window.pins.unpin(pin)

    def get_stats(self) -> dict[str, int | float]:
        """Figures of the window and of what went through it; touches no content."""
        self._check_usable()
        with self._changed:
            window, writer = self._window, self._writer
            rows = None if window is None else window.index.rows
            rewards = 0.0 if rows is None else float(rows["reward"].sum())
            added_at = time.time() if rows is None or not len(rows) else float(rows["added_at"][0])
            transitions, trajectories = self.num_transitions, len(self)
            disk = [segment for number, segment in self._segments.items() if number > 0]
            layout = None if window is None else window.space.layout
            return {
                "trajectories": trajectories,
                "transitions": transitions,
                "live_bytes": 0 if window is None else window.bytes,
                "memory_bytes": 0 if window is None else window.space.memory_bytes,
                "disk_bytes": 0
                if layout is None
                else sum(
                    segment.rows.steps * layout.step_bytes + segment.rows.observations * layout.observation_bytes
                    for segment in disk
                ),
                "disk_segments": len(disk),
                "added_total": self._added,
                "evicted_total": self._evicted + (0 if window is None else window.evicted),
                "reward_sum": rewards,
                "reward_mean": rewards / transitions if transitions else 0.0,
                "age_max": max(trajectories - 1, 0),
                "age_mean": max(trajectories - 1, 0) / 2,
                "age_max_s": max(time.time() - added_at, 0.0),
                "pending_bytes": 0 if writer is None else writer.pending_bytes,
                "durable_id": -1 if writer is None else writer.durable_id,
                "next_id": self._next_id,
                "left_out_damaged": 0 if self._store is None else self._store.left_out,
            }

    # --- checkpoints ----------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: str | os.PathLike[str], *, parts: Mapping[str, TrajectoryReplayBuffer] | None = None
    ) -> None:
        """Save everything that is kept to `path`/rank_<rank>, all of it or nothing; also while others add and sample.

        `parts` are other buffers (of demonstrations, say) that belong to the same checkpoint, by name. With
        `trajectory_format="pt"` it is written to `path` itself, as RLinf reads it.
        """
        buffers = self._with_parts(parts)
        if self.trajectory_format == "pt":
            if parts:
                raise InvalidInput("RLinf's format has no parts; save each buffer to a directory of its own")
            self._export(Path(path))
            return
        with ExitStack() as stack:
            sources = {name: stack.enter_context(buffer._to_save()) for name, buffer in buffers.items()}
            write_checkpoint(Path(path) / f"rank_{self.rank}", sources, files=self._files)

    def _with_parts(self, parts: Mapping[str, TrajectoryReplayBuffer] | None) -> dict[str, TrajectoryReplayBuffer]:
        buffers = {MAIN: self, **(parts or {})}
        if MAIN in (parts or {}) or len(set(map(id, buffers.values()))) < len(buffers):
            raise InvalidInput(f"parts are {', '.join(parts or {})}; expected other buffers, and no part {MAIN!r}")
        return buffers

    @contextmanager
    def _to_save(self) -> Iterator[PartSource]:
        """What is kept, held still: rows are not used again, and files not removed, until this ends."""
        self._check_usable()
        self.flush()
        writer = self._writer
        with self._changed:
            if writer is not None:
                writer.holds += 1
        window, pin = None, -1
        try:
            with self._changed:
                while writer is not None and writer.removing and writer.error is None:
                    self._changed.wait()
                window = self._window
                segments = dict(self._segments)
                listing = Listing.empty()
                if window is not None:
                    pin = window.pins.pin()
                    listing = _relative(window.index.listing(), segments, window.space.layout)
                random, next_id, floor_id = random_state(self._generator), self._next_id, self._content_floor
            if self._store is not None and writer is not None:
                # What is older than the window is durable, or about to be. The catalogue is read without the lock:
                # nothing that it lists now goes away.
                self._wait_durable(int(listing.rows["id"][0]) - 1 if len(listing) else next_id - 1)
                durable = self._store.committed()
                ids = durable.rows["id"]
                with self._changed:
                    segments.update(self._segments)
                    durable = durable.chosen(np.flatnonzero((ids >= floor_id) & (ids < next_id)))
                    listing = _with_older(listing, _unsealed_as_memory(durable, segments))
            yield PartSource(
                None if window is None else window.space.layout,
                list(self._texts.known),
                listing,
                segments,
                None if window is None else window.space,
                next_id,
                self.seed,
                self.rank,
                random,
            )
        finally:
            with self._changed:
                if window is not None and pin >= 0:
                    window.pins.unpin(pin)
                if writer is not None:
                    writer.holds -= 1
                    self._changed.notify_all()

    def _export(self, path: Path) -> None:
        with self._changed:
            ids = [] if self._window is None else self._window.index.rows["id"].tolist()
        export_rlinf(path, ((number, self.trajectory(number)) for number in ids), seed=self.seed)

    def load_checkpoint(
        self,
        load_path: str | os.PathLike[str],
        is_distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        *,
        verify: bool = True,
        parts: Mapping[str, TrajectoryReplayBuffer] | None = None,
    ) -> None:
        """Replace what is sampled by a checkpoint (or by what a store holds); files are mapped where they are.

        All of it, or the share of `local_rank` out of `world_size`, whatever the number of ranks that wrote it. With
        `verify=False` rows are not read and checked first. The buffer is unchanged if anything is wrong.
        """
        buffers = self._with_parts(parts)
        shard = Shard.of(is_distributed, local_rank, world_size)
        for buffer in buffers.values():
            buffer._check_usable(writing=True)
        if find_rlinf(Path(load_path)):
            if parts:
                raise InvalidInput("RLinf's format has no parts; load each buffer from a directory of its own")
            self._import(Path(load_path), shard)
            return
        with ExitStack() as stack:
            found = [
                (buffer, *stack.enter_context(buffer._to_load(load_path, name, shard, verify)))
                for name, buffer in buffers.items()
            ]
            for buffer, taken, space, random in found:
                buffer._become(taken, space, random)

    @contextmanager
    def _to_load(
        self, path: str | os.PathLike[str], part: str, shard: Shard, verify: bool
    ) -> Iterator[tuple[Taken, Space | None, np.random.Generator]]:
        """What is to be taken over, mapped and found whole; let go again unless it was taken over."""
        self.flush()
        for tries_left in reversed(range(5)):
            try:
                taken, space, random = self._find(path, part, shard, verify)
                break
            except MissingFile:
                if not tries_left:
                    raise
                # It was there when the manifest was read: two saves since then took it away.
        try:
            yield taken, space, random
        finally:
            with self._changed:
                for number, segment in taken.segments.items():
                    if not segment.in_window and space is not None:
                        self._segments.pop(number, None)
                        if self._window is not None and self._window.space is space:
                            self._window.sealed(segment)  # it may have been in the window for a moment
                        else:
                            segment.unmap(space)

    def _find(
        self, path: str | os.PathLike[str], part: str, shard: Shard, verify: bool
    ) -> tuple[Taken, Space | None, np.random.Generator]:
        files = self._files or FileOps()
        taken = take(Path(path), part, shard, files)
        random = restored_random(taken.random, self.seed, shard, taken.next_id, rank=self.rank)
        with self._changed:
            # Numbers that no other checkpoint of this buffer has.
            taken = taken.renumbered(min(self._segments, default=0))
            space = None if self._window is None else self._window.space
            if taken.layout is not None and (space is None or space.layout.schema != taken.layout.schema):
                if self._writer is not None and space is not None:
                    raise InvalidInput(
                        f"the trajectories of {path} have other fields than those of this store; load them into a "
                        "buffer with another auto_save_path"
                    )
                space = Space(taken.layout)
        if space is not None:
            map_taken(taken, space, files, verify=verify, lock=self._changed)
        return taken, space, random

    def _become(self, taken: Taken, space: Space | None, random: np.random.Generator) -> None:
        with self._changed:
            self._check_usable(writing=True)
            if self._writer is not None and self._window is not None and self._window.space is not space:
                # What waits to be written has its rows in the other space.
                raise InvalidInput("the first trajectory was added while a checkpoint was loaded; load it again")
            self._next_id = self._content_floor = max(self._next_id, taken.next_id)
            self._generator = random
            if self._window is not None:
                self._window.clear()
            if taken.layout is not None and space is not None:
                if self._window is None or self._window.space is not space:
                    self._evicted += 0 if self._window is None else self._window.evicted
                    self._set_layout(taken.layout, space)
                start = self._texts.extend(taken.texts)
                self._segments.update(taken.segments)
                rows = taken.listing.rows
                self._fill_window(taken.listing.with_rows(weights=rows["weights"] + start, texts=rows["texts"] + start))
            self._retain()
            self._changed.notify_all()

    def _import(self, path: Path, shard: Shard) -> None:
        found = [trajectory for _, trajectory in open_rlinf(path)]
        mine = found[block(len(found), shard)]
        ids = self.add_trajectories(mine)
        with self._changed:
            self._content_floor = ids[0] if ids else self._next_id
            while self._window is not None and len(self._window.index):
                if self._window.index.rows["id"][0] >= self._content_floor:
                    break
                self._window.evict_oldest()
            self._retain()
            self._changed.notify_all()

    # --- the end --------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Empty the window. Ids go on. What is on disk stays there, but is not sampled when it is opened again."""
        with self._changed:
            self._check_usable(writing=True)
            self._raise_write_error()
            if self._window is not None:
                self._window.clear()
            self._content_floor = self._next_id
            if self._writer is not None:
                self._writer.set_floor(self._next_id)
            self._retain()
            self._changed.notify_all()

    def clear_cache(self) -> None:
        """Read everything that is durable from its file from now on; loses nothing."""
        self._check_usable()
        with self._changed:
            if self._window is not None:
                self._window.drop_resident()

    def close(self) -> None:
        """Write what waits, and end. Everything but `close` raises BufferClosed afterwards."""
        if self._pid != os.getpid():
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            writer = self._writer
            if writer is not None:
                writer.stop()
            self._changed.notify_all()
        if writer is not None:
            writer.join()
        if self._store is not None:
            self._store.close(clean=writer is not None and writer.error is None)
        self._raise_write_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self, *, writing: bool = False) -> None:
        if self._pid != os.getpid():
            raise BufferClosed(
                f"this buffer belongs to process {self._pid} and was used after a fork; build one in this process "
                "(with read_only=True for a directory that is written elsewhere)"
            )
        if self._closed:
            raise BufferClosed("the trajectory buffer was closed")
        if writing and self.read_only:
            raise InvalidInput("this buffer was opened with read_only=True; nothing can be changed in it")

    def _check(self) -> None:
        """Every invariant of the parts."""
        with self._changed:
            if self._window is not None:
                self._window._check()


# --- arguments ----------------------------------------------------------------------------------------


def _limit(name: str, value: int | None) -> int | None:
    return None if value is None else whole_number(name, value, least=1)


def _check_format(name: str) -> str:
    if name == "pkl":
        raise InvalidConfig("trajectory_format 'pkl' is refused: reading a pickle can run code. Use 'native' or 'pt'")
    if name not in ("native", "pt"):
        raise InvalidConfig(f"trajectory_format is {name!r}; expected 'native' or 'pt'")
    return name


def _torch(arrays: str | None) -> Any | None:
    if arrays not in (None, "torch", "numpy"):
        raise InvalidConfig(f"arrays is {arrays!r}; expected 'torch', 'numpy' or None")
    if arrays == "numpy" or (arrays is None and importlib.util.find_spec("torch") is None):
        return None
    try:
        import torch
    except ImportError:
        raise InvalidConfig("arrays='torch' needs torch: pip install 'forebay[torch]'") from None
    return torch


def _check_draw(num_chunks: int, sequence_length: int | None) -> tuple[int, int | None]:
    count = whole_number("num_chunks", num_chunks, least=1)
    if sequence_length is None:
        return count, None
    return count, whole_number("sequence_length", sequence_length, least=1)


def _aligned(k: int, trajectory: Trajectory | Mapping[str, Any], count: int) -> Aligned:
    try:
        return aligned(trajectory)
    except InvalidTrajectory as error:
        raise _numbered(error, k, count) from None


def _numbered(error: InvalidTrajectory, k: int, count: int) -> InvalidTrajectory:
    return error if count == 1 else InvalidTrajectory(f"trajectory {k} of {count}: {error}")


def _absolute(listing: Listing, segments: Mapping[int, Segment]) -> Listing:
    """The same with rows counted from where their segments are mapped."""
    numbers = listing.rows["segment"].tolist()
    return listing.with_rows(
        first_step=listing.rows["first_step"] + [segments[number].first_step for number in numbers],
        first_observation=listing.rows["first_observation"] + [segments[n].first_observation for n in numbers],
    )


def _relative(listing: Listing, segments: Mapping[int, Segment], layout: Layout) -> Listing:
    """The same with rows counted inside their segments.

    What is in a segment that still grows, or whose files were removed by who owns them, counts as memory.
    """
    rows = listing.rows.copy()
    for number in np.unique(rows["segment"]).tolist():
        theirs = listing.rows["segment"] == number
        if number == IN_MEMORY:
            continue
        if not segments[number].sealed or not segments[number].has_files(layout):
            rows["segment"][theirs] = IN_MEMORY
            continue
        rows["first_step"][theirs] -= segments[number].first_step
        rows["first_observation"][theirs] -= segments[number].first_observation
    return Listing(rows, listing.runs, listing.chains)


def _unsealed_as_memory(listing: Listing, segments: Mapping[int, Segment]) -> Listing:
    """What a catalogue lists, as far as it is there; rows of a segment that still grows by where it is mapped."""
    rows = listing.rows.copy()
    keep = np.zeros(len(rows), bool)
    for number in np.unique(rows["segment"]).tolist():
        segment = segments.get(number)
        if segment is None:
            continue
        theirs = listing.rows["segment"] == number
        keep |= (
            theirs
            & (rows["first_step"] + rows["steps"] * rows["envs"] <= segment.rows.steps)
            & (rows["first_observation"] + rows["observations"] <= segment.rows.observations)
        )
        if not segment.sealed:
            rows["segment"][theirs] = IN_MEMORY
            rows["first_step"][theirs] += segment.first_step
            rows["first_observation"][theirs] += segment.first_observation
    return Listing(rows, listing.runs, listing.chains).chosen(np.flatnonzero(keep))


def _with_older(window: Listing, durable: Listing) -> Listing:
    """Both, by id; what is durable is taken from where that is."""
    only = window.chosen(np.flatnonzero(~np.isin(window.rows["id"], durable.rows["id"])))
    both = Listing.joined([only, durable])
    return both.chosen(np.argsort(both.rows["id"], kind="stable"))


def _close_at_exit(buffer: TrajectoryReplayBuffer) -> None:
    """What waits to be written when the interpreter ends is still written."""
    reference = weakref.ref(buffer)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close()

    atexit.register(close)
    weakref.finalize(buffer, atexit.unregister, close).atexit = False
