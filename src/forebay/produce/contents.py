"""The values that an answer may contain: token ids from 0, logprobs up to 0, masks of 0 and 1, existing versions.

A trainer would compute with other values without noticing. Every answer of an agent loop is checked once, column by
column; single values are examined only when a column is invalid. The logprobs of agent traces (`input_ids`) are exempt,
because they need not be aligned with the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.core.rollout import RolloutState, Status
from forebay.errors import InvalidGroup

__all__ = ["MOST_LOGPROB", "check_contents"]

MOST_LOGPROB = 1e-3
"""Larger logprobs are refused. Rounding of an engine stays far below; probabilities and negated logprobs do not."""


def check_contents(answers: Sequence[RolloutState], model_step: int | None) -> None:
    """InvalidGroup if an answer contains values that no model can generate. `model_step`: the latest valid version."""
    for state in answers:
        if state.status is Status.FAILED or state.response_ids is None or not len(state.response_ids):
            continue
        if not _are_ids(state.response_ids):
            raise _refused(state, "response_ids", "token ids, which are integers from 0")
        if state.logprobs is not None and state.input_ids is None and not _are_logprobs(state.logprobs):
            raise _refused(state, "logprobs", f"numbers of at most {MOST_LOGPROB:g}, without NaN")
        if state.response_mask is not None and not _is_mask(state.response_mask):
            raise _refused(state, "response_mask", "only 0 and 1")
        if model_step is not None and state.version_spans:
            latest = max(step for step, _ in state.version_spans)
            if latest > model_step:
                raise InvalidGroup(
                    f"version_spans of {_name(state)} contain model step {latest}, but the engine has the weights of "
                    f"step {model_step}; expected no later step (a loop that takes new weights by itself has to set "
                    "takes_weights_while_running)"
                )


def _are_ids(column: Any) -> bool:
    if isinstance(column, np.ndarray):
        return column.dtype.kind in "iu" and bool(np.minimum.reduce(column) >= 0)
    return isinstance(sum(column), (int, np.integer)) and min(column) >= 0  # the sum is a float if one item is


def _are_logprobs(column: Any) -> bool:
    if isinstance(column, np.ndarray):
        return bool(np.maximum.reduce(column) <= MOST_LOGPROB)  # the maximum is NaN if an item is
    total = sum(column)
    return bool(total == total) and max(column) <= MOST_LOGPROB


def _is_mask(column: Any) -> bool:
    if not isinstance(column, np.ndarray):
        return set(column) <= {0, 1}
    return column.dtype.kind == "b" or bool(((column == 0) | (column == 1)).all())


def _refused(state: RolloutState, name: str, expected: str) -> InvalidGroup:
    """The error for a column, with its first invalid value."""
    check = {"response_ids": _are_ids, "logprobs": _are_logprobs, "response_mask": _is_mask}[name]
    column = getattr(state, name)
    at = next((index for index in range(len(column)) if not check(column[index : index + 1])), 0)
    return InvalidGroup(f"{name}[{at}] of {_name(state)} is {column[at]!s:.80}; expected {expected}")


def _name(state: RolloutState) -> str:
    return f"rollout {state.rollout_id} of group {state.group_id}"
