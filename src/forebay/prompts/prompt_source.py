"""Sources of prompts that users write: the protocol `PromptSource`, and its adapter to what samplers draw from.

A source is a pure function of a position, or of the state that it returned for the record before. So it needs no
rewinding: after a restart, or for a draw that has to be repeated, it is called with the stored state. The order is the
source's own; `seed` and `shuffle` do not apply. The adapter passes a new copy of the state to every call, so a source
may change the state in place. The state is stored as one plain value, as that of a loader is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from forebay.core.fingerprint import Fingerprint, digest, type_name
from forebay.core.validate import checked_integer
from forebay.errors import InvalidConfig, InvalidDataset, InvalidInput, InvalidRecord, UnsupportedPayload
from forebay.prompts.loader import pack_loader_state, unpack_loader_state

T = TypeVar("T")


@runtime_checkable
class PromptSource(Protocol):
    """A user's own source of prompts. Give it to a `Sampler` in place of a data set.

    It reads by position or by state, always the same way:

    - By position: `read` ignores `state` and returns None as the new state. Several producers may draw from it.
    - By state: `read` gets the state that it returned for the record before (None for the first record) and
      continues there, also after a restart in another process. A task has one producer.

    Methods are called from a thread, one at a time for each sampler.
    """

    def read(self, position: int, state: Any) -> tuple[Any, Any]:
        """The record at a position, and the state after it: plain data, or None if the position is enough.

        Positions count from 0 and continue over epochs: with a length of 10, position 10 is the first record of the
        second epoch. An exception means that the record cannot be read.
        """

    def length(self) -> int | None:
        """The number of records of one epoch; None if the source is endless."""

    def fingerprint(self) -> str:
        """A string that differs for other data: a version, a checksum, or a path with a revision."""


class AdaptedSource:
    """A `PromptSource` as the source of a sampler."""

    inline = False

    def __init__(self, source: PromptSource, epochs: int | None = None) -> None:
        self._source = source
        self._epochs = epochs
        self._cursor = 0
        self._state: bytes | None = None  # at the cursor, packed
        self._by_state: bool | None = None  # None: not known before the first record
        self._fingerprint: Fingerprint | None = None
        self._size: tuple[int | None] | None = None  # asked for once
        if epochs is not None and self._length() is None:
            raise InvalidConfig(
                f"the sampler has epochs={epochs}, but length() of {type_name(source)} returned None, so it is "
                "endless; remove epochs, or return the number of records of one epoch"
            )

    @property
    def sequential(self) -> bool:
        """Whether records are read one after another; assumed before the first record."""
        return self._by_state is not False

    def __len__(self) -> int:
        length = self._length()
        if length is None:
            raise InvalidDataset(f"the prompt source {type_name(self._source)} is endless; it has no length")
        return length

    def end(self) -> int | None:
        """The number of records of all epochs; None if there is no end."""
        return None if self._epochs is None else self._epochs * len(self)

    def read(self, cursor: int) -> tuple[int, Any] | None:
        if (end := self.end()) is not None and cursor >= end:
            return None
        if self._by_state is None and cursor:
            self._by_state = False  # earlier records left no state
        state = None
        if self._by_state and cursor:
            if cursor != self._cursor or self._state is None:
                raise InvalidDataset(
                    f"the prompt source {type_name(self._source)} reads by state, and there is no state for record "
                    f"{cursor}: earlier records came from another data set; give the task another name"
                )
            state = self._unpacked(self._state)
        record, after = self._called(cursor, state)
        if self._by_state is None:
            self._by_state = after is not None
        if not self._by_state and after is not None:
            raise InvalidDataset(
                f"the prompt source {type_name(self._source)} returned a state for record {cursor}, but none for "
                "earlier records; expected a source that reads either by position or by state"
            )
        if self._by_state:
            self._state = self._packed(cursor + 1, after)
        self._cursor = cursor + 1
        return cursor, record

    def _called(self, cursor: int, state: Any) -> tuple[Any, Any]:
        try:
            result = self._source.read(cursor, state)
        except InvalidDataset:
            raise
        except Exception as error:
            if self._by_state is False:
                raise InvalidRecord(cursor, f"cannot be read: {type(error).__name__}: {error}") from error
            # The state after the record is not known, so the record cannot be skipped.
            raise InvalidDataset(
                f"the prompt source {type_name(self._source)} failed at record {cursor}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(result, tuple) or len(result) != 2:
            raise InvalidDataset(
                f"read() of the prompt source {type_name(self._source)} returned a {type(result).__name__} for record "
                f"{cursor}; expected a tuple of two: the record, and the state after it"
            )
        return result

    def _packed(self, cursor: int, state: Any) -> bytes:
        try:
            return pack_loader_state({"cursor": cursor, "state": state})
        except UnsupportedPayload as error:
            name = type_name(self._source)
            raise InvalidDataset(f"the state of the prompt source {name} is not plain data: {error}") from error

    def _unpacked(self, data: bytes) -> Any:
        content = unpack_loader_state(data)
        if not isinstance(content, dict) or content.keys() != {"cursor", "state"} or content["cursor"] != self._cursor:
            raise InvalidDataset(
                f"the stored state at record {self._cursor} is not one of a prompt source: earlier records came from "
                "another kind of data set; give the task another name"
            )
        return content["state"]

    def state(self) -> bytes | None:
        return self._state

    def restore(self, cursor: int, state: bytes | None) -> None:
        self._cursor, self._state = cursor, state
        if state is not None:
            self._by_state = True
            self._unpacked(state)

    def fingerprint(self, *, again: bool = False) -> Fingerprint:
        if self._fingerprint is None or again:
            own = self._asked("fingerprint", self._source.fingerprint)
            if not isinstance(own, str):
                raise InvalidDataset(
                    f"fingerprint() of the prompt source {type_name(self._source)} returned {own!r:.60}; expected a "
                    "string"
                )
            self._fingerprint = Fingerprint(kind="prompt source", length=self._length(), own=digest(own)[0])
        return self._fingerprint

    def _length(self) -> int | None:
        if self._size is not None:
            return self._size[0]
        length = self._asked("length", self._source.length)
        try:
            self._size = (None if length is None else checked_integer("length", length, least=1),)
            return self._size[0]
        except InvalidInput:
            raise InvalidDataset(
                f"length() of the prompt source {type_name(self._source)} returned {length!r:.60}; expected a number "
                "of records of at least 1, or None if it is endless"
            ) from None

    def _asked(self, name: str, method: Callable[[], T]) -> T:
        try:
            return method()
        except Exception as error:
            raise InvalidDataset(
                f"{name}() of the prompt source {type_name(self._source)} failed: {type(error).__name__}: {error}"
            ) from error
