"""Ready-made filters that reject groups not worth training on.

A filter gets a complete group, all members COMPLETED and rewarded, and returns True (keep), False, or the reason of a
rejection. It may be async. A plain function runs in a thread, like a plain reward, unless `on_loop` declares it cheap.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from forebay.core.rollout import RolloutState

Verdict: TypeAlias = bool | str
Filter: TypeAlias = Callable[[list[RolloutState]], "Verdict | Awaitable[Verdict]"]

F = TypeVar("F", bound=Callable[..., Any])
_ON_LOOP = "forebay_on_loop"


def on_loop(function: F) -> F:
    """Declare a plain reward or filter function cheap: it runs on the event loop instead of in a thread."""
    setattr(function, _ON_LOOP, True)
    return function


def is_cheap(function: Callable[..., Any]) -> bool:
    """Whether a function may run on the event loop."""
    return bool(getattr(function, _ON_LOOP, False))


@on_loop
def reject_zero_std(group: Sequence[RolloutState]) -> Verdict:
    """Reject a group whose members all have the same score: its relative advantages are zero."""
    scores = {state.reward.get("score") for state in group if state.reward is not None}
    return "zero_std" if len(group) > 1 and len(scores) <= 1 else True


@on_loop
def reject_truncated(group: Sequence[RolloutState]) -> Verdict:
    """Reject a group with a response that was cut off at its token limit."""
    return "truncated" if any(state.finish_reason == "length" for state in group) else True
