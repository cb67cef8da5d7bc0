"""Our side of `ray_throughput`: a RayReplayBuffer in memory, its producer and its trainer in this process.

    python bench/_ray_forebay.py             # starts a cluster and a buffer
    python bench/_ray_forebay.py ADDRESS     # joins both

A sample is a RolloutState with numpy columns; a batch is put by `put_many`, leased, and acknowledged; the
acknowledgement travels while the next batch is put, and is waited for before the next one. Samples are made
before the clock starts, because a put takes them over. Whatever is got is compared with what was put, once in a turn.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

import forebay
from _ray_turns import COLUMNS, SAMPLES, Hear, Say, join_ray, serve, start_ray, timed_ms
from forebay import ReplayBufferConfig, RolloutState, Status
from forebay.ray import RayReplayBuffer

NAME, TASK = "bench", "math"

Columns = list[tuple[Any, Any, Any]]


def columns_of(prompt: int, response: int, count: int) -> Columns:
    """The values of so many samples; every process makes the same ones."""
    random = np.random.default_rng(prompt + response)
    return [
        (
            random.integers(0, 150_000, prompt, dtype=np.int64),
            random.integers(0, 150_000, response, dtype=np.int64),
            -random.random(response, dtype=np.float32),
        )
        for _ in range(count)
    ]


def groups_of(columns: Columns, size: int) -> list[list[RolloutState]]:
    """Groups of so many samples that share the prompt of the first."""
    message = [{"role": "user", "content": "What is 17 times 23?"}]
    return [
        [
            RolloutState(
                message=message,
                prompt_ids=columns[start][0],
                response_ids=response,
                logprobs=logprobs,
                finish_reason="stop",
                reward={"score": 0.5},
                status=Status.COMPLETED,
            )
            for _, response, logprobs in columns[start : start + size]
        ]
        for start in range(0, len(columns), size)
    ]


def check(found: Sequence[Sequence[RolloutState]], columns: Columns, size: int) -> None:
    """What comes out is what went in."""
    expected = groups_of(columns, size)
    assert [len(group) for group in found] == [len(group) for group in expected]
    for group, other in zip(found, expected, strict=True):
        for state, wanted in zip(group, other, strict=True):
            for name in COLUMNS:
                column, value = getattr(state, name), getattr(wanted, name)
                assert column.dtype == value.dtype, name
                assert np.array_equal(column, value), name


def pack(groups: Sequence[Sequence[RolloutState]]) -> list[Any]:
    """Every value is read: columns of the whole batch, as a trainer has them (the rival hands them out packed)."""
    states = [state for group in groups for state in group]
    return [np.concatenate([getattr(state, name) for state in states]) for name in COLUMNS]


class Forebay:
    """The turns."""

    def __init__(self, buffer: RayReplayBuffer) -> None:
        self._buffer = buffer
        self._train_step = 0
        self._acking: asyncio.Future[None] | None = None

    async def cycle(self, *, group: int, repeat: int, prompt: int, response: int) -> dict[str, Any]:
        """Put, lease and acknowledge a batch."""
        columns = columns_of(prompt, response, SAMPLES)
        times: dict[str, list[float]] = {}
        for number in range(repeat):
            await self._put(groups_of(columns, group), times)
            groups = await self._take(SAMPLES // group, times)
            if number == 0:
                check(groups, columns, group)
        await self._settled(times)
        return times

    async def put(self, *, group: int, prompt: int, response: int) -> dict[str, Any]:
        """The first half of a cycle, for a producer."""
        times: dict[str, list[float]] = {}
        await self._put(groups_of(columns_of(prompt, response, SAMPLES), group), times)
        return times

    async def take(self, *, group: int, prompt: int, response: int) -> dict[str, Any]:
        """The other half of it, for a trainer in another process."""
        times: dict[str, list[float]] = {}
        groups = await self._take(SAMPLES // group, times)
        await self._settled(times)
        check(groups, columns_of(prompt, response, SAMPLES), group)
        return times

    async def _put(self, groups: list[list[RolloutState]], times: dict[str, list[float]]) -> None:
        await timed_ms([("put", lambda: self._buffer.put_many(groups, TASK, model_step=self._train_step))], times)

    async def _take(self, groups: int, times: dict[str, list[float]]) -> list[list[RolloutState]]:
        self._train_step += 1

        async def get() -> Any:
            return await self._buffer.lease_batch({TASK: groups}, train_step=self._train_step)

        lease = (await timed_ms([("get", get)], times))["get"]

        async def read() -> list[Any]:
            return pack(lease.groups)

        async def acknowledge() -> None:
            # It travels while the trainer goes on, and is waited for before the next one.
            await self._settled({})
            self._acking = asyncio.ensure_future(lease.ack())
            await asyncio.sleep(0)

        await timed_ms([("read", read), ("clear", acknowledge)], times)
        found: list[list[RolloutState]] = lease.groups
        return found

    async def _settled(self, times: dict[str, list[float]]) -> None:
        """The last acknowledgement has arrived; what is left of it counts as part of the last cycle."""

        async def settled() -> None:
            if self._acking is not None:
                await self._acking
                self._acking = None

        last: dict[str, list[float]] = {}
        await timed_ms([("clear", settled)], last)
        if "clear" in times:
            times["clear"][-1] += last["clear"][0]

    async def single(self, *, repeat: int, prompt: int, response: int) -> dict[str, Any]:
        """Put one group of one sample, and take it for good."""
        columns = columns_of(prompt, response, 1)
        times: dict[str, list[float]] = {}
        for number in range(repeat):
            (group,) = groups_of(columns, 1)
            await timed_ms([("put", lambda group=group: self._buffer.put(group, TASK))], times)  # type: ignore[misc]

            async def get() -> list[list[RolloutState]]:
                groups = await self._buffer.get(1, TASK, Status.COMPLETED)
                pack(groups)
                return groups

            found = await timed_ms([("get", get)], times)
            if number == 0:
                check(found["get"], columns, 1)
        return times

    async def limit(self, *, size: int, repeat: int) -> dict[str, Any]:
        """ray.put and ray.get of so many bytes."""
        data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        times: dict[str, list[float]] = {}

        async def put_and_get() -> Any:
            return ray.get(ray.put(data))

        for number in range(repeat):
            found = await timed_ms([("limit", put_and_get)], times)
            if number == 0:
                assert np.array_equal(found["limit"], data)
        return times

    async def call(self, *, size: int, repeat: int) -> dict[str, Any]:
        """A call of a threaded actor that does nothing with so many bytes but keep them."""
        declare: Any = ray.remote  # its types do not know all that it takes
        actor = declare(num_cpus=0, max_concurrency=2)(_Idle).remote()
        data = bytes(size)
        times: dict[str, list[float]] = {}
        for _ in range(repeat):
            await timed_ms([("call", lambda: asyncio.wrap_future(actor.keep.remote(data).future()))], times)
        ray.kill(actor)
        return times


class _Idle:
    def keep(self, data: bytes) -> None:
        self._data = data


async def run(say: Say, hear: Hear) -> None:
    address = sys.argv[1] if len(sys.argv) > 1 else ""
    if address:
        join_ray(address)
        buffer = RayReplayBuffer.connect(NAME)
    else:
        address = start_ray(2)
        buffer = RayReplayBuffer.create(NAME, ReplayBufferConfig())
    try:
        turns = Forebay(buffer)
        say({"address": address, "version": f"Forebay {forebay.__version__}, Ray {ray.__version__}"})
        while (request := await hear()) is not None:
            gc.collect()
            say(await getattr(turns, request.pop("do"))(**request))
    finally:
        await buffer.close()
        if len(sys.argv) == 1:
            RayReplayBuffer.destroy(NAME)
        ray.shutdown()


if __name__ == "__main__":
    serve(run)
