"""What the members of a run agree on: plain values. `manager.run` keeps them in the store, and changes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from forebay.core.staleness import Limits
from forebay.errors import DamagedData


class TaskTerms(msgspec.Struct, frozen=True):
    """The settings of a task that all members must share, and its weight, which the trainer says."""

    weight: float
    group_size: int
    limits: Limits


class Terms(msgspec.Struct, frozen=True):
    """The settings of a run that all members must share. `batch_size` None: not known yet."""

    tasks: dict[str, TaskTerms]
    sync_weights_interval: int
    version: str
    batch_size: int | None = None

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the tasks."""
        return {name: task.weight for name, task in self.tasks.items()}

    def with_weights(self, weights: Mapping[str, float]) -> Terms:
        """The same terms with other weights."""
        tasks = {name: replace(task, weight=weights[name]) for name, task in self.tasks.items()}
        return replace(self, tasks=tasks)

    def differences(self, other: Terms) -> list[str]:
        """What is different in another member's terms, as lines for people: theirs, then ours."""
        mine, theirs = (msgspec.to_builtins(terms) for terms in (self, other))
        named = sorted(mine["tasks"].keys() | theirs["tasks"].keys())
        found = []
        for name in named:
            one, two = mine["tasks"].get(name), theirs["tasks"].get(name)
            if one is None or two is None:
                found.append(f"task {name!r} is {'missing here' if one is None else 'only here'}")
            else:
                found += [
                    f"{key} of task {name!r} is {two[key]} there, {one[key]} here"
                    for key in one
                    if one[key] != two[key] and key != "weight"
                ]
        for key in ("sync_weights_interval", "version", "batch_size"):
            if mine[key] != theirs[key] and None not in (mine[key], theirs[key]):
                found.append(f"{key} is {theirs[key]} there, {mine[key]} here")
        return found


class Member(msgspec.Struct):
    """An owner that takes part. `followed`: the last epoch whose pause it has seen; `idle`: that it has completed."""

    produces: bool = False
    trains: bool = False
    followed: int = 0
    idle: int = 0
    failure: str | None = None
    away: str | None = None  # why it produces nothing for a while: its engine is unreachable


class Handout(msgspec.Struct):
    """The batch of a step, divided among the ranks of the trainer: the uids of each rank's groups.

    `takers`: the owners of the ranks that have got their part. `trained`: the ranks that have acknowledged it.
    """

    train_step: int
    lease_id: str
    owner: str  # of rank 0
    shards: list[list[int]]
    takers: dict[int, str] = {}
    trained: list[int] = []
    returned_by: int | None = None


class Agreed(msgspec.Struct):
    """What the members of a run agree on. `begun`: a trainer has said which weights generate, or asked for a batch."""

    terms: Terms
    progress: dict[str, Any]
    members: dict[str, Member] = {}
    epoch: int = 0
    paused: bool = False
    begun: bool = False
    model_step: int = 0
    handout: Handout | None = None

    def producers(self, owners: Collection[str]) -> dict[str, Member]:
        """The members that produce and are alive."""
        return {owner: member for owner, member in self.members.items() if member.produces and owner in owners}


encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Agreed)


def decode(plan: bytes) -> Agreed:
    """What a plan says; DamagedData if it cannot be read."""
    try:
        return _decoder.decode(plan)
    except (msgspec.MsgspecError, ValueError) as error:
        raise DamagedData(f"the plan of a run cannot be read: {error}; begin with a new store") from None
