"""Whole directories to and from RLinf, in bounded memory: one trajectory at a time, whatever their number.

Importing makes a checkpoint that appears complete and verified, or not at all; exporting makes a directory that RLinf
loads, under the same promise. Neither changes its source. What cannot be taken along is named in the result. What
RLinf's files look like is said in `rlinf`. Needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from os import PathLike
from pathlib import Path

import msgspec
import numpy as np

from forebay.checkpoint.files import FileOps
from forebay.core.report import Progress, Steps
from forebay.errors import DamagedData, InvalidInput, InvalidTrajectory
from forebay.trajectory.checkpoint import (
    MAIN,
    PartSource,
    check_same_schema,
    open_contents,
    rank_directories,
    write_checkpoint,
)
from forebay.trajectory.data import Trajectory, aligned
from forebay.trajectory.joining import Sources, in_order
from forebay.trajectory.outcome import DEFAULT_SEED
from forebay.trajectory.reader import Reader
from forebay.trajectory.rlinf import RlinfDirectory, export_rlinf, find_rlinf, open_rlinf
from forebay.trajectory.spool import Spool
from forebay.trajectory.staging import check_new, staged

__all__ = ["Exported", "Imported", "export_directory", "import_directory", "rlinf_directories"]


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What was taken over, and what was not; `done` is False if it only would be."""

    target: str
    sources: list[str]
    done: bool
    trajectories: int
    source_bytes: int
    transitions: int | None = None
    """None before the files were read."""
    missing: int = 0
    """Trajectories that an index names, and that have no file."""
    unlisted: list[str] = []
    """Files that were read, though no index names them."""
    skipped: list[str] = []
    """What is called like a trajectory, and was not read."""
    ignored: list[str] = []
    """Fields that were not taken over."""


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What was written; `done` is False if it only would be."""

    target: str
    sources: list[str]
    done: bool
    trajectories: int
    transitions: int
    bytes: int | None = None
    left_out: list[str] = []
    """Fields that RLinf does not see."""
    widened: list[str] = []
    """Fields that are stored as larger integers."""


def rlinf_directories(path: str | PathLike[str]) -> list[Path]:
    """A directory of RLinf's buffer: itself, or its `rank_<n>` by number; none if it is something else."""
    root = Path(path)
    if find_rlinf(root):
        return [root]
    if not root.is_dir():
        return []
    ranks = rank_directories(root)
    return ranks if ranks and all(map(find_rlinf, ranks)) else []


# --- from RLinf ---------------------------------------------------------------------------------------


def import_directory(
    source: str | PathLike[str],
    target: str | PathLike[str],
    *,
    dry_run: bool = False,
    files: FileOps | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Make a checkpoint of a directory of RLinf's, or of its `rank_<n>`.

    Trajectories keep their order and, if that is the order of their ids, their ids. Several ranks are joined by id and
    numbered anew, as in a merge.
    """
    files = files or FileOps()
    check_new(target)
    directories = [open_rlinf(path, files=files) for path in rlinf_directories(source) or [Path(source)]]
    order = _order(directories)
    if not dry_run:
        with staged(target, files) as directory:
            transitions = _write(directory, order, directories, files, Steps(progress, 2 * len(order)))
    return Imported(
        target=str(target),
        sources=[str(found.path) for found in directories],
        done=not dry_run,
        trajectories=len(order),
        source_bytes=sum(found.bytes for found in directories),
        transitions=None if dry_run else transitions,
        missing=sum(len(found.missing) for found in directories),
        unlisted=[name for found in directories for name in found.unlisted],
        skipped=[name for found in directories for name in found.skipped],
        ignored=sorted({name for found in directories for name in found.ignored}),
    )


def _order(directories: Sequence[RlinfDirectory]) -> list[tuple[int, RlinfDirectory, int]]:
    """In the order of the result: the new id, the directory, and the id there."""
    if len(directories) == 1:
        ids = list(directories[0].names)
        grow = all(one < other for one, other in pairwise(ids)) and max(ids, default=0) < 2**62
        new = ids if grow else range(len(ids))
        return [(number, directories[0], old) for number, old in zip(new, ids, strict=True)]
    found = sorted((old, rank) for rank, directory in enumerate(directories) for old in directory.names)
    return [(number, directories[rank], old) for number, (old, rank) in enumerate(found)]


def _write(
    directory: Path,
    order: Sequence[tuple[int, RlinfDirectory, int]],
    directories: Sequence[RlinfDirectory],
    files: FileOps,
    steps: Steps,
) -> int:
    """Write a checkpoint and check it; how many transitions it has."""
    spool = Spool(directory, None, files)
    for number, source, old in order:
        try:
            spool.add(number, aligned(source.read(old)), time.time(), {})
        except InvalidTrajectory as error:
            raise InvalidTrajectory(f"{source.path / source.names[old]}: {error}") from None
        steps.more()
    done = spool.finish()
    seed = next((found.seed for found in directories if found.seed is not None and found.seed >= 0), DEFAULT_SEED)
    next_id = order[-1][0] + 1 if order else 0
    part = PartSource(done.layout, done.texts, done.listing, done.segments, None, next_id, seed, 0, None)
    write_checkpoint(directory, {MAIN: part}, files=files)
    with Reader(open_contents(directory, MAIN, files), files) as reader:
        for k in range(len(reader)):
            if not reader.is_whole(k):
                raise DamagedData(f"what was written to {directory} is not what was read; the disk may be failing")
            steps.more()
    return int(done.listing.rows["transitions"].sum())


# --- to RLinf -----------------------------------------------------------------------------------------


def export_directory(
    source: str | PathLike[str],
    target: str | PathLike[str],
    *,
    first_id: int = 0,
    end_id: int | None = None,
    part: str = MAIN,
    dry_run: bool = False,
    files: FileOps | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Make a directory that RLinf loads out of a checkpoint or a store; of the ids from `first_id` up to `end_id`.

    Several ranks are joined and numbered as in a merge; the ids are then the new ones.
    """
    files = files or FileOps()
    check_new(target)
    with Sources([source], files, hold=not dry_run) as found, ExitStack() as stack:
        found.refuse_damaged()
        contents = found.parts.get(part)
        if contents is None:
            raise InvalidInput(f"{source} has no part {part!r}; it has {', '.join(sorted(found.parts))}")
        check_same_schema(contents)
        owner, position = in_order([one.listing for one in contents])
        ids = np.arange(len(owner)) if len(contents) > 1 else contents[0].listing.rows["id"]
        chosen = np.flatnonzero((ids >= first_id) & (ids < (2**63 - 1 if end_id is None else end_id)))
        if not len(chosen):
            there = f"{ids[0]} to {ids[-1]}" if len(ids) else "none"
            raise InvalidInput(f"no trajectory has an id from {first_id} up to {end_id}; there are {there}")
        transitions = sum(int(contents[owner[k]].listing.rows["transitions"][position[k]]) for k in chosen)
        names = [str(one.directory) for one in contents]
        if dry_run:
            return Exported(
                target=str(target), sources=names, done=False, trajectories=len(chosen), transitions=transitions
            )
        readers = [stack.enter_context(Reader(one, files)) for one in contents]
        steps = Steps(progress, len(chosen))

        def trajectories() -> Iterator[tuple[int, Trajectory]]:
            for k in chosen.tolist():
                yield int(ids[k]), readers[owner[k]].trajectory(int(position[k]))

        seed = next((one.seed for one in contents if one.seed is not None), DEFAULT_SEED)
        done = export_rlinf(target, trajectories(), seed=seed, files=files, progress=lambda _: steps.more())
        return Exported(
            target=str(target),
            sources=names,
            done=True,
            trajectories=done.trajectories,
            transitions=transitions,
            bytes=done.bytes,
            left_out=sorted(done.left_out),
            widened=sorted(done.widened),
        )
