"""The numbers of producing: how long, how often, how many in a row. Checked when they are written down."""

from __future__ import annotations

from typing import Any

import msgspec

from forebay.checks import whole_number
from forebay.errors import InvalidConfig

__all__ = ["Budgets", "Timeouts", "positive_seconds"]


class Timeouts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long producing waits for others, in seconds."""

    group_timeout_s: float = 3600.0
    """A group that is not generated (or judged) within it is cancelled, and spends a try."""
    pause_interval_s: float = 5.0
    """A pause is asked for again after so long."""
    pause_request_timeout_s: float = 30.0
    """How long asking an agent loop for a pause may take."""
    pause_timeout_s: float = 300.0
    """What does not end within it after a pause is cancelled, and goes back with what it has."""
    idle_timeout_s: float = 60.0
    """How long a pause waits for the engine to stop our requests (`AgentLoop.idle`) before it is an EngineError."""
    judge_timeout_s: float = 10.0
    """How long judging may go on in a pause; after that a group is kept, and judged on its retry."""
    cancel_timeout_s: float = 10.0
    """An agent loop that does not end within it when cancelled is left behind; its group goes back."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            positive_seconds(name, getattr(self, name))


class Budgets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much may go wrong in a row before producing stops with an error."""

    max_consecutive_failures: int = 20
    max_consecutive_rejections: int | None = None  # None: 20 batches

    def __post_init__(self) -> None:
        whole_number("max_consecutive_failures", self.max_consecutive_failures, least=1)
        if self.max_consecutive_rejections is not None:
            whole_number("max_consecutive_rejections", self.max_consecutive_rejections, least=1)

    def rejections(self, batch_size: int) -> int:
        """How many groups may be filtered in a row; a batch of nothing has room for some, too."""
        if self.max_consecutive_rejections is not None:
            return self.max_consecutive_rejections
        return 20 * max(1, batch_size)


def positive_seconds(name: str, value: Any) -> float:
    """A positive, finite number of seconds, or InvalidConfig."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise InvalidConfig(f"{name} is {value!r}; expected a positive number of seconds")
    return float(value)
