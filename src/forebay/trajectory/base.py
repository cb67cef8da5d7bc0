"""What every part of a trajectory buffer stands on: the window, the store and its writer, the lock, and the end.

Everything that threads share is changed under one condition, `_changed`, which is notified whenever anything that
somebody may wait for has happened. Opening, durability and closing are here; adding, saving and drawing build on it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from forebay.checkpoint.files import FileOps
from forebay.core.validate import checked_integer
from forebay.errors import BufferClosed, ForebayError, InvalidConfig, InvalidInput, StorageError, StorageVanished
from forebay.trajectory.data import Trajectory
from forebay.trajectory.gather import Gatherer
from forebay.trajectory.listing import Listing, SegmentRows
from forebay.trajectory.pool import BlockPool
from forebay.trajectory.readback import read_trajectory
from forebay.trajectory.restore import keyed_random
from forebay.trajectory.schema import Layout, check_optional
from forebay.trajectory.segments import MissingFile, Segment
from forebay.trajectory.space import Space
from forebay.trajectory.store import Store, map_segment
from forebay.trajectory.texts import Texts
from forebay.trajectory.window import Limits, Window
from forebay.trajectory.writer import Job, Writer

__all__ = ["BufferBase"]

_log = logging.getLogger(__name__)

_PENDING_BYTES = 256 * 2**20


class BufferBase:
    """See `TrajectoryReplayBuffer`."""

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
        self.seed, self.rank = checked_integer("seed", seed, least=0), checked_integer("rank", rank, least=0)
        if self.seed >= 2**64 or self.rank >= 2**64:
            raise InvalidConfig(f"seed is {seed} and rank is {rank}; expected at most {2**64 - 1}")
        window = checked_integer("sample_window_size", sample_window_size, least=0)
        cached = checked_integer("cache_size", cache_size, least=0) if enable_cache else 0
        self._limits = Limits(window, _limit("max_transitions", max_transitions), _limit("max_bytes", max_bytes))
        self._max_pending_bytes = checked_integer("max_pending_bytes", max_pending_bytes, least=1)
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
        # What waits is written also if nobody closes the buffer: when it is dropped, or when the interpreter ends.
        self._dropped = weakref.finalize(self, _end_dropped, self._pid, self._changed, self._writer, store)

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
        size = int(newest.bytes(window.space.layout).sum())
        window.append(_absolute(newest, self._segments), size, pending=False)
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

    def _set_layout(self, layout: Layout, space: Space | None = None) -> Window:
        space = space or Space(layout)
        self._window = Window(space, self._limits, self._cached, self._segments)
        self._gatherer = Gatherer(layout, self._pool, self._torch)
        if self._writer is not None:
            self._writer.set_space(space)
        return self._window

    # --- durability -----------------------------------------------------------------------------------

    @property
    def durable_id(self) -> int:
        """The last id that is on disk; -1 if there is none."""
        self._check_usable()
        if self._writer is None:
            return -1 if self._store is None else self._store.next_id - 1
        return self._writer.durable_id

    def flush(self) -> None:
        """Wait until everything that was added is on disk; after an error, try again."""
        with self._changed:
            self._check_usable()
            writer = self._writer
            if writer is None:
                return
            wanted = writer.ask()
            while writer.rounds < wanted:
                self._changed.wait()
            self._raise_write_error()

    def _raise_write_error(self) -> None:
        writer = self._writer
        if writer is None or writer.error is None:
            return
        raise _write_error(writer.error, [job.id for job in writer.pending], closed=self._closed) from writer.error

    # --- what is there ---

    def trajectory(self, trajectory_id: int) -> Trajectory:
        """One trajectory of the window, as numpy arrays `[T, B, ...]`."""
        self._check_usable(saving=True)
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
        """Write what waits, and end. Everything but `close` raises BufferClosed afterwards.

        If not everything can be written, `save_checkpoint` and `trajectory` still work: memory has the only copy.
        """
        if self._pid != os.getpid():
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._store is not None:
            self._dropped.detach()
            _end(self._changed, self._writer, self._store)
        self._raise_write_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self, *, writing: bool = False, saving: bool = False) -> None:
        if self._pid != os.getpid():
            raise BufferClosed(
                f"this buffer belongs to process {self._pid} and was used after a fork; build one in this process "
                "(with read_only=True for a directory that is written elsewhere)"
            )
        if self._closed and not (saving and self._writer is not None and self._writer.error is not None):
            raise BufferClosed("the trajectory buffer was closed")
        if writing and self.read_only:
            raise InvalidInput("this buffer was opened with read_only=True; nothing can be changed in it")

    def _check(self) -> None:
        """Every invariant of the parts."""
        with self._changed:
            if self._window is not None:
                self._window._check()


# --- arguments ---


def _limit(name: str, value: int | None) -> int | None:
    return None if value is None else checked_integer(name, value, least=1)


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


# --- the end ---


def _write_error(error: ForebayError, pending: Sequence[int], *, closed: bool) -> StorageError:
    """What a caller is told who writes after an error: what failed, what is not on disk, what to do."""
    vanished = isinstance(error, StorageVanished)
    kept = f"Only memory has {_named(pending)}: do not add them again" if pending else "No trajectory waits"
    retry = "" if closed else f"{'Put the files back' if vanished else 'Make room'} and call flush(); or "
    save = f"{'C' if closed else 'c'}all save_checkpoint() with another directory, which saves what is in memory"
    message = f"trajectories cannot be written: {error}. {kept}. {retry}{save}"
    return (StorageVanished if vanished else StorageError)(message)


def _named(ids: Sequence[int]) -> str:
    return f"trajectory {ids[0]}" if len(ids) == 1 else f"trajectories {ids[0]} to {ids[-1]}"


def _end(changed: threading.Condition, writer: Writer | None, store: Store) -> None:
    """Write what waits and let others write; the writer has the error if there is one."""
    if writer is not None:
        with changed:
            writer.stop()
        writer.join()
    store.close(clean=writer is not None and writer.error is None)


def _end_dropped(pid: int, changed: threading.Condition, writer: Writer | None, store: Store) -> None:
    """End what a buffer leaves that was dropped without being closed. Runs wherever the last reference ends."""
    if pid != os.getpid():
        return
    if writer is not None and writer.is_current_thread:  # it held the last reference, for a moment
        threading.Thread(target=_end_dropped, args=(pid, changed, writer, store), daemon=False).start()
        return
    try:
        _end(changed, writer, store)
        error = None if writer is None else writer.error
    except StorageError as raised:
        error = raised
    if error is not None:
        lost = "nothing" if writer is None or not writer.pending else _named([job.id for job in writer.pending])
        _log.warning("a trajectory buffer ended without being closed, and lost %s: %s", lost, error)


def _absolute(listing: Listing, segments: Mapping[int, Segment]) -> Listing:
    """The same with rows counted from where their segments are mapped."""
    numbers = listing.rows["segment"].tolist()
    return listing.with_rows(
        first_step=listing.rows["first_step"] + [segments[number].first_step for number in numbers],
        first_observation=listing.rows["first_observation"] + [segments[n].first_observation for n in numbers],
    )
