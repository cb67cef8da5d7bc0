"""Checkpoints of trajectories: a directory that is never written to again, under the same seam as those of groups.

    manifest.json                  sealed, the commit point: schema, segments, random state, by part
    index-<16 hex digits>.rows     the listing of a part: rows, runs, chains, one after another; then the texts, as JSON
    seg-<16 hex digits>-<k>.col    segments (see `segments`)

Several buffers can be parts of one checkpoint; the main one is called "replay". A sealed segment is linked, or copied
where links fail; rows of an open one, and of memory, are copied. `Contents` is what can be read: of a checkpoint or of
a native store, alike. Nothing that is read is trusted: files are plain files of the directory, sizes and listings are
checked before anything is mapped or looked up.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from errno import ENOENT
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias
from zlib import crc32

import msgspec
import numpy as np
from msgspec import Meta

from forebay.checkpoint.files import FileOps
from forebay.checkpoint.publish import (
    MANIFEST,
    MANIFEST_LEFTOVER,
    UNREADABLE,
    DirectoryWriter,
    Envelope,
    doing,
    encode_body,
    open_plain,
    open_published,
    read_manifest,
)
from forebay.errors import CheckpointError, DamagedData, InvalidInput
from forebay.trajectory.catalogue import FORMAT, NAME
from forebay.trajectory.listing import ROW, Listing, SegmentRows
from forebay.trajectory.schema import Layout, Schema, check_names
from forebay.trajectory.segments import (
    SEGMENT_FILE,
    MissingFile,
    Segment,
    checksum,
    file_names,
    file_sizes,
    new_name,
    open_files,
    row_bytes,
    rows_in_files,
)
from forebay.trajectory.space import Space
from forebay.trajectory.store import Store, is_store
from forebay.trajectory.window import IN_MEMORY

__all__ = [
    "MAIN",
    "Contents",
    "Manifest",
    "PartSource",
    "check_same_schema",
    "checkpoint_manifest",
    "field_texts",
    "find_directories",
    "leftovers",
    "open_contents",
    "part_names",
    "rank_directories",
    "write_checkpoint",
]

MAIN = "replay"
ENVELOPE = Envelope(FORMAT, 1)

_OURS = re.compile(rf"{SEGMENT_FILE.pattern}|index-[0-9a-f]{{16}}\.rows", re.ASCII)
_INDEX = re.compile(r"index-[0-9a-f]{16}\.rows", re.ASCII)
_RANK = re.compile(r"rank_([0-9]{1,20})", re.ASCII)
_COPY_BYTES = 8 * 2**20
_SEGMENT_BYTES = 256 * 2**20

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]


class SegmentEntry(msgspec.Struct, frozen=True):
    """What the manifest says of a segment."""

    name: str
    steps: Count
    observations: Count


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One buffer of a checkpoint."""

    schema: Schema | None
    files: list[dict[str, Any]] = []
    texts_bytes: Count
    segments: list[SegmentEntry]
    index: str
    trajectories: Count
    runs: Count
    chains: Count
    index_crc32: Count
    next_id: Count
    seed: Annotated[int, Meta(ge=0)]
    rank: Annotated[int, Meta(ge=0)]
    random: dict[str, Any] | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint of trajectories is of."""

    parts: dict[str, Part]
    extra: dict[str, Any] = {}
    """The caller's, plain JSON."""
    created_at: float = 0.0
    forebay_version: str = ""


_decoder = msgspec.json.Decoder(Manifest)


class PartSource(NamedTuple):
    """What is to be saved: a listing whose segments are numbered as in `segments`, or rows of memory of `space`."""

    layout: Layout | None
    texts: Sequence[str]
    listing: Listing
    segments: Mapping[int, Segment]
    space: Space | None
    next_id: int
    seed: int
    rank: int
    random: dict[str, Any] | None


# --- write --------------------------------------------------------------------------------------------


def write_checkpoint(
    directory: str | PathLike[str],
    parts: Mapping[str, PartSource],
    *,
    files: FileOps | None = None,
    progress: Any = None,
    replaces: bytes | None = None,
    extra: dict[str, Any] | None = None,
    check_rows: bool = True,
) -> None:
    """Save parts as the checkpoint of a directory: all of it or nothing. `progress` gets trajectories done, and all.

    `replaces`: the bytes of the manifest that is to be replaced; CheckpointError if there is another one by now.
    `check_rows=False` leaves it to the caller whether rows that are copied still have their checksum.
    """
    from forebay import __version__

    if is_store(Path(directory)):
        # Its segments would be taken for leftovers of a save.
        raise InvalidInput(f"{directory} is a store of trajectories; save a checkpoint of it to another directory")
    total = sum(len(source.listing) for source in parts.values())
    done = 0
    files = files or FileOps()

    def brought(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    with DirectoryWriter(directory, ENVELOPE, ours=_OURS, names_in=_names_in, files=files) as writer:
        if replaces is not None and read_manifest(writer.directory, files) != replaces:
            raise CheckpointError(f"{directory} was saved to meanwhile; nothing was changed there")
        written = {name: _write_part(writer, source, files, brought, check_rows) for name, source in parts.items()}
        manifest = Manifest(parts=written, extra=extra or {}, created_at=time.time(), forebay_version=__version__)
        writer.publish(encode_body(manifest))


def _write_part(
    writer: DirectoryWriter, source: PartSource, files: FileOps, brought: Callable[[int], None], check_rows: bool
) -> Part:
    entries: list[SegmentEntry] = []
    listing = source.listing
    rows = listing.rows.copy()
    for number in np.unique(rows["segment"]).tolist():
        if number == IN_MEMORY:
            continue
        assert source.layout is not None
        segment = source.segments[number]
        name = _bring(writer, segment, source.layout, files)
        theirs = listing.rows["segment"] == number
        rows["segment"][theirs] = len(entries)
        entries.append(SegmentEntry(name, segment.rows.steps, segment.rows.observations))
        brought(int(np.count_nonzero(theirs)))
    _copy_rows(writer, source, rows, entries, brought, check_rows)
    texts = msgspec.json.encode(source.texts)
    data = [_memory(part) for part in (rows, listing.runs.astype("<i8"), listing.chains.astype("<i8"))]
    data.append(memoryview(texts))
    index = f"index-{secrets.token_hex(8)}.rows"
    descriptor = writer.create(index)
    writer.write(descriptor, data)
    writer.finish(descriptor)
    crc = 0
    for part in data:
        crc = crc32(part, crc)
    return Part(
        schema=None if source.layout is None else source.layout.schema,
        files=[] if source.layout is None else source.layout.files(),
        texts_bytes=len(texts),
        segments=entries,
        index=index,
        trajectories=len(rows),
        runs=len(listing.runs),
        chains=len(listing.chains),
        index_crc32=crc,
        next_id=source.next_id,
        seed=source.seed,
        rank=source.rank,
        random=source.random,
    )


def _memory(array: np.ndarray[Any, Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _bring(writer: DirectoryWriter, segment: Segment, layout: Layout, files: FileOps) -> str:
    """Link the files of a sealed segment, or copy them under another name; the name that it has now."""
    names = file_names(segment.name, layout)
    if all(writer.link(segment.directory / name, name) for name in names):
        return segment.name
    copy = new_name()
    sizes = file_sizes(segment.rows, layout)
    with open_files(segment.directory, names, files) as opened:
        for (source, _), size, name in zip(opened, sizes, file_names(copy, layout), strict=True):
            descriptor = writer.create(name)
            at = 0
            while at < size:
                with doing("read", segment.directory):
                    data = files.read(source, min(_COPY_BYTES, size - at), at)
                if not data:
                    raise DamagedData(f"segment {segment.name} in {segment.directory} was cut off while it was copied")
                writer.write(descriptor, [data])
                at += len(data)
            writer.finish(descriptor)
    return copy


def _copy_rows(
    writer: DirectoryWriter,
    source: PartSource,
    rows: np.ndarray[Any, Any],
    entries: list[SegmentEntry],
    brought: Callable[[int], None],
    check_rows: bool,
) -> None:
    """Write the rows that are in memory (or in an open segment, by where it is mapped) into new segments."""
    which = np.flatnonzero(source.listing.rows["segment"] == IN_MEMORY)
    space, layout = source.space, source.layout
    if not len(which):
        return
    assert space is not None
    assert layout is not None
    sizes = np.cumsum(source.listing.chosen(which).bytes(layout))
    for group in np.split(which, np.flatnonzero(np.diff(sizes // _SEGMENT_BYTES)) + 1):
        name = new_name()
        steps = observations = 0
        places = []
        for k in group.tolist():
            row = source.listing.rows[k]
            places.append((int(row["first_step"]), int(row["steps"] * row["envs"])))
            places.append((int(row["first_observation"]), int(row["observations"])))
            rows[k]["segment"] = len(entries)
            rows[k]["first_step"], rows[k]["first_observation"] = steps, observations
            rows[k]["crc"] = checksum(space, *places[-2], *places[-1])
            if check_rows and row["crc"] and row["crc"] != rows[k]["crc"]:  # 0: it was only in memory so far
                raise DamagedData(
                    f"trajectory {row['id']} does not have its checksum: its file was altered. `forebay trajectories "
                    "merge --copy --skip-damaged` saves the others"
                )
            steps += places[-2][1]
            observations += places[-1][1]
        tables = [(space.steps, k, places[0::2]) for k in range(len(layout.steps))]
        tables += [(space.observations, k, places[1::2]) for k in range(len(layout.observations))]
        for (table, k, theirs), file in zip(tables, file_names(name, layout), strict=True):
            descriptor = writer.create(file)
            for start in range(0, len(theirs), 512):
                writer.write(descriptor, [row_bytes(table, *place)[k] for place in theirs[start : start + 512]])
            writer.finish(descriptor)
        entries.append(SegmentEntry(name, steps, observations))
        brought(len(group))


# --- read ---------------------------------------------------------------------------------------------


class Contents:
    """What is in a checkpoint or in a store: checked, and not mapped yet."""

    def __init__(
        self,
        directory: Path,
        kind: str,
        layout: Layout | None,
        texts: list[str],
        listing: Listing,
        segments: dict[int, Segment],
        next_id: int,
        *,
        seed: int | None = None,
        rank: int = 0,
        random: dict[str, Any] | None = None,
        left_out: int = 0,
        extra: dict[str, Any] | None = None,
        generation: str = "",
    ) -> None:
        self.directory, self.kind, self.layout, self.texts = directory, kind, layout, texts
        self.listing, self.segments, self.next_id = listing, segments, next_id
        self.seed, self.rank, self.random, self.left_out = seed, rank, random, left_out
        self.extra, self.generation = extra or {}, generation
        """`generation` tells one save to a directory from another."""

    def bytes(self) -> int:
        """Of the trajectories, without what else their segments hold."""
        return 0 if self.layout is None else int(self.listing.bytes(self.layout).sum())


def rank_directories(root: Path) -> list[Path]:
    """The `rank_<n>` of a directory, by number."""
    ranks = {int(found[1]): entry for entry in root.iterdir() if (found := _RANK.fullmatch(entry.name))}
    return [ranks[rank] for rank in sorted(ranks)]


def find_directories(path: str | PathLike[str]) -> list[Path]:
    """The checkpoints or stores of a path: itself, or its `rank_<n>` by number. CheckpointError if there is none."""
    root = Path(path)
    if not root.is_dir():
        raise CheckpointError(f"there is no directory {root}")
    if (root / MANIFEST).exists() or is_store(root):
        return [root]
    ordered = rank_directories(root)
    holding = [entry for entry in ordered if (entry / MANIFEST).exists() or is_store(entry)]
    if not holding:
        raise CheckpointError(
            f"there are no trajectories in {root}: neither {MANIFEST} nor {NAME}, nor a directory rank_<n> with one"
        )
    if len(holding) < len(ordered):
        missing = next(entry for entry in ordered if entry not in holding)
        raise CheckpointError(f"{missing} has no trajectories, unlike {holding[0]}: the checkpoint is not complete")
    return holding


def checkpoint_manifest(directory: Path, files: FileOps | None = None) -> Manifest:
    """What a checkpoint says of itself."""
    return open_published(directory, ENVELOPE, _decoded, files or FileOps())


def part_names(directory: Path, files: FileOps | None = None) -> list[str]:
    """The parts of a checkpoint; a store has only the main one."""
    if not (directory / MANIFEST).exists():
        return [MAIN]
    return sorted(checkpoint_manifest(directory, files).parts)


def leftovers(directory: Path, files: FileOps | None = None) -> list[str]:
    """Files of a checkpoint that its manifest does not name: of the one before it, or of a save that was cut off."""
    files = files or FileOps()
    named = open_published(directory, ENVELOPE, _names_in, files)
    with doing("list", directory):
        there = files.list_directory(directory)
    return sorted(n for n in there if n not in named and (_OURS.fullmatch(n) or MANIFEST_LEFTOVER.fullmatch(n)))


def open_contents(directory: Path, part: str = MAIN, files: FileOps | None = None) -> Contents:
    """Read what a checkpoint or a store says, and check it. Maps and changes nothing."""
    files = files or FileOps()
    if (directory / MANIFEST).exists():
        return open_published(directory, ENVELOPE, lambda body: _contents(directory, body, part, files), files)
    if part != MAIN:
        raise CheckpointError(f"{directory} is a store; it has no part {part!r}")
    store = Store(directory, read_only=True, files=files)
    try:
        space = None if store.layout is None else Space(store.layout)
        listing, segments = store.load(space)
        listing = listing.chosen(np.flatnonzero(listing.rows["id"] >= store.floor_id))
        for segment in segments.values():
            if segment.rows == SegmentRows(0, 0):
                segment.sealed = False  # its files are missing
        return Contents(
            directory, "store", store.layout, store.texts, listing, segments, store.next_id, left_out=store.left_out
        )
    finally:
        store.close(clean=False)


def _contents(directory: Path, body: bytes, part: str, files: FileOps) -> Contents:
    manifest = _decoded(body)
    found = manifest.parts.get(part)
    if found is None:
        raise CheckpointError(f"{directory} has no part {part!r}; it has {', '.join(sorted(manifest.parts))}")
    listing, texts = _read_index(directory, found, files)
    layout, segments = None, {}
    if found.schema is not None:
        check_names(found.schema)
        layout = Layout(found.schema)
        segments = _read_segments(directory, found, layout, files)
        listing.check({number: segment.rows for number, segment in segments.items()}, layout, len(texts))
    elif len(listing) or found.segments:
        raise DamagedData(f"{directory / MANIFEST} has trajectories and no schema")
    if len(listing) and int(listing.rows["id"][-1]) >= found.next_id:
        raise DamagedData(f"{directory / MANIFEST} would give an id twice")
    return Contents(
        directory,
        "checkpoint",
        layout,
        texts,
        listing,
        segments,
        found.next_id,
        seed=found.seed,
        rank=found.rank,
        random=found.random,
        extra=manifest.extra,
        generation=sha256(body).hexdigest(),
    )


def _read_segments(directory: Path, part: Part, layout: Layout, files: FileOps) -> dict[int, Segment]:
    segments = {}
    for number, entry in enumerate(part.segments):
        rows = SegmentRows(entry.steps, entry.observations)
        try:
            with open_files(directory, file_names(entry.name, layout), files) as opened:
                have = rows_in_files([size for _, size in opened], layout)
        except MissingFile as error:  # two saves may have removed it meanwhile: there is another manifest then
            raise FileNotFoundError(ENOENT, "it is missing", str(error.path)) from None
        if have.steps < rows.steps or (layout.observations and have.observations < rows.observations):
            raise DamagedData(
                f"segment {entry.name} in {directory} has {have.steps} and {have.observations} rows; the manifest says "
                f"{rows.steps} and {rows.observations}"
            )
        segments[number] = Segment(directory, entry.name, rows, sealed=True)
    return segments


def _read_index(directory: Path, part: Part, files: FileOps) -> tuple[Listing, list[str]]:
    path = directory / part.index
    sizes = [part.trajectories * ROW.itemsize, part.runs * 16, part.chains * 16, part.texts_bytes]
    descriptor, size = open_plain(path, files)
    try:
        if size != sum(sizes):
            raise DamagedData(f"{path} has {size} bytes; its manifest says {sum(sizes)}")
        with doing("read", path):
            data = files.read(descriptor, size, 0)
    finally:
        with suppress(OSError):
            files.close(descriptor)
    if len(data) != size or crc32(data) != part.index_crc32:
        raise DamagedData(f"the checksum of {path} does not match: it was altered")
    rows = np.frombuffer(data, ROW, part.trajectories)
    pairs = np.frombuffer(data, "<i8", 2 * (part.runs + part.chains), sizes[0]).reshape(-1, 2)
    try:
        texts = msgspec.json.decode(memoryview(data)[size - part.texts_bytes :], type=list[str])
    except UNREADABLE as error:
        raise DamagedData(f"the texts of {path} cannot be read: {error}") from None
    return Listing(rows, pairs[: part.runs], pairs[part.runs :]), texts


def _decoded(body: bytes) -> Manifest:
    try:
        manifest = _decoder.decode(body)
    except UNREADABLE as error:
        raise DamagedData(f"the manifest of the trajectories cannot be read: {error}") from None
    for part in manifest.parts.values():
        if not _INDEX.fullmatch(part.index):
            raise DamagedData(f"the manifest names a file {part.index[:100]!r}; expected index-<16 hex digits>.rows")
        if len({entry.name for entry in part.segments}) != len(part.segments):
            raise DamagedData("the manifest names a segment twice")
    return manifest


def _names_in(body: bytes) -> set[str]:
    names = set()
    for part in _decoded(body).parts.values():
        names.add(part.index)
        if part.schema is not None:
            layout = Layout(part.schema)
            names.update(name for entry in part.segments for name in file_names(entry.name, layout))
    return names


def check_same_schema(contents: Sequence[Contents]) -> Layout | None:
    """The layout that all have; InvalidInput says where two differ."""
    known = [found for found in contents if found.layout is not None]
    for found in known[1:]:
        assert found.layout is not None
        assert known[0].layout is not None
        mine, theirs = field_texts(known[0].layout), field_texts(found.layout)
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                raise InvalidInput(
                    f"{name} is {mine.get(name, 'missing')} in {known[0].directory} and "
                    f"{theirs.get(name, 'missing')} in {found.directory}; they cannot be together"
                )
        if known[0].layout.schema != found.layout.schema:
            raise InvalidInput(
                f"{known[0].directory} and {found.directory} have their fields in another order; merge them first"
            )
    return known[0].layout if known else None


def field_texts(layout: Layout) -> dict[str, str]:
    """By name: what each field is."""
    shared = {
        f"{side}.{'.'.join(field.path)}": str(field)
        for field in layout.schema.observations
        for side in ("curr_obs", "next_obs")
    }
    return {**{".".join(field.path): str(field) for field in layout.schema.steps}, **shared}
