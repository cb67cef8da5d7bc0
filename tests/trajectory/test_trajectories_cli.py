"""The command `forebay trajectories` as a shell sees it: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner, Result

from forebay import FIFOReplayPolicy, MemoryStorage, ReplayBuffer
from forebay.cli import main
from forebay.trajectory import TrajectoryReplayBuffer
from tests.processes import finished, started
from tests.trajectory.directories import make, snapshot, tags, write, write_ranks


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    return write_ranks(tmp_path / "ranks", [3, 4], kinds=("checkpoint", "store"))


def run(*arguments: str | Path | int) -> Result:
    return CliRunner().invoke(main, ["trajectories", *map(str, arguments)])


def told(*arguments: str | Path | int) -> Any:
    """What a command says as JSON; nothing else is on stdout."""
    result = run(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def paths(source: Path, target: Path) -> list[str | Path]:
    return ["--source-path", source, "--save-path", target]


# --- looking ------------------------------------------------------------------------------------------


def test_info_shows_counts_fields_and_statistics(ranks: Path) -> None:
    found = told("info", ranks)
    assert (found["kind"], found["parts"]["replay"]["trajectories"]) == ("mixed", 7)
    result = run("info", ranks)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert "trajectories  7, ids 0 to 3" in lines
    assert "transitions   42 to draw, of 42 steps" in lines
    assert ["curr_obs.task", "STRING", "[]"] in [line.split() for line in lines]
    assert "actions over 42 transitions" in lines
    (mean,) = [line for line in lines if line.startswith("  mean") and len(line.split()) == 3]
    assert float(mean.split()[1]) == pytest.approx(
        found["parts"]["replay"]["statistics"]["actions"]["mean"][0], rel=1e-3
    )


def test_sample_shows_keys_shapes_dtypes_and_speed(ranks: Path) -> None:
    found = told("sample", ranks, "--num-chunks", 64, "--cache-size", 10, "--enable-cache")
    assert found["keys"]["actions"] == {"shape": [64, 2], "dtype": "float32"}
    assert found["keys"]["curr_obs.task"] == {"shape": [64], "dtype": "str"}
    assert found["keys"]["trajectory_id"] == {"shape": [64], "dtype": "int64"}
    assert (found["trajectories"], found["transitions"]) == (7, 42)
    assert found["rows_per_second"] > 0
    result = run("sample", ranks, "--sample-window-size", 2)
    assert ["next_obs.states", "[1024,", "1]", "float32"] in [line.split() for line in result.stdout.splitlines()]
    assert "1,024 rows out of 12 of 2 trajectories: " in result.stdout


def test_sample_works_without_torch(ranks: Path) -> None:
    code = "import sys; sys.modules['torch'] = None\nfrom forebay.cli import main; main()"
    done = finished("-c", code, "trajectories", "sample", ranks, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["keys"]["rewards"] == {"shape": [1024], "dtype": "float32"}


def test_sampling_an_empty_directory_says_so(tmp_path: Path) -> None:
    write_ranks(tmp_path, [0])
    result = run("sample", tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the buffer is empty" in result.stderr


def test_show_makes_a_page(ranks: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("show", ranks, "--trajectory", 3, "--out", page)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Trajectory 3" in page.read_text()
    assert result.stdout.startswith(f"{page}: ")
    again = run("show", ranks, "--trajectory", 3, "--out", page)
    assert (again.exit_code, "already exists" in again.stderr) == (1, True)
    assert "say which rank" in run("show", ranks, "--trajectory", 1, "--out", tmp_path / "b").stderr
    assert run("show", ranks, "--trajectory", 1, "--rank", 0, "--out", tmp_path / "b").exit_code == 0
    assert "there is no trajectory 9" in run("show", ranks, "--trajectory", 9, "--out", tmp_path / "c").stderr


def test_verify_tells_whole_from_damaged(ranks: Path) -> None:
    result = run("verify", ranks)
    assert result.exit_code == 0
    assert result.stdout.endswith(f"{ranks}: whole\n")
    assert told("verify", ranks)["whole"] is True
    path = next((ranks / "rank_0").glob("*.col"))
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    result = run("verify", ranks)
    assert result.exit_code == 3
    assert "1 of 3 trajectories do not have their checksum: 0" in result.stdout
    found = json.loads(run("verify", ranks, "--json").stdout)
    assert (found["whole"], [one["name"] for one in found["findings"] if one["level"] == "error"]) == (
        False,
        ["rank_0 rows"],
    )


# --- making -------------------------------------------------------------------------------------------


def test_merge_with_and_without_copy(ranks: Path, tmp_path: Path) -> None:
    before = snapshot(ranks)
    assert told("merge", *paths(ranks, tmp_path / "out"), "--copy", "--dry-run")["done"] is False
    assert not (tmp_path / "out").exists()
    found = told("merge", *paths(ranks, tmp_path / "out"), "--copy")
    assert (found["trajectories"], found["removed"], snapshot(ranks)) == (7, [], before)
    assert list(tags(tmp_path / "out").values()) == [0, 100, 1, 101, 2, 102, 103]
    result = run("merge", *paths(ranks, tmp_path / "moved"), "--drop", "actions")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("merged 7 trajectories (42 transitions, ")
    assert lines[0].endswith(f"of 2 directories into {tmp_path / 'moved'}")
    assert lines[1:] == [
        "rewrote 7 trajectories, because their fields change",
        f"removed {ranks / 'rank_0'}",
        f"removed {ranks / 'rank_1'}",
    ]
    assert snapshot(ranks) == {}


def test_several_sources_can_be_named(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one", [make(1)]), write(tmp_path / "other", [make(2)], kind="store")
    result = run("merge", "--source-path", one, "--source-path", other, "--save-path", tmp_path / "out")
    assert result.exit_code == 0
    assert tags(tmp_path / "out") == {0: 1, 1: 2}


def test_differing_fields_are_named_filled_and_dropped(tmp_path: Path) -> None:
    write(tmp_path / "ranks", [make(0)], rank=0)
    write(tmp_path / "ranks", [make(1, versions=np.ones((3, 2), np.int64), prev_values=np.ones((3, 2)))], rank=1)
    arguments = paths(tmp_path / "ranks", tmp_path / "out")
    result = run("merge", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "prev_values is F64 [T, B] in" in result.stderr
    result = run("merge", *arguments, "--fill", "versions=-1", "--drop", "prev_values")
    assert result.exit_code == 0
    assert tags(tmp_path / "out") == {0: 0, 1: 1}


def test_split_leaves_both_sides_complete(ranks: Path, tmp_path: Path) -> None:
    arguments = [*paths(ranks / "rank_1", tmp_path / "first"), "--split-count", 3]
    before = snapshot(tmp_path)
    dry = run("split", *arguments, "--dry-run")
    assert dry.stdout.splitlines()[1] == f"1 trajectories would stay in {ranks / 'rank_1'}"
    assert (dry.exit_code, snapshot(tmp_path)) == (0, before)
    found = told("split", *arguments)
    assert (found["trajectories"], found["remaining"]) == (3, 1)
    assert (tags(tmp_path / "first"), tags(ranks / "rank_1")) == ({0: 100, 1: 101, 2: 102}, {3: 103})
    result = run("split", *paths(ranks / "rank_0", tmp_path / "copied"), "--split-count", 1, "--copy")
    assert (result.exit_code, len(tags(ranks / "rank_0"))) == (0, 3)


def test_import_and_export(ranks: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    for command in ("export", "import"):
        result = run(command, ranks, "--save-path", tmp_path / "rlinf", "--dry-run")
        assert result.exit_code == (0 if command == "export" else 1)
    assert snapshot(tmp_path) == before
    result = run("export", ranks, "--save-path", tmp_path / "rlinf", "--trajectories", "1:")
    assert result.stdout.splitlines() == [
        f"exported 6 trajectories with 36 transitions to {tmp_path / 'rlinf'}",
        "RLinf does not see: curr_obs.task, next_obs.task",
    ]
    assert told("import", tmp_path / "rlinf", "--save-path", tmp_path / "back")["trajectories"] == 6
    assert list(tags(tmp_path / "back").values()) == [100, 1, 101, 2, 102, 103]
    assert told("info", tmp_path / "rlinf")["kind"] == "rlinf"
    result = run("info", tmp_path / "rlinf")
    assert (result.exit_code, "kind          rlinf" in result.stdout) == (0, True)
    assert told("sample", tmp_path / "rlinf", "--num-chunks", 8)["trajectories"] == 6
    assert run("show", tmp_path / "rlinf", "--trajectory", 2, "--out", tmp_path / "p.html").exit_code == 0
    assert run("verify", tmp_path / "rlinf").exit_code == 0


# --- what goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "info",
        "merge --source-path a",
        "merge --save-path a",
        "merge --source-path a --save-path b --fill versions",
        "merge --source-path a --save-path b --fill =3",
        "merge --source-path a --save-path b --skip-damaged",
        "split --source-path a --save-path b",
        "split --source-path a --save-path b --split-count 0",
        "split --source-path a --save-path b --split-count x",
        "sample a --num-chunks 0",
        "show a --trajectory -1 --out b",
        "show a --out b",
        "export a --save-path b --trajectories 5",
        "export a --save-path b --trajectories a:b",
        "verify a --fix",
    ],
)
def test_wrong_arguments_are_usage_errors(line: str) -> None:
    assert run(*line.split()).exit_code == 2


def test_an_existing_target_and_a_missing_source_are_refused(ranks: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    before = snapshot(tmp_path)
    for line in ("merge --source-path", "split --split-count 1 --source-path", "import", "export"):
        result = run(*line.split(), ranks, "--save-path", tmp_path / "there")
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert "exists already" in result.stderr
        result = run(*line.split(), tmp_path / "missing", "--save-path", tmp_path / "new")
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    for name in ("info", "sample", "verify"):
        result = run(name, tmp_path / "missing")
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    result = run("split", *paths(ranks / "rank_0", tmp_path / "new"), "--split-count", 3)
    assert (result.exit_code, "there are 3: expected 1 to 2" in result.stderr) == (1, True)
    assert snapshot(tmp_path) == before


def test_damaged_data_ends_with_exit_code_3(ranks: Path, tmp_path: Path) -> None:
    path = next((ranks / "rank_0").glob("*.col"))
    data = bytearray(path.read_bytes())
    data[1] ^= 255
    path.write_bytes(data)
    before = snapshot(tmp_path)
    commands: list[list[str | Path | int]] = [
        ["merge", *paths(ranks, tmp_path / "out")],
        ["split", *paths(ranks / "rank_0", tmp_path / "out"), "--split-count", 1],
        ["show", ranks, "--trajectory", 0, "--rank", 0, "--out", tmp_path / "p.html"],
    ]
    for command in commands:
        result = run(*command)
        assert (result.exit_code, result.stdout) == (3, ""), command
        assert "trajectory 0 of" in result.stderr
    assert snapshot(tmp_path) == before
    result = run("merge", *paths(ranks, tmp_path / "out"), "--copy", "--skip-damaged")
    assert result.exit_code == 0
    assert "left out 1 damaged trajectories" in result.stdout
    (ranks / "rank_0" / "manifest.json").write_text("{}")
    for name in ("info", "sample", "verify"):
        assert run(name, ranks / "rank_0").exit_code == 3


def test_a_store_in_use_is_refused_in_one_line(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store", arrays="numpy") as buffer:
        buffer.add_trajectories([make(0), make(1)], durable=True)
        result = run("merge", *paths(tmp_path / "store", tmp_path / "out"), "--copy")
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert f"process {os.getpid()} on " in result.stderr
        for command in ("info", "sample", "verify"):
            assert run(command, tmp_path / "store").exit_code == 0


def test_an_interrupt_ends_with_130(ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.trajectory.tools.write_checkpoint", Mock(side_effect=KeyboardInterrupt))
    before = snapshot(tmp_path)
    result = run("merge", *paths(ranks, tmp_path / "out"))
    assert (result.exit_code, result.stderr) == (130, "forebay: interrupted\n")
    assert snapshot(tmp_path) == before


def test_ctrl_c_in_the_middle_of_a_merge(ranks: Path, tmp_path: Path) -> None:
    code = """
import threading
import forebay.trajectory.tools as tools
def slow(*arguments):
    print("checking", flush=True)
    threading.Event().wait()
tools._check_result = slow
from forebay.cli import main
main()
"""
    before = snapshot(tmp_path)
    with started("-c", code, "trajectories", "merge", *paths(ranks, tmp_path / "out")) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "checking\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate()
    assert (child.returncode, errors) == (130, "forebay: interrupted\n")
    assert snapshot(tmp_path) == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ranks"]


def test_each_warning_of_the_library_is_one_line(tmp_path: Path) -> None:
    directory = write(tmp_path, [make(tag) for tag in range(9)], kind="store")
    next(directory.glob("*-0.col")).unlink()
    result = run("info", tmp_path)
    assert (result.exit_code, "are left out; see verify" in result.stdout) == (0, True)
    assert result.stderr.splitlines()
    assert all(line.startswith("forebay: ") for line in result.stderr.splitlines())
    assert logging.getLogger("forebay.trajectory").handlers == []


# --- its neighbours -----------------------------------------------------------------------------------


def test_doctor_examines_trajectories_too(ranks: Path) -> None:
    result = CliRunner().invoke(main, ["doctor", str(ranks), "--json"])
    assert result.exit_code == 0
    assert "rank_1 catalogue" in [finding["name"] for finding in json.loads(result.stdout)["findings"]]
    next((ranks / "rank_0").glob("*.col")).unlink()
    assert CliRunner().invoke(main, ["doctor", str(ranks)]).exit_code == 1
    assert CliRunner().invoke(main, ["doctor", str(ranks), "--fix"]).exit_code == 2


def test_checkpoint_points_to_this_command(ranks: Path) -> None:
    for command in ("verify", "info"):
        for path in (ranks, ranks / "rank_0", ranks / "rank_1"):
            result = CliRunner().invoke(main, ["checkpoint", command, str(path)])
            assert (result.exit_code, result.stdout) == (1, "")
            assert result.stderr == f"forebay: {path} holds trajectories, not groups; use `forebay trajectories`\n"


async def test_a_checkpoint_of_groups_is_not_taken_for_one_of_trajectories(tmp_path: Path) -> None:
    async with ReplayBuffer(FIFOReplayPolicy(), MemoryStorage()) as buffer:
        await buffer.save(tmp_path / "groups", model_step=1)
    before = snapshot(tmp_path)
    for command in ("info", "verify", "sample"):
        result = run(command, tmp_path / "groups")
        assert result.exit_code in (1, 3)
        assert "forebay-trajectories" in result.stderr + result.stdout
    assert run("merge", *paths(tmp_path / "groups", tmp_path / "out")).exit_code in (1, 3)
    assert snapshot(tmp_path) == before
    assert CliRunner().invoke(main, ["doctor", str(tmp_path / "groups")]).exit_code == 1
