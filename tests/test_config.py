"""Configs: what they build, and what they refuse to be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest

from forebay.agent_loop import FunctionAgentLoop
from forebay.buffer.buffer import ReplayBuffer
from forebay.config import (
    AsyncReplayBufferConfig,
    ManagerConfig,
    ReplayBufferConfig,
    StrategyConfig,
    SyncReplayBufferConfig,
    TaskConfig,
)
from forebay.core.policy import (
    FIFOReplayPolicy,
    FreshestReplayPolicy,
    PriorityReplayPolicy,
    ReplayPolicy,
    StalenessReplayPolicy,
)
from forebay.core.rollout import RolloutState
from forebay.errors import InvalidConfig, InvalidInput
from forebay.manager import AgentLoopManager, DisaggregatedAgentLoopManager
from forebay.produce import SyncProduceStrategy
from forebay.storage.local.memory import MemoryStorage
from forebay.storage.urls import build_storage
from tests.processes import finished


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        (ReplayBufferConfig(), FIFOReplayPolicy),
        (SyncReplayBufferConfig(), FIFOReplayPolicy),
        (AsyncReplayBufferConfig(), StalenessReplayPolicy),
        (AsyncReplayBufferConfig(policy="freshest"), FreshestReplayPolicy),
        (ReplayBufferConfig(policy="staleness"), StalenessReplayPolicy),
        (ReplayBufferConfig(policy="priority"), PriorityReplayPolicy),
        (ReplayBufferConfig(policy="freshest"), FreshestReplayPolicy),
    ],
    ids=repr,
)
def test_a_config_builds_a_buffer_in_memory_with_its_policy(
    config: ReplayBufferConfig, policy: type[ReplayPolicy]
) -> None:
    buffer = config.build()
    assert type(buffer) is ReplayBuffer
    assert type(buffer.policy) is policy
    assert type(buffer.storage) is MemoryStorage


def test_every_build_makes_a_new_buffer_and_a_new_storage() -> None:
    config = ReplayBufferConfig()
    one, other = config.build(), config.build()
    assert one is not other
    assert one.storage is not other.storage
    assert one.owner != other.owner


def test_the_limits_of_a_config_reach_the_buffer() -> None:
    buffer = ReplayBufferConfig(max_groups=7, max_bytes=1000, lease_s=2.5, keep_trained=3).build()
    settings = buffer._session.settings
    assert (settings.max_groups, settings.max_bytes, settings.keep_trained) == (7, 1000, 3)
    assert buffer._session.lease_s == 2.5


def test_a_config_can_name_the_storage_with_a_data_frame() -> None:
    from forebay.storage.local.pandas import PandasStorage

    assert type(ReplayBufferConfig(storage="pandas").build().storage) is PandasStorage
    assert type(build_storage("pandas")) is PandasStorage


def test_a_config_imports_the_package_of_its_storage_only_when_it_builds() -> None:
    program = """
import sys
from forebay import InvalidConfig, ReplayBufferConfig
configs = [ReplayBufferConfig(storage=url) for url in ("pandas", "postgresql://host/database#name", "sqlite:///a.db")]
print({"pandas", "asyncpg", "sqlite3"} & set(sys.modules))
sys.modules |= {"pandas": None, "asyncpg": None}
for config in configs[:2]:
    try:
        config.build()
    except InvalidConfig as error:
        print(error)
"""
    lines = finished("-c", program).stdout.splitlines()
    assert lines == [
        "set()",
        "storage 'pandas' needs pandas: pip install 'forebay[pandas]'",
        "storage 'postgresql://' needs asyncpg: pip install 'forebay[postgres]'",
    ]


def test_a_wrong_buffer_name_in_the_url_of_a_database_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="the name of a buffer in PostgreSQL is 'Mine'; expected a lowercase"):
        ReplayBufferConfig(storage="postgresql://host/database#Mine")


@pytest.mark.parametrize("storage", ["redis://host", "Memory", "", "sqlite:///"])
def test_an_unknown_storage_is_refused_when_the_config_is_made(storage: str) -> None:
    with pytest.raises(InvalidConfig, match=f"unknown storage '{storage}'; expected 'memory'"):
        ReplayBufferConfig(storage=storage)
    with pytest.raises(InvalidConfig, match="unknown storage"):
        build_storage(storage)


def test_an_unknown_policy_is_refused_when_the_config_is_made() -> None:
    with pytest.raises(InvalidConfig, match="unknown policy 'lifo'; expected one of fifo, staleness"):
        ReplayBufferConfig(policy="lifo")  # type: ignore[arg-type]


_UNFIT: list[tuple[str, Any]] = [
    ("max_groups", 0),
    ("max_groups", "5"),
    ("max_groups", 2.5),
    ("max_groups", True),
    ("max_bytes", -1),
    ("lease_s", 0),
    ("lease_s", float("nan")),
    ("lease_s", "60"),
    ("keep_trained", -1),
    ("keep_trained", None),
]


@pytest.mark.parametrize(("key", "value"), _UNFIT)
def test_a_wrong_value_is_refused_when_the_config_is_made(key: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=key):
        ReplayBufferConfig(**{key: value})


@pytest.mark.parametrize(("key", "value"), [*_UNFIT, ("policy", "lifo"), ("policy", 3), ("storage", "tape")])
def test_a_wrong_value_is_refused_in_a_mapping(key: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=f"SyncReplayBufferConfig: .*{key}"):
        SyncReplayBufferConfig.from_mapping({key: value})


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        ReplayBufferConfig().max_groups = 0  # type: ignore[misc]


# --- mappings and files -------------------------------------------------------------------------------


def test_a_mapping_becomes_a_config() -> None:
    config = ReplayBufferConfig.from_mapping({"policy": "priority", "max_groups": 8, "lease_s": 30})
    assert config == ReplayBufferConfig(policy="priority", max_groups=8, lease_s=30.0)
    assert AsyncReplayBufferConfig.from_mapping({}) == AsyncReplayBufferConfig()


@pytest.mark.parametrize("config", [ReplayBufferConfig, SyncReplayBufferConfig, AsyncReplayBufferConfig])
def test_unknown_keys_are_refused(config: type[ReplayBufferConfig]) -> None:
    with pytest.raises(InvalidConfig, match=f"{config.__name__}: .*unknown field `max_group`"):
        config.from_mapping({"max_group": 3})
    with pytest.raises(TypeError, match="max_group"):
        config(max_group=3)  # type: ignore[call-arg]


def test_a_table_of_a_toml_file_becomes_a_config(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('title = "a run"\n[replay_buffer]\npolicy = "freshest"\nkeep_trained = 4\n[eval]\nmax_bytes = 9\n')
    assert ReplayBufferConfig.from_toml(file) == ReplayBufferConfig(policy="freshest", keep_trained=4)
    assert AsyncReplayBufferConfig.from_toml(str(file), "eval") == AsyncReplayBufferConfig(max_bytes=9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"run\.toml has no table \[replay_buffer\]; it has nothing"),
        (b"[eval]\n[train]\n", r"no table \[replay_buffer\]; it has eval, train"),
        (b"replay_buffer = 3\n", r"no table \[replay_buffer\]"),
        (b"[replay_buffer\n", r"run\.toml is not TOML"),
        (b'[replay_buffer]\npolicy = "\xff"\n', r"run\.toml is not TOML"),
        (b"[replay_buffer]\nmax_group = 3\n", "unknown field `max_group`"),
        (b'[replay_buffer]\nmax_groups = "3"\n', r"Expected `int \| null`, got `str` - at `\$\.max_groups`"),
        (b"[replay_buffer]\nmax_groups = 0\n", "max_groups is 0; expected an integer of at least 1"),
    ],
)
def test_a_file_without_a_valid_config_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    with pytest.raises(InvalidConfig, match=message):
        ReplayBufferConfig.from_toml(file)


def test_a_missing_file_raises_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ReplayBufferConfig.from_toml(tmp_path / "run.toml")


# --- strategies, tasks, managers ----------------------------------------------------------------------

TOML = """
[manager]
mode = "{mode}"
sync_weights_interval = 4

[manager.replay_buffer]
policy = "staleness"
max_groups = 512

[[manager.tasks]]
name = "math"
weight = 2
group_size = 4
dataset = "{dataset}"
strategy = {{ enable_partial_rollout = true, over_sample_threshold = 0.5, timeouts = {{ member_timeout_s = 60 }} }}

[[manager.tasks]]
name = "code"
strategy = {{ kind = "sync", filters = ["reject_zero_std"] }}
"""


async def nothing(state: RolloutState) -> None:
    pass


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
def test_a_manager_is_built_from_a_toml_file(tmp_path: Path, mode: str) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "why?"}\n')
    path = tmp_path / "run.toml"
    path.write_text(TOML.format(mode=mode, dataset=tmp_path / "prompts.jsonl"))
    config = ManagerConfig.from_toml(path)
    manager = config.build(FunctionAgentLoop(nothing), datasets={"code": [{"prompt": "how?"}]})
    assert type(manager) is (AgentLoopManager if mode == "colocated" else DisaggregatedAgentLoopManager)
    assert list(manager.tasks) == ["math", "code"]
    math, code = manager.tasks.values()
    assert (math.weight, code.weight) == (2, 1)
    assert math.strategy.stale_threshold == 4
    assert math.strategy.settings.timeouts.member_timeout_s == 60
    assert isinstance(code.strategy, SyncProduceStrategy)
    assert manager.replay_buffer.max_groups == 512


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"tasks": []}, "there is no task"),
        ({"tasks": [{"name": "a", "weight": 0}]}, "the weights of all tasks"),
        ({"tasks": [{"name": "a", "weight": -1}]}, "expected a number from 0"),
        ({"tasks": [{"name": "a"}, {"name": "a"}]}, "two tasks are named 'a'"),
        ({"tasks": [{"name": ""}]}, "expected a non-empty string"),
        ({"tasks": {"name": "manager"}}, "choose another name"),
        ({"tasks": [{"name": "a", "wait": 1}]}, "unknown field `wait`"),
        ({"tasks": [{"name": "a"}], "mode": "both"}, "mode"),
        ({"tasks": [{"name": "a"}], "sync_weights_interval": 0}, "sync_weights_interval"),
        ({"tasks": [{"name": "a", "strategy": {"kind": "sync", "max_staleness": 1}}]}, "never runs ahead"),
        ({"tasks": [{"name": "a", "strategy": {"enable_partial_rollout": True}}]}, "throw every continued token away"),
        ({"tasks": [{"name": "a", "strategy": {"filters": ["reject_all"]}}]}, "reject_all"),
        ({"tasks": [{"name": "a", "strategy": {"timeouts": {"member_timeout_s": 0}}}]}, "member_timeout_s"),
    ],
)
def test_a_manager_config_that_cannot_work_is_refused(content: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(problem)):
        ManagerConfig.from_mapping(content)


def test_partial_rollout_without_staleness_is_fine_when_weights_are_synced_seldom() -> None:
    strategy = {"enable_partial_rollout": True}
    config = ManagerConfig.from_mapping({"tasks": [{"name": "a", "strategy": strategy}], "sync_weights_interval": 2})
    manager = config.build(FunctionAgentLoop(nothing), datasets={"a": [{"prompt": "why?"}]})
    assert manager.tasks["a"].strategy.settings.enable_partial_rollout


@pytest.mark.parametrize(
    "config", [ManagerConfig(tasks=TaskConfig(name="a")), ManagerConfig.from_mapping({"tasks": {"name": "a"}})]
)
def test_a_manager_of_one_task_needs_no_list(config: ManagerConfig) -> None:
    manager = config.build(FunctionAgentLoop(nothing), datasets={"a": [{"prompt": "why?"}]})
    assert list(manager.tasks) == ["a"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_strategy_is_built_with_its_stopping_rule(kind: Literal["sync", "async"]) -> None:
    def stop(available: int, target: int) -> bool:
        return available < target

    config = ManagerConfig(tasks=TaskConfig(name="a", strategy=StrategyConfig(kind=kind)))
    manager = config.build(
        FunctionAgentLoop(nothing), datasets={"a": [{"prompt": "why?"}]}, should_continue_fn={"a": stop}
    )
    assert manager.tasks["a"].strategy.should_continue_fn is stop


def test_building_a_manager_says_what_is_missing() -> None:
    config = ManagerConfig.from_mapping({"tasks": [{"name": "a"}]})
    with pytest.raises(InvalidConfig, match="task 'a' has no data set"):
        config.build(FunctionAgentLoop(nothing))
    with pytest.raises(InvalidConfig, match="task 'a' has no agent loop"):
        config.build({}, datasets={"a": [{"prompt": "why?"}]})
    with pytest.raises(InvalidInput, match="dataset has tasks"):
        config.build(FunctionAgentLoop(nothing), datasets={"b": []})
