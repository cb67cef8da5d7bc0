"""Count what a reader of the code has to follow: storage operations, files, methods, modules, lines.

    python tools/measure_design.py

`docs/architecture.md` cites these figures. Every figure is a count, so it is the same on every machine.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from forebay import (
    AsyncProduceStrategy,
    FunctionAgentLoop,
    MemoryStorage,
    NoProgress,
    ReplayBuffer,
    RolloutState,
    Sampler,
)
from forebay.buffer import explain
from forebay.storage.base import Storage

SOURCE = Path(__file__).resolve().parents[1] / "src" / "forebay"
BATCH = 8


async def answer(state: RolloutState) -> None:
    for _ in range(1 + (state.group_id or 0) % 5):  # groups end at different moments
        await asyncio.sleep(0)
    state.response, state.response_ids = "42", [4, 2]


class Plane:
    """A buffer in memory whose storage operations are counted."""

    def __init__(self, *, max_groups: int | None = None, over_issue: float = 0.0) -> None:
        self.operations: Counter[str] = Counter()
        storage = MemoryStorage()
        for name, method in inspect.getmembers(Storage, inspect.iscoroutinefunction):
            if not name.startswith("_"):
                setattr(storage, name, self._counted(name, getattr(storage, name), method))
        self.buffer = ReplayBuffer(storage=storage, max_groups=max_groups)
        self.strategy = AsyncProduceStrategy(
            self.buffer, over_sample_threshold=over_issue, max_staleness=1, progress=NoProgress()
        )
        self.loop = FunctionAgentLoop(answer)
        self.sampler = Sampler([{"prompt": f"question {n}"} for n in range(1000)], group_size=2)

    def _counted(self, name: str, operation: Callable[..., Any], contract: object) -> Callable[..., Any]:
        async def counted(*args: Any, **kwargs: Any) -> Any:
            self.operations[name] += 1
            return await operation(*args, **kwargs)

        return counted

    async def step(self, train_step: int, groups: int) -> None:
        """Produce, lease and acknowledge one batch."""
        await self.strategy.produce_batch(
            self.loop, self.sampler, groups, "math", train_step=train_step, model_step=train_step - 1
        )
        async with self.buffer.lease_batch({"math": groups}, train_step=train_step):
            pass


async def count_operations(**settings: Any) -> Counter[str]:
    """Storage operations of one warm batch."""
    plane = Plane(**settings)
    await plane.step(1, BATCH)
    await plane.strategy.pause()
    plane.operations.clear()
    await plane.step(2, BATCH)
    counted = plane.operations.copy()
    await plane.strategy.pause()
    await plane.buffer.close()
    return counted


async def files_of_one_group() -> set[str]:
    """The files that one group of two samples passes in memory, from the draw to the acknowledgement."""
    plane = Plane()
    await plane.step(1, 1)
    files: set[str] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            files.add(str(path.relative_to(SOURCE)))

    sys.setprofile(profile)
    try:
        await plane.step(2, 1)
    finally:
        sys.setprofile(None)
    await plane.buffer.close()
    return files


@contextmanager
def counted_explanations() -> Iterator[Counter[str]]:
    """Explanations of waits that are built meanwhile."""
    built: Counter[str] = Counter()
    original = explain.explanation

    def counting(*args: Any, **kwargs: Any) -> str:
        built["explanations"] += 1
        return original(*args, **kwargs)

    explain.explanation = counting
    try:
        yield built
    finally:
        explain.explanation = original


def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = ("forebay", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def importers() -> dict[str, set[str]]:
    """By module, the modules that import it."""
    known = modules()
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    target = full if full in known else node.module
                    if target in known and target != name:
                        found[target].add(name)
    return found


def figures() -> dict[str, tuple[int, str]]:
    """Every figure with a detail to show beside it."""
    with counted_explanations() as built:
        roomy = asyncio.run(count_operations())
        tight = asyncio.run(count_operations(max_groups=BATCH, over_issue=0.5))
    public = [name for name, _ in inspect.getmembers(ReplayBuffer, callable) if not name.startswith("_")]
    outside = {name: path for name, path in modules().items() if not name.startswith("forebay.trajectory")}
    lines = {name: len(path.read_text().splitlines()) for name, path in outside.items()}
    single = [name for name, users in importers().items() if len(users) == 1]
    return {
        f"storage operations, batch of {BATCH}, roomy buffer": (roomy.total(), str(dict(roomy))),
        f"storage operations, batch of {BATCH}, buffer just large enough": (tight.total(), str(dict(tight))),
        "explanations built meanwhile": (built.total(), ""),
        "files that one group passes in memory": (len(asyncio.run(files_of_one_group())), ""),
        "public methods of ReplayBuffer": (len(public), ""),
        "modules": (len(modules()), f"{len(outside)} outside trajectory/"),
        "modules with a single importer": (len(single), f"{len(outside.keys() & set(single))} outside trajectory/"),
        "files over 500 lines outside trajectory/": (
            sum(count > 500 for count in lines.values()),
            ", ".join(name for name, count in lines.items() if count > 500),
        ),
        "lines outside trajectory/": (sum(lines.values()), ""),
    }


def main() -> None:
    for name, (value, detail) in figures().items():
        click.echo(f"{name:58} {value:>7,}  {detail}")


if __name__ == "__main__":
    main()
