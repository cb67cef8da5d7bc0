"""The replay buffer: groups between those who generate and those who train."""

from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.lease import Lease, LeaseRequest

__all__ = ["Lease", "LeaseRequest", "ReplayBuffer"]
