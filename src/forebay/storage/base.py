"""The storage contract: where groups live, and the only place where they move.

A storage holds rows. A row is a record (metadata: status and place, see `core.ledger`) and a payload (the samples).
It also keeps one account per task (`core.ledger.Account`: counts, cursor, ends, reasons, clocks, limits).
`storage.rules` has the rules that every backend shares; `forebay.testing.StorageConformance` proves the result.

Promises of every operation
- *One step.* It happens completely or not at all, and counts change together with the rows: any one read sees a closed
  ledger (G1) and whole groups (G2). If it raises, nothing changed.
- *Legal moves only.* A row moves along `ledger.MOVES`; `check_move` is the authority. A move to an `End` books the
  group out of the account with its reason and removes the row (or archives it, see `keep_trained`).
- *Cancellation.* A cancelled `claim` leaves nothing claimed: rows that it had already moved go back, so that no caller
  ever holds a group that it never learned of. Any other cancelled call may have happened; it is never half done.
- *Fencing.* Only the current owner can give a row back. A row in flight is held under (owner, attempt), a leased row
  under its lease_id. `attempt` grows each time a row moves to in flight. Anyone else gets `LostLease`.
- *Ownership.* Arguments belong to the storage from then on. Results are shared and must be copied before a user gets
  them, except groups that a claim took for good: those belong to the caller.
- *Order.* `timestamp_id` numbers arrivals in the buffer. It is new at each `put` and survives claims, leases, returns
  from a lease, and revisions, so that a group comes back to its old place in the order.
- *Wake-ups.* After a step that may let a waiter continue, every listener is called with the tasks concerned, from
  any thread. A listener may be called too often, never too rarely (also after a reconnect).
- *Free loop.* No operation holds the event loop for long however much is stored (G10); work in proportion to its
  own batch is allowed.
- *Clock.* Times and deadlines are the storage's own (for a server: the server's), never the caller's.

Several owners (buffers) may use a storage at once: in one process, or, if `shared`, in many. All of them must open it
with the same settings.

An operation has no body here: a backend defines it as a method, or defines `_perform`, which runs all others.
"""

# mypy: disable-error-code="empty-body"
# ruff: noqa: B027

from __future__ import annotations

import asyncio
import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import msgspec

from forebay.core.capacity import Settings, Usage
from forebay.core.ledger import (
    Account,
    Clock,
    End,
    Event,
    GroupEnd,
    LedgerLine,
    Place,
    Record,
    Row,
    arrival_tokens,
    close_line,
)
from forebay.core.query import Node
from forebay.core.rollout import DRAWABLE, Status
from forebay.core.staleness import EXPIRABLE, Limits
from forebay.storage.values import Content, Holding, Ready, Reaped, Revision, Snapshot

T = TypeVar("T")


class Arrival(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group that is put: back from its producer, or by hand.

    `group_id` None: a new group by hand; the storage gives it a negative id. `attempt` None: by hand, or back from its
    owner. `stale`: it is stale and not retryable; it ends at once. `reset_tokens`: those that are no longer in
    `content` because they were too old. `failed`: the attempt failed.
    """

    task_name: str
    content: Content
    group_id: int | None = None
    attempt: int | None = None
    stale: bool = False
    reason: str | None = None
    reset_tokens: int = 0
    failed: bool = False

    def tokens(self, before: int) -> tuple[int, int]:
        """The tokens that it issues and resets; see `arrival_tokens`."""
        kept = self.content.facts.tokens
        return arrival_tokens(before, kept + self.reset_tokens, kept)


class Share(msgspec.Struct, frozen=True):
    """How much a producer may draw: see `rules.share_left`.

    EpochMoved unless the task is in this `epoch`. `most`: the number of its groups that may be produced (see
    `TaskSummary.produced`) or in flight afterwards, over all producers.
    """

    epoch: int
    most: int


class Draw(msgspec.Struct, frozen=True):
    """Who draws prompts, and from where: the task's cursor, the data set's state after them, the producer's share."""

    owner: str
    cursor: int
    source_state: bytes | None = None
    share: Share | None = None


class Purpose(enum.Enum):
    """What groups are claimed for."""

    TAKE = "take"  # for good, see `ledger.take_event`
    LEASE = "lease"  # for a trainer; needs lease_id and train_step
    DRAW = "draw"  # to be generated again, least group_id first, not in policy order


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """At most `wants[task]` buffered groups of every task, fresh by its clock and limits, in the order of the settings.

    Groups of an earlier one of `statuses` come first. `whole`: all that is wanted of every task, or nothing.
    `train_step` first advances the clocks of the tasks of which something is wanted. `group_ids`: only these groups,
    if any are given, and `share`: no more than this; for draws from one task.
    """

    wants: Mapping[str, int]
    statuses: tuple[Status, ...]
    purpose: Purpose
    owner: str
    whole: bool = False
    lease_id: str | None = None
    train_step: int | None = None
    group_ids: tuple[int, ...] = ()
    share: Share | None = None

    @property
    def clocks(self) -> dict[str, Clock]:
        """The clocks that the claim advances."""
        if self.train_step is None:
            return {}
        return {task_name: Clock(train_step=self.train_step) for task_name, n in self.wants.items() if n > 0}


Rows: TypeAlias = dict[str, list[Row]]


class Claimed(msgspec.Struct, frozen=True):
    """Rows that a claim moved, by task: as they are now, or, if they were taken for good, as they were in the buffer.

    `rows` is None if the claim is `whole` and groups were missing. `due`: its tasks that have rows for `Storage.due`.
    `limits`: the limits of its tasks.
    """

    rows: Rows | None
    due: tuple[str, ...] = ()
    limits: Mapping[str, Limits] = {}


class TaskSummary(msgspec.Struct, frozen=True):
    """The figures of a task. `statuses` counts buffered groups, `fresh` those that are not too old; missing means 0."""

    account: Account = msgspec.field(default_factory=Account)
    statuses: Mapping[Status, int] = {}
    fresh: Mapping[Status, int] = {}
    places: Mapping[Place, int] = {}
    place_tokens: Mapping[Place, int] = {}

    def line(self, *, tokens: bool = False) -> LedgerLine:
        """The closed ledger, in groups or in generated tokens."""
        return close_line(self.account, self.place_tokens if tokens else self.places, tokens=tokens)

    @property
    def taken(self) -> int:
        """Groups that are leased or trained."""
        return self.places.get(Place.LEASED, 0) + self.account.ended.get(End.TRAINED, 0)

    @property
    def produced(self) -> int:
        """Groups that count towards a target: buffered COMPLETED and fresh, leased, trained."""
        return self.fresh.get(Status.COMPLETED, 0) + self.taken

    def saved_step(self, of_store: int | None) -> int | None:
        """The model step of the last save: that of this task, or of the whole store."""
        return of_store if self.account.saved_step is None else self.account.saved_step

    @property
    def in_flight(self) -> int:
        """Groups that producers hold, in all processes."""
        return self.places.get(Place.IN_FLIGHT, 0)

    @property
    def unfinished(self) -> bool:
        """Whether groups are in flight, wait to be generated again, or are too old and have to be."""
        return bool(self.in_flight or self.due) or any(self.statuses.get(status, 0) for status in DRAWABLE)

    @property
    def due(self) -> bool:
        """Whether `Storage.due` has rows."""
        return any(self.statuses.get(status, 0) > self.fresh.get(status, 0) for status in EXPIRABLE)


class Summary(msgspec.Struct, frozen=True):
    """Every count of a storage at one moment. `holdings` (oldest first) are filled in only on request."""

    tasks: Mapping[str, TaskSummary]
    usage: Usage
    holdings: Sequence[Holding] = ()
    saved_step: int | None = None  # the model step of the last `saved` or `rewind` of all tasks
    owners: Collection[str] = ()  # on request: those that have it open, and have not missed their deadline

    def task(self, task_name: str) -> TaskSummary:
        """The figures of a task; zeros if it is unknown."""
        return self.tasks.get(task_name) or TaskSummary()

    def ledger(self, *, tokens: bool = False) -> dict[str, LedgerLine]:
        """The closed ledger of every task."""
        return {task_name: task.line(tokens=tokens) for task_name, task in self.tasks.items()}


Listener: TypeAlias = "Callable[[Collection[str]], None]"


class Operation(msgspec.Struct, frozen=True):
    """An operation. `changes`: it is more than a read. `once`: its answer is remembered (`storage.idempotency`)."""

    name: str
    changes: bool = True
    once: bool = False


OPERATIONS: dict[str, Operation] = {}


def operation(**traits: bool) -> Callable[[T], T]:
    """Make a method of `Storage` an operation; `traits` are fields of `Operation`."""

    def declare(method: Any) -> Any:
        declared = OPERATIONS[method.__name__] = Operation(method.__name__, **traits)

        @wraps(method)
        async def call(self: Storage, /, *args: Any, **kwargs: Any) -> Any:
            return await self._perform(declared, *args, **kwargs)

        return call

    return declare


class Storage(ABC):
    """Where groups live. See the top of this file for what every operation promises."""

    shared: ClassVar[bool] = False
    """Whether other processes can change it: leases then need a time limit."""

    durable: ClassVar[bool] = False
    """Whether acknowledged changes survive the process. Durable storages get values in place of references."""

    @property
    def store_id(self) -> str | None:
        """Names a durable store permanently, so that a checkpoint knows the store that it was made from."""
        return None

    def watch(self, ready: Ready | None) -> asyncio.Future[None] | None:
        """For a storage in another process, which hears of changes only while a caller waits.

        The future is done (after the listeners were called) when `ready` may hold, or, if it is None, when anything
        changed since the last answer. It fails if waiting makes no sense. Cancel it to stop.
        """
        return None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        missing = [name for name in OPERATIONS if getattr(cls, name) is vars(Storage)[name]]
        if missing and cls._perform is Storage._perform:
            raise TypeError(f"{cls.__name__} lacks operations: {', '.join(missing)}; define them, or _perform")
        return super().__new__(cls)

    async def _perform(self, operation: Operation, /, *args: Any, **kwargs: Any) -> Any:
        """Run an operation that this class does not define."""
        raise NotImplementedError(operation.name)

    # --- opening and closing ------------------------------------------------------------------------

    @operation()
    async def open(self, owner: str, settings: Settings, lease_s: float | None) -> None:
        """Register an owner; `lease_s` None: it never expires. InvalidConfig if it is open with other settings."""

    @operation()
    async def close(self, owner: str) -> None:
        """Release the owner's groups. It can issue and claim nothing (BufferClosed) until opened again.

        Closing twice is allowed.
        """

    @abstractmethod
    def beat(self, owner: str) -> None:
        """Renew the owner's deadline. Called from a heartbeat thread; may block and raise, must not touch the loop."""

    @abstractmethod
    async def reap(self) -> Reaped:
        """Release the groups of owners whose deadline has passed; these owners are fenced from then on."""

    @abstractmethod
    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` after changes; returns a function that ends the subscription."""

    # --- moves --------------------------------------------------------------------------------------

    @operation(once=True)
    async def issue(self, task_name: str, contents: Sequence[Content], draw: Draw) -> list[Record]:
        """Write drawn prompts as rows in flight and advance the task's cursor, in one step.

        Issues the first of them that fit (`rules.fitting`, `draw.share`), in order, and returns their records: maybe
        none. They get the group ids `draw.cursor`, `draw.cursor` + 1, ... and attempt 1. CursorMoved unless that is the
        task's cursor; DuplicateGroup if such an id was put by hand.
        """

    @operation(once=True)
    async def put(self, arrivals: Sequence[Arrival], *, owner: str) -> list[Record]:
        """Store groups: all of them, or none. Returns their records as they are (or were when they ended).

        `rules.check_return` decides which row in flight an arrival brings back; no row: it was put by
        hand, and NoRoom is raised if it does not fit.
        """

    @operation()
    async def claim(self, claim: Claim) -> Claimed:
        """Release the groups of dead owners, advance `claim.clocks`; then select, order, limit and move, in one step.

        With a `choose` policy, TAKE and LEASE show it the first 1,024 rows that qualify, in arrival order.
        """

    @operation()
    async def undo(self, claim: Claim, rows: Rows) -> None:
        """Put back rows of a claim whose caller never learned of it: each to its old place in the order.

        Rows that have moved since are left alone. Rows that were taken for good are booked back, so undo only once.
        With `idempotency.CALL` set to the claim's own call, the stored answer is removed in the same step.
        """

    @operation(once=True)
    async def settle(self, lease_id: str, uids: Sequence[int], event: Event, reason: str | None = None) -> None:
        """ACKED, NACKED or REJECTED for rows of a lease: all of them, or LostLease if one is no longer held."""

    @operation()
    async def release(self, owner: str) -> dict[str, int]:
        """Give back every group of an owner, in order of uid; groups by task.

        Groups in flight arrive again (timestamp_id, revision) as ABORTED; leases are nacked.
        """

    @operation()
    async def advance(self, clocks: Mapping[str, Clock]) -> None:
        """Move clocks forward and replace limits. Nothing of these tasks leaves afterwards that is too old by them.

        Listeners hear of tasks whose clocks or limits changed. Steps never go back (except by `rewind`).
        """

    @operation(once=True)
    async def write_plan(self, task_name: str, content: bytes, *, revision: int) -> bool:
        """Replace `Account.plan` if it still has this revision, which then grows by one; whether it was replaced."""

    @operation(changes=False)
    async def due(self, task_name: str, statuses: Collection[Status], limit: int) -> list[Row]:
        """Up to `limit` buffered rows of these EXPIRABLE statuses that are too old by the task's clock and limits."""

    @operation(once=True)
    async def revise(self, revisions: Sequence[Revision]) -> list[bool]:
        """Change buffered rows in place, each independently. False for one that has moved or changed meanwhile."""

    @operation(once=True)
    async def discard(self, node: Node, reason: str) -> dict[str, int]:
        """End every buffered group that matches, each independently: others may act in between. Groups by task."""

    @operation()
    async def fail(self, reasons: Mapping[int, str]) -> dict[str, int]:
        """End rows by uid as failed, each with its reason, whether they are owned or not; groups by task.

        For groups whose payload is lost; no other operation may end a group at every place. Archived rows
        have already ended: they are only removed, and not counted. Unknown uids are ignored.
        """

    @operation()
    async def set_priority(self, priorities: Mapping[int, float]) -> int:
        """Set the priority of rows by uid; returns the number of rows found."""

    @operation()
    async def saved(self, model_step: int, tasks: Collection[str] | None = None) -> None:
        """Weights of this step were saved with a checkpoint of these tasks (None: all), or a first one is to be made.

        From the first such call on, a durable storage archives every group that is acknowledged for a later train
        step, until a call with that step (or a later one): only then is its training safe.
        """

    @operation()
    async def rewind(self, model_step: int, tasks: Collection[str] | None = None) -> dict[str, int]:
        """REWOUND for every archived group of these tasks (None: of all) that was trained for a later step than this.

        Their accounts rewind their clocks (`Account.rewind`). Returns groups by task.
        """

    # --- ends ---------------------------------------------------------------------------------------

    @operation()
    async def note_ends(self) -> None:
        """From now on note every group that ends, in the step that ends it; a durable storage keeps doing so."""

    @operation(changes=False)
    async def ends(self, owner: str, limit: int) -> list[tuple[int, GroupEnd]]:
        """Up to `limit` noted ends, oldest first, with their numbers, for the owner to report.

        Until they are forgotten the owner gets them again, and others only when it has closed or was reaped.
        """

    @operation()
    async def forget_ends(self, numbers: Sequence[int]) -> None:
        """Drop ends that were reported. Unknown numbers are ignored."""

    # --- reads --------------------------------------------------------------------------------------

    @operation(changes=False)
    async def summary(
        self, tasks: Collection[str] | None = None, *, holdings: bool = False, owners: bool = False
    ) -> Summary:
        """Every count of these tasks (None: of all tasks), of one moment. Costs nothing per stored group.

        Unknown tasks are left out. `holdings`: with the groups of each owner, in proportion to what they hold.
        `owners`: with the living owners.
        """

    @operation(changes=False)
    async def records(self, node: Node, limit: int | None) -> list[Record]:
        """The records that match a tree (already without `staleness`), in order of uid, at any place."""

    @operation(changes=False)
    async def read(self, uid: int) -> Row | None:
        """One row with its payload."""

    @abstractmethod
    def __len__(self) -> int:
        """Buffered groups, as last seen by this process."""

    # --- streams ------------------------------------------------------------------------------------

    @abstractmethod
    async def snapshot(self) -> Snapshot:
        """Everything, as of one moment, while others continue."""

    @abstractmethod
    async def restore(
        self, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
    ) -> None:
        """Fill an empty storage from a stream of rows in order of uid; visible when all of it is stored.

        Places, leases, attempts and revisions are kept as they come. InvalidInput if the storage is not empty
        or the stream contradicts itself (`rules.StreamCheck`). Capacity does not count here.
        """
