"""Trajectories: tensors from environments, sampled at random inside a moving window, and their store on disk."""

from forebay.trajectory.buffer import TrajectoryReplayBuffer
from forebay.trajectory.data import Trajectory

__all__ = ["Trajectory", "TrajectoryReplayBuffer"]
