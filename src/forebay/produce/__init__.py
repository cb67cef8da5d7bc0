"""How a batch is produced: strategies, groups in flight, judging, and statistics."""

from forebay.produce.evaluate import Evaluation, evaluate
from forebay.produce.filters import on_loop, reject_truncated, reject_zero_std
from forebay.produce.plan import Budgets, Timeouts
from forebay.produce.stats import NoProgress, Production, Progress, TerminalProgress
from forebay.produce.strategy import AsyncProduceStrategy, ProduceStrategy, SyncProduceStrategy

__all__ = [
    "AsyncProduceStrategy",
    "Budgets",
    "Evaluation",
    "NoProgress",
    "ProduceStrategy",
    "Production",
    "Progress",
    "SyncProduceStrategy",
    "TerminalProgress",
    "Timeouts",
    "evaluate",
    "on_loop",
    "reject_truncated",
    "reject_zero_std",
]
