"""Two systems in processes of their own, each with its own Ray cluster, that a bench asks for one turn after the other.

A side is a script that calls `serve`: it answers one JSON line with another, on its standard input and output; what
anything else prints goes to its log. `Side` is the bench's end of it. It also adds up the CPU time of the side's whole
tree of processes: its own, Ray's, and its actors'. Nothing here needs more than the standard library and Ray, because
the rival's process imports it, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["COLUMNS", "SAMPLES", "Hear", "Say", "Side", "TurnFailed", "join_ray", "serve", "start_ray", "timed_ms"]

SAMPLES = 128
COLUMNS = ("prompt_ids", "response_ids", "logprobs")
START_S, TURN_S, STOP_S = 120.0, 120.0, 30.0
OBJECT_STORE_BYTES = 160 << 20
"""Small, so that all of it has been touched before anything is counted: a run of hours has touched all of its own."""

# Read by Ray when it is imported and by every process of a cluster.
RAY_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a misleading name: drivers then take a loopback address as it is
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",  # else as many idle workers as there are CPUs start with the first job
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # of this run
}

Request = dict[str, Any]
Answer = dict[str, Any]
Say = Callable[[Answer], None]
Hear = Callable[[], Awaitable[Request | None]]


class TurnFailed(Exception):
    """A side did not answer; with the end of what it said."""


# --- the bench's end ----------------------------------------------------------------------------------


class Side:
    """A process that takes turns. It is started at once; `ready` waits until its cluster is up."""

    def __init__(self, name: str, script: Path, directory: Path, environment: Mapping[str, str], *words: str) -> None:
        """Ray's files and the log go to `directory`, which is that of the cluster and nobody else's."""
        self.name = name
        self.hello: Answer = {}
        directory.mkdir(exist_ok=True)
        self._log = directory / f"{name.replace(' ', '-')}.log"
        self._buffered = b""
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(script), *words],
                env={**inherited, **RAY_ENVIRONMENT, "RAY_TMPDIR": str(directory), **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
            )

    def ready(self) -> Answer:
        """What the side says of itself when it is up."""
        self.hello = self._hear(START_S)
        return self.hello

    def ask(self, do: str, **arguments: Any) -> Answer:
        """One turn."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        except OSError as error:
            raise self._failed(str(error)) from None
        return self._hear(TURN_S)

    def stop(self) -> None:
        """End the process, and with it its cluster."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # the end of its input is the end of its work
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # Ray's processes share its fate
            self._process.wait()

    def _hear(self, timeout_s: float) -> Answer:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffered:
            readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise self._failed(f"no answer within {timeout_s:.0f} s")
            part = self._process.stdout.read(65_536)
            if not part:
                raise self._failed("it ended")
            self._buffered += part
        line, self._buffered = self._buffered.split(b"\n", 1)
        answer: Answer = json.loads(line)
        return answer

    def _failed(self, why: str) -> TurnFailed:
        said = self._log.read_text(errors="replace").strip().splitlines()[-15:]
        return TurnFailed("\n    ".join([f"{self.name}: {why}", *said]))

    def cpu_ms(self) -> float:
        """CPU time of the whole tree of processes up to now; 0 where the system does not say."""
        pids, found = [self._process.pid], 0.0
        while pids:
            tasks = Path(f"/proc/{pids.pop()}/task")
            try:
                threads = list(tasks.iterdir())
            except OSError:
                continue
            for thread in threads:
                try:
                    found += int((thread / "schedstat").read_text().split()[0]) / 1e6
                    pids += map(int, (thread / "children").read_text().split())
                except (OSError, ValueError, IndexError):  # it ended meanwhile
                    continue
        return found


# --- the side's end -----------------------------------------------------------------------------------


def start_ray(cpus: int) -> str:
    """A cluster of this process alone, on loopback; its address."""
    import ray

    ray.init(
        address="local",
        num_cpus=cpus,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )
    return str(ray.get_runtime_context().gcs_address)


def join_ray(address: str) -> None:
    """Join the cluster of another process."""
    import ray

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


def serve(run: Callable[[Say, Hear], Coroutine[Any, Any, None]]) -> None:
    """Run a side: `run(say, hear)` says that it is ready, and answers what it hears until it hears None."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what others print is no answer

    def say(answer: Answer) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")

    async def hear() -> Request | None:
        line = await asyncio.to_thread(sys.stdin.readline)
        request: Request | None = json.loads(line) if line else None
        return request

    asyncio.run(run(say, hear))


async def timed_ms(
    steps: Sequence[tuple[str, Callable[[], Awaitable[Any]]]], times: dict[str, list[float]]
) -> dict[str, Any]:
    """Run steps one after the other, and add the wall time of each to its list; what they returned."""
    found = {}
    for name, step in steps:
        start = time.perf_counter_ns()
        found[name] = await step()
        times.setdefault(name, []).append((time.perf_counter_ns() - start) / 1e6)
    return found
