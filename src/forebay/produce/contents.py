"""What the tokens of an answer may be: ids from 0, logprobs up to 0, masks of 0 and 1, versions that exist.

A trainer would compute with anything else without a word. Every answer of an agent loop is checked once, column by
column; single values are looked at only when something is wrong. The logprobs of agent traces (`input_ids`) are exempt,
as they need not be aligned with the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.errors import InvalidGroup
from forebay.rollout import RolloutState, Status

__all__ = ["MOST_LOGPROB", "check_contents"]

MOST_LOGPROB = 1e-3
"""Logprobs above it are refused. Rounding of an engine stays far below; probabilities and negated logprobs do not."""


def check_contents(answers: Sequence[RolloutState], model_step: int | None) -> None:
    """InvalidGroup if an answer has tokens that nothing can have generated. `model_step`: no version may be later."""
    for state in answers:
        if state.status is Status.FAILED or state.response_ids is None or not len(state.response_ids):
            continue
        if not _are_ids(state.response_ids):
            raise _refused(state, "response_ids", "token ids, which are integers from 0")
        if state.logprobs is not None and state.input_ids is None and not _are_logprobs(state.logprobs):
            raise _refused(state, "logprobs", f"numbers of at most {MOST_LOGPROB:g}, none of them NaN")
        if state.response_mask is not None and not _is_mask(state.response_mask):
            raise _refused(state, "response_mask", "0 and 1 only")
        if model_step is not None and state.version_spans:
            latest = max(step for step, _ in state.version_spans)
            if latest > model_step:
                raise InvalidGroup(
                    f"version_spans of {_name(state)} name model step {latest}, but the engine has the weights of step "
                    f"{model_step}; expected no later one (a loop that takes new weights by itself declares "
                    "takes_weights_while_running)"
                )


def _are_ids(column: Any) -> bool:
    if isinstance(column, np.ndarray):
        return column.dtype.kind in "iu" and bool(np.minimum.reduce(column) >= 0)
    return isinstance(sum(column), (int, np.integer)) and min(column) >= 0  # one float makes a float of the sum


def _are_logprobs(column: Any) -> bool:
    if isinstance(column, np.ndarray):
        return bool(np.maximum.reduce(column) <= MOST_LOGPROB)  # NaN wins, and is not
    total = sum(column)
    return bool(total == total) and max(column) <= MOST_LOGPROB


def _is_mask(column: Any) -> bool:
    if not isinstance(column, np.ndarray):
        return set(column) <= {0, 1}
    return column.dtype.kind == "b" or bool(((column == 0) | (column == 1)).all())


def _refused(state: RolloutState, name: str, expected: str) -> InvalidGroup:
    """The error for a column, with the first value that is to blame."""
    check = {"response_ids": _are_ids, "logprobs": _are_logprobs, "response_mask": _is_mask}[name]
    column = getattr(state, name)
    at = next((index for index in range(len(column)) if not check(column[index : index + 1])), 0)
    return InvalidGroup(f"{name}[{at}] of {_name(state)} is {column[at]!s:.80}; expected {expected}")


def _name(state: RolloutState) -> str:
    return f"rollout {state.rollout_id} of group {state.group_id}"
