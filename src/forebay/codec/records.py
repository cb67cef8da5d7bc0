"""Records, accounts and ends of groups as bytes: MessagePack, checked against their types when it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec.msgpack import Decoder, Encoder

from forebay.codec.values import READ_ERRORS, Buffer
from forebay.core.ledger import Account, GroupEnd, Record
from forebay.errors import DamagedData

T = TypeVar("T")


def _decoder(kind: type[T], what: str) -> Callable[[Buffer], T]:
    decode = Decoder(kind).decode

    def decoded(data: Buffer) -> T:
        try:
            return decode(data)
        except READ_ERRORS as error:
            raise DamagedData(f"{what} cannot be read: {error}") from None

    return decoded


encode_record = encode_account = encode_end = Encoder().encode
decode_record = _decoder(Record, "a record")
decode_account = _decoder(Account, "an account")
decode_end = _decoder(GroupEnd, "the end of a group")
