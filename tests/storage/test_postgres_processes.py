"""Many processes at one PostgreSQL buffer: some are killed, one sleeps past its lease, the server crashes.

At the end the ledger closes, no group was trained twice, and nothing is missing (G1, G3, G5, G7).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from forebay import ReplayBuffer
from forebay.buffer.internal import internals
from forebay.core.rollout import RolloutState, Status
from forebay.errors import BufferClosed, CursorMoved, LostLease, StorageUnavailable, WaitTimeout
from forebay.storage.postgres import PostgresStorage
from forebay.testing.samples import make_group
from tests.processes import HANG_S, Child, started
from tests.storage.postgres_server import Schemas, Server, dsn

schemas = Schemas()
TASK = "math"
GROUPS = 160
LEASE_S = 2.0


@pytest.fixture(autouse=True)
def dropped_schemas() -> Iterator[None]:
    yield
    schemas.drop_all()


# --- what the processes do ----------------------------------------------------------------------------


def report(**what: Any) -> None:
    """One line that the parent reads; written at once, or not at all."""
    os.write(1, (json.dumps(what) + "\n").encode())


async def produce(buffer: ReplayBuffer, seed: int) -> None:
    """Draw until the data set of GROUPS prompts is used up; generate; bring back."""
    chance = random.Random(seed)
    while True:
        drawn: list[list[RolloutState]] = await internals(buffer).redraw(2, TASK)
        if not drawn:
            cursor, _ = await internals(buffer).position(TASK)
            if cursor < GROUPS:
                prompts = [make_group(status=Status.INIT, text=f"prompt {cursor + i}") for i in range(2)]
                try:
                    drawn = (await internals(buffer).issue(prompts, TASK, cursor=cursor)).groups
                except CursorMoved:
                    continue
            else:
                line = (await buffer.ledger())[TASK]
                if line["trained"] + line["failed"] == line["issued"]:
                    return
                report(idle=True)
                await asyncio.sleep(0.05)
                # Waiting reaps dead owners; a producer that only polls has to do it.
                await buffer.storage.reap()
                continue
        for group in drawn:
            await asyncio.sleep(chance.uniform(0, 0.01))
            done = make_group(text=group[0].message[0]["content"])
            for state, source in zip(done, group, strict=True):
                state.group_id, state.rollout_id, state.attempt = source.group_id, source.rollout_id, source.attempt
            try:
                await buffer.put(done, TASK, model_step=0)
            except LostLease:
                report(lost="put", group_id=group[0].group_id)
            else:
                report(put=group[0].group_id)


async def consume(buffer: ReplayBuffer, seed: int) -> None:
    """Lease, train, acknowledge, until everything is trained."""
    chance = random.Random(seed)
    while True:
        line = (await buffer.ledger()).get(TASK)
        if line is not None and line["issued"] == GROUPS == line["trained"]:
            return
        try:
            lease = await buffer.lease_batch({TASK: chance.choice([1, 2, 4])}, train_step=1, timeout_s=1.5)
        except WaitTimeout:
            report(idle=True)
            continue
        await asyncio.sleep(chance.uniform(0, 0.02))
        trained = [group[0].group_id for group in lease.groups]
        report(training=trained, lease=lease.id)
        try:
            await lease.ack()
        except LostLease:
            report(lost="ack", lease=lease.id)
        else:
            report(trained=trained, lease=lease.id)


async def sleepwalk(buffer: ReplayBuffer, seed: int) -> None:
    """Hold a drawn group and a lease, say so, and continue only after having been stopped for longer than the lease."""
    (drawn,) = (await internals(buffer).issue([make_group(status=Status.INIT)], TASK, cursor=0)).groups
    lease = await buffer.lease_batch({"code": 1}, train_step=1, timeout_s=HANG_S)
    report(holds=True)
    await asyncio.to_thread(sys.stdin.readline)
    outcomes = []
    for state in drawn:
        state.status, state.response_ids = Status.COMPLETED, [1]
    for attempt in (buffer.put(drawn, TASK, model_step=0), lease.ack()):
        try:
            await attempt
            outcomes.append("done")
        except LostLease:
            outcomes.append("lost")
    report(outcomes=outcomes)


async def store(buffer: ReplayBuffer, seed: int) -> None:
    """Put group after group, and report each one that was acknowledged."""
    n = 0
    while True:
        try:
            uid = await buffer.put(make_group(text=f"{seed}: {n}"), TASK)
        except StorageUnavailable:
            report(away=True)
            await asyncio.sleep(0.1)
            continue
        report(put=uid, n=n)
        n += 1


def main(role: str, where: str, name: str, seed: int) -> None:
    async def run() -> None:
        report(ready=True)
        await asyncio.to_thread(sys.stdin.readline)
        buffer = ReplayBuffer(storage=PostgresStorage(where, name), lease_s=LEASE_S)
        try:
            await globals()[role](buffer, seed)
        except BufferClosed:
            pass
        finally:
            await buffer.close()

    asyncio.run(run())
    report(ended=True)


class Actor:
    """One process, and all that it reported."""

    def __init__(self, child: Child, role: str) -> None:
        self.role = role
        self.process = child
        self.reports: list[dict[str, Any]] = []

    def go(self) -> None:
        """Let it begin, or continue."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def report(self) -> dict[str, Any]:
        """Its next report."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"a process that should {self.role} ended: {self.reports[-1:]}"
        self.reports.append(json.loads(line))
        return self.reports[-1]

    def until(self, key: str) -> None:
        """Read its reports up to the first that has this key."""
        while key not in self.report():
            pass

    def rest(self) -> None:
        """Read its reports to the end of the process."""
        assert self.process.stdout is not None
        self.reports += map(json.loads, self.process.stdout)


class Company(ExitStack):
    """Processes that end with a test."""

    def start(self, role: str, name: str, seed: int, where: str | None = None) -> Actor:
        """Start a process, which waits for `go` before it begins."""
        arguments = ("tests.storage.test_postgres_processes", role, where or dsn(), name, seed)
        return Actor(self.enter_context(started("-m", *arguments, stderr=None)), role)


# --- the tests ----------------------------------------------------------------------------------------


def test_four_produce_and_two_consume_and_some_are_killed() -> None:
    chance = random.Random(7)
    storage = schemas.make()
    seeds = iter(range(100))
    roles = ["produce"] * 4 + ["consume"] * 2
    with Company() as company:
        actors = [company.start(role, storage.name, next(seeds)) for role in roles]
        for actor in actors:
            actor.until("ready")  # all of them begin together
        for actor in actors:
            actor.go()
        victims = chance.sample(actors, 5)
        for victim in victims:
            for _ in range(chance.randint(1, 4)):
                victim.report()
            victim.process.kill()
            actors.append(company.start(victim.role, storage.name, next(seeds)))
            actors[-1].go()
        for actor in actors:
            actor.rest()
    reports = [report for actor in actors for report in actor.reports]
    assert sum("ended" in report for report in reports) == len(roles)

    acknowledged = Counter(group_id for report in reports for group_id in report.get("trained", ()))
    assert max(acknowledged.values()) == 1, "trained twice"
    # A consumer that was killed between its acknowledgement and its report has trained these.
    begun = {group_id for report in reports for group_id in report.get("training", ())}
    assert begun == set(range(GROUPS))

    async def check() -> None:
        async with ReplayBuffer(storage=storage) as buffer:
            (line,) = (await buffer.ledger()).values()
            assert {name: n for name, n in line.items() if n} == {"issued": GROUPS, "trained": GROUPS}
            assert not await storage.verify()
            assert (await internals(buffer).position(TASK))[0] == GROUPS

    asyncio.run(check())


def test_a_zombie_can_neither_put_nor_acknowledge() -> None:
    storage = schemas.make()

    async def prepare() -> None:
        async with ReplayBuffer(storage=storage) as buffer:
            await buffer.put(make_group(), "code")

    async def take_over() -> None:
        async with ReplayBuffer(storage=storage, lease_s=LEASE_S) as buffer:
            lease = await buffer.lease_batch({"code": 1}, train_step=1, timeout_s=HANG_S)
            assert await buffer.count(TASK, Status.ABORTED) == 1
            zombie.process.send_signal(signal.SIGCONT)
            zombie.go()
            assert await asyncio.to_thread(zombie.report) == {"outcomes": ["lost", "lost"]}
            await lease.ack()
            assert (await buffer.ledger())["code"]["trained"] == 1

    asyncio.run(prepare())
    with Company() as company:
        zombie = company.start("sleepwalk", storage.name, 1)
        zombie.go()
        zombie.until("holds")
        zombie.process.send_signal(signal.SIGSTOP)
        asyncio.run(take_over())


@pytest.mark.parametrize("crashes", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_g07_what_was_acknowledged_survives_crashes_of_the_server(crashes: int) -> None:
    server = Server()
    try:
        with Company() as company:
            actors = [company.start("store", "crash", seed, server.dsn) for seed in range(2)]
            for actor in actors:
                actor.go()
            for _ in range(crashes):
                for actor in actors:
                    for _ in range(20):
                        actor.until("put")
                server.stop("immediate")
                for actor in actors:
                    actor.until("away")
                server.start()
            for actor in actors:
                for _ in range(20):
                    actor.until("put")
                actor.process.kill()
                actor.rest()
        reports = [report for actor in actors for report in actor.reports]

        async def check() -> None:
            storage = PostgresStorage(server.dsn, "crash")
            async with ReplayBuffer(storage=storage, lease_s=LEASE_S) as buffer:
                found = {record.uid for record in await buffer.query({})}
                acknowledged = {report["put"] for report in reports if "put" in report}
                assert acknowledged <= found
                unknown = len(found) - len(acknowledged)
                assert unknown <= 2 * (crashes + 1), "at most one put of each child was in progress at each crash"
                assert not await storage.verify()

        asyncio.run(check())
    finally:
        server.end()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
