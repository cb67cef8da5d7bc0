"""Managers: tasks and their weights, colocated and disaggregated production, checkpoints of everything."""

from forebay.manager.colocated import AgentLoopManager
from forebay.manager.disaggregated import DisaggregatedAgentLoopManager, LoadWeights, ProducerState
from forebay.manager.results import AsyncBatch, BatchContent, BatchRequest, TaskResult
from forebay.manager.task import ManagedTask

__all__ = [
    "AgentLoopManager",
    "AsyncBatch",
    "BatchContent",
    "BatchRequest",
    "DisaggregatedAgentLoopManager",
    "LoadWeights",
    "ManagedTask",
    "ProducerState",
    "TaskResult",
]
