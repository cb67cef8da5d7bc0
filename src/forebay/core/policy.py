"""The order in which groups leave the buffer.

A policy is an `Order` over columns of `Record`. The storage gets the order when it opens, so that it can keep an index;
groups that are equal in all columns leave in order of arrival. A user's policy may implement `choose` instead: the
storage calls it within a claim, with at most 1,024 rows in order of arrival.

>>> FIFOReplayPolicy().order.columns
()
>>> StalenessReplayPolicy().order
Order(columns=(Column(name='oldest_step', descending=False), Column(name='given_staleness', descending=True)))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec

from forebay.core.ledger import Record
from forebay.errors import InvalidConfig, PolicyError

CHOICE_ROWS = 1024
"""The largest number of rows that `choose` gets."""

_ORDERABLE = (
    "oldest_step",
    "newest_step",
    "given_staleness",
    "group_id",
    "samples",
    "tokens",
    "bytes",
    "num_tries",
    "deliveries",
    "reward",
    "priority",
    "created_at",
)


class Column(msgspec.Struct, frozen=True):
    """One numeric column to sort by; groups without a value come last."""

    name: str
    descending: bool = False

    def __post_init__(self) -> None:
        if self.name not in _ORDERABLE:
            raise InvalidConfig(f"cannot order by {self.name!r}; expected one of {', '.join(_ORDERABLE)}")


class Order(msgspec.Struct, frozen=True):
    """The columns to sort by, the first one first; then by arrival."""

    columns: tuple[Column, ...] = ()


ARRIVAL = Order()

OrderKey: TypeAlias = "tuple[Any, ...]"
Choose: TypeAlias = "Callable[[Sequence[Record], int], Sequence[int]]"


def order_key(order: Order) -> Callable[[Record], OrderKey]:
    """A function that maps a record to its sort key: a tuple that ends with arrival and uid."""
    columns = [(attrgetter(column.name), column.descending) for column in order.columns]

    def key(record: Record) -> OrderKey:
        parts: list[Any] = []
        for get, descending in columns:
            value = get(record)
            parts.append(math.inf if value is None else -value if descending else value)
        return (*parts, record.timestamp_id, record.uid)

    return key


class ReplayPolicy:
    """The base of all policies: order of arrival, unless a subclass changes it.

    Set `order`, or define `choose(rows, n) -> uids`. Policies are equal if their types and orders are.
    """

    order: Order = ARRIVAL
    choose: Choose | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.order == other.order

    def __hash__(self) -> int:
        return hash((type(self), self.order))


class FIFOReplayPolicy(ReplayPolicy):
    """First in, first out."""


class StalenessReplayPolicy(ReplayPolicy):
    """Oldest model step first, so that groups leave before they expire; groups without versions last."""

    order = Order((Column("oldest_step"), Column("given_staleness", descending=True)))


class FreshestReplayPolicy(ReplayPolicy):
    """Newest model step first."""

    order = Order((Column("newest_step", descending=True),))


class PriorityReplayPolicy(ReplayPolicy):
    """Highest priority first; see `ReplayBuffer.set_priority`."""

    order = Order((Column("priority", descending=True),))


def checked_choice(choose: Choose, rows: Sequence[Record], n: int) -> list[int]:
    """The uids that a user's policy chose; PolicyError if they are not distinct uids of the rows, at most n."""
    answer = choose(rows, n)
    if not isinstance(answer, Iterable):
        raise PolicyError(f"choose returned a {type(answer).__name__}; expected the uids of rows")
    chosen = list(answer)
    offered = {row.uid for row in rows}
    strange = [uid for uid in chosen if not isinstance(uid, int) or uid not in offered]
    if strange:
        raise PolicyError(f"choose returned uid {strange[0]!r}, which is not among its {len(rows)} rows")
    if len(set(chosen)) != len(chosen):
        raise PolicyError(f"choose returned a uid twice: {chosen}")
    if len(chosen) > n:
        raise PolicyError(f"choose returned {len(chosen)} uids; expected at most {n}")
    return chosen
