"""One trajectory out of a directory, by its id, with what is known about it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import numpy as np

from forebay.checkpoint.files import FileOps
from forebay.core.report import date_text
from forebay.errors import InvalidInput
from forebay.trajectory.checkpoint import MAIN, Contents, find_directories, open_contents
from forebay.trajectory.data import Trajectory
from forebay.trajectory.exchange import rlinf_directories
from forebay.trajectory.reader import Reader
from forebay.trajectory.rlinf import open_rlinf

__all__ = ["find_trajectory"]


def find_trajectory(
    path: str | PathLike[str],
    trajectory_id: int,
    *,
    rank: int | None = None,
    part: str = MAIN,
    files: FileOps | None = None,
) -> tuple[Trajectory, dict[str, str]]:
    """A trajectory of a checkpoint, a store, or RLinf's, and facts about it; DamagedData if it is not whole.

    Ranks count for themselves: `rank` (the number of a `rank_<n>`) says which one, if several have that id.
    """
    files = files or FileOps()
    foreign = rlinf_directories(path)
    directories = foreign or find_directories(path)
    if rank is not None:
        directories = [directory for directory in directories if directory.name == f"rank_{rank}"]
        if not directories:
            raise InvalidInput(f"{path} has no rank_{rank}")
    if foreign:
        return _of_rlinf(directories, trajectory_id, files)
    contents = [open_contents(directory, part, files) for directory in directories]
    having = [(found, _position(found, trajectory_id)) for found in contents]
    there = [(found, position) for found, position in having if position is not None]
    if not there:
        raise InvalidInput(f"there is no trajectory {trajectory_id}; {_ids(contents)}")
    _refuse_several([found.directory for found, _ in there], trajectory_id)
    found, position = there[0]
    with Reader(found, files) as reader:
        row = reader.row(position)
        facts = {
            "directory": str(found.directory),
            "trajectory": str(trajectory_id),
            "reward": f"{row['reward']:g}",
            "added": date_text(row["added_at"]),
        }
        return reader.trajectory(position), facts


def _of_rlinf(directories: list[Path], trajectory_id: int, files: FileOps) -> tuple[Trajectory, dict[str, str]]:
    opened = [open_rlinf(directory, files=files) for directory in directories]
    having = [found for found in opened if trajectory_id in found.names]
    if not having:
        raise InvalidInput(f"there is no trajectory {trajectory_id} among {sum(map(len, opened))} of RLinf's")
    _refuse_several([found.path for found in having], trajectory_id)
    facts = {"file": str(having[0].path / having[0].names[trajectory_id]), "trajectory": str(trajectory_id)}
    return having[0].read(trajectory_id), facts


def _refuse_several(directories: list[Path], trajectory_id: int) -> None:
    if len(directories) > 1:
        names = ", ".join(directory.name for directory in directories[:20])
        raise InvalidInput(f"{len(directories)} ranks have a trajectory {trajectory_id}: {names}; say which rank")


def _position(contents: Contents, trajectory_id: int) -> int | None:
    ids = contents.listing.rows["id"]
    k = int(np.searchsorted(ids, trajectory_id))
    return k if k < len(ids) and ids[k] == trajectory_id else None


def _ids(contents: list[Contents]) -> str:
    ids = np.concatenate([found.listing.rows["id"] for found in contents])
    return f"there are {len(ids)} with ids from {ids.min()} to {ids.max()}" if len(ids) else "there are none at all"
