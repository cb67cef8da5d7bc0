"""The replay buffer: groups between producers and trainers."""

from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.lease import Lease, LeaseRequest

__all__ = ["Lease", "LeaseRequest", "ReplayBuffer"]
