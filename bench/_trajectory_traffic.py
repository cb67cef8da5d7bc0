"""Adding and sampling at the same time, from threads: no call may fail, and no row may be made of two."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from _harness import Verdict, table
from forebay.trajectory import TrajectoryReplayBuffer

__all__ = ["together"]

ENVS, STEPS, SIDE = 2, 20, 32
JOIN_S, SWITCH_S = 30.0, 1e-5


class Traffic:
    """Two threads that add and two that sample. Every field of a row says which row it is.

    Trajectories differ in length, and Python changes threads as often as it can: more goes wrong that way.
    """

    def __init__(self, buffer: TrajectoryReplayBuffer) -> None:
        self._buffer = buffer
        self._stop = threading.Event()
        self.errors: list[str] = []
        self.added = self.sampled = self.torn = 0
        self._numbers: dict[int, int] = {}  # by id
        self._seen: list[dict[int, int]] = [{}, {}]
        self._lock = threading.Lock()
        self._tags = np.arange((STEPS + 1) * ENVS).reshape(STEPS + 1, ENVS)

    def run(self, seconds: float) -> None:
        works = [(self._write, 0), (self._write, 1), (self._read, 0), (self._read, 1)]
        threads = [threading.Thread(target=self._guarded, args=work, daemon=True) for work in works]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        self._stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join(JOIN_S)
            if thread.is_alive():
                self.errors.append(f"a thread still hangs after {JOIN_S:g} s")
        for seen in self._seen:
            self.torn += sum(self._numbers[k] != number for k, number in seen.items())

    def _guarded(self, work: Callable[[int], None], k: int) -> None:
        while not self._stop.is_set():
            try:
                work(k)
            except Exception as error:
                with self._lock:
                    self.errors.append(f"{type(error).__name__}: {error}")

    def _write(self, k: int) -> None:
        number = k
        while not self._stop.is_set():
            tags = number * self._tags.size + self._tags[: number % STEPS + 2]
            image = np.empty((*tags.shape, SIDE, SIDE, 3), np.uint8)
            image[:] = _byte(tags)[..., None, None, None]
            states = np.repeat(tags[..., None], 8, axis=2)
            given = {
                "curr_obs": {"states": states[:-1], "image": image[:-1]},
                "next_obs": {"states": states[1:], "image": image[1:]},
                "actions": states[:-1, :, :4],
                "rewards": _small(tags[:-1]),
            }
            [found] = self._buffer.add_trajectories([given])
            with self._lock:
                self._numbers[found] = number
                self.added += 1
            number += 2

    def _read(self, k: int) -> None:
        self._buffer.wait_ready(1, timeout_s=10)
        seen = self._seen[k]
        while not self._stop.is_set():
            batch = self._buffer.sample(256)
            states, following = batch["curr_obs"]["states"].numpy(), batch["next_obs"]["states"].numpy()
            tag = states[:, 0]
            good = (states == tag[:, None]).all(axis=1) & (following == tag[:, None] + ENVS).all(axis=1)
            good &= (batch["actions"].numpy() == tag[:, None]).all(axis=1)
            good &= batch["rewards"].numpy() == _small(tag)
            images, next_images = batch["curr_obs"]["image"].numpy(), batch["next_obs"]["image"].numpy()
            good &= (images.reshape(256, -1) == _byte(tag)[:, None]).all(axis=1)
            good &= (next_images.reshape(256, -1) == _byte(tag + ENVS)[:, None]).all(axis=1)
            number, place = np.divmod(tag, self._tags.size)
            good &= place == batch["step"].numpy() * ENVS + batch["env"].numpy()
            for found, mine in zip(batch["trajectory_id"].tolist(), number.tolist(), strict=True):
                good &= seen.setdefault(found, mine) == mine
            with self._lock:
                self.torn += int(np.count_nonzero(~good))
                self.sampled += 1


def _byte(tags: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (tags * 37 % 251).astype(np.uint8)


def _small(tags: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (tags % 2**20).astype(np.float32)


def together(seconds_in_memory: float, seconds_on_disk: float, directory: Path, verdict: Verdict) -> None:
    """A small window, so that every row is soon used again."""
    shown = []
    on_disk: dict[str, Any] = {"auto_save": True, "auto_save_path": directory / "threads", "retain": "window"}
    for name, seconds, options in (("in memory", seconds_in_memory, {}), ("with files", seconds_on_disk, on_disk)):
        with TrajectoryReplayBuffer(sample_window_size=8, **options) as buffer:
            traffic = Traffic(buffer)
            traffic.run(seconds)
        shown.append(
            [name, f"{seconds:g} s", f"{traffic.added:,}", f"{traffic.sampled:,}", str(len(traffic.errors)),
             str(traffic.torn)]
        )  # fmt: skip
        for line in sorted(set(traffic.errors))[:5]:
            print(f"error: {line}")
        verdict.at_most(f"threads, {name}: errors", len(traffic.errors), 0, "")
        verdict.at_most(f"threads, {name}: torn rows", traffic.torn, 0, "")
        verdict.figures[f"threads, {name}"] = {"value": [traffic.added, traffic.sampled], "unit": "adds, samples"}
    print("two threads add and two sample 256 rows each, a window of 8 trajectories (asked: 0 errors, 0 torn rows)")
    table(["where", "time", "added", "samples", "errors", "torn rows"], shown)
