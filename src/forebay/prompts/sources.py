"""Where prompts are read from: records by number, in a fixed order, from any position.

There are three kinds of source: map-style data sets (here), iterable loaders (`loader`), and sources that users write
(`prompt_source`). `open_source` decides which one a data set is. Each source has a fingerprint, so that a position is
not applied to another data set. No data set is iterated, indexed or opened before the first record is asked for. The
order of a map-style data set is a pure function of (seed, epoch, index), so its position is one number. A JSONL file
(`jsonl`) is one. `build_prompt` makes a prompt from a record: a RolloutState, or a mapping with the messages under
`message`, `messages` or `prompt`; fields that a sample is issued with are taken by name, and the others go to
`extra_fields`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from forebay.core.fingerprint import Fingerprint, digest, own_digest, sampled_positions, type_name
from forebay.core.rollout import (
    COLUMNS,
    FIELDS,
    ISSUED_FIELDS,
    LEAVES,
    USER_FIELDS,
    RolloutState,
    SampleParams,
    Status,
    TokenColumn,
    carries_response,
    lacks_tokens,
    reset_response,
)
from forebay.core.validate import check_group, checked_integer
from forebay.errors import InvalidConfig, InvalidDataset, InvalidGroup, InvalidInput, InvalidRecord
from forebay.prompts.jsonl import JSONLDataset
from forebay.prompts.loader import LoaderSource
from forebay.prompts.prompt_source import AdaptedSource, PromptSource
from forebay.prompts.stream import Warnings

log = logging.getLogger(__name__)


class Source(Protocol):
    """The records that a sampler draws from, by number from 0 on, in a fixed order."""

    inline: bool
    """Whether reading is fast enough for the event loop; otherwise a thread reads."""

    @property
    def sequential(self) -> bool:
        """Whether records are read one after another, with a state between them: one producer per task."""

    def read(self, cursor: int) -> tuple[int, Any] | None:
        """The index of the cursor-th record, for error messages, and the record; None after the last epoch."""

    def end(self) -> int | None:
        """The number of records of all epochs; None if there is no end, or only reading finds it."""

    def state(self) -> bytes | None:
        """The state to continue from after the last record read; None if the cursor is enough."""

    def restore(self, cursor: int, state: bytes | None) -> None:
        """Continue at the cursor, where `state` was the state; does nothing if the source is already there."""

    def fingerprint(self, *, again: bool = False) -> Fingerprint:
        """The fingerprint of the data set, as far as it is known; the first call may read records.

        `again`: read them a second time, and leave out those that differ each time.
        """

    def __len__(self) -> int: ...


def open_source(dataset: Any, *, seed: int, shuffle: bool, epochs: int | None = None) -> Source:
    """The source for a data set of any supported type; InvalidDataset lists the supported types."""
    checked_integer("seed", seed)
    if all(callable(getattr(dataset, name, None)) for name in ("read", "length", "fingerprint")):
        own: PromptSource = dataset
        return AdaptedSource(own, epochs)
    if isinstance(dataset, (str, Path)):
        dataset = JSONLDataset(dataset)
    if isinstance(dataset, Mapping):
        raise InvalidDataset("the data set is a mapping; expected a sequence of records (pass one of its splits)")
    # Every data set of torch has a __getitem__; that of an IterableDataset only raises.
    iterable = any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not iterable:
        return MapSource(dataset, seed, shuffle, epochs)
    if hasattr(dataset, "__next__"):
        raise InvalidDataset(
            f"the data set {type_name(dataset)} is an iterator, which can be read only once; expected a list, a data "
            "set with __len__ and __getitem__, a loader that can be iterated again, or the path of a JSONL file"
        )
    if hasattr(dataset, "__iter__"):
        return LoaderSource(dataset, epochs)
    raise InvalidDataset(
        f"{type_name(dataset)} is not a data set; expected a list, a data set with __len__ and __getitem__, a loader, "
        "the path of a JSONL file, or a PromptSource"
    )


_ROUNDS = 8
_MASK = 2**64 - 1


def shuffled_index(seed: int, epoch: int, index: int, size: int) -> int:
    """The position in a data set of the index-th record of an epoch: a permutation of range(size), for one index.

    A Feistel network over the next power of four, applied until the result is below `size`. It depends on no library's
    random generator, so the order never changes. Takes microseconds and no memory.

    >>> sorted(shuffled_index(7, 0, i, 5) for i in range(5))
    [0, 1, 2, 3, 4]
    >>> [shuffled_index(7, epoch, 0, 1000) for epoch in range(4)]
    [271, 726, 538, 542]
    """
    keys = _round_keys(seed, epoch)
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            mixed = (right ^ key) * 0x9E3779B97F4A7C15 & _MASK
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _MASK
            left, right = right, left ^ (mixed >> 32) & mask
        index = left << half | right
        if index < size:
            return index


@functools.lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.shake_128(f"forebay {seed} {epoch}".encode()).digest(8 * _ROUNDS)
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))


class MapSource:
    """A map-style data set in shuffled order, or in its own order, epoch after epoch."""

    sequential = False

    def __init__(self, dataset: Any, seed: int, shuffle: bool, epochs: int | None = None) -> None:
        self._dataset = dataset
        self._epochs = epochs
        self._seed = seed
        self._shuffle = shuffle
        self._size: int | None = None
        self._fingerprint: Fingerprint | None = None
        self.inline = isinstance(dataset, (list, tuple))

    def __len__(self) -> int:
        return len(self._dataset)

    def once(self) -> MapSource:
        """The same data set, which ends after one epoch."""
        source = copy.copy(self)
        source._epochs = 1
        return source

    def index(self, cursor: int) -> int:
        """The position in the data set of the cursor-th record."""
        size = len(self._dataset)
        epoch, index = divmod(cursor, size)
        return shuffled_index(self._seed, epoch, index, size) if self._shuffle else index

    def end(self) -> int | None:
        return None if self._epochs is None else self._epochs * self._checked_size()

    def read(self, cursor: int) -> tuple[int, Any] | None:
        size = self._checked_size()
        if self._epochs is not None and cursor >= self._epochs * size:
            return None
        index = self.index(cursor)
        return index, self._record(index)

    def _checked_size(self) -> int:
        size = len(self._dataset)
        if size <= 0:
            raise InvalidDataset(f"the data set {type_name(self._dataset)} is empty; expected at least one record")
        if self._size is None:
            self._size = size
        if size != self._size:
            raise InvalidDataset(
                f"the data set {type_name(self._dataset)} has {size} records, but had {self._size} at the first draw; "
                "positions in it no longer mean the same records"
            )
        return size

    def _record(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except InvalidDataset:
            raise
        except Exception as error:
            raise InvalidRecord(index, f"cannot be read: {type(error).__name__}: {error}") from error

    def fingerprint(self, *, again: bool = False) -> Fingerprint:
        before = self._fingerprint
        if before is None or again:
            size, own = self._checked_size(), own_digest(self._dataset)
            records: list[str | None] = []
            unverified: list[str] = []
            for at, index in enumerate(sampled_positions(size) if own is None else ()):
                hashed, skipped = self._digest(index)
                if before is not None and hashed != before.records[at]:
                    hashed, skipped = None, "it differs each time it is read"
                records.append(hashed)
                if skipped is not None:
                    unverified.append(f"record {index}: {skipped}")
            self._fingerprint = Fingerprint(
                kind="map-style",
                length=size,
                seed=self._seed,
                shuffle=self._shuffle,
                own=own,
                records=tuple(records),
                unverified=tuple(unverified),
            )
        assert self._fingerprint is not None
        return self._fingerprint

    def _digest(self, index: int) -> tuple[str | None, str | None]:
        try:
            return digest(self._record(index))
        except InvalidRecord as error:
            return None, f"reading it raised {type(error.__cause__ or error).__name__}"

    def state(self) -> bytes | None:
        return None

    def restore(self, cursor: int, state: bytes | None) -> None:
        """Nothing to do: the cursor is the whole state."""


ToRolloutState: TypeAlias = Callable[[Any], "RolloutState | Mapping[str, Any]"]
Tokenize: TypeAlias = Callable[[RolloutState], TokenColumn]
"""Returns the token ids of a prompt: gets the RolloutState of a record, with `message` and `tools`, not its messages.
`chat_tokenize` makes one from a tokenizer.
"""

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
            state.prompt_ids = _tokenized(state, tokenize)
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


def _tokenized(state: RolloutState, tokenize: Tokenize) -> TokenColumn:
    try:
        ids = tokenize(state)
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(
            f"tokenize failed: {type(error).__name__}: {error} (tokenize gets the RolloutState of a record, not its "
            "messages; chat_tokenize makes such a function from a tokenizer)"
        ) from error
    if ids is None:
        raise InvalidInput("tokenize returned None; expected the token ids of the prompt")
    return ids


class PromptBuilder:
    """Makes prompts from records, as the options of a sampler say; see `Sampler`."""

    def __init__(
        self,
        *,
        to_rollout_state: ToRolloutState | None,
        tokenize: Tokenize | None,
        skip_bad_records: bool,
        offline: bool,
        warnings: Warnings,
    ) -> None:
        if hasattr(tokenize, "apply_chat_template") or not (tokenize is None or callable(tokenize)):
            raise InvalidConfig(
                f"tokenize is {type_name(tokenize)}; expected a function that gets a RolloutState and returns token "
                "ids: chat_tokenize(tokenizer) makes one from a tokenizer"
            )
        self.inline = to_rollout_state is None and tokenize is None  # functions of the user may take any time
        self.dropped_responses = 0
        self._to_rollout_state = to_rollout_state
        self._tokenize = tokenize
        self._skip_bad_records = skip_bad_records
        self._offline = offline
        self._warnings = warnings

    def build(self, record: Any, index: int) -> RolloutState:
        """The prompt of a record, without the response of its record unless that is to be trained on."""
        prompt = build_prompt(record, index, self._to_rollout_state, self._tokenize)
        if not carries_response(prompt):
            return prompt
        if self._offline:
            if lacks_tokens(prompt):
                raise InvalidRecord(index, "has a response without a token; expected a token, or no response")
            prompt.status = Status.COMPLETED
            return prompt
        self._warnings.warn(
            "responses_dropped index=%d: records have responses; they are dropped, and generated (give offline=True to "
            "train on them as they are)",
            index,
        )
        self.dropped_responses += 1
        bare = reset_response(prompt)
        bare.tokens = bare.prompt_ids
        return bare

    def failed(self, error: InvalidRecord) -> RolloutState:
        """The placeholder for a record that makes no prompt; raises the error unless such records are skipped."""
        if not self._skip_bad_records:
            raise error
        log.warning("record_skipped index=%d error=%s", error.index, error)
        return bad_prompt(error)


_BAD = "bad record: "


def bad_prompt(error: InvalidRecord) -> RolloutState:
    """The placeholder for a record that makes no prompt."""
    return RolloutState(message=[], status=Status.FAILED, error_msg=f"{_BAD}{error}")


def is_bad(group: Sequence[RolloutState]) -> bool:
    """Whether a group is a placeholder (`bad_prompt`), with any status: a crash makes it ABORTED."""
    return not group[0].message and (group[0].error_msg or "").startswith(_BAD)


def nothing_but_bad(records: int, last: Sequence[RolloutState]) -> InvalidDataset:
    """The error after too many records in a row that make no prompt."""
    return InvalidDataset(f"{records} records in a row make no prompt; the last one: {last[0].error_msg}")


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
