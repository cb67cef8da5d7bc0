"""Forebay on Ray beside TransferQueue on Ray: batches and single samples put, got and cleared.

A batch is 128 samples: a prompt of 512 and a response of 2,048 tokens as int64, logprobs as float32. Ours are groups of
8 that share a prompt, or of 1; they are put, leased, read and acknowledged. The rival is TransferQueue with its simple
storage (`_transfer_queue`; in the bench environment only, it is fetched into bench/results): put, get_meta and
get_data, clear_samples. A full run tries 1, 2 and 4 storage units, one thread of torch or as many as it likes, and both
of its clients, and goes on with what suits it best; a quick one takes 2 units, one thread and the async client. What it
hands out is packed into columns of the batch; so ours is packed within the clock, too. A take of ours removes the
sample, so it is judged beside its get and clear; its get alone is shown. Judged are groups of 8; groups of 1 are shown.

Each side is a process with its own Ray cluster on this machine, on loopback (`_ray_turns`). They take turns; wall time,
the median of a turn, and of those the median of the faster half. CPU is that of all processes of a side, Ray's own
included. The limit is ray.put and ray.get of the same bytes, which stores nothing anywhere.

    python bench/ray_throughput.py [--quick] [--install-rivals]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from _harness import Verdict, quiet, table
from _ray_turns import SAMPLES, Side, TurnFailed
from _transfer_queue import ENVIRONMENT, ONE_THREAD, install, is_installed

PROMPT, RESPONSE = 512, 2_048
GROUPS = (8, 1)
CYCLE, PUT, SMALL_TAKE, LARGE_TAKE = 2.0, 3.0, 3.0, 2.0
LARGE_BYTES = 100_000
SINGLES = ((16, 64), (PROMPT, RESPONSE), (PROMPT, 7_168), (PROMPT, 16_384), (PROMPT, 65_536))
CLIENTS = ("async", "sync")
SHORT = {"prompt": PROMPT, "response": RESPONSE}
BETWEEN_S = 0.05
WARM_CYCLES = 100
HERE = Path(__file__).parent


class Settings(NamedTuple):
    """How much of everything."""

    rounds: int
    cycles: int
    singles: int
    sizes: tuple[tuple[int, int], ...]
    units: tuple[int, ...]


FULL = Settings(15, 10, 40, SINGLES, (1, 2, 4))
QUICK = Settings(5, 5, 20, (SINGLES[1], SINGLES[3]), (2,))


def sample_bytes(prompt: int, response: int) -> int:
    return 8 * prompt + 12 * response


class Steps(NamedTuple):
    """Milliseconds of each step of an operation, all of its steps together, and the CPU time (0: not known)."""

    steps: dict[str, float]
    total: float
    cpu: float

    def of(self, *names: str) -> float:
        return sum(self.steps.get(name, 0.0) for name in names)


class Turns:
    """The turns of one side at one operation."""

    def __init__(self, side: Side, do: str, **arguments: Any) -> None:
        self._side, self._do, self._arguments = side, do, arguments
        self._steps: dict[str, list[float]] = {}
        self._totals: list[float] = []
        self._cpu: list[float] = []

    def take(self, *, counted: bool) -> None:
        time.sleep(BETWEEN_S)  # what the other one left to be done in the background is its own
        before = self._side.cpu_ms()
        times = self._side.ask(self._do, **self._arguments)
        if not counted:
            return
        repeats = len(next(iter(times.values())))
        self._cpu.append((self._side.cpu_ms() - before) / repeats)
        for name, values in times.items():
            self._steps.setdefault(name, []).append(statistics.median(values))
        self._totals.append(statistics.median([sum(values) for values in zip(*times.values(), strict=True)]))

    def found(self) -> Steps:
        return Steps(
            {name: quiet(values) for name, values in self._steps.items()}, quiet(self._totals), quiet(self._cpu)
        )


def in_turn(rounds: int, *contenders: Turns) -> list[Steps]:
    """Everybody in every round, and who begins changes; the first round warms up."""
    for number in range(rounds + 1):
        for turns in contenders[:: 1 if number % 2 else -1]:
            turns.take(counted=number > 0)
    return [turns.found() for turns in contenders]


# --- the sides ----------------------------------------------------------------------------------------


@contextmanager
def running(*sides: Side) -> Iterator[None]:
    """Sides that are up, all started at once."""
    try:
        for side in sides:
            side.ready()
        yield
    finally:
        for side in reversed(sides):
            side.stop()


def forebay_side(directory: Path, *words: str) -> Side:
    return Side("Forebay trainer" if words else "Forebay", HERE / "_ray_forebay.py", directory / "ours", {}, *words)


class Choice(NamedTuple):
    """A setting of the rival: its storage units, one thread of torch or more, and the clients."""

    units: int
    one_thread: bool
    cycle: str
    single: str

    def side(self, directory: Path, *words: str) -> Side:
        threads = "one thread" if self.one_thread else "threads"
        environment = ENVIRONMENT | (ONE_THREAD if self.one_thread else {})
        name = "TransferQueue trainer" if words else f"TransferQueue, {self.units} units, {threads}"
        place = directory / f"{self.units}-{threads[:3]}"
        return Side(name, HERE / "_transfer_queue.py", place, environment, str(self.units), *words)


def best_rival(directory: Path, settings: Settings) -> Choice:
    """Try settings on batches and on single samples."""
    if len(settings.units) == 1:
        return Choice(settings.units[0], True, "async", "async")
    rows = []
    found: list[tuple[float, Choice]] = []
    for units, one_thread in product(settings.units, (True, False)):
        tried = Choice(units, one_thread, "", "")
        side = tried.side(directory)
        with running(side):
            batches = [Turns(side, "cycle", client=client, repeat=settings.cycles, **SHORT) for client in CLIENTS]
            ones = [Turns(side, "single", client=client, repeat=settings.singles, **SHORT) for client in CLIENTS]
            cycle_ms = dict(zip(CLIENTS, (steps.total for steps in in_turn(7, *batches)), strict=True))
            single_ms = dict(zip(CLIENTS, (steps.total for steps in in_turn(5, *ones)), strict=True))
        cycle, single = (min(CLIENTS, key=lambda client: ms[client]) for ms in (cycle_ms, single_ms))
        found.append((cycle_ms[cycle], Choice(units, one_thread, cycle, single)))
        rows += [
            [f"{side.name}, {client}", rate(cycle_ms[client]), f"{single_ms[client]:.2f} ms"] for client in CLIENTS
        ]
    print("Which setting suits the rival best (put, get and clear)")
    table(["setting", f"batches of {SAMPLES}", "one sample"], rows)
    return min(found)[1]


def rate(ms: float) -> str:
    return f"{SAMPLES / ms * 1e3:,.0f} samples/s"


# --- what is measured ---------------------------------------------------------------------------------


def cycles(ours: Side, rival: Side | None, choice: Choice, settings: Settings, verdict: Verdict) -> None:
    contenders = [Turns(ours, "cycle", group=group, repeat=settings.cycles, **SHORT) for group in GROUPS]
    if rival is not None:
        contenders.append(Turns(rival, "cycle", client=choice.cycle, repeat=settings.cycles, **SHORT))
    for turns in contenders:
        for _ in range(WARM_CYCLES // settings.cycles):
            turns.take(counted=False)
    found = in_turn(settings.rounds, *contenders)
    print(f"Batches of {SAMPLES} samples, {SAMPLES * sample_bytes(PROMPT, RESPONSE) / 1e6:.1f} MB: put, get, clear")
    names = [f"Forebay, {SAMPLES // group} groups of {group}" for group in GROUPS]
    show_cycles("cycle", names, found, verdict)


def show_cycles(kind: str, names: list[str], found: list[Steps], verdict: Verdict) -> None:
    rows = []
    theirs = found[len(names)] if len(found) > len(names) else None
    for name, steps in zip([*names, "TransferQueue"], found, strict=False):
        ratio = asked = ""
        verdict.figures[f"{kind}/{name}/samples per second"] = {"value": SAMPLES / steps.total * 1e3, "unit": "1/s"}
        if theirs is not None and steps is not theirs:
            value = theirs.total / steps.total
            ratio = f"{value:.2f}x"
            if kind == "cycle" and name == names[0]:
                verdict.at_least(f"{kind}/{name}", value, CYCLE, "x the samples/s of TransferQueue")
                asked = f">= {CYCLE:g}x"
        cells = [f"{steps.of(step):.2f}" for step in ("put", "get", "read", "clear")]
        cpu = f"{steps.cpu:.1f} ms" if steps.cpu else ""
        rows.append([name, *cells, f"{steps.total:.2f} ms", cpu, rate(steps.total), ratio, asked])
    table(["who", "put", "get", "read", "clear", "cycle", "CPU", "rate", "ratio", "asked"], rows)


def singles(ours: Side, rival: Side | None, choice: Choice, settings: Settings, verdict: Verdict) -> None:
    rows = []
    for prompt, response in settings.sizes:
        shape = {"prompt": prompt, "response": response, "repeat": settings.singles}
        contenders = [Turns(ours, "single", **shape)]
        if rival is not None:
            contenders.append(Turns(rival, "single", client=choice.single, **shape))
        mine, *others = in_turn(settings.rounds, *contenders)
        size = sample_bytes(prompt, response)
        take = LARGE_TAKE if size > LARGE_BYTES else SMALL_TAKE
        for what, step, limit in (("put", "put", PUT), ("take", "get", take)):
            name = f"{what} of one sample of {size / 1e3:,.0f} KB"
            verdict.figures[f"single/{name}/ms"] = {"value": mine.of(step), "unit": "ms"}
            cells = [name, f"{mine.of(step):.2f} ms", "", "", "", ""]
            if others:
                steps = ("get", "clear") if step == "get" else (step,)
                theirs = others[0].of(*steps)
                verdict.figures[f"single/{name}/TransferQueue/ms"] = {"value": theirs, "unit": "ms"}
                verdict.at_least(f"single/{name}", theirs / mine.of(step), limit, "x as fast as TransferQueue")
                alone = f"{others[0].of(step):.2f} ms" if step == "get" else ""
                cells[2:] = [f"{theirs:.2f} ms", alone, f"{theirs / mine.of(step):.2f}x", f">= {limit:g}x"]
            rows.append(cells)
    print("Single samples: put, and taken")
    table(["operation", "Forebay", "TransferQueue", "its get alone", "ratio", "asked"], rows)


def limits(ours: Side, settings: Settings, verdict: Verdict) -> None:
    """What Ray itself takes."""
    sizes = [SAMPLES * sample_bytes(PROMPT, RESPONSE), *(sample_bytes(*shape) for shape in settings.sizes)]
    rows = []
    for size in sizes:
        contenders = [Turns(ours, do, size=size, repeat=settings.singles) for do in ("limit", "call")]
        object_, call = in_turn(3, *contenders)
        verdict.figures[f"limit/ray.put + ray.get of {size} bytes"] = {"value": object_.total, "unit": "ms"}
        shown = f"{object_.total:.2f} ms", f"{size / object_.total / 1e6:.2f} GB/s", f"{call.total:.2f} ms"
        rows.append([f"{size / 1e3:,.0f} KB", *shown])
    print("The limit: ray.put + ray.get of the same bytes; and a call of an actor that only keeps them")
    table(["bytes", "ray.put + ray.get", "rate", "actor call"], rows)


def two_processes(
    directory: Path, ours: Side, rival: Side | None, choice: Choice, settings: Settings, verdict: Verdict
) -> None:
    """The producer in one process, the trainer in another; the sum of what each of them waits."""
    pairs: list[tuple[Side, Side, dict[str, Any]]] = []
    with ExitStack() as stack:
        trainer = forebay_side(directory, ours.hello["address"])
        other = None if rival is None else choice.side(directory, rival.hello["address"])
        stack.enter_context(running(*([trainer] if other is None else [trainer, other])))
        pairs.append((ours, trainer, {"group": GROUPS[0], **SHORT}))
        if rival is not None and other is not None:
            pairs.append((rival, other, {"client": choice.cycle, **SHORT}))
        times: list[dict[str, list[float]]] = [{} for _ in pairs]
        for number in range(3 * settings.rounds + 3):
            for (producer, consumer, arguments), seen in zip(pairs, times, strict=True):
                answer = producer.ask("put", **arguments) | consumer.ask("take", **arguments)
                if number >= 3:  # the first ones warm up
                    for step, (value,) in answer.items():
                        seen.setdefault(step, []).append(value)
                    seen.setdefault("total", []).append(sum(value for (value,) in answer.values()))
    found = []
    for seen in times:
        steps = {step: quiet(values) for step, values in seen.items()}
        found.append(Steps(steps, steps.pop("total"), 0.0))
    print(f"The same with the producer and the trainer in two processes, {SAMPLES // GROUPS[0]} groups (shown)")
    show_cycles("two processes", ["Forebay"], found, verdict)


def measure(options: argparse.Namespace, directory: Path, verdict: Verdict) -> None:
    settings = QUICK if options.quick else FULL
    missing = install() if options.install_rivals or not is_installed() else ""
    if missing:
        print(f"{missing}\n")
        verdict.checked += 1
        verdict.missed.append("TransferQueue: not measured, so nothing can be said about it")
    choice = Choice(0, True, "", "") if missing else best_rival(directory, settings)
    ours = forebay_side(directory)
    rival = None if missing else choice.side(directory)
    with running(*([ours] if rival is None else [ours, rival])):
        print(ours.hello["version"])
        if rival is not None:
            clients = f"{choice.cycle} client for batches, {choice.single} client for single samples"
            threads = "one thread of torch" if choice.one_thread else "threads of torch as it likes"
            print(f"{rival.hello['version']}, simple storage of {choice.units} units, {threads}, {clients}")
        print(flush=True)
        cycles(ours, rival, choice, settings, verdict)
        singles(ours, rival, choice, settings, verdict)
        limits(ours, settings, verdict)
        two_processes(directory, ours, rival, choice, settings, verdict)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller settings, within a minute")
    parser.add_argument("--json", type=Path, help="where to write the figures (default: bench/results/<name>.json)")
    parser.add_argument("--install-rivals", action="store_true", help="fetch TransferQueue anew")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    verdict = Verdict("ray_throughput", options)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors\n", flush=True)
    # A short name: paths of Ray's sockets are in it, and those have a limit.
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as name:
        try:
            measure(options, Path(name), verdict)
        except TurnFailed as error:
            print(error)
            verdict.checked += 1
            verdict.missed.append("a side failed")
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    verdict.finish()


if __name__ == "__main__":
    main()
