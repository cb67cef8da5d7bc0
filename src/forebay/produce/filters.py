"""Ready-made filters: which finished groups are not worth training on.

A filter gets a whole group, all of it COMPLETED and rewarded, and answers True (keep), False, or a reason. It may
be async.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from forebay.rollout import RolloutState

__all__ = ["Filter", "Verdict", "reject_truncated", "reject_zero_std"]

Verdict: TypeAlias = bool | str
Filter: TypeAlias = Callable[[list[RolloutState]], "Verdict | Awaitable[Verdict]"]


def reject_zero_std(group: Sequence[RolloutState]) -> Verdict:
    """Reject a group whose members all have the same score: its relative advantages are zero."""
    scores = {state.reward.get("score") for state in group if state.reward is not None}
    return "zero_std" if len(group) > 1 and len(scores) <= 1 else True


def reject_truncated(group: Sequence[RolloutState]) -> Verdict:
    """Reject a group in which some answer was cut off at its token limit."""
    return "truncated" if any(state.finish_reason == "length" for state in group) else True
