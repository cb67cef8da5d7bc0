"""The page that shows a trajectory: what is on it is what was in the trajectory, whatever that holds."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import InvalidInput, InvalidTrajectory
from forebay.trajectory.data import Trajectory
from forebay.trajectory.page import trajectory_page
from forebay.trajectory.png import png
from tests.processes import HANG_S

HOSTILE = (
    "</script><script>window.stolen = 1</script><img src=x onerror=stolen()>'\"&lt;<!--<script>-->\u2028\\u003c\0\ud800"
)

Images = np.ndarray[Any, Any]


# --- reading a page as a browser would ----------------------------------------------------------------


class Page(HTMLParser):
    """The elements, the texts and the data of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.words = ""
        self.feed(text)
        self.close()
        data = {attributes.get("id"): body for attributes, body in self.scripts}
        self.head = strict_json(data["head"])
        self.images = strict_json(data["images"])
        self.envs = [strict_json(body) for attributes, body in self.scripts if attributes.get("class") == "env"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            attributes, body = self.scripts[-1]
            self.scripts[-1] = attributes, body + data
        else:
            self.words += data

    def values(self, name: str, env: int = 0) -> list[list[Any]]:
        """The curves of a field."""
        return list(self.envs[env]["values"][self._chart(name)])

    def following(self, name: str, env: int = 0) -> dict[int, list[Any]]:
        return {int(step): values for step, values in self.envs[env]["next"][self._chart(name)].items()}

    def chart(self, name: str) -> dict[str, Any]:
        return dict(self.head["charts"][self._chart(name)])

    def shots(self, name: str, env: int = 0, *, following: bool = False) -> dict[int, Images]:
        """The images of a camera by step, decoded."""
        camera = [each["name"] for each in self.head["cameras"]].index(name)
        pairs = self.images["next" if following else "curr"][camera][env]
        return {step: decoded(base64.b64decode(self.images["png"][place])) for step, place in pairs}

    def _chart(self, name: str) -> int:
        return [chart["name"] for chart in self.head["charts"]].index(name)


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def shown(trajectory: Trajectory | dict[str, Any], max_bytes: int = 32 * 2**20) -> Page:
    text = trajectory_page(trajectory, title="a title", facts={"from": "a test"}, max_bytes=max_bytes)
    assert len(text.encode()) <= max_bytes
    return Page(text)


def decoded(file: bytes) -> Images:
    """A PNG of 8 bits without interlacing, by the letter of the specification and slowly."""
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, []
    while at < len(file):
        length, name = struct.unpack(">I4s", file[at : at + 8])
        body = file[at + 8 : at + 8 + length]
        assert struct.unpack(">I", file[at + 8 + length : at + 12 + length])[0] == zlib.crc32(name + body)
        chunks.append((name, body))
        at += 12 + length
    assert [name for name, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", chunks[0][1])
    assert (depth, rest) == (8, [0, 0, 0])
    channels = {0: 1, 2: 3, 6: 4}[colour]
    raw, stride = zlib.decompress(chunks[1][1]), width * channels
    assert len(raw) == height * (stride + 1)
    rows: list[list[int]] = []
    above = [0] * stride
    for row in range(height):
        kind, *line = raw[row * (stride + 1) : (row + 1) * (stride + 1)]
        for i in range(stride):
            left = line[i - channels] if i >= channels else 0
            corner = above[i - channels] if i >= channels else 0
            guess = left + above[i] - corner
            nearest = min((left, above[i], corner), key=lambda each: abs(guess - each))
            line[i] = (line[i] + [0, left, above[i], (left + above[i]) // 2, nearest][kind]) % 256
        rows.append(line)
        above = line
    pixels = np.array(rows, np.uint8)
    return pixels if channels == 1 else pixels.reshape(height, width, channels)


def pictures(*shape: int, seed: int = 0) -> Images:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def simple(steps: int = 6, envs: int = 2, **fields: Any) -> Trajectory:
    return Trajectory(rewards=np.arange(steps * envs, dtype=np.float32).reshape(steps, envs), **fields)


# --- images -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (5, 7, 1), (8, 3, 3), (2, 9, 4)])
def test_an_image_comes_back_from_its_png(shape: tuple[int, ...]) -> None:
    slope = np.add.outer(np.arange(shape[0]) * 9, np.arange(shape[1]) * 5).astype(np.uint8)
    smooth = np.broadcast_to(slope.reshape(*slope.shape, *[1] * (len(shape) - 2)), shape)
    for image in (pictures(*shape), np.zeros(shape, np.uint8), np.full(shape, 255, np.uint8), smooth):
        assert np.array_equal(decoded(png(image)), image[..., 0] if shape[2:] == (1,) else image)


def test_a_smooth_image_takes_less_room_than_its_pixels() -> None:
    slope = np.add.outer(np.arange(64), np.arange(64)).astype(np.uint8)
    assert len(png(slope)) < 300


def test_every_layout_of_a_camera_is_shown_at_any_depth() -> None:
    steps, envs = 3, 2
    given = {
        "grey": pictures(steps, envs, 6, 5),
        "grey_last": pictures(steps, envs, 6, 5, 1),
        "grey_first": pictures(steps, envs, 1, 6, 5),
        "rgb": pictures(steps, envs, 6, 5, 3),
        "rgb_first": pictures(steps, envs, 3, 6, 5),
        "rgba": pictures(steps, envs, 6, 5, 4),
    }
    page = shown(simple(steps, envs, curr_obs={"a": {"b": given}}))
    expected = {
        **given,
        "grey_last": given["grey_last"][..., 0],
        "grey_first": given["grey_first"][:, :, 0],
        "rgb_first": np.moveaxis(given["rgb_first"], 2, -1),
    }
    for name, images in expected.items():
        for env in range(envs):
            found = page.shots(f"curr_obs.a.b.{name}", env)
            assert list(found) == list(range(steps))
            assert all(np.array_equal(found[step], images[step, env]) for step in range(steps)), name
    assert {(camera["height"], camera["width"]) for camera in page.head["cameras"]} == {(6, 5)}


def test_each_view_of_a_stack_is_a_camera() -> None:
    last, first, grey = pictures(2, 1, 3, 8, 9, 3), pictures(2, 1, 2, 3, 8, 9), pictures(2, 1, 5, 8, 9)
    page = shown(simple(2, 1, curr_obs={"last": last, "first": first, "grey": grey}))
    assert len(page.head["cameras"]) == 3 + 2 + 5
    assert np.array_equal(page.shots("curr_obs.last view 2")[1], last[1, 0, 2])
    assert np.array_equal(page.shots("curr_obs.first view 1")[1], np.moveaxis(first[1, 0, 1], 0, -1))
    assert np.array_equal(page.shots("curr_obs.grey view 4")[1], grey[1, 0, 4])


def test_more_views_than_can_be_shown_are_said() -> None:
    page = shown(simple(2, 1, curr_obs={"many": pictures(2, 1, 20, 8, 9, 3)}))
    assert len(page.head["cameras"]) == 16
    assert "curr_obs.many: only the first 16 of 20 views" in page.words


def test_small_or_other_arrays_are_numbers_and_no_images() -> None:
    others = {"tiny": pictures(2, 1, 3, 3), "row": pictures(2, 1, 9), "depth": np.zeros((2, 1, 8, 8), np.float32)}
    page = shown(simple(2, 1, curr_obs=others))
    assert page.head["cameras"] == []
    assert [curve[0] for curve in page.values("curr_obs.row")] == others["row"][0, 0].tolist()
    assert page.chart("curr_obs.tiny")["labels"][:4] == ["[0,0]", "[0,1]", "[0,2]", "[1,0]"]


def test_the_next_image_is_shown_only_where_the_following_row_has_another() -> None:
    steps = 6
    images = pictures(steps + 1, 1, 8, 8, 3)
    current, following = images[:-1], images[1:].copy()
    following[2, 0] = pictures(8, 8, 3, seed=1)  # what an episode ended with, before the reset
    dones = np.zeros((steps, 1), bool)
    dones[2] = True
    page = shown(simple(steps, 1, dones=dones, curr_obs={"cam": current}, next_obs={"cam": following}))
    found = page.shots("curr_obs.cam", following=True)
    assert list(found) == [2, steps - 1]
    assert np.array_equal(found[2], following[2, 0])
    assert np.array_equal(found[5], images[6, 0])
    assert len(page.images["png"]) == steps + 2
    assert page.envs[0]["ends"] == [2]
    assert page.envs[0]["gaps"] == []


def test_an_image_that_stays_is_carried_once() -> None:
    page = shown(simple(50, 2, curr_obs={"cam": np.broadcast_to(pictures(32, 32, 3), (50, 2, 32, 32, 3))}))
    assert len(page.images["png"]) == 1
    assert len(page.shots("curr_obs.cam", 1)) == 50


# --- the bound ----------------------------------------------------------------------------------------


def test_images_shrink_by_a_stride_before_any_is_left_out() -> None:
    images = pictures(4, 1, 200, 240, 3)
    page = shown(simple(4, 1, curr_obs={"cam": images}), max_bytes=400_000)
    found = page.shots("curr_obs.cam")
    assert list(found) == [0, 1, 2, 3]
    assert all(np.array_equal(found[step], images[step, 0, ::2, ::2]) for step in found)
    assert "at most 192 pixels across (the largest: 1 of 2 pixels each way)" in page.words


def test_then_steps_have_no_image_but_episode_ends_have() -> None:
    steps = 64
    dones = np.zeros((steps, 1), bool)
    dones[21] = True
    images, after = pictures(steps, 1, 48, 48, 3), pictures(steps, 1, 48, 48, 3, seed=1)
    after[:-1] = images[1:]
    after[21] = pictures(48, 48, 3, seed=2)
    trajectory = simple(steps, 1, dones=dones, curr_obs={"cam": images}, next_obs={"cam": after})
    page = shown(trajectory, max_bytes=250_000)
    found = page.shots("curr_obs.cam")
    assert {0, 8, 16, 21, 63} <= set(found)
    assert len(found) < steps / 2
    assert np.array_equal(found[21], images[21, 0])
    assert np.array_equal(page.shots("curr_obs.cam", following=True)[21], after[21, 0])
    assert "are of 1 step in" in page.words


def test_then_environments_have_no_image_and_at_last_none_has() -> None:
    trajectory = simple(2, 16, curr_obs={"cam": pictures(2, 16, 90, 90, 3)})
    fewer = shown(trajectory, max_bytes=200_000)
    assert fewer.shots("curr_obs.cam", 0)
    assert not fewer.shots("curr_obs.cam", 15)
    assert "of 16 environments" in fewer.words
    none = shown(trajectory, max_bytes=60_000)
    assert none.images["png"] == []
    assert "No images are here" in none.words


@pytest.mark.parametrize("max_bytes", [100_000, 150_000, 300_000, 600_000, 1_200_000, 2_400_000])
def test_no_page_is_larger_than_allowed(max_bytes: int) -> None:
    images = pictures(40, 3, 64, 64, 3)
    images[:20] //= 64
    shown(simple(40, 3, curr_obs={"cam": images}, next_obs={"cam": pictures(40, 3, 64, 64, 3, seed=1)}), max_bytes)


def test_images_that_are_harder_to_pack_than_those_tried_first_still_fit() -> None:
    images = pictures(240, 1, 48, 48, 3)
    images[::10] = 0
    shown(simple(240, 1, curr_obs={"cam": images}), max_bytes=1_200_000)


def test_environments_and_then_steps_whose_numbers_do_not_fit_are_left_out_and_said() -> None:
    rng = np.random.default_rng(0)
    wide = shown(simple(100, 40, actions=rng.normal(size=(100, 40, 8))), max_bytes=200_000)
    assert 1 < len(wide.envs) == wide.head["envs"] < 40
    assert f"the first {len(wide.envs)} of 40 environments" in wide.words
    long = shown(simple(9_000, 2, actions=rng.normal(size=(9_000, 2, 8))), max_bytes=200_000)
    steps = long.head["steps"]
    assert len(long.envs) == 1
    assert 500 < steps < 9_000
    assert {len(curve) for field in long.envs[0]["values"] for curve in field} == {steps}
    assert f"the first {steps:,} of 9,000 steps" in long.words


def test_a_bound_that_not_even_one_step_keeps_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"max_bytes is 1000; this page takes [0-9]+ before any image"):
        trajectory_page(simple(), title="", facts={}, max_bytes=1_000)


# --- numbers ------------------------------------------------------------------------------------------


def test_every_environment_has_its_own_numbers() -> None:
    actions = np.random.default_rng(0).normal(size=(6, 3, 2)).astype(np.float32)
    page = shown(simple(6, 3, actions=actions))
    for env in range(3):
        assert np.array_equal(np.array(page.values("actions", env), np.float32), actions[:, env].T)
        assert page.values("rewards", env) == [[float(step * 3 + env) for step in range(6)]]


def test_numbers_have_the_digits_of_their_dtype() -> None:
    fields = {"half": np.float16(0.1), "single": np.float32(0.1), "double": np.float64(0.1)}
    page = shown(simple(1, 1, curr_obs={name: np.full((1, 1), value) for name, value in fields.items()}))
    assert [page.values(f"curr_obs.{name}") for name in fields] == [[[0.1]]] * 3


def test_whole_numbers_that_no_browser_holds_are_text() -> None:
    page = shown(simple(2, 1, versions=np.array([[2**53], [2**62 + 1]])))
    assert page.values("versions") == [[2**53, str(2**62 + 1)]]


def test_bfloat16_is_shown_as_numbers() -> None:
    import ml_dtypes
    import torch

    values = np.array([[1.5], [-0.25], [3.0], [np.nan]], np.float32)
    for given in (torch.from_numpy(values).to(torch.bfloat16), values.astype(ml_dtypes.bfloat16)):
        page = shown(simple(4, 1, actions=given))
        assert page.values("actions") == [[1.5, -0.25, 3.0, None]]
        assert page.chart("actions")["about"] == "bfloat16"


def test_tensors_are_shown_as_arrays_are() -> None:
    import torch

    trajectory = simple(4, 2, actions=np.ones((4, 2, 3), np.float32), curr_obs={"cam": pictures(4, 2, 8, 8, 3)})
    tensors = Trajectory(
        rewards=torch.from_numpy(trajectory.rewards),
        actions=torch.from_numpy(trajectory.actions),
        curr_obs={"cam": torch.from_numpy(trajectory.curr_obs["cam"])},
    )
    assert shown(trajectory).envs == shown(tensors).envs
    assert shown(trajectory).images == shown(tensors).images


def test_what_is_not_finite_breaks_nothing_and_is_said() -> None:
    values = np.array([[1.0], [np.nan], [np.inf], [-np.inf], [2.0]])
    page = shown(Trajectory(rewards=values, prev_values=np.full((5, 1), np.nan)))
    assert page.values("rewards") == [[1.0, None, "Infinity", "-Infinity", 2.0]]
    assert page.values("return so far") == [[1.0, 1.0, 1.0, 1.0, 3.0]]
    assert page.chart("rewards")["bounds"] == [1.0, 2.0]
    assert page.chart("prev_values")["bounds"] is None
    assert "rewards: 3 values are NaN or infinite, first at step 1, environment 0" in page.words
    assert ("button", {"type": "button", "data-step": "1", "data-env": "0"}) in page.elements


def test_what_is_not_finite_in_steps_that_are_never_drawn_is_no_fault() -> None:
    values, valid = np.array([[1.0], [np.nan]]), np.array([[True], [False]])
    assert "NaN" not in shown(Trajectory(rewards=values, valid=valid)).words
    apart = shown(Trajectory(rewards=np.ones((2, 1)), curr_obs={"s": np.ones((2, 1))}, next_obs={"s": values}))
    assert "curr_obs.s in next_obs: 1 value is NaN or infinite, first at step 1" in apart.words


def test_sums_beyond_all_numbers_break_nothing() -> None:
    page = shown(Trajectory(rewards=np.full((3, 1, 2), 1e308)))
    assert page.values("return so far") == [["Infinity"] * 3]


def test_the_rewards_of_a_chunk_are_a_curve_each_and_add_up() -> None:
    rewards = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    dones = np.zeros((4, 2, 3), bool)
    dones[1, 0, 2] = True
    page = shown(Trajectory(rewards=rewards, dones=dones))
    assert page.chart("rewards")["labels"] == ["[0]", "[1]", "[2]"]
    assert np.array_equal(np.array(page.values("rewards", 1)), rewards[:, 1].T)
    assert page.values("return so far", 0) == [[3.0, 24.0, 39.0, 96.0]]
    assert page.envs[0]["ends"] == [1]
    assert page.envs[1]["ends"] == []


def test_extra_rows_of_epochs_are_lined_up_before_they_are_shown() -> None:
    epochs, each, envs = 2, 3, 2
    rewards = np.ones((epochs * each, envs))
    rows = np.arange((each + 1) * epochs * envs).reshape(-1, envs)
    flags = np.zeros_like(rows, bool)
    flags[[0, 4, 7]] = True  # before the first action of each epoch, and at the last step of all
    page = shown(Trajectory(rewards=rewards, actions=rows, dones=flags))
    assert page.values("actions", 1) == [[row * envs + 1 for row in (0, 1, 2, 4, 5, 6)]]
    assert page.values("dones", 0) == [[0, 0, 0, 0, 0, 1]]
    assert page.envs[0]["ends"] == [5]
    assert page.head["epoch"] == each
    assert page.values("return so far") == [[1.0, 2.0, 3.0, 1.0, 2.0, 3.0]]


def test_more_components_than_can_be_told_apart_are_said() -> None:
    page = shown(simple(2, 1, actions=np.zeros((2, 1, 5, 8))))
    assert len(page.values("actions")) == 16
    assert page.chart("actions")["labels"][9] == "[1,1]"
    assert page.chart("actions")["about"] == "float64 [5, 8], the first 16 of 40"


def test_a_row_that_does_not_continue_is_marked_and_its_next_state_shown() -> None:
    states = np.arange(12, dtype=np.float32).reshape(6, 1, 2)
    following = np.concatenate([states[1:], [[[50, 51]]]]).astype(np.float32)
    following[3, 0, 1] = np.nan
    states[3, 0, 1] = following[2, 0, 1] = np.nan  # the same NaN continues
    page = shown(simple(6, 1, curr_obs={"s": states}, next_obs={"s": following}))
    assert page.envs[0]["gaps"] == [3]
    assert page.following("curr_obs.s") == {3: [8.0, None], 5: [50.0, 51.0]}
    assert page.values("return so far") == [[0.0, 1.0, 3.0, 6.0, 4.0, 9.0]]
    assert [chart["name"] for chart in page.head["charts"]].count("next_obs.s") == 0


def test_a_next_observation_without_a_current_one_is_shown_as_it_is() -> None:
    page = shown(simple(2, 1, next_obs={"goal": np.ones((2, 1, 2))}, curr_obs={"goal": np.ones((2, 1, 3))}))
    assert page.values("next_obs.goal") == [[1.0, 1.0]] * 2
    assert page.chart("curr_obs.goal")["next"] is False


def test_invalid_steps_are_marked() -> None:
    valid = np.ones((6, 2), bool)
    valid[4:, 1] = False
    states = np.zeros((6, 2))
    apart = states.copy()
    apart[3:5] = 1  # step 4 of env 1 is never drawn: nobody minds what it goes on to
    page = shown(simple(valid=valid, curr_obs={"s": states}, next_obs={"s": apart}))
    assert [env["invalid"] for env in page.envs] == [[], [4, 5]]
    assert [env["gaps"] for env in page.envs] == [[3, 4], [3]]
    assert "10 of 12" in page.words


def test_flags_are_lanes_whatever_their_dtype() -> None:
    flags = np.array([[0.0], [1.0]], np.float32)
    page = shown(simple(2, 1, dones=flags, intervene_flags=flags > 0, curr_obs={"touches": flags > 0}))
    lanes = [chart["name"] for chart in page.head["charts"] if chart["lane"]]
    assert lanes == ["dones", "intervene_flags", "curr_obs.touches"]
    assert page.chart("intervene_flags")["badge"] == "intervened"


def test_text_is_shown_for_its_step_and_env() -> None:
    per_step = [[f"step {step} env {env}" for env in range(2)] for step in range(3)]
    page = shown(simple(3, 2, curr_obs={"task": ["lift", "push"], "said": per_step}))
    assert page.head["texts"] == ["curr_obs.task", "curr_obs.said"]
    task, said = page.envs[1]["texts"]
    assert (task["table"], task["codes"]) == (["push"], [0, 0, 0])
    assert [said["table"][code] for code in said["codes"]] == [row[1] for row in per_step]


def test_a_long_text_is_cut_and_says_so() -> None:
    page = shown(simple(1, 1, curr_obs={"task": ["x" * 5_000]}))
    assert page.envs[0]["texts"][0]["table"] == ["x" * 2_000 + " … and 3,000 more letters"]


def test_rewards_alone_make_a_page() -> None:
    page = shown({"rewards": np.ones((1, 1))})
    assert page.head["cameras"] == page.head["texts"] == page.images["png"] == []
    assert [chart["name"] for chart in page.head["charts"]] == ["rewards", "return so far"]


def test_fields_without_components_are_passed_over() -> None:
    nothing = {"nothing": np.zeros((2, 1, 0), np.float32)}
    page = shown(Trajectory(rewards=np.ones((2, 1, 0)), actions=np.ones((2, 1)), curr_obs=nothing, next_obs=nothing))
    assert [chart["name"] for chart in page.head["charts"]] == ["actions"]


def test_what_makes_no_trajectory_is_refused_by_name() -> None:
    with pytest.raises(InvalidTrajectory, match="actions has shape"):
        shown(simple(6, 2, actions=np.zeros((5, 2))))


def test_a_trajectory_is_left_as_it_was() -> None:
    trajectory = simple(4, 2, actions=np.ones((4, 2)), curr_obs={"cam": pictures(4, 2, 8, 8, 3)})
    before = copy.deepcopy(trajectory)
    shown(trajectory)
    for name in ("rewards", "actions"):
        assert np.array_equal(getattr(trajectory, name), getattr(before, name))
    assert np.array_equal(trajectory.curr_obs["cam"], before.curr_obs["cam"])


# --- what data must not do ----------------------------------------------------------------------------


def with_names(name: str) -> str:
    """A page in which data says `name` wherever data can say anything."""
    broken = np.full((2, 1), np.nan)
    trajectory = simple(
        *(2, 1),
        model_weights_id=name.replace("\ud800", "?"),  # which is refused there
        forward_inputs={name: broken},
        curr_obs={name: {name + "2": pictures(2, 1, 8, 8, 3), "many": pictures(2, 1, 17, 8, 8)}, "task": [name]},
        next_obs={name: {name + "2": pictures(2, 1, 8, 8, 3, seed=1)}, "task": [[name], [name + "3"]]},
    )
    return trajectory_page(trajectory, title=name, facts={name: name})


def test_a_hostile_name_or_text_changes_no_element_of_the_page() -> None:
    harmless, hostile = Page(with_names("harmless")), Page(with_names(HOSTILE))
    assert hostile.elements == harmless.elements
    assert len(hostile.scripts) == 4
    written = HOSTILE.replace("\ud800", "?")
    assert hostile.words.count(written) >= 6  # title twice, a fact, weights, two notes
    assert hostile.head["cameras"][0]["name"] == f"curr_obs.{written}.{written}2"
    assert hostile.envs[0]["texts"][0]["table"] == [written, written + "3"]


def test_no_data_holds_a_letter_that_html_could_mind() -> None:
    for attributes, body in Page(with_names(HOSTILE)).scripts:
        if attributes.get("type") == "application/json":
            assert not set(body) & set("<>&")


def test_a_name_that_looks_like_a_place_of_the_template_stays_a_name() -> None:
    page = Page(trajectory_page(simple(), title="<!--head--><!--title-->", facts={"<!--images-->": "\\1\\g<0>"}))
    assert page.words.count("<!--head--><!--title-->") == 2
    assert "<!--images-->" in page.words
    assert "\\1\\g<0>" in page.words


def test_the_policy_allows_the_script_and_style_of_the_page_and_nothing_else() -> None:
    text = with_names(HOSTILE)
    page = Page(text)
    metas = [attributes for tag, attributes in page.elements if tag == "meta" and "http-equiv" in attributes]
    (policy,) = [meta["content"] or "" for meta in metas]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    (script,) = [body for attributes, body in page.scripts if not attributes]
    style = text.partition("<style>")[2].partition("</style>")[0]
    hashed = {
        name: f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"
        for name, body in (("script-src", script), ("style-src", style))
    }
    assert [tag for tag, _ in page.elements].count("style") == 1
    nothing = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert rules == {**nothing, **hashed, "img-src": "data:"}


def test_the_page_fetches_nothing_and_has_no_code_in_attributes() -> None:
    page = Page(with_names("plain"))
    for _, attributes in page.elements:
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "href", "style", "action")}
    (script,) = [body for attributes, body in page.scripts if not attributes]
    assert script.replace("http://www.w3.org/2000/svg", "").count("://") == 0
    assert not [way for way in ("innerHTML", "eval(", "fetch(", "import(", "document.write") if way in script]


def test_every_control_has_a_name() -> None:
    page = Page(with_names("plain"))
    ids = {attributes["id"]: attributes for _, attributes in page.elements if "id" in attributes}
    assert ids["slider"]["aria-label"] == "Step"
    assert all("aria-label" in attributes for _, attributes in page.elements if "data-key" in attributes)


@pytest.mark.slow
@pytest.mark.platform("a browser")
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser")
def test_a_browser_runs_the_page_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(with_names(HOSTILE), "utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]
    command += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=2000", "--dump-dom", f"{(tmp_path / 'page.html').as_uri()}#step=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert "CONSOLE" not in done.stderr
    assert "step 1 of 0–1</output>" in done.stdout
    assert done.stdout.count('src="data:image/png;base64,') > 2
