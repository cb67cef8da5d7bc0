"""The prompt as issued, and how an agent loop changed it.

A producer gets members that carry their prompt as it was issued (`RolloutState.issued`, one object for all members that
share it). If a loop then changes `message`, `extra_fields` or any other field of `ISSUED_FIELDS`, `reset_response`
returns to the prompt as issued. When a group comes back, `settle_changes` compares: unchanged values become the issued
objects again, and a member that changed nothing drops `issued`. So a stored group has its prompt once, and beside it
only differences: messages added to the issued ones, keys of a dict that were added, changed or removed, or another
value. `difference` and `apply_difference` turn the differences into plain data and back, for frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import msgspec

from forebay.core.plain import same_value
from forebay.core.rollout import (
    FIELDS,
    ISSUED_FIELDS,
    Part,
    RolloutState,
    SampleParams,
    carries_response,
    shares_prompt,
)
from forebay.errors import InvalidGroup

__all__ = ["apply_difference", "difference", "is_as_issued", "remember_prompt", "settle_changes"]

_REPLACED, _EXTENDED, _EDITED = 0, 1, 2
_REQUEST_FIELDS = tuple(name for name in ISSUED_FIELDS if FIELDS[name].part is Part.REQUEST)


def remember_prompt(members: Sequence[RolloutState]) -> None:
    """Note the prompt as issued of members that have none noted yet, before a producer gets them."""
    known: RolloutState | None = None
    for state in members:
        if state.issued is not None:
            continue
        if known is None or not _same_prompt(state, known):
            known = RolloutState(**{name: getattr(state, name) for name in ISSUED_FIELDS})
        state.issued = known


def _same_prompt(one: RolloutState, other: RolloutState) -> bool:
    return shares_prompt(one, other) and all(
        same_value(getattr(one, name), getattr(other, name)) for name in _REQUEST_FIELDS
    )


def is_as_issued(state: RolloutState) -> bool:
    """Whether a sample has no response, and its prompt is as it was issued."""
    if carries_response(state) or state.loop_state is not None:
        return False
    return state.issued is None or _same_prompt(state, state.issued)


def settle_changes(state: RolloutState) -> None:
    """Make a member share every unchanged value with its prompt as issued; drop `issued` if nothing changed."""
    issued = state.issued
    if issued is None:
        return
    changed = False
    for name in ISSUED_FIELDS:
        value, before = getattr(state, name), getattr(issued, name)
        if value is before:
            continue
        if same_value(value, before):
            setattr(state, name, before)
            continue
        changed = True
        if type(value) is type(before) is list:
            kept = _prefix(value, before, same_value)
            setattr(state, name, before[:kept] + value[kept:])
        elif type(value) is type(before) is dict:
            same = {key for key, item in value.items() if key in before and same_value(item, before[key])}
            setattr(state, name, {key: before[key] if key in same else item for key, item in value.items()})
    if not changed:
        state.issued = None


def _prefix(value: list[Any], before: list[Any], same: Callable[[Any, Any], bool]) -> int:
    """The number of items, from the first on, that are the same in both lists."""
    pairs = zip(value, before, strict=False)
    return next((i for i, pair in enumerate(pairs) if not same(*pair)), min(len(value), len(before)))


# --- as plain data ------------------------------------------------------------------------------------


def difference(state: RolloutState, issued: RolloutState) -> dict[str, list[Any]]:
    """Changes by field: [0, value]; for a list [1, items kept, items added]; for a dict [2, keys removed, items]."""
    changes: dict[str, list[Any]] = {}
    for name in ISSUED_FIELDS:
        value, before = getattr(state, name), getattr(issued, name)
        if value is before:
            continue
        if type(value) is type(before) is list:
            kept = _prefix(value, before, is_)
            changes[name] = [_EXTENDED, kept, value[kept:]]
        elif type(value) is type(before) is dict and _keeps_order(value, before):
            items = {key: item for key, item in value.items() if key not in before or item is not before[key]}
            changes[name] = [_EDITED, [key for key in before if key not in value], items]
        else:
            changes[name] = [_REPLACED, msgspec.to_builtins(value) if isinstance(value, SampleParams) else value]
    return changes


def _keeps_order(value: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether editing `before` gives the keys in the order of `value`: new keys come last."""
    return list(value) == [key for key in before if key in value] + [key for key in value if key not in before]


def apply_difference(state: RolloutState, issued: RolloutState, changes: dict[str, list[Any]]) -> None:
    """Give a sample the fields of its prompt as issued, with the changes; InvalidGroup if they do not fit."""
    if not changes.keys() <= set(ISSUED_FIELDS):
        unknown = ", ".join(sorted(changes.keys() - set(ISSUED_FIELDS)))
        raise InvalidGroup(f"changes of {unknown:.80}; expected only {', '.join(ISSUED_FIELDS)}")
    for name in ISSUED_FIELDS:
        value = getattr(issued, name)
        if name in changes:
            value = _changed(value, changes[name])
            if name == "sample_params":
                value = msgspec.convert(value, SampleParams | None)
        setattr(state, name, value)
    state.issued = issued


def _changed(before: Any, change: list[Any]) -> Any:
    match change:
        case [0, value]:
            return value
        case [1, int(kept), list(added)] if type(before) is list and 0 <= kept <= len(before):
            return before[:kept] + added
        case [2, list(removed), dict(items)] if type(before) is dict:
            return {key: item for key, item in before.items() if key not in removed} | items
    raise InvalidGroup(f"a change of a prompt that does not fit a {type(before).__name__}: {change!r:.80}")
