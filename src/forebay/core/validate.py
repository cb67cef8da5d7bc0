"""Checks of groups and of arguments, done before anything is stored.

Statuses given as strings become `Status`, and numpy integers become int. Every error names the member or the argument,
the value that was found, and the value that was expected. `payload` and the codec check values inside user data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from numpy import generic, integer, ndarray

from forebay.core.rollout import COLUMNS, FIELDS, RolloutState, Status, columns_of, versioned_tokens
from forebay.errors import InvalidConfig, InvalidGroup, InvalidInput

K = TypeVar("K")
T = TypeVar("T")

_STRING = frozenset(FIELDS["response"].types)


def check_group(group: Sequence[RolloutState], task_name: str) -> tuple[int | None, int | None]:
    """The (group_id, attempt) that all members have; InvalidGroup names the member that does not fit.

    All members must have one task and one group, distinct (rollout_id, segment), known statuses, tries and steps that
    are not negative, and one-dimensional token columns. Columns beside the response must have the same length as it.
    """
    if not isinstance(group, (list, tuple)):
        raise InvalidGroup(f"a group is a list of RolloutState, got a {type(group).__name__}")
    if not group:
        raise InvalidGroup(f"a group for task {task_name!r} has no members; expected at least one sample")
    first = group[0]
    if not isinstance(first, RolloutState):
        raise InvalidGroup(f"a group is a list of RolloutState; its first member is a {type(first).__name__}")
    group_id = _identity("group_id", first.group_id)
    attempt = _identity("attempt", first.attempt)
    seen = set()
    unnamed = 0
    for state in group:
        if not isinstance(state, RolloutState):
            raise InvalidGroup(f"a group is a list of RolloutState; one member is a {type(state).__name__}")
        if state.task_name != task_name and state.task_name is not None:
            raise InvalidGroup(
                f"{_name(state)} belongs to task {state.task_name!r}, but was put for task {task_name!r}; "
                "put it for its own task"
            )
        if state.group_id != group_id:
            raise InvalidGroup(
                f"members of groups {group_id} and {state.group_id} are mixed; expected the same group_id for all "
                "members (or None for all, then the buffer assigns one)"
            )
        if state.attempt != attempt:
            raise InvalidGroup(
                f"members of group {group_id} come from attempts {attempt} and {state.attempt}; expected one attempt"
            )
        if type(state.status) is not Status:
            _coerce_status(state)
        tries, segment, stale = state.num_tries, state.segment, state.seq_staleness
        if not (type(tries) is type(segment) is type(stale) is int) or tries < 0 or segment < 0 or stale < 0:
            _coerce_counts(state)
        rollout_id = state.rollout_id
        if rollout_id is None:
            unnamed += 1
        else:
            if type(rollout_id) is not int or not -(2**63) <= rollout_id < 2**63:
                rollout_id = state.rollout_id = _identity("rollout_id", rollout_id)
            seen.add((rollout_id, segment))
        # Written out, as in `payload`: loops over FIELDS here make a put a fifth slower.
        if (
            type(state.error_msg) not in _STRING
            or type(state.response) not in _STRING
            or type(state.finish_reason) not in _STRING
            or type(state.message) is not list
            or type(state.extra_fields) is not dict
        ):
            raise _wrong_type(state)
        _check_columns(state)
    if unnamed and seen:
        raise InvalidGroup(f"group {group_id}: only some members have a rollout_id; expected all or none")
    if not unnamed and len(seen) != len(group):
        pairs = [(state.rollout_id, state.segment) for state in group]
        twice = next(pair for pair in pairs if pairs.count(pair) > 1)
        raise InvalidGroup(
            f"group {group_id}: rollout_id {twice[0]} (segment {twice[1]}) appears twice; expected distinct "
            "rollout ids, or distinct segments of one rollout"
        )
    return group_id, attempt


def plain_columns(group: Sequence[RolloutState]) -> bool:
    """Turn numpy scalars in token columns that are lists into Python numbers; whether there were any.

    `[*state.response_ids, token]` creates such lists if `response_ids` is an array. Reads every item: call it
    only for groups that would otherwise be refused.
    """
    found = False
    for state in group:
        for name in COLUMNS:
            column = getattr(state, name)
            if type(column) is list and any(isinstance(item, generic) for item in column):
                setattr(state, name, [item.item() if isinstance(item, generic) else item for item in column])
                found = True
    return found


def _check_columns(state: RolloutState) -> None:
    response_ids, mask, logprobs = state.response_ids, state.response_mask, state.logprobs
    for column in columns_of(state):
        if column is None or type(column) is list or (isinstance(column, ndarray) and column.ndim == 1):
            continue
        name = next(name for name in COLUMNS if getattr(state, name) is column)
        found = f"numpy array of shape {column.shape}" if isinstance(column, ndarray) else type(column).__name__
        raise InvalidGroup(f"{name} of {_name(state)} is a {found}; expected a list or a one-dimensional numpy array")
    spans = state.version_spans
    if type(spans) is not tuple:
        _check_spans(state)
        spans = state.version_spans
    if response_ids is not None:
        if mask is not None and len(mask) != len(response_ids):
            raise _unequal(state, "response_mask", "response_ids")
        if logprobs is not None and len(logprobs) != len(response_ids) and state.input_ids is None:
            raise _unequal(state, "logprobs", "response_ids")
    elif state.input_ids is None and state.labels is None:
        for name, entries in (("response_mask", mask), ("logprobs", logprobs), ("version_spans", spans)):
            if entries is not None and len(entries):
                raise InvalidGroup(f"{name} of {_name(state)} has {len(entries)} items, but it has no response_ids")
    if state.input_ids is not None and state.labels is not None and len(state.labels) != len(state.input_ids):
        raise _unequal(state, "labels", "input_ids")
    if spans:
        _check_spans(state)


def _check_spans(state: RolloutState) -> None:
    tokens = 0
    plain = type(state.version_spans) is tuple
    try:
        for step, run in state.version_spans:
            if not (_is_integer(step) and _is_integer(run)) or not (0 <= step < 2**63) or run <= 0:
                raise ValueError((step, run))
            plain = plain and type(step) is type(run) is int
            tokens += run
    except (TypeError, ValueError):
        raise InvalidGroup(
            f"version_spans of {_name(state)} is {state.version_spans!r}; expected pairs of a model step (0 or more) "
            "and a number of tokens (1 or more)"
        ) from None
    if tokens > versioned_tokens(state):
        raise InvalidGroup(
            f"version_spans of {_name(state)} covers {tokens} tokens, but it has only {versioned_tokens(state)}"
        )
    if not plain:
        state.version_spans = tuple((int(step), int(run)) for step, run in state.version_spans)


def _wrong_type(state: RolloutState) -> InvalidGroup:
    names = ("error_msg", "response", "finish_reason", "message", "extra_fields")
    name = next(name for name in names if type(getattr(state, name)) not in FIELDS[name].types)
    found = type(getattr(state, name)).__name__
    return InvalidGroup(f"{name} of {_name(state)} is a {found}; expected {FIELDS[name].expected}")


def _coerce_status(state: RolloutState) -> None:
    try:
        state.status = Status(state.status)
    except ValueError:
        raise InvalidGroup(f"{_name(state)} has status {state.status!r}; expected one of {', '.join(Status)}") from None


def _coerce_counts(state: RolloutState) -> None:
    for name in ("num_tries", "segment", "seq_staleness"):
        value = getattr(state, name)
        if not _is_integer(value) or value < 0:
            raise InvalidGroup(f"{name} of {_name(state)} is {value!r}; expected an integer of at least 0")
        setattr(state, name, int(value))


def _identity(name: str, value: int | None) -> int | None:
    if value is None or (type(value) is int and -(2**63) <= value < 2**63):
        return value
    if not isinstance(value, integer):
        raise InvalidGroup(f"{name} is {value!r}; expected an integer of at most 64 bits")
    return int(value)


def _unequal(state: RolloutState, name: str, other: str) -> InvalidGroup:
    items, others = len(getattr(state, name)), len(getattr(state, other))
    return InvalidGroup(f"{name} of {_name(state)} has {items} items but {other} has {others}; the lengths must match")


def _name(state: RolloutState) -> str:
    return f"rollout {state.rollout_id} of group {state.group_id}"


def _is_integer(value: object) -> bool:
    return type(value) is int or (isinstance(value, (int, integer)) and not isinstance(value, bool))


def checked_integer(name: str, value: object, *, least: int | None = None) -> int:
    """`value` as an int; InvalidInput names it."""
    if not _is_integer(value) or (least is not None and value < least):  # type: ignore[operator]
        at_least = "" if least is None else f" of at least {least}"
        raise InvalidInput(f"{name} is {value!r:.80}; expected an integer{at_least}")
    return int(value)  # type: ignore[call-overload,no-any-return]


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
"""Parts of the names of figures (`forebay/manager/...`, `forebay/<task>/produce/...`), which no task may have."""


def checked_task(task_name: str) -> str:
    """The name of a task; InvalidInput if it is empty, or if its figures would collide with others."""
    if not isinstance(task_name, str) or not task_name:
        raise InvalidInput(f"task_name is {task_name!r}; expected a non-empty string")
    if not RESERVED_NAMES.isdisjoint(task_name.split("/")):
        raise InvalidInput(
            f"task_name is {task_name!r}, but names of figures contain {', '.join(sorted(RESERVED_NAMES))}; choose "
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
    """The values as a list; a string is refused, because it would become a list of its characters."""
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
    """The number of groups per task; a negative number counts as 0."""
    if not isinstance(wants, Mapping):
        raise InvalidInput(f"wants is {wants!r:.80}; expected a dict of task names and numbers of groups")
    return {
        checked_task(task_name): max(0, checked_integer(f"groups of {task_name!r}", n))
        for task_name, n in wants.items()
    }


def checked_priority(name: str, priority: object) -> float:
    """A priority as a float; InvalidInput unless it is a finite number."""
    if not isinstance(priority, (int, float)) or not abs(priority) <= 1e300:
        raise InvalidInput(f"{name} is {priority!r:.80}; expected a finite number")
    return float(priority)


def checked_reason(reason: str) -> str:
    if not isinstance(reason, str) or not reason:
        raise InvalidInput(f"reason is {reason!r}; expected a non-empty string, which reasons() counts and shows")
    return reason


def integer_setting(name: str, value: object, *, least: int) -> int:
    """A setting as an int, or InvalidConfig that names it."""
    try:
        return checked_integer(name, value, least=least)
    except InvalidInput as error:
        raise InvalidConfig(str(error)) from None


def positive_seconds(name: str, value: object, *, or_zero: bool = False) -> float:
    """A setting as a positive, finite number of seconds (`or_zero`: zero is allowed), or InvalidConfig."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < float("inf") or (value == 0 and not or_zero):  # type: ignore[operator]
        expected = "a number of seconds, 0 or more" if or_zero else "a positive number of seconds"
        raise InvalidConfig(f"{name} is {value!r:.80}; expected {expected}")
    return float(value)  # type: ignore[arg-type]
