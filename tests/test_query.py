"""The query language: what it refuses, what it means, and how it narrows a search."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.buffer.buffer import ReplayBuffer
from forebay.core.ledger import Place, Record
from forebay.core.query import Constant, Node, parse, pins, predicate, resolve_staleness
from forebay.core.rollout import RolloutState, Status
from forebay.core.staleness import staleness
from forebay.errors import InvalidQuery

_ZERO = dict.fromkeys(("samples", "tokens", "bytes", "num_tries", "given_staleness", "created_at", "moved_at"), 0)
_NULL = dict.fromkeys(("reward", "oldest_step", "newest_step", "token_step"))


def record(uid: int = 1, **fields: Any) -> Record:
    """A record with everything else at 0 or null."""
    known = {"timestamp_id": uid, "group_id": uid, "task_name": "math", "status": Status.COMPLETED}
    return Record(**{"uid": uid, "place": Place.BUFFERED, **known, **_ZERO, **_NULL, **fields})


def matches(query: dict[str, Any], row: Record, train_step: int | None = None) -> bool:
    return predicate(resolve_staleness(parse(query), train_step))(row)


# --- what is refused ----------------------------------------------------------------------------------

_FIELDS = (
    "uid, timestamp_id, task_name, status, place, staleness, oldest_step, newest_step, group_id, samples, tokens, "
    "bytes, num_tries, unjudged, deliveries, reward, priority, created_at, tags.<name>"
)
_OPERATORS = "$eq, $ne, $gt, $gte, $lt, $lte, $in, $not_in, $between"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"task": "math"}, f"unknown field 'task'; expected one of {_FIELDS}"),
        ({"tags.": 1}, f"unknown field 'tags.'; expected one of {_FIELDS}"),
        ({"token_step": 1}, f"unknown field 'token_step'; expected one of {_FIELDS}"),
        ({3: 1}, f"unknown field 3; expected one of {_FIELDS}"),
        ({"$nor": []}, "unknown field '$nor'; expected one of uid, timestamp_id"),
        ({"$eq": 1}, "or $and, $or, $not - at `$.$eq`"),
        ({"tokens": {"$like": 1}}, f"unknown operator '$like'; expected one of {_OPERATORS} - at `$.tokens.$like`"),
        ({"tokens": {"gte": 1}}, f"unknown operator 'gte'; expected one of {_OPERATORS}"),
        ({"tokens": {"$not": {"$gt": 1}}}, "unknown operator '$not'"),
        ({"tokens": {}}, f"no operator; expected one of {_OPERATORS} - at `$.tokens`"),
        ({"tokens": "5"}, "tokens $eq takes an integer, got '5'"),
        ({"tokens": 5.0}, "tokens $eq takes an integer, got 5.0"),
        ({"tokens": True}, "tokens $eq takes an integer, got True"),
        ({"tokens": [1]}, "tokens $eq takes an integer, got [1]"),
        ({"tokens": 2**63}, "tokens $eq takes a number of at most 64 bits, got 9223372036854775808"),
        ({"reward": False}, "reward $eq takes a number, got False"),
        ({"reward": {"$gt": "0.5"}}, "reward $gt takes a number, got '0.5'"),
        ({"reward": {"$lt": float("nan")}}, "reward $lt takes a number that can be compared, got nan"),
        ({"tags.level": {"$in": [float("nan")]}}, "got nan - at `$.tags.level.$in[0]`"),
        ({"tags.level": [1]}, "tags.level $eq takes a string, a number, a bool or null, got [1]"),
        ({"tags.level": {"$gt": True}}, "tags.level $gt takes"),
        ({"task_name": 5}, "task_name $eq takes a string, got 5"),
        ({"task_name": None}, "task_name is never null; expected a string"),
        ({"staleness": {"$in": [0, None]}}, "staleness is never null; expected an integer"),
        ({"reward": {"$gt": None}}, "$gt does not compare with null"),
        ({"tags.level": {"$between": [None, 1]}}, "not compare with null - at `$.tags.level.$between[0]`"),
        ({"status": {"$in": ["init", None]}}, "expected a status (init, completed, aborted,"),
        ({"place": "trained"}, "expected a place (in_flight, buffered, leased, archived), got 'trained'"),
        ({"status": {"$gt": "init"}}, "$gt does not apply to a status, which has no order"),
        ({"place": {"$between": ["buffered", "leased"]}}, "$between does not apply to a place"),
        ({"tokens": {"$in": 5}}, "$in takes a list, got 5"),
        ({"task_name": {"$not_in": "math"}}, "$not_in takes a list, got 'math'"),
        ({"tokens": {"$in": [1, "2"]}}, "tokens $in takes an integer, got '2' - at `$.tokens.$in[1]`"),
        ({"tokens": {"$in": [0] * 10_001}}, "$in takes at most 10000 values, got 10001"),
        ({"tokens": {"$between": 5}}, "$between takes [low, high], got 5"),
        ({"tokens": {"$between": [1, 2, 3]}}, "$between takes [low, high], got [1, 2, 3]"),
        ({"tokens": {"$between": [2, 1]}}, "$between takes low <= high, got 2, 1"),
        ({"tags.level": {"$between": [1, "b"]}}, "$between takes two values of one type, got 1, 'b'"),
        ({"$and": []}, "$and takes a list of at least one query, got []"),
        ({"$or": []}, "$or takes a list of at least one query, got [] - at `$.$or`"),
        ({"$or": {"tokens": 1}}, "$or takes a list of at least one query"),
        ({"$and": [{}, 5]}, "expected a dict, got 5 - at `$.$and[1]`"),
        ({"$not": [{}]}, "expected a dict, got [{}] - at `$.$not`"),
        ({"$or": [{"tokens": 1}, {"$not": {"toks": 1}}]}, "at `$.$or[1].$not.toks`"),
        ("tokens", "expected a dict, got 'tokens' - at `$`"),
        (None, "expected a dict, got None"),
    ],
    ids=lambda value: repr(value)[:40] if not isinstance(value, str) else "",
)
def test_a_query_that_does_not_fit_is_refused_by_name(query: Any, message: str) -> None:
    with pytest.raises(InvalidQuery, match=re.escape(message)) as caught:
        parse(query)
    assert isinstance(caught.value, ValueError)


def test_a_query_may_be_nested_32_levels_deep_and_no_deeper() -> None:
    query: dict[str, Any] = {"tokens": 0}
    for _ in range(32):
        query = {"$not": query}
    assert matches(query, record())
    with pytest.raises(InvalidQuery, match="nested deeper than 32 levels"):
        parse({"$not": query})
    for _ in range(5_000):
        query = {"$and": [query]}
    with pytest.raises(InvalidQuery, match="nested deeper than 32 levels"):
        parse(query)


def test_an_error_shows_only_the_beginning_of_a_long_value() -> None:
    with pytest.raises(InvalidQuery) as caught:
        parse({"tokens": "9" * 5_000})
    assert len(str(caught.value)) < 200


# --- what it means ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "with_value", "with_null"),
    [
        (0.25, True, False),
        (None, False, True),
        ({"$ne": 0.5}, True, False),
        ({"$ne": 0.25}, False, False),
        ({"$ne": None}, True, False),
        ({"$in": [0.25, None]}, True, True),
        ({"$in": [0.5, None]}, False, True),
        ({"$in": [0.25]}, True, False),
        ({"$in": []}, False, False),
        ({"$not_in": [0.5]}, True, False),
        ({"$not_in": [0.5, None]}, True, False),
        ({"$not_in": [None]}, True, False),
        ({"$not_in": []}, True, False),
        ({"$lt": 1}, True, False),
        ({"$gte": 0}, True, False),
        ({"$between": [0, 0.25]}, True, False),
    ],
)
def test_null_satisfies_only_what_speaks_of_null(condition: Any, with_value: bool, with_null: bool) -> None:
    assert matches({"reward": condition}, record(reward=0.25)) is with_value
    assert matches({"reward": condition}, record(reward=None)) is with_null
    assert matches({"tags.score": condition}, record(tags={"score": 0.25})) is with_value
    assert matches({"tags.score": condition}, record(tags={"score": None})) is with_null
    assert matches({"tags.score": condition}, record(tags={"other": 0.25})) is with_null, "a missing tag is null"
    assert matches({"$not": {"reward": condition}}, record(reward=None)) is not with_null, "$not is plain negation"


@pytest.mark.parametrize(
    ("condition", "matching"),
    [
        ("5", ["5"]),
        (5, [5, 5.0]),
        (True, [True]),
        (1, []),
        ({"$ne": 5}, [6]),
        ({"$ne": "5"}, ["6"]),
        ({"$ne": False}, [True]),
        ({"$ne": None}, ["5", 5, 5.0, True, 6, "6"]),
        ({"$gt": 0}, [5, 5.0, 6]),
        ({"$gte": "5"}, ["5", "6"]),
        ({"$between": ["0", "55"]}, ["5"]),
        ({"$in": ["5", 6, True]}, ["5", True, 6]),
        ({"$not_in": [5]}, [6]),
        ({"$not_in": [5, "6"]}, ["5", 6]),
        ({"$not_in": [5, None]}, [6]),
        ({"$not_in": []}, ["5", 5, 5.0, True, 6, "6"]),
    ],
)
def test_a_tag_is_compared_only_with_its_own_type(condition: Any, matching: list[Any]) -> None:
    values = ["5", 5, 5.0, True, 6, "6"]
    found = [value for value in values if matches({"tags.level": condition}, record(tags={"level": value}))]
    assert repr(found) == repr(matching)


def test_text_compares_by_code_point() -> None:
    assert matches({"task_name": {"$gt": "Z"}}, record(task_name="a"))
    assert matches({"task_name": {"$gt": "z"}}, record(task_name="é"))
    assert not matches({"task_name": "É"}, record(task_name="é"))


def test_integers_and_floats_compare_by_value() -> None:
    assert matches({"reward": 1}, record(reward=1.0))
    assert matches({"tags.n": {"$in": [2**53 + 1]}}, record(tags={"n": 2**53 + 1}))
    assert not matches({"tags.n": {"$in": [2**53 + 1]}}, record(tags={"n": float(2**53)}))


def test_several_keys_and_several_operators_mean_and() -> None:
    query = {"task_name": "math", "tokens": {"$gt": 1, "$lt": 5}}
    assert [matches(query, record(tokens=tokens)) for tokens in (1, 2, 4, 5)] == [False, True, True, False]
    assert not matches(query, record(tokens=2, task_name="code"))


def test_an_empty_query_matches_every_record_and_its_negation_none() -> None:
    assert parse({}) == Constant(True)
    assert matches({}, record())
    assert not matches({"$not": {}}, record())


async def test_groups_put_with_numpy_numbers_are_found_by_plain_ones() -> None:
    buffer = ReplayBuffer()
    fields: dict[str, Any] = {"group_id": np.int64(5), "num_tries": np.int64(2), "version_spans": ((np.int64(3), 1),)}
    await buffer.put([RolloutState(message=[], status=Status.COMPLETED, response_ids=[1], **fields)], "math")
    queries: list[dict[str, Any]] = [{}, {"group_id": 5}, {"num_tries": 2}, {"oldest_step": {"$lt": 4}}]
    found = [len(await buffer.query(query)) for query in queries]
    await buffer.close()
    assert found == [1, 1, 1, 1]


# --- staleness ----------------------------------------------------------------------------------------

_OPS: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
    "$in": lambda value, values: value in values,
    "$not_in": lambda value, values: value not in values,
    "$between": lambda value, bounds: bounds[0] <= value <= bounds[1],
}


def age(row: Record, train_step: int) -> int:
    return 0 if row.oldest_step is None else staleness(row.oldest_step, train_step)


def _operands(op: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    if op in ("$in", "$not_in"):
        return st.lists(values, max_size=3)
    return st.tuples(values, values).map(sorted) if op == "$between" else values


_AGES = st.integers(-2, 8)
_CONDITIONS = st.sampled_from(sorted(_OPS)).flatmap(lambda op: st.tuples(st.just(op), _operands(op, _AGES)))


@settings(deadline=None, max_examples=300)
@given(oldest=st.none() | st.integers(0, 9), train_step=st.integers(1, 10), condition=_CONDITIONS)
def test_conditions_on_staleness_agree_with_computed_staleness(
    oldest: int | None, train_step: int, condition: tuple[str, Any]
) -> None:
    op, operand = condition
    row = record(oldest_step=oldest)
    resolved = resolve_staleness(parse({"staleness": {op: operand}}), train_step)
    assert "staleness" not in str(resolved)
    assert predicate(resolved)(row) is _OPS[op](age(row, train_step), operand)


@pytest.mark.parametrize("condition", [0, {"$gt": 1}, {"$in": [1]}])
def test_staleness_before_any_train_step_is_an_error(condition: Any) -> None:
    node = parse({"$or": [{"tokens": 1}, {"$not": {"staleness": condition}}]})
    with pytest.raises(InvalidQuery, match=r"before a train step was seen.* oldest_step"):
        resolve_staleness(node, None)


def test_a_query_without_staleness_needs_no_train_step() -> None:
    node = parse({"$and": [{"tokens": 1}, {"$not": {"oldest_step": {"$in": [1]}}}]})
    assert resolve_staleness(node, None) == node


# --- against a plain evaluator ------------------------------------------------------------------------


def kind(value: Any) -> str:
    return "number" if type(value) in (int, float) else "text" if isinstance(value, str) else type(value).__name__


def holds(value: Any, op: str, operand: Any) -> bool:
    """One condition, as the module describes it, on the raw operand."""
    if op == "$in":
        return any(holds(value, "$eq", item) for item in operand)
    if op == "$not_in":
        kinds = {kind(item) for item in operand if item is not None}
        return value is not None and not holds(value, "$in", operand) and (not kinds or kind(value) in kinds)
    if op == "$between":
        return holds(value, "$gte", operand[0]) and holds(value, "$lte", operand[1])
    if operand is None:
        return (value is None) is (op == "$eq")
    return value is not None and kind(value) == kind(operand) and _OPS[op](value, operand)


def plainly_matches(query: dict[str, Any], row: Record, train_step: int) -> bool:
    def one(key: str, operand: Any) -> bool:
        if key in ("$and", "$or"):
            return (all if key == "$and" else any)(plainly_matches(part, row, train_step) for part in operand)
        if key == "$not":
            return not plainly_matches(operand, row, train_step)
        if key.startswith("tags."):
            value: Any = row.tags.get(key[5:])
        else:
            value = age(row, train_step) if key == "staleness" else getattr(row, key)
        conditions = operand if isinstance(operand, dict) else {"$eq": operand}
        return all(holds(value, op, item) for op, item in conditions.items())

    return all(one(key, operand) for key, operand in query.items())


_SMALL = st.integers(0, 3)
_REWARDS = st.sampled_from([0.0, 0.5, 1.0])
_TAGS: st.SearchStrategy[Any] = st.sampled_from(["a", "b", 0, 1, 1.0, 0.5, True, False])
_VALUES: dict[str, tuple[st.SearchStrategy[Any], bool, bool]] = {  # values, nullable, ordered
    "uid": (_SMALL, False, True),
    "task_name": (st.sampled_from(["math", "code"]), False, True),
    "group_id": (_SMALL, False, True),
    "status": (st.sampled_from(["completed", "aborted"]), False, False),
    "place": (st.sampled_from(["buffered", "leased"]), False, False),
    "staleness": (_SMALL, False, True),
    "oldest_step": (_SMALL, True, True),
    "reward": (_REWARDS, True, True),
    "tags.x": (_TAGS, True, False),
    "tags.y": (_SMALL | _REWARDS, True, True),
}


@st.composite
def _field_queries(draw: st.DrawFn) -> dict[str, Any]:
    query: dict[str, Any] = {}
    for field in draw(st.lists(st.sampled_from(sorted(_VALUES)), max_size=3, unique=True)):
        values, nullable, ordered = _VALUES[field]
        ops = sorted(_OPS) if ordered else ["$eq", "$ne", "$in", "$not_in"]
        conditions: dict[str, Any] = {}
        for op in draw(st.lists(st.sampled_from(ops), min_size=1, max_size=2, unique=True)):
            null = st.none() if nullable and op in ("$eq", "$ne", "$in", "$not_in") else st.nothing()
            conditions[op] = draw(_operands(op, values | null))
        query[field] = conditions["$eq"] if "$eq" in conditions and draw(st.booleans()) else conditions
    return query


def _combined(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(inner, min_size=1, max_size=3)
    logic = st.fixed_dictionaries({}, optional={"$and": several, "$or": several, "$not": inner})
    return st.builds(lambda fields, rest: {**fields, **rest}, _field_queries(), logic)


_QUERIES = st.recursive(_field_queries(), _combined, max_leaves=6)
_RECORDS = st.builds(
    record,
    uid=_SMALL,
    task_name=_VALUES["task_name"][0],
    group_id=_SMALL,
    status=st.sampled_from([Status.COMPLETED, Status.ABORTED]),
    place=st.sampled_from([Place.BUFFERED, Place.LEASED]),
    oldest_step=st.none() | _SMALL,
    reward=st.none() | _REWARDS,
    tags=st.fixed_dictionaries({}, optional={"x": _TAGS | st.none(), "y": _TAGS}),
)


@settings(deadline=None, max_examples=300)
@given(query=_QUERIES, rows=st.lists(_RECORDS, min_size=1, max_size=8), train_step=st.integers(1, 6))
def test_a_query_matches_what_a_plain_evaluator_matches(
    query: dict[str, Any], rows: list[Record], train_step: int
) -> None:
    test = predicate(resolve_staleness(parse(query), train_step))
    assert [test(row) for row in rows] == [plainly_matches(query, row, train_step) for row in rows]


# --- pins ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(query=_QUERIES, rows=st.lists(_RECORDS, min_size=1, max_size=8))
def test_every_record_that_matches_has_the_pinned_values(query: dict[str, Any], rows: list[Record]) -> None:
    node: Node = resolve_staleness(parse(query), 4)
    test, pinned = predicate(node), pins(node)
    for row in filter(test, rows):
        assert {field for field, allowed in pinned.items() if getattr(row, field) not in allowed} == set()


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"task_name": "math"}, {"task_name": {"math"}}),
        ({"uid": {"$in": [1, 2]}, "status": "aborted"}, {"uid": {1, 2}, "status": {Status.ABORTED}}),
        ({"$and": [{"uid": {"$in": [1, 2]}}, {"uid": {"$in": [2, 3]}}]}, {"uid": {2}}),
        ({"$and": [{"group_id": 1}, {"group_id": 2}]}, {"group_id": set()}),
        ({"place": {"$in": []}}, {"place": set()}),
        ({"$or": [{"uid": 1}, {"uid": 2}]}, {}),
        ({"$not": {"uid": 1}}, {}),
        ({"uid": {"$ne": 1}}, {}),
        ({"uid": {"$not_in": [1]}}, {}),
        ({"uid": {"$gt": 1}}, {}),
        ({"tokens": 1, "tags.uid": 1}, {}),
        ({}, {}),
    ],
)
def test_a_query_pins_the_fields_that_rows_are_found_by(query: dict[str, Any], expected: dict[str, set[Any]]) -> None:
    assert pins(parse(query)) == expected
