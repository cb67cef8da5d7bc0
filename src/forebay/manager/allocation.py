"""How the seats of a batch are shared among tasks by weight. Pure.

Seat by seat: every task gains its share of the weights as credit, the largest credit takes the seat and pays 1, ties in
task order. Credits are kept from step to step, so the mix is right over time, also when a batch is smaller than the
number of tasks. They are fractions of a seat: nothing is lost to rounding, however long a run is, and other weights
in a later run mean what they say.

How far n tasks are from their share, at any moment: less than 1 seat ahead (who takes one has a credit above 0), and at
most 1/2 + 1/3 + ... + 1/n behind. Of the k largest credits the mean is at most 1/(k+1) + ... + 1/n: a seat that one of
them takes costs them what they gained; for a seat that another one takes, that one had the largest credit, so their
mean was no larger than that of all k+1, which had gained at most 1 together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import TypeAlias

from forebay.core.validate import checked_integer
from forebay.errors import InvalidConfig, InvalidInput

__all__ = ["Credits", "allocate", "check_weights", "load_credits", "save_credits"]

Credits: TypeAlias = "Mapping[str, Fraction]"

_CREDIT = re.compile(r"-?[0-9]{1,1000}(/[0-9]{1,1000})?", re.ASCII)


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
        checked_integer("batch_size", batch_size, least=0)
    except InvalidInput as error:
        raise InvalidInput(f"{error} (groups of all tasks together)") from None
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    total = sum(exact.values())
    gains = {name: weight / total for name, weight in exact.items()}
    held = {name: credits.get(name, Fraction(0)) for name in weights}
    # In integers: with fractions, a large batch of many tasks would hold the event loop.
    seat = math.lcm(*[fraction.denominator for fraction in (*gains.values(), *held.values())])
    gained = {name: int(gain * seat) for name, gain in gains.items() if gain}
    credit = {name: int(held[name] * seat) for name in gained}
    sizes = dict.fromkeys(weights, 0)
    for _ in range(batch_size):
        for name, gain in gained.items():
            credit[name] += gain
        taker = max(credit, key=credit.__getitem__)
        credit[taker] -= seat
        sizes[taker] += 1
    return sizes, held | {name: Fraction(parts, seat) for name, parts in credit.items()}


def save_credits(credits: Credits) -> dict[str, str]:
    """Credits as plain data.

    >>> save_credits({"a": Fraction(-1, 3)})
    {'a': '-1/3'}
    """
    return {name: str(credit) for name, credit in credits.items()}


def load_credits(state: Mapping[str, str]) -> Credits:
    """What `save_credits` gave; ValueError if it is something else."""
    for name, credit in state.items():
        if not isinstance(credit, str) or not _CREDIT.fullmatch(credit):  # a power of ten could take for ever
            raise ValueError(f"the credit of task {name!r} is {credit!r:.80}; expected a fraction such as -1/3")
    return {str(name): Fraction(credit) for name, credit in state.items()}
