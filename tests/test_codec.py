"""Groups, records, accounts and values as bytes: exact both ways, and DamagedData for altered bytes (G9)."""

from __future__ import annotations

import gc
import random
import struct
import weakref
from decimal import Decimal
from typing import Any
from uuid import UUID
from zlib import crc32

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from msgspec.msgpack import Ext

from forebay.codec.frame import decode_group, encode_group
from forebay.codec.records import decode_account, decode_record, encode_account, encode_record
from forebay.codec.values import decode_value, encode_value
from forebay.core.ledger import Account, End, Place, Record
from forebay.core.references import Resolved
from forebay.core.rollout import RolloutState, SampleParams, Status
from forebay.core.staleness import Limits
from forebay.errors import DamagedData, InvalidInput, UnreadableData, UnsupportedPayload

DTYPES = ["bool", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8", ">u2", ">i4", ">i8", ">f8"]
START = struct.Struct("<4sB3xIQ")
HEADER = struct.Struct("<4sB3xIQI")


def same(one: Any, other: Any) -> bool:
    """Equal in type, too, down to the last array."""
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype.newbyteorder("=")
            and one.shape == other.shape
            and one.tobytes() == other.astype(one.dtype).tobytes()
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, RolloutState):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    return repr(one) == repr(other)  # nan is nan, and -0.0 is not 0.0


def frame_of(head: bytes, body: bytes = b"", version: int = 1) -> bytes:
    """A frame with a correct header and checksum."""
    padding = bytes(-(HEADER.size + len(head)) % 16)
    body = padding + body
    return packed(bytes(head), body, version)


def packed(head: bytes, body: bytes, version: int = 1, magic: bytes = b"FBG1") -> bytes:
    """A frame with a correct checksum."""
    start = START.pack(magic, version, len(head), len(body))
    return start + crc32(start + head + body).to_bytes(4, "little") + head + body


def crafted(sample: dict[str, Any], body: bytes = b"", prompts: Any = (0,)) -> bytes:
    return frame_of(msgspec.msgpack.encode([list(prompts), [{"message": [], **sample}]]), body)


def referring(sample: dict[str, Any], values: Any, body: bytes = b"") -> bytes:
    """A frame of version 2 with these values."""
    return frame_of(msgspec.msgpack.encode([[0], [{"message": [], **sample}], values]), body, version=2)


def reference_ext(index: int, code: int = 3) -> Ext:
    return Ext(code, index.to_bytes(4, "little"))


def array_ext(code: int, shape: tuple[int, ...], offset: int = 0, dimensions: int | None = None) -> Ext:
    count = len(shape) if dimensions is None else dimensions
    return Ext(1, struct.pack(f"<BB{len(shape) + 1}Q", code, count, offset, *shape))


# --- exact both ways ----------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
numbers = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(width=64)
leaves = st.none() | numbers | texts | st.binary(max_size=8) | arrays
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=12,
)
columns = st.lists(st.integers(0, 2**31), max_size=6) | npst.arrays(
    st.sampled_from(["<i4", "<i8", "<u2", ">i8", "<f4"]), st.integers(0, 6)
)


@st.composite
def groups(draw: st.DrawFn) -> list[RolloutState]:
    members = []
    for index in range(draw(st.integers(1, 4))):
        response = draw(st.none() | columns)
        members.append(
            RolloutState(
                rollout_id=index,
                group_id=3,
                message=draw(st.lists(st.dictionaries(texts, values, max_size=2), max_size=2)),
                prompt_ids=draw(st.none() | columns),
                data_source=draw(values),
                reward_model=draw(st.none() | st.dictionaries(texts, values, max_size=2)),
                session_id=draw(st.none() | st.integers(0, 9) | texts),
                sample_params=draw(st.none() | st.builds(SampleParams, temperature=st.floats(0, 2))),
                response=draw(st.none() | texts),
                response_ids=response,
                logprobs=None if response is None else [0.5] * len(response),
                version_spans=((4, len(response)),) if response is not None and len(response) else (),
                routed_experts=draw(values),
                reward=draw(st.none() | st.fixed_dictionaries({"score": st.floats(-1, 1)})),
                status=draw(st.sampled_from(Status)),
                error_msg=draw(st.none() | texts),
                extra_fields=draw(st.dictionaries(texts, values, max_size=3)),
            )
        )
    return members


@given(groups())
@settings(max_examples=150, deadline=None)
def test_groups_come_out_as_they_went_in(group: list[RolloutState]) -> None:
    found = decode_group(encode_group(group))
    assert len(found) == len(group)
    assert all(map(same, found, group))


@given(values)
@settings(max_examples=200, deadline=None)
def test_values_come_out_as_they_went_in(value: Any) -> None:
    group = [RolloutState(message=[{"content": value}], extra_fields={"x": value}, routed_experts=value)]
    (found,) = decode_group(encode_group(group))
    for copy in (found.extra_fields["x"], found.routed_experts, found.message[0]["content"]):
        assert same(copy, value)


@pytest.mark.parametrize("dtype", [*DTYPES, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 0, 3), (2, 3), (2, 1, 2, 1, 2, 1, 2, 1)], ids=str)
def test_arrays_keep_type_shape_and_values(dtype: Any, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    array = np.arange(count).reshape(shape).astype(dtype)
    for given_array in (array, array.T, np.repeat(array, 2, axis=-1)[..., ::2] if shape else array):
        group = [RolloutState(message=[], extra_fields={"x": given_array, "again": given_array})]
        (found,) = decode_group(encode_group(group))
        assert same(found.extra_fields["x"], given_array)
        assert same(found.extra_fields["again"], given_array)


def test_numbers_that_are_equal_but_not_the_same_are_kept_apart() -> None:
    value = [1, 1.0, True, 0, 0.0, -0.0, False, float("inf"), "1", b"1", 2**64 - 1, -(2**63)]
    members = [RolloutState(rollout_id=i, message=[{"x": x}], data_source=x) for i, x in enumerate(value)]
    found = decode_group(encode_group(members))
    assert [repr(state.data_source) for state in found] == [repr(x) for x in value]
    assert [repr(state.message[0]["x"]) for state in found] == [repr(x) for x in value]
    zeros = [RolloutState(rollout_id=i, message=[], prompt_ids=np.array([x])) for i, x in enumerate([0.0, -0.0])]
    assert all(map(same, decode_group(encode_group(zeros)), zeros))


def test_decoded_arrays_are_read_only_views_of_the_frame() -> None:
    ids = np.arange(1000, dtype=np.int32)
    half = np.arange(9).astype(ml_dtypes.bfloat16)
    frame = encode_group([RolloutState(message=[], response_ids=ids, routed_experts=half, extra_fields={"e": ids[:0]})])
    for buffer in (frame, bytearray(frame), memoryview(frame)):
        (found,) = decode_group(buffer)
        raw = np.frombuffer(buffer, np.uint8)
        for array in (found.response_ids, found.routed_experts):
            assert isinstance(array, np.ndarray)
            assert np.shares_memory(array, raw)
            assert not array.flags.writeable
            assert array.flags.aligned
        assert not found.extra_fields["e"].flags.writeable


# --- the prompt once ----------------------------------------------------------------------------------


def _prompt(fill: int = 1) -> dict[str, Any]:
    ids = np.full(20_000, fill, np.int32)
    return {
        "message": [{"role": "user", "content": "x" * 20_000}],
        "prompt_ids": ids,
        "mm_info": {"image": b"p" * 9000},
    }


@pytest.mark.parametrize("shared", [True, False], ids=["the same object", "equal objects"])
def test_the_prompt_of_a_group_is_written_once(shared: bool) -> None:
    prompt = _prompt()
    group = [RolloutState(rollout_id=i, response_ids=[i], **(prompt if shared else _prompt())) for i in range(8)]
    frame = encode_group(group)
    assert len(frame) < len(encode_group(group[:1])) + 2000
    found = decode_group(frame)
    assert all(map(same, found, group))
    assert all(state.message is found[0].message for state in found)


def test_members_with_different_prompts_keep_theirs() -> None:
    group = [RolloutState(rollout_id=i, **_prompt(i % 3)) for i in range(8)]
    group[5].tool_choice = "auto"
    group[6].message[0]["content"] = "another"
    found = decode_group(encode_group(group))
    assert all(map(same, found, group))


def test_writing_does_not_change_the_group() -> None:
    group = [RolloutState(rollout_id=i, extra_fields={"t": (1, [(2,)])}, **_prompt()) for i in range(3)]
    copies = [RolloutState(rollout_id=i, extra_fields={"t": (1, [(2,)])}, **_prompt()) for i in range(3)]
    encode_group(group)
    assert all(map(same, group, copies))


def test_writing_and_reading_leave_nothing_for_the_cycle_collector() -> None:
    """A cycle would keep the arrays and the frame in memory until the collector runs."""
    gc.disable()
    try:
        array = np.arange(9)
        frame = encode_group([RolloutState(message=[], response_ids=array, extra_fields={"t": (1, (2,))})])
        written = weakref.ref(array)
        del array
        (state,) = decode_group(frame)
        assert isinstance(state.response_ids, np.ndarray)
        read = weakref.ref(state.response_ids)
        del state
        assert written() is None
        assert read() is None
    finally:
        gc.enable()


# --- what is not plain data ---------------------------------------------------------------------------


def _nested(depth: int, kind: type[Any] = list) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"k": value} if kind is dict else kind([value])
    return value


UNSUPPORTED: dict[str, Any] = {
    "object": object(), "set": {1, 2}, "complex": 1j, "numpy int": np.int64(3), "numpy float": np.float32(3),
    "70 bits": 2**70, "-70 bits": -(2**70), "surrogate": "\ud800", "key": {1: "x"}, "surrogate key": {"\ud800": 1},
    "objects": np.array([object()]), "texts": np.array(["text"]), "complexes": np.array([1j]),
    "times": np.zeros(2, "datetime64[s]"), "structs": np.zeros(2, [("a", "i4")]), "9 dimensions": np.zeros((1,) * 9),
    "masked": np.ma.array([1, 2], mask=[False, True]),
    "extension": Ext(1, b""), "enum": Status.INIT, "sample": RolloutState(message=[]), "type": int, "function": len,
    "bytearray": bytearray(b"x"), "memoryview": memoryview(b"x"), "deep lists": _nested(100),
    "deep tuples": _nested(100, tuple), "deep dicts": _nested(100, dict), "very deep lists": _nested(5000),
}  # fmt: skip


@pytest.mark.parametrize("what", UNSUPPORTED)
@pytest.mark.parametrize("inside", [lambda x: x, lambda x: [0, x], lambda x: (0, x), lambda x: {"key": [x]}])
def test_values_that_are_not_plain_data_are_refused_with_their_path(what: str, inside: Any) -> None:
    good = RolloutState(rollout_id=0, message=[])
    for name in ("extra_fields", "routed_experts", "message"):
        content = inside(UNSUPPORTED[what])
        bad = RolloutState(rollout_id=1, message=[])
        setattr(
            bad,
            name,
            content if name == "routed_experts" else {"x": content} if name != "message" else [{"x": content}],
        )
        with pytest.raises(UnsupportedPayload) as caught:
            encode_group([good, bad])
        assert f"$[1].{name}" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [np.int64(3), "\ud800", 2**70, object(), 1j, (1,), UUID(int=1), Decimal(1)],
    ids=lambda value: type(value).__name__,
)
def test_a_column_with_a_value_that_is_not_plain_data_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(UnsupportedPayload, match=r"\$\[0\]\.response_ids\[2\]"):
        encode_group([RolloutState(message=[], response_ids=[1, 2, value])])


WRONG_FIELDS: dict[str, Any] = {
    "message": "hello", "response": 5, "session_id": 1.5, "finish_reason": 3, "error_msg": b"x", "reward": 1.0,
    "tools": ({"a": 1},), "extra_fields": None, "sample_params": {"seed": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_FIELDS)
def test_fields_that_a_reader_would_refuse_are_not_written(name: str) -> None:
    """Written but unreadable would be lost, after it was acknowledged."""
    state = RolloutState(message=[], response_ids=[1, 2])
    setattr(state, name, WRONG_FIELDS[name])
    with pytest.raises(InvalidInput, match=name):
        encode_group([state])


# --- attacks ------------------------------------------------------------------------------------------


def _example() -> bytes:
    fields = {"t": (1, ("a",)), "a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, ml_dtypes.bfloat16)}
    prompt = np.arange(5)
    return encode_group(
        [RolloutState(rollout_id=i, message=[{"c": "hi"}], prompt_ids=prompt, extra_fields=fields) for i in range(2)]
    )


def _referring() -> bytes:
    """A frame of version 2: a value that two members share, and one of each."""
    shared = Resolved({"pixels": np.arange(6, dtype=np.uint8), "t": (1, ["a"])})
    return encode_group(
        [
            RolloutState(rollout_id=i, message=[{"c": "hi"}], mm_info={"x": shared}, routed_experts=(Resolved([i]),))
            for i in range(2)
        ]
    )


EXAMPLES = {"version 1": _example, "version 2": _referring}


@pytest.mark.parametrize("example", EXAMPLES)
def test_g09_every_prefix_of_a_frame_is_refused(example: str) -> None:
    frame = EXAMPLES[example]()
    for size in range(len(frame)):
        with pytest.raises(DamagedData):
            decode_group(frame[:size])
    with pytest.raises(DamagedData):
        decode_group(frame + b"\0")


@pytest.mark.parametrize("example", EXAMPLES)
def test_g09_every_flipped_bit_of_a_frame_is_refused(example: str) -> None:
    frame = bytearray(EXAMPLES[example]())
    for bit in range(8 * len(frame)):
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedData):
            decode_group(frame)
        frame[bit // 8] ^= 1 << bit % 8
    decode_group(frame)


@pytest.mark.parametrize("example", EXAMPLES)
def test_g09_altered_heads_with_a_right_checksum_are_read_or_refused(example: str) -> None:
    """Every byte of the head replaced by random others: no other exception."""
    frame = EXAMPLES[example]()
    _, version, head_bytes, _, _ = HEADER.unpack_from(frame)
    head, body = bytearray(frame[HEADER.size : HEADER.size + head_bytes]), frame[HEADER.size + head_bytes :]
    chance = random.Random(0)
    refused = 0
    for position in range(len(head)):
        kept = head[position]
        for value in {*chance.sample(range(256), 20), 0xC1, 0xC7, 0xC9, 0xDB, 0xDD, 0xDF, 0xFF}:
            head[position] = value
            data = packed(bytes(head), body, version)
            try:
                decode_group(data)
            except DamagedData:
                refused += 1
        head[position] = kept
    assert refused > 1000


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_g09_random_heads_are_refused(head: bytes) -> None:
    for version in (1, 2):
        with pytest.raises(DamagedData):
            decode_group(frame_of(head, version=version), ["beside"])
    with pytest.raises(DamagedData):
        decode_group(head)


def _deep_tuples(depth: int) -> Ext:
    inner = msgspec.msgpack.encode([1])
    for _ in range(depth):
        inner = msgspec.msgpack.encode([Ext(2, inner)])
    return Ext(2, inner)


def _listed(depth: int) -> bytes:
    head = msgspec.msgpack.encode([[0], [{"message": [], "extra_fields": {"x": 7}}]])
    assert head.endswith(b"\x07")
    return frame_of(head[:-1] + b"\x91" * depth + b"\xc0")


PICKLE = b"cos\nsystem\n(S'exit 1'\ntR."
X = "extra_fields"
HOSTILE: dict[str, bytes] = {
    "array too long": crafted({X: {"a": array_ext(7, (5,))}}, bytes(16)),
    "array beyond": crafted({X: {"a": array_ext(7, (4,), offset=4)}}, bytes(16)),
    "offset beyond": crafted({X: {"a": array_ext(7, (1,), offset=2**63)}}, bytes(16)),
    "shape overflows to 0": crafted({X: {"a": array_ext(7, (2**32, 2**32))}}, bytes(16)),
    "shape overflows to 4": crafted({X: {"a": array_ext(2, (2**63, 2))}}, bytes(16)),
    "shape of nothing, huge": crafted({X: {"a": array_ext(7, (0, 2**62, 2**62))}}, bytes(16)),
    "shape of nothing, large": crafted({X: {"a": array_ext(12, (0, 2**31, 2**31, 2**31))}}, bytes(16)),
    "largest shape": crafted({X: {"a": array_ext(7, (2**64 - 1,))}}, bytes(16)),
    "too many dimensions": crafted({X: {"a": array_ext(7, (1,) * 9)}}, bytes(16)),
    "255 dimensions": crafted({X: {"a": array_ext(7, (1,), dimensions=255)}}, bytes(16)),
    "more dimensions than said": crafted({X: {"a": array_ext(7, (1, 1), dimensions=1)}}, bytes(16)),
    "dtype 0": crafted({X: {"a": array_ext(0, (1,))}}, bytes(16)),
    "dtype 14": crafted({X: {"a": array_ext(14, (1,))}}, bytes(16)),
    "dtype 255": crafted({X: {"a": array_ext(255, (1,))}}, bytes(16)),
    "array of no description": crafted({X: {"a": Ext(1, b"")}}),
    "bfloat16 beyond": crafted({X: {"a": array_ext(13, (9,))}}, bytes(16)),
    "a column of two dimensions": crafted({"response_ids": array_ext(7, (2, 2))}, bytes(16)),
    "a column that is a tuple": crafted({"response_ids": Ext(2, msgspec.msgpack.encode([1]))}),
    "extension 0": crafted({X: {"a": Ext(0, b"")}}),
    "extension 3": crafted({X: {"a": Ext(3, PICKLE)}}),
    "extension -2": crafted({X: {"a": Ext(-2, PICKLE)}}),
    "extension 127": crafted({X: {"a": Ext(127, PICKLE)}}),
    "pickle as an array": crafted({X: {"a": Ext(1, PICKLE)}}),
    "pickle as a tuple": crafted({X: {"a": Ext(2, PICKLE)}}),
    "pickle as a head": frame_of(PICKLE),
    "tuple of a dict": crafted({X: {"a": Ext(2, msgspec.msgpack.encode({}))}}),
    "tuple of nothing": crafted({X: {"a": Ext(2, b"")}}),
    "tuple with a rest": crafted({X: {"a": Ext(2, msgspec.msgpack.encode([]) + b"\0")}}),
    "tuple that declares 4 billion": crafted({X: {"a": Ext(2, b"\xdd\xff\xff\xff\xff")}}),
    "deep tuples": crafted({X: {"a": _deep_tuples(100)}}),
    "very deep tuples": crafted({X: {"a": _deep_tuples(3000)}}),
    "very deep lists": _listed(100_000),
    "list that declares 4 billion": frame_of(b"\x92\x91\x00\xdd\xff\xff\xff\xff"),
    "text that declares 4 GB": frame_of(b"\x92\x91\x00\x91\x81\xdb\xff\xff\xff\xff"),
    "bytes that declare 4 GB": frame_of(b"\x92\x91\x00\x91\x81\xa7message\xc6\xff\xff\xff\xff"),
    "map that declares 4 billion": frame_of(b"\x92\x91\x00\x91\xdf\xff\xff\xff\xff"),
    "text that is no UTF-8": frame_of(
        msgspec.msgpack.encode([[0], [{"message": [], "response": "zz"}]])[:-2] + b"\xff\xff"
    ),
    "prompt of a later sample": crafted({}, prompts=(1,)),
    "prompt of a negative sample": crafted({}, prompts=(-1,)),
    "prompt of 2**63": crafted({}, prompts=(2**63,)),
    "prompts missing": crafted({}, prompts=()),
    "prompts too many": crafted({}, prompts=(0, 0)),
    "prompts in a circle": frame_of(msgspec.msgpack.encode([[1, 0], [{"message": []}] * 2])),
    "prompt of a prompt": frame_of(
        msgspec.msgpack.encode([[0, 0, 1], [{"message": [], "segment": i} for i in range(3)]])
    ),
    "prompts as texts": frame_of(msgspec.msgpack.encode([["0"], [{"message": []}]])),
    "no samples": frame_of(msgspec.msgpack.encode([[], []])),
    "no message": frame_of(msgspec.msgpack.encode([[0], [{}]])),
    "a rest": frame_of(msgspec.msgpack.encode([[0], [{"message": []}]]) + b"\0"),
    "empty": frame_of(b""),
    "message is a string": crafted({"message": "x"}),
    "status unknown": crafted({"status": "weird"}),
    "group_id is a string": crafted({"group_id": "1"}),
    "group_id of 64 bits unsigned": crafted({"group_id": 2**64 - 1}),
    "tries are negative": crafted({"num_tries": -1}),
    "segment is a float": crafted({"segment": 0.5}),
    "negative step": crafted({"response_ids": [1], "version_spans": [[-1, 1]]}),
    "negative run": crafted({"response_ids": [1], "version_spans": [[1, -1]]}),
    "step of 64 bits unsigned": crafted({"response_ids": [1], "version_spans": [[2**64 - 1, 1]]}),
    "runs longer than the response": crafted({"response_ids": [1], "version_spans": [[1, 2**62]]}),
    "columns of unequal length": crafted({"response_ids": [1], "logprobs": [0.1, 0.2]}),
    "a column that is a number": crafted({"response_ids": 5}),
    "a column that is a string": crafted({"response_ids": "abc"}),
    "rollouts twice": frame_of(msgspec.msgpack.encode([[0, 0], [{"message": [], "rollout_id": 1}] * 2])),
    "a value in version 1": crafted({X: {"a": reference_ext(0)}}),
    "a reference beside version 1": crafted({X: {"a": reference_ext(0, 4)}}),
    "a value that is not there": referring({X: {"a": reference_ext(1)}}, [7]),
    "a value of none": referring({X: {"a": reference_ext(0)}}, None),
    "value 4 billion": referring({X: {"a": reference_ext(2**32 - 1)}}, [7]),
    "a value without a number": referring({X: {"a": Ext(3, b"")}}, [7]),
    "a value with half a number": referring({X: {"a": Ext(3, b"\0\0")}}, [7]),
    "a value with two numbers": referring({X: {"a": Ext(3, bytes(8))}}, [7]),
    "a reference beside that did not come": referring({X: {"a": reference_ext(0, 4)}}, None),
    "a value that refers to itself": referring({X: {"a": reference_ext(0)}}, [reference_ext(0)]),
    "a value that refers to another": referring({X: {"a": reference_ext(1)}}, [7, reference_ext(0)]),
    "a value that refers from a tuple": referring(
        {X: {"a": reference_ext(1)}}, [7, Ext(2, msgspec.msgpack.encode([reference_ext(0)]))]
    ),
    "a value that refers beside": referring({X: {"a": reference_ext(0)}}, [reference_ext(0, 4)]),
    "values that are a map": referring({}, {"a": 1}),
    "values that are a number": referring({}, 1),
    "a pickle as values": referring({}, Ext(3, PICKLE)),
    "too many values": referring({}, [None] * 70_000),
    "a value with an array beyond": referring({X: {"a": reference_ext(0)}}, [array_ext(7, (5,))], bytes(16)),
    "values that overlap to more than a group can be": referring({}, [array_ext(2, (2**20,))] * 4097, bytes(2**20)),
    "very deep values": frame_of(b"\x93\x91\x00\x91\x81\xa7message\x90" + b"\x91" * 100_000 + b"\xc0", version=2),
    "very deep samples": frame_of(b"\x93\x91\x00" + b"\x91" * 100_000 + b"\xc0\xc0", version=2),
    "deep tuples in a value": referring({}, [_deep_tuples(100)]),
    "a field of a wrong type as a value": referring({"mm_info": reference_ext(0)}, [{}]),
    "a message that is a value": referring({"message": reference_ext(0)}, [[]]),
    "a column that is a value of two dimensions": referring(
        {"response_ids": reference_ext(0)}, [array_ext(7, (2, 2))], bytes(16)
    ),
    "version 2 with the head of version 1": frame_of(msgspec.msgpack.encode([[0], [{"message": []}]]), version=2),
    "prompts missing in version 2": frame_of(msgspec.msgpack.encode([[], [{"message": []}], None]), version=2),
    "no samples in version 2": frame_of(msgspec.msgpack.encode([[], [], []]), version=2),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_g09_hostile_frames_are_refused(what: str) -> None:
    with pytest.raises(DamagedData):
        decode_group(HOSTILE[what])
    decode_group(_example())  # and nothing of it stays behind


def test_the_helper_of_these_tests_makes_frames_that_are_read() -> None:
    (found,) = decode_group(crafted({X: {"a": array_ext(7, (2, 2)), "t": _deep_tuples(10)}}, bytes(16)))
    assert same(found.extra_fields["a"], np.zeros((2, 2), np.int32))
    decode_group(_listed(20))
    (found,) = decode_group(referring({X: {"a": reference_ext(1), "b": reference_ext(0, 4)}}, [1, [7]]), ["beside"])
    assert found.extra_fields == {"a": [7], "b": "beside"}
    decode_group(frame_of(b"\x93\x91\x00\x91\x81\xa7message\x90" + b"\x91" * 100 + b"\xc0", version=2))


@pytest.mark.parametrize("depth", [63, 64, 65, 66])
def test_values_at_the_limit_of_nesting_can_be_read_if_they_can_be_written(depth: int) -> None:
    for kind in (list, tuple, dict):
        try:
            frame = encode_group([RolloutState(message=[], routed_experts=_nested(depth, kind))])
        except UnsupportedPayload:
            assert depth >= 64
        else:
            (found,) = decode_group(frame)
            assert same(found.routed_experts, _nested(depth, kind))


def test_many_tuples_side_by_side_are_not_deep() -> None:
    value = [((i,), ()) for i in range(1000)]
    (found,) = decode_group(encode_group([RolloutState(message=[], routed_experts=value)]))
    assert found.routed_experts == value


@pytest.mark.parametrize("version", [0, 4, 255])
def test_frames_of_other_versions_are_refused_by_name(version: int) -> None:
    frame = bytes(_example())
    with pytest.raises(UnreadableData, match=f"version {version}"):
        decode_group(packed(frame[24:], b"", version))


@pytest.mark.parametrize(("head", "body"), [(2**32 - 1, 0), (0, 2**64 - 1), (0, 4 * 2**30)])
def test_huge_sizes_in_a_header_are_refused(head: int, body: int) -> None:
    with pytest.raises(DamagedData, match="the header of a group frame says"):
        decode_group(HEADER.pack(b"FBG1", 1, head, body, 0) + bytes(100))


# --- plain values -------------------------------------------------------------------------------------


@given(values)
@settings(max_examples=200, deadline=None)
def test_plain_values_come_out_as_they_went_in(value: Any) -> None:
    assert same(decode_value(encode_value(value)), value)


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_a_value_that_is_not_plain_data_is_refused(what: str) -> None:
    with pytest.raises(UnsupportedPayload, match=r"^\$"):
        encode_value([0, UNSUPPORTED[what]])


def test_the_arrays_of_a_decoded_value_are_read_only_views_of_its_frame() -> None:
    frame = encode_value({"order": np.arange(100)})
    order = decode_value(frame)["order"]
    assert np.shares_memory(order, np.frombuffer(frame, np.uint8))
    assert not order.flags.writeable


def test_g09_damaged_values_are_refused() -> None:
    frame = encode_value({"t": (1, ("a",)), "a": np.arange(6, dtype=np.float32), "n": [None, 2**63]})
    hostile = [frame[:size] for size in range(len(frame))]
    hostile += [frame + b"\0", PICKLE, _example(), HOSTILE["array beyond"], HOSTILE["deep tuples"]]
    for bit in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        hostile.append(bytes(changed))
    for content in hostile:
        with pytest.raises(DamagedData):
            decode_value(content)


@pytest.mark.parametrize("head", [Ext(3, bytes(4)), Ext(4, bytes(4)), Ext(9, PICKLE), Ext(2, b"\x80"), Ext(1, b"")])
def test_g09_values_with_hostile_extensions_are_refused(head: Ext) -> None:
    content = msgspec.msgpack.encode([head])
    with pytest.raises(DamagedData, match="cannot be read"):
        decode_value(packed(content, bytes(-(HEADER.size + len(content)) % 16), magic=b"FBV1"))


def test_values_of_other_versions_are_refused_by_name() -> None:
    with pytest.raises(UnreadableData, match="a value frame of version 2; this Forebay reads version 1"):
        decode_value(packed(b"\xc0", bytes(7), 2, magic=b"FBV1"))


# --- records and accounts -----------------------------------------------------------------------------

RECORD = Record(
    uid=1, timestamp_id=2, task_name="mäth", group_id=-3, status=Status.EXPIRED, place=Place.LEASED, samples=8,
    tokens=9, bytes=10, num_tries=1, reward=0.5, oldest_step=None, newest_step=4, token_step=5, given_staleness=0,
    created_at=1e9, moved_at=2e9, priority=-1.5, attempt=3, owner="me", lease_id="l", train_step=7,
    tags={"a": 1, "b": None, "c": True, "d": 1.0},
)  # fmt: skip
ACCOUNT = Account(
    issued=5, cursor=3, ended={End.TRAINED: 2}, ended_tokens={End.TRAINED: 20}, reasons={"why": 1},
    train_step=4, model_step=2, limits=Limits(stale_threshold=2), source_state=b"\x00\xff",
)  # fmt: skip


def test_records_and_accounts_come_out_as_they_went_in() -> None:
    record, account = decode_record(encode_record(RECORD)), decode_account(encode_account(ACCOUNT))
    assert (record, account) == (RECORD, ACCOUNT)
    assert same(dict(record.tags), dict(RECORD.tags))
    assert (type(record.place), type(record.status), type(next(iter(account.ended)))) == (Place, Status, End)
    assert decode_account(encode_account(Account())) == Account()


@pytest.mark.parametrize(
    ("decode", "data"), [(decode_record, encode_record(RECORD)), (decode_account, encode_account(ACCOUNT))]
)
def test_g09_hostile_records_and_accounts_are_refused(decode: Any, data: bytes) -> None:
    hostile = [data[:size] for size in range(len(data))]
    hostile += [data + b"\0", PICKLE, b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"\xc1", b"\x80\x80", b"\x90"]
    hostile += [msgspec.msgpack.encode({"uid": "x", "issued": "x"}), msgspec.msgpack.encode(Ext(1, PICKLE))]
    hostile += [msgspec.msgpack.encode({"tags": {"a": Ext(3, PICKLE)}, "reasons": {"a": Ext(3, PICKLE)}})]
    for content in hostile:
        with pytest.raises(DamagedData):
            decode(content)
    chance = random.Random(1)
    for bit in chance.sample(range(8 * len(data)), 500):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = decode(changed)
        except DamagedData:
            continue
        assert type(found) in (Record, Account)
