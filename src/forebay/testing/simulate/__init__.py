"""Virtual time: hours of producing and training in milliseconds, the same every time.

`run` runs a program on an event loop whose clock jumps from timer to timer and whose tasks take turns in an order that
a seed decides; `SimulatedEngine` answers prompts there, with long tails, failures and hangs as asked for; `train` runs
the real strategies, samplers and buffer around it, and says what was trained, when, and at what age. A seed under
which a test fails fails again, in another process too.

`train` is the colocated loop: produce a batch, pause, train on it, and load new weights now and then. After every step
it checks that the ledger is closed (G1) and that no group was too old (G6); a violation raises AssertionError.

>>> import asyncio
>>> from forebay.testing import simulate
>>> async def main():
...     await asyncio.sleep(3600)
...     return asyncio.get_running_loop().time()
>>> simulate.run(main, seed=7)
3600.0
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.internal import internals
from forebay.core.ledger import LedgerLine
from forebay.core.rollout import Status, versioned_tokens
from forebay.core.staleness import group_staleness
from forebay.produce.strategy import ProduceStrategy
from forebay.prompts.sampler import Sampler, SamplerWithReplayBuffer
from forebay.testing.simulate.engine import EngineFigures, LengthModel, LongTail, SimulatedEngine, token, tokens
from forebay.testing.simulate.loop import NotSimulated, SimulatedLoop, SimulationLimit, SimulationStuck, run

__all__ = [
    "EngineFigures",
    "LengthModel",
    "LongTail",
    "NotSimulated",
    "SimulatedEngine",
    "SimulatedLoop",
    "SimulationLimit",
    "SimulationStuck",
    "StepReport",
    "TrainingReport",
    "check_ledger",
    "check_nothing_lost",
    "run",
    "token",
    "tokens",
    "train",
]


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One train step."""

    train_step: int
    group_ids: Sequence[int]
    staleness: Sequence[int]  # by group
    waited_steps: Sequence[int]  # between a group's issue and its training
    tokens: int
    started: int
    produce_s: float
    pause_s: float
    tail: bool


class TrainingReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    steps: Sequence[StepReport]
    ledger: LedgerLine
    elapsed_s: float  # virtual
    tokens_generated: int
    tokens_trained: int
    busy_s: float

    @property
    def group_ids(self) -> list[int]:
        """The trained groups, in order."""
        return [group_id for step in self.steps for group_id in step.group_ids]


async def train(
    strategy: ProduceStrategy,
    engine: SimulatedEngine,
    sampler: Sampler | SamplerWithReplayBuffer,
    *,
    steps: int,
    batch_size: int,
    task_name: str = "simulated",
    sync_weights_interval: int = 1,
    train_s: float = 10.0,
    first_step: int = 1,
) -> TrainingReport:
    """Train for `steps` steps, and report on all of them."""
    loop = asyncio.get_running_loop()
    buffer = strategy.replay_buffer
    began, reports = loop.time(), []
    issued_at: dict[int, int] = {}
    model_step = engine.model_step
    for train_step in range(first_step, first_step + steps):
        drawn_before, _ = await internals(buffer).position(task_name)
        production = await strategy.produce_batch(
            engine, sampler, batch_size, task_name, train_step=train_step, model_step=model_step
        )
        assert production.complete, f"step {train_step} was left at {production.available} of {production.target}"
        pause_s = await strategy.pause(task_name)
        drawn_after, _ = await internals(buffer).position(task_name)
        issued_at |= dict.fromkeys(range(drawn_before, drawn_after), train_step)
        async with buffer.lease_batch({task_name: batch_size}, train_step=train_step, timeout_s=0) as lease:
            groups = lease.groups_by_task[task_name]
            staleness = [group_staleness(group, train_step) for group in groups]
            assert all(state.status is Status.COMPLETED for group in groups for state in group)
            assert max(staleness) < strategy.stale_threshold, f"staleness {max(staleness)} at step {train_step}"
            group_ids = [group[0].group_id or 0 for group in groups]
            tokens = sum(versioned_tokens(state) for group in groups for state in group)
            await asyncio.sleep(train_s)
        reports.append(
            StepReport(
                train_step=train_step,
                group_ids=group_ids,
                staleness=staleness,
                waited_steps=[train_step - issued_at.get(group_id, train_step) for group_id in group_ids],
                tokens=tokens,
                started=production.started,
                produce_s=production.seconds,
                pause_s=pause_s,
                tail=production.tail,
            )
        )
        check_ledger(await buffer.ledger())
        if train_step % sync_weights_interval == 0:
            model_step = train_step
            engine.set_weights(model_step)
    figures = engine.figures()
    return TrainingReport(
        steps=reports,
        ledger=(await buffer.ledger())[task_name],
        elapsed_s=loop.time() - began,
        tokens_generated=figures.tokens_generated,
        tokens_trained=sum(step.tokens for step in reports),
        busy_s=figures.busy_s,
    )


def check_ledger(ledger: Mapping[str, LedgerLine]) -> None:
    """AssertionError unless issued is the sum of all the others, for every task."""
    for task_name, line in ledger.items():
        rest = sum(groups for name, groups in line.items() if name != "issued")
        assert line["issued"] == rest, f"the ledger of {task_name!r} is open: {line}"


async def check_nothing_lost(buffer: ReplayBuffer, task_name: str, trained: Sequence[int]) -> None:
    """AssertionError unless every group that was drawn is counted once: trained, ended for a reason, or still held."""
    assert len(trained) == len(set(trained)), "a group was trained twice"
    line = (await buffer.ledger())[task_name]
    check_ledger({task_name: line})
    held = [record.group_id for record in await buffer.query({"task_name": task_name}) if record.place != "archived"]
    assert not set(held) & set(trained), f"trained, and still there: {sorted(set(held) & set(trained))}"
    ended = line["filtered"] + line["failed"] + line["discarded"]
    cursor, _ = await internals(buffer).position(task_name)
    assert len(held) + len(trained) + ended == cursor, f"{cursor} drawn, but {len(held)} held, {len(trained)} trained"
