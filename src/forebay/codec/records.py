"""Records, accounts and ends of groups as bytes: MessagePack, checked against their types when it is read."""

from __future__ import annotations

from typing import TypeVar

from msgspec.msgpack import Decoder, Encoder

from forebay.codec.values import READ_ERRORS, Buffer
from forebay.core.ledger import Account, GroupEnd, Record
from forebay.errors import DamagedData

__all__ = ["decode_account", "decode_end", "decode_record", "encode_account", "encode_end", "encode_record"]

T = TypeVar("T")

encode_record = encode_account = encode_end = Encoder().encode
_record_decoder, _account_decoder, _end_decoder = Decoder(Record), Decoder(Account), Decoder(GroupEnd)


def decode_record(data: Buffer) -> Record:
    """A record, or DamagedData."""
    return _decoded(_record_decoder, data, "a record")


def decode_account(data: Buffer) -> Account:
    """An account, or DamagedData."""
    return _decoded(_account_decoder, data, "an account")


def decode_end(data: Buffer) -> GroupEnd:
    """The end of a group, or DamagedData."""
    return _decoded(_end_decoder, data, "the end of a group")


def _decoded(decoder: Decoder[T], data: Buffer, what: str) -> T:
    try:
        return decoder.decode(data)
    except READ_ERRORS as error:
        raise DamagedData(f"{what} cannot be read: {error}") from None
