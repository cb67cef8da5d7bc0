"""Calls that may be repeated, and what a storage remembers of them so that they happen once.

A caller that lost its answer repeats its call. A host that runs a storage for such callers sets `CALL` around an
operation; a durable storage then writes what the operation returns in the very transaction of its effect, so that after
any crash both are stored or neither is. Before a call is run, `CallMemory.answer` says whether it was already done.
Answers are kept until the caller has seen them: every call says up to which number it has (`confirmed`).

Remembered are the operations that the contract marks `once`, a restore, and a claim that returned something. Everything
else may be repeated as it is. A discard is done in several steps: its answer comes with the last one, and one that is
repeated before that counts the rest only. An answer is MessagePack, and reading it executes nothing (G9).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, TypeAlias

import msgspec

from forebay.core.ledger import Place, Record, Row
from forebay.errors import DamagedData, LostLease
from forebay.storage.base import Claim, Purpose, Rows, Storage


class Call(msgspec.Struct, frozen=True):
    """One call of one client; all of the client's calls up to `confirmed` were answered, and the answers seen."""

    client: str
    sequence: int
    confirmed: int


CALL: ContextVar[Call | None] = ContextVar("forebay_call", default=None)
"""The call that the operation in progress belongs to; None: no caller repeats it."""


class Answered(msgspec.Struct, frozen=True):
    """What an operation returned, when it was done."""

    value: Any


class CallMemory(ABC):
    """A durable storage that remembers the answers of calls."""

    @abstractmethod
    async def answer(self, client: str, sequence: int) -> Answered | None:
        """What this call returned, if it was done and is remembered.

        LostLease if it was a claim whose rows are no longer held; then the caller holds none of them.
        """

    @abstractmethod
    async def forget(self, client: str) -> None:
        """Drop all answers of a client that has closed."""


# --- stored answers -----------------------------------------------------------------------------------


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The result of any other operation than a claim."""

    operation: str
    value: Any


class Handed(msgspec.Struct, frozen=True, tag="handed"):
    """The result of a claim. Payloads of groups taken for good are stored beside it; others are read again."""

    purpose: Purpose
    owner: str
    lease_id: str | None
    records: dict[str, list[Record]]

    @classmethod
    def of(cls, claim: Claim, records: dict[str, list[Record]]) -> Handed:
        return cls(claim.purpose, claim.owner, claim.lease_id, records)

    @property
    def claim(self) -> Claim:
        """As much of the claim as it takes to undo it."""
        return Claim(wants={}, statuses=(), purpose=self.purpose, owner=self.owner, lease_id=self.lease_id)

    def held(self) -> list[Record]:
        """Of the groups that its caller has to give back."""
        return [record for record in self._all() if not taken_for_good(record)]

    def ended(self) -> list[Record]:
        """Of the groups that were taken for good."""
        return [record for record in self._all() if taken_for_good(record)]

    def _all(self) -> Iterable[Record]:
        return (record for records in self.records.values() for record in records)

    def lost(self, missing: int) -> LostLease:
        """The error of a claim that was repeated too late."""
        return LostLease(
            f"{missing} of {sum(map(len, self.records.values()))} groups that {self.owner} claimed were taken back "
            "before the call was repeated (the holder was thought dead, or its buffer was closed); the rest went back "
            "too: claim again"
        )


Kept: TypeAlias = Returned | Handed

_decoder: msgspec.msgpack.Decoder[Kept] = msgspec.msgpack.Decoder(Kept)


def decode_kept(data: bytes) -> Kept:
    """An answer that was encoded as MessagePack, or DamagedData."""
    try:
        kept = _decoder.decode(data)
        if isinstance(kept, Returned):
            result = inspect.signature(getattr(Storage, kept.operation), eval_str=True).return_annotation
            return Returned(kept.operation, msgspec.convert(kept.value, result))
        return kept
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, AttributeError) as error:
        raise DamagedData(f"a stored answer cannot be read: {error}") from None


# --- claimed rows -------------------------------------------------------------------------------------


def taken_for_good(record: Record) -> bool:
    """Whether the record of a claimed row is of a group that ended: those come as they were in the buffer."""
    return record.place is Place.BUFFERED


def is_held(now: Record | None, claimed: Record) -> bool:
    """Whether a row is still held as it was when it was claimed: under its lease, or its owner and attempt."""
    if now is None or now.place is not claimed.place:
        return False
    if claimed.place is Place.LEASED:
        return now.lease_id == claimed.lease_id
    return now.attempt == claimed.attempt and now.owner == claimed.owner


def claimed_rows(handed: Handed, rows: Iterable[Row]) -> Rows:
    """The rows of a claim that still exist, by task, in the order of the claim."""
    by_uid = {row.record.uid: row for row in rows}
    return {
        task_name: [by_uid[record.uid] for record in records if record.uid in by_uid]
        for task_name, records in handed.records.items()
    }
