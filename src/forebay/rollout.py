"""What a sample is, and what follows from a sample or a group alone.

A sample is one prompt with one response; a group is the samples that share a prompt. Everything here is
a pure function of its arguments: nothing stores, waits or knows about train steps (see `staleness`).

Token columns (`prompt_ids`, `response_ids`, `logprobs`, ...) may be lists or one-dimensional numpy
arrays; what goes in comes out. `version_spans` says which weights generated the response: runs of
(model step, number of tokens), aligned with `response_ids` from its first token on.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import msgspec
from numpy import floating, integer, ndarray

from forebay.dtypes import CODE_OF, dtype_name
from forebay.errors import InvalidGroup, InvalidInput, UnsupportedPayload
from forebay.references import REFERENCE_BYTES, Resolved, is_reference

__all__ = [
    "ISSUED_FIELDS",
    "MAX_DEPTH",
    "MAX_DIMENSIONS",
    "PROMPT_FIELDS",
    "Group",
    "RolloutState",
    "SampleParams",
    "Status",
    "TokenColumn",
    "VersionSpans",
    "carries_response",
    "common_prefix",
    "finish_status",
    "freeze_arrays",
    "group_bytes",
    "group_reward",
    "group_sizes",
    "group_status",
    "group_tokens",
    "lacks_tokens",
    "reset_response",
    "shares_prompt",
    "version_spans_of",
    "versioned_tokens",
]

if TYPE_CHECKING:
    from numpy.typing import NDArray

    TokenColumn: TypeAlias = list[int] | list[float] | NDArray[Any]
else:
    TokenColumn = Any  # the codec reads it from here; `checks` says what it may be
VersionSpans: TypeAlias = tuple[tuple[int, int], ...]


class Status(enum.StrEnum):
    """What a sample, or a group, is."""

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"

    # Statuses key every index and counter; Enum's own hash is a Python call and costs ten times as much.
    __hash__ = str.__hash__


class SampleParams(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """How the engine shall sample. None leaves the choice to the engine.

    Penalties count what one request generated: those of a partial rollout start again where it continues.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    seed: int | None = None
    n: int | None = None

    def __post_init__(self) -> None:
        for name, kind, least, most in _PARAM_RANGES:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not (isinstance(value, (int, kind)) and least <= value <= most):
                what = "an integer" if kind is int else "a number"
                end = "" if most == math.inf else f" to {most}"
                raise InvalidInput(f"{name} is {value!r:.80}; expected {what} from {least}{end}")
        for name in _PARAM_FLAGS:
            flag = getattr(self, name)
            if flag is not None and type(flag) is not bool:
                raise InvalidInput(f"{name} is {flag!r:.80}; expected True, False or None")
        if not _all_are(self.stop, str):
            raise InvalidInput(f"stop is {self.stop!r:.80}; expected a tuple of strings")
        if not _all_are(self.stop_token_ids, int) or any(token < 0 for token in self.stop_token_ids):
            raise InvalidInput(f"stop_token_ids is {self.stop_token_ids!r:.80}; expected a tuple of token ids from 0")
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInput(f"min_tokens is {self.min_tokens}, but max_tokens only {self.max_tokens}")
        if self.n not in (None, 1):
            raise InvalidInput(
                f"n is {self.n!r:.80}, but one request makes one sample of a group; give the sampler "
                f"prompt_repeat_k={self.n!r:.80} instead"
            )


_PARAM_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens")


def _all_are(items: Any, kind: type) -> bool:
    return isinstance(items, (tuple, list)) and all(type(item) is kind for item in items)


_PARAM_RANGES: tuple[tuple[str, type[int] | type[float], int, float], ...] = (
    ("max_tokens", int, 1, math.inf),
    ("min_tokens", int, 0, math.inf),
    ("temperature", float, 0, math.inf),
    ("top_p", float, 0, 1),
    ("top_k", int, -1, math.inf),
    ("min_p", float, 0, 1),
    ("repetition_penalty", float, 0, math.inf),
    ("presence_penalty", float, -2, 2),
    ("frequency_penalty", float, -2, 2),
    ("seed", int, -(2**63), 2**63 - 1),
)


class RolloutState(msgspec.Struct, kw_only=True, gc=False, omit_defaults=True):
    """One prompt with one response. Only `message` is required.

    Not tracked by Python's cycle collector (`gc=False`): a buffer of 100,000 groups would otherwise stop
    the event loop for half a second at a time. Do not build cycles through a sample.
    """

    # identity
    task_name: str | None = None
    group_id: int | None = None
    rollout_id: int | None = None
    segment: int = 0
    num_tries: int = 0
    attempt: int | None = None  # which hand-out of its group this is; set by the buffer, fences old holders

    # prompt
    message: list[dict[str, Any]]
    prompt_ids: TokenColumn | None = None
    data_source: Any = None
    reward_model: dict[str, Any] | None = None
    mm_info: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None

    # engine input
    session_id: int | str | None = None
    tokens: TokenColumn | None = None
    sample_params: SampleParams | None = None

    # engine output
    response: str | None = None
    response_ids: TokenColumn | None = None
    logprobs: TokenColumn | None = None
    response_mask: TokenColumn | None = None
    version_spans: VersionSpans = ()
    finish_reason: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    routed_experts: Any = None

    # training view
    input_ids: TokenColumn | None = None
    labels: TokenColumn | None = None
    reward: dict[str, Any] | None = None

    # state
    status: Status = Status.INIT
    unjudged: bool = False  # answered, but reward and filter are still to come; its status is ABORTED until then
    seq_staleness: int = 0
    error_msg: str | None = None
    extra_fields: dict[str, Any] = msgspec.field(default_factory=dict)
    loop_state: dict[str, Any] | None = None  # what an agent loop needs to continue; reset together with the response
    issued: RolloutState | None = None  # the prompt as issued, if it may have changed since; not yours to change

    if TYPE_CHECKING:

        def __copy__(self) -> Self: ...

    @property
    def response_model_steps(self) -> list[int]:
        """The model step of every versioned token, in order; assign a list to set `version_spans`.

        >>> state = RolloutState(message=[], version_spans=((1, 2), (4, 1)))
        >>> state.response_model_steps
        [1, 1, 4]
        >>> state.response_model_steps = [3, 3, 5]
        >>> state.version_spans
        ((3, 2), (5, 1))
        """
        return [step for step, tokens in self.version_spans for _ in range(tokens)]

    @response_model_steps.setter
    def response_model_steps(self, steps: Sequence[int]) -> None:
        self.version_spans = version_spans_of(steps)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the response; of an agent trace, which has both, those of the trace.

        >>> RolloutState(message=[], prompt_ids=[1, 2], response_ids=[3]).num_tokens
        3
        """
        trace = self.input_ids if self.response_ids is None else None
        if trace is not None:
            return len(trace)
        return versioned_tokens(self) + (0 if self.prompt_ids is None else len(self.prompt_ids))


def version_spans_of(steps: Sequence[int]) -> VersionSpans:
    """The model step of every token as runs, for a constructor: `RolloutState(version_spans=version_spans_of(steps))`.

    >>> version_spans_of([3, 3, 5])
    ((3, 2), (5, 1))
    """
    return tuple((int(step), len(list(run))) for step, run in itertools.groupby(steps))


Group: TypeAlias = "tuple[RolloutState, ...]"

_FIRST_OF = (Status.FAILED, Status.EXPIRED, Status.ABORTED, Status.FILTERED, Status.INIT)


def group_status(group: Sequence[RolloutState]) -> Status:
    """All COMPLETED: COMPLETED; else the first of FAILED, EXPIRED, ABORTED, FILTERED, INIT; else ARCHIVED."""
    statuses = {state.status for state in group}
    if len(statuses) == 1:
        return statuses.pop()
    for status in _FIRST_OF:
        if status in statuses:
            return status
    if not statuses:
        raise InvalidGroup("a group without members has no status")
    return Status.ARCHIVED


def finish_status(finish_reason: str | None) -> Status:
    """The status that an engine's finish reason stands for, whatever its case.

    "tool_calls" ends a turn, not a sample: whoever takes it for an ending says so with a status.

    >>> [str(finish_status(reason)) for reason in ("stop", "LENGTH", "abort", "tool_calls", None)]
    ['completed', 'completed', 'aborted', 'failed', 'failed']
    """
    match (finish_reason or "").lower():
        case "stop" | "length":
            return Status.COMPLETED
        case "abort":
            return Status.ABORTED
        case _:
            return Status.FAILED


def versioned_tokens(state: RolloutState) -> int:
    """How many tokens of a sample carry a version: its response, or else its agent trace."""
    if state.response_ids is not None:
        return len(state.response_ids)
    if state.input_ids is not None:
        return len(state.input_ids)
    if state.labels is not None:
        return len(state.labels)
    return 0


def carries_response(state: RolloutState) -> bool:
    """Whether a sample has anything of a response."""
    return (
        state.response_ids is not None
        or state.response is not None
        or state.input_ids is not None
        or state.labels is not None
    )


def lacks_tokens(state: RolloutState) -> bool:
    """Whether there is nothing to train on: no token, and neither a text without tokens nor an agent trace."""
    if state.input_ids is not None or state.labels is not None:
        return False
    return state.response is None if state.response_ids is None else not len(state.response_ids)


def group_tokens(group: Sequence[RolloutState]) -> int:
    """How many generated tokens a group holds."""
    return sum(versioned_tokens(state) for state in group)


def group_reward(group: Sequence[RolloutState]) -> float | None:
    """The mean score of a group; None if a member has none."""
    total = 0.0
    for state in group:
        if state.reward is not None and not isinstance(state.reward, dict):
            raise InvalidGroup(
                f"reward of rollout {state.rollout_id} of group {state.group_id} is {state.reward!r}; expected a dict"
            )
    for state in group:
        reward = state.reward
        if reward is None:
            return None
        score = reward.get("score")
        if score is None:
            return None
        if not _is_finite(score):
            raise InvalidGroup(
                f"reward of rollout {state.rollout_id} of group {state.group_id} is {reward!r}; expected a dict whose "
                "'score', if it has one, is a finite number"
            )
        total += float(score)
    if not math.isfinite(total):
        raise InvalidGroup(f"the scores of group {group[0].group_id} add up beyond what a number holds")
    return total / len(group)


def _is_finite(value: object) -> bool:
    if isinstance(value, (float, floating, int, integer)):
        try:
            return math.isfinite(value)
        except OverflowError:  # a whole number that no float holds
            return False
    return False


def reset_response(state: RolloutState) -> RolloutState:
    """A copy with the prompt as it was issued, ready to be generated again; identity, status and tries stay.

    Everything that an agent loop added or changed is gone, `loop_state` included; `tokens` becomes a copy of
    `prompt_ids`. Lists and dicts are shared with `state`.
    """
    fresh = state.__copy__()
    issued = state.issued
    if issued is not None:
        for name in ISSUED_FIELDS:
            setattr(fresh, name, getattr(issued, name))
        fresh.issued = None
    prompt_ids = fresh.prompt_ids
    fresh.tokens = None if prompt_ids is None else prompt_ids.copy()
    fresh.response = None
    fresh.response_ids = None
    fresh.logprobs = None
    fresh.response_mask = None
    fresh.version_spans = ()
    fresh.finish_reason = None
    fresh.tool_calls = None
    fresh.routed_experts = None
    fresh.input_ids = None
    fresh.labels = None
    fresh.reward = None
    fresh.error_msg = None
    fresh.unjudged = False
    fresh.loop_state = None
    fresh.seq_staleness = 0
    fresh.segment = 0
    return fresh


# --- sizes --------------------------------------------------------------------------------------------


def freeze_arrays(group: Sequence[RolloutState]) -> None:
    """Make the token columns of a group read-only where they are numpy arrays."""
    prompt_ids = None
    for state in group:
        if state.prompt_ids is not prompt_ids:  # members share their prompt
            prompt_ids = state.prompt_ids
            if isinstance(prompt_ids, ndarray):
                prompt_ids.setflags(write=False)
        columns = (state.response_ids, state.logprobs, state.response_mask, state.tokens, state.input_ids, state.labels)
        for column in columns:
            if column is not None and type(column) is not list:
                column.setflags(write=False)  # type: ignore[union-attr]


def group_bytes(group: Sequence[RolloutState]) -> int:
    """The size of a group: array buffers, 8 per list item or number, and text as UTF-8.

    Prompt fields that members share (the same object) count once: the prompt is stored once for a group, and what an
    agent loop changed of it counts as the difference. So does the value of a reference that was resolved; one that was
    not is small, whatever it refers to.

    The same pass refuses what no frame can hold: UnsupportedPayload. The codec knows the path (see `intake`).
    """
    return group_sizes(group)[0]


def group_sizes(group: Sequence[RolloutState]) -> tuple[int, int]:
    """The size of a group, and what of it is not its prompt's."""
    size = prompt_size = 0
    counted: set[Resolved] = set()
    prompts: list[RolloutState] = []  # as they were issued, each once
    for state in group:
        kinds = (type(state.session_id), type(state.sample_params), type(state.tool_calls), type(state.loop_state))
        if kinds not in _MEMBER_KINDS or type(state.unjudged) is not bool:
            raise UnsupportedPayload("a field of a sample is of a type that it cannot have")
        columns = (state.response_ids, state.logprobs, state.response_mask, state.tokens, state.input_ids, state.labels)
        for column in columns:
            if column is not None:
                plain = type(column) is ndarray and column.dtype in CODE_OF
                size += column.nbytes if plain else _column_bytes(column)  # type: ignore[union-attr]
        for text in (state.response, state.error_msg):
            if text is not None:
                size += len(text) if text.isascii() else _text_bytes(text)
        if state.finish_reason is not None and not state.finish_reason.isascii():
            _text_bytes(state.finish_reason)
        if state.session_id is not None:
            _value_bytes(state.session_id, counted)  # must be storable, and does not count
        reward = state.reward
        if reward is not None:
            flat = len(reward) == 1 and type(reward.get("score")) is float
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
                    prompt_size += _column_bytes(value) if name == "prompt_ids" else _value_bytes(value, counted)
        if state.sample_params is not None and not any(state.sample_params is p.sample_params for p in prompts):
            _check_sample_params(state.sample_params)
        prompts.append(prompt)
    return prompt_size + size, size


_NONE = type(None)
_MEMBER_KINDS = frozenset(product((int, str, _NONE), (SampleParams, _NONE), (list, _NONE), (dict, _NONE)))
_PROMPT_KINDS = frozenset(product((list,), (dict, _NONE), (dict, _NONE), (list, _NONE)))
_DICTS = frozenset((dict,))


def _check_prompt(state: RolloutState) -> None:
    kinds = (type(state.message), type(state.mm_info), type(state.reward_model), type(state.tools))
    if kinds not in _PROMPT_KINDS:
        raise UnsupportedPayload("a field of a prompt is of a type that it cannot have")
    _check_dicts(state.message)
    _check_dicts(state.tools or ())


def _check_dicts(items: Sequence[Any]) -> None:
    if not _DICTS.issuperset(map(type, items)):
        raise UnsupportedPayload("a list of dicts has an item that is none")


def _check_sample_params(params: SampleParams) -> None:
    try:
        msgspec.convert(msgspec.to_builtins(params), SampleParams)
    except (msgspec.ValidationError, TypeError) as error:
        raise UnsupportedPayload(f"sample_params: {error}") from None


def shares_prompt(one: RolloutState, other: RolloutState) -> bool:
    """Whether two samples have the very same objects in their prompt fields."""
    return (
        one.message is other.message
        and one.prompt_ids is other.prompt_ids
        and one.mm_info is other.mm_info
        and one.reward_model is other.reward_model
        and one.data_source is other.data_source
        and one.tools is other.tools
        and one.tool_choice is other.tool_choice
    )


PROMPT_FIELDS = ("message", "prompt_ids", "mm_info", "reward_model", "data_source", "tools", "tool_choice")
ISSUED_FIELDS = (*PROMPT_FIELDS, "session_id", "sample_params", "extra_fields")
"""What a sample is issued with: a reset returns to it."""
_SCORE_BYTES = len("score") + 8


def _changed_bytes(state: RolloutState, issued: RolloutState, counted: set[Resolved]) -> int:
    """The size of what differs from the prompt as issued; what did not change is the same object (`forebay.issued`)."""
    size = 0
    for name in ISSUED_FIELDS:
        value, before = getattr(state, name), getattr(issued, name)
        if value is before or name == "sample_params":
            continue
        if type(value) is type(before) is list:
            value = value[common_prefix(value, before) :]
        elif type(value) is type(before) is dict:
            value = {key: item for key, item in value.items() if key not in before or item is not before[key]}
        size += _value_bytes(value, counted)
    return size


def common_prefix(items: Sequence[Any], before: Sequence[Any]) -> int:
    """How many items two sequences begin with that are the same objects."""
    pairs = zip(items, before, strict=False)
    return next((i for i, (item, old) in enumerate(pairs) if item is not old), min(len(items), len(before)))


def _text_bytes(text: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise UnsupportedPayload(f"a text is not valid Unicode: {error}") from None


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
        # A third of the time that looking at each type takes. Numbers beyond 64 bits that cancel out pass.
        total = sum(items)
    except Exception:
        return False
    if type(total) in _NUMBERS and abs(total) < _SURELY_SMALL:
        return True
    return all(type(item) in _NUMBERS and (type(item) is not int or _is_small(item)) for item in items)


def _is_small(number: int) -> bool:
    """Whether an integer fits into 64 bits."""
    return -(2**63) <= number < 2**64


def _value_bytes(value: Any, counted: set[Resolved], *, inside_reference: bool = False) -> int:
    # Level by level instead of recursion: user data may be nested deeper than Python recurses. Numbers and texts, which
    # are nearly everything, are counted in place.
    size = 0
    level = [value]
    depth = 0
    while level:
        deeper: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is dict:
                if not _TEXTS.issuperset(map(type, value)):
                    raise UnsupportedPayload("a dict has a key that is no text")
                items: Sequence[Any] = [*value, *value.values()]
            elif kind is list or kind is tuple:
                if set(map(type, value)) <= _NUMBERS and _are_numbers(value):
                    size += 8 * len(value)
                    continue
                size += 8 * sum(type(item) not in _NUMBERS for item in value)
                items = value
            else:
                items = (value,)
            for item in items:
                kind = type(item)
                if kind in _NUMBERS:
                    if kind is int and not _is_small(item):
                        raise UnsupportedPayload("an integer has more than 64 bits")
                    size += 8
                elif kind is str:
                    size += _text_bytes(item)
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


MAX_DEPTH = 64
MAX_DIMENSIONS = 8
_NUMBERS = frozenset((int, float, bool))
_TEXTS = frozenset((str,))
_CONTAINERS = frozenset((dict, list, tuple))
_SURELY_SMALL = 2**53
