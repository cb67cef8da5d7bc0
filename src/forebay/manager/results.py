"""A batch that a manager hands out, and statistics of how it was produced. Reading them resets nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack

import msgspec

from forebay.buffer.lease import Lease, Request
from forebay.collate.balance import shard
from forebay.core.rollout import RolloutState, Status, versioned_tokens
from forebay.core.staleness import group_staleness
from forebay.errors import InvalidInput
from forebay.produce.stats import Figures, mean, quantile

if TYPE_CHECKING:
    from forebay.collate import Packed, Padded
    from forebay.collate.estimators import Kind


class PadOptions(TypedDict, total=False):
    """Options of `forebay.collate.pad`."""

    side: Literal["right", "left"]
    multiple_of: int
    max_length: int | None
    advantages: Kind | Sequence[float] | None
    shifted: bool


class PackOptions(TypedDict, total=False):
    """Options of `forebay.collate.pack`."""

    align: int
    advantages: Kind | Sequence[float] | None
    shifted: bool
    pad_id: int


@cache
def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


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
    reward_mean: float | None  # of the rollouts of this batch
    response_tokens_mean: float | None
    staleness_mean: float | None  # of the groups of this batch, for its train step
    staleness_max: int | None
    leftover: Mapping[str, int]  # groups that are still buffered, by status


class BatchContent(msgspec.Struct, kw_only=True, eq=False):
    """What a batch for one train step has. Its counts are sums over the tasks; `task_results` has each one's."""

    step: int
    groups_by_task: dict[str, list[list[RolloutState]]]
    task_batch_sizes: dict[str, int]
    task_results: dict[str, TaskResult]
    wait_s: float  # how long the batch was waited for
    group_gen_p50_s: float | None = None  # over all tasks
    group_gen_p99_s: float | None = None
    whole: bool = True  # False: the part of one rank

    @property
    def groups(self) -> list[list[RolloutState]]:
        """The groups of all tasks, task after task."""
        return [group for groups in self.groups_by_task.values() for group in groups]

    def shard(
        self, rank: int, world_size: int, cost: Callable[[list[RolloutState]], float] | None = None
    ) -> list[list[RolloutState]]:
        """Whole groups for one trainer rank; see `forebay.collate.shard`."""
        return shard(self.groups, rank, world_size, cost)

    def packed(self, *, max_tokens: int, **options: Unpack[PackOptions]) -> list[Packed[Any]]:
        """Micro-batches of at most `max_tokens` tokens, without padding: torch tensors, or numpy arrays without torch.

        See `forebay.collate.pack`, which has the options.
        """
        from forebay.collate import pack  # imported here: a producer does not need it

        self._check_advantages(options.get("advantages"))
        if not self.groups:  # a rank may get none of the last groups
            return []
        micro_batches = pack(self.groups, max_tokens=max_tokens, **options)
        return [batch.torch() for batch in micro_batches] if _has_torch() else list(micro_batches)

    def padded(self, *, pad_id: int, **options: Unpack[PadOptions]) -> Padded[Any]:
        """The samples as rows of one length: torch tensors, or numpy arrays without torch.

        See `forebay.collate.pad`, which has the options.
        """
        from forebay.collate import pad

        self._check_advantages(options.get("advantages"))
        padded = pad(self.groups, pad_id=pad_id, **options)
        return padded.torch() if _has_torch() else padded

    def _check_advantages(self, kind: Kind | Sequence[float] | None) -> None:
        if kind == "reinforce_pp" and not self.whole:
            raise InvalidInput(
                "advantages='reinforce_pp' needs the rewards of the whole batch, and this is the part of one rank; "
                "give numbers that the ranks have computed together, or one of 'grpo', 'rloo', 'dr_grpo'"
            )

    @property
    def reward_mean(self) -> float | None:
        """Mean reward of the rollouts of this batch, each counted once; None if they have none."""
        return mean(_scores(self.groups))

    def total(self, name: str) -> float:
        """The sum of a count over the tasks: `total("produced_tokens")`."""
        return float(sum(getattr(result, name) for result in self.task_results.values()))

    @property
    def raw_reward_mean(self) -> float | None:
        """Mean reward of everything that was judged here since the batch before, filtered or not; None if nothing was.

        After a resume, or with producers in other processes, a batch may have been judged earlier or elsewhere.
        """
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


class AsyncBatch(BatchContent, kw_only=True, eq=False, weakref=True):
    """A batch that is leased for one train step, until `ack` or `nack`. Leaving `async with` settles it."""

    lease: Lease

    def __repr__(self) -> str:
        return f"<AsyncBatch for train step {self.step}: {len(self.groups)} groups, {self.lease.state}>"

    @property
    def open(self) -> bool:
        """Whether it was neither acknowledged nor given back yet."""
        return self.lease.open

    @property
    def returned(self) -> bool:
        """Whether it was given back, or lost."""
        return self.lease.returned

    async def ack(self) -> None:
        """The trainer trained on this batch: its groups leave for good. Batches are acknowledged in order of steps."""
        await self.lease.ack()

    async def nack(self) -> None:
        """Give the groups back, to their old place in the order."""
        await self.lease.nack()

    async def reject(self, groups: Sequence[Sequence[RolloutState]], reason: str) -> None:
        """These groups are of no use: they leave as discarded, for this reason; the others stay leased."""
        await self.lease.reject(groups, reason)
        self._keep_leased()

    async def give_back(self, groups: Sequence[Sequence[RolloutState]]) -> None:
        """Give some of the groups back, to their old place in the order; the others stay leased."""
        await self.lease.give_back(groups)
        self._keep_leased()

    def _keep_leased(self) -> None:
        held = {id(group) for group in self.lease.groups}
        self.groups_by_task = {
            name: [group for group in groups if id(group) in held] for name, groups in self.groups_by_task.items()
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.lease.__aexit__(kind, error, trace)


class BatchRequest(Request[AsyncBatch]):
    """What `produce_batch` and `get_batch` return: await it for a leased batch, or enter it with `async with`."""

    def _lease_of(self, granted: AsyncBatch) -> Lease:
        return granted.lease


def _scores(groups: Sequence[Sequence[RolloutState]]) -> list[float]:
    """The reward of every rollout that has one: that of its last segment."""
    scores: dict[tuple[int, int | None], float] = {}
    for number, group in enumerate(groups):
        for state in sorted(group, key=lambda state: state.segment):
            if state.reward is not None and state.reward.get("score") is not None:
                scores[number, state.rollout_id] = float(state.reward["score"])
    return list(scores.values())


def describe_task(
    batch_size: int, new: Figures, left: Mapping[Status, int], groups: Sequence[Sequence[RolloutState]], train_step: int
) -> TaskResult:
    """The results of a task since the batch before, and its part of this batch."""
    samples = [state for group in groups for state in group]
    ages = [group_staleness(group, train_step) for group in groups]
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
        reward_mean=mean(_scores(groups)),
        response_tokens_mean=mean([versioned_tokens(state) for state in samples]),
        staleness_mean=mean(ages),
        staleness_max=max(ages, default=None),
        leftover={str(status): groups for status, groups in left.items() if groups},
    )
