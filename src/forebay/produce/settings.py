"""Settings of producing: timeouts and budgets. Their values are checked when they are created."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import msgspec

from forebay.core.validate import positive_seconds, whole_number
from forebay.errors import InvalidConfig

__all__ = ["Budgets", "Timeouts", "backoff_s", "checked_budgets", "checked_timeouts"]

WhenExhausted: TypeAlias = Literal["raise", "accept", "skip"]

_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0


class Timeouts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long producing waits, in seconds. `docs/guide/producing.md` says what each event costs."""

    member_timeout_s: float = 1800.0
    """Members that take longer to generate are cancelled and spend a try; outages of the engine do not count."""
    pause_interval_s: float = 5.0
    """A pause is requested again after this long."""
    pause_request_timeout_s: float = 30.0
    """How long requesting a pause from an agent loop may take."""
    pause_timeout_s: float = 60.0
    """Members that take longer to end after a pause are cancelled and spend a try."""
    idle_timeout_s: float = 60.0
    """How long a pause waits for the engine to stop our requests (`AgentLoop.idle`); then it raises EngineError."""
    judge_timeout_s: float = 10.0
    """How long judging may continue in a pause; after that the group is kept and judged on its retry."""
    judge_give_up_s: float = 600.0
    """How long judging is repeated while rewards or filters raise; after that its members spend a try."""
    cancel_timeout_s: float = 10.0
    """An agent loop that takes longer to end after a cancel is left behind; its group returns to the buffer."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            positive_seconds(name, getattr(self, name))


class Budgets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much may go wrong in a row before producing stops with an error."""

    max_consecutive_failures: int = 20
    """Attempts that may fail in a row; then `TooManyFailures`."""
    max_consecutive_rejections: int | None = None
    """Groups that filters may reject in a row (None: 20 batches); then `when_exhausted` decides."""
    when_exhausted: WhenExhausted = "raise"
    """`raise`: TooManyRejections. `accept`: rejected groups are kept until the filters accept a group again. `skip`: a
    manager plans its steps without the task until the next weight update (TooManyRejections if no task is left)."""

    def __post_init__(self) -> None:
        whole_number("max_consecutive_failures", self.max_consecutive_failures, least=1)
        if self.max_consecutive_rejections is not None:
            whole_number("max_consecutive_rejections", self.max_consecutive_rejections, least=1)
        if self.when_exhausted not in get_args(WhenExhausted):
            raise InvalidConfig(
                f"when_exhausted is {self.when_exhausted!r:.80}; expected one of {', '.join(get_args(WhenExhausted))}"
            )

    def rejections(self, batch_size: int) -> int:
        """How many groups may be rejected in a row; an empty batch counts as a batch of one."""
        if self.max_consecutive_rejections is not None:
            return self.max_consecutive_rejections
        return 20 * max(1, batch_size)


def checked_timeouts(timeouts: Timeouts | None) -> Timeouts:
    """The timeouts, or the default ones; InvalidConfig for any other type."""
    if timeouts is not None and not isinstance(timeouts, Timeouts):
        raise InvalidConfig(f"timeouts is {timeouts!r:.80}; expected forebay.Timeouts(...) or None")
    return Timeouts() if timeouts is None else timeouts


def checked_budgets(budgets: Budgets | None) -> Budgets:
    """The budgets, or the default ones; InvalidConfig for any other type."""
    if budgets is not None and not isinstance(budgets, Budgets):
        raise InvalidConfig(f"budgets is {budgets!r:.80}; expected forebay.Budgets(...) or None")
    return Budgets() if budgets is None else budgets


def backoff_s(times: int) -> float:
    """The delay after the n-th failure in a row.

    >>> [backoff_s(times) for times in (1, 2, 3, 7, 5000)]
    [0.5, 1.0, 2.0, 30.0, 30.0]
    """
    return min(_FIRST_DELAY_S * 2.0 ** min(times - 1, 16), _MAX_DELAY_S)
