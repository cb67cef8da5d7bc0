"""What a sample must look like to become bytes that can be read again, and whether members have one prompt."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from forebay.core.references import FIELDS, Resolved
from forebay.core.rollout import PROMPT_FIELDS, RolloutState, SampleParams, shares_prompt
from forebay.errors import UnsupportedPayload

__all__ = ["COLUMNS", "LEAVES", "check_types", "same_prompt"]

LEAVES = frozenset((str, int, float, bool, type(None), bytes))
COLUMNS = ("prompt_ids", "tokens", "response_ids", "logprobs", "response_mask", "input_ids", "labels")

_NONE = type(None)
_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "task_name": (str, _NONE),
    "message": (list,),
    "reward_model": (dict, _NONE),
    "mm_info": (dict, _NONE),
    "tools": (list, _NONE),
    "session_id": (int, str, _NONE),
    "sample_params": (SampleParams, _NONE),
    "response": (str, _NONE),
    "finish_reason": (str, _NONE),
    "tool_calls": (list, _NONE),
    "reward": (dict, _NONE),
    "error_msg": (str, _NONE),
    "extra_fields": (dict,),
    "loop_state": (dict, _NONE),
    "unjudged": (bool,),
}
_NUMBERS = frozenset((int, float, bool))


def check_types(state: RolloutState, index: int) -> tuple[str, ...]:
    """What is written must be readable: UnsupportedPayload for a field of a type that a reader would refuse.

    Returns the fields that hold more than a leaf, which have to be looked into.
    """
    found = tuple([type(getattr(state, name)) for name in _TYPED_FIELDS])
    nested = _good_types.get(found)
    if nested is None:
        _check_fields(state, index)
        kinds = zip(_TYPED_FIELDS, found, strict=True)
        nested = tuple(name for name, kind in kinds if name in FIELDS and kind not in LEAVES)
        if len(_good_types) < 1_000:
            _good_types[found] = nested
    for name in ("message", "tools", "tool_calls"):
        for position, item in enumerate(getattr(state, name) or ()):
            if type(item) is not dict:
                raise UnsupportedPayload(f"$[{index}].{name}[{position}]: a {type(item).__name__}; expected a dict")
    for name in COLUMNS:
        column = getattr(state, name)
        if column is None or type(column) is np.ndarray:
            continue
        if type(column) is not list:
            raise UnsupportedPayload(f"$[{index}].{name}: a {type(column).__name__}; expected a list or a numpy array")
        if not set(map(type, column)) <= _NUMBERS:
            position = next(i for i, item in enumerate(column) if type(item) not in _NUMBERS)
            kind = type(column[position]).__name__
            raise UnsupportedPayload(f"$[{index}].{name}[{position}]: a {kind}; expected a number")
    if state.sample_params is not None:
        try:
            msgspec.convert(msgspec.to_builtins(state.sample_params), SampleParams)
        except (msgspec.ValidationError, TypeError) as error:
            raise UnsupportedPayload(f"$[{index}].sample_params: {error}") from None
    return nested


_TYPED_FIELDS = (*_FIELD_TYPES, "data_source", "tool_choice", "routed_experts")
_good_types: dict[tuple[type, ...], tuple[str, ...]] = {}
"""Combinations of field types that passed, with the fields to look into: a run has a handful of them."""


def _check_fields(state: RolloutState, index: int) -> None:
    for name, kinds in _FIELD_TYPES.items():
        value = getattr(state, name)
        if type(value) not in kinds:
            expected = " or ".join("None" if kind is _NONE else kind.__name__ for kind in kinds)
            found = "reference" if type(value) is Resolved else type(value).__name__
            raise UnsupportedPayload(f"$[{index}].{name}: a {found}; expected {expected}")


def same_prompt(one: RolloutState, other: RolloutState) -> bool:
    return shares_prompt(one, other) or all(_same(getattr(one, name), getattr(other, name)) for name in PROMPT_FIELDS)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    try:
        # 1 == 1.0 == True, and they are not the same: what goes in must come out.
        return bool(one == other) and repr(one) == repr(other)
    except ValueError:  # arrays inside, which have no single truth
        return False
