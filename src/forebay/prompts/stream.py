"""The prompts of one task: a data set that is one generation of its stream, and the state that the store keeps of it.

A position means a record only in the data set that it was drawn from. So the state of a task has a fingerprint of its
data set, which is compared before anything is drawn (`ChangedDataset`). `Sampler.set_prompts` gives a task other
prompts: a new generation. Positions and fingerprints belong to a generation; the cursor, and with it the group ids,
continues, and the number of a record is counted from the cursor at which its generation began.

The store decides which generation a task is at. A stream that follows another one begins with the first draw that finds
the store still there, and the draw stores the new state in the same step as the groups. If another producer already
began it, this one joins.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from forebay.core.fingerprint import Fingerprint, SourceState, differences, pack_state, unpack_state
from forebay.core.validate import checked_integer
from forebay.errors import ChangedDataset, InvalidDataset, InvalidInput, InvalidRecord

if TYPE_CHECKING:
    from forebay.prompts.sources import Source

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a cursor is: `known` is the stored state of this generation; None if it begins here."""

    known: SourceState | None
    generation: int
    begun_at: int


class Warnings:
    """Logs each warning once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, message: str, *values: object) -> None:
        """Log a warning, unless it was logged before."""
        if message not in self._said:
            self._said.add(message)
            log.warning(message, *values)


class Stream:
    """One generation of a task's prompts. Not for several threads at once: the sampler holds its lock meanwhile."""

    def __init__(
        self,
        task_name: str,
        source: Source,
        *,
        group_size: int,
        allow_changed_data: bool,
        warnings: Warnings,
        before: Stream | None = None,
    ) -> None:
        self.source = source
        self.before = before  # the generation before, until the store is known to have reached this one
        self.used = False  # whether anything was drawn or compared
        self.state: bytes | None = None  # the last state that was made here
        self.here = Place(None, 0, 0)  # the place of that state
        self._known_generation: int | None = None
        self._task_name = task_name
        self._group_size = group_size
        self._allow_changed_data = allow_changed_data
        self._warnings = warnings

    @property
    def _generation(self) -> int:
        if self._known_generation is None:
            return 0 if self.before is None else self.before._generation + 1
        return self._known_generation

    def followed_by(self, source: Source) -> Stream:
        """The stream with another data set: the next generation, or in place of this one if nothing used it yet."""
        follows = self.used or self.before is not None
        return Stream(
            self._task_name,
            source,
            group_size=self._group_size,
            allow_changed_data=self._allow_changed_data,
            warnings=self._warnings,
            before=self if follows else None,
        )

    def place(self, cursor: int, state: bytes | None) -> Place:
        """The place of a stored position; ChangedDataset if it belongs to another data set. May read records."""
        if state is None:
            # Nothing was drawn, or only by a version of Forebay that kept no state.
            return Place(None, 1, cursor) if self.before is not None and cursor else Place(None, 0, 0)
        if state == self.state:
            return self.here
        known = unpack_state(state)
        if self._follows(known):
            return Place(None, known.generation + 1, cursor)
        self._refuse_changes(cursor, known)
        self._known_generation = known.generation
        return Place(known, known.generation, known.begun_at)

    def after(self, cursor: int, state: bytes | None, place: Place, loader: bytes | None) -> bytes | None:
        """The state to store with records that were read at a place; None if the stored one is still right."""
        # Compared again: the fingerprint of a loader grows as it is read. It cannot read earlier records again.
        known = place.known
        changed = known is not None and self._refuse_changes(cursor, known)
        now = self._fingerprint()
        if known is not None and not changed:
            before, now = now, now.completed(known.fingerprint)
            if len(before.records) < len(now.records) or before.records.count(None) > now.records.count(None):
                self._warnings.warn(
                    "data_unverified task=%s: not all records of the fingerprint can be read again", self._task_name
                )
        if now.unverified:
            self._warnings.warn("data_unverified task=%s: %s", self._task_name, "; ".join(now.unverified))
        own = SourceState(fingerprint=now, loader=loader, generation=place.generation, begun_at=place.begun_at)
        self.here, self.state = Place(own, own.generation, own.begun_at), pack_state(own)
        self._known_generation = own.generation
        return None if self.state == state else self.state

    def _follows(self, known: SourceState) -> bool:
        """Whether the store is still at an earlier generation, so that this one begins with the next draw."""
        if self.before is None or (known.generation >= self._generation and not self._changes(known)):
            return False
        return self.before._holds(known) or (self._allow_changed_data and bool(self._changes(known)))

    def _holds(self, known: SourceState) -> bool:
        """Whether a state is that of this data set, or of one before it that was never seen in the store."""
        try:
            if not self._changes(known):
                return True
        except InvalidDataset:
            pass  # a data set that was replaced need not be readable any more
        return self.before is not None and self.before._holds(known)

    def _changes(self, known: SourceState) -> dict[str, tuple[Any, Any]]:
        changes = differences(known.fingerprint, self._fingerprint())
        if any(name.startswith("record ") for name in changes):
            changes = differences(known.fingerprint, self._fingerprint(again=True))
        return changes

    def _refuse_changes(self, cursor: int, known: SourceState) -> bool:
        """ChangedDataset if the data set has changed and that is not allowed; whether it has changed."""
        changes = self._changes(known)
        if changes and not self._allow_changed_data:
            raise ChangedDataset(self._task_name, cursor, changes, known.generation)
        if changes:
            self._warnings.warn(
                "data_changed task=%s changes=%s: allow_changed_data was given", self._task_name, changes
            )
        return bool(changes)

    def _fingerprint(self, *, again: bool = False) -> Fingerprint:
        return replace(self.source.fingerprint(again=again), group_size=self._group_size)


class Streams(dict[str, Stream]):
    """The streams of a sampler, by task. A new task draws from `source`; `lock` is held while records are read."""

    def __init__(self, source: Source, *, group_size: int, allow_changed_data: bool) -> None:
        super().__init__()
        self.source = source
        self.lock = threading.RLock()
        self.warnings = Warnings()
        self._group_size = group_size
        self._allow_changed_data = allow_changed_data

    def __missing__(self, task_name: str) -> Stream:
        stream = self[task_name] = Stream(
            task_name,
            self.source,
            group_size=self._group_size,
            allow_changed_data=self._allow_changed_data,
            warnings=self.warnings,
        )
        return stream

    def over(self, source: Source) -> Streams:
        """New streams over another source, with the same options; they share the lock."""
        streams = Streams(source, group_size=self._group_size, allow_changed_data=self._allow_changed_data)
        streams.lock, streams.warnings = self.lock, self.warnings
        return streams

    def change(self, source: Source, task_name: str | None) -> None:
        """Give one task, or all of them (None), another data set."""
        if task_name is None:
            self.source = source
        for name in list(self) if task_name is None else (task_name,):
            self[name] = self[name].followed_by(source)

    def compare(self, task_name: str, cursor: int, state: bytes | None) -> None:
        """ChangedDataset if a stored position of a task belongs to another data set. May read records."""
        with self.lock:
            self[task_name].place(cursor, state)

    def drawn_to_end(self, task_name: str, cursor: int, state: bytes | None) -> int | None:
        """The number of records of the generation if all of its epochs were drawn, else None. May read a record."""
        with self.lock:
            stream = self[task_name]
            place, source = stream.place(cursor, state), stream.source
            drawn = cursor - place.begun_at
            if (end := source.end()) is not None:
                return drawn if drawn >= end else None
            source.restore(drawn, None if place.known is None else place.known.loader)
            try:
                return drawn if source.read(drawn) is None else None  # a loader can read its last record again
            except InvalidRecord:
                return None


class Positions(dict[str, tuple[int, bytes | None]]):
    """The position of each task of a sampler without a buffer: its cursor and the state there."""

    def state_dict(self) -> dict[str, Any]:
        """The positions as plain data: one state, or one for each task if tasks are at different generations."""
        cursors = {name: cursor for name, (cursor, _) in self.items()}
        states = {name: state for name, (_, state) in self.items()}
        if len(set(states.values())) > 1:
            return {"cursors": cursors, "source": None, "sources": states}
        return {"cursors": cursors, "source": next(iter(states.values()), None)}

    @classmethod
    def load(cls, saved: Any) -> Positions:
        """The positions of a `state_dict`; InvalidInput if it is something else."""
        values = saved if isinstance(saved, Mapping) else {}
        cursors, source, sources = values.get("cursors"), values.get("source"), values.get("sources", {})
        if (
            not isinstance(cursors, dict)
            or not isinstance(sources, dict)
            or not all(isinstance(state, (bytes, type(None))) for state in (source, *sources.values()))
        ):
            raise InvalidInput(f"{saved!r:.80} is not the state of a sampler; expected a result of state_dict()")
        return cls(
            (str(name), (checked_integer(f"cursor of {name!r}", cursor, least=0), sources.get(name, source)))
            for name, cursor in cursors.items()
        )
