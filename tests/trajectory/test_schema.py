"""The schema: the first trajectory fixes it, later ones keep to it or change nothing, and rows are laid out by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.dtypes import DTYPES
from forebay.errors import DamagedData, InvalidConfig, InvalidTrajectory
from forebay.trajectory import TrajectoryReplayBuffer
from forebay.trajectory.data import STRING, aligned
from forebay.trajectory.schema import NEXT, VALID, Field, Layout, Schema, read_schema, schema_of
from tests.trajectory.tagged import Made, assert_rows, flat, make, nested

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def changed(made: Made, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """What is handed in, with something changed in it."""
    named = flat(made.given)
    change(named)
    return nested(named)


def state_of(buffer: TrajectoryReplayBuffer) -> tuple[Any, ...]:
    stats = buffer.get_stats()
    del stats["age_max_s"]
    return len(buffer), buffer.num_transitions, stats, buffer.schema


# --- keeping to it --------------------------------------------------------------------------------------


CHANGES: list[tuple[Callable[[dict[str, Any]], object], list[str]]] = [
    (lambda n: n.pop("actions"), ["actions is missing", "F32 [T, B, 3]", "optional"]),
    (lambda n: n.pop("curr_obs.deep.flag"), ["curr_obs.deep.flag is missing", "BOOL [T, B]"]),
    (lambda n: n.pop("next_obs.word"), ["next_obs.word is missing", "STRING [T, B]"]),
    (lambda n: n.pop("next_obs.only_next"), ["next_obs.only_next is missing", "I16 [T, B]"]),
    (lambda n: n.update({"curr_obs.more": np.ones((4, 2))}), ["curr_obs.more is new", "curr_obs.state"]),
    (lambda n: n.update({"forward_inputs.deep.y": np.ones((4, 2))}), ["forward_inputs.deep.y is new"]),
    (lambda n: n.update(actions=n["actions"].astype(np.float64)), ["actions is F64 [T, B, 3]", "have F32 [T, B, 3]"]),
    (lambda n: n.update(actions=n["actions"][..., :2]), ["actions is F32 [T, B, 2]", "have F32 [T, B, 3]"]),
    (lambda n: n.update(actions=n["actions"][..., None]), ["actions is F32 [T, B, 3, 1]", "have F32 [T, B, 3]"]),
    (lambda n: n.update(rewards=n["rewards"][..., 0]), ["rewards is F32 [T, B]", "have F32 [T, B, 1]"]),
    (
        lambda n: n.update({"next_obs.state": n["next_obs.state"].astype(np.int32)}),
        ["next_obs.state is I32 [T, B, 4]", "have F32 [T, B, 4]"],
    ),
    (
        lambda n: n.update({"curr_obs.image": n["curr_obs.image"].astype(np.int8)}),
        ["curr_obs.image is I8 [T, B, 14, 14, 3]", "have U8"],
    ),
    (
        lambda n: n.update({"forward_inputs.deep.x": n["forward_inputs.deep.x"].view(np.uint16)}),
        ["forward_inputs.deep.x is U16", "have BF16"],
    ),
    (lambda n: n.update({"curr_obs.word": np.zeros((4, 2), np.int32)}), ["curr_obs.word is I32", "have STRING"]),
    (lambda n: n.update({"curr_obs.deep.word": ["a", "b"]}), ["curr_obs.deep.word is STRING", "have U32"]),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[words[0] for _, words in CHANGES])
@pytest.mark.parametrize("position", ["alone", "last of three"])
def test_another_schema_is_refused_by_name_and_nothing_changes(
    change: Callable[[dict[str, Any]], object], words: list[str], position: str
) -> None:
    first, good = make(0), make(1)
    wrong = changed(make(2), change)
    with TrajectoryReplayBuffer() as buffer, TrajectoryReplayBuffer() as other:
        for one in (buffer, other):
            one.add_trajectories([first.given])
            one.sample(3)
        before = state_of(buffer)
        with pytest.raises(InvalidTrajectory) as caught:
            buffer.add_trajectories([wrong] if position == "alone" else [good.given, good.given, wrong])
        for word in words if position == "alone" else [*words, "trajectory 2 of 3"]:
            assert word in str(caught.value)
        assert state_of(buffer) == before
        # What is drawn goes on as if nothing had happened, and so do ids.
        for one in (buffer, other):
            assert one.add_trajectories([good.given]) == [1]
        mine, theirs = buffer.sample(30), other.sample(30)
        assert mine["step"].tolist() == theirs["step"].tolist()
        assert_rows(mine, {0: first, 1: good}, newest=1)
        assert state_of(buffer) == state_of(other)
        buffer._check()


def test_a_list_whose_last_is_wrong_does_not_fix_the_schema() -> None:
    with TrajectoryReplayBuffer() as buffer:
        with pytest.raises(InvalidTrajectory, match="trajectory 1 of 2: actions is missing"):
            buffer.add_trajectories([make(0).given, changed(make(1), lambda n: n.pop("actions"))])
        assert buffer.schema is None
        made = make(2, text=False)
        assert buffer.add_trajectories([made.given]) == [0]
        assert_rows(buffer.sample(5), {0: made})


def test_the_order_of_keys_does_not_matter(tmp_path: Path) -> None:
    """Two ranks whose dicts had another order used to give rows that could not be read together."""
    made = make(0, text=False)
    backwards = nested(dict(reversed(flat(made.given).items())))
    with TrajectoryReplayBuffer() as one, TrajectoryReplayBuffer(rank=1) as other:
        one.add_trajectories([made.given])
        other.add_trajectories([backwards])
        assert one.schema == other.schema
        one.save_checkpoint(tmp_path)
        other.save_checkpoint(tmp_path)
        with TrajectoryReplayBuffer() as both:
            both.load_checkpoint(tmp_path)
            ids = both.add_trajectories([made.given, backwards])
            known = dict.fromkeys([*both.sample(100)["trajectory_id"].tolist(), *ids], made)
            assert len(known) == 4
            assert_rows(both.sample(100), known)


def test_steps_and_environments_may_vary() -> None:
    shapes = [(4, 2), (1, 1), (7, 3), (2, 5)]
    made = {k: make(k, steps, envs) for k, (steps, envs) in enumerate(shapes)}
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([one.given for one in made.values()])
        rows = assert_rows(buffer.sample(buffer.num_transitions, replace=False), made, newest=3)
    assert len(set(rows)) == sum(steps * envs for steps, envs in shapes)


def test_what_is_in_both_observations_alike_is_shared() -> None:
    shapes = {"alike": (3,), "shape": (2,), "now": ()}
    now = {name: np.zeros((2, 1, *shape), np.float32) for name, shape in shapes.items()}
    after = {"alike": now["alike"], "shape": np.zeros((2, 1, 9), np.float32), "next": now["now"]}
    schema = schema_of(aligned({"rewards": np.zeros((2, 1)), "curr_obs": now, "next_obs": after}), {})
    assert [field.path for field in schema.observations] == [("alike",)]
    assert {".".join(field.path) for field in schema.steps} == {
        "rewards", "curr_obs.shape", "next_obs.shape", "curr_obs.now", "next_obs.next"
    }  # fmt: skip


# --- optional fields ------------------------------------------------------------------------------------


FILLS: list[tuple[str, Any, Any, Any]] = [
    ("prev_values", 0.0, np.float64, 0.0),
    ("prev_values", -1, np.float64, -1.0),
    ("prev_values", np.nan, np.float64, np.nan),
    ("prev_logprobs", 0.1, np.float16, np.float16(0.1)),
    ("prev_logprobs", -np.inf, np.float16, -np.inf),
    ("actions", np.array([1.0, 2.0, 3.0]), np.float32, [1.0, 2.0, 3.0]),
    ("actions", np.float32(7), np.float32, [7.0, 7.0, 7.0]),
    ("intervene_flags", False, np.bool_, [False] * 3),
    ("intervene_flags", np.array([True, False, True]), np.bool_, [True, False, True]),
    ("versions", 2**53 + 1, np.int64, 2**53 + 1),
    ("forward_inputs.ids", 65535, np.uint16, [65535, 65535]),
    ("forward_inputs.key", np.uint64(2**64 - 1), np.uint64, 2**64 - 1),
    ("forward_inputs.deep.x", 0.1, BFLOAT16, [ml_dtypes.bfloat16(0.1)] * 2),
    ("forward_inputs.deep.x", np.array([1.5, -2.0], BFLOAT16), BFLOAT16, [1.5, -2.0]),
    ("forward_inputs.deep.x", np.nan, BFLOAT16, [np.nan] * 2),
    ("forward_inputs.deep.x", -np.inf, BFLOAT16, [-np.inf] * 2),
    ("curr_obs.only_now", np.array([3, 4], np.int32), np.int32, [3, 4]),
    ("next_obs.only_next", -5, np.int16, -5),
    ("curr_obs.task", "do nothing", object, "do nothing"),
    ("forward_inputs.prompt", "", object, ""),
]


@pytest.mark.parametrize(("name", "fill", "kind", "expected"), FILLS, ids=[f"{f[0]}={f[1]!r}" for f in FILLS])
def test_an_optional_field_that_is_missing_is_filled(name: str, fill: Any, kind: Any, expected: Any) -> None:
    whole, part = make(0), make(1)
    want = dict(part.want)
    row = np.array(expected, object) if kind is object else np.array(expected).astype(kind)
    want[name] = np.broadcast_to(row, part.want[name].shape).astype(part.want[name].dtype)
    filled = Made(part.given, want, 4, 2, 1, part.valid, part.goes_on, part.gaps)
    with TrajectoryReplayBuffer(optional={name: fill}) as buffer:
        buffer.add_trajectories([whole.given, changed(part, lambda n: n.pop(name))])
        assert_rows(buffer.sample(60), {0: whole, 1: filled}, newest=1)


def test_both_sides_of_an_observation_can_be_optional() -> None:
    whole, part = make(0, text=False), make(1, text=False)
    fills = {"curr_obs.state": np.full(4, 5, np.float32), "next_obs.state": 6.0}

    def without(named: dict[str, Any]) -> None:
        del named["curr_obs.state"], named["next_obs.state"]

    with TrajectoryReplayBuffer(optional=fills) as buffer:
        buffer.add_trajectories([whole.given, changed(part, without)])
        back = buffer.trajectory(1)
    assert (back.curr_obs["state"] == 5).all()
    assert (back.next_obs["state"] == 6).all()
    assert (back.curr_obs["image"] == part.want["curr_obs.image"]).all()


@pytest.mark.parametrize(
    ("name", "fill"),
    [
        ("prev_logprobs", np.zeros((), np.float16)),
        ("prev_values", np.zeros(1)),
        ("forward_inputs.deep.x", np.array([1.5, 2.5], BFLOAT16)),
        ("curr_obs.task", "nothing"),
    ],
)
def test_an_optional_field_with_a_whole_row_may_be_missing_at_first(name: str, fill: Any) -> None:
    first, second = make(0), make(1)
    with TrajectoryReplayBuffer(optional={name: fill}) as buffer:
        buffer.add_trajectories([changed(first, lambda n: n.pop(name))])
        buffer.add_trajectories([second.given])
        found = buffer.trajectory(0)
        assert_rows(buffer.sample(1000, replace=True), {**dict.fromkeys([0], refilled(first, name, fill)), 1: second})
    assert found.rewards is not None


def refilled(made: Made, name: str, fill: Any) -> Made:
    want = dict(made.want)
    want[name] = np.empty(want[name].shape, object) if isinstance(fill, str) else np.empty_like(want[name])
    want[name][...] = fill
    return Made(made.given, want, made.steps, made.envs, made.epochs, made.valid, made.goes_on, made.gaps)


def test_a_number_does_not_say_what_the_first_trajectory_lacks() -> None:
    with TrajectoryReplayBuffer(optional={"prev_values": 0.0}) as buffer:
        buffer.add_trajectories([changed(make(0), lambda n: n.pop("prev_values"))])
        with pytest.raises(InvalidTrajectory, match=r"prev_values is new.*declare it with a numpy array"):
            buffer.add_trajectories([make(1).given])


@pytest.mark.parametrize(
    ("name", "fill", "words"),
    [
        ("actions", np.zeros(2), ["[2]", "F32 [T, B, 3]"]),
        ("prev_logprobs", np.zeros(2), ["[2]", "F16 [T, B]"]),  # as many as there are envs
        ("actions", np.zeros((2, 3)), ["[2, 3]", "F32 [T, B, 3]"]),
        ("forward_inputs.ids", -1, ["-1", "U16"]),
        ("forward_inputs.ids", 65536, ["65536", "U16"]),
        ("versions", 0.5, ["0.5", "I64"]),
        ("versions", np.nan, ["nan", "I64"]),
        ("prev_logprobs", 1e6, ["1000000.0", "F16"]),
        ("forward_inputs.deep.x", 1e39, ["1e+39", "BF16"]),
        ("forward_inputs.ids", "text", ["'text'", "U16"]),
        ("curr_obs.task", 0.0, ["0.0", "STRING"]),
        ("curr_obs.task", np.zeros(2), ["STRING"]),
    ],
)
def test_a_fill_that_cannot_be_is_refused_when_it_is_needed(name: str, fill: Any, words: list[str]) -> None:
    with TrajectoryReplayBuffer(optional={name: fill}) as buffer:
        buffer.add_trajectories([make(0).given])
        before = state_of(buffer)
        with pytest.raises(InvalidTrajectory, match=f"the fill of {name}") as caught:
            buffer.add_trajectories([changed(make(1), lambda n: n.pop(name))])
        for word in words:
            assert word in str(caught.value)
        assert state_of(buffer) == before


@pytest.mark.parametrize(
    "optional",
    [
        {"rewards": 0.0},
        {"valid": True},
        {"age": np.zeros(2)},
        {"trajectory_id": 0},
        {"prev_logprob": 0.0},
        {"curr_obs": np.zeros(3)},
        {"prev_values.x": 0.0},
        {"curr_obs.": 0.0},
        {"curr_obs..x": 0.0},
        {"": 0.0},
        {5: 0.0},
        {"model_weights_id": "a"},
        {"prev_values": None},
        {"prev_values": [0.0]},
        {"prev_values": "text"},
        {"prev_values": np.array(["text"])},
        {"prev_values": np.zeros(2, complex)},
        {"prev_values": 2**70},
    ],
    ids=repr,
)
def test_optional_names_fields_that_there_are(optional: Any) -> None:
    """A name with a slip in it used to become a column of its own, or to be forgotten."""
    with pytest.raises(InvalidConfig, match=r"optional names|the fill of"):
        TrajectoryReplayBuffer(optional=optional)


# --- laying out -----------------------------------------------------------------------------------------


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=6)
FIELDS = st.builds(
    Field,
    st.tuples(st.sampled_from(["curr_obs", "next_obs", "forward_inputs"]), NAMES),
    st.sampled_from([*DTYPES, STRING]),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
)
SCHEMAS = st.builds(
    lambda steps, observations: Schema(tuple(steps), tuple(observations)),
    st.lists(FIELDS, max_size=8, unique_by=lambda field: field.path),
    st.lists(FIELDS, max_size=6, unique_by=lambda field: field.path),
)


@settings(max_examples=200, deadline=None)
@given(schema=SCHEMAS)
def test_fields_are_packed_without_overlap_and_aligned(schema: Schema) -> None:
    layout = Layout(schema)
    placed: dict[str, set[tuple[str, ...]]] = {"steps": set(), "observations": set()}
    for table, strips in (("steps", layout.steps), ("observations", layout.observations)):
        for number, strip in enumerate(strips):
            taken: set[int] = set()
            for path, field, offset in strip.fields:
                assert path not in placed[table]
                placed[table].add(path)
                assert offset % field.raw.itemsize == 0
                mine = set(range(offset, offset + field.row_bytes))
                assert not mine & taken
                taken |= mine
                assert offset + field.row_bytes <= strip.row_bytes
                assert len(strip.fields) == 1 or field.row_bytes <= 512
            assert strip.row_bytes % max(field.raw.itemsize for _, field, _ in strip.fields) == 0
            assert strip.row_bytes > 0
            assert number == 0 or len(strip.fields) == 1
    assert placed["steps"] == {field.path for field in schema.steps} | ({NEXT} if schema.observations else set()) | {
        VALID
    }
    assert placed["observations"] == {field.path for field in schema.observations}
    assert layout.step_bytes == sum(strip.row_bytes for strip in layout.steps)
    assert [entry["row_bytes"] for entry in layout.files()] == [
        strip.row_bytes for strip in (*layout.steps, *layout.observations)
    ]


@settings(max_examples=100, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32 - 1))
def test_a_strip_as_a_structured_dtype_keeps_every_field(schema: Schema, seed: int) -> None:
    random = np.random.default_rng(seed)
    layout = Layout(schema)
    for strip in (*layout.steps, *layout.observations):
        raw = np.zeros((5, strip.row_bytes), np.uint8)
        records = raw.reshape(-1).view(strip.dtype())
        assert records.shape == (5,)
        values = []
        for k, (_, field, _) in enumerate(strip.fields):
            values.append(random.integers(0, 2, (5, *field.shape)).astype(field.raw))
            records[f"f{k}"] = values[-1]
        for k, (_, field, offset) in enumerate(strip.fields):
            assert (records[f"f{k}"] == values[k]).all()
            part = np.ascontiguousarray(raw[:, offset : offset + field.row_bytes]).reshape(-1)
            assert part.tobytes() == values[k].tobytes()


@settings(max_examples=100, deadline=None)
@given(schema=SCHEMAS)
def test_a_schema_survives_being_written_down(schema: Schema) -> None:
    assert read_schema(msgspec.json.encode(schema)) == schema


@pytest.mark.parametrize(
    "field",
    [
        {"path": ["a"], "dtype": "F31"},
        {"path": [], "dtype": "F32"},
        {"path": ["a"], "dtype": "F32", "shape": [-1]},
        {"path": ["a"], "dtype": "F32", "shape": [2**40]},
        {"path": ["a"], "dtype": "F32", "shape": [2**31, 2**31, 2**31, 0, 0, 2**63]},
        {"path": ["a"], "dtype": "F32", "shape": [1] * 17},
        {"path": [1], "dtype": "F32"},
        {"dtype": "F32"},
    ],
    ids=repr,
)
def test_a_schema_that_is_not_one_is_damaged(field: dict[str, Any]) -> None:
    with pytest.raises(DamagedData):
        read_schema(msgspec.json.encode({"steps": [field]}))
    assert read_schema(b'{"steps": [{"path": ["a"], "dtype": "F32"}]}') == Schema((Field(("a",), "F32"),))


@pytest.mark.parametrize(
    "paths", [[("a",), ("a",)], [("a",), ("a", "b")], [("a", "b", "c"), ("a", "b")]], ids=["twice", "inside", "deeper"]
)
def test_a_field_inside_another_one_is_no_schema(paths: list[tuple[str, ...]]) -> None:
    with pytest.raises(ValueError, match="twice, or is inside"):
        Schema(tuple(Field(path, "F32") for path in paths))
    with pytest.raises(ValueError, match="twice, or is inside"):
        Schema((), tuple(Field(path, "F32") for path in paths))


def test_rows_of_a_gigabyte_and_more_are_refused() -> None:
    huge = np.broadcast_to(np.zeros((), np.float64), (1, 1, 2**27 + 1))
    with TrajectoryReplayBuffer() as buffer:
        with pytest.raises(InvalidTrajectory, match=r"forward_inputs\.x.*bytes"):
            buffer.add_trajectories([{"rewards": np.zeros((1, 1)), "forward_inputs": {"x": huge}}])
        assert buffer.schema is None
