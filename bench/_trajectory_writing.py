"""What adding costs: in memory beside a plain copy, on disk beside one plain file, and how long a call can block."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _harness import Verdict, duration, table
from _trajectory_rivals import Rows, copy
from _trajectory_timing import OURS, REFERENCE, Contender, Ratios, Timing, interleaved
from forebay.trajectory import TrajectoryReplayBuffer

__all__ = ["adding", "pacing", "writing", "writing_many"]

ADD, WRITE, FLAT, BLOCKED_MS = 1.5, 2.0, 1.5, 50.0
MB = 1e6


def adding(rows: Rows, small: Rows, rounds: int, verdict: Verdict) -> None:
    """One trajectory a call, into a full window of 100."""
    shown = Ratios("add, in memory, window full", verdict)
    for name, source, limit in (("image rows", rows, ADD), ("rows without an image", small, None)):
        found = add_beside_copy(source, rounds)
        shown.put(f"{source.steps} {name}", found[OURS], found[REFERENCE], limit)
    shown.print("plain copy, CPU")


def add_beside_copy(source: Rows, rounds: int) -> dict[str, Timing]:
    # Nobody gets what the other just had: it would be in the caches.
    ours, theirs, slots = cycle(range(100)), cycle([*range(50, 100), *range(50)]), cycle(source.slots(100))
    ready: list[dict[str, Any]] = []
    parts: list[torch.Tensor] = []
    slot: list[torch.Tensor] = []

    def before_ours() -> None:
        ready[:] = [source.trajectory(next(ours))]

    def before_theirs() -> None:
        parts[:], slot[:] = source.parts(next(theirs)), next(slots)

    with TrajectoryReplayBuffer(sample_window_size=100) as buffer:
        for k in range(200):
            buffer.add_trajectories([source.trajectory(k % 100)])
        contenders = {
            REFERENCE: Contender(lambda: copy(parts, slot), before_theirs),
            OURS: Contender(lambda: buffer.add_trajectories(ready), before_ours),
        }
        return interleaved(contenders, rounds)


class PlainFile:
    """One file, a write and a sync for every trajectory."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def rate(self, content: memoryview, size: int, trajectories: int) -> float:
        """Bytes a second."""
        start = time.perf_counter()
        for number in range(trajectories):
            offset = number * size % (len(content) - size)
            assert os.write(self._descriptor, content[offset : offset + size]) == size
            os.fsync(self._descriptor)
        return trajectories * size / (time.perf_counter() - start)

    def close(self) -> None:
        os.close(self._descriptor)


def streamed(buffer: TrajectoryReplayBuffer, rows: Rows, numbers: range) -> float:
    """Seconds to add these, one a call, and to flush."""
    ready = [[rows.trajectory(number % rows.trajectories)] for number in numbers]
    start = time.perf_counter()
    for one in ready:
        buffer.add_trajectories(one)
    buffer.flush()
    return time.perf_counter() - start


def writing(rows: Rows, rounds: int, directory: Path, verdict: Verdict) -> float:
    """Durable adds of image rows as a stream, in turn with the plain file; our bytes a second."""
    os.sync()
    content = rows.columns[("curr_obs", "image")].reshape(-1).numpy().data
    plain = PlainFile(directory / "plain")
    ours, theirs = [], []
    trajectories = 100
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=directory / "stream") as buffer:
        streamed(buffer, rows, range(10))
        size = int(buffer.get_stats()["disk_bytes"]) // 10
        for _ in range(rounds):
            theirs.append(plain.rate(content, size, trajectories))
            ours.append(trajectories * size / streamed(buffer, rows, range(trajectories)))
    plain.close()
    # By round: a shared disk is four times as fast in one minute as in the next.
    ratio = statistics.median(plain_rate / rate for plain_rate, rate in zip(theirs, ours, strict=True))
    print(f"durable adds up to flush, image rows, {trajectories} at a time ({size / MB:.2f} MB each)")
    shown = []
    for name, rates, asked in ((OURS, ours, f"<= {WRITE:g}x"), ("one file, a sync a trajectory", theirs, "")):
        rate = statistics.median(rates)
        span = f"{min(rates) / MB:,.0f} to {max(rates) / MB:,.0f}"
        shown.append([name, _rate(rate), span, duration(size / rate * 1e6), f"{ratio:.2f}x" if asked else "", asked])
        verdict.figures[f"durable adds, image rows, {name}"] = {"value": rate / MB, "unit": "MB/s"}
    table(["what", "rate", "slowest to fastest", "each", "plain/ours", "asked"], shown)
    verdict.at_most("durable adds, image rows: plain rate / ours", ratio, WRITE, "x")
    return statistics.median(ours)


def writing_many(small: Rows, total: int, directory: Path, verdict: Verdict) -> None:
    """Whether the last of many small trajectories is written as fast as the first."""
    os.sync()
    content = small.columns[("curr_obs", "states")].reshape(-1).view(torch.uint8).numpy().data
    plain = PlainFile(directory / "plain-small")
    share = total // 10
    shown, rates, plain_rates, cpu = [], [], [], []
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=directory / "stream-small") as buffer:
        streamed(buffer, small, range(10))
        size = int(buffer.get_stats()["disk_bytes"]) // 10
        for tenth in range(10):
            plain_rates.append(plain.rate(content, size, min(share, 300)))
            begun = time.process_time()
            seconds = streamed(buffer, small, range(tenth * share, (tenth + 1) * share))
            cpu.append((time.process_time() - begun) / share * 1e6)
            rates.append(share * size / seconds)
            shown.append(
                [f"{tenth * share:,} to {(tenth + 1) * share:,}", _rate(rates[-1]), duration(seconds / share * 1e6),
                 duration(cpu[-1]), _rate(plain_rates[-1]), f"{plain_rates[-1] / rates[-1]:.2f}x"]
            )  # fmt: skip
    plain.close()
    ratio = statistics.median(plain_rate / rate for plain_rate, rate in zip(plain_rates, rates, strict=True))
    print(f"durable adds up to flush, rows without an image ({size / 1e3:.1f} kB a trajectory)")
    table(["trajectories", "rate", "each", "CPU each", "plain, a sync each", "plain/ours"], shown)
    print(f"first tenth / last tenth: {rates[0] / rates[-1]:.2f}x (asked: at most {FLAT:g}x), ", end="")
    print(f"CPU of the last / first {cpu[-1] / cpu[0]:.2f}x; plain / ours {ratio:.2f}x (asked: at most {WRITE:g}x)\n")
    verdict.at_most("durable adds, small rows: plain rate / ours", ratio, WRITE, "x")
    verdict.at_most("durable adds, small rows: first tenth / last tenth", rates[0] / rates[-1], FLAT, "x")
    verdict.figures["durable adds, small rows: CPU of last / first tenth"] = {"value": cpu[-1] / cpu[0], "unit": "x"}


def _rate(rate: float) -> str:
    return f"{rate / MB:,.1f} MB/s"


def pacing(rows: Rows, rate: float, seconds: float, directory: Path, verdict: Verdict) -> None:
    """How long an add blocks while trajectories come at half the rate at which they can be written."""
    os.sync()
    times: dict[str, list[tuple[float, float]]] = {OURS: [], "plain copy, in turn": []}
    slots = cycle(rows.slots(100))
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=directory / "paced") as buffer:
        streamed(buffer, rows, range(10))
        pause = buffer.get_stats()["disk_bytes"] / 10 / (rate / 2)
        due = time.perf_counter()
        until = due + seconds
        number, waited = 0, 0.0
        while due < until:
            time.sleep(max(due - time.perf_counter(), 0.0))
            due += pause
            one, parts, slot = [rows.trajectory(number)], rows.parts(number), next(slots)
            works: list[Callable[[], Any]] = [partial(buffer.add_trajectories, one), partial(copy, parts, slot)]
            for found, work in zip(times.values(), works, strict=True):
                found.append(wall_us(work))
            waited = max(waited, buffer.get_stats()["pending_bytes"])
            number = (number + 1) % rows.trajectories
    print(
        f"durable adds of image rows at {_rate(rate / 2)}, half of what is possible: how long a call takes, wall time"
    )
    shown = []
    for name, found in times.items():
        wall = [us for us, _ in found]
        quantiles = [float(np.quantile(wall, share)) for share in (0.5, 0.99, 1.0)]
        blocked = max(us - queued for us, queued in found)
        asked = f"<= {BLOCKED_MS:g} ms" if name == OURS else ""
        shown.append([name, f"{len(found):,}", *map(duration, [*quantiles, blocked]), asked])
        verdict.figures[f"paced adds, {name}"] = {"value": quantiles, "unit": "us: median, 99 %, longest"}
        if name == OURS:
            verdict.at_most("paced adds: longest block", blocked / 1e3, BLOCKED_MS, "ms")
    table(["what", "calls", "median", "99 %", "longest", "longest block", "asked"], shown)
    print("longest block: without the time in which the thread was ready and another process had the processor;")
    print(f"at most {waited / MB:,.0f} MB waited to be written (from 256 MiB on, adding waits for the disk)\n")
    verdict.figures["paced adds: most that waited"] = {"value": waited / MB, "unit": "MB"}


def wall_us(work: Callable[[], Any]) -> tuple[float, float]:
    """How long it took, and how much of that its thread waited for a processor."""
    waited, start = _waited_us(), time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6, _waited_us() - waited


def _waited_us() -> float:
    """How long this thread was ready to run and did not; 0 where the system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e3
    except (OSError, IndexError, ValueError):
        return 0.0
