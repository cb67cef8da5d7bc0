"""What all benchmarks share: timing, a table for people, JSON for machines, and a verdict as exit code."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller settings, within a minute")
    parser.add_argument("--json", type=Path, help="where to write the figures (default: bench/results/<name>.json)")
    return parser.parse_args()


async def cpu_us(work: Callable[[], Awaitable[Any]], repeat: int) -> float:
    """Median CPU time of an awaited call, in microseconds."""
    times = []
    for _ in range(repeat):
        start = time.thread_time_ns()
        result = await work()
        times.append((time.thread_time_ns() - start) / 1_000)
        del result  # freeing what the caller got is the caller's time
    return statistics.median(times)


def quiet(rounds: list[float]) -> float:
    """The figure of several rounds: the median of the faster half, because slow spells are the machine's own."""
    return statistics.median(sorted(rounds)[: (len(rounds) + 1) // 2])


def duration(us: float) -> str:
    if us < 1_000:
        return f"{us:.1f} us"
    return f"{us / 1_000:.2f} ms" if us < 1_000_000 else f"{us / 1_000_000:.2f} s"


def table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        print(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        )
    print(flush=True)


class Verdict:
    """Collects figures and whether they are reached."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.path: Path = options.json or Path(__file__).parent / "results" / f"{name}.json"
        self.quick: bool = options.quick
        self.figures: dict[str, Any] = {}
        self.missed: list[str] = []
        self.checked = 0

    def at_most(self, what: str, value: float, limit: float, unit: str) -> None:
        self.checked += 1
        self.figures[what] = {"value": value, "at_most": limit, "unit": unit}
        if not value <= limit:
            self.missed.append(f"{what}: {value:.3g} {unit}, asked for at most {limit:g} {unit}")

    def at_least(self, what: str, value: float, limit: float, unit: str) -> None:
        self.checked += 1
        self.figures[what] = {"value": value, "at_least": limit, "unit": unit}
        if not value >= limit:
            self.missed.append(f"{what}: {value:.3g} {unit}, asked for at least {limit:g} {unit}")

    def finish(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        machine = {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
        content = {
            "bench": self.name,
            "quick": self.quick,
            "machine": machine,
            "figures": self.figures,
            "missed": self.missed,
        }
        self.path.write_text(json.dumps(content, indent=2) + "\n")
        for line in self.missed:
            print(f"missed: {line}")
        if self.missed:
            print(f"FIGURES NOT REACHED: {len(self.missed)} of {self.checked}")
        else:
            print(f"FIGURES REACHED: all {self.checked}")
        sys.exit(bool(self.missed))
