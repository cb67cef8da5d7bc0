"""Directories of trajectories for the tests of the tools: every value says which trajectory it is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forebay.checkpoint.files import FileOps
from forebay.trajectory import Trajectory, TrajectoryReplayBuffer
from forebay.trajectory.checkpoint import open_contents
from forebay.trajectory.reader import Reader

__all__ = ["Interrupted", "make", "read", "snapshot", "tag_of", "tags", "write", "write_ranks"]

Kind = Literal["checkpoint", "store"]


def make(tag: int, steps: int = 3, envs: int = 2, **more: Any) -> Trajectory:
    """A trajectory whose every value follows from its tag; the second half of the observations is an auto-reset's."""
    t, b = np.meshgrid(np.arange(steps), np.arange(envs), indexing="ij")
    states = (tag * 100 + t * 10 + b)[..., None].astype(np.float32)
    following = states + 10
    following[steps // 2] += 0.5
    obs = {"states": states, "task": [f"task {tag % 3}"] * envs}
    values: dict[str, Any] = {
        "rewards": np.full((steps, envs), tag, np.float32),
        "actions": np.concatenate([states, -states], axis=-1),
        "dones": np.zeros((steps, envs), bool),
        "curr_obs": obs,
        "next_obs": {"states": following, "task": obs["task"]},
        "model_weights_id": f"weights-{tag % 4}",
        "max_episode_length": steps,
    }
    return Trajectory(**(values | more))


def write(path: Path, trajectories: Sequence[Trajectory], *, kind: Kind = "checkpoint", rank: int = 0) -> Path:
    """A checkpoint or a store in `path`/rank_<rank>, of several segments."""

    class Small(TrajectoryReplayBuffer):
        _segment_bytes = 600

    store = kind == "store"
    with Small(
        rank=rank, sample_window_size=0, auto_save=store, auto_save_path=path if store else "", arrays="numpy"
    ) as buffer:
        for trajectory in trajectories:
            buffer.add_trajectories([trajectory])
        if not store:
            buffer.save_checkpoint(path)
    return path / f"rank_{rank}"


def write_ranks(path: Path, counts: Sequence[int], *, kinds: Sequence[Kind] = ("checkpoint",), **more: Any) -> Path:
    """Rank r has trajectories with the tags 100 r, 100 r + 1, ..."""
    for rank, count in enumerate(counts):
        kind = kinds[rank % len(kinds)]
        write(path, [make(100 * rank + k, **more) for k in range(count)], kind=kind, rank=rank)
    return path


def read(directory: Path, part: str = "replay") -> dict[int, Any]:
    """Every trajectory by id, each checked against its crc."""
    with Reader(open_contents(directory, part)) as reader:
        ids = reader.contents.listing.rows["id"].tolist()
        return {number: reader.trajectory(k) for k, number in enumerate(ids)}


def tag_of(trajectory: Trajectory) -> int:
    """The tag, if everything in the trajectory agrees with it."""
    assert trajectory.rewards is not None
    tag = int(trajectory.rewards[0, 0])
    steps, envs = trajectory.rewards.shape[:2]
    expected = make(tag, steps, envs)
    assert np.array_equal(np.asarray(trajectory.actions), np.asarray(expected.actions))
    assert trajectory.model_weights_id == expected.model_weights_id
    for side in ("curr_obs", "next_obs"):
        found, wanted = getattr(trajectory, side), getattr(expected, side)
        assert (found["states"] == wanted["states"]).all()
        assert found["task"] == [wanted["task"]] * steps
    return tag


def tags(directory: Path) -> dict[int, int]:
    """The tag of every id."""
    return {number: tag_of(trajectory) for number, trajectory in read(directory).items()}


def snapshot(path: Path) -> dict[str, bytes]:
    """Every file below a path; without what SQLite and a lock may leave beside a catalogue that was read."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and not file.name.endswith(("-wal", "-shm", ".lock"))
    }


class Interrupted(FileOps):
    """Raises at the n-th operation, before it is done or after, once or from then on."""

    def __init__(self, at: int | None, error: Callable[[], BaseException], *, after: bool, for_good: bool) -> None:
        self.calls: list[str] = []
        self._at, self._error, self._after, self._for_good = at, error, after, for_good

    def _count(self, name: str) -> None:
        self.calls.append(name)
        done = len(self.calls) - 1
        if self._at is not None and (done >= self._at if self._for_good else done == self._at):
            raise self._error()


def _counted(name: str) -> Callable[..., Any]:
    def call(self: Interrupted, *arguments: Any) -> Any:
        if self._after or name == "close":  # a close that fails has closed
            result = getattr(FileOps, name)(self, *arguments)
            self._count(name)
            return result
        self._count(name)
        return getattr(FileOps, name)(self, *arguments)

    return call


for _name in [name for name in vars(FileOps) if not name.startswith("_")]:
    setattr(Interrupted, _name, _counted(_name))
