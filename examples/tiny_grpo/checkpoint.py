"""Weights and optimiser on disk, beside the checkpoint of the loader that belongs to them.

The order matters: first the weights, then the loader, which names them by their step; then older weights are deleted.
After a crash between any two of these, the weights of the newest checkpoint exist.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import torch

from forebay import AsyncRolloutLoader, checkpoint_exists
from tiny_grpo.model import Policy

__all__ = ["has_checkpoint", "read_weights", "save"]


def has_checkpoint(directory: Path) -> bool:
    """Whether a loader saved in this directory."""
    return any(map(checkpoint_exists, directory.glob("step_*")))


async def save(
    loader: AsyncRolloutLoader, directory: Path, policy: Policy, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Write a checkpoint of `step`, while generation continues. The loader keeps one checkpoint."""
    path = _path(directory, step)
    await asyncio.to_thread(_write, {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}, path)
    await loader.save(step)
    await asyncio.to_thread(_delete_others, path)


def read_weights(directory: Path, policy: Policy, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Load the weights that were saved with `step`."""
    weights = torch.load(_path(directory, step), weights_only=True)
    policy.load_state_dict(weights["policy"])
    optimizer.load_state_dict(weights["optimizer"])


def _path(directory: Path, step: int) -> Path:
    return directory / f"weights-{step:06d}.pt"


def _write(weights: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        torch.save(weights, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _delete_others(path: Path) -> None:
    for other in path.parent.glob("weights-*"):
        if other != path:
            other.unlink()
