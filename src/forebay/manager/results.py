"""A batch that a manager hands out, and statistics of how it was produced. Reading them resets nothing."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

from forebay.buffer.lease import Lease, Request, shard
from forebay.core.ledger import Event
from forebay.core.rollout import RolloutState, Status, versioned_tokens
from forebay.core.staleness import group_staleness
from forebay.errors import StorageUnavailable
from forebay.produce.stats import Figures, mean, quantile


class ProduceStatus(enum.StrEnum):
    """Whether a batch has groups."""

    NORMAL = "normal"
    EXPIRED_BATCH = "expired_batch"  # empty: bring newer weights to the producer, and ask for the same step again


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """One task's part of a batch; counts are of what was produced since the batch before."""

    batch_size: int
    produced_groups: int  # finished: completed or filtered
    produced_samples: int  # of those groups
    produced_tokens: int  # generated, in all attempts
    failed_groups: int
    failed_samples: int
    filtered_groups: int
    filtered_samples: int
    acceptance_rate: float | None  # the share of finished groups that the filters kept
    group_gen_count: int
    group_gen_mean_s: float | None
    group_gen_p50_s: float | None
    group_gen_p99_s: float | None
    group_gen_p99_p50_ratio: float | None
    judge_mean_s: float | None
    pause_time_s: float
    raw_rewards_sum: float  # of all that was judged, before filtering
    raw_rewards_count: int
    raw_reward_mean: float | None
    reward_mean: float | None  # of the samples of this batch
    response_tokens_mean: float | None
    staleness_mean: float | None  # of the groups of this batch, for its train step
    staleness_max: int | None
    leftover: Mapping[str, int]  # groups that are still buffered, by status


class ProduceBatchResult(msgspec.Struct, kw_only=True):
    """A batch for one train step. Its counts are sums over the tasks; `task_results` has each one's."""

    train_step: int
    status: ProduceStatus
    groups_by_task: dict[str, list[list[RolloutState]]]
    task_batch_sizes: dict[str, int]
    task_results: dict[str, TaskResult]
    wait_s: float  # how long the batch was waited for
    group_gen_p50_s: float | None = None  # over all tasks
    group_gen_p99_s: float | None = None
    lease: Lease | None = None

    @property
    def groups(self) -> list[list[RolloutState]]:
        """The groups of all tasks, task after task."""
        return [group for groups in self.groups_by_task.values() for group in groups]

    def shard(self, rank: int, world_size: int) -> list[list[RolloutState]]:
        """Whole groups for one trainer rank; see `forebay.buffer.lease.shard`."""
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
        flat: dict[str, float] = {"forebay/batch/wait_s": self.wait_s}
        for name in ("raw_reward_mean", "group_gen_p50_s", "group_gen_p99_s"):
            if (value := getattr(self, name)) is not None:
                flat[f"forebay/batch/{name}"] = value
        for name, result in self.task_results.items():
            for field in result.__struct_fields__:
                value = getattr(result, field)
                if isinstance(value, Mapping):
                    flat |= {f"forebay/{name}/batch/{field}/{status}": n for status, n in value.items()}
                elif value is not None:
                    flat[f"forebay/{name}/batch/{field}"] = value
        return flat


def describe_task(
    batch_size: int, new: Figures, left: Mapping[Status, int], groups: Sequence[Sequence[RolloutState]], train_step: int
) -> TaskResult:
    """The results of a task since the batch before, and its part of this batch."""
    samples = [state for group in groups for state in group]
    ages = [group_staleness(group, train_step) for group in groups]
    scores = [
        float(state.reward["score"])
        for state in samples
        if state.reward is not None and state.reward.get("score") is not None
    ]
    times = new.times_s
    p50, p99 = quantile(times, 0.5), quantile(times, 0.99)
    return TaskResult(
        batch_size=batch_size,
        produced_groups=new.groups,
        produced_samples=new.samples,
        produced_tokens=new.tokens,
        failed_groups=new.failed,
        failed_samples=new.failed_samples,
        filtered_groups=new.filtered,
        filtered_samples=new.filtered_samples,
        acceptance_rate=new.acceptance_rate,
        group_gen_count=len(times),
        group_gen_mean_s=mean(times),
        group_gen_p50_s=p50,
        group_gen_p99_s=p99,
        group_gen_p99_p50_ratio=p99 / p50 if p50 and p99 is not None else None,
        judge_mean_s=new.judge_s / new.judged if new.judged else None,
        pause_time_s=new.pause_s,
        raw_rewards_sum=new.reward_sum,
        raw_rewards_count=new.reward_count,
        raw_reward_mean=new.reward_sum / new.reward_count if new.reward_count else None,
        reward_mean=mean(scores),
        response_tokens_mean=mean([versioned_tokens(state) for state in samples]),
        staleness_mean=mean(ages),
        staleness_max=max(ages, default=None),
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
            try:
                await result.lease.settle_on_exit(None)
            except StorageUnavailable:
                result.lease.owed = Event.NACKED  # the caller does not get the groups
                raise
            result.lease = None
        return result
