"""The query language: `parse` turns a dict into a checked tree, and every backend gives the same answer to it.

    {"task_name": "math", "tokens": {"$gte": 1000}, "tags.difficulty": {"$in": ["hard", None]}}
    {"$or": [{"status": "aborted"}, {"$not": {"reward": {"$between": [0.0, 0.5]}}}]}

Several keys mean and. Parsing checks the whole query, before any record is read.

Every backend must follow these rules:
- Two-valued logic: a condition holds or does not, and `$not` is plain negation.
- A null value satisfies `$eq`, `$ne`, `$in`, `$not_in` only through a null in the operand, and no other
  operator: `{"reward": {"$ne": 0.5}}` does not match a record without reward; `{"reward": {"$ne": None}}`
  matches those that have one. A tag that a record does not have is null.
- A tag satisfies a condition only against an operand of the same type (string, number, bool); it never raises.
- Strings compare by code point. Integers and floats compare by value; a bool is not a number.

`staleness` depends on a train step and is not a column of any backend: `resolve_staleness` translates it to
`oldest_step`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from forebay.core.ledger import Place, Record, Scalar
from forebay.core.rollout import Status
from forebay.errors import InvalidQuery


class Compare(msgspec.Struct, frozen=True):
    """field op value, with op one of eq ne gt gte lt lte."""

    field: str
    op: str
    value: Scalar


class Member(msgspec.Struct, frozen=True):
    """field is one of the values, or (`negated`) none of them."""

    field: str
    values: tuple[Scalar, ...]
    negated: bool = False


class And(msgspec.Struct, frozen=True):
    nodes: tuple[Node, ...]


class Or(msgspec.Struct, frozen=True):
    nodes: tuple[Node, ...]


class Not(msgspec.Struct, frozen=True):
    node: Node


class Constant(msgspec.Struct, frozen=True):
    """Every record, or none."""

    value: bool


Node: TypeAlias = "Compare | Member | And | Or | Not | Constant"

_INTEGER, _NUMBER, _STRING, _STATUS, _PLACE = "an integer", "a number", "a string", "a status", "a place"

_FIELDS: dict[str, tuple[str, bool]] = {  # kind, may be null
    "uid": (_INTEGER, False),
    "timestamp_id": (_INTEGER, False),
    "task_name": (_STRING, False),
    "status": (_STATUS, False),
    "place": (_PLACE, False),
    "staleness": (_INTEGER, False),
    "oldest_step": (_INTEGER, True),
    "newest_step": (_INTEGER, True),
    "group_id": (_INTEGER, False),
    "samples": (_INTEGER, False),
    "tokens": (_INTEGER, False),
    "bytes": (_INTEGER, False),
    "num_tries": (_INTEGER, False),
    "unjudged": (_INTEGER, False),
    "deliveries": (_INTEGER, False),
    "reward": (_NUMBER, True),
    "priority": (_NUMBER, False),
    "created_at": (_NUMBER, False),
}
_TAG = "tags."
_COMPARE = ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte")
_OPERATORS = (*_COMPARE, "$in", "$not_in", "$between")
_LOGIC = ("$and", "$or", "$not")

_MAX_DEPTH = 32
_MAX_VALUES = 10_000


# --- parse --------------------------------------------------------------------------------------------


def parse(query: Mapping[str, Any]) -> Node:
    """The checked tree of a query; `{}` matches every record. InvalidQuery names the part that is wrong."""
    return _parse(query, "$", 0)


def _parse(query: object, path: str, depth: int) -> Node:
    if depth > _MAX_DEPTH:
        raise InvalidQuery(f"nested deeper than {_MAX_DEPTH} levels - at `{path[:80]}...`")
    if not isinstance(query, Mapping):
        raise InvalidQuery(f"expected a dict, got {_shown(query)} - at `{path}`")
    nodes: list[Node] = []
    for key, operand in query.items():
        where = f"{path}.{key}"
        if key in ("$and", "$or"):
            if not isinstance(operand, (list, tuple)) or not operand:
                raise InvalidQuery(f"{key} takes a list of at least one query, got {_shown(operand)} - at `{where}`")
            parts = tuple(_parse(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(operand))
            nodes.append(And(parts) if key == "$and" else Or(parts))
        elif key == "$not":
            nodes.append(Not(_parse(operand, where, depth + 1)))
        else:
            nodes += _conditions(key, operand, where)
    if not nodes:
        return Constant(True)
    return nodes[0] if len(nodes) == 1 else And(tuple(nodes))


def _conditions(field: object, operand: object, path: str) -> list[Node]:
    if not isinstance(field, str) or not (field in _FIELDS or (field.startswith(_TAG) and len(field) > len(_TAG))):
        raise InvalidQuery(
            f"unknown field {field!r}; expected one of {', '.join(_FIELDS)}, tags.<name>, or {', '.join(_LOGIC)}"
            f" - at `{path}`"
        )
    if not isinstance(operand, Mapping):
        return [Compare(field, "eq", _operand(field, "$eq", operand, path))]
    if not operand:
        raise InvalidQuery(f"no operator; expected one of {', '.join(_OPERATORS)} - at `{path}`")
    nodes: list[Node] = []
    for op, value in operand.items():
        where = f"{path}.{op}"
        if op in _COMPARE:
            nodes.append(Compare(field, op[1:], _operand(field, op, value, where)))
        elif op in ("$in", "$not_in"):
            if not isinstance(value, (list, tuple)):
                raise InvalidQuery(f"{op} takes a list, got {_shown(value)} - at `{where}`")
            if len(value) > _MAX_VALUES:
                raise InvalidQuery(f"{op} takes at most {_MAX_VALUES} values, got {len(value)} - at `{where}`")
            values = tuple(_operand(field, op, item, f"{where}[{i}]") for i, item in enumerate(value))
            nodes.append(Member(field, values, negated=op == "$not_in"))
        elif op == "$between":
            if not isinstance(value, (list, tuple)) or len(value) != 2:
                raise InvalidQuery(f"$between takes [low, high], got {_shown(value)} - at `{where}`")
            low, high = (_operand(field, op, item, f"{where}[{i}]") for i, item in enumerate(value))
            if isinstance(low, str) is not isinstance(high, str):
                raise InvalidQuery(f"$between takes two values of one type, got {low!r}, {high!r} - at `{where}`")
            if low > high:  # type: ignore[operator]
                raise InvalidQuery(f"$between takes low <= high, got {low!r}, {high!r} - at `{where}`")
            nodes += (Compare(field, "gte", low), Compare(field, "lte", high))
        else:
            raise InvalidQuery(f"unknown operator {op!r}; expected one of {', '.join(_OPERATORS)} - at `{where}`")
    return nodes


def _operand(field: str, op: str, value: object, path: str) -> Scalar:
    """One operand, checked against the type of its field."""
    ordering = op not in ("$eq", "$ne", "$in", "$not_in")
    if field.startswith(_TAG):
        kind, nullable = "a string, a number, a bool or null", True
        fits = value is None or type(value) in (str, int, float, bool)
        fits = fits and not (ordering and type(value) is bool)
    else:
        kind, nullable = _FIELDS[field]
        if kind in (_STATUS, _PLACE):
            return _named(Status if kind is _STATUS else Place, value, ordering, op, path)
        fits = (
            type(value) is str if kind is _STRING else type(value) is int or (kind is _NUMBER and type(value) is float)
        )
    if value is None:
        if not nullable:
            raise InvalidQuery(f"{field} is never null; expected {kind} - at `{path}`")
        if ordering:
            raise InvalidQuery(f"{op} does not compare with null - at `{path}`")
        return None
    if not fits:
        raise InvalidQuery(f"{field} {op} takes {kind}, got {_shown(value)} - at `{path}`")
    if type(value) is float and math.isnan(value):
        raise InvalidQuery(f"{field} {op} takes a number that can be compared, got nan - at `{path}`")
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise InvalidQuery(f"{field} {op} takes a number of at most 64 bits, got {value} - at `{path}`")
    return value  # type: ignore[return-value]


def _named(names: type[Status] | type[Place], value: object, ordering: bool, op: str, path: str) -> Scalar:
    if ordering:
        raise InvalidQuery(f"{op} does not apply to a {names.__name__.lower()}, which has no order - at `{path}`")
    if isinstance(value, str) and value in list(names):
        return names(value)
    raise InvalidQuery(f"expected a {names.__name__.lower()} ({', '.join(names)}), got {_shown(value)} - at `{path}`")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


# --- staleness ----------------------------------------------------------------------------------------


def resolve_staleness(node: Node, train_step: int | None) -> Node:
    """The same tree with conditions on `staleness` turned into conditions on `oldest_step`.

    A group without tokens has staleness 0.
    """
    match node:
        case And(nodes):
            return And(tuple(resolve_staleness(part, train_step) for part in nodes))
        case Or(nodes):
            return Or(tuple(resolve_staleness(part, train_step) for part in nodes))
        case Not(inner):
            return Not(resolve_staleness(inner, train_step))
        case Compare("staleness", op, value):
            assert isinstance(value, int)
            return _staleness(op, value, _step(train_step))
        case Member("staleness", values, negated):
            equal = tuple(_staleness("eq", int(value), _step(train_step)) for value in values)  # type: ignore[arg-type]
            found: Node = Or(equal) if equal else Constant(False)
            return Not(found) if negated else found
    return node


def _step(train_step: int | None) -> int:
    if train_step is None:
        raise InvalidQuery(
            "staleness is unknown before a train step was seen; put with current_train_step, refresh or lease first, "
            "or query oldest_step"
        )
    return train_step


def _staleness(op: str, value: int, train_step: int) -> Node:
    if op == "ne":
        return Not(_staleness("eq", value, train_step))
    if op in ("lt", "lte"):
        return Not(_staleness("gte" if op == "lt" else "gt", value, train_step))
    if op == "gt":
        return _staleness("gte", value + 1, train_step)
    if op == "gte":
        if value <= 0:
            return Constant(True)
        # Model steps start at 0, so staleness is always below the train step.
        return Constant(False) if value >= train_step else Compare("oldest_step", "lte", train_step - 1 - value)
    if value < 0 or value >= train_step:
        return Constant(False) if value else Constant(True)
    if value == 0:
        return Not(_staleness("gte", 1, train_step))
    return Compare("oldest_step", "eq", train_step - 1 - value)


# --- evaluate -----------------------------------------------------------------------------------------

Predicate: TypeAlias = "Callable[[Record], bool]"

_OPS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}


def predicate(node: Node) -> Predicate:
    """A function that tells whether a record matches a tree without conditions on `staleness`."""
    match node:
        case Constant(value):
            return lambda record: value
        case And(nodes):
            parts = [predicate(part) for part in nodes]
            return lambda record: all(part(record) for part in parts)
        case Or(nodes):
            parts = [predicate(part) for part in nodes]
            return lambda record: any(part(record) for part in parts)
        case Not(inner):
            matches = predicate(inner)
            return lambda record: not matches(record)
        case Compare(field, op, operand):
            return _compare(_getter(field), op, operand)
        case Member(field, values, negated):
            return _member(_getter(field), values, negated)


def _getter(field: str) -> Callable[[Record], Any]:
    if field.startswith(_TAG):
        name = field[len(_TAG) :]
        return lambda record: record.tags.get(name)
    return operator.attrgetter(field)


def _kind(value: Scalar) -> type:
    """Values compare within a kind only: string, number, bool, null."""
    return float if type(value) is int else str if isinstance(value, str) else type(value)


def _compare(get: Callable[[Record], Any], op: str, operand: Scalar) -> Predicate:
    if operand is None:
        return (lambda record: get(record) is None) if op == "eq" else (lambda record: get(record) is not None)
    test, kind = _OPS[op], _kind(operand)

    def matches(record: Record) -> bool:
        value = get(record)
        return value is not None and _kind(value) is kind and test(value, operand)

    return matches


def _member(get: Callable[[Record], Any], values: Sequence[Scalar], negated: bool) -> Predicate:
    null = None in values
    known = {(_kind(value), value) for value in values if value is not None}
    kinds = {kind for kind, _ in known}

    def matches(record: Record) -> bool:
        value = get(record)
        if value is None:
            return null and not negated
        found = (_kind(value), value) in known
        if not negated:
            return found
        # $not_in matches only values of a kind that the list contains; an empty list, or one of nulls, means all.
        return not found and (not kinds or _kind(value) in kinds)

    return matches


# --- narrowing ----------------------------------------------------------------------------------------

Pins: TypeAlias = "dict[str, frozenset[Any]]"

_PINNABLE = ("uid", "task_name", "group_id", "status", "place")


def pins(node: Node) -> Pins:
    """For fields with an index: the values that a matching record can have."""
    match node:
        case Compare(field, "eq", value) if field in _PINNABLE:
            return {field: frozenset((value,))}
        case Member(field, values, False) if field in _PINNABLE:
            return {field: frozenset(values)}
        case And(nodes):
            found: Pins = {}
            for part in nodes:
                for field, allowed in pins(part).items():
                    found[field] = found[field] & allowed if field in found else allowed
            return found
    return {}
