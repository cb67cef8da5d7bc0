"""Is it whole, what is in it, and the way to RLinf and back: what `verify`, `info`, import and export tell."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.core.report import Finding, Level
from forebay.errors import DamagedData, ForebayError, InvalidInput, InvalidTrajectory
from forebay.trajectory import Trajectory, TrajectoryReplayBuffer
from forebay.trajectory.checkpoint import open_contents
from forebay.trajectory.checkup import is_trajectories, verify
from forebay.trajectory.exchange import export_directory, import_directory
from forebay.trajectory.lookup import find_trajectory
from forebay.trajectory.schema import NEXT
from forebay.trajectory.spool import Spool
from forebay.trajectory.summary import info
from tests.trajectory.directories import make, read, snapshot, tag_of, tags, write, write_ranks


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def wrong(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: str(finding.level) for finding in findings if finding.level is not Level.OK}


# --- verify -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("checkpoint",), ("store",)], ids="".join)
def test_verify_accepts_intact_directories_and_changes_nothing(tmp_path: Path, kinds: Any) -> None:
    write_ranks(tmp_path, [3, 0, 9], kinds=kinds)
    before = snapshot(tmp_path)
    calls: list[tuple[int, int]] = []
    findings = verify(tmp_path, lambda done, total: calls.append((done, total)))
    assert wrong(findings) == {}
    assert {"rank_0 rows", "rank_1 rows", "rank_2 rows"} <= {finding.name for finding in findings}
    assert calls[-1] == (12, 12)
    assert snapshot(tmp_path) == before
    assert is_trajectories(tmp_path)
    assert is_trajectories(tmp_path / "rank_0")


@pytest.mark.parametrize("kind", ["checkpoint", "store"])
def test_a_changed_byte_anywhere_is_found(tmp_path: Path, kind: Any) -> None:
    directory = write(tmp_path, [make(tag) for tag in range(6)], kind=kind)
    names = [name for name in snapshot(directory) if name != "catalogue.db"]  # which is checked on its own
    for name in names:
        data = (directory / name).read_bytes()
        for position in sorted({0, len(data) // 3, len(data) // 2, len(data) - 1}):
            changed = bytearray(data)
            changed[position] ^= 1
            (directory / name).write_bytes(changed)
            assert "error" in wrong(verify(directory)).values(), (name, position)
        (directory / name).write_bytes(data[:-1])
        assert "error" in wrong(verify(directory)).values(), f"{name} cut off"
        (directory / name).unlink()
        if name != "manifest.json":
            assert "error" in wrong(verify(directory)).values(), f"{name} missing"
        (directory / name).write_bytes(data)
    assert wrong(verify(directory)) == {}


def test_a_damaged_catalogue_is_found(tmp_path: Path) -> None:
    directory = write(tmp_path, [make(tag) for tag in range(6)], kind="store")
    catalogue = directory / "catalogue.db"
    data = catalogue.read_bytes()
    for start in range(0, len(data), 4096):
        catalogue.write_bytes(data[:start] + b"\x55" * 4096 + data[start + 4096 :])
        found = wrong(verify(directory))
        assert "error" in found.values(), start
    catalogue.write_bytes(data)
    assert wrong(verify(directory)) == {}
    connection = sqlite3.connect(catalogue, isolation_level=None)
    connection.execute("UPDATE trajectories SET first_step = first_step + 1 WHERE id = 3")
    connection.close()
    assert "error" in wrong(verify(directory)).values()


def test_damaged_trajectories_are_named(tmp_path: Path) -> None:
    directory = write(tmp_path, [make(tag) for tag in range(30)])
    path = next(directory.glob("*-1.col"))
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    data[-1] ^= 1
    path.write_bytes(data)
    (found,) = [finding for finding in verify(tmp_path) if finding.level is Level.ERROR]
    assert (found.name, found.message) == ("rank_0 rows", "2 of 30 trajectories do not have their checksum: 0, 29")
    assert "--skip-damaged" in (found.advice or "")


def test_wrong_numbers_are_found_behind_valid_checksums(tmp_path: Path) -> None:
    changes: dict[str, tuple[str, str, int]] = {
        "leads to an observation that it does not have": ("steps", "#next", 99),
        "has other steps to draw than its listing says": ("steps", "#valid", 0),
        "has a text that there is none of": ("observations", "task", 77),
    }
    for problem, (table_name, field, value) in changes.items():
        with TrajectoryReplayBuffer(arrays="numpy") as buffer:
            buffer.add_trajectories([make(0), make(1)])
            assert buffer._window is not None
            table = getattr(buffer._window.space, table_name)
            for strip, columns in zip(table.strips, table.columns, strict=True):
                for k, (path, _, _) in enumerate(strip.fields):
                    if path == (field,):
                        columns[k][0] = value
            buffer.save_checkpoint(tmp_path / field)
        (found,) = [finding for finding in verify(tmp_path / field) if finding.level is Level.ERROR]
        assert found.message == f"1 of 2 trajectories: 0: each {problem}"
    assert NEXT == ("#next",)


def test_leftovers_and_missing_ranks_are_warnings(tmp_path: Path) -> None:
    write_ranks(tmp_path, [2, 2, 2], kinds=("checkpoint", "store"))
    for rank in range(3):
        (tmp_path / f"rank_{rank}" / "seg-0123456789abcdef-0.col").write_bytes(b"123")
    (tmp_path / "rank_1").rename(tmp_path / "rank_5")
    found = {finding.name: finding for finding in verify(tmp_path) if finding.level is not Level.OK}
    assert set(found) == {"ranks", "rank_0 leftovers", "rank_2 leftovers", "rank_5 leftovers"}
    assert all(finding.level is Level.WARNING for finding in found.values())
    assert found["ranks"].message == "there are 3 ranks up to 5; of 1, 3, 4 there is nothing"
    assert found["rank_0 leftovers"].message.startswith("1 files with 3 bytes are not in use: seg-0123456789abcdef-0")
    (tmp_path / "rank_1").mkdir()
    assert wrong(verify(tmp_path))["ranks"] == "error"


def test_ranks_with_other_fields_are_a_warning(tmp_path: Path) -> None:
    write(tmp_path, [make(0)], rank=0)
    write(tmp_path, [make(1, versions=np.zeros((3, 2), np.int64))], rank=1)
    assert wrong(verify(tmp_path)) == {"fields": "warning"}


def test_a_store_in_use_can_be_verified(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, arrays="numpy") as buffer:
        buffer.add_trajectories([make(0), make(1)], durable=True)
        found = {finding.name: finding for finding in verify(tmp_path)}
        assert found["rank_0 lock"].message.startswith("open for writing by this process")
        assert found["rank_0 rows"].message == "2 trajectories have their checksum"
        buffer.clear()
        buffer.add_trajectories([make(2)], durable=True)
        assert "2 more were cleared" in str(verify(tmp_path))


def test_a_directory_without_trajectories_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        assert not is_trajectories(path)
        with pytest.raises(InvalidInput, match="there"):
            verify(path)
        with pytest.raises(ForebayError, match="there"):
            info(path)


# --- info ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("checkpoint",), ("checkpoint", "store")], ids="-".join)
def test_info_has_the_figures_of_all_ranks(tmp_path: Path, kinds: Any) -> None:
    write_ranks(tmp_path, [3, 5], kinds=kinds)
    found = info(tmp_path)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["ranks"], found["kind"]) == (2, "checkpoint" if len(kinds) == 1 else "mixed")
    part = found["parts"]["replay"]
    assert (part["trajectories"], part["transitions"], part["steps"]) == (8, 48, 48)
    assert (part["lengths"], part["envs"], part["ids"], part["weights"]) == ([3, 3], [2, 2], [0, 4], 4)
    everything: list[Any] = [make(tag) for tag in (0, 1, 2, 100, 101, 102, 103, 104)]
    assert part["reward_sum"] == sum(float(one.rewards.sum()) for one in everything)
    for name, values in {
        "actions": [one.actions for one in everything],
        "curr_obs.states": [one.curr_obs["states"] for one in everything],
    }.items():
        flat = np.concatenate([np.reshape(value, (6, -1)) for value in values]).astype(np.float64)
        assert part["statistics"][name]["mean"] == pytest.approx(flat.mean(axis=0))
        assert part["statistics"][name]["std"] == pytest.approx(flat.std(axis=0))
    assert set(part["statistics"]) == {"actions", "curr_obs.states"}
    assert {"name": "curr_obs.task", "dtype": "STRING", "shape": []} in part["fields"]
    assert 0 < part["bytes"] < found["bytes_on_disk"]


def test_statistics_cover_drawable_steps_and_finite_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.trajectory.summary._CHUNK_ROWS", 7)
    rng = np.random.default_rng(0)
    kept = []
    trajectories = []
    for _ in range(20):
        states = rng.normal(1e6, 1, (5, 3, 2)).astype(np.float64)
        valid = rng.random((5, 3)) < 0.7
        kept.append(states[valid])
        wide = np.zeros((5, 3, 65), np.float32)
        trajectories.append(
            Trajectory(
                rewards=np.zeros((5, 3)),
                curr_obs={"states": states, "wide": wide},
                actions=valid[..., None],
                valid=valid,
            )
        )
    trajectories[3].curr_obs["states"][0, 0] = np.nan
    if trajectories[3].valid[0, 0]:  # type: ignore[index]
        kept[3][0] = np.nan
    write(tmp_path, trajectories)
    found = info(tmp_path)["parts"]["replay"]
    flat = np.concatenate(kept)
    flat = flat[np.isfinite(flat).all(axis=1)]
    assert found["statistics"]["curr_obs.states"]["mean"] == pytest.approx(flat.mean(axis=0), rel=1e-12)
    assert found["statistics"]["curr_obs.states"]["std"] == pytest.approx(flat.std(axis=0), rel=1e-9)
    assert found["statistics"]["actions"]["mean"] == [1.0]
    assert set(found["statistics"]) == {"actions", "curr_obs.states"}
    assert found["transitions"] == sum(map(len, kept))


def test_info_describes_an_empty_directory(tmp_path: Path) -> None:
    write_ranks(tmp_path, [0])
    found = info(tmp_path)
    assert (found["parts"]["replay"]["trajectories"], found["parts"]["replay"]["statistics"]) == (0, {})
    json.dumps(found, allow_nan=False)


# --- one trajectory -----------------------------------------------------------------------------------


def test_a_trajectory_is_found_by_its_id_and_rank(tmp_path: Path) -> None:
    write_ranks(tmp_path, [2, 3], kinds=("checkpoint", "store"))
    trajectory, facts = find_trajectory(tmp_path, 2)
    assert tag_of(trajectory) == 102
    assert facts["directory"].endswith("rank_1")
    assert tag_of(find_trajectory(tmp_path, 1, rank=1)[0]) == 101
    with pytest.raises(InvalidInput, match="2 ranks have a trajectory 1: rank_0, rank_1; say which rank"):
        find_trajectory(tmp_path, 1)
    with pytest.raises(InvalidInput, match="there is no trajectory 7; there are 5 with ids from 0 to 2"):
        find_trajectory(tmp_path, 7)
    with pytest.raises(InvalidInput, match="has no rank_4"):
        find_trajectory(tmp_path, 1, rank=4)


# --- RLinf --------------------------------------------------------------------------------------------


def test_export_and_import_return_the_same_trajectories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spool, "segment_bytes", 1000)
    write_ranks(tmp_path / "ranks", [6, 5], kinds=("checkpoint", "store"))
    before = snapshot(tmp_path / "ranks")
    exported = export_directory(tmp_path / "ranks", tmp_path / "rlinf")
    assert (exported.trajectories, exported.left_out) == (11, ["curr_obs.task", "next_obs.task"])
    assert wrong(verify(tmp_path / "rlinf")) == {}
    assert info(tmp_path / "rlinf")["parts"]["replay"]["transitions"] == 66
    imported = import_directory(tmp_path / "rlinf", tmp_path / "back")
    assert (imported.trajectories, imported.transitions, imported.missing) == (11, 66, 0)
    assert len(open_contents(tmp_path / "back").segments) > 2
    assert [int(one.rewards[0, 0]) for one in read(tmp_path / "back").values()] == [
        *(0, 100, 1, 101, 2, 102, 3, 103, 4, 104, 5)
    ]
    assert wrong(verify(tmp_path / "back")) == {}
    assert snapshot(tmp_path / "ranks") == before


def test_epochs_survive_export_and_import(tmp_path: Path) -> None:
    write(tmp_path / "source", [make(1, 4, dones=np.zeros((6, 2), bool), next_obs={}), make(2, 4, next_obs={})])
    export_directory(tmp_path / "source", tmp_path / "rlinf")
    import_directory(tmp_path / "rlinf", tmp_path / "back")
    old, new = (open_contents(path).listing for path in (tmp_path / "source" / "rank_0", tmp_path / "back"))
    assert new.rows["epochs"].tolist() == [2, 1]
    assert (old.chains == new.chains).all()


def test_a_range_of_ids_is_exported_and_keeps_them(tmp_path: Path) -> None:
    write(tmp_path / "source", [make(tag) for tag in range(8)])
    assert export_directory(tmp_path / "source", tmp_path / "some", first_id=2, end_id=5).trajectories == 3
    import_directory(tmp_path / "some", tmp_path / "back")
    assert list(tags(tmp_path / "back").items()) == [(2, 2), (3, 3), (4, 4)]
    with pytest.raises(InvalidInput, match="no trajectory has an id from 9 up to 10; there are 0 to 7"):
        export_directory(tmp_path / "source", tmp_path / "none", first_id=9, end_id=10)
    assert not (tmp_path / "none").exists()


def test_ranks_of_rlinf_are_imported_together(tmp_path: Path) -> None:
    for rank in (0, 1, 2, 10):
        source = write(tmp_path / "source", [make(100 * rank + k) for k in range(2)], rank=rank)
        export_directory(source, tmp_path / "rlinf" / f"rank_{rank}")
    before = snapshot(tmp_path / "rlinf")
    planned = import_directory(tmp_path / "rlinf", tmp_path / "back", dry_run=True)
    assert (planned.trajectories, planned.done, (tmp_path / "back").exists()) == (8, False, False)
    import_directory(tmp_path / "rlinf", tmp_path / "back")
    assert list(tags(tmp_path / "back").values()) == [0, 100, 200, 1000, 1, 101, 201, 1001]
    assert snapshot(tmp_path / "rlinf") == before
    assert wrong(verify(tmp_path / "rlinf")) == {}


def test_a_failed_import_leaves_nothing(tmp_path: Path) -> None:
    import torch

    write(tmp_path / "source", [make(tag) for tag in range(3)])
    export_directory(tmp_path / "source", tmp_path / "rlinf")
    last = next((tmp_path / "rlinf").glob("trajectory_2_*.pt"))
    whole = last.read_bytes()
    last.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedData, match="trajectory_2_"):
        import_directory(tmp_path / "rlinf", tmp_path / "back")
    (found,) = [finding for finding in verify(tmp_path / "rlinf") if finding.level is Level.ERROR]
    assert found.message.startswith("2 of 3 trajectories can be read; ")
    torch.save({"rewards": torch.zeros(3, 2)}, last)
    with pytest.raises(InvalidTrajectory, match=r"trajectory_2_.*\.pt: actions is missing"):
        import_directory(tmp_path / "rlinf", tmp_path / "back")
    assert "error" in wrong(verify(tmp_path / "rlinf")).values()
    last.unlink()
    assert import_directory(tmp_path / "rlinf", tmp_path / "back").missing == 1
    assert wrong(verify(tmp_path / "rlinf")) == {"files": "warning"}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["back", "rlinf", "source"]
    with pytest.raises(InvalidInput, match="is not a directory of RLinf's"):
        import_directory(tmp_path / "source", tmp_path / "again")
    with pytest.raises(InvalidInput, match="import it first"):
        export_directory(tmp_path / "rlinf", tmp_path / "again")


def test_a_damaged_trajectory_is_not_exported(tmp_path: Path) -> None:
    directory = write(tmp_path / "source", [make(tag) for tag in range(3)])
    path = next(directory.glob("*.col"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedData, match="trajectory 2 of"):
        export_directory(tmp_path / "source", tmp_path / "rlinf")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]
