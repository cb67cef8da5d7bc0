"""The prompt as issued, and what an agent loop changed of it.

A producer gets members that carry their prompt as it was issued (`RolloutState.issued`, one object for all members that
share it). Whatever a loop then does to `message`, `extra_fields` or any other field of the prompt, `reset_response`
returns to it. When a group comes back, `settle_changes` compares: what did not change becomes the issued object again,
and a member that changed nothing carries nothing. So a stored group has its prompt once, and beside it only
differences: the messages behind the issued ones, the keys of a dict that are new, changed or gone, or another value.
`difference` and `apply_difference` are that as plain data, for frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from forebay.core.rollout import (
    ISSUED_FIELDS,
    RolloutState,
    SampleParams,
    carries_response,
    common_prefix,
    shares_prompt,
)
from forebay.errors import InvalidGroup

__all__ = ["apply_difference", "difference", "is_as_issued", "remember_prompt", "same_value", "settle_changes"]

_REPLACED, _EXTENDED, _EDITED = 0, 1, 2


def remember_prompt(members: Sequence[RolloutState]) -> None:
    """Before members are handed to a producer: note their prompt as issued, where that was not done before."""
    known: RolloutState | None = None
    for state in members:
        if state.issued is not None:
            continue
        if known is None or not _same_prompt(state, known):
            known = RolloutState(**{name: getattr(state, name) for name in ISSUED_FIELDS})
        state.issued = known


def _same_prompt(one: RolloutState, other: RolloutState) -> bool:
    return shares_prompt(one, other) and all(
        same_value(getattr(one, name), getattr(other, name)) for name in ("session_id", "sample_params", "extra_fields")
    )


def is_as_issued(state: RolloutState) -> bool:
    """Whether a sample is a bare prompt, and as it was issued."""
    if carries_response(state) or state.loop_state is not None:
        return False
    return state.issued is None or _same_prompt(state, state.issued)


def settle_changes(state: RolloutState) -> None:
    """Have a member share with its prompt as issued all that it did not change; forget the prompt if that is all."""
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
            setattr(state, name, _sharing_prefix(value, before))
        elif type(value) is type(before) is dict:
            same = {key for key, item in value.items() if key in before and same_value(item, before[key])}
            setattr(state, name, {key: before[key] if key in same else item for key, item in value.items()})
    if not changed:
        state.issued = None


def _sharing_prefix(value: list[Any], before: list[Any]) -> list[Any]:
    pairs = zip(value, before, strict=False)
    kept = next((i for i, pair in enumerate(pairs) if not same_value(*pair)), min(len(value), len(before)))
    return before[:kept] + value[kept:]


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are the same plain data, type for type; arrays that show the same memory are."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is dict:
        return list(one) == list(other) and all(same_value(item, other[key]) for key, item in one.items())
    if kind is list or kind is tuple:
        return len(one) == len(other) and all(map(same_value, one, other))
    if kind is np.ndarray:
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        same_memory = one.__array_interface__["data"] == other.__array_interface__["data"]
        return bool(same_memory and one.strides == other.strides) or one.tobytes() == other.tobytes()
    try:
        return bool(one == other) and (kind is not float or repr(one) == repr(other))
    except Exception:  # a value of the user's own that does not compare; whether it can be stored is asked later
        return False


# --- as plain data ------------------------------------------------------------------------------------


def difference(state: RolloutState, issued: RolloutState) -> dict[str, list[Any]]:
    """What differs, by field: [0, value]; [1, items kept, items added] of a list; [2, keys gone, items] of a dict."""
    changes: dict[str, list[Any]] = {}
    for name in ISSUED_FIELDS:
        value, before = getattr(state, name), getattr(issued, name)
        if value is before:
            continue
        if type(value) is type(before) is list:
            kept = common_prefix(value, before)
            changes[name] = [_EXTENDED, kept, value[kept:]]
        elif type(value) is type(before) is dict and _keeps_order(value, before):
            items = {key: item for key, item in value.items() if key not in before or item is not before[key]}
            changes[name] = [_EDITED, [key for key in before if key not in value], items]
        else:
            changes[name] = [_REPLACED, msgspec.to_builtins(value) if isinstance(value, SampleParams) else value]
    return changes


def _keeps_order(value: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether editing `before` gives the keys in the order of `value`: new ones come last."""
    return list(value) == [key for key in before if key in value] + [key for key in value if key not in before]


def apply_difference(state: RolloutState, issued: RolloutState, changes: dict[str, list[Any]]) -> None:
    """Give a sample the fields of its prompt as issued, with what was changed; InvalidGroup if that cannot be."""
    if not changes.keys() <= set(ISSUED_FIELDS):
        raise InvalidGroup(f"changes of {', '.join(sorted(changes.keys() - set(ISSUED_FIELDS)))!r:.80}")
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
        case [2, list(gone), dict(items)] if type(before) is dict:
            return {key: item for key, item in before.items() if key not in gone} | items
    raise InvalidGroup(f"a change of a prompt that cannot be made: {change!r:.80}")
