"""What a sample is, and what follows from a sample or a group alone.

A sample is one prompt with one response; a group is the samples that share a prompt. `FIELDS` describes every field of
a sample once: its type, the part of the sample that it belongs to, and what it holds. Checks, sizes, resets, references
and the codec all read that table. Everything here is a pure function of its arguments: nothing stores, waits or knows
about train steps (see `staleness`).

Token columns (`prompt_ids`, `response_ids`, `logprobs`, ...) may be lists or one-dimensional numpy arrays; a sample
comes out with the types that it went in with. `version_spans` says which weights generated the response: runs of
(model step, number of tokens), aligned with `response_ids` from its first token on.

Plain data, which the other fields hold, is strings, numbers of at most 64 bits, bools, None and bytes, and lists,
tuples, dicts with strings as keys, and numpy arrays of them. `payload` and the codec check that.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import msgspec
from msgspec.structs import replace
from numpy import floating, integer, ndarray

from forebay.errors import InvalidGroup, InvalidInput

MAX_DEPTH = 64
"""How deep lists, tuples and dicts of plain data may be nested."""
MAX_DIMENSIONS = 8
"""How many dimensions an array may have."""

NUMBERS = frozenset((int, float, bool))
LEAVES = NUMBERS | {str, bytes, type(None)}
"""The exact types that hold no other value."""


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are the same plain data, type for type; arrays that show the same memory are the same.

    >>> same_value([1, {"a": 2.0}], [1, {"a": 2.0}]), same_value(1, 1.0), same_value(0.0, -0.0)
    (True, False, False)
    """
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is dict:
        return list(one) == list(other) and all(same_value(item, other[key]) for key, item in one.items())
    if kind is list or kind is tuple:
        return len(one) == len(other) and all(map(same_value, one, other))
    if kind is ndarray:
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        same_memory = one.__array_interface__["data"] == other.__array_interface__["data"]
        return bool(same_memory and one.strides == other.strides) or one.tobytes() == other.tobytes()
    try:
        return bool(one == other) and (kind is not float or repr(one) == repr(other))
    except Exception:  # a value of a foreign class that cannot be compared; the codec decides whether it can be stored
        return False


if TYPE_CHECKING:
    from numpy.typing import NDArray

    TokenColumn: TypeAlias = list[int] | list[float] | NDArray[Any]
else:
    TokenColumn = Any  # the codec takes the types of fields from here; `validate` checks columns
VersionSpans: TypeAlias = tuple[tuple[int, int], ...]


class Status(enum.StrEnum):
    """The status of a sample or a group."""

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"

    # Statuses are the keys of every index and counter; Enum's own hash is a Python call and costs ten times as much.
    __hash__ = str.__hash__


DRAWABLE = (Status.INIT, Status.EXPIRED, Status.ABORTED)
"""The statuses of buffered groups that a sampler draws again before it draws new prompts."""


class SampleParams(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """How the engine samples. None leaves the choice to the engine.

    An engine counts penalties within one request: when a partial rollout continues, they start again.
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
                f"group_size={self.n!r:.80} instead"
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

    Python's cycle collector does not track samples (`gc=False`): in a buffer of 100,000 groups it would stop the event
    loop for half a second at a time. Do not build reference cycles through a sample. `FIELDS` says what each field is.
    """

    # identity
    task_name: str | None = None
    group_id: int | None = None
    rollout_id: int | None = None
    segment: int = 0
    num_tries: int = 0
    attempt: int | None = None  # counts how often its group was handed out; set by the buffer, fences old owners

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
    unjudged: bool = False  # generated, but not yet rewarded and filtered; its status is ABORTED until then
    seq_staleness: int = 0
    error_msg: str | None = None
    extra_fields: dict[str, Any] = msgspec.field(default_factory=dict)
    loop_state: dict[str, Any] | None = None  # state that an agent loop needs to continue; a reset removes it
    issued: RolloutState | None = None  # the prompt as issued, if it may have changed since; never change it

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
        """The number of tokens of prompt and response. An agent trace holds both, so only its own tokens count.

        >>> RolloutState(message=[], prompt_ids=[1, 2], response_ids=[3]).num_tokens
        3
        """
        trace = self.input_ids if self.response_ids is None else None
        if trace is not None:
            return len(trace)
        return versioned_tokens(self) + (0 if self.prompt_ids is None else len(self.prompt_ids))


Group: TypeAlias = tuple[RolloutState, ...]


# --- the fields of a sample -----------------------------------------------------------------------------


class Part(enum.Enum):
    """The part of a sample that a field belongs to: it decides what a reset does to it."""

    IDENTITY = enum.auto()  # names the sample and its state; a reset keeps it
    PROMPT = enum.auto()  # as issued after a reset; a group that shares it stores it once
    REQUEST = enum.auto()  # as issued after a reset; each member has its own
    RESPONSE = enum.auto()  # made while the sample is generated and judged; a reset sets it to its default


class Field(NamedTuple):
    """One row of `FIELDS`."""

    part: Part
    types: tuple[type, ...] = ()  # the exact types that a stored sample may have here; (): any plain value
    column: bool = False  # one number per token
    user_data: bool = False  # nested plain data of the user, which may hold references
    of_dicts: bool = False  # every item of the list is a dict

    @property
    def expected(self) -> str:
        """The types, for error messages."""
        return " or ".join("None" if kind is _NONE else kind.__name__ for kind in self.types)


_NONE = type(None)
_STRING, _INTEGER = (str, _NONE), (int, _NONE)
_DICT, _LIST = (dict, _NONE), (list, _NONE)
_COLUMN = (list, ndarray, _NONE)

FIELDS: dict[str, Field] = {
    "task_name": Field(Part.IDENTITY, _STRING),
    "group_id": Field(Part.IDENTITY, _INTEGER),
    "rollout_id": Field(Part.IDENTITY, _INTEGER),
    "segment": Field(Part.RESPONSE, (int,)),
    "num_tries": Field(Part.IDENTITY, (int,)),
    "attempt": Field(Part.IDENTITY, _INTEGER),
    "message": Field(Part.PROMPT, (list,), user_data=True, of_dicts=True),
    "prompt_ids": Field(Part.PROMPT, _COLUMN, column=True),
    "data_source": Field(Part.PROMPT, user_data=True),
    "reward_model": Field(Part.PROMPT, _DICT, user_data=True),
    "mm_info": Field(Part.PROMPT, _DICT, user_data=True),
    "tools": Field(Part.PROMPT, _LIST, user_data=True, of_dicts=True),
    "tool_choice": Field(Part.PROMPT, user_data=True),
    "session_id": Field(Part.REQUEST, (int, str, _NONE)),
    "tokens": Field(Part.RESPONSE, _COLUMN, column=True),
    "sample_params": Field(Part.REQUEST, (SampleParams, _NONE)),
    "response": Field(Part.RESPONSE, _STRING),
    "response_ids": Field(Part.RESPONSE, _COLUMN, column=True),
    "logprobs": Field(Part.RESPONSE, _COLUMN, column=True),
    "response_mask": Field(Part.RESPONSE, _COLUMN, column=True),
    "version_spans": Field(Part.RESPONSE, (tuple,)),
    "finish_reason": Field(Part.RESPONSE, _STRING),
    "tool_calls": Field(Part.RESPONSE, _LIST, user_data=True, of_dicts=True),
    "routed_experts": Field(Part.RESPONSE, user_data=True),
    "input_ids": Field(Part.RESPONSE, _COLUMN, column=True),
    "labels": Field(Part.RESPONSE, _COLUMN, column=True),
    "reward": Field(Part.RESPONSE, _DICT, user_data=True),
    "status": Field(Part.IDENTITY, (Status,)),
    "unjudged": Field(Part.RESPONSE, (bool,)),
    "seq_staleness": Field(Part.RESPONSE, (int,)),
    "error_msg": Field(Part.RESPONSE, _STRING),
    "extra_fields": Field(Part.REQUEST, (dict,), user_data=True),
    "loop_state": Field(Part.RESPONSE, _DICT, user_data=True),
    "issued": Field(Part.RESPONSE, (RolloutState, _NONE)),
}
"""Every field of `RolloutState`, in the order of the class."""

COLUMNS = tuple(name for name, field in FIELDS.items() if field.column)
"""The token columns."""
PROMPT_FIELDS = tuple(name for name, field in FIELDS.items() if field.part is Part.PROMPT)
"""The prompt, which the members of a group share."""
ISSUED_FIELDS = tuple(name for name, field in FIELDS.items() if field.part in (Part.PROMPT, Part.REQUEST))
"""The fields that a sample is issued with: a reset returns to them."""
USER_FIELDS = tuple(name for name, field in FIELDS.items() if field.user_data)
"""The fields that hold the user's data, and therefore may hold references."""

columns_of: Callable[[RolloutState], tuple[Any, ...]] = attrgetter(*COLUMNS)
prompt_of: Callable[[RolloutState], tuple[Any, ...]] = attrgetter(*PROMPT_FIELDS)

_EMPTY = RolloutState(message=[])
_NO_RESPONSE = {name: getattr(_EMPTY, name) for name, field in FIELDS.items() if field.part is Part.RESPONSE}


def reset_response(state: RolloutState) -> RolloutState:
    """A copy with the prompt as it was issued, ready to be generated again; identity, status and tries stay.

    Everything that an agent loop added or changed is gone, `loop_state` included; `tokens` becomes a copy of
    `prompt_ids`. Lists and dicts are shared with `state`.
    """
    fresh = replace(state, **_NO_RESPONSE)
    if state.issued is not None:
        for name in ISSUED_FIELDS:
            setattr(fresh, name, getattr(state.issued, name))
    if fresh.prompt_ids is not None:
        fresh.tokens = fresh.prompt_ids.copy()
    return fresh


# --- versions, statuses and rewards ----------------------------------------------------------------------


def version_spans_of(steps: Sequence[int]) -> VersionSpans:
    """The model step of every token as runs: `RolloutState(version_spans=version_spans_of(steps))`.

    >>> version_spans_of([3, 3, 5])
    ((3, 2), (5, 1))
    """
    return tuple((int(step), len(list(run))) for step, run in itertools.groupby(steps))


_FINISHED = {"stop": Status.COMPLETED, "length": Status.COMPLETED, "abort": Status.ABORTED}
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
    """The status that an engine's finish reason means; upper and lower case do not matter.

    "tool_calls" ends a turn, not a sample. A loop that ends a sample there sets its status itself.

    >>> [str(finish_status(reason)) for reason in ("stop", "LENGTH", "abort", "tool_calls", None)]
    ['completed', 'completed', 'aborted', 'failed', 'failed']
    """
    return _FINISHED.get((finish_reason or "").lower(), Status.FAILED)


def versioned_tokens(state: RolloutState) -> int:
    """The number of tokens that have a version: those of the response, or else of the agent trace."""
    if state.response_ids is not None:
        return len(state.response_ids)
    if state.input_ids is not None:
        return len(state.input_ids)
    if state.labels is not None:
        return len(state.labels)
    return 0


def carries_response(state: RolloutState) -> bool:
    """Whether a sample has a response or an agent trace, even an empty one."""
    return (
        state.response_ids is not None
        or state.response is not None
        or state.input_ids is not None
        or state.labels is not None
    )


def lacks_tokens(state: RolloutState) -> bool:
    """Whether there is nothing to train on: no token, no response as a string without tokens, no agent trace."""
    if state.input_ids is not None or state.labels is not None:
        return False
    return state.response is None if state.response_ids is None else not len(state.response_ids)


def group_tokens(group: Sequence[RolloutState]) -> int:
    """The number of generated tokens in a group."""
    return sum(versioned_tokens(state) for state in group)


def group_reward(group: Sequence[RolloutState]) -> float | None:
    """The mean score of a group; None if a member has none."""
    scores: list[Any] = []
    for state in group:
        reward, score = state.reward, None
        if isinstance(reward, dict):
            score = reward.get("score")
        is_valid = score is None or None in scores or _is_finite(score)
        if not is_valid or not isinstance(reward, (dict, _NONE)):
            raise InvalidGroup(
                f"reward of rollout {state.rollout_id} of group {state.group_id} is {reward!r}; expected a dict whose "
                "'score', if it has one, is a finite number"
            )
        scores.append(score)
    if None in scores:
        return None
    total = sum(map(float, scores))
    if not math.isfinite(total):
        raise InvalidGroup(f"the sum of the scores of group {group[0].group_id} is not finite; use smaller scores")
    return total / len(group)


def _is_finite(value: object) -> bool:
    if isinstance(value, (float, floating, int, integer)):
        try:
            return math.isfinite(value)
        except OverflowError:  # an integer that no float can represent
            return False
    return False
