"""A task of a manager: a named stream of prompts with its agent loop and its strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from forebay.agent_loop.base import AgentLoop
from forebay.buffer.buffer import ReplayBuffer
from forebay.core.ledger import Account
from forebay.core.validate import checked_task
from forebay.errors import InvalidConfig
from forebay.manager.agreement import TaskTerms, Terms
from forebay.manager.schedule import check_weights
from forebay.produce.strategy import ProduceStrategy
from forebay.prompts.check import check_sampler
from forebay.prompts.sampler import Sampler, SamplerWithReplayBuffer


class ManagedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task: its prompts, its agent loop, how its groups are produced and judged, and its share of a batch."""

    name: str
    sampler: Sampler | SamplerWithReplayBuffer
    agent_loop: AgentLoop
    strategy: ProduceStrategy
    weight: float = 1.0

    def __post_init__(self) -> None:
        checked_task(self.name)
        for what, value, expected in (
            ("sampler", self.sampler, (Sampler, SamplerWithReplayBuffer)),
            ("agent_loop", self.agent_loop, (AgentLoop,)),
            ("strategy", self.strategy, (ProduceStrategy,)),
        ):
            if not isinstance(value, expected):
                names = " or a ".join(kind.__name__ for kind in expected)
                raise InvalidConfig(f"the {what} of task {self.name!r} is {value!r:.80}; expected a {names}")
        check_sampler(self.sampler)

    async def exhausted(self, account: Account) -> bool:
        """Whether the data set has no more prompts, at the position of this account."""
        if isinstance(self.sampler, SamplerWithReplayBuffer):
            return await self.sampler.exhausted(self.name)
        return await self.sampler.end_of_data(self.name, account.cursor, account.source_state) is not None


def check_tasks(
    tasks: Sequence[ManagedTask] | ManagedTask, replay_buffer: ReplayBuffer, sync_weights_interval: int
) -> dict[str, ManagedTask]:
    """The tasks by name; InvalidConfig names a task that does not fit."""
    by_name: dict[str, ManagedTask] = {}
    for task in [tasks] if isinstance(tasks, ManagedTask) else tasks:
        if not isinstance(task, ManagedTask):
            raise InvalidConfig(f"{task!r:.80} is not a task; expected ManagedTask(name=..., sampler=..., ...)")
        if task.name in by_name:
            raise InvalidConfig(f"two tasks are named {task.name!r}; expected distinct names")
        if task.strategy.replay_buffer is not replay_buffer:
            raise InvalidConfig(f"the strategy of task {task.name!r} was made for another buffer; expected the same")
        if task.strategy.sync_weights_interval != sync_weights_interval:
            raise InvalidConfig(
                f"the strategy of task {task.name!r} counts on new weights every {task.strategy.sync_weights_interval} "
                f"steps, the manager on every {sync_weights_interval}; expected the same sync_weights_interval"
            )
        by_name[task.name] = task
    check_weights({name: task.weight for name, task in by_name.items()})
    return by_name


def spare_groups(tasks: Mapping[str, ManagedTask], sizes: Mapping[str, int], max_groups: int | None) -> int | None:
    """How many groups a task may have in flight beyond its target and over-issue, because filters reject some.

    InvalidConfig if the groups of one task can fill the buffer while it waits for the groups of another.
    """
    active = {name: groups for name, groups in sizes.items() if groups}
    if max_groups is None or not active:
        return None
    most = {name: groups + tasks[name].strategy.settings.over_issue(groups) for name, groups in active.items()}
    if len(active) > 1 and sum(most.values()) > max_groups:
        needs = ", ".join(f"{groups} of task {name!r}" for name, groups in most.items())
        raise InvalidConfig(
            f"a batch needs {needs} (with over-issue), but the buffer has max_groups={max_groups}: one task could "
            "fill it, and the others would wait forever; raise max_groups"
        )
    return max(0, max_groups - sum(most.values())) // len(active)


def terms_of(tasks: Mapping[str, ManagedTask], sync_weights_interval: int) -> Terms:
    """What all members of a run of these tasks must have alike."""
    from forebay import __version__  # here: `forebay` may still be importing

    terms = {
        name: TaskTerms(task.weight, task.sampler.group_size, task.strategy.limits) for name, task in tasks.items()
    }
    return Terms(terms, sync_weights_interval, __version__)
