"""Weights and optimisers on disk, together with the buffer that they learned from.

Both are written into a directory that gets its name when it is complete, then what is older goes. So a crash at any
moment leaves weights and buffer that belong together. Nothing may be added to the buffer during a save.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from forebay.trajectory import TrajectoryReplayBuffer
from offpolicy.sac import SAC

__all__ = ["Checkpoints"]


class Checkpoints:
    """The last checkpoint of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def latest(self) -> Path | None:
        """The one to resume from; None if there is none."""
        return max(self.directory.glob("checkpoint-*[0-9]"), default=None)

    def save(self, learner: SAC, buffer: TrajectoryReplayBuffer, progress: dict[str, Any]) -> None:
        """Write a checkpoint; `progress` is plain data, `progress["env_steps"]` gives it its name."""
        final = self.directory / f"checkpoint-{progress['env_steps']:09d}"
        if final.exists():
            return
        for path in self.directory.glob("*.unfinished"):
            shutil.rmtree(path)
        unfinished = final.with_suffix(".unfinished")
        unfinished.mkdir(parents=True)
        with (unfinished / "learner.pt").open("wb") as file:
            torch.save({"learner": learner.state_dict(), "progress": progress}, file)
            file.flush()
            os.fsync(file.fileno())
        buffer.save_checkpoint(unfinished / "buffer")
        _sync(unfinished)
        unfinished.rename(final)
        _sync(self.directory)
        for path in self.directory.glob("checkpoint-*[0-9]"):
            if path != final:
                shutil.rmtree(path)

    def load(self, learner: SAC, buffer: TrajectoryReplayBuffer) -> dict[str, Any]:
        """Take up the last checkpoint; returns its progress."""
        path = self.latest()
        if path is None:
            raise FileNotFoundError(f"{self.directory} holds no checkpoint to resume from")
        saved = torch.load(path / "learner.pt", weights_only=True)
        learner.load_state_dict(saved["learner"])
        buffer.load_checkpoint(path / "buffer")
        progress: dict[str, Any] = saved["progress"]
        return progress


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
