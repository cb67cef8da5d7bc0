"""Interchange with RLinf's directories: what was stored comes back, what is hostile stays outside."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
import sys
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.checkpoint.files import FileOps
from forebay.errors import CheckpointError, DamagedData, InvalidInput, InvalidTrajectory
from forebay.trajectory import rlinf
from forebay.trajectory.data import Trajectory, aligned
from forebay.trajectory.rlinf import export_rlinf, find_rlinf, open_rlinf

ZEROS_ID = str(uuid.uuid5(uuid.NAMESPACE_DNS, "00000000"))


def values(number: int = 0, steps: int = 4, envs: int = 2) -> dict[str, Any]:
    """The dict that RLinf writes of a trajectory."""
    generator = torch.Generator().manual_seed(number)
    rewards = torch.rand(steps, envs, 1, generator=generator)
    return {
        "max_episode_length": 9,
        "model_weights_id": f"w-{number}",
        "rewards": rewards,
        "actions": torch.rand(steps, envs, 3, generator=generator),
        "dones": torch.rand(steps + 1, envs, 1, generator=generator) < 0.5,
        "forward_inputs": {},
        "curr_obs": {"states": rewards.bfloat16(), "image": torch.full((steps, envs, 2, 2), number, dtype=torch.uint8)},
        "next_obs": {"states": rewards.bfloat16() + 1},
    }


def save(path: Path, value: object) -> None:
    torch.save(value, path)


def write_index(path: Path, entries: dict[str, Any], ids: list[Any], name: str = "trajectory_index.json") -> None:
    (path / name).write_text(json.dumps({"trajectory_index": entries, "trajectory_id_list": ids}))


def write_directory(path: Path, ids: tuple[int, ...] = (0, 1, 2)) -> Path:
    path.mkdir(exist_ok=True)
    for number in ids:
        save(path / f"trajectory_{number}_w-{number}.pt", values(number))
    entries = {
        str(number): {
            "num_samples": 8,
            "trajectory_id": number,
            "max_episode_length": 9,
            "shape": [4, 2, 1],
            "model_weights_id": f"w-{number}",
        }
        for number in ids
    }
    write_index(path, entries, list(ids))
    facts = {"trajectory_format": "pt", "size": len(ids), "total_samples": 8, "trajectory_counter": 3, "seed": 7}
    (path / "metadata.json").write_text(json.dumps(facts))
    return path


def assert_same(first: Trajectory | dict[str, Any], second: Trajectory | dict[str, Any]) -> None:
    """Every row of every field is the same, of the same dtype."""
    one, other = aligned(first), aligned(second)
    assert one.leaves.keys() == other.leaves.keys()
    for path, leaf in one.leaves.items():
        assert (leaf.dtype, leaf.shape) == (other.leaves[path].dtype, other.leaves[path].shape), path
        assert leaf.values.shape == other.leaves[path].values.shape, path
        assert leaf.values.tolist() == other.leaves[path].values.tolist(), path
    assert one.max_episode_length == other.max_episode_length


# --- reading ------------------------------------------------------------------------------------------


def test_a_directory_of_rlinf_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = open_rlinf(write_directory(tmp_path))
    assert (len(found), found.seed, found.missing, found.unlisted, found.skipped) == (3, 7, (), (), ())
    assert found.bytes == sum(file.stat().st_size for file in tmp_path.glob("*.pt"))
    for expected, (number, trajectory) in enumerate(found):
        assert number == expected
        assert_same(trajectory, values(number))
        assert trajectory.model_weights_id == f"w-{number}"
        assert trajectory.curr_obs["states"].dtype == torch.bfloat16
    assert found.ignored == set()


def test_the_order_is_that_of_the_index_and_what_it_does_not_name_comes_last_by_number(tmp_path: Path) -> None:
    write_directory(tmp_path, (0, 1, 2, 9, 10))
    entry = {"model_weights_id": "w-2"}
    write_index(tmp_path, {"2": entry, "0": {"model_weights_id": "w-0"}, "5": entry}, [2, 5, 0])
    found = open_rlinf(tmp_path)
    assert list(found.names) == [2, 0, 1, 9, 10]
    assert found.missing == (5,)
    assert found.unlisted == ("trajectory_1_w-1.pt", "trajectory_9_w-9.pt", "trajectory_10_w-10.pt")


def test_ids_without_a_file_are_reported_as_in_ordinary_checkpoints_of_rlinf(tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / "trajectory_0_w-0.pt").unlink()
    found = open_rlinf(tmp_path)
    assert (found.missing, [number for number, _ in found]) == ((0,), [1, 2])


def test_a_directory_without_an_index_is_read_by_number(tmp_path: Path) -> None:
    write_directory(tmp_path, (10, 9, 1))
    (tmp_path / "trajectory_index.json").unlink()
    (tmp_path / "metadata.json").unlink()
    found = open_rlinf(tmp_path)
    assert ([number for number, _ in found], found.seed, len(found.unlisted)) == ([1, 9, 10], None, 3)


def test_the_misspelt_twin_of_the_index_serves_where_the_index_is_missing(tmp_path: Path) -> None:
    write_directory(tmp_path)
    write_index(tmp_path, {}, [2, 1, 0], "trajector_index.json")
    assert list(open_rlinf(tmp_path).names) == [0, 1, 2]
    (tmp_path / "trajectory_index.json").unlink()
    assert list(open_rlinf(tmp_path).names) == [2, 1, 0]


def test_names_with_an_update_count_or_without_weights_are_read(tmp_path: Path) -> None:
    weights = str(uuid.uuid4())
    save(tmp_path / f"trajectory_0_{weights}_12.pt", values(0))
    save(tmp_path / "trajectory_1_.pt", values(1))
    without = values(2)
    del without["model_weights_id"]
    save(tmp_path / "trajectory_2_some text.pt", without)
    write_index(tmp_path, {"0": {"model_weights_id": weights}, "1": {"model_weights_id": ""}}, [0, 1])
    found = open_rlinf(tmp_path)
    assert (list(found.names), found.missing, found.unlisted) == ([0, 1, 2], (), ("trajectory_2_some text.pt",))
    assert found.read(2).model_weights_id == "some text"


def test_of_two_files_with_one_id_the_index_decides(tmp_path: Path) -> None:
    write_directory(tmp_path)
    save(tmp_path / "trajectory_1_old.pt", values(50))
    save(tmp_path / "trajectory_1_w-1_3.pt", values(51))
    found = open_rlinf(tmp_path)
    assert_same(found.read(1), values(1))
    assert found.skipped == ("trajectory_1_old.pt", "trajectory_1_w-1_3.pt")
    (tmp_path / "trajectory_1_w-1.pt").unlink()
    assert_same(open_rlinf(tmp_path).read(1), values(51))


def test_two_files_with_one_id_that_nothing_tells_apart_are_refused(tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / "trajectory_1_w-1.pt").rename(tmp_path / "trajectory_1_a.pt")
    save(tmp_path / "trajectory_1_b.pt", values(1))
    with pytest.raises(DamagedData, match=r"2 files of trajectory 1.*trajectory_1_a\.pt, trajectory_1_b\.pt"):
        open_rlinf(tmp_path)


def test_fields_of_a_newer_rlinf_are_listed_and_not_lost_in_silence(tmp_path: Path) -> None:
    newer = values() | {"success": torch.zeros(4, 2), "note": "x", "prev_values": torch.zeros(8)}
    newer["curr_obs"] |= {"fps": 30, "flat": torch.zeros(4), "scale": 0.5, "nothing": None}
    save(tmp_path / "trajectory_0_w.pt", newer)
    found = open_rlinf(tmp_path)
    assert_same(found.read(0), values())
    assert found.ignored == {"success", "note", "prev_values", "curr_obs.fps", "curr_obs.flat", "curr_obs.scale"}


def test_tensors_that_share_their_bytes_are_read(tmp_path: Path) -> None:
    seen = torch.rand(5, 2, 1000)
    shared = values() | {"curr_obs": {"states": seen[:-1]}, "next_obs": {"states": seen[1:]}}
    save(tmp_path / "trajectory_0_w.pt", shared)
    assert_same(open_rlinf(tmp_path).read(0), shared)


def test_text_and_dicts_in_dicts_are_kept(tmp_path: Path) -> None:
    richer = values()
    richer["curr_obs"] |= {"task": ["lift", "push"], "arm": {"left": {"joint": torch.zeros(4, 2, 7)}}}
    richer["curr_obs"]["said"] = [[f"{t}{b}" for b in range(2)] for t in range(4)]
    save(tmp_path / "trajectory_0_w.pt", richer)
    assert_same(open_rlinf(tmp_path).read(0), richer)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("envs", [1, 3])
def test_what_rlinf_flattened_in_a_checkpoint_gets_its_shape_back(tmp_path: Path, epochs: int, envs: int) -> None:
    whole = values(envs=envs) | {"dones": torch.ones(4, envs, 1, dtype=torch.bool)}
    whole["prev_values"] = torch.rand(4 + epochs, envs, 5)
    whole["versions"] = torch.rand(4 + epochs, envs)
    flat = whole | {"prev_values": whole["prev_values"].reshape(-1, 5), "versions": whole["versions"].reshape(-1)}
    save(tmp_path / "trajectory_0_w.pt", flat)
    assert_same(open_rlinf(tmp_path).read(0), whole)


def test_a_pickle_is_refused_and_the_reason_said(tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / "trajectory_3_w.pkl").write_bytes(pickle.dumps(values()))
    assert find_rlinf(tmp_path)
    with pytest.raises(InvalidInput, match=r"trajectory_3_w\.pkl is a pickle, and reading one runs whatever code"):
        open_rlinf(tmp_path)


def test_directories_of_rlinf_are_told_from_others(tmp_path: Path) -> None:
    assert not find_rlinf(tmp_path)
    assert not find_rlinf(tmp_path / "missing")
    (tmp_path / "trajectory_0_w.pt").touch()
    assert find_rlinf(tmp_path)
    assert not find_rlinf(tmp_path / "trajectory_0_w.pt")
    (tmp_path / "catalogue.db").touch()
    assert not find_rlinf(tmp_path)
    with pytest.raises(InvalidInput, match="is not a directory of RLinf"):
        open_rlinf(tmp_path)
    with pytest.raises(InvalidInput, match="there is no directory"):
        open_rlinf(tmp_path / "missing")
    for name in ("metadata.json", "trajectory_index.json", "trajector_index.json"):
        other = tmp_path / f"with-{name}"
        other.mkdir()
        (other / name).write_text("{}")
        assert find_rlinf(other)
        assert list(open_rlinf(other)) == []
        (other / "manifest.json").touch()
        assert not find_rlinf(other)


def test_an_unknown_id_is_an_error_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="has no trajectory 17; it has 3"):
        open_rlinf(write_directory(tmp_path)).read(17)


def test_without_torch_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = open_rlinf(write_directory(tmp_path / "source"))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InvalidInput, match=r"pip install 'forebay\[torch\]'"):
        found.read(0)
    with pytest.raises(InvalidInput, match=r"pip install 'forebay\[torch\]'"):
        export_rlinf(tmp_path / "target", [], seed=1)
    assert not (tmp_path / "target").exists()


# --- hostile directories ------------------------------------------------------------------------------


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("place", ["alone", "inside", "in a plain pickle", "in the old format"])
def test_code_in_a_file_is_not_executed(tmp_path: Path, place: str) -> None:
    write_directory(tmp_path)
    victim, trap = tmp_path / "trajectory_1_w-1.pt", tmp_path / "executed"
    if place == "alone":
        save(victim, Payload(trap))
    elif place == "inside":
        save(victim, values(1) | {"curr_obs": {"states": Payload(trap)}})
    elif place == "in a plain pickle":
        victim.write_bytes(pickle.dumps(Payload(trap)))
    else:
        torch.save(values(1) | {"unknown": Payload(trap)}, victim, _use_new_zipfile_serialization=False)
    found = open_rlinf(tmp_path)
    assert_same(found.read(0), values(0))
    with pytest.raises(DamagedData, match=r"trajectory_1_w-1\.pt"):
        found.read(1)
    assert not trap.exists()


def test_links_and_directories_are_not_followed(tmp_path: Path) -> None:
    directory, outside = tmp_path / "directory", tmp_path / "outside.pt"
    write_directory(directory)
    save(outside, values(3))
    (directory / "trajectory_3_w.pt").symlink_to(outside)
    (directory / "trajectory_4_w.pt").mkdir()
    (directory / "trajectory_5_w.pt").symlink_to(directory / "missing")
    os.mkfifo(directory / "trajectory_6_w.pt")
    found = open_rlinf(directory)
    assert [number for number, _ in found] == [0, 1, 2]
    assert found.skipped == tuple(f"trajectory_{number}_w.pt" for number in (3, 4, 5, 6))


def test_a_file_that_becomes_a_link_after_opening_is_not_followed(tmp_path: Path) -> None:
    found = open_rlinf(write_directory(tmp_path))
    victim = tmp_path / "trajectory_1_w-1.pt"
    victim.unlink()
    with pytest.raises(DamagedData, match="was removed while"):
        found.read(1)
    victim.symlink_to(tmp_path / "trajectory_0_w-0.pt")
    with pytest.raises(DamagedData, match="is a symbolic link"):
        found.read(1)


@pytest.mark.parametrize("name", ["metadata.json", "trajectory_index.json"])
def test_a_linked_index_is_refused(tmp_path: Path, name: str) -> None:
    write_directory(tmp_path)
    (tmp_path / name).rename(tmp_path / "elsewhere")
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedData, match="is a symbolic link"):
        open_rlinf(tmp_path)


@pytest.mark.parametrize("name", ["metadata.json", "trajectory_index.json"])
def test_a_huge_index_is_refused_before_it_is_read(tmp_path: Path, name: str) -> None:
    write_directory(tmp_path)
    os.truncate(tmp_path / name, rlinf.MAX_JSON_BYTES + 1)
    with pytest.raises(DamagedData, match="expected at most"):
        open_rlinf(tmp_path)


def test_names_in_the_index_never_become_paths(tmp_path: Path) -> None:
    directory = tmp_path / "directory"
    write_directory(directory)
    save(tmp_path / "trajectory_7_x.pt", values(7))
    entry = {"model_weights_id": "/../../trajectory_7_x"}
    write_index(directory, {"7": entry, "0": {"model_weights_id": "../../etc/passwd"}}, [7, 0])
    found = open_rlinf(directory)
    assert (list(found.names), found.missing) == ([0, 1, 2], (7,))
    assert_same(found.read(0), values(0))


@pytest.mark.parametrize(
    "index",
    [
        "",
        "{",
        "[]",
        '{"trajectory_index": []}',
        '{"trajectory_index": {"../0": {}}}',
        '{"trajectory_index": {"-1": {}}}',
        '{"trajectory_index": {"٣": {}}}',
        '{"trajectory_index": {"9999999999999999999": {}}}',
        '{"trajectory_index": {"0": {"model_weights_id": 5}}}',
        '{"trajectory_index": {"0": null}}',
        '{"trajectory_id_list": ["0"]}',
        '{"trajectory_id_list": [0.5]}',
        '{"trajectory_id_list": [-1]}',
        '{"trajectory_id_list": [1, 1]}',
        '{"trajectory_id_list": [1e400]}',
        '{"trajectory_id_list": ' + "[" * 100_000,
        '{"x": ' + "[" * 100_000,
        "\x00" * 100,
    ],
)
def test_an_index_that_makes_no_sense_is_damaged_data(tmp_path: Path, index: str) -> None:
    write_directory(tmp_path)
    (tmp_path / "trajectory_index.json").write_text(index)
    with pytest.raises(DamagedData, match=r"trajectory_index\.json"):
        open_rlinf(tmp_path)


@pytest.mark.parametrize("metadata", ["", "[]", '{"seed": "1"}', '{"seed": 1e99}', '{"seed": 99999999999999999999}'])
def test_metadata_that_makes_no_sense_is_damaged_data(tmp_path: Path, metadata: str) -> None:
    write_directory(tmp_path)
    (tmp_path / "metadata.json").write_text(metadata)
    with pytest.raises(DamagedData, match=r"metadata\.json"):
        open_rlinf(tmp_path)


def test_names_that_are_no_ids_are_skipped(tmp_path: Path) -> None:
    write_directory(tmp_path)
    odd = ["trajectory_.pt", "trajectory_x_w.pt", "trajectory_00_w.pt", "trajectory_9999999999999999999_w.pt"]
    odd += ["trajectory_-1_w.pt", "trajectory_1_w\n.pt", "trajectory_٣_w.pt"]
    for name in (*odd, "other_0_w.pt", "trajectory_0_w.pt.tmp"):
        (tmp_path / name).touch()
    found = open_rlinf(tmp_path)
    assert ([number for number, _ in found], sorted(found.skipped)) == ([0, 1, 2], sorted(odd))


def nested(depth: int) -> object:
    value: object = {}
    for _ in range(depth):
        value = {"x": value, "y": value}
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1, 2], "it holds a list"),
        (torch.zeros(2), "it holds a Tensor"),
        ({1: torch.zeros(2)}, "the key 1"),
        ({"x" * 201: 1}, "the key 'xxx"),
        ({"rewards": 5}, "rewards is 5"),
        ({"rewards": "text"}, "rewards is 'text'"),
        ({"rewards": {}}, "rewards is a dict"),
        ({"curr_obs": torch.zeros(4, 2)}, "curr_obs is a Tensor; expected a dict"),
        ({"curr_obs": {5: torch.zeros(4, 2)}}, "curr_obs has the key 5"),
        ({"curr_obs": {"a": [1, 2]}}, "curr_obs.a is a list of other things than text"),
        ({"curr_obs": {"a": [torch.zeros(2)]}}, "curr_obs.a is a list of other things"),
        ({"curr_obs": {"a": {1, 2}}}, "curr_obs.a is a set"),
        ({"curr_obs": {"a": torch.float32}}, "curr_obs.a is a dtype"),
        ({"curr_obs": nested(20)}, "nested deeper than 8"),
        ({"curr_obs": {str(number): nested(5) for number in range(100)}}, "holds more than 4096 values"),
        ({"curr_obs": {"a": [["x"] * 100_000] * 100_000}}, "more text than the file holds"),
        ({"max_episode_length": -1}, "max_episode_length is -1"),
        ({"max_episode_length": True}, "max_episode_length is True"),
        ({"max_episode_length": "1"}, "max_episode_length is '1'"),
        ({"model_weights_id": 5}, "model_weights_id is 5"),
        ({"model_weights_id": "x" * 201}, "model_weights_id is 'xxx"),
        ({"rewards": torch.zeros(1).expand(2**40, 2)}, "more than the file holds"),
        ({"rewards": torch.zeros(4, 2).to_sparse()}, "sparse, quantised or without data"),
        ({"rewards": torch.zeros(4, 2, device="meta")}, "sparse, quantised or without data"),
    ],
)
def test_a_file_of_other_things_is_damaged_data(tmp_path: Path, value: object, says: str) -> None:
    save(tmp_path / "trajectory_0_w.pt", value)
    with pytest.raises(DamagedData, match=r"trajectory_0_w\.pt is not a trajectory of RLinf: ") as caught:
        open_rlinf(tmp_path).read(0)
    assert says in str(caught.value)


def packed(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_a_compressed_file_is_refused_before_torch_unpacks_it(tmp_path: Path) -> None:
    bomb = tmp_path / "trajectory_0_w.pt"
    source = zipfile.ZipFile(io.BytesIO(packed({"rewards": torch.zeros(1000, 1000)})))
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert bomb.stat().st_size < 100_000
    with pytest.raises(DamagedData, match="claims to hold more"):
        open_rlinf(tmp_path).read(0)


def test_a_file_of_impossible_size_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "trajectory_0_w.pt").touch()
    os.truncate(tmp_path / "trajectory_0_w.pt", rlinf.MAX_FILE_BYTES + 1)
    with pytest.raises(DamagedData, match="expected at most"):
        open_rlinf(tmp_path).read(0)


@pytest.mark.filterwarnings("ignore")  # torch warns of some of what it then refuses
def test_a_file_with_changed_or_missing_bytes_is_read_or_damaged_data(tmp_path: Path) -> None:
    draw, whole, damaged = random.Random(1), packed(values()), 0
    for case in range(300):
        data = bytearray(whole)
        if case % 3 == 0:
            del data[draw.randrange(len(data)) :]
        else:
            for _ in range(1 + case % 4):
                data[draw.randrange(len(data))] = draw.randrange(256)
        (tmp_path / "trajectory_0_w.pt").write_bytes(data)
        try:
            open_rlinf(tmp_path).read(0)
        except DamagedData:
            damaged += 1
    assert damaged > 100


def test_an_error_of_the_disk_is_not_called_damage(tmp_path: Path) -> None:
    class Broken(FileOps):
        def open(self, path: Path) -> tuple[int, int]:
            if path.suffix == ".pt":
                raise OSError(errno.EIO, "input/output error")
            return super().open(path)

    found = open_rlinf(write_directory(tmp_path), files=Broken())
    with pytest.raises(CheckpointError, match=r"cannot open .*input/output error"):
        found.read(0)


# --- writing ------------------------------------------------------------------------------------------


def test_an_export_comes_back_as_it_was(tmp_path: Path) -> None:
    given = [(3, Trajectory(**values(3))), (1, Trajectory(**values(1))), (20, Trajectory(**values(20)))]
    counts: list[int] = []
    done = export_rlinf(tmp_path / "a" / "b", iter(given), seed=-1, progress=counts.append)
    assert (done.trajectories, done.transitions, done.left_out, done.widened) == (3, 24, frozenset(), frozenset())
    assert counts == [1, 2, 3]
    assert done.bytes == sum(file.stat().st_size for file in (tmp_path / "a" / "b").iterdir())
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    found = open_rlinf(tmp_path / "a" / "b")
    assert (found.seed, found.missing, found.unlisted, found.skipped) == (2**32 - 1, (), (), ())
    for (number, before), (again, after) in zip(given, found, strict=True):
        assert number == again
        assert_same(before, after)
        assert before.model_weights_id == after.model_weights_id


def test_an_export_has_the_files_that_rlinf_expects(tmp_path: Path) -> None:
    export_rlinf(tmp_path / "x", [(4, Trajectory(**values(4) | {"prev_logprobs": torch.zeros(4, 2, 5)}))], seed=3)
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == [
        "metadata.json",
        "trajectory_4_w-4.pt",
        "trajectory_index.json",
    ]
    facts = {"trajectory_format": "pt", "size": 1, "total_samples": 8, "trajectory_counter": 5, "seed": 3}
    assert json.loads((tmp_path / "x" / "metadata.json").read_text()) == facts
    entry = {
        "num_samples": 8,
        "trajectory_id": 4,
        "max_episode_length": 9,
        "shape": [4, 2, 5],
        "model_weights_id": "w-4",
    }
    index = {"trajectory_index": {"4": entry}, "trajectory_id_list": [4]}
    assert json.loads((tmp_path / "x" / "trajectory_index.json").read_text()) == index
    content = torch.load(tmp_path / "x" / "trajectory_4_w-4.pt", weights_only=True)
    assert content["dones"].shape == (4, 2, 1)  # without the row before the first action
    assert content["curr_obs"]["states"].dtype == torch.bfloat16
    assert "prev_values" not in content


def test_an_export_of_nothing_is_a_directory_of_nothing(tmp_path: Path) -> None:
    assert export_rlinf(tmp_path / "x", [], seed=1).trajectories == 0
    assert list(open_rlinf(tmp_path / "x")) == []


def test_numpy_arrays_are_exported_whatever_their_memory_is_like(tmp_path: Path) -> None:
    import ml_dtypes

    large = np.arange(4000, dtype=np.float32).reshape(10, 20, 20)
    frozen = np.ones((4, 2, 3), np.int16)
    frozen.setflags(write=False)
    given = Trajectory(
        rewards=large[::2, 3:5][1:],
        actions=frozen[::-1][:4],
        curr_obs={
            "b": np.ones((4, 2), ml_dtypes.bfloat16),
            "big": np.ones((4, 2), ">f8"),
            "flag": np.ones((4, 2), bool),
        },
    )
    done = export_rlinf(tmp_path / "x", [(0, given)], seed=1)
    assert done.bytes < 10_000
    after = open_rlinf(tmp_path / "x").read(0)
    assert_same(given, after)
    assert after.curr_obs["b"].dtype == torch.bfloat16


def test_only_the_rows_of_a_view_are_saved(tmp_path: Path) -> None:
    given = Trajectory(rewards=torch.zeros(1000, 1000)[:4, :2], actions=torch.rand(2, 4, 3).transpose(0, 1))
    assert export_rlinf(tmp_path / "x", [(0, given)], seed=1).bytes < 10_000
    assert_same(given, open_rlinf(tmp_path / "x").read(0))


@pytest.mark.parametrize("epochs", [1, 2, 4])
def test_extra_rows_of_epochs_are_lined_up_and_the_epochs_kept(tmp_path: Path, epochs: int) -> None:
    given = Trajectory(
        rewards=torch.rand(8, 3),
        dones=torch.rand(8 + epochs, 3) < 0.5,
        terminations=torch.rand(8, 3) < 0.5,
        prev_values=torch.rand(8 + epochs, 3, 2),
        versions=torch.rand(8 + epochs, 3),
        forward_inputs={"x": torch.rand(8 + epochs, 3, 2)},
    )
    export_rlinf(tmp_path / "x", [(0, given)], seed=1)
    after = open_rlinf(tmp_path / "x").read(0)
    assert_same(given, after)
    assert aligned(after).epochs == epochs
    rows = {name: len(getattr(after, name)) for name in ("prev_values", "versions", "dones", "terminations")}
    flags = 8 if epochs == 1 else 8 + epochs
    assert rows == {"prev_values": 8, "versions": 8, "dones": flags, "terminations": flags}
    assert len(after.forward_inputs["x"]) == 8


def test_what_rlinf_does_not_read_is_reported_and_still_in_the_file(tmp_path: Path) -> None:
    given = values() | {"valid": torch.ones(4, 2, dtype=torch.bool)}
    given["curr_obs"] |= {"arm": {"joint": torch.zeros(4, 2, 7)}, "task": ["lift", "push"]}
    done = export_rlinf(tmp_path / "x", [(0, Trajectory(**given))], seed=1)
    assert done.left_out == {"valid", "curr_obs.arm.joint", "curr_obs.task"}
    assert_same(open_rlinf(tmp_path / "x").read(0), given)


def test_a_dict_in_which_rlinf_would_find_nothing_is_not_written(tmp_path: Path) -> None:
    given = values() | {"forward_inputs": {"prompt": ["a", "b"], "deep": {"x": torch.zeros(4, 2)}}}
    done = export_rlinf(tmp_path / "x", [(0, Trajectory(**given))], seed=1)
    assert done.left_out == {"forward_inputs.prompt", "forward_inputs.deep.x"}
    assert_same(open_rlinf(tmp_path / "x").read(0), given | {"forward_inputs": {}})


def test_integers_that_rlinf_cannot_sample_are_widened(tmp_path: Path) -> None:
    depth = np.full((4, 2, 3), 65535, np.uint16)
    given = Trajectory(rewards=torch.zeros(4, 2), curr_obs={"depth": depth, "id": depth.astype(np.uint64)})
    done = export_rlinf(tmp_path / "x", [(0, given)], seed=1)
    assert done.widened == {"curr_obs.depth", "curr_obs.id"}
    after = open_rlinf(tmp_path / "x").read(0)
    assert after.curr_obs["depth"].dtype == torch.int32
    assert after.curr_obs["depth"].tolist() == depth.tolist()
    given.curr_obs["id"][0, 0, 0] = 2**63
    with pytest.raises(InvalidTrajectory, match=r"curr_obs\.id has the value 9223372036854775808"):
        export_rlinf(tmp_path / "y", [(0, given)], seed=1)


@pytest.mark.parametrize("weights_id", ["../../up", "a b", "ünï", "x" * 65, "a_b", "a/b", ".", "a\n"])
def test_an_id_of_weights_that_makes_no_file_name_becomes_a_uuid(tmp_path: Path, weights_id: str) -> None:
    given = Trajectory(**values() | {"model_weights_id": weights_id})
    export_rlinf(tmp_path / "x", [(0, given)], seed=1)
    expected = str(uuid.uuid5(uuid.NAMESPACE_DNS, weights_id))
    assert (tmp_path / "x" / f"trajectory_0_{expected}.pt").is_file()
    assert len(list((tmp_path / "x").iterdir())) == 3
    assert open_rlinf(tmp_path / "x").read(0).model_weights_id == expected


def test_without_an_id_of_weights_it_is_the_one_that_rlinf_derives(tmp_path: Path) -> None:
    versions = torch.rand(4, 2, 3)
    without = Trajectory(**values() | {"model_weights_id": ""})
    export_rlinf(tmp_path / "x", [(0, without)], seed=1)
    assert open_rlinf(tmp_path / "x").names == {0: f"trajectory_0_{ZEROS_ID}.pt"}
    without.versions = versions
    export_rlinf(tmp_path / "y", [(0, without)], seed=1)
    expected = uuid.uuid5(uuid.NAMESPACE_DNS, versions.numpy().tobytes().hex())
    assert open_rlinf(tmp_path / "y").names == {0: f"trajectory_0_{expected}.pt"}


@pytest.mark.parametrize("kind", ["file", "directory", "link", "dangling link"])
def test_an_existing_target_is_refused_and_not_touched(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "x"
    if kind == "file":
        target.write_text("mine")
    elif kind == "directory":
        target.mkdir()
    else:
        target.symlink_to(tmp_path if kind == "link" else tmp_path / "missing")
    with pytest.raises(InvalidInput, match="exists already"):
        export_rlinf(target, [(0, Trajectory(**values()))], seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"prev_values": torch.zeros(4, 2)}, r"trajectory 1 has prev_values of F32 \[\], those before it have no prev"),
        ({"actions": None}, r"trajectory 1 has no actions, those before it have actions of F32 \[3\]"),
        ({"actions": torch.zeros(4, 2, 4)}, r"has actions of F32 \[4\], those before it have actions of F32 \[3\]"),
        ({"actions": torch.zeros(4, 2, 3).double()}, r"has actions of F64 \[3\]"),
    ],
)
def test_trajectories_with_other_fields_are_refused(tmp_path: Path, second: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidTrajectory, match=says):
        export_rlinf(tmp_path / "x", [(0, Trajectory(**values())), (1, Trajectory(**values(1) | second))], seed=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ids", [(0, 0), (-1,), (True,), ("0",), (2**63,), (1.0,)])
def test_ids_that_cannot_be_are_refused(tmp_path: Path, ids: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidInput, match="the id"):
        export_rlinf(tmp_path / "x", [(number, Trajectory(**values())) for number in ids], seed=1)
    assert list(tmp_path.iterdir()) == []


def test_what_makes_no_trajectory_or_no_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrajectory, match="rewards are missing"):
        export_rlinf(tmp_path / "x", [(0, Trajectory())], seed=1)
    with pytest.raises(InvalidTrajectory, match="rewards is a list or text"):
        export_rlinf(tmp_path / "x", [(0, Trajectory(rewards=[["a"]]))], seed=1)
    with pytest.raises(InvalidInput, match=r"seed is 1\.5"):
        export_rlinf(tmp_path / "x", [], seed=1.5)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="file is a file"):
        export_rlinf(tmp_path / "file" / "x", [], seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError, GeneratorExit])
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, interruption: type[BaseException]) -> None:
    def interrupted() -> Iterator[tuple[int, Trajectory]]:
        yield 0, Trajectory(**values())
        raise interruption

    with pytest.raises(interruption):
        export_rlinf(tmp_path / "x", interrupted(), seed=1)
    assert list(tmp_path.iterdir()) == []


class FailingAt(FileOps):
    """Fails at the n-th operation that changes something."""

    def __init__(self, at: int) -> None:
        self.at, self.done = at, 0
        self.replaced = False

    def _count(self) -> None:
        self.done += 1
        if self.done == self.at:
            raise OSError(errno.ENOSPC, "no space left")

    def make_directory(self, path: Path) -> None:
        self._count()
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self._count()
        return super().create(path)

    def write(self, descriptor: int, parts: Any) -> None:
        super().write(descriptor, [bytes(parts[0])[:10]])
        self._count()
        super().write(descriptor, [bytes(parts[0])[10:]])

    def sync(self, descriptor: int) -> None:
        self._count()
        super().sync(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        self._count()
        super().replace(source, target)
        self.replaced = True


def test_whatever_operation_fails_the_target_is_complete_or_not_there(tmp_path: Path) -> None:
    given = [(number, Trajectory(**values(number))) for number in range(2)]
    counting = FailingAt(0)
    export_rlinf(tmp_path / "whole", given, seed=1, files=counting)
    assert counting.done > 10
    for at in range(1, counting.done + 1):
        files = FailingAt(at)
        with pytest.raises(CheckpointError, match="no space left"):
            export_rlinf(tmp_path / "x", given, seed=1, files=files)
        if files.replaced:  # the very last sync; the message says so
            assert len(list(open_rlinf(tmp_path / "x"))) == 2
        else:
            assert [path.name for path in tmp_path.iterdir()] == ["whole"], at
    assert files.replaced
