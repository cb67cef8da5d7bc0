"""Which groups of a batch belong to which trainer rank. Every rank computes the same answer without communication."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from forebay.core.rollout import RolloutState
from forebay.core.validate import checked_integer
from forebay.errors import InvalidInput

G = TypeVar("G", bound=Sequence[RolloutState])


def shard(groups: Sequence[G], rank: int, world_size: int, cost: Callable[[G], float] | None = None) -> list[G]:
    """The groups of one rank out of `world_size`: every group on one rank, numbers equal to one, balanced by cost.

    The cost of a group is the number of its tokens, or `cost(group)`. Largest first, each to the rank that has the
    lowest cost and still a place. The order within a rank is that of the batch.

    >>> groups = [[RolloutState(message=[], response_ids=[7] * n)] for n in (3, 2, 2, 2, 1, 1)]
    >>> [[group[0].num_tokens for group in shard(groups, rank, 2)] for rank in range(2)]
    [[3, 2, 1], [2, 2, 1]]
    >>> squared = lambda group: sum(state.num_tokens**2 for state in group)
    >>> [[group[0].num_tokens for group in shard(groups, rank, 2, cost=squared)] for rank in range(2)]
    [[3, 1, 1], [2, 2, 2]]
    """
    checked_integer("world_size", world_size, least=1)
    if checked_integer("rank", rank, least=0) >= world_size:
        raise InvalidInput(f"rank is {rank} of world_size {world_size}; expected 0 to {world_size - 1}")
    places = [len(groups) // world_size + (index < len(groups) % world_size) for index in range(world_size)]
    free = [(0.0, taker) for taker in range(world_size) if places[taker]]  # a heap: the lowest cost first
    chosen: list[int] = []
    costs = [_tokens(group) if cost is None else _checked_cost(cost(group), group) for group in groups]
    for index in sorted(range(len(groups)), key=lambda index: (-costs[index], index)):
        load, taker = heapq.heappop(free)
        places[taker] -= 1
        if places[taker]:
            heapq.heappush(free, (load + costs[index], taker))
        if taker == rank:
            chosen.append(index)
    return [groups[index] for index in sorted(chosen)]


def _tokens(group: Sequence[RolloutState]) -> float:
    return sum(state.num_tokens for state in group)


def _checked_cost(cost: float, group: Sequence[RolloutState]) -> float:
    try:
        number = float(cost)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise InvalidInput(
            f"cost of group {group[0].group_id if group else None} is {cost!r:.80}; expected a finite number, 0 or more"
        )
    return number
