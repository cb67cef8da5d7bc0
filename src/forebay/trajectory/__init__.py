"""Trajectories: tensors from environments, sampled at random inside a moving window, and their store on disk.

`TrajectoryDataset` needs torch, and is imported when it is asked for.
"""

from typing import TYPE_CHECKING, Any

from forebay.trajectory.buffer import TrajectoryReplayBuffer
from forebay.trajectory.data import Trajectory
from forebay.trajectory.mixed import MixedReplay

if TYPE_CHECKING:
    from forebay.trajectory.loader import TrajectoryDataset

__all__ = ["MixedReplay", "Trajectory", "TrajectoryDataset", "TrajectoryReplayBuffer"]


def __getattr__(name: str) -> Any:
    if name == "TrajectoryDataset":
        from forebay.trajectory.loader import TrajectoryDataset

        return TrajectoryDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
