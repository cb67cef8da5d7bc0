"""Is a directory of trajectories whole: every crc, every listing, every number that leads somewhere.

`verify` reads all of a checkpoint, of a store (also while a process writes to it) or of a directory of RLinf's, and
every rank of one. Each check is a `Finding`; an error among them means that something cannot be used. Nothing is
changed. SQLite may leave its empty `-wal` and `-shm` files beside a catalogue that it read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forebay.checkpoint.files import FileOps
from forebay.checkpoint.publish import MANIFEST
from forebay.core.report import Finding, Level, Progress, Steps, first_of
from forebay.errors import CheckpointError, DamagedData, InvalidInput, InvalidTrajectory, StorageError
from forebay.storage.sqlite.doctor import connected, integrity_problems
from forebay.storage.sqlite.lock import holder_of
from forebay.trajectory.catalogue import NAME, Catalogue
from forebay.trajectory.checkpoint import (
    MAIN,
    Contents,
    check_same_schema,
    checkpoint_manifest,
    find_directories,
    leftovers,
    open_contents,
    rank_directories,
)
from forebay.trajectory.data import STRING, aligned
from forebay.trajectory.data import Path as LeafPath
from forebay.trajectory.exchange import rlinf_directories
from forebay.trajectory.reader import Reader
from forebay.trajectory.restore import Shard, restored_random
from forebay.trajectory.rlinf import RlinfDirectory, open_rlinf
from forebay.trajectory.schema import NEXT, VALID, Schema, fitted, schema_of
from forebay.trajectory.segments import SEGMENT_FILE
from forebay.trajectory.space import Table
from forebay.trajectory.store import is_store

__all__ = ["is_trajectories", "verify"]

_RESCUE = "use another copy; `forebay trajectories merge --copy --skip-damaged` copies what is whole"


def is_trajectories(path: str | PathLike[str]) -> bool:
    """Whether a directory looks like one that `verify` knows, judged by names alone."""
    root = Path(path)
    if not root.is_dir():
        return False
    places = (root, *rank_directories(root))
    return any(_is_checkpoint(place) or is_store(place) for place in places) or bool(rlinf_directories(root))


def verify(
    path: str | PathLike[str], progress: Progress | None = None, *, files: FileOps | None = None
) -> list[Finding]:
    """Everything about a directory of trajectories, and its ranks; InvalidInput if there are none.

    What cannot be read for another reason than damage (permissions, a failing disk) is raised, not found.
    `progress` gets the trajectories that were read, and how many there are.
    """
    root, files = Path(path), files or FileOps()
    if not root.is_dir():
        raise InvalidInput(f"there is no directory {root}; expected one with trajectories")
    foreign = rlinf_directories(root)
    if foreign:
        return _verify_rlinf(foreign, progress, files)
    directories, findings = _directories(root)
    several = len(directories) > 1 or directories != [root]
    opened: list[tuple[_Label, str, Contents]] = []
    for directory in directories:
        label = _Label(directory.name if several else "")
        check = _check_checkpoint if (directory / MANIFEST).exists() else _check_store
        opened += [(label, part, found) for part, found in check(directory, label, findings, files).items()]
    for name in sorted({part for _, part, _ in opened}):
        findings += _same_fields([found for _, part, found in opened if part == name])
    steps = Steps(progress, sum(len(found.listing) for _, _, found in opened))
    for label, part, found in opened:
        findings += _check_rows(label, part, found, steps, files)
    return findings


class _Label(NamedTuple):
    """Which rank a finding is of."""

    rank: str

    def finding(self, name: str, level: Level, message: str, advice: str | None = None) -> Finding:
        return Finding(f"{self.rank} {name}".strip(), level, message, advice)


def _directories(root: Path) -> tuple[list[Path], list[Finding]]:
    try:
        found = find_directories(root)
    except CheckpointError as error:
        holding = [rank for rank in rank_directories(root) if (rank / MANIFEST).exists() or is_store(rank)]
        if not holding:
            raise InvalidInput(str(error)) from None
        return holding, [Finding("ranks", Level.ERROR, str(error), "bring back what is missing")]
    numbers = [int(rank.name.removeprefix("rank_")) for rank in found if rank != root]
    missing = sorted(set(range(max(numbers, default=-1) + 1)) - set(numbers))
    if missing:
        message = f"there are {len(numbers)} ranks up to {max(numbers)}; of {first_of(missing)} there is nothing"
        return found, [Finding("ranks", Level.WARNING, message, "bring them back, or go on without them")]
    return found, []


def _same_fields(contents: Sequence[Contents]) -> Iterator[Finding]:
    try:
        check_same_schema(contents)
    except InvalidInput as error:
        yield Finding("fields", Level.WARNING, str(error), "merge them with --fill or --drop to load them together")


# --- checkpoints and stores ---------------------------------------------------------------------------


def _check_checkpoint(directory: Path, label: _Label, findings: list[Finding], files: FileOps) -> dict[str, Contents]:
    try:
        manifest = checkpoint_manifest(directory, files)
        unused = leftovers(directory, files)
    except DamagedData as error:
        findings.append(label.finding("manifest", Level.ERROR, str(error), _RESCUE))
        return {}
    message = f"sealed and whole, of Forebay {manifest.forebay_version or 'unknown'}"
    findings.append(label.finding("manifest", Level.OK, message))
    opened = {}
    for part in sorted(manifest.parts):
        try:
            contents = open_contents(directory, part, files)
            restored_random(contents.random, 0, Shard(0, 1), 0)
        except DamagedData as error:
            findings.append(label.finding(f"part {part}", Level.ERROR, str(error), _RESCUE))
            continue
        segments = f"{len(contents.listing):,} trajectories in {len(contents.segments):,} segments"
        findings.append(label.finding(f"part {part}", Level.OK, f"{segments}; listing and sizes agree"))
        opened[part] = contents
    findings.append(_unused(label, directory, unused, "the next save to this directory removes them"))
    return opened


def _check_store(directory: Path, label: _Label, findings: list[Finding], files: FileOps) -> dict[str, Contents]:
    holder = holder_of(directory / NAME)
    message = "no process has it open for writing" if holder is None else f"open for writing by {holder}"
    findings.append(label.finding("lock", Level.OK, message))
    try:
        problems = _integrity(directory / NAME)
        if problems:
            raise DamagedData(f"SQLite finds {directory / NAME} damaged: {problems}")
        contents = open_contents(directory, files=files)
        catalogue = Catalogue(directory / NAME, read_only=True)
        try:
            listed, floor = catalogue.listing().rows["id"], catalogue.number("floor_id")
            known = {name for name, _ in catalogue.segments().values()}
            clean = bool(catalogue.number("clean")) or holder is not None
        finally:
            catalogue.close()
    except DamagedData as error:
        findings.append(label.finding("catalogue", Level.ERROR, str(error), _RESCUE))
        return {}
    cleared = int(np.count_nonzero(listed < floor))
    message = f"{len(contents.listing):,} trajectories in {len(contents.segments):,} segments"
    message += f"; {cleared:,} more were cleared and are not sampled" if cleared else ""
    message += "" if clean else "; the process that wrote it last did not close it"
    findings.append(label.finding("catalogue", Level.OK, message))
    lost = sorted(set(listed[listed >= floor].tolist()) - set(contents.listing.rows["id"].tolist()))
    if lost and contents.left_out:
        message = f"{len(lost)} trajectories are not whole in their files: {first_of(lost)}"
        findings.append(label.finding("files", Level.ERROR, message, _RESCUE))
    there = [name for name in files.list_directory(directory) if SEGMENT_FILE.fullmatch(name)]
    unused = [name for name in there if name.split("-")[1] not in known] if holder is None else []
    findings.append(_unused(label, directory, unused, "opening it for writing removes them"))
    return {MAIN: contents}


def _integrity(path: Path) -> str:
    try:
        with connected(path, "ro") as connection:
            return integrity_problems(connection)
    except sqlite3.Error as error:
        raise StorageError(f"cannot read {path}: {error}") from error


def _unused(label: _Label, directory: Path, names: Sequence[str], advice: str) -> Finding:
    if not names:
        return label.finding("leftovers", Level.OK, "every file is in use")
    size = sum((directory / name).stat().st_size for name in names if (directory / name).is_file())
    message = f"{len(names)} files with {size:,} bytes are not in use: {', '.join(names[:3])}"
    return label.finding("leftovers", Level.WARNING, message, advice)


# --- rows ---------------------------------------------------------------------------------------------


class _Columns:
    """Where rows have numbers that lead somewhere: next observations, texts, and whether a step may be drawn."""

    def __init__(self, reader: Reader) -> None:
        assert reader.space is not None
        self._space = reader.space
        self._own = {path: place for path, _, place in _places(self._space.steps) if path in (NEXT, VALID)}
        tables = (self._space.steps, self._space.observations)
        self._texts = [(table, place) for table in tables for _, dtype, place in _places(table) if dtype == STRING]

    def problem(self, row: dict[str, Any], runs: np.ndarray[Any, Any], texts: int) -> str | None:
        """What is wrong with the numbers of a trajectory whose crc is right; None if nothing is."""
        cells = row["steps"] * row["envs"]
        following = self._own.get(NEXT)
        if following is not None:
            values = _values(self._space.steps, following, row["first_step"], cells)
            if values.min() < 0 or values.max() >= row["observations"]:
                return "leads to an observation that it does not have"
        valid = np.zeros(cells + 1, np.int64)
        np.add.at(valid, runs[:, 0], 1)
        np.subtract.at(valid, runs[:, 0] + runs[:, 1], 1)
        found = _values(self._space.steps, self._own[VALID], row["first_step"], cells).view(np.uint8)
        if not np.array_equal(found, np.cumsum(valid[:-1])):
            return "has other steps to draw than its listing says"
        rows = {self._space.steps: (row["first_step"], cells)}
        rows[self._space.observations] = (row["first_observation"], row["observations"])
        for table, place in self._texts:
            values = _values(table, place, *rows[table])
            if values.size and (values.min() < 0 or values.max() >= texts - row["texts"]):
                return "has a text that there is none of"
        return None


def _places(table: Table) -> Iterator[tuple[LeafPath, str, tuple[int, int]]]:
    for strip_number, strip in enumerate(table.strips):
        for k, (path, field, _) in enumerate(strip.fields):
            yield path, field.dtype, (strip_number, k)


def _values(table: Table, place: tuple[int, int], first: int, rows: int) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = table.columns[place[0]][place[1]][first : first + rows]
    return np.ascontiguousarray(values)


def _check_rows(label: _Label, part: str, contents: Contents, steps: Steps, files: FileOps) -> Iterator[Finding]:
    altered: list[int] = []
    wrong: dict[str, list[int]] = {}
    listing = contents.listing
    ends = np.cumsum(listing.rows["runs"])
    name = "rows" if part == MAIN else f"rows of {part}"
    with Reader(contents, files) as reader:
        columns = _Columns(reader) if reader.space is not None else None
        for k in range(len(reader)):
            number = int(listing.rows["id"][k])
            try:
                if not reader.is_whole(k):
                    altered.append(number)
                elif columns is not None:
                    runs = listing.runs[ends[k] - listing.rows["runs"][k] : ends[k]]
                    problem = columns.problem(reader.row(k), runs, len(contents.texts))
                    if problem is not None:
                        wrong.setdefault(problem, []).append(number)
            except (DamagedData, StorageError) as error:
                # Of a store in use a whole segment may be let go while it is read.
                if contents.kind == "store" and not _isfirst_of(contents.directory, number):
                    continue
                wrong.setdefault(f"cannot be read: {error}", []).append(number)
            finally:
                steps.more()
    if altered:
        message = f"{len(altered)} of {len(listing):,} trajectories do not have their checksum: {first_of(altered)}"
        yield label.finding(name, Level.ERROR, message, _RESCUE)
    for problem, ids in wrong.items():
        message = f"{len(ids)} of {len(listing):,} trajectories: {first_of(ids)}: each {problem}"
        yield label.finding(name, Level.ERROR, message, _RESCUE)
    if not altered and not wrong:
        yield label.finding(name, Level.OK, f"{len(listing):,} trajectories have their checksum")


def _isfirst_of(directory: Path, trajectory_id: int) -> bool:
    catalogue = Catalogue(directory / NAME, read_only=True)
    try:
        return trajectory_id in catalogue.listing().rows["id"]
    finally:
        catalogue.close()


def _is_checkpoint(directory: Path) -> bool:
    """Whether there is a manifest of trajectories, and not of groups."""
    try:
        with (directory / MANIFEST).open("rb") as opened:
            return opened.read(40).startswith(b'{"format":"forebay-trajectories"')
    except OSError:
        return False


# --- RLinf --------------------------------------------------------------------------------------------


def _verify_rlinf(paths: Sequence[Path], progress: Progress | None, files: FileOps) -> list[Finding]:
    findings: list[Finding] = []
    opened: list[tuple[_Label, RlinfDirectory]] = []
    for path in paths:
        label = _Label(path.name if len(paths) > 1 else "")
        try:
            found = open_rlinf(path, files=files)
        except DamagedData as error:
            findings.append(label.finding("index", Level.ERROR, str(error)))
            continue
        opened.append((label, found))
        findings.append(label.finding("index", Level.OK, f"RLinf, {len(found):,} trajectories, {found.bytes:,} bytes"))
        aside: tuple[tuple[str, Sequence[object]], ...] = (
            ("in the index, without a file", found.missing),
            ("not in the index, and read", found.unlisted),
            ("called like a trajectory, and not read", found.skipped),
        )
        for what, names in aside:
            if names:
                message = f"{len(names):,} are {what}: {first_of(names)}"
                findings.append(label.finding("files", Level.WARNING, message))
    steps = Steps(progress, sum(len(found) for _, found in opened))
    schema: Schema | None = None
    for label, found in opened:
        wrong: list[str] = []
        for number in found.names:
            try:
                one = aligned(found.read(number))
                schema = schema or schema_of(one, {})
                fitted(one, schema, {})
            except (DamagedData, InvalidTrajectory) as error:
                wrong.append(str(error) if found.names[number] in str(error) else f"{found.names[number]}: {error}")
            steps.more()
        if found.ignored:
            message = f"fields that are not taken over: {', '.join(sorted(found.ignored))}"
            findings.append(label.finding("fields", Level.WARNING, message))
        message = f"{len(found) - len(wrong):,} of {len(found):,} trajectories can be read"
        level = Level.ERROR if wrong else Level.OK
        findings.append(label.finding("trajectories", level, "; ".join([message, *wrong[:3]])))
    return findings
