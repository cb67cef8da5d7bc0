"""What no frame can hold is refused when it is put, in every storage, with its place."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import MemoryStorage, ReplayBuffer, RolloutState, Status, Storage, UnsupportedPayload
from forebay.buffer.internal import internals
from forebay.codec.frame import encode_group
from forebay.core.ledger import describe
from forebay.storage.local.pandas import PandasStorage
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing import make_group
from tests.support import closed_ledger


class Colour(enum.Enum):
    RED = 1


class Text(str):
    pass


class Number(int):
    pass


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


UNSUPPORTED: list[Any] = [
    {1},
    object(),
    {1: "int key"},
    {Text("k"): 1},
    bytearray(b"x"),
    Colour.RED,
    Text("x"),
    Number(1),
    np.float64(0.5),
    np.array(["text"]),
    np.array([object()]),
    np.zeros((1,) * 9),
    2**64,
    -(2**63) - 1,
    "\ud800",
    1j,
    nested(65),
]
PLAIN: list[Any] = [
    None,
    1,
    -(2**63),
    2**64 - 1,
    0.5,
    float("nan"),
    True,
    "text",
    b"bytes",
    np.zeros((2, 2), np.float32),
    np.arange(3, dtype=">i4"),
    np.zeros((1,) * 8),
    nested(60),
    [],
    (),
    {},
]


@pytest.fixture(params=["memory", "pandas", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "sqlite":
        return SQLiteStorage(tmp_path / "store.db")
    return MemoryStorage() if request.param == "memory" else PandasStorage()


@pytest.mark.parametrize("value", UNSUPPORTED, ids=lambda value: f"{type(value).__name__}")
async def test_put_refuses_values_that_a_checkpoint_cannot_hold_and_names_task_group_and_path(
    value: Any, storage: Storage
) -> None:
    async with ReplayBuffer(storage=storage) as buffer:
        group = make_group(group_id=-7)
        group[1].extra_fields = {"v": [1, value]}
        with pytest.raises(UnsupportedPayload, match=r"^group -7 of task 'math': \$\[1\]\.extra_fields"):
            await buffer.put(group, "math")
        assert await closed_ledger(buffer) == {}


async def test_issue_refuses_a_prompt_that_a_checkpoint_cannot_hold(storage: Storage) -> None:
    async with ReplayBuffer(storage=storage) as buffer:
        prompt = RolloutState(message=[{"role": "user", "content": {1}}])
        with pytest.raises(UnsupportedPayload, match=r"task 'math': \$\[0\]\.message\[0\]\.content: a builtins.set"):
            await internals(buffer).issue([[prompt]], "math", cursor=0)
        assert (await internals(buffer).position("math"))[0] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_ids", [1, "2"]),
        ("response_ids", [np.complex64(1), 2]),
        ("response_ids", [2**64, 1]),
        ("logprobs", [-0.5, None]),
        ("response_ids", np.array(["a", "b"])),
        ("mm_info", [1]),
        ("tools", [1]),
        ("tool_calls", ["call"]),
        ("message", ["hello"]),
        ("loop_state", [1]),
        ("session_id", 1.5),
        ("session_id", 2**64),
        ("finish_reason", "\ud800"),
        ("unjudged", 1),
    ],
)
async def test_put_refuses_a_field_that_no_reader_would_accept(field: str, value: Any) -> None:
    buffer = ReplayBuffer()
    (state,) = group = make_group(1, tokens=2)
    setattr(state, field, value)
    with pytest.raises(UnsupportedPayload, match=rf"^group None of task 'math': \$\[0\]\.{field}"):
        await buffer.put(group, "math")


async def test_numpy_numbers_in_the_list_of_a_column_are_stored_as_numbers(storage: Storage) -> None:
    """`[*state.response_ids, *tokens]` makes such a list of an array."""
    async with ReplayBuffer(storage=storage) as buffer:
        (state,) = group = make_group(1, tokens=2)
        state.response_ids = [*np.array([7]), 8]
        state.logprobs = [*np.array([-0.5], np.float32), *np.array([-1.5])]
        state.response_mask = [*np.array([True]), 0]
        await buffer.put(group, "math")
        ((state,),) = await buffer.get(1, "math", Status.COMPLETED)
        columns = (state.response_ids, state.logprobs, state.response_mask)
        assert columns == ([7, 8], [-0.5, -1.5], [True, 0])
        assert [type(item) for column in columns for item in column or ()] == [int, int, float, float, bool, int]


async def test_an_error_message_that_is_not_valid_unicode_is_stored_with_question_marks(storage: Storage) -> None:
    async with ReplayBuffer(storage=storage) as buffer:
        group = make_group(status=Status.ABORTED)
        group[0].error_msg = "no such file: \udcff"
        await buffer.put(group, "math")
        ((state, _),) = await internals(buffer).redraw(1, "math")
        assert state.error_msg == "no such file: ?"


async def test_a_reference_of_a_kind_that_nobody_registered_says_which_import_is_missing() -> None:
    foreign = type("ObjectRef", (), {"__module__": "ray._raylet"})
    buffer = ReplayBuffer()
    group = make_group()
    group[0].mm_info = {"image": foreign()}
    with pytest.raises(UnsupportedPayload, match=r"mm_info\.image: a ray\._raylet\.ObjectRef.*`import forebay\.ray`"):
        await buffer.put(group, "math")


_leaves = st.sampled_from(PLAIN * 3 + UNSUPPORTED)
_values = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", "\ud800", 1]), inner, max_size=2)
    ),
    max_leaves=6,
)
_columns = st.lists(st.sampled_from([1, 2**63, 0.5, True, "x", None, np.int8(1), 2**65, [1]]), max_size=3)


@settings(max_examples=500, deadline=None)
@given(
    fields=st.fixed_dictionaries(
        {},
        optional={
            "extra_fields": st.dictionaries(st.just("v"), _values),
            "mm_info": st.dictionaries(st.just("v"), _values),
            "data_source": _values,
            "tool_choice": _values,
            "loop_state": st.dictionaries(st.just("v"), _values),
            "routed_experts": _values,
            "tokens": _columns,
            "input_ids": _columns,
        },
    )
)
def test_the_pass_that_counts_bytes_refuses_exactly_what_the_codec_refuses(fields: dict[str, Any]) -> None:
    group = (RolloutState(message=[], **fields),)
    try:
        encode_group(group)
    except UnsupportedPayload:
        with pytest.raises(UnsupportedPayload):
            describe(group)
    else:
        describe(group)
