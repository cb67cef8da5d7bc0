"""What a manager hands out: a batch, with how it came about. Reading it resets nothing."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from forebay.lease import Lease, Request
from forebay.produce.figures import Figures, quantile
from forebay.rollout import RolloutState, Status

__all__ = ["BatchRequest", "ProduceBatchResult", "ProduceStatus", "TaskResult", "describe_task"]


class ProduceStatus(enum.StrEnum):
    """What a batch is."""

    NORMAL = "normal"
    EXPIRED_BATCH = "expired_batch"  # empty: bring newer weights to the producer, and ask for the same step again


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """One task's part of a batch; counts are of what was produced since the batch before."""

    batch_size: int
    produced_groups: int
    produced_samples: int
    produced_tokens: int
    failed_groups: int
    filtered_groups: int
    group_gen_count: int
    group_gen_mean_s: float | None
    group_gen_p50_s: float | None
    group_gen_p99_s: float | None
    group_gen_p99_p50_ratio: float | None
    pause_time_s: float
    raw_rewards_sum: float
    raw_rewards_count: int
    leftover: Mapping[str, int]  # groups that are still buffered, by status


class ProduceBatchResult(msgspec.Struct, kw_only=True):
    """A batch for one train step. Its counts are sums over the tasks; `task_results` has each one's."""

    train_step: int
    status: ProduceStatus
    groups_by_task: dict[str, list[list[RolloutState]]]
    task_batch_sizes: dict[str, int]
    task_results: dict[str, TaskResult]
    produce_time_s: float
    lease: Lease | None = None

    @property
    def groups(self) -> list[list[RolloutState]]:
        """The groups of all tasks, task after task."""
        return [group for groups in self.groups_by_task.values() for group in groups]

    def shard(self, rank: int, world_size: int) -> list[list[RolloutState]]:
        """Whole groups for one trainer rank; see `forebay.lease.shard`."""
        from forebay.lease import shard

        return shard(self.groups, rank, world_size)

    def total(self, name: str) -> float:
        """The sum of a count over the tasks: `total("produced_tokens")`."""
        return float(sum(getattr(result, name) for result in self.task_results.values()))

    @property
    def raw_reward_mean(self) -> float | None:
        """Mean reward of everything that was judged since the batch before, filtered or not."""
        count = self.total("raw_rewards_count")
        return self.total("raw_rewards_sum") / count if count else None

    def stats(self) -> dict[str, float]:
        """Flat figures for any logger: `forebay/<task>/batch/...`."""
        flat: dict[str, float] = {"forebay/batch/produce_time_s": self.produce_time_s}
        for name, result in self.task_results.items():
            for field in result.__struct_fields__:
                value = getattr(result, field)
                if isinstance(value, Mapping):
                    flat |= {f"forebay/{name}/batch/{field}/{status}": n for status, n in value.items()}
                elif value is not None:
                    flat[f"forebay/{name}/batch/{field}"] = value
        return flat


def describe_task(batch_size: int, before: Figures, now: Figures, left: Mapping[Status, int]) -> TaskResult:
    """What was produced for a task between two looks at its figures."""
    new = now.since(before)
    times = sorted(new.times_s)
    p50 = quantile(times, 0.5) if times else None
    p99 = quantile(times, 0.99) if times else None
    return TaskResult(
        batch_size=batch_size,
        produced_groups=new.completed + new.filtered,
        produced_samples=new.samples,
        produced_tokens=new.tokens,
        failed_groups=new.failed,
        filtered_groups=new.filtered,
        group_gen_count=len(times),
        group_gen_mean_s=sum(times) / len(times) if times else None,
        group_gen_p50_s=p50,
        group_gen_p99_s=p99,
        group_gen_p99_p50_ratio=p99 / p50 if p50 and p99 is not None else None,
        pause_time_s=new.pause_s,
        raw_rewards_sum=new.reward_sum,
        raw_rewards_count=new.reward_count,
        leftover={str(status): groups for status, groups in left.items() if groups},
    )


class BatchRequest(Request[ProduceBatchResult]):
    """What `produce_batch` and `get_batch` return.

    `await` it, and the batch is taken for good; enter it with `async with`, and it is a lease: acknowledged when the
    block ends, given back if it raises.
    """

    def _lease_of(self, granted: ProduceBatchResult) -> Lease | None:
        return granted.lease

    async def _awaited(self) -> ProduceBatchResult:
        result = await self._granted()
        if result.lease is not None:
            await result.lease.settle_on_exit(None)
            result.lease = None
        return result
