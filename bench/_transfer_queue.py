"""The rival of `ray_throughput`: TransferQueue with its simple storage, as its documentation uses it.

    python bench/_transfer_queue.py UNITS             # starts a cluster and its controller with so many storage units
    python bench/_transfer_queue.py UNITS ADDRESS     # joins both

`put` of a TensorDict, `get_meta` and `get_data`, `clear_samples`, by its client: the one to be awaited, or the blocking
one. A batch is dense tensors of 128 rows, its plainest case; what it hands out is packed already. Whatever is got is
compared with what was put, once in a turn.

TransferQueue is no dependency: `install` puts the pinned version into a directory of its own below bench/results,
without what it depends on and the checkout has already (Ray, torch, numpy), so that both sides run on the same Ray.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

from _ray_turns import COLUMNS, SAMPLES, Hear, Say, join_ray, serve, start_ray, timed_ms

__all__ = ["ENVIRONMENT", "ONE_THREAD", "install", "is_installed"]

PINNED = (
    "TransferQueue==0.1.11",
    # What it imports.
    "tensordict==0.15.3",
    "pyzmq==27.3.0",
    "omegaconf==2.3.1",
    "antlr4-python3-runtime==4.9.3",
    "prometheus_client==0.26.0",
    "psutil==7.2.2",
    "pyvers==0.2.3",
    "cloudpickle==3.1.2",
)
FROM_SOURCE = "antlr4-python3-runtime"  # of this version there is no wheel
# Type checkers do not look into a directory of this name.
DIRECTORY = Path(__file__).parent / "results" / "rivals" / "transfer-queue" / "site-packages"
TIMEOUT_S = 300

ENVIRONMENT = {
    "PYTHONPATH": str(DIRECTORY),  # for its actors, too
    "TQ_LOGGING_LEVEL": "ERROR",
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TQ_NUM_THREADS": "1"}
"""For torch in its client; otherwise it takes as many as it likes. Which is better differs from machine to machine."""

PARTITION, TASK = "train", "train"


def is_installed() -> bool:
    return all((DIRECTORY / name).is_dir() for name in ("transfer_queue", "tensordict", "omegaconf", "zmq"))


def install() -> str:
    """Fetch the pinned rival; "" or what went wrong."""
    options = ["--no-deps", "--only-binary=:all:", f"--no-binary={FROM_SOURCE}", "--upgrade", "--no-input"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options]
    try:
        done = subprocess.run(
            [*command, "--target", str(DIRECTORY), *PINNED],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"TransferQueue cannot be installed: {error}"
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["pip said nothing"]
        return f"TransferQueue cannot be installed: {said[-1]}"
    return ""


class TransferQueue:
    """The turns."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._torch: Any = importlib.import_module("torch")
        self._tensordict: Any = importlib.import_module("tensordict").TensorDict

    def _batch(self, prompt: int, response: int, count: int) -> Any:
        torch = self._torch
        random = torch.Generator().manual_seed(prompt + response)
        values = (
            torch.randint(0, 150_000, (count, prompt), generator=random, dtype=torch.int64),
            torch.randint(0, 150_000, (count, response), generator=random, dtype=torch.int64),
            -torch.rand((count, response), generator=random, dtype=torch.float32),
        )
        return self._tensordict(dict(zip(COLUMNS, values, strict=True)), batch_size=count)

    def _check(self, found: Any, batch: Any) -> None:
        """All rows are there and whole; their order is that of indexes which it uses again, not that of the put."""
        for name in COLUMNS:
            assert found[name].dtype == batch[name].dtype, name
        assert sorted(self._rows(found)) == sorted(self._rows(batch))

    def _rows(self, batch: Any) -> list[tuple[bytes, ...]]:
        columns = [[row.numpy().tobytes() for row in batch[name].unbind()] for name in COLUMNS]
        return list(zip(*columns, strict=True))

    async def cycle(self, *, client: str, repeat: int, prompt: int, response: int) -> dict[str, Any]:
        """Put, get and clear a batch."""
        return await self._rounds(client, self._batch(prompt, response, SAMPLES), repeat)

    async def single(self, *, client: str, repeat: int, prompt: int, response: int) -> dict[str, Any]:
        """The same with one sample."""
        return await self._rounds(client, self._batch(prompt, response, 1), repeat)

    async def _rounds(self, client: str, batch: Any, repeat: int) -> dict[str, Any]:
        times: dict[str, list[float]] = {}
        for number in range(repeat):
            await self._put(client, batch, times)
            found = await self._take(client, len(batch), times)
            if number == 0:
                self._check(found, batch)
        return times

    async def put(self, *, client: str, prompt: int, response: int) -> dict[str, Any]:
        """The first half of a cycle, for a producer."""
        times: dict[str, list[float]] = {}
        await self._put(client, self._batch(prompt, response, SAMPLES), times)
        return times

    async def take(self, *, client: str, prompt: int, response: int) -> dict[str, Any]:
        """The other half of it, for a trainer in another process."""
        times: dict[str, list[float]] = {}
        found = await self._take(client, SAMPLES, times)
        self._check(found, self._batch(prompt, response, SAMPLES))
        return times

    async def _put(self, client: str, batch: Any, times: dict[str, list[float]]) -> None:
        async def put() -> None:
            if client == "async":
                await self._client.async_put(data=batch, partition_id=PARTITION)
            else:
                self._client.put(data=batch, partition_id=PARTITION)

        await timed_ms([("put", put)], times)

    async def _take(self, client: str, rows: int, times: dict[str, list[float]]) -> Any:
        asked = {"data_fields": list(COLUMNS), "batch_size": rows, "partition_id": PARTITION, "task_name": TASK}

        async def get() -> tuple[Any, Any]:
            if client == "async":
                meta = await self._client.async_get_meta(mode="fetch", **asked)
                return meta, await self._client.async_get_data(meta)
            meta = self._client.get_meta(mode="fetch", **asked)
            return meta, self._client.get_data(meta)

        meta, data = (await timed_ms([("get", get)], times))["get"]

        async def clear() -> None:
            if client == "async":
                await self._client.async_clear_samples(meta)
            else:
                self._client.clear_samples(meta)

        await timed_ms([("clear", clear)], times)
        return data


async def run(say: Say, hear: Hear) -> None:
    package = importlib.import_module("transfer_queue")
    units, address = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    if address:
        join_ray(address)
        await asyncio.to_thread(package.init)
    else:
        address = start_ray(units + 2)  # its controller and every unit ask for a processor
        backend = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": units}}
        config = importlib.import_module("omegaconf").OmegaConf.create(
            {"backend": backend}, flags={"allow_objects": True}
        )
        await asyncio.to_thread(package.init, config)
    try:
        turns = TransferQueue(package.get_client())
        say({"address": address, "version": f"TransferQueue {importlib.metadata.version('TransferQueue')}"})
        while (request := await hear()) is not None:
            gc.collect()
            say(await getattr(turns, request.pop("do"))(**request))
    finally:
        if len(sys.argv) == 2:
            package.close()
        importlib.import_module("ray").shutdown()


if __name__ == "__main__":
    serve(run)
