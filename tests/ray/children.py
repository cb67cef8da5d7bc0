"""Producers and trainers in their own processes, which tests start, use and kill."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import ray

from forebay import NoSuchBuffer, ReplayBuffer, ReplayBufferConfig, RolloutState, Status, blocking
from forebay.buffer.internal import internals
from forebay.ray import RayReplayBuffer
from forebay.ray.host.actor import NAMESPACE
from tests.processes import HANG_S

__all__ = [
    "Worker",
    "answered",
    "connected",
    "drawn",
    "eventually",
    "fill",
    "here",
    "host_of",
    "host_pid",
    "hosted",
    "ids",
    "is_whole",
    "kill",
    "kill_host",
    "prompts",
    "start",
]

T = TypeVar("T")

TASK = "math"


def answer(group_id: int) -> str:
    """What the samples of a group say: enough to see that it is whole, and that group."""
    return f"answer to {group_id}"


def prompts(n: int) -> list[list[RolloutState]]:
    return [[RolloutState(message=[{"role": "user", "content": "?"}]) for _ in range(2)] for _ in range(n)]


def answered(group: list[RolloutState], tokens: int = 3) -> list[RolloutState]:
    """A group with answers that can be checked; a token takes 8 bytes."""
    for state in group:
        state.status, state.response = Status.COMPLETED, answer(state.group_id or 0)
        state.response_ids = np.arange(tokens) + (state.group_id or 0)
    return group


def is_whole(group: Sequence[RolloutState], tokens: int = 3) -> bool:
    """Whether a group is as `answered` made it."""
    group_id = group[0].group_id or 0
    expected = np.arange(tokens) + group_id
    return len(group) == 2 and all(
        state.response == answer(group_id) and np.array_equal(np.asarray(state.response_ids), expected)
        for state in group
    )


def ids(groups: Sequence[Sequence[RolloutState]]) -> list[int]:
    return [group[0].group_id or 0 for group in groups]


class Worker:
    """One process with a buffer: draws, puts, leases, and answers with ids."""

    def __init__(self, name: str) -> None:
        self._buffer = blocking.ReplayBuffer(RayReplayBuffer.connect(name))
        self._drawn: list[list[RolloutState]] = []
        self._lease: blocking.Lease | None = None

    def pid(self) -> int:
        return os.getpid()

    def draw(self, n: int, task_name: str = TASK) -> list[int]:
        """Issue new prompts, and keep them."""
        groups = self._buffer.submit(drawn(self._buffer.native, n, task_name)).result()
        self._drawn += groups
        return ids(groups)

    def redraw(self, n: int, task_name: str = TASK) -> list[int]:
        drawn = self._buffer.submit(internals(self._buffer.native).redraw(n, task_name)).result()
        self._drawn += drawn
        return ids(drawn)

    def put(self, task_name: str = TASK, tokens: int = 3) -> list[int]:
        """Put back what was drawn, all in one call."""
        groups, self._drawn = self._drawn, []
        self._buffer.put_many([answered(group, tokens) for group in groups], task_name)
        return ids(groups)

    def lease(self, wants: dict[str, int], train_step: int, timeout_s: float | None = HANG_S) -> list[int]:
        self._lease = self._buffer.lease_batch(wants, train_step=train_step, timeout_s=timeout_s)
        assert all(is_whole(group) for group in self._lease.groups)
        return ids(self._lease.groups)

    def ack(self) -> None:
        assert self._lease is not None
        self._lease.ack()

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Any other call of the buffer."""
        return getattr(self._buffer, method)(*args, **options)


def start(name: str, **options: Any) -> Any:
    """A worker in its own process."""
    declare: Any = ray.remote
    return declare(num_cpus=0, max_concurrency=4)(Worker).options(**options).remote(name)


def kill(worker: Any) -> None:
    """As when its process is shot: nothing in it gets a chance to tidy up."""
    os.kill(ray.get(worker.pid.remote()), signal.SIGKILL)


def host_of(name: str) -> Any:
    return ray.get_actor(name, namespace=NAMESPACE)


def host_pid(name: str) -> int:
    """The process that hosts a buffer, once it is there."""
    pid: int = ray.get(host_of(name).__ray_call__.remote(lambda _: os.getpid()))
    return pid


def kill_host(name: str) -> None:
    """Shoot the process that hosts a buffer."""
    os.kill(host_pid(name), signal.SIGKILL)


def here() -> dict[str, Any]:
    """Options for an actor on the node of this process, so that it is on no other that the test will kill."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node_id = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


@asynccontextmanager
async def hosted(name: str, config: ReplayBufferConfig | None = None, **options: Any) -> AsyncIterator[RayReplayBuffer]:
    """A buffer in the cluster, for the time of a block."""
    buffer = await asyncio.to_thread(RayReplayBuffer.create, name, config, **options)
    try:
        yield buffer
    finally:
        with suppress(NoSuchBuffer):
            await buffer.close()
            await asyncio.to_thread(RayReplayBuffer.destroy, name)


@asynccontextmanager
async def connected(name: str) -> AsyncIterator[RayReplayBuffer]:
    """One more client of a buffer, for the time of a block."""
    buffer = await asyncio.to_thread(RayReplayBuffer.connect, name)
    try:
        yield buffer
    finally:
        await buffer.close()


async def drawn(buffer: ReplayBuffer, n: int, task_name: str = TASK) -> list[list[RolloutState]]:
    """New prompts."""
    cursor, _ = await internals(buffer).position(task_name)
    issued = await internals(buffer).issue(prompts(n), task_name, cursor=cursor)
    assert issued.taken == n
    return issued.groups


async def fill(buffer: ReplayBuffer, n: int, task_name: str = TASK, tokens: int = 3) -> list[int]:
    """New prompts, answered."""
    groups = [answered(group, tokens) for group in await drawn(buffer, n, task_name)]
    await buffer.put_many(groups, task_name)
    return ids(groups)


async def eventually(look: Callable[[], Awaitable[T]], *, timeout_s: float = HANG_S) -> T:
    """What a look brings, as soon as it brings something: for what other processes do, of which no event tells."""
    async with asyncio.timeout(timeout_s):
        while not (found := await look()):  # noqa: ASYNC110  no event tells of it
            await asyncio.sleep(0.02)
    return found
