"""Which prompt comes next: one that has to be generated again, or the next of the data set.

Drawing is issuing: `SamplerWithReplayBuffer` writes the groups that it draws into the buffer, in flight, together with
the task's position, in one step. So a crash skips no drawn group, a resume finds its position in the store, and
several processes can draw from one. Group ids count the groups drawn for a task and never restart. The caller owns the
groups that it gets: their lists and dicts may be changed.

A fingerprint of the data set is kept beside the position, and is compared before anything is drawn: positions are not
applied to another data set (`ChangedDataset`), unless `allow_changed_data` says so. `set_prompts` gives a task other
prompts, as a new generation of its stream (see `stream`). With `epochs`, drawing ends (`EndOfData`).

`Sampler` alone does the same without a buffer, and keeps its own position (`state_dict`).
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack

from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.internal import Issued, internals
from forebay.core.aio import DATA, Turns, in_thread, see_through, uncancelled
from forebay.core.ledger import number_rollouts
from forebay.core.payload import remember_prompt
from forebay.core.rollout import DRAWABLE, RolloutState, Status
from forebay.core.validate import checked_integer, checked_task
from forebay.errors import (
    CursorMoved,
    EndOfData,
    ForebayError,
    InvalidDataset,
    InvalidInput,
    InvalidRecord,
    UnsupportedPayload,
)
from forebay.prompts.loader import LoaderSource
from forebay.prompts.sources import (
    PromptBuilder,
    Source,
    Tokenize,
    ToRolloutState,
    independent,
    is_bad,
    nothing_but_bad,
    open_source,
)
from forebay.prompts.stream import Positions, Stream, Streams
from forebay.storage.base import Share

log = logging.getLogger(__name__)

Groups: TypeAlias = list[list[RolloutState]]
Statuses: TypeAlias = Sequence[Status]
Ids: TypeAlias = Collection[int]

_ISSUED_AT_ONCE = 64
"""Prompts that are built before the event loop gets its turn."""

_COPIED_AT_ONCE = 16
"""Groups whose lists are copied before the event loop gets its turn."""

_MAX_BAD_IN_A_ROW = 1_000


class _Drawn(NamedTuple):
    """Groups from the data set, the index of each record there, and the source's state after them (None: as it was)."""

    groups: Groups
    indexes: list[int]
    state: bytes | None


class SamplerOptions(TypedDict, total=False):
    """The options of both samplers; see `Sampler`."""

    group_size: int
    seed: int
    shuffle: bool
    to_rollout_state: ToRolloutState | None
    tokenize: Tokenize | None
    skip_bad_records: bool
    offline: bool
    allow_changed_data: bool
    epochs: int | None


class Sampler:
    """Draws prompts from a data set; keeps only the position.

    `dataset`: a list, a data set (`__len__`, `__getitem__`), a loader (`__iter__`, best with `state_dict`), the path of
    a JSONL file, or a `PromptSource`. `group_size` members per group. `to_rollout_state` maps a record of another
    shape; `tokenize` gets the RolloutState of a record, not its messages, and returns its `prompt_ids`
    (`chat_tokenize` makes one from a tokenizer). A record that makes no prompt is an error, or, with
    `skip_bad_records`, a group that failed. A response in a record is dropped and counted (`dropped_responses`),
    because the weights that made it are unknown; `offline=True` takes it as the answer instead: it is judged and
    trained on, and nothing is generated.
    Stores and checkpoints keep a fingerprint of the data set; continuing with another one is refused
    (`ChangedDataset`) unless `allow_changed_data=True`, which continues and keeps the new fingerprint.
    `epochs`: the number of passes over the data set; then nothing new is drawn (`EndOfData`). It may be raised later.
    Give it to a strategy, and it draws through the strategy's buffer (`with_buffer`).
    """

    def __init__(
        self,
        dataset: Any,
        *,
        group_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        to_rollout_state: ToRolloutState | None = None,
        tokenize: Tokenize | None = None,
        skip_bad_records: bool = False,
        offline: bool = False,
        allow_changed_data: bool = False,
        epochs: int | None = None,
    ) -> None:
        self.epochs = None if epochs is None else checked_integer("epochs", epochs, least=1)
        self._seed, self._shuffle = seed, shuffle
        self.group_size = checked_integer("group_size", group_size, least=1)
        self.streams = Streams(self._open(dataset), group_size=self.group_size, allow_changed_data=allow_changed_data)
        self.prompts = PromptBuilder(
            to_rollout_state=to_rollout_state,
            tokenize=tokenize,
            skip_bad_records=skip_bad_records,
            offline=offline,
            warnings=self.streams.warnings,
        )
        self._positions = Positions()
        self._turns = Turns()

    def _open(self, dataset: Any) -> Source:
        return open_source(dataset, seed=self._seed, shuffle=self._shuffle, epochs=self.epochs)

    def __len__(self) -> int:
        """The number of records of the data set."""
        return len(self.source)

    @property
    def source(self) -> Source:
        """The source of tasks that were not given prompts of their own."""
        return self.streams.source

    @property
    def dropped_responses(self) -> int:
        """Records with a response, which was dropped."""
        return self.prompts.dropped_responses

    def with_buffer(self, replay_buffer: ReplayBuffer) -> SamplerWithReplayBuffer:
        """The same prompts, drawn through a buffer."""
        bound = SamplerWithReplayBuffer.__new__(SamplerWithReplayBuffer)
        bound._bind(self, replay_buffer)
        return bound

    def over(self, source: Source, *, epochs: int | None) -> Sampler:
        """A sampler with the same options and other tasks, for an evaluation."""
        sampler = copy.copy(self)
        sampler.epochs, sampler.streams = epochs, self.streams.over(source)
        sampler._positions, sampler._turns = Positions(), Turns()
        return sampler

    def set_prompts(self, dataset: Any, *, task_name: str | None = None) -> None:
        """Draw from another data set from now on: for one task, or for all tasks of this sampler.

        This opens a new generation of the stream: the next draw begins with its first record, and group ids continue.
        Groups that were drawn before are unaffected. To resume, give the sampler the data set of the stored generation.
        A task that this sampler has not drawn from or compared yet is only given the data set, without a new
        generation.
        """
        self.streams.change(self._open(dataset), None if task_name is None else checked_task(task_name))

    async def sample(self, task_name: str) -> list[RolloutState]:
        """The next group of a task; EndOfData after the last epoch."""
        checked_task(task_name)
        async with self._turns():
            source = self.streams[task_name].source
            others = [name for name in self._positions.keys() - {task_name} if self.streams[name].source is source]
            if isinstance(source, LoaderSource) and others:
                raise InvalidInput(
                    f"this loader serves task {others[0]!r}, and cannot also serve {task_name!r}; use a sampler per "
                    "task"
                )
            for _ in range(_MAX_BAD_IN_A_ROW):
                cursor, before = self._positions.get(task_name, (0, None))
                stream = self.streams[task_name]
                drawn = await self.read(stream, cursor, 1, before)
                if not drawn.groups:
                    if (ended := await self.end_of_data(task_name, cursor, before)) is not None:
                        raise ended
                    continue  # other prompts were set meanwhile
                stream.before = None
                self._positions[task_name] = (cursor + 1, before if drawn.state is None else drawn.state)
                (group,) = drawn.groups
                if not is_bad(group):
                    break
            else:
                raise nothing_but_bad(_MAX_BAD_IN_A_ROW, group)
        remember_prompt(group)
        for state in group:
            state.task_name, state.group_id = task_name, cursor
            independent(state)
        number_rollouts(group, cursor)
        return group

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain data."""
        return self._positions.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of another sampler of the same data set, seed and order."""
        self._positions = Positions.load(state)

    # --- prompts by number ------------------------------------------------------------------------------

    async def read(self, stream: Stream, cursor: int, n: int, state: bytes | None) -> _Drawn:
        """The groups from `cursor` on, fewer at the end of the data; `state` is the stored state there.

        A sequential source is read one by one.
        """
        stream.used = True
        if self.prompts.inline and stream.source.inline and state is not None and state == stream.state:
            return self._read(stream, cursor, n, state)
        return await in_thread(lambda: self._read(stream, cursor, n, state), pool=DATA)

    def _read(self, stream: Stream, cursor: int, n: int, state: bytes | None) -> _Drawn:
        with self.streams.lock:  # samplers of several buffers may share a loader
            source, current = stream.source, state is not None and state == stream.state
            place = stream.here if current else stream.place(cursor, state)
            first = cursor - place.begun_at
            source.restore(first, None if place.known is None else place.known.loader)
            indexes, groups = [], []
            for number in range(first, first + n):
                try:
                    found = source.read(number)
                    if found is None:
                        break
                    index, record = found
                    prompt = self.prompts.build(record, index)
                except InvalidRecord as error:
                    index, prompt = error.index, self.prompts.failed(error)
                indexes.append(index)
                # Members share their prompt, which is stored once; a producer that draws them gets copies.
                groups.append([prompt.__copy__() for _ in range(self.group_size)])
            loader = source.state()
            after = None
            if groups and not (current and loader is None):
                after = stream.after(cursor, state, place, loader)
            return _Drawn(groups, indexes, after)

    async def compare_data(self, task_name: str, cursor: int, source_state: bytes | None) -> None:
        """ChangedDataset if a position of a task belongs to another data set. Reads records; draws nothing."""
        stream = self.streams[task_name]
        stream.used = True
        if source_state is not None and source_state != stream.state:
            await in_thread(lambda: self.streams.compare(task_name, cursor, source_state), pool=DATA)

    async def end_of_data(self, task_name: str, cursor: int, state: bytes | None) -> EndOfData | None:
        """The error for a position that is the end of the data; None if it is not. Draws nothing."""
        if self.epochs is None:
            return None
        self.streams[task_name].used = True
        drawn = await in_thread(lambda: self.streams.drawn_to_end(task_name, cursor, state), pool=DATA)
        return None if drawn is None else EndOfData.of(task_name, drawn, self.epochs)


class SamplerWithReplayBuffer:
    """Draws through a buffer: retries first, then the data set; drawn groups are in flight there. See `Sampler`."""

    def __init__(self, dataset: Any, replay_buffer: ReplayBuffer, **options: Unpack[SamplerOptions]) -> None:
        self._bind(Sampler(dataset, **options), replay_buffer)

    def _bind(self, prompts: Sampler, replay_buffer: ReplayBuffer) -> None:
        self.replay_buffer = replay_buffer
        self._prompts = prompts
        self._internals = internals(replay_buffer)
        self._turns = Turns()
        self._read_ahead: tuple[Stream, int, bytes | None, _Drawn] | None = None
        self._positions: dict[str, tuple[int, int, bytes | None]] = {}  # restores of the buffer, cursor, state
        self._bad_in_a_row = 0
        self._compared: set[str] = set()  # tasks whose position was compared before anything was drawn again

    def __len__(self) -> int:
        """The number of records of the data set."""
        return len(self._prompts)

    def set_prompts(self, dataset: Any, *, task_name: str | None = None) -> None:
        """Draw from another data set from now on. See `Sampler.set_prompts`."""
        self._prompts.set_prompts(dataset, task_name=task_name)

    @property
    def group_size(self) -> int:
        """The number of samples of a group."""
        return self._prompts.group_size

    @property
    def dropped_responses(self) -> int:
        """Records with a response, which was dropped."""
        return self._prompts.dropped_responses

    async def compare_data(self, task_name: str, cursor: int, source_state: bytes | None) -> None:
        """ChangedDataset if a position of a task belongs to another data set. Reads records; draws nothing."""
        await self._prompts.compare_data(task_name, cursor, source_state)

    async def sample(self, task_name: str, statuses: Statuses = DRAWABLE) -> list[RolloutState]:
        """One group, in flight from now on; waits for capacity."""
        return (await self.draw(1, task_name, statuses))[0]

    async def draw(
        self, n: int, task_name: str, statuses: Statuses = DRAWABLE, *, timeout_s: float | None = None, own: bool = True
    ) -> Groups:
        """Up to n groups, in flight from now on: at least one, and no more than fit into the buffer.

        Retries of these statuses first, in order of group_id; then the data set. WaitTimeout if none fitted; EndOfData
        if the data set has ended and nothing can be retried now. Not `own`: lists and dicts are shared with the buffer,
        for callers that copy before they change any.
        """
        checked_integer("n", n, least=1)

        async def attempt() -> Groups | None:
            drawn = await self.try_draw(n, task_name, statuses, own=own)
            if not drawn and (ended := await self._ended(task_name)) is not None:
                raise ended
            return drawn or None

        what = f"capacity to draw {n} groups of task {task_name!r}"
        return await self._internals.until(attempt, what, (task_name,), timeout_s=timeout_s)

    async def try_draw(
        self, n: int, task_name: str, statuses: Statuses = DRAWABLE, *, own: bool = True, share: Share | None = None
    ) -> Groups:
        """As `draw`, without waiting: maybe none. `share`: no more than it allows."""
        return await self._draw(n, task_name, statuses, share, new=True, own=own)

    async def exhausted(self, task_name: str) -> bool:
        """Whether all epochs of a task were drawn; groups may still be retried. Without `epochs` always False."""
        return await self._ended(task_name) is not None

    async def _ended(self, task_name: str) -> EndOfData | None:
        if self._prompts.epochs is None:
            return None
        async with self._turns():  # a loader is read at one position at a time
            return await self._prompts.end_of_data(task_name, *await self._internals.position(task_name))

    async def draw_again(
        self,
        n: int,
        task_name: str,
        statuses: Statuses = DRAWABLE,
        *,
        own: bool = True,
        first: Ids = (),
        share: Share | None = None,
    ) -> Groups:
        """Up to n groups of these statuses, in flight from now on; maybe none. Never waits.

        `first`: ids of groups that are drawn before the others, whichever drawable status they have. `share`: no more
        than it allows.
        """
        drawn = await self._draw(n, task_name, DRAWABLE, share, new=False, own=own, only=first) if first else []
        if len(drawn) < n and statuses:
            try:
                drawn += await self._draw(n - len(drawn), task_name, statuses, share, new=False, own=own)
            except BaseException:
                await self._return(drawn, task_name)
                raise
        return drawn

    async def _draw(
        self, n: int, task_name: str, statuses: Statuses, share: Share | None, *, new: bool, own: bool, only: Ids = ()
    ) -> Groups:
        """The groups that can be drawn now. Does not wait for capacity, which would keep others from drawing."""
        drawn: Groups = []
        try:
            if statuses:
                if task_name not in self._compared:
                    await self.compare_data(task_name, *await self._internals.position(task_name))
                    self._compared.add(task_name)
                redrawn = await self._internals.redraw(n, task_name, statuses, group_ids=only, share=share)
                drawn += await self._without_bad(redrawn, task_name)
            if new:
                async with self._turns():
                    while (
                        len(drawn) < n and (issued := await self._issue(n - len(drawn), task_name, share)) is not None
                    ):
                        drawn += await self._without_bad(issued, task_name)
            for number, group in enumerate(drawn if own else ()):
                if number % _COPIED_AT_ONCE == _COPIED_AT_ONCE - 1:
                    await asyncio.sleep(0)
                for state in group:
                    independent(state)
            return drawn
        except BaseException:
            await self._return(drawn, task_name)
            raise

    async def _issue(self, n: int, task_name: str, share: Share | None) -> Groups | None:
        """Up to n groups of the data set, no more than fit and `share` allows; None if that is none."""
        n = min(n, _ISSUED_AT_ONCE)
        while True:
            known = self._positions.get(task_name)
            cursor, state = await self._position(task_name)
            stream = self._prompts.streams[task_name]
            if stream.source.sequential:
                n = 1  # there is a state between two records
            drawn = await self._read(stream, cursor, n, state)
            if not drawn.groups:
                return None  # the end of the data
            try:
                issued = await self._write(drawn, cursor, task_name, share)
            except CursorMoved as moved:
                self._positions.pop(task_name, None)
                if stream.source.sequential and known is None:
                    raise InvalidDataset(
                        f"another producer drew from task {task_name!r} at the same moment, and the data set is an "
                        "iterable loader, which has one producer per task (as a PromptSource that reads by state "
                        "has); use a map-style data set for several"
                    ) from moved
            except UnsupportedPayload as error:
                if n == 1:
                    refused = InvalidRecord(drawn.indexes[0], f"cannot be stored: {error}")
                    prompt = self._prompts.prompts.failed(refused)
                    groups = [[prompt.__copy__() for _ in drawn.groups[0]]]
                    self._read_ahead = (stream, cursor, state, drawn._replace(groups=groups))
                n = 1
            else:
                if not issued.taken:
                    return None
                stream.before = None  # the store has reached this generation
                after = state if drawn.state is None else drawn.state
                self._positions[task_name] = (self._internals.restores, cursor + issued.taken, after)
                rest = _Drawn(drawn.groups[issued.taken :], drawn.indexes[issued.taken :], None)
                self._read_ahead = (stream, cursor + issued.taken, after, rest)
                return issued.groups

    async def _position(self, task_name: str) -> tuple[int, bytes | None]:
        """Where the next prompt of a task is, as this sampler left it; another producer may have moved it since."""
        known = self._positions.get(task_name)
        if known is None or known[0] != self._internals.restores:
            known = self._positions[task_name] = (self._internals.restores, *await self._internals.position(task_name))
        return known[1:]

    async def _read(self, stream: Stream, cursor: int, n: int, state: bytes | None) -> _Drawn:
        """Up to n of the next groups: those that were read and not issued, or newly read ones."""
        ahead = self._read_ahead
        if ahead is None or ahead[0] is not stream or ahead[1:3] != (cursor, state) or not ahead[3].groups:
            ahead = self._read_ahead = (stream, cursor, state, await self._prompts.read(stream, cursor, n, state))
        drawn = ahead[3]
        groups = [[member.__copy__() for member in group] for group in drawn.groups[:n]]
        return drawn._replace(groups=groups)

    async def _write(self, drawn: _Drawn, cursor: int, task_name: str, share: Share | None) -> Issued:
        """Issue the groups that fit. A cancel waits for it, and then gives them back."""
        issuing = asyncio.ensure_future(
            self._internals.issue(drawn.groups, task_name, cursor=cursor, source_state=drawn.state, share=share)
        )
        cancelled = await see_through(issuing)
        if cancelled is None and not issuing.cancelled():
            return issuing.result()
        if not issuing.cancelled():
            await self._return([] if issuing.exception() else issuing.result().groups, task_name)
        else:
            # The loop shuts down. The position shows whether the store has issued the groups anyway.
            await uncancelled(self._return_issued(drawn.groups, cursor, task_name))
        raise cancelled or asyncio.CancelledError

    async def _return_issued(self, groups: Groups, cursor: int, task_name: str) -> None:
        now, _ = await self._internals.position(task_name)
        for group_id, group in enumerate(groups, cursor):
            for member in group:
                member.group_id = group_id
        await self._return(groups[: max(0, now - cursor)], task_name)

    async def _return(self, groups: Groups, task_name: str) -> None:
        """Give back the groups of a draw that failed. Only logs errors: the caller raises that of the draw."""
        try:
            await uncancelled(self._internals.give_back(groups, task_name))
        except ForebayError:
            log.exception("draw_not_returned task=%s groups=%d", task_name, len(groups))

    async def _without_bad(self, groups: Groups, task_name: str) -> Groups:
        """End the placeholders of bad records as failed, so that the position stays one number; the other groups."""
        good: Groups = []
        for at, group in enumerate(groups):
            if not is_bad(group):
                good.append(group)
                self._bad_in_a_row = 0
                continue
            self._bad_in_a_row += 1
            try:
                for state in group:
                    state.status = Status.FAILED
                await self.replay_buffer.put(group, task_name)
                if self._bad_in_a_row >= _MAX_BAD_IN_A_ROW:
                    raise nothing_but_bad(self._bad_in_a_row, group)
            except BaseException:
                await self._return(good + groups[at:], task_name)
                raise
        return good
