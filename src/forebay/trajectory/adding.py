"""Adding trajectories: checked, prepared and copied, and then visible all at once.

Nothing is changed before everything of a call was found to fit. Rows are taken under the lock, written outside of it,
and shown under it again; whatever fails in between gives them back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forebay.errors import InvalidInput, InvalidTrajectory
from forebay.trajectory.base import BufferBase
from forebay.trajectory.data import Aligned, Trajectory, aligned
from forebay.trajectory.listing import Listing
from forebay.trajectory.prepare import Prepared, prepare, write
from forebay.trajectory.schema import Layout, fitted, schema_of
from forebay.trajectory.window import Window
from forebay.trajectory.writer import Job, in_memory

__all__ = ["AddingBuffer"]


class AddingBuffer(BufferBase):
    """The part that adds."""

    # --- adding ---------------------------------------------------------------------------------------

    def add_trajectories(
        self, trajectories: Sequence[Trajectory | Mapping[str, Any]], *, durable: bool = False
    ) -> list[int]:
        """Add all of them or none; their ids, which only grow. `durable` waits until they are on disk.

        InvalidTrajectory says what does not fit. With `auto_save` a call waits while `max_pending_bytes` wait to be
        written. After an error of the disk nothing is added until `flush` succeeds. If `durable` meets such an error
        the trajectories are in the buffer, as the message says: do not add them again.
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

    def _wait_durable(self, last: int) -> None:
        writer = self._writer
        assert writer is not None
        with self._changed:
            while writer.error is None and writer.durable_id < last:
                self._changed.wait()
            if writer.durable_id < last:
                self._raise_write_error()

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
            if window.space.layout.schema is not schema and window.space.layout.schema != schema:
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
        now, writer = time.time(), self._writer
        jobs = [
            # What waits goes without the arrays of the caller, which it may want to be rid of.
            Job(self._next_id + k, one if writer is None else one._replace(leaves={}), code, now, *place, size)
            for k, (one, place, size, code) in enumerate(zip(prepared, places, sizes, weights, strict=True))
        ]
        listing = Listing.joined([in_memory(job) for job in jobs])
        self._next_id += len(jobs)
        self._added += len(jobs)
        if writer is not None:
            writer.submit(jobs)
        window.append(listing, sum(sizes), pending=writer is not None)
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


def _aligned(k: int, trajectory: Trajectory | Mapping[str, Any], count: int) -> Aligned:
    try:
        return aligned(trajectory)
    except InvalidTrajectory as error:
        raise _numbered(error, k, count) from None


def _numbered(error: InvalidTrajectory, k: int, count: int) -> InvalidTrajectory:
    return error if count == 1 else InvalidTrajectory(f"trajectory {k} of {count}: {error}")
