"""Checked settings that build a buffer; from a mapping, or from a table of a TOML file.

A wrong combination cannot be written down: values are checked when a config is made, unknown keys are refused.

>>> AsyncReplayBufferConfig(max_groups=256).build()
<ReplayBuffer StalenessReplayPolicy() on MemoryStorage: 0 buffered groups>
>>> ReplayBufferConfig.from_mapping({"policy": "fifo", "max_group": 3})
Traceback (most recent call last):
    ...
forebay.errors.InvalidConfig: ReplayBufferConfig: Object contains unknown field `max_group`
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from forebay.buffer import ReplayBuffer
from forebay.errors import InvalidConfig
from forebay.policy import (
    FIFOReplayPolicy,
    FreshestReplayPolicy,
    PriorityReplayPolicy,
    ReplayPolicy,
    StalenessReplayPolicy,
)
from forebay.storage.base import Storage
from forebay.storage.memory import MemoryStorage

__all__ = ["AsyncReplayBufferConfig", "ReplayBufferConfig", "SyncReplayBufferConfig", "build_storage"]

_POLICIES: dict[str, type[ReplayPolicy]] = {
    "fifo": FIFOReplayPolicy,
    "staleness": StalenessReplayPolicy,
    "priority": PriorityReplayPolicy,
    "freshest": FreshestReplayPolicy,
}


_SQLITE = "sqlite:///"


def build_storage(url: str) -> Storage:
    """The storage that a config names.

    `memory`, `pandas`, `sqlite:///path` (`sqlite:////path` if absolute), or `postgresql://host/database`, with
    `#name` at its end for a buffer of another name than `forebay`.
    """
    if url == "memory":
        return MemoryStorage()
    if url == "pandas":
        try:
            from forebay.storage.pandas import PandasStorage
        except ModuleNotFoundError as missing:
            raise InvalidConfig("storage 'pandas' needs pandas: pip install 'forebay[pandas]'") from missing
        return PandasStorage()
    if isinstance(url, str) and url.startswith(_SQLITE) and len(url) > len(_SQLITE):
        from forebay.storage.sqlite import SQLiteStorage

        return SQLiteStorage(url.removeprefix(_SQLITE))
    if isinstance(url, str) and url.startswith(("postgresql://", "postgres://")):
        try:
            from forebay.storage.postgres import PostgresStorage
        except ModuleNotFoundError as missing:
            raise InvalidConfig("storage 'postgresql://' needs asyncpg: pip install 'forebay[postgres]'") from missing
        dsn, _, name = url.partition("#")
        return PostgresStorage(dsn, name or "forebay")
    raise InvalidConfig(
        f"unknown storage {url!r}; expected 'memory', 'pandas', 'sqlite:///path' or 'postgresql://host/database'"
    )


class ReplayBufferConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Policy, storage and limits of a buffer. `build()` makes a new one each time."""

    policy: Literal["fifo", "staleness", "priority", "freshest"] = "fifo"
    storage: str = "memory"
    max_groups: int | None = None
    max_bytes: int | None = None
    lease_s: float | None = None
    keep_trained: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or self.policy not in _POLICIES:
            raise InvalidConfig(f"unknown policy {self.policy!r}; expected one of {', '.join(_POLICIES)}")
        build_storage(self.storage)
        # The rest is checked by the buffer, which costs nothing until it is used.
        ReplayBuffer(
            max_groups=self.max_groups, max_bytes=self.max_bytes, lease_s=self.lease_s, keep_trained=self.keep_trained
        )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """A config from plain data; InvalidConfig names the key that does not fit."""
        if not isinstance(mapping, Mapping):
            raise InvalidConfig(f"{cls.__name__}: expected a mapping, got {mapping!r}")
        try:
            return msgspec.convert(dict(mapping), cls)
        except msgspec.ValidationError as error:
            raise InvalidConfig(f"{cls.__name__}: {error}") from None

    @classmethod
    def from_toml(cls, path: str | Path, table: str = "replay_buffer") -> Self:
        """A config from one table of a TOML file."""
        with Path(path).open("rb") as file:
            try:
                content = tomllib.load(file)
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise InvalidConfig(f"{path} is not TOML: {error}") from None
        if not isinstance(content.get(table), dict):
            raise InvalidConfig(f"{path} has no table [{table}]; it has {', '.join(content) or 'nothing'}")
        return cls.from_mapping(content[table])

    def build(self) -> ReplayBuffer:
        return ReplayBuffer(
            _POLICIES[self.policy](),
            build_storage(self.storage),
            max_groups=self.max_groups,
            max_bytes=self.max_bytes,
            lease_s=self.lease_s,
            keep_trained=self.keep_trained,
        )


class SyncReplayBufferConfig(ReplayBufferConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Arrival order in memory: for training that consumes what it just produced."""


class AsyncReplayBufferConfig(ReplayBufferConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Oldest first in memory: for training that runs beside its producers."""

    policy: Literal["fifo", "staleness", "priority", "freshest"] = "staleness"
