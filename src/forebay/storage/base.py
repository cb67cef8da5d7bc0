"""The contract of a storage: where groups live, and the only place where they move.

A storage holds rows. A row is a record (metadata: status x place, see `record`) and a payload (the samples).
It also keeps one account per task (`ledger.Account`: issued count, cursor, ends, reasons, watermark). This page
is all that a backend's author needs; `forebay.testing.StorageConformance` proves the result.

Promises of every operation
- *One step.* It happens whole or not at all, and counts change with the rows: any one read sees a closed
  ledger (G1) and whole groups (G2). If it raises, nothing changed.
- *Legal moves only.* A row moves along `ledger.MOVES`; `check_move` is the authority. A move to an `End` books the
  group out of the account with its reason and removes the row (or archives it, see `keep_trained`).
- *Cancellation.* A `claim` that is cancelled leaves nothing claimed: what it had already moved goes back, so that
  nothing is ever held by a caller that never learned of it. Any other call that is cancelled may have happened, and is
  never half done.
- *Fencing.* Who gives back must still hold. A row in flight is held under (owner, attempt), a leased row under its
  lease_id. `attempt` grows each time a row moves to in flight. Anyone else gets `LostLease`.
- *Ownership.* What a call hands in belongs to the storage. What it hands out is shared and must be copied before a
  user gets it, except groups that a claim took for good: those are the caller's own.
- *Order.* `timestamp_id` numbers arrivals in the buffer; it is new at each `put`, and stays as it is over claims,
  leases, returns from a lease, and revisions, so that a group comes back to its old place in the order.
- *Wake-ups.* After a step that may let a waiter go on, every listener is called with the tasks concerned, from
  any thread. A listener may be called too often, never too seldom (also after a reconnect).
- *Free loop.* No operation holds the event loop for long however much is stored (G10); work in proportion to its
  own batch is allowed.
- *Clock.* Times and deadlines are the storage's own (for a server: the server's), never the callers'.

A storage may be used by several owners (buffers) at once: in one process, or, if `shared`, in many. All of them
must open it with the same settings.
"""

from __future__ import annotations

import asyncio
import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import msgspec

from forebay.ledger import Account, Event, GroupEnd, LedgerLine, Place, Watermark, arrival_tokens
from forebay.policy import ARRIVAL, Choose, Order
from forebay.query import Node
from forebay.record import Facts, Record, Row, Tags
from forebay.rollout import Group, Status
from forebay.staleness import Floors

if TYPE_CHECKING:
    from forebay.storage.calls import Answered

__all__ = [
    "EXPECT_GROUP_BYTES",
    "Arrival",
    "Claim",
    "Claimed",
    "Content",
    "Holding",
    "Listener",
    "Purpose",
    "Ready",
    "Reaped",
    "Revision",
    "Settings",
    "Snapshot",
    "Storage",
    "Usage",
]


EXPECT_GROUP_BYTES = 1 << 20
"""What the responses of a group are taken to need before the first group of its task is back."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a storage is told when it opens."""

    order: Order = ARRIVAL
    choose: Choose | None = None
    max_groups: int | None = None
    max_bytes: int | None = None
    expect_group_bytes: int = EXPECT_GROUP_BYTES
    keep_trained: int = 0


class Content(msgspec.Struct, frozen=True, gc=False):
    """A group to be stored. `facts` are those of `describe(group)`; None leaves tags or priority as they are.

    `frame` is the group as bytes (`codec.encode_group`), for backends that store those; the backend makes it.
    """

    group: Group
    facts: Facts
    tags: Tags | None = None
    priority: float | None = None
    frame: bytes | None = None


class Arrival(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group that is put: back from its producer, or by hand.

    `group_id` None: a new group by hand; the storage gives it a negative id of its own. `attempt` None: by hand,
    or back from the owner that holds it. `stale`: it was judged stale and not retryable; it ends at once.
    `reset_tokens`: that it came with, and that are no longer in `content` because they were too old.
    """

    task_name: str
    content: Content
    group_id: int | None = None
    attempt: int | None = None
    stale: bool = False
    reason: str | None = None
    reset_tokens: int = 0

    def tokens(self, before: int) -> tuple[int, int]:
        """The tokens that it issues and resets; see `arrival_tokens`."""
        kept = self.content.facts.tokens
        return arrival_tokens(before, kept + self.reset_tokens, kept)


class Purpose(enum.Enum):
    """What groups are claimed for."""

    TAKE = "take"  # for good, see `ledger.take_event`
    LEASE = "lease"  # for a trainer; needs lease_id and train_step
    DRAW = "draw"  # to be generated again, least group_id first whatever the order


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Which groups to claim.

    For every task at most `wants[task]` buffered groups that have one of `statuses` (an earlier status before a
    later one) and are fresh under both the task's watermark and `floors[task]`, in the order of the
    settings. `whole`: all that is wanted of every task, or nothing. `watermarks` are set first; only storages that say
    so get any (`claims_with_watermarks`). `group_ids`: only these groups, if any are given; for draws from one task.
    """

    wants: Mapping[str, int]
    statuses: tuple[Status, ...]
    purpose: Purpose
    owner: str
    whole: bool = False
    floors: Mapping[str, Floors] = {}
    lease_id: str | None = None
    train_step: int | None = None
    watermarks: Mapping[str, Watermark] = {}
    group_ids: tuple[int, ...] = ()


Claimed: TypeAlias = "dict[str, list[Row]]"


class Revision(msgspec.Struct, frozen=True, gc=False):
    """A change of a buffered row; it applies only if the row still has this revision.

    `content` None: the group is stale and not retryable; it ends as discarded.
    """

    uid: int
    revision: int
    content: Content | None


class Holding(msgspec.Struct, frozen=True):
    """What one owner holds of one task at one place."""

    task_name: str
    place: Place
    owner: str
    groups: int
    oldest_group_id: int
    oldest_age_s: float


class Reaped(msgspec.Struct, frozen=True):
    """What came back from owners that stopped beating, and in how many seconds the next deadline is due."""

    returned: Mapping[str, int]
    next_s: float | None


class Usage(msgspec.Struct, frozen=True):
    """What counts against the capacity: groups in flight, buffered and leased, and their bytes.

    `reserved`: bytes that are kept free for those of them that are still to be generated, see `capacity`.
    """

    groups: int
    bytes: int
    reserved: int


class Snapshot(msgspec.Struct, frozen=True):
    """Everything in a storage at one moment.

    `rows` streams in order of uid, once; a row is good until the next one is asked for. Close it if you stop early.
    """

    accounts: Mapping[str, Account]
    next_uid: int
    next_timestamp_id: int
    rows: AsyncGenerator[Row, None]


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What a wait is for: so many fresh buffered groups of a status by task, and room for so much more."""

    wants: Mapping[str, int] = {}
    status: Status = Status.COMPLETED
    room_groups: int = 0
    room_bytes: int = 0


Listener: TypeAlias = "Callable[[Collection[str]], None]"


class Storage(ABC):
    """Where groups live. See the top of this file for what every operation promises."""

    shared: ClassVar[bool] = False
    """Whether other processes can change it: leases then need a time limit."""

    durable: ClassVar[bool] = False
    """Whether what was acknowledged survives the process."""

    reaps_itself: ClassVar[bool] = False
    """Whether it brings back what dead owners held, and wakes those who wait, without being asked."""

    claims_with_watermarks: ClassVar[bool] = False
    """Whether a claim may bring watermarks along, because each call costs a way to somewhere else."""

    @property
    def store_id(self) -> str | None:
        """Names a durable store for good, so that a checkpoint knows the store that it was made from."""
        return None

    @property
    def keeps_references(self) -> bool:
        """Whether references in samples stay what they are; else it gets their values (`references.Resolved`)."""
        return not self.durable

    # --- life ---------------------------------------------------------------------------------------

    @abstractmethod
    async def open(self, owner: str, settings: Settings, lease_s: float | None) -> None:
        """Make ready for an owner; `lease_s` None: it never expires. InvalidConfig if opened with other settings.

        May be called for several owners at once, and again after all of them have closed.
        """

    @abstractmethod
    async def close(self, owner: str) -> None:
        """Release what the owner holds. Afterwards it can issue and claim nothing (BufferClosed), unless opened again.

        Closing twice is allowed.
        """

    @abstractmethod
    def beat(self, owner: str) -> None:
        """Renew the owner's deadline. Called from a thread of its own; may block and raise, must not touch the loop."""

    @abstractmethod
    async def reap(self) -> Reaped:
        """Release what owners hold whose deadline has passed; they are fenced from then on."""

    @abstractmethod
    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` after changes; returns what ends that."""

    def watch(self, ready: Ready | None) -> asyncio.Future[None] | None:
        """For a storage that lives elsewhere, and hears of changes only while somebody waits.

        The future is done (after the listeners were called) when what is waited for may be there, or, if `ready` is
        None, when anything changed since the last answer. It fails if waiting makes no sense. Cancel it to stop.
        """
        return None

    def may_be_due(self, task_name: str) -> bool:
        """Whether `due` could find something; False only if the last answer of the storage said so. Never waits."""
        return True

    # --- moves --------------------------------------------------------------------------------------

    @abstractmethod
    async def issue(
        self, task_name: str, contents: Sequence[Content], *, owner: str, cursor: int, source_state: bytes | None = None
    ) -> list[Record]:
        """Write drawn prompts as rows in flight and advance the task's cursor, in one step.

        They get the group ids `cursor`, `cursor` + 1, ..., attempt 1, and room (`capacity.reservation`). CursorMoved
        unless the task's cursor is `cursor`; NoRoom if they do not fit; DuplicateGroup if such an id was put by hand.
        """

    @abstractmethod
    async def put(self, arrivals: Sequence[Arrival], *, owner: str) -> list[Record]:
        """Store groups: all of them, or none. Returns their records as they are (or were when they ended).

        Row in flight under this attempt (or, without one, held by this owner): it is back, see `arrival_event`.
        No row and no attempt: by hand; NoRoom if it does not fit. An attempt that no longer holds: LostLease.
        Otherwise, and for a drawn group that has ended (0 <= group_id < cursor): DuplicateGroup.
        """

    @abstractmethod
    async def claim(self, claim: Claim) -> Claimed | None:
        """Select, order, limit and move in one step. None if `whole` and not everything is there.

        Rows come back as they are now; those that were taken for good, as they were in the buffer.

        With a `choose` policy, TAKE and LEASE show it the first 1,024 rows that qualify, in arrival order.
        """

    @abstractmethod
    async def undo(self, claim: Claim, claimed: Claimed) -> None:
        """Put back what a claim moved whose caller never learned of it: each to its old place in the order.

        Rows that have moved on since are left alone. What was taken for good is booked back, so undo it only once.
        With `calls.CALL` set to the claim's own call, the stored answer goes in the same step.
        """

    @abstractmethod
    async def settle(self, lease_id: str, uids: Sequence[int], event: Event, reason: str | None = None) -> None:
        """ACKED, NACKED or REJECTED for rows of a lease: all of them, or LostLease if one is no longer held."""

    @abstractmethod
    async def release(self, owner: str) -> dict[str, int]:
        """Give back all that an owner holds, in order of uid; groups by task.

        What was in flight arrives anew (timestamp_id, revision) as ABORTED; leases are nacked.
        """

    @abstractmethod
    async def set_watermark(self, watermarks: Mapping[str, Watermark]) -> None:
        """From now on nothing of these tasks leaves that is below the floors. Listeners hear of it.

        The train step of a task never goes back (except by `rewind`); the limits are replaced.
        """

    @abstractmethod
    async def due(self, task_name: str, statuses: Collection[Status], limit: int) -> list[Row]:
        """Up to `limit` buffered rows of these EXPIRABLE statuses that are below the task's watermark."""

    @abstractmethod
    async def revise(self, revisions: Sequence[Revision]) -> list[bool]:
        """Change buffered rows in place; each one alone. False for one that has moved or changed meanwhile."""

    @abstractmethod
    async def discard(self, node: Node, reason: str) -> dict[str, int]:
        """End every buffered group that matches, each one alone: others may act in between. Groups by task."""

    @abstractmethod
    async def fail(self, reasons: Mapping[int, str]) -> dict[str, int]:
        """End rows by uid as failed, each with its reason, whoever holds them; groups by task.

        For groups whose payload cannot be had any more; no other step may end a group at every place. Those in the
        archive have ended already: they are only removed, and not counted. Unknown ones are passed over.
        """

    @abstractmethod
    async def set_priority(self, priorities: Mapping[int, float]) -> int:
        """Set the priority of rows by uid; how many there were."""

    @abstractmethod
    async def saved(self, model_step: int) -> None:
        """Weights of this step were saved with a checkpoint, or the first one is about to be made.

        From the first such call on, a durable storage archives every group that is acknowledged for a later train
        step, until a call with that step (or a later one): only then is its training safe.
        """

    @abstractmethod
    async def saved_step(self) -> int | None:
        """The model step of the last `saved` or `rewind`; None before the first.

        A durable storage has every group that was acknowledged since that call for a later step.
        """

    @abstractmethod
    async def rewind(self, model_step: int) -> dict[str, int]:
        """REWOUND for every archived group that was trained for a later step than `model_step`; groups by task.

        Watermarks go back to the step after it.
        """

    # --- ends ---------------------------------------------------------------------------------------

    @abstractmethod
    async def note_ends(self) -> None:
        """From now on note every group that ends, in the step that ends it; a durable storage goes on for good."""

    @abstractmethod
    async def ends(self, owner: str, limit: int) -> list[tuple[int, GroupEnd]]:
        """Up to `limit` ends that were noted, oldest first, with their numbers. They are the owner's to tell of.

        Until they are forgotten the owner gets them again, and others only when it has closed or was reaped.
        """

    @abstractmethod
    async def forget_ends(self, numbers: Sequence[int]) -> None:
        """Those who wanted to know of these ends do. Unknown numbers are passed over."""

    # --- calls that may come twice --------------------------------------------------------------------

    async def answer(self, client: str, sequence: int) -> Answered | None:
        """What this call returned, if it was done and is remembered: see `calls`.

        LostLease if it was a claim, and what it handed out is no longer held; then nothing of it is.
        """
        return None

    async def forget(self, client: str) -> None:
        """Drop all answers of a client that will ask no more."""
        return

    # --- reads --------------------------------------------------------------------------------------

    @abstractmethod
    async def count_statuses(
        self, tasks: Collection[str], statuses: Collection[Status]
    ) -> dict[str, dict[Status, int]]:
        """Buffered groups by task and status; 0 for what is unknown."""

    @abstractmethod
    async def available(self, tasks: Collection[str], status: Status) -> dict[str, int]:
        """Buffered groups of a status that are not below their task's watermark."""

    @abstractmethod
    async def ledger(self, *, tokens: bool = False) -> dict[str, LedgerLine]:
        """The closed ledger of every task, as of one moment."""

    @abstractmethod
    async def account(self, task_name: str) -> Account:
        """The account of a task (empty if unknown), as of one moment."""

    @abstractmethod
    async def accounts(self) -> dict[str, Account]:
        """The accounts of all tasks."""

    @abstractmethod
    async def usage(self) -> Usage:
        """What is used of the capacity."""

    @abstractmethod
    async def holdings(self) -> list[Holding]:
        """Who holds what, oldest first."""

    @abstractmethod
    async def records(self, node: Node, limit: int | None) -> list[Record]:
        """The records that match a tree (already without `staleness`), in order of uid, at any place."""

    @abstractmethod
    async def read(self, uid: int) -> Row | None:
        """One row with its payload."""

    @abstractmethod
    def __len__(self) -> int:
        """Buffered groups, as last seen by this process."""

    # --- streams ------------------------------------------------------------------------------------

    @abstractmethod
    async def snapshot(self) -> Snapshot:
        """Everything, as of one moment, while others go on."""

    @abstractmethod
    async def restore(
        self, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
    ) -> None:
        """Fill an empty storage from a stream of rows in order of uid; visible when all of it is there.

        Places, leases, attempts and revisions are kept as they come. InvalidInput if the storage is not empty
        or the stream contradicts itself. Capacity does not count here.
        """
