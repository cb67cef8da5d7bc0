"""Records as columns of the table `groups`, and back; and query trees as conditions on these columns.

The columns are the fields of `Record`, and two more: `tag_values` (the tags as JSON, which queries read) and
`trained_as` (the status of an archived group before it was trained). Every value comes back as it was stored: tags
also as MessagePack, and strings with an escape for the character NUL, which PostgreSQL cannot store; the escape keeps
the order of code points.

A condition has exactly the meaning that `core.query` gives its tree. It is true or false, never null, so that NOT is
plain negation. Values are always passed as parameters; the only names in the SQL are those of columns that the parser
knows. A tag satisfies a condition only against an operand of the same type.
"""

from __future__ import annotations

import json
import math
from typing import Any, get_type_hints

import msgspec

from forebay.core.ledger import NO_TAGS, Place, Record, Scalar, SessionIds, Tags
from forebay.core.query import And, Compare, Constant, Member, Node, Not, Or
from forebay.core.rollout import Status
from forebay.errors import InvalidInput, InvalidQuery

_FIELDS = Record.__struct_fields__
COLUMNS = (*_FIELDS, "tag_values", "trained_as")
"""All columns of `groups`, in the order of `record_values`."""

RECORD = ", ".join(f"g.{name}" for name in _FIELDS)
"""The columns that `read_record` reads, where `groups` is called g."""

_HINTS = get_type_hints(Record)
_SCALARS = {int: "bigint", float: "double precision", str: "text", Status: "text", Place: "text"}
_KINDS: dict[Any, str] = {
    **{kind: f"{sql} NOT NULL" for kind, sql in _SCALARS.items()},
    **{k | None: v for k, v in _SCALARS.items()},
}
_TYPES = {name: _KINDS.get(_HINTS[name], "bytea") for name in _FIELDS} | {"tag_values": "jsonb", "trained_as": "text"}

TYPES = {name: kind.removesuffix(" NOT NULL") for name, kind in _TYPES.items()}
"""The SQL type of each column."""

DEFINITIONS = ", ".join(f"{name} {kind}" for name, kind in _TYPES.items()).replace(" text", ' text COLLATE "C"')
"""The columns as CREATE TABLE needs them."""

_STRINGS = tuple(index for index, name in enumerate(_FIELDS) if _HINTS[name] in (str, str | None))
_SESSIONS, _TAGS = _FIELDS.index("session_ids"), _FIELDS.index("tags")
_STATUS, _PLACE = _FIELDS.index("status"), _FIELDS.index("place")
_STATUSES = {str(status): status for status in Status}
_PLACES = {str(place): place for place in Place}

_encode = msgspec.msgpack.Encoder().encode
_decode_sessions = msgspec.msgpack.Decoder(SessionIds).decode
_decode_tags = msgspec.msgpack.Decoder(dict[str, str | int | float | bool | None]).decode


# --- strings and numbers ------------------------------------------------------------------------------


def to_text(string: str) -> str:
    """A string as PostgreSQL can store it; InvalidInput for a surrogate without its pair.

    >>> to_text("a\\x00b") < to_text("a\\x01b") < to_text("a\\x02b")
    True
    """
    if not string.isascii():
        try:
            string.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"{string!r} has a surrogate without its pair; it cannot be stored") from None
    if "\0" in string or "\1" in string:
        return string.replace("\1", "\1\2").replace("\0", "\1\1")
    return string


def from_text(text: str) -> str:
    """The string that `to_text` was given."""
    return text.replace("\1\1", "\0").replace("\1\2", "\1") if "\1" in text else text


def exact_number(number: int | float) -> str:
    """Digits that compare as the number does, also with numbers of the other type.

    A float with an integer value is written exactly; any other in its shortest form, which lies between the same
    integers and the same floats as itself.

    >>> exact_number(1e16), exact_number(0.1), exact_number(float("-inf"))
    ('10000000000000000', '0.1', '-Infinity')
    """
    if isinstance(number, int):
        return str(number)
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return str(int(number)) if number.is_integer() else repr(number)


def _tag_json(value: Scalar) -> str:
    if isinstance(value, str):
        return json.dumps(to_text(value))
    if isinstance(value, bool):
        return "true" if value else "false"
    assert value is not None
    number = exact_number(value)
    return f'["{number}"]' if number.endswith("y") else number  # JSON has no infinity


def _tag_columns(tags: Tags) -> tuple[bytes | None, str | None]:
    """Tags as MessagePack, and as queries read them: a tag that is null is the same as none."""
    if not tags:
        return None, None
    values = ",".join(
        f"{json.dumps(to_text(name))}:{_tag_json(value)}" for name, value in tags.items() if value is not None
    )
    return _encode(tags), f"{{{values}}}"


# --- records ------------------------------------------------------------------------------------------


def record_values(record: Record, trained_as: Status | None = None) -> tuple[Any, ...]:
    """The values of COLUMNS; one value of the row type `groups`."""
    values: list[Any] = list(msgspec.structs.astuple(record))
    for index in _STRINGS:
        if values[index] is not None:
            values[index] = to_text(values[index])
    values[_SESSIONS] = _encode(record.session_ids) if record.session_ids else None
    values[_TAGS], tag_values = _tag_columns(record.tags)
    return (*values, tag_values, trained_as)


def read_record(row: Any) -> Record:
    """The record of a row that begins with the columns of RECORD."""
    values = list(row)[: len(_FIELDS)]
    for index in _STRINGS:
        if values[index] is not None:
            values[index] = from_text(values[index])
    values[_STATUS], values[_PLACE] = _STATUSES[values[_STATUS]], _PLACES[values[_PLACE]]
    sessions, tags = values[_SESSIONS], values[_TAGS]
    values[_SESSIONS] = () if sessions is None else _decode_sessions(sessions)
    values[_TAGS] = NO_TAGS if tags is None else _decode_tags(tags)
    return Record(**dict(zip(_FIELDS, values, strict=True)))


_TAG = "tags."
_OPS = {"eq": "=", "ne": "<>", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}


def condition(node: Node, parameters: list[Any]) -> str:
    """The condition of a tree; its values are appended to `parameters`, which it names $1, $2, ..."""
    return _Writer(parameters).write(node)


class _Writer:
    def __init__(self, parameters: list[Any]) -> None:
        self._parameters = parameters

    def _value(self, value: Any, kind: str) -> str:
        self._parameters.append(value)
        return f"${len(self._parameters)}::{kind}"

    def write(self, node: Node) -> str:
        match node:
            case Constant(value):
                return "true" if value else "false"
            case And(nodes):
                return f"({' AND '.join(self.write(part) for part in nodes)})" if nodes else "true"
            case Or(nodes):
                return f"({' OR '.join(self.write(part) for part in nodes)})" if nodes else "false"
            case Not(inner):
                return f"(NOT {self.write(inner)})"
            case Compare(field, op, operand):
                if field.startswith(_TAG):
                    return self._compare_tag(field[len(_TAG) :], op, operand)
                return self._compare(field, op, operand)
            case Member(field, values, negated):
                if field.startswith(_TAG):
                    return self._member_tag(field[len(_TAG) :], values, negated)
                return self._member(field, values, negated)

    # --- columns ------------------------------------------------------------------------------------

    def _compare(self, field: str, op: str, operand: Scalar) -> str:
        column = f'"{field}"'
        if operand is None:
            return f"({column} IS {'' if op == 'eq' else 'NOT '}NULL)"
        if TYPES[field] == "text":
            return f"({column} {_OPS[op]} {self._value(_operand_text(str(operand)), 'text')})"
        if TYPES[field] == "bigint":
            return f"({column} IS NOT NULL AND {column} {_OPS[op]} {self._value(operand, 'bigint')})"
        assert isinstance(operand, (int, float))
        nearest = float(operand)
        if nearest != operand:
            # An integer between two floats: nothing is equal to it, and it compares as its neighbour does.
            if op in ("eq", "ne"):
                return "false" if op == "eq" else f"({column} IS NOT NULL)"
            above = nearest > operand
            op = {"gt": "gte" if above else "gt", "lt": "lt" if above else "lte"}[op[:2]]
        return f"({column} IS NOT NULL AND {column} {_OPS[op]} {self._value(nearest, 'double precision')})"

    def _member(self, field: str, values: tuple[Scalar, ...], negated: bool) -> str:
        column = f'"{field}"'
        known: list[Any] = [value for value in values if value is not None]
        if TYPES[field] == "text":
            found = self._value([_operand_text(str(value)) for value in known], "text[]")
        elif TYPES[field] == "bigint":
            found = self._value(known, "bigint[]")
        else:
            found = self._value([float(v) for v in known if float(v) == v], "double precision[]")
        inside = f"({column} IS NOT NULL AND {column} = ANY({found}))"
        if negated:
            return f"({column} IS NOT NULL AND NOT {inside})"
        return f"({inside} OR {column} IS NULL)" if None in values else inside

    # --- tags ---------------------------------------------------------------------------------------

    def _tag(self, name: str) -> str:
        return f"(tag_values -> {self._value(_operand_text(name), 'text')})"

    def _compare_tag(self, name: str, op: str, operand: Scalar) -> str:
        tag = self._tag(name)
        if operand is None:
            return f"({tag} IS {'' if op == 'eq' else 'NOT '}NULL)"
        if isinstance(operand, bool):
            wanted = operand if op == "eq" else not operand
            return f"coalesce({tag} = '{'true' if wanted else 'false'}'::jsonb, false)"
        if isinstance(operand, str):
            value = self._value(_operand_text(operand), "text")
            return f"coalesce({_text_of(tag)} {_OPS[op]} {value}, false)"
        value = self._value(exact_number(operand), "text")
        return f"coalesce({_number_of(tag)} {_OPS[op]} {value}::numeric, false)"

    def _member_tag(self, name: str, values: tuple[Scalar, ...], negated: bool) -> str:
        if not values and not negated:
            return "false"
        tag = self._tag(name)
        texts = [_operand_text(value) for value in values if isinstance(value, str)]
        bools = [value for value in values if isinstance(value, bool)]
        numbers = [
            exact_number(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        found, kinds = [], []
        if texts:
            found.append(f"{_text_of(tag)} = ANY({self._value(texts, 'text[]')})")
            kinds.append(f"jsonb_typeof({tag}) = 'string'")
        if numbers:
            found.append(f"{_number_of(tag)} = ANY({self._value(numbers, 'text[]')}::numeric[])")
            kinds.append(f"jsonb_typeof({tag}) IN ('number', 'array')")
        if bools:
            found.append(f"{tag} = ANY({self._value(['true' if v else 'false' for v in bools], 'text[]')}::jsonb[])")
            kinds.append(f"jsonb_typeof({tag}) = 'boolean'")
        inside = " OR ".join(f"coalesce({each}, false)" for each in found) or "false"
        if not negated:
            return f"({inside} OR {tag} IS NULL)" if None in values else f"({inside})"
        same_type = " OR ".join(f"coalesce({each}, false)" for each in kinds) or "true"
        return f"({tag} IS NOT NULL AND NOT ({inside}) AND ({same_type}))"


def _text_of(tag: str) -> str:
    return f"(CASE jsonb_typeof({tag}) WHEN 'string' THEN {tag} #>> '{{}}' END COLLATE \"C\")"


def _number_of(tag: str) -> str:
    return (
        f"(CASE jsonb_typeof({tag}) WHEN 'number' THEN ({tag})::numeric WHEN 'array' THEN ({tag} ->> 0)::numeric END)"
    )


def _operand_text(text: str) -> str:
    try:
        return to_text(text)
    except InvalidInput as error:
        raise InvalidQuery(str(error)) from None
