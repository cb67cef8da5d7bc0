"""Which prompt comes next: one that has to be generated again, or the next of the data set.

Drawing is issuing: `SamplerWithReplayBuffer` writes the groups that it draws into the buffer, in flight, together with
the task's position, in one step. So a crash skips no drawn group, a resume finds its position in the store, and
several processes can draw from one. Group ids count the groups drawn for a task and never restart. The caller owns the
groups that it gets: their lists and dicts may be changed.

A fingerprint of the data set is kept beside the position, and is compared before anything is drawn: positions are not
applied to another data set (`ChangedDataset`), unless `allow_changed_data` says so.

`Sampler` alone does the same without a buffer, and keeps its own position (`state_dict`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack

from msgspec.structs import replace

from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.internal import Issued, internals
from forebay.core.aio import DATA, Turns, in_thread, see_through, uncancelled
from forebay.core.fingerprint import Fingerprint, SourceState, differences, pack_state, unpack_state
from forebay.core.ledger import number_rollouts
from forebay.core.payload import remember_prompt
from forebay.core.rollout import DRAWABLE, RolloutState, Status, carries_response, lacks_tokens
from forebay.core.validate import checked_integer, checked_task
from forebay.errors import (
    ChangedDataset,
    CursorMoved,
    ForebayError,
    InvalidDataset,
    InvalidInput,
    InvalidRecord,
    UnsupportedPayload,
)
from forebay.prompts.loader import LoaderSource
from forebay.prompts.sources import (
    Source,
    Tokenize,
    ToRolloutState,
    bad_prompt,
    build_prompt,
    independent,
    is_bad,
    nothing_but_bad,
    open_source,
    without_response,
)
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

    prompt_repeat_k: int
    seed: int
    shuffle: bool
    to_rollout_state: ToRolloutState | None
    tokenize: Tokenize | None
    skip_bad_records: bool
    offline: bool
    allow_changed_data: bool


class Sampler:
    """Draws prompts from a data set; keeps only the position.

    `dataset`: a list, a data set (`__len__`, `__getitem__`), a loader (`__iter__`, best with `state_dict`), or the path
    of a JSONL file. `prompt_repeat_k` members per group. `to_rollout_state` maps a record of another shape; `tokenize`
    fills `prompt_ids`. A record that makes no prompt is an error, or, with `skip_bad_records`, a group that failed.
    A response in a record is dropped and counted (`dropped_responses`), because the weights that made it are unknown;
    `offline=True` takes it as the answer instead: it is judged and trained on, and nothing is generated.
    Stores and checkpoints keep a fingerprint of the data set; continuing with another one is refused
    (`ChangedDataset`) unless `allow_changed_data=True`, which continues and keeps the new fingerprint.
    Give it to a strategy, and it draws through the strategy's buffer (`with_buffer`).
    """

    def __init__(
        self,
        dataset: Any,
        *,
        prompt_repeat_k: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        to_rollout_state: ToRolloutState | None = None,
        tokenize: Tokenize | None = None,
        skip_bad_records: bool = False,
        offline: bool = False,
        allow_changed_data: bool = False,
    ) -> None:
        self.source: Source = open_source(dataset, seed=seed, shuffle=shuffle)
        self.dropped_responses = 0
        self.group_size = checked_integer("prompt_repeat_k", prompt_repeat_k, least=1)
        self._to_rollout_state = to_rollout_state
        self._tokenize = tokenize
        self._skip_bad_records = skip_bad_records
        self._offline = offline
        self._allow_changed_data = allow_changed_data
        # Functions of the user may take any time.
        self._inline = self.source.inline and to_rollout_state is None and tokenize is None
        self._reading = threading.RLock()
        self._own_state: bytes | None = None  # the last state that was made here: its fingerprint is this data set's
        self._own: SourceState | None = None  # the same, not packed
        self._warned: set[str] = set()
        self._cursors: dict[str, int] = {}
        self._state: bytes | None = None
        self._turns = Turns()

    def __len__(self) -> int:
        """The number of records of the data set."""
        return len(self.source)

    def with_buffer(self, replay_buffer: ReplayBuffer) -> SamplerWithReplayBuffer:
        """The same prompts, drawn through a buffer."""
        bound = SamplerWithReplayBuffer.__new__(SamplerWithReplayBuffer)
        bound._bind(self, replay_buffer)
        return bound

    async def sample(self, task_name: str) -> list[RolloutState]:
        """The next group of a task."""
        checked_task(task_name)
        async with self._turns():
            if isinstance(self.source, LoaderSource) and self._cursors.keys() - {task_name}:
                raise InvalidInput(
                    f"this loader serves task {next(iter(self._cursors))!r}, and cannot also serve {task_name!r}; use "
                    "a sampler per task"
                )
            for _ in range(_MAX_BAD_IN_A_ROW):
                cursor = self._cursors.get(task_name, 0)
                (group,), _, source_state = await self.read(cursor, 1, self._state, task_name)
                self._state = self._state if source_state is None else source_state
                self._cursors[task_name] = cursor + 1
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
        return {"cursors": dict(self._cursors), "source": self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of another sampler of the same data set, seed and order."""
        cursors = state.get("cursors") if isinstance(state, Mapping) else None
        source = state.get("source") if isinstance(state, Mapping) else None
        if not isinstance(cursors, dict) or not isinstance(source, (bytes, type(None))):
            raise InvalidInput(f"{state!r:.80} is not the state of a sampler; expected a result of state_dict()")
        self._cursors = {
            str(name): checked_integer(f"cursor of {name!r}", cursor, least=0) for name, cursor in cursors.items()
        }
        self._state = source

    # --- prompts by number ------------------------------------------------------------------------------

    async def read(self, cursor: int, n: int, state: bytes | None, task_name: str) -> _Drawn:
        """The groups from `cursor` on; `state` is the source's state there. A loader is read one by one."""
        if self._inline and state is not None and state == self._own_state:
            return self._read(cursor, n, state, task_name)
        return await in_thread(lambda: self._read(cursor, n, state, task_name), pool=DATA)

    def _read(self, cursor: int, n: int, state: bytes | None, task_name: str) -> _Drawn:
        with self._reading:  # samplers of several buffers may share a loader
            known = self._known(cursor, state, task_name)
            self.source.restore(cursor, None if known is None else known.loader)
            indexes, groups = [], []
            for number in range(cursor, cursor + n):
                try:
                    index, record = self.source.read(number)
                    prompt = self._trusted(build_prompt(record, index, self._to_rollout_state, self._tokenize), index)
                except InvalidRecord as error:
                    index, prompt = error.index, self.failed(error)
                indexes.append(index)
                # Members share their prompt, which is stored once; a producer that draws them gets copies.
                groups.append([prompt.__copy__() for _ in range(self.group_size)])
            return _Drawn(groups, indexes, self._state_after(cursor, state, known, task_name))

    def _trusted(self, prompt: RolloutState, index: int) -> RolloutState:
        """The prompt, without the response of its record unless that is to be trained on."""
        if not carries_response(prompt):
            return prompt
        if self._offline:
            if lacks_tokens(prompt):
                raise InvalidRecord(index, "has a response without a token; expected a token, or no response")
            prompt.status = Status.COMPLETED
            return prompt
        self._warn(
            "responses_dropped index=%d: records have responses; they are dropped, and generated (give offline=True to "
            "train on them as they are)",
            index,
        )
        self.dropped_responses += 1
        return without_response(prompt)

    def failed(self, error: InvalidRecord) -> RolloutState:
        """The placeholder for a record that makes no prompt; raises the error unless such records are skipped."""
        if not self._skip_bad_records:
            raise error
        log.warning("record_skipped index=%d error=%s", error.index, error)
        return bad_prompt(error)

    # --- the fingerprint of the data set ------------------------------------------------------------------

    async def compare_data(self, task_name: str, cursor: int, source_state: bytes | None) -> None:
        """ChangedDataset if a position of a task belongs to another data set. Reads records; draws nothing."""
        if source_state is not None and source_state != self._own_state:
            await in_thread(lambda: self._known(cursor, source_state, task_name), pool=DATA)

    def _known(self, cursor: int, state: bytes | None, task_name: str) -> SourceState | None:
        """The state of a source, after its fingerprint was compared with the data set."""
        if state is None or state == self._own_state:
            return None if state is None else self._own
        known = unpack_state(state)
        with self._reading:
            self._refuse_changes(cursor, known.fingerprint, task_name)
        return known

    def _refuse_changes(self, cursor: int, known: Fingerprint, task_name: str) -> bool:
        """ChangedDataset if the data set has changed and that is not allowed; whether it has changed."""
        changes = differences(known, self._fingerprint())
        if any(name.startswith("record ") for name in changes):
            changes = differences(known, self._fingerprint(again=True))
        if changes and not self._allow_changed_data:
            raise ChangedDataset(task_name, cursor, changes)
        if changes:
            self._warn("data_changed task=%s changes=%s: allow_changed_data was given", task_name, changes)
        return bool(changes)

    def _state_after(self, cursor: int, state: bytes | None, known: SourceState | None, task_name: str) -> bytes | None:
        loader = self.source.state()
        if loader is None and state is not None and state == self._own_state:
            return None
        # Compared again: the fingerprint of a loader grows as it is read. It cannot read earlier records again.
        changed = known is not None and self._refuse_changes(cursor, known.fingerprint, task_name)
        now = self._fingerprint()
        if known is not None and not changed:
            before, now = now, now.completed(known.fingerprint)
            if len(before.records) < len(now.records) or before.records.count(None) > now.records.count(None):
                self._warn("data_unverified task=%s: not all records of the fingerprint can be read again", task_name)
        if now.unverified:
            self._warn("data_unverified task=%s: %s", task_name, "; ".join(now.unverified))
        self._own = SourceState(fingerprint=now, loader=loader)
        self._own_state = pack_state(self._own)
        return None if self._own_state == state else self._own_state

    def _fingerprint(self, *, again: bool = False) -> Fingerprint:
        return replace(self.source.fingerprint(again=again), group_size=self.group_size)

    def _warn(self, message: str, *values: object) -> None:
        """Log a warning, once."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *values)


class SamplerWithReplayBuffer:
    """Draws through a buffer: retries first, then the data set; drawn groups are in flight there. See `Sampler`."""

    def __init__(self, dataset: Any, replay_buffer: ReplayBuffer, **options: Unpack[SamplerOptions]) -> None:
        self._bind(Sampler(dataset, **options), replay_buffer)

    def _bind(self, prompts: Sampler, replay_buffer: ReplayBuffer) -> None:
        self.replay_buffer = replay_buffer
        self._prompts = prompts
        self._internals = internals(replay_buffer)
        self._turns = Turns()
        self._read_ahead: tuple[int, bytes | None, _Drawn] | None = None
        self._positions: dict[str, tuple[int, int, bytes | None]] = {}  # restores of the buffer, cursor, state
        self._bad_in_a_row = 0
        self._compared: set[str] = set()  # tasks whose position was compared before anything was drawn again

    def __len__(self) -> int:
        """The number of records of the data set."""
        return len(self._prompts)

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

        Retries of these statuses first, in order of group_id; then the data set. WaitTimeout if none fitted. Not
        `own`: lists and dicts are shared with the buffer, for callers that copy before they change any.
        """
        checked_integer("n", n, least=1)

        async def attempt() -> Groups | None:
            return await self.try_draw(n, task_name, statuses, own=own) or None

        what = f"capacity to draw {n} groups of task {task_name!r}"
        return await self._internals.until(attempt, what, (task_name,), timeout_s=timeout_s)

    async def try_draw(
        self, n: int, task_name: str, statuses: Statuses = DRAWABLE, *, own: bool = True, share: Share | None = None
    ) -> Groups:
        """As `draw`, without waiting: maybe none. `share`: no more than it allows."""
        return await self._draw(n, task_name, statuses, share, new=True, own=own)

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
        if isinstance(self._prompts.source, LoaderSource):
            n = 1  # a loader has its state between two records
        while True:
            known = self._positions.get(task_name)
            cursor, state = await self._position(task_name)
            drawn = await self._read(cursor, n, state, task_name)
            try:
                issued = await self._write(drawn, cursor, task_name, share)
            except CursorMoved as moved:
                self._positions.pop(task_name, None)
                if isinstance(self._prompts.source, LoaderSource) and known is None:
                    raise InvalidDataset(
                        f"another producer drew from task {task_name!r} at the same moment, and the data set is an "
                        "iterable loader, which has one producer per task; use a map-style data set for several"
                    ) from moved
            except UnsupportedPayload as error:
                if n == 1:
                    refused = InvalidRecord(drawn.indexes[0], f"cannot be stored: {error}")
                    prompt = self._prompts.failed(refused)
                    groups = [[prompt.__copy__() for _ in drawn.groups[0]]]
                    self._read_ahead = (cursor, state, drawn._replace(groups=groups))
                n = 1
            else:
                if not issued.taken:
                    return None
                after = state if drawn.state is None else drawn.state
                self._positions[task_name] = (self._internals.restores, cursor + issued.taken, after)
                rest = _Drawn(drawn.groups[issued.taken :], drawn.indexes[issued.taken :], None)
                self._read_ahead = (cursor + issued.taken, after, rest)
                return issued.groups

    async def _position(self, task_name: str) -> tuple[int, bytes | None]:
        """Where the next prompt of a task is, as this sampler left it; another producer may have moved it since."""
        known = self._positions.get(task_name)
        if known is None or known[0] != self._internals.restores:
            known = self._positions[task_name] = (self._internals.restores, *await self._internals.position(task_name))
        return known[1:]

    async def _read(self, cursor: int, n: int, state: bytes | None, task_name: str) -> _Drawn:
        """Up to n of the next groups: those that were read and not issued, or newly read ones."""
        if self._read_ahead is None or self._read_ahead[:2] != (cursor, state) or not self._read_ahead[2].groups:
            self._read_ahead = (cursor, state, await self._prompts.read(cursor, n, state, task_name))
        drawn = self._read_ahead[2]
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
