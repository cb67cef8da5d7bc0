"""Several directories of trajectories as one: their schemas brought together, their trajectories in one order.

The order is that of the original ids, and within one id that of the directories: what ranks added at about the same
time stays together. Fields that only some directories have are refused by name, unless they are dropped or filled.
`Sources` holds the directories still while they are read: a store that a process writes to is refused, and its lock is
held until the end. Nothing is written here but that lock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from forebay.checkpoint.files import FileOps
from forebay.checkpoint.publish import MANIFEST, read_manifest
from forebay.core.dtypes import BFLOAT16
from forebay.errors import CheckpointError, DamagedData, InvalidInput, StorageError, StorageInUse
from forebay.storage.sqlite.lock import ProcessLock, holder_of
from forebay.trajectory.catalogue import NAME
from forebay.trajectory.checkpoint import Contents, find_directories, open_contents, part_names
from forebay.trajectory.data import STRING, dotted
from forebay.trajectory.data import Path as LeafPath
from forebay.trajectory.listing import Listing
from forebay.trajectory.rlinf import find_rlinf
from forebay.trajectory.schema import Field, Layout, Schema, schema_from
from forebay.trajectory.segments import Segment, file_names
from forebay.trajectory.space import Space
from forebay.trajectory.store import map_segment
from forebay.trajectory.window import IN_MEMORY

__all__ = ["Joined", "Piece", "Sources", "common_schema", "fields_of", "fill_values", "in_order", "is_dropped", "join"]


class Sources:
    """Directories that are read together, by part. With `hold` a store's lock is taken, otherwise only asked for."""

    def __init__(self, paths: Iterable[str | PathLike[str]], files: FileOps, *, hold: bool) -> None:
        self._files = files
        self._stack = ExitStack()
        self.directories = _directories(paths)
        self.manifests: dict[Path, bytes] = {}
        """The manifests of those that are checkpoints: whether one was saved to meanwhile."""
        self.parts: dict[str, list[Contents]] = {}
        try:
            for directory in self.directories:
                if (directory / MANIFEST).exists():
                    self.manifests[directory] = _manifest(directory, files)
                else:
                    self._lock(directory, hold)
                for part in part_names(directory, files):
                    self.parts.setdefault(part, []).append(open_contents(directory, part, files))
        except BaseException:
            self.close()
            raise

    def _lock(self, directory: Path, hold: bool) -> None:
        holder = None if hold else holder_of(directory / NAME)
        if holder is not None:
            raise StorageInUse(f"{directory} is open for writing by {holder}; close it there first")
        if hold:
            try:
                lock = ProcessLock(directory / f"{NAME}.lock")
            except OSError as error:
                raise StorageError(f"cannot lock {directory}: {error.strerror or error}") from error
            self._stack.callback(lock.release)

    def refuse_damaged(self) -> None:
        """DamagedData if a store had to leave trajectories out."""
        for contents in self.parts.values():
            for found in contents:
                if found.left_out:
                    raise DamagedData(
                        f"{found.left_out} trajectories of {found.directory} are not whole; verify says which"
                    )

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _directories(paths: Iterable[str | PathLike[str]]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if find_rlinf(path):
            raise InvalidInput(f"{path} is a directory of RLinf's; import it first")
        found += [directory.absolute() for directory in find_directories(path)]
    places = [directory.resolve() for directory in found]
    for directory, place in zip(found, places, strict=True):
        if places.count(place) > 1:
            raise InvalidInput(f"{directory} was named twice; its trajectories would be there twice")
    if not found:
        raise InvalidInput("no directory was named; expected one with trajectories")
    return found


def _manifest(directory: Path, files: FileOps) -> bytes:
    try:
        return read_manifest(directory, files)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {directory}: {MANIFEST} is missing") from None


# --- one schema ---------------------------------------------------------------------------------------


def fields_of(schema: Schema) -> dict[LeafPath, Field]:
    """Every leaf of a trajectory with this schema."""
    fields = {field.path: field for field in schema.steps}
    for side in ("curr_obs", "next_obs"):
        for field in schema.observations:
            path = (side, *field.path)
            fields[path] = Field(path, field.dtype, field.shape)
    return fields


def is_dropped(path: LeafPath, drop: Sequence[str]) -> bool:
    """Whether a leaf, or a dict that it is in, is named."""
    return any(dotted(path[:end]) in drop for end in range(1, len(path) + 1))


def check_names(parts: Iterable[Sequence[Contents]], fill: Mapping[str, Any], drop: Sequence[str]) -> None:
    """InvalidInput if a name is of no field."""
    paths = {
        path
        for contents in parts
        for found in contents
        if found.layout is not None
        for path in fields_of(found.layout.schema)
    }
    can_fill = sorted({dotted(path) for path in paths if not is_dropped(path, drop)})
    can_drop = sorted({dotted(path[:end]) for path in paths for end in range(1, len(path) + 1)} - {"rewards"})
    for names, known, what in ((fill, can_fill, "filled"), (drop, can_drop, "dropped")):
        for name in names:
            if name not in known:
                raise InvalidInput(f"{name!r} cannot be {what}; there are {', '.join(known) or 'no fields'}")


def common_schema(contents: Sequence[Contents], fill: Mapping[str, Any], drop: Sequence[str]) -> Schema | None:
    """The schema that all can be brought to; InvalidInput names the field that stands in the way."""
    known = [(found.directory, found.layout.schema) for found in contents if found.layout is not None]
    if not fill and not drop and all(schema == known[0][1] for _, schema in known):
        return known[0][1] if known else None
    everything = [(directory, fields_of(schema)) for directory, schema in known]
    wanted: dict[LeafPath, tuple[Path, Field]] = {}
    for directory, fields in everything:
        for path, field in fields.items():
            if is_dropped(path, drop):
                continue
            where, before = wanted.setdefault(path, (directory, field))
            if (before.dtype, before.shape) != (field.dtype, field.shape):
                raise InvalidInput(
                    f"{dotted(path)} is {before} in {where} and {field} in {directory}; they cannot be together unless "
                    "it is dropped"
                )
    for directory, fields in everything:
        for path, (where, field) in wanted.items():
            if path not in fields and dotted(path) not in fill:
                raise InvalidInput(
                    f"{dotted(path)} is {field} in {where} and missing in {directory}; fill it with a value, or drop it"
                )
    return schema_from({path: field for path, (_, field) in wanted.items()})


def fill_values(fill: Mapping[str, Any], schema: Schema | None) -> dict[str, Any]:
    """Fills as their fields need them: text of a command line becomes a number where the field is one."""
    fields = {} if schema is None else {dotted(path): field for path, field in fields_of(schema).items()}
    return {name: _fill_value(fields[name], name, value) for name, value in fill.items() if name in fields}


def _fill_value(field: Field, name: str, value: Any) -> Any:
    if field.dtype == STRING:
        if not isinstance(value, str):
            raise InvalidInput(f"the fill of {name!r} is {value!r}; expected text")
        return value
    if not isinstance(value, str):
        return value
    kind = "f" if field.dtype == BFLOAT16 else field.raw.kind
    word = {"true": "1", "false": "0"}.get(value.lower(), value)
    try:
        number: float = float(word) if kind == "f" else int(word)
    except ValueError:
        number = math.inf
    limits = {"f": (-math.inf, math.inf), "b": (0, 1)}
    least, most = limits[kind] if kind in limits else (np.iinfo(field.raw).min, np.iinfo(field.raw).max)
    if kind != "f" and not least <= number <= most:
        raise InvalidInput(f"the fill of {name!r} is {value!r}; its field is {field}")
    return number


# --- one order ----------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """What one directory contributes: as it lies there, or as it was rewritten."""

    directory: Path
    layout: Layout | None
    texts: list[str]
    listing: Listing
    segments: Mapping[int, Segment]


class Joined(NamedTuple):
    """Trajectories of several pieces, and by position the piece from which each came."""

    layout: Layout | None
    texts: list[str]
    listing: Listing
    segments: dict[int, Segment]
    space: Space | None
    """Where rows are mapped that have to be copied; their segment is IN_MEMORY."""
    owner: np.ndarray[Any, Any]


def in_order(listings: Sequence[Listing]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Of every trajectory, in the order in which they are joined: which listing it is in, and its position there.

    >>> one = Listing.empty()
    >>> in_order([one, one])[0].tolist()
    []
    """
    sizes = [len(listing) for listing in listings]
    owner = np.repeat(np.arange(len(sizes)), sizes)
    position = np.concatenate([np.arange(size) for size in sizes] or [np.empty(0, np.int64)])
    ids = np.concatenate([listing.rows["id"] for listing in listings] or [np.empty(0, np.int64)])
    order = np.lexsort((owner, ids))
    return owner[order], position[order]


def join(pieces: Sequence[Piece], files: FileOps) -> Joined:
    """All pieces, which have one layout, in one order. Ids stay as they are, and may stand twice.

    Segments that still grow, and those whose name another file has, are mapped to be copied; the others are linked.
    """
    layout = next((piece.layout for piece in pieces if piece.layout is not None), None)
    texts: list[str] = []
    tables: list[tuple[list[str], int]] = []
    segments: dict[int, Segment] = {}
    named: dict[str, int] = {}
    parts: list[Listing] = []
    space: Space | None = None
    for piece in pieces:
        start = next((start for table, start in tables if table == piece.texts), None)
        if start is None:
            start = len(texts)
            tables.append((piece.texts, start))
            texts += piece.texts
        rows = piece.listing.rows.copy()
        rows["weights"] += start
        rows["texts"] += start
        for number in np.unique(rows["segment"]).tolist():
            assert layout is not None
            theirs = piece.listing.rows["segment"] == number
            segment = piece.segments[number]
            place = named.setdefault(segment.name, len(segments)) if segment.sealed else IN_MEMORY
            if place == len(segments):
                segments[place] = segment
            elif place != IN_MEMORY and not _same_files(segments[place], segment, layout, files):
                place = IN_MEMORY
            rows["segment"][theirs] = place
            if place == IN_MEMORY:
                space = space or Space(layout)
                copied = Segment(segment.directory, segment.name, segment.rows, sealed=True)
                map_segment(copied, space, files)
                rows["first_step"][theirs] += copied.first_step
                rows["first_observation"][theirs] += copied.first_observation
        parts.append(Listing(rows, piece.listing.runs, piece.listing.chains))
    owner, position = in_order(parts)
    starts = np.cumsum([0, *(len(part) for part in parts)])
    listing = Listing.joined(parts).chosen(starts[owner] + position)
    _refuse_shared_rows(listing, [pieces[k].directory for k in owner.tolist()])
    return Joined(layout, texts, listing, segments, space, owner)


def _same_files(one: Segment, other: Segment, layout: Layout, files: FileOps) -> bool:
    """Whether two segments of one name are one: a segment can be linked into several directories."""
    try:
        return all(
            files.same_file(one.directory / name, other.directory / name) for name in file_names(one.name, layout)
        )
    except OSError as error:
        raise CheckpointError(f"cannot read {other.directory}: {error.strerror or error}") from error


def _refuse_shared_rows(listing: Listing, directories: list[Path]) -> None:
    rows = listing.rows
    order = np.lexsort((rows["first_step"], rows["segment"]))
    one, other = order[:-1], order[1:]
    end = rows["first_step"] + rows["steps"] * rows["envs"]
    shared = (rows["segment"][one] == rows["segment"][other]) & (rows["first_step"][other] < end[one])
    if shared.any():
        k = int(np.flatnonzero(shared)[0])
        pair = [f"trajectory {rows['id'][at]} of {directories[at]}" for at in (one[k], other[k])]
        raise InvalidInput(f"{pair[0]} and {pair[1]} are the same; it would be there twice")
