"""The process that kills itself while it adds, samples and saves trajectories; and what trajectories of tests hold.

The content of a trajectory is a function of its key, which is the id that it gets: `check_batch` and
`check_trajectory` say whether what came out is what went in, bit for bit.

The process writes `try <first> <last>` before it adds, `did <first> <last>` once that is acknowledged, `durable <id>`,
and `saved <next id>` after a checkpoint.
"""

from __future__ import annotations

import os
import random
import threading
import traceback
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forebay.trajectory import Trajectory, TrajectoryReplayBuffer
from tests.doom import Doom

IMAGE_BYTES = 520  # a file of its own


class Buffer(TrajectoryReplayBuffer):
    """With segments so small that every test has several."""

    _segment_bytes = 30_000


def shape(key: int) -> tuple[int, int]:
    return 1 + key % 3, 1 + (key % 4 == 3)


def columns(key: Any, step: Any, env: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Every column of some steps; the arguments are numbers or arrays of one shape."""
    key, step, env = np.broadcast_arrays(*(np.asarray(part, np.int64) for part in (key, step, env)))
    steps = 1 + key % 3
    observed = _observation(key, step, env)
    # Every fifth has a first step after which the environment was reset.
    following = _observation(np.where((key % 5 == 0) & (step == 0), key + 1_000, key), step + 1, env)
    return {
        "rewards": (key % 1_000 + step / 8).astype(np.float32),
        "versions": key.copy(),
        "actions": np.stack([key % 4_096, step + 16 * env, *(key + k for k in range(14))], -1).astype(np.float32),
        "dones": (step == steps - 1) & (key % 2 == 1),
        "state": observed[0],
        "image": observed[1],
        "next_state": following[0],
        "next_image": following[1],
    }


def _observation(key: Any, step: Any, env: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    state = np.stack([key, step, env, *(key + step * k for k in range(21))], -1).astype(np.float32)
    image = (np.asarray(key * 31 + step * 7 + env * 3)[..., None] + np.arange(IMAGE_BYTES)).astype(np.uint8)
    return state, image


def task(key: int) -> str:
    return f"task {key // 4}"


def make(key: int) -> dict[str, Any]:
    """The trajectory of a key."""
    steps, envs = shape(key)
    found = columns(key, np.arange(steps)[:, None], np.arange(envs)[None])
    names = ("rewards", "versions", "actions", "dones")
    return {
        **{name: found[name] for name in names},
        "curr_obs": {"state": found["state"], "image": found["image"], "task": [task(key)] * envs},
        "next_obs": {"state": found["next_state"], "image": found["next_image"]},
        "model_weights_id": f"weights {key // 8}",
        "max_episode_length": 100 + key,
    }


def check_batch(batch: dict[str, Any], *, by_id: bool = True) -> None:
    """Every row is a row of the trajectory of its id, or at least of one trajectory."""
    batch = {
        name: np.asarray(value) if name not in ("curr_obs", "next_obs") else value for name, value in batch.items()
    }
    key = batch["trajectory_id"] if by_id else batch["versions"]
    found = columns(key, batch["step"], batch["env"])
    _compare(found, batch)
    assert batch["curr_obs"]["task"] == [task(number) for number in key.tolist()]


def check_trajectory(found: Trajectory, key: int) -> None:
    steps, envs = shape(key)
    _compare(columns(key, np.arange(steps)[:, None], np.arange(envs)[None]), vars(found))
    assert found.curr_obs["task"] == [[task(key)] * envs] * steps
    assert (found.model_weights_id, found.max_episode_length) == (f"weights {key // 8}", 100 + key)


def _compare(expected: dict[str, np.ndarray[Any, Any]], found: Any) -> None:
    for name, values in expected.items():
        side = "next_obs" if name.startswith("next_") else "curr_obs"
        there = found[name] if name in found else found[side][name.removeprefix("next_")]
        there = np.asarray(there)
        assert (there.dtype, there.shape) == (values.dtype, values.shape), name
        assert there.tobytes() == np.ascontiguousarray(values).tobytes(), f"{name} is torn"


# --- the child ----------------------------------------------------------------------------------------


def main(directory: str, seed: str, retain: str, events: str, calls: str) -> None:
    work(Path(directory), int(seed), "all" if retain == "all" else "window", Doom(int(events), int(calls)))


def work(directory: Path, seed: int, retain: Literal["all", "window"], doom: Doom) -> None:
    """Add until the doom; some of it durable, with checkpoints in between, while another thread samples."""

    def report(word: str, *numbers: int) -> None:
        os.write(1, f"{word} {' '.join(map(str, numbers))}\n".encode())
        doom.event()

    chance = random.Random(seed)
    buffer = Buffer(
        seed=seed,
        cache_size=chance.choice((0, 3)),
        sample_window_size=20,
        auto_save=True,
        auto_save_path=directory / "store",
        retain=retain,
        arrays="numpy",
    )
    key = buffer.get_stats()["next_id"]
    assert isinstance(key, int)
    report("open", key)
    threading.Thread(target=_sample, args=(buffer,), daemon=True).start()
    while True:
        keys = range(key, key + chance.choice((1, 1, 1, 2, 5)))
        report("try", keys[0], keys[-1])
        durable = chance.random() < 0.5
        assert buffer.add_trajectories([make(k) for k in keys], durable=durable) == list(keys)
        key = keys[-1] + 1
        if not durable and chance.random() < 0.2:
            buffer.flush()
            durable = True
        if durable:
            report("did", keys[0], keys[-1])
        report("durable", buffer.durable_id)
        if chance.random() < 0.08:
            buffer.save_checkpoint(directory / "checkpoint")
            report("saved", key)


def _sample(buffer: Buffer) -> None:
    while True:
        if len(buffer):
            try:
                check_batch(buffer.sample(64))
            except BaseException:
                traceback.print_exc()
                os._exit(3)
