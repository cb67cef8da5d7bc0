"""Checks of the arguments that many calls share: a clear error for what cannot be meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from forebay.checks import whole_number
from forebay.errors import InvalidInput
from forebay.rollout import Status

__all__ = [
    "RESERVED_NAMES",
    "batch_name",
    "checked_many",
    "checked_mapping",
    "checked_reason",
    "checked_status",
    "checked_statuses",
    "checked_task",
    "checked_wants",
]

K = TypeVar("K")
T = TypeVar("T")


RESERVED_NAMES = frozenset(
    (
        "batch",
        "buffered",
        "bytes",
        "groups",
        "groups_kept_aside",
        "manager",
        "max_bytes",
        "max_groups",
        "on_group_end",
        "produce",
        "reserved_bytes",
        "tokens",
        "waiting",
    )
)
"""What figures are called (`forebay/manager/...`, `forebay/<task>/produce/...`): tasks of these names would mix in."""


def checked_task(task_name: str) -> str:
    """The name of a task; InvalidInput if it is empty, or if its figures would mix with others."""
    if not isinstance(task_name, str) or not task_name:
        raise InvalidInput(f"task_name is {task_name!r}; expected a string that is not empty")
    if not RESERVED_NAMES.isdisjoint(task_name.split("/")):
        raise InvalidInput(
            f"task_name is {task_name!r}, and figures are called so ({', '.join(sorted(RESERVED_NAMES))}); choose "
            "another name"
        )
    return task_name


def checked_status(status: Status | str) -> Status:
    if type(status) is Status:
        return status
    try:
        return Status(status)
    except (ValueError, TypeError):
        raise InvalidInput(f"unknown status {status!r}; expected one of {', '.join(Status)}") from None


def checked_many(name: str, values: Iterable[T]) -> list[T]:
    """Several things, given one by one: a text is one thing, not its letters."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise InvalidInput(f"{name} are {values!r:.80}; expected a list")
    return list(values)


def checked_statuses(statuses: Iterable[Status | str]) -> tuple[Status, ...]:
    return tuple(checked_status(status) for status in checked_many("statuses", statuses))


def checked_mapping(name: str, mapping: Mapping[K, T] | None) -> Mapping[K, T]:
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping):
        raise InvalidInput(f"{name} is {mapping!r:.80}; expected a dict")
    return mapping


def checked_wants(wants: Mapping[str, int]) -> dict[str, int]:
    """Groups per task; what is asked for 0 or less counts as 0."""
    if not isinstance(wants, Mapping):
        raise InvalidInput(f"expected {{task: groups}}, got {wants!r}")
    return {
        checked_task(task_name): max(0, whole_number(f"groups of {task_name!r}", n)) for task_name, n in wants.items()
    }


def checked_reason(reason: str) -> str:
    if not isinstance(reason, str) or not reason:
        raise InvalidInput(f"a reason is needed, got {reason!r}; it is counted, and shown by reasons()")
    return reason


def batch_name(wants: Mapping[str, int], status: Status) -> str:
    """How a batch is called in explanations."""
    parts = [f"{n} of task {task_name!r}" for task_name, n in wants.items() if n > 0]
    return f"{status} groups: {', '.join(parts) or 'none'}"
