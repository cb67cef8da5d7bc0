"""What a group costs in memory: what the buffer adds to it, and what its own columns take.

First, the bytes that the buffer adds to a group of 8 samples. The samples are made beforehand (objects of their own,
as a producer hands them in; only the arrays are shared); counted is everything that is allocated while they are put
and still there afterwards, as tracemalloc sees it: the record and its numbers, the tuple of the group, the
indexes, and the ids that the buffer gives. The list that a group is handed over in is neither charged nor credited.
The process grows by some 5 % more, because the allocator rounds up.

Version spans are not part of the figure: they belong to the samples, whoever writes them, and leave with them. So the
figure is that of groups which bring their versions but no ids. Beside it: groups that bring ids as well (what is left
is the buffer's own), and groups that `put` stamps, whose members share one tuple if they are of one length, and have
one each otherwise.

Second, the size of a group of 8 samples of 4,000 tokens (response_ids, logprobs, response_mask) by what the columns
are, made as a parser makes them: every token id and every logprob of a list is an object of its own. Beside it what
`group_bytes` says, by which `max_bytes` is kept.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

import forebay
from _harness import Verdict, arguments, table
from forebay import (
    FIFOReplayPolicy,
    ReplayBuffer,
    ReplayPolicy,
    RolloutState,
    StalenessReplayPolicy,
    Status,
    group_bytes,
)

SAMPLES, TOKENS, STEPS = 8, 4_000, 100
LIMIT_BYTES = 1_024
MODULES_AT = 10_000
"""The size at which it is shown which module allocated what; a snapshot of more takes gigabytes."""

PROMPT = np.arange(200, dtype=np.int64)
RESPONSES = [
    (np.arange(tokens, dtype=np.int64), np.zeros(tokens, dtype=np.float32), np.ones(tokens, dtype=np.int8))
    for tokens in range(1_000, 1_000 + 37 * SAMPLES, 37)
]
PACKAGE = Path(forebay.__file__).parent
POLICIES: dict[str, ReplayPolicy] = {"FIFO": FIFOReplayPolicy(), "staleness": StalenessReplayPolicy()}


# --- what the buffer adds -----------------------------------------------------------------------------


class Handed(NamedTuple):
    """What the samples of a group bring along."""

    name: str
    ids: bool
    versions: bool
    one_length: bool = False

    def group(self, number: int) -> list[RolloutState]:
        message = [{"role": "user", "content": f"What is {number} times 23?"}]
        states = []
        for index in range(SAMPLES):
            response_ids, logprobs, response_mask = RESPONSES[0 if self.one_length else index]
            states.append(
                RolloutState(
                    group_id=number if self.ids else None,
                    rollout_id=number * SAMPLES + index if self.ids else None,
                    message=message,
                    prompt_ids=PROMPT,
                    response_ids=response_ids,
                    logprobs=logprobs,
                    response_mask=response_mask,
                    version_spans=((number % STEPS, len(response_ids)),) if self.versions else (),
                    reward={"score": number / 7 + index},
                    status=Status.COMPLETED,
                )
            )
        return states


FIGURE = Handed("versions, no ids", ids=False, versions=True)
STAMPED = Handed("nothing; stamped, 8 lengths", ids=False, versions=False)
HANDED = (
    Handed("versions and ids", ids=True, versions=True),
    FIGURE,
    Handed("nothing; stamped, 1 length", ids=False, versions=False, one_length=True),
    STAMPED,
)


class Added(NamedTuple):
    """Bytes per group; by module only if asked for."""

    total: float
    by_module: dict[str, float]


async def added(policy: ReplayPolicy, handed: Handed, groups: int, *, by_module: bool) -> Added:
    buffer = ReplayBuffer(policy)
    await buffer.put(handed.group(groups), "warm-up", model_step=0)
    states = [state for number in range(groups) for state in handed.group(number)]
    gc.collect()
    tracemalloc.start()
    for number in range(groups):
        first = number * SAMPLES
        await buffer.put(states[first : first + SAMPLES], "math", model_step=number % STEPS)
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    modules = _by_module(tracemalloc.take_snapshot(), groups) if by_module else {}
    tracemalloc.stop()
    assert len(buffer) == groups + 1
    await buffer.close()
    return Added(size / groups, modules)


def _by_module(snapshot: tracemalloc.Snapshot, groups: int) -> dict[str, float]:
    modules: dict[str, float] = {}
    for statistic in snapshot.statistics("filename"):
        path = Path(statistic.traceback[0].filename)
        name = "elsewhere"
        if path.is_relative_to(PACKAGE):
            name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        modules[name] = modules.get(name, 0.0) + statistic.size / groups
    return modules


async def measure_added(sizes: list[int], verdict: Verdict) -> None:
    rows = []
    modules: dict[str, dict[str, float]] = {}
    for handed in HANDED:
        row = [handed.name]
        for groups in sizes:
            for name, policy in POLICIES.items():
                if handed is not FIGURE and name != "FIFO":
                    row.append("-")  # what the samples bring along costs the same under every policy
                    continue
                by_module = groups == MODULES_AT and handed in (FIGURE, STAMPED)
                found = await added(policy, handed, groups, by_module=by_module)
                if by_module:
                    modules[f"{name}, {'stamped' if handed is STAMPED else 'versions'}"] = found.by_module
                what = f"added/{name}/{groups}/{handed.name}"
                if handed is FIGURE:
                    verdict.at_most(what, found.total, LIMIT_BYTES, "bytes")
                else:
                    verdict.figures[what] = {"value": found.total, "unit": "bytes"}
                row.append(f"{found.total:,.0f}")
        rows.append([*row, f"{LIMIT_BYTES:,}" if handed is FIGURE else ""])

    print(f"Bytes that the buffer adds to a group of {SAMPLES} samples, by what the samples bring along")
    table(["samples bring", *(f"{name} {groups:,}" for groups in sizes for name in POLICIES), "limit"], rows)

    # The numbers of a record (reward, tokens, bytes) are made in `rollout`, the record itself in `storage.local`;
    # `storage.memory`, `storage.sorted_keys` and `policy` are the indexes.
    print(f"The same at {MODULES_AT:,} groups, by the module that allocated it")
    names = {name for found in modules.values() for name, size in found.items() if size >= 0.5}
    ordered = sorted(names, key=lambda name: -max(found.get(name, 0.0) for found in modules.values()))
    table(
        ["module", *modules],
        [[name, *(f"{found.get(name, 0.0):,.0f}" for found in modules.values())] for name in ordered],
    )


# --- what the columns take ----------------------------------------------------------------------------

Numbers: TypeAlias = "NDArray[Any]"
Columns: TypeAlias = "tuple[Any, Any, Any]"

COLUMNS: dict[str, Callable[[Numbers, Numbers, Numbers], Columns]] = {
    "lists": lambda ids, logprobs, mask: (ids.tolist(), logprobs.tolist(), mask.tolist()),
    "arrays int64, float32, int8": lambda ids, logprobs, mask: (
        ids.astype(np.int64),
        logprobs.astype(np.float32),
        mask.astype(np.int8),
    ),
    "arrays int32, float32, int8": lambda ids, logprobs, mask: (
        ids.astype(np.int32),
        logprobs.astype(np.float32),
        mask.astype(np.int8),
    ),
}


def column_bytes(convert: Callable[[Numbers, Numbers, Numbers], Columns], groups: int) -> tuple[float, int]:
    """The measured bytes of a group, and what `group_bytes` says."""
    random = np.random.default_rng(7)
    mask = np.ones(TOKENS, dtype=np.int64)

    def group() -> list[RolloutState]:
        message: list[dict[str, Any]] = [{"role": "user", "content": "What is 17 times 23?"}]
        states = []
        for _ in range(SAMPLES):
            columns = convert(random.integers(257, 150_000, TOKENS), -random.random(TOKENS), mask)
            response_ids, logprobs, response_mask = columns
            states.append(
                RolloutState(message=message, response_ids=response_ids, logprobs=logprobs, response_mask=response_mask)
            )
        return states

    group()
    gc.collect()
    tracemalloc.start()
    made = [group() for _ in range(groups)]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / groups, group_bytes(made[0])


def measure_columns(groups: int, verdict: Verdict) -> None:
    rows = []
    for name, convert in COLUMNS.items():
        size, said = column_bytes(convert, groups)
        verdict.figures[f"columns/{name}"] = {"value": size, "group_bytes": said, "unit": "bytes"}
        rows.append([name, f"{size:,.0f}", f"{size / (SAMPLES * TOKENS):.1f}", f"{said:,}", f"{size / said:.2f}x"])
    print(f"A group of {SAMPLES} samples of {TOKENS:,} tokens: ids, logprobs and mask, measured over {groups} groups")
    table(["columns", "bytes", "per token", "group_bytes", "real/said"], rows)


def main() -> None:
    options = arguments(__doc__)
    verdict = Verdict("memory", options)
    asyncio.run(measure_added([10_000] if options.quick else [10_000, 100_000], verdict))
    measure_columns(10 if options.quick else 50, verdict)
    verdict.finish()


if __name__ == "__main__":
    main()
