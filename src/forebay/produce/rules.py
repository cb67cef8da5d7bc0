"""The arithmetic of producing: how many groups to keep in flight, and which to draw first. Pure; counts are of groups.

B is the batch size of a task, T its cumulative target, A what is available towards it (buffered COMPLETED + leased
+ trained), E what waits to be generated again from its beginning (buffered EXPIRED, and ABORTED without partial
rollout).
"""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal

import msgspec

from forebay.rollout import Status

__all__ = ["Plan", "make_plan", "over_issue", "to_start", "waiting_again"]


class Plan(msgspec.Struct, frozen=True):
    """What to draw before the data set, and how many groups to run beyond the target."""

    statuses: tuple[Status, ...]
    budget: int
    tail: bool


def over_issue(over_sample_threshold: float, batch_size: int) -> int:
    """How many groups to start beyond the target, without the artefacts of binary fractions.

    >>> over_issue(0.07, 100), over_issue(0.5, 3), over_issue(0.0, 8)
    (7, 2, 0)
    """
    return int((Decimal(str(over_sample_threshold)) * batch_size).to_integral_value(ROUND_CEILING))


def waiting_again(expired: int, aborted: int, *, partial: bool) -> int:
    """E: groups that start from their prompt when they are drawn again.

    >>> waiting_again(2, 3, partial=True), waiting_again(2, 3, partial=False)
    (2, 5)
    """
    return expired if partial else expired + aborted


def make_plan(*, trigger: int, waiting: int, straggling: bool, partial: bool, budget: int) -> Plan:
    """What the next batch draws first.

    With trigger N, groups that have to start again wait until there are N of them, and are then run first, without
    over-issue, so that they finish; 0 draws them at once; -1 never does. `straggling`: some group was returned so
    often that it would starve; it gets its turn at any trigger from 0 on. `partial`: what was stopped keeps its work.

    >>> make_plan(trigger=3, waiting=2, straggling=False, partial=True, budget=4).tail
    False
    >>> make_plan(trigger=3, waiting=3, straggling=False, partial=True, budget=4).budget
    0
    >>> plan = make_plan(trigger=0, waiting=1, straggling=False, partial=True, budget=4)
    >>> [str(status) for status in plan.statuses], plan.budget
    (['init', 'expired', 'aborted'], 4)
    """
    straggling = straggling and trigger >= 0
    tail = (trigger > 0 and waiting >= trigger) or straggling
    # At 0 also what comes back while the batch is being produced is drawn at once.
    again = trigger == 0 or tail
    # What was stopped goes on at once if it keeps its tokens; so it does where nothing is ever collected for a tail.
    if again:
        statuses: tuple[Status, ...] = (Status.INIT, Status.EXPIRED, Status.ABORTED)
    elif partial or trigger < 0:
        statuses = (Status.INIT, Status.ABORTED)
    else:
        statuses = (Status.INIT,)
    return Plan(statuses, 0 if tail else budget, tail)


def to_start(*, target: int, available: int, budget: int, in_flight: int) -> int:
    """How many groups to start now, so that target + budget - available are in flight; at least one is.

    >>> to_start(target=10, available=9, budget=4, in_flight=0), to_start(target=10, available=9, budget=4, in_flight=5)
    (5, 0)
    """
    return max(target + budget - available - in_flight, 0 if in_flight else 1)
