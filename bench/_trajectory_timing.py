"""Times side by side: everybody in turn, medians of CPU and wall time, as a ratio to a reference."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from _harness import Verdict, duration, table

__all__ = ["OURS", "REFERENCE", "Contender", "Ratios", "Timing", "interleaved"]

REFERENCE, OURS = "reference", "ours"


class Contender(NamedTuple):
    """What is timed, and what comes before it outside of the clock."""

    call: Callable[[], Any]
    before: Callable[[], Any] = lambda: None


class Timing(NamedTuple):
    """Medians."""

    cpu_us: float
    wall_us: float


def interleaved(contenders: dict[str, Contender], rounds: int, *, warm: int = 3) -> dict[str, Timing]:
    """Everybody in turn, so that a slow spell meets all of them; in random order, as each leaves its caches behind."""
    gc.collect()
    order = random.Random(0)
    names = list(contenders)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(warm + rounds):
        order.shuffle(names)
        for name in names:
            contender = contenders[name]
            contender.before()
            wall, cpu = time.perf_counter_ns(), time.process_time_ns()
            result = contender.call()
            cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
            del result
            if number >= warm:
                times[name].append((cpu / 1e3, wall / 1e3))
    return {name: Timing(*map(statistics.median, zip(*found, strict=True))) for name, found in times.items()}


class Ratios:
    """A table of times beside the reference, and what of it was asked for."""

    def __init__(self, title: str, verdict: Verdict) -> None:
        self.title, self._verdict = title, verdict
        self._rows: list[list[str]] = []

    def put(self, what: str, found: Timing, reference: Timing, limit: float | None) -> None:
        ratio = found.cpu_us / reference.cpu_us
        asked = "" if limit is None else f"<= {limit:g}x"
        if limit is None:
            self._verdict.figures[f"{self.title}/{what}"] = {"value": ratio, "unit": "x"}
        else:
            self._verdict.at_most(f"{self.title}/{what}", ratio, limit, "x")
        self._verdict.figures[f"{self.title}/{what}"] |= {"cpu_us": found.cpu_us, "wall_us": found.wall_us}
        self._rows.append(
            [what, duration(found.cpu_us), duration(found.wall_us), duration(reference.cpu_us), f"{ratio:.2f}x", asked]
        )

    def print(self, reference: str = "reference, CPU") -> None:
        print(self.title)
        table(["what", "CPU", "wall", reference, "ratio", "asked"], self._rows)
