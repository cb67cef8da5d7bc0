"""Saving and loading a buffer: what is held still while it is written, and what replaces what when it is loaded.

A save pins the window and keeps files from being removed; a load changes nothing before all that it brings was mapped
and found whole. What a checkpoint looks like is in `checkpoint`, which trajectories a rank gets in `restore`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from forebay.checkpoint.files import FileOps
from forebay.errors import CheckpointError, InvalidInput, StorageError, StorageVanished
from forebay.trajectory.adding import AddingBuffer
from forebay.trajectory.checkpoint import MAIN, PartSource, write_checkpoint
from forebay.trajectory.listing import Listing
from forebay.trajectory.restore import Shard, Taken, block, map_taken, random_state, restored_random, take
from forebay.trajectory.rlinf import export_rlinf, find_rlinf, open_rlinf
from forebay.trajectory.schema import Layout
from forebay.trajectory.segments import MissingFile, Segment
from forebay.trajectory.space import Space
from forebay.trajectory.store import Store
from forebay.trajectory.window import IN_MEMORY
from forebay.trajectory.writer import Writer, in_memory

__all__ = ["SavingBuffer"]

_log = logging.getLogger(__name__)


class SavingBuffer(AddingBuffer):
    """The part that saves and loads."""

    # --- checkpoints ----------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        parts: Mapping[str, SavingBuffer] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Save everything that is kept to `path`/rank_<rank>, all of it or nothing; also while others add and sample.

        It needs no room in the store: what is not on disk yet is written from memory, also after an error of the disk.

        `parts` are other buffers (of demonstrations, say) that belong to the same checkpoint, by name; `extra` is plain
        JSON that `load_checkpoint` returns. With `trajectory_format="pt"` it is written to `path` itself, as RLinf
        reads it.
        """
        buffers = self._with_parts(parts)
        if self.trajectory_format == "pt":
            if parts or extra:
                raise InvalidInput(
                    "RLinf's format has no parts and no extra; save each buffer to a directory of its own"
                )
            self._export(Path(path))
            return
        with ExitStack() as stack:
            sources = {name: stack.enter_context(buffer._to_save()) for name, buffer in buffers.items()}
            write_checkpoint(Path(path) / f"rank_{self.rank}", sources, files=self._files, extra=extra)

    def _with_parts(self, parts: Mapping[str, SavingBuffer] | None) -> dict[str, SavingBuffer]:
        buffers = {MAIN: self, **(parts or {})}
        if MAIN in (parts or {}) or len(set(map(id, buffers.values()))) < len(buffers):
            raise InvalidInput(f"parts are {', '.join(parts or {})}; expected other buffers, and no part {MAIN!r}")
        return buffers

    @contextmanager
    def _to_save(self) -> Iterator[PartSource]:
        """What is kept, held still: rows are not used again, and files not removed, until this ends."""
        writer = self._writer
        with self._changed:
            self._check_usable(saving=True)
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
                random, next_id, floor_id = random_state(self._generator), self._next_id, self._content_floor
                if window is not None:
                    pin = window.pins.pin()
                    listing = _relative(window.index.listing(), segments, window.space.layout)
                if writer is not None:
                    waiting = [in_memory(job) for job in writer.pending if job.id >= floor_id]
                    listing = _with_older(Listing.joined(waiting), listing)
            if writer is not None and self._store is not None and window is not None:
                # What is older than the window was durable then, or waited. The catalogue is read without the lock:
                # nothing that it lists now goes away.
                durable = self._listed(self._store, writer)
                ids = durable.rows["id"]
                with self._changed:
                    segments.update(self._segments)
                    durable = durable.chosen(np.flatnonzero((ids >= floor_id) & (ids < next_id)))
                    listing = _with_older(listing, _as_far_as_there(durable, segments, window.space.layout))
                if missing := np.setdiff1d(durable.rows["id"], listing.rows["id"]).tolist():
                    _log.warning("%d trajectories lost their files and are not saved: %s", len(missing), missing[:20])
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

    def _listed(self, store: Store, writer: Writer) -> Listing:
        """What the store lists; nothing, with a warning, if it may not be this buffer's or cannot be read any more."""
        problem = "the buffer is closed"
        if not self._closed:
            try:
                store.check_in_place()
                return store.committed()
            except StorageError as error:
                if writer.error is None and not isinstance(error, StorageVanished):
                    raise
                problem = str(error)
        _log.warning("only trajectories of the window, and those that are not on disk, are saved: %s", problem)
        return Listing.empty()

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
        parts: Mapping[str, SavingBuffer] | None = None,
    ) -> dict[str, Any]:
        """Replace what is sampled by a checkpoint (or by what a store holds); files are mapped where they are.

        All of it, or the share of `local_rank` out of `world_size`, whatever the number of ranks that wrote it. With
        `verify=False` rows are not read and checked first. The buffer is unchanged if anything is wrong. Returns the
        `extra` of the save.
        """
        buffers = self._with_parts(parts)
        shard = Shard.of(is_distributed, local_rank, world_size)
        for buffer in buffers.values():
            buffer._check_usable(writing=True)
        if find_rlinf(Path(load_path)):
            if parts:
                raise InvalidInput("RLinf's format has no parts; load each buffer from a directory of its own")
            self._import(Path(load_path), shard)
            return {}
        for _ in range(5):
            with ExitStack() as stack:
                found = [
                    (buffer, *stack.enter_context(buffer._to_load(load_path, name, shard, verify)))
                    for name, buffer in buffers.items()
                ]
                if len({taken.generations for _, taken, _, _ in found}) > 1:
                    continue  # a save came in between, and the parts would be of different ones
                for buffer, taken, space, random in found:
                    buffer._become(taken, space, random)
                return found[0][1].extra
        raise CheckpointError(f"{load_path} is saved to faster than it can be loaded; try again")

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


def _relative(listing: Listing, segments: Mapping[int, Segment], layout: Layout) -> Listing:
    """The same with rows counted inside their segments.

    What is in a segment that still grows, or whose files were removed by who owns them, counts as memory; and so does
    what has no checksum yet, which only the catalogue knows.
    """
    rows = listing.rows.copy()
    for number in np.unique(rows["segment"]).tolist():
        theirs = listing.rows["segment"] == number
        if number == IN_MEMORY:
            continue
        linked = theirs & (rows["crc"] != 0)
        if not segments[number].sealed or not segments[number].has_files(layout):
            linked[:] = False
        rows["segment"][theirs & ~linked] = IN_MEMORY
        rows["first_step"][linked] -= segments[number].first_step
        rows["first_observation"][linked] -= segments[number].first_observation
    return Listing(rows, listing.runs, listing.chains)


def _as_far_as_there(listing: Listing, segments: Mapping[int, Segment], layout: Layout) -> Listing:
    """What a catalogue lists, as far as it is there; rows of a segment that still grows by where it is mapped."""
    rows = listing.rows.copy()
    keep = np.zeros(len(rows), bool)
    for number in np.unique(rows["segment"]).tolist():
        segment = segments.get(number)
        if segment is None or (segment.sealed and not segment.has_files(layout)):
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
