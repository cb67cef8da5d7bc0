"""How samples enter a buffer, and how stored ones expire.

`admit` turns samples into an arrival for the storage: checked, compared with the prompt as issued, stamped with
versions, judged for age, described, in this order. The buffer keeps these very objects (their arrays become read-only),
because copies would cost more than all the rest. A group that is refused keeps its content.
For storages that keep no references, the values replace them first, so that sizes count them. A value that is lost
fails its group with that reason, and none of the other groups of the call.

Limits and clocks live in the storage, so that every process judges alike; `Expiry` keeps a copy that every claim and
summary refreshes. The rules are in `core.staleness`. Expiring first advances the clock of a task in the storage, so
that nothing too old leaves meanwhile, and then revises the groups that are due in slices that leave the loop free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from forebay.core.ledger import Account, Clock, Row, Tags, describe
from forebay.core.payload import freeze_arrays, settle_changes
from forebay.core.query import And, Compare, parse
from forebay.core.references import KINDS, as_values, resolve_or_fail, without_references
from forebay.core.rollout import (
    Group,
    RolloutState,
    Status,
    VersionSpans,
    group_status,
    group_tokens,
    lacks_tokens,
    versioned_tokens,
)
from forebay.core.staleness import (
    EXPIRABLE,
    NO_LIMITS,
    Limits,
    check_versions,
    expire_members,
    reset_newer_members,
    sample_staleness,
    stamp,
)
from forebay.core.validate import check_group, checked_priority, plain_columns
from forebay.errors import InvalidGroup, UnsupportedPayload
from forebay.storage.base import Arrival, Storage, Summary
from forebay.storage.values import Content, Revision

log = logging.getLogger(__name__)


def admit(
    items: Sequence[RolloutState],
    task_name: str,
    *,
    model_step: int | None,
    train_step: int | None,
    limits: Limits,
    tags: Tags | None,
    priority: float | None,
    failed: bool,
) -> Arrival:
    """The arrival of one group, or InvalidGroup that says what is wrong with it."""
    group_id, attempt = check_group(items, task_name)
    group = tuple(items)
    for index, state in enumerate(group):
        if state.status is Status.COMPLETED and lacks_tokens(state):
            raise InvalidGroup(
                f"member {index} (rollout {state.rollout_id}) of group {group_id} of task {task_name!r} is COMPLETED "
                "without a token; expected tokens in response_ids, a response without response_ids (text only), or "
                "an agent trace (input_ids, labels)"
            )
        settle_changes(state)
        if state.error_msg is not None and not state.error_msg.isascii():
            state.error_msg = state.error_msg.encode(errors="replace").decode()  # messages may hold anything
    if model_step is not None:
        _stamp(group, model_step)
    stale = False
    reset_tokens = 0
    if train_step is not None:
        check_versions(group)
        for state in group:
            state.seq_staleness = sample_staleness(state, train_step)
        if group_status(group) in EXPIRABLE:
            expired = expire_members(group, limits.floors(train_step))
            if limits.retryable:
                if expired is not None:
                    reset_tokens = group_tokens(group) - group_tokens(expired)
                    group = expired
            else:
                stale = expired is not None or group_status(group) is Status.EXPIRED
    return Arrival(
        task_name=task_name,
        content=content_of(group, tags, priority, task_name),
        group_id=group_id,
        attempt=attempt,
        stale=stale,
        reason="stale" if stale else next((state.error_msg for state in reversed(group) if state.error_msg), None),
        failed=failed,
        reset_tokens=reset_tokens,
    )


def _stamp(group: Group, model_step: int) -> None:
    spans: VersionSpans = ()
    for state in group:
        tokens = versioned_tokens(state)
        if state.version_spans or not spans or spans[0][1] != tokens:
            spans = stamp(state.version_spans, tokens, model_step)
        state.version_spans = spans
        if len(spans) != 1 or spans[0][0] != model_step:
            spans = ()  # only members of one version and length share their spans


def content_of(group: Group, tags: Tags | None, priority: float | None, task_name: str | None = None) -> Content:
    """A group as the storage takes it; UnsupportedPayload names the value that no frame can hold."""
    if priority is not None:
        checked_priority("priority", priority)
    freeze_arrays(group)
    try:
        try:
            facts = describe(group)
        except UnsupportedPayload:
            if not plain_columns(group):
                raise
            facts = describe(group)
    except UnsupportedPayload as error:
        name = f"group {group[0].group_id} of task {task_name or group[0].task_name!r}"
        raise UnsupportedPayload(f"{name}: {_with_path(group, error)}") from None
    return Content(group, facts, tags, priority)


def _with_path(group: Group, error: UnsupportedPayload) -> UnsupportedPayload:
    """The error of the codec, which has the path of the value."""
    from forebay.codec.frame import encode_group  # imported here: the buffer works without it

    try:
        encode_group(group, [])
    except UnsupportedPayload as found:
        return found
    return error


def _expired(row: Row, account: Account) -> Content | None:
    """The content of a stored group that is due; None if it is to be dropped.

    If no member is below the floors after all, it stays as it is, with its facts computed again.
    """
    assert account.train_step is not None, "nothing is due without a train step"
    expired = expire_members(row.group, account.limits.floors(account.train_step))
    if expired is not None and not account.limits.retryable:
        return None
    return content_of(expired or row.group, None, None)


# --- references -----------------------------------------------------------------------------------------


def needs_values(storage: Storage) -> bool:
    """Whether groups may have references that a storage does not keep."""
    return bool(KINDS) and storage.durable


async def resolve_arrival(arrival: Arrival) -> Arrival:
    """An arrival with values for its references."""
    before = arrival.content
    useless = before.facts.status in (Status.FAILED, Status.FILTERED)
    if arrival.stale or (useless and arrival.attempt is not None):  # it ends as it arrives
        return replace(arrival, content=_with_group(before, without_references(before.group)))
    content = await resolve_content(before)
    if content is before:
        return arrival
    return replace(arrival, content=content, reason=lost_reason(before, content) or arrival.reason)


async def resolve_content(content: Content) -> Content:
    """A content with values for its references."""
    return _with_group(content, await resolve_or_fail(content.group))


def lost_reason(before: Content, after: Content) -> str | None:
    """Why a group was failed when it was resolved; None if it was not."""
    if after is before or after.facts.status is not Status.FAILED or before.facts.status is Status.FAILED:
        return None
    return after.group[0].error_msg


def _with_group(content: Content, group: Group) -> Content:
    return content if group is content.group else content_of(group, content.tags, content.priority)


_SLICE_GROUPS = 32  # a millisecond or two


class Expiry:
    """The limits of tasks, and the expiry of groups that exceed them."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._limits: dict[str, Limits] = {}
        self._steps: dict[str, int] = {}
        self.last_train_step: int | None = None

    async def recall(self) -> None:
        """Learn the steps and limits of a storage with a past."""
        self._limits.clear()
        self._steps.clear()
        self.learn(await self._storage.summary())

    def learn(self, summary: Summary) -> None:
        """Take over the clocks and limits that the storage reported."""
        for task_name, task in summary.tasks.items():
            self._limits[task_name] = task.account.limits
            if task.account.train_step is not None:
                self.see(task.account.train_step, (task_name,))

    def learn_limits(self, limits: Mapping[str, Limits]) -> None:
        """Take over limits that a claim reported."""
        self._limits.update(limits)

    def see(self, train_step: int, tasks: Iterable[str] = ()) -> None:
        """Note that groups of these tasks were asked for, for this train step."""
        if self.last_train_step is None or train_step > self.last_train_step:
            self.last_train_step = train_step
        for task_name in tasks:
            self._steps[task_name] = max(train_step, self._steps.get(task_name, 0))

    def limits(self, task_name: str) -> Limits:
        """The limits in force, as this process knows them."""
        return self._limits.get(task_name, NO_LIMITS)

    def limits_with(
        self, task_name: str, threshold: int | None, token_threshold: int | None, retryable: bool | None
    ) -> Limits:
        """The limits in force with what a call gives instead."""
        given = {"stale_threshold": threshold, "token_stale_threshold": token_threshold, "retryable": retryable}
        return replace(self.limits(task_name), **{name: value for name, value in given.items() if value is not None})

    def step_of(self, task_name: str) -> int | None:
        """The latest train step that a task was asked for, as far as this process knows."""
        return self._steps.get(task_name)

    async def advance(self, clocks: Mapping[str, Clock]) -> None:
        """Advance clocks and set limits in the storage: nothing that is too old by them leaves from now on."""
        await self._storage.advance(clocks)
        for task_name, clock in clocks.items():
            if clock.limits is not None:
                self._limits[task_name] = clock.limits
            if clock.train_step is not None:
                self.see(clock.train_step, (task_name,))

    async def expire(self, tasks: Iterable[str], statuses: Collection[Status] = EXPIRABLE) -> dict[str, int]:
        """Revise every group that is too old; groups that newly expired, by task."""
        return {task_name: await self._expire(task_name, statuses) for task_name in tasks}

    async def _expire(self, task_name: str, statuses: Collection[Status]) -> int:
        newly_expired = 0
        while True:
            with as_values():
                rows = await self._storage.due(task_name, statuses, _SLICE_GROUPS)
            if not rows:
                break
            account = (await self._storage.summary((task_name,))).task(task_name).account
            # The clock may have moved in between: a row that is not too old by the account that we read only gets its
            # facts computed again, and is due again.
            newly_expired += sum(
                row.record.status is not Status.EXPIRED and (content is None or content.facts.status is Status.EXPIRED)
                for row, content in await self._revise([(row, _expired(row, account)) for row in rows])
            )
            await asyncio.sleep(0)
        if newly_expired:
            log.info("groups_expired task=%s groups=%d", task_name, newly_expired)
        return newly_expired

    async def reset_newer(self, model_step: int, tasks: Collection[str] | None) -> int:
        """Have groups with tokens of later weights generated again, from their prompts. Returns how many.

        For a store that was rewound to this model step: the weights that generated those tokens are lost, and other
        ones will get their numbers.
        """
        newer = parse({"place": "buffered", "newest_step": {"$gt": model_step}})
        records = await self._storage.records(newer, None)
        uids = [record.uid for record in records if tasks is None or record.task_name in tasks]
        reset = 0
        for start in range(0, len(uids), _SLICE_GROUPS):
            with as_values():
                rows = [await self._storage.read(uid) for uid in uids[start : start + _SLICE_GROUPS]]
            revised: list[tuple[Row, Content | None]] = [
                (row, content_of(group, None, None))
                for row in rows
                if row is not None and (group := reset_newer_members(row.group, model_step)) is not None
            ]
            reset += len(await self._revise(revised))
        if reset:
            log.warning(
                "groups_reset model_step=%d groups=%d: the weights that generated them are lost", model_step, reset
            )
        return reset

    async def _revise(self, revised: list[tuple[Row, Content | None]]) -> list[tuple[Row, Content | None]]:
        """Give rows their new contents; those that have not moved or changed meanwhile."""
        if needs_values(self._storage):
            revised = await self._valued(revised)
        revisions = [Revision(row.record.uid, row.record.revision, content) for row, content in revised]
        applied = await self._storage.revise(revisions)
        return [each for each, done in zip(revised, applied, strict=True) if done]

    async def _valued(self, revised: Sequence[tuple[Row, Content | None]]) -> list[tuple[Row, Content | None]]:
        """Rows and their new contents with references resolved; rows with a lost value end here, as failed."""
        kept: list[tuple[Row, Content | None]] = []
        lost: dict[int, str] = {}
        for row, content in revised:
            after = None if content is None else await resolve_content(content)
            reason = None if content is None or after is None else lost_reason(content, after)
            if reason is None:
                kept.append((row, after))
            else:
                lost[row.record.uid] = reason
        if lost:
            await self._storage.fail(lost)
        return kept

    async def drop_expired(self, task_name: str) -> None:
        """Discard the EXPIRED groups of a task that no longer retries them."""
        node = And((Compare("task_name", "eq", task_name), Compare("status", "eq", Status.EXPIRED)))
        await self._storage.discard(node, "stale")
