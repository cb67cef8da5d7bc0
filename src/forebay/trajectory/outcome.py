"""What merging and splitting did."""

from __future__ import annotations

import msgspec

__all__ = ["DEFAULT_SEED", "Outcome"]

DEFAULT_SEED = 1234
"""Of what has none; that of a TrajectoryReplayBuffer."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was done; what would be, if `done` is False."""

    target: str
    sources: list[str]
    done: bool
    trajectories: int
    transitions: int
    bytes: int
    parts: dict[str, int] = {}
    """Trajectories by part."""
    rewritten: int = 0
    """Trajectories whose rows were made anew, because fields were filled or dropped."""
    left_out: int = 0
    """Trajectories that are damaged."""
    removed: list[str] = []
    """Directories that are no longer there."""
    remaining: int | None = None
    """Trajectories that stay in the source of a split."""
