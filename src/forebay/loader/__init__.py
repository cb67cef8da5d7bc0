"""The front door: `RolloutLoader` (and `AsyncRolloutLoader`) feeds a trainer, as a DataLoader does, from `Task`s."""

from forebay.loader.batch import Batch
from forebay.loader.core import AsyncRolloutLoader
from forebay.loader.options import LoaderOptions
from forebay.loader.progress import StepProgress
from forebay.loader.ranks import Broadcast, TorchBroadcast
from forebay.loader.sync import RolloutLoader
from forebay.loader.task import Task

__all__ = [
    "AsyncRolloutLoader",
    "Batch",
    "Broadcast",
    "LoaderOptions",
    "RolloutLoader",
    "StepProgress",
    "Task",
    "TorchBroadcast",
]
