"""The trajectory buffer beside the plainest thing that could work, and beside other libraries.

A row: 64 float32 and an image of 64x64x3 uint8, now and next, 7 float32 actions, a reward and a flag; trajectories of
50 steps of one environment. The reference runs in turn with what is measured: a draw and `index_select(out=)` into warm
memory from one contiguous copy of the same rows; for adding, `copy_` into warm slots; for writing, one file with a sync
for every trajectory. CPU time of the process, medians; one torch thread; freeing a batch is not counted, for nobody.
Files are in the page cache. On a *fresh* mapping no page was touched before; *populated*, all of them were.

TorchRL, cpprb and RLinf are measured if they are there; `--install-rivals` fetches them into bench/results.

    python bench/trajectory.py [--quick] [--install-rivals]
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import tempfile
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch

from _harness import Verdict, duration, table
from _trajectory_rivals import Rival, Rows, disk_rivals, install, memory_rivals
from _trajectory_timing import OURS, REFERENCE, Contender, Ratios, interleaved
from _trajectory_traffic import together
from _trajectory_writing import adding, pacing, writing, writing_many
from forebay.trajectory import TrajectoryReplayBuffer

STEPS = 50
COUNTS = (256, 1_024)
MEMORY, SMALL, FRESH, POPULATED = 1.5, 4.0, 4.0, 2.0


class Settings(NamedTuple):
    """How much of everything."""

    rounds: int
    sizes: tuple[int, ...]
    on_disk: tuple[int, ...]
    beside_rivals: int
    slow_rivals: bool
    one_step: int
    adds: int
    write_rounds: int
    small_writes: int
    paced_s: float
    threads_s: float
    threads_disk_s: float


FULL = Settings(61, (100, 1_000, 5_000), (1_000, 5_000), 1_000, True, 50_000, 301, 9, 50_000, 20.0, 60.0, 60.0)
QUICK = Settings(31, (100, 1_000), (200,), 200, False, 50_000, 101, 5, 2_000, 3.0, 5.0, 3.0)


def sampling(buffer: TrajectoryReplayBuffer, count: int) -> Contender:
    return Contender(partial(buffer.sample, count))


def check(buffer: TrajectoryReplayBuffer, rows: Rows) -> None:
    """What comes out is what went in."""
    batch = buffer.sample(512)
    index = batch["trajectory_id"] * rows.steps + batch["step"]
    for path, column in rows.columns.items():
        found = batch[path[0]] if len(path) == 1 else batch[path[0]][path[1]]
        assert torch.equal(found, column[index % len(column)]), path


# --- sampling -----------------------------------------------------------------------------------------


def in_memory(rows: Rows, settings: Settings, verdict: Verdict) -> None:
    shown = Ratios("sample, in memory, image rows", verdict)
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        for size in settings.sizes:
            for number in range(len(buffer), size):
                buffer.add_trajectories([rows.trajectory(number)])
            check(buffer, rows)
            for count in COUNTS:
                contenders = {REFERENCE: Contender(rows.gather(size, count)), OURS: sampling(buffer, count)}
                found = interleaved(contenders, settings.rounds)
                shown.put(f"{count:,} rows of {size:,} trajectories", found[OURS], found[REFERENCE], MEMORY)
    shown.print()


def small_rows(rows: Rows, settings: Settings, verdict: Verdict) -> None:
    shown = Ratios("sample, in memory, rows without an image", verdict)
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        buffer.add_trajectories([rows.trajectory(number) for number in range(rows.trajectories)])
        check(buffer, rows)
        for count in (*COUNTS, 4_096):
            contenders = {REFERENCE: Contender(rows.gather(rows.trajectories, count)), OURS: sampling(buffer, count)}
            found = interleaved(contenders, 3 * settings.rounds)
            shown.put(f"{count:,} rows of {rows.trajectories:,} trajectories", found[OURS], found[REFERENCE], SMALL)
    shown.print()


def one_step(rows: Rows, settings: Settings, verdict: Verdict) -> None:
    """Trajectories of a single step; the window is full, so that an add also pushes one out."""
    shown = Ratios("sample, in memory, trajectories of one step", verdict)
    with TrajectoryReplayBuffer(sample_window_size=rows.trajectories) as buffer:
        for start in range(0, rows.trajectories, 1_000):
            buffer.add_trajectories([rows.trajectory(number) for number in range(start, start + 1_000)])
        check(buffer, rows)
        numbers = cycle(range(rows.trajectories))

        def add() -> None:
            buffer.add_trajectories([rows.trajectory(next(numbers))])

        for count in COUNTS:
            contenders = {
                REFERENCE: Contender(rows.gather(rows.trajectories, count)),
                OURS: sampling(buffer, count),
                "after an add": Contender(partial(buffer.sample, count), add),
            }
            found = interleaved(contenders, 3 * settings.rounds)
            what = f"{count:,} rows of {rows.trajectories:,}"
            shown.put(what, found[OURS], found[REFERENCE], SMALL)
            shown.put(f"{what}, after an add", found["after an add"], found[REFERENCE], SMALL)
    shown.print()


def store(rows: Rows, size: int, path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, sample_window_size=0) as buffer:
        for number in range(size):
            buffer.add_trajectories([rows.trajectory(number)])


def read_all(directory: Path) -> None:
    """Bring files into the page cache."""
    block = bytearray(2**22)
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass


class Reopened:
    """A store that is opened anew before every call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffer: TrajectoryReplayBuffer | None = None

    def open(self) -> None:
        self.close()
        self._buffer = TrajectoryReplayBuffer(
            read_only=True, auto_save_path=self._path, sample_window_size=0, enable_cache=False
        )

    def sample(self, count: int) -> Any:
        assert self._buffer is not None
        return self._buffer.sample(count)

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()


def on_disk(rows: Rows, settings: Settings, directory: Path, verdict: Verdict) -> None:
    shown = Ratios("sample, on disk, image rows", verdict)
    for size in settings.on_disk:
        path = directory / f"store-{size}"
        store(rows, size, path)
        read_all(path)
        major = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        reopened = Reopened(path)
        populated = TrajectoryReplayBuffer(
            read_only=True, auto_save_path=path, sample_window_size=0, cache_size=rows.trajectories
        )
        with TrajectoryReplayBuffer(sample_window_size=0, enable_cache=False) as mapped:
            check(populated, rows)
            for count in COUNTS:
                contenders = {
                    REFERENCE: Contender(rows.gather(size, count)),
                    "fresh": Contender(
                        partial(mapped.sample, count), partial(mapped.load_checkpoint, path, verify=False)
                    ),
                    "first": Contender(partial(reopened.sample, count), reopened.open),
                    "populated": sampling(populated, count),
                }
                found = interleaved(contenders, settings.rounds)
                what = f"{count:,} rows of {size:,} trajectories"
                shown.put(f"{what}, fresh mapping", found["fresh"], found[REFERENCE], FRESH)
                shown.put(f"{what}, first call of a new buffer", found["first"], found[REFERENCE], None)
                shown.put(f"{what}, populated", found["populated"], found[REFERENCE], POPULATED)
        reopened.close()
        populated.close()
        major = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - major
        if major:
            print(f"{size:,} trajectories: {major} pages were not in the page cache and came from the disk\n")
    shown.print()


# --- the rivals ---------------------------------------------------------------------------------------


def beside_rivals(rows: Rows, settings: Settings, directory: Path, verdict: Verdict) -> None:
    size = settings.beside_rivals
    path = directory / f"store-{size}"
    if not path.exists():
        store(rows, size, path)
    rivals, missing = memory_rivals(rows, size)
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        for number in range(size):
            buffer.add_trajectories([rows.trajectory(number)])
        compare(f"rivals, in memory, {size:,} trajectories with images", buffer, rivals, settings, verdict)
    for rival in rivals:
        rival.close()
    del rivals, buffer
    gc.collect()
    rivals, more = disk_rivals(rows, size, directory, slow=settings.slow_rivals)
    read_all(path)
    options: dict[str, Any] = {"read_only": True, "auto_save_path": path, "cache_size": size}
    with TrajectoryReplayBuffer(sample_window_size=0, **options) as buffer:
        compare(f"rivals, on disk, {size:,} trajectories with images", buffer, rivals, settings, verdict)
    for rival in rivals:
        rival.close()
    for line in dict.fromkeys(missing + more):
        print(line)
    print()


def compare(
    title: str, buffer: TrajectoryReplayBuffer, rivals: list[Rival], settings: Settings, verdict: Verdict
) -> None:
    shown = []
    for count in COUNTS:
        contenders = {OURS: sampling(buffer, count)}
        contenders |= {rival.name: Contender(partial(rival.sample, count)) for rival in rivals if not rival.slow}
        found = interleaved(contenders, settings.rounds)
        for rival in rivals:
            if rival.slow:
                found |= interleaved({rival.name: Contender(partial(rival.sample, count))}, 3, warm=1)
        ours = found[OURS]
        shown.append([f"{count:,} rows: Forebay", duration(ours.cpu_us), duration(ours.wall_us), "", ""])
        verdict.figures[f"{title}/{count} rows/ours"] = {"value": ours.cpu_us, "unit": "us"}
        for rival in rivals:
            theirs = found[rival.name]
            what = f"{title}/{count} rows/{rival.name}"
            asked = ""
            if rival.limit is not None:
                verdict.at_most(f"{what}: our time", ours.cpu_us / theirs.cpu_us, rival.limit, "of theirs")
                asked = f">= {1 / rival.limit:.2f}x"
            verdict.figures[what] = {"value": theirs.cpu_us, "unit": "us"}
            ratio = f"{theirs.cpu_us / ours.cpu_us:.2f}x"
            shown.append(
                [f"{count:,} rows: {rival.name}", duration(theirs.cpu_us), duration(theirs.wall_us), ratio, asked]
            )
    print(title)
    table(["who", "CPU", "wall", "theirs/ours", "asked"], shown)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller settings, within a minute")
    parser.add_argument("--json", type=Path, help="where to write the figures (default: bench/results/trajectory.json)")
    parser.add_argument("--install-rivals", action="store_true", help="fetch TorchRL, cpprb and RLinf first")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    verdict = Verdict("trajectory", options)
    settings = QUICK if options.quick else FULL
    torch.set_num_threads(1)
    if options.install_rivals:
        print(install() or "rivals installed", end="\n\n")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors\n", flush=True)
    small = Rows(1_000, STEPS, image=False)
    small_rows(small, settings, verdict)
    one_step(Rows(settings.one_step, 1, image=False), settings, verdict)
    rows = Rows(max(settings.sizes), STEPS, image=True)
    in_memory(rows, settings, verdict)
    adding(rows, small, settings.adds, verdict)
    with tempfile.TemporaryDirectory(prefix="forebay-trajectory-") as name:
        directory = Path(name)
        rate = writing(rows, settings.write_rounds, directory, verdict)
        writing_many(small, settings.small_writes, directory, verdict)
        pacing(rows, rate, settings.paced_s, directory, verdict)
        on_disk(rows, settings, directory, verdict)
        beside_rivals(rows, settings, directory, verdict)
        together(settings.threads_s, settings.threads_disk_s, directory, verdict)
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    verdict.finish()


if __name__ == "__main__":
    main()
