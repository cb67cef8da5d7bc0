"""What a trajectory is: every value of a drawn row belongs to one step of one environment, however it was handed in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import InvalidTrajectory
from forebay.trajectory import Trajectory, TrajectoryReplayBuffer
from forebay.trajectory.data import RESERVED
from tests.trajectory.tagged import (
    EXTRA_ALLOWED,
    Made,
    as_trajectory,
    assert_rows,
    assert_same,
    flat,
    made_at_random,
    make,
    nested,
    plain,
    to_torch,
)

SEEDS = st.integers(0, 2**32 - 1)


def all_rows(*made: Made, change: Callable[[dict[str, Any]], Any] = dict) -> dict[str, Any]:
    """Every transition of these trajectories, once."""
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([change(one.given) for one in made])
        return buffer.sample(sum(one.transitions for one in made), replace=False)


def simple(steps: int = 3, envs: int = 2, **fields: Any) -> dict[str, Any]:
    return {"rewards": np.ones((steps, envs), np.float32), **fields}


def sampled(leaf: Any, steps: int = 3, envs: int = 2) -> Any:
    """A leaf of an observation after it went through a buffer, as `[T, B, ...]`."""
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([simple(steps, envs, curr_obs={"x": leaf})])
        batch = buffer.sample(steps * envs, replace=False)
    order = np.argsort(plain(batch["step"]) * envs + plain(batch["env"]))
    found = batch["curr_obs"]["x"]
    if isinstance(found, list):
        return np.array([found[k] for k in order], object).reshape(steps, envs)
    return found[torch.from_numpy(order)].reshape(steps, envs, *found.shape[1:])


# --- lining up ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [dict, to_torch, as_trajectory], ids=["numpy", "torch", "Trajectory"])
def test_every_field_of_a_row_is_of_its_step(change: Callable[[dict[str, Any]], Any]) -> None:
    """Two epochs, three environments, resets in the middle, and extra rows of everything that may have some."""
    made = make(3, steps=8, envs=3, epochs=2, extra=EXTRA_ALLOWED, ends=[(1, 0), (2, 2), (5, 1), (7, 1)], gaps=[(6, 0)])
    assert made.given["dones"].shape == (10, 3, 1)
    assert made.given["forward_inputs"]["deep"]["x"].shape == (10, 3, 2)
    rows = assert_rows(all_rows(made, change=change), {0: made}, newest=0)
    assert sorted(rows) == [(0, t, b) for t in range(8) for b in range(3)]


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, count=st.integers(1, 4), as_tensors=st.booleans())
def test_any_shapes_any_epochs_any_extra_rows(seed: int, count: int, as_tensors: bool) -> None:
    random = np.random.default_rng(seed)
    made = {k: made_at_random(k, random, most_steps=9) for k in range(count)}
    if not sum(one.transitions for one in made.values()):
        return
    rows = assert_rows(all_rows(*made.values(), change=to_torch if as_tensors else dict), made, newest=count - 1)
    assert sorted(rows) == sorted((k, t, b) for k, one in made.items() for t, b in one.valid)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS)
def test_a_trajectory_comes_back_as_it_was_meant(seed: int) -> None:
    made = made_at_random(1, np.random.default_rng(seed), most_steps=8)
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([made.given])
        back = buffer.trajectory(0)
    assert back.model_weights_id == "weights 1"
    named = flat({name: getattr(back, name) for name in made.given if name not in ("valid", "model_weights_id")})
    assert named.keys() == made.want.keys()
    for name, leaf in named.items():
        assert_same(plain(leaf), made.want[name], name)
    valid = np.ones((made.steps, made.envs), bool) if back.valid is None else back.valid
    assert {(int(t), int(b)) for t, b in np.argwhere(valid)} == made.valid


def test_flags_lose_the_leading_row_of_each_epoch_and_others_the_trailing_one() -> None:
    """The numbers of the reference, and what it gets wrong: it trims flags only, and then mixes steps."""
    ids = np.arange(6).reshape(6, 1, 1)
    with TrajectoryReplayBuffer(arrays="numpy") as buffer:
        buffer.add_trajectories(
            [
                {
                    "rewards": np.zeros((4, 1, 1)),
                    **dict.fromkeys(("dones", "terminations", "truncations"), ids),
                    **dict.fromkeys(("actions", "intervene_flags", "prev_logprobs", "prev_values", "versions"), ids),
                    "forward_inputs": {"a": ids, "b": {"c": ids}},
                }
            ]
        )
        back = buffer.trajectory(0)
    for name in ("dones", "terminations", "truncations"):
        assert getattr(back, name).reshape(-1).tolist() == [1, 2, 4, 5]
    for name in ("actions", "intervene_flags", "prev_logprobs", "prev_values", "versions"):
        assert getattr(back, name).reshape(-1).tolist() == [0, 1, 3, 4]
    assert back.forward_inputs["a"].reshape(-1).tolist() == [0, 1, 3, 4]
    assert back.forward_inputs["b"]["c"].reshape(-1).tolist() == [0, 1, 3, 4]


def test_as_many_epochs_as_steps() -> None:
    made = make(2, steps=3, envs=2, epochs=3, extra=["dones", "prev_values"])
    assert_rows(all_rows(made), {0: made})
    assert not made.goes_on


def test_text_of_a_model_may_have_the_trailing_row_too() -> None:
    """forward_inputs lose the trailing row whatever they are; text used to be refused."""
    rows = [["a", "b"], ["c", "d"], ["poison", "poison"]]
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([simple(2, 2, forward_inputs={"prompt": rows})])
        assert buffer.trajectory(0).forward_inputs["prompt"] == rows[:2]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dones": np.zeros((11, 2), bool)}, ["dones", "11 rows", "6 steps", "5 extra", "not a multiple of 5"]),
        ({"actions": np.zeros((10, 2))}, ["actions", "10 rows", "6 steps", "4 extra", "not a multiple of 4"]),
        (
            {"dones": np.zeros((7, 2), bool), "prev_values": np.zeros((8, 2))},
            ["dones has 1 extra", "prev_values has 2", "epochs"],
        ),
        ({"dones": np.zeros((5, 2), bool)}, ["dones", "[5, 2]", "[6, 2, ...]"]),
        ({"dones": np.zeros((7, 3, 1), bool)}, ["dones", "[7, 3, 1]", "[6, 2, ...]"]),
        ({"curr_obs": {"a": np.zeros((7, 2))}}, ["curr_obs.a", "[7, 2]", "[6, 2, ...]"]),
        ({"next_obs": {"a": {"b": np.zeros((6,))}}}, ["next_obs.a.b", "[6]", "[6, 2, ...]"]),
        ({"actions": np.array(3.0)}, ["actions", "[]", "[6, 2, ...]"]),
        ({"valid": np.ones((7, 2), bool)}, ["valid", "[7, 2]", "[6, 2, ...]"]),
        ({"valid": np.ones((6, 2), np.uint8)}, ["valid", "U8", "BOOL [T, B]"]),
        ({"valid": np.ones((6, 2, 1), bool)}, ["valid", "[T, B, 1]", "BOOL [T, B]"]),
        ({"actions": np.zeros((6, 3))}, ["actions", "[6, 3]", "[6, 2, ...]"]),
        ({"actions": np.zeros((2, 6))}, ["actions", "[2, 6]", "[6, 2, ...]"]),
    ],
)
def test_rows_that_cannot_be_lined_up(fields: dict[str, Any], words: list[str]) -> None:
    refused({"rewards": np.zeros((6, 2)), **fields}, *words)


def refused(given: Any, *words: str) -> None:
    """It is refused with these words, in a form with numpy and one with torch; nothing is stored."""
    forms = [given]
    if isinstance(given, dict):
        forms += [to_torch(given)]
    for form in forms:
        with TrajectoryReplayBuffer() as buffer:
            with pytest.raises(InvalidTrajectory) as caught:
                buffer.add_trajectories([form])
            for word in words:
                assert word in str(caught.value)
            assert len(buffer) == 0
            assert buffer.schema is None
            assert buffer.get_stats()["memory_bytes"] == 0


# --- arrays of all kinds --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", ml_dtypes.bfloat16], ids=str
)
@pytest.mark.parametrize("shape", [(), (3,), (20, 20), (0,)], ids=str)
def test_every_dtype_comes_back_bit_by_bit(kind: Any, shape: tuple[int, ...]) -> None:
    bits = np.random.default_rng(0).integers(0, 256, (3, 2, *shape, np.dtype(kind).itemsize), np.uint8)
    array = (bits[..., 0] % 2).astype(bool) if kind == "bool" else bits.reshape(-1).view(kind).reshape(3, 2, *shape)
    tensor = to_torch({"x": array})["x"]
    for form in (array, tensor):
        found = sampled(form)
        assert found.dtype == tensor.dtype
        assert_same(plain(found), array, str(kind))


@pytest.mark.parametrize("kind", [">f4", ">i8", ">u2", ">f8", ">f2"])
def test_big_endian_arrays_are_the_same_numbers(kind: str) -> None:
    array = np.arange(18).reshape(3, 2, 3).astype(kind)
    assert_same(plain(sampled(array)), array.astype(kind.replace(">", "<")), kind)


def views_of(array: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    wide = np.zeros((*array.shape[:-1], array.shape[-1] * 2), array.dtype)
    wide[..., ::2] = array
    read_only = array.copy()
    read_only.setflags(write=False)
    return {
        "strided": wide[..., ::2],
        "transposed": np.ascontiguousarray(array.swapaxes(0, 1)).swapaxes(0, 1),
        "backwards": np.ascontiguousarray(array[::-1])[::-1],
        "fortran": np.asfortranarray(array),
        "read-only": read_only,
        "broadcast": np.broadcast_to(array[:1], array.shape),
        "odd address": np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape),
    }


@pytest.mark.parametrize("kind", [np.float32, np.uint8, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize(
    "form", ["strided", "transposed", "backwards", "fortran", "read-only", "broadcast", "odd address"]
)
def test_arrays_need_not_be_contiguous(kind: Any, form: str) -> None:
    array = np.arange(24).reshape(3, 2, 4).astype(kind)
    view = views_of(array)[form]
    expected = view.copy()
    assert_same(plain(sampled(view)), expected, form)
    with TrajectoryReplayBuffer() as buffer:  # as current and next observation: these are compared as memory
        buffer.add_trajectories([simple(curr_obs={"x": view}, next_obs={"x": views_of(array + array)[form]})])
        back = buffer.trajectory(0)
    assert_same(plain(back.curr_obs["x"]), expected, form)
    assert_same(plain(back.next_obs["x"]), views_of(array + array)[form].copy(), form)


def test_tensors_need_not_be_contiguous_and_may_want_gradients() -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4).requires_grad_()
    found = sampled(tensor.transpose(0, 1))
    assert not found.requires_grad
    assert found.is_contiguous()
    assert torch.equal(found, tensor.detach().transpose(0, 1))
    halves = tensor.detach().bfloat16().transpose(0, 1)
    assert torch.equal(sampled(halves), halves)
    assert torch.equal(sampled(halves[..., ::2]), halves[..., ::2])
    conjugate = torch.complex(tensor.detach(), -tensor.detach()).conj().imag.transpose(0, 1)
    assert conjugate.is_neg()
    assert torch.equal(sampled(conjugate), conjugate)


def test_a_memmap_is_an_array(tmp_path: Path) -> None:
    array = np.memmap(tmp_path / "a", np.float32, "w+", shape=(3, 2, 4))
    array[:] = np.arange(24).reshape(3, 2, 4)
    assert_same(plain(sampled(array)), np.array(array), "memmap")


def test_nested_dicts_and_leaves_that_are_none() -> None:
    one = np.arange(6).reshape(3, 2)
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories(
            [simple(actions=None, curr_obs={"a": {"b": {"c": one}, "gone": None, "empty": {}}, "d": one}, next_obs={})]
        )
        batch = buffer.sample(2)
    assert flat(batch).keys() == {
        "rewards", "curr_obs.a.b.c", "curr_obs.d", "trajectory_id", "step", "env", "age"
    }  # fmt: skip


def test_names_of_observations_are_free() -> None:
    """A name that the library uses itself, or with a dot in it, is only a name. One like that used to vanish."""
    names = ["#next", "#valid", "step", "a.b", "age", "f0"]
    now = {name: np.arange(6).reshape(3, 2).astype(np.int32) * 10 + k for k, name in enumerate(names)}
    now["a"] = {"b": np.full((3, 2), 7.5)}  # type: ignore[assignment]
    after = {name: leaf + 1 for name, leaf in now.items() if name != "a"}
    with TrajectoryReplayBuffer(arrays="numpy") as buffer:
        buffer.add_trajectories([simple(curr_obs=now, next_obs=after, forward_inputs={"#next": now["step"]})])
        batch, back = buffer.sample(20), buffer.trajectory(0)
    for k, name in enumerate(names):
        cell = (batch["step"] * 2 + batch["env"]).astype(np.int32)
        assert_same(batch["curr_obs"][name], cell * 10 + np.int32(k), name)
        assert_same(batch["next_obs"][name], cell * 10 + np.int32(k + 1), name)
        assert_same(back.curr_obs[name], now[name], name)
    assert_same(batch["forward_inputs"]["#next"], batch["curr_obs"]["step"], "forward_inputs")
    assert (batch["curr_obs"]["a"]["b"] == 7.5).all()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["rewards are missing"]),
        ({"rewards": None, "actions": np.ones((3, 2))}, ["rewards are missing"]),
        ({"rewards": np.ones(3)}, ["rewards have shape [3]", "[T, B, ...]"]),
        ({"rewards": np.ones((0, 2))}, ["rewards have shape [0, 2]", "T and B from 1"]),
        ({"rewards": np.ones((3, 0))}, ["rewards have shape [3, 0]"]),
        ({"rewards": [["a", "b"]]}, ["rewards", "text"]),
        ({"rewards": [[1.0, 2.0]]}, ["rewards", "list", "array"]),
        (simple(dones=[["a", "b"]] * 3), ["dones", "text"]),
        (simple(terminations=["a", "b"]), ["terminations", "text"]),
        (simple(actions={"a": np.ones((3, 2))}), ["actions", "dict"]),
        (simple(curr_obs=np.ones((3, 2))), ["curr_obs", "expected a dict"]),
        (simple(forward_inputs=[1]), ["forward_inputs", "list", "dict"]),
        (simple(actions=1.5), ["actions", "float"]),
        (simple(actions="text"), ["actions", "str"]),
        (simple(curr_obs={"a": [1, 2]}), ["curr_obs.a", "list", "text per env"]),
        (simple(curr_obs={"a": {"b": ["x", 2]}}), ["curr_obs.a.b", "list"]),
        (simple(curr_obs={"a": [["x", "y"], ["x"], ["x", "y"]]}), ["curr_obs.a", "list"]),
        (simple(curr_obs={"a": []}), ["curr_obs.a", "list"]),
        (simple(curr_obs={"a": ["x", "y", "z"]}), ["curr_obs.a", "[3, 3]", "[3, 2, ...]"]),
        (simple(curr_obs={"a": [["x", "y"]]}), ["curr_obs.a", "[1, 2]", "[3, 2, ...]"]),
        (simple(3, 3, curr_obs={"a": np.array("xyz")}), ["curr_obs.a"]),
        (simple(curr_obs={"a": np.array(["x", None])}), ["curr_obs.a", "text"]),
        (simple(curr_obs={"a": np.array([b"x", b"y"])}), ["curr_obs.a", "|S1"]),
        (simple(curr_obs={"a": np.ones((3, 2), complex)}), ["curr_obs.a", "complex128", "F32"]),
        (simple(curr_obs={"a": np.zeros((3, 2), "M8[s]")}), ["curr_obs.a", "datetime64"]),
        (simple(curr_obs={"a": np.zeros((3, 2), "i4,i4")}), ["curr_obs.a"]),
        (simple(curr_obs={1: np.ones((3, 2))}), ["curr_obs", "key 1"]),
        (simple(curr_obs={"": np.ones((3, 2))}), ["curr_obs", "key ''"]),
        (simple(curr_obs={"x" * 201: np.ones((3, 2))}), ["curr_obs", "200 letters"]),
        (simple(model_weights_id=5), ["model_weights_id is 5"]),
        (simple(model_weights_id="x" * 201), ["model_weights_id", "200"]),
        (simple(model_weights_id="\ud800"), ["model_weights_id"]),
        (simple(max_episode_length=-1), ["max_episode_length is -1"]),
        (simple(max_episode_length=2.5), ["max_episode_length is 2.5"]),
        (simple(max_episode_length=True), ["max_episode_length is True"]),
        (simple(reward=np.ones((3, 2))), ["no field 'reward'", "forward_inputs"]),
        (simple(curr_obs={"a": np.ones((3, 2) + (1,) * 15)}), ["curr_obs.a", "17 dimensions"]),
        (simple(curr_obs={"a": ["\ud800", "b"]}), ["curr_obs.a", "no file can hold"]),
        (simple(curr_obs={"a": ["x" * (2**16 + 1), "b"]}), ["curr_obs.a", "65537", "65536"]),
        ([1, 2], ["list", "Trajectory or a dict"]),
        (None, ["NoneType"]),
        (Trajectory, ["type"]),
    ],
)
def test_what_makes_no_trajectory_is_named(given: Any, words: list[str]) -> None:
    given = dict(given) if isinstance(given, dict) else given
    with TrajectoryReplayBuffer() as buffer:
        with pytest.raises(InvalidTrajectory) as caught:
            buffer.add_trajectories([given])
        for word in words:
            assert word in str(caught.value)
        assert (len(buffer), buffer.schema, buffer.get_stats()["memory_bytes"]) == (0, None, 0)
        assert buffer.add_trajectories([simple(1, 1, versions=np.ones((1, 1)))]) == [0]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(3, 2, dtype=torch.complex64), ["torch.complex64"]),
        (torch.ones(3, 2).to(torch.float8_e4m3fn), ["float8"]),
        (torch.ones(3, 2).to_sparse(), ["sparse", "dense"]),
        (torch.empty(3, 2, device="meta"), ["meta"]),
    ],
    ids=["complex", "float8", "sparse", "meta"],
)
def test_tensors_that_are_not_plain_numbers_are_named(tensor: Any, words: list[str]) -> None:
    with TrajectoryReplayBuffer() as buffer, pytest.raises(InvalidTrajectory, match=r"curr_obs\.a") as caught:
        buffer.add_trajectories([simple(curr_obs={"a": tensor})])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", RESERVED)
def test_names_that_sampling_adds_are_refused(name: str) -> None:
    refused({**simple(), name: np.ones((3, 2))}, repr(name), "sample()")


def test_a_list_is_expected() -> None:
    with TrajectoryReplayBuffer() as buffer:
        given: list[Any] = [simple(), Trajectory(rewards=np.ones((1, 1))), (simple() for _ in range(2)), "ab", 5, None]
        for wrong in given:
            with pytest.raises(InvalidTrajectory):
                buffer.add_trajectories(wrong)
        assert buffer.add_trajectories([]) == []
        assert buffer.add_trajectories((simple(), simple())) == [0, 1]
        assert buffer.schema is not None


def test_the_trajectory_that_is_wrong_is_counted() -> None:
    with TrajectoryReplayBuffer() as buffer, pytest.raises(InvalidTrajectory, match="trajectory 1 of 3: actions"):
        buffer.add_trajectories([simple(), simple(actions=np.ones((9, 2))), simple()])


def test_depth_and_number_of_leaves_have_limits() -> None:
    deep: Any = np.ones((3, 2))
    for _ in range(7):
        deep = {"a": deep}
    with TrajectoryReplayBuffer() as buffer:
        with pytest.raises(InvalidTrajectory, match="deeper"):
            buffer.add_trajectories([simple(curr_obs={"a": {"a": deep}})])
        with pytest.raises(InvalidTrajectory, match="512"):
            buffer.add_trajectories([simple(curr_obs={str(k): np.ones((3, 2)) for k in range(512)})])
        buffer.add_trajectories([simple(curr_obs={"b": deep, **{str(k): np.ones((3, 2)) for k in range(500)}})])
        assert len(flat(buffer.sample(2)["curr_obs"])) == 501


@dataclasses.dataclass
class Foreign:
    """The fields of a trajectory under another class, as RLinf's own has them."""

    max_episode_length: int = 0
    model_weights_id: str = ""
    actions: Any = None
    intervene_flags: Any = None
    rewards: Any = None
    terminations: Any = None
    truncations: Any = None
    dones: Any = None
    prev_logprobs: Any = None
    prev_values: Any = None
    versions: Any = None
    forward_inputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    curr_obs: dict[str, Any] = dataclasses.field(default_factory=dict)
    next_obs: dict[str, Any] = dataclasses.field(default_factory=dict)


def test_a_dataclass_of_another_class_with_the_same_fields_does_as_well() -> None:
    made = make(4, steps=6, envs=2, epochs=3, extra=["dones", "actions"], weights="abc")
    assert_rows(all_rows(made, change=lambda given: Foreign(**given)), {0: made})
    assert_rows(all_rows(made, change=lambda given: Frozen(given)), {0: made})


class Frozen(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {k: Frozen(v) if isinstance(v, Mapping) else v for k, v in values.items()}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def test_what_was_handed_in_is_neither_changed_nor_looked_at_again() -> None:
    made = make(5, steps=6, envs=2, epochs=2, extra=EXTRA_ALLOWED, ends=[(1, 1)])
    before = {name: np.array(leaf) for name, leaf in flat(made.given).items()}
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([made.given, to_torch(made.given)])
        for name, leaf in flat(made.given).items():
            assert_same(np.array(leaf), before[name], name)
            if isinstance(leaf, np.ndarray):
                leaf[...] = 0
            else:
                leaf.clear()
        assert_rows(buffer.sample(100), {0: made, 1: made}, newest=1)


def test_tensors_that_share_memory_with_the_caller_are_copied() -> None:
    obs = torch.arange(20, dtype=torch.float32).reshape(5, 2, 2)
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([simple(4, 2, curr_obs={"x": obs[:-1]}, next_obs={"x": obs[1:]})])
        want, one = obs.clone(), obs[0, 0, 0].item()
        obs.zero_()
        back = buffer.trajectory(0)
    assert one == 0.0
    assert_same(back.curr_obs["x"], want[:-1].numpy(), "curr_obs")
    assert_same(back.next_obs["x"], want[1:].numpy(), "next_obs")


# --- text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        ["one", "two"],
        ("one", "two"),
        np.array(["one", "two"]),
        np.array(["one", "two"], object),
        np.array(["one", "two"], np.dtypes.StringDType()),
        [np.str_("one"), "two"],
    ],
    ids=["list", "tuple", "array", "objects", "StringDType", "numpy str"],
)
def test_text_per_env_is_of_every_step(text: Any) -> None:
    assert sampled(text).tolist() == [["one", "two"]] * 3


@pytest.mark.parametrize("form", [list, tuple, np.array, lambda rows: np.array(rows, object)])
def test_text_per_step_and_env(form: Any) -> None:
    rows = [["", "ü\U0001f600"], ["b", "\0x"], ["line\nline", "b"]]
    assert sampled(form(rows)).tolist() == rows


def test_text_comes_out_as_a_list_of_str_and_in_sequences_as_lists_of_lists() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([simple(3, 1, curr_obs={"x": [["a"], ["b"], ["c"]]})])
        assert buffer.sample(1, sequence_length=3)["curr_obs"]["x"] == [["a", "b", "c"]]
        found = buffer.sample(9)
    assert type(found["curr_obs"]["x"]) is list
    assert found["curr_obs"]["x"] == ["abc"[t] for t in found["step"]]


# --- interventions --------------------------------------------------------------------------------------


def interventions(seed: int, *, next_obs: bool) -> Made:
    random = np.random.default_rng(seed)
    made = made_at_random(seed % 800, random, most_steps=12)
    flags = random.random((made.steps, made.envs, 3)) < random.choice([0.1, 0.5, 0.9])
    want = {**made.want, "intervene_flags": flags}
    given = dict(made.given)
    extra = len(given["intervene_flags"]) > made.steps
    given["intervene_flags"] = flags
    if extra:  # the trailing rows are set: they must not be taken for steps
        each = made.steps // made.epochs
        parts = np.split(flags, np.arange(each, made.steps, each))
        given["intervene_flags"] = np.concatenate([np.concatenate([p, np.ones_like(p[:1])]) for p in parts])
    if not next_obs:
        del given["next_obs"]
        want = {name: leaf for name, leaf in want.items() if not name.startswith("next_obs")}
    return dataclasses.replace(made, given=given, want=want)


@settings(max_examples=80, deadline=None)
@given(seed=SEEDS, mode=st.sampled_from(["any", "all"]), as_tensors=st.booleans(), next_obs=st.booleans())
def test_interventions_are_the_steps_that_were_taken_over(
    seed: int, mode: Any, as_tensors: bool, next_obs: bool
) -> None:
    made = interventions(seed, next_obs=next_obs)
    given = to_torch(made.given) if as_tensors else made.given
    found = Trajectory(**given).extract_intervene_traj(mode)
    reduce = any if mode == "any" else all
    each = made.steps // made.epochs
    expected: list[list[tuple[int, int]]] = []
    for b in range(made.envs):
        chosen = [t for t in range(made.steps) if reduce(made.want["intervene_flags"][t, b]) and (t, b) in made.valid]
        for k, t in enumerate(chosen):
            before = chosen[k - 1] if k else None
            if before is None:
                expected.append([])
            elif (t != before + 1 or t % each == 0) and (
                not next_obs or made.want["next_obs.word"][before, b] == made.want["curr_obs.word"][t, b]
            ):
                expected.append([])  # a gap that nobody would notice in what is stored
            expected[-1].append((t, b))
    if not expected:
        assert found is None
        return
    assert found is not None
    assert len(found) == len(expected)
    for one, cells in zip(found, expected, strict=True):
        assert one.model_weights_id == made.given["model_weights_id"]
        named = flat({k: v for k, v in vars(one).items() if v is not None and k not in ("valid", "model_weights_id")})
        del named["max_episode_length"]
        assert named.keys() == made.want.keys()
        for name, leaf in named.items():
            if not isinstance(leaf, list):
                assert isinstance(leaf, torch.Tensor) == as_tensors
            steps, env = [t for t, _ in cells], cells[0][1]
            assert_same(plain(leaf), made.want[name][steps, env][:, None], name)
        if one.valid is not None:
            assert plain(one.valid).all()


def test_interventions_of_epochs_with_unequal_numbers_keep_their_own_flags() -> None:
    """Three in the first epoch, one in the second: the reference gives 1, 2, 5, 6 where 1, 2, 3, 6 belongs."""
    flags = np.array([1, 1, 1, 0, 0, 1], bool).reshape(6, 1, 1)
    dones = np.array([0, 1, 2, 3, 0, 4, 5, 6]).reshape(8, 1, 1)
    trajectory = Trajectory(
        rewards=np.arange(6.0).reshape(6, 1, 1), intervene_flags=flags, dones=dones, versions=np.arange(6).reshape(6, 1)
    )
    found = trajectory.extract_intervene_traj()
    assert found is not None
    assert [one.dones.reshape(-1).tolist() for one in found] == [[1, 2, 3], [6]]  # type: ignore[union-attr]
    assert [one.versions.reshape(-1).tolist() for one in found] == [[0, 1, 2], [5]]  # type: ignore[union-attr]
    assert [one.rewards.reshape(-1).tolist() for one in found] == [[0, 1, 2], [5]]  # type: ignore[union-attr]


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, next_obs=st.booleans())
def test_interventions_can_be_stored_and_no_sequence_leaps_over_a_gap(seed: int, next_obs: bool) -> None:
    made = interventions(seed, next_obs=next_obs)
    found = Trajectory(**made.given).extract_intervene_traj()
    if found is None:
        return
    with TrajectoryReplayBuffer(sample_window_size=0) as demo:
        demo.add_trajectories(found)
        try:
            batch = demo.sample(64, sequence_length=2)
        except ValueError:
            return
        # Where a row came from is in its own text.
        places = [[tuple(map(int, word.split("/")[1:])) for word in pair] for pair in batch["curr_obs"]["word"]]
    for (t, b), after in places:
        assert after == (t + 1, b)
        assert (t, b) in (made.goes_on if next_obs else made.goes_on | made.gaps)


def test_interventions_of_a_still_scene_are_not_joined() -> None:
    """Observations that do not change look as if every step went on into any other one."""
    still = {"x": np.zeros((6, 1, 2), np.float32)}
    flags = np.array([1, 1, 0, 0, 1, 1], bool).reshape(6, 1, 1)
    trajectory = Trajectory(
        rewards=np.zeros((6, 1)),
        intervene_flags=flags,
        versions=np.arange(6).reshape(6, 1),
        curr_obs=still,
        next_obs=still,
    )
    found = trajectory.extract_intervene_traj()
    assert found is not None
    with TrajectoryReplayBuffer() as demo:
        demo.add_trajectories(found)
        pairs = {tuple(pair) for pair in demo.sample(100, sequence_length=2)["versions"].tolist()}
    assert pairs == {(0, 1), (4, 5)}


def test_nothing_taken_over_is_none_and_the_mode_is_checked() -> None:
    trajectory = Trajectory(rewards=np.zeros((3, 2)))
    assert trajectory.extract_intervene_traj() is None
    trajectory.intervene_flags = np.zeros((3, 2, 2), bool)
    assert trajectory.extract_intervene_traj() is None
    trajectory.intervene_flags[1, 1, 0] = True
    assert trajectory.extract_intervene_traj("all") is None
    found = trajectory.extract_intervene_traj("any")
    assert found is not None
    assert [one.rewards.shape for one in found] == [(1, 1)]  # type: ignore[union-attr]
    with pytest.raises(InvalidTrajectory, match="'some'"):
        trajectory.extract_intervene_traj("some")  # type: ignore[arg-type]


def test_what_was_extracted_shares_no_memory() -> None:
    made = interventions(7, next_obs=True)
    given = to_torch(made.given)
    found = Trajectory(**given).extract_intervene_traj()
    assert found is not None
    before = plain(found[0].actions).copy()
    given["actions"].zero_()
    assert_same(plain(found[0].actions), before, "actions")


def test_the_helper_of_these_tests_makes_what_it_says() -> None:
    made = make(1, steps=4, envs=1, ends=[(1, 0)], extra=["dones"])
    assert made.given["dones"].reshape(-1).tolist() == [True, False, True, False, False]
    assert nested({"a.b": 1, "c": 2}) == {"a": {"b": 1}, "c": 2}
    assert sorted(made.goes_on) == [(0, 0), (2, 0)]
    assert len({made.want["curr_obs.image"][t, 0].tobytes() for t in range(4)}) == 4
