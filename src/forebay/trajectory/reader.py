"""Trajectories of a checkpoint or a store by position, from mapped files: one at a time, checked, nothing changed.

What merging, exporting, showing and verifying read with. Segments are mapped when they are asked for, and only so many
at a time, because a process maps a limited number of files. Not for sampling: see `buffer`.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from forebay.checkpoint.files import FileOps
from forebay.errors import DamagedData
from forebay.trajectory.checkpoint import Contents
from forebay.trajectory.data import Aligned, Trajectory, aligned
from forebay.trajectory.readback import read_trajectory
from forebay.trajectory.segments import Segment, checksum
from forebay.trajectory.space import Space
from forebay.trajectory.store import map_segment

__all__ = ["Reader"]

_MOST_MAPPED = 256
_FLAGS = ("terminations", "truncations", "dones")


class Reader:
    """Reads what `Contents` lists; positions are those of its listing."""

    def __init__(self, contents: Contents, files: FileOps | None = None) -> None:
        self.contents = contents
        self.space = None if contents.layout is None else Space(contents.layout)
        self._files = files or FileOps()
        self._mapped: dict[int, Segment] = {}  # the one that was asked for last is the last

    def __len__(self) -> int:
        return len(self.contents.listing)

    def mapped(self, number: int) -> Segment:
        """A segment, mapped until many others were asked for."""
        segment = self._mapped.pop(number, None)
        if segment is None:
            assert self.space is not None
            if len(self._mapped) >= _MOST_MAPPED:
                self._mapped.pop(next(iter(self._mapped))).unmap(self.space)
            found = self.contents.segments[number]
            segment = Segment(found.directory, found.name, found.rows, sealed=True)
            map_segment(segment, self.space, self._files)
        self._mapped[number] = segment
        return segment

    def row(self, position: int) -> dict[str, Any]:
        """What the listing says of a trajectory, with rows counted in `space`."""
        rows = self.contents.listing.rows
        row = dict(zip(rows.dtype.names or (), rows[position].tolist(), strict=True))
        segment = self.mapped(row["segment"])
        row["first_step"] += segment.first_step
        row["first_observation"] += segment.first_observation
        return row

    def is_whole(self, position: int) -> bool:
        """Whether the rows of a trajectory have its crc."""
        row = self.row(position)
        assert self.space is not None
        places = (row["first_step"], row["steps"] * row["envs"], row["first_observation"], row["observations"])
        return bool(checksum(self.space, *places) == row["crc"])

    def trajectory(self, position: int) -> Trajectory:
        """One trajectory; DamagedData if it is not whole.

        With several epochs its flags have their leading rows (False): without a flag nothing in a Trajectory says where
        an epoch ends; `aligned` does.
        """
        result, epochs = self._read(position)
        if epochs > 1:
            for name in _FLAGS:
                flags = getattr(result, name)
                if isinstance(flags, np.ndarray):
                    apart = flags.reshape(epochs, len(flags) // epochs, *flags.shape[1:])
                    apart = np.concatenate([np.zeros_like(apart[:, :1]), apart], axis=1)
                    setattr(result, name, apart.reshape(-1, *flags.shape[1:]))
        return result

    def aligned(self, position: int) -> Aligned:
        """The same, lined up, and with its epochs."""
        trajectory, epochs = self._read(position)
        found = aligned(trajectory)
        each = found.steps // epochs
        leaves = {
            path: leaf._replace(values=leaf.values.reshape(epochs, each, *leaf.values.shape[2:]))
            for path, leaf in found.leaves.items()
        }
        return found._replace(epochs=epochs, epoch_steps=each, leaves=leaves)

    def _read(self, position: int) -> tuple[Trajectory, int]:
        row = self.row(position)
        if not self.is_whole(position):
            raise DamagedData(
                f"trajectory {row['id']} of {self.contents.directory} does not have its checksum: a file was altered"
            )
        assert self.space is not None
        return read_trajectory(self.space, row, self.contents.texts), row["epochs"]

    def close(self) -> None:
        while self._mapped:
            assert self.space is not None
            self._mapped.popitem()[1].unmap(self.space)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
