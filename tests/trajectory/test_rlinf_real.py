"""Against the real RLinf: its buffer loads what is exported, and what its buffer saves is read, row by row."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.trajectory.data import Trajectory, aligned, dotted
from forebay.trajectory.rlinf import export_rlinf, open_rlinf
from tests.processes import finished

pytestmark = [pytest.mark.slow, pytest.mark.platform("a copy of RLinf")]

BENCH = Path(__file__).parent.parent.parent / "bench"
RLINF = """
import sys, torch
from _rlinf import load_rlinf
rlinf, reason = load_rlinf()
if rlinf is None:
    sys.exit("unavailable: " + reason)
Buffer = rlinf.TrajectoryReplayBuffer
given = torch.load(sys.argv[1], weights_only=True)
trajectories = [rlinf.Trajectory(**fields) for fields in given]
"""


def run_rlinf(program: str, given: list[dict[str, Any]], scratch: Path) -> Any:
    """Run a program with RLinf's classes in a process of its own; what it called `result` comes back."""
    torch.save(given, scratch / "given.pt")
    program = f"{RLINF}\n{program}\ntorch.save(result, sys.argv[2])\n"
    environment = os.environ | {"PYTHONPATH": str(BENCH), "OMP_NUM_THREADS": "1"}
    done = finished("-c", program, scratch / "given.pt", scratch / "result.pt", scratch, env=environment)
    if done.stderr.startswith("unavailable: "):
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return torch.load(scratch / "result.pt", weights_only=True)


def fields_of(number: int, steps: int = 6, envs: int = 3, *, epochs: int = 1, extra: bool = False) -> dict[str, Any]:
    """A trajectory as RLinf's workers make it; `reward` says which row it is."""
    generator = torch.Generator().manual_seed(number)

    def flags() -> Any:
        return torch.rand(steps + epochs, envs, 1, generator=generator) < 0.3

    rows = (number * 1000 + torch.arange(steps * envs)).reshape(steps, envs, 1).double()
    trailing = steps + epochs if extra else steps
    return {
        "max_episode_length": 40,
        "model_weights_id": f"5f0e-{number}",
        "rewards": rows,
        "actions": torch.rand(steps, envs, 4, generator=generator),
        "intervene_flags": torch.rand(steps, envs, 4, generator=generator) < 0.5,
        "terminations": flags(),
        "truncations": flags(),
        "dones": flags(),
        "prev_logprobs": torch.rand(steps, envs, 2, generator=generator).half(),
        "prev_values": torch.rand(trailing, envs, 1, generator=generator),
        "versions": torch.rand(steps, envs, 2, generator=generator),
        "forward_inputs": {"tokens": torch.randint(0, 9, (steps, envs, 5), generator=generator)},
        "curr_obs": {
            "states": torch.rand(steps, envs, 8, generator=generator).bfloat16(),
            "main_images": torch.randint(0, 256, (steps, envs, 5, 4, 3), generator=generator, dtype=torch.uint8),
        },
        "next_obs": {"states": torch.rand(steps, envs, 8, generator=generator).bfloat16()},
    }


def rows_of(trajectory: Trajectory | dict[str, Any]) -> dict[str, list[Any]]:
    """Each field as a list of its rows in RLinf's order, t * B + b."""
    whole = aligned(trajectory)
    count = whole.steps * whole.envs
    return {
        dotted(path): leaf.values.reshape(count, *leaf.shape).tolist()
        for path, leaf in whole.leaves.items()
        if leaf.dtype != "STRING"
    }


def flat_rows(sampled: dict[str, Any]) -> dict[str, list[Any]]:
    """The same of what RLinf sampled; bfloat16 as its bits."""
    rows: dict[str, list[Any]] = {}
    for name, value in sampled.items():
        for key, tensor in value.items() if isinstance(value, dict) else [("", value)]:
            plain = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
            rows[f"{name}.{key}" if key else name] = plain.tolist()
    return rows


def assert_sampled_from(sampled: dict[str, Any], sources: dict[int, dict[str, list[Any]]], count: int) -> None:
    """Every sampled row has, in every field, the values of the step that its reward names."""
    rows = flat_rows(sampled)
    assert len(rows["rewards"]) == count
    fields = next(iter(sources.values()))
    assert rows.keys() == fields.keys()
    for row in range(count):
        number, step = divmod(int(rows["rewards"][row][0]), 1000)
        for name in fields:
            assert rows[name][row] == sources[number][name][step], (name, number, step)


SAVE = """
buffer = Buffer(seed=11, sample_window_size={window}, auto_save={auto_save}, auto_save_path=sys.argv[3] + "/auto")
buffer.add_trajectories(trajectories)
buffer.sample(4)
buffer.close() if {auto_save} else buffer.save_checkpoint(sys.argv[3] + "/saved")
buffer.close()
result = len(buffer)
"""


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_checkpoint_of_rlinf_is_read_row_by_row(tmp_path: Path, epochs: int) -> None:
    given = [fields_of(number, steps=6 - 2 * number, epochs=epochs) for number in range(3)]
    run_rlinf(SAVE.format(window=10, auto_save=False), given, tmp_path)
    found = open_rlinf(tmp_path / "saved")
    assert (len(found), found.seed, found.missing, found.unlisted, found.skipped) == (3, 11, (), (), ())
    for fields, (number, trajectory) in zip(given, found, strict=True):
        assert rows_of(trajectory) == rows_of(fields), number
        assert trajectory.model_weights_id == fields["model_weights_id"]
        assert trajectory.max_episode_length == 40
    assert found.ignored == set()


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_directory_that_rlinf_keeps_while_it_runs_is_read_row_by_row(tmp_path: Path, epochs: int) -> None:
    given = [fields_of(number, epochs=epochs, extra=True) for number in range(3)]
    run_rlinf(SAVE.format(window=10, auto_save=True), given, tmp_path)
    found = open_rlinf(tmp_path / "auto")
    assert (len(found), found.missing, found.unlisted) == (3, (), ())
    for fields, (number, trajectory) in zip(given, found, strict=True):
        assert aligned(trajectory).epochs == epochs
        assert rows_of(trajectory) == rows_of(fields), number


def test_extra_rows_that_rlinf_flattened_are_read_row_by_row(tmp_path: Path) -> None:
    given = [fields_of(number, epochs=2, extra=True) for number in range(3)]
    run_rlinf(SAVE.format(window=10, auto_save=False), given, tmp_path)
    for fields, (number, trajectory) in zip(given, open_rlinf(tmp_path / "saved"), strict=True):
        assert rows_of(trajectory) == rows_of(fields), number


def test_an_ordinary_checkpoint_names_ids_whose_files_left_the_window(tmp_path: Path) -> None:
    given = [fields_of(number) for number in range(5)]
    run_rlinf(SAVE.format(window=2, auto_save=False), given, tmp_path)
    found = open_rlinf(tmp_path / "saved")
    assert found.missing == (0, 1, 2)
    assert [number for number, _ in found] == [3, 4]


LOAD = """
result = {}
for name, options in {
    "cached": dict(sample_window_size=10),
    "from files": dict(sample_window_size=0, enable_cache=False, auto_save=True, auto_save_path=sys.argv[3] + "/own"),
}.items():
    buffer = Buffer(**options)
    buffer.load_checkpoint(sys.argv[3] + "/export")
    result[name] = {"sampled": buffer.sample(40), "size": len(buffer), "samples": buffer.total_samples}
    result[name] |= {"seed": buffer.seed, "next id": buffer._trajectory_counter}
    for number in buffer._trajectory_id_list if name == "cached" else []:
        result[name][number] = buffer._flat_trajectory_cache.get(number)
    buffer.close()
share = Buffer(sample_window_size=10)
share.load_checkpoint(sys.argv[3] + "/export", is_distributed=True, local_rank=1, world_size=2)
result["share"] = list(share._trajectory_id_list)
share.save_checkpoint(sys.argv[3] + "/again")
share.close()
"""


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("epochs", [1, 2])
def test_rlinf_reads_and_samples_an_export_row_by_row(tmp_path: Path, epochs: int, extra: bool) -> None:
    given = {number: fields_of(number, steps=2 + 2 * number, epochs=epochs, extra=extra) for number in (4, 1, 2)}
    trajectories = [(number, Trajectory(**fields)) for number, fields in given.items()]
    done = export_rlinf(tmp_path / "export", trajectories, seed=2**32 + 5)
    assert done.left_out == done.widened == frozenset()
    result = run_rlinf(LOAD, [], tmp_path)
    sources = {number: rows_of(fields) for number, fields in given.items()}
    for name in ("cached", "from files"):
        found = result[name]
        assert (found["size"], found["samples"]) == (done.trajectories, done.transitions) == (3, 60)
        assert (found["seed"], found["next id"]) == (5, 5)
        assert_sampled_from(found["sampled"], sources, 40)
    for number, rows in sources.items():
        assert flat_rows(result["cached"][number]) == rows, number
    assert result["share"] == [2]
    (number, again), *others = open_rlinf(tmp_path / "again")
    assert (number, others) == (2, [])
    assert rows_of(again) == sources[2]


def test_rlinf_drops_what_the_export_reports_and_nothing_else(tmp_path: Path) -> None:
    fields = fields_of(0)
    hidden = {"arm": {"joint": torch.rand(6, 3, 7)}, "task": ["a", "b", "c"]}
    depth = torch.arange(36).reshape(6, 3, 2)
    fuller = fields | {
        "valid": torch.ones(6, 3, dtype=torch.bool),
        "curr_obs": fields["curr_obs"] | hidden | {"depth": depth.to(torch.uint16)},
        "forward_inputs": hidden,
        "model_weights_id": "../step 1",
    }
    done = export_rlinf(tmp_path / "export", [(0, Trajectory(**fuller))], seed=1)
    names = {f"{name}.{key}" for name in ("curr_obs", "forward_inputs") for key in ("arm.joint", "task")}
    assert done.left_out == names | {"valid"}
    assert done.widened == {"curr_obs.depth"}
    result = run_rlinf(LOAD.partition("share =")[0], [], tmp_path)
    seen = fields | {"forward_inputs": {}, "curr_obs": fields["curr_obs"] | {"depth": depth}}
    for name in ("cached", "from files"):
        assert_sampled_from(result[name]["sampled"], {0: rows_of(seen)}, 18)  # RLinf gives no more than there are
    assert rows_of(open_rlinf(tmp_path / "export").read(0)) == rows_of(
        fuller | {"forward_inputs": {}, "curr_obs": seen["curr_obs"] | hidden}
    )


def test_an_empty_export_loads_in_rlinf(tmp_path: Path) -> None:
    export_rlinf(tmp_path / "export", [], seed=1)
    program = "buffer = Buffer(); buffer.load_checkpoint(sys.argv[3] + '/export'); result = len(buffer)"
    assert run_rlinf(program, [], tmp_path) == 0


def test_the_id_of_weights_is_the_one_that_rlinf_derives(tmp_path: Path) -> None:
    given = [fields_of(0) | {"model_weights_id": ""}, fields_of(1) | {"model_weights_id": "", "versions": None}]
    for number, fields in enumerate(given):
        export_rlinf(tmp_path / str(number), [(0, Trajectory(**fields))], seed=1)
    program = """
from rlinf.data.embodied_io_struct import get_model_weights_id
result = [get_model_weights_id(torch.zeros(1) if t.versions is None else t.versions) for t in trajectories]
"""
    derived = run_rlinf(program, given, tmp_path)
    assert [open_rlinf(tmp_path / str(number)).read(0).model_weights_id for number in (0, 1)] == derived
