"""Saving and loading buffers: what goes into a checkpoint, and which trajectories a rank takes out of one.

`load` takes any checkpoint into any number of ranks. If there are as many ranks as wrote it, each gets back its own
trajectories and goes on with its own random sequence. Otherwise all trajectories are laid end to end, rank after rank,
and cut into contiguous blocks whose sizes differ by at most one, the first ranks having the larger ones; the random
sequences are then keyed anew, and nobody repeats what was drawn before. Files are mapped where they are. A buffer is as
it was until everything that it is to become was found whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from forebay.checkpoint.files import FileOps
from forebay.core.validate import checked_integer
from forebay.errors import DamagedData, InvalidInput
from forebay.trajectory.checkpoint import Contents, check_same_schema, find_directories, open_contents
from forebay.trajectory.listing import Listing
from forebay.trajectory.schema import Layout
from forebay.trajectory.segments import Segment, damaged
from forebay.trajectory.space import Space
from forebay.trajectory.store import map_segment

__all__ = ["Shard", "Taken", "block", "keyed_random", "map_taken", "random_state", "restored_random", "take"]


class Shard(NamedTuple):
    """Which of how many ranks loads."""

    rank: int
    world_size: int

    @classmethod
    def of(cls, is_distributed: bool, local_rank: int, world_size: int) -> Shard:
        """Checked; everything goes to one rank unless it is distributed."""
        if not is_distributed:
            return cls(0, 1)
        checked_integer("world_size", world_size, least=1)
        checked_integer("local_rank", local_rank, least=0)
        if local_rank >= world_size:
            raise InvalidInput(
                f"local_rank is {local_rank}; with world_size {world_size} expected 0 to {world_size - 1}"
            )
        return cls(local_rank, world_size)


class Taken(NamedTuple):
    """What a rank takes: trajectories with segments numbered -2, -3, ..., their texts, and how to draw from then on."""

    layout: Layout | None
    listing: Listing
    segments: dict[int, Segment]
    texts: list[str]
    next_id: int
    random: dict[str, Any] | None
    extra: dict[str, Any]
    """What the caller of the save added."""
    generations: tuple[str, ...]
    """Which saves it is of."""

    def renumbered(self, lowest: int) -> Taken:
        """The same with segments below a number that is in use."""
        shift = min(lowest, -1) + 1
        rows = self.listing.rows
        return self._replace(
            listing=self.listing.with_rows(segment=rows["segment"] + shift),
            segments={number + shift: segment for number, segment in self.segments.items()},
        )


def block(count: int, shard: Shard) -> slice:
    """The contiguous block of a rank.

    >>> [block(7, Shard(rank, 3)) for rank in range(3)]
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    size, more = divmod(count, shard.world_size)
    start = shard.rank * size + min(shard.rank, more)
    return slice(start, start + size + (shard.rank < more))


def take(path: str | Path, part: str, shard: Shard, files: FileOps) -> Taken:
    """What a rank of so many gets of the checkpoint or store at a path."""
    directories = find_directories(path)
    if len(directories) == shard.world_size:
        return _joined([open_contents(directories[shard.rank], part, files)], same_world=True)
    contents = [open_contents(directory, part, files) for directory in directories]
    everything = _joined(contents, same_world=False)
    mine = block(len(everything.listing), shard)
    return everything._replace(listing=everything.listing.chosen(np.arange(len(everything.listing))[mine]))


def _joined(contents: Sequence[Contents], *, same_world: bool) -> Taken:
    layout = check_same_schema(contents)
    segments: dict[int, Segment] = {}
    texts: list[str] = []
    parts: list[Listing] = []
    for found in contents:
        numbers = {}
        for number, segment in found.segments.items():
            numbers[number] = -2 - len(segments)
            segments[numbers[number]] = segment
        rows = found.listing.rows
        parts.append(
            found.listing.with_rows(
                segment=[numbers[number] for number in rows["segment"].tolist()],
                weights=rows["weights"] + len(texts),
                texts=rows["texts"] + len(texts),
            )
        )
        texts += found.texts
    listing = Listing.joined(parts)
    next_id = max((found.next_id for found in contents), default=0)
    if (np.diff(listing.rows["id"]) <= 0).any():  # every rank counts for itself
        listing = listing.with_rows(id=np.arange(next_id, next_id + len(listing)))
        next_id += len(listing)
    return Taken(
        layout,
        listing,
        segments,
        texts,
        next_id,
        contents[0].random if same_world else None,
        contents[0].extra,
        tuple(found.generation for found in contents),
    )


def map_taken(
    taken: Taken,
    space: Space,
    files: FileOps,
    *,
    verify: bool,
    progress: Any = None,
    lock: AbstractContextManager[Any] | None = None,
) -> None:
    """Map the segments that are needed; DamagedData if a trajectory does not have its crc.

    `lock` is of those who map into the same space.
    """
    needed = set(taken.listing.rows["segment"].tolist())
    lock = lock or nullcontext()
    try:
        with lock:
            for number in needed:
                map_segment(taken.segments[number], space, files)
        if verify:
            wrong = damaged(taken.listing, taken.segments, space, progress)
            if len(wrong):
                ids = taken.listing.rows["id"][wrong]
                raise DamagedData(
                    f"{len(ids)} trajectories do not have their checksum: {ids[:20].tolist()}; their files were altered"
                )
    except BaseException:
        with lock:
            for number in needed:
                taken.segments[number].unmap(space)
        raise


# --- the random sequence ------------------------------------------------------------------------------


class _Philox(msgspec.Struct):
    """The state of numpy's Philox, as JSON has it."""

    counter: list[int]
    key: list[int]
    buffer: list[int]
    buffer_pos: int
    has_uint32: int
    uinteger: int


def keyed_random(seed: int, rank: int, counter: Sequence[int] = (0, 0, 0, 0)) -> np.random.Generator:
    """The random sequence of a seed and a rank, each from 0 to 2**64 - 1."""
    # Not as a list of int: numpy would make floats of large ones.
    key, start = np.array([seed, rank], np.uint64), np.array(counter, np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=start))


def random_state(generator: np.random.Generator) -> dict[str, Any]:
    """Where a generator stands, as plain numbers."""
    state: dict[str, Any] = dict(generator.bit_generator.state)
    return {
        "counter": state["state"]["counter"].tolist(),
        "key": state["state"]["key"].tolist(),
        "buffer": state["buffer"].tolist(),
        "buffer_pos": int(state["buffer_pos"]),
        "has_uint32": int(state["has_uint32"]),
        "uinteger": int(state["uinteger"]),
    }


def restored_random(saved: Any, seed: int, shard: Shard, next_id: int, *, rank: int = 0) -> np.random.Generator:
    """A generator that goes on where it stood; or one with a key and a counter that were not used before."""
    if saved is None:
        return keyed_random(seed, rank, counter=(0, shard.rank, next_id, shard.world_size))
    try:
        found = msgspec.convert(saved, _Philox)
        philox = np.random.Philox(key=[0, 0])
        philox.state = {
            "bit_generator": "Philox",
            "state": {
                "counter": np.array(found.counter, np.uint64).reshape(4),
                "key": np.array(found.key, np.uint64).reshape(2),
            },
            "buffer": np.array(found.buffer, np.uint64).reshape(4),
            "buffer_pos": _between(found.buffer_pos, 0, 4),
            "has_uint32": _between(found.has_uint32, 0, 1),
            "uinteger": _between(found.uinteger, 0, 2**32 - 1),
        }
    except (msgspec.ValidationError, ValueError, TypeError, OverflowError) as error:
        raise DamagedData(f"the random state of the checkpoint cannot be read: {error}") from None
    return np.random.Generator(philox)


def _between(value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise ValueError(f"{value} is not between {least} and {most}")
    return value
