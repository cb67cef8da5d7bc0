"""Weights and optimiser on disk, beside the checkpoint of the plane that goes with them.

The order is what matters: weights first, then the plane, which names them by their step; then what is older goes. A
crash between any two of these leaves a plane whose weights are there.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Protocol

import torch

from tiny_grpo.model import Policy

__all__ = ["Checkpoints", "Plane"]


class Plane(Protocol):
    """What saves all groups and goes on with them: a manager, or a buffer alone."""

    async def save(self, path: Path, /, *, model_step: int) -> None: ...

    async def resume(self, path: Path, /) -> int | None: ...


class Checkpoints:
    """The last checkpoint of a run, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.plane = directory / "plane"

    def exists(self) -> bool:
        """Whether there is one to resume from."""
        return (self.plane / "manifest.json").exists()

    async def save(self, plane: Plane, policy: Policy, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Write a checkpoint of the weights of `step`, while generation goes on."""
        weights = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
        await asyncio.to_thread(_write, weights, self._weights_path(step))
        await plane.save(self.plane, model_step=step)
        for path in self.directory.glob("weights-*"):
            if path != self._weights_path(step):
                path.unlink()

    async def resume(self, plane: Plane, policy: Policy, optimizer: torch.optim.Optimizer) -> int:
        """Take up the checkpoint: the plane, then the weights that it names; returns their step."""
        step = await plane.resume(self.plane)
        assert step is not None  # `save` has given it one
        weights = torch.load(self._weights_path(step), weights_only=True)
        policy.load_state_dict(weights["policy"])
        optimizer.load_state_dict(weights["optimizer"])
        return step

    def _weights_path(self, step: int) -> Path:
        return self.directory / f"weights-{step:06d}.pt"


def _write(weights: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        torch.save(weights, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
