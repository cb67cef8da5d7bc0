"""TrajectoryReplayBuffer: trajectories go in, random steps of the newest of them come out.

Safe with any number of writing and reading threads: what a sample sees is decided under a lock, the copying is done
outside of it, and no row is used again while a reader may look at it. An add is all or nothing, and what it was given
is copied before it returns. With `auto_save` a thread makes trajectories durable in a native store; a trajectory is
acknowledged when its id is at most `durable_id`.

Draws come from numpy's Philox, keyed by seed and rank; no global random state is touched, and the state is part of a
checkpoint. Not here: how rows are found (`window`, `index`), how they are gathered, what files look like.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from forebay.core.validate import checked_integer
from forebay.errors import InvalidConfig, InvalidInput, WaitTimeout
from forebay.trajectory.gather import Batch, Gatherer
from forebay.trajectory.saving import SavingBuffer
from forebay.trajectory.schema import Schema
from forebay.trajectory.window import Window

__all__ = ["TrajectoryReplayBuffer"]

_PENDING_BYTES = 256 * 2**20


class TrajectoryReplayBuffer(SavingBuffer):
    """A moving window of trajectories, sampled uniformly by transition.

    `sample_window_size`: only the newest so many trajectories are sampled (0: all). `max_transitions` and `max_bytes`
    limit it further. With `auto_save` everything is also kept in `auto_save_path`/rank_<rank>, for ever unless
    `retain="window"` or one of these limits is given; then `cache_size` of the newest (if `enable_cache`) stay in the
    process's memory, and the others are read from mapped files. Results never depend on that. `optional` names fields
    that may be missing, with their fill. `arrays` says what comes out: "torch", "numpy", or None for torch where it is
    installed.
    """

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
        wanted = checked_integer("min_transitions", min_transitions, least=0)
        most = self._limits.transitions
        if most is not None and wanted > most:
            raise InvalidConfig(f"{wanted} transitions were waited for; max_transitions is {most}: it would never end")
        self._wait(lambda: self.num_transitions >= wanted, f"{wanted} transitions to draw", timeout_s)

    def wait_added(self, total: int, timeout_s: float | None = None) -> None:
        """Wait until so many trajectories were added to this object, those that left the window included.

        It paces a learner: it waits for `added_total` of `get_stats`, which goes on when the window is full.
        """
        self._check_usable()
        wanted = checked_integer("total", total, least=0)
        self._wait(lambda: self._added >= wanted, f"{wanted} trajectories added in all", timeout_s)

    def _wait(self, done: Callable[[], bool], what: str, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not done():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    full = " and is full" if len(self) == self._limits.trajectories else ""
                    raise WaitTimeout(
                        what,
                        timeout_s or 0.0,
                        f"the window has {len(self)} trajectories with {self.num_transitions} transitions{full}; "
                        f"{self._added} trajectories were added so far",
                    )
                self._changed.wait(left)
                self._check_usable()

    def get_stats(self) -> dict[str, int | float]:
        """Figures of the window and of what went through it; touches no content."""
        self._check_usable()
        with self._changed:
            window, writer = self._window, self._writer
            rows = None if window is None else window.index.rows
            with np.errstate(all="ignore"):  # rewards may be infinite
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
                "durable_id": self.durable_id,
                "next_id": self._next_id,
                "left_out_damaged": 0 if self._store is None else self._store.left_out,
            }


def _check_draw(num_chunks: int, sequence_length: int | None) -> tuple[int, int | None]:
    count = checked_integer("num_chunks", num_chunks, least=1)
    if sequence_length is None:
        return count, None
    return count, checked_integer("sequence_length", sequence_length, least=1)
