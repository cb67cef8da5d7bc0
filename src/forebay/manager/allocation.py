"""How the seats of a batch are shared among tasks by weight. Pure.

Seat by seat: every task gains its weight as credit, the largest credit takes the seat and pays the total, ties in task
order. Credits are kept from step to step, so the mix is right over time, also when a batch is smaller than the
number of tasks. They are fractions: nothing is lost to rounding, however long a run is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import TypeAlias

from forebay.checks import whole_number
from forebay.errors import InvalidConfig, InvalidInput

__all__ = ["Credits", "allocate", "check_weights", "load_credits", "save_credits"]

Credits: TypeAlias = "Mapping[str, Fraction]"


def check_weights(weights: Mapping[str, float]) -> None:
    """InvalidConfig unless there are tasks, no weight is negative, and some weight is not zero."""
    if not weights:
        raise InvalidConfig("there is no task; expected at least one")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            raise InvalidConfig(f"the weight of task {name!r} is {weight!r}; expected a number from 0")
    if not any(weights.values()):
        raise InvalidConfig(f"the weights of all tasks ({', '.join(weights)}) are 0; expected one above 0")


def allocate(batch_size: int, weights: Mapping[str, float], credits: Credits) -> tuple[dict[str, int], Credits]:
    """How many groups of a batch each task gives, and the credits after that.

    >>> sizes, credits = allocate(7, {"b": 1, "a": 2, "c": 0}, {})
    >>> sizes
    {'b': 2, 'a': 5, 'c': 0}
    >>> allocate(1, {"b": 1, "a": 2, "c": 0}, credits)[0]
    {'b': 1, 'a': 0, 'c': 0}
    """
    check_weights(weights)
    try:
        whole_number("batch_size", batch_size, least=0)
    except InvalidInput as error:
        raise InvalidInput(f"{error} (groups of all tasks together)") from None
    gains = {name: Fraction(str(weight)) for name, weight in weights.items()}
    total = sum(gains.values())
    held = {name: credits.get(name, Fraction(0)) for name in weights}
    sizes = dict.fromkeys(weights, 0)
    for _ in range(batch_size):
        for name, gain in gains.items():
            held[name] += gain
        taker = max(gains, key=lambda name: (gains[name] > 0, held[name]))
        held[taker] -= total
        sizes[taker] += 1
    return sizes, held


def save_credits(credits: Credits) -> dict[str, str]:
    """Credits as plain data.

    >>> save_credits({"a": Fraction(-1, 3)})
    {'a': '-1/3'}
    """
    return {name: str(credit) for name, credit in credits.items()}


def load_credits(state: Mapping[str, str]) -> Credits:
    """What `save_credits` gave; ValueError if it is something else."""
    return {str(name): Fraction(str(credit)) for name, credit in state.items()}
