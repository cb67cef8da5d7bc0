"""The payload of a group: what changed in it since the prompt was issued, and its size.

A producer gets members that carry their prompt as it was issued (`RolloutState.issued`, one object for all members that
share it), and `reset_response` returns to it, whatever a loop changed. When a group comes back, `settle_changes`
compares: unchanged values become the issued objects again, and a member that changed nothing drops `issued`. So a
stored group has its prompt once, and beside it only differences, which `difference` and `apply_difference` turn into
plain data and back.

Sizes decide about capacity, so every put computes one. The same pass refuses values that no frame can hold
(UnsupportedPayload), without their path: the codec finds that. Which fields count, and which types they may have, is
`rollout.FIELDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from operator import attrgetter, is_
from typing import Any

import msgspec
from numpy import ndarray

from forebay.core.dtypes import CODE_OF, dtype_name
from forebay.core.references import REFERENCE_BYTES, Resolved, is_reference
from forebay.core.rollout import (
    COLUMNS,
    FIELDS,
    ISSUED_FIELDS,
    MAX_DEPTH,
    MAX_DIMENSIONS,
    NUMBERS,
    PROMPT_FIELDS,
    Part,
    RolloutState,
    SampleParams,
    carries_response,
    columns_of,
    same_value,
)
from forebay.errors import InvalidGroup, UnsupportedPayload


def freeze_arrays(group: Sequence[RolloutState]) -> None:
    """Make the token columns of a group read-only where they are numpy arrays."""
    for state in group:
        for column in columns_of(state):
            if column is not None and type(column) is not list:
                column.setflags(False)  # `write`; passing it by keyword takes twice the time


def group_bytes(group: Sequence[RolloutState]) -> int:
    """The size of a group: array buffers, 8 per list item or number, and strings as UTF-8.

    Prompt fields that members share (the same object) count once, because a group stores its prompt once. If an agent
    loop changed the prompt, the difference counts. The value of a resolved reference counts once. A reference that is
    not resolved counts REFERENCE_BYTES, whatever the size of its value.

    UnsupportedPayload if the group has a value that no frame can hold.
    """
    return group_sizes(group)[0]


def group_sizes(group: Sequence[RolloutState]) -> tuple[int, int]:
    """The size of a group, and how much of it does not belong to the prompt."""
    size = prompt_size = 0
    counted: set[Resolved] = set()
    prompts: list[RolloutState] = []  # as they were issued, each once
    for state in group:
        # Written out, as in `check_group` and `shares_prompt`: loops over FIELDS here make a put a fifth slower.
        kinds = (type(state.session_id), type(state.sample_params), type(state.tool_calls), type(state.loop_state))
        if kinds not in _MEMBER_TYPES or type(state.unjudged) is not bool:
            raise UnsupportedPayload("a field of a sample has a type that is not allowed for it")
        for column in _member_columns_of(state):
            if column is not None:
                size += column.nbytes if type(column) is ndarray and column.dtype in CODE_OF else _column_bytes(column)
        for string in (state.response, state.error_msg):
            if string is not None:
                size += len(string) if string.isascii() else _string_bytes(string)
        if state.finish_reason is not None and not state.finish_reason.isascii():
            _string_bytes(state.finish_reason)  # must be storable, and does not count
        if state.session_id is not None:
            _value_bytes(state.session_id, counted)  # as above
        reward = state.reward
        if reward is not None:
            flat = type(reward) is dict and len(reward) == 1 and type(reward.get("score")) is float
            size += _SCORE_BYTES if flat else _value_bytes(reward, counted)
        if state.tool_calls:
            _check_dicts(state.tool_calls)
        for value in (state.tool_calls, state.routed_experts, state.loop_state):
            if value is not None:
                size += _value_bytes(value, counted)
        prompt = state
        if state.issued is not None:
            prompt = state.issued
            _check_prompt(state)
            size += _changed_bytes(state, prompt, counted)
            if any(prompt is other for other in prompts):
                continue
        if prompt.extra_fields:
            prompt_size += _value_bytes(prompt.extra_fields, counted)
        if not prompts or not shares_prompt(prompt, prompts[0]):
            _check_prompt(prompt)
            for name in PROMPT_FIELDS:
                value = getattr(prompt, name)
                if value is not None and not any(value is getattr(other, name) for other in prompts):
                    prompt_size += _column_bytes(value) if FIELDS[name].column else _value_bytes(value, counted)
        if state.sample_params is not None and not any(state.sample_params is p.sample_params for p in prompts):
            _check_sample_params(state.sample_params)
        prompts.append(prompt)
    return prompt_size + size, size


# `check_group` checks the types of the other fields, and `group_reward` that of rewards.
_TYPED_FIELDS = ("session_id", "sample_params", "tool_calls", "loop_state")
_MEMBER_TYPES = frozenset(product(*(FIELDS[name].types for name in _TYPED_FIELDS)))
_member_columns_of: Callable[[RolloutState], tuple[Any, ...]] = attrgetter(
    *(name for name in COLUMNS if FIELDS[name].part is Part.RESPONSE)
)
_PROMPT_TYPES = tuple((name, FIELDS[name]) for name in PROMPT_FIELDS if FIELDS[name].types)
_DICTS = frozenset((dict,))
_SCORE_BYTES = len("score") + 8


def _check_prompt(state: RolloutState) -> None:
    for name, field in _PROMPT_TYPES:
        value = getattr(state, name)
        if type(value) not in field.types:
            raise UnsupportedPayload(f"{name} of a prompt is a {type(value).__name__}; expected {field.expected}")
        if field.of_dicts and value:
            _check_dicts(value)


def _check_dicts(items: Sequence[Any]) -> None:
    if not _DICTS.issuperset(map(type, items)):
        raise UnsupportedPayload("a list of dicts has an item that is not a dict")


def _check_sample_params(params: SampleParams) -> None:
    try:
        msgspec.convert(msgspec.to_builtins(params), SampleParams)
    except (msgspec.ValidationError, TypeError) as error:
        raise UnsupportedPayload(f"sample_params: {error}") from None


def _changed_bytes(state: RolloutState, issued: RolloutState, counted: set[Resolved]) -> int:
    """The size of the differences from the prompt as issued."""
    changes = difference(state, issued).items()
    return sum(_value_bytes(parts[-1], counted) for name, parts in changes if name != "sample_params")


def _string_bytes(string: str) -> int:
    if string.isascii():
        return len(string)
    try:
        return len(string.encode())
    except UnicodeEncodeError as error:
        raise UnsupportedPayload(f"a string is not valid Unicode: {error}") from None


def _column_bytes(column: Any) -> int:
    """The size of a token column."""
    kind = type(column)
    if kind is ndarray:
        if dtype_name(column.dtype) is None:
            raise UnsupportedPayload(f"an array of {column.dtype} is not plain data")
        return int(column.nbytes)
    if kind is not list or not _are_numbers(column):
        raise UnsupportedPayload("a token column is neither a numpy array nor a list of numbers")
    return 8 * len(column)


def _are_numbers(items: Sequence[Any]) -> bool:
    """Whether all items are numbers that a frame can hold."""
    try:
        # Takes a third of the time of checking each type. Numbers beyond 64 bits that cancel out pass.
        total = sum(items)
    except Exception:
        return False
    if type(total) in NUMBERS and abs(total) < 2**53:
        return True
    return all(type(item) in NUMBERS and (type(item) is not int or _fits_64_bits(item)) for item in items)


def _fits_64_bits(number: int) -> bool:
    return -(2**63) <= number < 2**64


def _value_bytes(value: Any, counted: set[Resolved], *, inside_reference: bool = False) -> int:
    # Level by level instead of recursion: user data may be nested deeper than Python recurses. Numbers and strings,
    # which are nearly everything, are counted in place.
    size = 0
    level = [value]
    depth = 0
    while level:
        deeper: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is dict:
                if not _STRINGS.issuperset(map(type, value)):
                    raise UnsupportedPayload("a dict has a key that is not a string")
                items: Sequence[Any] = [*value, *value.values()]
            elif kind is list or kind is tuple:
                if set(map(type, value)) <= NUMBERS and _are_numbers(value):
                    size += 8 * len(value)
                    continue
                size += 8 * sum(type(item) not in NUMBERS for item in value)
                items = value
            else:
                items = (value,)
            for item in items:
                kind = type(item)
                if kind in NUMBERS:
                    if kind is int and not _fits_64_bits(item):
                        raise UnsupportedPayload("an integer has more than 64 bits")
                    size += 8
                elif kind is str:
                    size += _string_bytes(item)
                elif kind in _CONTAINERS:
                    deeper.append(item)
                elif kind is bytes:
                    size += len(item)
                elif kind is ndarray:
                    if (item.dtype not in CODE_OF and dtype_name(item.dtype) is None) or item.ndim > MAX_DIMENSIONS:
                        raise UnsupportedPayload(f"an array of {item.dtype}, {item.ndim} dimensions, is not plain data")
                    size += item.nbytes
                elif kind is Resolved or is_reference(item):
                    if inside_reference:
                        raise UnsupportedPayload("a reference inside the value of another")
                    size += REFERENCE_BYTES
                    if kind is Resolved and item not in counted:
                        counted.add(item)
                        size += _value_bytes(item.value, counted, inside_reference=True)
                elif item is not None:
                    raise UnsupportedPayload(f"a {kind.__module__}.{kind.__qualname__} is not plain data")
        level = deeper
        depth += 1
        if level and depth >= MAX_DEPTH:
            raise UnsupportedPayload(f"nested deeper than {MAX_DEPTH} levels")
    return size


_STRINGS = frozenset((str,))
_CONTAINERS = frozenset((dict, list, tuple))


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


def shares_prompt(one: RolloutState, other: RolloutState) -> bool:
    """Whether two samples have the very same objects in their prompt fields."""
    # Written out: a loop over PROMPT_FIELDS takes three times as long, for every member of every put.
    return (
        one.message is other.message
        and one.prompt_ids is other.prompt_ids
        and one.data_source is other.data_source
        and one.reward_model is other.reward_model
        and one.mm_info is other.mm_info
        and one.tools is other.tools
        and one.tool_choice is other.tool_choice
    )


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
