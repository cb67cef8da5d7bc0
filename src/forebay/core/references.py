"""References in samples: a field may hold, at any depth, a reference to a value elsewhere (such as a Ray object).

The core knows no kind of reference: a module that brings one registers how to get its value and how to put one back.
Storages that keep samples as objects keep the references. For all other storages and for checkpoints, `resolve_group`
replaces them with values: one `Resolved` for every distinct reference, so that a value that members share is written
once. This module never frees a value: a reference is dropped with the row that holds it, like any Python object.

Without a registered kind, groups are not searched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from msgspec.structs import replace

from forebay.core.rollout import LEAVES, MAX_DEPTH, USER_FIELDS, Group, RolloutState, Status
from forebay.errors import ReferenceLost

REFERENCE_BYTES = 64
"""What a reference adds to the size of a group; its value is elsewhere."""


class Kind(NamedTuple):
    """How to handle references of one type; see `register`."""

    resolve: Callable[[Any], Awaitable[Any]]
    put: Callable[[Any], Any]
    available: Callable[[], bool]


KINDS: dict[type, Kind] = {}
_as_values: ContextVar[bool] = ContextVar("as_values", default=False)


class Resolved:
    """The value of a reference, in place of the reference. Equal to itself only."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"<Resolved {type(self.value).__name__} at {id(self):#x}>"


# --- kinds --------------------------------------------------------------------------------------------


def register(
    kind: type, *, resolve: Callable[[Any], Awaitable[Any]], put: Callable[[Any], Any], available: Callable[[], bool]
) -> None:
    """Make values of exactly this type references; they must be hashable, and equal if they mean the same value.

    `resolve` waits for the value, and raises ReferenceLost if the value no longer exists; `put` makes a reference to
    plain data and may be called in any thread; `available` says whether this process can call `put` now.
    """
    KINDS[kind] = Kind(resolve, put, available)


def unregister(kind: type) -> None:
    """Stop treating values of this type as references."""
    KINDS.pop(kind, None)


def is_reference(value: object) -> bool:
    """Whether a value is of a registered kind."""
    return type(value) in KINDS


# --- references and groups ----------------------------------------------------------------------------


def references_of(group: Sequence[RolloutState]) -> dict[Any, str]:
    """The distinct references in a group, each with the path of its first occurrence."""
    found: dict[Any, str] = {}
    if KINDS:
        seen: set[int] = set()
        for index, member in enumerate(group):
            for state in (member,) if member.issued is None else (member, member.issued):
                for name in USER_FIELDS:
                    value = getattr(state, name)
                    if type(value) not in LEAVES:
                        _find(value, f"$[{index}].{name}", found, seen, 0)
    return found


async def resolve_group(group: Group) -> Group:
    """The group with values in place of its references, or the group itself if it has none.

    Waits for values that are still being computed. ReferenceLost names a value that no longer exists. Does not change
    `group`.
    """
    resolved, lost = await _resolved(group)
    if lost is not None:
        raise ReferenceLost(lost)
    return resolved


async def resolve_or_fail(group: Group) -> Group:
    """As `resolve_group`, but if a value is lost, all members are FAILED with the reason, and None replaces it."""
    resolved, lost = await _resolved(group)
    if lost is None:
        return resolved
    members = tuple([state.__copy__() for state in resolved])
    for state in members:
        state.status, state.error_msg = Status.FAILED, lost
    return members


def without_references(group: Group) -> Group:
    """The group with None in place of its references: for a group that ends, whose values are not needed."""
    found = references_of(group)
    return _replaced(group, dict.fromkeys(found)) if found else group


async def _resolved(group: Group) -> tuple[Group, str | None]:
    """The group with values, or None for those that are lost, in place of its references; and the first loss."""
    found = references_of(group)
    if not found:
        return group, None
    values: dict[Any, Resolved | None] = {}
    lost: str | None = None
    results = await asyncio.gather(
        *[KINDS[type(reference)].resolve(reference) for reference in found], return_exceptions=True
    )
    for (reference, path), result in zip(found.items(), results, strict=True):
        if isinstance(result, ReferenceLost):
            lost = lost or f"{path}: {result}"
            values[reference] = None
        elif isinstance(result, BaseException):
            raise result
        else:
            values[reference] = Resolved(result)
    return _replaced(group, values), lost


def _find(value: Any, path: str, found: dict[Any, str], seen: set[int], depth: int) -> None:
    kind = type(value)
    if kind in KINDS:
        found.setdefault(value, path)
        return
    if kind is dict:
        items: Iterator[tuple[str, Any]] = ((f"{path}.{key}", item) for key, item in value.items())
        inside = value.values()
    elif kind is list or kind is tuple:
        items = ((f"{path}[{index}]", item) for index, item in enumerate(value))
        inside = value
    else:
        return
    # No frame can hold a value that is nested deeper.
    if id(value) in seen or depth >= MAX_DEPTH or LEAVES.issuperset(map(type, inside)):
        return
    seen.add(id(value))
    for inner, item in items:
        if type(item) not in LEAVES:
            _find(item, inner, found, seen, depth + 1)


def _replaced(group: Group, values: Mapping[Any, Any]) -> Group:
    """The group with `values` in place of references. Members that have one are copied; shared values stay shared."""
    made: dict[int, Any] = {}
    return tuple([_replaced_member(state, values, made) for state in group])


def _replaced_member(state: RolloutState, values: Mapping[Any, Any], made: dict[int, Any]) -> RolloutState:
    changed: dict[str, Any] = {}
    for name in USER_FIELDS:
        value = getattr(state, name)
        if type(value) not in LEAVES and (new := _rebuilt(value, values, made)) is not value:
            changed[name] = new
    issued = state.issued
    if issued is not None:
        if id(issued) not in made:
            made[id(issued)] = _replaced_member(issued, values, made)
        if made[id(issued)] is not issued:
            changed["issued"] = made[id(issued)]
    return replace(state, **changed) if changed else state


def _rebuilt(value: Any, values: Mapping[Any, Any], made: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in KINDS:
        return values.get(value, value)
    if kind is not dict and kind is not list and kind is not tuple:
        return value
    if id(value) not in made:
        made[id(value)] = value  # in case it holds itself; the codec refuses that
        if kind is dict:
            items = {key: _rebuilt(item, values, made) for key, item in value.items()}
            same = all(items[key] is item for key, item in value.items())
            made[id(value)] = value if same else items
        else:
            listed = [_rebuilt(item, values, made) for item in value]
            same = all(new is old for new, old in zip(listed, value, strict=True))
            made[id(value)] = value if same else kind(listed)
    return made[id(value)]


# --- values and references ----------------------------------------------------------------------------


@contextmanager
def as_values() -> Iterator[None]:
    """Within this block, decoded groups have `Resolved` values: for callers that only write them again."""
    token = _as_values.set(True)
    try:
        yield
    finally:
        _as_values.reset(token)


def put_back(values: list[Any]) -> list[Any]:
    """References to values that were written in place of references, in the same order.

    The first available kind puts each value back once; this process owns them then. If no kind is available, the plain
    values are returned.
    """
    if _as_values.get():
        return [Resolved(value) for value in values]
    for kind in KINDS.values():
        if kind.available():
            return [kind.put(value) for value in values]
    return values
