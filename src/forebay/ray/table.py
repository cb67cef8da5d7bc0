"""The table of operations: one row for each operation of a hosted storage.

A row names the types in which arguments and result travel, whether the operation changes something, which hosts of a
sharded buffer it concerns, and how their answers become one. `TableStorage` makes the methods of a storage from the
rows; clients, shards and hosts all read them. A new operation of the storage contract is one new row here.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from types import UnionType
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeAlias, TypeVar, get_args, get_origin

from forebay.core.ledger import Account, Clock, Event, GroupEnd, Record
from forebay.core.rollout import Status
from forebay.ray.wire import ArrivalHead, ClaimedHead, ContentHead, RevisionHead, RowHead
from forebay.storage.base import Claim, Reaped, Storage, Summary

__all__ = ["OPERATIONS", "Operation", "Route", "TableStorage"]

T = TypeVar("T")
P = ParamSpec("P")

Merge: TypeAlias = "Callable[[Sequence[Any], Sequence[Any]], Any]"
"""Makes one answer of the answers of several hosts and the arguments of the call."""


class Route(enum.Enum):
    """Which hosts an operation concerns."""

    ALL = "all hosts at once"
    TASK = "the hosts of the tasks in the argument that is split"
    UID = "the hosts of the rows in the argument that is split"


def nothing(answers: Sequence[Any], arguments: Sequence[Any]) -> None:
    """No answer."""


def union(answers: Sequence[Mapping[Any, Any]], arguments: Sequence[Any]) -> dict[Any, Any]:
    """Mappings without a common key as one."""
    return {key: value for answer in answers for key, value in answer.items()}


def total(answers: Sequence[int], arguments: Sequence[Any]) -> int:
    """The sum."""
    return sum(answers)


def first_by_uid(answers: Sequence[list[Record]], arguments: Sequence[Any]) -> list[Record]:
    """All records in order of uid, up to the limit of the call."""
    _, limit = arguments
    return sorted([record for answer in answers for record in answer], key=lambda record: record.uid)[:limit]


class Operation:
    """One row of the table.

    `arguments` and `result` are the types in which they travel. `changes`: a call that arrives twice must happen once.
    `carried`: the position of an argument that only Ray can carry. `split`: the position of the argument by which the
    operation is routed: a task, a uid, or a list or mapping of them. The answers to the parts of a list are lists.
    """

    def __init__(
        self,
        name: str,
        arguments: Any,
        result: Any,
        *,
        changes: bool = True,
        carried: int | None = None,
        route: Route = Route.ALL,
        split: int = 0,
        merge: Merge = nothing,
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.result = result
        self.changes = changes
        self.carried = carried
        self.route = route
        self.split = split
        self.merge = merge
        self.parameters: Mapping[str, inspect.Parameter] = {}
        self._collections = [_collection(kind) for kind in get_args(arguments)]

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call in the order of the parameters, with collections as lists and dictionaries."""
        rest = [*self.parameters.values()][len(args) :]
        values = [*args, *[kwargs.get(parameter.name, parameter.default) for parameter in rest]]
        return tuple(
            value if make is None or value is None or type(value) is make else make(value)
            for value, make in zip(values, self._collections, strict=True)
        )

    def call(self, storage: Storage, arguments: Sequence[Any]) -> Coroutine[Any, Any, Any]:
        """Run the operation on a storage."""
        positional, named = [], {}
        for parameter, value in zip(self.parameters.values(), arguments, strict=True):
            if parameter.kind is parameter.KEYWORD_ONLY:
                named[parameter.name] = value
            else:
                positional.append(value)
        running: Coroutine[Any, Any, Any] = getattr(storage, self.name)(*positional, **named)
        return running


def _collection(kind: Any) -> Any:
    """`list` or `dict`, if arguments travel as one."""
    parts = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return next((origin for part in parts if (origin := get_origin(part)) in (list, dict)), None)


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        # Not in the contract: streams through many calls, and claims whose caller has gone.
        Operation("withdraw", tuple[int, Claim], None),
        Operation("snapshot", tuple[()], tuple[dict[str, Account], int, int, str]),
        Operation("stream", tuple[str], list[RowHead]),
        Operation("end_stream", tuple[str], None),
        Operation("restore", tuple[dict[str, Account], int, int], str),
        Operation("restore_rows", tuple[str, list[RowHead]], bool),
        Operation("end_restore", tuple[str, bool], None),
    )
}
"""All operations that a host knows, by name."""


def _row(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], arguments: Any, result: Any, **more: Any
) -> Callable[Concatenate[TableStorage, P], Coroutine[Any, Any, T]]:
    """An operation of the contract, as a method that runs it by `TableStorage._run`."""
    operation = OPERATIONS[method.__name__] = Operation(method.__name__, arguments, result, **more)
    operation.parameters = {name: each for name, each in inspect.signature(method).parameters.items() if name != "self"}

    @wraps(method)
    async def call(self: TableStorage, /, *args: P.args, **kwargs: P.kwargs) -> T:
        answer: T = await self._run(operation, operation.bound(args, kwargs))
        return answer

    call.__isabstractmethod__ = False  # type: ignore[attr-defined]
    return call


_BY_TASK, _BY_UID = {"route": Route.TASK}, {"route": Route.UID}
_COUNTS = dict[str, int]


class TableStorage(Storage):
    """A storage whose operations run on hosts. Hosts release the groups of dead owners by themselves."""

    shared: ClassVar[bool] = True

    async def _run(self, operation: Operation, arguments: tuple[Any, ...]) -> Any:
        raise NotImplementedError

    async def reap(self) -> Reaped:
        return Reaped({}, None)

    open = _row(Storage.open, tuple[str, None, float | None], str | None, carried=1)
    close = _row(Storage.close, tuple[str], None)
    issue = _row(Storage.issue, tuple[str, list[ContentHead], str, int, bytes | None], list[Record], **_BY_TASK)
    put = _row(Storage.put, tuple[list[ArrivalHead], str], list[Record], **_BY_TASK)
    claim = _row(Storage.claim, tuple[Claim], ClaimedHead)
    undo = _row(Storage.undo, tuple[Claim, dict[str, list[RowHead]]], None, split=1, **_BY_TASK)
    settle = _row(Storage.settle, tuple[str, list[int], Event, str | None], None, split=1, **_BY_UID)
    release = _row(Storage.release, tuple[str], _COUNTS, merge=union)
    advance = _row(Storage.advance, tuple[dict[str, Clock]], None, **_BY_TASK)
    due = _row(Storage.due, tuple[str, list[Status], int], list[RowHead], changes=False, **_BY_TASK)
    revise = _row(Storage.revise, tuple[list[RevisionHead]], list[bool], **_BY_UID)
    discard = _row(Storage.discard, tuple[None, str], _COUNTS, carried=0, merge=union)
    fail = _row(Storage.fail, tuple[dict[int, str]], _COUNTS, merge=union, **_BY_UID)
    set_priority = _row(Storage.set_priority, tuple[dict[int, float]], int, merge=total, **_BY_UID)
    saved = _row(Storage.saved, tuple[int], None)
    rewind = _row(Storage.rewind, tuple[int], _COUNTS, merge=union)
    note_ends = _row(Storage.note_ends, tuple[()], None, changes=False)
    ends = _row(Storage.ends, tuple[str, int], list[tuple[int, GroupEnd]], changes=False)
    forget_ends = _row(Storage.forget_ends, tuple[list[int]], None, changes=False)
    summary = _row(Storage.summary, tuple[list[str] | None, bool], Summary, changes=False)
    records = _row(Storage.records, tuple[None, int | None], list[Record], changes=False, carried=0, merge=first_by_uid)
    read = _row(Storage.read, tuple[int], RowHead | None, changes=False, **_BY_UID)
