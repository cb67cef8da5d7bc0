"""Settings of producing, and its arithmetic: how many groups to keep in flight, which to draw first, which to delay.

B is the batch size of a task, T its cumulative target, A the number of groups available toward it (buffered COMPLETED +
leased + trained), E the number of groups that wait to be generated again from their prompt (buffered EXPIRED, and
ABORTED without partial rollout).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from forebay.agent_loop.outage import Outage
from forebay.core.rollout import DRAWABLE, Status
from forebay.core.staleness import Limits, stale_threshold
from forebay.core.validate import checked_integer, positive_seconds
from forebay.errors import InvalidConfig, TooManyRejections
from forebay.storage.base import Share, TaskSummary

if TYPE_CHECKING:
    from forebay.agent_loop.base import AgentLoop
    from forebay.produce.inflight import Steps
    from forebay.prompts.sampler import Sampler, SamplerWithReplayBuffer

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
        checked_integer("max_consecutive_failures", self.max_consecutive_failures, least=1)
        if self.max_consecutive_rejections is not None:
            checked_integer("max_consecutive_rejections", self.max_consecutive_rejections, least=1)
        if self.when_exhausted not in get_args(WhenExhausted):
            raise InvalidConfig(
                f"when_exhausted is {self.when_exhausted!r:.80}; expected one of {', '.join(get_args(WhenExhausted))}"
            )

    def rejections(self, batch_size: int) -> int:
        """How many groups may be rejected in a row; an empty batch counts as a batch of one."""
        if self.max_consecutive_rejections is not None:
            return self.max_consecutive_rejections
        return 20 * max(1, batch_size)


def too_many_rejections(task_name: str, groups: int, reason: str | None, *, skip: bool = False) -> TooManyRejections:
    """The error for a task whose groups are all filtered. `skip`: there is no other task to skip it for."""
    found = " when_exhausted='skip' found no other task to produce instead." if skip else ""
    advice = "add a task, or use when_exhausted='accept'" if skip else "or choose another when_exhausted"
    return TooManyRejections(
        f"{groups} groups of task {task_name!r} in a row were filtered, and none was kept; the last reason: {reason}."
        f"{found} Loosen the filter, change the prompts, raise max_consecutive_rejections, {advice}"
    )


class StrategySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a strategy produces, as plain data. The arguments of `AsyncProduceStrategy` say what each setting means."""

    over_sample_threshold: float = 0.0
    enable_partial_rollout: bool = False
    max_staleness: int = 0
    max_token_staleness: int | None = None
    tail_batch_trigger_size: int = 0
    tail_after: int = 3
    max_tries: int = 3
    timeouts: Timeouts = Timeouts()
    budgets: Budgets = Budgets()

    def __post_init__(self) -> None:
        share = self.over_sample_threshold
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < math.inf:
            raise InvalidConfig(f"over_sample_threshold is {share!r}; expected a number from 0")
        for name, least in (("max_staleness", 0), ("tail_batch_trigger_size", -1), ("tail_after", 1), ("max_tries", 1)):
            checked_integer(name, getattr(self, name), least=least)
        for name, kind in (("timeouts", Timeouts), ("budgets", Budgets)):
            if not isinstance(getattr(self, name), kind):
                found = f"{name} is {getattr(self, name)!r:.80}"
                raise InvalidConfig(f"{found}; expected forebay.{kind.__name__}(...) or None")
        if self.max_token_staleness is not None:
            checked_integer("max_token_staleness", self.max_token_staleness, least=0)
            if self.max_token_staleness > self.max_staleness:
                raise InvalidConfig(
                    f"max_token_staleness={self.max_token_staleness} is over max_staleness={self.max_staleness}: a "
                    "sample would expire before any of its tokens is masked; lower it"
                )

    def over_issue(self, batch_size: int) -> int:
        """The number of groups to start beyond the target."""
        return over_issue(self.over_sample_threshold, batch_size)

    def limits(self, sync_weights_interval: int) -> Limits:
        """How old groups may grow if the weights are updated every `sync_weights_interval` train steps."""
        threshold = stale_threshold(self.max_staleness, sync_weights_interval)
        if self.enable_partial_rollout and threshold == 1:
            raise InvalidConfig(
                "enable_partial_rollout with a stale threshold of 1 would throw every continued token away; raise "
                f"max_staleness (it is {self.max_staleness}) or sync_weights_interval (it is {sync_weights_interval})"
            )
        token = self.max_token_staleness
        token_threshold = None if token is None else stale_threshold(token, sync_weights_interval)
        if self.enable_partial_rollout and token_threshold == 1:
            raise InvalidConfig(
                "enable_partial_rollout with max_token_staleness=0 would throw every continued token away; raise "
                f"max_token_staleness, or sync_weights_interval (it is {sync_weights_interval})"
            )
        return Limits(threshold, token_threshold, self.tail_batch_trigger_size >= 0)


def backoff_s(times: int) -> float:
    """The delay after the n-th failure in a row.

    >>> [backoff_s(times) for times in (1, 2, 3, 7, 5000)]
    [0.5, 1.0, 2.0, 30.0, 30.0]
    """
    return min(_FIRST_DELAY_S * 2.0 ** min(times - 1, 16), _MAX_DELAY_S)


class Among:
    """The producers that share the work of a task: here, one that shares it with nobody. `Run` is that of managers."""

    lead: str | None = None  # the task whose changes concern all of them

    def share(self, wanted: int) -> int:
        """How many of the wanted groups this producer may have in flight."""
        return wanted

    def calm_s(self) -> float:
        """How long to wait, at least, between two looks at what other producers do."""
        return 0.0

    def leaves_to_others(self, outage: Outage) -> bool:
        """Whether others should generate the groups of this producer, because its engine is unreachable."""
        return False

    def sets_clock(self) -> bool:
        """Whether this producer may advance the train step of the task."""
        return True

    def follows(self, epoch: int) -> bool:
        """Whether this producer may draw in an epoch of the task."""
        return True


class Demand(NamedTuple):
    """Groups that a strategy is asked to produce. `steps` may advance meanwhile; `stopped()` ends it early.

    `spare`: how many groups more than the target and the over-issue may be in flight because filters reject some; by
    default the number that fits into the buffer. `among`: the producers that share the work.
    """

    agent_loop: AgentLoop
    sampler: Sampler | SamplerWithReplayBuffer
    batch_size: int
    task_name: str
    steps: Steps
    target: int | None = None
    stopped: Callable[[], bool] = lambda: False
    spare: int | None = None
    among: Among = Among()


class Suspects(dict[int, tuple[int, float]]):
    """Groups whose last attempt was cut short: how often in a row, and until when they rest, by group id."""

    def cut_short(self, group_id: int, now: float) -> None:
        """Have a group rest before its next attempt, longer each time."""
        times = self.get(group_id, (0, 0.0))[0] + 1
        self[group_id] = times, now + backoff_s(times)


class Plan(msgspec.Struct, frozen=True):
    """The statuses to draw before the data set, and the number of groups to run beyond the target."""

    statuses: tuple[Status, ...]
    budget: int
    tail: bool


def over_issue(over_sample_threshold: float, batch_size: int) -> int:
    """The number of groups to start beyond the target, without rounding errors of binary fractions.

    >>> over_issue(0.07, 100), over_issue(0.5, 3), over_issue(0.0, 8)
    (7, 2, 0)
    """
    return int((Decimal(str(over_sample_threshold)) * batch_size).to_integral_value(ROUND_CEILING))


def waiting_again(expired: int, aborted: int, *, partial: bool) -> int:
    """E: the number of groups that start from their prompt when they are drawn again.

    >>> waiting_again(2, 3, partial=True), waiting_again(2, 3, partial=False)
    (2, 5)
    """
    return expired if partial else expired + aborted


def make_plan(*, trigger: int, waiting: int, partial: bool, budget: int) -> Plan:
    """The groups that the next batch draws first.

    With trigger N, groups that have to start again wait until there are N of them; they are then drawn first, without
    over-issue, so that they finish. Trigger 0 draws them at once, -1 never. `partial`: interrupted groups keep their
    tokens. Stragglers are drawn before all others in any case, and do not change the plan: the over-issue stays, so
    that the batch can complete without them.

    >>> make_plan(trigger=3, waiting=2, partial=True, budget=4).tail
    False
    >>> make_plan(trigger=3, waiting=3, partial=True, budget=4).budget
    0
    >>> plan = make_plan(trigger=0, waiting=1, partial=True, budget=4)
    >>> [str(status) for status in plan.statuses], plan.budget
    (['init', 'expired', 'aborted'], 4)
    """
    tail = trigger > 0 and waiting >= trigger
    # At 0, groups that are returned while the batch is produced are drawn at once, too.
    if trigger == 0 or tail:
        statuses: tuple[Status, ...] = DRAWABLE
    elif partial or trigger < 0:
        # An interrupted group that keeps its tokens continues at once; at -1 no tail batch would ever draw it.
        statuses = (Status.INIT, Status.ABORTED)
    else:
        statuses = (Status.INIT,)
    return Plan(statuses, 0 if tail else budget, tail)


_LEAST_ACCEPTANCE = 1 / 32


def acceptance(kept: int, rejected: int) -> float:
    """The measured share of finished groups that filters keep; 1 before the first rejection.

    Two kept groups are added, so that a few rejections at the beginning do not start too many groups.

    >>> acceptance(0, 0), acceptance(8, 0), acceptance(2, 36), acceptance(0, 10_000)
    (1.0, 1.0, 0.1, 0.03125)
    """
    return max(_LEAST_ACCEPTANCE, (kept + 2) / (kept + rejected + 2))


def to_run(*, target: int, available: int, budget: int, accepted: float = 1.0, spare: int | None = None) -> int:
    """How many groups to have in flight, of all producers together: target + budget - available, and at least one.

    `accepted`: the share of groups that filters keep. The number of missing groups is divided by it, which adds at most
    `spare` groups.

    >>> to_run(target=10, available=9, budget=4)
    5
    >>> to_run(target=16, available=0, budget=0, accepted=0.1)
    160
    >>> to_run(target=16, available=0, budget=0, accepted=0.1, spare=10)
    26
    """
    missing = target - available
    extra = max(0, math.ceil(missing / accepted) - missing) if missing > 0 else 0
    extra = extra if spare is None else min(extra, max(0, spare))
    return max(1, missing + budget + extra)


class Need(NamedTuple):
    """How many groups this producer starts now, and how many all producers together may have."""

    missing: int
    share: Share

    def at_least_one(self, summary: TaskSummary) -> Need:
        """One group more than are in flight, whatever is missing."""
        return Need(1, Share(self.share.epoch, max(self.share.most, summary.produced + summary.in_flight) + 1))


def to_start(summary: TaskSummary, wanted: int, here: int, relied_on: int, part: int) -> Need:
    """What a producer starts, of which `here` groups are in flight, so that `wanted` groups of all producers are.

    `relied_on`: those of its groups that count as in flight; the others may hang, and are replaced. `part`: how many of
    the wanted groups it may have.
    """
    replaced = here - relied_on
    missing = min(part, wanted - summary.in_flight + here) + replaced - here
    return Need(missing, Share(summary.account.epoch, summary.produced + wanted + replaced))
