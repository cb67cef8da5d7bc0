"""The token columns of samples, laid out one after the other. `pack` and `pad` differ only in their layout.

`flatten` lists the samples of all groups; `measure` checks them and counts their tokens without allocating anything
that depends on the number of tokens; `fill` then allocates each column once and fills it with one `np.concatenate` or
`np.repeat`. The rules are in the docstring of `forebay.collate`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from forebay.core.rollout import RolloutState, TokenColumn
from forebay.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

IGNORED_LABEL = -100
"""The label of tokens of an agent trace that are not trained on, as in Hugging Face libraries."""
NO_VERSION = -1
"""The version of prompts, of padding and of tokens whose model step is unknown, as in AReaL."""


def name_of(state: RolloutState) -> str:
    """How errors name a sample."""
    segment = f" (segment {state.segment})" if state.segment else ""
    return f"rollout {state.rollout_id}{segment} of group {state.group_id} of task {state.task_name!r}"


@dataclass(frozen=True, eq=False, slots=True)
class Samples:
    """The samples of all groups, in order. Samples with the same rollout_index are segments of one rollout."""

    states: list[RolloutState]
    group_index: NDArray[np.int64]
    rollout_index: NDArray[np.int64]
    rollouts: int


def flatten(groups: Sequence[Sequence[RolloutState]]) -> Samples:
    """The samples of groups; InvalidInput if there are none."""
    if not isinstance(groups, (list, tuple)) or not groups:
        raise InvalidInput(f"groups is {groups!r:.80}; expected a list with at least one group")
    states: list[RolloutState] = []
    group_index: list[int] = []
    rollout_index: list[int] = []
    rollouts = 0
    for position, group in enumerate(groups):
        if not isinstance(group, (list, tuple)) or not group:
            raise InvalidInput(f"groups[{position}] is {group!r:.80}; expected a list of at least one RolloutState")
        known: dict[int, int] = {}
        for state in group:
            if not isinstance(state, RolloutState):
                raise InvalidInput(f"groups[{position}] contains a {type(state).__name__}; expected only RolloutState")
            number = rollouts if state.rollout_id is None else known.setdefault(state.rollout_id, rollouts)
            rollouts += number == rollouts
            rollout_index.append(number)
        states += group
        group_index += [position] * len(group)
    return Samples(states, np.array(group_index, dtype=np.int64), np.array(rollout_index, dtype=np.int64), rollouts)


@dataclass(frozen=True, eq=False, slots=True)
class Lengths:
    """The tokens of each sample: of its prompt (0 for an agent trace), and of all of it."""

    prompt: list[int]
    total: list[int]


def measure(samples: Samples) -> Lengths:
    """The number of tokens of each sample; InvalidInput for one whose columns do not fit together."""
    prompts, totals = [], []
    for state in samples.states:
        response_ids = state.response_ids
        if response_ids is None:
            prompts.append(0)
            totals.append(_trace_tokens(state))
            continue
        response = len(response_ids)
        if state.prompt_ids is None or not response:
            raise _no_tokens(state, "prompt_ids" if state.prompt_ids is None else "response_ids")
        mask, logprobs = state.response_mask, state.logprobs
        if mask is not None and len(mask) != response:
            raise _unequal(state, "response_mask", len(mask), "response_ids", response)
        if logprobs is not None and len(logprobs) != response:
            raise _unequal(state, "logprobs", len(logprobs), "response_ids", response)
        if state.version_spans:
            _check_spans(state, response)
        prompt = len(state.prompt_ids)
        prompts.append(prompt)
        totals.append(prompt + response)
    return Lengths(prompts, totals)


def _trace_tokens(state: RolloutState) -> int:
    if state.input_ids is None or not len(state.input_ids):
        raise _no_tokens(state, "response_ids")
    tokens = len(state.input_ids)
    if state.labels is None:
        raise InvalidInput(
            f"{name_of(state)} is an agent trace without labels; set labels to the token ids, and to {IGNORED_LABEL} "
            "where a token is not trained on"
        )
    for name, column in (("labels", state.labels), ("logprobs", state.logprobs)):
        if column is not None and len(column) != tokens:
            raise _unequal(state, name, len(column), "input_ids", tokens)
    _check_spans(state, tokens)
    return tokens


def _check_spans(state: RolloutState, tokens: int) -> None:
    versioned = sum([run for _, run in state.version_spans])
    if versioned > tokens:
        raise InvalidInput(f"version_spans of {name_of(state)} covers {versioned} tokens, but it has only {tokens}")


def _no_tokens(state: RolloutState, name: str) -> InvalidInput:
    fix = "give the sampler tokenize=" if name == "prompt_ids" else "use an engine or agent loop that returns token ids"
    return InvalidInput(
        f"{name_of(state)} has no {name}, so there are no tokens to train on; {fix}"
        + (", and tokenize= for its prompt" if name == "response_ids" else "")
    )


def _unequal(state: RolloutState, name: str, items: int, other: str, others: int) -> InvalidInput:
    return InvalidInput(
        f"{name} of {name_of(state)} has {items} items but {other} has {others}; the lengths must match"
    )


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """Samples in order, each with a number of padding tokens before and after it, and how many form a batch."""

    order: list[int]
    before: list[int]
    after: list[int]
    batches: list[int]


@dataclass(frozen=True, eq=False, slots=True)
class Columns:
    """The columns of a layout, flat; `starts` and `ends` are where each sample of the layout begins and ends."""

    input_ids: Array
    position_ids: Array
    loss_mask: Array
    logprobs: Array | None
    versions: Array
    advantages: Array | None
    starts: Array
    ends: Array
    masked: list[int]  # response tokens that response_mask excludes, by batch of the layout


def fill(
    samples: Samples, lengths: Lengths, layout: Layout, advantages: Array | None, *, pad_id: int, shifted: bool
) -> Columns:
    """All columns of a layout."""
    states = [samples.states[index] for index in layout.order]
    prompts = [lengths.prompt[index] for index in layout.order]
    totals = [lengths.total[index] for index in layout.order]
    rows = list(zip(states, prompts, totals, layout.before, layout.after, strict=True))
    has_logprobs = _have_logprobs(samples.states)

    parts = np.array([layout.before, totals, layout.after], dtype=np.int64).T.ravel()
    bounds = np.cumsum(parts)
    starts, ends = bounds[0::3], bounds[1::3]
    size = int(bounds[-1])
    filler = max(max(totals) + max(layout.before), max(layout.after))

    loss_mask = _loss_mask(rows, size, filler)
    columns = Columns(
        input_ids=_input_ids(rows, size, filler, pad_id),
        position_ids=_position_ids(rows, filler),
        loss_mask=loss_mask,
        logprobs=_logprobs(rows, size, filler) if has_logprobs else None,
        versions=_versions(rows),
        advantages=None if advantages is None else _spread(advantages[layout.order], parts),
        starts=starts,
        ends=ends,
        masked=_masked(rows, loss_mask, ends.tolist(), layout.batches),
    )
    if shifted:
        for column, empty in (
            (columns.loss_mask, False),
            (columns.logprobs, 0.0),
            (columns.versions, NO_VERSION),
            (columns.advantages, 0.0),
        ):
            if column is not None:
                _shift(column, starts, ends, empty)
    return columns


Row: TypeAlias = tuple[RolloutState, int, int, int, int]
"""A sample, the tokens of its prompt, all its tokens, padding before, padding after."""


def _input_ids(rows: list[Row], size: int, filler: int, pad_id: int) -> Array:
    padding = np.full(filler, pad_id, dtype=np.int64)
    pieces: list[Array] = []
    for state, prompt, _, before, after in rows:
        if before:
            pieces.append(padding[:before])
        if state.response_ids is None:
            pieces.append(_integers(state, "input_ids", state.input_ids))
        else:
            if prompt:
                pieces.append(_integers(state, "prompt_ids", state.prompt_ids))
            pieces.append(_integers(state, "response_ids", state.response_ids))
        if after:
            pieces.append(padding[:after])
    return _joined(pieces, size, np.int64)


def _position_ids(rows: list[Row], filler: int) -> Array:
    positions = np.arange(filler, dtype=np.int64)
    return np.concatenate(
        [positions[:tokens] for _, _, total, before, after in rows for tokens in (before, total, after) if tokens]
    )


def _loss_mask(rows: list[Row], size: int, filler: int) -> Array:
    zeros, ones = np.zeros(filler, dtype=np.bool_), np.ones(filler, dtype=np.bool_)
    pieces: list[Array] = []
    for state, prompt, total, before, after in rows:
        if before + prompt:
            pieces.append(zeros[: before + prompt])
        if state.response_ids is None:
            pieces.append(_integers(state, "labels", state.labels) != IGNORED_LABEL)
        elif state.response_mask is None:
            pieces.append(ones[: total - prompt])
        else:
            pieces.append(_mask(state, state.response_mask))
        if after:
            pieces.append(zeros[:after])
    return _joined(pieces, size, np.bool_)


def _logprobs(rows: list[Row], size: int, filler: int) -> Array:
    zeros = np.zeros(filler, dtype=np.float32)
    pieces: list[Array] = []
    for state, prompt, _, before, after in rows:
        if before + prompt:
            pieces.append(zeros[: before + prompt])
        pieces.append(_floats(state, state.logprobs))
        if after:
            pieces.append(zeros[:after])
    return _joined(pieces, size, np.float32)


def _versions(rows: list[Row]) -> Array:
    steps: list[int] = []
    runs: list[int] = []
    for state, prompt, total, before, after in rows:
        left = total - prompt
        steps.append(NO_VERSION)
        runs.append(before + prompt)
        for step, run in state.version_spans:
            steps.append(step)
            runs.append(run)
            left -= run
        steps.append(NO_VERSION)
        runs.append(left + after)
    return np.repeat(np.array(steps, dtype=np.int64), runs)


def _spread(values: Array, parts: Array) -> Array:
    """One value for each token of a sample, 0 for padding."""
    padded = np.zeros((len(values), 3), dtype=np.float32)
    padded[:, 1] = values
    return np.repeat(padded.ravel(), parts)


def _masked(rows: list[Row], loss_mask: Array, ends: list[int], batches: list[int]) -> list[int]:
    masked = []
    first = start = 0
    for samples in batches:
        last = first + samples - 1
        end = ends[last] + rows[last][4]
        trained = int(np.count_nonzero(loss_mask[start:end]))
        responses = 0
        for at in range(first, last + 1):
            state, prompt, total, _, _ = rows[at]
            if state.response_ids is not None:
                responses += total - prompt
            else:  # labels exclude tokens of an agent trace, response_mask does not
                trained -= int(np.count_nonzero(loss_mask[ends[at] - total : ends[at]]))
        masked.append(responses - trained)
        first, start = last + 1, end
    return masked


def _shift(column: Array, starts: Array, ends: Array, empty: float) -> None:
    """Move every entry to the position before it, within its sequence; the last entry of a sequence is `empty`."""
    column[:-1] = column[1:]
    column[ends - 1] = empty
    column[starts[starts > 0] - 1] = empty  # padding before a sequence does not predict its first token


def _joined(pieces: list[Array], size: int, dtype: Any) -> Array:
    out = np.empty(size, dtype=dtype)
    with np.errstate(over="ignore"):  # a float64 logprob may become -inf
        np.concatenate(pieces, out=out, casting="unsafe")  # the columns were checked to be numbers of the right kind
    return out


def _have_logprobs(states: list[RolloutState]) -> bool:
    lacking = [state for state in states if state.logprobs is None]
    if lacking and len(lacking) < len(states):
        raise InvalidInput(
            f"{name_of(lacking[0])} has no logprobs, but other samples have; ask the engine for the logprobs of all "
            "samples, or set them to None for all"
        )
    return not lacking


# --- lists and arrays as arrays ----------------------------------------------------------------------------


def _packed(column: list[Any], code: str) -> Array:
    """A list as an array. `struct` is faster than `np.fromiter`, and refuses floats where integers are expected."""
    return np.frombuffer(struct.pack(f"{len(column)}{code}", *column), dtype=code)


def _integers(state: RolloutState, name: str, column: TokenColumn | None) -> Array:
    if isinstance(column, np.ndarray):
        if column.dtype.kind in "iu" and column.ndim == 1:
            return column
    elif isinstance(column, list):
        try:
            return _packed(column, "q")
        except struct.error:
            pass
    raise _wrong(state, name, column, "integers of at most 64 bits")


def _floats(state: RolloutState, column: TokenColumn | None) -> Array:
    if isinstance(column, np.ndarray):
        if (column.dtype.kind in "fiu" or column.dtype.name == "bfloat16") and column.ndim == 1:
            return column
    elif isinstance(column, list):
        try:
            return _packed(column, "f")
        except (struct.error, OverflowError):
            pass
    raise _wrong(state, "logprobs", column, "numbers")


def _mask(state: RolloutState, column: TokenColumn) -> Array:
    if isinstance(column, np.ndarray):
        if column.dtype.kind in "biuf" and column.ndim == 1:
            return column
    elif isinstance(column, list):
        try:
            return np.frombuffer(bytes(column), dtype=np.uint8)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            if set(column) <= {0, 1}:  # floats
                return np.array(column, dtype=np.bool_)
    raise _wrong(state, "response_mask", column, "only 0 and 1")


def _wrong(state: RolloutState, name: str, column: object, expected: str) -> InvalidInput:
    found = f"an array of {column.dtype}" if isinstance(column, np.ndarray) else f"{column!r:.80}"
    return InvalidInput(f"{name} of {name_of(state)} is {found}; expected a list or an array of {expected}")
