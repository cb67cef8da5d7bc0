"""Settings that build a buffer, a strategy, a task or a manager; from a mapping, or from a table of a TOML file.

Values are checked when a config is made, and unknown keys are refused: an invalid config cannot exist. Making a config
imports no optional package and opens no storage.

>>> AsyncReplayBufferConfig(max_groups=256).build()
<ReplayBuffer StalenessReplayPolicy() on MemoryStorage: 0 buffered groups>
>>> ReplayBufferConfig.from_mapping({"policy": "fifo", "max_group": 3})
Traceback (most recent call last):
    ...
forebay.errors.InvalidConfig: ReplayBufferConfig: Object contains unknown field `max_group`
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias, TypedDict, Unpack

import msgspec

from forebay.agent_loop.base import AgentLoop
from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.group_ends import OnGroupEnd
from forebay.core.capacity import EXPECT_GROUP_BYTES
from forebay.core.policy import (
    FIFOReplayPolicy,
    FreshestReplayPolicy,
    PriorityReplayPolicy,
    ReplayPolicy,
    StalenessReplayPolicy,
)
from forebay.core.validate import checked_integer, checked_task
from forebay.errors import InvalidConfig, InvalidInput
from forebay.manager import AgentLoopManager, DisaggregatedAgentLoopManager, ManagedTask
from forebay.manager.disaggregated import LoadWeights
from forebay.manager.schedule import check_weights
from forebay.produce import (
    AsyncProduceStrategy,
    ProduceStrategy,
    Progress,
    SyncProduceStrategy,
    reject_truncated,
    reject_zero_std,
)
from forebay.produce.filters import Filter
from forebay.produce.judge import GroupReward, SampleReward
from forebay.produce.plan import StrategySettings
from forebay.produce.strategy import SYNC_ARGUMENTS
from forebay.prompts.sampler import Sampler
from forebay.prompts.sources import Tokenize, ToRolloutState
from forebay.storage.base import Storage
from forebay.storage.urls import build_storage, check_storage_url

__all__ = [
    "POLICIES",
    "AsyncReplayBufferConfig",
    "ManagerConfig",
    "ProduceConfig",
    "ReplayBufferConfig",
    "StrategyConfig",
    "SyncReplayBufferConfig",
    "TaskConfig",
]

PolicyName: TypeAlias = Literal["fifo", "staleness", "priority", "freshest"]
POLICIES: dict[str, type[ReplayPolicy]] = {
    "fifo": FIFOReplayPolicy,
    "staleness": StalenessReplayPolicy,
    "priority": PriorityReplayPolicy,
    "freshest": FreshestReplayPolicy,
}


class Config(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The base of all configs."""

    table: ClassVar[str] = ""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """A config from plain data; InvalidConfig names the wrong key."""
        if not isinstance(mapping, Mapping):
            raise InvalidConfig(f"{cls.__name__}: expected a mapping, got {mapping!r}")
        try:
            return msgspec.convert(dict(mapping), cls)
        except msgspec.ValidationError as error:
            raise InvalidConfig(f"{cls.__name__}: {error}") from None

    @classmethod
    def from_toml(cls, path: str | Path, table: str | None = None) -> Self:
        """A config from one table of a TOML file."""
        name = cls.table if table is None else table
        return cls.from_mapping(read_toml(path, name)[name])


def read_toml(path: str | Path, table: str) -> dict[str, Any]:
    """The content of a TOML file; InvalidConfig unless it has this table."""
    with Path(path).open("rb") as file:
        try:
            content = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidConfig(f"{path} is not TOML: {error}") from None
    if not isinstance(content.get(table), dict):
        raise InvalidConfig(f"{path} has no table [{table}]; it has {', '.join(content) or 'nothing'}")
    return content


class ReplayBufferConfig(Config, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Policy, storage and limits of a buffer. Each `build()` makes a new buffer. `storage`: see `storage.urls`."""

    table: ClassVar[str] = "replay_buffer"

    policy: PolicyName = "fifo"
    storage: str = "memory"
    max_groups: int | None = None
    max_bytes: int | None = None
    expect_group_bytes: int = EXPECT_GROUP_BYTES
    lease_s: float | None = None
    keep_trained: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or self.policy not in POLICIES:
            raise InvalidConfig(f"unknown policy {self.policy!r}; expected one of {', '.join(POLICIES)}")
        check_storage_url(self.storage)
        self._build(None)  # the buffer checks the other settings; it opens nothing before its first use

    def build(self, *, on_group_end: OnGroupEnd | None = None) -> ReplayBuffer:
        return self._build(build_storage(self.storage), on_group_end)

    def _build(self, storage: Storage | None, on_group_end: OnGroupEnd | None = None) -> ReplayBuffer:
        settings = msgspec.structs.asdict(self)
        del settings["policy"], settings["storage"]
        return ReplayBuffer(POLICIES[self.policy](), storage, **settings, on_group_end=on_group_end)


class SyncReplayBufferConfig(ReplayBufferConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """First in, first out, in memory: for training that consumes each batch right after it was produced."""


class AsyncReplayBufferConfig(ReplayBufferConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Oldest first, in memory: for training that runs at the same time as its producers."""

    policy: PolicyName = "staleness"


class StrategyParts(TypedDict, total=False):
    """The parts of a strategy that are objects, not plain data; see `ProduceStrategy`."""

    sync_weights_interval: int
    reward_fn: SampleReward | None
    group_reward_fn: GroupReward | None
    is_valid_sample_fn: Filter | Sequence[Filter] | None
    should_continue_fn: Callable[[int, int], bool] | None
    progress: Progress | None


class StrategyConfig(Config, StrategySettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How a task is produced; see `AsyncProduceStrategy`. Kind `sync` accepts no settings for running ahead."""

    table: ClassVar[str] = "strategy"

    kind: Literal["sync", "async"] = "async"
    filters: tuple[Literal["reject_zero_std", "reject_truncated"], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := set(self.filters) - _FILTERS.keys():
            raise InvalidConfig(f"unknown filters {sorted(unknown)}; expected some of {', '.join(_FILTERS)}")
        for name, default in msgspec.structs.asdict(StrategySettings()).items():
            if self.kind == "sync" and name not in SYNC_ARGUMENTS and getattr(self, name) != default:
                raise InvalidConfig(f"{name}={getattr(self, name)!r} is set, but kind='sync' never runs ahead")

    def build(self, replay_buffer: ReplayBuffer, **parts: Unpack[StrategyParts]) -> ProduceStrategy:
        """The strategy; the filters of this config are applied before `is_valid_sample_fn`."""
        filters: list[Filter] = [_FILTERS[name] for name in self.filters]
        own = parts.get("is_valid_sample_fn")
        filters += () if own is None else [own] if callable(own) else own
        parts["is_valid_sample_fn"] = filters
        names = StrategySettings.__struct_fields__
        if self.kind == "sync":
            names = tuple(name for name in names if name in SYNC_ARGUMENTS)
        kind = SyncProduceStrategy if self.kind == "sync" else AsyncProduceStrategy
        settings = {name: getattr(self, name) for name in names}
        return kind(replay_buffer, **settings, **parts)


_FILTERS: dict[str, Filter] = {"reject_zero_std": reject_zero_std, "reject_truncated": reject_truncated}


class TaskConfig(Config, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A task as plain data. Objects (agent loop, rewards, another data set) are arguments of `build`."""

    table: ClassVar[str] = "task"

    name: str
    weight: float = 1.0
    dataset: str | None = None  # the path of a JSONL file
    group_size: int = 1
    seed: int = 0
    shuffle: bool = True
    skip_bad_records: bool = False
    offline: bool = False
    allow_changed_data: bool = False
    strategy: StrategyConfig = StrategyConfig()

    def __post_init__(self) -> None:
        checked_task(self.name)
        checked_integer("group_size", self.group_size, least=1)
        if self.weight != 0:
            check_weights({self.name: self.weight})

    def build(
        self,
        replay_buffer: ReplayBuffer,
        agent_loop: AgentLoop,
        *,
        dataset: Any = None,
        to_rollout_state: ToRolloutState | None = None,
        tokenize: Tokenize | None = None,
        **parts: Unpack[StrategyParts],
    ) -> ManagedTask:
        """The task, with a sampler and a strategy for this buffer."""
        source = self.dataset if dataset is None else dataset
        if source is None:
            raise InvalidConfig(f"task {self.name!r} has no data set; name a JSONL file in it, or pass one to build")
        return ManagedTask(
            name=self.name,
            weight=self.weight,
            agent_loop=agent_loop,
            sampler=Sampler(
                source,
                group_size=self.group_size,
                seed=self.seed,
                shuffle=self.shuffle,
                to_rollout_state=to_rollout_state,
                tokenize=tokenize,
                skip_bad_records=self.skip_bad_records,
                offline=self.offline,
                allow_changed_data=self.allow_changed_data,
            ),
            strategy=self.strategy.build(replay_buffer, **parts),
        )


class ManagerConfig(Config, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A whole data plane as plain data: one task or several, their buffer, and how they run.

    >>> config = ManagerConfig.from_mapping(
    ...     {"mode": "colocated", "tasks": [{"name": "math", "weight": 2, "strategy": {"kind": "sync"}}]}
    ... )
    >>> config.mode
    'colocated'
    """

    table: ClassVar[str] = "manager"

    tasks: tuple[TaskConfig, ...] | TaskConfig
    mode: Literal["colocated", "disaggregated"] = "disaggregated"
    sync_weights_interval: int = 1
    replay_buffer: ReplayBufferConfig = AsyncReplayBufferConfig()

    def __post_init__(self) -> None:
        checked_integer("sync_weights_interval", self.sync_weights_interval, least=1)
        if self.mode not in ("colocated", "disaggregated"):
            raise InvalidConfig(f"mode is {self.mode!r}; expected 'colocated' or 'disaggregated'")
        names = [task.name for task in self._task_configs]
        for name in names:
            if names.count(name) > 1:
                raise InvalidConfig(f"two tasks are named {name!r}; expected distinct names")
        # Each strategy was checked alone; now it is checked with this interval.
        for task in self._task_configs:
            task.strategy.limits(self.sync_weights_interval)
        check_weights({task.name: task.weight for task in self._task_configs})

    @property
    def _task_configs(self) -> tuple[TaskConfig, ...]:
        return (self.tasks,) if isinstance(self.tasks, TaskConfig) else self.tasks

    def build(
        self,
        agent_loop: AgentLoop | Mapping[str, AgentLoop],
        *,
        datasets: Mapping[str, Any] | None = None,
        to_rollout_state: ToRolloutState | Mapping[str, ToRolloutState] | None = None,
        tokenize: Tokenize | Mapping[str, Tokenize] | None = None,
        reward_fn: SampleReward | Mapping[str, SampleReward] | None = None,
        group_reward_fn: GroupReward | Mapping[str, GroupReward] | None = None,
        is_valid_sample_fn: Filter | Mapping[str, Filter] | None = None,
        should_continue_fn: Callable[[int, int], bool] | Mapping[str, Callable[[int, int], bool]] | None = None,
        progress: Progress | None = None,
        replay_buffer: ReplayBuffer | None = None,
    ) -> AgentLoopManager | DisaggregatedAgentLoopManager:
        """The manager, its tasks and their buffer. Each part is for all tasks, or a mapping by task name."""
        buffer = self.replay_buffer.build() if replay_buffer is None else replay_buffer
        named = {task.name for task in self._task_configs}
        parts: dict[str, Any] = {
            "agent_loop": agent_loop,
            "dataset": datasets,
            "to_rollout_state": to_rollout_state,
            "tokenize": tokenize,
            "reward_fn": reward_fn,
            "group_reward_fn": group_reward_fn,
            "is_valid_sample_fn": is_valid_sample_fn,
            "should_continue_fn": should_continue_fn,
        }
        for name, part in parts.items():
            unknown = set(part) - named if isinstance(part, Mapping) else set()
            if unknown:
                raise InvalidInput(f"{name} has tasks {sorted(unknown)}; expected some of {sorted(named)}")
        tasks = []
        for task in self._task_configs:
            own: dict[str, Any] = {
                name: part.get(task.name) if isinstance(part, Mapping) else part for name, part in parts.items()
            }
            if own["agent_loop"] is None:
                raise InvalidConfig(f"task {task.name!r} has no agent loop; pass one for it")
            tasks.append(task.build(buffer, **own, sync_weights_interval=self.sync_weights_interval, progress=progress))
        kind = AgentLoopManager if self.mode == "colocated" else DisaggregatedAgentLoopManager
        return kind(tasks, buffer, sync_weights_interval=self.sync_weights_interval)


class ProduceConfig(Config, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A producer process. See `forebay produce`.

    Either `loader`, a function that makes the `RolloutLoader` of the trainer, as MODULE:NAME. Or `manager`, the
    config of a manager, with the objects of its tasks as MODULE:NAME: `openai` has the arguments of an
    `OpenAIAgentLoop`; `agent_loop` names an agent loop, or a function that makes one. With both:
    `load_weights(model_step)` loads weights into the engines of this process before it generates with them.
    """

    table: ClassVar[str] = "produce"

    manager: ManagerConfig | None = None
    loader: str | None = None
    batch_size: int | None = None
    openai: dict[str, Any] | None = None
    agent_loop: str | None = None
    reward_fn: str | None = None
    group_reward_fn: str | None = None
    is_valid_sample_fn: str | None = None
    to_rollout_state: str | None = None
    tokenize: str | None = None
    load_weights: str | None = None

    def __post_init__(self) -> None:
        if (self.manager is None) == (self.loader is None):
            raise InvalidConfig("a producer needs either a table [manager], or loader=MODULE:FUNCTION in [produce]")
        if self.manager is None:
            of_manager = ("batch_size", "openai", "agent_loop", *_PARTS)
            if given := [name for name in of_manager if getattr(self, name) is not None]:
                raise InvalidConfig(f"[produce] has {', '.join(given)}, which the loader already has; remove them")
        elif (self.openai is None) == (self.agent_loop is None):
            raise InvalidConfig(
                "[produce] needs either a table openai (base_url, model, ...) or agent_loop=MODULE:NAME"
            )
        if self.batch_size is not None:
            checked_integer("batch_size", self.batch_size, least=1)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """From the tables [produce] and, unless it names a loader, [manager] of a TOML file."""
        content = read_toml(path, "produce")
        if "loader" not in content["produce"]:
            read_toml(path, "manager")
        tables = {"manager": content["manager"]} if "manager" in content else {}
        return cls.from_mapping({**content["produce"], **tables})

    def build(self) -> DisaggregatedAgentLoopManager:
        """The manager of the table [manager]."""
        if self.manager is None:
            raise InvalidConfig(f"this producer has the loader {self.loader!r}, which makes its manager; call that")
        parts = {name: getattr(self, name) for name in _PARTS}
        found = {name: load_object(part) for name, part in parts.items() if part is not None}
        manager = self.manager.build(self._loop(), **found)
        if not isinstance(manager, DisaggregatedAgentLoopManager):
            raise InvalidConfig(f"a producer runs ahead of its trainer; mode is {self.manager.mode!r} in [manager]")
        return manager

    def _loop(self) -> AgentLoop:
        if self.openai is not None:
            from forebay.agent_loop.openai import OpenAIAgentLoop  # here: it needs httpx

            try:
                return OpenAIAgentLoop(**self.openai)
            except TypeError as error:
                raise InvalidConfig(f"[produce.openai]: {error}") from None
        assert self.agent_loop is not None
        made = load_object(self.agent_loop)
        loop = made if isinstance(made, AgentLoop) else made()
        if not isinstance(loop, AgentLoop):
            raise InvalidConfig(f"agent_loop {self.agent_loop!r} makes {loop!r:.80}; expected an AgentLoop")
        return loop

    def weight_loader(self) -> LoadWeights | None:
        """The function that `load_weights` names, if there is one."""
        return None if self.load_weights is None else load_object(self.load_weights)


_PARTS = ("reward_fn", "group_reward_fn", "is_valid_sample_fn", "to_rollout_state", "tokenize")


def load_object(reference: str) -> Any:
    """The object that MODULE:NAME names; InvalidConfig if there is none."""
    module, colon, name = reference.partition(":")
    if not (module and colon and name):
        raise InvalidConfig(f"{reference!r} names no object; expected MODULE:NAME, such as rewards:score")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidConfig(f"{reference!r} cannot be loaded: {error}; expected MODULE:NAME") from None
    return found
