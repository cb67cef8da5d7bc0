"""The table of operations: one row for each operation of a hosted storage, made from the storage contract.

The signature of an operation gives the types of its arguments and its result, and the argument by which several
hosts share the work; `TableStorage` has its method, and hosts run it on their storage. So a new operation of the
contract needs no line in `forebay.ray`, unless the sum of several hosts' answers is not what it means
(see `ShardedStorage`). `HostOperations` has the operations that only hosts have.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from types import UnionType
from typing import Any, ClassVar, Protocol, get_args, get_origin

from forebay.core.capacity import Settings
from forebay.core.ledger import Account, Row
from forebay.core.query import Node
from forebay.storage import base
from forebay.storage.base import Claim, Storage
from forebay.storage.values import Reaped

_REPEATABLE = frozenset(("due", "note_ends", "ends", "forget_ends", "summary", "records", "read"))
"""Operations that may happen twice. The calls of all others are numbered, so that they happen once."""


class Route(enum.Enum):
    """Which hosts an operation concerns."""

    ALL = "all hosts at once"
    TASK = "the hosts of the tasks in the argument that is split"
    UID = "the hosts of the rows in the argument that is split"


class Operation:
    """One row of the table, read from the signature of a method.

    `arguments` and `result` are the types in which they travel; `carried` is the position of an argument that only Ray
    can carry. `split` is the position of the argument by which the operation is routed: a task, a uid, or a list or
    mapping of them.
    """

    def __init__(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.name = method.__name__
        self.changes = self.name not in _REPEATABLE
        self._signature = inspect.signature(method, eval_str=True)
        self.parameters = list(self._signature.parameters)[1:]
        kinds = [self._signature.parameters[name].annotation for name in self.parameters]
        self._collections = [_collection(kind) for kind in kinds]
        self.carried = next((index for index, kind in enumerate(kinds) if kind in (Node, Settings)), None)
        self.arguments = tuple[tuple(None if index == self.carried else kind for index, kind in enumerate(kinds))]  # type: ignore[misc]
        self.result = self._signature.return_annotation
        routes = [_route(name, kind) for name, kind in zip(self.parameters, kinds, strict=True)]
        self.split = next((index for index, route in enumerate(routes) if route is not Route.ALL), 0)
        self.route = routes[self.split] if routes else Route.ALL

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call in the order of the parameters, with collections as lists and dictionaries."""
        bound = self._signature.bind(None, *args, **kwargs)
        bound.apply_defaults()
        _, *values = bound.arguments.values()
        return tuple(
            value if make is None or value is None or type(value) is make else make(value)
            for value, make in zip(values, self._collections, strict=True)
        )

    def call(self, storage: Storage, arguments: Sequence[Any]) -> Coroutine[Any, Any, Any]:
        """Run the operation on a storage."""
        running: Coroutine[Any, Any, Any] = getattr(storage, self.name)(
            **dict(zip(self.parameters, arguments, strict=True))
        )
        return running


def _collection(kind: Any) -> type[list[Any]] | type[dict[Any, Any]] | None:
    """`list` or `dict`, if arguments travel as one."""
    for part in get_args(kind) if isinstance(kind, UnionType) else (kind,):
        origin = get_origin(part)
        if isinstance(origin, type) and issubclass(origin, Collection) and origin is not tuple:
            return dict if issubclass(origin, Mapping) else list
    return None


def _route(name: str, kind: Any) -> Route:
    """How an argument of this name and type divides an operation."""
    collection = _collection(kind)
    item = get_args(kind)[0] if collection else None
    fields = getattr(item, "__struct_fields__", ())
    if name == "task_name" or "task_name" in fields or (collection is dict and item is str):
        return Route.TASK
    if name == "uid" or "uid" in fields or item is int:
        return Route.UID
    return Route.ALL


class HostOperations(Protocol):
    """Operations that are not in the contract, or other there: claims whose caller has gone, streams in many calls."""

    async def open(self, owner: str, settings: Settings, lease_s: float | None) -> str | None: ...
    async def withdraw(self, sequence: int, claim: Claim) -> None: ...
    async def snapshot(self) -> tuple[dict[str, Account], int, int, str]: ...
    async def stream(self, stream_id: str) -> list[Row]: ...
    async def end_stream(self, stream_id: str) -> None: ...
    async def restore(self, accounts: dict[str, Account], next_uid: int, next_timestamp_id: int) -> str: ...
    async def restore_rows(self, restore_id: str, rows: list[Row]) -> bool: ...
    async def end_restore(self, restore_id: str, complete: bool) -> None: ...


class TableStorage(Storage):
    """A storage whose operations run on hosts. Hosts release the groups of dead owners by themselves."""

    shared: ClassVar[bool] = True

    async def _run(self, operation: Operation, arguments: tuple[Any, ...]) -> Any:
        raise NotImplementedError

    async def _perform(self, operation: base.Operation, /, *args: Any, **kwargs: Any) -> Any:
        row = OPERATIONS[operation.name]
        return await self._run(row, row.bound(args, kwargs))

    async def reap(self) -> Reaped:
        return Reaped({}, None)


OPERATIONS = {name: Operation(getattr(Storage, name)) for name in base.OPERATIONS}
"""All operations that a host knows, by name."""
OPERATIONS |= {name: Operation(method) for name, method in vars(HostOperations).items() if not name.startswith("_")}
