"""How a record of a data set becomes a prompt.

A record is a RolloutState, or a mapping with the messages under `message`, `messages` or `prompt` (a list of
messages, or a string, which becomes one message of the user). The other fields that a sample is issued with are taken
by name; everything else goes to `extra_fields`, where reward functions find it. A record that makes no prompt is
refused with its index. This module reads no data set: see `sources`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np

from forebay.core.plain import LEAVES
from forebay.core.rollout import (
    COLUMNS,
    FIELDS,
    ISSUED_FIELDS,
    USER_FIELDS,
    RolloutState,
    SampleParams,
    Status,
    TokenColumn,
    lacks_tokens,
    reset_response,
)
from forebay.core.validate import check_group
from forebay.errors import InvalidGroup, InvalidInput, InvalidRecord

__all__ = [
    "ToRolloutState",
    "Tokenize",
    "as_answer",
    "build_prompt",
    "independent",
    "mark_aborted",
    "start_again",
    "without_response",
]

ToRolloutState: TypeAlias = Callable[[Any], "RolloutState | Mapping[str, Any]"]
Tokenize: TypeAlias = Callable[[RolloutState], TokenColumn]

_MESSAGE_NAMES = ("message", "messages", "prompt")
_CONVERTED = ("message", "prompt_ids", "sample_params", "extra_fields")  # fields that records give in several forms
_PLAIN_FIELDS = tuple(name for name in ISSUED_FIELDS if name not in _CONVERTED)


def build_prompt(
    record: Any, index: int, to_rollout_state: ToRolloutState | None, tokenize: Tokenize | None
) -> RolloutState:
    """The prompt of a record, with a response if the record has one; InvalidRecord says what is wrong with it."""
    try:
        if to_rollout_state is not None:
            record = to_rollout_state(record)
        state = record.__copy__() if isinstance(record, RolloutState) else _from_mapping(record)
        _check_message(state.message)
        if tokenize is not None and state.prompt_ids is None:
            state.prompt_ids = tokenize(state)
            if state.prompt_ids is None:
                raise InvalidInput("tokenize returned None; expected the token ids of the prompt")
        state.prompt_ids = _checked_ids(state.prompt_ids)
        _check_fields(state)
        independent(state)  # the buffer must not keep objects of the data set
        if state.tokens is None and state.prompt_ids is not None:
            state.tokens = state.prompt_ids
        state.task_name = state.group_id = state.rollout_id = state.attempt = state.issued = None
        state.status, state.num_tries, state.segment, state.unjudged = Status.INIT, 0, 0, False
        check_group([state], "")
    except InvalidRecord:
        raise
    except (InvalidGroup, InvalidInput) as error:
        raise InvalidRecord(index, f"makes no prompt: {error}") from error
    except Exception as error:
        raise InvalidRecord(index, f"cannot be mapped: {type(error).__name__}: {error}") from error
    return state


def without_response(prompt: RolloutState) -> RolloutState:
    """The prompt alone, of a record that has a response."""
    bare = reset_response(prompt)
    bare.tokens = bare.prompt_ids
    return bare


def as_answer(prompt: RolloutState, index: int) -> RolloutState:
    """The prompt with the response of its record as the answer; InvalidRecord if the response has no token."""
    if lacks_tokens(prompt):
        raise InvalidRecord(index, "has a response without a token; expected at least one token, or no response")
    prompt.status = Status.COMPLETED
    return prompt


def _from_mapping(record: Any) -> RolloutState:
    if not isinstance(record, Mapping):
        raise InvalidInput(
            f"it is a {type(record).__name__}; expected a dict or a RolloutState (give to_rollout_state= to map it)"
        )
    values = dict(record)
    named = [name for name in _MESSAGE_NAMES if values.get(name) is not None]
    if not named:
        raise InvalidInput(
            f"it has no message; expected one of {', '.join(_MESSAGE_NAMES)} among its keys "
            f"({', '.join(map(str, list(values)[:8]))}), or to_rollout_state= to map it"
        )
    message = values.pop(named[0])
    if isinstance(message, str):
        message = [{"role": "user", "content": message}]
    extra = values.pop("extra_fields", None) or {}
    params = values.pop("sample_params", None)
    if params is not None and not isinstance(params, SampleParams):
        unknown = set(params) - set(SampleParams.__struct_fields__) if isinstance(params, Mapping) else set()
        if unknown:
            raise InvalidInput(
                f"its sample_params have {', '.join(sorted(map(str, unknown)))}; expected some of "
                f"{', '.join(SampleParams.__struct_fields__)}"
            )
        try:
            params = msgspec.convert(params, SampleParams)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"its sample_params cannot be read: {error}") from None
    fields = {name: values.pop(name) for name in (*_PLAIN_FIELDS, "prompt_ids") if name in values}
    return RolloutState(message=message, sample_params=params, extra_fields={**values, **extra}, **fields)


def _check_message(message: Any) -> None:
    if not isinstance(message, list) or not message:
        raise InvalidInput(f"its message is {message!r:.60}; expected a non-empty list of messages")
    for turn in message:
        if not isinstance(turn, dict):
            raise InvalidInput(f"its message has a {type(turn).__name__} among its turns; expected only dicts")
        if not isinstance(turn.get("role", ""), str):
            raise InvalidInput(
                f"a turn of its message has the role {turn['role']!r:.60}; expected a string (a loader must not "
                "collate records: batch_size=None, or batch_size=1 with collate_fn=lambda records: records)"
            )


def _check_fields(state: RolloutState) -> None:
    for name in _PLAIN_FIELDS:
        value, field = getattr(state, name), FIELDS[name]
        if field.types and not isinstance(value, field.types):
            raise InvalidInput(f"its {name} is a {type(value).__name__}; expected {field.expected}")
    for tool in state.tools or ():
        if not isinstance(tool, dict):
            raise InvalidInput(f"its tools have a {type(tool).__name__} among them; expected only dicts")


def _checked_ids(ids: Any) -> TokenColumn | None:
    if ids is None:
        return None
    if not isinstance(ids, (list, np.ndarray)):
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not len(ids):
        raise InvalidInput("its prompt_ids are empty; expected at least one token")
    if isinstance(ids, list):
        others = {kind.__name__ for kind in set(map(type, ids)) - {int}}
    else:
        others = set() if ids.dtype.kind in "iu" else {str(ids.dtype)}
    if others:
        raise InvalidInput(f"its prompt_ids hold {', '.join(sorted(others))}; expected integers")
    return ids  # type: ignore[no-any-return]


def independent(state: RolloutState) -> RolloutState:
    """The same sample, with its lists and dicts copied, so that an agent loop may change them in place.

    Arrays stay shared with the buffer, and are read-only.
    """
    for name in COLUMNS:
        column = getattr(state, name)
        if column is not None:
            setattr(state, name, column.copy() if type(column) is list else _copy(column))
    for name in USER_FIELDS:
        value = getattr(state, name)
        if value is not None:
            setattr(state, name, _copy(value))
    return state


def start_again(state: RolloutState) -> None:
    """Return a sample to its prompt as issued, in place, so that every owner of the object sees it."""
    fresh = independent(reset_response(state))
    fresh.issued = state.issued
    for name in state.__struct_fields__:
        setattr(state, name, getattr(fresh, name))


def mark_aborted(group: Iterable[RolloutState], reason: str | None = None) -> None:
    """Mark the members that are not COMPLETED as ABORTED, so that they are generated again from what they have."""
    for state in group:
        if state.status is not Status.COMPLETED:
            state.status = Status.ABORTED
            state.error_msg = reason or state.error_msg


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: item if type(item) in LEAVES else _copy(item) for key, item in value.items()}
    kind = type(value)
    if kind is list or kind is tuple:
        if LEAVES.issuperset(map(type, value)):
            return value.copy() if kind is list else value
        return kind([_copy(item) for item in value])
    if isinstance(value, np.ndarray) and value.flags.writeable:
        value = value.view()
        value.setflags(write=False)
    return value
