"""A query tree as a condition in SQL, with exactly the meaning that `core.query` gives it.

Every condition is true or false, never null, so that NOT is plain negation. Values are always passed as parameters; the
only names in the SQL are those of columns that the parser knows. Tags are looked up in `tag_values`: a tag
satisfies a condition only against an operand of the same type.
"""

from __future__ import annotations

from typing import Any

from forebay.core.ledger import Scalar
from forebay.core.query import And, Compare, Constant, Member, Node, Not, Or
from forebay.errors import InvalidInput, InvalidQuery
from forebay.storage.postgres.columns import TYPES, exact_number, to_text

__all__ = ["condition"]

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
