"""Managers: tasks and their weights, colocated and disaggregated production, checkpoints of everything."""

from forebay.manager.colocated import AgentLoopManager
from forebay.manager.disaggregated import DisaggregatedAgentLoopManager, LoadWeights, ProducerState
from forebay.manager.results import BatchRequest, ProduceBatchResult, ProduceStatus, TaskResult
from forebay.manager.task import Task

__all__ = [
    "AgentLoopManager",
    "BatchRequest",
    "DisaggregatedAgentLoopManager",
    "LoadWeights",
    "ProduceBatchResult",
    "ProduceStatus",
    "ProducerState",
    "Task",
    "TaskResult",
]
