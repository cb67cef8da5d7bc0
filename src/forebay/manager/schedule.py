"""How far producer and consumer are: which steps are planned, and what each task owes for them. Pure state.

A step is planned once, when the producer comes to it (or the consumer, if it is earlier): so many groups of each task.
It stays planned until its batch has been acknowledged, and then counts as consumed. What a task owes are its groups of
all planned steps; whether they are there is read from the ledger, never counted here. So a restart in the middle of
anything owes neither too little nor too much.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from forebay.errors import DamagedData, InvalidInput
from forebay.manager.allocation import Credits, allocate, load_credits, save_credits

__all__ = ["PlannedStep", "ProduceProgress"]


Step: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class PlannedStep(msgspec.Struct, frozen=True):
    """What one train step takes, and the credits before it was planned."""

    sizes: dict[str, Count]
    credits_before: dict[str, str]

    @property
    def batch_size(self) -> int:
        return sum(self.sizes.values())


class _State(msgspec.Struct, kw_only=True, frozen=True):
    next_consumer_step: Step
    producer_future_step: Step
    consumed: dict[str, Count]
    planned: dict[Step, PlannedStep]
    credits: dict[str, str]


class ProduceProgress:
    """Steps and what is owed for them. `weights` are those of the tasks, in their order."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = dict(weights)
        self.next_consumer_step = 1
        self.producer_future_step = 1
        self.consumed = dict.fromkeys(weights, 0)
        self.planned: dict[int, PlannedStep] = {}
        self.credits: Credits = {}
        self.skipped: set[str] = set()  # tasks that steps are planned without for a while
        self._last: tuple[int, int, dict[int, PlannedStep]] | None = None

    def __repr__(self) -> str:
        return (
            f"<ProduceProgress: consumer at step {self.next_consumer_step}, producer at {self.producer_future_step}, "
            f"consumed {self.consumed}, target {self.target}>"
        )

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

    def plan(self, batch_size: int, train_step: int) -> dict[str, int]:
        """What a step takes of each task. Steps before it that nobody has planned are left out, and cost no credit."""
        if train_step < self.next_consumer_step:
            raise InvalidInput(
                f"train step {train_step} was acknowledged already; the next one is {self.next_consumer_step}"
            )
        if train_step not in self.planned:
            before = save_credits(self.credits)
            sizes, self.credits = allocate(batch_size, self.active_weights, self.credits)
            self.planned[train_step] = PlannedStep(sizes, before)
        step = self.planned[train_step]
        if step.batch_size != batch_size:
            raise InvalidInput(
                f"step {train_step} is planned with {step.batch_size} groups, but {batch_size} were asked for; use one "
                "batch size for produce_loop and get_batch"
            )
        return {name: step.sizes.get(name, 0) for name in self.weights}

    @property
    def active_weights(self) -> dict[str, float]:
        """The weights that steps are planned with."""
        return {name: 0.0 if name in self.skipped else weight for name, weight in self.weights.items()}

    def skip_task(self, name: str, *, leased: Collection[int]) -> None:
        """Plan the steps that were not handed out again, without a task."""
        self.skipped.add(name)
        again = {number: step.batch_size for number, step in self.planned.items() if number not in leased}
        if again:
            self.credits = load_credits(self.planned[min(again)].credits_before)
        for number in again:
            del self.planned[number]
        for number in sorted(again):
            self.plan(again[number], number)

    def skip_to(self, train_step: int) -> None:
        """Go on producing from this step: those before it that nobody has planned are left out."""
        self.producer_future_step = max(self.producer_future_step, train_step)

    @property
    def begun(self) -> bool:
        """Whether any step was planned yet."""
        return bool(self.planned) or any(self.consumed.values())

    def change_batch_size(self, batch_size: int) -> None:
        """From now on steps have this size; if some are planned with another, all are planned anew."""
        if any(step.batch_size != batch_size for step in self.planned.values()):
            self.forget_planned()

    def consume(self, train_step: int) -> None:
        """A step is acknowledged: it, and those before it that were left out, are planned no more."""
        removed = {number: step for number, step in self.planned.items() if number <= train_step}
        for number, step in removed.items():
            del self.planned[number]
            if number == train_step:
                for name, groups in step.sizes.items():
                    self.consumed[name] = self.consumed.get(name, 0) + groups
        self._last = (train_step, self.next_consumer_step, removed)
        self.next_consumer_step = max(self.next_consumer_step, train_step + 1)
        self.producer_future_step = max(self.producer_future_step, self.next_consumer_step)

    def undo_consume(self, train_step: int) -> None:
        """The acknowledgement of the step that was consumed last did not come about."""
        if self._last is None or self._last[0] != train_step:
            return
        _, self.next_consumer_step, removed = self._last
        self._last = None
        self.planned = dict(sorted((self.planned | removed).items()))
        if train_step in removed:
            for name, groups in removed[train_step].sizes.items():
                self.consumed[name] -= groups

    def forget_planned(self) -> None:
        """Set the targets back, so that the producer owes the next step only, as if nothing had been planned.

        For a buffer that was not saved. Next consumer 3, future 5, consumed 2, target 5, planned up to 5 becomes 3, 3,
        2, 2, 2; the credits are those from before step 3 was planned.
        """
        if self.planned:
            self.credits = load_credits(self.planned[min(self.planned)].credits_before)
        self.planned.clear()
        self.producer_future_step = self.next_consumer_step

    # --- checkpoints ----------------------------------------------------------------------------------

    def state(self, model_step: int) -> dict[str, Any]:
        """As plain data, relative to weights: the steps up to `model_step` count as consumed."""
        copy = ProduceProgress(self.weights)
        copy.next_consumer_step, copy.producer_future_step = self.next_consumer_step, self.producer_future_step
        copy.consumed, copy.planned, copy.credits = dict(self.consumed), dict(self.planned), self.credits
        for number in sorted(self.planned):
            if number <= model_step:
                copy.consume(number)
        state = _State(
            next_consumer_step=max(copy.next_consumer_step, model_step + 1),
            producer_future_step=max(copy.producer_future_step, model_step + 1),
            consumed=copy.consumed,
            planned=copy.planned,
            credits=save_credits(copy.credits),
        )
        content = msgspec.to_builtins(state)
        content["planned"] = {str(number): step for number, step in content["planned"].items()}
        assert isinstance(content, dict)
        return content

    def load_state(self, content: object) -> set[str]:
        """Take up a saved state; the names of tasks in it that are no longer there."""
        try:
            state = msgspec.convert(content, _State, strict=False)
            credits = load_credits(state.credits)
            for step in state.planned.values():
                load_credits(step.credits_before)
        except (msgspec.ValidationError, ValueError, ZeroDivisionError) as error:
            raise DamagedData(f"the progress in a checkpoint cannot be read: {error}") from None
        if any(number < state.next_consumer_step for number in state.planned):
            raise DamagedData("the progress in a checkpoint cannot be read: a step is planned that was consumed before")
        gone = {name for name in (*state.consumed, *state.credits) if name not in self.weights}
        self.next_consumer_step = state.next_consumer_step
        self.producer_future_step = max(state.producer_future_step, state.next_consumer_step)
        self.consumed = {name: state.consumed.get(name, 0) for name in self.weights}
        self.credits = {name: credit for name, credit in credits.items() if name in self.weights}
        self.planned, self._last = dict(state.planned), None
        planned_tasks = {name for step in state.planned.values() for name, groups in step.sizes.items() if groups}
        active = {name for name, weight in self.weights.items() if weight > 0}
        if planned_tasks - active or self.weights.keys() - set(state.credits or state.consumed):
            self.forget_planned()  # other tasks: another mix
            self.credits = {name: credit for name, credit in self.credits.items() if name in self.weights}
        return gone
