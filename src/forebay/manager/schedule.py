"""How a batch is shared among tasks, which steps are planned, and what each task owes for them. Pure.

A step is planned once, when the producer reaches it (or the consumer, if it is earlier): n groups of each task. It is
planned until its batch has been acknowledged, and then counts as consumed. A task owes its groups of all planned steps;
how many of them exist is read from the ledger, never counted here. So a restart at any moment owes neither too little
nor too much.

A batch is shared seat by seat: every task gains its share of the weights as credit, the largest credit takes the seat
and pays 1, ties in task order. Credits are kept from step to step, so the mix is right over time, also when a batch is
smaller than the number of tasks. They are fractions of a seat: rounding loses nothing, however long a run is.

At any moment a task is less than 1 seat ahead of its share (the taker of a seat has a credit above 0), and of n tasks
at most 1/2 + 1/3 + ... + 1/n behind. Of the k largest credits the mean is at most 1/(k+1) + ... + 1/n: a seat that one
of them takes costs them what they gained; for a seat that another one takes, that one had the largest credit, so their
mean was no larger than that of all k+1, which had gained at most 1 together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Annotated, Any, TypeAlias

import msgspec

from forebay.core.validate import checked_integer
from forebay.errors import DamagedData, InvalidConfig, InvalidInput

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
    # In integers: with fractions, a large batch of many tasks would block the event loop.
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
    """Credits from plain data; ValueError if they are not what `save_credits` returned."""
    for name, credit in state.items():
        if not isinstance(credit, str) or not _CREDIT.fullmatch(credit):  # a power of ten could take forever
            raise ValueError(f"the credit of task {name!r} is {credit!r:.80}; expected a fraction such as -1/3")
    return {str(name): Fraction(credit) for name, credit in state.items()}


Step: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class PlannedStep(msgspec.Struct, frozen=True):
    """The groups of one train step by task, the credits before it was planned, and the size that was asked for."""

    sizes: dict[str, Count]
    credits_before: dict[str, str]
    asked: Count | None = None  # if its tasks could not give as many groups

    @property
    def batch_size(self) -> int:
        return sum(self.sizes.values()) if self.asked is None else self.asked


class _State(msgspec.Struct, kw_only=True, frozen=True):
    next_consumer_step: Step
    producer_future_step: Step
    consumed: dict[str, Count]
    planned: dict[Step, PlannedStep]
    credits: dict[str, str]
    skipped: list[str] = []
    most: dict[str, Count] = {}


class Consumed(msgspec.Struct, frozen=True):
    """What acknowledging a step changed, for `ProduceProgress.undo_consume`."""

    train_step: int
    next_consumer_step: int
    removed: dict[int, PlannedStep]


class ProduceProgress:
    """Planned steps, and the groups that are owed for them. `weights`: of the tasks, in their order."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = dict(weights)
        self.next_consumer_step = 1
        self.producer_future_step = 1
        self.consumed = dict.fromkeys(weights, 0)
        self.planned: dict[int, PlannedStep] = {}
        self.credits: dict[str, str] = {}  # as saved
        self.skipped: set[str] = set()  # tasks that steps are planned without for a while
        self.most: dict[str, int] = {}  # of tasks at the end of their data: groups, consumed or planned, in all

    @property
    def target(self) -> dict[str, int]:
        """Groups of each task, consumed or planned, since the beginning."""
        return {
            name: consumed + sum(step.sizes.get(name, 0) for step in self.planned.values())
            for name, consumed in self.consumed.items()
        }

    @property
    def target_upto(self) -> int:
        """The last step that is consumed or planned."""
        return max(self.planned, default=self.next_consumer_step - 1)

    def owed(self, task_name: str, upto: int) -> int:
        """Groups of a task that the steps planned so far, up to this one, have still to get."""
        return sum(step.sizes.get(task_name, 0) for number, step in self.planned.items() if number <= upto)

    def plan(self, batch_size: int, train_step: int, *, leased: Collection[int] | None = None) -> dict[str, int]:
        """The groups of a step by task. Steps before it that were not planned are left out, and cost no credit.

        A step that is planned keeps its size. `leased`: the trainer asks for the step, and has these; it gets the size
        that it asks for, and of the last groups of the data before later steps.
        """
        if train_step < self.next_consumer_step:
            raise InvalidInput(
                f"train step {train_step} was already acknowledged; the next one is {self.next_consumer_step}"
            )
        step = self.planned.get(train_step)
        if leased is not None and step is not None and step.batch_size != batch_size:
            del self.planned[train_step]
        if train_step not in self.planned:
            before = self.credits
            sizes = self._allocate(batch_size)
            asked = None if sum(sizes.values()) == batch_size else batch_size
            self.planned[train_step] = PlannedStep(sizes, before, asked)
            if leased is not None and self.most and max(self.planned) > train_step:
                self._plan_again(leased)
        return self.sizes(train_step)

    def _allocate(self, batch_size: int) -> dict[str, int]:
        """The groups of the next step by task: fewer than asked for if tasks are at the end of their data."""
        if not self.most:
            sizes, credits = allocate(batch_size, self.active_weights, load_credits(self.credits))
            self.credits = save_credits(credits)
            return sizes
        sizes, target = dict.fromkeys(self.weights, 0), self.target
        for _ in range(batch_size):
            full = {name for name, most in self.most.items() if target.get(name, 0) + sizes[name] >= most}
            weights = {name: 0.0 if name in full else weight for name, weight in self.active_weights.items()}
            if not any(weights.values()):
                break
            seat, credits = allocate(1, weights, load_credits(self.credits))
            self.credits = save_credits(credits)
            sizes = {name: groups + seat[name] for name, groups in sizes.items()}
        return sizes

    def sizes(self, train_step: int) -> dict[str, int]:
        """The groups of a planned step by task."""
        return {name: self.planned[train_step].sizes.get(name, 0) for name in self.weights}

    @property
    def active_weights(self) -> dict[str, float]:
        """The weights that steps are planned with."""
        return {name: 0.0 if name in self.skipped else weight for name, weight in self.weights.items()}

    def skip_task(self, name: str, *, leased: Collection[int]) -> None:
        """Plan again, without a task, the steps that were not handed out."""
        self.skipped.add(name)
        self._plan_again(leased)

    def end_task(self, name: str, left: int, *, leased: Collection[int]) -> None:
        """A task has no more prompts, and `left` groups for steps that are planned or to come: plan with these."""
        self.most[name] = self.consumed.get(name, 0) + left
        self._plan_again(leased)

    def reopen_task(self, name: str, *, leased: Collection[int]) -> None:
        """A task that was at the end of its data has more."""
        if self.most.pop(name, None) is not None:
            self._plan_again(leased)

    def change_weights(self, weights: Mapping[str, float], *, leased: Collection[int]) -> None:
        """Plan with these tasks and weights, again for the steps that were not handed out."""
        check_weights(weights)
        self.weights = dict(weights)
        self.consumed = {name: self.consumed.get(name, 0) for name in weights}
        self.skipped &= weights.keys()
        self.most = {name: most for name, most in self.most.items() if name in weights}
        self._plan_again(leased)

    def _plan_again(self, leased: Collection[int]) -> None:
        again = {number: step.batch_size for number, step in self.planned.items() if number not in leased}
        if again:
            self.credits = self.planned[min(again)].credits_before
        for number in again:
            del self.planned[number]
        self.credits = {name: credit for name, credit in self.credits.items() if name in self.weights}
        for number in sorted(again):
            self.plan(again[number], number)

    def shrink(self, train_step: int, sizes: dict[str, int], *, leased: Collection[int]) -> None:
        """A leased step has only these groups: the others are for later steps."""
        step = self.planned.get(train_step)
        if step is not None:
            self.planned[train_step] = PlannedStep(sizes, step.credits_before, step.batch_size)
            if self.most:
                self._plan_again({*leased, train_step})

    def skip_to(self, train_step: int) -> None:
        """Continue producing from this step: steps before it that were not planned are left out."""
        self.producer_future_step = max(self.producer_future_step, train_step)

    @property
    def begun(self) -> bool:
        """Whether any step was planned yet."""
        return bool(self.planned) or any(self.consumed.values())

    def change_batch_size(self, batch_size: int, *, leased: Collection[int]) -> None:
        """From now on steps have this size; if some are planned with another, all but leased ones are planned again."""
        kept = {number: step for number, step in self.planned.items() if number in leased}
        if any(step.batch_size != batch_size for number, step in self.planned.items() if number not in kept):
            self.credits = self.planned[min(self.planned.keys() - kept.keys())].credits_before
            self.planned = kept
            self.producer_future_step = max([self.next_consumer_step, *[number + 1 for number in kept]])

    def consume(self, train_step: int) -> Consumed:
        """A step is acknowledged: it, and the steps before it that were left out, are no longer planned."""
        removed = {number: step for number, step in self.planned.items() if number <= train_step}
        for number, step in removed.items():
            del self.planned[number]
            if number == train_step:
                for name, groups in step.sizes.items():
                    self.consumed[name] = self.consumed.get(name, 0) + groups
        consumed = Consumed(train_step, self.next_consumer_step, removed)
        self.next_consumer_step = max(self.next_consumer_step, train_step + 1)
        self.producer_future_step = max(self.producer_future_step, self.next_consumer_step)
        return consumed

    def undo_consume(self, consumed: Consumed) -> None:
        """The acknowledgement of a step failed. Nothing to undo if a later one was acknowledged since."""
        if self.next_consumer_step > max(consumed.train_step + 1, consumed.next_consumer_step):
            return
        self.next_consumer_step = consumed.next_consumer_step
        self.planned = dict(sorted((self.planned | consumed.removed).items()))
        if consumed.train_step in consumed.removed:
            for name, groups in consumed.removed[consumed.train_step].sizes.items():
                self.consumed[name] -= groups

    def forget_planned(self) -> None:
        """Reset the targets, so that the producer owes the next step only, as if nothing had been planned.

        For a buffer that was not saved. Next consumer 3, future 5, consumed 2, target 5, planned up to 5 becomes 3, 3,
        2, 2, 2; the credits are those from before step 3 was planned.
        """
        if self.planned:
            self.credits = self.planned[min(self.planned)].credits_before
        self.planned.clear()
        self.producer_future_step = self.next_consumer_step

    # --- checkpoints ----------------------------------------------------------------------------------

    def state(self, model_step: int) -> dict[str, Any]:
        """As plain data, relative to weights: the steps up to `model_step` count as consumed."""
        copy = ProduceProgress(self.weights)
        copy.load(self.dump())
        for number in sorted(self.planned):
            if number <= model_step:
                copy.consume(number)
        first = model_step + 1
        copy.next_consumer_step = max(copy.next_consumer_step, first)
        copy.producer_future_step = max(copy.producer_future_step, first)
        copy.skipped.clear()  # they are tried again
        copy.most.clear()  # there may be more data by then
        return copy.dump()

    def dump(self) -> dict[str, Any]:
        """As plain data."""
        state = _State(
            next_consumer_step=self.next_consumer_step,
            producer_future_step=self.producer_future_step,
            consumed=self.consumed,
            planned=self.planned,
            credits=self.credits,
            skipped=sorted(self.skipped),
            most=self.most,
        )
        content: dict[str, Any] = msgspec.to_builtins(state, str_keys=True)
        return content

    def load(self, content: object) -> None:
        """Continue from what `dump` returned."""
        self._adopt(self._read(content))

    def _adopt(self, state: _State) -> None:
        self.next_consumer_step = state.next_consumer_step
        self.producer_future_step = max(state.producer_future_step, state.next_consumer_step)
        self.consumed = {name: state.consumed.get(name, 0) for name in self.weights}
        self.credits = dict(state.credits)
        self.planned, self.skipped, self.most = dict(state.planned), set(state.skipped), dict(state.most)

    def _read(self, content: object) -> _State:
        try:
            state = msgspec.convert(content, _State, strict=False)
            for credits in (state.credits, *[step.credits_before for step in state.planned.values()]):
                load_credits(credits)
        except (msgspec.ValidationError, ValueError, ZeroDivisionError) as error:
            raise DamagedData(f"the progress in a checkpoint cannot be read: {error}") from None
        if any(number < state.next_consumer_step for number in state.planned):
            raise DamagedData("the progress in a checkpoint cannot be read: a step is planned that was consumed before")
        return state

    def load_state(self, content: object) -> set[str]:
        """Continue from a saved state; returns the names of tasks in it that no longer exist."""
        state = self._read(content)
        gone = {name for name in (*state.consumed, *state.credits) if name not in self.weights}
        self._adopt(state)
        planned_tasks = {name for step in state.planned.values() for name, groups in step.sizes.items() if groups}
        active = {name for name, weight in self.weights.items() if weight > 0}
        if planned_tasks - active or self.weights.keys() - set(state.credits or state.consumed):
            self.forget_planned()  # other tasks: another mix
        self.credits = {name: credit for name, credit in self.credits.items() if name in self.weights}
        return gone
