"""A run of real processes on one store, for tests: engines, producers and a trainer, killed and started again."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BATCH, PRODUCERS = 8, 3


class SharedRun:
    """Three producers, two engines and a trainer, which are killed at a counted operation and started again."""

    def __init__(self, store: str, directory: Path, seed: int, steps: int) -> None:
        self.store, self.directory, self.steps = store, directory, steps
        self.chance = random.Random(seed)
        self.trained = directory / "trained.jsonl"
        self.killed = {"producer": 0, "trainer": 0}
        self.logs: dict[int, Path] = {}  # by process id

    def start(self, stack: ExitStack, *command: str, **more: str) -> subprocess.Popen[str]:
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "STORE": self.store,
            "LEASE_S": "3",
            "TRAINED": str(self.trained),
            **more,
        }
        path = self.directory / f"{len(self.logs)}.log"
        log = stack.enter_context(path.open("w"))
        output = subprocess.PIPE if "engine.py" in command[-2] else log
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=log, text=True)

        def stop() -> None:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
            if process.stdout is not None:
                process.stdout.close()

        self.logs[process.pid] = path
        stack.callback(stop)
        return process

    def log_of(self, process: subprocess.Popen[str]) -> str:
        return self.logs[process.pid].read_text()[-4_000:]

    def _fate(self, kills: bool) -> dict[str, str]:
        if not kills:
            return {}
        return {"KILL_AT": str(self.chance.randint(5, 120)), "KILL_AFTER": str(self.chance.randint(0, 1))}

    def train(self, *, kills: int, meanwhile: Callable[[int], None] = lambda step: None) -> None:
        """Until the last step is trained; `meanwhile(step)` is called with the last trained step now and then."""
        with ExitStack() as stack:
            urls = []
            for _ in range(2):
                engine = self.start(stack, sys.executable, "examples/several_processes/engine.py", "0")
                assert engine.stdout is not None
                urls.append(f"http://127.0.0.1:{engine.stdout.readline().split()[-1]}")

            def producer(number: int) -> subprocess.Popen[str]:
                command = (sys.executable, "-m", "forebay", "produce", "tests.run_plane:make_loader")
                fate = self._fate(self.killed["producer"] < kills)
                return self.start(stack, *command, ENGINE=urls[number % 2], **fate)

            def trainer() -> subprocess.Popen[str]:
                command = (sys.executable, "-m", "tests.run_plane", str(self.steps), str(self.directory / "checkpoint"))
                fate = self._fate(self.killed["trainer"] < kills)
                return self.start(stack, *command, ENGINE=urls[0], ENGINES=",".join(urls), **fate)

            producers = [producer(number) for number in range(PRODUCERS)]
            training = trainer()
            while (ended := training.poll()) != 0:
                if ended is not None:
                    assert ended == -9, f"the trainer ended with {ended}: {self.log_of(training)}"
                    self.killed["trainer"] += 1
                    training = trainer()
                for number, process in enumerate(producers):
                    if (code := process.poll()) is not None:
                        assert code == -9, f"a producer ended with {code}: {self.log_of(process)}"
                        self.killed["producer"] += 1
                        producers[number] = producer(number)
                meanwhile(self.last_step())
                time.sleep(0.05)
            for process in producers:
                process.terminate()
            for process in producers:
                code = process.wait(60)  # -15: it was started just now, and did not handle signals yet
                expected = {0, -9} if "produces sums" in self.log_of(process) else {0, -9, -15}
                assert code in expected, f"a producer ended with {code}: {self.log_of(process)}"

    def lines(self) -> list[dict[str, Any]]:
        if not self.trained.exists():
            return []
        text = self.trained.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def last_step(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def check(self, ledger: dict[str, int]) -> None:
        """Each step was trained, each prompt in one step only, no version is too old, and little more was issued."""
        final = {line["step"]: line for line in self.lines()}  # of the weights that were not lost
        assert sorted(final) == list(range(1, self.steps + 1))
        groups = [group for line in final.values() for group in line["groups"]]
        assert len(groups) == len(set(groups)) == self.steps * BATCH
        for step, line in final.items():
            assert all(step - 1 - 3 < version < step for version in line["versions"]), line
        assert ledger["issued"] == sum(ledger.values()) - ledger["issued"], f"the ledger is open: {ledger}"
        assert ledger["trained"] == self.steps * BATCH
        ahead, over = 3 * BATCH, 2
        lost = (self.killed["producer"] + self.killed["trainer"]) * (BATCH + over)
        assert ledger["issued"] <= ledger["trained"] + ahead + over + lost, ledger
