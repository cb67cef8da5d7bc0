"""What makes samples a group, and a number a whole one: checked before anything is stored.

Statuses given as text and numbers given as numpy scalars become what they stand for. Every error names the member,
the value that was found, and what was expected.
"""

from __future__ import annotations

from collections.abc import Sequence

from numpy import generic, integer, ndarray

from forebay.errors import InvalidGroup, InvalidInput
from forebay.rollout import RolloutState, Status, versioned_tokens

__all__ = ["check_group", "plain_columns", "whole_number"]

_COLUMNS = ("prompt_ids", "tokens", "response_ids", "logprobs", "response_mask", "input_ids", "labels")


def check_group(group: Sequence[RolloutState], task_name: str) -> tuple[int | None, int | None]:
    """The (group_id, attempt) that the members agree on, or InvalidGroup saying which member does not fit.

    Checked: one task, one group, distinct (rollout_id, segment), known statuses, tries and steps not
    negative, one-dimensional token columns, and equal lengths of what is aligned with the response.
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
                f"{_name(state)} belongs to task {state.task_name!r}, but is put for task {task_name!r}; "
                "put it under its own task"
            )
        if state.group_id != group_id:
            raise InvalidGroup(
                f"members of groups {group_id} and {state.group_id} are mixed; expected one group_id for all "
                "members (or none, and the buffer gives one)"
            )
        if state.attempt != attempt:
            raise InvalidGroup(
                f"members of group {group_id} come from hand-outs {attempt} and {state.attempt}; expected one"
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
        if (
            type(state.error_msg) not in _TEXT
            or type(state.response) not in _TEXT
            or type(state.finish_reason) not in _TEXT
            or type(state.message) is not list
            or type(state.extra_fields) is not dict
        ):
            _refuse_types(state)
        _check_columns(state)
    if unnamed and seen:
        raise InvalidGroup(f"group {group_id}: only some members have a rollout_id; expected all or none")
    if not unnamed and len(seen) != len(group):
        pairs = [(state.rollout_id, state.segment) for state in group]
        twice = next(pair for pair in pairs if pairs.count(pair) > 1)
        raise InvalidGroup(
            f"group {group_id}: rollout_id {twice[0]} (segment {twice[1]}) stands twice; expected distinct "
            "rollout ids, or distinct segments of one rollout"
        )
    return group_id, attempt


def plain_columns(group: Sequence[RolloutState]) -> bool:
    """Turn numpy scalars in token columns that are lists into numbers; whether there were any.

    `[*state.response_ids, token]` makes them of an array. Costs a look at every item: for what is refused otherwise.
    """
    found = False
    for state in group:
        for name in _COLUMNS:
            column = getattr(state, name)
            if type(column) is list and any(isinstance(item, generic) for item in column):
                setattr(state, name, [item.item() if isinstance(item, generic) else item for item in column])
                found = True
    return found


def _check_columns(state: RolloutState) -> None:
    response_ids, mask, logprobs = state.response_ids, state.response_mask, state.logprobs
    for column in (state.prompt_ids, state.tokens, response_ids, logprobs, mask, state.input_ids, state.labels):
        if column is None or type(column) is list or (isinstance(column, ndarray) and column.ndim == 1):
            continue
        name = next(name for name in _COLUMNS if getattr(state, name) is column)
        raise InvalidGroup(
            f"{name} of {_name(state)} is a {_describe(column)}; expected a list or a one-dimensional numpy array"
        )
    spans = state.version_spans
    if type(spans) is not tuple:
        _check_spans(state)
        spans = state.version_spans
    if response_ids is not None:
        expected = len(response_ids)
        if mask is not None and len(mask) != expected:
            raise _unequal(state, "response_mask", len(mask), expected)
        if logprobs is not None and len(logprobs) != expected and state.input_ids is None:
            raise _unequal(state, "logprobs", len(logprobs), expected)
    elif state.input_ids is None and state.labels is None:
        for name, entries in (("response_mask", mask), ("logprobs", logprobs), ("version_spans", spans)):
            if entries is not None and len(entries):
                raise InvalidGroup(f"{_name(state)} has {len(entries)} entries in {name}, but no response_ids")
    if state.input_ids is not None and state.labels is not None and len(state.labels) != len(state.input_ids):
        raise InvalidGroup(
            f"{_name(state)}: {len(state.labels)} labels for {len(state.input_ids)} input_ids; expected as many"
        )
    if spans:
        _check_spans(state)


def _check_spans(state: RolloutState) -> None:
    tokens = 0
    plain = type(state.version_spans) is tuple
    try:
        for step, run in state.version_spans:
            if not (_is_whole(step) and _is_whole(run)) or not (0 <= step < 2**63) or run <= 0:
                raise ValueError((step, run))
            plain = plain and type(step) is type(run) is int
            tokens += run
    except (TypeError, ValueError):
        raise InvalidGroup(
            f"version_spans of {_name(state)} is {state.version_spans!r}; expected pairs of a model step from 0 and a "
            "number of tokens from 1"
        ) from None
    if tokens > versioned_tokens(state):
        raise InvalidGroup(
            f"{_name(state)} has versions for {tokens} tokens, but only {versioned_tokens(state)} tokens"
        )
    if not plain:
        state.version_spans = tuple((int(step), int(run)) for step, run in state.version_spans)


_TEXT = frozenset((str, type(None)))


def _refuse_types(state: RolloutState) -> None:
    for name in ("error_msg", "response", "finish_reason"):
        value = getattr(state, name)
        if type(value) not in _TEXT:
            raise InvalidGroup(f"{name} of {_name(state)} is a {type(value).__name__}; expected a text or None")
    if type(state.message) is not list:
        raise InvalidGroup(f"message of {_name(state)} is a {type(state.message).__name__}; expected a list of dicts")
    raise InvalidGroup(f"extra_fields of {_name(state)} is a {type(state.extra_fields).__name__}; expected a dict")


def _coerce_status(state: RolloutState) -> None:
    try:
        state.status = Status(state.status)
    except ValueError:
        raise InvalidGroup(f"{_name(state)} has status {state.status!r}; expected one of {', '.join(Status)}") from None


def _coerce_counts(state: RolloutState) -> None:
    for name in ("num_tries", "segment", "seq_staleness"):
        value = getattr(state, name)
        if not _is_whole(value) or value < 0:
            raise InvalidGroup(f"{name} of {_name(state)} is {value!r}; expected a whole number from 0")
        setattr(state, name, int(value))


def _identity(name: str, value: int | None) -> int | None:
    if value is None or (type(value) is int and -(2**63) <= value < 2**63):
        return value
    if not isinstance(value, integer):
        raise InvalidGroup(f"{name} is {value!r}; expected a whole number of at most 64 bits")
    return int(value)


def _unequal(state: RolloutState, name: str, found: int, expected: int) -> InvalidGroup:
    return InvalidGroup(f"{_name(state)} has {found} entries in {name} for {expected} response_ids; expected as many")


def _name(state: RolloutState) -> str:
    return f"rollout {state.rollout_id} of group {state.group_id}"


def _describe(value: object) -> str:
    if isinstance(value, ndarray):
        return f"numpy array of shape {value.shape}"
    return type(value).__name__


def _is_whole(value: object) -> bool:
    return type(value) is int or (isinstance(value, (int, integer)) and not isinstance(value, bool))


def whole_number(name: str, value: object, *, least: int | None = None) -> int:
    """`value` as an int, or InvalidInput that names it."""
    if not _is_whole(value):
        raise InvalidInput(f"{name} is {value!r}; expected a whole number")
    number = int(value)  # type: ignore[call-overload]
    if least is not None and number < least:
        raise InvalidInput(f"{name} is {number}; expected at least {least}")
    return int(number)
