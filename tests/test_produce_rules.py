"""The arithmetic of producing, and the defaults of its settings."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import Budgets, InvalidInput, Status, Timeouts
from forebay.produce.plan import Plan, make_plan, over_issue, to_run, waiting_again

ALL = (Status.INIT, Status.EXPIRED, Status.ABORTED)


@pytest.mark.parametrize(
    ("threshold", "batch_size", "groups"),
    [
        (0.07, 100, 7),  # 0.07 * 100 is 7.000000000000001, which the reference rounds up to 8
        (0.29, 100, 29),
        (1.1, 10, 11),
        (1.0, 4, 4),
        (0.5, 3, 2),
        (0.1, 3, 1),
        (0.0, 8, 0),
        (0, 8, 0),
        (2, 4, 8),
        (1e-9, 8, 1),
        (0.5, 0, 0),
    ],
)
def test_over_issue_is_the_share_of_a_batch_rounded_up(threshold: float, batch_size: int, groups: int) -> None:
    assert over_issue(threshold, batch_size) == groups


@given(st.integers(0, 400), st.integers(0, 5000))
def test_over_issue_is_exact_for_every_percentage(percent: int, batch_size: int) -> None:
    exact = Fraction(percent, 100) * batch_size
    assert over_issue(float(Decimal(percent) / 100), batch_size) == -(-exact.numerator // exact.denominator)


def test_aborted_groups_start_again_only_without_partial_rollout() -> None:
    assert waiting_again(2, 3, partial=True) == 2
    assert waiting_again(2, 3, partial=False) == 5


@pytest.mark.parametrize(
    ("trigger", "waiting", "plan"),
    [
        (3, 2, Plan((Status.INIT, Status.ABORTED), 4, False)),
        (3, 3, Plan(ALL, 0, True)),
        (3, 9, Plan(ALL, 0, True)),
        (0, 1, Plan(ALL, 4, False)),
        (0, 0, Plan(ALL, 4, False)),  # groups that are returned meanwhile are drawn at once
        (-1, 5, Plan((Status.INIT, Status.ABORTED), 4, False)),
        (-1, 0, Plan((Status.INIT, Status.ABORTED), 4, False)),
    ],
)
def test_the_trigger_decides_what_is_drawn_first(trigger: int, waiting: int, plan: Plan) -> None:
    assert make_plan(trigger=trigger, waiting=waiting, partial=True, budget=4) == plan


def test_without_partial_rollout_aborted_groups_wait_for_a_tail_batch() -> None:
    assert make_plan(trigger=3, waiting=2, partial=False, budget=4).statuses == (Status.INIT,)
    assert make_plan(trigger=3, waiting=3, partial=False, budget=4).statuses == ALL
    assert make_plan(trigger=-1, waiting=3, partial=False, budget=4).statuses == (Status.INIT, Status.ABORTED)


def test_enough_groups_are_started_for_the_target_and_the_budget() -> None:
    assert to_run(target=10, available=9, budget=4) == 5
    assert to_run(target=4, available=3, budget=0) == 1


def test_at_least_one_group_is_in_flight() -> None:
    assert to_run(target=10, available=12, budget=0) == 1


def test_the_defaults_are_those_of_the_specification() -> None:
    timeouts = Timeouts()
    assert timeouts.member_timeout_s == 1800
    assert timeouts.pause_interval_s == 5
    assert timeouts.pause_request_timeout_s == 30
    assert timeouts.pause_timeout_s == 60
    assert timeouts.judge_timeout_s == 10
    assert timeouts.judge_give_up_s == 600
    budgets = Budgets()
    assert budgets.max_consecutive_failures == 20
    assert [budgets.rejections(batch_size) for batch_size in (4, 1, 0)] == [80, 20, 20]
    assert Budgets(max_consecutive_rejections=3).rejections(4) == 3


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), True, "5", None])
def test_timeouts_are_positive_seconds(seconds: Any) -> None:
    for name in Timeouts.__struct_fields__:
        with pytest.raises(InvalidInput, match=name):
            Timeouts(**{name: seconds})


@pytest.mark.parametrize("number", [0, -1, 1.5, "5", True])
def test_budgets_are_positive_integers(number: Any) -> None:
    for name in Budgets.__struct_fields__:
        with pytest.raises(InvalidInput, match=name):
            Budgets(**{name: number})
