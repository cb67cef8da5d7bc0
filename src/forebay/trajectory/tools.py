"""Merging and splitting directories of trajectories, whatever is interrupted when.

Promised: the result is made beside its place, every trajectory in it is checked against its crc, and only then does it
appear, complete; only after that is a source touched, and only without `copy`. An existing target is refused. Sealed
segments are linked, or copied where links fail; rows of a segment that still grows are copied. A crash between the two
steps leaves trajectories in the source and in the target, never in neither. A source of a merge is gone from the moment
in which its manifest (or catalogue) is removed; what else of it an interruption leaves is no longer anybody's.

Checkpoints and stores are read alike; the result is a checkpoint. Nothing is printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forebay.checkpoint.files import FileOps
from forebay.checkpoint.publish import MANIFEST, MANIFEST_LEFTOVER, doing, read_manifest
from forebay.core.report import Progress, Steps
from forebay.core.validate import checked_integer
from forebay.errors import CheckpointError, DamagedData, ForebayError, InvalidInput
from forebay.trajectory.catalogue import NAME, Catalogue
from forebay.trajectory.checkpoint import MAIN, Contents, PartSource, leftovers, open_contents, write_checkpoint
from forebay.trajectory.joining import Joined, Piece, Sources, check_names, common_schema, fill_values, is_dropped, join
from forebay.trajectory.listing import Listing
from forebay.trajectory.outcome import DEFAULT_SEED, Outcome
from forebay.trajectory.reader import Reader
from forebay.trajectory.schema import Layout, Schema
from forebay.trajectory.segments import SEGMENT_FILE, file_names
from forebay.trajectory.spool import Spool
from forebay.trajectory.staging import check_new, staged

__all__ = ["merge", "split"]

_REMOVABLE = re.compile(
    rf"{SEGMENT_FILE.pattern}|index-[0-9a-f]{{16}}\.rows|{MANIFEST_LEFTOVER.pattern}|catalogue\.db(-wal|-shm|\.lock)",
    re.ASCII,
)


# --- merge --------------------------------------------------------------------------------------------


def merge(
    sources: str | PathLike[str] | Sequence[str | PathLike[str]],
    target: str | PathLike[str],
    *,
    copy: bool,
    fill: Mapping[str, Any] | None = None,
    drop: Sequence[str] = (),
    skip_damaged: bool = False,
    dry_run: bool = False,
    files: FileOps | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Bring directories, or the `rank_<n>` of one, together as the checkpoint `target`, numbered from 0.

    By original id, and within one id by rank in numeric order. Fields that differ are refused by name, unless `fill`
    has a value for those that some lack, or `drop` names them; trajectories that need it are then rewritten. Without
    `copy` the sources are removed at the end. `skip_damaged` leaves out what is damaged. `dry_run` changes nothing.
    What a buffer cleared is not taken along.
    """
    files, fill, drop = files or FileOps(), dict(fill or {}), list(drop)
    check_new(target)
    if skip_damaged and not copy:
        raise InvalidInput("skip_damaged without copy would remove what might still be saved; copy instead")
    paths = [sources] if isinstance(sources, (str, PathLike)) else sources
    with Sources(paths, files, hold=not dry_run) as found:
        left_out = 0
        if skip_damaged:
            left_out = _leave_out_damaged(found, files)
        else:
            found.refuse_damaged()
        check_names(found.parts.values(), fill, drop)
        plans = {part: _Plan.of(contents, fill, drop) for part, contents in found.parts.items()}
        outcome = _outcome(target, found, plans, dry_run, left_out, removed=[] if copy else found.directories)
        if dry_run:
            for plan in plans.values():
                join([_as_it_is(contents) for contents in plan.contents if not plan.differs(contents)], files)
            return outcome
        count = sum(outcome.parts.values())
        steps = Steps(progress, outcome.rewritten + 2 * count)
        with staged(target, files) as directory:
            joined = {part: join(plan.pieces(directory, files, steps), files) for part, plan in plans.items()}
            parts = {part: _renumbered(joined[part], plan) for part, plan in plans.items()}
            write_checkpoint(directory, parts, files=files, progress=steps.counted(), check_rows=False)
            _check_result(directory, {p: (joined[p], plans[p].contents) for p in plans}, files, steps)
        if not copy:
            with _result_is_complete(target):
                for source in found.directories:
                    with doing("remove", source):
                        _remove(source, found.manifests.get(source), files)
        return outcome


class _Plan(NamedTuple):
    """What is to become of a part: the contents of the directories that have it, and the fields they will have."""

    contents: list[Contents]
    schema: Schema | None
    fill: dict[str, Any]
    drop: Sequence[str]

    @classmethod
    def of(cls, contents: list[Contents], fill: Mapping[str, Any], drop: Sequence[str]) -> _Plan:
        schema = common_schema(contents, fill, drop)
        return cls(contents, schema, fill_values(fill, schema), drop)

    def differs(self, contents: Contents) -> bool:
        return contents.layout is not None and contents.layout.schema != self.schema

    def rewritten(self) -> int:
        return sum(len(contents.listing) for contents in self.contents if self.differs(contents))

    def pieces(self, directory: Path, files: FileOps, steps: Steps) -> list[Piece]:
        return [
            self._rewritten(contents, directory, files, steps) if self.differs(contents) else _as_it_is(contents)
            for contents in self.contents
        ]

    def _rewritten(self, contents: Contents, directory: Path, files: FileOps, steps: Steps) -> Piece:
        assert self.schema is not None
        spool = Spool(directory, Layout(self.schema), files)
        rows = contents.listing.rows
        with Reader(contents, files) as reader:
            for k in range(len(reader)):
                found = reader.aligned(k)
                kept = {path: leaf for path, leaf in found.leaves.items() if not is_dropped(path, self.drop)}
                spool.add(int(rows["id"][k]), found._replace(leaves=kept), float(rows["added_at"][k]), self.fill)
                steps.more()
        done = spool.finish()
        return Piece(contents.directory, done.layout, done.texts, done.listing, done.segments)


def _as_it_is(contents: Contents) -> Piece:
    return Piece(contents.directory, contents.layout, contents.texts, contents.listing, contents.segments)


def _renumbered(joined: Joined, plan: _Plan) -> PartSource:
    count = len(joined.listing)
    seed = next((found.seed for found in plan.contents if found.seed is not None), DEFAULT_SEED)
    listing = joined.listing.with_rows(id=np.arange(count))
    return PartSource(joined.layout, joined.texts, listing, joined.segments, joined.space, count, seed, 0, None)


def _leave_out_damaged(found: Sources, files: FileOps) -> int:
    """Take what is damaged out of the sources; how many trajectories that are."""
    gone = 0
    for contents in found.parts.values():
        for one in contents:
            with Reader(one, files) as reader:
                whole = np.array([k for k in range(len(reader)) if reader.is_whole(k)], np.int64)
            gone += one.left_out + len(one.listing) - len(whole)
            one.listing, one.left_out = one.listing.chosen(whole), 0
    return gone


def _outcome(
    target: str | PathLike[str],
    found: Sources,
    plans: Mapping[str, _Plan],
    dry_run: bool,
    left_out: int,
    removed: Sequence[Path],
) -> Outcome:
    listings = [contents.listing for plan in plans.values() for contents in plan.contents]
    layouts = [None if plan.schema is None else Layout(plan.schema) for plan in plans.values() for _ in plan.contents]
    parts = {part: sum(len(contents.listing) for contents in plan.contents) for part, plan in plans.items()}
    sizes = (listing.bytes(layout).sum() for listing, layout in zip(listings, layouts, strict=True) if layout)
    return Outcome(
        target=str(target),
        sources=list(map(str, found.directories)),
        done=not dry_run,
        trajectories=parts.get(MAIN, 0),
        transitions=sum(int(contents.listing.rows["transitions"].sum()) for contents in found.parts.get(MAIN, [])),
        bytes=int(sum(sizes)),
        parts=parts,
        rewritten=sum(plan.rewritten() for plan in plans.values()),
        left_out=left_out,
        removed=list(map(str, removed)),
    )


def _check_result(
    directory: Path, parts: Mapping[str, tuple[Joined, Sequence[Contents]]], files: FileOps, steps: Steps
) -> None:
    """DamagedData unless every trajectory of the result has its crc, and the same one as in its source."""
    wrong = []
    for part, (joined, contents) in parts.items():
        with Reader(open_contents(directory, part, files), files) as reader:
            found = reader.contents.listing.rows["crc"]
            for k, (crc, owner) in enumerate(zip(joined.listing.rows["crc"], joined.owner, strict=True)):
                if found[k] != crc or not reader.is_whole(k):
                    wrong.append(f"trajectory {joined.listing.rows['id'][k]} of {contents[owner].directory}")
                steps.more()
    if wrong:
        raise DamagedData(
            f"{len(wrong)} trajectories do not have their checksum: {', '.join(wrong[:10])}; a file was altered. "
            "Nothing was changed"
        )


# --- split --------------------------------------------------------------------------------------------


def split(
    source: str | PathLike[str],
    target: str | PathLike[str],
    count: int,
    *,
    copy: bool,
    part: str = MAIN,
    dry_run: bool = False,
    files: FileOps | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """The first `count` trajectories become the checkpoint `target`; they keep their ids.

    With `copy` the source stays whole. Without, it keeps the others, in one step once the target is complete: the
    manifest of a checkpoint is replaced, from the catalogue of a store the rows are removed. A crash in between leaves
    the first ones in both, never in neither. Other parts stay where they are.
    """
    files = files or FileOps()
    check_new(target)
    count = checked_integer("count", count)
    with Sources([source], files, hold=not dry_run) as found:
        if len(found.directories) > 1:
            raise InvalidInput(
                f"{source} has {len(found.directories)} directories, of as many ranks; merge them first, or split each"
            )
        found.refuse_damaged()
        contents = _part_of(found, part)
        total = len(contents.listing)
        if not 0 < count < total:
            raise InvalidInput(
                f"{count} trajectories were to be split off; there are {total}: expected 1 to {total - 1}"
            )
        first = contents.listing.chosen(np.arange(count))
        outcome = Outcome(
            target=str(target),
            sources=[str(contents.directory)],
            done=not dry_run,
            trajectories=count,
            transitions=int(first.rows["transitions"].sum()),
            bytes=0 if contents.layout is None else int(first.bytes(contents.layout).sum()),
            parts={MAIN: count},
            remaining=total if copy else total - count,
        )
        if dry_run:
            return outcome
        steps = Steps(progress, 2 * count)
        joined = join([_as_it_is(contents)._replace(listing=first)], files)
        with staged(target, files) as directory:
            source_of = _part_source(contents, joined.listing)
            source_of = source_of._replace(segments=joined.segments, space=joined.space, random=None)
            write_checkpoint(directory, {MAIN: source_of}, files=files, progress=steps.counted(), check_rows=False)
            _check_result(directory, {MAIN: (joined, [contents])}, files, steps)
        if not copy:
            with _result_is_complete(target):
                if contents.directory in found.manifests:
                    _keep_rest(found, part, count, files)
                else:
                    _forget(contents, first, files)
        return outcome


def _part_of(found: Sources, part: str) -> Contents:
    if part not in found.parts:
        raise InvalidInput(f"{found.directories[0]} has no part {part!r}; it has {', '.join(sorted(found.parts))}")
    return found.parts[part][0]


def _part_source(contents: Contents, listing: Listing) -> PartSource:
    seed = DEFAULT_SEED if contents.seed is None else contents.seed
    return PartSource(
        contents.layout,
        contents.texts,
        listing,
        contents.segments,
        None,
        contents.next_id,
        seed,
        contents.rank,
        contents.random,
    )


def _keep_rest(found: Sources, part: str, count: int, files: FileOps) -> None:
    """Publish a checkpoint again without the first trajectories of a part; remove the files that it no longer names."""
    parts = {}
    for name, (contents,) in found.parts.items():
        from_position = count if name == part else 0
        rest = contents.listing.chosen(np.arange(from_position, len(contents.listing)))
        parts[name] = _part_source(contents, rest)
    (directory,) = found.directories
    write_checkpoint(directory, parts, files=files, replaces=found.manifests[directory])
    # Only to free the disk: the next save would do it, too.
    with suppress(OSError, ForebayError):
        descriptor = files.open_directory(directory)
        try:
            files.lock(descriptor)
            for name in leftovers(directory, files):
                with suppress(OSError):
                    files.remove(directory / name)
        finally:
            files.close(descriptor)


def _forget(contents: Contents, first: Listing, files: FileOps) -> None:
    """Remove trajectories from the catalogue of a store, in one transaction; column files are never edited."""
    catalogue = Catalogue(contents.directory / NAME, read_only=False)
    try:
        rows = catalogue.listing().rows
        kept = rows["segment"][~np.isin(rows["id"], first.rows["id"])]
        empty = [number for number, s in contents.segments.items() if s.sealed and not (kept == number).any()]
        with catalogue.transaction():
            catalogue.remove(first.rows["id"].tolist())
            for number in empty:
                catalogue.remove_segment(number)
    finally:
        catalogue.close()
    assert contents.layout is not None
    for number in empty:
        for name in file_names(contents.segments[number].name, contents.layout):
            with suppress(OSError):
                files.remove(contents.directory / name)


# --- letting sources go -------------------------------------------------------------------------------


@contextmanager
def _result_is_complete(target: str | PathLike[str]) -> Iterator[None]:
    """What fails from here on leaves the result as it should be; who reads the error has to know."""
    try:
        yield
    except ForebayError as error:
        raise CheckpointError(f"{target} is complete, but the source could not be changed: {error}") from error


def _remove(directory: Path, manifest: bytes | None, files: FileOps) -> None:
    """Remove a checkpoint or a store: first what makes it one, then its files, and the directory if nothing is left."""
    point = NAME if manifest is None else MANIFEST
    descriptor = files.open_directory(directory)
    try:
        if manifest is not None:
            try:
                files.lock(descriptor)
            except BlockingIOError:
                raise CheckpointError(f"another save to {directory} is under way, and it was left as it is") from None
            if read_manifest(directory, files) != manifest:
                raise CheckpointError(f"{directory} was saved to meanwhile, and was left as it is")
        names = sorted(name for name in files.list_directory(directory) if _REMOVABLE.fullmatch(name))
        files.remove(directory / point)
        files.sync(descriptor)
        for name in names:
            with suppress(OSError):
                files.remove(directory / name)
    finally:
        with suppress(OSError):
            files.close(descriptor)
    with suppress(OSError):
        directory.rmdir()
